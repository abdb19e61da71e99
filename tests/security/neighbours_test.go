package security

import (
	"encoding/json"
	"slices"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/attack"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// minResources is the least number of rows: none gets lost.
const minResources = 60

// neighbourReport is the output of `doctor --attack --neighbours --json`, as far as tests read it.
type neighbourReport struct {
	Profiles []struct {
		Name      string
		Enforced  *api.Enforced
		SharedIDs bool `json:"shared_ids"`
		Error     string
	}
	Resources []struct {
		Name     string
		Bound    int
		Size     int64
		Control  attack.Taken
		Profiles map[string]struct {
			attack.Taken

			Layer, Want, Verdict string
			Lost, Kept, After    map[string]map[string]string
		}
	}
	Held bool
}

// noControl lists resources that cannot be taken on every host, even where nothing holds a program.
var noControl = map[string]string{
	"huge-pages": "the host has none", "huge-segments": "the host has none", "bpf-maps": "unprivileged programs have none", "core-dumps": "the host dumps none",
	"terminals-by-devpts": "the host's is for root",
	"real-time":           "needs the host's root", "priority": "needs the host's root", "pressure-triggers": "the kernel may have none", "perf-events": "unprivileged programs may have none",
}

// TestNeighboursLoseNothing has a sandbox take of each resource that the kernel counts beyond it.
// The layer that bounds it must be the one that `enforced` promises, in both directions: a resource
// that nothing bounds must be said to be unbounded, and one that is said to be must not be held.
// Meanwhile and afterwards a second sandbox, the host's users and the daemon go on.
func TestNeighboursLoseNothing(t *testing.T) {
	testenv.RequireUserNS(t)
	d := harness.Start(t, harness.Options{})
	got := d.CLI(t, "doctor", "--attack", "--neighbours", "--json")
	var report neighbourReport
	if err := json.Unmarshal([]byte(got.Stdout), &report); err != nil {
		t.Fatalf("%v: %+v", err, got)
	}
	if n := len(report.Resources); n != len(attack.Resources()) || n < minResources {
		t.Errorf("%d resources of %d, want %d", n, len(attack.Resources()), minResources)
	}
	want := profiles(t, d)
	lost := false
	for _, r := range report.Resources {
		t.Run(r.Name, func(t *testing.T) {
			if _, may := noControl[r.Name]; r.Control.Taken == 0 && !may {
				t.Errorf("control: nothing is taken where no layer holds it: %s", r.Control.Stopped)
			}
			for _, profile := range want {
				by, tried := r.Profiles[profile]
				if !tried {
					t.Errorf("%s: it was not tried", profile)
					continue
				}
				lost = lost || by.Verdict == "LOST"
				if by.Verdict == "held" || by.Verdict == "open" {
					continue
				}
				t.Errorf("%s: %s: %d taken, stopped by %q %s, want %q; lost %v, then %v, afterwards %v",
					profile, by.Verdict, by.Taken.Taken, by.Layer, by.Stopped, by.Want, by.Lost, by.Kept, by.After)
			}
		})
	}
	if report.Held == lost || (got.Code == 0) != report.Held {
		t.Errorf("held: %v, and a resource was lost: %v; exit code %d", report.Held, lost, got.Code)
	}
	for _, p := range report.Profiles {
		if slices.Contains(want, p.Name) && p.Enforced.IDs == "own" && p.SharedIDs {
			t.Errorf("%s: ids are said to be %q, and are a neighbour's too", p.Name, p.Enforced.IDs)
		}
	}
	if left := d.List(t); len(left) != 0 {
		t.Errorf("it left sandboxes behind: %+v", left)
	}
}
