package gateway

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/coder/websocket"
	"golang.org/x/net/dns/dnsmessage"
)

const allowed = `
version: 1
rules:
- {name: web, allow: [web.test, also.web.test, v6.test]}
- {name: api, allow: api.test, inspect: true, methods: [GET, POST], paths: [/v1/*]}
- {name: git, allow: git.test, ports: 22}
- {name: db, allow: db.test, ports: [5432, 8080]}
- {name: cdn, allow: "*.cdn.test"}
- {name: lan, allow: 10.1.0.0/16, ports: any}
- {name: lan-api, allow: 10.2.0.0/16, ports: 80, inspect: true, methods: [GET]}
`

func newAllowed(t testing.TB) *world {
	t.Helper()
	w := newWorld(t, allowed)
	w.host("web.test", "93.184.215.14")
	w.host("also.web.test", "93.184.215.14")
	w.host("api.test", "93.184.215.21")
	w.host("git.test", "93.184.215.22")
	w.host("db.test", "93.184.215.23")
	w.host("a.b.cdn.test", "93.184.215.24")
	w.host("v6.test", "2606:4700::1111")
	w.host("lan.cdn.test", "10.1.0.7")
	return w
}

// https starts an HTTPS server for an address, with HTTP/2, and returns a client that trusts it.
func (w *world) https(dst string, h http.HandlerFunc) *http.Client {
	s := httptest.NewUnstartedServer(h)
	s.EnableHTTP2 = true
	s.StartTLS()
	w.t.Cleanup(s.Close)
	w.serve(dst, s.Listener.Addr().String())
	transport := w.transport()
	transport.ForceAttemptHTTP2 = true
	// The certificate is for example.com; that is between client and server.
	transport.TLSClientConfig = &tls.Config{RootCAs: s.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs, InsecureSkipVerify: true}
	return &http.Client{Transport: transport}
}

func fetch(t testing.TB, c *http.Client, method, url string, body io.Reader) (*http.Response, string) {
	t.Helper()
	q, err := http.NewRequestWithContext(t.Context(), method, url, body)
	if err != nil {
		t.Fatal(err)
	}
	p, err := c.Do(q)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Body.Close()
	b, err := io.ReadAll(p.Body)
	if err != nil {
		t.Fatal(err)
	}
	return p, string(b)
}

func echo(rw http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	fmt.Fprintf(rw, "%s %s %s %s", r.Method, r.Host, r.URL.Path, body)
}

