package main

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

// The leftovers of a lane's daemons are owned by subordinate ids. An ordinary user without sudo
// removes them all the same.
func TestFilesOfSubordinateIDsAreRemoved(t *testing.T) {
	testenv.RequireUserNS(t)
	testenv.RequireSubIDs(t)
	tools := t.TempDir()
	if err := os.WriteFile(filepath.Join(tools, "sudo"), []byte("#!/bin/sh\nexit 1\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", tools+":"+os.Getenv("PATH"))
	dir := filepath.Join(t.TempDir(), "left")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if os.Geteuid() != 0 {
		const fill = `mkdir -p "$1/layers/one" && touch "$1/layers/one/file" && chown -R 7:7 "$1/layers"`
		made := exec.CommandContext(t.Context(), "unshare", "--map-auto", "--user", "--map-root-user", "sh", "-c", fill, "sh", dir)
		if out, err := made.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if err := os.RemoveAll(dir); err == nil {
			t.Fatal("control: it takes nothing to remove them")
		}
	}
	if err := removeTree(t.Context(), dir); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("it is still there: %v", err)
	}
}
