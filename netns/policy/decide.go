package policy

import (
	"fmt"
	"net/netip"
	"slices"
)

// Verdict is a decision.
type Verdict struct {
	Allow bool `json:"allow"`
	// Rule is the name of the rule that decided; empty if none matched, or an address is closed to all
	// rules.
	Rule string `json:"rule,omitempty"`
	// Reason explains a refusal, for the record and for the program that was refused.
	Reason string `json:"reason,omitempty"`
	// Inspect reports that requests of the connection must be read and asked for one by one with
	// [Policy.Request]. Without that the connection is not allowed.
	Inspect bool `json:"inspect,omitempty"`
}

// Flow is a connection, or a pair of addresses of UDP, from a sandbox.
type Flow struct {
	Protocol Protocol
	// Name is the name that the gateway resolved Addr for. The zero Name means that the sandbox was
	// never given this address: only rules with addresses match then.
	Name Name
	Addr netip.Addr
	Port uint16
}

// Resolve decides about a DNS question: a name is resolved if a connection to it could be allowed.
// Names that are reached by an address rule only are not resolved.
func (p *Policy) Resolve(name Name) Verdict {
	verdict := Verdict{Reason: fmt.Sprintf("no rule allows %s", name)}
	for i := range p.rules {
		r := &p.rules[i]
		switch {
		case !r.hasName(name):
		case !r.deny:
			if !verdict.Allow {
				verdict = Verdict{Allow: true, Rule: r.name}
			}
		case r.total():
			return Verdict{Rule: r.name, Reason: fmt.Sprintf("%s is denied", name)}
		}
	}
	return verdict
}

// total reports whether a rule that denies leaves nothing of its hosts.
func (r *rule) total() bool {
	return len(r.methods) == 0 && len(r.paths) == 0 && slices.Contains(r.protocols, TCP) && slices.Contains(r.protocols, UDP) &&
		slices.Contains(r.ports, portRange{1, 65535})
}

// Reachable reports whether a connection to the address, resolved for the name, could be allowed on
// some port. The gateway leaves the other addresses out of answers: a program that got one would
// only wait for a refusal. The name itself is asked about with [Policy.Resolve].
func (p *Policy) Reachable(name Name, addr netip.Addr) bool {
	addr, kind, refusal := target(Flow{Addr: addr, Port: 1})
	if refusal != "" {
		return false
	}
	for _, protocol := range []Protocol{TCP, UDP} {
		var open, shut []portRange
		for i := range p.rules {
			r := &p.rules[i]
			switch {
			case !slices.Contains(r.protocols, protocol), !r.hasHost(name, addr, kind):
			case !r.deny:
				open = append(open, r.ports...)
			case protocol == UDP || len(r.methods) == 0 && len(r.paths) == 0: // as in Connect
				shut = append(shut, r.ports...)
			}
		}
		if !covered(open, shut) {
			return true
		}
	}
	return false
}

// covered reports whether every port of the ranges is in one of the others.
func covered(ranges, by []portRange) bool {
	slices.SortFunc(by, func(a, b portRange) int { return int(a.first) - int(b.first) })
	slices.SortFunc(ranges, func(a, b portRange) int { return int(a.first) - int(b.first) })
	next, end := 0, 0 // end is the last port of all before next
	for _, r := range ranges {
		for first := int(r.first); first <= int(r.last); first = end + 1 {
			for next < len(by) && int(by[next].first) <= first {
				end = max(end, int(by[next].last))
				next++
			}
			if end < first {
				return false
			}
		}
	}
	return true
}

