package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-containerregistry/pkg/compression"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/image/store"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// Pulls, removals and collections of images that share a layer run in parallel: an acquired image
// has its layers, and in the end nothing is left over.
func TestCollectionAndPullsDoNotDisturbEachOther(t *testing.T) {
	f := newFaulty(t)
	s, a, dir := service(t)
	s.SetHolders(func() map[string][]string { return map[string][]string{} })
	shared := asLayer(t, layerTar(t, "shared", "x"), compression.GZip)
	var refs []string
	for i := range 3 {
		refs = append(refs, fmt.Sprintf("%s/team/app:%d", f.host, i))
		push(t, refs[i], testImage(t, "amd64", shared, asLayer(t, layerTar(t, "own", fmt.Sprint(i)), compression.GZip)))
	}
	var wg sync.WaitGroup
	for _, ref := range refs {
		wg.Go(func() {
			for range 20 {
				if _, err := s.Pull(t.Context(), ref, PullOptions{Platform: "linux/amd64"}); err != nil {
					t.Errorf("pull: %v", err)
				}
				img, release, err := s.Acquire(t.Context(), ref)
				if errors.Is(err, ErrNotFound) {
					continue // collected already
				} else if err != nil {
					t.Errorf("acquire: %v", err)
					continue
				}
				for _, l := range img.Rootfs.Layers {
					if !slices.Contains(a.layers(t), l) {
						t.Errorf("an image that is held lacks its layer %s", l)
					}
				}
				release()
				if _, err := s.Remove(t.Context(), ref, false); err != nil && !errors.Is(err, ErrNotFound) && !errors.Is(err, ErrInUse) {
					t.Errorf("remove: %v", err)
				}
			}
		})
	}
	wg.Go(func() {
		for range 40 {
			if _, err := s.Prune(t.Context(), true); err != nil {
				t.Errorf("prune: %v", err)
			}
		}
	})
	wg.Wait()
	if _, err := s.Prune(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	if left := leftovers(t, dir, a); len(left) != 0 {
		t.Errorf("left over: %v", left)
	}
}

// Nothing is removed before the holders are known.
func TestNothingIsCollectedBeforeTheHoldersAreKnown(t *testing.T) {
	f := newFaulty(t)
	s, _, _ := service(t)
	ref := f.host + "/team/app:1"
	push(t, ref, testImage(t, "amd64", asLayer(t, layerTar(t, "x", "x"), compression.GZip)))
	if _, err := s.Pull(t.Context(), ref, PullOptions{Platform: "linux/amd64"}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Remove(t.Context(), ref, true); err == nil {
		t.Error("an image was removed")
	}
	if _, err := s.Prune(t.Context(), true); err == nil {
		t.Error("images were pruned")
	}
}

// After the names are gone, a crash leaves the rest to the next start.
func TestOpenFinishesAnInterruptedRemoval(t *testing.T) {
	f := newFaulty(t)
	s, a, dir := service(t)
	s.SetHolders(func() map[string][]string { return map[string][]string{} })
	ref := f.host + "/team/app:1"
	push(t, ref, testImage(t, "amd64", asLayer(t, layerTar(t, "x", "x"), compression.GZip)))
	img, err := s.Pull(t.Context(), ref, PullOptions{Platform: "linux/amd64"})
	if err != nil {
		t.Fatal(err)
	}
	g, _, _, err := s.plan(false, func([]*store.Record, []*store.Step, map[string][]string) (choice, error) {
		return choice{drop: []*store.Record{{Name: img.Reference}}}, nil
	})
	if err != nil || len(g.Layers) != 1 || len(g.Blobs) != 3 {
		t.Fatalf("garbage %+v, %v", g, err)
	}
	if left := leftovers(t, dir, a); len(left) != 4 {
		t.Fatalf("before the restart: %v", left)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	reopen(t, dir, a)
	if left := leftovers(t, dir, a); len(left) != 0 {
		t.Errorf("after the restart: %v", left)
	}
}

// Removal must work without writing the index, because a full disk is when it matters.
func TestRemovalNeedsNoIndex(t *testing.T) {
	f := newFaulty(t)
	s, a, dir := service(t)
	s.SetHolders(func() map[string][]string { return map[string][]string{} })
	ref := f.host + "/team/app:1"
	push(t, ref, testImage(t, "amd64", asLayer(t, layerTar(t, "x", "x"), compression.GZip)))
	if _, err := s.Pull(t.Context(), ref, PullOptions{Platform: "linux/amd64"}); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "blobs/index.json.new"), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Remove(t.Context(), ref, false); err != nil {
		t.Error(err)
	}
	if left := leftovers(t, dir, a); len(left) != 0 {
		t.Errorf("left over: %v", left)
	}
}

// The daemon starts although the remains of a crash cannot be removed, and ends although their
// removal hangs.
func TestOpenDoesNotWaitForTheCleanUp(t *testing.T) {
	dir := t.TempDir()
	st, err := store.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	chain := "sha256:" + strings.Repeat("1", 64)
	if err := errors.Join(st.BeginLayers(chain), st.Close()); err != nil {
		t.Fatal(err)
	}
	for range 2 { // it stays pending
		stuck := &stuckApplier{begun: make(chan string, 1)}
		s, err := Open(dir, stuck, Options{})
		if err != nil {
			t.Fatal(err)
		}
		if got := <-stuck.begun; got != chain {
			t.Errorf("removing %s", got)
		}
		// A pull of that layer must not find a half removed tree.
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := s.pin(ctx, treeKeys([]string{chain})); !errors.Is(err, context.Canceled) {
			t.Errorf("pinned: %v", err)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
}

// stuckApplier never gets done with removing a layer.
type stuckApplier struct {
	nullApplier

	begun chan string
}

func (a *stuckApplier) RemoveLayer(ctx context.Context, chainID string) error {
	a.begun <- chainID
	<-ctx.Done()
	return ctx.Err()
}

// limited is a service with images of one layer each, used one after the other, and a limit that
// all but one exceed.
func limited(t *testing.T) (s *Service, a *directApplier, refs []string) {
	t.Helper()
	f := newFaulty(t)
	s, a, _ = service(t)
	s.SetHolders(func() map[string][]string { return map[string][]string{} })
	for i := range 3 {
		refs = append(refs, fmt.Sprintf("%s/team/app:%d", f.host, i))
		push(t, refs[i], testImage(t, "amd64", asLayer(t, layerTar(t, "own", fmt.Sprint(i)), compression.GZip)))
		if _, err := s.Pull(t.Context(), refs[i], PullOptions{Platform: "linux/amd64"}); err != nil {
			t.Fatal(err)
		}
	}
	s.opts.Limit = 1
	return s, a, refs
}

func names(t *testing.T, s *Service) (out []string) {
	t.Helper()
	records, err := s.records()
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range records {
		out = append(out, r.Name)
	}
	return out
}

func TestEnforceTakesTheLeastRecentlyUsed(t *testing.T) {
	s, _, refs := limited(t)
	// The first was used last, by a name that it got later, and its old name must not count against
	// it.
	other := store.Repository(refs[0]) + ":other"
	if _, err := s.Tag(t.Context(), refs[0], other); err != nil {
		t.Fatal(err)
	}
	_, release, err := s.Acquire(t.Context(), other)
	if err != nil {
		t.Fatal(err)
	}
	release()
	sizes, err := s.store.LayerSizes()
	if err != nil {
		t.Fatal(err)
	}
	records, err := s.store.List()
	if err != nil {
		t.Fatal(err)
	}
	s.opts.Limit = shareOf(records, sizes).total - 1 // one image is too many
	if err := s.Enforce(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got, want := names(t, s), []string{refs[0], refs[2], other}; !slices.Equal(got, want) {
		t.Errorf("left are %v, want %v", got, want)
	}
	s.opts.Limit = 1
	if err := s.Enforce(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := names(t, s); len(got) != 0 {
		t.Errorf("left are %v", got)
	}
}

func TestEnforceSparesWhatIsNeeded(t *testing.T) {
	s, a, refs := limited(t)
	held, err := s.Get(t.Context(), refs[0])
	if err != nil {
		t.Fatal(err)
	}
	s.SetHolders(func() map[string][]string { return map[string][]string{held.Digest: {"work"}} })
	wanted, release, err := s.Acquire(t.Context(), refs[1])
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	if err := s.Enforce(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := names(t, s); !slices.Equal(got, refs[:2]) {
		t.Errorf("left are %v, want %v", got, refs[:2])
	}
	for _, l := range []string{held.Rootfs.Layers[0], wanted.Rootfs.Layers[0]} {
		if !slices.Contains(a.layers(t), l) {
			t.Errorf("layer %s is gone", l)
		}
	}
}

// A stopping daemon does not finish removing everything first.
func TestEnforceEndsBetweenLayers(t *testing.T) {
	s, a, _ := limited(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Enforce(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	if got := names(t, s); len(got) != 0 {
		t.Errorf("names are left: %v", got)
	}
	pending, err := s.store.PendingLayers()
	if err != nil || len(pending) != 3 || len(a.layers(t)) != 3 {
		t.Errorf("pending %v (%v), trees %v", pending, err, a.layers(t))
	}
}

// Failed removals are retried while the daemon runs, but not while the layer is needed again.
func TestLayersThatCouldNotBeRemovedAreTriedAgain(t *testing.T) {
	s, a, _ := limited(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Enforce(ctx); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	all := a.layers(t)
	if len(all) != 3 {
		t.Fatalf("%v", all)
	}
	if err := s.pin(t.Context(), treeKeys(all[:1])); err != nil {
		t.Fatal(err)
	}
	s.retry(t.Context())
	if got := a.layers(t); !slices.Equal(got, all[:1]) {
		t.Errorf("pinned %v, there are %v", all[:1], got)
	}
	s.mu.Lock()
	s.unpin(all[:1], treeKey)
	s.mu.Unlock()
	broken := brokenApplier{Applier: a, fail: true}
	s.applier = &broken
	s.retry(t.Context())
	if got := a.layers(t); !slices.Equal(got, all[:1]) {
		t.Errorf("cannot be removed: %v", got)
	}
	broken.fail = false
	s.retry(t.Context())
	if got := a.layers(t); len(got) != 0 {
		t.Errorf("left: %v", got)
	}
	if left := s.failedRemovals(); len(left) != 0 {
		t.Errorf("to be tried again: %v", left)
	}
}

// To remove one layer may take long. Another that a pull has completed meanwhile is an image's, and
// stays.
func TestRetryLeavesWhatAPullHasCompleted(t *testing.T) {
	s, a, refs := limited(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Enforce(ctx); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	all := a.layers(t)
	own, err := os.ReadFile(filepath.Join(a.path(all[1]), "own"))
	if err != nil {
		t.Fatal(err)
	}
	i, err := strconv.Atoi(string(own))
	if err != nil {
		t.Fatal(err)
	}
	s.opts.Limit = 0
	pull := sync.OnceFunc(func() {
		if _, err := s.Pull(t.Context(), refs[i], PullOptions{Platform: "linux/amd64"}); err != nil {
			t.Error(err)
		}
	})
	s.applier = &brokenApplier{Applier: a, before: pull}
	s.retry(t.Context())
	if got := a.layers(t); !slices.Equal(got, all[1:2]) {
		t.Errorf("there are %v, want the image's %v", got, all[1:2])
	}
}

// brokenApplier cannot remove a layer, or does something before.
type brokenApplier struct {
	Applier

	fail   bool
	before func()
}

func (a *brokenApplier) RemoveLayer(ctx context.Context, chainID string) error {
	if a.before != nil {
		a.before()
	}
	if a.fail {
		return errors.New("busy")
	}
	return a.Applier.RemoveLayer(ctx, chainID)
}

// A blob's pins are independent of a tree's, even if both have one digest.
func TestPinsOfBlobsAndTreesAreApart(t *testing.T) {
	s, _, _ := service(t)
	id := "sha256:" + strings.Repeat("2", 64)
	if err := s.pin(t.Context(), append(blobKeys([]string{id}), treeKeys([]string{id})...)); err != nil {
		t.Fatal(err)
	}
	if free := s.unpin([]string{id}, blobKey); !slices.Equal(free, []string{id}) {
		t.Errorf("free blobs: %v", free)
	}
	if s.pins[treeKey(id)] != 1 {
		t.Errorf("pins: %v", s.pins)
	}
}

// On a disk without a free byte images can be removed, which is when it matters.
func TestRemovalOnAFullDisk(t *testing.T) {
	testenv.RequireRoot(t)
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	f, a := newFaulty(t), newApplier(t)
	s := reopen(t, dir, a)
	s.SetHolders(func() map[string][]string { return map[string][]string{} })
	ref := f.host + "/team/app:1"
	push(t, ref, testImage(t, "amd64", asLayer(t, layerTar(t, "x", "x"), compression.GZip)))
	if _, err := s.Pull(t.Context(), ref, PullOptions{Platform: "linux/amd64"}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Tag(t.Context(), ref, "other"); err != nil { // else index.json is smaller than before and may fit
		t.Fatal(err)
	}
	fill := filepath.Join(dir, "fill")
	if err := os.WriteFile(fill, make([]byte, 2<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("filled the disk: %v", err)
	}
	if _, err := s.Prune(t.Context(), true); err != nil {
		t.Error(err)
	}
	if err := os.Remove(fill); err != nil {
		t.Fatal(err)
	}
	if left := leftovers(t, dir, a); len(left) != 0 {
		t.Errorf("left over: %v", left)
	}
}
