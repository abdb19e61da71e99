package client

import (
	"context"
	"net/http"
	"net/url"

	"github.com/sandboxd/sandboxd/api"
)

// CreateSandbox starts a sandbox. When it returns, execs are accepted.
func (c *Client) CreateSandbox(ctx context.Context, req api.CreateSandbox) (*api.Sandbox, error) {
	out := new(api.Sandbox)
	if err := c.call(ctx, request{method: http.MethodPost, path: []string{"v1", "sandboxes"}, json: req}, maxAnswer, out); err != nil {
		return nil, err
	}
	return out, nil
}

// GetSandbox returns one sandbox.
func (c *Client) GetSandbox(ctx context.Context, id string) (*api.Sandbox, error) {
	out := new(api.Sandbox)
	if err := c.call(ctx, request{method: http.MethodGet, path: []string{"v1", "sandboxes", id}}, maxAnswer, out); err != nil {
		return nil, err
	}
	return out, nil
}

// ListOptions narrows a list of sandboxes down.
type ListOptions struct {
	Labels []string // "key=value", all of which a sandbox must have
}

// ListSandboxes returns the caller's sandboxes, oldest first.
func (c *Client) ListSandboxes(ctx context.Context, opts ListOptions) ([]api.Sandbox, error) {
	q := url.Values{}
	for _, l := range opts.Labels {
		q.Add("label", l)
	}
	var out api.SandboxList
	err := c.call(ctx, request{method: http.MethodGet, path: []string{"v1", "sandboxes"}, query: q}, maxAnswer, &out)
	return out.Sandboxes, err
}

// UpdateSandbox changes a running sandbox: all that is asked for, or with an error nothing.
func (c *Client) UpdateSandbox(ctx context.Context, id string, req api.UpdateSandbox) (*api.Sandbox, error) {
	out := new(api.Sandbox)
	if err := c.call(ctx, request{method: http.MethodPatch, path: []string{"v1", "sandboxes", id}, json: req}, maxAnswer, out); err != nil {
		return nil, err
	}
	return out, nil
}

// Stats returns what the kernel counts of a running sandbox.
func (c *Client) Stats(ctx context.Context, id string) (*api.Stats, error) {
	out := new(api.Stats)
	if err := c.call(ctx, request{method: http.MethodGet, path: []string{"v1", "sandboxes", id, "stats"}}, maxAnswer, out); err != nil {
		return nil, err
	}
	return out, nil
}

// Diff returns what a sandbox has changed of its image.
func (c *Client) Diff(ctx context.Context, id string) (*api.SandboxDiff, error) {
	out := new(api.SandboxDiff)
	if err := c.call(ctx, request{method: http.MethodGet, path: []string{"v1", "sandboxes", id, "diff"}}, maxAnswer, out); err != nil {
		return nil, err
	}
	return out, nil
}

// Commit makes an image of a sandbox.
func (c *Client) Commit(ctx context.Context, id string, req api.CommitSandbox) (*api.SandboxCommitted, error) {
	out := new(api.SandboxCommitted)
	if err := c.call(ctx, request{method: http.MethodPost, path: []string{"v1", "sandboxes", id, "commit"}, json: req}, maxAnswer, out); err != nil {
		return nil, err
	}
	return out, nil
}

// DeleteSandbox ends everything in the sandbox and removes what it left. When it returns, nothing of it is there.
func (c *Client) DeleteSandbox(ctx context.Context, id string) error {
	return c.call(ctx, request{method: http.MethodDelete, path: []string{"v1", "sandboxes", id}}, maxAnswer, nil)
}

// PruneSandboxes deletes sandboxes that have ended.
func (c *Client) PruneSandboxes(ctx context.Context, req api.PruneSandboxes) (*api.SandboxesRemoved, error) {
	out := new(api.SandboxesRemoved)
	if err := c.call(ctx, request{method: http.MethodPost, path: []string{"v1", "sandboxes", "prune"}, json: req}, maxAnswer, out); err != nil {
		return nil, err
	}
	return out, nil
}

// StopSandbox ends every process of a sandbox and keeps its files. When it returns, it is stopped.
func (c *Client) StopSandbox(ctx context.Context, id string, req api.StopSandbox) (*api.Sandbox, error) {
	return c.turn(ctx, id, "stop", req)
}

// StartSandbox runs a sandbox that has ended once more, with its files. When it returns, execs are accepted.
func (c *Client) StartSandbox(ctx context.Context, id string, req api.StartSandbox) (*api.Sandbox, error) {
	return c.turn(ctx, id, "start", req)
}

// PauseSandbox makes every process of a sandbox stand still, as it is, until ResumeSandbox.
func (c *Client) PauseSandbox(ctx context.Context, id string) (*api.Sandbox, error) {
	return c.turn(ctx, id, "pause", struct{}{})
}

// ResumeSandbox lets a paused sandbox go on.
func (c *Client) ResumeSandbox(ctx context.Context, id string) (*api.Sandbox, error) {
	return c.turn(ctx, id, "resume", struct{}{})
}

// turn brings a sandbox into another state.
func (c *Client) turn(ctx context.Context, id, verb string, req any) (*api.Sandbox, error) {
	out := new(api.Sandbox)
	if err := c.call(ctx, request{method: http.MethodPost, path: []string{"v1", "sandboxes", id, verb}, json: req}, maxAnswer, out); err != nil {
		return nil, err
	}
	return out, nil
}
