package security

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// foe puts the programs that turn on init into a sandbox, and returns their path in it.
func foe(t *testing.T, s *harness.Sandbox) string {
	t.Helper()
	const path = "/tmp/initfoe"
	program, err := os.ReadFile(harness.Helper(t, "initfoe"))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Put(t.Context(), path, program); err != nil {
		t.Fatalf("put the foe: %v", err)
	}
	s.Sh(t, "chmod 755 "+path)
	return path
}

// A process that makes init its tracer stops for it before each signal. Init must neither take the
// stop for the end of the process, nor leave it stopped.
func TestTraceesOfInit(t *testing.T) {
	testenv.RequireUserNS(t)
	d := harness.Start(t, harness.Options{})
	s := d.Create(t, api.CreateSandbox{})
	path := foe(t, s)
	for _, tc := range []struct {
		foe, want string
		exit      api.Exit
	}{
		{foe: "traceme", want: "went on\n"},
		{foe: "traceme-clone", want: "the child ended with 7\n"},
		{foe: "traceme-killed", exit: api.Exit{Code: 137, Signal: "SIGKILL"}},
	} {
		for range 20 {
			got := s.Exec(t, api.ExecRequest{Argv: []string{path, tc.foe}, Timeout: testenv.HungAfter.Seconds()})
			if got.Stdout != tc.want || got.Exit != tc.exit {
				t.Fatalf("%s: wrote %q, ended with %+v", tc.foe, got.Stdout+got.Stderr, got.Exit)
			}
		}
	}
	for i := range 5 {
		file := fmt.Sprintf("/tmp/orphan-%d", i)
		s.Exec(t, api.ExecRequest{Argv: []string{path, "traceme-orphan", file}})
		harness.Eventually(t, func() error {
			got, err := s.TryExec(t.Context(), api.ExecRequest{Argv: []string{"cat", file}})
			if err == nil && got.Stdout != "went on\n" {
				err = fmt.Errorf("it wrote %q", got.Stdout)
			}
			return err
		})
	}
	if now, err := s.Inspect(t.Context()); err != nil || now.State != api.StateRunning || now.PID != s.PID {
		t.Errorf("the sandbox: %+v, %v", now, err)
	}
}

// An exec's timeout ends what it started, in whichever way: processes without a first thread, those
// of init's or of no parent that waits, traced and stopped ones, others' and unreadable ones.
func TestTimeoutEndsOddTrees(t *testing.T) {
	testenv.RequireUserNS(t)
	d := harness.Start(t, harness.Options{})
	for _, profile := range profiles(t, d) {
		s := d.Create(t, api.CreateSandbox{Profile: profile})
		path := foe(t, s)
		for timeout := 1.0; ; timeout *= 4 { // where all of it has not started before it comes
			got := s.Exec(t, api.ExecRequest{Argv: []string{path, "odd-tree"}, Timeout: timeout})
			if !got.Exit.Timeout {
				t.Fatalf("%s: it ended with %+v %s", profile, got.Exit, got.Stdout+got.Stderr)
			}
			list, err := d.Client(t).Processes(t.Context(), s.ID)
			if err != nil {
				t.Fatal(err)
			}
			for _, p := range list {
				if p.State != "Z" { // one that ended is init's to reap
					t.Errorf("%s: a process lives on: %+v", profile, p)
				}
			}
			if got.Stdout == "grown\n" {
				break
			} else if timeout > testenv.HungAfter.Seconds() {
				t.Fatalf("%s: it has not started all: %q", profile, got.Stdout)
			}
		}
		if now, err := s.Inspect(t.Context()); err != nil || now.State != api.StateRunning {
			t.Errorf("%s: the sandbox: %+v, %v", profile, now, err)
		}
	}
}

// A process that made itself undumpable, has ended and is not waited for does no harm to another
// exec's timeout, nor that to its parent. Linux 6.18.44 refuses init the namespaces of such a one.
func TestTimeoutSparesRemains(t *testing.T) {
	testenv.RequireUserNS(t)
	d := harness.Start(t, harness.Options{})
	s := d.Create(t, api.CreateSandbox{})
	path := foe(t, s)
	s.Sh(t, "setsid "+path+" remains /tmp/remains >/dev/null 2>&1 &")
	harness.Eventually(t, func() error {
		got, err := s.TryExec(t.Context(), api.ExecRequest{Argv: []string{"cat", "/tmp/remains"}})
		if err == nil && got.Stdout != "kept\n" {
			err = fmt.Errorf("it wrote %q", got.Stdout)
		}
		return err
	})
	got, err := s.TryExec(t.Context(), api.ExecRequest{Argv: []string{"sleep", "1000"}, Timeout: 0.1})
	if err != nil || !got.Exit.Timeout {
		t.Errorf("another exec ended with %+v, %v", got, err)
	}
	if now, err := s.Inspect(t.Context()); err != nil || now.State != api.StateRunning {
		t.Fatalf("the sandbox: %+v, %v", now, err)
	}
	list, err := d.Client(t).Processes(t.Context(), s.ID)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(list, func(p api.Process) bool {
		return p.State == "Z" && slices.ContainsFunc(list, func(parent api.Process) bool {
			return parent.PID == p.PPID && parent.State != "Z" && slices.Contains(parent.Argv, "remains")
		})
	}) {
		t.Errorf("the remains and their parent are gone: %+v", list)
	}
}

// A program that changes a limit of init's keeps nothing alive beyond the timeout of its exec:
// either all of the exec is ended, or the sandbox.
func TestInitsLimitsKeepNothingAlive(t *testing.T) {
	testenv.RequireUserNS(t)
	d := harness.Start(t, harness.Options{})
	// All of them end alike. Those that do nothing to an init are for soak runs.
	limits := map[string]int{"nofile": unix.RLIMIT_NOFILE, "nproc": unix.RLIMIT_NPROC}
	more := map[string]int{
		"fsize": unix.RLIMIT_FSIZE, "as": unix.RLIMIT_AS, "cpu": unix.RLIMIT_CPU,
		"sigpending": 11, "rttime": 15,
	}
	if testenv.Soaking() {
		maps.Copy(limits, more)
	}
	for name, resource := range limits {
		for _, which := range []string{"soft", "both"} {
			t.Run(name+", "+which, func(t *testing.T) {
				s := d.Create(t, api.CreateSandbox{})
				got, err := s.TryExec(t.Context(), api.ExecRequest{
					Argv: []string{foe(t, s), "limit", strconv.Itoa(resource), "3", which, "/tmp/heart"}, Timeout: 0.5,
				})
				now, ierr := s.Inspect(t.Context())
				if ierr != nil {
					t.Fatal(ierr)
				}
				if now.State != api.StateRunning {
					t.Logf("the sandbox has ended: %s; %v", now.Reason, err)
					return // with all that was in it
				}
				if err != nil || !got.Exit.Timeout {
					t.Errorf("the sandbox lives, and the exec says %+v, %v", got, err)
				} else {
					t.Log(got.Stdout)
				}
				list, err := d.Client(t).Processes(t.Context(), s.ID)
				if err != nil {
					t.Fatal(err)
				}
				for _, p := range list {
					if p.State != "Z" { // one that ended is init's to reap
						t.Errorf("a process lives on: %+v", p)
					}
				}
			})
		}
	}
}
