package runtime

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/runtime/cgroup"
)

// Errors of the supervisor, beside those of the engine.
var (
	ErrState    = errors.New("sandbox is not running")      // it is being created, or has ended
	ErrPaused   = fmt.Errorf("%w now", ErrState)            // it is to be resumed first
	ErrNotEnded = errors.New("sandbox has not ended")       // only one that has can be started
	ErrTooMany  = errors.New("too many sandboxes")          // [Options.MaxSandboxes] exist
	ErrClosed   = errors.New("the supervisor is shut down") // or about to be
)

const (
	defaultMaxSandboxes = 1000
	defaultTimeout      = time.Hour
	defaultIdleTimeout  = 10 * time.Minute

	// createTimeout bounds how long the engine may take to make a sandbox, which is milliseconds where nothing hangs.
	createTimeout = time.Minute
	// undoTimeout bounds what must go on although the request that started it was cancelled.
	undoTimeout = 30 * time.Second
	// killRetry is when a sandbox that should have ended is killed again.
	killRetry = 2 * time.Second
)

// Options configure a [Supervisor]. RuntimeDir is needed; everything else has a default.
type Options struct {
	RuntimeDir   string        // control sockets lie in its directory "s"
	MaxSandboxes int           // of all states; default 1000
	Timeout      time.Duration // of a sandbox that asks for none; default an hour
	IdleTimeout  time.Duration // of a sandbox that asks for none; default ten minutes
	IODevice     cgroup.Device // see [Spec]; the default is none
	// Exercise is called for a sandbox that is about to be parked, with the path of its control socket; where it fails, nothing
	// is parked. Default: nothing.
	Exercise    func(ctx context.Context, socket string) error
	PoolChanged func()       // called when a parked sandbox is claimed or gone; it must neither block nor call the supervisor
	Log         *slog.Logger // default: discarded
}

// Supervisor holds all sandboxes of one daemon from their creation to their deletion: it keeps their records, watches
// their processes, and ends them at their deadline. Its methods may be called from several goroutines.
//
// A sandbox is in one of these states. Deleting takes it out of any of them but creating.
//
//	          Create              Pause
//	─▶ creating ───▶ running ◀────────────▶ paused
//	                  ▲  │       Resume       │
//	                  │  ├────────────────────┘
//	                  │  ├── Stop, its deadline, its idle timeout, its init's end ──▶ stopped ──┐
//	                  │  └── the end of the launcher that held it ──────────────────▶ lost ─────┤
//	                  └────────────────────────────── Start ───────────────────────────────────┘
type Supervisor struct {
	engine  Engine
	records *records
	sockets *sockets
	opts    Options
	log     *slog.Logger

	ops      sync.WaitGroup // creations and deletions under way
	watchers sync.WaitGroup

	mu      sync.Mutex
	closed  bool
	closing chan struct{} // closed with it
	byID    map[string]*sandbox
	names   map[tenantName]*sandbox
	pool    pool
}

// tenantName is a sandbox's name within its tenant.
type tenantName struct{ tenant, name string }

// sandbox is one entry of the supervisor. Its fields are guarded by Supervisor.mu, but for the channels.
type sandbox struct {
	rec       Record
	pidfd     *os.File // nil while creating, and where the sandbox was found ended; closed by its watcher
	dismissed bool     // its watcher shall end
	active    int      // leases not ended
	idleSince time.Time
	turning   string // "pause" or "resume", while that is being done
	starting  bool   // by Start; the state is what it was
	killing   string // why it is being killed; empty while it may live
	// kills are those who end this life of the sandbox by its id, which the next life has too: that begins after them. One is added
	// with Supervisor.mu, and before isGone.
	kills     sync.WaitGroup
	deletion  *deletion // nil unless someone deletes it now
	holds     int       // of leases
	heldUntil time.Time
	doomed    chan struct{} // closed when a deletion begins; a new one when it has failed
	isGone    bool
	saved     chan struct{}        // closed when the record of its start is on disk
	read      time.Time            // when somebody last began to read its directories, start it or roll it back
	unsaved   bool                 // the disk has refused the record of its end, which is to be written again
	write     sync.Mutex           // taken before Supervisor.mu by who writes the record after that
	gone      chan struct{}        // closed when it ceases to run
	afterGone map[*func()]struct{} // to be called then
	watched   chan struct{}        // closed when nobody watches pidfd any more; nil where nobody ever did
}

type deletion struct {
	done chan struct{}
	err  error
}

