package runtime

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"reflect"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
)

// A warm sandbox runs before a request asks for it: [Supervisor.Create] hands it to the first
// request that it fits, and never takes it back. It is in no list and has no record, so that a
// daemon that starts after a crash deletes it as a stray. A claim applies the request's own values:
// the engine changes limits, deadline and hostname; the rest is in the record alone.

const (
	// warmFor is the time after which an unclaimed sandbox is replaced by a new one.
	warmFor = time.Hour
	// warmGrace is the additional time after which the launcher ends it if no daemon runs.
	warmGrace = time.Minute
)

// ErrPoolFull means that there would be more sandboxes than [Options.MaxSandboxes], warm ones
// included.
var ErrPoolFull = errors.New("no room for warm sandboxes")

// pool holds the warm sandboxes. Its fields are guarded by Supervisor.mu.
type pool struct {
	warm   map[string]*warmSandbox // by id
	counts map[string]*poolCount   // by name
	// parking holds the requests of warm sandboxes in the making, by id.
	parking map[string]*Request
	number  int64 // of the last warm sandbox
}

type poolCount struct {
	digest       string // of the image that was warmed last, or that Learn has named
	profile      string
	tenant       string // a claim never crosses tenants
	hits, misses int64
	learns       *Request // fixed part of the requests to count in asked; nil unless the pool learns
	asked        demand
}

// warmSandbox is a warm sandbox. The goroutine that claims or removes it takes it out of pool.warm
// first, and then owns it.
type warmSandbox struct {
	id      string
	pool    string
	name    string  // hostname; also the sandbox's name, if the claim has no name and this one is free
	number  int64   // warm sandboxes are claimed in the order of their numbers
	fixed   Request // properties that a request must have to claim it
	seen    Request // properties that a program started before the claim has seen
	rec     Record  // that of a sandbox of a request that asks for nothing
	pids    int64   // the limit that each of its processes has had since its start; 0 where the engine can change it
	digest  string
	started *Started
	limits  api.Limits
	watch   *os.File // pidfd; closed by its watcher
}

// PoolState holds the figures of a pool.
type PoolState struct {
	Ready        int
	Hits, Misses int64
	Wanted       int // number worth keeping ready; 0 unless the pool learns
}

// fixed returns the part of a request that a running sandbox cannot be given any more. Fields that
// are not cleared here count, so that a new field is not forgotten: a warm sandbox without it does
// not fit. The tenant stays: a claim never crosses tenants.
func (r *Request) fixed() Request {
	f := *r
	limits := r.Limits.WithDefaults(r.Defaults)
	f.Limits, f.Defaults = api.Limits{Nofile: limits.Nofile}, api.Limits{} // each process has its own since its start
	f.Name, f.Image, f.Labels = "", "", nil
	f.ImageEnv, f.Env, f.Cwd, f.User = nil, nil, "", ""
	f.Timeout, f.IdleTimeout = 0, 0
	f.Command, f.TTY, f.StdinOpen = nil, false, false // the main process is started after the claim
	f.Entrypoint, f.Cmd, f.Hostname = nil, nil, ""
	f.Rlimits, f.Restart, f.AutoRemove = nil, "", false // each exec sets the first, the daemon keeps the others
	// Policy and budget are the gateway's, which begins with the claim, and so are ports.
	f.Ports = nil
	switch f.Network = (api.Network{}); {
	case r.Network.HasGateway():
		f.Network.Mode = api.NetworkEgress
	case r.Network.Mode == api.NetworkSandbox: // a running sandbox enters no other namespace
		f.Network = r.Network
	}
	return f
}

// seen returns the part of a request that programs of the sandbox can see, without the hostname. A
// new field counts, as in fixed. Policy and budget of a network are left out: they act on later
// connections only.
func (r *Request) seen() Request {
	f := r.fixed()
	f.Limits = r.Limits.WithDefaults(r.Defaults)
	f.ImageEnv, f.Env, f.Cwd, f.User, f.Rlimits = r.ImageEnv, r.Env, r.Cwd, r.User, r.Rlimits
	return f
}

