package harness

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// A Footprint holds everything that a daemon, its launcher and its sandboxes were seen to own on
// the host. It is gathered while they run, by descent from the daemon and the launcher, so that
// other daemons on the same machine do not disturb it.
type Footprint struct {
	mu sync.Mutex // guards the maps

	processes  map[int]string       // pid -> start time and command, so that a reused pid is not taken for ours
	namespaces map[string]namespace // "net:[4026532008]" -> the process that was seen in it
	cgroups    map[string]struct{}  // directories
	given      map[string]struct{}  // directories and namespaces that the test made for the daemon: not the daemon's to remove
}

// A namespace is one that a process of ours was in.
type namespace struct {
	owner string // the process that was seen in it
	// others are processes in it that are not known to be ours: pid -> mark. The kernel gives both
	// pids and namespace numbers again, and other daemons' sandboxes come to have them.
	others map[int]string
}

func newFootprint() *Footprint {
	return &Footprint{processes: map[int]string{}, namespaces: map[string]namespace{}, cgroups: map[string]struct{}{}, given: map[string]struct{}{}}
}

// Mark remembers everything that is ours just now. All of it must be gone when the daemon has shut
// down.
func (d *Daemon) Mark(t testing.TB) {
	t.Helper()
	d.mark(t, false)
}

// mark is Mark. With added it does not look again at the namespaces and the cgroups of processes
// that it has seen before: a later Mark does.
func (d *Daemon) mark(t testing.TB, added bool) {
	t.Helper()
	roots := []int{d.PID()}
	var info struct {
		Launcher int `json:"launcher_pid"`
	}
	// Not the test's context: that has ended when its clean-up marks for the last time.
	ctx, cancel := context.WithTimeout(context.Background(), testenv.HungAfter)
	defer cancel()
	if err := d.Call(ctx, http.MethodGet, "/v1/system", nil, &info); err == nil && info.Launcher > 0 {
		roots = append(roots, info.Launcher)
	}
	if err := d.marks.mark(roots, added); err != nil {
		t.Fatalf("look at our processes: %v", err)
	}
}

// Processes are the pids of the sandbox's processes as the host counts, init first.
func (s *Sandbox) Processes(t testing.TB) []int {
	t.Helper()
	if s.PID <= 0 {
		t.Fatalf("the API shows no pid for sandbox %s", s.ID)
	}
	table, err := processTable()
	if err != nil {
		t.Fatal(err)
	}
	return descendants(table, s.PID)
}

// process is one line of the host's process table.
type process struct {
	pid, ppid int
	start     uint64 // ticks since boot
	mark      string // start time and command
}

// processTable lists the host's processes, but for those of the kernel.
func processTable() ([]process, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	kernel := kernelThreads()
	var table []process
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || kernel[pid] {
			continue
		}
		p, err := readProcess(pid)
		if err != nil {
			continue // it has ended
		}
		table = append(table, p)
	}
	return table, nil
}

// kernelThreads returns the pids of the kernel's threads, most of an idle host's processes. One
// file names them all. It is empty where another process has their parent's pid, as in containers.
func kernelThreads() map[int]bool {
	const parent, threadOfKernel = 2, 0x00200000 // kthreadd; PF_KTHREAD of linux/sched.h
	_, fields, err := readStat(parent)
	if err != nil {
		return nil
	}
	if flags, err := strconv.ParseUint(fields[statFlags], 10, 64); err != nil || flags&threadOfKernel == 0 {
		return nil
	}
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", parent, parent))
	if err != nil { // a kernel without CONFIG_PROC_CHILDREN
		return nil
	}
	pids := map[int]bool{}
	for field := range strings.FieldsSeq(string(data)) {
		if pid, err := strconv.Atoi(field); err == nil {
			pids[pid] = true
		}
	}
	return pids
}

// Fields of proc_pid_stat(5), which counts from 1 and from the pid, after the command.
const statParent, statFlags, statStart = 1, 6, 19