// Open reads the records in dir, adopts what the engine still runs, and puts right what a crash left half done. No other
// supervisor may have dir open.
func Open(ctx context.Context, dir string, engine Engine, opts Options) (_ *Supervisor, err error) {
	opts.MaxSandboxes = cmp.Or(opts.MaxSandboxes, defaultMaxSandboxes)
	opts.Timeout = cmp.Or(opts.Timeout, defaultTimeout)
	opts.IdleTimeout = cmp.Or(opts.IdleTimeout, defaultIdleTimeout)
	s := &Supervisor{
		engine:  engine,
		opts:    opts,
		log:     cmp.Or(opts.Log, slog.New(slog.DiscardHandler)),
		closing: make(chan struct{}),
		byID:    make(map[string]*sandbox),
		names:   make(map[tenantName]*sandbox),
	}
	var undo cleanup
	defer undo.unwind(&err)
	if s.records, err = openRecords(dir); err != nil {
		return nil, err
	}
	undo.add("close records", s.records.close)
	if s.sockets, err = openSockets(opts.RuntimeDir); err != nil {
		return nil, err
	}
	undo.add("close socket directory", s.sockets.close)
	undo.add("stop watching", func() error { s.stopWatching(); return nil })
	if err := s.adopt(ctx); err != nil {
		return nil, fmt.Errorf("adopt sandboxes: %w", err)
	}
	undo.release()
	s.watchers.Add(1)
	go s.reconciler(context.WithoutCancel(ctx)) // until Close
	return s, nil
}

// adopt compares the records with what the engine runs. It is called before anyone else can reach s, but for the watchers that it starts.
func (s *Supervisor) adopt(ctx context.Context) error {
	recs, err := s.records.all()
	if err != nil {
		return err
	}
	list, err := s.engine.List(ctx)
	if err != nil {
		return fmt.Errorf("list what runs: %w", err)
	}
	leftovers, err := s.engine.Leftovers(ctx)
	if err != nil {
		for _, st := range list {
			_ = st.Pidfd.Close() // never read or written
		}
		return fmt.Errorf("list what is left of sandboxes: %w", err)
	}
	running := make(map[string]*Started, len(list))
	for _, st := range list {
		running[st.ID] = st
	}
	// What no record claims is closed at the end, whichever way this ends.
	defer func() {
		for _, st := range running {
			_ = st.Pidfd.Close() // never read or written
		}
	}()
	for _, rec := range recs {
		st := running[rec.ID]
		switch {
		case rec.Ephemeral:
			// The request that it served went with the daemon that answered it.
			if err := ignoreNotFound(s.engine.Delete(ctx, rec.ID)); err != nil {
				s.log.Error("sandbox of a request that was cut off could not be deleted", "id", rec.ID, "error", err)
				continue // tried again below, as what nobody owns; its record goes when the next daemon starts
			}
			if err := s.records.remove(rec.ID); err != nil {
				return err
			}
			if st != nil {
				_ = st.Pidfd.Close() // never read or written
				delete(running, rec.ID)
			}
			leftovers = slices.DeleteFunc(leftovers, func(id string) bool { return id == rec.ID })
			s.log.Info("sandbox of a request that was cut off removed", "id", rec.ID)
			continue
		case rec.State == api.StateCreating && st == nil && !slices.Contains(leftovers, rec.ID):
			// Its creation came to nothing and was never answered: nobody knows of it, and nobody will. One that has left
			// something may have been answered, and is told of like any other that has ended.
			if err := ignoreNotFound(s.engine.Delete(ctx, rec.ID)); err != nil {
				s.log.Error("half-made sandbox could not be deleted", "id", rec.ID, "error", err)
				continue // as above
			}
			if err := s.records.remove(rec.ID); err != nil {
				return err
			}
			s.log.Info("half-made sandbox removed", "id", rec.ID)
			continue
		case st != nil && s.sockets.exists(rec.ID):
			if state := liveState(st); rec.State != state { // it was answered that it is created, started, paused or resumed, or about to be
				if !lives(rec.State) && rec.State != api.StateCreating { // how it ended before, and what was asked for then, is of another life
					rec.Exit, rec.Idle = nil, false
					rec.Life++
				}
				rec.State, rec.Reason, rec.Fresh, rec.EndedAt = state, "", false, time.Time{}
				if err := s.records.put(rec); err != nil {
					return err
				}
			}
			// An update that the crash cut off was applied, perhaps, and not recorded: what holds counts. The next write of
			// the record has it.
			if !st.Deadline.IsZero() {
				rec.Limits, rec.Deadline = st.Limits, st.Deadline
			}
			sb := s.enter(*rec)
			delete(running, rec.ID)
			if err := s.run(ctx, sb, rec, st); err != nil {
				return fmt.Errorf("watch sandbox %s: %w", rec.ID, err)
			}
			s.log.Info("sandbox adopted", "id", rec.ID, "name", rec.Name)
			continue
		case st != nil:
			// It runs, but nothing can be asked of it: a cleaner of temporary files took its socket.
			if err := s.engine.Kill(ctx, rec.ID); err != nil && !errors.Is(err, ErrNotFound) {
				return fmt.Errorf("kill unreachable sandbox %s: %w", rec.ID, err)
			}
			rec.State, rec.Reason = api.StateLost, "its control socket was removed while no daemon was running"
			_ = st.Pidfd.Close() // never read or written
			delete(running, rec.ID)
		case rec.State == api.StateStopped || rec.State == api.StateLost:
			// As it was.
		case time.Now().After(rec.Deadline):
			rec.State, rec.Reason = api.StateStopped, "deadline reached while no daemon was running"
		default:
			rec.State, rec.Reason = api.StateLost, reasonUnseen
		}
		rec.PID = 0
		if rec.EndedAt.IsZero() { // nobody has seen it: from now on somebody may
			rec.EndedAt = time.Now().UTC()
		}
		sb := s.enter(*rec)
		sb.markGone()
		if err := s.putEnd(sb, &sb.rec); err != nil { // a disk that is full is no reason to run nothing
			s.log.Error("end of sandbox is not on disk, trying again", "id", rec.ID, "error", err)
		}
	}
	// One that cannot be deleted is no reason to run none: the reconciler tries on.
	for id := range running {
		if err := ignoreNotFound(s.engine.Delete(ctx, id)); err != nil {
			s.log.Error("sandbox without a record could not be deleted, trying again", "id", id, "error", err)
			continue
		}
		s.log.Warn("sandbox without a record deleted", "id", id)
	}
	// A crash of daemon and launcher together can leave a directory of a creation whose record was not yet written.
	for _, id := range leftovers {
		if s.byID[id] != nil {
			continue // ended, and not yet deleted by its user
		}
		if err := ignoreNotFound(s.engine.Delete(ctx, id)); err != nil {
			s.log.Error("what is left of a sandbox without a record could not be deleted, trying again", "id", id, "error", err)
			continue
		}
		s.log.Info("what was left of a sandbox without a record is deleted", "id", id)
	}
	return s.sockets.removeStale(func(id string) bool {
		s.mu.Lock() // what was adopted may be ending already
		defer s.mu.Unlock()
		sb := s.byID[id]
		return sb != nil && lives(sb.rec.State)
	})
}

