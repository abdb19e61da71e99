package cli

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline/cmdtest"
)

// tree lists the entries below dir, one per line.
func tree(t *testing.T, dir string) []string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(dir, func(p string, e fs.DirEntry, err error) error {
		if err != nil || p == dir {
			return err
		}
		rel, _ := filepath.Rel(dir, p)
		fi, err := e.Info()
		if err != nil {
			return err
		}
		switch {
		case e.Type() == fs.ModeSymlink:
			link, _ := os.Readlink(p)
			out = append(out, rel+" -> "+link)
		case e.IsDir():
			out = append(out, rel+"/")
		default:
			b, err := os.ReadFile(p)
			if errors.Is(err, fs.ErrPermission) {
				b, err = []byte("(unreadable)"), nil
			}
			if err != nil {
				return err
			}
			out = append(out, fmt.Sprintf("%s %v %s", rel, fi.Mode(), b))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func write(t *testing.T, path, body string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(body), 0o644); err != nil {
		t.Fatal(err)
	}
}

func symlink(t *testing.T, target, path string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(target, path); err != nil {
		t.Fatal(err)
	}
}

func link(name, target string) cmdtest.Entry {
	return cmdtest.Entry{Header: tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target}}
}

func hardlink(name, target string) cmdtest.Entry {
	return cmdtest.Entry{Header: tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: target}}
}

