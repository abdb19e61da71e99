package gateway

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

// newAttackedTLS is a world with HTTPS servers that record what comes to them.
func newAttackedTLS(t *testing.T, change ...func(*Options, *limits)) (*world, *recorded) {
	t.Helper()
	w := newInspected(t, change...)
	seen := &recorded{}
	w.secure("93.184.215.21:443", "api.test", seen.ServeHTTP, "h2", "http/1.1")
	w.secure("93.184.215.30:443", "a.in.test", seen.ServeHTTP, "h2", "http/1.1")
	w.secure("10.2.0.7:443", "10.2.0.7", seen.ServeHTTP, "h2", "http/1.1")
	for _, name := range []string{"api.test", "also.api.test", "a.in.test", "b.in.test"} {
		w.resolve(name, dnsmessage.TypeA)
	}
	return w, seen
}

// An h2client writes frames as it likes.
type h2client struct {
	t   *testing.T
	tls *tls.Conn
	*http2.Framer
	enc  *hpack.Encoder
	buf  bytes.Buffer
	dec  *hpack.Decoder
	next uint32
}

func (w *world) h2dial(t *testing.T) *h2client {
	t.Helper()
	c := &h2client{t: t, tls: w.secureDial("h2"), next: 1, dec: hpack.NewDecoder(4096, nil)}
	c.enc = hpack.NewEncoder(&c.buf)
	c.Framer = http2.NewFramer(c.tls, c.tls)
	c.AllowIllegalWrites = true
	_, _ = io.WriteString(c.tls, http2.ClientPreface)
	_ = c.WriteSettings() // an end of the connection is seen by wait
	return c
}

// block encodes fields, which are written as "name: value" or ":name: value".
func (c *h2client) block(fields ...string) []byte {
	c.buf.Reset()
	for _, f := range fields {
		i := strings.Index(f[1:], ": ") + 1
		_ = c.enc.WriteField(hpack.HeaderField{Name: f[:i], Value: f[i+2:]}) // into memory
	}
	return bytes.Clone(c.buf.Bytes())
}

// request begins a stream.
func (c *h2client) request(end bool, fields ...string) (stream uint32) {
	stream = c.next
	c.next += 2
	_ = c.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: c.block(fields...), EndHeaders: true, EndStream: end}) // seen by wait
	return stream
}

// wait reads frames up to the answer on a stream, or to the end: "403", "RST_STREAM
// PROTOCOL_ERROR", "GOAWAY PROTOCOL_ERROR", "EOF" or "reset".
func (c *h2client) wait(stream uint32) string {
	for {
		f, err := c.ReadFrame()
		switch {
		case errors.Is(err, io.EOF):
			return "EOF"
		case err != nil && strings.Contains(err.Error(), "connection reset by peer"):
			return "reset"
		case err != nil:
			return err.Error()
		}
		switch f := f.(type) {
		case *http2.SettingsFrame:
			if !f.IsAck() {
				_ = c.WriteSettingsAck() // an end of the connection is seen by the next read
			}
		case *http2.HeadersFrame:
			fields, err := c.dec.DecodeFull(f.HeaderBlockFragment())
			if err != nil {
				return err.Error()
			}
			if f.StreamID == stream && len(fields) > 0 && fields[0].Name == ":status" {
				return fields[0].Value
			}
		case *http2.RSTStreamFrame:
			if f.StreamID == stream {
				return "RST_STREAM " + f.ErrCode.String()
			}
		case *http2.GoAwayFrame:
			if f.ErrCode != http2.ErrCodeNo {
				return "GOAWAY " + f.ErrCode.String()
			}
		}
	}
}

// get returns the pseudo-headers of a request for api.test, and other fields.
func get2(path string, more ...string) []string {
	return append([]string{":method: GET", ":scheme: https", ":authority: api.test", ":path: " + path}, more...)
}

func post2(more ...string) []string {
	return append([]string{":method: POST", ":scheme: https", ":authority: api.test", ":path: /v1/x"}, more...)
}

const malformedStream = "RST_STREAM PROTOCOL_ERROR"