// Programs that a policy allows notice nothing of the gateway.
var legitimate = map[string]func(w *world){
	"a request": func(w *world) {
		w.http("93.184.215.14:80", echo)
		if _, body := fetch(w.t, w.client(), "GET", "http://web.test/a", nil); body != "GET web.test /a " {
			w.t.Error(body)
		}
	},
	"many requests on one connection": func(w *world) {
		remotes := make(map[string]bool)
		w.http("93.184.215.14:80", func(rw http.ResponseWriter, r *http.Request) { remotes[r.RemoteAddr] = true; echo(rw, r) })
		c := w.client()
		for i := range 50 {
			if _, body := fetch(w.t, c, "POST", fmt.Sprintf("http://web.test/%d", i), strings.NewReader("x")); body != fmt.Sprintf("POST web.test /%d x", i) {
				w.t.Fatal(body)
			}
		}
		if len(remotes) != 1 {
			w.t.Errorf("%d connections to the server", len(remotes))
		}
	},
	"two names on one connection": func(w *world) {
		w.http("93.184.215.14:80", echo)
		w.resolve("web.test", dnsmessage.TypeA)
		w.resolve("also.web.test", dnsmessage.TypeA)
		c := w.dial("93.184.215.14:80")
		r := bufio.NewReader(c)
		for _, host := range []string{"web.test", "also.web.test", "web.test:80"} {
			if _, body := get(w.t, c, r, "GET", getFrom(host, "/")); body != "GET "+host+" / " {
				w.t.Error(body)
			}
		}
	},
	"pipelined requests": func(w *world) {
		w.http("93.184.215.14:80", echo)
		w.resolve("web.test", dnsmessage.TypeA)
		c := w.dial("93.184.215.14:80")
		_, _ = io.WriteString(c, getFrom("web.test", "/1")+"POST /2 HTTP/1.1\r\nHost: web.test\r\nContent-Length: 2\r\n\r\nab"+getFrom("web.test", "/3"))
		r := bufio.NewReader(c)
		for i, want := range []string{"GET web.test /1 ", "POST web.test /2 ab", "GET web.test /3 "} {
			if _, body := get(w.t, c, r, "GET", ""); body != want {
				w.t.Errorf("%d: %s", i, body)
			}
		}
	},
	"HEAD, and statuses without a body": func(w *world) {
		w.http("93.184.215.14:80", func(rw http.ResponseWriter, r *http.Request) {
			switch r.URL.Path {
			case "/204":
				rw.WriteHeader(204)
			case "/304":
				rw.WriteHeader(304)
			default:
				rw.Header().Set("Content-Length", "5000")
			}
		})
		c := w.client()
		for _, path := range []string{"/204", "/", "/304", "/"} {
			method := "GET"
			if path == "/" {
				method = "HEAD"
			}
			if p, body := fetch(w.t, c, method, "http://web.test"+path, nil); body != "" {
				w.t.Errorf("%s: %d %q", path, p.StatusCode, body)
			}
		}
	},
	"HTTP/1.0 with a body up to the end": func(w *world) {
		w.raw("93.184.215.14:80", func(c *net.TCPConn) {
			_, _ = http.ReadRequest(bufio.NewReader(c)) // its answer is fixed
			_, _ = io.WriteString(c, "HTTP/1.0 200 OK\r\nServer: old\r\n\r\nhello")
		})
		w.resolve("web.test", dnsmessage.TypeA)
		c := w.dial("93.184.215.14:80")
		if _, body := get(w.t, c, bufio.NewReader(c), "GET", "GET / HTTP/1.0\r\nHost: web.test\r\n\r\n"); body != "hello" {
			w.t.Errorf("%q", body)
		}
	},
	"a chunked upload": func(w *world) {
		w.http("93.184.215.14:80", func(rw http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			fmt.Fprintf(rw, "%x %v", sha256.Sum256(body), r.TransferEncoding)
		})
		data := random(300_000)
		_, body := fetch(w.t, w.client(), "PUT", "http://web.test/up", io.MultiReader(bytes.NewReader(data[:10]), bytes.NewReader(data[10:])))
		if want := fmt.Sprintf("%x [chunked]", sha256.Sum256(data)); body != want {
			w.t.Errorf("%s, want %s", body, want)
		}
	},
	"a chunked download with trailers": func(w *world) {
		w.http("93.184.215.14:80", func(rw http.ResponseWriter, _ *http.Request) {
			rw.Header().Set("Trailer", "X-Sum")
			for range 10 {
				_, _ = io.WriteString(rw, "0123456789")
				rw.(http.Flusher).Flush()
			}
			rw.Header().Set("X-Sum", "45")
		})
		c := w.client()
		for range 2 {
			p, body := fetch(w.t, c, "GET", "http://web.test/", nil)
			if len(body) != 100 || p.Trailer.Get("X-Sum") != "45" {
				w.t.Errorf("%q, trailer %v", body, p.Trailer)
			}
		}
	},
	"100-continue": func(w *world) {
		w.http("93.184.215.14:80", echo)
		w.resolve("web.test", dnsmessage.TypeA)
		c := w.dial("93.184.215.14:80")
		r := bufio.NewReader(c)
		p, _ := get(w.t, c, r, "GET", "POST /a HTTP/1.1\r\nHost: web.test\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
		if p.StatusCode != 100 {
			w.t.Fatalf("status %d", p.StatusCode)
		}
		if _, body := get(w.t, c, r, "POST", "abc"); body != "POST web.test /a abc" {
			w.t.Error(body)
		}
		if _, body := get(w.t, c, r, "GET", getFrom("web.test", "/b")); body != "GET web.test /b " {
			w.t.Errorf("the next request: %s", body)
		}
	},
	"417 in the place of 100": func(w *world) {
		w.http("93.184.215.14:80", func(rw http.ResponseWriter, _ *http.Request) { rw.WriteHeader(417) })
		w.resolve("web.test", dnsmessage.TypeA)
		c := w.dial("93.184.215.14:80")
		r := bufio.NewReader(c)
		p, _ := get(w.t, c, r, "POST", "POST /a HTTP/1.1\r\nHost: web.test\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
		if _, err := r.ReadByte(); p.StatusCode != 417 || !errors.Is(err, io.EOF) {
			w.t.Errorf("status %d, then %v", p.StatusCode, err)
		}
	},
	"an answer before the whole upload": func(w *world) {
		w.raw("93.184.215.14:80", func(c *net.TCPConn) {
			_, _ = http.ReadRequest(bufio.NewReader(c)) // its answer is fixed
			_, _ = io.WriteString(c, "HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\nConnection: close\r\n\r\nbig")
			_ = c.CloseWrite()
			_, _ = io.Copy(io.Discard, c)
		})
		w.resolve("web.test", dnsmessage.TypeA)
		c := w.dial("93.184.215.14:80")
		_, _ = io.WriteString(c, "POST / HTTP/1.1\r\nHost: web.test\r\nContent-Length: 3000000\r\n\r\n")
		go c.Write(make([]byte, 3000000)) //nolint:errcheck // it is cut
		if p, body := get(w.t, c, bufio.NewReader(c), "POST", ""); p.StatusCode != 413 || body != "big" {
			w.t.Errorf("%d %q", p.StatusCode, body)
		}
	},
	"early hints": func(w *world) {
		w.http("93.184.215.14:80", func(rw http.ResponseWriter, r *http.Request) {
			rw.WriteHeader(103)
			echo(rw, r)
		})
		if _, body := fetch(w.t, w.client(), "GET", "http://web.test/", nil); body != "GET web.test / " {
			w.t.Error(body)
		}
	},
	"server-sent events": func(w *world) {
		more := make(chan struct{})
		w.http("93.184.215.14:80", func(rw http.ResponseWriter, _ *http.Request) {
			rw.Header().Set("Content-Type", "text/event-stream")
			for i := range 3 {
				fmt.Fprintf(rw, "data: %d\n", i)
				rw.(http.Flusher).Flush()
				<-more // each event arrives before the next is sent
			}
		})
		q, err := http.NewRequestWithContext(w.t.Context(), "GET", "http://web.test/events", http.NoBody)
		if err != nil {
			w.t.Fatal(err)
		}
		p, err := w.client().Do(q)
		if err != nil {
			w.t.Fatal(err)
		}
		defer p.Body.Close()
		r := bufio.NewReader(p.Body)
		for i := range 3 {
			if line, err := r.ReadString('\n'); line != fmt.Sprintf("data: %d\n", i) {
				w.t.Errorf("%q, %v", line, err)
			}
			more <- struct{}{}
		}
	},
	"WebSocket": func(w *world) {
		w.http("93.184.215.14:80", func(rw http.ResponseWriter, r *http.Request) {
			c, err := websocket.Accept(rw, r, nil)
			if err != nil {
				return
			}
			for {
				kind, b, err := c.Read(r.Context())
				if err != nil {
					return
				}
				_ = c.Write(r.Context(), kind, append([]byte("echo "), b...)) // the client looks
			}
		})
		c, _, err := websocket.Dial(w.t.Context(), "ws://web.test/chat", &websocket.DialOptions{HTTPClient: w.client()})
		if err != nil {
			w.t.Fatal(err)
		}
		for _, s := range []string{"a", strings.Repeat("b", 20000)} {
			_ = c.Write(w.t.Context(), websocket.MessageText, []byte(s)) // seen by the read
			if _, b, err := c.Read(w.t.Context()); err != nil || string(b) != "echo "+s {
				w.t.Errorf("%.20q, %v", b, err)
			}
		}
		_ = c.Close(websocket.StatusNormalClosure, "")
	},
	"inspected requests": func(w *world) {
		w.http("93.184.215.21:80", echo)
		c := w.client()
		for _, method := range []string{"GET", "POST"} {
			if _, body := fetch(w.t, c, method, "http://api.test/v1/x?y=/../z", nil); body != method+" api.test /v1/x " {
				w.t.Error(body)
			}
		}
	},
	"odd paths where none is asked for": func(w *world) {
		w.http("93.184.215.14:80", func(rw http.ResponseWriter, r *http.Request) { fmt.Fprint(rw, r.URL.Path) })
		w.resolve("web.test", dnsmessage.TypeA)
		c := w.dial("93.184.215.14:80")
		if _, body := get(w.t, c, bufio.NewReader(c), "GET", getFrom("web.test", "//debian/pool;a/../x%2fy")); body != "//debian/pool;a/../x/y" {
			w.t.Errorf("%q", body)
		}
	},
	"HTTP on another port": func(w *world) {
		w.http("93.184.215.23:8080", echo)
		if _, body := fetch(w.t, w.client(), "GET", "http://db.test:8080/a", nil); body != "GET db.test:8080 /a " {
			w.t.Error(body)
		}
	},
	"inspected HTTP to an address": func(w *world) {
		w.http("10.2.0.7:80", echo)
		for _, host := range []string{"10.2.0.7", "any.name"} {
			c := w.dial("10.2.0.7:80")
			if _, body := get(w.t, c, bufio.NewReader(c), "GET", getFrom(host, "/")); body != "GET "+host+" / " {
				w.t.Error(body)
			}
		}
	},
	"HTTP/2 over TLS": func(w *world) {
		c := w.https("93.184.215.14:443", echo)
		for range 3 {
			if p, body := fetch(w.t, c, "POST", "https://web.test/a", strings.NewReader("x")); p.ProtoMajor != 2 || body != "POST web.test /a x" {
				w.t.Errorf("%s %s", p.Proto, body)
			}
		}
	},
	"TLS 1.2": func(w *world) {
		c := w.https("93.184.215.24:443", echo)
		c.Transport.(*http.Transport).TLSClientConfig.MaxVersion = tls.VersionTLS12
		if p, _ := fetch(w.t, c, "GET", "https://a.b.cdn.test/", nil); p.TLS.Version != tls.VersionTLS12 {
			w.t.Errorf("version %x", p.TLS.Version)
		}
	},
	"TLS on another port": func(w *world) {
		c := w.https("93.184.215.23:5432", echo)
		if _, body := fetch(w.t, c, "GET", "https://db.test:5432/", nil); body != "GET db.test:5432 / " {
			w.t.Error(body)
		}
	},
	"IPv6": func(w *world) {
		w.http("[2606:4700::1111]:80", echo)
		if _, body := fetch(w.t, w.client(), "GET", "http://v6.test/", nil); body != "GET v6.test / " {
			w.t.Error(body)
		}
	},
	"a name in an allowed private range": func(w *world) {
		w.http("10.1.0.7:80", echo)
		if _, body := fetch(w.t, w.client(), "GET", "http://lan.cdn.test/", nil); body != "GET lan.cdn.test / " {
			w.t.Error(body)
		}
	},
	"a server that speaks first": func(w *world) {
		w.raw("93.184.215.22:22", func(c *net.TCPConn) {
			_, _ = io.WriteString(c, "SSH-2.0-server\r\n")
			line, _ := bufio.NewReader(c).ReadString('\n')
			_, _ = io.WriteString(c, "hello "+line)
		})
		w.resolve("git.test", dnsmessage.TypeA)
		c := w.dial("93.184.215.22:22")
		r := bufio.NewReader(c)
		if line, err := r.ReadString('\n'); line != "SSH-2.0-server\r\n" {
			w.t.Fatalf("%q, %v", line, err)
		}
		_, _ = io.WriteString(c, "SSH-2.0-OpenSSH_9.6 Debian-1\r\n")
		if line, err := r.ReadString('\n'); line != "hello SSH-2.0-OpenSSH_9.6 Debian-1\r\n" {
			w.t.Errorf("%q, %v", line, err)
		}
	},
	"a client that says nothing": func(w *world) {
		w.raw("93.184.215.22:22", func(c *net.TCPConn) { fmt.Fprint(c, "12:00") })
		w.resolve("git.test", dnsmessage.TypeA)
		c := w.dial("93.184.215.22:22")
		if b, err := io.ReadAll(c); string(b) != "12:00" || err != nil {
			w.t.Errorf("%q, %v", b, err)
		}
		_ = c.CloseWrite()
	},
	"a binary protocol": func(w *world) {
		w.raw("93.184.215.23:5432", echoServer)
		w.resolve("db.test", dnsmessage.TypeA)
		for _, first := range []string{"\x00\x00\x00\x08\x04\xd2\x16\x2f", "*1\r\n$4\r\nPING\r\n", "AMQP\x00\x00\x09\x01", "EHLO a b\r\n", "\x20\x00\x00\x01"} {
			c := w.dial("93.184.215.23:5432")
			_, _ = io.WriteString(c, first)
			b := make([]byte, len(first))
			if _, err := io.ReadFull(c, b); err != nil || string(b) != first {
				w.t.Errorf("%q, %v", b, err)
			}
		}
	},
	"half-close by the client": func(w *world) {
		w.raw("10.1.0.7:9000", func(c *net.TCPConn) {
			b, err := io.ReadAll(c)
			fmt.Fprintf(c, "%d bytes, %v", len(b), err)
		})
		c := w.dial("10.1.0.7:9000")
		_, _ = c.Write(make([]byte, 100_000))
		_ = c.CloseWrite()
		if b, err := io.ReadAll(c); string(b) != "100000 bytes, <nil>" || err != nil {
			w.t.Errorf("%q, %v", b, err)
		}
	},
	"half-close by the server": func(w *world) {
		got := make(chan int, 1)
		w.raw("93.184.215.22:22", func(c *net.TCPConn) {
			_, _ = io.WriteString(c, "banner")
			_ = c.CloseWrite()
			b, _ := io.ReadAll(c)
			got <- len(b)
		})
		w.resolve("git.test", dnsmessage.TypeA)
		c := w.dial("93.184.215.22:22")
		if b, err := io.ReadAll(c); string(b) != "banner" || err != nil {
			w.t.Fatalf("%q, %v", b, err)
		}
		_, _ = c.Write(make([]byte, 50_000))
		_ = c.CloseWrite()
		if n := <-got; n != 50_000 {
			w.t.Errorf("%d bytes", n)
		}
	},
	"half-close after an HTTP request": func(w *world) {
		w.http("93.184.215.14:80", echo)
		w.resolve("web.test", dnsmessage.TypeA)
		c := w.dial("93.184.215.14:80")
		_, _ = io.WriteString(c, getFrom("web.test", "/"))
		_ = c.CloseWrite()
		if b, err := io.ReadAll(c); !strings.HasSuffix(string(b), "GET web.test / ") || err != nil {
			w.t.Errorf("%q, %v", b, err)
		}
	},
	"large transfers, both ways at once": func(w *world) {
		w.raw("10.1.0.7:9000", echoServer)
		c := w.dial("10.1.0.7:9000")
		data := random(20 << 20)
		go func() {
			_, _ = c.Write(data) // the client counts
			_ = c.CloseWrite()
		}()
		sum := sha256.New()
		if n, err := io.Copy(sum, c); n != int64(len(data)) || err != nil || [32]byte(sum.Sum(nil)) != sha256.Sum256(data) {
			w.t.Errorf("%d bytes, %v", n, err)
		}
	},
	"a large upload and download over HTTP": func(w *world) {
		w.http("93.184.215.14:80", func(rw http.ResponseWriter, r *http.Request) {
			b, _ := io.ReadAll(r.Body)
			_, _ = rw.Write(b)
		})
		data := random(5 << 20)
		c := w.client()
		for range 2 {
			if _, body := fetch(w.t, c, "POST", "http://web.test/", bytes.NewReader(data)); body != string(data) {
				w.t.Errorf("%d other bytes", len(body))
			}
		}
	},
	"a server that ends idle connections": func(w *world) {
		w.http("93.184.215.14:80", func(rw http.ResponseWriter, r *http.Request) {
			rw.Header().Set("Connection", "close")
			echo(rw, r)
		})
		c := w.client()
		for range 5 {
			fetch(w.t, c, "GET", "http://web.test/", nil)
		}
	},
}

func random(n int) []byte {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{1})
	_, _ = r.Read(b) // it has none
	return b
}

func TestLegitimate(t *testing.T) {
	for name, f := range legitimate {
		t.Run(name, func(t *testing.T) {
			w := newAllowed(t)
			f(w)
			for _, e := range w.all() {
				if !e.Allow {
					t.Errorf("refused: %+v", e)
				}
			}
		})
	}
}

// Java asks for HTTP/2 with the first request of a connection. The server gets the request without
// that, and otherwise unchanged.
func TestUpgradeToH2CIsIgnored(t *testing.T) {
	w := newWorld(t, attacked)
	w.host("web.test", "93.184.215.14")
	got := make(chan *http.Request, 2)
	w.http("93.184.215.14:80", func(rw http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		got <- r
		_, _ = rw.Write(body)
	})
	w.resolve("web.test", dnsmessage.TypeA)
	c := w.dial("93.184.215.14:80")
	r := bufio.NewReader(c)
	for _, fields := range []string{"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABk\r\nUpgrade: h2c\r\n", ""} {
		p, body := get(t, c, r, http.MethodPost, "POST /x HTTP/1.1\r\n"+fields+"Host: web.test\r\nX-A: b\r\nContent-Length: 5\r\n\r\nhello")
		if p.StatusCode != http.StatusOK || body != "hello" {
			t.Errorf("%d %q", p.StatusCode, body)
		}
		if h := (<-got).Header; len(h) != 2 || h.Get("X-A") != "b" || h.Get("Content-Length") != "5" {
			t.Errorf("the server got %v", h)
		}
	}
}
