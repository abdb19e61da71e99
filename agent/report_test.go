package agent

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/sandboxd/sandboxd/agent/llm/llmtest"
)

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
