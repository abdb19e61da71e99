package cmdtest

import (
	"io"
	"net/http"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// namedRoutes serves three named networks, one of which is empty, and keeps the bodies of requests
// that change something in f.Networks. "nothing" does not exist.
func (f *Daemon) namedRoutes(mux *http.ServeMux) {
	db := api.NetworkMember{ID: "sb1", Name: "db", State: api.StateRunning, Address: "198.18.37.4"}
	all := []api.NamedNetwork{
		{Name: "back", Sandboxes: []api.NetworkMember{db, {ID: "sb2", Name: "app\x1b", State: api.StateStopped}}},
		{Name: "empty", Labels: map[string]string{"app": "shop"}, CreatedAt: time.Now().Add(-time.Hour), Internal: true, Sandboxes: []api.NetworkMember{}},
		{Name: "front", Sandboxes: []api.NetworkMember{db}},
	}
	note := func(r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		f.Networks = append(f.Networks, r.Method+" "+r.URL.String()+" "+string(body))
	}
	mux.HandleFunc("GET /v1/networks", func(w http.ResponseWriter, _ *http.Request) { answerJSON(w, 200, api.NetworkList{Networks: all}) })
	mux.HandleFunc("POST /v1/networks", func(w http.ResponseWriter, r *http.Request) {
		note(r)
		answerJSON(w, 201, api.NamedNetwork{Name: "made", Sandboxes: []api.NetworkMember{}})
	})
	mux.HandleFunc("POST /v1/networks/prune", func(w http.ResponseWriter, r *http.Request) {
		note(r)
		answerJSON(w, 200, api.NetworksRemoved{Removed: []string{"empty"}})
	})
	mux.HandleFunc("GET /v1/networks/{network}", func(w http.ResponseWriter, r *http.Request) {
		i := slices.IndexFunc(all, func(n api.NamedNetwork) bool { return n.Name == r.PathValue("network") })
		if i < 0 {
			refuse(w, api.CodeNotFound, "sandboxd network ls", "no such network")
			return
		}
		answerJSON(w, 200, all[i])
	})
	mux.HandleFunc("DELETE /v1/networks/{network}", func(w http.ResponseWriter, r *http.Request) {
		switch r.PathValue("network") {
		case "nothing":
			refuse(w, api.CodeNotFound, "sandboxd network ls", "no such network")
		case "back":
			refuse(w, api.CodeConflict, "sandboxd rm", "sandbox db (sb1) is in it")
		default:
			w.WriteHeader(http.StatusNoContent)
		}
	})
	for _, verb := range []string{"connect", "disconnect"} {
		mux.HandleFunc("POST /v1/networks/{network}/"+verb, func(w http.ResponseWriter, r *http.Request) {
			note(r)
			w.WriteHeader(http.StatusNoContent)
		})
	}
}
