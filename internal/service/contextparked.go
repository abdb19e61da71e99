package service

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/guest/host"
	"github.com/sandboxd/sandboxd/internal/service/guests"
	"github.com/sandboxd/sandboxd/interpreter/resident"
	"github.com/sandboxd/sandboxd/runtime"
)

const (
	// parkedLook is the interval at which missing interpreters are looked for, if nothing has changed.
	parkedLook = 10 * time.Second
	// parkedPause is the pause after a start that failed. It doubles with each, up to maxParkedPause.
	parkedPause    = 10 * time.Second
	maxParkedPause = 10 * time.Minute
	// parkedEnd bounds the wait for the end of an interpreter that does not become a context.
	parkedEnd = 3 * time.Second
	// wordsTimeout bounds the wait for the rest of the stderr of an interpreter that has ended.
	wordsTimeout = time.Second
)

// A parkedSpare is the interpreter of the first context of a sandbox, started while the sandbox was
// parked.
//
// It becomes a context only if the context's code sees no difference, except in times: the sandbox
// was claimed as it was parked, the context's request asks for nothing more, and no program has run
// in the sandbox and no file was written since. Until then it is no exec of the sandbox, and in no
// descriptor store: it ends with the daemon.
type parkedSpare struct {
	pool   string            // key
	req    api.CreateContext // language and modules
	key    string            // of the process: see [resident.For]
	cancel context.CancelFunc
	client *host.Client
	over   chan struct{} // closed when its start is over: it is ready, or its process has ended

	// Guarded by mu of the registry; then the taker's.
	guest   *host.Exec // nil until it is ready
	claimed bool
}

// parkedSpares is the registry of the interpreters of all pools.
type parkedSpares struct {
	wake map[string]chan struct{} // by pool; each holds a value after a look at the pools

	mu       sync.Mutex
	of       map[string]*parkedSpare   // by the sandbox's id, until the first use of the sandbox
	hits     map[string]int64          // contexts that had one, by pool
	errs     map[string]string         // why one could not be started, by pool
	failures map[string]*parkedFailure // by pool; nil after a start that succeeded
}

func newParkedSpares(pools []Pool) *parkedSpares {
	p := &parkedSpares{
		wake: make(map[string]chan struct{}), of: make(map[string]*parkedSpare), hits: make(map[string]int64), errs: make(map[string]string),
		failures: make(map[string]*parkedFailure),
	}
	for i := range pools {
		p.wake[pools[i].Key()] = make(chan struct{}, 1)
	}
	return p
}

// changed has missing interpreters started. It does not block.
func (p *parkedSpares) changed() {
	for _, wake := range p.wake {
		select {
		case wake <- struct{}{}:
		default:
		}
	}
}

