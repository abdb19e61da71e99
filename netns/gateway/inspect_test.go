package gateway

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/coder/websocket"
	"golang.org/x/net/dns/dnsmessage"

	"github.com/sandboxd/sandboxd/netns/gateway/ca"
	"github.com/sandboxd/sandboxd/netns/policy"
)

const inspectedPolicy = `
version: 1
rules:
- {name: api, allow: [api.test, also.api.test], inspect: true, methods: [GET, POST], paths: [/v1/*]}
- {name: no-admin, deny: api.test, inspect: true, paths: [/v1/admin/*]}
- {name: all, allow: "*.in.test", ports: [443, 8443], inspect: true}
- {name: web, allow: web.test}
- {name: plain, allow: plain.test, ports: [443, 8443]}
- {name: lan, allow: 10.2.0.0/16, inspect: true, methods: [GET]}
`

// public is the authority that the host of the tests trusts.
var public = sync.OnceValues(func() (*ca.Authority, error) { return ca.New(newClock().now, 0) })

func pool(t testing.TB, a *ca.Authority) *x509.CertPool {
	t.Helper()
	p := x509.NewCertPool()
	if !p.AppendCertsFromPEM(a.Certificate()) {
		t.Fatal("no certificate")
	}
	return p
}

// newInspected is a world with an authority.
func newInspected(t testing.TB, change ...func(*Options, *limits)) *world {
	t.Helper()
	w := newWorld(t, inspectedPolicy, append([]func(*Options, *limits){func(o *Options, _ *limits) {
		authority, err := ca.New(o.Now(), 0)
		if err != nil {
			t.Fatal(err)
		}
		roots, err := public()
		if err != nil {
			t.Fatal(err)
		}
		o.CA, o.Roots = authority, pool(t, roots)
	}}, change...)...)
	for name, addr := range map[string]string{
		"api.test": "93.184.215.21", "also.api.test": "93.184.215.21", "a.in.test": "93.184.215.30", "b.in.test": "93.184.215.30",
		"web.test": "93.184.215.14", "plain.test": "93.184.215.30",
	} {
		w.host(name, addr)
	}
	return w
}

// secure starts an HTTPS server for an address, with a certificate for a host.
func (w *world) secure(dst, host string, h http.HandlerFunc, protocols ...string) {
	w.t.Helper()
	roots, err := public()
	if err != nil {
		w.t.Fatal(err)
	}
	leaf, err := roots.Leaf(host)
	if err != nil {
		w.t.Fatal(err)
	}
	w.secureWith(dst, h, &tls.Config{Certificates: []tls.Certificate{*leaf}}, protocols...)
}

func (w *world) secureWith(dst string, h http.HandlerFunc, config *tls.Config, protocols ...string) {
	s := httptest.NewUnstartedServer(h)
	s.Config.ErrorLog = log.New(io.Discard, "", 0) // clients that refuse its certificate
	s.TLS = config
	s.EnableHTTP2 = slices.Contains(protocols, "h2")
	s.TLS.NextProtos = protocols
	s.StartTLS()
	w.t.Cleanup(s.Close)
	w.serve(dst, s.Listener.Addr().String())
}

// trusting returns an HTTP client of the sandbox that trusts its authority.
func (w *world) trusting(protocols ...string) *http.Client {
	t := w.transport()
	t.TLSClientConfig = w.clientTLS("", protocols...)
	t.ForceAttemptHTTP2 = slices.Contains(protocols, "h2")
	return &http.Client{Transport: t}
}

func (w *world) clientTLS(name string, protocols ...string) *tls.Config {
	return &tls.Config{RootCAs: pool(w.t, w.n.opts.CA), Time: w.clock.Now, NextProtos: protocols, ServerName: name}
}

// secureDial connects to api.test as a program inside does, with TLS.
func (w *world) secureDial(protocols ...string) *tls.Conn {
	w.t.Helper()
	c := tls.Client(w.dial("93.184.215.21:443"), w.clientTLS("api.test", protocols...))
	if err := c.HandshakeContext(w.t.Context()); err != nil {
		w.t.Fatal(err)
	}
	return c
}

var protocols = map[string][]string{"HTTP1": {"http/1.1"}, "HTTP2": {"h2", "http/1.1"}}

