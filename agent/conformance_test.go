package agent

import (
	"context"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/agent/llm"
	"github.com/sandboxd/sandboxd/agent/llm/llmtest"
	"github.com/sandboxd/sandboxd/api"
)

// conformanceKey must not appear in any output of a run.
const conformanceKey = "sk-scripted-0123456789abcdef"

// minConversations is the promised number of conversations.
const minConversations = 60

// TestConformance plays every conversation of testdata/conversations over the real wire formats,
// whole and streamed, through the whole loop: scripted server, SDK, adapter, retries, prices,
// tools, record.
func TestConformance(t *testing.T) {
	conversations := llmtest.LoadConversations(t, filepath.Join("testdata", "conversations"))
	if len(conversations) < minConversations {
		t.Errorf("there are %d conversations", len(conversations))
	}
	formats := map[string]llm.Format{"chat": llm.FormatChat, "responses": llm.FormatResponses, "anthropic": llm.FormatAnthropic}
	for _, c := range conversations {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			if len(c.Formats) == 0 {
				c.Formats = []string{"chat", "responses", "anthropic"}
			}
			if len(c.Modes) == 0 {
				c.Modes = []string{"whole", "stream"}
			}
			for _, name := range c.Formats {
				format, ok := formats[name]
				if !ok {
					t.Fatalf("no format %q", name)
				}
				for _, mode := range c.Modes {
					t.Run(name+"/"+mode, func(t *testing.T) {
						t.Parallel()
						converse(t, &c, format, mode == "stream")
					})
				}
			}
		})
	}
}

// modelFunc is a model made of two functions.
type modelFunc struct {
	describe func() string
	complete func(context.Context, llm.Request) (*llm.Response, error)
}

func (m modelFunc) Describe() string { return m.describe() }
func (m modelFunc) Complete(ctx context.Context, req llm.Request) (*llm.Response, error) {
	return m.complete(ctx, req)
}

