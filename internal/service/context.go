package service

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/exec"
	"github.com/sandboxd/sandboxd/internal/service/execlog"
	"github.com/sandboxd/sandboxd/internal/service/guests"
	"github.com/sandboxd/sandboxd/interpreter"
	"github.com/sandboxd/sandboxd/interpreter/resident"
	"github.com/sandboxd/sandboxd/runtime"
)

// Bounds of contexts.
const (
	maxContexts      = 24        // of one sandbox: each is a detached exec
	maxContextEnv    = 64 << 10  // bytes of a context's own environment
	minContextMemory = 64 << 20  // bytes
	contextOutput    = 256 << 10 // bytes of output that wait for the daemon
	maxQueued        = 16        // runs that wait for one context
	maxPreload       = 32        // modules

	// helloTimeout bounds the start of an interpreter.
	helloTimeout = 60 * time.Second
	// defaultInterruptGrace is the default of [Options.InterruptGrace].
	defaultInterruptGrace = 5 * time.Second
	// interruptAgain is the time between the SIGINTs for a run, where they are repeated. A program that
	// heeds the first one has it to clean up.
	interruptAgain = 3 * time.Second
)

// contexts is the registry of the contexts of all sandboxes.
type contexts struct {
	mu     sync.Mutex
	of     map[string]map[string]*codeContext // by the sandbox's id and the context's
	spares map[string]*spare                  // by the sandbox's id
}

// A codeContext is a resident interpreter: a detached exec that is replaced when it has died.
type codeContext struct {
	s *core
	contextRecord

	turn chan struct{} // semaphore of one: a run, a restart, the end

	mu      sync.Mutex
	queued  int
	deleted bool
	x       *Detached     // process; nil until the first has started
	output  *execlog.Log  // of it
	hold    *execlog.Hold // of its output
	kernel  resident.Kernel
	split   resident.Splitter // of its output; only with the turn
	from    int64             // offset behind the output that was split; only with the turn
	pace    kernelPace        // of its reader; only with the turn
	place   place
	run     *contextRun // under way
	expiry  *time.Timer // nil without idle timeout

	parked *parkedSpare // for its first process; nil if none waited, or the first start has taken it
}

// contextRecord is the part of a context that never changes, once it is no spare. The exec's log
// has it for the next daemon.
type contextRecord struct {
	ID      string
	Sandbox string
	Created time.Time
	Request api.CreateContext // Language is a name, not an alias
	Key     string            // of the process: see [resident.For]
	Begins  bool              // of the process's kernel, which may be an older daemon's: see [resident.Kernel]
}

// place is the part of a context that changes. It is written in one page, so that a killed daemon
// leaves the old one or the new one.
type place struct {
	At         int64  // offset in the exec's output: all frames before it are read
	Used       int64  // time of the end of the last run, in nanoseconds since 1970
	Deadline   int64  // of the run under way, in nanoseconds since 1970; 0 means none
	Run        uint32 // number of the last run, of all processes
	Count      uint32 // runs of the process
	Interrupts uint32 // that the process was sent
	Ready      bool   // the process has said hello
	Busy       bool   // the last run has not ended
	Told       bool   // a client was told that the process ended
	Sending    bool   // the code of the last run may not have been sent as a whole
	Interrupt  bool   // the run under way is to be interrupted
	Sent       bool   // it was
}

// contextRun is a run under way.
type contextRun struct {
	began       time.Time
	ready       bool        // the kernel takes a SIGINT as one of this run
	timer       *time.Timer // nil without timeout
	grace       *time.Timer // nil until it is interrupted
	again       *time.Timer // nil until it is interrupted, and where the signal is not repeated
	timeout     bool        // its timeout has ended
	interrupted bool
	killed      string // reason why the daemon has killed the process
}

// writePlace needs mu.
func (c *codeContext) writePlace() {
	if err := c.output.WritePlace(&c.place); err != nil && !c.deleted {
		c.s.log.Warn("the state of a context is not kept for the next daemon", "id", c.Sandbox, "context", c.ID, "error", err)
	}
}