// legitimateInspected run with HTTP/1.1 and with HTTP/2 on both sides.
var legitimateInspected = map[string]func(w *world, protocols []string){
	"requests": func(w *world, protocols []string) {
		remotes := make(map[string]bool)
		w.secure("93.184.215.21:443", "api.test", func(rw http.ResponseWriter, r *http.Request) {
			remotes[r.RemoteAddr] = true
			fmt.Fprint(rw, r.Proto, " ", r.RequestURI, " ")
			echo(rw, r)
		}, protocols...)
		c := w.trusting(protocols...)
		for i := range 20 {
			p, body := fetch(w.t, c, "POST", fmt.Sprintf("https://api.test/v1/%d%%7e?q=%%zz", i), strings.NewReader("x"))
			if want := fmt.Sprintf("%s /v1/%d%%7e?q=%%zz POST api.test /v1/%d~ x", p.Proto, i, i); body != want || p.StatusCode != 200 {
				w.t.Fatalf("%s, want %s", body, want)
			}
			if want := protocols[0] == "h2"; (p.ProtoMajor == 2) != want {
				w.t.Errorf("%s", p.Proto)
			}
		}
		if len(remotes) != 1 {
			w.t.Errorf("%d connections to the server", len(remotes))
		}
	},
	"HEAD, and statuses without a body": func(w *world, protocols []string) {
		w.secure("93.184.215.30:443", "a.in.test", func(rw http.ResponseWriter, r *http.Request) {
			switch r.URL.Path {
			case "/204":
				rw.WriteHeader(204)
			case "/304":
				rw.WriteHeader(304)
			case "/418":
				rw.WriteHeader(418)
			default:
				rw.Header().Set("Content-Length", "5000")
			}
		}, protocols...)
		c := w.trusting(protocols...)
		for _, path := range []string{"/204", "/", "/304", "/", "/418"} {
			method := "GET"
			if path == "/" {
				method = "HEAD"
			}
			p, body := fetch(w.t, c, method, "https://a.in.test"+path, nil)
			if body != "" || path != "/" && path[1:] != fmt.Sprint(p.StatusCode) || path == "/" && p.ContentLength != 5000 {
				w.t.Errorf("%s: %d %q %d", path, p.StatusCode, body, p.ContentLength)
			}
		}
	},
	"fields": func(w *world, protocols []string) {
		w.secure("93.184.215.30:443", "a.in.test", func(rw http.ResponseWriter, r *http.Request) {
			rw.Header()["Date"], rw.Header()["Content-Type"] = nil, nil
			rw.Header()["X-Multi"] = []string{"a", "b"}
			fmt.Fprintf(rw, "%q %q %q", r.Header["Cookie"], r.Header["X-Multi"], r.Header["User-Agent"])
		}, protocols...)
		q, err := http.NewRequestWithContext(w.t.Context(), "GET", "https://a.in.test/", http.NoBody)
		if err != nil {
			w.t.Fatal(err)
		}
		q.Header = http.Header{"Cookie": {"a=b; c=d"}, "X-Multi": {"1", "2"}, "User-Agent": nil}
		p, err := w.trusting(protocols...).Do(q)
		if err != nil {
			w.t.Fatal(err)
		}
		defer p.Body.Close()
		if b, err := io.ReadAll(p.Body); string(b) != `["a=b; c=d"] ["1" "2"] []` || err != nil {
			w.t.Errorf("%s, %v", b, err)
		}
		if fmt.Sprint(p.Header["X-Multi"], p.Header["Date"], p.Header["Content-Type"]) != "[a b] [] []" {
			w.t.Errorf("%v", p.Header)
		}
	},
	"a large upload and download": func(w *world, protocols []string) {
		w.secure("93.184.215.30:443", "a.in.test", func(rw http.ResponseWriter, r *http.Request) {
			b, _ := io.ReadAll(r.Body)
			_, _ = rw.Write(b)
		}, protocols...)
		data := random(5 << 20)
		c := w.trusting(protocols...)
		for _, body := range []io.Reader{bytes.NewReader(data), io.MultiReader(bytes.NewReader(data))} { // the second without a length
			if _, got := fetch(w.t, c, "POST", "https://a.in.test/", body); sha256.Sum256([]byte(got)) != sha256.Sum256(data) {
				w.t.Errorf("%d other bytes", len(got))
			}
		}
	},
	"100-continue": func(w *world, protocols []string) {
		w.secure("93.184.215.30:443", "a.in.test", echo, protocols...)
		c := w.trusting(protocols...)
		c.Transport.(*http.Transport).ExpectContinueTimeout = time.Hour
		q, err := http.NewRequestWithContext(w.t.Context(), "POST", "https://a.in.test/", strings.NewReader("abc"))
		if err != nil {
			w.t.Fatal(err)
		}
		q.Header.Set("Expect", "100-continue")
		p, err := c.Do(q)
		if err != nil {
			w.t.Fatal(err)
		}
		defer p.Body.Close()
		if b, _ := io.ReadAll(p.Body); string(b) != "POST a.in.test / abc" {
			w.t.Errorf("%s", b)
		}
	},
	"server-sent events": func(w *world, protocols []string) {
		more := make(chan struct{})
		w.secure("93.184.215.30:443", "a.in.test", func(rw http.ResponseWriter, _ *http.Request) {
			rw.Header().Set("Content-Type", "text/event-stream")
			for i := range 3 {
				fmt.Fprintf(rw, "data: %d\n", i)
				rw.(http.Flusher).Flush()
				<-more // each event arrives before the next is sent
			}
		}, protocols...)
		q, err := http.NewRequestWithContext(w.t.Context(), "GET", "https://a.in.test/events", http.NoBody)
		if err != nil {
			w.t.Fatal(err)
		}
		p, err := w.trusting(protocols...).Do(q)
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
	"trailers": func(w *world, protocols []string) {
		w.secure("93.184.215.30:443", "a.in.test", func(rw http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			rw.Header().Set("Trailer", "X-Sum")
			_, _ = rw.Write(body)
			rw.(http.Flusher).Flush()
			rw.Header().Set("X-Sum", "45"+r.Trailer.Get("X-Up"))
			if r.URL.Path == "/more" {
				rw.Header().Set(http.TrailerPrefix+"X-More", "46")
			}
		}, protocols...)
		c := w.trusting(protocols...)
		for path, more := range map[string]string{"/": "", "/more": "46"} {
			q, err := http.NewRequestWithContext(w.t.Context(), "POST", "https://a.in.test"+path, io.MultiReader(strings.NewReader("body")))
			if err != nil {
				w.t.Fatal(err)
			}
			q.Trailer = http.Header{"X-Up": {"up"}}
			p, err := c.Do(q)
			if err != nil {
				w.t.Fatal(err)
			}
			b, err := io.ReadAll(p.Body)
			_ = p.Body.Close()
			if string(b) != "body" || err != nil || p.Trailer.Get("X-Sum") != "45up" || p.Trailer.Get("X-More") != more {
				w.t.Errorf("%q, %v, trailer %v", b, err, p.Trailer)
			}
		}
	},
	"requests side by side": func(w *world, protocols []string) {
		var mu sync.Mutex
		there, all := 0, make(chan struct{})
		w.secure("93.184.215.30:443", "a.in.test", func(rw http.ResponseWriter, r *http.Request) {
			mu.Lock()
			if there++; there == 20 {
				close(all)
			}
			mu.Unlock()
			<-all // none is answered before the last has come
			echo(rw, r)
		}, protocols...)
		c := w.trusting(protocols...)
		var clients sync.WaitGroup
		for i := range 20 {
			clients.Go(func() {
				q, _ := http.NewRequestWithContext(w.t.Context(), "GET", fmt.Sprintf("https://a.in.test/%d", i), http.NoBody)
				p, err := c.Do(q)
				if err != nil {
					w.t.Error(err)
					return
				}
				defer p.Body.Close()
				if b, err := io.ReadAll(p.Body); string(b) != fmt.Sprintf("GET a.in.test /%d ", i) || err != nil {
					w.t.Errorf("%q, %v", b, err)
				}
			})
		}
		clients.Wait()
	},
	"an address without a name": func(w *world, protocols []string) {
		w.secure("10.2.0.7:443", "10.2.0.7", echo, protocols...)
		if _, body := fetch(w.t, w.trusting(protocols...), "GET", "https://10.2.0.7/", nil); body != "GET 10.2.0.7 / " {
			w.t.Error(body)
		}
	},
	"another port": func(w *world, protocols []string) {
		w.secure("93.184.215.30:8443", "a.in.test", echo, protocols...)
		w.resolve("plain.test", dnsmessage.TypeA) // opens the port without inspection: the server is dialled at once
		if _, body := fetch(w.t, w.trusting(protocols...), "GET", "https://a.in.test:8443/", nil); body != "GET a.in.test:8443 / " {
			w.t.Error(body)
		}
	},
	"TLS 1.2": func(w *world, protocols []string) {
		w.secure("93.184.215.30:443", "a.in.test", echo, protocols...)
		c := w.trusting(protocols...)
		c.Transport.(*http.Transport).TLSClientConfig.MaxVersion = tls.VersionTLS12
		if p, _ := fetch(w.t, c, "GET", "https://a.in.test/", nil); p.TLS.Version != tls.VersionTLS12 {
			w.t.Errorf("version %x", p.TLS.Version)
		}
	},
	"a server that ends idle connections": func(w *world, protocols []string) {
		var mu sync.Mutex
		remotes := make(map[string]bool)
		w.secure("93.184.215.30:443", "a.in.test", func(rw http.ResponseWriter, r *http.Request) {
			mu.Lock()
			remotes[r.RemoteAddr] = true
			mu.Unlock()
			rw.Header().Set("Connection", "close") // GOAWAY in HTTP/2
			echo(rw, r)
		}, protocols...)
		c := w.trusting(protocols...)
		for range 6 {
			if p, body := fetch(w.t, c, "GET", "https://a.in.test/", nil); p.StatusCode != 200 {
				w.t.Errorf("%d %s", p.StatusCode, body)
			}
		}
		if len(remotes) != 6 {
			w.t.Errorf("%d connections to the server", len(remotes))
		}
	},
}

func TestLegitimateInspected(t *testing.T) {
	for name, f := range legitimateInspected {
		for version, protocols := range protocols {
			t.Run(version+" "+name, func(t *testing.T) {
				w := newInspected(t)
				f(w, protocols)
				requests := 0
				for _, e := range w.all() {
					if !e.Allow {
						t.Errorf("refused: %+v", e)
					}
					if e.Kind == Request {
						requests++
					}
					if want := map[bool]string{true: "h2", false: "https"}[protocols[0] == "h2"]; e.Kind == Request && e.Protocol != want {
						t.Errorf("%+v", e)
					}
				}
				if requests == 0 {
					t.Error("no request is recorded")
				}
			})
		}
	}
}

// The version of HTTP is one that both sides speak.
func TestProtocolIsAgreed(t *testing.T) {
	for _, tc := range []struct{ client, server, want string }{
		{"h2,http/1.1", "http/1.1", "HTTP/1.1"},
		{"h2,http/1.1", "", "HTTP/1.1"},
		{"http/1.1", "h2,http/1.1", "HTTP/1.1"},
		{"", "h2,http/1.1", "HTTP/1.1"},
		{"h2", "h2,http/1.1", "HTTP/2.0"},
		{"h2,http/1.1", "h2", "HTTP/2.0"},
	} {
		t.Run(tc.client+" "+tc.server, func(t *testing.T) {
			w := newInspected(t)
			list := func(s string) []string { return strings.FieldsFunc(s, func(r rune) bool { return r == ',' }) }
			w.secure("93.184.215.30:443", "a.in.test", func(rw http.ResponseWriter, r *http.Request) { fmt.Fprint(rw, r.Proto) }, list(tc.server)...)
			if p, body := fetch(t, w.trusting(list(tc.client)...), "GET", "https://a.in.test/", nil); body != tc.want || p.Proto != tc.want {
				t.Errorf("%s to us, %s to the server", p.Proto, body)
			}
		})
	}
}

// A call of gRPC: both directions at once, and trailers behind headers without a body.
func TestBothDirectionsAtOnce(t *testing.T) {
	w := newInspected(t)
	w.secure("93.184.215.30:443", "a.in.test", func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Content-Type", "application/grpc")
		if r.URL.Path == "/fails" {
			rw.Header().Set("Grpc-Status", "5")
			return
		}
		rw.WriteHeader(200)
		rw.(http.Flusher).Flush() // before the first message
		b := make([]byte, 5)
		for {
			if _, err := io.ReadFull(r.Body, b); err != nil {
				break
			}
			_, _ = rw.Write(append([]byte("re-"), b...))
			rw.(http.Flusher).Flush()
		}
		rw.Header().Set(http.TrailerPrefix+"Grpc-Status", "0")
	}, "h2")
	c := w.trusting("h2")
	body, send := io.Pipe()
	q, err := http.NewRequestWithContext(t.Context(), "POST", "https://a.in.test/echo", body)
	if err != nil {
		t.Fatal(err)
	}
	q.Header.Set("Te", "trailers")
	p, err := c.Do(q)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Body.Close()
	for i := range 5 {
		message := fmt.Sprintf("msg %d", i)
		if _, err := io.WriteString(send, message); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 8)
		if _, err := io.ReadFull(p.Body, b); err != nil || string(b) != "re-"+message {
			t.Fatalf("%q, %v", b, err)
		}
	}
	_ = send.Close()
	if rest, err := io.ReadAll(p.Body); len(rest) > 0 || err != nil || p.Trailer.Get("Grpc-Status") != "0" {
		t.Errorf("%q, %v, %v", rest, err, p.Trailer)
	}
	if p, _ := fetch(t, c, "POST", "https://a.in.test/fails", strings.NewReader("x")); p.Header.Get("Grpc-Status") != "5" {
		t.Errorf("%v", p.Header)
	}
}

