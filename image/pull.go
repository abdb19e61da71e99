package image

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sync/errgroup"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/archive"
	"github.com/sandboxd/sandboxd/image/errdefs"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/image/reference"
	"github.com/sandboxd/sandboxd/image/registry"
	"github.com/sandboxd/sandboxd/image/store"
)

const (
	maxNesting = 3 // indexes in indexes
)

// PullOptions are the options of [Service.Pull].
type PullOptions struct {
	Platform string // "linux/amd64"; empty means this host's
	// Insecure allows plain HTTP, and HTTPS with any certificate, to the registry of the image's name
	// and its mirrors, but not to their token servers or storage. Digests are still checked, but the
	// network decides which image a tag means, and can read credentials.
	Insecure bool
	Auth     *api.RegistryAuth // for the registry of the image's name; nil: the user's own
	// Progress is called by one goroutine at a time and not after Pull has returned. It should be
	// quick.
	Progress func(api.PullEvent)
}

// Pull resolves the image at its registry or a mirror, fetches the parts that are not stored yet,
// and has its layers extracted. It returns when everything is durable. A pull that fails removes
// the parts that it brought.
func (s *Service) Pull(ctx context.Context, ref string, opts PullOptions) (*Image, error) {
	if ref == api.HostImage {
		return s.getHost(ctx)
	}
	want, err := reference.ParsePlatform(opts.Platform)
	if err != nil {
		return nil, err
	}
	parsed, err := reference.Parse(ref)
	if err != nil {
		return nil, err
	}
	if d, ok := parsed.(name.Digest); ok && !strings.HasPrefix(d.DigestStr(), "sha256:") {
		return nil, errdefs.Classf(ErrReference, "image reference %q: only sha256 digests are supported", ref)
	}
	var ready *prepared
	err = s.registriesAs(opts.Auth, parsed.Context().RegistryStr()).Pull(ctx, parsed, opts.Insecure, func(source *registry.Source) (err error) {
		p := &pull{service: s, ref: parsed, want: want, explicit: opts.Platform != "", origin: source}
		p.progress.report = opts.Progress
		defer p.progress.end()
		ready, err = p.run(ctx)
		return err
	})
	if err != nil {
		return nil, err
	}
	images, err := s.record(ctx, []*prepared{ready})
	if err != nil {
		return nil, err
	}
	return images[0], nil
}

// prepared is an image whose parts are stored and pinned until it is recorded or given up.
type prepared struct {
	*store.Record

	names         []string // further ones
	blobs, chains []string // pinned
	forget        func()   // ends the proofs of content
}

// releasePrepared ends the pins and proofs of an image after it was recorded, or with discard given
// up.
func (s *Service) releasePrepared(ctx context.Context, p *prepared, discard bool) error {
	p.forget()
	return s.release(ctx, p.blobs, p.chains, discard)
}

// record gives prepared images their names, all or none of them, enforces the limit and then
// releases the pins, so that an image exists when its caller hears of it.
func (s *Service) record(ctx context.Context, ready []*prepared) (_ []*Image, err error) {
	defer func() {
		for _, p := range ready {
			err = errors.Join(err, s.releasePrepared(ctx, p, err != nil))
		}
	}()
	var records []*store.Record
	for _, p := range ready {
		records = append(records, p.Record)
		for _, n := range p.names {
			r := *p.Record
			r.Name = n
			records = append(records, &r)
		}
	}
	if err := s.store.Put(s.treeSizes(records), records...); err != nil {
		return nil, err
	}
	// The images are stored, even if another one could not be removed.
	if err := s.Enforce(context.WithoutCancel(ctx)); err != nil {
		s.opts.Log.Warn("the limit of images could not be kept to", "error", err)
	}
	var out []*Image
	for _, r := range records {
		img, err := s.image(r)
		if err != nil {
			return nil, err
		}
		out = append(out, img)
	}
	return out, nil
}