// Connect decides about a connection. The gateway dials the address that it asked for and no other,
// or for [HostAddress] the target of [Policy.Service].
func (p *Policy) Connect(f Flow) Verdict {
	addr, kind, refusal := target(f)
	if refusal != "" {
		return Verdict{Reason: refusal}
	}
	verdict := Verdict{Reason: fmt.Sprintf("no rule allows %s", f)}
	plain, inspect := false, false // plain: allowed without reading requests
	for i := range p.rules {
		r := &p.rules[i]
		switch {
		case !r.hasTransport(f), !r.hasHost(f.Name, addr, kind):
		case r.deny && (f.Protocol == UDP || len(r.methods) == 0 && len(r.paths) == 0):
			return Verdict{Rule: r.name, Reason: fmt.Sprintf("%s is denied", f)}
		case r.deny:
			inspect = true // some requests are denied: read them all, which over UDP (HTTP/3) none can
		case !verdict.Allow:
			verdict = Verdict{Allow: true, Rule: r.name}
			plain = !r.inspect
		default:
			plain = plain || !r.inspect
		}
		if r.bounded() && r.ofRequests() && r.hasTransport(f) && r.hasHost(f.Name, addr, kind) {
			inspect = true // some requests count in a budget: read them all
		}
	}
	verdict.Inspect = verdict.Allow && (inspect || !plain)
	return verdict
}

// Request decides about one HTTP request on a connection that [Policy.Connect] allowed with
// Inspect. The name and port of the flow are the connection's; the gateway has compared them with
// the request's own.
func (p *Policy) Request(f Flow, method string, path Path) Verdict {
	addr, kind, refusal := target(f)
	switch {
	case refusal != "":
		return Verdict{Reason: refusal}
	case !validMethod(method):
		return Verdict{Reason: fmt.Sprintf("method %q is malformed", method)}
	case path.s == "":
		return Verdict{Reason: "the request has no path"}
	}
	verdict := Verdict{Reason: fmt.Sprintf("no rule allows %s %s on %s", method, path, f)}
	for i := range p.rules {
		r := &p.rules[i]
		switch {
		case !r.hasTransport(f), !r.hasHost(f.Name, addr, kind), !r.hasRequest(method, path):
		case r.deny:
			return Verdict{Rule: r.name, Reason: fmt.Sprintf("%s %s on %s is denied", method, path, f)}
		case !verdict.Allow:
			verdict = Verdict{Allow: true, Rule: r.name}
		}
	}
	return verdict
}

// target returns the address that a flow reaches and its kind, or the reason to refuse it whatever
// the rules say.
func target(f Flow) (addr netip.Addr, k kind, refusal string) {
	addr = canonical(f.Addr)
	k, name := classify(addr)
	switch {
	case f.Port == 0:
		return addr, k, "port 0"
	case k == never:
		return addr, k, fmt.Sprintf("address %s is %s", f.Addr, name)
	default:
		return addr, k, ""
	}
}

func (r *rule) hasTransport(f Flow) bool {
	return slices.Contains(r.protocols, f.Protocol) && slices.ContainsFunc(r.ports, func(p portRange) bool { return p.contains(f.Port) })
}

// hasName reports whether a pattern of the rule covers a name. [HostName] is opened by itself only.
func (r *rule) hasName(name Name) bool {
	return slices.ContainsFunc(r.patterns, func(p pattern) bool {
		return p.matches(name) && (r.deny || name.s != HostName || !p.wildcard)
	})
}

// hasHost reports whether the rule covers the host of a flow. A rule that denies covers an address
// by any CIDR around it. [HostName] and [HostAddress] are allowed together or not at all: otherwise
// the name would open an address elsewhere, or another name the host.
func (r *rule) hasHost(name Name, addr netip.Addr, k kind) bool {
	if !r.deny && (name.s == HostName) != (k == hostOnly) {
		return false
	}
	if (k == public || k == hostOnly || r.deny) && r.hasName(name) {
		return true
	}
	return slices.ContainsFunc(r.prefixes, func(p netip.Prefix) bool { return p.Contains(addr) && (r.deny || k.openedBy(p)) })
}

func (r *rule) hasRequest(method string, path Path) bool {
	if len(r.methods) > 0 && !slices.Contains(r.methods, method) {
		return false
	}
	match := pathPattern.covers
	if r.deny {
		match = pathPattern.touches
	}
	return len(r.paths) == 0 || slices.ContainsFunc(r.paths, func(p pathPattern) bool { return match(p, path) })
}

// String formats a flow for people: "tcp example.com (93.184.215.14) port 443".
func (f Flow) String() string {
	if f.Name.IsZero() {
		return fmt.Sprintf("%s %s port %d", f.Protocol, f.Addr, f.Port)
	}
	return fmt.Sprintf("%s %s (%s) port %d", f.Protocol, f.Name, f.Addr, f.Port)
}
