package cmdtest

import (
	"io"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// volumeRoutes serves two volumes, one of which a sandbox has, and keeps the bodies of requests
// that change something in f.Volumes. "nothing" does not exist.
func (f *Daemon) volumeRoutes(mux *http.ServeMux) {
	all := []api.Volume{
		{Name: "cache", Labels: map[string]string{"app": "shop"}, Size: 1 << 30, Inodes: 131072, CreatedAt: time.Now().Add(-time.Hour), Sandboxes: []api.SandboxRef{{ID: "sb1", Name: "one"}}},
		{Name: "data\x1b", CreatedAt: time.Now().Add(-time.Hour), Sandboxes: []api.SandboxRef{}},
	}
	note := func(r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		f.Volumes = append(f.Volumes, r.Method+" "+r.URL.String()+" "+string(body))
	}
	mux.HandleFunc("GET /v1/volumes", func(w http.ResponseWriter, _ *http.Request) { answerJSON(w, 200, api.VolumeList{Volumes: all}) })
	mux.HandleFunc("POST /v1/volumes", func(w http.ResponseWriter, r *http.Request) {
		note(r)
		answerJSON(w, 201, api.Volume{Name: "made", Sandboxes: []api.SandboxRef{}})
	})
	mux.HandleFunc("POST /v1/volumes/prune", func(w http.ResponseWriter, r *http.Request) {
		note(r)
		answerJSON(w, 200, api.VolumesRemoved{Removed: []string{"data\x1b"}, Bytes: 5_000_000})
	})
	mux.HandleFunc("POST /v1/volumes/import", func(w http.ResponseWriter, r *http.Request) {
		note(r)
		answerJSON(w, 201, api.VolumeImported{Volume: api.Volume{Name: r.URL.Query().Get("name"), Sandboxes: []api.SandboxRef{}}, Files: 2, Skipped: []string{"null: a device"}})
	})
	mux.HandleFunc("GET /v1/volumes/{volume}", func(w http.ResponseWriter, r *http.Request) {
		i := slices.IndexFunc(all, func(v api.Volume) bool { return v.Name == r.PathValue("volume") })
		if i < 0 {
			refuse(w, api.CodeNotFound, "sandboxd volume ls", "no such volume")
			return
		}
		v := all[i]
		v.Usage = &api.VolumeUsage{Bytes: 4096, Inodes: 1}
		answerJSON(w, 200, v)
	})
	mux.HandleFunc("DELETE /v1/volumes/{volume}", func(w http.ResponseWriter, r *http.Request) {
		switch r.PathValue("volume") {
		case "nothing":
			refuse(w, api.CodeNotFound, "sandboxd volume ls", "no such volume")
		case "cache":
			refuse(w, api.CodeConflict, "sandboxd rm", "sandbox one (sb1) has it")
		default:
			w.WriteHeader(http.StatusNoContent)
		}
	})
	mux.HandleFunc("GET /v1/volumes/{volume}/export", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", api.TypeTar)
		w.Header().Set("Content-Length", strconv.Itoa(len("an archive")))
		_, _ = io.WriteString(w, "an archive")
	})
}