// origin is the source of the parts of an image: a registry, or an archive that has been read.
type origin interface {
	// Document returns a manifest or index, unchecked: that of the digest, or the one that was asked
	// for if digest is empty.
	Document(ctx context.Context, digest string) ([]byte, error)
	// Blob passes the content of a blob to write, which checks and keeps it.
	Blob(ctx context.Context, b store.Blob, write func(io.Reader) error, progress func(int64)) error
	// Sender names the origin in messages: "the registry".
	Sender() string
}

// pull is the transfer of one image into the store.
type pull struct {
	service  *Service
	ref      name.Reference
	want     v1.Platform
	explicit bool             // the caller named the platform
	made     []string         // diff ids of layers made on this host just now
	staging  *archive.Staging // of stored blobs; nil for a registry
	origin   origin
	progress progress

	mu     sync.Mutex
	proofs []func() // see Service.prove
	over   bool
}

// prove records that the origin has sent the content of a blob, until forget.
func (p *pull) prove(digest string) {
	forget := p.service.prove(blobKey(digest))
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.over { // the download served another pull
		forget()
		return
	}
	p.proofs = append(p.proofs, forget)
}

func (p *pull) forget() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.over = true
	for _, forget := range p.proofs {
		forget()
	}
	p.proofs = nil
}

// progress passes on events until the pull ends: its downloads may go on for another pull.
type progress struct {
	mu     sync.Mutex
	report func(api.PullEvent)
}

func (p *progress) event(e api.PullEvent) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.report != nil {
		p.report(e)
	}
}

func (p *progress) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.report = nil
}

// run stores all parts of the image.
func (p *pull) run(ctx context.Context) (_ *prepared, err error) {
	s := p.service
	defer func() {
		if err != nil {
			p.forget()
		}
	}()
	manifest, raw, err := p.manifest(ctx)
	if err != nil {
		return nil, err
	}
	r := &store.Record{Tenant: s.tenant, Name: reference.Normalize(p.ref), Manifest: raw.blob, PulledAt: time.Now().UTC()}
	if r.Config, err = p.descriptor("configuration", manifest.Config); err != nil {
		return nil, err
	}
	if r.Config.Size > store.MaxDocument {
		return nil, p.invalidf("its configuration has %d bytes, %d are allowed", r.Config.Size, store.MaxDocument)
	}
	for _, d := range manifest.Layers {
		b, err := p.descriptor("layer", d)
		if err != nil {
			return nil, err
		}
		r.Layers = append(r.Layers, store.Layer{Blob: b})
	}

	// From here on parts are stored. They are pinned first.
	var blobs, chains []string
	for _, b := range r.Blobs() {
		blobs = append(blobs, b.Digest)
	}
	if err := s.pin(ctx, blobKeys(blobs)); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.release(ctx, blobs, chains, true))
		}
	}()
	// In parallel: syncing a blob takes as long as fetching a small one.
	p.prove(raw.blob.Digest)
	both, bothCtx := errgroup.WithContext(ctx)
	both.Go(func() error { return s.store.WriteBlob(bothCtx, raw.blob, bytes.NewReader(raw.data)) })
	both.Go(func() error { return p.fetch(bothCtx, r.Config, false) })
	if err := both.Wait(); err != nil {
		return nil, err
	}
	if err := p.config(r); err != nil {
		return nil, err
	}
	var ids []string
	for _, l := range r.Layers {
		ids = append(ids, l.ChainID)
	}
	if err := s.pin(ctx, treeKeys(ids)); err != nil {
		return nil, err
	}
	chains = ids
	if err := p.layers(ctx, r.Layers); err != nil {
		return nil, err
	}
	// Also for an image whose layers existed.
	all, err := s.usage(chains)
	if err != nil {
		return nil, err
	}
	if err := s.opts.Limits.Check(all); err != nil {
		return nil, p.invalidf("%w", err)
	}
	return &prepared{Record: r, blobs: blobs, chains: chains, forget: p.forget}, nil
}

// usage returns the shared usage of stored layers. An unknown or missing one counts as nothing.
func (s *Service) usage(chains []string) (all layer.Usage, err error) {
	trees, err := s.trees()
	if err != nil {
		return all, err
	}
	for _, c := range chains {
		all = all.Add(usageOf(trees[c]))
	}
	return all, nil
}

