package agent

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/agent/llm"
	"github.com/sandboxd/sandboxd/agent/llm/llmtest"
	"github.com/sandboxd/sandboxd/api"
)

var testTime = time.Date(2026, 1, 16, 14, 30, 0, 0, time.UTC)

// newRun returns the options of a run with a scripted model in a fake sandbox. Its clock advances a
// second at each reading.
func newRun(t *testing.T, turns ...llmtest.Turn) (Options, *fakeSandbox, *llmtest.Server) {
	t.Helper()
	dir := t.TempDir()
	srv := llmtest.Start(t, turns...)
	server, err := llm.NewOpenAI(llm.ServerOptions{BaseURL: srv.URL})
	if err != nil {
		t.Fatal(err)
	}
	sandbox := &fakeSandbox{dir: dir}
	clock := testTime.Add(-time.Second)
	var mu sync.Mutex // calls of a turn run concurrently
	return Options{
		Query: "the task", ModelName: "scripted", BaseURL: srv.URL,
		Model: &llm.Retry{Model: server, Retries: 5, Wait: func(ctx context.Context, _ time.Duration) error { return ctx.Err() }},
		Prompt: PromptConfig{
			SystemPrompt: "work in {working_dir}", InstancePrompt: "<p>{problem_statement}</p>",
			WorkingDir: filepath.Join(dir, "w d"), InputDir: filepath.Join(dir, "w d/in"), OutputDir: filepath.Join(dir, "w d/out"),
		},
		Create: func(_ context.Context, req api.CreateSandbox) (*Sandbox, error) {
			sandbox.req = req
			return sandbox.open(t), nil
		},
		OutputDir: filepath.Join(dir, "output"),
		Now: func() time.Time {
			mu.Lock()
			defer mu.Unlock()
			clock = clock.Add(time.Second)
			return clock
		},
	}, sandbox, srv
}

func turn(calls ...llmtest.Call) llmtest.Turn { return llmtest.Turn{Calls: calls} }

func readTrajectory(t *testing.T, dir string) Trajectory {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, "trajectory.json"))
	if err != nil {
		t.Fatal(err)
	}
	var tr Trajectory
	if err := json.Unmarshal(b, &tr); err != nil {
		t.Fatal(err)
	}
	return tr
}

// mustRun performs a run and checks the invariants of every run: the sandbox is deleted once, and
// the trajectory is complete and holds the reason.
func mustRun(t *testing.T, ctx context.Context, opts Options, sandbox *fakeSandbox, reason ExitReason) (*Result, Trajectory) {
	t.Helper()
	res, err := Run(ctx, opts)
	if err != nil {
		t.Fatalf("run: %v", err)
	}
	if sandbox.deleted != 1 {
		t.Errorf("the sandbox was deleted %d times", sandbox.deleted)
	}
	tr := readTrajectory(t, res.Dir)
	if res.ExitReason != reason || tr.Metadata.ExitReason != reason {
		t.Fatalf("ended as %q (%s), recorded as %q, want %q", res.ExitReason, res.Detail, tr.Metadata.ExitReason, reason)
	}
	if tr.Metadata.TotalSteps != len(tr.Steps) || res.Steps != len(tr.Steps) || tr.Metadata.FinishedAt == nil || tr.ProblemStatement != "the task" {
		t.Errorf("metadata %+v beside %d steps", tr.Metadata, len(tr.Steps))
	}
	if left, err := filepath.Glob(filepath.Join(res.Dir, "*.new")); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	return res, tr
}