// fits reports whether the request may claim p.
func (p *warmSandbox) fits(fixed *Request, limits *api.Limits) bool {
	return p.digest == fixed.ImageDigest && (p.pids == 0 || p.pids == limits.Pids) && reflect.DeepEqual(&p.fixed, fixed)
}

// take finds a warm sandbox for the request. If there is none, it counts a miss in the pool of the
// request's tenant, image and profile. It needs mu.
func (s *Supervisor) take(req *Request) *warmSandbox {
	if req.Ephemeral || len(s.pool.counts) == 0 {
		return nil
	}
	fixed, limits := req.fixed(), req.Limits.WithDefaults(req.Defaults)
	s.learn(req, &fixed)
	var oldest *warmSandbox // the most likely one to have a process that waits
	for _, p := range s.pool.warm {
		if (oldest == nil || p.number < oldest.number) && p.fits(&fixed, &limits) {
			oldest = p
		}
	}
	if oldest != nil {
		s.takeOut(oldest)
		return oldest
	}
	for _, c := range s.pool.counts {
		if c.tenant == req.Tenant && c.digest == req.ImageDigest && c.profile == req.Profile.Name {
			c.misses++
			break
		}
	}
	return nil
}

// learn counts the request in the pool that it fits, if that learns. It needs mu.
func (s *Supervisor) learn(req, fixed *Request) {
	for _, c := range s.pool.counts {
		if c.learns != nil && c.digest == req.ImageDigest && reflect.DeepEqual(c.learns, fixed) {
			c.asked.ask(s.now())
			if s.opts.PoolChanged != nil {
				s.opts.PoolChanged() // also where nothing was ready: more may be worth it now
			}
		}
	}
}

// Learn makes the pool of this name, which may still be empty, count the creations that a sandbox
// of the request would fit: [PoolState] then has the number worth keeping ready. A second call
// changes nothing, unless the image is another.
func (s *Supervisor) Learn(name string, req Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.countOf(name)
	fixed := req.fixed()
	c.tenant, c.digest, c.profile, c.learns = req.Tenant, req.ImageDigest, req.Profile.Name, &fixed
}

// countOf returns the counters of a pool. It needs mu.
func (s *Supervisor) countOf(name string) *poolCount {
	if s.pool.counts == nil {
		s.pool.warm, s.pool.counts = make(map[string]*warmSandbox), make(map[string]*poolCount)
		s.pool.parking = make(map[string]*Request)
	}
	if s.pool.counts[name] == nil {
		s.pool.counts[name] = new(poolCount)
	}
	return s.pool.counts[name]
}

// takeOut makes p the caller's. It returns false if another goroutine has taken it. It needs mu.
func (s *Supervisor) takeOut(p *warmSandbox) bool {
	if s.pool.warm[p.id] != p {
		return false
	}
	delete(s.pool.warm, p.id)
	_ = p.watch.SetReadDeadline(time.Unix(1, 0)) // its watcher sees that there is nothing left to watch
	if s.opts.PoolChanged != nil {
		s.opts.PoolChanged()
	}
	return true
}

// claim makes a warm sandbox the one that was reserved, which has its id. On error nothing is
// left of either.
func (s *Supervisor) claim(ctx context.Context, sb *sandbox, p *warmSandbox, req *Request) (_ Record, err error) {
	rec := sb.rec // changed here alone while the phase is creating
	var undo cleanup
	defer undo.unwind(&err)
	undo.add("release name", func() error { s.forget(sb); return nil })
	defer func() { s.count(p.pool, err == nil) }()
	undo.add("remove warm sandbox", func() error { return s.discard(ctx, p) })

	change := Change{Deadline: rec.Deadline, Hostname: cmp.Or(req.Hostname, rec.Name)}
	if req.Limits != (api.Limits{}) || !rec.Limits.Equal(&p.limits) {
		change.Limits, change.Explicit = &rec.Limits, req.Limits
	}
	if s.opts.Claiming != nil { // before new limits act on a process that waits
		seen := req.seen()
		s.opts.Claiming(rec.ID, change.Hostname == p.name && reflect.DeepEqual(&p.seen, &seen))
	}
	if rec.Enforced, err = s.engine.Update(ctx, p.id, &change); err != nil {
		return Record{}, err
	}
	rec.State, rec.PID, rec.StartedAt = api.StateRunning, p.rec.PID, s.now().UTC()
	// Only now: of a claim that a crash cut off before, no record tells, and the next daemon deletes
	// the sandbox.
	undo.add("remove record", func() error { return s.records.remove(rec.ID) })
	if err := s.records.put(&rec); err != nil {
		return Record{}, err
	}
	p.started.Enforced = rec.Enforced
	if err := s.run(ctx, sb, &rec, p.started, api.ActionCreated); err != nil {
		return Record{}, err
	}
	undo.release()
	sb.write.Unlock()
	s.log.Info("warm sandbox claimed", "id", rec.ID, "name", rec.Name, "image", rec.Image, "profile", rec.Profile)
	return rec.clone(), nil
}

