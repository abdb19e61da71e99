package network

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/runtime"
)

// What is made of a snapshot or a sandbox has its network, unless the request names one. Secrets go
// with a policy that can use them only.
func TestNetworksAreInherited(t *testing.T) {
	of := api.Network{Mode: api.NetworkEgress, Policy: inspected, Secrets: []string{"mine"}, Join: []string{"front"}, Budget: api.NetworkBudget{Hosts: 3}}
	changed := func(n api.Network, change func(*api.Network)) api.Network { change(&n); return n }
	later := changed(of, func(n *api.Network) { n.Policy = opaque }) // by an update
	full := changed(of, func(n *api.Network) { n.Mode, n.Policy = api.NetworkFull, "" })
	without := func(n api.Network) api.Network { return changed(n, func(n *api.Network) { n.Secrets = nil }) }
	for name, tt := range map[string]struct{ ask, from, want api.Network }{
		"nothing":           {api.Network{}, of, of},
		"of none":           {api.Network{}, api.Network{Mode: api.NetworkNone}, api.Network{Mode: api.NetworkNone}},
		"of an import":      {api.Network{}, api.Network{}, api.Network{}},
		"a mode":            {api.Network{Mode: api.NetworkNone}, of, api.Network{Mode: api.NetworkNone}},
		"a policy":          {api.Network{Policy: opaque}, of, api.Network{Policy: opaque}}, // which is refused
		"a sandbox":         {api.Network{Sandbox: "x"}, of, api.Network{Sandbox: "x"}},
		"named networks":    {api.Network{Join: []string{"back"}}, of, changed(of, func(n *api.Network) { n.Join = []string{"back"} })},
		"secrets":           {api.Network{Secrets: []string{"file"}}, of, changed(of, func(n *api.Network) { n.Secrets = []string{"file"} })},
		"a budget":          {api.Network{Budget: api.NetworkBudget{Hosts: 1}}, of, changed(of, func(n *api.Network) { n.Budget.Hosts = 1 })},
		"of one that left":  {api.Network{}, api.Network{Mode: api.NetworkNone, Budget: of.Budget}, api.Network{Mode: api.NetworkNone}},
		"a later policy":    {api.Network{}, later, without(later)},
		"full":              {api.Network{}, full, without(full)},
		"secrets for it":    {api.Network{Secrets: []string{"file"}}, later, changed(later, func(n *api.Network) { n.Secrets = []string{"file"} })}, // refused
		"a shared one":      {api.Network{}, api.Network{Mode: api.NetworkSandbox, Sandbox: "x"}, api.Network{Mode: api.NetworkSandbox, Sandbox: "x"}},
		"a mode of a guest": {api.Network{Mode: api.NetworkFull}, api.Network{Mode: api.NetworkSandbox, Sandbox: "x"}, api.Network{Mode: api.NetworkFull}},
	} {
		if diff := cmp.Diff(tt.want, Inherit(tt.ask, tt.from)); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
	n := withSecrets(t)
	for name, from := range map[string]api.Network{"as it was": of, "changed": later, "opened": full} {
		if _, err := n.Check("", Inherit(api.Network{}, from)); err != nil {
			t.Errorf("a fork of one %s: %v", name, err)
		}
	}
}

// The environment of snapshots and forks has no trace of an inspection.
func TestPlainEnv(t *testing.T) {
	n := withSecrets(t)
	req := bearer()
	req.Variable = "TOKEN"
	if _, err := n.SetSecret(t.Context(), "", "token", req); err != nil {
		t.Fatal(err)
	}
	i, err := n.Inspect("", api.Network{Mode: api.NetworkEgress, Policy: inspected, Secrets: []string{"token"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Store("inspected", i); err != nil {
		t.Fatal(err)
	}
	bundle, placed := i.Env()
	own := []string{"A=b", "PATH=/bin", "SSL_CERT_FILE=/own.pem", "BUNDLE=" + runtime.TrustFile, "EMPTY=", "ODD"}
	all := append(append(append([]string{}, bundle...), own...), placed...)
	for name, tt := range map[string]struct {
		id   string
		mode api.NetworkMode
		want []string
	}{
		"an inspected sandbox":          {"inspected", api.NetworkEgress, own},
		"one that shares a network":     {"guest", api.NetworkSandbox, append(append([]string{}, own...), placed...)},
		"another, with what it has set": {"other", api.NetworkFull, all},
	} {
		got, err := n.PlainEnv(&runtime.Record{Sandbox: api.Sandbox{ID: tt.id, Env: all, Network: api.Network{Mode: tt.mode}}})
		if diff := cmp.Diff(tt.want, got); diff != "" || err != nil {
			t.Errorf("%s: %v %s", name, err, diff)
		}
	}
}