// Attacks over HTTP/2 on a connection for api.test. All are refused and recorded, and the server
// sees nothing of them.
var attacksH2 = map[string]struct {
	fields []string
	body   string
	want   string // one of several, if the library and the gateway refuse it at the same time
	reason string // of the event
}{
	"authority of another name":        {fields: []string{":method: GET", ":scheme: https", ":authority: a.in.test", ":path: /v1/x"}, want: "403", reason: "the host a.in.test on a TLS connection to api.test"},
	"authority of a coalesced name":    {fields: []string{":method: GET", ":scheme: https", ":authority: also.api.test", ":path: /v1/x"}, want: "403", reason: "the host also.api.test on a TLS connection"},
	"authority of a denied name":       {fields: []string{":method: GET", ":scheme: https", ":authority: evil.test", ":path: /v1/x"}, want: "403", reason: "on a TLS connection to api.test"},
	"authority with an address":        {fields: []string{":method: GET", ":scheme: https", ":authority: 93.184.215.21", ":path: /v1/x"}, want: "403", reason: "on a TLS connection to api.test"},
	"authority with another port":      {fields: []string{":method: GET", ":scheme: https", ":authority: api.test:8443", ":path: /v1/x"}, want: "403", reason: "a connection to port 443"},
	"authority with a user":            {fields: []string{":method: GET", ":scheme: https", ":authority: api.test@evil.test", ":path: /v1/x"}, want: malformedStream, reason: "malformed request"},
	"authority with a trailing dot":    {fields: []string{":method: GET", ":scheme: https", ":authority: api.test.", ":path: /v1/x"}, want: "400", reason: "the host"},
	"authority with a path":            {fields: []string{":method: GET", ":scheme: https", ":authority: api.test/v1/x?", ":path: /v1/x"}, want: malformedStream, reason: "malformed request"},
	"no authority":                     {fields: []string{":method: GET", ":scheme: https", ":path: /v1/x"}, want: "400", reason: "the host"},
	"host beside the authority":        {fields: get2("/v1/x", "host: evil.test"), want: malformedStream, reason: "malformed request"},
	"host in the place of authority":   {fields: []string{":method: GET", ":scheme: https", ":path: /v1/x", "host: a.in.test"}, want: "403", reason: "on a TLS connection to api.test"},
	"two hosts":                        {fields: []string{":method: GET", ":scheme: https", ":path: /v1/x", "host: api.test", "host: evil.test"}, want: malformedStream, reason: "malformed request"},
	"two authorities":                  {fields: []string{":method: GET", ":scheme: https", ":authority: api.test", ":authority: evil.test", ":path: /v1/x"}, want: malformedStream, reason: "malformed request"},
	"scheme http":                      {fields: []string{":method: GET", ":scheme: http", ":authority: api.test", ":path: /v1/x"}, want: "400", reason: "scheme"},
	"another scheme":                   {fields: []string{":method: GET", ":scheme: ftp", ":authority: api.test", ":path: /v1/x"}, want: malformedStream, reason: "malformed request"},
	"scheme with a request":            {fields: []string{":method: GET", ":scheme: https://evil.test/?", ":authority: api.test", ":path: /v1/x"}, want: malformedStream, reason: "malformed request"},
	"path":                             {fields: get2("/v2/x"), want: "403", reason: "no rule allows GET /v2/x"},
	"denied path":                      {fields: get2("/v1/admin/x"), want: "403", reason: "is denied"},
	"denied path, encoded":             {fields: get2("/v1/%61dmin/x"), want: "403", reason: "is denied"},
	"denied path, encoded slash":       {fields: get2("/v1%2fadmin/x"), want: "403", reason: "is denied"},
	"dots":                             {fields: get2("/v1/../v2/x"), want: "403", reason: "segment"},
	"encoded dots":                     {fields: get2("/v1/%2e%2e/v2"), want: "403", reason: "segment"},
	"two slashes":                      {fields: get2("//v1/x"), want: "403", reason: "segment"},
	"two slashes within":               {fields: get2("/v1//x"), want: "403", reason: "segment"},
	"twice encoded":                    {fields: get2("/v1/%252e%252e/v2"), want: "403", reason: "byte"},
	"path parameter":                   {fields: get2("/v1/..;/v2"), want: "403", reason: "byte"},
	"backslash":                        {fields: get2(`/v1/\..\v2`), want: "403", reason: "byte"},
	"absolute path":                    {fields: get2("https://evil.test/v1/x"), want: malformedStream, reason: "malformed request"},
	"empty path":                       {fields: get2(""), want: malformedStream, reason: "malformed request"},
	"path without a slash":             {fields: get2("v1/x"), want: malformedStream, reason: "malformed request"},
	"star":                             {fields: []string{":method: OPTIONS", ":scheme: https", ":authority: api.test", ":path: *"}, want: "400", reason: "the target"},
	"fragment":                         {fields: get2("/v1/x#/../admin"), want: "400", reason: "target"},
	"space in the path":                {fields: get2("/v1/x HTTP/1.1"), want: "400", reason: "target"},
	"request in the path":              {fields: get2("/v1/x HTTP/1.1\r\nHost: evil.test\r\n\r\nGET /v2/"), want: malformedStream, reason: "malformed request"},
	"two paths":                        {fields: []string{":method: GET", ":scheme: https", ":authority: api.test", ":path: /v1/x", ":path: /v2/x"}, want: malformedStream, reason: "malformed request"},
	"method":                           {fields: []string{":method: PUT", ":scheme: https", ":authority: api.test", ":path: /v1/x"}, want: "403", reason: "no rule allows PUT"},
	"lower-case method":                {fields: []string{":method: get", ":scheme: https", ":authority: api.test", ":path: /v1/x"}, want: "400", reason: "the method"},
	"request in the method":            {fields: []string{":method: GET /v2/x HTTP/1.1\r\nA: ", ":scheme: https", ":authority: api.test", ":path: /v1/x"}, want: malformedStream, reason: "malformed request"},
	"method with a space":              {fields: []string{":method: GET /v2/x", ":scheme: https", ":authority: api.test", ":path: /v1/x"}, want: "400", reason: "the method"},
	"method in a field":                {fields: post2("x-http-method-override: DELETE"), want: "403", reason: "x-http-method-override"},
	"path in a field":                  {fields: get2("/v1/x", "x-original-url: /v2"), want: "403", reason: "x-original-url"},
	"path in a field with underscores": {fields: get2("/v1/x", "x_rewrite_url: /v2"), want: "403", reason: "x_rewrite_url"},
	"CONNECT":                          {fields: []string{":method: CONNECT", ":authority: api.test:443"}, want: "403", reason: "tunnel"},
	"CONNECT elsewhere":                {fields: []string{":method: CONNECT", ":authority: evil.test:443"}, want: "403", reason: "tunnel"},
	"CONNECT with a path":              {fields: []string{":method: CONNECT", ":scheme: https", ":authority: api.test", ":path: /v1/x"}, want: malformedStream, reason: "malformed request"},
	"extended CONNECT":                 {fields: []string{":method: CONNECT", ":protocol: websocket", ":scheme: https", ":authority: api.test", ":path: /v1/x"}, want: malformedStream, reason: "malformed request"},
	"protocol without CONNECT":         {fields: get2("/v1/x", ":protocol: websocket"), want: malformedStream, reason: "malformed request"},
	"transfer-encoding":                {fields: post2("transfer-encoding: chunked"), body: "0\r\n\r\nGET /v2/x HTTP/1.1\r\n\r\n", want: "400", reason: "HTTP/2 does not have"},
	"connection":                       {fields: get2("/v1/x", "connection: x-secret"), want: "400", reason: "HTTP/2 does not have"},
	"keep-alive":                       {fields: get2("/v1/x", "keep-alive: 1"), want: "400", reason: "HTTP/2 does not have"},
	"proxy-connection":                 {fields: get2("/v1/x", "proxy-connection: x"), want: "400", reason: "HTTP/2 does not have"},
	"upgrade to h2c":                   {fields: get2("/v1/x", "upgrade: h2c"), want: "400", reason: "HTTP/2 does not have"},
	"http2-settings":                   {fields: get2("/v1/x", "http2-settings: AAMAAABk"), want: "400", reason: "http2-settings"},
	"te":                               {fields: get2("/v1/x", "te: chunked"), want: "400", reason: "HTTP/2 does not have"},
	"te twice":                         {fields: get2("/v1/x", "te: trailers", "te: chunked"), want: "400", reason: "HTTP/2 does not have"},
	"underscore for a hyphen":          {fields: post2("transfer_encoding: chunked"), want: "400", reason: "the field name"},
	"content_length":                   {fields: post2("content_length: 3"), want: "400", reason: "the field name"},
	"CR LF in a value":                 {fields: get2("/v1/x", "a: b\r\nx-original-url: /v2"), want: malformedStream, reason: "malformed request"},
	"LF in a value":                    {fields: get2("/v1/x", "a: b\nc: d"), want: malformedStream, reason: "malformed request"},
	"CR in a value":                    {fields: get2("/v1/x", "a: b\rc: d"), want: malformedStream, reason: "malformed request"},
	"NUL in a value":                   {fields: get2("/v1/x", "a: b\x00c"), want: malformedStream, reason: "malformed request"},
	"CR LF in a name":                  {fields: get2("/v1/x", "a\r\nb: c"), want: malformedStream, reason: "malformed request"},
	"colon in a name":                  {fields: get2("/v1/x", "transfer-encoding:x: chunked"), want: malformedStream, reason: "malformed request"},
	"space in a name":                  {fields: get2("/v1/x", "transfer-encoding : chunked"), want: malformedStream, reason: "malformed request"},
	"upper-case name":                  {fields: get2("/v1/x", "Host: evil.test"), want: malformedStream, reason: "malformed request"},
	"empty name":                       {fields: get2("/v1/x", " : x"), want: malformedStream, reason: "malformed request"},
	"pseudo-header after a field":      {fields: []string{":method: GET", ":scheme: https", ":authority: api.test", "a: b", ":path: /v1/x"}, want: malformedStream, reason: "malformed request"},
	"unknown pseudo-header":            {fields: append([]string{":x: y"}, get2("/v1/x")...), want: malformedStream, reason: "malformed request"},
	"pseudo-header of responses":       {fields: append([]string{":status: 200"}, get2("/v1/x")...), want: malformedStream, reason: "malformed request"},
	"no method":                        {fields: []string{":scheme: https", ":authority: api.test", ":path: /v1/x"}, want: malformedStream, reason: "malformed request"},
	"two lengths":                      {fields: post2("content-length: 3", "content-length: 0"), body: "abc", want: "400|" + malformedStream, reason: "twice"},
	"length with a sign":               {fields: post2("content-length: +3"), body: "abc", want: "400|" + malformedStream, reason: "content-length"},
	"length of words":                  {fields: post2("content-length: 3, 3"), body: "abc", want: "400|" + malformedStream, reason: "content-length"},
	"expectation":                      {fields: post2("expect: 200-ok"), body: "abc", want: "400", reason: "expectation"},
	"many fields":                      {fields: get2("/v1/x", strings.Split(strings.Repeat("a: b\n", 300), "\n")[:300]...), want: "400", reason: "more than 256 fields"},
	"a head of more than 64 KB":        {fields: get2("/v1/x", "a: "+strings.Repeat("b", 70000)), want: "400", reason: "a head of more than"},
	"a trailer that rewrites":          {fields: post2("trailer: x-original-url"), body: "x", want: "400", reason: "the trailer x-original-url"},
	"a trailer that ends":              {fields: post2("trailer: keep-alive"), body: "x", want: "400", reason: "the trailer keep-alive"},
	"an encoded request in the header": {fields: get2("/v1/x", "content-length: 0\r\n\r\nGET /v2/x HTTP/1.1\r\nhost: api.test\r\n\r\n"), want: malformedStream, reason: "malformed request"},
}

