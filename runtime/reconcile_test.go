package runtime_test

import (
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/runtime"
)

// The second round that finds a mismatch repairs it; everything else is left alone.
func TestReconcile(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	fits := create(t, s, request("fits"))
	stopped := create(t, s, request("stopped"))
	stop(t, s, "stopped")
	// Two without a record, one of which has ended, and one that runs although it was stopped.
	for _, id := range []string{"stranger1", "stranger2"} {
		control := listenAt(t, b, id)
		st, err := b.engine.Create(t.Context(), &runtime.Spec{ID: id, Profile: request("").Profile}, control)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = st.Pidfd.Close(), control.Close() // never read
	}
	if err := b.engine.Kill(t.Context(), "stranger2"); err != nil {
		t.Fatal(err)
	}
	control := listenAt(t, b, stopped.ID)
	st, err := b.engine.Start(t.Context(), b.engine.Spec(stopped.ID), control)
	if err != nil {
		t.Fatal(err)
	}
	_ = control.Close() // the engine has its own
	defer st.Pidfd.Close()

	if err := runtime.Reconcile(t.Context(), s, 1); err != nil {
		t.Fatal(err)
	}
	if got := b.engine.IDs(); len(got) != 4 {
		t.Errorf("after one round there are %v", got)
	}
	if err := runtime.Reconcile(t.Context(), s, 2); err != nil {
		t.Fatal(err)
	}
	got := b.engine.IDs()
	if slices.Sort(got); len(got) != 2 || slices.Contains(got, "stranger1") || slices.Contains(got, "stranger2") {
		t.Errorf("after two rounds there are %v", got)
	}
	list, err := b.engine.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, st := range list {
		if st.ID != fits.ID {
			t.Errorf("%s runs", st.ID)
		}
		_ = st.Pidfd.Close() // never read
	}
	if rec, err := s.Get("fits"); err != nil || rec.State != api.StateRunning {
		t.Errorf("what fits: %+v, %v", rec, err)
	}
	start(t, s, "stopped", 0)
	if err := runtime.Reconcile(t.Context(), s, 3); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"fits", "stopped"} {
		if rec, err := s.Get(name); err != nil || rec.State != api.StateRunning {
			t.Errorf("what fits: %+v, %v", rec, err)
		}
	}
}

// A sandbox that is recorded and does not exist is recorded as lost.
func TestReconcileSaysWhatIsMissing(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	one := create(t, s, request("one"))
	b.engine.Forget(one.ID)
	lease, err := s.Begin("one")
	if err != nil {
		t.Fatal(err)
	}
	defer lease.End()
	if err := runtime.Reconcile(t.Context(), s, 2); err != nil {
		t.Fatal(err)
	}
	if rec, err := s.Get("one"); err != nil || rec.State != api.StateLost || rec.Reason == "" {
		t.Errorf("what is missing: %+v, %v", rec, err)
	}
	select {
	case <-lease.Gone:
	default:
		t.Error("whoever uses it is not told")
	}
	if err := s.Delete(t.Context(), "one"); err != nil {
		t.Error(err)
	}
}

// Creations, starts and deletions under way are no mismatches.
func TestReconcileBesideEverything(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	done := make(chan struct{})
	var rounds, work sync.WaitGroup
	rounds.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
				if err := runtime.Reconcile(t.Context(), s, 3); err != nil {
					t.Error(err)
				}
			}
		}
	})
	for i := range 4 {
		work.Go(func() {
			for range 10 {
				rec, err := s.Create(t.Context(), request(""))
				if err != nil {
					t.Error(err)
					return
				}
				if i%2 == 0 {
					if rec, err := s.Stop(t.Context(), rec.ID, time.Minute); err != nil || rec.Reason != "stopped" {
						t.Errorf("stop: %+v, %v", rec, err)
					}
					// A round may just be looking at it.
					if _, err := s.Start(t.Context(), rec.ID, runtime.StartRequest{}); err != nil && !errors.Is(err, runtime.ErrState) {
						t.Error(err)
					}
				}
				if err := s.Delete(t.Context(), rec.ID); err != nil && !errors.Is(err, runtime.ErrState) {
					t.Error(err)
				}
			}
		})
	}
	work.Wait()
	close(done)
	rounds.Wait()
}
