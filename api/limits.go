package api

import (
	"fmt"
	"strconv"
	"sync"
)

// Limit is one row of the table of limits: one field of [Limits], with all that code which walks
// the limits must know. A field without a row fails a test.
type Limit struct {
	Name       string // JSON path in [Limits], such as "io.read_bps"
	Controller string // cgroup v2 controller; empty if none holds it
	File       string // cgroup file that holds it; empty if there is none, or if the device decides
	Rlimit     string // resource limit that holds it instead; empty if there is none
	Min, Max   float64
	Unit       string // of Min and Max; empty for a plain number
	Zero       string // meaning of 0 in messages

	// IsSet reports whether the limit has another value than its zero value.
	IsSet func(l *Limits) bool
	// Equal reports whether a and b have one value of the limit.
	Equal func(a, b *Limits) bool
	// Copy sets the limit of to as it is in from.
	Copy func(to, from *Limits)
	// value is the number to compare with Min and Max; for a list of cores, its length.
	value func(l *Limits) (shown any, number float64)
	// update sets the limit in limits and in explicit, if u has a value for it. Zero means that of
	// defaults.
	update func(u *LimitsUpdate, limits, explicit, defaults *Limits)
}

const (
	maxBytes  = 1 << 50
	minMemory = 4 << 20 // below it not even the init starts, and the error would not say why
	minBPS    = 4 << 10 // below a page a second no program makes progress
	maxIOPS   = 1 << 31 // the kernel counts them in 32 bits
	maxWeight = 10000   // the kernel's CGROUP_WEIGHT_MAX
	maxPids   = 1 << 22 // the kernel's PID_MAX_LIMIT
	minDisk   = 1 << 20 // below it the sandbox's own directories and the first log exceed it
	minInodes = 64
	maxInodes = 1 << 40
)

// LimitTable returns the rows of all limits, in the order in which a host's reasons for refusing
// them are reported. The caller must not change it.
var LimitTable = sync.OnceValue(func() []Limit {
	l := func(name, controller, file string, row Limit, minimum, maximum float64, unit, zero string) Limit {
		row.Name, row.Controller, row.File = name, controller, file
		row.Min, row.Max, row.Unit, row.Zero = minimum, maximum, unit, zero
		return row
	}
	const none, standard = "no ceiling", "the default"
	pids := number(func(l *Limits) *int64 { return &l.Pids }, func(u *LimitsUpdate) *int64 { return u.Pids })
	pids.Rlimit = "RLIMIT_NPROC"
	nofile := number(func(l *Limits) *uint64 { return &l.Nofile }, func(u *LimitsUpdate) *uint64 { return u.Nofile })
	nofile.Rlimit = "RLIMIT_NOFILE"
	cpuset := field(func(l *Limits) *string { return &l.CPUSet }, func(u *LimitsUpdate) *string { return u.CPUSet })
	cpuset.value = func(l *Limits) (any, float64) { return len(l.CPUSet), float64(len(l.CPUSet)) }
	return []Limit{
		l("memory", "memory", "memory.max",
			number(func(l *Limits) *int64 { return &l.Memory }, func(u *LimitsUpdate) *int64 { return u.Memory }), minMemory, maxBytes, "bytes", standard),
		l("memory_high", "memory", "memory.high",
			number(func(l *Limits) *int64 { return &l.MemoryHigh }, func(u *LimitsUpdate) *int64 { return u.MemoryHigh }), minMemory, maxBytes, "bytes", standard),
		l("swap", "memory", "memory.swap.max", swap, 1, maxBytes, "bytes", "none"),
		l("oom_group", "memory", "memory.oom.group",
			field(func(l *Limits) *bool { return &l.OOMGroup }, func(u *LimitsUpdate) *bool { return u.OOMGroup }), 0, 0, "", ""),
		l("cpus", "cpu", "cpu.max",
			number(func(l *Limits) *float64 { return &l.CPUs }, func(u *LimitsUpdate) *float64 { return u.CPUs }), 0.01, 4096, "", standard),
		l("cpu_weight", "cpu", "cpu.weight",
			number(func(l *Limits) *int64 { return &l.CPUWeight }, func(u *LimitsUpdate) *int64 { return u.CPUWeight }), 1, maxWeight, "", standard),
		l("cpuset", "cpuset", "cpuset.cpus", cpuset, 1, 1024, "bytes long", standard),
		l("io.read_bps", "io", "io.max",
			number(func(l *Limits) *int64 { return &l.IO.ReadBPS }, func(u *LimitsUpdate) *int64 { return u.IO.ReadBPS }), minBPS, maxBytes, "", none),
		l("io.write_bps", "io", "io.max",
			number(func(l *Limits) *int64 { return &l.IO.WriteBPS }, func(u *LimitsUpdate) *int64 { return u.IO.WriteBPS }), minBPS, maxBytes, "", none),
		l("io.read_iops", "io", "io.max",
			number(func(l *Limits) *int64 { return &l.IO.ReadIOPS }, func(u *LimitsUpdate) *int64 { return u.IO.ReadIOPS }), 1, maxIOPS, "", none),
		l("io.write_iops", "io", "io.max",
			number(func(l *Limits) *int64 { return &l.IO.WriteIOPS }, func(u *LimitsUpdate) *int64 { return u.IO.WriteIOPS }), 1, maxIOPS, "", none),
		l("io.weight", "io", "", // its file depends on the device's scheduler
			number(func(l *Limits) *int64 { return &l.IO.Weight }, func(u *LimitsUpdate) *int64 { return u.IO.Weight }), 1, maxWeight, "", standard),
		l("pids", "pids", "pids.max", pids, 1, maxPids, "", standard),
		l("nofile", "", "", nofile, 1, 1<<20, "", standard),
		l("disk", "", "",
			number(func(l *Limits) *int64 { return &l.Disk }, func(u *LimitsUpdate) *int64 { return u.Disk }), minDisk, maxBytes, "bytes", none),
		l("inodes", "", "",
			number(func(l *Limits) *int64 { return &l.Inodes }, func(u *LimitsUpdate) *int64 { return u.Inodes }), minInodes, maxInodes, "", none),
	}
})

