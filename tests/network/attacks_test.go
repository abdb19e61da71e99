package network

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/sandboxd/sandboxd/internal/testenv/outside"
	"github.com/sandboxd/sandboxd/tests/network/op"
)

// attacked is the policy of the sandboxes that attack.
const attacked = `
version: 1
rules:
- {name: web, allow: web.test}
- {name: shared, allow: shared.test}
- {name: api, allow: api.test, inspect: true, methods: [GET, POST], paths: [/v1/*]}
- {name: no-admin, deny: api.test, inspect: true, paths: [/v1/admin/*]}
- {name: git, allow: git.test, ports: 22}
- {name: db, allow: db.test, ports: [5432, 8080]}
- {name: cdn, allow: "*.cdn.test"}
- {name: evil, deny: evil.cdn.test}
- {name: no-secret, deny: y.cdn.test, inspect: true, paths: /secret/*}
- {name: no-printer, deny: printer.cdn.test, ports: 80}
- {name: answers, allow: "*.allowed.test"}
- {name: lan, allow: 10.1.0.0/16, ports: [80, 5432]}
- {name: lan-api, allow: 10.2.0.0/16, ports: [80, 443, 5432], inspect: true, methods: [GET]}
`

// open is the policy of the sandboxes that show that an attack works where rules allow it.
const open = `
version: 1
rules:
- name: open
  ports: any
  allow: ["*", 0.0.0.0/0, "::/0", 10.0.0.0/8, 100.64.0.0/10, 169.254.0.0/16, 172.16.0.0/12, 192.0.0.0/24, 192.0.2.0/24, 192.88.99.0/24, 192.168.0.0/16,
    198.18.0.0/15, 198.51.100.0/24, 203.0.113.0/24, "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20", "fc00::/7", "fe80::/10", "fec0::/10",
    169.254.169.254, 169.254.170.2, 169.254.170.23, 100.100.100.200, 192.0.0.192, 168.63.129.16, "fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254"]
`

// attackedHosts are the names of the attacks.
var attackedHosts = map[string]*host{
	"web.test":          {addrs: []string{"93.184.215.14", "2606:2800:21f::14"}},
	"shared.test":       {addrs: []string{"93.184.215.20"}},
	"other.shared.test": {addrs: []string{"93.184.215.20"}},
	"api.test":          {addrs: []string{"93.184.215.21"}},
	"git.test":          {addrs: []string{"93.184.215.22"}},
	"db.test":           {addrs: []string{"93.184.215.23"}},
	"a.cdn.test":        {addrs: []string{"93.184.215.24"}},
	"b.cdn.test":        {addrs: []string{"93.184.215.24"}},
	"evil.cdn.test":     {addrs: []string{"93.184.215.24"}},
	"evil.test":         {addrs: []string{"93.184.215.66", "2606:2800:21f::66"}},
	"evilcdn.test":      {addrs: []string{"93.184.215.66"}},
	"cdn.test":          {addrs: []string{"93.184.215.66"}},
	"printer.cdn.test":  {addrs: []string{"10.1.0.5"}},
	"dns.google":        {addrs: []string{"8.8.8.8"}},
}

// An attack is an operation that must be refused.
type attack struct {
	name string
	op   op.Op
	// status is the expected status of the last HTTP response. 0 means that the connection is reset,
	// or the datagram refused.
	status int
	// code and addresses are the expected DNS answer.
	code      dnsmessage.RCode
	addresses []string
	// reason is a part of the reason in the record. Empty means that the gateway has nothing to record.
	reason string
	// here is set where the sandbox's own kernel refuses or ends the operation.
	here bool
	// reached are requests that come to a server first.
	reached []string
	// partly is set where the server may get the part of a request that stands before the attack.
	partly bool
	// dialled is set where the server may be dialled before the client's first bytes are known.
	dialled bool
	// never is set where no rule can allow it, and nowhere where it works on no Linux.
	never, nowhere bool
}

// A special is an address that no rule above opens.
type special struct {
	addr    string
	here    bool // the sandbox's own, or refused by its kernel
	never   bool // no rule opens it
	nowhere bool // TCP never reaches it
}

