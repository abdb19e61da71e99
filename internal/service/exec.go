package service

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/guest/host"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/guests"
	"github.com/sandboxd/sandboxd/internal/service/output"
	"github.com/sandboxd/sandboxd/runtime"
)

// Exec is the interface that foreground execs, [Execution], and detached ones, [Detached], share.
type Exec interface {
	ID() string
	Record() ExecRecord
	Signal(req api.ExecSignal) error
	Resize(rows, cols uint16) error
	Input(ctx context.Context, r io.Reader, end bool) error
	common() *program
	over() <-chan struct{}
}

// program is the part that execs of both kinds share.
type program struct {
	PID int // inside the sandbox

	s     *core
	req   api.ExecRequest
	lease *runtime.Lease // nil of an adopted one whose sandbox has ended
	guest *host.Exec     // nil of an adopted one that has ended
	oom   *oomWatch
	stdin sync.WaitGroup
	input chan struct{} // semaphore of one that serializes writes to stdin
	done  chan struct{} // closed when it has ended and its record says how

	mu     sync.Mutex
	record ExecRecord // without counts of output; of its fields only those change that say how it ended
}

// Execution is an exec that ends with its client. Stream, ExecBuffered and the like end it;
// otherwise Close does.
type Execution struct {
	*program

	close      sync.Once
	givesStdin bool      // the client gets the end of stdin
	published  sync.Once // of the event of its end
	wrote      [2]int64  // bytes of stdout and stderr; guarded by mu
}

// StartExec starts a program in the sandbox with this id or name and gives it the request's stdin,
// then end of file. Ctx bounds the start; what happens after it is bounded by the context given to
// Stream. The caller must Close the execution.
func (s *API) StartExec(ctx context.Context, ref string, req api.ExecRequest) (*Execution, error) {
	return s.startFed(ctx, ref, req, false)
}

// startFed is StartExec; with whole the start itself is not waited for.
func (s *API) startFed(ctx context.Context, ref string, req api.ExecRequest, whole bool) (*Execution, error) {
	none := len(req.Stdin) == 0 && !req.TTY // then there is nothing to feed, and no pipe needed
	x, err := s.start(ctx, ref, req, host.ExecRequest{NoStdin: none, Whole: whole && none})
	if err == nil && !none {
		x.stdin.Go(x.feed)
	}
	return x, err
}

// StartInteractive is StartExec for a caller that writes to stdin with Input after the request's
// stdin. One with a terminal can go on without the caller: see [Execution.Leave].
func (s *API) StartInteractive(ctx context.Context, ref string, req api.ExecRequest) (*Execution, error) {
	return s.start(ctx, ref, req, host.ExecRequest{Keep: req.TTY})
}

// StartPiped is StartExec for a caller that gives the ends of the program's pipes to its client:
// see [Execution.Ends]. With StdinOpen that is stdin's, too.
func (s *API) StartPiped(ctx context.Context, ref string, req api.ExecRequest) (*Execution, error) {
	switch {
	case req.TTY:
		return nil, class.Invalidf("tty: a program with a terminal has no pipes")
	case !req.StdinOpen:
		return s.StartExec(ctx, ref, req)
	case len(req.Stdin) > 0:
		return nil, class.Invalidf("stdin and stdin_open: the stdin of a program with pipes is one of them")
	}
	req.StdinOpen = false
	x, err := s.start(ctx, ref, req, host.ExecRequest{})
	if err == nil {
		x.givesStdin = true
	}
	return x, err
}

var errDetach = class.Invalidf("detach: only POST /v1/sandboxes/{id}/exec can do that")

// start starts a program in the sandbox with this id or name. Of r the caller sets how the program
// is connected.
func (s *API) start(ctx context.Context, ref string, req api.ExecRequest, r host.ExecRequest) (*Execution, error) {
	if err := validateExec(&req); err != nil {
		return nil, err
	}
	if req.Detach {
		return nil, errDetach
	}
	lease, err := s.begin(ref)
	if err != nil {
		return nil, err
	}
	defer s.execs.starting(lease.Record.ID)() // until it is listed
	p, err := s.startProgram(ctx, lease, req, r)
	if err != nil {
		return nil, err
	}
	x := &Execution{program: p}
	s.execs.register(x)
	s.publishExecStarted(p, &lease.Record)
	return x, nil
}

