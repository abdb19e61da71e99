package idmap

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// TestMain is also the child that waits in its new user namespace: the test binary executed once
// more.
func TestMain(m *testing.M) {
	if os.Getenv("IDMAP_TEST_CHILD") == "1" {
		child()
		return
	}
	os.Exit(m.Run())
}

func child() {
	// End of file says that the maps stand, or that the parent has gone.
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
		fmt.Println("stdin:", err)
		return
	}
	fmt.Println("uid", syscall.Getuid(), "gid", syscall.Getgid())
	// As root the child must leave the host's root behind by itself.
	if err := syscall.Setresgid(0, 0, 0); err != nil {
		fmt.Println("setresgid:", err)
	}
	if err := syscall.Setresuid(0, 0, 0); err != nil {
		fmt.Println("setresuid:", err)
	}
	fmt.Println("then uid", syscall.Getuid(), "gid", syscall.Getgid(), "setgroups:", syscall.Setgroups([]int{}))
}

// applyTo starts a child in a new user namespace, applies the plan and returns what the child
// printed.
func applyTo(t *testing.T, p Plan) (string, error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	cmd := exec.CommandContext(ctx, "/proc/self/exe")
	cmd.Env = []string{"IDMAP_TEST_CHILD=1"}
	const setgid, setuid = 6, 7
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER,
		AmbientCaps: []uintptr{setgid, setuid},
		Pdeathsig:   syscall.SIGKILL,
	}
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Skipf("this host has no user namespaces for us: %v", err)
	}
	applied := Apply(ctx, cmd.Process.Pid, p)
	if err := stdin.Close(); err != nil {
		t.Error(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("child: %v: %s", err, out.String())
	}
	return out.String(), applied
}

func TestApplyDetected(t *testing.T) {
	p, err := Detect()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", p)
	out, err := applyTo(t, p)
	if err != nil {
		t.Fatal(err)
	}
	groups := "<nil>"
	if p.Method == Single {
		groups = "operation not permitted"
	}
	if want := "then uid 0 gid 0 setgroups: " + groups + "\n"; !strings.HasSuffix(out, want) {
		t.Errorf("child said %q, want %q at its end", out, want)
	}
}

func TestApplySingle(t *testing.T) {
	p := singlePlan(Inputs{UID: os.Geteuid(), GID: os.Getegid()}, "asked for")
	out, err := applyTo(t, p)
	if err != nil {
		t.Fatal(err)
	}
	if want := "setgroups: operation not permitted\n"; !strings.HasSuffix(out, want) {
		t.Errorf("child said %q, want %q at its end", out, want)
	}
}

func TestApplyRefusesForeignIDs(t *testing.T) {
	if os.Geteuid() == 0 {
		t.Skip("root may map any id")
	}
	// Control: TestApplySingle, the same but for the id.
	p := singlePlan(Inputs{UID: 0, GID: 0}, "an attack")
	if _, err := applyTo(t, p); err == nil {
		t.Error("an ordinary user mapped the host's root")
	}
}

func TestVerifyFindsAnotherMap(t *testing.T) {
	p := Plan{Method: Direct, UID: []Range{{0, 77, 1}}, GID: []Range{{0, 77, 1}}}
	if err := Verify(os.Getpid(), p); err == nil {
		t.Error("the map of this process was taken for another")
	}
}

// A namespace has the maps, and leaves no process behind.
func TestNamespace(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root maps any id")
	}
	ns, err := Namespace([]Range{{1000, 5000, 10}}, []Range{{2000, 6000, 20}})
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	if kind, err := unix.IoctlRetInt(int(ns.Fd()), unix.NS_GET_NSTYPE); err != nil || kind != unix.CLONE_NEWUSER {
		t.Errorf("namespace of type %#x, %v", kind, err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(ns.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		var other unix.Stat_t
		if unix.Stat("/proc/"+e.Name()+"/ns/user", &other) == nil && other.Ino == st.Ino && other.Dev == st.Dev {
			t.Errorf("process %s is in the namespace", e.Name())
		}
	}
	if _, err := Namespace([]Range{{0, 5000, 10}, {5, 6000, 10}}, []Range{{0, 0, 1}}); err == nil {
		t.Error("a namespace with maps that overlap was made")
	}
}

// A file system that cannot map its mounts is told from one that can.
func TestProbeMounts(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root maps mounts")
	}
	dir := t.TempDir()
	err := ProbeMounts(dir)
	t.Logf("mounts of %s: %v", dir, err)
	if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
		t.Errorf("left behind: %v, %v", entries, err)
	}
	sys, err := os.Open("/sys")
	if err != nil {
		t.Fatal(err)
	}
	defer sys.Close()
	ids := []Range{{0, 0, 1}}
	ns, err := Namespace(ids, ids)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	if _, err := CloneMount(sys, ns, 0); err == nil {
		t.Error("mounts of sysfs can be mapped")
	}
}
