package layer_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	goruntime "runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/image/layer"
)

// entry is one header with its content. Zero modes mean 0755 for directories and 0644 for the rest.
type entry struct {
	typ     byte
	name    string
	link    string
	body    string
	mode    int64
	uid     int
	gid     int
	xattrs  map[string]string
	format  tar.Format
	modTime time.Time
}

func dir(name string) entry            { return entry{typ: tar.TypeDir, name: name} }
func file(name, body string) entry     { return entry{typ: tar.TypeReg, name: name, body: body} }
func symlink(name, to string) entry    { return entry{typ: tar.TypeSymlink, name: name, link: to} }
func hardlink(name, to string) entry   { return entry{typ: tar.TypeLink, name: name, link: to} }
func special(typ byte, n string) entry { return entry{typ: typ, name: n} }

var epoch = time.Unix(1_000_000_000, 0)

func archive(tb testing.TB, entries ...entry) []byte {
	tb.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, e := range entries {
		hdr := &tar.Header{
			Typeflag: e.typ, Name: e.name, Linkname: e.link, Size: int64(len(e.body)), Mode: e.mode,
			Uid: e.uid, Gid: e.gid, ModTime: e.modTime, Format: e.format,
		}
		if hdr.Mode == 0 {
			hdr.Mode = 0o644
			if e.typ == tar.TypeDir {
				hdr.Mode = 0o755
			}
		}
		if hdr.ModTime.IsZero() {
			hdr.ModTime = epoch
		}
		for k, v := range e.xattrs {
			if hdr.PAXRecords == nil {
				hdr.PAXRecords = map[string]string{}
			}
			hdr.PAXRecords["SCHILY.xattr."+k] = v
		}
		if err := w.WriteHeader(hdr); err != nil {
			tb.Fatalf("write header %q: %v", e.name, err)
		}
		if _, err := io.WriteString(w, e.body); err != nil {
			tb.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		tb.Fatal(err)
	}
	return buf.Bytes()
}

// raw is a header that archive/tar would refuse to write.
func raw(name string, typ byte, set func(block []byte)) []byte {
	b := make([]byte, 512)
	copy(b[0:100], name)
	copy(b[100:], "0000644\x00")
	copy(b[108:], "0000000\x00")
	copy(b[116:], "0000000\x00")
	copy(b[124:], "00000000000\x00")
	copy(b[136:], "00000000000\x00")
	b[156] = typ
	copy(b[257:], "ustar\x0000")
	if set != nil {
		set(b)
	}
	copy(b[148:156], "        ")
	sum := 0
	for _, c := range b {
		sum += int(c)
	}
	copy(b[148:], fmt.Sprintf("%06o\x00 ", sum))
	return b
}

// single is how ordinary users, who cannot chown, extract.
func single() bool { return os.Geteuid() != 0 }

// host is a directory outside of the layer with things that must not change.
type host struct {
	dir, before string
}

// plant puts a file, a directory and a link on the host, beside the layer's directory.
func plant(tb testing.TB) (h host, root *os.Root) {
	tb.Helper()
	top := tb.TempDir()
	h.dir = filepath.Join(top, "host")
	for _, d := range []string{h.dir, filepath.Join(h.dir, "etc"), filepath.Join(top, "layer")} {
		if err := os.Mkdir(d, 0o755); err != nil {
			tb.Fatal(err)
		}
	}
	for _, f := range []string{"secret", "etc/passwd"} {
		if err := os.WriteFile(filepath.Join(h.dir, f), []byte("the host's "+f), 0o600); err != nil {
			tb.Fatal(err)
		}
	}
	root, err := os.OpenRoot(filepath.Join(top, "layer"))
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		_ = root.Close()
		// Extracted modes may forbid an ordinary user to clean up.
		_ = filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
			if d != nil && d.IsDir() {
				_ = os.Chmod(path, 0o700)
			}
			return nil
		})
	})
	h.before = list(tb, h.dir, true)
	return h, root
}

// unharmed fails the test when anything on the host changed.
func (h host) unharmed(tb testing.TB) {
	tb.Helper()
	if diff := cmp.Diff(h.before, list(tb, h.dir, true)); diff != "" {
		tb.Fatalf("THE HOST WAS CHANGED (-before +after):\n%s", diff)
	}
	// Nothing new beside it either.
	names, err := os.ReadDir(filepath.Dir(h.dir))
	if err != nil {
		tb.Fatal(err)
	}
	if len(names) != 2 {
		tb.Fatalf("SOMETHING WAS MADE OUTSIDE THE LAYER: %v", names)
	}
}

