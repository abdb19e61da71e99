package layer_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// The output of Apply must mean to overlayfs what its layers mean. The mount is made in a user
// namespace, as in the product.
func TestOverlayfsReadsTheLayers(t *testing.T) {
	testenv.RequireUserNS(t)
	unshare := testenv.RequirePeer(t, "unshare")
	tests := []struct {
		name   string
		layers [][]entry
		want   string // the view: a line for each file, link and FIFO, and for each empty directory
	}{
		{
			name: "files, whiteouts and opaque directories",
			layers: [][]entry{
				{file("kept", "1"), file("deleted", "1"), file("replaced", "1"), file("dir/old", "1"), file("opaque/old", "1"), file("again/old", "1"), file("swapped/old", "1"), file("tree/x/y", "1")},
				{
					file(".wh.deleted", ""), file("replaced", "2"), file("dir/new", "2"), file("opaque/.wh..wh..opq", ""), file("opaque/new", "2"),
					file(".wh.again", ""), file("again/new", "2"), file("swapped", "2"), file("tree/.wh.x", ""),
				},
			},
			want: "again/new:2 dir/new:2 dir/old:1 kept:1 opaque/new:2 replaced:2 swapped:2 tree/",
		},
		{
			name: "a layer cannot give overlayfs orders of its own",
			layers: [][]entry{
				{file("dir/old", "1"), file("other/file", "1")},
				{{typ: tar.TypeDir, name: "dir", xattrs: map[string]string{"user.overlay.opaque": "y", "user.overlay.redirect": "/other"}}},
			},
			want: "dir/old:1 other/file:1",
		},
		{
			name: "directory, file, link, directory",
			layers: [][]entry{
				{file("p/one", "1"), file("q/two", "1")},
				{file("p", "2")},
				{symlink("p", "q")},
				{dir("p"), file("p/three", "4")},
			},
			want: "p/three:4 q/two:1",
		},
		{
			name: "file, directory, FIFO, file",
			layers: [][]entry{
				{file("p", "1")},
				{file("p/x", "2")},
				{special(tar.TypeFifo, "p")},
				{file("p", "4")},
			},
			want: "p:4",
		},
		{
			name:   "a directory in place of a link does not show what the link led to",
			layers: [][]entry{{file("d/old", "1"), symlink("l", "d")}, {dir("l"), file("l/new", "2")}},
			want:   "d/old:1 l/new:2",
		},
		{
			name:   "a link in place of a directory",
			layers: [][]entry{{file("d/old", "1"), file("l/gone", "1")}, {symlink("l", "d")}},
			want:   "d/old:1 l->d",
		},
		{
			name:   "opaque in the middle",
			layers: [][]entry{{file("d/a", "1")}, {file("d/.wh..wh..opq", ""), file("d/b", "2")}, {file("d/c", "3")}},
			want:   "d/b:2 d/c:3",
		},
		{
			name:   "opaque at the bottom",
			layers: [][]entry{{file("d/.wh..wh..opq", ""), file("d/a", "1")}, {file("d/b", "2")}},
			want:   "d/a:1 d/b:2",
		},
		{
			name:   "an opaque root",
			layers: [][]entry{{file("a", "1"), file("d/b", "1"), symlink("l", "d"), file("e/f", "1")}, {file("x", "2"), file("d/y", "2")}, {file(".wh..wh..opq", ""), file("d/c", "3"), file("n", "3")}, {file("e/g", "4")}},
			want:   "d/c:3 e/g:4 n:3",
		},
		{
			name:   "an opaque root and nothing else",
			layers: [][]entry{{file("a", "1"), file("d/b", "1")}, {file(".wh..wh..opq", "")}},
			want:   "",
		},
		{
			name:   "deleted, and there again",
			layers: [][]entry{{file("d/a", "1"), file("f", "1")}, {file(".wh.d", ""), file(".wh.f", "")}, {file("d/b", "3"), file("f", "3")}},
			want:   "d/b:3 f:3",
		},
		{
			name:   "whiteouts of what is not there",
			layers: [][]entry{{file("a", "1")}, {file(".wh.b", ""), file("c/.wh.d", ""), file("e/f/.wh..wh..opq", "")}},
			want:   "a:1 c/ e/f/",
		},
		{
			name:   "a whiteout of one name of a file with two",
			layers: [][]entry{{file("a", "1"), hardlink("b", "a")}, {file(".wh.a", "")}},
			want:   "b:1",
		},
		{
			name:   "a file in place of one name of a file with two",
			layers: [][]entry{{file("a", "1"), hardlink("b", "a")}, {file("a", "2")}},
			want:   "a:2 b:1",
		},
		{
			name:   "a whiteout of a link takes the link",
			layers: [][]entry{{file("d/a", "1"), symlink("l", "d")}, {file(".wh.l", "")}},
			want:   "d/a:1",
		},
		{
			name:   "a whiteout and a file of one name, in both orders",
			layers: [][]entry{{file("a/x", "1"), file("b/x", "1")}, {file(".wh.a", ""), file("a/y", "2"), file("b/y", "2"), file(".wh.b", "")}},
			want:   "a/y:2 b/y:2",
		},
		{
			name:   "a whiteout of a directory after whiteouts in it",
			layers: [][]entry{{file("a/b/c/d", "1"), file("e/f", "1")}, {file("a/b/c/.wh.d", ""), file("a/b/.wh.c", ""), file(".wh.a", ""), file("e/g/.wh.x", ""), file("e/g/h", "2"), file(".wh.e", "")}},
			want:   "e/g/h:2",
		},
		{
			name: "whiteouts in directories whose names begin alike, in no order",
			layers: [][]entry{
				{file("a/b/c/x", "1"), file("a/bc/x", "1"), file("a/b/x", "1"), file("ab/x", "1"), file("a/x", "1"), file("x", "1")},
				{file("a/b/.wh..wh..opq", ""), file("a/b/d/x", "2"), file("ab/y", "2")},
				{file("a/b/c/.wh.x", ""), file("a/bc/.wh.x", ""), file(".wh.x", ""), file("a/b/d/.wh.x", ""), file("ab/.wh.z", ""), file("a/.wh.x", ""), file("ab/.wh.y", ""), file("a/b/.wh.x", "")},
			},
			want: "a/b/c/ a/b/d/ a/bc/ ab/x:1",
		},
		{
			name:   "a directory without an entry over a file",
			layers: [][]entry{{file("a", "1")}, {file("a/b/c", "2")}},
			want:   "a/b/c:2",
		},
	}
	const script = `cd "$1" && mount -t overlay overlay -o "userxattr,lowerdir=$2" merged && cd merged &&
		find . -mindepth 1 \( -type d -empty -printf '%P/\n' -o -type l -printf '%P->%l\n' -o -type p -printf '%P|\n' -o -type f -printf '%P:' -exec cat {} \; -printf '\n' -o -type c -printf '%P device\n' \)`
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			top := t.TempDir()
			lower := []*os.Root{}
			var names []string
			for i, entries := range tt.layers {
				name := string(rune('a' + i))
				if err := os.Mkdir(filepath.Join(top, name), 0o755); err != nil {
					t.Fatal(err)
				}
				root, err := os.OpenRoot(filepath.Join(top, name))
				if err != nil {
					t.Fatal(err)
				}
				defer root.Close()
				if _, err := layer.Apply(root, bytes.NewReader(archive(t, entries...)), layer.Options{SingleID: single(), Lower: lower}); err != nil {
					t.Fatal(err)
				}
				lower, names = slices.Insert(lower, 0, root), slices.Insert(names, 0, name)
			}
			// Overlayfs wants two lower directories where there is no upper one.
			for _, d := range []string{"empty", "merged"} {
				if err := os.Mkdir(filepath.Join(top, d), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			lowerdir := strings.Join(append(names, "empty"), ":")
			out, err := exec.CommandContext(t.Context(), unshare, "-rm", "sh", "-c", script, "sh", top, lowerdir).CombinedOutput()
			if err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			got := strings.Split(strings.TrimSpace(string(out)), "\n")
			slices.Sort(got)
			if diff := cmp.Diff(tt.want, strings.Join(got, " ")); diff != "" {
				t.Errorf("merged (-want +got):\n%s", diff)
			}
		})
	}
}

