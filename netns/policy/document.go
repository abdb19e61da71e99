package policy

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"github.com/sandboxd/sandboxd/internal/document"
)

const (
	// Version is the version of documents that [Parse] reads.
	Version = 1

	maxDocument = 1 << 20
	maxRules    = 1000
	maxTargets  = 1000 // hosts of one rule
	maxList     = 100  // ports, methods or paths of one rule
	maxServices = 100
)

// Policy is a checked set of rules. It is a value without state and safe for concurrent use. The
// zero Policy allows nothing.
type Policy struct {
	rules    []rule
	services []Service // by port
	warnings []Warning
}

// A rule is one entry of a document with its defaults filled in.
type rule struct {
	name      string // as records show it
	at        document.Position
	service   bool // it is an entry of services
	deny      bool
	patterns  []pattern
	prefixes  []netip.Prefix
	protocols []Protocol
	ports     []portRange
	inspect   bool
	methods   []string // empty: every method
	paths     []pathPattern
	budget    Budget
}

type portRange struct{ first, last uint16 }

func (r portRange) contains(port uint16) bool { return r.first <= port && port <= r.last }

// Protocol is a transport protocol.
type Protocol string

// The protocols of rules.
const (
	TCP Protocol = "tcp"
	UDP Protocol = "udp"
)

// Warning is a rule that has no effect.
type Warning struct {
	document.Position
	Rule    string // its name
	Message string
}

func (w Warning) String() string {
	return fmt.Sprintf("%d:%d: %s: %s", w.Line, w.Column, w.Rule, w.Message)
}

// Warnings returns the rules of the document that can never decide anything, in its order. Presets
// are not examined.
func (p *Policy) Warnings() []Warning { return slices.Clone(p.warnings) }

// Inspects reports whether a rule reads requests, so that TLS has to end at the gateway.
func (p *Policy) Inspects() bool {
	return slices.ContainsFunc(p.rules, func(r rule) bool { return r.inspect })
}

// Parse reads a policy document in YAML, or in JSON, which is YAML. It returns every mistake in it,
// each a *[document.Error], joined. An unknown key is a mistake: a restriction that is skipped
// would make a sandbox look safer than it is.
func Parse(data []byte) (*Policy, error) {
	if len(data) > maxDocument {
		return nil, fmt.Errorf("parse the policy: larger than %d bytes", maxDocument)
	}
	root, err := document.Read(data)
	if err != nil {
		return nil, fmt.Errorf("parse the policy: %w", err)
	}
	p := &parser{}
	p.top(root)
	services := p.allServices()
	own, rules := len(p.rules), p.rules
	for _, name := range p.presets {
		preset, err := Preset(name)
		if err != nil {
			return nil, err // checked above
		}
		rules = append(rules, preset.rules...)
	}
	p.checkBudgets(rules)
	if len(p.Errs) > 0 {
		return nil, fmt.Errorf("parse the policy: %w", errors.Join(p.Errs...))
	}
	policy := &Policy{rules: rules, services: services}
	policy.warnings = policy.dead(own)
	return policy, nil
}

// A parser collects the mistakes of a document.
type parser struct {
	document.Reader

	presets  []string
	rules    []rule
	services []Service // that are listed
	opened   []Service // by rules, each with the node of its rule in openedAt
	openedAt []*yaml.Node
	budgets  []budgeted
}

func (p *parser) top(n *yaml.Node) {
	version := false
	p.Mapping(n, "policy", map[string]func(*yaml.Node){
		"version": func(n *yaml.Node) {
			version = true
			if n.Kind != yaml.ScalarNode || n.Value != strconv.Itoa(Version) {
				p.Fail(n, "version is not %d", Version)
			}
		},
		"presets": func(n *yaml.Node) {
			p.List(n, "presets", maxList, func(n *yaml.Node) error {
				if !slices.Contains(Presets(), n.Value) {
					return noPreset(n.Value)
				}
				p.presets = append(p.presets, n.Value)
				return nil
			})
		},
		"rules": func(n *yaml.Node) {
			switch {
			case n.Kind != yaml.SequenceNode:
				p.Fail(n, "rules is no list")
			case len(n.Content) > maxRules:
				p.Fail(n, "more than %d rules", maxRules)
			default:
				for i, r := range n.Content {
					p.rule(r, i)
				}
			}
		},
		"services": func(n *yaml.Node) {
			switch {
			case n.Kind != yaml.SequenceNode:
				p.Fail(n, "services is no list")
			case len(n.Content) > maxServices:
				p.Fail(n, "more than %d services", maxServices)
			default:
				for i, s := range n.Content {
					p.service(s, i)
				}
			}
		},
	})
	if n.Kind == yaml.MappingNode && !version {
		p.Fail(n, "the version is missing; write version: %d", Version)
	}
}

func (p *parser) rule(n *yaml.Node, index int) {
	r := rule{name: fmt.Sprintf("rules[%d]", index), at: document.At(n)}
	actions := 0
	targets := func(deny bool) func(*yaml.Node) {
		return func(n *yaml.Node) {
			actions++
			r.deny = deny
			p.List(n, "hosts", maxTargets, r.target)
		}
	}
	var budget *yaml.Node
	fields := p.common(&r, &budget)
	fields["allow"] = targets(false)
	fields["deny"] = targets(true)
	fields["ports"] = func(n *yaml.Node) { p.List(n, "ports", maxList, r.port) }
	fields["protocol"] = func(n *yaml.Node) { p.List(n, "protocol", 2, r.protocol) }
	p.Mapping(n, "rule", fields)
	if n.Kind != yaml.MappingNode {
		return
	}
	if actions != 1 {
		p.Fail(n, "a rule has either allow or deny")
	}
	p.checkRequests(n, &r)
	p.hostRule(n, &r)
	r.defaults()
	if r.inspect && !r.deny && slices.Contains(r.protocols, UDP) {
		p.Fail(n, "requests over udp are not inspected")
	}
	p.note(&r, budget, fmt.Sprintf("rules[%d]", index))
	p.rules = append(p.rules, r)
}

