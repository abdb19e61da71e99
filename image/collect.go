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

// SetHolders says how to find out which sandboxes hold which images: their names by the digest of the image, and by the chain
// ids of the layers of snapshots that they stand on. The
// sandboxes' own records are the truth, so nothing can be held by a sandbox that is gone, or be free although one is
// there, whatever crashed in between. Before it is called nothing is collected. F must not call the service.
func (s *Service) SetHolders(f func() map[string][]string) {
	s.mu.Lock()
	s.holders = f
	s.mu.Unlock()
}

// OnRemoval says whom to tell of layers, by their chain ids, that no image and no sandbox needs any more and that are about
// to be removed. Nobody can acquire an image of them until f, and the removal, are over. F must not call the service.
func (s *Service) OnRemoval(f func(ctx context.Context, layers []string)) {
	s.mu.Lock()
	s.removal = f
	s.mu.Unlock()
}

// Acquire is [Service.Get] for an image that a sandbox is about to be made of: it is not removed before release is
// called, which happens when the holders know of the sandbox, or there is none.
func (s *Service) Acquire(ctx context.Context, ref string) (_ *Image, release func(), err error) {
	for {
		img, err := s.Get(ctx, ref)
		if err != nil {
			return nil, nil, err
		}
		s.mu.Lock()
		// It may have been removed, or replaced, before we had the lock.
		if s.currentLocked(img) {
			s.pins[blobKey(img.Digest)]++
			s.used[img.Reference] = time.Now().UTC()
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

// acquireRecord is [Service.Acquire] with what the store knows of the same image.
func (s *Service) acquireRecord(ctx context.Context, ref string) (*Image, *store.Record, func(), error) {
	for {
		img, release, err := s.Acquire(ctx, ref)
		if err != nil {
			return nil, nil, nil, err
		}
		r, err := s.store.Get(img.Reference)
		if err == nil && r.Manifest.Digest == img.Digest {
			return img, r, release, nil
		}
		release()
		if err != nil && !errors.Is(err, store.ErrNotFound) {
			return nil, nil, nil, err
		}
		// Its name was given to another image in between, or taken away, which Acquire will say.
	}
}

func (s *Service) currentLocked(img *Image) bool {
	if img.Reference == api.HostImage {
		return s.host.digest() == img.Digest && s.going[treeKey(img.Digest)] == nil
	}
	r, err := s.store.Get(img.Reference)
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

// busy is who holds an image where no sandbox does yet.
const busy = "a request under way"

// heldLocked are the images that may not go, by digest: who has them.
func (s *Service) heldLocked() (map[string][]string, error) {
	if s.holders == nil {
		return nil, errors.New("it is not known yet what the sandboxes hold")
	}
	held := s.holders()
	if err := s.holdSnapshots(held); err != nil {
		return nil, err
	}
	for key, n := range s.pins {
		if digest, ok := strings.CutPrefix(key, blobKey("")); ok && n > 0 && held[digest] == nil {
			held[digest] = []string{busy}
		}
	}
	return held, nil
}

// choice is what is to be removed.
type choice struct {
	drop   []string // names
	loosen []string // names that are lost while their image stays, because a sandbox holds it
	forget []string // keys of steps of builds

	discard []string // ids of snapshots
}

// chooser makes the choice. Held are the images that sandboxes have, as SetHolders says.
type chooser func(records []*store.Record, steps []*store.Step, held map[string][]string) (choice, error)

// sweep removes what choose names, and what no image and no step of a build needs after that.
//
// When ctx ends, the removal stops after the tree that it is at.
//
// With strays, what belongs to no image even before goes too: layers of host images that the host has outgrown.
func (s *Service) sweep(ctx context.Context, strays bool, choose chooser) (api.ImagesRemoved, error) {
	// On a disk that is full neither this nor the index can be written, and that is when things must go.
	if err := s.flushUsed(); err != nil {
		s.opts.Log.Warn("the last use of images could not be noted", "error", err)
	}
	g, out, settle, err := s.plan(strays, choose)
	if err != nil {
		return api.ImagesRemoved{}, err
	}
	defer settle()
	// The names are gone and the layers are noted as pending, so from here on a crash is mended by Open.
	removal, cancel := context.WithTimeout(context.WithoutCancel(ctx), sweepTimeout)
	defer cancel()
	s.mu.Lock()
	told := s.removal
	s.mu.Unlock()
	if told != nil && len(g.Layers) > 0 {
		told(removal, g.Layers)
	}
	var errs []error
	for i, c := range g.Layers {
		if ctx.Err() != nil {
			errs = append(errs, context.Cause(ctx))
			s.leave(g.Layers[i:])
			break
		}
		errs = append(errs, s.removeLayers(removal, []string{c}))
	}
	err = errors.Join(append(errs, s.store.RemoveUnused(g.Blobs))...)
	if ierr := s.store.WriteIndex(); ierr != nil {
		s.opts.Log.Warn("the index of the image store is out of date until the next change", "error", ierr)
	}
	if err != nil {
		return out, fmt.Errorf("remove what no image needs: %w; the daemon tries again in a minute", err)
	}
	return out, nil
}

// sweepTimeout bounds the removal of trees. Of one tree it goes on after the caller has given up: half of it helps nobody.
const sweepTimeout = 10 * time.Minute

// plan is the part of a sweep during which nobody may acquire an image: some milliseconds.
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
	chosen, err := choose(records, steps, held)
	if err != nil {
		return fail(err)
	}
	keepLayer, err := s.keepLocked(records, held, strays)
	if err != nil {
		return fail(err)
	}
	keepBlob := func(digest string) bool {
		return s.pins[blobKey(digest)] > 0 || s.going[blobKey(digest)] != nil || held[digest] != nil
	}
	g, err := s.store.Collect(chosen.drop, chosen.loosen, chosen.forget, chosen.discard, keepLayer, keepBlob)
	if err != nil {
		return fail(err)
	}
	for _, c := range g.Layers {
		delete(s.sizes, c)
	}
	out := api.ImagesRemoved{
		Removed: append([]string{}, chosen.drop...), Untagged: append([]string{}, chosen.loosen...), Steps: len(chosen.forget), Bytes: g.Bytes,
	}
	return g, out, s.depart(append(treeKeys(g.Layers), blobKeys(g.Blobs)...)), nil
}

// keepLocked says which layers are needed although no image has them: what pulls under way bring, the host image's layer and the
// older ones that sandboxes still run on.
func (s *Service) keepLocked(records []*store.Record, held map[string][]string, strays bool) (func(string) bool, error) {
	host := s.host.digest()
	stray := make(map[string]bool)
	// "" is what a sandbox has that was made by a daemon which did not note the digest of the host image: any layer
	// without an image may be its.
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
		// Who stands on a snapshot says so in its record.
		taken, err := s.store.SnapshotLayers()
		if err != nil {
			return nil, err
		}
		for _, c := range taken {
			delete(stray, c)
		}
	}
	return func(id string) bool {
		return s.pins[treeKey(id)] > 0 || s.going[treeKey(id)] != nil || held[id] != nil || id == host || stray[id]
	}, nil
}

// flushUsed writes down what was used since it was called last. Until then a crash loses it: it only decides what is
// removed first.
func (s *Service) flushUsed() error {
	s.mu.Lock()
	used := maps.Clone(s.used)
	s.mu.Unlock()
	delete(used, api.HostImage)
	return s.store.SetUsed(used)
}

// Remove takes away the name of an image, and the image itself where it has no other. One that a sandbox holds is
// refused; with force it loses the name and goes, by a later Prune, when the sandbox has.
func (s *Service) Remove(ctx context.Context, ref string, force bool) (api.ImagesRemoved, error) {
	if ref == api.HostImage {
		return api.ImagesRemoved{}, errdefs.Classf(ErrReference, "the image %q is made of this host's own programs and takes no room to speak of; it cannot be removed", ref)
	}
	r, err := s.lookup(ref)
	if errors.Is(err, ErrNotFound) {
		return api.ImagesRemoved{}, errdefs.Classf(ErrNotFound, "image %s is not stored here; sandboxd images lists what is", ref)
	} else if err != nil {
		return api.ImagesRemoved{}, err
	}
	// It goes on after the caller has given up.
	return s.sweep(context.WithoutCancel(ctx), false, func(records []*store.Record, _ []*store.Step, held map[string][]string) (choice, error) {
		i := slices.IndexFunc(records, func(o *store.Record) bool { return o.Name == r.Name })
		if i < 0 {
			return choice{}, errdefs.Classf(ErrNotFound, "image %s is not stored here any more", r.Name)
		}
		r := records[i]
		who := held[r.Manifest.Digest]
		others := slices.ContainsFunc(records, func(o *store.Record) bool { return o.Name != r.Name && o.Manifest.Digest == r.Manifest.Digest })
		switch {
		case len(who) == 0 || others:
			return choice{drop: []string{r.Name}}, nil
		case force && !r.Untagged && !strings.Contains(r.Name, "@"):
			return choice{loosen: []string{r.Name}}, nil
		}
		who = slices.DeleteFunc(slices.Clone(who), func(w string) bool { return w == busy })
		if len(who) == 0 {
			return choice{}, errdefs.Classf(ErrInUse, "image %s is needed by %s; try again when that is over", r.Name, busy)
		}
		slices.Sort(who)
		return choice{}, errdefs.Classf(ErrInUse, "image %s is held by %s; delete what holds it first: %s", r.Name, strings.Join(who, ", "), remedy(who))
	})
}

// remedy says how to delete sandboxes and snapshots.
func remedy(who []string) string {
	var sandboxes, snapshots, commands []string
	for _, w := range who {
		if name, ok := strings.CutPrefix(w, snapshotHolder); ok {
			snapshots = append(snapshots, name)
		} else {
			sandboxes = append(sandboxes, w)
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

// Prune removes images that no sandbox holds: those whose tag has moved on, or with all every one; what builds have kept
// to be quicker the next time; and layers and blobs that no image needs.
func (s *Service) Prune(ctx context.Context, all bool) (api.ImagesRemoved, error) {
	return s.sweep(context.WithoutCancel(ctx), true, func(records []*store.Record, steps []*store.Step, held map[string][]string) (c choice, _ error) {
		for _, r := range records {
			if (all || r.Untagged) && len(held[r.Manifest.Digest]) == 0 {
				c.drop = append(c.drop, r.Name)
			}
		}
		for _, step := range steps {
			c.forget = append(c.forget, step.Key)
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
	r, err := s.store.Get(img.Reference)
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

// Enforce removes what builds have kept, and then the least recently used images with all their names, the oldest first,
// until all of it together has no more bytes than the limit. It leaves those that a sandbox holds or a request under way needs. An image was used when one of its
// names was. When ctx ends, trees that are left are removed by the next Open.
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
		c.forget, left = tooMuch(steps, images, s.opts.Limit-left, left)
		for _, digest := range oldestFirst(records) {
			if left <= s.opts.Limit {
				break
			}
			if len(held[digest]) > 0 {
				continue
			}
			var stay []*store.Record
			for _, r := range records {
				if r.Manifest.Digest == digest {
					c.drop = append(c.drop, r.Name)
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

// tooMuch are the steps beyond the room that there is for what they alone need, the least recently used first; and how
// many bytes there are with those that stay. A step was used when one was that was done on top of it: without it that one
// would never be found.
func tooMuch(steps []*store.Step, images *shares, room, total int64) ([]string, int64) {
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
			forget = append(forget, step.Key)
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

// newestFirst sorts steps by their last use, each after those that have made what it was done on.
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
		// From the step down to the first that was seen, and in the order in which they were made.
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

// oldestFirst are the digests of the images, the least recently used first.
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

// shares knows how many images need a thing, each image counted once whatever its names.
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

// parts are the blobs and trees of an image, by digest and by chain id.
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

// of returns how much of an image other images need too, and how much it alone needs.
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
