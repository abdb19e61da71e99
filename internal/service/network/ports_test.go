package network

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/share"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

func TestCheckPorts(t *testing.T) {
	n := open(t, nil)
	full := api.Network{Mode: api.NetworkFull}
	web := filepath.Join(n.opts.PortDir, "web.sock")
	for name, tt := range map[string]struct {
		tenant string
		net    api.Network
		port   api.PortMapping
		ok     bool
	}{
		"defaults":                      {"", full, api.PortMapping{Port: 80}, true},
		"all addresses":                 {"", full, api.PortMapping{Port: 80, Address: "0.0.0.0", HostPort: 80}, true},
		"no network":                    {"", api.Network{}, api.PortMapping{Port: 80}, false},
		"no port":                       {"", full, api.PortMapping{HostPort: 80}, false},
		"UDP":                           {"", full, api.PortMapping{Port: 53, HostPort: 5353, Protocol: "udp"}, true},
		"another protocol":              {"", full, api.PortMapping{Port: 80, Protocol: "sctp"}, false},
		"a name":                        {"", full, api.PortMapping{Port: 80, Address: "localhost"}, false},
		"no choice of the client's":     {"", full, api.PortMapping{Port: 80, HostPort: 8080, Chosen: true}, true},
		"a tenant's":                    {"1002", full, api.PortMapping{Port: 80, HostPort: 8080}, true},
		"a tenant's UDP":                {"1002", full, api.PortMapping{Port: 53, HostPort: 5353, Protocol: "udp"}, true},
		"a tenant's privileged one":     {"1002", full, api.PortMapping{Port: 80, HostPort: 80}, false},
		"a tenant's privileged UDP":     {"1002", full, api.PortMapping{Port: 53, HostPort: 53, Protocol: "udp"}, false},
		"a tenant's, for other hosts":   {"1002", full, api.PortMapping{Port: 80, Address: "0.0.0.0"}, false},
		"a tenant's, mapped to the any": {"1002", full, api.PortMapping{Port: 80, Address: "::ffff:0.0.0.0"}, false},
		"a Unix socket":                 {"", full, api.PortMapping{Port: 80, Socket: "web.sock"}, true},
		"a Unix socket by its path":     {"", full, api.PortMapping{Port: 80, Socket: web}, true},
		"a Unix socket elsewhere":       {"", full, api.PortMapping{Port: 80, Socket: "/run/web.sock"}, false},
		"a Unix socket above":           {"", full, api.PortMapping{Port: 80, Socket: "../web.sock"}, false},
		"a Unix socket above, by path":  {"", full, api.PortMapping{Port: 80, Socket: n.opts.PortDir + "/../web.sock"}, false},
		"a hidden Unix socket":          {"", full, api.PortMapping{Port: 80, Socket: ".web"}, false},
		"a Unix socket of a directory":  {"", full, api.PortMapping{Port: 80, Socket: "a/b"}, false},
		"a long Unix socket":            {"", full, api.PortMapping{Port: 80, Socket: strings.Repeat("x", maxSocketName+1)}, false},
		"a Unix socket of datagrams":    {"", full, api.PortMapping{Port: 80, Socket: "web", Protocol: "udp"}, false},
		"a Unix socket with a port":     {"", full, api.PortMapping{Port: 80, Socket: "web", HostPort: 80}, false},
		"a Unix socket with an address": {"", full, api.PortMapping{Port: 80, Socket: "web", Address: "127.0.0.1"}, false},
		"a tenant's Unix socket":        {"1002", full, api.PortMapping{Port: 80, Socket: "web"}, false},
	} {
		got, err := n.CheckPorts(tt.tenant, tt.net, []api.PortMapping{tt.port})
		if tt.ok != (err == nil) || err != nil && !errors.Is(err, class.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
		if err == nil && got[0].Chosen != (tt.port.HostPort == 0 && tt.port.Socket == "") {
			t.Errorf("%s: %+v", name, got)
		}
		if err == nil && (got[0].Protocol == "" || (got[0].Address == "") == (got[0].Socket == "") || tt.port.Socket != "" && got[0].Socket != filepath.Join(n.opts.PortDir, filepath.Base(tt.port.Socket))) {
			t.Errorf("%s: %+v", name, got)
		}
	}
	if _, err := n.CheckPorts("", full, make([]api.PortMapping, maxPorts+1)); !errors.Is(err, class.ErrInvalid) {
		t.Errorf("too many: %v", err)
	}
}

func TestPublishedPortsAreAllBoundOrNone(t *testing.T) {
	n := open(t, nil)
	// A loopback address that nothing else uses: a port that was closed stays free.
	pid := os.Getpid()
	at := netip.AddrFrom4([4]byte{127, byte(100 + pid>>16&0x3f), byte(pid >> 8), byte(pid)}).String()
	for _, protocol := range []string{"tcp", "udp"} {
		t.Run(protocol, func(t *testing.T) {
			one, err := n.Publish(t.Context(), []api.PortMapping{{Port: 80, Address: at, Protocol: protocol}})
			if err != nil {
				t.Fatal(err)
			}
			defer one.Close()
			taken := one.Mappings()[0].HostPort
			if taken == 0 {
				t.Fatal("the chosen port is not told")
			}
			free, err := n.Publish(t.Context(), []api.PortMapping{{Port: 80, Address: at, Protocol: protocol}})
			if err != nil {
				t.Fatal(err)
			}
			number := free.Mappings()[0].HostPort
			if err := free.Close(); err != nil {
				t.Fatal(err)
			}
			moved, err := n.Publish(t.Context(), []api.PortMapping{
				{Port: 80, Address: at, HostPort: number, Protocol: protocol, Chosen: true},
				{Port: 81, Address: at, HostPort: taken, Protocol: protocol, Chosen: true},
			})
			if err != nil {
				t.Fatalf("a port that was chosen before and is taken: %v", err)
			}
			if m := moved.Mappings(); m[0].HostPort != number || m[1].HostPort == taken || m[1].HostPort == 0 || !m[1].Chosen {
				t.Errorf("%+v, of which only %d was taken", m, taken)
			}
			if err := moved.Close(); err != nil {
				t.Fatal(err)
			}
			_, err = n.Publish(t.Context(), []api.PortMapping{
				{Port: 80, Address: at, HostPort: number, Protocol: protocol},
				{Port: 82, Socket: filepath.Join(n.opts.PortDir, "both")},
				{Port: 81, Address: at, HostPort: taken, Protocol: protocol},
			})
			if !errors.Is(err, class.ErrPort) {
				t.Fatalf("a port that is taken: %v", err)
			}
			again, err := n.Publish(t.Context(), []api.PortMapping{
				{Port: 80, Address: at, HostPort: number, Protocol: protocol},
				{Port: 82, Socket: filepath.Join(n.opts.PortDir, "both")},
			})
			if err != nil {
				t.Fatalf("the first of three are still bound: %v", err)
			}
			_ = again.Close()
		})
	}
}

// A published Unix socket has mode 0600 and never replaces a file that is no socket.
func TestPublishedSockets(t *testing.T) {
	n := open(t, nil)
	at := filepath.Join(n.opts.PortDir, "web")
	publish := func(on *Networks) (*Published, error) {
		return on.Publish(t.Context(), []api.PortMapping{{Port: 80, Socket: at, Protocol: "tcp"}})
	}
	p, err := publish(n)
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]fs.FileMode{at: fs.ModeSocket | 0o600, n.opts.PortDir: fs.ModeDir | 0o700} {
		if fi, err := os.Lstat(path); err != nil || fi.Mode() != want {
			t.Errorf("%s: %v, %v, want %v", path, fi.Mode(), err, want)
		}
	}
	if m := p.Mappings()[0]; m.Socket != at || m.HostPort != 0 || m.Address != "" {
		t.Errorf("%+v", m)
	}
	if _, err := publish(n); !errors.Is(err, class.ErrPort) {
		t.Errorf("a socket that another sandbox has: %v", err)
	}
	c, err := net.Dial("unix", at)
	if err != nil {
		t.Fatalf("the one before is gone: %v", err)
	}
	_ = c.Close()

	// The next daemon replaces a socket that a killed one has left.
	next := open(t, nil)
	next.opts.PortDir, next.doors.dir = n.opts.PortDir, n.opts.PortDir
	q, err := publish(next)
	if err != nil {
		t.Fatalf("in the place of a killed daemon's: %v", err)
	}
	file := filepath.Join(n.opts.PortDir, "file")
	if err := os.WriteFile(file, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	third, err := Open(Options{Dir: t.TempDir(), NamedDir: t.TempDir(), PortDir: n.opts.PortDir})
	if err != nil {
		t.Fatal(err)
	}
	defer third.Close()
	if _, err := os.Lstat(at); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a killed daemon's is left where no sandbox has it any more: %v", err)
	}
	if _, err := os.Lstat(file); err != nil {
		t.Errorf("a file was removed: %v", err)
	}
	if err := errors.Join(q.Close(), q.Close()); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(at); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a closed one is left: %v", err)
	}
	q, err = publish(next)
	if err != nil {
		t.Fatalf("again: %v", err)
	}
	if err := q.Close(); err != nil {
		t.Error(err)
	}

	target := filepath.Join(t.TempDir(), "target")
	for name, plant := range map[string]func() error{
		"a file":      func() error { return os.WriteFile(at, []byte("mine"), 0o600) },
		"a directory": func() error { return os.Mkdir(at, 0o700) },
		"a link":      func() error { return os.Symlink(target, at) },
	} {
		if err := plant(); err != nil {
			t.Fatal(err)
		}
		if _, err := publish(next); !errors.Is(err, class.ErrPort) {
			t.Errorf("in the place of %s: %v", name, err)
		}
		if err := os.Remove(at); err != nil {
			t.Errorf("%s is gone: %v", name, err)
		}
	}
	if _, err := os.Lstat(target); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a link was followed: %v", err)
	}
}

