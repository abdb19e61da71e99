package httpapi

import (
	"context"
	"net/http"

	"github.com/sandboxd/sandboxd/api"
)

func (s *Server) postContext(w http.ResponseWriter, r *http.Request) error {
	var req api.CreateContext
	if err := readJSON(w, r, maxBody, &req); err != nil {
		return err
	}
	c, err := s.as(r).CreateContext(r.Context(), r.PathValue("id"), req)
	if err != nil {
		return err
	}
	w.Header().Set("Location", "/v1/sandboxes/"+c.Sandbox+"/contexts/"+c.ID)
	return writeJSON(w, http.StatusCreated, c)
}

func (s *Server) getContexts(w http.ResponseWriter, r *http.Request) error {
	list, err := s.as(r).Contexts(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, list)
}

func (s *Server) getContext(w http.ResponseWriter, r *http.Request) error {
	return answerContext(w, r, s.as(r).GetContext)
}

func (s *Server) deleteContext(w http.ResponseWriter, r *http.Request) error {
	if err := s.as(r).DeleteContext(r.Context(), r.PathValue("id"), r.PathValue("context")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) postContextInterrupt(w http.ResponseWriter, r *http.Request) error {
	return answerContext(w, r, s.as(r).InterruptContext)
}

func (s *Server) postContextRestart(w http.ResponseWriter, r *http.Request) error {
	return answerContext(w, r, s.as(r).RestartContext)
}

// answerContext answers with the context that do returns.
func answerContext(w http.ResponseWriter, r *http.Request, do func(ctx context.Context, sandbox, id string) (api.Context, error)) error {
	c, err := do(r.Context(), r.PathValue("id"), r.PathValue("context"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, c)
}
