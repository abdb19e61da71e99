package cmdtest

import (
	"encoding/json"
	"net/http"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// networkRoutes serves the record of every sandbox's network, f.Flows, and secrets. "nothing" is
// none.
func (f *Daemon) networkRoutes(mux *http.ServeMux) {
	mux.HandleFunc("GET /v1/sandboxes/{id}/flows", f.with(func(w http.ResponseWriter, _ *http.Request, _ api.Sandbox) {
		w.Header().Set("Content-Type", api.TypeNDJSON)
		e := json.NewEncoder(w)
		for _, flow := range f.Flows {
			_ = e.Encode(flow)
		}
	}))
	f.namedRoutes(mux)
	mux.HandleFunc("GET /v1/secrets", func(w http.ResponseWriter, _ *http.Request) {
		answerJSON(w, 200, api.SecretList{Secrets: []api.Secret{
			{Name: "github", Kind: api.SecretBearer, Host: "api.github.com", Port: 443, Paths: []string{"/repos/*"}, Variable: "GITHUB_TOKEN", ChangedAt: time.Now().Add(-time.Hour)},
			{Name: "model", Kind: api.SecretHeader, Header: "x-api-key", Host: "h\x1b", Port: 8443, Methods: []string{"GET", "POST"}, File: true},
		}})
	})
	mux.HandleFunc("PUT /v1/secrets/{secret}", func(w http.ResponseWriter, r *http.Request) {
		var req api.SetSecret
		_ = json.NewDecoder(r.Body).Decode(&req)
		f.Secrets = append(f.Secrets, req)
		answerJSON(w, 200, api.Secret{Name: r.PathValue("secret"), Kind: req.Kind, Host: req.Host})
	})
	mux.HandleFunc("DELETE /v1/secrets/{secret}", func(w http.ResponseWriter, r *http.Request) {
		if r.PathValue("secret") == "nothing" {
			refuse(w, api.CodeNotFound, "sandboxd secret ls", "no such secret")
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})
}
