package image

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/archive"
	"github.com/sandboxd/sandboxd/image/errdefs"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/image/reference"
	"github.com/sandboxd/sandboxd/image/store"
)

// Draft is an image in the making, layer by layer. Its parts stay until Close, whatever is pruned
// meanwhile; after that only those that an image or the cache of steps needs. A draft is for one
// goroutine.
type Draft struct {
	service  *Service
	platform v1.Platform
	names    []name.Reference
	staging  *archive.Staging // of pinned blobs
	chains   []string         // pinned
	sizes    map[string]store.Tree
	done     bool // the image is stored
}

// Layer is one layer of a draft.
type Layer = store.Layer

// Base is an image for a draft to start from.
type Base struct {
	Digest string // of its manifest
	Config []byte
	Layers []Layer
}

// Draft starts an image for a platform, empty for this host's, with these names. Without names the
// image is untagged. Programs of other platforms cannot run here, so the platform must suit the
// host.
func (s *Service) Draft(want string, names []string) (*Draft, error) {
	p, err := reference.ParsePlatform(want)
	if err != nil {
		return nil, err
	}
	if host, _ := reference.ParsePlatform(""); !reference.Suits(p, host) {
		return nil, errdefs.Classf(ErrReference, "platform %s: programs of a build run on this host, which is %s", p, host)
	}
	var refs []name.Reference
	for _, n := range names {
		ref, err := reference.ParseTag(n)
		if err != nil {
			return nil, err
		}
		refs = append(refs, ref)
	}
	return &Draft{
		service: s, platform: p, names: refs, sizes: make(map[string]store.Tree),
		staging: s.staging(),
	}, nil
}

// Platform returns the target platform.
func (d *Draft) Platform() v1.Platform { return d.platform }

// Close releases the draft's parts and removes those that no image and no step needs. If no image
// was committed, it enforces the limit: the cached steps count.
func (d *Draft) Close(ctx context.Context) error {
	err := d.service.release(ctx, d.staging.Pinned, d.chains, true)
	if !d.done {
		if lerr := d.service.Enforce(ctx); lerr != nil {
			d.service.opts.Log.Warn("the limit of images could not be kept to", "error", lerr)
		}
	}
	return err
}

// pin keeps stored layers and their trees from removal.
func (d *Draft) pin(ctx context.Context, layers []Layer) error {
	for _, l := range layers {
		if err := d.service.pin(ctx, []string{blobKey(l.Blob.Digest), treeKey(l.ChainID)}); err != nil {
			return err
		}
		d.staging.Pinned, d.chains = append(d.staging.Pinned, l.Blob.Digest), append(d.chains, l.ChainID)
	}
	return nil
}

// Base returns a stored image, or pulls it if it is not stored.
func (d *Draft) Base(ctx context.Context, ref string, progress func(api.PullEvent)) (*Base, error) {
	s := d.service
	if ref == api.HostImage {
		return nil, errdefs.Classf(ErrReference, "the image %q shows this host's own /usr, which cannot become part of an image; use another", ref)
	}
	_, r, release, err := s.acquireRecord(ctx, ref)
	if errors.Is(err, ErrNotFound) {
		if _, err := s.Pull(ctx, ref, PullOptions{Platform: d.platform.String(), Progress: progress}); err != nil {
			return nil, err
		}
		_, r, release, err = s.acquireRecord(ctx, ref)
	}
	if err != nil {
		return nil, err
	}
	defer release()
	if have, err := v1.ParsePlatform(r.Platform); err == nil && !reference.Suits(*have, d.platform) {
		return nil, errdefs.Classf(ErrInvalid, "image %s is for %s, not for %s", r.Name, r.Platform, d.platform)
	}
	config, err := s.store.ReadBlob(r.Config.Digest, store.MaxDocument)
	if err != nil {
		return nil, errdefs.Classf(ErrInvalid, "image %s: its stored configuration cannot be read: %w; pull it anew", r.Name, err)
	}
	return &Base{Digest: r.Manifest.Digest, Config: config, Layers: r.Layers}, d.pin(ctx, r.Layers)
}

// TempFile makes a file without a name.
func (d *Draft) TempFile() (*os.File, error) { return d.service.store.TempFile() }

// Open opens a layer without its compression.
func (d *Draft) Open(ctx context.Context, l Layer) (io.ReadCloser, error) {
	f, err := d.service.store.OpenBlob(l.Blob.Digest)
	if err != nil {
		return nil, err
	}
	u, err := layer.Uncompress(store.WithContext(ctx, f), l.Blob.MediaType, layer.NoLimits())
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &plainLayer{u, f}, nil
}

type plainLayer struct {
	*layer.Uncompressed
	f *os.File
}

func (p *plainLayer) Close() error {
	p.Uncompressed.Close()
	return p.f.Close()
}

// Step returns the layer that a step with that key has made, nil if it changed nothing, and whether
// the step is cached.
func (d *Draft) Step(ctx context.Context, key string) (*Layer, bool, error) {
	s := d.service
	step, err := s.store.Step(s.tenant, key)
	if errors.Is(err, store.ErrNotFound) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, err
	}
	if l := step.Layer; l != nil {
		if err := d.pin(ctx, []Layer{*l}); err != nil {
			return nil, false, err
		}
	}
	// Before the pin, the step may have been forgotten and its layer removed.
	if step, err = s.store.Step(s.tenant, key); errors.Is(err, store.ErrNotFound) || err == nil && step.Layer != nil && !s.store.Has(step.Layer.Blob) {
		return nil, false, nil
	} else if err != nil {
		return nil, false, err
	}
	step.UsedAt = time.Now().UTC()
	return step.Layer, true, s.store.PutStep(step, nil)
}

