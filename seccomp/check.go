package seccomp

import (
	"errors"
	"fmt"
	"slices"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// Check refuses a plan, which may come from elsewhere, in three cases: it is no allow-list for the
// architecture, it has parts without effect here, or it permits calls that no profile permits.
// Those are the calls that the default profile refuses by name, new namespaces, and odd sockets.
func Check(p *specs.LinuxSeccomp, arch string) error {
	oci, ok := ociArch[arch]
	switch {
	case !ok:
		return fmt.Errorf("no filter for architecture %q", arch)
	case !slices.Equal(p.Architectures, []specs.Arch{oci}):
		return fmt.Errorf("architectures: must be %s alone: another entry of the kernel has other numbers", oci)
	case p.DefaultAction != specs.ActErrno && !kills(p.DefaultAction):
		return fmt.Errorf("defaultAction %q: a filter lists what is allowed, so it is SCMP_ACT_ERRNO or a kill", p.DefaultAction)
	case len(p.Flags) > 0 || p.ListenerPath != "" || p.ListenerMetadata != "":
		return errors.New("flags, listenerPath, listenerMetadata: not for profiles")
	}
	for i, rule := range p.Syscalls {
		if rule.Action != specs.ActAllow && rule.Action != specs.ActErrno && !kills(rule.Action) {
			return fmt.Errorf("syscalls[%d]: action %q: there are SCMP_ACT_ALLOW, SCMP_ACT_ERRNO and the kills", i, rule.Action)
		}
		if len(rule.Names) == 0 {
			return fmt.Errorf("syscalls[%d]: no names", i)
		}
		var seen [6]bool
		for _, c := range rule.Args {
			if c.Index > 5 || seen[c.Index] {
				return fmt.Errorf("syscalls[%d]: two conditions on argument %d, of which libcontainer makes alternatives, or no argument", i, c.Index)
			}
			seen[c.Index] = true
		}
	}
	open := Reachable(p)
	for _, g := range refused() {
		for _, name := range g.Calls {
			if slices.Contains(open, name) {
				return fmt.Errorf("%s is allowed, which no profile does: %s", name, g.Reason)
			}
		}
	}
	// Else the call would be refused all the same, in silence.
	through := Launcher().calls(arch)
	for _, name := range open {
		if !slices.Contains(through, name) {
			return fmt.Errorf("%s is allowed, but the launcher's own filter, which sandboxes inherit, refuses it", name)
		}
	}
	for _, name := range needed {
		if !slices.Contains(open, name) {
			return fmt.Errorf("%s is not allowed: the sandbox's init, which the filter holds too, needs it", name)
		}
	}
	for _, call := range closed() {
		if slices.ContainsFunc(p.Syscalls, call.allowedBy) {
			return fmt.Errorf("%s%#x is allowed, which no profile does: %s", call.name, call.args, call.reason)
		}
	}
	return nil
}

func kills(a specs.LinuxSeccompAction) bool {
	return a == specs.ActKill || a == specs.ActKillProcess || a == specs.ActKillThread
}

// needed are the calls without which no init starts, starts a program or confines it.
var needed = []string{
	"accept4", "capset", "clone", "close_range", "execve", "landlock_add_rule", "landlock_create_ruleset", "landlock_restrict_self",
	"openat", "prctl", "recvmsg", "rt_sigaction", "sendmsg", "setgid", "setgroups", "setsid", "setuid", "waitid", "wait4",
}

type closedCall struct {
	name   string
	args   []uint64
	reason string
}

// allowedBy does not ask which rule comes first: libseccomp prefers one without conditions,
// wherever it stands.
func (c *closedCall) allowedBy(rule specs.LinuxSyscall) bool {
	return rule.Action == specs.ActAllow && slices.Contains(rule.Names, c.name) && holds(rule.Args, c.args)
}

// closed are examples of what no filter lets through in calls that are not closed as a whole. With
// bits above those that the kernel looks at, for a filter that compares all 64 can be walked around
// (CVE-2019-10063).
func closed() []closedCall {
	var all []closedCall
	for _, high := range []uint64{0, 1 << 32} {
		for _, flag := range []uint64{cloneNewUser, cloneNewNS, cloneNewNet, cloneNewPID, cloneNewIPC, cloneNewCgroup} {
			all = append(all, closedCall{"clone", []uint64{high | flag | 17}, "a new namespace"})
		}
		for _, family := range []uint64{17, 38, 40, 44, 30, 29, 21} { // PACKET, ALG, VSOCK, XDP, TIPC, CAN, RDS
			all = append(all, closedCall{"socket", []uint64{high | family, 3, 0}, "an odd socket family"})
		}
		all = append(
			all,
			closedCall{"socket", []uint64{high | afNetlink, 3, 12}, "netfilter"},
			closedCall{"setsockopt", []uint64{3, high | solTCP, tcpULP}, "TLS in the kernel"},
			closedCall{"ioctl", []uint64{0, high | tiocSTI}, "typing into a terminal"},
			closedCall{"ioctl", []uint64{0, high | tiocSETD}, "line disciplines"},
		)
	}
	return all
}
