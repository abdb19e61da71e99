package limits

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/tests/harness"
)

func stats(t *testing.T, d *harness.Daemon, s *harness.Sandbox) *api.Stats {
	t.Helper()
	var st api.Stats
	if err := d.Call(t.Context(), http.MethodGet, "/v1/sandboxes/"+s.ID+"/stats", nil, &st); err != nil {
		t.Fatal(err)
	}
	return &st
}

// Stats agree with the kernel's files, before and after.
func TestStatsAgreeWithTheKernel(t *testing.T) {
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{Limits: api.Limits{Memory: 64 * mib, CPUs: 0.5, Pids: 30}})
	dir, disk := cgroupOf(t, s.PID), device(t, d)
	if got := s.Exec(t, sh("exec tail /dev/zero")); !got.Exit.OOM {
		t.Errorf("the hog ended with %+v", got.Exit)
	}
	s.Sh(t, `dd if=/dev/zero of=/tmp/f bs=1M count=4 oflag=direct 2>/dev/null; nohup sleep 600 >/dev/null 2>&1 &`)

	// More processor time than some periods of its limit have, whatever the machine's speed. Then more
	// than 30 processes, from one that does not give up as a shell would.
	s.Exec(t, api.ExecRequest{Argv: []string{"python3", "-c", `
import os, time
while time.process_time() < 0.5: pass
for i in range(60):
    try:
        if os.fork() == 0: time.sleep(1); os._exit(0)
    except OSError: pass`}})

	counters := map[string]func() float64{
		"cpu usage":     func() float64 { return float64(number(t, dir, "cpu.stat", "usage_usec")) / 1000 },
		"cpu user":      func() float64 { return float64(number(t, dir, "cpu.stat", "user_usec")) / 1000 },
		"cpu throttled": func() float64 { return float64(number(t, dir, "cpu.stat", "nr_throttled")) },
		"memory":        func() float64 { return float64(number(t, dir, "memory.current", "")) },
		"swap":          func() float64 { return float64(number(t, dir, "memory.swap.current", "")) },
		"memory peak":   func() float64 { return float64(number(t, dir, "memory.peak", "")) },
		"oom kills":     func() float64 { return float64(number(t, dir, "memory.events", "oom_kill")) },
		"pids":          func() float64 { return float64(number(t, dir, "pids.current", "")) },
		"pids refused":  func() float64 { return float64(number(t, dir, "pids.events", "max")) },
		"io written":    func() float64 { return float64(moved(t, dir, disk, "wbytes")) },
		"io writes":     func() float64 { return float64(moved(t, dir, disk, "wios")) },
	}
	before := map[string]float64{}
	for name, f := range counters {
		before[name] = f()
	}
	st := stats(t, d, s)
	if st.Memory == nil || st.CPU == nil || st.Pids == nil || len(st.IO) == 0 {
		t.Fatalf("stats lack something: %+v", st)
	}
	var disks api.IOStats
	for _, io := range st.IO {
		if io.Device == disk {
			disks = io
		}
	}
	got := map[string]float64{
		"cpu usage": *st.CPU.UsageMS, "cpu user": *st.CPU.UserMS, "cpu throttled": float64(*st.CPU.Throttled),
		"memory": float64(*st.Memory.Current), "swap": float64(*st.Memory.Swap), "memory peak": float64(*st.Memory.Peak),
		"oom kills": float64(*st.Memory.OOMKills),
		"pids":      float64(*st.Pids.Current), "pids refused": float64(*st.Pids.Refused),
		"io written": float64(disks.WriteBytes), "io writes": float64(disks.WriteOps),
	}
	for name, f := range counters {
		// The init goes on working and processes are still ending, so a counter may have moved
		// meanwhile; memory and processes move both ways.
		low, high := before[name], f()
		if low, high = min(low, high), max(low, high); name == "memory" {
			low, high = low-8*mib, high+8*mib
		}
		if got[name] < low || got[name] > high {
			t.Errorf("%s: stats say %v, the kernel %v before and %v after", name, got[name], low, high)
		}
	}
	if *st.Memory.OOMKills != 1 || disks.WriteBytes < 4*mib || *st.Pids.Current < 2 || *st.Pids.Refused < 1 {
		t.Errorf("stats after an OOM kill, 4 MiB written, forks refused and a process in the background: %+v, %+v, %+v, %+v", *st.Memory.OOMKills, disks, *st.Pids.Current, *st.Pids.Refused)
	}
	if p := st.Pressure["cpu"]; p.Some == nil || p.Some.TotalMS <= 0 {
		t.Errorf("pressure after throttling: %+v", st.Pressure)
	}

	out := d.CLI(t, "stats", "--json", s.ID)
	var again api.Stats
	if err := json.Unmarshal([]byte(out.Stdout), &again); err != nil || again.Memory == nil {
		t.Errorf("sandboxd stats --json: %v\n%s", err, out.Stdout)
	}
	if out := d.CLI(t, "stats", s.ID); out.Code != 0 || !strings.Contains(out.Stdout, "64MiB") {
		t.Errorf("sandboxd stats: %+v", out)
	}
}
