package host

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/guest/guesttest"

	"github.com/sandboxd/sandboxd/internal/guest"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func TestOpen(t *testing.T) {
	s := startInit(t)
	guesttest.Leaks(t)
	dir := t.TempDir()
	content := []byte("content\n")
	path := filepath.Join(dir, "odd \xff name")
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(path, filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{path, dir + "/link", dir + "/../" + filepath.Base(dir) + "/link"} {
		f, err := s.Open(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(f)
		if err != nil || !bytes.Equal(got, content) {
			t.Errorf("%q, %v", got, err)
		}
		if _, err := f.Write(content); err == nil {
			t.Error("the file can be written")
		}
		_ = f.Close()
	}
}

func TestOpenAndCreateRefuseWithoutBlocking(t *testing.T) {
	s := startInit(t)
	guesttest.Leaks(t)
	dir := guesttest.OddFiles(t)
	for _, tc := range []struct {
		path         string
		open, create error
	}{
		{dir + "/fifo", guest.ErrNotRegular, guest.ErrNotRegular},
		{dir + "/socket", guest.ErrNotRegular, guest.ErrNotRegular},
		{dir + "/link-to-fifo", guest.ErrNotRegular, guest.ErrNotRegular},
		{dir + "/link-to-device", guest.ErrNotRegular, guest.ErrNotRegular},
		{"/dev/null", guest.ErrNotRegular, guest.ErrNotRegular},
		{dir + "/loop", unix.ELOOP, unix.ELOOP},
		{dir, unix.EISDIR, unix.EISDIR},
		{dir + "/link-to-dir", unix.EISDIR, unix.EISDIR},
		{dir + "/", unix.EISDIR, unix.EISDIR},
		{dir + "/..", unix.EISDIR, unix.EISDIR},
		{dir + "/nothing", fs.ErrNotExist, nil},
		{dir + "/fifo/below", unix.ENOTDIR, unix.ENOTDIR},
		{"/proc/1/mem", guest.ErrNotRegular, guest.ErrNotRegular},
		{"/proc/self/status", guest.ErrNotRegular, guest.ErrNotRegular},
		{"/proc/sys/kernel/core_pattern", guest.ErrNotRegular, guest.ErrNotRegular},
		{dir + "/link-to-proc", guest.ErrNotRegular, guest.ErrNotRegular},
		{"/proc/self/fd/3", unix.ELOOP, guest.ErrNotRegular}, // init's own; a magic link is a link to a nameless file
		{"/proc/self/exe", unix.ELOOP, nil},                  // see below
		{"/proc/self/root" + dir + "/nothing", unix.ELOOP, unix.ELOOP},
		{"relative", unix.EINVAL, unix.EINVAL},
		{"", unix.EINVAL, unix.EINVAL},
		{dir + "/a\x00b", unix.EINVAL, unix.EINVAL},
		{"/" + strings.Repeat("x", 256), unix.ENAMETOOLONG, unix.ENAMETOOLONG},
		{"/" + strings.Repeat("x", guest.MaxPath), unix.ENAMETOOLONG, unix.ENAMETOOLONG},
	} {
		t.Run(tc.path[:min(len(tc.path), 80)], func(t *testing.T) {
			f, err := s.Open(t.Context(), tc.path)
			if !errors.Is(err, tc.open) {
				t.Errorf("Open: %v, want %v", err, tc.open)
			}
			if err == nil {
				_ = f.Close()
			}
			if tc.create == nil {
				return
			}
			p, err := s.Create(t.Context(), tc.path, 0o644, 0, 0)
			if !errors.Is(err, tc.create) {
				t.Errorf("Create: %v, want %v", err, tc.create)
			}
			if err == nil {
				_ = p.Abort()
			}
		})
	}
}

func TestCreate(t *testing.T) {
	s := startInit(t)
	guesttest.Leaks(t)
	dir := t.TempDir()
	write := func(t *testing.T, path, content string) *PendingFile {
		t.Helper()
		p, err := s.Create(t.Context(), path, 0o640, 0, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := p.File.WriteString(content); err != nil {
			t.Fatal(err)
		}
		return p
	}
	want := func(t *testing.T, path, content string) {
		t.Helper()
		got, err := os.ReadFile(path)
		if err != nil || string(got) != content {
			t.Errorf("%s: %q, %v, want %q", path, got, err, content)
		}
	}
	names := func(dir string) []string {
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, e := range entries {
			names = append(names, e.Name())
		}
		return names
	}

	t.Run("new, with parents", func(t *testing.T) {
		path := filepath.Join(dir, "a/b/c.txt")
		p := write(t, path, "one")
		if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("there before Commit: %v", err)
		}
		if err := p.Commit(); err != nil {
			t.Fatal(err)
		}
		want(t, path, "one")
		fi, err := os.Stat(path)
		if err != nil || fi.Mode() != 0o640 {
			t.Errorf("%v, %v", fi.Mode(), err)
		}
		if fi, err := os.Stat(filepath.Dir(path)); err != nil || fi.Mode().Perm() != 0o755 {
			t.Errorf("%v, %v", fi.Mode(), err)
		}
		if err := p.Commit(); err == nil {
			t.Error("second Commit succeeded")
		}
		if err := p.Abort(); err != nil {
			t.Error(err)
		}
	})
	t.Run("replace", func(t *testing.T) {
		path := filepath.Join(dir, "a/b/c.txt")
		p := write(t, path, "two")
		want(t, path, "one")
		if err := p.Commit(); err != nil {
			t.Fatal(err)
		}
		want(t, path, "two")
	})
	t.Run("through a link", func(t *testing.T) {
		if err := errors.Join(os.Symlink("b/../b/c.txt", dir+"/a/link"), os.Symlink(dir+"/new/file", dir+"/dangling")); err != nil {
			t.Fatal(err)
		}
		if err := write(t, dir+"/a/link", "three").Commit(); err != nil {
			t.Fatal(err)
		}
		want(t, dir+"/a/b/c.txt", "three")
		if err := write(t, dir+"/dangling", "four").Commit(); err != nil {
			t.Fatal(err)
		}
		want(t, dir+"/new/file", "four")
		if _, err := os.Readlink(dir + "/a/link"); err != nil {
			t.Error(err)
		}
	})
	t.Run("abort", func(t *testing.T) {
		if err := write(t, dir+"/aborted/x", "x").Abort(); err != nil {
			t.Fatal(err)
		}
		if got := names(dir); slices.Contains(got, "aborted") {
			t.Errorf("left: %v", got)
		}
	})
	t.Run("closed connection", func(t *testing.T) {
		p := write(t, dir+"/closed/x", "x")
		_ = p.conn.Close()
		_ = p.File.Close()
		if !guesttest.Within(t, func() bool { return !slices.Contains(names(dir), "closed") }) {
			t.Fatalf("left: %v", names(dir))
		}
	})
	t.Run("target becomes a directory", func(t *testing.T) {
		p := write(t, dir+"/race/x", "x")
		if err := os.Mkdir(dir+"/race/x", 0o755); err != nil {
			t.Fatal(err)
		}
		if e := asError(t, p.Commit()); e.Stage != guest.StageCommit || e.Errno != unix.EISDIR {
			t.Error(e)
		}
		// The answer is sent before the file is removed.
		if err := s.Ping(t.Context()); err != nil {
			t.Fatal(err)
		}
		if !guesttest.Within(t, func() bool { return len(names(dir+"/race")) == 1 }) {
			t.Fatalf("left: %v", names(dir+"/race"))
		}
	})
	t.Run("owner", func(t *testing.T) {
		if ids() == 1 {
			t.Skip("an ordinary user has a single id")
		}
		p, err := s.Create(t.Context(), dir+"/owned/x", 0o600, 1000, 1001)
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Commit(); err != nil {
			t.Fatal(err)
		}
		for _, path := range []string{"/owned", "/owned/x"} {
			var st unix.Stat_t
			if err := unix.Stat(dir+path, &st); err != nil || st.Uid != 1000 || st.Gid != 1001 {
				t.Errorf("%s: %d:%d, %v", path, st.Uid, st.Gid, err)
			}
		}
	})
}

func TestStat(t *testing.T) {
	s := startInit(t)
	dir := guesttest.OddFiles(t)
	if err := os.WriteFile(dir+"/file", []byte("12345"), 0o640); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir+"/file", 0o640|fs.ModeSetuid); err != nil {
		t.Fatal(err)
	}
	when := time.Unix(1234567890, 123456789)
	if err := os.Chtimes(dir+"/file", when, when); err != nil {
		t.Fatal(err)
	}
	fi, err := s.Stat(t.Context(), dir+"/file", false)
	if err != nil {
		t.Fatal(err)
	}
	want := FileInfo{Name: "file", Size: 5, Mode: 0o640 | fs.ModeSetuid, ModTime: when}
	if diff := cmp.Diff(want, fi); diff != "" {
		t.Error(diff)
	}
	for name, mode := range map[string]fs.FileMode{
		"/": fs.ModeDir, "fifo": fs.ModeNamedPipe, "socket": fs.ModeSocket, "dangling": fs.ModeSymlink, "loop": fs.ModeSymlink,
	} {
		fi, err := s.Stat(t.Context(), dir+"/"+name, false)
		if err != nil || fi.Mode.Type() != mode || fi.IsDir != (mode == fs.ModeDir) {
			t.Errorf("%s: %+v, %v", name, fi, err)
		}
		if name == "dangling" && fi.Link != "nothing" {
			t.Errorf("link to %q", fi.Link)
		}
	}
	if fi, err := s.Stat(t.Context(), "/dev/null", false); err != nil || fi.Mode.Type() != fs.ModeDevice|fs.ModeCharDevice {
		t.Errorf("%+v, %v", fi, err)
	}
	if _, err := s.Stat(t.Context(), dir+"/nothing", false); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
}

// tarOut collects the output of TarOut.
func (s *sandbox) tarOut(t *testing.T, path string) ([]byte, error) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	got := make(chan []byte)
	go func() {
		b, _ := io.ReadAll(r)
		got <- b
	}()
	err = s.TarOut(t.Context(), path, w)
	_ = w.Close()
	return <-got, err
}

