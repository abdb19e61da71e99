package gateway

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/netns/policy"
)

// lan opens an address itself, so that nothing is read.
const lan = `{version: 1, rules: [{name: lan, allow: 10.1.0.0/16, ports: any}, {name: web, allow: [web.test, "*.cdn.test"], ports: any}]}`

func echoServer(c *net.TCPConn) {
	_, _ = io.Copy(c, c) // the client looks
	_ = c.CloseWrite()
}

// say sends bytes over an echo and waits for them.
func say(t testing.TB, c net.Conn, s string) {
	t.Helper()
	b := make([]byte, len(s))
	if _, err := io.WriteString(c, s); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, b); err != nil || string(b) != s {
		t.Fatalf("%q, %v", b, err)
	}
}

func TestConnectionsAreBounded(t *testing.T) {
	w := newWorld(t, lan, func(_ *Options, l *limits) { l.flows = 3 })
	w.raw("10.1.0.7:9000", echoServer)
	var open []*net.TCPConn
	for range 3 {
		c := w.dial("10.1.0.7:9000")
		say(t, c, "x")
		open = append(open, c)
	}
	if b, reset := w.reset("10.1.0.7:9000"); !reset {
		t.Errorf("%q and no reset", b)
	}
	if e := w.event(); e.Allow || !strings.Contains(e.Reason, "more than 3 connections") || e.Port != 9000 {
		t.Errorf("%+v", e)
	}
	say(t, open[1], "y")
	// A place that is free again is given out.
	_ = open[0].CloseWrite()
	_, _ = io.ReadAll(open[0]) // to its end
	if e := w.event(); !e.Allow || e.Reason != "" || e.Out != 1 || e.In != 1 {
		t.Errorf("%+v", e)
	}
	say(t, w.dial("10.1.0.7:9000"), "z")
}

// Another network has room of its own.
func TestFloodsDoNotTouchNeighbours(t *testing.T) {
	flooder := newWorld(t, lan, func(_ *Options, l *limits) { l.flows, l.heads, l.lookups = 8, 4, 1 })
	neighbour := newWorld(t, lan)
	neighbour.host("web.test", "93.184.215.14")
	neighbour.raw("93.184.215.14:22", echoServer)
	for range 50 {
		if c, err := flooder.dialContext(t.Context(), netip.MustParseAddrPort("93.184.215.14:80")); err == nil {
			defer c.Close()
			_, _ = io.WriteString(c, "GET") // some are refused
		}
	}
	for range 50 {
		flooder.resolve("evil.test", dnsmessage.TypeA)
	}
	neighbour.resolve("web.test", dnsmessage.TypeA)
	say(t, neighbour.dial("93.184.215.14:22"), "hello\n")
	if heads := flooder.n.heads.Load(); heads > 8 {
		t.Errorf("%d heads", heads)
	}
	if heads := neighbour.n.heads.Load(); heads != 0 {
		t.Errorf("%d heads of the neighbour", heads)
	}
}

func TestUnfinishedHeadsAreBounded(t *testing.T) {
	w := newWorld(t, lan, func(_ *Options, l *limits) { l.heads = 2 })
	w.host("web.test", "93.184.215.14")
	w.http("93.184.215.14:80", echo)
	w.resolve("web.test", dnsmessage.TypeA)
	w.event()
	half := "GET / HTTP/1.1\r\nHost: web"
	var open []*net.TCPConn
	for range 2 {
		c := w.dial("93.184.215.14:80")
		_, _ = io.WriteString(c, half)
		open = append(open, c)
	}
	w.waitHeads(2)
	if _, reset := w.reset("93.184.215.14:80"); !reset {
		t.Error("the third is not reset")
	}
	if e := w.event(); e.Allow || !strings.Contains(e.Reason, "more than 2 connections") {
		t.Errorf("%+v", e)
	}
	// A head that is complete makes room, also while its connection is kept.
	if _, body := get(t, open[0], bufio.NewReader(open[0]), "GET", ".test\r\n\r\n"); body != "GET web.test / " {
		t.Error(body)
	}
	c := w.dial("93.184.215.14:80")
	if _, body := get(t, c, bufio.NewReader(c), "GET", getFrom("web.test", "/b")); body != "GET web.test /b " {
		t.Error(body)
	}
}

