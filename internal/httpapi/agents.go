// Package httpapi is the native face: the API of package api as HTTP and JSON over a Unix socket.
// It serves one tenant, the daemon's own.
//
// # The life of a request
//
//	accept      the peer's uid is read from the socket (SO_PEERCRED)
//	route       one table: method, pattern, access
//	decode      strict JSON, bounded
//	service     validates, looks objects up for the caller, and works on them
//	answer      JSON, NDJSON, bytes; or a problem document, by the one table in problem.go
package httpapi

import (
	"bytes"
	"encoding/json"
	"net/http"
	"strconv"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service/class"
)

// maxAgentBody bounds a request about a run: a task and a prompt may be long.
const maxAgentBody = 8 << 20

func (s *Server) postAgentRun(w http.ResponseWriter, r *http.Request) error {
	var body api.StartAgentRun
	if err := readJSON(w, r, maxAgentBody, &body); err != nil {
		return err
	}
	run, err := s.as(r).StartAgentRun(r.Context(), body)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusCreated, run)
}

func (s *Server) getAgentRuns(w http.ResponseWriter, r *http.Request) error {
	if _, err := query(r); err != nil {
		return err
	}
	list, err := s.as(r).AgentRuns()
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, list)
}

func (s *Server) getAgentRun(w http.ResponseWriter, r *http.Request) error {
	run, err := s.as(r).AgentRun(r.PathValue("run"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, run)
}

func (s *Server) getAgentEvents(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "from")
	if err != nil {
		return err
	}
	from := 1
	if text := q.Get("from"); text != "" {
		if from, err = strconv.Atoi(text); err != nil || from < 1 {
			return class.Invalidf("from %q: want the number of a line of the record, from 1", class.Clip(text))
		}
	}
	out := &stream{w: w, rc: http.NewResponseController(w), contentType: api.TypeNDJSON, flush: true}
	return s.as(r).AgentEvents(r.Context(), r.PathValue("run"), from, func(e api.AgentRunEvent) error {
		// The escape of HTML is off, as in the record: it makes text up to six times as long, and clients
		// bound their lines.
		var line bytes.Buffer
		enc := json.NewEncoder(&line)
		enc.SetEscapeHTML(false)
		if err := enc.Encode(e); err != nil {
			return err
		}
		_, err := out.Write(line.Bytes())
		return err
	})
}

func (s *Server) postAgentResume(w http.ResponseWriter, r *http.Request) error {
	var body api.ResumeAgentRun
	if r.ContentLength != 0 {
		if err := readJSON(w, r, maxAgentBody, &body); err != nil {
			return err
		}
	}
	run, err := s.as(r).ResumeAgentRun(r.Context(), r.PathValue("run"), body)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, run)
}

func (s *Server) postAgentCancel(w http.ResponseWriter, r *http.Request) error {
	var body api.CancelAgentRun
	if r.ContentLength != 0 {
		if err := readJSON(w, r, maxBody, &body); err != nil {
			return err
		}
	}
	run, err := s.as(r).CancelAgentRun(r.PathValue("run"), body)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusAccepted, run)
}

func (s *Server) deleteAgentRun(w http.ResponseWriter, r *http.Request) error {
	if err := s.as(r).RemoveAgentRun(r.Context(), r.PathValue("run")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
