package exec

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/guest/host"
	"github.com/sandboxd/sandboxd/internal/memfd"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/execlog"
	"github.com/sandboxd/sandboxd/runtime"
)

// Detached is an exec that goes on without a client. It belongs to the [Registry] that lists it.
type Detached struct {
	*program

	main *mainProcess // nil unless it is one
	log  *execlog.Log
	kept int64 // bytes of memory that it may take

	keeping  sync.Mutex // held while descriptors are stored; before mu
	disposed bool       // its descriptors are closed, and not stored any more; guarded by keeping
	noStdin  bool       // stdin was closed, and is not to be kept for the next daemon

	expiry *time.Timer // guarded by mu
}

// Record returns the record of the exec at this moment.
func (x *Detached) Record() Record {
	x.mu.Lock()
	defer x.mu.Unlock()
	rec := x.record
	rec.StdoutBytes, rec.StderrBytes, rec.Dropped = x.log.Counts()
	return rec
}

// As says which exec [Registry.Detach] starts; zero means one of a client.
type As struct {
	// Context makes the exec the process of a context, before its output is collected. Such an exec is
	// no use of its sandbox. Default: it is of no context.
	Context func(x *Detached) error
	// Running returns a program that was started ahead. Default: [Options.Launch] starts one.
	Running func(lease *runtime.Lease) (*host.Exec, error)

	id   string       // of a prepared exec
	main *mainProcess // of its sandbox
}

// Detach starts the program of a valid request, which goes on without the caller.
func (r *Registry) Detach(ctx context.Context, rec *runtime.Record, req api.ExecRequest, as As) (_ Record, err error) {
	if err := r.Adopt(ctx); err != nil {
		return Record{}, err
	}
	limit := cmp.Or(req.OutputLimit, DefaultOutputLimit)
	size := limit + int64(len(req.Stdin)) // which is in memory for as long as the program has it open
	log, undo, err := r.newLog(ctx, rec, limit, size, req.TTY)
	if err != nil {
		return Record{}, err
	}
	defer func() {
		if undo != nil {
			undo()
		}
	}()
	how := host.ExecRequest{Keep: true, NoStdin: !req.StdinOpen && len(req.Stdin) == 0 && !req.TTY}
	if !req.StdinOpen && !req.TTY && len(req.Stdin) > 0 {
		// A file rather than a pipe: it needs no writer after the end of this daemon.
		if how.StdinFile, err = stdinFile(req.Stdin); err != nil {
			return Record{}, err
		}
		defer how.StdinFile.Close() // only written
	}
	begin := r.opts.Supervisor.Begin
	if as.Context != nil {
		begin = r.opts.Supervisor.Probe // a context that waits is no use of its sandbox; its runs are
	} else {
		r.opts.Used(rec.ID)
	}
	lease, err := begin(rec.ID)
	if err != nil {
		return Record{}, err
	}
	defer r.starting(rec.ID)()
	p, err := r.start(ctx, lease, req, how, as.Running)
	if err != nil {
		return Record{}, err
	}
	x := &Detached{program: p, log: log, kept: size, main: as.main}
	x.record.Main = as.main != nil
	x.record.ID = cmp.Or(as.id, x.record.ID)
	if as.Context != nil {
		err = as.Context(x)
	}
	if err == nil {
		err = x.saveRecord()
	}
	if err == nil {
		err = x.storeDescriptors(ctx)
	}
	if err != nil {
		x.abandon(ctx) // no client knows of the exec
		x.lease.End()
		return Record{}, err
	}
	if len(req.Stdin) > 0 && how.StdinFile == nil {
		x.input <- struct{}{} // comes before any other input
		x.stdin.Go(func() {
			defer func() { <-x.input }()
			_, _ = x.guest.Write(req.Stdin) // a program that does not read it is no error
		})
	}
	x.req.Stdin = nil
	r.register(x)
	r.publishStarted(p, rec)
	undo = nil
	r.deliver(x)
	if !r.follow(x) {
		close(x.done)
		return Record{}, class.ErrStopping // and the next daemon has it
	}
	return x.Record(), nil
}

