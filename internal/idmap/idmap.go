// Package idmap decides which host ids the launcher and its sandboxes run under, then writes the
// maps of a new user namespace.
//
// There are two maps, one inside the other:
//
//	sandbox id        launcher id             host id
//	                  0                 ──▶   the daemon's own uid (ordinary user); nothing of value (root)
//	0 … 65535   ──▶   1 … 65536         ──▶   subordinate ids
//
// so that root of a sandbox is never the uid that runs the daemon: a program that breaks out owns
// nothing of the user's. [NewPlan] is a pure function of the host's properties; [Detect] reads
// them; [Apply] writes the outer map. The launcher writes the inner one when it starts a sandbox.
//
// The launcher of root has many such ranges. Files on disk belong to the first one, which
// [Plan.SandboxMap] describes. Each sandbox runs under one of the others ([Plan.Ranges]), and sees
// the files through mounts that map the first range to its own ([Plan.MountMap]). Without further
// ranges all sandboxes share the first.
package idmap

import (
	"errors"
	"fmt"
	"slices"
)

const (
	// SandboxIDs is the number of ids of a sandbox if the host offers enough: what images and
	// /etc/passwd files assume.
	SandboxIDs = 65536

	// rootBase is the first host id of the launcher started as root: 0x70000000, far above what
	// useradd, systemd (DynamicUser 61184.., containers 524288..1879048191) and /etc/subuid hand out.
	// See systemd's UIDS-GIDS.md.
	rootBase = 1879048192
	// rootRanges is the number of disjoint ranges of SandboxIDs that the launcher of root holds: all
	// that fit between rootBase and 2^31, which UIDS-GIDS.md leaves unused, with an id of its own.
	rootRanges = 4095

	// maxExtents is below the kernel's 340 lines of one map (5 before Linux 4.15, which is too old for
	// us anyway).
	maxExtents = 300
	// maxID is the last id of Linux; 2^32-1 means "no id".
	maxID = 1<<32 - 2
)

// Range maps Size ids: Inside, Inside+1, … of the new user namespace are Outside, Outside+1, … of
// its parent.
type Range struct {
	Inside  int `json:"inside"`
	Outside int `json:"outside"`
	Size    int `json:"size"`
}

// Method is the way in which the maps of the launcher are written.
type Method string

const (
	// Direct writes /proc/<pid>/uid_map: the daemon is root.
	Direct Method = "direct"
	// Helpers runs newuidmap and newgidmap, which read /etc/subuid and /etc/subgid: the daemon is an
	// ordinary user.
	Helpers Method = "helpers"
	// Single maps id 0 only, to the daemon's own id: all that an ordinary user may do without help.
	Single Method = "single"
)

// Plan holds the ids that the launcher gets. It is a value: it can be printed, compared and sent as
// JSON. The zero value is not a plan.
type Plan struct {
	Method Method `json:"method"`
	// UID and GID are the launcher's maps. Both have the same Inside ids, from 0 to Size().
	UID []Range `json:"uid"`
	GID []Range `json:"gid"`
	// NewUIDMap and NewGIDMap are the helper programs, absolute; empty unless Method is Helpers.
	NewUIDMap string `json:"newuidmap,omitempty"`
	NewGIDMap string `json:"newgidmap,omitempty"`
	// Reason explains why there is no, or less than, a full range of subordinate ids; empty when all
	// is well.
	Reason string `json:"reason,omitempty"`
}

// Inputs is everything that a plan depends on.
type Inputs struct {
	UID, GID int // effective ids of the daemon
	// SubUID and SubGID are the host ranges given to this user (to "sandboxd" when UID is 0), in the
	// order of the files. Their Inside is ignored.
	SubUID, SubGID []Range
	// OwnUID and OwnGID are /proc/self/uid_map and gid_map: in a container, root does not have every
	// id.
	OwnUID, OwnGID []Range
	// NewUIDMap and NewGIDMap are the helper programs; HelperErr says why they cannot be used.
	NewUIDMap, NewGIDMap string
	HelperErr            error
}

