package op

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"syscall"

	"github.com/coder/websocket"
)

// Client is a [Kind]: the function that Name names in [Clients] is called.
const Client Kind = "client"

// CA is the file of the certificate that the clients in a sandbox trust.
const CA = "/tmp/ca.pem"

// The servers of the clients. Site speaks HTTP on ports 80 and 8080, and HTTPS on 443 and 8443. Raw
// has an echo on port 9000, a greeting on 22, and an end after one line on 5432.
const (
	Site  = "site.test"
	Site6 = "six.site.test"
	Raw   = "raw.site.test"
	LAN   = "10.1.0.7"
)

// Large is the number of bytes of large transfers: several times as many as the buffers on the way
// hold while a reader stands still. A socket sends from 4 MiB at most, and its buffer for received
// bytes grows as they are read (tcp(7)).
const Large = 32 << 20

// Stream returns a reader of n bytes that differ, and their hash.
func Stream(n int64) (r io.Reader, sum func() string) {
	h := sha256.New()
	return io.TeeReader(io.LimitReader(rand.NewChaCha8([32]byte{7}), n), h), func() string { return hex.EncodeToString(h.Sum(nil)) }
}

// Clients use servers that a policy allows, as programs in a sandbox do. Each returns nil if
// the server answered as it should.
func Clients() map[string]func(context.Context) error {
	clients := make(map[string]func(context.Context) error)
	for scheme, base := range map[string]string{
		"http": "http://" + Site, "https": "https://" + Site, "http-port": "http://" + Site + ":8080", "https-port": "https://" + Site + ":8443",
		"http-ipv6": "http://" + Site6, "https-ipv6": "https://" + Site6, "http-lan": "http://" + LAN,
	} {
		for _, method := range []string{"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"} {
			clients[scheme+"-"+method] = func(ctx context.Context) error {
				return echoed(ctx, client(0), method, base+"/echo/"+method, "body of "+method)
			}
		}
		clients[scheme+"-HEAD"] = func(ctx context.Context) error { return expect(ctx, client(0), "HEAD", base+"/echo", "", 200, "") }
		clients[scheme+"-events"] = func(ctx context.Context) error { return events(ctx, base+"/events") }
		clients[scheme+"-many"] = func(ctx context.Context) error {
			c := client(0)
			for i := range 50 {
				if err := echoed(ctx, c, "POST", fmt.Sprintf("%s/echo/%d", base, i), strings.Repeat("x", i*100)); err != nil {
					return err
				}
			}
			return nil
		}
	}
	for what, u := range map[string]string{"http": "ws://" + Site + "/chat", "https": "wss://" + Site + "/chat"} {
		clients[what+"-websocket"] = func(ctx context.Context) error { return chat(ctx, u) }
	}
	for what, q := range map[string]struct {
		path   string
		status int
	}{
		"404": {"/status/404", 404}, "500": {"/status/500", 500}, "204": {"/status/204", 204}, "304": {"/status/304", 304}, "redirect": {"/redirect", 200},
		"query": {"/status/200?a=b&c=%2f..%2f", 200}, "odd-path": {"/status/200//a;b/%2e%2e/c", 200}, "hints": {"/hints", 200}, "fields": {"/fields", 200},
	} {
		for scheme, base := range map[string]string{"http": "http://" + Site, "https": "https://" + Site} {
			clients[scheme+"-"+what] = func(ctx context.Context) error { return expect(ctx, client(0), "GET", base+q.path, "", q.status, "") }
		}
	}
	for scheme, base := range map[string]string{"http": "http://" + Site, "https": "https://" + Site} {
		clients[scheme+"-download"] = func(ctx context.Context) error { return download(ctx, base) }
		clients[scheme+"-upload"] = func(ctx context.Context) error { return upload(ctx, base) }
		clients[scheme+"-chunked"] = func(ctx context.Context) error {
			return echoed(ctx, client(0), "POST", base+"/echo/chunked", "in chunks, without a length") // see echoed
		}
		clients[scheme+"-trailers"] = func(ctx context.Context) error { return trailers(ctx, base) }
	}
	clients["tls-1.2"] = func(ctx context.Context) error {
		return echoed(ctx, client(tls.VersionTLS12), "GET", "https://"+Site+"/echo/tls", "")
	}
	clients["http2"] = parallel
	clients["http2-both-ways"] = bothWays
	clients["continue"] = func(ctx context.Context) error {
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+Site+"/echo/continue", strings.NewReader("after 100"))
		if err != nil {
			return err
		}
		r.Header.Set("Expect", "100-continue")
		return answered(client(0), r, 200, "POST /echo/continue after 100")
	}
	clients["pipelined"] = pipelined
	clients["raw-half-close"] = func(ctx context.Context) error { return halfClosed(ctx, Raw, 1<<20) }
	clients["raw-half-close-ipv6"] = func(ctx context.Context) error { return halfClosed(ctx, "six."+Raw, 1<<20) }
	clients["raw-half-close-lan"] = func(ctx context.Context) error { return halfClosed(ctx, LAN, 1<<20) }
	clients["raw-large"] = func(ctx context.Context) error { return halfClosed(ctx, LAN, Large) }
	clients["raw-greeting"] = greeting
	clients["raw-server-ends"] = serverEnds
	clients["at-once"] = atOnce
	return clients
}

