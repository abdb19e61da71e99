package image

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/compression"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/image/store"
	"github.com/sandboxd/sandboxd/internal/rootfs"
)

// The limits hold for all layers of an image together, from any origin and whether or not they
// exist already. A refused image leaves nothing.
func TestLimitsAreOfTheWholeImage(t *testing.T) {
	const size = 60 << 10 // of each layer, which no limit here refuses alone
	f := newFaulty(t)
	content := make([]string, 3)
	var layers []v1.Layer
	var wide []v1.Layer
	for i := range content {
		content[i] = strings.Repeat(fmt.Sprint(i), size)
		layers = append(layers, asLayer(t, layerTar(t, fmt.Sprint("n", i), content[i]), compression.GZip))
		// A directory of its own for each file, which no entry describes.
		wide = append(wide, asLayer(t, layerTar(t, fmt.Sprint(i, "/a/b/c"), "1", fmt.Sprint(i, "/d/e/f"), "1"), compression.GZip))
	}
	ref := func(name string, layers ...v1.Layer) string {
		push(t, f.host+"/"+name, testImage(t, hostArch(), layers...))
		return f.host + "/" + name
	}
	one, two, three := ref("one:1", layers[:1]...), ref("two:1", layers[:2]...), ref("three:1", layers...)
	flat, wider := ref("flat:1", wide[:1]...), ref("wider:1", wide...)

	exceeds := func(t *testing.T, limit layer.Exceeded, err error) {
		t.Helper()
		if got, ok := errors.AsType[layer.Exceeded](err); !ok || got != limit || !errors.Is(err, ErrInvalid) {
			t.Errorf("want that the limit of %s is exceeded: %v", string(limit), err)
		}
	}
	s, a, dir := service(t)
	s.SetHolders(func() map[string][]string { return map[string][]string{} })
	s.opts.Limits.Bytes, s.opts.Limits.Entries = 2*size+4<<10, 7
	pull := func(ref string) error {
		_, err := s.Pull(t.Context(), ref, PullOptions{})
		return err
	}
	// First all its layers are fetched; then all but one exist. Seven entries are those of the other
	// image's first layer.
	for range 2 {
		before := leftovers(t, dir, a)
		exceeds(t, layer.ExceededBytes, pull(three))
		exceeds(t, layer.ExceededEntries, pull(wider))
		if diff := cmp.Diff(before, leftovers(t, dir, a)); diff != "" {
			t.Errorf("what was refused left (-before +after):\n%s", diff)
		}
		for _, ref := range []string{one, two, flat} {
			if err := pull(ref); err != nil {
				t.Fatal(err)
			}
		}
	}

	// Everything below comes on top of two layers, which have nearly all.
	img, err := s.Get(t.Context(), two)
	if err != nil {
		t.Fatal(err)
	}
	before := leftovers(t, dir, a)
	third := layerTar(t, "n", content[2])
	add := adding(third)
	_, _, err = s.Commit(t.Context(), CommitOptions{Base: img.Digest, Reference: "made:1", Layer: add})
	exceeds(t, layer.ExceededBytes, err)
	func() {
		d := draft(t, s, "built:1")
		defer closeDraft(t, d)
		base, err := d.Base(t.Context(), two, nil)
		if err != nil {
			t.Fatal(err)
		}
		_, err = d.AddLayer(t.Context(), base.Layers, writes(third))
		exceeds(t, layer.ExceededBytes, err)
	}()
	file := layerTar(t, "snapshot.json", fmt.Sprintf(`{"version":1,"snapshot":{"image":%q,"image_digest":%q,"rootfs":{"snapshots":[%q]}}}`, two, img.Digest, sha(third)),
		"layer-1.tar", string(third))
	importSnapshot := func() error {
		_, err := s.ImportSnapshot(t.Context(), bytes.NewReader(file), "", func(*Snapshot) error { return nil },
			func(context.Context, rootfs.Source, bool, io.Writer) (layer.Result, error) {
				return layer.Result{DiffID: sha(third)}, nil
			})
		return err
	}
	exceeds(t, layer.ExceededBytes, importSnapshot())
	var saved bytes.Buffer
	everything := reopenWith(t, t.TempDir(), newApplier(t), Options{})
	if _, err := everything.Pull(t.Context(), three, PullOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := everything.Export(t.Context(), three, "oci", &saved); err != nil {
		t.Fatal(err)
	}
	imported := func() error {
		_, err := s.Import(t.Context(), bytes.NewReader(saved.Bytes()), ImportOptions{Reference: "saved:1"})
		return err
	}
	exceeds(t, layer.ExceededBytes, imported())
	_, err = s.Import(t.Context(), bytes.NewReader(layerTar(t, "n", strings.Repeat("1", 3*size))), ImportOptions{Reference: "tree:1", Rootfs: true, Config: api.ImageConfig{}})
	exceeds(t, layer.ExceededBytes, err)
	if diff := cmp.Diff(before, leftovers(t, dir, a)); diff != "" {
		t.Errorf("what was refused left (-before +after):\n%s", diff)
	}

	// Within larger limits everything is accepted, and refused again under the old ones: a new name
	// would make it an image.
	s.opts.Limits.Bytes, s.opts.Limits.Entries = math.MaxInt64, 100
	for name, err := range map[string]error{"pull": pull(three), "more entries": pull(wider), "snapshot": importSnapshot(), "archive": imported()} {
		if err != nil {
			t.Errorf("%s within the limits: %v", name, err)
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = reopenWith(t, dir, a, Options{Limits: layer.Limits{Bytes: 2 * size, Entries: 7}})
	exceeds(t, layer.ExceededBytes, pull(three))
	exceeds(t, layer.ExceededEntries, pull(wider))
	if out, err := s.Verify(t.Context()); err != nil || len(out.Problems) > 0 {
		t.Errorf("what was stored before is judged by new limits: %+v, %v", out.Problems, err)
	}
}

// overtaken lets another request come first, once.
type overtaken struct {
	*directApplier
	by func()
}

func (o *overtaken) Apply(ctx context.Context, req layer.ApplyRequest) ([]layer.Result, error) {
	if by := o.by; by != nil {
		o.by = nil
		by()
	}
	return o.directApplier.Apply(ctx, req)
}

// The usage of a layer counts even if another pull makes it after this one has checked for it.
func TestLayerThatAnotherHasJustMadeCounts(t *testing.T) {
	const size = 60 << 10
	a := &overtaken{directApplier: newApplier(t)}
	s := reopen(t, t.TempDir(), a)
	var layers []store.Layer
	parent := ""
	for i := range 2 {
		content := layerTar(t, fmt.Sprint("n", i), strings.Repeat("x", size))
		b := store.Blob{MediaType: string(types.OCIUncompressedLayer), Digest: sha(content), Size: int64(len(content))}
		if err := s.store.WriteBlob(t.Context(), b, bytes.NewReader(content)); err != nil {
			t.Fatal(err)
		}
		parent = chainID(parent, sha(content))
		layers = append(layers, store.Layer{Blob: b, DiffID: sha(content), ChainID: parent})
	}
	extract := func(layers []store.Layer) (*store.Layer, error) {
		return s.extract(t.Context(), layers, nil, func(store.Layer) bool { return true })
	}
	s.opts.Limits.Bytes = 2*size - 1
	a.by = func() {
		if _, err := extract(layers[:1]); err != nil {
			t.Error(err)
		}
	}
	failed, err := extract(layers)
	if got, ok := errors.AsType[layer.Exceeded](err); !ok || got != layer.ExceededBytes || failed == nil || failed.ChainID != layers[1].ChainID {
		t.Errorf("%+v, %v", failed, err)
	}
	// A request that found the layer there knows its usage for the layers above, before the request
	// that made it has returned.
	s.mu.Lock()
	clear(s.sizes)
	s.mu.Unlock()
	if _, err := extract(layers[:1]); err != nil {
		t.Fatal(err)
	}
	if all, err := s.usage([]string{layers[0].ChainID}); err != nil || all.Bytes != size {
		t.Errorf("%+v, %v", all, err)
	}
}