// answering returns a connection to web.test, which answers a request with these bytes and ends.
func answering(t *testing.T, answer string) *net.TCPConn {
	t.Helper()
	w := newWorld(t, lan)
	w.host("web.test", "93.184.215.14")
	w.raw("93.184.215.14:80", answers(answer))
	w.resolve("web.test", dnsmessage.TypeA)
	return w.dial("93.184.215.14:80")
}

// answers is a server that answers a request with these bytes and ends.
func answers(answer string) func(*net.TCPConn) {
	return func(c *net.TCPConn) {
		_, _ = http.ReadRequest(bufio.NewReader(c)) // its answer is fixed
		_, _ = io.WriteString(c, answer)
		_ = c.CloseWrite()
		_, _ = io.Copy(io.Discard, c)
	}
}

// waitHeads waits until the gateway waits for so many heads.
func (w *world) waitHeads(n int64) {
	w.t.Helper()
	await(w.t, func() bool { return w.n.heads.Load() == n })
}

// await waits for a state of the gateway that no event tells of.
func await(t testing.TB, reached func() bool) {
	t.Helper()
	hung, tick := time.After(testenv.HungAfter), time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !reached() {
		select {
		case <-tick.C:
		case <-hung:
			t.Fatalf("the state was not reached within %s", testenv.HungAfter)
		}
	}
}

func TestSlowClientsAreEnded(t *testing.T) {
	for name, tc := range map[string]struct{ dst, send string }{
		"nothing on a port of the web":   {"93.184.215.14:443", ""},
		"half a ClientHello":             {"93.184.215.14:443", "\x16\x03\x01\x02\x00\x01"},
		"half a request":                 {"93.184.215.14:80", "GET / HTTP/1.1\r\nHost: web.test\r\n"},
		"half a line on another port":    {"93.184.215.14:22", "GET /"},
		"half a hello on another port":   {"93.184.215.14:22", "\x16\x03"},
		"half a second request":          {"93.184.215.14:80", getFrom("web.test", "/") + "GET"},
		"half a message of DNS":          {"8.8.8.8:53", "\x00\x40abc"},
		"half a request that is refused": {"93.184.215.99:80", "GET / HTTP/1.1\r\n"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, lan)
			w.host("web.test", "93.184.215.14")
			w.http("93.184.215.14:80", echo)
			w.raw("93.184.215.14:22", echoServer)
			w.resolve("web.test", dnsmessage.TypeA)
			c := w.dial(tc.dst)
			_, _ = io.WriteString(c, tc.send)
			w.waitHeads(1)
			if strings.Contains(name, "second") {
				r := bufio.NewReader(c)
				get(t, c, r, "GET", "")
				w.waitHeads(1)
			}
			w.clock.advance(defaults.head - 1)
			if n := len(w.n.all()); n != 1 {
				t.Fatalf("%d connections before the time is over", n)
			}
			w.clock.advance(1)
			if _, reset := wasReset(c); !reset {
				t.Error("no reset")
			}
			events := w.all()
			if e := events[len(events)-1]; e.Allow || e.Duration != defaults.head || !strings.Contains(e.Reason, "in time") && tc.dst != "93.184.215.99:80" {
				t.Errorf("%+v", e)
			}
		})
	}
}

func TestIdleConnectionsAreEnded(t *testing.T) {
	w := newWorld(t, lan)
	w.raw("10.1.0.7:9000", echoServer)
	c, d := w.dial("10.1.0.7:9000"), w.dial("10.1.0.7:9000")
	say(t, c, "x")
	say(t, d, "x")
	w.clock.advance(defaults.idle - 1)
	say(t, d, "y")
	w.clock.advance(1)
	if _, reset := wasReset(c); !reset {
		t.Error("the idle one is not reset")
	}
	if e := w.event(); e.Reason != "idle for too long" || !e.Allow || e.Out != 1 {
		t.Errorf("%+v", e)
	}
	say(t, d, "z")
}