var specials = []special{
	{addr: "127.0.0.1", here: true},
	{addr: "127.0.0.53", here: true},
	{addr: "127.255.255.254", here: true},
	{addr: "0.0.0.0", here: true},
	{addr: "0.0.0.1", never: true, nowhere: true},
	{addr: "10.0.0.1"},
	{addr: "10.255.255.255"},
	{addr: "10.3.0.1"}, // beside the ranges of rules
	{addr: "172.16.0.1"},
	{addr: "172.31.255.254"},
	{addr: "192.168.0.1"},
	{addr: "192.168.255.255"},
	{addr: "169.254.0.1"},
	{addr: "169.254.169.254"},
	{addr: "169.254.170.2"},
	{addr: "169.254.170.23"},
	{addr: "100.64.0.1"},
	{addr: "100.100.100.200"},
	{addr: "100.127.255.254"},
	{addr: "192.0.0.1"},
	{addr: "192.0.0.192"},
	{addr: "192.0.2.7"},
	{addr: "192.0.2.53"},
	{addr: "192.88.99.1"},
	{addr: "198.18.0.1"},
	{addr: "198.19.255.254"},
	{addr: "198.51.100.1"},
	{addr: "203.0.113.1"},
	{addr: "168.63.129.16"},
	{addr: "224.0.0.1", here: true, nowhere: true},
	{addr: "239.255.255.250", here: true, nowhere: true},
	{addr: "240.0.0.1", never: true},
	{addr: "255.255.255.255", here: true, nowhere: true},
	{addr: "::1", here: true},
	{addr: "::", here: true},
	{addr: "::ffff:127.0.0.1", here: true},
	{addr: "::ffff:10.0.0.1"},
	{addr: "::ffff:169.254.169.254"},
	{addr: "::10.0.0.1", never: true},
	{addr: "::169.254.169.254", never: true},
	{addr: "::ffff:0:a00:1", never: true},
	{addr: "64:ff9b::7f00:1", never: true},
	{addr: "64:ff9b::a00:1"},
	{addr: "64:ff9b::a9fe:a9fe"},
	{addr: "64:ff9b:1::a00:1", never: true},
	{addr: "100::1", never: true},
	{addr: "2001:0:4136:e378:8000:63bf:f5ff:fffe"},
	{addr: "2001:20::1"},
	{addr: "2001:db8::7"},
	{addr: "2002:a00:1::1"},
	{addr: "2002:a9fe:a9fe::1"},
	{addr: "2606:2800:21f::5efe:a00:1", never: true},
	{addr: "3fff::1"},
	{addr: "5f00::1", never: true},
	{addr: "fc00::1"},
	{addr: "fd00:ec2::254"},
	{addr: "fd00:ec2::23"},
	{addr: "fd20:ce::254"},
	{addr: "fd12:3456:789a::1"},
	{addr: "fe80::1", here: true, nowhere: true},
	{addr: "fec0::1"},
	{addr: "ff02::1", here: true, nowhere: true},
	{addr: "ff0e::1", here: true, nowhere: true},
}

// addressAttacks are connections to special-purpose addresses: by number with HTTP and TLS, and by
// an allowed name that resolves to them.
func addressAttacks() (attacks []attack, hosts map[string]*host) {
	hosts = make(map[string]*host)
	for i, s := range specials {
		addr := netip.MustParseAddr(s.addr)
		a := attack{here: s.here, never: s.never || s.here, nowhere: s.nowhere, reason: "."}
		if s.here {
			a.reason = ""
		}
		a.name = "HTTP to " + s.addr
		a.op = op.Op{Kind: op.TCP, Before: []string{"web.test"}, To: netip.AddrPortFrom(addr, 80).String(), Bytes: get("web.test", fmt.Sprintf("/%d", i))}
		a.status = 403
		attacks = append(attacks, a)
		a.name = "TLS to " + s.addr
		a.op.To, a.op.Bytes, a.status = netip.AddrPortFrom(addr, 443).String(), hello(sni("web.test")), 0
		attacks = append(attacks, a)
		if addr.Is4In6() {
			continue // no record has one
		}
		name := fmt.Sprintf("a%d.allowed.test", i)
		hosts[name] = &host{addrs: []string{s.addr}}
		q := attack{name: "a name of " + s.addr, op: op.Op{Kind: op.Resolve, Name: name}, reason: "."}
		if addr.Is6() {
			q.op.Type = uint16(dnsmessage.TypeAAAA)
		}
		attacks = append(attacks, q)
	}
	return attacks, hosts
}

// ownAttacks are connections to the public addresses of the host itself, by an allowed name:
// servers there may be open to the host only.
func ownAttacks() (attacks []attack, hosts map[string]*host) {
	const name, reason = "own.allowed.test", "an address of the host itself"
	hosts = map[string]*host{name: {addrs: []string{outside.Here4.String(), outside.Here6.String()}}}
	for _, addr := range []netip.Addr{outside.Here4, outside.Here6} {
		to := func(port uint16) string { return netip.AddrPortFrom(addr, port).String() }
		for _, a := range []attack{
			stream("HTTP to the host's own "+addr.String(), name, to(80), get(name, "/"), 403, reason),
			stream("TLS to the host's own "+addr.String(), name, to(443), hello(sni(name)), 0, reason),
		} {
			a.never = true
			attacks = append(attacks, a)
		}
	}
	return attacks, hosts
}

