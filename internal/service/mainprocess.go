package service

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/guest/host"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/mainlog"
	"github.com/sandboxd/sandboxd/runtime"
)

// The main process of a sandbox is a detached exec (execs.go) with three additions:
//
//   - The daemon starts it with the sandbox: after a creation, a claim, a start and a rollback, for
//     each fork, and where a killed daemon did not. A creation that cannot start it leaves nothing.
//   - Its output is kept in the sandbox's log (package mainlog) rather than in memory only. A
//     goroutine follows it like a client. The memory drops nothing before it is written, so that
//     the process waits for the disk. Output that the disk refuses is missing in the log; the
//     process goes on.
//   - When it ends, the sandbox is killed and its record has the exit. Both happen before the
//     launcher drops the exec, so that the next daemon does them again after a crash.

// mainRing is the number of bytes of a main process's output in memory.
const mainRing = 256 << 10

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

// over returns a channel that is closed when the exec has ended; for a main process, when its end
// is reported.
func (x *Detached) over() <-chan struct{} {
	if x.main != nil {
		return x.main.reported
	}
	return x.done
}

// follow collects a detached exec until it ends, or the daemon does.
func (s *core) follow(x *Detached) bool {
	if x.main != nil {
		s.keepLog(x)
	}
	return s.work.Go(x.collect)
}

// create makes a sandbox and starts its main process, if it has one.
func (s *core) create(ctx context.Context, r runtime.Request) (api.Sandbox, error) {
	if err := s.checkMounts(ctx, &r); err != nil {
		return api.Sandbox{}, err
	}
	release, err := s.prepareVolumes(ctx, &r)
	if err != nil {
		return api.Sandbox{}, err
	}
	// When Create returns, the supervisor has the sandbox, or there is none.
	defer func() { release(ctx) }()
	ports, err := s.networks.Publish(ctx, r.Ports)
	if err != nil {
		return api.Sandbox{}, err
	}
	inspection, err := s.networks.Inspect(r.Tenant, r.Network)
	if err != nil {
		return api.Sandbox{}, errors.Join(err, ports.Close())
	}
	bundle, secrets := inspection.Env()
	r.Ports, r.Trust, r.Env = ports.Mappings(), inspection.Trust(), mergeEnv(bundle, r.Env, secrets)
	var prepared string
	if inspection != nil && r.Network.HasGateway() {
		r.Prepare = func(id string) error { // a sandbox that shares its network needs it as soon as this one runs
			prepared = id
			return s.networks.Store(id, inspection)
		}
	}
	rec, err := s.supervisor.Create(ctx, r)
	if err != nil {
		if prepared != "" {
			err = errors.Join(err, s.networks.Forget(prepared))
		}
		return api.Sandbox{}, errors.Join(err, ports.Close())
	}
	if r.Stopped { // the start binds the ports
		if err := ports.Close(); err != nil {
			s.log.Warn("a port of a sandbox that is not started stays bound", "id", rec.ID, "error", err)
		}
		return rec.Shown(), nil
	}
	if err = s.connect(ctx, &rec, ports); err == nil {
		err = s.startMain(ctx, &rec)
	}
	if err != nil {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
		defer cancel()
		derr := s.supervisor.Delete(undo, rec.ID)
		if errors.Is(derr, runtime.ErrNotFound) {
			derr = nil // deleted concurrently
		}
		s.forgetSandbox(undo, rec.ID)
		return api.Sandbox{}, errors.Join(err, derr)
	}
	s.removeAtEnd(&rec)   //nolint:contextcheck // the removal outlives the request
	s.watchHealth(rec.ID) //nolint:contextcheck // as the checks do
	return rec.Shown(), nil
}

// wantsMain reports whether a running sandbox should have a main process.
func wantsMain(rec *runtime.Record) bool {
	return len(rec.Command) > 0 && !rec.Idle && rec.State == api.StateRunning
}