// count counts a claim.
func (s *Supervisor) count(pool string, hit bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if hit {
		s.pool.counts[pool].hits++
	} else {
		s.pool.counts[pool].misses++
	}
}

// Park makes a sandbox for the pool of this name, with the request's tenant, image, profile and
// their defaults. Only requests of that tenant can claim it.
func (s *Supervisor) Park(ctx context.Context, name string, req Request) (err error) {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return ErrClosed
	}
	if len(s.byID)+len(s.pool.warm) >= s.opts.MaxSandboxes {
		s.mu.Unlock()
		return fmt.Errorf("%w: %d sandboxes are the most this daemon holds", ErrPoolFull, s.opts.MaxSandboxes)
	}
	limits := req.Limits.WithDefaults(req.Defaults)
	if err := s.admit(req.Tenant, &limits, nil); err != nil {
		s.mu.Unlock()
		return fmt.Errorf("%w: %w", ErrPoolFull, err)
	}
	id := s.unusedID(req.Tenant)
	s.countOf(name) // makes the maps
	s.pool.parking[id] = &req
	s.ops.Add(1)
	s.mu.Unlock()
	defer s.ops.Done()
	defer func() {
		s.mu.Lock()
		delete(s.pool.parking, id)
		s.mu.Unlock()
		if err != nil {
			err = fmt.Errorf("park a sandbox of image %s: %w", req.Image, err)
		}
	}()

	var undo cleanup
	defer undo.unwind(&err)
	control, err := s.sockets.listen(id)
	if err != nil {
		return err
	}
	p := &warmSandbox{
		id: id, pool: name, name: newName(), fixed: req.fixed(), seen: req.seen(), digest: req.ImageDigest, limits: req.Limits.WithDefaults(req.Defaults),
	}
	undo.add("remove warm sandbox", func() error { return s.discard(ctx, p) })
	until := s.now().Add(warmFor)
	spec := req.spec(id, p.name, until.Add(warmGrace))
	spec.IODevice = s.opts.IODevice
	p.started, err = s.engine.Create(ctx, spec, control)
	cerr := control.Close() // init alone holds it, see create
	if err != nil {
		return err
	}
	if cerr != nil {
		return fmt.Errorf("close control socket: %w", cerr)
	}
	if p.started.Enforced.Pids == "rlimit" {
		p.pids = p.limits.Pids
	}
	if s.opts.Exercise != nil {
		if err := s.opts.Exercise(ctx, s.sockets.pathOf(id)); err != nil {
			return err
		}
	}
	fd, err := unix.FcntlInt(p.started.Pidfd.Fd(), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return fmt.Errorf("duplicate pidfd: %w", err)
	}
	if p.watch, err = pollable(os.NewFile(uintptr(fd), "pidfd")); err != nil {
		return err
	}
	if err := p.watch.SetReadDeadline(s.wakeAt(until)); err != nil {
		return errors.Join(fmt.Errorf("watch it: %w", err), p.watch.Close())
	}
	undo.release()

	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.countOf(name)
	c.tenant, c.digest, c.profile = p.fixed.Tenant, p.digest, p.fixed.Profile.Name
	p.rec = req.record(id, p.name, s.now().UTC(), s.defaults.Load())
	p.rec.Enforced, p.rec.PID = p.started.Enforced, PIDOf(p.started.Pidfd)
	s.pool.number++
	p.number = s.pool.number
	s.pool.warm[id] = p
	s.watchers.Add(1)
	go s.watchWarm(context.WithoutCancel(ctx), p) // it outlives the caller, and ends when p is taken
	return nil
}

