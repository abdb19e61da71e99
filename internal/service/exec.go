package service

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/guest"
	"github.com/sandboxd/sandboxd/internal/guest/host"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/exec"
	"github.com/sandboxd/sandboxd/internal/service/guests"
	"github.com/sandboxd/sandboxd/internal/service/output"
	"github.com/sandboxd/sandboxd/runtime"
)

// The types of execs, as faces have them.
type (
	// Exec is the interface that foreground execs and detached ones share.
	Exec = exec.Exec
	// Execution is an exec that ends with its client.
	Execution = exec.Execution
	// Detached is an exec that goes on without a client.
	Detached = exec.Detached
	// Upcoming is a client that has attached to a program before its start.
	Upcoming = exec.Upcoming
	// ExecRecord is the record of an exec.
	ExecRecord = exec.Record
	// Failure is the reason why the exit of a detached exec is unknown.
	Failure = exec.Failure
)

// ErrLeft is the cause of the end of a context with which [Execution.Stream] leaves a program on a
// terminal alone.
var ErrLeft = exec.ErrLeft

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
		x.Feed()
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
		x.GiveStdin()
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
	return s.execs.Start(ctx, lease, req, r)
}

// launch implements [exec.Options.Launch].
func (s *core) launch(ctx context.Context, lease *runtime.Lease, req api.ExecRequest, r host.ExecRequest) (*host.Exec, error) {
	rec := &lease.Record
	client := guests.Of(lease)
	r, err := fullRequest(ctx, rec, &req, r, client)
	if err != nil {
		return nil, err
	}
	x, err := client.Exec(ctx, r)
	if r.User != "" && refused(err, unix.EINVAL) {
		// An init of an earlier version, which has outlived its daemon, knows no users.
		var id identity
		if id, err = userOf(ctx, rec, req.User, client.Open); err == nil {
			r.User, r.NonRoot = "", false
			r.UID, r.GID, r.Groups = id.uid, id.gid, id.groups
			r.Env = execEnv(rec.ImageEnv, rec.Env, req.Env, id.home, req.TTY)
			x, err = client.Exec(ctx, r)
		}
	}
	if err != nil {
		return nil, s.guests.Lost(ctx, lease, userError(rec, cmp.Or(req.User, rec.User), execError(req.Argv[0], r.Cwd, err)))
	}
	return x, nil
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

// ExecBuffered runs a program to its end and keeps the beginning of its output.
func (s *API) ExecBuffered(ctx context.Context, ref string, req api.ExecRequest) (*api.ExecResult, error) {
	x, err := s.startFed(ctx, ref, req, true)
	if err != nil {
		return nil, err
	}
	defer x.Close()
	limit := int(cmp.Or(req.OutputLimit, exec.DefaultOutputLimit))
	stdout, stderr := output.Head{Limit: limit}, output.Head{Limit: limit}
	exit, usage, err := x.Stream(ctx, x.KeepIn(&stdout, &stderr))
	if err != nil {
		return nil, err
	}
	res := &api.ExecResult{Exit: exit, Usage: usage, Truncated: stdout.Truncated || stderr.Truncated}
	res.Stdout, res.StdoutBytes = stdout.Result()
	res.Stderr, res.StderrBytes = stderr.Result()
	return res, nil
}

// ExecStream runs a program and emits events as they happen: first the pid, then output, last the
// exit. Emit is called from one goroutine at a time, and a failing emit kills the program.
func (s *API) ExecStream(ctx context.Context, ref string, req api.ExecRequest, emit func(api.ExecEvent) error) error {
	x, err := s.StartExec(ctx, ref, req)
	if err != nil {
		return err
	}
	defer x.Close()
	last, err := x.Events(ctx, emit)
	if err != nil {
		return err
	}
	return emit(last)
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
	last, err := x.Events(ctx, emit)
	x.Close()
	// Everything is removed before the last event, of the face in the case of an error.
	if err = errors.Join(err, remove()); err != nil {
		return nil, err
	}
	return nil, emit(last)
}

// rlimits are the resources that a sandbox or an exec may limit.
var rlimits = map[string]int{
	"as": unix.RLIMIT_AS, "core": unix.RLIMIT_CORE, "cpu": unix.RLIMIT_CPU, "data": unix.RLIMIT_DATA, "fsize": unix.RLIMIT_FSIZE,
	"memlock": unix.RLIMIT_MEMLOCK, "nofile": unix.RLIMIT_NOFILE, "nproc": unix.RLIMIT_NPROC, "stack": unix.RLIMIT_STACK,
}

// limitsOf turns the limits of a sandbox and those of a request, which replace them, into init's,
// in an order that does not change. Both have been validated.
func limitsOf(sandbox map[string]api.Rlimit, asked map[string]uint64) []guest.Rlimit {
	var out []guest.Rlimit
	for _, name := range slices.Sorted(maps.Keys(rlimits)) {
		n, ofExec := asked[name]
		l, ofSandbox := sandbox[name]
		switch {
		case ofExec:
			out = append(out, guest.Rlimit{Resource: rlimits[name], Value: n})
		case ofSandbox && l.Soft != l.Hard:
			out = append(out, guest.Rlimit{Resource: rlimits[name], Value: l.Hard, Soft: &l.Soft})
		case ofSandbox:
			out = append(out, guest.Rlimit{Resource: rlimits[name], Value: l.Hard})
		}
	}
	return out
}

// limitName returns the API's name of a limit that init gives by its number.
func limitName(number string) string {
	for name, n := range rlimits {
		if fmt.Sprint(n) == number {
			return name
		}
	}
	return number
}
