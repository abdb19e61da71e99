package egress

import (
	"sync"

	"github.com/sandboxd/sandboxd/netns/gateway"
)

// Restarted is the kind of event that each network's record gets when the gateway process was
// replaced. Reason tells why; connections were reset.
const Restarted gateway.Kind = "restarted"

// maxQueued is the number of events of one network that wait for [Config.Events].
const maxQueued = 256

// A record hands the events of one network to a function that may be slow, in order. A full queue
// drops the newest.
type record struct {
	hand func(gateway.Event)
	done chan struct{}

	mu     sync.Mutex // guards those below
	queue  chan gateway.Event
	lost   uint64
	closed bool
}

func newRecord(hand func(gateway.Event)) *record {
	r := &record{hand: hand, queue: make(chan gateway.Event, maxQueued), done: make(chan struct{})}
	go func() {
		defer close(r.done)
		for e := range r.queue {
			r.hand(e)
		}
	}()
	return r
}

// add queues an event, unless the record is closed. It never waits.
func (r *record) add(e gateway.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return
	}
	lost := r.lost + e.Lost
	e.Lost = lost
	select {
	case r.queue <- e:
		r.lost = 0
	default:
		r.lost = lost + 1
	}
}

// close lets no further event in. Done is closed when the queued ones were handed on.
func (r *record) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.closed {
		r.closed = true
		close(r.queue)
	}
}
