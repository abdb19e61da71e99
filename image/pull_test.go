package image

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/compression"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/image/reference"
	"github.com/sandboxd/sandboxd/image/registry"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// service opens images in a new directory.
func service(t *testing.T) (*Service, *directApplier, string) {
	t.Helper()
	a, dir := newApplier(t), t.TempDir()
	return reopen(t, dir, a), a, dir
}

func reopen(t *testing.T, dir string, a Applier) *Service {
	t.Helper()
	return reopenWith(t, dir, a, Options{})
}

func reopenWith(t *testing.T, dir string, a Applier, opts Options) *Service {
	t.Helper()
	s, err := Open(dir, a, opts)
	if err != nil {
		t.Fatal(err)
	}
	s.background.Wait()
	s.registry.Backoff.Duration = time.Millisecond
	s.registry.MaxWait = 0
	// The logins of the user who runs the tests are out of bounds.
	s.registry.Keychain = authn.NewMultiKeychain()
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// leftovers lists everything that is stored but the empty store itself.
func leftovers(t *testing.T, dir string, a *directApplier) []string {
	t.Helper()
	var out []string
	for _, d := range []string{filepath.Join(dir, "blobs/blobs/sha256"), filepath.Join(dir, "incoming"), a.dir} {
		entries, err := os.ReadDir(d)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			out = append(out, filepath.Join(d, e.Name()))
		}
	}
	return out
}

func TestPullFromDockerRegistry(t *testing.T) {
	for _, tt := range []struct {
		name  string
		https bool
	}{{"http", false}, {"https", true}} {
		t.Run(tt.name, func(t *testing.T) {
			host := dockerRegistry(t, tt.https)
			gz := asLayer(t, layerTar(t, "etc/os", "one", "gone", "x", "dir/old", "x"), compression.GZip)
			zs := asLayer(t, layerTar(t, ".wh.gone", "", "dir/.wh..wh..opq", "", "dir/new", "y"), compression.ZStd)
			plain := asLayer(t, layerTar(t, "plain", "z"), compression.None)
			amd, arm := testImage(t, "amd64", gz, zs, plain), testImage(t, "arm64", gz)
			index := mutate.AppendManifests(mutate.IndexMediaType(empty.Index, types.OCIImageIndex),
				mutate.IndexAddendum{Add: arm, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "arm64", Variant: "v8"}}},
				mutate.IndexAddendum{Add: amd, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "amd64"}}})
			ref := host + "/team/app:1"
			push(t, ref, index)

			s, a, dir := service(t)
			if tt.https {
				_, err := s.Pull(t.Context(), ref, PullOptions{})
				if !errors.Is(err, ErrRegistry) || !strings.Contains(err.Error(), "certificate") {
					t.Fatalf("error %v, want one about the certificate", err)
				}
			}
			var events []api.PullEvent
			img, err := s.Pull(t.Context(), ref, PullOptions{
				Platform: "linux/amd64", Insecure: tt.https, Progress: func(e api.PullEvent) { events = append(events, e) },
			})
			if err != nil {
				t.Fatal(err)
			}
			digest, err := amd.Digest()
			if err != nil {
				t.Fatal(err)
			}
			if img.Reference != ref || img.Digest != digest.String() || img.Platform != "linux/amd64" || len(img.Rootfs.Layers) != 3 {
				t.Errorf("image %+v", img)
			}
			want := Config{Env: []string{"A=b"}, Cmd: []string{"cmd"}, Entrypoint: []string{"entry"}, WorkingDir: "/work", User: "1000:1000"}
			if diff := cmp.Diff(want, img.Config); diff != "" {
				t.Errorf("config (-want +got):\n%s", diff)
			}
			done := 0
			for _, e := range events {
				if e.Status == "done" {
					done++
				}
			}
			if done != 3 {
				t.Errorf("%d layers done in %+v", done, events)
			}
			second := a.path(img.Rootfs.Layers[1])
			if fi, err := os.Lstat(filepath.Join(second, "gone")); err != nil || fi.Mode()&os.ModeCharDevice == 0 {
				t.Errorf("whiteout: %v, %v", fi, err)
			}
			if b, err := os.ReadFile(filepath.Join(second, "dir/new")); err != nil || string(b) != "y" {
				t.Errorf("dir/new %q, %v", b, err)
			}

			// Everything is there without the registry, also after a restart.
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			s = reopen(t, dir, a)
			got, err := s.Get(t.Context(), ref)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(img, got); diff != "" {
				t.Errorf("after a restart (-pulled +got):\n%s", diff)
			}
			images, err := s.List(t.Context())
			if err != nil || len(images) != 2 || images[1].Reference != ref {
				t.Errorf("list %+v, %v", images, err)
			}
			if detail, err := s.Inspect(t.Context(), ref); err != nil || len(detail.Parts) != 3 || detail.Parts[2].ChainID != img.Rootfs.Layers[2] {
				t.Errorf("layers %+v, %v", detail.Parts, err)
			}

			// The other platform takes the name over; its only layer is there already.
			applied := len(a.applied)
			other, err := s.Pull(t.Context(), ref, PullOptions{Platform: "linux/arm64", Insecure: tt.https})
			if err != nil {
				t.Fatal(err)
			}
			if other.Digest == img.Digest || len(a.applied) != applied {
				t.Errorf("arm64 is %+v, applied %d layers", other, len(a.applied)-applied)
			}
			// By digest.
			if _, err := s.Pull(t.Context(), host+"/team/app@"+digest.String(), PullOptions{Insecure: tt.https, Platform: "linux/amd64"}); err != nil {
				t.Error(err)
			}
		})
	}
}

