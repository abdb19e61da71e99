package exec

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/internal/guest/host"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/execlog"
	"github.com/sandboxd/sandboxd/internal/service/guests"
	"github.com/sandboxd/sandboxd/runtime"
)

// Adopt adopts the execs of the last daemon; later calls return at once. No descriptors may be
// stored before, or they would be taken for an exec of the last daemon.
func (r *Registry) Adopt(ctx context.Context) error {
	if r.adopted.Load() || r.opts.Descriptors == nil {
		return nil
	}
	select {
	case r.adopting <- struct{}{}:
		defer func() { <-r.adopting }()
	case <-ctx.Done():
		return fmt.Errorf("wait for the execs that the daemon before has left: %w", context.Cause(ctx))
	}
	if r.adopted.Load() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	all, err := r.opts.Descriptors.StoredDescriptors(ctx)
	if err != nil {
		return fmt.Errorf("have the execs that the daemon before has left: %w", err)
	}
	// The log of a sandbox has its main processes in the order of their lives; the launcher keeps no
	// order.
	lives := make(map[string]int, len(all))
	for _, d := range all {
		rest, _ := restOf(d) // its adoption reports the error
		lives[d.Sandbox+d.Name] = rest.Life
	}
	slices.SortFunc(all, func(a, b runtime.DescriptorSet) int {
		return cmp.Compare(lives[a.Sandbox+a.Name], lives[b.Sandbox+b.Name])
	})
	for _, d := range all {
		if err := r.adoptExec(d); err != nil {
			level := slog.LevelWarn
			if errors.Is(err, ErrUnfinished) {
				level = slog.LevelInfo
			}
			r.opts.Log.Log(ctx, level, "detached exec is not adopted", "id", d.Sandbox, "exec", d.Name, "error", err)
			r.dropDescriptors(ctx, d.Sandbox, d.Name)
		}
	}
	r.opts.Adopted()
	r.adopted.Store(true)
	return nil
}

// restOf returns the state of an exec that the last daemon left.
func restOf(d runtime.DescriptorSet) (rest left, err error) {
	if len(d.Files) < 2 {
		return rest, fmt.Errorf("%d descriptors", len(d.Files))
	}
	ok, err := execlog.ReadDocument(d.Files[1], execlog.Record, &rest)
	switch {
	case err != nil:
	case !ok:
		err = errors.New("it has no record")
	case rest.Record.ID != d.Name || rest.Record.Sandbox != d.Sandbox:
		err = errors.New("its record is another's")
	}
	return rest, err
}

// adoptExec takes over the files of a set.
func (r *Registry) adoptExec(d runtime.DescriptorSet) (err error) {
	files := d.Files
	defer func() { closeFiles(files) }()
	if _, err := r.opts.Supervisor.Get(d.Sandbox); err != nil {
		return err
	}
	rest, err := restOf(d)
	if err != nil {
		return err
	}
	rest.Record.Main = rest.Main
	p := &program{PID: rest.Record.PID, r: r, req: rest.Request, input: make(chan struct{}, 1), done: make(chan struct{}), record: rest.Record}
	x := &Detached{program: p, kept: rest.Kept}
	x.oom = &oomWatch{r: r, id: d.Sandbox}
	if rest.OOM != nil {
		x.oom.before, x.oom.done = *rest.OOM, make(chan struct{})
		close(x.oom.done)
	}
	if x.log, err = execlog.Adopt(files[0], files[1], cmp.Or(rest.Request.OutputLimit, DefaultOutputLimit)); err != nil {
		return err
	}
	var end Record
	ended, err := x.log.Document(execlog.End, &end)
	if err != nil {
		return err
	}
	if !ended && len(files) < 4 {
		return fmt.Errorf("it runs, with %d descriptors", len(files))
	}
	if ended {
		end.convert()
		files = files[2:] // the others are closed: the daemon before was about to
		if rest.Main {
			// The daemon before perhaps did not come to end the sandbox with it.
			if lease, err := r.opts.Supervisor.Rejoin(d.Sandbox); err == nil {
				defer lease.End()
				if lease.Record.PID == rest.Init {
					x.lease = lease
				}
			}
			r.adoptMain(x, rest.Life)
			r.keepLog(x)
		}
		if err := r.opts.Adopt(x); err != nil {
			return err
		}
		r.adoptRecord(x)
		x.conclude(end)
		r.opts.Work.Go(func() { x.finish(r.opts.Work.Ctx) })
		return nil
	}
	k := host.Kept{Conn: files[2], Stdout: files[3]}
	more := files[4:]
	switch {
	case x.req.TTY && len(more) == 2:
		x.log.AdoptRelay(more[0], more[1])
	case !x.req.TTY && len(more) > 0 && len(more) <= 2:
		k.Stderr = more[0]
		if len(more) == 2 {
			k.Stdin = more[1]
		}
	default:
		return fmt.Errorf("it runs, with %d descriptors", len(files))
	}
	client := host.NewClient("") // of a sandbox that has ended nothing is asked
	rejoin := r.opts.Supervisor.Rejoin
	if isContext(x.log) {
		rejoin = r.opts.Supervisor.Observe // see Detach
	}
	switch lease, err := rejoin(d.Sandbox); {
	case err != nil:
	case lease.Record.PID != rest.Init:
		lease.End() // it has been started again, and its new init is not to blame for what became of the old one's execs
	default:
		x.lease = lease
		client = guests.Of(lease)
	}
	files = nil
	timeout := time.Duration(x.req.Timeout * float64(time.Second))
	if x.guest, err = client.Adopt(k, host.ExecRequest{TTY: x.req.TTY, Timeout: timeout}, x.PID, x.record.StartedAt); err == nil {
		if err = r.opts.Adopt(x); err != nil {
			_ = x.guest.Kill()  // closing the connection alone kills nothing of which the launcher has a copy
			_ = x.guest.Close() // always nil
		}
	}
	if err != nil {
		x.log.Close()
		if x.lease != nil {
			x.lease.End()
		}
		return err
	}
	if rest.Main {
		r.adoptMain(x, rest.Life)
	}
	r.adoptRecord(x)
	if !r.follow(x) {
		return class.ErrStopping
	}
	r.opts.Log.Info("exec adopted", "id", d.Sandbox, "exec", d.Name)
	return nil
}

// adoptRecord lists an adopted exec.
func (r *Registry) adoptRecord(x *Detached) {
	r.mu.Lock()
	r.add(x.record.Sandbox, 1, x.kept)
	r.mu.Unlock()
	r.register(x)
}

func closeFiles(files []*os.File) {
	for _, f := range files {
		_ = f.Close() // never written
	}
}

// ErrUnfinished is the error of [Options.Adopt] for an exec whose start the last daemon has not
// answered.
var ErrUnfinished = errors.New("it is a context that was not ready, or was being restarted, or a spare one")

// isContext reports whether an adopted exec is the process of a context.
func isContext(l *execlog.Log) bool {
	var doc json.RawMessage
	ok, err := l.Document(execlog.Context, &doc)
	return ok && err == nil
}
