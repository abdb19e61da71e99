// Package performance measures delays that a user feels, against the nearest peer that the machine
// has, in one run and in turns: a loaded machine slows both.
package performance

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// warmUp is how many rounds are thrown away: caches, the launcher's first sandbox, the connection.
const warmUp = 5

// report writes the quantiles of one side.
func report(b *testing.B, name string, times []time.Duration) {
	b.Helper()
	slices.Sort(times)
	for _, q := range []int{50, 99} {
		at := min(len(times)*q/100, len(times)-1)
		b.ReportMetric(float64(times[at].Microseconds())/1000, fmt.Sprintf("%s-p%d-ms", name, q))
	}
}

// errAgain is for a peer's own failure that says nothing: the round is repeated and not counted.
var errAgain = errors.New("again")

// A side is one of those that are compared.
type side struct {
	name  string
	run   func() error
	ready func() error // set-up before run, which is not timed; may be nil
	times []time.Duration
}

// compare times the sides in turns and reports them.
func compare(b *testing.B, sides ...side) {
	b.Helper()
	measure(b, sides)
	for _, side := range sides {
		report(b, side.name, side.times)
	}
}

// measure times the sides in turns; the first one changes from round to round. It takes back
// earlier reports.
func measure(b *testing.B, sides []side) {
	b.Helper()
	for i := range warmUp + b.N {
		if i == warmUp {
			b.ResetTimer()
		}
		for j := range sides {
			side := &sides[(i+j)%len(sides)]
			if side.ready != nil {
				if err := side.ready(); err != nil {
					b.Fatalf("%s: %v", side.name, err)
				}
			}
			began := time.Now()
			err := side.run()
			for errors.Is(err, errAgain) {
				began = time.Now()
				err = side.run()
			}
			if err != nil {
				b.Fatalf("%s: %v", side.name, err)
			}
			if i >= warmUp {
				side.times = append(side.times, time.Since(began))
			}
		}
	}
	b.StopTimer()
}

// BenchmarkExecTrue is one exec of a static program in a running sandbox, asked for over the
// socket, against fork and exec of the same program on the host.
func BenchmarkExecTrue(b *testing.B) {
	testenv.RequireUserNS(b)
	busybox := testenv.RequirePeer(b, "busybox")
	program, err := os.ReadFile(busybox)
	if err != nil {
		b.Fatal(err)
	}
	onHost := filepath.Join(b.TempDir(), "true")
	if err := os.WriteFile(onHost, program, 0o755); err != nil {
		b.Fatal(err)
	}
	d := harness.Start(b, harness.Options{})
	s := d.Create(b, api.CreateSandbox{})
	putTrue(b, s)
	compare(b,
		side{name: "sandbox", run: func() error { return execTrue(b.Context(), s) }},
		side{name: "host", run: func() error {
			// With pipes for its output, as whoever wants the output would have it.
			cmd := exec.CommandContext(b.Context(), onHost)
			var out bytes.Buffer
			cmd.Stdout, cmd.Stderr = &out, &out
			return cmd.Run()
		}})
}

// putTrue puts a static `true` into the sandbox: its start costs an exec, and no dynamic linking.
func putTrue(b *testing.B, s *harness.Sandbox) {
	b.Helper()
	program, err := os.ReadFile(testenv.RequirePeer(b, "busybox"))
	if err != nil {
		b.Fatal(err)
	}
	if err := s.Put(b.Context(), "/tmp/true", program); err != nil {
		b.Fatal(err)
	}
	s.Sh(b, "chmod 755 /tmp/true")
}

// execTrue runs what putTrue has put.
func execTrue(ctx context.Context, s *harness.Sandbox) error {
	result, err := s.TryExec(ctx, api.ExecRequest{Argv: []string{"/tmp/true"}})
	if err == nil && result.Exit.Code != 0 {
		err = fmt.Errorf("exit %+v", result.Exit)
	}
	return err
}

