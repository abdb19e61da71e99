package cli

import (
	"fmt"
	"io"
	"io/fs"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/docs"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

func newDocs(d deps) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "docs [TOPIC]",
		Short: "Print the documents",
		Long: `Print a document, as Markdown. Without a TOPIC, list the topics. The documents are
part of this program: no network is needed. The last part of a topic is enough
where only one topic has it.`,
		Example: `  sandboxd docs quickstart
  sandboxd docs guides/files | less`,
		Args: cmdline.UsageArgs(cobra.MaximumNArgs(1)),
		RunE: func(_ *cobra.Command, args []string) error { return runDocs(d.Stdout, args) },
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			names, err := topics()
			if err != nil {
				return nil, cobra.ShellCompDirectiveError
			}
			return names, cobra.ShellCompDirectiveNoFileComp
		},
	}
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	cmd.AddCommand(newDocsMan(d))
	return cmd
}

// topics returns the names of the documents, the index left out.
func topics() ([]string, error) {
	var names []string
	err := fs.WalkDir(docs.FS, ".", func(path string, e fs.DirEntry, err error) error {
		if name, ok := strings.CutSuffix(path, ".md"); ok && err == nil && name != "README" {
			names = append(names, name)
		}
		return err
	})
	return names, err
}

func runDocs(w io.Writer, args []string) error {
	names, err := topics()
	if err != nil {
		return err
	}
	if len(args) == 0 {
		rows := [][]string{{"TOPIC", "TITLE"}}
		for _, name := range names {
			text, err := fs.ReadFile(docs.FS, name+".md")
			if err != nil {
				return err
			}
			title, _, _ := strings.Cut(string(text), "\n")
			rows = append(rows, []string{name, strings.TrimPrefix(title, "# ")})
		}
		return cmdline.Table(w, rows)
	}
	var found []string
	for _, name := range names {
		if name == args[0] {
			found = []string{name}
			break
		}
		if strings.HasSuffix(name, "/"+args[0]) {
			found = append(found, name)
		}
	}
	switch len(found) {
	case 0:
		return cmdline.Usagef("no topic %q; sandboxd docs lists the topics", args[0])
	case 1:
	default:
		return cmdline.Usagef("several topics end with %q: %s", args[0], strings.Join(found, ", "))
	}
	text, err := fs.ReadFile(docs.FS, found[0]+".md")
	if err != nil {
		return fmt.Errorf("read document %s: %w", found[0], err)
	}
	_, err = w.Write(text)
	return err
}