func get(host, path string) []byte {
	return []byte("GET " + path + " HTTP/1.1\r\nHost: " + host + "\r\n\r\n")
}

// hello is a ClientHello of a few bytes, with any extensions.
func hello(extensions ...[]byte) []byte {
	all := bytes.Join(extensions, nil)
	body := slices.Concat([]byte{3, 3}, make([]byte, 33), []byte{0, 2, 0x13, 1, 1, 0}, binary.BigEndian.AppendUint16(nil, uint16(len(all))), all)
	message := slices.Concat([]byte{1, 0, byte(len(body) >> 8), byte(len(body))}, body)
	return slices.Concat([]byte{22, 3, 1, byte(len(message) >> 8), byte(len(message))}, message)
}

func sni(names ...string) []byte {
	var list []byte
	for _, n := range names {
		list = append(append(list, 0, 0, byte(len(n))), n...)
	}
	return slices.Concat([]byte{0, 0, 0, byte(len(list) + 2), 0, byte(len(list))}, list)
}

var ech = []byte{0xfe, 0x0d, 0, 1, 0}

// Where the attacks go.
const (
	webAddr    = "93.184.215.14"
	sharedAddr = "93.184.215.20"
	apiAddr    = "93.184.215.21"
	gitAddr    = "93.184.215.22"
	dbAddr     = "93.184.215.23"
	cdnAddr    = "93.184.215.24"
	evilAddr   = "93.184.215.66"
)

// stream is an attack by bytes on a connection to an address, after names were resolved.
func stream(name, before, to string, bytes []byte, status int, reason string) attack {
	return attack{name: name, op: op.Op{Kind: op.TCP, Before: strings.Fields(before), To: to, Bytes: bytes}, status: status, reason: reason}
}

