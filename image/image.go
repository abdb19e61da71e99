// Package image resolves a reference to a verified image and a rootfs ready to mount, for each
// tenant.
//
// It unites the parts below it: registry and archive bring images, snapshot describes those of
// sandboxes, store keeps blobs and names, layer defines the extraction. It never extracts a layer
// itself: layers are hostile input, so an [Applier] with less privilege does that, in the product
// the launcher's confined child.
package image

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/errdefs"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/image/reference"
	"github.com/sandboxd/sandboxd/image/registry"
	"github.com/sandboxd/sandboxd/image/store"
	"github.com/sandboxd/sandboxd/internal/rootfs"
)

// An Applier keeps extracted layers by their chain ids.
type Applier interface {
	// Apply extracts the blobs into the layers of their chain ids, completely and durably or not at
	// all; their content must have the requested diff ids. An existing layer stays, and its result has
	// no diff id. Concurrent requests for one layer extract it once. An error caused by a blob is of
	// the class [layer.ErrInvalid], and comes with the results of the layers below it; any other error
	// may come with fewer.
	Apply(ctx context.Context, req layer.ApplyRequest) ([]layer.Result, error)
	// RemoveLayer removes a layer. A missing one is no error.
	RemoveLayer(ctx context.Context, chainID string) error
}

// Config is the part of an image's configuration that matters to running it. All of it is
// untrusted.
type Config struct {
	Env        []string // "NAME=value"
	Entrypoint []string
	Cmd        []string
	WorkingDir string
	User       string
	StopSignal string
	Shell      []string
	Volumes    []string // places that the image names as volumes, sorted
	Health     *Health  // nil if it has no HEALTHCHECK
}

// Health is a HEALTHCHECK. Zero values are the defaults of whatever runs it.
type Health struct {
	Test                                          []string
	Interval, Timeout, StartPeriod, StartInterval time.Duration
	Retries                                       int
}

// check returns h in the form of the API; nil if there is none.
func (h *Health) check() *api.HealthCheck {
	if h == nil {
		return nil
	}
	return &api.HealthCheck{
		Test: h.Test, Interval: h.Interval.Seconds(), Timeout: h.Timeout.Seconds(),
		StartPeriod: h.StartPeriod.Seconds(), StartInterval: h.StartInterval.Seconds(), Retries: h.Retries,
	}
}

// Image is a stored image, with every layer extracted.
type Image struct {
	api.Image
	Config Config
	Rootfs rootfs.Source
}

// Service is the images of one data directory as one tenant sees them; see [Service.For]. Its
// methods may be called from several goroutines.
type Service struct {
	*state

	tenant string
}

// state is shared by the views of all tenants.
type state struct {
	store    *store.Store
	applier  Applier
	registry *registry.Client
	flights  flights

	background sync.WaitGroup     // clean-up begun by Open
	retrier    sync.WaitGroup     // later attempts of the clean-up
	stop       context.CancelFunc // ends both
	host       hostImage
	opts       Options

	ownedMu sync.Mutex
	owned   map[string]bool // see ownedContent
	ownedAt int             // revision of the store

	mu sync.Mutex
	// pins counts the requests under way that need a blob or layer, by blobKey or treeKey, or an
	// image, by its manifest's blobKey. Running pulls pin, so that one pull's failure does not remove
	// the parts that another has found, and so do sandboxes in creation. An uncompressed layer can
	// have one digest as a blob and as a tree.
	pins map[string]int
	// busy counts the same by the [store.Key] of the request's tenant: what one tenant asks for holds
	// nothing that another one sees.
	busy map[string]int
	// removing holds the blobs and layers in removal; the channel is closed at its end. Requests that
	// pin one of them wait.
	removing map[string]chan struct{}
	failed   map[string]bool                            // chain ids of layers whose removal failed, for retry
	holders  func() map[string][]string                 // see SetHolders; nil means unknown, so nothing may be collected
	removal  func(ctx context.Context, layers []string) // see OnRemoval; may be nil
	used     map[string]time.Time                       // by ID of the record, if later than the record's
	proven   map[string]int                             // content that tenants have presented; see prove
	sizes    map[string]store.Tree                      // of trees extracted since the start, by chain id
}

