package performance

import (
	"bufio"
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	goruntime "runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// The machine's capacity is not measured: smaller numbers are for trying out.
var (
	live   = flag.Int("live", 200, "sandboxes that run while others are created")
	idle   = flag.Int("idle", 100, "sandboxes whose memory is added up")
	cycles = flag.Int("cycles", 5000, "creations, execs and deletions between two looks at the daemon's memory")
)

// BenchmarkWarm claims a sandbox of the warm pool, from the request to the first byte of its
// program's output to its deletion, against bubblewrap. The pool is refilled before each turn,
// untimed: it is the work of idle moments.
func BenchmarkWarm(b *testing.B) {
	testenv.RequireUserNS(b)
	d := harness.Start(b, harness.Options{Args: []string{"--pool", api.HostImage + "=2"}})
	parts := map[string][]time.Duration{}
	parked := func() error {
		harness.Eventually(b, func() error {
			for _, p := range d.System(b).Pools {
				if p.Ready == p.Size {
					return nil
				}
			}
			return errors.New("the pool is not full")
		})
		return nil
	}
	sides := append([]side{{name: "sandboxd", run: func() error { return createRunDelete(b.Context(), d, parts) }}},
		peers(b, bwrapPeer(b))...)
	for i := range sides {
		sides[i].ready = parked // or the peer would share the processors with that work
	}
	compare(b, sides...)
	for name, times := range parts {
		report(b, name, times[warmUp:])
	}
	if p := d.System(b).Pools[0]; p.Misses > 0 {
		b.Errorf("%d of %d creations found nothing parked", p.Misses, p.Misses+p.Hits)
	}
}

// BenchmarkManyLive is the cost of creations and execs among many sandboxes, after their cost
// beside one: then there are no others on the machine, for the kernel's part grows too.
func BenchmarkManyLive(b *testing.B) {
	testenv.RequireUserNS(b)
	d := harness.Start(b, harness.Options{})
	beside := func(n string, s *harness.Sandbox) (sides []side, creations []time.Duration) {
		putTrue(b, s)
		parts := map[string][]time.Duration{}
		sides = []side{
			{name: "exec-" + n, run: func() error { return execTrue(b.Context(), s) }},
			{name: "whole-" + n, run: func() error { return createRunDelete(b.Context(), d, parts) }},
		}
		measure(b, sides)
		return sides, parts["create"][warmUp:]
	}
	one, few := beside("1", d.Create(b, api.CreateSandbox{}))
	all, many := beside("200", populate(b, d, *live)[*live/2])
	for _, side := range append(one, all...) {
		report(b, side.name, side.times)
	}
	report(b, "create-1", few)
	report(b, "create-200", many)
	b.ReportMetric(mebibytes(rss(b, d.PID())), "daemon-MiB")
}

// populate makes n sandboxes, a few at a time. They live as long as the benchmark.
func populate(b *testing.B, d *harness.Daemon, n int) []*harness.Sandbox {
	b.Helper()
	all := make([]*harness.Sandbox, n)
	if err := inParallel(n, func(i int) (err error) {
		all[i], err = d.TryCreate(b.Context(), api.CreateSandbox{Timeout: 86400, IdleTimeout: 86400})
		return err
	}); err != nil {
		b.Fatal(err)
	}
	return all
}

// inParallel calls f for 0 to n-1 by twice as many goroutines as there are processors, so that all
// are busy while requests wait. It returns the first error.
func inParallel(n int, f func(i int) error) error {
	var next, failed atomic.Int64
	var once sync.Once
	var first error
	var workers sync.WaitGroup
	for range 2 * goruntime.NumCPU() {
		workers.Go(func() {
			for failed.Load() == 0 {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				if err := f(i); err != nil {
					failed.Store(1)
					once.Do(func() { first = err })
				}
			}
		})
	}
	workers.Wait()
	return first
}

// BenchmarkThroughput is how much is done in a second with all processors busy. The clients are on
// the same machine, and their part of its time is in the figures.
func BenchmarkThroughput(b *testing.B) {
	testenv.RequireUserNS(b)
	d := harness.Start(b, harness.Options{})
	var running []*harness.Sandbox
	for range 2 * goruntime.NumCPU() {
		s := d.Create(b, api.CreateSandbox{})
		putTrue(b, s)
		running = append(running, s)
	}
	perSecond := func(name string, n int, f func(i int) error) {
		began := time.Now()
		if err := inParallel(n, f); err != nil {
			b.Fatalf("%s: %v", name, err)
		}
		b.ReportMetric(float64(n)/time.Since(began).Seconds(), name+"-per-s")
	}
	b.ResetTimer()
	perSecond("whole", b.N, func(int) error { return createRunDelete(b.Context(), d, nil) })
	perSecond("exec", 4*b.N, func(i int) error { return execTrue(b.Context(), running[i%len(running)]) })
}

// BenchmarkDaemonGrowth is the memory that the daemon has kept after many sandboxes have come and
// gone. The first thousand, which grow the heap to its size, are not counted.
func BenchmarkDaemonGrowth(b *testing.B) {
	testenv.RequireUserNS(b)
	d := harness.Start(b, harness.Options{})
	cycle := func(int) error { return createRunDelete(b.Context(), d, nil) }
	if err := inParallel(min(1000, *cycles), cycle); err != nil {
		b.Fatal(err)
	}
	before := rss(b, d.PID())
	if err := inParallel(*cycles, cycle); err != nil {
		b.Fatal(err)
	}
	after := rss(b, d.PID())
	b.ReportMetric(mebibytes(before), "before-MiB")
	b.ReportMetric(mebibytes(after), "after-MiB")
	b.ReportMetric(100*(float64(after)/float64(before)-1), "growth-percent")
}

// BenchmarkIdleMemory adds up the host's memory that the processes of idle sandboxes take, and the
// growth of the daemon and the launcher for them: proportional set sizes, in which shared memory
// counts once. Only root may read those of processes in other user namespaces.
func BenchmarkIdleMemory(b *testing.B) {
	testenv.RequireUserNS(b)
	testenv.RequireRoot(b)
	d := harness.Start(b, harness.Options{})
	d.Create(b, api.CreateSandbox{}) // the costs of the first one
	launcher := d.System(b).Launcher
	before := pss(b, d.PID()) + pss(b, launcher)
	all := populate(b, d, *idle)
	total := pss(b, d.PID()) + pss(b, launcher) - before
	for _, s := range all {
		total += pss(b, s.PID)
	}
	b.ReportMetric(mebibytes(total)/float64(len(all)), "per-sandbox-MiB")
}

func mebibytes(n int64) float64 { return float64(n) / (1 << 20) }

// rss is the resident set of a process, in bytes.
func rss(b *testing.B, pid int) int64 {
	b.Helper()
	return memory(b, pid, "status", "VmRSS:")
}

// pss is its proportional set.
func pss(b *testing.B, pid int) int64 {
	b.Helper()
	return memory(b, pid, "smaps_rollup", "Pss:")
}

func memory(b *testing.B, pid int, file, field string) int64 {
	b.Helper()
	data, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), file))
	if err != nil {
		b.Fatal(err)
	}
	lines := bufio.NewScanner(bytes.NewReader(data))
	for lines.Scan() {
		if v, ok := strings.CutPrefix(lines.Text(), field); ok {
			kib, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(v, "kB")), 10, 64)
			if err != nil {
				b.Fatal(err)
			}
			return kib << 10
		}
	}
	b.Fatal(fmt.Errorf("no %s in %s of process %d", field, file, pid))
	return 0
}
