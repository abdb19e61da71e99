package limits

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// Each limit of a running sandbox can be changed, and then bites.
func TestChangedLimitsBite(t *testing.T) {
	d := shared(t)
	t.Run("cpus", func(t *testing.T) {
		s := d.Create(t, api.CreateSandbox{})
		dir := cgroupOf(t, s.PID)
		hog(t, s, 2)
		mustPatch(t, d, s, api.LimitsUpdate{CPUs: new(0.2)})
		throttledTo(t, dir, 0.2)
		mustPatch(t, d, s, api.LimitsUpdate{CPUs: new(0.8)})
		if got := read(t, dir, "cpu.max"); got != "80000 100000" {
			t.Errorf("cpu.max is %q after the change", got)
		}
		throttledTo(t, dir, 0.8)
		mustPatch(t, d, s, api.LimitsUpdate{CPUs: new(0.0)}) // the default: no ceiling
		if got := read(t, dir, "cpu.max"); got != "max 100000" {
			t.Errorf("cpu.max is %q after the ceiling was taken away", got)
		}
		s.Delete(t)
	})
	t.Run("pids", func(t *testing.T) {
		s := d.Create(t, api.CreateSandbox{Limits: api.Limits{Pids: 20}})
		dir := cgroupOf(t, s.PID)
		const forks = "import os,time\nn=0\nwhile n<200:\n  try:\n    if os.fork()==0: time.sleep(600)\n  except OSError: break\n  n+=1\nprint(n)"
		first := number(t, dir, "pids.max", "")
		mustPatch(t, d, s, api.LimitsUpdate{Pids: new(int64(60))})
		if n := number(t, dir, "pids.max", ""); first != 20+initThreads || n != 60+initThreads {
			t.Errorf("pids.max went from %d to %d", first, n)
		}
		result := s.Exec(t, api.ExecRequest{Argv: []string{"python3", "-c", forks}})
		var n int
		if _, err := fmt.Sscan(result.Stdout, &n); err != nil || n < 50 || n > 60+initThreads {
			t.Errorf("%q processes with a limit of 60: %+v, %v", result.Stdout, result.Exit, err)
		}
		s.Delete(t)
	})
	t.Run("memory", func(t *testing.T) {
		s := d.Create(t, api.CreateSandbox{Limits: api.Limits{Memory: 48 * mib}})
		const take = "head -c 80M /dev/zero | tail | wc -c"
		if got := s.Exec(t, sh(take)); !got.Exit.OOM {
			t.Errorf("80 MiB in 48: %+v", got)
		}
		mustPatch(t, d, s, api.LimitsUpdate{Memory: new(int64(200 * mib))})
		if got := s.Exec(t, sh(take)); got.Exit.OOM || got.Stdout != "83886080\n" {
			t.Errorf("80 MiB in 200: %+v", got)
		}
		mustPatch(t, d, s, api.LimitsUpdate{Memory: new(int64(48 * mib))})
		if got := s.Exec(t, sh(take)); !got.Exit.OOM {
			t.Errorf("80 MiB in 48 again: %+v", got)
		}
		s.Delete(t)
	})
	t.Run("cpuset", func(t *testing.T) {
		s := d.Create(t, api.CreateSandbox{})
		mustPatch(t, d, s, api.LimitsUpdate{CPUSet: new("1")})
		if got := s.Sh(t, "nproc"); got != "1\n" {
			t.Errorf("nproc says %q", got)
		}
		now, err := patch(t, d, s, api.UpdateSandbox{Limits: api.LimitsUpdate{CPUSet: new("")}})
		if err != nil || now.Enforced.CPUSet != "none" {
			t.Errorf("all cores again: %+v, %v", now, err)
		}
		if got := s.Sh(t, "nproc"); got != "2\n" {
			t.Errorf("nproc says %q", got)
		}
		s.Delete(t)
	})
}

