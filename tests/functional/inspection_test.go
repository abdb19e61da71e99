package functional

import (
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// Snapshots and forks of a sandbox whose policy reads requests within TLS have neither its
// authority's variables nor its placeholders, and are made also when a later policy reads none.
func TestSnapshotsOfInspectedSandboxes(t *testing.T) {
	testenv.SameForAll(t)
	d := start(t)
	if err := d.Call(t.Context(), "PUT", "/v1/secrets/token", api.SetSecret{Kind: api.SecretBearer, Value: "t0p-s3cret-value", Host: "example.com", Variable: "TOKEN"}, nil); err != nil {
		t.Fatal(err)
	}
	const rules = "version: 1\nrules:\n- allow: example.com\n"
	reads := api.Network{Mode: api.NetworkEgress, Policy: rules + "  inspect: true\n", Secrets: []string{"token"}}
	s := d.Create(t, api.CreateSandbox{Network: reads, Env: []string{"OWN=1"}})
	const variables = `echo "$OWN $SSL_CERT_FILE $TOKEN"`
	of := s.Sh(t, variables)
	if !strings.Contains(of, "1 /etc/ssl/certs/ca-certificates.crt sandboxd-") {
		t.Fatalf("control: %q", of)
	}
	snap := snapshot(t, d, s.ID, api.TakeSnapshot{Name: "one"})
	plain := d.Create(t, api.CreateSandbox{Snapshot: snap.ID, Network: api.Network{Mode: api.NetworkNone}})
	if got := plain.Sh(t, variables); got != "1  \n" {
		t.Errorf("a sandbox of the snapshot without inspection: %q", got)
	}
	again := d.Create(t, api.CreateSandbox{Snapshot: snap.ID})
	if got := again.Sh(t, variables); !strings.Contains(got, "sandboxd-") || got == of {
		t.Errorf("a sandbox of the snapshot: %q, its origin %q", got, of)
	}
	if again.Network.Secrets == nil {
		t.Errorf("its network is %+v", again.Network)
	}
	if err := d.Call(t.Context(), "PATCH", "/v1/sandboxes/"+s.ID, api.UpdateSandbox{Network: &api.Network{Mode: api.NetworkEgress, Policy: rules}}, nil); err != nil {
		t.Fatal(err)
	}
	f := fork(t, d, s.ID, api.ForkSandbox{})[0]
	if got := f.Sh(t, variables); got != "1  \n" || f.Network.Secrets != nil {
		t.Errorf("a fork after the policy reads none: %q, %+v", got, f.Network)
	}
	if err := d.Call(t.Context(), "PATCH", "/v1/sandboxes/"+s.ID, api.UpdateSandbox{Network: &reads}, nil); err == nil {
		t.Error("control: secrets can be changed")
	}
	reads.Secrets = nil
	if err := d.Call(t.Context(), "PATCH", "/v1/sandboxes/"+s.ID, api.UpdateSandbox{Network: &reads}, nil); err != nil {
		t.Errorf("the first policy again: %v", err)
	}
	if got := fork(t, d, s.ID, api.ForkSandbox{})[0]; len(got.Network.Secrets) != 1 {
		t.Errorf("a fork under the first policy again: %+v", got.Network)
	}
}
