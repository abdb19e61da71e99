package httpapi

import (
	"net/http"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service"
)

func (s *Server) getLanguages(w http.ResponseWriter, _ *http.Request) error {
	return writeJSON(w, http.StatusOK, service.Languages())
}

// postCode runs source text. Its body has at most the size of an exec's: code, stdin and arguments.
func (s *Server) postCode(w http.ResponseWriter, r *http.Request) error {
	var req api.CodeRequest
	if err := readJSON(w, r, maxExecBody, &req); err != nil {
		return err
	}
	if wants(r, api.TypeNDJSON) {
		return answerEvents(w, codeError, func(emit func(api.CodeEvent) error) error { //nolint:contextcheck // it is the request's
			return s.as(r).StreamCode(r.Context(), r.PathValue("id"), req, emit)
		})
	}
	res, done, err := s.as(r).RunCode(r.Context(), r.PathValue("id"), req)
	if err != nil {
		return err
	}
	defer done()
	return writeJSON(w, http.StatusOK, res)
}

func codeError(p *api.Problem) api.CodeEvent { return api.CodeEvent{Problem: p} }
