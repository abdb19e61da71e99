package policy

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	"go.yaml.in/yaml/v3"

	"github.com/sandboxd/sandboxd/api"
)

const (
	// MaxBudgets bounds the rules of one document that have a budget: their use is reported and kept.
	MaxBudgets = 32
	// maxCount bounds the numbers of a budget: float64, and with it JSON, has them exactly.
	maxCount = 1 << 53
	maxRate  = 1 << 20 // per second
)

// Budget bounds all that one rule covers while the sandbox runs. Zero means unbounded, in each
// field.
type Budget struct {
	// BytesOut and BytesIn are bytes from and to the sandbox.
	BytesOut, BytesIn int64
	// Connections is the number of connections; of a rule with methods or paths, of those that carried
	// a request of the rule.
	Connections int64
	// Hosts is the number of different names, and of addresses without a name.
	Hosts int64
	// ConnectionRate is in connections per second.
	ConnectionRate float64
}

// bounds returns the fields by the keys of documents, in the order in which these are written.
func (b *Budget) bounds() []bound {
	return []bound{
		{"bytes_out", float64(b.BytesOut)},
		{"bytes_in", float64(b.BytesIn)},
		{"connections", float64(b.Connections)},
		{"hosts", float64(b.Hosts)},
		{"connection_rate", b.ConnectionRate},
	}
}

type bound struct {
	key  string
	most float64 // 0: unbounded
}

func (b bound) String() string { return b.key + ": " + strconv.FormatFloat(b.most, 'f', -1, 64) }

// RuleBudget is the budget of one rule.
type RuleBudget struct {
	Rule string // its name, which no other rule of the policy has
	Budget
}

// Budgets returns the budgets of rules, in the order of the document.
func (p *Policy) Budgets() (all []RuleBudget) {
	for i := range p.rules {
		if r := &p.rules[i]; r.bounded() {
			all = append(all, RuleBudget{r.name, r.budget})
		}
	}
	return all
}

func (r *rule) bounded() bool { return r.budget != Budget{} }

// ofRequests reports whether the rule covers some requests on a connection and not others.
func (r *rule) ofRequests() bool { return len(r.methods) > 0 || len(r.paths) > 0 }

// Charged returns the names of the rules with budgets that a flow counts in: each that covers it,
// whichever rule allows it. Method and path are those of a request that [Policy.Request] allowed.
// An empty method stands for a connection, or for requests that no rule tells apart.
func (p *Policy) Charged(f Flow, method string, path Path) (rules []string) {
	addr, kind, refusal := target(f)
	if refusal != "" {
		return nil
	}
	for i := range p.rules {
		if r := &p.rules[i]; r.bounded() && r.charges(f, addr, kind, method, path) {
			rules = append(rules, r.name)
		}
	}
	return rules
}

// charges reports whether a flow counts in the budget of the rule, if it has one.
func (r *rule) charges(f Flow, addr netip.Addr, k kind, method string, path Path) bool {
	switch {
	case !r.hasTransport(f), !r.hasHost(f.Name, addr, k):
		return false
	case method == "":
		return !r.ofRequests()
	default:
		return r.hasRequest(method, path)
	}
}

// A budgeted rule is one that the parser has found to have a budget.
type budgeted struct {
	index int // in parser.rules
	at    *yaml.Node
	named bool
}

// budget reads the budget of a rule.
func (p *parser) budget(b *Budget) func(*yaml.Node) {
	count := func(key string, to *int64) func(*yaml.Node) {
		return func(n *yaml.Node) {
			v, err := strconv.ParseInt(n.Value, 10, 64)
			if n.Kind != yaml.ScalarNode || n.Tag != "!!int" || err != nil || v < 1 || v > maxCount {
				p.Fail(n, "%s is no number from 1 to %d", key, int64(maxCount))
				return
			}
			*to = v
		}
	}
	return func(n *yaml.Node) {
		p.Mapping(n, "budget", map[string]func(*yaml.Node){
			"bytes_out":   count("bytes_out", &b.BytesOut),
			"bytes_in":    count("bytes_in", &b.BytesIn),
			"connections": count("connections", &b.Connections),
			"hosts":       count("hosts", &b.Hosts),
			"connection_rate": func(n *yaml.Node) {
				v, err := strconv.ParseFloat(n.Value, 64)
				if n.Kind != yaml.ScalarNode || n.Tag != "!!int" && n.Tag != "!!float" || err != nil || !(v > 0 && v <= maxRate) {
					p.Fail(n, "connection_rate is no number of connections per second up to %d", maxRate)
					return
				}
				b.ConnectionRate = v
			},
		})
		if n.Kind == yaml.MappingNode && len(n.Content) == 0 {
			p.Fail(n, "budget is empty")
		}
	}
}

