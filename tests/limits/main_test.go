// Package limits tests that limits bite: on a cgroup v2 host with its controllers, the built
// binaries, as an ordinary user with a delegated subtree and as root. Natively most machines of
// ours have no such thing, and the tests skip: `make testbed` runs them in a machine that has it.
package limits

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

const mount = "/sys/fs/cgroup"

// controllers are those that our limits need.
var controllers = []string{"cpu", "cpuset", "io", "memory", "pids"}

// group makes a cgroup for one test, delegated as far as this user can delegate, with all
// controllers. When the test ends, the cgroup must be as it was made: no children, no controllers
// handed on.
func group(t *testing.T) string {
	t.Helper()
	testenv.RequireUserNS(t)
	testenv.RequireCgroup(t, controllers...)
	base := vacate(t)
	dir, err := os.MkdirTemp(base, "test-") //nolint:usetesting // a cgroup, not a directory for files
	if err != nil {
		t.Fatal(err)
	}
	before := tree(t, base)
	t.Cleanup(func() {
		// Whoever was moved here must be gone first; the daemon's end is waited for by its own clean-up,
		// which runs earlier.
		if after := tree(t, base); !slices.Equal(before, after) {
			t.Errorf("cgroups before:\n  %s\nafter:\n  %s", strings.Join(before, "\n  "), strings.Join(after, "\n  "))
			_ = os.WriteFile(filepath.Join(dir, "cgroup.kill"), []byte("1"), 0)
		}
		if err := unix.Rmdir(dir); err != nil {
			t.Errorf("remove cgroup %s: %v", dir, err)
		}
	})
	return dir
}

// vacate moves the test, and all other processes of its cgroup, into a leaf, and enables the
// controllers beside that leaf, as a supervisor that delegates to several does. It returns the
// cgroup above the leaf.
func vacate(t *testing.T) string {
	t.Helper()
	own := cgroupOf(t, os.Getpid())
	if filepath.Base(own) == "tests" {
		return filepath.Dir(own)
	}
	leaf := filepath.Join(own, "tests")
	if err := os.Mkdir(leaf, 0o755); err != nil {
		t.Fatal(err)
	}
	// The kernel counts a process in own for a moment after it was moved or has ended.
	harness.Eventually(t, func() error {
		for pid := range strings.FieldsSeq(read(t, own, "cgroup.procs")) {
			if err := os.WriteFile(filepath.Join(leaf, "cgroup.procs"), []byte(pid), 0); err != nil && !errors.Is(err, unix.ESRCH) {
				return err
			}
		}
		for _, c := range controllers {
			if err := os.WriteFile(filepath.Join(own, "cgroup.subtree_control"), []byte("+"+c), 0); err != nil {
				return err
			}
		}
		return nil
	})
	return own
}

