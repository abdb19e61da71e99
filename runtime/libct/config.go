package libct

import (
	"fmt"
	"slices"

	"github.com/opencontainers/cgroups"
	devices "github.com/opencontainers/cgroups/devices/config"
	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runc/libcontainer/specconv"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/idmap"
	"github.com/sandboxd/sandboxd/internal/launcher"
	"github.com/sandboxd/sandboxd/runtime"
)

// Host holds the launcher's knowledge of the host for planning a sandbox.
type Host struct {
	IDs         []idmap.Range    // the map of every sandbox, in the launcher's ids
	Single      bool             // no subordinate ids
	Own         bool             // each sandbox has a range of ids to itself
	Cgroup      bool             // a delegated subtree is bound at /sys/fs/cgroup
	Controllers []string         // those that its children have
	Files       []string         // those that its children's cgroups have: not every kernel has all of a controller's
	Nofile      uint64           // the launcher's hard RLIMIT_NOFILE: it cannot be exceeded
	Nproc       uint64           // and its RLIMIT_NPROC
	Pids        int              // the host's number of pids
	Core        uint64           // and its RLIMIT_CORE
	Score       int              // and its oom_score_adj: sandboxes cannot have a lower one
	CorePattern string           // the sysctl kernel.core_pattern
	IPC         bool             // the ceilings of an IPC namespace can be set by its root
	Landlock    int              // its version, where sandboxes can be held by it; 0: they cannot
	DiskReserve int64            // free bytes of the disk that sandboxes may use by half; zero: all
	Missing     []string         // wishes of the defaults that the host does not fulfil
	given       []ceiling        // the host's number for all programs of its user
	limits      []configs.Rlimit // and as resource limits
}

// initCapabilities are those of the init beyond the profile's bounding set, in the sandbox's own
// user namespace. It gives every exec a UTS namespace by which it can be found and killed whole,
// becomes the exec's user, and reaches the files of every user of the sandbox. The init passes none
// of them on: it clears its inheritable set first thing.
var initCapabilities = []string{
	"CAP_SYS_ADMIN", "CAP_SYS_PTRACE", "CAP_KILL", "CAP_SETUID", "CAP_SETGID", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER",
}

// maxFile is the size of the largest file that a sandbox can write: far above what programs need,
// so that one runaway write does not fill the disk. It is no quota.
const maxFile = 16 << 30

// maxLocked is the number of bytes that a process can lock in memory: enough for keys, and the
// kernel's default of many years.
const maxLocked = 64 << 10

// Sizes of a sandbox's file systems in memory. Each has a ceiling on files as well: an empty file
// takes a KiB of the kernel's memory, and no byte of the file system's size.
const (
	maxTerminals = 64  // all sandboxes have kernel.pty.max less kernel.pty.reserve, by default 3072
	devFiles     = 256 // of /dev: devices, links and mount points
	shmSize      = 64 << 20
	minFiles     = 1024
)

// filesOf is the ceiling on files for a file system of a size: one for each page.
func filesOf(size int64) int64 { return max(minFiles, size/4096) }

// initPath is where the sandbox finds its init: on the fresh /dev, so that no image can be in the
// way of it and no snapshot contains it.
const initPath = "/dev/sandboxd-init"

// initThreads is the number of threads that the init may have beyond the programs' limit. The init
// makes them at its start, because a program that has used up the limit must not be able to starve
// it (guest: spareThreads).
const initThreads = 16

// Plan turns a spec into libcontainer's configuration. It is pure: its value for a known spec
// stands in a golden file.
func Plan(spec *runtime.Spec, host *Host, enforced *api.Enforced) (*configs.Config, error) {
	if spec.Profile.Seccomp == nil {
		return nil, fmt.Errorf("profile %q has no seccomp filter", spec.Profile.Name)
	}
	filter, err := specconv.SetupSeccomp(spec.Profile.Seccomp)
	if err != nil {
		return nil, fmt.Errorf("convert seccomp filter: %w", err)
	}
	if filter == nil {
		return nil, fmt.Errorf("profile %q has an empty seccomp filter", spec.Profile.Name)
	}
	filter.Flags = nil // SetupSeccomp's default would switch off speculation barriers for untrusted code

	initCaps := slices.Clone(spec.Profile.Capabilities)
	for _, c := range initCapabilities {
		if !slices.Contains(initCaps, c) {
			initCaps = append(initCaps, c)
		}
	}
	c := &configs.Config{
		Rootfs:   launcher.RootfsDir,
		Hostname: spec.Hostname,
		Namespaces: configs.Namespaces{
			{Type: configs.NEWUSER},
			{Type: configs.NEWNS},
			{Type: configs.NEWPID},
			{Type: configs.NEWIPC},
			{Type: configs.NEWUTS},
			{Type: configs.NEWNET},
			{Type: configs.NEWCGROUP},
		},
		Capabilities: &configs.Capabilities{
			Bounding: spec.Profile.Capabilities, Permitted: initCaps, Effective: initCaps, Inheritable: initCaps,
		},
		Networks:        []*configs.Network{{Type: "loopback"}},
		Mounts:          append(mounts(host, spec.ShmSize), scratch(scratchOf(spec))...),
		Devices:         deviceNodes(),
		MaskPaths:       spec.Profile.MaskedPaths,
		ReadonlyPaths:   spec.Profile.ReadonlyPaths,
		Seccomp:         filter,
		NoNewPrivileges: true,
		// Each keyring counts against a quota of 200 of its owner. The launcher has one of its own,
		// empty; keyctl(2) is refused by every profile.
		NoNewKeyring: true,
		Cgroups:      cgroupConfig(spec, host),
		OomScoreAdj:  new(scoreOfInit(&spec.Limits, host, enforced)),
		Version:      "1.3.0",
	}
	if entersNetwork(spec) {
		withNetwork(c)
	}
	for _, r := range host.IDs {
		m := configs.IDMap{ContainerID: int64(r.Inside), HostID: int64(r.Outside), Size: int64(r.Size)}
		c.UIDMappings = append(c.UIDMappings, m)
		c.GIDMappings = append(c.GIDMappings, m)
	}
	nofile := min(spec.Limits.Nofile, host.Nofile)
	if nofile == 0 {
		nofile = min(1024, host.Nofile)
	}
	c.Rlimits = []configs.Rlimit{
		coreLimit(host),
		{Type: unix.RLIMIT_NOFILE, Hard: nofile, Soft: nofile},
		{Type: unix.RLIMIT_FSIZE, Hard: maxFile, Soft: maxFile},
		// These would be inherited from the daemon, and take processors from all of the host.
		{Type: unix.RLIMIT_NICE},
		{Type: unix.RLIMIT_RTPRIO},
	}
	c.Rlimits = append(c.Rlimits, limitsOfOne(host.limits)...)
	if spec.Limits.Pids > 0 && enforced.Pids == "rlimit" {
		// Counted per uid of the sandbox's own user namespace, so it is a weaker fence than pids.max.
		// More than the launcher has is not to be given: one that was asked for Enforce has refused.
		n := min(uint64(spec.Limits.Pids), host.Nproc)
		c.Rlimits = append(c.Rlimits, configs.Rlimit{Type: unix.RLIMIT_NPROC, Hard: n, Soft: n})
	}
	return c, nil
}

