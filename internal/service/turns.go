package service

import (
	"context"
	"sync"
)

// tenantTurns serializes operations of one tenant; tenants do not wait for each other. The zero
// value is ready.
type tenantTurns struct {
	of sync.Map // chan struct{} by tenant
}

// take waits for the tenant's turn. The caller gives it back with release.
func (t *tenantTurns) take(ctx context.Context, tenant string) (release func(), err error) {
	of, _ := t.of.LoadOrStore(tenant, make(chan struct{}, 1))
	turn := of.(chan struct{}) //nolint:forcetypeassert // no other type is stored
	select {
	case turn <- struct{}{}:
		return func() { <-turn }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}
