package agent

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/api"
)

// tree maps the names below dir to content, link target, or "/" for a directory.
func tree(t *testing.T, dir string) map[string]string {
	t.Helper()
	got := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		switch {
		case d.IsDir():
			got[name] = "/"
		case d.Type()&fs.ModeSymlink != 0:
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			got[name] = "-> " + target
		default:
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			got[name] = string(b)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return got
}

type entry struct {
	name, link, content string
	typ                 byte
	mode                int64
}

func makeTar(t *testing.T, entries ...entry) *bytes.Buffer {
	t.Helper()
	var b bytes.Buffer
	tw := tar.NewWriter(&b)
	for _, e := range entries {
		if e.typ == 0 {
			e.typ = tar.TypeReg
		}
		h := &tar.Header{Name: e.name, Linkname: e.link, Typeflag: e.typ, Mode: e.mode, ModTime: time.Unix(1e9, 0)}
		if e.typ == tar.TypeReg {
			h.Size = int64(len(e.content))
		}
		if err := tw.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if e.typ == tar.TypeReg {
			if _, err := io.WriteString(tw, e.content); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	return &b
}

// A sandbox's archive is hostile. A secret lies beside the output directory, and no archive may
// change or copy it (CVE-2019-14271, CVE-2018-15664, CVE-2024-28185 in other systems).
func TestHostileArchive(t *testing.T) {
	type m = map[string]string
	for _, tc := range []struct {
		name    string
		entries []entry
		want    map[string]string
		skipped []string
	}{
		{
			"ordinary",
			[]entry{{name: "./", typ: tar.TypeDir}, {name: "./a", content: "1"}, {name: "d/e/f", content: "2"}, {name: "d/", typ: tar.TypeDir, mode: 0o500}, {name: "l", typ: tar.TypeSymlink, link: "d/e/f"}, {name: "h", typ: tar.TypeLink, link: "a"}},
			m{"a": "1", "d": "/", "d/e": "/", "d/e/f": "2", "l": "-> d/e/f", "h": "1"},
			nil,
		},
		{
			"links stay links",
			[]entry{{name: "abs", typ: tar.TypeSymlink, link: "/etc/passwd"}, {name: "up", typ: tar.TypeSymlink, link: "../secret"}, {name: "gone", typ: tar.TypeSymlink, link: "nowhere"}},
			m{"abs": "-> /etc/passwd", "up": "-> ../secret", "gone": "-> nowhere"},
			nil,
		},
		{"dot dot", []entry{{name: "../secret", content: "x"}, {name: "a/../../secret", content: "x"}, {name: "a/../b", content: "y"}}, m{"b": "y"}, []string{"../secret", "a/../../secret"}},
		{"absolute", []entry{{name: "/tmp/agent-test-absolute", content: "x"}}, m{}, []string{"/tmp/agent-test-absolute"}},
		{"write through a link", []entry{{name: "l", typ: tar.TypeSymlink, link: "../secret"}, {name: "l", content: "x"}}, m{"l": "-> ../secret"}, []string{"l"}},
		{"write through a linked directory", []entry{{name: "l", typ: tar.TypeSymlink, link: ".."}, {name: "l/secret", content: "x"}, {name: "l/new", content: "x"}}, m{"l": "-> .."}, []string{"l/secret", "l/new"}},
		{"write through a link inside", []entry{{name: "d", typ: tar.TypeDir}, {name: "l", typ: tar.TypeSymlink, link: "d"}, {name: "l/f", content: "x"}, {name: "l", typ: tar.TypeDir}}, m{"d": "/", "l": "-> d"}, []string{"l/f", "l"}},
		{"directory through a link", []entry{{name: "l", typ: tar.TypeSymlink, link: ".."}, {name: "l/x/y", typ: tar.TypeDir}}, m{"l": "-> .."}, []string{"l/x/y"}},
		{"hard link to the secret", []entry{{name: "h", typ: tar.TypeLink, link: "../secret"}, {name: "i", typ: tar.TypeLink, link: "/etc/passwd"}}, m{}, []string{"h", "i"}},
		{"hard link through a link", []entry{{name: "l", typ: tar.TypeSymlink, link: ".."}, {name: "h", typ: tar.TypeLink, link: "l/secret"}, {name: "s", typ: tar.TypeSymlink, link: "../secret"}, {name: "i", typ: tar.TypeLink, link: "s"}}, m{"l": "-> ..", "s": "-> ../secret"}, []string{"h", "i"}},
		{"devices", []entry{{name: "null", typ: tar.TypeChar}, {name: "sda", typ: tar.TypeBlock}, {name: "pipe", typ: tar.TypeFifo}, {name: "weird", typ: 'Z'}}, m{}, []string{"null", "sda", "pipe", "weird"}},
		{"twice", []entry{{name: "a", content: "1"}, {name: "a", content: "2"}}, m{"a": "1"}, []string{"a"}},
		{"file as directory", []entry{{name: "a", content: "1"}, {name: "a/b", content: "2"}}, m{"a": "1"}, []string{"a/b"}},
		{"read-only directory", []entry{{name: "d", typ: tar.TypeDir, mode: 0}, {name: "d/a", content: "1"}}, m{"d": "/", "d/a": "1"}, nil},
		{"long name", []entry{{name: strings.Repeat("x", 300), content: "1"}, {name: "b", content: "2"}}, m{"b": "2"}, []string{"xxx"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := t.TempDir()
			secret, out := filepath.Join(dir, "secret"), filepath.Join(dir, "out")
			if err := errors.Join(os.WriteFile(secret, []byte("secret"), 0o600), os.Mkdir(out, 0o755)); err != nil {
				t.Fatal(err)
			}
			root, err := os.OpenRoot(out)
			if err != nil {
				t.Fatal(err)
			}
			defer root.Close()
			c, err := extract(root, makeTar(t, tc.entries...), "/out", CollectLimits{Links: true})
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, tree(t, out)); diff != "" {
				t.Errorf("tree (-want +got):\n%s", diff)
			}
			if len(c.Skipped) != len(tc.skipped) {
				t.Errorf("skipped %q, want %q", c.Skipped, tc.skipped)
			} else {
				for i, s := range tc.skipped {
					if !strings.HasPrefix(c.Skipped[i], s) {
						t.Errorf("skipped %q, want %q", c.Skipped[i], s)
					}
				}
			}
			if got, err := os.ReadFile(secret); err != nil || string(got) != "secret" {
				t.Errorf("the secret is now %q, %v", got, err)
			}
			if fi, err := os.Stat(secret); err != nil || fi.Sys().(*syscall.Stat_t).Nlink != 1 {
				t.Errorf("the secret has a second name")
			}
			if names, err := os.ReadDir(dir); err != nil || len(names) != 2 {
				t.Errorf("beside the output: %v, %v", names, err)
			}
		})
	}
}

func TestArchiveModesAndTimes(t *testing.T) {
	root, err := os.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	_, err = extract(root, makeTar(t, entry{name: "suid", mode: 0o6755, content: "x"}, entry{name: "none", mode: 0, content: "x"}, entry{name: "sticky", typ: tar.TypeDir, mode: 0o1777}), "/out", CollectLimits{})
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]fs.FileMode{"suid": 0o755, "none": 0o600, "sticky": fs.ModeDir | 0o777} {
		fi, err := root.Lstat(name)
		if err != nil || fi.Mode() != want || fi.ModTime().Unix() != 1e9 {
			t.Errorf("%s: %v %v, %v, want %v", name, fi.Mode(), fi.ModTime(), err, want)
		}
	}
}

func TestArchiveLimits(t *testing.T) {
	bomb := func(size int64) io.Reader {
		var b bytes.Buffer
		tw := tar.NewWriter(&b)
		if err := tw.WriteHeader(&tar.Header{Name: "small", Size: 1, Mode: 0o644}); err != nil {
			t.Fatal(err)
		}
		if _, err := tw.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		if err := tw.WriteHeader(&tar.Header{Name: "bomb", Size: size, Mode: 0o644}); err != nil {
			t.Fatal(err)
		}
		return &b // truncated on purpose
	}
	for _, tc := range []struct {
		name string
		r    io.Reader
		want string
		tree map[string]string
	}{
		{"entries", makeTar(t, entry{name: "a"}, entry{name: "b"}, entry{name: "c"}, entry{name: "d"}), "more than 3 entries", map[string]string{"a": "", "b": "", "c": ""}},
		{"bytes", bomb(1 << 40), "exceed 1000 bytes", map[string]string{"small": "x"}},
		{"cut short", bomb(500), "write bomb", map[string]string{"small": "x"}},
		{"not a tar", strings.NewReader(strings.Repeat("x", 2000)), "read the archive", map[string]string{}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := t.TempDir()
			root, err := os.OpenRoot(dir)
			if err != nil {
				t.Fatal(err)
			}
			defer root.Close()
			_, err = extract(root, tc.r, "/out", CollectLimits{Entries: 3, Bytes: 1000})
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want ...%s", err, tc.want)
			}
			if diff := cmp.Diff(tc.tree, tree(t, dir)); diff != "" {
				t.Errorf("tree (-want +got):\n%s", diff)
			}
		})
	}
}

