package main

import (
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/internal/flock"
)

// recipe is everything that the image is made from, but for the packages.
//
//go:embed debian.sh tools.sh image.sh newest.sh guest
var recipe embed.FS

const (
	// prepareLimit bounds fetching some 150 MB of packages and making an image of them.
	prepareLimit = 20 * time.Minute
	// keepFor is how long an image is kept that no run has used.
	keepFor = 14 * 24 * time.Hour
	// newestFor is how long the newest kernel counts as the newest, before Debian is asked again.
	newestFor = 12 * time.Hour
)

// newest is the word for the newest kernel that Debian offers.
const newest = "newest"

// images is a directory with the image, the kernels that its recipe names, and the newest.
type images struct {
	dir    string
	newest string // directory below dir, "newest-7.3.4-1~bpo13+1"; empty where it was not asked for
}

// of says which root file system and which kernel a machine is started with.
func (i images) of(kernel string) (root, vmlinuz string) {
	if kernel == newest {
		return filepath.Join(i.dir, i.newest, "root.img"), filepath.Join(i.dir, i.newest, "vmlinuz")
	}
	return filepath.Join(i.dir, "root.img"), filepath.Join(i.dir, "vmlinuz-"+kernel)
}

// prepare makes the missing images. They lie in the user's cache directory, which may vanish at
// any time.
func prepare(ctx context.Context, kernels []string) (made images, err error) {
	ctx, cancel := context.WithTimeout(ctx, prepareLimit)
	defer cancel()
	cache, err := os.UserCacheDir()
	if err != nil {
		return made, fmt.Errorf("find the cache: %w", err)
	}
	cache = filepath.Join(cache, "sandboxd-tests")
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return made, err
	}
	hash, err := recipeHash()
	if err != nil {
		return made, err
	}
	made.dir = filepath.Join(cache, "testbed-"+hash)

	// One at a time; the second finds the images of the first.
	lock, err := os.OpenFile(filepath.Join(cache, "testbed.lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return made, err
	}
	defer lock.Close()
	if err := flock.Exclusive(ctx.Done(), prepareLimit, lock); err != nil {
		return made, fmt.Errorf("lock the cache: %w", err)
	}
	// The cache may have come from another machine, and tools go with an upgrade.
	if err := script(ctx, "tools.sh", made.dir); err != nil {
		return made, fmt.Errorf("look for the tools: %w", err)
	}
	if _, err := os.Stat(filepath.Join(made.dir, "root.img")); err != nil {
		if err := script(ctx, "image.sh", made.dir, "guest"); err != nil {
			return made, fmt.Errorf("make the image: %w", err)
		}
	}
	if slices.Contains(kernels, newest) {
		if made.newest, err = findNewest(ctx, made.dir); err != nil {
			return made, err
		}
	}
	return made, errors.Join(used(cache, "testbed-*", made.dir), used(made.dir, newest+"-*", filepath.Join(made.dir, made.newest)))
}

// findNewest returns the directory of the newest kernel, made first where it is missing. Debian is
// asked now and then; where it does not answer, the newest that it once named is used, with a
// word.
func findNewest(ctx context.Context, dir string) (string, error) {
	file := filepath.Join(dir, newest)
	fi, err := os.Stat(file)
	known, readErr := os.ReadFile(file)
	name := strings.TrimSpace(string(known))
	if readErr == nil {
		_, readErr = os.Stat(filepath.Join(dir, name, "root.img"))
	}
	if err == nil && readErr == nil && time.Since(fi.ModTime()) < newestFor {
		return name, nil
	}
	if err := script(ctx, "newest.sh", dir); err != nil {
		if readErr != nil {
			return "", fmt.Errorf("find the newest kernel: %w", err)
		}
		fmt.Fprintf(os.Stderr, "testbed: find the newest kernel: %v; using %s, the newest of %s\n", err, name, fi.ModTime().Format(time.DateOnly))
		return name, nil
	}
	known, err = os.ReadFile(file)
	return strings.TrimSpace(string(known)), err
}

// script writes the recipe out and runs one of its scripts, with dir and with other files of the
// recipe.
func script(ctx context.Context, name, dir string, files ...string) (err error) {
	work, err := os.MkdirTemp("", "testbed-recipe-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	if err := os.CopyFS(work, recipe); err != nil {
		return err
	}
	if err := os.Chmod(work, 0o755); err != nil { // it is read as a subordinate id
		return err
	}
	args := []string{filepath.Join(work, name), dir}
	for _, f := range files {
		args = append(args, filepath.Join(work, f))
	}
	cmd := exec.CommandContext(ctx, "bash", args...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) } // it cleans up
	cmd.WaitDelay = 30 * time.Second
	return cmd.Run()
}

// used notes that dir is in use now, and removes its siblings (of other recipes, of kernels that
// were the newest) that have been unused for a while: another run may have them just now.
func used(parent, siblings, dir string) error {
	now := time.Now()
	errs := []error{os.Chtimes(dir, now, now)}
	old, err := filepath.Glob(filepath.Join(parent, siblings))
	if err != nil {
		return err
	}
	for _, other := range old {
		fi, err := os.Stat(other)
		if err == nil && other != dir && time.Since(fi.ModTime()) > keepFor {
			errs = append(errs, os.RemoveAll(other))
		}
	}
	return errors.Join(errs...)
}

// recipeHash names the image: another recipe is another image.
func recipeHash() (string, error) {
	h := sha256.New()
	err := fs.WalkDir(recipe, ".", func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		data, err := recipe.ReadFile(path)
		fmt.Fprintf(h, "%s %d\n", path, len(data))
		h.Write(data)
		return err
	})
	return hex.EncodeToString(h.Sum(nil))[:12], err
}
