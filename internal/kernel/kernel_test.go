package kernel

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
)

func TestMain(m *testing.M) {
	if code, handled := Main(os.Args[1:]); handled {
		os.Exit(code)
	}
	os.Exit(m.Run())
}

// unsupported skips where the kernel has refused, and fails on every other error: a probe that
// breaks is not a kernel that lacks something.
func unsupported(t *testing.T, err error) {
	t.Helper()
	if _, ok := errors.AsType[*UnsupportedError](err); ok {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestUserNamespacesAgreesWithUnshare(t *testing.T) {
	path, err := exec.LookPath("unshare")
	if err != nil {
		t.Skip("no unshare program to compare with")
	}
	out, theirs := exec.CommandContext(t.Context(), path, "-Urmpn", "--fork", "true").CombinedOutput()
	ours := UserNamespaces()
	if (ours == nil) != (theirs == nil) {
		t.Errorf("probe: %v; unshare: %v %s", ours, theirs, out)
	}
}

// TestUserNamespacesSeesRefusal has a limit of 0 in a namespace of its own: the control for the
// probe.
func TestUserNamespacesSeesRefusal(t *testing.T) {
	if os.Getenv("KERNEL_TEST_CHILD") == "1" {
		if err := os.WriteFile("/proc/sys/user/max_user_namespaces", []byte("0"), 0); err != nil {
			t.Fatal(err)
		}
		err := UserNamespaces()
		var u *UnsupportedError
		if !errors.As(err, &u) || !errors.Is(err, syscall.ENOSPC) {
			t.Fatalf("with a limit of 0 the probe says: %v", err)
		}
		return
	}
	unsupported(t, UserNamespaces())
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^"+t.Name()+"$")
	cmd.Env = []string{"KERNEL_TEST_CHILD=1"}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{HostID: os.Geteuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{HostID: os.Getegid(), Size: 1}},
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestOverlayLeavesNothing(t *testing.T) {
	unsupported(t, UserNamespaces())
	dir := t.TempDir()
	err := Overlay(t.Context(), dir)
	left, readErr := os.ReadDir(dir)
	if readErr != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, readErr)
	}
	unsupported(t, err)
}

func TestOverlayInAStrangeDirectory(t *testing.T) {
	unsupported(t, UserNamespaces())
	unsupported(t, Overlay(t.Context(), t.TempDir()))
	dir := t.TempDir() + "/a,b:c\\d=e f"
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := Overlay(t.Context(), dir); err != nil {
		t.Error(err)
	}
}

// TestOverlaySeesRefusal probes on a file system that cannot be an upper part.
func TestOverlaySeesRefusal(t *testing.T) {
	unsupported(t, UserNamespaces())
	if err := Overlay(t.Context(), "/proc"); err == nil {
		t.Error("overlay on /proc")
	}
	tmp := t.TempDir() // without the four directories
	var u *UnsupportedError
	if err := runChild(t.Context(), "overlay", tmp, "overlay", "0"); !errors.As(err, &u) || !strings.Contains(err.Error(), "mount") {
		t.Errorf("a mount that cannot work: %v", err)
	}
}

func TestProc(t *testing.T) {
	unsupported(t, UserNamespaces())
	unsupported(t, Proc(t.Context()))
	// The child's procfs must not have come to us: there our own number would be another.
	if link, err := os.Readlink("/proc/self"); err != nil || link == "1" {
		t.Errorf("/proc/self is %q, %v", link, err)
	}
}

func TestChildAnswersNonsenseWithAnError(t *testing.T) {
	unsupported(t, UserNamespaces())
	if err := runChild(t.Context(), "nonsense", "-", "nonsense", "0"); err == nil || !strings.Contains(err.Error(), "nonsense") {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := runChild(ctx, "proc", "-", "proc", "0"); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestNotHooked(t *testing.T) {
	hooked.Store(false)
	defer hooked.Store(true)
	if err := Proc(t.Context()); !errors.Is(err, ErrNotHooked) {
		t.Error(err)
	}
}

func TestMainLeavesOtherArgumentsAlone(t *testing.T) {
	for _, args := range [][]string{nil, {"run"}, {childArg}, {childArg, "proc"}, {"run", childArg, "proc"}, {childArg, "a", "b", "c"}} {
		if _, handled := Main(args); handled {
			t.Errorf("%q taken for a child", args)
		}
	}
}

func TestMainMountsNothingHere(t *testing.T) {
	if code, handled := Main([]string{childArg, "proc", "-"}); !handled || code == 0 {
		t.Errorf("a probe's child outside of a probe: code %d, handled %v", code, handled)
	}
}

func TestSeccompActionsAreThoseOfProc(t *testing.T) {
	got, err := SeccompActions()
	unsupported(t, err)
	text, err := os.ReadFile("/proc/sys/kernel/seccomp/actions_avail")
	if err != nil {
		t.Skip(err)
	}
	want := strings.Fields(string(text))
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("%q, /proc says %q", got, want)
	}
}

func TestSysctl(t *testing.T) {
	if v, found, err := Sysctl("kernel/pid_max"); err != nil || !found || v < 1 {
		t.Error(v, found, err)
	}
	if _, found, err := Sysctl("kernel/there_is_no_such_thing"); err != nil || found {
		t.Error(found, err)
	}
	if _, _, err := Sysctl("kernel/ostype"); err == nil {
		t.Error("a word read as a number")
	}
}

func TestUserXattrs(t *testing.T) {
	dir := t.TempDir()
	err := UserXattrs(dir)
	if left, readErr := os.ReadDir(dir); readErr != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, readErr)
	}
	unsupported(t, err)
	if err := UserXattrs("/proc"); err == nil {
		t.Error("attributes on /proc")
	}
}