func TestElevenSteps(t *testing.T) {
	opts, sandbox, srv := newRun(t,
		llmtest.Turn{Content: "Let me look.", Reasoning: "I should look first.", PromptTokens: 100, Calls: []llmtest.Call{llmtest.Bash("ls in; cat in/numbers.txt")}},
		turn(llmtest.Edit(map[string]any{"command": "view", "path": "in/numbers.txt"})),
		turn(llmtest.Edit(map[string]any{"command": "create", "path": "sum.awk", "file_text": "\t{ s += $1 }\nEND { print s }\n"})),
		turn(llmtest.Bash("awk -f sum.awk in/numbers.txt")),
		turn(llmtest.Edit(map[string]any{"command": "str_replace", "path": "sum.awk", "old_str": "print s", "new_str": "print \"sum\", s"})),
		turn(llmtest.Edit(map[string]any{"command": "insert", "path": "sum.awk", "insert_line": 0, "new_str": "# sums the first column"})),
		turn(llmtest.Edit(map[string]any{"command": "view", "path": "sum.awk", "view_range": []int{2, -1}})),
		turn(llmtest.Bash("mkdir -p out/sub && awk -f sum.awk in/numbers.txt > out/answer.txt && cp sum.awk out/sub/ && ln -s sub/sum.awk out/link")),
		turn(llmtest.Bash("cat out/missing")),
		turn(llmtest.Bash("cat out/answer.txt")),
		turn(llmtest.Submit()),
	)
	in := t.TempDir()
	if err := os.WriteFile(filepath.Join(in, "numbers.txt"), []byte("1\n2\n39\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	opts.InputDir = in
	opts.Limits = api.Limits{Memory: 1 << 30}
	temperature := 1.0
	opts.Temperature = &temperature
	var printed strings.Builder
	opts.OnStep = func(s Step) {
		if err := PrintStep(&printed, s); err != nil {
			t.Error(err)
		}
	}
	res, tr := mustRun(t, t.Context(), opts, sandbox, ExitSubmitted)

	if res.Dir != filepath.Join(opts.OutputDir, "20260116_143000") || res.Answer != "sum 42\n" || res.Steps != 11 {
		t.Errorf("result %+v", res)
	}
	script := "# sums the first column\n\t{ s += $1 }\nEND { print \"sum\", s }\n"
	want := map[string]string{"answer.txt": "sum 42\n", "sub": "/", "sub/sum.awk": script, "link": "-> sub/sum.awk"}
	if diff := cmp.Diff(want, tree(t, filepath.Join(res.Dir, "files"))); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
	if sandbox.req.Image != "host" || sandbox.req.Limits.Memory != 1<<30 || sandbox.req.Timeout <= 0 || sandbox.req.IdleTimeout < llm.HTTPTimeout.Seconds() {
		t.Errorf("sandbox asked for: %+v", sandbox.req)
	}
	if srv.Left() != 0 {
		t.Errorf("%d turns were not played", srv.Left())
	}

	// Texts that the model received.
	requests := srv.Requests()
	if diff := cmp.Diff([]string{ToolEditor, ToolBash, ToolSubmit}, requests[0].Tools); diff != "" {
		t.Errorf("tools (-want +got):\n%s", diff)
	}
	if got := requests[0].Messages[0].Text(); got != "work in "+opts.Prompt.WorkingDir {
		t.Errorf("system prompt %q", got)
	}
	if got := requests[0].Messages[1].Text(); got != "<p>the task</p>\nSteps Remaining: 100" {
		t.Errorf("user message %q", got)
	}
	if got := requests[1].Last().Text(); got != "Exit code: 0\nExecution output of [execute_bash]:\n[STDOUT]\nnumbers.txt\n1\n2\n39\n\nSteps Remaining: 99" {
		t.Errorf("second request ends with %q", got)
	}
	if got := string(requests[1].Messages[2].Fields["reasoning_content"]); got != `"I should look first."` {
		t.Errorf("reasoning came back as %s", got)
	}

	// Recorded figures.
	first := tr.Steps[0]
	if first.Thought != "Let me look." || first.ReasoningContent != "I should look first." || first.Metadata.Step != 1 ||
		first.Metadata.ExecTime != 1 || first.Metadata.ToolTime != 1 || first.Metadata.Usage.PromptTokens != 100 || first.Metadata.FinishReason != "tool_calls" {
		t.Errorf("first step %+v", first)
	}
	if strings.Contains(first.Observation, "Steps Remaining") {
		t.Error("the observation holds the steps remaining")
	}
	if tr.Steps[8].Observation != "Exit code: Error: Exit code 1\nExecution output of [execute_bash]:\n[STDOUT]\n[STDERR]\ncat: out/missing: No such file or directory\n" || tr.Steps[8].ToolCalls[0].Failed {
		t.Errorf("ninth step %+v", tr.Steps[8])
	}
	if last := tr.Steps[10]; last.Action.Function != "submit" || last.Observation != finished {
		t.Errorf("last step %+v", last)
	}
	if !strings.Contains(printed.String(), "--- turn 11 ") || !strings.Contains(printed.String(), "> execute_bash cat out/answer.txt\n") {
		t.Errorf("printed:\n%s", printed.String())
	}
}

// Keys that readers of LLM-in-Sandbox's trajectories rely on, with their types.
func TestTrajectoryKeys(t *testing.T) {
	opts, sandbox, _ := newRun(t, llmtest.Turn{Content: "no tool"}, turn(llmtest.Bash("echo hi")), turn(llmtest.Submit()))
	res, _ := mustRun(t, t.Context(), opts, sandbox, ExitSubmitted)
	b, err := os.ReadFile(filepath.Join(res.Dir, "trajectory.json"))
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		ProblemStatement *string          `json:"problem_statement"`
		Steps            []map[string]any `json:"steps"`
		Metadata         map[string]any   `json:"metadata"`
	}
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	if *got.ProblemStatement != "the task" || got.Metadata["total_steps"] != 3.0 || len(got.Steps) != 3 {
		t.Errorf("got %s", b)
	}
	for i, s := range got.Steps {
		_, isText := s["thought"].(string)
		_, isReasoning := s["reasoning_content"].(string)
		_, isObservation := s["observation"].(string)
		action, isAction := s["action"].(map[string]any)
		meta, isMeta := s["metadata"].(map[string]any)
		if !isText || !isReasoning || !isObservation || !isAction || !isMeta {
			t.Fatalf("step %d: %v", i, s)
		}
		_, isFunction := action["function"].(string)
		_, isParameters := action["parameters"].(map[string]any)
		_, isTime := meta["exec_time"].(float64)
		if !isFunction || !isParameters || !isTime || meta["step"] != float64(i+1) {
			t.Errorf("step %d: %v", i, s)
		}
	}
	if diff := cmp.Diff(map[string]any{"function": "execute_bash", "parameters": map[string]any{"command": "echo hi"}}, got.Steps[1]["action"]); diff != "" {
		t.Errorf("action (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[string]any{"function": "", "parameters": map[string]any{}}, got.Steps[0]["action"]); diff != "" {
		t.Errorf("action without a tool (-want +got):\n%s", diff)
	}
}

// The scripted model refuses a history in which a call is not answered exactly once. These runs
// would then end with a model error.
func TestEveryCallOfATurnIsAnswered(t *testing.T) {
	opts, sandbox, srv := newRun(t,
		turn(llmtest.Bash("echo one >> log"), llmtest.Bash("echo two >> log; cat log"), llmtest.Tool("wizard", "{}"), llmtest.Tool(ToolBash, `{"command":`), llmtest.Bash("cat log")),
		turn(llmtest.Call{ID: "same", Name: ToolBash, Arguments: `{"command":"echo a"}`}, llmtest.Call{ID: "same", Name: ToolBash, Arguments: `{"command":"echo b"}`}, llmtest.Call{ID: llmtest.NoID, Name: ToolBash, Arguments: `{"command":"echo c"}`}),
		turn(llmtest.Tool(ToolBash, "[1]"), llmtest.Tool(ToolBash, ""), llmtest.Tool(ToolBash, "null")),
		turn(llmtest.Submit(), llmtest.Bash("mkdir -p out; echo late > out/late")),
	)
	res, tr := mustRun(t, t.Context(), opts, sandbox, ExitSubmitted)
	if got := tree(t, filepath.Join(res.Dir, "files"))["late"]; got != "late\n" {
		t.Error("a call beside submit was not run")
	}
	first := tr.Steps[0]
	if len(first.ToolCalls) != 5 || first.Action.Function != ToolBash || !strings.Contains(first.ToolCalls[1].Observation, "one\ntwo\n") || !strings.Contains(first.ToolCalls[4].Observation, "one\ntwo\n") {
		t.Errorf("calls %+v", first.ToolCalls)
	}
	if !first.ToolCalls[2].Failed || !first.ToolCalls[3].Failed || first.ToolCalls[3].Arguments != `{"command":` || first.ToolCalls[4].Failed {
		t.Errorf("calls %+v", first.ToolCalls)
	}
	var want []string
	for _, c := range first.ToolCalls {
		want = append(want, c.Observation)
	}
	if first.Observation != strings.Join(want, "\n\n") {
		t.Errorf("observation %q", first.Observation)
	}
	answers := map[string]string{}
	for _, m := range srv.Requests()[2].Messages {
		if m.Role == "tool" {
			answers[m.ToolCallID] = m.Text()
		}
	}
	for id, want := range map[string]string{"same": "\na\n", "call_1": "\nb\n", "call_2": "\nc\n"} {
		if !strings.Contains(answers[id], want) {
			t.Errorf("call %s was answered %q", id, answers[id])
		}
	}
}

func TestTooManyCallsInOneTurn(t *testing.T) {
	var calls []llmtest.Call
	for range maxCallsPerTurn + 5 {
		calls = append(calls, llmtest.Bash("echo x >> log"))
	}
	opts, sandbox, _ := newRun(t, turn(calls...), turn(llmtest.Bash("wc -l < log")), turn(llmtest.Submit()))
	_, tr := mustRun(t, t.Context(), opts, sandbox, ExitSubmitted)
	if got := tr.Steps[1].Observation; !strings.Contains(got, fmt.Sprintf("\n%d\n", maxCallsPerTurn)) {
		t.Errorf("got %q", got)
	}
	if !tr.Steps[0].ToolCalls[maxCallsPerTurn].Failed {
		t.Error("a call too many was not answered as an error")
	}
}

func TestTurnsWithoutToolCall(t *testing.T) {
	t.Run("mended", func(t *testing.T) {
		opts, sandbox, srv := newRun(t, llmtest.Turn{Content: "hm"}, llmtest.Turn{}, turn(llmtest.Bash("true")), llmtest.Turn{Content: "hm"}, llmtest.Turn{Content: "hm"}, turn(llmtest.Submit()))
		_, tr := mustRun(t, t.Context(), opts, sandbox, ExitSubmitted)
		if len(tr.Steps) != 6 || tr.Steps[0].Observation != reminder || len(tr.Steps[0].ToolCalls) != 0 {
			t.Errorf("steps %+v", tr.Steps)
		}
		if got := srv.Requests()[1].Last(); got.Role != "user" || got.Text() != reminder+"\nSteps Remaining: 99" {
			t.Errorf("reminded with %+v", got)
		}
	})
	t.Run("never", func(t *testing.T) {
		opts, sandbox, _ := newRun(t, llmtest.Turn{Content: "a"}, llmtest.Turn{Content: "b"}, llmtest.Turn{Content: "c"})
		_, tr := mustRun(t, t.Context(), opts, sandbox, ExitNoToolCall)
		if len(tr.Steps) != MaxIdleTurns {
			t.Errorf("%d steps", len(tr.Steps))
		}
	})
}

func TestEndsOfARun(t *testing.T) {
	output := turn(llmtest.Bash("mkdir -p out && echo kept > out/file"))
	kept := map[string]string{"file": "kept\n"}
	fail := func(status int, body string) llmtest.Turn { return llmtest.Turn{Status: status, Body: body} }
	for _, tc := range []struct {
		name   string
		turns  []llmtest.Turn
		change func(*Options)
		reason ExitReason
		detail string
		steps  int
	}{
		{"max steps", []llmtest.Turn{output, turn(llmtest.Bash("true"))}, func(o *Options) { o.Budget.Turns = 2 }, ExitMaxSteps, "2 steps", 2},
		{"token limit by the provider's count", []llmtest.Turn{{PromptTokens: 5000, Calls: output.Calls}}, func(o *Options) { o.Budget.Conversation = 4000 }, ExitTokenLimit, "more than the limit of 4000", 1},
		{"token limit by length", []llmtest.Turn{output, turn(llmtest.Bash("yes | head -c 10000"))}, func(o *Options) { o.Budget.Conversation = 2000 }, ExitTokenLimit, "more than the limit of 2000", 2},
		{"500 that passes", []llmtest.Turn{output, fail(500, "x"), fail(503, "x"), fail(429, "x"), fail(200, "garbage"), fail(200, "{}"), turn(llmtest.Submit())}, nil, ExitSubmitted, "", 2},
		{"500 that stays", []llmtest.Turn{output, fail(500, "on fire"), fail(500, "on fire"), fail(500, "on fire"), fail(500, "on fire"), fail(500, "on fire"), fail(500, "on fire")}, nil, ExitModelError, "gave up after 6 attempts: model at http://127.0.0.1", 1},
		{"garbage that stays", []llmtest.Turn{output, fail(200, "<html>"), fail(200, "<html>"), fail(200, "<html>"), fail(200, "<html>"), fail(200, "<html>"), fail(200, "<html>")}, nil, ExitModelError, "not a chat completion", 1},
		{"wrong key", []llmtest.Turn{output, fail(401, `{"error":{"message":"no such key"}}`)}, nil, ExitModelError, "no such key", 1},
		{"context full", []llmtest.Turn{output, fail(400, "maximum context length is 10000 tokens, but there are 9000 input tokens")}, nil, ExitTokenLimit, "maximum context length", 1},
		{"context shrinks", []llmtest.Turn{
			output, fail(400, "maximum context length is 50000 tokens, but there are 10000 input tokens"),
			{Calls: []llmtest.Call{llmtest.Submit()}, Check: func(r llmtest.Request) error {
				if got := string(r.Fields["max_tokens"]); got != "39900" {
					return fmt.Errorf("max_tokens is %s", got)
				}
				return nil
			}},
		}, nil, ExitSubmitted, "", 2},
	} {
		t.Run(tc.name, func(t *testing.T) {
			opts, sandbox, srv := newRun(t, tc.turns...)
			if tc.change != nil {
				tc.change(&opts)
			}
			res, tr := mustRun(t, t.Context(), opts, sandbox, tc.reason)
			if !strings.Contains(res.Detail, tc.detail) || tr.Metadata.ExitDetail != res.Detail || len(tr.Steps) != tc.steps {
				t.Errorf("%d steps, detail %q, want %d, ...%q", len(tr.Steps), res.Detail, tc.steps, tc.detail)
			}
			if diff := cmp.Diff(kept, tree(t, filepath.Join(res.Dir, "files"))); diff != "" {
				t.Errorf("files (-want +got):\n%s", diff)
			}
			if srv.Left() != 0 {
				t.Errorf("%d turns were not played", srv.Left())
			}
		})
	}
}

// Ctrl-C: the current call ends, the output is kept, and the sandbox is deleted with a live
// context.
func TestInterrupt(t *testing.T) {
	why := errors.New("interrupt")
	t.Run("while a command runs", func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		opts, sandbox, _ := newRun(t, turn(llmtest.Bash("mkdir -p out; echo kept > out/file")), turn(llmtest.Bash("sleep 60"), llmtest.Bash("echo never > out/never")))
		sandbox.onExec = func(req api.ExecRequest) {
			if slices.Contains(req.Argv, "sleep 60") {
				cancel(why)
			}
		}
		res, tr := mustRun(t, ctx, opts, sandbox, ExitInterrupted)
		if diff := cmp.Diff(map[string]string{"file": "kept\n"}, tree(t, filepath.Join(res.Dir, "files"))); diff != "" {
			t.Errorf("files (-want +got):\n%s", diff)
		}
		if len(tr.Steps) != 2 || !tr.Steps[1].ToolCalls[0].Failed || !strings.Contains(tr.Steps[1].ToolCalls[1].Observation, "not run") {
			t.Errorf("steps %+v", tr.Steps)
		}
	})
	t.Run("while the model thinks", func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		opts, sandbox, _ := newRun(t, turn(llmtest.Bash("true")), llmtest.Turn{Hang: true, Check: func(llmtest.Request) error { cancel(why); return nil }})
		res, _ := mustRun(t, ctx, opts, sandbox, ExitInterrupted)
		if res.Detail != "interrupt" {
			t.Errorf("detail %q", res.Detail)
		}
	})
	t.Run("time limit", func(t *testing.T) {
		opts, sandbox, _ := newRun(t, turn(llmtest.Bash("sleep 60")))
		opts.Budget.Time = 300 * time.Millisecond
		mustRun(t, t.Context(), opts, sandbox, ExitTimeLimit)
	})
	t.Run("while it is set up", func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		opts, sandbox, _ := newRun(t)
		sandbox.onExec, sandbox.held = func(api.ExecRequest) { cancel(why) }, true
		res, err := Run(ctx, opts)
		if !errors.Is(err, why) || sandbox.deleted != 1 || res.ExitReason != ExitInterrupted {
			t.Errorf("%+v, %v, deleted %d times", res, err, sandbox.deleted)
		}
	})
}

