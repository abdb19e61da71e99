package image

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/sandboxd/sandboxd/image/layer"
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
		// It may be an image or not; it must not panic, and a refusal must be classed as the archive's
		// fault.
		_, err := s.Import(t.Context(), bytes.NewReader(data), ImportOptions{Reference: "fuzz/image:1"})
		if err != nil && !errors.Is(err, ErrInvalid) && !errors.Is(err, ErrReference) {
			t.Errorf("error of no class: %v", err)
		}
	})
}

// rawEntry is an entry of a tar as archive/tar does not write it.
func rawEntry(name string, kind byte, content string) []byte {
	b := make([]byte, 512, 1024+len(content))
	copy(b, name)
	copy(b[100:], "0000644\x00")
	copy(b[108:], "0000000\x00")
	copy(b[116:], "0000000\x00")
	copy(b[124:], fmt.Sprintf("%011o\x00", len(content)))
	copy(b[136:], "00000000000\x00")
	copy(b[148:], "        ")
	b[156] = kind
	copy(b[257:], "ustar\x0000")
	sum := 0
	for _, c := range b {
		sum += int(c)
	}
	copy(b[148:], fmt.Sprintf("%06o\x00 ", sum))
	b = append(b, content...)
	return append(b, make([]byte, -len(content)&511)...)
}

// paxRecord is "LENGTH KEY=VALUE\n", where the length counts itself.
func paxRecord(key, value string) string {
	rest := " " + key + "=" + value + "\n"
	n := len(rest) + 2
	return fmt.Sprint(n) + rest
}

func TestImportRefusesWhatTakesMoreThanItHas(t *testing.T) {
	sparseFile := append(rawEntry("PaxHeaders/x", tar.TypeXHeader,
		paxRecord("GNU.sparse.major", "1")+paxRecord("GNU.sparse.minor", "0")+paxRecord("GNU.sparse.name", "hole")+
			paxRecord("GNU.sparse.realsize", "1073741824")), rawEntry("hole", tar.TypeReg, "0\n"+strings.Repeat("\x00", 510))...)
	var links bytes.Buffer
	w := tar.NewWriter(&links)
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: "link", Linkname: strings.Repeat("a", 1024+1)}); err != nil {
		t.Fatal(err)
	}
	// It claims more than may be written, and has none of it.
	var huge bytes.Buffer
	if err := tar.NewWriter(&huge).WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "huge", Size: layer.DefaultLimits().Bytes + 1}); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		data []byte
		want string
	}{
		"sparse": {sparseFile, "sparse"}, "link": {links.Bytes(), "leads to a name of 1025 bytes"}, "huge": {huge.Bytes(), "its files have more than"},
	} {
		s, a, dir := service(t)
		_, err := s.Import(t.Context(), bytes.NewReader(tt.data), ImportOptions{Reference: "team/app:1"})
		if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want an error with %q", name, err, tt.want)
		}
		if left := leftovers(t, dir, a); len(left) != 0 {
			t.Errorf("%s: left over: %v", name, left)
		}
	}
}

func TestImportOfNoRootFileSystem(t *testing.T) {
	for name, tt := range map[string]struct{ data, want string }{
		"nothing": {"", "nothing in it"}, "zeros": {strings.Repeat("\x00", 10240), "nothing in it"}, "text": {strings.Repeat("text", 500), "not a tar"},
	} {
		s, a, dir := service(t)
		_, err := s.Import(t.Context(), strings.NewReader(tt.data), ImportOptions{Reference: "team/app:1", Rootfs: true})
		if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want an error with %q", name, err, tt.want)
		}
		if left := leftovers(t, dir, a); len(left) != 0 {
			t.Errorf("%s: left over: %v", name, left)
		}
	}
}

// saved returns docker save's output for an image with these names.
func saved(names ...string) []byte {
	layer := string(rawEntry("x", tar.TypeReg, "x")) + strings.Repeat("\x00", 1024)
	sum := sha256.Sum256([]byte(layer))
	config := fmt.Sprintf(`{"os":"linux","architecture":%q,"rootfs":{"type":"layers","diff_ids":["sha256:%x"]}}`, goruntime.GOARCH, sum)
	list := fmt.Sprintf(`[{"Config":"config.json","RepoTags":["%s"],"Layers":["layer.tar"]}]`, strings.Join(names, `","`))
	return slices.Concat(rawEntry("layer.tar", tar.TypeReg, layer), rawEntry("config.json", tar.TypeReg, config),
		rawEntry("manifest.json", tar.TypeReg, list), make([]byte, 1024))
}

