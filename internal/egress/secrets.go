package egress

import (
	"context"
	"fmt"
	"slices"

	"github.com/sandboxd/sandboxd/internal/secrets"
	"github.com/sandboxd/sandboxd/netns/gateway"
)

type setSecrets struct {
	ID      string           `json:"id"`
	Secrets []secrets.Secret `json:"secrets"`
}

// CheckSecrets reports secrets that are too many or too large for one network.
func CheckSecrets(placed []secrets.Secret) error {
	if n := secretBytes(placed); n > maxSecrets {
		return fmt.Errorf("%d secrets with %d bytes, at most %d bytes are possible", len(placed), n, maxSecrets)
	}
	return nil
}

// SetSecrets replaces the secrets of a network, which have placeholders. Connections go on. It
// needs no process: the next one gets the new secrets.
func (g *Gateway) SetSecrets(ctx context.Context, id string, placed []secrets.Secret) error {
	r := request{SetSecrets: &setSecrets{ID: id, Secrets: slices.Clone(placed)}}
	if err := r.check(0); err != nil {
		return fmt.Errorf("set secrets of network %.40q: %w: %w", id, ErrInvalid, err)
	}
	_, err := g.change(ctx, r, id, func(n *network) { n.secret = r.SetSecrets.Secrets })
	if err != nil {
		return fmt.Errorf("set secrets of network %s: %w", id, err)
	}
	return nil
}

func (p *process) setSecrets(s *setSecrets) error {
	v := p.networks[s.ID]
	if v == nil {
		return fmt.Errorf("set secrets: no network %s", s.ID)
	}
	placed, err := bound(s.Secrets)
	if err != nil {
		return fmt.Errorf("set secrets: %w", err)
	}
	v.network.SetSecrets(placed)
	return nil
}

// bound returns secrets as the gateway uses them.
func bound(all []secrets.Secret) (placed []gateway.Secret, err error) {
	for i := range all {
		s, err := all[i].Gateway()
		if err != nil {
			return nil, err
		}
		placed = append(placed, s)
	}
	return placed, nil
}
