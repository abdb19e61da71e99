package image

import (
	"context"
	"sync"
)

// flights does each piece of work once for all who want it at the same time.
type flights struct {
	mu   sync.Mutex
	live map[string]*flight
	wg   sync.WaitGroup
}

type flight struct {
	waiters int
	cancel  context.CancelFunc
	done    chan struct{}
	err     error // once done is closed
}

// do returns what work(ctx) returns, run for this caller or for one that came before with the same key. The work's
// context ends when nobody waits any more, not when the first caller goes. An error of another caller's work, who may
// have asked another registry with other credentials, makes this one try for itself.
func (f *flights) do(ctx context.Context, key string, work func(context.Context) error) error {
	for {
		first, err := f.join(ctx, key, work)
		if err == nil || first || ctx.Err() != nil {
			return err
		}
	}
}

// join is one attempt of do; first says whether the work was this caller's.
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
		// Who comes now must not join work that is being given up.
		if f.live[key] == fl {
			delete(f.live, key)
		}
	}
	f.mu.Unlock()
	if ctx.Err() != nil {
		// Work that was cancelled leaves things behind until it has noticed.
		f.settle(fl)
	}
	return !ok, err
}

// settle waits for the work to end if nobody else waits for it.
func (f *flights) settle(fl *flight) {
	f.mu.Lock()
	last := fl.waiters == 0
	f.mu.Unlock()
	if last {
		<-fl.done
	}
}

// wait returns when no work is left.
func (f *flights) wait() { f.wg.Wait() }
