// Package cgroup finds, prepares and leaves the cgroup v2 subtree that the host delegates to the daemon.
//
// The subtree looks like this, where own is the cgroup that the daemon was started in:
//
//	own/                      controllers enabled for its children; no process of its own (cgroups.rst, "no internal process")
//	├── supervisor/           the daemon
//	└── sandboxes/            [Subtree.Path]; given to the launcher's root, bound at the launcher's /sys/fs/cgroup
//	    ├── launcher/         the launcher: in here so that sandboxes/ is the common ancestor it must be able to write to
//	    └── <sandbox id>/     one per sandbox, with its limits
//
// A daemon in the root cgroup (root, without systemd) has a directory of its own below the root in the place of own.
package cgroup

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// wanted are the controllers that limits need.
var wanted = []string{"cpu", "memory", "pids", "io"}

// Subtree is what the host delegates. The zero value delegates nothing.
type Subtree struct {
	Mount       string   // where cgroup v2 is mounted, "" if it is not
	Path        string   // directory for sandboxes, "" if nothing is delegated
	Controllers []string // those enabled for the children of Path, sorted
	Reason      string   // what is missing and the way out; "" if nothing is
}

// Has reports whether a limit of the controller can be enforced.
func (s Subtree) Has(controller string) bool { return slices.Contains(s.Controllers, controller) }

const remedy = `start the daemon where a subtree is delegated: systemd-run --user --scope -p "Delegate=cpu memory pids io" sandboxd serve`

// Prepare finds the delegated subtree, moves the daemon into its own leaf and enables what controllers there are. Name
// keeps the directories of several daemons of root apart. What the host does not give is told in Reason, it is no error.
func Prepare(name string) (Subtree, error) {
	mountinfo, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return Subtree{}, fmt.Errorf("find cgroup v2: %w", err)
	}
	self, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return Subtree{}, fmt.Errorf("find own cgroup: %w", err)
	}
	mount, own := locate(string(mountinfo), string(self))
	s := Subtree{Mount: mount}
	if mount == "" {
		s.Reason = "cgroup v2 is not mounted: boot with systemd.unified_cgroup_hierarchy=1"
		return s, nil
	}
	if own == "" {
		s.Reason = "the daemon's own cgroup lies outside of what is mounted at " + mount + "; " + remedy
		return s, nil
	}
	if own == mount {
		if os.Geteuid() != 0 {
			s.Reason = "no cgroup is delegated to this user; " + remedy
			return s, nil
		}
		own = filepath.Join(mount, "sandboxd-"+name)
		if err := os.Mkdir(own, 0o755); err != nil && !errors.Is(err, os.ErrExist) { //nolint:gosec // G301: cgroups are readable by all
			s.Reason = fmt.Sprintf("a cgroup cannot be made: %v", err)
			return s, nil
		}
		enable(mount)
	} else {
		// A daemon that was killed and started again by the same supervisor may find itself in its old leaf.
		if filepath.Base(own) == "supervisor" {
			own = filepath.Dir(own)
		}
		for _, f := range []string{"", "cgroup.procs", "cgroup.subtree_control"} {
			if !writable(filepath.Join(own, f)) {
				s.Reason = "cgroup " + own + " is not delegated to this user; " + remedy
				return s, nil
			}
		}
		if err := vacate(own); err != nil {
			s.Reason = fmt.Sprintf("the daemon cannot move into a leaf of its own: %v; %s", err, remedy)
			return s, nil
		}
	}
	enable(own)
	s.Path = filepath.Join(own, "sandboxes")
	if err := os.Mkdir(s.Path, 0o755); err != nil && !errors.Is(err, os.ErrExist) { //nolint:gosec // G301: as above
		return Subtree{}, fmt.Errorf("make cgroup: %w", err)
	}
	s.Controllers = enable(s.Path)
	var lacking []string
	for _, c := range []string{"memory", "cpu", "pids"} {
		if !s.Has(c) {
			lacking = append(lacking, c)
		}
	}
	if len(lacking) > 0 {
		s.Reason = fmt.Sprintf("controllers %s are not available in %s; %s", strings.Join(lacking, ", "), own, remedy)
	}
	return s, nil
}

// locate is pure: where cgroup v2 is mounted and which directory is the process's own, given the two files' contents.
func locate(mountinfo, self string) (mount, own string) {
	var root string
	for line := range strings.Lines(mountinfo) {
		left, right, ok := strings.Cut(line, " - ")
		if f := strings.Fields(left); ok && len(f) >= 5 && strings.HasPrefix(right, "cgroup2 ") {
			root, mount = f[3], f[4]
			break
		}
	}
	if mount == "" {
		return "", ""
	}
	for line := range strings.Lines(self) {
		if path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
			// In a container the mount may show a part of the hierarchy only.
			rel, err := filepath.Rel(root, path)
			if strings.HasPrefix(path, "/..") { // above our cgroup namespace: there is no name for it here
				return mount, ""
			}
			if err != nil || rel == ".." || strings.HasPrefix(rel, "../") {
				return mount, ""
			}
			return mount, filepath.Join(mount, rel)
		}
	}
	return mount, ""
}

