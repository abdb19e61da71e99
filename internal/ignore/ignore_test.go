package ignore

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// tree makes files, and directories of the names that end with a slash; NAME=TEXT has content.
func tree(t testing.TB, names ...string) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range names {
		name, content, _ := strings.Cut(name, "=")
		at := filepath.Join(dir, name)
		err := os.MkdirAll(filepath.Dir(at), 0o755)
		if strings.HasSuffix(name, "/") {
			err = errors.Join(err, os.MkdirAll(at, 0o755))
		} else {
			err = errors.Join(err, os.WriteFile(at, []byte(content), 0o644))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestPaths(t *testing.T) {
	files := []string{".env", "a/.env", "a/b/.env", "a/main.go", "a/b/c.o", "build/x", "src/build/y", ".git/logs/HEAD", ".git/config", ".git/refs/heads/build"}
	for name, tc := range map[string]struct {
		own, git string // .sandboxdignore; .gitignore, which is asked for
		want     string
	}{
		"none":                     {want: ""},
		"comments":                 {own: "# x\n\n   \n", want: ""},
		"a name at every depth":    {own: ".env\n", want: ".env a/.env a/b/.env"},
		"at the top":               {own: "/.env\n", want: ".env"},
		"a path":                   {own: "a/.env\r\n", want: "a/.env"},
		"two stars":                {own: "**/.env\na/**/main.go\na/**/c.o\n", want: ".env a/.env a/b/.env a/b/c.o a/main.go"},
		"a directory":              {own: "build/\n", want: "build src/build"},
		"everything but":           {own: "/*\n!/a/\n!/.git\n!/.sandboxdignore\n", want: ".env build src"},
		"taken back":               {own: ".env\n!/a/b/.env\n", want: ".env a/.env"},
		"too deep to take back":    {own: "/a\n!/a/b/.env\n", want: "a"},
		"not there yet":            {own: "/later\nsome/where/later\nlate*\n!nothing\n", want: "later some/where/later"},
		"taken back, not there":    {own: "later\n!later\n", want: ""},
		"below another, not there": {own: "/a\n/a/later\n", want: "a"},
		"no names within .git":     {own: "logs\n*.o\nbuild\nconfig\n", want: "a/b/c.o build config logs src/build"},
		"paths within .git":        {own: ".git/config\n", want: ".git/config"},
		"all of .git":              {own: ".git\n", want: ".git"},
		"git's":                    {git: "*.o\nbuild/\n.git\nlogs\n", want: "a/b/c.o build src/build"},
		"both":                     {own: "!build/\n.env", git: "build/\n!.env\n", want: ".env a/.env a/b/.env"},
		"git's without meaning":    {git: "../x\n./a\n[\n\\\n", want: ""},
	} {
		all := slices.Clone(files)
		if tc.own != "" {
			all = append(all, FileName+"="+tc.own)
		}
		if tc.git != "" {
			all = append(all, gitName+"="+tc.git)
		}
		got, err := Paths(t.Context(), tree(t, all...), tc.git != "")
		if err != nil || strings.Join(got, " ") != tc.want {
			t.Errorf("%s: %q, %v, want %q", name, got, err, tc.want)
		}
	}
	if got, err := Paths(t.Context(), tree(t, "a", ".gitignore=a\n"), false); len(got) > 0 || err != nil {
		t.Errorf(".gitignore counts though it was not asked for: %q, %v", got, err)
	}
}

// A file that cannot be honoured is an error: its author believes that it hides something.
func TestWhatCannotBeHonoured(t *testing.T) {
	long := strings.Repeat("x", maxFile+1)
	many := make([]string, api.MaxHidden+1)
	for i := range many {
		many[i] = fmt.Sprintf("many/%05d.o", i)
	}
	for name, tc := range map[string]struct {
		files []string
		make  func(dir string) error
		git   bool
		want  string
	}{
		"climbs":                 {files: []string{FileName + "=ok\n../secret\n"}, want: `line 2: "../secret": "." and ".."`},
		"climbs within":          {files: []string{FileName + "=a/../b"}, want: "line 1"},
		"a dot":                  {files: []string{FileName + "=./secret"}, want: "line 1"},
		"a slash":                {files: []string{FileName + "=/"}, want: "names nothing"},
		"two slashes":            {files: []string{FileName + "=a//b"}, want: "names nothing"},
		"an open bracket":        {files: []string{FileName + "=*.[ch"}, want: "not closed"},
		"an unknown class":       {files: []string{FileName + "=[[:secret:]]"}, want: "not closed"},
		"a last backslash":       {files: []string{FileName + `=a\`}, want: "not closed"},
		"a NUL":                  {files: []string{FileName + "=a\x00b"}, want: "a NUL"},
		"too large":              {files: []string{FileName + "=" + long}, want: "larger than 1024 KiB"},
		"too many patterns":      {files: []string{FileName + "=" + strings.Repeat("a\n", maxPatterns+1)}, want: "more than 10000 patterns"},
		"git's too large":        {files: []string{"a/.gitignore=" + long}, git: true, want: "larger than 1024 KiB"},
		"too many files":         {files: append(many, FileName+"=*.o"), want: "directories of them as a whole"},
		"a directory":            {files: []string{FileName + "/"}, want: "no regular file"},
		"a link":                 {make: func(dir string) error { return os.Symlink("/etc/passwd", filepath.Join(dir, FileName)) }, want: "is a link"},
		"a link to nothing":      {make: func(dir string) error { return os.Symlink("nothing", filepath.Join(dir, FileName)) }, want: "is a link"},
		"a pipe":                 {make: func(dir string) error { return syscall.Mkfifo(filepath.Join(dir, FileName), 0o644) }, want: "no regular file"},
		"git's link":             {make: func(dir string) error { return os.Symlink("/dev/zero", filepath.Join(dir, gitName)) }, git: true, want: "is a link"},
		"a name that is no text": {files: []string{FileName + "=*.key", "a\xff.key"}, want: "no UTF-8 text"},
	} {
		dir := tree(t, tc.files...)
		if tc.make != nil {
			if err := tc.make(dir); err != nil {
				t.Fatal(err)
			}
		}
		if got, err := Paths(t.Context(), dir, tc.git); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %d paths, %v, want %q", name, len(got), err, tc.want)
		}
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Paths(ended, tree(t, FileName+"=a"), false); !errors.Is(err, context.Canceled) {
		t.Errorf("after the end of its context: %v", err)
	}
}

// Links are names like others: none is followed, and a directory behind one is in no way looked
// at.
func TestLinksAreNotFollowed(t *testing.T) {
	outside := tree(t, "secret.key")
	dir := tree(t, FileName+"=*.key\nlinked/\n/out/later\n")
	for name, target := range map[string]string{"out": outside, "linked": outside, "x.key": "/nothing", "loop": "."} {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	got, err := Paths(t.Context(), dir, false)
	if want := []string{"x.key"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("%q, %v, want %q", got, err, want)
	}
}

// Root of a sandbox may read a directory of the user's that the user has closed.
func TestClosedDirectoryIsHidden(t *testing.T) {
	testenv.RequireOrdinaryUser(t) // root reads every directory
	dir := tree(t, FileName+"=*.key\n", "closed/a.key", "open/b.key")
	if err := os.Chmod(filepath.Join(dir, "closed"), 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Chmod(filepath.Join(dir, "closed"), 0o700) })
	got, err := Paths(t.Context(), dir, false)
	if want := []string{"closed", "open/b.key"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("%q, %v, want %q", got, err, want)
	}
}

// gitIgnored returns what git ignores of the paths, in a repository that is made of the
// directory.
func gitIgnored(t testing.TB, dir string, paths []string) []string {
	t.Helper()
	git := func(in string, args ...string) []byte {
		cmd := exec.Command("git", append([]string{"-C", dir, "-c", "core.excludesFile=/dev/null", "-c", "core.quotePath=false"}, args...)...)
		cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null")
		cmd.Stdin = strings.NewReader(in)
		out, err := cmd.Output()
		if exit, ok := errors.AsType[*exec.ExitError](err); err != nil && (!ok || exit.ExitCode() != 1) {
			t.Fatalf("git %v: %v", args, err)
		}
		return out
	}
	git("", "init", "-q")
	out := git(strings.Join(paths, "\x00")+"\x00", "check-ignore", "--no-index", "-z", "--stdin")
	var ignored []string
	for p := range bytes.SplitSeq(bytes.TrimSuffix(out, []byte{0}), []byte{0}) {
		if len(p) > 0 {
			ignored = append(ignored, string(p))
		}
	}
	slices.Sort(ignored)
	return ignored
}

// ignoredOf returns all paths of a tree, and the ignored ones with all below them.
func ignoredOf(t testing.TB, dir string) (all, ignored []string) {
	t.Helper()
	hidden, err := Paths(t.Context(), dir, true)
	if err != nil {
		t.Fatal(err)
	}
	err = filepath.WalkDir(dir, func(at string, d fs.DirEntry, err error) error {
		name, relErr := filepath.Rel(dir, at)
		if err != nil || relErr != nil || name == "." {
			return errors.Join(err, relErr)
		}
		if name == ".git" {
			return fs.SkipDir
		}
		all = append(all, name)
		if slices.ContainsFunc(hidden, func(h string) bool { return name == h || strings.HasPrefix(name, h+"/") }) {
			ignored = append(ignored, name)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(ignored)
	return all, ignored
}

// The same is ignored as by git: random trees and patterns of the pieces that have a meaning.
func TestLikeGit(t *testing.T) {
	testenv.RequirePeer(t, "git")
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	names := []string{"a", "b", "ab", "abc", "a.o", "b.o", ".x", "a b", "a ", "[a]", "a*", "!a", "#a", "aé", "-", "A", "a-b", "]", "x\ty", `a\b`}
	pieces := []string{
		"a", "b", "c", "*", "**", "?", "/", "/", "**/", "/**", ".o", ".", "[ab]", "[!a]", "[^b]", "[a-c]", "[]a]", "[]-a]", "[a-]", "[[:alpha:]]",
		"[[:punct:][:space:]]", "[[:upper:]-z]", "[[a]", `\*`, `\!`, `\#`, `\ `, " ", "[", `[\]a]`, `[a-\c]`, "[[:x:]]", "é", `\`, `\/`, "-", "!", "#", "..", "[/]",
	}
	lines := func() string {
		var out strings.Builder
		for range 1 + r.IntN(5) {
			switch r.IntN(8) {
			case 0, 1:
				out.WriteString("!")
			case 2:
				out.WriteString("/")
			}
			for range 1 + r.IntN(5) {
				out.WriteString(pieces[r.IntN(len(pieces))])
			}
			switch r.IntN(8) {
			case 0, 1:
				out.WriteString("/")
			case 2:
				out.WriteString("  ")
			case 3:
				out.WriteString("\r")
			}
			out.WriteString("\n")
		}
		return out.String()
	}
	for range testenv.Rounds(60, 1000) {
		files := []string{".gitignore=" + lines()}
		var dirs []string
		for range 25 {
			var name string
			for range r.IntN(4) {
				name += names[r.IntN(len(names))] + "/"
			}
			if name != "" {
				dirs = append(dirs, name)
			}
			files = append(files, name+names[r.IntN(len(names))]+"=")
		}
		for range 2 {
			files = append(files, dirs[r.IntN(len(dirs))]+".gitignore="+lines())
		}
		dir := t.TempDir()
		var shown []string
		for _, f := range files { // a file where a directory should be is left out
			name, content, _ := strings.Cut(f, "=")
			at := filepath.Join(dir, name)
			if os.MkdirAll(filepath.Dir(at), 0o755) == nil && os.WriteFile(at, []byte(content), 0o644) == nil && content != "" {
				shown = append(shown, f)
			}
		}
		all, got := ignoredOf(t, dir)
		if want := gitIgnored(t, dir, all); !slices.Equal(got, want) {
			t.Fatalf("%q:\nignored %q\nby git  %q", shown, got, want)
		}
		_ = os.RemoveAll(dir) // thousands of them take inodes
	}
}

// A pattern that is hostile to readers that try one way after the other takes no time.
func TestHostilePatterns(t *testing.T) {
	name := strings.Repeat("a", 255)
	for _, text := range []string{strings.Repeat("*a", 200) + "b", strings.Repeat("**/", 300) + "b", strings.Repeat("[*a]*", 100) + "x/y"} {
		p, err := parseLine(text)
		if err != nil {
			t.Fatal(err)
		}
		if p.matches(strings.Repeat(name+"/", 15)+name, name, false) {
			t.Errorf("%.20s matches", text)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, seed := range []string{"*.o\n!a\n", "/a/**/b\n", "[!a-z]\\", "a\x00b", "**/", "\ufeffx \\ \n", "[[:alpha:]"} {
		f.Add([]byte(seed), "a/b/c.o")
	}
	f.Fuzz(func(t *testing.T, data []byte, name string) {
		loose, err := parse(data, false)
		if err != nil && len(loose) > 0 {
			t.Fatal("patterns with an error")
		}
		strict, strictErr := parse(data, true)
		if strictErr == nil && len(strict) != len(loose) {
			t.Fatalf("%d strict patterns, %d loose", len(strict), len(loose))
		}
		for i := range loose {
			p := &loose[i]
			if p.matches(name, filepath.Base(name), false) && !p.matches(name, filepath.Base(name), true) {
				t.Fatalf("%+v matches %q as a file, and not as a directory", p, name)
			}
		}
	})
}

func BenchmarkPaths(b *testing.B) {
	dir := b.TempDir()
	for i := range 1000 {
		sub := filepath.Join(dir, fmt.Sprint("d", i))
		if err := os.Mkdir(sub, 0o755); err != nil {
			b.Fatal(err)
		}
		for j := range 100 {
			if err := os.WriteFile(filepath.Join(sub, fmt.Sprint("f", j)), nil, 0o644); err != nil {
				b.Fatal(err)
			}
		}
	}
	for name, patterns := range map[string]string{"3": ".env\n*.key\nnode_modules/\n", "100": strings.Repeat("*.key\n/some/where/\nname\n**/x/*.y\n", 25)} {
		if err := os.WriteFile(filepath.Join(dir, FileName), []byte(patterns), 0o644); err != nil {
			b.Fatal(err)
		}
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if _, err := Paths(b.Context(), dir, false); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
