package httpapi

import (
	"net/http"

	"github.com/sandboxd/sandboxd/api"
)

func (s *Server) getChanges(w http.ResponseWriter, r *http.Request) error {
	if _, err := query(r); err != nil {
		return err
	}
	write, err := s.as(r).Changes(r.PathValue("id"))
	if err != nil {
		return err
	}
	return write(r.Context(), &stream{w: w, rc: http.NewResponseController(w), contentType: api.TypeTar})
}