// attach makes a program that has started the process of the context. It is called before output
// is collected, so that nothing is dropped.
func (c *codeContext) attach(x *Detached) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.deleted {
		return c.missing()
	}
	if err := x.Output().Write(execlog.Context, c.contextRecord); err != nil {
		return err
	}
	c.x, c.output, c.hold = x, x.Output(), x.Output().Hold(0)
	c.split, c.from = c.kernel.NewSplitter(), 0
	c.place = place{Run: c.place.Run, Used: c.place.Used}
	c.writePlace()
	return nil
}

func (c *codeContext) missing() error {
	return class.Mark(class.ErrNoContext, fmt.Errorf("context %q of sandbox %s: %w", class.Clip(c.ID), c.Sandbox, class.ErrNoContext))
}

// process returns the current process.
func (c *codeContext) process() *Detached {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.x
}

// shown returns the context as the API has it.
func (c *codeContext) shown() api.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := api.Context{
		ID: c.ID, Sandbox: c.Sandbox, Language: c.Request.Language, Cwd: c.x.Record().Cwd, State: api.ContextIdle, CreatedAt: c.Created,
		UsedAt: time.Unix(0, c.place.Used).UTC(), ExecutionCount: int(c.place.Count), Exec: c.x.ID(),
	}
	switch {
	case c.x.Ended():
		out.State = api.ContextDead
	case c.place.Busy:
		out.State = api.ContextBusy
	}
	return out
}

func validateContext(req *api.CreateContext) error {
	name := cmp.Or(req.Language, "python")
	if lang := interpreter.Find(name); lang != nil {
		name = lang.Name
	}
	k, ok := resident.For(name, "")
	if !ok {
		return class.Invalidf("language %q: contexts are of %s", class.Clip(req.Language), strings.Join(resident.Languages(), ", "))
	}
	req.Language = k.Language
	if req.Cwd != "" {
		if err := validatePath("cwd", req.Cwd); err != nil {
			return err
		}
	}
	if err := validateUser(req.User); err != nil {
		return err
	}
	if err := validateEnv(req.Env); err != nil {
		return err
	}
	size := 0
	for _, kv := range req.Env {
		size += len(kv)
	}
	if size > maxContextEnv {
		return class.Invalidf("env: %d bytes, more than %d", size, maxContextEnv)
	}
	if req.Memory != 0 && req.Memory < minContextMemory {
		return class.Invalidf("memory %d: must be 0 or at least %d", req.Memory, int64(minContextMemory))
	}
	if err := validatePreload(req, &k); err != nil {
		return err
	}
	_, err := seconds("idle_timeout", req.IdleTimeout)
	return err
}

// identifier is a part of the name of a module.
var identifier = regexp.MustCompile(`^[A-Za-z_]\w*$`)

// isModule reports whether name is that of a module to import: at most 8 parts of at most 64 bytes.
// With the counts in it, the expression would cost every start of the program 0.2 ms.
func isModule(name string) bool {
	parts := strings.SplitN(name, ".", 9)
	return len(parts) <= 8 && !slices.ContainsFunc(parts, func(part string) bool { return len(part) > 64 || !identifier.MatchString(part) })
}

func validatePreload(req *api.CreateContext, k *resident.Kernel) error {
	switch n := len(req.Preload); {
	case n > 0 && !k.Preloads:
		return class.Invalidf("preload: contexts of %s preload nothing", k.Language)
	case n > maxPreload:
		return class.Invalidf("preload: %d modules, at most %d are possible", n, maxPreload)
	}
	for i, name := range req.Preload {
		if !isModule(name) {
			return class.Invalidf("preload[%d] %q: not the name of a module", i, class.Clip(name))
		}
	}
	return nil
}