// readStat returns the command of a process and the fields after it, up to statStart at least.
func readStat(pid int) (command string, fields []string, err error) {
	// Tests read hundreds of these files some ten times each: [os.ReadFile] takes twice the system
	// calls.
	fd, err := unix.Open("/proc/"+strconv.Itoa(pid)+"/stat", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", nil, err
	}
	data := make([]byte, 1024)
	n, err := unix.Read(fd, data)
	_ = unix.Close(fd)
	if err != nil {
		return "", nil, err
	}
	data = data[:n]
	// The command stands in parentheses and may hold anything, parentheses too.
	open, closed := bytes.IndexByte(data, '('), bytes.LastIndexByte(data, ')')
	if open < 0 || closed < open {
		return "", nil, errors.New("no command in stat")
	}
	fields = strings.Fields(string(data[closed+1:]))
	if len(fields) <= statStart {
		return "", nil, errors.New("stat is short")
	}
	return string(data[open+1 : closed]), fields, nil
}

func readProcess(pid int) (process, error) {
	command, fields, err := readStat(pid)
	if err != nil {
		return process{}, err
	}
	parent, err := strconv.Atoi(fields[statParent])
	if err != nil {
		return process{}, err
	}
	start, err := strconv.ParseUint(fields[statStart], 10, 64)
	if err != nil {
		return process{}, err
	}
	return process{pid: pid, ppid: parent, start: start, mark: fields[statStart] + " " + command}, nil
}

// descendants lists root and everything below it, root first.
func descendants(table []process, root int) []int {
	children := map[int][]int{}
	alive := false
	for _, p := range table {
		children[p.ppid] = append(children[p.ppid], p.pid)
		alive = alive || p.pid == root
	}
	if !alive {
		return nil
	}
	all := []int{root}
	for i := 0; i < len(all); i++ {
		all = append(all, children[all[i]]...)
	}
	return all
}

func (f *Footprint) mark(roots []int, added bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	table, err := processTable()
	if err != nil {
		return err
	}
	marks := map[int]string{}
	started := map[int]uint64{}
	for _, p := range table {
		marks[p.pid], started[p.pid] = p.mark, p.start
	}
	began := uint64(math.MaxUint64) // the first of those that are looked at
	seen := map[string]namespace{}
	ours := map[int]bool{}
	hosts := namespacesOf(os.Getpid())
	for _, root := range roots {
		for _, pid := range descendants(table, root) {
			ours[pid] = true
			if known, ok := f.processes[pid]; added && ok && known == marks[pid] {
				continue
			}
			f.processes[pid] = marks[pid]
			began = min(began, started[pid])
			for ns, link := range namespacesOf(pid) {
				if own, ok := hosts[ns]; ok && own != link {
					seen[link] = namespace{fmt.Sprintf("%d (%s)", pid, marks[pid]), map[int]string{}}
				}
			}
			if dir := cgroupOf(pid); dir != "" {
				f.cgroups[dir] = struct{}{}
			}
		}
	}
	for _, p := range table {
		if ours[p.pid] || p.start < began {
			continue
		}
		for _, link := range namespacesOf(p.pid) {
			if ns, ok := seen[link]; ok {
				ns.others[p.pid] = p.mark
			}
		}
	}
	if added {
		for link, ns := range seen {
			maps.Copy(ns.others, f.namespaces[link].others)
		}
	}
	maps.Copy(f.namespaces, seen)
	for link := range f.given {
		delete(f.namespaces, link)
	}
	if dir := cgroupOf(os.Getpid()); dir != "" {
		delete(f.cgroups, dir)
	}
	for dir := range f.given {
		delete(f.cgroups, dir)
	}
	return nil
}

