package client

import (
	"context"
	"io"
	"net/http"

	"github.com/sandboxd/sandboxd/api"
)

// Changes returns what a sandbox has changed in its workspace, as the tar of a layer. The caller
// closes it. Names and contents are the sandbox's choice. Reading fails with io.ErrUnexpectedEOF if
// the daemon could not send all of it.
func (c *Client) Changes(ctx context.Context, id string) (io.ReadCloser, error) {
	return c.download(ctx, request{method: http.MethodGet, path: []string{"v1", "sandboxes", id, "changes"}, accept: api.TypeTar})
}
