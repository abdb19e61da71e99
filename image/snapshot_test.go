package image

import (
	"bytes"
	"context"
	"errors"
	"io"
	"maps"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/image/snapshot"
	"github.com/sandboxd/sandboxd/internal/rootfs"
)

// A snapshot's layer stays as long as a record of a snapshot or a sandbox needs it, and layers that
// were not kept are removed after a crash.
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
		if err := s.CollectSnapshotLayers(t.Context()); err != nil {
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

// A layer that was removed while it was held goes with its last holder: no later event may collect
// it.
func TestLayersOfSnapshotsGoWithTheLastWhoHoldsThem(t *testing.T) {
	s, a, _ := service(t)
	s.SetHolders(func() map[string][]string { return map[string][]string{} })
	make := func(_ context.Context, chainID string) (layer.Result, error) {
		return layer.Result{DiffID: "sha256:d"}, os.Mkdir(a.path(chainID), 0o755)
	}
	for name, hold := range map[string]func(snap *Snapshot) (release func() error){
		"acquired for a sandbox": func(snap *Snapshot) func() error {
			_, release, err := s.AcquireSnapshot(t.Context(), snap.ID)
			if err != nil {
				t.Fatal(err)
			}
			return func() error { release(); return nil }
		},
		"below a new snapshot": func(snap *Snapshot) func() error {
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
		{"a", "one", nil}, {"b", "", nil}, {"c", "", nil}, {"d", "one", snapshot.ErrExists}, {"e", "a", snapshot.ErrExists}, {"one", "", snapshot.ErrExists}, {"f", "two", nil},
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
	if _, err := s.Snapshot(""); !errors.Is(err, snapshot.ErrNotFound) {
		t.Errorf("a snapshot without a name is found by none: %v", err)
	}
}

func TestSnapshotsArePruned(t *testing.T) {
	s, a, _ := service(t)
	held := map[string][]string{}
	s.SetHolders(func() map[string][]string { return maps.Clone(held) })
	now := time.Date(2026, 5, 1, 0, 0, 0, 0, time.UTC)
	for _, snap := range []*Snapshot{
		{ID: "old", Name: "first", CreatedAt: now.Add(-50 * time.Hour)},
		{ID: "used", CreatedAt: now.Add(-40 * time.Hour)},
		{ID: "kept", CreatedAt: now.Add(-30 * time.Hour), Labels: map[string]string{api.LabelKeep: "", "job": "1"}},
		{ID: "job", CreatedAt: now.Add(-20 * time.Hour), Labels: map[string]string{"job": "1"}},
		{ID: "new", CreatedAt: now.Add(-70 * time.Hour), ImportedAt: now},
	} {
		taken, _, err := s.Take(t.Context(), "sha256:image", rootfs.Source{}, func(_ context.Context, chainID string) (layer.Result, error) {
			return layer.Result{DiffID: "sha256:d", Size: 7}, os.Mkdir(a.path(chainID), 0o755)
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(taken.Keep(snap), taken.Release(t.Context())); err != nil {
			t.Fatal(err)
		}
		if snap.ID == "used" {
			held[snap.Rootfs.Layers[0]] = []string{"a sandbox"}
		}
	}
	for _, test := range []struct {
		before time.Time
		labels map[string]string
		want   []string
	}{
		{now.Add(-60 * time.Hour), nil, nil},
		{now.Add(-25 * time.Hour), map[string]string{"job": "1"}, nil},
		{now.Add(-25 * time.Hour), nil, []string{"first"}},
		{now.Add(time.Hour), map[string]string{"job": "1"}, []string{"job"}},
		{now.Add(time.Hour), nil, []string{"new"}},
	} {
		out, err := s.PruneSnapshots(t.Context(), test.before, test.labels)
		if err != nil || !slices.Equal(out.Removed, test.want) || out.Bytes != int64(7*len(test.want)) {
			t.Errorf("before %s with %v: %+v, %v; want %q", test.before, test.labels, out, err, test.want)
		}
	}
	if got := len(a.layers(t)); got != 2 {
		t.Errorf("%d layers are left, want those of the kept and the used one", got)
	}
}

// A layer that was taken when zeros were still in the stream is read as it was then: it is not
// damaged.
func TestSnapshotsThatHaveTheirZerosAreExported(t *testing.T) {
	s, a, _ := service(t)
	s.SetHolders(func() map[string][]string { return map[string][]string{} })
	read := snapshot.ReadLayer(func(_ context.Context, _ rootfs.Source, holes bool, w io.Writer) (layer.Result, error) {
		text := "with zeros"
		if holes {
			text = "without them, and longer"
		}
		_, err := io.WriteString(w, text)
		return layer.Result{DiffID: sha([]byte(text))}, err
	})
	for was, want := range map[string]string{"with zeros": "with zeros", "without them, and longer": "without them, and longer", "another": ""} {
		taken, _, err := s.Take(t.Context(), "sha256:image", rootfs.Source{}, func(_ context.Context, chainID string) (layer.Result, error) {
			return layer.Result{DiffID: sha([]byte(was))}, os.Mkdir(a.path(chainID), 0o755)
		})
		if err != nil {
			t.Fatal(err)
		}
		snap := &Snapshot{ID: snapshot.NewID()}
		if err := errors.Join(taken.Keep(snap), taken.Release(t.Context())); err != nil {
			t.Fatal(err)
		}
		var file bytes.Buffer
		if err := s.ExportSnapshot(t.Context(), snap.ID, read, &file); want == "" {
			if !errors.Is(err, ErrInvalid) || file.Len() > 0 {
				t.Errorf("a layer that is damaged: %v, %d bytes", err, file.Len())
			}
			continue
		} else if err != nil {
			t.Fatalf("%s: %v", was, err)
		}
		in, err := snapshot.Open(&file)
		if err != nil || !slices.Equal(in.Snapshot.Rootfs.Snapshots, []string{sha([]byte(was))}) {
			t.Fatalf("%s: %+v, %v", was, in, err)
		}
		content, err := in.Layer()
		if err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(content); err != nil || string(got) != want {
			t.Errorf("%s: the layer is %q, %v", was, got, err)
		}
	}
}
