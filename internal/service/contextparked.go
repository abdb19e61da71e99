package service

import (
	"cmp"
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
	"github.com/sandboxd/sandboxd/interpreter/resident"
	"github.com/sandboxd/sandboxd/runtime"
)

const (
	// parkedLook is the interval at which missing interpreters are looked for, if nothing has changed.
	parkedLook = 10 * time.Second
	// wordsTimeout bounds the wait for the rest of the stderr of an interpreter that has ended.
	wordsTimeout = time.Second
)

// A parkedSpare is the interpreter of the first context of a sandbox, started while the sandbox was
// parked.
//
// It becomes a context only if that could not tell the difference: the sandbox was claimed as it
// was parked, the context's request asks for nothing more, and no program has run in the sandbox
// and no file was written since. It is no exec of the sandbox until then, and in no descriptor
// store: it ends with the daemon.
type parkedSpare struct {
	req    api.CreateContext // language and modules
	key    string
	cancel context.CancelFunc
	client *host.Client

	// Guarded by mu of the registry; then the taker's.
	guest *host.Exec // nil until it is ready
	from  string     // pool; empty until the sandbox is claimed
}

// parkedSpares is the registry of the interpreters of all pools.
type parkedSpares struct {
	wake chan struct{} // holds a value when a pool was filled

	mu   sync.Mutex
	of   map[string]*parkedSpare // by the sandbox's id, until the first use of the sandbox
	hits map[string]int64        // contexts that had one, by pool
	errs map[string]string       // why one could not be started, by pool
}

func newParkedSpares() *parkedSpares {
	return &parkedSpares{wake: make(chan struct{}, 1), of: make(map[string]*parkedSpare), hits: make(map[string]int64), errs: make(map[string]string)}
}

