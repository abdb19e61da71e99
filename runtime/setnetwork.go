package runtime

import (
	"fmt"

	"github.com/sandboxd/sandboxd/api"
)

// SetNetwork changes the network on the record of a sandbox of any state. Edit gets the record and
// returns the network; it may refuse. The engine is not asked: the next start reads the record, and
// the caller changes what runs. When SetNetwork returns, the record, and the network before, which
// it returns too, are those that the edit saw, and the new one is on disk.
func (s *Supervisor) SetNetwork(ref string, edit func(rec *Record) (api.Network, error)) (rec Record, was api.Network, err error) {
	return s.Amend(ref, func(rec *Record) (err error) {
		rec.Network, err = edit(rec)
		return err
	})
}

// Amend changes the network, the published ports and the restart policy on the record of a sandbox
// of any state, like [Supervisor.SetNetwork].
func (s *Supervisor) Amend(ref string, edit func(rec *Record) error) (rec Record, was api.Network, err error) {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return Record{}, was, ErrClosed
	}
	sb, err := s.find(ref)
	if err == nil && (sb.phase == phaseCreating || sb.phase == phaseDeleting) {
		err = sb.errState()
	}
	if err != nil {
		s.mu.Unlock()
		return Record{}, was, err
	}
	s.ops.Add(1)
	s.mu.Unlock()
	defer s.ops.Done()
	sb.write.Lock() // a start that is under way is over then
	defer sb.write.Unlock()

	s.mu.Lock()
	if sb.phase == phaseDeleting || sb.phase == phaseDeleted {
		err = sb.errState()
	}
	rec = sb.rec.clone()
	s.mu.Unlock()
	if err != nil {
		return Record{}, was, err
	}
	was = rec.Network
	if err = edit(&rec); err != nil {
		return Record{}, was, err
	}
	err = s.records.put(&rec)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil && (sb.phase == phaseDeleting || sb.phase == phaseDeleted) {
		err = sb.errState() // its record is about to be removed
	}
	if err != nil {
		return Record{}, was, fmt.Errorf("change the record of sandbox %s: %w", rec.Name, err)
	}
	sb.rec.Network, sb.rec.Ports, sb.rec.Restart, sb.rec.Unjoined = rec.Network, rec.Ports, rec.Restart, rec.Unjoined
	s.tell(sb, api.Event{Action: api.ActionUpdated})
	return sb.rec.clone(), was, nil
}
