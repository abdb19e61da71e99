// Package reference parses the names of images and platforms.
package reference

import (
	"net"
	"net/netip"
	goruntime "runtime"
	"strconv"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/errdefs"
)

// dockerHub is the usual name of the registry that go-containerregistry calls by its address.
const dockerHub = "docker.io"

// maxReference limits the bytes of a name before parsing. The parts that specifications allow add
// up to less.
const maxReference = 1024

// Parse parses a reference as Docker does: "debian" is docker.io/library/debian:latest, and
// "localhost:5000/x" has a registry of that address.
func Parse(ref string) (name.Reference, error) {
	if ref == "" {
		return nil, errdefs.Classf(errdefs.ErrReference, "the image reference is empty; give one like debian:12 or registry.example/app@sha256:..., or %q", api.HostImage)
	}
	if len(ref) > maxReference {
		return nil, errdefs.Classf(errdefs.ErrReference, "the image reference has %d bytes, %d are allowed", len(ref), maxReference)
	}
	// Docker itself never allowed URLs, but people paste them.
	if _, rest, ok := strings.Cut(ref, "://"); ok {
		return nil, errdefs.Classf(errdefs.ErrReference, "image reference %q is a URL; give it without the scheme: %s", ref, rest)
	}
	parsed, err := name.ParseReference(ref)
	if err != nil {
		return nil, errdefs.Classf(errdefs.ErrReference, "image reference %q: %w; references look like debian:12 or registry.example:5000/team/app:1.0", ref, err)
	}
	if host := parsed.Context().RegistryStr(); !ValidHost(host) {
		return nil, errdefs.Classf(errdefs.ErrReference, "image reference %q: %q is not the address of a registry; references look like debian:12 or registry.example:5000/team/app:1.0", ref, host)
	}
	return parsed, nil
}

// ParseTag parses a name that an image can be given: a tag, not a digest.
func ParseTag(ref string) (name.Reference, error) {
	if ref == api.HostImage {
		return nil, errdefs.Classf(errdefs.ErrReference, "%q is this host's own image; choose another name", ref)
	}
	parsed, err := Parse(ref)
	if err != nil {
		return nil, err
	}
	if _, ok := parsed.(name.Digest); ok {
		return nil, errdefs.Classf(errdefs.ErrReference, "%q is a digest, which follows from the image's content; give a tag", ref)
	}
	return parsed, nil
}

// ValidHost reports whether address is a host name or IP address with an optional port.
// go-containerregistry takes "../etc/passwd" for the repository etc/passwd of a registry "..".
func ValidHost(address string) bool {
	host := address
	if h, port, err := net.SplitHostPort(address); err == nil {
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return false
		}
		host = h
	}
	if _, err := netip.ParseAddr(strings.Trim(host, "[]")); err == nil {
		return true
	}
	if len(host) > 253 {
		return false
	}
	for label := range strings.SplitSeq(host, ".") {
		if label == "" || len(label) > 63 || strings.Trim(label, "-") != label ||
			strings.Trim(label, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_") != "" {
			return false
		}
	}
	return true
}

// Normalize returns the name under which an image is stored and shown.
func Normalize(ref name.Reference) string {
	s := ref.Name()
	if rest, ok := strings.CutPrefix(s, name.DefaultRegistry+"/"); ok {
		return dockerHub + "/" + rest
	}
	return s
}

// Registry returns the usual address of the registry: docker.io for Docker Hub.
func Registry(ref name.Reference) string {
	if r := ref.Context().RegistryStr(); r != name.DefaultRegistry {
		return r
	}
	return dockerHub
}

// CanonicalRegistry returns a registry's address for comparison: in lower case, and docker.io for
// Docker Hub.
func CanonicalRegistry(address string) string {
	if address = strings.ToLower(address); address == name.DefaultRegistry {
		return dockerHub
	}
	return address
}

// ParsePlatform parses the platform of an image: "linux/arm64/v8", or this host's if empty.
func ParsePlatform(want string) (v1.Platform, error) {
	if want == "" {
		return v1.Platform{OS: "linux", Architecture: goruntime.GOARCH}, nil
	}
	p, err := v1.ParsePlatform(want)
	if err != nil || p.OS == "" || p.Architecture == "" || p.OSVersion != "" {
		return v1.Platform{}, errdefs.Classf(errdefs.ErrReference, "platform %q: give one like linux/amd64 or linux/arm64/v8", want)
	}
	if p.OS != "linux" {
		return v1.Platform{}, errdefs.Classf(errdefs.ErrReference, "platform %q: sandboxes run Linux programs only", want)
	}
	return *p, nil
}

// Suits reports whether an image for have runs where want is asked for. A part that either leaves
// open suits.
func Suits(have, want v1.Platform) bool {
	return have.OS == want.OS && have.Architecture == want.Architecture &&
		(want.Variant == "" || have.Variant == "" || have.Variant == want.Variant)
}
