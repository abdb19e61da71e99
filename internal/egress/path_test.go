package egress

import (
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/osthread"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/internal/testenv/outside"
	"github.com/sandboxd/sandboxd/netns"
	"github.com/sandboxd/sandboxd/netns/gateway"
)

// worldVariable is set in a test binary that has a world of its own.
const worldVariable = "EGRESS_TEST_WORLD"

// example is the address of the world's only other host.
const example = "93.184.215.14"

// internet is the network that the world's host is joined to.
var internet *outside.Network

// inWorld runs the calling test once more, as root of a user namespace with a network and mounts of
// its own. It returns true there.
func inWorld(t testing.TB) bool {
	t.Helper()
	testenv.RequireUserNS(t)
	requirePureGo(t)
	if os.Getenv(worldVariable) != "" {
		makeWorld(t)
		return true
	}
	args, passed := []string{"-test.run=^" + t.Name() + "$", "-test.v"}, "--- PASS: "+t.Name()
	if _, ok := t.(*testing.B); ok {
		args, passed = []string{"-test.run=^$", "-test.bench=^" + t.Name() + "$", "-test.benchtime=" + flag.Lookup("test.benchtime").Value.String()}, "ns/op"
	}
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), worldVariable+"="+t.TempDir())
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}},
	}
	out, err := cmd.CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte(passed)) {
		t.Fatalf("in a world of its own: %v\n%s", err, out)
	}
	t.Logf("%s", out)
	return false
}

// makeWorld sets up loopback, the Internet, and a resolver with its files.
func makeWorld(t testing.TB) {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	must(err)
	defer unix.Close(s)
	up, err := unix.NewIfreq("lo")
	must(err)
	up.SetUint16(unix.IFF_UP)
	must(unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, up))
	internet, err = outside.Make()
	must(err)
	t.Cleanup(func() { _ = internet.Close() })

	must(unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
	dir := os.Getenv(worldVariable)
	for name, content := range map[string]string{"resolv.conf": "nameserver 127.0.0.1\n", "hosts": "", "nsswitch.conf": "hosts: files dns\n"} {
		file := filepath.Join(dir, name)
		must(os.WriteFile(file, []byte(content), 0o600))
		if err := unix.Mount(file, "/etc/"+name, "", unix.MS_BIND, ""); !errors.Is(err, unix.ENOENT) {
			must(err)
		}
	}
	c, err := net.ListenPacket("udp", "127.0.0.1:53")
	must(err)
	t.Cleanup(func() { _ = c.Close() })
	go resolve(c)
}

// resolve answers questions until the socket is closed: example.com has the address of a host
// outside, inside.example.com one that no policy allows, and own.example.com the world's own. Names
// that begin with "hang" have no answer.
func resolve(c net.PacketConn) {
	buf := make([]byte, 4096)
	for {
		n, from, err := c.ReadFrom(buf)
		if err != nil {
			return
		}
		var m dnsmessage.Message
		if m.Unpack(buf[:n]) != nil || len(m.Questions) != 1 {
			continue
		}
		q := m.Questions[0]
		if strings.HasPrefix(q.Name.String(), "hang") {
			continue
		}
		m.Response, m.Additionals = true, nil
		addr, ok := map[string]string{"example.com.": example, "inside.example.com.": "10.0.0.1", "own.example.com.": outside.Here4.String()}[strings.ToLower(q.Name.String())]
		switch {
		case !ok:
			m.RCode = dnsmessage.RCodeNameError
		case q.Type == dnsmessage.TypeA:
			m.Answers = []dnsmessage.Resource{{
				Header: dnsmessage.ResourceHeader{Name: q.Name, Class: q.Class, TTL: 60}, Body: &dnsmessage.AResource{A: netip.MustParseAddr(addr).As4()},
			}}
		}
		msg, err := m.Pack()
		if err == nil {
			_, _ = c.WriteTo(msg, from)
		}
	}
}

// sandbox is a namespace as sandboxes have.
type sandbox struct{ *netns.Namespace }

func newSandbox(t testing.TB) sandbox {
	t.Helper()
	n, err := netns.Make()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = n.Close() })
	return sandbox{n}
}

func (s sandbox) sockets() Sockets { return Sockets{s.Stream, s.DNS, s.DNSTCP} }