// enter puts a record into the maps.
func (s *Supervisor) enter(rec Record) *sandbox {
	sb := &sandbox{rec: rec, gone: make(chan struct{}), saved: make(chan struct{}), doomed: make(chan struct{})}
	if rec.State != api.StateCreating {
		close(sb.saved)
	}
	s.byID[rec.ID], s.names[tenantName{rec.Tenant, rec.Name}] = sb, sb
	return sb
}

// Create makes a sandbox, or claims one that is parked and fits, and returns when it runs and its record is on disk. On
// error nothing of it is left.
func (s *Supervisor) Create(ctx context.Context, req Request) (Record, error) {
	sb, p, err := s.reserve(req, true)
	if err != nil {
		return Record{}, err
	}
	if p != nil {
		rec, err := s.claim(ctx, sb, p, &req)
		s.ops.Done()
		if err == nil || ctx.Err() != nil {
			return rec, err
		}
		// It has just ended, or cannot be changed into what is asked for. If that cannot be had at all, a new one says why.
		s.log.Info("a parked sandbox could not be claimed", "id", p.id, "error", err)
		if sb, _, err = s.reserve(req, false); err != nil {
			return Record{}, err
		}
	}
	defer s.ops.Done()
	return s.create(ctx, sb, req)
}

// create is Create for a sandbox that has to be made.
func (s *Supervisor) create(ctx context.Context, sb *sandbox, req Request) (_ Record, err error) {
	rec := sb.rec // ours alone to change while the state is creating; what others see is sb.rec
	id := rec.ID
	defer func() {
		if err != nil {
			err = fmt.Errorf("create sandbox %s: %w", rec.Name, err)
		}
	}()
	var undo cleanup
	defer undo.unwind(&err)
	undo.add("release name", func() error { s.forget(sb); return nil })

	// The intent goes to disk while the engine works: a daemon that starts after a crash then knows what to take back.
	intent := make(chan error, 1)
	go func(rec Record) { intent <- s.records.put(&rec) }(rec)
	intended := sync.OnceValue(func() error { return <-intent })
	undo.add("remove record", func() error {
		_ = intended() // reported where it is waited for below
		return s.records.remove(id)
	})

	control, err := s.sockets.listen(id)
	if err != nil {
		return Record{}, err
	}
	undo.add("remove control socket", func() error { return s.sockets.remove(id) })

	// Also after a failure: where ctx ended or the connection broke, nobody knows how far the engine came.
	undo.add("delete sandbox", func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
		defer cancel()
		return ignoreNotFound(s.engine.Delete(ctx, id))
	})
	spec := req.spec(id, rec.Name, rec.Deadline)
	spec.IODevice = s.opts.IODevice
	// It is awaited whether or not someone still wants it: the deletion of one that the engine has not begun finds nothing,
	// and it would begin after that.
	making, done := context.WithTimeout(context.WithoutCancel(ctx), createTimeout)
	defer done()
	started, err := s.engine.Create(making, spec, control)
	// From here init has the socket, or nobody has: a copy kept here would let connections hang after init died.
	cerr := control.Close()
	if err != nil {
		return Record{}, err
	}
	if cerr != nil {
		return Record{}, errors.Join(fmt.Errorf("close control socket: %w", cerr), started.Pidfd.Close())
	}
	if ctx.Err() != nil {
		return Record{}, errors.Join(context.Cause(ctx), started.Pidfd.Close())
	}
	if err := intended(); err != nil {
		return Record{}, errors.Join(err, started.Pidfd.Close())
	}
	rec.State, rec.Enforced, rec.PID = api.StateRunning, started.Enforced, PIDOf(started.Pidfd)
	if err := s.run(ctx, sb, &rec, started); err != nil {
		return Record{}, err
	}
	undo.release()
	// The answer does not wait for a second write: a record that says "creating" of a sandbox that runs is taken for what
	// it is by the next daemon. What writes later waits for this.
	s.ops.Go(func() {
		defer close(sb.saved)
		if err := s.records.put(&rec); err != nil {
			s.log.Error("start of sandbox is not on disk", "id", id, "error", err)
		}
	})
	s.log.Info("sandbox created", "id", id, "name", rec.Name, "image", rec.Image, "profile", rec.Profile)
	return rec.clone(), nil
}