// list describes a tree, one line a file, sorted. The trees of tests are small.
func list(tb testing.TB, top string, full bool) string {
	tb.Helper()
	var b strings.Builder
	err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(top, path)
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		fmt.Fprintf(&b, "%s ", rel)
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFDIR:
			b.WriteString("dir")
		case unix.S_IFREG:
			content, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			fmt.Fprintf(&b, "file %q", content)
		case unix.S_IFLNK:
			to, err := os.Readlink(path)
			if err != nil {
				return err
			}
			fmt.Fprintf(&b, "-> %s", to)
		case unix.S_IFIFO:
			b.WriteString("fifo")
		case unix.S_IFCHR:
			fmt.Fprintf(&b, "chr %d", st.Rdev)
		default:
			fmt.Fprintf(&b, "mode %o", st.Mode)
		}
		if st.Mode&unix.S_IFMT != unix.S_IFLNK {
			for _, name := range xattrs(path) {
				fmt.Fprintf(&b, " %s", name)
			}
		}
		if full {
			fmt.Fprintf(&b, " %o %d:%d %d", st.Mode&0o7777, st.Uid, st.Gid, st.Mtim.Sec)
		}
		b.WriteByte('\n')
		return nil
	})
	if err != nil {
		tb.Fatal(err)
	}
	return b.String()
}

func xattrs(path string) []string {
	buf := make([]byte, 4096)
	n, err := unix.Llistxattr(path, buf)
	if err != nil {
		return nil
	}
	var out []string
	for name := range strings.SplitSeq(strings.TrimRight(string(buf[:n]), "\x00"), "\x00") {
		if !strings.HasPrefix(name, "user.") {
			continue
		}
		value := make([]byte, 4096)
		n, err := unix.Lgetxattr(path, name, value)
		if err == nil {
			out = append(out, name+"="+string(value[:n]))
		}
	}
	return out
}

func lines(l ...string) string {
	if len(l) == 0 {
		return ". dir\n"
	}
	return ". dir\n" + strings.Join(l, "\n") + "\n"
}

