package cli

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cmdline"
)

func newDocsMan(d deps) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "man DIR",
		Short: "Write the manual pages of all commands",
		Long: `Write a manual page for each command to a directory, which is made if it does not
exist: sandboxd.1, sandboxd-run.1 and so on. They say what --help says.`,
		Example: `  sandboxd docs man ~/.local/share/man/man1 && man sandboxd-run`,
		Args:    cmdline.UsageArgs(cobra.ExactArgs(1)),
		RunE:    func(_ *cobra.Command, args []string) error { return writeMan(newRoot(d), args[0]) },
	}
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

// writeMan writes the pages of a command and of those below it.
func writeMan(cmd *cobra.Command, dir string) error {
	if cmd.Hidden || cmd.Name() == "help" || cmd.Name() == agentName { // the last is another program's
		return nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // G301: manual pages are for all users
		return fmt.Errorf("write manual pages: %w", err)
	}
	name := strings.ReplaceAll(cmd.CommandPath(), " ", "-")
	if err := os.WriteFile(filepath.Join(dir, name+".1"), []byte(manPage(cmd, name)), 0o644); err != nil { //nolint:gosec // G306: see above
		return fmt.Errorf("write manual page: %w", err)
	}
	for _, c := range cmd.Commands() {
		if err := writeMan(c, dir); err != nil {
			return err
		}
	}
	return nil
}

// manPage returns the page of a command in the man macros of roff.
func manPage(cmd *cobra.Command, name string) string {
	var b strings.Builder
	fmt.Fprintf(&b, ".TH %s 1 \"\" sandboxd \"Commands of sandboxd\"\n", strings.ToUpper(roff(name)))
	section := func(title, text string) {
		if text = strings.Trim(text, "\n"); text != "" {
			fmt.Fprintf(&b, ".SH %s\n%s\n", title, text)
		}
	}
	// Help texts are laid out for terminals: lines and columns stay.
	verbatim := func(text string) string {
		if text = strings.Trim(text, "\n"); text == "" {
			return ""
		}
		return ".nf\n" + roff(text) + "\n.fi"
	}
	section("NAME", roff(name)+` \- `+roff(cmd.Short))
	section("SYNOPSIS", verbatim(cmd.UseLine()))
	section("DESCRIPTION", verbatim(cmd.Long))
	section("OPTIONS", verbatim(cmd.NonInheritedFlags().FlagUsages()))
	section("GLOBAL OPTIONS", verbatim(cmd.InheritedFlags().FlagUsages()))
	section("EXAMPLES", verbatim(cmd.Example))
	section("EXIT STATUS", verbatim(cmdline.ExitStatusOf(cmd)))
	var also []string
	if cmd.HasParent() {
		also = append(also, strings.ReplaceAll(cmd.Parent().CommandPath(), " ", "-"))
	}
	for _, c := range cmd.Commands() {
		if !c.Hidden && c.Name() != "help" && c.Name() != agentName {
			also = append(also, strings.ReplaceAll(c.CommandPath(), " ", "-"))
		}
	}
	for i, page := range also {
		also[i] = `\fB` + roff(page) + `\fR(1)`
	}
	section("SEE ALSO", strings.Join(also, ",\n"))
	return b.String()
}

// roff escapes text for roff: backslashes, hyphens, which would become dashes, lines that begin
// like a request, and what is not ASCII.
func roff(text string) string {
	text = strings.NewReplacer(`\`, `\e`, "-", `\-`).Replace(text)
	lines := strings.Split(text, "\n")
	for i, l := range lines {
		if strings.HasPrefix(l, ".") || strings.HasPrefix(l, "'") {
			lines[i] = `\&` + l
		}
	}
	var b strings.Builder
	for _, r := range strings.Join(lines, "\n") {
		if r < utf8.RuneSelf {
			b.WriteRune(r)
		} else {
			fmt.Fprintf(&b, `\[u%04X]`, r)
		}
	}
	return b.String()
}
