package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline/cmdtest"
)

// Shells complete runs of the output directory and those that the daemon hosts; files where none
// fits.
func TestRunCompletion(t *testing.T) {
	const hosted, local = "20260116_143000", "20260116_150000"
	f := cmdtest.New()
	f.Runs = []*cmdtest.HostedRun{{AgentRun: api.AgentRun{ID: hosted, State: api.AgentRunning, Query: "count\x1b"}}}
	socket := f.Start(t)
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, local), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, local, "record.jsonl"), []byte("{\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for line, want := range map[string]string{
		"show --output_dir " + dir + " |": local + "\n" + hosted + "\n:4\n",
		"cancel |":                        hosted + "\n:4\n",
		"cancel " + hosted + " |":         hosted + "\n:4\n",
		"show " + hosted + " |":           ":4\n",
		"logs 20260117|":                  ":0\n",
	} {
		line, word, _ := strings.Cut(line, "|")
		words := strings.Fields(line)
		if line[len(line)-1] != ' ' {
			word, words = words[len(words)-1], words[:len(words)-1]
		}
		got := inline(t, socket, append(append([]string{cobra.ShellCompRequestCmd, "agent"}, words...), word)...)
		var names strings.Builder
		for l := range strings.Lines(got.Stdout) {
			name, description, described := strings.Cut(strings.TrimSuffix(l, "\n"), "\t")
			if described && strings.Contains(description, "\x1b") {
				t.Errorf("%q", description)
			}
			names.WriteString(name + "\n")
		}
		if names.String() != want {
			t.Errorf("%s: %q, want %q (%s)", line, names.String(), want, got.Stderr)
		}
	}
}