// reserve claims an id and a name, and counts an operation that the caller ends with ops.Done. With pooled it takes a parked
// sandbox that fits, if there is one, and its id.
func (s *Supervisor) reserve(req Request, pooled bool) (*sandbox, *parked, error) {
	now := time.Now().UTC()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, nil, ErrClosed
	}
	if len(s.byID) >= s.opts.MaxSandboxes {
		return nil, nil, fmt.Errorf("%w: %d exist, which is the most this daemon holds", ErrTooMany, len(s.byID))
	}
	name := req.Name
	switch {
	case name == "":
		for name = newName(); s.nameTaken(req.Tenant, name); {
			name += "-" + newID()[:3]
		}
	case s.nameTaken(req.Tenant, name):
		return nil, nil, fmt.Errorf("%w: the name %q is taken", ErrExists, name)
	}
	var p *parked
	id := s.unusedID(req.Tenant)
	if pooled {
		if p = s.take(&req); p != nil {
			id = p.id
		}
	}
	sb := s.enter(Record{
		Sandbox: api.Sandbox{
			ID:          id,
			Name:        name,
			Image:       req.Image,
			ImageDigest: req.ImageDigest,
			Snapshot:    req.Snapshot,
			State:       api.StateCreating,
			Profile:     req.Profile.Name,
			Labels:      maps.Clone(req.Labels),
			Limits:      mergeLimits(req.Limits, req.Defaults),
			Env:         slices.Clone(req.Env),
			Cwd:         req.Cwd,
			User:        req.User,
			CreatedAt:   now,
			Deadline:    now.Add(cmp.Or(req.Timeout, s.opts.Timeout)),
			IdleTimeout: cmp.Or(req.IdleTimeout, s.opts.IdleTimeout).Seconds(),
			Command:     slices.Clone(req.Command),
			TTY:         req.TTY,
			StdinOpen:   req.StdinOpen,
		},
		Tenant:    req.Tenant,
		Timeout:   cmp.Or(req.Timeout, s.opts.Timeout),
		Explicit:  req.Limits,
		ImageEnv:  slices.Clone(req.ImageEnv),
		Rootfs:    req.Rootfs,
		Ephemeral: req.Ephemeral,
	})
	s.ops.Add(1)
	return sb, p, nil
}

// nameTaken reports whether name already refers to a sandbox that the tenant can look up. Ids and names of a tenant share
// one space, so that neither can hide the other. The ids of other tenants are free to it: a conflict would tell that they
// exist. The daemon's own tenant shares the space with every id, because most methods find a sandbox by id or own name.
func (s *Supervisor) nameTaken(tenant, name string) bool {
	if s.names[tenantName{tenant, name}] != nil {
		return true
	}
	if sb := s.byID[name]; sb != nil && (tenant == "" || sb.rec.Tenant == tenant) {
		return true
	}
	p := s.pool.parked[name]
	return p != nil && (tenant == "" || p.fixed.Tenant == tenant)
}