// note keeps where the budget of the next rule stands.
func (p *parser) note(r *rule, at *yaml.Node, byPlace string) {
	if at == nil {
		return
	}
	if r.deny {
		p.Fail(at, "a rule that denies has no budget")
	}
	p.budgets = append(p.budgets, budgeted{len(p.rules), at, r.name != byPlace})
}

// checkBudgets is called with the rules of presets.
func (p *parser) checkBudgets(all []rule) {
	if len(p.budgets) == 0 {
		return
	}
	if len(p.budgets) > MaxBudgets {
		p.Fail(p.budgets[MaxBudgets].at, "more than %d rules with a budget", MaxBudgets)
	}
	names := make(map[string]int, len(all))
	for i := range all {
		names[all[i].name]++
	}
	for _, b := range p.budgets {
		switch name := p.rules[b.index].name; {
		case !b.named:
			p.Fail(b.at, "a rule with a budget has a name, under which its use is kept when the policy is changed")
		case names[name] > 1:
			p.Fail(b.at, "another rule has the name %q too; the use of a budget is kept by name", name)
		}
	}
}

// node returns the budget as a mapping.
func (b *Budget) node() *yaml.Node {
	n := mapping()
	for _, one := range b.bounds() {
		switch {
		case one.most == 0:
		case one.most == float64(int64(one.most)):
			n.Content = append(n.Content, mapping(one.key, integer(int(one.most))).Content...)
		default:
			value := &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!float", Value: strconv.FormatFloat(one.most, 'g', -1, 64)}
			n.Content = append(n.Content, mapping(one.key, value).Content...)
		}
	}
	return n
}

// unbounded looks for something that a budget of a bounds and no budget of b does. A budget of b
// takes the place of one of a if it is no larger, and covers all that b allows of what the other
// covers: then what b lets pass there fits into both.
func (s *samples) unbounded(a, b *Policy, work *int) (Example, bool) {
	for i := range a.rules {
		r := &a.rules[i]
		if !r.bounded() {
			continue
		}
		var wanted []bound
		var stand [][]*rule // those of b that may take the place of each
		for d, limit := range r.budget.bounds() {
			if limit.most == 0 {
				continue
			}
			var rules []*rule
			for j := range b.rules {
				if most := b.rules[j].budget.bounds()[d].most; most > 0 && most <= limit.most {
					rules = append(rules, &b.rules[j])
				}
			}
			wanted, stand = append(wanted, limit), append(stand, rules)
		}
		e, found := s.each(r, b, work, func(f Flow, addr netip.Addr, k kind, method string, path Path) (beyond string) {
			for d := range stand {
				stand[d] = slices.DeleteFunc(stand[d], func(o *rule) bool { return !o.charges(f, addr, k, method, path) })
				if len(stand[d]) == 0 {
					return fmt.Sprintf("%s of rule %s", wanted[d], r.name)
				}
			}
			return ""
		})
		if found || *work <= 0 {
			return e, found
		}
	}
	return Example{}, false
}

