package gateway

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/sandboxd/sandboxd/netns/gateway/sniff"
	"github.com/sandboxd/sandboxd/netns/policy"
)

// A refusal is an error that the policy, a budget or a bound decided, with the reason.
type refusal struct {
	policy.Verdict
	// malformed reports bytes that are refused whatever the policy says.
	malformed bool
	// secret is the name of the secret whose placeholder was refused.
	secret string
}

func (r *refusal) Error() string { return explain(r.Verdict) }

func refuse(format string, args ...any) error {
	return &refusal{Verdict: policy.Verdict{Reason: fmt.Sprintf(format, args...)}}
}

func tcpFlow(name policy.Name, dst netip.AddrPort) policy.Flow {
	return policy.Flow{Protocol: policy.TCP, Name: name, Addr: dst.Addr(), Port: dst.Port()}
}

// admit decides about a connection whose bytes were not read. unread reports that no byte could
// change the decision: rules allow the address itself, and every name that it was resolved for.
func (n *Network) admit(dst netip.AddrPort) (v policy.Verdict, unread bool) {
	p := n.policy.Load()
	v = p.Connect(tcpFlow(policy.Name{}, dst))
	unread = v.Allow && !v.Inspect
	names := n.memory.namesOf(dst.Addr())
	for i, name := range names {
		named := p.Connect(tcpFlow(name, dst))
		unread = unread && named.Allow && !named.Inspect
		if !v.Allow && (named.Allow || i == len(names)-1) {
			v = named // of refusals the latest name's, which is most likely meant
		}
	}
	return v, unread && n.chargedAlike(dst)
}

// chargedAlike reports whether a connection counts in the same budgets of rules for every allowed
// host that its address may stand for.
func (n *Network) chargedAlike(dst netip.AddrPort) bool {
	r := n.rules.Load()
	if len(r.ledgers) == 0 {
		return true
	}
	var first []string
	allowed := 0
	for _, name := range append(n.memory.namesOf(dst.Addr()), policy.Name{}) {
		f := tcpFlow(name, dst)
		if !r.policy.Connect(f).Allow {
			continue
		}
		if allowed++; allowed == 1 {
			first = r.policy.Charged(f, "", policy.Path{})
		} else if !slices.Equal(first, r.policy.Charged(f, "", policy.Path{})) {
			return false
		}
	}
	return true
}

// claimed returns the flows that the policy must allow, each of them, for a connection on which the
// client named a host. A name that the address was not resolved for must not open anything, but
// denials of it count.
func (n *Network) claimed(dst netip.AddrPort, name policy.Name) []policy.Flow {
	switch {
	case name.IsZero():
		return []policy.Flow{tcpFlow(name, dst)}
	case slices.Contains(n.memory.namesOf(dst.Addr()), name):
		return []policy.Flow{tcpFlow(name, dst)}
	default:
		return []policy.Flow{tcpFlow(policy.Name{}, dst), tcpFlow(name, dst)}
	}
}

// connect decides about a connection on which the client named a host; the zero Name if it did not.
func connect(p *policy.Policy, flows []policy.Flow) (v policy.Verdict) {
	inspect := false
	for i, f := range flows {
		one := p.Connect(f)
		switch {
		case one.Allow:
			inspect = inspect || one.Inspect
		case len(flows) == 2 && i == 0:
			one.Reason = fmt.Sprintf("%s was not resolved for %s here, and %s", f.Addr, flows[1].Name, one.Reason)
			return one
		case f.Name.IsZero():
			one.Reason = "the client named no host, and " + one.Reason
			return one
		default:
			return one
		}
		if i == 0 {
			v = one
		}
	}
	v.Inspect = inspect
	return v
}

// unnamed decides about a connection in a protocol that names no host.
func (n *Network) unnamed(dst netip.AddrPort) (v policy.Verdict, flow policy.Flow) {
	p := n.policy.Load()
	for _, name := range append(n.memory.namesOf(dst.Addr()), policy.Name{}) {
		flow = tcpFlow(name, dst)
		if v = p.Connect(flow); v.Allow && !v.Inspect {
			return v, flow
		}
	}
	if v.Allow {
		v = policy.Verdict{Rule: v.Rule, Reason: "requests on this connection have to be read, and it is not HTTP"}
	}
	return v, flow
}

