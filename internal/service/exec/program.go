// Package exec has the execs of running sandboxes: the programs that clients start in them.
//
// An [Execution] ends with its client. A [Detached] exec goes on without one, and without a daemon:
// its output lies in memory that the launcher keeps (package execlog), beside the descriptors that
// the next daemon needs. The main process of a sandbox is a detached exec whose output is also on
// disk (package mainlog), and whose end is that of the sandbox.
//
// A [Registry] lists all execs, bounds them, adopts those of the last daemon, and forgets them some
// time after their end. The caller makes a program of a request: users, environment, limits and
// errors of init are unknown here. So are callers, networks and builds. A tenant is a name that has
// a part of the room.
package exec

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/guest/host"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/guests"
	"github.com/sandboxd/sandboxd/runtime"
)

// Exec is the interface that foreground execs, [Execution], and detached ones, [Detached], share.
type Exec interface {
	ID() string
	Record() Record
	Signal(req api.ExecSignal) error
	Resize(rows, cols uint16) error
	Input(ctx context.Context, r io.Reader, end bool) error
	// Over returns a channel that is closed when the program has ended and its record says how.
	Over() <-chan struct{}
	common() *program
}

// program is the part that execs of both kinds share.
type program struct {
	PID int // inside the sandbox

	r     *Registry
	req   api.ExecRequest
	lease *runtime.Lease // nil of an adopted one whose sandbox has ended
	guest *host.Exec     // nil of an adopted one that has ended
	oom   *oomWatch
	stdin sync.WaitGroup
	input chan struct{} // semaphore of one that serializes writes to stdin
	done  chan struct{} // closed when it has ended and its record says how

	mu     sync.Mutex
	record Record // without counts of output; of its fields only those change that say how it ended
}

// start starts the program of an exec of either kind, and takes over the lease. With running it has
// started already.
func (r *Registry) start(ctx context.Context, lease *runtime.Lease, req api.ExecRequest, how host.ExecRequest, running func(*runtime.Lease) (*host.Exec, error)) (_ *program, err error) {
	ctx, cancel := guests.WithGone(ctx, lease)
	defer cancel()
	oom := r.watchOOM(ctx, &lease.Record)
	var guest *host.Exec
	if running != nil {
		guest, err = running(lease)
	} else {
		guest, err = r.opts.Launch(ctx, lease, req, how)
	}
	oom.wait()
	if errors.Is(err, guests.ErrEnded) {
		err = r.guests.Ended(lease)
	}
	if err != nil {
		lease.End()
		return nil, err
	}
	rec := &lease.Record
	x := &program{PID: guest.PID, r: r, req: req, lease: lease, guest: guest, oom: oom, input: make(chan struct{}, 1), done: make(chan struct{})}
	x.record.Exec = api.Exec{
		ID: NewID(), Sandbox: rec.ID, Argv: shortened(req.Argv), User: cmp.Or(req.User, rec.User), Cwd: cmp.Or(req.Cwd, rec.Cwd), TTY: req.TTY,
		Detached: req.Detach, StdinOpen: req.StdinOpen, Annotations: req.Annotations, PID: guest.PID, State: api.ExecRunning, StartedAt: time.Now().UTC(),
	}
	return x, nil
}

// NewID returns an id for an exec.
func NewID() string { return strings.ToLower(rand.Text()[:12]) }

// ID returns the exec's id.
func (x *program) ID() string { return x.record.ID }

func (x *program) common() *program { return x }

// Ended reports whether the program has ended and its record says how.
func (x *program) Ended() bool { return closed(x.done) }

// Over returns a channel that is closed when the program has ended.
func (x *program) Over() <-chan struct{} { return x.done }

// closed reports whether a channel on which nothing is sent is closed.
func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
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
	if x.Ended() {
		return nil
	}
	if req.All && sig == unix.SIGKILL {
		return x.Kill() // which lets nothing get away
	}
	return x.guest.Signal(sig, to)
}

// Kill kills the program with everything that it has started. An error means that init is lost,
// which ends the sandbox.
func (x *program) Kill() error {
	if x.Ended() || x.guest == nil {
		return nil
	}
	return x.guest.Kill()
}

// Resize sets the size of the program's terminal.
func (x *program) Resize(rows, cols uint16) error {
	if !x.req.TTY {
		return class.Invalidf("resize: the program has no terminal")
	}
	if x.Ended() {
		return nil
	}
	return x.guest.Resize(rows, cols)
}

// eot is Ctrl-D, the VEOF of a new terminal. At the beginning of a line it means end of file.
const eot = 4

// closeStdin gives the program end of file. On a terminal that is the character which a person
// would type.
func (x *program) closeStdin() error {
	if x.req.TTY {
		_, err := x.guest.Write([]byte{eot})
		return err
	}
	return x.guest.Stdin.Close()
}

// Input copies r to the program's stdin, and then closes it if end is set. It blocks while the
// program does not read, until ctx ends. Several writers take turns.
func (x *program) Input(ctx context.Context, r io.Reader, end bool) error {
	if x.Ended() || x.guest.Stdin == nil {
		return class.Mark(runtime.ErrState, fmt.Errorf("write to stdin: %w", errNoStdin))
	}
	select {
	case x.input <- struct{}{}:
		defer func() { <-x.input }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if end && x.req.TTY {
		r = io.MultiReader(r, bytes.NewReader([]byte{eot})) // here, where ctx ends a blocked write
	}
	err := x.guest.Copy(ctx, r)
	switch {
	case errors.Is(err, unix.EPIPE), errors.Is(err, os.ErrClosed), errors.Is(err, unix.EIO) && x.req.TTY:
		return class.Mark(runtime.ErrState, fmt.Errorf("write to stdin: %w", errNoStdin))
	case err != nil:
		return err
	case end && !x.req.TTY:
		_ = x.closeStdin() // closing twice, or after the program, changes nothing
	}
	return nil
}

var errNoStdin = errors.New("the program's stdin is not open: it was not started with stdin_open, has closed it, or has ended")

// shortened returns the part of an argument list that a record keeps.
func shortened(argv []string) []string {
	const most = 4 << 10
	var out []string
	left := most
	for _, a := range argv {
		a = strings.ToValidUTF8(a, "\uFFFD")
		if len(a) > left {
			return append(out, strings.ToValidUTF8(a[:left], "")+"...")
		}
		left -= len(a) + 1
		out = append(out, a)
		if left <= 0 {
			return append(out, "...")
		}
	}
	return out
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
