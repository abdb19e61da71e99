package store_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"
	bolt "go.etcd.io/bbolt"

	"github.com/sandboxd/sandboxd/image/store"
)

func open(t *testing.T, dir string) *store.Store {
	t.Helper()
	s, err := store.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func blob(content string) store.Blob {
	return store.Blob{MediaType: "text/plain", Digest: fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(content))), Size: int64(len(content))}
}

func files(t *testing.T, dir string) []string {
	t.Helper()
	var out []string
	for _, d := range []string{"blobs/blobs/sha256", "incoming"} {
		entries, err := os.ReadDir(filepath.Join(dir, d))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			out = append(out, filepath.Join(d, e.Name()))
		}
	}
	return out
}

func TestBlobsAreWhatTheirDescriptorsSay(t *testing.T) {
	good := blob("content")
	tests := []struct {
		name  string
		blob  store.Blob
		r     io.Reader
		class error
	}{
		{"right", good, strings.NewReader("content"), nil},
		{"byte by byte", good, iotest.OneByteReader(strings.NewReader("content")), nil},
		{"empty", blob(""), strings.NewReader(""), nil},
		{"other bytes", good, strings.NewReader("CONTENT"), store.ErrMismatch},
		{"too few", good, strings.NewReader("conten"), store.ErrMismatch},
		{"too many", good, strings.NewReader("contents"), store.ErrMismatch},
		{"a read error", good, io.MultiReader(strings.NewReader("cont"), iotest.ErrReader(syscall.EIO)), syscall.EIO},
		{"a digest that is a path", store.Blob{Digest: "sha256:../../../../etc/passwd", Size: 7}, strings.NewReader("content"), store.ErrMismatch},
		{"a digest in capitals", store.Blob{Digest: strings.ToUpper(good.Digest), Size: 7}, strings.NewReader("content"), store.ErrMismatch},
		{"another algorithm", store.Blob{Digest: "sha512:" + strings.Repeat("a", 128), Size: 7}, strings.NewReader("content"), store.ErrMismatch},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			s := open(t, dir)
			err := s.WriteBlob(t.Context(), tt.blob, tt.r)
			if !errors.Is(err, tt.class) {
				t.Fatalf("error %v, want %v", err, tt.class)
			}
			if has := s.Has(tt.blob); has != (err == nil) {
				t.Errorf("stored: %v", has)
			}
			if left := files(t, dir); err != nil && len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
}

func TestCancelledWriteLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	ctx, cancel := context.WithCancel(t.Context())
	r := io.MultiReader(strings.NewReader("con"), readerFunc(func([]byte) (int, error) { cancel(); return 0, nil }), strings.NewReader("tent"))
	if err := s.WriteBlob(ctx, blob("content"), r); !errors.Is(err, context.Canceled) {
		t.Fatalf("error %v", err)
	}
	if left := files(t, dir); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

func record(name, manifest string, layers ...string) *store.Record {
	r := &store.Record{Name: name, Platform: "linux/arm/v7", Manifest: blob(manifest), Config: blob("c")}
	for _, l := range layers {
		r.Layers = append(r.Layers, store.Layer{Blob: blob(l), DiffID: blob("diff " + l).Digest, ChainID: blob("chain " + l).Digest})
	}
	return r
}

func fill(t *testing.T, s *store.Store, contents ...string) {
	t.Helper()
	for _, c := range contents {
		if err := s.WriteBlob(t.Context(), blob(c), strings.NewReader(c)); err != nil {
			t.Fatal(err)
		}
	}
}

func TestImagesOutliveTheProcess(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	fill(t, s, "m", "c", "l1", "l2", "m2", "stray")
	one, two := record("a/one:1", "m", "l1", "l2"), record("a/two:1", "m2", "l1")
	for _, r := range []*store.Record{two, one} {
		if err := s.Put(nil, r); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.BeginLayers("sha256:pending"); err != nil {
		t.Fatal(err)
	}
	// Beginning a ready layer again does not make it pending.
	if err := s.BeginLayers(one.Layers[0].ChainID); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir)
	list, err := s.List()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]*store.Record{one, two}, list); diff != "" {
		t.Errorf("list (-want +got):\n%s", diff)
	}
	pending, err := s.PendingLayers()
	if err != nil || len(pending) != 1 || pending[0] != "sha256:pending" {
		t.Errorf("pending %v, %v", pending, err)
	}
	// Garbage is removed, needed blobs are not.
	if s.Has(blob("stray")) || !s.Has(blob("l2")) || !s.Has(blob("m2")) {
		t.Errorf("blobs %v", files(t, dir))
	}
	if err := s.RemoveUnused([]string{blob("l1").Digest, blob("never").Digest}); err != nil || !s.Has(blob("l1")) {
		t.Errorf("a blob in use was removed: %v", err)
	}
	if _, err := s.Get("", "a/three:1"); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("error %v", err)
	}
	data, err := os.ReadFile(filepath.Join(dir, "blobs/index.json"))
	if err != nil || !bytes.Contains(data, []byte(`"variant": "v7"`)) || !bytes.Contains(data, []byte(`"a/two:1"`)) {
		t.Errorf("index.json %s, %v", data, err)
	}
}