func writable(path string) bool { return unix.Access(path, unix.W_OK) == nil }

// vacate moves every process of own into its leaf "supervisor": they are the daemon and what its unit started beside it.
func vacate(own string) error {
	leaf := filepath.Join(own, "supervisor")
	if err := os.Mkdir(leaf, 0o755); err != nil && !errors.Is(err, os.ErrExist) { //nolint:gosec // G301: as above
		return err
	}
	f, err := os.Open(filepath.Join(own, "cgroup.procs"))
	if err != nil {
		return err
	}
	defer f.Close()
	pids := []string{strconv.Itoa(os.Getpid())} // may be in the leaf already
	for s := bufio.NewScanner(f); s.Scan(); {
		pids = append(pids, s.Text())
	}
	for _, pid := range pids {
		if err := os.WriteFile(filepath.Join(leaf, "cgroup.procs"), []byte(pid), 0); err != nil && !errors.Is(err, unix.ESRCH) {
			return err
		}
	}
	return nil
}

// enable turns on for the children of dir each wanted controller that dir has, and returns what is on afterwards.
func enable(dir string) []string {
	for _, c := range wanted {
		// One at a time: a controller that cannot be enabled must not keep the others off.
		_ = os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+c), 0)
	}
	data, err := os.ReadFile(filepath.Join(dir, "cgroup.subtree_control"))
	if err != nil {
		return nil
	}
	on := strings.Fields(string(data))
	slices.Sort(on)
	return on
}

// EnterLauncher puts the launcher into its leaf and gives the subtree to its root: uid and gid of the host.
func (s Subtree) EnterLauncher(pid, uid, gid int) error {
	leaf := filepath.Join(s.Path, "launcher")
	if err := os.Mkdir(leaf, 0o755); err != nil && !errors.Is(err, os.ErrExist) { //nolint:gosec // G301: as above
		return fmt.Errorf("make the launcher's cgroup: %w", err)
	}
	if err := os.WriteFile(filepath.Join(leaf, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0); err != nil {
		return fmt.Errorf("move the launcher into its cgroup: %w", err)
	}
	if os.Geteuid() != 0 {
		return nil // the launcher's root is this uid
	}
	for _, dir := range []string{s.Path, leaf} {
		for _, f := range []string{"", "cgroup.procs", "cgroup.subtree_control", "cgroup.threads"} {
			if err := os.Chown(filepath.Join(dir, f), uid, gid); err != nil {
				return fmt.Errorf("give the cgroup to the launcher: %w", err)
			}
		}
	}
	return nil
}

// Leave removes what Prepare made, as far as it is empty: the leaf that the daemon itself is in stays to whoever made
// the cgroup above it. The launcher must have been told to end; Leave waits until its last process has, or the context.
func (s Subtree) Leave(ctx context.Context) error {
	if s.Path == "" {
		return nil
	}
	if err := waitEmpty(ctx, s.Path); err != nil {
		return fmt.Errorf("leave cgroup: %w", err)
	}
	var errs []error
	for _, dir := range []string{filepath.Join(s.Path, "launcher"), s.Path} {
		if err := unix.Rmdir(dir); err != nil && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, fmt.Errorf("remove cgroup %s: %w", dir, err))
		}
	}
	if own := filepath.Dir(s.Path); strings.HasPrefix(filepath.Base(own), "sandboxd-") {
		if err := unix.Rmdir(own); err != nil && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, fmt.Errorf("remove cgroup %s: %w", own, err))
		}
	}
	return errors.Join(errs...)
}

// waitEmpty waits until no process is left in dir or below. The kernel tells of changes of cgroup.events by POLLPRI.
func waitEmpty(ctx context.Context, dir string) error {
	f, err := os.Open(filepath.Join(dir, "cgroup.events"))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	buf := make([]byte, 256)
	for {
		n, err := f.ReadAt(buf, 0)
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if strings.Contains(string(buf[:n]), "populated 0") {
			return nil
		}
		// The poll is short so that the end of the context is noticed.
		_, err = unix.Poll([]unix.PollFd{{Fd: int32(f.Fd()), Events: unix.POLLPRI}}, 100) //nolint:gosec // G115: a descriptor
		if err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
		if ctx.Err() != nil {
			return fmt.Errorf("processes are left in %s: %w", dir, ctx.Err())
		}
	}
}
