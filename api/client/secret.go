package client

import (
	"context"
	"net/http"

	"github.com/sandboxd/sandboxd/api"
)

// SetSecret stores a secret, in the place of one that has its name. When it returns, running
// sandboxes that have the secret use the new one.
func (c *Client) SetSecret(ctx context.Context, name string, req api.SetSecret) (*api.Secret, error) {
	return fetch[api.Secret](ctx, c, request{method: http.MethodPut, path: []string{"v1", "secrets", name}, json: req})
}

// Secrets describes the caller's secrets, in the order of their names. None has its value.
func (c *Client) Secrets(ctx context.Context) ([]api.Secret, error) {
	var out api.SecretList
	err := c.call(ctx, request{method: http.MethodGet, path: []string{"v1", "secrets"}}, maxAnswer, &out)
	return out.Secrets, err
}

// RemoveSecret removes a secret. Sandboxes that have it are left with a placeholder that stands for
// nothing.
func (c *Client) RemoveSecret(ctx context.Context, name string) error {
	return c.call(ctx, request{method: http.MethodDelete, path: []string{"v1", "secrets", name}}, maxAnswer, nil)
}
