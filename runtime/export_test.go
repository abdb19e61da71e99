package runtime

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	bolt "go.etcd.io/bbolt"
)

// Demand is a pool's, with the clock of a test.
type Demand struct{ d demand }

func (d *Demand) Ask(now time.Time)        { d.d.ask(now) }
func (d *Demand) Wanted(now time.Time) int { return d.d.wanted(now) }

// Reconcile does rounds of the reconciler, which has one every minute.
func Reconcile(ctx context.Context, s *Supervisor, rounds int) error {
	found := map[mismatch]bool{}
	for range rounds {
		var err error
		if found, err = s.reconcile(ctx, found); err != nil {
			return err
		}
	}
	return nil
}

// RefuseRecords has the supervisor's disk refuse every record until restore is called. Scratch is a
// file that does not exist.
func RefuseRecords(s *Supervisor, scratch string) (restore func() error, err error) {
	empty, err := bolt.Open(scratch, 0o600, nil)
	if err != nil {
		return nil, err
	}
	if err := empty.Close(); err != nil {
		return nil, err
	}
	refuses, err := bolt.Open(scratch, 0o400, &bolt.Options{ReadOnly: true})
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	all := slices.Collect(maps.Values(s.byID))
	s.mu.Unlock()
	for _, sb := range all {
		sb.write.Lock()   // waits for the record of its start
		sb.write.Unlock() //nolint:staticcheck // nothing to do in between
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	was := s.records.db
	s.records.db = refuses
	return func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.records.db = was
		return refuses.Close()
	}, nil
}

// Rearm has every watcher look at the supervisor's clock again, after a test has moved it.
func Rearm(s *Supervisor) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, sb := range s.byID {
		s.arm(sb)
	}
}

// Expire looks at the supervisor's clock as the sandbox's watcher does, and returns why the sandbox
// is to end; empty if it goes on.
func Expire(ctx context.Context, s *Supervisor, id string) (reason string) {
	s.mu.Lock()
	sb := s.byID[id]
	l := sb.life
	s.mu.Unlock()
	s.expire(ctx, sb, l)
	s.mu.Lock()
	defer s.mu.Unlock()
	return sb.endReason
}

// Dismissed reports whether the sandbox's watcher shall end.
func Dismissed(s *Supervisor, id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.byID[id].life.dismissed
}

// PutRecord writes a record as a daemon does that dies right after it.
func PutRecord(dir string, rec *Record) error {
	r, err := openRecords(dir, "/run/test")
	if err != nil {
		return err
	}
	return errors.Join(r.put(rec), r.close())
}

// ReleaseLate has a start reserve an ended sandbox, whose new life ends at once. The next start
// reserves it before the first one releases it. The result reports whether that keeps the second
// reservation.
func ReleaseLate(s *Supervisor, id string) (kept bool, err error) {
	sb, _, release, err := s.takeEnded(id, false)
	if err != nil {
		return false, err
	}
	s.mu.Lock()
	sb.life = newLife()
	s.enter(sb, phaseRunning)
	sb.life.end()
	s.enter(sb, phaseEnded)
	s.mu.Unlock()
	if _, err := s.beginStart(id, false); err != nil {
		release()
		return false, err
	}
	release()
	s.mu.Lock()
	defer s.mu.Unlock()
	kept = sb.phase == phaseStarting
	s.enterIf(sb, phaseStarting, phaseEnded)
	s.ops.Done()
	return kept, nil
}
