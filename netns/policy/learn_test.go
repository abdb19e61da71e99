package policy

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/api"
)

var start = time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)

// flow makes an allowed flow of a line: kind, protocol, name or -, address or -, port, then method
// and path of a request, or bytes out of a connection.
func flow(t testing.TB, line string) api.Flow {
	t.Helper()
	words := strings.Fields(line)
	f := api.Flow{Time: start, Kind: api.FlowKind(words[0]), Protocol: words[1], Name: strings.Trim(words[2], "-"), Allow: true}
	if f.Kind == api.FlowQuery {
		f.Port, f.Method = 53, "A"
		return f
	}
	f.Address = words[3]
	if _, err := fmt.Sscan(words[4], &f.Port); err != nil {
		t.Fatal(err)
	}
	switch {
	case f.Kind == api.FlowRequest:
		f.Method = words[5]
		if len(words) > 6 {
			f.Path = words[6]
		}
	case len(words) > 5:
		if _, err := fmt.Sscan(words[5], &f.Out); err != nil {
			t.Fatal(err)
		}
	}
	return f
}

func flowsOf(t testing.TB, lines string) []api.Flow {
	t.Helper()
	var flows []api.Flow
	for line := range strings.Lines(strings.TrimSpace(lines)) {
		flows = append(flows, flow(t, line))
	}
	return flows
}

func TestLearn(t *testing.T) {
	flows := flowsOf(t, `
query dns pypi.org
connection tls pypi.org 151.101.0.223 443 500
connection tls pypi.org 151.101.64.223 443 500
connection tls files.pythonhosted.org 151.101.0.223 443 500
connection tcp git.test 1.1.1.1 22 10
connection tls git.test 1.1.1.1 443 10
connection http api.test 1.1.1.1 80
request http api.test 1.1.1.1 80 GET /v1/models
request http api.test 1.1.1.1 80 GET /v1/models
request http api.test 1.1.1.1 80 HEAD /v1/models
request http api.test 1.1.1.1 80 POST /v1/chat
request websocket api.test 1.1.1.1 80 GET /v1/live/
connection tcp api.test 1.1.1.1 80
connection http mixed.test 1.1.1.1 80
request http mixed.test 1.1.1.1 80 GET /
request http read.test 1.1.1.1 80 GET /a
request http read.test 1.1.1.1 80 HEAD /a
connection udp time.test 1.1.1.1 443 5
connection tcp mixed.test 1.1.1.1 80 5
request http odd.test 1.1.1.1 80 get /
request http odder.test 1.1.1.1 80 GET
connection tcp - 9.9.9.9 5432 10
connection tcp - ::ffff:9.9.9.10 5432 10
connection tcp db.test 10.1.2.3 5432 10
connection tcp host.sandboxd.internal 192.0.2.2 11434 10
connection dns - 8.8.8.8 53 10
query dns tracker.test
query dns tracker.test
`)
	flows = append(flows,
		api.Flow{Time: start.Add(time.Hour), Kind: api.FlowConnection, Name: "evil\nrules: []", Address: "6.6.6.6", Port: 443},
		api.Flow{Kind: api.FlowQuery, Name: "lost.test", Allow: true, Time: start, Lost: 7})
	doc, err := Learn(flows)
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "learned.yaml", doc)
	checkLearned(t, flows, doc)
}

var update = flag.Bool("update", false, "rewrite the golden files")

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", "learn", name)
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s (-want +got; go test ./netns/policy -run Learn -update rewrites it):\n%s", path, diff)
	}
}

