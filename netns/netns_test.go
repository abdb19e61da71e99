package netns

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

// Traffic to any address reaches the gateway, and the accepted connection's local address is what
// the program connected to.
func TestStreamsReachTheGateway(t *testing.T) {
	n := namespace(t)
	l := listener(t, n.Stream)
	for _, to := range []string{
		"8.8.8.8:443", "[2600::1]:443", "[::ffff:1.1.1.1]:80", "10.1.2.3:22", "[fd00::1]:22", "169.254.169.254:80", "192.0.2.53:80", "192.0.2.2:7",
		"[2001:db8::2]:7", "8.8.8.8:1", "8.8.8.8:2", "[2600::1]:1", "198.51.100.9:65535",
	} {
		c := dial(t, n, "tcp", to)
		g, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		limit(t, g)
		if got, want := addrPort(t, g.LocalAddr()), netip.MustParseAddrPort(to); got != netip.AddrPortFrom(want.Addr().Unmap(), want.Port()) {
			t.Errorf("a connection to %s arrives as one to %s", to, got)
		}
		if got, want := addrPort(t, g.RemoteAddr()), addrPort(t, c.LocalAddr()); got != want || got.Addr() != Address4 && got.Addr() != Address6 {
			t.Errorf("to %s: the program is at %s, to the gateway at %s", to, want, got)
		}
		exchange(t, c, g)
		exchange(t, g, c)
		if err := errors.Join(c.Close(), g.Close()); err != nil {
			t.Error(err)
		}
	}
	empty(t, n)
}

func exchange(t *testing.T, from, to net.Conn) {
	t.Helper()
	if _, err := io.WriteString(from, "hello"); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 5)
	if _, err := io.ReadFull(to, buf); err != nil || string(buf) != "hello" {
		t.Fatalf("%q, %v", buf, err)
	}
}

// DNS is asked at any address, and the answer comes from there: connected sockets drop any other.
func TestDNSReachesTheGateway(t *testing.T) {
	bothPlans(t, func(t *testing.T, n *Namespace) {
		t.Helper()
		g := datagrams(t, n.DNS)
		for _, to := range []string{"192.0.2.53:53", "8.8.8.8:53", "[2600::1]:53", "[::ffff:1.1.1.1]:53", "10.0.0.1:53"} {
			c := dial(t, n, "udp", to)
			if _, err := io.WriteString(c, "question"); err != nil {
				t.Fatal(err)
			}
			buf, oob := make([]byte, 512), make([]byte, 128)
			size, oobSize, _, from, err := g.ReadMsgUDPAddrPort(buf, oob)
			if err != nil || string(buf[:size]) != "question" {
				t.Fatalf("%s: %q, %v", to, buf[:size], err)
			}
			if got := addrPort(t, c.LocalAddr()); netip.AddrPortFrom(from.Addr().Unmap(), from.Port()) != got {
				t.Errorf("%s: a question of %s comes from %s", to, got, from)
			}
			if got, want := destinationOf(t, oob[:oobSize]), netip.MustParseAddrPort(to).Addr().Unmap(); got != want {
				t.Errorf("a question to %s arrives as one to %s", want, got)
			}
			if _, _, err := g.WriteMsgUDPAddrPort([]byte("answer"), oob[:oobSize], from); err != nil {
				t.Fatal(err)
			}
			if size, err = c.Read(buf); err != nil || string(buf[:size]) != "answer" {
				t.Errorf("%s: the answer is %q, %v", to, buf[:size], err)
			}
		}
		l := listener(t, n.DNSTCP)
		for _, to := range []string{"192.0.2.53:53", "8.8.8.8:53", "[2600::1]:53"} {
			dial(t, n, "tcp", to)
			c, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			if got := addrPort(t, c.LocalAddr()); got != netip.MustParseAddrPort(to) {
				t.Errorf("DNS over TCP to %s arrives as one to %s", to, got)
			}
			_ = c.Close()
		}
		empty(t, n)
	})
}

