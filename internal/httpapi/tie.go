package httpapi

import (
	"context"
	"net/http"

	"github.com/sandboxd/sandboxd/api"
)

// createTied creates a sandbox and answers with one line, the sandbox. The answer ends with the
// client's connection, and then the sandbox is deleted, whatever runs in it: a client that is
// killed leaves nothing behind. A daemon that stops ends the answer too, but treats the sandbox as
// any other.
func (s *Server) createTied(w http.ResponseWriter, r *http.Request, req api.CreateSandbox) error {
	sb, err := s.as(r).CreateSandbox(r.Context(), req)
	if err != nil {
		return err
	}
	ctx, end := s.untilStopping(r.Context())
	defer end()
	if err := lines[api.Sandbox](w)(sb); err == nil {
		<-ctx.Done()
	}
	select {
	case <-s.stopping:
		return nil
	default:
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), answerTimeout)
	defer cancel()
	if err := s.as(r).DeleteSandbox(ctx, sb.ID); err != nil && ProblemOf(err).Code != api.CodeNotFound {
		s.log.Error("the sandbox of a client that is gone is left", "id", sb.ID, "error", err)
	}
	return nil
}
