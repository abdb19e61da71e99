package workspace

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// What the host has in a place is not lost if it has changed and another process takes away what
// was put there meanwhile.
func TestChangeIsPutBack(t *testing.T) {
	for name, again := range map[string]func(at string) error{
		"removed":  os.RemoveAll,
		"replaced": func(at string) error { return errors.Join(os.RemoveAll(at), os.WriteFile(at, []byte("third"), 0o644)) },
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t, map[string]string{"d/file": "old"})
			p := h.plan(newArchive(t).file("d", "now a file"))
			h.write(map[string]string{"d/file": "changed on the host"})
			p.exchanged = func() {
				h.since = h.since.AddDate(-10, 0, 0)
				p.since = h.since // every file is later now
				if err := again(filepath.Join(h.dir, "d")); err != nil {
					t.Error(err)
				}
			}
			left := applied(t, p, true)
			all := show(t, h.dir)
			if left["d"] == "" || !strings.Contains(all, "changed on the host") {
				t.Errorf("not applied: %v; there is\n%s", left, all)
			}
		})
	}
}

// Files keep their owner and directories their set-gid bit; new ones get the owner of their
// directory. Others of the host get no right to write.
func TestModesAndOwners(t *testing.T) {
	h := newHost(t, map[string]string{"mine": "old", "open": "old", "dir/x": "x"})
	at := func(name string) string { return filepath.Join(h.dir, name) }
	root := os.Geteuid() == 0
	if err := errors.Join(os.Chmod(at("open"), 0o666), os.Chmod(at("dir"), 0o755|os.ModeSetgid)); err != nil {
		t.Fatal(err)
	}
	if root {
		if err := errors.Join(os.Chown(at("mine"), 1234, 1235), os.Chown(at("dir"), 1236, 1237), os.Chmod(at("dir"), 0o755|os.ModeSetgid)); err != nil {
			t.Fatal(err)
		}
	}
	p := h.plan(newArchive(t).put(tar.Header{Typeflag: tar.TypeReg, Name: "mine", Mode: 0o666}, "new").
		put(tar.Header{Typeflag: tar.TypeReg, Name: "open", Mode: 0o666}, "new").
		put(tar.Header{Typeflag: tar.TypeDir, Name: "dir/", Mode: 0o777}, "").
		put(tar.Header{Typeflag: tar.TypeReg, Name: "dir/new", Mode: 0o777}, "new"))
	if left := applied(t, p, false); len(left) > 0 {
		t.Errorf("not applied: %v", left)
	}
	for name, want := range map[string]struct {
		mode     os.FileMode
		uid, gid uint32
	}{
		"mine": {0o644, 1234, 1235}, "open": {0o666, 0, 0}, "dir": {0o755 | os.ModeSetgid | os.ModeDir, 1236, 1237}, "dir/new": {0o755, 1236, 1237},
	} {
		fi, err := os.Lstat(at(name))
		if err != nil {
			t.Fatal(err)
		}
		st := fi.Sys().(*syscall.Stat_t)
		if fi.Mode() != want.mode || root && (st.Uid != want.uid || st.Gid != want.gid) {
			t.Errorf("%s: %v of %d:%d, want %v", name, fi.Mode(), st.Uid, st.Gid, want)
		}
	}
}

// A further name of a protected file becomes a file of its own.
func TestNoFurtherNameOfAProtectedFile(t *testing.T) {
	h := newHost(t, map[string]string{".git/config": "c"})
	p := h.plan(newArchive(t).dir(".git").file(".git/config", "c").put(tar.Header{Typeflag: tar.TypeLink, Name: "notes", Linkname: ".git/config", Mode: 0o644}, ""))
	if left := applied(t, p, false); len(left) > 0 {
		t.Errorf("not applied: %v", left)
	}
	if all := show(t, h.dir); !strings.Contains(all, "\"notes\" -rw-r--r-- 1 \"c\"") {
		t.Errorf("there is\n%s", all)
	}
}

// A path brings the new directories with it that it lies in, and nothing else of them.
func TestSelectNewDirectories(t *testing.T) {
	h := newHost(t, map[string]string{"old/x": "x"})
	p := h.plan(newArchive(t).dir("new").dir("new/sub").file("new/sub/a", "a").file("new/b", "b").dir("old").file("old/y", "y"))
	for _, want := range []string{"new new/sub new/sub/a", "old/y"} {
		items, err := p.Select(strings.Fields(want)[len(strings.Fields(want))-1:])
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, i := range items {
			got = append(got, i.Path)
		}
		if !slices.Equal(got, strings.Fields(want)) {
			t.Errorf("%v, want %s", got, want)
		}
	}
}

// An interrupt ends the application between two changes.
func TestApplyIsInterrupted(t *testing.T) {
	h := newHost(t, map[string]string{"a": "old", "b": "old"})
	p := h.plan(newArchive(t).file("a", "new").file("b", "new"))
	ctx, cancel := context.WithCancel(t.Context())
	p.exchanged = cancel
	results := p.Apply(ctx, p.Items, false)
	if results[0].Err != nil || !errors.Is(results[1].Err, context.Canceled) {
		t.Errorf("%+v", results)
	}
	if all := show(t, h.dir); !strings.Contains(all, "\"a\" -rw-r--r-- 1 \"new\"") || !strings.Contains(all, "\"b\" -rw-r--r-- 1 \"old\"") {
		t.Errorf("there is\n%s", all)
	}
}

// endless is an archive of one file of zeros.
func endless(t *testing.T, size int64) io.Reader {
	t.Helper()
	r, w := io.Pipe()
	t.Cleanup(func() { _ = r.Close() }) // ends the writer
	go func() {
		out := tar.NewWriter(w)
		err := out.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "x", Mode: 0o644, Size: size})
		piece := make([]byte, 1<<20)
		for left := size; left > 0 && err == nil; left -= int64(len(piece)) {
			_, err = out.Write(piece[:min(left, int64(len(piece)))])
		}
		_ = w.CloseWithError(errors.Join(err, out.Close())) // the reader gets it
	}()
	return r
}

// Holes take no space of the host's, and what is too large is refused before it is read.
func TestHolesTakeNoSpace(t *testing.T) {
	const size = 64<<20 + 1
	set, err := Read(endless(t, size), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer set.Close()
	fi, err := set.spool.Stat()
	if err != nil {
		t.Fatal(err)
	}
	if blocks := fi.Sys().(*syscall.Stat_t).Blocks; blocks > 256 || set.entries[0].size != size {
		t.Errorf("%d bytes take %d blocks", set.entries[0].size, blocks)
	}
	n, err := io.Copy(io.Discard, set.content(set.entries[0]))
	if n != size || err != nil {
		t.Errorf("read %d bytes: %v", n, err)
	}
	if _, err := Read(endless(t, maxContent+1), t.TempDir()); err == nil || !strings.Contains(err.Error(), fmt.Sprint(maxContent>>30, " GiB")) {
		t.Errorf("too large: %v", err)
	}
}

// Contents leave room on the disk.
func TestSpoolerLeavesRoom(t *testing.T) {
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	s := &spooler{f: f, room: spoolPiece}
	if n, err := s.Write(make([]byte, 3*spoolPiece)); err != nil {
		t.Errorf("zeros: %d, %v", n, err)
	}
	if n, err := s.Write(append(make([]byte, spoolPiece), slices.Repeat([]byte{1}, 2*spoolPiece)...)); n != 2*spoolPiece || err == nil {
		t.Errorf("%d, %v", n, err)
	}
}
