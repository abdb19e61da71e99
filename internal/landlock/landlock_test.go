package landlock

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/sandboxd/sandboxd/internal/kernel"
)

// A rule about a path has the rights that such a path can have: the kernel refuses those of
// directories for a file.
func TestAllowPathOfFiles(t *testing.T) {
	abi, err := kernel.LandlockABI()
	if err != nil {
		t.Skip(err)
	}
	all := Everything(abi)
	rules, err := New(&all)
	if err != nil {
		t.Fatal(err)
	}
	defer rules.Close()
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{file, filepath.Dir(file), os.DevNull} {
		if err := rules.AllowPath(path, all.Handled_access_fs); err != nil {
			t.Errorf("%s: %v", path, err)
		}
	}
}