// startProgram starts the program of a valid request, for an exec of either kind, and takes over
// the lease. Of r the caller sets how the program is connected.
func (s *core) startProgram(ctx context.Context, lease *runtime.Lease, req api.ExecRequest, r host.ExecRequest) (_ *program, err error) {
	defer func() {
		if err != nil {
			lease.End()
		}
	}()
	ctx, cancel := guests.WithGone(ctx, lease)
	defer cancel()
	defer func() {
		if err != nil && errors.Is(err, guests.ErrEnded) {
			err = s.guests.Ended(lease)
		}
	}()
	rec := &lease.Record
	client := guests.Of(lease)
	if r, err = fullRequest(ctx, rec, &req, r, client); err != nil {
		return nil, err
	}
	spec := cmp.Or(req.User, rec.User)
	oom := s.watchOOM(ctx, rec)
	ge, err := client.Exec(ctx, r)
	if r.User != "" && refused(err, unix.EINVAL) {
		// An init of an earlier version, which has outlived its daemon, knows no users.
		var id identity
		if id, err = userOf(ctx, rec, req.User, client.Open); err == nil {
			r.User, r.NonRoot = "", false
			r.UID, r.GID, r.Groups = id.uid, id.gid, id.groups
			r.Env = execEnv(rec.ImageEnv, rec.Env, req.Env, id.home, req.TTY)
			ge, err = client.Exec(ctx, r)
		}
	}
	if err != nil {
		oom.wait()
		return nil, s.guests.Lost(ctx, lease, userError(rec, spec, execError(req.Argv[0], r.Cwd, err)))
	}
	oom.wait()
	return s.program(lease, req, ge, oom), nil
}

// fullRequest completes r, of which the caller sets how the program is connected.
func fullRequest(ctx context.Context, rec *runtime.Record, req *api.ExecRequest, r host.ExecRequest, client *host.Client) (host.ExecRequest, error) {
	var id identity
	var err error
	if spec := cmp.Or(req.User, rec.User); isBareRoot(spec) {
		id, err = userOf(ctx, rec, req.User, client.Open)
	} else {
		err = validateUser(spec)
		r.User, r.NonRoot = spec, rec.Enforced.NonRoot // init looks it up
	}
	if err != nil {
		return r, err
	}
	if r.Timeout, err = seconds("timeout", req.Timeout); err != nil {
		return r, err
	}
	r.Argv = req.Argv
	r.Env = execEnv(rec.ImageEnv, rec.Env, req.Env, id.home, req.TTY)
	// The sandbox's own directory is made, as an image's WORKDIR is by a build.
	r.Cwd, r.MakeCwd = cmp.Or(req.Cwd, rec.Cwd), req.CwdCreate || req.Cwd == ""
	r.UID, r.GID, r.Groups = id.uid, id.gid, id.groups
	r.TTY, r.Rows, r.Cols = req.TTY, cmp.Or(req.Rows, 24), cmp.Or(req.Cols, 80)
	r.Limits = limitsOf(rec.Rlimits, req.Rlimits)
	return r, nil
}

// program returns a program that has started.
func (s *core) program(lease *runtime.Lease, req api.ExecRequest, ge *host.Exec, oom *oomWatch) *program {
	rec := &lease.Record
	x := &program{PID: ge.PID, s: s, req: req, lease: lease, guest: ge, oom: oom, input: make(chan struct{}, 1), done: make(chan struct{})}
	x.record.Exec = api.Exec{
		ID: newExecID(), Sandbox: rec.ID, Argv: shortened(req.Argv), User: cmp.Or(req.User, rec.User), Cwd: cmp.Or(req.Cwd, rec.Cwd), TTY: req.TTY,
		Detached: req.Detach, StdinOpen: req.StdinOpen, Annotations: req.Annotations, PID: ge.PID, State: api.ExecRunning, StartedAt: time.Now().UTC(),
	}
	return x
}

// ID returns the exec's id.
func (x *program) ID() string { return x.record.ID }

func (x *program) common() *program { return x }

func (x *program) ended() bool { return closed(x.done) }

