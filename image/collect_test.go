package image

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/google/go-containerregistry/pkg/compression"

	"github.com/sandboxd/sandboxd/image/store"
)

// Pulls, removals and collections of images that share a layer, all at once: whoever acquires an image finds its layers,
// and in the end nothing is left over.
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

// Until it is known what the sandboxes hold, nothing is removed.
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

// The names are gone and nothing else is: what a crash at that moment leaves, the next start removes.
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
	g, _, _, err := s.plan(false, func([]*store.Record, map[string][]string) (drop, loosen []string, err error) {
		return []string{img.Reference}, nil, nil
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
