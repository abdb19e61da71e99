package httpapi

import "net/http"

func (s *Server) getAllStats(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "sandbox")
	if err != nil {
		return err
	}
	list, err := s.as(r).AllStats(r.Context(), q["sandbox"])
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, list)
}

func (s *Server) getDiskUsage(w http.ResponseWriter, r *http.Request) error {
	if _, err := query(r); err != nil {
		return err
	}
	usage, err := s.as(r).DiskUsage(r.Context())
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, usage)
}
