package limits

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// device is the number of the disk that the daemon's data lies on: here always a whole one, of the
// machine's root.
func device(t *testing.T, d *harness.Daemon) string {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(d.DataDir, &st); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev))
}

// moved returns the kernel's counter for the disk: "wbytes", "rios" and the like.
func moved(t *testing.T, dir, disk, what string) int64 {
	t.Helper()
	for line := range strings.Lines(read(t, dir, "io.stat")) {
		f := strings.Fields(line)
		if len(f) == 0 || f[0] != disk {
			continue
		}
		for _, pair := range f[1:] {
			var n int64
			if k, v, _ := strings.Cut(pair, "="); k == what {
				if _, err := fmt.Sscan(v, &n); err != nil {
					t.Fatalf("io.stat: %q: %v", line, err)
				}
				return n
			}
		}
	}
	return 0
}

const (
	writeDirect = "while :; do dd if=/dev/zero of=/tmp/direct bs=64k count=64 oflag=direct conv=notrunc; done"
	// Through the page cache, and synced so that it is written out by whoever dirtied it.
	writeCached = "while :; do dd if=/dev/zero of=/tmp/cached bs=64k count=64 conv=notrunc,fdatasync; done"
	// Several that do not wait for one another, nor for the disk: they are held when the kernel
	// writes their pages out.
	writeUnsynced = "for i in 1 2 3 4; do while :; do dd if=/dev/zero of=/tmp/unsynced$i bs=64k count=128 conv=notrunc; done & done; wait"
)

func loop(t *testing.T, s *harness.Sandbox, script string) {
	t.Helper()
	s.Sh(t, "nohup sh -c '"+script+"' >/dev/null 2>&1 &")
}

// await waits until the disk has seen some of a loop: what comes first is not held back.
func await(t *testing.T, dir, disk, what string, n int64) {
	t.Helper()
	harness.Eventually(t, func() error {
		if got := moved(t, dir, disk, what); got < n {
			return fmt.Errorf("%s is %d", what, got)
		}
		return nil
	})
}

// comesUpTo waits until a counter grows at its limit, ± 20 %. An emulated disk may be slower at
// any moment, because its processors are the host's. It is never faster.
func comesUpTo(t *testing.T, what string, limit float64, counter func() int64) {
	t.Helper()
	var seen []float64
	for range 8 {
		got := rate(t, 6*time.Second, counter)
		seen = append(seen, math.Round(got))
		if got > 1.2*limit {
			break
		}
		if got >= 0.8*limit {
			return
		}
	}
	t.Errorf("%.0f %s a second, want %.0f ± 20 %%", seen, what, limit)
}

// io.stat counts bytes and no periods, so that a ceiling of bytes per second can only be judged by
// a clock. TestLimitsAreInTheKernel compares io.max in the gate.
func TestIOLimitHoldsWrites(t *testing.T) {
	testenv.Soak(t, "it judges bytes per second")
	const bps = 1 * mib
	d := shared(t)
	disk := device(t, d)
	for name, script := range map[string]string{"direct": writeDirect, "through the page cache": writeCached, "through it and unsynced": writeUnsynced} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()                                                                                               // they wait, for the limit or for the kernel
			s := d.Create(t, api.CreateSandbox{Limits: api.Limits{Memory: 64 * mib, IO: api.IOLimits{WriteBPS: bps}}}) // or the page cache takes all
			dir := cgroupOf(t, s.PID)
			loop(t, s, script)
			await(t, dir, disk, "wbytes", bps/2)
			written := func() int64 { return moved(t, dir, disk, "wbytes") }
			if script == writeDirect {
				comesUpTo(t, "bytes", bps, written)
			} else {
				// Writes through the page cache wait for the journal too, and for a writeback that starts when
				// it likes and may pause for many seconds. Only the ceiling is judged.
				began := time.Now() // before the first look at the counter, which may be held up
				from := written()
				await(t, dir, disk, "wbytes", from+6*bps)
				if got := float64(written()-from) / time.Since(began).Seconds(); got > 1.2*bps {
					t.Errorf("%.0f bytes a second, want %d at most", got, bps)
				}
			}
			// A ceiling and not the disk's speed: without it there is more.
			mustPatch(t, d, s, api.LimitsUpdate{IO: api.IOUpdate{WriteBPS: new(int64(0))}})
			if got := read(t, dir, "io.max"); got != "" {
				t.Errorf("io.max is %q after the limit was taken away", got)
			}
			// Unsynced writes come in bursts, when the kernel finds that pages have been dirty for long.
			var freed float64
			for range 20 {
				if freed = max(freed, rate(t, 3*time.Second, written)); freed >= 2*bps {
					break
				}
			}
			if freed < 2*bps {
				t.Errorf("without a limit writes are at %.0f bytes a second at most", freed)
			}
		})
	}
}

func TestIOLimitHoldsOperations(t *testing.T) {
	testenv.Soak(t, "it judges operations per second")
	const iops = 40
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{Limits: api.Limits{IO: api.IOLimits{WriteIOPS: iops}}})
	dir, disk := cgroupOf(t, s.PID), device(t, d)
	loop(t, s, strings.ReplaceAll(writeDirect, "bs=64k", "bs=4k"))
	await(t, dir, disk, "wios", iops)
	comesUpTo(t, "writes", iops, func() int64 { return moved(t, dir, disk, "wios") })
}

// What this host cannot hold is refused with its reason.
func TestIOLimitsThatNothingHoldsAreRefused(t *testing.T) {
	d := shared(t)
	_, err := d.TryCreate(t.Context(), api.CreateSandbox{Limits: api.Limits{IO: api.IOLimits{Weight: 50}}})
	// A device that hands its requests on to others (multipath) has no scheduler, nor a file that
	// names it.
	scheduler, _ := os.ReadFile("/sys/dev/block/" + device(t, d) + "/queue/scheduler")
	if strings.Contains(string(scheduler), "[bfq]") {
		if err != nil {
			t.Errorf("with bfq: %v", err)
		}
	} else if code(err) != api.CodeUnenforceable || !strings.Contains(err.Error(), "bfq") {
		t.Errorf("a weight without bfq: %v", err)
	}
	// On tmpfs there is no device. It must be one with user attributes, or no sandbox starts: Linux
	// 6.6.
	dir := filepath.Join("/dev/shm", "limits-"+filepath.Base(d.DataDir))
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = harness.RemoveAll(dir) })
	if err := unix.Setxattr(dir, "user.test", []byte("1"), 0); err != nil {
		t.Logf("no sandbox on tmpfs here: %v", err)
		return
	}
	t.Setenv("TMPDIR", dir)
	onTmpfs := harness.Start(t, harness.Options{Cgroup: group(t)})
	_, err = onTmpfs.TryCreate(t.Context(), api.CreateSandbox{Limits: api.Limits{IO: api.IOLimits{WriteBPS: mib}}})
	if code(err) != api.CodeUnenforceable || !strings.Contains(err.Error(), "tmpfs") {
		t.Errorf("a limit on tmpfs: %v", err)
	}
	if e := onTmpfs.Create(t, api.CreateSandbox{}).Enforced; e.IO != "none" {
		t.Errorf("enforced: %+v", e)
	}
}
