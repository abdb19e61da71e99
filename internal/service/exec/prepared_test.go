package exec

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/execlog"
	"github.com/sandboxd/sandboxd/runtime"
)

// prepareNth prepares an exec, later ones for a higher n.
func prepareNth(e *Registry, sandbox string, n, size int, q quota) (*prepared, error) {
	p := &prepared{size: size, record: Record{Exec: api.Exec{ID: fmt.Sprint("x", n), Sandbox: sandbox, State: api.ExecPrepared, StartedAt: time.Unix(int64(n), 0)}}}
	return p, e.prepare(p, q)
}

// isOver reports whether a client waits for a start that will not be.
func isOver(u *Upcoming) bool {
	select {
	case _, ok := <-u.started:
		return !ok
	default:
		return false
	}
}

// An exec that is prepared makes the oldest of its sandbox go, whose clients wait no longer; one
// that is being started stays.
func TestPreparedExecsOfASandboxAreBounded(t *testing.T) {
	e := newRegistry(t)
	rec := &runtime.Record{Sandbox: api.Sandbox{ID: "box", Name: "box"}}
	var all []*prepared
	for n := range maxPrepared {
		p, err := prepareNth(e, "box", n, 1, quota{parts: 1})
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
	var waits []*Upcoming
	for _, id := range []string{"x1", "x2"} {
		u, err := e.await(rec, id)
		if err != nil {
			t.Fatal(err)
		}
		waits = append(waits, u)
	}
	all[0].record.State = api.ExecRunning
	if _, err := prepareNth(e, "box", 100, 1, quota{parts: 1}); err != nil {
		t.Fatal(err)
	}
	if of := e.prepared["box"]; len(of) != maxPrepared || of["x0"] == nil || of["x1"] != nil || of["x100"] == nil {
		t.Errorf("%d are prepared: %v", len(of), of)
	}
	if !isOver(waits[0]) || isOver(waits[1]) {
		t.Error("not the client of the one that was dropped is told")
	}
	if _, err := waits[0].Wait(t.Context()); !errors.Is(err, class.ErrGone) {
		t.Errorf("%v", err)
	}
	if _, err := e.await(rec, "x1"); !errors.Is(err, class.ErrNoExec) {
		t.Errorf("%v", err)
	}
	for _, p := range e.prepared["box"] {
		p.record.State = api.ExecRunning
	}
	if _, err := prepareNth(e, "box", 101, 1, quota{parts: 1}); !errors.Is(err, runtime.ErrInUse) {
		t.Errorf("%v", err)
	}
	if _, err := prepareNth(e, "other", 102, 1, quota{parts: 1}); err != nil {
		t.Errorf("another sandbox: %v", err)
	}
}

// The bytes of a tenant's prepared execs make its own oldest go, and no one else's while all fit.
// Nothing that a client forgets keeps others from preparing.
func TestBytesOfPreparedExecsAreBounded(t *testing.T) {
	e := newRegistry(t)
	const part = maxPreparedBytes / 4
	tenant := quota{own: map[string]bool{"a1": true, "a2": true}, parts: 4}
	own := quota{own: map[string]bool{"b": true}, parts: 1}
	must := func(sandbox string, n, size int, q quota) *prepared {
		t.Helper()
		p, err := prepareNth(e, sandbox, n, size, q)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	check := func(want ...string) {
		t.Helper()
		var got int
		for sandbox, of := range e.prepared {
			for id := range of {
				got++
				found := false
				for _, w := range want {
					found = found || w == sandbox+"/"+id
				}
				if !found {
					t.Errorf("%s/%s is kept", sandbox, id)
				}
			}
		}
		if got != len(want) {
			t.Errorf("%d are kept, want %v", got, want)
		}
	}
	must("b", 0, part, own)
	must("a1", 1, part/2, tenant)
	must("a2", 2, part/2, tenant)
	must("a2", 3, part/2, tenant)
	check("b/x0", "a2/x2", "a2/x3")
	must("a1", 4, 2*part, tenant) // more than its part, and alone
	check("b/x0", "a1/x4")
	big := must("b", 5, 2*part, own)
	check("a1/x4", "b/x5") // the oldest of all
	big.record.State = api.ExecRunning
	if _, err := prepareNth(e, "a2", 6, maxPreparedBytes, tenant); !errors.Is(err, runtime.ErrInUse) {
		t.Errorf("%v", err)
	}
	if deleted, err := e.deletePrepared("b", "x5"); deleted || !errors.Is(err, runtime.ErrState) {
		t.Errorf("%v, %v", deleted, err)
	}
	big.record.State = api.ExecLost
	if deleted, err := e.deletePrepared("b", "x5"); !deleted || err != nil {
		t.Errorf("%v, %v", deleted, err)
	}
	check()
	if got := sizeOf(&api.ExecRequest{Argv: make([]string, 1000), Env: make([]string, 1000)}); got < 2000*16 {
		t.Errorf("2000 empty strings have %d bytes", got)
	}
}

// Of a client that gives up while its program starts nothing stays, whichever is first; and one
// that stays has the program.
func TestClientsThatGiveUpDuringAStart(t *testing.T) {
	e := newRegistry(t)
	rec := &runtime.Record{Sandbox: api.Sandbox{ID: "box", Command: []string{"true"}}}
	for range 200 {
		log, err := execlog.New(1<<20, false)
		if err != nil {
			t.Fatal(err)
		}
		x := &Detached{program: &program{record: Record{Exec: api.Exec{ID: "x", Sandbox: "box"}}}, log: log, main: newMainProcess(0)}
		var waits []*Upcoming
		for range maxUpcoming {
			u, err := e.await(rec, api.MainExec)
			if err != nil {
				t.Fatal(err)
			}
			waits = append(waits, u)
		}
		if _, err := e.await(rec, api.MainExec); !errors.Is(err, runtime.ErrInUse) {
			t.Fatalf("%v", err)
		}
		var done sync.WaitGroup
		for _, u := range waits[1:] {
			done.Go(u.Close)
		}
		done.Go(func() { e.deliver(x) })
		got, err := waits[0].Wait(t.Context())
		if done.Wait(); err != nil || got != x {
			t.Fatalf("%v, %v", got, err)
		}
		waits[0].Close() // a client that has got it holds it until it has read it
		if log.Held() == nil || len(e.upcoming) != 0 {
			t.Fatalf("it is not held, or %d wait", len(e.upcoming))
		}
		waits[0].hold.Release()
		if log.Held() != nil {
			t.Fatal("one that has given up holds it")
		}
		log.Close()
	}
}

// A wait ends with its context, with the sandbox, and with a start that fails, and leaves nothing.
func TestWaitsForAStartEnd(t *testing.T) {
	e := newRegistry(t)
	rec := &runtime.Record{Sandbox: api.Sandbox{ID: "box"}}
	await := func(exec string) *Upcoming {
		t.Helper()
		u, err := e.await(rec, exec)
		if err != nil {
			t.Fatal(err)
		}
		return u
	}
	u, ctx := await(api.MainExec), context.Context(nil)
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errNoStdin)
	if _, err := u.Wait(ctx); !errors.Is(err, errNoStdin) {
		t.Errorf("%v", err)
	}
	u.Close()
	u.Close()
	failed := await(api.MainExec)
	e.FailMain("box")
	if _, err := failed.Wait(t.Context()); !errors.Is(err, class.ErrGone) {
		t.Errorf("%v", err)
	}
	failed.Close()
	if _, err := prepareNth(e, "box", 1, 1, quota{parts: 1}); err != nil {
		t.Fatal(err)
	}
	deleted, prepared := await(api.MainExec), await("x1")
	e.forgetUpcoming("box")
	if !isOver(deleted) || !isOver(prepared) || len(e.upcoming) != 0 || len(e.prepared) != 0 {
		t.Errorf("%v, %v are left", e.upcoming, e.prepared)
	}
}

// The removal of a sandbox at its end waits for a client that still reads, for no more than a step,
// and not when the daemon stops.
func TestRemovalWaitsForReaders(t *testing.T) {
	for name, tc := range map[string]struct {
		end  func(s *Registry, log *execlog.Log, h *execlog.Hold)
		want time.Duration
	}{
		"that have read all": {func(_ *Registry, _ *execlog.Log, h *execlog.Hold) { h.Release() }, time.Second},
		"that were let go":   {func(_ *Registry, log *execlog.Log, _ *execlog.Hold) { log.ReleaseHolds() }, time.Second},
		"that have stopped":  {func(_ *Registry, log *execlog.Log, h *execlog.Hold) { h.Taken(1); log.Finish() }, stepTimeout},
		"of a daemon before": {func(s *Registry, _ *execlog.Log, _ *execlog.Hold) { s.opts.Work.Stop(execlog.ErrHanded) }, time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newRegistry(t)
				log, err := execlog.New(1<<20, false)
				if err != nil {
					t.Fatal(err)
				}
				defer log.Close()
				s.AwaitReaders("box") // no main process
				s.mains["box"] = mainOf{x: &Detached{log: log}}
				s.AwaitReaders("box") // no reader
				h := log.Hold(0)
				began := time.Now()
				time.AfterFunc(time.Second, func() { tc.end(s, log, h) })
				s.AwaitReaders("box")
				if got := time.Since(began); got != tc.want {
					t.Errorf("it has waited for %s, want %s", got, tc.want)
				}
				synctest.Wait()
			})
		})
	}
}

// A client that fails while it holds the output leaves no hold, also one that has waited for the
// start.
func TestAttachHeldLeavesNoHold(t *testing.T) {
	l, err := execlog.New(128<<10, false)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	x := &Detached{program: &program{done: make(chan struct{})}, log: l}
	if _, err := l.Take("stdout", func(file int) (int, error) { return unix.Write(file, []byte("hello")) }); err != nil {
		t.Fatal(err)
	}
	gone := errors.New("gone")
	for _, u := range []*Upcoming{nil, {hold: l.Hold(0)}} {
		err := x.AttachHeld(t.Context(), 0, u, true, func(e api.ExecEvent) error {
			if e.Text == "" {
				return nil
			}
			if l.Held() == nil || !l.Followed() {
				t.Error("nothing holds it meanwhile")
			}
			return gone
		})
		if !errors.Is(err, gone) {
			t.Errorf("%v", err)
		}
	}
	if l.Held() != nil || l.Followed() {
		t.Error("it is held, or followed")
	}
}
