// Package store keeps the images of all tenants on disk: their blobs as an OCI image layout, their
// names and the state of their extracted layers in a small database.
//
//	DIR/blobs/oci-layout, index.json, blobs/sha256/<hex>    an OCI image layout for any tool
//	DIR/images.db                                           bbolt: names, layers; authoritative
//	DIR/incoming/                                           unfinished blobs; emptied by Open
//
// The order of writes makes a crash harmless. A blob is written under a temporary name, checked,
// synced and renamed. A record names blobs only after their new names are synced too, for all of an
// image at once. Blobs without a record at [Open] are left from an interrupted pull and are
// removed.
//
// The extracted layers are elsewhere: their extractor keeps them under their chain ids. The store
// records which of them are needed.
package store

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	bolt "go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"
)

// The classes of errors that are not this host's fault.
var (
	ErrNotFound = errors.New("not in the image store")
	ErrMismatch = errors.New("content does not match its descriptor") // digest or size of a blob
)

// Blob describes stored bytes like a descriptor of the OCI specification.
type Blob struct {
	MediaType string `json:"media_type"`
	Digest    string `json:"digest"` // "sha256:<hex>"
	Size      int64  `json:"size"`
}

// Layer is one layer of an image, extracted.
type Layer struct {
	Blob    Blob   `json:"blob"`
	DiffID  string `json:"diff_id"`
	ChainID string `json:"chain_id"`
}

// Record is an image under one name of a tenant.
type Record struct {
	Tenant   string    `json:"tenant,omitempty"` // empty for the daemon's own
	Name     string    `json:"name"`             // normalized reference
	Platform string    `json:"platform"`
	Manifest Blob      `json:"manifest"`
	Config   Blob      `json:"config"`
	Layers   []Layer   `json:"layers"` // lowest first
	PulledAt time.Time `json:"pulled_at"`
	UsedAt   time.Time `json:"used_at,omitzero"` // last creation of a sandbox from it, as far as flushed to disk
	// Untagged is true after the tag has moved to another image; the name is then repository@digest.
	Untagged bool `json:"untagged,omitempty"`
}

// ID returns the record's key in the database; see [Key].
func (r *Record) ID() string { return Key(r.Tenant, r.Name) }

// Key returns the key of a tenant's object in the database. Names contain no NUL, so keys of two
// tenants never coincide. Keys of the daemon's own tenant are the names alone, as they were before
// there were tenants.
func Key(tenant, name string) string {
	if tenant == "" {
		return name
	}
	return tenant + "\x00" + name
}

// Blobs returns all blobs that the record needs, each once.
func (r *Record) Blobs() []Blob {
	all := []Blob{r.Manifest, r.Config}
	for _, l := range r.Layers {
		all = append(all, l.Blob)
	}
	seen := make(map[string]bool, len(all))
	return slices.DeleteFunc(all, func(b Blob) bool {
		was := seen[b.Digest]
		seen[b.Digest] = true
		return was
	})
}

var (
	bucketImages = []byte("images") // Key of a name -> Record
	bucketLayers = []byte("layers") // chain id -> layerPending or layerReady
	bucketSizes  = []byte("sizes")  // chain id -> Tree
	bucketSteps  = []byte("steps")  // Key of a build's step -> Step

	bucketSnapshots = []byte("snapshots") // id -> Snapshot
)

const (
	layerPending = "pending" // being extracted by an unfinished pull, or being removed
	layerReady   = "ready"   // of a stored image; sandboxes may use it
)

// Store is open until Close. Its methods may be called from several goroutines.
type Store struct {
	layout   *os.Root // DIR/blobs
	incoming *os.Root // DIR/incoming
	db       *bolt.DB
	indexing sync.Mutex // held while the index is written
}

