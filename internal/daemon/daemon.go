package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/agents"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/runtime/cgroup"
)

const (
	defaultProfile = "default"
	buildProfile   = "build"

	// stepTimeout bounds each step that must be tried although nobody waits for it any more.
	stepTimeout = 10 * time.Second
	// drainTimeout is how long requests under way may take when the daemon stops, before they are cancelled.
	drainTimeout = 2 * time.Second
	// cutTimeout is how long a cancelled request may take to say so, before its connection is closed.
	cutTimeout = 2 * time.Second
	// agentTimeout is how long runs of the agent may take to collect their output when the daemon stops.
	agentTimeout = 30 * time.Second
	// closeTimeout bounds the end of all sandboxes.
	closeTimeout = 60 * time.Second
)

// Options are what a daemon is made of. Those without a stated default are needed.
//
// To add one: give it a default that is right for nearly everyone, say it here, and add a flag only if people set it
// differently on one host. To retire one: keep the field, ignore it and say since when, for one release.
type Options struct {
	Version    string
	DataDir    string // state.db lies here
	RuntimeDir string // the control sockets lie here; made with mode 0700
	Socket     string // of the API; default: [SocketName] in RuntimeDir
	Engine     runtime.Engine
	Images     Images
	Differ     Differ // default: none; what sandboxes have changed cannot be asked for, and nothing is built that runs a program
	// Deposits keeps detached execs for the daemon after this one. Default: none; they end with this one.
	Deposits Deposits
	// Profile finds a profile by name, and the limits that a sandbox of it has by default.
	Profile func(name string) (runtime.Profile, api.Limits, error)
	// Profiles are shown to clients, by name. Default: none are shown.
	Profiles []api.Profile

	// Confine holds the daemon to its own directories, and returns the version of Landlock that does, 0 where none can. It is called when the
	// socket is bound and nothing that a sandbox sends has been read. Default: nothing.
	Confine func() (landlock int, err error)
	// LauncherInfo asks the launcher for its pid and for what a sandbox with the defaults would get. Default: unknown.
	LauncherInfo func(ctx context.Context) (int, api.Enforced, error)
	// Checks probes the host. Default: no checks.
	Checks func(ctx context.Context) []api.Check
	// EndEngine is called at the end of a shutdown that keeps no sandboxes, to end the launcher. Default: nothing.
	EndEngine func(ctx context.Context) error
	// Lock is what [AcquireLock] returned for DataDir. Default: New acquires it.
	Lock io.Closer

	// ErrandsGone reports whether nobody does any more what the daemon cannot do itself. Default: nobody has to.
	ErrandsGone func() bool
	// Agents hosts runs of the agent. Default: none; the routes are not there.
	Agents *agents.Host

	// EndedAge is how long sandboxes that have ended are kept, and EndedLimit how many of them; SnapshotAge is how long snapshots are
	// kept that no sandbox stands on. Default: for ever, and any number. See [retention].
	EndedAge    time.Duration
	EndedLimit  int
	SnapshotAge time.Duration
	// AgentAge is how long runs of the agent are kept that nobody works on, AgentLimit how many bytes they have together. Default: for ever,
	// and any amount. See [agents.Retention].
	AgentAge   time.Duration
	AgentLimit int64

	IODevice     cgroup.Device // that DataDir lies on; the default is none, and io limits are refused
	Pools        []Pool        // sandboxes that are kept ready; default: none
	LogSize      int64         // bytes of one file of a sandbox's log; default 4 MiB, at least 256 KiB
	LogFiles     int           // of one sandbox, the oldest of which go; default 3
	LogLimit     int64         // bytes of all logs, the oldest files of which go; default 2 GiB
	MaxSandboxes int           // default 1000
	Timeout      time.Duration // of a sandbox that asks for none; default an hour
	IdleTimeout  time.Duration // of a sandbox that asks for none; default ten minutes
	IdleExit     time.Duration // the daemon ends after this time without a sandbox and a request; 0: never
	Log          *slog.Logger  // default: discarded
}

func (o *Options) socketPath() string {
	return cmp.Or(o.Socket, filepath.Join(o.RuntimeDir, SocketName))
}

// SocketName is the API socket's file in the runtime directory.
const SocketName = "api.sock"

// Daemon is the running whole: sandboxes, services and the server in front of them.
type Daemon struct {
	opts    Options
	log     *slog.Logger
	service *Service
	lock    io.Closer
	socket  *socket
	drain   time.Duration // drainTimeout, but for tests
	look    time.Duration // retainEvery, but for tests

	requests sync.WaitGroup // handlers, those of hijacked connections among them, and enforce
	mu       sync.Mutex
	drained  bool // requests is waited for: nothing may be added to it
	active   int  // requests that are counted
	lastUse  time.Time

	stopOnce sync.Once
	stop     chan struct{} // closed when a client asks for the end
	keep     bool          // written before stop is closed
}

