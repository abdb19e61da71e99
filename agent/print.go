package agent

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
)

// How much of a turn is printed; all of it is in the trajectory.
const (
	printLines = 12
	printWidth = 400
)

// PrintStep writes one turn as plain lines, short and safe for a terminal.
func PrintStep(w io.Writer, s Step) error {
	var b strings.Builder
	fmt.Fprintf(&b, "\n--- turn %d · model %.1f s · tools %.2f s\n", s.Metadata.Step, s.Metadata.ExecTime, s.Metadata.ToolTime)
	if t := strings.TrimSpace(s.Thought); t != "" {
		b.WriteString(indent(t, "  "))
	}
	for _, c := range s.ToolCalls {
		b.WriteString(indent(summary(c), "> "))
		b.WriteString(indent(strings.TrimSuffix(c.Observation, "\n"), "    "))
	}
	if len(s.ToolCalls) == 0 {
		b.WriteString("  (no tool call)\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// summary is what a call does, in a line or a few.
func summary(c ToolRecord) string {
	var args struct {
		Command string `json:"command"`
		Path    string `json:"path"`
	}
	if json.Unmarshal([]byte(c.Arguments), &args) != nil {
		return clipMiddle(c.Function, printWidth) + " " + clipMiddle(c.Arguments, printWidth)
	}
	return strings.TrimRight(clipMiddle(c.Function, printWidth)+" "+args.Command+" "+args.Path, " ")
}

func indent(text, prefix string) string {
	l := strings.Split(Printable(text), "\n")
	left := 0
	if len(l) > printLines {
		left = len(l) - printLines + 1
		l = l[:printLines-1]
	}
	var b strings.Builder
	for i, line := range l {
		if i > 0 && prefix == "> " {
			prefix = "  "
		}
		b.WriteString(prefix + clipMiddle(line, printWidth) + "\n")
	}
	if left > 0 {
		fmt.Fprintf(&b, "%s... %d more lines\n", strings.Repeat(" ", len(prefix)), left)
	}
	return b.String()
}
