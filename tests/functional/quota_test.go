package functional

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/runtime/quota"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// hold ends a program of Python whose files would go with it, before their sizes are measured.
const hold = "import time; time.sleep(31536000)"

// fillers are ways to fill a disk. None ends by itself before it has used some GiB, or a million
// files.
var fillers = map[string]string{
	"bytes": `cat /dev/zero >/root/zeros`,
	"many":  `python3 -c 'for i in range(1000000): open("/root/%d" % i, "w").write("x" * 5000)'`,
	"empty": `python3 -c 'for i in range(1000000): open("/root/%d" % i, "w")'`,
	"dirs":  `python3 -c 'import os; [os.mkdir("/root/%d" % i) for i in range(1000000)]'`,
	"links": `python3 -c 'import os; [os.symlink("x" * 3000, "/root/%d" % i) for i in range(1000000)]'`,
	"deep": `python3 -c 'import os; [(os.mkdir("/root/d"), os.chdir("/root/d")) and 0 for i in range(1)]
for i in range(1000000): os.mkdir("d"); os.chdir("d")'`,
	"closed": `chmod 0 /root; umask 777; python3 -c 'for i in range(1000000): open("/root/%d" % i, "w").write("x" * 50000)'`,
	"holes": `python3 -c '
f = open("/root/holes", "wb")
for i in range(1000000): f.seek(i << 20); f.write(b"x" * 65536); f.flush()'`,
	"deleted": `python3 -c '
import os
f = open("/root/deleted", "wb"); os.unlink("/root/deleted")
for i in range(100000): f.write(b"x" * 65536); f.flush()
` + hold + `'`,
	"deleted one by one": `python3 -c '
import os
held = []
for i in range(900):
    f = open("/root/d", "wb"); os.unlink("/root/d"); f.write(b"x" * (4 << 20)); f.flush(); held.append(f)
` + hold + `'`,
	"mapped": `python3 -c '
import mmap
f = open("/root/m", "w+b"); f.truncate(4 << 30); m = mmap.mmap(f.fileno(), 4 << 30)
for i in range(1 << 20): m[i * 4096] = 1'`,
	"mapped and deleted": mappedAndDeleted,
	"nameless": `python3 -c '
import os
zeros = os.open("/dev/zero", os.O_RDONLY); held = []
for i in range(900):
    fd = os.open("/root", os.O_TMPFILE | os.O_RDWR, 0o600); os.sendfile(fd, zeros, 0, 4 << 20) or os.write(fd, b"x" * (4 << 20)); held.append(fd)
` + hold + `'`,
}

// mappedAndDeleted keeps files in mappings alone.
const mappedAndDeleted = `python3 -c '
import ctypes, os
libc = ctypes.CDLL(None); libc.mmap.restype = ctypes.c_void_p
for i in range(900):
    fd = os.open("/root/m", os.O_CREAT | os.O_RDWR); os.unlink("/root/m")
    os.write(fd, b"x" * (4 << 20)); libc.mmap(None, 4 << 20, 3, 1, fd, 0); os.close(fd)
` + hold + `'`

// However a program fills the disk, the sandbox is ended, says why, and keeps its files until it is
// deleted. What takes no space is not counted.
func TestDiskLimitEndsWhatFillsTheDisk(t *testing.T) {
	testenv.RequireUserNS(t)
	limitsHold(t, shared(t))
}

// Without subordinate ids a sandbox's files are the daemon's own user's.
func TestDiskLimitWithoutSubordinateIDs(t *testing.T) {
	limitsHold(t, withoutIDs(t))
}

func limitsHold(t *testing.T, d *harness.Daemon) {
	t.Helper()
	neighbour := d.Create(t, api.CreateSandbox{Limits: api.Limits{Disk: 64 << 20}})
	neighbour.Sh(t, "echo kept >/root/kept; truncate -s 20g /root/hole; rm -rf /root/none")
	if got := neighbour.Enforced.Disk; got != "accounting" {
		t.Errorf("enforced.disk %q", got)
	}
	for name, script := range fillers {
		t.Run(name, func(t *testing.T) {
			s := d.Create(t, api.CreateSandbox{Limits: api.Limits{Disk: 32 << 20, Inodes: 2000}})
			_, _ = s.TryExec(t.Context(), api.ExecRequest{Argv: []string{"sh", "-c", script}, Timeout: testenv.HungAfter.Seconds()}) // it ends with the sandbox
			got := s.WaitState(t, api.StateStopped)
			if !strings.HasPrefix(got.Reason, "disk: ") {
				t.Errorf("ended: %q", got.Reason)
			}
			if os.Getuid() == 0 {
				used, err := quota.Measure([]string{filepath.Join(d.DataDir, "sandboxes", s.ID)}, quota.Usage{})
				t.Logf("%s; on disk now: %+v, %v", got.Reason, used, err)
			}
			s.Delete(t)
		})
	}
	if got := neighbour.Sh(t, "cat /root/kept"); got != "kept\n" {
		t.Errorf("the neighbour: %q", got)
	}
}

