package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
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
}

// By names the person at the terminal as the source of a decision.
func (*terminalAsker) By() string { return "the person at the terminal" }

// Ask shows a call, with control characters made visible, and waits for yes or no.
func (a *terminalAsker) Ask(ctx context.Context, q policy.Question) (policy.Answer, error) {
	text, err := question(q)
	if err != nil {
		return policy.Answer{}, err
	}
	if a.view != nil {
		a.view.pause()
		defer a.view.goOn()
	}
	// Input typed before the question is no answer to it. A terminal that cannot flush its input is
	// asked all the same.
	_ = unix.IoctlSetInt(int(a.in.Fd()), unix.TCFLSH, unix.TCIFLUSH)
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
		}
		text = "y or n, and a reason behind it if you like: "
	}
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
	b.WriteString("allow it? y or n, and a reason behind it if you like: ")
	return b.String(), nil
}

// quoted returns a model's text with a mark before each line, so that no line can pass for a
// question of ours.
func quoted(text string) string {
	return "  | " + strings.ReplaceAll(agent.Printable(text), "\n", "\n  | ") + "\n"
}

// line reads a line from the terminal, or returns when the run ends. A terminal delivers a line in
// one read.
func (a *terminalAsker) line(ctx context.Context) (string, error) {
	for {
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
		return string(buf[:n]), nil
	}
}