// tree lists the cgroups below base with the controllers that each hands on, and what daemons of
// root make at the top.
func tree(t *testing.T, base string) []string {
	t.Helper()
	var found []string
	tops, err := filepath.Glob(filepath.Join(mount, "sandboxd-*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, top := range append(tops, base) {
		err := filepath.WalkDir(top, func(path string, e fs.DirEntry, err error) error {
			if err != nil || !e.IsDir() {
				return err
			}
			found = append(found, path+": "+strings.TrimSpace(read(t, path, "cgroup.subtree_control")))
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return found
}

// start starts a daemon in a cgroup of its own.
func start(t *testing.T) *harness.Daemon {
	t.Helper()
	return harness.Start(t, harness.Options{Cgroup: group(t)})
}

// common is the daemon of all tests that ask nothing special of theirs, those too that kill it and
// start it again: where processors are emulated, a new one and its first sandbox are more than most
// of them do with it. It has what it is given in nothing but its directories, and needs cgroups.
var common struct {
	daemon *harness.Daemon // nil: the next test starts it
	inputs string          // directory of files that agents' runs may name
	stop   []func()        // at the very end
}

func TestMain(m *testing.M) {
	code := m.Run()
	stop()
	os.Exit(code)
}

// stop ends everything that the tests shared, the last first. A leftover is a panic, for the tests
// have ended; the rest is ended all the same.
func stop() {
	for _, f := range common.stop {
		defer f()
	}
}

// outliving is a test whose daemon goes on after it.
type outliving struct{ testing.TB }

func (outliving) Cleanup(f func()) { common.stop = append(common.stop, f) }
func (outliving) Failed() bool     { return false } // the test logs the daemon's output itself

// shared returns the common daemon, without a sandbox. The test's sandboxes are deleted when it
// ends, and their cgroups must be gone then.
func shared(t *testing.T) *harness.Daemon {
	t.Helper()
	testenv.RequireUserNS(t)
	testenv.RequireCgroup(t, controllers...)
	base := vacate(t)
	if common.daemon == nil {
		untouched := tree(t, base)
		dir, err := os.MkdirTemp(base, "test-") //nolint:usetesting // a cgroup, not a directory for files
		if err != nil {
			t.Fatal(err)
		}
		o := outliving{t}
		o.Cleanup(func() {
			if err := unix.Rmdir(dir); err != nil {
				panic(fmt.Sprintf("remove cgroup %s, which the daemon should have left empty: %v", dir, err))
			}
			if left := tree(t, base); !slices.Equal(untouched, left) {
				panic(fmt.Sprintf("cgroups before:\n  %s\nafter:\n  %s", strings.Join(untouched, "\n  "), strings.Join(left, "\n  ")))
			}
		})
		if common.inputs, err = os.MkdirTemp("", "inputs-"); err != nil { //nolint:usetesting // it outlives the test
			t.Fatal(err)
		}
		o.Cleanup(func() { _ = os.RemoveAll(common.inputs) })
		d := harness.Start(o, harness.Options{Cgroup: dir, Args: []string{"--require=cgroup", "--agent-inputs", common.inputs}})
		d.Warm(t)
		common.daemon = d
	}
	d, before := common.daemon, tree(t, base)
	t.Cleanup(func() {
		defer func() {
			if t.Failed() {
				common.daemon = nil // the next test is not to suffer from it
				t.Logf("the daemon said:\n%s", d.Log())
			}
		}()
		d.Mark(t) // so that sandboxes deleted now are looked for at the very end, too
		ctx := context.WithoutCancel(t.Context())
		var list api.SandboxList
		if err := d.Call(ctx, http.MethodGet, "/v1/sandboxes", nil, &list); err != nil {
			t.Errorf("list sandboxes: %v", err)
		}
		for _, s := range list.Sandboxes {
			if err := d.Call(ctx, http.MethodDelete, "/v1/sandboxes/"+s.ID, nil, nil); err != nil {
				t.Errorf("delete %s: %v", s.ID, err)
			}
		}
		if after := tree(t, base); !slices.Equal(before, after) {
			t.Errorf("cgroups before:\n  %s\nafter:\n  %s", strings.Join(before, "\n  "), strings.Join(after, "\n  "))
		}
	})
	return d
}

func cgroupOf(t *testing.T, pid int) string {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		if path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
			return filepath.Join(mount, path)
		}
	}
	t.Fatalf("process %d is in no cgroup v2: %s", pid, data)
	return ""
}

func read(t *testing.T, dir, file string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(dir, file))
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(data))
}

// number reads one value of a file: the whole of it, or that of a key.
func number(t *testing.T, dir, file, key string) int64 {
	t.Helper()
	for line := range strings.Lines(read(t, dir, file)) {
		f := strings.Fields(line)
		if key == "" && len(f) == 1 || len(f) == 2 && f[0] == key {
			n, err := strconv.ParseInt(f[len(f)-1], 10, 64)
			if err != nil {
				t.Fatalf("%s/%s: %v", dir, file, err)
			}
			return n
		}
	}
	t.Fatalf("%s/%s has no %q", dir, file, key)
	return 0
}

// rate returns the growth of a kernel counter in a second. It takes two looks and times the gap
// between them. A look that was held up on a busy machine is repeated: the counter goes on
// meanwhile.
func rate(t *testing.T, during time.Duration, counter func() int64) float64 {
	t.Helper()
	look := func() (n int64, at time.Time) {
		for range 100 {
			before := time.Now()
			n, at = counter(), time.Now()
			if at.Sub(before) < during/100 {
				break
			}
		}
		return n, at
	}
	from, began := look()
	select {
	case <-time.After(during):
	case <-t.Context().Done():
	}
	to, ended := look()
	return float64(to-from) / ended.Sub(began).Seconds()
}