// relaying is a relay of datagrams to a server of the test, under the test's clock.
type relaying struct {
	t      *testing.T
	at     *net.UDPAddr
	server *net.UDPConn
	dials  atomic.Int64
	now    atomic.Int64
	ticks  chan time.Time
	logged chan string // messages of the log
}

// Handle implements [slog.Handler].
func (r *relaying) Handle(_ context.Context, l slog.Record) error {
	r.logged <- l.Message
	return nil
}

func (*relaying) Enabled(context.Context, slog.Level) bool { return true }
func (r *relaying) WithAttrs([]slog.Attr) slog.Handler     { return r }
func (r *relaying) WithGroup(string) slog.Handler          { return r }

// relayTo starts a relay. Each dial calls before with its number, from 1, and fails with its error.
func relayTo(t *testing.T, most int, before func(ctx context.Context, dial int64) error, change ...func(*datagrams)) *relaying {
	t.Helper()
	r := &relaying{t: t, ticks: make(chan time.Time), logged: make(chan string, 100)}
	r.server = listenUDP(t)
	outside := listenUDP(t)
	r.at = outside.LocalAddr().(*net.UDPAddr)
	d := &datagrams{
		outside: outside, most: most, log: slog.New(r), quota: sourceQuota(), waiting: pendingQuota(),
		time: clock{now: func() time.Time { return time.Unix(r.now.Load(), 0) }, tick: func() (<-chan time.Time, func()) { return r.ticks, func() {} }},
		dial: func(ctx context.Context) (*net.UDPConn, error) {
			if n := r.dials.Add(1); before != nil {
				if err := before(ctx, n); err != nil {
					return nil, err
				}
			}
			return net.DialUDP("udp", nil, r.server.LocalAddr().(*net.UDPAddr))
		},
	}
	for _, c := range change {
		c(d)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		d.run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return r
}

func listenUDP(t *testing.T) *net.UDPConn {
	t.Helper()
	c, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func (r *relaying) client() *net.UDPConn {
	r.t.Helper()
	c, err := net.DialUDP("udp", nil, r.at)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = c.Close() })
	return c
}