func TestAttacksH2(t *testing.T) {
	for name, tc := range attacksH2 {
		t.Run(name, func(t *testing.T) {
			w, seen := newAttackedTLS(t)
			c := w.h2dial(t)
			block := c.block(tc.fields...)
			stream := c.next
			c.next += 2
			first := block[:min(len(block), 16<<10)]
			rest := block[len(first):]
			_ = c.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: first, EndHeaders: len(rest) == 0, EndStream: tc.body == ""})
			for len(rest) > 0 {
				part := rest[:min(len(rest), 16<<10)]
				rest = rest[len(part):]
				_ = c.WriteContinuation(stream, len(rest) == 0, part)
			}
			if tc.body != "" {
				_ = c.WriteData(stream, true, []byte(tc.body)) // seen by wait
			}
			got, reason := c.wait(stream), tc.reason
			if !slices.Contains(strings.Split(tc.want, "|"), got) {
				t.Errorf("%s, want %s", got, tc.want)
			}
			// Of a body that contradicts its length, the library resets the stream before or after the head
			// was refused.
			if got == malformedStream && strings.Contains(tc.want, "|") {
				reason = ""
			}
			// The connection serves others.
			stream = c.request(true, get2("/v1/ok")...)
			if got := c.wait(stream); got != "200" {
				t.Errorf("a further request: %s", got)
			}
			refused := false
			var events []Event
			for _, e := range w.all() {
				if e.Kind == Query {
					continue
				}
				events = append(events, e)
				refused = refused || e.Kind == Request && !e.Allow && e.Out == 0 && strings.Contains(e.Reason, reason)
			}
			if !refused {
				t.Errorf("no refusal is recorded with that reason: %+v", events)
			}
			if got := strings.Join(seen.requests, ", "); got != "GET api.test /v1/ok" {
				t.Errorf("the server got %q", got)
			}
		})
	}
}

