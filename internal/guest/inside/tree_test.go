package inside

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/guest/guesttest"

	"golang.org/x/sys/unix"
)

// A move is reported as one, however long this process is delayed between its two halves, or
// between its deadline and the queue.
func TestBothHalvesOfAMoveAreFound(t *testing.T) {
	for name, wait := range map[string]time.Duration{"in time": otherHalf, "late": -time.Second} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.WriteFile(dir+"/from", nil, 0o600); err != nil {
				t.Fatal(err)
			}
			var fd int
			var err error
			guesttest.WaitFor(t, func() bool { // other tests of the same user may have all that he may
				fd, err = unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
				return !errors.Is(err, unix.EMFILE)
			})
			if err != nil {
				t.Fatal(err)
			}
			w := &watcher{s: &server{maxDirs: 8}, at: dir, inotify: os.NewFile(uintptr(fd), "inotify"), fd: fd, nodes: map[int32]*watchNode{}}
			defer w.inotify.Close()
			root, err := unix.Open(dir, unix.O_PATH|unix.O_CLOEXEC, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = unix.Close(root) }()
			if w.top, err = w.add(root, nil, "", watchSelf); err != nil {
				t.Fatal(err)
			}
			buf := make([]byte, unix.SizeofInotifyEvent+16) // the kernel gives whole events: one of these
			half := func(from, to string) []watchEvent {
				t.Helper()
				if err := os.Rename(filepath.Join(dir, from), filepath.Join(dir, to)); err != nil {
					t.Fatal(err)
				}
				n, err := w.inotify.Read(buf)
				if err != nil {
					t.Fatal(err)
				}
				events := parseEvents(buf[:n])
				if len(events) != 1 || len(halfMoved(events)) != 1 {
					t.Fatalf("%+v is not the first half", events)
				}
				return events
			}
			if got := w.late(buf, half("from", "to"), wait); len(got) != 2 || otherEnd(got, 0) != 1 {
				t.Errorf("%+v", got)
			}
			if got := w.rest(buf, half("to", "from")); len(got) != 2 || otherEnd(got, 0) != 1 {
				t.Errorf("%+v", got)
			}
		})
	}
}

// All readers of directories share one budget of descriptors, and return them.
func TestDirectoriesHaveOneBudget(t *testing.T) {
	s := &server{maxDirs: 2}
	dir := t.TempDir()
	open := func() (dirReader, error) {
		return s.reader(func() (int, error) { return unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0) })
	}
	if _, err := s.reader(func() (int, error) { return -1, unix.ENOENT }); !errors.Is(err, unix.ENOENT) {
		t.Error(err)
	}
	first, err := open()
	if err != nil {
		t.Fatal(err)
	}
	second, err := open()
	if err != nil {
		t.Fatal(err)
	}
	defer second.close()
	if _, err := open(); !errors.Is(err, unix.EMFILE) {
		t.Errorf("a third: %v", err)
	}
	first.close()
	third, err := open()
	if err != nil {
		t.Fatal(err)
	}
	third.close()
	if n := s.dirs.Load(); n != 1 {
		t.Errorf("%d are counted", n)
	}
}

// A directory that another process removes while it is read is empty, which is no error.
func TestDirectoryThatIsRemovedWhileItIsRead(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(dir+"/d", 0o700); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Open(dir+"/d", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	r := dirReader{s: new(server), fd: fd}
	defer r.close()
	if err := os.Remove(dir + "/d"); err != nil {
		t.Fatal(err)
	}
	if name, _, err := r.next(); name != "" || err != nil {
		t.Errorf("next: %q, %v", name, err)
	}
}

// A directory that a removal, a list or a watch opens below the first one is no link, and leads not
// out of it.
func TestOpenDirFollowsNothing(t *testing.T) {
	guesttest.Leaks(t)
	dir := guesttest.OddFiles(t)
	if err := errors.Join(os.MkdirAll(dir+"/a/b", 0o755), os.Symlink("b", dir+"/a/link"), os.Symlink("a", dir+"/to-a")); err != nil {
		t.Fatal(err)
	}
	at, err := unix.Open(dir, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(at) }()
	for name, want := range map[string]error{
		"a": nil, "a/b": nil, ".": nil, "a/link": unix.ELOOP, "to-a/b": unix.ELOOP, "link-to-dir": unix.ELOOP, "fifo": unix.ENOTDIR,
		"..": unix.EXDEV, "a/../../x": unix.EXDEV, dir: unix.EXDEV, "nothing": unix.ENOENT,
	} {
		fd, err := openDir(at, name, 0)
		if err == nil {
			_ = unix.Close(fd)
		}
		if errors.Is(err, unix.ENOTDIR) && errors.Is(want, unix.ELOOP) {
			err = want // a link in the last place is no directory
		}
		if !errors.Is(err, want) || want == nil && err != nil {
			t.Errorf("%s: %v, want %v", name, err, want)
		}
	}
}
