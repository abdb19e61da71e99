package main

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/agent"
	"github.com/sandboxd/sandboxd/agent/llm"
	"github.com/sandboxd/sandboxd/agent/llm/llmtest"
	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline/cmdtest"
)

// resolveAgent parses a command line and an environment into the options of a run.
func resolveAgent(t *testing.T, env map[string]string, args ...string) (agent.Options, error) {
	t.Helper()
	var o runOptions
	f := pflag.NewFlagSet("run", pflag.ContinueOnError)
	o.addFlags(f)
	if err := f.Parse(args); err != nil {
		return agent.Options{}, err
	}
	return o.resolve(t.Context(), f.Changed, func(key string) string { return env[key] }, func(string) {})
}

func TestAgentFlags(t *testing.T) {
	t.Chdir(t.TempDir())
	for name, content := range map[string]string{
		"settings.yaml": "llm_name: from-settings\nllm_base_url: http://settings/v1\nprompt_config: prompt.yaml\n",
		"prompt.yaml":   "system_prompt: mine\n",
		"replay.json":   `{"problem_statement":"recorded task","steps":[{"action":{"function":"submit","parameters":{}}}]}`,
	} {
		if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	get := func(env map[string]string, args ...string) agent.Options {
		t.Helper()
		o, err := resolveAgent(t, env, args...)
		if err != nil {
			t.Fatalf("%v: %v", args, err)
		}
		return o
	}

	o := get(nil, "--query", "q", "--llm_name", "openai/m")
	if o.ModelName != "m" || o.BaseURL != "http://localhost:8000/v1" || o.Image != "host" || o.Budget.Turns != 100 || o.Budget.Conversation != 65536 ||
		o.MaxTokensPerCall != 65536 || *o.Temperature != 1.0 || o.OutputDir != "./output" || o.SaveRequests || o.Prompt.WorkingDir != "/testbed" {
		t.Errorf("defaults: %+v", o)
	}
	if retry, ok := o.Model.(*llm.Retry); !ok || retry.Retries != 5 {
		t.Errorf("model %+v", o.Model)
	}
	if o.Price != nil || get(nil, "--query", "q", "--llm_name", "gpt-5").Price == nil {
		t.Error("the model's price is not that of its name")
	}
	for name, want := range map[string]string{
		"anthropic/claude-opus-5": "Anthropic Messages at https://api.anthropic.com",
		"openai/responses/gpt-5":  "OpenAI Responses at http://localhost:8000/v1",
		"hosted_vllm/x":           "OpenAI-compatible server at http://localhost:8000/v1",
	} {
		if got := get(map[string]string{"ANTHROPIC_API_KEY": "k"}, "--query", "q", "--llm_name", name).Model.Describe(); got != want {
			t.Errorf("%s is %q", name, got)
		}
	}

	env := map[string]string{"LLM_NAME": "from-env", "LLM_BASE_URL": "http://env/v1"}
	if o := get(env, "--query", "q"); o.ModelName != "from-env" || o.BaseURL != "http://env/v1" {
		t.Errorf("environment: %+v", o)
	}
	if o := get(env, "--query", "q", "--settings", "settings.yaml"); o.ModelName != "from-settings" || o.BaseURL != "http://settings/v1" || o.Prompt.SystemPrompt != "mine" {
		t.Errorf("settings: %+v", o)
	}
	if o := get(env, "--query", "q", "--settings", "settings.yaml", "--llm-name", "flag", "--llm-base-url", "http://flag/v1"); o.ModelName != "flag" || o.BaseURL != "http://flag/v1" {
		t.Errorf("flags: %+v", o)
	}
	// Dashes and underscores are equal, and the old name of --image still works.
	o = get(nil, "--query=q", "--llm_name=o3-mini", "--docker_image=x:1", "--max-steps=3", "--max_token_limit=9", "--max-tokens-per-call=8",
		"--temperature=0.5", "--input-dir=in", "--output_dir=out", "--save-litellm-response", `--extra-body={"a":"true","b":[{"c":"False"}],"d":"x"}`, "--timeout=90s", "-m=1g", "--cpus=1.5", "--pids=7")
	want := api.Limits{Memory: 1 << 30, CPUs: 1.5, Pids: 7}
	if o.Image != "x:1" || o.Budget.Turns != 3 || o.Budget.Conversation != 9 || o.MaxTokensPerCall != 8 || o.Temperature != nil || o.InputDir != "in" ||
		o.OutputDir != "out" || !o.SaveRequests || o.Budget.Time != 90*time.Second || o.Limits != want {
		t.Errorf("all flags: %+v", o)
	}
	if diff := cmp.Diff(map[string]any{"a": true, "b": []any{map[string]any{"c": false}}, "d": "x"}, o.ExtraBody); diff != "" {
		t.Errorf("extra body (-want +got):\n%s", diff)
	}
	if o := get(nil, "--llm", "replay:replay.json"); o.Query != "recorded task" || !strings.Contains(o.Model.Describe(), "REPLAY") {
		t.Errorf("replay: %+v", o)
	}

	for _, tc := range []struct {
		args []string
		want string
	}{
		{[]string{"--llm_name", "m"}, "--query is required"},
		{[]string{"--query", "q"}, "--llm_name is required"},
		{[]string{"--query", "q", "--llm", "gpt"}, "want replay:FILE"},
		{[]string{"--query", "q", "--llm", "replay:missing"}, "open recording: open missing"},
		{[]string{"--query", "q", "--llm_name", "anthropic/"}, "nothing after the provider"},
		{[]string{"--query", "q", "--llm_name", "m", "--max_egress", "1m"}, "--max_egress is for a sandbox with a network"},
		{[]string{"--query", "q", "--llm_name", "m", "--max_cost", "0"}, "--max_cost 0"},
		{[]string{"--query", "q", "--llm_name", "m", "--max_total_tokens", "-1"}, "--max_total_tokens -1"},
		{[]string{"--query", "q", "--llm_name", "azure/x"}, "--llm_base_url is required for azure/x"},
		{[]string{"--query", "q", "--llm_name", "m", "--prices", "missing"}, "open prices: open missing"},
		{[]string{"--query", "q", "--llm_name", "anthropic/x"}, "there is no key for the model at https://api.anthropic.com: set LLM_API_KEY or ANTHROPIC_API_KEY"},
		{[]string{"--query", "q", "--llm_name", "m", "--llm_base_url", "localhost"}, "model base URL"},
		{[]string{"--query", "q", "--llm_name", "m", "--max_steps", "0"}, "--max_steps 0"},
		{[]string{"--query", "q", "--llm_name", "m", "--temperature", "NaN"}, "--temperature NaN"},
		{[]string{"--query", "q", "--llm_name", "m", "--extra_body", "[1]"}, "JSON object"},
		{[]string{"--query", "q", "--llm_name", "m", "--extra_body", `{"messages":[]}`}, "must not set"},
		{[]string{"--query", "q", "--llm_name", "m", "--settings", "missing"}, "read the settings"},
		{[]string{"--query", "q", "--llm_name", "m", "--prompt_config", "missing"}, "read the prompt config"},
		{[]string{"--query", "q", "--llm_name", "m", "--image", ""}, "empty name"},
		{[]string{"--query", "q", "--llm_name", "m", "--pids", "0"}, "--pids 0"},
	} {
		if _, err := resolveAgent(t, nil, tc.args...); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%v: got %v, want ...%s", tc.args, err, tc.want)
		}
	}
}

