package exec

import (
	"context"
	"errors"
	"strconv"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/guest/host"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/mainlog"
	"github.com/sandboxd/sandboxd/runtime"
)

// The main process of a sandbox is a detached exec with three additions:
//
//   - The daemon starts it with the sandbox: after a creation, a claim, a start and a rollback, for
//     each fork, and where a killed daemon did not. A creation that cannot start it leaves nothing.
//   - Its output is kept in the sandbox's log (package mainlog) rather than in memory only. A
//     goroutine follows it like a client. The memory drops nothing before it is written, so that
//     the process waits for the disk. Output that the disk refuses is missing in the log; the
//     process goes on.
//   - When it ends, the sandbox is killed and its record has the exit. Both happen before the
//     launcher drops the exec, so that the next daemon does them again after a crash.

// MainRing is the number of bytes of a main process's output in memory.
const MainRing = 256 << 10

// mainProcess is the part of an execution that only a main process has.
type mainProcess struct {
	life     int           // of the sandbox; see [runtime.Record]
	logged   chan struct{} // closed when its output is in the log
	reported chan struct{} // closed when the sandbox's record says how it ended
}

func newMainProcess(life int) *mainProcess {
	return &mainProcess{life: life, logged: make(chan struct{}), reported: make(chan struct{})}
}

// isReported reports whether the end of the main process is dealt with. It is true for other execs.
func (m *mainProcess) isReported() bool { return m == nil || closed(m.reported) }

// mainOf is the main process of a sandbox in its latest life.
type mainOf struct {
	gone <-chan struct{} // of the lease under which it was started, or is about to be; nil where that had ended before
	x    *Detached       // nil until it has been, and when it is forgotten
}

// StartMain starts the main process of a sandbox in the life of a lease, unless a concurrent call
// does or has done so.
func (r *Registry) StartMain(ctx context.Context, lease *runtime.Lease, req api.ExecRequest) error {
	rec := &lease.Record
	r.mu.Lock()
	mine := r.mains[rec.ID].gone != lease.Gone
	if mine {
		r.mains[rec.ID] = mainOf{gone: lease.Gone}
	}
	r.mu.Unlock()
	if !mine {
		return nil
	}
	_, err := r.Detach(ctx, rec, req, As{main: newMainProcess(rec.Life)})
	return err
}

// adoptMain makes an adopted execution the main process of its sandbox, and begins to keep its log.
func (r *Registry) adoptMain(x *Detached, life int) {
	if x.lease != nil {
		life = x.lease.Record.Life
	}
	x.main = newMainProcess(life)
	r.mu.Lock()
	defer r.mu.Unlock()
	if m := r.mains[x.record.Sandbox]; x.lease != nil || m.x == nil || m.gone == nil && m.x.record.StartedAt.Before(x.record.StartedAt) {
		r.mains[x.record.Sandbox] = mainOf{gone: x.gone(), x: x}
	}
}

// gone is closed when the sandbox of the execution ceases to run; nil if it has before this daemon.
func (x *Detached) gone() <-chan struct{} {
	if x.lease == nil {
		return nil
	}
	return x.lease.Gone
}

// keepLog copies the output of a main process to the log until it ends.
func (r *Registry) keepLog(x *Detached) {
	turn, done := r.opts.Logs.Of(x.record.Sandbox).Enqueue()
	x.log.Save(0)
	r.mu.Lock()
	if m := r.mains[x.record.Sandbox]; m.x == nil && x.lease != nil && m.gone == x.gone() {
		m.x = x
		r.mains[x.record.Sandbox] = m
	}
	r.mu.Unlock()
	write := func() {
		defer close(x.main.logged)
		defer done()
		select {
		case <-turn:
			r.writeLog(x)
		case <-r.opts.Work.Ctx.Done():
		}
	}
	if !r.opts.Work.Go(write) {
		done()
		close(x.main.logged)
	}
}

