package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/guest/guesttest"
	"github.com/sandboxd/sandboxd/internal/guest/host"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// Promises of the design: every sandbox pays for its init.
const (
	maxSize = 3 << 20
	// Of memory of its own. The pages of its file are shared by all sandboxes: at most maxSize of
	// them are resident, and how many of these the kernel maps ahead is its own choice.
	maxAnon = 3 << 19
)

// envShim makes the test binary prepare new namespaces and become the init that it names.
const envShim = "SANDBOXD_INIT_TEST_SHIM"

func TestMain(m *testing.M) {
	if path := os.Getenv(envShim); path != "" {
		fmt.Fprintln(os.Stderr, "shim:", shim(path))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// bounding is the bounding set of the profile of this test's sandbox; init itself keeps everything.
var bounding = []uintptr{unix.CAP_CHOWN, unix.CAP_SETUID, unix.CAP_SETGID}

// shim prepares an init like the launcher: the bounding set is the profile's, the inheritable set
// is full.
func shim(path string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return fmt.Errorf("mount proc: %w", err)
	}
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return err
	}
	for i := range data {
		data[i].Inheritable = data[i].Permitted
	}
	if err := unix.Capset(&hdr, &data[0]); err != nil {
		return err
	}
	for c := uintptr(0); c <= unix.CAP_LAST_CAP; c++ {
		keep := false
		for _, b := range bounding {
			keep = keep || b == c
		}
		if !keep {
			if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); err != nil {
				return err
			}
		}
	}
	_ = unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_RAISE, unix.CAP_SYS_ADMIN, 0, 0)
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	if err := guesttest.PassProc(); err != nil {
		return err
	}
	// A descriptor that the launcher might leave open.
	if _, err := unix.Open("/", unix.O_PATH, 0); err != nil {
		return err
	}
	return unix.Exec(path, []string{"sandboxd-init"}, nil)
}

// build returns the init that was built for all tests, or builds one.
func build(t *testing.T) string {
	t.Helper()
	if dir := os.Getenv("SANDBOXD_BIN"); dir != "" {
		return filepath.Join(dir, "sandboxd-init")
	}
	path := filepath.Join(t.TempDir(), "sandboxd-init")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-ldflags=-s -w", "-o", path, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return path
}

func TestInit(t *testing.T) {
	bin := build(t)

	t.Run("is small", func(t *testing.T) {
		fi, err := os.Stat(bin)
		if err != nil || fi.Size() > maxSize {
			t.Errorf("%d bytes, at most %d; %v", fi.Size(), maxSize, err)
		}
	})

	t.Run("refuses to run by itself", func(t *testing.T) {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _, _ = r.Close(), w.Close() }()
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		connected := os.NewFile(uintptr(pair[0]), "connected")
		defer func() { _, _ = connected.Close(), unix.Close(pair[1]) }()
		for name, files := range map[string][]*os.File{"nothing": nil, "a pipe": {r}, "a connected socket": {connected}} {
			cmd := exec.CommandContext(t.Context(), bin)
			cmd.ExtraFiles = files
			out, err := cmd.CombinedOutput()
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.ExitCode() != 1 || !strings.HasPrefix(string(out), "sandboxd-init: use descriptor 3: ") {
				t.Errorf("with %s as descriptor 3: %v, %q", name, err, out)
			}
		}
	})

	path := filepath.Join(t.TempDir(), "guest.sock")
	l, err := guesttest.Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	testenv.RequireUserNS(t)
	ids := 1
	if os.Getuid() == 0 {
		ids = 65536
	}
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = []string{envShim + "=" + bin}
	cmd.Stderr = os.Stderr
	cmd.ExtraFiles = []*os.File{l}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:                 unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWUTS,
		UidMappings:                []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: ids}},
		GidMappings:                []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: ids}},
		GidMappingsEnableSetgroups: ids > 1,
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = cmd.Process.Kill(), cmd.Wait() }()
	c := host.NewClient(path)
	if err := c.Ping(t.Context()); err != nil {
		t.Fatal(err)
	}

	t.Run("is frugal", func(t *testing.T) {
		anon, err := strconv.Atoi(strings.Fields(status(t, cmd.Process.Pid, "RssAnon"))[0])
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("idle: %d KiB of its own, %s with its file, %s threads", anon,
			status(t, cmd.Process.Pid, "VmRSS"), status(t, cmd.Process.Pid, "Threads"))
		if anon<<10 > maxAnon {
			t.Errorf("idle init has %d KiB of its own, at most %d", anon, maxAnon>>10)
		}
	})

	t.Run("has no inherited descriptor", func(t *testing.T) {
		// From the host: no process inside can inspect init's.
		entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", cmd.Process.Pid))
		if errors.Is(err, os.ErrPermission) {
			return // init is not dumpable, and this test not privileged
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			link, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", cmd.Process.Pid, e.Name()))
			if err == nil && link == "/" {
				t.Errorf("descriptor %s is /", e.Name())
			}
		}
	})

	run := func(t *testing.T, script string) string {
		t.Helper()
		e, err := c.Exec(t.Context(), host.ExecRequest{Argv: []string{"sh", "-c", script}, Env: []string{"PATH=/usr/bin:/bin"}})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = e.Close() }()
		var out strings.Builder
		exit, err := e.Stream(t.Context(), func(_ string, p []byte) error { out.Write(p); return nil })
		if err != nil || exit.Code != 0 {
			t.Fatalf("%+v, %v: %s", exit, err, out.String())
		}
		return out.String()
	}

	t.Run("gives away the profile's capabilities only", func(t *testing.T) {
		var bnd uint64
		for _, b := range bounding {
			bnd |= 1 << b
		}
		want := fmt.Sprintf("CapInh:\t%016x\nCapPrm:\t%016x\nCapEff:\t%016x\nCapBnd:\t%016x\nCapAmb:\t%016x\n", 0, bnd, bnd, bnd, 0)
		// More rounds than there are threads that could fork.
		for range 20 {
			if got := run(t, "grep ^Cap /proc/self/status"); got != want {
				t.Fatalf("got\n%swant\n%s", got, want)
			}
		}
		// Init itself has more, or it could not kill everything.
		if got := status(t, cmd.Process.Pid, "CapEff"); !strings.HasSuffix(got, "ffffffff") {
			t.Errorf("init has %s", got)
		}
	})

	t.Run("is out of reach", func(t *testing.T) {
		got := run(t, "for f in mem environ exe fd/3 root; do cat /proc/1/$f >/dev/null 2>&1 || readlink /proc/1/$f || echo no; done")
		if got != strings.Repeat("no\n", 5) {
			t.Errorf("got %q", got)
		}
	})
}

// status reads a line of /proc/<pid>/status.
func status(t *testing.T, pid int, name string) string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, name+":"); ok {
			return strings.TrimSpace(v)
		}
	}
	t.Fatalf("no %s in the status of %d", name, pid)
	return ""
}
