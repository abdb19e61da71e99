package idmap

import (
	"testing"
)

// through returns the sandbox's id for a file's, and the file's for that one, by a map of a mount.
func through(t *testing.T, m []Range, id int) int {
	t.Helper()
	seen := -1
	for _, r := range m {
		if id >= r.Inside && id < r.Inside+r.Size {
			if seen >= 0 {
				t.Errorf("id %d is mapped twice: %v", id, m)
			}
			seen = r.Outside + id - r.Inside
		}
	}
	return seen
}

// The owner's files are the program's, every id has one counterpart, and none outside of the
// sandbox's range.
func TestWorkspaceMap(t *testing.T) {
	// Two extents, as of two entries in /etc/subuid.
	launcher := []Range{{0, 0, 1}, {1, 100_000, 100_000}, {100_001, 500_000, 4 * SandboxIDs}}
	p := Plan{Method: Direct, UID: launcher, GID: launcher}
	for _, tc := range []struct{ owner, inside, number int }{
		{0, 0, 0},
		{0, 0, 1},
		{0, 1000, 1},
		{1000, 0, 1},
		{1000, 1000, 2},
		{1000, 1001, 1},
		{1001, 1000, 1},
		{65535, 0, 1},
		{0, 65535, 1},
		{65534, 65535, 3},
		{200_000, 0, 1},
		{200_000, 1000, 2},
		{200_000, 65535, 1},
	} {
		m, err := p.WorkspaceMap(launcher, tc.owner, tc.inside, tc.number)
		if err != nil {
			t.Fatal(err)
		}
		host := func(inside int) int {
			at, _ := find(1+tc.number*SandboxIDs+inside, launcher)
			return at
		}
		if got := through(t, m, tc.owner); got != host(tc.inside) {
			t.Errorf("%+v: the owner is seen as %d, not as %d", tc, got, host(tc.inside))
		}
		seen := map[int]int{}
		for id := range SandboxIDs {
			at := through(t, m, id)
			if at < 0 {
				if tc.owner < SandboxIDs || id != tc.inside {
					t.Errorf("%+v: id %d is unmapped", tc, id)
				}
				continue
			}
			if before, twice := seen[at]; twice {
				t.Errorf("%+v: %d and %d are both seen as %d", tc, before, id, at)
			}
			seen[at] = id
			want := id
			switch id {
			case tc.owner:
				want = tc.inside
			case tc.inside:
				want = tc.owner
			}
			if at != host(want) {
				t.Errorf("%+v: id %d is seen as %d, not as %d", tc, id, at, host(want))
			}
		}
		if at := through(t, m, 300_000); at >= 0 {
			t.Errorf("%+v: another user of the host is seen as %d", tc, at)
		}
	}
	for _, tc := range []struct{ owner, inside, number int }{{0, -1, 0}, {0, SandboxIDs, 0}, {-1, 0, 0}, {0, 0, -1}, {0, 0, p.Ranges() + 1}} {
		if m, err := p.WorkspaceMap(launcher, tc.owner, tc.inside, tc.number); err == nil {
			t.Errorf("%+v: %v", tc, m)
		}
	}
}