// trees returns the known sizes of all layers.
func (s *Service) trees() (map[string]store.Tree, error) {
	trees, err := s.store.Trees()
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.Copy(trees, s.sizes)
	return trees, nil
}

func usageOf(t store.Tree) layer.Usage { return layer.Usage{Entries: t.Entries, Bytes: t.Bytes} }

// treeSizes returns the sizes of those of the images' trees that were extracted since the daemon
// started.
func (s *Service) treeSizes(records []*store.Record) map[string]store.Tree {
	s.mu.Lock()
	defer s.mu.Unlock()
	sizes := make(map[string]store.Tree)
	for _, r := range records {
		for _, l := range r.Layers {
			if n, ok := s.sizes[l.ChainID]; ok {
				sizes[l.ChainID] = n
			}
		}
	}
	return sizes
}

func (p *pull) invalidf(format string, args ...any) error {
	return errdefs.Classf(ErrInvalid, "image %s: %w", reference.Normalize(p.ref), fmt.Errorf(format, args...))
}

// document is a manifest with its original bytes.
type document struct {
	blob store.Blob
	data []byte
}

// manifest fetches the manifest for the wanted platform, through an index if there is one.
func (p *pull) manifest(ctx context.Context) (*v1.Manifest, document, error) {
	var expect *v1.Descriptor
	for range maxNesting {
		doc, err := p.document(ctx, expect)
		if err != nil {
			return nil, document{}, err
		}
		// The content decides the type. The registry's header may claim another, and a document with two
		// readings has two meanings (CVE-2021-41190).
		var shape struct {
			SchemaVersion int             `json:"schemaVersion"`
			MediaType     types.MediaType `json:"mediaType"`
			Manifests     json.RawMessage `json:"manifests"`
			Config        json.RawMessage `json:"config"`
			Layers        json.RawMessage `json:"layers"`
			FSLayers      json.RawMessage `json:"fsLayers"`
		}
		if err := json.Unmarshal(doc.data, &shape); err != nil {
			return nil, document{}, p.invalidf("its manifest is not JSON: %w", err)
		}
		isIndex, isImage := shape.Manifests != nil, shape.Config != nil || shape.Layers != nil
		switch {
		case shape.SchemaVersion == 1 || shape.FSLayers != nil:
			return nil, document{}, p.invalidf("its manifest has the old schema 1, which has no digests of the layers' content; have it pushed anew by a current tool")
		case shape.SchemaVersion != 2:
			return nil, document{}, p.invalidf("its manifest has schema version %d, 2 is supported", shape.SchemaVersion)
		case isIndex == isImage:
			return nil, document{}, p.invalidf("its manifest is neither an image's nor an index")
		case isIndex && shape.MediaType != "" && !shape.MediaType.IsIndex(), isImage && shape.MediaType != "" && !shape.MediaType.IsImage():
			return nil, document{}, p.invalidf("its manifest has the media type %.80q, which does not match its content", shape.MediaType)
		}
		if isImage {
			m, err := v1.ParseManifest(bytes.NewReader(doc.data))
			if err != nil {
				return nil, document{}, p.invalidf("its manifest cannot be read: %w", err)
			}
			doc.blob.MediaType = string(shape.MediaType)
			if doc.blob.MediaType == "" {
				doc.blob.MediaType = string(types.OCIManifestSchema1) // optional there
			}
			return m, doc, p.checkManifest(m)
		}
		ix, err := v1.ParseIndexManifest(bytes.NewReader(doc.data))
		if err != nil {
			return nil, document{}, p.invalidf("its index cannot be read: %w", err)
		}
		if expect, err = p.choose(ix); err != nil {
			return nil, document{}, err
		}
	}
	return nil, document{}, p.invalidf("its indexes are nested more than %d deep", maxNesting)
}