// What a program writes to its workspace counts.
func TestDiskLimitHoldsInAWorkspace(t *testing.T) {
	testenv.RequireUserNS(t)
	d := shared(t)
	for name, script := range map[string]string{"bytes": "cat /dev/zero >/workspace/zeros", "mapped and deleted": strings.ReplaceAll(mappedAndDeleted, "/root/", "/workspace/")} {
		s := d.Create(t, api.CreateSandbox{Limits: api.Limits{Disk: 32 << 20}, Settings: api.Settings{Workspace: workspaceOf(t, t.TempDir())}})
		_, _ = s.TryExec(t.Context(), api.ExecRequest{Argv: []string{"sh", "-c", script}, Timeout: testenv.HungAfter.Seconds()}) // it ends with the sandbox
		if got := s.WaitState(t, api.StateStopped); !strings.HasPrefix(got.Reason, "disk: ") {
			t.Errorf("%s: %q", name, got.Reason)
		}
		s.Delete(t)
	}
}

// A limit holds while no daemon runs, and the next one knows why the sandbox has ended. The space
// that is used is in the statistics; a limit can be raised, and one below the usage ends the
// sandbox.
func TestDiskLimitHoldsWithoutTheDaemon(t *testing.T) {
	testenv.RequireUserNS(t)
	d := harness.Start(t, harness.Options{})
	s := d.Create(t, api.CreateSandbox{Limits: api.Limits{Disk: 16 << 20}})
	update := func(s *harness.Sandbox, disk int64) {
		t.Helper()
		if err := d.Call(t.Context(), http.MethodPatch, "/v1/sandboxes/"+s.ID, api.UpdateSandbox{Limits: api.LimitsUpdate{Disk: &disk}}, nil); err != nil {
			t.Fatal(err)
		}
	}
	update(s, 64<<20)
	s.Sh(t, "head -c 32000000 /dev/zero >/root/file")
	harness.Eventually(t, func() error {
		var st api.Stats
		if err := d.Call(t.Context(), http.MethodGet, "/v1/sandboxes/"+s.ID+"/stats", nil, &st); err != nil {
			return err
		}
		if st.Disk == nil || st.Disk.Bytes < 32_000_000 || st.Disk.Inodes < 5 || st.Disk.Exceeded != "" {
			return fmt.Errorf("statistics: %+v", st.Disk)
		}
		return nil
	})
	lowered := d.Create(t, api.CreateSandbox{})
	lowered.Sh(t, "head -c 8000000 /dev/zero >/root/file")
	update(lowered, 4<<20)
	if got := lowered.WaitState(t, api.StateStopped); !strings.Contains(got.Reason, "the limit is 4 MiB") {
		t.Errorf("lowered: %q", got.Reason)
	}

	if os.Getuid() != 0 {
		return // signals of an ordinary user do not reach programs of a sandbox
	}
	detach(t, d.Client(t), s, api.ExecRequest{Argv: []string{"sh", "-c", "trap 'cat /dev/zero >/root/zeros' USR1; touch /root/ready; sleep 1000 & wait; : a-filler"}})
	filler := 0
	harness.Eventually(t, func() error {
		if got := s.Sh(t, "ls /root"); !strings.Contains(got, "ready") {
			return fmt.Errorf("/root has %q", got)
		}
		for _, pid := range s.Processes(t) {
			if line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); strings.Contains(string(line), "a-filler") {
				filler = pid
				return nil
			}
		}
		return errors.New("the filler does not run")
	})
	d.Kill9(t)
	if err := unix.Kill(filler, unix.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	harness.Eventually(t, func() error {
		if err := unix.Kill(filler, 0); !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("the filler runs: %w", err)
		}
		return nil
	})
	d.Launch(t)
	if got := s.WaitState(t, api.StateStopped); !strings.Contains(got.Reason, "disk: ") || !strings.Contains(got.Reason, "the limit is 64 MiB") {
		t.Errorf("without the daemon: %q", got.Reason)
	}
}

// On a small disk two sandboxes fill what they may, in their own files, in a volume and in logs,
// and a third one and the daemon work on, records and files included. All space is free at the end.
func TestSandboxesShareASmallDisk(t *testing.T) {
	testenv.RequireRoot(t)
	testenv.RequireUserNS(t)
	shareSmallDisk(t, nil)
}

