// Package archive imports images from OCI layouts, docker save's archives and root file systems,
// and exports stored images as such archives.
//
// Archives are hostile input: their files become blobs in a [Staging], and no name in them is ever
// used as a path.
package archive

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/sandboxd/sandboxd/image/errdefs"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/image/store"
)

// Staging stores the blobs of images that have no names yet, and keeps them from collection. It is
// for one goroutine.
type Staging struct {
	Store  *store.Store
	Limits layer.Limits
	Left   int64    // bytes left for further files
	Pinned []string // digests of the blobs, for the caller to unpin

	pin func(ctx context.Context, digest string) error
}

// NewStaging returns a staging area in a store. Pin keeps a blob from collection; it is called
// before the blob is in its place.
func NewStaging(st *store.Store, limits layer.Limits, pin func(ctx context.Context, digest string) error) *Staging {
	return &Staging{Store: st, Limits: limits, Left: limits.Bytes, pin: pin}
}

// add stores the bytes of r as a blob.
func (s *Staging) add(ctx context.Context, r io.Reader, limit int64) (store.Blob, error) {
	return s.Store.AddBlob(ctx, r, limit, func(digest string) error {
		if err := s.pin(ctx, digest); err != nil {
			return err
		}
		s.Pinned = append(s.Pinned, digest)
		return nil
	})
}

// layerType detects the media type of a stored layer.
func (s *Staging) layerType(b store.Blob) (string, error) {
	f, err := s.Store.OpenBlob(b.Digest)
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }() // only read
	begin := make([]byte, 512)
	n, err := io.ReadFull(f, begin)
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return "", fmt.Errorf("read blob %s: %w", b.Digest, err)
	}
	media, err := layer.MediaType(begin[:n])
	if err != nil {
		return "", Invalidf("layer %s: %w", b.Digest, err)
	}
	return media, nil
}

// Manifest makes and stores the manifest of an image whose other blobs are stored, and returns its
// digest.
func (s *Staging) Manifest(ctx context.Context, config store.Blob, layers []store.Blob) (string, error) {
	m := v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1, Layers: []v1.Descriptor{}}
	var err error
	if m.Config, err = Descriptor(config); err != nil {
		return "", err
	}
	for _, l := range layers {
		d, err := Descriptor(l)
		if err != nil {
			return "", err
		}
		m.Layers = append(m.Layers, d)
	}
	return s.AddJSON(ctx, m)
}

// AddJSON stores v as JSON and returns the blob's digest.
func (s *Staging) AddJSON(ctx context.Context, v any) (string, error) {
	data, err := json.Marshal(v)
	if err != nil {
		return "", fmt.Errorf("encode: %w", err)
	}
	b, err := s.AddDocument(ctx, data)
	return b.Digest, err
}

// AddDocument stores a manifest or configuration.
func (s *Staging) AddDocument(ctx context.Context, data []byte) (store.Blob, error) {
	if len(data) > store.MaxDocument { // possible although its parts are smaller
		return store.Blob{}, errdefs.Classf(errdefs.ErrInvalid, "the image would have a manifest or configuration of %d bytes, %d are allowed", len(data), store.MaxDocument)
	}
	return s.add(ctx, bytes.NewReader(data), store.MaxDocument)
}

// Descriptor returns the descriptor of a stored blob.
func Descriptor(b store.Blob) (v1.Descriptor, error) {
	digest, err := v1.NewHash(b.Digest)
	if err != nil {
		return v1.Descriptor{}, fmt.Errorf("blob %s: %w", b.Digest, err)
	}
	return v1.Descriptor{MediaType: types.MediaType(b.MediaType), Digest: digest, Size: b.Size}, nil
}

// plain returns a stored layer without its compression, which is valid until done is called.
func (s *Staging) plain(ctx context.Context, b store.Blob, limits layer.Limits) (_ *layer.Uncompressed, done func(), err error) {
	f, err := s.Store.OpenBlob(b.Digest)
	if err != nil {
		return nil, nil, err
	}
	plain, err := layer.Uncompress(store.WithContext(ctx, f), b.MediaType, limits)
	if err != nil {
		_ = f.Close() // only read
		return nil, nil, Invalidf("%w", err)
	}
	return plain, func() {
		plain.Close()
		_ = f.Close()
	}, nil
}

// DiffID returns the digest of a stored layer without its compression.
func (s *Staging) DiffID(ctx context.Context, b store.Blob, limits layer.Limits) (string, error) {
	plain, done, err := s.plain(ctx, b, limits)
	if err != nil {
		return "", err
	}
	defer done()
	id, err := plain.DiffID()
	if errors.Is(err, layer.ErrInvalid) {
		return "", Invalidf("%w", err)
	}
	return id, err
}

// Pack stores the layer that write writes, compressed. Write should stop when its writer fails or
// its context ends. Its error is returned unchanged, unless it only follows from an error of
// storing.
func (s *Staging) Pack(ctx context.Context, write func(context.Context, io.Writer) error) (store.Blob, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r, w := io.Pipe()
	written := make(chan error, 1)
	go func() {
		zip := layer.NewCompressor(w) // equal streams give equal blobs
		err := write(ctx, zip)
		if err == nil {
			err = zip.Close()
		}
		_ = w.CloseWithError(err) // always nil; no error is io.EOF
		written <- err
	}()
	b, err := s.add(ctx, r, s.Left)
	_ = r.Close() // always nil; ends an unfinished write
	if err != nil {
		cancel()
	}
	if werr := <-written; werr != nil && (err == nil || errors.Is(err, werr)) {
		return store.Blob{}, werr
	}
	if errors.Is(err, store.ErrMismatch) {
		err = errdefs.Classf(errdefs.ErrInvalid, "%w", layer.ExceededBytes.Errorf("it has more than %d bytes", s.Left))
	}
	if err != nil {
		return store.Blob{}, fmt.Errorf("store the layer: %w", err)
	}
	return b, nil
}
