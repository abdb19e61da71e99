package agent

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/agent/policy"
)

// Bounds on the printed part of a turn; the trajectory has all of it.
const (
	printLines = 12
	printWidth = 400
)

// PrintStep writes a turn as short plain lines that are safe for a terminal.
func PrintStep(w io.Writer, s Step) error {
	var b strings.Builder
	fmt.Fprintf(&b, "\n--- turn %d · model %.1f s · tools %.2f s\n", s.Metadata.Step, s.Metadata.ExecTime, s.Metadata.ToolTime)
	if t := strings.TrimSpace(s.Thought); t != "" {
		b.WriteString(indent(t, "  "))
	}
	for _, c := range s.ToolCalls {
		b.WriteString(indent(CallText(c.Function, c.Arguments), "> "))
		if v := c.Verdict; v != nil && (v.Action != policy.Allow || v.Asked) {
			b.WriteString(indent(fmt.Sprintf("%s by %s: %s %s", v.Action, v.By, v.Rule, v.Reason), "  ! "))
		}
		b.WriteString(indent(strings.TrimSuffix(c.Observation, "\n"), "    "))
	}
	if len(s.ToolCalls) == 0 {
		b.WriteString("  (no tool call)\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// CallText returns a call in a line or a few. The text is not [Printable] yet.
func CallText(function, arguments string) string {
	var args struct {
		Command string `json:"command"`
		Path    string `json:"path"`
	}
	if json.Unmarshal([]byte(arguments), &args) != nil {
		return clipMiddle(function, printWidth) + " " + clipMiddle(arguments, printWidth)
	}
	return strings.TrimRight(clipMiddle(function, printWidth)+" "+args.Command+" "+args.Path, " ")
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

// PrintRun writes a whole run: its task, its turns and its end.
func PrintRun(w io.Writer, s *Summary, t *Trajectory) error {
	var b strings.Builder
	fmt.Fprintf(&b, "run: %s (%s)\nmodel: %s, %s\nimage: %s\ntask:\n%s", OneLine(s.ID, 100), s.State, Printable(s.Model), Printable(t.Metadata.ModelSource), Printable(t.Metadata.Image), indent(s.Query, "  "))
	if f := t.Metadata.Fork; f != nil {
		fmt.Fprintf(&b, "branched from turn %d of %s\n", f.Turn, Printable(f.Dir))
	}
	if _, err := io.WriteString(w, b.String()); err != nil {
		return err
	}
	for _, step := range t.Steps {
		if err := PrintStep(w, step); err != nil {
			return err
		}
	}
	if o := t.Metadata.Outputs; o != nil {
		if err := PrintOutputs(w, *o); err != nil {
			return err
		}
	}
	spent := t.Metadata.Spent
	if _, err := fmt.Fprintf(w, "\nspent: %d turns, %d tokens, $%.4f, %v, %v processor time; %d calls, %d denied\n",
		spent.Turns, spent.Tokens, spent.Cost, spent.Time.Round(time.Millisecond), spent.CPU.Round(time.Millisecond), s.Calls, s.Denied); err != nil {
		return err
	}
	if s.State != RunEnded {
		return nil
	}
	detail := ""
	if t.Metadata.ExitDetail != "" {
		detail = indent(t.Metadata.ExitDetail, "       ")
	}
	_, err := fmt.Fprintf(w, "ended: %s\n%s", s.ExitReason, detail)
	return err
}

// printedOutputs is the maximum number of output entries that are printed.
const printedOutputs = 20

// PrintOutputs writes the list of the output directory before its collection.
func PrintOutputs(w io.Writer, o Outputs) error {
	var b strings.Builder
	fmt.Fprintf(&b, "\noutput: %d entries, %d bytes\n", o.Entries, o.Bytes)
	for i, f := range o.Files {
		if i == printedOutputs {
			fmt.Fprintf(&b, "  ... %d more\n", o.Entries-i)
			break
		}
		fmt.Fprintf(&b, "  %-9s %10d  %s", OneLine(string(f.Type), 9), f.Size, OneLine(f.Path, printWidth))
		if f.Stays != "" {
			fmt.Fprintf(&b, "  (stays: %s)", f.Stays)
		}
		b.WriteByte('\n')
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// PrintDifference writes the two observations of a call.
func PrintDifference(w io.Writer, d Difference) error {
	_, err := fmt.Fprintf(w, "turn %d, call %d, %s:\n%s%s", d.Turn, d.Call, OneLine(d.Function, 100), indent(d.Recorded, "  - "), indent(d.Observed, "  + "))
	return err
}

// OneLine shortens text of a model or a sandbox to one line that is safe for a terminal.
func OneLine(text string, limit int) string {
	return clipMiddle(Printable(strings.Join(strings.Fields(text), " ")), limit)
}
