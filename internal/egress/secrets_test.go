package egress

import (
	"errors"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/secrets"
	"github.com/sandboxd/sandboxd/netns/gateway"
)

func oneSecret(value string) []secrets.Secret {
	return []secrets.Secret{secrets.Secret{Name: "a", Kind: secrets.Bearer, Value: value, Binding: gateway.Binding{Host: "example.com"}}.Placed()}
}

// Changed secrets reach the process, and the one after it, whether there was one or not.
func TestSetSecrets(t *testing.T) {
	end := make(chan struct{})
	g, s := perform(t, func(gateway.Event) {}, honestUntil(end), honest)
	if err := addBox(t, g, "a"); err != nil {
		t.Fatal(err)
	}
	s.next()
	if err := g.SetSecrets(t.Context(), "b", nil); !errors.Is(err, ErrNotFound) {
		t.Errorf("of no network: %v", err)
	}
	if err := g.SetSecrets(t.Context(), "a", oneSecret(strings.Repeat("x", maxSecrets))); !errors.Is(err, ErrInvalid) {
		t.Errorf("too large: %v", err)
	}
	if err := g.SetSecrets(t.Context(), "a", oneSecret("first-value")); err != nil {
		t.Fatal(err)
	}
	if r := s.next(); r.SetSecrets == nil || r.SetSecrets.ID != "a" || len(r.SetSecrets.Secrets) != 1 || r.SetSecrets.Secrets[0].Value != "first-value" {
		t.Errorf("the process got %+v", r)
	}
	close(end)
	if r := s.next(); r.Add == nil || len(r.Add.Secrets) != 1 || r.Add.Secrets[0].Value != "first-value" {
		t.Errorf("the next process got %+v", r)
	}
}

// Requests that no daemon of ours sends are refused, and those that it sends are taken.
func TestSecretsOfATakenOverDaemon(t *testing.T) {
	p := &process{networks: make(map[string]*served)}
	n := gateway.New(gateway.Options{ID: "a", Record: func([]gateway.Event) {}})
	defer n.Close()
	p.networks["a"] = &served{network: n}
	for name, r := range map[string]*setSecrets{
		"of no network":   {ID: "b", Secrets: oneSecret("some-value")},
		"a short value":   {ID: "a", Secrets: oneSecret("x")},
		"no placeholder":  {ID: "a", Secrets: []secrets.Secret{{Name: "a", Kind: secrets.Bearer, Value: "some-value", Binding: gateway.Binding{Host: "example.com"}}}},
		"of unknown kind": {ID: "a", Secrets: []secrets.Secret{secrets.Secret{Name: "a", Value: "some-value"}.Placed()}},
	} {
		if err := p.handle(&request{SetSecrets: r}, nil); err == nil || strings.Contains(err.Error(), "some-value") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := p.handle(&request{SetSecrets: &setSecrets{ID: "a", Secrets: oneSecret("some-value")}}, nil); err != nil {
		t.Error(err)
	}
	large := request{SetSecrets: &setSecrets{ID: "a", Secrets: oneSecret(strings.Repeat("\"", maxSecrets-400))}}
	if packet, err := encode(&large); err != nil || large.check(0) != nil || len(packet) > requests.MaxBytes {
		t.Errorf("the largest request has %d bytes, %v, %v", len(packet), err, large.check(0))
	}
	if err := CheckSecrets(large.SetSecrets.Secrets); err != nil {
		t.Error(err)
	}
	if err := CheckSecrets(oneSecret(strings.Repeat("x", maxSecrets))); err == nil {
		t.Error("secrets that fit into no packet are accepted")
	}
}
