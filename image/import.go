package image

import (
	"context"
	"errors"
	"io"
	"slices"

	"github.com/google/go-containerregistry/pkg/name"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/archive"
	"github.com/sandboxd/sandboxd/image/errdefs"
	"github.com/sandboxd/sandboxd/image/reference"
)

// ImportOptions are the options of [Service.Import].
type ImportOptions struct {
	// Reference is the name of the image; required if the archive has none. An archive with several
	// images cannot be imported under one name.
	Reference string
	Platform  string // as in [PullOptions]
	// Rootfs is true if the archive is a root file system, and Config is that image's configuration.
	Rootfs bool
	Config api.ImageConfig
	// Progress is called about the layers, by one goroutine at a time, after the archive has been read
	// and not after Import has returned. It should be quick.
	Progress func(api.PullEvent)
}

// Import stores the images of the archive in r: an OCI layout in a tar, the output of docker save,
// or a root file system. It reads r once and keeps no file in memory. Files of the archive that
// belong to no image are removed.
//
// An archive is imported whole or not at all. Errors of reading r are returned unchanged.
func (s *Service) Import(ctx context.Context, r io.Reader, opts ImportOptions) (_ []*Image, err error) {
	want, err := reference.ParsePlatform(opts.Platform)
	if err != nil {
		return nil, err
	}
	var target name.Reference
	if opts.Reference != "" {
		if target, err = reference.ParseTag(opts.Reference); err != nil {
			return nil, err
		}
	}
	src := &errReader{r: r}
	staging := s.staging()
	defer func() {
		if rerr := s.release(ctx, staging.Pinned, nil, true); rerr != nil {
			err = errors.Join(err, rerr)
		}
	}()
	var roots []archive.Root
	if opts.Rootfs {
		if target == nil {
			return nil, errdefs.Classf(ErrReference, "a root file system has no name; give one, like tools/base:1.0")
		}
		roots, err = archive.ImportRootfs(ctx, staging, src, want, opts.Config)
	} else {
		roots, err = archive.Import(ctx, staging, src)
	}
	switch {
	case src.err != nil:
		return nil, src.err // the cause of any other error
	case err != nil:
		return nil, err
	case target != nil && len(roots) > 1:
		return nil, errdefs.Classf(ErrReference, "the archive has %d images, which cannot all be called %s; leave the name out to use theirs", len(roots), reference.Normalize(target))
	}
	var ready []*prepared
	defer func() {
		for _, p := range ready { // none once they are recorded
			err = errors.Join(err, s.releasePrepared(ctx, p, true))
		}
	}()
	names := 0
	for _, root := range roots {
		refs := root.Names
		if target != nil {
			refs = []name.Reference{target}
		}
		if len(refs) == 0 {
			return nil, errdefs.Classf(ErrReference, "the archive has no name for its image %s; give one, like tools/base:1.0", root.Digest)
		}
		if names += len(refs); names > maxArchiveNames {
			return nil, archive.Invalidf("its images have more than %d names", maxArchiveNames)
		}
		p := &pull{service: s, ref: refs[0], want: want, explicit: opts.Platform != "", origin: s.archived(staging, root.Digest), staging: staging, made: root.Made}
		p.progress.report = opts.Progress
		r, err := p.run(ctx)
		p.progress.end()
		if err != nil {
			return nil, err
		}
		for _, ref := range refs[1:] {
			r.names = append(r.names, reference.Normalize(ref))
		}
		ready = append(ready, r)
	}
	recording := ready
	ready = nil
	return s.record(ctx, recording)
}

// maxArchiveNames limits the names of all images of an archive.
const maxArchiveNames = 1000

// errReader keeps the read error that ended it.
type errReader struct {
	r   io.Reader
	err error
}

func (e *errReader) Read(b []byte) (int, error) {
	n, err := e.r.Read(b)
	if err != nil && !errors.Is(err, io.EOF) {
		e.err = err
	}
	return n, err
}

// staging returns a place for the blobs of an image in the making.
func (s *Service) staging() *archive.Staging {
	return archive.NewStaging(s.store, s.opts.Limits, func(ctx context.Context, digest string) error {
		return s.pin(ctx, blobKeys([]string{digest}))
	})
}

// archived returns the source of an image whose blobs are staged, or the tenant's already.
func (s *Service) archived(staging *archive.Staging, root string) archive.Source {
	return archive.Source{Store: s.store, Root: root, Known: func(digest string) (bool, error) { return s.staged(staging, digest) }}
}

// staged reports whether the tenant may use a blob: it is staged, or stored for the tenant.
func (s *Service) staged(staging *archive.Staging, digest string) (bool, error) {
	if staging != nil && slices.Contains(staging.Pinned, digest) {
		return true, nil
	}
	return s.entitled(blobKey(digest))
}

// Export writes a stored image to w as an archive, in one of the formats of [archive.Export]. It
// writes nothing if the request is invalid.
func (s *Service) Export(ctx context.Context, ref, format string, w io.Writer) error {
	if ref == api.HostImage {
		return errdefs.Classf(ErrReference, "the image %q shows this host's own /usr, which is not exported; pull or import an image", ref)
	}
	if err := archive.CheckFormat(format); err != nil {
		return err
	}
	_, r, release, err := s.acquireRecord(ctx, ref)
	if err != nil {
		return err
	}
	defer release()
	return archive.Export(ctx, s.store, r, format, w)
}