func client(version uint16) *http.Client {
	pool := x509.NewCertPool()
	if pem, err := os.ReadFile(CA); err == nil { // without it every server is refused
		pool.AppendCertsFromPEM(pem)
	}
	return &http.Client{Transport: &http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12, MaxVersion: version}, ForceAttemptHTTP2: true, MaxIdleConnsPerHost: 10,
	}}
}

// echoed expects the server's echo of a request. The body has no length for the client.
func echoed(ctx context.Context, c *http.Client, method, url, body string) error {
	_, path, _ := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(url, "https://"), "http://"), "/")
	return expect(ctx, c, method, url, body, 200, strings.TrimSpace(method+" /"+path+" "+body))
}

func expect(ctx context.Context, c *http.Client, method, url, body string, status int, text string) error {
	var in io.Reader = http.NoBody
	if body != "" {
		in = io.MultiReader(strings.NewReader(body)) // of unknown length
	}
	r, err := http.NewRequestWithContext(ctx, method, url, in)
	if err != nil {
		return err
	}
	return answered(c, r, status, text)
}

func answered(c *http.Client, r *http.Request, status int, text string) error {
	p, err := c.Do(r)
	if err != nil {
		return err
	}
	defer p.Body.Close()
	got, err := io.ReadAll(p.Body)
	if err != nil {
		return fmt.Errorf("read the response: %w", err)
	}
	if p.StatusCode != status || text != "" && strings.TrimSpace(string(got)) != text {
		return fmt.Errorf("%s: %.200q; want %d %q", p.Status, got, status, text)
	}
	return nil
}

// events reads three events, each of which the server sends when the one before was acknowledged by
// another request.
func events(ctx context.Context, url string) error {
	c := client(0)
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"?id="+fmt.Sprint(rand.Uint64()), http.NoBody)
	if err != nil {
		return err
	}
	p, err := c.Do(r)
	if err != nil {
		return err
	}
	defer p.Body.Close()
	lines := bufio.NewReader(p.Body)
	for i := range 3 {
		line, err := lines.ReadString('\n')
		if err != nil || line != fmt.Sprintf("data: %d\n", i) {
			return fmt.Errorf("event %d: %q, %w", i, line, err)
		}
		if err := expect(ctx, c, "POST", r.URL.String(), "", 204, ""); err != nil {
			return err
		}
	}
	return nil
}

func chat(ctx context.Context, url string) error {
	c, _, err := websocket.Dial(ctx, url, &websocket.DialOptions{HTTPClient: client(0)})
	if err != nil {
		return err
	}
	c.SetReadLimit(1 << 20)
	for _, s := range []string{"a", strings.Repeat("b", 20000), strings.Repeat("c", 100000)} {
		if err := c.Write(ctx, websocket.MessageText, []byte(s)); err != nil {
			return err
		}
		if _, b, err := c.Read(ctx); err != nil || string(b) != "echo "+s {
			return fmt.Errorf("%.20q, %w", b, err)
		}
	}
	return c.Close(websocket.StatusNormalClosure, "")
}

