package policy

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/api"
)

const hubBudget = `version: 1
rules:
- name: hub
  allow: ["*.hub.test"]
  budget: {bytes_out: 100, bytes_in: 200, connections: 3, hosts: 2, connection_rate: 0.5}
- name: pushes
  allow: git.hub.test
  inspect: true
  methods: [POST]
  budget: {connections: 9007199254740992}
- allow: [git.hub.test, other.test]
services:
- name: models
  port: 8080
  to: 127.0.0.1:9000
  budget: {connections: 7}
`

func tcpTo(t *testing.T, host, addr string, port uint16) Flow {
	t.Helper()
	return Flow{TCP, name(t, host), netip.MustParseAddr(addr), port}
}

func TestBudgetsOfRulesAreReadAndWritten(t *testing.T) {
	p := parse(t, hubBudget)
	want := []RuleBudget{
		{"hub", Budget{BytesOut: 100, BytesIn: 200, Connections: 3, Hosts: 2, ConnectionRate: 0.5}},
		{"pushes", Budget{Connections: 1 << 53}},
		{"models", Budget{Connections: 7}},
	}
	if diff := cmp.Diff(want, p.Budgets()); diff != "" {
		t.Error(diff)
	}
	doc, err := p.Document()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, parse(t, string(doc)).Budgets()); diff != "" {
		t.Errorf("written and read again: %s\n%s", diff, doc)
	}
}

func TestMistakesInBudgets(t *testing.T) {
	rule := func(s string) string { return "version: 1\nrules:\n- name: a\n  allow: a.test\n  " + s + "\n" }
	many := "version: 1\nrules:\n"
	for i := range MaxBudgets + 1 {
		many += fmt.Sprintf("- {name: n%d, allow: a.test, budget: {hosts: 1}}\n", i)
	}
	for name, c := range map[string]struct{ doc, want string }{
		"of no rule":      {"version: 1\nbudget: {hosts: 1}\nrules: []\n", `2:1: policy has no key "budget"`},
		"no mapping":      {rule("budget: 7"), "5:11: budget is no mapping"},
		"empty":           {rule("budget: {}"), "5:11: budget is empty"},
		"unknown key":     {rule("budget: {queries: 1}"), `5:12: budget has no key "queries"`},
		"zero":            {rule("budget: {bytes_out: 0}"), "5:23: bytes_out is no number from 1 to"},
		"negative":        {rule("budget: {bytes_in: -1}"), "5:22: bytes_in is no number"},
		"a fraction":      {rule("budget: {hosts: 1.5}"), "5:19: hosts is no number"},
		"text":            {rule(`budget: {connections: "1"}`), "5:25: connections is no number"},
		"too large":       {rule("budget: {bytes_out: 9007199254740993}"), "5:23: bytes_out is no number"},
		"rate of zero":    {rule("budget: {connection_rate: 0}"), "5:29: connection_rate is no number"},
		"no rate":         {rule("budget: {connection_rate: .nan}"), "5:29: connection_rate is no number"},
		"endless rate":    {rule("budget: {connection_rate: .inf}"), "5:29: connection_rate is no number"},
		"twice":           {rule("budget: {hosts: 1, hosts: 2}"), `5:22: key "hosts" occurs twice`},
		"without a name":  {"version: 1\nrules:\n- allow: a.test\n  budget: {hosts: 1}\n", "4:11: a rule with a budget has a name"},
		"name of another": {"version: 1\npresets: [go]\nrules:\n- {name: \"go[0]\", allow: a.test, budget: {hosts: 1}}\n", `4:42: another rule has the name "go[0]" too`},
		"of a denial":     {"version: 1\nrules:\n- {name: a, deny: a.test, budget: {hosts: 1}}\n", "3:35: a rule that denies has no budget"},
		"too many":        {many, fmt.Sprintf("%d:38: more than %d rules with a budget", MaxBudgets+3, MaxBudgets)},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := Parse([]byte(c.doc)); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want %s", err, c.want)
			}
		})
	}
}

