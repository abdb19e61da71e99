package httpapi

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service"
	"github.com/sandboxd/sandboxd/internal/service/class"
)

func (s *Server) deleteSandbox(w http.ResponseWriter, r *http.Request) error {
	if err := s.as(r).DeleteSandbox(r.Context(), r.PathValue("id")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) getStats(w http.ResponseWriter, r *http.Request) error {
	st, err := s.as(r).Stats(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, st)
}

func (s *Server) patchSandbox(w http.ResponseWriter, r *http.Request) error {
	var req api.UpdateSandbox
	if err := readJSON(w, r, maxBody, &req); err != nil {
		return err
	}
	sb, err := s.as(r).UpdateSandbox(r.Context(), r.PathValue("id"), req)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, sb)
}

func (s *Server) getSandbox(w http.ResponseWriter, r *http.Request) error {
	sb, err := s.as(r).GetSandbox(r.PathValue("id"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, sb)
}

func (s *Server) getSandboxes(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "label", "state", "limit")
	if err != nil {
		return err
	}
	filter := service.SandboxFilter{State: api.SandboxState(q.Get("state")), Labels: make(map[string]string)}
	for _, l := range q["label"] {
		k, v, ok := strings.Cut(l, "=")
		if !ok || k == "" {
			return class.Invalidf("label %q: must be key=value", class.Clip(l))
		}
		filter.Labels[k] = v
	}
	if s := q.Get("limit"); s != "" {
		if filter.Limit, err = strconv.Atoi(s); err != nil || filter.Limit < 1 {
			return class.Invalidf("limit %q: must be a positive number", class.Clip(s))
		}
	}
	list, err := s.as(r).ListSandboxes(filter)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, list)
}

func (s *Server) postSandbox(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "tie")
	if err != nil {
		return err
	}
	tied, err := boolParam("tie", q.Get("tie"))
	if err != nil {
		return err
	}
	var req api.CreateSandbox
	if err := readJSON(w, r, maxBody, &req); err != nil {
		return err
	}
	if tied {
		return s.createTied(w, r, req)
	}
	sb, err := s.as(r).CreateSandbox(r.Context(), req)
	if err != nil {
		return err
	}
	w.Header().Set("Location", "/v1/sandboxes/"+sb.ID)
	return writeJSON(w, http.StatusCreated, sb)
}

func (s *Server) getDiff(w http.ResponseWriter, r *http.Request) error {
	if _, err := query(r); err != nil {
		return err
	}
	diff, err := s.as(r).Diff(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, diff)
}

func (s *Server) postCommit(w http.ResponseWriter, r *http.Request) error {
	var body api.CommitSandbox
	if err := readJSON(w, r, maxBody, &body); err != nil {
		return err
	}
	out, err := s.as(r).Commit(r.Context(), r.PathValue("id"), body)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusCreated, out)
}

func (s *Server) getWait(w http.ResponseWriter, r *http.Request) error {
	if _, err := query(r); err != nil {
		return err
	}
	sb, err := s.as(r).WaitSandbox(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, sb)
}

func (s *Server) getLogs(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "follow", "tail", "since", "stdout", "stderr")
	if err != nil {
		return err
	}
	opts := service.LogOptions{Tail: -1, Stdout: true, Stderr: true}
	if opts.Follow, err = boolParam("follow", q.Get("follow")); err != nil {
		return err
	}
	for what, to := range map[string]*bool{"stdout": &opts.Stdout, "stderr": &opts.Stderr} {
		if q.Has(what) {
			if *to, err = boolParam(what, q.Get(what)); err != nil {
				return err
			}
		}
	}
	if opts.Tail, err = tailParam(q.Get("tail"), "lines"); err != nil {
		return err
	}
	if s := q.Get("since"); s != "" {
		if opts.Since, err = time.Parse(time.RFC3339Nano, s); err != nil {
			return class.Invalidf("since %q: must be a time as in RFC 3339", class.Clip(s))
		}
	}
	log, err := s.as(r).Log(r.Context(), r.PathValue("id"), opts)
	if err != nil {
		return err
	}
	out := &stream{w: w, rc: http.NewResponseController(w), contentType: api.TypeNDJSON, flush: opts.Follow}
	if _, err := out.Write(nil); err != nil { // that there is nothing so far is an answer too
		return err
	}
	emit := linesOf[api.LogEntry](out)
	err = log.Read(r.Context(), emit)
	if errors.Is(err, class.ErrStopping) {
		return emit(api.LogEntry{Error: ProblemOf(err)})
	}
	return err
}

func (s *Server) getFlows(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "follow", "tail")
	if err != nil {
		return err
	}
	opts := service.FlowOptions{Tail: -1}
	if opts.Follow, err = boolParam("follow", q.Get("follow")); err != nil {
		return err
	}
	if opts.Tail, err = tailParam(q.Get("tail"), "flows"); err != nil {
		return err
	}
	out := &stream{w: w, rc: http.NewResponseController(w), contentType: api.TypeNDJSON, flush: opts.Follow}
	emit := linesOf[api.Flow](out)
	err = s.as(r).Flows(r.Context(), r.PathValue("id"), opts, func() error {
		_, err := out.Write(nil) // that there is nothing so far is an answer too
		return err
	}, emit)
	if errors.Is(err, class.ErrStopping) {
		return emit(api.Flow{Error: ProblemOf(err)})
	}
	return err
}

// tailParam reads a number of lines, or of the like; -1 means all.
func tailParam(value, of string) (int, error) {
	if value == "" || value == "all" {
		return -1, nil
	}
	n, err := strconv.Atoi(value)
	if err != nil || n < 0 {
		return 0, class.Invalidf("tail %q: must be all or a number of %s", class.Clip(value), of)
	}
	return n, nil
}

func (s *Server) postSandboxesPrune(w http.ResponseWriter, r *http.Request) error {
	return prune(w, r, s.as(r).PruneSandboxes)
}

func (s *Server) postSnapshotsPrune(w http.ResponseWriter, r *http.Request) error {
	return prune(w, r, s.as(r).PruneSnapshots)
}

// prune answers a request to remove unneeded objects. Its body may be left out.
func prune[Q, A any](w http.ResponseWriter, r *http.Request, f func(context.Context, Q) (A, error)) error {
	var req Q
	if r.ContentLength != 0 {
		if err := readJSON(w, r, maxBody, &req); err != nil {
			return err
		}
	}
	out, err := f(r.Context(), req)
	if err != nil {
		return fmt.Errorf("prune: %w", err)
	}
	return writeJSON(w, http.StatusOK, out)
}

func (s *Server) postPause(w http.ResponseWriter, r *http.Request) error {
	return answerState(w, r, s.as(r).PauseSandbox)
}

func (s *Server) postResume(w http.ResponseWriter, r *http.Request) error {
	return answerState(w, r, s.as(r).ResumeSandbox)
}

func (s *Server) postStop(w http.ResponseWriter, r *http.Request) error {
	return answerState(w, r, s.as(r).StopSandbox)
}

func (s *Server) postStart(w http.ResponseWriter, r *http.Request) error {
	return answerState(w, r, s.as(r).StartSandbox)
}

// answerState answers a request that brings a sandbox into another state. Its body may be left out.
func answerState[T any](w http.ResponseWriter, r *http.Request, f func(ctx context.Context, ref string, req T) (api.Sandbox, error)) error {
	var req T
	if r.ContentLength != 0 {
		if err := readJSON(w, r, maxBody, &req); err != nil {
			return err
		}
	}
	sb, err := f(r.Context(), r.PathValue("id"), req)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, sb)
}
