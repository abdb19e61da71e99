package image

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/errdefs"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/image/snapshot"
	"github.com/sandboxd/sandboxd/image/store"
	"github.com/sandboxd/sandboxd/internal/rootfs"
)

// Snapshot is the record of a snapshot.
type Snapshot = store.Snapshot

// Taken holds new layers of snapshots. They, and the layers below, stay until Release, and longer
// after Keep.
type Taken struct {
	Rootfs rootfs.Source

	service *Service
	digest  string
	made    []string // chain ids
	sizes   map[string]store.Tree

	released bool
	held     []string // pinned chain ids below
}

// Take makes a layer of a snapshot on top of base, a rootfs of the image of that digest. Make has
// it extracted under the given chain id and returns its result; its error is returned unchanged,
// and nothing stays.
//
// The chain id is random. It is neither made of the layer's content, which is known only
// afterwards, nor of a name: an image whose author knew the preimage of such an id would find a
// snapshot in the place of its own layer.
func (s *Service) Take(ctx context.Context, digest string, base rootfs.Source, make func(ctx context.Context, chainID string) (layer.Result, error)) (*Taken, layer.Result, error) {
	t := &Taken{service: s, digest: digest, Rootfs: base.Clone(), sizes: map[string]store.Tree{}}
	if err := s.pin(ctx, append(treeKeys(base.Layers), blobKey(digest))); err != nil {
		return nil, layer.Result{}, err
	}
	t.held = slices.Clone(base.Layers)
	result, err := t.Add(ctx, make)
	if err != nil {
		return nil, layer.Result{}, errors.Join(err, t.Release(ctx))
	}
	return t, result, nil
}

// Add makes one more layer on top. After an error the earlier ones remain.
func (t *Taken) Add(ctx context.Context, make func(ctx context.Context, chainID string) (layer.Result, error)) (layer.Result, error) {
	var random [32]byte
	_, _ = rand.Read(random[:]) // since Go 1.24 it never fails
	id := "sha256:" + hex.EncodeToString(random[:])
	s := t.service
	s.mu.Lock()
	s.pinLocked(treeKey(id))
	s.mu.Unlock()
	t.made = append(t.made, id)
	if err := s.store.BeginLayers(id); err != nil {
		return layer.Result{}, err
	}
	result, err := make(ctx, id)
	if err != nil {
		return layer.Result{}, err
	}
	t.Rootfs, t.sizes[id] = t.Rootfs.Upon(id, result.DiffID), store.Tree{Bytes: result.Size, Entries: result.Entries}
	return result, nil
}

// Keep records the snapshot with these layers; with nil, the layers alone, for sandboxes based on
// them. It returns when that is on disk.
func (t *Taken) Keep(snap *Snapshot) error {
	if snap != nil {
		snap.Tenant, snap.Rootfs, snap.ImageDigest = t.service.tenant, t.Rootfs.Clone(), t.digest
	}
	return t.service.store.KeepSnapshot(t.sizes, snap)
}

// Release returns Take's pins. It removes layers that were not kept, and layers below them that
// nothing needs any more, as other users may have gone meanwhile. A second call does nothing.
func (t *Taken) Release(ctx context.Context) error {
	s := t.service
	if t.released {
		return nil
	}
	t.released = true
	s.mu.Lock()
	s.unpin([]string{t.digest}, blobKey)
	s.unpin(t.held, treeKey)
	s.mu.Unlock()
	return errors.Join(s.release(ctx, nil, t.made, true), s.CollectSnapshotLayers(ctx))
}

// Snapshots lists all snapshots, oldest first; of selects those of a sandbox by its id, empty means
// all.
func (s *Service) Snapshots(of string) ([]api.Snapshot, error) {
	all, err := s.snapshots()
	if err != nil {
		return nil, err
	}
	sizes, err := s.store.LayerSizes()
	if err != nil {
		return nil, err
	}
	list := []api.Snapshot{}
	for _, snap := range all {
		if of == "" || snap.Sandbox == of {
			list = append(list, snapshot.Summary(snap, sizes))
		}
	}
	return list, nil
}

