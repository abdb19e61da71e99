package sniff

import (
	"errors"
	"slices"
	"strings"
	"testing"
)

func TestHTTP2Request(t *testing.T) {
	q, err := HTTP2Request("POST", "https", "a.test", "/a/%7e?x=y", []Field{{"accept", "*/*"}, {"host", "a.test"}, {"te", "trailers"}, {"content-length", "3"}}, -1)
	if err != nil || q.Method != "POST" || q.Host.String() != "a.test" || q.Path.String() != "/a/~" || q.Target != "/a/%7e?x=y" || q.Body != (Body{Length: 3}) || q.Raw != nil {
		t.Errorf("%+v, %v", q, err)
	}
	if q, err := HTTP2Request("GET", "https", "a.test", "/", nil, 0); err != nil || q.Body != (Body{}) {
		t.Errorf("no body: %+v, %v", q, err)
	}
	if q, err := HTTP2Request("CONNECT", "", "a.test:443", "", nil, -1); err != nil || !q.Tunnel || q.Host.Port != 443 {
		t.Errorf("CONNECT: %+v, %v", q, err)
	}
	if q, err := HTTP2Request("GET", "https", "a.test", "//x", nil, 0); err != nil || q.PathError == nil {
		t.Errorf("an odd path: %+v, %v", q, err)
	}
	if q, err := HTTP2Request("POST", "https", "a.test", "/", []Field{{"x_http_method", "PUT"}}, 0); err != nil || q.Rewrites != "x_http_method" {
		t.Errorf("a method in a field: %+v, %v", q, err)
	}
	for name, tc := range map[string]struct {
		method, scheme, authority, target string
		fields                            []Field
	}{
		"method":                {"get", "https", "a.test", "/", nil},
		"scheme":                {"GET", "http", "a.test", "/", nil},
		"authority":             {"GET", "https", "a.test.", "/", nil},
		"no authority":          {"GET", "https", "", "/", nil},
		"target":                {"GET", "https", "a.test", "https://a.test/", nil},
		"empty target":          {"GET", "https", "a.test", "", nil},
		"space in the target":   {"GET", "https", "a.test", "/ HTTP/1.1", nil},
		"another host":          {"GET", "https", "a.test", "/", []Field{{"host", "b.test"}}},
		"connection":            {"GET", "https", "a.test", "/", []Field{{"connection", "close"}}},
		"transfer-encoding":     {"GET", "https", "a.test", "/", []Field{{"transfer-encoding", "chunked"}}},
		"http2-settings":        {"GET", "https", "a.test", "/", []Field{{"http2-settings", "x"}}},
		"te":                    {"GET", "https", "a.test", "/", []Field{{"te", "gzip"}}},
		"two lengths":           {"GET", "https", "a.test", "/", []Field{{"content-length", "1"}, {"content-length", "1"}}},
		"length":                {"GET", "https", "a.test", "/", []Field{{"content-length", "0x1"}}},
		"expectation":           {"GET", "https", "a.test", "/", []Field{{"expect", "x"}}},
		"two expectations":      {"GET", "https", "a.test", "/", []Field{{"expect", "100-continue"}, {"expect", "100-continue"}}},
		"upper case":            {"GET", "https", "a.test", "/", []Field{{"Accept", "x"}}},
		"pseudo-header":         {"GET", "https", "a.test", "/", []Field{{":path", "/x"}}},
		"line end in a value":   {"GET", "https", "a.test", "/", []Field{{"a", "b\r\nc: d"}}},
		"NUL in a value":        {"GET", "https", "a.test", "/", []Field{{"a", "\x00"}}},
		"line end in a name":    {"GET", "https", "a.test", "/", []Field{{"a\r\nb", "c"}}},
		"underscore":            {"GET", "https", "a.test", "/", []Field{{"content_length", "3"}}},
		"tab in a decisive one": {"GET", "https", "a.test", "/", []Field{{"trailer", "a\tb"}}},
		"many fields":           {"GET", "https", "a.test", "/", slices.Repeat([]Field{{"a", "b"}}, maxFields+1)},
		"long fields":           {"GET", "https", "a.test", "/", []Field{{"a", strings.Repeat("b", maxHead)}}},
	} {
		var bad *MalformedError
		if q, err := HTTP2Request(tc.method, tc.scheme, tc.authority, tc.target, tc.fields, 0); !errors.As(err, &bad) || q == nil {
			t.Errorf("%s: %+v, %v", name, q, err)
		}
	}
}

func TestSetField(t *testing.T) {
	q, err := request("GET / HTTP/1.1\r\nHost: a.test\r\nAUTHORIZATION:old\r\nAuthorization-X: y\r\nA: authorization: x\r\n\r\n")
	if err != nil {
		t.Fatal(err)
	}
	q.SetField("authorization", "new")
	q.SetField("x-key", "k")
	if want := "GET / HTTP/1.1\r\nHost: a.test\r\nAuthorization-X: y\r\nA: authorization: x\r\nauthorization: new\r\nx-key: k\r\n\r\n"; string(q.Raw) != want {
		t.Errorf("%q", q.Raw)
	}
	again, err := request(string(q.Raw))
	if err != nil || !slices.Equal(again.Fields, q.Fields) {
		t.Errorf("%v, then %v, %v", q.Fields, again.Fields, err)
	}
}

// FuzzSetField: a changed head has the new field, and nothing else is changed.
func FuzzSetField(f *testing.F) {
	f.Add("GET / HTTP/1.1\r\nHost: a.test\r\nAuthorization: x\r\n\r\n", "authorization", "y")
	f.Add("GET / HTTP/1.1\r\nHost: a.test\r\nA: b\r\n\r\n", "x-key", "secret")
	f.Fuzz(func(t *testing.T, head, name, value string) {
		q, err := request(head)
		if err != nil || !token(name) || lower(name) != name || Decisive(name) || strings.ContainsFunc(value, func(r rune) bool { return r <= ' ' || r >= 0x7f }) {
			return
		}
		q.SetField(name, value)
		again, err := request(string(q.Raw))
		if err != nil || again.Method != q.Method || again.Target != q.Target || again.Host != q.Host || again.Body != q.Body || !slices.Equal(again.Fields, q.Fields) {
			t.Errorf("%q: %+v, %v", q.Raw, again, err)
		}
	})
}

// FuzzHTTP2Request: an accepted request is read in the same way as HTTP/1.
func FuzzHTTP2Request(f *testing.F) {
	f.Add("GET", "a.test", "/a?b", "accept", "*/*")
	f.Add("POST", "a.test:443", "/a%2fb", "content-length", "3")
	f.Add("PUT", "[2606:4700::1111]", "/", "x-original-url", "/x")
	f.Add("GET", "a.test", "/a/./b/.", "accept", "*/*")
	f.Fuzz(func(t *testing.T, method, authority, target, name, value string) {
		q, err := HTTP2Request(method, "https", authority, target, []Field{{name, value}}, 0)
		if err != nil || q.Tunnel || name == "host" {
			return
		}
		h1, err := request(method + " " + target + " HTTP/1.1\r\nHost: " + authority + "\r\n" + name + ": " + value + "\r\n\r\n")
		if err != nil || h1.Method != q.Method || h1.Host != q.Host || h1.Path != q.Path || h1.Dotted != q.Dotted || h1.Body != q.Body || h1.Rewrites != q.Rewrites || h1.Continue != q.Continue || h1.Upgrade != "" {
			t.Errorf("%+v, in HTTP/1 %+v, %v", q, h1, err)
		}
	})
}