// New locks the data directory, adopts the sandboxes that the engine runs, and listens on the API socket. [Daemon.Serve]
// must be called next: it undoes all this in the end.
func New(ctx context.Context, opts Options) (_ *Daemon, err error) {
	if opts.Engine == nil || opts.Images == nil || opts.Profile == nil || opts.DataDir == "" || opts.RuntimeDir == "" {
		return nil, errors.New("start daemon: Engine, Images, Profile, DataDir and RuntimeDir are needed")
	}
	d := &Daemon{opts: opts, log: cmp.Or(opts.Log, slog.New(slog.DiscardHandler)), lock: opts.Lock, drain: drainTimeout, look: retainEvery, stop: make(chan struct{})}
	if d.lock == nil {
		if d.lock, err = AcquireLock(opts.DataDir); err != nil {
			return nil, err
		}
		defer func() {
			if err != nil {
				err = errors.Join(err, d.lock.Close())
			}
		}()
	}
	if d.socket, err = listen(ctx, opts.RuntimeDir, opts.socketPath()); err != nil {
		return nil, fmt.Errorf("start daemon: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.socket.remove())
		}
	}()
	confined := 0
	if opts.Confine != nil {
		if confined, err = opts.Confine(); err != nil {
			return nil, fmt.Errorf("start daemon: %w", err)
		}
	}
	pools := newPools(opts.Pools)
	supervisor, err := runtime.Open(ctx, opts.DataDir, opts.Engine, runtime.Options{
		RuntimeDir:   opts.RuntimeDir,
		MaxSandboxes: opts.MaxSandboxes,
		Timeout:      opts.Timeout,
		IdleTimeout:  opts.IdleTimeout,
		IODevice:     opts.IODevice,
		PoolChanged:  pools.changed,
		Exercise:     exercise,
		Log:          d.log,
	})
	if err != nil {
		return nil, fmt.Errorf("start daemon: %w", err)
	}
	d.service = &Service{opts: opts, confined: confined, supervisor: supervisor, images: opts.Images, log: d.log, builds: make(chan struct{}, maxBuilds), pools: pools}
	d.service.logs = newMainLogs(opts.DataDir, max(minLogSize, cmp.Or(opts.LogSize, defaultLogSize)), cmp.Or(opts.LogFiles, defaultLogFiles), cmp.Or(opts.LogLimit, defaultLogLimit))
	d.service.logs.log = d.log
	d.service.sweepLogs()
	d.service.execs = newExecs(context.WithoutCancel(ctx))
	d.service.adoptExecs(ctx)
	// From here on images may be removed: what runs has been adopted, so it is known what they are needed for.
	opts.Images.SetHolders(d.service.holders)
	opts.Images.OnRemoval(d.service.forsake)
	return d, nil
}

// Service is what the API can do, for faces other than HTTP.
func (d *Daemon) Service() *Service { return d.service }

// Socket is the path of the API socket.
func (d *Daemon) Socket() string { return d.opts.socketPath() }

// Shutdown makes Serve return, as POST /v1/system/shutdown does. Only the first call counts.
func (d *Daemon) Shutdown(req api.Shutdown) {
	d.stopOnce.Do(func() {
		d.keep = req.KeepSandboxes
		close(d.stop)
	})
}

// enter counts a request; leave must follow unless it returns false.
func (d *Daemon) enter() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.drained {
		return false
	}
	d.requests.Add(1)
	d.active++
	return true
}

func (d *Daemon) leave() {
	d.mu.Lock()
	d.active--
	d.lastUse = time.Now()
	d.mu.Unlock()
	d.requests.Done()
}

// idleFor is how long there has been no request; 0 while there is one, or a sandbox.
func (d *Daemon) idleFor() time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.active > 0 || d.service.supervisor.Count() > 0 {
		d.lastUse = time.Now()
		return 0
	}
	return time.Since(d.lastUse)
}

// watchIdle ends a daemon that was started for one session and is not needed any more.
func (d *Daemon) watchIdle() {
	timer := time.NewTimer(d.opts.IdleExit)
	defer timer.Stop()
	for {
		select {
		case <-d.stop:
			return
		case <-timer.C:
		}
		idle := d.idleFor()
		if idle >= d.opts.IdleExit {
			d.log.Info("nobody needs the daemon", "idle", idle)
			d.Shutdown(api.Shutdown{})
			return
		}
		timer.Reset(d.opts.IdleExit - idle)
	}
}

