package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/sandboxd/sandboxd/agent"
	"github.com/sandboxd/sandboxd/agent/llm"
)

// live shows a turn on a terminal while the model writes it: thoughts and text as they come, of a tool call only its name. Calls
// and their results follow with the whole turn.
type live struct {
	w       io.Writer
	kind    llm.DeltaKind // of what was written last; "" at the start of a turn
	content bool          // the turn's text was shown
}

func (l *live) delta(d llm.Delta) {
	var b strings.Builder
	if d.Kind != l.kind && (l.kind == "" || d.Kind != llm.DeltaArguments) {
		b.WriteString("\n")
	}
	switch d.Kind {
	case llm.DeltaReasoning:
		if d.Kind != l.kind {
			b.WriteString("(thinking) ")
		}
		b.WriteString(indented(d.Text))
	case llm.DeltaContent:
		if d.Kind != l.kind {
			b.WriteString("  ")
		}
		b.WriteString(indented(d.Text))
		l.content = true
	case llm.DeltaCall:
		b.WriteString("(calling " + printable(d.Text) + ")")
	case llm.DeltaArguments:
	case llm.DeltaRestart:
		b.WriteString("(the answer broke off and is asked for again)")
		l.content = false
	}
	l.kind = d.Kind
	// Who closes our stderr still gets the record.
	_, _ = io.WriteString(l.w, b.String())
}

// indented is a piece of text whose lines cannot pass for ours.
func indented(text string) string { return strings.ReplaceAll(agent.Printable(text), "\n", "\n  ") }

// step shows the whole turn, without the text that was shown already.
func (l *live) step(s agent.Step) {
	if l.kind != "" {
		_, _ = io.WriteString(l.w, "\n")
	}
	if l.content {
		s.Thought = ""
	}
	l.kind, l.content = "", false
	_ = agent.PrintStep(l.w, s)
}

// used says what the model calls took, and what they cost as far as that is known.
func used(u llm.Usage) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d tokens in", u.PromptTokens)
	if u.CachedTokens > 0 {
		fmt.Fprintf(&b, " (%d cached)", u.CachedTokens)
	}
	fmt.Fprintf(&b, ", %d out", u.CompletionTokens)
	if u.CostUSD > 0 {
		fmt.Fprintf(&b, ", $%.4f", u.CostUSD)
	}
	if u.UnpricedCalls > 0 {
		fmt.Fprintf(&b, "; %d calls without a known price", u.UnpricedCalls)
	}
	return b.String()
}
