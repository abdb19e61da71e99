package gateway

import (
	"maps"
	"slices"
	"sync"

	"github.com/sandboxd/sandboxd/netns/policy"
)

// RuleSpent is the used part of the budget of one rule. It is kept by the rule's name: a rule of a
// new policy goes on where the one before with its name has ended.
type RuleSpent struct {
	Rule        string
	BytesOut    int64 `json:",omitempty"`
	BytesIn     int64 `json:",omitempty"`
	Connections int64 `json:",omitempty"`
	Hosts       int64 `json:",omitempty"`
	// Known are some of the hosts; see [Spent].
	Known []string `json:",omitempty"`
}

// MaxRuleSpent bounds the rules of one [Event], whose use of budgets has changed.
const MaxRuleSpent = 4

// rules are the budgets of a policy's rules, by name. It does not change: a new policy has another
// one, with the ledgers of the rules that it has too.
type rules struct {
	policy  *policy.Policy
	ledgers map[string]*ledger
	names   []string // sorted
	next    *turn
}

// A turn is the position of the next report in the names. Reports go around, so that each rule is
// reported while others change.
type turn struct {
	mu sync.Mutex
	at string
}

// newRules returns the budgets of a policy. Those of names that before has are the same ledgers,
// with new bounds.
func (n *Network) newRules(p *policy.Policy, before *rules, spent []RuleSpent) *rules {
	r := &rules{policy: p, ledgers: make(map[string]*ledger), next: new(turn)}
	for _, b := range p.Budgets() {
		bounds := Budget{BytesOut: b.BytesOut, BytesIn: b.BytesIn, Connections: b.Connections, Hosts: b.Hosts, ConnectionRate: b.ConnectionRate}
		if before != nil && before.ledgers[b.Rule] != nil {
			r.ledgers[b.Rule] = before.ledgers[b.Rule]
			r.ledgers[b.Rule].bound(bounds)
			continue
		}
		var s Spent
		if i := slices.IndexFunc(spent, func(s RuleSpent) bool { return s.Rule == b.Rule }); i >= 0 {
			of := spent[i]
			s = Spent{BytesOut: of.BytesOut, BytesIn: of.BytesIn, Connections: of.Connections, Hosts: of.Hosts, Known: of.Known}
		}
		r.ledgers[b.Rule] = newLedger(bounds, s, n.opts.Now)
		r.ledgers[b.Rule].rule = b.Rule
	}
	r.names = slices.Sorted(maps.Keys(r.ledgers))
	return r
}

// charged returns the ledgers of the rules that flows count in.
func (r *rules) charged(flows []policy.Flow, method string, path policy.Path) (all []*ledger) {
	if len(r.ledgers) == 0 {
		return nil
	}
	for _, f := range flows {
		for _, name := range r.policy.Charged(f, method, path) {
			if l := r.ledgers[name]; !slices.Contains(all, l) {
				all = append(all, l)
			}
		}
	}
	return all
}

// report returns the use of up to MaxRuleSpent rules whose use has changed since their last report.
func (r *rules) report() (all []RuleSpent) {
	if len(r.names) == 0 {
		return nil
	}
	r.next.mu.Lock()
	defer r.next.mu.Unlock()
	first, _ := slices.BinarySearch(r.names, r.next.at)
	for i := range r.names {
		name := r.names[(first+i)%len(r.names)]
		if s, changed := r.ledgers[name].tell(); changed {
			all = append(all, s)
		}
		if len(all) == MaxRuleSpent {
			r.next.at = r.names[(first+i+1)%len(r.names)]
			break
		}
	}
	return all
}

// untell makes the next reports repeat one that was lost.
func (r *rules) untell(lost []RuleSpent) {
	for _, s := range lost {
		if l := r.ledgers[s.Rule]; l != nil {
			l.untell(s.Known)
		}
	}
}

// A charge is what counts in the budgets of rules at a time: a connection, or a request on it.
type charge struct {
	flows   []policy.Flow
	method  string // empty unless rules for requests may tell them apart
	path    policy.Path
	ledgers []*ledger
}

// refusal returns the refusal by the budget of a rule.
func (l *ledger) refusal(reason string) error {
	return &refusal{Verdict: policy.Verdict{Rule: l.rule, Reason: reason}}
}

// charge counts a connection, or a request, in the budgets of rules, and returns the charge for its
// bytes. out is the number of bytes that are known to go out: a request that cannot pass is better
// refused than cut off.
func (f *flow) charge(c charge, out int64) (*charge, error) {
	f.mu.Lock() // so that a change of the policy sees the charge, or this the new policy
	defer f.mu.Unlock()
	c.ledgers = f.n.rules.Load().charged(c.flows, c.method, c.path)
	for i, l := range c.ledgers {
		reason := l.usedUp(out)
		if reason == "" {
			reason = l.host(c.flows[0].Name, f.dst.Addr())
		}
		if reason == "" && !f.counted[l] {
			reason = l.connection()
		}
		if reason == "" {
			continue
		}
		for _, before := range c.ledgers[:i] {
			if !f.counted[before] {
				before.connected.Add(-1)
			}
		}
		return nil, l.refusal(reason)
	}
	for _, l := range c.ledgers {
		if f.counted == nil {
			f.counted = make(map[*ledger]bool)
		}
		f.counted[l] = true
	}
	return &c, nil
}

// chargeEarly charges a connection on which the server may begin. If the client may still name a
// host that counts elsewhere, only the bytes until then are charged.
func (f *flow) chargeEarly(c charge) error {
	if f.n.chargedAlike(f.dst) {
		of, err := f.charge(c, 0)
		f.charged.Store(of)
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	c.ledgers = f.n.rules.Load().charged(c.flows, c.method, c.path)
	f.charged.Store(&c)
	return nil
}

// sent takes bytes from the budgets of all rules, or from none. No rules are charged by nil.
func (c *charge) sent(n int) error {
	if c == nil {
		return nil
	}
	for i, l := range c.ledgers {
		if reason := l.sent(n); reason != "" {
			for _, before := range c.ledgers[:i] {
				before.out.Add(-int64(n))
			}
			return l.refusal(reason)
		}
	}
	return nil
}

// received is sent for the other direction.
func (c *charge) received(n int) error {
	if c == nil {
		return nil
	}
	for i, l := range c.ledgers {
		if reason := l.received(n); reason != "" {
			for _, before := range c.ledgers[:i] {
				before.in.Add(-int64(n))
			}
			return l.refusal(reason)
		}
	}
	return nil
}
