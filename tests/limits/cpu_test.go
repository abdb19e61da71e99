package limits

import (
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
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
	// Where the machine is emulated on a busy host, time that it does not get is counted for whoever ran just then, so that a
	// window may be off. Without weights, every one of them would be at 1:1.
	var ratios []float64
	for len(ratios) < 5 {
		l, h := used()
		select {
		case <-time.After(5 * time.Second):
		case <-t.Context().Done():
		}
		l2, h2 := used()
		ratios = append(ratios, float64(h2-h)/float64(l2-l))
		if near(ratios[len(ratios)-1], 3, 0.15) {
			break
		}
	}
	t.Logf("1:%.2f", ratios)
	if !near(ratios[len(ratios)-1], 3, 0.15) {
		t.Errorf("weights 1:3 share a core 1:%.2f", ratios)
	}
}

func TestCPUSetIsWhatTheSandboxSees(t *testing.T) {
	d := start(t)
	s := d.Create(t, api.CreateSandbox{Limits: api.Limits{CPUSet: "1"}})
	if got := s.Sh(t, "nproc; grep Cpus_allowed_list /proc/self/status"); got != "1\nCpus_allowed_list:\t1\n" {
		t.Errorf("the sandbox sees %q", got)
	}
	hog(t, s, 2)
	if got := cores(t, cgroupOf(t, s.PID), 3*time.Second); got > 1.05 {
		t.Errorf("two hogs on one core get %.2f cores", got)
	}
	// A core that is not there: the kernel would accept it, and give the sandbox all there are.
	before := d.Snapshot(t)
	_, err := d.TryCreate(t.Context(), api.CreateSandbox{Limits: api.Limits{CPUSet: "1,63"}})
	if code(err) != api.CodeUnenforceable || !strings.Contains(err.Error(), "63") {
		t.Errorf("cores 1 and 63: %v", err)
	}
	d.NothingLeaked(t, before)
}
