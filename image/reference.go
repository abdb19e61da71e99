package image

import (
	"net"
	"net/netip"
	goruntime "runtime"
	"strconv"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/sandboxd/sandboxd/api"
)

// go-containerregistry knows Docker Hub by the address of its registry; people know it by this name.
const dockerHub = "docker.io"

// maxReference bounds a name before anything is parsed. The parts that specifications allow add up to less.
const maxReference = 1024

// parse reads a reference as Docker does: "debian" is docker.io/library/debian:latest, "localhost:5000/x" is a registry
// of that address.
func parse(ref string) (name.Reference, error) {
	if ref == "" {
		return nil, classf(ErrReference, "the image reference is empty; give one like debian:12 or registry.example/app@sha256:..., or %q", api.HostImage)
	}
	if len(ref) > maxReference {
		return nil, classf(ErrReference, "the image reference has %d bytes, %d are allowed", len(ref), maxReference)
	}
	// Docker itself never allowed URLs, but people paste them.
	if _, rest, ok := strings.Cut(ref, "://"); ok {
		return nil, classf(ErrReference, "image reference %q is a URL; give it without the scheme: %s", ref, rest)
	}
	parsed, err := name.ParseReference(ref)
	if err != nil {
		return nil, classf(ErrReference, "image reference %q: %w; references look like debian:12 or registry.example:5000/team/app:1.0", ref, err)
	}
	if host := parsed.Context().RegistryStr(); !validHost(host) {
		return nil, classf(ErrReference, "image reference %q: %q is not the address of a registry; references look like debian:12 or registry.example:5000/team/app:1.0", ref, host)
	}
	return parsed, nil
}

// validHost reports whether address is a host name or IP address with an optional port. go-containerregistry takes
// "../etc/passwd" for the repository etc/passwd of a registry called "..".
func validHost(address string) bool {
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

// normalised is the name under which an image is stored and shown.
func normalised(ref name.Reference) string {
	s := ref.Name()
	if rest, ok := strings.CutPrefix(s, name.DefaultRegistry+"/"); ok {
		return dockerHub + "/" + rest
	}
	return s
}

// registryName is the registry's address as people know it.
func registryName(ref name.Reference) string {
	if r := ref.Context().RegistryStr(); r != name.DefaultRegistry {
		return r
	}
	return dockerHub
}

// loopback reports whether the address "host" or "host:port" can only be this machine.
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

// platform is what an image is pulled for: the one asked for, or this host's.
func platform(want string) (v1.Platform, error) {
	if want == "" {
		return v1.Platform{OS: "linux", Architecture: goruntime.GOARCH}, nil
	}
	p, err := v1.ParsePlatform(want)
	if err != nil || p.OS == "" || p.Architecture == "" || p.OSVersion != "" {
		return v1.Platform{}, classf(ErrReference, "platform %q: give one like linux/amd64 or linux/arm64/v8", want)
	}
	if p.OS != "linux" {
		return v1.Platform{}, classf(ErrReference, "platform %q: sandboxes run Linux programs only", want)
	}
	return *p, nil
}

// suits reports whether something made for have runs where want is asked for. A part that either leaves open suits.
func suits(have, want v1.Platform) bool {
	return have.OS == want.OS && have.Architecture == want.Architecture &&
		(want.Variant == "" || have.Variant == "" || have.Variant == want.Variant)
}
