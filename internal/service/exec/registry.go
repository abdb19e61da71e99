package exec

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/guest/host"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/events"
	"github.com/sandboxd/sandboxd/internal/service/guests"
	"github.com/sandboxd/sandboxd/internal/service/mainlog"
	"github.com/sandboxd/sandboxd/internal/service/work"
	"github.com/sandboxd/sandboxd/runtime"
)

// Bounds of detached execs. The launcher has bounds of its own, which are not lower.
const (
	MaxDetached   = 64        // of one sandbox
	maxDetachedIn = 512       // of all, besides the first of each sandbox
	MaxKept       = 1 << 30   // bytes of stdin and output of all, as the execs' limits go
	MaxFinished   = 32        // of one sandbox are kept
	keepFinished  = time.Hour // and no longer
)

// DefaultOutputLimit is the number of bytes of output that are kept of a request that says none.
const DefaultOutputLimit = 1 << 20

// stepTimeout bounds each step that must be tried although no client waits for it any more.
const stepTimeout = 10 * time.Second

// Options are a registry's means from the daemon. All are required, but Descriptors.
type Options struct {
	Supervisor *runtime.Supervisor
	// Descriptors keeps execs for the next daemon. Default: detached execs end with the daemon.
	Descriptors runtime.DescriptorStore
	Events      *events.Log    // gets starts and ends
	Logs        *mainlog.Store // of the output of main processes
	Work        *work.Group    // has the collectors, and timers that forget old execs
	Log         *slog.Logger

	// Launch starts the program of a request in the sandbox of a lease. How says how the program is
	// connected; Launch fills in the rest.
	Launch func(ctx context.Context, lease *runtime.Lease, req api.ExecRequest, how host.ExecRequest) (*host.Exec, error)
	// Used is called before a detached exec takes a lease of its sandbox.
	Used func(sandbox string)
	// MainEnded is called when the record of a sandbox says how its main process ended.
	MainEnded func(sandbox string)
	// Adopt is called for each adopted exec before its output is collected. The exec is dropped if it
	// fails. Adopted is called once, after all.
	Adopt   func(x *Detached) error
	Adopted func()
}

// A Registry lists the execs of all sandboxes: running ones and, of the detached ones, those that
// ended recently.
type Registry struct {
	opts   Options
	guests guests.Guests

	adopting chan struct{} // semaphore of one that serializes adoption; waiters honour their context
	adopted  atomic.Bool   // set when the execs of the last daemon are adopted

	mu     sync.Mutex
	count  int                        // of detached ones
	counts map[string]int             // the same by the sandbox's id, without those that have none
	kept   int64                      // the sum of their kept
	keptOf map[string]int64           // the same by the sandbox's id
	of     map[string]map[string]Exec // by the sandbox's id and the exec's
	mains  map[string]mainOf          // by the sandbox's id
	starts map[string]int             // under way, by the sandbox's id
	begun  chan struct{}              // closed and replaced when one of them has ended

	prepared map[string]map[string]*prepared // by the sandbox's id and the exec's
	upcoming map[upcomingKey][]*Upcoming
}

// New returns a registry without execs. [Registry.Adopt] fills it.
func New(opts Options) *Registry {
	return &Registry{
		opts: opts, guests: guests.Guests{Supervisor: opts.Supervisor, Log: opts.Log}, adopting: make(chan struct{}, 1), begun: make(chan struct{}),
		of: make(map[string]map[string]Exec), counts: make(map[string]int), keptOf: make(map[string]int64), mains: make(map[string]mainOf), starts: make(map[string]int),
		prepared: make(map[string]map[string]*prepared), upcoming: make(map[upcomingKey][]*Upcoming),
	}
}

// register lists an exec.
func (r *Registry) register(x Exec) {
	rec := &x.common().record
	r.mu.Lock()
	defer r.mu.Unlock()
	of := r.of[rec.Sandbox]
	if of == nil {
		of = make(map[string]Exec)
		r.of[rec.Sandbox] = of
	}
	of[rec.ID] = x
}

