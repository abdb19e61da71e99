package policy

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/document"
)

// HostName is the name of the host's own services. Only rules and services that have exactly this
// name open it: no suffix, no "*" and no CIDR does.
const HostName = "host.sandboxd.internal"

// HostAddress is the one address that [HostName] has inside, on every host. It is of a range for
// documentation (RFC 5737), beside netns.Address4 and netns.Nameserver, and hides no server.
// The gateway never asks the host's resolver for the name and never dials the address: it connects
// to the [Service] of the port.
var HostAddress = netip.MustParseAddr("192.0.2.2")

// PeerAddresses is the range of the addresses of sandboxes in named networks. It is reserved for
// measurements (RFC 2544): no host of the Internet has such an address. For a sandbox in a named
// network no policy is asked about it.
var PeerAddresses = netip.MustParsePrefix("198.18.0.0/15")

// PeerRule returns the rule that records show for connections over a named network.
func PeerRule(network string) string { return peerRule + network }

const peerRule = "network "

// toPeer reports whether a recorded flow went over a named network.
func toPeer(f api.Flow) bool {
	addr, err := netip.ParseAddr(f.Address)
	return err == nil && PeerAddresses.Contains(addr) && strings.HasPrefix(f.Rule, peerRule)
}

// maxSocket is the longest name of a socket, that of a label in DNS.
const maxSocket = 63

// IsSocketName reports whether an operator can give a Unix socket this name. Documents have names
// and never paths: their author chooses among the sockets that the operator has named.
func IsSocketName(s string) bool {
	inner := func(c rune) bool { return 'a' <= c && c <= 'z' || '0' <= c && c <= '9' || c == '-' }
	return s != "" && len(s) <= maxSocket && s[0] != '-' && s[len(s)-1] != '-' && !strings.ContainsFunc(s, func(c rune) bool { return !inner(c) })
}

// Service is a server of the host itself that a policy opens, as a port of [HostName]. Parse takes
// any: the caller decides which services the author of a document may name.
type Service struct {
	// Rule is the name of the first rule that opens the service.
	Rule string
	Port uint16
	// Address is on the host's loopback; the zero AddrPort if Socket is set.
	Address netip.AddrPort
	// Socket is the operator's name of a Unix socket; see [IsSocketName].
	Socket string
}

// Target returns the service as documents name it: an address and port, or unix: and a name.
func (s Service) Target() string {
	if s.Socket != "" {
		return "unix:" + s.Socket
	}
	return s.Address.String()
}

// Services returns the host's services that the document names, by port. Those that other rules
// deny are among them.
func (p *Policy) Services() []Service { return slices.Clone(p.services) }

// Service returns where a connection to a port of [HostName] leads. It is false for a port that
// the policy does not open, or denies as a whole.
func (p *Policy) Service(port uint16) (Service, bool) {
	s, ok := p.service(port)
	return s, ok && p.Connect(Flow{TCP, Name{HostName}, HostAddress, port}).Allow
}

func (p *Policy) service(port uint16) (Service, bool) {
	i, ok := slices.BinarySearchFunc(p.services, port, func(s Service, port uint16) int { return int(s.Port) - int(port) })
	if !ok {
		return Service{}, false
	}
	return p.services[i], true
}

// service reads an entry of services, which is also a rule that allows its port.
func (p *parser) service(n *yaml.Node, index int) {
	r := rule{
		name: fmt.Sprintf("services[%d]", index), at: document.At(n), service: true,
		patterns: []pattern{{name: HostName}}, protocols: []Protocol{TCP},
	}
	var s Service
	to := false
	var budget *yaml.Node
	fields := p.common(&r, &budget)
	fields["port"] = func(n *yaml.Node) {
		p.List(n, "port", 1, r.port)
		if len(r.ports) == 1 && r.ports[0].first != r.ports[0].last {
			p.Fail(n, "port: a service has a single one")
		}
	}
	fields["to"] = func(n *yaml.Node) {
		to = true
		p.List(n, "to", 1, s.target)
	}
	p.Mapping(n, "service", fields)
	if n.Kind != yaml.MappingNode {
		return
	}
	if !to {
		p.Fail(n, "a service has to: an address of the host's loopback with its port, or unix: with the operator's name of a socket")
	}
	p.checkRequests(n, &r)
	if len(r.ports) != 1 {
		p.Fail(n, "a service has a port")
		return
	}
	s.Rule, s.Port = r.name, r.ports[0].first
	for _, other := range p.services {
		if other.Port == s.Port {
			p.Fail(n, "port %d is that of %s already", s.Port, other.Rule)
		}
	}
	p.services = append(p.services, s)
	p.note(&r, budget, fmt.Sprintf("services[%d]", index))
	p.rules = append(p.rules, r)
}

// target reads where a service is. A port forwarded to another machine would be a connection that
// no rule was asked about, so addresses are those of loopback only.
func (s *Service) target(n *yaml.Node) error {
	if name, ok := strings.CutPrefix(n.Value, "unix:"); ok {
		if !IsSocketName(name) {
			return fmt.Errorf("%q is not the name of a socket, which has up to %d lower-case letters, digits and inner hyphens; the operator gives it by serve --service NAME=unix:PATH", name, maxSocket)
		}
		s.Socket = name
		return nil
	}
	address, err := netip.ParseAddrPort(n.Value)
	if err != nil || !address.Addr().IsLoopback() || address.Addr().Is4In6() || address.Addr().Zone() != "" || address.Port() == 0 {
		return fmt.Errorf("%q is neither an address of the host's loopback with a port, such as 127.0.0.1:8080, nor unix: with the operator's name of a socket", n.Value)
	}
	s.Address = address
	return nil
}

// hostRule keeps the ports of a rule that allows [HostName], before defaults are filled in.
func (p *parser) hostRule(n *yaml.Node, r *rule) {
	if r.deny || !slices.Contains(r.patterns, pattern{name: HostName}) {
		return
	}
	single := func(p portRange) bool { return p.first == p.last }
	switch {
	case len(r.ports) == 0:
		p.Fail(n, "a rule for %s has ports: each opens the same port of the host's loopback", HostName)
	case slices.ContainsFunc(r.ports, func(p portRange) bool { return !single(p) }):
		p.Fail(n, "the ports of %s are listed one by one", HostName)
	case slices.Contains(r.protocols, UDP):
		p.Fail(n, "%s is reached over tcp only", HostName)
	default:
		for _, port := range r.ports {
			p.opened = append(p.opened, Service{Rule: r.name, Port: port.first, Address: netip.AddrPortFrom(loopback, port.first)})
		}
		p.openedAt = append(p.openedAt, slices.Repeat([]*yaml.Node{n}, len(r.ports))...)
	}
}

var loopback = netip.AddrFrom4([4]byte{127, 0, 0, 1})

// allServices joins the services of rules to those that are listed as services, sorted by port.
func (p *parser) allServices() []Service {
	all := slices.Clone(p.services)
	listed, opened := map[uint16]string{}, map[uint16]bool{} // a document has up to 100,000 ports
	for _, s := range p.services {
		listed[s.Port] = s.Rule
	}
	for i, s := range p.opened {
		switch rule, ok := listed[s.Port]; {
		case ok:
			p.Fail(p.openedAt[i], "port %d of %s is that of %s already; write inspect, methods and paths there", s.Port, HostName, rule)
		case !opened[s.Port]:
			opened[s.Port] = true
			all = append(all, s)
		}
	}
	slices.SortFunc(all, func(a, b Service) int { return int(a.Port) - int(b.Port) })
	return all
}
