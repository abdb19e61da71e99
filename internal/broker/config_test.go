package broker

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// The broker reads the files that the first request named, and no other user's.
func TestReadConfig(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sandboxd.yaml")
	b := new(broker)
	if _, err := b.configure(t.Context(), Config{ConfigFiles: []string{path, path + ".missing"}}); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("pids: 64\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := b.readConfig(t.Context(), none{})
	if err != nil || !slices.Equal(slices.Collect(maps.Keys(got)), []string{path}) || string(got[path]) != "pids: 64\n" {
		t.Errorf("%q, %v", got, err)
	}
	if err := os.Chmod(path, 0o622); err != nil {
		t.Fatal(err)
	}
	if _, err := b.readConfig(t.Context(), none{}); err == nil || !strings.Contains(err.Error(), "chmod go-w") {
		t.Errorf("writable by others: %v", err)
	}
}
