package cli

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// openPTY returns both ends of a new terminal.
func openPTY(t *testing.T) (master, slave *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("no terminals here: %v", err)
	}
	t.Cleanup(func() { _ = master.Close() })
	if err := unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("no terminals here: %v", err)
	}
	t.Cleanup(func() { _ = slave.Close() })
	return master, slave
}

func resize(t *testing.T, master *os.File, rows, cols uint16) {
	t.Helper()
	if err := unix.IoctlSetWinsize(int(master.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: cols}); err != nil {
		t.Fatal(err)
	}
}

// screen collects what a terminal shows and waits for words on it.
type screen struct {
	mu   sync.Mutex
	cond *sync.Cond
	buf  bytes.Buffer
	over bool
}

func watch(master *os.File) *screen {
	s := &screen{}
	s.cond = sync.NewCond(&s.mu)
	go func() {
		b := make([]byte, 4096)
		for {
			n, err := master.Read(b)
			s.mu.Lock()
			s.buf.Write(b[:n])
			s.over = err != nil
			s.cond.Broadcast()
			s.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	return s
}

func (s *screen) waitFor(t *testing.T, text string) {
	t.Helper()
	timer := time.AfterFunc(testenv.HungAfter, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.over = true
		s.cond.Broadcast()
	})
	defer timer.Stop()
	s.mu.Lock()
	defer s.mu.Unlock()
	for !strings.Contains(s.buf.String(), text) {
		if s.over {
			t.Fatalf("the terminal shows %q, and not %q", s.buf.String(), text)
		}
		s.cond.Wait()
	}
}

// run -it: every key reaches the program, Ctrl-C included, the terminal's size follows, and the terminal is afterwards
// what it was before.
func TestRunTerminal(t *testing.T) {
	master, slave := openPTY(t)
	resize(t, master, 30, 100)
	before, err := unix.IoctlGetTermios(int(slave.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	f := newFake()
	cmd := command(t, f.start(t), "run", "-it", "--", "cat")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	s := watch(master)
	<-f.started
	type_ := func(keys string) {
		t.Helper()
		if _, err := master.WriteString(keys); err != nil {
			t.Fatal(err)
		}
	}
	type_("a\x03b\x04c")
	s.waitFor(t, "a\x03b\x04c") // in raw mode nothing is interpreted, and nothing echoed but by the program
	resize(t, master, 31, 101)
	s.waitFor(t, `{"resize":{"rows":31,"cols":101}}`)
	type_("q")
	_ = cmd.Wait()
	if got := cmd.ProcessState.ExitCode(); got != 7 {
		t.Errorf("exit %d, want 7", got)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	want := api.ExecRequest{Argv: []string{"cat"}, TTY: true, Rows: 30, Cols: 100, Env: []string{"TERM=vt52"}}
	if diff := cmp.Diff(want, f.execs[0]); diff != "" {
		t.Errorf("request (-want +got):\n%s", diff)
	}
	if left := nothingLeft(f); left != "" {
		t.Error(left)
	}
	after, err := unix.IoctlGetTermios(int(slave.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("terminal (-before +after):\n%s", diff)
	}
}

// A signal from elsewhere must not leave the user with a raw terminal.
func TestRunTerminalRestoredBySignal(t *testing.T) {
	master, slave := openPTY(t)
	before, err := unix.IoctlGetTermios(int(slave.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	f := newFake()
	cmd := command(t, f.start(t), "run", "-it", "--", "cat")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = watch(master)
	<-f.started
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if got := cmd.ProcessState.ExitCode(); got != 143 {
		t.Errorf("exit %d, want 143", got)
	}
	after, err := unix.IoctlGetTermios(int(slave.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("terminal (-before +after):\n%s", diff)
	}
}

// Progress is drawn on a terminal, over itself, and never more of it than fits.
func TestProgressOnTerminal(t *testing.T) {
	master, slave := openPTY(t)
	s := watch(master)
	cmd := command(t, newFake().start(t), "pull", "debian:12")
	cmd.Stderr = slave
	var out bytes.Buffer
	cmd.Stdout = &out
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	s.waitFor(t, "aabbccddeeff  downloading  [###############...............]  500B / 1kB")
	s.waitFor(t, "\x1b[1A")
	s.waitFor(t, "aabbccddeeff  done         [##############################]  1kB / 1kB")
	if out.String() != "debian:12 sha256:0123\n" {
		t.Errorf("stdout %q", out.String())
	}
}
