package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

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
	var image *api.Image
	err := c.lines(ctx, request{method: http.MethodPost, path: []string{"v1", "images", "pull"}, json: req}, func(line []byte) error {
		var e api.PullEvent
		if err := json.Unmarshal(line, &e); err != nil {
			return fmt.Errorf("decode a pull event: %w", err)
		}
		if progress != nil {
			progress(e)
		}
		if e.Error != nil {
			return e.Error
		}
		if e.Image != nil {
			image = e.Image
			return errEnd
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if image == nil {
		return nil, errors.New("the daemon ended the pull without saying how")
	}
	return image, nil
}
