package idmap

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var (
	hostIDs = []Range{{Inside: 0, Outside: 0, Size: 4294967295}}
	sub     = func(start, size int) Range { return Range{Outside: start, Size: size} }
)

func ordinary(subuid, subgid []Range) Inputs {
	return Inputs{
		UID: 1000, GID: 1001, SubUID: subuid, SubGID: subgid, OwnUID: hostIDs, OwnGID: hostIDs,
		NewUIDMap: "/usr/bin/newuidmap", NewGIDMap: "/usr/bin/newgidmap",
	}
}

func root(subuid, subgid []Range) Inputs {
	return Inputs{SubUID: subuid, SubGID: subgid, OwnUID: hostIDs, OwnGID: hostIDs}
}

func TestPlan(t *testing.T) {
	withoutHelpers := ordinary([]Range{sub(100000, 65536)}, []Range{sub(100000, 65536)})
	withoutHelpers.HelperErr = errors.New("newuidmap is not installed")
	inContainer := root(nil, nil)
	inContainer.OwnUID = []Range{{Inside: 0, Outside: 100000, Size: 65536}}
	inContainer.OwnGID = []Range{{Inside: 0, Outside: 1000, Size: 1}, {Inside: 1, Outside: 100000, Size: 65536}}
	alone := root(nil, nil)
	alone.OwnUID = []Range{{Inside: 0, Outside: 1000, Size: 1}}
	alone.OwnGID = alone.OwnUID

	for name, tc := range map[string]struct {
		in     Inputs
		method Method
		uid    []Range
		gid    []Range
		size   int
		reason string // a part of it
	}{
		"ordinary user": {
			in:     ordinary([]Range{sub(100000, 65536)}, []Range{sub(200000, 65536)}),
			method: Helpers,
			uid:    []Range{{0, 1000, 1}, {1, 100000, 65536}},
			gid:    []Range{{0, 1001, 1}, {1, 200000, 65536}},
			size:   65536,
		},
		"more than enough": {
			in:     ordinary([]Range{sub(100000, 1000000)}, []Range{sub(100000, 1000000)}),
			method: Helpers,
			uid:    []Range{{0, 1000, 1}, {1, 100000, 65536}},
			gid:    []Range{{0, 1001, 1}, {1, 100000, 65536}},
			size:   65536,
		},
		"several ranges are laid side by side": {
			in:     ordinary([]Range{sub(100000, 65000), sub(300000, 65536)}, []Range{sub(100000, 65536)}),
			method: Helpers,
			uid:    []Range{{0, 1000, 1}, {1, 100000, 65000}, {65001, 300000, 536}},
			gid:    []Range{{0, 1001, 1}, {1, 100000, 65536}},
			size:   65536,
		},
		"fewer groups than users": {
			in:     ordinary([]Range{sub(100000, 65536)}, []Range{sub(100000, 1000)}),
			method: Helpers,
			uid:    []Range{{0, 1000, 1}, {1, 100000, 1000}},
			gid:    []Range{{0, 1001, 1}, {1, 100000, 1000}},
			size:   1000, reason: "only 1000 subordinate ids",
		},
		"ranges with the host's root, the user, nothing or an overlap are left out": {
			in: ordinary(
				[]Range{sub(0, 65536), sub(900, 65536), sub(100000, 0), sub(100000, 70000), sub(110000, 70000), sub(4294967290, 100), sub(-5, 3)},
				[]Range{sub(100000, 65536)}),
			method: Helpers,
			uid:    []Range{{0, 1000, 1}, {1, 100000, 65536}},
			gid:    []Range{{0, 1001, 1}, {1, 100000, 65536}},
			size:   65536,
		},
		"no entry": {
			in: ordinary(nil, nil), method: Single,
			uid: []Range{{0, 1000, 1}}, gid: []Range{{0, 1001, 1}},
			size: 1, reason: "neither /etc/subuid nor /etc/subgid",
		},
		"no entry for groups": {
			in: ordinary([]Range{sub(100000, 65536)}, nil), method: Single,
			uid: []Range{{0, 1000, 1}}, gid: []Range{{0, 1001, 1}},
			size: 1, reason: "/etc/subgid names no range",
		},
		"no helper programs": {
			in: withoutHelpers, method: Single,
			uid: []Range{{0, 1000, 1}}, gid: []Range{{0, 1001, 1}},
			size: 1, reason: "newuidmap is not installed",
		},
		"root": {
			in: root(nil, nil), method: Direct,
			uid: []Range{{0, 1879048192, 268369921}}, gid: []Range{{0, 1879048192, 268369921}},
			size: 65536,
		},
		"root with an entry": {
			in:     root([]Range{sub(500000, 131072)}, []Range{sub(600000, 131072)}),
			method: Direct,
			uid:    []Range{{0, 500000, 131072}}, gid: []Range{{0, 600000, 131072}},
			size: 65536,
		},
		"root with an entry one short": {
			in:     root([]Range{sub(500000, 65536)}, []Range{sub(600000, 65536)}),
			method: Direct,
			uid:    []Range{{0, 500000, 65536}}, gid: []Range{{0, 600000, 65536}},
			size: 65535, reason: "only 65535",
		},
		"root of a container": {
			in: inContainer, method: Direct,
			uid: []Range{{0, 1, 65535}}, gid: []Range{{0, 1, 65535}},
			size: 65534, reason: "only 65534",
		},
		"root of a namespace with one id": {
			in: alone, method: Single,
			uid: []Range{{0, 0, 1}}, gid: []Range{{0, 0, 1}},
			size: 1, reason: "no id but root's",
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := NewPlan(tc.in)
			if err := p.Validate(); err != nil {
				t.Fatalf("plan is not valid: %v", err)
			}
			if p.Method != tc.method || p.Size() != tc.size {
				t.Errorf("method %q size %d, want %q %d", p.Method, p.Size(), tc.method, tc.size)
			}
			if diff := cmp.Diff(tc.uid, p.UID); diff != "" {
				t.Errorf("uid map (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tc.gid, p.GID); diff != "" {
				t.Errorf("gid map (-want +got):\n%s", diff)
			}
			if (tc.reason == "") != (p.Reason == "") || !strings.Contains(p.Reason, tc.reason) {
				t.Errorf("reason %q, want %q in it", p.Reason, tc.reason)
			}
			if !p.Subordinate() {
				return
			}
			// The promise of the package, whatever the input.
			for id := range p.Size() {
				if h, g := p.HostID(id), p.HostGID(id); h <= 0 && tc.in.UID != 0 || h == tc.in.UID || g == tc.in.GID || h < 0 || g < 0 {
					t.Fatalf("sandbox id %d is uid %d, gid %d of the host", id, h, g)
				}
			}
			if h := p.HostID(p.Size()); h != -1 {
				t.Errorf("id %d, beyond the sandbox, is host id %d", p.Size(), h)
			}
		})
	}
}