// newLog makes room for a detached exec of this size, and its log. The caller lists the exec, or
// calls undo.
func (r *Registry) newLog(ctx context.Context, rec *runtime.Record, limit, size int64, tty bool) (log *execlog.Log, undo func(), err error) {
	room, err := r.reserve(rec.ID, size, r.quotaOf(rec.Tenant))
	if err != nil {
		return nil, nil, err
	}
	for _, x := range room {
		r.Forget(ctx, x)
	}
	if log, err = execlog.New(limit, tty); err != nil {
		r.release(rec.ID, size)
		return nil, nil, err
	}
	return log, func() {
		log.Close()
		r.release(rec.ID, size)
	}, nil
}

// abandon kills an exec that is not listed. Closing the connection alone kills nothing of which the
// launcher has a copy.
func (x *Detached) abandon(ctx context.Context) {
	_ = x.guest.Kill()
	_ = x.guest.Close()                                     // always nil
	x.r.dropDescriptors(ctx, x.record.Sandbox, x.record.ID) // they may be stored, and the answer lost
}

// stdinFile holds the whole stdin of a program, which reads it and can do nothing else with it.
func stdinFile(data []byte) (_ *os.File, err error) {
	fd, err := unix.MemfdCreate("stdin", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("make stdin: %w", err)
	}
	f := os.NewFile(uintptr(fd), "stdin")
	defer func() {
		if err != nil {
			_ = f.Close() // of no use
		}
	}()
	if _, err := f.WriteAt(data, 0); err != nil { // its offset is the program's, and stays 0
		return nil, fmt.Errorf("write stdin: %w", err)
	}
	if err := f.Chmod(0o444); err != nil { // to be opened again as /dev/stdin
		return nil, fmt.Errorf("make stdin: %w", err)
	}
	if err := memfd.Seal(f); err != nil {
		return nil, fmt.Errorf("seal stdin: %w", err)
	}
	return f, nil
}

// saveRecord writes the state of a running exec for the next daemon.
func (x *Detached) saveRecord() error {
	rest := left{Record: x.record, Request: x.req, Init: x.lease.Record.PID, Kept: x.kept, Main: x.main != nil}
	rest.Request.Argv, rest.Request.Env, rest.Request.Stdin = nil, nil, nil
	if x.main != nil {
		rest.Life = x.main.life
	}
	if x.oom.done != nil && x.oom.err == nil {
		rest.OOM = &x.oom.before
	}
	return x.log.Write(execlog.Record, rest)
}

// left is the state of an exec for the next daemon, besides its record.
type left struct {
	Record  Record
	Request api.ExecRequest // without stdin, argv and env
	Kept    int64
	Main    bool `json:",omitempty"` // it is a main process
	Life    int  `json:",omitempty"` // then: of the sandbox
	Init    int  // the host's pid of the sandbox's init
	OOM     *int // how often the kernel had killed for want of memory before; nil if that is not known
}

// storeDescriptors stores the descriptors that another daemon needs: always state and output; of a
// running exec also the connection, and stdout, stderr and stdin, or the terminal and the relay.
func (x *Detached) storeDescriptors(ctx context.Context) error {
	if x.r.opts.Descriptors == nil {
		return nil
	}
	x.keeping.Lock() // an older state never overwrites a newer one
	defer x.keeping.Unlock()
	if x.disposed {
		return nil // and its files may be another's by now
	}
	files := x.log.Files()
	if !x.Ended() {
		k := x.guest.Kept()
		files = append(files, k.Conn, k.Stdout)
		if x.noStdin {
			k.Stdin = nil
		}
		r, w := x.log.Relay()
		for _, f := range []*os.File{r, w, k.Stderr, k.Stdin} {
			if f != nil {
				files = append(files, f)
			}
		}
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stepTimeout)
	defer cancel()
	err := x.r.opts.Descriptors.StoreDescriptors(ctx, runtime.DescriptorSet{Sandbox: x.record.Sandbox, Name: x.record.ID, Files: files})
	if err != nil {
		return fmt.Errorf("keep the exec for the next daemon: %w", err)
	}
	return nil
}

// dropDescriptors drops the descriptors of an exec, if there are any.
func (r *Registry) dropDescriptors(ctx context.Context, sandbox, id string) {
	if r.opts.Descriptors == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stepTimeout)
	defer cancel()
	if err := r.opts.Descriptors.DropDescriptors(ctx, sandbox, id); err != nil {
		r.opts.Log.Warn("the launcher still keeps an exec", "id", sandbox, "exec", id, "error", err)
	}
}

