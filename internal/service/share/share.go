// Package share bounds parts of what all sandboxes of a daemon have together.
package share

import (
	"fmt"
	"sync"
)

// A Quota bounds what sandboxes hold at a time of something that all of them share. No sandbox
// takes more than it leaves to the others of its tenant, and no tenant more than it leaves to other
// tenants: of the rest that it finds, a greedy one gets half.
type Quota struct {
	What                 string // in the plural, for errors
	Sandbox, Tenant, All int    // bounds

	mu        sync.Mutex // guards those below
	held      int
	tenants   map[string]int
	sandboxes map[string]int
}

// An Owner is a sandbox that holds something, and its tenant.
type Owner struct{ Tenant, ID string }

// Take takes n of the quota for a sandbox, or returns an error with the bound that it would exceed.
func (q *Quota) Take(o Owner, n int) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	own, theirs := q.sandboxes[o.ID], q.tenants[o.Tenant]
	switch {
	case own+n > q.Sandbox:
		return fmt.Errorf("the sandbox has %d %s at a time, at most %d are possible", own, q.What, q.Sandbox)
	case own+n > q.Tenant-theirs:
		return fmt.Errorf("the sandboxes of the tenant have %d %s at a time, and this one %d: no more are left to it", theirs, q.What, own)
	case theirs+n > q.All-q.held:
		return fmt.Errorf("the sandboxes of the tenant have %d %s at a time: no more are left to it", theirs, q.What)
	}
	q.change(o, n)
	return nil
}

// Give gives back n that a sandbox has taken.
func (q *Quota) Give(o Owner, n int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.change(o, -n)
}

// change needs mu.
func (q *Quota) change(o Owner, by int) {
	if q.tenants == nil {
		q.tenants, q.sandboxes = make(map[string]int), make(map[string]int)
	}
	q.held += by
	if q.tenants[o.Tenant] += by; q.tenants[o.Tenant] == 0 {
		delete(q.tenants, o.Tenant)
	}
	if q.sandboxes[o.ID] += by; q.sandboxes[o.ID] == 0 {
		delete(q.sandboxes, o.ID)
	}
}

// Held returns how much is taken, of all.
func (q *Quota) Held() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.held
}
