package runtime

import (
	"errors"
	"fmt"

	"github.com/sandboxd/sandboxd/api"
)

// ErrNoRoom means that the limits of a sandbox do not fit beside those of the others.
var ErrNoRoom = errors.New("no room for the sandbox")

// Room bounds the sums of the limits of all sandboxes that have processes, or are about to. A
// sandbox whose limits would exceed one is refused before anything of it is made.
type Room struct {
	Memory int64 // bytes; zero means no bound
	Pids   int64 // processes and threads; zero means no bound
	// Overcommit is the ratio of the sums to the bounds; zero means 1: programs that all use what they
	// may still fit.
	Overcommit float64
}

// initPids is the number of processes and threads of an init, which its sandbox has besides its
// limit.
const initPids = 16

// taken is the part of the room that limits take.
type taken struct{ memory, pids int64 }

func takenBy(l *api.Limits) taken { return taken{l.Memory, l.Pids + initPids} }

func (t *taken) add(o taken) {
	t.memory += o.memory
	t.pids += o.pids
}

// admit fails if there is no room for limits of a sandbox of the tenant. Except is a sandbox that
// these replace the limits of, or nil. Warm sandboxes take room for their inits only: a claim is
// admitted as a creation is, and until then no program uses their limits. It needs mu.
func (s *Supervisor) admit(tenant string, limits *api.Limits, except *sandbox) error {
	room := s.opts.Room
	if room.Memory <= 0 && room.Pids <= 0 {
		return nil
	}
	var all, own taken
	count := func(of string, l *api.Limits) {
		t := takenBy(l)
		all.add(t)
		if of == tenant {
			own.add(t)
		}
	}
	for _, sb := range s.byID {
		if sb == except || sb.phase == phaseEnded || sb.phase == phaseDeleting && !lives(sb.rec.State) {
			continue // it has no processes
		}
		l := sb.rec.Limits
		l.Memory, l.Pids = max(l.Memory, sb.asked.Memory), max(l.Pids, sb.asked.Pids)
		count(sb.rec.Tenant, &l)
	}
	all.pids += initPids * int64(len(s.pool.warm)+len(s.pool.parking))
	ratio := room.Overcommit
	if ratio <= 0 {
		ratio = 1
	}
	want := takenBy(limits)
	for _, of := range []struct {
		name                  string
		want, own, all, bound int64
	}{
		{"memory", want.memory, own.memory, all.memory, room.Memory},
		{"pids", want.pids, own.pids, all.pids, room.Pids},
	} {
		bound := int64(float64(of.bound) * ratio)
		part := bound / TenantParts
		switch {
		case of.bound <= 0:
		case tenant != "" && of.own > 0 && of.own+of.want > part: // one sandbox is always a tenant's
			return fmt.Errorf("%w: limits.%s needs %d, and your others have %d of %d, which is the most of one tenant", ErrNoRoom, of.name, of.want, of.own, part)
		case of.all+of.want <= bound:
		case tenant != "": // the sums tell of others
			return fmt.Errorf("%w: limits.%s needs %d, which are not free on this host", ErrNoRoom, of.name, of.want)
		default:
			return fmt.Errorf("%w: limits.%s needs %d, and %d of %d are taken by the limits of others", ErrNoRoom, of.name, of.want, of.all, bound)
		}
	}
	return nil
}