// converse plays one conversation.
func converse(t *testing.T, c *llmtest.Conversation, format llm.Format, stream bool) {
	t.Helper()
	dir := t.TempDir()
	script := c.Play(format, conformanceKey)
	srv := llmtest.Start(t, script...)
	srv.Key = conformanceKey
	server, err := llm.Open(format, llm.ServerOptions{BaseURL: srv.URL, APIKey: conformanceKey})
	if err != nil {
		t.Fatal(err)
	}
	hasty, err := llm.Open(format, llm.ServerOptions{BaseURL: srv.URL, APIKey: conformanceKey, Timeout: c.CallTimeout})
	if err != nil {
		t.Fatal(err)
	}
	model := modelFunc{server.Describe, func(ctx context.Context, req llm.Request) (*llm.Response, error) {
		// A turn that arrives may take as long as this machine needs.
		if next := len(script) - srv.Left(); next < len(script) && (script[next].Hang || script[next].HangAfter) {
			return hasty.Complete(ctx, req)
		}
		return server.Complete(ctx, req)
	}}
	retry := &llm.Retry{Model: model, Retries: llm.DefaultRetries, Wait: func(ctx context.Context, _ time.Duration) error { return ctx.Err() }}
	if c.Retries != nil {
		retry.Retries = *c.Retries
	}
	var notices []string
	retry.Notice = func(text string) { notices = append(notices, text) }
	cached := 0.1
	written := 1.25
	sandbox := &fakeSandbox{dir: dir}
	name := c.Model
	if name == "" {
		name = "scripted"
	}
	opts := Options{
		Query: "the task", ModelName: name, BaseURL: server.BaseURL(), Model: retry,
		Prompt: PromptConfig{
			SystemPrompt: "work in {working_dir}", InstancePrompt: "{problem_statement}",
			WorkingDir: filepath.Join(dir, "w"), InputDir: filepath.Join(dir, "w/in"), OutputDir: filepath.Join(dir, "w/out"),
		},
		Create:    func(context.Context, api.CreateSandbox) (*Sandbox, error) { return sandbox.open(t), nil },
		OutputDir: filepath.Join(dir, "output"), SaveRequests: !stream,
		Budget: Budget{Turns: c.MaxSteps, Conversation: c.TokenLimit}, MaxTokensPerCall: c.CallTokens, Temperature: c.Temperature, ExtraBody: c.ExtraBody,
	}
	if name == "scripted" {
		opts.Price = &llm.Price{Input: 1, Cached: &cached, CacheWrite: &written, Output: 10}
	}
	restarts := 0
	watched := map[llm.DeltaKind]string{}
	if stream {
		opts.OnDelta = func(d llm.Delta) {
			if d.Kind == llm.DeltaRestart {
				restarts++
				clear(watched)
			}
			watched[d.Kind] += d.Text
		}
	}
	opts.OnStep = func(s Step) {
		var names, arguments string
		for _, call := range s.ToolCalls {
			names, arguments = names+call.Function, arguments+call.Arguments
		}
		want := map[llm.DeltaKind]string{llm.DeltaContent: s.Thought, llm.DeltaReasoning: s.ReasoningContent, llm.DeltaCall: names, llm.DeltaArguments: arguments}
		for kind, text := range want {
			// Anthropic streams empty arguments as an object without any delta. And an answer that
			// came whole, although a stream was requested, has no deltas.
			if kind == llm.DeltaArguments && format == llm.FormatAnthropic && watched[kind] == "" && text == "{}" {
				continue
			}
			if stream && len(watched) > 0 && watched[kind] != text {
				t.Errorf("step %d: streamed %s %q, and the turn has %q", s.Metadata.Step, kind, watched[kind], text)
			}
		}
		clear(watched)
	}
	res, tr := mustRun(t, t.Context(), opts, sandbox, ExitReason(c.Expect.Exit))

	want := c.Expect
	if !strings.Contains(res.Detail, want.Detail) {
		t.Errorf("detail %q, want ...%q...", res.Detail, want.Detail)
	}
	if res.Steps != want.Steps {
		t.Errorf("%d steps, want %d", res.Steps, want.Steps)
	}
	if left := srv.Left(); left != 0 {
		t.Errorf("%d turns were not played", left)
	}
	if len(notices) != len(want.Notices) {
		t.Errorf("notices %q, want %q", notices, want.Notices)
	}
	for i := range min(len(notices), len(want.Notices)) {
		if !strings.Contains(notices[i], want.Notices[i]) {
			t.Errorf("notice %q, want ...%q...", notices[i], want.Notices[i])
		}
	}
	if stream && want.Restarts != nil && restarts != *want.Restarts {
		t.Errorf("%d restarts, want %d", restarts, *want.Restarts)
	}
	var thoughts, thinking, finish []string
	for i, s := range tr.Steps {
		thoughts, thinking, finish = append(thoughts, s.Thought), append(thinking, s.ReasoningContent), append(finish, s.Metadata.FinishReason)
		if i < len(want.Results) {
			if err := llmtest.HoldsInOrder(s.Observation, want.Results[i]); err != nil {
				t.Errorf("step %d: %v", i+1, err)
			}
		}
	}
	for _, tc := range []struct {
		what      string
		want, got []string
	}{{"thoughts", want.Thoughts, thoughts}, {"reasoning", want.Thinking, thinking}, {"finish reasons", want.Finish, finish}} {
		if diff := cmp.Diff(tc.want, tc.got); tc.want != nil && diff != "" {
			t.Errorf("%s (-want +got):\n%s", tc.what, diff)
		}
	}
	if u, n := tr.Metadata.Usage, want.Counts; n != nil {
		if n.Estimated && u.CostUSD > 0 {
			u.CostUSD = 0
		} else if n.Estimated {
			t.Error("what was not counted costs nothing")
		}
		if u.PromptTokens != n.Input || u.CompletionTokens != n.Output || u.CachedTokens != n.Cached || u.CacheWriteTokens != n.Written ||
			u.ReasoningTokens != n.Reasoning || u.TotalTokens != n.Input+n.Output || math.Abs(u.CostUSD-n.Cost) > 1e-12 || u.UnpricedCalls != n.Unpriced {
			t.Errorf("usage %+v, want %+v", u, *n)
		}
	}
	if res.Answer != want.Answer {
		t.Errorf("answer %q, want %q", res.Answer, want.Answer)
	}
	noKey(t, res.Dir, append(slices.Clone(notices), res.Detail, tr.Metadata.ModelSource))
}

// noKey checks that no output of a run holds the key.
func noKey(t *testing.T, dir string, said []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		b, err := os.ReadFile(path)
		said = append(said, path+": "+string(b))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range said {
		if strings.Contains(text, conformanceKey) {
			t.Errorf("the key stands in %.300s", text)
		}
	}
}
