package service_test

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
	"github.com/sandboxd/sandboxd/internal/daemon/daemontest"
	"github.com/sandboxd/sandboxd/internal/service"
	"github.com/sandboxd/sandboxd/internal/service/servicetest"
	"github.com/sandboxd/sandboxd/runtime"
)

func TestEndedSandboxesArePruned(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	r := b.Start()
	make := func(name string, labels map[string]string, stop bool) api.Sandbox {
		sb := r.Create(api.CreateSandbox{Name: name, Labels: labels})
		if stop {
			sb = daemontest.Decode[api.Sandbox](t, r.Do("POST", "/v1/sandboxes/"+sb.ID+"/stop", map[string]int{"grace": 0}), http.StatusOK)
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
		out := daemontest.Decode[api.SandboxesRemoved](t, r.Do("POST", "/v1/sandboxes/prune", req), http.StatusOK)
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
	if sb := daemontest.Decode[api.Sandbox](t, r.Do("POST", "/v1/sandboxes/again/start", nil), http.StatusOK); !sb.EndedAt.IsZero() {
		t.Errorf("it runs again, and has ended: %+v", sb)
	}
	if removed, err := r.D.Service().RemoveEnded(t.Context(), []runtime.Record{{Sandbox: again}}, 0); removed > 0 || err != nil {
		t.Errorf("a sandbox that was started after it was chosen: removed %v, %v", removed, err)
	}
	prune(api.PruneSandboxes{OlderThan: &none, Labels: map[string]string{"job": "1"}}, 0, "labelled")
	prune(api.PruneSandboxes{OlderThan: &none}, 0, "ended")
	if list := daemontest.Decode[api.SandboxList](t, r.Do("GET", "/v1/sandboxes", nil), http.StatusOK); len(list.Sandboxes) != 3 {
		t.Errorf("left: %+v", list)
	}
	if ids := b.Engine.IDs(); len(ids) != 3 {
		t.Errorf("the engine has %v", ids)
	}
	daemontest.Problem(t, r.Do("POST", "/v1/sandboxes/prune", `{"older_than":-1}`), api.CodeInvalid)
	daemontest.Problem(t, r.Do("POST", "/v1/sandboxes/prune", `{"all":true}`), api.CodeInvalid)

	daemontest.Problem(t, r.Do("POST", "/v1/snapshots/prune", nil), api.CodeInvalid)
	out := daemontest.Decode[api.SnapshotsRemoved](t, r.Do("POST", "/v1/snapshots/prune", `{"labels":{"k":"v"}}`), http.StatusOK)
	if len(out.Removed) != 2 || out.Removed[1] != "v" {
		t.Errorf("snapshots: %+v", out)
	}
}

// A round of the daemon's own removes expired sandboxes, with their logs, and snapshots by their
// age.
func TestEndedSandboxesGoWithTime(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	r := b.Start()
	sb := r.Create(api.CreateSandbox{Name: "old", Command: []string{"true"}})
	daemontest.Decode[api.Sandbox](t, r.Do("GET", "/v1/sandboxes/old/wait", nil), http.StatusOK)
	s := r.D.Service()
	keep := service.NewRetention(30*24*time.Hour, 24*time.Hour)
	up := time.Now()
	// Snapshots too are kept until the daemon has run for an hour, however long it was off before.
	s.RemoveOverdue(t.Context(), keep, up.Add(59*time.Minute), up)
	if strings.Contains(b.Log.String(), "snapshots were removed") {
		t.Error("snapshots were removed before anybody could read them")
	}
	s.RemoveOverdue(t.Context(), keep, up.Add(29*24*time.Hour), up)
	if _, err := s.Own().GetSandbox("old"); err != nil {
		t.Errorf("after 29 days: %v", err)
	}
	// A sandbox being read is not removed: a fork under way may need it.
	if _, _, err := s.Supervisor().Read("old"); err != nil {
		t.Fatal(err)
	}
	s.RemoveOverdue(t.Context(), keep, up.Add(31*24*time.Hour), up)
	if _, err := s.Own().GetSandbox("old"); err != nil {
		t.Errorf("while somebody reads it: %v", err)
	}
	keep = service.NewRetention(time.Nanosecond, 24*time.Hour) // which is a grace of as much
	s.RemoveOverdue(t.Context(), keep, up.Add(31*24*time.Hour), up)
	daemontest.Problem(t, r.Do("GET", "/v1/sandboxes/old", nil), api.CodeNotFound)
	if ids := b.Engine.IDs(); len(ids) != 0 {
		t.Errorf("left: %v", ids)
	}
	if !strings.Contains(b.Log.String(), `msg="a sandbox that has ended was removed" id=`+sb.ID) || !strings.Contains(b.Log.String(), "snapshots were removed for their age") {
		t.Error("the log does not tell")
	}
}

// A daemon has the agent's runs removed that are too old, without being asked, and says so; and
// when it is too late for the others, ends.
func TestOldAgentRunsGo(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	dir := t.TempDir()
	const old, stuck = "20260116_143000", "20260116_143001"
	for _, id := range []string{old, stuck} {
		if err := errors.Join(os.Mkdir(filepath.Join(dir, id), 0o700), os.WriteFile(filepath.Join(dir, id, agents.RecordName), []byte("{}\n"), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	// Two workers, each of which is a pid. That of the second run answers nothing until it is told to
	// end.
	asked, told := make(chan int, 2), make(chan int, 1)
	workers := [2]*os.File{}
	n := 0
	b.Options.Agents = agents.New(agents.Options{
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
	b.Options.AgentAge = time.Millisecond
	b.Options.RetainEvery = 10 * time.Millisecond
	r := b.Start()
	await := func(c chan int, want int, what string) {
		t.Helper()
		select {
		case pid := <-c:
			if pid != want {
				t.Errorf("%s is %d, want %d", what, pid, want)
			}
		case <-time.After(servicetest.Patience):
			t.Fatalf("no worker %s", what)
		}
	}
	await(asked, 0, "asked")
	_, err := workers[0].WriteString(`{"run":{"id":"` + old + `"}}` + "\n")
	if err := errors.Join(err, os.RemoveAll(filepath.Join(dir, old)), workers[0].Close()); err != nil {
		t.Fatal(err)
	}
	await(asked, 1, "asked")
	r.D.Shutdown(api.Shutdown{})
	await(told, 1, "told to end")
	if err := workers[1].Close(); err != nil {
		t.Error(err)
	}
	r.Wait()
	if log := b.Log.String(); !strings.Contains(log, "was removed\" id="+old) || strings.Contains(log, "could not be removed") {
		t.Errorf("the log says:\n%s", log)
	}
}
