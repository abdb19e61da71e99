package gateway

import (
	"bufio"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/netip"
	"reflect"
	"strings"
	"sync"
	"testing"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/sandboxd/sandboxd/netns/gateway/sniff"
	"github.com/sandboxd/sandboxd/netns/policy"
)

const (
	placeholder  = "SANDBOXD-PLACEHOLDER-1"
	placeholder2 = "SANDBOXD-PLACEHOLDER-2"
	token        = "ghp_0123456789abcdefSECRET"
	password     = "correct-horse:battery/SECRET"
)

func bind(t testing.TB, b Binding, c Credential) Secret {
	t.Helper()
	if b.Name == "" {
		b.Name = "key"
	}
	if b.Host == "" {
		b.Host = "api.test"
	}
	if b.Placeholder == "" {
		b.Placeholder = placeholder
	}
	s, err := NewSecret(b, c)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func secrets(s ...Secret) func(*Options, *limits) {
	return func(o *Options, _ *limits) { o.Secrets = s }
}

func basic(user, password string) string {
	return "Basic " + base64.StdEncoding.EncodeToString([]byte(user+":"+password))
}

// A seen server keeps the fields that came to it.
type headers struct {
	mu  sync.Mutex
	all []http.Header
}

func (s *headers) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(s.all, r.Header.Clone())
	_, _ = io.Copy(io.Discard, r.Body) // its end is all
}