// document fetches one manifest or index and checks its digest and size against the index or
// reference.
func (p *pull) document(ctx context.Context, expect *v1.Descriptor) (document, error) {
	want := ""
	if d, ok := p.ref.(name.Digest); ok {
		want = d.DigestStr()
	}
	asked := ""
	if expect != nil {
		if expect.Size > store.MaxDocument {
			return document{}, p.invalidf("manifest %s has %d bytes, %d are allowed", expect.Digest, expect.Size, store.MaxDocument)
		}
		asked = expect.Digest.String()
		want = asked
	}
	data, err := p.origin.Document(ctx, asked)
	if err != nil {
		return document{}, err
	}
	if len(data) > store.MaxDocument {
		return document{}, p.invalidf("its manifest has %d bytes, %d are allowed", len(data), store.MaxDocument)
	}
	sum := sha256.Sum256(data)
	doc := document{data: data, blob: store.Blob{Digest: "sha256:" + hex.EncodeToString(sum[:]), Size: int64(len(data))}}
	if want != "" && want != doc.blob.Digest {
		return document{}, p.invalidf("%s sent a manifest with the digest %s for %s", p.origin.Sender(), doc.blob.Digest, want)
	}
	if expect != nil && expect.Size != doc.blob.Size {
		return document{}, p.invalidf("manifest %s has %d bytes, its index says %d", expect.Digest, doc.blob.Size, expect.Size)
	}
	return doc, nil
}

// choose picks the manifest for the wanted platform.
func (p *pull) choose(ix *v1.IndexManifest) (*v1.Descriptor, error) {
	var best *v1.Descriptor
	var have []string
	for i := range ix.Manifests {
		d := &ix.Manifests[i]
		if d.Platform == nil {
			// Allowed, but only useful without a choice.
			if len(ix.Manifests) == 1 {
				best = d
			}
			continue
		}
		if d.Platform.OS != "unknown" { // the mark of attestations
			have = append(have, d.Platform.String())
		}
		if !reference.Suits(*d.Platform, p.want) {
			continue
		}
		// That variant, or else a manifest for all variants, or else the first.
		if best == nil || best.Platform.Variant != p.want.Variant && (d.Platform.Variant == p.want.Variant || d.Platform.Variant == "") {
			best = d
		}
	}
	if best == nil {
		slices.Sort(have)
		return nil, p.invalidf("it has nothing for %s, only for: %s", p.want, strings.Join(slices.Compact(have), ", "))
	}
	if best.MediaType != "" && !best.MediaType.IsImage() && !best.MediaType.IsIndex() {
		return nil, p.invalidf("its index leads to a %.80q, which is not an image", best.MediaType)
	}
	return best, nil
}

func (p *pull) checkManifest(m *v1.Manifest) error {
	if !m.Config.MediaType.IsConfig() {
		return p.invalidf("it is not a container image: its configuration is a %.80q", m.Config.MediaType)
	}
	if len(m.Layers) == 0 {
		return p.invalidf("it has no layers, so there is nothing to run")
	}
	if len(m.Layers) > store.MaxLayers {
		return p.invalidf("it has %d layers, %d are allowed", len(m.Layers), store.MaxLayers)
	}
	return nil
}

// descriptor checks a manifest's description of a blob.
func (p *pull) descriptor(what string, d v1.Descriptor) (store.Blob, error) {
	b := store.Blob{MediaType: string(d.MediaType), Digest: d.Digest.String(), Size: d.Size}
	if d.Digest.Algorithm != "sha256" {
		return b, p.invalidf("its %s has the digest %.80q; only sha256 is supported", what, b.Digest)
	}
	if b.Size < 0 {
		return b, p.invalidf("its %s %s has %d bytes", what, b.Digest, b.Size)
	}
	if limit := p.service.opts.Limits.Bytes; b.Size > limit {
		return b, p.invalidf("%w", layer.ExceededBytes.Errorf("its %s %s has %d bytes, %d are allowed", what, b.Digest, b.Size, limit))
	}
	return b, nil
}

