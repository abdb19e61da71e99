// Package image leads from a reference to a verified image and a rootfs ready to mount.
//
// It speaks to registries, checks every digest and size, and keeps blobs and names in an image/store. It never
// extracts anything itself: layers are hostile input, so an [Applier] with less power does that, which in the product
// is the launcher's confined child.
package image

import (
	"context"
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
	// Apply extracts the blobs into the layers of their chain ids, completely and durably or not at all; their content must
	// have the diff ids that are asked for. A layer that exists is left alone, and its result then has no diff id. A layer that
	// is asked for by several is extracted once. An error that a blob is to blame for is of the class [layer.ErrInvalid], and
	// comes with the results of the layers below it; any other one may come with less than that.
	Apply(ctx context.Context, req layer.ApplyRequest) ([]layer.Result, error)
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
	registry *registry.Client
	flights  flights

	background sync.WaitGroup     // the clean-up that Open begins
	retrier    sync.WaitGroup     // who goes on with it
	stop       context.CancelFunc // ends both
	host       hostImage
	opts       Options

	mu sync.Mutex
	// pins counts who needs a blob or layer just now, by blobKey or treeKey, or an image, by its manifest's: running
	// pulls, so that one pull's failure does not take away what another has found, and sandboxes that are being created.
	// A layer that is not compressed can have one digest as a blob and as a tree.
	pins map[string]int
	// going are the blobs and layers that are being removed; the channel is closed when that is over. Who wants to pin
	// one of them waits.
	going   map[string]chan struct{}
	left    map[string]bool                            // chain ids of layers that could not be removed, for retry
	holders func() map[string][]string                 // see SetHolders; nil: unknown, nothing may be collected
	removal func(ctx context.Context, layers []string) // see OnRemoval; nil: nobody is told
	used    map[string]time.Time                       // of images by name, where it is later than what is stored
	sizes   map[string]store.Tree                      // of the trees that were extracted here, by chain id
}

// Options configure a [Service]. The zero value is what tests want.
type Options struct {
	// Limit is how many bytes blobs and trees of all images may have before the least recently used ones are removed;
	// 0: any number.
	Limit int64
	// SnapshotLimit is how many bytes the files of all snapshots may have before the oldest ones that no sandbox stands on are
	// removed; 0: any number.
	SnapshotLimit int64
	// LayersDir is where the applier keeps extracted layers. Verify alone looks there; empty: it compares no trees.
	LayersDir string
	// Registries holds the settings of particular registries.
	Registries registry.Config
	// Limits bound each image, and each snapshot with the image that it stands on, however it comes here: an image that is beyond
	// them is refused, be its layers there already or not. Zero fields are those of [layer.DefaultLimits].
	Limits layer.Limits
	// What a daemon that has confined itself has done for it outside. Keychain finds credentials; default: the configuration files of
	// Docker and podman, and the helpers that they name. Lookup finds the addresses of a host; default: as the host does. HostLayer
	// writes the layer of the host image; default: [WriteHostLayer].
	Keychain  authn.Keychain
	Lookup    func(ctx context.Context, host string) ([]netip.Addr, error)
	HostLayer func(ctx context.Context, to *os.File) (hostDirs []string, err error)

	Log *slog.Logger // default: discarded
}

// removeTimeout bounds the clean-up after a failed pull, which goes on after the caller has given up.
const removeTimeout = 30 * time.Second