func TestLearnPatterns(t *testing.T) {
	var lines strings.Builder
	for i := range siblings {
		fmt.Fprintf(&lines, "connection tls e%d.cdn.test 1.1.1.1 443 9\n", i)
		fmt.Fprintf(&lines, "connection tls me%d.github.io 1.1.1.1 443 9\n", i)
		fmt.Fprintf(&lines, "connection tls shop%d.test 1.1.1.1 443 9\n", i)
		fmt.Fprintf(&lines, "request http files.test 1.1.1.1 80 GET /simple/p%d/\n", i)
		fmt.Fprintf(&lines, "request http x%d.api.test 1.1.1.1 80 GET /v1\n", i)
		fmt.Fprintf(&lines, "request http y%d.mix.test 1.1.1.1 80 GET /%d\n", i, i/4)
		fmt.Fprintf(&lines, "connection tls n%d.upper.test 1.1.1.1 443 9\n", i)
		fmt.Fprintf(&lines, "connection tls n%d.lower.upper.test 1.1.1.1 443 9\n", i)
		fmt.Fprintf(&lines, "connection tls s%d.sandboxd.internal 1.1.1.1 8443 9\n", i)
		if i > 0 {
			fmt.Fprintf(&lines, "connection tls n%d.few.test 1.1.1.1 443 9\n", i)
			fmt.Fprintf(&lines, "connection tls s%d.sandboxd.internal 1.1.1.1 8444 9\n", i)
			fmt.Fprintf(&lines, "request http few.test 1.1.1.1 80 GET /few/%d\n", i)
		}
	}
	lines.WriteString(`
connection tcp host.sandboxd.internal 192.0.2.2 8443 9
connection tcp host.sandboxd.internal 192.0.2.2 8444 9
connection tls cdn.test 1.1.1.1 443 9
connection tls deep.e1.cdn.test 1.1.1.1 443 9
connection tcp e1.cdn.test 1.1.1.1 22 9
request http z.cdn.test 1.1.1.1 443 GET /
request http z.api.test 1.1.1.1 80 GET /v2
request http files.test 1.1.1.1 80 GET /simple
request http files.test 1.1.1.1 80 GET /a*b/c
request http npm.test 1.1.1.1 80 GET /@a%2Fb
request http names.test 1.1.1.1 80 GET /n/@a%2Fb
request http names.test 1.1.1.1 80 GET /m/*
request http names.test 1.1.1.1 80 GET /k/a*/c
`)
	flows := flowsOf(t, strings.ReplaceAll(lines.String(), "\n\n", "\n"))
	doc, err := Learn(flows)
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "patterns.yaml", doc)
	checkLearned(t, flows, doc)
}

// Every way to write a record that no policy can allow, or that is none.
func TestLearnRefuses(t *testing.T) {
	for line, want := range map[string]string{
		"connection tls a..b 1.1.1.1 443":                      "flow 1: host name",
		"connection tls a.test nowhere 443":                    "flow 1: address of a connection",
		"connection tls a.test 1.1.1.1 0":                      "flow 1: a connection without a port",
		"request http a.test 1.1.1.1 80 GET /../x":             "flow 1: path with the segment",
		"talk tls a.test 1.1.1.1 443":                          `flow 1: flow of kind "talk"`,
		"query dns -":                                          "flow 1: a query without a name",
		"connection tls - 127.0.0.1 443":                       "never reached",
		"connection tls a.test 192.0.2.2 443":                  "which no policy allows",
		"connection tls - 192.0.2.2 443":                       "write that name",
		"connection tls host.sandboxd.internal 1.1.1.1 443":    "which no policy allows",
		"connection tls localhost 1.1.1.1 443":                 "is the sandbox itself",
		"connection udp host.sandboxd.internal 192.0.2.2 53 1": "over tcp only",
	} {
		doc, err := Learn(flowsOf(t, line))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q\n%s", line, err, want, doc)
		}
	}
}

func TestReadFlows(t *testing.T) {
	const line = `{"time":"2026-11-23T12:00:00Z","kind":"connection","protocol":"tls","name":"a.test","address":"1.1.1.1","port":443,"allow":true,"newer":1}`
	flows, err := ReadFlows(strings.NewReader(line + "\n\n" + strings.Replace(strings.Replace(line, "true", "false", 1), "a.test", "a..test", 1)))
	if err != nil || len(flows) != 2 || flows[0].Port != 443 || !flows[0].Time.Equal(start) || flows[1].Allow {
		t.Errorf("%+v, %v", flows, err)
	}
	for text, want := range map[string]string{
		line + "\n{": "read flows: line 2: unexpected end",
		line + "\n" + strings.Replace(line, "a.test", "a..test", 1): "line 2: host name",
		strings.Repeat("x", maxLine+1):                              "token too long",
		"[]":                                                        "line 1: json",
	} {
		if flows, err := ReadFlows(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.50q: %+v, %v", text, flows, err)
		}
	}
}

