package service

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/guest"
	"github.com/sandboxd/sandboxd/internal/guest/host"
	"github.com/sandboxd/sandboxd/internal/memfd"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/execlog"
	"github.com/sandboxd/sandboxd/internal/service/guests"
	"github.com/sandboxd/sandboxd/internal/service/output"
	"github.com/sandboxd/sandboxd/internal/service/work"
	"github.com/sandboxd/sandboxd/runtime"
)

// Bounds of detached execs. The launcher has bounds of its own, which are not lower.
const (
	maxDetached   = 64        // of one sandbox
	maxDetachedIn = 512       // of all, besides the first of each sandbox
	maxKept       = 1 << 30   // bytes of stdin and output of all, as the execs' limits go
	maxFinished   = 32        // of one sandbox are kept
	keepFinished  = time.Hour // and no longer
)

// execs is the registry of the execs of all sandboxes: running ones and, of the detached ones,
// those that ended recently.
type execs struct {
	work *work.Group // has the collectors, and timers that forget old execs

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

func newExecs(w *work.Group) *execs {
	e := &execs{work: w, adopting: make(chan struct{}, 1), of: make(map[string]map[string]Exec), counts: make(map[string]int), keptOf: make(map[string]int64), mains: make(map[string]mainOf)}
	e.starts, e.begun = make(map[string]int), make(chan struct{})
	return e
}

func newExecID() string { return strings.ToLower(rand.Text()[:12]) }

// register lists an exec.
func (e *execs) register(x Exec) {
	rec := &x.common().record
	e.mu.Lock()
	defer e.mu.Unlock()
	of := e.of[rec.Sandbox]
	if of == nil {
		of = make(map[string]Exec)
		e.of[rec.Sandbox] = of
	}
	of[rec.ID] = x
}

// starting notes that an exec of a sandbox is being started. The caller calls ended when it is
// listed, or was not started.
func (e *execs) starting(sandbox string) (ended func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.starts[sandbox]++
	return func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.starts[sandbox]--; e.starts[sandbox] == 0 {
			delete(e.starts, sandbox)
		}
		close(e.begun)
		e.begun = make(chan struct{})
	}
}

