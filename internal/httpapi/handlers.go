package httpapi

import (
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service/class"
)

func (s *Server) getHealth(w http.ResponseWriter, _ *http.Request) error {
	return writeJSON(w, http.StatusOK, struct {
		Status string `json:"status"`
	}{"ok"})
}

func (s *Server) getSystem(w http.ResponseWriter, r *http.Request) error {
	info, err := s.as(r).System(r.Context())
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, info)
}

func (s *Server) getChecks(w http.ResponseWriter, r *http.Request) error {
	checks, err := s.as(r).Checks(r.Context())
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, api.CheckList{Checks: checks})
}

func (s *Server) getProfiles(w http.ResponseWriter, r *http.Request) error {
	list := api.ProfileList{Profiles: []api.Profile{}}
	for _, p := range s.as(r).Profiles() {
		p.Seccomp = nil
		list.Profiles = append(list.Profiles, p)
	}
	return writeJSON(w, http.StatusOK, list)
}

func (s *Server) getProfile(w http.ResponseWriter, r *http.Request) error {
	p, err := s.as(r).GetProfile(r.PathValue("profile"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, p)
}

func (s *Server) postShutdown(w http.ResponseWriter, r *http.Request) error {
	var req api.Shutdown
	// The one body that may be left out: curl -X POST is what people type.
	if r.ContentLength != 0 {
		if err := readJSON(w, r, maxBody, &req); err != nil {
			return err
		}
	}
	if req.KeepSandboxes && req.StopSandboxes {
		return class.Invalidf("keep_sandboxes leaves sandboxes running and stop_sandboxes stops them: give one")
	}
	w.Header().Set("Connection", "close")
	w.WriteHeader(http.StatusAccepted)
	_ = http.NewResponseController(w).Flush() // answered before the server begins to close connections
	s.shutdown(req)
	return nil
}

func (s *Server) postExec(w http.ResponseWriter, r *http.Request) error {
	var req api.ExecRequest
	if err := readJSON(w, r, maxExecBody, &req); err != nil {
		return err
	}
	if req.Detach {
		x, err := s.as(r).StartDetached(r.Context(), r.PathValue("id"), req)
		if err != nil {
			return err
		}
		w.Header().Set("Location", "/v1/sandboxes/"+x.Sandbox+"/execs/"+x.ID)
		return writeJSON(w, http.StatusCreated, execOf(x))
	}
	switch {
	case wants(r, api.TypeStream):
		return s.answerFrames(w, r, req)
	case wants(r, api.TypeNDJSON):
		return answerEvents(w, execError, func(emit func(api.ExecEvent) error) error { //nolint:contextcheck // it is the request's
			return s.as(r).ExecStream(r.Context(), r.PathValue("id"), req, emit)
		})
	}
	res, err := s.as(r).ExecBuffered(r.Context(), r.PathValue("id"), req)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, res)
}

func (s *Server) postRun(w http.ResponseWriter, r *http.Request) error {
	var req api.RunRequest
	if err := readJSON(w, r, maxExecBody, &req); err != nil {
		return err
	}
	if wants(r, api.TypeNDJSON) {
		return answerEvents(w, execError, func(emit func(api.ExecEvent) error) error { //nolint:contextcheck // it is the request's
			_, err := s.as(r).Run(r.Context(), req, emit)
			return err
		})
	}
	res, err := s.as(r).Run(r.Context(), req, nil)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, res)
}

// query reads the parameters of a request; others than known are refused, like unknown fields of a
// body.
func query(r *http.Request, known ...string) (url.Values, error) {
	q, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return nil, class.Invalidf("query: %w", err)
	}
	for _, k := range slices.Sorted(maps.Keys(q)) {
		if !slices.Contains(known, k) {
			return nil, class.Invalidf("query: unknown parameter %q", class.Clip(k))
		}
		if len(q[k]) > 1 && k != "label" && k != "filter" && k != "sandbox" {
			return nil, class.Invalidf("query: parameter %q is given twice", k)
		}
	}
	return q, nil
}

// requestBody is a body of any length whose parts must not be long in coming.
func requestBody(w http.ResponseWriter, r *http.Request) io.Reader {
	return &patientBody{r.Body, http.NewResponseController(w)}
}

// wants reports whether a request accepts a media type by its name.
func wants(r *http.Request, mediaType string) bool {
	for _, accept := range r.Header.Values("Accept") {
		for part := range strings.SplitSeq(accept, ",") {
			t, _, _ := strings.Cut(part, ";")
			if strings.TrimSpace(t) == mediaType {
				return true
			}
		}
	}
	return false
}

// answerEvents answers with a line for each event that work emits. An error after the first event
// is the last event, which failed makes.
func answerEvents[T any](w http.ResponseWriter, failed func(*api.Problem) T, work func(emit func(T) error) error) error {
	emit, began := lines[T](w), false
	err := work(func(e T) error {
		began = true
		return emit(e)
	})
	if err != nil && began {
		return emit(failed(ProblemOf(err)))
	}
	return err
}

func execError(p *api.Problem) api.ExecEvent { return api.ExecEvent{Error: p} }

// lines returns a function that writes one JSON value a line and sees to it that it leaves at once.
func lines[T any](w http.ResponseWriter) func(T) error { return linesTo[T](w, true) }

// linesTo is lines for values that may wait for each other, unless flush is set.
func linesTo[T any](w http.ResponseWriter, flush bool) func(T) error {
	return linesOf[T](&stream{w: w, rc: http.NewResponseController(w), contentType: api.TypeNDJSON, flush: flush})
}

func linesOf[T any](out *stream) func(T) error {
	enc := encoder(out)
	return func(v T) error { return enc.Encode(v) }
}

// stream writes an answer of unknown length. The first byte sends the header, so that an error
// before it is a problem.
type stream struct {
	w           http.ResponseWriter
	rc          *http.ResponseController
	contentType string
	flush       bool
	began       bool
}

func (s *stream) Write(p []byte) (int, error) {
	if !s.began {
		s.began = true
		s.w.Header().Set("Content-Type", s.contentType)
		s.w.Header().Set("Cache-Control", "no-store")
	}
	if err := s.rc.SetWriteDeadline(time.Now().Add(answerTimeout)); err != nil {
		return 0, err
	}
	n, err := s.w.Write(p) //nolint:gosec // no browser shows these content types as a page
	if err == nil && s.flush {
		err = s.rc.Flush()
	}
	return n, err
}

// boolParam reads a parameter that is true or not.
func boolParam(what, s string) (bool, error) {
	switch s {
	case "", "false":
		return false, nil
	case "true":
		return true, nil
	}
	return false, class.Invalidf("%s %q: must be true or false", what, class.Clip(s))
}