// NewPlan chooses the launcher's ids. It always finds some: the worst is a single-id map, with the
// reason.
func NewPlan(in Inputs) Plan {
	if in.UID == 0 {
		return rootPlan(in)
	}
	if in.HelperErr != nil {
		return singlePlan(in, in.HelperErr.Error())
	}
	uids := usable(in.SubUID, in.UID)
	gids := usable(in.SubGID, in.GID)
	size := min(total(uids), total(gids), SandboxIDs)
	if size == 0 {
		return singlePlan(in, missing(uids, gids))
	}
	p := Plan{
		Method:    Helpers,
		UID:       launcherMap(in.UID, uids, size),
		GID:       launcherMap(in.GID, gids, size),
		NewUIDMap: in.NewUIDMap,
		NewGIDMap: in.NewGIDMap,
	}
	p.Reason = short(size)
	return p
}

// rootPlan maps a high range, or what /etc/subuid gives to "sandboxd". The host's root is not in
// the map at all: 0 of the launcher is the range's first id.
func rootPlan(in Inputs) Plan {
	uids, gids := usable(in.SubUID, 0), usable(in.SubGID, 0)
	if total(uids) < 2 || total(gids) < 2 { // one for the launcher, one for the sandbox
		high := []Range{{Outside: rootBase, Size: rootRanges*SandboxIDs + 1}}
		uids, gids = high, high
	}
	if !within(uids, in.OwnUID) || !within(gids, in.OwnGID) {
		// We are root of a container. Take what this namespace has beside its own root.
		uids, gids = outsides(in.OwnUID), outsides(in.OwnGID)
	}
	size := min(total(uids), total(gids), rootRanges*SandboxIDs+1)
	if size < 2 {
		return singlePlan(in, "this user namespace has no id but root's to give away")
	}
	return Plan{Method: Direct, UID: pack(0, uids, size), GID: pack(0, gids, size), Reason: short(size - 1)}
}

func singlePlan(in Inputs, reason string) Plan {
	return Plan{
		Method: Single,
		UID:    []Range{{Inside: 0, Outside: in.UID, Size: 1}},
		GID:    []Range{{Inside: 0, Outside: in.GID, Size: 1}},
		Reason: reason,
	}
}

// Subordinate reports whether sandboxes get ids of their own. Otherwise their processes run under
// the daemon's uid.
func (p Plan) Subordinate() bool { return p.Method == Direct || p.Method == Helpers }

// Size returns the number of ids of a sandbox: SandboxIDs, fewer if the host gives fewer, or 1.
func (p Plan) Size() int {
	if !p.Subordinate() {
		return 1
	}
	return min(total(p.UID)-1, total(p.GID)-1, SandboxIDs)
}

// SandboxMap is the map of a sandbox's own user namespace, for uids and gids alike. Its Outside ids
// are the launcher's.
func (p Plan) SandboxMap() []Range {
	if !p.Subordinate() {
		return []Range{{Inside: 0, Outside: 0, Size: 1}}
	}
	return []Range{{Inside: 0, Outside: 1, Size: p.Size()}}
}

// Ranges returns the number of ranges that sandboxes can have to themselves, beside the first, to
// which files belong. Zero means that all sandboxes share the first one.
func (p Plan) Ranges() int {
	if p.Method != Direct { // only root of the host can map mounts
		return 0
	}
	return max(0, (min(total(p.UID), total(p.GID))-1)/SandboxIDs-1)
}

// RangeMap returns the map of a sandbox that has a range to itself, like SandboxMap. Ranges are
// numbered from 1 to Ranges.
func RangeMap(number int) []Range {
	return []Range{{Inside: 0, Outside: 1 + number*SandboxIDs, Size: SandboxIDs}}
}

// MountMap returns the maps of the mounts through which a sandbox with the range sees its files:
// from the first range to that one, in ids of the host. The launcher's own id stays as it is, and
// other owners are unmapped.
func (p Plan) MountMap(number int) (uid, gid []Range, err error) {
	if number < 1 || number > p.Ranges() {
		return nil, nil, fmt.Errorf("no range of ids has the number %d: there are %d", number, p.Ranges())
	}
	return mountMap(p.UID, number), mountMap(p.GID, number), nil
}