// The rest of an upload that was refused is under way when the client learns of it, and is no
// refusal of its own. Data behind the end of a request is one.
func TestDataBehindTheEnd(t *testing.T) {
	const malformed = "the client sent a malformed request over HTTP/2 (STREAM_CLOSED)"
	for name, tc := range map[string]struct {
		end     bool
		reset   string // after the answer
		reasons []string
	}{
		"of the response": {reset: "RST_STREAM NO_ERROR", reasons: []string{"no rule allows PUT /v1/x"}},
		"of the request":  {end: true, reasons: []string{"no rule allows PUT /v1/x", malformed}},
	} {
		t.Run(name, func(t *testing.T) {
			w, _ := newAttackedTLS(t)
			c := w.h2dial(t)
			stream := c.request(tc.end, ":method: PUT", ":scheme: https", ":authority: api.test", ":path: /v1/x")
			if got := c.wait(stream); got != "403" {
				t.Fatalf("%s", got)
			}
			if tc.reset != "" {
				if got := c.wait(stream); got != tc.reset {
					t.Fatalf("%s, want %s", got, tc.reset)
				}
			}
			for range 3 {
				_ = c.WriteData(stream, false, []byte("abc")) // seen by wait
				if got := c.wait(stream); got != "RST_STREAM STREAM_CLOSED" {
					t.Fatalf("%s", got)
				}
			}
			if got := c.wait(c.request(true, get2("/v1/ok")...)); got != "200" {
				t.Errorf("a further request: %s", got)
			}
			var reasons []string
			for _, e := range w.all() {
				if e.Kind == Request && !e.Allow {
					reasons = append(reasons, e.Reason)
				}
			}
			if len(reasons) != len(tc.reasons) {
				t.Fatalf("%q", reasons)
			}
			for i, want := range tc.reasons {
				if !strings.Contains(reasons[i], want) {
					t.Errorf("%q, want %q", reasons[i], want)
				}
			}
		})
	}
}

// The same on HTTP/1.1 within TLS.
var attacksH1 = map[string]struct {
	send    string
	reached string
	status  int
	reason  string
}{
	"another host":                    {send: getFrom("a.in.test", "/v1/x"), status: 403, reason: "on a TLS connection to api.test"},
	"a name that shares the address":  {send: getFrom("also.api.test", "/v1/x"), status: 403, reason: "on a TLS connection to api.test"},
	"a name that shares it, second":   {send: getFrom("api.test", "/v1/ok") + getFrom("also.api.test", "/v1/x"), reached: "GET api.test /v1/ok", status: 403, reason: "on a TLS connection to api.test"},
	"the address":                     {send: getFrom("93.184.215.21", "/v1/x"), status: 403, reason: "on a TLS connection to api.test"},
	"another port":                    {send: getFrom("api.test:80", "/v1/x"), status: 403, reason: "a connection to port 443"},
	"absolute target":                 {send: "GET http://api.test/v1/x HTTP/1.1\r\nHost: api.test\r\n\r\n", status: 403, reason: "scheme http within TLS"},
	"absolute target with https":      {send: "GET https://api.test/v1/x HTTP/1.1\r\nHost: api.test\r\n\r\n", status: 400, reason: "the target"},
	"absolute target of another host": {send: "GET http://evil.test/v1/x HTTP/1.1\r\nHost: api.test\r\n\r\n", status: 400, reason: "a target of evil.test"},
	"CONNECT":                         {send: "CONNECT api.test:443 HTTP/1.1\r\nHost: api.test:443\r\n\r\n", status: 403, reason: "tunnel"},
	"upgrade to h2c":                  {send: "GET /v1/x HTTP/1.1\r\nHost: api.test\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\nPRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", reached: "GET api.test /v1/x", status: 400, reason: "version"},
	"HTTP/2 without ALPN":             {send: "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", status: 400, reason: "version"},
	"method":                          {send: "PUT /v1/x HTTP/1.1\r\nHost: api.test\r\nContent-Length: 0\r\n\r\n", status: 403, reason: "no rule allows PUT"},
	"path":                            {send: getFrom("api.test", "/v2/x"), status: 403, reason: "no rule allows GET /v2/x"},
	"denied path":                     {send: getFrom("api.test", "/v1%2Fadmin/x"), status: 403, reason: "is denied"},
	"path in the second request":      {send: getFrom("api.test", "/v1/ok") + getFrom("api.test", "/v2/x"), reached: "GET api.test /v1/ok", status: 403, reason: "no rule allows"},
	"path behind a body":              {send: "POST /v1/ok HTTP/1.1\r\nHost: api.test\r\nContent-Length: 3\r\n\r\nabc" + getFrom("api.test", "/v2/x"), reached: "POST api.test /v1/ok", status: 403, reason: "no rule allows"},
	"dots":                            {send: getFrom("api.test", "/v1/../v2"), status: 403, reason: "segment"},
	"two slashes":                     {send: getFrom("api.test", "//v1/x"), status: 403, reason: "segment"},
	"method in a field":               {send: "POST /v1/x HTTP/1.1\r\nHost: api.test\r\nX-HTTP-Method-Override: DELETE\r\nContent-Length: 0\r\n\r\n", status: 403, reason: "x-http-method-override"},
	"CL.TE":                           {send: "POST /v1/x HTTP/1.1\r\nHost: api.test\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nG", status: 400, reason: "both"},
	"bare LF":                         {send: "GET /v1/x HTTP/1.1\nHost: api.test\n\n", status: 400, reason: "LF"},
	"endless head":                    {send: "GET /v1/x HTTP/1.1\r\nHost: api.test\r\nA: " + strings.Repeat("b", 70000), status: 400, reason: "more than"},
}

