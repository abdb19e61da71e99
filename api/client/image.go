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

// Images lists the images that the daemon has.
func (c *Client) Images(ctx context.Context) ([]api.Image, error) {
	var out api.ImageList
	err := c.call(ctx, request{method: http.MethodGet, path: []string{"v1", "images"}}, maxAnswer, &out)
	return out.Images, err
}

// Pull fetches an image and calls progress, which may be nil, for every event on the way. A pull whose context ends is
// stopped; the layers that were complete by then are kept.
func (c *Client) Pull(ctx context.Context, req api.PullImage, progress func(api.PullEvent)) (*api.Image, error) {
	return c.watch(ctx, "pull", request{json: req}, progress)
}

// Push sends a stored image to the registry of its name; progress is as for [Client.Pull].
func (c *Client) Push(ctx context.Context, req api.PushImage, progress func(api.PullEvent)) (*api.Image, error) {
	return c.watch(ctx, "push", request{json: req}, progress)
}

// watch reads events until the one with the image.
func (c *Client) watch(ctx context.Context, verb string, r request, progress func(api.PullEvent)) (*api.Image, error) {
	last, err := c.events(ctx, verb, r, progress)
	if err != nil {
		return nil, err
	}
	return last.Image, nil
}

// events reads them until the last one, which has an image or several.
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
		err = fmt.Errorf("the daemon ended the %s without saying how", verb)
	}
	return last, err
}

// Image returns everything that is known of a stored image.
func (c *Client) Image(ctx context.Context, reference string) (*api.ImageDetail, error) {
	out := new(api.ImageDetail)
	err := c.call(ctx, request{
		method: http.MethodGet, path: []string{"v1", "images", "inspect"}, query: url.Values{"reference": {reference}},
	}, maxAnswer, out)
	if err != nil {
		return nil, err
	}
	return out, nil
}

// RemoveImage takes away a name of an image, and the image where that was the last one. An image that a sandbox has is
// refused ([api.CodeConflict]); with force it loses the name and stays until the sandbox has gone and it is pruned.
func (c *Client) RemoveImage(ctx context.Context, reference string, force bool) (*api.ImagesRemoved, error) {
	q := url.Values{"reference": {reference}}
	if force {
		q.Set("force", "true")
	}
	out := new(api.ImagesRemoved)
	if err := c.call(ctx, request{method: http.MethodDelete, path: []string{"v1", "images"}, query: q}, maxAnswer, out); err != nil {
		return nil, err
	}
	return out, nil
}

// PruneImages removes images that no sandbox has.
func (c *Client) PruneImages(ctx context.Context, req api.PruneImages) (*api.ImagesRemoved, error) {
	out := new(api.ImagesRemoved)
	if err := c.call(ctx, request{method: http.MethodPost, path: []string{"v1", "images", "prune"}, json: req}, maxAnswer, out); err != nil {
		return nil, err
	}
	return out, nil
}

// TagImage gives a stored image one more name.
func (c *Client) TagImage(ctx context.Context, source, target string) (*api.Image, error) {
	out := new(api.Image)
	req := api.TagImage{Source: source, Target: target}
	if err := c.call(ctx, request{method: http.MethodPost, path: []string{"v1", "images", "tag"}, json: req}, maxAnswer, out); err != nil {
		return nil, err
	}
	return out, nil
}

// VerifyImages has everything read that is stored, which takes its time, and returns what is damaged.
func (c *Client) VerifyImages(ctx context.Context) (*api.ImagesVerified, error) {
	out := new(api.ImagesVerified)
	if err := c.call(ctx, request{method: http.MethodGet, path: []string{"v1", "images", "verify"}}, maxAnswer, out); err != nil {
		return nil, err
	}
	return out, nil
}

// ImportOptions say what an archive becomes. Reference is needed where the archive has no name of its own; Config is
// for root file systems.
type ImportOptions struct {
	Reference string
	Platform  string
	Rootfs    bool
	Config    api.ImageConfig
	Progress  func(api.PullEvent) // called for every event, from the time when the archive has been read; may be nil
}

// ImportImages sends an archive, be it compressed with gzip, with zstd or not at all: an OCI layout, what docker save
// writes, or a root file system. The daemon does not keep it, but what it has.
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
	// Only Read is passed on: http.NewRequest would look into the reader for a length, and close it.
	body := struct{ io.Reader }{r}
	last, err := c.events(ctx, "import", request{query: q, body: body, typ: api.TypeTar}, opts.Progress)
	return last.Images, err
}

// ExportImage returns a stored image as an archive: "oci" is a tar of an OCI layout, "docker" what docker load reads.
// The caller closes it; reading fails with io.ErrUnexpectedEOF where the daemon could not send all of it.
func (c *Client) ExportImage(ctx context.Context, reference, format string) (io.ReadCloser, error) {
	q := url.Values{"reference": {reference}}
	if format != "" {
		q.Set("format", format)
	}
	resp, err := c.do(ctx, request{method: http.MethodGet, path: []string{"v1", "images", "export"}, query: q, accept: api.TypeTar})
	if err != nil {
		return nil, err
	}
	if t := mediaType(resp); t != api.TypeTar {
		defer resp.Body.Close()
		return nil, notOurs(resp, read(resp.Body, 200))
	}
	return resp.Body, nil
}
