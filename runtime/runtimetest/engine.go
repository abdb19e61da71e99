// Package runtimetest holds what tests of sandboxes need: an engine that keeps everything in
// memory, and the suite that every engine passes.
package runtimetest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/runtime"
)

// Init plays the init of a sandbox on control until stop is closed, and returns when it has ended.
// It owns control.
type Init func(spec *runtime.Spec, control *os.File, stop <-chan struct{})

// Engine is a [runtime.Engine] in memory. An eventfd stands in for the pidfd. It survives the
// supervisor that uses it, as the launcher survives the daemon.
type Engine struct {
	// Init serves the control socket of each sandbox; nil means that no process accepts on it. The
	// sandbox ends when Init returns.
	Init Init
	// CreateError, where set, is asked before each creation and start and may refuse it.
	CreateError func(*runtime.Spec) error
	// Reluctant sandboxes do not end before they are killed.
	Reluctant bool
	// UpdateError, where set, is asked before each update and may refuse it.
	UpdateError func(*runtime.Change) error

	// LoseAnswer, where set, is asked after each update that was made, and its error takes the place
	// of the answer.
	LoseAnswer func(*runtime.Change) error

	inits sync.WaitGroup

	mu          sync.Mutex
	boxes       map[string]*box
	forgotten   []*box
	left        map[string]bool // directories of sandboxes that a crash has ended
	unavailable bool
	archives    map[string]string // of volumes, by id
}

var _ runtime.Engine = (*Engine)(nil)

type box struct {
	spec    runtime.Spec
	control *os.File
	event   *os.File // written once, when the sandbox has ended
	started time.Time
	stop    chan struct{}
	stopped sync.Once
	ended   chan struct{}
	paused  bool
	oom     int
}

// NewEngine returns an empty engine whose sandboxes are served by init, which may be nil.
func NewEngine(init Init) *Engine {
	return &Engine{Init: init, boxes: make(map[string]*box), left: make(map[string]bool)}
}

// Enforced is what every sandbox of the engine says of itself.
func Enforced(p *runtime.Profile) api.Enforced {
	return api.Enforced{
		Namespaces: []string{"user", "mount", "pid", "ipc", "uts", "cgroup", "network"},
		IDs:        api.IDsOwn, Profile: p.Name, Seccomp: p.Name, NoNewPrivs: true, NonRoot: p.NonRoot, ReadOnlyRoot: p.ReadOnlyRoot,
		Memory: "cgroup", CPU: "cgroup", CPUSet: "none", Pids: "cgroup", IO: "none", Network: "none", Disk: "none",
	}
}

// Create keeps the sandbox and starts its init.
func (e *Engine) Create(ctx context.Context, spec *runtime.Spec, control *os.File) (*runtime.Started, error) {
	return e.start(ctx, spec, control, func(was *box) error {
		if was != nil {
			return fmt.Errorf("create sandbox %s: %w", spec.ID, runtime.ErrExists)
		}
		return nil
	})
}

// Start starts the init of a sandbox that has ended.
func (e *Engine) Start(ctx context.Context, spec *runtime.Spec, control *os.File) (*runtime.Started, error) {
	return e.start(ctx, spec, control, func(was *box) error {
		switch {
		case was == nil && (e.left[spec.ID] || spec.Fresh):
		case was == nil:
			return fmt.Errorf("start sandbox %s: %w", spec.ID, runtime.ErrNotFound)
		case was.running():
			return fmt.Errorf("start sandbox %s: %w", spec.ID, runtime.ErrExists)
		}
		return nil
	})
}

func (e *Engine) start(ctx context.Context, spec *runtime.Spec, control *os.File, check func(was *box) error) (*runtime.Started, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("start sandbox %s: %w", spec.ID, err)
	}
	if err := validID(spec.ID); err != nil {
		return nil, err
	}
	if e.CreateError != nil {
		if err := e.CreateError(spec); err != nil {
			return nil, err
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.unavailable {
		return nil, runtime.ErrUnavailable
	}
	was := e.boxes[spec.ID]
	if err := check(was); err != nil {
		return nil, err
	}
	if owner := e.boxes[spec.Join]; spec.Join != "" && (owner == nil || !owner.running()) {
		return nil, fmt.Errorf("start sandbox %s: share the network of sandbox %s: %w", spec.ID, spec.Join, runtime.ErrNoOwner)
	}
	mine, err := dup(control)
	if err != nil {
		return nil, err
	}
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make eventfd: %w", err), mine.Close())
	}
	b := &box{
		spec: *spec, control: mine, event: os.NewFile(uintptr(fd), "eventfd"), started: time.Now(),
		stop: make(chan struct{}), ended: make(chan struct{}),
	}
	st, err := b.describe()
	if err != nil {
		return nil, errors.Join(err, mine.Close(), b.event.Close())
	}
	if was != nil {
		_ = was.event.Close() // written; nothing is buffered
	}
	e.boxes[spec.ID] = b
	delete(e.left, spec.ID)
	e.inits.Go(func() { e.live(b) })
	return st, nil
}

