package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/image/store"
	"github.com/sandboxd/sandboxd/internal/rootfs"
)

// Verify checks everything that is stored for any tenant. Every blob must have its digest and size.
// Every layer's blob must unpack to the diff id in the image's configuration. Every tree must pass
// [layer.Compare]. The layers of cached build steps are checked too. Trees of images that are being
// removed or replaced may be reported as damaged.
func (s *Service) Verify(ctx context.Context) (api.ImagesVerified, error) {
	out := api.ImagesVerified{Problems: []api.ImageProblem{}}
	records, err := s.store.List()
	if err != nil {
		return out, err
	}
	users := make(map[string][]string)
	for _, r := range records {
		for _, b := range r.Blobs() {
			users[b.Digest] = append(users[b.Digest], s.shownName(r))
		}
		for _, l := range r.Layers {
			users["tree "+l.ChainID] = append(users["tree "+l.ChainID], s.shownName(r))
		}
	}
	// Parts that only cached build steps have are checked as well: their problems name no image.
	type part struct {
		blobs  []store.Blob
		layers []store.Layer
	}
	var parts []part
	for _, r := range records {
		parts = append(parts, part{r.Blobs(), r.Layers})
	}
	steps, err := s.store.Steps()
	if err != nil {
		return out, err
	}
	for _, step := range steps {
		if l := step.Layer; l != nil {
			parts = append(parts, part{[]store.Blob{l.Blob}, []store.Layer{*l}})
		}
	}
	problem := func(key, id string, err error) {
		out.Problems = append(out.Problems, api.ImageProblem{Images: append([]string{}, users[key]...), Digest: id, Detail: err.Error()})
	}
	checked := make(map[string]bool)
	for _, r := range parts {
		for _, b := range r.blobs {
			if checked[b.Digest] {
				continue
			}
			checked[b.Digest] = true
			out.Blobs++
			out.Bytes += b.Size
			if err := s.store.Verify(ctx, b); err != nil {
				if ctx.Err() != nil {
					return out, ctx.Err()
				}
				problem(b.Digest, b.Digest, err)
			}
		}
		if s.opts.LayersDir == "" {
			continue
		}
		for _, l := range r.layers {
			key := "tree " + l.ChainID
			if checked[key] {
				continue
			}
			checked[key] = true
			c, err := s.compare(ctx, l)
			if ctx.Err() != nil {
				return out, ctx.Err()
			}
			out.Layers++
			out.Entries += c.Entries
			out.Unseen += c.Unseen
			switch {
			case err != nil:
				problem(key, l.ChainID, err)
			case c.DiffID != l.DiffID:
				problem(key, l.ChainID, fmt.Errorf("blob %s unpacks to %s, the image's configuration promises %s", l.Blob.Digest, c.DiffID, l.DiffID))
			case len(c.Differences) > 0:
				problem(key, l.ChainID, fmt.Errorf("the unpacked tree differs from layer %s: %s", l.Blob.Digest, strings.Join(c.Differences, "; ")))
			}
		}
	}
	return out, nil
}

// shownName returns the name of an image, with its tenant if that is another one.
func (s *Service) shownName(r *store.Record) string {
	if r.Tenant == s.tenant {
		return r.Name
	}
	return fmt.Sprintf("%s of tenant %q", r.Name, r.Tenant)
}

func (s *Service) compare(ctx context.Context, l store.Layer) (c layer.Comparison, err error) {
	name, err := rootfs.LayerName(l.ChainID)
	if err != nil {
		return c, err
	}
	f, err := s.store.OpenBlob(l.Blob.Digest)
	if err != nil {
		return c, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	root, err := os.OpenRoot(filepath.Join(s.opts.LayersDir, name))
	if err != nil {
		return c, fmt.Errorf("open unpacked tree: %w", err)
	}
	defer func() { err = errors.Join(err, root.Close()) }()
	return layer.Compare(root, store.WithContext(ctx, f), layer.Options{MediaType: l.Blob.MediaType, Limits: layer.NoLimits()})
}
