// Package guests is the use of the inits of running sandboxes under leases: their clients, contexts
// that end with a sandbox, and what the loss of an init means.
package guests

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/sandboxd/sandboxd/internal/guest/host"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/runtime"
)

// Of returns a client of the sandbox's init that waits for one that is being read.
func Of(lease *runtime.Lease) *host.Client {
	c := host.NewClient(lease.Socket)
	c.Held = lease.Held
	c.Load = func() (host.Load, bool) { return host.LoadOf(lease.Record.PID) }
	return c
}

// silenceGrace bounds the time in which a sandbox whose init broke off is seen as ended; after it,
// the sandbox is killed. It starts anew, endGrace in all at most, while init gets no processor to
// end on.
const (
	silenceGrace = 2 * time.Second
	endGrace     = 30 * time.Second
)

// killTimeout bounds the kill of a sandbox, which must be tried although no client waits for it.
const killTimeout = 10 * time.Second

// Guests returns errors of the class [class.ErrGone] for sandboxes that end during a request.
type Guests struct {
	Supervisor *runtime.Supervisor
	Log        *slog.Logger
}

// Lost classifies an error of the guest protocol if init is lost: either the sandbox has ended, or
// its init was taken over and is ended now. Other errors pass.
func (g Guests) Lost(ctx context.Context, lease *runtime.Lease, err error) error {
	if !errors.Is(err, host.ErrLost) {
		return err
	}
	if !endsBySelf(lease) {
		log, reason := "the init of a sandbox does not keep to the protocol, killing the sandbox", "its init did not keep to the protocol"
		if errors.Is(err, host.ErrSilent) {
			log, reason = "the init of a sandbox is silent, killing the sandbox", "its init did not answer in time"
		}
		g.Log.Warn(log, "id", lease.Record.ID, "error", err)
		// Whatever ended the request, the sandbox has to go.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTimeout)
		defer cancel()
		if kerr := lease.Kill(ctx, reason); kerr != nil {
			g.Log.Error("sandbox could not be killed", "id", lease.Record.ID, "error", kerr)
		}
	}
	return g.Ended(lease)
}

// endsBySelf waits a moment for the end of a sandbox whose init broke off, and reports whether it
// has come.
func endsBySelf(lease *runtime.Lease) bool {
	load, known := host.LoadOf(lease.Record.PID)
	for begun := time.Now(); ; {
		at := time.Now()
		wait := time.NewTimer(silenceGrace)
		select {
		case <-lease.Gone:
			wait.Stop()
			return true
		case <-wait.C:
		}
		was, had := load, known
		load, known = host.LoadOf(lease.Record.PID)
		if !had || !known || !load.Starved(was, time.Since(at)) || time.Since(begun) > endGrace {
			return false
		}
	}
}

// Ended returns the reason why the sandbox of a lease no longer runs.
func (g Guests) Ended(lease *runtime.Lease) error {
	reason := "it was deleted"
	if rec, err := g.Supervisor.Get(lease.Record.ID); err == nil && rec.Reason != "" {
		reason = rec.Reason
	}
	return class.Mark(class.ErrGone, fmt.Errorf("sandbox %s ended during the request: %s", lease.Record.Name, reason))
}

// WithGone returns a context that ends also when the sandbox does. Its cause is then [ErrEnded].
func WithGone(ctx context.Context, lease *runtime.Lease) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := lease.AfterGone(func() { cancel(ErrEnded) })
	return ctx, func() {
		stop()
		cancel(context.Canceled)
	}
}

// ErrEnded is the cause of the end of a context of [WithGone], when the sandbox has ended.
var ErrEnded = errors.New("the sandbox has ended")
