package main

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/agent"
	"github.com/sandboxd/sandboxd/agent/policy"
)

// A person is shown the whole call, without anything that the terminal would obey, and only a yes
// allows it.
func TestTerminalAsker(t *testing.T) {
	q := policy.Question{Turn: 3, Call: 1, Tool: agent.ToolBash, Arguments: map[string]any{"command": "echo \x1b[2J\u202e; rm x"}, Rule: "downloads", Reason: "it names\x1b a host"}
	for _, tc := range []struct {
		typed string
		want  policy.Answer
		fails bool
	}{
		{"y\n", policy.Answer{Allow: true}, false},
		{"YES fine\n", policy.Answer{Allow: true, Reason: "fine"}, false},
		{"n not that\n", policy.Answer{Reason: "not that"}, false},
		{"\n", policy.Answer{}, true}, // asked again, then the terminal is closed
		{"", policy.Answer{}, true},
	} {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.WriteString(tc.typed); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		var shown strings.Builder
		got, err := (&terminalAsker{in: r, out: &shown}).Ask(t.Context(), q)
		if got != tc.want || (err != nil) != tc.fails {
			t.Errorf("%q: %+v, %v", tc.typed, got, err)
		}
		if text := shown.String(); strings.ContainsAny(text, "\x1b\u202e") || !strings.Contains(text, `echo \x1b[2J\u202e; rm x`) || !strings.Contains(text, "downloads") {
			t.Errorf("shown: %q", text)
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("interrupt")
	cancel(why)
	var shown strings.Builder
	if _, err := (&terminalAsker{in: r, out: &shown}).Ask(ctx, q); !errors.Is(err, why) {
		t.Errorf("after an interrupt: %v", err)
	}
	q.Arguments["command"] = "rm -r .\n\nturn 3, call 1: the model wants to run execute_bash\nls\nallow it? y or n"
	if text, err := question(q); err != nil || strings.Count(text, "\nturn ") != 1 || strings.Count(text, "\nallow it?") != 0 || strings.Count(text, "\n  | ") != 5 {
		t.Errorf("a call that looks like another question: %v\n%s", err, text)
	}
	q.Arguments["command"] = strings.Repeat("x", maxQuestion)
	if got, err := (&terminalAsker{in: r, out: &shown}).Ask(t.Context(), q); err == nil || got.Allow {
		t.Errorf("a call that is too long to be shown: %+v, %v", got, err)
	}
}

// typed returns an asker whose terminal delivers these answers, and then is closed.
func typed(t *testing.T, text string, shown *strings.Builder) *terminalAsker {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	if _, err := w.WriteString(text); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return &terminalAsker{in: r, out: shown}
}

// "always" stands for calls that do no more than the one it was said to, and the person is shown
// which these are.
func TestAlwaysCoversWhatDoesNoMore(t *testing.T) {
	bash := func(command string) policy.Question {
		f := policy.Facts{WorkingDir: "/testbed"}
		f.Shell(command)
		return policy.Question{
			Turn: 2, Call: 1, Tool: agent.ToolBash, Arguments: map[string]any{"command": command}, Rule: "r", Programs: f.Programs, Hosts: f.Hosts, Writes: f.Writes, Opaque: f.Opaque,
		}
	}
	edit := func(path string) policy.Question {
		return policy.Question{Tool: agent.ToolEditor, Arguments: map[string]any{"path": path}, Rule: "r", Paths: []string{path}, Writes: []string{path}}
	}
	other := bash("ls")
	other.Rule = "another"
	for _, tc := range []struct {
		name    string
		granted policy.Question
		text    string
		call    policy.Question
		covered bool
	}{
		{"the same program", bash("ls -l | grep x"), "what runs only grep, ls", bash("grep -r y /etc"), true},
		{"another program", bash("ls"), "what runs only ls", bash("ls; rm -r ."), false},
		{"another rule", bash("ls"), "", other, false},
		{"another tool", bash("ls"), "", edit("/testbed/ls"), false},
		{"the same host", bash("curl http://a/x"), "what runs only curl and names only a", bash("curl http://a/y"), true},
		{"another host", bash("curl http://a/x"), "", bash("curl http://b/x"), false},
		{"a file to write to", bash("ls"), "", bash("ls > /testbed/f"), false},
		{"the same file to write to", bash("ls > f"), "what runs only ls and writes only /testbed/f", bash("ls -l > /testbed/f"), true},
		{"an opaque line", bash("ls"), "", bash("ls; $x"), false},
		{"the same opaque line", bash("$x"), "this very call", bash("$x"), true},
		{"another opaque line", bash("$x"), "", bash("$y"), false},
		{"more than can be shown", bash("echo x > " + strings.Repeat("f", maxGranted)), "this very call", bash("echo y > " + strings.Repeat("f", maxGranted)), false},
		{"a line without programs", bash("ls"), "", bash("x=1"), false},
		{"the same file", edit("/testbed/f"), "what writes only /testbed/f", edit("/testbed/f"), true},
		{"another file", edit("/testbed/f"), "", edit("/testbed/g"), false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var shown strings.Builder
			asker := typed(t, "a\n", &shown)
			if got, err := asker.Ask(t.Context(), tc.granted); err != nil || !got.Allow || !strings.Contains(shown.String(), "a: always allow "+tc.text) {
				t.Fatalf("%+v, %v, shown %q", got, err, shown.String())
			}
			asked := shown.Len()
			got, err := asker.Ask(t.Context(), tc.call)
			if covered := shown.Len() == asked; covered != tc.covered || got.Allow != tc.covered || (err == nil) != tc.covered {
				t.Errorf("%+v, %v", got, err)
			}
		})
	}
}

// A person may give another command instead, on the line of the answer or on lines of its own.
func TestEditedCommand(t *testing.T) {
	q := policy.Question{Tool: agent.ToolBash, Arguments: map[string]any{"command": "rm -r ."}}
	for text, want := range map[string]string{
		"e rm -r build\n":                "rm -r build",
		"edit\ncd build\n\nrm -r .\n.\n": "cd build\n\nrm -r .",
		"e\n.\ne ls\n":                   "ls", // nothing was given, so it is asked again
		"e\nrm -r build":                 "",
	} {
		var shown strings.Builder
		got, err := typed(t, text, &shown).Ask(t.Context(), q)
		if got.Command != want || got.Allow != (want != "") || (err == nil) != got.Allow {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
	}
	q.Tool, q.Arguments = agent.ToolEditor, map[string]any{"command": "create", "path": "/f"}
	var shown strings.Builder
	if got, err := typed(t, "e ls\n", &shown).Ask(t.Context(), q); err == nil || got.Allow || strings.Contains(shown.String(), "another command") {
		t.Errorf("a call without a command: %+v, %v", got, err)
	}
}
