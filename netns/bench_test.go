package netns

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/osthread"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// A way is a data path between a program and the gateway: those of docs/decisions/0022.
type way struct {
	client   *os.File     // network namespace of the program; nil: the tests' own
	gateway  net.Listener // nil: the program reaches the server itself
	to       unix.SockaddrInet4
	teardown func()
}

var ways = []struct {
	name string
	make func(b *testing.B) *way
}{
	{"none", func(*testing.B) *way { return &way{teardown: func() {}} }},
	{"A", wayA},
	{"C", wayC},
	{"H", func(b *testing.B) *way {
		b.Helper()
		n := namespace(b)
		return &way{client: n.NS, gateway: listener(b, n.Stream), to: outside, teardown: func() {}}
	}},
}

var outside = unix.SockaddrInet4{Port: 443, Addr: [4]byte{8, 8, 8, 8}}

// wayC has a listener for each port in place of nf_tables.
func wayC(b *testing.B) *way {
	b.Helper()
	w := &way{to: outside, teardown: func() {}}
	must(b, osthread.Run(func() (err error) {
		p := newPlan()
		p.chains = nil
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		if w.client, err = os.Open("/proc/thread-self/ns/net"); err != nil {
			return err
		}
		if err := p.apply(); err != nil {
			return err
		}
		w.gateway, err = net.Listen("tcp", ":443")
		return err
	}))
	w.teardown = func() { _ = w.client.Close(); _ = w.gateway.Close() }
	return w
}

// wayA has a gateway's namespace behind a veth.
func wayA(b *testing.B) *way {
	b.Helper()
	w := &way{to: outside}
	var gateway *os.File
	must(b, osthread.Run(func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		w.client, err = os.Open("/proc/thread-self/ns/net")
		return err
	}))
	must(b, osthread.Run(func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		if gateway, err = os.Open("/proc/thread-self/ns/net"); err != nil {
			return err
		}
		p := newPlan()
		p.addresses, p.routes = nil, p.routes[:1]
		p.routes[0].src = netip.MustParseAddr("10.0.0.1")
		in := &p.chains[2]
		in.rules = slices.Clone(p.chains[1].rules)
		p.addresses = []netip.Prefix{netip.MustParsePrefix("10.0.0.1/32")}
		p.chains = []chain{*in}
		if err := p.apply(); err != nil {
			return err
		}
		if err := rtnl(func(h *netlink.Handle) error { return addVeth(h, int(w.client.Fd())) }); err != nil {
			return err
		}
		f, err := listen(portStream)
		if err != nil {
			return err
		}
		defer f.Close()
		w.gateway, err = net.FileListener(f)
		return err
	}))
	must(b, osthread.Run(func() error {
		if err := unix.Setns(int(w.client.Fd()), unix.CLONE_NEWNET); err != nil {
			return err
		}
		return rtnl(func(h *netlink.Handle) error {
			l, err := h.LinkByName("inner")
			if err != nil {
				return err
			}
			return errors.Join(h.LinkSetUp(l), h.AddrAdd(l, &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(10, 0, 0, 2), Mask: net.CIDRMask(24, 32)}}),
				h.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: ipNet(netip.MustParsePrefix("0.0.0.0/0")), Gw: net.IPv4(10, 0, 0, 1)}))
		})
	}))
	w.teardown = func() { _ = gateway.Close(); _ = w.client.Close(); _ = w.gateway.Close() }
	return w
}

func addVeth(h *netlink.Handle, peer int) error {
	err := h.LinkAdd(&netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: "outer", MTU: 65520, TxQLen: 1000}, PeerName: "inner", PeerMTU: 65520, PeerNamespace: netlink.NsFd(peer),
	})
	if err != nil {
		return err
	}
	l, err := h.LinkByName("outer")
	if err != nil {
		return err
	}
	return errors.Join(h.LinkSetUp(l), h.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: ipNet(netip.MustParsePrefix("10.0.0.2/32")), Src: net.IPv4(10, 0, 0, 1), Scope: unix.RT_SCOPE_LINK}))
}

// open makes a way with a relay, if it has a gateway, to a server in the tests' own namespace.
func openWay(b *testing.B, open func(*testing.B) *way, serve func(c *net.TCPConn)) *way {
	b.Helper()
	testenv.RequireUserNS(b)
	must(b, rtnl(func(h *netlink.Handle) error { return h.LinkSetUp(lo) }))
	server, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	must(b, err)
	w := open(b)
	var group sync.WaitGroup
	accept := func(l net.Listener, handle func(*net.TCPConn)) {
		group.Go(func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				group.Go(func() { handle(c.(*net.TCPConn)); _ = c.Close() })
			}
		})
	}
	accept(server, serve)
	if w.gateway == nil {
		w.to = unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}, Port: server.Addr().(*net.TCPAddr).Port}
	} else {
		accept(w.gateway, func(c *net.TCPConn) {
			s, err := net.DialTCP("tcp4", nil, server.Addr().(*net.TCPAddr))
			if err != nil {
				return
			}
			defer s.Close()
			done := make(chan struct{})
			go func() { _, _ = io.Copy(c, s); _ = c.CloseWrite(); close(done) }()
			_, _ = io.Copy(s, c)
			_ = s.CloseWrite()
			<-done
		})
	}
	b.Cleanup(func() {
		_ = server.Close()
		if w.gateway != nil {
			_ = w.gateway.Close()
		}
		w.teardown()
		group.Wait()
	})
	return w
}

// run runs the client on a thread in its namespace, with blocking calls.
func (w *way) run(b *testing.B, f func() error) {
	b.Helper()
	must(b, osthread.Run(func() error {
		if w.client != nil {
			if err := unix.Setns(int(w.client.Fd()), unix.CLONE_NEWNET); err != nil {
				return err
			}
		}
		return f()
	}))
}

