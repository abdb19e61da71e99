package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline"
	"github.com/sandboxd/sandboxd/internal/workspace"
)

type changesOptions struct {
	json     bool
	nameOnly bool
}

func newChanges(d deps) *cobra.Command {
	var opts changesOptions
	cmd := &cobra.Command{
		Use:   "changes [flags] SANDBOX [PATH]...",
		Short: "Show what a sandbox has changed in its workspace",
		Long: `Show what a sandbox, be it running or not, has changed in the directory that its
--workspace names: the differences as a patch that "git apply" reads, or
with --name-only a line for each file, A for added, C for changed and D for
deleted. PATHs are relative to the directory; without one all changes are shown.

The comparison is with the directory as it is now. "sandboxd apply" brings the
changes into it.`,
		Example: `  sandboxd run --workspace . -- make fix
  sandboxd changes --name-only brave-otter-826
  sandboxd changes brave-otter-826 src > fix.patch`,
		Args: cmdline.UsageArgs(cobra.MinimumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runChanges(cmd.Context(), args[0], args[1:], opts, d)
		},
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func (o *changesOptions) addFlags(f *pflag.FlagSet) {
	f.BoolVar(&o.json, "json", false, "print names, sizes and conflicts as JSON")
	f.BoolVar(&o.nameOnly, "name-only", false, "print no contents")
}

// shownChange is a change as JSON shows it.
type shownChange struct {
	Path      string         `json:"path"` // as git quotes it
	Kind      api.ChangeKind `json:"kind"`
	Type      string         `json:"type"`
	Size      int64          `json:"size"`
	Mode      string         `json:"mode,omitempty"`
	WasMode   string         `json:"was_mode,omitempty"`
	Protected bool           `json:"protected,omitempty"`
	Conflict  string         `json:"conflict,omitempty"`
	Refused   string         `json:"refused,omitempty"`
	Note      string         `json:"note,omitempty"`
}

func runChanges(ctx context.Context, id string, paths []string, opts changesOptions, d deps) (err error) {
	c := d.Client()
	defer c.Close()
	w, err := workspace.Compare(ctx, c, id, "")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	items, err := w.Select(paths)
	if err != nil {
		return err
	}
	switch {
	case opts.json:
		shown := []shownChange{}
		for _, i := range items {
			shown = append(shown, shownChange{workspace.Quote(i.Path), i.Kind, i.Type, i.Size, i.Mode, i.WasMode, i.Protected, i.Conflict, i.Refused, i.Note})
		}
		return cmdline.PrintJSON(d.Stdout, shown)
	case opts.nameOnly:
		return listChanges(d.Stdout, items)
	}
	var show func(string) string      // nil: for git
	if cmdline.IsTerminal(d.Stdout) { // what programs wrote must not steer it
		show = func(s string) string {
			return strings.ReplaceAll(cmdline.Printable(strings.ReplaceAll(s, "\t", "\x00")), `\x00`, "\t")
		}
	}
	return w.WritePatch(d.Stdout, items, show)
}

// listChanges prints a line for each item.
func listChanges(to *os.File, items []*workspace.Item) error {
	letters := map[api.ChangeKind]string{api.Added: "A", api.Changed: "C", api.Deleted: "D"}
	for _, i := range items {
		var line strings.Builder
		line.WriteString(letters[i.Kind] + " " + workspace.Quote(i.Path))
		if i.Type == "directory" {
			line.WriteString("/")
		}
		if i.Type == "file" && i.Kind != api.Deleted {
			line.WriteString("  " + units.HumanSize(float64(i.Size)))
		}
		if i.WasMode != "" && i.WasMode != i.Mode {
			line.WriteString("  mode " + i.WasMode + " to " + i.Mode)
		}
		if i.Protected {
			line.WriteString("  (protected)")
		}
		for _, why := range []struct{ what, text string }{{"conflict", i.Conflict}, {"never applied", i.Refused}, {"note", i.Note}} {
			if why.text != "" {
				line.WriteString("  (" + why.what + ": " + cmdline.Printable(why.text) + ")")
			}
		}
		if _, err := fmt.Fprintln(to, line.String()); err != nil {
			return err
		}
	}
	return nil
}
