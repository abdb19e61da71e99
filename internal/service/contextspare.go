package service

import (
	"context"
	"reflect"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service/exec"
)

const (
	// spareDelay is the time after the creation of a context before the next spare is started, so that
	// its imports take no time from the first run.
	spareDelay = 100 * time.Millisecond
	// spareIdle is the time without a creation after which a spare is ended.
	spareIdle = 10 * time.Minute
)

// A spare is an interpreter that has imported its modules and waits to become a context: the
// process of one request, started before that request comes. A sandbox has one, of its last
// creation with modules.
//
// It becomes a context of an equal request only. So the process has started with the user, the
// environment, the directory and the limits of that request, and was no context before.
type spare struct {
	req    api.CreateContext // without IdleTimeout
	ctx    context.Context   //nolint:containedctx // of the goroutine that starts and ends it
	cancel context.CancelFunc
	c      *codeContext // nil until it is ready; guarded by the registry's mu
}

// spareOf returns the part of a request that a spare must have been started with.
func spareOf(req api.CreateContext) api.CreateContext {
	req.IdleTimeout = 0
	if len(req.Env) == 0 {
		req.Env = nil
	}
	if len(req.Preload) == 0 {
		req.Preload = nil
	}
	return req
}

// takeSpare returns the spare of a sandbox for a request; nil if there is none. It is then in no
// registry.
func (s *core) takeSpare(sandbox string, req api.CreateContext) *codeContext {
	s.contexts.mu.Lock()
	defer s.contexts.mu.Unlock()
	sp := s.contexts.spares[sandbox]
	if sp == nil || sp.c == nil || !reflect.DeepEqual(sp.req, spareOf(req)) || sp.c.process().Ended() {
		return nil
	}
	c := sp.c
	sp.c = nil
	s.contexts.dropSpare(sandbox)
	return c
}

// dropSpare takes a spare out of the registry and ends it. It needs mu.
func (cs *contexts) dropSpare(sandbox string) {
	if sp := cs.spares[sandbox]; sp != nil {
		delete(cs.spares, sandbox)
		sp.cancel()
	}
}

// refillSpare sees to a spare for requests like this one, in the place of another. It does not wait
// for that.
func (s *core) refillSpare(sandbox string, req api.CreateContext) {
	s.contexts.mu.Lock()
	defer s.contexts.mu.Unlock()
	req = spareOf(req)
	if sp := s.contexts.spares[sandbox]; sp != nil && reflect.DeepEqual(sp.req, req) && (sp.c == nil || !sp.c.process().Ended()) {
		return
	}
	s.contexts.dropSpare(sandbox)
	// A sandbox that ends or is deleted concurrently has an end of its own for the process.
	if n := len(s.contexts.of[sandbox]); n == 0 || n >= maxContexts {
		return
	}
	sp := &spare{req: req}
	sp.ctx, sp.cancel = context.WithCancel(s.work.Ctx)
	if !s.work.Go(func() { s.keepSpare(sandbox, sp) }) {
		sp.cancel()
		return
	}
	if s.contexts.spares == nil {
		s.contexts.spares = make(map[string]*spare)
	}
	s.contexts.spares[sandbox] = sp
}

// keepSpare starts a spare, and ends it unless it has become a context: when it is dropped, or was
// not used for long.
func (s *core) keepSpare(sandbox string, sp *spare) {
	defer s.forgetSpare(sandbox, sp)
	if !sp.sleep(spareDelay) {
		return
	}
	rec, err := s.supervisor.Get(sandbox)
	if err != nil {
		return
	}
	c := s.newContext(contextRecord{ID: exec.NewID(), Sandbox: sandbox, Created: time.Now().UTC(), Request: sp.req})
	if err := c.startProcess(sp.ctx, &rec); err != nil {
		s.log.Debug("no interpreter is ready for the next context", "id", sandbox, "error", err)
		s.removeContext(sp.ctx, c)
		return
	}
	s.contexts.mu.Lock()
	if sp.ctx.Err() == nil {
		sp.c = c
	}
	mine := sp.c == nil
	s.contexts.mu.Unlock()
	if mine {
		s.removeContext(sp.ctx, c)
		return
	}
	sp.sleep(spareIdle)
}

// sleep waits; false once the spare is dropped.
func (sp *spare) sleep(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-sp.ctx.Done():
		return false
	}
}

// forgetSpare takes a spare that was not used out of the registry, and ends its process.
func (s *core) forgetSpare(sandbox string, sp *spare) {
	s.contexts.mu.Lock()
	if s.contexts.spares[sandbox] == sp {
		s.contexts.dropSpare(sandbox)
	}
	sp.cancel()
	c := sp.c
	sp.c = nil
	s.contexts.mu.Unlock()
	if c != nil && s.work.Ctx.Err() == nil { // else the next daemon ends it
		s.removeContext(s.work.Ctx, c)
	}
}