// claiming ends the interpreter of a sandbox that a client is about to get, unless the sandbox
// stays as it is: then the first context may have the interpreter.
func (p *parkedSpares) claiming(sandbox string, equal bool) {
	if !equal {
		p.drop(sandbox)
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if sp := p.of[sandbox]; sp != nil {
		sp.claimed = true
	}
}

// take removes the interpreter of a claimed sandbox from the registry, and returns it for the first
// context; nil if none is ready. One that is not ready has ended when take returns.
func (p *parkedSpares) take(sandbox string) *parkedSpare {
	p.mu.Lock()
	sp := p.of[sandbox]
	delete(p.of, sandbox)
	p.mu.Unlock()
	if sp == nil {
		return nil
	}
	if !sp.claimed || sp.guest == nil {
		sp.end()
		return nil
	}
	return sp
}

// drop ends the interpreter of a sandbox that is used for something else, or is gone. When it
// returns, the process is gone, so that neither a new limit nor a program meets it.
func (p *parkedSpares) drop(sandbox string) {
	if sp := p.take(sandbox); sp != nil {
		sp.end()
	}
}

// end ends the interpreter and waits for that. Before it is ready, its starter does.
func (sp *parkedSpare) end() {
	sp.cancel()
	if sp.guest != nil {
		killParked(sp.guest)
		_ = sp.guest.Close() // always nil
		return
	}
	patience := time.NewTimer(parkedEnd)
	defer patience.Stop()
	select {
	case <-sp.over:
	case <-patience.C:
	}
}

// killParked kills an interpreter and waits until init has reported the end.
func killParked(x *host.Exec) {
	if x.Kill() != nil {
		return // init is lost, which ends the sandbox
	}
	patience := time.AfterFunc(parkedEnd, func() { _ = x.Close() }) // which ends the wait, and init kills it again
	defer patience.Stop()
	_, _ = x.Wait() // fails if init is lost
}

// hit counts a context.
func (p *parkedSpares) hit(pool string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hits[pool]++
}

// fits reports whether a context of a request may have the interpreter.
func (sp *parkedSpare) fits(req api.CreateContext) bool {
	return reflect.DeepEqual(sp.req, spareOf(req))
}

// parkedContext returns the request that the interpreters of a pool are started for; false if the
// pool has none.
func parkedContext(w *Pool) (req api.CreateContext, ok bool, err error) {
	if w.Context == "" {
		return req, false, nil
	}
	words := strings.Split(w.Context, "+")
	req.Language = words[0]
	if len(words) > 1 {
		req.Preload = words[1:]
	}
	err = validateContext(&req)
	return req, err == nil, err
}

// CheckPool returns an error if no interpreter can wait in sandboxes for the context of a pool.
func CheckPool(w *Pool) error {
	_, _, err := parkedContext(w)
	return err
}

// keepParkedSpares starts an interpreter in each parked sandbox of the pools that want it, one at a
// time in each pool, until ctx ends. Then it ends those that are no context yet.
func (s *core) keepParkedSpares(ctx context.Context) {
	var pools sync.WaitGroup // one that hangs does not delay the others
	for i := range s.pools.Specs() {
		if w := &s.pools.Specs()[i]; w.Context != "" {
			pools.Go(func() { s.keepParked(ctx, w) })
		}
	}
	pools.Wait()
	s.parked.sweep(func(string, *parkedSpare) bool { return false })
}

// keepParked starts the missing interpreters of a pool until ctx ends, and drops those that have
// died or lost their sandbox.
func (s *core) keepParked(ctx context.Context, w *Pool) {
	look := time.NewTicker(parkedLook)
	defer look.Stop()
	for ctx.Err() == nil {
		s.parked.sweep(func(id string, sp *parkedSpare) bool {
			return sp.pool != w.Key() || s.supervisor.Exists(id) && (sp.guest == nil || !sp.guest.Reported())
		})
		err := s.furnish(ctx, w)
		if ctx.Err() == nil {
			s.parked.show(w, err, s.log.Warn)
		}
		select {
		case <-ctx.Done():
		case <-look.C:
		case <-s.parked.wake[w.Key()]:
		}
	}
}

// sweep drops the interpreters for which keep returns false.
func (p *parkedSpares) sweep(keep func(sandbox string, sp *parkedSpare) bool) {
	p.mu.Lock()
	var gone []string
	for id, sp := range p.of {
		if !keep(id, sp) {
			gone = append(gone, id)
		}
	}
	p.mu.Unlock()
	for _, id := range gone {
		p.drop(id)
	}
}

// A parkedFailure is the last start of a pool's interpreter that failed. A start can hang for a
// minute, and write files and take memory each time, so that the next one comes after a pause.
type parkedFailure struct {
	digest string // of the image
	err    error
	pause  time.Duration
	until  time.Time
}

// next returns the failure of another start; f may be nil.
func (f *parkedFailure) next(now time.Time, digest string, err error) *parkedFailure {
	n := &parkedFailure{digest: digest, err: err, pause: parkedPause}
	if f != nil && f.digest == digest {
		n.pause = min(2*f.pause, maxParkedPause)
	}
	n.until = now.Add(n.pause)
	return n
}

// pauses returns the error of the failure during its pause, else nil. A pause is of one image. f
// may be nil.
func (f *parkedFailure) pauses(now time.Time, digest string) error {
	if f == nil || f.digest != digest || !now.Before(f.until) {
		return nil
	}
	return f.err
}

// paused returns the error of the last start if the next one of the pool must wait.
func (p *parkedSpares) paused(pool, digest string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.failures[pool].pauses(time.Now(), digest)
}

// started sets or ends the pause after a start of the pool's.
func (p *parkedSpares) started(pool, digest string, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err == nil {
		delete(p.failures, pool)
		return
	}
	p.failures[pool] = p.failures[pool].next(time.Now(), digest, err)
}

// show sets the error that the state of a pool has while interpreters are missing, and logs a new
// one; nil clears it.
func (p *parkedSpares) show(w *Pool, err error, warn func(msg string, args ...any)) {
	p.mu.Lock()
	before := p.errs[w.Key()]
	if delete(p.errs, w.Key()); err != nil {
		p.errs[w.Key()] = err.Error()
	}
	p.mu.Unlock()
	if err != nil && err.Error() != before {
		warn("no interpreter waits in a parked sandbox", "image", w.Image, "profile", w.Profile, "context", w.Context, "error", err)
	}
}

// furnish starts the missing interpreters of a pool, in the order in which the sandboxes are
// claimed.
func (s *core) furnish(ctx context.Context, w *Pool) error {
	req, ok, err := parkedContext(w)
	if err != nil || !ok {
		return err
	}
	for ctx.Err() == nil {
		warm := s.supervisor.Warm(w.Key())
		i := slices.IndexFunc(warm, func(one runtime.Warm) bool { return !s.parked.has(one.Record.ID) })
		if i < 0 {
			return nil
		}
		digest := warm[i].Record.ImageDigest
		if err := s.parked.paused(w.Key(), digest); err != nil {
			return err
		}
		if err := s.pools.SpareMemory(); err != nil {
			return err
		}
		err := s.startParked(ctx, w.Key(), &warm[i], req)
		switch {
		case err == nil:
			s.parked.started(w.Key(), digest, nil)
		case ctx.Err() == nil && s.isWarm(w.Key(), warm[i].Record.ID): // else it was claimed or removed meanwhile
			err = fmt.Errorf("start %s: %w", w.Context, err)
			s.parked.started(w.Key(), digest, err)
			return err
		}
	}
	return ctx.Err()
}

func (p *parkedSpares) has(sandbox string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.of[sandbox] != nil
}

func (s *core) isWarm(key, sandbox string) bool {
	return slices.ContainsFunc(s.supervisor.Warm(key), func(w runtime.Warm) bool { return w.Record.ID == sandbox })
}

// errParkedUsed means that a sandbox was claimed or removed before its interpreter was ready.
var errParkedUsed = errors.New("the sandbox is not parked any more")

// startParked starts the interpreter of a parked sandbox and waits until it is ready.
func (s *core) startParked(ctx context.Context, pool string, warm *runtime.Warm, req api.CreateContext) (err error) {
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	wanted, drop := context.WithCancel(ctx)
	defer drop()
	sp := &parkedSpare{pool: pool, req: req, key: rand.Text(), cancel: drop, client: host.NewClient(warm.Socket), over: make(chan struct{})}
	defer close(sp.over)
	k, ok := resident.For(req.Language, sp.key, req.Preload...)
	if !ok {
		return fmt.Errorf("language %q has no contexts", req.Language)
	}
	as := contextExec(&k, &req)
	r, err := fullRequest(ctx, &warm.Record, &as, host.ExecRequest{Keep: true}, sp.client)
	if err != nil {
		return err
	}
	id := warm.Record.ID
	s.parked.add(id, sp)
	// A claim takes the sandbox out of the pool before it looks for an interpreter to end. So one that
	// is not seen here finds this one, and one that came before add is seen.
	if !s.isWarm(pool, id) {
		s.parked.settle(id, sp, nil)
		return errParkedUsed
	}
	x, err := sp.client.Exec(ctx, r) // not with wanted: a process that has started is ended below
	if err != nil {
		s.parked.settle(id, sp, nil)
		return userError(&warm.Record, warm.Record.User, execError(as.Argv[0], r.Cwd, err))
	}
	if err = x.Copy(wanted, bytes.NewReader(k.Stdin)); err == nil {
		err = x.AwaitOutput(wanted)
	}
	if err == nil && s.parked.settle(id, sp, x) {
		return nil
	}
	defer x.Close() // always nil
	killParked(x)
	s.parked.settle(id, sp, nil) // only now: the first use of the sandbox waits for the end
	switch {
	case err == nil:
		return errParkedUsed
	case errors.Is(wanted.Err(), context.Canceled): // by a use of the sandbox, or the end of the daemon
		return err
	}
	return withWords(err, x)
}

func (p *parkedSpares) add(sandbox string, sp *parkedSpare) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.of[sandbox] = sp
}