// common returns the readers of the keys that rules and services share. They set budget to the node
// of the rule's budget.
func (p *parser) common(r *rule, budget **yaml.Node) map[string]func(*yaml.Node) {
	return map[string]func(*yaml.Node){
		"name": func(n *yaml.Node) {
			if n.Kind != yaml.ScalarNode || n.Value == "" || len(n.Value) > 100 || strings.ContainsFunc(n.Value, control) {
				p.Fail(n, "name is no line of 1 to 100 bytes")
			} else {
				r.name = n.Value
			}
		},
		"inspect": func(n *yaml.Node) {
			if err := n.Decode(&r.inspect); err != nil || n.Tag != "!!bool" {
				p.Fail(n, "inspect is neither true nor false")
			}
		},
		"methods": func(n *yaml.Node) { p.List(n, "methods", maxList, r.method) },
		"paths":   func(n *yaml.Node) { p.List(n, "paths", maxList, r.path) },
		"budget": func(n *yaml.Node) {
			*budget = n
			p.budget(&r.budget)(n)
		},
	}
}

func (p *parser) checkRequests(n *yaml.Node, r *rule) {
	if (len(r.methods) > 0 || len(r.paths) > 0) && !r.inspect {
		p.Fail(n, "methods and paths are seen where requests are read only; add inspect: true")
	}
}

func control(c rune) bool { return unicode.IsControl(c) || c == utf8.RuneError }

// defaults fills in the ports and protocols that the document leaves out. A rule that allows opens
// the ports of the web; one that denies closes all.
func (r *rule) defaults() {
	if len(r.protocols) == 0 {
		r.protocols = []Protocol{TCP}
		if r.deny {
			r.protocols = []Protocol{TCP, UDP}
		}
	}
	if len(r.ports) == 0 {
		r.ports = []portRange{{80, 80}, {443, 443}}
		if r.deny {
			r.ports = []portRange{{1, 65535}}
		}
	}
}

// target adds a host: a name, a suffix, an address or a CIDR.
func (r *rule) target(n *yaml.Node) error {
	s := n.Value
	if addr, err := netip.ParseAddr(s); err == nil {
		return r.prefix(netip.PrefixFrom(addr, addr.BitLen()), s)
	}
	if strings.Contains(s, "/") {
		prefix, err := netip.ParsePrefix(s)
		if err != nil {
			return err
		}
		return r.prefix(prefix, s)
	}
	p, err := parsePattern(s)
	if err != nil {
		return err
	}
	r.patterns = append(r.patterns, p)
	return nil
}

func (r *rule) prefix(prefix netip.Prefix, s string) error {
	addr := prefix.Addr()
	switch {
	case addr.Zone() != "":
		return fmt.Errorf("address %q has a zone", s)
	case addr.Is4In6(), nat64.Overlaps(prefix) && prefix.Bits() >= nat64.Bits():
		return fmt.Errorf("address %q stands for an IPv4 address; write that", s)
	case prefix != prefix.Masked():
		return fmt.Errorf("CIDR %q has bits beyond its length; write %s", s, prefix.Masked())
	}
	if !r.deny && prefix == netip.PrefixFrom(HostAddress, HostAddress.BitLen()) {
		return fmt.Errorf("%s is the address of %s; write that name", s, HostName)
	}
	if !r.deny && closed(prefix) {
		_, name := classify(addr)
		return fmt.Errorf("%s is %s and never reached from a sandbox", s, name)
	}
	r.prefixes = append(r.prefixes, prefix)
	return nil
}

func (r *rule) port(n *yaml.Node) error {
	if n.Value == "any" {
		r.ports = append(r.ports, portRange{1, 65535})
		return nil
	}
	first, last, isRange := strings.Cut(n.Value, "-")
	if !isRange {
		last = first
	}
	f, err1 := strconv.ParseUint(first, 10, 16)
	l, err2 := strconv.ParseUint(last, 10, 16)
	if err1 != nil || err2 != nil || f == 0 || f > l || first[0] == '0' || last[0] == '0' {
		return fmt.Errorf("%q is no port from 1 to 65535, no range as 8000-8999 and not any", n.Value)
	}
	r.ports = append(r.ports, portRange{uint16(f), uint16(l)})
	return nil
}

func (r *rule) protocol(n *yaml.Node) error {
	switch p := Protocol(n.Value); p {
	case TCP, UDP:
		r.protocols = append(r.protocols, p)
		return nil
	default:
		return fmt.Errorf("%q is neither tcp nor udp", n.Value)
	}
}

func (r *rule) method(n *yaml.Node) error {
	if !validMethod(n.Value) {
		return fmt.Errorf("%q is no method of HTTP in upper case", n.Value)
	}
	r.methods = append(r.methods, n.Value)
	return nil
}

// validMethod accepts upper-case letters and hyphens. Methods are case-sensitive, and servers that
// take "get" for GET would read another one than the rule.
func validMethod(s string) bool {
	return s != "" && len(s) <= 32 && strings.Trim(s, "ABCDEFGHIJKLMNOPQRSTUVWXYZ-") == ""
}

func (r *rule) path(n *yaml.Node) error {
	p, err := parsePathPattern(n.Value)
	if err != nil {
		return err
	}
	r.paths = append(r.paths, p)
	return nil
}