func TestApply(t *testing.T) {
	long := strings.Repeat("n", 255)
	deep := strings.Repeat("d/", 100)
	tests := []struct {
		name    string
		entries []entry
		tail    []byte // after the entries instead of an end marker
		limits  layer.Limits
		want    string   // the tree afterwards
		skipped []string //
		err     string   // part of the message; then the class is ErrInvalid
	}{
		{name: "files, directories and links", entries: []entry{
			dir("./"), dir("usr/"), dir("usr/bin"), file("usr/bin/true", "x"), symlink("bin", "usr/bin"), hardlink("usr/bin/yes", "usr/bin/true"),
		}, want: lines("bin -> usr/bin", "usr dir", "usr/bin dir", `usr/bin/true file "x"`, `usr/bin/yes file "x"`)},
		{name: "parents that no entry describes", entries: []entry{file("a/b/c", "x")}, want: lines("a dir", "a/b dir", `a/b/c file "x"`)},
		{
			name: "an absolute name is the layer's", entries: []entry{file("/etc/passwd", "x"), file("//etc//./group", "y")},
			want: lines("etc dir", `etc/group file "y"`, `etc/passwd file "x"`),
		},
		{name: "GNU and PAX long names", entries: []entry{
			{typ: tar.TypeReg, name: deep + long, body: "g", format: tar.FormatGNU},
			{typ: tar.TypeReg, name: "ü/" + long, body: "p", format: tar.FormatPAX},
			{typ: tar.TypeSymlink, name: "l", link: deep + long, format: tar.FormatGNU},
		}, want: longTree(deep, long)},
		{name: "a FIFO", entries: []entry{special(tar.TypeFifo, "f")}, want: lines("f fifo")},

		// Whiteouts.
		{name: "a whiteout", entries: []entry{file("a/.wh.b", "")}, want: lines("a dir", "a/b chr 0")},
		{name: "a whiteout at the top", entries: []entry{file(".wh.b", "")}, want: lines("b chr 0")},
		{
			name: "an opaque directory", entries: []entry{dir("a"), file("a/.wh..wh..opq", ""), file("a/b", "x")},
			want: lines("a dir user.overlay.opaque=y", `a/b file "x"`),
		},
		{name: "an opaque mark on a directory without entry", entries: []entry{file("a/.wh..wh..opq", "")}, want: lines("a dir user.overlay.opaque=y")},
		{name: "an opaque root", entries: []entry{file(".wh..wh..opq", "")}, want: ". dir user.overlay.opaque=y\n"},
		{name: "a whiteout twice", entries: []entry{file(".wh.b", ""), file(".wh.b", "")}, want: lines("b chr 0")},
		{name: "a whiteout after its file spares it", entries: []entry{file("b", "x"), file(".wh.b", "")}, want: lines(`b file "x"`)},
		{
			name: "a whiteout after its directory hides only what is below", entries: []entry{file("b/c", "x"), file(".wh.b", "")},
			want: lines("b dir user.overlay.opaque=y", `b/c file "x"`),
		},
		{name: "a file after its whiteout", entries: []entry{file(".wh.b", ""), file("b", "x")}, want: lines(`b file "x"`)},
		{name: "a directory after its whiteout", entries: []entry{file(".wh.b", ""), dir("b")}, want: lines("b dir user.overlay.opaque=y")},
		{
			name: "a directory without entry after its whiteout", entries: []entry{file(".wh.b", ""), file("b/c", "x")},
			want: lines("b dir user.overlay.opaque=y", `b/c file "x"`),
		},
		{
			name: "aufs notes", entries: []entry{dir(".wh..wh.plnk"), file(".wh..wh.plnk/12.34", "x"), file(".wh..wh.aufs", "")},
			want: lines(), skipped: []string{
				".wh..wh.plnk: a note of the aufs driver", ".wh..wh.plnk/12.34: a note of the aufs driver", ".wh..wh.aufs: a note of the aufs driver",
			},
		},
		{name: "a whiteout without a name", entries: []entry{file("a/.wh.", "")}, err: "names nothing"},
		{name: "a whiteout of .", entries: []entry{file("a/.wh..", "")}, err: "names nothing"},
		{name: "a whiteout of ..", entries: []entry{file("a/.wh...", "")}, err: "names nothing"},
		{name: "a whiteout as a directory", entries: []entry{file("a/.wh.b/c", "")}, err: "whiteout is used as a directory"},
		{
			name: "a whiteout through a link out", entries: []entry{symlink("l", "../host"), file("l/.wh.secret", "")},
			want: lines("host dir", "host/secret chr 0", "l -> ../host"),
		},
		{
			name: "an opaque mark through a link out", entries: []entry{symlink("l", "../../host/etc"), file("l/.wh..wh..opq", "")},
			want: lines("host dir", "host/etc dir user.overlay.opaque=y", "l -> ../../host/etc"),
		},

		// Names.
		{name: "..", entries: []entry{file("../host/secret", "x")}, err: `".." in it`},
		{name: ".. in the middle", entries: []entry{file("a/../../host/secret", "x")}, err: `".." in it`},
		{name: ".. at the end", entries: []entry{dir("a/..")}, err: `".." in it`},
		{name: ".. in a whiteout's directory", entries: []entry{file("../host/.wh.secret", "")}, err: `".." in it`},
		{name: "an empty name", tail: raw("", tar.TypeReg, nil), err: "the name is empty"},
		{name: "a NUL in a PAX name", tail: paxNUL(), err: "damaged"},
		{name: "a component that is too long", entries: []entry{file(strings.Repeat("n", 256), "x")}, err: "256 bytes, 255 are allowed"},
		{name: "a name that is too long", entries: []entry{file(strings.Repeat("n/", 2100)+"x", "x")}, err: "4095 are allowed"},
		{name: "too deep", entries: []entry{file(strings.Repeat("d/", 128)+"x", "x")}, err: "129 directories deep"},
		{name: "a file as the root", entries: []entry{file(".", "x")}, err: "root must be a directory"},
		{name: "a link as the root", entries: []entry{symlink(".", "/")}, err: "root must be a directory"},

		// Symbolic links: kept as they are, followed by us within the root only.
		{
			name: "links that lead out are stored", entries: []entry{symlink("abs", "/etc/shadow"), symlink("rel", "../../../host/secret")},
			want: lines("abs -> /etc/shadow", "rel -> ../../../host/secret"),
		},
		{
			name: "a file below a link that leads out", entries: []entry{symlink("l", "../host"), file("l/secret", "x")},
			want: lines("host dir", `host/secret file "x"`, "l -> ../host"),
		},
		{
			name: "a file below an absolute link", entries: []entry{symlink("l", "/etc"), file("l/passwd", "x")},
			want: lines("etc dir", `etc/passwd file "x"`, "l -> /etc"),
		},
		{
			name: "a file below a chain of links", entries: []entry{dir("d"), symlink("d/a", "../b"), symlink("b", "/c/../../e"), file("d/a/f", "x")},
			want: lines("b -> /c/../../e", "c dir", "d dir", "d/a -> ../b", "e dir", `e/f file "x"`),
		},
		{name: "a file in place of a link", entries: []entry{symlink("l", "../host/secret"), file("l", "x")}, want: lines(`l file "x"`)},
		{
			name: "a directory in place of a link", entries: []entry{symlink("l", "../host/etc"), dir("l"), file("l/passwd", "x")},
			want: lines("l dir user.overlay.opaque=y", `l/passwd file "x"`),
		},
		{name: "a directory entry does not change what a link leads to", entries: []entry{
			symlink("l", "../host"), {typ: tar.TypeDir, name: "l/", mode: 0o777},
		}, want: lines("l dir user.overlay.opaque=y")},
		{name: "links in a circle", entries: []entry{symlink("a", "b"), symlink("b", "a"), file("a/x", "x")}, err: "more than 40 symbolic links"},
		{name: "a link to itself", entries: []entry{symlink("a", "a"), file("a/x", "x")}, err: "more than 40 symbolic links"},
		{name: "links that grow", entries: append(growing(8), file("l8/x", "x")), err: "directories"},
		{name: "a link without a target", tail: raw("l", tar.TypeSymlink, nil), err: "no target"},
		{name: "a link with an endless target", entries: []entry{{typ: tar.TypeSymlink, name: "l", link: strings.Repeat("x", 5000), format: tar.FormatPAX}}, err: "4095 are allowed"},
		{name: "a file below a file", entries: []entry{file("a", "x"), file("a/b", "y")}, err: `"a" is not a directory`},
		{name: "a file below a FIFO", entries: []entry{special(tar.TypeFifo, "a"), file("a/b", "y")}, err: `"a" is not a directory`},

		// Hard links.
		{
			name: "a hard link to an absolute name", entries: []entry{file("etc/passwd", "x"), hardlink("h", "/etc/passwd")},
			want: lines("etc dir", `etc/passwd file "x"`, `h file "x"`),
		},
		{name: "a hard link out", entries: []entry{hardlink("h", "../host/secret")}, err: `".." in it`},
		{name: "a hard link out through a link", entries: []entry{symlink("l", "../host"), hardlink("h", "l/secret")}, err: "not in this layer"},
		{name: "a hard link to what lies below", entries: []entry{hardlink("h", "etc/passwd")}, err: "not in this layer"},
		{name: "a hard link to a whiteout", entries: []entry{file(".wh.a", ""), hardlink("h", "a")}, err: "not in this layer"},
		{name: "a hard link to a directory", entries: []entry{dir("a"), hardlink("h", "a")}, err: "is a directory"},
		{
			name: "a hard link to a link does not follow it", entries: []entry{symlink("l", "../host/secret"), hardlink("h", "l")},
			want: lines("h -> ../host/secret", "l -> ../host/secret"),
		},
		{
			name: "a file in place of a hard link to a link", entries: []entry{symlink("l", "../host/secret"), hardlink("h", "l"), file("h", "x")},
			want: lines(`h file "x"`, "l -> ../host/secret"),
		},
		{name: "a hard link to itself", entries: []entry{file("a", "x"), hardlink("a", "a")}, want: lines(`a file "x"`)},
		{
			name: "a hard link to itself through a link", entries: []entry{file("d/a", "x"), symlink("l", "d"), hardlink("l/a", "d/a")},
			want: lines("d dir", `d/a file "x"`, "l -> d"),
		},
		{
			name: "a hard link to itself through a link further up", entries: []entry{file("d/e/a", "x"), symlink("l", "d"), hardlink("l/e/a", "d/e/a")},
			want: lines("d dir", "d/e dir", `d/e/a file "x"`, "l -> d"),
		},
		{name: "a hard link in place of its target's directory", entries: []entry{file("d/a", "x"), hardlink("d", "d/a")}, err: "replaces the directory"},
		{name: "a hard link to the root", entries: []entry{hardlink("a", "/")}, err: "layer's root"},

		// The same name again.
		{name: "the last of two files wins", entries: []entry{file("a", "1"), file("a", "2")}, want: lines(`a file "2"`)},
		{name: "a hard link is not written through", entries: []entry{file("a", "1"), hardlink("b", "a"), file("b", "2")}, want: lines(`a file "1"`, `b file "2"`)},
		{name: "a file in place of a directory", entries: []entry{file("a/b/c", "1"), file("a", "2")}, want: lines(`a file "2"`)},
		{
			name: "a link in place of a directory", entries: []entry{file("a/b/c", "1"), symlink("a", "../host"), file("a/b", "2")},
			want: lines("a -> ../host", "host dir", `host/b file "2"`),
		},
		{
			name: "a directory in place of a file", entries: []entry{file("a", "1"), dir("a"), file("a/b", "2")},
			want: lines("a dir user.overlay.opaque=y", `a/b file "2"`),
		},
		{name: "a directory again keeps what is in it", entries: []entry{file("a/b", "1"), dir("a")}, want: lines("a dir", `a/b file "1"`)},
		{name: "a file in place of a FIFO", entries: []entry{special(tar.TypeFifo, "a"), file("a", "2")}, want: lines(`a file "2"`)},
		{name: "a link that the last name went through, replaced", entries: []entry{
			dir("d"), symlink("d/l", "."), file("d/l/x", "1"), file("d/l/l", "2"), file("d/l/y", "3"),
		}, err: `"d/l" is not a directory`},

		// What is left out.
		{
			name: "devices", entries: []entry{special(tar.TypeChar, "c"), special(tar.TypeBlock, "b"), file("a", "x")},
			want: lines(`a file "x"`), skipped: []string{"c: a device", "b: a device"},
		},
		{
			name: "xattrs", entries: []entry{{typ: tar.TypeDir, name: "d", xattrs: map[string]string{"user.overlay.opaque": "y"}}},
			want: lines("d dir"), skipped: []string{"d: xattr user.overlay.opaque"},
		},
		{
			name: "trusted xattrs", entries: []entry{{typ: tar.TypeReg, name: "f", xattrs: map[string]string{"trusted.overlay.redirect": "/etc"}}},
			want: lines(`f file ""`), skipped: []string{"f: xattr trusted.overlay.redirect"},
		},
		{
			name: "a redirect", entries: []entry{{typ: tar.TypeDir, name: "d", xattrs: map[string]string{"user.overlay.redirect": "/etc"}}},
			want: lines("d dir"), skipped: []string{"d: xattr user.overlay.redirect"},
		},
		{
			name: "a data-only lower file", entries: []entry{{typ: tar.TypeReg, name: "f", xattrs: map[string]string{"user.overlay.metacopy": ""}}},
			want: lines(`f file ""`), skipped: []string{"f: xattr user.overlay.metacopy"},
		},
		{
			name: "file capabilities", entries: []entry{{typ: tar.TypeReg, name: "ping", xattrs: map[string]string{"security.capability": "\x01\x00"}}},
			want: lines(`ping file ""`), skipped: []string{"ping: xattr security.capability"},
		},
		{
			name: "an xattr of a user", entries: []entry{{typ: tar.TypeReg, name: "f", mode: 0o444, xattrs: map[string]string{"user.note": "a"}}},
			want: lines(`f file "" user.note=a`),
		},
		{
			name: "an xattr on a link", entries: []entry{{typ: tar.TypeSymlink, name: "l", link: "../host/secret", xattrs: map[string]string{"user.note": "a"}}},
			want: lines("l -> ../host/secret"), skipped: []string{"l: xattr user.note"},
		},
		{name: "an unknown type", tail: raw("x", 'M', nil), err: "not supported"},

		// Numbers.
		{name: "too many entries", entries: []entry{dir("a"), dir("b"), dir("c")}, limits: layer.Limits{Entries: 2}, err: "more than 2 entries"},
		{name: "too many bytes in one file", entries: []entry{file("a", strings.Repeat("x", 3000))}, limits: layer.Limits{Bytes: 2999}, err: "2999"},
		{name: "too many bytes together", entries: []entry{file("a", strings.Repeat("x", 3000)), file("b", "")}, limits: layer.Limits{Bytes: 4000}, err: "more than 4000 bytes"},
		{
			name: "a size that is a lie", tail: raw("big", tar.TypeReg, func(b []byte) { copy(b[124:], "77777777777\x00") }),
			limits: layer.Limits{Bytes: 1 << 20}, err: "1048576",
		},
		{name: "a negative size", tail: raw("big", tar.TypeReg, func(b []byte) { copy(b[124:136], bytes.Repeat([]byte{0xff}, 12)) }), err: "damaged"},
		{name: "a sparse file out of nothing", tail: gnuSparse(1 << 30), limits: layer.Limits{RatioFloor: 1 << 20, Ratio: 100}, err: "more than 100 times"},
		{name: "a sparse file larger than any disk", tail: gnuSparse(math.MaxInt64 >> 1), err: "more than"},
		{name: "an owner that is not mapped", entries: []entry{{typ: tar.TypeReg, name: "a", uid: 65536}}, err: "outside 0..65535"},
		{name: "a group that is not mapped", entries: []entry{{typ: tar.TypeReg, name: "a", gid: 2_000_000}}, err: "outside 0..65535"},

		// Damage.
		{name: "cut in a header", tail: raw("x", tar.TypeReg, nil)[:300], err: "cut short"},
		{name: "cut in a file", tail: raw("x", tar.TypeReg, func(b []byte) { copy(b[124:], "00000001000\x00") }), err: "cut short"},
		{name: "a wrong checksum", tail: append([]byte("garbage"), make([]byte, 505)...), err: "damaged"},
		{name: "no entry at all", want: lines()},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h, root := plant(t)
			stream := archive(t, tt.entries...)
			if tt.tail != nil {
				stream = append(stream[:len(stream)-1024], tt.tail...)
			}
			opts := layer.Options{Limits: tt.limits, SingleID: single()}
			if strings.HasPrefix(tt.err, "outside") && single() {
				t.Skip("owners are not looked at with a single id; ran as an ordinary user")
			}
			res, err := layer.Apply(root, bytes.NewReader(stream), opts)
			h.unharmed(t)
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Fatalf("error %v, want one with %q", err, tt.err)
				}
				if !errors.Is(err, layer.ErrInvalid) {
					t.Errorf("error %v is not of the class ErrInvalid", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, list(t, root.Name(), false)); diff != "" {
				t.Errorf("tree (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tt.skipped, res.Skipped); diff != "" {
				t.Errorf("skipped (-want +got):\n%s", diff)
			}
			if want := digest(stream); res.DiffID != want {
				t.Errorf("diff id %s, want %s", res.DiffID, want)
			}
		})
	}
}

