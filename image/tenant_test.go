package image

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/compression"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/image/snapshot"
	"github.com/sandboxd/sandboxd/internal/rootfs"
)

// rootfsImage imports a root file system of one file under a name.
func rootfsImage(t *testing.T, s *Service, name, content string) *Image {
	t.Helper()
	images, err := s.Import(t.Context(), bytes.NewReader(layerTar(t, "content", content)), ImportOptions{Reference: name, Rootfs: true})
	if err != nil {
		t.Fatal(err)
	}
	return images[0]
}

func noHolders() map[string][]string { return map[string][]string{} }

func TestTenantsHaveNamesOfTheirOwn(t *testing.T) {
	s, applier, dir := service(t)
	held := noHolders()
	s.SetHolders(func() map[string][]string { return held })
	own, a, b := s, s.For("a"), s.For("b")
	for _, tenant := range []*Service{own, a, b} {
		rootfsImage(t, tenant, "team/app:1", "content of "+tenant.tenant)
	}
	digest := make(map[string]*Service)
	for _, tenant := range []*Service{own, a, b} {
		img, err := tenant.Get(t.Context(), "team/app:1")
		if err != nil {
			t.Fatal(err)
		}
		digest[img.Digest] = tenant
		if got := names(t, tenant); !slices.Equal(got, []string{"docker.io/team/app:1"}) {
			t.Errorf("tenant %q lists %q", tenant.tenant, got)
		}
	}
	if len(digest) != 3 {
		t.Fatalf("%d images, want one for each tenant", len(digest))
	}
	if got, err := s.Tenants(); err != nil || !slices.Equal(got, []string{"", "a", "b"}) {
		t.Errorf("tenants %q, %v", got, err)
	}
	// A holder of one tenant is no matter of another.
	img, err := b.Get(t.Context(), "team/app:1")
	if err != nil {
		t.Fatal(err)
	}
	held = map[string][]string{img.Digest: {Holder("b", "box")}}
	if detail, err := b.Inspect(t.Context(), "team/app:1"); err != nil || !slices.Equal(detail.UsedBy, []string{"box"}) {
		t.Errorf("used by %q, %v", detail.UsedBy, err)
	}
	if _, err := b.Remove(t.Context(), "team/app:1", false); !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), "sandboxd rm box") {
		t.Errorf("removal of a held image: %v", err)
	}
	before := leftovers(t, dir, applier)
	if out, err := a.Prune(t.Context(), true); err != nil || !slices.Equal(out.Removed, []string{"docker.io/team/app:1"}) {
		t.Errorf("a prunes %+v, %v", out, err)
	}
	if len(names(t, a)) != 0 || len(names(t, b)) != 1 || len(names(t, own)) != 1 || len(leftovers(t, dir, applier)) >= len(before) {
		t.Errorf("left of a %q, of b %q, of the daemon %q", names(t, a), names(t, b), names(t, own))
	}
	// After a restart too.
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	again := reopen(t, dir, applier)
	if got, err := again.For("b").Get(t.Context(), "team/app:1"); err != nil || got.Digest != img.Digest {
		t.Errorf("after a restart: %+v, %v", got, err)
	}
}