func TestServersThatFail(t *testing.T) {
	t.Run("no connection, HTTP", func(t *testing.T) {
		w := newWorld(t, lan)
		w.host("web.test", "93.184.215.14")
		w.resolve("web.test", dnsmessage.TypeA)
		w.event()
		c := w.dial("93.184.215.14:80")
		if p, body := get(t, c, bufio.NewReader(c), "GET", getFrom("web.test", "/")); p.StatusCode != 502 || !strings.Contains(body, "no route to host") {
			t.Errorf("%d %s", p.StatusCode, body)
		}
		if e := w.event(); !e.Allow || e.Kind != Request || !strings.Contains(e.Reason, "no route to host") {
			t.Errorf("%+v", e)
		}
	})
	t.Run("no connection, other", func(t *testing.T) {
		w := newWorld(t, lan)
		if b, reset := w.reset("10.1.0.7:9000"); !reset {
			t.Errorf("%q and no reset", b)
		}
		if e := w.event(); !e.Allow || e.Reason != "connect to 10.1.0.7:9000: no route to host" {
			t.Errorf("%+v", e)
		}
	})
	t.Run("no answer to the connection", func(t *testing.T) {
		dialling := make(chan struct{})
		w := newWorld(t, lan, func(o *Options, _ *limits) {
			o.Dial = func(ctx context.Context, _ netip.AddrPort) (*net.TCPConn, error) {
				close(dialling)
				<-ctx.Done()
				return nil, ctx.Err()
			}
		})
		c := w.dial("10.1.0.7:9000")
		<-dialling
		w.clock.advance(defaults.dial)
		if _, reset := wasReset(c); !reset {
			t.Error("no reset")
		}
		if e := w.event(); e.Reason != "connect to 10.1.0.7:9000: no answer in time" {
			t.Errorf("%+v", e)
		}
	})
	for name, answer := range map[string]string{
		"closed without a response": "", "half a head": "HTTP/1.1 200 OK\r\nContent", "no HTTP": "SSH-2.0-x\r\n\r\n", "two lengths": "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
		"upgrade that was not asked for": "HTTP/1.1 101 x\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			c := answering(t, answer)
			if p, body := get(t, c, bufio.NewReader(c), "GET", getFrom("web.test", "/")); p.StatusCode != 502 || !strings.Contains(body, "93.184.215.14:80") {
				t.Errorf("%d %s", p.StatusCode, body)
			}
		})
	}
	// A cut response must not look whole.
	for name, answer := range map[string]string{
		"half a body":   "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhello",
		"half a chunk":  "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel",
		"bad chunk":     "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x\r\nhello\r\n0\r\n\r\n",
		"endless hints": strings.Repeat("HTTP/1.1 103 Early Hints\r\n\r\n", 40) + "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			c := answering(t, answer)
			_, _ = io.WriteString(c, getFrom("web.test", "/"))
			if b, reset := wasReset(c); !reset {
				t.Errorf("%q and no reset", b)
			}
		})
	}
	t.Run("reset in a download", func(t *testing.T) {
		w := newWorld(t, lan)
		w.raw("10.1.0.7:9000", func(c *net.TCPConn) {
			_, _ = io.WriteString(c, "half")
			_, _ = io.ReadFull(c, make([]byte, 1)) // until the client has it
			_ = c.SetLinger(0)
		})
		c := w.dial("10.1.0.7:9000")
		_, _ = io.ReadFull(c, make([]byte, 4)) // seen below
		_, _ = io.WriteString(c, "x")
		if _, reset := wasReset(c); !reset {
			t.Error("no reset")
		}
	})
	t.Run("reset by the client in an upload", func(t *testing.T) {
		w := newWorld(t, lan)
		ended := make(chan error, 1)
		w.raw("10.1.0.7:9000", func(c *net.TCPConn) {
			_, _ = io.WriteString(c, "x")
			_, err := io.Copy(io.Discard, c)
			ended <- err
		})
		c := w.dial("10.1.0.7:9000")
		_, _ = io.ReadFull(c, make([]byte, 1)) // it is connected then
		_ = c.SetLinger(0)
		_ = c.Close()
		if err := <-ended; err == nil {
			t.Error("the server saw an orderly end")
		}
	})
	t.Run("reset by the client while it waits for a response", func(t *testing.T) {
		w := newWorld(t, lan)
		w.host("web.test", "93.184.215.14")
		ended, got := make(chan error, 1), make(chan struct{})
		w.raw("93.184.215.14:80", func(c *net.TCPConn) {
			_, _ = http.ReadRequest(bufio.NewReader(c)) // it never answers
			close(got)
			_, err := io.Copy(io.Discard, c)
			ended <- err
		})
		w.resolve("web.test", dnsmessage.TypeA)
		c := w.dial("93.184.215.14:80")
		_, _ = io.WriteString(c, getFrom("web.test", "/"))
		<-got
		_ = c.SetLinger(0)
		_ = c.Close()
		if err := <-ended; err == nil {
			t.Error("the server saw an orderly end")
		}
	})
}

