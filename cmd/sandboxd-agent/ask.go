package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/agent"
	"github.com/sandboxd/sandboxd/agent/policy"
)

// maxQuestion limits a question's length, in bytes. A longer call is not asked about, because a cut
// could hide the part that matters.
const maxQuestion = 16 << 10

// pollEvery is the interval of looking whether the run has ended while waiting for an answer, in
// milliseconds.
const pollEvery = 200

// terminalAsker asks the person at the terminal.
type terminalAsker struct {
	in   *os.File
	out  io.Writer
	view *view // the view to pause while asking; nil if there is none

	unread  []byte   // input behind the last line
	granted []*grant // of the answers "always", until the process ends
}

// maxGranted bounds the names that a grant covers, in bytes, since the person is shown them all. A
// call that has more is granted alone.
const maxGranted = 500

// grant is a call that was allowed always, and so stands for all calls that do no more.
type grant struct {
	turn, call int
	question   policy.Question
	alone      string // arguments, if the grant is for this very call only: its effects cannot be told or shown
}

// newGrant returns the grant for a call.
func newGrant(q policy.Question) (*grant, error) {
	g := &grant{turn: q.Turn, call: q.Call, question: q}
	shown := len(strings.Join(slices.Concat(q.Programs, q.Hosts, q.Writes), ", "))
	if !q.Opaque && len(q.Programs)+len(q.Writes) > 0 && shown <= maxGranted {
		return g, nil
	}
	arguments, err := json.Marshal(q.Arguments)
	if err != nil {
		return nil, fmt.Errorf("ask: %w", err)
	}
	g.alone = string(arguments)
	return g, nil
}

// covers reports whether a call is asked about by the same rule as the granted one, and runs no
// other program, names no other host and writes to no other file.
func (g *grant) covers(q policy.Question) bool {
	was := g.question
	if q.Tool != was.Tool || q.Rule != was.Rule {
		return false
	}
	if g.alone != "" {
		arguments, err := json.Marshal(q.Arguments)
		return err == nil && string(arguments) == g.alone
	}
	return !q.Opaque && len(q.Programs)+len(q.Writes) > 0 && within(q.Programs, was.Programs) && within(q.Hosts, was.Hosts) && within(q.Writes, was.Writes)
}

// text describes the calls that a grant covers.
func (g *grant) text() string {
	if g.alone != "" {
		return "this very call"
	}
	parts := []string{}
	for _, p := range []struct {
		what  string
		names []string
	}{{"runs only", g.question.Programs}, {"names only", g.question.Hosts}, {"writes only", g.question.Writes}} {
		if len(p.names) > 0 {
			parts = append(parts, p.what+" "+strings.ReplaceAll(agent.Printable(strings.Join(p.names, ", ")), "\n", `\n`))
		}
	}
	return "what " + strings.Join(parts, " and ")
}

func within(part, whole []string) bool {
	return !slices.ContainsFunc(part, func(s string) bool { return !slices.Contains(whole, s) })
}

// By names the person at the terminal as the source of a decision.
func (*terminalAsker) By() string { return "the person at the terminal" }

// Ask shows a call, with control characters made visible, and waits for an answer: yes, no, always,
// or another command. It does not ask about calls that an earlier "always" covers.
func (a *terminalAsker) Ask(ctx context.Context, q policy.Question) (policy.Answer, error) {
	for _, g := range a.granted {
		if g.covers(q) {
			return policy.Answer{Allow: true, Reason: fmt.Sprintf("allowed always at turn %d, call %d", g.turn, g.call)}, nil
		}
	}
	always, err := newGrant(q)
	if err != nil {
		return policy.Answer{}, err
	}
	text, err := question(q)
	if err != nil {
		return policy.Answer{}, err
	}
	hint := "y or n, and a reason behind it if you like; a: always allow " + always.text()
	if q.Tool == agent.ToolBash {
		hint += "; e: another command"
	}
	hint += "\nallow it? "
	text += hint
	if a.view != nil {
		a.view.pause()
		defer a.view.goOn()
	}
	// Input typed before the question is no answer to it. A terminal that cannot flush its input is
	// asked all the same.
	_ = unix.IoctlSetInt(int(a.in.Fd()), unix.TCFLSH, unix.TCIFLUSH)
	a.unread = nil
	for {
		if _, err := io.WriteString(a.out, text); err != nil {
			return policy.Answer{}, fmt.Errorf("ask: %w", err)
		}
		line, err := a.line(ctx)
		if err != nil {
			return policy.Answer{}, err
		}
		word, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch strings.ToLower(word) {
		case "y", "yes":
			return policy.Answer{Allow: true, Reason: strings.TrimSpace(rest)}, nil
		case "n", "no":
			return policy.Answer{Reason: strings.TrimSpace(rest)}, nil
		case "a", "always":
			a.granted = append(a.granted, always)
			return policy.Answer{Allow: true, Reason: strings.TrimSpace("always " + rest)}, nil
		case "e", "edit":
			if q.Tool != agent.ToolBash {
				break
			}
			command, err := a.command(ctx, strings.TrimSpace(rest))
			if err != nil {
				return policy.Answer{}, err
			}
			if command != "" {
				return policy.Answer{Allow: true, Command: command}, nil
			}
		}
		text = hint
	}
}

