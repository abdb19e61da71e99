package gateway

import (
	"io"
	"net/http"
	"testing"
)

// A changed secret is in the next request, also of a kept connection. A response that was asked for
// with the secret before does not show it.
func TestSetSecrets(t *testing.T) {
	const other = "ghp_another-token-SECRET"
	for version, protocols := range protocols {
		t.Run(version, func(t *testing.T) {
			w := newInspected(t, secrets(bind(t, Binding{}, Bearer(token))))
			asked, changed := make(chan string, 1), make(chan struct{})
			w.secure("93.184.215.21:443", "api.test", func(rw http.ResponseWriter, r *http.Request) {
				asked <- r.Header.Get("Authorization")
				if r.URL.Path == "/v1/slow" {
					<-changed
				}
				rw.Header().Set("X-Echo", r.Header.Get("Authorization"))
			}, protocols...)
			c := w.trusting(protocols...)
			ask := func(path string) (echo string) {
				q, err := http.NewRequestWithContext(t.Context(), "GET", "https://api.test"+path, http.NoBody)
				if err != nil {
					t.Error(err)
					return ""
				}
				q.Header.Set("Authorization", "Bearer "+placeholder)
				p, err := c.Transport.RoundTrip(q)
				if err != nil {
					t.Error(err)
					return ""
				}
				_, _ = io.Copy(io.Discard, p.Body)
				_ = p.Body.Close()
				return p.Header.Get("X-Echo")
			}
			slow := make(chan string)
			go func() { slow <- ask("/v1/slow") }()
			if got := <-asked; got != "Bearer "+token {
				t.Errorf("before the change the server got %q", got)
			}
			w.n.SetSecrets(nil)
			w.n.SetSecrets([]Secret{bind(t, Binding{}, Bearer(other))})
			close(changed)
			if echo := <-slow; echo != "Bearer [secret key]" {
				t.Errorf("the response to the request before shows %q", echo)
			}
			echo := ask("/v1/x")
			if got := <-asked; got != "Bearer "+other || echo != "Bearer [secret key]" {
				t.Errorf("after the change the server got %q, and the client %q", got, echo)
			}
			w.n.SetSecrets(nil)
			ask("/v1/x")
			if got := <-asked; got != "Bearer "+placeholder {
				t.Errorf("without secrets the server got %q", got)
			}
		})
	}
}