func download(ctx context.Context, base string) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("%s/bytes/%d", base, Large), http.NoBody)
	if err != nil {
		return err
	}
	p, err := client(0).Do(r)
	if err != nil {
		return err
	}
	defer p.Body.Close()
	h := sha256.New()
	if n, err := io.Copy(h, p.Body); err != nil || n != Large {
		return fmt.Errorf("%d bytes, %w", n, err)
	}
	want, sum := Stream(Large)
	if _, err := io.Copy(io.Discard, want); err != nil {
		return err
	}
	if got := hex.EncodeToString(h.Sum(nil)); got != sum() {
		return errors.New("other bytes")
	}
	return nil
}

func upload(ctx context.Context, base string) error {
	body, sum := Stream(Large)
	r, err := http.NewRequestWithContext(ctx, http.MethodPut, base+"/sum", body)
	if err != nil {
		return err
	}
	p, err := client(0).Do(r)
	if err != nil {
		return err
	}
	defer p.Body.Close()
	if got, err := io.ReadAll(p.Body); err != nil || string(got) != sum() {
		return fmt.Errorf("%s: %.100q, %w", p.Status, got, err)
	}
	return nil
}

// trailers is the form of an answer of gRPC.
func trailers(ctx context.Context, base string) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, base+"/trailers", strings.NewReader("\x00\x00\x00\x00\x01x"))
	if err != nil {
		return err
	}
	r.Header.Set("Content-Type", "application/grpc")
	r.Header.Set("TE", "trailers")
	p, err := client(0).Do(r)
	if err != nil {
		return err
	}
	defer p.Body.Close()
	if _, err := io.Copy(io.Discard, p.Body); err != nil {
		return err
	}
	if got := p.Trailer.Get("Grpc-Status"); got != "0" {
		return fmt.Errorf("trailer %q", got)
	}
	return nil
}

// parallel makes requests beside each other over one connection of HTTP/2.
func parallel(ctx context.Context) error {
	c := client(0)
	errs := make([]error, 50)
	var all sync.WaitGroup
	for i := range errs {
		all.Go(func() {
			errs[i] = echoed(ctx, c, "POST", fmt.Sprintf("https://%s/echo/%d", Site, i), "HTTP/2")
		})
	}
	all.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// bothWays is a stream of HTTP/2 on which each message is answered before the next.
func bothWays(ctx context.Context) error {
	in, out := io.Pipe()
	defer out.Close()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://"+Site+"/both", in)
	if err != nil {
		return err
	}
	p, err := client(0).Do(r)
	if err != nil {
		return err
	}
	defer p.Body.Close()
	if p.ProtoMajor != 2 {
		return fmt.Errorf("protocol %s", p.Proto)
	}
	lines := bufio.NewReader(p.Body)
	for i := range 20 {
		text := fmt.Sprintf("message %d\n", i)
		if _, err := io.WriteString(out, text); err != nil {
			return err
		}
		if got, err := lines.ReadString('\n'); err != nil || got != text {
			return fmt.Errorf("%q, %w", got, err)
		}
	}
	return nil
}

func dialTo(ctx context.Context, host, port string) (*net.TCPConn, error) {
	c, err := new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort(host, port))
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}

func pipelined(ctx context.Context) error {
	c, err := dialTo(ctx, Site, "80")
	if err != nil {
		return err
	}
	defer c.Close()
	const n = 20
	var text strings.Builder
	for i := range n {
		fmt.Fprintf(&text, "GET /echo/%d HTTP/1.1\r\nHost: %s\r\n\r\n", i, Site)
	}
	if _, err := io.WriteString(c, text.String()); err != nil {
		return err
	}
	r := bufio.NewReader(c)
	for i := range n {
		p, err := http.ReadResponse(r, nil)
		if err != nil {
			return err
		}
		if got, err := io.ReadAll(p.Body); err != nil || strings.TrimSpace(string(got)) != fmt.Sprintf("GET /echo/%d", i) {
			return fmt.Errorf("response %d: %q, %w", i, got, err)
		}
	}
	return nil
}

