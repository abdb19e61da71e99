package image

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"net/http"
	"os"
	"sync/atomic"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	remotetransport "github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sync/errgroup"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/store"
)

const parallelUploads = 3

// PushOptions say how an image is sent.
type PushOptions struct {
	Insecure bool // as in [PullOptions]
	// Platform is the one that is to be sent; empty: whichever is stored.
	Platform string
	// Progress is told what happens, by one goroutine at a time and not after Push has returned. It should be quick.
	Progress func(api.PullEvent)
}

// Push sends a stored image to the registry of its name, under that name: the blobs that the registry has not, straight
// from the store, and then the manifest, as it was pulled, built or imported. Blobs that another stored image has under a
// repository of the same registry are asked to be mounted from there.
//
// What is stored of an image is what one platform needs, so that is what is sent, and no index.
func (s *Service) Push(ctx context.Context, ref string, opts PushOptions) (*Image, error) {
	if ref == api.HostImage {
		return nil, classf(ErrReference, "the image %q shows this host's own /usr, which is not pushed; pull, build or import an image", ref)
	}
	parsed, err := parse(ref)
	if err != nil {
		return nil, err
	}
	img, r, release, err := s.acquireRecord(ctx, ref)
	if err != nil {
		return nil, err
	}
	defer release()
	if d, ok := parsed.(name.Digest); ok && d.DigestStr() != r.Manifest.Digest {
		return nil, classf(ErrReference, "%s names an index, of which only what %s needs is stored, the image %s; tag it, and push that name",
			r.Name, r.Platform, r.Manifest.Digest)
	}
	if opts.Platform != "" {
		want, err := platform(opts.Platform)
		if err != nil {
			return nil, err
		}
		if have, err := v1.ParsePlatform(r.Platform); err != nil || !suits(*have, want) {
			return nil, classf(ErrReference, "image %s is stored for %s only, not for %s; pull it with --platform %s, which takes the name, and push that",
				r.Name, r.Platform, want, want)
		}
	}
	c, err := s.connect(ctx, "push", parsed, parsed, opts.Insecure)
	if err != nil {
		return nil, err
	}
	defer c.tr.close()
	p := &delivery{service: s, record: r, target: c.at}
	for _, to := range []**remote.Pusher{&p.pusher, &p.plain} {
		if *to, err = remote.NewPusher(append(c.options, remote.WithJobs(parallelUploads))...); err != nil {
			return nil, fmt.Errorf("prepare to push %s: %w", normalised(parsed), err)
		}
	}
	p.progress.tell = opts.Progress
	defer p.progress.end()
	if err := p.run(ctx); err != nil {
		switch {
		case errors.Is(err, errDamaged):
			return nil, classf(ErrInvalid, "image %s: %w; remove the image and pull it anew", r.Name, err)
		case errors.Is(err, errHere): // the disk
			return nil, fmt.Errorf("push %s: %w", r.Name, err)
		}
		return nil, c.explain(ctx, err)
	}
	return img, nil
}

// delivery is one image on its way out.
type delivery struct {
	service  *Service
	record   *store.Record
	target   name.Reference
	pusher   *remote.Pusher
	plain    *remote.Pusher // has never asked for a token that is also good for other repositories
	alone    atomic.Bool    // mounts are not tried any more
	progress progress
}

var (
	errDamaged = errors.New("the stored blob is damaged")
	errHere    = errors.New("read what is stored")
)

func (p *delivery) run(ctx context.Context) error {
	mounts, err := p.mounts()
	if err != nil {
		return err
	}
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(parallelUploads)
	seen := make(map[string]bool)
	for _, l := range p.record.Layers {
		// Layers that are to be had elsewhere only, by their media type, are left there, as every tool does.
		if seen[l.Blob.Digest] || !types.MediaType(l.Blob.MediaType).IsDistributable() {
			continue
		}
		seen[l.Blob.Digest] = true
		g.Go(func() error { return p.upload(gctx, l.Blob, mounts[l.Blob.Digest], true) })
	}
	g.Go(func() error { return p.upload(gctx, p.record.Config, mounts[p.record.Config.Digest], false) })
	if err := g.Wait(); err != nil {
		return err
	}
	// Last: a manifest must not promise what is not there.
	raw, err := p.service.store.ReadBlob(p.record.Manifest.Digest, maxDocument)
	if errors.Is(err, store.ErrMismatch) {
		return fmt.Errorf("%w: %w", errDamaged, err)
	} else if err != nil {
		return fmt.Errorf("%w: %w", errHere, err)
	}
	pusher := p.pusher
	if p.alone.Load() {
		pusher = p.plain
	}
	return pusher.Put(ctx, p.target, manifest{raw, types.MediaType(p.record.Manifest.MediaType)})
}

// manifest is one as it goes to a registry.
type manifest struct {
	raw   []byte
	media types.MediaType
}

func (m manifest) RawManifest() ([]byte, error)        { return bytes.Clone(m.raw), nil }
func (m manifest) MediaType() (types.MediaType, error) { return m.media, nil }

