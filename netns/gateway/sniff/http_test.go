package sniff

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"testing"
)

func request(in string) (*Request, error) {
	return ReadRequest(bufio.NewReaderSize(strings.NewReader(in), 16))
}

const hostLine = "Host: a.test\r\n"

func TestReadRequest(t *testing.T) {
	long := strings.Repeat("x", 30000)
	for in, want := range map[string]Request{
		"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n":                                                                                  {Method: "GET"},
		"GET / HTTP/1.0\r\nHost: a.test\r\n\r\n":                                                                                  {Method: "GET"},
		"GET /x?y=z&u=http://b.test/ HTTP/1.1\r\nhOST:a.test \r\n\r\n":                                                            {Method: "GET"},
		"GET http://a.test/x HTTP/1.1\r\nHost: A.test\r\n\r\n":                                                                    {Method: "GET"},
		"GET http://a.test HTTP/1.1\r\nHost: a.test\r\n\r\n":                                                                      {Method: "GET"},
		"POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 12\r\n\r\n":                                                           {Method: "POST", Body: Body{Length: 12}},
		"POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 0\r\n\r\n":                                                            {Method: "POST"},
		"POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n":                           {Method: "POST", Body: Body{-1, true}, Continue: true},
		"GET / HTTP/1.1\r\nHost: a.test\r\nConnection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\nSec-WebSocket-Key: x\r\n\r\n": {Method: "GET", Upgrade: "websocket"},
		"POST / HTTP/1.1\r\nHost: a.test\r\nX-HTTP-Method-Override: PUT\r\n\r\n":                                                  {Method: "POST", Rewrites: "x-http-method-override"},
		"VERSION-CONTROL / HTTP/1.1\r\nHost: a.test\r\n\r\n":                                                                      {Method: "VERSION-CONTROL"},
		"GET / HTTP/1.1\r\nCookie: " + long + "\r\nHost: a.test\r\nX-Name: \xc3\xa4\tb\r\nX-Empty:\r\n\r\n":                       {Method: "GET"},
		"GET / HTTP/1.1\r\nHost: a.test\r\nUser-Agent: curl/8.5.0\r\nAccept: */*\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n": {Method: "GET", Upgrade: "h2c"},
	} {
		got, err := request(in + "next")
		if err != nil {
			t.Errorf("%.60q: %v", in, err)
			continue
		}
		if string(got.Raw) != in || got.Host.Name.String() != "a.test" {
			t.Errorf("%.60q: host %s, read as %.60q", in, got.Host, got.Raw)
		}
		if got.Method != want.Method || got.Body != want.Body || got.Upgrade != want.Upgrade || got.Continue != want.Continue || got.Rewrites != want.Rewrites {
			t.Errorf("%.60q: %+v", in, got)
		}
	}
}

// A request without its dots is one that has the path that was read. Forms that could lead
// elsewhere stay refused.
func TestRemoveDots(t *testing.T) {
	for target, want := range map[string]string{
		"/./Packages":                        "/Packages",
		"/repo/./Packages.gz?a=/./b":         "/repo/Packages.gz?a=/./b",
		"/repo/././x/.":                      "/repo/x/",
		"/.":                                 "/",
		"/./":                                "/",
		"/.?":                                "/?",
		"/a/.b/c./...":                       "/a/.b/c./...",
		"http://a.test/./x?y=http://b.test/": "http://a.test/x?y=http://b.test/",
		"http://a.test/.":                    "http://a.test/",
	} {
		const rest = " HTTP/1.1\r\nHost: a.test\r\nReferer: /./\r\n\r\n"
		q, err := request("GET " + target + rest)
		if err != nil || q.PathError != nil || q.Dotted != (target != want) || string(q.Raw) != "GET "+target+rest {
			t.Errorf("%q: %+v, %v", target, q, err)
			continue
		}
		q.RemoveDots()
		again, err := request(string(q.Raw))
		if err != nil || q.Dotted || again.Dotted || string(q.Raw) != "GET "+want+rest || q.Target != want || again.Path != q.Path || again.Target != q.Target {
			t.Errorf("%q: %+v, read as %+v, %v", target, q, again, err)
		}
	}
	for _, target := range []string{
		"/..", "/a/../b", "/./../b", "/a/./../b", "/.././b", "/a/.%2e/b", "/%2e/b", "/a/%2E./b", "/a%2f./b", "/a%2f.%2fb", "/./%2e%2e/b", "/.//b", "/a/.//b", "//.", "//./", "/./;x", `/a/.\b`,
	} {
		if q, err := request("GET " + target + " HTTP/1.1\r\n" + hostLine + "\r\n"); err != nil || q.PathError == nil {
			t.Errorf("%q: %+v, %v", target, q, err)
		}
	}
}