// FileMap returns the maps of a mount of the host's files for a sandbox with the range, or that
// shares the first one if number is 0. Inside is an id of the sandbox, which sees the files of the
// host's owner as its own, and whose files belong to owner. Every other id of the sandbox has its
// place on disk, as in [Plan.MountMap], and other owners of the host are unmapped.
func (p Plan) FileMap(number, owner, ownerGroup, inside, insideGroup int) (uid, gid []Range, err error) {
	if p.Method != Direct || number < 0 || number > p.Ranges() {
		return nil, nil, fmt.Errorf("no range of ids has the number %d, of a daemon of root with %d", number, p.Ranges())
	}
	if inside < 0 || inside >= p.Size() || insideGroup < 0 || insideGroup >= p.Size() {
		return nil, nil, fmt.Errorf("no sandbox has the ids %d:%d", inside, insideGroup)
	}
	if uid, err = fileMap(p.UID, p.Size(), number, owner, inside); err == nil {
		gid, err = fileMap(p.GID, p.Size(), number, ownerGroup, insideGroup)
	}
	return uid, gid, err
}

func fileMap(launcher []Range, size, number, owner, inside int) ([]Range, error) {
	var out []Range
	for id := 0; id < size; {
		disk, left := find(1+id, launcher)
		seen, n := find(1+number*SandboxIDs+id, launcher)
		n = min(n, left, size-id)
		if id < inside {
			n = min(n, inside-id)
		}
		if id == inside {
			disk, n = owner, 1
		} else if owner >= disk && owner < disk+n {
			return nil, fmt.Errorf("the owner, id %d, is one of those that sandboxes have", owner)
		}
		out = append(out, Range{Inside: disk, Outside: seen, Size: n})
		id += n
	}
	return out, nil
}

func mountMap(launcher []Range, number int) []Range {
	out := []Range{{Inside: launcher[0].Outside, Outside: launcher[0].Outside, Size: 1}}
	for id := 0; id < SandboxIDs; {
		disk, left := find(1+id, launcher)
		seen, size := find(1+number*SandboxIDs+id, launcher)
		size = min(size, left, SandboxIDs-id)
		out = append(out, Range{Inside: disk, Outside: seen, Size: size})
		id += size
	}
	return out
}

// HostID is the uid on the host of a sandbox's uid, or -1 where the sandbox has no such uid.
func (p Plan) HostID(sandboxID int) int { return p.host(sandboxID, p.UID) }

// HostGID is the same for group ids.
func (p Plan) HostGID(sandboxID int) int { return p.host(sandboxID, p.GID) }

func (p Plan) host(id int, launcher []Range) int {
	return lookup(lookup(id, p.SandboxMap()), launcher)
}

// Validate reports whether the plan can be applied: a plan may have crossed a process boundary.
func (p Plan) Validate() error {
	for _, m := range [][]Range{p.UID, p.GID} {
		next := 0
		for _, r := range m {
			if r.Inside != next || r.Size < 1 || r.Outside < 0 || r.Outside > maxID-r.Size+1 {
				return fmt.Errorf("id map %v is not gapless from 0 or leaves the range of ids", m)
			}
			next += r.Size
		}
		if next == 0 || len(m) > maxExtents {
			return fmt.Errorf("id map with %d lines", len(m))
		}
	}
	switch p.Method {
	case Single:
		if total(p.UID) != 1 || total(p.GID) != 1 {
			return errors.New("single id map with more than one id")
		}
	case Helpers:
		if p.NewUIDMap == "" || p.NewGIDMap == "" {
			return errors.New("id map without the programs that write it")
		}
	case Direct:
	default:
		return fmt.Errorf("unknown way %q to write id maps", p.Method)
	}
	if p.Subordinate() && p.Size() < 1 {
		return errors.New("id map without an id for sandboxes")
	}
	return nil
}

// launcherMap is 0 → own, then size subordinate ids from 1.
func launcherMap(own int, sub []Range, size int) []Range {
	return append([]Range{{Inside: 0, Outside: own, Size: 1}}, pack(1, sub, size)...)
}

// pack lays the host ids of ranges side by side from inside on, until there are size of them.
func pack(inside int, ranges []Range, size int) []Range {
	var out []Range
	for _, r := range ranges {
		if size == 0 {
			break
		}
		n := min(r.Size, size)
		out = append(out, Range{Inside: inside, Outside: r.Outside, Size: n})
		inside, size = inside+n, size-n
	}
	return out
}

