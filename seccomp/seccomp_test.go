package seccomp

import (
	"errors"
	"flag"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/runtime-spec/specs-go"
)

var update = flag.Bool("update", false, "write the golden files")

var able = Abilities{Actions: []string{"kill_process", "kill_thread", "trap", "errno", "user_notif", "trace", "log", "allow"}}

func plan(t *testing.T, arch string) *specs.LinuxSeccomp {
	t.Helper()
	return planOf(t, Default(), arch)
}

func planOf(t *testing.T, f Filter, arch string) *specs.LinuxSeccomp {
	t.Helper()
	p, err := Plan(f, arch, able)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s (-want +got; -update writes it):\n%s", path, diff)
	}
}

// TestGolden compares the readable form. The JSON form is golden in oci-profiles, where it is used.
func TestGolden(t *testing.T) {
	for _, f := range append(Embedded(), Launcher()) {
		for _, arch := range []string{AMD64, ARM64} {
			golden(t, f.Name+"_"+arch+".txt", []byte(Text(planOf(t, f, arch))))
		}
	}
}

// Sandboxes inherit the launcher's filter: it permits all calls of every profile, and no call that
// neither they nor the launcher need.
func TestLaunchersFilter(t *testing.T) {
	for _, arch := range []string{AMD64, ARM64} {
		through := Reachable(planOf(t, Launcher(), arch))
		for _, f := range Embedded() {
			for _, call := range Reachable(planOf(t, f, arch)) {
				if !slices.Contains(through, call) {
					t.Errorf("%s: %s lets %s through, which the launcher does not", arch, f.Name, call)
				}
			}
		}
		for _, call := range []string{
			"acct", "add_key", "bpf", "clock_settime", "delete_module", "fanotify_init", "finit_module", "init_module", "io_uring_setup", "ioperm", "iopl",
			"kexec_load", "keyctl", "name_to_handle_at", "open_by_handle_at", "perf_event_open", "pidfd_getfd", "process_vm_readv", "quotactl",
			"reboot", "request_key", "swapon", "syslog", "userfaultfd", "vhangup",
		} {
			if slices.Contains(through, call) {
				t.Errorf("%s: the launcher may call %s", arch, call)
			}
		}
		if v := Lookup(planOf(t, Launcher(), arch), "socket", 38, 5, 0); v.Allowed() {
			t.Errorf("%s: the launcher may make a socket of AF_ALG", arch)
		}
		// The kernel's bitmap needs this: no condition but on sockets.
		for _, rule := range planOf(t, Launcher(), arch).Syscalls {
			if len(rule.Args) > 0 && !slices.Contains(rule.Names, "socket") && !slices.Contains(rule.Names, "socketpair") {
				t.Errorf("%s: %v are let through for some arguments only", arch, rule.Names)
			}
		}
	}
}

// The count that SECURITY.md states; security.TestReachableSystemCalls measures it from inside.
func TestHardenedIsSmall(t *testing.T) {
	const most = 180
	for _, arch := range []string{AMD64, ARM64} {
		all, few := Reachable(planOf(t, Default(), arch)), Reachable(planOf(t, Hardened(), arch))
		if len(few) > most {
			t.Errorf("%s: hardened allows %d calls, at most %d", arch, len(few), most)
		}
		for _, call := range few {
			if !slices.Contains(all, call) {
				t.Errorf("%s: hardened allows %s, which default does not", arch, call)
			}
		}
	}
}

func TestHardenedAnswers(t *testing.T) {
	for _, arch := range []string{AMD64, ARM64} {
		p := planOf(t, Hardened(), arch)
		for call, want := range map[string]uint{
			"execve": 0, "ptrace": errnoEPERM, "mount": errnoEPERM, "clone3": errnoENOSYS, "splice": errnoENOSYS, "setxattr": errnoENOTSUP,
			"shmget": errnoENOSYS, "io_setup": errnoENOSYS, "personality": errnoENOSYS, "setreuid": errnoENOSYS, "setrlimit": errnoENOSYS,
		} {
			if v := Lookup(p, call); v.Errno != want || v.Allowed() != (want == 0) {
				t.Errorf("%s: %s answers %s, want errno %d", arch, call, v, want)
			}
		}
		for _, tc := range []struct {
			call string
			args []uint64
			want uint
		}{
			{"clone", []uint64{cloneNewUser}, errnoEPERM},
			{"seccomp", []uint64{1}, errnoEINVAL},
			{"prctl", []uint64{22, 2}, errnoEINVAL},
			{"setsockopt", []uint64{3, solSocket, 26}, errnoENOPROTOOPT},
			{"prlimit64", []uint64{1, 7, 0x7000}, errnoEPERM},
			{"mmap", []uint64{0, 1 << 21, 3, 0x40000 | 0x22}, errnoENOMEM},
		} {
			if v := Lookup(p, tc.call, tc.args...); v.Errno != tc.want {
				t.Errorf("%s: %s%#x answers %s, want errno %d", arch, tc.call, tc.args, v, tc.want)
			}
		}
	}
}

