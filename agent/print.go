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
			if v.Command != "" {
				b.WriteString(indent("changed to: "+v.Command, "  ! "))
			}
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
	return PrintEnd(w, s, t)
}

// PrintEnd writes what follows the turns of a run: its output, what it has spent, and how it ended.
func PrintEnd(w io.Writer, s *Summary, t *Trajectory) error {
	if o := t.Metadata.Outputs; o != nil {
		if err := PrintOutputs(w, *o); err != nil {
			return err
		}
	}
	spent := t.Metadata.Spent
	if _, err := fmt.Fprintf(w, "\nspent: %d turns, %d tokens, cost %s, %v, %v processor time; %d calls, %d denied\n",
		spent.Turns, spent.Tokens, CostText(spent.Cost, s.Unpriced), spent.Time.Round(time.Millisecond), spent.CPU.Round(time.Millisecond), s.Calls, s.Denied); err != nil {
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

// CostText describes the cost of model calls, of which unpriced have no known price: they are not
// free. It returns "-" for no cost.
func CostText(cost float64, unpriced int) string {
	switch {
	case unpriced > 0 && cost > 0:
		return fmt.Sprintf("at least $%.4f", cost)
	case unpriced > 0:
		return "unknown"
	case cost > 0:
		return fmt.Sprintf("$%.4f", cost)
	}
	return "-"
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
	printElsewhere(&b, o)
	_, err := io.WriteString(w, b.String())
	return err
}

// printElsewhere writes the list of the files that the run has changed outside of the output
// directory.
func printElsewhere(b *strings.Builder, o Outputs) {
	if o.ElsewhereEntries == 0 {
		return
	}
	fmt.Fprintf(b, "changed elsewhere: %d files\n", o.ElsewhereEntries)
	stay := false
	for i, f := range o.Elsewhere {
		stay = stay || f.Stays == outsideOutput
		if i == printedOutputs {
			fmt.Fprintf(b, "  ... %d more\n", o.ElsewhereEntries-i)
			break
		}
		fmt.Fprintf(b, "  %-9s %10d  %s", OneLine(string(f.Type), 9), f.Size, OneLine(f.Path, printWidth))
		switch f.Stays {
		case "":
			b.WriteString("  (collected)")
		case outsideOutput:
		default:
			fmt.Fprintf(b, "  (stays: %s)", f.Stays)
		}
		b.WriteByte('\n')
	}
	if stay {
		b.WriteString("  these are lost with the sandbox; --collect PATH brings such files back, too\n")
	}
}

// PrintDifference writes the lines by which the observations of a call differ.
func PrintDifference(w io.Writer, d Difference) error {
	var b strings.Builder
	fmt.Fprintf(&b, "turn %d, call %d, %s:\n", d.Turn, d.Call, OneLine(d.Function, 100))
	for i, line := range d.Lines {
		if i == printLines {
			fmt.Fprintf(&b, "  ... %d more lines\n", len(d.Lines)-i)
			break
		}
		sign := '-'
		if line.Observed {
			sign = '+'
		}
		fmt.Fprintf(&b, "  %c %d: %s\n", sign, line.Line, clipMiddle(Printable(line.Text), printWidth))
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// OneLine shortens text of a model or a sandbox to one line that is safe for a terminal.
func OneLine(text string, limit int) string {
	return clipMiddle(Printable(strings.Join(strings.Fields(text), " ")), limit)
}
