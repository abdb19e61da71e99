package netns

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	goruntime "runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/kernel"
	"github.com/sandboxd/sandboxd/internal/osthread"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// The tests run as the launcher does: as root of a user namespace, and in a network namespace of
// their own. TestMain executes the test binary once more for that. Programs of a sandbox are
// further executions, in a user namespace below (see [enter]).
const (
	launcherVariable = "NETNS_TEST_LAUNCHER"
	programVariable  = "NETNS_TEST_PROGRAM"
	ownIDVariable    = "NETNS_TEST_OWN_ID" // set where sandboxes can have an id of their own
)

const ownID = 1

// role is the position of a program in a namespace.
type role int

const (
	owner   role = iota // the launcher: the control
	sameID              // root of a sandbox that has the launcher's uid: no subordinate ids
	otherID             // root of a sandbox with ids of its own
)

// sandboxes are the kinds of sandboxes that the tests' user can make.
func sandboxes() []role {
	if os.Getenv(ownIDVariable) != "" {
		return []role{sameID, otherID}
	}
	return []role{sameID}
}

func (r role) String() string { return [...]string{"launcher", "sandbox with our id", "sandbox"}[r] }

func TestMain(m *testing.M) {
	if code, handled := Main(os.Args[1:]); handled {
		os.Exit(code)
	}
	if name := os.Getenv(programVariable); name != "" {
		fmt.Println(say(programs[name]()))
		return
	}
	if os.Getenv(launcherVariable) != "" || kernel.UserNamespaces() != nil { // then every test is skipped
		os.Exit(m.Run())
	}
	goruntime.LockOSThread() // the signal comes when the parent's thread ends
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), launcherVariable+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}},
		Pdeathsig:   syscall.SIGKILL,
	}
	if os.Geteuid() == 0 { // an ordinary user's map has one id
		more := syscall.SysProcIDMap{ContainerID: ownID, HostID: 1879048193, Size: 1} // of internal/idmap
		cmd.SysProcAttr.UidMappings = append(cmd.SysProcAttr.UidMappings, more)
		cmd.SysProcAttr.GidMappings = append(cmd.SysProcAttr.GidMappings, more)
		cmd.Env = append(cmd.Env, ownIDVariable+"=1")
	}
	if err := cmd.Run(); err != nil {
		if cmd.ProcessState == nil {
			fmt.Println(err)
		}
		os.Exit(1)
	}
}

// namespace makes a namespace for a test.
func namespace(t testing.TB) *Namespace {
	t.Helper()
	return namespaceBy(t, Make)
}

// bothPlans calls f with a namespace as this kernel has it, and with one as kernels have it that
// refuse rules that change packets.
func bothPlans(t *testing.T, f func(t *testing.T, n *Namespace)) {
	t.Helper()
	for name, make := range map[string]func() (*Namespace, error){
		"here": Make, "unchanging": func() (*Namespace, error) { return makeBy(unchanging()) },
	} {
		t.Run(name, func(t *testing.T) { f(t, namespaceBy(t, make)) })
	}
}

func namespaceBy(t testing.TB, make func() (*Namespace, error)) *Namespace {
	t.Helper()
	testenv.RequireUserNS(t)
	n, err := make()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

// inside runs f on a thread in the namespace, with the launcher's privileges.
func inside(t testing.TB, n *Namespace, f func() error) {
	t.Helper()
	err := osthread.Run(func() error {
		if err := unix.Setns(int(n.NS.Fd()), unix.CLONE_NEWNET); err != nil {
			return err
		}
		return f()
	})
	if err != nil {
		t.Fatal(err)
	}
}

// enter executes this binary in the namespace and returns its answer. A sandbox has a user
// namespace of its own, below the one that the network namespace belongs to, as libcontainer makes
// it; the program has every capability there.
func enter(t testing.TB, n *Namespace, program string, r role) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = []string{programVariable + "=" + program, "GORACE=atexit_sleep_ms=0"} // else a second each with -race
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if r != owner {
		id := 0
		if r == otherID {
			id = ownID
		}
		cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: id, Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{HostID: id, Size: 1}}
		cmd.SysProcAttr.Credential = &syscall.Credential{NoSetGroups: true} // else it keeps the launcher's id, unmapped
	}
	var out []byte
	inside(t, n, func() (err error) {
		out, err = cmd.Output() // forks from this thread, which stays until it has ended
		return err
	})
	return strings.TrimSpace(string(out))
}

