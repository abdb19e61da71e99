package workspace

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// archive builds the stream of a set.
type archive struct {
	t   *testing.T
	buf bytes.Buffer
	w   *tar.Writer
}

func newArchive(t *testing.T) *archive {
	t.Helper()
	a := &archive{t: t}
	a.w = tar.NewWriter(&a.buf)
	return a
}

func (a *archive) put(h tar.Header, content string) *archive {
	a.t.Helper()
	h.Size, h.Format = int64(len(content)), tar.FormatPAX
	if err := a.w.WriteHeader(&h); err != nil {
		a.t.Fatal(err)
	}
	if _, err := a.w.Write([]byte(content)); err != nil {
		a.t.Fatal(err)
	}
	return a
}

func (a *archive) file(name, content string) *archive {
	return a.put(tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644}, content)
}

func (a *archive) dir(name string) *archive {
	return a.put(tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: 0o755}, "")
}

func (a *archive) link(name, target string) *archive {
	return a.put(tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target, Mode: 0o777}, "")
}

func (a *archive) read() (*Set, error) {
	a.t.Helper()
	if err := a.w.Close(); err != nil {
		a.t.Fatal(err)
	}
	return Read(&a.buf, a.t.TempDir())
}

// host is a directory of the host and the time after its last change.
type host struct {
	t     *testing.T
	outer string // holds the directory, a secret and a place to write to
	dir   string
	since time.Time
}

// newHost makes a directory with the files; a name with a slash at its end is a directory, and a
// content that begins with "->" a link.
func newHost(t *testing.T, files map[string]string) *host {
	t.Helper()
	outer := t.TempDir()
	h := &host{t: t, outer: outer, dir: filepath.Join(outer, "dir")}
	if err := os.Mkdir(h.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	h.write(files)
	if err := os.WriteFile(filepath.Join(outer, "secret"), []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	h.since = time.Now().Add(time.Hour) // all that is there now was there before
	return h
}

func (h *host) write(files map[string]string) {
	h.t.Helper()
	for name, content := range files {
		at := filepath.Join(h.dir, name)
		err := os.MkdirAll(filepath.Dir(at), 0o755)
		switch target, isLink := strings.CutPrefix(content, "->"); {
		case err != nil:
		case strings.HasSuffix(name, "/"):
			err = os.MkdirAll(at, 0o755)
		case isLink:
			err = os.Symlink(target, at)
		default:
			err = os.WriteFile(at, []byte(content), 0o644)
		}
		if err != nil {
			h.t.Fatal(err)
		}
	}
}

func (h *host) open() *Dir {
	h.t.Helper()
	d, err := Open(h.dir)
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { _ = d.Close() })
	return d
}

func (h *host) plan(a *archive) *Plan {
	h.t.Helper()
	set, err := a.read()
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { _ = set.Close() })
	d := h.open()
	p, err := set.Plan(d, d, h.since, nil)
	if err != nil {
		h.t.Fatal(err)
	}
	return p
}