// InspectSnapshot returns the API's view of a snapshot.
func (s *Service) InspectSnapshot(ref string) (api.Snapshot, error) {
	snap, err := s.Snapshot(ref)
	if err != nil {
		return api.Snapshot{}, err
	}
	sizes, err := s.store.LayerSizes()
	if err != nil {
		return api.Snapshot{}, err
	}
	return snapshot.Summary(snap, sizes), nil
}

// Snapshot finds a snapshot by its id or name.
func (s *Service) Snapshot(ref string) (*Snapshot, error) {
	snap, err := s.store.Snapshot(s.tenant, ref)
	if errors.Is(err, store.ErrNotFound) {
		return nil, errdefs.Classf(snapshot.ErrNotFound, "snapshot %q is not here", ref)
	}
	return snap, err
}

// AcquireSnapshot is [Service.Snapshot] for a new sandbox: the snapshot's parts stay until release
// is called. The caller releases them when the holders include the sandbox, or its creation has
// failed.
func (s *Service) AcquireSnapshot(ctx context.Context, ref string) (_ *Snapshot, release func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock() // a collection that removes it has ended, or comes later
	snap, err := s.Snapshot(ref)
	if err != nil {
		return nil, nil, err
	}
	s.pinLocked(append(treeKeys(snap.Rootfs.Layers), blobKey(snap.ImageDigest))...)
	return snap, func() {
		s.mu.Lock()
		s.unpin(snap.Rootfs.Layers, treeKey)
		s.unpin([]string{snap.ImageDigest}, blobKey)
		s.mu.Unlock()
		// Its removal has left these layers, and no other event may trigger a collection.
		if _, err := s.store.Snapshot(s.tenant, snap.ID); !errors.Is(err, store.ErrNotFound) {
			return
		}
		if err := s.CollectSnapshotLayers(ctx); err != nil {
			s.opts.Log.Warn("a layer of a snapshot that nothing needs is left until the next start", "error", err)
		}
	}, nil
}

// RemoveSnapshot removes a snapshot, and those of its layers that no other one and no sandbox is
// based on. [Service.CollectSnapshotLayers] removes the others when the last of these is gone. It
// returns the bytes of removed files.
func (s *Service) RemoveSnapshot(ctx context.Context, ref string) (int64, error) {
	out, err := s.sweep(context.WithoutCancel(ctx), false, func([]*store.Record, []*store.Step, map[string][]string) (choice, error) {
		snap, err := s.Snapshot(ref)
		if err != nil {
			return choice{}, err
		}
		return choice{discard: []string{snap.ID}}, nil
	})
	return out.Bytes, err
}

// PruneSnapshots removes the snapshots that were taken, or imported, before a time, that have all
// these labels, and that no sandbox is based on. Those with [api.LabelKeep] stay.
func (s *Service) PruneSnapshots(ctx context.Context, before time.Time, labels map[string]string) (api.SnapshotsRemoved, error) {
	expired := func(held map[string][]string) ([]*Snapshot, error) {
		all, err := s.snapshots()
		return snapshot.Expired(all, before, labels, func(snap *Snapshot) bool { return s.inUse(snap, held) }), err
	}
	out := api.SnapshotsRemoved{Removed: []string{}}
	// A sweep writes to the disk, and this is called every minute.
	s.mu.Lock()
	held, err := s.heldLocked()
	var old []*Snapshot
	if err == nil {
		old, err = expired(held)
	}
	s.mu.Unlock()
	if err != nil || len(old) == 0 {
		return out, err
	}
	removed, err := s.sweep(context.WithoutCancel(ctx), false, func(_ []*store.Record, _ []*store.Step, held map[string][]string) (c choice, err error) {
		old, err := expired(held)
		for _, snap := range old {
			c.discard, out.Removed = append(c.discard, snap.ID), append(out.Removed, snapshot.Name(snap))
		}
		return c, err
	})
	out.Bytes = removed.Bytes
	return out, err
}

