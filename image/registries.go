package image

import (
	"crypto/x509"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
)

// Registries say how the registries are spoken to that need something special. The zero value needs nothing.
type Registries struct {
	// Mirrors are asked before the registry of that address ("docker.io") itself, in this order; both addresses as
	// [ParseMirror] returns them. What they send under a tag is believed; a digest is a digest.
	Mirrors map[string][]string
	// Insecure are addresses that may speak plain HTTP, or HTTPS with any certificate.
	Insecure []string
	// CAs are trusted for every registry; nil: the host's own.
	CAs *x509.CertPool
}

// ParseMirror reads "REGISTRY=MIRROR", each the address of a registry.
func ParseMirror(s string) (registry, mirror string, err error) {
	registry, mirror, ok := strings.Cut(s, "=")
	if !ok || !validHost(registry) || !validHost(mirror) {
		return "", "", fmt.Errorf("mirror %q: want REGISTRY=MIRROR, both addresses like docker.io or mirror.example:5000, without a scheme or path", s)
	}
	registry, mirror = registryKey(registry), registryKey(mirror)
	for _, address := range []string{registry, mirror} {
		// "localhost" alone would be taken for the first part of a repository on Docker Hub.
		if ref, err := name.ParseReference(address + "/a/b:1"); err != nil || registryName(ref) != address {
			return "", "", fmt.Errorf("mirror %q: %q cannot be the registry in the name of an image; give it a port or a domain, like %s:443", s, address, address)
		}
	}
	if registry == mirror {
		return "", "", fmt.Errorf("mirror %q: the registry is not a mirror of itself", s)
	}
	return registry, mirror, nil
}

// registryKey is a registry's address as it is compared: in lower case, and Docker Hub's as people know it.
func registryKey(address string) string {
	if address = strings.ToLower(address); address == name.DefaultRegistry {
		return dockerHub
	}
	return address
}

// CheckRegistry says whether s is the address of a registry.
func CheckRegistry(s string) error {
	if !validHost(s) {
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

func (r *Registries) insecure(registry string) bool {
	return slices.ContainsFunc(r.Insecure, func(address string) bool { return registryKey(address) == registryKey(registry) })
}

// sources are where an image may be, in the order in which they are asked; the last is the registry of its name.
func (r *Registries) sources(ref name.Reference) []name.Reference {
	var out []name.Reference
	for _, mirror := range r.Mirrors[registryKey(registryName(ref))] {
		repository := mirror + "/" + ref.Context().RepositoryStr()
		text := repository + ":" + ref.Identifier()
		if _, ok := ref.(name.Digest); ok {
			text = repository + "@" + ref.Identifier()
		}
		// ParseMirror has seen to it that they can be parsed.
		if m, err := name.ParseReference(text); err == nil && registryName(m) == mirror {
			out = append(out, m)
		}
	}
	return append(out, ref)
}
