package cli

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
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

// commandReference returns the reference of the command line, as Markdown.
func commandReference(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	b.WriteString("# Command line\n\n<!-- Generated from the commands by `go test -run CommandLineReference -update` in their package. -->\n\n" +
		"Every command takes `--socket SOCKET`, the daemon's Unix socket. `sandboxd COMMAND --help` prints the same.\n")
	var walk func(cmd *cobra.Command)
	walk = func(cmd *cobra.Command) {
		if cmd.Name() == "completion" || cmd.Name() == "help" || cmd.Hidden {
			return // the first two are cobra's
		}
		var out bytes.Buffer
		root := newRoot(deps{stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr})
		root.SetOut(&out)
		root.SetArgs(append(strings.Fields(cmd.CommandPath())[1:], "--help"))
		if err := root.Execute(); err != nil {
			t.Fatal(err)
		}
		text := out.String()
		if before, after, ok := strings.Cut(text, "\nGlobal Flags:\n"); ok {
			_, after, _ = strings.Cut(after, "\n\n")
			text = before + "\n" + after
		}
		b.WriteString("\n## " + cmd.CommandPath() + "\n\n```text\n" + text + "```\n")
		for _, c := range cmd.Commands() {
			walk(c)
		}
	}
	walk(newRoot(deps{stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr}))
	return b.String()
}

func TestCommandLineReferenceIsCurrent(t *testing.T) {
	const path = "../../docs/reference/cli.md"
	want := commandReference(t)
	if *update {
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
	newServe(deps{socket: new(string)}).Flags().VisitAll(func(f *pflag.Flag) {
		if !strings.Contains(string(text), "`--"+f.Name+"`") {
			t.Errorf("docs/reference/configuration.md does not have --%s", f.Name)
		}
	})
}
