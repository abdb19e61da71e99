package limits

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

const (
	mib = 1 << 20
	// initThreads are the init's own, which the limit of the programs does not count.
	initThreads = 16
)

// The requested limits are in the kernel's files, and the sandbox reports how each is enforced.
func TestLimitsAreInTheKernel(t *testing.T) {
	d := shared(t)
	swap := int64(16 * mib)
	s := d.Create(t, api.CreateSandbox{Limits: api.Limits{
		Memory: 64 * mib, MemoryHigh: 48*mib + 1, Swap: &swap, OOMGroup: true, CPUs: 1.5, CPUWeight: 300, CPUSet: "0-1", Pids: 40,
		IO: api.IOLimits{ReadBPS: 8 * mib, WriteBPS: 4 * mib, ReadIOPS: 1000, WriteIOPS: 500},
	}})
	if e := s.Enforced; e.Memory != "cgroup" || e.CPU != "cgroup" || e.Pids != "cgroup" || e.CPUSet != "cgroup" || e.IO != "cgroup" {
		t.Errorf("enforced: %+v, want cgroup for everything", e)
	}
	dir := cgroupOf(t, s.PID)
	for file, want := range map[string]string{
		"memory.max": "67108864", "memory.swap.max": "16777216", "cpu.max": "150000 100000", "pids.max": fmt.Sprint(40 + initThreads),
		"memory.high": "50331648", "memory.oom.group": "1", "cpu.weight": "300", "cpuset.cpus": "0-1", // memory in whole pages
		"io.max": device(t, d) + " rbps=8388608 wbps=4194304 riops=1000 wiops=500",
	} {
		if got := read(t, dir, file); got != want {
			t.Errorf("%s is %q, want %q", file, got, want)
		}
	}
	// Everything of the sandbox is in there, and nothing of the host.
	s.Sh(t, "sleep 600 >/dev/null 2>&1 &")
	for _, pid := range s.Processes(t) {
		if got := cgroupOf(t, pid); got != dir {
			t.Errorf("process %d of the sandbox is in %s, not in %s", pid, got, dir)
		}
	}
	for pid := range strings.FieldsSeq(read(t, dir, "cgroup.procs")) {
		if !slices.Contains(s.Processes(t), int(number(t, "/proc/"+pid, "status", "Pid:"))) {
			t.Errorf("process %s is in the sandbox's cgroup and not in the sandbox", pid)
		}
	}
	// The sandbox neither sees the names nor can it change anything.
	if got := s.Sh(t, "cat /proc/self/cgroup"); got != "0::/\n" {
		t.Errorf("the sandbox sees its cgroup as %q", got)
	}
	if got := s.Exec(t, sh("ls /sys/fs/cgroup; mount -t cgroup2 none /mnt && echo 1 >/mnt/pids.max")); got.Stdout != "" || got.Exit.Code == 0 {
		t.Errorf("the sandbox reaches its cgroup: %+v", got)
	}
}

func TestDoctorFindsTheDelegatedCgroup(t *testing.T) {
	d := shared(t)
	got := d.CLI(t, "doctor")
	if !strings.Contains(got.Stdout, "ok    cgroup limits:") || !strings.Contains(got.Stdout, "ok    cgroup.kill:") {
		t.Errorf("doctor says:\n%s", got.Stdout)
	}
	if missing := d.System(t).Enforced.Missing; slices.ContainsFunc(missing, func(m string) bool { return strings.HasPrefix(m, "cgroup") }) {
		t.Errorf("missing: %q", missing)
	}
}

func TestRequireCgroupIsMet(t *testing.T) {
	shared(t).Create(t, api.CreateSandbox{}) // of a daemon that was started with --require=cgroup
}

// A program that takes more memory than its sandbox has is killed, and the answer says why.
func TestMemoryLimitKillsTheProgram(t *testing.T) {
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{Limits: api.Limits{Memory: 64 * mib}})
	if s.Enforced.Memory != "cgroup" {
		t.Errorf("enforced.memory is %q", s.Enforced.Memory)
	}
	if got := s.Exec(t, api.ExecRequest{Argv: []string{"python3", "-c", "x = bytearray(8 << 20)"}}); got.Exit.Code != 0 {
		t.Errorf("control: 8 MiB of 64: %+v", got)
	}
	got := s.Exec(t, api.ExecRequest{Argv: []string{"python3", "-c", "x = bytearray(256 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1"}})
	if !got.Exit.OOM || got.Exit.Signal != "SIGKILL" {
		t.Errorf("256 MiB of 64: %+v", got.Exit)
	}
}

