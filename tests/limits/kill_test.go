package limits

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// A killed process runs once more, to die. Hundreds of processes of a sandbox that has a twentieth
// of a processor end as fast as without that limit, whatever ends the sandbox.
func TestLimitOfCPUDoesNotSlowTheEnd(t *testing.T) {
	testenv.Soak(t, "it compares delays")
	const processes = 200
	// They wait until all are there: forking among busy processes takes minutes on an emulated
	// machine. Their FIFO is open before the fork, so that none is late.
	const busy = `mkfifo /tmp/go; exec 3<>/tmp/go
for i in $(seq %d); do (read line <&3; while :; do :; done) >/dev/null 2>&1 & done`
	d := shared(t)
	end := func(limits api.LimitsUpdate, end func(s *harness.Sandbox)) time.Duration {
		s := d.Create(t, api.CreateSandbox{Limits: api.Limits{Pids: processes + 20}})
		dir := cgroupOf(t, s.PID)
		s.Sh(t, fmt.Sprintf(busy, processes))
		if n := number(t, dir, "pids.current", ""); n < processes {
			t.Fatalf("%d processes run", n)
		}
		s.Sh(t, fmt.Sprintf("yes '' | head -n %d >/tmp/go", processes))
		mustPatch(t, d, s, limits)
		began := time.Now()
		end(s)
		return time.Since(began).Round(time.Millisecond)
	}
	twentieth, weight := 0.05, int64(100)
	for name, how := range map[string]func(s *harness.Sandbox){
		"deleted": func(s *harness.Sandbox) { s.Delete(t) },
		"stopped": func(s *harness.Sandbox) {
			var none float64
			s.MustTurn(t, "stop", &api.StopSandbox{Grace: &none}, api.StateStopped)
		},
		"at its deadline": func(s *harness.Sandbox) {
			if _, err := patch(t, d, s, api.UpdateSandbox{Timeout: 0.001}); err != nil {
				t.Fatal(err)
			}
			s.WaitState(t, api.StateStopped)
		},
	} {
		// The fastest of each: a machine that has much else to do makes them slower now and then.
		free, held := time.Duration(math.MaxInt64), time.Duration(math.MaxInt64)
		for range 4 {
			free, held = min(free, end(api.LimitsUpdate{CPUWeight: &weight}, how)), min(held, end(api.LimitsUpdate{CPUs: &twentieth}, how))
			t.Logf("%s: %d processes end within %s, with a twentieth of a processor within %s", name, processes, free, held)
			if held <= 2*free+time.Second {
				break
			}
		}
		if held > 2*free+time.Second {
			t.Errorf("%s: with the limit it takes %s, without it %s", name, held, free)
		}
	}
}
