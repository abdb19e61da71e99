package launcher

import (
	"errors"
	"fmt"
	"time"
)

// The mounts of the host's files have the ids of their sandbox, and so are made after it has got
// its range: the first request to start it takes the range and is answered with its number. The
// daemon has the mounts made, and asks again.

// errWantsMounts means that a sandbox can be started once its mounts have been made for its range.
var errWantsMounts = errors.New("the mounts of the host's files are missing")

// wantsMountsError names that range; 0 if the sandbox shares the first one.
type wantsMountsError struct{ number int }

func (e *wantsMountsError) Error() string {
	return fmt.Sprintf("%v: for range %d", errWantsMounts, e.number)
}
func (e *wantsMountsError) Unwrap() error { return errWantsMounts }

// holdTime bounds the time for which a range is kept for a sandbox whose mounts are being made.
const holdTime = time.Minute

// TakeFor takes the range of a sandbox with mounts. If they have not been opened yet, or too long
// ago, the range is held for the next call, and the error tells its number.
func (r *Ranges) TakeFor(id string, opened bool) (*Lease, error) {
	r.mu.Lock()
	h := r.held[id]
	delete(r.held, id)
	r.mu.Unlock()
	if h != nil {
		h.timer.Stop()
		if opened {
			return h.lease, nil
		}
		h.lease.Release()
	}
	lease, err := r.Take()
	if err != nil {
		return nil, err
	}
	if opened && lease.number == 0 {
		return lease, nil
	}
	r.hold(id, lease, holdTime)
	return nil, &wantsMountsError{lease.number}
}

// held is a range that waits for the mounts of its sandbox.
type held struct {
	lease *Lease
	timer *time.Timer
}

// hold keeps a range until it is taken by the same id, or for a time.
func (r *Ranges) hold(id string, lease *Lease, until time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.held == nil {
		r.held = make(map[string]*held)
	}
	h := &held{lease: lease}
	h.timer = time.AfterFunc(until, func() {
		r.mu.Lock()
		mine := r.held[id] == h
		if mine {
			delete(r.held, id)
		}
		r.mu.Unlock()
		if mine {
			lease.Release()
		}
	})
	r.held[id] = h
}
