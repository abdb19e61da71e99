package seccomp

import (
	"fmt"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// Verdict is a plan's answer to one system call.
type Verdict struct {
	Action specs.LinuxSeccompAction
	Errno  uint // where Action is ActErrno
}

// Allowed reports whether the call reaches the kernel.
func (v Verdict) Allowed() bool { return v.Action == specs.ActAllow }

func (v Verdict) String() string {
	if v.Action != specs.ActErrno {
		return strings.ToLower(strings.TrimPrefix(string(v.Action), "SCMP_ACT_"))
	}
	if name, ok := errnoNames[v.Errno]; ok {
		return name
	}
	return fmt.Sprintf("errno %d", v.Errno)
}

var errnoNames = map[uint]string{
	0: "done", errnoENOMEM: "ENOMEM", errnoEINVAL: "EINVAL", errnoENOPROTOOPT: "ENOPROTOOPT",
	errnoEPERM: "EPERM", errnoENOSYS: "ENOSYS", errnoEPROTONOSUPPORT: "EPROTONOSUPPORT", errnoEAFNOSUPPORT: "EAFNOSUPPORT",
	errnoENOTSUP: "ENOTSUP",
}

// Lookup returns a plan's answer to a call with these arguments; missing ones are 0. It reads the
// plan as libseccomp does: conditions of one rule hold together, and the first rule that holds
// answers. It understands every operator of the runtime-spec, so a plan from elsewhere can be
// checked too.
func Lookup(p *specs.LinuxSeccomp, call string, args ...uint64) Verdict {
	for _, rule := range p.Syscalls {
		if slices.Contains(rule.Names, call) && holds(rule.Args, args) {
			return verdict(rule.Action, rule.ErrnoRet)
		}
	}
	return verdict(p.DefaultAction, p.DefaultErrnoRet)
}

func verdict(action specs.LinuxSeccompAction, errno *uint) Verdict {
	v := Verdict{Action: action}
	if action == specs.ActErrno {
		v.Errno = errnoEPERM // libcontainer's choice where the plan makes none
		if errno != nil {
			v.Errno = *errno
		}
	}
	return v
}

func holds(conds []specs.LinuxSeccompArg, args []uint64) bool {
	for _, c := range conds {
		var v uint64
		if int(c.Index) < len(args) {
			v = args[c.Index]
		}
		var ok bool
		switch c.Op {
		case specs.OpEqualTo:
			ok = v == c.Value
		case specs.OpNotEqual:
			ok = v != c.Value
		case specs.OpLessThan:
			ok = v < c.Value
		case specs.OpLessEqual:
			ok = v <= c.Value
		case specs.OpGreaterThan:
			ok = v > c.Value
		case specs.OpGreaterEqual:
			ok = v >= c.Value
		case specs.OpMaskedEqual:
			ok = v&c.Value == c.ValueTwo
		}
		if !ok {
			return false
		}
	}
	return true
}

// Text prints a plan for a reader, one line per call: its answer, and the conditions of that.
func Text(p *specs.LinuxSeccomp) string {
	var b strings.Builder
	for _, a := range p.Architectures {
		fmt.Fprintf(&b, "architecture %s\n", a)
	}
	fmt.Fprintf(&b, "default %s\n", verdict(p.DefaultAction, p.DefaultErrnoRet))
	var lines []string
	for _, rule := range p.Syscalls {
		v := verdict(rule.Action, rule.ErrnoRet)
		var conds []string
		for _, c := range rule.Args {
			conds = append(conds, condText(c))
		}
		for _, name := range rule.Names {
			line := name + " " + v.String()
			if len(conds) > 0 {
				line += " if " + strings.Join(conds, " and ")
			}
			lines = append(lines, line)
		}
	}
	slices.Sort(lines)
	for _, l := range lines {
		b.WriteString(l + "\n")
	}
	return b.String()
}

func condText(c specs.LinuxSeccompArg) string {
	switch {
	case c.Op == specs.OpMaskedEqual && c.Value == low32:
		return fmt.Sprintf("arg%d == %#x", c.Index, c.ValueTwo)
	case c.Op == specs.OpMaskedEqual:
		return fmt.Sprintf("arg%d & %#x == %#x", c.Index, c.Value, c.ValueTwo)
	default:
		return fmt.Sprintf("arg%d %s %#x", c.Index, strings.TrimPrefix(string(c.Op), "SCMP_CMP_"), c.Value)
	}
}

// Reachable are the names of the calls that a plan lets through, with some arguments at least,
// sorted.
func Reachable(p *specs.LinuxSeccomp) []string {
	var names []string
	for _, rule := range p.Syscalls {
		if rule.Action == specs.ActAllow {
			names = append(names, rule.Names...)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}
