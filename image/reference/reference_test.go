package reference

import (
	"errors"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/image/errdefs"
)

func TestReferences(t *testing.T) {
	hex := strings.Repeat("0123456789abcdef", 4)
	tests := []struct{ ref, name, registry string }{
		{"debian", "docker.io/library/debian:latest", "docker.io"},
		{"debian:12", "docker.io/library/debian:12", "docker.io"},
		{"team/app", "docker.io/team/app:latest", "docker.io"},
		{"docker.io/team/app:1", "docker.io/team/app:1", "docker.io"},
		{"index.docker.io/library/debian", "docker.io/library/debian:latest", "docker.io"},
		{"localhost:5000/app", "localhost:5000/app:latest", "localhost:5000"},
		{"registry.example/a/b/c:v1.0", "registry.example/a/b/c:v1.0", "registry.example"},
		{"[::1]:5000/app", "[::1]:5000/app:latest", "[::1]:5000"},
		{"app@sha256:" + hex, "docker.io/library/app@sha256:" + hex, "docker.io"},
		{"app:tag@sha256:" + hex, "docker.io/library/app@sha256:" + hex, "docker.io"},
	}
	for _, tt := range tests {
		ref, err := Parse(tt.ref)
		if err != nil {
			t.Errorf("%s: %v", tt.ref, err)
			continue
		}
		if got := Normalize(ref); got != tt.name {
			t.Errorf("%s is %s, want %s", tt.ref, got, tt.name)
		}
		if got := Registry(ref); got != tt.registry {
			t.Errorf("%s is at %s, want %s", tt.ref, got, tt.registry)
		}
		// A stored name must find its image.
		if again, err := Parse(tt.name); err != nil || Normalize(again) != tt.name {
			t.Errorf("%s does not lead to itself: %v", tt.name, err)
		}
	}
	for _, bad := range []string{
		"", " ", "UPPER", "a b", "https://registry.example/app", "../etc/passwd", "app:", "app@sha256:short", "a\x00b", "app:ta g", "-app?", "registry.example:port/app", strings.Repeat("a", 1025), "app@md5:" + hex,
	} {
		if ref, err := Parse(bad); !errors.Is(err, errdefs.ErrReference) {
			t.Errorf("%q: %v, %v; want a bad reference", bad, ref, err)
		}
	}
}

func TestPlatforms(t *testing.T) {
	for _, bad := range []string{"linux", "linux/", "/amd64", "windows/amd64", "linux/amd64/v1/x", "linux/amd64:1", "darwin/arm64"} {
		if p, err := ParsePlatform(bad); !errors.Is(err, errdefs.ErrReference) {
			t.Errorf("%q: %v, %v; want an error", bad, p, err)
		}
	}
	p, err := ParsePlatform("linux/arm64/v8")
	if err != nil || p.Architecture != "arm64" || p.Variant != "v8" {
		t.Errorf("%v, %v", p, err)
	}
	if p, err := ParsePlatform(""); err != nil || p.OS != "linux" || p.Architecture == "" {
		t.Errorf("%v, %v", p, err)
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{"debian", "localhost:5000/a/b:c", "a@sha256:" + strings.Repeat("a", 64), "host", "[::1]:5/x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		ref, err := Parse(s)
		if err != nil {
			if !errors.Is(err, errdefs.ErrReference) {
				t.Errorf("%q: error %v without its class", s, err)
			}
			return
		}
		name := Normalize(ref)
		again, err := Parse(name)
		if err != nil || Normalize(again) != name {
			t.Errorf("%q is stored as %q, which is not found: %v", s, name, err)
		}
	})
}
