// Package work runs what outlives the requests that start it, until the daemon stops.
package work

import (
	"context"
	"sync"
)

// A Group is a set of goroutines that end together.
type Group struct {
	ctx    context.Context //nolint:containedctx // of the goroutines, which outlive the requests that start them
	cancel context.CancelCauseFunc
	all    sync.WaitGroup

	mu     sync.Mutex
	closed bool
}

// New returns a group whose goroutines get a context of ctx.
func New(ctx context.Context) *Group {
	g := new(Group)
	g.ctx, g.cancel = context.WithCancelCause(ctx)
	return g
}

// Context returns a context that ends when the group stops.
func (g *Group) Context() context.Context { return g.ctx }

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
