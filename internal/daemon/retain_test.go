package daemon

import (
	"context"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/agents"
	"github.com/sandboxd/sandboxd/runtime"
)

func TestWhatIsOverdue(t *testing.T) {
	now := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	long := now.Add(-1000 * time.Hour) // that the daemon has run
	ended := func(id string, ago time.Duration, change ...func(*runtime.Record)) runtime.Record {
		rec := runtime.Record{Sandbox: api.Sandbox{ID: id, State: api.StateStopped, EndedAt: now.Add(-ago)}}
		for _, f := range change {
			f(&rec)
		}
		return rec
	}
	state := func(s api.SandboxState) func(*runtime.Record) { return func(r *runtime.Record) { r.State = s } }
	label := func(v string) func(*runtime.Record) {
		return func(r *runtime.Record) { r.Labels = map[string]string{api.LabelKeep: v} }
	}
	all := []runtime.Record{
		ended("runs", 99*time.Hour, state(api.StateRunning)),
		ended("paused", 99*time.Hour, state(api.StatePaused)),
		ended("creating", 99*time.Hour, state(api.StateCreating)),
		ended("request", 99*time.Hour, func(r *runtime.Record) { r.Ephemeral = true }),
		ended("kept", 99*time.Hour, label("")),
		ended("not kept", 98*time.Hour, label("false")),
		ended("minutes", 10*time.Minute),
		ended("lost", 50*time.Hour, state(api.StateLost)),
		ended("hours", 2*time.Hour),
	}
	for _, test := range []struct {
		name string
		r    retention
		up   time.Time
		want []string
	}{
		{"nothing is asked for", retention{}, long, nil},
		{"age", retention{age: 24 * time.Hour}, long, []string{"not kept", "lost"}},
		{"an age below the grace", retention{age: 5 * time.Minute}, long, []string{"not kept", "lost", "hours", "minutes"}},
		{"number", retention{limit: 3}, long, []string{"not kept"}},
		{"a number does not shorten the grace", retention{limit: 1}, long, []string{"not kept", "lost", "hours"}},
		{"both", retention{age: 60 * time.Hour, limit: 2}, long, []string{"not kept", "lost"}},
		{"nobody could read it before", retention{age: 24 * time.Hour, limit: 1}, now.Add(-59 * time.Minute), nil},
		{"now everybody could", retention{age: 24 * time.Hour}, now.Add(-time.Hour), []string{"not kept", "lost"}},
		{"a short age is a short grace", retention{age: 5 * time.Minute}, now.Add(-5 * time.Minute), []string{"not kept", "lost", "hours", "minutes"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var got []string
			for _, rec := range test.r.overdue(now, test.up, all) {
				got = append(got, rec.ID)
			}
			if !slices.Equal(got, test.want) {
				t.Errorf("removed %q, want %q", got, test.want)
			}
		})
	}
}

