package runtime_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/runtime/runtimetest"
)

func start(t *testing.T, s *runtime.Supervisor, ref string, timeout time.Duration) runtime.Record {
	t.Helper()
	rec, err := s.Start(t.Context(), ref, runtime.StartRequest{Profile: request("").Profile, Timeout: timeout})
	if err != nil {
		t.Fatal(err)
	}
	return rec
}

func stop(t *testing.T, s *runtime.Supervisor, ref string) runtime.Record {
	t.Helper()
	rec, err := s.Stop(t.Context(), ref, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	return rec
}

func TestStopAndStart(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	req := request("one")
	req.Labels, req.Timeout = map[string]string{"a": "b"}, 30*time.Minute
	req.Limits.Memory, req.Defaults.Pids = 64<<20, 100
	one := create(t, s, req)
	lease, err := s.Begin("one")
	if err != nil {
		t.Fatal(err)
	}
	defer lease.End()
	for range 3 {
		rec := stop(t, s, "one")
		if rec.State != api.StateStopped || rec.Reason != "stopped" || rec.PID != 0 {
			t.Errorf("stopped: %+v", rec)
		}
		if _, err := s.Begin("one"); !errors.Is(err, runtime.ErrState) {
			t.Errorf("a use of a stopped sandbox: %v", err)
		}
		if again := stop(t, s, "one"); again.Reason != "stopped" {
			t.Errorf("stopped again: %+v", again)
		}
		if got := sockets(t, b); len(got) != 0 {
			t.Errorf("sockets = %v", got)
		}
		rec = start(t, s, "one", 0)
		if rec.ID != one.ID || rec.Name != "one" || rec.Labels["a"] != "b" || rec.Limits != one.Limits || rec.State != api.StateRunning || rec.Reason != "" {
			t.Errorf("started: %+v", rec)
		}
		if left := rec.Deadline.Sub(b.clock.Now()); left != 30*time.Minute {
			t.Errorf("it has %s left", left)
		}
		spec := b.engine.Spec(one.ID)
		if spec.Explicit.Memory != 64<<20 || spec.Explicit.Pids != 0 || spec.Limits.Pids != 100 || !spec.Deadline.Equal(rec.Deadline) {
			t.Errorf("spec: %+v", spec)
		}
		if _, err := s.Start(t.Context(), "one", runtime.StartRequest{}); !errors.Is(err, runtime.ErrNotEnded) {
			t.Errorf("start of a running one: %v", err)
		}
		l, err := s.Begin("one")
		if err != nil {
			t.Fatal(err)
		}
		select {
		case <-l.Gone:
			t.Error("it is gone")
		default:
		}
		l.End()
	}
	// A lease of its first life has ended with that.
	called := false
	lease.AfterGone(func() { called = true })
	if !called {
		t.Error("a lease of before is told nothing")
	}
	stop(t, s, "one")
	if rec := start(t, s, "one", 2*time.Hour); rec.Deadline.Sub(b.clock.Now()) != 2*time.Hour {
		t.Errorf("a timeout that was asked for: %s", rec.Deadline)
	}
}

// A sandbox that has ended whatever way, also by the launcher's death, runs again.
func TestStartAfterEveryEnd(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	short := request("deadline")
	short.Timeout = 20 * time.Second
	idle := request("idle")
	idle.IdleTimeout = 20 * time.Second
	for _, req := range []runtime.Request{short, idle} {
		create(t, s, req)
		b.advance(s, 20*time.Second)
		if rec := waitEnded(t, s, req.Name); rec.State != api.StateStopped {
			t.Errorf("%s: %+v", req.Name, rec)
		}
		start(t, s, req.Name, time.Hour)
		if err := s.Delete(t.Context(), req.Name); err != nil {
			t.Fatal(err)
		}
	}
	lost := create(t, s, request("lost"))
	b.engine.Crash()
	if rec := waitEnded(t, s, lost.ID); rec.State != api.StateLost {
		t.Errorf("lost: %+v", rec)
	}
	if _, err := s.Start(t.Context(), "lost", runtime.StartRequest{}); !errors.Is(err, runtime.ErrUnavailable) {
		t.Errorf("start without an engine: %v", err)
	}
	if rec, err := s.Get("lost"); err != nil || rec.State != api.StateLost {
		t.Errorf("after a start that failed: %+v, %v", rec, err)
	}
	b.engine.Restart()
	start(t, s, "lost", 0)
}

// The next daemon knows which sandboxes were started and stopped, also after a crash in the middle.
func TestStatesOutliveTheDaemon(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	create(t, s, request("stopped"))
	create(t, s, request("started"))
	middle := create(t, s, request("middle"))
	stop(t, s, "stopped")
	stop(t, s, "started")
	stop(t, s, "middle")
	start(t, s, "started", 0)
	if err := s.Close(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	// The trace of a crash between the engine's start and the record's: it runs, and is recorded as
	// stopped.
	spec := b.engine.Spec(middle.ID)
	spec.Deadline = time.Now().Add(40 * time.Minute)
	control := listenAt(t, b, middle.ID)
	st, err := b.engine.Start(t.Context(), spec, control)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = st.Pidfd.Close(), control.Close() // never read

	s = b.open(t)
	for name, want := range map[string]api.SandboxState{"stopped": api.StateStopped, "started": api.StateRunning, "middle": api.StateRunning} {
		rec, err := s.Get(name)
		if err != nil || rec.State != want || (want == api.StateRunning) != (rec.Reason == "") {
			t.Errorf("%s: %+v, %v", name, rec, err)
		}
	}
	if rec, _ := s.Get("middle"); !rec.Deadline.Equal(spec.Deadline) {
		t.Errorf("deadline of what was being started: %s, want %s", rec.Deadline, spec.Deadline)
	}
	start(t, s, "stopped", 0)
}

func TestFailedStartLeavesItStopped(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	one := create(t, s, request("one"))
	stop(t, s, "one")
	refused := errors.New("refused")
	b.engine.CreateError = func(*runtime.Spec) error { return refused }
	if _, err := s.Start(t.Context(), "one", runtime.StartRequest{}); !errors.Is(err, refused) {
		t.Fatalf("start: %v", err)
	}
	rec, err := s.Get("one")
	if err != nil || rec.State != api.StateStopped || rec.Reason != "stopped" || len(sockets(t, b)) != 0 {
		t.Errorf("after a start that failed: %+v, %v", rec, err)
	}
	b.engine.CreateError = nil
	if rec := start(t, s, "one", 0); rec.ID != one.ID {
		t.Errorf("started: %+v", rec)
	}
}

// slowStart is an engine whose start begins late.
type slowStart struct{ *slow }

func (e slowStart) Create(ctx context.Context, spec *runtime.Spec, control *os.File) (*runtime.Started, error) {
	return e.Engine.Create(ctx, spec, control)
}

func (e slowStart) Start(ctx context.Context, spec *runtime.Spec, control *os.File) (*runtime.Started, error) {
	return e.late(ctx, spec, control, e.Engine.Start)
}

// New defaults are those of sandboxes from then on; others keep theirs.
func TestSetDefaults(t *testing.T) {
	s := newBench(t).open(t)
	plain := request("before")
	plain.Timeout, plain.IdleTimeout = 0, 0
	before := create(t, s, plain)
	s.SetDefaults(runtime.Defaults{Timeout: 7 * time.Minute, IdleTimeout: 3 * time.Minute})
	plain.Name = "after"
	after := create(t, s, plain)
	if got := after.Deadline.Sub(after.CreatedAt); got != 7*time.Minute || after.IdleTimeout != 180 {
		t.Errorf("after: a lifetime of %v, idle %v", got, after.IdleTimeout)
	}
	now, err := s.Get(before.ID)
	if err != nil || !now.Deadline.Equal(before.Deadline) || now.IdleTimeout != before.IdleTimeout || now.IdleTimeout == 180 {
		t.Errorf("before: %v, %v; was %v: %v", now.Deadline, now.IdleTimeout, before.Deadline, err)
	}
}

// A client that hangs up before the engine has begun gets no start either.
func TestStartThatBeginsLateLeavesItStopped(t *testing.T) {
	b := newBench(t)
	e := slowStart{&slow{Engine: b.engine, asked: make(chan struct{}), begin: make(chan struct{}), made: make(chan struct{})}}
	s, err := runtime.Open(t.Context(), b.dir, e, b.options)
	if err != nil {
		t.Fatal(err)
	}
	rec := create(t, s, request("late"))
	was := stop(t, s, rec.ID)
	ctx, hangUp := context.WithCancel(t.Context())
	answer := make(chan error, 1)
	go func() {
		_, err := s.Start(ctx, rec.ID, runtime.StartRequest{Timeout: 5 * time.Hour})
		answer <- err
	}()
	<-e.asked
	hangUp()
	select {
	case err := <-answer:
		answer <- err
	case <-time.After(50 * time.Millisecond): // it waits, as it should
	}
	close(e.begin)
	<-e.made
	if err := <-answer; !errors.Is(err, context.Canceled) {
		t.Errorf("Start = %v, want canceled", err)
	}
	if list, err := b.engine.List(t.Context()); err != nil || len(list) != 0 {
		t.Errorf("the engine still runs %d sandboxes, %v", len(list), err)
	}
	if err := s.Close(t.Context(), true); err != nil {
		t.Error(err)
	}
	s = b.open(t)
	if now, err := s.Get(rec.ID); err != nil || now.State != api.StateStopped || now.Reason != was.Reason || !now.Deadline.Equal(was.Deadline) {
		t.Errorf("after a restart: %+v, %v", now, err)
	}
}

// left is an engine whose client leaves while it throws files away.
type left struct {
	*runtimetest.Engine

	leave func()
}

func (e left) Delete(ctx context.Context, id string) error {
	e.leave()
	return e.Engine.Delete(ctx, id)
}

// A sandbox that is rolled back runs again, although the client has left.
func TestRollbackGoesOn(t *testing.T) {
	b := newBench(t)
	ctx, leave := context.WithCancel(t.Context())
	s, err := runtime.Open(t.Context(), b.dir, left{b.engine, leave}, b.options)
	if err != nil {
		t.Fatal(err)
	}
	rec := create(t, s, request("one"))
	now, err := s.Rollback(ctx, rec.ID, request("").Rootfs, "snap", runtime.StartRequest{})
	if err != nil || now.State != api.StateRunning || now.Snapshot != "snap" || now.Fresh {
		t.Errorf("rolled back: %+v, %v", now, err)
	}
	if err := s.Close(t.Context(), false); err != nil {
		t.Error(err)
	}
}

// A deletion waits for a start under way, as long as its client does.
func TestDeleteWaitsForAStart(t *testing.T) {
	b := newBench(t)
	rolling, roll := make(chan struct{}), make(chan struct{})
	s, err := runtime.Open(t.Context(), b.dir, left{b.engine, sync.OnceFunc(func() { close(rolling); <-roll })}, b.options)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close(context.WithoutCancel(t.Context()), false) }()
	rec := create(t, s, request("one"))
	rolled := make(chan error, 1)
	go func() {
		_, err := s.Rollback(t.Context(), rec.ID, request("").Rootfs, "snap", runtime.StartRequest{})
		rolled <- err
	}()
	<-rolling
	left, leave := context.WithCancel(t.Context())
	leave()
	if err := s.Delete(left, "one"); !errors.Is(err, context.Canceled) {
		t.Errorf("a client that has left: %v", err)
	}
	deleted := make(chan error, 1)
	go func() { deleted <- s.Delete(t.Context(), "one") }()
	close(roll)
	if err := <-rolled; err != nil && !errors.Is(err, runtime.ErrNotFound) { // it is deleted before it is shown
		t.Error(err)
	}
	if err := <-deleted; err != nil || s.Exists(rec.ID) {
		t.Errorf("it is there: %v, %v", s.Exists(rec.ID), err)
	}
}

// Another stop, a deletion and the end of the daemon each cut a grace short.
func TestGraceEnds(t *testing.T) {
	for name, hurry := range map[string]func(t *testing.T, s *runtime.Supervisor){
		"another stop": func(t *testing.T, s *runtime.Supervisor) {
			t.Helper()
			if _, err := s.Stop(t.Context(), "one", time.Hour); err != nil {
				t.Error(err)
			}
		},
		"delete": func(t *testing.T, s *runtime.Supervisor) {
			t.Helper()
			if err := s.Delete(t.Context(), "one"); err != nil {
				t.Error(err)
			}
		},
		"close": func(t *testing.T, s *runtime.Supervisor) {
			t.Helper()
			if err := s.Close(t.Context(), true); err != nil {
				t.Error(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			b.engine.Reluctant = true
			s := b.open(t)
			create(t, s, request("one"))
			var wg sync.WaitGroup
			wg.Go(func() {
				rec, err := s.Stop(context.WithoutCancel(t.Context()), "one", time.Hour)
				if name == "delete" && errors.Is(err, runtime.ErrNotFound) {
					return
				}
				if err != nil || rec.State != api.StateStopped {
					t.Errorf("stop: %+v, %v", rec, err)
				}
			})
			for { // until it has begun
				lease, err := s.Begin("one")
				if errors.Is(err, runtime.ErrState) {
					break
				}
				if err != nil {
					t.Fatal(err)
				}
				lease.End()
			}
			hurry(t, s)
			wg.Wait()
		})
	}
}

func TestStartsStopsAndDeletesAtOnce(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	create(t, s, request("one"))
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 20 {
				_, err := s.Start(t.Context(), "one", runtime.StartRequest{Profile: request("").Profile})
				if err != nil && !errors.Is(err, runtime.ErrState) && !errors.Is(err, runtime.ErrNotEnded) {
					t.Error(err)
				}
			}
		})
		wg.Go(func() {
			for range 20 {
				if _, err := s.Stop(t.Context(), "one", time.Minute); err != nil && !errors.Is(err, runtime.ErrState) {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	stop(t, s, "one")
	start(t, s, "one", 0)
	if err := s.Delete(t.Context(), "one"); err != nil {
		t.Fatal(err)
	}
	if got := b.engine.IDs(); len(got) != 0 || !slices.Equal(sockets(t, b), nil) {
		t.Errorf("left: %v, %v", got, sockets(t, b))
	}
}

// A start whose sandbox ends before it returns must not undo the reservation of the next start: a
// third one, or a deletion, would run beside that.
func TestReleaseOfAStartLeavesTheNextAlone(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	rec := create(t, s, request(""))
	stop(t, s, rec.ID)
	if kept, err := runtime.ReleaseLate(s, rec.ID); err != nil || !kept {
		t.Errorf("the next start keeps its reservation: %t, %v", kept, err)
	}
	start(t, s, rec.ID, 0)
}

// listenAt makes the control socket of a sandbox as the supervisor does.
func listenAt(t *testing.T, b *bench, id string) *os.File {
	t.Helper()
	dir, err := os.Open(filepath.Join(b.options.RuntimeDir, "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: fmt.Sprintf("/proc/self/fd/%d/%s.sock", dir.Fd(), id), Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	f, err := l.File()
	_ = l.Close() // f is a copy
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestPauseAndResume(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	one := create(t, s, request("one"))
	lease, err := s.Begin("one")
	if err != nil {
		t.Fatal(err)
	}
	idlesAfter(t, s, "one", time.Minute)
	rec, err := s.Pause(t.Context(), "one")
	if err != nil || rec.State != api.StatePaused {
		t.Fatalf("pause: %+v, %v", rec, err)
	}
	if now := time.Now(); lease.Held().Before(now) {
		t.Error("whoever waits for it is not told that it is held")
	}
	lease.End()
	if _, err := s.Begin("one"); !errors.Is(err, runtime.ErrPaused) || !errors.Is(err, runtime.ErrState) {
		t.Errorf("use of a paused sandbox: %v", err)
	}
	if again, err := s.Pause(t.Context(), "one"); err != nil || again.State != api.StatePaused {
		t.Errorf("pause again: %+v, %v", again, err)
	}
	if _, err := s.Start(t.Context(), "one", runtime.StartRequest{}); !errors.Is(err, runtime.ErrNotEnded) {
		t.Errorf("start of a paused one: %v", err)
	}
	if got := s.List(runtime.Filter{State: api.StatePaused}); len(got) != 1 {
		t.Errorf("listed as paused: %v", got)
	}
	// It can be changed, and is not idle.
	if rec, err := s.Update(t.Context(), "one", func(rec *runtime.Record) (api.Limits, error) {
		rec.Labels = map[string]string{"a": "b"}
		return api.Limits{}, nil
	}); err != nil || rec.State != api.StatePaused || rec.Labels["a"] != "b" {
		t.Errorf("update: %+v, %v", rec, err)
	}
	b.advance(s, 3*time.Minute)
	rec, err = s.Resume(t.Context(), "one")
	if err != nil || rec.State != api.StateRunning {
		t.Fatalf("resume: %+v, %v", rec, err)
	}
	b.advance(s, time.Minute-1)
	if rec, err := s.Get("one"); err != nil || rec.State != api.StateRunning {
		t.Errorf("before its idle timeout: %+v, %v", rec, err)
	}
	b.advance(s, 1)
	if rec := waitEnded(t, s, one.ID); !strings.HasPrefix(rec.Reason, "idle") {
		t.Errorf("after its idle time: %+v", rec)
	}
	for _, f := range []func(context.Context, string) (runtime.Record, error){s.Pause, s.Resume} {
		if _, err := f(t.Context(), "one"); !errors.Is(err, runtime.ErrState) || errors.Is(err, runtime.ErrPaused) {
			t.Errorf("of one that has ended: %v", err)
		}
		if _, err := f(t.Context(), "nobody"); !errors.Is(err, runtime.ErrNotFound) {
			t.Errorf("of one that never was: %v", err)
		}
	}
}

// The deadline of a paused sandbox comes, and it can be stopped and deleted.
func TestPausedSandboxesEnd(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	pause := func(name string) runtime.Record {
		rec := create(t, s, request(name))
		if _, err := s.Pause(t.Context(), name); err != nil {
			t.Fatal(err)
		}
		return rec
	}
	short := pause("short")
	if _, err := s.Update(t.Context(), short.ID, func(rec *runtime.Record) (api.Limits, error) {
		rec.Deadline = b.clock.Now().Add(time.Minute)
		return api.Limits{}, nil
	}); err != nil {
		t.Fatal(err)
	}
	b.advance(s, time.Minute)
	for rec := short; rec.State != api.StateStopped; { // or the test ends
		var err error
		if rec, err = s.Get(short.ID); err != nil || t.Context().Err() != nil {
			t.Fatal(err)
		}
		goruntime.Gosched()
	}
	pause("stop")
	if rec := stop(t, s, "stop"); rec.State != api.StateStopped {
		t.Errorf("stopped: %+v", rec)
	}
	if rec := start(t, s, "stop", 0); rec.State != api.StateRunning {
		t.Errorf("started: %+v", rec)
	}
	pause("delete")
	if err := s.Delete(t.Context(), "delete"); err != nil {
		t.Error(err)
	}
}

// The next daemon asks the engine which sandboxes are paused, not the record.
func TestPauseOutlivesTheDaemon(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	ids := map[string]string{}
	for _, name := range []string{"runs", "paused", "half paused", "half resumed"} {
		ids[name] = create(t, s, request(name)).ID
	}
	for _, name := range []string{"paused", "half resumed"} {
		if _, err := s.Pause(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Close(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(b.engine.Pause(t.Context(), ids["half paused"]), b.engine.Resume(t.Context(), ids["half resumed"])); err != nil {
		t.Fatal(err)
	}
	s = b.open(t)
	for name, want := range map[string]api.SandboxState{
		"runs": api.StateRunning, "paused": api.StatePaused, "half paused": api.StatePaused, "half resumed": api.StateRunning,
	} {
		if rec, err := s.Get(name); err != nil || rec.State != want {
			t.Errorf("%s: %s, %v", name, rec.State, err)
		}
	}
	if len(sockets(t, b)) != 4 {
		t.Errorf("sockets: %v", sockets(t, b))
	}
	if rec, err := s.Resume(t.Context(), "paused"); err != nil || rec.State != api.StateRunning {
		t.Errorf("resume: %+v, %v", rec, err)
	}
}

// slowKiller is an engine whose Kill announces itself and then waits for permission.
type slowKiller struct {
	*runtimetest.Engine

	called, may chan struct{}
}

func (e *slowKiller) Kill(ctx context.Context, id string) error {
	e.called <- struct{}{}
	<-e.may
	return e.Engine.Kill(ctx, id)
}

// An operation that ends a sandbox by its id ends one life of it: the next life does not begin
// before the operation is over, and a late one ends nothing.
func TestKillMeansOneLife(t *testing.T) {
	for name, end := range map[string]func(*runtime.Supervisor, *runtime.Lease) error{
		"lease": func(_ *runtime.Supervisor, l *runtime.Lease) error { return l.Kill(t.Context(), "by the test") },
		"kill": func(s *runtime.Supervisor, l *runtime.Lease) error {
			return s.Kill(t.Context(), l.Record.ID, "by the test")
		},
		"main": func(s *runtime.Supervisor, l *runtime.Lease) error {
			return s.MainEnded(t.Context(), l.Record.ID, l.Record.Life, nil, "by the test")
		},
		"stop": func(s *runtime.Supervisor, l *runtime.Lease) error {
			_, err := s.Stop(t.Context(), l.Record.ID, 0)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			e := &slowKiller{b.engine, make(chan struct{}, 100), make(chan struct{})}
			s, err := runtime.Open(t.Context(), b.dir, e, b.options)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = s.Close(context.WithoutCancel(t.Context()), false) }()
			rec := create(t, s, request(""))
			lease, err := s.Begin(rec.ID)
			if err != nil {
				t.Fatal(err)
			}
			killed := make(chan error, 1)
			go func() { killed <- end(s, lease) }()
			<-e.called
			if err := b.engine.Kill(t.Context(), rec.ID); err != nil { // it ends by itself
				t.Fatal(err)
			}
			<-lease.Gone
			lease.End()
			started := make(chan error, 1)
			go func() {
				_, err := s.Start(t.Context(), rec.ID, runtime.StartRequest{Profile: request("").Profile})
				started <- err
			}()
			select { // no event tells that it waits
			case err := <-started:
				t.Errorf("the next life begins at once: %v", err)
				started <- nil
			case <-time.After(100 * time.Millisecond):
			}
			close(e.may)
			if err := errors.Join(<-killed, <-started); err != nil {
				t.Fatal(err)
			}
			if err := lease.Kill(t.Context(), "late"); err != nil {
				t.Error(err)
			}
			if list, err := b.engine.List(t.Context()); err != nil || len(list) != 1 {
				t.Errorf("%d run, %v", len(list), err)
			} else {
				_ = list[0].Pidfd.Close()
			}
			if rec, err := s.Get(rec.ID); err != nil || rec.State != api.StateRunning {
				t.Errorf("%s (%s), %v", rec.State, rec.Reason, err)
			}
		})
	}
}

// The record says that the daemon ended the sandbox, although the daemon stops before it has seen
// the end.
func TestEndIsToldByADaemonThatStops(t *testing.T) {
	b := newBench(t)
	e := &slowKiller{b.engine, make(chan struct{}, 100), make(chan struct{})}
	s, err := runtime.Open(t.Context(), b.dir, e, b.options)
	if err != nil {
		t.Fatal(err)
	}
	req := request("idle")
	req.IdleTimeout = time.Second
	rec := create(t, s, req)
	b.advance(s, time.Second)
	<-e.called
	closed := make(chan error, 1)
	go func() { closed <- s.Close(t.Context(), true) }()
	for deadline := time.Now().Add(patience); !runtime.Dismissed(s, rec.ID); goruntime.Gosched() {
		if time.Now().After(deadline) {
			t.Fatal("its watcher is not dismissed")
		}
	}
	close(e.may)
	if err := <-closed; err != nil {
		t.Fatal(err)
	}
	if got, err := b.open(t).Get("idle"); err != nil || got.State != api.StateStopped || got.Reason != "idle for 1s" || got.EndedAt.IsZero() {
		t.Errorf("the next daemon reads %s (%s), %v", got.State, got.Reason, err)
	}
}

// A disk that refuses the record of an end, because it is full, does not lose it: the reconciler
// writes it when it can.
func TestEndIsWrittenWhenTheDiskTakesIt(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	rec := create(t, s, request("full"))
	restore, err := runtime.RefuseRecords(s, filepath.Join(t.TempDir(), "scratch"))
	if err != nil {
		t.Fatal(err)
	}
	exit := &api.SandboxExit{Exit: api.Exit{Code: 3}}
	if err := s.MainEnded(t.Context(), rec.ID, 0, exit, "its main process exited with 3"); err != nil {
		t.Fatal(err)
	}
	if err := runtime.Reconcile(t.Context(), s, 1); err != nil {
		t.Errorf("what cannot be written keeps the reconciler from its other work: %v", err)
	}
	if err := restore(); err != nil {
		t.Fatal(err)
	}
	if err := runtime.Reconcile(t.Context(), s, 1); err != nil {
		t.Fatal(err)
	}
	crash, err := os.ReadFile(filepath.Join(b.dir, "state.db"))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	// As if the daemon had been killed: the records of its shutdown are gone.
	if err := os.WriteFile(filepath.Join(b.dir, "state.db"), crash, 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := b.open(t).Get("full")
	if err != nil || got.State != api.StateStopped || got.Exit == nil || got.Exit.Code != 3 || got.EndedAt.IsZero() {
		t.Errorf("the next daemon reads %+v, %v", got, err)
	}
}

// An ended sandbox whose files are being read, or that was started, is not deleted by age.
func TestDeleteEndedSparesWhatIsUsed(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	for name, use := range map[string]func(id string){
		"read": func(id string) { _, _, _ = s.Read(id) },
		"started": func(id string) {
			_, _ = s.Start(t.Context(), id, runtime.StartRequest{})
			_, _ = s.Stop(t.Context(), id, 0)
		},
		"no": nil,
	} {
		rec := create(t, s, request(name))
		if err := s.DeleteEnded(t.Context(), &rec, 0); !errors.Is(err, runtime.ErrNotEnded) {
			t.Errorf("%s: it runs: %v", name, err)
		}
		if _, err := s.Stop(t.Context(), rec.ID, 0); err != nil {
			t.Fatal(err)
		}
		if use != nil {
			use(rec.ID)
		}
		now, err := s.Get(rec.ID)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.DeleteEnded(t.Context(), &now, time.Hour); errors.Is(err, runtime.ErrNotEnded) != (use != nil) {
			t.Errorf("%s: within the hour: %v", name, err)
		}
		if use == nil {
			continue
		}
		if err := s.DeleteEnded(t.Context(), &now, 0); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}
