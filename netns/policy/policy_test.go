package policy

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/document"
)

func parse(t *testing.T, doc string) *Policy {
	t.Helper()
	p, err := Parse([]byte(doc))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func name(t testing.TB, s string) Name {
	t.Helper()
	if s == "" {
		return Name{}
	}
	n, err := ParseName(s)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestParseName(t *testing.T) {
	for in, want := range map[string]string{
		"example.com":                    "example.com",
		"EXAMPLE.Com":                    "example.com",
		"xn--bcher-kva.example":          "xn--bcher-kva.example",
		"r3---sn-4g5e.video.test":        "r3---sn-4g5e.video.test",
		"host":                           "host",
		"1.2.3.4.example":                "1.2.3.4.example",
		"0x7f.com":                       "0x7f.com",
		strings.Repeat("a", 63) + ".com": strings.Repeat("a", 63) + ".com",
	} {
		if got, err := ParseName(in); err != nil || got.String() != want {
			t.Errorf("ParseName(%q) = %q, %v", in, got, err)
		}
	}
	for _, in := range []string{
		"", ".", "example.com.", ".example.com", "a..b", "-a.com", "a-.com", "exa mple.com", "exam_ple.com", "a\x00.example.com",
		"example.com\x00.evil.test", "exämple.com", "example。com", "ｅxample.com", "\u212aexample.com", "example.com:443", "user@example.com",
		"[::1]", "127.0.0.1", "127.1", "2130706433", "0x7f000001", "0x7f.1", "017700000001", "1.2.3.0x", "example.0x1f", "a.08", "a/b", `a\b`, "a%2eb", "*.a",
		strings.Repeat("a", 64) + ".com", strings.Repeat("a.", 127) + "com",
	} {
		if got, err := ParseName(in); err == nil {
			t.Errorf("ParseName(%q) = %q, want an error", in, got)
		}
	}
}

func TestParsePath(t *testing.T) {
	for in, want := range map[string]string{
		"/":                     "/",
		"/a/":                   "/a/",
		"/a%2db":                "/a-b",
		"/%7euser/%41":          "/~user/A",
		"/%40babel%2fcore":      "/@babel%2Fcore",
		"/b%c3%bccher%20x":      "/b%C3%BCcher%20x",
		"/a:b@c!$&'()*+,=":      "/a:b@c!$&'()*+,=",
		"/...":                  "/...",
		"/simple/pip/pip-1.whl": "/simple/pip/pip-1.whl",
	} {
		if got, err := ParsePath(in); err != nil || got.String() != want {
			t.Errorf("ParsePath(%q) = %q, %v", in, got, err)
		}
	}
	for _, in := range []string{
		"", "a", "*", "http://x/", "//", "//a", "/a//b", "/.", "/..", "/a/../b", "/a/./b", "/a/..", "/%2e%2e/b", "/a/.%2e/b", "/a%2f..%2fb", "/a%2f%2fb", "/a/%2f", "/a%5cb",
		`/a\b`, "/a;b", "/a%3bb", "/..;/b", "/a%00", "/a\x00", "/a%25%32%65", "/a%", "/a%2", "/a%zz", "/a b", "/a\r\nb", "/a%0d", "/a%7f", "/ä", "/a?b", "/a#b",
		"/" + strings.Repeat("a", maxPath),
	} {
		if got, err := ParsePath(in); err == nil {
			t.Errorf("ParsePath(%q) = %q, want an error", in, got)
		}
	}
}

// Every form in which a program can name an address that no rule for a name opens.
func TestSpecialAddresses(t *testing.T) {
	open := parse(t, `{version: 1, rules: [{allow: ["*", 0.0.0.0/0, "::/0"], ports: any, protocol: [tcp, udp]}]}`)
	for _, s := range []string{
		"0.0.0.0", "0.1.2.3", "10.0.0.1", "10.255.255.255", "100.64.0.1", "100.127.255.255", "127.0.0.1", "127.255.255.254", "169.254.0.1", "169.254.169.254",
		"172.16.0.1", "172.31.255.255", "192.0.0.1", "192.0.2.1", "192.88.99.1", "192.168.0.1", "198.18.0.1", "198.19.255.255", "198.51.100.1", "203.0.113.1",
		"224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255", "168.63.129.16",
		"::", "::1", "::7f00:1", "::127.0.0.1", "::10.0.0.1", "::1.1.1.1", "::ffff:10.0.0.1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::10.0.0.1", "64:ff9b::127.0.0.1",
		"64:ff9b::a9fe:a9fe", "64:ff9b:1::1.1.1.1", "100::1", "2001::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001:10::1", "2001:20::1", "2001:db8::1",
		"2002:7f00:1::", "2002:a00:1::1", "2002:0101:0101::1", "3fff::1", "5f00::1", "fc00::1", "fd00::1", "fd00:ec2::254", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1",
		"2600::5efe:10.0.0.1", "2600::200:5efe:10.0.0.1", "2606:4700::1111%1",
	} {
		for _, host := range []string{"", "example.com"} {
			f := Flow{TCP, name(t, host), netip.MustParseAddr(s), 443}
			if v := open.Connect(f); v.Allow {
				t.Errorf("%s is allowed by %s", f, v.Rule)
			}
		}
	}
	for _, s := range []string{"1.1.1.1", "100.63.255.255", "100.128.0.1", "172.15.255.255", "172.32.0.1", "9.255.255.255", "11.0.0.0", "223.255.255.255", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::1.1.1.1"} {
		if v := open.Connect(Flow{TCP, Name{}, netip.MustParseAddr(s), 443}); !v.Allow {
			t.Errorf("%s is refused: %s", s, v.Reason)
		}
	}
	if v := open.Connect(Flow{TCP, Name{}, netip.Addr{}, 443}); v.Allow {
		t.Error("the zero address is allowed")
	}
	if v := open.Connect(Flow{TCP, Name{}, netip.MustParseAddr("1.1.1.1"), 0}); v.Allow {
		t.Error("port 0 is allowed")
	}
}

func TestCIDRsOpenWhatTheyName(t *testing.T) {
	p := parse(t, `
version: 1
rules:
- {name: lan, allow: [10.1.0.0/16, "fd00:1::/32", 169.254.0.0/16], ports: 443}
- {name: whole, allow: 8.0.0.0/5, ports: 22}
- {name: metadata, allow: 169.254.170.2, ports: 80}
- {name: names, allow: "*"}
`)
	for _, tc := range []struct {
		host, addr string
		port       uint16
		rule       string
	}{
		{"", "10.1.2.3", 443, "lan"},
		{"db.example", "10.1.2.3", 443, "lan"},
		{"", "::ffff:10.1.2.3", 443, "lan"},
		{"", "fd00:1::5", 443, "lan"},
		{"", "169.254.1.1", 443, "lan"},
		{"", "169.254.170.2", 80, "metadata"},
		{"", "8.8.8.8", 22, "whole"},
		{"one.test", "8.8.8.8", 443, "names"},

		{"", "10.1.2.3", 22, ""}, // 8.0.0.0/5 covers 10.0.0.0/8 and does not name it
		{"", "10.2.0.1", 443, ""},
		{"", "169.254.169.254", 443, ""},
		{"", "169.254.169.254", 80, ""},
		{"metadata.google.internal", "169.254.169.254", 80, ""},
		{"rebound.test", "10.2.0.1", 443, ""},
		{"", "8.8.8.8", 443, ""},
		{"one.test", "8.8.8.8", 8443, ""},
	} {
		f := Flow{TCP, name(t, tc.host), netip.MustParseAddr(tc.addr), tc.port}
		if v := p.Connect(f); v.Rule != tc.rule || v.Allow != (tc.rule != "") {
			t.Errorf("%s: %+v, want rule %q", f, v, tc.rule)
		}
	}
}

func TestConnect(t *testing.T) {
	p := parse(t, `
version: 1
rules:
- {name: exact, allow: example.com}
- {name: below, allow: "*.example.org", ports: [443, 8000-8999]}
- {name: quic, allow: quic.test, protocol: udp, ports: 443}
- {name: bad, deny: [bad.example.org, "*.bad.example.org", 9.9.9.0/24]}
- {name: no 8080, deny: "*.example.org", ports: 8080, protocol: tcp}
`)
	for _, tc := range []struct {
		protocol   Protocol
		host, addr string
		port       uint16
		allow      bool
		rule       string
	}{
		{TCP, "example.com", "1.1.1.1", 443, true, "exact"},
		{TCP, "example.com", "1.1.1.1", 80, true, "exact"},
		{TCP, "EXAMPLE.COM", "1.1.1.1", 80, true, "exact"},
		{TCP, "a.b.example.org", "1.1.1.1", 8999, true, "below"},
		{UDP, "quic.test", "1.1.1.1", 443, true, "quic"},
		{TCP, "example.com", "1.1.1.1", 22, false, ""},
		{UDP, "example.com", "1.1.1.1", 443, false, ""},
		{TCP, "evilexample.com", "1.1.1.1", 443, false, ""},
		{TCP, "example.com.evil.test", "1.1.1.1", 443, false, ""},
		{TCP, "www.example.com", "1.1.1.1", 443, false, ""},
		{TCP, "example.org", "1.1.1.1", 443, false, ""},
		{TCP, "evilexample.org", "1.1.1.1", 443, false, ""},
		{TCP, "", "1.1.1.1", 443, false, ""},
		{TCP, "bad.example.org", "1.1.1.1", 443, false, "bad"},
		{TCP, "a.bad.example.org", "1.1.1.1", 443, false, "bad"},
		{TCP, "a.notbad.example.org", "1.1.1.1", 443, true, "below"},
		{TCP, "example.com", "9.9.9.9", 443, false, "bad"},
		{TCP, "example.com", "::ffff:9.9.9.9", 443, false, "bad"},
		{TCP, "a.example.org", "1.1.1.1", 8080, false, "no 8080"},
	} {
		f := Flow{tc.protocol, name(t, tc.host), netip.MustParseAddr(tc.addr), tc.port}
		v := p.Connect(f)
		if v.Allow != tc.allow || v.Rule != tc.rule || v.Allow == (v.Reason != "") || v.Inspect {
			t.Errorf("%s: %+v, want %v by %q", f, v, tc.allow, tc.rule)
		}
	}
	for host, want := range map[string]bool{
		"example.com": true, "a.example.org": true, "quic.test": true,
		"example.org": false, "bad.example.org": false, "x.test": false,
	} {
		if v := p.Resolve(name(t, host)); v.Allow != want {
			t.Errorf("resolve %s: %+v, want %v", host, v, want)
		}
	}
	if v := (&Policy{}).Connect(Flow{TCP, name(t, "example.com"), netip.MustParseAddr("1.1.1.1"), 443}); v.Allow {
		t.Error("the zero policy allows a connection")
	}
}

func TestRequest(t *testing.T) {
	p := parse(t, `
version: 1
rules:
- {name: read, allow: api.test, inspect: true, methods: [GET, HEAD]}
- {name: post, allow: api.test, inspect: true, methods: POST, paths: [/v1/chat, /repos/*/issues, /up/*]}
- {name: secret, deny: api.test, inspect: true, paths: /v1/keys/*}
- {name: free, allow: free.test, protocol: [tcp, udp]}
- {name: admin, deny: free.test, inspect: true, paths: /admin/*}
`)
	addr := netip.MustParseAddr("1.1.1.1")
	for _, tc := range []struct {
		host, method, path string
		rule               string
		allow              bool
	}{
		{"api.test", "GET", "/anything", "read", true},
		{"api.test", "POST", "/v1/chat", "post", true},
		{"api.test", "POST", "/repos/x/issues", "post", true},
		{"api.test", "POST", "/up/a/b", "post", true},
		{"api.test", "POST", "/up/", "post", true},
		{"api.test", "POST", "/up", "", false},
		{"api.test", "POST", "/v1/chat/x", "", false},
		{"api.test", "POST", "/repos/x/y/issues", "", false},
		{"api.test", "POST", "/repos/x%2fy/issues", "", false}, // a server may see x/y
		{"api.test", "POST", "/repos%2fx/issues", "", false},   // or may not
		{"api.test", "GET", "/v1%2fkeys/1", "secret", false},
		{"api.test", "GET", "/v1/keys/1", "secret", false},
		{"api.test", "GET", "/%76%31/keys/1", "secret", false},
		{"api.test", "get", "/", "", false},
		{"api.test", "DELETE", "/", "", false},
		{"free.test", "GET", "/admin/x", "admin", false},
		{"free.test", "DELETE", "/x", "free", true},
	} {
		path, err := ParsePath(tc.path)
		if err != nil {
			t.Fatal(err)
		}
		f := Flow{TCP, name(t, tc.host), addr, 443}
		if v := p.Connect(f); !v.Allow || !v.Inspect {
			t.Errorf("%s: %+v, want inspection", f, v)
		}
		if v := p.Request(f, tc.method, path); v.Allow != tc.allow || v.Rule != tc.rule {
			t.Errorf("%s %s %s: %+v, want %v by %q", tc.method, tc.path, f, v, tc.allow, tc.rule)
		}
	}
	if v := p.Connect(Flow{UDP, name(t, "free.test"), addr, 443}); v.Allow {
		t.Error("HTTP/3 goes past a rule for requests")
	}
	if v := p.Request(Flow{TCP, name(t, "api.test"), addr, 443}, "GET", Path{}); v.Allow {
		t.Error("a request without a path is allowed")
	}
	if v := p.Request(Flow{TCP, name(t, "api.test"), netip.MustParseAddr("10.0.0.1"), 443}, "GET", Path{"/", "/"}); v.Allow {
		t.Error("a request to a private address is allowed")
	}
}

func TestMistakesHavePositions(t *testing.T) {
	for _, tc := range []struct{ doc, want string }{
		{"", "the document is empty"},
		{"a: b: c", "1:1: mapping values are not allowed"},
		{"a: 1\nb: [", "2:1: did not find expected node content"},
		{"\x00", "control characters are not allowed"},
		{"[]", "1:1: policy is no mapping"},
		{"rules: []", "1:1: the version is missing"},
		{"version: 2", "1:10: version is not 1"},
		{"version: 1\nversion: 1", "2:1: key \"version\" occurs twice"},
		{"version: 1\n---\nversion: 1", "more than one document"},
		{"version: 1\nrulez: []", "2:1: policy has no key \"rulez\""},
		{"version: 1\nrules: {}", "2:8: rules is no list"},
		{"version: 1\npresets: [pipy]", "2:11: presets: no preset \"pipy\"; there are crates,"},
		{"version: 1\nrules:\n- allow: example.com\n  port: 443", "4:3: rule has no key \"port\""},
		{"version: 1\nrules:\n- {ports: 443}", "3:3: a rule has either allow or deny"},
		{"version: 1\nrules:\n- {allow: a.test, deny: b.test}", "3:3: a rule has either allow or deny"},
		{"version: 1\nrules:\n- allow: []", "3:10: hosts: the list is empty"},
		{"version: 1\nrules:\n- allow:\n  - a.test\n  - \"b..test\"", "5:5: hosts: host name \"b..test\": empty label"},
		{"version: 1\nrules:\n- allow: null", "3:10: hosts: no single value"},
		{"version: 1\nrules:\n- allow: &a [a.test]\n- allow: *a", "4:10: hosts: no single value"},
		{"version: 1\nrules: [{allow: \"a.*.test\"}]", "a * stands for whole labels at the beginning"},
		{"version: 1\nrules: [{allow: \"*a.test\"}]", "a * stands for whole labels"},
		{"version: 1\nrules: [{allow: localhost}]", "is the sandbox itself"},
		{"version: 1\nrules: [{allow: https://a.test/}]", "2:17: hosts:"},
		{"version: 1\nrules: [{allow: 10.0.0.1/8}]", "write 10.0.0.0/8"},
		{"version: 1\nrules: [{allow: 127.0.0.1}]", "127.0.0.1 is loopback and never reached"},
		{"version: 1\nrules: [{allow: 240.0.0.0/4}]", "never reached"},
		{"version: 1\nrules: [{allow: \"::1\"}]", "never reached"},
		{"version: 1\nrules: [{allow: \"::ffff:10.0.0.1\"}]", "stands for an IPv4 address"},
		{"version: 1\nrules: [{allow: \"64:ff9b::a00:1\"}]", "stands for an IPv4 address"},
		{"version: 1\nrules: [{allow: a.test, ports: 0}]", "is no port"},
		{"version: 1\nrules: [{allow: a.test, ports: 65536}]", "is no port"},
		{"version: 1\nrules: [{allow: a.test, ports: 0443}]", "is no port"},
		{"version: 1\nrules: [{allow: a.test, ports: 9-8}]", "is no port"},
		{"version: 1\nrules: [{allow: a.test, protocol: sctp}]", "neither tcp nor udp"},
		{"version: 1\nrules: [{allow: a.test, methods: GET}]", "add inspect: true"},
		{"version: 1\nrules: [{allow: a.test, inspect: \"yes\"}]", "neither true nor false"},
		{"version: 1\nrules: [{allow: a.test, inspect: true, methods: get}]", "no method"},
		{"version: 1\nrules: [{allow: a.test, inspect: true, paths: v1}]", "does not begin with /"},
		{"version: 1\nrules: [{allow: a.test, inspect: true, paths: /a*}]", "stands for whole segments"},
		{"version: 1\nrules: [{allow: a.test, inspect: true, protocol: udp}]", "over udp are not inspected"},
		{"version: 1\nrules: [{allow: host.sandboxd.internal}]", "2:9: a rule for host.sandboxd.internal has ports"},
		{"version: 1\nrules: [{allow: host.sandboxd.internal, ports: any}]", "listed one by one"},
		{"version: 1\nrules: [{allow: host.sandboxd.internal, ports: 8000-8001}]", "listed one by one"},
		{"version: 1\nrules: [{allow: host.sandboxd.internal, ports: 53, protocol: udp}]", "over tcp only"},
		{"version: 1\nrules: [{allow: 192.0.2.2}]", "write that name"},
		{"version: 1\nservices: {}", "services is no list"},
		{"version: 1\nservices: [{port: 80}]", "2:12: a service has to:"},
		{"version: 1\nservices: [{to: \"127.0.0.1:80\"}]", "2:12: a service has a port"},
		{"version: 1\nservices: [{port: 80-81, to: \"127.0.0.1:80\"}]", "2:19: port: a service has a single one"},
		{"version: 1\nservices: [{port: any, to: \"127.0.0.1:80\"}]", "a service has a single one"},
		{"version: 1\nservices: [{port: [80, 81], to: \"127.0.0.1:80\"}]", "more than 1 entries"},
		{"version: 1\nservices: [{port: 80, to: \"127.0.0.1\"}]", "2:27: to: \"127.0.0.1\" is neither an address of the host's loopback"},
		{"version: 1\nservices: [{port: 80, to: \"127.0.0.1:0\"}]", "is neither an address"},
		{"version: 1\nservices: [{port: 80, to: \"localhost:80\"}]", "is neither an address"},
		{"version: 1\nservices: [{port: 80, to: \"10.0.0.1:80\"}]", "is neither an address"},
		{"version: 1\nservices: [{port: 80, to: \"0.0.0.0:80\"}]", "is neither an address"},
		{"version: 1\nservices: [{port: 80, to: \"[::ffff:127.0.0.1]:80\"}]", "is neither an address"},
		{"version: 1\nservices: [{port: 80, to: \"unix:/run/s\"}]", "is not the name of a socket"},
		{"version: 1\nservices: [{port: 80, to: \"unix:run/s\"}]", "is not the name of a socket"},
		{"version: 1\nservices: [{port: 80, to: \"unix:../s\"}]", "is not the name of a socket"},
		{"version: 1\nservices: [{port: 80, to: \"unix:@s\"}]", "is not the name of a socket"},
		{"version: 1\nservices: [{port: 80, to: \"unix:a\\0b\"}]", "is not the name of a socket"},
		{"version: 1\nservices: [{port: 80, to: \"unix:\"}]", "is not the name of a socket"},
		{"version: 1\nservices: [{port: 80, to: \"unix:A\"}]", "is not the name of a socket"},
		{"version: 1\nservices: [{port: 80, to: \"unix:-a\"}]", "is not the name of a socket"},
		{"version: 1\nservices: [{port: 80, to: \"unix:a-\"}]", "is not the name of a socket"},
		{"version: 1\nservices: [{port: 80, to: \"unix:a.b\"}]", "is not the name of a socket"},
		{"version: 1\nservices: [{port: 80, to: \"unix:K\"}]", "is not the name of a socket"},
		{"version: 1\nservices: [{port: 80, to: \"unix:" + strings.Repeat("a", 64) + "\"}]", "is not the name of a socket"},
		{"version: 1\nservices: [{port: 80, to: \"127.0.0.1:80\", methods: GET}]", "add inspect: true"},
		{"version: 1\nservices: [{port: 80, to: \"127.0.0.1:80\", protocol: udp}]", "service has no key \"protocol\""},
		{"version: 1\nservices:\n- {port: 80, to: \"127.0.0.1:80\"}\n- {port: 80, to: \"127.0.0.1:81\"}", "4:3: port 80 is that of services[0] already"},
		{"version: 1\nrules:\n- {allow: host.sandboxd.internal, ports: 80}\nservices: [{name: web, port: 80, to: \"127.0.0.1:80\"}]", "3:3: port 80 of host.sandboxd.internal is that of web already"},
		{"version: 1\nrules: [{allow: a.test, name: \"a\\nb\"}]", "name is no line"},
	} {
		_, err := Parse([]byte(tc.doc))
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%q: %v, want %q", tc.doc, err, tc.want)
		}
	}
	_, err := Parse([]byte("version: 1\nrules:\n- {allow: 1.2.3}\n- {deny: a..b}\n"))
	if err == nil || !strings.Contains(err.Error(), "3:11") || !strings.Contains(err.Error(), "4:10") {
		t.Errorf("two mistakes: %v", err)
	}
	if e, ok := errors.AsType[*document.Error](err); !ok || e.Line != 3 {
		t.Errorf("the first mistake is %+v", e)
	}
	if _, err := Parse([]byte(`{"version": 1, "rules": [{"allow": ["example.com"], "ports": [443, "8000-8001"]}]}`)); err != nil {
		t.Errorf("JSON: %v", err)
	}
}

func TestWarnings(t *testing.T) {
	p := parse(t, `
version: 1
rules:
- {name: all, allow: "*.example.com"}
- {name: within, allow: a.example.com, ports: 443}
- {name: useful, deny: b.example.com}
- {name: beside, deny: other.test}
- {name: shut, allow: b.example.com, ports: 22}
- {name: lan, allow: 10.0.0.0/8, ports: 22}
- {name: seen, deny: c.example.com, inspect: true, paths: /x}
`)
	var got []string
	for _, w := range p.Warnings() {
		got = append(got, fmt.Sprintf("%d %s", w.Line, w.Rule))
	}
	if want := "[5 within 7 beside 8 shut]"; fmt.Sprint(got) != want {
		t.Errorf("warnings %v, want %s", got, want)
	}
}

func TestPresets(t *testing.T) {
	all := Presets()
	if len(all) < 9 {
		t.Fatalf("presets %v", all)
	}
	for _, preset := range all {
		p := parse(t, fmt.Sprintf("version: 1\npresets: %s", preset))
		q, err := Preset(preset)
		if err != nil {
			t.Fatal(err)
		}
		for _, pair := range [][2]*Policy{{p, q}, {q, p}} {
			if e, wider, err := Widens(pair[0], pair[1]); wider || err != nil {
				t.Errorf("%s is not its document: %s, %v", preset, e, err)
			}
		}
		if q.Resolve(Name{HostName}).Allow || len(q.Services()) > 0 {
			t.Errorf("%s opens the host", preset)
		}
		if n := len(q.dead(len(q.rules))); n > 0 {
			t.Errorf("%s has %d rules without effect", preset, n)
		}
	}
	p := parse(t, "version: 1\npresets: github-read")
	f := Flow{TCP, name(t, "github.com"), netip.MustParseAddr("140.82.121.3"), 443}
	for request, want := range map[string]bool{
		"GET /o/r/info/refs": true, "POST /o/r.git/git-upload-pack": true, "POST /o/r.git/git-receive-pack": false, "POST /session": false, "PUT /o/r": false,
	} {
		method, target, _ := strings.Cut(request, " ")
		path, err := ParsePath(target)
		if err != nil {
			t.Fatal(err)
		}
		if v := p.Request(f, method, path); v.Allow != want {
			t.Errorf("%s: %+v", request, v)
		}
	}
}

func TestWidens(t *testing.T) {
	for _, tc := range []struct{ a, b, want string }{
		{`{allow: a.test}`, `{allow: a.test}`, ""},
		{`{allow: "*.test"}`, `{allow: a.test}`, ""},
		{`{allow: a.test}`, `{allow: "*.test"}`, "the name any.test is resolved"},
		{`{allow: a.test}`, `{allow: a.test, ports: any}`, "port 1"},
		{`{allow: a.test}`, `{allow: a.test, protocol: [tcp, udp]}`, "udp a.test"},
		{`{allow: a.test, ports: 1-100}`, `{allow: a.test, ports: [1-50, 51-100]}`, ""},
		{`{allow: a.test, ports: [1-50, 52-100]}`, `{allow: a.test, ports: 1-100}`, "port 51"},
		{`{allow: "*.test"}, {deny: a.test}`, `{allow: "*.test"}`, "the name a.test is resolved"},
		{`{allow: "*.test"}, {deny: 9.0.0.0/8}`, `{allow: "*.test"}, {deny: 9.0.0.0/9}`, "9.128.0.0"},
		{`{allow: 10.0.0.0/9}, {allow: 10.128.0.0/9}`, `{allow: 10.0.0.0/8}`, ""},
		{`{allow: 10.0.0.0/9}`, `{allow: 10.0.0.0/8}`, "10.128.0.0"},
		{`{allow: 0.0.0.0/0}`, `{allow: [0.0.0.0/0, 192.168.0.0/16]}`, "192.168.0.0"},
		{`{allow: 0.0.0.0/0}`, `{allow: [0.0.0.0/1, 128.0.0.0/1]}`, ""},
		{`{allow: 169.254.0.0/16}`, `{allow: [169.254.0.0/16, 169.254.169.254]}`, "169.254.169.254"},
		{`{allow: a.test, inspect: true}`, `{allow: a.test}`, "a.test"},
		{`{allow: a.test, inspect: true, methods: GET}`, `{allow: a.test}`, "a.test"},
		{`{allow: a.test, inspect: true, methods: GET}`, `{allow: a.test, inspect: true, methods: [GET, PUT]}`, "PUT /any on"},
		{`{allow: a.test, inspect: true, paths: /a/*}`, `{allow: a.test, inspect: true, paths: /a/b}`, ""},
		{`{allow: a.test, inspect: true, paths: /a/b}`, `{allow: a.test, inspect: true, paths: /a/*}`, "/a/any"},
		{`{allow: a.test, inspect: true, paths: [/a/*, /*/x]}, {deny: a.test, inspect: true, paths: /a/x}`, `{allow: a.test, inspect: true, paths: [/a/*, /*/x]}`, "/a/x"},
		{`{allow: a.test, inspect: true, paths: /*/b/*}, {deny: a.test, inspect: true, paths: /a/*/c}`, `{allow: a.test, inspect: true, paths: /*/b/*}`, "/a/b/c"},
		{`{allow: a.test}, {deny: a.test, inspect: true, paths: /x}`, `{allow: a.test}`, "a.test"},
		{`{allow: ["*", 0.0.0.0/0, 192.0.2.0/24], ports: any}`, `{allow: host.sandboxd.internal, ports: 8080}`, "the name host.sandboxd.internal is resolved"},
		{`{allow: host.sandboxd.internal, ports: 80}`, `{allow: host.sandboxd.internal, ports: [80, 8080]}`, "(192.0.2.2) port 8080, which is 127.0.0.1:8080"},
		{`{allow: host.sandboxd.internal, ports: 80}`, `{allow: "*", ports: any}, {deny: 10.0.0.0/8}`, "the name any is resolved"},
	} {
		a, b := parse(t, "version: 1\nrules: ["+tc.a+"]"), parse(t, "version: 1\nrules: ["+tc.b+"]")
		e, wider, err := Widens(a, b)
		if err != nil || wider != (tc.want != "") || wider && !strings.Contains(e.String(), tc.want) {
			t.Errorf("from %s to %s: %v %q, %v; want %q", tc.a, tc.b, wider, e, err, tc.want)
		}
	}
	// A thousand rules, of which each subset of paths has its own class.
	var many strings.Builder
	many.WriteString("version: 1\nrules:\n")
	for i := range 14 {
		segments := slicesOf("*", 14)
		segments[i] = "x"
		fmt.Fprintf(&many, "- {allow: a.test, inspect: true, paths: /%s/*}\n", strings.Join(segments, "/"))
	}
	large := parse(t, many.String())
	if _, _, err := Widens(large, large); !errors.Is(err, ErrTooLarge) {
		t.Errorf("comparison of policies with 2^14 classes: %v", err)
	}
}

func slicesOf(s string, n int) []string { return strings.Split(strings.Repeat(s+" ", n-1)+s, " ") }