func TestSandboxMap(t *testing.T) {
	full := NewPlan(ordinary([]Range{sub(100000, 65536)}, []Range{sub(200000, 65536)}))
	if diff := cmp.Diff([]Range{{0, 1, 65536}}, full.SandboxMap()); diff != "" {
		t.Error(diff)
	}
	if h, g := full.HostID(0), full.HostGID(33); h != 100000 || g != 200033 {
		t.Errorf("sandbox root is %d, www-data %d", h, g)
	}
	single := NewPlan(ordinary(nil, nil))
	if diff := cmp.Diff([]Range{{0, 0, 1}}, single.SandboxMap()); diff != "" {
		t.Error(diff)
	}
	if h, h1 := single.HostID(0), single.HostID(1); h != 1000 || h1 != -1 {
		t.Errorf("single: 0 is %d, 1 is %d", h, h1)
	}
}

func TestValidateRefuses(t *testing.T) {
	one := []Range{{0, 1000, 1}}
	for name, p := range map[string]Plan{
		"zero value":         {},
		"gap":                {Method: Direct, UID: []Range{{0, 5, 1}, {2, 9, 1}}, GID: []Range{{0, 5, 3}}},
		"beyond the last id": {Method: Direct, UID: []Range{{0, maxID, 2}}, GID: []Range{{0, 5, 2}}},
		"no helpers":         {Method: Helpers, UID: []Range{{0, 5, 9}}, GID: []Range{{0, 5, 9}}},
		"single with two":    {Method: Single, UID: []Range{{0, 5, 2}}, GID: one},
		"nothing left":       {Method: Direct, UID: one, GID: one},
		"unknown method":     {Method: "magic", UID: one, GID: one},
	} {
		t.Run(name, func(t *testing.T) {
			if err := p.Validate(); err == nil {
				t.Errorf("%+v is accepted", p)
			}
		})
	}
}

