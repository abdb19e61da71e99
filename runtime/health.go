package runtime

import (
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// healthEvery is the least time between two writes of results that leave the status as it is: the
// checks of one sandbox must not keep the disk of all busy.
const healthEvery = 5 * time.Second

// freshHealth returns the health of a sandbox whose life begins now; nil if it has no checks.
func freshHealth(set *api.Settings, idle bool, now time.Time) *api.SandboxHealth {
	if set.HealthCheck == nil || idle {
		return nil
	}
	return &api.SandboxHealth{Status: api.HealthStarting, StartedAt: now.UTC()}
}

// SetHealth records the health of a sandbox, if life is the one of its record and it has not ended.
// When SetHealth returns, a changed status is on disk. Results without one are there after a while.
// Health must not be changed after the call.
func (s *Supervisor) SetHealth(id string, life int, health *api.SandboxHealth) error {
	s.mu.Lock()
	sb := s.byID[id]
	if sb == nil || s.closed || sb.life.ended() || sb.rec.Life != life {
		s.mu.Unlock()
		return nil
	}
	changed := sb.rec.Health == nil || sb.rec.Health.Status != health.Status
	sb.rec.Health = health
	if changed {
		s.tell(sb, api.Event{Action: api.ActionHealth, Health: health.Status})
	}
	now, l := s.now(), sb.life
	if !changed && now.Sub(sb.healthSaved) < healthEvery {
		s.mu.Unlock()
		return nil
	}
	sb.healthSaved = now
	s.ops.Add(1)
	s.mu.Unlock()
	defer s.ops.Done()
	sb.write.Lock()
	defer sb.write.Unlock()
	s.mu.Lock()
	rec, live := sb.rec.clone(), sb.life == l && !l.ended()
	s.mu.Unlock()
	if !live {
		return nil // the write of its end has it
	}
	return s.records.put(&rec)
}
