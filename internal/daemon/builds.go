package daemon

import (
	"fmt"
	"net/http"
	"strings"
	"sync"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/runtime"
)

func (d *Daemon) postBuild(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "options")
	if err != nil {
		return err
	}
	var opts api.Build
	if o := q.Get("options"); o != "" {
		if err := decodeJSON([]byte(o), &opts); err != nil {
			return invalidf("options: %s", strings.TrimPrefix(err.Error(), "body: "))
		}
	}
	var mu sync.Mutex
	began := false
	emit := lines[api.BuildEvent](w)
	body := &watchedBody{r: requestBody(w, r)}
	img, err := d.service.Build(r.Context(), body, opts, func(e api.BuildEvent) {
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

// visible hides the sandboxes of builds from requests: who writes into one while a program of a build runs in it changes
// what that step is, and the cache with it.
func (s *Service) visible(ref string) error {
	if ref == "" {
		return nil
	}
	if rec, err := s.supervisor.Get(ref); err == nil && rec.Ephemeral {
		return fmt.Errorf("%w: %q", runtime.ErrNotFound, ref)
	}
	return nil
}
