package image

import (
	"context"
	"sync"
)

// flights runs each piece of work once for all concurrent callers.
type flights struct {
	mu   sync.Mutex
	live map[string]*flight
	wg   sync.WaitGroup
}

type flight struct {
	waiters int
	cancel  context.CancelFunc
	done    chan struct{}
	err     error // valid after done is closed
}

// do returns the result of work(ctx), run for this caller or for an earlier one with that key. The
// work's context ends when no caller waits any more, not when the first one leaves. After an error
// of another caller's work, perhaps from another registry or with other credentials, this caller
// tries itself.
func (f *flights) do(ctx context.Context, key string, work func(context.Context) error) error {
	for {
		first, err := f.join(ctx, key, work)
		if err == nil || first || ctx.Err() != nil {
			return err
		}
	}
}

// join is one attempt of do; first reports whether the work was this caller's.
func (f *flights) join(ctx context.Context, key string, work func(context.Context) error) (first bool, err error) {
	f.mu.Lock()
	fl, ok := f.live[key]
	if !ok {
		workCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
		fl = &flight{cancel: cancel, done: make(chan struct{})}
		if f.live == nil {
			f.live = make(map[string]*flight)
		}
		f.live[key] = fl
		f.wg.Go(func() {
			fl.err = work(workCtx)
			cancel()
			f.mu.Lock()
			if f.live[key] == fl {
				delete(f.live, key)
			}
			f.mu.Unlock()
			close(fl.done)
		})
	}
	fl.waiters++
	f.mu.Unlock()

	select {
	case <-fl.done:
		err = fl.err
	case <-ctx.Done():
		err = ctx.Err()
	}
	f.mu.Lock()
	if fl.waiters--; fl.waiters == 0 {
		fl.cancel()
		// New callers must not join abandoned work.
		if f.live[key] == fl {
			delete(f.live, key)
		}
	}
	f.mu.Unlock()
	if ctx.Err() != nil {
		// Cancelled work leaves things behind until it has ended.
		f.awaitAbandoned(fl)
	}
	return !ok, err
}

// awaitAbandoned waits for the work to end if no other caller waits for it.
func (f *flights) awaitAbandoned(fl *flight) {
	f.mu.Lock()
	last := fl.waiters == 0
	f.mu.Unlock()
	if last {
		<-fl.done
	}
}

// wait waits for all work to end.
func (f *flights) wait() { f.wg.Wait() }