func TestWebSocketInspected(t *testing.T) {
	w := newInspected(t)
	w.secure("93.184.215.30:443", "a.in.test", func(rw http.ResponseWriter, r *http.Request) {
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
	}, "h2", "http/1.1")
	c, _, err := websocket.Dial(t.Context(), "wss://a.in.test/chat", &websocket.DialOptions{HTTPClient: w.trusting("http/1.1")})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []string{"a", strings.Repeat("b", 20000)} {
		_ = c.Write(t.Context(), websocket.MessageText, []byte(s)) // seen by the read
		if _, b, err := c.Read(t.Context()); err != nil || string(b) != "echo "+s {
			t.Errorf("%.20q, %v", b, err)
		}
	}
	_ = c.Close(websocket.StatusNormalClosure, "")
	for _, e := range w.all() {
		if !e.Allow || e.Kind == Connection && e.Protocol != "websocket" {
			t.Errorf("%+v", e)
		}
	}
}

// A failure of a server is told in the protocol of the client, and recorded.
func TestServersThatFailInspected(t *testing.T) {
	other, err := ca.New(newClock().now, 0)
	if err != nil {
		t.Fatal(err)
	}
	expired, err := ca.New(newClock().now.Add(-48*time.Hour), 24*time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	roots, err := public()
	if err != nil {
		t.Fatal(err)
	}
	leaf := func(a *ca.Authority, host string) *tls.Config {
		l, err := a.Leaf(host)
		if err != nil {
			t.Fatal(err)
		}
		return &tls.Config{Certificates: []tls.Certificate{*l}}
	}
	for version, protocols := range protocols {
		for name, tc := range map[string]struct {
			config *tls.Config
			reason string
		}{
			"another name":              {leaf(roots, "evil.test"), "the certificate of a.in.test at 93.184.215.30:443 is not valid"},
			"a name below":              {leaf(roots, "x.a.in.test"), "is not valid"},
			"another authority":         {leaf(other, "a.in.test"), "unknown authority"},
			"an expired one":            {leaf(expired, "a.in.test"), "is not valid"},
			"TLS 1.1 only":              {&tls.Config{Certificates: leaf(roots, "a.in.test").Certificates, MaxVersion: tls.VersionTLS11, MinVersion: tls.VersionTLS10}, "TLS handshake with a.in.test"},
			"it asks for a certificate": {&tls.Config{Certificates: leaf(roots, "a.in.test").Certificates, ClientAuth: tls.RequireAnyClientCert, MaxVersion: tls.VersionTLS12}, "TLS handshake with a.in.test"},
			"no server":                 {nil, "no route to host"},
		} {
			t.Run(version+" "+name, func(t *testing.T) {
				w := newInspected(t)
				if tc.config != nil {
					w.secureWith("93.184.215.30:443", func(rw http.ResponseWriter, r *http.Request) { t.Error("a request came") }, tc.config.Clone(), protocols...)
				}
				c := w.trusting(protocols...)
				for range 2 {
					if p, body := fetch(t, c, "GET", "https://a.in.test/", nil); p.StatusCode != 502 || !strings.Contains(body, tc.reason) {
						t.Errorf("%d %s", p.StatusCode, body)
					}
				}
				recorded := 0
				for _, e := range w.all() {
					if e.Kind == Request && e.Allow && strings.Contains(e.Reason, tc.reason) {
						recorded++
					}
					if e.Out > 0 {
						t.Errorf("bytes went out: %+v", e)
					}
				}
				if recorded != 2 {
					t.Errorf("%d are recorded", recorded)
				}
			})
		}
	}
}

// A response that is cut must not look whole.
func TestCutResponses(t *testing.T) {
	for version, protocols := range protocols {
		t.Run(version, func(t *testing.T) {
			w := newInspected(t)
			w.secure("93.184.215.30:443", "a.in.test", func(rw http.ResponseWriter, _ *http.Request) {
				_, _ = io.WriteString(rw, "half")
				rw.(http.Flusher).Flush()
				panic(http.ErrAbortHandler)
			}, protocols...)
			q, err := http.NewRequestWithContext(t.Context(), "GET", "https://a.in.test/", http.NoBody)
			if err != nil {
				t.Fatal(err)
			}
			p, err := w.trusting(protocols...).Do(q)
			if err != nil {
				t.Fatal(err)
			}
			defer p.Body.Close()
			if b, err := io.ReadAll(p.Body); string(b) != "half" || err == nil {
				t.Errorf("%q, %v", b, err)
			}
		})
	}
}

// A client that gives up ends its request at the server, and no other.
func TestCancelledRequests(t *testing.T) {
	w := newInspected(t)
	begun, ended := make(chan struct{}), make(chan struct{})
	w.secure("93.184.215.30:443", "a.in.test", func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/" {
			echo(rw, r)
			return
		}
		close(begun)
		<-r.Context().Done()
		close(ended)
	}, "h2")
	c := w.trusting("h2")
	ctx, cancel := context.WithCancel(t.Context())
	q, err := http.NewRequestWithContext(ctx, "GET", "https://a.in.test/long", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		<-begun
		cancel()
	}()
	if p, err := c.Do(q); err == nil {
		_ = p.Body.Close()
		t.Error("answered")
	}
	<-ended
	fetch(t, c, "GET", "https://a.in.test/", nil)
}