// live is the sandbox.
func (e *Engine) live(b *box) {
	defer func() {
		// Both at once: a watcher of the pidfd may start the sandbox again, and must not find it running.
		e.mu.Lock()
		defer e.mu.Unlock()
		_, _ = b.event.Write([]byte{1, 0, 0, 0, 0, 0, 0, 0}) // a counter of 0 cannot overflow
		close(b.ended)
	}()
	if e.Init != nil {
		e.Init(&b.spec, b.control, b.stop)
		return
	}
	<-b.stop
	_ = b.control.Close() // a socket without data
}

func (b *box) end() {
	b.stopped.Do(func() { close(b.stop) })
	<-b.ended
}

func (b *box) describe() (*runtime.Started, error) {
	pidfd, err := dup(b.event)
	if err != nil {
		return nil, err
	}
	return &runtime.Started{
		ID: b.spec.ID, Enforced: Enforced(&b.spec.Profile), Limits: b.spec.Limits, Deadline: b.spec.Deadline,
		Paused: b.paused, Pidfd: pidfd,
	}, nil
}

func (b *box) running() bool {
	select {
	case <-b.ended:
		return false
	default:
		return true
	}
}

// Leftovers returns the ids of sandboxes that have ended and were not deleted.
func (e *Engine) Leftovers(context.Context) ([]string, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.unavailable {
		return nil, runtime.ErrUnavailable
	}
	var ids []string
	for id, b := range e.boxes {
		if !b.running() {
			ids = append(ids, id)
		}
	}
	return slices.AppendSeq(ids, maps.Keys(e.left)), nil
}

// List returns the sandboxes whose init has not ended.
func (e *Engine) List(ctx context.Context) ([]*runtime.Started, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.unavailable {
		return nil, runtime.ErrUnavailable
	}
	var list []*runtime.Started
	for _, b := range e.boxes {
		if !b.running() {
			continue
		}
		st, err := b.describe()
		if err != nil {
			for _, st := range list {
				err = errors.Join(err, st.Pidfd.Close())
			}
			return nil, err
		}
		list = append(list, st)
	}
	return list, ctx.Err()
}

// Delete ends and forgets the sandbox.
func (e *Engine) Delete(_ context.Context, id string) error {
	e.mu.Lock()
	left := !e.unavailable && e.left[id]
	if left {
		delete(e.left, id)
	}
	e.mu.Unlock()
	if left {
		return nil
	}
	b, err := e.box(id)
	if err != nil {
		return err
	}
	b.end()
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.boxes[id] != b {
		return nil // another caller was first, and has seen the same end
	}
	delete(e.boxes, id)
	return b.event.Close()
}

// Kill ends the sandbox.
func (e *Engine) Kill(_ context.Context, id string) error {
	b, err := e.box(id)
	if err != nil {
		return err
	}
	b.end()
	return nil
}

// Stop ends the sandbox at once, unless [Engine.Reluctant] is set.
func (e *Engine) Stop(ctx context.Context, id string, ask runtime.Ask) error {
	b, err := e.box(id)
	if err != nil {
		return err
	}
	if e.Reluctant {
		ctx, cancel := context.WithTimeout(ctx, ask.Grace)
		defer cancel()
		select {
		case <-ctx.Done():
		case <-b.ended:
		}
	}
	b.end()
	return nil
}

// Pause keeps that the sandbox is paused; its init goes on.
func (e *Engine) Pause(_ context.Context, id string) error { return e.pause(id, true) }

// Resume is the opposite.
func (e *Engine) Resume(_ context.Context, id string) error { return e.pause(id, false) }