// A name that is too deep ends the extraction, like other limits, before any part of it is made:
// for a name of a megabyte the tree would be walked half a million times.
func TestArchiveDepth(t *testing.T) {
	deepest := strings.Repeat("d/", maxDepth-1) + "f"
	for name, beyond := range map[string]entry{
		"by one":         {name: "d/" + deepest, content: "2"},
		"by a megabyte":  {name: strings.Repeat("d/", 500_000) + "f", content: "2"},
		"by a directory": {name: strings.Repeat("e/", maxDepth+1), typ: tar.TypeDir},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			root, err := os.OpenRoot(dir)
			if err != nil {
				t.Fatal(err)
			}
			defer root.Close()
			link := entry{name: "h", typ: tar.TypeLink, link: strings.Repeat("e/", maxDepth) + "f"}
			c, err := extract(root, makeTar(t, entry{name: deepest, content: "1"}, link, beyond, entry{name: "after"}), "/out", CollectLimits{})
			if err == nil || !strings.Contains(err.Error(), "directories deep") || len(err.Error()) > 1000 {
				t.Errorf("error %.1000v", err)
			}
			if c.Entries != 1 || len(c.Skipped) != 1 || c.Skipped[0] != "h: hard link to a name that is too deep" {
				t.Errorf("%d entries; skipped %q", c.Entries, c.Skipped)
			}
			got, err := os.ReadFile(filepath.Join(dir, deepest))
			if err != nil || string(got) != "1" {
				t.Errorf("what came before it: %q, %v", got, err)
			}
			if names, err := os.ReadDir(dir); err != nil || len(names) != 1 {
				t.Errorf("there are %v, %v", names, err)
			}
		})
	}
}

