package httpapi

import (
	"errors"
	"io"
	"net/http"
	"strings"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service"
	"github.com/sandboxd/sandboxd/internal/service/class"
)

func (s *Server) getImages(w http.ResponseWriter, r *http.Request) error {
	list, err := s.as(r).Images(r.Context())
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, list)
}

func (s *Server) postPull(w http.ResponseWriter, r *http.Request) error {
	var req api.PullImage
	if err := readJSON(w, r, maxBody, &req); err != nil {
		return err
	}
	return answerProgress(w, func(progress func(api.PullEvent)) (api.PullEvent, error) {
		img, err := s.as(r).Pull(r.Context(), req, progress)
		return api.PullEvent{Image: &img}, err
	})
}

func (s *Server) postPush(w http.ResponseWriter, r *http.Request) error {
	var req api.PushImage
	if err := readJSON(w, r, maxBody, &req); err != nil {
		return err
	}
	return answerProgress(w, func(progress func(api.PullEvent)) (api.PullEvent, error) {
		img, err := s.as(r).Push(r.Context(), req, progress)
		return api.PullEvent{Image: &img}, err
	})
}

func (s *Server) postCheckRegistry(w http.ResponseWriter, r *http.Request) error {
	var req api.CheckRegistry
	if err := readJSON(w, r, maxBody, &req); err != nil {
		return err
	}
	checked, err := s.as(r).CheckRegistry(r.Context(), req)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, checked)
}

// answerProgress answers with the progress of work, a line for each event; the last line has the
// result or an error.
func answerProgress(w http.ResponseWriter, work func(progress func(api.PullEvent)) (api.PullEvent, error)) error {
	emit := lines[api.PullEvent](w)
	began := false
	last, err := work(func(e api.PullEvent) {
		began = true
		_ = emit(e) // a client that goes away ends the request's context, and with it the work
	})
	switch {
	case err != nil && !began:
		return err
	case err != nil:
		_ = emit(api.PullEvent{Error: ProblemOf(err)}) // as above
	default:
		last.Status = "done"
		_ = emit(last) // as above
	}
	return nil
}

func (s *Server) deleteImage(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "reference", "force")
	if err != nil {
		return err
	}
	force, err := boolParam("force", q.Get("force"))
	if err != nil {
		return err
	}
	out, err := s.as(r).RemoveImage(r.Context(), q.Get("reference"), force)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, out)
}

func (s *Server) postPrune(w http.ResponseWriter, r *http.Request) error {
	return prune(w, r, s.as(r).PruneImages)
}

func (s *Server) postTag(w http.ResponseWriter, r *http.Request) error {
	var req api.TagImage
	if err := readJSON(w, r, maxBody, &req); err != nil {
		return err
	}
	img, err := s.as(r).TagImage(r.Context(), req)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, img)
}

func (s *Server) getImage(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "reference")
	if err != nil {
		return err
	}
	detail, err := s.as(r).InspectImage(r.Context(), q.Get("reference"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, detail)
}

func (s *Server) getVerify(w http.ResponseWriter, r *http.Request) error {
	if _, err := query(r); err != nil {
		return err
	}
	out, err := s.as(r).VerifyImages(r.Context())
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, out)
}

func (s *Server) postImport(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "reference", "platform", "rootfs", "config", "progress")
	if err != nil {
		return err
	}
	opts := service.ImportOptions{Reference: q.Get("reference"), Platform: q.Get("platform")}
	if opts.Rootfs, err = boolParam("rootfs", q.Get("rootfs")); err != nil {
		return err
	}
	if c := q.Get("config"); c != "" {
		if err := decodeJSON([]byte(c), &opts.Config); err != nil {
			return class.Invalidf("config: %s", strings.TrimPrefix(err.Error(), "body: "))
		}
	}
	progress, err := boolParam("progress", q.Get("progress"))
	if err != nil {
		return err
	}
	body := &watchedBody{r: requestBody(w, r)}
	work := func() (api.ImagesImported, error) {
		out, err := s.as(r).ImportImages(r.Context(), body, opts)
		if body.err != nil {
			err = bodyError(body.err)
		}
		return out, err
	}
	if progress {
		return answerProgress(w, func(progress func(api.PullEvent)) (api.PullEvent, error) {
			opts.Progress = progress
			out, err := work()
			return api.PullEvent{Images: out.Images}, err
		})
	}
	out, err := work()
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, out)
}

// watchedBody remembers what ended it.
type watchedBody struct {
	r   io.Reader
	err error // but io.EOF
}

func (b *watchedBody) Read(p []byte) (int, error) {
	n, err := b.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		b.err = err
	}
	return n, err
}

func (s *Server) getExport(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "reference", "format")
	if err != nil {
		return err
	}
	out := &stream{w: w, rc: http.NewResponseController(w), contentType: api.TypeTar}
	return s.as(r).ExportImage(r.Context(), q.Get("reference"), q.Get("format"), out)
}
