package layer_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/image/layer"
)

// In an archive that is no layer, names of whiteouts are names and marks of overlayfs mean nothing;
// zeros become holes again. Names that climb are refused as in a layer.
func TestPlainArchives(t *testing.T) {
	from, to := t.TempDir(), t.TempDir()
	for name, body := range map[string]string{".wh.file": "a", ".wh..wh..opq": "", "dir/.wh.x": "b", "file": "c", "zeros": strings.Repeat("\x00", 1<<20)} {
		path := filepath.Join(from, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(body), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	for name, value := range map[string]string{"user.overlay.opaque": "y", "user.overlay.redirect": "/etc"} {
		if err := unix.Setxattr(filepath.Join(from, "dir"), name, []byte(value), 0); err != nil {
			t.Fatal(err)
		}
	}
	root, err := os.OpenRoot(from)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	var archive bytes.Buffer
	if _, err := layer.Diff(&archive, []layer.Overlay{{At: ".", Upper: root}}, layer.DiffOptions{Plain: true}); err != nil {
		t.Fatal(err)
	}
	target, err := os.OpenRoot(to)
	if err != nil {
		t.Fatal(err)
	}
	defer target.Close()
	opts := layer.Options{Plain: true, SingleID: true, Lower: []*os.Root{}}
	if _, err := layer.Apply(target, &archive, opts); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{".wh.file": "a", ".wh..wh..opq": "", "dir/.wh.x": "b", "file": "c"} {
		if got, err := os.ReadFile(filepath.Join(to, name)); err != nil || string(got) != want {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(to, "zeros"), &st); err != nil || st.Size != 1<<20 || st.Blocks > 16 {
		t.Errorf("zeros: %d bytes in %d blocks, %v", st.Size, st.Blocks, err)
	}
	if n, err := unix.Listxattr(filepath.Join(to, "dir"), nil); err != nil || n != 0 {
		t.Errorf("xattrs: %d, %v", n, err)
	}
	for _, name := range []string{"../x", ".wh.a/../../x", "a/../../x"} {
		var bad bytes.Buffer
		w := tar.NewWriter(&bad)
		if err := errors.Join(w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Size: 1}), func() error { _, err := io.WriteString(w, "x"); return err }(), w.Close()); err != nil {
			t.Fatal(err)
		}
		empty, err := os.OpenRoot(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := layer.Apply(empty, &bad, opts); !errors.Is(err, layer.ErrInvalid) {
			t.Errorf("%q: %v", name, err)
		}
		_ = empty.Close()
	}
}