// command returns the command to run instead: the rest of the answer, or else the lines up to one
// with a full stop only.
func (a *terminalAsker) command(ctx context.Context, rest string) (string, error) {
	if rest != "" {
		return rest, nil
	}
	if _, err := io.WriteString(a.out, "the command to run instead, and a line with only a full stop behind it:\n"); err != nil {
		return "", fmt.Errorf("ask: %w", err)
	}
	var lines []string
	for size := 0; size <= maxQuestion; {
		line, err := a.line(ctx)
		if err != nil {
			return "", err
		}
		if line == "." {
			return strings.TrimSpace(strings.Join(lines, "\n")), nil
		}
		lines, size = append(lines, line), size+len(line)+1
	}
	return "", fmt.Errorf("the command is longer than %d bytes", maxQuestion)
}

// question returns the text of a question.
func question(q policy.Question) (string, error) {
	var b strings.Builder
	fmt.Fprintf(&b, "\nturn %d, call %d: the model wants to run %s\n", q.Turn, q.Call, agent.Printable(q.Tool))
	if command, ok := q.Arguments["command"].(string); ok && q.Tool == agent.ToolBash {
		b.WriteString(quoted(command))
	} else {
		arguments, err := json.MarshalIndent(q.Arguments, "", "  ")
		if err != nil {
			return "", fmt.Errorf("ask: %w", err)
		}
		b.WriteString(quoted(string(arguments)))
	}
	if q.Rule != "" {
		fmt.Fprintf(&b, "asked because of: %s", agent.Printable(q.Rule))
		if q.Reason != "" {
			fmt.Fprintf(&b, " (%s)", agent.Printable(q.Reason))
		}
		b.WriteByte('\n')
	}
	if b.Len() > maxQuestion {
		return "", errors.New("the call is too long to be shown to a person")
	}
	return b.String(), nil
}

// quoted returns a model's text with a mark before each line, so that no line can pass for a
// question of ours.
func quoted(text string) string {
	return "  | " + strings.ReplaceAll(agent.Printable(text), "\n", "\n  | ") + "\n"
}

// line reads a line from the terminal, or returns when the run ends.
func (a *terminalAsker) line(ctx context.Context) (string, error) {
	for {
		if line, rest, whole := bytes.Cut(a.unread, []byte{'\n'}); whole {
			a.unread = rest
			return string(line), nil
		}
		if len(a.unread) > maxQuestion {
			return "", fmt.Errorf("the answer is longer than %d bytes", maxQuestion)
		}
		if ctx.Err() != nil {
			return "", context.Cause(ctx)
		}
		fds := []unix.PollFd{{Fd: int32(a.in.Fd()), Events: unix.POLLIN}} //nolint:gosec // a descriptor
		n, err := unix.Poll(fds, pollEvery)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return "", fmt.Errorf("wait for an answer: %w", err)
		}
		if n < 1 {
			continue
		}
		buf := make([]byte, 4096)
		n, err = a.in.Read(buf)
		if err != nil {
			return "", fmt.Errorf("read the answer: %w", err)
		}
		if n == 0 {
			return "", errors.New("the terminal was closed without an answer")
		}
		a.unread = append(a.unread, buf[:n]...)
	}
}
