// Package testtree lays out what compiled tests need around them: a copy of the tree, and the programs that tests put into
// sandboxes. The lanes and the test bed run the same binaries over the same tree.
package testtree

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// Tags are the build tags of the launcher, and so of every test; see the Makefile.
const Tags = "seccomp osusergo netgo"

// helpers are programs that tests put into sandboxes: static, and laid beside the built binaries.
var helpers = map[string]string{"attacker": "./tests/security/attacker"}

// BuildHelpers compiles them into a directory.
func BuildHelpers(ctx context.Context, dir string) error {
	for name, pkg := range helpers {
		build := exec.CommandContext(ctx, "go", "build", "-buildvcs=false", "-trimpath", "-o", filepath.Join(dir, name), pkg)
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			return fmt.Errorf("build %s: %w\n%s", pkg, err, out)
		}
	}
	return nil
}

// Copy makes the directory and copies what git knows or would know into it.
func Copy(ctx context.Context, to string) error {
	if err := os.Mkdir(to, 0o755); err != nil {
		return err
	}
	const script = `git -c safe.directory='*' ls-files -z -co --exclude-standard --deduplicate |
		tar --create --null --files-from=- --ignore-failed-read 2>/dev/null | tar --extract --directory="$1" --no-same-owner`
	if out, err := exec.CommandContext(ctx, "bash", "-c", script, "copy", to).CombinedOutput(); err != nil {
		return fmt.Errorf("copy the tree: %w: %s", err, out)
	}
	return nil
}

// CopyBinaries makes the directory and copies the built binaries into it.
func CopyBinaries(built, to string) error {
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	for _, name := range []string{"sandboxd", "sandboxd-launcher", "sandboxd-init"} {
		data, err := os.ReadFile(filepath.Join(built, name))
		if err != nil {
			return fmt.Errorf("%w: run `make build` first", err)
		}
		if err := os.WriteFile(filepath.Join(to, name), data, 0o755); err != nil {
			return err
		}
	}
	return nil
}
