// Package registry pulls the parts of images from registries and their mirrors into a store, and
// pushes stored images to them.
//
// It checks every digest and size of a blob. The caller decides which parts make an image.
package registry

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"syscall"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	remotetransport "github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"github.com/sandboxd/sandboxd/image/errdefs"
	"github.com/sandboxd/sandboxd/image/reference"
)

// Client speaks to registries. Its methods may be called from several goroutines.
type Client struct {
	Config   Config
	Keychain authn.Keychain // finds credentials; nil: none are used
	// Lookup returns the addresses of a host; nil resolves names as the host does.
	Lookup        func(ctx context.Context, host string) ([]netip.Addr, error)
	Backoff       remote.Backoff // between attempts after errors that may pass
	MaxWait       time.Duration  // limit of all waits of one pull or push for a registry that answers 429
	HelperTimeout time.Duration  // limit for a credential helper's answer
	Log           *slog.Logger
}

// NewClient returns a client with the usual credentials and limits.
func NewClient(config Config, log *slog.Logger) *Client {
	return &Client{
		Config: config, Keychain: authn.DefaultKeychain, MaxWait: maxWait, HelperTimeout: 30 * time.Second, Log: log,
		Backoff: remote.Backoff{Duration: 500 * time.Millisecond, Factor: 3, Jitter: 0.1, Steps: 3},
	}
}

// connection is an open way to the repository of an image.
type connection struct {
	verb    string         // purpose, for error messages: "pull"
	noLogin bool           // there are no credentials
	image   name.Reference // as asked for
	at      name.Reference // at the registry itself, or at a mirror
	tr      *transport     // to be closed
	options []remote.Option
}

// connect prepares requests about the image ref to the registry of source, which may be a mirror.
func (c *Client) connect(ctx context.Context, verb string, ref, source name.Reference, insecure bool) (*connection, error) {
	registry := source.Context().RegistryStr()
	lax := func(address string) bool {
		return c.Config.insecure(address) || insecure && address == registry
	}
	if lax(registry) || loopback(registry) {
		// Allows plain HTTP where HTTPS does not answer. The transport holds all other addresses to
		// HTTPS.
		var err error
		if source, err = name.ParseReference(source.Name(), name.Insecure); err != nil {
			return nil, errdefs.Classf(errdefs.ErrReference, "image reference %q: %w", source, err)
		}
	}
	auth, err := authn.Anonymous, error(nil)
	if c.Keychain != nil {
		auth, err = c.credentials(ctx, source)
	}
	if errdefs.Canceled(ctx, err) {
		return nil, fmt.Errorf("%s %s: %w", verb, reference.Normalize(ref), err)
	}
	if err != nil {
		return nil, errdefs.Classf(errdefs.ErrRegistry, "credentials for registry %s: %w; mend or remove them in ~/.docker/config.json or containers/auth.json",
			reference.Registry(source), err)
	}
	tr := newTransport(registry, lax, c.Config.CAs)
	tr.lookup = c.Lookup
	tr.backoff = c.Backoff
	tr.waitLeft.Store(int64(c.MaxWait))
	return &connection{verb: verb, noLogin: c.Keychain == nil, image: ref, at: source, tr: tr, options: []remote.Option{
		remote.WithTransport(tr), remote.WithAuth(auth), remote.WithUserAgent("sandboxd"),
		remote.WithRetryBackoff(c.Backoff), remote.WithRetryStatusCodes(retryStatusCodes()...),
	}}, nil
}

// retryStatusCodes returns the answers after which go-containerregistry retries: its defaults
// without 429, for which our transport waits as long as the registry says, and no longer.
func retryStatusCodes() []int {
	return []int{
		http.StatusRequestTimeout, http.StatusInternalServerError, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout,
		499, // nginx: the client closed the request
		522, // Cloudflare: its own connection timed out
	}
}