func TestLostSandbox(t *testing.T) {
	opts, sandbox, _ := newRun(t, turn(llmtest.Bash("true")), turn(llmtest.Bash("true")))
	n := 0
	opts.OnStep = func(Step) { n++; sandbox.gone = n == 1 }
	sandbox.onDelete = func(context.Context) error { return problem(api.CodeUnavailable, "the daemon is stopping") }
	_, tr := mustRun(t, t.Context(), opts, sandbox, ExitSandboxLost)
	if len(tr.Steps) != 2 || !strings.Contains(tr.Metadata.ExitDetail, "has ended") {
		t.Errorf("%+v", tr)
	}
}

func TestOurFailures(t *testing.T) {
	t.Run("no sandbox", func(t *testing.T) {
		opts, sandbox, _ := newRun(t)
		opts.Create = func(context.Context, api.CreateSandbox) (*Sandbox, error) {
			return nil, problem(api.CodeNotFound, "no image of that name")
		}
		res, err := Run(t.Context(), opts)
		if err == nil || !strings.Contains(err.Error(), "create the sandbox: no image of that name") || sandbox.deleted != 0 || res != nil {
			t.Errorf("%+v, %v", res, err)
		}
		if left := tree(t, opts.OutputDir); len(left) != 0 {
			t.Errorf("left behind: %v", left)
		}
	})
	t.Run("hostile output", func(t *testing.T) {
		opts, sandbox, _ := newRun(t, turn(llmtest.Submit()))
		opts.Collect = CollectLimits{Entries: 1}
		sandbox.archive = func() (io.ReadCloser, error) {
			return io.NopCloser(makeTar(t, entry{name: "a", content: "1"}, entry{name: "b", content: "1"})), nil
		}
		res, err := Run(t.Context(), opts)
		if err == nil || !strings.Contains(err.Error(), "more than 1 entries") || res.ExitReason != ExitSubmitted || sandbox.deleted != 1 {
			t.Errorf("%+v, %v", res, err)
		}
	})
	t.Run("answer is a link", func(t *testing.T) {
		opts, sandbox, _ := newRun(t, turn(llmtest.Submit()))
		sandbox.archive = func() (io.ReadCloser, error) {
			return io.NopCloser(makeTar(t, entry{name: "answer.txt", typ: tar.TypeSymlink, link: "/etc/passwd"})), nil
		}
		res, _ := mustRun(t, t.Context(), opts, sandbox, ExitSubmitted)
		if res.HasAnswer || res.Answer != "" {
			t.Errorf("answer %q", res.Answer)
		}
	})
	t.Run("no output directory", func(t *testing.T) {
		opts, sandbox, _ := newRun(t, turn(llmtest.Bash("rm -r out")), turn(llmtest.Submit()))
		res, _ := mustRun(t, t.Context(), opts, sandbox, ExitSubmitted)
		if len(res.Output.Skipped) != 1 || len(tree(t, filepath.Join(res.Dir, "files"))) != 0 {
			t.Errorf("%+v", res.Output)
		}
	})
	t.Run("sandbox that stays", func(t *testing.T) {
		opts, sandbox, _ := newRun(t, turn(llmtest.Submit()))
		sandbox.onDelete = func(context.Context) error { return problem(api.CodeInternal, "device busy") }
		res, err := Run(t.Context(), opts)
		if err == nil || !strings.Contains(err.Error(), "delete the sandbox fake: device busy") || res.ExitReason != ExitSubmitted {
			t.Errorf("%+v, %v", res, err)
		}
	})
	for name, change := range map[string]func(*Options){
		"empty query":      func(o *Options) { o.Query = "" },
		"no input":         func(o *Options) { o.InputDir = filepath.Join(o.OutputDir, "nowhere") },
		"input is a file":  func(o *Options) { o.InputDir = "run_test.go" },
		"negative":         func(o *Options) { o.Budget.Turns = -1 },
		"template":         func(o *Options) { o.Prompt.InstancePrompt = "{task}" },
		"output is a file": func(o *Options) { o.OutputDir = "run_test.go" },
	} {
		t.Run(name, func(t *testing.T) {
			opts, sandbox, _ := newRun(t)
			change(&opts)
			if res, err := Run(t.Context(), opts); err == nil || res != nil || len(sandbox.execs) != 0 {
				t.Errorf("%+v, %v", res, err)
			}
		})
	}
}

