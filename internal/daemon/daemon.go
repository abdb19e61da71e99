// Package daemon is the life cycle of the daemon: locks, socket, service and native face, from
// start to shutdown.
package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/httpapi"
	"github.com/sandboxd/sandboxd/internal/service"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/runtime"
)

const (
	// drainTimeout is the time that requests under way have when the daemon stops, before they are
	// cancelled.
	drainTimeout = 2 * time.Second
	// stepTimeout bounds the end of the engine.
	stepTimeout = 10 * time.Second
)

// Options configure a daemon: those of the service, and its own. A field without a stated default
// is required.
type Options struct {
	// Options are those of the service. A shutdown that keeps no sandboxes ends Engine, if it is a
	// [runtime.Shutdowner]. Socket defaults to [SocketName] in RuntimeDir; New sets
	// Confined.
	service.Options

	// Confine restricts the daemon to its own directories, and returns the version of Landlock that
	// does, zero where none can. It is called when the socket is bound and nothing that a sandbox
	// sends has been read. Default: nothing.
	Confine func() (landlock int, err error)
	// Tenants are the users of this host that are tenants of their own; the zero value has none. They
	// must be able to reach Socket: see [Tenants.SocketRefused].
	Tenants Tenants
	// Lock is the lock of DataDir that [AcquireLock] returned. Default: New acquires it.
	Lock io.Closer
	// IdleExit is the time without a sandbox and a request after which the daemon ends; zero means
	// never.
	IdleExit time.Duration
}

// SocketName is the API socket's file in the runtime directory.
const SocketName = "api.sock"

// Tenants are the users of this host that are tenants of their own.
type Tenants = httpapi.Tenants

// ParseTenants reads a list of uids and names of users, or @GROUP.
func ParseTenants(text string) (Tenants, error) { return httpapi.ParseTenants(text) }

// Pool is a warm pool that the options ask for.
type Pool = service.Pool

// AcquireLock makes sure that no other daemon works in dir until the lock is closed or the process
// ends.
func AcquireLock(dir string) (io.Closer, error) { return httpapi.AcquireLock(dir) }

// Daemon is the running whole: the service and the native face.
type Daemon struct {
	opts    Options
	log     *slog.Logger
	service *service.Service
	server  *httpapi.Server
	socket  *httpapi.Socket
	lock    io.Closer
	drain   time.Duration // drainTimeout, but for tests

	stopOnce sync.Once
	stop     chan struct{} // closed when a client asks for the end
	request  api.Shutdown  // written before stop is closed
}

// New locks the data directory, listens on the API socket and adopts the sandboxes that the engine
// runs. [Daemon.Serve] must be called next: it undoes all this in the end.
func New(ctx context.Context, opts Options) (_ *Daemon, err error) {
	if opts.DataDir == "" || opts.RuntimeDir == "" {
		return nil, errors.New("start daemon: DataDir and RuntimeDir are needed")
	}
	opts.Socket = cmp.Or(opts.Socket, filepath.Join(opts.RuntimeDir, SocketName))
	opts.Log = cmp.Or(opts.Log, slog.New(slog.DiscardHandler))
	d := &Daemon{opts: opts, log: opts.Log, lock: opts.Lock, drain: drainTimeout, stop: make(chan struct{})}
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
	if d.socket, err = httpapi.Listen(ctx, opts.RuntimeDir, opts.Socket, opts.Tenants); err != nil {
		return nil, fmt.Errorf("start daemon: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.socket.Remove())
		}
	}()
	if opts.Confine != nil {
		if d.opts.Confined, err = opts.Confine(); err != nil {
			return nil, fmt.Errorf("start daemon: %w", err)
		}
	}
	if d.service, err = service.New(ctx, d.opts.Options); err != nil {
		return nil, fmt.Errorf("start daemon: %w", err)
	}
	d.server = httpapi.New(ctx, httpapi.Options{Service: d.service, Socket: d.socket, Shutdown: d.Shutdown, Stopping: d.stop, Log: d.log})
	return d, nil
}