// unusedID returns an id for a sandbox of the tenant. It needs mu.
func (s *Supervisor) unusedID(tenant string) string {
	for {
		id := newID()
		if s.byID[id] == nil && s.pool.parked[id] == nil && !s.nameTaken(tenant, id) && !s.nameTaken("", id) {
			return id
		}
	}
}

func (s *Supervisor) forget(sb *sandbox) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.byID, sb.rec.ID)
	delete(s.names, tenantName{sb.rec.Tenant, sb.rec.Name})
	sb.markGone()
}

// markGone needs Supervisor.mu.
func (sb *sandbox) markGone() {
	if !sb.isGone {
		sb.isGone = true
		close(sb.gone)
		for f := range sb.afterGone {
			(*f)()
		}
		sb.afterGone = nil
	}
}

// AfterGone arranges for f to be called when the sandbox ceases to run, at once if it has, unless stop is called before.
// F must neither block nor call the supervisor. It costs no goroutine, which waiting for Gone does.
func (l *Lease) AfterGone(f func()) (stop func()) {
	l.s.mu.Lock()
	defer l.s.mu.Unlock()
	select {
	case <-l.Gone: // also where it has been started again since
		f()
		return func() {}
	default:
	}
	if l.sb.afterGone == nil {
		l.sb.afterGone = make(map[*func()]struct{})
	}
	l.sb.afterGone[&f] = struct{}{}
	return func() {
		l.s.mu.Lock()
		defer l.s.mu.Unlock()
		delete(l.sb.afterGone, &f)
	}
}

// run makes a started sandbox the state running, with the deadline of rec, and watches it.
func (s *Supervisor) run(ctx context.Context, sb *sandbox, rec *Record, started *Started) error {
	pid := PIDOf(started.Pidfd)
	pidfd, err := pollable(started.Pidfd)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	sb.pidfd = pidfd
	sb.idleSince = time.Now()
	sb.watched = make(chan struct{})
	if sb.isGone { // started again
		sb.isGone, sb.gone, sb.killing, sb.dismissed = false, make(chan struct{}), "", false
	}
	sb.rec.State, sb.rec.Reason, sb.rec.Deadline = liveState(started), "", rec.Deadline
	sb.rec.Enforced, sb.rec.PID, sb.rec.Fresh = started.Enforced, pid, false
	sb.rec.Life, sb.rec.Idle, sb.rec.Exit, sb.rec.EndedAt = rec.Life, rec.Idle, rec.Exit, time.Time{}
	sb.unsaved = false
	s.arm(sb)
	s.watchers.Add(1)
	go s.watch(context.WithoutCancel(ctx), sb) // it outlives the request, and ends when it is dismissed
	return nil
}

// liveState is the state that the engine says: a crash may have been between its pause and the record.
func liveState(started *Started) api.SandboxState {
	if started.Paused {
		return api.StatePaused
	}
	return api.StateRunning
}

// Lookup returns the sandbox of the tenant with this id or name. It is the one place where a reference of a caller becomes
// a sandbox: the id of another tenant's sandbox fails with [ErrNotFound], like one that does not exist.
func (s *Supervisor) Lookup(tenant, ref string) (Record, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sb := s.byID[ref]
	if sb == nil || sb.rec.Tenant != tenant {
		sb = s.names[tenantName{tenant, ref}]
	}
	if sb == nil {
		return Record{}, fmt.Errorf("%w: %q", ErrNotFound, ref)
	}
	return sb.rec.clone(), nil
}

// Get returns the sandbox with this id, of any tenant, or with this name of the daemon's own.
func (s *Supervisor) Get(ref string) (Record, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sb, err := s.find(ref)
	if err != nil {
		return Record{}, err
	}
	return sb.rec.clone(), nil
}

// find returns the sandbox with this id, of any tenant, or with this name of the daemon's own. It needs mu.
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

// Filter chooses sandboxes of one tenant; the zero value chooses all of the daemon's own.
type Filter struct {
	Tenant     string            // exactly this one
	AllTenants bool              // of every tenant: for the daemon's housekeeping, never for a caller
	Labels     map[string]string // all of them must be there with these values
	State      api.SandboxState
	Limit      int
}

// List returns the sandboxes that filter chooses, oldest first.
func (s *Supervisor) List(filter Filter) []Record {
	s.mu.Lock()
	var list []Record
	for _, sb := range s.byID {
		if filter.match(&sb.rec) {
			list = append(list, sb.rec.clone())
		}
	}
	s.mu.Unlock()
	slices.SortFunc(list, func(a, b Record) int {
		return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), cmp.Compare(a.ID, b.ID))
	})
	if filter.Limit > 0 && len(list) > filter.Limit {
		list = list[:filter.Limit]
	}
	return list
}

