package egress

import (
	"cmp"
	"slices"

	"github.com/sandboxd/sandboxd/netns/gateway"
	"github.com/sandboxd/sandboxd/netns/policy"
)

// spent is the part of its budgets that a network has used in all processes so far. Processes tell
// it and may have been taken over: what they tell is bounded, and they cannot take back what they
// have told before.
type spent struct {
	total gateway.Spent // without Rules
	rules map[string]*gateway.RuleSpent
}

// limit keeps the rules of a policy and forgets others. What is told about others is not kept.
func (s *spent) limit(budgets []policy.RuleBudget) {
	rules := make(map[string]*gateway.RuleSpent, len(budgets))
	for _, b := range budgets {
		if rules[b.Rule] = s.rules[b.Rule]; rules[b.Rule] == nil {
			rules[b.Rule] = &gateway.RuleSpent{Rule: b.Rule}
		}
	}
	s.rules = rules
}

// note adds what was told. It returns all that was told so far if that has changed, else nil.
func (s *spent) note(told *gateway.Spent) *gateway.Spent {
	if told == nil {
		return nil
	}
	t := &s.total
	changed := raise(&t.BytesOut, told.BytesOut)
	for to, from := range map[*int64]int64{&t.BytesIn: told.BytesIn, &t.Connections: told.Connections, &t.Queries: told.Queries, &t.NameBytes: told.NameBytes, &t.Hosts: told.Hosts} {
		changed = raise(to, from) || changed
	}
	changed = learn(&t.Known, told.Known, gateway.MaxKnown) || changed
	known := 0
	for _, r := range s.rules {
		known += len(r.Known)
	}
	for i := range told.Rules {
		r, from := s.rules[told.Rules[i].Rule], &told.Rules[i]
		if r == nil {
			continue // of a policy before
		}
		for to, from := range map[*int64]int64{&r.BytesOut: from.BytesOut, &r.BytesIn: from.BytesIn, &r.Connections: from.Connections, &r.Hosts: from.Hosts} {
			changed = raise(to, from) || changed
		}
		before := len(r.Known)
		changed = learn(&r.Known, from.Known, before+gateway.MaxKnown-known) || changed
		known += len(r.Known) - before
	}
	if !changed {
		return nil
	}
	all := s.next()
	return &all
}

func raise(to *int64, told int64) bool {
	changed := told > *to
	*to = max(*to, told)
	return changed
}

// learn adds hosts to a sorted list, up to a number.
func learn(to *[]string, told []string, most int) (changed bool) {
	for _, k := range told {
		if i, found := slices.BinarySearch(*to, k); !found && len(*to) < most {
			*to = slices.Insert(*to, i, k)
			changed = true
		}
	}
	return changed
}

// next returns what was used, for the next process. Hosts of all rules together are bounded as
// those of the network are: a request has room for both.
func (s *spent) next() gateway.Spent {
	next := s.total
	next.Known = slices.Clone(s.total.Known)
	for _, r := range s.rules {
		of := *r
		if of.BytesOut|of.BytesIn|of.Connections|of.Hosts == 0 {
			continue
		}
		of.Known = slices.Clone(r.Known)
		next.Rules = append(next.Rules, of)
	}
	slices.SortFunc(next.Rules, func(a, b gateway.RuleSpent) int { return cmp.Compare(a.Rule, b.Rule) })
	return next
}
