package service

import (
	"context"

	"github.com/sandboxd/sandboxd/api"
)

// SetSecret stores a secret of the caller's tenant, in the place of one that has its name. Running
// sandboxes that have the secret use the new one when it returns.
func (s *API) SetSecret(ctx context.Context, name string, req api.SetSecret) (api.Secret, error) {
	return s.networks.SetSecret(ctx, s.caller.Tenant, name, req)
}

// Secrets describes the secrets of the caller's tenant, without their values.
func (s *API) Secrets() ([]api.Secret, error) { return s.networks.Secrets(s.caller.Tenant) }

// RemoveSecret removes a secret of the caller's tenant.
func (s *API) RemoveSecret(ctx context.Context, name string) error {
	return s.networks.RemoveSecret(ctx, s.caller.Tenant, name)
}
