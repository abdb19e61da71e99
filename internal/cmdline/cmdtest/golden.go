package cmdtest

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
)

// Update is the flag that rewrites golden files.
var Update = flag.Bool("update", false, "rewrite the golden files")

// HelpGolden compares the help of every command with testdata/help, except those named and cobra's
// own. newRoot returns a new root command.
func HelpGolden(t *testing.T, newRoot func() *cobra.Command, except ...string) {
	t.Helper()
	except = append(except, "completion", "help")
	var walk func(cmd *cobra.Command)
	walk = func(cmd *cobra.Command) {
		if slices.Contains(except, cmd.Name()) {
			return
		}
		path := strings.Fields(cmd.CommandPath())
		name := strings.Join(path, "-")
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			root := newRoot()
			root.SetOut(&out)
			root.SetArgs(append(path[1:], "--help"))
			if err := root.Execute(); err != nil {
				t.Fatal(err)
			}
			checkHelp(t, filepath.Join("testdata", "help", name+".txt"), out.String())
		})
		for _, c := range cmd.Commands() {
			walk(c)
		}
	}
	walk(newRoot())
}

func checkHelp(t *testing.T, golden, text string) {
	t.Helper()
	for i, line := range strings.Split(text, "\n") {
		if strings.TrimRight(line, " ") != line {
			t.Errorf("line %d ends with spaces", i+1)
		}
	}
	// The list of codes ends every help.
	if i := strings.LastIndex(text, "\nEXIT STATUS\n"); i < 0 || strings.Contains(text[i+1:], "\n\n") {
		t.Error("it does not end with EXIT STATUS")
	}
	if *Update {
		if err := os.MkdirAll(filepath.Dir(golden), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(golden, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), text); diff != "" {
		t.Errorf("help (-want +got; go test -run Golden -update rewrites it):\n%s", diff)
	}
}
