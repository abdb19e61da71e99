package httpapi

import (
	"net/http"
	"net/http/httptest"
	"testing"
)

// Requests of web pages of other sites are refused, by whichever header tells; those of programs,
// whatever word or path they send as Host, are not.
func TestRequestsOfWebPagesAreRefused(t *testing.T) {
	for name, tc := range map[string]struct {
		host, origin, site string
		ok                 bool
	}{
		"our client":                  {host: "sandboxd", ok: true},
		"curl":                        {host: "localhost", ok: true},
		"a port that is forwarded":    {host: "127.0.0.1:8080", ok: true},
		"an address":                  {host: "[::1]:8080", ok: true},
		"an address in the network":   {host: "192.168.1.7:8080", ok: true},
		"no host":                     {host: "", ok: true},
		"a socket's path, escaped":    {host: "%2Frun%2Fuser%2F1000%2Fsandboxd%2Fapi.sock", ok: true},
		"a name below localhost":      {host: "box.localhost:80", ok: true},
		"a library that sends Origin": {host: "localhost:8080", origin: "http://localhost:8080", ok: true},
		"typed into a browser":        {host: "localhost:8080", site: "none", ok: true},
		"a page of the same origin":   {host: "localhost:8080", origin: "http://LOCALHOST:8080", site: "same-origin", ok: true},
		"another site":                {host: "localhost:8080", origin: "https://evil.example"},
		"another port":                {host: "localhost:8080", origin: "http://localhost:3000"},
		"another site's frame":        {host: "localhost:8080", origin: "null"},
		"an image of another site":    {host: "localhost:8080", site: "cross-site"},
		"a page of the same site":     {host: "localhost:8080", site: "same-site"},
		"rebinding":                   {host: "evil.example:8080", origin: "http://evil.example:8080", site: "same-origin"},
		"rebinding, with a dot":       {host: "EVIL.example.", site: "same-origin"},
		"rebinding, without headers":  {host: "a.evil.example"},
		"nearly localhost":            {host: "evil-localhost.example"},
		"half an origin":              {host: "localhost", origin: "localhost"},
	} {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/v1/system", nil)
		r.Host = tc.host
		if tc.origin != "" {
			r.Header.Set("Origin", tc.origin)
		}
		if tc.site != "" {
			r.Header.Set("Sec-Fetch-Site", tc.site)
		}
		err := checkOrigin(r)
		if (err == nil) != tc.ok {
			t.Errorf("%s: %v", name, err)
		}
		if err != nil && ProblemOf(err).Status != http.StatusForbidden {
			t.Errorf("%s: %+v", name, ProblemOf(err))
		}
	}
}
