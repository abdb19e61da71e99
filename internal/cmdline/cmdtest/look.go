package cmdtest

import (
	"encoding/json"
	"net/http"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// lookRoutes serves two events, after a gap, and names.
func (f *Daemon) lookRoutes(mux *http.ServeMux) {
	mux.HandleFunc("GET /v1/events", func(w http.ResponseWriter, r *http.Request) {
		f.Updates = append(f.Updates, r.URL.RawQuery)
		w.Header().Set("Content-Type", api.TypeNDJSON)
		e := json.NewEncoder(w)
		at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.Local)
		_ = e.Encode(api.Event{Lost: 3})
		_ = e.Encode(api.Event{ID: 7, Time: at, Type: api.EventSandbox, Action: api.ActionStopped, Object: "sb1", Name: "name1", Image: "host", State: api.StateStopped, Reason: "\x1b[2J", Code: new(3)})
		_ = e.Encode(api.Event{ID: 9, Time: at, Type: api.EventSecret, Action: api.ActionSet, Object: "github"})
	})
	mux.HandleFunc("POST /v1/sandboxes/{id}/rename", f.with(func(w http.ResponseWriter, r *http.Request, s api.Sandbox) {
		var req api.RenameSandbox
		_ = json.NewDecoder(r.Body).Decode(&req)
		s.Name = req.Name
		answerJSON(w, 200, s)
	}))
}
