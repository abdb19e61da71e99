package service

import (
	"context"

	"github.com/sandboxd/sandboxd/api"
)

// SetSecret stores a secret of the caller's tenant, in the place of one that has its name. Running
// sandboxes that have the secret use the new one when it returns.
func (s *API) SetSecret(ctx context.Context, name string, req api.SetSecret) (api.Secret, error) {
	secret, err := s.networks.SetSecret(ctx, s.caller.Tenant, name, req)
	if secret.Name != "" { // it is stored, even if it has not reached every sandbox
		s.publish(api.Event{Type: api.EventSecret, Action: api.ActionSet, Object: secret.Name})
	}
	return secret, err
}

// Secrets describes the secrets of the caller's tenant, without their values.
func (s *API) Secrets() ([]api.Secret, error) { return s.networks.Secrets(s.caller.Tenant) }

// RemoveSecret removes a secret of the caller's tenant.
func (s *API) RemoveSecret(ctx context.Context, name string) error {
	err := s.networks.RemoveSecret(ctx, s.caller.Tenant, name)
	if err == nil {
		s.publish(api.Event{Type: api.EventSecret, Action: api.ActionRemoved, Object: name})
	}
	return err
}