// Overlayfs does not show mounts in a lower directory, so they are not entered.
func TestNothingInAMountBelowIsLookedAt(t *testing.T) {
	testenv.RequireUserNS(t)
	const in = "SANDBOXD_TEST_MOUNT_BELOW"
	top := os.Getenv(in)
	if top == "" {
		top = t.TempDir()
		for _, d := range []string{"lower/sub", "upper/sub/deep", "target"} {
			if err := os.MkdirAll(filepath.Join(top, d), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(t.Context(), testenv.RequirePeer(t, "unshare"), "-rm", "sh", "-c",
			`mount -t tmpfs tmpfs "$1/lower/sub" && mkdir "$1/lower/sub/deep" && touch "$1/lower/sub/deep/file" && exec "$2" -test.run "^$3$" -test.v`,
			"sh", top, self, t.Name())
		cmd.Env = append(os.Environ(), in+"="+top)
		if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()) {
			t.Errorf("%v: %s", err, out)
		}
		return
	}
	lower, upper := open(t, filepath.Join(top, "lower")), open(t, filepath.Join(top, "upper"))
	_, err := layer.Diff(io.Discard, []layer.Overlay{{At: ".", Upper: upper[0], Lower: lower}}, layer.DiffOptions{})
	if !errors.Is(err, unix.EXDEV) {
		t.Errorf("diff: %v", err)
	}
	target := open(t, filepath.Join(top, "target"))
	_, err = layer.Apply(target[0], bytes.NewReader(archive(t, file("sub/deep/.wh.file", ""))), layer.Options{SingleID: true, Lower: lower})
	if !errors.Is(err, unix.EXDEV) {
		t.Errorf("apply: %v", err)
	}
}
