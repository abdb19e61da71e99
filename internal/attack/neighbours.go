package attack

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Neighbours.
//
// The kernel counts many resources beyond the bounds of a sandbox: for a user of the host, for the
// whole host, or not at all except as memory. One sandbox that takes all of such a resource hurts
// its neighbours, the daemon and the host's other users. [Resources] is the table of them.
//
// For each row a program in a sandbox takes up to a stated bound, prints the number, and holds all
// of it until it is killed. Meanwhile and afterwards neighbours probe: a second sandbox, programs
// on the host, and the daemon. [Resource.Judge] then returns the layer that bounds the resource
// here, [Resource.Wanted] the one that should, by the product's report of itself.

// The layers that bound a resource, besides those of attacks. Nothing means that none does.
const (
	Nothing      = ""
	Limits       = "resource limits"
	Ceilings     = "ceilings of the user namespace"
	OwnIDs       = "own ids"
	MemoryCgroup = "memory cgroup"
	CPUCgroup    = "cpu cgroup"
	Counted      = "count of the launcher"
	MountOptions = "mount options"
	// Endless resources cannot be used up, or the kernel takes them back where they are needed.
	Endless = "the kernel itself"
)

// Pool is the scope of a count of the kernel's.
type Pool string

// The pools.
const (
	OfHost     Pool = "host"     // one count for all programs
	OfUser     Pool = "user"     // one for each user id of the host
	OfMemory   Pool = "memory"   // no count that matters; it takes the host's memory
	OfDisk     Pool = "disk"     // file system of the data directory
	OfCPU      Pool = "cpu"      // share of the processors
	OfLauncher Pool = "launcher" // counted by the launcher only, which ends the sandbox
	OfSandbox  Pool = "sandbox"  // counted in a namespace, process or mount that no other sandbox has
	OfNothing  Pool = "nothing"  // cannot be used up
)

// Resource is a row: one resource that the kernel counts.
type Resource struct {
	Name string
	Pool Pool
	// Bound is the number that the program takes at most: the bound of harm on a host of the user's.
	Bound int
	// Unit is the size in bytes of one of the pool's objects, if the memory of the whole pool is known
	// by it; then a limit of memory below that size bounds the resource. Zero if not.
	Unit int64
	// Size returns the size of the pool as the kernel states it, or a negative number if it has none.
	// Nil if the kernel states none.
	Size func() int64
	// Unsized is the pool where Size is negative.
	Unsized Pool
	// Stops says which layer stops the program with an error. EPERM, EACCES and ENOSYS for the first
	// one are the filter's unless they are named; Refused lists its other answers for the first one,
	// those of a kernel without the resource.
	Stops   map[string]string
	Refused []string
	// Empty lists the errors of an empty pool: taking has come to its end, and no layer stopped it.
	Empty []string
	// Ceiling returns a bound that the program can read, far below the pool's size, and its layer.
	// Nil if there is none to read.
	Ceiling func() (int64, string)
	// Want returns the layer that should bound the resource in a setting. Closed lists the profiles
	// whose filter should, instead.
	Want   func(Setting) string
	Closed []string
	// Lingers reports that objects outlive the program that took them. They end with the sandbox.
	Lingers bool

	take func(bound int) (int, error)
}

// Setting holds those parts of the product's report of a sandbox that rows depend on.
type Setting struct {
	Profile string
	OwnIDs  bool  // no other sandbox has its host ids
	Memory  int64 // bytes of its memory limit, which a cgroup holds; zero if none does
	CPU     bool  // a cgroup of its own shares out the processors
	Quota   bool  // bytes and inodes of its files are limited
}

// Taken is the outcome of a taker, as it prints it.
type Taken struct {
	Resource string `json:"resource"`
	Taken    int    `json:"taken"`
	Stopped  string `json:"stopped,omitempty"` // name of the error that stopped it; empty if it reached its bound
	Size     int64  `json:"size,omitempty"`    // of the pool; zero if unknown, negative if it has none
	// Ceiling is a bound that it could read, and CeilingOf its layer.
	Ceiling   int64  `json:"ceiling,omitempty"`
	CeilingOf string `json:"ceiling_of,omitempty"`
	// Killed reports that the kernel ended the program for its memory.
	Killed bool `json:"killed,omitempty"`
}

