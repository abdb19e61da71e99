package cli

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/cmdline/cmdtest"
)

// pipeOf makes a pipe of which we have a non-blocking reading end, as the daemon sends it.
func pipeOf(t *testing.T) (r, w *os.File) {
	t.Helper()
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	if err := unix.SetNonblock(p[0], true); err != nil {
		t.Fatal(err)
	}
	r, w = os.NewFile(uintptr(p[0]), "stdout"), os.NewFile(uintptr(p[1]), "program")
	t.Cleanup(func() { _ = r.Close(); _ = w.Close() }) // perhaps again
	return r, w
}

func newTestBell(t *testing.T) *bell {
	t.Helper()
	b, err := newBell()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.close)
	return b
}

// some is more than two pipes hold.
var some = bytes.Repeat([]byte("0123456789abcdef"), 20000)

// target opens a file of a kind that a shell makes a command's stdout, and returns a function that
// waits for its content.
func target(t *testing.T, kind string) (*os.File, func() []byte) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "out")
	flags := os.O_TRUNC
	var r io.Reader
	var w *os.File
	switch kind {
	case "appended":
		flags = os.O_APPEND
		fallthrough
	case "file":
		if err := os.WriteFile(path, []byte("old"), 0o600); err != nil {
			t.Fatal(err)
		}
		f, err := os.OpenFile(path, os.O_WRONLY|flags, 0)
		if err != nil {
			t.Fatal(err)
		}
		return f, func() []byte {
			data, err := os.ReadFile(path)
			if err != nil {
				t.Error(err)
			}
			return data
		}
	case "/dev/null":
		f, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		return f, func() []byte { return nil }
	case "pipe":
		r, w = pipeOf(t)
	case "non-blocking pipe":
		var err error
		if r, w, err = os.Pipe(); err != nil {
			t.Fatal(err)
		}
	case "socket":
		p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		r, w = os.NewFile(uintptr(p[0]), "reader"), os.NewFile(uintptr(p[1]), "writer")
	case "terminal":
		r, w = cmdtest.OpenPTY(t)
	}
	got := make(chan []byte, 1)
	go func() {
		data, _ := io.ReadAll(r) // a terminal's end is an error
		got <- data
	}()
	return w, func() []byte { return <-got }
}

// All output arrives in files of every kind that a shell makes a command's stdout.
func TestOutputInto(t *testing.T) {
	for _, kind := range []string{"file", "appended", "pipe", "non-blocking pipe", "socket", "terminal", "/dev/null"} {
		t.Run(kind, func(t *testing.T) {
			r, w := pipeOf(t)
			to, content := target(t, kind)
			go func() {
				_, _ = w.Write(some)
				_ = w.Close()
			}()
			o := output{from: r, to: to, ended: newTestBell(t), hurry: newTestBell(t)}
			if err := o.copy(); err != nil {
				t.Fatal(err)
			}
			_ = to.Close()
			want := some
			switch kind {
			case "/dev/null":
				want = nil
			case "appended":
				want = append([]byte("old"), some...)
			}
			if got := content(); !bytes.Equal(got, want) {
				t.Errorf("%d bytes, want %d", len(got), len(want))
			}
		})
	}
}

// After the program's end its output is taken as far as it is in the pipe, and a process that holds
// the pipe open is not waited for.
func TestOutputAfterEnd(t *testing.T) {
	r, w := pipeOf(t)
	if _, err := w.WriteString("the last words"); err != nil {
		t.Fatal(err)
	}
	seen, to := pipeOf(t)
	b := newTestBell(t)
	b.ring()
	if err := (&output{from: r, to: to, ended: b, hurry: newTestBell(t)}).copy(); err != nil { // w is open
		t.Fatal(err)
	}
	_ = to.Close()
	if got, err := io.ReadAll(seen); err != nil || string(got) != "the last words" {
		t.Errorf("%q, %v", got, err)
	}
}

