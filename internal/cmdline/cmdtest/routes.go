package cmdtest

import (
	"archive/tar"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// build plays a build with one step, and logs the request.
func (f *Daemon) build(w http.ResponseWriter, r *http.Request) {
	var names []string
	tr := tar.NewReader(r.Body)
	for {
		hdr, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			refuse(w, api.CodeInvalid, "", "context: %v", err)
			return
		}
		names = append(names, hdr.Name)
	}
	slices.Sort(names)
	f.Log = append(f.Log, "build "+r.URL.Query().Get("options"), "files "+strings.Join(names, " "))
	w.Header().Set("Content-Type", api.TypeNDJSON)
	enc := json.NewEncoder(w)
	step := api.BuildEvent{Step: 1, Steps: 2, Line: 2, Text: "RUN make \x1b[31m", Status: api.BuildStarted}
	events := []api.BuildEvent{
		step,
		{Step: 1, Steps: 2, Stream: "stdout", Output: "half a "},
		{Step: 1, Steps: 2, Stream: "stdout", Output: "line\n\x1b]0;title\atab\there\r\nno end"},
		{Step: 1, Steps: 2, Status: api.BuildDone, Layer: "sha256:0123", WallMS: 1500},
		{Step: 2, Steps: 2, Text: "COPY a b", Status: api.BuildStarted},
		{Step: 2, Steps: 2, Status: api.BuildCached, Layer: "sha256:4567"},
	}
	if strings.Contains(r.URL.RawQuery, "failing") {
		events = append(events[:4:4], api.BuildEvent{Error: &api.Problem{Code: api.CodeBuild, Detail: "Dockerfile:2: RUN make: exit code 2", Hint: "see above"}})
	} else {
		events = append(events, api.BuildEvent{Image: &api.Image{Reference: "app:1", Digest: "sha256:89ab"}})
	}
	for _, e := range events {
		_ = enc.Encode(e)
	}
}

// execRoutes serves one detached exec, "x1", that has written output and ended.
func (f *Daemon) execRoutes(mux *http.ServeMux) {
	x := api.Exec{ID: "x1", Sandbox: "sb1", Argv: []string{"sh", "-c", "it's\x1b[2J"}, PID: 7, State: api.ExecExited, Detached: true, Exit: &api.Exit{Code: 9}}
	find := func(h func(http.ResponseWriter, *http.Request)) http.HandlerFunc {
		return f.with(func(w http.ResponseWriter, r *http.Request, _ api.Sandbox) {
			if id := r.PathValue("exec"); id != "" && id != x.ID && id != api.MainExec {
				refuse(w, api.CodeNotFound, "", "no such exec: %q", id)
				return
			}
			h(w, r)
		})
	}
	mux.HandleFunc("GET /v1/sandboxes/{id}/execs", find(func(w http.ResponseWriter, _ *http.Request) {
		answerJSON(w, 200, api.ExecList{Execs: []api.Exec{x}})
	}))
	mux.HandleFunc("GET /v1/sandboxes/{id}/execs/{exec}", find(func(w http.ResponseWriter, _ *http.Request) { answerJSON(w, 200, x) }))
	mux.HandleFunc("POST /v1/sandboxes/{id}/execs/{exec}/signal", find(func(w http.ResponseWriter, r *http.Request) {
		var req api.ExecSignal
		_ = json.NewDecoder(r.Body).Decode(&req)
		f.Updates = append(f.Updates, req.Signal+map[bool]string{true: " all"}[req.All])
		select {
		case f.Signals <- req.Signal:
		default: // no exec waits
		}
		w.WriteHeader(http.StatusNoContent)
	}))
	mux.HandleFunc("GET /v1/sandboxes/{id}/execs/{exec}/attach", find(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", api.TypeNDJSON)
		e := json.NewEncoder(w)
		_ = e.Encode(api.ExecEvent{Exec: x.ID, PID: 7, Offset: 5, Dropped: 5})
		_ = e.Encode(api.ExecEvent{Stream: "stdout", Text: "out\n", Offset: 5})
		_ = e.Encode(api.ExecEvent{Exit: x.Exit, Usage: &api.Usage{}})
	}))
	mux.HandleFunc("GET /v1/sandboxes/{id}/logs", find(func(w http.ResponseWriter, r *http.Request) {
		f.Updates = append(f.Updates, r.URL.RawQuery)
		w.Header().Set("Content-Type", api.TypeNDJSON)
		e := json.NewEncoder(w)
		_ = e.Encode(api.LogEntry{Time: time.Unix(1, 0).UTC(), Stream: "stdout", Text: "one\ntw", Dropped: 7})
		_ = e.Encode(api.LogEntry{Time: time.Unix(2, 0).UTC(), Stream: "stderr", Data: []byte("\xff\n")})
		_ = e.Encode(api.LogEntry{Time: time.Unix(3, 0).UTC(), Stream: "stdout", Text: "o\nthree\n"})
		if r.URL.Query().Get("follow") != "" {
			_ = e.Encode(api.LogEntry{Error: &api.Problem{Code: api.CodeUnavailable, Detail: "the daemon is stopping"}})
		}
	}))
	mux.HandleFunc("GET /v1/sandboxes/{id}/wait", f.with(func(w http.ResponseWriter, _ *http.Request, s api.Sandbox) {
		if s.State = api.StateStopped; s.Name != "idle" {
			s.Exit = &api.SandboxExit{Exit: api.Exit{Code: 137, Signal: "SIGKILL"}}
		}
		answerJSON(w, 200, s)
	}))
	mux.HandleFunc("GET /v1/sandboxes/{id}/processes", find(func(w http.ResponseWriter, _ *http.Request) {
		answerJSON(w, 200, api.ProcessList{Processes: []api.Process{
			{PID: 7, PPID: 1, State: "S", Name: "sh", Argv: []string{"sh", "-c", "a b"}, CPUMS: 1234, RSS: 2 << 20, Exec: "x1"},
			{PID: 8, PPID: 7, State: "Z", Name: "gone\x1b"},
		}})
	}))
}

