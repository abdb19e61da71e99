package layer_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// What Apply makes must mean to overlayfs what the layer meant. The mount is made in a user namespace, as in the product.
func TestOverlayfsReadsTheLayers(t *testing.T) {
	testenv.RequireUserNS(t)
	unshare := testenv.RequirePeer(t, "unshare")
	top := t.TempDir()
	layers := [][]entry{
		{file("kept", "1"), file("deleted", "1"), file("replaced", "1"), file("dir/old", "1"), file("opaque/old", "1"), file("again/old", "1"), file("swapped/old", "1"), file("tree/x/y", "1")},
		{
			file(".wh.deleted", ""), file("replaced", "2"), file("dir/new", "2"), file("opaque/.wh..wh..opq", ""), file("opaque/new", "2"),
			file(".wh.again", ""), file("again/new", "2"), file("swapped", "2"), file("tree/.wh.x", ""),
			// A layer cannot give overlayfs orders of its own.
			{typ: '5', name: "dir", xattrs: map[string]string{"user.overlay.opaque": "y", "user.overlay.redirect": "/opaque"}},
		},
	}
	for i, entries := range layers {
		path := filepath.Join(top, string(rune('0'+i)))
		if err := os.Mkdir(path, 0o755); err != nil {
			t.Fatal(err)
		}
		root, err := os.OpenRoot(path)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := layer.Apply(root, bytes.NewReader(archive(t, entries...)), layer.Options{SingleID: single()}); err != nil {
			t.Fatal(err)
		}
		if err := root.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(top, "merged"), 0o755); err != nil {
		t.Fatal(err)
	}
	const script = `cd "$1" && mount -t overlay overlay -o userxattr,lowerdir=1:0 merged && cd merged && find . -type f | sort | xargs grep -H . && find . ! -type f ! -type d`
	out, err := exec.CommandContext(t.Context(), unshare, "-rm", "sh", "-c", script, "sh", top).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	const want = "./again/new:2\n./dir/new:2\n./dir/old:1\n./kept:1\n./opaque/new:2\n./replaced:2\n./swapped:2\n"
	if diff := cmp.Diff(want, string(out)); diff != "" {
		t.Errorf("merged (-want +got):\n%s", diff)
	}
}