func TestSetPolicyInspected(t *testing.T) {
	for version, protocols := range protocols {
		t.Run(version, func(t *testing.T) {
			w := newInspected(t)
			w.secure("93.184.215.21:443", "api.test", echo, protocols...)
			c := w.trusting(protocols...)
			if p, _ := fetch(t, c, "GET", "https://api.test/v1/x", nil); p.StatusCode != 200 {
				t.Errorf("%d", p.StatusCode)
			}
			p := parse(t, `{version: 1, rules: [{allow: api.test, inspect: true, paths: /v2/*}]}`)
			w.n.SetPolicy(p)
			for path, want := range map[string]int{"/v1/x": 403, "/v2/x": 200} {
				if p, body := fetch(t, c, "GET", "https://api.test"+path, nil); p.StatusCode != want {
					t.Errorf("%s: %d %s", path, p.StatusCode, body)
				}
			}
			w.n.SetPolicy(parse(t, `{version: 1}`))
			q, err := http.NewRequestWithContext(t.Context(), "GET", "https://api.test/v2/x", http.NoBody)
			if err != nil {
				t.Fatal(err)
			}
			if p, err := c.Do(q); err == nil {
				_ = p.Body.Close()
				t.Error("answered under a policy that allows nothing")
			}
		})
	}
}