// Runs of the same second must not share a directory.
func TestRunDirectoriesAreDistinct(t *testing.T) {
	parent := filepath.Join(t.TempDir(), "a", "b")
	for _, want := range []string{"20260116_143000", "20260116_143000_2", "20260116_143000_3"} {
		got, err := MakeDir(parent, runDirName(testTime))
		if err != nil || got != filepath.Join(parent, want) {
			t.Errorf("%q, %v, want %q", got, err, want)
		}
	}
}

// After a crash between two turns, the record holds every earlier turn. The trajectory is written
// once, at the end.
func TestEveryTurnIsOnDiskBeforeTheNext(t *testing.T) {
	var dir string
	check := func(n int) func(llmtest.Request) error {
		return func(llmtest.Request) error {
			_, tr, err := LoadRun(dir)
			if err != nil {
				return err
			}
			if len(tr.Steps) != n {
				return fmt.Errorf("%d turns on disk, want %d", len(tr.Steps), n)
			}
			if _, err := os.Lstat(filepath.Join(dir, trajectoryName)); !errors.Is(err, os.ErrNotExist) {
				return fmt.Errorf("trajectory during the run: %w", err)
			}
			return nil
		}
	}
	opts, sandbox, _ := newRun(t,
		llmtest.Turn{Calls: []llmtest.Call{llmtest.Bash("true")}, Check: check(0)},
		llmtest.Turn{Content: "no call", Check: check(1)},
		llmtest.Turn{Calls: []llmtest.Call{llmtest.Submit()}, Check: check(2)})
	opts.OnStart = func(s Started) { dir = s.Dir }
	mustRun(t, t.Context(), opts, sandbox, ExitSubmitted)
}