// Judge returns the layer that bounds the resource by its outcome, or [Nothing]. Lost says whether
// an operation of a neighbour was lost; in is the setting by its facts, not by any report.
func (r *Resource) Judge(got Taken, lost bool, in Setting) string {
	pool := r.Pool
	if got.Size < 0 {
		pool = r.Unsized
	}
	switch {
	case lost:
		return Nothing
	case got.Killed:
		return MemoryCgroup
	case got.Taken == 0 && slices.Contains(r.Refused, got.Stopped):
		return Filter
	case got.Stopped != "" && !slices.Contains(r.Empty, got.Stopped):
		if layer, known := r.Stops[got.Stopped]; known {
			return layer
		}
		if got.Taken == 0 && slices.Contains([]string{"EPERM", "EACCES", "ENOSYS"}, got.Stopped) {
			return Filter
		}
		return "unknown: " + got.Stopped
	case got.CeilingOf != "":
		return got.CeilingOf
	}
	return in.bounds(pool, r.Unit, got.Size)
}

// bounds returns the layer that bounds a pool of so many objects, of which a taker got all that it
// wanted.
func (s Setting) bounds(pool Pool, unit, size int64) string {
	switch pool {
	case OfUser:
		if s.OwnIDs {
			return OwnIDs
		}
		return s.bounds(OfHost, unit, size)
	case OfHost:
		if unit > 0 && s.Memory > 0 && size > 0 && s.Memory/unit < size {
			return MemoryCgroup
		}
	case OfMemory:
		if s.Memory > 0 {
			return MemoryCgroup
		}
	case OfCPU:
		if s.CPU {
			return CPUCgroup
		}
	case OfDisk:
		if s.Quota {
			return "quota"
		}
	case OfLauncher:
		return Counted
	case OfSandbox:
		return Namespaces
	case OfNothing:
		return Endless
	}
	return Nothing
}

// Wanted returns the layer that should bound the resource in a setting, or [Nothing].
func (r *Resource) Wanted(s Setting) string {
	if slices.Contains(r.Closed, s.Profile) {
		return Filter
	}
	return r.Want(s)
}

// Shared reports whether neighbours could miss the resource itself, not only memory.
func (r *Resource) Shared() bool {
	return r.Pool == OfHost || r.Pool == OfUser || r.Pool == OfCPU || r.Pool == OfDisk
}

// neighbours is the entry of the programs of this file. It prints JSON, one line.
func neighbours(args []string) (code int, handled bool) {
	switch {
	case len(args) == 1 && args[0] == "probe":
		return printLine(probe()), true
	case len(args) == 1 && args[0] == "ids":
		return printLine(idMap()), true
	case len(args) == 3 && args[0] == "take":
		bound, err := strconv.Atoi(args[2])
		if err != nil || bound < 0 {
			return 2, true
		}
		r := findResource(args[1])
		if r == nil {
			return 2, true
		}
		if code := printLine(r.run(bound)); code != 0 {
			return code, true
		}
		for os.Getenv(envControl) == "" {
			_, _ = unix.Poll(nil, -1) // hold it until killed
		}
		return 0, true
	case len(args) == 2 && args[0] == "control":
		r := findResource(args[1])
		if r == nil {
			return 2, true
		}
		return r.control(), true
	}
	return 2, true
}

// envControl says to a taker that it is in bare namespaces, on the host's files, and holds nothing.
const envControl = "SANDBOXD_ATTACK_CONTROL"

