package registry

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	remotetransport "github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"github.com/sandboxd/sandboxd/image/errdefs"
	"github.com/sandboxd/sandboxd/image/reference"
)

// Check asks a registry, "docker.io" for example, whether it takes the credentials that the
// keychain has for it. Refusal is the registry's answer if it does not, and else empty.
func (c *Client) Check(ctx context.Context, registry string, insecure bool) (refusal string, err error) {
	ref, err := RepositoryAt(registry)
	if err != nil {
		return "", err
	}
	conn, err := c.connect(ctx, "check", ref, ref, insecure)
	if err != nil {
		return "", err
	}
	defer conn.tr.close()
	err = c.check(ctx, conn)
	var answer *remotetransport.Error
	switch {
	case err == nil:
		return "", nil
	case refused(err) && errors.As(err, &answer):
		return fmt.Sprintf("%d %s", answer.StatusCode, http.StatusText(answer.StatusCode)), nil
	case errdefs.Canceled(ctx, err):
		return "", fmt.Errorf("check registry %s: %w", registry, err)
	default:
		return "", errdefs.Classf(errdefs.ErrRegistry, "check registry %s: %w", registry, err)
	}
}

// RepositoryAt returns the name of an image in a registry, which need not be there.
func RepositoryAt(registry string) (name.Reference, error) {
	if err := CheckAddress(registry); err != nil {
		return nil, errdefs.Classf(errdefs.ErrReference, "%w", err)
	}
	address := reference.CanonicalRegistry(registry)
	ref, err := name.ParseReference(address + "/library/any:latest")
	if err != nil || reference.Registry(ref) != address { // a name without a port or domain
		return nil, errdefs.Classf(errdefs.ErrReference, "registry %q: want an address like registry.example:5000", registry)
	}
	return ref, nil
}

func (c *Client) check(ctx context.Context, conn *connection) error {
	registry := conn.at.Context().Registry
	challenge, err := remotetransport.Ping(ctx, registry, conn.tr)
	if err != nil {
		return err
	}
	auth := authn.Anonymous
	if c.Keychain != nil {
		if auth, err = c.credentials(ctx, conn.at); err != nil {
			return err
		}
	}
	// With tokens, this fetches one for no repository: the token server checks the credentials.
	tr, err := remotetransport.NewWithContext(ctx, registry, auth, conn.tr, nil)
	if err != nil {
		return err
	}
	scheme := "https"
	if challenge.Insecure {
		scheme = "http"
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("%s://%s/v2/", scheme, registry.RegistryStr()), http.NoBody)
	if err != nil {
		return err
	}
	resp, err := (&http.Client{Transport: tr}).Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return remotetransport.CheckError(resp, http.StatusOK)
}
