package libct

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/runtime/cgroup"
)

// Enforce plans which limits hold a sandbox on this host. An explicit limit that cannot be held is
// ErrUnenforceable.
func Enforce(spec *runtime.Spec, host *Host) (api.Enforced, error) {
	e := api.Enforced{
		Namespaces: []string{"user", "mount", "pid", "ipc", "uts", "cgroup", "net"},
		IDs:        api.IDsShared,
		Profile:    spec.Profile.Name,
		Seccomp:    spec.Profile.Name,
		NoNewPrivs: true,
		Caps:       len(spec.Profile.Capabilities),

		NonRoot:      spec.Profile.NonRoot,
		ReadOnlyRoot: spec.Profile.ReadOnlyRoot,
		Landlock:     host.Landlock,

		Memory:  "none",
		CPU:     "none",
		CPUSet:  "none",
		Pids:    "rlimit",
		IO:      "none",
		Network: api.EnforcedLoopback,
		Disk:    "none",
		Missing: slices.Clone(host.Missing),
		// Seen on Linux 6.12 and 6.18. No kernel is known that counts them: SECURITY.md, "What is not
		// defended".
		Uncounted: []string{api.UncountedLocks, api.UncountedTimestamps},
	}
	switch {
	case host.Single:
		e.IDs = api.IDsSingle
	case host.Own:
		e.IDs = api.IDsOwn
	}
	if spec.Network {
		e.Network = api.EnforcedGateway
	}
	if len(spec.Mounts) > 0 {
		e.Mounts = spec.MountIDs
	}
	if spec.Join != "" {
		e.Namespaces = slices.DeleteFunc(e.Namespaces, func(n string) bool { return n == "net" })
	}
	var missing string
	if e.Cores, missing = host.cores(spec.Profile.Seccomp); missing != "" {
		e.Missing = append(e.Missing, missing)
	}
	has := func(c string) bool { return host.Cgroup && slices.Contains(host.Controllers, c) }
	holds := func(controller, file string) bool { return has(controller) && host.hasFile(file) }
	if spec.Limits.Memory > 0 && holds("memory", "memory.max") {
		e.Memory = "cgroup"
	}
	if e.Memory == "cgroup" && !host.hasFile("memory.swap.max") {
		e.Missing = append(e.Missing, "swap limit: this kernel does not count swap by cgroup: boot with swapaccount=1, or without swap")
	}
	switch {
	case spec.Limits.CPUs > 0 && holds("cpu", "cpu.max"):
		e.CPU = "cgroup"
	case spec.Limits.CPUs > 0 && has("cpu"): // the controller is there for its weights
		e.Missing = append(e.Missing, "cpu limit: this kernel's cgroups have no cpu.max: run one that is built with CONFIG_CFS_BANDWIDTH")
	}
	if spec.Limits.CPUSet != "" && holds("cpuset", "cpuset.cpus") {
		e.CPUSet = "cgroup"
	}
	if host.hasPids() {
		e.Pids = "cgroup"
	}
	if throttles(spec.Limits.IO) && holds("io", "io.max") && spec.IODevice.Number != "" {
		e.IO = "cgroup"
		if reason := onlyDirect(&spec.IODevice, has); reason != "" {
			e.IO = "direct"
			e.Missing = append(e.Missing, "io limit: "+reason)
		}
	}
	if spec.Limits.Disk > 0 || spec.Limits.Inodes > 0 {
		e.Disk = "accounting"
	}
	if spec.Profile.NonRoot && host.Single {
		return e, fmt.Errorf("profile %q: its programs run as %s, and without subordinate ids there is only root: %w",
			spec.Profile.Name, spec.Profile.User, runtime.ErrUnenforceable)
	}
	if n := askedFor(spec); n > maxUncounted && e.Memory != "cgroup" {
		return e, fmt.Errorf("tmpfs and shm: nothing limits the sandbox's memory (no cgroup v2 memory controller is delegated to the daemon), so that they have at most %d MiB together, not %d: %w",
			maxUncounted>>20, n>>20, runtime.ErrUnenforceable)
	}
	if err := enforceWorkspace(spec, &e); err != nil {
		return e, err
	}
	if err := enforceVolumes(spec, host, &e); err != nil {
		return e, err
	}
	return e, refuse(spec, host, has)
}

// maxUncounted is the size of all file systems in memory that a sandbox may ask for where no cgroup
// counts its memory. Unlike a process's memory it is not freed by an out-of-memory kill.
const maxUncounted = 1 << 30

// askedFor returns the bytes of the file systems in memory that a request names.
func askedFor(spec *runtime.Spec) int64 {
	n := spec.ShmSize
	for _, m := range spec.Tmpfs {
		n += m.Size
	}
	return n
}