// control is PID 1 of fresh namespaces, as [control] is of an attack's. A child takes a part of the
// row's bound there.
func (r *Resource) control() int {
	for _, m := range []struct {
		source, target, kind string
		flags                uintptr
	}{{"", "/", "", unix.MS_REC | unix.MS_PRIVATE}, {"proc", "/proc", "proc", 0}, {"tmpfs", "/tmp", "tmpfs", 0}, {"tmpfs", "/dev/shm", "tmpfs", 0}} {
		if err := unix.Mount(m.source, m.target, m.kind, m.flags, ""); err != nil {
			return printLine(Taken{Resource: r.Name, Stopped: "mount " + m.target + ": " + errorName(err)})
		}
	}
	var cores unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_CORE, &cores); err == nil {
		cores.Cur = cores.Max
		_ = unix.Setrlimit(unix.RLIMIT_CORE, &cores) // the row says whether it may dump
	}
	cmd := exec.Command("/proc/self/exe", TakeResource(r.Name, max(1, r.Bound/8))...) //nolint:noctx // killed with this process
	cmd.Env, cmd.Dir, cmd.Stdout = append(os.Environ(), envControl+"=yes"), "/tmp", os.Stdout
	if err := cmd.Run(); err != nil {
		return printLine(Taken{Resource: r.Name, Stopped: err.Error()})
	}
	return 0
}

// ControlResource returns the outcome of a taker with an eighth of its bound where no layer of a
// sandbox holds it: in a bare user namespace, or, for root, in bare namespaces without one. Program
// is one that contains the corpus.
func ControlResource(ctx context.Context, program, name string) (got Taken, err error) {
	const apart = syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC
	attrs := []*syscall.SysProcAttr{{
		Cloneflags:  apart | syscall.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}}
	if os.Geteuid() == 0 {
		attrs = append(attrs, &syscall.SysProcAttr{Cloneflags: apart})
	}
	ctx, cancel := context.WithTimeout(ctx, controlTimeout)
	defer cancel()
	for _, attr := range attrs {
		cmd := exec.CommandContext(ctx, program, mainArg, "neighbours", "control", name)
		attr.Setsid = true
		cmd.SysProcAttr = attr
		out, err := cmd.Output()
		if err != nil {
			return Taken{}, fmt.Errorf("control of %s: %w", name, err)
		}
		if err := json.Unmarshal(out, &got); err != nil {
			return Taken{}, fmt.Errorf("control of %s printed %q: %w", name, out, err)
		}
		if got.Taken > 0 {
			return got, nil
		}
	}
	return got, nil
}

// run takes the resource until its bound or a refusal.
func (r *Resource) run(bound int) Taken {
	got := Taken{Resource: r.Name}
	if r.Size != nil {
		got.Size = r.Size()
	}
	if r.Ceiling != nil {
		got.Ceiling, got.CeilingOf = r.Ceiling()
	}
	n, err := r.take(bound)
	got.Taken = n
	if err != nil {
		got.Stopped = errorName(err)
	}
	return got
}

// TakeResource returns the arguments that make a program that contains the corpus take up to so
// many of a resource, print a [Taken] and hold all of it until it is killed.
func TakeResource(name string, bound int) []string {
	return []string{mainArg, "neighbours", "take", name, strconv.Itoa(bound)}
}

// ProbeResources returns the arguments that make it try the operations of a neighbour and print a
// [Probed].
func ProbeResources() []string { return []string{mainArg, "neighbours", "probe"} }

// ShowIDs returns the arguments that make it print its id maps, as a list of [IDRange].
func ShowIDs() []string { return []string{mainArg, "neighbours", "ids"} }

// IDRange is a line of an id map: Size ids from Outside on, as the user namespace above counts
// them.
type IDRange struct {
	Outside int64 `json:"outside"`
	Size    int64 `json:"size"`
}

// Overlap reports whether two sandboxes of one daemon share an id of the host.
func Overlap(a, b []IDRange) bool {
	return slices.ContainsFunc(a, func(x IDRange) bool {
		return slices.ContainsFunc(b, func(y IDRange) bool { return x.Outside < y.Outside+y.Size && y.Outside < x.Outside+x.Size })
	})
}