// startMain starts the main process of a sandbox that has just begun to run, unless it has none or
// a concurrent call does.
func (s *core) startMain(ctx context.Context, rec *runtime.Record) error {
	if !wantsMain(rec) {
		return nil
	}
	lease, err := s.supervisor.Begin(rec.ID)
	if err != nil {
		return err
	}
	defer lease.End()
	s.execs.mu.Lock()
	mine := s.execs.mains[rec.ID].gone != lease.Gone
	if mine {
		s.execs.mains[rec.ID] = mainOf{gone: lease.Gone}
	}
	s.execs.mu.Unlock()
	if !mine {
		return nil
	}
	req := api.ExecRequest{Argv: rec.Command, TTY: rec.TTY, StdinOpen: rec.StdinOpen, Detach: true, CwdCreate: true, OutputLimit: mainRing}
	if err = validateExec(&req); err == nil {
		_, err = s.detach(ctx, rec, req, detachAs{main: newMainProcess(lease.Record.Life)})
	}
	if err != nil {
		return fmt.Errorf("start the main process of sandbox %s: %w", rec.Name, err)
	}
	return nil
}

// startAgain is connect and startMain for a sandbox that existed before. If it fails, the sandbox
// is stopped. A sandbox that does not run, as after a rollback of a stopped one, needs nothing.
func (s *core) startAgain(ctx context.Context, rec *runtime.Record) (err error) {
	defer func() { //nolint:contextcheck // the checks outlive the request
		if err == nil {
			s.watchHealth(rec.ID)
		}
	}()
	if !wantsMain(rec) && (rec.State != api.StateRunning || !rec.HasGateway()) {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	lease, err := s.supervisor.Rejoin(rec.ID)
	if err != nil {
		return err // it was stopped or deleted concurrently
	}
	defer lease.End()
	if err := s.networks.Connect(ctx, lease, nil); err != nil {
		return errors.Join(err, lease.Kill(ctx, "it could not be given its network: "+err.Error()))
	}
	err = s.startMain(ctx, rec)
	if err == nil || errors.Is(err, class.ErrGone) || errors.Is(err, class.ErrStopping) { // the next daemon starts it
		return err
	}
	return errors.Join(err, lease.Kill(ctx, "its main process could not be started: "+err.Error()))
}

// startMissing starts main processes that a killed daemon did not start, and the sandboxes that
// their restart policies want.
func (s *core) startMissing() {
	for _, rec := range s.supervisor.List(runtime.Filter{AllTenants: true}) {
		s.removeAtEnd(&rec)
		s.watchHealth(rec.ID)
		if rec.State == api.StateStopped || rec.State == api.StateLost {
			s.considerRestart(rec.ID, true)
		}
		if !wantsMain(&rec) {
			continue
		}
		s.work.Go(func() {
			if err := s.startAgain(s.work.Context(), &rec); err != nil && !errors.Is(err, class.ErrStopping) {
				s.log.Warn("a main process that should run could not be started", "id", rec.ID, "error", err)
				s.considerRestart(rec.ID, false)
			}
		})
	}
}

// adoptMain makes an adopted execution the main process of its sandbox, and begins to keep its log.
func (s *core) adoptMain(x *Detached, life int) {
	if x.lease != nil {
		life = x.lease.Record.Life
	}
	x.main = newMainProcess(life)
	s.execs.mu.Lock()
	defer s.execs.mu.Unlock()
	if m := s.execs.mains[x.record.Sandbox]; x.lease != nil || m.x == nil || m.gone == nil && m.x.record.StartedAt.Before(x.record.StartedAt) {
		s.execs.mains[x.record.Sandbox] = mainOf{gone: x.gone(), x: x}
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
func (s *core) keepLog(x *Detached) {
	turn, done := s.logs.Of(x.record.Sandbox).Enqueue()
	x.log.Save(0)
	s.execs.mu.Lock()
	if m := s.execs.mains[x.record.Sandbox]; m.x == nil && x.lease != nil && m.gone == x.gone() {
		m.x = x
		s.execs.mains[x.record.Sandbox] = m
	}
	s.execs.mu.Unlock()
	write := func() {
		defer close(x.main.logged)
		defer done()
		select {
		case <-turn:
			s.writeLog(x)
		case <-s.work.Context().Done():
		}
	}
	if !s.work.Go(write) {
		done()
		close(x.main.logged)
	}
}

func (s *core) writeLog(x *Detached) {
	log := s.log.With("id", x.record.Sandbox, "exec", x.record.ID)
	defer func() {
		if s.work.Context().Err() == nil { // else the next daemon continues with the output that is still in memory
			x.log.Saved(1 << 62) // whatever has happened, the process does not wait for us when we are gone
		}
	}()
	w, err := s.logs.Of(x.record.Sandbox).NewWriter(x.main.life, x.record.StartedAt)
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
	err = x.attach(s.work.Context(), w.Next(), true, make([]byte, mainlog.Piece), func(e api.ExecEvent) error {
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
	if _, lost := errors.AsType[*Failure](err); err != nil && !lost && s.work.Context().Err() == nil {
		log.Error("the log of a main process breaks off", "error", err)
	}
}

// mainEnded ends the sandbox of a main process that has ended.
func (s *core) mainEnded(ctx context.Context, x *Detached) {
	defer close(x.main.reported)
	<-x.main.logged
	rec := x.Record()
	exit, reason := s.exitOfMain(ctx, x, &rec)
	if err := s.supervisor.MainEnded(context.WithoutCancel(ctx), rec.Sandbox, x.main.life, exit, reason); err != nil {
		s.log.Error("a sandbox whose main process has ended", "id", rec.Sandbox, "error", err)
	}
	s.considerRestart(rec.Sandbox, false)
}

// exitOfMain returns the exit of a main process and the reason for the sandbox's record.
func (s *core) exitOfMain(ctx context.Context, x *Detached, rec *ExecRecord) (*api.SandboxExit, string) {
	exit := &api.SandboxExit{StartedAt: rec.StartedAt, EndedAt: rec.EndedAt, Usage: rec.Usage}
	if rec.Exit == nil {
		now, err := s.supervisor.Get(rec.Sandbox)
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

// awaitReport waits until the record of an ended sandbox has the exit of its main process, if it
// had one.
func (s *core) awaitReport(ctx context.Context, id string) error {
	s.execs.mu.Lock()
	x := s.execs.mains[id].x
	s.execs.mu.Unlock()
	if x == nil {
		return nil
	}
	if rec, err := s.supervisor.Get(id); err != nil || rec.State == api.StateRunning || rec.State == api.StatePaused {
		return nil //nolint:nilerr // it is deleted, or runs again: there is nothing to wait for
	}
	select {
	case <-x.main.reported:
		return nil
	case <-s.work.Context().Done():
		return class.ErrStopping
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// sweepLogs removes logs of sandboxes that no longer exist.
func (s *core) sweepLogs() {
	err := s.logs.Sweep(func(id string) bool {
		rec, err := s.supervisor.Get(id)
		return err == nil && rec.ID == id
	})
	if err != nil {
		s.log.Error("logs of sandboxes that are no more could not be removed", "error", err)
	}
}

// WaitSandbox returns when the sandbox with this id or name has ended. Of one that was removed at
// its end the id is enough.
func (s *API) WaitSandbox(ctx context.Context, ref string) (api.Sandbox, error) {
	rec, err := s.lookup(ref)
	if errors.Is(err, runtime.ErrNotFound) {
		if end, ok := s.finals.find(s.caller.Tenant, ref); ok {
			return end, nil
		}
	}
	if err != nil {
		return api.Sandbox{}, err
	}
	ended, err := s.awaitEnd(ctx, rec.ID)
	if errors.Is(err, runtime.ErrNotFound) {
		if end, ok := s.finals.find(s.caller.Tenant, rec.ID); ok {
			return end, nil
		}
		err = class.Mark(class.ErrGone, fmt.Errorf("sandbox %s was deleted", rec.Name))
	}
	return ended.Shown(), err
}

// LogReader reads the log of a sandbox: see [API.Log].
type LogReader = mainlog.Reader

// LogOptions select entries of a log.
type LogOptions = mainlog.ReadOptions

// Log returns a reader of the output of main processes of the sandbox with this id or name.
func (s *API) Log(ctx context.Context, ref string, opts LogOptions) (*LogReader, error) {
	rec, err := s.lookup(ref)
	if err != nil {
		return nil, err
	}
	if len(rec.Command) == 0 {
		return nil, class.Mark(runtime.ErrState, fmt.Errorf("sandbox %s has no main process, whose output a log could have: it was created without a command", rec.Name))
	}
	return s.logs.Of(rec.ID).NewReader(ctx, opts)
}