// One limit that cannot be applied, and nothing is changed: not in the kernel, not in the record,
// and nothing is killed.
func TestRefusedChangeChangesNothing(t *testing.T) {
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{
		Limits: api.Limits{Memory: 128 * mib, CPUs: 0.5, Pids: 40, CPUSet: "0-1", IO: api.IOLimits{WriteBPS: 8 * mib}}, Labels: map[string]string{"k": "v"},
	})
	dir := cgroupOf(t, s.PID)
	files := []string{"memory.max", "memory.high", "memory.swap.max", "memory.oom.group", "cpu.max", "cpu.weight", "cpuset.cpus", "pids.max", "io.max"}
	held := func() (all []string) {
		for _, f := range files {
			all = append(all, f+": "+read(t, dir, f))
		}
		return all
	}
	before := held()
	s.Sh(t, "mkfifo /tmp/holding /tmp/over")
	holder := background(t, s, `python3 -c '
a = bytearray(64 << 20)
print(file=open("/tmp/holding", "w"))
open("/tmp/over").read()
print(len(a))'`)
	s.Sh(t, "read x </tmp/holding")
	swap := int64(mib)
	for name, test := range map[string]struct {
		limits api.LimitsUpdate
		code   api.Code
		says   string
	}{
		"memory in use":            {api.LimitsUpdate{Memory: new(int64(32 * mib))}, api.CodeConflict, "in use"},
		"a core that is not there": {api.LimitsUpdate{CPUSet: new("0,63")}, api.CodeUnenforceable, "63"},
		"weight of io":             {api.LimitsUpdate{IO: api.IOUpdate{Weight: new(int64(10))}}, api.CodeUnenforceable, "weigh"},
		"nofile":                   {api.LimitsUpdate{Nofile: new(uint64(10))}, api.CodeInvalid, "nofile"},
		"too little memory":        {api.LimitsUpdate{Memory: new(int64(1))}, api.CodeInvalid, "memory"},
	} {
		l := test.limits
		// With others that could be applied, before it and after it in whatever order.
		l.CPUs, l.Pids, l.Swap, l.OOMGroup, l.CPUWeight = new(0.9), new(int64(99)), &swap, new(true), new(int64(7))
		l.MemoryHigh = new(int64(120 * mib))
		l.IO.ReadIOPS = new(int64(77))
		_, err := patch(t, d, s, api.UpdateSandbox{Limits: l, Timeout: 7200, Labels: map[string]*string{"k": nil}})
		if code(err) != test.code || !strings.Contains(err.Error(), test.says) {
			t.Errorf("%s: %v, want %s with %q", name, err, test.code, test.says)
		}
		if after := held(); !slices.Equal(before, after) {
			t.Errorf("%s: before\n  %s\nafter\n  %s", name, strings.Join(before, "\n  "), strings.Join(after, "\n  "))
		}
	}
	now, err := s.Inspect(t.Context())
	if err != nil || now.Limits.CPUs != 0.5 || now.Limits.Pids != 40 || !now.Deadline.Equal(s.Deadline) || now.Labels["k"] != "v" {
		t.Errorf("after refused changes: %+v, %v", now, err)
	}
	s.Sh(t, "echo >/tmp/over")
	if got := holder(); got.Stdout != "67108864\n" || got.Exit.OOM {
		t.Errorf("the holder of memory ended with %+v", got)
	}
	// Memory that is only cached is no obstacle.
	s.Sh(t, "head -c 80M /dev/zero >/tmp/cached; sync /tmp/cached")
	if n := number(t, dir, "memory.current", ""); n < 64*mib {
		t.Errorf("%d bytes in use with 80 MiB in the page cache", n)
	}
	mustPatch(t, d, s, api.LimitsUpdate{Memory: new(int64(32 * mib))})
	if got := read(t, dir, "memory.max") + " " + read(t, dir, "memory.high"); got != fmt.Sprint(32*mib, " max") {
		t.Errorf("memory.max and memory.high are %s", got)
	}
	if n := number(t, dir, "memory.events", "oom_kill"); n != 0 {
		t.Errorf("%d processes were killed", n)
	}
}

// A changed sandbox is the same to the next daemon, and its deadline is the launcher's too.
func TestChangesSurviveTheDaemon(t *testing.T) {
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	short := d.Create(t, api.CreateSandbox{})
	began := time.Now()
	changed, err := patch(t, d, s, api.UpdateSandbox{
		Limits: api.LimitsUpdate{Memory: new(int64(64 * mib)), CPUWeight: new(int64(50))}, Timeout: 7200, IdleTimeout: 1234,
		Labels: map[string]*string{"new": new("label")},
	})
	if err != nil {
		t.Fatal(err)
	}
	// Two hours from the change, which the daemon made between request and answer.
	if at := changed.Deadline.Add(-2 * time.Hour); at.Before(began.Add(-time.Second)) || at.After(time.Now().Add(time.Second)) {
		t.Errorf("the deadline is at %s, want two hours from the change", changed.Deadline)
	}
	if _, err := patch(t, d, short, api.UpdateSandbox{Timeout: 3}); err != nil {
		t.Fatal(err)
	}
	where := cgroupOf(t, d.PID())
	d.Kill9(t)
	// No daemon: it is the launcher that ends it.
	harness.Eventually(t, func() error {
		if _, err := os.Stat(fmt.Sprintf("/proc/%d/ns", short.PID)); err == nil {
			return fmt.Errorf("the init still runs")
		}
		return nil
	})
	d.LaunchIn(t, where)
	now, err := s.Inspect(t.Context())
	if err != nil || now.State != api.StateRunning || now.Limits.Memory != 64*mib || now.Limits.CPUWeight != 50 || now.IdleTimeout != 1234 ||
		!now.Deadline.Equal(changed.Deadline) || now.Labels["new"] != "label" {
		t.Errorf("after the restart: %+v, %v; want %+v", now, err, changed)
	}
	dir := cgroupOf(t, s.PID)
	if got := read(t, dir, "memory.max") + " " + read(t, dir, "cpu.weight"); got != "67108864 50" {
		t.Errorf("memory.max and cpu.weight are %s", got)
	}
	if now, err := short.Inspect(t.Context()); err != nil || now.State != api.StateStopped || !strings.Contains(now.Reason, "deadline") {
		t.Errorf("the sandbox whose deadline was brought forward: %+v, %v", now, err)
	}
}
