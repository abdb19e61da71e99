package client

import (
	"context"
	"net/http"
	"net/url"

	"github.com/sandboxd/sandboxd/api"
)

// CreateSandbox creates and starts a sandbox. When it returns, execs are accepted.
func (c *Client) CreateSandbox(ctx context.Context, req api.CreateSandbox) (*api.Sandbox, error) {
	return fetch[api.Sandbox](ctx, c, request{method: http.MethodPost, path: []string{"v1", "sandboxes"}, json: req})
}

// GetSandbox returns one sandbox.
func (c *Client) GetSandbox(ctx context.Context, id string) (*api.Sandbox, error) {
	return fetch[api.Sandbox](ctx, c, request{method: http.MethodGet, path: []string{"v1", "sandboxes", id}})
}

// ListOptions filters a list of sandboxes.
type ListOptions struct {
	Labels []string // "key=value"; a sandbox must have all of them
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

// UpdateSandbox changes a running sandbox. It applies all changes, or returns an error and applies
// none.
func (c *Client) UpdateSandbox(ctx context.Context, id string, req api.UpdateSandbox) (*api.Sandbox, error) {
	return fetch[api.Sandbox](ctx, c, request{method: http.MethodPatch, path: []string{"v1", "sandboxes", id}, json: req})
}

// RenameSandbox gives a sandbox another name.
func (c *Client) RenameSandbox(ctx context.Context, id, name string) (*api.Sandbox, error) {
	return c.changeState(ctx, id, "rename", api.RenameSandbox{Name: name})
}

// Stats returns the kernel's counters for a running sandbox.
func (c *Client) Stats(ctx context.Context, id string) (*api.Stats, error) {
	return fetch[api.Stats](ctx, c, request{method: http.MethodGet, path: []string{"v1", "sandboxes", id, "stats"}})
}

// AllStats returns the kernel's counters of the sandboxes with these ids or names, or without any
// of all that run or are paused.
func (c *Client) AllStats(ctx context.Context, ids ...string) ([]api.SandboxStats, error) {
	q := url.Values{}
	for _, id := range ids {
		q.Add("sandbox", id)
	}
	var out api.StatsList
	err := c.call(ctx, request{method: http.MethodGet, path: []string{"v1", "stats"}, query: q}, maxAnswer, &out)
	return out.Sandboxes, err
}

// Diff returns the differences between a sandbox's files and its image.
func (c *Client) Diff(ctx context.Context, id string) (*api.SandboxDiff, error) {
	return fetch[api.SandboxDiff](ctx, c, request{method: http.MethodGet, path: []string{"v1", "sandboxes", id, "diff"}})
}

// Commit creates an image from a sandbox.
func (c *Client) Commit(ctx context.Context, id string, req api.CommitSandbox) (*api.SandboxCommitted, error) {
	return fetch[api.SandboxCommitted](ctx, c, request{method: http.MethodPost, path: []string{"v1", "sandboxes", id, "commit"}, json: req})
}

// DeleteSandbox ends all processes of the sandbox and removes its files. When it returns, no part
// of the sandbox is left.
func (c *Client) DeleteSandbox(ctx context.Context, id string) error {
	return c.call(ctx, request{method: http.MethodDelete, path: []string{"v1", "sandboxes", id}}, maxAnswer, nil)
}

// PruneSandboxes deletes ended sandboxes.
func (c *Client) PruneSandboxes(ctx context.Context, req api.PruneSandboxes) (*api.SandboxesRemoved, error) {
	return fetch[api.SandboxesRemoved](ctx, c, request{method: http.MethodPost, path: []string{"v1", "sandboxes", "prune"}, json: req})
}

// StopSandbox ends all processes of a sandbox and keeps its files. When it returns, the sandbox is
// stopped.
func (c *Client) StopSandbox(ctx context.Context, id string, req api.StopSandbox) (*api.Sandbox, error) {
	return c.changeState(ctx, id, "stop", req)
}

// StartSandbox runs an ended sandbox again, with its files. When it returns, execs are accepted.
func (c *Client) StartSandbox(ctx context.Context, id string, req api.StartSandbox) (*api.Sandbox, error) {
	return c.changeState(ctx, id, "start", req)
}

// PauseSandbox freezes all processes of a sandbox until ResumeSandbox.
func (c *Client) PauseSandbox(ctx context.Context, id string) (*api.Sandbox, error) {
	return c.changeState(ctx, id, "pause", struct{}{})
}

// ResumeSandbox lets a paused sandbox continue.
func (c *Client) ResumeSandbox(ctx context.Context, id string) (*api.Sandbox, error) {
	return c.changeState(ctx, id, "resume", struct{}{})
}

// changeState moves a sandbox to another state.
func (c *Client) changeState(ctx context.Context, id, verb string, req any) (*api.Sandbox, error) {
	return fetch[api.Sandbox](ctx, c, request{method: http.MethodPost, path: []string{"v1", "sandboxes", id, verb}, json: req})
}