func TestAFlowCountsInEveryBudgetThatCoversIt(t *testing.T) {
	p := parse(t, hubBudget)
	path := func(s string) Path {
		p, err := ParsePath(s)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	for _, c := range []struct {
		flow    Flow
		method  string
		inspect bool
		want    []string
	}{
		{tcpTo(t, "git.hub.test", "93.184.215.14", 443), "", true, []string{"hub"}},
		{tcpTo(t, "git.hub.test", "93.184.215.14", 443), "GET", true, []string{"hub"}},
		{tcpTo(t, "git.hub.test", "93.184.215.14", 443), "POST", true, []string{"hub", "pushes"}},
		{tcpTo(t, "www.hub.test", "93.184.215.14", 80), "", false, []string{"hub"}},
		{tcpTo(t, "www.hub.test", "93.184.215.14", 22), "", false, nil},
		{tcpTo(t, "other.test", "93.184.215.14", 443), "", false, nil},
		{tcpTo(t, "host.sandboxd.internal", "192.0.2.2", 8080), "", false, []string{"models"}},
		{tcpTo(t, "www.hub.test", "127.0.0.1", 443), "", false, nil},
	} {
		if diff := cmp.Diff(c.want, p.Charged(c.flow, c.method, path("/a"))); diff != "" {
			t.Errorf("%s %s: %s", c.method, c.flow, diff)
		}
		// A plain rule allows git.hub.test too: its requests have to be read for the budget's sake.
		if v := p.Connect(c.flow); v.Allow && v.Inspect != c.inspect {
			t.Errorf("%s: inspect %v, want %v", c.flow, v.Inspect, c.inspect)
		}
	}
}

func TestWidensKnowsBudgets(t *testing.T) {
	doc := func(rules ...string) *Policy {
		return parse(t, "version: 1\nrules:\n- "+strings.Join(rules, "\n- ")+"\n")
	}
	ab := doc("{name: x, allow: [a.test, b.test], budget: {bytes_out: 10, connections: 5}}")
	for name, c := range map[string]struct {
		a, b *Policy
		want string // "" if b is no wider
	}{
		"the same":                 {ab, ab, ""},
		"a budget more":            {doc("allow: a.test"), doc("{name: y, allow: a.test, budget: {hosts: 1}}"), ""},
		"tighter":                  {ab, doc("{name: y, allow: [a.test, b.test], budget: {bytes_out: 9, connections: 5, hosts: 2}}"), ""},
		"looser":                   {ab, doc("{name: x, allow: [a.test, b.test], budget: {bytes_out: 11, connections: 5}}"), "tcp a.test (1.1.1.1) port 80, beyond bytes_out: 10 of rule x"},
		"one bound is gone":        {ab, doc("{name: x, allow: [a.test, b.test], budget: {bytes_out: 10}}"), "tcp a.test (1.1.1.1) port 80, beyond connections: 5 of rule x"},
		"for a part":               {ab, doc("{name: x, allow: a.test, budget: {bytes_out: 10, connections: 5}}", "allow: b.test"), "tcp b.test (1.1.1.1) port 80, beyond bytes_out: 10 of rule x"},
		"the other part is closed": {ab, doc("{name: x, allow: a.test, budget: {bytes_out: 10, connections: 5}}"), ""},
		"the other part is denied": {ab, doc("{name: x, allow: a.test, budget: {bytes_out: 10, connections: 5}}", "allow: b.test", "deny: b.test"), ""},
		"one of two is enough":     {ab, doc("{name: x, allow: [a.test, b.test], budget: {bytes_out: 10, connections: 5}}", "allow: [a.test, b.test]"), ""},
		"for some requests": {
			doc("{name: x, allow: a.test, inspect: true, budget: {bytes_out: 10}}"),
			doc("{name: x, allow: a.test, inspect: true, methods: POST, budget: {bytes_out: 10}}", "{allow: a.test, inspect: true, methods: GET}"),
			"GET /any on tcp a.test (1.1.1.1) port 80, beyond bytes_out: 10 of rule x",
		},
	} {
		t.Run(name, func(t *testing.T) {
			e, wider, err := Widens(c.a, c.b)
			if err != nil || wider != (c.want != "") || wider && e.String() != c.want {
				t.Errorf("%v %q, %v; want %q", wider, e, err, c.want)
			}
		})
	}
}

func TestABudgetIsAnEffect(t *testing.T) {
	if w := parse(t, "version: 1\nrules:\n- allow: [a.test, b.test]\n- {name: x, allow: a.test, budget: {hosts: 1}}\n").Warnings(); len(w) > 0 {
		t.Errorf("warnings %v", w)
	}
	w := parse(t, "version: 1\nrules:\n- deny: a.test\n- {name: x, allow: a.test, budget: {hosts: 1}}\n").Warnings()
	if len(w) == 0 || w[len(w)-1].Rule != "x" {
		t.Errorf("warnings %v, want one about x", w)
	}
}

func TestReplayCountsInBudgets(t *testing.T) {
	r := parse(t, `version: 1
rules:
- {name: bytes, allow: bytes.test, budget: {bytes_out: 10, bytes_in: 10}}
- {name: hosts, allow: "*.hosts.test", budget: {hosts: 1}}
- {name: twice, allow: twice.test, budget: {connections: 2}}
`).Replay()
	connection := func(name string, out, in int64) api.Flow {
		return api.Flow{Kind: api.FlowConnection, Protocol: "tls", Name: name, Address: "93.184.215.14", Port: 443, Allow: true, Out: out, In: in}
	}
	request := api.Flow{Kind: api.FlowRequest, Protocol: "http", Name: "bytes.test", Address: "93.184.215.14", Port: 80, Method: "GET", Path: "/", Allow: true, Out: 4}
	ofRequests := connection("bytes.test", 4, 0)
	ofRequests.Protocol, ofRequests.Port = "http", 80
	for i, c := range []struct {
		flow api.Flow
		want Verdict
	}{
		{connection("bytes.test", 4, 4), Verdict{Allow: true, Rule: "bytes"}},
		{request, Verdict{Allow: true, Rule: "bytes"}},
		{ofRequests, Verdict{Allow: true, Rule: "bytes"}}, // whose bytes count once
		{connection("bytes.test", 3, 0), Verdict{Rule: "bytes", Reason: "the rule's budget of 10 bytes out is used up"}},
		{connection("twice.test", 99, 99), Verdict{Allow: true, Rule: "twice"}},
		{connection("twice.test", 99, 99), Verdict{Allow: true, Rule: "twice"}},
		{connection("twice.test", 99, 99), Verdict{Rule: "twice", Reason: "the rule's budget of 2 connections is used up"}},
		{connection("a.hosts.test", 1, 1), Verdict{Allow: true, Rule: "hosts"}},
		{connection("a.hosts.test", 1, 1), Verdict{Allow: true, Rule: "hosts"}},
		{connection("b.hosts.test", 1, 1), Verdict{Rule: "hosts", Reason: "the rule's budget of 1 hosts is used up"}},
	} {
		if got := r.Recorded(c.flow); got != c.want {
			t.Errorf("%d: %+v, want %+v", i, got, c.want)
		}
	}
}
