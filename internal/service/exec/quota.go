package exec

import (
	"fmt"
	"maps"
	"slices"

	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/runtime"
)

// quota bounds the detached execs of a tenant.
type quota struct {
	// own holds the ids of the tenant's sandboxes: those of others make no room. Nil means all.
	own map[string]bool
	// parts is the number of parts of the room of all, of which the tenant may have one.
	parts int
}

// quotaOf returns the quota of a tenant: all of the room for the daemon's own, and else its
// part.
func (r *Registry) quotaOf(tenant string) quota {
	q := quota{own: r.opts.Supervisor.IDs(tenant), parts: 1}
	if tenant != "" {
		q.parts = runtime.TenantParts
	}
	return q
}

// use returns the number of a tenant's detached execs besides the first of each sandbox, and their
// bytes. It needs mu.
func (r *Registry) use(q quota) (n int, kept int64) {
	for id := range q.own {
		n += max(0, r.counts[id]-1)
		kept += r.keptOf[id]
	}
	return n, kept
}

// reserve counts a detached exec, which register or release follows, and returns finished ones that
// must make room for it.
func (r *Registry) reserve(sandbox string, size int64, q quota) (room []*Detached, err error) {
	if r.opts.Work.Closed() {
		return nil, class.ErrStopping
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	running, mine := 0, 0
	var finished []*Detached
	for id, of := range r.of {
		for _, x := range of {
			x, ok := x.(*Detached)
			switch {
			case !ok:
			case q.own != nil && !q.own[id]:
			case x.Ended() && x.main.isReported():
				finished = append(finished, x)
				if id == sandbox {
					mine++
				}
			case id == sandbox:
				running++
			}
		}
	}
	slices.SortFunc(finished, func(a, b *Detached) int { return byStart(a, b) })
	// As it will be without room.
	count, counts, kept := r.count, maps.Clone(r.counts), r.kept
	ownCount, ownKept := r.use(q)
	tooMuch := func() bool {
		return (kept+size > MaxKept || ownKept+size > MaxKept/int64(q.parts)) && (counts[sandbox] > 0 || size > MainRing)
	}
	full := func() bool {
		return counts[sandbox] > 0 && (count-len(counts) >= maxDetachedIn || ownCount >= maxDetachedIn/q.parts) || tooMuch()
	}
	for _, x := range finished {
		own := x.record.Sandbox == sandbox
		helps := counts[x.record.Sandbox] > 1 || own || tooMuch() // else it is the one that its sandbox may have in any case
		if full() && helps || own && mine >= MaxFinished {
			room = append(room, x)
			count, kept, ownKept = count-1, kept-x.kept, ownKept-x.kept
			if counts[x.record.Sandbox] > 1 {
				ownCount--
			}
			if counts[x.record.Sandbox]--; counts[x.record.Sandbox] == 0 {
				delete(counts, x.record.Sandbox)
			}
			if own {
				mine--
			}
		}
	}
	if running >= MaxDetached-MaxFinished || full() {
		if q.parts > 1 { // the sums of all tell of other tenants
			_, ownKept = r.use(q)
			return nil, class.Mark(runtime.ErrInUse, fmt.Errorf("%d detached execs of this sandbox run, and all of yours are kept with %d MiB of memory: there is room for no more",
				running, ownKept>>20))
		}
		return nil, class.Mark(runtime.ErrInUse, fmt.Errorf("%d detached execs of this sandbox run and %d of all are kept, with %d MiB of memory, which is the most",
			running, r.count, r.kept>>20))
	}
	r.add(sandbox, 1, size)
	return room, nil
}

// add counts detached execs of a sandbox and their bytes. It needs mu.
func (r *Registry) add(sandbox string, n int, size int64) {
	r.count += n
	r.kept += size
	if r.keptOf[sandbox] += size; r.keptOf[sandbox] == 0 {
		delete(r.keptOf, sandbox)
	}
	if r.counts[sandbox] += n; r.counts[sandbox] == 0 {
		delete(r.counts, sandbox)
	}
}

func (r *Registry) release(sandbox string, size int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.add(sandbox, -1, -size)
}