// refuse names the first explicit limit that this host cannot hold.
func refuse(spec *runtime.Spec, host *Host, has func(controller string) bool) error {
	x := &spec.Explicit
	for _, row := range api.LimitTable() {
		switch {
		case !row.IsSet(x), row.Rlimit != "", row.Controller == "":
		case !has(row.Controller):
			return fmt.Errorf("%s limit: no cgroup v2 %s controller is delegated to the daemon: %w", row.Name, row.Controller, runtime.ErrUnenforceable)
		case row.File != "" && !host.hasFile(row.File): // not every kernel has every file
			return fmt.Errorf("%s limit: this kernel's cgroups have no %s%s: %w", row.Name, row.File, builtWith[row.File], runtime.ErrUnenforceable)
		}
	}
	device := &spec.IODevice
	switch {
	case throttles(x.IO) && device.Number == "":
		return fmt.Errorf("io limit: %s: %w", device.Reason, runtime.ErrUnenforceable)
	case (x.IO.WriteBPS > 0 || x.IO.WriteIOPS > 0) && onlyDirect(device, has) != "":
		return fmt.Errorf("io limit on writes: %s: %w", onlyDirect(device, has), runtime.ErrUnenforceable) // docs/decisions/0008
	case x.IO.Weight > 0 && (device.Weight == "" || !host.hasFile(device.Weight)):
		return fmt.Errorf("io.weight: nothing weighs the requests of %s: neither is bfq its scheduler nor iocost switched on: %w",
			orNone(device.Name), runtime.ErrUnenforceable)
	case x.Nofile > host.Nofile:
		return fmt.Errorf("nofile limit: %d exceeds the daemon's own hard limit of %d: %w", x.Nofile, host.Nofile, runtime.ErrUnenforceable)
	case x.Pids > 0 && uint64(x.Pids) > host.Nproc && !host.hasPids():
		return fmt.Errorf("pids limit: %d exceeds the daemon's own hard limit of %d processes (ulimit -Hu), and no cgroup v2 pids controller is delegated to it: %w",
			x.Pids, host.Nproc, runtime.ErrUnenforceable)
	}
	return nil
}

// builtWith names the kernel's build option where a file can be missing though its controller is
// there.
var builtWith = map[string]string{"cpu.max": " (CONFIG_CFS_BANDWIDTH)", "cpu.weight": " (CONFIG_FAIR_GROUP_SCHED)", "io.max": " (CONFIG_BLK_DEV_THROTTLING)"}

// onlyDirect returns the reason why a ceiling on the device does not hold writes through the page
// cache; empty if it does. The file system must name the cgroup of a page that it writes out, and
// the kernel keeps that with the page's memory (cgroup-v2.rst, "Writeback").
func onlyDirect(device *cgroup.Device, has func(controller string) bool) string {
	switch {
	case !device.Writeback:
		return device.Reason
	case !has("memory"):
		return "without the memory controller the kernel does not know whose pages it writes out, so only direct I/O is held"
	}
	return ""
}

func orNone(device string) string {
	if device == "" {
		return "no device"
	}
	return device
}

// throttles reports whether a ceiling is asked for, which is more than a weight.
func throttles(io api.IOLimits) bool {
	io.Weight = 0
	return io != api.IOLimits{}
}

// hasFile reports whether the cgroups of sandboxes have the file.
func (h *Host) hasFile(name string) bool { return slices.Contains(h.Files, name) }

// hasPids reports whether its cgroup limits the processes of a sandbox.
func (h *Host) hasPids() bool {
	return h.Cgroup && slices.Contains(h.Controllers, "pids") && h.hasFile("pids.max")
}

// settings plans the files of a sandbox's cgroup, each with the value that holds the limit, or with
// the kernel's own if there is none. It is pure. It has every file of a limit that this host's
// cgroups have: a new cgroup begins with the settings of no limits. The memory comes last: it alone
// can be refused by the sandbox's own state.
func settings(l *api.Limits, device *cgroup.Device, host *Host) []cgroup.Setting {
	var all []cgroup.Setting
	set := func(file, value string) {
		if host.Cgroup && host.hasFile(file) {
			all = append(all, cgroup.Setting{File: file, Value: value})
		}
	}
	orMax := func(n int64) string {
		if n == 0 {
			return "max"
		}
		return strconv.FormatInt(n, 10)
	}
	set("cpuset.cpus", l.CPUSet)
	quota := "max"
	const period = 100000 // µs, the kernel's default
	if l.CPUs > 0 {
		quota = strconv.FormatInt(max(1000, int64(math.Round(l.CPUs*period))), 10) // 1 ms is the kernel's minimum
	}
	set("cpu.max", quota+" "+strconv.Itoa(period))
	set("cpu.weight", strconv.FormatInt(weight(l.CPUWeight), 10))
	pids := "max"
	if l.Pids > 0 {
		pids = strconv.FormatInt(l.Pids+initThreads, 10)
	}
	set("pids.max", pids)
	if device.Number != "" {
		set("io.max", strings.Join([]string{
			device.Number, "rbps=" + orMax(l.IO.ReadBPS), "wbps=" + orMax(l.IO.WriteBPS), "riops=" + orMax(l.IO.ReadIOPS), "wiops=" + orMax(l.IO.WriteIOPS),
		}, " "))
	}
	switch w := weight(l.IO.Weight); device.Weight {
	case "io.weight":
		set("io.weight", strconv.FormatInt(w, 10))
	case "io.bfq.weight":
		if w > 100 {
			w = 100 + (w-100)/11 // bfq's own go to 1000; systemd maps them so too
		}
		set("io.bfq.weight", strconv.FormatInt(w, 10))
	}
	group := "0"
	if l.OOMGroup {
		group = "1"
	}
	set("memory.oom.group", group)
	swap := "max"
	switch {
	case l.Swap != nil:
		swap = strconv.FormatInt(*l.Swap, 10)
	case l.Memory > 0:
		swap = "0" // or the limit on memory would be none
	}
	set("memory.swap.max", swap)
	set("memory.high", orMax(l.MemoryHigh))
	set("memory.max", orMax(l.Memory))
	return all
}

// weight is the kernel's default where none is asked for.
func weight(asked int64) int64 {
	if asked == 0 {
		return 100
	}
	return asked
}