func longTree(deep, long string) string {
	var l []string
	path := ""
	for range strings.Count(deep, "/") {
		path += "d"
		l = append(l, path+" dir")
		path += "/"
	}
	l = append(l, fmt.Sprintf("%s%s file %q", deep, long, "g"), "l -> "+deep+long, "ü dir", fmt.Sprintf("ü/%s file %q", long, "p"))
	return lines(l...)
}

// growing makes links each of which leads ten times as deep as the one before.
func growing(n int) []entry {
	e := []entry{symlink("l0", strings.Repeat("d/", 20))}
	for i := 1; i <= n; i++ {
		e = append(e, symlink(fmt.Sprintf("%sl%d", strings.Repeat("d/", 20*i), i), strings.Repeat("d/", 20)), symlink(fmt.Sprintf("l%d", i), strings.Repeat("d/", 20*i)+fmt.Sprintf("l%d", i)))
	}
	return e
}

func paxNUL() []byte {
	record := "16 path=a\x00../b\n"
	record = fmt.Sprintf("%d%s", len(record), record[2:])
	b := raw("PaxHeaders/x", tar.TypeXHeader, func(b []byte) { copy(b[124:], fmt.Sprintf("%011o\x00", len(record))) })
	b = append(b, record...)
	b = append(b, make([]byte, 512-len(record))...)
	b = append(b, raw("x", tar.TypeReg, nil)...)
	return append(b, make([]byte, 1024)...)
}

