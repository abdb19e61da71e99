package store

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	bolt "go.etcd.io/bbolt"
)

// usedBlobs returns the digests of the blobs that images and steps need.
func usedBlobs(records []*Record, steps []*Step) map[string]bool {
	used := make(map[string]bool)
	for _, r := range records {
		for _, b := range r.Blobs() {
			used[b.Digest] = true
		}
	}
	for _, step := range steps {
		if step.Layer != nil {
			used[step.Layer.Blob.Digest] = true
		}
	}
	return used
}

func (s *Store) usedBlobs() (map[string]bool, error) {
	records, err := s.List()
	if err != nil {
		return nil, err
	}
	steps, err := s.Steps()
	if err != nil {
		return nil, err
	}
	return usedBlobs(records, steps), nil
}

// Repository returns a normalized reference without its tag or digest.
func Repository(name string) string {
	name, _, _ = strings.Cut(name, "@")
	if i := strings.LastIndexByte(name, ':'); i > strings.LastIndexByte(name, '/') {
		name = name[:i]
	}
	return name
}

// untag records r under repository@digest, unless its tenant has another name for the manifest.
func untag(images *bolt.Bucket, r *Record) error {
	tagged := false
	err := images.ForEach(func(key, value []byte) error {
		var other Record
		if err := json.Unmarshal(value, &other); err != nil {
			return fmt.Errorf("record of %s: %w", key, err)
		}
		tagged = tagged || other.Tenant == r.Tenant && other.Manifest.Digest == r.Manifest.Digest && other.Name != r.Name
		return nil
	})
	if err != nil || tagged {
		return err
	}
	moved := *r
	moved.Name, moved.Untagged = Repository(r.Name)+"@"+r.Manifest.Digest, true
	value, err := json.Marshal(&moved)
	if err != nil {
		return err
	}
	return images.Put([]byte(moved.ID()), value)
}

// Garbage is everything that no image needs any more.
type Garbage struct {
	Layers []string // chain ids; they are recorded as pending, so that the next Open resumes an interrupted removal
	Blobs  []string // digests; Open removes the rest of them
	Bytes  int64    // sum of both
}

// Collect removes the names of the [Key]s in drop, the steps of the keys in forget and the
// snapshots of the ids in discard, and makes the names in untagged untagged. It returns the layers,
// by chain id, and blobs, by digest, that no image, step or snapshot needs then and that keepLayer
// and keepBlob do not keep.
//
// Names and steps are removed durably when it returns. The caller then removes the trees and blobs,
// with [Store.ForgetLayers] and [Store.RemoveUnused] in this order. [Store.WriteIndex] comes last:
// it needs disk space, of which there may be none before.
func (s *Store) Collect(drop, untagged, forget, discard []string, keepLayer, keepBlob func(id string) bool) (Garbage, error) {
	var g Garbage
	err := s.db.Update(func(tx *bolt.Tx) error {
		g = Garbage{} // bbolt may call this again
		images, layers := tx.Bucket(bucketImages), tx.Bucket(bucketLayers)
		for _, name := range untagged {
			r, err := recordOf(images, name)
			if err != nil {
				return err
			}
			if r == nil {
				continue
			}
			if err := images.Delete([]byte(name)); err != nil {
				return err
			}
			if err := untag(images, r); err != nil {
				return err
			}
		}
		for _, name := range drop {
			if err := images.Delete([]byte(name)); err != nil {
				return err
			}
		}
		for _, key := range forget {
			if err := tx.Bucket(bucketSteps).Delete([]byte(key)); err != nil {
				return err
			}
		}
		for _, id := range discard {
			if err := tx.Bucket(bucketSnapshots).Delete([]byte(id)); err != nil {
				return err
			}
		}
		var left []*Record
		needed := make(map[string]bool)
		steps, err := stepsOf(tx)
		if err != nil {
			return err
		}
		for _, step := range steps {
			if step.Layer != nil {
				needed[step.Layer.ChainID] = true
			}
		}
		snapshots, err := snapshotsOf(tx)
		if err != nil {
			return err
		}
		for _, snap := range snapshots {
			for _, id := range snap.Rootfs.Layers {
				needed[id] = true
			}
		}
		err = images.ForEach(func(name, value []byte) error {
			var r Record
			if err := json.Unmarshal(value, &r); err != nil {
				return fmt.Errorf("record of %s: %w", name, err)
			}
			left = append(left, &r)
			for _, l := range r.Layers {
				needed[l.ChainID] = true
			}
			return nil
		})
		if err != nil {
			return err
		}
		err = layers.ForEach(func(chainID, _ []byte) error {
			if id := string(chainID); !needed[id] && !keepLayer(id) {
				g.Layers = append(g.Layers, id)
			}
			return nil
		})
		if err != nil {
			return err
		}
		// Not within ForEach, during which the bucket must not change.
		for _, id := range g.Layers {
			size, _ := parseTree(tx.Bucket(bucketSizes).Get([]byte(id))) // 0 if unknown
			g.Bytes += size.Bytes
			if err := layers.Put([]byte(id), []byte(layerPending)); err != nil {
				return err
			}
		}
		used := usedBlobs(left, steps)
		names, err := readDir(s.layout, blobDir)
		if err != nil {
			return err
		}
		for _, name := range names {
			digest := "sha256:" + name
			if used[digest] || keepBlob(digest) {
				continue
			}
			if fi, err := s.layout.Lstat(blobDir + "/" + name); err == nil {
				g.Bytes += fi.Size()
			}
			g.Blobs = append(g.Blobs, digest)
		}
		return nil
	})
	if err != nil {
		return Garbage{}, fmt.Errorf("collect images: %w", err)
	}
	return g, nil
}