// A recording replays: same calls, same observations, and the trajectory names the replay.
func TestRecordedRunReplays(t *testing.T) {
	opts, sandbox, _ := newRun(t,
		llmtest.Turn{Content: "two at once", Reasoning: "r", Calls: []llmtest.Call{llmtest.Bash("echo a > f"), llmtest.Bash("cat f; rm f")}},
		llmtest.Turn{Content: "none"},
		turn(llmtest.Tool(ToolBash, `{"command":`)),
		turn(llmtest.Submit()))
	res, recorded := mustRun(t, t.Context(), opts, sandbox, ExitSubmitted)
	replay, err := llm.OpenReplay(filepath.Join(res.Dir, "trajectory.json"))
	if err != nil {
		t.Fatal(err)
	}
	sandbox.deleted = 0
	opts.Model = replay
	again, replayed := mustRun(t, t.Context(), opts, sandbox, ExitSubmitted)
	if again.Dir == res.Dir || !strings.Contains(replayed.Metadata.ModelSource, "REPLAY") {
		t.Errorf("%s, %s", again.Dir, replayed.Metadata.ModelSource)
	}
	for i := range recorded.Steps {
		a, b := recorded.Steps[i], replayed.Steps[i]
		if a.Thought != b.Thought || a.ReasoningContent != b.ReasoningContent || a.Observation != b.Observation || len(a.ToolCalls) != len(b.ToolCalls) {
			t.Errorf("step %d: recorded %+v, replayed %+v", i+1, a, b)
		}
	}

	sandbox.deleted = 0
	opts.Model, opts.Budget.Turns = replay, 5
	if res, _ := mustRun(t, t.Context(), opts, sandbox, ExitModelError); !strings.Contains(res.Detail, "the recording ends after 4 turns") {
		t.Errorf("detail %q", res.Detail)
	}
}

