package store

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	bolt "go.etcd.io/bbolt"
)

// Step is the result of a build step, kept under the digest of all its inputs. Its layer is kept
// like an image's.
type Step struct {
	Tenant string    `json:"tenant,omitempty"` // empty for the daemon's own
	Key    string    `json:"key"`
	Parent string    `json:"parent,omitempty"` // chain id of the layers below
	Layer  *Layer    `json:"layer,omitempty"`  // nil if the step changed nothing
	UsedAt time.Time `json:"used_at"`
	// Created is the time in an image's configuration; zero of a step that makes a layer.
	Created time.Time `json:"created,omitzero"`
}

// ID returns the step's key in the database; see [Key].
func (s *Step) ID() string { return Key(s.Tenant, s.Key) }

// PutStep records the result of a step, and its layer as ready. Size is that of the layer's tree,
// nil if unknown.
func (s *Store) PutStep(step *Step, size *Tree) error {
	if step.Layer != nil && !s.Has(step.Layer.Blob) {
		return fmt.Errorf("keep step %s: blob %s: %w", step.Key, step.Layer.Blob.Digest, ErrNotFound)
	}
	if err := s.nameBlobs(); err != nil {
		return fmt.Errorf("keep step %s: %w", step.Key, err)
	}
	err := s.db.Update(func(tx *bolt.Tx) error {
		if l := step.Layer; l != nil {
			if err := tx.Bucket(bucketLayers).Put([]byte(l.ChainID), []byte(layerReady)); err != nil {
				return err
			}
			if size != nil {
				if err := size.put(tx, l.ChainID); err != nil {
					return err
				}
			}
		}
		value, err := json.Marshal(step)
		if err != nil {
			return err
		}
		return tx.Bucket(bucketSteps).Put([]byte(step.ID()), value)
	})
	if err != nil {
		return fmt.Errorf("keep step %s: %w", step.Key, err)
	}
	return nil
}

// Step returns a tenant's step with that key, or [ErrNotFound].
func (s *Store) Step(tenant, key string) (*Step, error) {
	var step *Step
	err := s.db.View(func(tx *bolt.Tx) error {
		value := tx.Bucket(bucketSteps).Get([]byte(Key(tenant, key)))
		if value == nil {
			return ErrNotFound
		}
		return json.Unmarshal(value, &step)
	})
	if errors.Is(err, ErrNotFound) {
		return nil, err
	} else if err != nil {
		return nil, fmt.Errorf("step %s: %w", key, err)
	}
	return step, nil
}

// Steps returns the steps of all tenants, sorted by key.
func (s *Store) Steps() ([]*Step, error) {
	var steps []*Step
	err := s.db.View(func(tx *bolt.Tx) (err error) {
		steps, err = stepsOf(tx)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list steps: %w", err)
	}
	return steps, nil
}

func stepsOf(tx *bolt.Tx) ([]*Step, error) {
	var steps []*Step
	err := tx.Bucket(bucketSteps).ForEach(func(key, value []byte) error {
		var step *Step
		if err := json.Unmarshal(value, &step); err != nil {
			return fmt.Errorf("step %s: %w", key, err)
		}
		steps = append(steps, step)
		return nil
	})
	return steps, err
}