// gnuSparse is a file of the given size without any data.
func gnuSparse(size int64) []byte {
	b := raw("sparse", tar.TypeGNUSparse, func(b []byte) {
		copy(b[257:], "ustar  \x00")
		// One map entry: at the end, nothing.
		num := func(at int, v int64) {
			b[at] = 0x80
			for i := 11; i > 3; i-- {
				b[at+i] = byte(v)
				v >>= 8
			}
		}
		num(386, size)
		num(398, 0)
		num(483, size)
	})
	return append(b, make([]byte, 1024)...)
}

func digest(b []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(b)) }

func TestModesOwnersAndTimes(t *testing.T) {
	h, root := plant(t)
	when := func(sec int64) time.Time { return time.Unix(sec, 0) }
	stream := archive(t,
		entry{typ: tar.TypeDir, name: ".", mode: 0o711, modTime: when(11)},
		entry{typ: tar.TypeDir, name: "tmp", mode: 0o1777, modTime: when(12)},
		entry{typ: tar.TypeReg, name: "tmp/su", mode: 0o4755, uid: 7, gid: 8, modTime: when(13)},
		entry{typ: tar.TypeReg, name: "tmp/sg", mode: 0o2711, gid: 42, modTime: when(14)},
		entry{typ: tar.TypeDir, name: "locked", mode: 0o500, uid: 1000, gid: 1000, modTime: when(15)},
		entry{typ: tar.TypeReg, name: "locked/in", mode: 0o777, uid: 65535, gid: 65535, modTime: when(16)},
		entry{typ: tar.TypeSymlink, name: "locked/l", link: "/x", uid: 5, gid: 6, modTime: when(17)},
		entry{typ: tar.TypeFifo, name: "f", mode: 0o666, modTime: when(18)},
	)
	// A mask that takes everything away shows whether modes are set or asked for.
	old := syscall.Umask(0o777)
	_, err := layer.Apply(root, bytes.NewReader(stream), layer.Options{SingleID: single()})
	syscall.Umask(old)
	if err != nil {
		t.Fatal(err)
	}
	h.unharmed(t)
	own := func(uid, gid int) string {
		if single() {
			return fmt.Sprintf("%d:%d", os.Geteuid(), os.Getegid())
		}
		return fmt.Sprintf("%d:%d", uid, gid)
	}
	want := strings.Join([]string{
		". dir 711 " + own(0, 0) + " 11",
		"f fifo 666 " + own(0, 0) + " 18",
		"locked dir 500 " + own(1000, 1000) + " 15",
		`locked/in file "" 777 ` + own(65535, 65535) + " 16",
		"locked/l -> /x 777 " + own(5, 6) + " 17",
		"tmp dir 1777 " + own(0, 0) + " 12",
		`tmp/sg file "" 2711 ` + own(0, 42) + " 14",
		`tmp/su file "" 4755 ` + own(7, 8) + " 13",
	}, "\n") + "\n"
	if diff := cmp.Diff(want, list(t, root.Name(), true)); diff != "" {
		t.Errorf("tree (-want +got):\n%s", diff)
	}
}