// Options configure a [Service]. The zero value suits tests.
type Options struct {
	// Limit is the maximum of bytes for blobs and trees of all images; the least recently used ones
	// are removed first. Zero means no limit.
	Limit int64
	// SnapshotLimit is the maximum of bytes for the files of all snapshots; the oldest ones without a
	// sandbox based on them are removed first. Zero means no limit.
	SnapshotLimit int64
	// LayersDir is the applier's directory of extracted layers, for Verify alone. If empty, Verify
	// compares no trees.
	LayersDir string
	// Registries holds the settings of particular registries.
	Registries registry.Config
	// Limits bound each image, and each snapshot together with its image, from any origin. An image
	// beyond them is refused even if its layers are stored. Zero fields are those of
	// [layer.DefaultLimits].
	Limits layer.Limits
	// The following run outside of a confined daemon. Keychain finds credentials; by default in the
	// configuration files of Docker and podman, and with the helpers that those name. Lookup resolves
	// a host; by default as the host does. HostLayer writes the layer of the host image; by default
	// [WriteHostLayer].
	Keychain  authn.Keychain
	Lookup    func(ctx context.Context, host string) ([]netip.Addr, error)
	HostLayer func(ctx context.Context, to *os.File) (hostDirs []string, err error)

	Log *slog.Logger // nil discards
}

// removeTimeout limits the clean-up after a failed pull, which continues after the caller is gone.
const removeTimeout = 30 * time.Second

// Open opens the images in dir and cleans up after interrupted pulls and removals. Their layers are
// removed in the background.
func Open(dir string, applier Applier, opts Options) (*Service, error) {
	st, err := store.Open(dir)
	if err != nil {
		return nil, err
	}
	s := &Service{state: &state{
		store: st, applier: applier, opts: opts,
		pins: make(map[string]int), busy: make(map[string]int), removing: make(map[string]chan struct{}), failed: make(map[string]bool), used: make(map[string]time.Time),
		sizes: make(map[string]store.Tree), proven: make(map[string]int),
	}}
	s.opts.Limits = s.opts.Limits.WithDefaults()
	if s.opts.Log == nil {
		s.opts.Log = slog.New(slog.DiscardHandler)
	}
	s.host.root = "/"
	s.registry = registry.NewClient(opts.Registries, s.opts.Log)
	s.registry.Lookup = opts.Lookup
	if opts.Keychain != nil {
		s.registry.Keychain = opts.Keychain
	}
	if s.opts.HostLayer == nil {
		s.opts.HostLayer = func(_ context.Context, to *os.File) ([]string, error) { return WriteHostLayer(s.host.root, to) }
	}
	pending, err := st.PendingLayers()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("clean up after interrupted pulls and removals: %w", err), st.Close())
	}
	s.cleanUp(pending)
	return s, nil
}

// retryInterval is the time between attempts to remove a layer.
const retryInterval = time.Minute

// cleanUp removes layers in the background: a large tree, or one that cannot be removed, must not
// delay the daemon's start. Requests that pin one of them wait for its removal. Failed removals are
// retried every minute, and stay pending for the next Open.
func (s *Service) cleanUp(pending []string) {
	var ctx context.Context
	ctx, s.stop = context.WithCancel(context.Background())
	s.mu.Lock()
	ends := make([]func(), 0, len(pending))
	for _, c := range pending {
		ends = append(ends, s.beginRemoval(treeKeys([]string{c})))
	}
	s.mu.Unlock()
	s.background.Go(func() {
		for i, c := range pending {
			if ctx.Err() == nil {
				s.cleanUpLayer(ctx, c)
			}
			ends[i]()
		}
	})
	s.retrier.Go(func() {
		tick := time.NewTicker(retryInterval)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				s.retry(ctx)
			case <-ctx.Done():
				return
			}
		}
	})
}

// retry removes layers whose removal failed before and that are still unused.
func (s *Service) retry(ctx context.Context) {
	for _, c := range s.failedRemovals() {
		end := s.beginRetry(c)
		if end == nil {
			continue
		}
		s.cleanUpLayer(ctx, c)
		end()
		if ctx.Err() != nil {
			return
		}
	}
}

