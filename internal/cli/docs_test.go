package cli

import (
	"bytes"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/internal/cmdline"
	"github.com/sandboxd/sandboxd/internal/cmdline/cmdtest"
)

func TestDocs(t *testing.T) {
	for _, tc := range []struct {
		topic, want, err string
	}{
		{"", "guides/files", ""},
		{"quickstart", "# Quickstart\n", ""},
		{"guides/files", "# Files\n", ""},
		{"files", "# Files\n", ""},
		{"nothing", "", `no topic "nothing"`},
		{"agent", "", "guides/agent, reference/agent"},
		{"../README", "", "no topic"},
	} {
		var out bytes.Buffer
		err := runDocs(&out, strings.Fields(tc.topic))
		if !strings.Contains(out.String(), tc.want) || (err == nil) != (tc.err == "") || err != nil && !strings.Contains(err.Error(), tc.err) {
			t.Errorf("docs %s: %v, %.200q", tc.topic, err, &out)
		}
	}
}

// commandReference returns the reference of the command line, as Markdown, from the golden help
// texts of both programs.
func commandReference(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	b.WriteString("# Command line\n\n<!-- Generated from the commands by `go test ./internal/cli -run CommandLineReference -update`. -->\n\n" +
		"Every command takes `--socket SOCKET`, the daemon's Unix socket. `sandboxd COMMAND --help` prints the same.\n")
	texts := map[string]string{}
	for _, dir := range []string{"../../cmd/sandboxd-agent/testdata/help", "testdata/help"} {
		files, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			text, err := os.ReadFile(filepath.Join(dir, f.Name()))
			if err != nil {
				t.Fatal(err)
			}
			name, _ := strings.CutSuffix(f.Name(), ".txt")
			texts[strings.ReplaceAll(name, "-", " ")] = string(text)
		}
	}
	delete(texts, "sandboxd agent worker") // hidden: only the broker starts it
	for _, command := range slices.Sorted(maps.Keys(texts)) {
		text := texts[command]
		if before, after, ok := strings.Cut(text, "\nGlobal Flags:\n"); ok {
			_, after, _ = strings.Cut(after, "\n\n")
			text = before + "\n" + after
		}
		b.WriteString("\n## " + command + "\n\n```text\n" + text + "```\n")
	}
	return b.String()
}

func TestCommandLineReferenceIsCurrent(t *testing.T) {
	const path = "../../docs/reference/cli.md"
	want := commandReference(t)
	if *cmdtest.Update {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("%s is not current (run this test with -update):\n%s", path, diff)
	}
}

// The configuration reference has every flag of the daemon.
func TestConfigurationHasEveryFlag(t *testing.T) {
	text, err := os.ReadFile("../../docs/reference/configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	newServe(deps{Deps: cmdline.Deps{}.WithSocket("")}).Flags().VisitAll(func(f *pflag.Flag) {
		if !strings.Contains(string(text), "`--"+f.Name+"`") {
			t.Errorf("docs/reference/configuration.md does not have --%s", f.Name)
		}
	})
}
