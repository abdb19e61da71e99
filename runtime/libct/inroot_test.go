package libct

import (
	"os"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// Renames elsewhere on the host keep no image from being looked at.
func TestOpenInRootBesideRenames(t *testing.T) {
	dir := t.TempDir()
	for _, d := range []string{"root/usr/etc", "a"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("usr/../usr/etc/../etc", filepath.Join(dir, "root/etc")); err != nil {
		t.Fatal(err)
	}
	root, err := unix.Open(filepath.Join(dir, "root"), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(root)
	stop := make(chan struct{})
	var renaming sync.WaitGroup
	defer renaming.Wait()
	defer close(stop)
	renaming.Go(func() {
		a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
		for {
			select {
			case <-stop:
				return
			default:
			}
			if os.Rename(a, b) != nil || os.Rename(b, a) != nil {
				return
			}
		}
	})
	for i := range 5000 {
		fd, err := openInRoot(root, "etc", unix.O_PATH|unix.O_DIRECTORY)
		if err != nil {
			t.Fatalf("attempt %d: %v", i, err)
		}
		_ = unix.Close(fd)
	}
}
