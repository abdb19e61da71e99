package exec

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/execlog"
	"github.com/sandboxd/sandboxd/internal/service/output"
)

// Attach emits the output from this offset on, and last how the program ended.
// It returns after that, with emit's error, when ctx ends, or with a [*Failure] where the exit is
// unknown. The program does not notice.
func (x *Detached) Attach(ctx context.Context, from int64, text bool, emit func(api.ExecEvent) error) error {
	defer x.log.Follow()()
	return x.attach(ctx, from, text, make([]byte, 64<<10), emit)
}

// AttachHeld is Attach from the oldest output on, and nothing after that is dropped: a program that
// writes faster than emit takes waits. U is nil, or has waited for the execution.
func (x *Detached) AttachHeld(ctx context.Context, from int64, u *Upcoming, text bool, emit func(api.ExecEvent) error) error {
	if u == nil {
		u = &Upcoming{hold: x.log.Hold(from)}
	}
	defer u.hold.Release()
	return x.Attach(ctx, from, text, func(e api.ExecEvent) error {
		err := emit(e)
		if n := len(e.Data) + len(e.Text); n > 0 {
			u.hold.Taken(e.Offset + int64(n))
		}
		return err
	})
}

// attach is Attach, with buf for as much output as an event may have.
func (x *Detached) attach(ctx context.Context, from int64, text bool, buf []byte, emit func(api.ExecEvent) error) error {
	first := true
	for {
		c, err := x.log.Read(from, buf)
		if errors.Is(err, os.ErrClosed) {
			err = class.Mark(class.ErrNoExec, fmt.Errorf("exec %s has been deleted", x.record.ID))
		}
		if err != nil {
			return err
		}
		if first || c.At > from {
			e := api.ExecEvent{Offset: c.At, Dropped: max(0, c.At-from)}
			if first {
				e.PID, e.Exec = x.PID, x.record.ID
			}
			if err := emit(e); err != nil {
				return err
			}
			first, from = false, c.At
		}
		if c.Over {
			break
		}
		if tail := output.Tail(c.Data); text && !c.Whole && tail > 0 {
			// A character whose rest is not there yet. If there is more than what buf takes, the next chunk
			// begins with it.
			c.Data = c.Data[:len(c.Data)-tail]
		}
		if len(c.Data) > 0 {
			e := output.Event(c.Stream, c.Data)
			if !text {
				e = api.ExecEvent{Stream: c.Stream, Data: c.Data}
			}
			e.Offset = c.At
			if err := emit(e); err != nil {
				return err
			}
			from = c.At + int64(len(c.Data))
			if c.More == nil {
				continue
			}
		}
		if c.More == nil {
			return fmt.Errorf("attach to exec %s: its output makes no progress at %d", x.record.ID, from)
		}
		select {
		case <-c.More:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	select {
	case <-x.done:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	rec := x.Record()
	if rec.Failure != nil {
		return rec.Failure
	}
	return emit(api.ExecEvent{Exit: rec.Exit, Usage: rec.Usage})
}

// Output returns the log of the output, and of the documents beside it.
func (x *Detached) Output() *execlog.Log { return x.log }

// OutputEnd returns the offset behind the output so far.
func (x *Detached) OutputEnd() int64 { return x.log.End() }
