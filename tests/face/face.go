// Package face is a throw-away second face of the service. It shows that a face needs nothing but
// the API's types, the service and its classes of errors, and that callers of different tenants see
// nothing of each other.
//
// Its protocol is plain text over HTTP. The header Tenant names the caller's tenant; a real face
// takes it from verified credentials.
package face

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service"
	"github.com/sandboxd/sandboxd/internal/service/class"
)

// Face serves its protocol over a service.
type Face struct {
	service *service.Service
	mux     *http.ServeMux
}

// New returns a face of the service.
func New(s *service.Service) *Face {
	f := &Face{service: s, mux: http.NewServeMux()}
	for pattern, handle := range map[string]func(*service.API, http.ResponseWriter, *http.Request) error{
		"PUT /box/{box}":                f.create,
		"GET /box":                      f.list,
		"DELETE /box/{box}":             f.remove,
		"POST /box/{box}/run":           f.run,
		"POST /box/{box}/job":           f.start,
		"GET /box/{box}/job/{job}":      f.attach,
		"GET /box/{box}/file/{path...}": f.read,
	} {
		f.mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			caller := service.Caller{Tenant: r.Header.Get("Tenant"), UID: -1}
			if err := handle(f.service.For(caller), w, r); err != nil {
				http.Error(w, err.Error(), statusOf(err))
			}
		})
	}
	return f
}

// ServeHTTP implements http.Handler.
func (f *Face) ServeHTTP(w http.ResponseWriter, r *http.Request) { f.mux.ServeHTTP(w, r) }

// statusOf maps the classes of errors to this face's own codes.
func statusOf(err error) int {
	err = class.Marked(err)
	for _, m := range []struct {
		class  error
		status int
	}{
		{class.ErrInvalid, http.StatusBadRequest},
		{class.ErrForbidden, http.StatusForbidden},
		{class.ErrNoSandbox, http.StatusNotFound},
		{class.ErrNoExec, http.StatusNotFound},
		{class.ErrNoFile, http.StatusNotFound},
		{class.ErrNoImage, http.StatusNotFound},
		{class.ErrProgramMissing, http.StatusNotFound},
		{class.ErrExists, http.StatusConflict},
		{class.ErrState, http.StatusConflict},
		{class.ErrGone, http.StatusGone},
		{class.ErrStopping, http.StatusServiceUnavailable},
		{class.ErrUnavailable, http.StatusServiceUnavailable},
		{context.DeadlineExceeded, http.StatusServiceUnavailable},
	} {
		if errors.Is(err, m.class) {
			return m.status
		}
	}
	return http.StatusInternalServerError
}

func (f *Face) create(s *service.API, w http.ResponseWriter, r *http.Request) error {
	box, err := s.CreateSandbox(r.Context(), api.CreateSandbox{Name: r.PathValue("box"), Image: r.URL.Query().Get("image")})
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(w, box.ID)
	return err
}

func (f *Face) list(s *service.API, w http.ResponseWriter, _ *http.Request) error {
	boxes, err := s.ListSandboxes(service.SandboxFilter{})
	if err != nil {
		return err
	}
	for _, box := range boxes.Sandboxes {
		if _, err := fmt.Fprintln(w, box.Name, box.State); err != nil {
			return err
		}
	}
	return nil
}

func (f *Face) remove(s *service.API, _ http.ResponseWriter, r *http.Request) error {
	return s.DeleteSandbox(r.Context(), r.PathValue("box"))
}

// program returns the request to run the shell script in the body.
func program(r *http.Request) (api.ExecRequest, error) {
	script, err := io.ReadAll(io.LimitReader(r.Body, 1<<20))
	return api.ExecRequest{Argv: []string{"sh", "-c", string(script)}}, err
}

// run runs a script to its end.
func (f *Face) run(s *service.API, w http.ResponseWriter, r *http.Request) error {
	req, err := program(r)
	if err != nil {
		return err
	}
	result, err := s.ExecBuffered(r.Context(), r.PathValue("box"), req)
	if err != nil {
		return err
	}
	w.Header().Set("Exit", fmt.Sprint(result.Exit.Code))
	_, err = io.WriteString(w, result.Stdout)
	return err
}

// start starts a script that outlives the request.
func (f *Face) start(s *service.API, w http.ResponseWriter, r *http.Request) error {
	req, err := program(r)
	if err != nil {
		return err
	}
	req.Detach = true
	job, err := s.StartDetached(r.Context(), r.PathValue("box"), req)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(w, job.ID)
	return err
}

// attach follows a job's output to its end.
func (f *Face) attach(s *service.API, w http.ResponseWriter, r *http.Request) error {
	job, err := s.Detached(r.PathValue("box"), r.PathValue("job"))
	if err != nil {
		return err
	}
	return job.Attach(r.Context(), 0, true, func(e api.ExecEvent) error {
		if e.Exit != nil {
			_, err := fmt.Fprintf(w, "exit %d\n", e.Exit.Code)
			return err
		}
		_, err := io.WriteString(w, e.Text)
		return err
	})
}

func (f *Face) read(s *service.API, w http.ResponseWriter, r *http.Request) error {
	file, err := s.ReadFile(r.Context(), r.PathValue("box"), "/"+r.PathValue("path"))
	if err != nil {
		return err
	}
	defer file.Close() // only read
	_, err = io.Copy(w, file)
	return err
}