// webAttacks try to get past the decision by names.
func webAttacks() []attack {
	tls := func(name, before, to, reason string, extensions ...[]byte) attack {
		return stream(name, before, to, hello(extensions...), 0, reason)
	}
	http := func(name, before, to, text string, status int, reason string) attack {
		return stream(name, before, to, []byte(text), status, reason)
	}
	early := func(a attack) attack { // the server may speak first on such a port
		a.dialled = true
		return a
	}
	after := func(a attack, reached ...string) attack {
		a.reached = reached
		return a
	}
	partly := func(a attack) attack {
		a.partly = true
		return a
	}
	const (
		web, shared, api, db, cdn = webAddr + ":80", sharedAddr + ":80", apiAddr + ":80", dbAddr + ":8080", cdnAddr + ":80"
		post                      = "POST / HTTP/1.1\r\nHost: web.test\r\n"
	)
	page := func(host, path string) string { return string(get(host, path)) }
	return []attack{
		// Addresses and ports that no name opens.
		tls("an address without a name", "", "93.184.215.99:443", "no rule allows", sni("web.test")),
		http("an address without a name, HTTP", "", "93.184.215.99:80", page("web.test", "/"), 403, "no rule allows"),
		tls("another name's address", "web.test", evilAddr+":443", "no rule allows", sni("web.test")),
		tls("another name's address over IPv6", "web.test", "[2606:2800:21f::66]:443", "no rule allows", sni("web.test")),
		http("a port that no rule has", "web.test", webAddr+":22", "SSH-2.0-x\r\n", 0, "no rule allows"),
		http("mail", "web.test", webAddr+":25", "EHLO x\r\n", 0, "no rule allows"),
		http("mail submission", "web.test", webAddr+":587", "EHLO x\r\n", 0, "no rule allows"),
		http("a reverse shell", "", evilAddr+":4444", "$ ", 0, "no rule allows"),
		http("a SOCKS proxy", "web.test", webAddr+":1080", "\x05\x01\x00", 0, "no rule allows"),
		http("an HTTP proxy", "web.test", webAddr+":3128", "CONNECT evil.test:443 HTTP/1.1\r\nHost: evil.test:443\r\n\r\n", 0, "no rule allows"),
		http("a container engine", "", "10.1.0.5:2375", page("docker", "/containers/json"), 0, "no rule allows"),
		http("a port beside an allowed CIDR's", "", "10.1.0.5:22", "SSH-2.0-x\r\n", 0, "no rule allows"),
		http("redis beside an allowed CIDR's port", "", "10.1.0.5:6379", "PING\r\n", 0, "no rule allows"),
		tls("DNS over TLS", "web.test", webAddr+":853", "no rule allows", sni("web.test")),
		tls("DNS over TLS to a public resolver", "", "8.8.8.8:853", "no rule allows", sni("dns.google")),
		tls("DNS over HTTPS to a public resolver", "", "8.8.8.8:443", "no rule allows", sni("dns.google")),
		tls("DNS over HTTPS by address", "", "1.1.1.1:443", "no rule allows", sni("cloudflare-dns.com")),
		http("SSH to an address that only a name opens", "", "93.184.215.98:22", "SSH-2.0-x\r\n", 0, "no rule allows"),
		// Server names.
		tls("SNI of another name", "shared.test", sharedAddr+":443", "was not resolved for other.shared.test", sni("other.shared.test")),
		tls("SNI of a name below", "shared.test", sharedAddr+":443", "was not resolved", sni("x.shared.test")),
		tls("SNI with an allowed name as its beginning", "shared.test", sharedAddr+":443", "was not resolved", sni("shared.test.evil.test")),
		tls("SNI with an allowed name as its end", "a.cdn.test", cdnAddr+":443", "was not resolved", sni("evilcdn.test")),
		tls("SNI of an allowed name elsewhere", "shared.test", sharedAddr+":443", "was not resolved for web.test", sni("web.test")),
		tls("SNI of a denied name", "a.cdn.test", cdnAddr+":443", "was not resolved", sni("evil.cdn.test")),
		tls("SNI of an allowed name of another port", "web.test git.test", gitAddr+":443", "no rule allows", sni("git.test")),
		tls("no SNI", "web.test", webAddr+":443", "the client named no host"),
		tls("ECH", "web.test", webAddr+":443", "encrypted ClientHello", sni("web.test"), ech),
		tls("two names", "web.test", webAddr+":443", "two server names", sni("web.test", "evil.test")),
		tls("two SNI extensions", "web.test", webAddr+":443", "twice", sni("web.test"), sni("evil.test")),
		tls("NUL in SNI", "web.test", webAddr+":443", "refused", sni("web.test\x00.evil.test")),
		tls("trailing dot in SNI", "web.test", webAddr+":443", "refused", sni("web.test.")),
		tls("Unicode in SNI", "web.test", webAddr+":443", "refused", sni("wéb.test")),
		tls("underscore in SNI", "web.test", webAddr+":443", "refused", sni("a_b.test")),
		tls("empty SNI", "web.test", webAddr+":443", "", sni("")),
		tls("address as SNI", "web.test", webAddr+":443", "refused", sni(webAddr)),
		tls("decimal address as SNI", "web.test", webAddr+":443", "refused", sni("1572395790")),
		tls("TLS on port 80", "shared.test", shared, "was not resolved", sni("evil.test")),
		early(tls("TLS on another port", "db.test", dbAddr+":5432", "was not resolved", sni("evil.test"))),
		http("no TLS on port 443", "web.test", webAddr+":443", "SSH-2.0-OpenSSH_9.6\r\n", 0, "neither TLS nor HTTP"),
		http("SSLv2 on port 443", "web.test", webAddr+":443", "\x80\x2e\x01\x03\x01\x00\x15", 0, "neither TLS nor HTTP"),
		http("OpenVPN on port 443", "web.test", webAddr+":443", "\x00\x0e8abcdefgh\x00\x00\x00\x00\x00", 0, "neither TLS nor HTTP"),
		// Hosts of HTTP.
		http("another Host", "shared.test", shared, page("other.shared.test", "/"), 403, "was not resolved"),
		http("another Host on port 443", "shared.test", sharedAddr+":443", page("other.shared.test", "/"), 403, "was not resolved"),
		early(http("another Host on port 8080", "db.test", db, page("evil.test", "/"), 403, "was not resolved")),
		after(http("another Host in the second request", "shared.test", shared, page("shared.test", "/1")+page("other.shared.test", "/2"), 403, "was not resolved"),
			"GET shared.test /1"),
		after(http("another Host behind a body", "shared.test", shared,
			"POST /2 HTTP/1.1\r\nHost: shared.test\r\nContent-Length: 3\r\n\r\nabc"+page("evil.test", "/2"), 403, "was not resolved"), "POST shared.test /2"),
		after(http("another Host behind chunks", "shared.test", shared,
			"POST /3 HTTP/1.1\r\nHost: shared.test\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"+page("evil.test", "/2"), 403, "was not resolved"),
			"POST shared.test /3"),
		http("a denied Host", "a.cdn.test", cdn, page("evil.cdn.test", "/"), 403, "was not resolved"),
		http("a Host that was not resolved", "a.cdn.test", cdn, page("c.cdn.test", "/"), 403, "was not resolved"),
		http("the address as Host", "web.test", web, page(webAddr, "/"), 403, "the client named no host"),
		http("another address as Host, inspected", "", "10.2.0.5:80", page("10.1.0.5", "/"), 403, "a connection to 10.2.0.5"),
		http("another port in Host", "web.test", web, page("web.test:8080", "/"), 403, "a connection to port 80"),
		http("two Hosts", "web.test", web, "GET / HTTP/1.1\r\nHost: web.test\r\nHost: evil.test\r\n\r\n", 400, "twice"),
		http("no Host", "web.test", web, "GET / HTTP/1.1\r\n\r\n", 400, "no host"),
		http("Host with NUL", "web.test", web, page("web.test\x00.evil.test", "/"), 400, "byte"),
		http("Host with a trailing dot", "web.test", web, page("web.test.", "/"), 400, "host"),
		http("Host in decimal", "web.test", web, page("2130706433", "/"), 400, "host"),
		http("Host in octal", "web.test", web, page("0177.0.0.1", "/"), 400, "host"),
		http("Host in hexadecimal", "web.test", web, page("0x7f000001", "/"), 400, "host"),
		http("Host with a user", "web.test", web, page("web.test@evil.test", "/"), 400, "host"),
		http("Host in Unicode", "web.test", web, page("wéb.test", "/"), 400, "host"),
		http("a list of Hosts", "web.test", web, page("web.test,evil.test", "/"), 400, "host"),
		http("absolute target", "web.test", web, "GET http://evil.test/ HTTP/1.1\r\nHost: web.test\r\n\r\n", 400, "target"),
		http("CONNECT", "web.test", web, "CONNECT web.test:80 HTTP/1.1\r\nHost: web.test:80\r\n\r\n", 403, "tunnel"),
		// Smuggling.
		http("CL.TE", "web.test", web, post+"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nG", 400, "both"),
		http("TE.CL", "web.test", web, post+"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\nG", 400, "both"),
		http("TE.TE", "web.test", web, post+"Transfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n0\r\n\r\nG", 400, "twice"),
		http("an odd encoding", "web.test", web, post+"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\nG", 400, ""),
		http("an encoding behind a tab", "web.test", web, post+"Transfer-Encoding:\tchunked, identity\r\n\r\n0\r\n\r\nG", 400, ""),
		http("a space before the colon", "web.test", web, post+"Content-Length : 5\r\n\r\nhello", 400, ""),
		http("two lengths", "web.test", web, post+"Content-Length: 0\r\nContent-Length: 30\r\n\r\n", 400, "twice"),
		http("a list of lengths", "web.test", web, post+"Content-Length: 0, 30\r\n\r\n", 400, ""),
		http("a length with a sign", "web.test", web, post+"Content-Length: +5\r\n\r\nhello", 400, ""),
		http("a length in hexadecimal", "web.test", web, post+"Content-Length: 0x5\r\n\r\nhello", 400, ""),
		http("folded field", "web.test", web, "GET / HTTP/1.1\r\nA: b\r\n Host: evil.test\r\nHost: web.test\r\n\r\n", 400, "second line"),
		http("bare LF", "web.test", web, "GET / HTTP/1.1\nHost: web.test\n\n", 400, "LF"),
		http("bare CR", "web.test", web, "GET / HTTP/1.1\r\nA: b\rHost: evil.test\r\nHost: web.test\r\n\r\n", 400, "byte"),
		http("NUL in a field", "web.test", web, "GET / HTTP/1.1\r\nA: b\x00c\r\nHost: web.test\r\n\r\n", 400, "byte"),
		http("LF in front", "web.test", web, "\r\n"+page("evil.test", "/"), 400, "empty line"),
		early(http("LF in front on port 8080", "db.test", db, "\r\n"+page("evil.test", "/"), 400, "empty line")),
		early(http("space in front on port 8080", "db.test", db, " "+page("evil.test", "/"), 400, "request line")),
		early(http("lower-case method on port 8080", "db.test", db, "get / HTTP/1.1\r\nHost: evil.test\r\n\r\n", 400, "method")),
		early(http("byte outside of ASCII on port 8080", "db.test", db, "GET /\xff HTTP/1.1\r\nHost: evil.test\r\n\r\n", 400, "target")),
		early(http("PROXY protocol on port 8080", "db.test", db, "PROXY TCP4 1.1.1.1 1.1.1.1 1 80\r\n"+page("evil.test", "/"), 400, "colon")),
		early(http("PROXY protocol 2 on port 8080", "db.test", db, "\r\n\r\n\x00\r\nQUIT\n", 400, "empty line")),
		http("HTTP/2 without TLS", "web.test", web, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "version"),
		http("HTTP/0.9", "web.test", web, "GET /\r\n", 0, ""),
		after(http("HTTP/2 after an upgrade", "api.test", api,
			"GET /v1/x HTTP/1.1\r\nHost: api.test\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\nPRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
			400, "version"), "GET api.test /v1/x"),
		http("TLS by upgrade", "web.test", web, "GET / HTTP/1.1\r\nHost: web.test\r\nConnection: Upgrade\r\nUpgrade: TLS/1.2\r\n\r\n", 403, "upgrade"),
		partly(http("chunk extension", "web.test", web, post+"Transfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n0\r\n\r\n", 0, "chunk size")),
		partly(http("chunk longer than said", "web.test", web, post+"Transfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n", 0, "longer")),
		partly(http("a chunk's size with a sign", "web.test", web, post+"Transfer-Encoding: chunked\r\n\r\n+3\r\nabc\r\n0\r\n\r\n", 0, "chunk size")),
		partly(http("a chunk's size that overflows", "web.test", web, post+"Transfer-Encoding: chunked\r\n\r\n10000000000000003\r\nabc\r\n0\r\n\r\n", 0, "chunk size")),
		http("endless head", "web.test", web, "GET / HTTP/1.1\r\nHost: web.test\r\nA: "+strings.Repeat("b", 70000), 400, "more than"),
		// Methods and paths.
		http("method", "api.test", api, "PUT /v1/x HTTP/1.1\r\nHost: api.test\r\nContent-Length: 0\r\n\r\n", 403, "no rule allows PUT"),
		http("path", "api.test", api, page("api.test", "/v2/x"), 403, "no rule allows GET /v2/x"),
		http("denied path", "api.test", api, page("api.test", "/v1/admin/x"), 403, "is denied"),
		http("denied path, encoded", "api.test", api, page("api.test", "/v1/%61dmin/x"), 403, "is denied"),
		http("denied path, encoded slash", "api.test", api, page("api.test", "/v1%2fadmin/x"), 403, "is denied"),
		http("dots", "api.test", api, page("api.test", "/v1/../v2/x"), 403, "segment"),
		http("encoded dots", "api.test", api, page("api.test", "/v1/%2e%2e/v2"), 403, "segment"),
		http("twice encoded", "api.test", api, page("api.test", "/v1/%252e%252e/v2"), 403, "byte"),
		http("path parameter", "api.test", api, page("api.test", "/v1/..;/v2"), 403, "byte"),
		http("backslash", "api.test", api, page("api.test", `/v1/..\v2`), 403, "byte"),
		http("two slashes", "api.test", api, page("api.test", "/v1//admin/x"), 403, "segment"),
		http("method in a field", "api.test", api, "POST /v1/x HTTP/1.1\r\nHost: api.test\r\nX-HTTP-Method-Override: DELETE\r\nContent-Length: 0\r\n\r\n", 403,
			"x-http-method-override"),
		http("path in a field", "api.test", api, "GET /v1/x HTTP/1.1\r\nHost: api.test\r\nX-Original-URL: /v2\r\n\r\n", 403, "x-original-url"),
		after(http("path in the second request", "api.test", api, page("api.test", "/v1/x")+page("api.test", "/v2/x"), 403, "no rule allows"), "GET api.test /v1/x"),
		http("method to a CIDR", "", "10.2.0.5:80", "POST / HTTP/1.1\r\nHost: any.test\r\nContent-Length: 0\r\n\r\n", 403, "no rule allows POST"),
		http("a denied name, whose address a CIDR allows", "printer.cdn.test", "10.1.0.5:80", page("printer.cdn.test", "/"), 403, "is denied"),
		http("denied path of a name to a CIDR", "", "10.2.0.5:80", page("y.cdn.test", "/secret/x"), 403, "is denied"),
		http("denied name to a CIDR", "", "10.2.0.5:80", page("evil.cdn.test", "/"), 403, "is denied"),
		// Other protocols.
		early(http("no HTTP where requests are read, port 5432", "", "10.2.0.5:5432", "\x00\x01\x02", 0, "neither TLS nor HTTP")),
		http("no HTTP where requests are read", "", "10.2.0.5:80", "\x00\x01\x02", 0, "neither TLS nor HTTP"),
		http("git", "", evilAddr+":9418", "0032git-upload-pack /x\x00host=web.test\x00", 0, "no rule allows"),
		http("memcached", "", evilAddr+":11211", "stats\r\n", 0, "no rule allows"),
		http("mongo", "", evilAddr+":27017", "\x3a\x00\x00\x00", 0, "no rule allows"),
	}
}

