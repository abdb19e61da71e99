package gateway

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/net/dns/dnsmessage"
)

// The policy of the attacks below.
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
- {name: lan, allow: 10.1.0.0/16, ports: [80, 5432]}
- {name: lan-api, allow: 10.2.0.0/16, ports: [80, 443, 5432], inspect: true, methods: [GET]}
`

// attackedHosts are the names that the host's resolver has.
var attackedHosts = map[string]string{
	"web.test": "93.184.215.14", "shared.test": "93.184.215.20", "other.shared.test": "93.184.215.20", "api.test": "93.184.215.21", "git.test": "93.184.215.22",
	"db.test": "93.184.215.23", "a.cdn.test": "93.184.215.24", "b.cdn.test": "93.184.215.24", "evil.cdn.test": "93.184.215.24", "evil.test": "93.184.215.66",
	"printer.cdn.test": "10.1.0.5",
}

// recorded is a server that stands for an address, with what came to it.
type recorded struct {
	mu       sync.Mutex
	requests []string
}

func (s *recorded) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.requests = append(s.requests, r.Method+" "+r.Host+" "+r.URL.Path)
	_, _ = io.Copy(io.Discard, r.Body) // it is looked at by its effects
}

// newAttacked is a world with the policy above. Its servers speak HTTP on the ports 80 and 8080,
// and read anything elsewhere.
func newAttacked(t *testing.T) (*world, *recorded) {
	t.Helper()
	w := newWorld(t, attacked)
	seen := &recorded{}
	for name, addr := range attackedHosts {
		w.host(name, addr)
	}
	addrs := []string{"93.184.215.14", "93.184.215.20", "93.184.215.21", "93.184.215.22", "93.184.215.23", "93.184.215.24", "93.184.215.66", "10.1.0.5", "10.2.0.5", "10.9.0.5", "169.254.169.254", "127.0.0.1"}
	for _, addr := range addrs {
		for _, port := range []string{"80", "8080"} {
			w.http(addr+":"+port, seen.ServeHTTP)
		}
		for _, port := range []string{"22", "443", "853", "5432"} {
			w.raw(addr+":"+port, func(c *net.TCPConn) {
				_, _ = io.Copy(io.Discard, c) // events tell whether bytes came
			})
		}
	}
	return w, seen
}

// A hello is a ClientHello of a few bytes, with any extensions.
func hello(extensions ...[]byte) string {
	all := bytes.Join(extensions, nil)
	body := slices.Concat([]byte{3, 3}, make([]byte, 33), []byte{0, 2, 0x13, 1, 1, 0}, binary.BigEndian.AppendUint16(nil, uint16(len(all))), all)
	message := slices.Concat([]byte{1, 0, byte(len(body) >> 8), byte(len(body))}, body)
	return string(slices.Concat([]byte{22, 3, 1, byte(len(message) >> 8), byte(len(message))}, message))
}

func sni(names ...string) []byte {
	var list []byte
	for _, n := range names {
		list = append(append(list, 0, 0, byte(len(n))), n...)
	}
	return slices.Concat([]byte{0, 0, 0, byte(len(list) + 2), 0, byte(len(list))}, list)
}

var ech = []byte{0xfe, 0x0d, 0, 1, 0}

func getFrom(host, path string) string {
	return "GET " + path + " HTTP/1.1\r\nHost: " + host + "\r\n\r\n"
}

// Attacks over TCP. All are refused, with an event. The server sees nothing else.
var attacks = map[string]struct {
	resolve string // that a program inside asks for before it connects
	dst     string
	send    string
	reached string // requests that come to the server first
	status  int    // of the last response; 0 for a reset, -2 for one after the server has a part of it
	reason  string // part of it
}{
	// Addresses.
	"an address without a name":       {dst: "93.184.215.14:443", send: hello(sni("web.test")), reason: "no rule allows"},
	"an address without a name, HTTP": {dst: "93.184.215.14:80", send: getFrom("web.test", "/"), status: 403, reason: "no rule allows"},
	"another name's address":          {resolve: "web.test", dst: "93.184.215.66:443", send: hello(sni("web.test")), reason: "no rule allows"},
	"a port that no rule has":         {resolve: "web.test", dst: "93.184.215.14:22", send: "SSH-2.0-x\r\n", reason: "no rule allows"},
	"loopback":                        {dst: "127.0.0.1:80", send: getFrom("web.test", "/"), status: 403, reason: "loopback"},
	"mapped loopback":                 {dst: "[::ffff:127.0.0.1]:80", send: getFrom("web.test", "/"), status: 403, reason: "loopback"},
	"IPv6 loopback":                   {dst: "[::1]:443", send: hello(sni("web.test")), reason: "reserved"},
	"NAT64 of loopback":               {dst: "[64:ff9b::7f00:1]:443", send: hello(sni("web.test")), reason: "loopback"},
	"NAT64 of metadata":               {dst: "[64:ff9b::a9fe:a9fe]:80", send: getFrom("web.test", "/"), status: 403, reason: "no rule allows"},
	"6to4":                            {dst: "[2002:7f00:1::]:443", send: hello(sni("web.test")), reason: "no rule allows"},
	"Teredo":                          {dst: "[2001:0:4136:e378:8000:63bf:3fff:fdd2]:443", send: hello(sni("web.test")), reason: "no rule allows"},
	"metadata":                        {dst: "169.254.169.254:80", send: getFrom("169.254.169.254", "/latest/meta-data/"), status: 403, reason: "no rule allows"},
	"metadata with an allowed host":   {resolve: "web.test", dst: "169.254.169.254:80", send: getFrom("web.test", "/"), status: 403, reason: "no rule allows"},
	"private beside an allowed CIDR":  {dst: "10.9.0.5:80", send: getFrom("10.9.0.5", "/"), status: 403, reason: "no rule allows"},
	"a port beside an allowed CIDR's": {dst: "10.1.0.5:22", send: "SSH-2.0-x\r\n", reason: "no rule allows"},
	"unspecified":                     {dst: "0.0.0.0:80", send: getFrom("web.test", "/"), status: 403, reason: "unspecified"},
	"multicast":                       {dst: "224.0.0.1:80", send: getFrom("web.test", "/"), status: 403, reason: "multicast"},
	"DoT":                             {resolve: "web.test", dst: "93.184.215.14:853", send: hello(sni("web.test")), reason: "no rule allows"},
	// Server names.
	"SNI of another name":                       {resolve: "shared.test", dst: "93.184.215.20:443", send: hello(sni("other.shared.test")), reason: "was not resolved for other.shared.test"},
	"SNI of a name below":                       {resolve: "shared.test", dst: "93.184.215.20:443", send: hello(sni("x.shared.test")), reason: "was not resolved"},
	"SNI with an allowed name as its beginning": {resolve: "shared.test", dst: "93.184.215.20:443", send: hello(sni("shared.test.evil.test")), reason: "was not resolved"},
	"SNI with an allowed name as its end":       {resolve: "a.cdn.test", dst: "93.184.215.24:443", send: hello(sni("evilcdn.test")), reason: "was not resolved"},
	"SNI of an allowed name elsewhere":          {resolve: "shared.test", dst: "93.184.215.20:443", send: hello(sni("web.test")), reason: "was not resolved for web.test"},
	"SNI of a denied name":                      {resolve: "a.cdn.test", dst: "93.184.215.24:443", send: hello(sni("evil.cdn.test")), reason: "was not resolved"},
	"SNI of an allowed name of another port":    {resolve: "web.test git.test", dst: "93.184.215.22:443", send: hello(sni("git.test")), reason: "no rule allows"},
	"no SNI":                                    {resolve: "web.test", dst: "93.184.215.14:443", send: hello(), reason: "the client named no host"},
	"ECH":                                       {resolve: "web.test", dst: "93.184.215.14:443", send: hello(sni("web.test"), ech), reason: "encrypted ClientHello"},
	"two names":                                 {resolve: "web.test", dst: "93.184.215.14:443", send: hello(sni("web.test", "evil.test")), reason: "two server names"},
	"two SNI extensions":                        {resolve: "web.test", dst: "93.184.215.14:443", send: hello(sni("web.test"), sni("evil.test")), reason: "twice"},
	"NUL in SNI":                                {resolve: "web.test", dst: "93.184.215.14:443", send: hello(sni("web.test\x00.evil.test")), reason: "refused"},
	"trailing dot in SNI":                       {resolve: "web.test", dst: "93.184.215.14:443", send: hello(sni("web.test.")), reason: "refused"},
	"address as SNI":                            {resolve: "web.test", dst: "93.184.215.14:443", send: hello(sni("93.184.215.14")), reason: "refused"},
	"TLS that must be inspected":                {resolve: "api.test", dst: "93.184.215.21:443", send: hello(sni("api.test")), reason: "have to be read"},
	"TLS to a CIDR that must be inspected":      {dst: "10.2.0.5:443", send: hello(sni("api.test")), reason: "have to be read"},
	"TLS on port 80":                            {resolve: "shared.test", dst: "93.184.215.20:80", send: hello(sni("evil.test")), reason: "was not resolved"},
	"TLS on another port":                       {resolve: "db.test", dst: "93.184.215.23:5432", send: hello(sni("evil.test")), reason: "was not resolved"},
	"no TLS on port 443":                        {resolve: "web.test", dst: "93.184.215.14:443", send: "SSH-2.0-OpenSSH_9.6\r\n", reason: "neither TLS nor HTTP"},
	"SSLv2 on port 443":                         {resolve: "web.test", dst: "93.184.215.14:443", send: "\x80\x2e\x01\x03\x01\x00\x15", reason: "neither TLS nor HTTP"},
	// Hosts of HTTP.
	"another Host":                       {resolve: "shared.test", dst: "93.184.215.20:80", send: getFrom("other.shared.test", "/"), status: 403, reason: "was not resolved"},
	"another Host on port 443":           {resolve: "shared.test", dst: "93.184.215.20:443", send: getFrom("other.shared.test", "/"), status: 403, reason: "was not resolved"},
	"another Host on port 8080":          {resolve: "db.test", dst: "93.184.215.23:8080", send: getFrom("evil.test", "/"), status: 403, reason: "was not resolved"},
	"another Host in the second request": {resolve: "shared.test", dst: "93.184.215.20:80", send: getFrom("shared.test", "/1") + getFrom("other.shared.test", "/2"), reached: "GET shared.test /1", status: 403, reason: "was not resolved"},
	"another Host behind a body":         {resolve: "shared.test", dst: "93.184.215.20:80", send: "POST /1 HTTP/1.1\r\nHost: shared.test\r\nContent-Length: 3\r\n\r\nabc" + getFrom("evil.test", "/2"), reached: "POST shared.test /1", status: 403, reason: "was not resolved"},
	"another Host behind chunks":         {resolve: "shared.test", dst: "93.184.215.20:80", send: "POST /1 HTTP/1.1\r\nHost: shared.test\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n" + getFrom("evil.test", "/2"), reached: "POST shared.test /1", status: 403, reason: "was not resolved"},
	"a denied Host":                      {resolve: "a.cdn.test", dst: "93.184.215.24:80", send: getFrom("evil.cdn.test", "/"), status: 403, reason: "was not resolved"},
	"a Host that was not resolved":       {resolve: "a.cdn.test", dst: "93.184.215.24:80", send: getFrom("c.cdn.test", "/"), status: 403, reason: "was not resolved"},
	"the address as Host":                {resolve: "web.test", dst: "93.184.215.14:80", send: getFrom("93.184.215.14", "/"), status: 403, reason: "the client named no host"},
	"another address as Host, inspected": {dst: "10.2.0.5:80", send: getFrom("10.1.0.5", "/"), status: 403, reason: "a connection to 10.2.0.5"},
	"another port in Host":               {resolve: "web.test", dst: "93.184.215.14:80", send: getFrom("web.test:8080", "/"), status: 403, reason: "a connection to port 80"},
	"two Hosts":                          {resolve: "web.test", dst: "93.184.215.14:80", send: "GET / HTTP/1.1\r\nHost: web.test\r\nHost: evil.test\r\n\r\n", status: 400, reason: "twice"},
	"no Host":                            {resolve: "web.test", dst: "93.184.215.14:80", send: "GET / HTTP/1.1\r\n\r\n", status: 400, reason: "no host"},
	"Host with NUL":                      {resolve: "web.test", dst: "93.184.215.14:80", send: getFrom("web.test\x00.evil.test", "/"), status: 400, reason: "byte"},
	"Host with a trailing dot":           {resolve: "web.test", dst: "93.184.215.14:80", send: getFrom("web.test.", "/"), status: 400, reason: "host"},
	"Host in decimal":                    {resolve: "web.test", dst: "93.184.215.14:80", send: getFrom("2130706433", "/"), status: 400, reason: "host"},
	"absolute target":                    {resolve: "web.test", dst: "93.184.215.14:80", send: "GET http://evil.test/ HTTP/1.1\r\nHost: web.test\r\n\r\n", status: 400, reason: "target"},
	"CONNECT":                            {resolve: "web.test", dst: "93.184.215.14:80", send: "CONNECT web.test:80 HTTP/1.1\r\nHost: web.test:80\r\n\r\n", status: 403, reason: "tunnel"},
	// Smuggling.
	"CL.TE":                              {resolve: "web.test", dst: "93.184.215.14:80", send: "POST / HTTP/1.1\r\nHost: web.test\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nG", status: 400, reason: "both"},
	"TE.TE":                              {resolve: "web.test", dst: "93.184.215.14:80", send: "POST / HTTP/1.1\r\nHost: web.test\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n0\r\n\r\nG", status: 400, reason: "twice"},
	"two lengths":                        {resolve: "web.test", dst: "93.184.215.14:80", send: "POST / HTTP/1.1\r\nHost: web.test\r\nContent-Length: 0\r\nContent-Length: 30\r\n\r\n", status: 400, reason: "twice"},
	"folded field":                       {resolve: "web.test", dst: "93.184.215.14:80", send: "GET / HTTP/1.1\r\nA: b\r\n Host: evil.test\r\nHost: web.test\r\n\r\n", status: 400, reason: "second line"},
	"bare LF":                            {resolve: "web.test", dst: "93.184.215.14:80", send: "GET / HTTP/1.1\nHost: web.test\n\n", status: 400, reason: "LF"},
	"bare CR":                            {resolve: "web.test", dst: "93.184.215.14:80", send: "GET / HTTP/1.1\r\nA: b\rHost: evil.test\r\nHost: web.test\r\n\r\n", status: 400, reason: "byte"},
	"LF in front":                        {resolve: "web.test", dst: "93.184.215.14:80", send: "\r\n" + getFrom("evil.test", "/"), status: 400, reason: "empty line"},
	"LF in front on port 8080":           {resolve: "db.test", dst: "93.184.215.23:8080", send: "\r\n" + getFrom("evil.test", "/"), status: 400, reason: "empty line"},
	"space in front on port 8080":        {resolve: "db.test", dst: "93.184.215.23:8080", send: " " + getFrom("evil.test", "/"), status: 400, reason: "request line"},
	"lower-case method on port 8080":     {resolve: "db.test", dst: "93.184.215.23:8080", send: "get / HTTP/1.1\r\nHost: evil.test\r\n\r\n", status: 400, reason: "method"},
	"byte outside of ASCII on port 8080": {resolve: "db.test", dst: "93.184.215.23:8080", send: "GET /\xff HTTP/1.1\r\nHost: evil.test\r\n\r\n", status: 400, reason: "target"},
	"PROXY protocol on port 8080":        {resolve: "db.test", dst: "93.184.215.23:8080", send: "PROXY TCP4 1.1.1.1 1.1.1.1 1 80\r\n" + getFrom("evil.test", "/"), status: 400, reason: "colon"},
	"PROXY protocol 2 on port 8080":      {resolve: "db.test", dst: "93.184.215.23:8080", send: "\r\n\r\n\x00\r\nQUIT\n", status: 400, reason: "empty line"},
	"HTTP/2 without TLS":                 {resolve: "web.test", dst: "93.184.215.14:80", send: "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", status: 400, reason: "version"},
	"HTTP/2 by upgrade":                  {resolve: "web.test", dst: "93.184.215.14:80", send: "GET / HTTP/1.1\r\nHost: web.test\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\nPRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", reached: "GET web.test /", status: 400, reason: "version"},
	"TLS by upgrade":                     {resolve: "web.test", dst: "93.184.215.14:80", send: "GET / HTTP/1.1\r\nHost: web.test\r\nConnection: Upgrade\r\nUpgrade: TLS/1.2\r\n\r\n", status: 403, reason: "upgrade"},
	"chunk extension":                    {resolve: "web.test", dst: "93.184.215.14:80", send: "POST / HTTP/1.1\r\nHost: web.test\r\nTransfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n0\r\n\r\n", status: -2, reason: "chunk size"},
	"chunk longer than said":             {resolve: "web.test", dst: "93.184.215.14:80", send: "POST / HTTP/1.1\r\nHost: web.test\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n", status: -2, reason: "longer"},
	"endless head":                       {resolve: "web.test", dst: "93.184.215.14:80", send: "GET / HTTP/1.1\r\nHost: web.test\r\nA: " + strings.Repeat("b", 70000), status: 400, reason: "more than"},
	// Methods and paths.
	"method":                     {resolve: "api.test", dst: "93.184.215.21:80", send: "PUT /v1/x HTTP/1.1\r\nHost: api.test\r\nContent-Length: 0\r\n\r\n", status: 403, reason: "no rule allows PUT"},
	"path":                       {resolve: "api.test", dst: "93.184.215.21:80", send: getFrom("api.test", "/v2/x"), status: 403, reason: "no rule allows GET /v2/x"},
	"denied path":                {resolve: "api.test", dst: "93.184.215.21:80", send: getFrom("api.test", "/v1/admin/x"), status: 403, reason: "is denied"},
	"denied path, encoded":       {resolve: "api.test", dst: "93.184.215.21:80", send: getFrom("api.test", "/v1/%61dmin/x"), status: 403, reason: "is denied"},
	"denied path, encoded slash": {resolve: "api.test", dst: "93.184.215.21:80", send: getFrom("api.test", "/v1%2fadmin/x"), status: 403, reason: "is denied"},
	"dots":                       {resolve: "api.test", dst: "93.184.215.21:80", send: getFrom("api.test", "/v1/../v2/x"), status: 403, reason: "segment"},
	"encoded dots":               {resolve: "api.test", dst: "93.184.215.21:80", send: getFrom("api.test", "/v1/%2e%2e/v2"), status: 403, reason: "segment"},
	"twice encoded":              {resolve: "api.test", dst: "93.184.215.21:80", send: getFrom("api.test", "/v1/%252e%252e/v2"), status: 403, reason: "byte"},
	"path parameter":             {resolve: "api.test", dst: "93.184.215.21:80", send: getFrom("api.test", "/v1/..;/v2"), status: 403, reason: "byte"},
	"method in a field":          {resolve: "api.test", dst: "93.184.215.21:80", send: "POST /v1/x HTTP/1.1\r\nHost: api.test\r\nX-HTTP-Method-Override: DELETE\r\nContent-Length: 0\r\n\r\n", status: 403, reason: "x-http-method-override"},
	"path in a field":            {resolve: "api.test", dst: "93.184.215.21:80", send: "GET /v1/x HTTP/1.1\r\nHost: api.test\r\nX-Original-URL: /v2\r\n\r\n", status: 403, reason: "x-original-url"},
	"path in the second request": {resolve: "api.test", dst: "93.184.215.21:80", send: getFrom("api.test", "/v1/x") + getFrom("api.test", "/v2/x"), reached: "GET api.test /v1/x", status: 403, reason: "no rule allows"},
	"method to a CIDR":           {dst: "10.2.0.5:80", send: "POST / HTTP/1.1\r\nHost: any.test\r\nContent-Length: 0\r\n\r\n", status: 403, reason: "no rule allows POST"},
	"a denied name, whose address a CIDR allows": {resolve: "printer.cdn.test", dst: "10.1.0.5:80", send: getFrom("printer.cdn.test", "/"), status: 403, reason: "is denied"},
	"denied path of a name to a CIDR":            {dst: "10.2.0.5:80", send: getFrom("y.cdn.test", "/secret/x"), status: 403, reason: "is denied"},
	"denied name to a CIDR":                      {dst: "10.2.0.5:80", send: getFrom("evil.cdn.test", "/"), status: 403, reason: "is denied"},
	// Other protocols.
	"no HTTP where requests are read, port 5432": {dst: "10.2.0.5:5432", send: "\x00\x01\x02", reason: "neither TLS nor HTTP"},
	"no HTTP where requests are read":            {dst: "10.2.0.5:80", send: "\x00\x01\x02", reason: "neither TLS nor HTTP"},
	"SSH to an address that only a name opens":   {dst: "93.184.215.22:22", send: "SSH-2.0-x\r\n", reason: "no rule allows"},
}

// talk sends bytes and returns the statuses of the responses, with the error after the last. A
// response that refuses has to tell the reason.
func (w *world) talk(c *net.TCPConn, send, reason string) (statuses []int, err error) {
	defer c.Close()
	_, writeErr := io.WriteString(c, send) // it may be refused before its end
	r := bufio.NewReader(c)
	for {
		p, err := http.ReadResponse(r, nil)
		if errors.Is(writeErr, syscall.ECONNRESET) || errors.Is(writeErr, syscall.EPIPE) {
			return statuses, writeErr // a reset is reported once
		} else if err != nil {
			return statuses, err
		}
		statuses = append(statuses, p.StatusCode)
		if body, _ := io.ReadAll(p.Body); p.StatusCode >= 400 && !strings.Contains(string(body), reason) {
			w.t.Errorf("the response does not tell the reason: %s", body)
		}
	}
}

func TestAttacks(t *testing.T) {
	for name, tc := range attacks {
		t.Run(name, func(t *testing.T) {
			w, seen := newAttacked(t)
			for n := range strings.FieldsSeq(tc.resolve) {
				if code, addrs := w.resolve(n, dnsmessage.TypeA); len(addrs) != 1 {
					t.Fatalf("resolve %s: %s %v", n, code, addrs)
				}
			}
			c, err := w.dialContext(t.Context(), netip.MustParseAddrPort(tc.dst))
			if err != nil && !errors.Is(err, syscall.ECONNRESET) { // which may come before connect has returned
				t.Fatal(err)
			}
			var statuses []int
			if err == nil {
				statuses, err = w.talk(c, tc.send, tc.reason)
			}
			last := 0
			if len(statuses) > 0 {
				last = statuses[len(statuses)-1]
			}
			switch {
			case tc.status > 0 && last != tc.status:
				t.Errorf("statuses %v, then %v; want %d", statuses, err, tc.status)
			case tc.status <= 0 && (errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)):
				t.Errorf("an orderly end: %v", err)
			}
			refused := ""
			events := w.all()
			for _, e := range events {
				if !e.Allow && strings.Contains(e.Reason, tc.reason) {
					refused = e.Reason
				}
				if e.Out > 0 && tc.reached == "" && tc.status != -2 {
					t.Errorf("bytes went out: %+v", e)
				}
			}
			if refused == "" {
				t.Errorf("no refusal is recorded with that reason: %+v", events)
			}
			dst := netip.MustParseAddrPort(tc.dst)
			if web := dst.Port() == 80 || dst.Port() == 443; web && tc.reached == "" && tc.status != -2 && len(w.dialled) > 0 {
				t.Errorf("dialled %v", w.dialled)
			}
			for _, d := range w.dialled {
				if d != dst {
					t.Errorf("dialled %s in the place of %s", d, dst)
				}
			}
			seen.mu.Lock()
			defer seen.mu.Unlock()
			if got := strings.Join(seen.requests, ", "); tc.status != -2 && got != tc.reached {
				t.Errorf("the server got %q", got)
			}
		})
	}
}

// A server that speaks first is not one of HTTP, and its first bytes are no response.
func TestHTTPToAServerThatSpeaksFirst(t *testing.T) {
	w := newWorld(t, attacked)
	w.host("db.test", "93.184.215.23")
	w.raw("93.184.215.23:8080", func(c *net.TCPConn) {
		_, _ = io.WriteString(c, "220 ready\r\n")
		_, _ = io.Copy(io.Discard, c)
	})
	w.resolve("db.test", dnsmessage.TypeA)
	c := w.dial("93.184.215.23:8080")
	if _, err := io.ReadFull(c, make([]byte, 11)); err != nil {
		t.Fatal(err)
	}
	_, _ = io.WriteString(c, getFrom("db.test", "/"))
	if b, reset := wasReset(c); len(b) > 0 || !reset {
		t.Errorf("%q, reset %v", b, reset)
	}
	events := w.all()
	if e := events[len(events)-1]; e.Allow || e.Out != 0 || e.Reason != "HTTP to a server that speaks first" {
		t.Errorf("%+v", e)
	}
}

// A refusal reaches a client that sends on, and has no body where none may be.
func TestRefusalsArrive(t *testing.T) {
	w := newWorld(t, attacked)
	for _, method := range []string{"HEAD", "POST"} {
		c := w.dial("93.184.215.14:80")
		_, _ = io.WriteString(c, method+" / HTTP/1.1\r\nHost: web.test\r\nContent-Length: 5000000\r\n\r\n")
		_, _ = c.Write(make([]byte, 5000000))
		r := bufio.NewReader(c)
		if p, body := get(t, c, r, method, ""); p.StatusCode != 403 || (body == "") != (method == "HEAD") {
			t.Errorf("%s: %d %q", method, p.StatusCode, body)
		}
		_ = c.CloseWrite()
		if b, err := io.ReadAll(r); len(b) > 0 || err != nil {
			t.Errorf("%s: then %q, %v", method, b, err)
		}
	}
}

// A server that answers before it has the body may read the rest as a request (pause-based desync).
// The rest is not passed on then.
func TestBodiesEndWithTheResponse(t *testing.T) {
	const post = "POST / HTTP/1.1\r\nHost: web.test\r\nContent-Length: 100\r\n"
	for name, tc := range map[string]struct{ request, response, rest string }{
		"whole response":      {post + "\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", ""},
		"no body":             {post + "\r\n", "HTTP/1.1 204 No Content\r\n\r\n", ""},
		"chunks":              {post + "\r\n", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", ""},
		"in the place of 100": {post + "Expect: 100-continue\r\n\r\n", "HTTP/1.1 417 x\r\nContent-Length: 5\r\n\r\nhe", "llo"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, attacked)
			w.host("web.test", "93.184.215.14")
			sent, got := make(chan struct{}), make(chan int64, 1)
			w.raw("93.184.215.14:80", func(c *net.TCPConn) {
				_, _ = io.ReadFull(c, make([]byte, len(tc.request)))
				_, _ = io.WriteString(c, tc.response)
				<-sent
				_, _ = io.WriteString(c, tc.rest)
				n, _ := io.Copy(io.Discard, c)
				got <- n
			})
			w.resolve("web.test", dnsmessage.TypeA)
			c := w.dial("93.184.215.14:80")
			_, _ = io.WriteString(c, tc.request)
			if _, err := io.ReadFull(c, make([]byte, len(tc.response))); err != nil {
				t.Error(err)
			}
			_, _ = io.WriteString(c, getFrom("evil.test", "/"))
			close(sent)
			if n := <-got; n != 0 {
				t.Errorf("the server got %d bytes more", n)
			}
		})
	}
}
