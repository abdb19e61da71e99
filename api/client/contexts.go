package client

import (
	"context"
	"net/http"

	"github.com/sandboxd/sandboxd/api"
)

// contextPath returns the segments of the path of a context, or of one of its routes.
func contextPath(id, name string, more ...string) []string {
	return append([]string{"v1", "sandboxes", id, "contexts", name}, more...)
}

// CreateContext starts a context, and waits until it takes code: see [api.CodeRequest.Context].
func (c *Client) CreateContext(ctx context.Context, id string, req api.CreateContext) (*api.Context, error) {
	return fetch[api.Context](ctx, c, request{method: http.MethodPost, path: []string{"v1", "sandboxes", id, "contexts"}, json: req})
}

// ListContexts lists the contexts of a sandbox, oldest first.
func (c *Client) ListContexts(ctx context.Context, id string) ([]api.Context, error) {
	var out api.ContextList
	err := c.call(ctx, request{method: http.MethodGet, path: []string{"v1", "sandboxes", id, "contexts"}}, maxAnswer, &out)
	return out.Contexts, err
}

// GetContext returns one context.
func (c *Client) GetContext(ctx context.Context, id, name string) (*api.Context, error) {
	return fetch[api.Context](ctx, c, request{method: http.MethodGet, path: contextPath(id, name)})
}

// DeleteContext ends a context, and the processes that it has started.
func (c *Client) DeleteContext(ctx context.Context, id, name string) error {
	return c.call(ctx, request{method: http.MethodDelete, path: contextPath(id, name)}, maxAnswer, nil)
}

// InterruptContext interrupts the run under way, if there is one. It does not wait for its end.
func (c *Client) InterruptContext(ctx context.Context, id, name string) (*api.Context, error) {
	return fetch[api.Context](ctx, c, request{method: http.MethodPost, path: contextPath(id, name, "interrupt")})
}

// RestartContext gives a context a new process, without variables.
func (c *Client) RestartContext(ctx context.Context, id, name string) (*api.Context, error) {
	return fetch[api.Context](ctx, c, request{method: http.MethodPost, path: contextPath(id, name, "restart")})
}
