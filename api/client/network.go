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

// NamedNetwork returns one named network.
func (c *Client) NamedNetwork(ctx context.Context, name string) (*api.NamedNetwork, error) {
	return fetch[api.NamedNetwork](ctx, c, request{method: http.MethodGet, path: []string{"v1", "networks", name}})
}

// CreateNetwork makes a named network. If one of the name was made before, the error is
// [api.CodeExists].
func (c *Client) CreateNetwork(ctx context.Context, req api.CreateNetwork) (*api.NamedNetwork, error) {
	return fetch[api.NamedNetwork](ctx, c, request{method: http.MethodPost, path: []string{"v1", "networks"}, json: req})
}

// RemoveNetwork removes a named network. One that a sandbox is in, running or not, is
// [api.CodeConflict].
func (c *Client) RemoveNetwork(ctx context.Context, name string) error {
	return c.call(ctx, request{method: http.MethodDelete, path: []string{"v1", "networks", name}}, maxAnswer, nil)
}

// PruneNetworks removes named networks that no sandbox is in.
func (c *Client) PruneNetworks(ctx context.Context, req api.PruneNetworks) (*api.NetworksRemoved, error) {
	return fetch[api.NetworksRemoved](ctx, c, request{method: http.MethodPost, path: []string{"v1", "networks", "prune"}, json: req})
}

// ConnectNetwork puts a sandbox into a named network, or changes its aliases there.
func (c *Client) ConnectNetwork(ctx context.Context, name string, req api.ConnectNetwork) error {
	return c.call(ctx, request{method: http.MethodPost, path: []string{"v1", "networks", name, "connect"}, json: req}, maxAnswer, nil)
}

// DisconnectNetwork takes a sandbox that does not run out of a named network.
func (c *Client) DisconnectNetwork(ctx context.Context, name string, req api.DisconnectNetwork) error {
	return c.call(ctx, request{method: http.MethodPost, path: []string{"v1", "networks", name, "disconnect"}, json: req}, maxAnswer, nil)
}
