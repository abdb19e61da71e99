package image

import (
	"archive/tar"
	"bytes"
	"errors"
	"strings"
	"testing"
)

// tarOf is an archive of files, each a name and its content.
func tarOf(f *testing.F, files ...string) []byte {
	f.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for i := 0; i < len(files); i += 2 {
		err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: files[i], Size: int64(len(files[i+1])), Mode: 0o644})
		if err == nil {
			_, err = w.Write([]byte(files[i+1]))
		}
		if err != nil {
			f.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		f.Fatal(err)
	}
	return buf.Bytes()
}

func FuzzImport(f *testing.F) {
	f.Add([]byte("not an archive"))
	layout := tarOf(f, "oci-layout", `{"imageLayoutVersion":"1.0.0"}`, "index.json", `{"schemaVersion":2,"manifests":[]}`)
	f.Add(layout)
	f.Add(tarOf(f, "layer.tar", "x", "config.json", `{"os":"linux","rootfs":{"type":"layers","diff_ids":["sha256:`+strings.Repeat("0", 64)+`"]}}`,
		"manifest.json", `[{"Config":"config.json","RepoTags":["a/b:1"],"Layers":["layer.tar"]}]`))
	f.Add(layout[:700]) // cut short
	s, err := Open(f.TempDir(), nullApplier{}, Options{})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { _ = s.Close() })
	f.Fuzz(func(t *testing.T, data []byte) {
		// It may be an image or not; it must not panic, and what is refused must be so as the archive's fault.
		_, err := s.Import(t.Context(), bytes.NewReader(data), ImportOptions{Reference: "fuzz/image:1"})
		if err != nil && !errors.Is(err, ErrInvalid) && !errors.Is(err, ErrReference) {
			t.Errorf("error of no class: %v", err)
		}
	})
}