func sha(b []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(b)) }

// parts are an image taken apart, to be falsified.
type parts struct {
	manifest v1.Manifest
	config   []byte
	layer    []byte
	raw      []byte // instead of the manifest
}

func TestPullRefusesWhatIsWrong(t *testing.T) {
	other := func(b []byte) []byte {
		b = bytes.Clone(b)
		b[len(b)/2] ^= 1
		return b
	}
	const manifestType = string(types.OCIManifestSchema1)
	blob := func(f *faulty, digest string, h http.HandlerFunc) { f.replace("/blobs/"+digest, h) }
	tests := []struct {
		name  string
		layer []byte // content, if not the usual
		// falsify changes the image before it is served; the manifest is served as it is then.
		falsify func(f *faulty, p *parts)
		opts    PullOptions
		class   error
		err     string
	}{
		{name: "other bytes in a layer", class: ErrInvalid, err: "sends other bytes", falsify: func(f *faulty, p *parts) {
			blob(f, p.manifest.Layers[0].Digest.String(), answer("application/octet-stream", other(p.layer)))
		}},
		{name: "other bytes in the configuration", class: ErrInvalid, err: "sends other bytes", falsify: func(f *faulty, p *parts) {
			blob(f, p.manifest.Config.Digest.String(), answer("application/octet-stream", other(p.config)))
		}},
		{name: "a layer that is too short", class: ErrInvalid, err: "sends other bytes", falsify: func(f *faulty, p *parts) {
			blob(f, p.manifest.Layers[0].Digest.String(), answer("application/octet-stream", p.layer[:10]))
		}},
		{name: "a layer that is too long", class: ErrInvalid, err: "sends other bytes", falsify: func(f *faulty, p *parts) {
			blob(f, p.manifest.Layers[0].Digest.String(), answer("application/octet-stream", append(bytes.Clone(p.layer), "more"...)))
		}},
		{name: "a layer without end", class: ErrInvalid, err: "more than", falsify: func(f *faulty, p *parts) {
			blob(f, p.manifest.Layers[0].Digest.String(), endless)
		}},
		{name: "a size in the manifest that is a lie", class: ErrInvalid, err: "more than", falsify: func(_ *faulty, p *parts) { p.manifest.Layers[0].Size-- }},
		{name: "a size in the manifest that is another lie", class: ErrInvalid, err: "bytes", falsify: func(_ *faulty, p *parts) { p.manifest.Layers[0].Size++ }},
		{name: "a negative size", class: ErrInvalid, err: "-5 bytes", falsify: func(_ *faulty, p *parts) { p.manifest.Layers[0].Size = -5 }},
		{name: "a size beyond reason", class: ErrInvalid, err: "bytes", falsify: func(_ *faulty, p *parts) { p.manifest.Layers[0].Size = 1 << 60 }},
		{name: "a connection that always breaks", class: ErrRegistry, err: "broke off", falsify: func(f *faulty, p *parts) {
			blob(f, p.manifest.Layers[0].Digest.String(), cut(p.layer))
		}},
		{name: "500 for a layer", class: ErrRegistry, err: "try again later", falsify: func(f *faulty, p *parts) {
			blob(f, p.manifest.Layers[0].Digest.String(), status(500))
		}},
		{name: "404 for a layer", class: ErrRegistry, err: "does not have it", falsify: func(f *faulty, p *parts) {
			blob(f, p.manifest.Layers[0].Digest.String(), status(404))
		}},
		{name: "500 for the manifest", class: ErrRegistry, err: "try again later", falsify: func(f *faulty, _ *parts) { f.replace("/manifests/1", status(500)) }},
		{name: "401", class: ErrRegistry, err: "login", falsify: func(f *faulty, _ *parts) { f.replace("/manifests/1", status(401)) }},
		{name: "429", class: ErrRegistry, err: "no more requests", falsify: func(f *faulty, _ *parts) { f.replace("/manifests/1", status(429)) }},
		{name: "a registry that is none", class: ErrRegistry, err: "does not have it", falsify: func(f *faulty, _ *parts) { f.replace("/v2/", status(404)) }},
		{name: "a manifest without end", class: ErrInvalid, err: "more than 4194304 bytes", falsify: func(f *faulty, _ *parts) {
			f.replace("/manifests/1", answer(manifestType, bytes.Repeat([]byte(" "), 5<<20)))
		}},
		{name: "a manifest that never ends", class: ErrInvalid, err: "more than 4194304 bytes", falsify: func(f *faulty, _ *parts) { f.replace("/manifests/1", endless) }},
		{name: "a million layers", class: ErrInvalid, err: "more than 4194304 bytes", falsify: func(_ *faulty, p *parts) {
			one := fmt.Sprintf(`{"mediaType":%q,"digest":%q,"size":1}`, types.OCILayer, sha(nil))
			p.raw = []byte(`{"schemaVersion":2,"config":{},"layers":[` + one + strings.Repeat(","+one, 999_999) + `]}`)
		}},
		{name: "as many layers as a manifest holds", class: ErrInvalid, err: "layers, 250 are allowed", falsify: func(_ *faulty, p *parts) {
			p.manifest.Layers = slices.Repeat(p.manifest.Layers[:1], 20_000)
		}},
		{name: "an index of as much as it holds", class: ErrInvalid, err: "nothing for linux/amd64", falsify: func(_ *faulty, p *parts) {
			one := fmt.Sprintf(`{"mediaType":%q,"digest":%q,"size":1,"platform":{"os":"linux","architecture":"s390x"}}`, manifestType, sha(nil))
			p.raw = []byte(`{"schemaVersion":2,"manifests":[` + one + strings.Repeat(","+one, 15_000) + `]}`)
		}},
		{name: "indexes in indexes", class: ErrInvalid, err: "nested more than 3 deep", falsify: func(f *faulty, p *parts) {
			p.raw, _ = json.Marshal(p.manifest) //nolint:errchkjson // of the test
			for range 4 {
				f.replace("/manifests/"+sha(p.raw), answer(manifestType, p.raw))
				p.raw = fmt.Appendf(nil, `{"schemaVersion":2,"manifests":[{"mediaType":%q,"digest":%q,"size":%d}]}`, types.OCIImageIndex, sha(p.raw), len(p.raw))
			}
		}},
		{name: "a configuration that never ends", class: ErrInvalid, err: "more than", falsify: func(f *faulty, p *parts) {
			blob(f, p.manifest.Config.Digest.String(), endless)
		}},
		{name: "redirects without end, of the manifest", class: ErrRegistry, err: "more than 10 times", falsify: func(f *faulty, _ *parts) { f.replace("/manifests/1", sendOn("")) }},
		{name: "redirects without end, of a layer", class: ErrRegistry, err: "more than 10 times", falsify: func(f *faulty, p *parts) {
			blob(f, p.manifest.Layers[0].Digest.String(), sendOn(""))
		}},
		{name: "a redirect to a file", class: ErrRegistry, err: "file", falsify: func(f *faulty, p *parts) {
			blob(f, p.manifest.Layers[0].Digest.String(), sendOn("file:///etc/passwd"))
		}},
		{name: "a redirect to a file of localhost", class: ErrRegistry, err: `unsupported protocol scheme "file"`, falsify: func(f *faulty, p *parts) {
			blob(f, p.manifest.Layers[0].Digest.String(), sendOn("file://localhost/etc/passwd"))
		}},
		{name: "a redirect to the cloud's secrets", class: ErrRegistry, err: "169.254.169.254", falsify: func(f *faulty, p *parts) {
			blob(f, p.manifest.Layers[0].Digest.String(), sendOn("http://169.254.169.254/latest/meta-data"))
		}},
		{name: "a layer that is said to be elsewhere", class: ErrRegistry, err: "does not have it", falsify: func(f *faulty, p *parts) {
			p.manifest.Layers[0].MediaType = types.OCIRestrictedLayer
			p.manifest.Layers[0].URLs = []string{"http://" + f.host + "/elsewhere"}
			blob(f, p.manifest.Layers[0].Digest.String(), status(404))
			f.replace("/elsewhere", func(http.ResponseWriter, *http.Request) { t.Error("the layer was asked for at its foreign address") })
		}},
		{name: "a manifest that is HTML", class: ErrInvalid, err: "not JSON", falsify: func(_ *faulty, p *parts) { p.raw = []byte("<html>") }},
		{name: "an empty manifest", class: ErrInvalid, err: "not JSON", falsify: func(_ *faulty, p *parts) { p.raw = []byte{} }},
		{name: "schema 1", class: ErrInvalid, err: "old schema 1", falsify: func(_ *faulty, p *parts) { p.raw = []byte(`{"schemaVersion":1,"fsLayers":[]}`) }},
		{name: "two meanings", class: ErrInvalid, err: "neither", falsify: func(_ *faulty, p *parts) {
			p.raw = []byte(`{"schemaVersion":2,"config":{},"layers":[],"manifests":[]}`)
		}},
		{name: "a media type that its content is not", class: ErrInvalid, err: "does not match its content", falsify: func(_ *faulty, p *parts) {
			p.raw = []byte(`{"schemaVersion":2,"mediaType":"` + string(types.OCIImageIndex) + `","config":{},"layers":[]}`)
		}},
		{name: "no layers", class: ErrInvalid, err: "no layers", falsify: func(_ *faulty, p *parts) { p.manifest.Layers = nil }},
		{name: "too many layers", class: ErrInvalid, err: "251 layers", falsify: func(_ *faulty, p *parts) {
			p.manifest.Layers = slices.Repeat(p.manifest.Layers[:1], 251)
		}},
		{name: "a chart", class: ErrInvalid, err: "not a container image", falsify: func(_ *faulty, p *parts) {
			p.manifest.Config.MediaType = "application/vnd.cncf.helm.config.v1+json"
		}},
		{name: "a large configuration", class: ErrInvalid, err: "4194304 are allowed", falsify: func(_ *faulty, p *parts) { p.manifest.Config.Size = 5 << 20 }},
		{name: "sha512", class: ErrInvalid, err: "only sha256", falsify: func(_ *faulty, p *parts) {
			p.manifest.Layers[0].Digest = v1.Hash{Algorithm: "sha512", Hex: strings.Repeat("ab", 64)}
		}},
		{name: "a digest that is a path", class: ErrInvalid, err: "cannot be read", falsify: func(_ *faulty, p *parts) {
			p.raw = []byte(`{"schemaVersion":2,"config":{"mediaType":"` + string(types.OCIConfigJSON) + `","digest":"sha256:../../../etc/passwd","size":1},"layers":[]}`)
		}},
		{name: "a layer of another kind", class: ErrInvalid, err: "media type", falsify: func(_ *faulty, p *parts) { p.manifest.Layers[0].MediaType = "text/html" }},
		{name: "a layer that is compressed otherwise", class: ErrInvalid, err: "the layer is gzip", falsify: func(_ *faulty, p *parts) {
			p.manifest.Layers[0].MediaType = types.OCILayerZStd
		}},
		{name: "another platform", opts: PullOptions{Platform: "linux/s390x"}, class: ErrInvalid, err: "made for linux/amd64, not for linux/s390x"},
		{name: "an index without the platform", falsify: func(_ *faulty, p *parts) {
			p.raw = fmt.Appendf(nil, `{"schemaVersion":2,"manifests":[{"mediaType":%q,"digest":%q,"size":1,"platform":{"os":"linux","architecture":"arm64"}},
				{"mediaType":%[1]q,"digest":%[2]q,"size":1,"platform":{"os":"unknown","architecture":"unknown"}}]}`, manifestType, sha(nil))
		}, opts: PullOptions{Platform: "linux/s390x"}, class: ErrInvalid, err: "nothing for linux/s390x, only for: linux/arm64"},
		{name: "an index with a size that is a lie", class: ErrInvalid, err: "its index says 7", falsify: func(f *faulty, p *parts) {
			b, _ := json.Marshal(p.manifest) //nolint:errchkjson // of the test
			f.replace("/manifests/"+sha(b), answer(manifestType, b))
			p.raw = fmt.Appendf(nil, `{"schemaVersion":2,"manifests":[{"mediaType":%q,"digest":%q,"size":7,"platform":{"os":"linux","architecture":"amd64"}}]}`, manifestType, sha(b))
		}},
		{name: "an index with another manifest behind the digest", class: ErrInvalid, err: "digest", falsify: func(f *faulty, p *parts) {
			b, _ := json.Marshal(p.manifest) //nolint:errchkjson // of the test
			f.replace("/manifests/"+sha(b), answer(manifestType, append(b, ' ')))
			p.raw = fmt.Appendf(nil, `{"schemaVersion":2,"manifests":[{"mediaType":%q,"digest":%q,"size":%d,"platform":{"os":"linux","architecture":"amd64"}}]}`, manifestType, sha(b), len(b))
		}},
		{name: "a configuration that is not JSON", class: ErrInvalid, err: "configuration cannot be read", falsify: func(f *faulty, p *parts) { p.configure(f, []byte("{")) }},
		{name: "a configuration with too few layers", class: ErrInvalid, err: "lists 0 layers", falsify: func(f *faulty, p *parts) {
			p.configure(f, []byte(`{"os":"linux","architecture":"amd64","rootfs":{"type":"layers","diff_ids":[]}}`))
		}},
		{name: "a diff id that is not the layer's", class: ErrInvalid, err: "configuration promises", falsify: func(f *faulty, p *parts) {
			p.configure(f, fmt.Appendf(nil, `{"os":"linux","architecture":"amd64","rootfs":{"type":"layers","diff_ids":[%q]}}`, sha(nil)))
		}},
		{name: "a layer that climbs out", layer: layerTar(t, "../../outside", "x"), class: ErrInvalid, err: `".." in it`},
		{name: "a layer that is cut short", layer: layerTar(t, "a", strings.Repeat("x", 2000))[:1000], class: ErrInvalid, err: "cut short"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			f := newFaulty(t)
			ref := f.host + "/app:1"
			content := tt.layer
			if content == nil {
				content = layerTar(t, "file", strings.Repeat("content ", 1000))
			}
			img := testImage(t, "amd64", asLayer(t, content, compression.GZip))
			push(t, ref, img)
			p := takeApart(t, img)
			if tt.falsify != nil {
				tt.falsify(f, p)
				served := p.raw
				if served == nil {
					var err error
					if served, err = json.Marshal(p.manifest); err != nil {
						t.Fatal(err)
					}
				}
				f.mu.Lock()
				if f.override["/manifests/1"] == nil && f.override["/v2/"] == nil {
					f.override["/manifests/1"] = answer(manifestType, served)
				}
				f.mu.Unlock()
			}
			s, a, dir := service(t)
			opts := tt.opts
			if opts.Platform == "" {
				opts.Platform = "linux/amd64"
			}
			_, err := s.Pull(t.Context(), ref, opts)
			if !errors.Is(err, tt.class) || !strings.Contains(err.Error(), tt.err) {
				t.Fatalf("error %v, want %q with %q", err, tt.class, tt.err)
			}
			for _, class := range []error{ErrInvalid, ErrRegistry, ErrReference, ErrNotFound} {
				if !errors.Is(tt.class, class) && errors.Is(err, class) {
					t.Errorf("error %v is also %q", err, class)
				}
			}
			if !strings.Contains(err.Error(), ref) {
				t.Errorf("error %v does not name the image", err)
			}
			if left := leftovers(t, dir, a); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
			if _, err := s.Get(t.Context(), ref); !errors.Is(err, ErrNotFound) {
				t.Errorf("the image is stored: %v", err)
			}
		})
	}
}

