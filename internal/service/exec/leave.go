package exec

import (
	"context"
	"fmt"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/guest/host"
	"github.com/sandboxd/sandboxd/internal/service/class"
)

// ErrLeft is the cause of the end of a context with which [Execution.Stream] leaves a program on a
// terminal alone.
var ErrLeft = host.ErrLeft

// CheckLeave returns an error of the class ErrInvalid if the execution cannot go on
// without its client in this form: see [api.ExecControl].
func (x *Execution) CheckLeave(form string) error {
	switch {
	case form != api.DetachExec && form != api.MainExec:
		return class.Invalidf("detach %q: must be %q or %q", class.Clip(form), api.DetachExec, api.MainExec)
	case !x.req.TTY:
		return class.Invalidf("detach: the program has no terminal, and ends with its client; start it with detach instead")
	case form == api.MainExec && len(x.lease.Record.Command) > 0:
		return class.Invalidf("detach: sandbox %s has a main process already", x.lease.Record.Name)
	}
	return nil
}

// Leave makes a program on a terminal go on without its client, in a form that CheckLeave allows.
// Stream has returned [ErrLeft] before. The execution is closed: another one, with the same ID, is
// listed in its place. If Leave fails, the program is killed.
func (x *Execution) Leave(ctx context.Context, form string) (err error) {
	r, rec := x.r, &x.lease.Record
	if err := r.Adopt(ctx); err != nil {
		return err
	}
	size := int64(DefaultOutputLimit)
	var main *mainProcess
	if form == api.MainExec {
		size, main = MainRing, newMainProcess(rec.Life)
	}
	log, undo, err := r.newLog(ctx, rec, size, size, true)
	if err != nil {
		return err
	}
	y := &Detached{
		program: &program{PID: x.PID, r: r, req: x.req, lease: x.lease, oom: x.oom, input: make(chan struct{}, 1), done: make(chan struct{}), record: x.record},
		log:     log, kept: size, main: main,
	}
	y.req.OutputLimit, y.req.Stdin = size, nil
	y.record.Detached, y.record.StdinOpen, y.record.Main = true, true, main != nil
	defer func() {
		if err != nil { // the caller's Close kills the program
			undo()
		}
	}()
	if y.guest, err = x.guest.Leave(); err != nil {
		return fmt.Errorf("leave exec %s: %w", x.record.ID, err)
	}
	if err = y.saveRecord(); err == nil {
		err = y.storeDescriptors(ctx)
	}
	if err == nil && main != nil {
		// After the descriptors: a daemon that finds a command and no program would start it anew.
		err = r.opts.Supervisor.SetMain(rec.ID, rec.Life, x.req.Argv)
	}
	if err != nil {
		y.abandon(ctx)
		return fmt.Errorf("leave exec %s: %w", x.record.ID, err)
	}
	x.close.Do(func() {
		x.stdin.Wait()
		close(x.done)
	})
	if main != nil {
		r.mu.Lock()
		r.mains[rec.ID] = mainOf{gone: x.lease.Gone}
		r.mu.Unlock()
	}
	r.register(y)
	if !r.follow(y) {
		close(y.done)
		return class.ErrStopping // and the next daemon has it
	}
	return nil
}
