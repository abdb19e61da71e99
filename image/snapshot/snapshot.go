// Package snapshot reads and judges the records of snapshots, and exports and imports snapshots as
// files. Their layers and records are kept by image/store; package image takes and removes them.
package snapshot

import (
	"cmp"
	"crypto/rand"
	"errors"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/store"
)

// The classes of errors of snapshots.
var (
	ErrNotFound = errors.New("no such snapshot")
	ErrExists   = store.ErrExists // the name is taken
)

// NewID returns a new random id.
func NewID() string {
	const alphabet = "abcdefghjkmnpqrstuvwxyz023456789"
	var b [12]byte
	_, _ = rand.Read(b[:]) // since Go 1.24 it never fails
	for i := range b {
		b[i] = alphabet[b[i]%32]
	}
	return string(b[:])
}

// Name returns the name of a snapshot, or its id if it has none.
func Name(snap *store.Snapshot) string { return cmp.Or(snap.Name, snap.ID) }

// Top returns the chain id of the snapshot's own layer.
func Top(snap *store.Snapshot) string { return snap.Rootfs.Layers[len(snap.Rootfs.Layers)-1] }

// Summary returns the API's view of a snapshot. Sizes are the bytes of layers' files by chain id.
func Summary(snap *store.Snapshot, sizes map[string]int64) api.Snapshot {
	out := api.Snapshot{
		ID: snap.ID, Name: snap.Name, Comment: snap.Comment, Labels: snap.Labels, Sandbox: snap.Sandbox, SandboxName: snap.SandboxName,
		Image: snap.Image, ImageDigest: snap.ImageDigest, Layers: len(snap.Rootfs.Snapshots), CreatedAt: snap.CreatedAt,
		Size: snap.Size, Entries: snap.Entries, Consistent: snap.Consistent, Network: snap.Network,
	}
	for i, id := range snap.Rootfs.Taken() {
		if i < len(snap.Rootfs.Snapshots)-1 {
			out.SharedSize += sizes[id]
		}
	}
	return out
}

// Expired returns the snapshots that were taken or imported before a time, that have all the
// labels, and that are neither in use nor labelled [api.LabelKeep].
func Expired(all []*store.Snapshot, before time.Time, labels map[string]string, inUse func(*store.Snapshot) bool) []*store.Snapshot {
	var out []*store.Snapshot
	for _, snap := range all {
		if snap.CreatedAt.Before(before) && snap.ImportedAt.Before(before) && !api.Kept(snap.Labels) && hasLabels(snap.Labels, labels) && !inUse(snap) {
			out = append(out, snap)
		}
	}
	return out
}

func hasLabels(labels, wanted map[string]string) bool {
	for k, v := range wanted {
		if got, ok := labels[k]; !ok || got != v {
			return false
		}
	}
	return true
}

// Excess returns the ids of the snapshots to remove, so that the files of all others have at most
// limit bytes, and the bytes that are left. It takes the oldest of the tenant with most bytes, so
// that a tenant with many evicts no smaller one's. It keeps snapshots that are in use or labelled
// [api.LabelKeep]. All must be sorted, oldest first.
func Excess(all []*store.Snapshot, sizes map[string]int64, limit int64, inUse func(*store.Snapshot) bool) (ids []string, left int64) {
	all = slices.Clone(all)
	total := func() (of map[string]int64, n int64) {
		of = make(map[string]int64)
		seen := make(map[string]bool)
		for _, snap := range all {
			for _, id := range snap.Rootfs.Taken() {
				if !seen[id] {
					seen[id] = true
					of[snap.Tenant] += sizes[id]
					n += sizes[id]
				}
			}
		}
		return of, n
	}
	for {
		of, left := total()
		next := -1
		for i, snap := range all {
			if (next < 0 || of[snap.Tenant] > of[all[next].Tenant]) && !api.Kept(snap.Labels) && !inUse(snap) {
				next = i
			}
		}
		if left <= limit || next < 0 {
			return ids, left
		}
		ids = append(ids, all[next].ID)
		all = slices.Delete(all, next, next+1)
	}
}