func TestProbesOfThisHost(t *testing.T) {
	release, err := Release()
	if err != nil {
		t.Error(err)
	}
	abi, landlock := LandlockABI()
	c, cgroup := ProbeCgroup()
	fs, err := Filesystem(t.TempDir())
	if err != nil {
		t.Error(err)
	}
	t.Logf("Linux %s, landlock %d (%v), calls %v, cgroup %+v (%v), %s", release, abi, landlock, Calls(), c, cgroup, fs)
}

func TestCgroupDir(t *testing.T) {
	const unified = "27 1 254:0 / / rw - ext4 /dev/vda rw\n40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n" +
		"41 31 0:38 / /sys/fs/cgroup/uni\\040fied rw,relatime shared:9 - cgroup2 cgroup2 rw\n"
	const container = "41 31 0:38 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup rw\n"
	for name, tc := range map[string]struct{ mounts, own, want string }{
		"whole hierarchy":         {unified, "1:name=systemd:/x\n0::/user.slice/a b\n", "/sys/fs/cgroup/uni fied/user.slice/a b"},
		"root group":              {unified, "0::/\n", "/sys/fs/cgroup/uni fied"},
		"part of it":              {container, "0::/docker/abc/init\n", "/sys/fs/cgroup/init"},
		"part of it, its root":    {container, "0::/docker/abc\n", "/sys/fs/cgroup"},
		"another part":            {container, "0::/docker/abcdef\n", ""},
		"outside the namespace":   {unified, "0::/../other\n", ""},
		"no v2 in /proc/*/cgroup": {unified, "1:name=systemd:/\n", ""},
	} {
		t.Run(name, func(t *testing.T) {
			m, err := parseCgroupMount(strings.NewReader(tc.mounts))
			if err != nil {
				t.Fatal(err)
			}
			own, err := parseOwnCgroup(strings.NewReader(tc.own))
			if err != nil {
				t.Fatal(err)
			}
			got, err := m.dir(own)
			if got != tc.want || (err == nil) != (tc.want != "") {
				t.Errorf("%q, %v; want %q", got, err, tc.want)
			}
		})
	}
}
