package image

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	goruntime "runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/image/store"
)

// layoutOf returns an archive with one image for each content. The images have the annotations of
// names, an addition to their configuration, and one to the descriptor of their layer.
func layoutOf(t *testing.T, config, ofLayer string, annotation string, names []string, contents ...string) []byte {
	t.Helper()
	var files, manifests []string
	seen := make(map[string]bool)
	for i, c := range contents {
		content := layerTar(t, "content", c)
		config := fmt.Sprintf(`{"os":"linux","architecture":%q,"rootfs":{"type":"layers","diff_ids":[%q]}%s}`, goruntime.GOARCH, sha(content), config)
		manifest := fmt.Sprintf(`{"schemaVersion":2,"mediaType":%q,"config":{"mediaType":%q,"digest":%q,"size":%d},"layers":[{"mediaType":%q,"digest":%q,"size":%d%s}]}`,
			types.OCIManifestSchema1, types.OCIConfigJSON, sha([]byte(config)), len(config), types.OCIUncompressedLayer, sha(content), len(content), ofLayer)
		for _, blob := range []string{string(content), config, manifest} {
			if file := "blobs/sha256/" + strings.TrimPrefix(sha([]byte(blob)), "sha256:"); !seen[file] {
				seen[file] = true
				files = append(files, file, blob)
			}
		}
		manifests = append(manifests, fmt.Sprintf(`{"mediaType":%q,"digest":%q,"size":%d,"platform":{"os":"linux","architecture":%q},"annotations":{%q:%q}}`,
			types.OCIManifestSchema1, sha([]byte(manifest)), len(manifest), goruntime.GOARCH, annotation, names[i]))
	}
	return layerTar(t, append(files, "oci-layout", `{"imageLayoutVersion":"1.0.0"}`, "index.json", `{"schemaVersion":2,"manifests":[`+strings.Join(manifests, ",")+`]}`)...)
}

// adding is a layer of a commit.
func adding(content []byte) func(context.Context, io.Writer) (layer.Result, error) {
	return func(_ context.Context, w io.Writer) (layer.Result, error) {
		_, err := w.Write(content)
		return layer.Result{Entries: 1, DiffID: sha(content)}, err
	}
}

// Unknown fields of the base are kept, except those meant for builds.
func TestCommitKeepsWhatItDoesNotChange(t *testing.T) {
	s, _, _ := service(t)
	data := layoutOf(t, `,"vendor":{"x":1},"config":{"cmd":["old"],"Env":["A=1","B=2"],"OnBuild":["RUN x"],"Healthcheck":{"Test":["CMD","y"],"StartInterval":5},"Extra":true}`,
		`,"annotations":{"a":"b"},"urls":["https://layers.example/1"]`, "io.containerd.image.name", []string{"team/base:1"}, "base")
	base, err := s.Import(t.Context(), bytes.NewReader(data), ImportOptions{})
	if err != nil {
		t.Fatal(err)
	}
	added := layerTar(t, "added", "x")
	img, _, err := s.Commit(t.Context(), CommitOptions{
		Base: base[0].Digest, Reference: "team/made:1", Created: time.Unix(1, 0), Comment: "why",
		Config: api.ImageConfig{Entrypoint: []string{"new"}, Env: []string{"A=3"}, Labels: map[string]string{"l": "m"}}, Layer: adding(added),
	})
	if err != nil {
		t.Fatal(err)
	}
	record, err := s.store.Get("", img.Reference)
	if err != nil {
		t.Fatal(err)
	}
	read := func(digest string) (out map[string]any) {
		t.Helper()
		data, err := s.store.ReadBlob(digest, store.MaxDocument)
		if err == nil {
			err = json.Unmarshal(data, &out)
		}
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	want := map[string]any{
		"os": "linux", "architecture": goruntime.GOARCH, "vendor": map[string]any{"x": 1.0}, "created": "1970-01-01T00:00:01Z",
		"rootfs": map[string]any{"type": "layers", "diff_ids": []any{sha(layerTar(t, "content", "base")), sha(added)}},
		// The base has no history for its layer. An empty entry stands for it, because it is the first of
		// two.
		"history": []any{map[string]any{}, map[string]any{"created": "1970-01-01T00:00:01Z", "created_by": "sandboxd commit", "comment": "why"}},
		"config": map[string]any{
			"Entrypoint": []any{"new"}, "Env": []any{"B=2", "A=3"}, "Labels": map[string]any{"l": "m"}, "Extra": true,
			"Healthcheck": map[string]any{"Test": []any{"CMD", "y"}, "StartInterval": 5.0},
		},
	}
	if diff := cmp.Diff(want, read(record.Config.Digest)); diff != "" {
		t.Errorf("configuration (-want +got):\n%s", diff)
	}
	layers, ok := read(record.Manifest.Digest)["layers"].([]any)
	if !ok || len(layers) != 2 {
		t.Fatalf("layers: %v", layers)
	}
	first, ok := layers[0].(map[string]any)
	if !ok || cmp.Diff(map[string]any{"a": "b"}, first["annotations"]) != "" || cmp.Diff([]any{"https://layers.example/1"}, first["urls"]) != "" {
		t.Errorf("descriptor of the base's layer: %v", first)
	}
}

// Two images that differ in a bare tag are two images, and not the platforms of one.
func TestImportOfBareTags(t *testing.T) {
	s, _, _ := service(t)
	two := layoutOf(t, "", "", "org.opencontainers.image.ref.name", []string{"v1", "v2"}, "one", "two")
	if _, err := s.Import(t.Context(), bytes.NewReader(two), ImportOptions{Reference: "team/app:1"}); !errors.Is(err, ErrReference) || !strings.Contains(err.Error(), "2 images") {
		t.Errorf("two tags: %v", err)
	}
	same := layoutOf(t, "", "", "org.opencontainers.image.ref.name", []string{"v1", "v1"}, "one", "two")
	if _, err := s.Import(t.Context(), bytes.NewReader(same), ImportOptions{Reference: "team/app:1"}); !errors.Is(err, ErrReference) || !strings.Contains(err.Error(), "2 images") {
		t.Errorf("one tag: %v", err)
	}
	whole := layoutOf(t, "", "", "io.containerd.image.name", []string{"team/app:1", "team/app:1"}, "one", "two")
	if _, err := s.Import(t.Context(), bytes.NewReader(whole), ImportOptions{}); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "calls two images") {
		t.Errorf("one name: %v", err)
	}
}
