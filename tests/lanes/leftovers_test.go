package main

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"testing"

	"github.com/sandboxd/sandboxd/tests/harness"
)

// The processes of an interrupted run are found and ended, by their arguments or their
// environment; others are left alone.
func TestLeftoversAreEnded(t *testing.T) {
	dir := t.TempDir()
	start := func(env string, args ...string) *exec.Cmd {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "sleep", append([]string{"600"}, args...)...)
		if len(args) > 0 {
			cmd = exec.CommandContext(t.Context(), "sh", append([]string{"-c", "read never; :", "sh"}, args...)...)
			if _, err := cmd.StdinPipe(); err != nil {
				t.Fatal(err)
			}
		}
		cmd.Env = []string{"PATH=/usr/bin:/bin", "X=" + env}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		// While it is about to be another program it has neither arguments nor an environment.
		harness.Eventually(t, func() error {
			for _, file := range []string{"cmdline", "environ"} {
				if data, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", cmd.Process.Pid, file)); err != nil || len(data) == 0 {
					return fmt.Errorf("%s: %q, %w", file, data, err)
				}
			}
			return nil
		})
		return cmd
	}
	byArguments, byEnvironment, other := start("", dir+"/run/api.sock"), start(dir+"/tmp"), start(dir+"-other/tmp")
	if got := leftovers(dir); !slices.Contains(got, byArguments.Process.Pid) || !slices.Contains(got, byEnvironment.Process.Pid) || len(got) != 2 {
		t.Errorf("%v, want %d and %d", got, byArguments.Process.Pid, byEnvironment.Process.Pid)
	}
	endLeftovers(t.Context(), dir)
	for _, ended := range []*exec.Cmd{byArguments, byEnvironment} {
		if err := ended.Wait(); err == nil || ended.ProcessState.ExitCode() != -1 {
			t.Errorf("%v: %v", ended.Args, ended.ProcessState)
		}
	}
	if err := other.Process.Signal(syscall.SIGTERM); err != nil {
		t.Error(err)
	}
	_ = other.Wait() // how it ended is in ProcessState
	if status, ok := other.ProcessState.Sys().(syscall.WaitStatus); !ok || status.Signal() != syscall.SIGTERM {
		t.Errorf("another one was ended: %v", other.ProcessState)
	}
}
