package functional

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// orphans start, by every trick of the book, processes that leave the exec's process group, session and parent.
const orphans = `
setsid sh -c 'echo started >/tmp/marker.1; sleep 600' &
( ( nohup setsid sleep 601 >/dev/null 2>&1 & ) & )
sh -c '( trap "" TERM INT HUP; while true; do sleep 602; done ) &'
sleep 600
`

// An exec's timeout ends everything that it started, and only that.
func TestExecTimeoutKillsEverythingTheExecStarted(t *testing.T) {
	t.Parallel() // it mostly waits
	d := start(t)
	s := d.Create(t, api.CreateSandbox{})
	s.Sh(t, "nohup setsid sleep 777 >/dev/null 2>&1 &") // of another exec: must live on
	before := len(s.Processes(t))

	began := time.Now()
	result := s.Exec(t, api.ExecRequest{Argv: []string{"sh", "-c", "echo partial output; " + orphans}, Timeout: 1.5})
	if !result.Exit.Timeout || result.Exit.Signal != "SIGKILL" {
		t.Errorf("exit is %+v, want a timeout by SIGKILL", result.Exit)
	}
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("an exec with a timeout of 1.5 s took %s", took)
	}
	if !strings.Contains(result.Stdout, "partial output") {
		t.Errorf("output before the timeout is lost: %q", result.Stdout)
	}
	if got := s.Sh(t, "cat /tmp/marker.1"); got != "started\n" {
		t.Fatalf("control: the orphan had not started: %q", got)
	}
	if left := s.Sh(t, "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '"); strings.Contains(left, "sleep 60") {
		t.Errorf("processes of the exec are still there: %q", left)
	} else if !strings.Contains(left, "sleep 777") {
		t.Errorf("another exec's process was killed as well: %q", left)
	}
	if after := len(s.Processes(t)); after > before {
		t.Errorf("the host saw %d processes before and sees %d after", before, after)
	}
}

// A client that goes away takes what it started with it.
func TestExecOfAClientThatLeavesIsKilled(t *testing.T) {
	d := start(t)
	s := d.Create(t, api.CreateSandbox{})
	ctx, leave := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = s.TryExec(ctx, api.ExecRequest{Argv: []string{"sh", "-c", "touch /tmp/running; " + orphans}}) // cut off on purpose
	}()
	eventually(t, func() error { return shErr(t, s, "test -e /tmp/running") })
	leave()
	<-done
	eventually(t, func() error {
		if left := s.Sh(t, "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '"); strings.Contains(left, "sleep 60") {
			return fmt.Errorf("still running: %q", left)
		}
		return nil
	})
}

func TestDeadlineStopsTheSandbox(t *testing.T) {
	t.Parallel() // it mostly waits
	d := start(t)
	s := d.Create(t, api.CreateSandbox{Timeout: testenv.Patience(3 * time.Second).Seconds()})
	s.Sh(t, "nohup setsid sleep 600 >/dev/null 2>&1 &")
	pids := s.Processes(t)
	now := s.WaitState(t, 20*time.Second, api.StateStopped)
	if !strings.Contains(now.Reason, "deadline") {
		t.Errorf("the reason is %q", now.Reason)
	}
	for _, pid := range pids {
		eventually(t, func() error { return gone(pid) })
	}
	_, err := s.TryExec(t.Context(), api.ExecRequest{Argv: []string{"true"}})
	wantProblem(t, err, api.CodeConflict, s.ID+"|"+s.Name)
	s.Delete(t)
}

// The deadline holds without a daemon too: nothing is orphaned because its keeper died.
func TestDeadlineHoldsWhileNoDaemonRuns(t *testing.T) {
	t.Parallel() // it mostly waits
	d := start(t)
	s := d.Create(t, api.CreateSandbox{Timeout: testenv.Patience(4 * time.Second).Seconds()})
	pids := s.Processes(t)
	d.Kill9(t)
	for _, pid := range pids {
		eventually(t, func() error { return gone(pid) })
	}
	d.Launch(t)
	s.WaitState(t, 10*time.Second, api.StateStopped)
}

func TestIdleTimeoutStopsTheSandbox(t *testing.T) {
	t.Parallel() // it mostly waits
	d := start(t)
	s := d.Create(t, api.CreateSandbox{IdleTimeout: 2})
	// An exec that runs keeps it alive, longer than the timeout.
	if got := s.Sh(t, "sleep 4; echo alive"); got != "alive\n" {
		t.Errorf("during an exec of 4 s: %q", got)
	}
	now := s.WaitState(t, 20*time.Second, api.StateStopped)
	if !strings.Contains(now.Reason, "idle") {
		t.Errorf("the reason is %q", now.Reason)
	}
}

// gone is nil once the process does not exist, or is a zombie that its parent has yet to collect.
func gone(pid int) error {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return nil //nolint:nilerr // that it cannot be read is what we wait for
	}
	if state := statusFields(string(data))["State"]; !strings.HasPrefix(state, "Z") {
		return fmt.Errorf("process %d is in state %s", pid, state)
	}
	return nil
}
