package limits

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// However many sandboxes come and go, the cgroups are as they were: TestMain compares when the
// daemon has shut down, and here it is compared while it runs.
func TestDeletedSandboxesLeaveNoCgroup(t *testing.T) {
	const workers = 4
	n := testenv.Rounds(8, 300)
	d := shared(t)
	d.Create(t, api.CreateSandbox{}) // stays until the end
	base := vacate(t)
	before, leaks := tree(t, base), d.Snapshot(t)
	began := time.Now()
	var wg sync.WaitGroup
	for worker := range workers {
		wg.Go(func() {
			for i := range n / workers {
				s, err := d.TryCreate(t.Context(), api.CreateSandbox{Limits: api.Limits{Memory: 64 * mib, Pids: 50}})
				if err != nil {
					t.Errorf("create: %v", err)
					return
				}
				if (worker+i)%2 == 0 {
					if _, err := s.TryExec(t.Context(), sh("nohup setsid sleep 600 >/dev/null 2>&1 &")); err != nil {
						t.Errorf("exec: %v", err)
					}
				}
				if err := s.TryDelete(t.Context()); err != nil {
					t.Errorf("delete: %v", err)
				}
			}
		})
	}
	wg.Wait()
	t.Logf("%d sandboxes in %s", n, time.Since(began).Round(time.Second))
	if after := tree(t, base); !slices.Equal(before, after) {
		t.Errorf("cgroups before:\n  %s\nafter:\n  %s", strings.Join(before, "\n  "), strings.Join(after, "\n  "))
	}
	d.NothingLeaked(t, leaks)
}

// After kill -9 of the daemon or of the launcher at any instant, the next one repairs everything.
// A listed sandbox can be deleted, and then nothing is left; the shutdown at the end looks for
// everything that was ever marked.
func TestKilledAtRandomNothingIsLeft(t *testing.T) {
	rounds := testenv.Rounds(2, 16)
	d := shared(t)
	base := vacate(t)
	cgroups, before := tree(t, base), d.Snapshot(t)
	where := cgroupOf(t, d.PID())
	for round := range rounds {
		launcher := d.System(t).Launcher
		var busy sync.WaitGroup
		stop := make(chan struct{})
		for range 3 {
			busy.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
					}
					// All of it is cut off on purpose.
					s, err := d.TryCreate(t.Context(), api.CreateSandbox{Limits: api.Limits{Memory: 64 * mib}})
					if err != nil {
						return
					}
					_, _ = s.TryExec(t.Context(), sh("nohup setsid sleep 600 >/dev/null 2>&1 & sleep 0.05"))
					_, _ = patch(t, d, s, api.UpdateSandbox{Limits: api.LimitsUpdate{Pids: new(int64(77))}})
					_ = s.TryDelete(t.Context())
				}
			})
		}
		moment := time.Duration(rand.Int64N(int64(1500 * time.Millisecond)))
		select {
		case <-time.After(moment):
		case <-t.Context().Done():
		}
		what := "daemon"
		if round%2 == 1 {
			what = "launcher"
		}
		t.Logf("round %d: the %s is killed after %s", round, what, moment.Round(time.Millisecond))
		if what == "daemon" {
			d.Kill9(t)
			close(stop)
			busy.Wait()
			d.LaunchIn(t, where)
		} else {
			d.Mark(t)
			p, err := os.FindProcess(launcher)
			if err != nil {
				t.Fatal(err)
			}
			if err := p.Kill(); err != nil {
				t.Fatal(err)
			}
			close(stop)
			busy.Wait()
		}
		harness.Eventually(t, func() error {
			for _, s := range d.List(t) {
				if err := d.Call(t.Context(), http.MethodDelete, "/v1/sandboxes/"+s.ID, nil, nil); err != nil && code(err) != api.CodeNotFound {
					return fmt.Errorf("delete %s, which is %s (%s): %w", s.ID, s.State, s.Reason, err)
				}
			}
			return nil
		})
		if got := d.Create(t, api.CreateSandbox{}).Sh(t, "echo fine"); got != "fine\n" {
			t.Errorf("round %d: a sandbox afterwards says %q", round, got)
		}
		for _, s := range d.List(t) {
			if err := d.Call(t.Context(), http.MethodDelete, "/v1/sandboxes/"+s.ID, nil, nil); err != nil {
				t.Errorf("round %d: delete %s: %v", round, s.ID, err)
			}
		}
		d.NothingLeaked(t, before)
		if after := tree(t, base); !slices.Equal(cgroups, after) {
			t.Errorf("round %d: cgroups before:\n  %s\nafter:\n  %s", round, strings.Join(cgroups, "\n  "), strings.Join(after, "\n  "))
		}
		if t.Failed() {
			break
		}
	}
}