// show lists a tree with everything that counts.
func show(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.WalkDir(dir, func(name string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, name)
		fi, err := os.Lstat(name)
		if err != nil {
			return err
		}
		fmt.Fprintf(&b, "%q %v", rel, fi.Mode())
		switch {
		case fi.Mode().IsRegular():
			data, err := os.ReadFile(name)
			if err != nil {
				return err
			}
			var st unix.Stat_t
			if err := unix.Lstat(name, &st); err != nil {
				return err
			}
			fmt.Fprintf(&b, " %d %q", st.Nlink, data)
		case fi.Mode()&fs.ModeSymlink != 0:
			target, _ := os.Readlink(name)
			fmt.Fprintf(&b, " -> %q", target)
		}
		b.WriteByte('\n')
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// applied applies everything that a plan has and returns what it did not.
func applied(t *testing.T, p *Plan, protected bool) map[string]string {
	t.Helper()
	left := make(map[string]string)
	for _, r := range p.Apply(t.Context(), p.Items, protected) {
		if r.Err != nil {
			left[r.Item.Path] = r.Err.Error()
		}
	}
	return left
}

// Every kind of change is reproduced.
func TestApply(t *testing.T) {
	h := newHost(t, map[string]string{
		"same": "same", "edit": "old", "mode": "m", "gone": "g", "tree/a/b": "x", "opaque/old": "o", "opaque/sub/deep": "d", "was-file": "f",
		"was-dir/x": "x", "was-link": "->same", "linked": "1",
	})
	a := newArchive(t).dir(".").
		put(tar.Header{Typeflag: tar.TypeReg, Name: "mode", Mode: 0o755}, "m").
		file("same", "same").file("edit", "new").file(".wh.gone", "").file(".wh.tree", "").
		file("hard1", "h").put(tar.Header{Typeflag: tar.TypeLink, Name: "hard2", Linkname: "hard1", Mode: 0o644}, "").
		file("linked", "1").put(tar.Header{Typeflag: tar.TypeLink, Name: "linked2", Linkname: "linked", Mode: 0o644}, "").
		link("link", "sub/file").link("was-file", "same").file("was-dir", "now a file").
		dir("empty").dir("opaque").file("opaque/.wh..wh..opq", "").file("opaque/new", "n").
		put(tar.Header{Typeflag: tar.TypeDir, Name: "readonly/", Mode: 0o555}, "").file("readonly/f", "f").
		dir("sub").file("sub/file", "s").dir("was-link").file("was-link/in", "i")
	p := h.plan(a)
	if left := applied(t, p, false); len(left) > 0 {
		t.Errorf("not applied: %v", left)
	}
	want := newHost(t, map[string]string{
		"same": "same", "edit": "new", "mode": "m", "linked": "1", "hard1": "h", "link": "->sub/file", "was-file": "->same", "was-dir": "now a file",
		"empty/": "", "opaque/new": "n", "readonly/f": "f", "sub/file": "s", "was-link/in": "i",
	})
	for _, err := range []error{
		os.Chmod(filepath.Join(want.dir, "mode"), 0o755),
		os.Chmod(filepath.Join(want.dir, "readonly"), 0o555),
		os.Link(filepath.Join(want.dir, "linked"), filepath.Join(want.dir, "linked2")),
		os.Link(filepath.Join(want.dir, "hard1"), filepath.Join(want.dir, "hard2")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if got, want := show(t, h.dir), show(t, want.dir); got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
	again, err := p.set.Plan(p.to, p.base, h.since, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range again.Items {
		t.Errorf("a second plan has %s", i.Path)
	}
	_ = os.Chmod(filepath.Join(h.dir, "readonly"), 0o700)
	_ = os.Chmod(filepath.Join(want.dir, "readonly"), 0o700)
}

// A file that changed on the host stays as it is.
func TestConflicts(t *testing.T) {
	files := map[string]string{"edit": "old", "gone": "old", "tree/a": "old", "tree/b": "old", "kept": "old"}
	for _, name := range []string{"edit", "gone", "tree/a"} {
		h := newHost(t, files)
		h.since = time.Now().Add(-time.Hour) // every file is later
		old := time.Now().Add(time.Hour)
		h.since = old
		p := func() *Plan {
			return h.plan(newArchive(t).file("edit", "new").file(".wh.gone", "").file(".wh.tree", "").file("kept", "new"))
		}
		// Before the plan.
		before := show(t, h.dir)
		h.since = time.Unix(0, 0)
		if left := applied(t, p(), true); len(left) != 4 {
			t.Errorf("all files changed before the plan: not applied: %v", left)
		}
		if after := show(t, h.dir); after != before {
			t.Errorf("conflicts were applied:\n%s", after)
		}
		// Between plan and application.
		h.since = old
		plan := p()
		h.write(map[string]string{name: "changed on the host"})
		if strings.HasPrefix(name, "tree/") {
			plan.since = time.Now().Add(-time.Second) // so that only a look at the times of now finds it
			_ = os.Chtimes(filepath.Join(h.dir, "tree/b"), time.Time{}, time.Time{})
		}
		left := applied(t, plan, true)
		if data, err := os.ReadFile(filepath.Join(h.dir, name)); err != nil || string(data) != "changed on the host" {
			t.Errorf("%s: a change of the host was lost: %q, %v; not applied: %v", name, data, err, left)
		}
		if strings.Contains(show(t, h.dir), tempPrefix) {
			t.Errorf("%s: temporary files are left:\n%s", name, show(t, h.dir))
		}
	}
}

// With another directory, files that are not like the workspace's are conflicts.
func TestApplyToAnother(t *testing.T) {
	files := map[string]string{"edit": "old", "other": "old", "gone": "old", "link": "->edit"}
	base, to := newHost(t, files), newHost(t, files)
	to.write(map[string]string{"other": "mine"})
	set, err := newArchive(t).file("edit", "new").file("other", "new").file(".wh.gone", "").file(".wh.link", "").file("added", "new").read()
	if err != nil {
		t.Fatal(err)
	}
	defer set.Close()
	p, err := set.Plan(to.open(), base.open(), base.since, nil)
	if err != nil {
		t.Fatal(err)
	}
	left := applied(t, p, false)
	if len(left) != 1 || left["other"] == "" {
		t.Errorf("not applied: %v", left)
	}
	want := newHost(t, map[string]string{"edit": "new", "other": "mine", "added": "new"})
	if got, want := show(t, to.dir), show(t, want.dir); got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
	if strings.Contains(show(t, base.dir), "new") {
		t.Error("the workspace's own directory was changed")
	}
}

// Git applies the patch and gets the same tree.
func TestPatch(t *testing.T) {
	git, err := exec.LookPath("git")
	if err != nil {
		t.Skip("no git")
	}
	var long, edited strings.Builder
	for i := range 400 {
		fmt.Fprintf(&long, "line %d\n", i)
		switch {
		case i%97 == 3:
		case i%50 == 7:
			fmt.Fprintf(&edited, "another %d\nand more\n", i)
		default:
			fmt.Fprintf(&edited, "line %d\n", i)
		}
	}
	files := map[string]string{
		"long": long.String(), "no-newline": "a\nb", "gone": "g\n", "tree/a": "a\n", "tree/b/c": "c\n", "mode": "m\n", "link": "->mode", "type": "t\n",
		"strange\n\"name\"": "x\n", "empty": "", "short": "a\nb\nc\n",
		"binary": "\x00old", "binary-gone": "\x00gone", "binary-mode": "\x00m", "binary-both": "\x00b", "binary-link": "\x00l", "to-binary": "text\n", "to-text": "\x00t",
		"large": strings.Repeat("large\n", maxText/5), "binary-dir/x": "\x00x",
	}
	noise := make([]byte, 100_000)
	_, _ = rand.NewChaCha8([32]byte{}).Read(noise) // never fails
	change := func() *archive {
		return newArchive(t).file("long", edited.String()).file("no-newline", "a\nc").file(".wh.gone", "").file(".wh.tree", "").
			put(tar.Header{Typeflag: tar.TypeReg, Name: "mode", Mode: 0o755}, "m\n").link("link", "long").link("type", "mode").
			file("strange\n\"name\"", "y\n").file("added", "new\nfile").file("empty", "no more\n").file("short", "").dir("d").file("d/e", "e\n").
			file("binary", string(noise)).file(".wh.binary-gone", "").put(tar.Header{Typeflag: tar.TypeReg, Name: "binary-mode", Mode: 0o755}, "\x00m").
			put(tar.Header{Typeflag: tar.TypeReg, Name: "binary-both", Mode: 0o755}, "\x00both").link("binary-link", "long").file("to-binary", "\x00now").
			file("to-text", "text\n").file("large", strings.Repeat("larger\n", maxText/6)).file("binary-new", "\x00"+strings.Repeat("x", 51)).
			file("binary-dir", "\x00y")
	}
	h, native := newHost(t, files), newHost(t, files)
	var patch bytes.Buffer
	p := h.plan(change())
	if err := p.WritePatch(&patch, p.Items, nil); err != nil {
		t.Fatal(err)
	}
	if left := applied(t, p, false); len(left) > 0 {
		t.Errorf("not applied: %v", left)
	}
	cmd := exec.Command(git, "apply", "-")
	cmd.Dir = native.dir
	cmd.Env = append(os.Environ(), "GIT_CEILING_DIRECTORIES="+native.outer, "GIT_CONFIG_GLOBAL=/dev/null")
	cmd.Stdin = bytes.NewReader(patch.Bytes())
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("git apply: %v: %s\n%s", err, out, patch.String())
	}
	if got, want := show(t, native.dir), show(t, h.dir); got != want {
		t.Errorf("git made\n%swant\n%s", got, want)
	}
}