// imageRoutes serves images. Names that begin with "used" are in use, and "damaged" is damaged.
func (f *Daemon) imageRoutes(mux *http.ServeMux) {
	mux.HandleFunc("DELETE /v1/images", func(w http.ResponseWriter, r *http.Request) {
		ref := r.URL.Query().Get("reference")
		if strings.HasPrefix(ref, "used") && r.URL.Query().Get("force") != "true" {
			refuse(w, api.CodeConflict, "sandboxd ps", "image %s is held by work", ref)
			return
		}
		answerJSON(w, 200, api.ImagesRemoved{Removed: []string{ref}, Bytes: 10})
	})
	mux.HandleFunc("POST /v1/images/prune", func(w http.ResponseWriter, r *http.Request) {
		var req api.PruneImages
		_ = json.NewDecoder(r.Body).Decode(&req)
		out := api.ImagesRemoved{Removed: []string{"old:1"}, Bytes: 1500000}
		if req.All {
			out.Removed = append(out.Removed, "unused:1")
		}
		answerJSON(w, 200, out)
	})
	mux.HandleFunc("POST /v1/sandboxes/prune", func(w http.ResponseWriter, r *http.Request) {
		var req api.PruneSandboxes
		_ = json.NewDecoder(r.Body).Decode(&req)
		answerJSON(w, 200, api.SandboxesRemoved{Removed: []api.SandboxRef{{ID: "x", Name: fmt.Sprint(*req.OlderThan, req.Labels)}}, Recent: 2})
	})
	mux.HandleFunc("POST /v1/snapshots/prune", func(w http.ResponseWriter, r *http.Request) {
		var req api.PruneSnapshots
		_ = json.NewDecoder(r.Body).Decode(&req)
		answerJSON(w, 200, api.SnapshotsRemoved{Removed: []string{fmt.Sprint(req.OlderThan != nil, req.Labels)}, Bytes: 1500000})
	})
	mux.HandleFunc("POST /v1/images/tag", func(w http.ResponseWriter, r *http.Request) {
		var req api.TagImage
		_ = json.NewDecoder(r.Body).Decode(&req)
		answerJSON(w, 200, api.Image{Reference: req.Target, Digest: "sha256:0123"})
	})
	mux.HandleFunc("GET /v1/images/inspect", func(w http.ResponseWriter, r *http.Request) {
		answerJSON(w, 200, api.ImageDetail{
			Image:   api.Image{Reference: r.URL.Query().Get("reference")},
			History: []api.ImageHistory{{CreatedBy: "first\x1b[31m\n step", Size: 2000000}, {Created: time.Now(), CreatedBy: "second step", EmptyLayer: true}},
		})
	})
	mux.HandleFunc("GET /v1/images/verify", func(w http.ResponseWriter, _ *http.Request) {
		out := api.ImagesVerified{Blobs: 3, Bytes: 1000, Layers: 1, Entries: 7, Problems: []api.ImageProblem{}}
		for _, name := range f.Images {
			if name == "damaged" {
				out.Problems = append(out.Problems, api.ImageProblem{Images: []string{name}, Digest: "sha256:0123", Detail: "its digest is another"})
			}
		}
		answerJSON(w, 200, out)
	})
	mux.HandleFunc("POST /v1/images/import", func(w http.ResponseWriter, r *http.Request) {
		data, _ := io.ReadAll(r.Body)
		q := r.URL.Query()
		f.Log = append(f.Log, "import "+q.Get("config")+" "+string(data[:min(len(data), 5)]))
		if q.Get("progress") != "true" {
			f.Log = append(f.Log, "without progress")
		}
		w.Header().Set("Content-Type", api.TypeNDJSON)
		for _, e := range []api.PullEvent{{Layer: "sha256:4567", Status: "applying"}, {Status: "done", Images: []api.Image{{Reference: q.Get("reference"), Digest: "sha256:0123"}}}} {
			_ = json.NewEncoder(w).Encode(e)
		}
	})
	mux.HandleFunc("POST /v1/builds", f.build)
	mux.HandleFunc("GET /v1/images/export", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", api.TypeTar)
		if r.URL.Query().Get("reference") == "damaged" {
			w.Header().Set("Content-Length", "100")
		}
		_, _ = io.WriteString(w, "archive in "+r.URL.Query().Get("format"))
	})
}
