package security

import (
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// Each bomb ends at its deadline with all that it made. Limits of each process, of the user
// namespace or of init refuse it more before that, and daemon and neighbour answer meanwhile.
// Bombs that need a controller of cgroup v2 are for limits.TestBombsAreHeldByTheCgroup.
func TestBombsEndBounded(t *testing.T) {
	testenv.RequireUserNS(t)
	d := harness.Start(t, harness.Options{})
	neighbour := d.Create(t, api.CreateSandbox{})
	for _, b := range harness.Bombs() {
		if b.Needs != "" {
			continue
		}
		t.Run(b.Name, func(t *testing.T) {
			// A machine that is too busy for the bomb to come as far as a refusal gives it more time.
			for deadline := time.Second / 2; !explode(t, d, neighbour, b, deadline); deadline *= 4 {
				if deadline > testenv.HungAfter {
					t.Fatal("the bomb was never refused more")
				}
			}
		})
	}
}

// explode has the bomb go on until its deadline, and reports whether it was refused more, if it is
// to be. Daemon and neighbour are asked meanwhile, and the sandbox afterwards.
func explode(t *testing.T, d *harness.Daemon, neighbour *harness.Sandbox, b harness.Bomb, deadline time.Duration) bool {
	t.Helper()
	s := d.Create(t, api.CreateSandbox{Limits: api.Limits{Pids: 64, Nofile: 256}})
	defer s.Delete(t)
	ended := make(chan error, 1)
	var result *api.ExecResult
	go func() {
		var err error
		result, err = s.TryExec(t.Context(), b.Request(deadline.Seconds()))
		ended <- err
	}()
	begun := b.Await(t, s, ended)
	for range 3 {
		if got := neighbour.Sh(t, "echo fine"); got != "fine\n" {
			t.Errorf("the neighbour says %q", got)
		}
		if err := d.Call(t.Context(), http.MethodGet, "/healthz", nil, nil); err != nil {
			t.Errorf("the daemon: %v", err)
		}
	}
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	if !result.Exit.Timeout {
		t.Errorf("it ended with %+v: %s", result.Exit, result.Stderr)
	}
	held := strings.Contains(result.Stdout, "limit")
	if held && b.Unheld {
		t.Errorf("it was refused more; %.200q %.200q", result.Stdout, result.Stderr)
	}
	// Nothing of it is left, and its own sandbox goes on.
	harness.Eventually(t, func() error {
		if n := len(s.Processes(t)); n != 1 {
			return errors.New("processes are left beside init")
		}
		return nil
	})
	if got := s.Sh(t, "echo fine"); got != "fine\n" {
		t.Errorf("afterwards its sandbox says %q", got)
	}
	t.Logf("%s: begun %v, refused more %v; %.200q", deadline, begun, held, result.Stderr)
	return begun && held != b.Unheld
}