// beginRetry is [Service.beginRemoval] for a layer of failedRemovals. It returns nil if the layer
// is pinned, or no longer pending: while others were removed, a pull may have completed it.
func (s *Service) beginRetry(chainID string) (end func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := treeKey(chainID)
	if s.pins[key] > 0 || s.removing[key] != nil {
		return nil
	}
	if pending, err := s.store.PendingLayers(); err != nil || !slices.Contains(pending, chainID) {
		return nil
	}
	return s.beginRemoval([]string{key})
}

// scheduleRetry schedules the removal of pending layers by retry.
func (s *Service) scheduleRetry(chainIDs []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range chainIDs {
		s.failed[c] = true
	}
}

// failedRemovals forgets the layers that a pull has completed since, and returns the others.
func (s *Service) failedRemovals() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.failed) == 0 {
		return nil
	}
	pending, err := s.store.PendingLayers()
	if err != nil {
		return nil // retried later
	}
	maps.DeleteFunc(s.failed, func(c string, _ bool) bool { return !slices.Contains(pending, c) })
	return slices.Sorted(maps.Keys(s.failed))
}

func (s *Service) cleanUpLayer(ctx context.Context, chainID string) {
	ctx, cancel := context.WithTimeout(ctx, sweepTimeout)
	defer cancel()
	if err := s.removeLayers(ctx, []string{chainID}); err != nil {
		s.opts.Log.Warn("clean-up after an interrupted pull or removal failed; retrying", "error", err)
	}
}

// Close waits for running work, whose callers should have been cancelled, and closes the store.
func (s *Service) Close() error {
	s.stop()
	s.background.Wait()
	s.retrier.Wait()
	s.flights.wait()
	return errors.Join(s.flushUsed(), s.store.Close())
}

// Limits returns those of [Options].
func (s *Service) Limits() layer.Limits { return s.opts.Limits }

// Get returns a stored image, without asking any registry. "host" is made on first use, and again
// after a change of the host's programs.
func (s *Service) Get(ctx context.Context, ref string) (*Image, error) {
	if ref == api.HostImage {
		return s.getHost(ctx)
	}
	r, err := s.lookup(ref)
	if err != nil {
		return nil, err
	}
	return s.image(r)
}

// lookup finds a stored image by a reference as users write it.
func (s *Service) lookup(ref string) (*store.Record, error) {
	parsed, err := reference.Parse(ref)
	if err != nil {
		return nil, err
	}
	name := reference.Normalize(parsed)
	r, err := s.store.Get(s.tenant, name)
	if errors.Is(err, store.ErrNotFound) {
		return nil, errdefs.Classf(ErrNotFound, "image %s is not stored here; pull it first: sandboxd pull %s", name, ref)
	}
	return r, err
}

// List returns the stored images sorted by reference, the host image first.
func (s *Service) List(context.Context) ([]api.Image, error) {
	records, err := s.records()
	if err != nil {
		return nil, err
	}
	sizes, err := s.store.LayerSizes()
	if err != nil {
		return nil, err
	}
	images := []api.Image{s.host.summary()}
	shares := shareOf(records, sizes)
	for _, r := range records {
		img := summary(r)
		img.SharedSize, img.UniqueSize = shares.of(r)
		images = append(images, img)
	}
	return images, nil
}

func summary(r *store.Record) api.Image {
	img := api.Image{Reference: r.Name, Digest: r.Manifest.Digest, Platform: r.Platform, Layers: len(r.Layers), PulledAt: r.PulledAt}
	for _, b := range r.Blobs() {
		img.Size += b.Size
	}
	return img
}

// healthOf returns the HEALTHCHECK of a configuration, which is Docker's extension of OCI's.
func healthOf(config []byte) (*Health, error) {
	var c struct {
		Config struct{ Healthcheck *Health }
	}
	if err := json.Unmarshal(config, &c); err != nil {
		return nil, err
	}
	return c.Config.Healthcheck, nil
}