// Open opens the images in dir and cleans up what interrupted pulls and removals left there. What they left with the
// applier is removed in the background.
func Open(dir string, applier Applier, opts Options) (*Service, error) {
	st, err := store.Open(dir)
	if err != nil {
		return nil, err
	}
	s := &Service{
		store: st, applier: applier, opts: opts,
		pins: make(map[string]int), going: make(map[string]chan struct{}), left: make(map[string]bool), used: make(map[string]time.Time), sizes: make(map[string]store.Tree),
	}
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

// retryEvery is how long a layer that could not be removed waits for the next attempt.
const retryEvery = time.Minute

// cleanUp removes layers in the background: a large tree, or one that cannot be removed, must not keep the daemon from
// starting. Whoever wants to pin one of them waits for it. What is left is tried again every minute, and stays pending for the next
// Open.
func (s *Service) cleanUp(pending []string) {
	var ctx context.Context
	ctx, s.stop = context.WithCancel(context.Background())
	s.mu.Lock()
	settle := make([]func(), 0, len(pending))
	for _, c := range pending {
		settle = append(settle, s.depart(treeKeys([]string{c})))
	}
	s.mu.Unlock()
	s.background.Go(func() {
		for i, c := range pending {
			if ctx.Err() == nil {
				s.cleanUpLayer(ctx, c)
			}
			settle[i]()
		}
	})
	s.retrier.Go(func() {
		tick := time.NewTicker(retryEvery)
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

// retry removes layers that could not be removed before, and that nobody has begun to use since.
func (s *Service) retry(ctx context.Context) {
	for _, c := range s.leftLayers() {
		settle := s.departLeft(c)
		if settle == nil {
			continue
		}
		s.cleanUpLayer(ctx, c)
		settle()
		if ctx.Err() != nil {
			return
		}
	}
}

// departLeft is [Service.depart] for a layer of leftLayers, or nil where somebody has it or it is not pending by now: to remove
// those before it takes its time, in which a pull may have completed it.
func (s *Service) departLeft(chainID string) (settle func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := treeKey(chainID)
	if s.pins[key] > 0 || s.going[key] != nil {
		return nil
	}
	if pending, err := s.store.PendingLayers(); err != nil || !slices.Contains(pending, chainID) {
		return nil
	}
	return s.depart([]string{key})
}

// leave has layers that are pending removed by retry.
func (s *Service) leave(chainIDs []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range chainIDs {
		s.left[c] = true
	}
}

// leftLayers forgets those that a pull has completed since, and returns the others.
func (s *Service) leftLayers() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.left) == 0 {
		return nil
	}
	pending, err := s.store.PendingLayers()
	if err != nil {
		return nil // the next time
	}
	maps.DeleteFunc(s.left, func(c string, _ bool) bool { return !slices.Contains(pending, c) })
	return slices.Sorted(maps.Keys(s.left))
}

func (s *Service) cleanUpLayer(ctx context.Context, chainID string) {
	ctx, cancel := context.WithTimeout(ctx, sweepTimeout)
	defer cancel()
	if err := s.removeLayers(ctx, []string{chainID}); err != nil {
		s.opts.Log.Warn("what an interrupted pull or removal left could not be cleaned up, trying again", "error", err)
	}
}

// Close waits for work under way, whose callers should have been cancelled, and closes the store.
func (s *Service) Close() error {
	s.stop()
	s.background.Wait()
	s.retrier.Wait()
	s.flights.wait()
	return errors.Join(s.flushUsed(), s.store.Close())
}

// Limits are those of [Options].
func (s *Service) Limits() layer.Limits { return s.opts.Limits }

// Get returns an image that is stored, without asking any registry. "host" is made on first use, and anew after the
// host's own programs have changed.
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

// lookup finds a stored image by a reference as people write it.
func (s *Service) lookup(ref string) (*store.Record, error) {
	parsed, err := reference.Parse(ref)
	if err != nil {
		return nil, err
	}
	name := reference.Normalize(parsed)
	r, err := s.store.Get(name)
	if errors.Is(err, store.ErrNotFound) {
		return nil, errdefs.Classf(ErrNotFound, "image %s is not stored here; pull it first: sandboxd pull %s", name, ref)
	}
	return r, err
}

// List returns the stored images sorted by reference, the host image first.
func (s *Service) List(context.Context) ([]api.Image, error) {
	records, err := s.store.List()
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
	c, err := s.configFile(r)
	if err != nil {
		return nil, err
	}
	img := &Image{Image: summary(r), Config: Config{
		Env: c.Config.Env, Entrypoint: c.Config.Entrypoint, Cmd: c.Config.Cmd, WorkingDir: c.Config.WorkingDir, User: c.Config.User,
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

// pin keeps blobs and layers from being cleaned up until release. What is just being removed it lets go first.
func (s *Service) pin(ctx context.Context, keys []string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		var busy chan struct{}
		for _, k := range keys {
			if busy == nil {
				busy = s.going[k]
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
	for _, k := range keys {
		s.pins[k]++
	}
	return nil
}

// unpin gives back the pins that key makes of ids and returns those of the ids that nobody pins any more. It needs s.mu.
func (s *Service) unpin(ids []string, key func(string) string) (free []string) {
	for _, id := range ids {
		k := key(id)
		if s.pins[k]--; s.pins[k] == 0 {
			delete(s.pins, k)
			free = append(free, id)
		}
	}
	return free
}

// release gives back pins. With discard, what nobody else pins and no stored image needs is removed.
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
	// Layers that are not pending were there before this pull, and sandboxes may run on them.
	gone := slices.DeleteFunc(chains, func(c string) bool { return !slices.Contains(pending, c) })
	settle := s.depart(append(blobKeys(blobs), treeKeys(gone)...))
	s.mu.Unlock()
	defer settle()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
	defer cancel()
	return errors.Join(s.removeLayers(ctx, gone), s.store.RemoveUnused(blobs))
}

// depart makes whoever wants to pin one of the keys wait until settle is called. It needs s.mu, settle takes it.
func (s *Service) depart(keys []string) (settle func()) {
	done := make(chan struct{})
	for _, k := range keys {
		s.going[k] = done
	}
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, k := range keys {
			delete(s.going, k)
		}
		close(done)
	}
}

// removeLayers removes layers that are pending. Those that cannot be removed stay so, for retry.
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
		s.leave(chainIDs) // one that is gone is not pending, and leftLayers forgets it
		return err
	}
	return nil
}