// A plan from elsewhere is refused where it gives less than every profile gives.
func TestCheck(t *testing.T) {
	for _, f := range Embedded() {
		for _, arch := range []string{AMD64, ARM64} {
			if err := Check(planOf(t, f, arch), arch); err != nil {
				t.Errorf("%s for %s: %v", f.Name, arch, err)
			}
		}
	}
	allow := func(names ...string) specs.LinuxSyscall {
		return specs.LinuxSyscall{Names: names, Action: specs.ActAllow}
	}
	for name, spoil := range map[string]func(*specs.LinuxSeccomp){
		"a list of what is refused": func(p *specs.LinuxSeccomp) { p.DefaultAction = specs.ActAllow },
		"a log":                     func(p *specs.LinuxSeccomp) { p.DefaultAction = specs.ActLog },
		"another architecture":      func(p *specs.LinuxSeccomp) { p.Architectures = []specs.Arch{specs.ArchX86} },
		"two architectures":         func(p *specs.LinuxSeccomp) { p.Architectures = append(p.Architectures, specs.ArchX32) },
		"no architecture":           func(p *specs.LinuxSeccomp) { p.Architectures = nil },
		"a listener":                func(p *specs.LinuxSeccomp) { p.ListenerPath = "/run/x" },
		"flags":                     func(p *specs.LinuxSeccomp) { p.Flags = []specs.LinuxSeccompFlag{specs.LinuxSeccompFlagLog} },
		"a tracer":                  func(p *specs.LinuxSeccomp) { p.Syscalls[0].Action = specs.ActTrace },
		"nothing named":             func(p *specs.LinuxSeccomp) { p.Syscalls[0].Names = nil },
		"mount":                     func(p *specs.LinuxSeccomp) { p.Syscalls = append(p.Syscalls, allow("read", "mount")) },
		"mount with a condition": func(p *specs.LinuxSeccomp) {
			r := allow("fsopen")
			r.Args = []specs.LinuxSeccompArg{{Index: 1, Op: specs.OpEqualTo, Value: 77}}
			p.Syscalls = append(p.Syscalls, r)
		},
		"io_uring":                func(p *specs.LinuxSeccomp) { p.Syscalls = append(p.Syscalls, allow("io_uring_setup")) },
		"every clone":             func(p *specs.LinuxSeccomp) { p.Syscalls = slices.Insert(p.Syscalls, 0, allow("clone")) },
		"every clone, in the end": func(p *specs.LinuxSeccomp) { p.Syscalls = append(p.Syscalls, allow("clone")) },
		"two conditions on one argument": func(p *specs.LinuxSeccomp) {
			r := allow("write")
			r.Args = []specs.LinuxSeccompArg{{Index: 1, Op: specs.OpEqualTo, Value: 77}, {Index: 1, Op: specs.OpNotEqual, Value: 78}}
			p.Syscalls = append(p.Syscalls, r)
		},
		"clone, compared in 64 bits": func(p *specs.LinuxSeccomp) {
			r := allow("clone")
			r.Args = []specs.LinuxSeccompArg{{Index: 0, Op: specs.OpGreaterThan, Value: 1<<32 - 1}}
			p.Syscalls = slices.Insert(p.Syscalls, 0, r)
		},
		"clone3":           func(p *specs.LinuxSeccomp) { p.Syscalls = append(p.Syscalls, allow("clone3")) },
		"every socket":     func(p *specs.LinuxSeccomp) { p.Syscalls = slices.Insert(p.Syscalls, 0, allow("socket")) },
		"every setsockopt": func(p *specs.LinuxSeccomp) { p.Syscalls = slices.Insert(p.Syscalls, 0, allow("setsockopt")) },
		"io_uring_enter":   func(p *specs.LinuxSeccomp) { p.Syscalls = append(p.Syscalls, allow("io_uring_enter")) },
		"every ioctl":      func(p *specs.LinuxSeccomp) { p.Syscalls = slices.Insert(p.Syscalls, 0, allow("ioctl")) },
	} {
		t.Run(name, func(t *testing.T) {
			p := plan(t, AMD64)
			spoil(p)
			if err := Check(p, AMD64); err == nil {
				t.Error("accepted")
			}
		})
	}
	if err := Check(plan(t, AMD64), "mips"); err == nil {
		t.Error("accepted for an architecture that there is no filter for")
	}
}