// over returns a channel that is closed when the program has ended.
func (x *program) over() <-chan struct{} { return x.done }

// closed reports whether a channel on which nothing is sent is closed.
func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// Record returns the record of the execution at this moment.
func (x *Execution) Record() ExecRecord {
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
		x.s.execs.unregister(x)
		x.published.Do(func() { x.s.publishExecEnded(x.program, nil, "its request ended before it") })
		x.lease.End()
		close(x.done)
	})
}

// Signal sends a signal, by its name with or without SIG. Signalling an exec that has ended is no
// error.
func (x *program) Signal(req api.ExecSignal) error {
	full := strings.ToUpper(req.Signal)
	if !strings.HasPrefix(full, "SIG") {
		full = "SIG" + full
	}
	sig := unix.SignalNum(full)
	to := host.ReachGroup
	switch {
	case sig == 0:
		return class.Invalidf("signal %q: no such signal", class.Clip(req.Signal))
	case req.All && req.Main:
		return class.Invalidf("all, main: one of the two at most")
	case req.All:
		to = host.ReachAll
	case req.Main:
		to = host.ReachMain
	}
	if x.ended() {
		return nil
	}
	if req.All && sig == unix.SIGKILL {
		return x.guest.Kill() // which lets nothing get away
	}
	return x.guest.Signal(sig, to)
}

// Resize sets the size of the program's terminal.
func (x *program) Resize(rows, cols uint16) error {
	if !x.req.TTY {
		return class.Invalidf("resize: the program has no terminal")
	}
	if x.ended() {
		return nil
	}
	return x.guest.Resize(rows, cols)
}

// closeStdin gives the program end of file. On a terminal that is the character which a person
// would type.
func (x *program) closeStdin() error {
	if x.req.TTY {
		_, err := x.guest.Write([]byte{eot})
		return err
	}
	return x.guest.Stdin.Close()
}

// eot is Ctrl-D, the VEOF of a new terminal. At the beginning of a line it means end of file.
const eot = 4

// feed writes the request's stdin, then end of file. A program that does not read it is no error.
func (x *Execution) feed() {
	if _, err := x.guest.Write(x.req.Stdin); err != nil {
		return // the program has closed its stdin or ended
	}
	if n := len(x.req.Stdin); x.req.TTY && n > 0 && x.req.Stdin[n-1] != '\n' {
		_, _ = x.guest.Write([]byte{eot}) // in the middle of a line the first one only ends that
	}
	_ = x.closeStdin() // as above
}

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
		return api.Exit{}, api.Usage{}, x.s.guests.Ended(x.lease)
	case err != nil:
		return api.Exit{}, api.Usage{}, x.s.guests.Lost(ctx, x.lease, err)
	}
	e := exitOf(exit, x.oom.struck(ctx))
	// Here, so that the event is there when the client reads the exit.
	x.published.Do(func() { x.s.publishExecEnded(x.program, &e, "") })
	return e, usageOf(exit), nil
}

func exitOf(e host.ExecExit, oom bool) api.Exit {
	exit := api.Exit{Code: e.Code, OOM: oom, Timeout: e.Timeout}
	if e.Signal != 0 {
		exit.Code = 128 + int(e.Signal)
		exit.Signal = cmp.Or(unix.SignalName(e.Signal), fmt.Sprintf("SIG%d", int(e.Signal)))
	}
	return exit
}

func usageOf(e host.ExecExit) api.Usage {
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	return api.Usage{WallMS: ms(e.Wall), CPUMS: ms(e.CPU), MemoryPeak: e.MaxRSS}
}

// ExecBuffered runs a program to its end and keeps the beginning of its output.
func (s *API) ExecBuffered(ctx context.Context, ref string, req api.ExecRequest) (*api.ExecResult, error) {
	x, err := s.startFed(ctx, ref, req, true)
	if err != nil {
		return nil, err
	}
	defer x.Close()
	limit := int(cmp.Or(req.OutputLimit, defaultOutputLimit))
	stdout, stderr := output.Head{Limit: limit}, output.Head{Limit: limit}
	exit, usage, err := x.Stream(ctx, x.keepIn(&stdout, &stderr))
	if err != nil {
		return nil, err
	}
	res := &api.ExecResult{Exit: exit, Usage: usage, Truncated: stdout.Truncated || stderr.Truncated}
	res.Stdout, res.StdoutBytes = stdout.Result()
	res.Stderr, res.StderrBytes = stderr.Result()
	return res, nil
}