// cgroupConfig names the cgroup, which is there with its limits before libcontainer puts the first
// process into it.
func cgroupConfig(spec *runtime.Spec, host *Host) *cgroups.Cgroup {
	// No device rules: they need CAP_BPF on the host, and would protect nothing, for no device node
	// can be made in a user namespace and every file system of a sandbox is mounted nodev. (Linux
	// 6.17-7.1 also corrupts memory there.) The code for them, opencontainers/cgroups/devices, is not
	// even linked.
	r := &cgroups.Resources{}
	if !host.Cgroup {
		return &cgroups.Cgroup{Name: spec.ID, Rootless: true, Resources: r}
	}
	return &cgroups.Cgroup{Path: "/" + spec.ID, Resources: r}
}

func mounts(host *Host, shm int64) []*configs.Mount {
	const restricted = unix.MS_NOSUID | unix.MS_NOEXEC | unix.MS_NODEV
	if shm == 0 {
		shm = shmSize
	}
	pts := fmt.Sprintf("newinstance,ptmxmode=0666,mode=0620,max=%d", maxTerminals)
	if !host.Single {
		pts += ",gid=5" // tty, as every distribution has it; a single-id map has no such group
	}
	return []*configs.Mount{
		{Device: "proc", Source: "proc", Destination: "/proc", Flags: restricted},
		{Device: "tmpfs", Source: "tmpfs", Destination: "/dev", Flags: unix.MS_NOSUID | unix.MS_STRICTATIME, Data: fmt.Sprintf("mode=0755,size=64k,nr_inodes=%d", devFiles)},
		{Device: "devpts", Source: "devpts", Destination: "/dev/pts", Flags: unix.MS_NOSUID | unix.MS_NOEXEC, Data: pts},
		{Device: "tmpfs", Source: "shm", Destination: "/dev/shm", Flags: restricted, Data: fmt.Sprintf("mode=1777,size=%d,nr_inodes=%d", shm, filesOf(shm))},
		{Device: "mqueue", Source: "mqueue", Destination: "/dev/mqueue", Flags: restricted},
		{Device: "sysfs", Source: "sysfs", Destination: "/sys", Flags: restricted | unix.MS_RDONLY},
		{Device: "bind", Source: launcher.InitFile, Destination: initPath, Flags: unix.MS_BIND | unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV},
	}
}

// scratchOf returns the writable file systems in memory of a sandbox: the profile's, and its own,
// which replace those at the same place.
func scratchOf(spec *runtime.Spec) []api.Scratch {
	var all []api.Scratch
	for _, m := range spec.Profile.Mounts {
		if !slices.ContainsFunc(spec.Tmpfs, func(own api.Scratch) bool { return own.Path == m.Path }) {
			all = append(all, m)
		}
	}
	return append(all, spec.Tmpfs...)
}

// scratch mounts file systems in memory. Those of profiles are not noexec: programs compiled there
// are run there.
func scratch(mounts []api.Scratch) []*configs.Mount {
	var all []*configs.Mount
	for _, m := range mounts {
		flags := unix.MS_NOSUID | unix.MS_NODEV
		if m.NoExec {
			flags |= unix.MS_NOEXEC
		}
		all = append(all, &configs.Mount{
			Device: "tmpfs", Source: "tmpfs", Destination: m.Path, Flags: flags,
			Data: fmt.Sprintf("mode=%04o,size=%d,nr_inodes=%d,uid=%d,gid=%d", m.Mode, m.Size, filesOf(m.Size), m.UID, m.GID),
		})
	}
	return all
}

func deviceNodes() []*devices.Device {
	var nodes []*devices.Device
	for _, d := range []struct {
		name         string
		major, minor int64
	}{{"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0}} {
		nodes = append(nodes, &devices.Device{
			Path: "/dev/" + d.name, FileMode: 0o666,
			Rule: devices.Rule{Type: devices.CharDevice, Major: d.major, Minor: d.minor, Permissions: "rwm", Allow: true},
		})
	}
	return nodes
}