func TestDefaultAnswers(t *testing.T) {
	const (
		allow = 0
		high  = 1 << 32 // a bit that the kernel does not look at in an int
	)
	for _, tc := range []struct {
		call string
		args []uint64
		want uint
	}{
		// Calls that programs need.
		{"execve", nil, allow},
		{"futex_waitv", nil, allow},
		{"rseq", nil, allow},
		{"landlock_restrict_self", nil, allow},
		{"ptrace", []uint64{0}, allow},       // TRACEME
		{"ptrace", []uint64{0x4200}, allow},  // SETOPTIONS
		{"ptrace", []uint64{0x4207}, allow},  // INTERRUPT
		{"ptrace", []uint64{16}, errnoEPERM}, // ATTACH
		{"ptrace", []uint64{0x4206}, errnoEPERM},
		{"fcntl", []uint64{0, 1032}, allow}, // F_GETPIPE_SZ
		{"fcntl", []uint64{0, 7}, allow},
		{"fcntl", []uint64{0, 1031}, errnoEPERM},
		{"fcntl", []uint64{0, high | 1031}, errnoEPERM},
		{"memfd_secret", nil, errnoENOSYS},
		{"clone", []uint64{17}, allow},       // fork
		{"clone", []uint64{0x3d0f00}, allow}, // a thread of glibc
		{"clone", []uint64{0x4111}, allow},   // vfork by Go
		{"clone", []uint64{0x04000011}, allow},
		{"socket", []uint64{afUnix, 1, 0}, allow},
		{"socket", []uint64{afInet, 1 | 0x80800, 0}, allow},
		{"socket", []uint64{afInet6, 2, ipprotoUDP}, allow},
		{"socket", []uint64{afNetlink, 3, netlinkRoute}, allow},
		{"socketpair", []uint64{afUnix, 1, 0}, allow},
		{"setsockopt", []uint64{3, 1, 2}, allow},          // SO_REUSEADDR
		{"setsockopt", []uint64{3, ipprotoTCP, 1}, allow}, // TCP_NODELAY
		{"setsockopt", []uint64{3, 0, 31}, allow},
		{"ioctl", []uint64{0, 0x5401}, allow},             // TCGETS
		{"ioctl", []uint64{0, 0x540e}, allow},             // TIOCSCTTY
		{"ioctl", []uint64{0, 0xffffffff80045430}, allow}, // TIOCGPTN as musl passes it
		{"personality", []uint64{0xffffffff}, allow},
		{"personality", []uint64{0xffffffffffffffff}, allow},
		{"setsockopt", []uint64{3, solSocket, 27}, allow},   // SO_DETACH_FILTER
		{"setsockopt", []uint64{3, solSocket, 83}, allow},   // SO_RCVPRIORITY
		{"seccomp", []uint64{0}, allow},                     // strict, which the kernel refuses here
		{"seccomp", []uint64{2, 0, 0x7000}, allow},          // SECCOMP_GET_ACTION_AVAIL
		{"prctl", []uint64{38, 1}, allow},                   // PR_SET_NO_NEW_PRIVS
		{"prctl", []uint64{0x53564d41}, allow},              // PR_SET_VMA
		{"prctl", []uint64{0x59616d61}, allow},              // PR_SET_PTRACER
		{"prctl", []uint64{21}, allow},                      // PR_GET_SECCOMP
		{"prlimit64", []uint64{0, 7, 0x7000, 0}, allow},     // setrlimit of glibc
		{"prlimit64", []uint64{0, 7, 0, 0x7000}, allow},     // getrlimit
		{"prlimit64", []uint64{0, 4, 0, 0x7000}, allow},     // of cores too
		{"prlimit64", []uint64{1, 7, 0, 0x7000}, allow},     // prlimit(1) shows those of any
		{"setrlimit", []uint64{7, 0x7000}, allow},           //
		{"mmap", []uint64{0, 4096, 3, 0x22}, allow},         //
		{"mmap", []uint64{0, 4096, 3, 0x15 << 26}, allow},   // a size without MAP_HUGETLB
		{"memfd_create", []uint64{0x7000, 3}, allow},        //
		{"memfd_create", []uint64{0x7000, 0x8}, allow},      // MFD_NOEXEC_SEAL
		{"shmget", []uint64{0, 4096, 0o1600}, allow},        //
		{"shmget", []uint64{0, 4096, 0o10000 | 0x1}, allow}, // SHM_NORESERVE

		// Calls that attacks need.
		{"unshare", []uint64{cloneNewUser}, errnoEPERM},
		{"setns", nil, errnoEPERM},
		{"clone", []uint64{cloneNewUser | 17}, errnoEPERM},
		{"clone", []uint64{cloneNewNS}, errnoEPERM},
		{"clone", []uint64{cloneNewPID | 0x04000000}, errnoEPERM},
		{"clone", []uint64{cloneNewNet}, errnoEPERM},
		{"clone", []uint64{cloneNewIPC}, errnoEPERM},
		{"clone", []uint64{cloneNewCgroup}, errnoEPERM},
		{"clone", []uint64{high | cloneNewUser}, errnoEPERM},
		{"clone3", nil, errnoENOSYS},
		{"mount", nil, errnoEPERM},
		{"umount2", nil, errnoEPERM},
		{"pivot_root", nil, errnoEPERM},
		{"chroot", nil, errnoEPERM},
		{"move_mount", nil, errnoEPERM},
		{"open_tree", nil, errnoEPERM},
		{"fsopen", nil, errnoEPERM},
		{"mount_setattr", nil, errnoEPERM},
		{"io_uring_setup", nil, errnoEPERM},
		{"bpf", nil, errnoEPERM},
		{"perf_event_open", nil, errnoEPERM},
		{"userfaultfd", nil, errnoEPERM},
		{"keyctl", nil, errnoEPERM},
		{"open_by_handle_at", nil, errnoEPERM},
		{"pidfd_getfd", nil, errnoEPERM},
		{"kexec_load", nil, errnoEPERM},
		{"finit_module", nil, errnoEPERM},
		{"process_vm_writev", nil, errnoENOSYS},
		{"socket", []uint64{17, 3, 0x300}, errnoEAFNOSUPPORT},       // AF_PACKET
		{"socket", []uint64{38, 5, 0}, errnoEAFNOSUPPORT},           // AF_ALG
		{"socket", []uint64{40, 1, 0}, errnoEAFNOSUPPORT},           // AF_VSOCK
		{"socket", []uint64{44, 3, 0}, errnoEAFNOSUPPORT},           // AF_XDP
		{"socket", []uint64{high | 38, 5, 0}, errnoEAFNOSUPPORT},    // AF_ALG
		{"socket", []uint64{0xffffffff, 5, 0}, errnoEAFNOSUPPORT},   //
		{"socket", []uint64{afInet, 1, 262}, errnoEPROTONOSUPPORT},  // MPTCP
		{"socket", []uint64{afInet6, 1, 132}, errnoEPROTONOSUPPORT}, // SCTP
		{"socket", []uint64{afInet, 3, 255}, errnoEPROTONOSUPPORT},  // raw
		{"socket", []uint64{afInet, 3, ipprotoTCP}, errnoENOSYS},    // raw
		{"socket", []uint64{afInet6, 3 | 0x80000, ipprotoUDP}, errnoENOSYS},
		{"socket", []uint64{afInet, 10, 0}, errnoENOSYS}, // SOCK_PACKET
		{"socket", []uint64{afInet, high | 10, 0}, errnoENOSYS},
		{"socket", []uint64{afNetlink, 3, 12}, errnoEPROTONOSUPPORT}, // netfilter
		{"socket", []uint64{afNetlink, 3, 9}, errnoEPROTONOSUPPORT},  // audit
		{"socket", []uint64{afNetlink, 3, high | 12}, errnoEPROTONOSUPPORT},
		{"socketpair", []uint64{30, 1, 0}, errnoEAFNOSUPPORT}, // TIPC
		{"setsockopt", []uint64{3, ipprotoTCP, tcpULP}, errnoEPERM},
		{"setsockopt", []uint64{3, high | ipprotoTCP, tcpULP}, errnoEPERM},
		{"setsockopt", []uint64{3, ipprotoTCP, high | tcpULP}, errnoEPERM},
		{"ioctl", []uint64{0, tiocSTI}, errnoEPERM},
		{"ioctl", []uint64{0, high | tiocSTI}, errnoEPERM}, // CVE-2019-10063
		{"ioctl", []uint64{0, 0xffffffff00000000 | tiocLINUX}, errnoEPERM},
		{"ioctl", []uint64{0, tiocSETD}, errnoEPERM},
		{"personality", []uint64{0x0040000}, errnoENOSYS}, // ADDR_NO_RANDOMIZE
		{"personality", []uint64{high | 0x0400000}, errnoENOSYS},
		{"setsockopt", []uint64{3, solSocket, 26}, errnoENOPROTOOPT},
		{"setsockopt", []uint64{3, solSocket, 44}, errnoENOPROTOOPT},
		{"setsockopt", []uint64{3, solSocket, 50}, errnoENOPROTOOPT},
		{"setsockopt", []uint64{3, solSocket, 51}, errnoENOPROTOOPT},
		{"setsockopt", []uint64{3, solSocket, 52}, errnoENOPROTOOPT},
		{"setsockopt", []uint64{3, high | solSocket, high | soAttachFilter}, errnoENOPROTOOPT},
		{"setsockopt", []uint64{3, solSocket, soMask + 1 + soAttachFilter}, errnoENOSYS},
		{"setsockopt", []uint64{3, 263, 18}, errnoENOSYS}, // PACKET_FANOUT
		{"seccomp", []uint64{1, 0, 0x7000}, errnoEINVAL},
		{"seccomp", []uint64{high | 1, 0, 0x7000}, errnoEINVAL},
		{"seccomp", []uint64{5}, errnoENOSYS},
		{"prctl", []uint64{22, 2, 0x7000}, errnoEINVAL},
		{"prctl", []uint64{high | 22, 2, 0x7000}, errnoEINVAL},
		{"prlimit64", []uint64{1, 7, 0x7000, 0}, errnoEPERM},
		{"prlimit64", []uint64{17, 7, 0x7000, 0}, errnoEPERM},
		{"prlimit64", []uint64{high, 7, 0x7000, 0}, errnoEPERM}, // to the kernel that is oneself
		{"prlimit64", []uint64{1, 4, 0x7000, 0}, errnoEPERM},
		{"prlimit64", []uint64{1, 7, high, 0}, errnoEPERM}, // a pointer has 64 bits
		{"io_setup", []uint64{1, 0x7000}, errnoENOSYS},
		{"io_submit", nil, errnoENOSYS},
		{"mmap", []uint64{0, 1 << 21, 3, 0x22 | 0x40000}, errnoENOMEM},
		{"mmap", []uint64{0, 1 << 21, 3, 21<<26 | 0x22 | 0x40000}, errnoENOMEM},
		{"memfd_create", []uint64{0x7000, 0x4}, errnoENOMEM},
		{"memfd_create", []uint64{0x7000, high | 0x4 | 1}, errnoENOMEM},
		{"shmget", []uint64{0, 1 << 21, 0o4000 | 0o1600}, errnoENOMEM},
		{"setsockopt", []uint64{3, 282, 1}, errnoENOSYS}, // kernel TLS
		{"setsockopt", []uint64{3, 284, 1}, errnoENOSYS}, // MPTCP

		// A call that has not been reviewed.
		{"a_call_of_next_year", nil, errnoENOSYS},
		{"nfsservctl", nil, errnoENOSYS},
		{"lookup_dcookie", nil, errnoENOSYS},
	} {
		for _, arch := range []string{AMD64, ARM64} {
			if v := Lookup(plan(t, arch), tc.call, tc.args...); v.Errno != tc.want || v.Allowed() != (tc.want == 0) {
				t.Errorf("%s: %s%#x answers %s, want errno %d", arch, tc.call, tc.args, v, tc.want)
			}
		}
	}
}