func TestInputIsCopiedAndNothingBesideIt(t *testing.T) {
	dir := t.TempDir()
	in, secret := filepath.Join(dir, "in"), filepath.Join(dir, "secret")
	if err := errors.Join(os.MkdirAll(filepath.Join(in, "sub", ".git"), 0o755), os.WriteFile(secret, []byte("secret"), 0o600),
		os.WriteFile(filepath.Join(in, "sub", "a b"), []byte("1"), 0o600), os.WriteFile(filepath.Join(in, "empty"), nil, 0o755),
		os.Symlink(secret, filepath.Join(in, "link")), syscall.Mkfifo(filepath.Join(in, "pipe"), 0o600), os.Symlink(in, filepath.Join(dir, "alias"))); err != nil {
		t.Fatal(err)
	}
	target := filepath.Join(dir, "sandbox")
	skipped, err := SendDir(t.Context(), (&fakeSandbox{}).open(t), filepath.Join(dir, "alias"), target)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"sub": "/", "sub/.git": "/", "sub/a b": "1", "empty": "", "link": "-> " + secret}
	if diff := cmp.Diff(want, tree(t, target)); diff != "" {
		t.Errorf("tree (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"pipe: not a file, directory or link"}, skipped); diff != "" {
		t.Errorf("skipped (-want +got):\n%s", diff)
	}
}

