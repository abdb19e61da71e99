package image

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/compression"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

func TestPullWaitsAsLongAsTheRegistrySays(t *testing.T) {
	f := newFaulty(t)
	ref := f.host + "/team/app:1"
	push(t, ref, testImage(t, "amd64", asLayer(t, layerTar(t, "x", "x"), compression.GZip)))
	s, _, _ := service(t)
	s.registry.MaxWait = 2 * time.Minute
	var first, second time.Time
	f.replace("/manifests/1", func(w http.ResponseWriter, _ *http.Request) {
		first = time.Now()
		f.replace("/manifests/1", func(w http.ResponseWriter, _ *http.Request) {
			second = time.Now()
			w.WriteHeader(http.StatusForbidden)
		})
		w.Header().Set("Retry-After", "1")
		w.WriteHeader(http.StatusTooManyRequests)
	})
	if _, err := s.Pull(t.Context(), ref, PullOptions{Platform: "linux/amd64"}); !errors.Is(err, ErrRegistry) {
		t.Fatal(err)
	}
	if waited := second.Sub(first); waited < time.Second {
		t.Errorf("asked again after %v, the registry wanted a second", waited)
	}

	// A wait that is too long ends in an error, without a second request.
	asked := 0
	f.replace("/manifests/1", func(w http.ResponseWriter, _ *http.Request) {
		asked++
		w.Header().Set("Retry-After", "Fri, 31 Dec 9999 23:59:59 GMT")
		w.WriteHeader(http.StatusTooManyRequests)
	})
	if _, err := s.Pull(t.Context(), ref, PullOptions{Platform: "linux/amd64"}); !errors.Is(err, ErrRegistry) || !strings.Contains(err.Error(), "no more requests") {
		t.Fatal(err)
	}
	if asked != 1 {
		t.Errorf("asked %d times", asked)
	}
}

// keychain answers in its own way.
type keychain func(authn.Resource) (authn.Authenticator, error)

func (k keychain) Resolve(r authn.Resource) (authn.Authenticator, error) { return k(r) }

func TestCredentialHelperThatHangs(t *testing.T) {
	f := newFaulty(t)
	s, _, _ := service(t)
	end := make(chan struct{})
	defer close(end)
	asked := make(chan struct{}, 2)
	s.registry.Keychain = keychain(func(authn.Resource) (authn.Authenticator, error) {
		asked <- struct{}{}
		<-end
		return authn.Anonymous, nil
	})
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-asked; cancel() }()
	if _, err := s.Pull(ctx, f.host+"/team/app:1", PullOptions{}); !errors.Is(err, context.Canceled) {
		t.Errorf("given up: %v", err)
	}
	s.registry.HelperTimeout = time.Millisecond
	if _, err := s.Pull(t.Context(), f.host+"/team/app:1", PullOptions{}); !errors.Is(err, ErrRegistry) || !strings.Contains(err.Error(), "credential helper") {
		t.Errorf("too slow: %v", err)
	}
}

// Credentials are for the registry that they were given for: neither a mirror nor the storage that
// a redirect leads to sees them.
func TestCredentialsGoNowhereElse(t *testing.T) {
	good := newFaulty(t)
	push(t, good.host+"/team/app:1", testImage(t, "amd64", asLayer(t, layerTar(t, "x", "x"), compression.GZip)))
	target, err := url.Parse("http://" + good.host)
	if err != nil {
		t.Fatal(err)
	}
	proxy := httputil.NewSingleHostReverseProxy(target)
	var mu sync.Mutex
	seen := make(map[string][]string) // Authorization, by receiver
	note := func(receiver string, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		seen[receiver] = append(seen[receiver], r.Header.Get("Authorization"))
	}
	storage := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { note("storage", r); proxy.ServeHTTP(w, r) }))
	defer storage.Close()
	mirror := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		note("mirror", r)
		w.WriteHeader(http.StatusUnauthorized)
	}))
	defer mirror.Close()
	registry := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		note("registry", r)
		switch _, _, ok := r.BasicAuth(); {
		case !ok:
			w.Header().Set("Www-Authenticate", `Basic realm="test"`)
			w.WriteHeader(http.StatusUnauthorized)
		case strings.Contains(r.URL.Path, "/blobs/"):
			http.Redirect(w, r, storage.URL+r.URL.Path, http.StatusTemporaryRedirect)
		default:
			proxy.ServeHTTP(w, r)
		}
	}))
	defer registry.Close()
	host := strings.TrimPrefix(registry.URL, "http://")
	s, _, _ := service(t)
	s.registry.Config.Mirrors = map[string][]string{host: {strings.TrimPrefix(mirror.URL, "http://")}}
	s.registry.Keychain = keychain(func(r authn.Resource) (authn.Authenticator, error) {
		if r.RegistryStr() == host {
			return &authn.Basic{Username: "user", Password: "secret"}, nil
		}
		return authn.Anonymous, nil
	})
	if _, err := s.Pull(t.Context(), host+"/team/app:1", PullOptions{Platform: "linux/amd64"}); err != nil {
		t.Fatal(err)
	}
	for _, receiver := range []string{"storage", "mirror"} {
		if len(seen[receiver]) == 0 || strings.Join(seen[receiver], "") != "" {
			t.Errorf("the %s saw %q", receiver, seen[receiver])
		}
	}
	if !strings.HasPrefix(strings.Join(seen["registry"], ""), "Basic ") {
		t.Errorf("the registry saw %q", seen["registry"])
	}
}

// A damaged image at a mirror is like a mirror that does not answer.
func TestMirrorWithADamagedImage(t *testing.T) {
	f, m := newFaulty(t), newFaulty(t)
	ref := f.host + "/team/app:1"
	push(t, ref, testImage(t, "amd64", asLayer(t, layerTar(t, "x", "x"), compression.GZip)))
	m.replace("/manifests/1", answer(string(types.OCIManifestSchema1), []byte("{}")))
	s, _, _ := service(t)
	s.registry.Config.Mirrors = map[string][]string{f.host: {m.host}}
	if _, err := s.Pull(t.Context(), ref, PullOptions{Platform: "linux/amd64"}); err != nil {
		t.Error(err)
	}
}