// The limit of cores is not lowered, for 0 starts the host's program for cores again, and a program
// that lowers it goes on.
func TestLimitOfCoresStays(t *testing.T) {
	for _, arch := range []string{AMD64, ARM64} {
		for _, f := range Embedded() {
			p := planOf(t, f, arch)
			for _, tc := range []struct {
				call string
				args []uint64
			}{{"prlimit64", []uint64{0, 4, 0x7000, 0}}, {"prlimit64", []uint64{0, 1<<32 | rlimitCore, 0x7000, 0}}, {"setrlimit", []uint64{4, 0x7000}}} {
				if tc.call == "setrlimit" && f.Name == "hardened" {
					continue
				}
				if v := Lookup(p, tc.call, tc.args...); v.Allowed() || v.String() != "done" {
					t.Errorf("%s, %s: %s%#x answers %s", f.Name, arch, tc.call, tc.args, v)
				}
			}
		}
	}
}

func TestLegacyCallsAreOnlyThereWhereTheyExist(t *testing.T) {
	for _, call := range []string{"open", "fork", "modify_ldt"} {
		listed := func(arch string) bool {
			return slices.ContainsFunc(plan(t, arch).Syscalls, func(s specs.LinuxSyscall) bool { return slices.Contains(s.Names, call) })
		}
		if !listed(AMD64) || listed(ARM64) {
			t.Errorf("%s: amd64 %v, arm64 %v", call, listed(AMD64), listed(ARM64))
		}
	}
}

