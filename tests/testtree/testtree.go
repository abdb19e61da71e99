// Package testtree lays out what compiled tests need around them: a copy of the tree, and the
// programs that tests put into sandboxes. The lanes and the test bed run the same binaries over
// the same tree.
package testtree

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/sandboxd/sandboxd/internal/flock"
)

// Tags are the build tags of the launcher, and so of every test; see the Makefile.
const Tags = "seccomp osusergo netgo"

// A helper is a program that tests need beside the built binaries. All are static: they run in
// sandboxes and in other machines.
type helper struct {
	name, dir string
	pkg       string // relative to dir, which is the root of its module
	cgo       bool   // needs libseccomp, as the launcher does
	tags      string // beside those of the launcher
}

var helpers = []helper{
	{name: "attacker", dir: ".", pkg: "./tests/security/attacker"},
	{name: "initfoe", dir: ".", pkg: "./tests/security/initfoe"},
	{name: "lister", dir: ".", pkg: "./tests/functional/lister"},
	{name: "applier", dir: ".", pkg: "./tests/security/applier", cgo: true},
	{name: "prober", dir: ".", pkg: "./tests/network/prober"},
	{name: "neighbour", dir: ".", pkg: "./tests/engine/neighbour"},
	{name: "makerfoe", dir: ".", pkg: "./tests/engine/makerfoe", cgo: true},
	{name: "mutant-launcher", dir: ".", pkg: "./cmd/sandboxd-launcher", cgo: true, tags: " mutant"},
	{name: "mobyclient", dir: "tests/docker/mobyclient", pkg: "."},
	{name: "containerd-apply", dir: "tests/layers/containerd", pkg: "."},
}

// BuildHelpers compiles the programs that tests need beside the built binaries into a directory.
// It is called at the root of the tree. They are kept in the user's cache, where the go command
// leaves those that are up to date alone.
func BuildHelpers(ctx context.Context, to string) error {
	kept, unlock, err := Kept(ctx, "helpers")
	if err != nil {
		return err
	}
	defer unlock()
	for _, h := range helpers {
		if err := h.build(ctx, ".", kept); err != nil {
			return err
		}
		if err := LinkOrCopy(filepath.Join(kept, h.name), filepath.Join(to, h.name)); err != nil {
			return err
		}
	}
	return nil
}

// Kept makes a directory of the user's cache for files that serve later runs, of any clone of the
// tree, and locks it until unlock is called.
func Kept(ctx context.Context, name string) (dir string, unlock func(), err error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", nil, err
	}
	dir = filepath.Join(cache, "sandboxd-tests", name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", nil, err
	}
	lock, err := os.Open(dir)
	if err != nil {
		return "", nil, err
	}
	unlock = func() { _ = lock.Close() }
	if err := flock.Exclusive(ctx.Done(), flock.Forever, lock); err != nil {
		unlock()
		return "", nil, fmt.Errorf("lock %s: %w", dir, err)
	}
	return dir, unlock, nil
}

// LinkOrCopy gives a kept program a second name, for users that cannot reach the cache. A later
// run replaces the file of the first name and leaves this one.
func LinkOrCopy(from, to string) error {
	if err := os.Link(from, to); err == nil {
		return nil
	}
	return copyProgram(from, to)
}

// Helper compiles one of them into a directory and returns its path; root is the root of the tree.
// It is for tests that are run by a plain `go test`: the lanes build all of them before.
func Helper(ctx context.Context, root, name, to string) (string, error) {
	for _, h := range helpers {
		if h.name == name {
			return filepath.Join(to, name), h.build(ctx, root, to)
		}
	}
	return "", fmt.Errorf("no helper is called %q", name)
}

func (h helper) build(ctx context.Context, root, to string) error {
	out, err := filepath.Abs(filepath.Join(to, h.name))
	if err != nil {
		return err
	}
	// Without symbols, a third less is copied into every sandbox that gets one of them.
	ldflags, cgo := "-s -w", "CGO_ENABLED=0"
	args := []string{"build", "-buildvcs=false", "-trimpath", "-o", out}
	if h.cgo {
		ldflags += " -linkmode external -extldflags -static"
		args = append(args, "-tags", Tags+h.tags)
		cgo = "CGO_ENABLED=1"
	}
	build := exec.CommandContext(ctx, "go", append(args, "-ldflags", ldflags, h.pkg)...)
	build.Dir = filepath.Join(root, h.dir)
	build.Env = append(os.Environ(), cgo)
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", h.pkg, err, out)
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
	for _, name := range []string{"sandboxd", "sandboxd-agent", "sandboxd-launcher", "sandboxd-init"} {
		if err := copyProgram(filepath.Join(built, name), filepath.Join(to, name)); err != nil {
			return fmt.Errorf("%w: run `make build` first", err)
		}
	}
	return nil
}

// CopyHelpers copies what [BuildHelpers] has compiled.
func CopyHelpers(built, to string) error {
	for _, h := range helpers {
		if err := copyProgram(filepath.Join(built, h.name), filepath.Join(to, h.name)); err != nil {
			return err
		}
	}
	return nil
}

func copyProgram(from, to string) (err error) {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o755)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	// In pieces, as installers do it. What is written at once the page cache may hold in huge pages,
	// and since Linux 6.18 a fault maps a whole one: a program's resident set would be its file's
	// size.
	_, err = io.CopyBuffer(struct{ io.Writer }{out}, struct{ io.Reader }{in}, make([]byte, 64<<10))
	return err
}