func TestEndedSandboxesArePruned(t *testing.T) {
	b := newBench(t, realInit(t))
	r := b.start()
	make := func(name string, labels map[string]string, stop bool) api.Sandbox {
		sb := r.create(api.CreateSandbox{Name: name, Labels: labels})
		if stop {
			sb = decode[api.Sandbox](t, r.do("POST", "/v1/sandboxes/"+sb.ID+"/stop", map[string]int{"grace": 0}), http.StatusOK)
			if sb.EndedAt.IsZero() {
				t.Errorf("%s is stopped, and says no time: %+v", name, sb)
			}
		} else if !sb.EndedAt.IsZero() {
			t.Errorf("%s runs, and has ended: %+v", name, sb)
		}
		return sb
	}
	prune := func(req any, recent int, want ...string) {
		t.Helper()
		out := decode[api.SandboxesRemoved](t, r.do("POST", "/v1/sandboxes/prune", req), http.StatusOK)
		var got []string
		for _, ref := range out.Removed {
			got = append(got, ref.Name)
		}
		if slices.Sort(got); !slices.Equal(got, want) || out.Recent != recent {
			t.Errorf("pruned %q, %d recent; want %q, %d", got, out.Recent, want, recent)
		}
	}
	make("runs", nil, false)
	make("ended", nil, true)
	make("labelled", map[string]string{"job": "1"}, true)
	make("kept", map[string]string{api.LabelKeep: "true"}, true)
	again := make("again", nil, true)

	prune(nil, 3)
	none := 0.0
	// One that is started again has not ended.
	if sb := decode[api.Sandbox](t, r.do("POST", "/v1/sandboxes/again/start", nil), http.StatusOK); !sb.EndedAt.IsZero() {
		t.Errorf("it runs again, and has ended: %+v", sb)
	}
	if removed, err := r.d.service.removeEnded(t.Context(), []runtime.Record{{Sandbox: again}}, 0); len(removed) > 0 || err != nil {
		t.Errorf("a sandbox that was started after it was chosen: removed %v, %v", removed, err)
	}
	prune(api.PruneSandboxes{OlderThan: &none, Labels: map[string]string{"job": "1"}}, 0, "labelled")
	prune(api.PruneSandboxes{OlderThan: &none}, 0, "ended")
	if list := decode[api.SandboxList](t, r.do("GET", "/v1/sandboxes", nil), http.StatusOK); len(list.Sandboxes) != 3 {
		t.Errorf("left: %+v", list)
	}
	if ids := b.engine.IDs(); len(ids) != 3 {
		t.Errorf("the engine has %v", ids)
	}
	problem(t, r.do("POST", "/v1/sandboxes/prune", `{"older_than":-1}`), api.CodeInvalid)
	problem(t, r.do("POST", "/v1/sandboxes/prune", `{"all":true}`), api.CodeInvalid)

	problem(t, r.do("POST", "/v1/snapshots/prune", nil), api.CodeInvalid)
	out := decode[api.SnapshotsRemoved](t, r.do("POST", "/v1/snapshots/prune", `{"labels":{"k":"v"}}`), http.StatusOK)
	if len(out.Removed) != 2 || out.Removed[1] != "v" {
		t.Errorf("snapshots: %+v", out)
	}
}

// A round of the daemon's own removes what is overdue, with its log, and snapshots by their age.
func TestEndedSandboxesGoWithTime(t *testing.T) {
	b := newBench(t, realInit(t))
	r := b.start()
	sb := r.create(api.CreateSandbox{Name: "old", Command: []string{"true"}})
	decode[api.Sandbox](t, r.do("GET", "/v1/sandboxes/old/wait", nil), http.StatusOK)
	s := r.d.service
	keep := retention{age: 30 * 24 * time.Hour, snapshot: 24 * time.Hour}
	up := time.Now()
	// Snapshots too are kept until the daemon has run for an hour, however long it was off before.
	s.removeOverdue(t.Context(), keep, up.Add(59*time.Minute), up)
	if strings.Contains(b.log.String(), "snapshots were removed") {
		t.Error("snapshots were removed before anybody could read them")
	}
	s.removeOverdue(t.Context(), keep, up.Add(29*24*time.Hour), up)
	if _, err := s.GetSandbox("old"); err != nil {
		t.Errorf("after 29 days: %v", err)
	}
	// What is read is not removed: a fork that is under way may need it.
	if _, _, err := s.supervisor.Read("old"); err != nil {
		t.Fatal(err)
	}
	s.removeOverdue(t.Context(), keep, up.Add(31*24*time.Hour), up)
	if _, err := s.GetSandbox("old"); err != nil {
		t.Errorf("while somebody reads it: %v", err)
	}
	keep.age = time.Nanosecond // which is a grace of as much
	s.removeOverdue(t.Context(), keep, up.Add(31*24*time.Hour), up)
	problem(t, r.do("GET", "/v1/sandboxes/old", nil), api.CodeNotFound)
	if ids := b.engine.IDs(); len(ids) != 0 {
		t.Errorf("left: %v", ids)
	}
	if !strings.Contains(b.log.String(), `msg="a sandbox that has ended was removed" id=`+sb.ID) || !strings.Contains(b.log.String(), "snapshots were removed for their age") {
		t.Error("the log does not tell")
	}
}

