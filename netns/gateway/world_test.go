package gateway

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/sandboxd/sandboxd/netns/policy"
)

// A world is a gateway between clients and servers that are all on the loopback of this host. The
// policy never allows that, so the destination of a connection is that of the listener which it
// came to, and the gateway dials the server that stands for an address. The host's resolver is a
// table.
type world struct {
	t      testing.TB
	n      *Network
	events chan Event
	clock  *clock
	udp    *net.UDPConn

	mu        sync.Mutex // guards those below
	hosts     map[string][]netip.Addr
	asked     []string
	servers   map[netip.AddrPort]string
	dialled   []netip.AddrPort
	listeners map[netip.AddrPort]string // by destination
	dsts      map[uint16]netip.AddrPort // by port of the listener
}

// A clock moves when a test says so.
type clock struct {
	mu    sync.Mutex
	now   time.Time
	ticks chan time.Time
}

func newClock() *clock {
	return &clock{now: time.Date(2026, 11, 23, 0, 0, 0, 0, time.UTC), ticks: make(chan time.Time)}
}

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

// advance moves the clock. When it returns, the sweep has seen the new time: the second tick is
// taken after the sweep of the first.
func (c *clock) advance(d time.Duration) {
	c.mu.Lock()
	c.now = c.now.Add(d)
	c.mu.Unlock()
	c.ticks <- time.Time{}
	c.ticks <- time.Time{}
}

// each calls f for each event.
func each(f func(Event)) func([]Event) {
	return func(all []Event) {
		for _, e := range all {
			f(e)
		}
	}
}

// ownAddr is the public address of the gateway's host.
var ownAddr = netip.MustParseAddr("93.184.215.1")

var errNoHost = errors.New("no route to host")

func newWorld(t testing.TB, doc string, change ...func(*Options, *limits)) *world {
	t.Helper()
	p, err := policy.Parse([]byte(doc))
	if err != nil {
		t.Fatal(err)
	}
	w := &world{
		t: t, events: make(chan Event, 20_000), clock: newClock(), hosts: make(map[string][]netip.Addr), servers: make(map[netip.AddrPort]string),
		listeners: make(map[netip.AddrPort]string), dsts: make(map[uint16]netip.AddrPort),
	}
	opts := Options{
		ID: "box", Policy: p, IPv6: true, Now: w.clock.Now, Ticks: w.clock.ticks, Record: each(func(e Event) { w.events <- e }),
		Lookup: func(_ context.Context, network string, name policy.Name) ([]netip.Addr, error) {
			return w.lookup(network, name.String())
		},
		Dial: func(ctx context.Context, addr netip.AddrPort) (*net.TCPConn, error) {
			w.mu.Lock()
			server, ok := w.servers[addr]
			w.dialled = append(w.dialled, addr)
			w.mu.Unlock()
			if !ok {
				return nil, errNoHost
			}
			c, err := (&net.Dialer{}).DialContext(ctx, "tcp", server)
			if err != nil {
				return nil, err
			}
			return c.(*net.TCPConn), nil
		},
	}
	l := defaults
	opts.Own = func(addr netip.Addr) (bool, error) { return addr == ownAddr, nil }
	for _, f := range change {
		f(&opts, &l)
	}
	w.n = newNetwork(opts, l)
	w.n.destination = func(c *net.TCPConn) netip.AddrPort {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.dsts[c.LocalAddr().(*net.TCPAddr).AddrPort().Port()]
	}
	if w.udp, err = net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)}); err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := w.n.ServeDNS(context.Background(), w.udp); err != nil && !errors.Is(err, net.ErrClosed) {
			t.Errorf("ServeDNS: %v", err)
		}
	})
	t.Cleanup(func() {
		w.n.Close()
		serving.Wait()
	})
	return w
}

func (w *world) lookup(network, name string) ([]netip.Addr, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.asked = append(w.asked, network+" "+name)
	all, ok := w.hosts[name]
	if !ok {
		return nil, &net.DNSError{Err: "no such host", Name: name, IsNotFound: true}
	}
	if len(all) == 0 {
		return nil, errors.New("server misbehaving")
	}
	var of []netip.Addr
	for _, a := range all {
		if a.Is4() == (network == "ip4") {
			of = append(of, a)
		}
	}
	return of, nil
}

// host sets the addresses that the host's resolver has for a name.
func (w *world) host(name string, addrs ...string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.hosts[name] = []netip.Addr{}
	for _, a := range addrs {
		w.hosts[name] = append(w.hosts[name], netip.MustParseAddr(a))
	}
}

// serve makes a server on the loopback stand for an address.
func (w *world) serve(dst, server string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.servers[netip.MustParseAddrPort(dst)] = server
}

// http starts an HTTP server for an address.
func (w *world) http(dst string, h http.HandlerFunc) {
	s := httptest.NewServer(h)
	w.t.Cleanup(s.Close)
	w.serve(dst, s.Listener.Addr().String())
}

// raw starts a server that handles each connection with f, and closes it then.
func (w *world) raw(dst string, f func(*net.TCPConn)) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		w.t.Fatal(err)
	}
	w.serve(dst, l.Addr().String())
	wait := acceptAll(l, f)
	w.t.Cleanup(func() {
		_ = l.Close()
		w.n.Close() // ends connections that f reads from
		wait()
	})
}

// acceptAll calls f for each connection of a listener, and closes the connection afterwards. wait
// returns when the listener is closed and f has returned for all.
func acceptAll(l net.Listener, f func(*net.TCPConn)) (wait func()) {
	var all sync.WaitGroup
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() {
				defer c.Close()
				f(c.(*net.TCPConn))
			})
		}
	})
	return all.Wait
}

