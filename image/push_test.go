package image

import (
	"errors"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/compression"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"github.com/sandboxd/sandboxd/api"
)

// pushed returns a service that has an image, which was pulled from another registry, under a name
// of host.
func pushed(t *testing.T, host string) (s *Service, dir, ref string, img *Image) {
	t.Helper()
	from := newFaulty(t)
	source := from.host + "/source/app:1"
	push(t, source, testImage(t, "amd64",
		asLayer(t, layerTar(t, "file", strings.Repeat("content ", 100_000)), compression.None), asLayer(t, layerTar(t, "other", "x"), compression.GZip)))
	s, _, dir = service(t)
	if _, err := s.Pull(t.Context(), source, PullOptions{Platform: "linux/amd64"}); err != nil {
		t.Fatal(err)
	}
	ref = host + "/team/app:2"
	img, err := s.Tag(t.Context(), source, ref)
	if err != nil {
		t.Fatal(err)
	}
	return s, dir, ref, img
}

// recorded is a registry that records requests and can answer otherwise.
type recorded struct {
	host string

	mu    sync.Mutex
	asked []string // "PUT /v2/…?…"
	// instead, if set, may answer a request and then returns true.
	instead func(w http.ResponseWriter, r *http.Request) bool
}

func newRecorded(t *testing.T) *recorded {
	t.Helper()
	rec := &recorded{}
	good := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rec.mu.Lock()
		rec.asked = append(rec.asked, r.Method+" "+r.URL.RequestURI())
		instead := rec.instead
		rec.mu.Unlock()
		if instead == nil || !instead(w, r) {
			good.ServeHTTP(w, r)
		}
	}))
	t.Cleanup(srv.Close)
	rec.host = strings.TrimPrefix(srv.URL, "http://")
	return rec
}

// count is how many requests had all of these words, and forgets them with the rest.
func (r *recorded) count(words ...string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := 0
	for _, a := range r.asked {
		has := true
		for _, w := range words {
			has = has && strings.Contains(a, w)
		}
		if has {
			n++
		}
	}
	return n
}

func (r *recorded) forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asked = nil
}

// A push sends the pulled bytes unchanged. Existing blobs are not sent again, and those of another
// repository are mounted from there.
func TestPush(t *testing.T) {
	r := newRecorded(t)
	s, _, ref, img := pushed(t, r.host)
	statuses := func(ref string) map[string]int {
		t.Helper()
		got := make(map[string]int)
		if _, err := s.Push(t.Context(), ref, PushOptions{Progress: func(e api.PullEvent) { got[e.Status]++ }}); err != nil {
			t.Fatalf("push: %v", err)
		}
		return got
	}
	if got := statuses(ref); got["done"] != 2 || got["uploading"] < 2 || got["exists"] != 0 {
		t.Errorf("first: %v", got)
	}
	parsed, err := name.ParseReference(ref, name.Insecure)
	if err != nil {
		t.Fatal(err)
	}
	head, err := remote.Head(parsed, remote.WithContext(t.Context()))
	if err != nil || head.Digest.String() != img.Digest {
		t.Errorf("the registry has %v, %v, want %s", head, err, img.Digest)
	}
	// By another service, so that nothing comes from memory or disk.
	other, _, _ := service(t)
	if back, err := other.Pull(t.Context(), ref, PullOptions{Platform: "linux/amd64"}); err != nil || back.Digest != img.Digest {
		t.Errorf("pulled back: %+v, %v", back, err)
	}

	r.forget()
	if got := statuses(ref); got["exists"] != 2 || got["uploading"] != 0 || r.count("PATCH ") != 0 {
		t.Errorf("second: %v, %d uploads", got, r.count("PATCH "))
	}
	elsewhere := r.host + "/other/app:1"
	if _, err := s.Tag(t.Context(), ref, elsewhere); err != nil {
		t.Fatal(err)
	}
	r.forget()
	// Two layers and the configuration. This registry has one store for all repositories, and finds
	// blobs of any.
	r.mu.Lock()
	r.instead = func(w http.ResponseWriter, req *http.Request) bool {
		if req.Method == http.MethodHead && strings.Contains(req.URL.Path, "/other/app/blobs/") {
			w.WriteHeader(http.StatusNotFound)
			return true
		}
		if req.Method == http.MethodPost && req.URL.Query().Get("mount") != "" {
			w.WriteHeader(http.StatusCreated)
			return true
		}
		return false
	}
	r.mu.Unlock()
	if got := statuses(elsewhere); got["exists"] != 2 || r.count("POST ", "mount=sha256", "from=team%2Fapp") != 3 || r.count("PATCH ") != 0 {
		t.Errorf("mounted: %v, %v", got, r.asked)
	}
}