// The program's end wakes a copy that waits.
func TestOutputWaits(t *testing.T) {
	r, w := pipeOf(t)
	seen, to := pipeOf(t)
	b := newTestBell(t)
	done := make(chan error)
	go func() { done <- (&output{from: r, to: to, ended: b, hurry: newTestBell(t)}).copy() }()
	if _, err := w.WriteString("x"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(seen, make([]byte, 1)); err != nil { // the copy waits for more now
		t.Fatal(err)
	}
	b.ring()
	if err := <-done; err != nil {
		t.Error(err)
	}
	_ = w.Close()
}

// A reader that is slow gets everything, also after the program's end.
func TestOutputToSlowReader(t *testing.T) {
	r, w := pipeOf(t)
	slow, to := pipeOf(t)
	if _, err := unix.FcntlInt(to.Fd(), unix.F_SETPIPE_SZ, 4096); err != nil {
		t.Fatal(err)
	}
	const held = 30000 // more than the reader's pipe holds, and less than the program's
	if _, err := w.Write(some[:held]); err != nil {
		t.Fatal(err)
	}
	b := newTestBell(t)
	done := make(chan error)
	go func() {
		err := (&output{from: r, to: to, ended: b, hurry: newTestBell(t)}).copy()
		_ = to.Close()
		done <- err
	}()
	b.ring() // while the copy waits for the reader, or before
	got, err := io.ReadAll(slow)
	if err != nil || !bytes.Equal(got, some[:held]) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// A stdout whose reader has gone away is a broken pipe, which the program then meets too.
func TestOutputIntoClosedPipe(t *testing.T) {
	r, w := pipeOf(t)
	if _, err := w.WriteString("x"); err != nil {
		t.Fatal(err)
	}
	seen, to := pipeOf(t)
	_ = seen.Close()
	if err := (&output{from: r, to: to, ended: newTestBell(t), hurry: newTestBell(t)}).copy(); !errors.Is(err, unix.EPIPE) {
		t.Errorf("%v", err)
	}
}

// Pipes of large output are made larger, so that fewer switches of processes move it.
func TestOutputGrowsPipes(t *testing.T) {
	r, w := pipeOf(t)
	seen, to := pipeOf(t)
	_, other := pipeOf(t)
	if _, err := unix.FcntlInt(other.Fd(), unix.F_SETPIPE_SZ, moveSize); err != nil {
		t.Skipf("this host has no pipes of %d bytes: %v", moveSize, err)
	}
	go func() {
		for range growAfter/len(some) + 2 {
			_, _ = w.Write(some)
		}
		_ = w.Close()
	}()
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		_, _ = io.Copy(io.Discard, seen)
	}()
	if err := (&output{from: r, to: to, ended: newTestBell(t), hurry: newTestBell(t)}).copy(); err != nil {
		t.Fatal(err)
	}
	for _, f := range []*os.File{r, to} {
		fd, err := descriptor(f)
		if err != nil {
			t.Fatal(err)
		}
		if size, err := unix.FcntlInt(uintptr(fd), unix.F_GETPIPE_SZ, 0); err != nil || size != moveSize {
			t.Errorf("%s: %d bytes, %v", f.Name(), size, err)
		}
	}
	_ = to.Close()
	<-drained
}

// Output that our reader does not take is dropped when the command is to end at once, or when
// patience with the reader has ended. A reader that takes it late gets all.
func TestOutputToStalledReader(t *testing.T) {
	for name, tc := range map[string]struct {
		patience time.Duration
		hurry    bool
		want     error
	}{
		"at once":     {time.Hour, true, errDropped},
		"no patience": {0, false, errDropped},
		"late":        {time.Hour, false, nil},
	} {
		t.Run(name, func(t *testing.T) {
			r, w := pipeOf(t)
			from, to := pipeOf(t)
			if _, err := unix.FcntlInt(to.Fd(), unix.F_SETPIPE_SZ, 4096); err != nil {
				t.Fatal(err)
			}
			if _, err := w.Write(some[:30000]); err != nil { // more than our reader's pipe holds
				t.Fatal(err)
			}
			o := output{from: r, to: to, ended: newTestBell(t), hurry: newTestBell(t), waning: newTestBell(t), patience: tc.patience}
			o.ended.ring()
			if tc.hurry {
				o.hurry.ring()
			}
			o.waning.ring()
			done := make(chan error)
			go func() { done <- o.copy() }()
			if tc.want == nil {
				if _, err := io.ReadFull(from, make([]byte, 30000)); err != nil {
					t.Error(err)
				}
			}
			if err := <-done; !errors.Is(err, tc.want) {
				t.Errorf("%v, want %v", err, tc.want)
			}
		})
	}
}
