package policy

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"

	"go.yaml.in/yaml/v3"
)

// Document returns the policy as a document that [Parse] reads: presets are written as their rules,
// and defaults are filled in.
func (p *Policy) Document() ([]byte, error) {
	var d written
	for i := range p.rules {
		r := entry{rule: p.rules[i]}
		if !r.service {
			d.rules = append(d.rules, r)
		} else if s, ok := p.service(r.ports[0].first); ok {
			d.services = append(d.services, s)
			d.serviceRules = append(d.serviceRules, r)
		}
	}
	return d.encode()
}

// written is a document on its way to text.
type written struct {
	head         string // comment above all
	rules        []entry
	services     []Service
	serviceRules []entry
}

// An entry is a rule with comments.
type entry struct {
	rule
	head  string
	hosts map[string]string // after each host
}

func (d *written) encode() ([]byte, error) {
	rules := &yaml.Node{Kind: yaml.SequenceNode}
	for i, e := range d.rules {
		rules.Content = append(rules.Content, e.node(fmt.Sprintf("rules[%d]", i)))
	}
	if len(rules.Content) == 0 {
		rules.Style = yaml.FlowStyle
	}
	top := mapping("version", integer(Version), "rules", rules)
	if len(d.services) > 0 {
		services := &yaml.Node{Kind: yaml.SequenceNode}
		for i, s := range d.services {
			e := d.serviceRules[i]
			n := mapping("port", integer(int(s.Port)), "to", text(s.Target()))
			if e.name != fmt.Sprintf("services[%d]", i) || e.bounded() {
				n.Content = append(mapping("name", text(e.name)).Content, n.Content...)
			}
			n.Content = append(n.Content, e.requests()...)
			n.Content = append(n.Content, e.budgeted()...)
			services.Content = append(services.Content, n)
		}
		top.Content = append(top.Content, mapping("services", services).Content...)
	}
	top.HeadComment = d.head
	var b bytes.Buffer
	enc := yaml.NewEncoder(&b)
	enc.SetIndent(2)
	if err := enc.Encode(top); err != nil {
		return nil, fmt.Errorf("write the policy: %w", err)
	}
	if err := enc.Close(); err != nil {
		return nil, fmt.Errorf("write the policy: %w", err)
	}
	return b.Bytes(), nil
}

// node returns the rule as a mapping. The name that it has by its place is left out.
func (e *entry) node(byPlace string) *yaml.Node {
	n := mapping()
	add := func(key string, value *yaml.Node) { n.Content = append(n.Content, mapping(key, value).Content...) }
	if e.name != byPlace || e.bounded() {
		add("name", text(e.name))
	}
	var hosts []*yaml.Node
	for _, h := range e.hostList() {
		hosts = append(hosts, text(h))
		hosts[len(hosts)-1].LineComment = e.hosts[h]
	}
	action := "allow"
	if e.deny {
		action = "deny"
	}
	add(action, list(0, hosts))
	var ports []*yaml.Node
	for _, r := range e.ports {
		switch {
		case r == portRange{1, 65535}:
			ports = append(ports, text("any"))
		case r.first == r.last:
			ports = append(ports, integer(int(r.first)))
		default:
			ports = append(ports, text(fmt.Sprintf("%d-%d", r.first, r.last)))
		}
	}
	add("ports", list(yaml.FlowStyle, ports))
	var protocols []*yaml.Node
	for _, p := range e.protocols {
		protocols = append(protocols, text(string(p)))
	}
	if e.deny || !slices.Equal(e.protocols, []Protocol{TCP}) {
		add("protocol", list(yaml.FlowStyle, protocols))
	}
	n.Content = append(n.Content, e.requests()...)
	n.Content = append(n.Content, e.budgeted()...)
	n.HeadComment = e.head
	return n
}

// hostList returns the hosts as documents have them, names first.
func (r *rule) hostList() []string {
	var all []string
	for _, p := range r.patterns {
		all = append(all, p.String())
	}
	for _, p := range r.prefixes {
		if p.IsSingleIP() {
			all = append(all, p.Addr().String())
		} else {
			all = append(all, p.String())
		}
	}
	return all
}

// requests returns the keys and values about requests.
func (r *rule) requests() []*yaml.Node {
	if !r.inspect {
		return nil
	}
	n := mapping("inspect", &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!bool", Value: "true"})
	if len(r.methods) > 0 {
		var methods []*yaml.Node
		for _, m := range r.methods {
			methods = append(methods, text(m))
		}
		n.Content = append(n.Content, mapping("methods", list(yaml.FlowStyle, methods)).Content...)
	}
	if len(r.paths) > 0 {
		var paths []*yaml.Node
		for _, p := range r.paths {
			paths = append(paths, text(p.String()))
		}
		n.Content = append(n.Content, mapping("paths", list(0, paths)).Content...)
	}
	return n.Content
}

// budgeted returns the key and value of the budget.
func (r *rule) budgeted() []*yaml.Node {
	if !r.bounded() {
		return nil
	}
	return mapping("budget", r.budget.node()).Content
}

// mapping returns a mapping of keys and their nodes.
func mapping(pairs ...any) *yaml.Node {
	n := &yaml.Node{Kind: yaml.MappingNode}
	for _, p := range pairs {
		switch p := p.(type) {
		case string:
			n.Content = append(n.Content, text(p))
		case *yaml.Node:
			n.Content = append(n.Content, p)
		}
	}
	return n
}

// list returns a sequence, or the one node in its place.
func list(style yaml.Style, nodes []*yaml.Node) *yaml.Node {
	if len(nodes) == 1 {
		return nodes[0]
	}
	return &yaml.Node{Kind: yaml.SequenceNode, Style: style, Content: nodes}
}

func text(s string) *yaml.Node {
	n := new(yaml.Node)
	n.SetString(s) // quoted where YAML would read something else
	return n
}

func integer(i int) *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!int", Value: strconv.Itoa(i)}
}