// inUse reports whether a sandbox is based on the snapshot, or about to be. It needs mu.
func (s *Service) inUse(snap *Snapshot, held map[string][]string) bool {
	top := snapshot.Top(snap)
	return held[top] != nil || s.pins[treeKey(top)] > 0
}

// CollectSnapshotLayers removes layers of snapshots that nothing is based on any more.
func (s *Service) CollectSnapshotLayers(ctx context.Context) error {
	if idle, err := s.nothingToCollect(); idle || err != nil {
		return err
	}
	_, err := s.sweep(context.WithoutCancel(ctx), false, func([]*store.Record, []*store.Step, map[string][]string) (choice, error) {
		return choice{}, nil
	})
	return err
}

// nothingToCollect reports whether all layers of snapshots are needed, without writing anything: it
// runs after each deletion.
func (s *Service) nothingToCollect() (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	layers, err := s.store.SnapshotLayers()
	if err != nil || len(layers) == 0 {
		return true, err
	}
	snapshots, err := s.store.Snapshots()
	if err != nil {
		return false, err
	}
	held, err := s.heldLocked()
	if err != nil {
		return false, err
	}
	needed := make(map[string]bool)
	for _, snap := range snapshots {
		for _, id := range snap.Rootfs.Layers {
			needed[id] = true
		}
	}
	return !slices.ContainsFunc(layers, func(id string) bool {
		return !needed[id] && held[id] == nil && s.pins[treeKey(id)] == 0 && s.removing[treeKey(id)] == nil
	}), nil
}

// EnforceSnapshots removes the oldest snapshots that no sandbox is based on, until the files of all
// have no more bytes than [Options.SnapshotLimit].
func (s *Service) EnforceSnapshots(ctx context.Context) error {
	over, err := s.snapshotsOver()
	if err != nil || !over {
		return errors.Join(err, s.CollectSnapshotLayers(ctx))
	}
	sizes, err := s.store.LayerSizes()
	if err != nil {
		return err
	}
	var discarded []string
	var left int64
	_, err = s.sweep(ctx, false, func(_ []*store.Record, _ []*store.Step, held map[string][]string) (c choice, _ error) {
		snapshots, err := s.store.Snapshots()
		if err != nil {
			return c, err
		}
		c.discard, left = snapshot.Excess(snapshots, sizes, s.opts.SnapshotLimit, func(snap *Snapshot) bool { return s.inUse(snap, held) })
		discarded = c.discard
		return c, nil
	})
	if err != nil {
		return err
	}
	if len(discarded) > 0 {
		s.opts.Log.Info("snapshots were removed to keep to the limit", "limit", s.opts.SnapshotLimit, "snapshots", discarded)
	}
	if left > s.opts.SnapshotLimit {
		s.opts.Log.Warn("snapshots exceed the limit, and all others are labelled to be kept or below sandboxes", "limit", s.opts.SnapshotLimit, "bytes", left)
	}
	return nil
}

// snapshotsOver reports whether the limit may be exceeded.
func (s *Service) snapshotsOver() (bool, error) {
	if s.opts.SnapshotLimit <= 0 {
		return false, nil
	}
	layers, err := s.store.SnapshotLayers()
	if err != nil {
		return false, err
	}
	sizes, err := s.store.LayerSizes()
	if err != nil {
		return false, err
	}
	var total int64
	for _, id := range layers {
		total += sizes[id]
	}
	return total > s.opts.SnapshotLimit, nil
}

// holdSnapshots adds the snapshots to the holders of their images.
func (s *Service) holdSnapshots(held map[string][]string) error {
	snapshots, err := s.store.Snapshots()
	if err != nil {
		return err
	}
	for _, snap := range snapshots {
		held[snap.ImageDigest] = append(held[snap.ImageDigest], Holder(snap.Tenant, snapshotHolder+snapshot.Name(snap)))
	}
	return nil
}

// snapshotHolder precedes the name of a snapshot among the names of sandboxes.
const snapshotHolder = "snapshot "