func (r *Registry) writeLog(x *Detached) {
	log := r.opts.Log.With("id", x.record.Sandbox, "exec", x.record.ID)
	defer func() {
		if r.opts.Work.Ctx.Err() == nil { // else the next daemon continues with the output that is still in memory
			x.log.Saved(1 << 62) // whatever has happened, the process does not wait for us when we are gone
		}
	}()
	w, err := r.opts.Logs.Of(x.record.Sandbox).NewWriter(x.main.life, x.record.StartedAt)
	if errors.Is(err, mainlog.ErrOlder) {
		return
	}
	if err != nil {
		log.Error("a main process has no log", "error", err)
		return
	}
	defer w.Close()
	x.log.Saved(w.Next())
	failing := false
	var pace host.Pace
	err = x.attach(r.opts.Work.Ctx, w.Next(), true, make([]byte, mainlog.Piece), func(e api.ExecEvent) error {
		if e.Stream == "" {
			return nil
		}
		before := w.Wrote()
		err := w.Append(api.LogEntry{Time: time.Now().UTC(), Stream: e.Stream, Text: e.Text, Data: e.Data}, e.Offset)
		if err != nil && !failing {
			log.Error("output of a main process is missing in its log", "error", err)
			failing = true // once is enough: it may go on for as long as the process writes
		}
		x.log.Saved(w.Next())
		if x.guest != nil && x.log.Held() == nil { // else it has ended, or a client waits for each byte
			// It is made JSON, some of it six times as long, and written to a file.
			pace.Wait(x.guest.Over(), 1+2*int(w.Wrote()-before)/mainlog.Piece)
		}
		return nil
	})
	if _, lost := errors.AsType[*Failure](err); err != nil && !lost && r.opts.Work.Ctx.Err() == nil {
		log.Error("the log of a main process breaks off", "error", err)
	}
}

// mainEnded ends the sandbox of a main process that has ended.
func (r *Registry) mainEnded(ctx context.Context, x *Detached) {
	defer close(x.main.reported)
	<-x.main.logged
	rec := x.Record()
	exit, reason := r.exitOfMain(ctx, x, &rec)
	if err := r.opts.Supervisor.MainEnded(context.WithoutCancel(ctx), rec.Sandbox, x.main.life, exit, reason); err != nil {
		r.opts.Log.Error("a sandbox whose main process has ended", "id", rec.Sandbox, "error", err)
	}
	r.opts.MainEnded(rec.Sandbox)
}

// exitOfMain returns the exit of a main process and the reason for the sandbox's record.
func (r *Registry) exitOfMain(ctx context.Context, x *Detached, rec *Record) (*api.SandboxExit, string) {
	exit := &api.SandboxExit{StartedAt: rec.StartedAt, EndedAt: rec.EndedAt, Usage: rec.Usage}
	if rec.Exit == nil {
		now, err := r.opts.Supervisor.Get(rec.Sandbox)
		if err != nil || now.State != api.StateStopped {
			detail := "nobody knows how"
			if rec.Failure != nil {
				detail = rec.Failure.Message
			}
			return nil, "its main process is lost: " + detail
		}
		// Everything in the sandbox was killed. Whether the process had just ended by itself is unknown.
		exit.Exit = api.Exit{Code: 128 + 9, Signal: "SIGKILL", OOM: x.oom.struck(ctx)}
		return exit, ""
	}
	exit.Exit = *rec.Exit
	if u := rec.Usage; u != nil { // a daemon may have come later
		if end := rec.StartedAt.Add(time.Duration(u.WallMS * float64(time.Millisecond))); end.Before(exit.EndedAt) {
			exit.EndedAt = end
		}
	}
	switch e := exit.Exit; {
	case e.OOM && e.Signal == "SIGKILL":
		return exit, "out of memory: the kernel killed its main process"
	case e.Signal != "":
		return exit, "its main process was ended by " + e.Signal
	default:
		return exit, "its main process exited with " + strconv.Itoa(e.Code)
	}
}

// AwaitReport waits until the record of an ended sandbox has the exit of its main process, if it
// had one.
func (r *Registry) AwaitReport(ctx context.Context, id string) error {
	r.mu.Lock()
	x := r.mains[id].x
	r.mu.Unlock()
	if x == nil {
		return nil
	}
	if rec, err := r.opts.Supervisor.Get(id); err != nil || rec.State == api.StateRunning || rec.State == api.StatePaused {
		return nil //nolint:nilerr // it is deleted, or runs again: there is nothing to wait for
	}
	select {
	case <-x.main.reported:
		return nil
	case <-r.opts.Work.Ctx.Done():
		return class.ErrStopping
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// AwaitReaders waits until the clients that hold the output of a sandbox's main process have read
// it, for as long as they read and no longer than a step.
func (r *Registry) AwaitReaders(id string) {
	r.mu.Lock()
	x := r.mains[id].x
	r.mu.Unlock()
	if x == nil {
		return
	}
	timer := time.NewTimer(stepTimeout)
	defer timer.Stop()
	for changed := x.log.Held(); changed != nil; changed = x.log.Held() {
		select {
		case <-changed:
		case <-timer.C:
			return
		case <-r.opts.Work.Ctx.Done():
			return
		}
	}
}