// credentials asks the keychain, which may run a helper. Helpers ignore cancellation, so a hanging
// one is left behind: it must block neither the end of the pull nor that of the daemon.
func (c *Client) credentials(ctx context.Context, source name.Reference) (authn.Authenticator, error) {
	type answer struct {
		auth authn.Authenticator
		err  error
	}
	got := make(chan answer, 1) // buffered, because the receiver may have gone
	go func() {
		auth, err := authn.Resolve(ctx, c.Keychain, source.Context())
		got <- answer{auth, err}
	}()
	timer := time.NewTimer(c.HelperTimeout)
	defer timer.Stop()
	select {
	case a := <-got:
		return a.auth, a.err
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-timer.C:
		return nil, fmt.Errorf("the credential helper does not answer within %v", c.HelperTimeout)
	}
}

// explain adds the meaning of a registry's answer, or of a missing one, and its remedy.
func (c *connection) explain(ctx context.Context, err error) error {
	image, registry := reference.Normalize(c.image), reference.Registry(c.at)
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
	login := fmt.Sprintf("docker login %s, or podman login, as the user who runs the daemon", registry)
	if c.noLogin {
		login = "tenants of this daemon use no credentials; have the image imported from an archive instead"
	}
	failed := func(format string, args ...any) error {
		return errdefs.Classf(errdefs.ErrRegistry, "image %s: registry %s "+format, append([]any{image, registry}, args...)...)
	}
	switch {
	case errors.Is(err, errdefs.ErrInvalid) && c.verb != "push": // on push the image is ours, and the answer is at fault
		return errdefs.Classf(errdefs.ErrInvalid, "image %s: %w", image, err)
	case errdefs.Canceled(ctx, err):
		return fmt.Errorf("%s %s: %w", c.verb, image, err)
	// Before the answer: on this machine plain HTTP is tried next, and a TLS server's answer to that
	// explains nothing.
	case errors.As(err, &untrusted), errors.As(err, &unknownCA):
		return errdefs.Classf(errdefs.ErrRegistry, "image %s: the certificate of registry %s is not trusted: %w; install its CA on this host, name it with serve --registry-ca, or allow insecure", image, registry, err)
	case errors.As(err, &answer):
		switch answer.StatusCode {
		case http.StatusUnauthorized, http.StatusForbidden:
			return failed("refuses access (%w); %s: %s", err, access, login)
		case http.StatusNotFound:
			return failed(absent, err)
		case http.StatusTooManyRequests:
			return failed("allows no more requests for now (%w); wait, or log in", err)
		default:
			if answer.StatusCode < 500 {
				return failed("refuses it (%w)", err)
			}
			return failed("answers with an error (%w); try again later", err)
		}
	case errors.Is(err, http.ErrSchemeMismatch), errors.Is(err, errPlainHTTP):
		return failed("speaks plain HTTP: %w; allow insecure if the network to it is trusted", err)
	case errors.Is(err, errThisMachine):
		return failed("cannot be used: %w", err)
	case errors.Is(err, errRedirects):
		return failed("cannot be used: %w; try again later", err)
	case c.verb == "push" && disconnected(err):
		return failed("broke off: %w; try again, blobs that it has are not sent again", err)
	case errors.As(err, &request), errors.As(err, &network):
		return failed("cannot be reached: %w; check the name and that the registry runs", err)
	}
	if c.verb == "push" {
		return errdefs.Classf(errdefs.ErrRegistry, "image %s: the answer of registry %s cannot be used: %w", image, registry, err)
	}
	return errdefs.Classf(errdefs.ErrInvalid, "image %s: the registry's answer cannot be used: %w", image, err)
}

// disconnected reports whether an established connection ended too early.
func disconnected(err error) bool {
	for _, end := range []error{net.ErrClosed, io.EOF, io.ErrUnexpectedEOF, syscall.ECONNRESET, syscall.EPIPE, errStalled, errUploadStalled} {
		if errors.Is(err, end) {
			return true
		}
	}
	return false
}
