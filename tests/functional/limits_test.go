package functional

import (
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// A program that takes more memory than its sandbox has is killed, and the answer says why.
func TestMemoryLimitKillsTheProgram(t *testing.T) {
	testenv.RequireCgroup(t, "memory")
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{Limits: api.Limits{Memory: 64 << 20}})
	if s.Enforced.Memory != "cgroup" {
		t.Errorf("enforced.memory is %q", s.Enforced.Memory)
	}
	if got := s.Exec(t, api.ExecRequest{Argv: []string{"python3", "-c", "x = bytearray(8 << 20)"}}); got.Exit.Code != 0 {
		t.Errorf("control: 8 MiB of 64: %+v", got)
	}
	got := s.Exec(t, api.ExecRequest{Argv: []string{"python3", "-c", "x = bytearray(256 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1"}})
	if !got.Exit.OOM || got.Exit.Signal != "SIGKILL" {
		t.Errorf("256 MiB of 64: %+v", got.Exit)
	}
}

// With the pids controller the kernel counts, whoever the processes belong to.
func TestPidsLimitIsTheCgroups(t *testing.T) {
	testenv.RequireCgroup(t, "pids")
	s := shared(t).Create(t, api.CreateSandbox{Limits: api.Limits{Pids: 32}})
	if s.Enforced.Pids != "cgroup" {
		t.Errorf("enforced.pids is %q", s.Enforced.Pids)
	}
	s.Exec(t, api.ExecRequest{Argv: []string{"sh", "-c", "i=0; while [ $i -lt 60 ]; do sleep 60 & i=$((i+1)); done 2>/dev/null"}, Timeout: 20})
	const initThreads = 16 // are the init's own and on top; those that it does not need, programs may use
	if n := len(s.Processes(t)); n > 32+initThreads {
		t.Errorf("%d processes run under a limit of 32 and the init's %d", n, initThreads)
	}
}
