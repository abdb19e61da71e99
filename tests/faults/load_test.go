package faults

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// Twenty clients at once run 2,000 programs in 50 sandboxes (400 in 12 in the gate), in every way
// there is, and some of them go away meanwhile. Every exit code is right, every byte of both
// streams has come, and the daemon and its launcher hold no more than before. Memory, which takes
// time to settle, is compared between the halves of the run.
func TestEveryExecOfManyIsWhole(t *testing.T) {
	testenv.RequireUserNS(t)
	const clients = 20
	execs, sandboxes := testenv.Rounds(400, 2000), testenv.Rounds(12, 50)
	seed := setting(t, "SANDBOXD_FAULT_SEED", rand.Uint64())
	t.Logf("SANDBOXD_FAULT_SEED=%d", seed)
	// Garbage is collected soon, so that the memory in use shows.
	d := harness.Start(t, harness.Options{Env: []string{"GOGC=20"}})
	registry := harness.LyingRegistry(t, nil)
	image := registry.Push(t, "team/base:1", harness.Image(t, v1.Config{Env: []string{"PATH=/bin"}},
		harness.Layer(t, "gzip", harness.Tar(t, harness.Busybox(t)...))))
	d.MustPull(t, image)
	ids := make([]string, sandboxes)
	each(sandboxes, func(i int) {
		s, err := d.TryCreate(t.Context(), api.CreateSandbox{Image: image, Limits: api.Limits{Pids: 128}})
		if err != nil {
			t.Errorf("create: %v", err)
			return
		}
		ids[i] = s.ID
	})
	if t.Failed() {
		t.FailNow()
	}
	callers := make([]*client.Client, clients)
	for i := range callers {
		callers[i] = client.New(d.Socket)
	}
	idle := func() harness.Snapshot {
		for _, c := range callers {
			c.Close()
		}
		return d.Snapshot(t)
	}
	var bytes, left atomic.Int64
	half := func(number uint64, execs int) {
		jobs := make(chan int)
		var all sync.WaitGroup
		for i, c := range callers {
			all.Go(func() {
				r := rand.New(rand.NewPCG(seed, number<<32|uint64(i)))
				for range jobs {
					// One that is dropped is none of the 2,000.
					for r.IntN(8) == 0 {
						left.Add(1)
						ctx, cancel := context.WithTimeout(t.Context(), time.Duration(r.IntN(40))*time.Millisecond)
						err := echo(ctx, c, ids[r.IntN(sandboxes)], mode(r.IntN(modes)), someBytes(r, 100_000), 0)
						cancel()
						if _, untrue := errors.AsType[wrong](err); untrue || err != nil && ctx.Err() == nil {
							t.Errorf("an exec that was dropped: %v", describe(err))
						}
					}
					ctx, cancel := context.WithTimeout(t.Context(), testenv.HungAfter)
					input := someBytes(r, 200_000)
					if err := echo(ctx, c, ids[r.IntN(sandboxes)], mode(r.IntN(modes)), input, r.IntN(256)); err != nil {
						t.Errorf("exec: %v", describe(err))
					}
					bytes.Add(2 * int64(len(input)))
					cancel()
				}
			})
		}
		for i := range execs {
			jobs <- i
		}
		close(jobs)
		all.Wait()
	}

	half(0, sandboxes) // the first in each sandbox brings about what stays
	before := idle()
	start := quiet(t, d, idle, before, memory{math.MaxInt, math.MaxInt64, math.MaxInt64})
	began := time.Now()
	half(1, execs/2)
	first := quiet(t, d, idle, before, memory{start.goroutines, start.heap + start.heap/10 + 64<<10, math.MaxInt64})
	half(2, execs-execs/2)
	// Two hundred bytes kept of each exec would be more than this.
	second := quiet(t, d, idle, before, memory{start.goroutines, first.heap + first.heap/20 + 64<<10, first.resident + first.resident/10 + 2<<20})
	t.Logf("%d execs in %s, %d dropped, %d bytes; before, half way and after: goroutines %d, %d, %d; live heap %d, %d, %d; resident %d, %d, %d KiB",
		execs, time.Since(began).Round(time.Millisecond), left.Load(), bytes.Load(), start.goroutines, first.goroutines, second.goroutines,
		start.heap, first.heap, second.heap, start.resident>>10, first.resident>>10, second.resident>>10)
	each(sandboxes, func(i int) {
		s, err := callers[0].GetSandbox(t.Context(), ids[i])
		if err != nil || s.State != api.StateRunning {
			t.Errorf("sandbox %s: %+v, %v", ids[i], s, err)
		}
	})
}

// memory is the memory of an idle daemon.
type memory struct {
	goroutines     int
	heap, resident int64 // bytes
}

// quiet waits until the daemon holds no more than before, nor more than most, and returns its
// memory.
func quiet(t *testing.T, d *harness.Daemon, idle func() harness.Snapshot, before harness.Snapshot, most memory) memory {
	t.Helper()
	least := memory{math.MaxInt, math.MaxInt64, math.MaxInt64}
	harness.Eventually(t, func() error {
		if diff := before.Diff(idle()); len(diff) > 0 {
			return fmt.Errorf("grown:\n  %s", strings.Join(diff, "\n  "))
		}
		// Requests that have the garbage collector look again: it keeps buffers for the next ones for a
		// while.
		for range 50 {
			d.List(t)
			info := d.System(t)
			least.goroutines, least.heap = min(least.goroutines, info.Goroutines), min(least.heap, info.HeapLive)
			least.resident = min(least.resident, resident(t, d.PID()))
		}
		if least.goroutines > most.goroutines || least.heap > most.heap || least.resident > most.resident {
			return fmt.Errorf("the daemon has %+v, more than %+v", least, most)
		}
		return nil
	})
	return least
}

// resident is the memory of a process in bytes.
func resident(t *testing.T, pid int) int64 {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "VmRSS:" {
			kib, err := strconv.ParseInt(f[1], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return kib << 10
		}
	}
	t.Fatalf("process %d has no memory", pid)
	return 0
}

// each calls f for 0..n-1, four at a time, and returns when all have returned.
func each(n int, f func(i int)) {
	next := make(chan int)
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for i := range next {
				f(i)
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	all.Wait()
}