// mounts are repositories of the registry in which blobs of the image should be already, by digest.
func (p *delivery) mounts() (map[string]name.Reference, error) {
	records, err := p.service.store.List()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errHere, err)
	}
	from := make(map[string]name.Reference)
	for _, r := range records {
		other, err := parse(r.Name)
		if err != nil || other.Context().RegistryStr() != p.target.Context().RegistryStr() || other.Context().RepositoryStr() == p.target.Context().RepositoryStr() {
			continue
		}
		repository := other.Context()
		repository.Registry = p.target.Context().Registry // with the scheme in which that is spoken to
		for _, b := range r.Blobs() {
			if from[b.Digest] == nil {
				from[b.Digest] = repository.Digest(b.Digest)
			}
		}
	}
	return from, nil
}

// upload sends a blob unless the registry has it. With tell, progress is told of it.
func (p *delivery) upload(ctx context.Context, b store.Blob, from name.Reference, tell bool) error {
	event := func(status string, n int64) {
		if tell {
			p.progress.event(api.PullEvent{Layer: b.Digest, Status: status, Bytes: n, Total: b.Size})
		}
	}
	stored := &storedBlob{ctx: ctx, service: p.service, blob: b, progress: func(n int64) { event("uploading", n) }}
	l, err := partial.CompressedToLayer(stored)
	if err != nil {
		return fmt.Errorf("%w: %w", errHere, err)
	}
	if p.alone.Load() {
		err = p.plain.Upload(ctx, p.target.Context(), l)
	} else if from == nil {
		err = p.pusher.Upload(ctx, p.target.Context(), l)
	} else if err = p.pusher.Upload(ctx, p.target.Context(), &remote.MountableLayer{Layer: l, Reference: from}); refused(err) {
		// A mount takes a token that is good for the other repository too, and who gives them out may refuse that: it may not
		// be there, or not be ours to read.
		p.alone.Store(true)
		err = p.plain.Upload(ctx, p.target.Context(), l)
	}
	if err != nil {
		// What went wrong here says more than what the request made of it.
		if mine := stored.failed.Load(); mine != nil {
			return *mine
		}
		return err
	}
	if stored.opened.Load() {
		event("done", b.Size)
	} else {
		event("exists", b.Size)
	}
	return nil
}

// refused reports whether err is a registry's answer that one may not.
func refused(err error) bool {
	var answer *remotetransport.Error
	return errors.As(err, &answer) && (answer.StatusCode == http.StatusUnauthorized || answer.StatusCode == http.StatusForbidden)
}

// storedBlob is a blob of the store as go-containerregistry wants it; it may be opened several times.
type storedBlob struct {
	ctx      context.Context //nolint:containedctx // of the upload that this is for: Compressed has none
	service  *Service
	blob     store.Blob
	progress func(int64)
	opened   atomic.Bool           // its bytes were asked for
	failed   atomic.Pointer[error] // of reading it, since it was opened last
}

func (b *storedBlob) Digest() (v1.Hash, error) { return v1.NewHash(b.blob.Digest) }
func (b *storedBlob) Size() (int64, error)     { return b.blob.Size, nil }
func (b *storedBlob) MediaType() (types.MediaType, error) {
	return types.MediaType(b.blob.MediaType), nil
}

func (b *storedBlob) fail(err error) error {
	b.failed.Store(&err)
	return err
}

// Compressed opens the blob. Its digest is checked on the way, and the last bytes held back if it is wrong.
func (b *storedBlob) Compressed() (io.ReadCloser, error) {
	b.opened.Store(true)
	b.failed.Store(nil)
	f, err := b.service.store.OpenBlob(b.blob.Digest)
	if err != nil {
		return nil, b.fail(fmt.Errorf("%w: %w", errHere, err))
	}
	b.progress(0)
	return &checkedBlob{of: b, file: f, r: store.WithContext(b.ctx, f), hash: sha256.New()}, nil
}

type checkedBlob struct {
	of      *storedBlob
	file    *os.File
	r       io.Reader
	hash    hash.Hash
	n, told int64
}

func (c *checkedBlob) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.hash.Write(p[:n])
	c.n += int64(n)
	if err != nil && !errors.Is(err, io.EOF) {
		// Closed: the registry has answered before it has taken all, and its answer counts.
		if c.of.ctx.Err() == nil && !errors.Is(err, os.ErrClosed) {
			err = c.of.fail(fmt.Errorf("%w %s: %w", errHere, c.of.blob.Digest, err))
		}
		return n, err
	}
	if whole := c.n >= c.of.blob.Size; whole || errors.Is(err, io.EOF) {
		if got := "sha256:" + hex.EncodeToString(c.hash.Sum(nil)); got != c.of.blob.Digest {
			return 0, c.of.fail(fmt.Errorf("%w: %s has the digest %s", errDamaged, c.of.blob.Digest, got))
		}
	}
	if c.n-c.told >= progressStep {
		c.told = c.n
		c.of.progress(c.n)
	}
	return n, err
}

func (c *checkedBlob) Close() error { return c.file.Close() }
