package workspace

import (
	"archive/tar"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// hostile are archives that a sandbox, or a launcher that was taken over, may send. None changes
// anything outside of the directory, and what is not left out is listed.
var hostile = map[string]struct {
	host map[string]string // beside "kept"
	make func(a *archive)
	// refused means that the whole archive is. Otherwise left are the paths that are not applied;
	// nothing else is in the directory but those of files.
	refused bool
	left    string
	files   string // names that are new or changed in the directory, sorted
}{
	// Names.
	"parent":        {make: func(a *archive) { a.file("../secret", "x") }, refused: true},
	"parent within": {make: func(a *archive) { a.dir("d").file("d/../../secret", "x") }, refused: true},
	"absolute":      {make: func(a *archive) { a.file("/secret", "x") }, refused: true},
	"dot":           {make: func(a *archive) { a.file("./x", "x") }, refused: true},
	"double slash":  {make: func(a *archive) { a.dir("d").file("d//x", "x") }, refused: true},
	"parent alone":  {make: func(a *archive) { a.dir("..") }, refused: true},
	"NUL": {make: func(a *archive) {
		a.put(tar.Header{Typeflag: tar.TypeReg, Name: "x", Mode: 0o644, PAXRecords: map[string]string{"VENDOR.x": "y"}}, "").file("a\x01", "x")
	}, files: "a\x01 x"},
	"long component":           {make: func(a *archive) { a.file(strings.Repeat("x", 256), "x") }, refused: true},
	"twice":                    {make: func(a *archive) { a.file("x", "1").file("x", "2") }, refused: true},
	"file twice as directory":  {make: func(a *archive) { a.file("x", "1").dir("x") }, refused: true},
	"below a link":             {make: func(a *archive) { a.link("l", "..").file("l/secret", "x") }, refused: true},
	"below a file":             {make: func(a *archive) { a.file("f", "").file("f/x", "x") }, refused: true},
	"below nothing":            {make: func(a *archive) { a.file("d/x", "x") }, refused: true},
	"below a deletion":         {make: func(a *archive) { a.file(".wh.d", "").file("d/x", "x") }, refused: true},
	"whiteout of parent":       {make: func(a *archive) { a.file(".wh...", "") }, refused: true},
	"whiteout of dot":          {make: func(a *archive) { a.file(".wh..", "") }, refused: true},
	"whiteout of nothing":      {make: func(a *archive) { a.file(".wh.", "") }, refused: true},
	"opaque mark nowhere":      {make: func(a *archive) { a.file("d/.wh..wh..opq", "") }, refused: true},
	"hard link to outside":     {make: func(a *archive) { a.put(tar.Header{Typeflag: tar.TypeLink, Name: "x", Linkname: "../secret"}, "") }, refused: true},
	"hard link to absolute":    {make: func(a *archive) { a.put(tar.Header{Typeflag: tar.TypeLink, Name: "x", Linkname: "/etc/passwd"}, "") }, refused: true},
	"hard link to the host's":  {make: func(a *archive) { a.put(tar.Header{Typeflag: tar.TypeLink, Name: "x", Linkname: "kept"}, "") }, refused: true},
	"hard link to a directory": {make: func(a *archive) { a.dir("d").put(tar.Header{Typeflag: tar.TypeLink, Name: "x", Linkname: "d"}, "") }, refused: true},
	"hard link to a deletion": {make: func(a *archive) {
		a.file(".wh.kept", "").put(tar.Header{Typeflag: tar.TypeLink, Name: "x", Linkname: "kept"}, "")
	}, refused: true},
	"newline":       {make: func(a *archive) { a.file("a\nb", "x") }, files: "a\nb"},
	"escape":        {make: func(a *archive) { a.file("a\x1b[2Jb", "x") }, files: "a\x1b[2Jb"},
	"no UTF-8":      {make: func(a *archive) { a.file("a\xff", "x") }, files: "a\xff"},
	"right to left": {make: func(a *archive) { a.file("a\u202etxt.sh", "x") }, files: "a\u202etxt.sh"},

	// Links.
	"link to absolute":          {make: func(a *archive) { a.link("l", "/etc/passwd") }, left: "l"},
	"link to parent":            {make: func(a *archive) { a.link("l", "../secret") }, left: "l"},
	"link to parent from below": {make: func(a *archive) { a.dir("d").link("d/l", "../../secret") }, left: "d/l", files: "d"},
	"link through a name":       {make: func(a *archive) { a.dir("d").link("d/l", "x/../../../secret") }, left: "d/l", files: "d"},
	"link through another link": {make: func(a *archive) { a.dir("d").link("d/a", "..").link("d/b", "a/../secret") }, left: "d/b", files: "d d/a"},
	"link to nothing":           {make: func(a *archive) { a.link("l", "") }, left: "l"},
	"hard link to a bad link": {make: func(a *archive) {
		a.link("l", "/x").put(tar.Header{Typeflag: tar.TypeLink, Name: "m", Linkname: "l"}, "")
	}, left: "l m"},
	"link of the host":             {host: map[string]string{"out": "->../"}, make: func(a *archive) { a.dir("out").file("out/secret", "x") }, files: "out out/secret"},
	"file over a link of the host": {host: map[string]string{"out": "->../secret"}, make: func(a *archive) { a.file("out", "x") }, files: "out"},
	"deletion of a link":           {host: map[string]string{"out": "->../secret"}, make: func(a *archive) { a.file(".wh.out", "") }, files: ""},
	"deletion through a link":      {host: map[string]string{"d/out": "->../.."}, make: func(a *archive) { a.file(".wh.d", "") }, files: ""},
	"opaque over a link":           {host: map[string]string{"out": "->.."}, make: func(a *archive) { a.dir("out").file("out/.wh..wh..opq", "") }, files: "out"},

	// Special files and bits.
	"FIFO":             {make: func(a *archive) { a.put(tar.Header{Typeflag: tar.TypeFifo, Name: "f", Mode: 0o644}, "") }, left: "f"},
	"device":           {make: func(a *archive) { a.put(tar.Header{Typeflag: tar.TypeChar, Name: "f", Devmajor: 1, Devminor: 3}, "") }, left: "f"},
	"block device":     {make: func(a *archive) { a.put(tar.Header{Typeflag: tar.TypeBlock, Name: "f", Devmajor: 8}, "") }, left: "f"},
	"FIFO over a file": {make: func(a *archive) { a.put(tar.Header{Typeflag: tar.TypeFifo, Name: "kept", Mode: 0o644}, "") }, left: "kept"},
	"setuid":           {make: func(a *archive) { a.put(tar.Header{Typeflag: tar.TypeReg, Name: "s", Mode: 0o6755}, "x") }, files: "s"},
	"below a FIFO":     {make: func(a *archive) { a.put(tar.Header{Typeflag: tar.TypeFifo, Name: "f"}, "").file("f/x", "x") }, refused: true},

	// Protected paths.
	"hook":                   {host: map[string]string{".git/hooks/": ""}, make: func(a *archive) { a.dir(".git").dir(".git/hooks").file(".git/hooks/pre-commit", "x") }, left: ".git/hooks/pre-commit"},
	"git's config":           {host: map[string]string{".git/config": "x"}, make: func(a *archive) { a.dir(".git").file(".git/config", "y") }, left: ".git/config"},
	"config deleted":         {host: map[string]string{".git/config": "x"}, make: func(a *archive) { a.dir(".git").file(".git/.wh.config", "") }, left: ".git/config"},
	"a commit":               {host: map[string]string{".git/refs/": ""}, make: func(a *archive) { a.dir(".git").file(".git/HEAD", "y").dir(".git/refs").file(".git/refs/x", "y") }, files: ".git/HEAD .git/refs/x"},
	"a repository":           {make: func(a *archive) { a.dir(".git").file(".git/HEAD", "y") }, left: ".git .git/HEAD"},
	"a file that is git":     {make: func(a *archive) { a.file(".git", "gitdir: /tmp/evil") }, left: ".git"},
	"git below":              {host: map[string]string{"sub/.git/": ""}, make: func(a *archive) { a.dir("sub").dir("sub/.git").file("sub/.git/config", "x") }, left: "sub/.git/config"},
	"git in capitals":        {host: map[string]string{".GIT/": ""}, make: func(a *archive) { a.dir(".GIT").file(".GIT/CONFIG", "x") }, left: ".GIT/CONFIG"},
	"git of no width":        {make: func(a *archive) { a.dir(".g\u200cit").file(".g\u200cit/config", "x") }, left: ".g\u200cit .g\u200cit/config"},
	"git's short name":       {make: func(a *archive) { a.dir("GIT~1").file("GIT~1/config", "x") }, left: "GIT~1 GIT~1/config"},
	"git with a dot":         {make: func(a *archive) { a.dir(".git.").file(".git./config", "x") }, left: ".git. .git./config"},
	"git's stream":           {make: func(a *archive) { a.dir(".git::$INDEX_ALLOCATION").file(".git::$INDEX_ALLOCATION/config", "x") }, left: ".git::$INDEX_ALLOCATION .git::$INDEX_ALLOCATION/config"},
	"config by ligature":     {host: map[string]string{".git/": ""}, make: func(a *archive) { a.dir(".git").file(".git/con\ufb01g", "x") }, left: ".git/con\ufb01g"},
	"secrets by sharp s":     {make: func(a *archive) { a.dir(".\u00dfh").file(".\u00dfh/authorized_keys", "x") }, left: ".\u00dfh .\u00dfh/authorized_keys"},
	"bashrc by long s":       {make: func(a *archive) { a.file(".ba\u017fhrc", "x") }, left: ".ba\u017fhrc"},
	"shell by Kelvin":        {make: func(a *archive) { a.file(".\u212ashrc", "x") }, left: ".\u212ashrc"},
	"start-up file":          {make: func(a *archive) { a.file(".bashrc", "x") }, left: ".bashrc"},
	"editor's tasks":         {make: func(a *archive) { a.dir(".vscode").file(".vscode/tasks.json", "x") }, left: ".vscode .vscode/tasks.json"},
	"direnv":                 {make: func(a *archive) { a.dir("d").file("d/.envrc", "x") }, left: "d/.envrc", files: "d"},
	"deletion of a hook":     {host: map[string]string{"sub/.git/hooks/x": "x"}, make: func(a *archive) { a.file(".wh.sub", "") }, left: "sub"},
	"opaque over a hook":     {host: map[string]string{"sub/.git/hooks/x": "x"}, make: func(a *archive) { a.dir("sub").file("sub/.wh..wh..opq", "") }, left: "sub/.git"},
	"file in place of hooks": {host: map[string]string{"sub/.git/hooks/x": "x"}, make: func(a *archive) { a.file("sub", "x") }, left: "sub"},
	"bare repository": {make: func(a *archive) {
		a.dir("sub").file("sub/config", "x").file("sub/HEAD", "x").dir("sub/objects").dir("sub/refs").dir("sub/hooks").file("sub/hooks/x", "x")
	}, left: "sub/config sub/HEAD sub/objects sub/refs sub/hooks sub/hooks/x", files: "sub"},
	"config of the host's repository": {host: map[string]string{"sub/HEAD": "x", "sub/objects/x": "x"}, make: func(a *archive) {
		a.dir("sub").file("sub/config", "x").dir("sub/below").file("sub/below/x", "x")
	}, left: "sub/config sub/below sub/below/x"},
	"repository around all": {make: func(a *archive) { a.file("head", "x").dir("REFS").file("config", "x") }, left: "head REFS config"},
	"hard link of protected": {make: func(a *archive) {
		a.file(".envrc", "x").put(tar.Header{Typeflag: tar.TypeLink, Name: "fine", Linkname: ".envrc"}, "")
	}, left: ".envrc", files: "fine"},
}

func TestHostileArchives(t *testing.T) {
	if len(hostile) < 60 {
		t.Errorf("%d cases, want at least 60", len(hostile))
	}
	for name, tc := range hostile {
		t.Run(name, func(t *testing.T) {
			files := map[string]string{"kept": "kept"}
			maps.Copy(files, tc.host)
			h := newHost(t, files)
			outside := func() string {
				all := show(t, h.outer)
				var lines []string
				for line := range strings.SplitSeq(all, "\n") {
					if !strings.HasPrefix(line, `"dir`) {
						lines = append(lines, line)
					}
				}
				return strings.Join(lines, "\n")
			}
			before, was := outside(), names(t, h.dir)
			a := newArchive(t)
			tc.make(a)
			set, err := a.read()
			if tc.refused {
				if err == nil {
					_ = set.Close()
					t.Fatal("the archive was read")
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			defer set.Close()
			d := h.open()
			p, err := set.Plan(d, d, h.since, nil)
			if err != nil {
				t.Fatal(err)
			}
			if err := p.WritePatch(discard{}, p.Items, func(s string) string { return s }); err != nil {
				t.Error(err)
			}
			for _, i := range p.Items {
				for _, r := range Quote(i.Path) {
					if r < ' ' || r == 0x202e || r == 0x200c {
						t.Errorf("%q is shown with %U", i.Path, r)
					}
				}
			}
			left := applied(t, p, false)
			for path := range strings.FieldsSeq(tc.left) {
				if left[path] == "" {
					t.Errorf("%q was applied", path)
				}
				delete(left, path)
			}
			for path, why := range left {
				t.Errorf("%q was not applied: %s", path, why)
			}
			if after := outside(); after != before {
				t.Errorf("outside there is\n%s\nwas\n%s", after, before)
			}
			now := names(t, h.dir)
			var changed []string
			for n, what := range now {
				if was[n] != what {
					changed = append(changed, n)
				}
			}
			want := strings.Split(tc.files, " ")
			if tc.files == "" {
				want = nil
			}
			for _, n := range want {
				if now[n] == "" || now[n] == was[n] {
					t.Errorf("%q was not made", n)
				}
			}
			if len(changed) != len(want) {
				t.Errorf("changed %q, want %q", changed, want)
			}
			for _, n := range changed {
				var st unix.Stat_t
				if err := unix.Lstat(filepath.Join(h.dir, n), &st); err != nil || st.Mode&0o7000 != 0 {
					t.Errorf("%q has mode %o, %v", n, st.Mode, err)
				}
			}
		})
	}
}

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

// names returns what is in a directory: for a file, link or directory by name, type and content.
func names(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := make(map[string]string)
	err := filepath.WalkDir(dir, func(name string, e os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, name)
		if rel == "." {
			return nil
		}
		out[rel] = e.Type().String()
		if e.Type().IsRegular() {
			data, err := os.ReadFile(name)
			if err != nil {
				return err
			}
			out[rel] += string(data)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// Directories that become links between plan and application lead nowhere.
func TestSwappedDirectories(t *testing.T) {
	for name, swap := range map[string]func(dir string) error{
		"a link out": func(dir string) error {
			return os.Symlink("../outside", filepath.Join(dir, "d"))
		},
		"a link within": func(dir string) error {
			return os.Symlink("other", filepath.Join(dir, "d"))
		},
		"a file":  func(dir string) error { return os.WriteFile(filepath.Join(dir, "d"), []byte("x"), 0o600) },
		"nothing": func(string) error { return nil },
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t, map[string]string{
				"d/edit": "old", "d/gone": "old", "d/tree/a": "old", "d/e/edit": "old", "d/e/gone": "old", "d/e/tree/a": "old",
				"other/edit": "old", "other/gone": "old", "other/tree/a": "old", "other/e/edit": "old", "other/e/gone": "old", "other/e/tree/a": "old",
			})
			outside := filepath.Join(h.outer, "outside")
			if err := os.CopyFS(outside, os.DirFS(filepath.Join(h.dir, "other"))); err != nil {
				t.Fatal(err)
			}
			p := h.plan(newArchive(t).dir("d").file("d/edit", "new").file("d/.wh.gone", "").file("d/.wh.tree", "").file("d/added", "new").dir("d/sub").file("d/sub/x", "new").
				dir("d/e").file("d/e/edit", "new").file("d/e/.wh.gone", "").file("d/e/.wh.tree", "").file("d/e/added", "new"))
			if err := os.Rename(filepath.Join(h.dir, "d"), filepath.Join(h.dir, "moved")); err != nil {
				t.Fatal(err)
			}
			if err := swap(h.dir); err != nil {
				t.Fatal(err)
			}
			before := show(t, h.outer)
			if left := applied(t, p, true); len(left) != len(p.Items) {
				t.Errorf("%d of %d items were not applied: %v", len(left), len(p.Items), left)
			}
			if after := show(t, h.outer); after != before {
				t.Errorf("there is\n%swas\n%s", after, before)
			}
		})
	}
}

// FuzzRead feeds archives to everything but Apply.
func FuzzRead(f *testing.F) {
	for _, tc := range hostile {
		a := newArchive(&testing.T{})
		tc.make(a)
		_ = a.w.Close()
		f.Add(a.buf.Bytes())
	}
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, data []byte) {
		set, err := Read(strings.NewReader(string(data)), dir)
		if err != nil {
			return
		}
		defer set.Close()
		d, err := Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		p, err := set.Plan(d, d, time.Time{}, nil)
		if err != nil {
			return
		}
		for _, i := range p.Items {
			if !validName(i.Path) {
				t.Errorf("an item for %q", i.Path)
			}
		}
		_ = p.WritePatch(discard{}, p.Items, Quote)
	})
}
