package daemon

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/runtime"
)

func (d *Daemon) getHealth(w http.ResponseWriter, _ *http.Request) error {
	return writeJSON(w, http.StatusOK, struct {
		Status string `json:"status"`
	}{"ok"})
}

func (d *Daemon) getSystem(w http.ResponseWriter, r *http.Request) error {
	info, err := d.service.System(r.Context())
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, info)
}

func (d *Daemon) getChecks(w http.ResponseWriter, r *http.Request) error {
	return writeJSON(w, http.StatusOK, api.CheckList{Checks: d.service.Checks(r.Context())})
}

func (d *Daemon) getProfiles(w http.ResponseWriter, _ *http.Request) error {
	list := api.ProfileList{Profiles: []api.Profile{}}
	for _, p := range d.service.Profiles() {
		p.Seccomp = nil
		list.Profiles = append(list.Profiles, p)
	}
	return writeJSON(w, http.StatusOK, list)
}

func (d *Daemon) getProfile(w http.ResponseWriter, r *http.Request) error {
	p, err := d.service.GetProfile(r.PathValue("profile"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, p)
}

func (d *Daemon) postShutdown(w http.ResponseWriter, r *http.Request) error {
	var req api.Shutdown
	// The one body that may be left out: curl -X POST is what people type.
	if r.ContentLength != 0 {
		if err := readJSON(w, r, maxBody, &req); err != nil {
			return err
		}
	}
	w.Header().Set("Connection", "close")
	w.WriteHeader(http.StatusAccepted)
	_ = http.NewResponseController(w).Flush() // answered before the server begins to close connections
	d.Shutdown(req)
	return nil
}

func (d *Daemon) postSandbox(w http.ResponseWriter, r *http.Request) error {
	var req api.CreateSandbox
	if err := readJSON(w, r, maxBody, &req); err != nil {
		return err
	}
	sb, err := d.service.CreateSandbox(r.Context(), req)
	if err != nil {
		return err
	}
	w.Header().Set("Location", "/v1/sandboxes/"+sb.ID)
	return writeJSON(w, http.StatusCreated, sb)
}

func (d *Daemon) getSandboxes(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "label", "state", "limit")
	if err != nil {
		return err
	}
	filter := runtime.Filter{State: api.SandboxState(q.Get("state")), Labels: make(map[string]string)}
	for _, l := range q["label"] {
		k, v, ok := strings.Cut(l, "=")
		if !ok || k == "" {
			return invalidf("label %q: must be key=value", clip(l))
		}
		filter.Labels[k] = v
	}
	if s := q.Get("limit"); s != "" {
		if filter.Limit, err = strconv.Atoi(s); err != nil || filter.Limit < 1 {
			return invalidf("limit %q: must be a positive number", clip(s))
		}
	}
	list, err := d.service.ListSandboxes(filter)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, list)
}

func (d *Daemon) getSandbox(w http.ResponseWriter, r *http.Request) error {
	sb, err := d.service.GetSandbox(r.PathValue("id"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, sb)
}

func (d *Daemon) patchSandbox(w http.ResponseWriter, r *http.Request) error {
	var req api.UpdateSandbox
	if err := readJSON(w, r, maxBody, &req); err != nil {
		return err
	}
	sb, err := d.service.UpdateSandbox(r.Context(), r.PathValue("id"), req)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, sb)
}

func (d *Daemon) getStats(w http.ResponseWriter, r *http.Request) error {
	st, err := d.service.Stats(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, st)
}

func (d *Daemon) deleteSandbox(w http.ResponseWriter, r *http.Request) error {
	if err := d.service.DeleteSandbox(r.Context(), r.PathValue("id")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (d *Daemon) postExec(w http.ResponseWriter, r *http.Request) error {
	var req api.ExecRequest
	if err := readJSON(w, r, maxExecBody, &req); err != nil {
		return err
	}
	if req.Detach {
		x, err := d.service.StartDetached(r.Context(), r.PathValue("id"), req)
		if err != nil {
			return err
		}
		w.Header().Set("Location", "/v1/sandboxes/"+x.Sandbox+"/execs/"+x.ID)
		return writeJSON(w, http.StatusCreated, x)
	}
	if wantsStream(r) {
		return d.service.ExecStream(r.Context(), r.PathValue("id"), req, lines[api.ExecEvent](w))
	}
	res, err := d.service.ExecBuffered(r.Context(), r.PathValue("id"), req)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, res)
}

func (d *Daemon) postRun(w http.ResponseWriter, r *http.Request) error {
	var req api.RunRequest
	if err := readJSON(w, r, maxExecBody, &req); err != nil {
		return err
	}
	if wantsStream(r) {
		_, err := d.service.Run(r.Context(), req, lines[api.ExecEvent](w))
		return err
	}
	res, err := d.service.Run(r.Context(), req, nil)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, res)
}

