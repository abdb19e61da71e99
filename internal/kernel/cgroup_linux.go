package kernel

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Cgroup describes the calling process's place in cgroup v2.
type Cgroup struct {
	Mount string // where the hierarchy is mounted
	Path  string // the process's own group, as /proc/self/cgroup names it
	Dir   string // the directory of that group
	// Available are the controllers at Mount: those that v1 has taken are not among them.
	Available []string
	// Controllers are those that groups below Dir could use; a host with cgroup v1 beside v2 has none
	// or few.
	Controllers []string
	// Delegated reports whether groups may be made below Dir, processes moved and controllers handed
	// down. Why has the reason if not.
	Delegated bool
	Why       string
	// Kill says that a group can be ended as a whole (cgroup.kill, Linux 5.14).
	Kill bool
}

// ProbeCgroup finds the calling process's place in cgroup v2 and probes its rights there, with a
// group that it removes again. A host without cgroup v2 is an [*UnsupportedError].
func ProbeCgroup() (Cgroup, error) {
	own, err := readFile("self/cgroup", parseOwnCgroup)
	if err != nil {
		return Cgroup{}, fmt.Errorf("probe cgroup: %w", err)
	}
	m, err := readFile("self/mountinfo", parseCgroupMount)
	if err != nil {
		return Cgroup{}, fmt.Errorf("probe cgroup: %w", err)
	}
	if own == "" || m.point == "" {
		return Cgroup{}, &UnsupportedError{Feature: "cgroup v2", Since: "4.5", Err: errors.New("no cgroup2 file system is mounted")}
	}
	c := Cgroup{Mount: m.point, Path: own}
	if c.Available, err = controllers(m.point); err != nil {
		return c, fmt.Errorf("probe cgroup: %w", err)
	}
	// A refusal is the answer that the probe is for, and no error.
	if refused := c.try(m); refused != nil {
		c.Why = refused.Error()
	}
	return c, nil
}

// try fills in the rights in the own group, and the reasons for missing ones.
func (c *Cgroup) try(m cgroupMount) (err error) {
	if c.Dir, err = m.dir(c.Path); err != nil {
		return err
	}
	if c.Controllers, err = controllers(c.Dir); err != nil {
		return err
	}
	for _, name := range []string{"cgroup.procs", "cgroup.subtree_control"} {
		if err := unix.Access(filepath.Join(c.Dir, name), unix.W_OK); err != nil {
			return fmt.Errorf("%s in %s is not ours to write: %w", name, c.Dir, err)
		}
	}
	child, err := os.MkdirTemp(c.Dir, "sandboxd-probe-")
	if err != nil {
		return err
	}
	c.Delegated = true
	_, err = os.Stat(filepath.Join(child, "cgroup.kill"))
	c.Kill = err == nil
	return os.Remove(child)
}

func controllers(dir string) ([]string, error) {
	text, err := fs.ReadFile(os.DirFS(dir), "cgroup.controllers")
	if err != nil {
		return nil, err
	}
	return slices.Sorted(slices.Values(strings.Fields(string(text)))), nil
}

// parseOwnCgroup finds the line of the v2 hierarchy, "0::/path".
func parseOwnCgroup(r io.Reader) (string, error) {
	s := bufio.NewScanner(r)
	for s.Scan() {
		if p, ok := strings.CutPrefix(s.Text(), "0::"); ok {
			return p, nil
		}
	}
	return "", s.Err()
}

type cgroupMount struct {
	root  string // the group that is seen at point
	point string
}

// parseCgroupMount finds the first cgroup2 mount in the form of proc(5), /proc/<pid>/mountinfo.
func parseCgroupMount(r io.Reader) (cgroupMount, error) {
	s := bufio.NewScanner(r)
	for s.Scan() {
		before, after, ok := strings.Cut(s.Text(), " - ")
		fields := strings.Fields(before)
		if !ok || len(fields) < 6 || !strings.HasPrefix(after, "cgroup2 ") {
			continue
		}
		return cgroupMount{root: unescape(fields[3]), point: unescape(fields[4])}, nil
	}
	return cgroupMount{}, s.Err()
}

// dir is where group own is seen below the mount.
func (m cgroupMount) dir(own string) (string, error) {
	// A group outside our cgroup namespace is shown as "/..": it cannot be reached.
	if !path.IsAbs(own) || slices.Contains(strings.Split(own, "/"), "..") {
		return "", fmt.Errorf("own group %q lies outside the cgroup namespace", own)
	}
	if m.root == "/" {
		return filepath.Join(m.point, own), nil
	}
	if own != m.root && !strings.HasPrefix(own, m.root+"/") {
		return "", fmt.Errorf("own group %q is not below %q, which is mounted at %s", own, m.root, m.point)
	}
	return filepath.Join(m.point, strings.TrimPrefix(own, m.root)), nil
}

// unescape undoes the kernel's octal form of white space and backslash.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

// readFile parses a file of /proc; one that is not there yields the zero value.
func readFile[T any](name string, parse func(io.Reader) (T, error)) (T, error) {
	var zero T
	f, err := os.DirFS("/proc").Open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return zero, nil
	}
	if err != nil {
		return zero, err
	}
	defer f.Close()
	return parse(f)
}