func TestCopyOut(t *testing.T) {
	someTree := []cmdtest.Entry{
		fileEntry("f", "file"), dirEntry("d/"), fileEntry("d/g", "deeper"), link("l", "/etc/passwd"), hardlink("h", "f"),
		{Header: tar.Header{Typeflag: tar.TypeFifo, Name: "pipe"}},
	}
	got := func(prefix string) []string {
		out := []string{"d/", "d/g -rw-r--r-- deeper", "f -rw-r--r-- file", "h -rw-r--r-- file", "l -> /etc/passwd"}
		for i := range out {
			out[i] = prefix + out[i]
		}
		return out
	}
	tests := []struct {
		name    string
		entries []cmdtest.Entry
		file    bool
		from    string            // default sb1:/x
		to      string            // default .
		before  map[string]string // existing entries: path → content, or "-> target"
		want    []string
		err     string
	}{
		{name: "file into a directory", file: true, entries: []cmdtest.Entry{fileEntry("x", "hi")}, want: []string{"x -rw-r--r-- hi"}},
		{name: "file, called by its place", file: true, entries: []cmdtest.Entry{fileEntry(".", "hi")}, want: []string{"x -rw-r--r-- hi"}},
		{name: "file under a new name", file: true, entries: []cmdtest.Entry{fileEntry("x", "hi")}, to: "y", want: []string{"y -rw-r--r-- hi"}},
		{
			name: "file over a file", file: true, entries: []cmdtest.Entry{fileEntry("x", "new")}, to: "y", before: map[string]string{"y": "old"},
			want: []string{"y -rw-r--r-- new"},
		},
		{name: "file into a directory that is missing", file: true, entries: []cmdtest.Entry{fileEntry("x", "hi")}, to: "d/", err: "d/ does not exist"},
		{
			name: "file into a file", file: true, entries: []cmdtest.Entry{fileEntry("x", "hi")}, to: "y/", before: map[string]string{"y": "old"},
			err: "not a directory", want: []string{"y -rw-r--r-- old"},
		},
		{name: "tree into a directory", entries: someTree, want: append([]string{"x/"}, got("x/")...)},
		{name: "tree under a new name", entries: someTree, to: "y", want: append([]string{"y/"}, got("y/")...)},
		{name: "contents of a tree", entries: someTree, from: "sb1:/x/.", to: ".", want: got("")},
		{
			name: "tree over a file", entries: someTree, to: "y", before: map[string]string{"y": "old"},
			err: "not a directory", want: []string{"y -rw-r--r-- old"},
		},
		{
			name: "tree into a tree", entries: someTree, before: map[string]string{"x/f": "old", "x/kept": "mine"},
			want: []string{"x/", "x/d/", "x/d/g -rw-r--r-- deeper", "x/f -rw-r--r-- file", "x/h -rw-r--r-- file", "x/kept -rw-r--r-- mine", "x/l -> /etc/passwd"},
		},
		{name: "empty directory", entries: []cmdtest.Entry{}, to: "y", want: []string{"y/"}},
		{name: "setuid and unreadable directories do not come along", entries: []cmdtest.Entry{
			{Header: tar.Header{Typeflag: tar.TypeDir, Name: "d/", Mode: 0}},
			{Header: tar.Header{Name: "d/s", Mode: 0o6755}, Body: "#!"},
		}, to: "y", want: []string{"y/", "y/d/", "y/d/s -rwxr-xr-x #!"}},
		{name: "relative sandbox path", file: true, entries: []cmdtest.Entry{fileEntry("x", "hi")}, from: "sb1:x", want: []string{"x -rw-r--r-- hi"}},

		// Archives of a hostile sandbox.
		{name: "parent", entries: []cmdtest.Entry{fileEntry("../evil", "x")}, want: []string{"x/"}, err: "does not stay"},
		{name: "hidden parent", entries: []cmdtest.Entry{fileEntry("a/../../evil", "x")}, want: []string{"x/"}, err: "does not stay"},
		{name: "absolute", entries: []cmdtest.Entry{fileEntry("/tmp/evil", "x")}, want: []string{"x/"}, err: "does not stay"},
		{name: "through a link", entries: []cmdtest.Entry{link("a", "../.."), fileEntry("a/evil", "x")}, want: []string{"x/", "x/a -> ../.."}, err: "escapes"},
		{name: "through an absolute link", entries: []cmdtest.Entry{link("a", "/tmp"), fileEntry("a/evil", "x")}, want: []string{"x/", "x/a -> /tmp"}, err: "escapes"},
		{name: "directory through a link", entries: []cmdtest.Entry{link("a", "../outside"), dirEntry("a/evil/")}, want: []string{"x/", "x/a -> ../outside"}, err: "escapes"},
		{name: "file over a link is the file", entries: []cmdtest.Entry{link("a", "../outside"), fileEntry("a", "x")}, want: []string{"x/", "x/a -rw-r--r-- x"}},
		{name: "link over a link is the link", entries: []cmdtest.Entry{link("a", "b"), link("a", "c")}, want: []string{"x/", "x/a -> c"}},
		{name: "hard link to the outside", entries: []cmdtest.Entry{hardlink("h", "../secret")}, want: []string{"x/"}, err: "does not stay"},
		{name: "hard link through a link", entries: []cmdtest.Entry{link("a", ".."), hardlink("h", "a/secret")}, want: []string{"x/", "x/a -> .."}, err: "escapes"},
		{name: "hard link to itself", entries: []cmdtest.Entry{fileEntry("f", "x"), hardlink("f", "f")}, want: []string{"x/", "x/f -rw-r--r-- x"}, err: "itself"},
		{name: "a file that turns into a tree", file: true, entries: []cmdtest.Entry{fileEntry("x", "hi"), fileEntry("evil", "x")}, want: []string{"x -rw-r--r-- hi"}, err: "more than that file"},
		{name: "a file over the destination", entries: []cmdtest.Entry{fileEntry(".", "x")}, want: []string{"x/"}, err: "replace the destination"},
		{name: "a link in the place of a file", file: true, entries: []cmdtest.Entry{link("x", "../outside")}, err: "something else"},
		{name: "nothing in the place of a file", file: true, entries: []cmdtest.Entry{dirEntry("x/")}, err: "something else"},
		{name: "a tree that holds one file of its own name", entries: []cmdtest.Entry{fileEntry("x", "hi")}, want: []string{"x/", "x/x -rw-r--r-- hi"}},
		{name: "the contents of a file", file: true, from: "sb1:/x/.", entries: []cmdtest.Entry{fileEntry("x", "hi")}, err: "not a directory"},
		{
			name: "a copy does not follow a link that an earlier one brought", entries: []cmdtest.Entry{fileEntry("evil", "x")}, before: map[string]string{"x": "-> ../outside"},
			want: []string{"x -> ../outside"}, err: "escapes",
		},
		{name: "a device is left out", entries: []cmdtest.Entry{{Header: tar.Header{Typeflag: tar.TypeChar, Name: "null", Devmajor: 1, Devminor: 3}}}, want: []string{"x/"}},
		{
			name: "too much", entries: []cmdtest.Entry{fileEntry("a", strings.Repeat("x", 600)), fileEntry("b", strings.Repeat("x", 600))},
			want: []string{"x/", "x/a -rw-r--r-- " + strings.Repeat("x", 600)}, err: "more than 1000 bytes",
		},
		{name: "a name without end", entries: []cmdtest.Entry{fileEntry(strings.Repeat("a/", 3000)+"x", "x")}, want: []string{"x/"}, err: "a name of 6001 bytes"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := cmdtest.New()
			oneSandbox(f)
			f.Archives["/x"], f.Files["/x"] = tt.entries, tt.file
			// Compare the outer directory too: nothing may appear beside the destination.
			outer := t.TempDir()
			write(t, outer+"/secret", "mine")
			write(t, outer+"/outside/kept", "mine")
			dir := outer + "/dst"
			if err := os.Mkdir(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			for name, body := range tt.before {
				if target, ok := strings.CutPrefix(body, "-> "); ok {
					symlink(t, target, filepath.Join(dir, name))
				} else {
					write(t, filepath.Join(dir, name), body)
				}
			}
			from, to := tt.from, tt.to
			if from == "" {
				from = "sb1:/x"
			}
			if to == "" {
				to = "."
			}
			t.Chdir(dir)
			got := inline(t, f.Start(t), "", "cp", "--max", "1000", from, to)
			if tt.err == "" && got.Code != 0 || tt.err != "" && (got.Code != 1 || !strings.Contains(got.Stderr, tt.err)) {
				t.Errorf("exit %d, stderr %q, want %q", got.Code, got.Stderr, tt.err)
			}
			if diff := cmp.Diff(tt.want, tree(t, dir)); diff != "" {
				t.Errorf("destination (-want +got):\n%s", diff)
			}
			want := []string{"outside/", "outside/kept -rw-r--r-- mine", "secret -rw-r--r-- mine"}
			var beside []string
			for _, line := range tree(t, outer) {
				if !strings.HasPrefix(line, "dst") {
					beside = append(beside, line)
				}
			}
			if diff := cmp.Diff(want, beside); diff != "" {
				t.Errorf("beside the destination (-want +got):\n%s", diff)
			}
		})
	}
}

