package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/guest/guesttest"

	"github.com/sandboxd/sandboxd/internal/guest"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

func TestAppend(t *testing.T) {
	s := startInit(t)
	guesttest.Leaks(t)
	dir := guesttest.OddFiles(t)
	add := func(path, text string) error {
		f, err := s.Append(t.Context(), path, 0o640, 0, 0)
		if err != nil {
			return err
		}
		_, err = io.WriteString(f, text)
		return errors.Join(err, f.Close())
	}
	path := dir + "/new/log"
	if err := errors.Join(add(path, "one\n"), add(path, "two\n")); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(path); err != nil || string(got) != "one\ntwo\n" {
		t.Errorf("%q, %v", got, err)
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode() != 0o640 {
		t.Errorf("%v, %v", fi.Mode(), err)
	}
	if err := os.Chmod(path, 0o604); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Symlink(path, dir+"/link-to-log"), add(dir+"/link-to-log", "three\n"), add(dir+"/dangling", "x")); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(path); err != nil || string(got) != "one\ntwo\nthree\n" {
		t.Errorf("%q, %v", got, err)
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode() != 0o604 {
		t.Errorf("the mode of a file that was there is now %v, %v", fi.Mode(), err)
	}
	for path, want := range map[string]error{
		dir + "/fifo": guest.ErrNotRegular, dir + "/socket": guest.ErrNotRegular, dir + "/link-to-device": guest.ErrNotRegular, "/dev/null": guest.ErrNotRegular,
		"/proc/sys/kernel/core_pattern": guest.ErrNotRegular, dir: unix.EISDIR, dir + "/loop": unix.ELOOP,
	} {
		if err := add(path, "x"); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", path, err, want)
		}
	}
}

