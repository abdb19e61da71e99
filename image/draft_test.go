package image

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/sandboxd/sandboxd/image/reference"
	"github.com/sandboxd/sandboxd/image/store"
)

func draft(t *testing.T, s *Service, names ...string) *Draft {
	t.Helper()
	d, err := s.Draft("", names)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func closeDraft(t *testing.T, d *Draft) {
	t.Helper()
	if err := d.Close(context.WithoutCancel(t.Context())); err != nil {
		t.Fatal(err)
	}
}

func writes(data []byte) func(io.Writer) error {
	return func(w io.Writer) error {
		_, err := w.Write(data)
		return err
	}
}

func addLayer(t *testing.T, d *Draft, below []Layer, files ...string) Layer {
	t.Helper()
	l, err := d.AddLayer(t.Context(), below, writes(layerTar(t, files...)))
	if err != nil {
		t.Fatal(err)
	}
	return *l
}

// config is one for an image of these layers.
func config(layers ...Layer) *v1.ConfigFile {
	c := &v1.ConfigFile{OS: "linux", Architecture: hostArch(), RootFS: v1.RootFS{Type: "layers"}}
	for _, l := range layers {
		h, err := v1.NewHash(l.DiffID)
		if err != nil {
			panic(err)
		}
		c.RootFS.DiffIDs = append(c.RootFS.DiffIDs, h)
	}
	return c
}

func hostArch() string { p, _ := reference.ParsePlatform(""); return p.Architecture }

func TestDraftBecomesAnImage(t *testing.T) {
	s, a, dir := service(t)
	s.SetHolders(func() map[string][]string { return map[string][]string{} })
	d := draft(t, s, "app:1", "app:2")
	one := addLayer(t, d, nil, "a", "1")
	two := addLayer(t, d, []Layer{one}, "b", "2")
	img, err := d.Commit(t.Context(), config(one, two), []Layer{one, two})
	if err != nil {
		t.Fatal(err)
	}
	closeDraft(t, d)
	if len(img.Rootfs.Layers) != 2 || img.Reference != "docker.io/library/app:1" || img.Rootfs.Layers[1] != chainID(one.ChainID, two.DiffID) {
		t.Errorf("%+v", img)
	}
	// Equal steps make equal blobs; without a name the image is pruned.
	d = draft(t, s)
	if same := addLayer(t, d, nil, "a", "1"); same != one {
		t.Errorf("%+v, was %+v", same, one)
	}
	img, err = d.Commit(t.Context(), config(one), []Layer{one})
	if err != nil {
		t.Fatal(err)
	}
	closeDraft(t, d)
	if !strings.HasPrefix(img.Reference, "localhost/build@sha256:") {
		t.Errorf("it is called %s", img.Reference)
	}
	out, err := s.Prune(t.Context(), false)
	if err != nil || len(out.Removed) != 1 || out.Removed[0] != img.Reference {
		t.Errorf("prune removed %+v, %v", out, err)
	}
	if _, err := s.Remove(t.Context(), "app:1", false); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Remove(t.Context(), "app:2", false); err != nil {
		t.Fatal(err)
	}
	if left := leftovers(t, dir, a); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// Layers that were not cached go with their draft, after an error of the writer, of the layer, or
// without a commit.
func TestDraftLeavesNothing(t *testing.T) {
	s, a, dir := service(t)
	d := draft(t, s)
	one := addLayer(t, d, nil, "a", "1")
	broken := errors.New("the sandbox is gone")
	if _, err := d.AddLayer(t.Context(), []Layer{one}, func(w io.Writer) error {
		_, _ = w.Write(bytes.Repeat([]byte("x"), 1<<20))
		return broken
	}); !errors.Is(err, broken) {
		t.Errorf("%v", err)
	}
	if _, err := d.AddLayer(t.Context(), []Layer{one}, writes(layerTar(t, "../up", "x"))); !errors.Is(err, ErrInvalid) {
		t.Errorf("%v", err)
	}
	d.staging.Left = 1000
	if _, err := d.AddLayer(t.Context(), []Layer{one}, writes(layerTar(t, "b", strings.Repeat("x", 2000)))); !errors.Is(err, ErrInvalid) {
		t.Errorf("%v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := d.AddLayer(ctx, []Layer{one}, writes(layerTar(t, "c", "x"))); err == nil {
		t.Error("a cancelled draft goes on")
	}
	closeDraft(t, d)
	if left := leftovers(t, dir, a); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	if _, err := s.Draft("linux/s390x", nil); !errors.Is(err, ErrReference) && hostArch() != "s390x" {
		t.Errorf("%v", err)
	}
}

// Steps stay over a restart, are found with their layers, and go by prune or by the limit, the
// oldest first; but for those that a draft has.
func TestStepsAreKeptUntilTheyAreTooMuch(t *testing.T) {
	s, a, dir := service(t)
	s.SetHolders(func() map[string][]string { return map[string][]string{} })
	d := draft(t, s)
	one := addLayer(t, d, nil, "a", strings.Repeat("1", 1000))
	two := addLayer(t, d, []Layer{one}, "b", strings.Repeat("2", 1000))
	for i, l := range []*Layer{&one, &two, nil} {
		if err := d.Remember(fmt.Sprint(i), "", l); err != nil {
			t.Fatal(err)
		}
	}
	closeDraft(t, d)
	if len(a.layers(t)) != 2 {
		t.Fatalf("layers %v", a.layers(t))
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = reopen(t, dir, a)
	s.SetHolders(func() map[string][]string { return map[string][]string{} })
	d = draft(t, s, "app:1")
	if l, known, err := d.Step(t.Context(), "1"); err != nil || !known || *l != two {
		t.Errorf("%+v %v %v", l, known, err)
	}
	if l, known, err := d.Step(t.Context(), "2"); err != nil || !known || l != nil {
		t.Errorf("%+v %v %v", l, known, err)
	}
	if _, known, err := d.Step(t.Context(), "3"); err != nil || known {
		t.Errorf("%v %v", known, err)
	}
	// The oldest goes for the limit: an older use, and room for one of the two.
	if err := s.store.PutStep(&store.Step{Key: "0", Layer: &one, UsedAt: time.Now().Add(-time.Hour)}, nil); err != nil {
		t.Fatal(err)
	}
	s.opts.Limit = 1200
	if err := s.Enforce(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := s.store.Step("", "0"); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("the oldest step is there: %v", err)
	}
	if _, err := s.store.Step("", "1"); err != nil {
		t.Errorf("the newest step is gone: %v", err)
	}
	if got := a.layers(t); len(got) != 1 || got[0] != two.ChainID {
		t.Errorf("layers %v, want %s", got, two.ChainID)
	}
	// Pruned under a draft, the layer stays until that has ended.
	if out, err := s.Prune(t.Context(), false); err != nil || out.Steps != 2 {
		t.Errorf("%+v %v", out, err)
	}
	if got := a.layers(t); len(got) != 1 {
		t.Errorf("a draft lost its layer: %v", got)
	}
	img, err := d.Commit(t.Context(), config(two), []Layer{{Blob: two.Blob, DiffID: two.DiffID, ChainID: two.DiffID}})
	if err != nil || len(img.Rootfs.Layers) != 1 {
		t.Errorf("%+v %v", img, err)
	}
	closeDraft(t, d)
	if _, err := s.Remove(t.Context(), "app:1", false); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Prune(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	if left := leftovers(t, dir, a); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// TestStepsGoFromTheTop has an old build in three steps and a new one that shares the lowest with
// it.
func TestStepsGoFromTheTop(t *testing.T) {
	step := func(key, parent, chain string, used int64) *store.Step {
		s := &store.Step{Key: key, Parent: parent, UsedAt: time.Unix(used, 0)}
		if chain != "" {
			s.Layer = &store.Layer{Blob: store.Blob{Digest: chain, Size: 10}, ChainID: chain}
		}
		return s
	}
	// As left by a build: the lower, the earlier. "b" is a copy that has two keys.
	steps := []*store.Step{step("a", "", "A", 1), step("b", "A", "B", 2), step("b2", "A", "B", 2), step("w", "B", "", 2), step("c", "B", "C", 3), step("x", "", "X", 0)}
	for _, c := range []struct {
		room  int64
		want  string
		total int64
	}{
		{100, "", 40}, {39, "x", 30}, {29, "c x", 20}, {19, "b b2 c w x", 10}, {9, "a b b2 c w x", 0},
	} {
		forget, total := excessSteps(steps, shareOf(nil, nil), c.room, 0)
		slices.Sort(forget)
		if got := strings.Join(forget, " "); got != c.want {
			t.Errorf("with room for %d go %q, want %q", c.room, got, c.want)
		}
		if total != c.total {
			t.Errorf("with room for %d there are %d, want %d", c.room, total, c.total)
		}
	}
}

func TestLayersOfADraftAreCountedTogether(t *testing.T) {
	s, _, _ := service(t)
	d := draft(t, s)
	defer closeDraft(t, d)
	d.staging.Left = 5 << 10
	l := addLayer(t, d, nil, "a", strings.Repeat("1", 1000))
	if _, err := d.AddLayer(t.Context(), []Layer{l}, writes(layerTar(t, "b", strings.Repeat("2", 3000)))); !errors.Is(err, ErrInvalid) {
		t.Errorf("a second layer, of more than there is left: %v", err)
	}
}

func TestDraftThatFailsKeepsToTheLimit(t *testing.T) {
	s, a, _ := service(t)
	s.SetHolders(func() map[string][]string { return map[string][]string{} })
	s.opts.Limit = 500
	d := draft(t, s)
	l := addLayer(t, d, nil, "a", strings.Repeat("1", 1000))
	if err := d.Remember("key", "", &l); err != nil {
		t.Fatal(err)
	}
	closeDraft(t, d)
	if got := a.layers(t); len(got) != 0 {
		t.Errorf("layers %v are kept", got)
	}
}

// TestVerifyLooksAtWhatBuildsHaveKept has a damaged layer of no image.
func TestVerifyLooksAtWhatBuildsHaveKept(t *testing.T) {
	s, _, dir := service(t)
	d := draft(t, s)
	l := addLayer(t, d, nil, "a", strings.Repeat("1", 1000))
	if err := d.Remember("key", "", &l); err != nil {
		t.Fatal(err)
	}
	closeDraft(t, d)
	if out, err := s.Verify(t.Context()); err != nil || out.Blobs != 1 || len(out.Problems) > 0 {
		t.Errorf("%+v %v", out, err)
	}
	err := filepath.WalkDir(dir, func(name string, e fs.DirEntry, err error) error {
		if err == nil && strings.Contains(l.Blob.Digest, e.Name()) && e.Type().IsRegular() {
			err = errors.Join(os.Chmod(name, 0o600), os.WriteFile(name, bytes.Repeat([]byte("x"), int(l.Blob.Size)), 0o600))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if out, err := s.Verify(t.Context()); err != nil || len(out.Problems) != 1 || out.Problems[0].Digest != l.Blob.Digest || out.Problems[0].Images == nil {
		t.Errorf("%+v %v", out, err)
	}
}
