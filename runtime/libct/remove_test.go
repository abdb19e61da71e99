package libct

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// A sandbox whose tree is deeper than the launcher may have descriptors is deleted like any other.
func TestDeepTreeIsRemoved(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "sandbox")
	victim := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(victim, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	upper := filepath.Join(dir, "upper")
	for _, d := range []string{upper, filepath.Join(dir, "deep-0", "left", "over"), filepath.Join(dir, "deep-1")} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	fd, err := unix.Open(upper, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	for level := range 1500 {
		var next int
		for i := range 3 {
			name := fmt.Sprintf("d%d", i)
			if err := unix.Mkdirat(fd, name, 0o700); err != nil {
				t.Fatalf("level %d: %v", level, err)
			}
			if err := unix.Symlinkat(victim, fd, "link-"+name); err != nil {
				t.Fatal(err)
			}
		}
		if next, err = unix.Openat(fd, "d1", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err != nil {
			t.Fatal(err)
		}
		_ = unix.Close(fd)
		fd = next
	}
	_ = unix.Close(fd)
	for i := range 3000 { // more than one read has room for
		if err := os.WriteFile(filepath.Join(upper, fmt.Sprintf("file-%d", i)), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}

	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	few := limit
	few.Cur = 256
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &few); err != nil {
		t.Fatal(err)
	}
	err = removeTree(dir)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if err != nil {
		t.Fatalf("%.200s", err)
	}
	if _, err := os.Lstat(dir); !os.IsNotExist(err) {
		t.Errorf("it is still there: %v", err)
	}
	if _, err := os.Lstat(victim); err != nil {
		t.Errorf("what a link in it meant: %v", err)
	}
	if err := removeTree(dir); err != nil {
		t.Errorf("once more: %v", err)
	}
}
