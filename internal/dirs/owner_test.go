package dirs

import (
	"os"
	"path/filepath"
	"testing"
)

// Another user may have put a symbolic link in the place of a runtime directory, pointing to a
// directory of this user: only a real directory counts.
func TestOwnerBelievesDirectoriesOnly(t *testing.T) {
	dir := t.TempDir()
	if uid, err := owner(dir); err != nil || uid != os.Getuid() {
		t.Errorf("owner of our own directory = %d, %v; want %d", uid, err, os.Getuid())
	}
	link := filepath.Join(dir, "link")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	if uid, err := owner(link); err == nil {
		t.Errorf("owner of a symbolic link = %d, want an error", uid)
	}
	if _, err := owner(filepath.Join(dir, "missing")); err == nil {
		t.Error("owner of a missing directory: no error")
	}
}