func TestAttacksH1InTLS(t *testing.T) {
	for name, tc := range attacksH1 {
		t.Run(name, func(t *testing.T) {
			w, seen := newAttackedTLS(t)
			c := w.secureDial("http/1.1")
			_, _ = io.WriteString(c, tc.send) // it may be refused before its end
			r := bufio.NewReader(c)
			status, body := 0, ""
			for {
				p, err := http.ReadResponse(r, nil)
				if err != nil {
					break
				}
				b, _ := io.ReadAll(p.Body) // its end is seen by the next
				status, body = p.StatusCode, string(b)
			}
			if status != tc.status || !strings.Contains(body, tc.reason) {
				t.Errorf("%d %s", status, body)
			}
			refused := false
			events := w.all()
			for _, e := range events {
				refused = refused || e.Kind == Request && !e.Allow && strings.Contains(e.Reason, tc.reason)
			}
			if !refused {
				t.Errorf("not recorded: %+v", events)
			}
			if got := strings.Join(seen.requests, ", "); got != tc.reached {
				t.Errorf("the server got %q", got)
			}
		})
	}
}

// A body that is not as long as the request said reaches no server as a whole request.
func TestLengthsH2(t *testing.T) {
	for name, tc := range map[string]struct {
		length, body string
		want         string
	}{
		"longer":  {"3", "abcGET /v2/x HTTP/1.1\r\n\r\n", "RST_STREAM"},
		"shorter": {"300", "abc", "502"},
		"none":    {"0", "GET /v2/x HTTP/1.1\r\n\r\n", "RST_STREAM"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newInspected(t)
			whole := make(chan string, 10)
			w.secure("93.184.215.21:443", "api.test", func(_ http.ResponseWriter, r *http.Request) {
				b, err := io.ReadAll(r.Body)
				if err == nil && len(b) > 0 {
					whole <- string(b)
				}
			}, "h2")
			w.resolve("api.test", dnsmessage.TypeA)
			c := w.h2dial(t)
			stream := c.request(false, post2("content-length: "+tc.length)...)
			_ = c.WriteData(stream, true, []byte(tc.body)) // seen by wait
			if got := c.wait(stream); !strings.HasPrefix(got, tc.want) && got != "200" || got == "200" && tc.length != "0" {
				t.Errorf("%s", got)
			}
			w.n.Close()
			select {
			case b := <-whole:
				t.Errorf("the server got %q", b)
			default:
			}
		})
	}
}

