package client

import (
	"context"
	"io"
	"net/http"
	"net/url"
	"strconv"

	"github.com/sandboxd/sandboxd/api"
)

// CreateVolume makes a volume. If there is one of the name, it is returned, unless req asks for
// other values than it has: then the error is [api.CodeExists].
func (c *Client) CreateVolume(ctx context.Context, req api.CreateVolume) (*api.Volume, error) {
	return fetch[api.Volume](ctx, c, request{method: http.MethodPost, path: []string{"v1", "volumes"}, json: req})
}

// Volumes returns the volumes that have all labels, by name.
func (c *Client) Volumes(ctx context.Context, labels map[string]string) ([]api.Volume, error) {
	var out api.VolumeList
	err := c.call(ctx, request{method: http.MethodGet, path: []string{"v1", "volumes"}, query: labelQuery(labels)}, maxAnswer, &out)
	return out.Volumes, err
}

func labelQuery(labels map[string]string) url.Values {
	q := url.Values{}
	for k, v := range labels {
		q.Add("label", k+"="+v)
	}
	return q
}

// Volume returns one volume. Its files are counted for the answer.
func (c *Client) Volume(ctx context.Context, name string) (*api.Volume, error) {
	return fetch[api.Volume](ctx, c, request{method: http.MethodGet, path: []string{"v1", "volumes", name}})
}

// RemoveVolume removes a volume with its files. One that a sandbox has, running or not, is
// [api.CodeConflict].
func (c *Client) RemoveVolume(ctx context.Context, name string) error {
	return c.call(ctx, request{method: http.MethodDelete, path: []string{"v1", "volumes", name}}, maxAnswer, nil)
}

// PruneVolumes removes volumes that no sandbox has.
func (c *Client) PruneVolumes(ctx context.Context, req api.PruneVolumes) (*api.VolumesRemoved, error) {
	return fetch[api.VolumesRemoved](ctx, c, request{method: http.MethodPost, path: []string{"v1", "volumes", "prune"}, json: req})
}

// ExportVolume returns the files of a volume as a tar. The caller closes it. Reading fails with
// io.ErrUnexpectedEOF if the daemon could not send all of it.
func (c *Client) ExportVolume(ctx context.Context, name string) (io.ReadCloser, error) {
	return c.download(ctx, request{method: http.MethodGet, path: []string{"v1", "volumes", name, "export"}, accept: api.TypeTar})
}

// ImportVolume fills a volume, which has no files or is made for it, with those of a tar, plain or
// compressed: with all of them, or none.
func (c *Client) ImportVolume(ctx context.Context, r io.Reader, req api.CreateVolume) (*api.VolumeImported, error) {
	q := labelQuery(req.Labels)
	if req.Name != "" {
		q.Set("name", req.Name)
	}
	if req.Size != 0 {
		q.Set("size", strconv.FormatInt(req.Size, 10))
	}
	if req.Inodes != 0 {
		q.Set("inodes", strconv.FormatInt(req.Inodes, 10))
	}
	return fetch[api.VolumeImported](ctx, c, request{
		method: http.MethodPost, path: []string{"v1", "volumes", "import"}, query: q, body: readOnly(r), typ: api.TypeTar,
	})
}
