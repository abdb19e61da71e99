package image

import (
	"context"
	"errors"
	"maps"
	"os"
	"slices"
	"testing"

	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/internal/rootfs"
)

// A layer of a snapshot is there as long as a record of a snapshot or a sandbox needs it, and what was not kept is gone after a
// crash.
func TestLayersOfSnapshotsAreKeptAsLongAsNeeded(t *testing.T) {
	s, a, dir := service(t)
	var held map[string][]string
	holders := func() map[string][]string {
		out := map[string][]string{}
		maps.Copy(out, held)
		return out
	}
	s.SetHolders(holders)
	make := func(_ context.Context, chainID string) (layer.Result, error) {
		return layer.Result{DiffID: "sha256:d", Size: 10}, os.Mkdir(a.path(chainID), 0o755)
	}
	take := func(base rootfs.Source) *Taken {
		t.Helper()
		taken, _, err := s.Take(t.Context(), "sha256:image", base, make)
		if err != nil {
			t.Fatal(err)
		}
		return taken
	}
	release := func(taken *Taken) {
		t.Helper()
		if err := taken.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	check := func(when string, want ...string) {
		t.Helper()
		if err := s.Settle(t.Context()); err != nil {
			t.Fatalf("%s: %v", when, err)
		}
		got := a.layers(t)
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("%s there are %q, want %q", when, got, want)
		}
	}

	one := take(rootfs.Source{})
	below := one.Rootfs
	if err := one.Keep(&Snapshot{ID: "one", Name: "first"}); err != nil {
		t.Fatal(err)
	}
	release(one)
	check("kept", below.Layers...)

	// On top of it: first nothing of it is kept, then for a sandbox only.
	lost := take(below)
	check("under way", lost.Rootfs.Layers...)
	release(lost)
	check("not kept", below.Layers...)
	on := take(below)
	if err := on.Keep(nil); err != nil {
		t.Fatal(err)
	}
	top := on.Rootfs.Layers[1]
	held = map[string][]string{"sha256:image": {"box"}}
	for _, id := range on.Rootfs.Taken() {
		held[id] = []string{"box"}
	}
	release(on)
	check("held by a sandbox", on.Rootfs.Layers...)
	if n, err := s.RemoveSnapshot(t.Context(), "first"); err != nil || n != 0 {
		t.Errorf("removal of what a sandbox stands on freed %d: %v", n, err)
	}
	check("held by a sandbox alone", on.Rootfs.Layers...)
	if _, err := s.Prune(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	check("after a prune", on.Rootfs.Layers...)

	// A crash while another one is made.
	cut := take(on.Rootfs)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = reopen(t, dir, a)
	s.SetHolders(holders)
	check("after a crash", on.Rootfs.Layers...)
	if slices.Contains(a.layers(t), cut.Rootfs.Layers[2]) {
		t.Error("what the crash cut off is there")
	}
	held = map[string][]string{"": {"of an earlier version"}}
	check("when the sandbox has gone")
	if slices.Contains(a.layers(t), top) {
		t.Error("its layer is there")
	}

	failed := errors.New("cannot be read")
	_, _, err := s.Take(t.Context(), "sha256:image", rootfs.Source{}, func(context.Context, string) (layer.Result, error) { return layer.Result{}, failed })
	if !errors.Is(err, failed) {
		t.Errorf("%v", err)
	}
	check("after a failure")
}

// What was removed while somebody still held it goes when he lets go: nobody else comes by to look for it.
func TestLayersOfSnapshotsGoWithTheLastWhoHoldsThem(t *testing.T) {
	s, a, _ := service(t)
	s.SetHolders(func() map[string][]string { return map[string][]string{} })
	make := func(_ context.Context, chainID string) (layer.Result, error) {
		return layer.Result{DiffID: "sha256:d"}, os.Mkdir(a.path(chainID), 0o755)
	}
	for name, hold := range map[string]func(snap *Snapshot) (release func() error){
		"one who makes a sandbox of it": func(snap *Snapshot) func() error {
			_, release, err := s.AcquireSnapshot(t.Context(), snap.ID)
			if err != nil {
				t.Fatal(err)
			}
			return func() error { release(); return nil }
		},
		"one who takes another on top of it": func(snap *Snapshot) func() error {
			on, _, err := s.Take(t.Context(), "sha256:image", snap.Rootfs, make)
			if err != nil {
				t.Fatal(err)
			}
			return func() error { return on.Release(t.Context()) }
		},
	} {
		taken, _, err := s.Take(t.Context(), "sha256:image", rootfs.Source{}, make)
		if err != nil {
			t.Fatal(err)
		}
		snap := &Snapshot{ID: "one"}
		if err := errors.Join(taken.Keep(snap), taken.Release(t.Context())); err != nil {
			t.Fatal(err)
		}
		release := hold(snap)
		if _, err := s.RemoveSnapshot(t.Context(), "one"); err != nil {
			t.Fatal(err)
		}
		if !slices.Contains(a.layers(t), snap.Rootfs.Layers[0]) {
			t.Errorf("%s: its layer is gone while it is held", name)
		}
		if err := release(); err != nil {
			t.Error(err)
		}
		if got := a.layers(t); len(got) > 0 {
			t.Errorf("%s: %q are left", name, got)
		}
	}
}

func TestNamesOfSnapshots(t *testing.T) {
	s, a, _ := service(t)
	s.SetHolders(func() map[string][]string { return map[string][]string{} })
	keep := func(id, name string) error {
		taken, _, err := s.Take(t.Context(), "sha256:image", rootfs.Source{}, func(_ context.Context, chainID string) (layer.Result, error) {
			return layer.Result{DiffID: "sha256:d"}, os.Mkdir(a.path(chainID), 0o755)
		})
		if err != nil {
			t.Fatal(err)
		}
		return errors.Join(taken.Keep(&Snapshot{ID: id, Name: name}), taken.Release(t.Context()))
	}
	for _, test := range []struct {
		id, name string
		class    error
	}{
		{"a", "one", nil}, {"b", "", nil}, {"c", "", nil}, {"d", "one", ErrSnapshotExists}, {"e", "a", ErrSnapshotExists}, {"one", "", ErrSnapshotExists}, {"f", "two", nil},
	} {
		if err := keep(test.id, test.name); !errors.Is(err, test.class) {
			t.Errorf("%s %q: %v", test.id, test.name, err)
		}
	}
	if got := len(a.layers(t)); got != 4 {
		t.Errorf("%d layers of 4 snapshots", got)
	}
	if snap, err := s.Snapshot("two"); err != nil || snap.ID != "f" {
		t.Errorf("%+v, %v", snap, err)
	}
	if _, err := s.Snapshot(""); !errors.Is(err, ErrNoSnapshot) {
		t.Errorf("a snapshot without a name is found by none: %v", err)
	}
}