// With the pids controller the kernel counts, whoever the processes belong to.
func TestPidsLimitIsTheCgroups(t *testing.T) {
	s := shared(t).Create(t, api.CreateSandbox{Limits: api.Limits{Pids: 32}})
	if s.Enforced.Pids != "cgroup" {
		t.Errorf("enforced.pids is %q", s.Enforced.Pids)
	}
	s.Exec(t, api.ExecRequest{Argv: []string{"sh", "-c", "i=0; while [ $i -lt 60 ]; do sleep 60 & i=$((i+1)); done 2>/dev/null"}, Timeout: 20})
	if n := len(s.Processes(t)); n > 32+initThreads {
		t.Errorf("%d processes run under a limit of 32 and the init's %d", n, initThreads)
	}
}

// A hog is killed at its limit. Its exec reports that and keeps its earlier output; another exec
// of its sandbox and a neighbour go on.
func TestMemoryLimitKillsTheHogAlone(t *testing.T) {
	d := shared(t)
	victim := d.Create(t, api.CreateSandbox{Limits: api.Limits{Memory: 64 * mib}})
	neighbour := d.Create(t, api.CreateSandbox{Limits: api.Limits{Memory: 64 * mib}})
	dir := cgroupOf(t, victim.PID)
	// The waiting exec asks for no memory: while the kernel is still freeing the hog's, it kills any
	// process that does.
	const patient = `echo >/tmp/running; read x </tmp/over; echo alive`
	for _, s := range []*harness.Sandbox{victim, neighbour} {
		s.Sh(t, "mkfifo /tmp/running /tmp/over")
	}
	beside, apart := background(t, victim, patient), background(t, neighbour, patient)
	for _, s := range []*harness.Sandbox{victim, neighbour} {
		s.Sh(t, "read x </tmp/running")
	}

	result := victim.Exec(t, sh("echo partial; exec tail /dev/zero"))
	if !result.Exit.OOM || result.Exit.Signal != "SIGKILL" || result.Stdout != "partial\n" {
		t.Errorf("the hog ended with %+v and stdout %q, want an OOM kill and its output", result.Exit, result.Stdout)
	}
	if n := number(t, dir, "memory.events", "oom_kill"); n != 1 {
		t.Errorf("the kernel counts %d kills in the sandbox's cgroup, want 1", n)
	}
	for name, s := range map[string]*harness.Sandbox{"same": victim, "neighbour": neighbour} {
		s.Sh(t, "echo >/tmp/over")
		wait := map[string]func() *api.ExecResult{"same": beside, "neighbour": apart}[name]
		// That the kernel struck during an exec is told to every exec of that sandbox: it is the
		// sandbox's limit.
		if got := wait(); got.Stdout != "alive\n" || got.Exit.Code != 0 || got.Exit.OOM != (name == "same") {
			t.Errorf("%s sandbox: the exec beside ended with %+v, stdout %q", name, got.Exit, got.Stdout)
		}
	}
	if again := victim.Exec(t, sh("echo fine")); again.Exit.OOM || again.Stdout != "fine\n" {
		t.Errorf("the exec after the kill ended with %+v", again)
	}
}

// Many small hogs, none of which ends before the last has begun: the kernel has no reason to choose
// the sandbox's init, and must not.
func TestMemoryLimitSparesTheInit(t *testing.T) {
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{Limits: api.Limits{Memory: 24 * mib}})
	result := s.Exec(t, api.ExecRequest{
		Argv:    []string{"sh", "-c", "i=0; while [ $i -lt 150 ]; do sleep 600 & i=$((i+1)); done; echo survived; sleep 3"},
		Timeout: testenv.HungAfter.Seconds(),
	})
	if !result.Exit.OOM {
		t.Errorf("150 processes in 24 MiB ended with %+v and stdout %q, want an OOM kill", result.Exit, result.Stdout)
	}
	// If the kernel chose the shell, its children still fill the sandbox, and the next program may be
	// chosen too. Only a living init can report that.
	harness.Eventually(t, func() error {
		if got := s.Exec(t, sh("echo fine")); got.Stdout != "fine\n" {
			if !got.Exit.OOM {
				t.Fatalf("the exec after it: %+v", got)
			}
			return fmt.Errorf("the exec after it: %+v", got)
		}
		return nil
	})
}

