package layer

import (
	"archive/tar"
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A tree that was just extracted matches, and each kind of damage is reported by name.
func TestCompare(t *testing.T) {
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, h := range []tar.Header{
		{Name: "dir/", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "dir/file", Typeflag: tar.TypeReg, Mode: 0o644, Size: 5},
		{Name: "again", Typeflag: tar.TypeReg, Mode: 0o600, Size: 5},
		{Name: "again", Typeflag: tar.TypeReg, Mode: 0o644, Size: 5}, // the last one counts
		{Name: "link", Typeflag: tar.TypeSymlink, Linkname: "dir/file"},
		{Name: "hard", Typeflag: tar.TypeLink, Linkname: "dir/file"},
		{Name: "fifo", Typeflag: tar.TypeFifo, Mode: 0o644},
		{Name: "gone/", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "gone/below", Typeflag: tar.TypeReg, Mode: 0o644, Size: 5},
		{Name: "gone", Typeflag: tar.TypeReg, Mode: 0o644, Size: 5}, // replaces the directory
	} {
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if h.Typeflag == tar.TypeReg {
			if _, err := w.Write([]byte("bytes")); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name   string
		damage func(dir string) error
		says   string // empty: alike
	}{
		{"nothing", func(string) error { return nil }, ""},
		{"other bytes", func(d string) error { return os.WriteFile(d+"/again", []byte("bites"), 0) }, "again: its bytes differ"},
		{"fewer bytes", func(d string) error { return os.Truncate(d+"/again", 4) }, "again: it has 4 bytes, not 5"},
		{"another mode", func(d string) error { return os.Chmod(d+"/dir/file", 0o755|os.ModeSetuid) }, "dir/file: its permissions are 4755, not 0644"},
		{"missing", func(d string) error { return os.Remove(d + "/fifo") }, "fifo: it is missing"},
		{"another target", func(d string) error {
			if err := os.Remove(d + "/link"); err != nil {
				return err
			}
			return os.Symlink("/etc/passwd", d+"/link")
		}, `link: it leads to "/etc/passwd"`},
		{"another type", func(d string) error {
			if err := os.Remove(d + "/again"); err != nil {
				return err
			}
			return os.Mkdir(d+"/again", 0o755)
		}, "again: it is of type"},
		{"a directory that is a file", func(d string) error {
			if err := os.RemoveAll(d + "/dir"); err != nil {
				return err
			}
			return os.WriteFile(d+"/dir", nil, 0o755)
		}, "dir/file, which it is the same file as"},
		{"a directory that is a link to itself", func(d string) error {
			if err := os.RemoveAll(d + "/dir"); err != nil {
				return err
			}
			return os.Symlink("dir", d+"/dir")
		}, "hard: it cannot be looked at: too many levels"},
		{"a copy instead of a link", func(d string) error {
			if err := os.Remove(d + "/hard"); err != nil {
				return err
			}
			return os.WriteFile(d+"/hard", []byte("bytes"), 0o644)
		}, "hard: it is not the same file"},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "tree")
			if err := os.Mkdir(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			root, err := os.OpenRoot(dir)
			if err != nil {
				t.Fatal(err)
			}
			defer root.Close()
			applied, err := Apply(root, bytes.NewReader(buf.Bytes()), Options{SingleID: true})
			if err != nil {
				t.Fatal(err)
			}
			if err := test.damage(dir); err != nil {
				t.Fatal(err)
			}
			c, err := Compare(root, bytes.NewReader(buf.Bytes()), Options{})
			if err != nil || c.DiffID != applied.DiffID {
				t.Fatalf("%+v, %v", c, err)
			}
			got := strings.Join(c.Differences, "; ")
			if test.says == "" && got != "" || !strings.Contains(got, test.says) {
				t.Errorf("differences %q, want %q", got, test.says)
			}
		})
	}
}
