package performance

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"slices"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// slower is the factor of the median above which a release counts as slower than the last one
// (CONTRIBUTING.md).
const slower = 1.05

// subject is a daemon of either tree, with the sandbox and the image that the operations need.
type subject struct {
	*harness.Daemon

	b       *testing.B // that runs
	running *harness.Sandbox
	image   string
	made    []string // ids of sandboxes that the last turn has made
}

// BenchmarkAgainst times the operations that users wait for, of the built binaries and of those in
// $SANDBOXD_BIN_OLD, in turns (hack/bench-ab.sh). It reports the quantiles of both, the ratio of
// the medians, and the range that the ratio has with 95 % confidence.
func BenchmarkAgainst(b *testing.B) {
	old := os.Getenv("SANDBOXD_BIN_OLD")
	if old == "" {
		b.Skip("SANDBOXD_BIN_OLD names no directory of binaries; hack/bench-ab.sh sets it")
	}
	testenv.RequireUserNS(b)
	registry := harness.LyingRegistry(b, nil)
	image := registry.Push(b, "small:1", harness.Image(b, v1.Config{}, harness.Layer(b, "gzip", harness.Tar(b, harness.Busybox(b)...))))
	start := func(programs string, pool ...string) *subject {
		d := &subject{Daemon: harness.Start(b, harness.Options{Programs: programs, Args: pool}), image: image}
		d.running = d.Create(b, api.CreateSandbox{})
		putTrue(b, d.running)
		if err := d.running.Put(b.Context(), "/tmp/file", make([]byte, 1<<20)); err != nil {
			b.Fatal(err)
		}
		return d
	}
	before, now := start(old), start("")
	for _, o := range []struct {
		name  string
		run   func(*subject) error
		after func(*subject) error // not timed; may be nil
	}{
		{"create", (*subject).create, (*subject).clear},
		{"delete", (*subject).clear, (*subject).create}, // the last one is deleted with the daemon
		{"exec", func(d *subject) error { return execTrue(d.b.Context(), d.running) }, nil},
		{"run", (*subject).runOnce, nil},
		{"write-1MiB", func(d *subject) error {
			return d.running.Put(d.b.Context(), "/tmp/file", make([]byte, 1<<20))
		}, nil},
		{"read-1MiB", (*subject).readFile, nil},
		{"pull", (*subject).pull, (*subject).forget},
		{"fork", (*subject).fork, (*subject).clear},
	} {
		b.Run(o.name, func(b *testing.B) {
			if o.name == "delete" {
				for _, d := range []*subject{before, now} {
					d.b = b
					if err := d.create(); err != nil {
						b.Fatal(err)
					}
				}
			}
			against(b, before, now, o.run, o.after)
		})
	}
	pool := []string{"--pool", api.HostImage + "=1"}
	before, now = start(old, pool...), start("", pool...)
	b.Run("warm-create-exec", func(b *testing.B) { against(b, before, now, (*subject).createExec, (*subject).refill) })
}

// against times an operation of both daemons in turns and reports how they compare.
func against(b *testing.B, before, now *subject, run, after func(*subject) error) {
	b.Helper()
	timed := func(name string, d *subject) side {
		d.b = b
		fresh := true
		return side{
			name: name, run: func() error { return run(d) },
			ready: func() error { // what follows the turn before is not timed
				if after == nil || fresh {
					fresh = false
					return nil
				}
				return after(d)
			},
		}
	}
	sides := []side{timed("old", before), timed("new", now)}
	measure(b, sides)
	for _, d := range []*subject{before, now} {
		if after != nil {
			if err := after(d); err != nil {
				b.Fatal(err)
			}
		}
	}
	ratio, low, high := ratioOfMedians(sides[0].times, sides[1].times)
	for _, s := range sides {
		report(b, s.name, s.times)
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(ratio, "ratio")
	b.ReportMetric(low, "ratio-low")
	b.ReportMetric(high, "ratio-high")
	if b.N > 1 && low > slower { // one turn comes first, to find out that it works
		b.Errorf("%.2f times the tree before (%.2f to %.2f), more than %.2f", ratio, low, high, slower)
	}
}

// ratioOfMedians returns that of the second to the first, and its 95 % confidence interval, by
// resampling turns: what else the machine did in one slowed both sides.
func ratioOfMedians(a, b []time.Duration) (ratio, low, high float64) {
	median := func(times []time.Duration) float64 {
		slices.Sort(times)
		return float64(times[len(times)/2])
	}
	const samples = 2000
	random := rand.New(rand.NewPCG(1, 2)) // the same for the same times
	as, bs, ratios := make([]time.Duration, len(a)), make([]time.Duration, len(b)), make([]float64, samples)
	for i := range ratios {
		for j := range as {
			turn := random.IntN(len(a))
			as[j], bs[j] = a[turn], b[turn]
		}
		ratios[i] = median(bs) / median(as)
	}
	slices.Sort(ratios)
	return median(slices.Clone(b)) / median(slices.Clone(a)), ratios[samples*25/1000], ratios[samples*975/1000]
}

func (d *subject) create() error {
	s, err := d.TryCreate(d.b.Context(), api.CreateSandbox{})
	if err == nil {
		d.made = append(d.made, s.ID)
	}
	return err
}

// clear deletes the sandboxes that the last turn has made.
func (d *subject) clear() error {
	for _, id := range d.made {
		if err := d.Call(d.b.Context(), http.MethodDelete, "/v1/sandboxes/"+id, nil, nil); err != nil {
			return err
		}
	}
	d.made = nil
	return nil
}

func (d *subject) createExec() error {
	s, err := d.TryCreate(d.b.Context(), api.CreateSandbox{})
	if err != nil {
		return err
	}
	d.made = append(d.made, s.ID)
	_, err = s.TryExec(d.b.Context(), api.ExecRequest{Argv: []string{"/bin/true"}})
	return err
}

// refill deletes the sandboxes of the last turn and waits until the warm pool is full.
func (d *subject) refill() error {
	if err := d.clear(); err != nil {
		return err
	}
	harness.Eventually(d.b, func() error {
		if slices.ContainsFunc(d.System(d.b).Pools, func(p api.Pool) bool { return p.Ready < p.Size }) {
			return errors.New("the pool is not full")
		}
		return nil
	})
	return nil
}

func (d *subject) runOnce() error {
	var result api.ExecResult
	return d.Call(d.b.Context(), http.MethodPost, "/v1/run", api.RunRequest{Exec: api.ExecRequest{Argv: []string{"/bin/true"}}}, &result)
}

func (d *subject) readFile() error {
	response, err := d.running.Get(d.b.Context(), "/tmp/file")
	if err != nil {
		return err
	}
	n, err := io.Copy(io.Discard, response.Body)
	if err == nil && n != 1<<20 {
		err = fmt.Errorf("%d bytes", n)
	}
	return errors.Join(err, response.Body.Close())
}

func (d *subject) pull() error {
	_, err := d.Pull(d.b.Context(), d.image, false)
	return err
}

// forget removes the image, so that the next pull fetches and unpacks it again.
func (d *subject) forget() error {
	return d.Call(d.b.Context(), http.MethodDelete, "/v1/images?reference="+url.QueryEscape(d.image), nil, nil)
}

func (d *subject) fork() error {
	var out api.SandboxForked
	if err := d.Call(d.b.Context(), http.MethodPost, "/v1/sandboxes/"+d.running.ID+"/fork", api.ForkSandbox{Count: 1}, &out); err != nil {
		return err
	}
	for _, s := range out.Sandboxes {
		d.made = append(d.made, s.ID)
	}
	return nil
}
