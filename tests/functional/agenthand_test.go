package functional

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/sandboxd/sandboxd/agent/llm/llmtest"
	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// A run of the daemon's that a user has resumed by hand is the user's: the daemon neither counts
// it nor ends it, and does not wait for it when it ends.
func TestAgentRunResumedByHand(t *testing.T) {
	testenv.SameForAll(t)
	d := startWith(t, harness.Options{Args: []string{"--agent-runs", "1"}})
	c := apiClient(t, d)
	first, second := newGate(), newGate()
	model := llmtest.Start(t,
		llmtest.Turn{Hang: true, Check: func(llmtest.Request) error { close(first.asked); return nil }},
		llmtest.Turn{Hang: true, Check: func(llmtest.Request) error { close(second.asked); return nil }},
		llmtest.Turn{Calls: []llmtest.Call{llmtest.Submit()}})
	model.Key = plantedKey
	run := mustStart(t, c, api.StartAgentRun{Query: "q", Model: scripted(model)})
	<-first.asked
	if _, err := c.CancelAgentRun(t.Context(), run.ID, api.CancelAgentRun{Keep: true}); err != nil {
		t.Fatal(err)
	}
	follow(t, c, run.ID, 1)
	key := filepath.Join(t.TempDir(), "settings.yaml") // and not in its arguments, where others look for it
	if err := os.WriteFile(key, []byte("api_key: "+plantedKey+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	hand := exec.Command(harness.Program(t, "sandboxd"), "--socket", d.Socket, "agent", "resume", run.Dir, "--settings", key)
	hand.Env = []string{"HOME=" + t.TempDir(), "PATH=/usr/bin:/bin"}
	said := new(strings.Builder)
	hand.Stdout, hand.Stderr = said, said
	if err := hand.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- hand.Wait() }()
	select {
	case <-second.asked:
	case err := <-ended:
		t.Fatalf("resumed by hand: %v\n%s", err, said)
	}
	if now, err := c.GetAgentRun(t.Context(), run.ID); err != nil || now.State != api.AgentRunning {
		t.Errorf("%+v, %v", now, err)
	}
	if _, err := c.CancelAgentRun(t.Context(), run.ID, api.CancelAgentRun{}); !errors.Is(err, &api.Problem{Code: api.CodeConflict}) {
		t.Errorf("cancelled: %v", err)
	}
	// Nor does a daemon that finds it there.
	d.Kill9(t)
	d.Launch(t)
	c = apiClient(t, d)
	other := mustStart(t, c, api.StartAgentRun{Query: "q", Model: scripted(model)})
	if now, _ := follow(t, c, other.ID, 1); now.ExitReason != "submitted" {
		t.Errorf("another run: %+v", now)
	}
	if err := syscall.Kill(d.PID(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	d.WaitExit(t)
	if log := d.Log(); strings.Contains(log, "go on without a daemon") || strings.Contains(log, "agent runs do not end") {
		t.Errorf("the daemon waited for it: %s", log)
	}
	select {
	case err := <-ended:
		t.Errorf("it has ended: %v\n%s", err, said)
	default:
		if err := hand.Process.Kill(); err != nil {
			t.Error(err)
		}
		if err := <-ended; err == nil {
			t.Error("it was killed, and ended well")
		}
	}
	d.Launch(t)
}