// destinationOf returns the address of a control message IPV6_PKTINFO.
func destinationOf(t *testing.T, oob []byte) netip.Addr {
	t.Helper()
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil || len(messages) != 1 || messages[0].Header.Type != unix.IPV6_PKTINFO {
		t.Fatalf("control messages %v, %v", messages, err)
	}
	return netip.AddrFrom16([16]byte(messages[0].Data[:16])).Unmap()
}

// Each datagram that is not DNS is refused, beyond the kernel's rate limits too: QUIC falls back to
// TCP at the first refusal.
func TestOtherDatagramsAreRefused(t *testing.T) {
	bothPlans(t, func(t *testing.T, n *Namespace) {
		t.Helper()
		inside(t, n, func() error {
			// A server on every address does not get datagrams for an address outside.
			s, err := net.ListenUDP("udp", &net.UDPAddr{Port: 443})
			if err != nil {
				return err
			}
			t.Cleanup(func() { _ = s.Close() })
			return nil
		})
		for _, to := range []string{"8.8.8.8:443", "[2600::1]:443", "8.8.8.8:1", "[2600::1]:2", "10.0.0.1:5353", "192.0.2.53:54", "127.0.0.1:1", "[::1]:1", "192.0.2.1:1"} {
			c := dial(t, n, "udp", to)
			for i := range 1000 {
				if _, err := c.Write([]byte("x")); err != nil {
					t.Fatalf("%s: write %d: %v", to, i, err)
				}
				if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNREFUSED) {
					t.Fatalf("%s: read %d: %v, want a refusal", to, i, err)
				}
			}
		}
		empty(t, n)
	})
}

// Nothing but TCP and UDP leaves: an echo of ICMP is refused, although every address is local. Own
// addresses answer.
func TestOtherProtocolsAreRefused(t *testing.T) {
	n := namespace(t)
	for _, test := range []struct {
		to           string
		answer, code byte // of ICMP or ICMPv6
	}{
		{"8.8.8.8", 3, 13},
		{"2600::1", 1, 1},
		{"192.0.2.53", 3, 13},
		{"127.0.0.1", 0, 0},
		{"::1", 129, 0},
		{"192.0.2.1", 0, 0},
		{"2001:db8::1", 129, 0}, // the controls
	} {
		network, echo := "ip4:icmp", byte(8)
		if strings.Contains(test.to, ":") {
			network, echo = "ip6:ipv6-icmp", 128
		}
		var c *net.IPConn
		inside(t, n, func() (err error) {
			c, err = net.ListenIP(network, nil)
			return err
		})
		limit(t, c)
		message := []byte{echo, 0, 0, 0, 0, 1, 0, 1}
		if echo == 8 {
			binary.BigEndian.PutUint16(message[2:], ^uint16(0x0800+1+1)) // RFC 1071; the kernel does it for ICMPv6
		}
		if _, err := c.WriteTo(message, &net.IPAddr{IP: net.ParseIP(test.to)}); err != nil {
			t.Fatal(err)
		}
		// The socket hears the request too, which lo brings back.
		buf := make([]byte, 1500)
		for {
			size, _, err := c.ReadFrom(buf)
			if err != nil || size < 2 {
				t.Fatal(size, err)
			}
			if buf[0] != echo {
				break
			}
		}
		if buf[0] != test.answer || buf[1] != test.code {
			t.Errorf("an echo request to %s is answered by type %d code %d, want %d and %d", test.to, buf[0], buf[1], test.answer, test.code)
		}
		_ = c.Close()
	}
}

