package libct

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/opencontainers/runc/libcontainer/configs"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/kernel"
)

// Ceilings of user namespaces.
//
// One sandbox could use up all that the kernel counts for a user of the host, over all of that
// user's programs. But the kernel counts in each user namespace: a program's use is charged to its
// user in its own namespace, to that namespace's creator in the namespace above, and so on up to
// the user of the host. Each namespace has a ceiling that holds each of its users
// (user_namespaces(7), proc_sys_user(5)). So such resources are bounded twice:
//
//   - In the launcher's namespace, where all sandboxes count as one user, because the launcher has
//     made their namespaces. Together they have half of the host's number; the other half stays for
//     the other programs of its user.
//   - In a sandbox's namespace each user has half of that again, so that none takes all of it. A
//     program that may become several users (CAP_SETUID) is held by the first ceiling alone.
//
// Pending signals with POSIX timers, the bytes of POSIX message queues, and locked memory are
// counted alike.
// There the ceiling of a namespace for all below is the resource limit of its creator (ucounts
// since Linux 5.14), and each process has one of its own.
//
// So are processes and threads, but there the launcher cannot be held to the sum of its sandboxes:
// the process that makes a sandbox's namespace halves the limit just before (see processes.go).
//
// Those in files are set from inside with CAP_SYS_RESOURCE over the namespace, which no program of
// a sandbox has, nor its init; the files are read-only to programs besides.
//
// System V IPC outlives its programs, and the kernel's own ceilings on it are those of a whole
// host. So its namespace has ceilings too, which its root can set since Linux 6.9.

// ceiling is one of a namespace: its file below /proc/sys, and how many of the thing each user of a
// user namespace may have, or all of an IPC namespace.
type ceiling struct {
	Name string `json:"name"`
	Most int64  `json:"most"`
	// More are the numbers of the file that come before Most.
	More string `json:"more,omitempty"`
}

func (c *ceiling) text() string { return c.More + strconv.FormatInt(c.Most, 10) }

// shared are the resources that the host counts for all programs of a user: the files, below
// /proc/sys, of a namespace's ceiling and of the host's number.
var shared = []struct{ name, host string }{
	{"user/max_inotify_instances", "fs/inotify/max_user_instances"},
	{"user/max_inotify_watches", "fs/inotify/max_user_watches"},
}

// closed are the namespaces that cannot be made in a sandbox, even if a filter permits the call:
// most local privilege escalations of the last years begin with one. UTS namespaces stay: the init
// marks execs by them. So do mount namespaces, which take CAP_SYS_ADMIN in this namespace: a
// detached mount counts as one, and libcontainer makes some, to read procfs at a place over which
// no program can have mounted.
var closed = []string{"user", "pid", "net", "ipc", "cgroup", "time"}

// sharedLimits are resource limits that are counted in this way, with the largest useful value for
// a program: a hundred thousand timers take the kernel so long to remove that other processes wait
// for it.
var sharedLimits = []configs.Rlimit{
	{Type: unix.RLIMIT_SIGPENDING, Hard: 1024},
	{Type: unix.RLIMIT_MSGQUEUE, Hard: 256 << 10},
	{Type: unix.RLIMIT_MEMLOCK, Hard: maxLocked},
}

// limitsOfAll plans those of the launcher, from the host's. It is pure.
func limitsOfAll(host []configs.Rlimit) []configs.Rlimit {
	var all []configs.Rlimit
	for _, l := range host {
		all = append(all, configs.Rlimit{Type: l.Type, Hard: l.Hard / 2, Soft: l.Hard / 2})
	}
	return all
}

// limitsOfOne plans those of a sandbox's processes. It is pure.
func limitsOfOne(host []configs.Rlimit) []configs.Rlimit {
	var all []configs.Rlimit
	for i, l := range host {
		most := min(l.Hard/4, sharedLimits[i].Hard)
		all = append(all, configs.Rlimit{Type: l.Type, Hard: most, Soft: most})
	}
	return all
}

// ofAll plans the ceilings of the launcher's namespace, from the host's. It is pure.
func ofAll(host []ceiling) []ceiling { return part(host, 2) }

// ofOne plans those of a sandbox with a limit of memory, in bytes, or 0. Ipc means that its IPC
// namespace can have some. It is pure.
func ofOne(host []ceiling, memory int64, ipc bool) []ceiling {
	all := part(host, 4)
	for _, kind := range closed {
		all = append(all, ceiling{Name: "user/max_" + kind + "_namespaces"})
	}
	if ipc {
		all = append(all, ofIPC(memory)...)
	}
	return all
}

// ofIPC plans those of System V IPC: as many bytes of shared memory as of memory, and some MiB in
// queues and semaphores. Databases need one or two of each. It is pure.
func ofIPC(memory int64) []ceiling {
	all := []ceiling{
		{Name: "kernel/msgmni", Most: 32},                         // queues, of 16 KiB (msgmnb) and as many messages, of no length too
		{Name: "kernel/sem", More: "32000 32000 500 ", Most: 256}, // in a set, in all, in a call; sets
		{Name: "kernel/shmmni", Most: 256},
	}
	if memory > 0 {
		all = append(all, ceiling{Name: "kernel/shmall", Most: max(1, memory/4096)}) // pages
	}
	return all
}