// Without an authority TLS that has to be read is refused, as before.
func TestNoAuthority(t *testing.T) {
	w := newInspected(t, func(o *Options, _ *limits) { o.CA = nil })
	w.resolve("a.in.test", dnsmessage.TypeA)
	c := w.dial("93.184.215.30:443")
	_, _ = io.WriteString(c, hello(sni("a.in.test")))
	if _, reset := wasReset(c); !reset {
		t.Error("no reset")
	}
	events := w.all()
	if e := events[len(events)-1]; e.Allow || !strings.Contains(e.Reason, "those in TLS cannot be") {
		t.Errorf("%+v", e)
	}
}

func TestCloseInspected(t *testing.T) {
	for version, protocols := range protocols {
		t.Run(version, func(t *testing.T) {
			w := newInspected(t)
			begun := make(chan struct{})
			w.secure("93.184.215.30:443", "a.in.test", func(_ http.ResponseWriter, r *http.Request) {
				close(begun)
				<-r.Context().Done()
			}, protocols...)
			go func() {
				<-begun
				w.n.Close()
			}()
			q, err := http.NewRequestWithContext(t.Context(), "GET", "https://a.in.test/", http.NoBody)
			if err != nil {
				t.Fatal(err)
			}
			if p, err := w.trusting(protocols...).Do(q); err == nil {
				_ = p.Body.Close()
				t.Errorf("answered with %d", p.StatusCode)
			}
			for _, e := range w.all() {
				if e.Kind == Request && !strings.Contains(e.Reason, "the network was closed") && protocols[0] == "h2" {
					t.Errorf("%+v", e)
				}
			}
			if n := w.n.tls.open.Load(); n != 0 || w.n.tls.h2.streams.Load() != 0 || w.n.heads.Load() != 0 {
				t.Errorf("%d connections, %d requests, %d heads are left", n, w.n.tls.h2.streams.Load(), w.n.heads.Load())
			}
		})
	}
}

