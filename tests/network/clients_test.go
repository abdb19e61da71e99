package network

import (
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/tests/harness"
	"github.com/sandboxd/sandboxd/tests/network/op"
)

// clientOps are the clients of package op.
func clientOps() (ops []op.Op) {
	for _, name := range slices.Sorted(maps.Keys(op.Clients())) {
		ops = append(ops, op.Op{Kind: op.Client, Name: name})
	}
	return ops
}

// trusting makes a sandbox whose programs trust a certificate.
func trusting(t *testing.T, d *harness.Daemon, profile, policy string, ca []byte) *harness.Sandbox {
	t.Helper()
	s := connected(t, d, profile, policy)
	if err := s.Put(t.Context(), op.CA, ca); err != nil {
		t.Fatal(err)
	}
	return s
}

// Clients of allowed servers work as without a sandbox.
func TestClients(t *testing.T) {
	ops := clientOps()
	t.Logf("%d clients", len(ops))
	each(t, func(t *testing.T, w *world, d *harness.Daemon) {
		t.Helper()
		ca := site(t, w, nil)
		for _, profile := range profiles(t, d) {
			t.Run(profile, func(t *testing.T) {
				s := trusting(t, d, profile, allowed, ca)
				for i, r := range probe(t, s, ops) {
					if r.Error != "" {
						t.Errorf("%s: %s", ops[i].Name, r.Error)
					}
				}
				noRefusals(t, s.Flows(t))
			})
		}
	})
}

// The same clients work where the gateway reads their requests. They trust what the sandbox does.
func TestInspectedClients(t *testing.T) {
	inspectedClients(t, both, func(name string) bool { return !large[name] })
}

// Large transfers work where the gateway reads requests. They have a test of their own: an emulated
// machine encrypts some hundred kilobytes in a second.
func TestInspectedTransfers(t *testing.T) {
	inspectedClients(t, alike(), func(name string) bool { return large[name] })
}

var large = map[string]bool{"https-download": true, "https-upload": true}

func inspectedClients(t *testing.T, users []string, chosen func(name string) bool) {
	t.Helper()
	ops := slices.DeleteFunc(clientOps(), func(o op.Op) bool {
		tls := strings.HasPrefix(o.Name, "https-") || strings.HasPrefix(o.Name, "http2")
		// Where requests are read, a path that servers read differently is refused.
		return !tls || o.Name == "https-odd-path" || !chosen(o.Name)
	})
	with(t, users, func(t *testing.T, w *world, d *harness.Daemon) {
		t.Helper()
		site(t, w, nil)
		s := connected(t, d, "default", allowedInspected)
		s.Sh(t, `cp "$SSL_CERT_FILE" `+op.CA)
		for i, r := range probe(t, s, ops) {
			if r.Error != "" {
				t.Errorf("%s: %s", ops[i].Name, r.Error)
			}
		}
		flows := s.Flows(t)
		noRefusals(t, flows)
		if !slices.ContainsFunc(flows, func(f api.Flow) bool { return f.Kind == api.FlowRequest && f.Port == 443 && f.Status == http.StatusOK }) {
			t.Error("no request within TLS is recorded")
		}
	})
}

// Programs in a sandbox serve each other on the ports that they use outside.
func TestOwnServers(t *testing.T) {
	each(t, func(t *testing.T, w *world, d *harness.Daemon) {
		t.Helper()
		ca := site(t, w, nil)
		s := trusting(t, d, "default", allowed, ca)
		if r := probe(t, s, []op.Op{{Kind: op.Client, Name: op.OwnPorts}})[0]; r.Error != "" {
			t.Error(r.Error)
		}
		noRefusals(t, s.Flows(t))
	})
}

func noRefusals(t *testing.T, flows []api.Flow) {
	t.Helper()
	if len(flows) == 0 {
		t.Error("nothing is recorded")
	}
	for _, f := range flows {
		if !f.Allow {
			t.Errorf("refused: %+v", f)
		}
	}
}
