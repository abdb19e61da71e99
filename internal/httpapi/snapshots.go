package httpapi

import (
	"net/http"

	"github.com/sandboxd/sandboxd/api"
)

func (s *Server) postSnapshotImport(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "name")
	if err != nil {
		return err
	}
	body := &watchedBody{r: requestBody(w, r)}
	snap, err := s.as(r).ImportSnapshot(r.Context(), body, q.Get("name"))
	if body.err != nil {
		return bodyError(body.err)
	}
	if err != nil {
		return err
	}
	w.Header().Set("Location", "/v1/snapshots/"+snap.ID)
	return writeJSON(w, http.StatusCreated, snap)
}

func (s *Server) getSnapshotExport(w http.ResponseWriter, r *http.Request) error {
	if _, err := query(r); err != nil {
		return err
	}
	out := &stream{w: w, rc: http.NewResponseController(w), contentType: api.TypeTar}
	return s.as(r).ExportSnapshot(r.Context(), r.PathValue("snapshot"), out)
}

func (s *Server) postSnapshot(w http.ResponseWriter, r *http.Request) error {
	var body api.TakeSnapshot
	if r.ContentLength != 0 {
		if err := readJSON(w, r, maxBody, &body); err != nil {
			return err
		}
	}
	snap, err := s.as(r).TakeSnapshot(r.Context(), r.PathValue("id"), body)
	if err != nil {
		return err
	}
	w.Header().Set("Location", "/v1/snapshots/"+snap.ID)
	return writeJSON(w, http.StatusCreated, snap)
}

func (s *Server) getSandboxSnapshots(w http.ResponseWriter, r *http.Request) error {
	if _, err := query(r); err != nil {
		return err
	}
	list, err := s.as(r).Snapshots(r.PathValue("id"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, list)
}

func (s *Server) postFork(w http.ResponseWriter, r *http.Request) error {
	var body api.ForkSandbox
	if r.ContentLength != 0 {
		if err := readJSON(w, r, maxBody, &body); err != nil {
			return err
		}
	}
	out, err := s.as(r).Fork(r.Context(), r.PathValue("id"), body)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusCreated, out)
}

func (s *Server) postRollback(w http.ResponseWriter, r *http.Request) error {
	var body api.RollbackSandbox
	if err := readJSON(w, r, maxBody, &body); err != nil {
		return err
	}
	sb, err := s.as(r).Rollback(r.Context(), r.PathValue("id"), body)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, sb)
}

func (s *Server) getSnapshots(w http.ResponseWriter, r *http.Request) error {
	if _, err := query(r); err != nil {
		return err
	}
	list, err := s.as(r).Snapshots("")
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, list)
}

func (s *Server) getSnapshot(w http.ResponseWriter, r *http.Request) error {
	snap, err := s.as(r).Snapshot(r.PathValue("snapshot"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, snap)
}

func (s *Server) deleteSnapshot(w http.ResponseWriter, r *http.Request) error {
	bytes, err := s.as(r).RemoveSnapshot(r.Context(), r.PathValue("snapshot"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, api.SnapshotRemoved{Bytes: bytes})
}