// usable leaves out ids that a sandbox must not have (the host's root, the daemon's own id),
// invalid ranges, and ids of an earlier range: the kernel refuses maps that overlap.
func usable(ranges []Range, own int) []Range {
	var out []Range
	for _, r := range ranges {
		overlaps := func(o Range) bool { return r.Outside < o.Outside+o.Size && o.Outside < r.Outside+r.Size }
		switch {
		case r.Size < 1, r.Outside < 0, r.Outside > maxID-r.Size+1:
		case overlaps(Range{Outside: 0, Size: 1}), overlaps(Range{Outside: own, Size: 1}):
		case slices.ContainsFunc(out, overlaps):
		case len(out) == maxExtents-1:
		default:
			out = append(out, Range{Outside: r.Outside, Size: r.Size})
		}
	}
	return out
}

// outsides are the ids of this namespace that its children can be given: all but its root.
func outsides(own []Range) []Range {
	var out []Range
	for _, r := range own {
		if r.Inside == 0 {
			r.Inside, r.Size = 1, r.Size-1
		}
		if r.Size > 0 && len(out) < maxExtents-1 {
			out = append(out, Range{Outside: r.Inside, Size: r.Size})
		}
	}
	return out
}

// within reports whether every Outside id of ranges exists in this namespace.
func within(ranges, own []Range) bool {
	for _, r := range ranges {
		if !slices.ContainsFunc(own, func(o Range) bool {
			return r.Outside >= o.Inside && r.Outside+r.Size <= o.Inside+o.Size
		}) {
			return false
		}
	}
	return true
}

func lookup(id int, m []Range) int {
	outside, _ := find(id, m)
	return outside
}

// find returns the outside id of an inside one, or -1, and the number of ids from there to the end
// of its line.
func find(id int, m []Range) (outside, size int) {
	for _, r := range m {
		if id >= r.Inside && id < r.Inside+r.Size {
			return r.Outside + id - r.Inside, r.Inside + r.Size - id
		}
	}
	return -1, 0
}

func total(m []Range) int {
	n := 0
	for _, r := range m {
		n += r.Size
	}
	return n
}

func missing(uids, gids []Range) string {
	switch {
	case len(uids) > 0:
		return "/etc/subgid names no range for this user"
	case len(gids) > 0:
		return "/etc/subuid names no range for this user"
	default:
		return "neither /etc/subuid nor /etc/subgid names a range for this user"
	}
}

func short(size int) string {
	if size >= SandboxIDs {
		return ""
	}
	return fmt.Sprintf("only %d subordinate ids where sandboxes expect %d: files of higher owners in images cannot be unpacked", size, SandboxIDs)
}

// WorkspaceMap returns the map of a mount through which a sandbox with the range, 0 for the first,
// sees a directory of the host. Ids below [SandboxIDs] are those of the sandbox, except that owner
// and inside change places: the files of the host's owner are seen as those of inside. Higher ids
// but the owner's are unmapped. Launcher is the plan's map for users or for groups.
func (p Plan) WorkspaceMap(launcher []Range, owner, inside, number int) ([]Range, error) {
	if number < 0 || number > p.Ranges() || inside < 0 || inside >= SandboxIDs || owner < 0 {
		return nil, fmt.Errorf("no sandbox has the id %d in the range %d", inside, number)
	}
	var out []Range
	add := func(disk, seen, size int) {
		for size > 0 {
			at, left := find(1+number*SandboxIDs+seen, launcher)
			if left == 0 {
				return
			}
			n := min(size, left)
			out = append(out, Range{Inside: disk, Outside: at, Size: n})
			disk, seen, size = disk+n, seen+n, size-n
		}
	}
	low, high := min(owner, inside), max(owner, inside)
	add(0, 0, low)
	switch {
	case low == high:
		add(owner, inside, 1)
	case owner >= SandboxIDs: // inside has no counterpart
		add(inside+1, inside+1, SandboxIDs-inside-1)
		add(owner, inside, 1)
		return out, nil
	default:
		add(low, high, 1)
		add(low+1, low+1, high-low-1)
		add(high, low, 1)
	}
	add(high+1, high+1, SandboxIDs-high-1)
	return out, nil
}