func (w *way) connect() (int, error) {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	return s, unix.Connect(s, &w.to)
}

// BenchmarkConnect measures a connection with one byte in each direction.
func BenchmarkConnect(b *testing.B) {
	for _, way := range ways {
		b.Run(way.name, func(b *testing.B) {
			w := openWay(b, way.make, func(c *net.TCPConn) { _, _ = io.CopyN(c, c, 1) })
			w.run(b, func() error {
				buf := []byte{0}
				for b.Loop() {
					s, err := w.connect()
					if err != nil {
						return err
					}
					if _, err := unix.Write(s, buf); err != nil {
						return err
					}
					if n, err := unix.Read(s, buf); n != 1 {
						return errors.Join(io.ErrUnexpectedEOF, err)
					}
					if err := unix.Close(s); err != nil {
						return err
					}
				}
				return nil
			})
		})
	}
}

// BenchmarkStream measures one flow to the server.
func BenchmarkStream(b *testing.B) {
	for _, way := range ways {
		b.Run(way.name, func(b *testing.B) {
			w := openWay(b, way.make, func(c *net.TCPConn) { _, _ = io.Copy(io.Discard, c); _, _ = c.Write([]byte{1}) })
			b.SetBytes(256 << 10)
			w.run(b, func() error {
				s, err := w.connect()
				if err != nil {
					return err
				}
				buf := make([]byte, 256<<10)
				for b.Loop() {
					for rest := buf; len(rest) > 0; {
						n, err := unix.Write(s, rest)
						if err != nil {
							return err
						}
						rest = rest[n:]
					}
				}
				if err := unix.Shutdown(s, unix.SHUT_WR); err != nil {
					return err
				}
				if n, err := unix.Read(s, buf); n != 1 {
					return errors.Join(io.ErrUnexpectedEOF, err)
				}
				return unix.Close(s)
			})
		})
	}
}

// bare makes a namespace as the kernel has it: the least that a sandbox of any network takes.
func bare() (*Namespace, error) {
	n := new(Namespace)
	return n, osthread.Run(func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		n.NS, err = os.Open("/proc/thread-self/ns/net")
		return err
	})
}

// BenchmarkMake makes 100 namespaces an operation, by one thread and by eight, and waits for the
// kernel's word that they have ended.
func BenchmarkMake(b *testing.B) {
	testenv.RequireUserNS(b)
	for _, kind := range []struct {
		name string
		make func() (*Namespace, error)
	}{{"bare", bare}, {"full", Make}} {
		for _, threads := range []int{1, 8} {
			b.Run(kind.name+"/"+strconv.Itoa(threads), func(b *testing.B) {
				const count = 100
				var making, freeing time.Duration
				rounds := 0
				for b.Loop() {
					rounds++
					all := make([]*Namespace, count)
					start := time.Now()
					var group sync.WaitGroup
					for t := range threads {
						group.Go(func() {
							for i := t; i < count; i += threads {
								n, err := kind.make()
								if err != nil {
									b.Error(err)
									return
								}
								all[i] = n
							}
						})
					}
					group.Wait()
					making += time.Since(start)
					if b.Failed() {
						b.FailNow()
					}
					events, err := nl.Subscribe(unix.NETLINK_ROUTE, 28)
					must(b, err)
					for _, n := range all {
						must(b, netlink.SetNetNsIdByFd(int(n.NS.Fd()), -1))
					}
					start = time.Now()
					for _, n := range all {
						must(b, n.Close())
					}
					for ended := 0; ended < count; {
						messages, _, err := events.Receive()
						must(b, err)
						for _, m := range messages {
							if m.Header.Type == unix.RTM_DELNSID {
								ended++
							}
						}
					}
					freeing += time.Since(start)
					events.Close()
				}
				b.ReportMetric(float64(making.Microseconds())/float64(rounds*count), "µs/make")
				b.ReportMetric(float64(freeing.Milliseconds())/float64(rounds), "ms/free-100")
			})
		}
	}
}

// BenchmarkMemory holds 150 namespaces of a kind, after as many others that no free memory of the
// kernel's caches is left for them.
func BenchmarkMemory(b *testing.B) {
	testenv.RequireUserNS(b)
	var held []*Namespace
	hold := func(count int, make func() (*Namespace, error)) float64 {
		before := kernelMemory(b)
		for range count {
			n, err := make()
			must(b, err)
			held = append(held, n)
		}
		return float64(kernelMemory(b)-before) / float64(count)
	}
	for b.Loop() {
		hold(400, bare)
		b.ReportMetric(hold(150, bare), "KB/bare")
		b.ReportMetric(hold(150, Make), "KB/full")
		for _, n := range held {
			must(b, n.Close())
		}
		held = nil
	}
}

// kernelMemory returns the kilobytes of the kernel's own objects, of the whole machine.
func kernelMemory(b *testing.B) (sum int) {
	b.Helper()
	data, err := os.ReadFile("/proc/meminfo")
	must(b, err)
	for line := range strings.Lines(string(data)) {
		f := strings.Fields(line)
		if slices.Contains([]string{"Slab:", "Percpu:"}, f[0]) {
			n, err := strconv.Atoi(f[1])
			must(b, err)
			sum += n
		}
	}
	return sum
}

// BenchmarkDial measures a connection from outside to a server inside, with its socket.
func BenchmarkDial(b *testing.B) {
	n := namespace(b)
	serve(b, n, "tcp4", "127.0.0.1:80")
	for b.Loop() {
		c, err := Dial(b.Context(), n.NS, "tcp", 80)
		must(b, err)
		if _, err := io.Copy(io.Discard, c); err != nil {
			b.Fatal(err)
		}
		_ = c.Close()
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
