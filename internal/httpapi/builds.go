package httpapi

import (
	"encoding/base64"
	"encoding/json"
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
	if opts.Secrets, err = buildSecrets(r.Header.Get(api.HeaderBuildSecrets)); err != nil {
		return err
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

// buildSecrets decodes the header with the secrets of a build. Errors quote nothing of it.
func buildSecrets(header string) (map[string][]byte, error) {
	if header == "" {
		return nil, nil //nolint:nilnil // there are none
	}
	data, err := base64.StdEncoding.DecodeString(header)
	var secrets map[string][]byte
	if err != nil || json.Unmarshal(data, &secrets) != nil {
		return nil, class.Invalidf("header %s: must be the base64 encoding of a JSON object of base64 encodings", api.HeaderBuildSecrets)
	}
	return secrets, nil
}