// follow collects a detached exec until it ends, or the daemon does.
func (r *Registry) follow(x *Detached) bool {
	if x.main != nil {
		r.keepLog(x)
	}
	return r.opts.Work.Go(x.collect)
}

// collect takes a detached program's output until its exit and records that. If the daemon stops
// before, everything is left to the next one.
func (x *Detached) collect() {
	ctx := x.r.opts.Work.Ctx
	stop := context.AfterFunc(ctx, x.log.Hand) // the output may wait for a log or a reader that has stopped
	defer stop()
	if x.lease != nil { // how a sandbox has ended does not wait for a reader that has stopped
		defer x.lease.AfterGone(func() { time.AfterFunc(stepTimeout, x.log.ReleaseHolds) })()
	}
	exit, err := x.guest.Spool(ctx, x.log)
	rec := x.record
	switch {
	case errors.Is(err, execlog.ErrHanded):
		x.keeping.Lock()
		x.disposed = true   // the next daemon's
		_ = x.guest.Close() // kills no program whose descriptors are stored
		x.keeping.Unlock()
		x.stdin.Wait()
		if x.lease != nil {
			x.lease.End()
		}
		return
	case err == nil:
		e, u := exitOf(exit, x.oom.struck(ctx)), usageOf(exit)
		rec.State, rec.Exit, rec.Usage = api.ExecExited, &e, &u
	case x.lease == nil && errors.Is(err, host.ErrLost):
		rec.State, rec.Failure = api.ExecLost, &Failure{Class: failedGone, Message: "the sandbox ended while no daemon was running"}
	case errors.Is(err, host.ErrLost):
		rec.State, rec.Failure = api.ExecLost, failureOf(x.r.guests.Lost(ctx, x.lease, err))
	default:
		_ = x.guest.Kill() // closing the connection, below, does so too
		rec.State, rec.Failure = api.ExecLost, failureOf(fmt.Errorf("keep the exec's output: %w", err))
	}
	rec.EndedAt = time.Now().UTC()
	x.conclude(rec)
	why := ""
	if rec.Failure != nil {
		why = rec.Failure.Message
	}
	x.r.publishEnded(x.program, rec.Exit, why)
	// A storeDescriptors under way has the descriptors still; a later one sees that the exec has
	// ended.
	x.keeping.Lock()
	_ = x.guest.Close() // always nil
	x.log.CloseRelay()
	x.keeping.Unlock()
	x.stdin.Wait()
	if x.lease != nil {
		x.lease.End()
	}
	x.finish(ctx)
}

// conclude sets the end of the execution. The record is written for the next daemon before any
// observer sees the end.
func (x *Detached) conclude(rec Record) {
	if err := x.log.Write(execlog.End, rec); err != nil {
		x.r.opts.Log.Warn("how an exec ended is not kept for the next daemon", "id", rec.Sandbox, "exec", rec.ID, "error", err)
	}
	x.log.Finish() // readers of all output wait for done
	x.mu.Lock()
	defer x.mu.Unlock()
	// Field by field: the others never change, and are read without mu.
	x.record.State, x.record.EndedAt, x.record.Exit, x.record.Usage, x.record.Failure = rec.State, rec.EndedAt, rec.Exit, rec.Usage, rec.Failure
	close(x.done) // under mu, so that no observer sees a running record after done
}

// finish reports the end of a main process, and retires the exec.
func (x *Detached) finish(ctx context.Context) {
	if x.main != nil {
		x.r.mainEnded(ctx, x)
	}
	x.retire(ctx)
}

