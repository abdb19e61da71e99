package image

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"syscall"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	remotetransport "github.com/google/go-containerregistry/pkg/v1/remote/transport"
)

// connection is what it takes to speak to the registry of an image.
type connection struct {
	verb    string         // what it is for, as in error messages: "pull"
	image   name.Reference // as asked for
	at      name.Reference // where: at the registry itself, or at a mirror
	tr      *transport     // to be closed
	options []remote.Option
}

// connect prepares to speak to the registry of source, which may be a mirror, about the image ref.
func (s *Service) connect(ctx context.Context, verb string, ref, source name.Reference, lax bool) (*connection, error) {
	registry := source.Context().RegistryStr()
	insecure := func(address string) bool {
		return s.opts.Registries.insecure(address) || lax && address == registry
	}
	if insecure(registry) || loopback(registry) {
		// Allows plain HTTP where HTTPS does not answer. The transport holds everything else to HTTPS.
		var err error
		if source, err = name.ParseReference(source.Name(), name.Insecure); err != nil {
			return nil, classf(ErrReference, "image reference %q: %w", source, err)
		}
	}
	auth, err := s.credentials(ctx, source)
	if gaveUp(ctx, err) {
		return nil, fmt.Errorf("%s %s: %w", verb, normalised(ref), err)
	}
	if err != nil {
		return nil, classf(ErrRegistry, "credentials for registry %s: %w; mend or remove them in ~/.docker/config.json or containers/auth.json",
			registryName(source), err)
	}
	tr := newTransport(registry, insecure, s.opts.Registries.CAs)
	tr.lookup = s.opts.Lookup
	tr.backoff = s.backoff
	tr.patience.Store(int64(s.patience))
	return &connection{verb: verb, image: ref, at: source, tr: tr, options: []remote.Option{
		remote.WithTransport(tr), remote.WithAuth(auth), remote.WithUserAgent("sandboxd"),
		remote.WithRetryBackoff(s.backoff), remote.WithRetryStatusCodes(retryStatusCodes()...),
	}}, nil
}

// explain says what a registry's answer, or the lack of one, means and what can be done.
func (c *connection) explain(ctx context.Context, err error) error {
	image, registry := normalised(c.image), registryName(c.at)
	var (
		answer    *remotetransport.Error
		network   *networkError
		request   *url.Error
		untrusted *tls.CertificateVerificationError
		unknownCA x509.UnknownAuthorityError
	)
	access, absent := "the repository may not exist, or need a login", "does not have it (%w); check name and tag"
	if c.verb == "push" {
		access, absent = "the repository may not be yours to write to, or need a login", "does not have the repository (%w); check the name"
	}
	switch {
	case errors.Is(err, ErrInvalid) && c.verb != "push": // there it is the registry's answer, and the image is ours
		return classf(ErrInvalid, "image %s: %w", image, err)
	case gaveUp(ctx, err):
		return fmt.Errorf("%s %s: %w", c.verb, image, err)
	// Before the answer: on this machine plain HTTP is tried next, and what a TLS server says to that helps nobody.
	case errors.As(err, &untrusted), errors.As(err, &unknownCA):
		return classf(ErrRegistry, "image %s: the certificate of registry %s is not trusted: %w; install its CA on this host, name it with serve --registry-ca, or allow insecure", image, registry, err)
	case errors.As(err, &answer):
		switch answer.StatusCode {
		case http.StatusUnauthorized, http.StatusForbidden:
			return classf(ErrRegistry, "image %s: registry %s refuses access (%w); %s: docker login %s, or podman login, as the user who runs the daemon",
				image, registry, err, access, registry)
		case http.StatusNotFound:
			return classf(ErrRegistry, "image %s: registry %s "+absent, image, registry, err)
		case http.StatusTooManyRequests:
			return classf(ErrRegistry, "image %s: registry %s allows no more requests for now (%w); wait, or log in", image, registry, err)
		default:
			if answer.StatusCode < 500 {
				return classf(ErrRegistry, "image %s: registry %s refuses it (%w)", image, registry, err)
			}
			return classf(ErrRegistry, "image %s: registry %s answers with an error (%w); try again later", image, registry, err)
		}
	case errors.Is(err, http.ErrSchemeMismatch), errors.Is(err, errPlainHTTP):
		return classf(ErrRegistry, "image %s: registry %s speaks plain HTTP: %w; allow insecure if the network to it is trusted", image, registry, err)
	case errors.Is(err, errThisMachine):
		return classf(ErrRegistry, "image %s: registry %s cannot be used: %w", image, registry, err)
	case errors.Is(err, errRedirects):
		return classf(ErrRegistry, "image %s: registry %s cannot be used: %w; try again later", image, registry, err)
	case c.verb == "push" && brokeOff(err):
		return classf(ErrRegistry, "image %s: registry %s broke off: %w; try again, what it has already is not sent anew", image, registry, err)
	case errors.As(err, &request), errors.As(err, &network):
		return classf(ErrRegistry, "image %s: registry %s cannot be reached: %w; check the name and that the registry runs", image, registry, err)
	}
	if c.verb == "push" {
		return classf(ErrRegistry, "image %s: the answer of registry %s cannot be used: %w", image, registry, err)
	}
	return classf(ErrInvalid, "image %s: the registry's answer cannot be used: %w", image, err)
}

// brokeOff reports whether a connection that stood ended too early.
func brokeOff(err error) bool {
	for _, end := range []error{net.ErrClosed, io.EOF, io.ErrUnexpectedEOF, syscall.ECONNRESET, syscall.EPIPE, errStalled, errNotTaking} {
		if errors.Is(err, end) {
			return true
		}
	}
	return false
}
