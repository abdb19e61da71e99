package egress

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/netns/gateway"
)

// roles are the programs that the test binary can be, by its first argument.
var roles = map[string]func(args []string) error{}

func TestMain(m *testing.M) {
	if code, handled := Main(os.Args[1:]); handled {
		os.Exit(code)
	}
	if len(os.Args) > 1 && roles[os.Args[1]] != nil {
		if err := roles[os.Args[1]](os.Args[2:]); err != nil {
			_, _ = io.WriteString(os.Stderr, err.Error()+"\n")
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// requirePureGo skips a test in a program that has cgo, as the daemon's has not: there is no system
// call on all threads. The lanes build without.
func requirePureGo(t testing.TB) {
	t.Helper()
	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_GETPID, 0, 0, 0); errno == unix.ENOTSUP {
		t.Skip("this program has cgo, with which there is no system call on all threads; the lanes build it without")
	}
}

// starter stands in for the broker: it starts this binary as a gateway, one at a time.
type starter struct {
	t testing.TB

	mu     sync.Mutex // guards those below
	role   []string   // arguments of the process; nil stands for a gateway
	cmd    *exec.Cmd
	exited chan struct{}
	count  int
	fail   error // of the next starts
}

// starts returns the number of processes.
func (s *starter) starts() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.count
}

func (s *starter) start(_ context.Context, socket *os.File) error {
	s.kill()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fail != nil {
		return s.fail
	}
	cmd := exec.Command("/proc/self/exe", Argument)
	if s.role != nil {
		cmd = exec.Command("/proc/self/exe", s.role...)
	}
	cmd.Env = []string{}
	cmd.ExtraFiles = []*os.File{socket}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		return err
	}
	exited := make(chan struct{})
	s.cmd, s.exited = cmd, exited
	s.count++
	go func() {
		defer close(exited)
		_ = cmd.Wait()
	}()
	return nil
}

// kill ends the process, if there is one, as a crash does, and waits for its end.
func (s *starter) kill() {
	s.mu.Lock()
	cmd, exited := s.cmd, s.exited
	s.mu.Unlock()
	if cmd != nil {
		_ = cmd.Process.Kill()
		<-exited
	}
}

// events collects the events of all networks.
type events struct{ queue chan gateway.Event }

func (e events) next(t testing.TB) gateway.Event {
	t.Helper()
	select {
	case v := <-e.queue:
		return v
	case <-time.After(testenv.HungAfter):
		t.Fatal("no event")
		panic("unreachable")
	}
}

// startGateway starts a gateway for a test, or a program that acts as one.
func startGateway(t testing.TB, role ...string) (*Gateway, *starter, events) {
	t.Helper()
	return startGatewayFor(t, Peers{}, role...)
}

// startGatewayFor is startGateway for a daemon that knows peers.
func startGatewayFor(t testing.TB, peers Peers, role ...string) (*Gateway, *starter, events) {
	t.Helper()
	requirePureGo(t)
	s, e := &starter{t: t, role: role}, events{make(chan gateway.Event, 100000)}
	// Pauses between starts end at once, and the times for answers never.
	patient := clock{now: time.Now, after: func(d time.Duration) <-chan time.Time {
		if d == answerIn || d == helloIn || d == gapIn {
			return nil
		}
		return time.After(0)
	}}
	g, err := Start(t.Context(), Config{
		Start: s.start, Events: func(v gateway.Event) { e.queue <- v }, Peers: peers, Log: slog.New(slog.DiscardHandler), time: patient,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := g.Close(); err != nil {
			t.Error(err)
		}
		s.kill()
	})
	return g, s, e
}

// box stands in for a sandbox: its sockets are on the host's loopback.
type box struct {
	Sockets
	stream, dns, dnsTCP string // addresses
}

func newBox(t testing.TB) *box {
	t.Helper()
	b := new(box)
	listen := func() (*os.File, string) {
		l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		f, err := l.File()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() })
		return f, l.Addr().String()
	}
	b.Stream, b.stream = listen()
	b.DNSTCP, b.dnsTCP = listen()
	c, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if b.DNS, err = c.File(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.DNS.Close() })
	b.dns = c.LocalAddr().String()
	return b
}

// refused connects and reports whether the connection is reset.
func (b *box) refused(t testing.TB) {
	t.Helper()
	c, err := net.Dial("tcp", b.stream)
	if errors.Is(err, syscall.ECONNRESET) {
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(testenv.HungAfter)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(c); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a refused connection ends with %v", err)
	}
}

// resolve asks for a name and returns the answer's code. The record type is one that the gateway
// answers without the host's resolver.
func (b *box) resolve(t testing.TB, name string) dnsmessage.RCode {
	t.Helper()
	q := dnsmessage.NewBuilder(nil, dnsmessage.Header{ID: 1, RecursionDesired: true})
	err := errors.Join(q.StartQuestions(), q.Question(dnsmessage.Question{Name: dnsmessage.MustNewName(name + "."), Type: dnsmessage.TypeTXT, Class: dnsmessage.ClassINET}))
	msg, finishErr := q.Finish()
	if err := errors.Join(err, finishErr); err != nil {
		t.Fatal(err)
	}
	c, err := net.Dial("udp", b.dns)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(testenv.HungAfter)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write(msg); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 4096)
	n, err := c.Read(buf)
	if err != nil {
		t.Fatal(err)
	}
	var r dnsmessage.Message
	if err := r.Unpack(buf[:n]); err != nil {
		t.Fatal(err)
	}
	return r.RCode
}

const (
	allowsNothing = `{"version": 1, "rules": []}`
	allowsExample = `{"version": 1, "rules": [{"name": "ours", "allow": ["example.com"]}]}`
)

func TestOperations(t *testing.T) {
	g, _, e := startGateway(t)
	b := newBox(t)
	n := Network{ID: "box", Policy: []byte(allowsNothing), Sockets: b.Sockets}
	if err := g.Add(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	b.refused(t)
	if got := e.next(t); got.Network != "box" || got.Kind != gateway.Connection || got.Allow || got.Reason == "" {
		t.Errorf("%+v", got)
	}
	if code := b.resolve(t, "example.com"); code != dnsmessage.RCodeNameError {
		t.Errorf("a name that no rule allows: %v", code)
	}
	if got := e.next(t); got.Kind != gateway.Query || got.Name != "example.com" || got.Allow {
		t.Errorf("%+v", got)
	}
	if err := g.SetPolicy(t.Context(), "box", []byte(allowsExample)); err != nil {
		t.Fatal(err)
	}
	if code := b.resolve(t, "example.com"); code != dnsmessage.RCodeSuccess {
		t.Errorf("a name that the new policy allows: %v", code)
	}
	if err := g.Remove(t.Context(), "box"); err != nil {
		t.Fatal(err)
	}
	if err := g.Remove(t.Context(), "box"); !errors.Is(err, ErrNotFound) {
		t.Errorf("removed again: %v", err)
	}
	if c := g.Check(); !c.OK {
		t.Errorf("%+v", c)
	} else {
		t.Log(c.Found)
	}
}