// CreateContext starts a context in the sandbox with this id or name, and waits until it is ready.
func (s *API) CreateContext(ctx context.Context, ref string, req api.CreateContext) (_ api.Context, err error) {
	if err := validateContext(&req); err != nil {
		return api.Context{}, err
	}
	rec, err := s.lookup(ref)
	if err != nil {
		return api.Context{}, err
	}
	parked := s.parked.take(rec.ID)
	if parked != nil {
		defer func() {
			if err != nil {
				parked.end()
			}
		}()
	}
	if err := s.execs.Adopt(ctx); err != nil { // or contexts of the last daemon are not counted
		return api.Context{}, err
	}
	if err := s.judgePreload(ctx, rec.ID, &req); err != nil {
		return api.Context{}, err
	}
	now := time.Now().UTC()
	c := s.takeSpare(rec.ID, req)
	if c == nil {
		c = s.newContext(contextRecord{Sandbox: rec.ID})
		c.parked = parked
	}
	c.ID, c.Created, c.Request = exec.NewID(), now, req
	c.place.Used = now.UnixNano()
	c.turn <- struct{}{}
	defer c.release()
	if err := s.contexts.add(c); err != nil {
		s.removeContext(ctx, c)
		return api.Context{}, err
	}
	lease, err := s.begin(rec.ID)
	if err != nil {
		s.removeContext(ctx, c)
		return api.Context{}, err
	}
	defer lease.End()
	ctx, cancel := guests.WithGone(ctx, lease)
	defer cancel()
	if err := c.open(ctx, &rec); err != nil {
		s.removeContext(ctx, c)
		if errors.Is(context.Cause(ctx), guests.ErrEnded) {
			return api.Context{}, s.guests.Ended(lease)
		}
		return api.Context{}, err
	}
	if len(req.Preload) > 0 {
		s.refillSpare(rec.ID, req)
	}
	return c.shown(), nil
}

// open makes a new context ready: a spare by its record, others by a start.
func (c *codeContext) open(ctx context.Context, rec *runtime.Record) error {
	x := c.process()
	if x == nil || x.Ended() {
		return c.start(ctx, rec)
	}
	if err := x.Output().Write(execlog.Context, c.contextRecord); err != nil {
		return err
	}
	c.setReady()
	return nil
}

func (s *core) newContext(rec contextRecord) *codeContext {
	return &codeContext{s: s, contextRecord: rec, turn: make(chan struct{}, 1)}
}

func (cs *contexts) add(c *codeContext) error {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	of := cs.of[c.Sandbox]
	if len(of) >= maxContexts {
		return class.Mark(runtime.ErrInUse, fmt.Errorf("create context: sandbox %s has %d, which is the most", c.Sandbox, maxContexts))
	}
	cs.set(c)
	if len(cs.of[c.Sandbox]) == maxContexts {
		cs.dropSpare(c.Sandbox)
	}
	return nil
}

// set needs mu.
func (cs *contexts) set(c *codeContext) {
	if cs.of[c.Sandbox] == nil {
		if cs.of == nil {
			cs.of = make(map[string]map[string]*codeContext)
		}
		cs.of[c.Sandbox] = make(map[string]*codeContext)
	}
	cs.of[c.Sandbox][c.ID] = c
}

// remove takes a context out of the registry: it is found no more.
func (cs *contexts) remove(c *codeContext) {
	cs.mu.Lock()
	if of := cs.of[c.Sandbox]; of[c.ID] == c {
		if delete(of, c.ID); len(of) == 0 {
			delete(cs.of, c.Sandbox)
		}
	}
	cs.mu.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.deleted = true
	if c.expiry != nil {
		c.expiry.Stop()
	}
}

// forget drops the contexts of a deleted sandbox.
func (cs *contexts) forget(sandbox string) {
	cs.mu.Lock()
	all := slices.Collect(maps.Values(cs.of[sandbox]))
	cs.dropSpare(sandbox)
	cs.mu.Unlock()
	for _, c := range all {
		cs.remove(c)
	}
}

// start starts the process of a context and makes it ready.
func (c *codeContext) start(ctx context.Context, rec *runtime.Record) error {
	if err := c.startProcess(ctx, rec); err != nil {
		return err
	}
	c.setReady()
	return nil
}

// setReady notes that the process takes runs: the next daemon keeps it from here on.
func (c *codeContext) setReady() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.place.Ready = true
	c.writePlace()
}

// contextExec returns the request for the process of a context.
func contextExec(k *resident.Kernel, ask *api.CreateContext) api.ExecRequest {
	req := api.ExecRequest{
		Argv: k.Argv, Stdin: k.Stdin, StdinOpen: true, Detach: true, OutputLimit: contextOutput, Cwd: ask.Cwd, User: ask.User, Env: ask.Env,
	}
	if ask.Memory > 0 {
		req.Rlimits = map[string]uint64{"as": uint64(ask.Memory)}
	}
	return req
}

