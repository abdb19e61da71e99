package service

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/runtime"
)

// The names of restart policies.
const (
	restartNo            = "no"
	restartOnFailure     = "on-failure"
	restartAlways        = "always"
	restartUnlessStopped = "unless-stopped"
)

// The delays of restarts are Docker's.
const (
	firstDelay = 100 * time.Millisecond
	maxDelay   = time.Minute
	longLife   = 10 * time.Second // of a main process, after which the delays begin anew
)

// restartPolicy is a restart policy.
type restartPolicy struct {
	name string
	most int // number of restarts; zero means no ceiling
}

func parseRestart(text string) (restartPolicy, error) {
	name, number, counted := strings.Cut(text, ":")
	p := restartPolicy{name: name}
	switch name {
	case "", restartNo, restartAlways, restartUnlessStopped:
		if !counted {
			return p, nil
		}
	case restartOnFailure:
		n, err := strconv.ParseUint(number, 10, 31)
		if p.most = int(n); !counted || err == nil && n > 0 {
			return p, nil
		}
	}
	return restartPolicy{}, class.Invalidf("restart %q: must be no, on-failure, on-failure:N with a number N from 1 on, always or unless-stopped", class.Clip(text))
}

// next returns the delay after which a sandbox that has ended is to be started again, and the new
// number of its short lives. Booting means that the daemon has just started, and failed is the
// number of starts since the end that have failed, which no record has. It is pure.
func (p restartPolicy) next(rec *runtime.Record, booting bool, failed int, now time.Time) (delay time.Duration, short int, ok bool) {
	if len(rec.Command) == 0 || rec.Idle || rec.State != api.StateStopped && rec.State != api.StateLost || rec.FilesGone || rec.Unstarted {
		return 0, 0, false
	}
	switch p.name {
	case restartAlways:
		stopped := rec.Settled || rec.Reason == runtime.ReasonStopped
		ok = rec.EndedItself() || booting && stopped
	case restartUnlessStopped:
		ok = rec.EndedItself()
	case restartOnFailure:
		failure := rec.Exit == nil || rec.Exit.Code != 0
		ok = rec.EndedItself() && failure && (p.most == 0 || rec.Restarts+failed < p.most)
	}
	short = rec.ShortLives
	if e := rec.Exit; e != nil && e.EndedAt.Sub(e.StartedAt) >= longLife {
		short = 0
	}
	short += failed
	delay = maxDelay
	if short < 10 { // 2^10 times the first is more
		delay = min(maxDelay, firstDelay<<short)
	}
	return delay, short + 1, ok && now.Add(delay).Before(rec.Deadline)
}

// restarts holds the restarts that are due, one a sandbox at most.
type restarts struct {
	mu     sync.Mutex
	closed bool
	due    map[string]*time.Timer // by the sandbox's id
}

// schedule calls start after the delay, unless a restart of the sandbox is due already.
func (r *restarts) schedule(id string, delay time.Duration, start func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed || r.due[id] != nil {
		return
	}
	if r.due == nil {
		r.due = make(map[string]*time.Timer)
	}
	var t *time.Timer
	t = time.AfterFunc(delay, func() {
		r.mu.Lock()
		mine := r.due[id] == t
		if mine {
			delete(r.due, id)
		}
		r.mu.Unlock()
		if mine {
			start()
		}
	})
	r.due[id] = t
}

// cancel takes back the restart of a sandbox that is due, and reports whether there was one.
func (r *restarts) cancel(id string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	t := r.due[id]
	if t != nil {
		t.Stop()
		delete(r.due, id)
	}
	return t != nil
}

// stop takes back all, for good: they are the next daemon's.
func (r *restarts) stop() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	for _, t := range r.due {
		t.Stop()
	}
	r.due = nil
}

// mayRestart refuses a policy that a sandbox cannot have.
func mayRestart(rec *runtime.Record, policy string) error {
	switch {
	case policy == "" || policy == restartNo:
	case len(rec.Command) == 0:
		return class.Invalidf("restart: the policy is about a main process, and %s has none", rec.Name)
	case rec.AutoRemove:
		return class.Invalidf("restart: %s is removed when it ends", rec.Name)
	}
	return nil
}

// reconsiderRestart applies a new policy to a restart that is due.
func (s *core) reconsiderRestart(id string) {
	if s.restarts.cancel(id) {
		s.considerRestart(id, false)
	}
}

// considerRestart starts a sandbox again, if its policy wants that, once it has ended.
func (s *core) considerRestart(id string, booting bool) {
	rec, err := s.supervisor.Get(id)
	if err != nil || rec.Restart == "" || rec.Restart == restartNo {
		return
	}
	s.work.Go(func() {
		rec, err := s.supervisor.WaitEnded(s.work.Ctx, id)
		if err == nil {
			s.scheduleRestart(&rec, booting, 0)
		}
	})
}

func (s *core) scheduleRestart(rec *runtime.Record, booting bool, failed int) {
	p, err := parseRestart(rec.Restart)
	if err != nil {
		s.log.Error("a restart policy is not known", "id", rec.ID, "error", err)
		return
	}
	delay, _, ok := p.next(rec, booting, failed, time.Now())
	if !ok {
		return
	}
	s.log.Info("sandbox is to be restarted", "id", rec.ID, "name", rec.Name, "after", delay, "restarts", rec.Restarts, "reason", rec.Reason)
	s.restarts.schedule(rec.ID, delay, func() {
		s.work.Go(func() { s.restart(s.work.Ctx, rec.ID, p, booting, failed) })
	})
}

// restart starts a sandbox whose time has come, unless a client was faster.
func (s *core) restart(ctx context.Context, id string, p restartPolicy, booting bool, failed int) {
	rec, err := s.supervisor.Get(id)
	if err != nil {
		return // deleted meanwhile
	}
	_, short, ok := p.next(&rec, booting, failed, time.Now())
	if !ok {
		return // started or stopped meanwhile
	}
	switch err := s.startByPolicy(ctx, &rec, short); {
	case err == nil, ctx.Err() != nil:
	case errors.Is(err, runtime.ErrNotFound), errors.Is(err, runtime.ErrNotEnded), errors.Is(err, runtime.ErrClosed), errors.Is(err, class.ErrGone), errors.Is(err, class.ErrStopping):
	default:
		s.log.Warn("a sandbox could not be restarted", "id", id, "error", err)
		if rec, err = s.supervisor.Get(id); err == nil {
			s.scheduleRestart(&rec, booting, failed+1)
		}
	}
}

func (s *core) startByPolicy(ctx context.Context, rec *runtime.Record, short int) error {
	if err := s.spareDisk(ctx); err != nil {
		return err
	}
	profile, _, err := s.profileOf(rec)
	if err != nil {
		return err
	}
	trust, err := s.networks.Restore(rec)
	if err != nil {
		return err
	}
	now, err := s.supervisor.Start(ctx, rec.ID, runtime.StartRequest{Profile: profile, Trust: trust, Restart: true, ShortLives: short})
	if err != nil {
		return err
	}
	if err := s.startAgain(ctx, &now); err != nil {
		return err
	}
	s.publishPorts(&now)
	return nil
}
