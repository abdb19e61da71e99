package store

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	bolt "go.etcd.io/bbolt"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/rootfs"
)

// ErrExists is the class of errors about a snapshot's name that is taken.
var ErrExists = errors.New("snapshot exists")

// layerSnapshot is the state of a snapshot's layer: it has no blob, and is kept while a snapshot or
// a sandbox is based on it.
const layerSnapshot = "snapshot"

// Snapshot is the state of a sandbox at one time: the layers below it, and one layer of its own
// changes.
type Snapshot struct {
	Tenant      string            `json:"tenant,omitempty"` // empty for the daemon's own
	ID          string            `json:"id"`
	Name        string            `json:"name,omitempty"` // unique in the tenant, also among ids
	Comment     string            `json:"comment,omitempty"`
	Labels      map[string]string `json:"labels,omitempty"`
	Sandbox     string            `json:"sandbox,omitempty"`      // id of its sandbox
	SandboxName string            `json:"sandbox_name,omitempty"` // at that time
	Image       string            `json:"image"`                  // as in the sandbox's request
	ImageDigest string            `json:"image_digest"`
	Rootfs      rootfs.Source     `json:"rootfs"`
	ImageEnv    []string          `json:"image_env,omitempty"` // the image's, when the sandbox was created
	Env         []string          `json:"env,omitempty"`       // the sandbox's own
	Cwd         string            `json:"cwd"`
	User        string            `json:"user"`
	Profile     string            `json:"profile"`
	Network     api.Network       `json:"network,omitzero"`
	CreatedAt   time.Time         `json:"created_at"`
	ImportedAt  time.Time         `json:"imported_at,omitzero"` // zero if it was taken here
	Size        int64             `json:"size"`                 // bytes of files in its own layer
	Entries     int64             `json:"entries"`              // files, directories and deletions in its own layer
	Consistent  bool              `json:"consistent"`
}

// KeepSnapshot records layers of snapshots, with the sizes of their trees by chain id, and the
// snapshot itself unless it is nil: then only the sandboxes based on the layers keep them. It
// records all or nothing. A taken name is [ErrExists].
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
			named := o.Tenant == snap.Tenant && (snap.Name != "" && (o.Name == snap.Name || o.ID == snap.Name) || o.Name == snap.ID)
			if o.ID == snap.ID || named {
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

// Snapshot returns a tenant's snapshot of that id or name, or [ErrNotFound].
func (s *Store) Snapshot(tenant, ref string) (*Snapshot, error) {
	all, err := s.Snapshots()
	if err != nil {
		return nil, err
	}
	for _, snap := range all {
		if snap.Tenant == tenant && (snap.ID == ref || snap.Name != "" && snap.Name == ref) {
			return snap, nil
		}
	}
	return nil, fmt.Errorf("snapshot %q: %w", ref, ErrNotFound)
}

// Snapshots returns the snapshots of all tenants, oldest first.
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

// SnapshotLayers returns the chain ids of all layers of snapshots, needed or not.
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
