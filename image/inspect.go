package image

import (
	"bytes"
	"context"
	"maps"
	"slices"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/errdefs"
	"github.com/sandboxd/sandboxd/image/store"
)

// readConfig reads an image's stored configuration.
func (s *Service) readConfig(r *store.Record) ([]byte, *v1.ConfigFile, error) {
	data, err := s.store.ReadBlob(r.Config.Digest, store.MaxDocument)
	if err != nil {
		return nil, nil, errdefs.Classf(ErrInvalid, "image %s: its stored configuration cannot be read: %w; pull it anew", r.Name, err)
	}
	c, err := v1.ParseConfigFile(bytes.NewReader(data))
	if err != nil {
		return nil, nil, errdefs.Classf(ErrInvalid, "image %s: its stored configuration cannot be read: %w; pull it anew", r.Name, err)
	}
	return data, c, nil
}

// Inspect returns all details of a stored image.
func (s *Service) Inspect(ctx context.Context, ref string) (api.ImageDetail, error) {
	if ref == api.HostImage {
		return s.inspectHost(ctx)
	}
	r, err := s.lookup(ref)
	if err != nil {
		return api.ImageDetail{}, err
	}
	data, c, err := s.readConfig(r)
	if err != nil {
		return api.ImageDetail{}, err
	}
	health, err := healthOf(data)
	if err != nil {
		return api.ImageDetail{}, errdefs.Classf(ErrInvalid, "image %s: its HEALTHCHECK cannot be read: %w", r.Name, err)
	}
	records, err := s.records()
	if err != nil {
		return api.ImageDetail{}, err
	}
	trees, err := s.store.LayerSizes()
	if err != nil {
		return api.ImageDetail{}, err
	}
	d := api.ImageDetail{
		Image: summary(r), UsedBy: s.usedBy(r.Manifest.Digest), Author: c.Author, Created: moment(c.Created.Time),
		Config: api.ImageConfig{
			Entrypoint: c.Config.Entrypoint, Cmd: c.Config.Cmd, Env: c.Config.Env, WorkingDir: c.Config.WorkingDir, User: c.Config.User,
			Labels: c.Config.Labels, Volumes: slices.Sorted(maps.Keys(c.Config.Volumes)), Ports: slices.Sorted(maps.Keys(c.Config.ExposedPorts)),
			StopSignal: c.Config.StopSignal, HealthCheck: health.check(),
		},
		History: []api.ImageHistory{},
	}
	d.SharedSize, d.UniqueSize = shareOf(records, trees).of(r)
	s.mu.Lock()
	d.UsedAt = r.UsedAt
	if at := s.used[r.ID()]; at.After(d.UsedAt) {
		d.UsedAt = at
	}
	s.mu.Unlock()
	shared := make(map[string][]string)
	for _, o := range records {
		if o.Manifest.Digest == r.Manifest.Digest {
			d.Names = append(d.Names, o.Name)
			continue
		}
		for _, l := range o.Layers {
			if users := shared[l.ChainID]; !slices.Contains(users, o.Name) {
				shared[l.ChainID] = append(users, o.Name)
			}
		}
	}
	for _, l := range r.Layers {
		d.Parts = append(d.Parts, api.ImageLayer{
			Digest: l.Blob.Digest, DiffID: l.DiffID, ChainID: l.ChainID, MediaType: l.Blob.MediaType, Size: l.Blob.Size,
			TreeSize: trees[l.ChainID], SharedBy: shared[l.ChainID],
		})
	}
	next := 0
	for _, h := range c.History {
		step := api.ImageHistory{Created: moment(h.Created.Time), CreatedBy: h.CreatedBy, Comment: h.Comment, EmptyLayer: h.EmptyLayer}
		// The history is untrusted; if it has more steps with a layer than there are layers, it is shown
		// anyway.
		if !h.EmptyLayer && next < len(r.Layers) {
			step.Size = r.Layers[next].Blob.Size
			next++
		}
		d.History = append(d.History, step)
	}
	return d, nil
}

// moment returns an image's time in UTC, or zero if its year is not within 0 to 9999, as its zone
// can cause: JSON could not express it.
func moment(t time.Time) time.Time {
	t = t.UTC()
	if y := t.Year(); y < 0 || y > 9999 {
		return time.Time{}
	}
	return t
}

func (s *Service) inspectHost(ctx context.Context) (api.ImageDetail, error) {
	img, err := s.getHost(ctx)
	if err != nil {
		return api.ImageDetail{}, err
	}
	return api.ImageDetail{
		Image: img.Image, Names: []string{api.HostImage}, UsedBy: s.usedBy(img.Digest), History: []api.ImageHistory{},
		Config: api.ImageConfig{Env: img.Config.Env, Cmd: img.Config.Cmd, WorkingDir: img.Config.WorkingDir},
		Parts: []api.ImageLayer{{
			Digest: img.Digest, DiffID: img.Digest, ChainID: img.Digest, MediaType: "application/vnd.oci.image.layer.v1.tar", Size: img.Size,
		}},
	}, nil
}

// usedBy returns the tenant's sandboxes that hold an image.
func (s *Service) usedBy(digest string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.holders == nil {
		return nil
	}
	held, err := s.heldLocked()
	if err != nil {
		s.opts.Log.Warn("the holders of an image are unknown", "error", err)
	}
	holders := slices.DeleteFunc(s.ownHolders(held[digest]), func(h string) bool { return h == busy })
	slices.Sort(holders)
	return holders
}
