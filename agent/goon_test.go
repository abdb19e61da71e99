package agent

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/agent/llm/llmtest"
	"github.com/sandboxd/sandboxd/api"
)

// upTo returns a record up to and including its n-th line with the text.
func upTo(t *testing.T, lines [][]byte, text string, n int) [][]byte {
	t.Helper()
	for i := range lines {
		if bytes.Contains(lines[i], []byte(text)) {
			if n--; n == 0 {
				return lines[:i+1]
			}
		}
	}
	t.Fatalf("no line with %s", text)
	return nil
}

// A recorded request without an answer is not repeated if the new budget does not allow it.
func TestResumeHoldsTheBudgetForAnOpenQuestion(t *testing.T) {
	opts, sandbox, _ := newRun(t, llmtest.Turn{PromptTokens: 500, Calls: []llmtest.Call{llmtest.Bash("true")}}, turn(llmtest.Submit()))
	res, _ := mustRun(t, t.Context(), opts, sandbox, ExitSubmitted)
	lines := upTo(t, recordOf(t, res.Dir), `"request":`, 2)
	for name, change := range map[string]func(*Options){
		"used up":            func(o *Options) { o.Budget.Tokens = 400 },
		"the question alone": func(o *Options) { o.Budget.Tokens = 800 },
		"turns":              func(o *Options) { o.Budget.Turns = 1 },
	} {
		t.Run(name, func(t *testing.T) {
			again, sandbox, srv := newRun(t, turn(llmtest.Submit()))
			change(&again)
			resumed, err := Resume(t.Context(), crashed(t, lines, len(lines), false), withOpen(t, again, sandbox))
			if err != nil || resumed.ExitReason != ExitTokenLimit && resumed.ExitReason != ExitMaxSteps || srv.Left() != 1 {
				t.Errorf("%+v, %v, %d turns left", resumed, err, srv.Left())
			}
		})
	}
	t.Run("the answer is bounded", func(t *testing.T) {
		again, sandbox, srv := newRun(t, turn(llmtest.Submit()))
		again.Budget.Tokens = 2000
		if _, err := Resume(t.Context(), crashed(t, lines, len(lines), false), withOpen(t, again, sandbox)); err != nil {
			t.Fatal(err)
		}
		if got := string(srv.Requests()[0].Fields["max_tokens"]); len(got) > 3 {
			t.Errorf("max_tokens %s", got)
		}
	})
}

// Calls that had not begun are decided on again under a new policy.
func TestResumeWithAnotherPolicy(t *testing.T) {
	opts, sandbox, _ := newRun(t, turn(llmtest.Bash("echo x > w")), turn(llmtest.Submit()))
	res, _ := mustRun(t, t.Context(), opts, sandbox, ExitSubmitted)
	lines := upTo(t, recordOf(t, res.Dir), `"verdict":`, 1)
	again, sandbox, _ := newRun(t, turn(llmtest.Submit()))
	again.Policy = mustParse(t, "rules: [{when: 'tool == \"execute_bash\"', action: deny, reason: no more}]")
	dir := crashed(t, lines, len(lines), false)
	if _, err := Resume(t.Context(), dir, withOpen(t, again, sandbox)); err != nil {
		t.Fatal(err)
	}
	call := readTrajectory(t, dir).Steps[0].ToolCalls[0]
	if !call.NotRun || !strings.Contains(call.Observation, "no more") {
		t.Errorf("%+v", call)
	}
	for _, e := range sandbox.execs {
		if slices.Contains(e.Argv, "echo x > w") {
			t.Error("it was run")
		}
	}
}

// Time and processor time of a turn that a crash interrupted count as spent.
func TestResumeCountsAnInterruptedTurn(t *testing.T) {
	opts, sandbox, _ := newRun(t, turn(llmtest.Bash("echo x > w")), turn(llmtest.Submit()))
	used := func() time.Duration { return time.Second }
	sandbox.cpu = used
	opts.Budget.CPU = time.Minute
	res, _ := mustRun(t, t.Context(), opts, sandbox, ExitSubmitted)
	lines := upTo(t, recordOf(t, res.Dir), `"began":`, 1)
	first, err := readEventsOf(lines)
	if err != nil {
		t.Fatal(err)
	}
	worked := first[len(first)-1].At.Sub(first[0].At)
	again, sandbox, _ := newRun(t, turn(llmtest.Submit()))
	sandbox.cpu = func() time.Duration { return 40 * time.Second }
	resumed, err := Resume(t.Context(), crashed(t, lines, len(lines), false), withOpen(t, again, sandbox))
	if err != nil || resumed.Spent.CPU != 40*time.Second || resumed.Spent.Time <= worked || worked == 0 {
		t.Errorf("%+v, %v; it had worked for %v", resumed, err, worked)
	}
	after, _, err := ReadRecord(resumed.Dir)
	if err != nil {
		t.Fatal(err)
	}
	if e := after[len(lines)].Resumed; e == nil || e.Spent.Time != worked {
		t.Errorf("it is taken up with %+v; it had worked for %v", e, worked)
	}
}