func (f *Filter) match(rec *Record) bool {
	if !f.AllTenants && rec.Tenant != f.Tenant {
		return false
	}
	if f.State != "" && rec.State != f.State {
		return false
	}
	for k, v := range f.Labels {
		if got, ok := rec.Labels[k]; !ok || got != v {
			return false
		}
	}
	return true
}

// Count is how many sandboxes of any state there are.
func (s *Supervisor) Count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.byID)
}

// Lease is one use of a running sandbox: while it lasts, the sandbox is not idle.
type Lease struct {
	Record Record
	Socket string          // path of the control socket, on which the guest protocol is spoken
	Gone   <-chan struct{} // closed when the sandbox ceases to run

	s    *Supervisor
	sb   *sandbox
	once sync.Once
}

// Begin takes a lease on the sandbox with this id or name. It fails with ErrState unless the sandbox runs. The caller
// must end the lease.
func (s *Supervisor) Begin(ref string) (*Lease, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, ErrClosed
	}
	sb, err := s.usable(ref)
	if err != nil {
		return nil, err
	}
	return s.lease(sb), nil
}

// Rejoin is Begin for a use that began before the sandbox was paused, or with another supervisor: of a paused sandbox too.
func (s *Supervisor) Rejoin(ref string) (*Lease, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, ErrClosed
	}
	sb, err := s.alive(ref)
	if err != nil {
		return nil, err
	}
	return s.lease(sb), nil
}

// lease needs mu.
func (s *Supervisor) lease(sb *sandbox) *Lease {
	sb.active++
	return &Lease{Record: sb.rec.clone(), Socket: s.sockets.pathOf(sb.rec.ID), Gone: sb.gone, s: s, sb: sb}
}

// usable finds a sandbox that runs and shall go on running; others are ErrState. It needs mu.
func (s *Supervisor) usable(ref string) (*sandbox, error) {
	sb, err := s.alive(ref)
	switch {
	case err != nil:
		return nil, err
	case sb.turning != "":
		return nil, fmt.Errorf("%w: to %s %s (%s) is under way", ErrPaused, sb.turning, sb.rec.Name, sb.rec.ID)
	case sb.rec.State == api.StatePaused:
		return nil, fmt.Errorf("%w: %s (%s) is paused", ErrPaused, sb.rec.Name, sb.rec.ID)
	}
	return sb, nil
}

// alive finds a sandbox that runs or is paused, and shall not end; others are ErrState. It needs mu.
func (s *Supervisor) alive(ref string) (*sandbox, error) {
	sb, err := s.find(ref)
	if err != nil {
		return nil, err
	}
	switch lives := lives(sb.rec.State); {
	case sb.deletion != nil:
		return nil, fmt.Errorf("%w: %s (%s) is being deleted", ErrState, sb.rec.Name, sb.rec.ID)
	case lives && sb.killing != "":
		return nil, fmt.Errorf("%w: %s (%s) is being stopped: %s", ErrState, sb.rec.Name, sb.rec.ID, sb.killing)
	case !lives && sb.rec.Reason != "":
		return nil, fmt.Errorf("%w: %s (%s) is %s: %s", ErrState, sb.rec.Name, sb.rec.ID, sb.rec.State, sb.rec.Reason)
	case !lives:
		return nil, fmt.Errorf("%w: %s (%s) is %s", ErrState, sb.rec.Name, sb.rec.ID, sb.rec.State)
	}
	return sb, nil
}

// lives says that a sandbox of this state has processes.
func lives(state api.SandboxState) bool { return state == api.StateRunning || state == api.StatePaused }

// End gives the lease back; the idle time counts from the last End. A second call does nothing.
func (l *Lease) End() {
	l.once.Do(func() {
		l.s.mu.Lock()
		defer l.s.mu.Unlock()
		l.sb.active--
		l.sb.idleSince = time.Now()
		l.s.arm(l.sb)
	})
}

// Hold says that the sandbox is kept from running until release is called, so that nobody takes its silence for its fault.
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

// Held is until when the sandbox was last held by any lease: now, while it is.
func (l *Lease) Held() time.Time {
	l.s.mu.Lock()
	defer l.s.mu.Unlock()
	if l.sb.holds > 0 || l.sb.turning != "" || l.sb.rec.State == api.StatePaused {
		return time.Now()
	}
	return l.sb.heldUntil
}

