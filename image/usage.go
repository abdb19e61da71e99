package image

import (
	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/store"
)

// Usage is the disk space of a tenant's objects, each blob and tree counted once.
type Usage struct{ Images, Steps, Snapshots api.DiskShare }

// Usage returns the disk space of the tenant's images, build steps and snapshots. What is shared
// with another tenant counts for each of them.
func (s *Service) Usage() (u Usage, err error) {
	records, err := s.records()
	if err != nil {
		return u, err
	}
	steps, err := s.store.Steps()
	if err != nil {
		return u, err
	}
	snapshots, err := s.snapshots()
	if err != nil {
		return u, err
	}
	sizes, err := s.store.LayerSizes()
	if err != nil {
		return u, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	held, err := s.heldLocked()
	if err != nil {
		return u, err
	}

	var active []*store.Record
	digests, activeDigests := make(map[string]bool), make(map[string]bool)
	for _, r := range records {
		digests[r.Manifest.Digest] = true
		if len(s.ownHolders(held[r.Manifest.Digest])) > 0 {
			active, activeDigests[r.Manifest.Digest] = append(active, r), true
		}
	}
	all := shareOf(records, sizes)
	u.Images = api.DiskShare{Count: len(digests), Active: len(activeDigests), Bytes: all.total, Reclaimable: all.total - shareOf(active, sizes).total}

	counted := make(map[string]bool) // by blobKey and treeKey
	add := func(to *int64, key string, size int64) {
		if all.users[key] == 0 && !counted[key] {
			counted[key] = true
			*to += size
		}
	}
	for _, step := range steps {
		if step.Tenant != s.tenant {
			continue
		}
		u.Steps.Count++
		if l := step.Layer; l != nil {
			add(&u.Steps.Bytes, blobKey(l.Blob.Digest), l.Blob.Size)
			add(&u.Steps.Bytes, treeKey(l.ChainID), sizes[l.ChainID])
		}
	}
	u.Steps.Reclaimable = u.Steps.Bytes

	var used int64
	for _, inUse := range []bool{true, false} { // a layer that one in use needs stays
		for _, snap := range snapshots {
			if s.inUse(snap, held) != inUse {
				continue
			}
			for _, id := range snap.Rootfs.Taken() {
				add(&u.Snapshots.Bytes, treeKey(id), sizes[id])
			}
			if u.Snapshots.Count++; inUse {
				u.Snapshots.Active++
			}
		}
		if inUse {
			used = u.Snapshots.Bytes
		}
	}
	u.Snapshots.Reclaimable = u.Snapshots.Bytes - used
	return u, nil
}
