package cmdtest

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

// OpenPTY returns both ends of a new terminal.
func OpenPTY(t *testing.T) (master, slave *os.File) {
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

// Resize sets the size of a terminal in characters. The kernel sends SIGWINCH to the programs on
// it.
func Resize(t *testing.T, master *os.File, rows, cols uint16) {
	t.Helper()
	if err := unix.IoctlSetWinsize(int(master.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: cols}); err != nil {
		t.Fatal(err)
	}
}

// Screen collects the output of a terminal, and waits for text in it.
type Screen struct {
	mu   sync.Mutex
	cond *sync.Cond
	buf  bytes.Buffer
	over bool
}

// Watch starts to read the output of a terminal. It stops when the master is closed or has no
// slave.
func Watch(master *os.File) *Screen {
	s := &Screen{}
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

// WaitFor waits until the output since the last [Screen.Output] contains text. The test fails if
// the terminal ends first, or after [testenv.HungAfter].
func (s *Screen) WaitFor(t *testing.T, text string) {
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

// Output returns and forgets the output so far.
func (s *Screen) Output() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	text := s.buf.String()
	s.buf.Reset()
	return text
}