func TestSandboxesShareASmallDiskWithoutSubordinateIDs(t *testing.T) {
	testenv.RequireRoot(t)
	testenv.RequireUserNS(t)
	shareSmallDisk(t, &syscall.Credential{Uid: nobodyUID, Gid: nobodyUID})
}

func TestSandboxesShareASmallDiskOfAUser(t *testing.T) {
	testenv.RequireRoot(t)
	testenv.RequireUserNS(t)
	shareSmallDisk(t, testenv.RequireAccount(t))
}

func shareSmallDisk(t *testing.T, as *syscall.Credential) {
	t.Helper()
	small, err := os.MkdirTemp("/tmp", "quota") //nolint:usetesting // t.TempDir is too long for the name of a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(small) })
	if err := unix.Mount("tmpfs", small, "tmpfs", 0, "size=384m,nr_inodes=60000,mode=1777"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(small, unix.MNT_DETACH) })
	if as != nil {
		publicPrograms(t) // not on the small disk
	}
	t.Setenv("TMPDIR", small)
	d := harness.Start(t, harness.Options{User: as})
	free := func() (bytes, inodes int64) {
		t.Helper()
		var st unix.Statfs_t
		if err := unix.Statfs(small, &st); err != nil {
			t.Fatal(err)
		}
		return int64(st.Bavail) * st.Frsize, int64(st.Ffree)
	}
	third := d.Create(t, api.CreateSandbox{Name: "third"})
	third.Sh(t, "echo before >/root/before")
	bytes, inodes := free()
	c := d.Client(t)

	const limit = 32 << 20
	works := func(name string) {
		t.Helper()
		if got := third.Sh(t, "head -c 1000000 /dev/zero >/root/while; cat /root/before /root/while | wc -c"); got != "1000007\n" {
			t.Errorf("%s: the third sandbox: %q", name, got)
		}
	}
	// Each in the sandbox's own files, and in a volume. There are fewer inodes than a limit of bytes
	// brings.
	for name, script := range fillers {
		for _, place := range []string{"own", "volume"} {
			var both []*harness.Sandbox
			var fill sync.WaitGroup
			for _, of := range []string{"one", "two"} {
				req := api.CreateSandbox{Name: of, Limits: api.Limits{Disk: limit, Inodes: 5000}}
				run := script
				if place == "volume" {
					if _, err := c.CreateVolume(t.Context(), api.CreateVolume{Name: of, Size: limit, Inodes: 5000}); err != nil {
						t.Fatal(err)
					}
					req.Limits, req.Mounts = api.Limits{}, []api.Mount{volumeMount(of, "/v")}
					run = strings.ReplaceAll(script, "/root", "/v")
				}
				s := d.Create(t, req)
				both = append(both, s)
				fill.Go(func() {
					_, _ = s.TryExec(t.Context(), api.ExecRequest{Argv: []string{"sh", "-c", run}, Timeout: testenv.HungAfter.Seconds()})
				}) // it ends with the sandbox
			}
			fill.Wait()
			for _, s := range both {
				prefix := "disk: "
				if place == "volume" {
					prefix += "volume " + s.Name + ": "
				}
				if got := s.WaitState(t, api.StateStopped); !strings.HasPrefix(got.Reason, prefix) || strings.Contains(got.Reason, "short") {
					t.Errorf("%s, %s: %s ended: %q", name, place, s.Name, got.Reason)
				}
			}
			b, i := free()
			t.Logf("%s, %s: both took %d KiB and %d inodes", name, place, (bytes-b)>>10, inodes-i)
			works(name + ", " + place)
			for _, s := range both {
				s.Delete(t)
				if place == "volume" {
					if err := c.RemoveVolume(t.Context(), s.Name); err != nil {
						t.Error(err)
					}
				}
			}
		}
	}
	// A log has its own bound: its oldest file goes for the next one.
	const logged = 3 * 4 << 20
	talks := d.Create(t, api.CreateSandbox{Name: "talks", Command: []string{"cat", "/dev/zero"}})
	harness.Eventually(t, func() error {
		used, err := quota.Measure([]string{filepath.Join(d.DataDir, "logs", talks.ID)}, quota.Usage{})
		if err != nil || used.Bytes < logged*2/3 {
			return fmt.Errorf("the log has %d bytes, %w", used.Bytes, err)
		}
		if used.Bytes > logged+1<<20 {
			t.Errorf("the log has %d bytes, more than %d", used.Bytes, logged)
		}
		return nil
	})
	works("logs")
	talks.Delete(t)
	third.Sh(t, "rm /root/while")
	harness.Eventually(t, func() error { // the kernel takes mounts apart a moment later
		if b, i := free(); b < bytes-4<<20 || i < inodes-200 {
			return fmt.Errorf("%d KiB and %d inodes were not freed", (bytes-b)>>10, inodes-i)
		}
		return nil
	})
}