// What TLS itself could be made to do.
func TestTLSAttacks(t *testing.T) {
	t.Run("TLS 1.0 and 1.1", func(t *testing.T) {
		w, _ := newAttackedTLS(t)
		config := w.clientTLS("api.test")
		config.MinVersion, config.MaxVersion = tls.VersionTLS10, tls.VersionTLS11
		if err := tls.Client(w.dial("93.184.215.21:443"), config).HandshakeContext(t.Context()); err == nil {
			t.Error("a handshake")
		}
		w.refused(t, "a version of TLS before 1.2")
		if len(w.dialled) > 0 {
			t.Errorf("dialled %v", w.dialled)
		}
	})
	t.Run("protocols that cannot be read", func(t *testing.T) {
		w, _ := newAttackedTLS(t)
		c := w.dial("93.184.215.21:443")
		if err := tls.Client(c, w.clientTLS("api.test", "postgresql", "h3")).HandshakeContext(t.Context()); err == nil {
			t.Error("a handshake")
		}
		_, _ = io.ReadAll(c) // the gateway ends it, after the alert
		w.refused(t, "no protocol that can be read")
	})
	t.Run("a client that does not trust us", func(t *testing.T) {
		w, _ := newAttackedTLS(t)
		config := w.clientTLS("api.test")
		roots, err := public()
		if err != nil {
			t.Fatal(err)
		}
		config.RootCAs = pool(t, roots)
		if err := tls.Client(w.dial("93.184.215.21:443"), config).HandshakeContext(t.Context()); err == nil {
			t.Error("a handshake")
		}
		await(t, func() bool { return len(w.n.all()) == 0 })
		found := false
		for _, e := range w.all() {
			found = found || e.Kind == Connection && strings.Contains(e.Reason, "remote error: tls: bad certificate")
		}
		if !found {
			t.Error("not recorded")
		}
	})
	t.Run("a client certificate is not asked for", func(t *testing.T) {
		w, _ := newAttackedTLS(t)
		config := w.clientTLS("api.test", "http/1.1")
		config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			t.Error("asked for")
			return &tls.Certificate{}, nil
		}
		if err := tls.Client(w.dial("93.184.215.21:443"), config).HandshakeContext(t.Context()); err != nil {
			t.Error(err)
		}
	})
	// A ticket would let one network resume what another has agreed on, and early data be repeated.
	t.Run("no session is resumed", func(t *testing.T) {
		cache := tls.NewLRUClientSessionCache(10)
		w, _ := newAttackedTLS(t)
		other, _ := newAttackedTLS(t)
		for _, version := range []uint16{tls.VersionTLS12, tls.VersionTLS13} {
			for _, w := range []*world{w, w, other} {
				config := w.clientTLS("api.test", "http/1.1")
				config.ClientSessionCache, config.MaxVersion = cache, version
				config.RootCAs.AppendCertsFromPEM(other.n.opts.CA.Certificate())
				c := tls.Client(w.dial("93.184.215.21:443"), config)
				if err := c.HandshakeContext(t.Context()); err != nil {
					t.Fatal(err)
				}
				get(t, c, bufio.NewReader(c), "GET", getFrom("api.test", "/v1/x")) // reads tickets, if any
				if c.ConnectionState().DidResume {
					t.Error("resumed")
				}
			}
		}
		if s, ok := cache.Get("api.test"); ok && s != nil {
			t.Error("there is a ticket")
		}
	})
	t.Run("a certificate of another network is not trusted", func(t *testing.T) {
		w, _ := newAttackedTLS(t)
		other, _ := newAttackedTLS(t)
		config := other.clientTLS("api.test")
		if err := tls.Client(w.dial("93.184.215.21:443"), config).HandshakeContext(t.Context()); err == nil {
			t.Error("trusted")
		}
	})
	t.Run("data with the hello", func(t *testing.T) {
		w, seen := newAttackedTLS(t)
		c := w.dial("93.184.215.21:443")
		_, _ = io.WriteString(c, hello(sni("api.test"))+"\x17\x03\x03\x00\x10"+strings.Repeat("x", 16)) // early data
		if _, err := io.ReadAll(c); err == nil {
			t.Log("an orderly end") // behind an alert
		}
		if w.n.Close(); len(seen.requests) > 0 {
			t.Errorf("%v", seen.requests)
		}
	})
}

// refused checks that a refusal of a connection is recorded.
func (w *world) refused(t *testing.T, reason string) {
	t.Helper()
	var events []Event
	for hung := time.After(testenv.HungAfter); ; { // a close would come before its reason
		select {
		case e := <-w.events:
			if !e.Allow && strings.Contains(e.Reason, reason) {
				w.all()
				return
			}
			if e.Kind != Query {
				events = append(events, e)
			}
		case <-hung:
			t.Fatalf("not refused with %q: %+v", reason, events)
		}
	}
}

// Floods end with a reset and a reason, whatever they are made of.
func TestFloodsH2(t *testing.T) {
	for name, tc := range map[string]struct {
		send   func(c *h2client) error // once more; an error ends the flood
		reason string
	}{
		"ping": {func(c *h2client) error { return c.WritePing(false, [8]byte{}) }, "frames of type PING"},
		"settings": {func(c *h2client) error {
			return c.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1})
		}, "frames of type SETTINGS"},
		"settings that are acknowledged": {func(c *h2client) error { return c.WriteSettingsAck() }, ""},
		"priority":                       {func(c *h2client) error { return c.WritePriority(1, http2.PriorityParam{StreamDep: 3}) }, "frames of type PRIORITY"},
		"rapid reset": {func(c *h2client) error {
			stream := c.request(true, get2("/v1/x")...)
			return c.WriteRSTStream(stream, http2.ErrCodeCancel)
		}, ""},
		"rapid reset of refused requests": {func(c *h2client) error {
			stream := c.request(true, get2("/v2/x")...)
			return c.WriteRSTStream(stream, http2.ErrCodeCancel)
		}, ""},
		"window updates":          {func(c *h2client) error { return c.WriteWindowUpdate(0, 1) }, "frames of type WINDOW_UPDATE"},
		"frames of unknown types": {func(c *h2client) error { return c.WriteRawFrame(0xfa, 0, 0, nil) }, "flood"},
		"empty data": {func(c *h2client) error {
			if c.next == 1 {
				c.request(false, post2()...)
			}
			return c.WriteData(1, false, nil)
		}, "frames of type DATA"},
		"empty continuations": {func(c *h2client) error {
			if c.next == 1 {
				c.next += 2
				_ = c.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: c.block(get2("/v1/x")...)})
			}
			return c.WriteContinuation(1, false, nil)
		}, "in more than 16 frames"},
		"continuations": {func(c *h2client) error {
			if c.next == 1 {
				c.next += 2
				_ = c.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: c.block(get2("/v1/x")...)})
			}
			return c.WriteContinuation(1, false, c.block("a: "+strings.Repeat("x", 8000)))
		}, ""},
		"streams that begin and do not end": {func(c *h2client) error {
			c.request(false, post2()...)
			return nil
		}, ""}, // beyond the number, or with more refusals than it reads
	} {
		t.Run(name, func(t *testing.T) {
			w, _ := newAttackedTLS(t)
			c := w.h2dial(t)
			ended := make(chan string, 1)
			go func() {
				for {
					f, err := c.ReadFrame()
					if err != nil {
						ended <- err.Error()
						return
					}
					if g, ok := f.(*http2.GoAwayFrame); ok && g.ErrCode != http2.ErrCodeNo {
						ended <- "GOAWAY " + g.ErrCode.String()
						return
					}
				}
			}()
			sent := 0
			for ; sent < 1_000_000; sent++ {
				if err := tc.send(c); err != nil {
					break
				}
				if len(ended) > 0 {
					break
				}
			}
			how := <-ended
			t.Logf("%d were sent, then %s", sent, how)
			_ = c.tls.Close()
			w.refused(t, tc.reason)
		})
	}
}

