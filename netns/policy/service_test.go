package policy

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
)

func TestServices(t *testing.T) {
	p := parse(t, `
version: 1
rules:
- {name: local, allow: [host.sandboxd.internal, example.com], ports: [8080, 443]}
- {name: again, allow: host.sandboxd.internal, ports: 8080, inspect: true, methods: POST}
- {name: all, allow: ["*", "*.sandboxd.internal", 0.0.0.0/0, 192.0.2.0/24], ports: any}
- {name: shut, deny: host.sandboxd.internal, ports: [5001]}
- {name: keys, deny: 192.0.2.0/31, ports: any}
services:
- {name: models, port: 11434, to: "127.0.0.1:9000"}
- {port: 5000, to: "unix:registry", inspect: true, methods: [GET, HEAD]}
- {port: 5001, to: "[::1]:5001"}
`)
	want := "[443 127.0.0.1:443 local 5000 unix:registry services[1] 5001 [::1]:5001 services[2] 8080 127.0.0.1:8080 local 11434 127.0.0.1:9000 models]"
	var got []string
	for _, s := range p.Services() {
		got = append(got, fmt.Sprint(s.Port), s.Target(), s.Rule)
	}
	if fmt.Sprint(got) != want {
		t.Errorf("services\n%v, want\n%s", got, want)
	}
	for port, want := range map[uint16]string{
		443: "127.0.0.1:443", 8080: "127.0.0.1:8080", 11434: "127.0.0.1:9000", 5000: "unix:registry", 5001: "", 80: "", 0: "", 65535: "",
	} {
		s, ok := p.Service(port)
		if ok != (want != "") || ok && s.Target() != want {
			t.Errorf("port %d leads to %s, %v", port, s.Target(), ok)
		}
	}
	for _, tc := range []struct {
		host, addr string
		port       uint16
		rule       string
		allow      bool
	}{
		{"host.sandboxd.internal", "192.0.2.2", 8080, "local", true},
		{"HOST.sandboxd.internal", "192.0.2.2", 11434, "models", true},
		{"host.sandboxd.internal", "192.0.2.2", 5000, "services[1]", true},
		{"host.sandboxd.internal", "192.0.2.2", 5001, "shut", false},
		{"host.sandboxd.internal", "192.0.2.2", 22, "", false}, // the rule all is no rule for the host
		{"host.sandboxd.internal", "1.1.1.1", 8080, "", false},
		{"host.sandboxd.internal", "192.0.2.3", 8080, "", false},
		{"", "192.0.2.2", 8080, "", false},
		{"example.com", "192.0.2.2", 443, "", false},
		{"a.sandboxd.internal", "192.0.2.2", 8080, "", false},
		{"a.host.sandboxd.internal", "192.0.2.2", 8080, "", false},
		{"example.com", "1.1.1.1", 443, "local", true},
		{"", "192.0.2.3", 443, "all", true},
	} {
		f := Flow{TCP, name(t, tc.host), netip.MustParseAddr(tc.addr), tc.port}
		if v := p.Connect(f); v.Allow != tc.allow || v.Rule != tc.rule {
			t.Errorf("%s: %+v, want %v by %q", f, v, tc.allow, tc.rule)
		}
	}
	f := Flow{TCP, name(t, HostName), HostAddress, 5000}
	if v := p.Connect(f); !v.Inspect {
		t.Error("requests to an inspected service are not read")
	}
	if v := p.Request(f, "PUT", Path{"/", "/"}); v.Allow {
		t.Error("a method that the service does not have is allowed")
	}
	if v := p.Connect(Flow{UDP, f.Name, f.Addr, 8080}); v.Allow {
		t.Error("UDP to a service is allowed")
	}
	if !p.Resolve(f.Name).Allow {
		t.Error("the name of the host is not resolved")
	}
	for _, doc := range []string{`{allow: ["*", "*.sandboxd.internal"], ports: any}`, `{allow: host.sandboxd.internal, ports: 80}, {deny: "*.internal"}`} {
		q := parse(t, "version: 1\nrules: ["+doc+"]")
		if v := q.Resolve(f.Name); v.Allow {
			t.Errorf("%s: the name of the host is resolved", doc)
		}
		if _, ok := q.Service(80); ok {
			t.Errorf("%s: port 80 of the host is open", doc)
		}
	}
}

func TestServiceElsewhereWidens(t *testing.T) {
	doc := func(to string) *Policy {
		return parse(t, fmt.Sprintf("{version: 1, services: [{port: 80, to: %q}]}", to))
	}
	rule := parse(t, `{version: 1, rules: [{allow: host.sandboxd.internal, ports: 80}]}`)
	for _, tc := range []struct {
		a, b *Policy
		want string
	}{
		{doc("127.0.0.1:80"), doc("127.0.0.1:80"), ""},
		{doc("127.0.0.1:80"), rule, ""},
		{rule, doc("127.0.0.1:80"), ""},
		{rule, doc("127.0.0.1:81"), "port 80, which is 127.0.0.1:81"},
		{doc("unix:a"), doc("unix:b"), "which is unix:b"},
		{doc("unix:a"), rule, "which is 127.0.0.1:80"},
	} {
		e, wider, err := Widens(tc.a, tc.b)
		if err != nil || wider != (tc.want != "") || wider && !strings.HasSuffix(e.String(), tc.want) {
			t.Errorf("%v %q, %v; want %q", wider, e, err, tc.want)
		}
	}
}

