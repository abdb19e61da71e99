package image

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/errdefs"
	"github.com/sandboxd/sandboxd/image/reference"
	"github.com/sandboxd/sandboxd/image/store"
)

// SetHolders sets the function that returns the holders of images: names of sandboxes, as [Holder]
// returns them, by the digest of their image and by the chain ids of their snapshots' layers. The
// sandboxes' own records are authoritative, so neither a crash nor a restart leaves a holder
// without a sandbox or a sandbox without a holder. Nothing is collected before the first call. F
// must not call the service.
func (s *Service) SetHolders(f func() map[string][]string) {
	s.mu.Lock()
	s.holders = f
	s.mu.Unlock()
}

// OnRemoval sets a function that is called with the chain ids of layers that no image and no
// sandbox needs, before their removal. Images of them cannot be acquired until f, and the removal,
// have ended. F must not call the service.
func (s *Service) OnRemoval(f func(ctx context.Context, layers []string)) {
	s.mu.Lock()
	s.removal = f
	s.mu.Unlock()
}

// Acquire is [Service.Get] for an image for a new sandbox: it is not removed before release is
// called. The caller releases it when the holders include the sandbox, or its creation has failed.
func (s *Service) Acquire(ctx context.Context, ref string) (_ *Image, release func(), err error) {
	for {
		img, err := s.Get(ctx, ref)
		if err != nil {
			return nil, nil, err
		}
		s.mu.Lock()
		// It may have been removed, or replaced, before s.mu was locked.
		if s.currentLocked(img) {
			s.pinLocked(blobKey(img.Digest))
			if img.Reference != api.HostImage {
				s.used[store.Key(s.tenant, img.Reference)] = time.Now().UTC()
			}
			s.mu.Unlock()
			return img, func() {
				s.mu.Lock()
				defer s.mu.Unlock()
				s.unpin([]string{img.Digest}, blobKey)
			}, nil
		}
		s.mu.Unlock()
		if err := ctx.Err(); err != nil {
			return nil, nil, err
		}
	}
}

// acquireRecord is [Service.Acquire] with the record of the image.
func (s *Service) acquireRecord(ctx context.Context, ref string) (*Image, *store.Record, func(), error) {
	for {
		img, release, err := s.Acquire(ctx, ref)
		if err != nil {
			return nil, nil, nil, err
		}
		r, err := s.store.Get(s.tenant, img.Reference)
		if err == nil && r.Manifest.Digest == img.Digest {
			return img, r, release, nil
		}
		release()
		if err != nil && !errors.Is(err, store.ErrNotFound) {
			return nil, nil, nil, err
		}
		// Its name has moved to another image, or was removed, which Acquire reports.
	}
}

func (s *Service) currentLocked(img *Image) bool {
	if img.Reference == api.HostImage {
		return s.host.digest() == img.Digest && s.removing[treeKey(img.Digest)] == nil
	}
	r, err := s.store.Get(s.tenant, img.Reference)
	return err == nil && r.Manifest.Digest == img.Digest
}

func (h *hostImage) digest() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.image == nil {
		return ""
	}
	return h.image.Digest
}

// busy is the name of requests under way among the holders of an image.
const busy = "a request under way"

// heldLocked returns the holders of images that must stay, by digest.
func (s *Service) heldLocked() (map[string][]string, error) {
	if s.holders == nil {
		return nil, errors.New("the images of the sandboxes are not known yet")
	}
	held := s.holders()
	if err := s.holdSnapshots(held); err != nil {
		return nil, err
	}
	for key := range s.busy {
		tenant, pin := splitKey(key)
		if digest, ok := strings.CutPrefix(pin, blobKey("")); ok {
			held[digest] = append(held[digest], Holder(tenant, busy))
		}
	}
	return held, nil
}

// choice lists the objects to remove.
type choice struct {
	drop   []*store.Record
	untag  []*store.Record // lose their names; sandboxes hold the images
	forget []string        // IDs of build steps

	discard []string // ids of snapshots
}

