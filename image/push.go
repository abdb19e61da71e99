package image

import (
	"context"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/errdefs"
	"github.com/sandboxd/sandboxd/image/reference"
	"github.com/sandboxd/sandboxd/image/registry"
)

// PushOptions are the options of [Service.Push].
type PushOptions struct {
	Insecure bool              // as in [PullOptions]
	Auth     *api.RegistryAuth // as in [PullOptions]
	// Platform is the one to push; empty means the stored one.
	Platform string
	// Progress is called by one goroutine at a time and not after Push has returned. It should be
	// quick.
	Progress func(api.PullEvent)
}

// Push sends a stored image to the registry of its name, under that name. The manifest is the one
// that was pulled, built or imported. The store has the parts for one platform, so no index is
// sent.
func (s *Service) Push(ctx context.Context, ref string, opts PushOptions) (*Image, error) {
	if ref == api.HostImage {
		return nil, errdefs.Classf(ErrReference, "the image %q shows this host's own /usr, which is not pushed; pull, build or import an image", ref)
	}
	parsed, err := reference.Parse(ref)
	if err != nil {
		return nil, err
	}
	img, r, release, err := s.acquireRecord(ctx, ref)
	if err != nil {
		return nil, err
	}
	defer release()
	if d, ok := parsed.(name.Digest); ok && d.DigestStr() != r.Manifest.Digest {
		return nil, errdefs.Classf(ErrReference, "%s names an index, of which only the parts for %s are stored, the image %s; tag it, and push that name",
			r.Name, r.Platform, r.Manifest.Digest)
	}
	if opts.Platform != "" {
		want, err := reference.ParsePlatform(opts.Platform)
		if err != nil {
			return nil, err
		}
		if have, err := v1.ParsePlatform(r.Platform); err != nil || !reference.Suits(*have, want) {
			return nil, errdefs.Classf(ErrReference, "image %s is stored for %s only, not for %s; pull it with --platform %s, which takes the name, and push that",
				r.Name, r.Platform, want, want)
		}
	}
	others, err := s.records()
	if err != nil {
		return nil, err
	}
	p := progress{report: opts.Progress}
	defer p.end()
	return img, s.registriesAs(opts.Auth, parsed.Context().RegistryStr()).Push(ctx, parsed, registry.Upload{Store: s.store, Image: r, Insecure: opts.Insecure, Others: others, Event: p.event})
}