// What is left of a request without its upgrade is the same request.
func TestDropUpgrade(t *testing.T) {
	const settings = "HTTP2-Settings: AAMAAABk\r\n"
	for in, want := range map[string]string{
		"Connection: Upgrade, HTTP2-Settings\r\nContent-Length: 5\r\n" + hostLine + settings + "Upgrade: h2c\r\nUser-Agent: Java-http-client/21\r\n":// Java's
		"Content-Length: 5\r\n" + hostLine + "User-Agent: Java-http-client/21\r\n",
		hostLine + "Connection: keep-alive,upgrade , HTTP2-Settings,, x\r\nupgrade: H2C\r\nX: y\r\n" + settings: hostLine + "connection: keep-alive, x\r\nX: y\r\n",
		hostLine + "Connection: upgrade\r\nConnection: HTTP2-Settings\r\nConnection: close\r\nUpgrade: h2c\r\n": hostLine + "Connection: close\r\n",
		hostLine + "Connection: Upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked\r\n":                      hostLine + "Transfer-Encoding: chunked\r\n",
	} {
		q, err := request("POST / HTTP/1.1\r\n" + in + "\r\nnext")
		if err != nil || q.Upgrade != H2C {
			t.Errorf("%q: %+v, %v", in, q, err)
			continue
		}
		q.DropUpgrade()
		again, err := request(string(q.Raw))
		if err != nil || string(q.Raw) != "POST / HTTP/1.1\r\n"+want+"\r\n" || !slices.Equal(again.Fields, q.Fields) || again.Upgrade != "" || q.Upgrade != "" || again.Body != q.Body {
			t.Errorf("%q: %+v, read as %+v, %v", q.Raw, q, again, err)
		}
	}
}

func TestReadRequestTargets(t *testing.T) {
	for _, tc := range []struct{ target, host, path string }{
		{"/a/%7euser?q=%zz;\"", "a.test:8080", "/a/~user"},
		{"/simple/", "93.184.215.14", "/simple/"},
		{"/", "[2606:4700::1111]:80", "/"},
		{"http://a.test:81/b?c", "a.test:81", "/b"},
		{"//debian/x", "a.test", ""},
		{"/a/../b", "a.test", ""},
	} {
		q, err := request("GET " + tc.target + " HTTP/1.1\r\nHost: " + tc.host + "\r\n\r\n")
		if err != nil || q.Host.String() != tc.host || q.Path.String() != tc.path || (q.PathError == nil) != (tc.path != "") {
			t.Errorf("%s of %s: %+v, %v", tc.target, tc.host, q, err)
		}
	}
	if q, err := request("CONNECT a.test:443 HTTP/1.1\r\nHost: a.test:443\r\n\r\n"); err != nil || !q.Tunnel || q.Host.Port != 443 {
		t.Errorf("CONNECT: %+v, %v", q, err)
	}
}