// TestOneAnswer checks on the plan itself that no call with given arguments gets two answers, so
// that the order in which libseccomp arranges rules cannot matter.
func TestOneAnswer(t *testing.T) {
	p := plan(t, AMD64)
	interesting := []uint64{
		0, 1, 2, 4, 6, 8, 9, 10, 16, 17, 22, 26, 31, 38, 44, 50, 51, 52, tiocSTI, tiocLINUX, tiocSETD, 0x20000, 0x20008, 0x40000, 1 << 31, low32,
	}
	r := rand.New(rand.NewPCG(1, 2))
	value := func() uint64 {
		v := interesting[r.IntN(len(interesting))]
		switch r.IntN(4) {
		case 0:
			v ^= 1 << r.IntN(64)
		case 1:
			v |= r.Uint64() << 32
		}
		return v
	}
	for _, call := range []string{
		"clone", "socket", "socketpair", "setsockopt", "ioctl", "personality", "seccomp", "prctl", "prlimit64", "setrlimit", "mmap", "memfd_create", "shmget",
	} {
		for range 20000 {
			args := []uint64{value(), value(), value(), value()}
			var got []Verdict
			for _, rule := range p.Syscalls {
				if v := verdict(rule.Action, rule.ErrnoRet); slices.Contains(rule.Names, call) && holds(rule.Args, args) && !slices.Contains(got, v) {
					got = append(got, v)
				}
			}
			if len(got) > 1 {
				t.Fatalf("%s%#x gets the answers %v", call, args, got)
			}
		}
	}
}

