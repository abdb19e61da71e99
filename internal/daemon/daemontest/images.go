package daemontest

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/internal/rootfs"
	"github.com/sandboxd/sandboxd/internal/service"
	"github.com/sandboxd/sandboxd/internal/service/class"
)

// Images is a store of two images.
type Images struct {
	service.Images // the other methods: no test may call them

	PullImage func(image.PullOptions) (*image.Image, error)
}

// Commit implements the store.
func (f *Images) Commit(ctx context.Context, opts image.CommitOptions) (*image.Image, layer.Result, error) {
	for _, l := range opts.Below {
		if _, err := l.Write(ctx, io.Discard); err != nil {
			return nil, layer.Result{}, err
		}
	}
	result, err := opts.Layer(ctx, io.Discard)
	return &image.Image{Image: api.Image{Reference: opts.Reference}}, result, err
}

// SetHolders implements the store.
func (f *Images) SetHolders(func() map[string][]string) {}

// OnRemoval implements the store.
func (f *Images) OnRemoval(func(context.Context, []string)) {}

// Limits implements the store.
func (f *Images) Limits() layer.Limits { return layer.DefaultLimits() }

// Usage implements the store.
func (f *Images) Usage() (image.Usage, error) {
	return image.Usage{Images: api.DiskShare{Count: 2, Active: 1, Bytes: 300, Reclaimable: 100}}, nil
}

// Enforce implements the store.
func (f *Images) Enforce(context.Context) error { return nil }

// EnforceSnapshots implements the store.
func (f *Images) EnforceSnapshots(context.Context) error { return nil }

// PruneSnapshots implements the store.
func (f *Images) PruneSnapshots(_ context.Context, before time.Time, labels map[string]string) (api.SnapshotsRemoved, error) {
	return api.SnapshotsRemoved{Removed: []string{before.UTC().Format(time.RFC3339), labels["k"]}}, nil
}

// CollectSnapshotLayers implements the store.
func (f *Images) CollectSnapshotLayers(context.Context) error { return nil }

// Acquire implements the store.
func (f *Images) Acquire(_ context.Context, ref string) (*image.Image, func(), error) {
	img, err := f.Get(ref)
	return img, func() {}, err
}

// Get implements the store.
func (f *Images) Get(ref string) (*image.Image, error) {
	img := &image.Image{Image: api.Image{Reference: ref}, Rootfs: rootfs.Source{Layers: []string{"sha256:00"}}}
	switch ref {
	case api.HostImage:
	case "example.org/app:1":
		img.Digest = "sha256:11"
		img.Config = image.Config{Env: []string{"FROM=image", "LANG=C"}, WorkingDir: "/tmp", Entrypoint: []string{"sh", "-c"}, Cmd: []string{"echo $FROM; exit 5"}}
	case "example.org/snapshot:1":
		img.Rootfs = rootfs.Source{Layers: []string{"sha256:00", "sha256:01"}, Snapshots: []string{"sha256:d"}}
	case "example.org/hostile:1":
		img.Config.WorkingDir = "../../etc"
	case "example.org/hostile:2":
		img.Config.User = "-1"
	default:
		return nil, class.Mark(image.ErrNotFound, fmt.Errorf("%s is not here", ref))
	}
	return img, nil
}

// List implements the store.
func (f *Images) List(context.Context) ([]api.Image, error) {
	return []api.Image{{Reference: "example.org/app:1"}}, nil
}

// Pull implements the store.
func (f *Images) Pull(_ context.Context, _ string, opts image.PullOptions) (*image.Image, error) {
	return f.PullImage(opts)
}

// Tenants implements the store.
func (f *Images) Tenants() ([]string, error) { return []string{""}, nil }