func TestClose(t *testing.T) {
	w := newWorld(t, lan)
	w.host("web.test", "93.184.215.14")
	w.raw("10.1.0.7:9000", echoServer)
	w.http("93.184.215.14:80", echo)
	w.resolve("web.test", dnsmessage.TypeA)
	c, h := w.dial("10.1.0.7:9000"), w.dial("93.184.215.14:80")
	say(t, c, "x")
	get(t, h, bufio.NewReader(h), "GET", getFrom("web.test", "/"))
	w.n.Close()
	for _, c := range []*net.TCPConn{c, h} {
		if b, reset := wasReset(c); len(b) > 0 || !reset {
			t.Errorf("%q and no reset", b)
		}
	}
	if c, err := w.dialContext(t.Context(), netip.MustParseAddrPort("10.1.0.7:9000")); err == nil {
		if b, _ := io.ReadAll(c); len(b) > 0 {
			t.Errorf("%q after the end", b)
		}
	}
	w.n.Close() // again
}

// The policy of a running sandbox changes: refused connections end, the others go on.
func TestSetPolicy(t *testing.T) {
	w := newWorld(t, lan)
	w.raw("10.1.0.7:9000", echoServer)
	w.raw("10.1.0.8:9000", echoServer)
	w.raw("10.1.0.9:9000", echoServer)
	w.host("web.test", "93.184.215.14")
	w.http("93.184.215.14:80", echo)
	w.resolve("web.test", dnsmessage.TypeA)
	c, d, h := w.dial("10.1.0.7:9000"), w.dial("10.1.0.8:9000"), w.dial("93.184.215.14:80")
	say(t, c, "x")
	say(t, d, "x")
	r := bufio.NewReader(h)
	get(t, h, r, "GET", getFrom("web.test", "/"))
	i := w.dial("10.1.0.9:9000")
	say(t, i, "x")
	p, err := policy.Parse([]byte(`{version: 1, rules: [
	{allow: 10.1.0.8, ports: any}, {allow: 10.1.0.9, ports: any, inspect: true}, {allow: web.test, ports: 80, inspect: true, paths: /b/*}]}`))
	if err != nil {
		t.Fatal(err)
	}
	w.n.SetPolicy(p)
	if _, reset := wasReset(c); !reset {
		t.Error("the connection that is refused now is not reset")
	}
	if _, reset := wasReset(i); !reset {
		t.Error("the connection that has to be read now is not reset")
	}
	say(t, d, "y")
	if p, _ := get(t, h, r, "GET", getFrom("web.test", "/b/")); p.StatusCode != 200 {
		t.Errorf("/b/: %d", p.StatusCode)
	}
	if p, _ := get(t, h, r, "GET", getFrom("web.test", "/a")); p.StatusCode != 403 {
		t.Errorf("/a: %d", p.StatusCode)
	}
	refused := 0
	for _, e := range w.all() {
		if !e.Allow && strings.Contains(e.Reason, "the policy was changed") {
			refused++
		}
	}
	if refused != 2 {
		t.Errorf("%d connections are recorded as ended by the change", refused)
	}
}