func recordIDs(records []*store.Record) (ids []string) {
	for _, r := range records {
		ids = append(ids, r.ID())
	}
	return ids
}

func recordNames(records []*store.Record) []string {
	names := make([]string, len(records))
	for i, r := range records {
		names[i] = r.Name
	}
	return names
}

// chooser makes the choice. Held has the holders of images.
type chooser func(records []*store.Record, steps []*store.Step, held map[string][]string) (choice, error)

// sweep removes the objects that choose returns, and everything that no image and no build step
// needs after that.
//
// When ctx ends, the removal stops after the current tree.
//
// With strays, layers that belonged to no image even before are removed too: those of outdated host
// images.
func (s *Service) sweep(ctx context.Context, strays bool, choose chooser) (api.ImagesRemoved, error) {
	// On a full disk neither this nor the index can be written, and then removal matters most.
	if err := s.flushUsed(); err != nil {
		s.opts.Log.Warn("the last use of images could not be noted", "error", err)
	}
	g, out, endRemoval, err := s.plan(strays, choose)
	if err != nil {
		return api.ImagesRemoved{}, err
	}
	defer endRemoval()
	// The names are gone and the layers are recorded as pending, so Open finishes the removal after a
	// crash.
	removal, cancel := context.WithTimeout(context.WithoutCancel(ctx), sweepTimeout)
	defer cancel()
	s.mu.Lock()
	notify := s.removal
	s.mu.Unlock()
	if notify != nil && len(g.Layers) > 0 {
		notify(removal, g.Layers)
	}
	var errs []error
	for i, c := range g.Layers {
		if ctx.Err() != nil {
			errs = append(errs, context.Cause(ctx))
			s.scheduleRetry(g.Layers[i:])
			break
		}
		errs = append(errs, s.removeLayers(removal, []string{c}))
	}
	err = errors.Join(append(errs, s.store.RemoveUnused(g.Blobs))...)
	if ierr := s.store.WriteIndex(); ierr != nil {
		s.opts.Log.Warn("the index of the image store is out of date until the next change", "error", ierr)
	}
	if err != nil {
		return out, fmt.Errorf("remove unused layers and blobs: %w; the daemon retries in a minute", err)
	}
	return out, nil
}

// sweepTimeout limits the removal of trees. The removal of one tree continues after the caller is
// gone: half a tree is useless.
const sweepTimeout = 10 * time.Minute

// plan is the part of a sweep that blocks acquisition: some milliseconds.
func (s *Service) plan(strays bool, choose chooser) (store.Garbage, api.ImagesRemoved, func(), error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fail := func(err error) (store.Garbage, api.ImagesRemoved, func(), error) {
		return store.Garbage{}, api.ImagesRemoved{}, nil, err
	}
	held, err := s.heldLocked()
	if err != nil {
		return fail(err)
	}
	records, err := s.store.List()
	if err != nil {
		return fail(err)
	}
	steps, err := s.store.Steps()
	if err != nil {
		return fail(err)
	}
	snapshots, err := s.snapshots()
	if err != nil {
		return fail(err)
	}
	chosen, err := choose(records, steps, held)
	if err != nil {
		return fail(err)
	}
	keepLayer, err := s.keepLocked(records, held, strays)
	if err != nil {
		return fail(err)
	}
	parts := heldParts(records, held)
	keepBlob := func(digest string) bool {
		return s.pins[blobKey(digest)] > 0 || s.removing[blobKey(digest)] != nil || held[digest] != nil || parts[blobKey(digest)]
	}
	g, err := s.store.Collect(recordIDs(chosen.drop), recordIDs(chosen.untag), chosen.forget, chosen.discard, keepLayer, keepBlob)
	if err != nil {
		return fail(err)
	}
	for _, c := range g.Layers {
		delete(s.sizes, c)
	}
	bytes := g.Bytes
	if s.tenant != "" {
		if bytes, err = s.ownBytes(records, steps, snapshots, held, &chosen); err != nil {
			s.opts.Log.Warn("the size of removed objects is unknown", "tenant", s.tenant, "error", err) // they are gone
		}
	}
	out := api.ImagesRemoved{
		Removed: recordNames(chosen.drop), Untagged: recordNames(chosen.untag), Steps: len(chosen.forget), Bytes: bytes,
	}
	return g, out, s.beginRemoval(append(treeKeys(g.Layers), blobKeys(g.Blobs)...)), nil
}

