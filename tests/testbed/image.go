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
	"syscall"
	"time"
)

// recipe is everything that the image is made from, but for the packages.
//
//go:embed image.sh guest
var recipe embed.FS

const (
	// prepareLimit bounds fetching some 150 MB of packages and making an image of them.
	prepareLimit = 20 * time.Minute
	// keepFor is how long an image is kept that no run has used.
	keepFor = 14 * 24 * time.Hour
)

// prepare returns the directory with root.img and the kernels, made first where it is missing. It lies in the user's cache
// directory, which may vanish at any time.
func prepare(ctx context.Context) (dir string, err error) {
	ctx, cancel := context.WithTimeout(ctx, prepareLimit)
	defer cancel()
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find the cache: %w", err)
	}
	cache = filepath.Join(cache, "sandboxd-tests")
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", err
	}
	hash, err := recipeHash()
	if err != nil {
		return "", err
	}
	dir = filepath.Join(cache, "testbed-"+hash)

	// One at a time; the second finds what the first has made.
	lock, err := os.OpenFile(filepath.Join(cache, "testbed.lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return "", err
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return "", fmt.Errorf("lock the cache: %w", err)
	}
	_, err = os.Stat(filepath.Join(dir, "root.img"))
	_, tool := exec.LookPath("qemu-system-x86_64")
	if err != nil || tool != nil {
		if err := build(ctx, dir); err != nil {
			return "", fmt.Errorf("make the image: %w", err)
		}
	}
	now := time.Now()
	return dir, errors.Join(os.Chtimes(dir, now, now), removeOld(cache, dir))
}

// build writes the recipe out and runs it.
func build(ctx context.Context, dir string) (err error) {
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
	cmd := exec.CommandContext(ctx, "bash", filepath.Join(work, "image.sh"), dir, filepath.Join(work, "guest"))
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) } // it cleans up
	cmd.WaitDelay = 30 * time.Second
	return cmd.Run()
}

// removeOld forgets images of other recipes that nobody has used for a while.
func removeOld(cache, except string) error {
	old, err := filepath.Glob(filepath.Join(cache, "testbed-*"))
	if err != nil {
		return err
	}
	var errs []error
	for _, dir := range old {
		fi, err := os.Stat(dir)
		if err == nil && dir != except && time.Since(fi.ModTime()) > keepFor {
			errs = append(errs, os.RemoveAll(dir))
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
