package attack

import (
	"regexp"
	"slices"
	"testing"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

func TestResourcesAreWellFormed(t *testing.T) {
	name := regexp.MustCompile(`^[a-z0-9-]+$`)
	seen := make(map[string]bool)
	for _, r := range Resources() {
		if !name.MatchString(r.Name) || seen[r.Name] || r.Pool == "" || r.Bound < 1 || r.Want == nil || r.take == nil {
			t.Errorf("%q: no name, there twice, or incomplete", r.Name)
		}
		seen[r.Name] = true
		if r.Size != nil && r.Size() < 0 && r.Unsized == "" {
			t.Errorf("%s: the pool has no size here, and the row does not say what that means", r.Name)
		}
		for _, by := range r.Empty {
			if _, both := r.Stops[by]; both {
				t.Errorf("%s: %s is both a layer and an empty pool", r.Name, by)
			}
		}
	}
}

// An outcome is judged by the facts, in every setting, and the expectation by the report.
func TestResourcesAreJudged(t *testing.T) {
	shared, own := Setting{}, Setting{OwnIDs: true, Memory: 1 << 30, CPU: true}
	for name, tc := range map[string]struct {
		resource string
		got      Taken
		lost     bool
		in       Setting
		want     string
	}{
		"a neighbour lost":           {"descriptors", Taken{Stopped: "EMFILE", Taken: 5}, true, own, Nothing},
		"a limit":                    {"descriptors", Taken{Stopped: "EMFILE", Taken: 5}, false, shared, Limits},
		"the filter":                 {"keys", Taken{Stopped: "EPERM"}, false, shared, Filter},
		"the filter, later":          {"keys", Taken{Stopped: "EPERM", Taken: 1}, false, shared, "unknown: EPERM"},
		"an empty pool, ids shared":  {"epoll-watches", Taken{Stopped: "ENOSPC", Taken: 9}, false, shared, Nothing},
		"an empty pool, own ids":     {"epoll-watches", Taken{Stopped: "ENOSPC", Taken: 9}, false, own, OwnIDs},
		"all it tried, ids shared":   {"epoll-watches", Taken{Taken: 4000}, false, shared, Nothing},
		"ids shared, little memory":  {"epoll-watches", Taken{Taken: 4000, Size: 1 << 30}, false, Setting{Memory: 1 << 20}, MemoryCgroup},
		"ids shared, a small pool":   {"epoll-watches", Taken{Taken: 4000, Size: 1 << 10}, false, Setting{Memory: 1 << 30}, Nothing},
		"a ceiling":                  {"inotify-watches", Taken{Taken: 9, Ceiling: 10, CeilingOf: Ceilings}, false, shared, Ceilings},
		"no ceiling":                 {"inotify-watches", Taken{Taken: 9}, false, shared, Nothing},
		"killed":                     {"memory", Taken{Killed: true}, false, own, MemoryCgroup},
		"memory without a cgroup":    {"memory", Taken{Taken: 9}, false, shared, Nothing},
		"a pool without a size":      {"open-files", Taken{Taken: 9, Size: -1}, false, own, MemoryCgroup},
		"a namespace":                {"loopback-ports", Taken{Taken: 9}, false, shared, Namespaces},
		"sessions with a cgroup":     {"sessions", Taken{Taken: 64}, false, own, CPUCgroup},
		"sessions without one":       {"sessions", Taken{Taken: 64}, false, shared, Nothing},
		"an error without a meaning": {"dentries", Taken{Stopped: "EIO", Taken: 1}, false, own, "unknown: EIO"},
	} {
		if got := findResource(tc.resource).Judge(tc.got, tc.lost, tc.in); got != tc.want {
			t.Errorf("%s: %q, want %q", name, got, tc.want)
		}
	}
	for name, tc := range map[string]struct {
		resource string
		in       Setting
		want     string
	}{
		"ids shared":          {"pipe-pages", shared, Nothing},
		"own ids":             {"pipe-pages", own, OwnIDs},
		"closed by a profile": {"messages", Setting{Profile: "hardened"}, Filter},
		"open in the other":   {"messages", Setting{Profile: "default"}, Nothing},
	} {
		if got := findResource(tc.resource).Wanted(tc.in); got != tc.want {
			t.Errorf("%s: %q, want %q", name, got, tc.want)
		}
	}
}

func TestIDsOverlap(t *testing.T) {
	a := []IDRange{{1, 10}}
	for name, tc := range map[string]struct {
		b    []IDRange
		want bool
	}{"the same": {a, true}, "next": {[]IDRange{{11, 10}}, false}, "one of them": {[]IDRange{{100, 1}, {10, 1}}, true}, "none": {nil, false}} {
		if got := Overlap(a, tc.b); got != tc.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// A probe of a quiet host loses nothing to another one, and a lost operation is told from one that
// never worked.
func TestProbe(t *testing.T) {
	before := Probed{Failed: map[string]string{"key": "EPERM"}}
	now := Probed{Failed: map[string]string{"key": "EPERM", "pipe of 64 KiB": "ENFILE"}}
	if lost := now.Lost(before); len(lost) != 1 || lost["pipe of 64 KiB"] != "ENFILE" {
		t.Errorf("%v", lost)
	}
	names := make(map[string]bool)
	for _, o := range operations() {
		if names[o.name] {
			t.Errorf("%s is there twice", o.name)
		}
		names[o.name] = true
	}
}

// Where no layer of a sandbox holds a program it takes of each resource. A row that gets none even
// there proves nothing.
func TestResourcesAreTakenWhereNothingHolds(t *testing.T) {
	testenv.RequireUserNS(t)
	// The host decides about these.
	depends := []string{"huge-pages", "huge-segments", "bpf-maps", "core-dumps", "real-time", "priority", "pressure-triggers", "perf-events", "connection-tracking", "terminals-by-devpts"}
	for _, r := range Resources() {
		got, err := ControlResource(t.Context(), "/proc/self/exe", r.Name)
		if err != nil {
			t.Error(err)
			continue
		}
		if got.Taken == 0 && !slices.Contains(depends, r.Name) {
			t.Errorf("%s: nothing is taken: %s", r.Name, got.Stopped)
		}
	}
}