func TestNoneOf(t *testing.T) {
	for _, tc := range []struct {
		mask   uint32
		values []uint32
	}{
		{low32, []uint32{0}},
		{low32, []uint32{low32}},
		{low32, []uint32{tiocSTI, tiocLINUX, tiocSETD}},
		{0xffff, []uint32{tiocSTI, tiocLINUX, tiocSETD}},
		{afMask, []uint32{afUnix, afInet, afInet6, afNetlink}},
		{0x81, []uint32{0x80}},
	} {
		alternatives := noneOf(1, tc.mask, tc.values...)
		for v := range uint64(1 << 16) {
			for _, probe := range []uint64{v, v << 16, low32 - v, 1<<32 | v} {
				met := 0
				for _, a := range alternatives {
					if probe&a[0].Mask == a[0].Value {
						met++
					}
				}
				want := 1
				if slices.Contains(tc.values, uint32(probe)&tc.mask) {
					want = 0
				}
				if met != want {
					t.Fatalf("mask %#x, not %#x: %#x met by %d alternatives, want %d", tc.mask, tc.values, probe, met, want)
				}
			}
		}
	}
}

func TestPlanRefuses(t *testing.T) {
	read := Group{Reason: "read", Calls: []string{"read"}}
	for name, groups := range map[string][]Group{
		"nothing":                        {},
		"an empty group":                 {read, {Reason: "empty"}},
		"a call decided twice":           {read, {Reason: "again", Calls: []string{"read"}, Errno: 1}},
		"a condition beside none":        {read, {Reason: "again", Calls: []string{"read"}, When: anyOf(0, 1)}},
		"none beside a condition":        {{Reason: "again", Calls: []string{"read"}, When: anyOf(0, 1)}, read},
		"two conditions on one argument": {read, {Reason: "range", Calls: []string{"write"}, When: [][]Cond{{is(0, 1), is(0, 2)}}}},
		"a seventh argument":             {read, {Reason: "seventh", Calls: []string{"write"}, When: anyOf(6, 1)}},
		"a value outside its mask":       {read, {Reason: "never", Calls: []string{"write"}, When: [][]Cond{{{Arg: 0, Mask: 1, Value: 2}}}}},
		"a part of an argument, not":     {read, {Reason: "not", Calls: []string{"write"}, When: [][]Cond{{{Arg: 0, Mask: low32, Not: true}}}}},
		"a pretence with an error":       {read, {Reason: "both", Calls: []string{"write"}, Errno: 1, Pretend: true}},
		"an alternative without any":     {read, {Reason: "always", Calls: []string{"write"}, When: [][]Cond{{}}}},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := Plan(Filter{Name: "x", Groups: groups}, AMD64, able); err == nil {
				t.Error("planned")
			}
		})
	}
	if _, err := Plan(Default(), "mips", able); err == nil {
		t.Error("planned for an architecture that it does not know")
	}
	var unsupported *UnsupportedError
	if _, err := Plan(Default(), AMD64, Abilities{}); !errors.As(err, &unsupported) {
		t.Errorf("a kernel without seccomp: %v", err)
	}
}