func TestCopyIn(t *testing.T) {
	tests := []struct {
		name string
		from string
		to   string // default sb1:/app
		want map[string]string
		err  string
	}{
		{name: "file under a new name", from: "f", want: map[string]string{"/": "0 app 644 file\n"}},
		{name: "file into a directory", from: "f", to: "sb1:/dir", want: map[string]string{"/dir": "0 f 644 file\n"}},
		{name: "file over a file", from: "f", to: "sb1:/file", want: map[string]string{"/": "0 file 644 file\n"}},
		{name: "file into a directory to be made", from: "f", to: "sb1:/new/", want: map[string]string{"/new": "0 f 644 file\n"}},
		{name: "file into the root", from: "f", to: "sb1:/", want: map[string]string{"/": "0 f 644 file\n"}},
		{name: "tree under a new name", from: "d", want: map[string]string{"/": "5 app/ 755 \n2 app/l 777 ../f\n5 app/sub/ 755 \n0 app/sub/g 644 deeper\n"}},
		{name: "tree into a directory", from: "d/", to: "sb1:/dir", want: map[string]string{"/dir": "5 d/ 755 \n2 d/l 777 ../f\n5 d/sub/ 755 \n0 d/sub/g 644 deeper\n"}},
		{name: "contents of a tree", from: "d/.", to: "sb1:/dir", want: map[string]string{"/dir": "2 l 777 ../f\n5 sub/ 755 \n0 sub/g 644 deeper\n"}},
		{name: "contents into the root", from: "d/.", to: "sb1:/", want: map[string]string{"/": "2 l 777 ../f\n5 sub/ 755 \n0 sub/g 644 deeper\n"}},
		{name: "a link stays one", from: "dl", want: map[string]string{"/": "2 app 777 d\n"}},
		{name: "a link with a slash is what it points to", from: "dl/", to: "sb1:/dir", want: map[string]string{"/dir": "5 dl/ 755 \n2 dl/l 777 ../f\n5 dl/sub/ 755 \n0 dl/sub/g 644 deeper\n"}},
		{name: "a name with a colon", from: "./a:b", want: map[string]string{"/": "0 app 644 colon\n"}},
		{name: "tree over a file", from: "d", to: "sb1:/file", err: "exists and is not a directory"},
		{name: "file with a slash", from: "f/", err: "not a directory"},
		{name: "no such sandbox", from: "f", to: "nope:/x", err: `no sandbox "nope"`},
		{name: "refused", from: "f", to: "sb1:/full/f", err: "the disk is full"},
		{name: "a pipe does not block", from: "pipes", want: map[string]string{"/": "5 app/ 755 \n"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := cmdtest.New()
			oneSandbox(f)
			f.Archives["/dir"] = []cmdtest.Entry{fileEntry("dir", "confusing")}
			f.Archives["/"] = []cmdtest.Entry{fileEntry("dir/dir", "")}
			f.Files["/file"] = true
			f.Archives["/file"] = []cmdtest.Entry{fileEntry("file", "old")}
			dir := t.TempDir()
			write(t, dir+"/f", "file")
			write(t, dir+"/a:b", "colon")
			write(t, dir+"/d/sub/g", "deeper")
			symlink(t, "../f", dir+"/d/l")
			symlink(t, "d", dir+"/dl")
			if err := os.Mkdir(dir+"/pipes", 0o755); err != nil {
				t.Fatal(err)
			}
			if err := syscall.Mkfifo(dir+"/pipes/p", 0o644); err != nil {
				t.Fatal(err)
			}
			to := tt.to
			if to == "" {
				to = "sb1:/app"
			}
			t.Chdir(dir)
			got := inline(t, f.Start(t), "", "cp", tt.from, to)
			if tt.err == "" && got.Code != 0 || tt.err != "" && (got.Code != 1 || !strings.Contains(got.Stderr, tt.err)) {
				t.Errorf("exit %d, stderr %q, want %q", got.Code, got.Stderr, tt.err)
			}
			f.Mu.Lock()
			defer f.Mu.Unlock()
			if tt.want == nil {
				tt.want = map[string]string{}
			}
			if diff := cmp.Diff(tt.want, f.Uploads); diff != "" {
				t.Errorf("uploads (-want +got):\n%s", diff)
			}
		})
	}
}

