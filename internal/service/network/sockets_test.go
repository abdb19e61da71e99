package network

import (
	"context"
	"errors"
	"net"
	"testing"

	"github.com/sandboxd/sandboxd/api"
)

// The daemon's copy of a policy decides which sockets a gateway gets, whatever that asks for.
func TestDialSocket(t *testing.T) {
	errDialled := errors.New("dialled")
	n := open(t, nil)
	var dialled []string
	n.opts.DialSocket = func(_ context.Context, name string) (*net.UnixConn, error) {
		dialled = append(dialled, name)
		return nil, errDialled
	}
	with := func(doc string) api.Network {
		return api.Network{Mode: api.NetworkEgress, Policy: doc}
	}
	const doc = "version: 1\nrules: [{deny: host.sandboxd.internal, ports: 83}]\nservices:\n- {port: 80, to: \"unix:models\"}\n- {port: 81, to: \"127.0.0.1:81\"}\n- {port: 83, to: \"unix:models\"}\n"
	n.lives["own"] = &life{policy: parse(with(doc))}
	n.lives["tenants"] = &life{tenant: "1002", policy: parse(with(doc))}
	n.lives["over"] = &life{over: true, policy: parse(with(doc))}
	n.lives["none"] = &life{policy: parse(api.Network{Mode: api.NetworkFull})}
	defer clear(n.lives)
	for id, ports := range map[string][]uint16{"own": {81, 82, 83, 0}, "tenants": {80}, "over": {80}, "none": {80}, "nothing": {80}} {
		for _, port := range ports {
			if _, err := n.dialSocket(t.Context(), id, port); err == nil || errors.Is(err, errDialled) {
				t.Errorf("%s gets port %d: %v", id, port, err)
			}
		}
	}
	if _, err := n.dialSocket(t.Context(), "own", 80); !errors.Is(err, errDialled) || len(dialled) != 1 || dialled[0] != "models" {
		t.Errorf("%v, dialled %q", err, dialled)
	}
}