// Heads that two programs have read differently, most of them in published attacks.
var refusedHeads = map[string]string{
	"empty line first":              "\r\nGET / HTTP/1.1\r\n" + hostLine + "\r\n",
	"LF first":                      "\nGET / HTTP/1.1\r\n" + hostLine + "\r\n",
	"LF line ends":                  "GET / HTTP/1.1\nHost: a.test\n\n",
	"LF in one line":                "GET / HTTP/1.1\r\nA: b\n" + hostLine + "\r\n",
	"LF at the end":                 "GET / HTTP/1.1\r\n" + hostLine + "\n",
	"bare CR in a value":            "GET / HTTP/1.1\r\nA: b\rHost: b.test\r\n" + hostLine + "\r\n",
	"CR CR LF":                      "GET / HTTP/1.1\r\r\n" + hostLine + "\r\n",
	"NUL in a value":                "GET / HTTP/1.1\r\nA: b\x00c\r\n" + hostLine + "\r\n",
	"NUL in the target":             "GET /\x00 HTTP/1.1\r\n" + hostLine + "\r\n",
	"NUL in the host":               "GET / HTTP/1.1\r\nHost: a.test\x00.b.test\r\n\r\n",
	"DEL":                           "GET / HTTP/1.1\r\nA: \x7f\r\n" + hostLine + "\r\n",
	"folded line":                   "GET / HTTP/1.1\r\nA: b\r\n c\r\n" + hostLine + "\r\n",
	"folded host":                   "GET / HTTP/1.1\r\nHost: a.test\r\n\t.b.test\r\n\r\n",
	"folded first field":            "GET / HTTP/1.1\r\n Host: b.test\r\n" + hostLine + "\r\n",
	"space before the colon":        "GET / HTTP/1.1\r\nHost : a.test\r\n\r\n",
	"tab before the colon":          "POST / HTTP/1.1\r\n" + hostLine + "Transfer-Encoding\t: chunked\r\n\r\n",
	"no colon":                      "GET / HTTP/1.1\r\n" + hostLine + "chunked\r\n\r\n",
	"empty name":                    "GET / HTTP/1.1\r\n: x\r\n" + hostLine + "\r\n",
	"name in quotes":                "GET / HTTP/1.1\r\n\"Host\": b.test\r\n" + hostLine + "\r\n",
	"name outside of ASCII":         "GET / HTTP/1.1\r\nHost\xc2\xa0: b.test\r\n" + hostLine + "\r\n",
	"Kelvin sign":                   "GET / HTTP/1.1\r\n" + hostLine + "\u212aeep-Alive: 1\r\n\r\n",
	"no host":                       "GET / HTTP/1.1\r\n\r\n",
	"no host in 1.0":                "GET / HTTP/1.0\r\n\r\n",
	"two hosts":                     "GET / HTTP/1.1\r\nHost: a.test\r\nHost: b.test\r\n\r\n",
	"the same host twice":           "GET / HTTP/1.1\r\nHost: a.test\r\nhost: a.test\r\n\r\n",
	"empty host":                    "GET / HTTP/1.1\r\nHost:\r\n\r\n",
	"two names in a host":           "GET / HTTP/1.1\r\nHost: a.test, b.test\r\n\r\n",
	"host with a path":              "GET / HTTP/1.1\r\nHost: a.test/b\r\n\r\n",
	"host with a user":              "GET / HTTP/1.1\r\nHost: a.test@b.test\r\n\r\n",
	"host with a trailing dot":      "GET / HTTP/1.1\r\nHost: a.test.\r\n\r\n",
	"host outside of ASCII":         "GET / HTTP/1.1\r\nHost: \xc3\xa4.test\r\n\r\n",
	"host with a scheme":            "GET / HTTP/1.1\r\nHost: http://a.test\r\n\r\n",
	"numeric host":                  "GET / HTTP/1.1\r\nHost: 2130706433\r\n\r\n",
	"octal address":                 "GET / HTTP/1.1\r\nHost: 0177.0.0.1\r\n\r\n",
	"short address":                 "GET / HTTP/1.1\r\nHost: 127.1\r\n\r\n",
	"address with leading zeros":    "GET / HTTP/1.1\r\nHost: 093.184.215.014\r\n\r\n",
	"long form of an IPv6 address":  "GET / HTTP/1.1\r\nHost: [2606:4700:0:0:0:0:0:1111]\r\n\r\n",
	"zone":                          "GET / HTTP/1.1\r\nHost: [fe80::1%25eth0]\r\n\r\n",
	"IPv6 address without brackets": "GET / HTTP/1.1\r\nHost: 2606:4700::1111\r\n\r\n",
	"IPv4 address in brackets":      "GET / HTTP/1.1\r\nHost: [93.184.215.14]\r\n\r\n",
	"half a bracket":                "GET / HTTP/1.1\r\nHost: [2606:4700::1111\r\n\r\n",
	"empty port":                    "GET / HTTP/1.1\r\nHost: a.test:\r\n\r\n",
	"port 0":                        "GET / HTTP/1.1\r\nHost: a.test:0\r\n\r\n",
	"port with a zero":              "GET / HTTP/1.1\r\nHost: a.test:080\r\n\r\n",
	"port with a sign":              "GET / HTTP/1.1\r\nHost: a.test:+80\r\n\r\n",
	"large port":                    "GET / HTTP/1.1\r\nHost: a.test:65616\r\n\r\n",
	"two ports":                     "GET / HTTP/1.1\r\nHost: a.test:80:81\r\n\r\n",
	"tab in the host":               "GET / HTTP/1.1\r\nHost: a.test\tb\r\n\r\n",
	"underscore in a field":         "POST / HTTP/1.1\r\n" + hostLine + "Content_Length: 3\r\n\r\n",
	"both lengths":                  "POST / HTTP/1.1\r\n" + hostLine + "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
	"both lengths, the other order": "POST / HTTP/1.1\r\n" + hostLine + "Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n",
	"two lengths":                   "POST / HTTP/1.1\r\n" + hostLine + "Content-Length: 3\r\nContent-Length: 4\r\n\r\n",
	"the same length twice":         "POST / HTTP/1.1\r\n" + hostLine + "Content-Length: 3\r\nContent-Length: 3\r\n\r\n",
	"list of lengths":               "POST / HTTP/1.1\r\n" + hostLine + "Content-Length: 3, 3\r\n\r\n",
	"length with a sign":            "POST / HTTP/1.1\r\n" + hostLine + "Content-Length: +3\r\n\r\n",
	"negative length":               "POST / HTTP/1.1\r\n" + hostLine + "Content-Length: -3\r\n\r\n",
	"hexadecimal length":            "POST / HTTP/1.1\r\n" + hostLine + "Content-Length: 0x3\r\n\r\n",
	"length with a zero":            "POST / HTTP/1.1\r\n" + hostLine + "Content-Length: 010\r\n\r\n",
	"length with a space":           "POST / HTTP/1.1\r\n" + hostLine + "Content-Length: 1 0\r\n\r\n",
	"empty length":                  "POST / HTTP/1.1\r\n" + hostLine + "Content-Length:\r\n\r\n",
	"length beyond 64 bits":         "POST / HTTP/1.1\r\n" + hostLine + "Content-Length: 18446744073709551619\r\n\r\n",
	"chunked after another coding":  "POST / HTTP/1.1\r\n" + hostLine + "Transfer-Encoding: gzip, chunked\r\n\r\n",
	"chunked twice":                 "POST / HTTP/1.1\r\n" + hostLine + "Transfer-Encoding: chunked, chunked\r\n\r\n",
	"two transfer-encodings":        "POST / HTTP/1.1\r\n" + hostLine + "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n",
	"identity":                      "POST / HTTP/1.1\r\n" + hostLine + "Transfer-Encoding: identity\r\n\r\n",
	"almost chunked":                "POST / HTTP/1.1\r\n" + hostLine + "Transfer-Encoding: xchunked\r\n\r\n",
	"chunked with a parameter":      "POST / HTTP/1.1\r\n" + hostLine + "Transfer-Encoding: chunked;q=1\r\n\r\n",
	"chunked with a vertical tab":   "POST / HTTP/1.1\r\n" + hostLine + "Transfer-Encoding: \x0bchunked\r\n\r\n",
	"chunked with a no-break space": "POST / HTTP/1.1\r\n" + hostLine + "Transfer-Encoding: \xa0chunked\r\n\r\n",
	"empty transfer-encoding":       "POST / HTTP/1.1\r\n" + hostLine + "Transfer-Encoding:\r\n\r\n",
	"chunked in 1.0":                "POST / HTTP/1.0\r\n" + hostLine + "Transfer-Encoding: chunked\r\n\r\n",
	"0.9":                           "GET /\r\n\r\n",
	"2.0":                           "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
	"1.2":                           "GET / HTTP/1.2\r\n" + hostLine + "\r\n",
	"lower-case version":            "GET / http/1.1\r\n" + hostLine + "\r\n",
	"no version":                    "GET / \r\n" + hostLine + "\r\n",
	"two spaces":                    "GET  / HTTP/1.1\r\n" + hostLine + "\r\n",
	"tab for a space":               "GET\t/ HTTP/1.1\r\n" + hostLine + "\r\n",
	"space at the end":              "GET / HTTP/1.1 \r\n" + hostLine + "\r\n",
	"space at the beginning":        " GET / HTTP/1.1\r\n" + hostLine + "\r\n",
	"lower-case method":             "get / HTTP/1.1\r\n" + hostLine + "\r\n",
	"method with an underscore":     "G_T / HTTP/1.1\r\n" + hostLine + "\r\n",
	"long method":                   strings.Repeat("G", 33) + " / HTTP/1.1\r\n" + hostLine + "\r\n",
	"no method":                     " / HTTP/1.1\r\n" + hostLine + "\r\n",
	"asterisk":                      "OPTIONS * HTTP/1.1\r\n" + hostLine + "\r\n",
	"fragment":                      "GET /a#b HTTP/1.1\r\n" + hostLine + "\r\n",
	"target outside of ASCII":       "GET /\xc3\xa4 HTTP/1.1\r\n" + hostLine + "\r\n",
	"no slash":                      "GET a HTTP/1.1\r\n" + hostLine + "\r\n",
	"another host in the target":    "GET http://b.test/ HTTP/1.1\r\n" + hostLine + "\r\n",
	"a user in the target":          "GET http://a.test@b.test/ HTTP/1.1\r\n" + hostLine + "\r\n",
	"another port in the target":    "GET http://a.test:81/ HTTP/1.1\r\n" + hostLine + "\r\n",
	"no host in the target":         "GET http:/// HTTP/1.1\r\n" + hostLine + "\r\n",
	"https in the target":           "GET https://a.test/ HTTP/1.1\r\n" + hostLine + "\r\n",
	"upper-case scheme":             "GET HTTP://a.test/ HTTP/1.1\r\n" + hostLine + "\r\n",
	"authority without CONNECT":     "GET a.test:80 HTTP/1.1\r\nHost: a.test:80\r\n\r\n",
	"CONNECT to another host":       "CONNECT b.test:443 HTTP/1.1\r\n" + hostLine + "\r\n",
	"CONNECT to a path":             "CONNECT / HTTP/1.1\r\n" + hostLine + "\r\n",
	"upgrade without connection":    "GET / HTTP/1.1\r\n" + hostLine + "Upgrade: websocket\r\n\r\n",
	"connection without upgrade":    "GET / HTTP/1.1\r\n" + hostLine + "Connection: upgrade\r\n\r\n",
	"two upgrades":                  "GET / HTTP/1.1\r\n" + hostLine + "Connection: upgrade\r\nUpgrade: websocket\r\nUpgrade: h2c\r\n\r\n",
	"upgrade with a body":           "POST / HTTP/1.1\r\n" + hostLine + "Connection: upgrade\r\nUpgrade: websocket\r\nContent-Length: 3\r\n\r\n",
	"host as a connection option":   "GET / HTTP/1.1\r\n" + hostLine + "Connection: close, Host\r\n\r\n",
	"length as a connection option": "POST / HTTP/1.1\r\n" + hostLine + "Connection: content-length\r\nContent-Length: 3\r\n\r\n",
	"odd connection option":         "GET / HTTP/1.1\r\n" + hostLine + "Connection: a b\r\n\r\n",
	"another expectation":           "POST / HTTP/1.1\r\n" + hostLine + "Expect: 200-ok\r\n\r\n",
	"two expectations":              "POST / HTTP/1.1\r\n" + hostLine + "Expect: 100-continue\r\nExpect: 100-continue\r\n\r\n",
	"many fields":                   "GET / HTTP/1.1\r\n" + hostLine + strings.Repeat("A: b\r\n", maxFields) + "\r\n",
	"long head":                     "GET / HTTP/1.1\r\n" + hostLine + "A: " + strings.Repeat("b", maxHead) + "\r\n\r\n",
	"head of one endless line":      "GET /" + strings.Repeat("b", maxHead+5000),
	"TLS":                           "\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00\r\n\r\n",
}

