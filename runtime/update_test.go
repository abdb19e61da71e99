package runtime_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/runtime"
)

// The engine, the API and the next daemon have the values of an update.
func TestUpdateIsKept(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	req := request("one")
	req.Limits = api.Limits{Memory: 64 << 20}
	req.Labels = map[string]string{"a": "1", "b": "2"}
	rec := create(t, s, req)
	deadline := time.Now().Add(3 * time.Hour).UTC()
	got, err := s.Update(t.Context(), "one", func(rec *runtime.Record) (api.Limits, error) {
		rec.Limits.Pids, rec.Deadline, rec.IdleTimeout = 7, deadline, 99
		delete(rec.Labels, "a")
		rec.Labels["c"] = "3"
		rec.Image = "another" // not one of the four
		return api.Limits{Pids: 7}, nil
	})
	want := map[string]string{"b": "2", "c": "3"}
	check := func(when string, got runtime.Record, err error) {
		t.Helper()
		if err != nil || got.Limits != (api.Limits{Memory: 64 << 20, Pids: 7}) || !got.Deadline.Equal(deadline) || got.IdleTimeout != 99 ||
			!maps.Equal(got.Labels, want) || got.Image != rec.Image || got.State != api.StateRunning {
			t.Errorf("%s: %+v, %v", when, got, err)
		}
	}
	check("update", got, err)
	if spec := b.engine.Spec(rec.ID); spec.Limits.Pids != 7 || !spec.Deadline.Equal(deadline) {
		t.Errorf("the engine holds %+v until %s", spec.Limits, spec.Deadline)
	}
	if err := s.Close(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	s = b.open(t)
	got, err = s.Get("one")
	check("after a restart", got, err)
}

func TestRefusedUpdateChangesNothing(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	rec := create(t, s, request("one"))
	mine := errors.New("mine")
	b.engine.UpdateError = func(*runtime.Change) error { return runtime.ErrInUse }
	for name, edit := range map[string]func(*runtime.Record) (api.Limits, error){
		"the engine": func(rec *runtime.Record) (api.Limits, error) {
			rec.Limits.Pids, rec.Labels["x"], rec.Deadline = 7, "y", time.Now().Add(time.Minute)
			return api.Limits{Pids: 7}, nil
		},
		"the caller": func(rec *runtime.Record) (api.Limits, error) {
			rec.Limits.Pids, rec.Labels["x"] = 7, "y"
			return api.Limits{}, mine
		},
	} {
		if _, err := s.Update(t.Context(), "one", edit); !errors.Is(err, mine) && !errors.Is(err, runtime.ErrInUse) {
			t.Errorf("refused by %s: %v", name, err)
		}
		now, err := s.Get("one")
		if err != nil || now.Limits != rec.Limits || len(now.Labels) != len(rec.Labels) || !now.Deadline.Equal(rec.Deadline) {
			t.Errorf("refused by %s: %+v, %v", name, now, err)
		}
	}
	// Without something for the engine, it is not asked.
	if _, err := s.Update(t.Context(), "one", func(rec *runtime.Record) (api.Limits, error) {
		rec.Labels["x"] = "y"
		return api.Limits{}, nil
	}); err != nil {
		t.Errorf("labels alone: %v", err)
	}
	// An explicit limit goes to the engine although its value is not new: the old one may be a default
	// that is not enforced.
	if _, err := s.Update(t.Context(), "one", func(*runtime.Record) (api.Limits, error) { return api.Limits{Pids: 1}, nil }); !errors.Is(err, runtime.ErrInUse) {
		t.Errorf("an explicit limit: %v", err)
	}
}

func TestUpdateNeedsARunningSandbox(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	rec := create(t, s, request("one"))
	nothing := func(*runtime.Record) (api.Limits, error) { return api.Limits{}, nil }
	if _, err := s.Update(t.Context(), "nobody", nothing); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("unknown: %v", err)
	}
	if err := s.Kill(t.Context(), rec.ID, "over"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Update(t.Context(), "one", nothing); !errors.Is(err, runtime.ErrState) {
		t.Errorf("stopped: %v", err)
	}
	if _, err := s.Stats(t.Context(), "one"); !errors.Is(err, runtime.ErrState) {
		t.Errorf("stats of a stopped one: %v", err)
	}
}

// A deadline that is brought forward ends the sandbox then, and one that is put off does not.
func TestUpdatedDeadlineCounts(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	soon := func(rec *runtime.Record) (api.Limits, error) {
		rec.Deadline = b.clock.Now().Add(time.Minute)
		return api.Limits{}, nil
	}
	create(t, s, request("brought-forward"))
	lease, err := s.Begin("brought-forward")
	if err != nil {
		t.Fatal(err)
	}
	defer lease.End()
	if _, err := s.Update(t.Context(), "brought-forward", soon); err != nil {
		t.Fatal(err)
	}
	b.advance(s, time.Minute)
	select {
	case <-lease.Gone:
	case <-time.After(patience):
		t.Fatal("it still runs")
	}
	if rec, err := s.Get("brought-forward"); err != nil || rec.Reason != "deadline reached" {
		t.Errorf("%+v, %v", rec, err)
	}
}

// A lost or late answer leaves the outcome open: the supervisor asks the engine, and keeps its
// answer.
func TestLostAnswerIsAskedFor(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	swap := int64(5)
	was := create(t, s, request("one"))
	deadline := time.Now().Add(3 * time.Hour).UTC()
	lost := fmt.Errorf("no answer: %w", runtime.ErrUnavailable)
	edit := func(pids int64) func(rec *runtime.Record) (api.Limits, error) {
		return func(rec *runtime.Record) (api.Limits, error) {
			own := swap
			rec.Limits.Pids, rec.Limits.Swap, rec.Deadline, rec.Labels = pids, &own, deadline, map[string]string{"new": "label"}
			return api.Limits{Pids: pids}, nil
		}
	}
	once := func(err error) func(change *runtime.Change) error {
		return func(change *runtime.Change) error {
			if change.Limits == nil {
				return nil // the question
			}
			return err
		}
	}
	// It never arrived.
	b.engine.UpdateError = once(lost)
	if _, err := s.Update(t.Context(), "one", edit(7)); !errors.Is(err, runtime.ErrUnavailable) {
		t.Errorf("an update that did not arrive: %v", err)
	}
	if rec, err := s.Get("one"); err != nil || rec.Limits != was.Limits || !rec.Deadline.Equal(was.Deadline) || len(rec.Labels) != len(was.Labels) {
		t.Errorf("an update that did not arrive makes %+v, %v", rec, err)
	}
	// It arrived, and the answer was lost.
	b.engine.UpdateError, b.engine.LoseAnswer = nil, once(context.DeadlineExceeded)
	check := func(when string, rec runtime.Record, err error) {
		t.Helper()
		if err != nil || rec.Limits.Pids != 8 || !rec.Deadline.Equal(deadline) || rec.Labels["new"] != "label" {
			t.Errorf("%s: %+v, %v", when, rec, err)
		}
	}
	rec, err := s.Update(t.Context(), "one", edit(8))
	check("an update that was made", rec, err)
	// If that fails as well, the error says so, and the next update starts from the last known values.
	b.engine.LoseAnswer = func(*runtime.Change) error { return lost }
	if _, err := s.Update(t.Context(), "one", edit(9)); !errors.Is(err, runtime.ErrUnavailable) || !strings.Contains(err.Error(), "not known") {
		t.Errorf("an engine that cannot be asked: %v", err)
	}
	b.engine.LoseAnswer = nil
	rec, err = s.Update(t.Context(), "one", edit(8))
	check("the update after it", rec, err)
	if err := s.Close(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	rec, err = b.open(t).Get("one")
	check("after a restart", rec, err)
}

// brief is a request for a sandbox with this timeout.
func brief(name string, timeout time.Duration) runtime.Request {
	req := request(name)
	req.Timeout = timeout
	return req
}

// A deadline that is put off does not strike at the old time.
func TestDeadlinePutOffDoesNotStrike(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	rec := create(t, s, brief("one", time.Minute))
	put := func(deadline time.Time) {
		t.Helper()
		if _, err := s.Update(t.Context(), "one", func(rec *runtime.Record) (api.Limits, error) {
			rec.Deadline = deadline
			return api.Limits{}, nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	put(rec.Deadline.Add(time.Hour))
	b.advance(s, time.Minute)
	// The end of another one at a later time: the watcher had time to act on the old deadline.
	other := create(t, s, brief("other", time.Second))
	b.advance(s, time.Second)
	waitEnded(t, s, other.ID)
	if now, err := s.Get("one"); err != nil || now.State != api.StateRunning {
		t.Errorf("after its old deadline: %+v, %v", now, err)
	}
	b.advance(s, time.Hour)
	waitEnded(t, s, "one")
}

// An update that a crash cut off between the engine and the record: what holds counts.
func TestRestartBelievesTheEngine(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	rec := create(t, s, request("one"))
	if err := s.Close(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(5 * time.Hour)
	if _, err := b.engine.Update(t.Context(), rec.ID, &runtime.Change{Limits: &api.Limits{Pids: 5}, Deadline: deadline}); err != nil {
		t.Fatal(err)
	}
	got, err := b.open(t).Get("one")
	if err != nil || got.Limits.Pids != 5 || !got.Deadline.Equal(deadline) {
		t.Errorf("%+v, %v", got, err)
	}
}

// Updates follow one another and none is lost; with a deletion among them nothing is left.
func TestConcurrentUpdates(t *testing.T) {
	b := newBench(t)
	s := b.open(t)
	create(t, s, request("one"))
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			if _, err := s.Update(t.Context(), "one", func(rec *runtime.Record) (api.Limits, error) {
				rec.Labels[fmt.Sprint("k", i)] = "v"
				rec.Limits.Pids += 10
				return api.Limits{}, nil
			}); err != nil {
				t.Errorf("update %d: %v", i, err)
			}
		})
	}
	wg.Wait()
	if rec, err := s.Get("one"); err != nil || len(rec.Labels) < 8 || rec.Limits.Pids < 80 {
		t.Errorf("%+v, %v", rec, err)
	}
	for i := range 9 {
		wg.Go(func() {
			if i == 4 {
				if err := s.Delete(t.Context(), "one"); err != nil {
					t.Errorf("delete: %v", err)
				}
				return
			}
			_, err := s.Update(t.Context(), "one", func(rec *runtime.Record) (api.Limits, error) {
				rec.Limits.Pids++
				return api.Limits{}, nil
			})
			if err != nil && !errors.Is(err, runtime.ErrNotFound) && !errors.Is(err, runtime.ErrState) {
				t.Errorf("update beside a deletion: %v", err)
			}
		})
	}
	wg.Wait()
	if err := s.Close(context.WithoutCancel(t.Context()), true); err != nil {
		t.Fatal(err)
	}
	if list := b.open(t).List(runtime.Filter{}); len(list) > 0 {
		t.Errorf("the next daemon knows %+v", list)
	}
}