// changed has missing interpreters started. It does not block.
func (p *parkedSpares) changed() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// claimed notes that a sandbox is a client's.
func (p *parkedSpares) claimed(sandbox, pool string, equal bool) {
	if !equal {
		p.drop(sandbox)
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if sp := p.of[sandbox]; sp != nil {
		sp.from = pool
	}
}

// take returns the interpreter of a claimed sandbox for its first context; nil if none is ready. It
// is then in no registry: the sandbox is used.
func (p *parkedSpares) take(sandbox string) *parkedSpare {
	p.mu.Lock()
	sp := p.of[sandbox]
	delete(p.of, sandbox)
	p.mu.Unlock()
	if sp == nil {
		return nil
	}
	if sp.from == "" || sp.guest == nil {
		sp.end()
		return nil
	}
	return sp
}

// drop ends the interpreter of a sandbox that is used for something else, or is gone.
func (p *parkedSpares) drop(sandbox string) {
	if sp := p.take(sandbox); sp != nil {
		sp.end()
	}
}

// end ends the interpreter. Before it is ready, its starter does.
func (sp *parkedSpare) end() {
	sp.cancel()
	if sp.guest != nil {
		_ = sp.guest.Close() // always nil
	}
}

// hit counts a context.
func (p *parkedSpares) hit(pool string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hits[pool]++
}

// fits reports whether a context of a request may have the interpreter.
func (sp *parkedSpare) fits(req api.CreateContext) bool {
	if req = spareOf(req); len(req.Preload) == 0 {
		req.Preload = nil
	}
	return reflect.DeepEqual(sp.req, req)
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
// time, until ctx ends. Then it ends those that are no context yet.
func (s *core) keepParkedSpares(ctx context.Context) {
	look := time.NewTicker(parkedLook)
	defer look.Stop()
	for ctx.Err() == nil {
		s.parked.sweep(func(id string, sp *parkedSpare) bool {
			return s.supervisor.Exists(id) && (sp.guest == nil || !sp.guest.Reported())
		})
		for i := range s.pools.Specs() {
			w := &s.pools.Specs()[i]
			err := s.furnish(ctx, w)
			if ctx.Err() == nil {
				s.parked.failed(w, err, s.log.Warn)
			}
		}
		select {
		case <-ctx.Done():
		case <-look.C:
		case <-s.parked.wake:
		}
	}
	s.parked.sweep(func(string, *parkedSpare) bool { return false })
}

// sweep drops the interpreters that are not to be kept.
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

// failed notes why the interpreters of a pool are not complete; nil if they are.
func (p *parkedSpares) failed(w *Pool, err error, warn func(msg string, args ...any)) {
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
		if err := s.pools.SpareMemory(); err != nil {
			return err
		}
		err := s.startParked(ctx, &warm[i], req)
		if err != nil && s.isWarm(w.Key(), warm[i].Record.ID) { // else it was claimed or removed meanwhile
			return fmt.Errorf("start %s: %w", w.Context, err)
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

// startParked starts the interpreter of a parked sandbox and waits until it is ready.
func (s *core) startParked(ctx context.Context, warm *runtime.Warm, req api.CreateContext) (err error) {
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	sp := &parkedSpare{req: req, key: rand.Text(), cancel: cancel, client: host.NewClient(warm.Socket)}
	k, ok := resident.For(req.Language, sp.key, req.Preload...)
	if !ok {
		return errors.New("it has no contexts")
	}
	as := contextExec(&k, &req)
	r, err := fullRequest(ctx, &warm.Record, &as, host.ExecRequest{Keep: true}, sp.client)
	if err != nil {
		return err
	}
	id := warm.Record.ID
	s.parked.add(id, sp) // before its start: a claim ends it from here on
	x, err := sp.client.Exec(ctx, r)
	if err != nil {
		s.parked.settle(id, sp, nil)
		return userError(&warm.Record, warm.Record.User, execError(as.Argv[0], r.Cwd, err))
	}
	if err = feed(ctx, x, k.Stdin); err == nil {
		err = x.AwaitOutput(ctx)
	}
	if err != nil {
		if ctx.Err() == nil { // else it has not ended
			err = withWords(err, x)
		}
		s.parked.settle(id, sp, nil)
	} else if !s.parked.settle(id, sp, x) {
		err = errors.New("its sandbox was used meanwhile")
	}
	if err != nil {
		_ = x.Close() // always nil
	}
	return err
}

func (p *parkedSpares) add(sandbox string, sp *parkedSpare) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.of[sandbox] = sp
}

// settle notes that an interpreter is ready, or with nil that it is not to be. It reports whether
// the sandbox still waits for it.
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

// feed writes the whole stdin of an interpreter, up to its first request.
func feed(ctx context.Context, x *host.Exec, stdin []byte) error {
	undone := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(undone)
		_ = x.Stdin.SetWriteDeadline(time.Unix(1, 0)) // refused only by a closed file
	})
	_, err := x.Write(stdin)
	if !stop() {
		<-undone
		err = cmp.Or(err, context.Cause(ctx))
	}
	return err
}

// withWords adds the last words of an interpreter to the error.
func withWords(err error, x *host.Exec) error {
	said := make([]byte, maxFailure)
	n := 0
	if serr := x.Stderr.SetReadDeadline(time.Now().Add(wordsTimeout)); serr == nil {
		n, _ = io.ReadFull(x.Stderr, said) // as much as there is
	}
	if text := strings.TrimSpace(strings.ToValidUTF8(string(said[:n]), "\uFFFD")); text != "" {
		return fmt.Errorf("%w: %s", err, text)
	}
	return err
}

// continueParked makes the program of an interpreter an exec of its sandbox. It takes over the
// lease; the interpreter stays the caller's to end if that fails.
func (s *core) continueParked(ctx context.Context, lease *runtime.Lease, req api.ExecRequest, sp *parkedSpare) (*program, error) {
	if sp.guest.Reported() { // also if its sandbox was started again since
		lease.End()
		return nil, errors.New("the interpreter that waited has ended")
	}
	c := guestOf(lease)
	sp.client.Held, sp.client.Load = c.Held, c.Load
	oom := s.watchOOM(ctx, &lease.Record)
	oom.wait()
	return s.program(lease, req, sp.guest, oom), nil
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
		for _, warm := range s.supervisor.Warm(w.Key()) {
			s.parked.mu.Lock()
			if sp := s.parked.of[warm.Record.ID]; sp != nil && sp.guest != nil {
				show.Ready++
			}
			s.parked.mu.Unlock()
		}
		s.parked.mu.Lock()
		show.Hits = s.parked.hits[w.Key()]
		if show.Ready < states[i].Ready {
			show.Error = s.parked.errs[w.Key()]
		}
		s.parked.mu.Unlock()
		states[i].Context = show
	}
	return states
}
