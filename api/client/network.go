package client

import (
	"context"
	"net/http"

	"github.com/sandboxd/sandboxd/api"
)

// NamedNetworks lists the caller's named networks, with the sandboxes in them.
func (c *Client) NamedNetworks(ctx context.Context) ([]api.NamedNetwork, error) {
	var out api.NetworkList
	err := c.call(ctx, request{method: http.MethodGet, path: []string{"v1", "networks"}}, maxAnswer, &out)
	return out.Networks, err
}