// Open opens the store in dir, creating it if necessary, and removes the remains of interrupted
// pulls. Only one process can have it open.
func Open(dir string) (_ *Store, err error) {
	for _, d := range []string{"blobs/blobs/sha256", "incoming"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o700); err != nil {
			return nil, fmt.Errorf("make image store: %w", err)
		}
	}
	s := &Store{}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}()
	s.db, err = bolt.Open(filepath.Join(dir, "images.db"), 0o600, &bolt.Options{Timeout: 2 * time.Second})
	if errors.Is(err, bolterrors.ErrTimeout) {
		return nil, fmt.Errorf("open image store %s: another process has it open; is a sandboxd running with this data directory?", dir)
	} else if err != nil {
		return nil, fmt.Errorf("open image store %s: %w", dir, err)
	}
	err = s.db.Update(func(tx *bolt.Tx) error {
		_, err1 := tx.CreateBucketIfNotExists(bucketImages)
		_, err2 := tx.CreateBucketIfNotExists(bucketLayers)
		_, err3 := tx.CreateBucketIfNotExists(bucketSizes)
		_, err4 := tx.CreateBucketIfNotExists(bucketSteps)
		_, err5 := tx.CreateBucketIfNotExists(bucketSnapshots)
		return errors.Join(err1, err2, err3, err4, err5)
	})
	if err != nil {
		return nil, fmt.Errorf("open image store %s: %w", dir, err)
	}
	if s.layout, err = os.OpenRoot(filepath.Join(dir, "blobs")); err != nil {
		return nil, fmt.Errorf("open image store: %w", err)
	}
	if s.incoming, err = os.OpenRoot(filepath.Join(dir, "incoming")); err != nil {
		return nil, fmt.Errorf("open image store: %w", err)
	}
	if err := s.clean(); err != nil {
		return nil, fmt.Errorf("clean image store: %w", err)
	}
	if err := s.WriteIndex(); err != nil {
		return nil, err
	}
	return s, nil
}

// Revision returns a number that increases with every change of the database.
func (s *Store) Revision() (revision int, err error) {
	err = s.db.View(func(tx *bolt.Tx) error {
		revision = tx.ID()
		return nil
	})
	return revision, err
}

// Close closes the store.
func (s *Store) Close() error {
	var errs []error
	for _, r := range []*os.Root{s.layout, s.incoming} {
		if r != nil {
			errs = append(errs, r.Close())
		}
	}
	if s.db != nil {
		errs = append(errs, s.db.Close())
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("close image store: %w", err)
	}
	return nil
}

// clean removes unfinished blobs, which have no writer any more, and blobs that no record names.
func (s *Store) clean() error {
	names, err := readDir(s.incoming, ".")
	if err != nil {
		return err
	}
	for _, name := range names {
		if err := s.incoming.RemoveAll(name); err != nil {
			return err
		}
	}
	used, err := s.usedBlobs()
	if err != nil {
		return err
	}
	names, err = readDir(s.layout, blobDir)
	if err != nil {
		return err
	}
	for _, name := range names {
		if !used["sha256:"+name] {
			if err := s.layout.RemoveAll(blobDir + "/" + name); err != nil {
				return err
			}
		}
	}
	return nil
}

func readDir(root *os.Root, dir string) ([]string, error) {
	d, err := root.Open(dir)
	if err != nil {
		return nil, err
	}
	names, err := d.Readdirnames(-1)
	return names, errors.Join(err, d.Close())
}

// MaxDocument limits the bytes of a manifest or configuration: the size that the OCI distribution
// specification asks registries to accept.
const MaxDocument = 4 << 20

// MaxLayers limits the layers of an image. Overlayfs stacks 500; Docker allows 127.
const MaxLayers = 250

const blobDir = "blobs/sha256"

// blobPath returns the place of a blob in the layout. Digests come from manifests, so only
// hexadecimal digits are allowed; only SHA-256 is in use.
func blobPath(digest string) (string, error) {
	hexa, ok := strings.CutPrefix(digest, "sha256:")
	if !ok || len(hexa) != 2*sha256.Size || strings.Trim(hexa, "0123456789abcdef") != "" {
		return "", fmt.Errorf("%w: digest %.80q is not sha256 and 64 digits", ErrMismatch, digest)
	}
	return blobDir + "/" + hexa, nil
}

