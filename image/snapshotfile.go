package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/errdefs"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/image/snapshot"
	"github.com/sandboxd/sandboxd/image/store"
	"github.com/sandboxd/sandboxd/internal/rootfs"
)

// ExportSnapshot writes a snapshot as one file; see [snapshot.Export].
func (s *Service) ExportSnapshot(ctx context.Context, ref string, read snapshot.ReadLayer, w io.Writer) error {
	snap, release, err := s.AcquireSnapshot(ctx, ref)
	if err != nil {
		return err
	}
	defer release()
	if err := snapshot.Export(ctx, s.store, snap, read, w); err != nil {
		return fmt.Errorf("export snapshot %s: %w", ref, err)
	}
	return nil
}

// ImportSnapshot stores the snapshot of a file that [Service.ExportSnapshot], or any other program,
// has written. Only claims that pass check are trusted, and every layer must have its diff id. The
// image must be stored. Name replaces the snapshot's name unless it is empty.
//
// The recorded diff id of a layer is the one that read returns, and later reads are compared with
// that. It differs from the file's if the file was not written by us, or if this host cannot keep
// all of the layer, such as owners with a single id.
func (s *Service) ImportSnapshot(ctx context.Context, r io.Reader, name string, check func(*Snapshot) error, read snapshot.ReadLayer) (_ api.Snapshot, err error) {
	file, err := snapshot.Open(r)
	if err != nil {
		return api.Snapshot{}, err
	}
	snap := file.Snapshot
	if name != "" {
		snap.Name = name
	}
	if err := check(snap); err != nil {
		return api.Snapshot{}, err
	}
	base, release, err := s.baseOf(ctx, snap)
	if err != nil {
		return api.Snapshot{}, err
	}
	defer release()
	diffIDs := snap.Rootfs.Snapshots
	if n := len(base.Layers) + len(diffIDs); len(diffIDs) == 0 || n > rootfs.MaxLayers {
		return api.Snapshot{}, snapshot.Invalidf("the snapshot has %d layers, at least one and with the image's at most %d are possible", len(diffIDs), rootfs.MaxLayers)
	}
	var t *Taken
	defer func() {
		if t != nil {
			err = errors.Join(err, t.Release(ctx))
		}
	}()
	for i, diffID := range diffIDs {
		content, err := file.Layer()
		if err != nil {
			return api.Snapshot{}, err
		}
		apply := func(ctx context.Context, chainID string) (layer.Result, error) {
			parents, limits := base.Layers, s.opts.Limits
			if t != nil {
				parents = t.Rootfs.Layers
			}
			var err error
			if limits.Below, err = s.usage(parents); err != nil {
				return layer.Result{}, err
			}
			if t != nil {
				for _, made := range t.sizes { // which the store does not know before Keep
					limits.Below = limits.Below.Add(usageOf(made))
				}
			}
			return s.applyStream(ctx, content, parents, layer.Request{
				ChainID: chainID, MediaType: string(types.OCIUncompressedLayer), DiffID: diffID, Limits: limits, FromDiff: true,
			})
		}
		var result layer.Result
		if t == nil {
			t, result, err = s.Take(ctx, snap.ImageDigest, base, apply)
		} else {
			result, err = t.Add(ctx, apply)
		}
		if err != nil {
			if errors.Is(err, layer.ErrInvalid) {
				err = snapshot.Invalidf("layer %d: %w", i+1, err)
			}
			return api.Snapshot{}, err
		}
		if result.DiffID != diffID {
			return api.Snapshot{}, snapshot.Invalidf("layer %d is %s, the snapshot promises %s", i+1, result.DiffID, diffID)
		}
		kept, err := read(ctx, t.Rootfs, true, io.Discard)
		if err != nil {
			return api.Snapshot{}, fmt.Errorf("read layer %d as it is kept: %w", i+1, err)
		}
		t.Rootfs.Snapshots[i] = kept.DiffID
		snap.Size, snap.Entries = result.Size, result.Entries
	}
	if err := file.End(); err != nil {
		return api.Snapshot{}, err
	}
	snap.ID, snap.Sandbox = snapshot.NewID(), ""
	snap.ImportedAt = time.Now().UTC()
	if snap.CreatedAt.After(snap.ImportedAt) {
		snap.CreatedAt = snap.ImportedAt // or it would be the last one that a limit removes
	}
	if err := t.Keep(snap); err != nil {
		return api.Snapshot{}, err
	}
	// While it is pinned: it may be the oldest of all, and is the wanted one.
	if err := s.EnforceSnapshots(context.WithoutCancel(ctx)); err != nil {
		s.opts.Log.Warn("the limit of snapshots is exceeded", "error", err)
	}
	return s.InspectSnapshot(snap.ID)
}

// baseOf finds the image of an imported snapshot, and keeps it until release.
func (s *Service) baseOf(ctx context.Context, snap *Snapshot) (rootfs.Source, func(), error) {
	if snap.Image == api.HostImage {
		img, release, err := s.Acquire(ctx, api.HostImage)
		if err != nil {
			return rootfs.Source{}, nil, err
		}
		if img.Digest != snap.ImageDigest {
			release()
			return rootfs.Source{}, nil, errdefs.Classf(ErrNotFound, "the snapshot is of another host's programs, or of an earlier state of this one's: its host image is %.80s, this one's %s",
				snap.ImageDigest, img.Digest)
		}
		return img.Rootfs, release, nil
	}
	record, release, err := s.byDigest(ctx, snap.ImageDigest)
	if err != nil {
		if errors.Is(err, ErrNotFound) {
			err = errdefs.Classf(ErrNotFound, "the snapshot needs the image %s of digest %.80s, which is not stored here; pull it first", snap.Image, snap.ImageDigest)
		}
		return rootfs.Source{}, nil, err
	}
	var base rootfs.Source
	for _, l := range record.Layers {
		base.Layers = append(base.Layers, l.ChainID)
	}
	return base, release, nil
}

// applyStream has a layer extracted from a stream. A truncated stream fails the check of its diff
// id.
func (s *Service) applyStream(ctx context.Context, content io.Reader, parents []string, req layer.Request) (layer.Result, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return layer.Result{}, err
	}
	copied := make(chan error, 1)
	go func() {
		_, err := io.Copy(w, store.WithContext(ctx, content))
		copied <- errors.Join(err, w.Close())
	}()
	req.Blob = r
	results, err := s.applier.Apply(ctx, layer.ApplyRequest{Parents: parents, Layers: []layer.Request{req}})
	_ = r.Close() // ends an unfinished copy
	cerr := <-copied
	if err == nil {
		err = cerr
	}
	if err == nil && len(results) != 1 {
		err = fmt.Errorf("%d layers were extracted, not 1", len(results))
	}
	if err != nil {
		return layer.Result{}, err
	}
	return results[0], nil
}