func TestParseSub(t *testing.T) {
	const file = `# comment
alice:100000:65536
bob:200000:65536

1000:300000:10
alice:notanumber:5
alice:400000
alice:500000:7
`
	got, err := parseSub(strings.NewReader(file), []string{"1000", "alice"})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]Range{sub(100000, 65536), sub(300000, 10), sub(500000, 7)}, usable(got, 1000)); diff != "" {
		t.Error(diff)
	}
}

func TestParseMapRefuses(t *testing.T) {
	for _, text := range []string{"0 1\n", "0 0 0 0\n", "a b c\n", "0 0 4294967296\n", "-1 0 1\n"} {
		if m, err := parseMap(strings.NewReader(text)); err == nil {
			t.Errorf("%q read as %v", text, m)
		}
	}
}

// Sandboxes' ranges are disjoint, and none of them is that of the files or the launcher's id.
func TestRanges(t *testing.T) {
	for name, tc := range map[string]struct {
		plan  Plan
		count int
	}{
		"root":                      {NewPlan(root(nil, nil)), 4094},
		"root with two ranges":      {NewPlan(root([]Range{sub(500000, 131073)}, []Range{sub(600000, 131073)})), 1},
		"root with one id too few":  {NewPlan(root([]Range{sub(500000, 131072)}, []Range{sub(600000, 131073)})), 0},
		"root with pieces":          {NewPlan(root([]Range{sub(500000, 70000), sub(700000, 190000)}, []Range{sub(500000, 300000)})), 2},
		"root of a small container": {NewPlan(root([]Range{sub(500000, 10)}, []Range{sub(500000, 10)})), 0},
		"ordinary user":             {NewPlan(ordinary([]Range{sub(100000, 1000000)}, []Range{sub(100000, 1000000)})), 0},
		"user without ids":          {NewPlan(ordinary(nil, nil)), 0},
	} {
		t.Run(name, func(t *testing.T) {
			p := tc.plan
			if p.Ranges() != tc.count {
				t.Fatalf("%d ranges, want %d", p.Ranges(), tc.count)
			}
			for _, number := range []int{-1, 0, tc.count + 1} {
				if uid, gid, err := p.MountMap(number); err == nil {
					t.Errorf("range %d has the maps %v and %v", number, uid, gid)
				}
			}
			owner := map[int]int{} // host ids, of the ranges looked at
			for number := 1; number <= min(tc.count, 3); number++ {
				uid, gid, err := p.MountMap(number)
				if err != nil {
					t.Fatal(err)
				}
				if got, want := lookup(p.UID[0].Outside, uid), p.UID[0].Outside; got != want {
					t.Errorf("the launcher's files are of %d, not of %d", got, want)
				}
				if n, m := total(uid), total(gid); n != SandboxIDs+1 || m != n {
					t.Errorf("maps of %d and %d ids", n, m)
				}
				for id := range SandboxIDs {
					running := lookup(lookup(id, RangeMap(number)), p.UID)
					if seen := lookup(p.HostID(id), uid); seen != running || running <= 0 {
						t.Fatalf("files of id %d are seen as %d, and range %d runs as %d", id, seen, number, running)
					}
					if seen, running := lookup(p.HostGID(id), gid), lookup(lookup(id, RangeMap(number)), p.GID); seen != running {
						t.Fatalf("files of group %d are seen as %d, and range %d runs as %d", id, seen, number, running)
					}
					if other, taken := owner[running]; taken || running == p.HostID(id) {
						t.Fatalf("host id %d of range %d is also of %d", running, number, other)
					}
					owner[running] = number
				}
			}
		})
	}
}

// Maps that lie in pieces are cut wherever one of the two is.
func TestMountMapOfPieces(t *testing.T) {
	p := NewPlan(root([]Range{sub(500000, 70000), sub(700000, 190000)}, []Range{sub(500000, 300000)}))
	uid, gid, err := p.MountMap(1)
	if err != nil {
		t.Fatal(err)
	}
	// Id 0 of range 1 is id 65537 of the launcher.
	want := []Range{{500000, 500000, 1}, {500001, 565537, 4463}, {504464, 700000, 61073}}
	if diff := cmp.Diff(want, uid); diff != "" {
		t.Errorf("uid map (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]Range{{500000, 500000, 1}, {500001, 565537, 65536}}, gid); diff != "" {
		t.Errorf("gid map (-want +got):\n%s", diff)
	}
}
