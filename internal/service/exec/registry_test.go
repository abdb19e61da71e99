package exec

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	goruntime "runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/execlog"
	"github.com/sandboxd/sandboxd/internal/service/servicetest"
	"github.com/sandboxd/sandboxd/internal/service/work"
	"github.com/sandboxd/sandboxd/runtime"
)

// newRegistry returns a registry of a daemon that has nothing else.
func newRegistry(t *testing.T) *Registry {
	t.Helper()
	return New(Options{Work: work.New(t.Context()), Adopted: func() {}, Log: slog.New(slog.DiscardHandler)})
}

// What other sandboxes have of execs keeps none from its first one, which is its main process where
// it has one.
func TestEverySandboxHasRoomForOneExec(t *testing.T) {
	e := newRegistry(t)
	enter := func(sandbox string, i int, size int64, ended bool) {
		t.Helper()
		room, err := e.reserve(sandbox, size, quota{parts: 1})
		if err != nil || len(room) > 0 {
			t.Fatalf("exec %d of %s: room %v, %v", i, sandbox, room, err)
		}
		x := &Detached{program: &program{done: make(chan struct{}), record: Record{Exec: api.Exec{ID: fmt.Sprint(i), Sandbox: sandbox, StartedAt: time.Unix(int64(i), 0)}}}, log: new(execlog.Log), kept: size}
		if ended {
			close(x.done)
		}
		e.register(x)
	}
	// Sixteen sandboxes have thirty-two, so that 496 are shared, and a seventeenth the rest of them.
	for s := range 16 {
		for i := range 32 {
			enter(fmt.Sprint("many", s), i, 1<<10, false)
		}
	}
	for i := range 17 {
		enter("rest", 1000+i, 1<<10, i == 16)
	}
	// An exec that ended makes room, the first one of another sandbox never.
	enter("lone", 1, 1<<10, true)
	room, err := e.reserve("many16", 1<<10, quota{parts: 1})
	if err != nil || len(room) != 0 {
		t.Errorf("a first exec: %v, %v", room, err)
	}
	room, err = e.reserve("many16", 1<<10, quota{parts: 1})
	if err != nil || len(room) != 1 || room[0].record.Sandbox != "rest" {
		t.Errorf("a second exec: %v, %v", room, err)
	}
	e.release("many16", 1<<10)
	if !e.unregister(room[0]) || e.unregister(room[0]) {
		t.Error("what makes room is not listed once")
	}
	enter("rest", 2000, 1<<10, false)
	if _, err := e.reserve("many16", 1<<10, quota{parts: 1}); !errors.Is(err, runtime.ErrInUse) {
		t.Errorf("a second exec where nothing makes room: %v", err)
	}
	for i := range 900 {
		enter(fmt.Sprint("single", i), 1, MainRing, false)
	}
	// Of memory too: one that needs little is let in.
	e.mu.Lock()
	e.kept = MaxKept
	e.mu.Unlock()
	if _, err := e.reserve("large", MainRing+1, quota{parts: 1}); !errors.Is(err, runtime.ErrInUse) {
		t.Error("there is no end of memory")
	}
	if _, err := e.reserve("small", MainRing, quota{parts: 1}); err != nil {
		t.Errorf("a main process has no room: %v", err)
	}
}

