package build

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// archive makes a tar of lines: "name" is a file with its name as content, "name=content" one with
// that, "name/" a directory, "name>target" a symbolic link, "name~target" a hard link. "0750 1:2
// name" has a mode and an owner.
func archive(t testing.TB, lines ...string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, line := range lines {
		h := &tar.Header{Typeflag: tar.TypeReg, Mode: 0o644, ModTime: time.Unix(1000, 0), Format: tar.FormatPAX}
		if f := strings.SplitN(line, " ", 3); len(f) == 3 && line[0] == '0' {
			if _, err := fmt.Sscanf(f[0]+" "+f[1], "%o %d:%d", &h.Mode, &h.Uid, &h.Gid); err != nil {
				t.Fatal(err)
			}
			line = f[2]
		} else if strings.HasSuffix(line, "/") {
			h.Mode = 0o755
		}
		body := ""
		switch name, rest, ok := strings.Cut(line, "="); {
		case ok:
			h.Name, body = name, rest
		case strings.HasSuffix(line, "/"):
			h.Name, h.Typeflag = line, tar.TypeDir
		case strings.Contains(line, ">"):
			h.Name, h.Linkname, _ = strings.Cut(line, ">")
			h.Typeflag, h.Mode = tar.TypeSymlink, 0o777
		case strings.Contains(line, "~"):
			h.Name, h.Linkname, _ = strings.Cut(line, "~")
			h.Typeflag = tar.TypeLink
		default:
			h.Name, body = line, line
		}
		h.Size = int64(len(body))
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, body); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// atHand is an archive as a context is kept, and streamed as a layer is.
func atHand(data []byte) *Archive {
	return &Archive{At: bytes.NewReader(data), Open: func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil }}
}

func streamed(data []byte) *Archive {
	return &Archive{Open: func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil }}
}

func spool(t testing.TB) *Spool {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "spool")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return NewSpool(f, 1<<30)
}

// list lists a tar, a line each, in archive's notation without owners and modes that are 0:0 and
// usual.
func list(t testing.TB, data []byte) []string {
	t.Helper()
	var out []string
	r := tar.NewReader(bytes.NewReader(data))
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		line, usual := h.Name, int64(0o644)
		switch h.Typeflag {
		case tar.TypeDir:
			usual = 0o755
		case tar.TypeSymlink:
			line, usual = line+">"+h.Linkname, 0o777
		case tar.TypeLink:
			line += "~" + h.Linkname
		default:
			line += "=" + string(body)
		}
		if h.Mode != usual || h.Uid != 0 || h.Gid != 0 {
			line = fmt.Sprintf("%04o %d:%d %s", h.Mode, h.Uid, h.Gid, line)
		}
		out = append(out, line)
	}
}

// rootfs is the destination of the tests: a merged /usr, a sticky /tmp, links in all directions.
var rootfs = []string{
	"bin>usr/bin", "lib>usr/lib", "etc/", "etc/passwd=root:x:0:0::/:\nbob:x:1000:1001::/:\nevil:x:x0:0::/:\n", "etc/group=staff:x:50:\nbad:x:-1:\n",
	"usr/", "usr/bin/", "usr/bin/sh", "usr/lib/", "01777 0:0 tmp/", "0700 5:6 home/", "out>../../../../etc", "abs>/etc/..", "loop>loop2", "loop2>loop",
	"dangling>/new/place", "file", "0755 7:8 owned/", "deep/", "deep/link>../tmp", "deep/abs>/etc",
}

var sources = []string{
	"Dockerfile=FROM x\n", "a.txt", "b.txt", "0755 9:9 run.sh", "dir/", "dir/one", "0700 0:0 dir/sub/", "dir/sub/two", "dir/link>one", "dir/hard~dir/one",
	"tolink>dir", "away>/etc/passwd", "up>../../a.txt", "sp[1].txt", "0750 0:0 private/", "private/x", "bin/", "bin/tool", "wh/", "wh/.wh.file", ".hidden",
	"home/", "home/in", "etc/", "etc/passwd=mine",
}