// namespacesOf reads the namespaces of a process: kind -> link. Another user's are out of reach,
// and left out.
func namespacesOf(pid int) map[string]string {
	dir, err := unix.Open("/proc/"+strconv.Itoa(pid)+"/ns", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	defer func() { _ = unix.Close(dir) }()
	found := map[string]string{}
	link := make([]byte, 64)
	for _, kind := range []string{"net", "mnt", "pid", "user", "ipc", "uts", "cgroup"} {
		if n, err := unix.Readlinkat(dir, kind, link); err == nil {
			found[kind] = string(link[:n])
		}
	}
	return found
}

// cgroupOf is the directory of a process in the cgroup v2 hierarchy, empty for its root.
func cgroupOf(pid int) string {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(data)) {
		path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::")
		if !ok || path == "/" {
			continue
		}
		for _, mount := range []string{"/sys/fs/cgroup/unified", "/sys/fs/cgroup"} {
			if _, err := os.Stat(filepath.Join(mount, "cgroup.procs")); err == nil {
				return filepath.Join(mount, path)
			}
		}
	}
	return ""
}

// left lists the remains of the footprint: the processes, or all else when those have ended.
func (f *Footprint) left(dirs ...string) []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var left []string
	for pid, mark := range f.processes {
		if p, err := readProcess(pid); err == nil && p.mark == mark {
			left = append(left, fmt.Sprintf("process %d (%s)", pid, mark))
		}
	}
	if len(left) > 0 {
		slices.Sort(left)
		return left
	}
	suspects := map[int]string{}
	for _, ns := range f.namespaces {
		maps.Copy(suspects, ns.others)
	}
	if table, err := processTable(); err == nil {
		marks := map[int]string{}
		for _, p := range table {
			marks[p.pid] = p.mark
		}
		isOurs := func(pid int) bool { mark, ok := f.processes[pid]; return ok && mark == marks[pid] }
		for _, p := range table {
			if _, ok := suspects[p.pid]; !ok && !isOurs(p.pid) && !isOurs(p.ppid) {
				continue
			}
			for _, link := range namespacesOf(p.pid) {
				ns, ok := f.namespaces[link]
				if ok && (isOurs(p.pid) || isOurs(p.ppid) || ns.others[p.pid] == p.mark) {
					left = append(left, fmt.Sprintf("namespace %s of %s, held by process %d (%s)", link, ns.owner, p.pid, p.mark))
				}
			}
		}
	}
	for dir := range f.cgroups {
		if _, err := os.Stat(dir); err == nil {
			left = append(left, "cgroup "+dir)
		}
	}
	if data, err := os.ReadFile("/proc/self/mountinfo"); err == nil {
		for line := range strings.Lines(string(data)) {
			for _, dir := range dirs {
				if strings.Contains(line, dir) {
					left = append(left, "mount "+strings.TrimSpace(line))
				}
			}
			for link := range f.namespaces {
				if strings.Contains(line, link) { // a namespace that is kept by a bind mount
					left = append(left, "mount "+strings.TrimSpace(line))
				}
			}
		}
	}
	slices.Sort(left)
	return left
}

// check fails the test for everything that is still there a while after it should have gone.
func (f *Footprint) check(t testing.TB, when string, dirs ...string) {
	t.Helper()
	// The kernel takes namespaces down after the last process has gone.
	deadline := time.After(testenv.HungAfter)
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		left := f.left(dirs...)
		if len(left) == 0 {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Errorf("left %s:\n  %s", when, strings.Join(left, "\n  "))
			return
		}
	}
}

// A Snapshot holds the resources of a running daemon at one moment. They must be the same before a
// sandbox was made and after it was deleted.
type Snapshot struct {
	Processes   int      // daemon, launcher and everything below them
	Namespaces  int      // those they are in
	Cgroups     int      // cgroup directories they are in
	Descriptors int      // of the daemon
	LauncherFDs int      // of the launcher; -1 where it may not be looked at
	Mounts      []string // of the launcher's own mount namespace: "where type"
	Dirs        []string // below the data and runtime directories
}

// Warm makes and deletes a sandbox, so that things made only once, for the first (the host image,
// the launcher's own tables), are there before a snapshot is taken.
func (d *Daemon) Warm(t testing.TB) {
	t.Helper()
	d.Create(t, api.CreateSandbox{}).Delete(t)
}