// getFile answers with the file's bytes, which the kernel moves from the sandbox's file to the client's socket.
func (d *Daemon) getFile(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "path")
	if err != nil {
		return err
	}
	f, err := d.service.ReadFile(r.Context(), r.PathValue("id"), q.Get("path"))
	if err != nil {
		return err
	}
	defer f.Close() // only read
	st, err := f.Stat()
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", api.TypeBytes)
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-File-Mode", strconv.FormatUint(uint64(st.Mode().Perm()), 8))
	a, ok := w.(*answer)
	if !ok {
		return errors.New("answer with a file: not an answer of ours")
	}
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(answerTimeout)) // of the header; what follows sets its own
	out := &fileAnswer{answer: a}
	// It knows ranges, HEAD and the length.
	http.ServeContent(out, r, "", st.ModTime(), f)
	if out.unsatisfiable {
		return classify(errRange, fmt.Errorf("range %q: %q has %d bytes", clip(r.Header.Get("Range")), q.Get("path"), st.Size()))
	}
	return nil
}

// fileAnswer leaves it to us to say in our way that there is no such range.
type fileAnswer struct {
	*answer

	unsatisfiable bool
}

func (a *fileAnswer) WriteHeader(status int) {
	if status == http.StatusRequestedRangeNotSatisfiable {
		a.unsatisfiable = true
		return
	}
	a.answer.WriteHeader(status)
}

func (a *fileAnswer) Write(p []byte) (int, error) {
	if a.unsatisfiable {
		return len(p), nil
	}
	return a.answer.Write(p)
}

func (d *Daemon) putFile(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "path", "mode", "user", "append")
	if err != nil {
		return err
	}
	opts := WriteOptions{User: q.Get("user")}
	if opts.Mode, err = parseMode(q.Get("mode")); err != nil {
		return err
	}
	atEnd, err := yes("append", q.Get("append"))
	if err != nil {
		return err
	}
	write := d.service.WriteFile
	if atEnd {
		write = d.service.AppendFile
	}
	if err := write(r.Context(), r.PathValue("id"), q.Get("path"), opts, requestBody(w, r)); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (d *Daemon) getArchive(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "path")
	if err != nil {
		return err
	}
	out := &stream{w: w, rc: http.NewResponseController(w), contentType: api.TypeTar}
	return d.service.ArchiveOut(r.Context(), r.PathValue("id"), q.Get("path"), out)
}

func (d *Daemon) putArchive(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "path", "user")
	if err != nil {
		return err
	}
	err = d.service.ArchiveIn(r.Context(), r.PathValue("id"), q.Get("path"), WriteOptions{User: q.Get("user")}, requestBody(w, r))
	if err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// query reads the parameters of a request; others than known are refused, like unknown fields of a body.
func query(r *http.Request, known ...string) (url.Values, error) {
	q, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return nil, invalidf("query: %w", err)
	}
	for _, k := range slices.Sorted(maps.Keys(q)) {
		if !slices.Contains(known, k) {
			return nil, invalidf("query: unknown parameter %q", clip(k))
		}
		if len(q[k]) > 1 && k != "label" {
			return nil, invalidf("query: parameter %q is given twice", k)
		}
	}
	return q, nil
}

// requestBody is a body of any length whose parts must not be long in coming.
func requestBody(w http.ResponseWriter, r *http.Request) io.Reader {
	return &patientBody{r.Body, http.NewResponseController(w)}
}

func wantsStream(r *http.Request) bool {
	for _, accept := range r.Header.Values("Accept") {
		for part := range strings.SplitSeq(accept, ",") {
			t, _, _ := strings.Cut(part, ";")
			if strings.TrimSpace(t) == api.TypeNDJSON {
				return true
			}
		}
	}
	return false
}

// lines returns a function that writes one JSON value a line and sees to it that it leaves at once.
func lines[T any](w http.ResponseWriter) func(T) error { return linesTo[T](w, true) }

// linesTo is lines for values that may wait for each other, unless flush is set.
func linesTo[T any](w http.ResponseWriter, flush bool) func(T) error {
	return linesOf[T](&stream{w: w, rc: http.NewResponseController(w), contentType: api.TypeNDJSON, flush: flush})
}

func linesOf[T any](out *stream) func(T) error {
	return func(v T) error {
		data, err := json.Marshal(v)
		if err != nil {
			return err
		}
		_, err = out.Write(append(data, '\n'))
		return err
	}
}

// stream writes an answer of unknown length. The first byte sends the header, so that an error before it is a problem.
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
	n, err := s.w.Write(p)
	if err == nil && s.flush {
		err = s.rc.Flush()
	}
	return n, err
}
