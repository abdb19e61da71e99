package agent

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"html/template"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/agent/llm"
)

var (
	//go:embed report.html
	reportPage string
	//go:embed report.css
	reportStyle string
)

const (
	// maxReportText is how much of one text a report shows, from both ends; all of it is in the trajectory.
	maxReportText = 64 << 10
	maxReportLine = 1000
)

// budgetLine is one part of a budget in a report.
type budgetLine struct {
	Name, Spent, Ceiling string // no ceiling: ""
	Part                 float64
}

// WriteReport writes a run as one HTML page that needs nothing else: no script, no image, no other address. What models and
// sandboxes have said is text in it, with all that could reorder or hide it made visible; and should a mistake of ours let
// markup through, the page's own policy still forbids it to run or to load anything.
func WriteReport(w io.Writer, s *Summary, t *Trajectory) error {
	page, err := template.New("report").Funcs(template.FuncMap{
		"text":      func(v string) string { return truncate(Printable(v), maxReportText, 0) },
		"line":      func(v any) string { return OneLine(fmt.Sprint(v), maxReportLine) },
		"time":      func(at time.Time) string { return at.UTC().Format("2006-01-02 15:04:05 UTC") },
		"bytes":     func(n int64) string { return strconv.FormatInt(n, 10) + " bytes" },
		"used":      reportUsage,
		"arguments": reportCall,
	}).Parse(reportPage)
	if err != nil {
		return fmt.Errorf("report: %w", err)
	}
	sum := sha256.Sum256([]byte(reportStyle))
	ended := string(s.ExitReason)
	if s.State != RunEnded {
		ended = string(s.State)
	}
	// To memory first: half a page would look like a whole one.
	var b bytes.Buffer
	err = page.Execute(&b, map[string]any{
		"Summary": s, "Meta": t.Metadata, "Steps": t.Steps, "Ended": ended, "Budget": budgetLines(t.Metadata.Budget, t.Metadata.Spent),
		"Style":     template.CSS(reportStyle), //nolint:gosec // our own file
		"StyleHash": "sha256-" + base64.StdEncoding.EncodeToString(sum[:]),
	})
	if err != nil {
		return fmt.Errorf("report: %w", err)
	}
	_, err = w.Write(b.Bytes())
	return err
}

// SaveReport writes the report of the run in dir to a file, whole or not at all.
func SaveReport(dir, path string) error {
	s, t, err := LoadRun(dir)
	if err != nil {
		return err
	}
	var b bytes.Buffer
	if err := WriteReport(&b, s, t); err != nil {
		return err
	}
	if err := writeFile(path, b.Bytes(), false); err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	return nil
}

// budgetLines compares what was spent with the ceilings.
func budgetLines(b Budget, s Spent) []budgetLine {
	line := func(name string, spent, ceiling float64, show func(float64) string) budgetLine {
		l := budgetLine{Name: name, Spent: show(spent)}
		if ceiling > 0 {
			l.Ceiling, l.Part = show(ceiling), min(spent/ceiling, 1)
		}
		return l
	}
	count := func(v float64) string { return strconv.FormatFloat(v, 'f', -1, 64) }
	money := func(v float64) string { return fmt.Sprintf("$%.4f", v) }
	took := func(v float64) string { return time.Duration(v).Round(time.Millisecond).String() }
	return []budgetLine{
		line("turns", float64(s.Turns), float64(b.Turns), count),
		line("tokens", float64(s.Tokens), float64(b.Tokens), count),
		line("cost", s.Cost, b.Cost, money),
		line("time", float64(s.Time), float64(b.Time), took),
		line("processor", float64(s.CPU), float64(b.CPU), took),
	}
}

// reportUsage says what model calls took.
func reportUsage(u llm.Usage) string {
	text := fmt.Sprintf("%d tokens in, %d out", u.PromptTokens, u.CompletionTokens)
	if u.CostUSD > 0 {
		text += fmt.Sprintf(", $%.4f", u.CostUSD)
	}
	if u.UnpricedCalls > 0 {
		text += fmt.Sprintf(", %d calls without a known price", u.UnpricedCalls)
	}
	return text
}

// reportCall is a call's arguments: a command as its lines, the others one by one, and what is not JSON as it stands.
func reportCall(c ToolRecord) string {
	var args map[string]any
	if json.Unmarshal([]byte(c.Arguments), &args) != nil || args == nil {
		return truncate(Printable(c.Arguments), maxReportText, 0)
	}
	if command, ok := args["command"].(string); ok && len(args) == 1 {
		return truncate(Printable(command), maxReportText, 0)
	}
	var b strings.Builder
	parameters := newAction("", c.Arguments).Parameters
	for _, name := range slices.Sorted(maps.Keys(parameters)) {
		raw := parameters[name]
		value := string(raw)
		var text string
		if json.Unmarshal(raw, &text) == nil {
			value = text
			if strings.Contains(text, "\n") {
				value = "\n" + text
			}
		}
		fmt.Fprintf(&b, "%s: %s\n", name, value)
	}
	return truncate(Printable(strings.TrimSuffix(b.String(), "\n")), maxReportText, 0)
}
