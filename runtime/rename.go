package runtime

import (
	"context"
	"fmt"

	"github.com/sandboxd/sandboxd/api"
)

// Rename gives a sandbox of any state another name, which no other sandbox of its tenant has. The
// hostname of a running sandbox stays until it is started again. When Rename returns, the name is
// on disk. A sandbox that is reachable by name in networks must be stopped first.
func (s *Supervisor) Rename(_ context.Context, ref, name string) (_ Record, err error) {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return Record{}, ErrClosed
	}
	sb, err := s.find(ref)
	if err == nil && (sb.phase == phaseCreating || sb.phase == phaseDeleting) {
		err = sb.errState()
	}
	if err != nil {
		s.mu.Unlock()
		return Record{}, err
	}
	s.ops.Add(1)
	s.mu.Unlock()
	defer s.ops.Done()
	sb.write.Lock()
	defer sb.write.Unlock()

	rec, from, err := s.reserveName(sb, name)
	if err != nil || from == name {
		return rec, err
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("rename sandbox %s: %w", from, err)
		}
	}()
	err = s.records.put(&rec)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil && (sb.phase == phaseDeleting || sb.phase == phaseDeleted) {
		err = sb.errState() // its record is about to be removed
	}
	if err != nil {
		delete(s.names, tenantName{rec.Tenant, name})
		return Record{}, err
	}
	delete(s.names, tenantName{rec.Tenant, from})
	sb.rec.Name = name
	s.tell(sb, api.Event{Action: api.ActionRenamed, From: from})
	s.log.Info("sandbox renamed", "id", rec.ID, "name", name, "from", from)
	return sb.rec.clone(), nil
}

// reserveName makes name one of the sandbox's, beside from, and returns the record with it. It
// needs sandbox.write.
func (s *Supervisor) reserveName(sb *sandbox, name string) (rec Record, from string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	from = sb.rec.Name
	switch {
	case sb.phase == phaseDeleting, sb.phase == phaseDeleted:
		return Record{}, from, sb.errState()
	case name == from:
		return sb.rec.clone(), from, nil
	case len(sb.rec.Network.Join) > 0 && sb.phase != phaseEnded:
		return Record{}, from, fmt.Errorf("%w: %s (%s) is reachable by its name in networks; stop it first", ErrNotEnded, from, sb.rec.ID)
	case s.nameTaken(sb.rec.Tenant, name):
		return Record{}, from, fmt.Errorf("%w: the name %q is taken", ErrExists, name)
	}
	s.names[tenantName{sb.rec.Tenant, name}] = sb
	rec = sb.rec.clone()
	rec.Name = name
	return rec, from, nil
}