// byMain returns the id of the exec with a main process; empty if there is none. It waits for
// starts of the sandbox that are under way: init knows the process first.
func (e *execs) byMain(ctx context.Context, sandbox string, pid int) string {
	for {
		e.mu.Lock()
		for id, x := range e.of[sandbox] {
			if p := x.common(); p.PID == pid && !p.ended() {
				e.mu.Unlock()
				return id
			}
		}
		starts, begun := e.starts[sandbox], e.begun
		e.mu.Unlock()
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

func (e *execs) has(x *Detached) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.of[x.record.Sandbox][x.record.ID] == x
}

// unregister removes an exec from the list. It reports whether it was listed.
func (e *execs) unregister(x Exec) bool {
	rec := &x.common().record
	e.mu.Lock()
	defer e.mu.Unlock()
	of := e.of[rec.Sandbox]
	if of[rec.ID] != x {
		return false
	}
	delete(of, rec.ID)
	if len(of) == 0 {
		delete(e.of, rec.Sandbox)
	}
	if x, ok := x.(*Detached); ok {
		e.add(rec.Sandbox, -1, -x.kept)
		if m := e.mains[rec.Sandbox]; m.x == x {
			m.x = nil
			e.mains[rec.Sandbox] = m
		}
	}
	return true
}

// quota bounds the detached execs of a tenant.
type quota struct {
	// own holds the ids of the tenant's sandboxes: those of others make no room. Nil means all.
	own map[string]bool
	// parts is the number of parts of the room of all, of which the tenant may have one.
	parts int
}

// execsQuota returns the quota of a tenant: all of the room for the daemon's own, and else its
// part.
func (s *core) execsQuota(tenant string) quota {
	q := quota{own: s.supervisor.IDs(tenant), parts: 1}
	if tenant != "" {
		q.parts = runtime.TenantParts
	}
	return q
}

// use returns the number of a tenant's detached execs besides the first of each sandbox, and their
// bytes. It needs mu.
func (e *execs) use(q quota) (n int, kept int64) {
	for id := range q.own {
		n += max(0, e.counts[id]-1)
		kept += e.keptOf[id]
	}
	return n, kept
}

// reserve counts a detached exec, which register or release follows, and returns finished ones that
// must make room for it.
func (e *execs) reserve(sandbox string, size int64, q quota) (room []*Detached, err error) {
	if e.work.Closed() {
		return nil, class.ErrStopping
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	running, mine := 0, 0
	var finished []*Detached
	for id, of := range e.of {
		for _, x := range of {
			x, ok := x.(*Detached)
			switch {
			case !ok:
			case q.own != nil && !q.own[id]:
			case x.ended() && x.main.isReported():
				finished = append(finished, x)
				if id == sandbox {
					mine++
				}
			case id == sandbox:
				running++
			}
		}
	}
	slices.SortFunc(finished, func(a, b *Detached) int { return byStart(a, b) })
	// As it will be without room.
	count, counts, kept := e.count, maps.Clone(e.counts), e.kept
	ownCount, ownKept := e.use(q)
	tooMuch := func() bool {
		return (kept+size > maxKept || ownKept+size > maxKept/int64(q.parts)) && (counts[sandbox] > 0 || size > mainRing)
	}
	full := func() bool {
		return counts[sandbox] > 0 && (count-len(counts) >= maxDetachedIn || ownCount >= maxDetachedIn/q.parts) || tooMuch()
	}
	for _, x := range finished {
		own := x.record.Sandbox == sandbox
		helps := counts[x.record.Sandbox] > 1 || own || tooMuch() // else it is the one that its sandbox may have in any case
		if full() && helps || own && mine >= maxFinished {
			room = append(room, x)
			count, kept, ownKept = count-1, kept-x.kept, ownKept-x.kept
			if counts[x.record.Sandbox] > 1 {
				ownCount--
			}
			if counts[x.record.Sandbox]--; counts[x.record.Sandbox] == 0 {
				delete(counts, x.record.Sandbox)
			}
			if own {
				mine--
			}
		}
	}
	if running >= maxDetached-maxFinished || full() {
		if q.parts > 1 { // the sums of all tell of other tenants
			_, ownKept = e.use(q)
			return nil, class.Mark(runtime.ErrInUse, fmt.Errorf("%d detached execs of this sandbox run, and all of yours are kept with %d MiB of memory: there is room for no more",
				running, ownKept>>20))
		}
		return nil, class.Mark(runtime.ErrInUse, fmt.Errorf("%d detached execs of this sandbox run and %d of all are kept, with %d MiB of memory, which is the most",
			running, e.count, e.kept>>20))
	}
	e.add(sandbox, 1, size)
	return room, nil
}

// add counts detached execs of a sandbox and their bytes. It needs mu.
func (e *execs) add(sandbox string, n int, size int64) {
	e.count += n
	e.kept += size
	if e.keptOf[sandbox] += size; e.keptOf[sandbox] == 0 {
		delete(e.keptOf, sandbox)
	}
	if e.counts[sandbox] += n; e.counts[sandbox] == 0 {
		delete(e.counts, sandbox)
	}
}

func (e *execs) release(sandbox string, size int64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.add(sandbox, -1, -size)
}

// close closes the descriptors of execs that have ended, when no collector runs any more. Those
// that run are the next daemon's.
func (e *execs) close() {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, of := range e.of {
		for _, x := range of {
			if x, ok := x.(*Detached); ok {
				x.dispose()
			}
		}
	}
	e.of = nil
}

func byStart(a, b Exec) int {
	x, y := a.common(), b.common()
	return cmp.Or(x.record.StartedAt.Compare(y.record.StartedAt), cmp.Compare(x.record.ID, y.record.ID))
}

// Exec returns one exec of the sandbox with this id or name, for its record or to work with it. The
// caller does not close it.
func (s *API) Exec(ref, id string) (Exec, error) {
	rec, err := s.lookup(ref)
	if err != nil {
		return nil, err
	}
	s.execs.mu.Lock()
	x := s.execs.of[rec.ID][id]
	if m := s.execs.mains[rec.ID].x; id == api.MainExec && m != nil {
		x = m
	}
	s.execs.mu.Unlock()
	if x == nil {
		return nil, class.Mark(class.ErrNoExec, fmt.Errorf("exec %q of sandbox %s: %w", class.Clip(id), rec.Name, class.ErrNoExec))
	}
	return x, nil
}

// Execs lists the execs of the sandbox with this id or name, oldest first.
func (s *API) Execs(ref string) ([]ExecRecord, error) {
	rec, err := s.lookup(ref)
	if err != nil {
		return nil, err
	}
	s.execs.mu.Lock()
	all := slices.SortedFunc(maps.Values(s.execs.of[rec.ID]), byStart)
	s.execs.mu.Unlock()
	list := make([]ExecRecord, 0, len(all))
	for _, x := range all {
		list = append(list, x.Record())
	}
	return list, nil
}

// Detached returns a detached exec of the sandbox with this id or name. Of another kind, the error
// is of the class ErrState.
func (s *API) Detached(ref, id string) (*Detached, error) {
	x, err := s.Exec(ref, id)
	if err != nil {
		return nil, err
	}
	d, ok := x.(*Detached)
	if !ok {
		return nil, class.Mark(runtime.ErrState, fmt.Errorf("attach to exec %s: it is not detached, its output goes to the client that started it", x.ID()))
	}
	return d, nil
}

// Detached is an exec that goes on without a client. It belongs to the [execs] that list it.
type Detached struct {
	*program

	main *mainProcess // nil unless it is one
	log  *execlog.Log
	kept int64 // bytes of memory that it may take

	keeping  sync.Mutex // held while descriptors are stored; before mu
	disposed bool       // its descriptors are closed, and not stored any more; guarded by keeping
	noStdin  bool       // stdin was closed, and is not to be kept for the next daemon

	expiry *time.Timer // guarded by mu
}

// Record returns the record of the exec at this moment.
func (x *Detached) Record() ExecRecord {
	x.mu.Lock()
	defer x.mu.Unlock()
	rec := x.record
	rec.StdoutBytes, rec.StderrBytes, rec.Dropped = x.log.Counts()
	return rec
}

// shortened returns the part of an argument list that a record keeps.
func shortened(argv []string) []string {
	const most = 4 << 10
	var out []string
	left := most
	for _, a := range argv {
		a = strings.ToValidUTF8(a, "\uFFFD")
		if len(a) > left {
			return append(out, strings.ToValidUTF8(a[:left], "")+"...")
		}
		left -= len(a) + 1
		out = append(out, a)
		if left <= 0 {
			return append(out, "...")
		}
	}
	return out
}

// ExecRecord is the record of an exec: the API's, but for the reason of a lost exec, which a face
// turns into an error of its own protocol.
type ExecRecord struct {
	api.Exec
	Failure *Failure `json:"failure,omitempty"` // nil unless the exec is lost
}

// convert reads a record of an earlier version, which has a problem document.
func (r *ExecRecord) convert() {
	if r.Error != nil {
		r.Failure = &Failure{Class: string(r.Error.Code), Message: r.Error.Detail}
		r.Error = nil
	}
}

// Failure is the reason why the exit of a detached exec is unknown, as its record keeps it.
type Failure struct {
	Class   string `json:"class"`
	Message string `json:"message"`
}

// Names of the classes in records. Earlier versions kept the API's codes, some of which are these.
const (
	failedGone        = "gone"
	failedUnavailable = "unavailable"
	failedMissing     = "program_not_found"
	failedDenied      = "program_not_allowed"
	failedOtherwise   = "internal"

	maxFailure = 2048 // bytes of a message: a part of it may come from a sandbox
)

// failureOf returns err as a record keeps it.
func failureOf(err error) *Failure {
	f := &Failure{Class: failedOtherwise, Message: strings.ToValidUTF8(err.Error(), "\uFFFD")}
	if len(f.Message) > maxFailure {
		f.Message = strings.ToValidUTF8(f.Message[:maxFailure], "") + " ..."
	}
	switch marked := class.Marked(err); {
	case errors.Is(marked, class.ErrGone):
		f.Class = failedGone
	case errors.Is(marked, class.ErrProgramMissing):
		f.Class = failedMissing
	case errors.Is(marked, class.ErrProgramDenied):
		f.Class = failedDenied
	case errors.Is(marked, class.ErrUnavailable), errors.Is(marked, class.ErrStopping), errors.Is(marked, context.DeadlineExceeded):
		f.Class = failedUnavailable
	}
	return f
}

func (f *Failure) Error() string { return f.Message }

// Unwrap returns the class of the failure, nil for an internal one.
func (f *Failure) Unwrap() error {
	switch f.Class {
	case failedGone:
		return class.ErrGone
	case failedUnavailable:
		return class.ErrUnavailable
	case failedMissing:
		return class.ErrProgramMissing
	case failedDenied:
		return class.ErrProgramDenied
	}
	return nil
}

// left is the state of an exec for the next daemon, besides its record.
type left struct {
	Record  ExecRecord
	Request api.ExecRequest // without stdin, argv and env
	Kept    int64
	Main    bool `json:",omitempty"` // it is a main process
	Life    int  `json:",omitempty"` // then: of the sandbox
	Init    int  // the host's pid of the sandbox's init
	OOM     *int // how often the kernel had killed for want of memory before; nil if that is not known
}

// StartDetached starts a program that goes on without the caller.
func (s *API) StartDetached(ctx context.Context, ref string, req api.ExecRequest) (ExecRecord, error) {
	if err := validateExec(&req); err != nil {
		return ExecRecord{}, err
	}
	if !req.Detach {
		return ExecRecord{}, errDetach
	}
	rec, err := s.lookup(ref)
	if err != nil {
		return ExecRecord{}, err
	}
	return s.detach(ctx, &rec, req, detachAs{})
}

// detachAs says which exec [core.detach] starts; zero means one of a client.
type detachAs struct {
	id      string       // of a prepared exec
	main    *mainProcess // of its sandbox
	context *codeContext // whose process it is
	parked  *parkedSpare // that has the program already; nil starts one
}

// detach is StartDetached, also of other execs.
func (s *core) detach(ctx context.Context, rec *runtime.Record, req api.ExecRequest, as detachAs) (_ ExecRecord, err error) {
	if err := s.adoption(ctx); err != nil {
		return ExecRecord{}, err
	}
	limit := cmp.Or(req.OutputLimit, defaultOutputLimit)
	size := limit + int64(len(req.Stdin)) // which is in memory for as long as the program has it open
	log, undo, err := s.newLog(ctx, rec, limit, size, req.TTY)
	if err != nil {
		return ExecRecord{}, err
	}
	defer func() {
		if undo != nil {
			undo()
		}
	}()
	r := host.ExecRequest{Keep: true, NoStdin: !req.StdinOpen && len(req.Stdin) == 0 && !req.TTY}
	if !req.StdinOpen && !req.TTY && len(req.Stdin) > 0 {
		// A file rather than a pipe: it needs no writer after the end of this daemon.
		if r.StdinFile, err = stdinFile(req.Stdin); err != nil {
			return ExecRecord{}, err
		}
		defer r.StdinFile.Close() // only written
	}
	begin := s.supervisor.Begin
	if as.context != nil {
		begin = s.supervisor.Probe // a context that waits is no use of its sandbox; its runs are
	} else {
		s.parked.drop(rec.ID)
	}
	lease, err := begin(rec.ID)
	if err != nil {
		return ExecRecord{}, err
	}
	defer s.execs.starting(rec.ID)()
	var p *program
	if as.parked != nil {
		p, err = s.continueParked(ctx, lease, req, as.parked)
	} else {
		p, err = s.startProgram(ctx, lease, req, r)
	}
	if err != nil {
		return ExecRecord{}, err
	}
	x := &Detached{program: p, log: log, kept: size, main: as.main}
	x.record.Main = as.main != nil
	x.record.ID = cmp.Or(as.id, x.record.ID)
	if as.context != nil {
		err = as.context.attach(x)
	}
	if err == nil {
		err = x.saveRecord()
	}
	if err == nil {
		err = x.storeDescriptors(ctx)
	}
	if err != nil {
		x.abandon(ctx) // no client knows of the exec
		x.lease.End()
		return ExecRecord{}, err
	}
	if len(req.Stdin) > 0 && r.StdinFile == nil {
		x.input <- struct{}{} // comes before any other input
		x.stdin.Go(func() {
			defer func() { <-x.input }()
			_, _ = x.guest.Write(req.Stdin) // a program that does not read it is no error
		})
	}
	x.req.Stdin = nil
	s.execs.register(x)
	s.publishExecStarted(p, rec)
	undo = nil
	s.execs.deliver(x)
	if !s.follow(x) {
		close(x.done)
		return ExecRecord{}, class.ErrStopping // and the next daemon has it
	}
	return x.Record(), nil
}

// newLog makes room for a detached exec of this size, and its log. The caller lists the exec, or
// calls undo.
func (s *core) newLog(ctx context.Context, rec *runtime.Record, limit, size int64, tty bool) (log *execlog.Log, undo func(), err error) {
	room, err := s.execs.reserve(rec.ID, size, s.execsQuota(rec.Tenant))
	if err != nil {
		return nil, nil, err
	}
	for _, x := range room {
		s.forget(ctx, x)
	}
	if log, err = execlog.New(limit, tty); err != nil {
		s.execs.release(rec.ID, size)
		return nil, nil, err
	}
	return log, func() {
		log.Close()
		s.execs.release(rec.ID, size)
	}, nil
}

// abandon kills an exec that is not listed. Closing the connection alone kills nothing of which the
// launcher has a copy.
func (x *Detached) abandon(ctx context.Context) {
	_ = x.guest.Kill()
	_ = x.guest.Close()                                     // always nil
	x.s.dropDescriptors(ctx, x.record.Sandbox, x.record.ID) // they may be stored, and the answer lost
}

// stdinFile holds the whole stdin of a program, which reads it and can do nothing else with it.
func stdinFile(data []byte) (_ *os.File, err error) {
	fd, err := unix.MemfdCreate("stdin", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("make stdin: %w", err)
	}
	f := os.NewFile(uintptr(fd), "stdin")
	defer func() {
		if err != nil {
			_ = f.Close() // of no use
		}
	}()
	if _, err := f.WriteAt(data, 0); err != nil { // its offset is the program's, and stays 0
		return nil, fmt.Errorf("write stdin: %w", err)
	}
	if err := f.Chmod(0o444); err != nil { // to be opened again as /dev/stdin
		return nil, fmt.Errorf("make stdin: %w", err)
	}
	if err := memfd.Seal(f); err != nil {
		return nil, fmt.Errorf("seal stdin: %w", err)
	}
	return f, nil
}

// saveRecord writes the state of a running exec for the next daemon.
func (x *Detached) saveRecord() error {
	rest := left{Record: x.record, Request: x.req, Init: x.lease.Record.PID, Kept: x.kept, Main: x.main != nil}
	rest.Request.Argv, rest.Request.Env, rest.Request.Stdin = nil, nil, nil
	if x.main != nil {
		rest.Life = x.main.life
	}
	if x.oom.done != nil && x.oom.err == nil {
		rest.OOM = &x.oom.before
	}
	return x.log.Write(execlog.Record, rest)
}

// storeDescriptors stores the descriptors that another daemon needs: always state and output; of a
// running exec also the connection, and stdout, stderr and stdin, or the terminal and the relay.
func (x *Detached) storeDescriptors(ctx context.Context) error {
	if x.s.descriptors == nil {
		return nil
	}
	x.keeping.Lock() // an older state never overwrites a newer one
	defer x.keeping.Unlock()
	if x.disposed {
		return nil // and its files may be another's by now
	}
	files := x.log.Files()
	if !x.ended() {
		k := x.guest.Kept()
		files = append(files, k.Conn, k.Stdout)
		if x.noStdin {
			k.Stdin = nil
		}
		r, w := x.log.Relay()
		for _, f := range []*os.File{r, w, k.Stderr, k.Stdin} {
			if f != nil {
				files = append(files, f)
			}
		}
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stepTimeout)
	defer cancel()
	err := x.s.descriptors.StoreDescriptors(ctx, runtime.DescriptorSet{Sandbox: x.record.Sandbox, Name: x.record.ID, Files: files})
	if err != nil {
		return fmt.Errorf("keep the exec for the next daemon: %w", err)
	}
	return nil
}

// dropDescriptors drops the descriptors of an exec, if there are any.
func (s *core) dropDescriptors(ctx context.Context, sandbox, id string) {
	if s.descriptors == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stepTimeout)
	defer cancel()
	if err := s.descriptors.DropDescriptors(ctx, sandbox, id); err != nil {
		s.log.Warn("the launcher still keeps an exec", "id", sandbox, "exec", id, "error", err)
	}
}

// collect takes a detached program's output until its exit and records that. If the daemon stops
// before, everything is left to the next one.
func (x *Detached) collect() {
	ctx := x.s.work.Context()
	stop := context.AfterFunc(ctx, x.log.Hand) // the output may wait for a log or a reader that has stopped
	defer stop()
	if x.lease != nil { // how a sandbox has ended does not wait for a reader that has stopped
		defer x.lease.AfterGone(func() { time.AfterFunc(stepTimeout, x.log.ReleaseHolds) })()
	}
	exit, err := x.guest.Spool(ctx, x.log)
	rec := x.record
	switch {
	case errors.Is(err, execlog.ErrHanded):
		x.keeping.Lock()
		x.disposed = true   // the next daemon's
		_ = x.guest.Close() // kills no program whose descriptors are stored
		x.keeping.Unlock()
		x.stdin.Wait()
		if x.lease != nil {
			x.lease.End()
		}
		return
	case err == nil:
		e, u := exitOf(exit, x.oom.struck(ctx)), usageOf(exit)
		rec.State, rec.Exit, rec.Usage = api.ExecExited, &e, &u
	case x.lease == nil && errors.Is(err, host.ErrLost):
		rec.State, rec.Failure = api.ExecLost, &Failure{Class: failedGone, Message: "the sandbox ended while no daemon was running"}
	case errors.Is(err, host.ErrLost):
		rec.State, rec.Failure = api.ExecLost, failureOf(x.s.guests.Lost(ctx, x.lease, err))
	default:
		_ = x.guest.Kill() // closing the connection, below, does so too
		rec.State, rec.Failure = api.ExecLost, failureOf(fmt.Errorf("keep the exec's output: %w", err))
	}
	rec.EndedAt = time.Now().UTC()
	x.conclude(rec)
	why := ""
	if rec.Failure != nil {
		why = rec.Failure.Message
	}
	x.s.publishExecEnded(x.program, rec.Exit, why)
	// A storeDescriptors under way has the descriptors still; a later one sees that the exec has
	// ended.
	x.keeping.Lock()
	_ = x.guest.Close() // always nil
	x.log.CloseRelay()
	x.keeping.Unlock()
	x.stdin.Wait()
	if x.lease != nil {
		x.lease.End()
	}
	x.finish(ctx)
}

// conclude sets the end of the execution. The record is written for the next daemon before any
// observer sees the end.
func (x *Detached) conclude(rec ExecRecord) {
	if err := x.log.Write(execlog.End, rec); err != nil {
		x.s.log.Warn("how an exec ended is not kept for the next daemon", "id", rec.Sandbox, "exec", rec.ID, "error", err)
	}
	x.log.Finish() // readers of all output wait for done
	x.mu.Lock()
	defer x.mu.Unlock()
	// Field by field: the others never change, and are read without mu.
	x.record.State, x.record.EndedAt, x.record.Exit, x.record.Usage, x.record.Failure = rec.State, rec.EndedAt, rec.Exit, rec.Usage, rec.Failure
	close(x.done) // under mu, so that no observer sees a running record after done
}

// finish is what comes after the end.
func (x *Detached) finish(ctx context.Context) {
	if x.main != nil {
		x.s.mainEnded(ctx, x)
	}
	x.retire(ctx)
}

// retire releases resources of an ended exec and schedules its removal.
func (x *Detached) retire(ctx context.Context) {
	s := x.s
	err := x.storeDescriptors(ctx)
	if !s.execs.has(x) {
		s.dropDescriptors(ctx, x.record.Sandbox, x.record.ID) // it was forgotten concurrently
		return
	}
	if err != nil && !errors.Is(err, runtime.ErrUnavailable) {
		s.log.Warn("an exec that has ended is not kept for the next daemon", "id", x.record.Sandbox, "exec", x.record.ID, "error", err)
	}
	if _, err := s.supervisor.Get(x.record.Sandbox); errors.Is(err, runtime.ErrNotFound) {
		s.forget(ctx, x)
		if x.main != nil { // begun after the deletion of the sandbox removed the log
			if err := s.logs.Remove(x.record.Sandbox); err != nil {
				s.log.Error("the log of a deleted sandbox is left until the next start", "id", x.record.Sandbox, "error", err)
			}
		}
		return
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if !s.execs.has(x) {
		return // forgotten concurrently; from here on forget stops the timer
	}
	x.expiry = time.AfterFunc(time.Until(x.record.EndedAt.Add(keepFinished)), func() {
		s.work.Go(func() { s.forget(ctx, x) })
	})
}

// dispose closes the descriptors of an exec that no goroutine uses.
func (x *Detached) dispose() {
	x.mu.Lock()
	if x.expiry != nil {
		x.expiry.Stop()
	}
	x.mu.Unlock()
	if x.main != nil {
		<-x.main.logged
	}
	x.keeping.Lock()
	defer x.keeping.Unlock()
	x.disposed = true
	x.log.Close()
}

// forget removes an exec that has ended.
func (s *core) forget(ctx context.Context, x *Detached) {
	if !s.execs.unregister(x) {
		return
	}
	x.dispose() // first: storing that is under way comes before the drop, and there is none behind it
	s.dropDescriptors(ctx, x.record.Sandbox, x.record.ID)
}

// forgetSandbox removes the execs of a deleted sandbox, whether or not the client is still there: a
// collector that looked before the deletion keeps its exec for an hour. It waits for the
// collectors, which also see the end of the sandbox.
func (s *core) forgetSandbox(ctx context.Context, id string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stepTimeout)
	defer cancel()
	s.execs.mu.Lock()
	all := slices.Collect(maps.Values(s.execs.of[id]))
	delete(s.execs.mains, id)
	s.execs.mu.Unlock()
	s.execs.forgetUpcoming(id)
	s.contexts.forget(id)
	s.parked.drop(id)
	defer func() {
		if err := s.logs.Remove(id); err != nil {
			s.log.Error("the log of a deleted sandbox is left until the next start", "id", id, "error", err)
		}
		if err := s.networks.Forget(id); err != nil {
			s.log.Error("the flows of a deleted sandbox are left until the next start", "id", id, "error", err)
		}
		s.collectVolumes(ctx)
	}()
	for _, x := range all {
		x, ok := x.(*Detached)
		if !ok {
			continue // its own request ends it
		}
		x.log.ReleaseHolds()
		select {
		case <-x.over():
			s.forget(ctx, x)
		case <-s.work.Context().Done(): // the daemon stops, and the next one finds no such sandbox
			return
		case <-ctx.Done():
			s.log.Warn("an exec of a deleted sandbox has not ended", "id", id, "exec", x.record.ID)
			return
		}
	}
}

// DeleteExec ends an exec, with everything that it has started, if it runs, and forgets it.
func (s *API) DeleteExec(ctx context.Context, ref, id string) error {
	rec, err := s.lookup(ref)
	if err != nil {
		return err
	}
	if deleted, err := s.execs.deletePrepared(rec.ID, id); deleted || err != nil {
		return err
	}
	x, err := s.Exec(rec.ID, id)
	if err != nil {
		return err
	}
	p := x.common()
	d, isDetached := x.(*Detached)
	if isDetached {
		d.log.ReleaseHolds()
	}
	if !p.ended() {
		if err := p.guest.Kill(); err != nil && p.lease != nil {
			return s.guests.Lost(ctx, p.lease, err)
		}
	}
	select {
	case <-x.over():
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if isDetached { // its own request removes a foreground one
		s.forget(ctx, d)
	}
	return nil
}

// Input copies r to the program's stdin, and then closes it if end is set. It blocks while the
// program does not read, until ctx ends. Several writers take turns.
func (x *program) Input(ctx context.Context, r io.Reader, end bool) error {
	if x.ended() || x.guest.Stdin == nil {
		return class.Mark(runtime.ErrState, fmt.Errorf("write to stdin: %w", errNoStdin))
	}
	select {
	case x.input <- struct{}{}:
		defer func() { <-x.input }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if end && x.req.TTY {
		r = io.MultiReader(r, bytes.NewReader([]byte{eot})) // here, where ctx ends a blocked write
	}
	err := x.guest.Copy(ctx, r)
	switch {
	case errors.Is(err, unix.EPIPE), errors.Is(err, os.ErrClosed), errors.Is(err, unix.EIO) && x.req.TTY:
		return class.Mark(runtime.ErrState, fmt.Errorf("write to stdin: %w", errNoStdin))
	case err != nil:
		return err
	case end && !x.req.TTY:
		_ = x.closeStdin() // closing twice, or after the program, changes nothing
	}
	return nil
}

// Input writes to stdin as that of a program does. With end, the next daemon does not get stdin.
func (x *Detached) Input(ctx context.Context, r io.Reader, end bool) error {
	if err := x.program.Input(ctx, r, end); err != nil || !end || x.req.TTY {
		return err
	}
	return x.endStdin(ctx)
}

// endStdin makes the launcher drop its copy of a closed stdin: the program sees the end when no
// other copy is open.
func (x *Detached) endStdin(ctx context.Context) error {
	x.keeping.Lock()
	x.noStdin = true
	x.keeping.Unlock()
	err := x.storeDescriptors(ctx)
	if !x.s.execs.has(x) {
		x.s.dropDescriptors(ctx, x.record.Sandbox, x.record.ID) // it was forgotten concurrently
	}
	if err != nil && !x.ended() {
		return err
	}
	return nil
}

var errNoStdin = errors.New("the program's stdin is not open: it was not started with stdin_open, has closed it, or has ended")

// Attach emits the output from this offset on, and last how the program ended.
// It returns after that, with emit's error, when ctx ends, or with a [*Failure] where the exit is
// unknown. The program does not notice.
func (x *Detached) Attach(ctx context.Context, from int64, text bool, emit func(api.ExecEvent) error) error {
	defer x.log.Follow()()
	return x.attach(ctx, from, text, make([]byte, 64<<10), emit)
}

// AttachHeld is Attach from the oldest output on, and nothing after that is dropped: a program that
// writes faster than emit takes waits. U is nil, or has waited for the execution.
func (x *Detached) AttachHeld(ctx context.Context, from int64, u *Upcoming, text bool, emit func(api.ExecEvent) error) error {
	if u == nil {
		u = &Upcoming{hold: x.log.Hold(from)}
	}
	defer u.hold.Release()
	return x.Attach(ctx, from, text, func(e api.ExecEvent) error {
		err := emit(e)
		if n := len(e.Data) + len(e.Text); n > 0 {
			u.hold.Taken(e.Offset + int64(n))
		}
		return err
	})
}

// attach is Attach, with buf for as much output as an event may have.
func (x *Detached) attach(ctx context.Context, from int64, text bool, buf []byte, emit func(api.ExecEvent) error) error {
	first := true
	for {
		c, err := x.log.Read(from, buf)
		if errors.Is(err, os.ErrClosed) {
			err = class.Mark(class.ErrNoExec, fmt.Errorf("exec %s has been deleted", x.record.ID))
		}
		if err != nil {
			return err
		}
		if first || c.At > from {
			e := api.ExecEvent{Offset: c.At, Dropped: max(0, c.At-from)}
			if first {
				e.PID, e.Exec = x.PID, x.record.ID
			}
			if err := emit(e); err != nil {
				return err
			}
			first, from = false, c.At
		}
		if c.Over {
			break
		}
		if tail := output.Tail(c.Data); text && !c.Whole && tail > 0 {
			// A character whose rest is not there yet. If there is more than what buf takes, the next chunk
			// begins with it.
			c.Data = c.Data[:len(c.Data)-tail]
		}
		if len(c.Data) > 0 {
			e := output.Event(c.Stream, c.Data)
			if !text {
				e = api.ExecEvent{Stream: c.Stream, Data: c.Data}
			}
			e.Offset = c.At
			if err := emit(e); err != nil {
				return err
			}
			from = c.At + int64(len(c.Data))
			if c.More == nil {
				continue
			}
		}
		if c.More == nil {
			return fmt.Errorf("attach to exec %s: its output makes no progress at %d", x.record.ID, from)
		}
		select {
		case <-c.More:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	select {
	case <-x.done:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	rec := x.Record()
	if rec.Failure != nil {
		return rec.Failure
	}
	return emit(api.ExecEvent{Exit: rec.Exit, Usage: rec.Usage})
}

// OutputEnd returns the offset behind the output so far.
func (x *Detached) OutputEnd() int64 { return x.log.End() }

// Processes lists the processes of the sandbox with this id or name.
func (s *API) Processes(ctx context.Context, ref string) (api.ProcessList, error) {
	lease, err := s.begin(ref)
	if err != nil {
		return api.ProcessList{}, err
	}
	defer lease.End()
	ctx, cancel := guests.WithGone(ctx, lease)
	defer cancel()
	found, err := guests.Of(lease).Processes(ctx)
	switch {
	case errors.Is(err, guests.ErrEnded):
		return api.ProcessList{}, s.guests.Ended(lease)
	case err != nil:
		return api.ProcessList{}, s.guests.Lost(ctx, lease, err)
	}
	from := map[int]string{}
	s.execs.mu.Lock()
	for id, x := range s.execs.of[lease.Record.ID] {
		if p := x.common(); !p.ended() {
			from[p.PID] = id
		}
	}
	s.execs.mu.Unlock()
	now := time.Now().UTC()
	list := api.ProcessList{Processes: make([]api.Process, 0, len(found))}
	for i := range found {
		p := &found[i]
		out := api.Process{
			PID: p.PID, PPID: p.PPID, UID: p.UID, State: p.State, StartedAt: now.Add(-p.Age), CPUMS: float64(p.CPU.Microseconds()) / 1000,
			RSS: p.RSS, Name: p.Name, Truncated: p.Cut, Exec: from[p.Main],
		}
		for _, a := range p.Argv {
			out.Argv = append(out.Argv, strings.ToValidUTF8(a, "\uFFFD"))
		}
		list.Processes = append(list.Processes, out)
	}
	slices.SortFunc(list.Processes, func(a, b api.Process) int { return cmp.Compare(a.PID, b.PID) })
	return list, nil
}

// adoptRetry is the interval at which the launcher is asked again for execs.
const adoptRetry = 2 * time.Second

// adoptExecs adopts the execs of the last daemon, then starts missing main processes. The daemon
// starts without them: if the launcher does not answer, it is asked again until it does.
func (s *core) adoptExecs(ctx context.Context) {
	err := s.adoption(ctx)
	if err == nil {
		s.startMissing() //nolint:contextcheck // removals outlive what starts them
		return
	}
	s.log.Warn("detached execs are not adopted yet, trying again", "error", err)
	s.work.Go(func() { //nolint:contextcheck // see above
		tick := time.NewTicker(adoptRetry)
		defer tick.Stop()
		for s.adoption(s.work.Context()) != nil {
			select {
			case <-tick.C:
			case <-s.work.Context().Done():
				return
			}
		}
		s.startMissing() // not before: what runs is not missing
	})
}

// adoption adopts the execs once. No descriptors may be stored before, or they would be taken for
// an exec of the last daemon.
func (s *core) adoption(ctx context.Context) error {
	if s.execs.adopted.Load() || s.descriptors == nil {
		return nil
	}
	select {
	case s.execs.adopting <- struct{}{}:
		defer func() { <-s.execs.adopting }()
	case <-ctx.Done():
		return fmt.Errorf("wait for the execs that the daemon before has left: %w", context.Cause(ctx))
	}
	if s.execs.adopted.Load() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	all, err := s.descriptors.StoredDescriptors(ctx)
	if err != nil {
		return fmt.Errorf("have the execs that the daemon before has left: %w", err)
	}
	// The log of a sandbox has its main processes in the order of their lives; the launcher keeps no
	// order.
	lives := make(map[string]int, len(all))
	for _, d := range all {
		rest, _ := restOf(d) // its adoption reports the error
		lives[d.Sandbox+d.Name] = rest.Life
	}
	slices.SortFunc(all, func(a, b runtime.DescriptorSet) int {
		return cmp.Compare(lives[a.Sandbox+a.Name], lives[b.Sandbox+b.Name])
	})
	for _, d := range all {
		if err := s.adoptExec(d); err != nil {
			level := slog.LevelWarn
			if errors.Is(err, errUnfinished) {
				level = slog.LevelInfo
			}
			s.log.Log(ctx, level, "detached exec is not adopted", "id", d.Sandbox, "exec", d.Name, "error", err)
			s.dropDescriptors(ctx, d.Sandbox, d.Name)
		}
	}
	s.resumeContexts()
	s.execs.adopted.Store(true)
	return nil
}

// restOf returns the state of an exec that the last daemon left.
func restOf(d runtime.DescriptorSet) (rest left, err error) {
	if len(d.Files) < 2 {
		return rest, fmt.Errorf("%d descriptors", len(d.Files))
	}
	ok, err := execlog.ReadDocument(d.Files[1], execlog.Record, &rest)
	switch {
	case err != nil:
	case !ok:
		err = errors.New("it has no record")
	case rest.Record.ID != d.Name || rest.Record.Sandbox != d.Sandbox:
		err = errors.New("its record is another's")
	}
	return rest, err
}

// adoptExec takes over the files of a set.
func (s *core) adoptExec(d runtime.DescriptorSet) (err error) {
	files := d.Files
	defer func() { closeFiles(files) }()
	if _, err := s.supervisor.Get(d.Sandbox); err != nil {
		return err
	}
	rest, err := restOf(d)
	if err != nil {
		return err
	}
	rest.Record.Main = rest.Main
	p := &program{PID: rest.Record.PID, s: s, req: rest.Request, input: make(chan struct{}, 1), done: make(chan struct{}), record: rest.Record}
	x := &Detached{program: p, kept: rest.Kept}
	x.oom = &oomWatch{s: s, id: d.Sandbox}
	if rest.OOM != nil {
		x.oom.before, x.oom.done = *rest.OOM, make(chan struct{})
		close(x.oom.done)
	}
	if x.log, err = execlog.Adopt(files[0], files[1], cmp.Or(rest.Request.OutputLimit, defaultOutputLimit)); err != nil {
		return err
	}
	var end ExecRecord
	ended, err := x.log.Document(execlog.End, &end)
	if err != nil {
		return err
	}
	if !ended && len(files) < 4 {
		return fmt.Errorf("it runs, with %d descriptors", len(files))
	}
	if ended {
		end.convert()
		files = files[2:] // the others are closed: the daemon before was about to
		if rest.Main {
			// The daemon before perhaps did not come to end the sandbox with it.
			if lease, err := s.supervisor.Rejoin(d.Sandbox); err == nil {
				defer lease.End()
				if lease.Record.PID == rest.Init {
					x.lease = lease
				}
			}
			s.adoptMain(x, rest.Life)
			s.keepLog(x)
		}
		if err := s.adoptContext(x); err != nil {
			return err
		}
		s.adoptRecord(x)
		x.conclude(end)
		s.work.Go(func() { x.finish(s.work.Context()) })
		return nil
	}
	k := host.Kept{Conn: files[2], Stdout: files[3]}
	more := files[4:]
	switch {
	case x.req.TTY && len(more) == 2:
		x.log.AdoptRelay(more[0], more[1])
	case !x.req.TTY && len(more) > 0 && len(more) <= 2:
		k.Stderr = more[0]
		if len(more) == 2 {
			k.Stdin = more[1]
		}
	default:
		return fmt.Errorf("it runs, with %d descriptors", len(files))
	}
	client := host.NewClient("") // of a sandbox that has ended nothing is asked
	rejoin := s.supervisor.Rejoin
	if ofContext(x.log) {
		rejoin = s.supervisor.Observe // see detach
	}
	switch lease, err := rejoin(d.Sandbox); {
	case err != nil:
	case lease.Record.PID != rest.Init:
		lease.End() // it has been started again, and its new init is not to blame for what became of the old one's execs
	default:
		x.lease = lease
		client = guests.Of(lease)
	}
	files = nil
	timeout, err := seconds("timeout", x.req.Timeout)
	if err == nil {
		x.guest, err = client.Adopt(k, host.ExecRequest{TTY: x.req.TTY, Timeout: timeout}, x.PID, x.record.StartedAt)
	}
	if err == nil {
		if err = s.adoptContext(x); err != nil {
			_ = x.guest.Kill()  // closing the connection alone kills nothing of which the launcher has a copy
			_ = x.guest.Close() // always nil
		}
	}
	if err != nil {
		x.log.Close()
		if x.lease != nil {
			x.lease.End()
		}
		return err
	}
	if rest.Main {
		s.adoptMain(x, rest.Life)
	}
	s.adoptRecord(x)
	if !s.follow(x) {
		return class.ErrStopping
	}
	s.log.Info("exec adopted", "id", d.Sandbox, "exec", d.Name)
	return nil
}

// adoptRecord lists an adopted exec.
func (s *core) adoptRecord(x *Detached) {
	s.execs.mu.Lock()
	s.execs.add(x.record.Sandbox, 1, x.kept)
	s.execs.mu.Unlock()
	s.execs.register(x)
}

func closeFiles(files []*os.File) {
	for _, f := range files {
		_ = f.Close() // never written
	}
}

// rlimits are the resources that a sandbox or an exec may limit.
var rlimits = map[string]int{
	"as": unix.RLIMIT_AS, "core": unix.RLIMIT_CORE, "cpu": unix.RLIMIT_CPU, "data": unix.RLIMIT_DATA, "fsize": unix.RLIMIT_FSIZE,
	"memlock": unix.RLIMIT_MEMLOCK, "nofile": unix.RLIMIT_NOFILE, "nproc": unix.RLIMIT_NPROC, "stack": unix.RLIMIT_STACK,
}

// limitsOf turns the limits of a sandbox and those of a request, which replace them, into init's,
// in an order that does not change. Both have been validated.
func limitsOf(sandbox map[string]api.Rlimit, asked map[string]uint64) []guest.Rlimit {
	var out []guest.Rlimit
	for _, name := range slices.Sorted(maps.Keys(rlimits)) {
		n, ofExec := asked[name]
		l, ofSandbox := sandbox[name]
		switch {
		case ofExec:
			out = append(out, guest.Rlimit{Resource: rlimits[name], Value: n})
		case ofSandbox && l.Soft != l.Hard:
			out = append(out, guest.Rlimit{Resource: rlimits[name], Value: l.Hard, Soft: &l.Soft})
		case ofSandbox:
			out = append(out, guest.Rlimit{Resource: rlimits[name], Value: l.Hard})
		}
	}
	return out
}

// limitName is what init's number of a limit is called.
func limitName(number string) string {
	for name, n := range rlimits {
		if fmt.Sprint(n) == number {
			return name
		}
	}
	return number
}