// Programs reach each other on the sandbox's own addresses, and the gateway sees nothing of it.
func TestOwnAddressesStayOwn(t *testing.T) {
	n := namespace(t)
	for _, test := range []struct{ listen, connect string }{
		{"127.0.0.1:80", "127.0.0.1:80"},
		{"127.1.2.3:443", "127.1.2.3:443"},
		{"0.0.0.0:53", "127.0.0.1:53"},
		{"0.0.0.0:53", "192.0.2.1:53"},
		{"0.0.0.0:8000", "0.0.0.0:8000"},
		{"192.0.2.1:81", "192.0.2.1:81"},
		{"[::1]:80", "[::1]:80"},
		{"[::]:8080", "[::1]:8080"},
		{"[::]:8080", "127.0.0.1:8080"},
		{"[::]:8080", "[::ffff:127.0.0.1]:8080"},
		{"[::]:8080", "[2001:db8::1]:8080"},
		{"[2001:db8::1]:82", "[2001:db8::1]:82"},
		{"0.0.0.0:3", "127.0.0.1:3"},
	} {
		t.Run(test.connect+" at "+test.listen, func(t *testing.T) {
			network := "tcp"
			if !strings.HasPrefix(test.listen, "[") {
				network = "tcp4"
			}
			serve(t, n, network, test.listen)
			if got, err := io.ReadAll(dial(t, n, "tcp", test.connect)); err != nil || string(got) != test.listen {
				t.Errorf("answered by %q, %v", got, err)
			}
		})
	}
	for _, to := range []string{"127.0.0.1:9", "[::1]:9", "192.0.2.1:9", "[2001:db8::1]:9"} { // without a server
		if _, err := tryDial(t, n, "tcp", to); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("connect to %s: %v", to, err)
		}
	}
	var s *net.UDPConn
	inside(t, n, func() (err error) {
		s, err = net.ListenUDP("udp", &net.UDPAddr{Port: 53})
		return err
	})
	defer s.Close()
	limit(t, s)
	for _, to := range []string{"127.0.0.1:53", "[::1]:53", "192.0.2.1:53", "[2001:db8::1]:53"} { // a name server of its own
		c := dial(t, n, "udp", to)
		if _, err := c.Write([]byte(to)); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 64)
		size, from, err := s.ReadFromUDPAddrPort(buf)
		if err != nil || string(buf[:size]) != to {
			t.Fatalf("%s: %q, %v", to, buf[:size], err)
		}
		if _, err := s.WriteToUDPAddrPort([]byte("own"), from); err != nil {
			t.Fatal(err)
		}
		if size, err := c.Read(buf); err != nil || string(buf[:size]) != "own" {
			t.Errorf("%s: %q, %v", to, buf[:size], err)
		}
	}
	empty(t, n)
}

// A server that listens on every address gets no connection that was made to an address outside.
func TestServersDoNotCatchStreams(t *testing.T) {
	n := namespace(t)
	serve(t, n, "tcp", "[::]:443")
	l := listener(t, n.Stream)
	for _, to := range []string{"8.8.8.8:443", "[2600::1]:443"} {
		dial(t, n, "tcp", to)
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		if got := addrPort(t, c.LocalAddr()); got != netip.MustParseAddrPort(to) {
			t.Errorf("%s arrives as %s", to, got)
		}
		_ = c.Close()
	}
}

// The gateway sees one address of each family. A program that binds another one is refused at once.
func TestOtherSourcesAreRefused(t *testing.T) {
	n := namespace(t)
	for _, test := range []struct{ from, to string }{
		{"127.0.0.1", "8.8.8.8:443"}, {"127.0.0.1", "8.8.8.8:53"}, {"8.8.8.8", "1.1.1.1:443"}, {"8.8.8.8", "8.8.8.8:443"}, {"::1", "[2600::1]:443"},
	} {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(test.from)}}
		inside(t, n, func() error {
			c, err := d.DialContext(t.Context(), "tcp", test.to)
			if !errors.Is(err, unix.ECONNREFUSED) {
				t.Errorf("from %s to %s: %v, %v, want a refusal", test.from, test.to, c, err)
			}
			return nil
		})
	}
	empty(t, n)
}