// A registry's refusal is explained, with a remedy, and the image stays.
func TestPushThatFails(t *testing.T) {
	answerTo := func(method, path string, h http.HandlerFunc) func(http.ResponseWriter, *http.Request) bool {
		return func(w http.ResponseWriter, r *http.Request) bool {
			if r.Method != method || !strings.Contains(r.URL.Path, path) {
				return false
			}
			h(w, r)
			return true
		}
	}
	for _, test := range []struct {
		name    string
		instead func(http.ResponseWriter, *http.Request) bool
		class   error
		says    string
	}{
		{"401", answerTo("POST", "/blobs/uploads/", status(401)), ErrRegistry, "login"},
		{"403", answerTo("POST", "/blobs/uploads/", status(403)), ErrRegistry, "not be yours to write to"},
		{"400", answerTo("PUT", "/manifests/", status(400)), ErrRegistry, "refuses it"},
		{"404", answerTo("POST", "/blobs/uploads/", status(404)), ErrRegistry, "does not have the repository"},
		{"429", answerTo("PUT", "/manifests/", status(429)), ErrRegistry, "no more requests"},
		{"500 for a blob", answerTo("PATCH", "/blobs/uploads/", status(500)), ErrRegistry, "try again later"},
		{"500 for the manifest", answerTo("PUT", "/manifests/", status(500)), ErrRegistry, "try again later"},
		{"a connection that is cut in the middle", answerTo("PATCH", "/blobs/uploads/", func(_ http.ResponseWriter, r *http.Request) {
			_, _ = io.CopyN(io.Discard, r.Body, 1000)
			panic(http.ErrAbortHandler)
		}), ErrRegistry, "broke off"},
		{"an upload without a place", answerTo("POST", "/blobs/uploads/", status(202)), ErrRegistry, "Location"},
		{"an upload to somewhere inside", answerTo("POST", "/blobs/uploads/", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Location", "http://169.254.169.254/upload")
			w.WriteHeader(http.StatusAccepted)
		}), ErrRegistry, "169.254.169.254"},
		{"an upload by plain HTTP to elsewhere", answerTo("POST", "/blobs/uploads/", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Location", "http://storage.example/upload")
			w.WriteHeader(http.StatusAccepted)
		}), ErrRegistry, "plain HTTP"},
		{"a redirect without end", func(w http.ResponseWriter, r *http.Request) bool {
			if strings.Contains(r.URL.Path, "/blobs/") {
				http.Redirect(w, r, r.URL.Path, http.StatusTemporaryRedirect)
				return true
			}
			return false
		}, ErrRegistry, "more than 10 times"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			r := newRecorded(t)
			s, dir, ref, _ := pushed(t, r.host)
			r.instead = test.instead
			before := leftovers(t, dir, s.applier.(*directApplier))
			_, err := s.Push(t.Context(), ref, PushOptions{})
			if !errors.Is(err, test.class) || !strings.Contains(err.Error(), test.says) || !strings.Contains(err.Error(), ref) {
				t.Errorf("error %v, want %q with %q", err, test.class, test.says)
			}
			if after := leftovers(t, dir, s.applier.(*directApplier)); strings.Join(before, " ") != strings.Join(after, " ") {
				t.Errorf("stored before %v, after %v", before, after)
			}
		})
	}
}

// Temporary failures are retried: an error, a connection that ends, a registry that wants a pause.
func TestPushTriesAgain(t *testing.T) {
	for _, test := range []struct {
		name string
		once http.HandlerFunc
		path string
	}{
		{"500", status(500), "/blobs/uploads/"},
		{"cut", func(_ http.ResponseWriter, r *http.Request) {
			_, _ = io.CopyN(io.Discard, r.Body, 1000)
			panic(http.ErrAbortHandler)
		}, "/blobs/uploads/"},
		{"429 for a blob", func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			w.Header().Set("Retry-After", "1")
			w.WriteHeader(http.StatusTooManyRequests)
		}, "/blobs/uploads/"},
		{"429 for the manifest", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Retry-After", "1")
			w.WriteHeader(http.StatusTooManyRequests)
		}, "/manifests/"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			r := newRecorded(t)
			s, _, ref, img := pushed(t, r.host)
			s.registry.MaxWait = 10 * time.Second
			var once sync.Once
			r.instead = func(w http.ResponseWriter, req *http.Request) (done bool) {
				if (req.Method == http.MethodPatch || req.Method == http.MethodPut) && strings.Contains(req.URL.Path, test.path) {
					once.Do(func() { done = true })
				}
				if done {
					test.once(w, req)
				}
				return done
			}
			if _, err := s.Push(t.Context(), ref, PushOptions{}); err != nil {
				t.Fatal(err)
			}
			parsed, err := name.ParseReference(ref, name.Insecure)
			if err != nil {
				t.Fatal(err)
			}
			if head, err := remote.Head(parsed); err != nil || head.Digest.String() != img.Digest {
				t.Errorf("the registry has %v, %v, want %s", head, err, img.Digest)
			}
		})
	}
}