func TestRecorded(t *testing.T) {
	p := parse(t, `
version: 1
rules:
- {name: plain, allow: [a.test, 9.9.9.9], ports: [80, 443]}
- {name: read, allow: b.test, ports: [80, 443], inspect: true, methods: GET}
`)
	for _, tc := range []struct {
		line, want string // the reason; empty if it is allowed
	}{
		{"query dns a.test", ""},
		{"query dns c.test", "no rule allows c.test"},
		{"connection tls a.test 1.1.1.1 443 9", ""},
		{"connection tls c.test 9.9.9.9 443 9", "no rule allows c.test"}, // it would not be resolved
		{"connection tls - 9.9.9.9 443 9", ""},
		{"connection tls - 1.1.1.1 443 9", "no rule allows tcp 1.1.1.1"},
		{"connection tls b.test 1.1.1.1 443 9", "have to be read"},
		{"connection tcp b.test 1.1.1.1 443 9", "have to be read"},
		{"connection tcp b.test 1.1.1.1 80", ""},
		{"connection http b.test 1.1.1.1 80 9", ""},
		{"request http b.test 1.1.1.1 80 GET /", ""},
		{"request http b.test 1.1.1.1 80 GET", "has no path"},
		{"request http b.test 1.1.1.1 80 PUT /", "no rule allows PUT"},
		{"request http a.test 1.1.1.1 80 PUT /", ""},
		{"connection tls a..test 1.1.1.1 443", "empty label"},
		{"connection dns - 1.1.1.1 53", ""},
	} {
		if v := p.Recorded(flow(t, tc.line)); v.Allow != (tc.want == "") || !strings.Contains(v.Reason, tc.want) {
			t.Errorf("%s: %+v, want %q", tc.line, v, tc.want)
		}
	}
}

// checkLearned holds what every learned policy has: it allows each flow, has no rule too many and
// is the same whatever the order of flows.
func checkLearned(t *testing.T, flows []api.Flow, doc []byte) *Policy {
	t.Helper()
	p, err := Parse(doc)
	if err != nil {
		t.Fatalf("%v in\n%s", err, doc)
	}
	if w := p.Warnings(); len(w) > 0 {
		t.Errorf("%v in\n%s", w, doc)
	}
	for _, f := range flows {
		if v := p.Recorded(f); f.Allow && !v.Allow && f.Kind != api.FlowQuery {
			t.Errorf("%+v is refused: %s, by\n%s", f, v.Reason, doc)
		}
	}
	backwards := slices.Clone(flows)
	slices.Reverse(backwards)
	if again, err := Learn(backwards); err != nil || !bytes.Equal(again, doc) {
		t.Errorf("backwards %v\n%s, want\n%s", err, again, doc)
	}
	return p
}

// exact is the policy with one rule for each flow, written without any grouping. A connection on
// which nothing but requests was seen has no rule beside theirs.
func exact(t *testing.T, flows []api.Flow) *Policy {
	t.Helper()
	p := &Policy{}
	var acts []act
	for _, f := range flows {
		a, err := readFlow(f)
		if err != nil {
			t.Fatal(err)
		}
		if f.Allow && f.Kind != api.FlowQuery {
			acts = append(acts, a)
		}
	}
	for _, a := range acts {
		for _, host := range a.hosts() {
			var e entry
			e.addHost(host)
			e.protocols, e.ports = []Protocol{a.Protocol}, []portRange{{a.Port, a.Port}}
			if a.kind == api.FlowRequest {
				e.inspect, e.methods, e.paths = true, []string{a.method}, []pathPattern{{strings.Split(a.path.s[1:], "/"), false}}
			} else if !a.opaque && slices.ContainsFunc(acts, func(b act) bool {
				return b.kind == api.FlowRequest && b.Port == a.Port && slices.Contains(b.hosts(), host)
			}) {
				continue
			}
			p.rules = append(p.rules, e.rule)
		}
	}
	return p
}

