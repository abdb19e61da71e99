package service

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"time"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/sandboxd/sandboxd/image/build"
)

// created returns the time for the configuration of an image. If all steps of the build are cached,
// it is that of the first such image: a rebuild of nothing new has the digest of the last, and
// leaves no image behind.
func (b *builder) created(st *built, img *build.Image) (time.Time, error) {
	if b.epoch != "" {
		return b.stamp.Now, nil
	}
	undated := *img // with all layers
	undated.Created, undated.History = nil, b.dated(img.History, nil)
	data, err := json.Marshal(&undated)
	if err != nil {
		return time.Time{}, fmt.Errorf("encode configuration: %w", err)
	}
	sum := sha256.Sum256(data)
	key := "image:" + hex.EncodeToString(sum[:])
	if !b.anew {
		if at, err := b.draft.Created(key); err != nil || !at.IsZero() {
			return at, err
		}
	}
	return b.stamp.Now, b.draft.RememberCreated(key, st.chain(), b.stamp.Now)
}

// dated returns a history in which the entries of this build have another time.
func (b *builder) dated(history []ocispec.History, at *time.Time) []ocispec.History {
	out := make([]ocispec.History, 0, len(history))
	for _, h := range history {
		if h.Created != nil && h.Created.Equal(b.stamp.Now) {
			h.Created = at
		}
		out = append(out, h)
	}
	return out
}