// say is the answer of a program: a word that no errno's text is, or the error.
func say(err error) string {
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		return unix.ErrnoName(errno)
	}
	if err != nil {
		return err.Error()
	}
	return "done"
}

// limit is for waits that only a bug makes long.
func limit(t testing.TB, c interface{ SetDeadline(time.Time) error }) {
	t.Helper()
	if err := c.SetDeadline(time.Now().Add(testenv.HungAfter)); err != nil {
		t.Fatal(err)
	}
}

// dial connects from within.
func dial(t testing.TB, n *Namespace, network, address string) net.Conn {
	t.Helper()
	c, err := tryDial(t, n, network, address)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func tryDial(t testing.TB, n *Namespace, network, address string) (c net.Conn, err error) {
	t.Helper()
	inside(t, n, func() error {
		c, err = new(net.Dialer).DialContext(t.Context(), network, address)
		return nil
	})
	if err == nil {
		limit(t, c)
		t.Cleanup(func() { _ = c.Close() })
	}
	return c, err
}

// listener returns the gateway's side of a listening descriptor.
func listener(t testing.TB, f *os.File) *net.TCPListener {
	t.Helper()
	l, err := net.FileListener(f)
	if err != nil {
		t.Fatal(err)
	}
	limit(t, l.(*net.TCPListener))
	t.Cleanup(func() { _ = l.Close() })
	return l.(*net.TCPListener)
}

// datagrams returns the gateway's side of the DNS descriptor.
func datagrams(t testing.TB, f *os.File) *net.UDPConn {
	t.Helper()
	c, err := net.FilePacketConn(f)
	if err != nil {
		t.Fatal(err)
	}
	limit(t, c)
	t.Cleanup(func() { _ = c.Close() })
	return c.(*net.UDPConn)
}

// serve listens inside for one connection, which it answers with its address.
func serve(t testing.TB, n *Namespace, network, address string) {
	t.Helper()
	var l net.Listener
	inside(t, n, func() (err error) {
		l, err = new(net.ListenConfig).Listen(t.Context(), network, address)
		return err
	})
	ended := make(chan struct{})
	t.Cleanup(func() {
		_ = l.Close()
		<-ended
	})
	go func() {
		defer close(ended)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, address)
			_ = c.Close()
		}
	}()
}

// empty fails the test if a connection or datagram waits at one of the gateway's sockets.
func empty(t testing.TB, n *Namespace) {
	t.Helper()
	for _, f := range []*os.File{n.Stream, n.DNSTCP} {
		fd, at, err := unix.Accept4(int(f.Fd()), unix.SOCK_CLOEXEC)
		if !errors.Is(err, unix.EAGAIN) {
			t.Errorf("the gateway accepted %d from %v: %v", fd, at, err)
		}
	}
	if size, from, err := unix.Recvfrom(int(n.DNS.Fd()), make([]byte, 512), unix.MSG_DONTWAIT); !errors.Is(err, unix.EAGAIN) {
		t.Errorf("the gateway received %d bytes from %v: %v", size, from, err)
	}
}

func addrPort(t testing.TB, a net.Addr) netip.AddrPort {
	t.Helper()
	p, err := netip.ParseAddrPort(a.String())
	if err != nil {
		t.Fatal(err)
	}
	return netip.AddrPortFrom(p.Addr().Unmap(), p.Port())
}