func TestImportOfManyNames(t *testing.T) {
	s, a, dir := service(t)
	var want []string
	for i := range maxArchiveNames + 1 {
		want = append(want, fmt.Sprintf("registry.example/team/app:%04d", i))
	}
	if _, err := s.Import(t.Context(), bytes.NewReader(saved(want...)), ImportOptions{}); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "names") {
		t.Errorf("error %v, want one about too many names", err)
	}
	if left := leftovers(t, dir, a); len(left) != 0 {
		t.Errorf("left over: %v", left)
	}
	want = want[:maxArchiveNames]
	images, err := s.Import(t.Context(), bytes.NewReader(saved(want...)), ImportOptions{})
	if err != nil || len(images) != len(want) {
		t.Fatalf("%d images (%v)", len(images), err)
	}
	if got := names(t, s); !slices.Equal(got, want) {
		t.Errorf("%d names, from %s", len(got), got[0])
	}
	if len(s.pins) != 0 {
		t.Errorf("pins are left: %v", s.pins)
	}
}

// The platforms of one image, written straight into the layout: the one that is wanted is imported,
// under the one name.
func TestImportOfPlatformsWithoutAnIndex(t *testing.T) {
	for _, named := range []string{"registry.example/team/app:1", ""} {
		var files []string
		var manifests []string
		for _, arch := range []string{"arm64", "amd64"} {
			content := layerTar(t, "arch", arch)
			config := fmt.Sprintf(`{"os":"linux","architecture":%q,"rootfs":{"type":"layers","diff_ids":[%q]}}`, arch, sha(content))
			manifest := fmt.Sprintf(`{"schemaVersion":2,"mediaType":%q,"config":{"mediaType":%q,"digest":%q,"size":%d},"layers":[{"mediaType":%q,"digest":%q,"size":%d}]}`,
				types.OCIManifestSchema1, types.OCIConfigJSON, sha([]byte(config)), len(config), types.OCIUncompressedLayer, sha(content), len(content))
			for _, blob := range []string{string(content), config, manifest} {
				files = append(files, "blobs/sha256/"+strings.TrimPrefix(sha([]byte(blob)), "sha256:"), blob)
			}
			annotations := ""
			if named != "" {
				annotations = fmt.Sprintf(`,"annotations":{%q:%q}`, "io.containerd.image.name", named)
			}
			manifests = append(manifests, fmt.Sprintf(`{"mediaType":%q,"digest":%q,"size":%d,"platform":{"os":"linux","architecture":%q}%s}`,
				types.OCIManifestSchema1, sha([]byte(manifest)), len(manifest), arch, annotations))
		}
		files = append(files, "oci-layout", `{"imageLayoutVersion":"1.0.0"}`, "index.json", `{"schemaVersion":2,"manifests":[`+strings.Join(manifests, ",")+`]}`)
		for _, arch := range []string{"arm64", "amd64"} {
			s, a, dir := service(t)
			opts := ImportOptions{Platform: "linux/" + arch}
			if named == "" {
				opts.Reference = "registry.example/team/app:1"
			}
			images, err := s.Import(t.Context(), bytes.NewReader(layerTar(t, files...)), opts)
			if err != nil || len(images) != 1 || images[0].Platform != "linux/"+arch || images[0].Reference != "registry.example/team/app:1" {
				t.Fatalf("%q, %s: %+v, %v", named, arch, images, err)
			}
			// Manifest, configuration, layer and its tree; nothing of the other platform, and not the index.
			if left := leftovers(t, dir, a); len(left) != 4 {
				t.Errorf("%q, %s: stored %v", named, arch, left)
			}
			if _, err := s.Import(t.Context(), bytes.NewReader(layerTar(t, files...)), ImportOptions{Platform: "linux/s390x", Reference: "a/b:1"}); !errors.Is(err, ErrInvalid) ||
				!strings.Contains(err.Error(), "nothing for linux/s390x") {
				t.Errorf("%q: %v", named, err)
			}
		}
	}
}

// A root file system is kept compressed: its files take their space where they are extracted, and
// the archive must not take it once more. How well it compresses is no reason to refuse it.
func TestImportedRootfsIsCompressed(t *testing.T) {
	s, a, _ := service(t)
	content := strings.Repeat("a line of a file\n", 1<<18)
	images, err := s.Import(t.Context(), bytes.NewReader(layerTar(t, "content", content)), ImportOptions{Reference: "team/app:1", Rootfs: true})
	if err != nil {
		t.Fatal(err)
	}
	if got := images[0].Size; got > int64(len(content)/20) {
		t.Errorf("it takes %d bytes of %d", got, len(content))
	}
	data, err := os.ReadFile(filepath.Join(a.path(images[0].Rootfs.Layers[0]), "content"))
	if err != nil || string(data) != content {
		t.Errorf("%d bytes, %v", len(data), err)
	}
}