func TestReadRequestRefuses(t *testing.T) {
	for name, in := range refusedHeads {
		q, err := request(in)
		if m := (*MalformedError)(nil); !errors.As(err, &m) || q != nil && err == nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestReadRequestCut(t *testing.T) {
	const whole = "POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 3\r\n\r\n"
	if _, err := request(""); err != io.EOF { //nolint:errorlint // the end of a kept connection
		t.Errorf("at the end: %v", err)
	}
	for n := 1; n < len(whole); n++ {
		if _, err := request(whole[:n]); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%d bytes: %v", n, err)
		}
	}
}

func TestReadResponse(t *testing.T) {
	for _, tc := range []struct {
		in, method string
		status     int
		body       Body
	}{
		{"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", "GET", 200, Body{Length: 5}},
		{"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", "HEAD", 200, Body{}},
		{"HTTP/1.1 200\r\nTransfer-Encoding: chunked\r\n\r\n", "GET", 200, Body{-1, true}},
		{"HTTP/1.0 200 OK\r\nServer: x\r\n\r\n", "GET", 200, Body{Length: -1}},
		{"HTTP/1.1 204 No Content\r\n\r\n", "GET", 204, Body{}},
		{"HTTP/1.1 304 Not Modified\r\nContent-Length: 500\r\n\r\n", "GET", 304, Body{}},
		{"HTTP/1.1 100 Continue\r\n\r\n", "POST", 100, Body{}},
		{"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", "GET", 101, Body{}},
		{"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: x\r\nconnection: y, Close\r\n\r\n", "GET", 200, Body{Length: 5}},
		{"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: closed\r\nX: y, close, z\r\n\r\n", "GET", 200, Body{Length: 5}},
		{"HTTP/1.1 599  odd \xe4\r\nContent-Length: 0\r\n\r\n", "GET", 599, Body{}},
	} {
		p, err := ReadResponse(bufio.NewReader(strings.NewReader(tc.in+"body")), tc.method)
		if err == nil && p.Close != strings.Contains(tc.in, "lose\r\n") {
			t.Errorf("%q: close is %v", tc.in, p.Close)
		}
		if err != nil || p.Status != tc.status || p.Body != tc.body || string(p.Raw) != tc.in {
			t.Errorf("%q to %s: %+v, %v", tc.in, tc.method, p, err)
		}
	}
	for _, in := range []string{
		"HTTP/1.1 99 x\r\n\r\n", "HTTP/1.1 600 x\r\n\r\n", "HTTP/1.1 2000 x\r\n\r\n", "HTTP/1.1 +20 x\r\n\r\n", "HTTP/1.1\r\n\r\n", "ICY 200 OK\r\n\r\n", "HTTP/2 200 OK\r\n\r\n",
		"HTTP/1.1 200 OK\n\n", "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", "HTTP/1.1 200 OK\r\nA: b\r\n c\r\n\r\n",
	} {
		_, err := ReadResponse(bufio.NewReader(strings.NewReader(in)), "GET")
		if m := (*MalformedError)(nil); !errors.As(err, &m) {
			t.Errorf("%q: %v", in, err)
		}
	}
}

// unchunk reads a chunked body with the functions of this package.
func unchunk(r *bufio.Reader) (data, raw []byte, err error) {
	for {
		lines, size, err := ReadChunk(r)
		raw = append(raw, lines...)
		if err != nil || size == 0 {
			return data, raw, err
		}
		part, err := io.ReadAll(io.LimitReader(r, size))
		data, raw = append(data, part...), append(raw, part...)
		if err != nil || int64(len(part)) < size {
			return data, raw, errors.Join(err, io.ErrUnexpectedEOF)
		}
		end, err := ReadChunkEnd(r)
		raw = append(raw, end...)
		if err != nil {
			return data, raw, err
		}
	}
}

func TestReadChunk(t *testing.T) {
	for in, want := range map[string]string{
		"0\r\n\r\n":                          "",
		"5\r\nhello\r\n0\r\n\r\n":            "hello",
		"0000A\r\nhello\r\nyou\r\n0\r\n\r\n": "hello\r\nyou",
		"1\r\na\r\n000\r\nX-Sum: 1\r\n\r\n":  "a",
	} {
		r := bufio.NewReader(strings.NewReader(in + "GET"))
		if data, raw, err := unchunk(r); err != nil || string(data) != want || string(raw) != in {
			t.Errorf("%q: %q, %v", in, data, err)
		}
		if rest, _ := io.ReadAll(r); string(rest) != "GET" {
			t.Errorf("%q: %q is left", in, rest)
		}
	}
	for name, in := range map[string]string{
		"extension":           "5;a=b\r\nhello\r\n0\r\n\r\n",
		"empty extension":     "5;\r\nhello\r\n0\r\n\r\n",
		"LF in an extension":  "5;a\nb\r\nhello\r\n0\r\n\r\n",
		"space":               "5 \r\nhello\r\n0\r\n\r\n",
		"0x":                  "0x5\r\nhello\r\n0\r\n\r\n",
		"sign":                "+5\r\nhello\r\n0\r\n\r\n",
		"negative":            "-5\r\nhello\r\n0\r\n\r\n",
		"underscore":          "1_0\r\nhello\r\n0\r\n\r\n",
		"overflow":            "10000000000000005\r\nhello\r\n0\r\n\r\n",
		"no size":             "\r\nhello\r\n0\r\n\r\n",
		"LF after the size":   "5\nhello\r\n0\r\n\r\n",
		"LF after the data":   "5\r\nhello\n0\r\n\r\n",
		"CR after the data":   "5\r\nhello\rx0\r\n\r\n",
		"longer than said":    "5\r\nhelloyou\r\n0\r\n\r\n",
		"LF at the end":       "0\r\n\n",
		"host as a trailer":   "0\r\nHost: b.test\r\n\r\n",
		"length as a trailer": "0\r\ncontent-length: 5\r\n\r\n",
		"override trailer":    "0\r\nX-HTTP-Method-Override: PUT\r\n\r\n",
		"folded trailer":      "0\r\nA: b\r\n c\r\n\r\n",
		"endless trailers":    "0\r\n" + strings.Repeat("A: b\r\n", 300) + "\r\n",
	} {
		_, _, err := unchunk(bufio.NewReader(strings.NewReader(in)))
		if m := (*MalformedError)(nil); !errors.As(err, &m) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, in := range []string{"", "5", "5\r\n", "5\r\nhel", "5\r\nhello", "5\r\nhello\r\n", "5\r\nhello\r\n0\r\n", "0\r\nA: b\r\n"} {
		if _, _, err := unchunk(bufio.NewReader(strings.NewReader(in))); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%q, cut: %v", in, err)
		}
	}
}

// FuzzRequest compares with net/http: a request that is accepted here is accepted there, with the
// same method, host, path and body, and the next request begins at the same byte.
func FuzzRequest(f *testing.F) {
	f.Add([]byte("POST http://a.test:81/b?c HTTP/1.1\r\nHost: a.test:81\r\nContent-Length: 3\r\n\r\nabcGET"))
	f.Add([]byte("POST /a%2fb HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX: y\r\n\r\nGET"))
	f.Add([]byte("GET / HTTP/1.1\r\nHost: [2606:4700::1111]\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"))
	f.Add([]byte("GET / HTTP/1.1\r\nHost: a.test\r\nConnection: Upgrade, HTTP2-Settings, x\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n"))
	f.Add([]byte("CONNECT a.test:443 HTTP/1.1\r\nHost: a.test:443\r\n\r\n"))
	f.Add([]byte("GET http://a.test/x/././y/.?/./ HTTP/1.1\r\nHost: a.test\r\n\r\n"))
	for _, in := range refusedHeads {
		if len(in) < 1000 {
			f.Add([]byte(in))
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		r := bufio.NewReader(bytes.NewReader(data))
		ours, err := ReadRequest(r)
		if err != nil {
			return
		}
		if !bytes.HasPrefix(data, ours.Raw) {
			t.Fatal("other bytes are returned than read")
		}
		body := []byte{}
		raw := ours.Raw
		if ours.Body.Chunked {
			var chunks []byte
			if body, chunks, err = unchunk(r); err != nil {
				return
			}
			raw = append(bytes.Clone(raw), chunks...)
		} else if ours.Body.Length > 0 {
			if body, err = io.ReadAll(io.LimitReader(r, ours.Body.Length)); err != nil || int64(len(body)) < ours.Body.Length {
				return
			}
			raw = append(bytes.Clone(raw), body...)
		}
		reader := bufio.NewReader(bytes.NewReader(raw))
		theirs, err := http.ReadRequest(reader)
		if err != nil && ours.PathError != nil {
			return // for its path, which matters where rules read it
		} else if err != nil {
			t.Fatalf("net/http refuses %q: %v", raw, err)
		}
		if theirs.Method != ours.Method || !strings.EqualFold(theirs.Host, ours.Host.String()) {
			t.Errorf("%q: %s of %s to net/http, %s of %s", raw, theirs.Method, theirs.Host, ours.Method, ours.Host)
		}
		if len(theirs.TransferEncoding) > 0 != ours.Body.Chunked || theirs.ContentLength != ours.Body.Length {
			t.Errorf("%q: length %d, %v to net/http", raw, theirs.ContentLength, theirs.TransferEncoding)
		}
		if !ours.Tunnel && ours.PathError == nil && !ours.Dotted {
			if path, err := url.PathUnescape(ours.Path.String()); err != nil || path != theirs.URL.Path && theirs.URL.Path != "" {
				t.Errorf("%q: path %q to net/http, %q", raw, theirs.URL.Path, ours.Path)
			}
		}
		if got, err := io.ReadAll(theirs.Body); err != nil || !bytes.Equal(got, body) {
			t.Errorf("%q: body %q to net/http, %v", raw, got, err)
		}
		if rest, _ := io.ReadAll(reader); len(rest) != 0 {
			t.Errorf("%q: net/http leaves %q", raw, rest)
		}
		if again, err := ReadRequest(bufio.NewReader(bytes.NewReader(ours.Raw))); err != nil || !bytes.Equal(again.Raw, ours.Raw) {
			t.Errorf("%q is not read the same way twice: %v", ours.Raw, err)
		}
		if ours.Dotted {
			ours.RemoveDots()
			plain, err := ReadRequest(bufio.NewReader(bytes.NewReader(ours.Raw)))
			if err != nil || plain.Dotted || plain.Path != ours.Path || plain.Target != ours.Target || plain.Method != ours.Method || plain.Host != ours.Host ||
				plain.Body != ours.Body || !slices.Equal(plain.Fields, ours.Fields) {
				t.Errorf("without its dots it is %q: %+v, %v", ours.Raw, plain, err)
			}
			if plain != nil && ours.PathError == nil {
				theirs, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(ours.Raw)))
				if err != nil {
					t.Fatalf("net/http refuses %q: %v", ours.Raw, err)
				}
				if path, err := url.PathUnescape(ours.Path.String()); err != nil || path != theirs.URL.Path {
					t.Errorf("%q: path %q to net/http, %q", ours.Raw, theirs.URL.Path, ours.Path)
				}
			}
		}
		if ours.Upgrade != H2C {
			return
		}
		ours.DropUpgrade()
		again, err := ReadRequest(bufio.NewReader(bytes.NewReader(ours.Raw)))
		if err != nil || again.Upgrade != "" || again.Host != ours.Host || again.Body != ours.Body || again.Target != ours.Target || !slices.Equal(again.Fields, ours.Fields) {
			t.Errorf("without the upgrade it is %q: %+v, %v", ours.Raw, again, err)
		}
	})
}

// FuzzResponse compares with net/http as a client.
func FuzzResponse(f *testing.F) {
	f.Add([]byte("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"), false)
	f.Add([]byte("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"), false)
	f.Add([]byte("HTTP/1.0 304 x\r\nContent-Length: 5\r\n\r\n"), true)
	f.Fuzz(func(t *testing.T, data []byte, head bool) {
		method := "GET"
		if head {
			method = "HEAD"
		}
		ours, err := ReadResponse(bufio.NewReader(bytes.NewReader(data)), method)
		if err != nil {
			return
		}
		theirs, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(data)), &http.Request{Method: method})
		if err != nil {
			return // net/http wants a reason phrase of its own form, and nothing depends on it
		}
		if strconv.Itoa(theirs.StatusCode) != strconv.Itoa(ours.Status) {
			t.Errorf("%q: status %d to net/http, %d", data, theirs.StatusCode, ours.Status)
		}
		if chunked := len(theirs.TransferEncoding) > 0; method == "GET" && ours.Status >= 200 && (chunked != ours.Body.Chunked || theirs.ContentLength != ours.Body.Length) {
			t.Errorf("%q: length %d, %v to net/http, %+v", data, theirs.ContentLength, theirs.TransferEncoding, ours.Body)
		}
	})
}
