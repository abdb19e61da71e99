package registry

import (
	"crypto/x509"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"

	"github.com/sandboxd/sandboxd/image/reference"
)

// Config holds the settings of particular registries. The zero value has none.
type Config struct {
	// Mirrors are tried in order before the registry of that address ("docker.io") itself; both
	// addresses as [ParseMirror] returns them. A mirror is trusted for tags; digests are checked.
	Mirrors map[string][]string
	// Insecure are addresses that may speak plain HTTP, or HTTPS with any certificate.
	Insecure []string
	// CAs are trusted for every registry; nil means the host's own.
	CAs *x509.CertPool
}

// ParseMirror parses "REGISTRY=MIRROR", each the address of a registry.
func ParseMirror(s string) (registry, mirror string, err error) {
	registry, mirror, ok := strings.Cut(s, "=")
	if !ok || !reference.ValidHost(registry) || !reference.ValidHost(mirror) {
		return "", "", fmt.Errorf("mirror %q: want REGISTRY=MIRROR, both addresses like docker.io or mirror.example:5000, without a scheme or path", s)
	}
	registry, mirror = reference.CanonicalRegistry(registry), reference.CanonicalRegistry(mirror)
	for _, address := range []string{registry, mirror} {
		// "localhost" alone would be taken for the first part of a repository on Docker Hub.
		if ref, err := name.ParseReference(address + "/a/b:1"); err != nil || reference.Registry(ref) != address {
			return "", "", fmt.Errorf("mirror %q: %q cannot be the registry in the name of an image; give it a port or a domain, like %s:443", s, address, address)
		}
	}
	if registry == mirror {
		return "", "", fmt.Errorf("mirror %q: the registry is not a mirror of itself", s)
	}
	return registry, mirror, nil
}

// CheckAddress returns an error if s is not the address of a registry.
func CheckAddress(s string) error {
	if !reference.ValidHost(s) {
		return fmt.Errorf("registry %q: want an address like registry.example:5000, without a scheme or path", s)
	}
	return nil
}

// ReadCAs returns the host's trusted certificates and those in the PEM files.
func ReadCAs(files []string) (*x509.CertPool, error) {
	pool, err := x509.SystemCertPool()
	if err != nil {
		return nil, fmt.Errorf("read the host's certificates: %w", err)
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("read certificates: %w", err)
		}
		if !pool.AppendCertsFromPEM(data) {
			return nil, fmt.Errorf("read certificates: %s has no certificate in PEM form", file)
		}
	}
	return pool, nil
}

func (c *Config) insecure(registry string) bool {
	return slices.ContainsFunc(c.Insecure, func(address string) bool {
		return reference.CanonicalRegistry(address) == reference.CanonicalRegistry(registry)
	})
}

// sources returns the places of an image in the order of requests; the last is the registry of its
// name.
func (c *Config) sources(ref name.Reference) []name.Reference {
	var out []name.Reference
	for _, mirror := range c.Mirrors[reference.CanonicalRegistry(reference.Registry(ref))] {
		repository := mirror + "/" + ref.Context().RepositoryStr()
		text := repository + ":" + ref.Identifier()
		if _, ok := ref.(name.Digest); ok {
			text = repository + "@" + ref.Identifier()
		}
		// ParseMirror has checked that they parse.
		if m, err := name.ParseReference(text); err == nil && reference.Registry(m) == mirror {
			out = append(out, m)
		}
	}
	return append(out, ref)
}

// loopback reports whether the address "host" or "host:port" is certainly this machine.
func loopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		host = strings.Trim(address, "[]")
	}
	if host == "localhost" {
		return true
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.Unmap().IsLoopback()
}