func TestRefusedInputEnds(t *testing.T) {
	in := t.TempDir()
	if err := os.WriteFile(filepath.Join(in, "big"), make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := SendDir(t.Context(), (&fakeSandbox{refuse: problem(api.CodeInternal, "no room")}).open(t), in, "/x"); err == nil || !strings.Contains(err.Error(), "no room") {
		t.Errorf("got %v", err)
	}
}

func TestAnswerIsNeverALink(t *testing.T) {
	dir := t.TempDir()
	files := filepath.Join(dir, "files")
	if err := errors.Join(os.Mkdir(files, 0o755), os.WriteFile(filepath.Join(dir, "secret"), []byte("secret"), 0o600),
		os.WriteFile(filepath.Join(files, "other"), []byte("other"), 0o600)); err != nil {
		t.Fatal(err)
	}
	for _, target := range []string{"../secret", "/etc/passwd", "other", "."} {
		answer := filepath.Join(files, "answer.txt")
		if err := os.Symlink(target, answer); err != nil {
			t.Fatal(err)
		}
		if text, found, err := ReadAnswer(files, 100); found || err != nil {
			t.Errorf("-> %s: %q, %v", target, text, err)
		}
		if err := os.Remove(answer); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(files, "answer.txt"), []byte("forty-two"), 0o600); err != nil {
		t.Fatal(err)
	}
	if text, found, err := ReadAnswer(files, 5); text != "forty" || !found || err != nil {
		t.Errorf("%q, %v, %v", text, found, err)
	}
}

// Links of a model's output lead nowhere on the host: those that would lead out stay in the
// sandbox, directly, by a way round, or through other links.
func TestLinksOfTheOutput(t *testing.T) {
	link := func(name, target string) entry { return entry{name: name, typ: tar.TypeSymlink, link: target} }
	dir := t.TempDir()
	out := filepath.Join(dir, "out")
	if err := errors.Join(os.WriteFile(filepath.Join(dir, "secret"), []byte("secret"), 0o600), os.Mkdir(out, 0o755)); err != nil {
		t.Fatal(err)
	}
	archive := makeTar(t,
		entry{name: "a/b/f", content: "1"}, entry{name: "g", content: "2"},
		link("file", "g"), link("a/up", "../g"), link("a/b/top", "../.."), link("self", "self"), link("gone", "nowhere"),
		link("a/abs", "/testbed/output/a/b/f"), link("absdir", "/testbed/output/"), link("round", "a/../g"), link("dot", "./g"),
		link("passwd", "/etc/passwd"), link("up", "../secret"), link("a/b/far", "../../../secret"), link("beside", "/testbed/output2/x"),
		link("again", "/testbed/output/../secret"), link("down", "a/../../secret"),
		link("through", "a/b/top/../secret"), // through a real link, ".." would be the parent of the output
	)
	root, err := os.OpenRoot(out)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	c, err := extract(root, archive, "/testbed/output", CollectLimits{})
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{
		"a": "/", "a/b": "/", "a/b/f": "1", "g": "2", "file": "-> g", "a/up": "-> ../g", "a/b/top": "-> ../..", "self": "-> self", "gone": "-> nowhere",
		"a/abs": "-> b/f", "absdir": "-> .", "round": "-> g", "dot": "-> g", "through": "-> a/b/secret",
	}
	if diff := cmp.Diff(want, tree(t, out)); diff != "" {
		t.Errorf("the output (-want +got):\n%s", diff)
	}
	checkLinks(t, out)
	var stayed []string
	for _, s := range c.Skipped {
		name, why, _ := strings.Cut(s, ": ")
		if stayed = append(stayed, name); !strings.HasPrefix(why, "link that leads out to ") {
			t.Error(s)
		}
	}
	if diff := cmp.Diff([]string{"passwd", "up", "a/b/far", "beside", "again", "down"}, stayed); diff != "" {
		t.Errorf("skipped (-want +got):\n%s", diff)
	}
}

// checkLinks fails if a link below out leads out of it.
func checkLinks(t *testing.T, out string) {
	t.Helper()
	for name, content := range tree(t, out) {
		target, isLink := strings.CutPrefix(content, "-> ")
		if !isLink {
			continue
		}
		if filepath.IsAbs(target) || !filepath.IsLocal(filepath.Join(filepath.Dir(name), target)) || strings.Contains(strings.TrimLeft(target, "./"), "/..") {
			t.Errorf("%s leads to %s", name, target)
		}
		if at, err := filepath.EvalSymlinks(filepath.Join(out, name)); err == nil && at != out && !strings.HasPrefix(at, out+"/") {
			t.Errorf("%s leads out to %s", name, at)
		}
	}
}

// Coverage varies between runs, so minimising does not end by itself: use -fuzzminimizetime=10x.
func FuzzExtract(f *testing.F) {
	var t testing.T
	f.Add(makeTar(&t, entry{name: "a", content: "1"}, entry{name: "l", typ: tar.TypeSymlink, link: ".."}, entry{name: "l/x", content: "2"}).Bytes())
	f.Add(makeTar(&t, entry{name: "../x", content: "1"}, entry{name: "h", typ: tar.TypeLink, link: "../secret"}).Bytes())
	f.Add(makeTar(&t, entry{name: "a/b", typ: tar.TypeSymlink, link: "/out/c/.."}, entry{name: "c", typ: tar.TypeSymlink, link: "a/../../secret"}).Bytes())
	f.Fuzz(func(t *testing.T, data []byte) {
		dir := t.TempDir()
		out := filepath.Join(dir, "out")
		if err := errors.Join(os.Mkdir(out, 0o755), os.WriteFile(filepath.Join(dir, "secret"), []byte("secret"), 0o600)); err != nil {
			t.Fatal(err)
		}
		root, err := os.OpenRoot(out)
		if err != nil {
			t.Fatal(err)
		}
		defer root.Close()
		_, _ = extract(root, bytes.NewReader(data), "/out", CollectLimits{Entries: 50, Bytes: 1 << 16})
		checkLinks(t, out)
		names, err := os.ReadDir(dir)
		if err != nil || len(names) != 2 {
			t.Errorf("beside the output: %v, %v", names, err)
		}
		if got, err := os.ReadFile(filepath.Join(dir, "secret")); err != nil || string(got) != "secret" {
			t.Errorf("the secret is now %q, %v", got, err)
		}
	})
}
