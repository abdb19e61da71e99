// Package seccomp plans the system call filter of a sandbox.
//
// A [Filter] says, in groups that carry their reasons, which system calls a program may make.
// [Plan] turns it into the runtime-spec's form for one architecture: a value that can be printed,
// compared and asked ([Lookup]). Nothing here touches the kernel; libseccomp loads the plan in the
// launcher.
//
// # Answers to refused calls
//
// A call that the filter does not name answers ENOSYS, as if the kernel were older: programs can
// handle that, and a call that a later kernel adds stays closed until it has been reviewed. A call
// that the filter knows and refuses answers EPERM, or the error that the program would expect
// (EAFNOSUPPORT for a socket family). A few calls answer that they were made, and are not: programs
// give up where the limit of cores cannot be lowered, and here it has no effect.
//
// A call through another entry of the kernel than the native one (on x86-64 the 32-bit int 0x80 and
// the x32 numbers) does not reach any rule: only the native architecture is in the plan, and
// libseccomp then kills the calling thread (its "bad architecture" action, SCMP_ACT_KILL_THREAD,
// which libcontainer leaves as it is).
package seccomp

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// Architectures that a filter can be planned for, as Go spells them.
const (
	AMD64 = "amd64"
	ARM64 = "arm64"
)

var ociArch = map[string]specs.Arch{AMD64: specs.ArchX86_64, ARM64: specs.ArchAARCH64}

// Abilities are the kernel's abilities with filters.
type Abilities struct {
	// Actions are the kernel's names of a filter's possible answers, from
	// /proc/sys/kernel/seccomp/actions_avail.
	Actions []string
}

// UnsupportedError means that the kernel cannot hold a filter as planned.
type UnsupportedError struct {
	Action string // the answer that it does not know
}

func (e *UnsupportedError) Error() string {
	return fmt.Sprintf("this kernel's seccomp does not know the action %q", e.Action)
}

// Filter describes which system calls may be made. Its groups do not contradict each other: for one
// call with given arguments at most one group answers.
type Filter struct {
	Name   string
	Groups []Group
}

// Group is a set of system calls that get the same answer for the same reason.
type Group struct {
	Reason string
	Calls  []string
	// Only is the architecture that has these calls; empty where all do.
	Only string
	// Errno is the answer; 0 allows the call.
	Errno uint
	// Pretend answers that the call was made, without making it. Errno is 0 then.
	Pretend bool
	// When restricts the group to calls whose arguments meet all conditions of any alternative; empty:
	// always. Within one alternative each argument has at most one condition: libcontainer turns two
	// into "or".
	When [][]Cond
}

// allows reports whether the calls reach the kernel.
func (g *Group) allows() bool { return g.Errno == 0 && !g.Pretend }

// Cond is a condition on one argument: the bits of Mask are those of Value.
//
// Conditions on arguments that the kernel declares as int or unsigned int must ignore the upper 32
// bits. The kernel ignores them too, so a filter that compares all 64 can be walked around
// (CVE-2019-10063).
type Cond struct {
	Arg   uint
	Mask  uint64
	Value uint64
	// Not reverses the condition; Mask has all 64 bits then, as for pointers.
	Not bool
}

// Plan makes the runtime-spec's form of the filter for an architecture. It fails where the filter
// contradicts itself or the kernel cannot hold it; it never leaves anything out silently.
func Plan(f Filter, arch string, k Abilities) (*specs.LinuxSeccomp, error) {
	oci, ok := ociArch[arch]
	if !ok {
		return nil, fmt.Errorf("plan filter %q: no filter for architecture %q", f.Name, arch)
	}
	if err := f.check(arch); err != nil {
		return nil, fmt.Errorf("plan filter %q: %w", f.Name, err)
	}
	enosys := uint(errnoENOSYS)
	p := &specs.LinuxSeccomp{
		DefaultAction:   specs.ActErrno,
		DefaultErrnoRet: &enosys,
		Architectures:   []specs.Arch{oci},
	}
	for _, g := range f.Groups {
		if g.Only != "" && g.Only != arch {
			continue
		}
		rule := specs.LinuxSyscall{Names: slices.Sorted(slices.Values(g.Calls)), Action: specs.ActAllow}
		if !g.allows() {
			errno := g.Errno
			rule.Action, rule.ErrnoRet = specs.ActErrno, &errno
		}
		if len(g.When) == 0 {
			p.Syscalls = append(p.Syscalls, rule)
		}
		for _, alternative := range g.When {
			rule.Args = nil
			for _, c := range alternative {
				arg := specs.LinuxSeccompArg{Index: c.Arg, Op: specs.OpMaskedEqual, Value: c.Mask, ValueTwo: c.Value}
				if c.Not {
					arg = specs.LinuxSeccompArg{Index: c.Arg, Op: specs.OpNotEqual, Value: c.Value}
				}
				rule.Args = append(rule.Args, arg)
			}
			p.Syscalls = append(p.Syscalls, rule)
		}
	}
	if err := Supported(p, k); err != nil {
		return nil, fmt.Errorf("plan filter %q: %w", f.Name, err)
	}
	return p, nil
}

