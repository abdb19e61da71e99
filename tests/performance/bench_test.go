// Package performance measures what a user waits for, against the nearest thing that the machine has, in one run and
// in turns: a loaded machine slows both.
package performance

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/rootfs"
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

// compare times the two sides in turns; which comes first changes from round to round.
func compare(b *testing.B, nameA, nameB string, a, other func() error) {
	b.Helper()
	sides := []struct {
		name  string
		run   func() error
		times []time.Duration
	}{{name: nameA, run: a}, {name: nameB, run: other}}
	for i := range warmUp + b.N {
		if i == warmUp {
			b.ResetTimer()
		}
		for j := range sides {
			side := &sides[(i+j)%len(sides)]
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
	for _, side := range sides {
		report(b, side.name, side.times)
	}
}

// BenchmarkExecTrue is one exec of a static program in a running sandbox, asked for over the socket, against fork and
// exec of the same program on the host.
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
	if err := s.Put(b.Context(), "/tmp/true", program); err != nil {
		b.Fatal(err)
	}
	s.Sh(b, "chmod 755 /tmp/true")

	request := api.ExecRequest{Argv: []string{"/tmp/true"}}
	compare(b, "sandbox", "host",
		func() error {
			result, err := s.TryExec(b.Context(), request)
			if err == nil && result.Exit.Code != 0 {
				err = fmt.Errorf("exit %+v", result.Exit)
			}
			return err
		},
		func() error {
			// With pipes for its output, as whoever wants the output would have it.
			cmd := exec.CommandContext(b.Context(), onHost)
			var out bytes.Buffer
			cmd.Stdout, cmd.Stderr = &out, &out
			return cmd.Run()
		})
}

// BenchmarkCreateRunDelete is a whole sandbox of the host image, from the request to the first byte of its program's
// output to its deletion, against Debian's runc with a bundle of the same mounts. Both do it for the same user.
func BenchmarkCreateRunDelete(b *testing.B) {
	testenv.RequireUserNS(b)
	// As root runc would put its cgroups into the controllers' v1 hierarchies, and sandboxd has none there.
	testenv.RequireOrdinaryUser(b)
	runc := testenv.RequirePeer(b, "runc")
	bundle := runcBundle(b, runc)
	state := filepath.Join(b.TempDir(), "runc")
	d := harness.Start(b, harness.Options{})

	n := 0
	parts := map[string][]time.Duration{}
	compare(b, "sandboxd", "runc",
		func() error { return createRunDelete(b.Context(), d, parts) },
		func() error {
			n++
			cmd := exec.CommandContext(b.Context(), runc, "--root", state, "run", "--bundle", bundle, fmt.Sprintf("bench%d", n))
			var stdout, stderr bytes.Buffer
			cmd.Stdout, cmd.Stderr = &stdout, &stderr
			if err := cmd.Run(); err != nil {
				// runc 1.1 seals a copy of itself at each start, and now and then loses a race for it.
				if strings.Contains(stderr.String(), "cloned binary: Device or resource busy") {
					return errAgain
				}
				return fmt.Errorf("%w: %s", err, &stderr)
			}
			if stdout.String() != "x\n" {
				return fmt.Errorf("it printed %q", &stdout)
			}
			return nil
		})
	for name, times := range parts {
		report(b, name, times)
	}
}

// createRunDelete waits for the first byte of output before it deletes, as a user would. It adds to parts how long each
// of the three took.
func createRunDelete(ctx context.Context, d *harness.Daemon, parts map[string][]time.Duration) error {
	began := time.Now()
	lap := func(name string) {
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
	defer lap("delete")
	return s.TryDelete(ctx)
}

// runcBundle is what the host image shows, as a bundle: the host's directories read-only on a small root.
func runcBundle(b *testing.B, runc string) string {
	b.Helper()
	bundle := b.TempDir()
	args := []string{"spec", "--bundle", bundle, "--rootless"}
	if out, err := exec.CommandContext(b.Context(), runc, args...).CombinedOutput(); err != nil {
		b.Fatalf("runc spec: %v: %s", err, out)
	}
	file := filepath.Join(bundle, "config.json")
	data, err := os.ReadFile(file)
	if err != nil {
		b.Fatal(err)
	}
	var spec specs.Spec
	if err := json.Unmarshal(data, &spec); err != nil {
		b.Fatal(err)
	}
	root := filepath.Join(bundle, "rootfs")
	if err := os.Mkdir(root, 0o755); err != nil {
		b.Fatal(err)
	}
	for _, dir := range rootfs.HostDirs {
		info, err := os.Lstat(dir)
		if err != nil {
			continue
		}
		if info.Mode()&os.ModeSymlink != 0 {
			target, err := os.Readlink(dir)
			if err != nil {
				b.Fatal(err)
			}
			if err := os.Symlink(target, filepath.Join(root, dir)); err != nil {
				b.Fatal(err)
			}
			continue
		}
		spec.Mounts = append(spec.Mounts, specs.Mount{Destination: dir, Source: dir, Type: "none", Options: []string{"rbind", "ro", "nosuid", "nodev"}})
	}
	// No network either.
	spec.Linux.Namespaces = append(spec.Linux.Namespaces, specs.LinuxNamespace{Type: specs.NetworkNamespace})
	spec.Process.Terminal = false
	spec.Process.Args = []string{"/bin/echo", "x"}
	data, err = json.Marshal(spec)
	if err != nil {
		b.Fatal(err)
	}
	if err := os.WriteFile(file, data, 0o600); err != nil {
		b.Fatal(err)
	}
	return bundle
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

// The promises of the first release, loosely, so that a slow machine does not fail a good change: the figures
// themselves are in docs/performance.md.
func TestExecIsNotAnOrderOfMagnitudeSlowerThanAFork(t *testing.T) {
	testenv.RequireUserNS(t)
	d := harness.Start(t, harness.Options{})
	s := d.Create(t, api.CreateSandbox{})
	median := func(run func() error) time.Duration {
		times := make([]time.Duration, 31)
		for i := range times {
			began := time.Now()
			if err := run(); err != nil {
				t.Fatal(err)
			}
			times[i] = time.Since(began)
		}
		slices.Sort(times)
		return times[len(times)/2]
	}
	inside := median(func() error {
		_, err := s.TryExec(t.Context(), api.ExecRequest{Argv: []string{"/bin/true"}})
		return err
	})
	host := median(func() error { return exec.CommandContext(t.Context(), "/bin/true").Run() })
	if inside > 10*host {
		t.Errorf("an exec takes %s, fork and exec on the host %s", inside, host)
	}
}
