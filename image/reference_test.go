package image

import (
	"errors"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
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
		ref, err := parse(tt.ref)
		if err != nil {
			t.Errorf("%s: %v", tt.ref, err)
			continue
		}
		if got := normalised(ref); got != tt.name {
			t.Errorf("%s is %s, want %s", tt.ref, got, tt.name)
		}
		if got := registryName(ref); got != tt.registry {
			t.Errorf("%s is at %s, want %s", tt.ref, got, tt.registry)
		}
		// What is stored under a name must be found by it.
		if again, err := parse(tt.name); err != nil || normalised(again) != tt.name {
			t.Errorf("%s does not lead to itself: %v", tt.name, err)
		}
	}
	for _, bad := range []string{
		"", " ", "UPPER", "a b", "https://registry.example/app", "../etc/passwd", "app:", "app@sha256:short", "a\x00b", "app:ta g", "-app?", "registry.example:port/app", strings.Repeat("a", 1025), "app@md5:" + hex,
	} {
		if ref, err := parse(bad); !errors.Is(err, ErrReference) {
			t.Errorf("%q: %v, %v; want a bad reference", bad, ref, err)
		}
	}
}

func TestPlatforms(t *testing.T) {
	for _, bad := range []string{"linux", "linux/", "/amd64", "windows/amd64", "linux/amd64/v1/x", "linux/amd64:1", "darwin/arm64"} {
		if p, err := platform(bad); !errors.Is(err, ErrReference) {
			t.Errorf("%q: %v, %v; want an error", bad, p, err)
		}
	}
	p, err := platform("linux/arm64/v8")
	if err != nil || p.Architecture != "arm64" || p.Variant != "v8" {
		t.Errorf("%v, %v", p, err)
	}
	if p, err := platform(""); err != nil || p.OS != "linux" || p.Architecture == "" {
		t.Errorf("%v, %v", p, err)
	}
}

func TestChoice(t *testing.T) {
	ref, err := parse("app")
	if err != nil {
		t.Fatal(err)
	}
	index := func(platforms ...string) *v1.IndexManifest {
		ix := &v1.IndexManifest{}
		for _, s := range platforms {
			d := v1.Descriptor{Annotations: map[string]string{"is": s}}
			if s != "" {
				p, err := v1.ParsePlatform(s)
				if err != nil {
					t.Fatal(err)
				}
				d.Platform = p
			}
			ix.Manifests = append(ix.Manifests, d)
		}
		return ix
	}
	tests := []struct {
		want, chosen string // chosen "!" for none
		have         []string
	}{
		{"linux/amd64", "linux/amd64", []string{"linux/arm64", "linux/amd64"}},
		{"linux/amd64", "linux/amd64", []string{"linux/amd64/v3", "linux/amd64"}},
		{"linux/amd64", "linux/amd64/v2", []string{"linux/amd64/v2", "linux/amd64/v3"}},
		{"linux/arm/v6", "linux/arm/v6", []string{"linux/arm/v7", "linux/arm/v6"}},
		{"linux/arm/v6", "!", []string{"linux/arm/v7"}},
		{"linux/arm64/v8", "linux/arm64", []string{"linux/arm64"}},
		{"linux/amd64", "!", []string{"windows/amd64", "unknown/unknown"}},
		{"linux/amd64", "", []string{""}},
		{"linux/amd64", "!", []string{"", ""}},
		{"linux/amd64", "!", nil},
	}
	for _, tt := range tests {
		want, err := platform(tt.want)
		if err != nil {
			t.Fatal(err)
		}
		d, err := (&pull{ref: ref, want: want}).choose(index(tt.have...))
		switch {
		case tt.chosen == "!" && !errors.Is(err, ErrInvalid):
			t.Errorf("%s of %v: %v, want an error", tt.want, tt.have, d)
		case tt.chosen != "!" && (err != nil || d.Annotations["is"] != tt.chosen):
			t.Errorf("%s of %v: %v, %v; want %q", tt.want, tt.have, d, err, tt.chosen)
		}
	}
}

func TestChainIDs(t *testing.T) {
	// Of the OCI image specification's config.md: ChainID(L0|L1) = Digest(ChainID(L0) + " " + DiffID(L1)).
	if got := chainID("", "sha256:a"); got != "sha256:a" {
		t.Error(got)
	}
	if got, want := chainID("sha256:a", "sha256:b"), sha([]byte("sha256:a sha256:b")); got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{"debian", "localhost:5000/a/b:c", "a@sha256:" + strings.Repeat("a", 64), "host", "[::1]:5/x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		ref, err := parse(s)
		if err != nil {
			if !errors.Is(err, ErrReference) {
				t.Errorf("%q: error %v without its class", s, err)
			}
			return
		}
		name := normalised(ref)
		again, err := parse(name)
		if err != nil || normalised(again) != name {
			t.Errorf("%q is stored as %q, which is not found: %v", s, name, err)
		}
	})
}