// agentFake returns a fake daemon whose sandboxes have an output directory with answer.txt.
func agentFake(answer string) *cmdtest.Daemon {
	f := cmdtest.New()
	f.Archives["/testbed/output"] = []cmdtest.Entry{{Header: tar.Header{Name: "answer.txt"}, Body: answer}}
	return f
}

func TestAgentRun(t *testing.T) {
	bash := llmtest.Turn{Content: "\x1b[2Jlook", Calls: []llmtest.Call{llmtest.Bash("true")}}
	submit := llmtest.Turn{Calls: []llmtest.Call{llmtest.Submit()}}
	for _, tc := range []struct {
		name   string
		turns  []llmtest.Turn
		args   []string
		answer string
		code   int
		stdout string
		stderr []string
	}{
		{"submitted", []llmtest.Turn{bash, submit}, nil, "42\n", 0, "42\n", []string{"OpenAI-compatible server", "--- turn 2 ", "> execute_bash true", "ended: submitted after 2 turns", `\x1b[2Jlook`}},
		{"a hostile answer", []llmtest.Turn{submit}, nil, "\x1b]0;x\x07", 0, `\x1b]0;x\x07` + "\n", nil},
		{"out of steps", []llmtest.Turn{bash, bash}, []string{"--max_steps", "2"}, "partial", 1, "partial\n", []string{"ended: max_steps"}},
		{"model error", []llmtest.Turn{{Status: 500, Body: `{"error":"on fire"}`}}, []string{"--llm_retries", "0"}, "", 1, "", []string{"ended: model_error", "HTTP 500: on fire"}},
		{"wrong key", []llmtest.Turn{{Status: 401, Body: `{"error":"who?"}`}}, nil, "", 1, "", []string{"--api_key"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := agentFake(tc.answer)
			srv := llmtest.Start(t, tc.turns...)
			got := inline(t, f.Start(t), append([]string{"agent", "run", "--query", "q", "--llm_name", "m", "--llm_base_url", srv.URL}, tc.args...)...)
			if got.Code != tc.code || got.Stdout != tc.stdout || strings.ContainsRune(got.Stderr, '\x1b') {
				t.Errorf("exit %d, stdout %q, stderr %q", got.Code, got.Stdout, got.Stderr)
			}
			for _, want := range tc.stderr {
				if !strings.Contains(got.Stderr, want) {
					t.Errorf("%q is missing in %q", want, got.Stderr)
				}
			}
			if left := f.Left(); left != "" {
				t.Error(left)
			}
			if records, err := filepath.Glob("output/*/trajectory.json"); err != nil || len(records) != 1 {
				t.Errorf("trajectories %v, %v", records, err)
			}
		})
	}
}