// A queue that is full loses events, counts them, and holds nothing up.
func TestRecordMayBlock(t *testing.T) {
	block, entered := make(chan struct{}), make(chan struct{})
	var once sync.Once
	var got []Event
	r := startRecorder(each(func(e Event) {
		once.Do(func() { close(entered); <-block })
		got = append(got, e)
	}))
	r.add(Event{Port: 1})
	<-entered
	for i := range maxEvents + 10 {
		r.add(Event{Port: uint16(i + 2)})
	}
	close(block)
	// Once there is room again the next event tells the loss. Before that it would be counted itself.
	await(t, func() bool { return len(r.queue) == 0 })
	r.add(Event{Port: 9999})
	r.close(true)
	if len(got) != maxEvents+2 || got[0].Port != 1 || got[maxEvents].Port != maxEvents+1 {
		t.Errorf("%d events", len(got))
	}
	if last := got[len(got)-1]; last.Port != 9999 || last.Lost != 10 {
		t.Errorf("%+v", last)
	}
}

func budget(b Budget) func(*Options, *limits) { return func(o *Options, _ *limits) { o.Budget = b } }

func TestBudgetOfBytes(t *testing.T) {
	w := newWorld(t, lan, budget(Budget{BytesOut: 10}))
	w.raw("10.1.0.7:9000", echoServer)
	c := w.dial("10.1.0.7:9000")
	say(t, c, "0123456789")
	_, _ = io.WriteString(c, "x")
	if b, reset := wasReset(c); len(b) > 0 || !reset {
		t.Errorf("%q, reset %v", b, reset)
	}
	if e := w.event(); e.Allow || e.Reason != "the budget of 10 bytes out is used up" || e.Out != 10 {
		t.Errorf("%+v", e)
	}

	w = newWorld(t, lan, budget(Budget{BytesIn: 3}))
	w.raw("10.1.0.7:9000", func(c *net.TCPConn) {
		fmt.Fprint(c, "0123456789")
		_, _ = io.Copy(io.Discard, c)
	})
	if b, reset := w.reset("10.1.0.7:9000"); len(b) > 3 || !reset {
		t.Errorf("%q, reset %v", b, reset)
	}
	if e := w.event(); e.Allow || e.Reason != "the budget of 3 bytes in is used up" || e.In > 3 {
		t.Errorf("%+v", e)
	}
}

func TestBudgetOfConnections(t *testing.T) {
	w := newWorld(t, lan, budget(Budget{Connections: 2}))
	w.raw("10.1.0.7:9000", echoServer)
	for i := range 3 {
		c, err := w.dialContext(t.Context(), netip.MustParseAddrPort("10.1.0.7:9000"))
		if err == nil && i < 2 {
			say(t, c, "x")
		} else if err == nil {
			wasReset(c)
		}
	}
	if e := w.event(); e.Allow || e.Reason != "the budget of 2 connections is used up" {
		t.Errorf("%+v", e)
	}
	c := w.dial("10.1.0.7:80")
	if p, body := get(t, c, bufio.NewReader(c), "GET", getFrom("10.1.0.7", "/")); p.StatusCode != 403 || !strings.Contains(body, "budget") {
		t.Errorf("HTTP: %d %s", p.StatusCode, body)
	}
}

func TestBudgetOfHosts(t *testing.T) {
	w := newWorld(t, lan, budget(Budget{Hosts: 2}))
	w.host("web.test", "93.184.215.14", "93.184.215.15")
	w.host("a.cdn.test", "93.184.215.14")
	w.http("93.184.215.14:80", echo)
	w.http("93.184.215.15:80", echo)
	w.raw("10.1.0.7:9000", echoServer)
	say(t, w.dial("10.1.0.7:9000"), "x")
	w.resolve("web.test", dnsmessage.TypeA)
	w.resolve("a.cdn.test", dnsmessage.TypeA)
	for _, tc := range []struct {
		dst, host string
		status    int
	}{{"93.184.215.14:80", "web.test", 200}, {"93.184.215.15:80", "web.test", 200}, {"93.184.215.14:80", "a.cdn.test", 403}, {"93.184.215.14:80", "web.test", 200}} {
		c := w.dial(tc.dst)
		if p, body := get(t, c, bufio.NewReader(c), "GET", getFrom(tc.host, "/")); p.StatusCode != tc.status {
			t.Errorf("%s at %s: %d %s", tc.host, tc.dst, p.StatusCode, body)
		}
	}
}