// endless never stops sending.
func endless(w http.ResponseWriter, r *http.Request) {
	for r.Context().Err() == nil {
		if _, err := w.Write(bytes.Repeat([]byte(" "), 1<<16)); err != nil {
			return
		}
	}
}

// sendOn redirects to an address, empty for the very one that was asked for.
func sendOn(to string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		target := to
		if target == "" {
			target = r.URL.Path
		}
		http.Redirect(w, r, target, http.StatusTemporaryRedirect)
	}
}

// A layer that stands in an image twice is fetched once and lies there twice.
func TestPullOfALayerTwice(t *testing.T) {
	f := newFaulty(t)
	l := asLayer(t, layerTar(t, "file", "x"), compression.GZip)
	ref := f.host + "/twice:1"
	push(t, ref, testImage(t, "amd64", l, l))
	s, a, _ := service(t)
	img, err := s.Pull(t.Context(), ref, PullOptions{Platform: "linux/amd64"})
	if err != nil {
		t.Fatal(err)
	}
	digest, err := l.Digest()
	if err != nil {
		t.Fatal(err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if got := f.gets["/v2/twice/blobs/"+digest.String()]; got != 1 || len(a.layers(t)) != 2 || len(img.Rootfs.Layers) != 2 {
		t.Errorf("%d requests, trees %v, rootfs %v", got, a.layers(t), img.Rootfs.Layers)
	}
}

func takeApart(t *testing.T, img v1.Image) *parts {
	t.Helper()
	m, err := img.Manifest()
	if err != nil {
		t.Fatal(err)
	}
	config, err := img.RawConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	rc, err := layers[0].Compressed()
	if err != nil {
		t.Fatal(err)
	}
	data, err := io.ReadAll(rc)
	if err != nil {
		t.Fatal(err)
	}
	return &parts{manifest: *m.DeepCopy(), config: config, layer: data}
}

// configure serves another configuration that the manifest names correctly.
func (p *parts) configure(f *faulty, config []byte) {
	p.manifest.Config.Digest, p.manifest.Config.Size = v1.Hash{Algorithm: "sha256", Hex: strings.TrimPrefix(sha(config), "sha256:")}, int64(len(config))
	f.replace("/blobs/"+sha(config), answer("application/octet-stream", config))
}

func TestPullTriesAgain(t *testing.T) {
	f := newFaulty(t)
	img := testImage(t, "amd64", asLayer(t, layerTar(t, "a", "b"), compression.GZip))
	push(t, f.host+"/app:1", img)
	p := takeApart(t, img)
	digest := p.manifest.Layers[0].Digest.String()
	var once sync.Once
	f.replace("/blobs/"+digest, func(w http.ResponseWriter, r *http.Request) {
		handler := answer("application/octet-stream", p.layer)
		once.Do(func() { handler = cut(p.layer) })
		handler(w, r)
	})
	s, _, _ := service(t)
	if _, err := s.Pull(t.Context(), f.host+"/app:1", PullOptions{Platform: "linux/amd64"}); err != nil {
		t.Fatal(err)
	}
}

func TestConcurrentPullsFetchAndApplyOnce(t *testing.T) {
	f := newFaulty(t)
	shared := asLayer(t, layerTar(t, "shared", strings.Repeat("x", 1<<16)), compression.GZip)
	for i := range 4 {
		push(t, fmt.Sprintf("%s/app%d:1", f.host, i), testImage(t, "amd64", shared, asLayer(t, layerTar(t, "own", fmt.Sprint(i)), compression.GZip)))
	}
	digest, err := shared.Digest()
	if err != nil {
		t.Fatal(err)
	}
	f.mu.Lock()
	clear(f.gets)
	f.mu.Unlock()
	s, a, _ := service(t)
	var wg sync.WaitGroup
	for i := range 12 {
		wg.Go(func() {
			if _, err := s.Pull(t.Context(), fmt.Sprintf("%s/app%d:1", f.host, i%4), PullOptions{Platform: "linux/amd64"}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	gets := 0
	for path, n := range f.gets {
		if strings.HasSuffix(path, digest.String()) {
			gets += n
		}
	}
	if gets != 1 {
		t.Errorf("the shared layer was fetched %d times", gets)
	}
	slices.Sort(a.applied)
	if len(a.applied) != 5 || len(slices.Compact(a.applied)) != 5 {
		t.Errorf("applied %v, want 5 different layers", a.applied)
	}
	if len(s.pins) != 0 {
		t.Errorf("pins are left: %v", s.pins)
	}
}

func TestCancelledPullLeavesNothing(t *testing.T) {
	f := newFaulty(t)
	img := testImage(t, "amd64", asLayer(t, layerTar(t, "a", "b"), compression.GZip), asLayer(t, layerTar(t, "c", "d"), compression.GZip))
	push(t, f.host+"/app:1", img)
	m, err := img.Manifest()
	if err != nil {
		t.Fatal(err)
	}
	// The second layer begins and never ends.
	begun := make(chan struct{})
	f.replace("/blobs/"+m.Layers[1].Digest.String(), func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Length", fmt.Sprint(m.Layers[1].Size))
		_, _ = w.Write([]byte("x"))
		_ = http.NewResponseController(w).Flush()
		close(begun)
		<-r.Context().Done()
	})
	s, a, dir := service(t)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-begun
		cancel()
	}()
	_, err = s.Pull(ctx, f.host+"/app:1", PullOptions{Platform: "linux/amd64"})
	if !errors.Is(err, context.Canceled) || errors.Is(err, ErrRegistry) || errors.Is(err, ErrInvalid) {
		t.Errorf("error %v, want only that it was cancelled", err)
	}
	if left := leftovers(t, dir, a); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestOneCallerLeavingDoesNotEndTheOthersPull(t *testing.T) {
	f := newFaulty(t)
	img := testImage(t, "amd64", asLayer(t, layerTar(t, "a", "b"), compression.GZip))
	push(t, f.host+"/app:1", img)
	p := takeApart(t, img)
	begun, goOn := make(chan struct{}), make(chan struct{})
	f.replace("/blobs/"+p.manifest.Layers[0].Digest.String(), func(w http.ResponseWriter, r *http.Request) {
		close(begun) // a second request would panic
		<-goOn
		answer("application/octet-stream", p.layer)(w, r)
	})
	s, _, _ := service(t)
	ctx, cancel := context.WithCancel(t.Context())
	first, second := make(chan error, 1), make(chan error, 1)
	pull := func(ctx context.Context, result chan error, joined func()) {
		_, err := s.Pull(ctx, f.host+"/app:1", PullOptions{Platform: "linux/amd64", Progress: func(e api.PullEvent) {
			if e.Status == "downloading" && joined != nil {
				joined()
			}
		}})
		result <- err
	}
	go pull(ctx, first, nil)
	<-begun
	var once sync.Once
	joined := make(chan struct{})
	go pull(t.Context(), second, func() { once.Do(func() { close(joined) }) })
	<-joined
	// The event comes just before the second one joins.
	key := fmt.Sprintf("blob %s %d", p.manifest.Layers[0].Digest, p.manifest.Layers[0].Size)
	waitFor(t, func() bool {
		s.flights.mu.Lock()
		defer s.flights.mu.Unlock()
		return s.flights.live[key] != nil && s.flights.live[key].waiters == 2
	})
	cancel()
	if err := <-first; !errors.Is(err, context.Canceled) {
		t.Errorf("the first pull: %v", err)
	}
	close(goOn)
	if err := <-second; err != nil {
		t.Errorf("the second pull: %v", err)
	}
}

// waitFor polls for a state that no event announces.
func waitFor(t *testing.T, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	deadline := time.After(testenv.HungAfter)
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatal("waited in vain")
		}
	}
}

func TestFailedPullSparesWhatOthersUse(t *testing.T) {
	f := newFaulty(t)
	shared := asLayer(t, layerTar(t, "shared", "x"), compression.GZip)
	push(t, f.host+"/good:1", testImage(t, "amd64", shared))
	bad := testImage(t, "amd64", shared, asLayer(t, layerTar(t, "../x", ""), compression.GZip))
	push(t, f.host+"/bad:1", bad)
	s, a, dir := service(t)
	good, err := s.Pull(t.Context(), f.host+"/good:1", PullOptions{Platform: "linux/amd64"})
	if err != nil {
		t.Fatal(err)
	}
	before := leftovers(t, dir, a)
	if _, err := s.Pull(t.Context(), f.host+"/bad:1", PullOptions{Platform: "linux/amd64"}); !errors.Is(err, ErrInvalid) {
		t.Fatalf("error %v", err)
	}
	if diff := cmp.Diff(before, leftovers(t, dir, a)); diff != "" {
		t.Errorf("the failed pull changed something (-before +after):\n%s", diff)
	}
	if got, err := s.Get(t.Context(), f.host+"/good:1"); err != nil || got.Digest != good.Digest {
		t.Errorf("%+v, %v", got, err)
	}
}

// A layer that was ever ready may be under a running sandbox even when its image is gone.
func TestFailedPullSparesLayersOfReplacedImages(t *testing.T) {
	f := newFaulty(t)
	old := asLayer(t, layerTar(t, "old", "x"), compression.GZip)
	push(t, f.host+"/app:1", testImage(t, "amd64", old))
	s, a, _ := service(t)
	img, err := s.Pull(t.Context(), f.host+"/app:1", PullOptions{Platform: "linux/amd64"})
	if err != nil {
		t.Fatal(err)
	}
	push(t, f.host+"/app:1", testImage(t, "amd64", asLayer(t, layerTar(t, "new", "x"), compression.GZip)))
	if _, err := s.Pull(t.Context(), f.host+"/app:1", PullOptions{Platform: "linux/amd64"}); err != nil {
		t.Fatal(err)
	}
	push(t, f.host+"/bad:1", testImage(t, "amd64", old, asLayer(t, layerTar(t, "../x", ""), compression.GZip)))
	if _, err := s.Pull(t.Context(), f.host+"/bad:1", PullOptions{Platform: "linux/amd64"}); !errors.Is(err, ErrInvalid) {
		t.Fatalf("error %v", err)
	}
	if !slices.Contains(a.layers(t), img.Rootfs.Layers[0]) {
		t.Error("a layer that a sandbox may be running on was removed")
	}
}

func TestOpenCleansUpAfterACrash(t *testing.T) {
	f := newFaulty(t)
	push(t, f.host+"/app:1", testImage(t, "amd64", asLayer(t, layerTar(t, "a", "b"), compression.GZip)))
	s, a, dir := service(t)
	if _, err := s.Pull(t.Context(), f.host+"/app:1", PullOptions{Platform: "linux/amd64"}); err != nil {
		t.Fatal(err)
	}
	before := leftovers(t, dir, a)
	// As if the daemon had been killed in the middle of another pull: a blob half written, one
	// complete, a layer applied.
	pending := sha([]byte("pending"))
	if err := s.store.BeginLayers(pending); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(a.path(pending), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{"incoming/blob-1", "blobs/blobs/sha256/" + strings.TrimPrefix(sha([]byte("x")), "sha256:")} {
		if err := os.WriteFile(filepath.Join(dir, file), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Remove(filepath.Join(dir, "blobs/index.json")); err != nil {
		t.Fatal(err)
	}
	s = reopen(t, dir, a)
	if diff := cmp.Diff(before, leftovers(t, dir, a)); diff != "" {
		t.Errorf("after the crash (-before +after):\n%s", diff)
	}
	if _, err := os.Stat(filepath.Join(dir, "blobs/index.json")); err != nil {
		t.Error(err)
	}
	if _, err := s.Get(t.Context(), f.host+"/app:1"); err != nil {
		t.Error(err)
	}
}

func TestApplierThatLies(t *testing.T) {
	f := newFaulty(t)
	push(t, f.host+"/app:1", testImage(t, "amd64", asLayer(t, layerTar(t, "a", "b"), compression.GZip)))
	s, a, dir := service(t)
	a.lie = sha([]byte("something else"))
	if _, err := s.Pull(t.Context(), f.host+"/app:1", PullOptions{Platform: "linux/amd64"}); !errors.Is(err, ErrInvalid) {
		t.Fatalf("error %v", err)
	}
	if left := leftovers(t, dir, a); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestHostFaultsAreNotTheImages(t *testing.T) {
	f := newFaulty(t)
	push(t, f.host+"/app:1", testImage(t, "amd64", asLayer(t, layerTar(t, "a", "b"), compression.GZip)))
	s, a, _ := service(t)
	full := errors.New("no space left")
	a.before = func(layer.ApplyRequest) error { return full }
	_, err := s.Pull(t.Context(), f.host+"/app:1", PullOptions{Platform: "linux/amd64"})
	if !errors.Is(err, full) || errors.Is(err, ErrInvalid) || errors.Is(err, ErrRegistry) {
		t.Fatalf("error %v", err)
	}
}

func TestUnreachableRegistries(t *testing.T) {
	s, a, dir := service(t)
	for ref, want := range map[string]string{
		"127.0.0.1:1/app:1":                   "cannot be reached",
		"registry.invalid/app:1":              "cannot be reached",
		"127.0.0.1:1/app@" + sha([]byte("x")): "cannot be reached",
	} {
		_, err := s.Pull(t.Context(), ref, PullOptions{})
		if !errors.Is(err, ErrRegistry) || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), strings.SplitN(ref, "/", 2)[0]) {
			t.Errorf("%s: error %v", ref, err)
		}
	}
	if left := leftovers(t, dir, a); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestGetOfWhatIsNotThere(t *testing.T) {
	s, _, _ := service(t)
	_, err := s.Get(t.Context(), "debian:12")
	if !errors.Is(err, ErrNotFound) || !strings.Contains(err.Error(), "docker.io/library/debian:12") || !strings.Contains(err.Error(), "sandboxd pull debian:12") {
		t.Errorf("error %v", err)
	}
}

func TestStoreIsAnOCILayout(t *testing.T) {
	f := newFaulty(t)
	img := testImage(t, "amd64", asLayer(t, layerTar(t, "a", "b"), compression.GZip))
	push(t, f.host+"/app:1", img)
	s, _, dir := service(t)
	if _, err := s.Pull(t.Context(), f.host+"/app:1", PullOptions{Platform: "linux/amd64"}); err != nil {
		t.Fatal(err)
	}
	var marker map[string]string
	var index v1.IndexManifest
	for file, into := range map[string]any{"oci-layout": &marker, "index.json": &index} {
		data, err := os.ReadFile(filepath.Join(dir, "blobs", file))
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(data, into); err != nil {
			t.Fatal(err)
		}
	}
	if !maps.Equal(marker, map[string]string{"imageLayoutVersion": "1.0.0"}) {
		t.Errorf("oci-layout %v", marker)
	}
	digest, err := img.Digest()
	if err != nil {
		t.Fatal(err)
	}
	if len(index.Manifests) != 1 || index.Manifests[0].Digest != digest || index.Manifests[0].Annotations["org.opencontainers.image.ref.name"] != f.host+"/app:1" {
		t.Errorf("index.json %+v", index)
	}
}

// Layers whose blobs arrive during an extraction are extracted in one request, and an error names
// the layer at fault, whichever it is.
func TestLayersThatHaveComeAreAppliedTogether(t *testing.T) {
	f := newFaulty(t)
	const n = 10
	var good, bad []v1.Layer
	for i := range n {
		l := asLayer(t, layerTar(t, fmt.Sprint("f", i), "x"), compression.GZip)
		good, bad = append(good, l), append(bad, l)
	}
	bad[6] = asLayer(t, layerTar(t, "../x", ""), compression.GZip)
	push(t, f.host+"/good:1", testImage(t, "amd64", good...))
	push(t, f.host+"/bad:1", testImage(t, "amd64", bad...))
	culprit, err := bad[6].Digest()
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"good": "", "bad": culprit.String()} {
		s, a, dir := service(t)
		var fetched atomic.Int64
		var requests []int
		a.before = func(req layer.ApplyRequest) error {
			requests = append(requests, len(req.Layers))
			waitFor(t, func() bool { return fetched.Load() >= n }) // the first one waits for the others' blobs
			return nil
		}
		_, err := s.Pull(t.Context(), f.host+"/"+name+":1", PullOptions{Platform: "linux/amd64", Progress: func(e api.PullEvent) {
			if e.Status == "downloading" && e.Bytes == e.Total {
				fetched.Add(1)
			}
		}})
		if want == "" && err != nil || want != "" && (!errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: error %v, want one with %q", name, err, want)
		}
		// The last event of each download may come just before its blob counts as there: the first
		// request, one up to the first of these blobs, and one for each of them.
		if len(requests) > 2+registry.ParallelDownloads {
			t.Errorf("%s: requests with %v layers", name, requests)
		}
		if left := leftovers(t, dir, a); name == "bad" && len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	}
}

// confused reports success for all layers, and an error for none of them.
type confused struct{ nullApplier }

func (c confused) Apply(ctx context.Context, req layer.ApplyRequest) ([]layer.Result, error) {
	results, _ := c.nullApplier.Apply(ctx, req)
	return results, fmt.Errorf("%w: cause unknown", layer.ErrInvalid)
}

// The applier reads hostile input and may have been taken over: no answer of it ends the daemon.
func TestErrorOfNoLayerIsAnError(t *testing.T) {
	f := newFaulty(t)
	push(t, f.host+"/one:1", testImage(t, "amd64", asLayer(t, layerTar(t, "f", "x"), compression.GZip)))
	s, err := Open(t.TempDir(), confused{}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if _, err := s.Pull(t.Context(), f.host+"/one:1", PullOptions{Platform: "linux/amd64"}); err == nil || !strings.Contains(err.Error(), "cause unknown") {
		t.Errorf("error %v", err)
	}
}

func TestChoice(t *testing.T) {
	ref, err := reference.Parse("app")
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
		want, err := reference.ParsePlatform(tt.want)
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
	// Of the OCI image specification's config.md: ChainID(L0|L1) = Digest(ChainID(L0) + " " +
	// DiffID(L1)).
	if got := chainID("", "sha256:a"); got != "sha256:a" {
		t.Error(got)
	}
	if got, want := chainID("sha256:a", "sha256:b"), sha([]byte("sha256:a sha256:b")); got != want {
		t.Errorf("%s, want %s", got, want)
	}
}
