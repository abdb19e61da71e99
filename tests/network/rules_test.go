package network

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/tests/harness"
	"github.com/sandboxd/sandboxd/tests/network/op"
)

// twoRules allows a server on the LAN within a budget, and another one without.
func twoRules(budget string) string {
	return fmt.Sprintf(`{version: 1, rules: [{name: small, allow: %s, ports: [80, 9000], budget: {%s}}, {name: free, allow: site.test}]}`, lanAddr, budget)
}

// The budget of a rule that is used up refuses what the rule covers and nothing else, and stays
// used up where the gateway and the daemon are killed. A new policy goes on from the use.
func TestBudgetsOfRules(t *testing.T) {
	w := internet(t)
	send := op.Op{Kind: op.TCP, To: lanAddr + ":9000", Bytes: make([]byte, 1000), HalfClose: true}
	get := func(to, host string) op.Op {
		return op.Op{Kind: op.TCP, To: to, Bytes: []byte("GET /echo/x HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\n\r\n")}
	}
	free := get(siteAddr+":80", "site.test")
	free.Before = []string{"site.test"}
	for _, who := range alike() {
		t.Run(who, func(t *testing.T) {
			site(t, w, nil)
			d := harness.Start(t, options(t, w, who))
			s := d.Create(t, api.CreateSandbox{Network: api.Network{Mode: api.NetworkEgress, Policy: twoRules("bytes_out: 3000")}})
			plant(t, s)
			passes := func(n int, when string) {
				t.Helper()
				for i, r := range probe(t, s, slices.Repeat([]op.Op{send}, n)) {
					if r.Error != "" || len(r.Read) != 1000 {
						t.Errorf("%s, connection %d: %q, %d bytes", when, i, r.Error, len(r.Read))
					}
				}
			}
			refused := func(when string) {
				t.Helper()
				all := probe(t, s, []op.Op{send, get(lanAddr+":80", lanAddr), free})
				if all[0].Error != "ECONNRESET" {
					t.Errorf("%s: beyond the budget: %q, %d bytes", when, all[0].Error, len(all[0].Read))
				}
				if answer := string(all[1].Read); !strings.HasPrefix(answer, "HTTP/1.1 403 ") || !strings.Contains(answer, "is used up\nrule: small\n") {
					t.Errorf("%s: HTTP beyond the budget: %q %q", when, all[1].Error, answer)
				}
				if answer := string(all[2].Read); !strings.HasPrefix(answer, "HTTP/1.1 200 ") {
					t.Errorf("%s: by another rule: %q %q", when, all[2].Error, answer)
				}
			}
			recorded := func(n int) {
				t.Helper()
				harness.Eventually(t, func() error {
					found := 0
					for _, f := range s.Flows(t) {
						if !f.Allow && f.Rule == "small" && strings.Contains(f.Reason, "the rule's budget of ") {
							found++
						}
					}
					if found != n {
						return fmt.Errorf("%d refusals by the rule's budget are recorded, want %d", found, n)
					}
					return nil
				})
			}
			change := func(policy string) {
				t.Helper()
				to := api.UpdateSandbox{Network: &api.Network{Mode: api.NetworkEgress, Policy: policy}}
				if err := d.Call(t.Context(), "PATCH", "/v1/sandboxes/"+s.ID, to, nil); err != nil {
					t.Fatal(err)
				}
			}
			passes(3, "at first")
			refused("when it is used up")
			recorded(2)
			if !killGateway(t, d) {
				t.Fatal("there is no gateway to kill")
			}
			refused("after a kill of the gateway")
			recorded(4)
			d.Kill9(t)
			d.Launch(t)
			refused("after a kill of the daemon")
			recorded(6)
			change(twoRules("bytes_out: 5000"))
			passes(2, "after a change of the policy")
			refused("after its use again")
			recorded(8)
			change(twoRules("bytes_out: 5000, hosts: 7"))
			refused("after another change")
			for _, action := range []string{"stop", "start"} {
				if err := d.Call(t.Context(), "POST", "/v1/sandboxes/"+s.ID+"/"+action, nil, nil); err != nil {
					t.Fatal(err)
				}
			}
			passes(5, "in the next life")
		})
	}
}
