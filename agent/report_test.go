package agent

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/agent/llm/llmtest"
)

// The cost of a model without a price is unknown, and not nothing: where a run is shown, listed and
// reported.
func TestCostOfAModelWithoutAPrice(t *testing.T) {
	opts, sandbox, _ := newRun(t, turn(llmtest.Submit()))
	res, _ := mustRun(t, t.Context(), opts, sandbox, ExitSubmitted)
	s, tr, err := LoadRun(res.Dir)
	if err != nil {
		t.Fatal(err)
	}
	var shown, report bytes.Buffer
	if err := errors.Join(PrintRun(&shown, s, tr), WriteReport(&report, s, tr)); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(shown.String(), ", cost unknown, ") || !strings.Contains(report.String(), "<th>cost</th><td>unknown</td>") || s.Unpriced != 1 {
		t.Errorf("shown:\n%s\nin the list: %d", shown.String(), s.Unpriced)
	}
	for want, got := range map[string]string{
		"-": CostText(0, 0), "unknown": CostText(0, 2), "$0.5000": CostText(0.5, 0), "at least $0.5000": CostText(0.5, 1),
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// A report of a real run, from its record.
func TestReportOfRun(t *testing.T) {
	opts, sandbox, _ := newRun(t,
		llmtest.Turn{Content: "Look & see", Calls: []llmtest.Call{llmtest.Bash("echo '<b>'; echo yes > out/answer.txt")}},
		turn(llmtest.Submit()),
	)
	res, _ := mustRun(t, t.Context(), opts, sandbox, ExitSubmitted)
	path := filepath.Join(t.TempDir(), "report.html")
	if err := SaveReport(res.Dir, path); err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"Look &amp; see", "&lt;b&gt;", `<p class="end good">submitted</p>`, "answer.txt", "2 of 100", "Content-Security-Policy", `<span class="allow">allow</span>`} {
		if !bytes.Contains(page, []byte(want)) {
			t.Errorf("%q is missing in the report", want)
		}
	}
}