// Has reports whether the blob is stored. Stored blobs were verified when they were written.
func (s *Store) Has(b Blob) bool {
	path, err := blobPath(b.Digest)
	if err != nil {
		return false
	}
	fi, err := s.layout.Stat(path)
	return err == nil && fi.Mode().IsRegular() && fi.Size() == b.Size
}

// OpenBlob opens a stored blob for reading. A missing one is [ErrNotFound].
func (s *Store) OpenBlob(digest string) (*os.File, error) {
	path, err := blobPath(digest)
	if err != nil {
		return nil, err
	}
	f, err := s.layout.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("blob %s: %w", digest, ErrNotFound)
	} else if err != nil {
		return nil, fmt.Errorf("open blob %s: %w", digest, err)
	}
	return f, nil
}

// ReadBlob returns the content of a small blob, a manifest or configuration of at most limit bytes.
// A larger or damaged one is [ErrMismatch].
func (s *Store) ReadBlob(digest string, limit int64) ([]byte, error) {
	f, err := s.OpenBlob(digest)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, fmt.Errorf("read blob %s: %w", digest, err)
	}
	if int64(len(data)) > limit {
		return nil, fmt.Errorf("blob %s: %w: more than %d bytes", digest, ErrMismatch, limit)
	}
	if got := sha256.Sum256(data); "sha256:"+hex.EncodeToString(got[:]) != digest {
		return nil, fmt.Errorf("blob %s: %w: its digest is sha256:%x", digest, ErrMismatch, got)
	}
	return data, nil
}

// WriteBlob stores the content of r. It must be exactly b.Size bytes with the digest b.Digest;
// otherwise nothing is stored and the error is of the class [ErrMismatch]. An existing blob stays
// and r is not read.
func (s *Store) WriteBlob(ctx context.Context, b Blob, r io.Reader) error {
	if _, err := blobPath(b.Digest); err != nil {
		return err
	}
	if s.Has(b) {
		return nil
	}
	return s.write(ctx, r, b.Size, b.check)
}

// check compares read bytes with their descriptor.
func (b Blob) check(got Blob) error {
	switch {
	case got.Size > b.Size:
		return fmt.Errorf("blob %s: %w: it has more than the %d bytes of its descriptor", b.Digest, ErrMismatch, b.Size)
	case got.Size < b.Size:
		return fmt.Errorf("blob %s: %w: it has %d bytes, its descriptor says %d", b.Digest, ErrMismatch, got.Size, b.Size)
	case got.Digest != b.Digest:
		return fmt.Errorf("blob %s: %w: its digest is %s", b.Digest, ErrMismatch, got.Digest)
	}
	return nil
}

// Check reads r, at most one byte more than the blob has, and compares it with the descriptor
// without storing it. A difference is [ErrMismatch].
func (b Blob) Check(ctx context.Context, r io.Reader) error {
	hash := sha256.New()
	n, err := io.Copy(hash, io.LimitReader(&ctxReader{ctx, r}, b.Size+1))
	if err != nil {
		return fmt.Errorf("read blob %s: %w", b.Digest, err)
	}
	return b.check(Blob{Digest: "sha256:" + hex.EncodeToString(hash.Sum(nil)), Size: n})
}

// AddBlob stores the content of r, at most limit bytes, under its digest. It calls claim with the
// digest before the blob is in its place, so that the caller can keep it from collection.
func (s *Store) AddBlob(ctx context.Context, r io.Reader, limit int64, claim func(digest string) error) (Blob, error) {
	var b Blob
	err := s.write(ctx, r, limit, func(got Blob) error {
		if got.Size > limit {
			return fmt.Errorf("%w: more than %d bytes", ErrMismatch, limit)
		}
		b = got
		return claim(got.Digest)
	})
	return b, err
}

