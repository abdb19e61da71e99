package network

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/tests/harness"
	"github.com/sandboxd/sandboxd/tests/network/op"
)

// Mode full opens every public address but the host's own, and no special-purpose one.
func TestFullOpensNoSpecialAddress(t *testing.T) {
	attacks, hosts := addressAttacks()
	own, names := ownAttacks()
	attacks = append(attacks, own...)
	maps.Copy(hosts, names)
	// Any name may be resolved, and special addresses are left out of the answers.
	attacks = append(attacks, callAttacks()...)
	attacks = append(attacks, datagramAttacks()...)
	each(t, func(t *testing.T, w *world, d *harness.Daemon) {
		t.Helper()
		ca := site(t, w, nil)
		prepare(t, w, hosts)
		s := d.Create(t, api.CreateSandbox{Network: api.Network{Mode: api.NetworkFull}})
		plant(t, s)
		if err := s.Put(t.Context(), op.CA, ca); err != nil {
			t.Fatal(err)
		}
		results := probe(t, s, opsOf(attacks))
		for i := range attacks {
			if err := attacks[i].judge(&results[i]); err != nil {
				t.Errorf("%s: %v", attacks[i].name, err)
			}
		}
		for _, a := range settled(t, w) {
			t.Errorf("%s %s was reached by %q", a.network, a.to, a.bytes())
		}
		judgeFlows(t, attacks, func() []api.Flow { return s.Flows(t) })
		forget(t, w)

		public := slices.DeleteFunc(clientOps(), func(o op.Op) bool {
			return strings.Contains(o.Name, "lan") || strings.Contains(o.Name, "load") || o.Name == "raw-large" || o.Name == "at-once"
		})
		for i, r := range probe(t, s, public) {
			if r.Error != "" {
				t.Errorf("%s: %s", public[i].Name, r.Error)
			}
		}
		for _, a := range settled(t, w) {
			if a.to.Addr() != netip.MustParseAddr(siteAddr) && a.to.Addr() != netip.MustParseAddr(siteAddr6) {
				t.Errorf("%s %s was reached by %q", a.network, a.to, a.bytes())
			}
		}
	})
}

// A sandbox without a network reaches nothing, and asks for no name.
func TestNoneReachesNothing(t *testing.T) {
	attacks, hosts := allAttacks()
	each(t, func(t *testing.T, w *world, d *harness.Daemon) {
		t.Helper()
		prepare(t, w, hosts)
		s := d.Create(t, api.CreateSandbox{})
		plant(t, s)
		ops := slices.DeleteFunc(opsOf(attacks), func(o op.Op) bool {
			return o.Kind == op.Resolve && o.To == "" || o.Kind == op.Send || o.Kind == op.Call // there is no nameserver, and calls change nothing beyond
		})
		for i := range ops {
			ops[i].Before = nil
		}
		for i, r := range probe(t, s, ops) {
			if r.Error == "" {
				t.Errorf("operation %d, %+v: it was done: %+v", i, ops[i], r)
			}
		}
		for _, a := range settled(t, w) {
			t.Errorf("%s %s was reached by %q", a.network, a.to, a.bytes())
		}
		if asked := w.names.take(); len(asked) > 0 {
			t.Errorf("the host's resolver was asked %q", asked)
		}
		packets, err := w.tap.take()
		if err != nil || len(packets) > 0 {
			t.Errorf("packets: %v, %v", packets, err)
		}
	})
}

// A policy that changes resets the connections that it refuses, and keeps the others. Newly allowed
// names work at once.
func TestPolicyChangesWhileConnectionsAreOpen(t *testing.T) {
	const before = `{version: 1, rules: [{name: a, allow: 10.1.0.8, ports: 9000}, {name: b, allow: 10.1.0.7, ports: 9000}]}`
	const after = `{version: 1, rules: [{name: b, allow: 10.1.0.7, ports: 9000}, {name: site, allow: [site.test, "*.site.test"]}]}`
	each(t, func(t *testing.T, w *world, d *harness.Daemon) {
		t.Helper()
		ca := site(t, w, nil)
		came := holding(t, w)
		s := trusting(t, d, "default", before, ca)
		wait := begin(t, s, []op.Op{
			{Kind: op.Hold, To: holdAt, Bytes: []byte(mark), Count: 10},
			{Kind: op.TCP, To: holdAt, Bytes: []byte(mark)},
			{Kind: op.Client, Name: "raw-half-close-lan"},
			{Kind: op.Client, Name: "https-GET"},
		})
		for range 10 {
			<-came
		}
		change := api.UpdateSandbox{Network: &api.Network{Mode: api.NetworkEgress, Policy: after}}
		if err := d.Call(t.Context(), "PATCH", "/v1/sandboxes/"+s.ID, change, nil); err != nil {
			t.Fatal(err)
		}
		for i, r := range wait() {
			if want := map[int]string{1: "ECONNRESET"}[i]; r.Error != want {
				t.Errorf("operation %d: %q, want %q", i, r.Error, want)
			}
		}
		harness.Eventually(t, func() error { // the record is written beside the connections
			refused := 0
			for _, f := range s.Flows(t) {
				if !f.Allow && f.Address == "10.1.0.8" {
					refused++
				}
			}
			if refused != 11 {
				return fmt.Errorf("%d connections are recorded as refused, want 11", refused)
			}
			return nil
		})
	})
}

// A budget that is used up refuses what follows, which is recorded.
func TestBudgets(t *testing.T) {
	for name, b := range map[string]struct {
		budget api.NetworkBudget
		done   int // operations that succeed before
	}{
		"connections": {api.NetworkBudget{Connections: 3}, 3},
		"bytes out":   {api.NetworkBudget{BytesOut: 3000}, 3},
		"bytes in":    {api.NetworkBudget{BytesIn: 3000}, 3},
	} {
		t.Run(name, func(t *testing.T) {
			each(t, func(t *testing.T, w *world, d *harness.Daemon) {
				t.Helper()
				site(t, w, nil)
				s := d.Create(t, api.CreateSandbox{Network: api.Network{Mode: api.NetworkEgress, Policy: allowed, Budget: b.budget}})
				plant(t, s)
				var ops []op.Op
				for range 6 {
					ops = append(ops, op.Op{Kind: op.TCP, To: lanAddr + ":9000", Bytes: make([]byte, 1000), HalfClose: true})
				}
				for i, r := range probe(t, s, ops) {
					if done := r.Error == "" && len(r.Read) == 1000; done != (i < b.done) {
						t.Errorf("connection %d: %q, %d bytes", i, r.Error, len(r.Read))
					}
				}
				harness.Eventually(t, func() error {
					refused := 0
					for _, f := range s.Flows(t) {
						if !f.Allow && strings.Contains(f.Reason, "budget") {
							refused++
						}
					}
					if refused != len(ops)-b.done {
						return fmt.Errorf("%d refusals by the budget are recorded, want %d", refused, len(ops)-b.done)
					}
					return nil
				})
			})
		})
	}
}