// A connection that the library gives up without a word is recorded as refused.
func TestWordlessEndH2(t *testing.T) {
	w, _ := newAttackedTLS(t)
	c := w.secureDial("h2")
	_, _ = io.WriteString(c, "GET / HTTP/1.1\r\nHost: api.test\r\n\r\n") // the end is seen by the next line
	_, _ = io.Copy(io.Discard, c)
	_ = c.Close()
	w.refused(t, "did not begin HTTP/2")
}

// A block of HPACK that stands for a large head is not kept.
func TestHPACKBomb(t *testing.T) {
	w, seen := newAttackedTLS(t)
	c := w.h2dial(t)
	block := c.block(append(get2("/v1/x"), "a: "+strings.Repeat("b", 4000))...)
	for range 12000 { // an index for 4 KB each: 48 MB
		block = append(block, 0x80|62)
	}
	_ = c.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block, EndHeaders: true, EndStream: true})
	if got := c.wait(1); got != "431" {
		t.Errorf("%s", got)
	}
	if w.n.Close(); len(seen.requests) > 0 {
		t.Errorf("%v", seen.requests)
	}
}

// A deaf connection reads nothing until it is closed.
type deaf struct{ net.Conn }

func (c deaf) Read([]byte) (int, error) {
	buf := bufio.NewReader(c.Conn)
	for {
		if _, err := buf.Discard(1); err != nil {
			return 0, err
		}
	}
}

// settled waits until the gateway has read everything so far.
func (c *h2client) settled() *h2client {
	_ = c.WritePing(false, [8]byte{1}) // its answer is waited for
	for {
		f, err := c.ReadFrame()
		if err != nil {
			c.t.Fatal(err)
		}
		if p, ok := f.(*http2.PingFrame); ok && p.IsAck() {
			return c
		}
	}
}

// The time for a head counts within TLS too.
func TestSlowClientsInTLS(t *testing.T) {
	for name, begin := range map[string]func(w *world) net.Conn{
		"nothing behind the hello": func(w *world) net.Conn {
			c := w.dial("93.184.215.21:443")
			go func() {
				_ = tls.Client(deaf{c}, w.clientTLS("api.test")).HandshakeContext(t.Context()) // it ends with the connection
			}()
			return c
		},
		"half a preface": func(w *world) net.Conn {
			c := w.secureDial("h2")
			_, _ = io.WriteString(c, "PRI * HT")
			return c
		},
		"half a head of HTTP/1": func(w *world) net.Conn {
			c := w.secureDial("http/1.1")
			_, _ = io.WriteString(c, "GET /v1/x")
			return c
		},
		"half a head of HTTP/2": func(w *world) net.Conn {
			c := w.h2dial(t).settled()
			_ = c.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: c.block(get2("/v1/x")...)})
			return c.tls
		},
		"half a frame": func(w *world) net.Conn {
			c := w.h2dial(t).settled()
			_, _ = c.tls.Write([]byte{0, 0, 100, 1, 5, 0, 0, 0, 1, 0x82})
			return c.tls
		},
		"half the header of a frame": func(w *world) net.Conn {
			c := w.h2dial(t).settled()
			_, _ = c.tls.Write([]byte{0, 0, 100})
			return c.tls
		},
	} {
		t.Run(name, func(t *testing.T) {
			w, _ := newAttackedTLS(t)
			c := begin(w)
			defer c.Close()
			w.waitHeads(1)
			w.clock.advance(defaults.head - 1)
			if n := len(w.n.all()); n != 1 {
				t.Fatalf("%d connections before the time is over", n)
			}
			// The client may end the handshake before the gateway, which then gives the head its own time.
			w.clock.advance(1)
			await(t, func() bool {
				if w.inHead() {
					w.clock.advance(defaults.head)
				}
				return w.aborted()
			})
			_, _ = io.ReadAll(c) // a reset, which another reader may have seen
			w.refused(t, "not complete in time")
		})
	}
}

// inHead reports whether a flow waits for a head. Any other wait has a time of its own.
func (w *world) inHead() bool {
	return slices.ContainsFunc(w.n.all(), func(f *flow) bool { return f.deadline.Load() != 0 })
}

// aborted reports whether all flows were cut.
func (w *world) aborted() bool {
	for _, f := range w.n.all() {
		f.mu.Lock()
		cut := f.aborted != nil
		f.mu.Unlock()
		if !cut {
			return false
		}
	}
	return true
}