func (s *Service) image(r *store.Record) (*Image, error) {
	data, c, err := s.readConfig(r)
	if err != nil {
		return nil, err
	}
	health, err := healthOf(data)
	if err != nil {
		return nil, errdefs.Classf(ErrInvalid, "image %s: its HEALTHCHECK cannot be read: %w", r.Name, err)
	}
	img := &Image{Image: summary(r), Config: Config{
		Env: c.Config.Env, Entrypoint: c.Config.Entrypoint, Cmd: c.Config.Cmd, WorkingDir: c.Config.WorkingDir, User: c.Config.User,
		StopSignal: c.Config.StopSignal, Shell: c.Config.Shell, Health: health, Volumes: slices.Sorted(maps.Keys(c.Config.Volumes)),
	}}
	for _, l := range r.Layers {
		img.Rootfs.Layers = append(img.Rootfs.Layers, l.ChainID)
	}
	return img, nil
}

func blobKey(digest string) string  { return "blob " + digest }
func treeKey(chainID string) string { return "tree " + chainID }

func blobKeys(digests []string) []string {
	var keys []string
	for _, d := range digests {
		keys = append(keys, blobKey(d))
	}
	return keys
}

func treeKeys(chainIDs []string) []string {
	var keys []string
	for _, c := range chainIDs {
		keys = append(keys, treeKey(c))
	}
	return keys
}

// pin keeps blobs and layers from removal until release. It waits for removals under way.
func (s *Service) pin(ctx context.Context, keys []string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		var busy chan struct{}
		for _, k := range keys {
			if busy == nil {
				busy = s.removing[k]
			}
		}
		if busy == nil {
			break
		}
		s.mu.Unlock()
		select {
		case <-busy:
		case <-ctx.Done():
		}
		s.mu.Lock()
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	s.pinLocked(keys...)
	return nil
}

// pinLocked pins at once. It needs s.mu, and that none of the keys is being removed.
func (s *Service) pinLocked(keys ...string) {
	for _, k := range keys {
		s.pins[k]++
		s.busy[store.Key(s.tenant, k)]++
	}
}

// unpin returns the pins that key makes of ids, and the ids without any pin left. It needs s.mu.
func (s *Service) unpin(ids []string, key func(string) string) (free []string) {
	for _, id := range ids {
		k := key(id)
		own := store.Key(s.tenant, k)
		if s.busy[own]--; s.busy[own] == 0 {
			delete(s.busy, own)
		}
		if s.pins[k]--; s.pins[k] == 0 {
			delete(s.pins, k)
			free = append(free, id)
		}
	}
	return free
}

// release returns pins. With discard, it removes the parts without pins that no stored image needs.
func (s *Service) release(ctx context.Context, blobs, chains []string, discard bool) error {
	s.mu.Lock()
	blobs, chains = s.unpin(blobs, blobKey), s.unpin(chains, treeKey)
	if !discard {
		s.mu.Unlock()
		return nil
	}
	pending, err := s.store.PendingLayers()
	if err != nil {
		s.mu.Unlock()
		return err
	}
	// Layers that are not pending existed before this pull, and sandboxes may run on them.
	gone := slices.DeleteFunc(chains, func(c string) bool { return !slices.Contains(pending, c) })
	end := s.beginRemoval(append(blobKeys(blobs), treeKeys(gone)...))
	s.mu.Unlock()
	defer end()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
	defer cancel()
	return errors.Join(s.removeLayers(ctx, gone), s.store.RemoveUnused(blobs))
}

// beginRemoval blocks pins of the keys until end is called. It needs s.mu, end locks it.
func (s *Service) beginRemoval(keys []string) (end func()) {
	done := make(chan struct{})
	for _, k := range keys {
		s.removing[k] = done
	}
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, k := range keys {
			delete(s.removing, k)
		}
		close(done)
	}
}

// removeLayers removes pending layers. Failed ones stay pending, for retry.
func (s *Service) removeLayers(ctx context.Context, chainIDs []string) error {
	var gone []string
	var errs []error
	for _, c := range chainIDs {
		if err := s.applier.RemoveLayer(ctx, c); err != nil {
			errs = append(errs, fmt.Errorf("remove layer %s: %w", c, err))
		} else {
			gone = append(gone, c)
		}
	}
	errs = append(errs, s.store.ForgetLayers(gone...))
	if err := errors.Join(errs...); err != nil {
		s.scheduleRetry(chainIDs) // failedRemovals forgets those that are not pending
		return err
	}
	return nil
}