// Snapshot looks at the daemon and its launcher.
func (d *Daemon) Snapshot(t testing.TB) Snapshot {
	t.Helper()
	d.HTTP.CloseIdleConnections()
	launcher := d.System(t).Launcher
	d.HTTP.CloseIdleConnections()
	f := newFootprint()
	roots := []int{d.PID()}
	if launcher > 0 {
		roots = append(roots, launcher)
	}
	if err := f.mark(roots, false); err != nil {
		t.Fatal(err)
	}
	s := Snapshot{
		Processes: len(f.processes), Namespaces: len(f.namespaces), Cgroups: len(f.cgroups),
		Descriptors: countDir(fmt.Sprintf("/proc/%d/fd", d.PID())),
		LauncherFDs: countDir(fmt.Sprintf("/proc/%d/fd", launcher)),
	}
	if data, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", launcher)); err == nil {
		for line := range strings.Lines(string(data)) {
			before, after, _ := strings.Cut(line, " - ") // proc_pid_mountinfo(5): optional fields end with a dash
			if f, g := strings.Fields(before), strings.Fields(after); len(f) > 4 && len(g) > 0 {
				s.Mounts = append(s.Mounts, f[4]+" "+g[0])
			}
		}
	}
	for _, top := range []string{d.DataDir, d.RuntimeDir} {
		err := filepath.WalkDir(top, func(path string, e fs.DirEntry, err error) error {
			if err != nil {
				if e != nil && e.IsDir() { // owned by a subordinate id
					return fs.SkipDir
				}
				return nil
			}
			rel, _ := filepath.Rel(filepath.Dir(top), path)
			s.Dirs = append(s.Dirs, rel)
			// The inside of a layer or a sandbox is content, not state.
			if e.IsDir() && strings.Count(rel, "/") >= 2 {
				return fs.SkipDir
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return s
}

func countDir(dir string) int {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return -1
	}
	return len(entries)
}

// Diff says in what two snapshots differ, empty where they do not.
func (s Snapshot) Diff(after Snapshot) []string {
	var diff []string
	for _, n := range []struct {
		name          string
		before, after int
	}{
		{"processes", s.Processes, after.Processes},
		{"namespaces", s.Namespaces, after.Namespaces},
		{"cgroups", s.Cgroups, after.Cgroups},
		{"descriptors of the daemon", s.Descriptors, after.Descriptors},
		{"descriptors of the launcher", s.LauncherFDs, after.LauncherFDs},
	} {
		if n.after > n.before {
			diff = append(diff, fmt.Sprintf("%s: %d before, %d after", n.name, n.before, n.after))
		}
	}
	known := slices.Clone(s.Mounts)
	for _, m := range after.Mounts {
		if i := slices.Index(known, m); i >= 0 {
			known = slices.Delete(known, i, i+1) // a second one may lie on the first
		} else {
			diff = append(diff, "new mount of the launcher: "+m)
		}
	}
	for _, dir := range after.Dirs {
		if !slices.Contains(s.Dirs, dir) {
			diff = append(diff, "new: "+dir)
		}
	}
	return diff
}

// NothingLeaked waits until the daemon holds no more than it held before, but for new directories
// below those allowed ("data/layers" where an image was pulled).
func (d *Daemon) NothingLeaked(t testing.TB, before Snapshot, allowed ...string) {
	t.Helper()
	Eventually(t, func() error {
		diff := slices.DeleteFunc(before.Diff(d.Snapshot(t)), func(line string) bool {
			return slices.ContainsFunc(allowed, func(dir string) bool { return strings.HasPrefix(line, "new: "+dir) })
		})
		if len(diff) > 0 {
			return fmt.Errorf("leaked:\n  %s", strings.Join(diff, "\n  "))
		}
		return nil
	})
}

// Threads is the number of threads on the whole machine, those of the kernel too.
func Threads(t testing.TB) (n int) {
	t.Helper()
	data, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		t.Fatal(err)
	}
	_, all, _ := strings.Cut(string(data), "/")
	if _, err := fmt.Sscan(all, &n); err != nil {
		t.Fatalf("%q: %v", data, err)
	}
	return n
}