// A server that does not go on with the handshake is given up, and the client told so.
func TestSlowServersInTLS(t *testing.T) {
	w := newInspected(t)
	begun := make(chan struct{})
	w.raw("93.184.215.30:443", func(c *net.TCPConn) {
		_, _ = io.ReadFull(c, make([]byte, 1))
		close(begun)
		_, _ = io.Copy(io.Discard, c) // it never answers
	})
	w.resolve("a.in.test", dnsmessage.TypeA)
	c := tls.Client(w.dial("93.184.215.30:443"), w.clientTLS("a.in.test"))
	ended := make(chan error, 1)
	go func() { ended <- c.HandshakeContext(t.Context()) }()
	<-begun
	w.clock.advance(defaults.dial)
	if err := <-ended; err == nil {
		t.Error("a handshake")
	}
	await(t, func() bool { return len(w.n.all()) == 0 })
	events := w.all()
	if e := events[len(events)-1]; !strings.Contains(e.Reason, "no answer in time") {
		t.Errorf("%+v", e)
	}
}

func TestIdleInTLS(t *testing.T) {
	for version, protocols := range protocols {
		t.Run(version, func(t *testing.T) {
			w, _ := newAttackedTLS(t)
			c := w.trusting(protocols...)
			fetch(t, c, "GET", "https://api.test/v1/x", nil)
			w.clock.advance(defaults.idle)
			await(t, func() bool { return len(w.n.all()) == 0 })
			found := false
			for _, e := range w.all() {
				found = found || e.Kind == Connection && e.Reason == "idle for too long"
			}
			if !found {
				t.Error("not recorded")
			}
		})
	}
}

func TestBoundsInTLS(t *testing.T) {
	t.Run("connections", func(t *testing.T) {
		w, _ := newAttackedTLS(t, func(_ *Options, l *limits) { l.tls = 2 })
		for range 2 {
			w.secureDial("http/1.1")
		}
		if err := tls.Client(w.dial("93.184.215.21:443"), w.clientTLS("api.test")).HandshakeContext(t.Context()); err == nil {
			t.Error("a third handshake")
		}
		w.refused(t, "more than 2 connections of TLS at once")
	})
	t.Run("requests", func(t *testing.T) {
		w := newInspected(t, func(_ *Options, l *limits) { l.streams = 3 })
		release := make(chan struct{})
		w.secure("93.184.215.21:443", "api.test", func(http.ResponseWriter, *http.Request) { <-release }, "h2")
		w.resolve("api.test", dnsmessage.TypeA)
		c := w.h2dial(t)
		for range 3 {
			c.request(true, get2("/v1/x")...)
		}
		await(t, func() bool { return w.n.tls.h2.streams.Load() == 3 })
		stream := c.request(true, get2("/v1/x")...)
		if got := c.wait(stream); got != "403" {
			t.Errorf("%s", got)
		}
		close(release)
		w.refused(t, "more than 3 requests at once")
	})
	t.Run("bytes", func(t *testing.T) {
		for version, protocols := range protocols {
			for name, b := range map[string]Budget{"out": {BytesOut: 20000}, "in": {BytesIn: 20000}} {
				w := newInspected(t, budget(b))
				w.secure("93.184.215.30:443", "a.in.test", func(rw http.ResponseWriter, r *http.Request) {
					b, _ := io.ReadAll(r.Body)
					_, _ = rw.Write(b)
				}, protocols...)
				q, err := http.NewRequestWithContext(t.Context(), "POST", "https://a.in.test/", bytes.NewReader(make([]byte, 100_000)))
				if err != nil {
					t.Fatal(err)
				}
				if p, err := w.trusting(protocols...).Do(q); err == nil {
					if _, err := io.ReadAll(p.Body); err == nil {
						t.Errorf("%s %s: no error", version, name)
					}
					_ = p.Body.Close()
				}
				var connection Event
				for _, e := range w.all() {
					if e.Kind == Connection {
						connection = e
					}
				}
				if e := connection; e.Allow || !strings.Contains(e.Reason, "the budget of 20000 bytes "+name) || e.Out > 20000 && name == "out" || e.In > 20000 && name == "in" {
					t.Errorf("%s %s: %+v", version, name, e)
				}
			}
		}
	})
}

// FuzzFrames follows frames in pieces, and finds them where the library does.
func FuzzFrames(f *testing.F) {
	var b bytes.Buffer
	fr := http2.NewFramer(&b, nil)
	_ = fr.WriteSettings()
	_ = fr.WriteData(1, false, []byte("0123456789"))
	_ = fr.WritePing(true, [8]byte{1})
	f.Add(b.Bytes(), 3)
	f.Add([]byte{0, 0, 4, 3, 0, 0, 0, 0, 1, 0, 0, 0, 8}, 1)
	f.Add(bytes.Repeat([]byte{0, 0, 0, 4, 0, 0, 0, 0, 0}, 3), 100)
	f.Fuzz(func(t *testing.T, data []byte, size int) {
		if size <= 0 {
			return
		}
		var want, got []string
		for rest := data; len(rest) >= frameHeader; {
			length := int(rest[0])<<16 | int(rest[1])<<8 | int(rest[2])
			want = append(want, fmt.Sprint(rest[3], length))
			rest = rest[min(len(rest), frameHeader+length):]
		}
		var s frames
		for left := data; len(left) > 0; {
			piece := left[:min(size, len(left))]
			left = left[len(piece):]
			for len(piece) > 0 {
				var at point
				before := len(piece)
				if piece, at = s.next(piece); at == behindHeader {
					got = append(got, fmt.Sprint(byte(s.kind()), s.length()))
				} else if at == behindFirst && s.have != min(8, s.length()) {
					t.Errorf("%d bytes of %d", s.have, s.length())
				}
				if len(piece) >= before {
					t.Fatal("no byte was consumed")
				}
			}
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%v, want %v", got, want)
		}
	})
}