// A document that has rotted on disk is not passed on either, and no other image in its place.
func TestPushOfDamagedDocuments(t *testing.T) {
	for _, which := range []string{"manifest", "config"} {
		t.Run(which, func(t *testing.T) {
			t.Parallel()
			r := newRecorded(t)
			s, dir, ref, _ := pushed(t, r.host)
			record, err := s.store.Get("", ref)
			if err != nil {
				t.Fatal(err)
			}
			blob := record.Manifest
			if which == "config" {
				blob = record.Config
			}
			path := filepath.Join(dir, "blobs/blobs/sha256", strings.TrimPrefix(blob.Digest, "sha256:"))
			data, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(path, 0o600); err != nil {
				t.Fatal(err)
			}
			// Still JSON, and still of that length.
			if err := os.WriteFile(path, []byte(strings.Replace(string(data), ":{", ": ", 1)), 0o600); err != nil {
				t.Fatal(err)
			}
			if _, err := s.Push(t.Context(), ref, PushOptions{}); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "pull it anew") {
				t.Errorf("push: %v", err)
			}
			if r.count("PUT ", "/manifests/") != 0 {
				t.Error("a manifest was sent")
			}
		})
	}
}

// The digest of an index cannot be pushed: the registry would get another image under its name.
func TestPushByTheDigestOfAnIndex(t *testing.T) {
	r := newRecorded(t)
	s, _, _ := service(t)
	source := r.host + "/team/many"
	image := testImage(t, "amd64", asLayer(t, layerTar(t, "x", "x"), compression.GZip))
	index := mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: image, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "amd64"}}})
	push(t, source+":1", index)
	digest, err := index.Digest()
	if err != nil {
		t.Fatal(err)
	}
	ref := source + "@" + digest.String()
	if _, err := s.Pull(t.Context(), ref, PullOptions{Platform: "linux/amd64"}); err != nil {
		t.Fatal(err)
	}
	r.forget()
	if _, err := s.Push(t.Context(), ref, PushOptions{}); !errors.Is(err, ErrReference) || !strings.Contains(err.Error(), "tag it") {
		t.Errorf("push: %v", err)
	}
	if n := r.count(""); n != 0 {
		t.Errorf("the registry was asked %d times", n)
	}
}

// Where no token is to be had that is good for mounting from elsewhere, the blobs are sent.
func TestPushWithoutATokenForMounts(t *testing.T) {
	r := newRecorded(t)
	s, _, ref, _ := pushed(t, r.host)
	if _, err := s.Tag(t.Context(), ref, r.host+"/secret/app:1"); err != nil {
		t.Fatal(err)
	}
	r.instead = func(w http.ResponseWriter, req *http.Request) bool {
		switch {
		case req.URL.Path == "/token" && strings.Contains(req.URL.RawQuery, "secret"):
			w.WriteHeader(http.StatusForbidden)
		case req.URL.Path == "/token":
			_, _ = io.WriteString(w, `{"token":"good"}`)
		case req.Header.Get("Authorization") != "Bearer good":
			w.Header().Set("Www-Authenticate", `Bearer realm="http://`+r.host+`/token",service="test"`)
			w.WriteHeader(http.StatusUnauthorized)
		default:
			return false
		}
		return true
	}
	if _, err := s.Push(t.Context(), ref, PushOptions{}); err != nil {
		t.Fatal(err)
	}
	if r.count("/token", "secret") == 0 || r.count("PATCH ") != 3 {
		t.Errorf("%v", r.asked)
	}
}

// A damaged blob is not pushed, and a missing one is reported as this host's fault.
func TestPushOfDamagedBlobs(t *testing.T) {
	r := newRecorded(t)
	s, dir, ref, _ := pushed(t, r.host)
	record, err := s.store.Get("", ref)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "blobs/blobs/sha256", strings.TrimPrefix(record.Layers[0].Blob.Digest, "sha256:"))
	if err := os.Chmod(path, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte("rotten"), 100); err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
	if _, err := s.Push(t.Context(), ref, PushOptions{}); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "damaged") {
		t.Errorf("a rotten blob: %v", err)
	}
	if r.count("PUT ", "/manifests/") != 0 {
		t.Error("a manifest was sent all the same")
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Push(t.Context(), ref, PushOptions{}); err == nil || errors.Is(err, ErrRegistry) || errors.Is(err, ErrInvalid) {
		t.Errorf("a blob that is gone: %v", err)
	}
}

func TestPushOfWhatCannotBe(t *testing.T) {
	s, _, _ := service(t)
	for ref, class := range map[string]error{"host": ErrReference, "": ErrReference, "https://x/y": ErrReference, "127.0.0.1:1/not/here:1": ErrNotFound} {
		if _, err := s.Push(t.Context(), ref, PushOptions{}); !errors.Is(err, class) {
			t.Errorf("%q: %v, want %v", ref, err, class)
		}
	}
}
