package layer_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/image/layer"
)

// An oddity is a layer of the corpus with its expected result.
type oddity struct {
	name    string
	entries []entry
	tail    []byte // after the entries instead of an end marker
	limits  layer.Limits
	want    string   // the tree afterwards
	skipped []string // omissions
	err     string   // part of the message; then the class is ErrInvalid
	// wantFiles are looked for instead of comparing the whole tree.
	wantFiles []string
	stat      map[string]string // modes and times of some files
	root      bool              // an ordinary user could not look at the result
}

func (o *oddity) stream(tb testing.TB) []byte {
	tb.Helper()
	stream := archive(tb, o.entries...)
	if o.tail != nil {
		stream = append(stream[:len(stream)-1024], o.tail...)
	}
	return stream
}

// The corpus: layers that are hostile or odd, each with the tree or the error that it must give.
// Beside every one lies a host directory that must not change. Those that take several layers are
// in overlay_test.go, those about compression in stream_test.go, and archives that other programs
// wrote in testdata/fuzz.
func corpus() []oddity {
	long := strings.Repeat("n", 255)
	deep := strings.Repeat("d/", 100)
	return []oddity{
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

		// One name twice.
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

		// Omissions.
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

		// Names that are odd and allowed.
		{name: "bytes that are no UTF-8", entries: []entry{file("\xff\xfe/\x80", "x")}, want: lines("\xff\xfe dir", "\xff\xfe/\x80 file \"x\"")},
		{
			name: "white space, control characters, backslashes", entries: []entry{file(" ", "1"), file("a\nb", "2"), file("\x1b[2J", "3"), file(`..\host\secret`, "4")},
			want: lines("\x1b[2J file \"3\"", `  file "1"`, `..\host\secret file "4"`, "a\nb file \"2\""),
		},
		{name: "names of dots", entries: []entry{file("...", "1"), file("..a", "2"), file("a..", "3")}, want: lines(`... file "1"`, `..a file "2"`, `a.. file "3"`)},
		{name: "empty and dot components", entries: []entry{dir("./a//."), file("a/./b", "x"), dir("//")}, want: lines("a dir", `a/b file "x"`)},
		{name: "an old archive's file with a slash at the end is a directory", tail: cat(raw("a/", 0, nil), end), want: lines("a dir")},
		{name: "a file with a slash at the end", tail: cat(raw("a/", tar.TypeReg, nil), end), want: lines(`a file ""`)},
		{name: "a link with a slash at the end", tail: cat(raw("l/", tar.TypeSymlink, put(157, "../host")), end), want: lines("l -> ../host")},
		{name: "an old archive's file", tail: cat(raw("a", 0, nil), end), want: lines(`a file ""`)},
		{name: "a contiguous file", tail: cat(raw("a", tar.TypeCont, put(124, "00000000003\x00")), block("abc"), end), want: lines(`a file "abc"`)},
		{name: "a V7 header without magic", tail: cat(raw("a", tar.TypeReg, func(b []byte) { clear(b[257:265]) }), end), want: lines(`a file ""`)},
		{name: "a ustar prefix", tail: cat(raw("c", tar.TypeReg, put(345, "a/b")), end), want: lines("a dir", "a/b dir", `a/b/c file ""`)},
		{name: ".. in a ustar prefix", tail: cat(raw("secret", tar.TypeReg, put(345, "../host")), end), err: `".." in it`},
		{name: ".. that would stay inside", entries: []entry{dir("a"), file("a/../b", "x")}, err: `".." in it`},
		{name: ".. behind slashes", entries: []entry{file("//..//host/secret", "x")}, err: `".." in it`},
		{name: ".. as a directory with a slash", entries: []entry{dir("../")}, err: `".." in it`},
		{name: "a name of slashes is the root", entries: []entry{{typ: tar.TypeDir, name: "///", mode: 0o700}}, want: lines(), stat: map[string]string{".": "700 1000000000"}},
		{name: "a FIFO as the root", entries: []entry{special(tar.TypeFifo, ".")}, err: "root must be a directory"},
		{name: "a hard link as the root", entries: []entry{file("a", "x"), hardlink("./", "a")}, err: "layer's root"},
		{name: "a whiteout of the root's opaque mark by a dot path", entries: []entry{file("./.wh..wh..opq", "")}, want: ". dir user.overlay.opaque=y\n"},

		// Links again.
		{name: "a file below a link to the parent of the root", entries: []entry{symlink("l", ".."), file("l/x", "1")}, want: lines("l -> ..", `x file "1"`)},
		{name: "a file below a link to the root", entries: []entry{symlink("l", "/"), file("l/x", "1")}, want: lines("l -> /", `x file "1"`)},
		{name: "a file below a link to the directory that it is in", entries: []entry{symlink("l", "."), file("l/l/l/x", "1")}, want: lines("l -> .", `x file "1"`)},
		{
			name: "a file below a link with slashes", entries: []entry{dir("d"), symlink("l", "//d//./"), file("l/x", "1")},
			want: lines("d dir", `d/x file "1"`, "l -> //d//./"),
		},
		{name: "a file in place of the link that its directory is", entries: []entry{symlink("l", "l2"), symlink("l2", "l"), file("l", "x")}, want: lines(`l file "x"`, "l2 -> l")},
		{name: "a file below a link to a file", entries: []entry{file("f", "x"), symlink("l", "f"), file("l/x", "y")}, err: `"f" is not a directory`},
		{name: "a link to what a whiteout deletes", entries: []entry{file(".wh.d", ""), symlink("l", "d"), file("l/x", "1")}, want: lines("d dir user.overlay.opaque=y", `d/x file "1"`, "l -> d")},
		{name: "a directory entry in place of a link in a circle", entries: []entry{symlink("a", "a"), dir("a"), file("a/x", "1")}, want: lines("a dir user.overlay.opaque=y", `a/x file "1"`)},
		{name: "a link of /proc's kind", entries: []entry{symlink("l", "/proc/self/root"), file("l/x", "1")}, want: lines("l -> /proc/self/root", "proc dir", "proc/self dir", "proc/self/root dir", `proc/self/root/x file "1"`)},
		{name: "a link that is no UTF-8", entries: []entry{symlink("l", "\xff\xfe")}, want: lines("l -> \xff\xfe")},
		{name: "a link whose entry has a size", tail: cat(raw("l", tar.TypeSymlink, both(put(157, "x"), put(124, "00000001000\x00"))), raw("a", tar.TypeReg, nil), end), want: lines(`a file ""`, "l -> x")},
		{name: "a NUL in the target of a link", tail: cat(pax(rec("linkpath", "a\x00b")), raw("l", tar.TypeSymlink, put(157, "x")), end), err: "damaged"},

		// Hard links again.
		{name: "a hard link to what comes later", entries: []entry{hardlink("h", "a"), file("a", "x")}, err: "not in this layer"},
		{name: "a hard link to a device, which is left out", entries: []entry{special(tar.TypeChar, "c"), hardlink("h", "c")}, err: "not in this layer"},
		{name: "a hard link to a FIFO", entries: []entry{special(tar.TypeFifo, "f"), hardlink("h", "f")}, want: lines("f fifo", "h fifo")},
		{name: "a hard link without a target", tail: raw("h", tar.TypeLink, nil), err: "the name is empty"},
		{name: "a hard link to a target of dots and slashes", entries: []entry{file("d/a", "x"), hardlink("h", "./d//./a/")}, want: lines("d dir", `d/a file "x"`, `h file "x"`)},
		{name: "a hard link through a link of the layer", entries: []entry{file("d/a", "x"), symlink("l", "/d"), hardlink("h", "l/a")}, want: lines("d dir", `d/a file "x"`, `h file "x"`, "l -> /d")},
		{name: "a hard link through links in a circle", entries: []entry{symlink("a", "b"), symlink("b", "a"), hardlink("h", "a/x")}, err: "more than 40 symbolic links"},
		{name: "a hard link through a file", entries: []entry{file("a", "x"), hardlink("h", "a/b")}, err: `"a" is not a directory`},
		{name: "a hard link through a whiteout", entries: []entry{file(".wh.d", ""), hardlink("h", "d/x")}, err: "not in this layer"},
		{name: "a hard link in place of a whiteout", entries: []entry{file("b", "x"), file(".wh.a", ""), hardlink("a", "b")}, want: lines(`a file "x"`, `b file "x"`)},
		{name: "a hard link in place of a directory", entries: []entry{file("b", "x"), file("d/e/f", "1"), hardlink("d", "b")}, want: lines(`b file "x"`, `d file "x"`)},
		{name: "a hard link in place of a link", entries: []entry{symlink("l", "../host/secret"), file("b", "x"), hardlink("l", "b")}, want: lines(`b file "x"`, `l file "x"`)},
		{name: "a hard link to what lies beside, by PAX", tail: cat(pax(rec("linkpath", "../host/secret")), raw("h", tar.TypeLink, put(157, "a")), end), err: `".." in it`},
		{name: "a hard link to a name that is too long", entries: []entry{{typ: tar.TypeLink, name: "h", link: strings.Repeat("x/", 2500), format: tar.FormatPAX}}, err: "4095 are allowed"},
		{name: "a hard link whose entry has a size", tail: cat(raw("a", tar.TypeReg, nil), raw("h", tar.TypeLink, both(put(157, "a"), put(124, "00000001000\x00"))), raw("b", tar.TypeReg, nil), end), want: lines(`a file ""`, `b file ""`, `h file ""`)},
		{name: "a hard link shares mode and owner", entries: []entry{{typ: tar.TypeReg, name: "a", mode: 0o4711}, {typ: tar.TypeLink, name: "h", link: "a", mode: 0o777}}, want: lines(`a file ""`, `h file ""`), stat: map[string]string{"h": "4711 1000000000"}},

		// Whiteouts again.
		{name: "a whiteout that is a directory", entries: []entry{dir(".wh.b")}, want: lines("b chr 0")},
		{name: "a whiteout that is a link out", entries: []entry{symlink(".wh.b", "../host/secret")}, want: lines("b chr 0")},
		{name: "a whiteout that is a hard link", entries: []entry{file("a", "x"), hardlink(".wh.b", "a")}, want: lines(`a file "x"`, "b chr 0")},
		{name: "a whiteout that is a device", entries: []entry{special(tar.TypeChar, ".wh.b")}, want: lines("b chr 0")},
		{name: "a whiteout with content", entries: []entry{file(".wh.b", "content"), file("c", "x")}, want: lines("b chr 0", `c file "x"`)},
		{name: "a whiteout of an owner that is not mapped", entries: []entry{{typ: tar.TypeReg, name: ".wh.b", uid: 1 << 20}}, want: lines("b chr 0")},
		{name: "a whiteout with an opaque xattr", entries: []entry{{typ: tar.TypeReg, name: ".wh.b", xattrs: map[string]string{"user.overlay.opaque": "y"}}}, want: lines("b chr 0")},
		{name: "a device 0:0 is no whiteout", tail: cat(raw("b", tar.TypeChar, both(put(329, "0000000\x00"), put(337, "0000000\x00"))), end), want: lines(), skipped: []string{"b: a device"}},
		{name: "a device in place of a file", entries: []entry{file("b", "x"), special(tar.TypeBlock, "b")}, want: lines(`b file "x"`), skipped: []string{"b: a device"}},
		{name: "a whiteout of one name of a file with two", entries: []entry{file("a", "x"), hardlink("b", "a"), file(".wh.a", "")}, want: lines(`a file "x"`, `b file "x"`)},
		{name: "a whiteout of a link", entries: []entry{symlink("l", "../host"), file(".wh.l", "")}, want: lines("l -> ../host")},
		{name: "a whiteout below a whiteout", entries: []entry{file(".wh.a", ""), file("a/.wh.b", "")}, want: lines("a dir user.overlay.opaque=y", "a/b chr 0")},
		{name: "an opaque mark below a whiteout", entries: []entry{file(".wh.a", ""), file("a/.wh..wh..opq", "")}, want: lines("a dir user.overlay.opaque=y")},
		{name: "an opaque mark twice, and last", entries: []entry{file("a/b", "x"), file("a/.wh..wh..opq", ""), file("a/.wh..wh..opq", "")}, want: lines("a dir user.overlay.opaque=y", `a/b file "x"`)},
		{name: "a file after an opaque directory that it replaces", entries: []entry{file("a/.wh..wh..opq", ""), file("a", "x")}, want: lines(`a file "x"`)},
		{name: "a whiteout below a file", entries: []entry{file("a", "x"), file("a/.wh.b", "")}, err: `"a" is not a directory`},
		{name: "a whiteout below links in a circle", entries: []entry{symlink("a", "a"), file("a/.wh.b", "")}, err: "more than 40 symbolic links"},
		{name: "a whiteout of a whiteout's name", entries: []entry{file(".wh..whx", "")}, want: lines(".whx chr 0")},
		{name: "a whiteout with a slash at the end", tail: cat(raw(".wh.b/", tar.TypeReg, nil), end), want: lines("b chr 0")},
		{name: "a whiteout of .wh.", entries: []entry{file(".wh..wh.", "")}, want: lines(), skipped: []string{".wh..wh.: a note of the aufs driver"}},
		{name: "almost an opaque mark", entries: []entry{file("a/.wh..wh..opqx", ""), file("a/.wh..wh..op", "")}, want: lines(), skipped: []string{
			"a/.wh..wh..opqx: a note of the aufs driver", "a/.wh..wh..op: a note of the aufs driver",
		}},
		{name: "aufs notes further down", entries: []entry{file("a/.wh..wh.plnk/x", ""), file("a/.wh..wh.orph", "")}, want: lines(), skipped: []string{
			"a/.wh..wh.plnk/x: a note of the aufs driver", "a/.wh..wh.orph: a note of the aufs driver",
		}},
		{name: "an opaque mark as a directory", entries: []entry{file("a/.wh..wh..opq/x", "")}, want: lines(), skipped: []string{"a/.wh..wh..opq/x: a note of the aufs driver"}},
		{name: "names that only look like whiteouts", entries: []entry{file(".wh", "1"), file("a.wh.b", "2"), file(".WH.b", "3")}, want: lines(`.WH.b file "3"`, `.wh file "1"`, `a.wh.b file "2"`)},

		// Xattrs.
		{
			name: "overlayfs' orders under every name", entries: []entry{
				{typ: tar.TypeDir, name: "a", xattrs: map[string]string{"user.overlay.origin": "x"}},
				{typ: tar.TypeDir, name: "b", xattrs: map[string]string{"trusted.overlay.opaque": "y"}},
				{typ: tar.TypeReg, name: "c", xattrs: map[string]string{"user.overlay.overlay.opaque": "y"}},
				{typ: tar.TypeReg, name: "d", xattrs: map[string]string{"user.overlay.whiteout": ""}},
				{typ: tar.TypeReg, name: "e", xattrs: map[string]string{"user.overlay.verity": "x"}},
			}, want: lines("a dir", "b dir", `c file ""`, `d file ""`, `e file ""`),
			skipped: []string{
				"a: xattr user.overlay.origin", "b: xattr trusted.overlay.opaque", "c: xattr user.overlay.overlay.opaque", "d: xattr user.overlay.whiteout",
				"e: xattr user.overlay.verity",
			},
		},
		{
			name: "labels and lists", entries: []entry{
				{typ: tar.TypeReg, name: "a", xattrs: map[string]string{"security.selinux": "system_u:object_r:bin_t:s0"}},
				{typ: tar.TypeReg, name: "b", xattrs: map[string]string{"security.ima": "\x01"}},
				{typ: tar.TypeReg, name: "c", xattrs: map[string]string{"system.posix_acl_access": "\x02\x00\x00\x00"}},
				{typ: tar.TypeReg, name: "d", xattrs: map[string]string{"trusted.x": "y"}},
				{typ: tar.TypeReg, name: "e", xattrs: map[string]string{"nonsense": "y"}},
			}, want: lines(`a file ""`, `b file ""`, `c file ""`, `d file ""`, `e file ""`),
			skipped: []string{"a: xattr security.selinux", "b: xattr security.ima", "c: xattr system.posix_acl_access", "d: xattr trusted.x", "e: xattr nonsense"},
		},
		{name: "xattrs of libarchive and star", tail: cat(pax(rec("LIBARCHIVE.xattr.user.a", "eA=="), rec("SCHILY.acl.access", "user::rwx"), rec("RHT.security.selinux", "x")), raw("f", tar.TypeReg, nil), end), want: lines(`f file ""`)},
		{name: "an xattr with = and new lines in its value", entries: []entry{{typ: tar.TypeReg, name: "f", xattrs: map[string]string{"user.a": "b=c\nd"}}}, want: lines("f file \"\" user.a=b=c\nd")},
		{name: "an xattr without a value", entries: []entry{{typ: tar.TypeDir, name: "d", xattrs: map[string]string{"user.a": ""}}}, want: lines("d dir user.a=")},
		{name: "an xattr without a name", tail: cat(pax(rec("SCHILY.xattr.", "x")), raw("f", tar.TypeReg, nil), end), want: lines(`f file ""`), skipped: []string{`f: xattr ""`}},
		{name: "an xattr of a user without a name", tail: cat(pax(rec("SCHILY.xattr.user.", "x")), raw("f", tar.TypeReg, nil), end), err: "xattr user."},
		{name: "an xattr whose name is too long", tail: cat(pax(rec("SCHILY.xattr.user."+strings.Repeat("n", 300), "x")), raw("f", tar.TypeReg, nil), end), err: "xattr user.nnn"},
		{name: "an xattr that is too large", tail: cat(pax(rec("SCHILY.xattr.user.a", strings.Repeat("x", 65537))), raw("f", tar.TypeReg, nil), end), err: "xattr user.a"},
		{name: "an xattr on a FIFO", tail: cat(pax(rec("SCHILY.xattr.user.a", "x")), raw("f", tar.TypeFifo, nil), end), want: lines("f fifo"), skipped: []string{"f: xattr user.a"}},
		{name: "an xattr of the first of two entries for a directory stays", entries: []entry{{typ: tar.TypeDir, name: "d", xattrs: map[string]string{"user.a": "x"}}, dir("d")}, want: lines("d dir user.a=x")},
		{name: "an xattr on an unreadable file", entries: []entry{{typ: tar.TypeReg, name: "f", mode: 0o100000, xattrs: map[string]string{"user.a": "x"}}}, want: lines(`f file "" user.a=x`), stat: map[string]string{"f": "0 1000000000"}, root: true},

		// PAX.
		{name: "a PAX record that is longer than the header", tail: cat(pax("99 path=x\n"), raw("a", tar.TypeReg, nil), end), err: "damaged"},
		{name: "a PAX record of no length", tail: cat(pax("0 path=x\n"), raw("a", tar.TypeReg, nil), end), err: "damaged"},
		{name: "a PAX record of a negative length", tail: cat(pax("-9 path=x\n"), raw("a", tar.TypeReg, nil), end), err: "damaged"},
		{name: "a PAX record of an endless length", tail: cat(pax("99999999999999999999 path=x\n"), raw("a", tar.TypeReg, nil), end), err: "damaged"},
		{name: "a PAX record without end", tail: cat(pax("9 path=xy"), raw("a", tar.TypeReg, nil), end), err: "damaged"},
		{name: "a PAX record without =", tail: cat(pax("8 pathx\n"), raw("a", tar.TypeReg, nil), end), err: "damaged"},
		{name: "a PAX record without a key", tail: cat(pax(rec("", "x")), raw("a", tar.TypeReg, nil), end), err: "damaged"},
		{name: "a PAX header of two MiB", tail: cat(pax(rec("comment", strings.Repeat("x", 2<<20))), raw("a", tar.TypeReg, nil), end), err: "damaged"},
		{name: "a PAX header without its entry", tail: cat(pax(rec("path", "b")), end), want: lines()},
		{name: "a PAX header that is cut", tail: pax(rec("path", strings.Repeat("x", 1000)))[:700], err: "cut short"},
		{name: "the last of two PAX records", tail: cat(pax(rec("path", "b"), rec("path", "c")), raw("a", tar.TypeReg, nil), end), want: lines(`c file ""`)},
		{name: "the last of two PAX headers", tail: cat(pax(rec("path", "b")), pax(rec("path", "c")), raw("a", tar.TypeReg, nil), end), want: lines(`c file ""`)},
		{name: "a PAX size instead of the header's", tail: cat(pax(rec("size", "5")), raw("a", tar.TypeReg, nil), block("hello"), end), want: lines(`a file "hello"`)},
		{name: "a PAX size that hides an entry", tail: cat(pax(rec("size", "512")), raw("a", tar.TypeReg, nil), raw("../host/secret", tar.TypeReg, nil), end), wantFiles: []string{"a"}},
		{name: "a negative PAX size", tail: cat(pax(rec("size", "-1")), raw("a", tar.TypeReg, nil), end), err: "damaged"},
		{name: "a PAX size beyond 64 bits", tail: cat(pax(rec("size", "9223372036854775808")), raw("a", tar.TypeReg, nil), end), err: "damaged"},
		{name: "a PAX size that is no number", tail: cat(pax(rec("size", "0x10")), raw("a", tar.TypeReg, nil), end), err: "damaged"},
		{name: "a PAX size above 8 GiB", tail: cat(pax(rec("size", "9663676416")), raw("a", tar.TypeReg, nil), end), limits: layer.Limits{Bytes: 1 << 33}, err: "with its 9663676416 bytes"},
		{name: "a PAX size near the end of numbers", tail: cat(pax(rec("size", "9223372036854775807")), raw("a", tar.TypeReg, nil), end), err: "more than"},
		{name: ".. in a PAX path", tail: cat(pax(rec("path", "../host/secret")), raw("a", tar.TypeReg, nil), end), err: `".." in it`},
		{name: "an empty PAX path", tail: cat(pax(rec("path", "")), raw("a", tar.TypeReg, nil), end), want: lines(`a file ""`)},
		{name: "a PAX owner beyond the map", tail: cat(pax(rec("uid", "4294967296")), raw("a", tar.TypeReg, nil), end), err: "outside 0..65535"},
		{name: "a negative PAX owner", tail: cat(pax(rec("gid", "-1")), raw("a", tar.TypeReg, nil), end), err: "outside 0..65535"},
		{name: "a PAX time before 1970, with a fraction", tail: cat(pax(rec("mtime", "-1.5")), raw("a", tar.TypeReg, nil), end), want: lines(`a file ""`), stat: map[string]string{"a": "644 -2"}},
		{name: "a PAX time after 2038", tail: cat(pax(rec("mtime", "5000000000.123456789")), raw("a", tar.TypeReg, nil), end), want: lines(`a file ""`), stat: map[string]string{"a": "644 5000000000"}},
		{name: "a PAX time beyond any file system", tail: cat(pax(rec("mtime", "9223372036854775807")), raw("a", tar.TypeDir, nil), end), want: lines("a dir")},
		{name: "a PAX time that is none", tail: cat(pax(rec("mtime", "yesterday")), raw("a", tar.TypeReg, nil), end), err: "damaged"},
		{name: "a PAX global header changes nothing", tail: cat(global(rec("path", "../host/secret"), rec("size", "512"), rec("SCHILY.xattr.user.a", "x")), raw("a", tar.TypeReg, nil), end), want: lines(`a file ""`)},
		{name: "PAX global headers are entries", tail: cat(global(rec("a", "b")), global(rec("a", "b")), global(rec("a", "b")), end), limits: layer.Limits{Entries: 2}, err: "more than 2 entries"},
		{name: "PAX headers without end are bytes", tail: bytes.Repeat(pax(rec("comment", strings.Repeat("x", 400))), 100), limits: layer.Limits{Bytes: 50_000}, err: "more than 50000 bytes"},
		{name: "unknown PAX records", tail: cat(pax(rec("comment", "x"), rec("hdrcharset", "BINARY"), rec("uname", "root"), rec("VENDOR.x", "y")), raw("a", tar.TypeReg, nil), end), want: lines(`a file ""`)},

		// GNU.
		{name: "a GNU long name with ..", tail: cat(gnu('L', "../host/secret\x00"), raw("a", tar.TypeReg, nil), end), err: `".." in it`},
		{name: "a GNU long name with more behind its NUL", tail: cat(gnu('L', "b\x00/../../host"), raw("a", tar.TypeReg, nil), end), want: lines(`b file ""`)},
		{name: "an empty GNU long name", tail: cat(gnu('L', "\x00"), raw("a", tar.TypeReg, nil), end), want: lines(`a file ""`)},
		{name: "a GNU long name of two MiB", tail: cat(gnu('L', strings.Repeat("x", 2<<20)), raw("a", tar.TypeReg, nil), end), err: "damaged"},
		{name: "a GNU long name without its entry", tail: cat(gnu('L', "b\x00"), end), want: lines()},
		{name: "a GNU long name and a PAX path", tail: cat(gnu('L', "b\x00"), pax(rec("path", "c")), raw("a", tar.TypeReg, nil), end), want: lines(`b file ""`)},
		{name: "a GNU long link out", tail: cat(gnu('K', "../host/secret\x00"), raw("h", tar.TypeLink, put(157, "a")), end), err: `".." in it`},
		{name: "a GNU long link", tail: cat(gnu('K', strings.Repeat("../", 300)+"\x00"), raw("l", tar.TypeSymlink, put(157, "a")), end), want: lines("l -> " + strings.Repeat("../", 300))},
		{name: "a GNU volume label", tail: cat(raw("label", 'V', nil), end), err: "not supported"},
		{name: "a GNU multi-volume file", tail: cat(raw("a", 'M', nil), end), err: "not supported"},
		{name: "a GNU dump directory", tail: cat(raw("a", 'D', nil), end), err: "not supported"},
		{name: "a Solaris ACL", tail: cat(raw("a", 'A', nil), end), err: "not supported"},

		// Sparse files, in GNU's four forms.
		{name: "a GNU sparse file", tail: gnuSparse(5), want: lines(`sparse file "\x00\x00\x00\x00\x00"`)},
		{name: "a PAX sparse file 0.0", tail: cat(pax(rec("GNU.sparse.size", "8"), rec("GNU.sparse.numblocks", "1"), rec("GNU.sparse.offset", "5"), rec("GNU.sparse.numbytes", "3")), raw("a", tar.TypeReg, put(124, "00000000003\x00")), block("abc"), end), want: lines(`a file "\x00\x00\x00\x00\x00abc"`)},
		{name: "a PAX sparse file 0.1", tail: cat(pax(rec("GNU.sparse.size", "8"), rec("GNU.sparse.numblocks", "1"), rec("GNU.sparse.map", "5,3"), rec("GNU.sparse.name", "b")), raw("a", tar.TypeReg, put(124, "00000000003\x00")), block("abc"), end), want: lines(`b file "\x00\x00\x00\x00\x00abc"`)},
		{name: "a PAX sparse file 1.0", tail: sparse10("b", "8", "1\n5\n3\n", "abc"), want: lines(`b file "\x00\x00\x00\x00\x00abc"`)},
		{name: ".. in the name of a PAX sparse file", tail: sparse10("../host/secret", "8", "1\n5\n3\n", "abc"), err: `".." in it`},
		{name: "a sparse file whose map goes back", tail: sparse10("b", "8", "2\n5\n3\n0\n1\n", "abcd"), err: "damaged"},
		{name: "a sparse file whose map is larger than it", tail: sparse10("b", "4", "1\n5\n3\n", "abc"), err: "damaged"},
		{name: "a sparse file whose map is endless", tail: sparse10("b", "8", "99999999999\n5\n3\n", "abc"), err: "cut short"},
		{name: "a sparse file of negative size", tail: sparse10("b", "-8", "0\n", ""), err: "damaged"},
		{name: "a sparse file of 9 GiB", tail: sparse10("b", "9663676416", "0\n", ""), limits: layer.Limits{Bytes: 1 << 33}, err: "with its 9663676416 bytes"},
		{name: "sparse files that together are too much", tail: cat(sparseEntry("a", "3000", "0\n", ""), sparseEntry("b", "3000", "0\n", ""), end), limits: layer.Limits{Bytes: 5000}, err: "5000"},

		// Numbers in headers.
		{name: "a size in base 256", tail: cat(raw("a", tar.TypeReg, base256(124, 12, 3)), block("abc"), end), want: lines(`a file "abc"`)},
		{name: "a size above 8 GiB in base 256", tail: cat(raw("a", tar.TypeReg, base256(124, 12, 9<<30)), end), limits: layer.Limits{Bytes: 1 << 33}, err: "with its 9663676416 bytes"},
		{name: "a size above 8 GiB that is a lie", tail: raw("a", tar.TypeReg, base256(124, 12, 9<<30)), err: "cut short"},
		{name: "a size that overflows base 256", tail: raw("a", tar.TypeReg, func(b []byte) { copy(b[124:136], "\x80\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff") }), err: "damaged"},
		{name: "a size that is no octal number", tail: raw("a", tar.TypeReg, put(124, "00000000009\x00")), err: "damaged"},
		{name: "a time before 1970 in base 256", tail: cat(raw("a", tar.TypeReg, base256(136, 12, -1)), end), want: lines(`a file ""`), stat: map[string]string{"a": "644 -1"}},
		{name: "a time beyond any file system in base 256", tail: cat(raw("a", tar.TypeReg, base256(136, 12, math.MaxInt64)), end), want: lines(`a file ""`)},
		{name: "an owner in base 256", tail: cat(raw("a", tar.TypeReg, base256(108, 8, 1<<40)), end), err: "outside 0..65535"},
		{name: "a negative owner in base 256", tail: cat(raw("a", tar.TypeReg, base256(108, 8, -1)), end), err: "outside 0..65535"},
		{name: "a mode with more than permissions", entries: []entry{{typ: tar.TypeReg, name: "a", mode: 0o120644}}, want: lines(`a file ""`), stat: map[string]string{"a": "644 1000000000"}},
		{name: "a mode in base 256", tail: cat(raw("a", tar.TypeReg, base256(100, 8, 1<<40|0o600)), end), want: lines(`a file ""`), stat: map[string]string{"a": "600 0"}},
		{name: "a negative mode", tail: cat(raw("a", tar.TypeReg, base256(100, 8, -1)), end), want: lines(`a file ""`), stat: map[string]string{"a": "7777 0"}},
		{name: "set-id bits and sticky", entries: []entry{{typ: tar.TypeReg, name: "a", mode: 0o6755}, {typ: tar.TypeDir, name: "d", mode: 0o3777}, {typ: tar.TypeFifo, name: "f", mode: 0o4600}}, want: lines(`a file ""`, "d dir", "f fifo"), stat: map[string]string{"a": "6755 1000000000", "d": "3777 1000000000", "f": "4600 1000000000"}},
		{name: "a directory with a size", tail: cat(raw("d", tar.TypeDir, put(124, "00000001000\x00")), raw("a", tar.TypeReg, nil), end), want: lines(`a file ""`, "d dir")},
		{name: "a FIFO with a size", tail: cat(raw("f", tar.TypeFifo, put(124, "00000001000\x00")), raw("a", tar.TypeReg, nil), end), want: lines(`a file ""`, "f fifo")},

		// The end.
		{name: "entries after the end are not read", tail: cat(raw("a", tar.TypeReg, nil), end, raw("../host/secret", tar.TypeReg, nil), end), want: lines(`a file ""`)},
		{name: "an end of one block, and then more", tail: cat(raw("a", tar.TypeReg, nil), make([]byte, 512), raw("b", tar.TypeReg, nil), end), err: "damaged"},
		{name: "no end at all", tail: raw("a", tar.TypeReg, nil), want: lines(`a file ""`)},
		{name: "half an end", tail: cat(raw("a", tar.TypeReg, nil), make([]byte, 512)), want: lines(`a file ""`)},
		{name: "a checksum that is off by one", tail: func() []byte { b := raw("a", tar.TypeReg, nil); b[0]++; return cat(b, end) }(), err: "damaged"},
		{name: "a good entry before a bad one", entries: []entry{file("a", "x")}, tail: cat([]byte("garbage"), make([]byte, 505)), err: "damaged"},
		{name: "cut in a file's padding", tail: raw("a", tar.TypeReg, put(124, "00000000003\x00"))[:512:512], err: "cut short"},

		// Many of everything.
		{name: "names of the greatest depth", entries: []entry{file(strings.Repeat("d/", 127)+"x", "1")}, wantFiles: []string{strings.Repeat("d/", 127) + "x"}},
		{name: "a depth limit of the caller's", entries: []entry{file("a/b/c", "x")}, limits: layer.Limits{Depth: 2}, err: "3 directories deep"},
		{name: "a name limit of the caller's", entries: []entry{file("abcde", "x")}, limits: layer.Limits{Name: 4}, err: "5 bytes, 4 are allowed"},
		{name: "links that lead too deep", entries: []entry{file("a/b/x", ""), symlink("l", "a/b"), file("l/c/d/e", "")}, limits: layer.Limits{Depth: 4}, err: "directories"},
		{name: "left out devices count as entries", entries: []entry{special(tar.TypeChar, "a"), special(tar.TypeChar, "b"), special(tar.TypeChar, "c")}, limits: layer.Limits{Entries: 2}, err: "more than 2 entries"},
		{name: "forty links are allowed", entries: append(chain(40), file("l0/x", "1")), wantFiles: []string{"end/x"}},
		{name: "forty-one links are not", entries: append(chain(41), file("l0/x", "1")), err: "more than 40 symbolic links"},
	}
}