// LayerSizes returns the known bytes of layers' files, by chain id.
func (s *Store) LayerSizes() (map[string]int64, error) {
	trees, err := s.Trees()
	if err != nil {
		return nil, err
	}
	sizes := make(map[string]int64, len(trees))
	for id, t := range trees {
		sizes[id] = t.Bytes
	}
	return sizes, nil
}

// Trees returns the known sizes of layers, by chain id.
func (s *Store) Trees() (map[string]Tree, error) {
	trees := make(map[string]Tree)
	err := s.db.View(func(tx *bolt.Tx) error {
		return tx.Bucket(bucketSizes).ForEach(func(chainID, value []byte) error {
			t, err := parseTree(value)
			if err != nil {
				return fmt.Errorf("size of layer %s: %w", chainID, err)
			}
			trees[string(chainID)] = t
			return nil
		})
	})
	if err != nil {
		return nil, fmt.Errorf("list sizes of layers: %w", err)
	}
	return trees, nil
}

// Layers returns the chain ids of all recorded layers, needed or not.
func (s *Store) Layers() ([]string, error) {
	var out []string
	err := s.db.View(func(tx *bolt.Tx) error {
		return tx.Bucket(bucketLayers).ForEach(func(chainID, _ []byte) error {
			out = append(out, string(chainID))
			return nil
		})
	})
	if err != nil {
		return nil, fmt.Errorf("list layers: %w", err)
	}
	return out, nil
}

// recordOf returns the record of a key, nil if there is none.
func recordOf(images *bolt.Bucket, name string) (*Record, error) {
	value := images.Get([]byte(name))
	if value == nil {
		return nil, nil //nolint:nilnil // as a bucket has it
	}
	r := new(Record)
	if err := json.Unmarshal(value, r); err != nil {
		return nil, fmt.Errorf("record of %s: %w", name, err)
	}
	return r, nil
}

// SetUsed records the last use of images, by [Key]. Removed images are ignored.
func (s *Store) SetUsed(used map[string]time.Time) error {
	if len(used) == 0 {
		return nil
	}
	err := s.db.Update(func(tx *bolt.Tx) error {
		images := tx.Bucket(bucketImages)
		for name, at := range used {
			r, err := recordOf(images, name)
			if err != nil {
				return err
			}
			if r == nil {
				continue
			}
			if !at.After(r.UsedAt) {
				continue
			}
			r.UsedAt = at
			value, err := json.Marshal(r)
			if err != nil {
				return err
			}
			if err := images.Put([]byte(name), value); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("note the use of images: %w", err)
	}
	return nil
}

// Verify reads a stored blob and compares size and digest with the descriptor. A difference is
// [ErrMismatch], a missing blob [ErrNotFound].
func (s *Store) Verify(ctx context.Context, b Blob) (err error) {
	f, err := s.OpenBlob(b.Digest)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }() // only read
	hash := sha256.New()
	n, err := io.Copy(hash, &ctxReader{ctx, f})
	switch got := "sha256:" + hex.EncodeToString(hash.Sum(nil)); {
	case err != nil:
		return fmt.Errorf("read blob %s: %w", b.Digest, err)
	case n != b.Size:
		return fmt.Errorf("blob %s: %w: it has %d bytes, its descriptor says %d", b.Digest, ErrMismatch, n, b.Size)
	case got != b.Digest:
		return fmt.Errorf("blob %s: %w: its digest is %s", b.Digest, ErrMismatch, got)
	}
	return nil
}

// WithContext returns a reader of r that fails after the end of the context.
func WithContext(ctx context.Context, r io.Reader) io.Reader { return &ctxReader{ctx, r} }