// watchWarm removes a warm sandbox that has ended, or has waited for too long.
func (s *Supervisor) watchWarm(ctx context.Context, p *warmSandbox) {
	defer s.watchers.Done()
	defer func() { _ = p.watch.Close() }() // never read or written
	err := waitReadable(p.watch)
	s.mu.Lock()
	mine := s.takeOut(p)
	s.mu.Unlock()
	if !mine {
		return
	}
	if err == nil {
		s.log.Warn("a warm sandbox has ended", "id", p.id, "pool", p.pool)
	} else {
		s.log.Debug("a warm sandbox has waited for long", "id", p.id, "pool", p.pool)
	}
	if err := s.discard(ctx, p); err != nil {
		s.log.Error("a warm sandbox could not be removed", "id", p.id, "error", err)
	}
}

// Warm is a warm sandbox, for processes that wait in it: a request may claim it, or it may be
// removed, at any time.
type Warm struct {
	Record Record // that of a sandbox of a request that asks for nothing
	Socket string // path of the control socket, on which the guest protocol is spoken
}

// Warm returns the warm sandboxes of the pool of this name, in the order in which requests claim
// them.
func (s *Supervisor) Warm(name string) []Warm {
	s.mu.Lock()
	defer s.mu.Unlock()
	var found []*warmSandbox
	for _, p := range s.pool.warm {
		if p.pool == name {
			found = append(found, p)
		}
	}
	slices.SortFunc(found, func(a, b *warmSandbox) int { return cmp.Compare(a.number, b.number) })
	all := make([]Warm, 0, len(found))
	for _, p := range found {
		all = append(all, Warm{Record: p.rec.clone(), Socket: s.sockets.pathOf(p.id)})
	}
	return all
}

// Exists reports whether there is a sandbox with this id, a warm one included.
func (s *Supervisor) Exists(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.byID[id] != nil || s.pool.warm[id] != nil
}

// discard removes a sandbox that is in no pool, or never was. It goes on although ctx ends.
func (s *Supervisor) discard(ctx context.Context, p *warmSandbox) error {
	if p.started != nil {
		_ = p.started.Pidfd.Close() // never read or written; closed already where its watcher could not be started
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	return errors.Join(ignoreNotFound(s.engine.Delete(ctx, p.id)), s.sockets.remove(p.id))
}

// Unpark removes the warm sandboxes that choose selects, by their pool, the digest of their image
// and their request's layers. When it returns they are gone.
func (s *Supervisor) Unpark(ctx context.Context, choose func(pool, digest string, layers []string) bool) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return ErrClosed
	}
	s.ops.Add(1)
	s.mu.Unlock()
	defer s.ops.Done()
	return s.unpark(ctx, choose)
}

func (s *Supervisor) unpark(ctx context.Context, choose func(pool, digest string, layers []string) bool) error {
	s.mu.Lock()
	var out []*warmSandbox
	for _, p := range s.pool.warm {
		if choose(p.pool, p.digest, p.fixed.Rootfs.Layers) {
			s.takeOut(p)
			out = append(out, p)
		}
	}
	s.mu.Unlock()
	return errors.Join(eachOf(out, func(p *warmSandbox) error { return s.discard(ctx, p) })...)
}

// PoolState returns the figures of the pool of this name.
func (s *Supervisor) PoolState(name string) PoolState {
	s.mu.Lock()
	defer s.mu.Unlock()
	var st PoolState
	if c := s.pool.counts[name]; c != nil {
		st.Hits, st.Misses = c.hits, c.misses
		if c.learns != nil {
			st.Wanted = c.asked.wanted(s.now())
		}
	}
	for _, p := range s.pool.warm {
		if p.pool == name {
			st.Ready++
		}
	}
	return st
}