func TestApply(t *testing.T) {
	names := make(map[string]bool)
	for _, tt := range corpus() {
		if names[tt.name] {
			t.Errorf("two cases are called %q", tt.name)
		}
		names[tt.name] = true
		t.Run(tt.name, func(t *testing.T) {
			h, root := plant(t)
			stream := tt.stream(t)
			if tt.root && single() {
				t.Skip("an ordinary user cannot read what the layer makes")
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
			for _, name := range tt.wantFiles {
				if fi, err := root.Lstat(name); err != nil || !fi.Mode().IsRegular() {
					t.Errorf("%s: %v, %v", name, fi, err)
				}
			}
			if tt.wantFiles == nil {
				if diff := cmp.Diff(tt.want, list(t, root.Name(), false)); diff != "" {
					t.Errorf("tree (-want +got):\n%s", diff)
				}
			}
			for name, want := range tt.stat {
				var st unix.Stat_t
				if err := unix.Lstat(filepath.Join(root.Name(), name), &st); err != nil {
					t.Fatal(err)
				}
				if got := fmt.Sprintf("%o %d", st.Mode&0o7777, st.Mtim.Sec); got != want {
					t.Errorf("%s has mode and time %s, want %s", name, got, want)
				}
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

// end is how an archive ends.
var end = make([]byte, 1024)

func cat(parts ...[]byte) []byte { return bytes.Join(parts, nil) }

// block is content with its padding.
func block(content string) []byte {
	return append([]byte(content), make([]byte, (512-len(content)%512)%512)...)
}

// put writes a field of a header.
func put(at int, value string) func([]byte) {
	return func(b []byte) { copy(b[at:], value) }
}

func both(one, two func([]byte)) func([]byte) {
	return func(b []byte) { one(b); two(b) }
}

// base256 writes a number as GNU tar writes large and negative ones.
func base256(at, width int, v int64) func([]byte) {
	return func(b []byte) {
		for i := width - 1; i >= 0; i-- {
			b[at+i] = byte(v)
			v >>= 8
		}
		b[at] |= 0x80
	}
}

// rec is one PAX record.
func rec(key, value string) string {
	n := len(key) + len(value) + 3
	for l := n; ; l++ {
		if s := fmt.Sprintf("%d %s=%s\n", l, key, value); len(s) == l {
			return s
		}
	}
}

func pax(records ...string) []byte { return gnu(tar.TypeXHeader, strings.Join(records, "")) }

func global(records ...string) []byte { return gnu(tar.TypeXGlobalHeader, strings.Join(records, "")) }

// gnu is an entry that describes the next one.
func gnu(typ byte, content string) []byte {
	return cat(raw("././@LongLink", typ, put(124, fmt.Sprintf("%011o\x00", len(content)))), block(content))
}

// sparse10 is an archive of one sparse file as GNU tar writes it, with the map before the content.
func sparse10(name, size, sparseMap, content string) []byte {
	return cat(sparseEntry(name, size, sparseMap, content), end)
}

func sparseEntry(name, size, sparseMap, content string) []byte {
	body := cat(block(sparseMap), block(content))
	return cat(
		pax(rec("GNU.sparse.major", "1"), rec("GNU.sparse.minor", "0"), rec("GNU.sparse.name", name), rec("GNU.sparse.realsize", size)),
		raw("GNUSparseFile.0/x", tar.TypeReg, put(124, fmt.Sprintf("%011o\x00", len(block(sparseMap))+len(content)))), body,
	)
}

// chain is n links, each to the next one, and a directory at the end.
func chain(n int) []entry {
	entries := []entry{dir("end")}
	for i := range n {
		to := fmt.Sprintf("l%d", i+1)
		if i == n-1 {
			to = "end"
		}
		entries = append(entries, symlink(fmt.Sprintf("l%d", i), to))
	}
	return entries
}
