package cli

import (
	"context"
	"fmt"
	"strings"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline"
	"github.com/sandboxd/sandboxd/internal/workspace"
)

// parseWorkspace reads DIR[:TARGET] and examines the directory.
func parseWorkspace(ctx context.Context, text string, git bool) (*api.Workspace, error) {
	if text == "" {
		if git {
			return nil, cmdline.Usagef("--gitignore is about the directory of --workspace, and there is none")
		}
		return nil, nil
	}
	dir, target := text, ""
	if at := strings.LastIndex(text, ":/"); at > 0 {
		dir, target = text[:at], text[at+1:]
	}
	w, err := workspace.Describe(ctx, dir, git)
	if ctx.Err() != nil {
		return nil, err
	}
	if err != nil {
		return nil, cmdline.Usagef("--workspace %q: %w", text, err)
	}
	w.Target = target
	return w, nil
}

// hintChanges says where the changes of a program in a workspace are.
func hintChanges(sb *api.Sandbox, d deps) {
	name := cmdline.Printable(sb.Name)
	_, _ = fmt.Fprintf(d.Stderr, "sandboxd: its changes are kept: sandboxd changes %s; sandboxd apply %s; sandboxd rm -f %s\n", name, name, name) // a note
}
