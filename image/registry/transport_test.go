package registry

import (
	"crypto/tls"
	"errors"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/image/errdefs"
	"github.com/sandboxd/sandboxd/image/reference"
	"github.com/sandboxd/sandboxd/image/store"
)

// nowhere is insecure.
func nowhere(string) bool { return false }

func TestPlainHTTPStaysOnThisMachine(t *testing.T) {
	for address, want := range map[string]bool{
		"localhost": true, "localhost:5000": true, "127.0.0.1": true, "127.9.9.9:5000": true, "[::1]:5000": true, "[::1]": true, "[::ffff:127.0.0.1]:1": true,
		"10.0.0.1:5000": false, "192.168.1.1": false, "registry.local": false, "localhost.example": false, "127.0.0.1.example:5000": false, "0.0.0.0": false, "": false,
	} {
		if got := loopback(address); got != want {
			t.Errorf("%q: %v", address, got)
		}
	}
	tr := newTransport("localhost", nowhere, nil)
	defer tr.close()
	for _, url := range []string{"http://10.0.0.1/v2/", "http://registry.local/v2/", "http://registry.example/token"} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := tr.RoundTrip(req); !errors.Is(err, errPlainHTTP) { //nolint:bodyclose // there is none
			t.Errorf("%s: %v", url, err)
		}
	}
}

// get reads a whole answer.
func get(t *testing.T, tr *transport, url string) error {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := (&http.Client{Transport: tr}).Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return err
}

func TestBodiesThatAreNoBlobsAreBounded(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case strings.HasPrefix(r.URL.Path, "/to/"):
			http.Redirect(w, r, "/storage/x", http.StatusTemporaryRedirect)
		case r.URL.Path == "/exact":
			_, _ = w.Write(make([]byte, store.MaxDocument))
		default:
			_, _ = w.Write(make([]byte, store.MaxDocument+1))
		}
	}))
	defer srv.Close()
	tr := newTransport("localhost", nowhere, nil)
	defer tr.close()
	for path, ok := range map[string]bool{"/token": false, "/v2/a/manifests/b": false, "/v2/a/blobs/b": true, "/exact": true, "/to/blobs/x": true, "/to/manifests/x": false} {
		err := get(t, tr, srv.URL+path)
		if ok != (err == nil) || !ok && !errors.Is(err, errdefs.ErrInvalid) {
			t.Errorf("%s: %v", path, err)
		}
	}
}

func TestStalledBodiesEnd(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = w.Write([]byte("x"))
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	}))
	defer srv.Close()
	tr := newTransport("localhost", nowhere, nil)
	defer tr.close()
	tr.stall = 50 * time.Millisecond
	err := get(t, tr, srv.URL+"/v2/a/blobs/b")
	var network *networkError
	if !errors.Is(err, errStalled) || !errors.As(err, &network) {
		t.Errorf("error %v, want one about stalling", err)
	}
}

func TestRetryAfter(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for header, want := range map[string]time.Duration{
		"7": 7 * time.Second, "0": time.Second, "": defaultWait, "-5": defaultWait, "soon": defaultWait, "99999999999999999999": defaultWait,
		"Fri, 02 Jan 2026 03:04:35 GMT": 30 * time.Second, "Fri, 02 Jan 2026 03:04:00 GMT": time.Second,
	} {
		if got := retryAfter(header, now); got != want {
			t.Errorf("Retry-After %q: %v, want %v", header, got, want)
		}
	}
}

func TestPatienceIsBounded(t *testing.T) {
	tr := newTransport("localhost", nowhere, nil)
	defer tr.close()
	tr.waitLeft.Store(int64(maxWait))
	for range 2 { // the second one overflowed once
		if far := retryAfter("Fri, 31 Dec 9999 23:59:59 GMT", time.Now()); tr.takeWait(far) {
			t.Errorf("a wait of %v was allowed", far)
		}
	}
	if !tr.takeWait(maxWait) || tr.takeWait(1) {
		t.Error("the allowed wait was refused, or more was granted")
	}
}

// Insecure is one address, not where it sends us: a token's or storage's certificate counts.
func TestInsecureIsOneAddress(t *testing.T) {
	storage := httptest.NewTLSServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer storage.Close()
	storage.Config.ErrorLog = log.New(io.Discard, "", 0)
	registry := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/" {
			http.Redirect(w, r, storage.URL, http.StatusTemporaryRedirect)
		}
	}))
	defer registry.Close()
	tr := newTransport("localhost", func(address string) bool { return "https://"+address == registry.URL }, nil)
	defer tr.close()
	if err := get(t, tr, registry.URL+"/"); err != nil {
		t.Errorf("the registry itself: %v", err)
	}
	var untrusted *tls.CertificateVerificationError
	if err := get(t, tr, registry.URL+"/v2/a/blobs/b"); !errors.As(err, &untrusted) {
		t.Errorf("storage: %v, want an error about its certificate", err)
	}
}