// BenchmarkCreateRunDelete is a whole sandbox of the host image, from the request to the first
// byte of its program's output to its deletion, against peers with the same mounts. All do it for
// the same user.
func BenchmarkCreateRunDelete(b *testing.B) {
	testenv.RequireUserNS(b)
	// As root runc would put its cgroups into the controllers' v1 hierarchies, and sandboxd has none
	// there.
	testenv.RequireOrdinaryUser(b)
	bundle := ociBundle(b, testenv.RequirePeer(b, "runc"))
	d := harness.Start(b, harness.Options{})
	parts := map[string][]time.Duration{}
	sides := append([]side{{name: "sandboxd", run: func() error { return createRunDelete(b.Context(), d, parts) }}},
		peers(b, runcPeer(bundle), crunPeer(bundle), podmanPeer(b))...)
	compare(b, sides...)
	for name, times := range parts {
		report(b, name, times[warmUp:])
	}
}

// createRunDelete waits for the first byte of output before it deletes, as a user would. It adds
// to parts how long each of the three took, and the first two together; parts may be nil.
func createRunDelete(ctx context.Context, d *harness.Daemon, parts map[string][]time.Duration) error {
	began := time.Now()
	lap := func(name string) {
		if parts == nil {
			return
		}
		parts[name] = append(parts[name], time.Since(began))
		began = time.Now()
	}
	s, err := d.TryCreate(ctx, api.CreateSandbox{})
	if err != nil {
		return err
	}
	lap("create")
	result, err := s.TryExec(ctx, api.ExecRequest{Argv: []string{"/bin/echo", "x"}})
	if err != nil {
		return err
	}
	if result.Stdout != "x\n" {
		return fmt.Errorf("it printed %q", result.Stdout)
	}
	lap("exec")
	if parts != nil {
		// The peer's `run` for comparison: its cleaning up is in that, too, but cannot be had apart.
		n := len(parts["exec"]) - 1
		parts["first-byte"] = append(parts["first-byte"], parts["create"][n]+parts["exec"][n])
	}
	defer lap("delete")
	return s.TryDelete(ctx)
}

// BenchmarkHealth is the cost of the socket and HTTP alone: the floor under every figure here.
func BenchmarkHealth(b *testing.B) {
	testenv.RequireUserNS(b)
	d := harness.Start(b, harness.Options{})
	var times []time.Duration
	for range b.N {
		began := time.Now()
		response, err := d.Do(b.Context(), http.MethodGet, "/healthz", nil)
		if err != nil {
			b.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, response.Body) // so that the connection is used again
		_ = response.Body.Close()
		times = append(times, time.Since(began))
	}
	report(b, "request", times)
}

// The promises of the first release, loosely, so that a slow machine does not fail a good change:
// the figures themselves are in docs/performance.md.
func TestExecIsNotAnOrderOfMagnitudeSlowerThanAFork(t *testing.T) {
	testenv.RequireUserNS(t)
	d := harness.Start(t, harness.Options{})
	s := d.Create(t, api.CreateSandbox{})
	timed := func(run func() error) time.Duration {
		began := time.Now()
		if err := run(); err != nil {
			t.Fatal(err)
		}
		return time.Since(began)
	}
	// In turns, and the fastest of each: what else the machine does makes them slower, and an exec,
	// in which several processes have a part, more often. So they get as many turns as they need.
	inside, host := time.Duration(math.MaxInt64), time.Duration(math.MaxInt64)
	for range 1000 {
		inside = min(inside, timed(func() error {
			_, err := s.TryExec(t.Context(), api.ExecRequest{Argv: []string{"/bin/true"}})
			return err
		}))
		host = min(host, timed(func() error { return exec.CommandContext(t.Context(), "/bin/true").Run() }))
		if inside <= 10*host {
			return
		}
	}
	t.Errorf("an exec takes %s, fork and exec on the host %s", inside, host)
}
