package runtime

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
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

// TenantParts is the number of parts of what all tenants share, of which a tenant may have one: of
// the number of sandboxes, say. The daemon's own tenant may have all. It is fixed, because a share
// that depended on the number of tenants would tell of them.
const TenantParts = 4

const (
	defaultMaxSandboxes = 1000
	defaultTimeout      = time.Hour
	defaultIdleTimeout  = 10 * time.Minute

	// createTimeout bounds how long the engine may take to make a sandbox, which is milliseconds if
	// nothing hangs.
	createTimeout = time.Minute
	// undoTimeout bounds work that must go on although the request that started it was cancelled.
	undoTimeout = 30 * time.Second
	// killRetry is the interval at which a sandbox that should have ended is killed again.
	killRetry = 2 * time.Second
	// deleteWorkers bounds concurrent deletions: the launcher works in parallel, but a thousand at
	// once are not faster.
	deleteWorkers = 8
)

// Options configure a [Supervisor]. RuntimeDir is needed; everything else has a default.
type Options struct {
	RuntimeDir   string        // control sockets lie in its directory "s"
	MaxSandboxes int           // of all states and tenants, see [TenantParts]; default 1000
	Timeout      time.Duration // of a sandbox that asks for none; default an hour
	IdleTimeout  time.Duration // of a sandbox that asks for none; default ten minutes
	Room         Room          // for the limits of all sandboxes; default: no bound
	IODevice     cgroup.Device // see [Spec]; the default is none
	// Exercise is called for a new warm sandbox, with the path of its control socket. If it fails,
	// the sandbox is removed. Default: nothing.
	Exercise    func(ctx context.Context, socket string) error
	PoolChanged func() // called when a warm sandbox is claimed or gone; must neither block nor call the supervisor
	// Claiming is called when a request has taken a warm sandbox out of its pool, before the sandbox
	// is changed for the request. Equal means that programs see no difference between before and
	// after. The caller of Create waits for it. The claim may still fail; then the sandbox is removed.
	// Default: nothing.
	Claiming func(id string, equal bool)
	// Changed is called for each change of a sandbox, in the order of the changes, with the sandbox's
	// tenant. It must neither block, call the supervisor, nor change what the event points to.
	// Sandboxes of [Request.Ephemeral] are left out. Default: nothing.
	Changed func(tenant string, e api.Event)
	// Volumes returns the volumes of a sandbox with settings, of its tenant, at each start. Default:
	// there are none.
	Volumes func(tenant string, set *api.Settings) ([]VolumeMount, error)
	Log     *slog.Logger     // default: discarded
	Now     func() time.Time // clock of deadlines and idle timeouts; default [time.Now]
}

// Supervisor holds all sandboxes of one daemon from their creation to their deletion: it keeps
// their records, watches their processes, and ends them at their deadline. Its methods may be
// called from several goroutines.
//
// A sandbox is in one of these states. Deleting takes it out of any of them but creating. The steps
// between them are the phases of phase.go.
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
	now     func() time.Time
	// defaults are those of opts, or those that were set since.
	defaults atomic.Pointer[Defaults]

	ops      sync.WaitGroup // creations and deletions under way
	watchers sync.WaitGroup

	mu      sync.Mutex
	closed  bool
	closing chan struct{} // closed with it
	byID    map[string]*sandbox
	names   map[tenantName]*sandbox
	pool    pool
}

// Defaults are the lifetime and the idle timeout of sandboxes that ask for none; greater than zero.
type Defaults struct{ Timeout, IdleTimeout time.Duration }

// SetDefaults replaces the defaults of the options, for sandboxes that are created or started from
// now on.
func (s *Supervisor) SetDefaults(d Defaults) { s.defaults.Store(&d) }

// tenantName is a sandbox's name within its tenant.
type tenantName struct{ tenant, name string }

