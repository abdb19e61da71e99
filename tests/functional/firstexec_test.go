package functional

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// A sandbox of an image that is here, by a daemon that has just started, and its first exec open
// the image's configuration and the files that the program needs, and list no directory: no blob
// of a layer and no tree is gone through, so there is no work that grows with the image.
func TestFirstExecDoesNotGoThroughTheImage(t *testing.T) {
	d := start(t)
	registry := harness.LyingRegistry(t, nil)
	var files []harness.File
	for i := range 2000 {
		files = append(files, harness.File{Name: fmt.Sprintf("tree/%d/%d", i%40, i), Body: fmt.Sprint(i)})
	}
	image := harness.Image(t, v1.Config{Env: []string{"PATH=/bin"}},
		harness.Layer(t, "gzip", harness.Tar(t, harness.Busybox(t)...)), harness.Layer(t, "gzip", harness.Tar(t, files...)))
	config, err := image.ConfigName()
	if err != nil {
		t.Fatal(err)
	}
	large := registry.Push(t, "team/large:1", image)
	d.MustPull(t, large)
	d.Create(t, api.CreateSandbox{Image: large}).Delete(t) // the launcher's one-time work
	d.Kill9(t)
	d.Launch(t)

	w := watchFiles(t)
	blobs := filepath.Join(d.DataDir, "blobs", "blobs", "sha256")
	if err := w.add(blobs); err != nil {
		t.Fatal(err)
	}
	dirs := 0
	err = filepath.WalkDir(filepath.Join(d.DataDir, "layers"), func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.IsDir() && path != filepath.Join(d.DataDir, "layers") { // where it is looked whether a layer is there
			err = w.add(path)
			dirs++
		}
		if errors.Is(err, fs.ErrPermission) {
			return fs.SkipDir // root's home in the image, which this user cannot look into
		}
		return err
	})
	if err != nil || dirs < 40 {
		t.Fatalf("%d directories: %v", dirs, err)
	}
	w.seen(t) // adding them has opened them
	if got := d.Create(t, api.CreateSandbox{Image: large}).Sh(t, "cat /tree/3/1003"); got != "1003" {
		t.Errorf("the program said %q", got)
	}
	opened := w.seen(t)
	var names []string
	for _, path := range opened {
		names = append(names, filepath.Base(path))
	}
	slices.Sort(names)
	want := []string{"1003", "busybox", "passwd", config.Hex}
	slices.Sort(want)
	if diff := cmp.Diff(want, slices.Compact(names)); diff != "" {
		t.Errorf("opened or listed (-want +got):\n%s\n%s", diff, strings.Join(opened, "\n"))
	}
	// The control: a walk of the tree is seen.
	if err := filepath.WalkDir(filepath.Join(d.DataDir, "layers"), func(_ string, _ fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrPermission) {
			return fs.SkipDir
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if n := len(w.seen(t)); n < 40 {
		t.Errorf("control: a walk opens %d", n)
	}
}

// fileWatch reports files opened in directories.
type fileWatch struct {
	fd   int
	dirs map[int32]string
}

func watchFiles(t *testing.T) *fileWatch {
	t.Helper()
	fd, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	return &fileWatch{fd, make(map[int32]string)}
}

func (w *fileWatch) add(dir string) error {
	wd, err := unix.InotifyAddWatch(w.fd, dir, unix.IN_OPEN|unix.IN_ACCESS)
	if err != nil {
		return fmt.Errorf("watch %s: %w", dir, err)
	}
	w.dirs[int32(wd)] = dir
	return nil
}

// seen are the files that were opened and the directories that were listed since it was asked last.
func (w *fileWatch) seen(t *testing.T) (names []string) {
	t.Helper()
	buf := make([]byte, 64<<10)
	for {
		n, err := unix.Read(w.fd, buf)
		if errors.Is(err, unix.EAGAIN) {
			return names
		}
		if err != nil {
			t.Fatal(err)
		}
		for at := 0; at < n; {
			mask := binary.NativeEndian.Uint32(buf[at+4:])
			wd := int32(binary.NativeEndian.Uint32(buf[at:]))
			length := int(binary.NativeEndian.Uint32(buf[at+12:]))
			name := string(bytes.TrimRight(buf[at+unix.SizeofInotifyEvent:at+unix.SizeofInotifyEvent+length], "\x00"))
			if wd < 0 {
				t.Fatal("there was more than the kernel keeps")
			}
			if mask&unix.IN_ISDIR == 0 || mask&unix.IN_ACCESS != 0 {
				names = append(names, filepath.Join(w.dirs[wd], name))
			}
			at += unix.SizeofInotifyEvent + length
		}
	}
}