// BenchmarkInspected is a request on a connection of its own, and one on a connection that is kept,
// relayed unread and inspected. Client, server and gateway are one process; its processor time is
// that of all three, and less than the time that passes depends on what else the machine does.
func BenchmarkInspected(b *testing.B) {
	for version, protocols := range protocols {
		for name, host := range map[string]string{"relayed": "web.test", "inspected": "a.in.test"} {
			for _, kept := range []bool{false, true} {
				b.Run(fmt.Sprintf("%s/%s/kept=%v", version, name, kept), func(b *testing.B) {
					w := newInspected(b)
					addr := map[string]string{"web.test": "93.184.215.14:443", "a.in.test": "93.184.215.30:443"}[host]
					w.secure(addr, host, func(rw http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(rw, "ok") }, protocols...)
					c := w.trusting(protocols...)
					roots, err := public()
					if err != nil {
						b.Fatal(err)
					}
					c.Transport.(*http.Transport).TLSClientConfig.RootCAs.AppendCertsFromPEM(roots.Certificate())
					go func() {
						for range w.events { // they are dropped
						}
					}()
					fetch(b, c, "GET", "https://"+host+"/", nil)
					before := processorTime()
					for b.Loop() {
						if !kept {
							c.CloseIdleConnections()
						}
						fetch(b, c, "GET", "https://"+host+"/", nil)
					}
					b.ReportMetric(float64((processorTime()-before).Nanoseconds())/float64(b.N), "cpu-ns/op")
				})
			}
		}
	}
}