// starting notes that an exec of a sandbox is being started. The caller calls ended when it is
// listed, or was not started.
func (r *Registry) starting(sandbox string) (ended func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.starts[sandbox]++
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.starts[sandbox]--; r.starts[sandbox] == 0 {
			delete(r.starts, sandbox)
		}
		close(r.begun)
		r.begun = make(chan struct{})
	}
}

// ByMain returns the id of the exec with a main process; empty if there is none. It waits for
// starts of the sandbox that are under way: init knows the process first.
func (r *Registry) ByMain(ctx context.Context, sandbox string, pid int) string {
	for {
		r.mu.Lock()
		for id, x := range r.of[sandbox] {
			if p := x.common(); p.PID == pid && !p.Ended() {
				r.mu.Unlock()
				return id
			}
		}
		starts, begun := r.starts[sandbox], r.begun
		r.mu.Unlock()
		if starts == 0 {
			return ""
		}
		select {
		case <-begun:
		case <-ctx.Done():
			return ""
		}
	}
}

func (r *Registry) has(x *Detached) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.of[x.record.Sandbox][x.record.ID] == x
}

// unregister removes an exec from the list. It reports whether it was listed.
func (r *Registry) unregister(x Exec) bool {
	rec := &x.common().record
	r.mu.Lock()
	defer r.mu.Unlock()
	of := r.of[rec.Sandbox]
	if of[rec.ID] != x {
		return false
	}
	delete(of, rec.ID)
	if len(of) == 0 {
		delete(r.of, rec.Sandbox)
	}
	if x, ok := x.(*Detached); ok {
		r.add(rec.Sandbox, -1, -x.kept)
		if m := r.mains[rec.Sandbox]; m.x == x {
			m.x = nil
			r.mains[rec.Sandbox] = m
		}
	}
	return true
}

// Close closes the descriptors of execs that have ended. It is called when [Options.Work] has
// stopped. Execs that run are the next daemon's.
func (r *Registry) Close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, of := range r.of {
		for _, x := range of {
			if x, ok := x.(*Detached); ok {
				x.dispose()
			}
		}
	}
	r.of = nil
}

func byStart(a, b Exec) int {
	x, y := a.common(), b.common()
	return cmp.Or(x.record.StartedAt.Compare(y.record.StartedAt), cmp.Compare(x.record.ID, y.record.ID))
}

// Find returns one exec of a sandbox, for its record or to work with it; [api.MainExec] is the main
// process. The caller does not close it.
func (r *Registry) Find(rec *runtime.Record, id string) (Exec, error) {
	r.mu.Lock()
	x := r.of[rec.ID][id]
	if m := r.mains[rec.ID].x; id == api.MainExec && m != nil {
		x = m
	}
	r.mu.Unlock()
	if x == nil {
		return nil, class.Mark(class.ErrNoExec, fmt.Errorf("exec %q of sandbox %s: %w", class.Clip(id), rec.Name, class.ErrNoExec))
	}
	return x, nil
}

// List returns the records of a sandbox's execs, oldest first.
func (r *Registry) List(sandbox string) []Record {
	r.mu.Lock()
	all := slices.SortedFunc(maps.Values(r.of[sandbox]), byStart)
	r.mu.Unlock()
	list := make([]Record, 0, len(all))
	for _, x := range all {
		list = append(list, x.Record())
	}
	return list
}

// Running returns the ids of a sandbox's running execs by the pids of their main processes.
func (r *Registry) Running(sandbox string) map[int]string {
	from := make(map[int]string)
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, x := range r.of[sandbox] {
		if p := x.common(); !p.Ended() {
			from[p.PID] = id
		}
	}
	return from
}

// Counts are numbers of all sandboxes together.
type Counts struct {
	Detached  int   // also those that ended recently
	Kept      int64 // bytes that the detached ones may take
	Sandboxes int   // that have execs
	Prepared  int
	Upcoming  int // clients that wait for starts
}

// Counts returns the present numbers.
func (r *Registry) Counts() Counts {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := Counts{Detached: r.count, Kept: r.kept, Sandboxes: len(r.of)}
	for _, of := range r.prepared {
		c.Prepared += len(of)
	}
	for _, of := range r.upcoming {
		c.Upcoming += len(of)
	}
	return c
}