// ending is an exec of a sandbox called box that is listed, and about to end.
func (r *Registry) ending(t *testing.T) *Detached {
	t.Helper()
	log, err := execlog.New(1<<10, false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(log.Close)
	x := &Detached{program: &program{r: r, done: make(chan struct{}), record: Record{Exec: api.Exec{ID: NewID(), Sandbox: "box", State: api.ExecRunning}}}, log: log, kept: 1 << 10}
	r.adoptRecord(x)
	return x
}

// A client that sees the end of an exec can start the next one: there is room.
func TestExecThatIsToldToHaveEndedMakesRoom(t *testing.T) {
	s := newRegistry(t)
	for range 300 {
		x := s.ending(t)
		early := make(chan bool)
		go func() {
			for x.Record().State != api.ExecExited {
				goruntime.Gosched()
			}
			early <- !x.Ended()
		}()
		x.conclude(Record{Exec: api.Exec{State: api.ExecExited}})
		if <-early {
			t.Fatal("it is told to have ended, and counts as one that runs")
		}
		s.Forget(t.Context(), x)
	}
}

// An exec is forgotten while its end is being stored. Nothing of it is left afterwards.
func TestExecThatIsForgottenWhileItIsStored(t *testing.T) {
	held := servicetest.NewDescriptorStore(t)
	s := newRegistry(t)
	s.opts.Descriptors = held
	x := s.ending(t)
	x.conclude(Record{Exec: api.Exec{State: api.ExecExited}})
	held.Dropped = func() {
		if err := x.storeDescriptors(t.Context()); err != nil {
			t.Error(err)
		}
	}
	s.Forget(t.Context(), x)
	if n := held.Count(); n != 0 || held.Dropped != nil {
		t.Errorf("%d are stored", n)
	}
}

// A request that starts an exec waits for a slow adoption no longer than its client does.
func TestAdoptionIsWaitedForNoLongerThanTheClient(t *testing.T) {
	s := newRegistry(t)
	s.opts.Descriptors = servicetest.NewDescriptorStore(t)
	s.adopting <- struct{}{} // an adoption is under way, and the launcher does not answer
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Adopt(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	<-s.adopting
	if err := s.Adopt(t.Context()); err != nil || !s.adopted.Load() {
		t.Errorf("%v", err)
	}
}

// Records of lost execs of earlier versions have a problem document in the place of a failure.
func TestOldRecordsOfLostExecsAreRead(t *testing.T) {
	for text, want := range map[string]error{
		`{"id":"x","state":"lost","error":{"code":"gone","title":"Gone","status":410,"detail":"it ended"}}`: class.ErrGone,
		`{"id":"x","state":"lost","error":{"code":"internal_error","detail":"it ended"}}`:                   nil,
		`{"id":"x","state":"lost","failure":{"class":"unavailable","message":"it ended"}}`:                  class.ErrUnavailable,
	} {
		var rec Record
		if err := json.Unmarshal([]byte(text), &rec); err != nil {
			t.Fatal(err)
		}
		rec.convert()
		if rec.Error != nil || rec.Failure == nil || rec.Failure.Error() != "it ended" || rec.ID != "x" {
			t.Errorf("%s: %+v, %v", text, rec, rec.Failure)
		} else if want != nil && !errors.Is(rec.Failure, want) || want == nil && rec.Failure.Unwrap() != nil {
			t.Errorf("%s: class %v", text, rec.Failure.Unwrap())
		}
	}
}

// Detached execs of one tenant neither take the room of another one's nor are evicted for them, and
// an error tells of one's own alone.
func TestDetachedExecsKeepToTheirTenant(t *testing.T) {
	e := newRegistry(t)
	a := quota{own: map[string]bool{"a": true, "a2": true}, parts: runtime.TenantParts}
	b := quota{own: map[string]bool{"b": true, "b2": true}, parts: runtime.TenantParts}
	var last []*Detached
	enter := func(sandbox string, i int, size int64, q quota, ended bool) error {
		t.Helper()
		room, err := e.reserve(sandbox, size, q)
		if err != nil {
			return err
		}
		for last = room; len(room) > 0; room = room[1:] {
			e.unregister(room[0])
		}
		x := &Detached{program: &program{done: make(chan struct{}), record: Record{Exec: api.Exec{ID: fmt.Sprint(i), Sandbox: sandbox, StartedAt: time.Unix(int64(i), 0)}}}, log: new(execlog.Log), kept: size}
		if ended {
			close(x.done)
		}
		e.register(x)
		return nil
	}
	if err := enter("a", 0, 1<<10, a, true); err != nil {
		t.Fatal(err)
	}
	const large = MaxKept / runtime.TenantParts / 4
	for i := range 4 {
		if err := enter("b", 1+i, large, b, i == 0); err != nil {
			t.Fatal(err)
		}
	}
	// One of its own that ended makes room; a's, which is older, does not.
	if err := enter("b", 10, large, b, false); err != nil || len(last) != 1 || last[0].record.Sandbox != "b" {
		t.Fatalf("room %v, %v", last, err)
	}
	err := enter("b", 11, large, b, false)
	if !errors.Is(err, runtime.ErrInUse) || !strings.Contains(err.Error(), "yours are kept with 256 MiB") {
		t.Errorf("more than the part of a tenant: %v", err)
	}
	if err := enter("b2", 12, MainRing, b, false); err != nil {
		t.Errorf("a main process has no room: %v", err)
	}
	for i := range 4 {
		if err := enter("a2", 20+i, large-1<<10, a, false); err != nil {
			t.Errorf("exec %d of a: %v", i, err)
		}
	}
	if len(e.of["a"]) != 1 {
		t.Error("a has lost its exec")
	}
}

// The exec of a process is found by its main process. While the start of an exec is under way,
// which init knows of first, it is waited for.
func TestExecOfAProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newRegistry(t)
		enter := func(id string, pid int) *Execution {
			x := &Execution{program: &program{PID: pid, done: make(chan struct{}), record: Record{Exec: api.Exec{ID: id, Sandbox: "box"}}}}
			e.register(x)
			return x
		}
		first := enter("first", 7)
		if got := e.ByMain(t.Context(), "box", 7); got != "first" {
			t.Errorf("pid 7 is of %q", got)
		}
		for _, other := range []string{e.ByMain(t.Context(), "box", 8), e.ByMain(t.Context(), "other", 7)} {
			if other != "" {
				t.Errorf("%q, where there is none", other)
			}
		}
		failed, ended := e.starting("box"), e.starting("box")
		found := make(chan string, 1)
		go func() { found <- e.ByMain(t.Context(), "box", 8) }()
		synctest.Wait()
		failed()
		synctest.Wait()
		if len(found) > 0 {
			t.Errorf("%q before its start has ended", <-found)
		}
		enter("second", 8)
		ended()
		if got := <-found; got != "second" {
			t.Errorf("pid 8 is of %q", got)
		}
		close(first.done) // its pid may be another's
		if got := e.ByMain(t.Context(), "box", 7); got != "" {
			t.Errorf("pid 7 is of %q, which has ended", got)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		defer e.starting("box")()
		if got := e.ByMain(ctx, "box", 9); got != "" {
			t.Errorf("pid 9 is of %q", got)
		}
	})
}