// heldParts returns the blobs and layers of the images that have holders, by blobKey and treeKey.
// They stay although the last name of such an image goes.
func heldParts(records []*store.Record, held map[string][]string) map[string]bool {
	parts := make(map[string]bool)
	for _, r := range records {
		if len(held[r.Manifest.Digest]) == 0 {
			continue
		}
		for _, b := range r.Blobs() {
			parts[blobKey(b.Digest)] = true
		}
		for _, l := range r.Layers {
			parts[treeKey(l.ChainID)] = true
		}
	}
	return parts
}

// ownBytes returns the bytes of the tenant's objects that the choice removes. Whether the disk
// loses them depends on the other tenants, which the number of freed bytes would tell of.
func (s *Service) ownBytes(records []*store.Record, steps []*store.Step, snapshots []*Snapshot, held map[string][]string, chosen *choice) (int64, error) {
	sizes, err := s.store.LayerSizes()
	if err != nil {
		return 0, err
	}
	records = s.ownRecords(records)
	total := func(dropped *choice) (n int64) {
		counted := make(map[string]bool)
		add := func(key string, size int64) {
			if !counted[key] {
				counted[key] = true
				n += size
			}
		}
		for _, r := range records {
			if slices.Contains(dropped.drop, r) {
				continue
			}
			for _, b := range r.Blobs() {
				add(blobKey(b.Digest), b.Size)
			}
			for _, l := range r.Layers {
				add(treeKey(l.ChainID), sizes[l.ChainID])
			}
		}
		for _, step := range steps {
			if l := step.Layer; l != nil && step.Tenant == s.tenant && !slices.Contains(dropped.forget, step.ID()) {
				add(blobKey(l.Blob.Digest), l.Blob.Size)
				add(treeKey(l.ChainID), sizes[l.ChainID])
			}
		}
		for _, snap := range snapshots {
			for _, id := range snap.Rootfs.Taken() {
				if !slices.Contains(dropped.discard, snap.ID) || len(s.ownHolders(held[id])) > 0 {
					add(treeKey(id), sizes[id])
				}
			}
		}
		return n
	}
	return total(new(choice)) - total(chosen), nil
}

// keepLocked returns a predicate for needed layers without an image: those of pulls under way, of
// the host image, and of older host images below sandboxes.
func (s *Service) keepLocked(records []*store.Record, held map[string][]string, strays bool) (func(string) bool, error) {
	host := s.host.digest()
	stray := make(map[string]bool)
	// "" holds sandboxes of an old daemon that did not record the digest of the host image: any layer
	// without an image may be theirs.
	if _, unknown := held[""]; unknown || !strays {
		all, err := s.store.Layers()
		if err != nil {
			return nil, err
		}
		for _, c := range all {
			stray[c] = true
		}
		for _, r := range records {
			for _, l := range r.Layers {
				delete(stray, l.ChainID)
			}
		}
		// The records of sandboxes name the snapshots' layers below them.
		taken, err := s.store.SnapshotLayers()
		if err != nil {
			return nil, err
		}
		for _, c := range taken {
			delete(stray, c)
		}
	}
	parts := heldParts(records, held)
	return func(id string) bool {
		return s.pins[treeKey(id)] > 0 || s.removing[treeKey(id)] != nil || held[id] != nil || id == host || stray[id] || parts[treeKey(id)]
	}, nil
}

