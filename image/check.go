package image

import (
	"context"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/registry"
)

// CheckRegistry asks a registry whether it takes credentials: those of the request, else those that
// a pull of the tenant would have. Refusal is its answer if it does not.
func (s *Service) CheckRegistry(ctx context.Context, address string, insecure bool, auth *api.RegistryAuth) (refusal string, err error) {
	ref, err := registry.RepositoryAt(address)
	if err != nil {
		return "", err
	}
	return s.registriesAs(auth, ref.Context().RegistryStr()).Check(ctx, address, insecure)
}
