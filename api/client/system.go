package client

import (
	"context"
	"net/http"

	"github.com/sandboxd/sandboxd/api"
)

// Health returns nil if the daemon answers and sandboxes can be created.
func (c *Client) Health(ctx context.Context) error {
	return c.call(ctx, request{method: http.MethodGet, path: []string{"healthz"}}, maxAnswer, nil)
}

// System describes the daemon, and the restrictions of a sandbox with the defaults.
func (c *Client) System(ctx context.Context) (*api.SystemInfo, error) {
	return fetch[api.SystemInfo](ctx, c, request{method: http.MethodGet, path: []string{"v1", "system"}})
}

// Checks returns the results of the daemon's checks of its host.
func (c *Client) Checks(ctx context.Context) ([]api.Check, error) {
	var out api.CheckList
	err := c.call(ctx, request{method: http.MethodGet, path: []string{"v1", "system", "checks"}}, maxAnswer, &out)
	return out.Checks, err
}

// DiskUsage returns the bytes on disk of the caller's objects. The daemon reads the files of its
// sandboxes for it, which takes a while if there are many.
func (c *Client) DiskUsage(ctx context.Context) (*api.DiskUsage, error) {
	return fetch[api.DiskUsage](ctx, c, request{method: http.MethodGet, path: []string{"v1", "system", "df"}})
}

// Profiles returns the available profiles, sorted by name and without their filters.
func (c *Client) Profiles(ctx context.Context) ([]api.Profile, error) {
	var out api.ProfileList
	err := c.call(ctx, request{method: http.MethodGet, path: []string{"v1", "profiles"}}, maxAnswer, &out)
	return out.Profiles, err
}

// Profile returns one profile with its filter.
func (c *Client) Profile(ctx context.Context, name string) (*api.Profile, error) {
	return fetch[api.Profile](ctx, c, request{method: http.MethodGet, path: []string{"v1", "profiles", name}})
}

// Shutdown asks the daemon to stop. It returns when the daemon has agreed, before that has ended.
// The socket is removed at the end.
func (c *Client) Shutdown(ctx context.Context, req api.Shutdown) error {
	return c.call(ctx, request{method: http.MethodPost, path: []string{"v1", "system", "shutdown"}, json: req}, maxAnswer, nil)
}
