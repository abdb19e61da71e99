package cgroup

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// place is the position of a process in the hierarchy, and decides the permitted changes; Prepare
// makes them.
type place struct {
	mount    string // where cgroup v2 is mounted, "" if it is not
	own      string // the process's cgroup, "" if the mount does not show it; never a leaf, but the cgroup above
	inLeaf   bool   // the process is in own's leaf
	readOnly bool   // the mount is
}

// find looks for the place of a process, "self" or a pid, in the mounts that we see.
func find(process string) (place, error) {
	mountinfo, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return place{}, fmt.Errorf("find cgroup v2: %w", err)
	}
	self, err := os.ReadFile(filepath.Join("/proc", process, "cgroup"))
	if err != nil {
		return place{}, fmt.Errorf("find the cgroup of process %s: %w", process, err)
	}
	return locate(string(mountinfo), string(self)), nil
}

// locate is pure: the place that follows from the contents of the two files.
func locate(mountinfo, self string) place {
	path := ""
	for line := range strings.Lines(self) {
		if p, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
			path = p
			break
		}
	}
	var at place
	for line := range strings.Lines(mountinfo) {
		left, right, ok := strings.Cut(line, " - ")
		f := strings.Fields(left)
		if !ok || len(f) < 6 || !strings.HasPrefix(right, "cgroup2 ") {
			continue
		}
		this := place{mount: f[4], own: below(f[4], f[3], path), readOnly: slices.Contains(strings.Split(f[5], ","), "ro")}
		// A later mount at the same point hides the earlier; of several points the first is taken that
		// shows us our own.
		if at.mount == "" || at.mount == this.mount || at.own == "" && this.own != "" {
			at = this
		}
	}
	// A daemon that was started where an earlier one ran finds itself in its leaf.
	if filepath.Base(at.own) == Leaf {
		at.own, at.inLeaf = filepath.Dir(at.own), true
	}
	return at
}

// below is the directory of the cgroup path where root is mounted at mount; "" where it cannot be
// seen there.
func below(mount, root, path string) string {
	// Such names lie above our cgroup namespace: those of a process that was moved there, and of a
	// mount from outside, in which the name of our own cgroup is unknown.
	if path == "" || strings.HasPrefix(path, "/..") || strings.HasPrefix(root, "/..") {
		return ""
	}
	rel, err := filepath.Rel(root, path) // in a container the mount may show a part of the hierarchy only
	if err != nil || rel == ".." || strings.HasPrefix(rel, "../") {
		return ""
	}
	return filepath.Join(mount, rel)
}

// wantsScope reports whether systemd, if it manages the host, should be asked for a cgroup.
func (p place) wantsScope() bool {
	unit := strings.HasSuffix(p.own, ".service") || strings.HasSuffix(p.own, ".scope")
	switch {
	case p.own == "" || p.own == p.mount: // nowhere, or at the root of a cgroup namespace, which systemd knows by another name
		return false
	case p.inLeaf: // of the daemon before us, or DelegateSubgroup=
		return false
	case strings.HasSuffix(p.own, ".service"): // delegated or not, or it could not be started there again
		return true
	case p.delegated():
		return false
	}
	// A user's manager does not mark the cgroups that it delegates (not until systemd 252 at least).
	// But in a unit only the owner of a delegated cgroup makes groups.
	return unit || p.manager() == ""
}

// manager is the cgroup of the user's manager that own lies in, "" for none.
func (p place) manager() string {
	for dir := p.own; len(dir) > len(p.mount); dir = filepath.Dir(dir) {
		if base := filepath.Base(dir); strings.HasPrefix(base, "user@") && strings.HasSuffix(base, ".service") {
			return dir
		}
	}
	return ""
}

// delegated reports whether systemd has delegated own, or a cgroup above it (Delegate=). An
// attribute of the directory tells. A cgroup delegated to a user's manager is not delegated to the
// programs that this runs, though an ordinary user may write there.
func (p place) delegated() bool {
	top := cmp.Or(p.manager(), p.mount)
	for dir := p.own; len(dir) > len(top); dir = filepath.Dir(dir) {
		for _, name := range []string{"trusted.delegate", "user.delegate"} {
			value := make([]byte, 8)
			if n, err := unix.Getxattr(dir, name, value); err == nil && string(value[:n]) == "1" {
				return true
			}
		}
	}
	return false
}

// refused returns the reason why no cgroup can be made in own; empty if one can.
func (p place) refused(own string) string {
	switch {
	case p.mount == "":
		return "cgroup v2 is not mounted"
	case own == "":
		return "the daemon's own cgroup lies outside of what is mounted at " + p.mount
	case p.readOnly:
		return p.mount + " is mounted read-only"
	case own == p.mount && isTop(p.mount):
		if os.Geteuid() != 0 {
			return "no cgroup is delegated to this user"
		}
		return ""
	}
	for _, f := range []string{"", "cgroup.procs", "cgroup.subtree_control"} {
		if err := unix.Access(filepath.Join(own, f), unix.W_OK); err != nil {
			return fmt.Sprintf("cgroup %s is not delegated to this user (%s: %v)", own, cmp.Or(f, "the directory"), err)
		}
	}
	return ""
}
