package exec

import (
	"context"
	"errors"
	"sync"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/guest/host"
	"github.com/sandboxd/sandboxd/internal/service/guests"
	"github.com/sandboxd/sandboxd/internal/service/output"
	"github.com/sandboxd/sandboxd/runtime"
)

// Execution is an exec that ends with its client: with Stream, Await or Events, otherwise with
// Close.
type Execution struct {
	*program

	close      sync.Once
	givesStdin bool      // the client gets the end of stdin
	published  sync.Once // of the event of its end
	wrote      [2]int64  // bytes of stdout and stderr; guarded by mu
}

// Start starts the program of a valid request and takes over the lease. How says how the program is
// connected. Ctx bounds the start. The caller must Close the execution.
func (r *Registry) Start(ctx context.Context, lease *runtime.Lease, req api.ExecRequest, how host.ExecRequest) (*Execution, error) {
	defer r.starting(lease.Record.ID)() // until it is listed
	p, err := r.start(ctx, lease, req, how, nil)
	if err != nil {
		return nil, err
	}
	x := &Execution{program: p}
	r.register(x)
	r.publishStarted(p, &lease.Record)
	return x, nil
}

// StartUnlisted is Start for a program of the daemon's own, which no client sees.
func (r *Registry) StartUnlisted(ctx context.Context, lease *runtime.Lease, req api.ExecRequest, how host.ExecRequest) (*Execution, error) {
	p, err := r.start(ctx, lease, req, how, nil)
	if err != nil {
		return nil, err
	}
	x := &Execution{program: p}
	x.published.Do(func() {})
	return x, nil
}

// Record returns the record of the execution at this moment.
func (x *Execution) Record() Record {
	x.mu.Lock()
	defer x.mu.Unlock()
	rec := x.record
	rec.StdoutBytes, rec.StderrBytes = x.wrote[0], x.wrote[1]
	return rec
}

// count counts output.
func (x *Execution) count(stream string, n int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if stream == "stderr" {
		x.wrote[1] += int64(n)
	} else {
		x.wrote[0] += int64(n)
	}
}

// Close kills the rest of the execution's program and returns when none of its goroutines runs.
func (x *Execution) Close() {
	x.close.Do(func() {
		_ = x.guest.Close() // always nil
		x.stdin.Wait()
		x.r.unregister(x)
		x.published.Do(func() { x.r.publishEnded(x.program, nil, "its request ended before it") })
		x.lease.End()
		close(x.done)
	})
}

// Feed begins to give the program the request's stdin, then end of file. A program that does not
// read it is no error.
func (x *Execution) Feed() {
	x.stdin.Go(func() {
		if _, err := x.guest.Write(x.req.Stdin); err != nil {
			return // the program has closed its stdin or ended
		}
		if n := len(x.req.Stdin); x.req.TTY && n > 0 && x.req.Stdin[n-1] != '\n' {
			_, _ = x.guest.Write([]byte{eot}) // in the middle of a line the first one only ends that
		}
		_ = x.closeStdin() // as above
	})
}

// GiveStdin makes stdin one of the [Execution.Ends].
func (x *Execution) GiveStdin() { x.givesStdin = true }

// Stream passes the program's output to sink and returns its exit. If ctx ends or sink fails,
// everything that the execution started is killed. If ctx ends with [ErrLeft], it is not: Leave
// comes next.
func (x *Execution) Stream(ctx context.Context, sink func(stream string, p []byte) error) (api.Exit, api.Usage, error) {
	return x.end(ctx, func(ctx context.Context) (host.ExecExit, error) {
		return x.guest.Stream(ctx, func(stream string, p []byte) error {
			x.count(stream, len(p))
			return sink(stream, p)
		})
	})
}

// Ends returns descriptors of the host's ends of the program's stdout, its stderr and, if it was
// started so, its stdin. They are the caller's to close. Await comes next.
func (x *Execution) Ends() ([]int, error) { return x.guest.Ends(x.givesStdin) }

// Await is Stream for a program whose output the client reads from the pipes. The output is not
// counted.
func (x *Execution) Await(ctx context.Context) (api.Exit, api.Usage, error) {
	if x.givesStdin {
		_ = x.guest.Stdin.Close() // or the program's stdin would not end with the client's
	}
	return x.end(ctx, x.guest.Await)
}

// end returns the exit that wait returns, as the API shows it.
func (x *Execution) end(ctx context.Context, wait func(context.Context) (host.ExecExit, error)) (api.Exit, api.Usage, error) {
	ctx, cancel := guests.WithGone(ctx, x.lease)
	defer cancel()
	exit, err := wait(ctx)
	switch {
	case errors.Is(err, guests.ErrEnded):
		return api.Exit{}, api.Usage{}, x.r.guests.Ended(x.lease)
	case err != nil:
		return api.Exit{}, api.Usage{}, x.r.guests.Lost(ctx, x.lease, err)
	}
	e := exitOf(exit, x.oom.struck(ctx))
	// Here, so that the event is there when the client reads the exit.
	x.published.Do(func() { x.r.publishEnded(x.program, &e, "") })
	return e, usageOf(exit), nil
}

// KeepIn returns a sink for [Execution.Stream] that keeps the beginning of each stream, and slows a
// program whose output exceeds the limit.
func (x *Execution) KeepIn(stdout, stderr *output.Head) func(stream string, p []byte) error {
	return func(stream string, p []byte) error {
		to := stdout
		if stream == "stderr" {
			to = stderr
		}
		to.WritePaced(p, x.guest.Over())
		return nil
	}
}

// Events emits all events but the last, the exit, which it returns. Emit is called from one
// goroutine at a time, and a failing emit kills the program.
func (x *Execution) Events(ctx context.Context, emit func(api.ExecEvent) error) (last api.ExecEvent, err error) {
	if err := emit(api.ExecEvent{PID: x.PID, Exec: x.record.ID}); err != nil {
		return last, err
	}
	var chars output.Characters
	exit, usage, err := x.Stream(ctx, chars.Whole(func(stream string, p []byte) error { return emit(output.Event(stream, p)) }))
	if err == nil {
		err = chars.Rest(func(stream string, p []byte) error { return emit(output.Event(stream, p)) })
	}
	return api.ExecEvent{Exit: &exit, Usage: &usage}, err
}