// config reads the stored configuration and fills in the platform and layers.
func (p *pull) config(r *store.Record) error {
	data, err := p.service.store.ReadBlob(r.Config.Digest, store.MaxDocument)
	if err != nil {
		return err
	}
	c, err := v1.ParseConfigFile(bytes.NewReader(data))
	if err != nil {
		return p.invalidf("its configuration cannot be read: %w", err)
	}
	made := v1.Platform{OS: c.OS, Architecture: c.Architecture, Variant: c.Variant}
	if made.OS != "" && made.Architecture != "" && !reference.Suits(made, p.want) {
		hint := "; ask for that platform if this host can run it"
		if p.explicit {
			hint = ""
		}
		return p.invalidf("it is made for %s, not for %s%s", made, p.want, hint)
	}
	r.Platform = p.want.String()
	if made.OS != "" && made.Architecture != "" {
		r.Platform = made.String()
	}
	if len(c.RootFS.DiffIDs) != len(r.Layers) {
		return p.invalidf("its configuration lists %d layers, its manifest %d", len(c.RootFS.DiffIDs), len(r.Layers))
	}
	parent := ""
	for i, d := range c.RootFS.DiffIDs {
		if d.Algorithm != "sha256" {
			return p.invalidf("its configuration has the diff id %.80q; only sha256 is supported", d)
		}
		r.Layers[i].DiffID = d.String()
		r.Layers[i].ChainID = chainID(parent, d.String())
		parent = r.Layers[i].ChainID
	}
	return nil
}

// chainID returns the digest of a stack of layers, as the OCI image specification defines it.
func chainID(parent, diffID string) string {
	if parent == "" {
		return diffID
	}
	sum := sha256.Sum256([]byte(parent + " " + diffID))
	return "sha256:" + hex.EncodeToString(sum[:])
}