// A fork bomb stops at pids.max. The sandbox survives it; its neighbour and the daemon do not
// notice.
func TestPidsLimitStopsAForkBomb(t *testing.T) {
	const limit = 60
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{Limits: api.Limits{Pids: limit}})
	neighbour := d.Create(t, api.CreateSandbox{})
	dir := cgroupOf(t, s.PID)
	// The bomb forks for ever. It waits after each refusal, so that the test judges pids.max and not
	// how the scheduler divides two cores between sixty busy processes and init.
	const bomb = "import os,time\nwhile True:\n  try: os.fork()\n  except OSError: time.sleep(0.05)"
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	ended := make(chan error, 1)
	go func() {
		_, err := s.TryExec(ctx, api.ExecRequest{Argv: []string{"python3", "-c", bomb}})
		ended <- err
	}()
	harness.Eventually(t, func() error {
		select {
		case err := <-ended:
			t.Fatalf("the bomb has ended: %v", err)
		default:
		}
		if number(t, dir, "pids.events", "max") == 0 {
			return fmt.Errorf("the limit was not hit; there are %s processes", read(t, dir, "pids.current"))
		}
		return nil
	})
	for range 5 {
		if got := neighbour.Sh(t, "echo fine"); got != "fine\n" {
			t.Errorf("the neighbour says %q", got)
		}
		if err := d.Call(t.Context(), http.MethodGet, "/healthz", nil, nil); err != nil {
			t.Errorf("the daemon: %v", err)
		}
		if n := number(t, dir, "pids.current", ""); n > limit+initThreads {
			t.Errorf("%d processes beyond a limit of %d and the init's %d", n, limit, initThreads)
		}
	}
	leave()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("the bomb ended with %v", err)
	}
	harness.Eventually(t, func() error { // the client that left is not told when all of it is gone
		if left := s.Processes(t); len(left) != 1 {
			return fmt.Errorf("processes %v are left", left)
		}
		return nil
	})
	if got := s.Sh(t, "echo fine"); got != "fine\n" {
		t.Errorf("the exec after the bomb: %q", got)
	}
}

// Two hogs under a limit of half a core get that and no more, counted by the kernel's own periods.
func TestCPULimitGivesItsShare(t *testing.T) {
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{Limits: api.Limits{CPUs: 0.5}})
	hog(t, s, 2) // so that the limit and not the scheduler decides
	throttledTo(t, cgroupOf(t, s.PID), 0.5)
	s.Delete(t)
}

// The usage of an exec is measured, not guessed.
func TestUsageIsMeasured(t *testing.T) {
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{Limits: api.Limits{Memory: 256 * mib, CPUs: 1}})
	// It works until the kernel has counted a second of processor time, however long that takes.
	result := s.Exec(t, api.ExecRequest{Argv: []string{"python3", "-c", "import time\nwhile time.process_time() < 1: pass"}})
	if result.Exit.Code != 0 || result.Usage.CPUMS < 900 {
		t.Errorf("usage after a second of work: %+v, %+v", result.Usage, result.Exit)
	}
}

// Without a delegated cgroup an explicit limit is refused, and limits that the defaults lack are
// named.
func TestExplicitLimitsAreRefusedWithoutDelegation(t *testing.T) {
	testenv.RequireOrdinaryUser(t) // nothing is closed to root
	dir := group(t)
	for _, f := range []string{"cgroup.subtree_control", ""} {
		if err := os.Chmod(filepath.Join(dir, f), 0o555); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { _ = os.Chmod(dir, 0o755) })
	d := harness.Start(t, harness.Options{Cgroup: dir})
	for name, limits := range map[string]api.Limits{
		"memory": {Memory: 64 * mib}, "cpu": {CPUs: 1}, "swap": {Swap: new(int64)},
		"oom_group": {OOMGroup: true}, "cpuset": {CPUSet: "0"}, "cpu_weight": {CPUWeight: 1}, "io": {IO: api.IOLimits{WriteBPS: mib}},
	} {
		_, err := d.TryCreate(t.Context(), api.CreateSandbox{Limits: limits})
		var p *api.Problem
		if !errors.As(err, &p) || p.Code != api.CodeUnenforceable || !strings.Contains(p.Detail, name) {
			t.Errorf("%s limit: %v", name, err)
		}
	}
	s := d.Create(t, api.CreateSandbox{})
	if e := s.Enforced; e.Memory != "none" || e.Pids != "rlimit" || len(e.Missing) == 0 {
		t.Errorf("enforced: %+v", e)
	}
}

