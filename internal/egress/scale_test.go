package egress

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/osthread"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/netns/gateway"
)

// descriptorsOfLimited is the limit of the role "limited", a usual one of services.
const descriptorsOfLimited = 20000

func init() {
	roles["limited"] = func([]string) error {
		if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: descriptorsOfLimited, Max: descriptorsOfLimited}); err != nil {
			return err
		}
		Main([]string{Argument})
		return nil
	}
}

// A crowd is many sandboxes in one namespace. Each has an address of its own, which is also that of
// a server in the test's namespace: connections to it have that destination, as if it was
// transparent.
type crowd struct {
	ns    *os.File
	boxes []crowded
}

type crowded struct {
	Sockets
	address string
}

// allowLocal makes the addresses of the crowd local in the namespace of the calling thread.
func allowLocal() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	_, subnet, err := net.ParseCIDR("93.184.0.0/16")
	if err != nil {
		return err
	}
	return errors.Join(netlink.LinkSetUp(lo), netlink.RouteReplace(&netlink.Route{
		LinkIndex: lo.Attrs().Index, Dst: subnet, Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, Scope: netlink.SCOPE_HOST,
	}))
}

func newCrowd(t *testing.T, size int) *crowd {
	t.Helper()
	c := &crowd{boxes: make([]crowded, size)}
	t.Cleanup(func() {
		for _, b := range c.boxes {
			for _, f := range []*os.File{b.Stream, b.DNS, b.DNSTCP} {
				_ = f.Close() // nil if the test has failed before
			}
		}
		_ = c.ns.Close()
	})
	err := osthread.Run(func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		if c.ns, err = os.Open("/proc/thread-self/ns/net"); err != nil {
			return err
		}
		if err := allowLocal(); err != nil {
			return err
		}
		for i := range c.boxes {
			b := &c.boxes[i]
			b.address = fmt.Sprintf("93.184.%d.%d", i/250, 1+i%250)
			for _, s := range []struct {
				to   **os.File
				kind int
				port int
			}{{&b.Stream, unix.SOCK_STREAM, 7000}, {&b.DNSTCP, unix.SOCK_STREAM, 53}, {&b.DNS, unix.SOCK_DGRAM, 53}} {
				fd, err := unix.Socket(unix.AF_INET, s.kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
				if err != nil {
					return err
				}
				*s.to = os.NewFile(uintptr(fd), "sandbox")
				err = unix.Bind(fd, &unix.SockaddrInet4{Port: s.port, Addr: [4]byte(net.ParseIP(b.address).To4())})
				if err == nil && s.kind == unix.SOCK_STREAM {
					err = unix.Listen(fd, 128)
				}
				if err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// within runs f on a thread in the namespace of the crowd.
func (c *crowd) within(t *testing.T, f func() error) {
	t.Helper()
	err := osthread.Run(func() error {
		if err := unix.Setns(int(c.ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return err
		}
		return f()
	})
	if err != nil {
		t.Fatal(err)
	}
}

// hold connects to the server and exchanges a byte. The connection stays open until the end of the
// test.
func (b *crowded) hold(t *testing.T) error {
	t.Helper()
	c, err := net.Dial("tcp", b.address+":7000")
	if err != nil {
		return err
	}
	t.Cleanup(func() { _ = c.Close() })
	if err := c.SetDeadline(time.Now().Add(testenv.HungAfter)); err != nil {
		return err
	}
	if _, err := c.Write([]byte{1}); err != nil {
		return err
	}
	_, err = io.ReadFull(c, make([]byte, 1))
	return err
}

// ask sends questions, and returns the connection for the answers.
func (b *crowded) ask(t *testing.T, names ...string) (net.Conn, error) {
	t.Helper()
	c, err := net.Dial("udp", b.address+":53")
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { _ = c.Close() })
	for _, name := range names {
		q := dnsmessage.Message{Header: dnsmessage.Header{ID: 1, RecursionDesired: true}, Questions: []dnsmessage.Question{{
			Name: dnsmessage.MustNewName(name + "."), Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET,
		}}}
		msg, err := q.Pack()
		if err != nil {
			return nil, err
		}
		if _, err := c.Write(msg); err != nil {
			return nil, err
		}
	}
	return c, c.SetDeadline(time.Now().Add(testenv.HungAfter))
}

// One gateway with 20,000 descriptors serves more than a thousand networks. While two take all
// connections and questions that they get, each other one has its minimum of both, all at once.
func TestThousandNetworks(t *testing.T) {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil || limit.Max < descriptorsOfLimited {
		t.Skipf("the test needs %d descriptors itself, has %d (%v)", descriptorsOfLimited, limit.Max, err)
	}
	if !inWorld(t) {
		return
	}
	var l net.Listener
	err := internet.Enter(func() (err error) {
		l, err = net.Listen("tcp", "0.0.0.0:7000")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	t.Cleanup(func() {
		_ = l.Close()
		serving.Wait()
	})
	serving.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { _ = c.Close() })
			serving.Go(func() {
				b := make([]byte, 1)
				if _, err := io.ReadFull(c, b); err == nil {
					_, _ = c.Write(b) // the client looks; it holds the connection
				}
			})
		}
	})

	g, s, e := startGateway(t, "limited")
	most := gateway.NewPool(descriptorsOfLimited).Networks()
	if most < 1000 {
		t.Fatalf("%d networks", most)
	}
	all := newCrowd(t, most+1)
	doc := []byte(`{"version": 1, "rules": [{"name": "ours", "allow": ["93.184.0.0/16", "*.example.com"], "ports": [7000]}]}`)
	for i := range all.boxes {
		err := g.Add(t.Context(), Network{ID: fmt.Sprint(i), Policy: doc, Sockets: all.boxes[i].Sockets})
		if i < most && err != nil {
			t.Fatal(err)
		}
		if i == most && (!errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "limit of open files")) {
			t.Errorf("network %d: %v", i, err)
		}
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		if strings.HasPrefix(line, "VmRSS") || strings.HasPrefix(line, "Threads") {
			t.Logf("%d networks: %s", most, line)
		}
	}

	// The first stops at the bound of one network, the second where the pool has no more for it.
	const greedy = 2
	others := all.boxes[greedy:most]
	all.within(t, func() error {
		names := make([]string, 100)
		for i := range names {
			names[i] = fmt.Sprintf("hang%d.example.com", i)
		}
		for i := range greedy {
			if _, err := all.boxes[i].ask(t, names...); err != nil {
				return err
			}
			held, err := 0, error(nil)
			for ; err == nil && held < descriptorsOfLimited; held++ {
				err = all.boxes[i].hold(t)
			}
			if !errors.Is(err, syscall.ECONNRESET) {
				return err
			}
			t.Logf("network %d holds %d connections", i, held-1)
		}
		return nil
	})
	for refused := 0; refused < greedy; {
		v := e.next(t)
		if v.Kind != gateway.Connection {
			continue
		}
		if want := []string{"connections at once", "limit of open files"}[refused]; v.Network != fmt.Sprint(refused) || v.Allow || !strings.Contains(v.Reason, want) {
			t.Errorf("%+v, want %q", v, want)
		}
		refused++
	}
	all.within(t, func() error {
		answers := make([]net.Conn, len(others))
		for i := range others {
			for range 3 {
				if err := others[i].hold(t); err != nil {
					return fmt.Errorf("connection of network %d: %w", greedy+i, err)
				}
			}
			if answers[i], err = others[i].ask(t, "no.example.com"); err != nil {
				return err
			}
		}
		for i, c := range answers {
			b := make([]byte, 1500)
			n, err := c.Read(b)
			if err != nil {
				return err
			}
			var m dnsmessage.Message
			// The resolver does not know the name, so that the answer has no address.
			if err := m.Unpack(b[:n]); err != nil || m.RCode != dnsmessage.RCodeSuccess {
				t.Errorf("question of network %d: %v, %v", greedy+i, m.RCode, err)
			}
		}
		return nil
	})
}
