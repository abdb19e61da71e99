package functional

import (
	"fmt"
	"os"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// eventually waits for an event that follows soon.
func eventually(t *testing.T, check func() error) {
	t.Helper()
	harness.Eventually(t, check)
}

// shErr runs a shell command in the sandbox and returns an error unless it exits 0.
func shErr(t *testing.T, s *harness.Sandbox, script string) error {
	t.Helper()
	result, err := s.TryExec(t.Context(), api.ExecRequest{Argv: []string{"sh", "-c", script}})
	if err != nil {
		return err
	}
	if result.Exit.Code != 0 {
		return fmt.Errorf("%s exited %d: %s", script, result.Exit.Code, result.Stderr)
	}
	return nil
}

// kill9 kills a process of the daemon under test. Root's launcher has another uid, and only root
// may.
func kill9(t *testing.T, pid int) {
	t.Helper()
	p, err := os.FindProcess(pid)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Kill(); err != nil {
		t.Fatalf("kill %d: %v", pid, err)
	}
}
