package image

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/image/snapshot"
	"github.com/sandboxd/sandboxd/image/store"
)

// Usage counts a tenant's blobs and trees once each, and those as reclaimable that nothing in use
// needs.
func TestUsage(t *testing.T) {
	s, _, _ := service(t)
	held := noHolders()
	s.SetHolders(func() map[string][]string { return held })
	a, b := s.For("a"), s.For("b")
	used := rootfsImage(t, a, "used:1", "content of the image in use")
	idle := rootfsImage(t, a, "idle:1", "other content")
	rootfsImage(t, b, "idle:1", "other content")
	if _, err := a.Tag(t.Context(), "idle:1", "idle:2"); err != nil {
		t.Fatal(err)
	}
	held[used.Digest] = []string{Holder("a", "work")}
	held[idle.Digest] = []string{Holder("b", "work")} // of another tenant

	records, err := a.records()
	if err != nil {
		t.Fatal(err)
	}
	sizes, err := s.store.LayerSizes()
	if err != nil {
		t.Fatal(err)
	}
	bytes := func(name string) (n int64) {
		for _, r := range records {
			if r.Name == name {
				return shareOf([]*store.Record{r}, sizes).total
			}
		}
		t.Fatalf("no image %s", name)
		return 0
	}
	u, err := a.Usage()
	if err != nil {
		t.Fatal(err)
	}
	if got, want := fmt.Sprint(u.Images), fmt.Sprint([]int64{2, 1, bytes(used.Reference) + bytes(idle.Reference), bytes(idle.Reference)}); got[1:] != want[1:len(want)-1]+"}" {
		t.Errorf("images: %v, want %v", got, want)
	}

	var tops []string
	for _, name := range []string{"one", "two"} {
		taken, _, err := a.Take(t.Context(), used.Digest, used.Rootfs, func(context.Context, string) (layer.Result, error) {
			return layer.Result{DiffID: "sha256:" + name, Size: 100}, nil
		})
		if err != nil {
			t.Fatal(err)
		}
		snap := &Snapshot{ID: snapshot.NewID(), Name: name, CreatedAt: time.Now()}
		if err := errors.Join(taken.Keep(snap), taken.Release(t.Context())); err != nil {
			t.Fatal(err)
		}
		tops = append(tops, snapshot.Top(snap))
	}
	held[tops[0]] = []string{Holder("a", "fork")}
	if u, err = a.Usage(); err != nil {
		t.Fatal(err)
	}
	if s := u.Snapshots; s.Count != 2 || s.Active != 1 || s.Bytes != 200 || s.Reclaimable != 100 {
		t.Errorf("snapshots: %+v", s)
	}
	if u, err = b.Usage(); err != nil || u.Snapshots.Count != 0 || u.Images.Count != 1 {
		t.Errorf("the other tenant: %+v, %v", u, err)
	}
}
