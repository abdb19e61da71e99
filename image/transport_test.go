package image

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

func TestPlainHTTPStaysOnThisMachine(t *testing.T) {
	for address, want := range map[string]bool{
		"localhost": true, "localhost:5000": true, "127.0.0.1": true, "127.9.9.9:5000": true, "[::1]:5000": true, "[::1]": true, "[::ffff:127.0.0.1]:1": true,
		"10.0.0.1:5000": false, "192.168.1.1": false, "registry.local": false, "localhost.example": false, "127.0.0.1.example:5000": false, "0.0.0.0": false, "": false,
	} {
		if got := loopback(address); got != want {
			t.Errorf("%q: %v", address, got)
		}
	}
	tr := newTransport(false, nil)
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
			_, _ = w.Write(make([]byte, maxDocument))
		default:
			_, _ = w.Write(make([]byte, maxDocument+1))
		}
	}))
	defer srv.Close()
	tr := newTransport(false, nil)
	defer tr.close()
	for path, ok := range map[string]bool{"/token": false, "/v2/a/manifests/b": false, "/v2/a/blobs/b": true, "/exact": true, "/to/blobs/x": true, "/to/manifests/x": false} {
		err := get(t, tr, srv.URL+path)
		if ok != (err == nil) || !ok && !errors.Is(err, ErrInvalid) {
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
	tr := newTransport(false, nil)
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
		"7": 7 * time.Second, "0": time.Second, "": defaultPatience, "-5": defaultPatience, "soon": defaultPatience, "99999999999999999999": defaultPatience,
		"Fri, 02 Jan 2026 03:04:35 GMT": 30 * time.Second, "Fri, 02 Jan 2026 03:04:00 GMT": time.Second,
	} {
		if got := retryAfter(header, now); got != want {
			t.Errorf("Retry-After %q: %v, want %v", header, got, want)
		}
	}
}