// flushUsed writes the last uses since its last call. A crash loses them: they only determine the
// order of removal.
func (s *Service) flushUsed() error {
	s.mu.Lock()
	used := maps.Clone(s.used)
	s.mu.Unlock()
	return s.store.SetUsed(used)
}

// Remove removes the name of an image, and the image itself if it has no other. An image that a
// sandbox holds is refused. With force it loses its name, and a later Prune removes it when the
// sandbox is gone.
func (s *Service) Remove(ctx context.Context, ref string, force bool) (api.ImagesRemoved, error) {
	if ref == api.HostImage {
		return api.ImagesRemoved{}, errdefs.Classf(ErrReference, "the image %q is made of this host's own programs and takes no room to speak of; it cannot be removed", ref)
	}
	r, err := s.lookup(ref)
	if errors.Is(err, ErrNotFound) {
		return api.ImagesRemoved{}, errdefs.Classf(ErrNotFound, "image %s is not stored here; sandboxd images lists the stored ones", ref)
	} else if err != nil {
		return api.ImagesRemoved{}, err
	}
	// It continues after the caller is gone.
	return s.sweep(context.WithoutCancel(ctx), false, func(records []*store.Record, _ []*store.Step, held map[string][]string) (choice, error) {
		records = s.ownRecords(records)
		i := slices.IndexFunc(records, func(o *store.Record) bool { return o.Name == r.Name })
		if i < 0 {
			return choice{}, errdefs.Classf(ErrNotFound, "image %s is not stored here any more", r.Name)
		}
		r := records[i]
		holders := s.ownHolders(held[r.Manifest.Digest])
		others := slices.ContainsFunc(records, func(o *store.Record) bool { return o.Name != r.Name && o.Manifest.Digest == r.Manifest.Digest })
		switch {
		case len(holders) == 0 || others:
			return choice{drop: []*store.Record{r}}, nil
		case force && !r.Untagged && !strings.Contains(r.Name, "@"):
			return choice{untag: []*store.Record{r}}, nil
		}
		holders = slices.DeleteFunc(slices.Clone(holders), func(h string) bool { return h == busy })
		if len(holders) == 0 {
			return choice{}, errdefs.Classf(ErrInUse, "image %s is needed by %s; try again when that is over", r.Name, busy)
		}
		slices.Sort(holders)
		return choice{}, errdefs.Classf(ErrInUse, "image %s is held by %s; delete that first: %s", r.Name, strings.Join(holders, ", "), remedy(holders))
	})
}

// remedy returns the commands that delete sandboxes and snapshots.
func remedy(holders []string) string {
	var sandboxes, snapshots, commands []string
	for _, h := range holders {
		if name, ok := strings.CutPrefix(h, snapshotHolder); ok {
			snapshots = append(snapshots, name)
		} else {
			sandboxes = append(sandboxes, h)
		}
	}
	if sandboxes != nil {
		commands = append(commands, "sandboxd rm "+strings.Join(sandboxes, " "))
	}
	if snapshots != nil {
		commands = append(commands, "sandboxd snapshots rm "+strings.Join(snapshots, " "))
	}
	return strings.Join(commands, "; ")
}

// Prune removes images without holders: those whose tag has moved on, or with all every one. It
// also removes the cache of builds, and layers and blobs that no image needs.
func (s *Service) Prune(ctx context.Context, all bool) (api.ImagesRemoved, error) {
	return s.sweep(context.WithoutCancel(ctx), true, func(records []*store.Record, steps []*store.Step, held map[string][]string) (c choice, _ error) {
		for _, r := range s.ownRecords(records) {
			if (all || r.Untagged) && len(s.ownHolders(held[r.Manifest.Digest])) == 0 {
				c.drop = append(c.drop, r)
			}
		}
		for _, step := range steps {
			if step.Tenant == s.tenant {
				c.forget = append(c.forget, step.ID())
			}
		}
		return c, nil
	})
}