func TestDirectoriesReplacedByLinksLeaveTheirModesBehind(t *testing.T) {
	_, root := plant(t)
	stream := archive(t,
		entry{typ: tar.TypeDir, name: "a/b", mode: 0o777}, entry{typ: tar.TypeDir, name: "c/b", mode: 0o700}, symlink("a", "c"))
	if _, err := layer.Apply(root, bytes.NewReader(stream), layer.Options{SingleID: single()}); err != nil {
		t.Fatal(err)
	}
	fi, err := root.Lstat("c/b")
	if err != nil {
		t.Fatal(err)
	}
	if fi.Mode().Perm() != 0o700 {
		t.Errorf("c/b has mode %o, want 700", fi.Mode().Perm())
	}
}

func TestDirectoriesWithoutEntryAreLikeTheLayersBelow(t *testing.T) {
	_, lower := plant(t)
	below := archive(t, entry{typ: tar.TypeDir, name: "tmp", mode: 0o1777}, entry{typ: tar.TypeDir, name: ".", mode: 0o751})
	if _, err := layer.Apply(lower, bytes.NewReader(below), layer.Options{SingleID: single()}); err != nil {
		t.Fatal(err)
	}
	_, root := plant(t)
	stream := archive(t, file("tmp/x", ""), file("tmp/new/x", ""))
	if _, err := layer.Apply(root, bytes.NewReader(stream), layer.Options{SingleID: single(), Lower: []*os.Root{lower}}); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]fs.FileMode{".": fs.ModeDir | 0o751, "tmp": fs.ModeDir | fs.ModeSticky | 0o777, "tmp/new": fs.ModeDir | 0o755} {
		fi, err := root.Lstat(name)
		if err != nil {
			t.Fatal(err)
		}
		if fi.Mode() != want {
			t.Errorf("%s is %v, want %v", name, fi.Mode(), want)
		}
	}
}

func compress(tb testing.TB, how string, b []byte) []byte {
	tb.Helper()
	var buf bytes.Buffer
	var w io.WriteCloser
	switch how {
	case "gzip":
		w = gzip.NewWriter(&buf)
	case "zstd":
		z, err := zstd.NewWriter(&buf)
		if err != nil {
			tb.Fatal(err)
		}
		w = z
	default:
		return b
	}
	if _, err := w.Write(b); err != nil {
		tb.Fatal(err)
	}
	if err := w.Close(); err != nil {
		tb.Fatal(err)
	}
	return buf.Bytes()
}