func (r *relaying) send(c *net.UDPConn, text string) {
	r.t.Helper()
	if _, err := c.Write([]byte(text)); err != nil {
		r.t.Fatal(err)
	}
}

// arrives returns the source of the next datagram at the server, which must be text.
func (r *relaying) arrives(text string) netip.AddrPort {
	r.t.Helper()
	data := make([]byte, maxDatagram)
	_ = r.server.SetReadDeadline(time.Now().Add(testenv.HungAfter))
	n, from, err := r.server.ReadFromUDPAddrPort(data)
	if err != nil || string(data[:n]) != text {
		r.t.Fatalf("%.40q came, %v, want %.40q", data[:n], err, text)
	}
	return from
}

func (r *relaying) answers(c *net.UDPConn, to netip.AddrPort, text string) {
	r.t.Helper()
	if _, err := r.server.WriteToUDPAddrPort([]byte(text), to); err != nil {
		r.t.Fatal(err)
	}
	data := make([]byte, maxDatagram)
	_ = c.SetReadDeadline(time.Now().Add(testenv.HungAfter))
	if n, err := c.Read(data); err != nil || string(data[:n]) != text {
		r.t.Fatalf("the answer is %.40q, %v, want %.40q", data[:n], err, text)
	}
}

// sweep moves the clock and returns when idle sources are forgotten.
func (r *relaying) sweep(d time.Duration) {
	r.now.Add(int64(d / time.Second))
	r.ticks <- time.Time{}
	r.ticks <- time.Time{} // taken after the first one was dealt with
}

// Each source gets its own answers, of any size.
func TestDatagramsAreRelayed(t *testing.T) {
	r := relayTo(t, maxSources, nil)
	a, b := r.client(), r.client()
	r.send(a, "from a")
	fromA := r.arrives("from a")
	r.send(b, "from b")
	fromB := r.arrives("from b")
	r.answers(b, fromB, "to b")
	r.answers(a, fromA, "to a")
	r.send(a, "")
	if again := r.arrives(""); again != fromA {
		t.Errorf("a second datagram came from %s, the first from %s", again, fromA)
	}
	r.answers(a, fromA, "")
	large := strings.Repeat("x", 65507)
	r.send(a, large)
	r.arrives(large)
	r.answers(a, fromA, large)
	if n := r.dials.Load(); n != 2 {
		t.Errorf("%d sockets for 2 sources", n)
	}
}