func TestBudgetOfQueries(t *testing.T) {
	w := newWorld(t, lan, budget(Budget{Queries: 3}))
	w.host("web.test", "93.184.215.14")
	for i := range 5 {
		r := w.exchange(question1(t, "web.test", dnsmessage.TypeA, true))
		if i < 3 != (r.RCode == dnsmessage.RCodeSuccess) || i >= 3 && explained(r) != "15 the budget of 3 DNS queries is used up" {
			t.Errorf("query %d: %s %s", i, r.RCode, explained(r))
		}
	}

	w = newWorld(t, lan, budget(Budget{NameBytes: 25}))
	for _, tc := range []struct {
		name string
		ok   bool
	}{{"0123456789.cdn.test", true}, {"0123456789.cdn.test", true}, {"secret.cdn.test", false}, {"web.test", false}, {"a.test", false}} {
		w.host(tc.name, "93.184.215.14")
		if code, _ := w.resolve(tc.name, dnsmessage.TypeA); (code == dnsmessage.RCodeSuccess) != tc.ok {
			t.Errorf("%s: %s", tc.name, code)
		}
	}
	if len(w.asked) != 1 {
		t.Errorf("the host's resolver was asked for %v", w.asked)
	}
}

func TestRates(t *testing.T) {
	w := newWorld(t, lan, budget(Budget{QueryRate: 2, ConnectionRate: 1}))
	w.host("web.test", "93.184.215.14")
	w.raw("10.1.0.7:9000", echoServer)
	queries := func() (ok int) {
		for range 10 {
			if code, _ := w.resolve("web.test", dnsmessage.TypeA); code == dnsmessage.RCodeSuccess {
				ok++
			}
		}
		return ok
	}
	connections := func() (ok int) {
		for range 5 {
			if c, err := w.dialContext(t.Context(), netip.MustParseAddrPort("10.1.0.7:9000")); err == nil {
				_, _ = io.WriteString(c, "x") // some are refused
				if _, err := io.ReadFull(c, make([]byte, 1)); err == nil {
					ok++
				}
				_ = c.Close()
			}
		}
		return ok
	}
	if q, c := queries(), connections(); q != 4 || c != 2 {
		t.Errorf("%d queries and %d connections in a burst", q, c)
	}
	w.clock.advance(time.Second)
	if q, c := queries(), connections(); q != 2 || c != 1 {
		t.Errorf("%d queries and %d connections in the next second", q, c)
	}
}

// Questions that wait for the host's resolver are bounded; the others go on.
func TestLookupsAreBounded(t *testing.T) {
	release, waiting := make(chan struct{}), make(chan struct{}, 10)
	w := newWorld(t, lan, func(o *Options, l *limits) {
		l.lookups = 2
		o.Lookup = func(context.Context, string, policy.Name) ([]netip.Addr, error) {
			waiting <- struct{}{}
			<-release
			return []netip.Addr{netip.MustParseAddr("93.184.215.14")}, nil
		}
	})
	answers := make(chan string)
	for i := range 2 {
		go func() {
			_, addrs := w.resolve(fmt.Sprintf("n%d.cdn.test", i), dnsmessage.TypeA)
			answers <- fmt.Sprint(addrs)
		}()
		<-waiting
	}
	if code, _ := w.resolve("n3.cdn.test", dnsmessage.TypeA); code != dnsmessage.RCodeServerFailure {
		t.Errorf("one more: %s", code)
	}
	if code, _ := w.resolve("evil.test", dnsmessage.TypeA); code != dnsmessage.RCodeNameError {
		t.Errorf("one that is refused: %s", code)
	}
	close(release)
	for range 2 {
		if a := <-answers; a != "[93.184.215.14]" {
			t.Error(a)
		}
	}
}