// startProcess starts the process of a context and waits for its first message. A process that does
// not send it is removed. One that has waited in the parked sandbox may have died since: then
// another is started.
func (c *codeContext) startProcess(ctx context.Context, rec *runtime.Record) error {
	if sp := c.parked; sp != nil {
		c.parked = nil
		if sp.fits(c.Request) {
			err := c.startAs(ctx, rec, sp)
			if err == nil || ctx.Err() != nil {
				return err
			}
			c.s.log.Info("an interpreter that waited is of no use", "id", c.Sandbox, "pool", sp.pool, "error", err)
		}
		sp.end()
	}
	return c.startAs(ctx, rec, nil)
}

// startAs is startProcess with an interpreter that has waited, or without one.
func (c *codeContext) startAs(ctx context.Context, rec *runtime.Record, parked *parkedSpare) error {
	key := rand.Text()
	if parked != nil {
		key = parked.key
	}
	k, ok := resident.For(c.Request.Language, key, c.Request.Preload...)
	if !ok {
		return class.Invalidf("language %q: has no contexts any more", c.Request.Language)
	}
	c.mu.Lock()
	c.kernel, c.Key, c.Begins = k, key, k.Begins
	c.mu.Unlock()
	old := c.process()
	req := contextExec(&k, &c.Request)
	if parked != nil {
		req.Stdin = nil // it has that
	}
	as := exec.As{Context: c.attach}
	if parked != nil {
		as.Running = parked.program
	}
	if _, err := c.s.execs.Detach(ctx, rec, req, as); err != nil {
		if errors.Is(class.Marked(err), class.ErrProgramMissing) {
			return noLanguage(rec, interpreter.Find(k.Language), []string{k.Program})
		}
		return fmt.Errorf("start %s: %w", k.Language, err)
	}
	if old != nil {
		c.s.execs.Forget(ctx, old)
	}
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	said, err := c.read(ctx, func(f resident.Frame) (frameUse, error) {
		if f.Kind == resident.KindStdout || f.Kind == resident.KindStderr { // of the start of an interpreter
			return frameDropped, nil
		}
		_, err := resident.ParseHello(f)
		return frameLast, err
	})
	if err != nil {
		x := c.process()
		c.end(context.WithoutCancel(ctx))
		if errors.Is(err, errDied) {
			if exit := x.Record().Exit; exit != nil && exit.Code == 127 { // of the shell that starts it
				return noLanguage(rec, interpreter.Find(k.Language), []string{k.Program})
			}
			err = fmt.Errorf("%s ended: %s", k.Program, endOf(x, said))
		}
		return class.Mark(class.ErrContext, fmt.Errorf("start %s: %w", k.Language, err))
	}
	if parked != nil {
		c.s.parked.hit(parked.pool)
	}
	return nil
}

// end kills the process with everything that it has started, and waits for that.
func (c *codeContext) end(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	x := c.process()
	if x == nil {
		return
	}
	x.Output().ReleaseHolds() // or the collector waits for a reader
	_ = x.Kill()              // fails if init is lost, which ends the sandbox
	select {
	case <-x.Over():
	case <-c.s.work.Ctx.Done(): // the daemon stops, and its collectors with it
	case <-ctx.Done():
		c.s.log.Warn("the process of a context has not ended", "id", c.Sandbox, "context", c.ID, "exec", x.ID())
	}
}

// restart replaces the process. The caller has the turn.
func (c *codeContext) restart(ctx context.Context) error {
	rec, err := c.s.supervisor.Get(c.Sandbox)
	if err != nil {
		return err
	}
	c.end(ctx)
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	return c.start(ctx, &rec)
}

// arm starts the idle time. It needs mu.
func (c *codeContext) arm() {
	idle, err := seconds("idle_timeout", c.Request.IdleTimeout)
	if err != nil || idle == 0 || c.deleted {
		return
	}
	if c.expiry != nil {
		c.expiry.Stop()
	}
	c.expiry = time.AfterFunc(time.Until(time.Unix(0, c.place.Used).Add(idle)), func() {
		c.s.work.Go(func() {
			select {
			case c.turn <- struct{}{}:
			default:
				return // it is used, and armed again by release
			}
			c.mu.Lock()
			due := time.Since(time.Unix(0, c.place.Used)) >= idle && c.queued == 0
			c.mu.Unlock()
			if due {
				c.s.removeContext(c.s.work.Ctx, c)
			}
			c.release()
		})
	})
}

