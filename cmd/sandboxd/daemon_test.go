package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestPrivateDirRefusesWhatOthersCanEnter(t *testing.T) {
	parent := t.TempDir()
	fresh := filepath.Join(parent, "a", "fresh")
	if err := privateDir(fresh); err != nil {
		t.Error(err)
	}
	if fi, err := os.Stat(fresh); err != nil || fi.Mode().Perm() != 0o700 {
		t.Errorf("made with mode %v, %v", fi.Mode(), err)
	}
	open := filepath.Join(parent, "open")
	for _, mode := range []os.FileMode{0o755, 0o711, 0o770, 0o777} {
		_ = os.Remove(open)
		if err := os.Mkdir(open, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(open, mode); err != nil {
			t.Fatal(err)
		}
		if err := privateDir(open); err == nil || !strings.Contains(err.Error(), "chmod 700") {
			t.Errorf("mode %v: %v, want a refusal with the remedy", mode, err)
		}
		if fi, err := os.Stat(open); err != nil || fi.Mode().Perm() != mode {
			t.Errorf("mode %v was changed to %v, %v", mode, fi.Mode(), err)
		}
	}
	other := "/proc" // root's; for root, one of another user
	if os.Geteuid() == 0 {
		other = filepath.Join(parent, "other")
		if err := os.Mkdir(other, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(other, 12345, 12345); err != nil {
			t.Fatal(err)
		}
	}
	if err := privateDir(other); err == nil || !strings.Contains(err.Error(), "does not belong") {
		t.Errorf("a directory of another user: %v", err)
	}
	link := filepath.Join(parent, "link")
	if err := os.Symlink(fresh, link); err != nil {
		t.Fatal(err)
	}
	if err := privateDir(link); err == nil {
		t.Error("a link was taken for a directory")
	}
}