func TestCopy(t *testing.T) {
	for _, c := range []struct {
		name, instruction string
		want              []string // lines of list, or one that begins with "error "
	}{
		{"file to a name", "COPY a.txt /b", []string{"b=a.txt"}},
		{"file into a directory by its slash", "COPY a.txt /new/dir/", []string{"new/", "new/dir/", "new/dir/a.txt=a.txt"}},
		{"file into a directory that is there", "COPY a.txt /tmp", []string{"1777 0:0 tmp/", "tmp/a.txt=a.txt"}},
		{"parents keep what they are", "COPY a.txt /home/x/y", []string{"0700 5:6 home/", "home/x/", "home/x/y=a.txt"}},
		{"relative to the working directory", "COPY a.txt rel", []string{"wd/", "wd/rel=a.txt"}},
		{"the working directory itself", "COPY a.txt .", []string{"wd/", "wd/a.txt=a.txt"}},
		{"through a link of the image", "COPY bin/tool /bin/", []string{"usr/", "usr/bin/", "usr/bin/tool=bin/tool"}},
		{"a link cannot lead out", "COPY a.txt /out/x", []string{"etc/", "etc/x=a.txt"}},
		{"dots cannot lead out", "COPY a.txt /../../../x", []string{"x=a.txt"}},
		{"link to the root", "COPY a.txt /abs/", []string{"a.txt=a.txt"}},
		{"link in the middle", "COPY a.txt /deep/link/x", []string{"1777 0:0 tmp/", "tmp/x=a.txt"}},
		{"absolute link in the middle", "COPY a.txt /deep/abs/x", []string{"etc/", "etc/x=a.txt"}},
		{"link to nowhere is made to lead somewhere", "COPY a.txt /dangling/", []string{"new/", "new/place/", "new/place/a.txt=a.txt"}},
		{"loop", "COPY a.txt /loop/x", []string{`error "/loop/x": more than 255 symbolic links`}},
		{"content of a directory", "COPY dir /d", []string{
			"d/", "d/hard=dir/one", "d/link>one", "d/one~d/hard", "0700 0:0 d/sub/", "d/sub/two=dir/sub/two",
		}},
		{"content of a directory into one that is there", "COPY private /tmp", []string{"1777 0:0 tmp/", "tmp/x=private/x"}},
		{"a new directory is like its source", "COPY private /p", []string{"0750 0:0 p/", "p/x=private/x"}},
		{"nested directories become like their sources", "COPY . /", []string{"error /bin"}},
		{"link as a source is followed", "COPY tolink /t", []string{
			"t/", "t/hard=dir/one", "t/link>one", "t/one~t/hard", "0700 0:0 t/sub/", "t/sub/two=dir/sub/two",
		}},
		{"a link of the context stays in the context", "COPY away /x", []string{"x=mine"}},
		{"as do dots in one", "COPY up /x", []string{"x=a.txt"}},
		{"and dots in the name", "COPY ../../a.txt /x", []string{"x=a.txt"}},
		{"wildcards", "COPY *.txt /w/", []string{"w/", "w/a.txt=a.txt", "w/b.txt=b.txt", "w/sp[1].txt=sp[1].txt"}},
		{"wildcards in the middle", "COPY d*/o?e /w/", []string{"w/", "w/one=dir/one"}},
		{"escaped wildcards", "COPY sp[[]1].txt /w/", []string{"w/", "w/sp[1].txt=sp[1].txt"}},
		{"wildcards that match nothing", "COPY nothing* /w/", nil},
		{"wildcards do not look through links", "COPY to*/one /w/", nil},
		{"but before them links are followed", "COPY tolink/o* /w/", []string{"w/", "w/one=dir/one"}},
		{"and at the end", "COPY tolin? /w/", []string{
			"w/", "w/hard=dir/one", "w/link>one", "w/one~w/hard", "0700 0:0 w/sub/", "w/sub/two=dir/sub/two",
		}},
		{"bad pattern", "COPY a[ /w/", []string{"error the pattern cannot be read"}},
		{"several sources", "COPY a.txt dir/one /w/", []string{"w/", "w/a.txt=a.txt", "w/one=dir/one"}},
		{"later sources win", "COPY a.txt dir/../b.txt <<a.txt /w/\nfrom here\na.txt", []string{"w/", "w/a.txt=from here\n", "w/b.txt=b.txt"}},
		{"missing", "COPY nope /x", []string{`error "nope": no such file or directory in the context`}},
		{"many matches need a directory", "COPY *.txt /w", []string{`error 3 sources match: the destination "/w" must be a directory`}},
		{"file onto a directory's name", "COPY dir /file", []string{`error destination "/file" is not a directory`}},
		{"directory in the way of a file", "COPY home/in /x/\nCOPY dir /x/in", []string{`error`}},
		{"file in the way", "COPY a.txt /file/x", []string{`error "/file" is not a directory`}},
		{"whiteout", "COPY wh /w", []string{`error "wh": destination "/w": "/w/.wh.file"`, "cannot be in an image"}},
		{"whiteout as a directory of the destination", "COPY a.txt /.wh.etc/x", []string{`error "/.wh.etc" cannot be in an image`}},
		{"a name that is too long", "COPY a.txt /" + strings.Repeat("n", 256) + "/x", []string{"error a component of more than 255 bytes"}},
		{"a name that is too long at the end", "COPY a.txt /" + strings.Repeat("n", 256), []string{"error a component of more than 255 bytes"}},
		{"link is replaced, not followed, at the end", "COPY a.txt /tmp/../dangling", []string{"new/", "new/place=a.txt"}},
		{"owner by number", "COPY --chown=3:4 dir/sub /w/", []string{"0700 3:4 w/", "0644 3:4 w/two=dir/sub/two"}},
		{"owner without group", "COPY --chown=3 a.txt /w", []string{"0644 3:3 w=a.txt"}},
		{"owner by name", "COPY --chown=bob a.txt /w", []string{"0644 1000:1001 w=a.txt"}},
		{"owner and group by name", "COPY --chown=bob:staff a.txt /w", []string{"0644 1000:50 w=a.txt"}},
		{"unknown owner", "COPY --chown=alice a.txt /w", []string{`error --chown=alice: "alice" is not in /etc/passwd`}},
		{"unknown group", "COPY --chown=0:alice a.txt /w", []string{`error "alice" is not in /etc/group`}},
		{"owner whose id is no number", "COPY --chown=evil a.txt /w", []string{`error the id "x0" is not a number`}},
		{"group that a variable is to name", "COPY --chown=0:$NOPE a.txt /w", []string{`error --chown=0:: "0:": the group is empty`}},
		{"group whose id is no number", "COPY --chown=0:bad a.txt /w", []string{`error the id "-1" is not a number`}},
		{"owner that a sandbox cannot have", "COPY --chown=70000 a.txt /w", []string{"error end at 65535"}},
		{"mode", "COPY --chmod=4711 dir/sub a.txt /w/", []string{"4711 0:0 w/", "4711 0:0 w/a.txt=a.txt", "4711 0:0 w/two=dir/sub/two"}},
		{"owners of the sender do not come along", "COPY run.sh /w", []string{"0755 0:0 w=run.sh"}},
		{"directory that is there and has an owner", "COPY a.txt /owned/", []string{"0755 7:8 owned/", "owned/a.txt=a.txt"}},
		{"here-document", "COPY <<x /w\nhello\nx", []string{"w=hello\n"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := doCopy(t, c.instruction, sources, rootfs)
			if len(c.want) > 0 && strings.HasPrefix(c.want[0], "error") {
				for _, w := range c.want {
					if err == nil || !strings.Contains(err.Error(), strings.TrimPrefix(strings.TrimPrefix(w, "error"), " ")) {
						t.Errorf("%v, want %q; got %q", err, w, got)
					}
				}
				if err != nil && !errors.Is(err, ErrInvalid) {
					t.Errorf("%v is not of the class ErrInvalid", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("(-want +got)\n%s", diff)
			}
		})
	}
}

// doCopy executes the last instruction of a stage whose working directory is /wd, after the ones
// before it.
func doCopy(t testing.TB, instructions string, files, rootfs []string) ([]string, error) {
	t.Helper()
	_, steps, _, err := evaluate(t, []byte("FROM base\nWORKDIR /wd\n"+instructions+"\n"), Options{Platform: here})
	if err != nil {
		return nil, err
	}
	src, _, err := Context(t.Context(), atHand(archive(t, files...)), "", Limits{})
	if err != nil {
		return nil, err
	}
	dst := NewTree(Limits{})
	if err := dst.Apply(streamed(archive(t, append([]string{"wd/"}, rootfs...)...))); err != nil {
		return nil, err
	}
	var out []string
	for _, list1 := range steps {
		for _, step := range list1 {
			if step.Copy == nil {
				continue
			}
			sp := spool(t)
			chosen, err := src.Select(t.Context(), step.Copy, sp)
			if err != nil {
				return nil, err
			}
			change, err := dst.Copy(t.Context(), chosen, sp, Stamp{})
			if err != nil {
				return nil, err
			}
			if change == nil {
				return nil, nil
			}
			var b bytes.Buffer
			if err := change.Write(&b); err != nil {
				return nil, err
			}
			out = list(t, b.Bytes())
			checkWritten(t, dst, b.Bytes(), rootfs)
		}
	}
	return out, nil
}

// checkWritten applies the written layer to the tree from before: that must give the present tree.
func checkWritten(t testing.TB, now *Tree, layer []byte, rootfs []string) {
	t.Helper()
	again := NewTree(Limits{})
	if err := again.Apply(streamed(archive(t, append([]string{"wd/"}, rootfs...)...))); err != nil {
		t.Fatal(err)
	}
	if err := again.Apply(streamed(layer)); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(names(now), names(again)); diff != "" {
		t.Errorf("the layer does not give the tree (-tree +layer)\n%s", diff)
	}
}

func names(t *Tree) []string {
	var out []string
	_ = walk("/", t.root, func(name string, n *node) error {
		out = append(out, fmt.Sprintf("%s %c %o %d:%d %d %s", name, n.kind, n.mode, n.uid, n.gid, n.size, n.link))
		return nil
	}) // f never fails
	return out
}

func TestAddUnpacks(t *testing.T) {
	inner := archive(t, "x/", "x/y", "0640 3:4 lib/so", "top~x/y", "l>x", "bin/", "bin/new")
	var zipped bytes.Buffer
	z := gzip.NewWriter(&zipped)
	if _, err := z.Write(inner); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	var text bytes.Buffer
	z = gzip.NewWriter(&text)
	if _, err := z.Write([]byte("no archive")); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	files := []string{
		"Dockerfile=FROM x\n", "a.tar=" + string(inner), "a.tgz=" + zipped.String(), "text.gz=" + text.String(), "a.txt", "x.xz=\xfd7zXZ\x00rest",
		"evil.tar=" + string(archive(t, "../up", "ok")), "dotdot.tar=" + string(archive(t, "l>..", "l/x")), "b.bz2=BZh91AY&SY rest",
	}
	unpacked := []string{"d/", "d/bin/", "d/bin/new=bin/new", "d/l>x", "d/lib/", "0640 3:4 d/lib/so=lib/so", "d/top=x/y", "d/x/", "d/x/y~d/top"}
	for _, c := range []struct {
		name, instruction string
		want              []string
	}{
		{"tar", "ADD a.tar /d", unpacked},
		{"tar.gz", "ADD a.tgz /d/", unpacked},
		{"into the root, through its links", "ADD a.tar /", []string{"l>x", "top=x/y", "usr/", "usr/bin/", "usr/bin/new=bin/new", "usr/lib/", "0640 3:4 usr/lib/so=lib/so", "x/", "x/y~top"}},
		{"owner", "ADD --chown=9:9 a.tar /d", []string{
			"0755 9:9 d/", "0755 9:9 d/bin/", "0644 9:9 d/bin/new=bin/new", "0777 9:9 d/l>x", "0755 9:9 d/lib/", "0640 9:9 d/lib/so=lib/so", "0644 9:9 d/top=x/y", "0755 9:9 d/x/",
			"0644 9:9 d/x/y~d/top",
		}},
		{"not with the flag", "ADD --unpack=false a.tar /d", []string{"d=" + string(inner)}},
		{"not what is no archive", "ADD text.gz a.txt /d/", []string{"d/", "d/a.txt=a.txt", "d/text.gz=" + text.String()}},
		{"not by COPY", "COPY a.tar /d", []string{"d=" + string(inner)}},
		{"xz", "ADD x.xz /d", []string{"error archives compressed with bzip2 or xz are not unpacked"}},
		{"bzip2", "ADD b.bz2 /d", []string{"error archives compressed with bzip2 or xz are not unpacked"}},
		{"climbing", "ADD evil.tar /d", []string{`error ".." in a name`}},
		{"links cannot lead out", "ADD dotdot.tar /d", []string{"d/", "d/l>..", "d/x=l/x"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := doCopy(t, c.instruction, files, rootfs)
			if len(c.want) > 0 && strings.HasPrefix(c.want[0], "error ") {
				if err == nil || !strings.Contains(err.Error(), c.want[0][6:]) || !errors.Is(err, ErrInvalid) {
					t.Errorf("%v, want %q; got %q", err, c.want[0], got)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("(-want +got)\n%s", diff)
			}
		})
	}
}

func TestLayersMakeTheTreeThatOverlayfsShows(t *testing.T) {
	for _, c := range []struct {
		name   string
		layers [][]string
		want   []string
	}{
		{"whiteout", [][]string{{"a", "b/", "b/c"}, {".wh.a", "b/.wh.c"}}, []string{"/b"}},
		{"whiteout and the same name", [][]string{{"a/", "a/old"}, {"a=new", ".wh.a"}}, []string{"/a"}},
		{"opaque", [][]string{{"a/", "a/old", "a/keep"}, {"a/", "a/new", "a/.wh..wh..opq", "a/later"}}, []string{"/a", "/a/later", "/a/new"}},
		{"directory over a link of a layer below", [][]string{{"usr/", "usr/lib/", "lib>usr/lib"}, {"lib/x"}}, []string{"/lib", "/lib/x", "/usr", "/usr/lib"}},
		{"through a link of the same layer", [][]string{{"usr/", "usr/lib/", "lib>usr/lib", "lib/x"}}, []string{"/lib", "/usr", "/usr/lib", "/usr/lib/x"}},
		{"file over a directory", [][]string{{"a/", "a/b"}, {"a=f"}}, []string{"/a"}},
		{"notes of aufs", [][]string{{"a", ".wh..wh.plnk/", ".wh..wh.plnk/1.2", ".wh..wh.aufs"}}, []string{"/a"}},
		{"whiteout of nothing", [][]string{{"a"}, {"b/.wh.c", ".wh.nope"}}, []string{"/a"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			tree := NewTree(Limits{})
			for _, l := range c.layers {
				if err := tree.Apply(streamed(archive(t, l...))); err != nil {
					t.Fatal(err)
				}
			}
			var got []string
			_ = walk("/", tree.root, func(name string, _ *node) error {
				if name != "/" {
					got = append(got, name)
				}
				return nil
			}) // f never fails
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("(-want +got)\n%s", diff)
			}
		})
	}
}

func TestDockerignore(t *testing.T) {
	files := []string{
		"Dockerfile=FROM x\n", "a.log", "b.txt", "keep.log", "node_modules/", "node_modules/x", "src/", "src/a.o", "src/a.c", "src/deep/", "src/deep/b.o",
		"docs/", "docs/x", "docs/README", HiddenDockerfile + "=x",
	}
	for _, c := range []struct{ ignore, want string }{
		{"", "/Dockerfile /a.log /b.txt /docs /docs/README /docs/x /keep.log /node_modules /node_modules/x /src /src/a.c /src/a.o /src/deep /src/deep/b.o"},
		{"# comment\n*.log\n!keep.log\nnode_modules\n**/*.o\ndocs\n!docs/README\n", "/.dockerignore /Dockerfile /b.txt /docs /docs/README /keep.log /src /src/a.c /src/deep"},
		{"*\n!b.txt\n", "/b.txt"},
		{"Dockerfile\n.dockerignore\n/src/\n", "/a.log /b.txt /docs /docs/README /docs/x /keep.log /node_modules /node_modules/x"},
	} {
		all := files
		if c.ignore != "" {
			all = append(slices.Clone(files), ".dockerignore="+c.ignore)
		}
		tree, dockerfile, err := Context(t.Context(), atHand(archive(t, all...)), "", Limits{})
		if err != nil {
			t.Fatal(err)
		}
		if string(dockerfile) != "FROM x\n" {
			t.Errorf("Dockerfile %q", dockerfile)
		}
		var got []string
		_ = walk("/", tree.root, func(name string, _ *node) error {
			if name != "/" {
				got = append(got, name)
			}
			return nil
		}) // f never fails
		if s := strings.Join(got, " "); s != c.want {
			t.Errorf("%q leaves\n%s, want\n%s", c.ignore, s, c.want)
		}
	}
	own := append(slices.Clone(files), ".dockerignore=*", "Dockerfile.dockerignore=*.log")
	if tree, _, err := Context(t.Context(), atHand(archive(t, own...)), "Dockerfile", Limits{}); err != nil || tree.lookup("/b.txt") == nil || tree.lookup("/a.log") != nil {
		t.Errorf("the Dockerfile's own does not go first: %v", err)
	}
}

func TestBadContextsAreRefused(t *testing.T) {
	many := []string{"Dockerfile"}
	for i := range 50 {
		many = append(many, fmt.Sprintf("f%d", i))
	}
	for _, c := range []struct {
		name, dockerfile string
		data             []byte
		limits           Limits
		want             string
	}{
		{name: "no Dockerfile", data: archive(t, "a"), want: `the context has no file "Dockerfile"`},
		{name: "Dockerfile is a directory", data: archive(t, "Dockerfile/"), want: "not a regular file"},
		{name: "Dockerfile is a link that leads out", data: archive(t, "Dockerfile>/../../etc/shadow"), want: "has no file"},
		{name: "name that leads out", dockerfile: "../../etc/shadow", data: archive(t, "Dockerfile"), want: "has no file"},
		{name: "climbing", data: archive(t, "Dockerfile", "a/../../b"), want: `".." in a name`},
		{name: "no tar", data: bytes.Repeat([]byte("x"), 2000), want: "read entry 1"},
		{name: "broken off", data: archive(t, "Dockerfile=FROM x", "a="+strings.Repeat("x", 2000))[:2000], want: "the context"},
		{name: "entries", data: archive(t, many...), limits: Limits{Entries: 20}, want: "more than 20 entries"},
		{name: "bytes", data: archive(t, "Dockerfile", "a="+strings.Repeat("x", 2000)), limits: Limits{Bytes: 1000}, want: "more than 1000 bytes"},
		{name: "hard link to nothing", data: archive(t, "Dockerfile", "a~b"), want: "hard link to"},
		{name: "deep", data: archive(t, "Dockerfile", strings.Repeat("d/", 200)+"f"), want: "directories deep"},
		{name: "patterns", data: archive(t, "Dockerfile", ".dockerignore="+strings.Repeat("a\n", 2000)), want: "2000 patterns"},
		{name: "long patterns", data: archive(t, "Dockerfile", ".dockerignore="+strings.Repeat(strings.Repeat("a", 99)+"\n", 200)), want: "19800 bytes of patterns"},
		{name: "bad pattern", data: archive(t, "Dockerfile", ".dockerignore=a[\n"), want: ".dockerignore"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, _, err := Context(t.Context(), atHand(c.data), c.dockerfile, c.limits)
			if err == nil || !strings.Contains(err.Error(), c.want) || !errors.Is(err, ErrInvalid) {
				t.Errorf("%v, want %q", err, c.want)
			}
		})
	}
}

// TestWorkdirCannotDelete is about WORKDIR /.wh.etc, whose layer would delete /etc.
func TestWorkdirCannotDelete(t *testing.T) {
	for _, dir := range []string{"/.wh.etc", "/.wh..wh..opq", "/a/.wh.b/c", "/" + strings.Repeat("n", 256)} {
		tree := NewTree(Limits{})
		if change, err := tree.MakeDir(t.Context(), &Dir{Path: dir}, spool(t), Stamp{}); !errors.Is(err, ErrInvalid) {
			t.Errorf("%.20q: %v, %v", dir, change, err)
		}
	}
}

// TestCopyKeyIsAboutContent has the changes that do not repeat a COPY, and those that do.
func TestCopyKeyIsAboutContent(t *testing.T) {
	key := func(instruction string, context ...string) string {
		t.Helper()
		_, steps, _, err := evaluate(t, []byte("FROM base\n"+instruction+"\n"), Options{Platform: here})
		if err != nil {
			t.Fatal(err)
		}
		data := archive(t, append([]string{"Dockerfile"}, context...)...)
		src, _, err := Context(t.Context(), atHand(data), "", Limits{})
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range steps {
			files, err := src.Select(t.Context(), s[0].Copy, spool(t))
			if err != nil {
				t.Fatal(err)
			}
			return files.Key("parent", "")
		}
		return ""
	}
	first := key("COPY d /x", "d/", "d/a", "d/b")
	for name, same := range map[string]string{
		"order":         key("COPY d /x", "d/", "d/b", "d/a"),
		"another file":  key("COPY d /x", "d/", "d/a", "d/b", "e"),
		"way to say it": key("COPY ./d/ /x", "d/", "d/a", "d/b"),
	} {
		if same != first {
			t.Errorf("%s makes another key", name)
		}
	}
	for name, other := range map[string]string{
		"content":     key("COPY d /x", "d/", "d/a=d/x", "d/b"),
		"name":        key("COPY d /x", "d/", "d/a", "d/c=d/b"),
		"mode":        key("COPY d /x", "d/", "0755 0:0 d/a", "d/b"),
		"kind":        key("COPY d /x", "d/", "d/a>d/a", "d/b"),
		"destination": key("COPY d /y", "d/", "d/a", "d/b"),
		"slash":       key("COPY d /x/", "d/", "d/a", "d/b"),
		"owner":       key("COPY --chown=1 d /x", "d/", "d/a", "d/b"),
		"chmod":       key("COPY --chmod=700 d /x", "d/", "d/a", "d/b"),
		"add":         key("ADD d /x", "d/", "d/a", "d/b"),
		"hard link":   key("COPY d /x", "d/", "d/a", "d/b~d/a"),
		"same bytes":  key("COPY d /x", "d/", "d/a", "d/b=d/a"),
		"less":        key("COPY d /x", "d/", "d/a"),
	} {
		if other == first {
			t.Errorf("another %s makes the same key", name)
		}
	}
	// Of four names of two files, the pairs of one file.
	files := []string{"d/", "d/a=x", "d/b=x"}
	if key("COPY d /x", append(files, "d/c~d/a", "d/d~d/b")...) == key("COPY d /x", append(files, "d/c~d/b", "d/d~d/a")...) {
		t.Error("other hard links make the same key")
	}
}

func TestTimesAreSetBack(t *testing.T) {
	src, _, err := Context(t.Context(), atHand(archive(t, "Dockerfile", "a")), "", Limits{})
	if err != nil {
		t.Fatal(err)
	}
	sp := spool(t)
	files, err := src.Select(t.Context(), &Copy{Sources: []string{"a"}, Dest: "/x/y/"}, sp)
	if err != nil {
		t.Fatal(err)
	}
	c, err := NewTree(Limits{}).Copy(t.Context(), files, sp, Stamp{Now: time.Unix(500, 0), Latest: time.Unix(600, 0)})
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := c.Write(&b); err != nil {
		t.Fatal(err)
	}
	r := tar.NewReader(&b)
	var got []int64
	for h, err := r.Next(); err == nil; h, err = r.Next() {
		got = append(got, h.ModTime.Unix())
	}
	if want := []int64{500, 500, 600}; !slices.Equal(got, want) {
		t.Errorf("times %v, want %v", got, want)
	}
}

func FuzzContext(f *testing.F) {
	f.Add(archive(f, sources...), "COPY . /x/")
	f.Add(archive(f, rootfs...), "COPY --chown=bob *i* /lib/")
	f.Add(archive(f, "a.tar="+string(archive(f, "x", "l>..", "l/y")), ".dockerignore=*.o\n!a\n"), "ADD a.tar /out/")
	f.Fuzz(func(t *testing.T, data []byte, instruction string) {
		checkContext(t, data)
		src := NewTree(Limits{Entries: 1000, Bytes: 1 << 20})
		if err := src.Load(atHand(data)); err != nil {
			return
		}
		checkTree(t, src, 1000, 1<<20)
		_, steps, _, err := evaluate(t, []byte("FROM base\n"+instruction+"\n"), Options{Platform: here})
		if err != nil {
			return
		}
		for _, list := range steps {
			for _, step := range list {
				if step.Copy == nil {
					continue
				}
				sp := spool(t)
				chosen, err := src.Select(t.Context(), step.Copy, sp)
				if err != nil {
					return
				}
				if again, err := src.Select(t.Context(), step.Copy, spool(t)); err != nil || again.Key("", "") != chosen.Key("", "") {
					t.Errorf("selected once more: %v, or the key is another", err)
				}
				dst, before := NewTree(Limits{Entries: 3000, Bytes: 1 << 20}), NewTree(Limits{Entries: 9000})
				if err := dst.Apply(streamed(data)); err != nil {
					return
				}
				if err := before.Apply(streamed(data)); err != nil {
					t.Fatalf("the same under other limits: %v", err)
				}
				change, err := dst.Copy(t.Context(), chosen, sp, Stamp{})
				if err != nil || change == nil {
					return
				}
				var b bytes.Buffer
				if err := change.Write(&b); err != nil {
					return
				}
				checkTree(t, dst, 3000, 1<<20)
				if err := before.Apply(streamed(b.Bytes())); err != nil {
					t.Fatalf("what was written cannot be read: %v", err)
				}
				if diff := cmp.Diff(names(dst), names(before)); diff != "" {
					t.Errorf("the layer does not give the tree (-tree +layer)\n%s", diff)
				}
			}
		}
	})
}

// checkContext reads a context: after .dockerignore the rest is a part of it that belongs to root,
// and the Dockerfile is the one that was sent.
func checkContext(t *testing.T, data []byte) {
	t.Helper()
	limits := Limits{Entries: 1000, Bytes: 1 << 20}
	left, dockerfile, err := Context(t.Context(), atHand(data), "", limits)
	if err != nil {
		if !errors.Is(err, ErrInvalid) {
			t.Errorf("context: %v is not the sender's fault", err)
		}
		return
	}
	whole := NewTree(limits)
	if err := whole.Load(atHand(data)); err != nil {
		t.Fatalf("the context can be read, the tree cannot: %v", err)
	}
	checkTree(t, left, 1000, 1<<20)
	sent, err := whole.file("Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	if r, err := sent.open(); err != nil {
		t.Error(err)
	} else if body, err := io.ReadAll(r); err != nil || !bytes.Equal(body, dockerfile) {
		t.Errorf("the Dockerfile is %q, sent was %q, %v", dockerfile, body, err)
	}
	if left.root.children[HiddenDockerfile] != nil {
		t.Error("the hidden Dockerfile is to be seen")
	}
	_ = walk("/", left.root, func(name string, n *node) error {
		if n.uid != 0 || n.gid != 0 || n.xattrs != nil {
			t.Errorf("%q belongs to %d:%d and has xattrs %v", name, n.uid, n.gid, n.xattrs)
		}
		if was := whole.lookup(name); was == nil || was.kind != n.kind || was.size != n.size || was.link != n.link {
			t.Errorf("%q is %v, sent was %v", name, n, was)
		}
		return nil
	}) // f never fails
}

// checkTree checks a tree's limits and names.
func checkTree(t *testing.T, tree *Tree, entries int, bytes int64) {
	t.Helper()
	count, size := 0, int64(0)
	seen := make(map[*node]bool)
	_ = walk("/", tree.root, func(name string, n *node) error {
		count++
		if !seen[n] && n.kind == tar.TypeReg {
			size += n.size
		}
		seen[n] = true
		for base := range n.children {
			if base == "" || base == "." || base == ".." || strings.ContainsAny(base, "/\x00") || len(base) > 255 {
				t.Errorf("%q has an entry %q", name, base)
			}
		}
		if n.kind != tar.TypeDir && len(n.children) > 0 {
			t.Errorf("%q has entries and is no directory", name)
		}
		return nil
	}) // f never fails
	if count > entries+1 || size > bytes {
		t.Errorf("%d entries with %d bytes, %d with %d are allowed", count, size, entries, bytes)
	}
}

// TestSourcesAreCounted is about a few lines that would name some files endlessly.
func TestSourcesAreCounted(t *testing.T) {
	limits := Limits{Entries: 2000}
	files := []string{"Dockerfile", "a/", "a/b"}
	for i := range 100 {
		files = append(files, fmt.Sprintf("l%d>.", i))
	}
	src, _, err := Context(t.Context(), atHand(archive(t, files...)), "", limits)
	if err != nil {
		t.Fatal(err)
	}
	for instruction, want := range map[string]string{
		"COPY */*/* /d/": "", // nothing: links to "." lead nowhere
		"COPY l* /d/":    "the sources are more than 2000 files",
		"COPY" + strings.Repeat(" .", 100) + " /d/":  "the sources are more than 2000 files",
		"COPY" + strings.Repeat(" l*", 100) + " /d/": "the sources are more than 2000 files",
		"COPY . . . /d/": "",
	} {
		_, steps, _, err := evaluate(t, []byte("FROM base\n"+instruction+"\n"), Options{Platform: here})
		if err != nil {
			t.Fatal(err)
		}
		for _, list := range steps {
			_, err := src.Select(t.Context(), list[0].Copy, spool(t))
			if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want) || !errors.Is(err, ErrInvalid)) {
				t.Errorf("%.50s: %v, want %q", instruction, err, want)
			}
			ctx, cancel := context.WithDeadline(t.Context(), time.Unix(1, 0))
			if _, err := src.Select(ctx, list[0].Copy, spool(t)); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%.50s: %v", instruction, err)
			}
			cancel()
		}
	}
	ctx, cancel := context.WithDeadline(t.Context(), time.Unix(1, 0))
	defer cancel()
	if _, _, err := Context(ctx, atHand(archive(t, "Dockerfile", ".dockerignore=x")), "", limits); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("context: %v", err)
	}
}

// TestTreesOfABuildAreBoundedTogether is about many stages with many files, and about files that
// are replaced.
func TestTreesOfABuildAreBoundedTogether(t *testing.T) {
	context := NewTree(Limits{Entries: 800})
	var files []string
	for i := range 300 {
		files = append(files, fmt.Sprint("f", i))
	}
	layer := archive(t, files...)
	one := context.New()
	for range 20 { // those files again
		if err := one.Apply(streamed(layer)); err != nil {
			t.Fatal(err)
		}
	}
	two, err := one.Clone()
	if err != nil {
		t.Fatal(err)
	}
	if err := context.New().Apply(streamed(layer)); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "more than 800 entries") {
		t.Errorf("a third: %v", err)
	}
	one.Drop()
	two.Drop()
	if context.pool.count > 302 {
		t.Errorf("%d entries are left", context.pool.count)
	}
	if err := context.New().Apply(streamed(layer)); err != nil {
		t.Errorf("after the others are gone: %v", err)
	}
}
