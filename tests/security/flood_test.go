package security

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// Endless output without a reader is read at no more than a share of a processor, whatever takes
// it: an answer that has reached its limit, the kept output of a detached exec, or the log of a
// main process. The burst at the beginning is waited for; without the bound the daemon would be
// busy for ever. The share is judged in soak runs.
func TestFloodsCostTheDaemonLittle(t *testing.T) {
	testenv.RequireUserNS(t)
	const share, over = 0.35, time.Second
	d := harness.Start(t, harness.Options{})
	c := client.New(d.Socket)
	defer c.Close()
	argv := []string{"dd", "if=/dev/zero", "bs=64k"}
	for name, flood := range map[string]func(t *testing.T) *harness.Sandbox{
		"an answer": func(t *testing.T) *harness.Sandbox {
			t.Helper()
			s := d.Create(t, api.CreateSandbox{})
			go func() { _, _ = s.TryExec(t.Context(), api.ExecRequest{Argv: argv}) }() // its sandbox is deleted
			return s
		},
		"detached": func(t *testing.T) *harness.Sandbox {
			t.Helper()
			s := d.Create(t, api.CreateSandbox{})
			if _, err := c.Detach(t.Context(), s.ID, api.ExecRequest{Argv: argv}); err != nil {
				t.Fatal(err)
			}
			return s
		},
		"a main process": func(t *testing.T) *harness.Sandbox {
			t.Helper()
			return d.Create(t, api.CreateSandbox{Command: argv})
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := flood(t)
			defer s.Delete(t)
			floods := func() error {
				if len(s.Processes(t)) < 2 {
					return errors.New("only init runs")
				}
				return nil
			}
			harness.Eventually(t, floods)
			if !testenv.Soaking() {
				// The share is a rate, and host.TestPace holds its arithmetic. Here the flood is on, and the
				// daemon answers beside it.
				if got := s.Sh(t, "echo fine"); got != "fine\n" {
					t.Errorf("an exec beside the flood says %q", got)
				}
				return
			}
			began, before, held := time.Now(), processorTime(t, d.PID()), 0
			harness.Eventually(t, func() error {
				took := time.Since(began)
				if took < over {
					return errors.New("it is measured still")
				}
				now := processorTime(t, d.PID())
				part := float64(now-before) / float64(took)
				began, before = time.Now(), now
				t.Logf("%.0f %% of a processor", 100*part)
				if held++; part > share {
					held = 0
				}
				if held < 3 { // in a row: on a machine that is busy otherwise it may not get more once
					return fmt.Errorf("the daemon takes %.0f %% of a processor", 100*part)
				}
				return nil
			})
			if err := floods(); err != nil {
				t.Error(err)
			}
		})
	}
}

// processorTime is what all threads of a process have taken so far.
func processorTime(t *testing.T, pid int) time.Duration {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	fields := bytes.Fields(data[bytes.LastIndexByte(data, ')')+1:])
	var ticks int64
	for _, f := range fields[11:13] { // utime, stime
		n, err := strconv.ParseInt(string(f), 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		ticks += n
	}
	return time.Duration(ticks) * time.Second / 100 // USER_HZ
}