// An aborted write leaves nothing new: no file, and no directory for it.
func TestWritesThatEndLeaveNothing(t *testing.T) {
	s := startInit(t)
	guesttest.Leaks(t)
	dir := t.TempDir()
	if err := os.Mkdir(dir+"/old", 0o700); err != nil {
		t.Fatal(err)
	}
	appended := func(path string) *AppendedFile {
		t.Helper()
		f, err := s.Append(t.Context(), path, 0o600, 0, 0)
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	// One that stays holds the directory that both of them use.
	stays := appended(dir + "/new/stays")
	for _, path := range []string{dir + "/log", dir + "/old/log", dir + "/a/b/c/log", dir + "/new/log"} {
		if err := appended(path).Abort(); err != nil {
			t.Errorf("%s: %v", path, err)
		}
		f := appended(path)
		if err := f.file.Close(); err != nil { // nothing can be written
			t.Fatal(err)
		}
		if _, err := io.WriteString(f, "x"); !errors.Is(err, os.ErrClosed) {
			t.Errorf("%s: %v", path, err)
		}
		_ = f.Abort()
		pending, err := s.Create(t.Context(), path, 0o600, 0, 0)
		if err != nil {
			t.Fatal(err)
		}
		if err := pending.Abort(); err != nil {
			t.Errorf("%s: %v", path, err)
		}
	}
	if _, err := s.Append(t.Context(), dir+"/old/new/"+strings.Repeat("x", 256), 0o600, 0, 0); !errors.Is(err, unix.ENAMETOOLONG) {
		t.Errorf("a name that is too long: %v", err)
	}
	if _, err := s.Append(t.Context(), dir+"/a/"+strings.Repeat("x", 256)+"/log", 0o600, 0, 0); !errors.Is(err, unix.ENAMETOOLONG) {
		t.Errorf("a directory's name that is too long: %v", err)
	}
	if err := stays.Close(); err != nil {
		t.Error(err)
	}
	if got := s.sh(t, "cd "+dir+" && find . | sort"); got != ".\n./new\n./new/stays\n./old\n" {
		t.Errorf("there is now\n%s", got)
	}
}

// A directory that another makes just then, or that a link leads to by then, is none that init has
// made and may remove.
func TestWritesThatEndLeaveDirectoriesOfOthers(t *testing.T) {
	s := startInit(t)
	guesttest.Leaks(t)
	for name, other := range map[string]func(dir string) (made string){
		"made below": func(dir string) string {
			for made := dir + "/x/x"; ; {
				if err := os.Mkdir(made, 0o700); err == nil {
					return made
				} else if !errors.Is(err, os.ErrNotExist) {
					return "" // init was faster
				}
				if _, err := os.Lstat(dir + "/end"); err == nil {
					return ""
				}
			}
		},
		"put in the place": func(dir string) string {
			made := dir + "/kept/x"
			for {
				if err := os.Rename(dir+"/x", dir+"/away"); err == nil {
					_ = os.Symlink("kept/x", dir+"/x")
					return made
				}
				if _, err := os.Lstat(dir + "/end"); err == nil {
					return made
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			for range 100 {
				dir := t.TempDir()
				if err := os.MkdirAll(dir+"/kept/x", 0o700); err != nil {
					t.Fatal(err)
				}
				made := make(chan string, 1)
				go func() { made <- other(dir) }()
				if f, err := s.Create(t.Context(), dir+"/x/x/log", 0o600, 0, 0); err == nil {
					_ = f.Abort()
				}
				if err := os.Mkdir(dir+"/end", 0o700); err != nil {
					t.Fatal(err)
				}
				if path := <-made; path != "" {
					if _, err := os.Lstat(path); err != nil {
						t.Fatal(err)
					}
				}
			}
		})
	}
}

// The first writer makes the file; the others append to it.
func TestAppendOfManyToANewFile(t *testing.T) {
	s := startInit(t)
	guesttest.Leaks(t)
	dir := t.TempDir()
	const writers = 8
	for i := range 100 {
		path := fmt.Sprintf("%s/log%d", dir, i)
		errs := make([]error, writers)
		var wg sync.WaitGroup
		for w := range writers {
			wg.Go(func() {
				f, err := s.Append(t.Context(), path, 0o644, 0, 0)
				if err == nil {
					_, err = io.WriteString(f, "x")
					err = errors.Join(err, f.Close())
				}
				errs[w] = err
			})
		}
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(path); err != nil || len(got) != writers {
			t.Errorf("%q, %v", got, err)
		}
	}
}

func (s *sandbox) listed(t *testing.T, path string, depth int) ([]string, bool) {
	t.Helper()
	var list []string
	more, err := s.List(t.Context(), path, depth, func(e Entry) error {
		line := e.Mode.String() + " " + e.Path
		if e.Link != "" {
			line += " -> " + e.Link
		}
		list = append(list, line)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(list)
	return list, more
}

func TestList(t *testing.T) {
	s := startInit(t)
	guesttest.Leaks(t)
	dir := guesttest.OddFiles(t)
	if err := errors.Join(os.MkdirAll(dir+"/a/b/c", 0o755), os.WriteFile(dir+"/a/odd \xff", nil, 0o600), os.Mkdir(dir+"/empty", 0o700)); err != nil {
		t.Fatal(err)
	}
	want := []string{
		"Lrwxrwxrwx dangling -> nothing", "Lrwxrwxrwx link-to-device -> /dev/zero", "Lrwxrwxrwx link-to-dir -> .",
		"Lrwxrwxrwx link-to-fifo -> fifo", "Lrwxrwxrwx link-to-proc -> /proc/self/status", "Lrwxrwxrwx loop -> loop",
		"Srwxr-xr-x socket", "drwx------ empty", "drwxr-xr-x a", "prw-r--r-- fifo",
	}
	got, more := s.listed(t, dir, 1)
	if diff := cmp.Diff(want, got); diff != "" || more {
		t.Error(diff, more)
	}
	if got, more := s.listed(t, dir+"/a/", 2); more || !cmp.Equal(got, []string{"-rw------- odd \xff", "drwxr-xr-x b", "drwxr-xr-x b/c"}) {
		t.Errorf("%q %v", got, more)
	}
	if got, more := s.listed(t, dir+"/empty", guest.MaxListDepth); len(got) != 0 || more {
		t.Errorf("%q %v", got, more)
	}
	// The kernel's file systems are listed when asked for, and not entered otherwise.
	if got, _ := s.listed(t, "/proc/self", 1); !slices.ContainsFunc(got, func(l string) bool { return strings.HasSuffix(l, " status") }) {
		t.Errorf("%q", got)
	}
	for path, want := range map[string]error{
		dir + "/fifo": unix.ENOTDIR, dir + "/nothing": fs.ErrNotExist, dir + "/loop": unix.ELOOP, "relative": unix.EINVAL,
	} {
		if _, err := s.List(t.Context(), path, 1, func(Entry) error { return nil }); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", path, err, want)
		}
	}
	if _, err := s.List(t.Context(), dir, guest.MaxListDepth+1, func(Entry) error { return nil }); !errors.Is(err, unix.EINVAL) {
		t.Errorf("depth: %v", err)
	}
}

// Thousands of files exceed a packet, and a caller can stop in between.
func TestListOfMany(t *testing.T) {
	s := startInit(t)
	guesttest.Leaks(t)
	dir := t.TempDir()
	const n = 3000
	for i := range n {
		if err := os.WriteFile(fmt.Sprintf("%s/%04d-%s", dir, i, strings.Repeat("x", 200)), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if got, more := s.listed(t, dir, 1); len(got) != n || more {
		t.Errorf("%d %v", len(got), more)
	}
	enough, seen := errors.New("enough"), 0
	if _, err := s.List(t.Context(), dir, 1, func(Entry) error {
		if seen++; seen == 200 {
			return enough
		}
		return nil
	}); !errors.Is(err, enough) {
		t.Error(err)
	}
	if err := s.Ping(t.Context()); err != nil {
		t.Error(err)
	}
}

// deep makes a tree of directories, each in the one before. Some file systems have a limit.
func deep(t *testing.T, dir string, levels int) {
	t.Helper()
	fd, err := unix.Open(dir, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	for range levels {
		if err := unix.Mkdirat(fd, "d", 0o755); err != nil {
			t.Fatal(err)
		}
		next, err := unix.Openat(fd, "d", unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		_ = unix.Close(fd)
		fd = next
	}
	_ = unix.Close(fd)
}

func TestDeepTrees(t *testing.T) {
	s := startInit(t)
	guesttest.Leaks(t)
	dir := t.TempDir()
	deep(t, dir, 5000) // longer than any path
	got, more := s.listed(t, dir, guest.MaxListDepth)
	if len(got) != guest.MaxListDepth || !more {
		t.Errorf("%d entries, more %v", len(got), more)
	}
	if err := s.Remove(t.Context(), dir+"/d", true); err != nil {
		t.Error(err)
	}
	if got := guesttest.Tree(t, dir); len(got) != 0 {
		t.Errorf("left: %d", len(got))
	}
}

func TestMkdir(t *testing.T) {
	s := startInit(t)
	guesttest.Leaks(t)
	dir := guesttest.OddFiles(t)
	for _, tc := range []struct {
		path    string
		parents bool
		want    error
	}{
		{dir + "/a", false, nil},
		{dir + "/a", false, fs.ErrExist},
		{dir + "/a", true, nil},
		{dir + "/b/c/", false, fs.ErrNotExist},
		{dir + "/b/c/", true, nil},
		{dir + "/link-to-dir", true, nil},
		{dir + "/fifo", true, fs.ErrExist},
		{dir + "/dangling", true, fs.ErrExist},
		{dir + "/fifo/x", true, unix.ENOTDIR},
		{"/", false, fs.ErrExist},
		{"/", true, nil},
		{"/proc/x", false, guest.ErrNotRegular},
	} {
		if err := s.Mkdir(t.Context(), tc.path, tc.parents, 0o711, 0, 0); !errors.Is(err, tc.want) || tc.want == nil && err != nil {
			t.Errorf("%s (%v): %v, want %v", tc.path, tc.parents, err, tc.want)
		}
	}
	for path, mode := range map[string]fs.FileMode{"a": 0o711, "b": 0o755, "b/c": 0o711} {
		if fi, err := os.Stat(dir + "/" + path); err != nil || fi.Mode() != mode|fs.ModeDir {
			t.Errorf("%s: %v, %v", path, fi, err)
		}
	}
}

func TestMove(t *testing.T) {
	s := startInit(t)
	guesttest.Leaks(t)
	dir := guesttest.OddFiles(t)
	for _, err := range []error{
		os.WriteFile(dir+"/file", []byte("file"), 0o600), os.WriteFile(dir+"/other", []byte("other"), 0o600),
		os.Link(dir+"/file", dir+"/hard"), os.MkdirAll(dir+"/full/x", 0o755), os.MkdirAll(dir+"/dir/y", 0o755), os.Mkdir(dir+"/empty", 0o755),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, tc := range []struct {
		from, to  string
		overwrite bool
		want      error
	}{
		{dir + "/nothing", dir + "/x", false, fs.ErrNotExist},
		{dir + "/file", dir + "/no/x", false, fs.ErrNotExist},
		{dir + "/file", dir + "/other", false, fs.ErrExist},
		{dir + "/file", dir + "/file", true, fs.ErrExist},
		{dir + "/file", dir + "/link-to-dir/file", true, fs.ErrExist},
		{dir + "/file", dir + "/hard", true, fs.ErrExist},
		{dir + "/dir", dir + "/dir/y/z", false, unix.EINVAL},
		{dir + "/dir", dir + "/full", true, unix.ENOTEMPTY},
		{dir + "/file", dir + "/empty", true, unix.EISDIR},
		{dir + "/dir", dir + "/file", true, unix.ENOTDIR},
		{"/", dir + "/x", false, unix.EBUSY},
		{dir + "/file", "/", true, unix.EBUSY},
		{"/proc/version", dir + "/x", true, guest.ErrNotRegular},
		{dir + "/file", dir + "/other", true, nil},
		{dir + "/dir/", dir + "/empty/", true, nil},
		{dir + "/dangling", dir + "/moved", false, nil}, // the link is moved, not its target
		{dir + "/fifo", dir + "/moved-fifo", false, nil},
	} {
		if err := s.Move(t.Context(), tc.from, tc.to, tc.overwrite); !errors.Is(err, tc.want) || tc.want == nil && err != nil {
			t.Errorf("%s to %s (%v): %v, want %v", tc.from, tc.to, tc.overwrite, err, tc.want)
		}
	}
	if got, err := os.ReadFile(dir + "/other"); err != nil || string(got) != "file" {
		t.Errorf("%q, %v", got, err)
	}
	if link, err := os.Readlink(dir + "/moved"); err != nil || link != "nothing" {
		t.Errorf("%q, %v", link, err)
	}
	if _, err := os.Stat(dir + "/empty/y"); err != nil {
		t.Error(err)
	}
}

func TestRemove(t *testing.T) {
	s := startInit(t)
	guesttest.Leaks(t)
	dir := guesttest.OddFiles(t)
	keep := t.TempDir()
	for _, err := range []error{
		os.WriteFile(keep+"/kept", nil, 0o600), os.MkdirAll(dir+"/full/x/y", 0o755), os.Symlink(keep, dir+"/full/x/out"),
		os.Symlink(keep, dir+"/out"), os.Mkdir(dir+"/empty", 0o755),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	s.sh(t, "mkdir -p "+dir+"/mount/below && mount -t tmpfs x "+dir+"/mount/below && echo x >"+dir+"/mount/below/file")
	busy := error(unix.EBUSY)
	if os.Getuid() != 0 {
		busy = unix.EACCES // the host's "/" is not this sandbox's to write in
	}
	for _, tc := range []struct {
		path      string
		recursive bool
		want      error
	}{
		{dir + "/nothing", true, fs.ErrNotExist},
		{dir + "/full", false, unix.ENOTEMPTY},
		{dir + "/empty", false, nil},
		{dir + "/fifo", false, nil},
		{dir + "/socket", false, nil},
		{dir + "/out", true, nil},
		{dir + "/full/", true, nil},
		{dir + "/mount", true, unix.EBUSY},
		{dir + "/mount/below", true, unix.EBUSY},
		{"/", false, unix.EBUSY}, // not recursive: this sandbox shares the host's files
		{"/proc/1", true, guest.ErrNotRegular},
		{"/proc", true, busy},
		{dir + "/.", true, unix.EBUSY},
	} {
		if err := s.Remove(t.Context(), tc.path, tc.recursive); !errors.Is(err, tc.want) || tc.want == nil && err != nil {
			t.Errorf("%s (%v): %v, want %v", tc.path, tc.recursive, err, tc.want)
		}
	}
	if got := s.sh(t, "cat "+dir+"/mount/below/file"); got != "x\n" {
		t.Errorf("what was mounted has %q", got)
	}
	if _, err := os.Stat(keep + "/kept"); err != nil {
		t.Error(err)
	}
	for _, name := range []string{"full", "out", "empty", "fifo"} {
		if _, err := os.Lstat(dir + "/" + name); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// While a tree is removed, its directories turn into links to others and back. None of those is
// touched.
func TestRemoveIsNotLedAstray(t *testing.T) {
	s := startInit(t)
	guesttest.Leaks(t)
	keep := t.TempDir()
	for i := range 50 {
		if err := os.WriteFile(fmt.Sprintf("%s/%d", keep, i), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	base := t.TempDir()
	for round := range 300 {
		dir := filepath.Join(base, strconv.Itoa(round))
		const dirs = 4
		for i := range dirs {
			if err := errors.Join(os.MkdirAll(fmt.Sprintf("%s/d/%d/x", dir, i), 0o755), os.WriteFile(fmt.Sprintf("%s/d/%d/f", dir, i), nil, 0o600)); err != nil {
				t.Fatal(err)
			}
		}
		link := dir + "-link"
		if err := os.Symlink(keep, link); err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		swaps, begun := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(swaps)
			for i := 0; ; i++ {
				if i == dirs {
					close(begun)
				}
				select {
				case <-done:
					return
				default:
					name := fmt.Sprintf("%s/d/%d", dir, i%dirs)
					for range 2 { // there and back
						_ = unix.Renameat2(unix.AT_FDCWD, name, unix.AT_FDCWD, link, unix.RENAME_EXCHANGE)
					}
				}
			}
		}()
		<-begun
		err := s.Remove(t.Context(), dir, true)
		close(done)
		<-swaps
		if e := (*guest.Error)(nil); err != nil && !errors.As(err, &e) {
			t.Fatal(err)
		}
		if entries, err := os.ReadDir(keep); err != nil || len(entries) != 50 {
			t.Fatalf("%d files are left of 50 (%v)", len(entries), err)
		}
	}
}

// watched collects the changes of a watch until it ends. Other processes of this user may have
// taken all that the kernel gives it of inotify for a moment.
func (s *sandbox) watched(t *testing.T, path string, recursive bool) (next func() Change, stop func() error) {
	t.Helper()
	var err error
	guesttest.WaitFor(t, func() bool {
		next, stop, err = s.tryWatched(t, path, recursive)
		return !errors.Is(err, unix.EMFILE)
	})
	if err != nil {
		t.Fatal(err)
	}
	return next, stop
}

func (s *sandbox) tryWatched(t *testing.T, path string, recursive bool) (next func() Change, stop func() error, err error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	changes := make(chan Change, 10000)
	ready := make(chan struct{})
	done := make(chan error, 1)
	go func() {
		done <- s.Watch(ctx, path, recursive, func() error { close(ready); return nil }, func(c Change) error {
			changes <- c
			return nil
		})
		close(changes)
	}()
	select {
	case <-ready:
	case err := <-done:
		cancel()
		return nil, nil, err
	}
	return func() Change {
			t.Helper()
			select {
			case c, ok := <-changes:
				if !ok {
					return Change{Kind: "end"}
				}
				return c
			case <-time.After(testenv.HungAfter):
				t.Fatal("nothing is told")
			}
			panic("unreachable")
		}, func() error {
			cancel()
			for range changes {
			}
			return <-done
		}, nil
}

func TestWatch(t *testing.T) {
	s := startInit(t)
	guesttest.Leaks(t)
	dir := t.TempDir()
	outside := t.TempDir()
	if err := os.MkdirAll(dir+"/old/deep", 0o755); err != nil {
		t.Fatal(err)
	}
	next, stop := s.watched(t, dir, true)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	want := func(what ...Change) {
		t.Helper()
		for _, w := range what {
			if got := next(); got != w {
				t.Fatalf("got %+v, want %+v", got, w)
			}
		}
	}
	must(os.WriteFile(dir+"/old/deep/f", []byte("x"), 0o600))
	want(Change{Kind: guest.ChangeCreated, Path: "old/deep/f"}, Change{Kind: guest.ChangeModified, Path: "old/deep/f"})
	must(os.Chmod(dir+"/old/deep/f", 0o640))
	want(Change{Kind: guest.ChangeAttributes, Path: "old/deep/f"})
	must(os.Rename(dir+"/old/deep/f", dir+"/g"))
	want(Change{Kind: guest.ChangeMoved, Path: "old/deep/f", To: "g"})
	must(os.Mkdir(dir+"/new", 0o755))
	want(Change{Kind: guest.ChangeCreated, Path: "new", Dir: true})
	for got := next; ; { // perhaps found, perhaps reported, perhaps both
		must(os.WriteFile(dir+"/new/h", nil, 0o600))
		if c := got(); c == (Change{Kind: guest.ChangeCreated, Path: "new/h"}) {
			break
		}
	}
	// A directory that moves takes its content along.
	must(os.Rename(dir+"/old", dir+"/moved"))
	for next() != (Change{Kind: guest.ChangeMoved, Path: "old", To: "moved", Dir: true}) {
	}
	must(os.WriteFile(dir+"/moved/deep/i", nil, 0o600))
	want(Change{Kind: guest.ChangeCreated, Path: "moved/deep/i"})
	// Moved away, its events are not reported any more; then it comes back.
	must(os.Rename(dir+"/moved", outside+"/away"))
	want(Change{Kind: guest.ChangeDeleted, Path: "moved", Dir: true})
	must(os.WriteFile(outside+"/away/deep/j", nil, 0o600))
	must(os.Remove(dir + "/g"))
	want(Change{Kind: guest.ChangeDeleted, Path: "g"})
	must(os.Rename(outside+"/away", dir+"/back"))
	want(Change{Kind: guest.ChangeCreated, Path: "back", Dir: true}, Change{Kind: guest.ChangeCreated, Path: "back/deep", Dir: true})
	for next() != (Change{Kind: guest.ChangeCreated, Path: "back/deep/j"}) {
	}
	must(os.RemoveAll(dir))
	for {
		c := next()
		if c.Kind == "end" {
			break
		}
		if c.Kind != guest.ChangeDeleted && c.Kind != guest.ChangeCreated && c.Kind != guest.ChangeAttributes {
			t.Errorf("%+v", c)
		}
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
}

func TestWatchOfOneFile(t *testing.T) {
	s := startInit(t)
	guesttest.Leaks(t)
	path := t.TempDir() + "/file"
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	next, stop := s.watched(t, path, true)
	if err := os.WriteFile(path, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := next(); got != (Change{Kind: guest.ChangeModified}) {
		t.Errorf("%+v", got)
	}
	if err := os.Rename(path, path+"2"); err != nil {
		t.Fatal(err)
	}
	for next() != (Change{Kind: guest.ChangeDeleted}) {
	}
	if got := next(); got.Kind != "end" {
		t.Errorf("after the end: %+v", got)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
	for path, want := range map[string]error{"/no/such": fs.ErrNotExist, "/proc/self": guest.ErrNotRegular} {
		if err := s.Watch(t.Context(), path, false, func() error { return nil }, nil); !errors.Is(err, want) {
			t.Errorf("%s: %v", path, err)
		}
	}
}

func TestWatchesAreBounded(t *testing.T) {
	s := startInit(t)
	guesttest.Leaks(t)
	dir := t.TempDir()
	var stops []func() error
	for range guest.MaxWatches {
		_, stop := s.watched(t, dir, false)
		stops = append(stops, stop)
	}
	if err := s.Watch(t.Context(), dir, false, func() error { return nil }, nil); !errors.Is(err, unix.EMFILE) {
		t.Errorf("one too many: %v", err)
	}
	for _, stop := range stops {
		if err := stop(); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	}
	// Init has noticed.
	guesttest.WaitFor(t, func() bool {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		return errors.Is(s.Watch(ctx, dir, false, func() error { cancel(); return nil }, nil), context.Canceled)
	})
}

// A tree with more directories than can be watched is reported as such, and the watched ones are
// reported.
func TestWatchOfTooMany(t *testing.T) {
	s := startInit(t)
	guesttest.Leaks(t)
	dir := t.TempDir()
	for i := range guest.MaxWatched + 10 {
		if err := os.Mkdir(fmt.Sprintf("%s/%d", dir, i), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	next, stop := s.watched(t, dir, true)
	if got := next(); got.Kind != guest.ChangeOverflow {
		t.Errorf("%+v", got)
	}
	if err := os.WriteFile(dir+"/f", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := next(); got != (Change{Kind: guest.ChangeCreated, Path: "f"}) {
		t.Errorf("%+v", got)
	}
	// The number is that of all watches, and is given back.
	small := t.TempDir()
	if err := os.Mkdir(small+"/d", 0o700); err != nil {
		t.Fatal(err)
	}
	other, stopOther := s.watched(t, small, true)
	if got := other(); got != (Change{Kind: guest.ChangeOverflow, Path: "d"}) {
		t.Errorf("%+v", got)
	}
	for _, stop := range []func() error{stop, stopOther} {
		if err := stop(); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	}
	for deadline := time.Now().Add(testenv.HungAfter); ; {
		next, stop, err := s.tryWatched(t, small, true)
		if errors.Is(err, unix.EMFILE) && time.Now().Before(deadline) {
			continue // init is about to see that the ones before have ended
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(small+"/d", 0o700); err != nil {
			t.Fatal(err)
		}
		got := next()
		if err := stop(); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		if got == (Change{Kind: guest.ChangeAttributes, Path: "d", Dir: true}) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%+v", got)
		}
	}
}

// More happens than the kernel queues while the events are not read.
func TestWatchTellsWhatItMissed(t *testing.T) {
	s := startInit(t)
	guesttest.Leaks(t)
	dir := t.TempDir()
	if err := errors.Join(os.WriteFile(dir+"/a", nil, 0o600), os.WriteFile(dir+"/b", nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	overflow := errors.New("overflow")
	once := false
	var err error
	guesttest.WaitFor(t, func() bool { // as in watched
		err = s.Watch(ctx, dir, true, func() error {
			return os.Chmod(dir+"/a", 0o600)
		}, func(c Change) error {
			if !once {
				once = true
				for range 40000 {
					if err := errors.Join(os.Chmod(dir+"/a", 0o600), os.Chmod(dir+"/b", 0o600)); err != nil {
						return err
					}
				}
			}
			if c.Kind == guest.ChangeOverflow {
				return overflow
			}
			return nil
		})
		return !errors.Is(err, unix.EMFILE)
	})
	if !errors.Is(err, overflow) {
		t.Error(err)
	}
}
