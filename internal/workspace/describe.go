package workspace

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/ignore"
)

// Describe returns a directory as a workspace for a request, without the files that its
// .sandboxdignore keeps out, and with git its .gitignore files. Links on the way to the
// directory are followed here, with the user's rights; the daemon follows none.
func Describe(ctx context.Context, dir string, git bool) (*api.Workspace, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("find the directory: %w", err)
	}
	if dir, err = filepath.EvalSymlinks(dir); err != nil {
		return nil, err // names the path
	}
	fi, err := os.Lstat(dir)
	if err != nil {
		return nil, err // as above
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok || !fi.IsDir() {
		return nil, fmt.Errorf("%s is not a directory", dir)
	}
	if dir == "/" {
		return nil, errors.New(`"/" is no directory for a workspace`)
	}
	hidden, err := ignore.Paths(ctx, dir, git)
	if err != nil {
		return nil, err
	}
	return &api.Workspace{Source: dir, Device: st.Dev, Inode: st.Ino, Hidden: hidden}, nil
}