// A learned policy allows every recorded flow, and nothing that a rule for each flow would not.
func FuzzLearnIsExact(f *testing.F) {
	for seed := range uint64(20) {
		f.Add(seed, seed)
	}
	f.Fuzz(func(t *testing.T, seed, stream uint64) {
		r := rand.New(rand.NewPCG(seed, stream))
		var flows []api.Flow
		for range r.IntN(12) + 1 {
			f := api.Flow{
				Kind: api.FlowKind(pick(r, "connection", "connection", "request", "query")), Protocol: pick(r, "tls", "tcp", "http"), Time: start,
				Name: pick(r, "", "a.test", "b.test", "a.b.test", "c.other.test"), Address: pick(r, "1.1.1.1", "1.1.1.2", "10.0.0.1", "2606:4700::1111"),
				Port: uint16(r.IntN(3) + 79), Out: int64(r.IntN(2)), Allow: r.IntN(8) > 0,
			}
			if f.Kind == api.FlowRequest {
				f.Protocol, f.Method, f.Path = "http", pick(r, "GET", "PUT"), pick(r, "/", "/a", "/a/", "/a/b", "/b")
			}
			if f.Kind == api.FlowQuery && f.Name == "" {
				continue
			}
			flows = append(flows, f)
		}
		doc, err := Learn(flows)
		if err != nil {
			t.Fatal(err)
		}
		p := checkLearned(t, flows, doc)
		if e, wider, err := Widens(exact(t, flows), p); wider || err != nil {
			t.Errorf("%s is not needed, %v:\n%s", e, err, doc)
		}
	})
}

// FuzzLearn reads arbitrary records, and records with arbitrary paths.
func FuzzLearn(f *testing.F) {
	for _, line := range []string{"connection tls a.test 1.1.1.1 443 9", "request http a.test 1.1.1.1 80 GET /a%2fb/*/c", "query dns a.test", "connection tcp - 10.0.0.1 22 1"} {
		data, err := json.Marshal(flow(f, line))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data, "/a/b/c /a/b/d")
	}
	f.Add([]byte("{}"), "/* /*/ /a*/b /%2Fa /x/* /x/*/y /x/y%2Fz / /a /b /c /d /e /f /g /h")
	f.Fuzz(func(t *testing.T, data []byte, paths string) {
		flows, err := ReadFlows(bytes.NewReader(data))
		if err != nil {
			flows = nil
		}
		for path := range strings.FieldsSeq(paths) {
			if _, err := ParsePath(path); err == nil {
				flows = append(flows, api.Flow{Kind: api.FlowRequest, Protocol: "http", Name: "p.test", Address: "1.1.1.1", Port: 80, Method: "GET", Path: path, Allow: true})
			}
		}
		doc, err := Learn(flows)
		if err != nil {
			return
		}
		p, err := Parse(doc)
		if err != nil {
			t.Fatalf("%v in\n%s", err, doc)
		}
		for _, f := range flows {
			if v := p.Recorded(f); f.Allow && !v.Allow && f.Kind != api.FlowQuery {
				t.Errorf("%+v is refused: %s, by\n%s", f, v.Reason, doc)
			}
		}
	})
}

// Connections over named networks are of no policy: none is learnt from them, and each keeps its
// verdict under another one.
func TestFlowsOverNamedNetworks(t *testing.T) {
	peer := api.Flow{Kind: api.FlowConnection, Protocol: "tcp", Name: "db", Address: "198.18.3.4", Port: 5432, Allow: true, Rule: PeerRule("back"), Out: 5}
	web := api.Flow{Kind: api.FlowConnection, Protocol: "tls", Name: "example.com", Address: "93.184.215.14", Port: 443, Allow: true, Rule: "r"}
	with, err := Learn([]api.Flow{peer, web})
	if err != nil {
		t.Fatal(err)
	}
	p, err := Parse(with)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(with), "198.18") || strings.Contains(string(with), "db") || !p.Recorded(web).Allow {
		t.Errorf("learnt\n%s", with)
	}
	if v := new(Policy).Recorded(peer); !v.Allow {
		t.Errorf("without a rule: %+v", v)
	}
	// Without the network's rule, the address is one of a policy.
	named := peer
	named.Rule = "measurements"
	if v := new(Policy).Recorded(named); v.Allow {
		t.Errorf("by a rule: %+v", v)
	}
	elsewhere := peer
	elsewhere.Address = "93.184.215.14"
	if v := new(Policy).Recorded(elsewhere); v.Allow {
		t.Errorf("a rule of this name elsewhere: %+v", v)
	}
}