// idMap returns the ranges of this process's user map.
func idMap() []IDRange {
	all := []IDRange{}
	text, err := os.ReadFile("/proc/self/uid_map")
	if err != nil {
		return all
	}
	for line := range strings.Lines(string(text)) {
		var inside int64
		var r IDRange
		if n, _ := fmt.Sscan(line, &inside, &r.Outside, &r.Size); n == 3 {
			all = append(all, r)
		}
	}
	return all
}

func printLine(v any) int {
	if err := json.NewEncoder(os.Stdout).Encode(v); err != nil {
		return 1
	}
	return 0
}

func findResource(name string) *Resource {
	all := Resources()
	if i := slices.IndexFunc(all, func(r Resource) bool { return r.Name == name }); i >= 0 {
		return &all[i]
	}
	return nil
}

// refusal is an error of a taker that no errno expresses.
type refusal string

func (r refusal) Error() string { return string(r) }

func errorName(err error) string {
	switch e := err.(type) { //nolint:errorlint // takers wrap nothing
	case syscall.Errno:
		if name := unix.ErrnoName(e); name != "" {
			return name
		}
		return "errno " + strconv.Itoa(int(e))
	default:
		return err.Error()
	}
}

// sysctl returns a function that reads a number below /proc/sys, 0 if it is not to be read. Numbers
// near the largest are none, which is negative.
func sysctl(name string) func() int64 {
	return func() int64 {
		text, err := os.ReadFile("/proc/sys/" + name)
		if err != nil {
			return 0
		}
		fields := strings.Fields(string(text))
		if len(fields) == 0 {
			return 0
		}
		n, err := strconv.ParseInt(fields[len(fields)-1], 10, 64) // of tcp_mem the last
		if err != nil || n > math.MaxInt64/4 {
			return -1
		}
		return n
	}
}

// want returns a Want that is the same everywhere.
func want(layer string) func(Setting) string { return func(Setting) string { return layer } }

// wantOf returns a Want for a pool that nothing but ids, memory or shares of its own bound.
func wantOf(pool Pool, unit int64, size func() int64) func(Setting) string {
	return func(s Setting) string {
		of := int64(0)
		if size != nil {
			of = size()
		}
		return s.bounds(pool, unit, of)
	}
}

// readCeiling returns a Ceiling of the user namespace, if it is at most half of the host's number.
func readCeiling(name, host string) func() (int64, string) {
	return func() (int64, string) {
		n, of := sysctl("user/"+name)(), sysctl(host)()
		if n > 0 && n <= of/2 {
			return n, Ceilings
		}
		return 0, Nothing
	}
}

// readOption returns a Ceiling that every writable mount of a type states as an option.
func readOption(kind, option string) func() (int64, string) {
	return func() (int64, string) {
		mounts, err := os.ReadFile("/proc/self/mounts")
		if err != nil {
			return 0, Nothing
		}
		var sum int64
		for line := range strings.Lines(string(mounts)) {
			fields := strings.Fields(line)
			if len(fields) < 4 || fields[2] != kind {
				continue
			}
			options := strings.Split(fields[3], ",")
			if slices.Contains(options, "ro") || unix.Access(fields[1], unix.W_OK) != nil && kind == "tmpfs" {
				continue
			}
			i := slices.IndexFunc(options, func(o string) bool { return strings.HasPrefix(o, option+"=") })
			if i < 0 {
				return 0, Nothing
			}
			n, err := strconv.ParseInt(strings.TrimRight(strings.TrimPrefix(options[i], option+"="), "k"), 10, 64)
			if err != nil {
				return 0, Nothing
			}
			sum += n
		}
		if sum == 0 {
			return 0, Nothing
		}
		return sum, MountOptions
	}
}

// Resources returns the table, in the order in which rows are tried. Those that hinder the start of
// further programs in their sandbox are the last.
func Resources() []Resource {
	var all []Resource
	for _, part := range [][]Resource{descriptors(), buffers(), closedPools(), ipcs(), places(), tasks()} {
		all = append(all, part...)
	}
	return all
}
