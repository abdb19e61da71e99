// Package work runs what outlives the requests that start it, until the daemon stops.
package work

import (
	"context"
	"sync"
)

// A Group is a set of goroutines that end together.
type Group struct {
	Ctx context.Context //nolint:containedctx // ends when the group stops

	cancel context.CancelCauseFunc
	all    sync.WaitGroup

	mu     sync.Mutex
	closed bool
}

// New returns a group whose Ctx is one of ctx.
func New(ctx context.Context) *Group {
	g := new(Group)
	g.Ctx, g.cancel = context.WithCancelCause(ctx)
	return g
}

// Go starts f, for which Stop waits; false once the group is closed.
func (g *Group) Go(f func()) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.closed {
		g.all.Go(f)
	}
	return !g.closed
}

// Close lets nothing start any more.
func (g *Group) Close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
}

// Closed reports whether nothing starts any more.
func (g *Group) Closed() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.closed
}

// Stop closes the group, ends its context with this cause, and waits for what runs.
func (g *Group) Stop(cause error) {
	g.Close()
	g.cancel(cause)
	g.all.Wait()
}