// layers downloads some layers at a time and has them extracted in order. All that are ready are
// extracted at once, because syncing many takes about as long as syncing one.
func (p *pull) layers(ctx context.Context, layers []store.Layer) error {
	g, ctx := errgroup.WithContext(ctx)
	// At once, and while the first blob is on its way: extract finds them noted.
	g.Go(func() error {
		var chains []string
		for _, l := range layers {
			chains = append(chains, l.ChainID)
		}
		return p.service.store.BeginLayers(chains...)
	})
	ready := make([]chan struct{}, len(layers))
	for i := range ready {
		ready[i] = make(chan struct{})
	}
	var next atomic.Int64
	for range min(registry.ParallelDownloads, len(layers)) {
		g.Go(func() error {
			for {
				i := int(next.Add(1)) - 1
				if i >= len(layers) {
					return nil
				}
				if err := p.fetch(ctx, layers[i].Blob, true); err != nil {
					return err
				}
				close(ready[i])
			}
		})
	}
	g.Go(func() error {
		for first, next := 0, 0; first < len(layers); first = next {
			select {
			case <-ready[first]:
			case <-ctx.Done():
				return ctx.Err()
			}
			for next = first + 1; next < min(len(layers), first+layer.MaxApply) && isClosed(ready[next]); next++ {
			}
			if err := p.apply(ctx, layers, first, next); err != nil {
				return err
			}
		}
		return nil
	})
	return g.Wait()
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// fetch stores a blob, unless the tenant has it or another pull of the tenant is storing it.
func (p *pull) fetch(ctx context.Context, b store.Blob, report bool) error {
	s := p.service
	event := func(status string, n int64) {
		if report {
			p.progress.event(api.PullEvent{Layer: b.Digest, Status: status, Bytes: n, Total: b.Size})
		}
	}
	_, known, err := p.look(b)
	if err != nil {
		return err
	}
	if known {
		event("exists", b.Size)
		return nil
	}
	event("downloading", 0)
	// One download for each size too: descriptors that lie about it fail each by itself. And one for
	// each tenant: the origin of one proves nothing for another.
	err = s.flights.do(ctx, store.Key(s.tenant, fmt.Sprintf("blob %s %d", b.Digest, b.Size)), func(ctx context.Context) error {
		stored, known, err := p.look(b) // again: another pull may have stored it meanwhile
		if known || err != nil {
			return err
		}
		write := func(r io.Reader) error {
			if stored { // by another tenant
				return b.Check(ctx, r)
			}
			return s.store.WriteBlob(ctx, b, r)
		}
		err = p.origin.Blob(ctx, b, write, func(n int64) { event("downloading", n) })
		if err == nil {
			p.prove(b.Digest)
		}
		return err
	})
	if err == nil {
		p.prove(b.Digest)
		event("downloading", b.Size)
	}
	return err
}

// look reports whether a blob is stored, and whether the tenant may use it.
func (p *pull) look(b store.Blob) (stored, known bool, err error) {
	if !p.service.store.Has(b) {
		return false, false, nil
	}
	known, err = p.service.staged(p.staging, b.Digest)
	return true, known, err
}

// apply has the layers from first up to next extracted, whose blobs are stored.
func (p *pull) apply(ctx context.Context, layers []store.Layer, first, next int) error {
	event := func(status string) {
		for _, l := range layers[first:next] {
			p.progress.event(api.PullEvent{Layer: l.Blob.Digest, Status: status, Bytes: l.Blob.Size, Total: l.Blob.Size})
		}
	}
	event("applying")
	var parents []string
	for _, below := range layers[:first] {
		parents = append(parents, below.ChainID)
	}
	failed, err := p.service.extract(ctx, layers[first:next], parents, func(l store.Layer) bool { return slices.Contains(p.made, l.DiffID) })
	switch {
	case errors.Is(err, layer.ErrInvalid) && failed != nil:
		return p.invalidf("layer %s: %w", failed.Blob.Digest, err)
	case err != nil && failed != nil:
		return fmt.Errorf("image %s: extract layer %s: %w", reference.Normalize(p.ref), failed.Blob.Digest, err)
	case err != nil:
		return fmt.Errorf("image %s: extract layers: %w", reference.Normalize(p.ref), err)
	}
	event("done")
	return nil
}

// extract has layers extracted, each on top of the one before and the first on top of parents.
// Layers of our own making have no limit of compression ratio; their bytes are limited. With an
// error extract returns the layer at fault, if the applier names one.
func (s *Service) extract(ctx context.Context, layers []store.Layer, parents []string, made func(store.Layer) bool) (failed *store.Layer, err error) {
	req := layer.ApplyRequest{Parents: parents}
	var chains []string
	for _, l := range layers {
		chains = append(chains, l.ChainID)
	}
	if err := s.store.BeginLayers(chains...); err != nil {
		return nil, err
	}
	defer func() {
		for _, r := range req.Layers {
			_ = r.Blob.Close()
		}
	}()
	trees, err := s.trees()
	if err != nil {
		return nil, err
	}
	limits := s.opts.Limits
	for _, p := range parents {
		limits.Below = limits.Below.Add(usageOf(trees[p]))
	}
	for _, l := range layers {
		f, err := s.store.OpenBlob(l.Blob.Digest)
		if err != nil {
			return &l, err
		}
		limits := limits
		if made(l) {
			limits = limits.AnyRatio()
		}
		req.Layers = append(req.Layers, layer.Request{
			ChainID: l.ChainID, MediaType: l.Blob.MediaType, DiffID: l.DiffID, Limits: limits, Known: usageOf(trees[l.ChainID]), Blob: f,
		})
	}
	results, err := s.applier.Apply(ctx, req)
	if err != nil {
		if len(results) < len(layers) {
			failed = &layers[len(results)]
		}
		return failed, err
	}
	if len(results) != len(layers) {
		return nil, fmt.Errorf("%d layers were extracted, not %d", len(results), len(layers))
	}
	s.mu.Lock()
	for i, l := range layers {
		// Zero means that it existed, with an unknown size.
		if u := results[i].Usage(); u != (layer.Usage{}) {
			s.sizes[l.ChainID] = store.Tree{Bytes: u.Bytes, Entries: u.Entries}
		}
	}
	s.mu.Unlock()
	for i, l := range layers {
		got := results[i].DiffID
		if got == "" { // the tree existed
			if made(l) {
				continue
			}
			if err := s.checkExisting(ctx, l, limits); err != nil {
				return &l, err
			}
			continue
		}
		if got != l.DiffID {
			err := errdefs.Classf(layer.ErrInvalid, "content is %s, the image's configuration promises %s", got, l.DiffID)
			for _, above := range layers[i:] {
				err = errors.Join(err, s.applier.RemoveLayer(ctx, above.ChainID))
			}
			return &l, err
		}
	}
	return nil, nil
}