// dial connects as a program inside does, to an address.
func (w *world) dial(dst string) *net.TCPConn {
	w.t.Helper()
	c, err := w.dialContext(context.Background(), netip.MustParseAddrPort(dst))
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = c.Close() })
	return c
}

func (w *world) dialContext(ctx context.Context, dst netip.AddrPort) (*net.TCPConn, error) {
	w.mu.Lock()
	addr, ok := w.listeners[dst]
	w.mu.Unlock()
	if !ok {
		l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
		if err != nil {
			return nil, err
		}
		addr = l.Addr().String()
		w.mu.Lock()
		w.listeners[dst] = addr
		w.dsts[l.Addr().(*net.TCPAddr).AddrPort().Port()] = dst
		w.mu.Unlock()
		go w.n.Serve(context.Background(), l) //nolint:errcheck,contextcheck // Network.Close waits for it
	}
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}

// resolve asks the gateway's DNS over UDP. It returns the code and the addresses.
func (w *world) resolve(name string, t dnsmessage.Type) (dnsmessage.RCode, []netip.Addr) {
	w.t.Helper()
	r := w.exchange(question1(w.t, name, t, true))
	return r.RCode, addresses(r)
}

func addresses(r *dnsmessage.Message) (addrs []netip.Addr) {
	for _, a := range r.Answers {
		switch b := a.Body.(type) {
		case *dnsmessage.AResource:
			addrs = append(addrs, netip.AddrFrom4(b.A))
		case *dnsmessage.AAAAResource:
			addrs = append(addrs, netip.AddrFrom16(b.AAAA))
		}
	}
	return addrs
}

// question1 packs a message with one question.
func question1(t testing.TB, name string, typ dnsmessage.Type, edns bool) []byte {
	t.Helper()
	b := dnsmessage.NewBuilder(nil, dnsmessage.Header{ID: 4711, RecursionDesired: true})
	errs := []error{b.StartQuestions(), b.Question(dnsmessage.Question{Name: dnsmessage.MustNewName(name + "."), Type: typ, Class: dnsmessage.ClassINET})}
	if edns {
		var h dnsmessage.ResourceHeader
		errs = append(errs, h.SetEDNS0(1232, 0, false), b.StartAdditionals(), b.OPTResource(h, dnsmessage.OPTResource{}))
	}
	msg, err := b.Finish()
	if err := errors.Join(append(errs, err)...); err != nil {
		t.Fatal(err)
	}
	return msg
}

// exchange sends a message over UDP and reads the answer.
func (w *world) exchange(msg []byte) *dnsmessage.Message {
	w.t.Helper()
	c, err := net.Dial("udp", w.udp.LocalAddr().String())
	if err != nil {
		w.t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write(msg); err != nil {
		w.t.Fatal(err)
	}
	buf := make([]byte, 65536)
	size, err := c.Read(buf)
	if err != nil {
		w.t.Fatal(err)
	}
	var r dnsmessage.Message
	if err := r.Unpack(buf[:size]); err != nil {
		w.t.Fatal(err)
	}
	return &r
}

// connect resolves a name and connects to its first address, as programs do.
func (w *world) connect(ctx context.Context, host, port string) (net.Conn, error) {
	addr, err := netip.ParseAddr(host)
	if err != nil {
		code, addrs := w.resolve(host, dnsmessage.TypeA)
		if len(addrs) == 0 {
			code, addrs = w.resolve(host, dnsmessage.TypeAAAA)
		}
		if len(addrs) == 0 {
			return nil, fmt.Errorf("resolve %s: %s", host, code)
		}
		addr = addrs[0]
	}
	dst, err := netip.ParseAddrPort(net.JoinHostPort(addr.String(), port))
	if err != nil {
		return nil, err
	}
	return w.dialContext(ctx, dst)
}

// transport returns the transport of an HTTP client in the sandbox.
func (w *world) transport() *http.Transport {
	t := &http.Transport{DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
		host, port, err := net.SplitHostPort(address)
		if err != nil {
			return nil, err
		}
		return w.connect(ctx, host, port)
	}}
	w.t.Cleanup(t.CloseIdleConnections)
	return t
}

func (w *world) client() *http.Client { return &http.Client{Transport: w.transport()} }

// event waits for the next event.
func (w *world) event() Event { return <-w.events }

// all closes the gateway and returns all events.
func (w *world) all() []Event {
	w.n.Close()
	close(w.events)
	var all []Event
	for e := range w.events {
		all = append(all, e)
	}
	return all
}

// wasReset reports whether a read ends in a reset.
func wasReset(c *net.TCPConn) (read []byte, reset bool) {
	read, err := io.ReadAll(c)
	return read, err != nil && strings.Contains(err.Error(), "connection reset by peer")
}

// reset connects to an address at which that is refused at once, and reads to the end. The reset
// may come before connect has returned.
func (w *world) reset(dst string) (read []byte, reset bool) {
	c, err := w.dialContext(w.t.Context(), netip.MustParseAddrPort(dst))
	if err != nil {
		return nil, errors.Is(err, syscall.ECONNRESET)
	}
	defer c.Close()
	return wasReset(c)
}

// get sends bytes and reads one response.
func get(t testing.TB, c net.Conn, r *bufio.Reader, method, request string) (*http.Response, string) {
	t.Helper()
	if _, err := io.WriteString(c, request); err != nil {
		t.Fatal(err)
	}
	p, err := http.ReadResponse(r, &http.Request{Method: method})
	if err != nil {
		t.Fatalf("%.60q: %v", request, err)
	}
	body, err := io.ReadAll(p.Body)
	if err != nil {
		t.Fatal(err)
	}
	return p, string(body)
}
