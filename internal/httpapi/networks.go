package httpapi

import "net/http"

func (s *Server) getNetworks(w http.ResponseWriter, r *http.Request) error {
	if _, err := query(r); err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, s.as(r).NamedNetworks())
}
