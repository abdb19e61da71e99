package network

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/osthread"
	"github.com/sandboxd/sandboxd/internal/testenv/outside"
	"github.com/sandboxd/sandboxd/tests/network/op"
)

// A world is the Internet of the tests.
type world struct {
	net, mounts *os.File // namespaces of the daemon
	beyond      *outside.Network
	dir         string // of its files
	authority   *authority
	names       *nameserver
	tap         *tap
	closers     []io.Closer
	serving     sync.WaitGroup

	mu       sync.Mutex // guards those below
	servers  map[netip.AddrPort]func(net.Conn)
	received []*arrival
}

// An arrival is a connection, or a datagram, that came to an address.
type arrival struct {
	network string // tcp or udp
	to      netip.AddrPort
	from    netip.AddrPort

	mu    sync.Mutex // guards data
	data  []byte     // the first bytes
	ended bool
}

func (a *arrival) bytes() []byte {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.data)
}

// mostRecorded bounds the bytes that are kept of an arrival.
const mostRecorded = 128 << 10

func (a *arrival) add(b []byte) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.data = append(a.data, b[:min(len(b), mostRecorded-len(a.data))]...)
}

// ports have a server or a canary on every address.
var ports = []uint16{21, 22, 23, 25, 53, 80, 110, 443, 465, 587, 853, 1080, 1433, 2375, 3128, 3306, 4444, 5000, 5432, 6379, 8000, 8080, 8443, 9000, 9418, 11211, 27017}

// udpPorts have a canary for datagrams.
var udpPorts = []uint16{53, 69, 123, 161, 443, 514, 1900, 3478, 4500, 5353, 51820}

// resolverAt is the address of the nameserver of the daemon's host.
const resolverAt = "127.0.0.53"

// newWorld makes the namespaces and servers. The caller closes it.
func newWorld() (_ *world, err error) {
	w := &world{servers: make(map[netip.AddrPort]func(net.Conn))}
	defer func() {
		if err != nil {
			w.close()
		}
	}()
	if w.dir, err = os.MkdirTemp("", "nettests"); err != nil {
		return nil, err
	}
	if w.authority, err = newAuthority(); err != nil {
		return nil, err
	}
	files := map[string]string{
		bundleOfTheHost:    string(w.authority.pem),
		"/etc/resolv.conf": "nameserver " + resolverAt + "\noptions timeout:30 attempts:2\n",
		"/etc/hosts":       "127.0.0.1 localhost\n::1 localhost\n10.0.0.9 intranet.allowed.test\n127.0.0.1 self.allowed.test\n",
	}
	for name, text := range files {
		if err := os.WriteFile(w.file(name), []byte(text), 0o644); err != nil {
			return nil, err
		}
	}
	if err := os.Chmod(w.dir, 0o755); err != nil {
		return nil, err
	}
	err = osthread.Run(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET | unix.CLONE_NEWNS); err != nil {
			return os.NewSyscallError("unshare", err)
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
			return os.NewSyscallError("mount", err)
		}
		for name := range files {
			if err := unix.Mount(w.file(name), name, "", unix.MS_BIND, ""); err != nil {
				return fmt.Errorf("mount over %s: %w", name, err)
			}
		}
		if w.net, err = os.Open("/proc/thread-self/ns/net"); err != nil {
			return err
		}
		if w.mounts, err = os.Open("/proc/thread-self/ns/mnt"); err != nil {
			return err
		}
		if err := loUp(); err != nil {
			return err
		}
		w.beyond, err = outside.Make()
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("make a namespace: %w", err)
	}
	if err := errors.Join(w.enter(w.open), w.beyond.Enter(w.serveAll)); err != nil {
		return nil, fmt.Errorf("open sockets in the namespaces: %w", err)
	}
	return w, nil
}

func (w *world) file(name string) string { return filepath.Join(w.dir, filepath.Base(name)) }

const loIndex = 1

func loUp() error {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer h.Close()
	if err := h.LinkSetUp(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: loIndex}}); err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	return nil
}