// The gateway's sockets cannot be reached at their own addresses: every connection that arrives has
// the destination that a program meant.
func TestSocketsAreNotReachedDirectly(t *testing.T) {
	n := namespace(t)
	for _, to := range []string{"127.0.0.1", "127.9.9.9", "0.0.0.0", "[::1]", "192.0.2.1", "[2001:db8::1]", "[::ffff:127.0.0.1]"} {
		for _, port := range []string{":1", ":2"} {
			if _, err := tryDial(t, n, "tcp", to+port); !errors.Is(err, unix.ECONNREFUSED) {
				t.Errorf("connect to %s%s: %v, want a refusal", to, port, err)
			}
		}
	}
	empty(t, n)
}

// Where the DNS socket has port 53, datagrams to that port of the sandbox's own addresses are
// refused, as where no program has bound it.
func TestDNSIsNotReachedDirectly(t *testing.T) {
	bothPlans(t, func(t *testing.T, n *Namespace) {
		t.Helper()
		for _, to := range []string{"127.0.0.1", "[::1]", "192.0.2.1", "[2001:db8::1]"} {
			for _, port := range []string{":1", ":53"} {
				c := dial(t, n, "udp", to+port)
				if _, err := io.WriteString(c, "question"); err != nil {
					t.Fatal(err)
				}
				if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNREFUSED) {
					t.Errorf("a question to %s%s: %v, want a refusal", to, port, err)
				}
			}
		}
		empty(t, n)
	})
}

// Make must not change the namespace of its caller, whichever thread that is.
func TestTheCallerStays(t *testing.T) {
	testenv.RequireUserNS(t)
	look := func() string {
		process, err := os.Readlink("/proc/self/ns/net")
		if err != nil {
			t.Fatal(err)
		}
		thread, err := os.Readlink("/proc/thread-self/ns/net")
		if err != nil {
			t.Fatal(err)
		}
		return process + thread
	}
	before := look()
	inodes := make(map[uint64]bool)
	for range 3 {
		n := namespace(t)
		var st unix.Stat_t
		if err := unix.Fstat(int(n.NS.Fd()), &st); err != nil {
			t.Fatal(err)
		}
		inodes[st.Ino] = true
	}
	if after := look(); after != before || strings.Count(after, "net:") != 2 {
		t.Errorf("namespaces were %s and are %s", before, after)
	}
	if len(inodes) != 3 {
		t.Errorf("three namespaces have %d inodes", len(inodes))
	}
}

func TestDial(t *testing.T) {
	n := namespace(t)
	serve(t, n, "tcp4", "127.0.0.1:8080")
	serve(t, n, "tcp6", "[::1]:8081")
	serve(t, n, "tcp", "[::]:8082")
	for port, want := range map[uint16]string{8080: "127.0.0.1:8080", 8081: "[::1]:8081", 8082: "[::]:8082"} {
		c, err := Dial(t.Context(), n.NS, "tcp", port)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(c); err != nil || string(got) != want {
			t.Errorf("port %d: %q, %v", port, got, err)
		}
		_ = c.Close()
	}
	if _, err := Dial(t.Context(), n.NS, "tcp", 8083); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("a port without a server: %v", err)
	}
	for _, port := range []uint16{portStream, portDNSTCP} {
		if _, err := Dial(t.Context(), n.NS, "tcp", port); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("the gateway's own port %d: %v", port, err)
		}
	}
	var s *net.UDPConn
	inside(t, n, func() (err error) {
		s, err = net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 8080})
		return err
	})
	defer s.Close()
	limit(t, s)
	c, err := Dial(t.Context(), n.NS, "udp", 8080)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	limit(t, c)
	buf := make([]byte, 16)
	if _, err := c.Write([]byte("in")); err != nil {
		t.Fatal(err)
	}
	size, from, err := s.ReadFromUDPAddrPort(buf)
	if err != nil || string(buf[:size]) != "in" {
		t.Fatalf("%q, %v", buf[:size], err)
	}
	if _, err := s.WriteToUDPAddrPort([]byte("out"), from); err != nil {
		t.Fatal(err)
	}
	if size, err := c.Read(buf); err != nil || string(buf[:size]) != "out" {
		t.Errorf("%q, %v", buf[:size], err)
	}
	if _, err := Dial(t.Context(), n.NS, "unix", 1); err == nil {
		t.Error("a network that there is not")
	}
	empty(t, n)
}

