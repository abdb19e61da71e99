package llm

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const recording = `{"problem_statement": "p", "extra": 1, "steps": [
 {"thought": "t1", "reasoning_content": null, "action": {"function": "execute_bash", "parameters": {"command": "ls <x>"}}, "observation": "o", "metadata": {"step": 1, "exec_time": 0.1}},
 {"thought": "t2", "reasoning_content": "r2", "action": {"function": "execute_bash", "parameters": {}},
  "tool_calls": [{"id": "a", "function": "execute_bash", "arguments": "{\"command\":"}, {"id": "a", "function": "submit", "arguments": ""}]},
 {"thought": "t3", "action": {"function": "", "parameters": {}}}
]}`

// Recordings of LLM-in-Sandbox hold one action a step. Ours hold all tool calls, which are
// replayed.
func TestReplay(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trajectory.json")
	if err := os.WriteFile(path, []byte(recording), 0o600); err != nil {
		t.Fatal(err)
	}
	m, err := OpenReplay(path)
	if err != nil {
		t.Fatal(err)
	}
	if d := m.Describe(); !strings.Contains(d, "REPLAY") || !strings.Contains(d, path) || !strings.Contains(d, "really executed") {
		t.Errorf("Describe() = %q", d)
	}
	var got [][]ToolCall
	var thoughts []string
	for {
		resp, err := m.Complete(t.Context(), Request{})
		var e *Error
		if errors.As(err, &e) && e.Kind == KindReplayEnd {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		got, thoughts = append(got, resp.ToolCalls), append(thoughts, resp.Content+"/"+resp.Reasoning)
	}
	want := [][]ToolCall{
		{{ID: "call_1", Name: "execute_bash", Arguments: `{"command": "ls <x>"}`}},
		{{ID: "a", Name: "execute_bash", Arguments: `{"command":`}, {ID: "call_1", Name: "submit"}},
		nil,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("tool calls (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"t1/", "t2/r2", "t3/"}, thoughts); diff != "" {
		t.Errorf("texts (-want +got):\n%s", diff)
	}
}

func TestBadRecordings(t *testing.T) {
	dir := t.TempDir()
	for name, tc := range map[string]struct{ content, want string }{
		"not JSON":  {"hello", "parse recording"},
		"no steps":  {`{"a":1}`, `no "steps"`},
		"empty":     {`{"steps":[]}`, "holds no turn"},
		"wrong":     {`{"steps":[{"thought":7}]}`, "parse recording"},
		"an array":  {`[]`, "parse recording"},
		"cut short": {recording[:100], "parse recording"},
	} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(tc.content), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := OpenReplay(path); err == nil || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: got %v, want ...%s", name, err, tc.want)
		}
	}
	if _, err := OpenReplay(filepath.Join(dir, "missing")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing file: %v", err)
	}
}

func FuzzReadRecording(f *testing.F) {
	f.Add(recording)
	f.Add(`{"steps":[{}]}`)
	f.Add(`{"steps":[{"tool_calls":[{}, {}]}]}`)
	f.Fuzz(func(t *testing.T, text string) {
		rec, err := ReadRecording(strings.NewReader(text))
		if err != nil {
			return
		}
		for _, turn := range rec.Turns {
			if _, err := turn.Message.MarshalJSON(); err != nil {
				t.Errorf("a turn cannot be sent: %v", err)
			}
		}
	})
}