// nameAttacks are questions to the nameserver.
func nameAttacks() (attacks []attack, hosts map[string]*host) {
	question := func(what, name string, t dnsmessage.Type, code dnsmessage.RCode, reason string, addresses ...string) {
		attacks = append(attacks, attack{
			name: "DNS: " + what, op: op.Op{Kind: op.Resolve, Name: name, Type: uint16(t)}, code: code, addresses: addresses, reason: reason,
		})
	}
	const none, ok, a, aaaa = dnsmessage.RCodeNameError, dnsmessage.RCodeSuccess, dnsmessage.TypeA, dnsmessage.TypeAAAA
	tunnel := strings.Repeat(strings.Repeat("deadbeef", 7)+".", 3)
	question("a name that no rule has", "evil.test", a, none, "no rule allows")
	question("over IPv6", "evil.test", aaaa, none, "no rule allows")
	question("TXT", "evil.test", dnsmessage.TypeTXT, none, "no rule allows")
	question("a tunnel", tunnel+"evil.test", a, none, "no rule allows")
	question("a tunnel by TXT", tunnel+"evil.test", dnsmessage.TypeTXT, none, "no rule allows")
	question("a tunnel by NULL", tunnel+"evil.test", 10, none, "no rule allows")
	question("TXT of an allowed name", tunnel+"allowed.test", dnsmessage.TypeTXT, ok, "")
	question("MX of an allowed name", "web.test", dnsmessage.TypeMX, ok, "")
	question("HTTPS of an allowed name", "web.test", 65, ok, "")
	question("SVCB of an allowed name", "web.test", 64, ok, "")
	question("ANY of an allowed name", "web.test", dnsmessage.TypeALL, dnsmessage.RCodeNotImplemented, "")
	question("a zone", "web.test", dnsmessage.TypeAXFR, dnsmessage.RCodeNotImplemented, "")
	question("an allowed name as the beginning", "web.test.evil.test", a, none, "no rule allows")
	question("an allowed name as the end", "evilweb.test", a, none, "no rule allows")
	question("an allowed suffix as the end", "evilcdn.test", a, none, "no rule allows")
	question("the suffix itself", "cdn.test", a, none, "no rule allows")
	question("a denied name", "evil.cdn.test", a, none, "denied")
	question("a denied name in capitals", "EVIL.CDN.test", a, none, "denied")
	question("a name below an exact one", "x.web.test", a, none, "no rule allows")
	question("the host", "localhost", a, none, "no rule allows")
	question("a name of the host's own", "intranet", a, none, "no rule allows")
	question("metadata", "metadata.google.internal", a, none, "no rule allows")
	question("an address as a name", "169.254.169.254", a, none, "number")
	question("an address in decimal", "2852039166", a, none, "number")
	question("an address in hexadecimal", "0xa9fea9fe", a, none, "number")
	question("an address in octal", "0251.0376.0251.0376", a, none, "number")
	question("the reverse of an address", "254.169.254.169.in-addr.arpa", dnsmessage.TypePTR, none, "no rule allows")
	question("NUL", "web.test\x00.cdn.test", a, none, "byte")
	question("a dot in a label", "evil\x2etest\x00.cdn.test", a, none, "byte")
	question("an underscore", "_x.cdn.test", a, none, "byte")
	question("a space", "a b.cdn.test", a, none, "byte")
	question("a byte outside of ASCII", "\xe9.cdn.test", a, none, "ASCII")
	question("a hyphen in front", "-x.cdn.test", a, none, "hyphen")
	question("the root", ".", dnsmessage.TypeNS, none, "")
	for _, server := range []string{"8.8.8.8:53", "[2001:4860:4860::8888]:53", "10.0.0.1:53", "169.254.169.253:53", "93.184.215.66:53"} {
		question("another nameserver, "+server, "evil.test", a, none, "no rule allows")
		attacks[len(attacks)-1].op.To = server
	}
	// Answers that lead elsewhere.
	hosts = map[string]*host{
		"internal.corp":            {addrs: []string{"10.0.0.1"}},
		"cname.allowed.test":       {cname: []string{"internal.corp"}, addrs: []string{"10.0.0.1"}},
		"chain.allowed.test":       {cname: []string{"x.cdn.test", "y.example", "internal.corp"}, addrs: []string{"169.254.169.254"}},
		"cname6.allowed.test":      {cname: []string{"internal.corp"}, addrs: []string{"fd00:ec2::254"}},
		"mixed.allowed.test":       {addrs: []string{"10.0.0.1", "93.184.215.40", "127.0.0.1", "169.254.169.254"}},
		"mixed6.allowed.test":      {addrs: []string{"fd00::1", "2606:2800:21f::40", "::1", "64:ff9b::a00:1"}},
		"servfail.allowed.test":    {code: dnsmessage.RCodeServerFailure},
		"refused.allowed.test":     {code: dnsmessage.RCodeRefused},
		"rebind.allowed.test":      {addrs: []string{"93.184.215.41"}, then: []string{"10.0.0.1"}},
		"forged-id.allowed.test":   {addrs: []string{"93.184.215.42"}, odd: forged(func(m *dnsmessage.Message) { m.ID++ }, "93.184.215.66")},
		"forged-name.allowed.test": {addrs: []string{"93.184.215.43"}, odd: forged(func(m *dnsmessage.Message) { m.Questions[0].Name = dnsmessage.MustNewName("web.test.") }, "93.184.215.66")},
		"forged-type.allowed.test": {addrs: []string{"93.184.215.44"}, odd: forged(func(m *dnsmessage.Message) { m.Questions[0].Type = dnsmessage.TypeTXT }, "93.184.215.66")},
		"many.allowed.test":        {addrs: addressList("10.9.%d.%d", 200)},
		"garbage.allowed.test": {addrs: []string{"93.184.215.45"}, odd: func(q *dnsmessage.Message, reply []byte) [][]byte {
			junk := bytes.Repeat([]byte{0xc0, 0x0c}, 100)
			return [][]byte{append(binary.BigEndian.AppendUint16(nil, q.ID), junk...), {1}, reply}
		}},
	}
	question("CNAME to an internal name", "cname.allowed.test", a, ok, "no rule allows")
	question("a chain of CNAMEs to metadata", "chain.allowed.test", a, ok, "no rule allows")
	question("CNAME to metadata over IPv6", "cname6.allowed.test", aaaa, ok, "no rule allows")
	question("public and private addresses", "mixed.allowed.test", a, ok, "", "93.184.215.40")
	question("public and private addresses over IPv6", "mixed6.allowed.test", aaaa, ok, "", "2606:2800:21f::40")
	question("many private addresses", "many.allowed.test", a, ok, "no rule allows")
	question("a private address in the host's file", "intranet.allowed.test", a, ok, "no rule allows")
	question("loopback in the host's file", "self.allowed.test", a, ok, "loopback")
	question("an answer with another id first", "forged-id.allowed.test", a, ok, "", "93.184.215.42")
	question("an answer to another question first", "forged-name.allowed.test", a, ok, "", "93.184.215.43")
	question("an answer of another type first", "forged-type.allowed.test", a, ok, "", "93.184.215.44")
	question("garbage first", "garbage.allowed.test", a, ok, "", "93.184.215.45")
	// Rebinding: the name's second answer is private. The sandbox gets the first one again, or none.
	for range 2 {
		question("a name that is bound again", "rebind.allowed.test", a, ok, "", "93.184.215.41")
	}
	rebound := stream("an address that a name was bound to", "rebind.allowed.test", "10.0.0.1:80", get("rebind.allowed.test", "/"), 403, ".")
	attacks = append(attacks, rebound,
		stream("an address of a forged answer", "forged-id.allowed.test", evilAddr+":80", get("forged-id.allowed.test", "/"), 403, "no rule allows"),
		stream("the private one of a name's addresses", "mixed.allowed.test", "10.0.0.1:80", get("mixed.allowed.test", "/"), 403, "."))
	return attacks, hosts
}