// The ioctls that programs make of terminals, files, sockets and namespaces pass a filter that
// looks at some of their bits. Those of bridges, VLANs and terminals' input do not.
func TestIoctlsOfPrograms(t *testing.T) {
	closed := map[uint64]uint{
		0x5412: errnoEPERM, 0x541c: errnoEPERM, 0x5423: errnoEPERM, 0x8940: errnoEPERM, 0x8941: errnoEPERM,
		0x8982: errnoEPERM, 0x8983: errnoEPERM, 0x89a0: errnoEPERM, 0x89a1: errnoEPERM,
		0x40305828: errnoENOTSUP, 0x4030582a: errnoENOTSUP, 0x40305839: errnoENOTSUP,
	}
	var programs []uint64
	for _, span := range [][2]uint64{
		{0x5401, 0x545f},         // terminals
		{0x8901, 0x8939},         // sockets, interfaces, routes
		{0x8942, 0x894c},         // queues, link settings
		{0x89e0, 0x89ff},         // protocols' own
		{0xb701, 0xb70a},         // namespaces
		{0x40086601, 0x40086608}, // attributes and versions of files
		{0x660b, 0x660b},         // FIEMAP
		{0x5600, 0x5603},
		{0x4b33, 0x4b33},
		{0x4b44, 0x4b45}, // consoles, which programs ask whether they are one
		{0x5200, 0x5203},
		{0x801c581f, 0x801c581f},
		{0x401c5820, 0x401c5820},
		{0xc0185879, 0xc0185879},
		{0x40049409, 0x40049409},
		{0x4020940d, 0x4020940d},
		{0xc0189436, 0xc0189436},
		{0x81009431, 0x81009432}, // clones, labels
		{0x1260, 0x1260},
		{0x1268, 0x1268},
		{0x80081272, 0x80081272},
	} {
		for n := span[0]; n <= span[1]; n++ {
			programs = append(programs, n)
		}
	}
	for _, arch := range []string{AMD64, ARM64} {
		for _, request := range programs {
			if _, ok := closed[request]; ok {
				continue
			}
			if v := Lookup(plan(t, arch), "ioctl", 0, request); !v.Allowed() {
				t.Errorf("%s: ioctl %#x answers %s", arch, request, v)
			}
		}
		for request, want := range closed {
			if v := Lookup(plan(t, arch), "ioctl", 0, 1<<32|request); v.Allowed() || v.Errno != want {
				t.Errorf("%s: ioctl %#x answers %s, want errno %d", arch, request, v, want)
			}
		}
	}
}