func TestTenantsShareContent(t *testing.T) {
	f := newFaulty(t)
	ref := f.host + "/team/app:1"
	push(t, ref, testImage(t, goruntime.GOARCH, asLayer(t, layerTar(t, "x", "x"), compression.GZip)))
	s, applier, dir := service(t)
	s.SetHolders(noHolders)
	a, b := s.For("a"), s.For("b")
	first, err := a.Pull(t.Context(), ref, PullOptions{})
	if err != nil {
		t.Fatal(err)
	}
	stored, applied := leftovers(t, dir, applier), len(applier.applied)
	gets := func() (n int) {
		f.mu.Lock()
		defer f.mu.Unlock()
		for path, count := range f.gets {
			if strings.Contains(path, "/blobs/") {
				n += count
			}
		}
		return n
	}
	before := gets()
	second, err := b.Pull(t.Context(), ref, PullOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(stored, leftovers(t, dir, applier)); diff != "" || len(applier.applied) != applied || second.Digest != first.Digest {
		t.Errorf("%d layers were extracted, files (-before +after):\n%s", len(applier.applied)-applied, diff)
	}
	// The registry has proved to b that it has them, once.
	if got := gets() - before; got != 2 {
		t.Errorf("the registry was asked for %d blobs, want the configuration and the layer", got)
	}
	before = gets()
	if _, err := b.Pull(t.Context(), ref, PullOptions{}); err != nil || gets() != before {
		t.Errorf("second pull: %v, %d blobs", err, gets()-before)
	}
	if out, err := a.Remove(t.Context(), ref, false); err != nil || out.Bytes == 0 {
		t.Errorf("removal by a: %d bytes, %v; want its own, as if b had none", out.Bytes, err)
	}
	if diff := cmp.Diff(stored, leftovers(t, dir, applier)); diff != "" {
		t.Errorf("b has lost files (-before +after):\n%s", diff)
	}
	// With its name a has lost the proof.
	before = gets()
	if _, err := a.Pull(t.Context(), ref, PullOptions{}); err != nil || gets()-before != 2 {
		t.Errorf("pull after the removal: %v, %d blobs", err, gets()-before)
	}
	if _, err := a.Remove(t.Context(), ref, false); err != nil {
		t.Error(err)
	}
	if _, err := b.Remove(t.Context(), ref, false); err != nil || len(leftovers(t, dir, applier)) != 0 {
		t.Errorf("removal by b: %v, left %q", err, leftovers(t, dir, applier))
	}
	if len(s.pins) != 0 || len(s.busy) != 0 || len(s.proven) != 0 {
		t.Errorf("left: pins %v of %v, proofs %v", s.pins, s.busy, s.proven)
	}
}

func TestTenantsCannotReachEachOther(t *testing.T) {
	s, applier, dir := service(t)
	s.SetHolders(noHolders)
	a, b := s.For("a"), s.For("b")
	img := rootfsImage(t, a, "team/app:1", "secret")
	taken, _, err := a.Take(t.Context(), img.Digest, img.Rootfs, func(context.Context, string) (layer.Result, error) {
		return layer.Result{DiffID: "sha256:d", Size: 1}, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	snap := &Snapshot{ID: snapshot.NewID(), Name: "point"}
	if err := errors.Join(taken.Keep(snap), taken.Release(t.Context())); err != nil {
		t.Fatal(err)
	}
	before := leftovers(t, dir, applier)
	read := func(context.Context, rootfs.Source, bool, io.Writer) (layer.Result, error) {
		return layer.Result{}, errors.New("read")
	}
	for _, ref := range []string{"team/app:1", "team/app@" + img.Digest} {
		for what, do := range map[string]func() error{
			"get":     func() error { _, err := b.Get(t.Context(), ref); return err },
			"acquire": func() error { _, _, err := b.Acquire(t.Context(), ref); return err },
			"inspect": func() error { _, err := b.Inspect(t.Context(), ref); return err },
			"export":  func() error { return b.Export(t.Context(), ref, "oci", io.Discard) },
			"tag":     func() error { _, err := b.Tag(t.Context(), ref, "mine:1"); return err },
			"remove":  func() error { _, err := b.Remove(t.Context(), ref, true); return err },
			"push":    func() error { _, err := b.Push(t.Context(), ref, PushOptions{}); return err },
			"commit": func() error {
				_, _, err := b.Commit(t.Context(), CommitOptions{Base: img.Digest, Reference: "mine:1"})
				return err
			},
		} {
			if err := do(); !errors.Is(err, ErrNotFound) {
				t.Errorf("%s %s: %v, want not found", what, ref, err)
			}
		}
	}
	for _, ref := range []string{snap.ID, snap.Name} {
		for what, do := range map[string]func() error{
			"inspect": func() error { _, err := b.InspectSnapshot(ref); return err },
			"acquire": func() error { _, _, err := b.AcquireSnapshot(t.Context(), ref); return err },
			"export":  func() error { return b.ExportSnapshot(t.Context(), ref, read, io.Discard) },
			"remove":  func() error { _, err := b.RemoveSnapshot(t.Context(), ref); return err },
		} {
			if err := do(); !errors.Is(err, snapshot.ErrNotFound) {
				t.Errorf("%s snapshot %s: %v, want not found", what, ref, err)
			}
		}
	}
	if list, err := b.Snapshots(""); err != nil || len(list) != 0 {
		t.Errorf("snapshots of b: %+v, %v", list, err)
	}
	if out, err := b.Prune(t.Context(), true); err != nil || len(out.Removed) != 0 {
		t.Errorf("b prunes %+v, %v", out, err)
	}
	// Another's name is free.
	if _, err := b.store.Snapshot("b", snap.Name); err == nil {
		t.Error("b finds the snapshot in the store")
	}
	if diff := cmp.Diff(before, leftovers(t, dir, applier)); diff != "" {
		t.Errorf("files (-before +after):\n%s", diff)
	}
	if list, err := a.Snapshots(""); err != nil || len(list) != 1 || list[0].ID != snap.ID {
		t.Errorf("snapshots of a: %+v, %v", list, err)
	}
}

// Knowing the digests of another tenant's blobs and layers is not enough to get them.
func TestDigestsProveNothing(t *testing.T) {
	secret := layerTar(t, "content", "secret")
	describe := func(content []byte) (document, manifest string) {
		document = fmt.Sprintf(`{"os":"linux","architecture":%q,"rootfs":{"type":"layers","diff_ids":[%q]}}`, goruntime.GOARCH, sha(secret))
		return document, fmt.Sprintf(`{"schemaVersion":2,"mediaType":%q,"config":{"mediaType":%q,"digest":%q,"size":%d},"layers":[{"mediaType":%q,"digest":%q,"size":%d}]}`,
			types.OCIManifestSchema1, types.OCIConfigJSON, sha([]byte(document)), len(document), types.OCIUncompressedLayer, sha(content), len(content))
	}
	archiveOf := func(manifest string, blobs ...string) []byte {
		var files []string
		for _, blob := range blobs {
			files = append(files, "blobs/sha256/"+strings.TrimPrefix(sha([]byte(blob)), "sha256:"), blob)
		}
		index := fmt.Sprintf(`{"schemaVersion":2,"manifests":[{"mediaType":%q,"digest":%q,"size":%d}]}`, types.OCIManifestSchema1, sha([]byte(manifest)), len(manifest))
		return layerTar(t, append(files, "oci-layout", `{"imageLayoutVersion":"1.0.0"}`, "index.json", index)...)
	}
	s, _, _ := service(t)
	s.SetHolders(noHolders)
	a, b := s.For("a"), s.For("b")
	config, manifest := describe(secret)
	whole := archiveOf(manifest, manifest, config, string(secret))
	if _, err := a.Import(t.Context(), bytes.NewReader(whole), ImportOptions{Reference: "app:1"}); err != nil {
		t.Fatal(err)
	}
	without := archiveOf(manifest, manifest, config)
	if _, err := b.Import(t.Context(), bytes.NewReader(without), ImportOptions{Reference: "app:1"}); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "lacks blob") {
		t.Errorf("an archive without the layer: %v", err)
	}
	// Only an index, which names the manifest that a has.
	bare := archiveOf(manifest)
	if _, err := b.Import(t.Context(), bytes.NewReader(bare), ImportOptions{Reference: "app:1"}); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "lacks manifest") {
		t.Errorf("an archive without the manifest: %v", err)
	}
	// A layer of its own under the diff id of a's tree.
	own := layerTar(t, "content", "own")
	config, manifest = describe(own)
	if _, err := b.Import(t.Context(), bytes.NewReader(archiveOf(manifest, manifest, config, string(own))), ImportOptions{Reference: "app:1"}); !errors.Is(err, ErrInvalid) ||
		!strings.Contains(err.Error(), "configuration promises") {
		t.Errorf("a layer with another's diff id: %v", err)
	}
	if _, err := a.Get(t.Context(), "app:1"); err != nil {
		t.Error(err)
	}
	// A tenant may leave out a blob that it has stored.
	if _, err := a.Import(t.Context(), bytes.NewReader(without), ImportOptions{Reference: "app:2"}); err != nil {
		t.Errorf("a, without the layer: %v", err)
	}
	if _, err := b.Import(t.Context(), bytes.NewReader(whole), ImportOptions{Reference: "app:1"}); err != nil {
		t.Errorf("b, with the layer: %v", err)
	}
	if len(s.pins) != 0 || len(s.busy) != 0 || len(s.proven) != 0 {
		t.Errorf("left: pins %v of %v, proofs %v", s.pins, s.busy, s.proven)
	}
}

// A build step of one tenant is not a result for another.
func TestBuildStepsAreOfATenant(t *testing.T) {
	s, _, _ := service(t)
	s.SetHolders(noHolders)
	a, b := draft(t, s.For("a")), draft(t, s.For("b"))
	defer closeDraft(t, a)
	defer closeDraft(t, b)
	if err := a.Remember("key", "", nil); err != nil {
		t.Fatal(err)
	}
	if _, known, err := a.Step(t.Context(), "key"); err != nil || !known {
		t.Errorf("a: %v, %v", known, err)
	}
	if _, known, err := b.Step(t.Context(), "key"); err != nil || known {
		t.Errorf("b: %v, %v", known, err)
	}
}

// Requests of one tenant neither hold images of another one nor are shown to it, and hold its own
// although sandboxes hold them too.
func TestRequestsHoldImagesOfTheirTenant(t *testing.T) {
	s, applier, dir := service(t)
	held := noHolders()
	s.SetHolders(func() map[string][]string { return maps.Clone(held) })
	a, b := s.For("a"), s.For("b")
	first := rootfsImage(t, a, "app:1", "same")
	rootfsImage(t, b, "app:1", "same")
	_, release, err := b.Acquire(t.Context(), "app:1")
	if err != nil {
		t.Fatal(err)
	}
	stored := leftovers(t, dir, applier)
	if _, err := a.Remove(t.Context(), "app:1", false); err != nil {
		t.Errorf("a, while b has a request under way: %v", err)
	}
	if diff := cmp.Diff(stored, leftovers(t, dir, applier)); diff != "" {
		t.Errorf("b has lost files (-before +after):\n%s", diff)
	}
	// A sandbox of another tenant does not hide a request of one's own.
	held[first.Digest] = []string{Holder("a", "box")}
	if _, err := b.Remove(t.Context(), "app:1", true); err != nil {
		t.Errorf("b, with force: %v", err) // it loses its name
	}
	if _, err := b.Prune(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(stored, leftovers(t, dir, applier)); diff != "" || len(names(t, b)) != 1 {
		t.Errorf("b's request has lost its image %q, files (-before +after):\n%s", names(t, b), diff)
	}
	release()
	// Nor do files below a sandbox go with the last name of their image.
	if out, err := b.Prune(t.Context(), true); err != nil || len(out.Removed) != 1 {
		t.Errorf("b prunes %+v, %v", out, err)
	}
	rootfsImage(t, a, "app:1", "same")
	held[first.Digest] = []string{Holder("b", "box")}
	stored = leftovers(t, dir, applier)
	if _, err := a.Remove(t.Context(), "app:1", false); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff(stored, leftovers(t, dir, applier)); diff != "" {
		t.Errorf("a sandbox has lost files (-before +after):\n%s", diff)
	}
}

// A removal tells a tenant the size of its own layers, whatever others have.
func TestBytesOfRemovalsTellNothing(t *testing.T) {
	sizes := make(map[bool]int64)
	for _, shared := range []bool{false, true} {
		s, _, _ := service(t)
		s.SetHolders(noHolders)
		a, b := s.For("a"), s.For("b")
		if shared {
			rootfsImage(t, b, "app:1", "same")
		}
		rootfsImage(t, a, "app:1", "same")
		rootfsImage(t, a, "app:2", "other")
		out, err := a.Remove(t.Context(), "app:1", false)
		if err != nil {
			t.Fatal(err)
		}
		again, err := a.Prune(t.Context(), true)
		if err != nil {
			t.Fatal(err)
		}
		if sizes[shared] = out.Bytes; out.Bytes <= 0 || again.Bytes <= 0 || again.Bytes == out.Bytes+again.Bytes {
			t.Errorf("%d and %d bytes", out.Bytes, again.Bytes)
		}
	}
	if sizes[false] != sizes[true] {
		t.Errorf("%d bytes, and %d if another tenant has the image too", sizes[false], sizes[true])
	}
}

// Credentials of the daemon's user are for the daemon's own tenant.
func TestTenantsUseNoCredentials(t *testing.T) {
	f := newFaulty(t)
	ref := f.host + "/team/app:1"
	push(t, ref, testImage(t, goruntime.GOARCH, asLayer(t, layerTar(t, "x", "x"), compression.GZip)))
	f.guard("user", "secret")
	s, _, _ := service(t)
	s.SetHolders(noHolders)
	s.registry.Keychain = keychain(func(authn.Resource) (authn.Authenticator, error) {
		return &authn.Basic{Username: "user", Password: "secret"}, nil
	})
	if _, err := s.Pull(t.Context(), ref, PullOptions{}); err != nil {
		t.Fatal(err)
	}
	_, err := s.For("a").Pull(t.Context(), ref, PullOptions{})
	if !errors.Is(err, ErrRegistry) || !strings.Contains(err.Error(), "tenants of this daemon use no credentials") {
		t.Errorf("pull of a tenant: %v", err)
	}
	// Though it lies here, and the tenant knows its name and digest.
	if _, err := s.For("a").Get(t.Context(), ref); !errors.Is(err, ErrNotFound) {
		t.Errorf("get: %v", err)
	}
	rootfsImage(t, s.For("a"), ref, "own")
	if _, err := s.For("a").Push(t.Context(), ref, PushOptions{}); !errors.Is(err, ErrRegistry) {
		t.Errorf("push of a tenant: %v", err)
	}
}

// A tenant with many images or snapshots loses its own before another one does.
func TestLimitsEvictTheLargestTenantsFirst(t *testing.T) {
	s, _, _ := service(t)
	s.SetHolders(noHolders)
	a, b := s.For("a"), s.For("b")
	rootfsImage(t, a, "app:1", "the oldest of all")
	for i := range 4 {
		rootfsImage(t, b, fmt.Sprintf("app:%d", i), fmt.Sprintf("content %d", i))
	}
	records, err := s.store.List()
	if err != nil {
		t.Fatal(err)
	}
	sizes, err := s.store.LayerSizes()
	if err != nil {
		t.Fatal(err)
	}
	total := shareOf(records, sizes).total
	s.opts.Limit = total / 2
	if err := s.Enforce(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(names(t, a)) != 1 || len(names(t, b)) == 4 || len(names(t, b)) == 0 {
		t.Errorf("left: a %q, b %q", names(t, a), names(t, b))
	}
	take := func(tenant *Service, name string) {
		t.Helper()
		img, err := tenant.List(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		of, err := tenant.Get(t.Context(), img[1].Reference)
		if err != nil {
			t.Fatal(err)
		}
		taken, _, err := tenant.Take(t.Context(), of.Digest, of.Rootfs, func(context.Context, string) (layer.Result, error) {
			return layer.Result{DiffID: "sha256:d", Size: 100}, nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(taken.Keep(&Snapshot{ID: snapshot.NewID(), Name: name, CreatedAt: time.Now()}), taken.Release(t.Context())); err != nil {
			t.Fatal(err)
		}
	}
	take(a, "oldest")
	for i := range 3 {
		take(b, fmt.Sprint("point", i))
	}
	s.opts.SnapshotLimit = 200
	if err := s.EnforceSnapshots(t.Context()); err != nil {
		t.Fatal(err)
	}
	of := func(tenant *Service) (names []string) {
		list, err := tenant.Snapshots("")
		if err != nil {
			t.Fatal(err)
		}
		for _, snap := range list {
			names = append(names, snap.Name)
		}
		return names
	}
	if !slices.Equal(of(a), []string{"oldest"}) || !slices.Equal(of(b), []string{"point2"}) {
		t.Errorf("left: a %q, b %q", of(a), of(b))
	}
}

// The check of everything includes what any tenant has.
func TestVerifyChecksAllTenants(t *testing.T) {
	s, _, dir := service(t)
	img := rootfsImage(t, s.For("a"), "app:1", "content")
	blob := filepath.Join(dir, "blobs", "blobs", "sha256", strings.TrimPrefix(img.Digest, "sha256:"))
	if err := errors.Join(os.Chmod(blob, 0o600), os.WriteFile(blob, []byte("other"), 0o600)); err != nil {
		t.Fatal(err)
	}
	out, err := s.Verify(t.Context())
	if err != nil || len(out.Problems) != 1 || !slices.Equal(out.Problems[0].Images, []string{`docker.io/library/app:1 of tenant "a"`}) {
		t.Errorf("%+v, %v", out, err)
	}
}
