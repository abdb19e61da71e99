package limits

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// A sandbox that was parked without limits of its user's has those that he asks for: in the
// kernel, and where they bite.
func TestParkedSandboxIsLimited(t *testing.T) {
	testenv.RequireCgroup(t, "memory", "pids", "cpu")
	d := harness.Start(t, harness.Options{Cgroup: group(t), Args: []string{"--pool", api.HostImage + "=1"}})
	harness.Eventually(t, func() error {
		if p := d.System(t).Pools; len(p) != 1 || p[0].Ready != 1 {
			return fmt.Errorf("the pools are %+v", p)
		}
		return nil
	})
	s := d.Create(t, api.CreateSandbox{Limits: api.Limits{Memory: 48 * mib, Pids: 40, CPUs: 0.5}})
	if p := d.System(t).Pools[0]; p.Hits != 1 {
		t.Fatalf("it was not claimed: %+v", p)
	}
	dir := filepath.Clean(cgroupOf(t, s.PID))
	if got := number(t, dir, "memory.max", ""); got != 48*mib {
		t.Errorf("memory.max is %d", got)
	}
	if got := number(t, dir, "pids.max", ""); got != 40+initThreads {
		t.Errorf("pids.max is %d", got)
	}
	if got := read(t, dir, "cpu.max"); strings.TrimSpace(got) != "50000 100000" {
		t.Errorf("cpu.max is %q", got)
	}
	if got := s.Exec(t, sh("tail /dev/zero")); !got.Exit.OOM {
		t.Errorf("a program that wants all memory ended with %+v", got)
	}
}

// A sandbox in which an interpreter waits can be claimed with less memory than that uses: it has
// ended before the limit is set.
func TestParkedInterpreterTakesNoMemoryOfASmallerSandbox(t *testing.T) {
	testenv.RequireCgroup(t, "memory", "pids", "cpu")
	testenv.RequirePeer(t, "python3")
	// They use much memory for the time that emulated processors take to import them: with init, 12.6
	// MiB that cannot be reclaimed.
	const modules = "+ssl+pydoc_data.topics+html.entities+sqlite3+ctypes+decimal"
	d := harness.Start(t, harness.Options{Cgroup: group(t), Args: []string{"--pool", api.HostImage + "=1,context=python" + modules}})
	harness.Eventually(t, func() error {
		if p := d.System(t).Pools; len(p) != 1 || p[0].Ready != 1 || p[0].Context.Ready != 1 {
			return fmt.Errorf("the pools are %+v", p)
		}
		return nil
	})
	s := d.Create(t, api.CreateSandbox{Limits: api.Limits{Memory: 10 * mib}})
	if p := d.System(t).Pools[0]; p.Hits != 1 || p.Misses != 0 {
		t.Errorf("it was not claimed: %+v", p)
	}
	if got := number(t, filepath.Clean(cgroupOf(t, s.PID)), "memory.max", ""); got != 10*mib {
		t.Errorf("memory.max is %d", got)
	}
}
