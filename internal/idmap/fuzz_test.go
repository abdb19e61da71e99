package idmap

import (
	"strings"
	"testing"
)

// FuzzPlan: whatever an administrator has written into the files, the plan is valid, its lines do
// not overlap, and no id of a sandbox is the host's root or the user.
func FuzzPlan(f *testing.F) {
	f.Add("ann:100000:65536\n", "ann:100000:65536\n", uint16(1000))
	f.Add("ann:0:65536\nann:900:200\n1000:4294967290:10\n", "ann:1:1\n", uint16(1000))
	f.Add("sandboxd:5:9223372036854775807\n", "sandboxd:-5:10\n", uint16(0))
	f.Fuzz(func(t *testing.T, subuid, subgid string, uid uint16) {
		own := []Range{{Size: 1<<32 - 1}}
		in := Inputs{UID: int(uid), GID: int(uid), OwnUID: own, OwnGID: own, NewUIDMap: "/u", NewGIDMap: "/g"}
		names := []string{"ann", "sandboxd", "1000"}
		var err error
		if in.SubUID, err = parseSub(strings.NewReader(subuid), names); err != nil {
			return
		}
		if in.SubGID, err = parseSub(strings.NewReader(subgid), names); err != nil {
			return
		}
		p := NewPlan(in)
		if err := p.Validate(); err != nil {
			t.Fatal(err)
		}
		for _, m := range [][]Range{p.UID, p.GID} {
			for i, a := range m {
				for _, b := range m[:i] {
					if a.Outside < b.Outside+b.Size && b.Outside < a.Outside+a.Size {
						t.Fatalf("%v and %v overlap", a, b)
					}
				}
				mine := a.Inside > 0 || p.Method == Direct
				holds := func(id int) bool { return a.Outside <= id && id < a.Outside+a.Size }
				if mine && (holds(0) || holds(int(uid))) {
					t.Fatalf("%v gives away the host's root or uid %d", a, uid)
				}
			}
		}
	})
}
