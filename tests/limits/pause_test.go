package limits

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// The kernel's freezer holds a paused sandbox, a commit shares it, and limits can be changed
// meanwhile.
func TestPauseFreezesTheCgroup(t *testing.T) {
	testenv.RequireCgroup(t, "memory", "pids")
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{Limits: api.Limits{Memory: 128 << 20}})
	dir := filepath.Clean(cgroupOf(t, s.PID))
	frozen := func(want string) {
		t.Helper()
		if got := read(t, dir, "cgroup.events"); !strings.Contains(got, "frozen "+want) {
			t.Errorf("cgroup.events: %q, want frozen %s", got, want)
		}
	}
	wait := background(t, s, "mkfifo /tmp/over; echo up >/tmp/up; read x </tmp/over; echo done")
	s.Sh(t, "while ! [ -s /tmp/up ]; do sleep 0.1; done")
	frozen("0")
	s.MustTurn(t, "pause", nil, api.StatePaused)
	frozen("1")
	var diff api.SandboxDiff
	if err := d.Call(t.Context(), "GET", "/v1/sandboxes/"+s.ID+"/diff", nil, &diff); err != nil {
		t.Error(err)
	}
	frozen("1")
	memory := int64(64 << 20)
	mustPatch(t, d, s, api.LimitsUpdate{Memory: &memory})
	if got := number(t, dir, "memory.max", ""); got != memory {
		t.Errorf("memory.max is %d", got)
	}
	frozen("1")
	if got, err := s.TryExec(t.Context(), sh("true")); code(err) != api.CodeConflict {
		t.Errorf("exec in a paused sandbox: %+v, %v", got, err)
	}
	s.MustTurn(t, "resume", nil, api.StateRunning)
	frozen("0")
	s.Sh(t, "echo >/tmp/over")
	if got := wait(); got.Stdout != "done\n" {
		t.Errorf("what ran goes on: %+v", got)
	}
	s.MustTurn(t, "pause", nil, api.StatePaused)
	// A grace that is longer than any wait of a test: frozen processes must not sit it out.
	long := 600.0
	s.MustTurn(t, "stop", api.StopSandbox{Grace: &long}, api.StateStopped)
	now := s.MustTurn(t, "start", nil, api.StateRunning)
	dir = filepath.Clean(cgroupOf(t, now.PID))
	frozen("0")
	if got := number(t, dir, "memory.max", ""); got != memory {
		t.Errorf("memory.max of its next life is %d", got)
	}
}