// field returns the functions of a row for a field of Limits and its field of LimitsUpdate.
func field[T comparable](of func(*Limits) *T, to func(*LimitsUpdate) *T) Limit {
	var zero T
	return Limit{
		IsSet: func(l *Limits) bool { return *of(l) != zero },
		Equal: func(a, b *Limits) bool { return *of(a) == *of(b) },
		Copy:  func(to, from *Limits) { *of(to) = *of(from) },
		update: func(u *LimitsUpdate, limits, explicit, defaults *Limits) {
			v := to(u)
			if v == nil {
				return
			}
			*of(limits), *of(explicit) = *v, *v
			if *v == zero {
				*of(limits) = *of(defaults)
			}
		},
	}
}

// number is field for a number, which has a range.
func number[T int64 | uint64 | float64](of func(*Limits) *T, to func(*LimitsUpdate) *T) Limit {
	row := field(of, to)
	row.value = func(l *Limits) (any, float64) { return *of(l), float64(*of(l)) }
	return row
}

// swap is the only limit of which 0 is a value: nil is its zero value, and it has no default.
var swap = Limit{
	IsSet: func(l *Limits) bool { return l.Swap != nil },
	Equal: func(a, b *Limits) bool {
		return (a.Swap == nil) == (b.Swap == nil) && (a.Swap == nil || *a.Swap == *b.Swap)
	},
	Copy: func(to, from *Limits) { to.Swap = from.Swap },
	value: func(l *Limits) (any, float64) {
		if l.Swap == nil {
			return 0, 0
		}
		return *l.Swap, float64(*l.Swap)
	},
	update: func(u *LimitsUpdate, limits, explicit, _ *Limits) {
		if u.Swap != nil {
			limits.Swap, explicit.Swap = u.Swap, u.Swap
		}
	},
}

// Check returns an error for the first limit that is out of its range on every host. It does not
// parse the list of cores.
func (l *Limits) Check() error {
	for _, row := range LimitTable() {
		if row.value == nil {
			continue
		}
		// NaN is in no range.
		if shown, n := row.value(l); n != 0 && !(n >= row.Min && n <= row.Max) {
			unit := row.Unit
			if unit != "" {
				unit = " " + unit
			}
			return fmt.Errorf("limits.%s %v: must be 0 (%s) or between %s and %s%s", row.Name, shown, row.Zero, decimal(row.Min), decimal(row.Max), unit)
		}
	}
	return nil
}

func decimal(f float64) string { return strconv.FormatFloat(f, 'f', -1, 64) }

// WithDefaults returns the limits with those of defaults in the place of zero values.
func (l *Limits) WithDefaults(defaults Limits) Limits {
	merged := *l
	for _, row := range LimitTable() {
		if !row.IsSet(l) {
			row.Copy(&merged, &defaults)
		}
	}
	return merged
}

// Equal reports whether l and other mean one thing.
func (l *Limits) Equal(other *Limits) bool {
	for _, row := range LimitTable() {
		if !row.Equal(l, other) {
			return false
		}
	}
	return true
}

// Matching returns the limits of l that are equal in other; the rest have their zero value.
func (l *Limits) Matching(other *Limits) Limits {
	var kept Limits
	for _, row := range LimitTable() {
		if row.Equal(l, other) {
			row.Copy(&kept, l)
		}
	}
	return kept
}

// Apply returns limits with the changes, and the changed ones alone, as they were asked for. A zero
// value means that of defaults.
func (u *LimitsUpdate) Apply(limits, defaults Limits) (changed, explicit Limits) {
	for _, row := range LimitTable() {
		row.update(u, &limits, &explicit, &defaults)
	}
	return limits, explicit
}