func addressList(format string, n int) (list []string) {
	for i := range n {
		list = append(list, fmt.Sprintf(format, i/100, i%100+1))
	}
	return list
}

// datagramAttacks are attacks over UDP. The kernel refuses all but DNS, which the gateway answers
// whatever its destination.
func datagramAttacks() (attacks []attack) {
	for _, d := range []struct{ what, to, bytes string }{
		{"QUIC", webAddr + ":443", "\xc3\x00\x00\x00\x01"},
		{"QUIC over IPv6", "[2606:2800:21f::14]:443", "\xc3\x00\x00\x00\x01"},
		{"NTP", evilAddr + ":123", "\x23"},
		{"STUN", evilAddr + ":3478", "\x00\x01\x00\x00\x21\x12\xa4\x42"},
		{"WireGuard", evilAddr + ":51820", "\x01\x00\x00\x00"},
		{"IPsec", evilAddr + ":4500", "\x00"},
		{"syslog", evilAddr + ":514", "<0>x"},
		{"TFTP", evilAddr + ":69", "\x00\x01x\x00octet\x00"},
		{"SNMP to a private address", "10.0.0.1:161", "\x30"},
		{"metadata", "169.254.169.254:443", "x"},
		{"an allowed CIDR, whose rule is for TCP", "10.1.0.5:443", "x"},
		{"NAT64 of a private address", "[64:ff9b::a00:1]:443", "x"},
	} {
		attacks = append(attacks, attack{name: "UDP: " + d.what, op: op.Op{Kind: op.UDP, Before: []string{"web.test"}, To: d.to, Bytes: []byte(d.bytes)}, here: true})
	}
	for _, d := range []struct{ what, to string }{{"SSDP", "239.255.255.250:1900"}, {"mDNS", "224.0.0.251:5353"}, {"mDNS over IPv6", "[ff02::fb%lo]:5353"}} {
		attacks = append(attacks, attack{name: "UDP: " + d.what, op: op.Op{Kind: op.Send, To: d.to, Bytes: []byte("M-SEARCH")}, here: true, nowhere: true})
	}
	return attacks
}