// Read is for those who read a sandbox's directories, whether it runs or has ended: it returns the record and a channel
// that is closed when a deletion of the sandbox begins. What has been read before that is whole. It is no use of the sandbox.
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
	case sb.deletion != nil:
		return Record{}, nil, fmt.Errorf("%w: %s (%s) is being deleted", ErrState, sb.rec.Name, sb.rec.ID)
	case sb.rec.State == api.StateCreating:
		return Record{}, nil, fmt.Errorf("%w: %s (%s) is being created", ErrState, sb.rec.Name, sb.rec.ID)
	case sb.rec.Fresh:
		return Record{}, nil, errFresh(&sb.rec)
	}
	sb.read = time.Now()
	return sb.rec.clone(), sb.doomed, nil
}

// Kill ends every process of a sandbox for a reason that the record will show, and returns when it is stopped. The
// sandbox remains to be looked at until it is deleted.
func (s *Supervisor) Kill(ctx context.Context, id, reason string) error {
	s.mu.Lock()
	sb, err := s.find(id)
	if err != nil {
		s.mu.Unlock()
		return err
	}
	return s.kill(ctx, sb, reason)
}

// Kill is [Supervisor.Kill] of the sandbox as it was when the lease began: of one that has ended since, and that somebody has
// started again perhaps, it does nothing.
func (l *Lease) Kill(ctx context.Context, reason string) error {
	l.s.mu.Lock()
	if l.sb.gone != l.Gone {
		l.s.mu.Unlock()
		return nil
	}
	return l.s.kill(ctx, l.sb, reason)
}

// kill ends the life that the sandbox has now, if it has one. It takes mu over.
func (s *Supervisor) kill(ctx context.Context, sb *sandbox, reason string) error {
	if sb.isGone {
		s.mu.Unlock()
		return nil
	}
	if lives(sb.rec.State) && sb.killing == "" {
		sb.killing = reason
	}
	gone := sb.gone
	sb.kills.Add(1)
	s.mu.Unlock()
	err := ignoreNotFound(s.engine.Kill(ctx, sb.rec.ID))
	sb.kills.Done()
	if err != nil {
		return fmt.Errorf("kill sandbox %s: %w", sb.rec.ID, err)
	}
	select {
	case <-gone:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for the end of sandbox %s: %w", sb.rec.ID, context.Cause(ctx))
	}
}

// Stats is what the kernel counts of the sandbox with this id or name. It does not count as a use of it.
func (s *Supervisor) Stats(ctx context.Context, ref string) (api.Stats, error) {
	s.mu.Lock()
	sb, err := s.alive(ref)
	s.mu.Unlock()
	if err != nil {
		return api.Stats{}, err
	}
	st, err := s.engine.Stats(ctx, sb.rec.ID)
	if err != nil {
		return api.Stats{}, fmt.Errorf("stats of sandbox %s: %w", sb.rec.ID, err)
	}
	return st, nil
}

// OOMKills is how many processes of the sandbox the kernel has killed for want of memory.
func (s *Supervisor) OOMKills(ctx context.Context, id string) (int, error) {
	return s.engine.OOMKills(ctx, id)
}

// Delete ends the sandbox with this id or name, and removes everything of it. Where several callers delete one sandbox,
// all wait for the same deletion and get its outcome. A deletion that began goes on although ctx ends; one that failed
// may be repeated.
func (s *Supervisor) Delete(ctx context.Context, ref string) error {
	return s.deleteIf(ctx, ref, func(*sandbox) error { return nil })
}

// DeleteEnded is Delete of the sandbox with this id if it has ended, and has not been started again since its record was rec:
// otherwise it is ErrNotEnded. So it is if unread is greater than 0 and somebody has begun within that time to read its files, for a snapshot perhaps or a
// fork, which the deletion would cut off, or has rolled it back or tried to start it.
func (s *Supervisor) DeleteEnded(ctx context.Context, rec *Record, unread time.Duration) error {
	return s.deleteIf(ctx, rec.ID, func(sb *sandbox) error {
		switch {
		case !sb.isGone || sb.starting || sb.rec.Life != rec.Life:
			return fmt.Errorf("%w: %s (%s) has been started again", ErrNotEnded, sb.rec.Name, sb.rec.ID)
		case !sb.read.IsZero() && time.Since(sb.read) < unread:
			return fmt.Errorf("%w: %s (%s) is in use", ErrNotEnded, sb.rec.Name, sb.rec.ID)
		}
		return nil
	})
}

