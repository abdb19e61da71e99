// Package pool fills warm pools: sandboxes that are parked before a request claims them, which
// takes less time than a start.
package pool

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/guest"
	"github.com/sandboxd/sandboxd/internal/guest/host"
	"github.com/sandboxd/sandboxd/runtime"
)

const (
	// pauseTime is the debounce time without a claim before a pool is filled, so that filling takes no
	// time from busy clients; patience bounds the delay.
	pauseTime = 20 * time.Millisecond
	patience  = 500 * time.Millisecond
	// lookTime is the interval at which image names are resolved again, if no event reports a change.
	lookTime = 10 * time.Second
	// memoryPart is the part of the host's memory, as 1/n, that must be available for more to be
	// parked.
	memoryPart = 10
	// exerciseTimeout bounds [Exercise].
	exerciseTimeout = 10 * time.Second
)

// Spec describes a warm pool: sandboxes of an image with one profile that are kept ready to be
// claimed. Size is their number; with Learn it is the maximum, and the number follows the demand.
type Spec struct {
	Image   string
	Profile string
	Network bool // for sandboxes with a network, of any policy
	Size    int
	Learn   bool
	// Context is the language of the interpreter that waits in each sandbox, followed by the modules
	// that it has imported, each after a plus: python+numpy. Empty means no interpreter.
	Context string
}

// size returns the number of sandboxes that should be ready now.
func (p *Spec) size(st runtime.PoolState) int {
	if p.Learn {
		return min(st.Wanted, p.Size)
	}
	return p.Size
}

// Key is the pool's name to the supervisor. No reference has a space.
func (p *Spec) Key() string {
	key := p.Image + " " + p.Profile
	if p.Network {
		key += " network"
	}
	return key
}

// Image is an image that is acquired for a pool.
type Image struct {
	Digest string
	// Request returns the request for a sandbox of the image with this profile.
	Request func(profile string) (runtime.Request, error)
	// Release lets the image be removed again.
	Release func()
}

// Options configure the pools.
type Options struct {
	Pools []Spec
	// Acquire keeps an image from being removed until its Release is called.
	Acquire func(ctx context.Context, reference string) (*Image, error)
	// Filled is called after each look at the pools. It must not block. Default: nothing.
	Filled func()
	// SpareMemory returns an error if the host's memory is short. Default: less than a tenth of it is
	// available.
	SpareMemory func() error
	Log         *slog.Logger
}

// Pools keeps the pools of a daemon full.
type Pools struct {
	opts       Options
	supervisor *runtime.Supervisor
	wake       chan struct{} // holds a value when a sandbox was claimed or an image has changed

	// making serializes parking with the removal of images: a sandbox being parked holds its image.
	making sync.Mutex

	mu   sync.Mutex
	errs map[string]string // by key: why the pool is not full
}

// New returns the pools; [Pools.Fill] fills them.
func New(opts Options) *Pools {
	if opts.SpareMemory == nil {
		opts.SpareMemory = spareMemory
	}
	return &Pools{opts: opts, wake: make(chan struct{}, 1), errs: make(map[string]string)}
}

// Use sets the supervisor, which needs [Pools.Changed] and [Exercise] before it exists. It is
// called before any other method but Changed.
func (p *Pools) Use(s *runtime.Supervisor) { p.supervisor = s }

// Changed wakes the filler. It does not block.
func (p *Pools) Changed() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// Removing keeps anything from being parked until done is called.
func (p *Pools) Removing() (done func()) {
	p.making.Lock()
	return func() {
		p.making.Unlock()
		p.Changed()
	}
}

// Fill keeps the pools full until ctx ends, one sandbox after the other, while no client is
// busy with claims.
func (p *Pools) Fill(ctx context.Context) {
	if len(p.opts.Pools) == 0 {
		return
	}
	look := time.NewTicker(lookTime)
	defer look.Stop()
	for ctx.Err() == nil {
		for _, w := range p.opts.Pools {
			err := p.fill(ctx, w)
			p.mu.Lock()
			before := p.errs[w.Key()]
			if delete(p.errs, w.Key()); err != nil {
				p.errs[w.Key()] = err.Error()
			}
			p.mu.Unlock()
			if err != nil && err.Error() != before && ctx.Err() == nil {
				p.opts.Log.Warn("a pool is not full", "image", w.Image, "profile", w.Profile, "error", err)
			}
		}
		if p.opts.Filled != nil {
			p.opts.Filled()
		}
		select {
		case <-ctx.Done():
		case <-look.C:
		case <-p.wake:
			p.debounce(ctx)
		}
	}
}

// debounce returns when no sandbox was claimed for a moment.
func (p *Pools) debounce(ctx context.Context) {
	most := time.NewTimer(patience)
	defer most.Stop()
	pause := time.NewTimer(pauseTime)
	defer pause.Stop()
	for {
		select {
		case <-p.wake:
			pause.Reset(pauseTime)
		case <-pause.C:
			return
		case <-most.C:
			return
		case <-ctx.Done():
			return
		}
	}
}

// fill parks the missing sandboxes of a pool, and removes those of an image that its name no
// longer refers to.
func (p *Pools) fill(ctx context.Context, w Spec) error {
	for ctx.Err() == nil {
		more, err := p.park(ctx, w)
		if err != nil || !more {
			return err
		}
	}
	return ctx.Err()
}