// target returns where a connection that is allowed leads: to its destination, or to a service of
// the host.
func (n *Network) target(dst netip.AddrPort) (policy.Service, error) {
	if dst.Addr() != policy.HostAddress {
		return policy.Service{Address: dst}, n.refuseOwn(dst.Addr())
	}
	s, ok := n.policy.Load().Service(dst.Port())
	switch {
	case !ok:
		return s, refuse("no service of the host has port %d", dst.Port())
	case s.Socket != "" && n.opts.DialSocket == nil:
		return s, refuse("the service of port %d is a Unix socket, which this gateway does not reach", dst.Port())
	}
	return s, nil
}

// refuseOwn refuses public addresses of the host itself. A server there may count on a firewall for
// other machines, which connections of the host itself do not pass. A private address is allowed by
// a rule with a CIDR, whose author has thought of the servers there.
func (n *Network) refuseOwn(addr netip.Addr) error {
	if !policy.IsPublic(addr) {
		return nil
	}
	own, err := n.opts.Own(addr)
	if err == nil && own {
		err = refuse("%s is an address of the host itself, which only a service of the policy opens", addr)
	}
	return err
}

// A peer is the server that TLS which ends here was meant for.
type peer struct {
	name  policy.Name // zero if the client sent no name
	flows []policy.Flow
}

// host returns the host that the certificates of both sides must be for.
func (p *peer) host(dst netip.AddrPort) string {
	if p.name.IsZero() {
		return dst.Addr().String()
	}
	return p.name.String()
}

// request decides about an HTTP request on a connection. of is nil unless it came within TLS. Where
// rules for paths may decide, which inspect tells, the request is changed to have the path that
// they were asked about.
func (n *Network) request(dst netip.AddrPort, of *peer, q *sniff.Request) (flows []policy.Flow, v policy.Verdict, inspect bool) {
	switch {
	case q.Tunnel:
		return nil, policy.Verdict{Reason: "CONNECT would open a tunnel"}, false
	case q.Host.Port != 0 && q.Host.Port != dst.Port():
		return nil, policy.Verdict{Reason: fmt.Sprintf("the host %s and a connection to port %d", q.Host, dst.Port())}, false
	case q.Host.Addr.IsValid() && q.Host.Addr != dst.Addr():
		return nil, policy.Verdict{Reason: fmt.Sprintf("the host %s and a connection to %s", q.Host, dst.Addr())}, false
	case of != nil && q.Host.Name != of.name:
		return nil, policy.Verdict{Reason: fmt.Sprintf("the host %s on a TLS connection to %s", q.Host, of.host(dst))}, false
	case of != nil && q.Absolute:
		return nil, policy.Verdict{Reason: "a target with the scheme http within TLS"}, false
	case q.Upgrade != "" && q.Upgrade != "websocket":
		return nil, policy.Verdict{Reason: fmt.Sprintf("the upgrade to %q, after which requests could not be read", q.Upgrade)}, false
	}
	p := n.policy.Load()
	if of != nil {
		flows = of.flows
	} else {
		flows = n.claimed(dst, q.Host.Name)
	}
	v = connect(p, flows)
	switch {
	case !v.Allow || !v.Inspect:
		return flows, v, false
	case q.PathError != nil:
		return flows, policy.Verdict{Reason: fmt.Sprintf("a %v", q.PathError)}, true
	case q.Rewrites != "":
		return flows, policy.Verdict{Reason: fmt.Sprintf("the field %s, which changes the request for some servers", q.Rewrites)}, true
	}
	q.RemoveDots()
	for i, f := range flows {
		if one := p.Request(f, q.Method, q.Path); !one.Allow || i == 0 {
			v = one
		}
	}
	return flows, v, true
}