func readEventsOf(lines [][]byte) ([]Event, error) {
	events, _, err := readEvents(bytes.NewReader(bytes.Join(lines, nil)))
	return events, err
}

// A turn that was begun, undone by a snapshot and repeated is one turn of a fork.
func TestForkOfARunThatWentOnInASnapshot(t *testing.T) {
	opts, sandbox, _ := newRun(t, turn(llmtest.Bash("echo one > w")), turn(llmtest.Bash("echo two >> w")), turn(llmtest.Submit()))
	opts.SnapshotTurns = true
	res, _ := mustRun(t, t.Context(), opts, sandbox, ExitSubmitted)
	lines := upTo(t, recordOf(t, res.Dir), `"ended":`, 2)
	dir := crashed(t, lines, len(lines), false)
	again, second, _ := newRun(t, turn(llmtest.Submit()))
	again.Create = opts.Create
	second.deleted = 1 // the first sandbox is gone
	if _, err := Resume(t.Context(), dir, withOpen(t, again, second)); err != nil {
		t.Fatal(err)
	}
	branch, _, _ := newRun(t, turn(llmtest.Submit()))
	branch.Create = opts.Create
	forked, err := Fork(t.Context(), dir, 2, branch)
	if err != nil || forked.Steps != 3 {
		t.Errorf("%+v, %v", forked, err)
	}
}

// An interrupted run can keep its sandbox and continue in it: with its files, and with no turn
// repeated.
func TestInterruptedRunGoesOnInItsSandbox(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	opts, sandbox, srv := newRun(t,
		turn(llmtest.Bash("echo one > w")),
		llmtest.Turn{Hang: true, Check: func(llmtest.Request) error { cancel(errors.New("interrupt")); return nil }},
		turn(llmtest.Bash("mkdir -p out; cat w > out/answer.txt")),
		turn(llmtest.Submit()),
	)
	opts.KeepInterrupted = func(error) bool { return true }
	res, err := Run(ctx, opts)
	if err != nil || res.ExitReason != ExitInterrupted || res.Kept != "fake" || sandbox.stopped != 1 || sandbox.deleted != 0 {
		t.Fatalf("%+v, %v, stopped %d times, deleted %d times", res, err, sandbox.stopped, sandbox.deleted)
	}
	res, err = Resume(t.Context(), res.Dir, withOpen(t, opts, sandbox))
	if err != nil || res.ExitReason != ExitSubmitted || res.Answer != "one\n" || res.Kept != "" || sandbox.deleted != 1 || srv.Left() != 0 {
		t.Errorf("%+v, %v, deleted %d times, %d turns left", res, err, sandbox.deleted, srv.Left())
	}
}

// The input that a record names is copied again only if that is allowed now.
func TestResumeAsksForTheInput(t *testing.T) {
	opts, sandbox, _ := newRun(t, turn(llmtest.Submit()))
	opts.InputDir = t.TempDir()
	res, _ := mustRun(t, t.Context(), opts, sandbox, ExitSubmitted)
	lines := upTo(t, recordOf(t, res.Dir), `"run":`, 1)
	again, second, _ := newRun(t, turn(llmtest.Submit()))
	asked := ""
	again.InputAllowed = func(dir string) error { asked = dir; return errors.New("not any more") }
	_, err := Resume(t.Context(), crashed(t, lines, len(lines), false), withOpen(t, again, second))
	if err == nil || !strings.Contains(err.Error(), "not any more") || asked != opts.InputDir {
		t.Errorf("asked for %q: %v", asked, err)
	}
	if second.deleted != 1 {
		t.Errorf("its sandbox was deleted %d times", second.deleted)
	}
}

// A sandbox in which no call has run is not kept.
func TestInterruptWhileItIsSetUpKeepsNothing(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	opts, sandbox, _ := newRun(t)
	opts.KeepInterrupted = func(error) bool { return true }
	sandbox.onExec, sandbox.held = func(api.ExecRequest) { cancel(errors.New("interrupt")) }, true
	if res, err := Run(ctx, opts); err == nil || res.Kept != "" || sandbox.deleted != 1 {
		t.Errorf("%+v, %v, deleted %d times", res, err, sandbox.deleted)
	}
}
