package client

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"

	"github.com/sandboxd/sandboxd/api"
)

// Images returns the stored images.
func (c *Client) Images(ctx context.Context) ([]api.Image, error) {
	var out api.ImageList
	err := c.call(ctx, request{method: http.MethodGet, path: []string{"v1", "images"}}, maxAnswer, &out)
	return out.Images, err
}

// Pull fetches an image and calls progress, which may be nil, for every event. If ctx ends, the
// pull is stopped; the daemon keeps complete layers.
func (c *Client) Pull(ctx context.Context, req api.PullImage, progress func(api.PullEvent)) (*api.Image, error) {
	return c.pullEvents(ctx, "pull", request{json: req}, progress)
}

// Push sends a stored image to the registry in its name; progress is as for [Client.Pull].
func (c *Client) Push(ctx context.Context, req api.PushImage, progress func(api.PullEvent)) (*api.Image, error) {
	return c.pullEvents(ctx, "push", request{json: req}, progress)
}

// CheckRegistry asks a registry whether it takes credentials.
func (c *Client) CheckRegistry(ctx context.Context, req api.CheckRegistry) (*api.RegistryChecked, error) {
	return fetch[api.RegistryChecked](ctx, c, request{method: http.MethodPost, path: []string{"v1", "registries", "check"}, json: req})
}

// pullEvents reads events up to the final one, and returns its image.
func (c *Client) pullEvents(ctx context.Context, verb string, r request, progress func(api.PullEvent)) (*api.Image, error) {
	last, err := c.events(ctx, verb, r, progress)
	if err != nil {
		return nil, err
	}
	return last.Image, nil
}

// events reads events up to the final one, which has an image or several.
func (c *Client) events(ctx context.Context, verb string, r request, progress func(api.PullEvent)) (last api.PullEvent, err error) {
	r.method, r.path = http.MethodPost, []string{"v1", "images", verb}
	err = c.lines(ctx, r, func(line []byte) error {
		var e api.PullEvent
		if err := json.Unmarshal(line, &e); err != nil {
			return fmt.Errorf("decode a %s event: %w", verb, err)
		}
		if progress != nil {
			progress(e)
		}
		if e.Error != nil {
			return e.Error
		}
		if e.Image != nil || e.Images != nil {
			last = e
			return errEnd
		}
		return nil
	})
	if err == nil && last.Image == nil && last.Images == nil {
		err = fmt.Errorf("the daemon ended the %s without a result", verb)
	}
	return last, err
}

// Image returns all details of a stored image.
func (c *Client) Image(ctx context.Context, reference string) (*api.ImageDetail, error) {
	q := url.Values{"reference": {reference}}
	return fetch[api.ImageDetail](ctx, c, request{method: http.MethodGet, path: []string{"v1", "images", "inspect"}, query: q})
}

// RemoveImage removes a reference, and the image with its last reference. Without force it refuses
// an image that a sandbox uses ([api.CodeConflict]). With force such an image only loses the
// reference; prune removes it once the sandbox is deleted.
func (c *Client) RemoveImage(ctx context.Context, reference string, force bool) (*api.ImagesRemoved, error) {
	q := url.Values{"reference": {reference}}
	if force {
		q.Set("force", "true")
	}
	return fetch[api.ImagesRemoved](ctx, c, request{method: http.MethodDelete, path: []string{"v1", "images"}, query: q})
}

// PruneImages removes images that no sandbox uses.
func (c *Client) PruneImages(ctx context.Context, req api.PruneImages) (*api.ImagesRemoved, error) {
	return fetch[api.ImagesRemoved](ctx, c, request{method: http.MethodPost, path: []string{"v1", "images", "prune"}, json: req})
}

// TagImage adds a reference to a stored image.
func (c *Client) TagImage(ctx context.Context, source, target string) (*api.Image, error) {
	req := api.TagImage{Source: source, Target: target}
	return fetch[api.Image](ctx, c, request{method: http.MethodPost, path: []string{"v1", "images", "tag"}, json: req})
}

// VerifyImages reads all stored data, which takes long, and returns the damage found.
func (c *Client) VerifyImages(ctx context.Context) (*api.ImagesVerified, error) {
	return fetch[api.ImagesVerified](ctx, c, request{method: http.MethodGet, path: []string{"v1", "images", "verify"}})
}

// ImportOptions describes the image that an archive becomes. Reference is required if the archive
// names none; Config is for root file systems only.
type ImportOptions struct {
	Reference string
	Platform  string
	Rootfs    bool
	Config    api.ImageConfig
	Progress  func(api.PullEvent) // called for every event once the archive has been read; may be nil
}

// ImportImages sends an archive: an OCI layout, the output of docker save, or a root file system,
// plain or compressed with gzip or zstd. The daemon stores the content, not the archive.
func (c *Client) ImportImages(ctx context.Context, r io.Reader, opts ImportOptions) ([]api.Image, error) {
	q := url.Values{}
	for name, value := range map[string]string{"reference": opts.Reference, "platform": opts.Platform} {
		if value != "" {
			q.Set(name, value)
		}
	}
	if opts.Rootfs {
		config, err := json.Marshal(opts.Config)
		if err != nil {
			return nil, fmt.Errorf("encode the configuration: %w", err)
		}
		q.Set("rootfs", "true")
		q.Set("config", string(config))
	}
	q.Set("progress", "true")
	last, err := c.events(ctx, "import", request{query: q, body: readOnly(r), typ: api.TypeTar}, opts.Progress)
	return last.Images, err
}

// ExportImage returns a stored image as an archive. Format "oci" is a tar of an OCI layout,
// "docker" the input of docker load. The caller closes it. Reading fails with io.ErrUnexpectedEOF
// if the daemon could not send all of it.
func (c *Client) ExportImage(ctx context.Context, reference, format string) (io.ReadCloser, error) {
	q := url.Values{"reference": {reference}}
	if format != "" {
		q.Set("format", format)
	}
	return c.download(ctx, request{method: http.MethodGet, path: []string{"v1", "images", "export"}, query: q, accept: api.TypeTar})
}