func processorTime() time.Duration {
	var r syscall.Rusage
	_ = syscall.Getrusage(0, &r) // it has no reason to fail
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

var _ net.Conn = (*watched)(nil)

func parse(t testing.TB, doc string) *policy.Policy {
	t.Helper()
	p, err := policy.Parse([]byte(doc))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// A path with segments "." reaches the server without them, as the rules have read it, and rules
// for paths are not evaded by them. Where no rule reads requests, it is left as it is.
func TestDotsInPaths(t *testing.T) {
	w := newInspected(t)
	const doc = `
version: 1
rules:
- {name: repo, allow: api.test, ports: [80, 443], inspect: true, paths: [/repo/*]}
- {name: shut, deny: api.test, inspect: true, paths: [/repo/private/*]}
- {name: plain, allow: web.test}
`
	p, err := policy.Parse([]byte(doc))
	if err != nil {
		t.Fatal(err)
	}
	w.n.SetPolicy(p)
	tell := func(rw http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(rw, r.RequestURI) }
	w.http("93.184.215.21:80", tell)
	w.http("93.184.215.14:80", tell)
	w.secure("93.184.215.21:443", "api.test", tell, "h2", "http/1.1")
	for _, origin := range []string{"http://api.test", "https://api.test"} {
		for _, protocols := range [][]string{{"http/1.1"}, {"h2"}} {
			c := w.client()
			if origin == "https://api.test" {
				c = w.trusting(protocols...)
			}
			for path, want := range map[string]string{
				"/repo/./Packages": "/repo/Packages", "/./repo/./a/.?x=/./": "/repo/a/?x=/./", "/repo/a": "/repo/a",
				"/repo/./private/x": "", "/repo/private/./x": "", "/./private": "", "/repo/../x": "", "/repo/%2e/private/x": "", "/repo/./../private/x": "",
			} {
				q, err := http.NewRequestWithContext(t.Context(), http.MethodGet, origin, http.NoBody)
				if err != nil {
					t.Fatal(err)
				}
				q.URL.Opaque = path // as it is
				response, err := c.Do(q)
				if err != nil {
					t.Fatal(err)
				}
				body, err := io.ReadAll(response.Body)
				_ = response.Body.Close()
				if err != nil {
					t.Fatal(err)
				}
				if want != "" && (response.StatusCode != http.StatusOK || string(body) != want) || want == "" && response.StatusCode != http.StatusForbidden {
					t.Errorf("%s%s over %v: %d %q, want %q", origin, path, protocols, response.StatusCode, body, want)
				}
			}
		}
	}
	q, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://web.test", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	q.URL.Opaque = "/./x/../y"
	response, err := w.client().Do(q)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if body, err := io.ReadAll(response.Body); err != nil || string(body) != "/./x/../y" {
		t.Errorf("unread: %q, %v", body, err)
	}
}

// A server that was asked before is expected to choose the same version of HTTP, and its handshake
// goes on beside that of the client. One that chooses HTTP/2 now is asked for HTTP/1. One that has
// given HTTP/2 up gets no request. The next connection has the server's choice.
func TestServerChoosesOtherwise(t *testing.T) {
	for _, order := range [][2][]string{{{"h2", "http/1.1"}, {"http/1.1"}}, {{"http/1.1"}, {"h2", "http/1.1"}}} {
		w := newInspected(t)
		version := func(rw http.ResponseWriter, r *http.Request) { fmt.Fprint(rw, r.ProtoMajor) }
		visit := func() (status int, body string) {
			t.Helper()
			c := w.trusting("h2", "http/1.1")
			defer c.CloseIdleConnections()
			q, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://a.in.test/", http.NoBody)
			if err != nil {
				t.Fatal(err)
			}
			p, err := c.Do(q)
			if err != nil {
				t.Fatal(err)
			}
			defer p.Body.Close()
			data, err := io.ReadAll(p.Body)
			if err != nil {
				t.Fatal(err)
			}
			return p.StatusCode, string(data)
		}
		chosen := map[bool]string{true: "2", false: "1"}
		w.secure("93.184.215.30:443", "a.in.test", version, order[0]...)
		for range 2 {
			if status, body := visit(); status != http.StatusOK || body != chosen[order[0][0] == "h2"] {
				t.Errorf("%v: %d %q", order, status, body)
			}
		}
		w.secure("93.184.215.30:443", "a.in.test", version, order[1]...)
		if status, body := visit(); order[0][0] == "h2" && (status != http.StatusBadGateway || !strings.Contains(body, "connect again")) ||
			order[0][0] != "h2" && (status != http.StatusOK || body != "1") {
			t.Errorf("%v, at the change: %d %q", order, status, body)
		}
		for range 2 {
			if status, body := visit(); status != http.StatusOK || body != chosen[order[1][0] == "h2"] {
				t.Errorf("%v, after the change: %d %q", order, status, body)
			}
		}
	}
}

// A server that fails while the client's handshake goes on is answered for as one that failed
// before.
func TestServerFailsBesideTheClient(t *testing.T) {
	for _, version := range []string{"h2", "http/1.1"} {
		w := newInspected(t)
		w.secure("93.184.215.30:443", "a.in.test", func(http.ResponseWriter, *http.Request) {}, version)
		c := w.trusting(version)
		fetch(t, c, "GET", "https://a.in.test/", nil)
		c.CloseIdleConnections()
		w.mu.Lock()
		delete(w.servers, netip.MustParseAddrPort("93.184.215.30:443"))
		w.mu.Unlock()
		q, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://a.in.test/", http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		p, err := c.Do(q)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(p.Body)
		if _ = p.Body.Close(); err != nil || p.StatusCode != http.StatusBadGateway || !strings.Contains(string(body), errNoHost.Error()) {
			t.Errorf("%s: %d %q, %v", version, p.StatusCode, body, err)
		}
	}
}