// A registry that is elsewhere has no business with the services of this machine.
func TestOnlyRegistriesHereLeadHere(t *testing.T) {
	asked := 0
	here := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked++ }))
	defer here.Close()
	address := strings.TrimPrefix(here.URL, "http://")
	elsewhere := newTransport("registry.example", nowhere, nil)
	defer elsewhere.close()
	if err := get(t, elsewhere, here.URL); !errors.Is(err, errThisMachine) {
		t.Errorf("by its address: %v", err)
	}
	for _, to := range []string{address, strings.Replace(address, "127.0.0.1", "0.0.0.0", 1), strings.Replace(address, "127.0.0.1", "[::ffff:127.0.0.1]", 1)} {
		// Any name may resolve to these.
		if c, err := elsewhere.dial(t.Context(), "tcp", to); !errors.Is(err, errThisMachine) {
			if err == nil {
				_ = c.Close()
			}
			t.Errorf("%s: %v", to, err)
		}
	}
	if asked != 0 {
		t.Errorf("it was asked %d times", asked)
	}
	for registry, insecure := range map[string]string{"localhost:1": "", "registry.example": address} {
		tr := newTransport(registry, func(a string) bool { return a == insecure }, nil)
		if err := get(t, tr, here.URL); err != nil {
			t.Errorf("registry %s, insecure %q: %v", registry, insecure, err)
		}
		tr.close()
	}
	for address, want := range map[string]bool{
		"registry.example:443": true, "Registry.Example:80": true, "registry.example:5000": false, "other.example:443": false, "localhost:443": false,
	} {
		if got := elsewhere.mayBeHere(address); got != want {
			t.Errorf("%s may be here: %v", address, got)
		}
	}
	// The operator decides the proxy's address.
	elsewhere.proxies.Store(address, true)
	elsewhere.base.Proxy = func(*http.Request) (*url.URL, error) { return url.Parse(here.URL) }
	if err := get(t, elsewhere, "http://localhost:1/"); !errors.Is(err, errThisMachine) {
		t.Errorf("by a proxy: %v", err)
	}
	c, err := elsewhere.dial(t.Context(), "tcp", address)
	if err != nil {
		t.Fatalf("a proxy: %v", err)
	}
	_ = c.Close()
}

func TestPathsOfBlobs(t *testing.T) {
	for path, want := range map[string]bool{
		"/v2/a/blobs/sha256:1": true, "/v2/blobs/uploads/blobs/sha256:1": true, "/v2/a/blobs/uploads/b/blobs/sha256:1": true,
		"/v2/a/blobs/uploads/": false, "/v2/a/blobs/uploads": false, "/v2/a/blobs/uploads/1": false, "/v2/a/blobs/b/manifests/1": false, "/token": false,
	} {
		if got := isBlob(path); got != want {
			t.Errorf("%s: %v", path, got)
		}
	}
}

func TestMirrorAddresses(t *testing.T) {
	for text, want := range map[string]string{
		"docker.io=m.example:5000": "docker.io m.example:5000", "index.docker.io=m.example": "docker.io m.example", "Docker.IO=M.Example": "docker.io m.example",
		"r.example=index.docker.io": "r.example docker.io", "docker.io=localhost:1": "docker.io localhost:1",
		"docker.io=mirror": "", "registry=m.example": "", "docker.io=index.docker.io": "", "docker.io": "", "docker.io=https://m.example": "",
	} {
		registry, mirror, err := ParseMirror(text)
		if want == "" && err == nil || want != "" && registry+" "+mirror != want {
			t.Errorf("%s: %q, %q, %v", text, registry, mirror, err)
		}
	}
	r := Config{Mirrors: map[string][]string{"docker.io": {"m.example"}, "r.example": {"docker.io"}}, Insecure: []string{"R.example"}}
	for ref, want := range map[string]string{"debian": "m.example/library/debian:latest", "R.Example/a": "index.docker.io/library/a:latest"} {
		parsed, err := reference.Parse(ref)
		if err != nil {
			t.Fatal(err)
		}
		if got := r.sources(parsed); len(got) != 2 || got[0].Name() != want {
			t.Errorf("%s: %v", ref, got)
		}
	}
	if !r.insecure("r.example") || r.insecure("r.example:1") {
		t.Error("insecure addresses")
	}
}

// A registry that stops reading does not block a push for ever.
func TestUploadsThatStallEnd(t *testing.T) {
	hold := make(chan struct{})
	srv := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, _ *http.Request) { <-hold }))
	t.Cleanup(srv.Close)
	t.Cleanup(func() { close(hold) })
	tr := newTransport("localhost", func(string) bool { return true }, nil)
	tr.stall = 50 * time.Millisecond
	defer tr.close()
	// Endless, and one that is in buffers before anyone takes it.
	for _, body := range []io.Reader{struct{ io.Reader }{io.LimitReader(zeros{}, 1<<40)}, strings.NewReader("short")} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPatch, srv.URL+"/v2/a/blobs/uploads/1", body)
		if err != nil {
			t.Fatal(err)
		}
		if resp, err := tr.RoundTrip(req); !errors.Is(err, errUploadStalled) {
			if err == nil {
				_ = resp.Body.Close()
			}
			t.Errorf("%v, want %v", err, errUploadStalled)
		}
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// A blob that is closed during its upload is not damaged: the registry has refused it already.
func TestClosedBlobsAreNoErrorOfOurs(t *testing.T) {
	st, err := store.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	blob, err := st.AddBlob(t.Context(), strings.NewReader("content"), 100, func(string) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	b := &storedBlob{ctx: t.Context(), store: st, blob: blob, progress: func(int64) {}}
	rc, err := b.Compressed()
	if err != nil {
		t.Fatal(err)
	}
	_ = rc.Close()
	if _, err := rc.Read(make([]byte, 10)); !errors.Is(err, os.ErrClosed) || b.failed.Load() != nil {
		t.Errorf("%v, recorded %v", err, b.failed.Load())
	}
}