// dialExactly is for the host's own network. On loopback it shows both of its ends.
func TestDialExactly(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	addr := l.Addr().(*net.TCPAddr).AddrPort()
	c, err := dialExactly(t.Context(), addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if c.RemoteAddr().String() != addr.String() {
		t.Errorf("connected to %s", c.RemoteAddr())
	}
	if _, err := dialExactly(t.Context(), netip.AddrPortFrom(netip.IPv4Unspecified(), addr.Port())); err == nil || !strings.Contains(err.Error(), "in the place of") {
		t.Errorf("0.0.0.0: %v", err)
	}
}

// Without the options of tests: the destination is the local address of the connection.
func TestDestination(t *testing.T) {
	for _, listen := range []string{"127.0.0.1:0", "[::]:0"} {
		events := make(chan Event, 10)
		n := New(Options{ID: "box", Record: each(func(e Event) { events <- e })})
		l, err := net.Listen("tcp", listen)
		if err != nil {
			t.Fatal(err)
		}
		served := make(chan error, 1)
		go func() { served <- n.Serve(t.Context(), l.(*net.TCPListener)) }()
		port := l.Addr().(*net.TCPAddr).AddrPort().Port()
		if c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			defer c.Close()
		}
		if e := <-events; e.Network != "box" || e.Allow || e.Addr != netip.MustParseAddr("127.0.0.1") || e.Port != port || e.Reason != "address 127.0.0.1 is loopback" {
			t.Errorf("%s: %+v", listen, e)
		}
		n.Close()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}
}

func TestNothingIsLeft(t *testing.T) {
	// Sockets only: the servers of the test splice, and the pipes for that stay in a pool.
	count := func() (sockets int) {
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		for _, fd := range fds {
			if to, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil && strings.HasPrefix(to, "socket:") {
				sockets++
			}
		}
		return sockets
	}
	run := func(t *testing.T) {
		t.Helper()
		w := newWorld(t, lan)
		w.raw("10.1.0.7:9000", echoServer)
		var all sync.WaitGroup
		for range 30 {
			all.Go(func() {
				c, err := w.dialContext(t.Context(), netip.MustParseAddrPort("10.1.0.7:9000"))
				if err != nil {
					t.Error(err)
					return
				}
				defer c.Close()
				_, _ = io.WriteString(c, "x")          // seen by the read
				_, _ = io.ReadFull(c, make([]byte, 1)) // half of them end in the middle
			})
		}
		all.Wait()
		w.n.Close()
		if n := len(w.n.flows); n != 0 || w.n.heads.Load() != 0 {
			t.Errorf("%d flows and %d heads are left", n, w.n.heads.Load())
		}
	}
	before := count()
	t.Run("a network", run)
	if after := count(); after > before {
		t.Errorf("%d descriptors, %d before", after, before)
	}
}

// A connection ends with the response that announces it, although the server does not close it.
func TestAnnouncedEndIsNotWaitedFor(t *testing.T) {
	w := newWorld(t, lan)
	w.host("web.test", "93.184.215.14")
	ended := make(chan error, 1)
	w.raw("93.184.215.14:80", func(c *net.TCPConn) {
		_, _ = http.ReadRequest(bufio.NewReader(c)) // its answer is fixed
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
		_, err := io.Copy(io.Discard, c)
		ended <- err
	})
	w.resolve("web.test", dnsmessage.TypeA)
	c := w.dial("93.184.215.14:80")
	r := bufio.NewReader(c)
	if p, body := get(t, c, r, "GET", getFrom("web.test", "/")); p.StatusCode != 200 || body != "ok" {
		t.Errorf("%d %q", p.StatusCode, body)
	}
	if _, err := r.ReadByte(); err != io.EOF {
		t.Errorf("the client's connection ends with %v", err)
	}
	_ = c.Close()
	if err := <-ended; err != nil {
		t.Errorf("the server's connection ends with %v", err)
	}
}
