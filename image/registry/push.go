package registry

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
	"github.com/sandboxd/sandboxd/image/errdefs"
	"github.com/sandboxd/sandboxd/image/reference"
	"github.com/sandboxd/sandboxd/image/store"
)

const parallelUploads = 3

// Upload describes an image to push.
type Upload struct {
	Store    *store.Store
	Image    *store.Record
	Insecure bool // as for [Client.Pull]
	// Others are further stored images. Blobs that they have in common with the image, under another
	// repository of the same registry, are mounted from there: the registry learns of that repository.
	Others []*store.Record
	Event  func(api.PullEvent)
}

// Push sends an image to the registry of ref, under that name: the blobs that the registry lacks,
// straight from the store, then the manifest.
func (c *Client) Push(ctx context.Context, ref name.Reference, up Upload) error {
	conn, err := c.connect(ctx, "push", ref, ref, up.Insecure)
	if err != nil {
		return err
	}
	defer conn.tr.close()
	p := &push{Upload: up, target: conn.at}
	for _, to := range []**remote.Pusher{&p.pusher, &p.plain} {
		if *to, err = remote.NewPusher(append(conn.options, remote.WithJobs(parallelUploads))...); err != nil {
			return fmt.Errorf("prepare to push %s: %w", reference.Normalize(ref), err)
		}
	}
	if err := p.run(ctx); err != nil {
		switch {
		case errors.Is(err, errDamaged):
			return errdefs.Classf(errdefs.ErrInvalid, "image %s: %w; remove the image and pull it anew", up.Image.Name, err)
		case errors.Is(err, errHere): // the disk
			return fmt.Errorf("push %s: %w", up.Image.Name, err)
		}
		return conn.explain(ctx, err)
	}
	return nil
}

// push is a running push.
type push struct {
	Upload

	target   name.Reference
	pusher   *remote.Pusher
	plain    *remote.Pusher // never asks for a token that is also good for other repositories
	unshared atomic.Bool    // mounts are no longer tried
}

var (
	errDamaged = errors.New("the stored blob is damaged")
	errHere    = errors.New("read the store")
)

func (p *push) run(ctx context.Context) error {
	mounts := p.mounts()
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(parallelUploads)
	seen := make(map[string]bool)
	for _, l := range p.Image.Layers {
		// Layers whose media type forbids distribution are left out, as by every tool.
		if seen[l.Blob.Digest] || !types.MediaType(l.Blob.MediaType).IsDistributable() {
			continue
		}
		seen[l.Blob.Digest] = true
		g.Go(func() error { return p.upload(gctx, l.Blob, mounts[l.Blob.Digest], p.Event) })
	}
	g.Go(func() error {
		return p.upload(gctx, p.Image.Config, mounts[p.Image.Config.Digest], func(api.PullEvent) {})
	})
	if err := g.Wait(); err != nil {
		return err
	}
	// Last: a manifest must not promise blobs that are missing.
	raw, err := p.Store.ReadBlob(p.Image.Manifest.Digest, store.MaxDocument)
	if errors.Is(err, store.ErrMismatch) {
		return fmt.Errorf("%w: %w", errDamaged, err)
	} else if err != nil {
		return fmt.Errorf("%w: %w", errHere, err)
	}
	pusher := p.pusher
	if p.unshared.Load() {
		pusher = p.plain
	}
	return pusher.Put(ctx, p.target, manifest{raw, types.MediaType(p.Image.Manifest.MediaType)})
}

// manifest implements remote.Taggable.
type manifest struct {
	raw   []byte
	media types.MediaType
}

func (m manifest) RawManifest() ([]byte, error)        { return bytes.Clone(m.raw), nil }
func (m manifest) MediaType() (types.MediaType, error) { return m.media, nil }

// mounts returns, by digest, repositories of the registry that should have blobs of the image.
func (p *push) mounts() map[string]name.Reference {
	from := make(map[string]name.Reference)
	for _, r := range p.Others {
		other, err := reference.Parse(r.Name)
		if err != nil || other.Context().RegistryStr() != p.target.Context().RegistryStr() || other.Context().RepositoryStr() == p.target.Context().RepositoryStr() {
			continue
		}
		repository := other.Context()
		repository.Registry = p.target.Context().Registry // for its scheme
		for _, b := range r.Blobs() {
			if from[b.Digest] == nil {
				from[b.Digest] = repository.Digest(b.Digest)
			}
		}
	}
	return from
}

// upload sends a blob unless the registry has it.
func (p *push) upload(ctx context.Context, b store.Blob, from name.Reference, report func(api.PullEvent)) error {
	event := func(status string, n int64) {
		report(api.PullEvent{Layer: b.Digest, Status: status, Bytes: n, Total: b.Size})
	}
	stored := &storedBlob{ctx: ctx, store: p.Store, blob: b, progress: func(n int64) { event("uploading", n) }}
	l, err := partial.CompressedToLayer(stored)
	if err != nil {
		return fmt.Errorf("%w: %w", errHere, err)
	}
	if p.unshared.Load() {
		err = p.plain.Upload(ctx, p.target.Context(), l)
	} else if from == nil {
		err = p.pusher.Upload(ctx, p.target.Context(), l)
	} else if err = p.pusher.Upload(ctx, p.target.Context(), &remote.MountableLayer{Layer: l, Reference: from}); refused(err) {
		// A mount needs a token that is good for the other repository too. The registry may refuse it:
		// the repository may be absent, or not readable for us.
		p.unshared.Store(true)
		err = p.plain.Upload(ctx, p.target.Context(), l)
	}
	if err != nil {
		// The local cause says more than its effect on the request.
		if local := stored.failed.Load(); local != nil {
			return *local
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

// refused reports whether err is a registry's denial of access.
func refused(err error) bool {
	var answer *remotetransport.Error
	return errors.As(err, &answer) && (answer.StatusCode == http.StatusUnauthorized || answer.StatusCode == http.StatusForbidden)
}

// storedBlob implements partial.CompressedLayer; it may be opened several times.
type storedBlob struct {
	ctx      context.Context //nolint:containedctx // of the upload that this is for: Compressed has none
	store    *store.Store
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

// Compressed opens the blob. Reading checks its digest and withholds the last bytes if it is wrong.
func (b *storedBlob) Compressed() (io.ReadCloser, error) {
	b.opened.Store(true)
	b.failed.Store(nil)
	f, err := b.store.OpenBlob(b.blob.Digest)
	if err != nil {
		return nil, b.fail(fmt.Errorf("%w: %w", errHere, err))
	}
	b.progress(0)
	return &checkedBlob{of: b, file: f, r: store.WithContext(b.ctx, f), hash: sha256.New()}, nil
}

type checkedBlob struct {
	of          *storedBlob
	file        *os.File
	r           io.Reader
	hash        hash.Hash
	n, reported int64
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
	if c.n-c.reported >= progressStep {
		c.reported = c.n
		c.of.progress(c.n)
	}
	return n, err
}

func (c *checkedBlob) Close() error { return c.file.Close() }
