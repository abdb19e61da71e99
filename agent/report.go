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
	// maxReportText bounds one text of a report in bytes; its middle is cut out. The trajectory has
	// all of it.
	maxReportText = 64 << 10
	maxReportLine = 1000
)

// budgetLine is one part of a budget in a report.
type budgetLine struct {
	Name, Spent, Ceiling string // Ceiling is "" if there is none
	Part                 float64
}

// WriteReport writes a run as a self-contained HTML page, without scripts, images or external
// addresses. The texts of models and sandboxes appear as text, with all invisible and reordering
// characters made visible. Should a defect let markup through, the page's own policy still forbids
// it to run or to load anything.
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
	// Render to memory first: a partial page would look complete.
	var b bytes.Buffer
	err = page.Execute(&b, map[string]any{
		"Summary": s, "Meta": t.Metadata, "Steps": t.Steps, "Ended": ended, "Budget": budgetLines(t.Metadata.Budget, t.Metadata.Spent, t.Metadata.Usage.UnpricedCalls),
		"Style":     template.CSS(reportStyle), //nolint:gosec // embedded file
		"StyleHash": "sha256-" + base64.StdEncoding.EncodeToString(sum[:]),
	})
	if err != nil {
		return fmt.Errorf("report: %w", err)
	}
	_, err = w.Write(b.Bytes())
	return err
}

// SaveReport writes the report of the run in dir to a file, as a whole or not at all.
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

// budgetLines compares the spending with the ceilings.
func budgetLines(b Budget, s Spent, unpriced int) []budgetLine {
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
	cost := line("cost", s.Cost, b.Cost, money)
	cost.Spent = CostText(s.Cost, unpriced)
	return []budgetLine{
		line("turns", float64(s.Turns), float64(b.Turns), count),
		line("tokens", float64(s.Tokens), float64(b.Tokens), count),
		cost,
		line("time", float64(s.Time), float64(b.Time), took),
		line("processor", float64(s.CPU), float64(b.CPU), took),
	}
}

// reportUsage describes the usage of model calls.
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

// reportCall formats a call's arguments: a command as lines, other arguments one by one, and
// invalid JSON unchanged.
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