// Tag gives a stored image one more name. An image that has the name loses it.
func (s *Service) Tag(ctx context.Context, source, target string) (*Image, error) {
	if source == api.HostImage || target == api.HostImage {
		return nil, errdefs.Classf(ErrReference, "%q is this host's own image; it has one name, and no other image has it", api.HostImage)
	}
	parsed, err := reference.Parse(target)
	if err != nil {
		return nil, err
	}
	name := reference.Normalize(parsed)
	if strings.Contains(name, "@") {
		return nil, errdefs.Classf(ErrReference, "%q is a digest; give a tag like %s:1.0", target, store.Repository(name))
	}
	img, release, err := s.Acquire(ctx, source)
	if err != nil {
		return nil, err
	}
	defer release()
	r, err := s.store.Get(s.tenant, img.Reference)
	if err != nil {
		return nil, err
	}
	if r.Name == name {
		return img, nil
	}
	tagged := *r
	tagged.Name, tagged.Untagged = name, false
	if err := s.store.Put(nil, &tagged); err != nil {
		return nil, err
	}
	return s.image(&tagged)
}

// Enforce keeps to the limit of bytes. It removes cached build steps first, and then images with
// all the names that their tenant has for them: the least recently used of the tenant with most
// bytes, so that a tenant with many evicts no smaller one's. It keeps images with holders. An image
// is used when one of its names is. When ctx ends, the next Open removes the remaining trees.
func (s *Service) Enforce(ctx context.Context) error {
	if s.opts.Limit <= 0 {
		return nil
	}
	sizes, err := s.store.LayerSizes()
	if err != nil {
		return err
	}
	var left int64
	removed, err := s.sweep(ctx, true, func(records []*store.Record, steps []*store.Step, held map[string][]string) (c choice, _ error) {
		images := shareOf(records, sizes)
		left = images.total
		c.forget, left = excessSteps(steps, images, s.opts.Limit-left, left)
		for left > s.opts.Limit {
			tenant, digest, found := nextEvicted(records, sizes, held)
			if !found {
				break
			}
			var stay []*store.Record
			for _, r := range records {
				if r.Tenant == tenant && r.Manifest.Digest == digest {
					c.drop = append(c.drop, r)
				} else {
					stay = append(stay, r)
				}
			}
			records, left = stay, shareOf(stay, sizes).total
		}
		return c, nil
	})
	if err != nil {
		return err
	}
	if len(removed.Removed) > 0 || removed.Steps > 0 {
		s.opts.Log.Info("images were removed to keep to the limit", "limit", s.opts.Limit, "images", removed.Removed, "steps", removed.Steps, "bytes", removed.Bytes)
	}
	if left > s.opts.Limit {
		s.opts.Log.Warn("images have more bytes than the limit, and nothing more may be removed", "limit", s.opts.Limit, "bytes", left)
	}
	return nil
}

// nextEvicted returns the image that Enforce removes next: of the tenants that have one without
// holders, the one with most bytes, and of its images the least recently used.
func nextEvicted(records []*store.Record, trees map[string]int64, held map[string][]string) (tenant, digest string, found bool) {
	of := make(map[string][]*store.Record)
	for _, r := range records {
		of[r.Tenant] = append(of[r.Tenant], r)
	}
	most := int64(-1)
	for _, name := range slices.Sorted(maps.Keys(of)) {
		total := shareOf(of[name], trees).total
		if total <= most {
			continue
		}
		for _, d := range oldestFirst(of[name]) {
			if !slices.ContainsFunc(held[d], func(h string) bool { holder, _ := splitKey(h); return holder == name }) {
				tenant, digest, found, most = name, d, true, total
				break
			}
		}
	}
	return tenant, digest, found
}