func (e *Engine) pause(id string, paused bool) error {
	b, err := e.box(id)
	if err != nil {
		return err
	}
	if !b.running() {
		return fmt.Errorf("%w: %s has ended", runtime.ErrNotFound, id)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	b.paused = paused
	return nil
}

// Update keeps the change; [Engine.UpdateError] may refuse it. Nothing ends at the deadline.
func (e *Engine) Update(_ context.Context, id string, change *runtime.Change) (api.Enforced, error) {
	b, err := e.box(id)
	if err != nil {
		return api.Enforced{}, err
	}
	if !b.running() {
		return api.Enforced{}, fmt.Errorf("%w: %s has ended", runtime.ErrNotFound, id)
	}
	if e.UpdateError != nil {
		if err := e.UpdateError(change); err != nil {
			return api.Enforced{}, err
		}
	}
	if err := b.update(e, change); err != nil {
		return api.Enforced{}, err
	}
	if e.LoseAnswer != nil {
		if err := e.LoseAnswer(change); err != nil {
			return api.Enforced{}, err
		}
	}
	return Enforced(&b.spec.Profile), nil
}

func (b *box) update(e *Engine, change *runtime.Change) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if change.Limits != nil {
		if change.Limits.Nofile != b.spec.Limits.Nofile {
			return fmt.Errorf("nofile limit: %w", runtime.ErrUnenforceable)
		}
		b.spec.Limits = *change.Limits
	}
	if !change.Deadline.IsZero() {
		b.spec.Deadline = change.Deadline
	}
	if change.Hostname != "" {
		b.spec.Hostname, b.started = change.Hostname, time.Now()
	}
	return nil
}

// Stats counts the wall time.
func (e *Engine) Stats(_ context.Context, id string) (api.Stats, error) {
	b, err := e.box(id)
	if err != nil {
		return api.Stats{}, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return api.Stats{At: time.Now().UTC(), WallMS: float64(time.Since(b.started).Microseconds()) / 1000}, nil
}

// OOMKills returns what [Engine.OOM] counted.
func (e *Engine) OOMKills(_ context.Context, id string) (int, error) {
	b, err := e.box(id)
	if err != nil {
		return 0, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return b.oom, nil
}

func (e *Engine) box(id string) (*box, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.unavailable {
		return nil, runtime.ErrUnavailable
	}
	b := e.boxes[id]
	if b == nil {
		return nil, fmt.Errorf("%w: %s", runtime.ErrNotFound, id)
	}
	return b, nil
}

// OOM counts one process of the sandbox as killed for want of memory.
func (e *Engine) OOM(id string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if b := e.boxes[id]; b != nil {
		b.oom++
	}
}

// Forget takes a sandbox out of the engine, which goes on all the same until the engine is closed.
func (e *Engine) Forget(id string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if b := e.boxes[id]; b != nil {
		e.forgotten = append(e.forgotten, b)
		delete(e.boxes, id)
	}
}

// Crash ends every sandbox and makes the engine unavailable, as when the launcher is killed.
// [Engine.Restart] brings back an empty one.
func (e *Engine) Crash() {
	e.mu.Lock()
	e.unavailable = true
	boxes := e.boxes
	e.boxes = make(map[string]*box)
	for id := range boxes {
		e.left[id] = true
	}
	e.mu.Unlock()
	for _, b := range boxes {
		b.end()
		_ = b.event.Close() // written; nothing is buffered
	}
}

// Restart makes a crashed engine available again.
func (e *Engine) Restart() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.unavailable = false
}

// IDs names the sandboxes that have not been deleted, ended or not.
func (e *Engine) IDs() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	var ids []string
	for id := range e.boxes {
		ids = append(ids, id)
	}
	return ids
}

// Spec returns the spec of the last start, or nil.
func (e *Engine) Spec(id string) *runtime.Spec {
	e.mu.Lock()
	defer e.mu.Unlock()
	if b := e.boxes[id]; b != nil {
		spec := b.spec
		return &spec
	}
	return nil
}

// Close ends and forgets everything, and returns when no init runs any more.
func (e *Engine) Close() {
	e.Crash()
	for _, b := range e.forgotten {
		b.end()
		_ = b.event.Close() // written; nothing is buffered
	}
	e.inits.Wait()
}

func dup(f *os.File) (*os.File, error) {
	conn, err := f.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("duplicate %s: %w", f.Name(), err)
	}
	fd := -1
	var derr error
	if err := conn.Control(func(old uintptr) { fd, derr = unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 3) }); err != nil {
		return nil, fmt.Errorf("duplicate %s: %w", f.Name(), err)
	}
	if derr != nil {
		return nil, fmt.Errorf("duplicate %s: %w", f.Name(), derr)
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

func validID(id string) error {
	if len(id) < 3 || len(id) > 32 || strings.Trim(id, "abcdefghijklmnopqrstuvwxyz0123456789") != "" {
		return fmt.Errorf("sandbox id %q: not 3 to 32 lower-case letters and digits", id)
	}
	return nil
}