func part(host []ceiling, n int64) []ceiling {
	var all []ceiling
	for _, c := range host {
		all = append(all, ceiling{Name: c.Name, Most: c.Most / n})
	}
	return all
}

// given reads the host's numbers of all shared resources.
func given() (all []ceiling, limits []configs.Rlimit, err error) {
	for _, s := range shared {
		text, err := os.ReadFile("/proc/sys/" + s.host)
		if errors.Is(err, os.ErrNotExist) {
			continue // a kernel without inotify
		}
		if err != nil {
			return nil, nil, fmt.Errorf("read what the host gives a user: %w", err)
		}
		most, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
		if err != nil {
			return nil, nil, fmt.Errorf("read what the host gives a user: %s: %w", s.host, err)
		}
		all = append(all, ceiling{Name: s.name, Most: most})
	}
	for _, l := range sharedLimits {
		var own unix.Rlimit
		if err := unix.Getrlimit(l.Type, &own); err != nil {
			return nil, nil, fmt.Errorf("read what the host gives a user: limit %d: %w", l.Type, err)
		}
		limits = append(limits, configs.Rlimit{Type: l.Type, Hard: own.Cur}) // the soft one, which others of the user have too
	}
	return all, limits, nil
}

// boundProcesses makes the launcher's soft limit of processes one that means something: half of it
// is the ceiling of all sandboxes together (processes.go), which must leave pids to others. No user
// has more processes than the host has pids, so the launcher loses nothing. Since Linux 6.14 the
// sysctl pid_max that the launcher sees is that of its own PID namespace: pids is the host's.
func boundProcesses(pids int) error {
	var own unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NPROC, &own); err != nil {
		return fmt.Errorf("read own limit of processes: %w", err)
	}
	threads, _, err := kernel.Sysctl("kernel/threads-max")
	if err != nil {
		return fmt.Errorf("read the host's number of threads: %w", err)
	}
	own.Cur = min(own.Cur, uint64(threads), uint64(pids)) //nolint:gosec // G115: neither is negative
	if err := unix.Setrlimit(unix.RLIMIT_NPROC, &own); err != nil {
		return fmt.Errorf("set limit of processes: %w", err)
	}
	return nil
}

// boundAll sets the bounds of all sandboxes together, in the launcher, from the host's numbers.
func (h *Host) boundAll() error {
	if err := boundProcesses(h.Pids); err != nil {
		return err
	}
	proc, err := ownProc()
	if err != nil {
		return err
	}
	defer unix.Close(proc)
	if err := hold(proc, ofAll(h.given)); err != nil {
		return err
	}
	for _, l := range limitsOfAll(h.limits) {
		if err := unix.Setrlimit(l.Type, &unix.Rlimit{Cur: l.Soft, Max: l.Hard}); err != nil {
			return fmt.Errorf("set limit %d: %w", l.Type, err)
		}
	}
	return nil
}

// hold sets ceilings in the namespaces of the calling thread, by a procfs of its own. In the
// launcher's, /proc/sys/user has one entry of each name for every user namespace that it was looked
// up in, and a lookup compares with them all (proc_sys_compare): among 200 sandboxes that took a
// millisecond of a creation. Nor can anything be mounted over this one (CVE-2025-52881).
func hold(proc int, all []ceiling) error {
	dir, err := unix.Openat(proc, "sys", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("set ceilings: open sys of a procfs: %w", err)
	}
	defer unix.Close(dir)
	for _, c := range all {
		fd, err := unix.Openat(dir, c.Name, unix.O_RDWR|unix.O_CLOEXEC, 0)
		if errors.Is(err, unix.ENOENT) {
			continue // max_time_namespaces came with Linux 5.6; without the counter there is no such namespace
		}
		if err == nil {
			f := os.NewFile(uintptr(fd), c.Name)
			err = errors.Join(c.set(f), f.Close())
		}
		if err != nil {
			return fmt.Errorf("set ceiling %s: %w", c.Name, err)
		}
	}
	return nil
}

// ownProc returns a fresh procfs of the caller's PID namespace, which is mounted nowhere.
func ownProc() (int, error) {
	fs, err := unix.Fsopen("proc", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("make a procfs: %w", err)
	}
	defer unix.Close(fs)
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, fmt.Errorf("make a procfs: %w", err)
	}
	mnt, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return -1, fmt.Errorf("make a procfs: %w", err)
	}
	return mnt, nil
}

func (c *ceiling) set(f *os.File) error {
	want := c.text()
	if _, err := f.WriteString(want); err != nil {
		return err
	}
	var held [64]byte
	n, err := f.ReadAt(held[:], 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if got := strings.Join(strings.Fields(string(held[:n])), " "); got != want {
		return fmt.Errorf("it is to be %s, and the kernel holds %q", want, got)
	}
	return nil
}
