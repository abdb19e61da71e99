package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/agent/llm/llmtest"
	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline/cmdtest"
)

// hostedRecord returns the record of a run of two turns.
func hostedRecord(t *testing.T) []json.RawMessage {
	t.Helper()
	srv := llmtest.Start(t, llmtest.Turn{Content: "look", Calls: []llmtest.Call{llmtest.Bash("true")}}, llmtest.Turn{Calls: []llmtest.Call{llmtest.Submit()}})
	cmd := cmdtest.Command(t, agentFake("42\n").Start(t), "agent", "run", "--query", "count", "--llm_name", "m", "--llm_base_url", srv.URL)
	if got := cmdtest.Finish(t, cmd); got.Code != 0 {
		t.Fatalf("%+v", got)
	}
	found, err := filepath.Glob(filepath.Join(cmd.Dir, "output", "*", "record.jsonl"))
	if err != nil || len(found) != 1 {
		t.Fatalf("%v, %v", found, err)
	}
	text, err := os.ReadFile(found[0])
	if err != nil {
		t.Fatal(err)
	}
	var lines []json.RawMessage
	for line := range bytes.Lines(text) {
		lines = append(lines, json.RawMessage(line))
	}
	return lines
}

// Runs that the daemon hosts are listed, shown, followed, cancelled and removed like those of
// directories.
func TestHostedRuns(t *testing.T) {
	record := hostedRecord(t)
	turn := 1 + slices.IndexFunc(record, func(line json.RawMessage) bool { return bytes.Contains(line, []byte(`"turn_end":`)) })
	if turn < 1 {
		t.Fatalf("no turn in %s", record)
	}
	const ended, going, followed = "20260116_143000", "20260116_150000", "20260116_160000"
	daemon := func() *cmdtest.Daemon {
		f := cmdtest.New()
		f.Runs = []*cmdtest.HostedRun{
			{AgentRun: api.AgentRun{ID: ended, Dir: "/none", State: api.AgentEnded, ExitReason: "submitted", Turns: 2, UnpricedCalls: 2, Model: "m", Query: "count"}, Record: record},
			{AgentRun: api.AgentRun{ID: going, Dir: "/none", State: api.AgentRunning, Turns: 1, Cost: 0.5}, Record: record[:turn]},
			{AgentRun: api.AgentRun{ID: followed, Dir: "/none", State: api.AgentRunning, Turns: 1}, Record: record[:turn], Follow: func() []json.RawMessage { return record[turn:] }},
			{AgentRun: api.AgentRun{ID: "20260116_170000", State: api.AgentStopped, Error: "\x1bunreadable"}},
		}
		return f
	}
	for _, tc := range []struct {
		args   string
		code   int
		want   []string
		absent string
		asked  string
	}{
		{"list", 0, []string{ended + "   daemon   submitted", "unknown", going + "   daemon   running", "$0.5000", `\x1bunreadable`}, "", "GET /v1/agent/runs"},
		{"list --json", 0, []string{`"runs": []`, `"hosted": [`, going}, "", ""},
		{"show " + ended, 0, []string{"task:\n  count", "--- turn 1", "--- turn 2", "cost unknown", "ended: submitted"}, "", ""},
		{"show --json " + ended, 0, []string{`"problem_statement": "count"`}, "", ""},
		{"show " + going, 0, []string{"(running)", "--- turn 1"}, "turn 2", ""},
		{"logs " + ended, 0, []string{"--- turn 1", "--- turn 2", "ended: submitted"}, "task:", ""},
		{"logs " + going, 0, []string{"--- turn 1"}, "turn 2", ""},
		{"logs -f " + followed, 0, []string{"--- turn 1", "--- turn 2", "ended: submitted"}, "", ""},
		{"cancel --keep " + going + " " + ended, 0, []string{going + ": is asked to end", ended + ": has ended before"}, "", "POST /v1/agent/runs/" + going + "/cancel"},
		{"cancel 20260101_000000", 1, []string{"no such agent run"}, "", ""},
		{"cancel ./output/x", 1, []string{"only runs that the daemon hosts"}, "", ""},
		{"rm " + ended, 0, []string{ended + ": removed"}, "", "DELETE /v1/agent/runs/" + ended},
		{"rm --snapshots " + ended, 1, []string{"leave out --snapshots"}, "", ""},
		{"show 20260101_000000", 1, []string{"there is no run"}, "", ""},
		{"show nothing", 1, []string{"there is no run"}, "", ""},
		{"logs nothing", 1, []string{"there is no run"}, "", ""},
		{"rm nothing", 1, []string{"there is no run"}, "", ""},
		{"show", 2, []string{"arg"}, "", ""},
	} {
		t.Run(tc.args, func(t *testing.T) {
			f := daemon()
			got := inline(t, f.Start(t), append([]string{"agent"}, strings.Fields(tc.args)...)...)
			said := got.Stdout + got.Stderr
			if got.Code != tc.code || tc.absent != "" && strings.Contains(said, tc.absent) || tc.asked != "" && !slices.Contains(f.Log, tc.asked) {
				t.Errorf("%+v, requests %v", got, f.Log)
			}
			for _, want := range tc.want {
				if !strings.Contains(said, want) {
					t.Errorf("%q is missing in\n%s", want, said)
				}
			}
		})
	}
}

// Without a daemon the runs of directories are listed and shown, and none is started for it.
func TestRunsWithoutADaemon(t *testing.T) {
	for args, code := range map[string]int{"list": 0, "show 20260116_143000": 1, "logs 20260116_143000": 1, "cancel 20260116_143000": 1} {
		got := inline(t, filepath.Join(t.TempDir(), "none"), append([]string{"agent"}, strings.Fields(args)...)...)
		if got.Code != code || strings.Contains(got.Stderr, "started one") {
			t.Errorf("%s: %+v", args, got)
		}
	}
}