// write stores the content of r if judge agrees. It reads at most one byte more than most: that
// byte proves the excess.
func (s *Store) write(ctx context.Context, r io.Reader, most int64, judge func(Blob) error) (err error) {
	tmp, name, err := s.create()
	if err != nil {
		return fmt.Errorf("write blob: %w", err)
	}
	defer func() {
		if tmp != nil {
			err = errors.Join(err, tmp.Close())
		}
		if err != nil {
			err = errors.Join(err, s.incoming.Remove(name))
		}
	}()
	hash := sha256.New()
	n, err := io.Copy(io.MultiWriter(tmp, hash), io.LimitReader(&ctxReader{ctx, r}, most+1))
	if err != nil {
		return fmt.Errorf("write blob: %w", err)
	}
	digest := "sha256:" + hex.EncodeToString(hash.Sum(nil))
	if err := judge(Blob{Digest: digest, Size: n}); err != nil {
		return err
	}
	path, err := blobPath(digest)
	if err != nil {
		return err
	}
	if err := tmp.Sync(); err != nil {
		return fmt.Errorf("sync blob %s: %w", digest, err)
	}
	closeErr := tmp.Close()
	tmp = nil
	if closeErr != nil {
		return fmt.Errorf("write blob %s: %w", digest, closeErr)
	}
	// An existing blob stays: it is synced, and may be open for reading.
	if s.Has(Blob{Digest: digest, Size: n}) {
		return s.discard(name)
	}
	// Both directories are in one file system and below our own descriptors; os.Root cannot rename
	// between two.
	if err := os.Rename(filepath.Join(s.incoming.Name(), name), filepath.Join(s.layout.Name(), filepath.FromSlash(path))); err != nil {
		return fmt.Errorf("store blob %s: %w", digest, err)
	}
	// Its name need not survive a crash until a record names it: see nameBlobs.
	return nil
}

// nameBlobs makes the names of all blobs durable, for the next record to name them.
func (s *Store) nameBlobs() error {
	if err := syncDir(s.layout, blobDir); err != nil {
		return fmt.Errorf("sync the names of blobs: %w", err)
	}
	return nil
}

func (s *Store) discard(name string) error {
	if err := s.incoming.Remove(name); err != nil {
		return fmt.Errorf("write blob: %w", err)
	}
	return nil
}

// create makes a new file in incoming.
func (s *Store) create() (*os.File, string, error) {
	f, err := os.CreateTemp(s.incoming.Name(), "blob-*")
	if err != nil {
		return nil, "", err
	}
	return f, filepath.Base(f.Name()), nil
}

// TempFile makes a file without a name, for content too large for memory.
func (s *Store) TempFile() (*os.File, error) {
	f, name, err := s.create()
	if err != nil {
		return nil, fmt.Errorf("make temporary file: %w", err)
	}
	if err := s.incoming.Remove(name); err != nil {
		return nil, errors.Join(fmt.Errorf("make temporary file: %w", err), f.Close())
	}
	return f, nil
}

type ctxReader struct {
	ctx context.Context //nolint:containedctx // an io.Reader has no other way to be interrupted
	r   io.Reader
}

func (c *ctxReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(p)
}

// syncDir makes renames into a directory durable.
func syncDir(root *os.Root, dir string) error {
	d, err := root.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// RemoveUnused removes those of the blobs that no record names.
func (s *Store) RemoveUnused(digests []string) error {
	used, err := s.usedBlobs()
	if err != nil {
		return err
	}
	var errs []error
	for _, digest := range digests {
		path, err := blobPath(digest)
		if err != nil || used[digest] {
			continue
		}
		if err := s.layout.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("remove blob %s: %w", digest, err))
		}
	}
	return errors.Join(errs...)
}