// tarIn gives a stream to TarIn.
func (s *sandbox) tarIn(t *testing.T, path string, stream []byte) error {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = w.Write(stream)
		_ = w.Close()
	}()
	err = s.TarIn(t.Context(), path, r, 0, 0, false)
	_ = r.Close()
	<-done
	return err
}

func stream(t *testing.T, headers ...*tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range headers {
		if h.Mode == 0 {
			h.Mode = 0o644
		}
		if h.Typeflag == tar.TypeReg {
			h.Size = int64(len(h.Name))
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if h.Typeflag == tar.TypeReg {
			if _, err := io.WriteString(w, h.Name); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestTarRoundTrip(t *testing.T) {
	s := startInit(t)
	guesttest.Leaks(t)
	src := guesttest.OddFiles(t)
	long := strings.Repeat("long", 40)
	for _, err := range []error{
		os.MkdirAll(filepath.Join(src, "dir/deep", long), 0o755),
		os.WriteFile(filepath.Join(src, "dir/deep", long, "file"), bytes.Repeat([]byte("x"), 1<<20), 0o600),
		os.WriteFile(filepath.Join(src, "dir/odd \xff"), []byte("odd"), 0o755),
		os.WriteFile(filepath.Join(src, "empty"), nil, 0o644),
		os.Link(filepath.Join(src, "dir/odd \xff"), filepath.Join(src, "hard")),
		os.Mkdir(filepath.Join(src, "closed"), 0o500),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	b, err := s.tarOut(t, src)
	if err != nil {
		t.Fatal(err)
	}
	dst := t.TempDir()
	if err := s.tarIn(t, dst+"/made/here", b); err != nil {
		t.Fatal(err)
	}
	want := guesttest.Tree(t, src)
	want = slices.DeleteFunc(want, func(l string) bool { return l[0] == 'p' || l[0] == 'S' })
	if diff := cmp.Diff(want, guesttest.Tree(t, dst+"/made/here")); diff != "" {
		t.Error(diff)
	}
	var one, two unix.Stat_t
	if err := errors.Join(unix.Stat(dst+"/made/here/hard", &one), unix.Stat(dst+"/made/here/dir/odd \xff", &two)); err != nil || one.Ino != two.Ino {
		t.Errorf("the hard link is none: %v", err)
	}
	// Again, over itself.
	if err := s.tarIn(t, dst+"/made/here", b); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, guesttest.Tree(t, dst+"/made/here")); diff != "" {
		t.Error(diff)
	}
}

func TestTarOutOfAFile(t *testing.T) {
	s := startInit(t)
	guesttest.Leaks(t)
	dir := guesttest.OddFiles(t)
	if err := os.WriteFile(dir+"/file", []byte("hi"), 0o644); err != nil {
		t.Fatal(err)
	}
	b, err := s.tarOut(t, dir+"/file")
	if err != nil {
		t.Fatal(err)
	}
	h, err := tar.NewReader(bytes.NewReader(b)).Next()
	if err != nil || h.Name != "file" || h.Size != 2 {
		t.Errorf("%+v, %v", h, err)
	}
	for path, want := range map[string]error{
		dir + "/fifo": guest.ErrNotRegular, dir + "/nothing": fs.ErrNotExist, "/dev/null": guest.ErrNotRegular, "/proc/1/environ": guest.ErrNotRegular,
	} {
		if _, err := s.tarOut(t, path); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", path, err, want)
		}
	}
	// /proc is empty rather than endless.
	b, err = s.tarOut(t, "/proc")
	if err != nil || len(b) != 1024 {
		t.Errorf("/proc: %d bytes, %v", len(b), err)
	}
}

func TestTarInStaysBelowItsDestination(t *testing.T) {
	s := startInit(t)
	for _, tc := range []struct {
		name    string
		headers []*tar.Header
		want    error
		tree    []string
	}{
		{"absolute", []*tar.Header{{Typeflag: tar.TypeReg, Name: "/x"}}, unix.EXDEV, nil},
		{"dots", []*tar.Header{{Typeflag: tar.TypeReg, Name: "a/../../x"}}, unix.EXDEV, nil},
		{"dots inside", []*tar.Header{{Typeflag: tar.TypeReg, Name: "a/../x"}}, unix.EXDEV, nil},
		{"through an absolute link", []*tar.Header{{Typeflag: tar.TypeSymlink, Name: "l", Linkname: "/"}, {Typeflag: tar.TypeReg, Name: "l/x"}}, unix.EXDEV, nil},
		{"through a climbing link", []*tar.Header{{Typeflag: tar.TypeSymlink, Name: "l", Linkname: ".."}, {Typeflag: tar.TypeReg, Name: "l/x"}}, unix.EXDEV, nil},
		{"onto a link", []*tar.Header{{Typeflag: tar.TypeSymlink, Name: "l", Linkname: "../outside"}, {Typeflag: tar.TypeReg, Name: "l"}}, nil, []string{"-rw-r--r-- l = l"}},
		{"hard link out", []*tar.Header{{Typeflag: tar.TypeLink, Name: "l", Linkname: "../secret"}}, unix.EXDEV, nil},
		{"hard link through a link", []*tar.Header{{Typeflag: tar.TypeSymlink, Name: "d", Linkname: ".."}, {Typeflag: tar.TypeLink, Name: "l", Linkname: "d/secret"}}, unix.EXDEV, nil},
		{"hard link to nothing", []*tar.Header{{Typeflag: tar.TypeLink, Name: "l", Linkname: "nothing"}}, fs.ErrNotExist, nil},
		{"fifo", []*tar.Header{{Typeflag: tar.TypeFifo, Name: "f"}}, guest.ErrNotRegular, nil},
		{"device", []*tar.Header{{Typeflag: tar.TypeChar, Name: "f", Devmajor: 1, Devminor: 3}}, guest.ErrNotRegular, nil},
		{"file over directory", []*tar.Header{{Typeflag: tar.TypeDir, Name: "d/", Mode: 0o755}, {Typeflag: tar.TypeReg, Name: "d"}}, unix.EISDIR, nil},
		{"directory over file", []*tar.Header{{Typeflag: tar.TypeReg, Name: "d"}, {Typeflag: tar.TypeDir, Name: "d/", Mode: 0o755}}, unix.ENOTDIR, nil},
		{"setuid", []*tar.Header{{Typeflag: tar.TypeReg, Name: "f", Mode: 0o4755}}, nil, []string{"-rwxr-xr-x f = f"}},
		{"dot", []*tar.Header{{Typeflag: tar.TypeDir, Name: "./", Mode: 0o700}, {Typeflag: tar.TypeReg, Name: "./f"}}, nil, []string{"-rw-r--r-- f = ./f"}},
		{"through an inner link", []*tar.Header{{Typeflag: tar.TypeDir, Name: "d", Mode: 0o755}, {Typeflag: tar.TypeSymlink, Name: "l", Linkname: "d"}, {Typeflag: tar.TypeReg, Name: "l/x"}}, nil, []string{"drwxr-xr-x d", "-rw-r--r-- d/x = l/x", "Lrwxrwxrwx l -> d"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			guesttest.Leaks(t)
			dir := t.TempDir()
			if err := os.WriteFile(dir+"/secret", []byte("secret"), 0o600); err != nil {
				t.Fatal(err)
			}
			err := s.tarIn(t, dir+"/dest", stream(t, tc.headers...))
			if !errors.Is(err, tc.want) {
				t.Errorf("got %v, want %v", err, tc.want)
			}
			if tc.want == nil {
				if diff := cmp.Diff(tc.tree, guesttest.Tree(t, dir+"/dest")); diff != "" {
					t.Error(diff)
				}
			}
			if err := os.RemoveAll(dir + "/dest"); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff([]string{"-rw------- secret = secret"}, guesttest.Tree(t, dir)); diff != "" {
				t.Errorf("outside of the destination: %s", diff)
			}
		})
	}
}

func TestTarInOfNonsense(t *testing.T) {
	s := startInit(t)
	guesttest.Leaks(t)
	whole := stream(t, &tar.Header{Typeflag: tar.TypeReg, Name: strings.Repeat("x", 90)}, &tar.Header{Typeflag: tar.TypeReg, Name: "y"})
	for name, b := range map[string][]byte{
		"noise":            bytes.Repeat([]byte("noise"), 1000),
		"truncated header": whole[:300],
		"truncated body":   whole[:550],
		"long trailer":     append(bytes.Clone(whole), make([]byte, 2*initTrailer)...),
	} {
		err := s.tarIn(t, t.TempDir(), b)
		if e := asError(t, err); e.Stage != guest.StageArchive || e.Errno != unix.EBADMSG {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := s.tarIn(t, t.TempDir(), append(whole, make([]byte, 9000)...)); err != nil {
		t.Errorf("padded: %v", err)
	}
}

// A reader or writer that gives up must not hold init.
func TestTarEndsWithItsPipe(t *testing.T) {
	s := startInit(t)
	guesttest.Leaks(t)
	src := t.TempDir()
	if err := os.WriteFile(src+"/big", make([]byte, 4<<20), 0o644); err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	_ = r.Close()
	if err := s.TarOut(t.Context(), src, w); !errors.Is(err, unix.EPIPE) {
		t.Errorf("without a reader: %v", err)
	}
	_ = w.Close()
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = null.Close() }()
	if err := s.TarOut(t.Context(), src, null); err == nil {
		t.Error("what is not a pipe was given to the sandbox")
	}
}

func TestTarOutOfADeepTree(t *testing.T) {
	s := startInit(t)
	dir := t.TempDir()
	fd, err := unix.Open(dir, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	for range initDepth + 1 {
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
	if _, err := s.tarOut(t, dir); !errors.Is(err, unix.ENAMETOOLONG) {
		t.Errorf("got %v", err)
	}
}