// retire releases resources of an ended exec and schedules its removal.
func (x *Detached) retire(ctx context.Context) {
	r := x.r
	err := x.storeDescriptors(ctx)
	if !r.has(x) {
		r.dropDescriptors(ctx, x.record.Sandbox, x.record.ID) // it was forgotten concurrently
		return
	}
	if err != nil && !errors.Is(err, runtime.ErrUnavailable) {
		r.opts.Log.Warn("an exec that has ended is not kept for the next daemon", "id", x.record.Sandbox, "exec", x.record.ID, "error", err)
	}
	if _, err := r.opts.Supervisor.Get(x.record.Sandbox); errors.Is(err, runtime.ErrNotFound) {
		r.Forget(ctx, x)
		if x.main != nil { // begun after the deletion of the sandbox removed the log
			r.removeLog(x.record.Sandbox)
		}
		return
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if !r.has(x) {
		return // forgotten concurrently; from here on forget stops the timer
	}
	x.expiry = time.AfterFunc(time.Until(x.record.EndedAt.Add(keepFinished)), func() {
		r.opts.Work.Go(func() { r.Forget(ctx, x) })
	})
}

// dispose closes the descriptors of an exec that no goroutine uses.
func (x *Detached) dispose() {
	x.mu.Lock()
	if x.expiry != nil {
		x.expiry.Stop()
	}
	x.mu.Unlock()
	if x.main != nil {
		<-x.main.logged
	}
	x.keeping.Lock()
	defer x.keeping.Unlock()
	x.disposed = true
	x.log.Close()
}

// Forget removes an exec that has ended.
func (r *Registry) Forget(ctx context.Context, x *Detached) {
	if !r.unregister(x) {
		return
	}
	x.dispose() // first: storing that is under way comes before the drop, and there is none behind it
	r.dropDescriptors(ctx, x.record.Sandbox, x.record.ID)
}

// ForgetSandbox removes the execs of a deleted sandbox, whether or not the client is still there: a
// collector that looked before the deletion keeps its exec for an hour. It waits for the
// collectors, which also see the end of the sandbox.
func (r *Registry) ForgetSandbox(ctx context.Context, id string) {
	r.mu.Lock()
	all := slices.Collect(maps.Values(r.of[id]))
	delete(r.mains, id)
	r.mu.Unlock()
	r.forgetUpcoming(id)
	defer r.removeLog(id)
	for _, x := range all {
		x, ok := x.(*Detached)
		if !ok {
			continue // its own request ends it
		}
		x.log.ReleaseHolds()
		select {
		case <-x.Over():
			r.Forget(ctx, x)
		case <-r.opts.Work.Ctx.Done(): // the daemon stops, and the next one finds no such sandbox
			return
		case <-ctx.Done():
			r.opts.Log.Warn("an exec of a deleted sandbox has not ended", "id", id, "exec", x.record.ID)
			return
		}
	}
}

func (r *Registry) removeLog(sandbox string) {
	if err := r.opts.Logs.Remove(sandbox); err != nil {
		r.opts.Log.Error("the log of a deleted sandbox is left until the next start", "id", sandbox, "error", err)
	}
}

// Delete ends an exec, with everything that it has started, if it runs, and forgets it.
func (r *Registry) Delete(ctx context.Context, rec *runtime.Record, id string) error {
	if deleted, err := r.deletePrepared(rec.ID, id); deleted || err != nil {
		return err
	}
	x, err := r.Find(rec, id)
	if err != nil {
		return err
	}
	p := x.common()
	d, isDetached := x.(*Detached)
	if isDetached {
		d.log.ReleaseHolds()
	}
	if err := p.Kill(); err != nil && p.lease != nil {
		return r.guests.Lost(ctx, p.lease, err)
	}
	select {
	case <-x.Over():
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if isDetached { // its own request removes a foreground one
		r.Forget(ctx, d)
	}
	return nil
}

// Over returns a channel that is closed when the exec has ended; for a main process, when its end
// is reported.
func (x *Detached) Over() <-chan struct{} {
	if x.main != nil {
		return x.main.reported
	}
	return x.done
}

// Input writes to stdin as that of a program does. With end, the next daemon does not get stdin.
func (x *Detached) Input(ctx context.Context, r io.Reader, end bool) error {
	if err := x.program.Input(ctx, r, end); err != nil || !end || x.req.TTY {
		return err
	}
	return x.endStdin(ctx)
}

// endStdin makes the launcher drop its copy of a closed stdin: the program sees the end when no
// other copy is open.
func (x *Detached) endStdin(ctx context.Context) error {
	x.keeping.Lock()
	x.noStdin = true
	x.keeping.Unlock()
	err := x.storeDescriptors(ctx)
	if !x.r.has(x) {
		x.r.dropDescriptors(ctx, x.record.Sandbox, x.record.ID) // it was forgotten concurrently
	}
	if err != nil && !x.Ended() {
		return err
	}
	return nil
}
