package functional

import (
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// A program that fills the disk costs others nothing when it has ended: its files make room, those
// of sandboxes that ended by themselves or were stopped stay. While it runs, requests that need the
// disk are refused before anything is made, and records tell of files that had to go.
func TestFullDiskTakesTheFilesOfKilledSandboxesFirst(t *testing.T) {
	testenv.RequireRoot(t)
	testenv.RequireUserNS(t)
	small, err := os.MkdirTemp("", "full") //nolint:usetesting // t.TempDir is too long for the name of a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(small) })
	if err := unix.Mount("tmpfs", small, "tmpfs", 0, "size=96m,mode=711"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(small, unix.MNT_DETACH) })
	t.Setenv("TMPDIR", small)
	const reserve = 40 << 20 // sandboxes may use half of it
	d := harness.Start(t, harness.Options{Args: []string{"--disk-reserve", fmt.Sprint(reserve)}})
	stopped, done := d.Create(t, api.CreateSandbox{Name: "kept"}), d.Create(t, api.CreateSandbox{Name: "done", Command: []string{"sh", "-c", "echo done >/root/file"}})
	stopped.Sh(t, "echo kept >/root/file")
	stopped.MustTurn(t, "stop", api.StopSandbox{}, api.StateStopped)
	done.WaitState(t, api.StateStopped)
	const fill = "cat /dev/zero >/root/zeros 2>/dev/null; true"

	bomb := d.Create(t, api.CreateSandbox{Name: "bomb", Timeout: 5})
	_, _ = bomb.TryExec(t.Context(), api.ExecRequest{Argv: []string{"sh", "-c", fill}}) // its deadline may come before
	if got := bomb.WaitState(t, api.StateStopped); !strings.Contains(got.Reason, "deadline") && !strings.Contains(got.Reason, "the disk is short") {
		t.Fatalf("the bomb: %q", got.Reason)
	}
	next := d.Create(t, api.CreateSandbox{Name: "next"})
	next.Sh(t, "head -c 8000000 /dev/zero >/root/file")
	for s, files := range map[*harness.Sandbox]bool{bomb: false, done: true, stopped: true} {
		got, err := s.Inspect(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if gone := strings.Contains(got.Reason, "its files were removed: the disk was short"); gone == files {
			t.Errorf("%s: %q", got.Name, got.Reason)
		}
	}
	if !strings.Contains(d.Log(), "files of an ended sandbox were removed, because the disk is short") {
		t.Error("the log does not say so")
	}
	err = d.Call(t.Context(), http.MethodPost, "/v1/sandboxes/bomb/start", api.StartSandbox{}, nil)
	if err == nil || !strings.Contains(err.Error(), "its files were removed") {
		t.Errorf("start of the bomb: %v", err)
	}

	// One that runs on, and leaves more than half of the reserve.
	second := d.Create(t, api.CreateSandbox{Name: "second"})
	var st unix.Statfs_t
	if err := unix.Statfs(small, &st); err != nil {
		t.Fatal(err)
	}
	second.Sh(t, fmt.Sprintf("head -c %d /dev/zero >/root/zeros", int64(st.Bavail)*st.Frsize-reserve*3/4))
	for _, call := range []struct {
		method, path string
		body         any
	}{
		{http.MethodPost, "/v1/sandboxes", api.CreateSandbox{}},
		{http.MethodPost, "/v1/sandboxes/second/snapshots", api.TakeSnapshot{}},
		{http.MethodPost, "/v1/sandboxes/second/fork", api.ForkSandbox{}},
		{http.MethodPost, "/v1/images/pull", api.PullImage{Reference: "localhost:1/none:1"}},
		{http.MethodPut, "/v1/sandboxes/next/files?path=/root/more", nil},
	} {
		err := d.Call(t.Context(), call.method, call.path, call.body, nil)
		if err == nil || !strings.Contains(err.Error(), "are reserved for the daemon") {
			t.Errorf("%s %s: %v", call.method, call.path, err)
		}
	}
	next.Sh(t, "true") // nothing of the disk
	second.Delete(t)
	d.Create(t, api.CreateSandbox{})
}

func TestMultiTenantIsRefusedWithAllReasons(t *testing.T) {
	d := harness.Start(t, harness.Options{})
	got := d.CLI(t, "serve", "--multi-tenant", "--disk-reserve", "0", "--data-dir", d.DataDir+"2", "--runtime-dir", d.RuntimeDir+"2", "--socket", d.RuntimeDir+"2/api.sock")
	for _, want := range []string{"--multi-tenant: this host would not keep tenants apart", "(1) no tenants are named: --tenants", "which is closed to tenants", "--disk-reserve 0"} {
		if !strings.Contains(got.Stderr, want) {
			t.Errorf("nothing says %q", want)
		}
	}
	if got.Code != 1 {
		t.Errorf("%+v", got)
	}
	for _, args := range [][]string{{"--tenants", "4711"}, {"--multi-tenant", "--tenants", "root"}, {"--overcommit", "0.5"}, {"--pids", "1"}} {
		if got := d.CLI(t, append([]string{"serve", "--data-dir", d.DataDir + "2", "--runtime-dir", d.RuntimeDir + "2"}, args...)...); got.Code != 2 || !strings.Contains(got.Stderr, args[len(args)-2]) {
			t.Errorf("%q: %+v", args, got)
		}
	}
}

// No blocks are reserved without writing, what gives them back works, and glibc writes instead.
func TestFallocateReservesNothing(t *testing.T) {
	testenv.RequireUserNS(t)
	d := shared(t)
	for _, profile := range []string{"default", "hardened"} {
		s := d.Create(t, api.CreateSandbox{Profile: profile})
		got := s.Sh(t, `cd /tmp
fallocate -l 1g a 2>&1 | grep -c 'not supported'; fallocate -n -l 1g a 2>&1 | grep -c unsupported; stat -c %b a
head -c 65536 /dev/zero >b; fallocate -z -l 65536 b 2>&1 | grep -c 'not supported'; fallocate -p -o 0 -l 65536 b && stat -c %s b
fallocate -x -l 65536 c && stat -c %s c
python3 -c '
import fcntl, os, struct
fd = os.open("d", os.O_CREAT | os.O_RDWR)
for request in 0x40305828, 0x4030582a, 0x40305839:
    try: fcntl.ioctl(fd, request, struct.pack("hhqqiI4i", 0, 0, 0, 1 << 20, 0, 0, 0, 0, 0, 0))
    except OSError as e: print(e.errno)
print(os.fstat(fd).st_blocks)'`)
		if got != "1\n1\n0\n1\n65536\n65536\n95\n95\n95\n0\n" {
			t.Errorf("%s: %q", profile, got)
		}
	}
}