// dial connects from within.
func (s sandbox) dial(t testing.TB, network, address string) net.Conn {
	t.Helper()
	var c net.Conn
	err := osthread.Run(func() (err error) {
		if err := unix.Setns(int(s.NS.Fd()), unix.CLONE_NEWNET); err != nil {
			return err
		}
		c, err = net.Dial(network, address)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if err := c.SetDeadline(time.Now().Add(testenv.HungAfter)); err != nil {
		t.Fatal(err)
	}
	return c
}

// lookup asks for the address of a name.
func (s sandbox) lookup(t testing.TB, network, name string) (dnsmessage.RCode, []dnsmessage.Resource) {
	t.Helper()
	q := dnsmessage.Message{Header: dnsmessage.Header{ID: 7, RecursionDesired: true}, Questions: []dnsmessage.Question{{
		Name: dnsmessage.MustNewName(name + "."), Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET,
	}}}
	msg, err := q.Pack()
	if err != nil {
		t.Fatal(err)
	}
	c := s.dial(t, network, netns.Nameserver.String()+":53")
	if network == "tcp" {
		msg = append(binary.BigEndian.AppendUint16(nil, uint16(len(msg))), msg...)
	}
	if _, err := c.Write(msg); err != nil {
		t.Fatal(err)
	}
	reply := make([]byte, 4096)
	n, err := c.Read(reply)
	if network == "tcp" {
		for err == nil && (n < 2 || n < 2+int(binary.BigEndian.Uint16(reply))) {
			var more int
			more, err = c.Read(reply[n:])
			n += more
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	if reply = reply[:n]; network == "tcp" {
		reply = reply[2:]
	}
	var r dnsmessage.Message
	if err := r.Unpack(reply); err != nil {
		t.Fatal(err)
	}
	return r.RCode, r.Answers
}

// listen listens at a host outside.
func listen(t testing.TB, at string, port int) (l net.Listener) {
	t.Helper()
	err := internet.Enter(func() (err error) {
		l, err = net.Listen("tcp", fmt.Sprintf("%s:%d", at, port))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// echo serves a port of the world.
func echo(t *testing.T, port int) {
	t.Helper()
	serveEcho(t, listen(t, example, port))
}

// serveEcho sends back what comes to a listener until the test ends.
func serveEcho(t *testing.T, l net.Listener) {
	t.Helper()
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			}()
		}
	}()
}

// A confined gateway relays real connections of a sandbox's namespace: over names and addresses, in
// both directions, and again after it was killed.
func TestPath(t *testing.T) {
	if !inWorld(t) {
		return
	}
	g, s, e := startGateway(t)
	box := newSandbox(t)
	doc := []byte(`{"version": 1, "rules": [{"name": "ours", "allow": ["example.com", "inside.example.com", "own.example.com"], "ports": [80, 7000]}]}`)
	if err := g.Add(t.Context(), Network{ID: "box", Policy: doc, Sockets: box.sockets()}); err != nil {
		t.Fatal(err)
	}
	echo(t, 7000)
	l := listen(t, example, 80)
	web := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, "hello "+r.Host) })}
	t.Cleanup(func() { _ = web.Close() })
	go func() { _ = web.Serve(l) }()

	for _, network := range []string{"udp", "tcp"} {
		if code, answers := box.lookup(t, network, "example.com"); code != dnsmessage.RCodeSuccess || len(answers) != 1 {
			t.Errorf("example.com over %s: %v, %v", network, code, answers)
		}
	}
	if code, answers := box.lookup(t, "udp", "inside.example.com"); code != dnsmessage.RCodeSuccess || len(answers) != 0 {
		t.Errorf("a name that leads inside: %v, %v", code, answers)
	}
	if code, _ := box.lookup(t, "udp", "example.org"); code != dnsmessage.RCodeNameError {
		t.Errorf("a name that no rule allows: %v", code)
	}

	c := box.dial(t, "tcp", example+":80")
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: example.com\r\nConnection: close\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(c); err != nil || !strings.HasSuffix(string(got), "hello example.com") {
		t.Errorf("HTTP: %q, %v", got, err)
	}

	// The host's own address has a server as well.
	own, err := net.Listen("tcp", outside.Here4.String()+":80")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = web.Serve(own) }()
	if code, answers := box.lookup(t, "udp", "own.example.com"); code != dnsmessage.RCodeSuccess || len(answers) != 1 {
		t.Errorf("own.example.com: %v, %v", code, answers)
	}
	c = box.dial(t, "tcp", outside.Here4.String()+":80")
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: own.example.com\r\nConnection: close\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(c); err != nil || !strings.Contains(string(got), "403 Forbidden") || !strings.Contains(string(got), "an address of the host itself") {
		t.Errorf("the host itself: %q, %v", got, err)
	}

	const size = 32 << 20
	c = box.dial(t, "tcp", example+":7000")
	go func() {
		_, _ = io.Copy(c, io.LimitReader(zeroReader{}, size))
		_ = c.(*net.TCPConn).CloseWrite()
	}()
	if n, err := io.Copy(io.Discard, c); n != size || err != nil {
		t.Errorf("%d bytes of %d came back: %v", n, size, err)
	}
	for {
		v := e.next(t)
		if v.Kind == gateway.Connection && v.Port == 7000 {
			if v.Out != size || v.In != size || !v.Allow || v.Rule != "ours" || v.Name != "example.com" {
				t.Errorf("%+v", v)
			}
			break
		}
	}

	// Killed: its connections are reset. A new one waits for the next process.
	held := box.dial(t, "tcp", example+":7000")
	exchange(t, held, "\x00before")
	s.kill()
	if _, err := io.ReadAll(held); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a connection of a killed gateway ends with %v", err)
	}
	if code, _ := box.lookup(t, "tcp", "example.com"); code != dnsmessage.RCodeSuccess {
		t.Errorf("after a restart: %v", code)
	}
	held = box.dial(t, "tcp", example+":7000")
	exchange(t, held, "\x00after")
	for v := e.next(t); v.Kind != Restarted; v = e.next(t) {
		if v.Time.IsZero() {
			t.Errorf("%+v", v)
		}
	}
	// A policy that refuses them resets connections.
	if err := g.SetPolicy(t.Context(), "box", []byte(allowsNothing)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(held); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a connection that the new policy refuses ends with %v", err)
	}
}

// exchange sends a text and waits for its return. It must not look like the begin of HTTP.
func exchange(t *testing.T, c net.Conn, text string) {
	t.Helper()
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(text))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != text {
		t.Fatalf("%q came back: %v", got, err)
	}
}

type zeroReader struct{}

func (zeroReader) Read(b []byte) (int, error) { clear(b); return len(b), nil }
