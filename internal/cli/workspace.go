package cli

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

// parseWorkspace reads DIR[:TARGET] and examines the directory. Links on the way to it are followed
// here, with the user's rights; the daemon follows none.
func parseWorkspace(text string) (*api.Workspace, error) {
	if text == "" {
		return nil, nil
	}
	dir, target := text, ""
	if at := strings.LastIndex(text, ":/"); at > 0 {
		dir, target = text[:at], text[at+1:]
	}
	usage := func(err error) error { return cmdline.Usagef("--workspace %q: %w", text, err) }
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, usage(err)
	}
	if dir, err = filepath.EvalSymlinks(dir); err != nil {
		return nil, usage(err)
	}
	fi, err := os.Lstat(dir)
	if err != nil {
		return nil, usage(err)
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok || !fi.IsDir() {
		return nil, usage(fmt.Errorf("%s is not a directory", dir))
	}
	return &api.Workspace{Source: dir, Target: target, Device: st.Dev, Inode: st.Ino}, nil
}

// hintChanges says where the changes of a program in a workspace are.
func hintChanges(sb *api.Sandbox, d deps) {
	name := cmdline.Printable(sb.Name)
	_, _ = fmt.Fprintf(d.Stderr, "sandboxd: its changes are kept: sandboxd changes %s; sandboxd apply %s; sandboxd rm -f %s\n", name, name, name) // a note
}
