package quota

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func write(t *testing.T, path string, size int) {
	t.Helper()
	if err := os.WriteFile(path, []byte(strings.Repeat("x", size)), 0o600); err != nil {
		t.Fatal(err)
	}
}

func blocks(t *testing.T, path string) int64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks * 512
}

// Blocks are counted, not lengths, every inode once, and no link leads out.
func TestMeasureCountsEveryInodeOnce(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	write(t, filepath.Join(outside, "large"), 1<<20)
	sub := filepath.Join(dir, "a", "b")
	if err := os.MkdirAll(sub, 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(sub, "file"), 100_000)
	hole := filepath.Join(dir, "hole")
	write(t, hole, 1)
	for _, err := range []error{
		os.Truncate(hole, 1<<40),
		os.Link(filepath.Join(sub, "file"), filepath.Join(dir, "again")), os.Link(filepath.Join(sub, "file"), filepath.Join(dir, "a", "again")),
		os.Symlink(outside, filepath.Join(dir, "out")), unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	var want Usage
	for _, path := range []string{"", "a", "a/b", "a/b/file", "hole", "out", "fifo"} {
		want = want.plus(Usage{blocks(t, filepath.Join(dir, path)), 1})
	}
	got, err := Measure([]string{dir, filepath.Join(dir, "none")}, Usage{})
	if err != nil || got != want {
		t.Errorf("%+v, %v, want %+v", got, err, want)
	}
}

// The count ends at the limit, however much there is beyond it.
func TestMeasureEndsAtTheLimit(t *testing.T) {
	files, dirs := t.TempDir(), t.TempDir()
	for i := range 100 {
		write(t, filepath.Join(files, fmt.Sprint(i)), 5000)
		if err := os.Mkdir(filepath.Join(dirs, fmt.Sprint(i)), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, dir := range []string{files, dirs} {
		if got, err := Measure([]string{dir}, Usage{Inodes: 10}); err != nil || got.Inodes != 11 {
			t.Errorf("%s: %+v, %v", dir, got, err)
		}
	}
	got, err := Measure([]string{files}, Usage{Bytes: 40_000})
	if err != nil || got.Bytes <= 40_000 || got.Bytes > 60_000 {
		t.Errorf("%+v, %v", got, err)
	}
	if got, err := Measure([]string{files}, Usage{1 << 30, 1000}); err != nil || got.Inodes != 101 {
		t.Errorf("%+v, %v", got, err)
	}
}

// Levels that are not counted are no place to hide.
func TestMeasureRefusesDepth(t *testing.T) {
	dir := t.TempDir()
	fd, err := open(unix.AT_FDCWD, dir)
	if err != nil {
		t.Fatal(err)
	}
	down := func() {
		t.Helper()
		if err := unix.Mkdirat(fd, "d", 0o700); err != nil {
			t.Fatal(err)
		}
		next, err := open(fd, "d")
		if err := errors.Join(err, unix.Close(fd)); err != nil {
			t.Fatal(err)
		}
		fd = next
	}
	for range MaxDepth {
		down()
	}
	if got, err := Measure([]string{dir}, Usage{}); err != nil || got.Inodes != MaxDepth+1 {
		t.Errorf("%d levels: %+v, %v", MaxDepth, got, err)
	}
	down()
	if _, err := Measure([]string{dir}, Usage{}); !errors.Is(err, ErrDeep) {
		t.Errorf("one more: %v", err)
	}
	_ = unix.Close(fd)
}