func send(t testing.TB, c *http.Client, method, url string, fields map[string]string) (*http.Response, string) {
	t.Helper()
	q, err := http.NewRequestWithContext(t.Context(), method, url, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	for name, value := range fields {
		q.Header.Set(name, value)
	}
	p, err := c.Do(q)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Body.Close()
	b, err := io.ReadAll(p.Body)
	if err != nil {
		t.Fatal(err)
	}
	return p, string(b)
}

// The field of a request, as it comes from the client and as the server gets it.
func TestSecretsAreInjected(t *testing.T) {
	for name, tc := range map[string]struct {
		binding    Binding
		credential Credential
		field      string
		sent, want string // "" for none
		put        bool
	}{
		"bearer (npm, curl, LLM clients)":    {Binding{}, Bearer(token), "Authorization", "Bearer " + placeholder, "Bearer " + token, true},
		"bearer in lower case":               {Binding{}, Bearer(token), "Authorization", "bearer " + placeholder, "bearer " + token, true},
		"token (GitHub)":                     {Binding{}, Bearer(token), "Authorization", "token " + placeholder, "token " + token, true},
		"another token of the client's":      {Binding{}, Bearer(token), "Authorization", "Bearer other", "Bearer other", false},
		"no field":                           {Binding{}, Bearer(token), "Authorization", "", "", false},
		"no field, always":                   {Binding{Always: true}, Bearer(token), "Authorization", "", "Bearer " + token, true},
		"another token, always":              {Binding{Always: true}, Bearer(token), "Authorization", "Bearer other", "Bearer other", false},
		"basic (git, pip)":                   {Binding{}, Basic("", password), "Authorization", basic("x-access-token", placeholder), basic("x-access-token", password), true},
		"basic with a user":                  {Binding{}, Basic("me", password), "Authorization", basic("x", placeholder), basic("me", password), true},
		"basic, the token as the user (pip)": {Binding{}, Basic("", password), "Authorization", basic(placeholder, ""), basic(password, ""), true},
		"basic without padding":              {Binding{}, Basic("", password), "Authorization", strings.TrimRight(basic("ab", placeholder), "="), basic("ab", password), true},
		"basic, always":                      {Binding{Always: true}, Basic("me", password), "Authorization", "", basic("me", password), true},
		"another password":                   {Binding{}, Basic("me", password), "Authorization", basic("me", "other"), basic("me", "other"), false},
		"field":                              {Binding{}, Field("X-Api-Key", token), "X-Api-Key", placeholder, token, true},
		"field, always":                      {Binding{Always: true}, Field("x-api-key", token), "X-Api-Key", "", token, true},
		"method and path":                    {Binding{Methods: []string{"GET"}, Paths: []string{"/v1/*"}}, Bearer(token), "Authorization", "Bearer " + placeholder, "Bearer " + token, true},
		"always elsewhere":                   {Binding{Always: true, Paths: []string{"/v1/other"}}, Bearer(token), "Authorization", "", "", false},
		"always for another host":            {Binding{Always: true, Host: "a.in.test"}, Bearer(token), "Authorization", "", "", false},
		"always for another port":            {Binding{Always: true, Port: 8443}, Bearer(token), "Authorization", "", "", false},
	} {
		for version, protocols := range protocols {
			t.Run(version+" "+name, func(t *testing.T) {
				w := newInspected(t, secrets(bind(t, tc.binding, tc.credential)))
				seen := &headers{}
				w.secure("93.184.215.21:443", "api.test", seen.ServeHTTP, protocols...)
				fields := map[string]string{"X-Other": "x"}
				if tc.sent != "" {
					fields[tc.field] = tc.sent
				}
				c := w.trusting(protocols...)
				for range 2 {
					if p, body := send(t, c, "GET", "https://api.test/v1/x", fields); p.StatusCode != 200 {
						t.Fatalf("%d %s", p.StatusCode, body)
					}
				}
				for _, h := range seen.all {
					if got := strings.Join(h[tc.field], ", "); got != tc.want || h.Get("X-Other") != "x" {
						t.Errorf("%v", h)
					}
				}
				for _, e := range w.all() {
					if e.Kind == Request && (e.Secret == "key") != tc.put {
						t.Errorf("%+v", e)
					}
					if strings.Contains(fmt.Sprintf("%+v", e), "SECRET") {
						t.Errorf("the secret is recorded: %+v", e)
					}
				}
			})
		}
	}
}

// A placeholder that stands where the secret is not for, or not put, is refused and goes nowhere.
func TestPlaceholdersElsewhere(t *testing.T) {
	bearer := func(b Binding) Secret { return bind(t, b, Bearer(token)) }
	for name, tc := range map[string]struct {
		secret      Secret
		method, url string
		fields      map[string]string
		reason      string
	}{
		"another host":                {bearer(Binding{Host: "evil.test"}), "GET", "https://api.test/v1/x", map[string]string{"Authorization": "Bearer " + placeholder}, "not for this request"},
		"another host, inspected too": {bearer(Binding{Host: "a.in.test"}), "GET", "https://api.test/v1/x", map[string]string{"Authorization": "Bearer " + placeholder}, "not for this request"},
		"a name below":                {bearer(Binding{Host: "test"}), "GET", "https://api.test/v1/x", map[string]string{"Authorization": "Bearer " + placeholder}, "not for this request"},
		"another port":                {bearer(Binding{Port: 8443}), "GET", "https://api.test/v1/x", map[string]string{"Authorization": "Bearer " + placeholder}, "not for this request"},
		"another path":                {bearer(Binding{Paths: []string{"/v1/y"}}), "GET", "https://api.test/v1/x", map[string]string{"Authorization": "Bearer " + placeholder}, "not for this request"},
		"another method":              {bearer(Binding{Methods: []string{"GET"}}), "POST", "https://api.test/v1/x", map[string]string{"Authorization": "Bearer " + placeholder}, "not for this request"},
		"TRACE, which is echoed":      {bearer(Binding{Host: "a.in.test"}), "TRACE", "https://a.in.test/", map[string]string{"Authorization": "Bearer " + placeholder}, "not for this request"},
		"encoded path":                {bearer(Binding{Paths: []string{"/v1/a/x"}}), "GET", "https://api.test/v1/a%2fx%2f", map[string]string{"Authorization": "Bearer " + placeholder}, "not for this request"},
		"another field":               {bearer(Binding{}), "GET", "https://api.test/v1/x", map[string]string{"X-Api-Key": placeholder}, "where the secret does not belong"},
		"a cookie":                    {bearer(Binding{}), "GET", "https://api.test/v1/x", map[string]string{"Cookie": "a=" + placeholder}, "where the secret does not belong"},
		"another field beside it":     {bearer(Binding{}), "GET", "https://api.test/v1/x", map[string]string{"Authorization": "Bearer " + placeholder, "X-A": placeholder}, "where the secret does not belong"},
		"a part of the field":         {bearer(Binding{}), "GET", "https://api.test/v1/x", map[string]string{"Authorization": "Bearer x" + placeholder}, "where the secret does not belong"},
		"basic for bearer":            {bearer(Binding{}), "GET", "https://api.test/v1/x", map[string]string{"Authorization": basic("x", placeholder)}, "where the secret does not belong"},
		"a part of a password":        {bind(t, Binding{}, Basic("", password)), "GET", "https://api.test/v1/x", map[string]string{"Authorization": basic("x", placeholder+"x")}, "where the secret does not belong"},
		"bearer for basic":            {bind(t, Binding{}, Basic("", password)), "GET", "https://api.test/v1/x", map[string]string{"Authorization": "Bearer " + placeholder}, "where the secret does not belong"},
		"basic elsewhere":             {bind(t, Binding{Host: "evil.test"}, Basic("", password)), "GET", "https://api.test/v1/x", map[string]string{"Authorization": basic("x", placeholder)}, "not for this request"},
		"the query":                   {bearer(Binding{}), "GET", "https://api.test/v1/x?key=" + placeholder, nil, "where the secret does not belong"},
		"the path":                    {bearer(Binding{}), "GET", "https://api.test/v1/" + placeholder, nil, "where the secret does not belong"},
	} {
		for version, protocols := range protocols {
			t.Run(version+" "+name, func(t *testing.T) {
				w := newInspected(t, secrets(tc.secret))
				seen := &headers{}
				w.secure("93.184.215.21:443", "api.test", seen.ServeHTTP, protocols...)
				w.secure("93.184.215.30:443", "a.in.test", seen.ServeHTTP, protocols...)
				p, body := send(t, w.trusting(protocols...), tc.method, tc.url, tc.fields)
				if p.StatusCode != 403 || !strings.Contains(body, tc.reason) {
					t.Errorf("%d %s", p.StatusCode, body)
				}
				recorded := false
				for _, e := range w.all() {
					recorded = recorded || e.Kind == Request && !e.Allow && e.Secret == "key" && strings.Contains(e.Reason, tc.reason)
				}
				if !recorded || len(seen.all) > 0 {
					t.Errorf("recorded %v, the server got %v", recorded, seen.all)
				}
			})
		}
	}
}

func TestPlaceholdersWithoutTLS(t *testing.T) {
	w := newInspected(t, secrets(bind(t, Binding{Host: "web.test", Port: 80}, Bearer(token))))
	seen := &headers{}
	w.http("93.184.215.14:80", seen.ServeHTTP)
	p, body := send(t, w.client(), "GET", "http://web.test/", map[string]string{"Authorization": "Bearer " + placeholder})
	if p.StatusCode != 403 || !strings.Contains(body, "without TLS") || len(seen.all) > 0 {
		t.Errorf("%d %s, the server got %v", p.StatusCode, body, seen.all)
	}
	if p, _ := send(t, w.client(), "GET", "http://web.test/", nil); p.StatusCode != 200 {
		t.Errorf("%d", p.StatusCode)
	}
}

// A field that occurs twice could be read in two ways.
func TestPlaceholderTwice(t *testing.T) {
	w := newInspected(t, secrets(bind(t, Binding{}, Bearer(token))))
	seen := &headers{}
	w.secure("93.184.215.21:443", "api.test", seen.ServeHTTP, "http/1.1")
	w.resolve("api.test", dnsmessage.TypeA)
	c := w.secureDial("http/1.1")
	p, _ := get(t, c, bufio.NewReader(c), "GET", "GET /v1/x HTTP/1.1\r\nHost: api.test\r\nAuthorization: Bearer "+placeholder+"\r\nAuthorization: Bearer "+placeholder+"\r\n\r\n")
	if p.StatusCode != 403 || len(seen.all) > 0 {
		t.Errorf("%d, %v", p.StatusCode, seen.all)
	}
}

// Two secrets of one request, and the same placeholder for two paths.
func TestSeveralSecrets(t *testing.T) {
	w := newInspected(t, secrets(
		bind(t, Binding{Name: "a", Paths: []string{"/v1/a"}}, Bearer("token-of-a-SECRET")), bind(t, Binding{Name: "b", Paths: []string{"/v1/b"}}, Bearer("token-of-b-SECRET")),
		bind(t, Binding{Name: "c", Placeholder: placeholder2}, Field("x-app", "app-SECRET")), Secret{},
	))
	seen := &headers{}
	w.secure("93.184.215.21:443", "api.test", seen.ServeHTTP, "h2")
	c := w.trusting("h2")
	for _, path := range []string{"a", "b"} {
		send(t, c, "GET", "https://api.test/v1/"+path, map[string]string{"Authorization": "Bearer " + placeholder, "X-App": placeholder2})
	}
	for i, h := range seen.all {
		if h.Get("Authorization") != fmt.Sprintf("Bearer token-of-%c-SECRET", 'a'+i) || h.Get("X-App") != "app-SECRET" {
			t.Errorf("%v", h)
		}
	}
	put := ""
	for _, e := range w.all() {
		if e.Kind == Request {
			put += e.Secret + "; "
		}
	}
	if put != "a, c; b, c; " {
		t.Error(put)
	}
}

// A secret that a server repeats in fields and trailers does not reach the sandbox.
func TestSecretsAreRedacted(t *testing.T) {
	for version, protocols := range protocols {
		t.Run(version, func(t *testing.T) {
			w := newInspected(t, secrets(bind(t, Binding{}, Bearer(token)), bind(t, Binding{Name: "b", Placeholder: placeholder2, Paths: []string{"/v1/b"}}, Basic("", password))))
			w.secure("93.184.215.21:443", "api.test", func(rw http.ResponseWriter, r *http.Request) {
				rw.Header().Set("X-Echo", r.Header.Get("Authorization"))
				rw.Header().Set("Location", "https://x:"+token+"@api.test/")
				rw.Header().Set("Trailer", "X-End")
				_, _ = io.WriteString(rw, "body")
				rw.(http.Flusher).Flush()
				rw.Header().Set("X-End", token)
			}, protocols...)
			c := w.trusting(protocols...)
			for _, authorization := range []string{"Bearer " + placeholder, basic("any-user", placeholder2), basic("any-user1", placeholder2), basic("any-user12", placeholder2)} {
				q, err := http.NewRequestWithContext(t.Context(), "GET", "https://api.test/v1/b", http.NoBody)
				if err != nil {
					t.Fatal(err)
				}
				q.Header.Set("Authorization", authorization)
				p, err := c.Transport.RoundTrip(q)
				if err != nil {
					t.Fatal(err)
				}
				b, err := io.ReadAll(p.Body)
				_ = p.Body.Close()
				if err != nil || string(b) != "body" || p.Trailer.Get("X-End") != "[secret key]" || p.Header.Get("Location") != "https://x:[secret key]@api.test/" {
					t.Errorf("%q, %v, %v, %v", b, err, p.Header, p.Trailer)
				}
				if echo := p.Header.Get("X-Echo"); !strings.Contains(echo, "[secret ") || strings.Contains(echo, base64.StdEncoding.EncodeToString([]byte(password))[:12]) {
					t.Errorf("%s", echo)
				}
			}
		})
	}
	// A secret that a server quotes in a failure does not reach it either.
	w := newInspected(t, secrets(bind(t, Binding{}, Bearer(token))))
	w.raw("93.184.215.14:80", answers("HTTP/1.1 200 OK\r\nContent-Length: "+token+"\r\n\r\n"))
	if p, body := send(t, w.client(), "GET", "http://web.test/", nil); p.StatusCode != 502 || strings.Contains(body, token) || !strings.Contains(body, "[secret key]") {
		t.Errorf("%d %s", p.StatusCode, body)
	}
	for _, e := range w.all() {
		if strings.Contains(fmt.Sprintf("%+v", e), token) {
			t.Errorf("%+v", e)
		}
	}
}

// Printing, marshalling and reflection show no value.
func TestSecretsAreNotPrinted(t *testing.T) {
	opts := Options{Secrets: []Secret{bind(t, Binding{}, Bearer(token)), bind(t, Binding{}, Basic("me", password)), bind(t, Binding{}, Field("x-key", token)), bind(t, Binding{}, AWS("AKID", token, password))}}
	n := New(Options{Secrets: opts.Secrets, Record: func([]Event) {}})
	defer n.Close()
	for _, v := range []any{opts, &opts, opts.Secrets, opts.Secrets[0], &opts.Secrets[0], Bearer(token), n.opts, *opts.Secrets[1].b} {
		for _, format := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
			if s := fmt.Sprintf(format, v); strings.Contains(s, "SECRET") || strings.Contains(s, fmt.Sprintf("%x", token)) {
				t.Errorf(format, v)
			}
		}
	}
	if b, err := json.Marshal(opts.Secrets); err != nil || strings.Contains(string(b), "SECRET") {
		t.Errorf("%s, %v", b, err)
	}
	if s := fmt.Sprintf("%v %s %#v", opts.Secrets[0], opts.Secrets[0], opts.Secrets[0]); s != strings.Repeat(` secret "key" for api.test`, 3)[1:] {
		t.Error(s)
	}
	walked := 0
	var walk func(v reflect.Value)
	walk = func(v reflect.Value) {
		walked++
		switch v.Kind() { //nolint:exhaustive // the kinds that hold others, or text
		case reflect.String:
			if strings.Contains(v.String(), "SECRET") {
				t.Errorf("%s", v)
			}
		case reflect.Pointer, reflect.Interface:
			if !v.IsNil() && v.Type() != reflect.TypeFor[*http.Server]() {
				walk(v.Elem())
			}
		case reflect.Struct:
			for _, field := range v.Fields() {
				walk(field)
			}
		case reflect.Slice, reflect.Array:
			for i := range v.Len() {
				walk(v.Index(i))
			}
		default: // holds no text
		}
	}
	walk(reflect.ValueOf(opts.Secrets))
	if walked < 50 {
		t.Errorf("%d values were looked at", walked)
	}
}