// excessSteps returns the least recently used steps that exceed the room for bytes that only steps
// need, and the total bytes with the other steps. The use of a step counts for the steps below it:
// without them it would never be found.
func excessSteps(steps []*store.Step, images *shares, room, total int64) ([]string, int64) {
	const (
		kept = iota + 1
		gone
	)
	var forget []string
	chains := make(map[string]int) // kept or gone
	for _, step := range newestFirst(steps) {
		var size int64
		l := step.Layer
		if l != nil && chains[l.ChainID] != kept {
			if images.users[blobKey(l.Blob.Digest)] == 0 {
				size += l.Blob.Size
			}
			if images.users[treeKey(l.ChainID)] == 0 {
				size += images.trees[l.ChainID]
			}
		}
		if size > room || chains[step.Parent] == gone {
			forget = append(forget, step.ID())
			if l != nil && chains[l.ChainID] == 0 {
				chains[l.ChainID] = gone
			}
			continue
		}
		room -= size
		total += size
		if l != nil {
			chains[l.ChainID] = kept
		}
	}
	return forget, total
}

// newestFirst sorts steps by their last use, each after the steps that made its parent.
func newestFirst(steps []*store.Step) []*store.Step {
	makers := make(map[string][]*store.Step)
	for _, step := range steps {
		if step.Layer != nil {
			makers[step.Layer.ChainID] = append(makers[step.Layer.ChainID], step)
		}
	}
	var out []*store.Step
	seen := make(map[*store.Step]bool)
	for _, step := range slices.SortedFunc(slices.Values(steps), func(a, b *store.Step) int { return b.UsedAt.Compare(a.UsedAt) }) {
		// The step and its unseen ancestors, in the order of their creation.
		var line []*store.Step
		for todo := []*store.Step{step}; len(todo) > 0; {
			next := todo[0]
			todo = todo[1:]
			if !seen[next] {
				seen[next] = true
				line = append(line, next)
				if next.Parent != "" {
					todo = append(todo, makers[next.Parent]...)
				}
			}
		}
		slices.Reverse(line)
		out = append(out, line...)
	}
	return out
}

// oldestFirst returns the digests of the images, the least recently used first.
func oldestFirst(records []*store.Record) []string {
	last := make(map[string]time.Time)
	var digests []string
	for _, r := range records {
		at, seen := last[r.Manifest.Digest]
		if !seen {
			digests = append(digests, r.Manifest.Digest)
		}
		if use := lastUse(r); !seen || use.After(at) {
			last[r.Manifest.Digest] = use
		}
	}
	slices.SortStableFunc(digests, func(a, b string) int { return last[a].Compare(last[b]) })
	return digests
}

func lastUse(r *store.Record) time.Time {
	if r.UsedAt.After(r.PulledAt) {
		return r.UsedAt
	}
	return r.PulledAt
}

// shares counts the images that need a blob or tree, each image once whatever its names.
type shares struct {
	users map[string]int
	trees map[string]int64
	total int64 // bytes of all blobs and trees, each counted once
}

func shareOf(records []*store.Record, trees map[string]int64) *shares {
	s := &shares{users: make(map[string]int), trees: trees}
	seen := make(map[string]bool)
	for _, r := range records {
		if seen[r.Manifest.Digest] {
			continue
		}
		seen[r.Manifest.Digest] = true
		for key, size := range s.parts(r) {
			if s.users[key]++; s.users[key] == 1 {
				s.total += size
			}
		}
	}
	return s
}

// parts returns the sizes of the blobs and trees of an image, by blobKey and treeKey.
func (s *shares) parts(r *store.Record) map[string]int64 {
	parts := make(map[string]int64)
	for _, b := range r.Blobs() {
		parts[blobKey(b.Digest)] = b.Size
	}
	for _, l := range r.Layers {
		parts[treeKey(l.ChainID)] = s.trees[l.ChainID]
	}
	return parts
}

// of returns the bytes of an image that other images need too, and those that it alone needs.
func (s *shares) of(r *store.Record) (shared, unique int64) {
	for key, size := range s.parts(r) {
		if s.users[key] > 1 {
			shared += size
		} else {
			unique += size
		}
	}
	return shared, unique
}