// removeContext ends a context. The caller has the turn, or lets the run under way fail.
func (s *core) removeContext(ctx context.Context, c *codeContext) {
	s.contexts.remove(c)
	ctx = context.WithoutCancel(ctx)
	c.end(ctx)
	if x := c.process(); x != nil && x.Ended() {
		s.execs.Forget(ctx, x)
	}
}

// findContext returns a context of the sandbox with this id or name.
func (s *API) findContext(ctx context.Context, ref, id string) (*codeContext, error) {
	rec, err := s.lookup(ref)
	if err != nil {
		return nil, err
	}
	if err := s.execs.Adopt(ctx); err != nil {
		return nil, err
	}
	s.contexts.mu.Lock()
	c := s.contexts.of[rec.ID][id]
	s.contexts.mu.Unlock() // the lock of all tenants, which waits for no context
	if c == nil || c.process() == nil {
		return nil, class.Mark(class.ErrNoContext, fmt.Errorf("context %q of sandbox %s: %w", class.Clip(id), rec.Name, class.ErrNoContext))
	}
	return c, nil
}

// Contexts lists the contexts of the sandbox with this id or name, oldest first.
func (s *API) Contexts(ctx context.Context, ref string) (api.ContextList, error) {
	rec, err := s.lookup(ref)
	if err != nil {
		return api.ContextList{}, err
	}
	if err := s.execs.Adopt(ctx); err != nil {
		return api.ContextList{}, err
	}
	s.contexts.mu.Lock()
	all := slices.Collect(maps.Values(s.contexts.of[rec.ID]))
	s.contexts.mu.Unlock()
	list := api.ContextList{Contexts: []api.Context{}}
	for _, c := range all {
		if c.process() != nil { // else its creation has not been answered
			list.Contexts = append(list.Contexts, c.shown())
		}
	}
	slices.SortFunc(list.Contexts, func(a, b api.Context) int {
		return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), cmp.Compare(a.ID, b.ID))
	})
	return list, nil
}

// GetContext returns one context.
func (s *API) GetContext(ctx context.Context, ref, id string) (api.Context, error) {
	c, err := s.findContext(ctx, ref, id)
	if err != nil {
		return api.Context{}, err
	}
	return c.shown(), nil
}

// DeleteContext ends a context and all processes that it has started. A run under way fails.
func (s *API) DeleteContext(ctx context.Context, ref, id string) error {
	c, err := s.findContext(ctx, ref, id)
	if err != nil {
		return err
	}
	c.blame("it was deleted")
	s.removeContext(ctx, c)
	return nil
}

// InterruptContext sends SIGINT to the run under way. If the run does not end within some seconds,
// the context is restarted. Without a run nothing happens.
func (s *API) InterruptContext(ctx context.Context, ref, id string) (api.Context, error) {
	c, err := s.findContext(ctx, ref, id)
	if err != nil {
		return api.Context{}, err
	}
	c.mu.Lock()
	run := c.run
	c.mu.Unlock()
	if run != nil {
		c.interrupt(run, "it did not end after an interrupt")
	}
	return c.shown(), nil
}

// RestartContext replaces the process of a context. A run under way fails.
func (s *API) RestartContext(ctx context.Context, ref, id string) (api.Context, error) {
	c, err := s.findContext(ctx, ref, id)
	if err != nil {
		return api.Context{}, err
	}
	lease, err := s.begin(c.Sandbox)
	if err != nil {
		return api.Context{}, err
	}
	defer lease.End()
	ctx, cancel := guests.WithGone(ctx, lease)
	defer cancel()
	if c.blame("a restart was requested") {
		c.end(ctx)
	}
	if err := c.take(ctx); err != nil {
		return api.Context{}, err
	}
	defer c.release()
	if err := c.restart(ctx); err != nil {
		if errors.Is(context.Cause(ctx), guests.ErrEnded) {
			return api.Context{}, s.guests.Ended(lease)
		}
		return api.Context{}, err
	}
	return c.shown(), nil
}