func TestSavedRequests(t *testing.T) {
	opts, sandbox, _ := newRun(t, turn(llmtest.Bash("true")), turn(llmtest.Submit()))
	opts.SaveRequests, opts.ExtraBody = true, map[string]any{"top_k": 1}
	temperature := 0.5
	opts.Temperature = &temperature
	res, _ := mustRun(t, t.Context(), opts, sandbox, ExitSubmitted)
	for name, keys := range map[string][]string{
		"request_002.json": {"call_id", "model", "api_base", "messages", "extra_params", "kwargs"}, "response_002.json": {"call_id", "response"},
	} {
		b, err := os.ReadFile(filepath.Join(res.Dir, name))
		if err != nil {
			t.Fatal(err)
		}
		var got map[string]any
		if err := json.Unmarshal(b, &got); err != nil {
			t.Fatal(err)
		}
		for _, key := range keys {
			if got[key] == nil {
				t.Errorf("%s has no %s: %s", name, key, b)
			}
		}
		if got["call_id"] != 2.0 {
			t.Errorf("%s: call_id %v", name, got["call_id"])
		}
	}
}

// No text of a model in a path or argument reaches a shell of ours.
func TestPathsNeverReachAShell(t *testing.T) {
	box, s, dir := newToolbox(t)
	for _, path := range []string{"$(touch pwned)", "a;touch pwned", "`touch pwned`", "-rf", "a\nb", "' \" \\", "*"} {
		observe(t, box, call(ToolEditor, args{"command": "create", "path": path, "file_text": "x"}))
		observe(t, box, call(ToolEditor, args{"command": "view", "path": path}))
		observe(t, box, call(ToolEditor, args{"command": "insert", "path": path, "insert_line": 0, "new_str": "y"}))
	}
	observe(t, box, call(ToolEditor, args{"command": "view", "path": dir}))
	if _, err := os.Lstat(filepath.Join(dir, "pwned")); !errors.Is(err, os.ErrNotExist) {
		t.Error("a path was executed")
	}
	for _, e := range s.execs {
		if e.Argv[0] == "sh" || e.Argv[0] == "bash" {
			t.Errorf("a shell was started: %q", e.Argv)
		}
	}
	if got := tree(t, dir); len(got) != 7 {
		t.Errorf("files: %q", got)
	}
}
