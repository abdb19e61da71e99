package store

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	bolt "go.etcd.io/bbolt"

	"github.com/sandboxd/sandboxd/internal/rootfs"
)

// ErrExists is the class of errors about a name that a snapshot has already.
var ErrExists = errors.New("snapshot exists")

// layerSnapshot is the state of a layer that is a snapshot's: it has no blob, and is kept as long as a snapshot or a sandbox
// stands on it.
const layerSnapshot = "snapshot"

// Snapshot is what a sandbox was at one time: the layers that it stood on, and one more of what it had changed itself.
type Snapshot struct {
	Tenant      string            `json:"tenant,omitempty"` // empty for the daemon's own
	ID          string            `json:"id"`
	Name        string            `json:"name,omitempty"` // unique, also among ids
	Comment     string            `json:"comment,omitempty"`
	Labels      map[string]string `json:"labels,omitempty"`
	Sandbox     string            `json:"sandbox,omitempty"`      // id of the one that it was taken of
	SandboxName string            `json:"sandbox_name,omitempty"` // at that time
	Image       string            `json:"image"`                  // as the sandbox was asked for
	ImageDigest string            `json:"image_digest"`
	Rootfs      rootfs.Source     `json:"rootfs"`
	ImageEnv    []string          `json:"image_env,omitempty"` // the image's, when the sandbox was created
	Env         []string          `json:"env,omitempty"`       // the sandbox's own
	Cwd         string            `json:"cwd"`
	User        string            `json:"user"`
	Profile     string            `json:"profile"`
	CreatedAt   time.Time         `json:"created_at"`
	ImportedAt  time.Time         `json:"imported_at,omitzero"` // zero if it was taken here
	Size        int64             `json:"size"`                 // bytes of files in its own layer
	Entries     int64             `json:"entries"`              // files, directories and deletions in its own layer
	Consistent  bool              `json:"consistent"`
}

// KeepSnapshot records layers of snapshots, with the sizes of their trees by chain id, and the snapshot itself unless that is
// nil: then the layers are kept by the sandboxes that stand on them alone. All is there when it returns, or nothing. A name
// that is taken is [ErrExists].
func (s *Store) KeepSnapshot(sizes map[string]Tree, snap *Snapshot) error {
	err := s.db.Update(func(tx *bolt.Tx) error {
		for id, size := range sizes {
			if err := tx.Bucket(bucketLayers).Put([]byte(id), []byte(layerSnapshot)); err != nil {
				return err
			}
			if err := size.put(tx, id); err != nil {
				return err
			}
		}
		if snap == nil {
			return nil
		}
		all, err := snapshotsOf(tx)
		if err != nil {
			return err
		}
		for _, o := range all {
			if o.ID == snap.ID || snap.Name != "" && (o.Name == snap.Name || o.ID == snap.Name) || o.Name == snap.ID {
				return fmt.Errorf("%w: %q is %s", ErrExists, snap.Name, o.ID)
			}
		}
		value, err := json.Marshal(snap)
		if err != nil {
			return err
		}
		return tx.Bucket(bucketSnapshots).Put([]byte(snap.ID), value)
	})
	if err != nil {
		return fmt.Errorf("record snapshot: %w", err)
	}
	return nil
}

// Snapshot finds one by its id or name, or is [ErrNotFound].
func (s *Store) Snapshot(ref string) (*Snapshot, error) {
	all, err := s.Snapshots()
	if err != nil {
		return nil, err
	}
	for _, snap := range all {
		if snap.ID == ref || snap.Name != "" && snap.Name == ref {
			return snap, nil
		}
	}
	return nil, fmt.Errorf("snapshot %q: %w", ref, ErrNotFound)
}

// Snapshots returns all of them, oldest first.
func (s *Store) Snapshots() ([]*Snapshot, error) {
	var all []*Snapshot
	err := s.db.View(func(tx *bolt.Tx) (err error) {
		all, err = snapshotsOf(tx)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list snapshots: %w", err)
	}
	slices.SortStableFunc(all, func(a, b *Snapshot) int { return a.CreatedAt.Compare(b.CreatedAt) })
	return all, nil
}

func snapshotsOf(tx *bolt.Tx) ([]*Snapshot, error) {
	var all []*Snapshot
	err := tx.Bucket(bucketSnapshots).ForEach(func(id, value []byte) error {
		var snap *Snapshot
		if err := json.Unmarshal(value, &snap); err != nil {
			return fmt.Errorf("snapshot %s: %w", id, err)
		}
		all = append(all, snap)
		return nil
	})
	return all, err
}

// SnapshotLayers are the chain ids of all layers that are snapshots', whether one needs them still or not.
func (s *Store) SnapshotLayers() ([]string, error) {
	var out []string
	err := s.db.View(func(tx *bolt.Tx) error {
		return tx.Bucket(bucketLayers).ForEach(func(chainID, state []byte) error {
			if string(state) == layerSnapshot {
				out = append(out, string(chainID))
			}
			return nil
		})
	})
	if err != nil {
		return nil, fmt.Errorf("list layers of snapshots: %w", err)
	}
	return out, nil
}