// Sources are bounded, and make room when they are idle.
func TestSourcesOfDatagramsAreBounded(t *testing.T) {
	r := relayTo(t, 2, nil)
	a, b, c := r.client(), r.client(), r.client()
	r.send(a, "1")
	r.arrives("1")
	r.send(b, "2")
	fromB := r.arrives("2")
	r.send(c, "lost")
	r.send(b, "3")
	r.arrives("3")
	r.sweep(idleSource / 2)
	r.send(b, "4")
	r.arrives("4")
	r.sweep(idleSource / 2)
	r.send(c, "5") // in the place of a
	r.arrives("5")
	r.send(a, "lost")
	r.send(b, "6")
	if again := r.arrives("6"); again != fromB {
		t.Errorf("the source that was not idle has lost its socket: %s, %s", again, fromB)
	}
	if n := r.dials.Load(); n != 3 {
		t.Errorf("%d sockets were made, want 3", n)
	}
}

// A sandbox that cannot be reached for a moment costs its datagrams only.
func TestDatagramsAfterAFailure(t *testing.T) {
	r := relayTo(t, maxSources, func(_ context.Context, dial int64) error {
		if dial == 1 {
			return errors.New("no socket")
		}
		return nil
	})
	a := r.client()
	r.send(a, "lost")
	if m := <-r.logged; !strings.Contains(m, "are lost") {
		t.Errorf("logged: %s", m)
	}
	r.send(a, "kept")
	r.arrives("kept")
}

// A source whose socket is long in coming holds up no other. What it sends meanwhile arrives in
// order, as much as fits.
func TestSlowSourcesOfDatagrams(t *testing.T) {
	slow, release := make(chan struct{}), make(chan struct{})
	r := relayTo(t, maxSources, func(_ context.Context, dial int64) error {
		if dial == 1 {
			close(slow)
			<-release
		}
		return nil
	})
	a, b := r.client(), r.client()
	for i := range maxPending {
		r.send(a, strconv.Itoa(i))
	}
	<-slow
	r.send(a, "lost")
	r.send(b, "from another") // read after all of a
	r.arrives("from another")
	r.sweep(idleSource) // which leaves a socket that is being made
	close(release)
	for i := range maxPending {
		r.arrives(strconv.Itoa(i))
	}
	r.send(a, "at once")
	r.arrives("at once")
}

// A port is closed while a socket is being made.
func TestPortsOfSlowSourcesEnd(t *testing.T) {
	slow := make(chan struct{})
	r := relayTo(t, maxSources, func(ctx context.Context, _ int64) error {
		close(slow)
		<-ctx.Done()
		return nil // a moment too late
	})
	r.send(r.client(), "lost")
	<-slow
}

// The ports of a sandbox share its bound of sources, and all their bound of datagrams that wait.
func TestPortsShareTheirSources(t *testing.T) {
	sources, waiting := &share.Quota{What: "sources", Sandbox: 2, Tenant: 4, All: 8}, &share.Quota{What: "bytes", Sandbox: 8, Tenant: 16, All: 32}
	shared := func(id string) func(*datagrams) {
		return func(d *datagrams) { d.owner, d.quota, d.waiting = share.Owner{Tenant: "t", ID: id}, sources, waiting }
	}
	release := make(chan struct{})
	one := relayTo(t, maxSources, func(_ context.Context, dial int64) error {
		if dial == 2 {
			<-release
		}
		return nil
	}, shared("s"))
	two := relayTo(t, maxSources, nil, shared("s"))
	other := relayTo(t, maxSources, nil, shared("other"))
	a, b, c := one.client(), one.client(), two.client()
	one.send(a, "12345678")
	one.arrives("12345678")
	one.send(b, "12345678") // waits
	one.send(b, "too much")
	one.send(a, "in time")
	one.arrives("in time")
	two.send(c, "lost")
	if m := <-two.logged; !strings.Contains(m, "are lost") {
		t.Errorf("logged: %s", m)
	}
	o := other.client()
	other.send(o, "another")
	other.arrives("another")
	close(release)
	one.arrives("12345678")
	one.send(a, "after")
	one.arrives("after")
	one.sweep(idleSource)
	two.send(c, "found")
	two.arrives("found")
	if held := sources.Held(); held != 2 {
		t.Errorf("%d sources are held, want 2", held)
	}
}