// deleteIf is Delete where check, which is called with mu, has nothing against it.
func (s *Supervisor) deleteIf(ctx context.Context, ref string, check func(*sandbox) error) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return ErrClosed
	}
	sb, err := s.find(ref)
	if err == nil {
		err = check(sb)
	}
	if err != nil {
		s.mu.Unlock()
		return err
	}
	if d := sb.deletion; d != nil {
		s.mu.Unlock()
		select {
		case <-d.done:
			return d.err
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	if sb.rec.State == api.StateCreating || sb.starting {
		s.mu.Unlock()
		return fmt.Errorf("%w: %s is still being created or started", ErrState, sb.rec.Name)
	}
	d := sb.beginDeletion()
	s.ops.Add(1)
	s.mu.Unlock()
	defer s.ops.Done()

	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	d.err = s.delete(ctx, sb)
	close(d.done)
	return d.err
}

// beginDeletion needs Supervisor.mu.
func (sb *sandbox) beginDeletion() *deletion {
	if sb.deletion == nil {
		close(sb.doomed)
	}
	sb.deletion = &deletion{done: make(chan struct{})}
	return sb.deletion
}

// delete does the work of Delete; sb.deletion keeps others away. What could not be deleted is on record as what it is by then.
func (s *Supervisor) delete(ctx context.Context, sb *sandbox) error {
	err := s.remove(ctx, sb)
	if err == nil {
		return nil
	}
	// First: a watcher that has still seen the deletion has said before what became of the sandbox, and any other writes it.
	s.mu.Lock()
	sb.deletion, sb.doomed = nil, make(chan struct{})
	s.mu.Unlock()
	return errors.Join(err, s.restore(sb))
}

func (s *Supervisor) remove(ctx context.Context, sb *sandbox) error {
	id := sb.rec.ID
	<-sb.saved
	// The record goes while the engine works: of what a crash leaves then no record tells, and the next daemon removes it.
	removed := make(chan error, 1)
	go func() {
		sb.write.Lock() // an update that is under way writes before, and nobody does afterwards
		defer sb.write.Unlock()
		removed <- s.records.remove(id)
	}()
	err := ignoreNotFound(s.engine.Delete(ctx, id))
	if err := errors.Join(err, <-removed); err != nil {
		return fmt.Errorf("delete sandbox %s: %w", id, err)
	}
	if err := s.sockets.remove(id); err != nil {
		return fmt.Errorf("delete sandbox %s: %w", id, err)
	}
	if sb.watched != nil {
		s.mu.Lock()
		s.dismiss(sb)
		s.mu.Unlock()
		<-sb.watched
	}
	s.forget(sb)
	s.log.Info("sandbox deleted", "id", id, "name", sb.rec.Name)
	return nil
}

// restore writes the record of a sandbox that could not be deleted.
func (s *Supervisor) restore(sb *sandbox) error {
	sb.write.Lock()
	defer sb.write.Unlock()
	s.mu.Lock()
	rec, again := sb.rec.clone(), sb.deletion != nil
	s.mu.Unlock()
	if again {
		return nil // the next deletion has its outcome
	}
	return s.records.put(&rec)
}

// Close refuses new work, waits for what is under way, deletes every sandbox unless keep is set, and returns when no
// goroutine of the supervisor runs any more. With keep the engine's sandboxes go on, for the next Open to adopt.
func (s *Supervisor) Close(ctx context.Context, keep bool) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return ErrClosed
	}
	s.closed = true
	close(s.closing)
	s.mu.Unlock()

	// Creations and deletions are bounded by their own contexts and by undoTimeout.
	s.ops.Wait()
	// The next daemon would not know what they are for.
	errs := []error{s.unpark(ctx, func(string, string, []string) bool { return true })}
	if !keep {
		errs = append(errs, s.deleteAll(ctx)...)
	}
	s.stopWatching()
	errs = append(errs, s.saveEnds(), s.sockets.close(), s.records.close())
	return errors.Join(errs...)
}

// deleteAll deletes a few sandboxes at a time: the launcher works in parallel, but a thousand at once help nobody.
func (s *Supervisor) deleteAll(ctx context.Context) []error {
	s.mu.Lock()
	all := slices.Collect(maps.Values(s.byID))
	for _, sb := range all {
		sb.beginDeletion()
	}
	s.mu.Unlock()
	errs := make([]error, len(all))
	slots := make(chan struct{}, 8)
	var wg sync.WaitGroup
	for i, sb := range all {
		slots <- struct{}{}
		wg.Go(func() {
			errs[i] = s.delete(ctx, sb)
			<-slots
		})
	}
	wg.Wait()
	return errs
}

func (s *Supervisor) stopWatching() {
	s.mu.Lock()
	for _, sb := range s.byID {
		s.dismiss(sb)
	}
	s.mu.Unlock()
	s.watchers.Wait()
}

func ignoreNotFound(err error) error {
	if errors.Is(err, ErrNotFound) {
		return nil
	}
	return err
}