// Remember caches the result of a step on top of the chain id parent for later steps with that key.
func (d *Draft) Remember(key, parent string, l *Layer) error {
	var size *store.Tree
	if l != nil {
		if t, ok := d.sizes[l.ChainID]; ok {
			size = &t
		}
	}
	return d.service.store.PutStep(&store.Step{Tenant: d.service.tenant, Key: key, Parent: parent, Layer: l, UsedAt: time.Now().UTC()}, size)
}

// Created returns the time at which an image with that key was made, zero if it is not known.
func (d *Draft) Created(key string) (time.Time, error) {
	s := d.service
	step, err := s.store.Step(s.tenant, key)
	if errors.Is(err, store.ErrNotFound) {
		return time.Time{}, nil
	}
	if err != nil {
		return time.Time{}, err
	}
	step.UsedAt = time.Now().UTC()
	return step.Created, s.store.PutStep(step, nil)
}

// RememberCreated keeps the time at which an image with that key was made, for builds that find all
// of its steps cached. Parent is the chain id of its layers.
func (d *Draft) RememberCreated(key, parent string, at time.Time) error {
	return d.service.store.PutStep(&store.Step{Tenant: d.service.tenant, Key: key, Parent: parent, UsedAt: time.Now().UTC(), Created: at}, nil)
}

// AddLayer stores the tar stream that write writes as a layer on top of the others and has it
// extracted, with the checks of a pulled layer: it may come from a sandbox. Write should stop when
// its writer fails.
func (d *Draft) AddLayer(ctx context.Context, below []Layer, write func(io.Writer) error) (*Layer, error) {
	if len(below) >= store.MaxLayers {
		return nil, errdefs.Classf(ErrInvalid, "the image has more than %d layers", store.MaxLayers)
	}
	plain := &limitedWriter{left: d.staging.Left, most: d.service.opts.Limits.Bytes}
	b, err := d.staging.Pack(ctx, func(_ context.Context, w io.Writer) error {
		plain.w = w
		return write(plain)
	})
	d.staging.Left = plain.left // of all layers together
	if err != nil {
		return nil, err
	}
	b.MediaType = string(types.OCILayer)
	l := Layer{Blob: b}
	if l.DiffID, err = d.staging.DiffID(ctx, b, d.service.opts.Limits.AnyRatio()); err != nil {
		return nil, err
	}
	parent := ""
	var parents []string
	for _, p := range below {
		parents = append(parents, p.ChainID)
		parent = p.ChainID
	}
	l.ChainID = chainID(parent, l.DiffID)
	if err := d.pin(ctx, []Layer{l}); err != nil {
		return nil, err
	}
	return &l, d.extract(ctx, l, parents)
}

// limitedWriter is a writer that accepts a limited number of bytes.
type limitedWriter struct {
	w    io.Writer
	left int64
	most int64 // the whole limit, for messages
}

func (a *limitedWriter) Write(p []byte) (int, error) {
	if int64(len(p)) > a.left {
		return 0, errdefs.Classf(ErrInvalid, "%w", layer.ExceededBytes.Errorf("the layers of the build have more than %d bytes", a.most))
	}
	a.left -= int64(len(p))
	return a.w.Write(p)
}

func (d *Draft) extract(ctx context.Context, l Layer, parents []string) error {
	s := d.service
	_, err := s.extract(ctx, []store.Layer{l}, parents, func(store.Layer) bool { return true })
	if errors.Is(err, layer.ErrInvalid) {
		return errdefs.Classf(ErrInvalid, "layer: %w", err)
	} else if err != nil {
		return fmt.Errorf("extract layer: %w", err)
	}
	s.mu.Lock()
	if n, ok := s.sizes[l.ChainID]; ok {
		d.sizes[l.ChainID] = n
	}
	s.mu.Unlock()
	return nil
}

// Commit stores the image with these layers and this configuration, whose root file system is
// filled in.
func (d *Draft) Commit(ctx context.Context, config any, layers []Layer) (*Image, error) {
	s, refs := d.service, d.names
	data, err := json.Marshal(config)
	if err != nil {
		return nil, fmt.Errorf("encode configuration: %w", err)
	}
	b, err := d.staging.AddDocument(ctx, data)
	if err != nil {
		return nil, err
	}
	b.MediaType = string(types.OCIConfigJSON)
	var blobs []store.Blob
	for _, l := range layers {
		blobs = append(blobs, l.Blob)
	}
	digest, err := d.staging.Manifest(ctx, b, blobs)
	if err != nil {
		return nil, err
	}
	if len(refs) == 0 {
		ref, err := reference.Parse(unnamed + "@" + digest)
		if err != nil {
			return nil, err
		}
		refs = []name.Reference{ref}
	}
	p := &pull{service: s, ref: refs[0], want: d.platform, origin: s.archived(d.staging, digest), staging: d.staging}
	ready, err := p.run(ctx)
	if err != nil {
		return nil, err
	}
	ready.Untagged = len(d.names) == 0
	for _, ref := range refs[1:] {
		ready.names = append(ready.names, reference.Normalize(ref))
	}
	images, err := s.record(ctx, []*prepared{ready})
	if err != nil {
		return nil, err
	}
	d.done = true
	return images[0], nil
}

// unnamed is the repository of images that were built without a name.
const unnamed = "localhost/build"