// each calls f with what a rule covers and a policy allows, until f returns what an example is
// beyond.
func (s *samples) each(
	r *rule, p *Policy, work *int, f func(flow Flow, addr netip.Addr, k kind, method string, path Path) (beyond string),
) (Example, bool) {
	cost := len(p.rules) + 1
	for _, name := range s.names {
		if !name.IsZero() && !p.Resolve(name).Allow {
			continue // there is no flow with this name
		}
		for _, at := range s.addrs {
			addr, k, refusal := target(Flow{Addr: at, Port: 1})
			if refusal != "" || !r.hasHost(name, addr, k) {
				continue
			}
			for _, flow := range s.flows(r, name, at) {
				if *work -= cost; *work <= 0 {
					return Example{}, false
				}
				v := p.Connect(flow)
				switch {
				case !v.Allow:
					continue
				case !v.Inspect && !r.charges(flow, addr, k, "", Path{}):
					continue
				case !v.Inspect:
					if beyond := f(flow, addr, k, "", Path{}); beyond != "" {
						return Example{Flow: flow, Beyond: beyond}, true
					}
					continue
				}
				for _, method := range s.methods {
					for _, path := range s.paths {
						if *work -= cost; *work <= 0 {
							return Example{}, false
						}
						if !r.charges(flow, addr, k, method, path) || !p.Request(flow, method, path).Allow {
							continue
						}
						if beyond := f(flow, addr, k, method, path); beyond != "" {
							return Example{Flow: flow, Method: method, Path: path.s, Beyond: beyond}, true
						}
					}
				}
			}
		}
	}
	return Example{}, false
}

// Replay decides about the flows of one record in their order, and counts them in the budgets of
// rules as the gateway would. Rates are not among these: a record does not have the begin of each
// connection. Of rules with methods or paths it does not know the connections either.
type Replay struct {
	policy *Policy
	uses   map[string]*use
}

type use struct {
	Budget // what is left of it, unless it is unbounded
	limit  Budget
	hosts  map[string]bool
}

// Replay begins a record.
func (p *Policy) Replay() *Replay {
	r := &Replay{policy: p, uses: make(map[string]*use)}
	for _, b := range p.Budgets() {
		r.uses[b.Rule] = &use{Budget: b.Budget, limit: b.Budget, hosts: make(map[string]bool)}
	}
	return r
}

// Recorded decides about the next flow, as [Policy.Recorded] does, and refuses what is beyond the
// budget of a rule.
func (r *Replay) Recorded(f api.Flow) Verdict {
	v := r.policy.Recorded(f)
	if !v.Allow || len(r.uses) == 0 || f.Kind == api.FlowQuery || f.Protocol == "dns" || toPeer(f) {
		return v
	}
	a, err := readFlow(f)
	if err != nil {
		return v
	}
	if !r.policy.Connect(a.Flow).Inspect {
		a.method = "" // no rule tells its requests apart
	}
	for _, name := range r.policy.Charged(a.Flow, a.method, a.path) {
		u := r.uses[name]
		if reason := u.take(f, a); reason != "" {
			return Verdict{Rule: name, Reason: reason}
		}
	}
	return v
}

// take counts a flow, or returns the reason to refuse it.
func (u *use) take(f api.Flow, a act) string {
	out, in, connections := f.Out, f.In, int64(0)
	if f.Kind == api.FlowConnection {
		connections = 1
		if f.Protocol == "http" {
			out, in = 0, 0 // those of its requests, which are recorded
		}
	}
	host := a.Name.s
	if host == "" {
		host = canonical(a.Addr).String()
	}
	hosts := int64(0)
	if !u.hosts[host] {
		hosts = 1
	}
	for _, c := range []struct {
		left     *int64
		limit, n int64
		what     string
	}{
		{&u.BytesOut, u.limit.BytesOut, out, "bytes out"},
		{&u.BytesIn, u.limit.BytesIn, in, "bytes in"},
		{&u.Connections, u.limit.Connections, connections, "connections"},
		{&u.Hosts, u.limit.Hosts, hosts, "hosts"},
	} {
		if c.limit > 0 && c.n > *c.left {
			if c.what == "bytes out" || c.what == "bytes in" {
				*c.left = 0 // as the gateway, which cuts the connection
			}
			return UsedUp(c.limit, c.what)
		}
		if c.limit > 0 {
			*c.left -= c.n
		}
	}
	u.hosts[host] = true
	return ""
}

// UsedUp returns the reason of a refusal beyond the budget of a rule.
func UsedUp(limit int64, what string) string {
	return fmt.Sprintf("the rule's budget of %d %s is used up", limit, what)
}