// Put records images under their names and their layers as ready, all or none. Their blobs must be
// stored. An image that loses its only name stays, untagged, as repository@digest: sandboxes may
// run on its layers. Sizes are those of newly extracted layers, by chain id.
func (s *Store) Put(sizes map[string]Tree, records ...*Record) error {
	for _, r := range records {
		for _, b := range r.Blobs() {
			if !s.Has(b) {
				return fmt.Errorf("record image %s: blob %s: %w", r.Name, b.Digest, ErrNotFound)
			}
		}
	}
	if err := s.nameBlobs(); err != nil {
		return fmt.Errorf("record images: %w", err)
	}
	err := s.db.Update(func(tx *bolt.Tx) error {
		for _, r := range records {
			if err := put(tx, r); err != nil {
				return fmt.Errorf("record image %s: %w", r.Name, err)
			}
		}
		for chainID, size := range sizes {
			if err := size.put(tx, chainID); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("record images: %w", err)
	}
	return s.WriteIndex()
}

func put(tx *bolt.Tx, r *Record) error {
	for _, l := range r.Layers {
		if err := tx.Bucket(bucketLayers).Put([]byte(l.ChainID), []byte(layerReady)); err != nil {
			return err
		}
	}
	images := tx.Bucket(bucketImages)
	before, err := recordOf(images, r.ID())
	if err != nil {
		return err
	}
	if before != nil && before.Manifest.Digest != r.Manifest.Digest {
		if err := untag(images, before); err != nil {
			return err
		}
	}
	value, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return images.Put([]byte(r.ID()), value)
}

// Get returns a tenant's image of that name, or [ErrNotFound].
func (s *Store) Get(tenant, name string) (*Record, error) {
	var r *Record
	err := s.db.View(func(tx *bolt.Tx) error {
		value := tx.Bucket(bucketImages).Get([]byte(Key(tenant, name)))
		if value == nil {
			return ErrNotFound
		}
		return json.Unmarshal(value, &r)
	})
	if err != nil {
		return nil, fmt.Errorf("image %s: %w", name, err)
	}
	return r, nil
}

// List returns the images of all tenants, those of one tenant sorted by name.
func (s *Store) List() ([]*Record, error) {
	var records []*Record
	err := s.db.View(func(tx *bolt.Tx) error {
		return tx.Bucket(bucketImages).ForEach(func(name, value []byte) error {
			var r *Record
			if err := json.Unmarshal(value, &r); err != nil {
				return fmt.Errorf("record of %s: %w", name, err)
			}
			records = append(records, r)
			return nil
		})
	})
	if err != nil {
		return nil, fmt.Errorf("list images: %w", err)
	}
	return records, nil
}

// Tree is the size of an extracted layer.
type Tree struct {
	Bytes   int64 // of files
	Entries int64 // 0 if unknown: early versions did not count them
}

// put stores the size as two decimal numbers; early versions wrote only the first one.
func (t Tree) put(tx *bolt.Tx, chainID string) error {
	return tx.Bucket(bucketSizes).Put([]byte(chainID), fmt.Appendf(nil, "%d %d", t.Bytes, t.Entries))
}

func parseTree(value []byte) (t Tree, err error) {
	bytes, entries, counted := strings.Cut(string(value), " ")
	if t.Bytes, err = strconv.ParseInt(bytes, 10, 64); err == nil && counted {
		t.Entries, err = strconv.ParseInt(entries, 10, 64)
	}
	return t, err
}

// BeginLayers records layers as pending before their extraction, so that a crash does not lose
// them. A ready layer stays ready.
func (s *Store) BeginLayers(chainIDs ...string) error {
	var fresh []string
	err := s.db.View(func(tx *bolt.Tx) error {
		for _, id := range chainIDs {
			if tx.Bucket(bucketLayers).Get([]byte(id)) == nil {
				fresh = append(fresh, id)
			}
		}
		return nil
	})
	if err == nil && len(fresh) > 0 { // every update is synced, even an empty one
		err = s.db.Update(func(tx *bolt.Tx) error {
			b := tx.Bucket(bucketLayers)
			for _, id := range fresh {
				if b.Get([]byte(id)) != nil {
					continue // recorded since
				}
				if err := b.Put([]byte(id), []byte(layerPending)); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err != nil {
		return fmt.Errorf("note layers: %w", err)
	}
	return nil
}

// MarkLayer records a layer as extracted and in use although no image has it: the host image's.
func (s *Store) MarkLayer(chainID string, size Tree) error {
	err := s.db.Update(func(tx *bolt.Tx) error {
		if err := size.put(tx, chainID); err != nil {
			return err
		}
		return tx.Bucket(bucketLayers).Put([]byte(chainID), []byte(layerReady))
	})
	if err != nil {
		return fmt.Errorf("note layer %s: %w", chainID, err)
	}
	return nil
}

// ForgetLayers removes the records of pending layers that were removed. Ready layers stay.
func (s *Store) ForgetLayers(chainIDs ...string) error {
	if len(chainIDs) == 0 {
		return nil // every update is synced
	}
	err := s.db.Update(func(tx *bolt.Tx) error {
		b := tx.Bucket(bucketLayers)
		for _, id := range chainIDs {
			if string(b.Get([]byte(id))) != layerPending {
				continue
			}
			if err := errors.Join(b.Delete([]byte(id)), tx.Bucket(bucketSizes).Delete([]byte(id))); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("forget layers: %w", err)
	}
	return nil
}

// PendingLayers returns the chain ids of layers of pulls that have not succeeded (yet), and of
// unfinished removals.
func (s *Store) PendingLayers() ([]string, error) {
	var out []string
	err := s.db.View(func(tx *bolt.Tx) error {
		return tx.Bucket(bucketLayers).ForEach(func(chainID, state []byte) error {
			if string(state) == layerPending {
				out = append(out, string(chainID))
			}
			return nil
		})
	})
	if err != nil {
		return nil, fmt.Errorf("list layers: %w", err)
	}
	return out, nil
}

// The OCI image layout, as far as we write it.
type (
	index struct {
		SchemaVersion int          `json:"schemaVersion"`
		MediaType     string       `json:"mediaType"`
		Manifests     []descriptor `json:"manifests"`
	}
	descriptor struct {
		MediaType   string            `json:"mediaType"`
		Digest      string            `json:"digest"`
		Size        int64             `json:"size"`
		Platform    *platform         `json:"platform,omitempty"`
		Annotations map[string]string `json:"annotations"`
	}
	platform struct {
		OS           string `json:"os"`
		Architecture string `json:"architecture"`
		Variant      string `json:"variant,omitempty"`
	}
)

// WriteIndex repeats the records of the daemon's own tenant in index.json for other tools. It
// writes only changes. Open calls it too, because a crash may separate the database and the index.
func (s *Store) WriteIndex() error {
	// Writers must not overtake each other.
	s.indexing.Lock()
	defer s.indexing.Unlock()
	err := s.db.View(func(tx *bolt.Tx) error {
		ix := index{SchemaVersion: 2, MediaType: "application/vnd.oci.image.index.v1+json", Manifests: []descriptor{}}
		err := tx.Bucket(bucketImages).ForEach(func(_, value []byte) error {
			var r Record
			if err := json.Unmarshal(value, &r); err != nil {
				return err
			}
			if r.Tenant != "" {
				return nil // two tenants may use one name, which other tools would confuse
			}
			d := descriptor{
				MediaType: r.Manifest.MediaType, Digest: r.Manifest.Digest, Size: r.Manifest.Size,
				Annotations: map[string]string{"org.opencontainers.image.ref.name": r.Name},
			}
			if parts := strings.SplitN(r.Platform, "/", 3); len(parts) >= 2 {
				d.Platform = &platform{OS: parts[0], Architecture: parts[1]}
				if len(parts) == 3 {
					d.Platform.Variant = parts[2]
				}
			}
			ix.Manifests = append(ix.Manifests, d)
			return nil
		})
		if err != nil {
			return err
		}
		data, err := json.MarshalIndent(ix, "", "  ")
		if err != nil {
			return err
		}
		return cmp.Or(s.replaceFile("oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)), s.replaceFile("index.json", append(data, '\n')))
	})
	if err != nil {
		return fmt.Errorf("write index of the image store: %w", err)
	}
	return nil
}

// replaceFile replaces a file of the layout atomically: write, sync, rename. It keeps a file that
// has the content already. After a crash the file is old or new; Open writes it again.
func (s *Store) replaceFile(name string, data []byte) (err error) {
	if old, err := s.layout.ReadFile(name); err == nil && bytes.Equal(old, data) {
		return nil
	}
	f, err := s.layout.OpenFile(name+".new", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	return s.layout.Rename(name+".new", name)
}