func TestParsePlace(t *testing.T) {
	tests := []struct {
		arg  string
		want place
		err  bool
	}{
		{arg: "a", want: place{path: "a"}},
		{arg: "id:/a", want: place{sandbox: "id", path: "/a"}},
		{arg: "id:a", want: place{sandbox: "id", path: "/a"}},
		{arg: "id:a:b", want: place{sandbox: "id", path: "/a:b"}},
		{arg: "id:/a/.", want: place{sandbox: "id", path: "/a/."}},
		{arg: "./id:a", want: place{path: "./id:a"}},
		{arg: ".a:b", want: place{path: ".a:b"}},
		{arg: "d/a:b", want: place{path: "d/a:b"}},
		{arg: "/a:b", want: place{path: "/a:b"}},
		{arg: "", err: true},
		{arg: ":/a", err: true},
		{arg: "id:", err: true},
		{arg: "a\x00b", err: true},
	}
	for _, tt := range tests {
		got, err := parsePlace(tt.arg)
		if (err != nil) != tt.err || err == nil && got != tt.want {
			t.Errorf("parsePlace(%q) = %+v, %v; want %+v, error %v", tt.arg, got, err, tt.want, tt.err)
		}
	}
}

// With "-" an archive goes to stdout, under the source's name, and comes from stdin as it is.
func TestCpStream(t *testing.T) {
	f := cmdtest.New()
	f.Sandboxes = []api.Sandbox{{ID: "sb1", Name: "work"}}
	f.Archives["/var/log"] = []cmdtest.Entry{
		{Header: tar.Header{Name: "a"}, Body: "hello"},
		{Header: tar.Header{Name: "b", Typeflag: tar.TypeLink, Linkname: "a"}},
		{Header: tar.Header{Name: "c", Typeflag: tar.TypeSymlink, Linkname: "/etc/passwd"}},
	}
	f.Archives["/f"], f.Files["/f"] = []cmdtest.Entry{{Header: tar.Header{Name: "whatever"}, Body: "one"}}, true
	f.Archives["/evil"] = []cmdtest.Entry{{Header: tar.Header{Name: "../out"}, Body: "x"}}
	f.Archives["/link"] = []cmdtest.Entry{{Header: tar.Header{Name: "l", Typeflag: tar.TypeLink, Linkname: "/etc/passwd"}}}
	f.Archives["/through"] = []cmdtest.Entry{
		{Header: tar.Header{Name: "d", Typeflag: tar.TypeSymlink, Linkname: "/etc"}}, {Header: tar.Header{Name: "d/passwd"}, Body: "x"},
	}
	f.Archives["/dev"] = []cmdtest.Entry{{Header: tar.Header{Name: "sda", Typeflag: tar.TypeBlock}}, {Header: tar.Header{Name: "shm/", Typeflag: tar.TypeDir}}}
	f.Archives["/"] = []cmdtest.Entry{{Header: tar.Header{Name: "a"}, Body: "x"}}
	socket := f.Start(t)
	for source, want := range map[string]string{
		"work:/var/log":   "log/ log/a=hello log/b->log/a log/c->/etc/passwd",
		"work:/var/log/.": "./ a=hello b->a c->/etc/passwd",
		"work:/f":         "f=one",
		"work:/dev":       "dev/ dev/shm/",
		"work:/tmp/..":    "./ a=x",
		"work:/evil":      "",
		"work:/link":      "",
		"work:/through":   "",
	} {
		got := cmdtest.Finish(t, cmdtest.Command(t, socket, "cp", source, "-"))
		var names []string
		r := tar.NewReader(strings.NewReader(got.Stdout))
		for want != "" {
			hdr, err := r.Next()
			if err != nil {
				break
			}
			name := hdr.Name
			if hdr.Linkname != "" {
				name += "->" + hdr.Linkname
			}
			if body, _ := io.ReadAll(r); len(body) > 0 {
				name += "=" + string(body)
			}
			names = append(names, name)
		}
		if strings.Join(names, " ") != want || (got.Code == 0) != (want != "") {
			t.Errorf("%s: exit %d, %q, %s", source, got.Code, names, got.Stderr)
		}
	}
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	if err := w.WriteHeader(&tar.Header{Name: "x", Size: 2, Mode: 0o644}); err != nil {
		t.Fatal(err)
	}
	_, _ = w.Write([]byte("hi"))
	_ = w.Close()
	cmd := cmdtest.Command(t, socket, "cp", "-", "work:/in")
	cmd.Stdin = &archive
	if got := cmdtest.Finish(t, cmd); got.Code != 0 || !strings.Contains(f.Uploads["/in"], "x") {
		t.Errorf("exit %d, %q, %s", got.Code, f.Uploads["/in"], got.Stderr)
	}
	_, slave := cmdtest.OpenPTY(t)
	cmd = cmdtest.Command(t, socket, "cp", "work:/f", "-")
	cmd.Stdout = slave
	if got := cmdtest.Finish(t, cmd); got.Code != 2 {
		t.Errorf("to a terminal: exit %d, %s", got.Code, got.Stderr)
	}
}
