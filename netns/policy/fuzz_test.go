package policy

import (
	"math/rand/v2"
	"net/netip"
	"net/url"
	"path"
	"strings"
	"testing"
)

func FuzzParseName(f *testing.F) {
	for _, s := range []string{"example.com", "127.1", "0x7f.1", "a..b", "xn--a", "a\x00b.test", "EXAMPLE.COM", "a.08"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		n, err := ParseName(s)
		if err != nil {
			return
		}
		if again, err := ParseName(n.String()); err != nil || again != n {
			t.Errorf("%q is read as %q, and that as %q, %v", s, n, again, err)
		}
		if _, err := netip.ParseAddr(n.String()); err == nil {
			t.Errorf("%q is an address", s)
		}
		u, err := url.Parse("https://" + s + "/")
		if err != nil || !strings.EqualFold(u.Hostname(), n.String()) || u.Port() != "" || u.User != nil || u.Path != "/" {
			t.Errorf("%q is %q to net/url, %v", s, u, err)
		}
	})
}

func FuzzParsePath(f *testing.F) {
	for _, s := range []string{"/", "/a/../b", "/%2e%2e/", "/@a%2fb", "/a;b", "/%c3%bc", "//a"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		p, err := ParsePath(s)
		if err != nil {
			return
		}
		if again, err := ParsePath(p.String()); err != nil || again != p {
			t.Errorf("%q is read as %q, and that as %q, %v", s, p, again, err)
		}
		decoded, err := url.PathUnescape(s)
		if err != nil {
			t.Fatalf("%q is no path to net/url: %v", s, err)
		}
		if clean := path.Clean(decoded); clean != strings.TrimSuffix(decoded, "/") && decoded != "/" {
			t.Errorf("%q is decoded to %q, which servers clean to %q", s, decoded, clean)
		}
	})
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{
		"version: 1\nrules: [{allow: [example.com, '*.a.test', 10.0.0.0/8], ports: [443, 1-2, any], protocol: [tcp, udp]}, {deny: '*'}]",
		"version: 1\npresets: [pypi, github-read]",
		"version: 1\nrules: [{allow: a.test, inspect: true, methods: [GET], paths: [/a/*, /*/b]}]",
		"version: 1\nservices: [{name: s, port: 80, to: 'unix:s', inspect: true, methods: GET}, {port: 81, to: '[::1]:1'}]",
		"version: 1\nrules: [{allow: host.sandboxd.internal, ports: 80}]",
		`{"version": 1, "rules": []}`, "&a [*a]", "version: 1\n<<: {rules: []}",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		p, err := Parse(data)
		if err != nil {
			return
		}
		if e, wider, _ := Widens(p, p); wider {
			t.Errorf("the policy is wider than itself: %s", e)
		}
		same(t, p)
		for _, s := range p.Services() {
			if s.Socket == "" && !s.Address.Addr().IsLoopback() {
				t.Errorf("a service at %s", s.Target())
			}
		}
		for _, s := range []string{"127.0.0.1", "::1", "0.0.0.0", "224.0.0.1", "::ffff:127.0.0.1"} {
			if v := p.Connect(Flow{TCP, Name{"example.com"}, netip.MustParseAddr(s), 443}); v.Allow {
				t.Errorf("%s is allowed", s)
			}
		}
	})
}

// FuzzWidens compares two policies made of few words, and then looks for an example at random: one
// that is found must have been announced, and one that is announced must hold.
func FuzzWidens(f *testing.F) {
	f.Add(uint64(1), uint64(2))
	f.Add(uint64(3), uint64(4))
	f.Fuzz(func(t *testing.T, seed, stream uint64) {
		r := rand.New(rand.NewPCG(seed, stream))
		a, b := randomPolicy(r), randomPolicy(r)
		e, wider, err := Widens(a, b)
		if err != nil {
			t.Fatal(err)
		}
		if wider && !holds(e, a, b) {
			t.Fatalf("from\n%+v\nto\n%+v\n%s is announced and not so", a.rules, b.rules, e)
		}
		for range 200 {
			e := Example{Flow: randomFlow(r), Method: pick(r, "GET", "PUT"), Path: pick(r, "/a/b", "/a/x", "/x/b", "/a/x/y", "/")}
			if !wider && holds(e, a, b) {
				t.Fatalf("from\n%+v\nto\n%+v\n%s is not announced", a.rules, b.rules, e)
			}
		}
	})
}

func holds(e Example, a, b *Policy) bool {
	if e.Resolve {
		return b.Resolve(e.Flow.Name).Allow && !a.Resolve(e.Flow.Name).Allow
	}
	p := Path{e.Path, e.Path}
	allows := func(p *Policy, path Path) bool {
		if !e.Flow.Name.IsZero() && !p.Resolve(e.Flow.Name).Allow {
			return false
		}
		v := p.Connect(e.Flow)
		return v.Allow && (!v.Inspect || e.Flow.Protocol == UDP || path.s != "" && p.Request(e.Flow, e.Method, path).Allow)
	}
	return allows(b, p) && !allows(a, p)
}

func pick(r *rand.Rand, of ...string) string { return of[r.IntN(len(of))] }

func randomFlow(r *rand.Rand) Flow {
	return Flow{
		Protocol: Protocol(pick(r, "tcp", "udp")),
		Name:     Name{pick(r, "", "test", "a.test", "b.a.test", "c.b.a.test", "other", HostName)},
		Addr:     netip.MustParseAddr(pick(r, "1.1.1.1", "9.1.1.1", "9.200.1.1", "10.1.1.1", "10.200.0.1", "169.254.169.254", "2606:4700::1111", "192.0.2.2")),
		Port:     uint16(r.IntN(4) + 1),
	}
}

func randomPolicy(r *rand.Rand) *Policy {
	p := &Policy{}
	for range r.IntN(4) + 1 {
		one := rule{name: "r", deny: r.IntN(3) == 0, inspect: r.IntN(2) == 0}
		for range r.IntN(2) + 1 {
			if r.IntN(3) > 0 {
				one.patterns = append(one.patterns, pattern{pick(r, "test", "a.test", "b.a.test", "", HostName), true})
				if last := &one.patterns[len(one.patterns)-1]; last.name != "" {
					last.wildcard = r.IntN(2) == 0
				}
			} else {
				one.prefixes = append(one.prefixes, netip.MustParsePrefix(pick(r, "9.0.0.0/8", "9.128.0.0/9", "10.0.0.0/8", "10.128.0.0/9", "0.0.0.0/0", "169.254.169.254/32", "192.0.2.2/31", "::/0")))
			}
		}
		if r.IntN(2) == 0 {
			first := uint16(r.IntN(4) + 1)
			one.ports = []portRange{{first, first + uint16(r.IntN(2))}}
		}
		if one.inspect && r.IntN(2) == 0 {
			one.methods = []string{pick(r, "GET", "PUT")}
		}
		if one.inspect && r.IntN(2) == 0 {
			path, err := parsePathPattern(pick(r, "/a/*", "/*/b", "/a/b", "/*", "/a/x/*", "/*/x/*"))
			if err != nil {
				panic(err)
			}
			one.paths = []pathPattern{path}
		}
		one.defaults()
		p.rules = append(p.rules, one)
	}
	return p
}