func TestCompression(t *testing.T) {
	plain := archive(t, file("a", "x"))
	gz, zs := compress(t, "gzip", plain), compress(t, "zstd", plain)
	skippable := append([]byte{0x5e, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3}, zs...)
	half := len(plain) / 2
	const oci, docker = "application/vnd.oci.image.layer.v1.tar", "application/vnd.docker.image.rootfs.diff.tar"
	tests := []struct {
		name, mediaType string
		stream          []byte
		diffID          string
		err             string
	}{
		{name: "uncompressed", mediaType: oci, stream: plain},
		{name: "gzip", mediaType: oci + "+gzip", stream: gz},
		{name: "gzip by Docker", mediaType: docker + ".gzip", stream: gz},
		{name: "zstd", mediaType: oci + "+zstd", stream: zs},
		{name: "zstd after a skippable frame", mediaType: oci + "+zstd", stream: skippable},
		{name: "gzip in two members", mediaType: oci + "+gzip", stream: append(compress(t, "gzip", plain[:half]), compress(t, "gzip", plain[half:])...)},
		{name: "no media type", stream: zs},
		{name: "the promised diff id", stream: gz, diffID: digest(plain)},
		{name: "a name like gzip's magic number", mediaType: oci, stream: raw("\x1f\x8bname", tar.TypeReg, nil)},

		{name: "gzip that says zstd", mediaType: oci + "+zstd", stream: gz, err: "the layer is gzip"},
		{name: "plain that says gzip", mediaType: oci + "+gzip", stream: plain, err: "the layer is uncompressed"},
		{name: "an unknown media type", mediaType: "application/octet-stream", stream: plain, err: "not a layer"},
		{name: "bzip2", stream: []byte("BZh91AY&SY"), err: "bzip2 are not supported"},
		{name: "truncated gzip", stream: gz[:len(gz)-9], err: "cut short"},
		{name: "truncated zstd", stream: zs[:len(zs)-9], err: "cut short"},
		{name: "broken gzip", stream: broken(gz), err: "damaged"},
		{name: "broken zstd", stream: broken(zs), err: "damaged"},
		{name: "garbage after gzip", stream: append(append([]byte(nil), gz...), "garbage garbage"...), err: "damaged"},
		{name: "another diff id", stream: gz, diffID: digest(gz), err: "configuration promises"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, root := plant(t)
			res, err := layer.Apply(root, bytes.NewReader(tt.stream), layer.Options{MediaType: tt.mediaType, DiffID: tt.diffID, SingleID: single()})
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) || !errors.Is(err, layer.ErrInvalid) {
					t.Fatalf("error %v, want an invalid layer with %q", err, tt.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if res.DiffID != digest(plain) && !strings.HasPrefix(tt.name, "a name") {
				t.Errorf("diff id %s, want %s", res.DiffID, digest(plain))
			}
		})
	}
}

func broken(b []byte) []byte {
	b = append([]byte(nil), b...)
	for i := len(b) / 2; i < len(b); i++ {
		b[i] ^= 0x55
	}
	return b
}

func TestDiffIDCoversWhatFollowsTheArchive(t *testing.T) {
	_, root := plant(t)
	stream := append(archive(t, file("a", "x")), bytes.Repeat([]byte{0}, 9<<10)...)
	stream = append(stream, "and a last word"...)
	res, err := layer.Apply(root, bytes.NewReader(stream), layer.Options{SingleID: single()})
	if err != nil {
		t.Fatal(err)
	}
	if res.DiffID != digest(stream) {
		t.Errorf("diff id %s, want %s", res.DiffID, digest(stream))
	}
}