// kill -9, and the next daemon starts where its supervisor puts it: in the same cgroup, or in
// another one. What runs is adopted, its limits hold, and the shutdown cleans up both places.
func TestRestartedDaemonAdoptsCgroups(t *testing.T) {
	for _, name := range []string{"same cgroup", "another cgroup"} {
		t.Run(name, func(t *testing.T) {
			var d *harness.Daemon
			var elsewhere string
			if name == "another cgroup" {
				// Made first, so that it is looked at last: a clean-up of the daemon's own comes before.
				elsewhere = group(t)
				d = start(t)
			} else {
				d = shared(t)
			}
			s := d.Create(t, api.CreateSandbox{Limits: api.Limits{Memory: 64 * mib}})
			dir := cgroupOf(t, s.PID)
			where := cgroupOf(t, d.PID()) // its leaf: no process can be put where controllers are handed on
			d.Kill9(t)
			if elsewhere != "" {
				where = elsewhere
			}
			d.LaunchIn(t, where)
			if got := cgroupOf(t, s.PID); got != dir {
				t.Errorf("the sandbox has moved from %s to %s", dir, got)
			}
			if got := s.Exec(t, sh("echo partial; exec tail /dev/zero")); !got.Exit.OOM || got.Stdout != "partial\n" {
				t.Errorf("after the restart a hog ended with %+v, stdout %q", got.Exit, got.Stdout)
			}
			more := d.Create(t, api.CreateSandbox{Limits: api.Limits{Memory: 64 * mib}})
			if e := more.Enforced; e.Memory != "cgroup" {
				t.Errorf("a sandbox of the second daemon: %+v", e)
			}
			more.Delete(t)
		})
	}
}

// The launcher's death ends its sandboxes; the next launcher finds their cgroups, and removes them.
func TestCgroupsOfADeadLauncherAreRemoved(t *testing.T) {
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	dir := cgroupOf(t, s.PID)
	launcher, err := os.FindProcess(d.System(t).Launcher)
	if err != nil {
		t.Fatal(err)
	}
	d.Mark(t)
	if err := launcher.Kill(); err != nil {
		t.Fatal(err)
	}
	s.WaitState(t, api.StateLost)
	// The next launcher removes them before it serves. It gives up if the kernel takes longer than
	// the launcher's own limit to end the dead one's PID namespace. The next request then starts
	// another launcher.
	harness.Eventually(t, func() error {
		_, err := d.TryCreate(t.Context(), api.CreateSandbox{})
		return err
	})
	if _, err := os.Stat(dir); err == nil {
		t.Errorf("cgroup %s of the lost sandbox is still there, with %q", dir, read(t, dir, "cgroup.procs"))
	}
}

// Two daemons of one user in one cgroup leave each other's sandboxes alone.
func TestDaemonsShareACgroup(t *testing.T) {
	a := shared(t)
	sa := a.Create(t, api.CreateSandbox{Limits: api.Limits{Memory: 64 * mib}})
	b := harness.Start(t, harness.Options{Cgroup: cgroupOf(t, a.PID())})
	sb := b.Create(t, api.CreateSandbox{Limits: api.Limits{Memory: 64 * mib}})
	for _, s := range []*harness.Sandbox{sa, sb} {
		if got := s.Sh(t, "echo fine"); got != "fine\n" {
			t.Errorf("sandbox %s: %q", s.ID, got)
		}
	}
	sb.Delete(t)
	if got := sa.Sh(t, "echo fine"); got != "fine\n" {
		t.Errorf("sandbox of the first daemon: %q", got)
	}
}
