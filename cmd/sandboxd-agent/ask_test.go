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
	if text, err := question(q); err != nil || strings.Count(text, "\nturn ") != 1 || strings.Count(text, "\nallow it?") != 1 || strings.Count(text, "\n  | ") != 5 {
		t.Errorf("a call that looks like another question: %v\n%s", err, text)
	}
	q.Arguments["command"] = strings.Repeat("x", maxQuestion)
	if got, err := (&terminalAsker{in: r, out: &shown}).Ask(t.Context(), q); err == nil || got.Allow {
		t.Errorf("a call that is too long to be shown: %+v, %v", got, err)
	}
}