// Supported reports whether the kernel knows every answer that a plan gives; otherwise the error is
// an [*UnsupportedError].
func Supported(p *specs.LinuxSeccomp, k Abilities) error {
	actions := []specs.LinuxSeccompAction{p.DefaultAction}
	for _, rule := range p.Syscalls {
		actions = append(actions, rule.Action)
	}
	for _, a := range actions {
		// SCMP_ACT_ERRNO is the kernel's "errno". SCMP_ACT_KILL and SCMP_ACT_NOTIFY are spelled otherwise
		// there; no filter of ours has them, so they count as unknown.
		if word := strings.ToLower(strings.TrimPrefix(string(a), "SCMP_ACT_")); !slices.Contains(k.Actions, word) {
			return &UnsupportedError{Action: word}
		}
	}
	return nil
}

// check finds rules that libseccomp would resolve in a way that a reader of the filter does not
// expect.
func (f Filter) check(arch string) error {
	always := map[string]bool{}
	sometimes := map[string]bool{}
	for _, g := range f.Groups {
		if g.Only != "" && g.Only != arch {
			continue
		}
		if len(g.Calls) == 0 {
			return fmt.Errorf("group %q is empty", g.Reason)
		}
		if g.Pretend && g.Errno != 0 {
			return fmt.Errorf("group %q both pretends and refuses", g.Reason)
		}
		for _, name := range g.Calls {
			// An unconditional rule wins over every other of the same call, whatever the order.
			if always[name] || len(g.When) == 0 && sometimes[name] {
				return fmt.Errorf("%s is decided twice, once without a condition", name)
			}
			if len(g.When) == 0 {
				always[name] = true
			} else {
				sometimes[name] = true
			}
		}
		for _, alternative := range g.When {
			var seen [6]bool
			if len(alternative) == 0 {
				return fmt.Errorf("group %q has an alternative without a condition", g.Reason)
			}
			for _, c := range alternative {
				if c.Arg > 5 || c.Value&^c.Mask != 0 || c.Mask == 0 || c.Not && c.Mask != all64 {
					return fmt.Errorf("group %q has an impossible condition on argument %d", g.Reason, c.Arg)
				}
				if seen[c.Arg] {
					return fmt.Errorf("group %q has two conditions on argument %d at once", g.Reason, c.Arg)
				}
				seen[c.Arg] = true
			}
		}
	}
	if len(always) == 0 {
		return errors.New("no call is allowed")
	}
	return nil
}

const (
	low32 = 1<<32 - 1
	all64 = 1<<64 - 1
)

// whole is the condition that an argument of 64 bits has the value.
func whole(arg uint, value uint64) Cond { return Cond{Arg: arg, Mask: all64, Value: value} }

// isNot is the condition that it has another.
func isNot(arg uint, value uint64) Cond { return Cond{Arg: arg, Mask: all64, Value: value, Not: true} }

// is is the condition that a 32-bit argument has the value.
func is(arg uint, value uint32) Cond { return Cond{Arg: arg, Mask: low32, Value: uint64(value)} }

// anyOf are the alternatives that a 32-bit argument has one of the values.
func anyOf(arg uint, values ...uint32) [][]Cond {
	var out [][]Cond
	for _, v := range values {
		out = append(out, []Cond{is(arg, v)})
	}
	return out
}

// noneOf are the alternatives that the bits of an argument in mask are those of none of the values.
// A filter has no "not" for part of an argument, so this covers the rest of the space: from the top
// bit down, every prefix that no value shares but whose parent some value does. The alternatives
// exclude each other. There are up to as many as mask has bits for each value, and libseccomp takes
// time for each of them at every start of a sandbox: choose a narrow mask.
func noneOf(arg uint, mask uint32, values ...uint32) [][]Cond {
	var out [][]Cond
	var walk func(seen, prefix uint32)
	walk = func(seen, prefix uint32) {
		shared := slices.ContainsFunc(values, func(v uint32) bool { return v&seen == prefix })
		next := uint32(1) << 31 >> bits.LeadingZeros32(mask&^seen) // the highest bit not yet decided; 0 at the end
		switch {
		case !shared:
			out = append(out, []Cond{{Arg: arg, Mask: uint64(seen), Value: uint64(prefix)}})
		case next != 0:
			walk(seen|next, prefix)
			walk(seen|next, prefix|next)
		}
	}
	walk(0, 0)
	return out
}

// anyBit are the alternatives that at least one of the bits is set.
func anyBit(arg uint, set uint64) [][]Cond {
	var out [][]Cond
	for b := uint64(1); b != 0; b <<= 1 {
		if set&b != 0 {
			out = append(out, []Cond{{Arg: arg, Mask: b, Value: b}})
		}
	}
	return out
}

// and combines alternatives on different arguments: each of one with each of the other.
func and(one, other [][]Cond) [][]Cond {
	var out [][]Cond
	for _, a := range one {
		for _, b := range other {
			out = append(out, slices.Concat(a, b))
		}
	}
	return out
}