// Service is the service, for other faces.
func (d *Daemon) Service() *service.Service { return d.service }

// Socket is the path of the API socket.
func (d *Daemon) Socket() string { return d.opts.Socket }

// Shutdown makes Serve return, as POST /v1/system/shutdown does. Only the first call counts.
func (d *Daemon) Shutdown(req api.Shutdown) {
	d.stopOnce.Do(func() {
		d.request = req
		close(d.stop)
	})
}

// watchIdle ends a daemon that was started for one session and has been idle for long enough.
func (d *Daemon) watchIdle() {
	timer := time.NewTimer(d.opts.IdleExit)
	defer timer.Stop()
	for {
		select {
		case <-d.stop:
			return
		case <-timer.C:
		}
		idle := d.server.IdleFor()
		if idle >= d.opts.IdleExit {
			d.log.Info("daemon is idle, ending", "idle", idle)
			d.Shutdown(api.Shutdown{})
			return
		}
		timer.Reset(d.opts.IdleExit - idle)
	}
}

// Serve answers requests until ctx ends or a client asks for the end, and returns when nothing of
// the daemon runs any more. Where ctx ends, the sandboxes run on for the next daemon to adopt; a
// client says whether they do.
func (d *Daemon) Serve(ctx context.Context) error {
	served := make(chan error, 1)
	go func() { served <- d.server.Serve() }()
	d.log.Info("daemon is ready", "socket", d.Socket(), "uid", os.Getuid(), "sandboxes", d.service.Sandboxes())

	maintain, endMaintenance := context.WithCancelCause(context.WithoutCancel(ctx))
	defer endMaintenance(nil)
	var background sync.WaitGroup
	background.Go(func() { d.service.Maintain(maintain) })
	if d.opts.IdleExit > 0 {
		background.Go(d.watchIdle)
	}
	var failure error
	select {
	case <-ctx.Done():
		d.Shutdown(api.Shutdown{KeepSandboxes: true})
	case <-d.stop:
	case failure = <-served:
		d.Shutdown(api.Shutdown{KeepSandboxes: true})
		served <- nil
	}
	<-d.stop // orders our reading of request
	endMaintenance(class.ErrStopping)
	return errors.Join(failure, d.shutdown(context.WithoutCancel(ctx), &background, served))
}

// shutdown reads top to bottom. Each step has its own deadline, and a step that fails does not keep
// the next from being tried.
func (d *Daemon) shutdown(ctx context.Context, background *sync.WaitGroup, served <-chan error) error {
	d.log.Info("daemon is stopping", "keep_sandboxes", d.request.KeepSandboxes, "stop_sandboxes", d.request.StopSandboxes)
	// 1. Agent runs end while they can still collect their output through the API.
	d.service.CloseAgents(ctx)
	// 2. No request comes in any more, and those under way end.
	d.server.Drain(ctx, d.drain)
	errs := []error{<-served}
	background.Wait()
	// 3. The sandboxes end, or run on.
	if d.request.StopSandboxes {
		errs = append(errs, d.service.StopAll(ctx))
	}
	errs = append(errs, d.service.Close(ctx, d.request.KeepSandboxes || d.request.StopSandboxes))
	if engine, ok := runtime.As[runtime.Shutdowner](d.opts.Engine); ok && !d.request.KeepSandboxes {
		ctx, cancel := context.WithTimeout(ctx, stepTimeout)
		errs = append(errs, engine.Shutdown(ctx))
		cancel()
	}
	// 4. The locks and the socket go last: until here a new daemon must not start. A client that sees
	// the socket gone finds the data directory free.
	errs = append(errs, d.lock.Close(), d.socket.Remove())
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("stop daemon: %w", err)
	}
	d.log.Info("daemon has stopped")
	return nil
}
