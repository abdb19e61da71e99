package attack

import (
	_ "embed" // for the list
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/sandboxd/sandboxd/seccomp"
)

//go:embed docker_amd64.txt
var dockerCalls string

// DockerSource is where the facts about Docker's default filter are from.
// TestDockersCallsAreThoseOfItsProfile compares, where the Go module of that name is at hand.
const DockerSource = "github.com/moby/profiles/seccomp v0.2.3"

// DockerCalls are the names of the system calls that Docker's default filter lets through on
// x86-64; of other architectures there is no list.
func DockerCalls(arch string) []string {
	if arch != seccomp.AMD64 {
		return nil
	}
	var names []string
	for line := range strings.Lines(dockerCalls) {
		if !strings.HasPrefix(line, "#") {
			names = append(names, strings.TrimSpace(line))
		}
	}
	return names
}

// dockerFeatures are the attacks on parts of the kernel behind calls that look at their arguments,
// or behind another entry of it, that Docker's default filter lets reach the kernel. The answer of
// the kernel or a capability check is another matter. Facts: of socket families it closes AF_ALG
// (38) and AF_VSOCK (40) alone; no rule of it is about protocols, ioctl or setsockopt; its
// "subArchitectures" of x86-64 are x86 and x32; and Docker gives CAP_SYS_CHROOT and CAP_NET_RAW.
var dockerFeatures = []string{
	"adjtimex", "attach-ebpf", "attach-filter", "attach-filter-high-bits", "attach-filter-ipv6", "attach-filter-netlink",
	"attach-filter-unix", "attach-reuseport-ebpf", "attach-reuseport-filter", "chroot", "fanotify-mark", "int80-abi", "larger-pipe",
	"limit-child", "limit-cores-anew", "limit-cores-by-number", "limit-init-descriptors", "limit-init-high-bits",
	"limit-init-memory", "limit-init-processes", "limit-init-processor", "limit-init-thread", "listmount", "lock-filter",
	"memfd-hugetlb", "memfd-hugetlb-2m", "mmap-hugetlb", "mmap-hugetlb-1g", "modify-ldt", "modprobe-bridge", "modprobe-vlan",
	"name-to-handle", "nested-filter", "nested-filter-all-threads", "nested-filter-high-bits", "nested-filter-listener",
	"nested-filter-prctl",
	"process-vm-readv-init", "process-vm-writev-init", "secret-memory", "shm-hugetlb", "socket-can", "socket-key", "socket-mptcp",
	"socket-netlink-audit", "socket-netlink-connector", "socket-netlink-diag", "socket-netlink-fib-lookup",
	"socket-netlink-generic", "socket-netlink-netfilter", "socket-netlink-uevent", "socket-netlink-usersock",
	"socket-netlink-xfrm", "socket-packet", "socket-raw-icmp", "socket-raw-ip6", "socket-rds", "socket-sctp", "socket-tipc",
	"socket-udplite", "socket-xdp", "statmount", "tcp-ulp", "tioclinux", "tiocsetd", "tiocsti", "tiocsti-high-bits",
	"trace-attach", "trace-seize", "x32-abi",
}

// DockerFeatures are the attacks of the corpus that Docker's default filter would let reach the
// kernel, sorted.
func DockerFeatures() []string { return slices.Clone(dockerFeatures) }

// Judged is a measurement compared with the planned filter.
type Judged struct {
	Reached []string `json:"reached"` // the calls that reach the kernel, sorted
	// Unclear are calls that the plan allows and whose answer the kernel gives too, if it lacks the
	// call or the caller a capability. Calls that are never made, because they would hold up the
	// host, are unclear as well.
	Unclear []string `json:"unclear,omitempty"`
	// Wrong describes calls whose answer is not the planned one: another filter is active.
	Wrong []string `json:"wrong,omitempty"`
}

// Open are the calls that a program may reach: all but those that are known to be refused.
func (j *Judged) Open() []string {
	open := slices.Concat(j.Reached, j.Unclear)
	slices.Sort(open)
	return open
}

// Judge compares a measurement with a plan.
func (m *Measured) Judge(plan *specs.LinuxSeccomp) Judged {
	var j Judged
	for number, answer := range m.Answers {
		name := CallName(number)
		args := CallArgs(name)
		v := seccomp.Lookup(plan, name, args[:]...)
		switch {
		case exempt(name), !v.Allowed() && answer == NotMade:
		case !v.Allowed() && answer == "ENOSYS":
			// Refused as well, like what no rule names: this build's libseccomp does not know the call.
		case !v.Allowed() && answer != v.String():
			j.Wrong = append(j.Wrong, name+" answers "+answer+", planned was "+v.String())
		case v.Allowed() && answer == Killed:
			j.Wrong = append(j.Wrong, name+" is allowed, and kills")
		case v.Allowed() && (answer == "ENOSYS" || answer == "EPERM" || answer == NotMade):
			j.Unclear = append(j.Unclear, name)
		case v.Allowed():
			j.Reached = append(j.Reached, name)
		}
	}
	slices.Sort(j.Reached)
	slices.Sort(j.Unclear)
	slices.Sort(j.Wrong)
	return j
}

// exempt are calls that the kernel exempts from filters: from anywhere but its own trampolines
// they end the program (seccomp.c, __secure_computing).
func exempt(name string) bool { return name == "uprobe" || name == "uretprobe" }

// Beyond are the names of one list that the other lacks, without those that no filter is asked
// about.
func Beyond(these, those []string) []string {
	var more []string
	for _, name := range these {
		if !exempt(name) && !slices.Contains(those, name) {
			more = append(more, name)
		}
	}
	return more
}