func TestBombs(t *testing.T) {
	zeros := make([]byte, 8<<20)
	limits := layer.Limits{RatioFloor: 1 << 20, Ratio: 50, Bytes: 1 << 30}
	for _, how := range []string{"gzip", "zstd"} {
		for name, stream := range map[string][]byte{
			"in a file":         archive(t, file("zeros", string(zeros))),
			"behind the end":    append(archive(t, file("a", "")), zeros...),
			"in a skipped file": append(append(raw("dev", tar.TypeChar, nil), zeros...), make([]byte, 1024)...),
		} {
			t.Run(how+" "+name, func(t *testing.T) {
				_, root := plant(t)
				_, err := layer.Apply(root, bytes.NewReader(compress(t, how, stream)), layer.Options{SingleID: single(), Limits: limits})
				if err == nil || !strings.Contains(err.Error(), "more than 50 times") {
					t.Fatalf("error %v, want one about the ratio", err)
				}
			})
		}
	}
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

func TestReadErrorsAreNotTheLayersFault(t *testing.T) {
	gz := compress(t, "gzip", archive(t, file("a", strings.Repeat("x", 100))))
	for n := range len(gz) {
		_, root := plant(t)
		_, err := layer.Apply(root, io.MultiReader(bytes.NewReader(gz[:n]), failing{syscall.EIO}), layer.Options{SingleID: single()})
		if !errors.Is(err, syscall.EIO) || errors.Is(err, layer.ErrInvalid) {
			t.Fatalf("after %d bytes: error %v, want EIO and no blame", n, err)
		}
	}
}

func TestDirectoryThatIsNotEmptyIsRefused(t *testing.T) {
	_, root := plant(t)
	if err := root.Mkdir("x", 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := layer.Apply(root, bytes.NewReader(archive(t)), layer.Options{SingleID: single()}); err == nil || !strings.Contains(err.Error(), "not empty") {
		t.Fatalf("error %v, want one about a directory that is not empty", err)
	}
}

func TestSkippedIsBounded(t *testing.T) {
	_, root := plant(t)
	var entries []entry
	for i := range layer.MaxSkipped + 5 {
		entries = append(entries, special(tar.TypeChar, fmt.Sprint("c", i)))
	}
	res, err := layer.Apply(root, bytes.NewReader(archive(t, entries...)), layer.Options{SingleID: single()})
	if err != nil {
		t.Fatal(err)
	}
	if len(res.Skipped) != layer.MaxSkipped || res.SkippedMore != 5 {
		t.Errorf("%d skipped and %d more, want %d and 5", len(res.Skipped), res.SkippedMore, layer.MaxSkipped)
	}
}

func TestNoDescriptorIsLeftOpen(t *testing.T) {
	count := func() int {
		names, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Skipf("no /proc: %v", err)
		}
		return len(names)
	}
	_, root := plant(t)
	_, other := plant(t)
	before := count()
	good := archive(t, file("a/b", "x"), symlink("l", "a"), file("l/c", "y"), hardlink("l/h", "a/b"), file(".wh.w", ""), dir("w"))
	if _, err := layer.Apply(root, bytes.NewReader(good), layer.Options{SingleID: single()}); err != nil {
		t.Fatal(err)
	}
	bad := archive(t, file("a/b", "x"), file("a/b/c", "y"))
	if _, err := layer.Apply(other, bytes.NewReader(bad), layer.Options{SingleID: single()}); err == nil {
		t.Fatal("a file below a file was accepted")
	}
	if after := count(); after != before {
		t.Errorf("%d descriptors are open, %d were before", after, before)
	}
}

// FuzzApply holds the one promise that matters most against any input: nothing outside the layer's directory changes.
func FuzzApply(f *testing.F) {
	f.Add(archive(f, dir("a"), file("a/b", "x"), symlink("l", "../host"), file("l/secret", "y"), hardlink("h", "a/b")))
	f.Add(archive(f, file("a/.wh.b", ""), file("a/.wh..wh..opq", ""), dir("a/b")))
	f.Add(archive(f, entry{typ: tar.TypeReg, name: strings.Repeat("d/", 100) + "x", format: tar.FormatPAX, xattrs: map[string]string{"user.a": "b"}}))
	f.Add(archive(f, entry{typ: tar.TypeReg, name: strings.Repeat("g/", 100) + "x", format: tar.FormatGNU}))
	f.Add(compress(f, "gzip", archive(f, file("a", "x"))))
	f.Add(compress(f, "zstd", archive(f, file("a", "x"))))
	f.Add(gnuSparse(1 << 20))
	f.Add(paxNUL())
	f.Fuzz(func(t *testing.T, stream []byte) {
		h, root := plant(t)
		limits := layer.Limits{Entries: 100, Bytes: 1 << 20, Depth: 20, RatioFloor: 1 << 16, Ratio: 20}
		_, err := layer.Apply(root, bytes.NewReader(stream), layer.Options{SingleID: single(), Limits: limits})
		h.unharmed(t)
		if err == nil {
			// What was accepted has no device but whiteouts and no xattr that overlayfs would obey but the opaque mark.
			for line := range strings.SplitSeq(list(t, root.Name(), false), "\n") {
				if strings.Contains(line, " chr ") && !strings.HasSuffix(line, " chr 0") {
					t.Errorf("a device was made: %s", line)
				}
			}
		}
	})
}

// untilDone complains about reads that come when nobody should read any more.
type untilDone struct {
	t    *testing.T
	r    io.Reader
	done atomic.Bool
}

func (u *untilDone) Read(p []byte) (int, error) {
	if u.done.Load() {
		u.t.Error("the stream is read after Apply has returned")
	}
	return u.r.Read(p)
}

// What reads ahead ends with Apply, wherever that gives up: the descriptor below may be closed, or mean something else.
func TestNothingIsReadAfterAnError(t *testing.T) {
	var long []entry
	long = append(long, file("../out", "x"))
	for i := range 64 {
		long = append(long, file(fmt.Sprint(i), strings.Repeat("x", 256<<10)))
	}
	_, root := plant(t)
	stream := &untilDone{t: t, r: bytes.NewReader(archive(t, long...))}
	_, err := layer.Apply(root, stream, layer.Options{SingleID: single()})
	stream.done.Store(true)
	if !errors.Is(err, layer.ErrInvalid) {
		t.Fatalf("error %v, want one that blames the layer", err)
	}
	stacks := make([]byte, 1<<20)
	if n := goruntime.Stack(stacks, true); bytes.Contains(stacks[:n], []byte("readAhead).run")) {
		t.Errorf("a goroutine still reads ahead:\n%s", stacks[:n])
	}
}
