package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/cmdline/cmdtest"
)

// A wrong command line of a benchmark is refused before a daemon is asked.
func TestAgentBenchUsage(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"config.yaml": "system_prompt: s\nscoring: judge\n", "data.json": `[{"problem_statement":"q"}]`,
		"old/bench.jsonl": `{"v":1,"n":1,"at":"2026-01-01T00:00:00Z","begin":{"task_dir":"/nowhere"}}` + "\n",
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	socket := cmdtest.New().Start(t)
	for _, tc := range []struct {
		args string
		code int
		says string
	}{
		{"", 2, "--task is required"},
		{"--task DIR --mode both", 2, "--mode"},
		{"--task DIR --mode llm --max_cost 1", 2, "cannot be held with --mode llm"},
		{"--task DIR --mode llm --max_total_tokens 10", 2, "cannot be held with --mode llm"},
		{"--task DIR --num_workers 0", 2, "--num_workers"},
		{"--task DIR --start_id 3 --end_id 2", 2, "--start_id 3"},
		{"--task DIR --start_id 1 --llm_name m", 2, "the task has 1"},
		{"--task DIR", 2, "--llm_name is required"},
		{"--task DIR --llm_name m", 2, "--judge_model is required"},
		{"--task DIR --llm_name m --scoring guess", 125, "unknown method"},
		{"--task DIR --llm played:x", 2, "replay:DIRECTORY"},
		{"--task DIR/nowhere --llm_name m", 125, "nowhere"},
		{"--resume DIR/old --task DIR", 2, "--task cannot be changed"},
		{"--resume DIR/old --temperature 0.5", 2, "--temperature cannot be changed"},
		{"--resume DIR", 125, "bench.jsonl"},
		{"--resume DIR/old", 125, "/nowhere"},
	} {
		args := append([]string{"agent", "bench"}, strings.Fields(strings.ReplaceAll(tc.args, "DIR", dir))...)
		if got := inline(t, socket, args...); got.Code != tc.code || !strings.Contains(got.Stderr, tc.says) {
			t.Errorf("%s: %d, %s", tc.args, got.Code, got.Stderr)
		}
	}
}