// cpuPeriod is the period of every ceiling of CPU time that we set, as cpu.max shows it.
const cpuPeriod = 100 * time.Millisecond

// throttledTo waits until a cgroup of busy processes has used its share of cores and no more. It
// compares the kernel's counters of used time and of elapsed periods, and no clock of ours. A
// machine that stands still adds to neither, or the kernel throttles the group until its debt is
// paid. A ceiling that does not hold never comes down to its share.
func throttledTo(t *testing.T, dir string, share float64) {
	t.Helper()
	const periods = 20
	count := func() (used, elapsed, throttled int64) {
		return number(t, dir, "cpu.stat", "usage_usec"), number(t, dir, "cpu.stat", "nr_periods"), number(t, dir, "cpu.stat", "nr_throttled")
	}
	used, elapsed, throttled := count()
	harness.Eventually(t, func() error {
		u, e, n := count()
		got := float64(u-used) / float64(max(e-elapsed, 1)) / float64(cpuPeriod.Microseconds())
		switch {
		case e-elapsed < periods:
			return fmt.Errorf("%d periods have elapsed, and %.3f of a core was used", e-elapsed, got)
		case n == throttled:
			return fmt.Errorf("it was never throttled in %d periods, and has used %.3f of a core", e-elapsed, got)
		case got > 1.1*share:
			return fmt.Errorf("it has used %.3f of a core in %d periods, more than %.2f", got, e-elapsed, share)
		}
		t.Logf("%.3f of a core in %d periods, throttled in %d", got, e-elapsed, n-throttled)
		return nil
	})
}

// near says whether got differs from want by no more than the share.
func near(got, want, share float64) bool { return got >= want*(1-share) && got <= want*(1+share) }

// patch changes a sandbox.
func patch(t *testing.T, d *harness.Daemon, s *harness.Sandbox, change api.UpdateSandbox) (*api.Sandbox, error) {
	t.Helper()
	var now api.Sandbox
	err := d.Call(t.Context(), http.MethodPatch, "/v1/sandboxes/"+s.ID, change, &now)
	return &now, err
}

// mustPatch changes limits that can be changed.
func mustPatch(t *testing.T, d *harness.Daemon, s *harness.Sandbox, limits api.LimitsUpdate) {
	t.Helper()
	if _, err := patch(t, d, s, api.UpdateSandbox{Limits: limits}); err != nil {
		t.Fatalf("change %+v: %v", limits, err)
	}
}

// code is that of the problem that an error is.
func code(err error) api.Code {
	if p, ok := errors.AsType[*api.Problem](err); ok {
		return p.Code
	}
	return ""
}

// hog takes all the time that it gets, with so many processes, until the sandbox ends.
func hog(t *testing.T, s *harness.Sandbox, processes int) {
	t.Helper()
	s.Sh(t, fmt.Sprintf("for i in $(seq %d); do nohup sh -c 'while :; do :; done' >/dev/null 2>&1 & done", processes))
}

// background runs a shell command in a sandbox, and returns what waits for its result.
func background(t *testing.T, s *harness.Sandbox, script string) (wait func() *api.ExecResult) {
	t.Helper()
	type answer struct {
		result *api.ExecResult
		err    error
	}
	done := make(chan answer, 1)
	go func() {
		result, err := s.TryExec(t.Context(), sh(script))
		done <- answer{result, err}
	}()
	return func() *api.ExecResult {
		t.Helper()
		select {
		case a := <-done:
			if a.err != nil {
				t.Fatalf("%s: %v", script, a.err)
			}
			return a.result
		case <-time.After(testenv.HungAfter):
			t.Fatalf("%s: no answer", script)
			return nil
		}
	}
}

func sh(script string) api.ExecRequest { return api.ExecRequest{Argv: []string{"sh", "-c", script}} }