func TestReachable(t *testing.T) {
	p := parse(t, `
version: 1
rules:
- {allow: a.test, ports: 8443}
- {allow: db.test, ports: 5432}
- {allow: 10.1.0.0/16, ports: [9, 1000-2000]}
- {deny: 10.1.1.0/24, ports: [9, 1000-1500, 1400-2000]}
- {deny: 10.1.2.0/24, ports: [9, 1000-1500, 1502-2000]}
- {allow: 10.2.0.1, ports: 1500-1600}
- {deny: 10.2.0.1, ports: [1000-3000, 1100-1200]}
- {deny: 10.1.3.0/24, inspect: true, paths: /x}
- {allow: host.sandboxd.internal, ports: 80}
- {allow: 9.9.9.9, ports: 443, protocol: udp}
- {deny: 9.9.9.9, protocol: udp, inspect: true, methods: PUT}
- {deny: 1.0.0.1}
`)
	for _, tc := range []struct {
		host, addr string
		want       bool
	}{
		{"a.test", "1.1.1.1", true},
		{"a.test", "::ffff:1.1.1.1", true},
		{"b.test", "1.1.1.1", false},
		{"a.test", "1.0.0.1", false},
		{"a.test", "10.0.0.1", false},
		{"b.test", "10.1.0.1", true}, // on ports of the CIDR
		{"a.test", "10.1.1.1", false},
		{"a.test", "10.1.2.1", true}, // on port 1501
		{"a.test", "10.1.3.1", true},
		{"a.test", "10.2.0.1", false},
		{"a.test", "127.0.0.1", false},
		{"a.test", "192.0.2.2", false},
		{"host.sandboxd.internal", "192.0.2.2", true},
		{"host.sandboxd.internal", "1.1.1.1", false},
		{"b.test", "9.9.9.9", false},
		{"a.test", "fe80::1%eth0", false},
	} {
		if got := p.Reachable(name(t, tc.host), netip.MustParseAddr(tc.addr)); got != tc.want {
			t.Errorf("%s at %s: %v", tc.host, tc.addr, got)
		}
	}
	if (&Policy{}).Reachable(Name{}, netip.Addr{}) {
		t.Error("an invalid address is reachable")
	}
}

// FuzzReachable compares the answer with those about every port.
func FuzzReachable(f *testing.F) {
	f.Add(uint64(1), uint64(2))
	f.Fuzz(func(t *testing.T, seed, stream uint64) {
		r := rand.New(rand.NewPCG(seed, stream))
		p, flow := randomPolicy(r), randomFlow(r)
		want := false
		for _, flow.Protocol = range []Protocol{TCP, UDP} {
			for _, flow.Port = range []uint16{1, 2, 3, 4, 5, 6, 80, 443, 444, 65535} { // of randomPolicy's
				want = want || p.Connect(flow).Allow
			}
		}
		if got := p.Reachable(flow.Name, flow.Addr); got != want {
			t.Errorf("%s is reachable: %v by\n%+v", flow, got, p.rules)
		}
	})
}

func TestPublic(t *testing.T) {
	p := Public()
	for _, tc := range []struct {
		host, addr string
		want       bool
	}{
		{"example.com", "1.1.1.1", true},
		{"", "1.1.1.1", true},
		{"", "2606:4700::1111", true},
		{"", "10.0.0.1", false},
		{"example.com", "192.168.1.1", false},
		{"example.com", "169.254.169.254", false},
		{"", "168.63.129.16", false},
		{"", "127.0.0.1", false},
		{"", "fd00::1", false},
		{"host.sandboxd.internal", "192.0.2.2", false},
	} {
		for _, port := range []uint16{1, 22, 443, 65535} {
			f := Flow{TCP, name(t, tc.host), netip.MustParseAddr(tc.addr), port}
			if v := p.Connect(f); v.Allow != tc.want || v.Inspect {
				t.Errorf("%s: %+v", f, v)
			}
		}
		if v := p.Connect(Flow{UDP, name(t, tc.host), netip.MustParseAddr(tc.addr), 443}); v.Allow {
			t.Errorf("UDP to %s: %+v", tc.addr, v)
		}
	}
	if p.Resolve(name(t, HostName)).Allow || !p.Resolve(name(t, "example.com")).Allow {
		t.Error("not every name but the host's is resolved")
	}
}

func TestNamed(t *testing.T) {
	doc, err := Named("pypi,github-read")
	if err != nil || string(doc) != "version: 1\npresets: [pypi, github-read]\n" {
		t.Errorf("%q, %v", doc, err)
	}
	for _, name := range Presets() {
		doc, err := Named(name)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Parse(doc); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for list, want := range map[string]string{"": `no preset ""; there are crates,`, "pypi,": `no preset ""`, "pypi, npm": `no preset " npm"`, "npm,npm": "named twice", "rules: []": "no preset"} {
		if doc, err := Named(list); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Named(%q) = %q, %v", list, doc, err)
		}
	}
}
