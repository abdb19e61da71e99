package docs

import (
	"net/http"
	"regexp"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// Every check of doctor has its row, with a remedy, and no row is of a check that does not exist.
func TestTroubleshootingHasEveryCheck(t *testing.T) {
	testenv.RequireUserNS(t)
	rows := map[string][]string{}
	for _, row := range rowsOf(document(t, harness.Root(t), "docs/troubleshooting.md"), "check") {
		name := regexp.MustCompile("^`(.+)`").FindStringSubmatch(row[0])
		if name == nil || len(row) != 3 || row[1] == "" || row[2] == "" {
			t.Errorf("no name, meaning or remedy: %q", row)
			continue
		}
		rows[name[1]] = row
	}
	var list api.CheckList
	if err := harness.Start(t, harness.Options{}).Call(t.Context(), http.MethodGet, "/v1/system/checks", nil, &list); err != nil {
		t.Fatal(err)
	}
	for _, c := range list.Checks {
		row := rows[c.Name]
		if row == nil {
			t.Errorf("docs/troubleshooting.md does not have the check %q", c.Name)
			continue
		}
		if fatal := regexp.MustCompile(`\(fatal\)`).MatchString(row[0]); fatal != c.Fatal {
			t.Errorf("%s: fatal is %v", c.Name, c.Fatal)
		}
		delete(rows, c.Name)
	}
	for name := range rows {
		t.Errorf("docs/troubleshooting.md has %q, which doctor does not check", name)
	}
}
