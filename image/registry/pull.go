package registry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"github.com/sandboxd/sandboxd/image/errdefs"
	"github.com/sandboxd/sandboxd/image/reference"
	"github.com/sandboxd/sandboxd/image/store"
)

// ParallelDownloads is the number of blobs that one pull downloads at a time.
const ParallelDownloads = 3

// Source is the repository of an image that is being pulled, at its registry or at a mirror.
type Source struct {
	*connection

	client *Client
	puller *remote.Puller
}

// Pull calls fetch with each place of an image, mirrors first, until fetch succeeds. It goes on
// after errors of the classes ErrRegistry and ErrInvalid, whatever their cause: a mirror is a
// convenience. A source is valid until its fetch returns.
//
// Insecure allows plain HTTP, and HTTPS with any certificate, to the sources' own addresses.
func (c *Client) Pull(ctx context.Context, ref name.Reference, insecure bool, fetch func(*Source) error) error {
	sources := c.Config.sources(ref)
	for i, source := range sources {
		err := c.pullFrom(ctx, ref, source, insecure, fetch)
		if err == nil || i == len(sources)-1 || !errors.Is(err, errdefs.ErrRegistry) && !errors.Is(err, errdefs.ErrInvalid) {
			return err
		}
		c.Log.Warn("a mirror does not serve an image", "image", reference.Normalize(ref), "mirror", source.Context().RegistryStr(), "error", err)
	}
	return nil // never: sources has the registry itself
}

func (c *Client) pullFrom(ctx context.Context, ref, source name.Reference, insecure bool, fetch func(*Source) error) error {
	conn, err := c.connect(ctx, "pull", ref, source, insecure)
	if err != nil {
		return err
	}
	defer conn.tr.close()
	puller, err := remote.NewPuller(append(conn.options, remote.WithJobs(ParallelDownloads))...)
	if err != nil {
		return fmt.Errorf("prepare to pull %s: %w", reference.Normalize(ref), err)
	}
	return fetch(&Source{connection: conn, client: c, puller: puller})
}

// Sender names the source in messages about its answers.
func (*Source) Sender() string { return "the registry" }

// Document returns a manifest or index: that of the digest, or of the reference if digest is empty.
// It is not checked.
func (s *Source) Document(ctx context.Context, digest string) ([]byte, error) {
	ref := s.at
	if digest != "" {
		ref = s.at.Context().Digest(digest)
	}
	got, err := s.puller.Get(ctx, ref)
	if err != nil {
		return nil, s.explain(ctx, err)
	}
	return got.Manifest, nil
}

// Blob passes the content of a blob to write, which must check it, and retries after network
// errors. It calls progress with the bytes so far.
func (s *Source) Blob(ctx context.Context, b store.Blob, write func(io.Reader) error, progress func(int64)) error {
	wait := s.client.Backoff.Duration
	for attempt := 1; ; attempt++ {
		retry, err := s.download(ctx, b, write, progress)
		if err == nil || !retry || attempt >= s.client.Backoff.Steps || ctx.Err() != nil {
			return err
		}
		if pause(ctx, wait) != nil {
			return err
		}
		wait = time.Duration(float64(wait) * s.client.Backoff.Factor)
	}
}

func (s *Source) download(ctx context.Context, b store.Blob, write func(io.Reader) error, progress func(int64)) (retry bool, err error) {
	l, err := s.puller.Layer(ctx, s.at.Context().Digest(b.Digest))
	if err != nil {
		return false, s.explain(ctx, err)
	}
	rc, err := l.Compressed()
	if err != nil {
		return false, s.explain(ctx, err) // go-containerregistry has retried already
	}
	src := &countingReader{r: rc, progress: progress}
	err = write(src)
	_ = rc.Close() // everything that matters has been read and checked
	var network *networkError
	switch {
	case err == nil:
		return false, nil
	case errdefs.Canceled(ctx, err):
		return false, err
	case errors.Is(err, store.ErrMismatch):
		return false, s.invalidf("%w; the registry sends other bytes than the image was made of", err)
	case src.err == nil:
		return false, err // ours: the disk
	case errors.As(src.err, &network):
		return true, errdefs.Classf(errdefs.ErrRegistry, "image %s: registry %s broke off blob %s after %d of %d bytes: %w; try again",
			reference.Normalize(s.image), reference.Registry(s.at), b.Digest, src.n, b.Size, network)
	}
	// go-containerregistry checks digest and length too, and may be the first to notice.
	return false, s.invalidf("blob %s: %w; the registry sends other bytes than the image was made of", b.Digest, src.err)
}

func (s *Source) invalidf(format string, args ...any) error {
	return errdefs.Classf(errdefs.ErrInvalid, "image %s: %w", reference.Normalize(s.image), fmt.Errorf(format, args...))
}

// progressStep is the number of bytes between two reports of progress.
const progressStep = 1 << 20

// countingReader reports progress and keeps the read error that ended it.
type countingReader struct {
	r           io.Reader
	progress    func(int64)
	n, reported int64
	err         error
}

func (c *countingReader) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	c.n += int64(n)
	if c.n-c.reported >= progressStep {
		c.reported = c.n
		c.progress(c.n)
	}
	if err != nil && !errors.Is(err, io.EOF) {
		c.err = err
	}
	return n, err
}