// All means all, whatever the clock said when it ended.
func TestPruneOfAllLooksAtNoClock(t *testing.T) {
	now, zero, week := time.Now(), 0.0, 604800.0
	for _, test := range []struct {
		olderThan *float64
		at        time.Time
		want      bool
	}{
		{&zero, now, true},
		{&zero, now.Add(87600 * time.Hour), true},
		{nil, now.Add(time.Hour), true},
		{&week, now.Add(-6 * 24 * time.Hour), false},
		{&week, now.Add(-8 * 24 * time.Hour), true},
	} {
		before, err := pruneBefore(test.olderThan, 0, nil)
		if err != nil || test.at.Before(before) != test.want {
			t.Errorf("older than %v: %s is before %s: %v", test.olderThan, test.at, before, err)
		}
	}
}

// A host that has slept for a month, or whose clock was wrong, is as one whose daemon was off.
func TestClockThatJumps(t *testing.T) {
	up := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	now := up.Add(1000 * time.Hour)
	for _, test := range []struct {
		told, passed time.Duration
		want         time.Time
	}{
		{time.Minute, time.Minute, up},
		{time.Minute + 3*time.Second, time.Minute, up}, // as it is set right a little
		{10 * time.Minute, 10 * time.Minute, up},       // a round that took long
		{30 * 24 * time.Hour, time.Minute, now},
		{-30 * 24 * time.Hour, time.Minute, up}, // what ended is younger then
	} {
		if got := upSince(up, now, test.told, test.passed); !got.Equal(test.want) {
			t.Errorf("%s by the clock in %s: %s", test.told, test.passed, got)
		}
	}
}

// A daemon has the agent's runs removed that are too old, without being asked, and says so; and when it is too late for the others, ends.
func TestOldAgentRunsGo(t *testing.T) {
	b := newBench(t, realInit(t))
	dir := t.TempDir()
	const old, stuck = "20260116_143000", "20260116_143001"
	for _, id := range []string{old, stuck} {
		if err := errors.Join(os.Mkdir(filepath.Join(dir, id), 0o700), os.WriteFile(filepath.Join(dir, id, agents.RecordName), []byte("{}\n"), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	// Two workers, each of which is a pid. That of the second run answers nothing until it is told to end.
	asked, told := make(chan int, 2), make(chan int, 1)
	workers := [2]*os.File{}
	n := 0
	b.options.Agents = agents.New(agents.Options{
		Dir: dir, Max: 1,
		Start: func(_ context.Context, _, stdout *os.File) (int, error) {
			fd, err := unix.FcntlInt(stdout.Fd(), unix.F_DUPFD_CLOEXEC, 0)
			if err != nil || n == len(workers) {
				return 0, errors.Join(errors.New("no more"), err)
			}
			workers[n] = os.NewFile(uintptr(fd), "worker")
			n++
			asked <- n - 1
			return n - 1, nil
		},
		Signal: func(_ context.Context, pid int, _ bool) error {
			if pid == 1 { // the first may not have been seen to end
				select {
				case told <- pid:
				default: // by the removal and by the host, which both end
				}
			}
			return nil
		},
	})
	b.options.AgentAge = time.Millisecond
	b.prepare = func(d *Daemon) { d.look = 10 * time.Millisecond }
	r := b.start()
	await := func(c chan int, want int, what string) {
		t.Helper()
		select {
		case pid := <-c:
			if pid != want {
				t.Errorf("%s is %d, want %d", what, pid, want)
			}
		case <-time.After(patience):
			t.Fatalf("no worker %s", what)
		}
	}
	await(asked, 0, "asked")
	_, err := workers[0].WriteString(`{"run":{"id":"` + old + `"}}` + "\n")
	if err := errors.Join(err, os.RemoveAll(filepath.Join(dir, old)), workers[0].Close()); err != nil {
		t.Fatal(err)
	}
	await(asked, 1, "asked")
	r.d.Shutdown(api.Shutdown{})
	await(told, 1, "told to end")
	if err := workers[1].Close(); err != nil {
		t.Error(err)
	}
	r.wait()
	if log := b.log.String(); !strings.Contains(log, "was removed\" id="+old) || strings.Contains(log, "could not be removed") {
		t.Errorf("the log says:\n%s", log)
	}
}