// keepIn returns a sink that keeps the beginning of each stream, and slows a program whose output
// exceeds the limit.
func (x *Execution) keepIn(stdout, stderr *output.Head) func(stream string, p []byte) error {
	return func(stream string, p []byte) error {
		to := stdout
		if stream == "stderr" {
			to = stderr
		}
		to.WritePaced(p, x.guest.Over())
		return nil
	}
}

// ExecStream runs a program and emits events as they happen: first the pid, then output, last the
// exit. Emit is called from one goroutine at a time, and a failing emit kills the program.
func (s *API) ExecStream(ctx context.Context, ref string, req api.ExecRequest, emit func(api.ExecEvent) error) error {
	x, err := s.StartExec(ctx, ref, req)
	if err != nil {
		return err
	}
	defer x.Close()
	last, err := x.streamEvents(ctx, emit)
	if err != nil {
		return err
	}
	return emit(last)
}

// streamEvents emits all events but the last, which it returns.
func (x *Execution) streamEvents(ctx context.Context, emit func(api.ExecEvent) error) (last api.ExecEvent, err error) {
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

// Run makes a sandbox, runs one program in it and deletes it, whatever happened in between. With a
// nil emit the result is returned; otherwise it is told in events.
func (s *API) Run(ctx context.Context, req api.RunRequest, emit func(api.ExecEvent) error) (_ *api.ExecResult, err error) {
	if err := validateExec(&req.Exec); err != nil {
		return nil, err
	}
	if req.Exec.Detach {
		return nil, errDetach
	}
	if len(req.Sandbox.Command) > 0 || req.Sandbox.ImageCommand {
		return nil, class.Invalidf("command: run executes one program, and that is exec.argv")
	}
	sb, err := s.CreateSandbox(ctx, req.Sandbox)
	if err != nil {
		return nil, err
	}
	deleted := false
	remove := func() error {
		if deleted {
			return nil
		}
		deleted = true
		err := s.DeleteSandbox(context.WithoutCancel(ctx), sb.ID)
		if errors.Is(err, runtime.ErrNotFound) {
			return nil // deleted concurrently
		}
		return err
	}
	defer func() { err = errors.Join(err, remove()) }()
	if emit == nil {
		return s.ExecBuffered(ctx, sb.ID, req.Exec)
	}
	x, err := s.StartExec(ctx, sb.ID, req.Exec)
	if err != nil {
		return nil, err
	}
	defer x.Close()
	last, err := x.streamEvents(ctx, emit)
	x.Close()
	// Everything is removed before the last event, of the face in the case of an error.
	if err = errors.Join(err, remove()); err != nil {
		return nil, err
	}
	return nil, emit(last)
}

// oomWatch compares the number of out-of-memory kills before and after an exec.
type oomWatch struct {
	s      *core
	id     string
	before int
	err    error
	done   chan struct{} // nil where there is no memory cgroup to ask
}

// watchOOM reads the number before, concurrently with the start of the program, which takes as
// long.
func (s *core) watchOOM(ctx context.Context, rec *runtime.Record) *oomWatch {
	w := &oomWatch{s: s, id: rec.ID}
	if rec.Enforced.Memory != "cgroup" {
		return w
	}
	w.done = make(chan struct{})
	go func() {
		defer close(w.done)
		w.before, w.err = s.supervisor.OOMKills(ctx, w.id)
	}()
	return w
}

func (w *oomWatch) wait() {
	if w.done != nil {
		<-w.done
	}
}

// struck reads the number again. An unknown number is no error of the exec: its exit is known.
func (w *oomWatch) struck(ctx context.Context) bool {
	if w.done == nil || w.err != nil {
		return false
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stepTimeout)
	defer cancel()
	after, err := w.s.supervisor.OOMKills(ctx, w.id)
	if err != nil && !errors.Is(err, runtime.ErrNotFound) {
		w.s.log.Warn("out-of-memory kills of a sandbox are unknown", "id", w.id, "error", err)
	}
	return err == nil && after > w.before
}
