package httpapi

import (
	"context"
	"net/http"

	"github.com/sandboxd/sandboxd/api"
)

// createTied creates a sandbox and answers with one line, the sandbox. The answer ends with the
// client's connection, and then the sandbox is deleted, whatever runs in it: a client that is
// killed leaves nothing behind. A daemon that stops ends the answer too, but treats the sandbox as
// any other, and so it is after untie.
func (s *Server) createTied(w http.ResponseWriter, r *http.Request, req api.CreateSandbox) error {
	sb, err := s.as(r).CreateSandbox(r.Context(), req)
	if err != nil {
		return err
	}
	untied := make(chan struct{})
	s.mu.Lock()
	s.ties[sb.ID] = untied
	s.mu.Unlock()
	if err := lines[api.Sandbox](w)(sb); err == nil {
		select {
		case <-untied:
		case <-s.stopping:
		case <-r.Context().Done():
		}
	}
	if !s.untie(sb.ID) {
		return nil
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

// untie makes the sandbox of a client stay when the client is gone. It reports whether the sandbox
// was tied to one.
func (s *Server) untie(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	untied, tied := s.ties[id]
	if tied {
		delete(s.ties, id)
		close(untied)
	}
	return tied
}
