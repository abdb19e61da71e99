package limits

import (
	"fmt"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// Two hogs with weights 1:3 on one core get it 1:3.
func TestCPUWeightsShareACore(t *testing.T) {
	d := shared(t)
	light := d.Create(t, api.CreateSandbox{Limits: api.Limits{CPUSet: "0", CPUWeight: 100}})
	heavy := d.Create(t, api.CreateSandbox{Limits: api.Limits{CPUSet: "0", CPUWeight: 300}})
	lightDir, heavyDir := cgroupOf(t, light.PID), cgroupOf(t, heavy.PID)
	hog(t, light, 1)
	hog(t, heavy, 2) // the number of processes gives no more
	used := func() (l, h int64) {
		return number(t, lightDir, "cpu.stat", "usage_usec"), number(t, heavyDir, "cpu.stat", "usage_usec")
	}
	// Judged by the time that the kernel has counted, however long it takes to get that. An emulated
	// core that stands still is charged to the process that happens to run, so the ratio comes near
	// its value only with time. Without weights it stays at 1:1.
	l, h := used()
	harness.Eventually(t, func() error {
		l2, h2 := used()
		if both := (l2 - l) + (h2 - h); both < 3e6 {
			return fmt.Errorf("both have used %d µs", both)
		}
		if ratio := float64(h2-h) / float64(max(l2-l, 1)); !near(ratio, 3, 0.15) {
			return fmt.Errorf("weights 1:3 share a core 1:%.2f", ratio)
		}
		return nil
	})
}

func TestCPUSetIsWhatTheSandboxSees(t *testing.T) {
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{Limits: api.Limits{CPUSet: "1"}})
	if got := s.Sh(t, "nproc; grep Cpus_allowed_list /proc/self/status"); got != "1\nCpus_allowed_list:\t1\n" {
		t.Errorf("the sandbox sees %q", got)
	}
	hog(t, s, 2)
	// The kernel runs both there, and nowhere else.
	if got := read(t, cgroupOf(t, s.PID), "cpuset.cpus.effective"); got != "1" {
		t.Errorf("two hogs may run on %q", got)
	}
	for _, pid := range s.Processes(t) {
		if got := read(t, fmt.Sprintf("/proc/%d", pid), "status"); !strings.Contains(got, "Cpus_allowed_list:\t1\n") {
			t.Errorf("process %d of the sandbox may run elsewhere:\n%s", pid, got)
		}
	}
	// A core that is not there: the kernel would accept it, and give the sandbox all there are.
	before := d.Snapshot(t)
	_, err := d.TryCreate(t.Context(), api.CreateSandbox{Limits: api.Limits{CPUSet: "1,63"}})
	if code(err) != api.CodeUnenforceable || !strings.Contains(err.Error(), "63") {
		t.Errorf("cores 1 and 63: %v", err)
	}
	d.NothingLeaked(t, before)
}