// connectAll makes every address local to the thread's namespace.
func connectAll() error {
	if err := loUp(); err != nil {
		return err
	}
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer h.Close()
	lo := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: loIndex}}
	for _, f := range []struct {
		address netip.Addr
		all     string
	}{{outside.Here4, "0.0.0.0/0"}, {outside.Here6, "::/0"}} {
		address, all := netip.PrefixFrom(f.address, f.address.BitLen()), netip.MustParsePrefix(f.all)
		if err := h.AddrAdd(lo, &netlink.Addr{IPNet: ipNet(address), Flags: unix.IFA_F_NODAD}); err != nil {
			return fmt.Errorf("add address %s: %w", address, err)
		}
		err := h.RouteAdd(&netlink.Route{
			LinkIndex: loIndex, Dst: ipNet(all), Src: address.Addr().AsSlice(), Table: unix.RT_TABLE_MAIN, Type: unix.RTN_LOCAL, Scope: unix.RT_SCOPE_HOST,
		})
		if err != nil {
			return fmt.Errorf("add route %s: %w", all, err)
		}
	}
	const own = "192.0.2.1/32" // the sandbox's address, which an attack removes
	if err := h.AddrAdd(lo, &netlink.Addr{IPNet: ipNet(netip.MustParsePrefix(own))}); err != nil {
		return fmt.Errorf("add address %s: %w", own, err)
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// enter calls f on a thread in the namespaces.
func (w *world) enter(f func() error) error {
	return osthread.Run(func() error {
		if err := unix.Unshare(unix.CLONE_FS); err != nil { // or the mount namespace cannot be entered
			return os.NewSyscallError("unshare", err)
		}
		for _, ns := range []*os.File{w.net, w.mounts} {
			if err := unix.Setns(int(ns.Fd()), 0); err != nil {
				return os.NewSyscallError("setns", err)
			}
		}
		return f()
	})
}

// beside makes sockets that share a port: one at all addresses, and one at the address of the
// nameserver, which the kernel prefers.
var beside = net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
	var err error
	ctrl := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) })
	return errors.Join(ctrl, err)
}}

// open opens the sockets on the daemon's host, with canaries on all ports. It runs there.
func (w *world) open() error {
	var err error
	if w.tap, err = openTap(); err != nil {
		return fmt.Errorf("tap: %w", err)
	}
	if err := w.serveAll(); err != nil {
		return err
	}
	abstract, err := net.Listen("unix", "@"+op.Abstract)
	if err != nil {
		return err
	}
	w.closers = append(w.closers, abstract)
	w.names, err = openNameserver(resolverAt + ":53")
	return err
}

// serveAll opens the sockets of servers and canaries in the thread's network namespace.
func (w *world) serveAll() error {
	for _, port := range ports {
		l, err := beside.Listen(context.Background(), "tcp", fmt.Sprintf(":%d", port))
		if err != nil {
			return err
		}
		w.closers = append(w.closers, l)
		w.serving.Go(func() { w.accept(l.(*net.TCPListener)) })
	}
	for _, port := range udpPorts {
		c, err := beside.ListenPacket(context.Background(), "udp", fmt.Sprintf(":%d", port))
		if err != nil {
			return err
		}
		w.closers = append(w.closers, c)
		w.serving.Go(func() { w.receive(c.(*net.UDPConn), port) })
	}
	return nil
}

func (w *world) close() {
	for _, c := range w.closers {
		_ = c.Close() // it is a socket
	}
	if w.names != nil {
		w.names.close()
	}
	if w.tap != nil {
		w.tap.close()
	}
	w.serving.Wait()
	for _, f := range []*os.File{w.net, w.mounts} {
		if f != nil {
			_ = f.Close() // it is open for reading
		}
	}
	if w.beyond != nil {
		_ = w.beyond.Close() // it is open for reading
	}
	_ = os.RemoveAll(w.dir) // it is in the directory for temporary files
}

// accept serves a port of all addresses.
func (w *world) accept(l *net.TCPListener) {
	for {
		c, err := l.AcceptTCP()
		if err != nil {
			return
		}
		to, from := unmapped(c.LocalAddr()), unmapped(c.RemoteAddr())
		a := &arrival{network: "tcp", to: to, from: from}
		w.mu.Lock()
		w.received = append(w.received, a)
		serve := w.servers[to]
		w.mu.Unlock()
		go func() { // it ends with the connection
			defer c.Close()
			if serve == nil {
				serve = func(c net.Conn) { _, _ = c.Read(make([]byte, mostRecorded)) } // a canary; the first bytes are enough
			}
			serve(&recorded{TCPConn: c, arrival: a})
			a.mu.Lock()
			a.ended = true
			a.mu.Unlock()
		}()
	}
}