func TestAgentRunJSON(t *testing.T) {
	f := agentFake("42\n")
	srv := llmtest.Start(t, llmtest.Turn{Calls: []llmtest.Call{llmtest.Submit()}})
	got := inline(t, f.Start(t), "agent", "run", "--query", "q", "--llm_name", "m", "--llm_base_url", srv.URL, "--json")
	var res agent.Result
	if err := json.Unmarshal([]byte(got.Stdout), &res); err != nil || res.ExitReason != agent.ExitSubmitted || res.Answer != "42\n" || res.Steps != 1 {
		t.Errorf("%v: %s", err, got.Stdout)
	}
}

func TestAgentRunFailures(t *testing.T) {
	for _, tc := range []struct {
		name, want string
		args       []string
		code       int
	}{
		{"no query", "--query is required", nil, 2},
		{"no model", "--llm_name is required", []string{"--query", "q"}, 2},
		{"unknown flag", "unknown flag", []string{"--nope"}, 2},
		{"no input", "input directory", []string{"--query", "q", "--llm_name", "m", "--input_dir", "missing"}, 125},
		{"no key", "set LLM_API_KEY or OPENAI_API_KEY", []string{"--query", "q", "--llm_name", "m", "--llm_base_url", "https://api.openai.com/v1"}, 2},
		{"no image", "pull missing", []string{"--query", "q", "--llm_name", "m", "--image", "missing"}, 125},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := agentFake("")
			got := inline(t, f.Start(t), append([]string{"agent", "run"}, tc.args...)...)
			if got.Code != tc.code || !strings.Contains(got.Stderr, tc.want) || got.Stdout != "" {
				t.Errorf("exit %d, stdout %q, stderr %q; want %d, %q", got.Code, got.Stdout, got.Stderr, tc.code, tc.want)
			}
			if left := f.Left(); left != "" {
				t.Error(left)
			}
			if left, err := filepath.Glob("output/*"); err != nil || len(left) != 0 {
				t.Errorf("left behind: %v, %v", left, err)
			}
		})
	}
}

// An interrupt ends the model call, collects the output, stops or deletes the sandbox as asked and
// exits 1.
func TestAgentRunInterrupted(t *testing.T) {
	for name, tc := range map[string]struct{ flag, request, said string }{
		"kept":    {"--keep_interrupted=true", "POST /v1/sandboxes/sb1/stop", "kept: sandbox sb1"},
		"deleted": {"--keep_interrupted=false", "DELETE /v1/sandboxes/sb1", "ended: interrupted"},
	} {
		t.Run(name, func(t *testing.T) { testAgentInterrupted(t, tc.flag, tc.request, tc.said) })
	}
}

func testAgentInterrupted(t *testing.T, flag, request, said string) {
	t.Helper()
	f := agentFake("so far\n")
	asked := make(chan struct{})
	srv := llmtest.Start(t, llmtest.Turn{Hang: true, Check: func(llmtest.Request) error { close(asked); return nil }})
	cmd := cmdtest.Command(t, f.Start(t), "agent", "run", "--query", "q", "--llm_name", "m", "--llm_base_url", srv.URL, flag)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	<-asked // or the test's deadline
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	var exit *exec.ExitError
	if err := cmd.Wait(); !errors.As(err, &exit) || exit.ExitCode() != 1 || stdout.String() != "so far\n" || !strings.Contains(stderr.String(), "ended: interrupted") || !strings.Contains(stderr.String(), said) {
		t.Errorf("%v, stdout %q, stderr %q", err, stdout.String(), stderr.String())
	}
	if left := f.Left(); left != "" && flag != "--keep_interrupted=true" {
		t.Error(left)
	}
	kept := slices.Contains(f.Log, "POST /v1/sandboxes/sb1/stop")
	if !slices.Contains(f.Log, request) || kept == slices.Contains(f.Log, "DELETE /v1/sandboxes/sb1") {
		t.Errorf("requests %v", f.Log)
	}
}
