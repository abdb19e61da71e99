package runtime_test

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/runtime"
)

// createStopped makes a sandbox that does not run.
func createStopped(t *testing.T, s *runtime.Supervisor, name string) runtime.Record {
	t.Helper()
	req := request(name)
	req.Stopped, req.Command = true, []string{"true"}
	return create(t, s, req)
}

// A sandbox that is created stopped has no processes and no start until it is started, also by a
// later daemon; and each of its states is told once.
func TestCreatedStopped(t *testing.T) {
	b := newBench(t)
	var c told
	b.options.Changed = c.on
	s := b.open(t)
	one := createStopped(t, s, "one")
	if one.State != api.StateStopped || one.Reason != runtime.ReasonCreated || !one.Unstarted || !one.StartedAt.IsZero() || !one.EndedAt.Equal(one.CreatedAt) || one.PID != 0 || one.Exit != nil {
		t.Errorf("%+v", one)
	}
	if ids, files := b.engine.IDs(), sockets(t, b); len(ids) != 0 || len(files) != 0 {
		t.Errorf("the engine has %v, there are %v", ids, files)
	}
	if _, err := s.Begin("one"); !errors.Is(err, runtime.ErrState) {
		t.Errorf("%v", err)
	}
	if _, _, err := s.Read("one"); !errors.Is(err, runtime.ErrState) {
		t.Errorf("%v", err)
	}
	if rec := stop(t, s, "one"); rec.Reason != runtime.ReasonCreated {
		t.Errorf("%+v", rec)
	}
	if _, err := s.Create(t.Context(), request("one")); !errors.Is(err, runtime.ErrExists) {
		t.Errorf("%v", err)
	}
	b.advance(s, 1000*time.Hour) // past its deadline
	if err := s.Close(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	s = b.open(t)
	if rec, err := s.Get("one"); err != nil || rec.Reason != runtime.ReasonCreated || !rec.Unstarted || !rec.EndedAt.Equal(one.CreatedAt) {
		t.Errorf("%+v, %v", rec, err)
	}
	rec := start(t, s, "one", 0)
	if rec.Unstarted || !rec.StartedAt.Equal(b.clock.Now()) || rec.Fresh || rec.Settled || !rec.EndedAt.IsZero() || rec.Deadline.Before(b.clock.Now()) || !b.engine.Spec(rec.ID).Fresh {
		t.Errorf("%+v", rec)
	}
	if d := cmp.Diff([]string{"one created stopped", "one started running"}, c.take()); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	two := createStopped(t, s, "two")
	if err := s.DeleteEnded(t.Context(), &two, 0); err != nil {
		t.Error(err)
	}
	// What fails leaves nothing.
	req, no := request("two"), errors.New("no")
	req.Stopped, req.Prepare = true, func(string) error { return no }
	if _, err := s.Create(t.Context(), req); !errors.Is(err, no) {
		t.Errorf("%v", err)
	}
	createStopped(t, s, "two")
}

// An idle run is no start: it leaves the exit of the run before it, and a sandbox that was never
// started as one.
func TestIdleRunsAreNoStarts(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	idle := func() {
		t.Helper()
		rec, err := s.Start(t.Context(), "one", runtime.StartRequest{Profile: request("").Profile, Idle: true})
		if err != nil || rec.Exit != nil {
			t.Fatalf("%+v, %v", rec, err)
		}
	}
	createStopped(t, s, "one")
	for range 2 {
		idle()
		if rec := stop(t, s, "one"); !rec.Unstarted || !rec.StartedAt.IsZero() || rec.Exit != nil {
			t.Errorf("%+v", rec)
		}
	}
	first := start(t, s, "one", 0)
	if err := s.MainEnded(t.Context(), first.ID, first.Life, &api.SandboxExit{Exit: api.Exit{Code: 7}}, "its main process exited with 7"); err != nil {
		t.Fatal(err)
	}
	waitEnded(t, s, "one")
	b.advance(s, time.Minute)
	for range 2 { // the second has no exit before it but the kept one
		idle()
		if err := s.Close(t.Context(), true); err != nil {
			t.Fatal(err)
		}
		s = b.open(t)
		if rec := stop(t, s, "one"); rec.Exit == nil || rec.Exit.Code != 7 || !rec.StartedAt.Equal(first.StartedAt) || rec.Unstarted {
			t.Errorf("%+v", rec)
		}
	}
	if rec := start(t, s, "one", 0); rec.ExitBefore != nil || rec.Exit != nil || rec.StartedAt.Equal(first.StartedAt) {
		t.Errorf("%+v", rec)
	}
}

// A daemon that dies between the engine's start and the record's leaves a sandbox that runs. The
// next one notes the start, and nothing of the life before.
func TestStartsThatADaemonDidNotNote(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	unstarted := createStopped(t, s, "unstarted")
	ran := create(t, s, request("ran"))
	made := create(t, s, request("made"))
	ended := stop(t, s, "ran")
	if err := s.Close(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	made.State, made.StartedAt, made.PID = api.StateCreating, time.Time{}, 0
	ended.ExitBefore = &api.SandboxExit{Exit: api.Exit{Code: 7}}
	for _, rec := range []*runtime.Record{&made, &ended} {
		if err := runtime.PutRecord(b.dir, rec); err != nil {
			t.Fatal(err)
		}
	}
	for _, id := range []string{unstarted.ID, ran.ID} {
		spec := b.engine.Spec(id)
		if spec == nil {
			spec = &runtime.Spec{ID: id, Profile: request("").Profile, Fresh: true, Deadline: unstarted.Deadline}
		}
		control := listenAt(t, b, id)
		st, err := b.engine.Start(t.Context(), spec, control)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = st.Pidfd.Close(), control.Close() // never read
	}
	b.advance(s, time.Minute)
	s = b.open(t)
	for name, want := range map[string]time.Time{"unstarted": b.clock.Now(), "ran": b.clock.Now(), "made": made.CreatedAt} {
		rec, err := s.Get(name)
		if err != nil || rec.State != api.StateRunning || rec.Unstarted || !rec.StartedAt.Equal(want) || rec.ExitBefore != nil {
			t.Errorf("%s: %+v, %v", name, rec, err)
		}
	}
}

// A sandbox that is created stopped needs room when it is started, and counts as one of its
// tenant's from its creation on.
func TestCreatedStoppedTakesNoRoom(t *testing.T) {
	b := newBench(t)
	b.options.Room, b.options.MaxSandboxes = runtime.Room{Memory: 100 << 20}, 3
	s := b.open(t)
	req := request("runs")
	req.Limits.Memory = 80 << 20
	create(t, s, req)
	req.Name, req.Stopped = "waits", true
	create(t, s, req)
	if _, err := s.Start(t.Context(), "waits", runtime.StartRequest{Profile: req.Profile}); !errors.Is(err, runtime.ErrNoRoom) {
		t.Errorf("%v", err)
	}
	stop(t, s, "runs")
	start(t, s, "waits", 0)
	createStopped(t, s, "third")
	req = request("fourth")
	req.Stopped = true
	if _, err := s.Create(t.Context(), req); !errors.Is(err, runtime.ErrTooMany) {
		t.Errorf("%v", err)
	}
}