func TestImageWithoutItsBlobsIsNotRecorded(t *testing.T) {
	s := open(t, t.TempDir())
	fill(t, s, "m", "c")
	if err := s.Put(nil, record("a:1", "m", "missing")); !errors.Is(err, store.ErrNotFound) {
		t.Fatalf("error %v", err)
	}
	if _, err := s.Get("", "a:1"); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("error %v", err)
	}
}

func TestSecondProcessIsRefused(t *testing.T) {
	dir := t.TempDir()
	open(t, dir)
	if _, err := store.Open(dir); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Fatalf("error %v", err)
	}
}

func TestConcurrentRecordsAreAllInTheIndex(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	fill(t, s, "m", "c", "l")
	var wg sync.WaitGroup
	for i := range 10 {
		wg.Go(func() {
			if err := s.Put(nil, record(fmt.Sprintf("a:%d", i), "m", "l")); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	data, err := os.ReadFile(filepath.Join(dir, "blobs/index.json"))
	if err != nil || bytes.Count(data, []byte("ref.name")) != 10 {
		t.Errorf("index.json %s, %v", data, err)
	}
}

func TestReadBlobIsBounded(t *testing.T) {
	s := open(t, t.TempDir())
	fill(t, s, "content")
	if _, err := s.ReadBlob(blob("content").Digest, 6); !errors.Is(err, store.ErrMismatch) {
		t.Errorf("error %v", err)
	}
	if b, err := s.ReadBlob(blob("content").Digest, 7); err != nil || string(b) != "content" {
		t.Errorf("%q, %v", b, err)
	}
}

// An existing blob is not overwritten.
func TestAddBlobLeavesWhatIsThere(t *testing.T) {
	dir := t.TempDir()
	s, err := store.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var found []os.FileInfo
	for range 2 {
		b, err := s.AddBlob(t.Context(), strings.NewReader("content"), 7, func(string) error { return nil })
		if err != nil {
			t.Fatal(err)
		}
		fi, err := os.Stat(filepath.Join(dir, "blobs/blobs/sha256", strings.TrimPrefix(b.Digest, "sha256:")))
		if err != nil {
			t.Fatal(err)
		}
		found = append(found, fi)
	}
	if !os.SameFile(found[0], found[1]) {
		t.Error("the blob is another file")
	}
	if left, err := os.ReadDir(filepath.Join(dir, "incoming")); err != nil || len(left) != 0 {
		t.Errorf("left over: %v (%v)", left, err)
	}
}

// Databases from before there were tenants are the daemon's own tenant's.
func TestOldDatabasesAreRead(t *testing.T) {
	dir := t.TempDir()
	db, err := bolt.Open(filepath.Join(dir, "images.db"), 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	err = db.Update(func(tx *bolt.Tx) error {
		for bucket, entry := range map[string][2]string{
			"images":    {"docker.io/library/a:1", `{"name":"docker.io/library/a:1","platform":"linux/amd64","manifest":{"digest":"sha256:m"},"config":{"digest":"sha256:c"},"layers":null}`},
			"steps":     {"key", `{"key":"key","used_at":"2026-01-01T00:00:00Z"}`},
			"snapshots": {"one", `{"id":"one","name":"point","rootfs":{}}`},
		} {
			b, err := tx.CreateBucketIfNotExists([]byte(bucket))
			if err != nil {
				return err
			}
			if err := b.Put([]byte(entry[0]), []byte(entry[1])); err != nil {
				return err
			}
		}
		return nil
	})
	if err := errors.Join(err, db.Close()); err != nil {
		t.Fatal(err)
	}
	s := open(t, dir)
	for _, tenant := range []string{"", "a"} {
		_, err1 := s.Get(tenant, "docker.io/library/a:1")
		_, err2 := s.Step(tenant, "key")
		_, err3 := s.Snapshot(tenant, "point")
		for _, err := range []error{err1, err2, err3} {
			if tenant == "" && err != nil || tenant != "" && !errors.Is(err, store.ErrNotFound) {
				t.Errorf("tenant %q: %v", tenant, err)
			}
		}
	}
}

// A name that is given to another image leaves the old one to its own tenant only.
func TestNamesOfTenants(t *testing.T) {
	s := open(t, t.TempDir())
	fill(t, s, "m", "m2", "c")
	for _, tenant := range []string{"", "a"} {
		for _, manifest := range []string{"m", "m2"} {
			if tenant == "" && manifest == "m2" {
				continue
			}
			r := record("x/y:1", manifest)
			r.Tenant = tenant
			if err := s.Put(nil, r); err != nil {
				t.Fatal(err)
			}
		}
	}
	for tenant, want := range map[string]string{"": "m", "a": "m2", "b": ""} {
		r, err := s.Get(tenant, "x/y:1")
		if want == "" && !errors.Is(err, store.ErrNotFound) || want != "" && (err != nil || r.Manifest.Digest != blob(want).Digest) {
			t.Errorf("tenant %q: %+v, %v", tenant, r, err)
		}
	}
	if r, err := s.Get("a", "x/y@"+blob("m").Digest); err != nil || !r.Untagged {
		t.Errorf("the image that lost its name: %+v, %v", r, err)
	}
	if _, err := s.Get("", "x/y@"+blob("m").Digest); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("another tenant's: %v", err)
	}
}