// park adds one sandbox to a pool that is not full.
func (p *Pools) park(ctx context.Context, w Spec) (more bool, err error) {
	p.making.Lock()
	defer p.making.Unlock()
	img, err := p.opts.Acquire(ctx, w.Image)
	if err != nil {
		if ctx.Err() == nil {
			err = errors.Join(err, p.unpark(ctx, func(pool, _ string, _ []string) bool { return pool == w.Key() }))
		}
		return false, err
	}
	defer img.Release()
	if err := p.unpark(ctx, func(pool, digest string, _ []string) bool { return pool == w.Key() && digest != img.Digest }); err != nil {
		return false, err
	}
	request, err := img.Request(w.Profile)
	if err != nil {
		return false, fmt.Errorf("profile %q: %w", w.Profile, err)
	}
	if w.Network {
		request.Network.Mode = api.NetworkEgress // the policy comes with the claim
	}
	if w.Learn {
		p.supervisor.Learn(w.Key(), request)
	}
	st := p.supervisor.PoolState(w.Key())
	surplus := st.Ready - w.size(st)
	if surplus > 0 {
		// The next round replaces sandboxes that are claimed meanwhile.
		return false, p.unpark(ctx, func(pool, _ string, _ []string) bool {
			if pool != w.Key() || surplus == 0 {
				return false
			}
			surplus--
			return true
		})
	}
	if surplus == 0 {
		return false, nil
	}
	if err := p.opts.SpareMemory(); err != nil {
		return false, err
	}
	err = p.supervisor.Park(ctx, w.Key(), request)
	return err == nil, err
}

// initProgram is the path of the init in every sandbox; executed by another process, it exits at
// once.
const initProgram = "/dev/sandboxd-init"

// Exercise has a sandbox execute a program once. The first exec of a sandbox takes twice the time
// of the second: init's pages are faulted in one by one, and the file system's directories are
// read. And one that cannot is not to be parked.
func Exercise(ctx context.Context, socket string) error {
	ctx, cancel := context.WithTimeout(ctx, exerciseTimeout)
	defer cancel()
	x, err := host.NewClient(socket).Exec(ctx, host.ExecRequest{Argv: []string{initProgram}, NoStdin: true, Timeout: exerciseTimeout})
	if refusal := (*guest.Error)(nil); errors.As(err, &refusal) {
		return nil // it answers
	}
	if err != nil {
		return fmt.Errorf("try it out: %w", err)
	}
	defer x.Close() // always nil
	if _, err := x.Stream(ctx, func(string, []byte) error { return nil }); err != nil {
		return fmt.Errorf("try it out: %w", err)
	}
	return nil
}

// unpark removes parked sandboxes.
func (p *Pools) unpark(ctx context.Context, choose func(pool, digest string, layers []string) bool) error {
	err := p.supervisor.Unpark(ctx, choose)
	if errors.Is(err, runtime.ErrClosed) {
		return nil // all of them go
	}
	return err
}

// Unpark removes parked sandboxes on layers that are about to be removed: they must not keep
// an image, nor outlive it.
func (p *Pools) Unpark(ctx context.Context, layers []string) {
	err := p.unpark(ctx, func(_, _ string, below []string) bool {
		return slices.ContainsFunc(below, func(l string) bool { return slices.Contains(layers, l) })
	})
	if err != nil {
		p.opts.Log.Error("parked sandboxes of a removed image could not be removed", "error", err)
	}
}

// Specs returns the pools. Callers must not change them.
func (p *Pools) Specs() []Spec { return p.opts.Pools }

// SpareMemory returns an error if the host's memory is too short to keep more ready.
func (p *Pools) SpareMemory() error { return p.opts.SpareMemory() }

// States returns the states of the pools, in the order of Specs.
func (p *Pools) States() []api.Pool {
	var all []api.Pool
	for _, w := range p.opts.Pools {
		st := p.supervisor.PoolState(w.Key())
		state := api.Pool{Image: w.Image, Profile: w.Profile, Network: w.Network, Size: w.size(st), Ready: st.Ready, Hits: st.Hits, Misses: st.Misses}
		if w.Learn {
			state.Most = w.Size
		}
		if state.Ready < state.Size {
			p.mu.Lock()
			state.Error = p.errs[w.Key()]
			p.mu.Unlock()
		}
		all = append(all, state)
	}
	return all
}

// spareMemory returns an error if the host's memory is short: parked sandboxes would take it from
// working ones.
func spareMemory() error {
	data, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return fmt.Errorf("look for the host's memory: %w", err)
	}
	total, available := meminfo(data, "MemTotal:"), meminfo(data, "MemAvailable:")
	if available < total/memoryPart {
		return fmt.Errorf("memory is short: %d MiB of %d are available, and nothing is parked below a tenth", available>>10, total>>10)
	}
	return nil
}

// meminfo is a line of /proc/meminfo, in KiB; 0 where there is none.
func meminfo(data []byte, field string) int64 {
	_, rest, _ := bytes.Cut(data, []byte(field))
	fields := bytes.Fields(rest)
	if len(fields) == 0 {
		return 0
	}
	n, err := strconv.ParseInt(string(fields[0]), 10, 64)
	if err != nil {
		return 0
	}
	return n
}