// settle sets the process of an interpreter that is ready, or with nil removes one whose start has
// failed. It returns false if the interpreter was dropped: it then does nothing.
func (p *parkedSpares) settle(sandbox string, sp *parkedSpare, ready *host.Exec) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.of[sandbox] != sp {
		return false
	}
	if sp.guest = ready; ready == nil {
		delete(p.of, sandbox)
	}
	return true
}

// withWords adds the last words of an interpreter to the error.
func withWords(err error, x *host.Exec) error {
	said := make([]byte, maxSaid)
	n := 0
	if serr := x.Stderr.SetReadDeadline(time.Now().Add(wordsTimeout)); serr == nil {
		n, _ = io.ReadFull(x.Stderr, said) // as much as there is
	}
	if text := strings.TrimSpace(strings.ToValidUTF8(string(said[:n]), "\uFFFD")); text != "" {
		return fmt.Errorf("%w: %s", err, text)
	}
	return err
}

// program implements [exec.As.Running]. If it fails the interpreter stays the caller's to end.
func (sp *parkedSpare) program(lease *runtime.Lease) (*host.Exec, error) {
	if sp.guest.Reported() { // also if its sandbox was started again since
		return nil, errors.New("the interpreter that waited has ended")
	}
	c := guests.Of(lease)
	sp.client.Held, sp.client.Load = c.Held, c.Load
	return sp.guest, nil
}

// showParked adds the interpreters that wait to the states of pools.
func (s *core) showParked(states []api.Pool) []api.Pool {
	for i := range states {
		w := &s.pools.Specs()[i]
		req, ok, err := parkedContext(w)
		if err != nil || !ok {
			continue
		}
		show := &api.PoolContext{Language: req.Language, Preload: req.Preload}
		warm := s.supervisor.Warm(w.Key())
		s.parked.mu.Lock()
		for i := range warm {
			if sp := s.parked.of[warm[i].Record.ID]; sp != nil && sp.guest != nil {
				show.Ready++
			}
		}
		show.Hits = s.parked.hits[w.Key()]
		if show.Ready < states[i].Ready {
			show.Error = s.parked.errs[w.Key()]
		}
		s.parked.mu.Unlock()
		states[i].Context = show
	}
	return states
}
