package cli

import (
	"archive/tar"
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/internal/cmdline"
	"github.com/sandboxd/sandboxd/internal/cmdline/cmdtest"
)

// FuzzUnpack extracts archives as a sandbox could send them. Nothing outside the destination may
// change.
func FuzzUnpack(f *testing.F) {
	for _, entries := range [][]cmdtest.Entry{
		{fileEntry("a", "b")},
		{fileEntry("../a", "b")},
		{link("a", ".."), fileEntry("a/b", "c")},
		{link("a", "../outside"), hardlink("b", "a/kept"), fileEntry("b", "x")},
		{dirEntry("d/"), link("d", "/tmp")},
	} {
		var b bytes.Buffer
		t := tar.NewWriter(&b)
		for _, e := range entries {
			e.Size = int64(len(e.Body))
			if err := t.WriteHeader(&e.Header); err != nil {
				f.Fatal(err)
			}
			_, _ = io.WriteString(t, e.Body)
		}
		_ = t.Close()
		f.Add(b.Bytes(), true)
		f.Add(b.Bytes(), false)
	}
	f.Fuzz(func(t *testing.T, data []byte, asTree bool) {
		outer := t.TempDir()
		write(t, outer+"/outside/kept", "mine")
		dst := filepath.Join(outer, "dst")
		if err := os.Mkdir(dst, 0o755); err != nil {
			t.Fatal(err)
		}
		root, err := os.OpenRoot(dst)
		if err != nil {
			t.Fatal(err)
		}
		defer root.Close()
		u := unpacker{root: root, maxBytes: 1 << 16, notes: io.Discard}
		if asTree {
			err = u.tree(bytes.NewReader(data), "x")
		} else {
			err = u.file(bytes.NewReader(data), "x")
		}
		_ = err // success is not the point
		var beside []string
		for _, line := range tree(t, outer) {
			if !strings.HasPrefix(line, "dst/") {
				beside = append(beside, line)
			}
		}
		if diff := cmp.Diff([]string{"outside/", "outside/kept -rw-r--r-- mine"}, beside); diff != "" {
			t.Errorf("beside the destination (-want +got):\n%s", diff)
		}
	})
}

func TestPrintable(t *testing.T) {
	tests := map[string]string{
		"plain":                 "plain",
		"grüße, 世界":             "grüße, 世界",
		"a\x1b[31mb":            `a\x1b[31mb`,
		"two\nlines\ttab":       `two\nlines\ttab`,
		"\xff":                  `\xff`,
		"right\u202eto left":    `right\u202eto left`,
		"":                      "",
		"a real \ufffd is kept": "a real \ufffd is kept",
	}
	for in, want := range tests {
		if got := cmdline.Printable(in); got != want {
			t.Errorf("cmdline.Printable(%q) = %q, want %q", in, got, want)
		}
	}
}
