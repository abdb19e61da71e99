package service

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/build"
)

// The caches that RUN --mount=type=cache names are archives, one for each tenant and id: a step
// extracts its archive in its own sandbox, and leaves a new one. So no two sandboxes share a
// directory, and the daemon reads none of the files.

// Bounds of caches. The least recently used ones of the largest tenant make room.
const (
	maxCache  = 4 << 30  // bytes of one; larger ones are not kept
	maxCaches = 16 << 30 // bytes of all
)

// buildCaches are the caches of builds, below one directory. Their last use is the file's time.
type buildCaches struct {
	dir string

	mu    sync.Mutex
	inUse map[string]*cacheUse // by path
}

// cacheUse serializes the steps that lock a cache.
type cacheUse struct {
	slot chan struct{} // semaphore of one
	refs int
}

// path returns the archive of a tenant's cache. An id is any text.
func (c *buildCaches) path(tenant, id string) string {
	sum := sha256.Sum256([]byte(id))
	return filepath.Join(c.tenantDir(tenant), hex.EncodeToString(sum[:16])+".tar")
}

func (c *buildCaches) tenantDir(tenant string) string {
	sum := sha256.Sum256([]byte(tenant))
	return filepath.Join(c.dir, hex.EncodeToString(sum[:16]))
}

// cacheLease is the use of a cache by one step.
type cacheLease struct {
	caches  *buildCaches
	path    string
	mine    bool // the content after the step is kept
	empty   bool // it begins with nothing
	release func()
}

// lease waits for a locked cache. A private one that is in use gives an empty cache, which is not
// kept.
func (c *buildCaches) lease(ctx context.Context, tenant, id, sharing string) (*cacheLease, error) {
	l := &cacheLease{caches: c, path: c.path(tenant, id), mine: true, release: func() {}}
	if sharing == build.ShareShared {
		return l, nil
	}
	c.mu.Lock()
	if c.inUse == nil {
		c.inUse = make(map[string]*cacheUse)
	}
	use := c.inUse[l.path]
	if use == nil {
		use = &cacheUse{slot: make(chan struct{}, 1)}
		c.inUse[l.path] = use
	}
	use.refs++
	c.mu.Unlock()
	forget := func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if use.refs--; use.refs == 0 {
			delete(c.inUse, l.path)
		}
	}
	l.release = sync.OnceFunc(func() { <-use.slot; forget() })
	if sharing == build.SharePrivate {
		select {
		case use.slot <- struct{}{}:
		default:
			forget()
			l.mine, l.empty, l.release = false, true, func() {}
		}
		return l, nil
	}
	select {
	case use.slot <- struct{}{}:
		return l, nil
	case <-ctx.Done():
		forget()
		return nil, fmt.Errorf("wait for the cache %q: %w", id, context.Cause(ctx))
	}
}

// open opens the archive; nil if there is none.
func (l *cacheLease) open() (*os.File, error) {
	if l.empty {
		return nil, nil //nolint:nilnil // nothing to begin with
	}
	f, err := os.Open(l.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil //nolint:nilnil // likewise
	}
	return f, err
}

// errCacheSize ends the writing of a cache that is too large.
var errCacheSize = fmt.Errorf("it has more than %d bytes", int64(maxCache))

// save replaces the archive by the one that write writes.
func (l *cacheLease) save(write func(w io.Writer) error) (err error) {
	if !l.mine {
		return nil
	}
	dir := filepath.Dir(l.path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	f, err := os.CreateTemp(dir, "new-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	err = write(&cacheWriter{w: f, left: maxCache})
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	// Not synced: after a crash of the host an archive that breaks off is no archive, and the cache is
	// empty.
	return os.Rename(f.Name(), l.path)
}

type cacheWriter struct {
	w    io.Writer
	left int64
}

func (c *cacheWriter) Write(p []byte) (int, error) {
	if c.left -= int64(len(p)); c.left < 0 {
		return 0, errCacheSize
	}
	return c.w.Write(p)
}

// drop removes an archive that cannot be extracted.
func (l *cacheLease) drop() error {
	if err := os.Remove(l.path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

type cacheFile struct {
	path string
	size int64
	used time.Time
}

// files returns the archives below a directory, and incomplete ones of interrupted steps.
func (c *buildCaches) files(dir string) ([]cacheFile, error) {
	var all []cacheFile
	err := filepath.WalkDir(dir, func(p string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		fi, err := e.Info()
		if err == nil {
			all = append(all, cacheFile{p, fi.Size(), fi.ModTime()})
		}
		return err
	})
	if errors.Is(err, fs.ErrNotExist) {
		err = nil // none yet, or one was removed meanwhile
	}
	return all, err
}

// usage returns the disk space of a tenant's caches.
func (c *buildCaches) usage(tenant string) (u api.DiskShare, err error) {
	all, err := c.files(c.tenantDir(tenant))
	for _, f := range all {
		u.Count++
		u.Bytes += f.size
		u.Reclaimable += f.size
	}
	return u, err
}

// prune removes the caches of a tenant. A step that uses one goes on, and leaves it anew.
func (c *buildCaches) prune(tenant string) (n int, bytes int64, err error) {
	all, err := c.files(c.tenantDir(tenant))
	for _, f := range all {
		if rerr := os.Remove(f.path); rerr != nil && !errors.Is(rerr, fs.ErrNotExist) {
			err = errors.Join(err, rerr)
			continue
		}
		n++
		bytes += f.size
	}
	return n, bytes, err
}

// limit removes caches beyond most bytes: the least recently used one of the tenant with the most,
// again and again.
func (c *buildCaches) limit(most int64) error {
	all, err := c.files(c.dir)
	if err != nil {
		return err
	}
	slices.SortFunc(all, func(a, b cacheFile) int { return a.used.Compare(b.used) })
	var total int64
	sums, of := make(map[string]int64), make(map[string][]cacheFile)
	for _, f := range all {
		tenant := filepath.Dir(f.path)
		total += f.size
		sums[tenant] += f.size
		of[tenant] = append(of[tenant], f)
	}
	for total > most {
		largest := slices.MaxFunc(slices.Sorted(maps.Keys(sums)), func(a, b string) int { return cmp.Compare(sums[a], sums[b]) })
		f := of[largest][0]
		of[largest] = of[largest][1:]
		sums[largest] -= f.size
		total -= f.size
		if err := os.Remove(f.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}
