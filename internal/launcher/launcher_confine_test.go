package launcher

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// security.TestUnpackerIsConfined tests its effect on a real kernel.
func TestLandlockPlan(t *testing.T) {
	tests := []struct {
		abi        int
		fs         uint64 // handled
		net, scope uint64
	}{
		{abi: 2, fs: 1<<14 - 1},
		{abi: 3, fs: 1<<15 - 1},
		{abi: 4, fs: 1<<15 - 1, net: 3},
		{abi: 5, fs: 1<<16 - 1, net: 3},
		{abi: 6, fs: 1<<16 - 1, net: 3, scope: 3},
		{abi: 7, fs: 1<<16 - 1, net: 3, scope: 3},
		{abi: 8, fs: 1<<16 - 1, net: 3, scope: 3},
		{abi: 9, fs: 1<<17 - 1, net: 3, scope: 3},
		{abi: 99, fs: 1<<17 - 1, net: 3, scope: 3}, // unknown rights are not asked for
	}
	for _, tt := range tests {
		l := planLandlock(tt.abi, landlockTarget)
		want := unix.LandlockRulesetAttr{Handled_access_fs: tt.fs, Handled_access_net: tt.net, Scoped: tt.scope}
		if l.Handled != want {
			t.Errorf("version %d takes %+v, want %+v", tt.abi, l.Handled, want)
		}
		// The kernel refuses rules about rights that are not handled.
		if more := (l.Target | l.Lower | l.Self) &^ l.Handled.Handled_access_fs; more != 0 {
			t.Errorf("version %d allows %#x, which it does not know", tt.abi, more)
		}
		const never = unix.LANDLOCK_ACCESS_FS_EXECUTE | unix.LANDLOCK_ACCESS_FS_MAKE_SOCK | unix.LANDLOCK_ACCESS_FS_MAKE_BLOCK | unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
		if l.Target&never != 0 || l.Lower != unix.LANDLOCK_ACCESS_FS_READ_DIR {
			t.Errorf("version %d allows %#x in the layer and %#x below", tt.abi, l.Target, l.Lower)
		}
		if read := planLandlock(tt.abi, landlockUpper); read.Handled != want || read.Target != landlockUpper {
			t.Errorf("version %d takes %+v and allows %#x in what is only read", tt.abi, read.Handled, read.Target)
		}
	}
}

func TestApplyFilterPlan(t *testing.T) {
	f := applyFilter()
	if f.DefaultAction != specs.ActErrno {
		t.Errorf("what is not named is answered with %s", f.DefaultAction)
	}
	// Those that are allowed for some arguments only; a second rule without would undo the first.
	narrow := map[string]int{"clone": 0, "mknodat": 0, "prctl": 0, "prlimit64": 0}
	for _, rule := range f.Syscalls {
		for _, name := range rule.Names {
			if n, ok := narrow[name]; ok {
				narrow[name] = n + 1
				if len(rule.Args) != 1 {
					t.Errorf("%s is allowed with whatever arguments", name)
				}
			}
			if rule.Action == specs.ActAllow && slices.Contains([]string{
				"execve", "execveat", "socket", "connect", "ptrace", "unshare", "setns", "mount", "open_tree", "fork", "vfork",
				"clone3", "kill", "ioctl", "open_by_handle_at", "chroot", "pivot_root", "setuid", "capset", "bpf", "keyctl", "io_uring_setup",
			}, name) {
				t.Errorf("%s is allowed", name)
			}
		}
	}
	for name, n := range narrow {
		if n != 1 {
			t.Errorf("%d rules for %s, want one", n, name)
		}
	}
}

// engine.TestMakerIsConfined tests its effect on a real kernel.
func TestMakerFilterPlan(t *testing.T) {
	f := makerFilter()
	narrow := map[string][]int{"clone": {1}, "prctl": {1}, "prlimit64": {1}, "unshare": {1}, "ioctl": {1}, "socket": {2, 2, 2, 3, 3}}
	got := map[string][]int{}
	for _, rule := range f.Syscalls {
		for _, name := range rule.Names {
			if _, ok := narrow[name]; ok {
				got[name] = append(got[name], len(rule.Args))
			}
			if rule.Action == specs.ActAllow && slices.Contains([]string{
				"execve", "execveat", "connect", "accept", "accept4", "ptrace", "setns", "mount", "fsopen", "open_tree", "move_mount", "fork", "vfork",
				"clone3", "kill", "open_by_handle_at", "chroot", "pivot_root", "setuid", "capset", "bpf", "keyctl", "memfd_create",
				"linkat", "renameat2", "unlinkat", "mkdirat", "mknodat", "fchmodat", "fchownat", "pidfd_open", "process_vm_readv", "socketpair",
			}, name) {
				t.Errorf("%s is allowed", name)
			}
		}
	}
	if d := cmp.Diff(narrow, got); d != "" {
		t.Errorf("numbers of conditions, a rule each (-want +got):\n%s", d)
	}
}