// halfClosed sends bytes to the echo, ends its direction, and reads them back.
func halfClosed(ctx context.Context, host string, n int64) error {
	c, err := dialTo(ctx, host, "9000")
	if err != nil {
		return err
	}
	defer c.Close()
	out, want := Stream(n)
	sent := make(chan error, 1)
	go func() {
		_, err := io.Copy(c, out)
		sent <- errors.Join(err, c.CloseWrite())
	}()
	h := sha256.New()
	got, err := io.Copy(h, c)
	if err := errors.Join(err, <-sent); err != nil {
		return err
	}
	if got != n || hex.EncodeToString(h.Sum(nil)) != want() {
		return fmt.Errorf("%d bytes of %d, or others", got, n)
	}
	return nil
}

// greeting waits for a server that speaks first.
func greeting(ctx context.Context) error {
	c, err := dialTo(ctx, Raw, "22")
	if err != nil {
		return err
	}
	defer c.Close()
	r := bufio.NewReader(c)
	if line, err := r.ReadString('\n'); err != nil || line != "SSH-2.0-server\r\n" {
		return fmt.Errorf("%q, %w", line, err)
	}
	if _, err := io.WriteString(c, "SSH-2.0-client\r\n"); err != nil {
		return err
	}
	if line, err := r.ReadString('\n'); err != nil || line != "hello SSH-2.0-client\r\n" {
		return fmt.Errorf("%q, %w", line, err)
	}
	return nil
}

// serverEnds sends on after the server has ended its direction.
func serverEnds(ctx context.Context) error {
	c, err := dialTo(ctx, Raw, "5432")
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err := c.Write([]byte{0, 0, 0, 8, 4, 210, 22, 47}); err != nil {
		return err
	}
	got, err := io.ReadAll(c)
	if err != nil || !bytes.Equal(got, []byte("N")) {
		return fmt.Errorf("%q, %w", got, err)
	}
	_, err = c.Write(make([]byte, 100))
	return errors.Join(err, c.CloseWrite())
}

// AtOnce is the number of connections that are open at once.
const AtOnce = 1000

func atOnce(ctx context.Context) error {
	conns := make([]*net.TCPConn, AtOnce)
	defer func() {
		for _, c := range conns {
			if c != nil {
				_ = c.Close() // it has been read to its end
			}
		}
	}()
	for i := range conns {
		var err error
		if conns[i], err = dialTo(ctx, LAN, "9000"); err != nil {
			return fmt.Errorf("connection %d: %w", i, err)
		}
		if _, err := fmt.Fprintf(conns[i], "%04d", i); err != nil {
			return fmt.Errorf("connection %d: %w", i, err)
		}
	}
	for i, c := range conns {
		got := make([]byte, 4)
		if _, err := io.ReadFull(c, got); err != nil || string(got) != fmt.Sprintf("%04d", i) {
			return fmt.Errorf("connection %d: %q, %w", i, got, err)
		}
	}
	return nil
}

// OwnPorts is the name of a client that is no entry of [Clients]: it needs a sandbox that has made
// no connection. A connection to a port outside takes the port from programs inside, also for some
// time after its end.
const OwnPorts = "own-ports"

// ownPorts has servers in the sandbox on the ports that the network uses too. Programs inside reach
// them, and nothing of the network outside is lost by them.
func ownPorts(ctx context.Context) error {
	for _, port := range []string{"53", "80", "443", "9000"} {
		l, err := new(net.ListenConfig).Listen(ctx, "tcp", ":"+port)
		if err != nil {
			return err
		}
		defer l.Close()
		for _, host := range []string{"127.0.0.1", "::1"} {
			c, err := dialTo(ctx, host, port)
			if err != nil {
				return err
			}
			accepted, err := l.Accept()
			if err := errors.Join(err, c.Close()); err != nil {
				return err
			}
			_ = accepted.Close() // the client has gone
		}
	}
	// Where the kernel refuses rules that change packets, the gateway's socket has the port (decision
	// 0022).
	own, err := new(net.ListenConfig).ListenPacket(ctx, "udp", ":53")
	if err == nil {
		defer own.Close()
	} else if !errors.Is(err, syscall.EADDRINUSE) {
		return err
	}
	if err := halfClosed(ctx, LAN, 1000); err != nil {
		return err
	}
	return echoed(ctx, client(0), "GET", "https://www."+Site+"/echo/own", "")
}
