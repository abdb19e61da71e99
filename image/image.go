// Package image leads from a reference to a verified image and a rootfs ready to mount.
//
// It speaks to registries, checks every digest and size, and keeps blobs and names in an image/store. It never
// extracts anything itself: layers are hostile input, so an [Applier] with less power does that, which in the product
// is the launcher's confined child.
package image

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/image/store"
	"github.com/sandboxd/sandboxd/internal/rootfs"
)

// An Applier keeps extracted layers by their chain ids.
type Applier interface {
	// Apply extracts the blob into the layer of that chain id, completely and durably or not at all; its content must
	// have the diff id that is asked for. A layer that exists is left alone, and the result may then be empty. An error
	// that the blob is to blame for is of the class [layer.ErrInvalid].
	Apply(ctx context.Context, req layer.ApplyRequest) (layer.Result, error)
	// RemoveLayer removes a layer. One that does not exist is no error.
	RemoveLayer(ctx context.Context, chainID string) error
}

// Config is the part of an image's configuration that matters to running it. All of it was written by whoever made the
// image.
type Config struct {
	Env        []string // "NAME=value"
	Entrypoint []string
	Cmd        []string
	WorkingDir string
	User       string
}

// Image is an image that is stored, with every layer extracted.
type Image struct {
	api.Image
	Config Config
	Rootfs rootfs.Source
}

// Service is the images of one data directory. Its methods may be called from several goroutines.
type Service struct {
	store    *store.Store
	applier  Applier
	keychain authn.Keychain
	backoff  remote.Backoff // between attempts after errors that may pass
	flights  flights
	host     hostImage

	mu sync.Mutex
	// pins counts the running pulls that need a blob or layer, by digest or chain id, so that one pull's failure does
	// not take away what another has found.
	pins map[string]int
}

// removeTimeout bounds the clean-up after a failed pull, which goes on after the caller has given up.
const removeTimeout = 30 * time.Second

// Open opens the images in dir and cleans up what interrupted pulls left there and with the applier.
func Open(dir string, applier Applier) (*Service, error) {
	st, err := store.Open(dir)
	if err != nil {
		return nil, err
	}
	s := &Service{
		store: st, applier: applier, keychain: authn.DefaultKeychain, pins: make(map[string]int),
		backoff: remote.Backoff{Duration: 500 * time.Millisecond, Factor: 3, Jitter: 0.1, Steps: 3},
	}
	s.host.root = "/"
	ctx, cancel := context.WithTimeout(context.Background(), removeTimeout)
	defer cancel()
	pending, err := st.PendingLayers()
	if err == nil {
		err = s.removeLayers(ctx, pending)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("clean up after interrupted pulls: %w", err), st.Close())
	}
	return s, nil
}

// Close waits for work under way, whose callers should have been cancelled, and closes the store.
func (s *Service) Close() error {
	s.flights.wait()
	return s.store.Close()
}

// Get returns an image that is stored, without asking any registry. "host" is made on first use, and anew after the
// host's own programs have changed.
func (s *Service) Get(ctx context.Context, ref string) (*Image, error) {
	if ref == api.HostImage {
		return s.getHost(ctx)
	}
	parsed, err := parse(ref)
	if err != nil {
		return nil, err
	}
	name := normalised(parsed)
	r, err := s.store.Get(name)
	if errors.Is(err, store.ErrNotFound) {
		return nil, classf(ErrNotFound, "image %s is not stored here; pull it first: sandboxd pull %s", name, ref)
	} else if err != nil {
		return nil, err
	}
	return s.image(r)
}

// List returns the stored images sorted by reference, the host image first.
func (s *Service) List(context.Context) ([]api.Image, error) {
	records, err := s.store.List()
	if err != nil {
		return nil, err
	}
	images := []api.Image{s.host.summary()}
	for _, r := range records {
		images = append(images, summary(r))
	}
	return images, nil
}

// LayerUsers returns, for each chain id that a stored image needs, the references of those images.
func (s *Service) LayerUsers() (map[string][]string, error) { return s.store.LayerUsers() }

func summary(r *store.Record) api.Image {
	img := api.Image{Reference: r.Name, Digest: r.Manifest.Digest, Platform: r.Platform, Layers: len(r.Layers), PulledAt: r.PulledAt}
	for _, b := range r.Blobs() {
		img.Size += b.Size
	}
	return img
}

func (s *Service) image(r *store.Record) (*Image, error) {
	data, err := s.store.ReadBlob(r.Config.Digest, maxDocument)
	if err != nil {
		return nil, classf(ErrInvalid, "image %s: its stored configuration cannot be read: %w; pull it anew", r.Name, err)
	}
	c, err := v1.ParseConfigFile(bytes.NewReader(data))
	if err != nil {
		return nil, classf(ErrInvalid, "image %s: its stored configuration cannot be read: %w; pull it anew", r.Name, err)
	}
	img := &Image{Image: summary(r), Config: Config{
		Env: c.Config.Env, Entrypoint: c.Config.Entrypoint, Cmd: c.Config.Cmd, WorkingDir: c.Config.WorkingDir, User: c.Config.User,
	}}
	for _, l := range r.Layers {
		img.Rootfs.Layers = append(img.Rootfs.Layers, l.ChainID)
	}
	return img, nil
}

// pin keeps blobs and layers from being cleaned up until release.
func (s *Service) pin(keys []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range keys {
		s.pins[k]++
	}
}

// release gives back pins. With discard, what nobody else pins and no stored image needs is removed.
func (s *Service) release(ctx context.Context, blobs, chains []string, discard bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	free := func(keys []string) (out []string) {
		for _, k := range keys {
			if s.pins[k]--; s.pins[k] == 0 {
				delete(s.pins, k)
				out = append(out, k)
			}
		}
		return out
	}
	blobs, chains = free(blobs), free(chains)
	if !discard {
		return nil
	}
	// With the lock held: a pull that begins now waits, and then does not find what is going away.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
	defer cancel()
	errs = append(errs, s.store.RemoveUnused(blobs))
	pending, err := s.store.PendingLayers()
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	isPending := make(map[string]bool, len(pending))
	for _, c := range pending {
		isPending[c] = true
	}
	var gone []string
	for _, c := range chains {
		// Layers that are not pending were there before this pull, and sandboxes may run on them.
		if isPending[c] {
			gone = append(gone, c)
		}
	}
	return errors.Join(append(errs, s.removeLayers(ctx, gone))...)
}

// removeLayers removes layers whose pull has failed. What cannot be removed stays pending for the next Open.
func (s *Service) removeLayers(ctx context.Context, chains []string) error {
	var errs []error
	for _, c := range chains {
		err := s.applier.RemoveLayer(ctx, c)
		if err == nil {
			err = s.store.ForgetLayer(c)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("remove layer %s: %w", c, err))
		}
	}
	return errors.Join(errs...)
}
