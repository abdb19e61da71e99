package httpapi

import (
	"net/http"
	"strings"
	"sync"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service/class"
)

func (s *Server) postBuild(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "options")
	if err != nil {
		return err
	}
	var opts api.Build
	if o := q.Get("options"); o != "" {
		if err := decodeJSON([]byte(o), &opts); err != nil {
			return class.Invalidf("options: %s", strings.TrimPrefix(err.Error(), "body: "))
		}
	}
	var mu sync.Mutex
	began := false
	emit := lines[api.BuildEvent](w)
	body := &watchedBody{r: requestBody(w, r)}
	img, err := s.as(r).Build(r.Context(), body, opts, func(e api.BuildEvent) {
		mu.Lock()
		defer mu.Unlock()
		began = true
		_ = emit(e) // a client that goes away ends the request's context, and with it the build
	})
	if err != nil && body.err != nil {
		err = bodyError(body.err)
	}
	switch {
	case err != nil && !began:
		return err
	case err != nil:
		_ = emit(api.BuildEvent{Error: ProblemOf(err)}) // as above
	default:
		_ = emit(api.BuildEvent{Image: &img}) // as above
	}
	return nil
}