// Open reads the records in dir, adopts the sandboxes that the engine still runs, and repairs the
// traces of a crash. No other supervisor may have dir open.
func Open(ctx context.Context, dir string, engine Engine, opts Options) (_ *Supervisor, err error) {
	opts.MaxSandboxes = cmp.Or(opts.MaxSandboxes, defaultMaxSandboxes)
	opts.Timeout = cmp.Or(opts.Timeout, defaultTimeout)
	opts.IdleTimeout = cmp.Or(opts.IdleTimeout, defaultIdleTimeout)
	if opts.Now == nil {
		opts.Now = time.Now
	}
	s := &Supervisor{
		engine:  engine,
		opts:    opts,
		log:     cmp.Or(opts.Log, slog.New(slog.DiscardHandler)),
		now:     opts.Now,
		closing: make(chan struct{}),
		byID:    make(map[string]*sandbox),
		names:   make(map[tenantName]*sandbox),
	}
	s.SetDefaults(Defaults{opts.Timeout, opts.IdleTimeout})
	var undo cleanup
	defer undo.unwind(&err)
	if s.records, err = openRecords(dir, opts.RuntimeDir); err != nil {
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

// insert puts a record into the maps.
func (s *Supervisor) insert(rec Record, p phase) *sandbox {
	sb := newSandbox(rec, p)
	s.byID[rec.ID], s.names[tenantName{rec.Tenant, rec.Name}] = sb, sb
	return sb
}

// forget takes a sandbox out of the maps.
func (s *Supervisor) forget(sb *sandbox) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.byID, sb.rec.ID)
	delete(s.names, tenantName{sb.rec.Tenant, sb.rec.Name})
	sb.life.end()
	if sb.phase == phaseDeleting { // else its creation has failed, and was not told
		s.tell(sb, api.Event{Action: api.ActionDeleted})
	}
	s.enter(sb, phaseDeleted)
}

// Lookup returns the sandbox of the tenant with this id or name. It is the one place where a
// reference of a caller becomes a sandbox: the id of another tenant's sandbox fails with
// [ErrNotFound], like one that does not exist.
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
	return sb.seen(), nil
}

// Get returns the sandbox with this id, of any tenant, or with this name of the daemon's own.
func (s *Supervisor) Get(ref string) (Record, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sb, err := s.find(ref)
	if err != nil {
		return Record{}, err
	}
	return sb.seen(), nil
}

// Filter chooses sandboxes of one tenant; the zero value chooses all of the daemon's own.
type Filter struct {
	Tenant     string            // exactly this one
	AllTenants bool              // of every tenant: for the daemon's housekeeping, never for a caller
	Labels     map[string]string // all of them must be there with these values
	State      api.SandboxState
}

// List returns the sandboxes that filter chooses, oldest first.
func (s *Supervisor) List(filter Filter) []Record {
	s.mu.Lock()
	var list []Record
	for _, sb := range s.byID {
		if filter.match(&sb.rec) {
			list = append(list, sb.seen())
		}
	}
	s.mu.Unlock()
	slices.SortFunc(list, func(a, b Record) int {
		return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), cmp.Compare(a.ID, b.ID))
	})
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

// IDs returns the ids of a tenant's sandboxes, of any state.
func (s *Supervisor) IDs(tenant string) map[string]bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	ids := make(map[string]bool)
	for id, sb := range s.byID {
		if sb.rec.Tenant == tenant {
			ids[id] = true
		}
	}
	return ids
}

// Count returns the number of sandboxes, of any state and tenant.
func (s *Supervisor) Count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.byID)
}

// Stats returns the kernel's counters of the sandbox with this id or name. It does not count as a
// use of it.
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

// OOMKills returns the number of processes of the sandbox that the kernel has killed for want of
// memory.
func (s *Supervisor) OOMKills(ctx context.Context, id string) (int, error) {
	return s.engine.OOMKills(ctx, id)
}

// Close refuses new work, waits for operations under way, deletes every sandbox unless keep is set,
// and returns when no goroutine of the supervisor runs any more. With keep the engine's sandboxes
// go on, for the next Open to adopt.
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
	// The next daemon knows no warm sandboxes.
	errs := []error{s.unpark(ctx, func(string, string, []string) bool { return true })}
	if !keep {
		errs = append(errs, s.deleteAll(ctx)...)
	}
	s.stopWatching()
	errs = append(errs, s.saveEnds(), s.sockets.close(), s.records.close())
	return errors.Join(errs...)
}

func (s *Supervisor) deleteAll(ctx context.Context) []error {
	s.mu.Lock()
	all := slices.Collect(maps.Values(s.byID))
	for _, sb := range all {
		s.beginDeletion(sb)
	}
	s.mu.Unlock()
	return eachOf(all, func(sb *sandbox) error { return s.delete(ctx, sb) })
}

// eachOf calls do for all items, a few at a time, and returns its errors.
func eachOf[T any](items []T, do func(T) error) []error {
	errs := make([]error, len(items))
	slots := make(chan struct{}, deleteWorkers)
	var wg sync.WaitGroup
	for i, item := range items {
		slots <- struct{}{}
		wg.Go(func() {
			errs[i] = do(item)
			<-slots
		})
	}
	wg.Wait()
	return errs
}

func (s *Supervisor) stopWatching() {
	s.mu.Lock()
	for _, sb := range s.byID {
		sb.life.dismiss()
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
