package egress

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/netns/gateway"
	"github.com/sandboxd/sandboxd/netns/policy"
)

// The next process gets the largest reported values and some of the hosts.
func TestSpent(t *testing.T) {
	var s spent
	if diff := cmp.Diff(gateway.Spent{}, s.next()); diff != "" {
		t.Error(diff)
	}
	for i := range 3 * gateway.MaxKnown {
		s.note(&gateway.Spent{BytesOut: int64(100 - min(i, 100)), Hosts: int64(i + 1), Known: []string{fmt.Sprintf("h%03d.test", i)}})
	}
	s.note(nil)
	s.note(&gateway.Spent{BytesIn: 5})
	s.note(&gateway.Spent{Connections: 6, Queries: 7, NameBytes: 8})
	want := gateway.Spent{BytesOut: 100, BytesIn: 5, Connections: 6, Queries: 7, NameBytes: 8, Hosts: 3 * gateway.MaxKnown}
	for i := range gateway.MaxKnown {
		want.Known = append(want.Known, fmt.Sprintf("h%03d.test", i))
	}
	if diff := cmp.Diff(want, s.next()); diff != "" {
		t.Error(diff)
	}
	if again := s.note(&want); again != nil {
		t.Errorf("told again: %+v", again)
	}
}

func budgets(names ...string) (all []policy.RuleBudget) {
	for _, n := range names {
		all = append(all, policy.RuleBudget{Rule: n})
	}
	return all
}

// Of rules, only those of the policy are kept, with as many hosts as a request has room for.
func TestSpentOfRules(t *testing.T) {
	var s spent
	s.limit(budgets("a", "b", "c"))
	told := func(rule string, out int64, known ...string) *gateway.Spent {
		return s.note(&gateway.Spent{Rules: []gateway.RuleSpent{{Rule: rule, BytesOut: out, Known: known}}})
	}
	told("a", 5, "a.test")
	told("a", 3, "b.test", "a.test")
	told("invented", 9)
	want := gateway.Spent{Rules: []gateway.RuleSpent{{Rule: "a", BytesOut: 5, Known: []string{"a.test", "b.test"}}}}
	if diff := cmp.Diff(want, s.next()); diff != "" {
		t.Error(diff)
	}
	for i := range 2 * gateway.MaxKnown {
		told("b", 1, fmt.Sprintf("h%03d.test", i))
	}
	if next := s.next(); len(next.Rules) != 2 || len(next.Rules[0].Known) != 2 || len(next.Rules[1].Known) != gateway.MaxKnown-2 {
		t.Errorf("%+v", next.Rules)
	}
	if all := told("c", 1, "c.test"); all == nil || len(all.Rules) != 3 || len(all.Rules[2].Known) > 0 {
		t.Errorf("%+v", all)
	}
	s.limit(budgets("c", "d"))
	want = gateway.Spent{Rules: []gateway.RuleSpent{{Rule: "c", BytesOut: 1}}}
	if diff := cmp.Diff(want, s.next()); diff != "" {
		t.Error("a changed policy", diff)
	}
	s.limit(budgets("a", "b", "c"))
	if diff := cmp.Diff(want, s.next()); diff != "" {
		t.Error("changed back", diff)
	}
}
