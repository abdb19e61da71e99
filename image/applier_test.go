package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/sandboxd/sandboxd/image/layer"
)

// directApplier extracts in this process, which the product never does. It keeps the promises of
// [Applier] otherwise.
type directApplier struct {
	dir string

	mu      sync.Mutex
	applied []string
	removed []string
	made    map[string]layer.Usage
	before  func(layer.ApplyRequest) error // called first, if set
	lie     string                         // given as the diff id, if set
}

func newApplier(t *testing.T) *directApplier {
	t.Helper()
	a := &directApplier{dir: t.TempDir(), made: make(map[string]layer.Usage)}
	t.Cleanup(func() {
		_ = filepath.WalkDir(a.dir, func(path string, d fs.DirEntry, _ error) error {
			if d != nil && d.IsDir() {
				_ = os.Chmod(path, 0o700)
			}
			return nil
		})
	})
	return a
}

func (a *directApplier) path(chainID string) string {
	return filepath.Join(a.dir, strings.TrimPrefix(chainID, "sha256:"))
}

func (a *directApplier) Apply(_ context.Context, req layer.ApplyRequest) (results []layer.Result, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.before != nil {
		if err := a.before(req); err != nil {
			return nil, err
		}
	}
	for _, p := range req.Parents {
		if _, err := os.Lstat(a.path(p)); err != nil {
			return nil, fmt.Errorf("parent: %w", err)
		}
	}
	var made []string
	var below layer.Usage // of the request's own layers
	for _, l := range req.Layers {
		final := a.path(l.ChainID)
		if _, err := os.Lstat(final); err == nil {
			known, ok := a.made[l.ChainID]
			if !ok {
				known = l.Known
			}
			results, below = append(results, layer.Result{Size: known.Bytes, Entries: known.Entries}), below.Add(known)
			continue
		}
		l.Limits.Below = l.Limits.Below.Add(below)
		res, err := a.extract(final, l)
		if err != nil {
			for _, m := range made {
				err = errors.Join(err, os.RemoveAll(a.path(m)))
			}
			return results, err
		}
		results, made, below = append(results, res), append(made, l.ChainID), below.Add(res.Usage())
	}
	for i, l := range req.Layers {
		a.made[l.ChainID] = results[i].Usage()
	}
	a.applied = append(a.applied, made...)
	return results, nil
}

func (a *directApplier) extract(final string, req layer.Request) (res layer.Result, err error) {
	if at, err := req.Blob.Seek(0, io.SeekCurrent); (err != nil || at != 0) && !errors.Is(err, syscall.ESPIPE) {
		return res, fmt.Errorf("the blob is at %d: %w", at, err)
	}
	tmp := final + ".tmp"
	if err := os.Mkdir(tmp, 0o755); err != nil {
		return res, err
	}
	root, err := os.OpenRoot(tmp)
	if err != nil {
		return res, err
	}
	defer func() { err = errors.Join(err, root.Close()) }()
	res, err = layer.Apply(root, req.Blob, layer.Options{MediaType: req.MediaType, DiffID: req.DiffID, Limits: req.Limits, SingleID: os.Geteuid() != 0})
	if err != nil {
		return res, errors.Join(err, os.RemoveAll(tmp))
	}
	if a.lie != "" {
		res.DiffID = a.lie
	}
	return res, os.Rename(tmp, final)
}

func (a *directApplier) RemoveLayer(_ context.Context, chainID string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.removed = append(a.removed, chainID)
	return os.RemoveAll(a.path(chainID))
}

// layers lists the extracted layers.
func (a *directApplier) layers(t *testing.T) []string {
	t.Helper()
	entries, err := os.ReadDir(a.dir)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range entries {
		out = append(out, "sha256:"+e.Name())
	}
	return out
}

// nullApplier believes every layer.
type nullApplier struct{}

func (nullApplier) Apply(_ context.Context, req layer.ApplyRequest) (results []layer.Result, err error) {
	for _, l := range req.Layers {
		results = append(results, layer.Result{DiffID: l.DiffID})
	}
	return results, nil
}

func (nullApplier) RemoveLayer(context.Context, string) error { return nil }