// By the sandbox's own addresses, servers on its loopback are not reached, nor the gateway's
// sockets.
func TestConnectOwn(t *testing.T) {
	n := namespace(t)
	serve(t, n, "tcp4", "0.0.0.0:8080")
	serve(t, n, "tcp6", "[::]:8081")
	serve(t, n, "tcp4", Address4.String()+":8082")
	serve(t, n, "tcp6", "["+Address6.String()+"]:8083")
	serve(t, n, "tcp4", "127.0.0.1:8084")
	serve(t, n, "tcp6", "[::1]:8085")
	for port, want := range map[uint16]string{
		8080: "0.0.0.0:8080", 8081: "[::]:8081", 8082: "192.0.2.1:8082", 8083: "[2001:db8::1]:8083", 8084: "", 8085: "", 8086: "", portStream: "", portDNSTCP: "",
	} {
		s, err := Socket(n.NS, "tcp")
		if err != nil {
			t.Fatal(err)
		}
		c, err := ConnectOwn(t.Context(), s, port)
		_ = s.Close()
		if err != nil {
			if want != "" || !errors.Is(err, unix.ECONNREFUSED) {
				t.Errorf("port %d: %v", port, err)
			}
			continue
		}
		limit(t, c)
		if got, err := io.ReadAll(c); err != nil || string(got) != want {
			t.Errorf("port %d: %q, %v, want %q", port, got, err, want)
		}
		_ = c.Close()
	}
	empty(t, n)
}

// A program can serve a port while it has connections to that port outside: the other end of such a
// connection is in its namespace, and has the port. It can also while the other end is closed
// (TIME_WAIT). Both ends of a conflict have to have SO_REUSEADDR, which servers set.
func TestPortsOfConnectionsCanBeServed(t *testing.T) {
	for _, to := range []string{"10.1.0.7:9000", "[2600::1]:9000"} {
		n := namespace(t)
		l := listener(t, n.Stream)
		connect := func() (program, gateway net.Conn) {
			t.Helper()
			program = dial(t, n, "tcp", to)
			gateway, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = gateway.Close() })
			if got := addrPort(t, gateway.LocalAddr()); got != netip.MustParseAddrPort(to) {
				t.Fatalf("the gateway has a connection to %s", got)
			}
			return program, gateway
		}
		try := func(when string) {
			t.Helper()
			for _, r := range append(sandboxes(), owner) {
				if got := enter(t, n, "bind-9000", r); got != "done" {
					t.Errorf("%s, with a connection to %s %s: %s", r, to, when, got)
				}
			}
		}
		_, g := connect()
		try("that is open")
		if err := g.Close(); err != nil {
			t.Fatal(err)
		}
		try("that was closed")
		serve(t, n, "tcp", "[::]:9000") // Go's listeners have the option
		if got, err := io.ReadAll(dial(t, n, "tcp", "127.0.0.1:9000")); err != nil || string(got) != "[::]:9000" {
			t.Errorf("the server answers %q, %v", got, err)
		}
		program, gateway := connect()
		exchange(t, program, gateway)
		empty(t, n)
	}
}

// A server that accepts nothing fills its queue; a connection then waits, as long as its context.
func TestDialEndsWithItsContext(t *testing.T) {
	n := namespace(t)
	inside(t, n, func() error {
		s, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		t.Cleanup(func() { _ = unix.Close(s) })
		return errors.Join(unix.Bind(s, &unix.SockaddrInet6{Port: 80}), unix.Listen(s, 0))
	})
	c, err := Dial(t.Context(), n.NS, "tcp", 80) // the only one that there is room for
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx, cancel := context.WithCancel(t.Context())
	go cancel()
	if _, err := Dial(ctx, n.NS, "tcp", 80); !errors.Is(err, context.Canceled) {
		t.Errorf("it ended with %v", err)
	}
}
