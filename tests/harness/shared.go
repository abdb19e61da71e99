package harness

import (
	"context"
	"fmt"
	"os"
	"sync"
	"testing"
)

// A Shared is one daemon for all tests of a package that test no life cycle of it. Starting a
// daemon and its first sandbox costs more than most such tests do with it. Its tests may run in
// parallel: they have sandboxes of their own, and look at no other ones. The package's TestMain
// calls [Shared.Stop].
type Shared struct {
	Options Options // of the daemon; not changed after its start

	mu     sync.Mutex
	daemon *Daemon  // nil: the next test starts it
	t      *sharing // of the test that started it
}

// Daemon returns the daemon, and starts it for the first test. Sandboxes that the test makes with
// [Daemon.Create] are deleted when it ends.
func (s *Shared) Daemon(t testing.TB) *Daemon {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.daemon == nil {
		st := &sharing{TB: t}
		d := Start(st, s.Options)
		d.shared = true
		s.daemon, s.t = d, st
	}
	d := s.daemon
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the shared daemon said:\n%s", d.said())
		}
	})
	return d
}

// Stop shuts the daemon down, which must leave nothing behind, and returns the exit status of the
// test binary: code, or 1 if something was left.
func (s *Shared) Stop(code int) int {
	if s.daemon == nil {
		return code
	}
	s.t.over = true
	for len(s.t.ends) > 0 { // the last first
		last := len(s.t.ends) - 1
		f := s.t.ends[last]
		s.t.ends = s.t.ends[:last]
		f()
	}
	return max(code, s.t.code)
}

// deleteAtEnd has a sandbox of a shared daemon end with its test.
func (d *Daemon) deleteAtEnd(t testing.TB, s *Sandbox) {
	t.Helper()
	if d.shared {
		ctx := context.WithoutCancel(t.Context())
		t.Cleanup(func() { _ = s.TryDelete(ctx) }) // the test may have deleted it
	}
}

// sharing is the test that has started a shared daemon, and goes on for it when that test has
// ended.
type sharing struct {
	testing.TB

	ends []func()
	over bool
	code int
}

func (s *sharing) Cleanup(f func()) { s.ends = append(s.ends, f) }

func (s *sharing) Failed() bool { return s.over && s.code != 0 }

func (s *sharing) Errorf(format string, args ...any) {
	if !s.over {
		s.TB.Errorf(format, args...)
		return
	}
	s.code = 1
	s.Logf(format, args...)
}

func (s *sharing) Logf(format string, args ...any) {
	if !s.over {
		s.TB.Logf(format, args...)
		return
	}
	fmt.Fprintf(os.Stderr, "the shared daemon of the package: "+format+"\n", args...)
}

func (s *sharing) Fatalf(format string, args ...any) {
	if !s.over {
		s.TB.Fatalf(format, args...)
		return
	}
	panic(fmt.Sprintf("the shared daemon of the package: "+format, args...))
}
