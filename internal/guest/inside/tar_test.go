package inside

import (
	"archive/tar"
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/sandboxd/sandboxd/internal/guest/guesttest"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// A link that was swapped for another name of a foreign file keeps its owner.
func TestTarInGivesOnlyLinksAway(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Open(file, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(fd) }()
	x := &tarReader{uid: 1234, gid: 1234}
	if err := x.ownLink(fd); !errors.Is(err, unix.ELOOP) {
		t.Errorf("got %v", err)
	}
	if fi, err := os.Stat(file); err != nil || fi.Sys().(*syscall.Stat_t).Uid == 1234 {
		t.Errorf("%+v, %v", fi, err)
	}
}

// A directory of an archive gets its mode and owner through its descriptor, so that a link in its
// place has no effect.
func TestTarInIsNotLedAstray(t *testing.T) {
	dir := t.TempDir()
	if err := errors.Join(os.WriteFile(dir+"/secret", nil, 0o600), os.Mkdir(dir+"/private", 0o700), os.Symlink("secret", dir+"/file"),
		os.Symlink("private", dir+"/directory"), os.Mkdir(dir+"/own", 0o700)); err != nil {
		t.Fatal(err)
	}
	at, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(at) }()
	x := &tarReader{dir: at, uid: os.Getuid(), gid: os.Getgid()}
	for name, ok := range map[string]bool{"file": false, "directory": false, "secret": false, "own": true} {
		if err := x.ownDir(name, 0o755); (err == nil) != ok {
			t.Errorf("%s: %v", name, err)
		}
	}
	want := []string{"-rw------- secret = ", "Lrwxrwxrwx directory -> private", "Lrwxrwxrwx file -> secret", "drwx------ private", "drwxr-xr-x own"}
	got := guesttest.Tree(t, dir)
	slices.Sort(got)
	slices.Sort(want)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// A sandbox chooses how long the names of its hard links are. Beyond a bound they are not kept, and
// the files written as their own.
func TestTarOutKeepsABoundedMemoryOfLinks(t *testing.T) {
	dir := t.TempDir()
	if err := errors.Join(os.WriteFile(dir+"/a", []byte("x"), 0o600), os.Link(dir+"/a", dir+"/b")); err != nil {
		t.Fatal(err)
	}
	for names, want := range map[int]byte{maxLinkNames: tar.TypeReg, maxLinkNames - 1: tar.TypeLink} {
		var b bytes.Buffer
		w := &tarWriter{tar: tar.NewWriter(&b), links: map[[2]uint64]string{}, names: names, buf: make([]byte, 10)}
		for _, name := range []string{"a", "b"} {
			fd, err := unix.Open(dir+"/"+name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if err != nil {
				t.Fatal(err)
			}
			if err := w.file(fd, name); err != nil {
				t.Fatal(err)
			}
		}
		r := tar.NewReader(&b)
		_, _ = r.Next() // the first is a file in any case
		if h, err := r.Next(); err != nil || h.Typeflag != want {
			t.Errorf("with names of %d bytes: %+v, %v, want type %c", names, h, err, want)
		}
	}
}
