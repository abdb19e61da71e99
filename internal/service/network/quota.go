package network

import (
	"fmt"
	"sync"
)

// A quota bounds what sandboxes hold at a time of something that all of them share. No sandbox
// takes more than it leaves to the others of its tenant, and no tenant more than it leaves to other
// tenants: of the rest that it finds, a greedy one gets half.
type quota struct {
	what                 string // in the plural, for errors
	sandbox, tenant, all int    // bounds

	mu        sync.Mutex // guards those below
	held      int
	tenants   map[string]int
	sandboxes map[string]int
}

// owner is the sandbox that holds something, and its tenant.
type owner struct{ tenant, id string }

// take takes n of the quota for a sandbox, or returns an error with the bound that it would exceed.
func (q *quota) take(o owner, n int) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	own, theirs := q.sandboxes[o.id], q.tenants[o.tenant]
	switch {
	case own+n > q.sandbox:
		return fmt.Errorf("the sandbox has %d %s at a time, at most %d are possible", own, q.what, q.sandbox)
	case own+n > q.tenant-theirs:
		return fmt.Errorf("the sandboxes of the tenant have %d %s at a time, and this one %d: no more are left to it", theirs, q.what, own)
	case theirs+n > q.all-q.held:
		return fmt.Errorf("the sandboxes of the tenant have %d %s at a time: no more are left to it", theirs, q.what)
	}
	if q.tenants == nil {
		q.tenants, q.sandboxes = make(map[string]int), make(map[string]int)
	}
	q.change(o, n)
	return nil
}

// give gives back n that a sandbox has taken.
func (q *quota) give(o owner, n int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.change(o, -n)
}

// change needs mu.
func (q *quota) change(o owner, by int) {
	q.held += by
	if q.tenants[o.tenant] += by; q.tenants[o.tenant] == 0 {
		delete(q.tenants, o.tenant)
	}
	if q.sandboxes[o.id] += by; q.sandboxes[o.id] == 0 {
		delete(q.sandboxes, o.id)
	}
}
