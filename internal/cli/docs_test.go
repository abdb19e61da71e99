package cli

import (
	"bytes"
	"iter"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
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

// testDeps are for commands that only print help.
var testDeps = deps{Deps: cmdline.Deps{Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr}}

// agentHelp yields the help texts of sandboxd-agent's commands, from the golden files that its own
// test compares with them.
func agentHelp(t *testing.T) iter.Seq2[string, string] {
	t.Helper()
	const dir = "../../cmd/sandboxd-agent/testdata/help/"
	files, err := filepath.Glob(dir + "sandboxd-agent-*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("%v: %v", files, err)
	}
	return func(yield func(path, text string) bool) {
		for _, file := range append([]string{dir + "sandboxd-agent.txt"}, files...) {
			path := strings.ReplaceAll(strings.TrimSuffix(filepath.Base(file), ".txt"), "-", " ")
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if path != "sandboxd agent worker" && !yield(path, string(text)) { // which is hidden
				return
			}
		}
	}
}

// commandReference returns the reference of the command line, as Markdown.
func commandReference(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	b.WriteString("# Command line\n\n<!-- Generated from the commands by `go test ./internal/cli -run CommandLineReference -update`. -->\n\n" +
		"Every command takes `--socket SOCKET`, the daemon's Unix socket. `sandboxd COMMAND --help` prints the same.\n")
	write := func(path, text string) {
		if before, after, ok := strings.Cut(text, "\nGlobal Flags:\n"); ok {
			_, after, _ = strings.Cut(after, "\n\n")
			text = before + "\n" + after
		}
		b.WriteString("\n## " + path + "\n\n```text\n" + text + "```\n")
	}
	var walk func(cmd *cobra.Command)
	walk = func(cmd *cobra.Command) {
		if cmd.Name() == "completion" || cmd.Name() == "help" || cmd.Hidden {
			return // the first two are cobra's
		}
		if cmd.Name() == agentName {
			for path, text := range agentHelp(t) {
				write(path, text)
			}
			return
		}
		var out bytes.Buffer
		root := newRoot(testDeps)
		root.SetOut(&out)
		root.SetArgs(append(strings.Fields(cmd.CommandPath())[1:], "--help"))
		if err := root.Execute(); err != nil {
			t.Fatal(err)
		}
		write(cmd.CommandPath(), out.String())
		for _, c := range cmd.Commands() {
			walk(c)
		}
	}
	walk(newRoot(testDeps))
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
	newServe(testDeps).Flags().VisitAll(func(f *pflag.Flag) {
		if !f.Hidden && !strings.Contains(string(text), "`--"+f.Name+"`") {
			t.Errorf("docs/reference/configuration.md does not have --%s", f.Name)
		}
	})
}