// Serve answers requests until ctx ends or a client asks for the end, and returns when nothing of the daemon runs any
// more. Where ctx ended, the sandboxes go on for the next daemon to adopt; a client says what shall become of them.
func (d *Daemon) Serve(ctx context.Context) error {
	requestCtx, cancelRequests := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancelRequests(nil)
	server := &http.Server{
		Handler: d.handler(),
		// A request must announce itself soon; what follows is bounded where it is read.
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		BaseContext:       func(net.Listener) context.Context { return requestCtx },
		ConnContext:       peerContext,
		ErrorLog:          slog.NewLogLogger(d.log.Handler(), slog.LevelDebug),
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(d.socket) }()
	d.log.Info("daemon is ready", "socket", d.Socket(), "uid", os.Getuid(), "sandboxes", d.service.supervisor.Count())

	// Images may have grown beyond a limit that is new. Removing them takes its time, and nobody need wait for it.
	enforceCtx, cancelEnforce := context.WithCancelCause(requestCtx)
	defer cancelEnforce(nil)
	d.requests.Go(func() { d.enforce(enforceCtx) })
	d.requests.Go(func() { d.service.fillPools(enforceCtx) })
	d.requests.Go(func() { d.service.retain(enforceCtx, d.look) })
	d.requests.Go(func() { d.retainRuns(enforceCtx) })

	if d.opts.IdleExit > 0 {
		d.lastUse = time.Now()
		watched := make(chan struct{})
		go func() { defer close(watched); d.watchIdle() }()
		defer func() { <-watched }()
	}
	var failure error
	select {
	case <-ctx.Done():
		d.Shutdown(api.Shutdown{KeepSandboxes: true})
	case <-d.stop:
	case failure = <-served:
		served <- http.ErrServerClosed
		d.Shutdown(api.Shutdown{KeepSandboxes: true})
	}
	<-d.stop // orders our reading of keep
	cancelEnforce(ErrStopping)
	return errors.Join(failure, d.shutdown(context.WithoutCancel(ctx), server, served, cancelRequests))
}

// enforce keeps to the limit of images once.
func (d *Daemon) enforce(ctx context.Context) {
	switch err := d.opts.Images.Enforce(ctx); {
	case err == nil:
	case ctx.Err() != nil:
		d.log.Info("images that are too many are removed by the next start", "error", err)
	default:
		d.log.Warn("the limit of images could not be kept to", "error", err)
	}
	// What the last daemon left of snapshots: layers that it was about to give to a fork, or to remove.
	if err := d.opts.Images.EnforceSnapshots(ctx); err != nil && ctx.Err() == nil {
		d.log.Warn("what no snapshot needs could not be removed", "error", err)
	}
}

// shutdown reads top to bottom. Each step has its own deadline, and a step that fails does not keep the next from being
// tried.
func (d *Daemon) shutdown(ctx context.Context, server *http.Server, served <-chan error, cancelRequests context.CancelCauseFunc) error {
	d.log.Info("daemon is stopping", "keep_sandboxes", d.keep)
	step := func(timeout time.Duration, f func(context.Context) error) error {
		ctx, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		return f(ctx)
	}
	// 0. The runs of the agent end, while they can still ask for what they have left.
	if d.opts.Agents != nil {
		if err := step(agentTimeout, d.opts.Agents.Close); err != nil {
			d.log.Warn("not all agent runs have ended by themselves", "error", err)
		}
	}
	// 1. Nobody new comes in, and what is under way may come to its end.
	if step(d.drain, server.Shutdown) != nil {
		// 2. What does not is told why, and then cut off.
		cancelRequests(ErrStopping)
		if step(cutTimeout, server.Shutdown) != nil {
			d.log.Warn("requests are cut off")
		}
	}
	cancelRequests(ErrStopping)
	_ = server.Close() // the connections that are left; their requests are waited for next
	var errs []error
	if err := <-served; !errors.Is(err, http.ErrServerClosed) {
		errs = append(errs, fmt.Errorf("serve: %w", err))
	}
	// 3. Connections that became WebSockets are not the server's any more.
	d.mu.Lock()
	d.drained = true
	d.mu.Unlock()
	d.requests.Wait()
	d.service.execs.stop()
	// 4. The sandboxes end, or are left alone.
	errs = append(errs, step(closeTimeout, func(ctx context.Context) error { return d.service.supervisor.Close(ctx, d.keep) }))
	if !d.keep {
		d.service.sweepLogs()
	}
	if !d.keep && d.opts.EndEngine != nil {
		errs = append(errs, step(stepTimeout, d.opts.EndEngine))
	}
	// 5. The locks and the socket go last: until here a new daemon must not start. Whoever sees that the socket is gone finds
	// the data directory free.
	errs = append(errs, d.lock.Close(), d.socket.remove())
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("stop daemon: %w", err)
	}
	d.log.Info("daemon has stopped")
	return nil
}