// blame notes the reason for which the process of a run is about to be killed. It reports whether
// there is a run.
func (c *codeContext) blame(why string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.run != nil {
		c.run.killed = cmp.Or(c.run.killed, why)
	}
	return c.run != nil
}

// take waits for the context's turn.
func (c *codeContext) take(ctx context.Context) error {
	c.mu.Lock()
	if c.queued >= maxQueued {
		c.mu.Unlock()
		return class.Mark(runtime.ErrInUse, fmt.Errorf("run in context %s: %d runs wait for it, which is the most", c.ID, maxQueued))
	}
	c.queued++
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.queued--
	}()
	select {
	case c.turn <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.deleted {
		<-c.turn
		return c.missing()
	}
	return nil
}

// release gives the turn back. It begins the idle time anew: one that has ended meanwhile found the
// turn taken.
func (c *codeContext) release() {
	<-c.turn
	c.mu.Lock()
	defer c.mu.Unlock()
	c.arm()
}

// adoptContext makes an adopted exec the process of a context, if it is one. It is called before
// output is collected.
func (s *core) adoptContext(x *Detached) error {
	var rec contextRecord
	if ok, err := x.Output().Document(execlog.Context, &rec); err != nil || !ok {
		return err
	}
	var p place
	switch err := x.Output().ReadPlace(&p); {
	case err != nil:
		return err
	case rec.Sandbox != x.Record().Sandbox || p.At < 0 || p.At > x.Output().End() || p.Count > math.MaxInt32:
		return errors.New("the state of its context is damaged")
	case !p.Ready: // the daemon ended before it had answered the creation
		return exec.ErrUnfinished
	}
	c := s.newContext(rec)
	k, ok := resident.For(rec.Request.Language, rec.Key)
	if !ok {
		return fmt.Errorf("language %q has no contexts", rec.Request.Language)
	}
	k.Begins = k.Begins && rec.Begins // the kernel runs the source of the daemon that has started it
	c.x, c.output, c.place, c.hold = x, x.Output(), p, x.Output().Hold(p.At)
	c.kernel, c.split, c.from = k, k.NewSplitter(), p.At
	s.contexts.mu.Lock()
	defer s.contexts.mu.Unlock()
	if other := s.contexts.of[rec.Sandbox][rec.ID]; other != nil {
		// A restart was cut off: the older process is the one to end.
		if other.x.Record().StartedAt.After(x.Record().StartedAt) {
			return exec.ErrUnfinished
		}
		s.work.Go(func() { s.endReplaced(other.x) })
	}
	s.contexts.set(c)
	return nil
}

// endReplaced ends a process that is no context's any more.
func (s *core) endReplaced(x *Detached) {
	x.Output().ReleaseHolds()
	_ = x.Kill() // fails if init is lost, which ends the sandbox
	select {
	case <-x.Over():
		s.execs.Forget(s.work.Ctx, x)
	case <-s.work.Ctx.Done():
	}
}

// resumeContexts goes on with the contexts of the last daemon: runs under way, idle times.
func (s *core) resumeContexts() {
	s.contexts.mu.Lock()
	defer s.contexts.mu.Unlock()
	for _, of := range s.contexts.of {
		for _, c := range of {
			c.mu.Lock()
			if c.place.Busy && !c.x.Ended() {
				run := c.begin(0)
				run.ready = true // as far as is known
				if c.place.Deadline > 0 {
					c.bound(run, time.Until(time.Unix(0, c.place.Deadline)))
				}
				if c.place.Interrupt {
					c.send(run, "it did not end after an interrupt")
				}
				c.turn <- struct{}{} // it was just made
				if !s.work.Go(func() {
					// A lease: a sandbox in which code runs is used.
					if lease, err := s.supervisor.Rejoin(c.Sandbox); err == nil {
						defer lease.End()
					}
					if c.resend() {
						c.drain(run)
					} else {
						c.release()
					}
				}) {
					<-c.turn
				}
			} else {
				c.arm()
			}
			c.mu.Unlock()
		}
	}
}
