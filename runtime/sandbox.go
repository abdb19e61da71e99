package runtime

import (
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// sandbox is one entry of the supervisor. Supervisor.mu guards its fields, but for the mutex.
type sandbox struct {
	rec       Record
	phase     phase         // changed by Supervisor.enter alone
	started   chan struct{} // closed when the phase is no longer phaseStarting; nil before the first
	life      *life         // never nil; Start replaces one that has ended
	endReason string        // reason for ending this life, which the record will show; empty while it may live

	leases    int       // number of leases not released
	idleSince time.Time // end of the last lease, or start of the life
	holds     int       // number of Lease.Hold not released
	heldUntil time.Time // end of the last hold or pause

	healthSaved time.Time // last write of a health to disk

	asked api.Limits // of a change under way; zero if there is none

	filesGone chan struct{} // closed when removal of its files begins; replaced if they stay
	filesUsed time.Time     // last read of its files, start or rollback; zero if none
	deletion  *deletion     // nil unless a deletion is under way
	untold    bool          // it has ended during its deletion, which will be told instead

	// write is held by the one goroutine that writes the record, and taken before Supervisor.mu. A
	// creation holds it until the record of its start is on disk.
	write   sync.Mutex
	unsaved bool // the record of its end is not on disk, and is to be written again
}

// life is one life of a sandbox, from a start to its end. Supervisor.mu guards its fields, but for
// the channels and pidfd.
type life struct {
	pidfd     *os.File             // nil while it is created, and if it was found ended; closed by its watcher
	watched   chan struct{}        // closed when its watcher has returned; nil if it never had one
	dismissed bool                 // the watcher shall return
	gone      chan struct{}        // closed when it has ended
	afterGone map[*func()]struct{} // functions to call then
	// kills counts the operations that end this life by the sandbox's id, which the next life has too:
	// that begins after them. An operation is added before gone is closed.
	kills sync.WaitGroup
}

type deletion struct {
	done chan struct{} // closed when err is set
	err  error
}

func newLife() *life { return &life{gone: make(chan struct{})} }

func newSandbox(rec Record, p phase) *sandbox {
	return &sandbox{rec: rec, phase: p, life: newLife(), filesGone: make(chan struct{})}
}

// ended reports whether the life is over. It needs Supervisor.mu.
func (l *life) ended() bool {
	select {
	case <-l.gone:
		return true
	default:
		return false
	}
}

// end marks the life as over. It needs Supervisor.mu.
func (l *life) end() {
	if l.ended() {
		return
	}
	close(l.gone)
	for f := range l.afterGone {
		(*f)()
	}
	l.afterGone = nil
}

// processesGone reports whether the processes of the life have ended, or its watcher has. It needs
// Supervisor.mu.
func (l *life) processesGone() bool {
	conn, err := l.pidfd.SyscallConn()
	if err != nil {
		return true // closed by its watcher
	}
	ended := true
	err = conn.Control(func(fd uintptr) { ended, _ = readable(int(fd)) })
	return err != nil || ended
}

// enter takes the sandbox to another phase. A transition that the table does not have is a bug: it
// is logged, and made, because a sandbox that is held in a wrong phase could never be deleted. It
// needs mu.
func (s *Supervisor) enter(sb *sandbox, p phase) {
	if !sb.phase.mayBecome(p) {
		s.log.Error("illegal phase of a sandbox", "id", sb.rec.ID, "from", sb.phase.String(), "to", p.String())
	}
	if sb.phase == phaseStarting {
		close(sb.started)
	}
	if p == phaseStarting {
		sb.started = make(chan struct{})
	}
	sb.phase = p
}

// enterIf takes the sandbox from one phase to another; in any other phase it does nothing. It needs
// mu.
func (s *Supervisor) enterIf(sb *sandbox, from, to phase) {
	if sb.phase == from {
		s.enter(sb, to)
	}
}

// beginEnd notes the reason for ending a live sandbox, and that nothing new begins in it. The first
// reason stays. It needs mu.
func (s *Supervisor) beginEnd(sb *sandbox, reason string) {
	if sb.endReason == "" {
		sb.endReason = reason
	}
	if sb.phase.live() {
		s.enter(sb, phaseEnding)
	}
}

// markEnded notes that the life is over; a deletion stays one. A second call does nothing: the
// watcher may see the end of a sandbox that the reconciler has given up. It needs mu.
func (s *Supervisor) markEnded(sb *sandbox) {
	if sb.life.ended() {
		return
	}
	sb.life.end()
	if sb.phase != phaseDeleting {
		s.enter(sb, phaseEnded)
	}
}

// find returns the sandbox with this id, of any tenant, or with this name of the daemon's own. It
// needs mu.
func (s *Supervisor) find(ref string) (*sandbox, error) {
	sb := s.byID[ref]
	if sb == nil {
		sb = s.names[tenantName{"", ref}]
	}
	if sb == nil {
		return nil, fmt.Errorf("%w: %q", ErrNotFound, ref)
	}
	return sb, nil
}

// usable finds a sandbox that runs and shall go on running; others are ErrState. It needs mu.
func (s *Supervisor) usable(ref string) (*sandbox, error) {
	sb, err := s.alive(ref)
	switch {
	case err != nil:
		return nil, err
	case sb.phase == phasePausing:
		return nil, fmt.Errorf("%w: to pause %s (%s) is under way", ErrPaused, sb.rec.Name, sb.rec.ID)
	case sb.phase == phaseResuming:
		return nil, fmt.Errorf("%w: to resume %s (%s) is under way", ErrPaused, sb.rec.Name, sb.rec.ID)
	case sb.phase == phasePaused:
		return nil, fmt.Errorf("%w: %s (%s) is paused", ErrPaused, sb.rec.Name, sb.rec.ID)
	}
	return sb, nil
}

// alive finds a sandbox that runs or is paused, and shall not end; others are ErrState. It needs
// mu.
func (s *Supervisor) alive(ref string) (*sandbox, error) {
	sb, err := s.find(ref)
	switch {
	case err != nil:
		return nil, err
	case sb.phase.live():
		return sb, nil
	}
	return nil, sb.errState()
}

// stillAlive checks, after a wait for sandbox.write, that sb is live and still the one that ref has
// named. It needs mu.
func (s *Supervisor) stillAlive(sb *sandbox, ref string) error {
	now, err := s.alive(sb.rec.ID)
	if err == nil && now != sb {
		err = fmt.Errorf("%w: %q", ErrNotFound, ref)
	}
	return err
}

// errState returns the error for a use of a sandbox that is not live. It needs Supervisor.mu.
func (sb *sandbox) errState() error {
	switch {
	case sb.phase == phaseDeleting:
		return fmt.Errorf("%w: %s (%s) is being deleted", ErrState, sb.rec.Name, sb.rec.ID)
	case sb.phase == phaseEnding:
		return fmt.Errorf("%w: %s (%s) is being stopped: %s", ErrState, sb.rec.Name, sb.rec.ID, sb.endReason)
	case sb.rec.Reason != "":
		return fmt.Errorf("%w: %s (%s) is %s: %s", ErrState, sb.rec.Name, sb.rec.ID, sb.rec.State, sb.rec.Reason)
	}
	return fmt.Errorf("%w: %s (%s) is %s", ErrState, sb.rec.Name, sb.rec.ID, sb.rec.State)
}

// seen returns the record as it is shown, with what changes without a write. It needs
// Supervisor.mu.
func (sb *sandbox) seen() Record {
	rec := sb.rec.clone()
	if sb.phase == phaseRunning && sb.canIdle() {
		rec.IdleDeadline = sb.idleAt().UTC()
	}
	return rec
}

// lives reports whether a sandbox of this state has processes.
func lives(state api.SandboxState) bool { return state == api.StateRunning || state == api.StatePaused }
