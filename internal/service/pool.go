package service

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
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
	// poolPause is how long there must have been no claim before a pool is filled up, so that it takes no time from those who
	// are busy with what they have claimed; poolPatience is when it is filled up all the same.
	poolPause    = 20 * time.Millisecond
	poolPatience = 500 * time.Millisecond
	// poolLook is how often the names of images are looked up anew, where nothing else tells of a change.
	poolLook = 10 * time.Second
	// poolMemory is the part of the host's memory, as 1/n, that must be available for more to be parked.
	poolMemory = 10
)

// Pool says how many sandboxes of an image, with one profile, are kept ready to be claimed: Size, or where that is learned from what
// is asked for as many as are worth it, and Size at most.
type Pool struct {
	Image   string
	Profile string
	Size    int
	Learn   bool
}

// size is how many shall be ready now.
func (p *Pool) size(st runtime.PoolState) int {
	if p.Learn {
		return min(st.Wanted, p.Size)
	}
	return p.Size
}

// key is the pool's name to the supervisor. No reference has a space.
func (p *Pool) key() string { return p.Image + " " + p.Profile }

// pools keeps them full.
type pools struct {
	wanted []Pool
	wake   chan struct{} // told, without waiting, that one was claimed or an image has changed
	spare  func() error  // memoryToSpare, but for tests

	// making is held while a sandbox is parked, and by who removes images: what is being made of one holds it.
	making sync.Mutex

	mu   sync.Mutex
	errs map[string]string // by key: why the pool is not full
}

func newPools(wanted []Pool) *pools {
	wanted = slices.Clone(wanted)
	for i := range wanted {
		wanted[i].Profile = cmp.Or(wanted[i].Profile, defaultProfile)
	}
	return &pools{wanted: wanted, wake: make(chan struct{}, 1), spare: memoryToSpare, errs: make(map[string]string)}
}

// changed says that there may be something to do. It does not wait.
func (p *pools) changed() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// removing keeps anything from being parked until done is called.
func (p *pools) removing() (done func()) {
	p.making.Lock()
	return func() {
		p.making.Unlock()
		p.changed()
	}
}

// fillPools keeps the pools full until ctx ends: one sandbox after the other, and when nobody is busy with what was claimed.
func (s *core) fillPools(ctx context.Context) {
	if len(s.pools.wanted) == 0 {
		return
	}
	look := time.NewTicker(poolLook)
	defer look.Stop()
	for ctx.Err() == nil {
		for _, w := range s.pools.wanted {
			err := s.fillPool(ctx, w)
			s.pools.mu.Lock()
			before := s.pools.errs[w.key()]
			if delete(s.pools.errs, w.key()); err != nil {
				s.pools.errs[w.key()] = err.Error()
			}
			s.pools.mu.Unlock()
			if err != nil && err.Error() != before && ctx.Err() == nil {
				s.log.Warn("a pool is not full", "image", w.Image, "profile", w.Profile, "error", err)
			}
		}
		select {
		case <-ctx.Done():
		case <-look.C:
		case <-s.pools.wake:
			s.settle(ctx)
		}
	}
}

// settle returns when nothing was claimed for a moment.
func (s *core) settle(ctx context.Context) {
	most := time.NewTimer(poolPatience)
	defer most.Stop()
	pause := time.NewTimer(poolPause)
	defer pause.Stop()
	for {
		select {
		case <-s.pools.wake:
			pause.Reset(poolPause)
		case <-pause.C:
			return
		case <-most.C:
			return
		case <-ctx.Done():
			return
		}
	}
}

// fillPool parks what one pool lacks, and removes what it has of an image that its name does not mean any more.
func (s *core) fillPool(ctx context.Context, w Pool) error {
	for ctx.Err() == nil {
		more, err := s.park(ctx, w)
		if err != nil || !more {
			return err
		}
	}
	return ctx.Err()
}

// park adds one sandbox to a pool that is not full.
func (s *core) park(ctx context.Context, w Pool) (more bool, err error) {
	s.pools.making.Lock()
	defer s.pools.making.Unlock()
	img, release, err := s.own.Acquire(ctx, w.Image)
	if err != nil {
		if ctx.Err() == nil {
			err = errors.Join(err, s.unpark(ctx, func(pool, _ string, _ []string) bool { return pool == w.key() }))
		}
		return false, err
	}
	defer release()
	if err := s.unpark(ctx, func(pool, digest string, _ []string) bool { return pool == w.key() && digest != img.Digest }); err != nil {
		return false, err
	}
	profile, defaults, err := s.opts.Profile(w.Profile)
	if err != nil {
		return false, fmt.Errorf("profile %q: %w", w.Profile, err)
	}
	request := newRequest("", &origin{image: w.Image, digest: img.Digest, rootfs: img.Rootfs, profile: profile, defaults: defaults})
	if w.Learn {
		s.supervisor.Learn(w.key(), request)
	}
	st := s.supervisor.PoolState(w.key())
	surplus := st.Ready - w.size(st)
	if surplus > 0 {
		// What is claimed meanwhile is made again by the next look.
		return false, s.unpark(ctx, func(pool, _ string, _ []string) bool {
			if pool != w.key() || surplus == 0 {
				return false
			}
			surplus--
			return true
		})
	}
	if surplus == 0 {
		return false, nil
	}
	if err := s.pools.spare(); err != nil {
		return false, err
	}
	err = s.supervisor.Park(ctx, w.key(), request)
	return err == nil, err
}

// initProgram is where every sandbox has its init, which ends at once where it is executed by anybody else.
const initProgram = "/dev/sandboxd-init"

// exercise has a sandbox execute a program once. The first exec of a sandbox takes twice the time of the second: init's
// pages are faulted in one by one, and the file system's directories are read. And one that cannot is not to be parked.
func exercise(ctx context.Context, socket string) error {
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	x, err := host.NewClient(socket).Exec(ctx, host.ExecRequest{Argv: []string{initProgram}, NoStdin: true, Timeout: stepTimeout})
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
func (s *core) unpark(ctx context.Context, choose func(pool, digest string, layers []string) bool) error {
	err := s.supervisor.Unpark(ctx, choose)
	if errors.Is(err, runtime.ErrClosed) {
		return nil // all of them go
	}
	return err
}

// forsake removes what is parked on layers that are about to be removed: it must not keep an image, nor outlive it.
func (s *core) forsake(ctx context.Context, layers []string) {
	err := s.unpark(ctx, func(_, _ string, below []string) bool {
		return slices.ContainsFunc(below, func(l string) bool { return slices.Contains(layers, l) })
	})
	if err != nil {
		s.log.Error("parked sandboxes of a removed image could not be removed", "error", err)
	}
}

// poolStates says how the pools stand.
func (s *core) poolStates() []api.Pool {
	var all []api.Pool
	for _, w := range s.pools.wanted {
		st := s.supervisor.PoolState(w.key())
		p := api.Pool{Image: w.Image, Profile: w.Profile, Size: w.size(st), Ready: st.Ready, Hits: st.Hits, Misses: st.Misses}
		if w.Learn {
			p.Most = w.Size
		}
		if p.Ready < p.Size {
			s.pools.mu.Lock()
			p.Error = s.pools.errs[w.key()]
			s.pools.mu.Unlock()
		}
		all = append(all, p)
	}
	return all
}

// memoryToSpare is an error where the host's memory is short: what is parked would then be paid for by what works.
func memoryToSpare() error {
	data, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return fmt.Errorf("look for the host's memory: %w", err)
	}
	total, available := meminfo(data, "MemTotal:"), meminfo(data, "MemAvailable:")
	if available < total/poolMemory {
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
