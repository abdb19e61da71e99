package functional

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// orphans start, by every trick of the book, processes that leave the exec's process group,
// session and parent.
const orphans = `
setsid sh -c 'echo started >/tmp/marker.1; sleep 600' &
( ( nohup setsid sleep 601 >/dev/null 2>&1 & ) & )
sh -c '( trap "" TERM INT HUP; while true; do sleep 602; done ) &'
sleep 600
`

// An exec's timeout ends everything that it started, and only that.
func TestExecTimeoutKillsEverythingTheExecStarted(t *testing.T) {
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	s.Sh(t, "nohup setsid sleep 777 >/dev/null 2>&1 &") // of another exec: must live on
	before := len(s.Processes(t))

	var result *api.ExecResult
	for timeout := 1.5; ; timeout *= 4 { // where all of it has not started before it comes
		result = s.Exec(t, api.ExecRequest{Argv: []string{"sh", "-c", "echo partial output; " + orphans}, Timeout: timeout})
		if !result.Exit.Timeout || result.Exit.Signal != "SIGKILL" {
			t.Errorf("exit is %+v, want a timeout by SIGKILL", result.Exit)
		}
		if err := shErr(t, s, "test -s /tmp/marker.1"); err == nil {
			break
		} else if timeout > testenv.HungAfter.Seconds() {
			t.Fatalf("control: the orphan had not started: %v", err)
		}
	}
	if !strings.Contains(result.Stdout, "partial output") {
		t.Errorf("output before the timeout is lost: %q", result.Stdout)
	}
	if left := s.Sh(t, "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '"); strings.Contains(left, "sleep 60") {
		t.Errorf("processes of the exec are still there: %q", left)
	} else if !strings.Contains(left, "sleep 777") {
		t.Errorf("another exec's process was killed as well: %q", left)
	}
	eventually(t, func() error { // what is dead may not be reaped yet
		if after := len(s.Processes(t)); after > before {
			return fmt.Errorf("the host saw %d processes before and sees %d after", before, after)
		}
		return nil
	})
}

// A client that goes away takes its program with it.
func TestExecOfAClientThatLeavesIsKilled(t *testing.T) {
	d := shared(t)
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
	testenv.SameForAll(t)
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	s.Sh(t, "nohup setsid sleep 600 >/dev/null 2>&1 &")
	pids := s.Processes(t)
	setTimeout(t, d, s, 1) // not before: it may pass while the test is not running
	now := s.WaitState(t, api.StateStopped)
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
	d := start(t)
	s := d.Create(t, api.CreateSandbox{})
	pids := s.Processes(t)
	setTimeout(t, d, s, 4)
	d.Kill9(t)
	for _, pid := range pids {
		eventually(t, func() error { return gone(pid) })
	}
	d.Launch(t)
	s.WaitState(t, api.StateStopped)
}

func TestIdleTimeoutStopsTheSandbox(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	// An exec that runs keeps it alive, longer than the timeout. That is only given when it runs,
	// however long that takes.
	said, given := "", false
	if err := s.Stream(t.Context(), api.ExecRequest{Argv: []string{"sh", "-c", "echo up; sleep 4; echo alive"}}, func(e api.ExecEvent) {
		if said += e.Text; !given && strings.HasPrefix(said, "up\n") { // perhaps all of it: the reader may be late
			given = true
			if err := d.Call(t.Context(), http.MethodPatch, "/v1/sandboxes/"+s.ID, api.UpdateSandbox{IdleTimeout: 2}, nil); err != nil {
				t.Error(err)
			}
		}
	}); err != nil || said != "up\nalive\n" {
		t.Errorf("an exec of 4 s said %q, %v", said, err)
	}
	now := s.WaitState(t, api.StateStopped)
	if !strings.Contains(now.Reason, "idle") {
		t.Errorf("the reason is %q", now.Reason)
	}
}

// gone is nil once the process does not exist, or is a zombie that its parent has yet to collect.
func gone(pid int) error {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return nil //nolint:nilerr // the test waits until it cannot be read
	}
	if state := statusFields(string(data))["State"]; !strings.HasPrefix(state, "Z") {
		return fmt.Errorf("process %d is in state %s", pid, state)
	}
	return nil
}