func TestNewSecretRefuses(t *testing.T) {
	good := Binding{Name: "key", Host: "api.test", Placeholder: placeholder}
	change := func(f func(*Binding)) Binding {
		b := good
		f(&b)
		return b
	}
	for name, tc := range map[string]struct {
		b    Binding
		c    Credential
		want string
	}{
		"no name":                          {change(func(b *Binding) { b.Name = "" }), Bearer(token), "name"},
		"a name with a line end":           {change(func(b *Binding) { b.Name = "a\nb" }), Bearer(token), "name"},
		"a suffix":                         {change(func(b *Binding) { b.Host = "*.test" }), Bearer(token), "name"},
		"an address":                       {change(func(b *Binding) { b.Host = "10.0.0.1" }), Bearer(token), "name"},
		"no host":                          {change(func(b *Binding) { b.Host = "" }), Bearer(token), "name"},
		"a short placeholder":              {change(func(b *Binding) { b.Placeholder = "short" }), Bearer(token), "placeholder"},
		"a placeholder with a space":       {change(func(b *Binding) { b.Placeholder += " x" }), Bearer(token), "placeholder"},
		"no placeholder":                   {change(func(b *Binding) { b.Placeholder = "" }), Bearer(token), "placeholder"},
		"a placeholder of the secret":      {good, Bearer("x" + placeholder + "SECRET"), "part of the secret"},
		"a method in lower case":           {change(func(b *Binding) { b.Methods = []string{"get"} }), Bearer(token), "methods"},
		"a path with dots":                 {change(func(b *Binding) { b.Paths = []string{"/a/../b"} }), Bearer(token), "paths"},
		"a short secret":                   {good, Bearer("SECRET1"), "7 bytes"},
		"a secret with a line end":         {good, Bearer("SECRET-SECRET\r\nX: y"), "visible ASCII"},
		"a secret with a space":            {good, Field("x-key", "SECRET SECRET"), "visible ASCII"},
		"a password with NUL":              {good, Basic("me", "SECRET\x00SECRET"), "visible ASCII"},
		"a user with a colon":              {good, Basic("m:e", password), "user"},
		"the field host":                   {good, Field("Host", token), "can hold no secret"},
		"the field content-length":         {good, Field("content-length", token), "can hold no secret"},
		"a field with a line end":          {good, Field("x\r\n", token), "can hold no secret"},
		"a field with an underscore":       {good, Field("transfer_encoding", token), "can hold no secret"},
		"no credential":                    {good, Credential{}, "no credential"},
		"a signature that is always there": {change(func(b *Binding) { b.Always = true }), AWS("AKID", token, ""), "always"},
		"no access key":                    {good, AWS("", token, ""), "access key"},
	} {
		_, err := NewSecret(tc.b, tc.c)
		if err == nil || !strings.Contains(err.Error(), tc.want) || strings.Contains(err.Error(), "SECRET") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := NewSecret(Binding{Name: "key", Host: "api.test", Always: true}, Bearer(token)); err != nil {
		t.Error(err)
	}
}

// The examples of AWS's documents, with the placeholder in the place of the key.
func TestSigV4(t *testing.T) {
	for name, tc := range map[string]struct {
		method, host, target, key string
		fields                    []sniff.Field
		scope, signed             string
		want                      string
	}{
		"IAM, a query": {
			"GET", "iam.amazonaws.com", "/?Action=ListUsers&Version=2010-05-08", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY",
			[]sniff.Field{{Name: "content-type", Value: "application/x-www-form-urlencoded; charset=utf-8"}, {Name: "x-amz-date", Value: "20150830T123600Z"}},
			"20150830/us-east-1/iam", "content-type;host;x-amz-date", "5d672d79c15b13162d9279b0855cfba6789a8edb4c82c400e06b5924a6f2b5d7",
		},
		"S3, an object": {
			"GET", "examplebucket.s3.amazonaws.com", "/test.txt", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
			[]sniff.Field{{Name: "range", Value: "bytes=0-9"}, {Name: "x-amz-content-sha256", Value: emptyHash}, {Name: "x-amz-date", Value: "20130524T000000Z"}},
			"20130524/us-east-1/s3", "host;range;x-amz-content-sha256;x-amz-date", "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
		},
		"S3, an upload with an encoded path": {
			"PUT", "examplebucket.s3.amazonaws.com", "/test%24file.text", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
			[]sniff.Field{
				{Name: "date", Value: "Fri, 24 May 2013 00:00:00 GMT"},
				{Name: "x-amz-content-sha256", Value: "44ce7dd67c959e0d3524ffac1771dfbba87d2b6b4b4e99e42034a8b803f8b072"},
				{Name: "x-amz-date", Value: "20130524T000000Z"},
				{Name: "x-amz-storage-class", Value: "REDUCED_REDUNDANCY"},
			},
			"20130524/us-east-1/s3", "date;host;x-amz-content-sha256;x-amz-date;x-amz-storage-class", "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
		},
		"S3, a parameter without a value": {
			"GET", "examplebucket.s3.amazonaws.com", "/?lifecycle", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
			[]sniff.Field{{Name: "x-amz-content-sha256", Value: emptyHash}, {Name: "x-amz-date", Value: "20130524T000000Z"}},
			"20130524/us-east-1/s3", "host;x-amz-content-sha256;x-amz-date", "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543",
		},
	} {
		q, err := sniff.HTTP2Request(tc.method, "https", tc.host, tc.target, append(tc.fields, sniff.Field{
			Name: "authorization", Value: sigv4Algorithm + " Credential=" + placeholder + "/" + tc.scope + "/aws4_request, SignedHeaders=" + tc.signed + ", Signature=00",
		}), 0)
		if err != nil {
			t.Fatal(err)
		}
		fields, err := signV4(q, placeholder, "AKIDEXAMPLE", tc.key, "")
		want := sigv4Algorithm + " Credential=AKIDEXAMPLE/" + tc.scope + "/aws4_request, SignedHeaders=" + tc.signed + ", Signature=" + tc.want
		if err != nil || len(fields) != 1 || fields[0].Value != want {
			t.Errorf("%s: %v, %v", name, fields, err)
		}
	}
}

// A request that cannot be signed again is refused. One that is signed with another key passes.
func TestSigV4Refuses(t *testing.T) {
	const scope = "/20261123/eu-west-1/s3/aws4_request"
	field := func(id, signed string) string {
		return sigv4Algorithm + " Credential=" + id + scope + ", SignedHeaders=" + signed + ", Signature=00"
	}
	ok := map[string]string{"Authorization": field(placeholder, "host;x-amz-content-sha256;x-amz-date"), "X-Amz-Date": "20261123T120000Z", "X-Amz-Content-Sha256": emptyHash}
	with := func(name, value string) map[string]string {
		all := maps.Clone(ok)
		if all[name] = value; value == "" {
			delete(all, name)
		}
		return all
	}
	for name, tc := range map[string]struct {
		fields map[string]string
		target string
		reason string // "" if it passes
	}{
		"signed again":              {ok, "/v1/x", ""},
		"another key":               {with("Authorization", field("AKIAOTHER", "host;x-amz-content-sha256;x-amz-date")), "/v1/x", ""},
		"no date":                   {with("X-Amz-Date", ""), "/v1/x", "x-amz-date"},
		"the date of another day":   {with("X-Amz-Date", "20261124T120000Z"), "/v1/x", "x-amz-date"},
		"a field that is not there": {with("Authorization", field(placeholder, "host;x-amz-date;x-amz-meta")), "/v1/x", "no field"},
		"host is not signed":        {with("Authorization", field(placeholder, "x-amz-date")), "/v1/x", "where the secret does not belong"},
		"a body signed in parts":    {with("X-Amz-Content-Sha256", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"), "/v1/x", "signed in parts"},
		"a session token":           {with("X-Amz-Security-Token", "x"), "/v1/x", "session token"},
		"a plus in the query":       {ok, "/v1/x?a=b+c", "two ways"},
		"a signature in the URL":    {nil, "/v1/x?X-Amz-Credential=" + placeholder + scope, "where the secret does not belong"},
	} {
		for version, protocols := range protocols {
			t.Run(version+" "+name, func(t *testing.T) {
				w := newInspected(t, secrets(bind(t, Binding{}, AWS("AKIAREAL", token, ""))))
				seen := &headers{}
				w.secure("93.184.215.21:443", "api.test", seen.ServeHTTP, protocols...)
				p, body := send(t, w.trusting(protocols...), "GET", "https://api.test"+tc.target, tc.fields)
				switch {
				case tc.reason == "" && p.StatusCode != 200, tc.reason != "" && (p.StatusCode != 403 || !strings.Contains(body, tc.reason) || len(seen.all) > 0):
					t.Errorf("%d %s", p.StatusCode, body)
				case name == "signed again":
					if got := seen.all[0].Get("Authorization"); !strings.HasPrefix(got, sigv4Algorithm+" Credential=AKIAREAL"+scope) || strings.Contains(got, "Signature=00") {
						t.Error(got)
					}
				}
			})
		}
	}
	w := newInspected(t, secrets(bind(t, Binding{}, AWS("AKIAREAL", token, "session-token-SECRET"))))
	seen := &headers{}
	w.secure("93.184.215.21:443", "api.test", seen.ServeHTTP, "http/1.1")
	if p, body := send(t, w.trusting("http/1.1"), "GET", "https://api.test/v1/x", ok); p.StatusCode != 200 {
		t.Fatal(body)
	}
	if h := seen.all[0]; h.Get("X-Amz-Security-Token") != "session-token-SECRET" || !strings.Contains(h.Get("Authorization"), "x-amz-date;x-amz-security-token,") {
		t.Errorf("%v", h)
	}
}

// FuzzPutSecrets: whatever a request looks like, either the placeholder is gone from its head or it
// is refused, and a request for another host never has the secret.
func FuzzPutSecrets(f *testing.F) {
	f.Add("GET /v1/x HTTP/1.1\r\nHost: api.test\r\nAuthorization: Bearer "+placeholder+"\r\n\r\n", false)
	f.Add("GET /v1/x HTTP/1.1\r\nHost: api.test\r\nAuthorization: "+basic("me", placeholder2)+"\r\n\r\n", false)
	f.Add("GET /v1/x HTTP/1.1\r\nHost: api.test\r\nAuthorization: "+sigv4Algorithm+" Credential=SANDBOXD-PLACEHOLDER-3/20261123/eu-west-1/s3/aws4_request, SignedHeaders=host;x-amz-date, Signature=00\r\nX-Amz-Date: 20261123T120000Z\r\n\r\n", false)
	f.Add("GET /v1/x?"+placeholder+" HTTP/1.1\r\nHost: api.test\r\nX-"+placeholder+": x\r\n\r\n", true)
	n := New(Options{Record: func([]Event) {}, Secrets: []Secret{
		bind(f, Binding{}, Bearer(token)), bind(f, Binding{Placeholder: placeholder2}, Basic("", password)),
		bind(f, Binding{Placeholder: "SANDBOXD-PLACEHOLDER-3"}, AWS("AKIAREAL", token, "")),
	}})
	f.Cleanup(n.Close)
	names := map[bool]policy.Name{}
	for other, s := range map[bool]string{false: "api.test", true: "evil.test"} {
		name, err := policy.ParseName(s)
		if err != nil {
			f.Fatal(err)
		}
		names[other] = name
	}
	f.Fuzz(func(t *testing.T, head string, other bool) {
		q, err := sniff.ReadRequest(bufio.NewReader(strings.NewReader(head)))
		if err != nil || strings.Contains(head, "SECRET") {
			return
		}
		of := &peer{name: names[other]}
		put, err := n.putSecrets(netip.MustParseAddrPort("93.184.215.21:443"), of, q)
		raw := string(q.Raw)
		switch {
		case err != nil:
			if strings.Contains(err.Error(), "SECRET") {
				t.Errorf("%v", err)
			}
		case strings.Contains(raw, "SANDBOXD-PLACEHOLDER-"+"1") || strings.Contains(raw, "SANDBOXD-PLACEHOLDER-"+"2"):
			t.Errorf("passed on: %q", raw)
		case other && (put != "" || raw != head[:len(raw)]):
			t.Errorf("changed for another host: %q", raw)
		}
		if err == nil {
			if _, err := sniff.ReadRequest(bufio.NewReader(strings.NewReader(raw))); err != nil {
				t.Errorf("%q: %v", raw, err)
			}
		}
	})
}
