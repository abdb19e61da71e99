package client

import (
	"context"
	"net/http"

	"github.com/sandboxd/sandboxd/api"
)

// Health reports whether the daemon answers. It is nil as soon as sandboxes can be created.
func (c *Client) Health(ctx context.Context) error {
	return c.call(ctx, request{method: http.MethodGet, path: []string{"healthz"}}, maxAnswer, nil)
}

// System says what the daemon is and what a sandbox with the defaults would be held by.
func (c *Client) System(ctx context.Context) (*api.SystemInfo, error) {
	out := new(api.SystemInfo)
	return out, c.call(ctx, request{method: http.MethodGet, path: []string{"v1", "system"}}, maxAnswer, out)
}

// Checks returns what the daemon found out about its host.
func (c *Client) Checks(ctx context.Context) ([]api.Check, error) {
	var out api.CheckList
	err := c.call(ctx, request{method: http.MethodGet, path: []string{"v1", "system", "checks"}}, maxAnswer, &out)
	return out.Checks, err
}

// Profiles returns the profiles that a sandbox can ask for, by name and without their filters.
func (c *Client) Profiles(ctx context.Context) ([]api.Profile, error) {
	var out api.ProfileList
	err := c.call(ctx, request{method: http.MethodGet, path: []string{"v1", "profiles"}}, maxAnswer, &out)
	return out.Profiles, err
}

// Profile returns one, with its filter.
func (c *Client) Profile(ctx context.Context, name string) (*api.Profile, error) {
	out := new(api.Profile)
	return out, c.call(ctx, request{method: http.MethodGet, path: []string{"v1", "profiles", name}}, maxAnswer, out)
}

// Shutdown asks the daemon to stop. It returns when the daemon has agreed, which is before it has ended: the socket is
// gone then.
func (c *Client) Shutdown(ctx context.Context, req api.Shutdown) error {
	return c.call(ctx, request{method: http.MethodPost, path: []string{"v1", "system", "shutdown"}, json: req}, maxAnswer, nil)
}
