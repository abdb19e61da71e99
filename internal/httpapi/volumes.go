package httpapi

import (
	"context"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service"
	"github.com/sandboxd/sandboxd/internal/service/class"
)

// maxRefused is the number of bytes that are read of an archive after it was refused.
const maxRefused = 64 << 20

// labelsOf reads the parameters label of a query, each key=value; nil if there are none.
func labelsOf(q url.Values) (map[string]string, error) {
	var labels map[string]string
	for _, l := range q["label"] {
		k, v, ok := strings.Cut(l, "=")
		if !ok {
			return nil, class.Invalidf("label %q: must be key=value", class.Clip(l))
		}
		if labels == nil {
			labels = make(map[string]string)
		}
		labels[k] = v
	}
	return labels, nil
}

func (s *Server) getVolumes(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "label", "dangling")
	if err != nil {
		return err
	}
	var filter service.VolumeFilter
	if filter.Labels, err = labelsOf(q); err != nil {
		return err
	}
	if text := q.Get("dangling"); text != "" {
		dangling, err := strconv.ParseBool(text)
		if err != nil {
			return class.Invalidf("dangling %q: must be true or false", class.Clip(text))
		}
		filter.Dangling = &dangling
	}
	return writeJSON(w, http.StatusOK, s.as(r).Volumes(filter))
}

func (s *Server) postVolume(w http.ResponseWriter, r *http.Request) error {
	var body api.CreateVolume
	if r.ContentLength != 0 {
		if err := readJSON(w, r, maxBody, &body); err != nil {
			return err
		}
	}
	v, created, err := s.as(r).CreateVolume(r.Context(), body)
	if err != nil {
		return err
	}
	status := http.StatusOK
	if created {
		status = http.StatusCreated
		w.Header().Set("Location", "/v1/volumes/"+v.Name)
	}
	return writeJSON(w, status, v)
}

func (s *Server) getVolume(w http.ResponseWriter, r *http.Request) error {
	if _, err := query(r); err != nil {
		return err
	}
	v, err := s.as(r).Volume(r.Context(), r.PathValue("volume"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, v)
}

func (s *Server) deleteVolume(w http.ResponseWriter, r *http.Request) error {
	// A removal that has begun is completed: half of a volume is of no use.
	if err := s.as(r).RemoveVolume(context.WithoutCancel(r.Context()), r.PathValue("volume")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) postVolumesPrune(w http.ResponseWriter, r *http.Request) error {
	return prune(w, r, s.as(r).PruneVolumes)
}

func (s *Server) getVolumeExport(w http.ResponseWriter, r *http.Request) error {
	if _, err := query(r); err != nil {
		return err
	}
	out := &stream{w: w, rc: http.NewResponseController(w), contentType: api.TypeTar}
	return s.as(r).ExportVolume(r.Context(), r.PathValue("volume"), out)
}

func (s *Server) postVolumeImport(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "name", "size", "inodes", "label")
	if err != nil {
		return err
	}
	req := api.CreateVolume{Name: q.Get("name")}
	if req.Labels, err = labelsOf(q); err != nil {
		return err
	}
	for _, p := range []struct {
		name string
		to   *int64
	}{{"size", &req.Size}, {"inodes", &req.Inodes}} {
		if text := q.Get(p.name); text != "" {
			if *p.to, err = strconv.ParseInt(text, 10, 64); err != nil {
				return class.Invalidf("%s %q: must be a whole number", p.name, class.Clip(text))
			}
		}
	}
	body := &watchedBody{r: requestBody(w, r)}
	out, err := s.as(r).ImportVolume(r.Context(), body, req)
	if body.err != nil {
		return bodyError(body.err)
	}
	if err != nil {
		// Clients read the answer when they have sent the archive, or find the connection closed.
		_, _ = io.Copy(io.Discard, io.LimitReader(body, maxRefused))
		return err
	}
	w.Header().Set("Location", "/v1/volumes/"+out.Name)
	return writeJSON(w, http.StatusCreated, out)
}
