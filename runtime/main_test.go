package runtime_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/runtime"
)

// A sandbox ends with its main process, and the record says how; what another life of it left
// behind changes nothing.
func TestMainEnded(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	req := request("one")
	req.Command = []string{"true"}
	one := create(t, s, req)
	exit := func(code int) *api.SandboxExit { return &api.SandboxExit{Exit: api.Exit{Code: code}} }
	ended := func(life, code int) {
		t.Helper()
		if err := s.MainEnded(t.Context(), one.ID, life, exit(code), "its main process exited"); err != nil {
			t.Fatal(err)
		}
	}
	now := func() runtime.Record {
		t.Helper()
		rec, err := s.Get("one")
		if err != nil {
			t.Fatal(err)
		}
		return rec
	}
	first := now().Life
	ended(first-1, 8)
	if rec := now(); rec.State != api.StateRunning || rec.Exit != nil || len(rec.Command) != 1 {
		t.Fatalf("%+v", rec)
	}
	ended(first, 3)
	if rec := now(); rec.State != api.StateStopped || rec.Exit == nil || rec.Exit.Code != 3 || rec.Reason != "its main process exited" {
		t.Fatalf("%+v %+v", rec, rec.Exit)
	}
	ended(first, 4) // said before
	if rec := start(t, s, "one", 0); rec.Exit != nil {
		t.Errorf("%+v", rec)
	}
	ended(first, 5)
	if rec := now(); rec.State != api.StateRunning || rec.Exit != nil {
		t.Fatalf("%+v", rec)
	}
	// One that was stopped, and is told of afterwards: that is on disk too.
	second := now().Life
	stop(t, s, "one")
	ended(second, 6)
	if rec := now(); rec.Reason != "stopped" || rec.Exit == nil || rec.Exit.Code != 6 {
		t.Errorf("%+v %+v", rec, rec.Exit)
	}
	if err := s.Close(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	s = b.open(t)
	if rec := now(); rec.Reason != "stopped" || rec.Exit == nil || rec.Exit.Code != 6 {
		t.Errorf("%+v %+v", rec, rec.Exit)
	}
	ended(second, 7)
	if rec := now(); rec.Exit.Code != 6 {
		t.Errorf("%+v", rec.Exit)
	}
	// A sandbox that ended while no daemon ran, but whose main process's exit is known.
	if rec, err := s.Start(t.Context(), "one", runtime.StartRequest{Profile: request("").Profile, Idle: true}); err != nil || !rec.Idle {
		t.Fatalf("%+v, %v", rec, err)
	}
	if err := s.Close(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	if err := b.engine.Kill(t.Context(), one.ID); err != nil {
		t.Fatal(err)
	}
	s = b.open(t)
	ended(second, 8)
	if rec := now(); rec.State != api.StateLost || rec.Exit != nil {
		t.Errorf("%+v", rec)
	}
	ended(now().Life, 9)
	if rec := now(); rec.State != api.StateStopped || rec.Reason != "its main process exited" || rec.Exit == nil || rec.Exit.Code != 9 {
		t.Errorf("%+v %+v", rec, rec.Exit)
	}
	if err := s.MainEnded(t.Context(), "nosuch", 0, exit(1), ""); err != nil {
		t.Error(err)
	}
}

func TestWaitEnded(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	create(t, s, request("one"))
	if _, err := s.WaitEnded(t.Context(), "nosuch"); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("%v", err)
	}
	short, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if _, err := s.WaitEnded(short, "one"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
	type answer struct {
		rec runtime.Record
		err error
	}
	wait := func() <-chan answer {
		c := make(chan answer, 1)
		go func() {
			rec, err := s.WaitEnded(t.Context(), "one")
			c <- answer{rec, err}
		}()
		return c
	}
	c := wait()
	stop(t, s, "one")
	if a := <-c; a.err != nil || a.rec.State != api.StateStopped || a.rec.Reason != "stopped" {
		t.Errorf("%+v", a)
	}
	if rec, err := s.WaitEnded(t.Context(), "one"); err != nil || rec.State != api.StateStopped {
		t.Errorf("%+v, %v", rec, err)
	}
	start(t, s, "one", 0)
	c = wait()
	if err := s.Delete(t.Context(), "one"); err != nil {
		t.Fatal(err)
	}
	if a := <-c; !errors.Is(a.err, runtime.ErrNotFound) {
		t.Errorf("%+v", a)
	}
}
