package runtime

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// Lease is one use of a running sandbox: while it lasts, the sandbox is not idle, unless it is a
// [Supervisor.Probe].
type Lease struct {
	Record Record
	Socket string          // path of the control socket, on which the guest protocol is spoken
	Gone   <-chan struct{} // closed when the sandbox ceases to run

	s    *Supervisor
	sb   *sandbox
	life *life
	once sync.Once
	use  bool // the sandbox is not idle meanwhile
}

// Begin takes a lease on the sandbox with this id or name. It fails with ErrState unless the
// sandbox runs. The caller must end the lease.
func (s *Supervisor) Begin(ref string) (*Lease, error) { return s.beginLease(ref, s.usable, true) }

// Rejoin takes a lease for a use that began before the sandbox was paused, or with another
// supervisor: also of a paused sandbox.
func (s *Supervisor) Rejoin(ref string) (*Lease, error) { return s.beginLease(ref, s.alive, true) }

// Probe takes a lease that leaves the sandbox idle: the daemon's own work is no use of it. Like
// Begin it fails unless the sandbox runs.
func (s *Supervisor) Probe(ref string) (*Lease, error) { return s.beginLease(ref, s.usable, false) }

// Observe is Probe also of a paused sandbox.
func (s *Supervisor) Observe(ref string) (*Lease, error) { return s.beginLease(ref, s.alive, false) }

func (s *Supervisor) beginLease(ref string, find func(ref string) (*sandbox, error), use bool) (*Lease, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, ErrClosed
	}
	sb, err := find(ref)
	if err != nil {
		return nil, err
	}
	return s.lease(sb, use), nil
}

// lease returns a lease on a live sandbox, and counts it as a use of the sandbox if use is set. It
// needs mu.
func (s *Supervisor) lease(sb *sandbox, use bool) *Lease {
	if use {
		sb.leases++
	}
	return &Lease{use: use, Record: sb.rec.clone(), Socket: s.sockets.pathOf(sb.rec.ID), Gone: sb.life.gone, s: s, sb: sb, life: sb.life}
}

// End gives the lease back; the idle time counts from the last End. A second call does nothing.
func (l *Lease) End() {
	l.once.Do(func() {
		if !l.use {
			return
		}
		l.s.mu.Lock()
		defer l.s.mu.Unlock()
		l.sb.leases--
		l.sb.idleSince = l.s.now()
		l.s.arm(l.sb)
	})
}

// Network returns the network of the sandbox as it is now; the record may be older.
func (l *Lease) Network() api.Network {
	l.s.mu.Lock()
	defer l.s.mu.Unlock()
	return l.sb.rec.clone().Network
}

// AfterGone arranges for f to be called when the sandbox ceases to run, at once if it has, unless
// stop is called before. F must neither block nor call the supervisor. It costs no goroutine, which
// waiting for Gone does.
func (l *Lease) AfterGone(f func()) (stop func()) {
	l.s.mu.Lock()
	defer l.s.mu.Unlock()
	if l.life.ended() { // also if it has been started again since
		f()
		return func() {}
	}
	if l.life.afterGone == nil {
		l.life.afterGone = make(map[*func()]struct{})
	}
	l.life.afterGone[&f] = struct{}{}
	return func() {
		l.s.mu.Lock()
		defer l.s.mu.Unlock()
		delete(l.life.afterGone, &f)
	}
}

// Hold notes that the sandbox is kept from running until release is called, so that its silence is
// not taken for a fault.
func (l *Lease) Hold() (release func()) {
	l.s.mu.Lock()
	defer l.s.mu.Unlock()
	l.sb.holds++
	return sync.OnceFunc(func() {
		l.s.mu.Lock()
		defer l.s.mu.Unlock()
		l.sb.holds--
		l.sb.heldUntil = time.Now()
	})
}

// Held returns the end of the last time that the sandbox was kept from running, by any lease or a
// pause: now, while it is. It is a time of the real clock, in which answers of the sandbox are
// awaited.
func (l *Lease) Held() time.Time {
	l.s.mu.Lock()
	defer l.s.mu.Unlock()
	if l.sb.holds > 0 || l.sb.phase.changing() || l.sb.rec.State == api.StatePaused {
		return time.Now()
	}
	return l.sb.heldUntil
}

// Read is for readers of a sandbox's directories, whether it runs or has ended: it returns the
// record and a channel that is closed when removal of its files begins. Everything read before that
// is whole. It does not count as a use of the sandbox.
func (s *Supervisor) Read(ref string) (Record, <-chan struct{}, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return Record{}, nil, ErrClosed
	}
	sb, err := s.find(ref)
	switch {
	case err != nil:
		return Record{}, nil, err
	case sb.phase == phaseDeleting:
		return Record{}, nil, sb.errState()
	case sb.phase == phaseCreating:
		return Record{}, nil, fmt.Errorf("%w: %s (%s) is being created", ErrState, sb.rec.Name, sb.rec.ID)
	case sb.rec.FilesGone:
		return Record{}, nil, errFilesGone(&sb.rec)
	case sb.rec.Fresh:
		return Record{}, nil, errFresh(&sb.rec)
	}
	sb.filesUsed = s.now()
	return sb.rec.clone(), sb.filesGone, nil
}

// Kill ends every process of a sandbox for a reason that the record will show, and returns when it
// is stopped. The sandbox remains to be looked at until it is deleted.
func (s *Supervisor) Kill(ctx context.Context, id, reason string) error {
	s.mu.Lock()
	sb, err := s.find(id)
	if err != nil {
		s.mu.Unlock()
		return err
	}
	return s.kill(ctx, sb, reason)
}

// Kill ends the life of the sandbox in which the lease began, for a reason that the record will
// show. If that has ended, it does nothing, also if the sandbox has been started again.
func (l *Lease) Kill(ctx context.Context, reason string) error {
	l.s.mu.Lock()
	if l.sb.life != l.life {
		l.s.mu.Unlock()
		return nil
	}
	return l.s.kill(ctx, l.sb, reason)
}

// kill ends the present life of the sandbox, if it has one. It takes mu over.
func (s *Supervisor) kill(ctx context.Context, sb *sandbox, reason string) error {
	l := sb.life
	if l.ended() {
		s.mu.Unlock()
		return nil
	}
	if lives(sb.rec.State) {
		s.beginEnd(sb, reason)
	}
	l.kills.Add(1)
	s.mu.Unlock()
	err := ignoreNotFound(s.engine.Kill(ctx, sb.rec.ID))
	l.kills.Done()
	if err != nil {
		return fmt.Errorf("kill sandbox %s: %w", sb.rec.ID, err)
	}
	select {
	case <-l.gone:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for the end of sandbox %s: %w", sb.rec.ID, context.Cause(ctx))
	}
}