// recorded is a connection whose first bytes are kept.
type recorded struct {
	*net.TCPConn

	arrival *arrival
}

func (r *recorded) Read(b []byte) (int, error) {
	n, err := r.TCPConn.Read(b)
	r.arrival.add(b[:n])
	return n, err
}

// WriteTo hides that of TCPConn, which would read past the record.
func (r *recorded) WriteTo(w io.Writer) (int64, error) {
	return io.Copy(w, struct{ io.Reader }{r})
}

func (w *world) receive(c *net.UDPConn, port uint16) {
	buf := make([]byte, 64<<10)
	for {
		n, from, err := c.ReadFromUDPAddrPort(buf)
		if err != nil {
			return
		}
		// The tap knows the address.
		to := netip.AddrPortFrom(netip.IPv6Unspecified(), port)
		w.mu.Lock()
		w.received = append(w.received, &arrival{network: "udp", to: to, from: from, data: slices.Clone(buf[:n]), ended: true})
		w.mu.Unlock()
	}
}

func unmapped(a net.Addr) netip.AddrPort {
	p := a.(*net.TCPAddr).AddrPort()
	return netip.AddrPortFrom(p.Addr().Unmap().WithZone(""), p.Port())
}

// serve has f serve connections to an address and port until the test ends.
func (w *world) serve(t testing.TB, to string, f func(net.Conn)) {
	t.Helper()
	at := netip.MustParseAddrPort(to)
	if !slices.Contains(ports, at.Port()) {
		t.Fatalf("port %d is not open in the world", at.Port())
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.servers[at] != nil {
		t.Fatalf("%s is served already", to)
	}
	w.servers[at] = f
	t.Cleanup(func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.servers, at)
	})
}

// count returns the number of connections to an address and port since the last take.
func (w *world) count(to netip.AddrPort) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := 0
	for _, a := range w.received {
		if a.to == to {
			n++
		}
	}
	return n
}

// take returns the arrivals so far, and forgets them.
func (w *world) take() []*arrival {
	w.mu.Lock()
	defer w.mu.Unlock()
	all := w.received
	w.received = nil
	return all
}

// runWithin runs a command that starts on a thread of within, and returns its output.
func runWithin(within func(func() error) error, cmd *exec.Cmd, stdin []byte) ([]byte, error) {
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(stdin), &out, &errs
	if err := within(cmd.Start); err != nil {
		return nil, err
	}
	if err := cmd.Wait(); err != nil {
		return nil, fmt.Errorf("%q: %w: %s", cmd.Args, err, &errs)
	}
	return out.Bytes(), nil
}

// bare calls f on a thread in a network namespace of its own, in which every address is local and
// none has a server.
func (w *world) bare(f func() error) error {
	return w.enter(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return os.NewSyscallError("unshare", err)
		}
		if err := connectAll(); err != nil {
			return err
		}
		return f()
	})
}

// listener hands connections to a server of the standard library.
type listener struct {
	at    netip.AddrPort
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

// listen returns a listener for an address and port, until the test ends.
func (w *world) listen(t testing.TB, to string) net.Listener {
	t.Helper()
	l := &listener{at: netip.MustParseAddrPort(to), conns: make(chan net.Conn), done: make(chan struct{})}
	w.serve(t, to, func(c net.Conn) {
		h := &handed{Conn: c, closed: make(chan struct{})}
		select {
		case l.conns <- h:
			<-h.closed
		case <-l.done:
		}
	})
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// handed is a connection of a [listener], whose Close tells its server.
type handed struct {
	net.Conn

	once   sync.Once
	closed chan struct{}
}

func (h *handed) Close() error {
	err := h.Conn.Close()
	h.once.Do(func() { close(h.closed) })
	return err
}

func (h *handed) CloseWrite() error { return h.Conn.(*recorded).CloseWrite() }

func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *listener) Close() error {
	l.once.Do(func() { close(l.done) })
	return nil
}

func (l *listener) Addr() net.Addr { return net.TCPAddrFromAddrPort(l.at) }
