package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/internal/unixmsg"

	"github.com/sandboxd/sandboxd/internal/guest"

	"golang.org/x/sys/unix"
)

// An ExecRequest describes a process to start. It is complete, unless User is set: init then adds
// the ids, and HOME if Env has none.
type ExecRequest struct {
	Argv []string // program, looked up in the PATH of Env if it has no "/", and its arguments
	Env  []string // whole environment, "NAME=value"
	Cwd  string   // absolute; "/" if empty

	// User, if not empty, is found by init in the sandbox: see [Client.Account]. It takes the place of
	// UID, GID and Groups, and of HOME if Env has none.
	User     string
	NonRoot  bool   // refuse User if it turns out to be uid 0
	UID, GID uint32 // ids of the sandbox
	Groups   []uint32

	NoStdin bool // stdin is /dev/null, which is cheaper than a pipe that is closed at once; not with TTY
	// StdinFile, if not nil, is stdin; not with TTY. It stays the caller's. The process can use it
	// like any of its files, so it must not give access to anything that the process may not see or
	// change.
	StdinFile  *os.File
	TTY        bool   // stdin, stdout and stderr are one terminal
	Rows, Cols uint16 // size of the terminal

	MakeCwd bool           // make missing directories of Cwd, owned by UID and GID
	Limits  []guest.Rlimit // none above the sandbox's own hard limits

	// Timeout after which everything that this exec started is killed; zero means none.
	Timeout time.Duration

	// Keep makes an exec that another daemon can adopt: its exit stays in the connection's queue for
	// the next holder of the connection. Use [Exec.Spool] to take its output.
	Keep bool

	// Whole asks for the end only. Init then reports the start and the end of a short program
	// together, and its output is read from the pipes afterwards. The start of a longer one is known
	// some milliseconds late. Not with TTY or Keep.
	Whole bool
}

// ExecExit reports how a process ended and how much it used. Init is the source; the host has only
// checked that the values are possible.
type ExecExit struct {
	Code    int            // exit code, 128+n after signal n
	Signal  syscall.Signal // 0 if the process exited by itself
	Timeout bool           // the request's timeout has ended, and everything that the exec started has been killed
	Wall    time.Duration
	CPU     time.Duration // user and system time, with waited-for children
	MaxRSS  int64         // bytes of the largest process
}

// An Exec is a process that has started. Close it in the end.
//
// Stdin is nil if the request has none. Close it at any time to give the process end of file. Init
// does not read its pipe: a Write blocks until the process reads, or until Close.
type Exec struct {
	PID int // inside the sandbox

	// Host's ends. With a terminal, Stdin and Stdout are the same file and Stderr is nil; use
	// [Exec.Write] for it.
	Stdin, Stdout, Stderr *os.File

	client  *Client
	conn    *conn // nil of an exec that ended before its start was reported
	tty     bool
	keep    bool
	begun   time.Time
	timeout time.Duration

	stopped chan struct{} // closed when no goroutine is to wait for the terminal any more; nil without one
	stop    sync.Once

	over chan struct{} // closed when Wait has a result

	held [2][]byte // stdout and stderr of an exec that ended before its start was reported; the files are nil then

	quit <-chan struct{} // ends the wait even while init is held; nil unless the exec is kept
	wait sync.Once
	exit ExecExit
	err  error

	mu     sync.Mutex // serializes Signal and Kill
	closed sync.Once
}

// check refuses invalid requests, so that a mistake of the caller never counts against init.
func (r *ExecRequest) check() error {
	refuse := func(errno syscall.Errno, what string) error {
		return &guest.Error{Stage: guest.StageRequest, Errno: errno, Path: what}
	}
	if len(r.Argv) == 0 || r.Argv[0] == "" {
		return refuse(unix.EINVAL, "argv")
	}
	total := 0
	for _, list := range [][]string{r.Argv, r.Env} {
		for _, s := range list {
			if strings.IndexByte(s, 0) >= 0 {
				return refuse(unix.EINVAL, s)
			}
			if len(s) >= guest.MaxArg {
				return refuse(unix.E2BIG, s[:min(len(s), 32)]+"…")
			}
			total += len(s) + 1
		}
	}
	if total > guest.MaxArgs {
		return refuse(unix.E2BIG, "argv and env of "+strconv.Itoa(total)+" bytes")
	}
	switch {
	case r.Cwd != "" && r.Cwd[0] != '/', strings.IndexByte(r.Cwd, 0) >= 0:
		return &guest.Error{Stage: guest.StageCwd, Errno: unix.EINVAL, Path: r.Cwd}
	case len(r.Cwd) >= guest.MaxPath:
		return &guest.Error{Stage: guest.StageCwd, Errno: unix.ENAMETOOLONG, Path: r.Cwd[:32] + "…"}
	case len(r.Groups) > guest.MaxGroups:
		return refuse(unix.EINVAL, strconv.Itoa(len(r.Groups))+" groups")
	case len(r.User) > maxUser:
		return refuse(unix.EINVAL, "user of "+strconv.Itoa(len(r.User))+" bytes")
	case r.Whole && (r.TTY || r.Keep):
		return refuse(unix.EINVAL, "whole")
	case r.Timeout < 0:
		return refuse(unix.EINVAL, "timeout "+r.Timeout.String())
	case len(r.Limits) > guest.MaxLimits:
		return refuse(unix.EINVAL, strconv.Itoa(len(r.Limits))+" limits")
	// The kernel reserves the highest id for "no change".
	case r.UID == math.MaxUint32, r.GID == math.MaxUint32:
		return refuse(unix.EINVAL, "id 4294967295")
	}
	return nil
}

// Exec starts a process and returns when init reports that it runs. A process that cannot be
// started is a *[guest.Error] with the stage that failed; any other failure is [ErrLost] or the
// context's error. The context bounds the start, not the process.
func (c *Client) Exec(ctx context.Context, r ExecRequest) (_ *Exec, err error) {
	if err := r.check(); err != nil {
		return nil, err
	}
	cwd := r.Cwd
	if cwd == "" {
		cwd = "/"
	}
	strs := make([]string, 0, 1+len(r.Argv)+len(r.Env))
	strs = append(append(append(strs, cwd), r.Argv...), r.Env...)
	msg := guest.ExecRequest{
		Args: len(r.Argv), User: r.User, NonRoot: r.NonRoot, UID: r.UID, GID: r.GID, Groups: r.Groups, TTY: r.TTY, Rows: r.Rows, Cols: r.Cols,
		Timeout: int64(r.Timeout), MakeCwd: r.MakeCwd, Limits: r.Limits, Whole: r.Whole,
	}
	req, err := guest.Encode(guest.KindExec, msg, strs...)
	if err != nil {
		return nil, err
	}

	e := &Exec{client: c, tty: r.TTY, keep: r.Keep, timeout: r.Timeout, over: make(chan struct{})}
	var give, take []int // ends of the process, closed here once init has them; ends of the host, until they are files
	defer func() {
		unixmsg.CloseAll(give)
		unixmsg.CloseAll(take)
		if err != nil {
			e.closeFiles()
		}
	}()
	want := 1
	if !r.TTY {
		want = 0
		var in int
		switch {
		case r.StdinFile != nil:
			in, err = unix.FcntlInt(r.StdinFile.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		case r.NoStdin:
			in, err = unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		default:
			e.Stdin, in, err = stdin()
		}
		if err != nil {
			return nil, fmt.Errorf("make stdin: %w", err)
		}
		give = append(give, in)
		for _, name := range []string{"stdout", "stderr"} {
			p, err := pipe(name, 0o622)
			if err != nil {
				return nil, err
			}
			take, give = append(take, p[0]), append(give, p[1])
		}
		if !r.Whole {
			if err := e.files(&take); err != nil {
				return nil, err
			}
		}
	}
	if len(req) > guest.MaxPacket {
		msg.Memfd = true
		if req, err = guest.Encode(guest.KindExec, msg); err != nil {
			return nil, err
		}
		fd, err := memfd(guest.JoinStrings(strs))
		if err != nil {
			return nil, err
		}
		give = append(give, fd)
	}

	e.begun = time.Now()
	fd, deadline, bounded, err := c.ask(ctx, replyTimeout, req, give)
	if err != nil {
		return nil, fmt.Errorf("exec: %w", err)
	}
	var pkt guest.Packet
	var fds []int
	switch {
	case !r.Whole:
		e.conn, pkt, fds, err = c.first(ctx, replyTimeout, fd, deadline, bounded, want, guest.KindStarted)
	case soon(fd):
		e.conn, pkt, err = wholeAnswer(fd)
	default:
		e.conn, pkt, fds, err = c.first(ctx, replyTimeout, fd, deadline, bounded, want, guest.KindStarted, guest.KindExited)
	}
	if err != nil {
		return nil, fmt.Errorf("exec: %w", err)
	}
	defer func() {
		if err != nil && e.conn != nil {
			_ = e.conn.Close()
		}
	}()
	if r.TTY {
		if e.Stdin, err = terminal(fds[0]); errors.Is(err, guest.ErrNoWatch) {
			return nil, fmt.Errorf("exec: %w", err)
		} else if err != nil {
			return nil, fmt.Errorf("exec: %w: %w", ErrLost, err)
		}
		e.Stdout, e.stopped = e.Stdin, make(chan struct{})
	}
	if pkt.Kind == guest.KindExited {
		if err := e.whole(pkt, take); err != nil {
			return nil, err
		}
		return e, nil
	}
	if r.Whole {
		if err := e.files(&take); err != nil {
			return nil, err
		}
	}
	var a guest.StartedAnswer
	if err := pkt.Into(&a, 0); err != nil {
		return nil, fmt.Errorf("exec: %w: %w", ErrLost, err)
	}
	if a.PID < 2 || a.PID > maxPID {
		return nil, fmt.Errorf("exec: %w: pid %d", ErrLost, a.PID)
	}
	e.PID = a.PID
	if r.Timeout > 0 {
		if err := e.conn.SetReadDeadline(e.begun.Add(r.Timeout + exitGrace)); err != nil {
			return nil, err
		}
	}
	return e, nil
}

// pipe makes a pipe for a stream of a program. Programs open their streams by name: /dev/stderr in
// a script, /dev/stdout as the log of a server. The pipe is the daemon's, and they may have any id
// of the sandbox, so the mode lets them do what they do with the stream. Only a process that may
// trace the program finds its name.
func pipe(name string, mode uint32) (p [2]int, err error) {
	if err = unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return p, fmt.Errorf("make pipe for %s: %w", name, err)
	}
	if err = unix.Fchmod(p[0], mode); err != nil {
		unixmsg.CloseAll(p[:])
		return p, fmt.Errorf("make pipe for %s: %w", name, err)
	}
	return p, nil
}

// stdin makes a pipe and returns its write end for the host. The other end is blocking, as programs
// expect.
func stdin() (host *os.File, child int, err error) {
	p, err := pipe("stdin", 0o644)
	if err != nil {
		return nil, -1, err
	}
	return hostEnd(p[1], p[0], "stdin")
}

// files makes files of the host's ends of stdout and stderr, if there are any, and takes them over.
func (e *Exec) files(take *[]int) error {
	fds := *take
	*take = nil
	for i, to := range []**os.File{&e.Stdout, &e.Stderr}[:len(fds)] {
		var err error
		if *to, _, err = hostEnd(fds[i], -1, [...]string{"stdout", "stderr"}[i]); err != nil {
			unixmsg.CloseAll(fds[i+1:])
			return err
		}
	}
	return nil
}

// soon waits a little longer than [guest.WholeWait] for init's answer, and reports whether it has
// come. It blocks a thread, which costs less than the runtime's poller for a single packet.
func soon(fd int) bool {
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int((guest.WholeWait + 2*time.Millisecond).Milliseconds())) //nolint:gosec // descriptors are small
	return err == nil && n > 0
}

// wholeAnswer takes over the socket of an exec with Whole and receives the answer that has come.
func wholeAnswer(fd int) (*conn, guest.Packet, error) {
	pkt, fds, err := guest.RecvFrom(fd)
	if errors.Is(err, unix.ECONNRESET) { // see answer
		pkt, fds, err = guest.RecvFrom(fd)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, guest.Packet{}, lost("await init's answer", err)
	}
	if err := expected(pkt, fds, 0, guest.KindStarted, guest.KindExited); err != nil {
		unixmsg.CloseAll(append(fds, fd))
		return nil, guest.Packet{}, err
	}
	if pkt.Kind == guest.KindExited {
		_ = unix.Close(fd)
		return nil, pkt, nil
	}
	c, err := newConn(fd)
	return c, pkt, err
}

// whole handles a process that exited before its start was reported. All of its output is in the
// pipes.
func (e *Exec) whole(pkt guest.Packet, pipes []int) error {
	if e.conn != nil {
		_ = e.conn.Close()
		e.conn = nil
	}
	var a guest.ExitedAnswer
	if err := pkt.Into(&a, 0); err != nil {
		return fmt.Errorf("exec: %w: %w", ErrLost, err)
	}
	if a.PID < 2 || a.PID > maxPID {
		return fmt.Errorf("exec: %w: pid %d", ErrLost, a.PID)
	}
	x, ok := exitOf(&a, e.timeout, time.Since(e.begun))
	if !ok {
		return fmt.Errorf("exec: %w: an exit that cannot be", ErrLost)
	}
	for i, fd := range pipes {
		var err error
		if e.held[i], err = readHeld(fd); err != nil {
			return fmt.Errorf("exec: %w", err)
		}
	}
	e.PID = a.PID
	e.wait.Do(func() {
		e.exit = x
		close(e.over)
	})
	return nil
}

// readHeld reads the current content of a pipe. It does not wait for later output of processes that
// were left behind.
func readHeld(fd int) ([]byte, error) {
	left, err := unix.IoctlGetInt(fd, unix.TIOCINQ)
	if err != nil || left == 0 {
		return nil, err
	}
	// Non-blocking: a process can open its end for reading too (/proc/self/fd/1), and take away the
	// bytes that a read would wait for.
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, err
	}
	held := make([]byte, left)
	for n := 0; n < left; {
		m, err := unix.Read(fd, held[n:])
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN), err == nil && m == 0:
			return held[:n], nil
		case err != nil:
			return nil, fmt.Errorf("read what a pipe holds: %w", err)
		}
		n += max(m, 0)
	}
	return held, nil
}

// hostEnd makes ours a file of the runtime's poller. Each end of a pipe has flags of its own, so
// the process cannot make ours blocking again.
func hostEnd(ours, theirs int, name string) (*os.File, int, error) {
	if err := unix.SetNonblock(ours, true); err != nil {
		unixmsg.CloseAll([]int{ours, theirs})
		return nil, -1, fmt.Errorf("make pipe for %s: %w", name, err)
	}
	f := os.NewFile(uintptr(ours), name)
	if err := guest.Waitable(f); err != nil {
		_ = f.Close()
		unixmsg.CloseAll([]int{theirs})
		return nil, -1, fmt.Errorf("make pipe for %s: %w", name, err)
	}
	return f, theirs, nil
}

// memfd returns a file of memory for strings that exceed a packet.
func memfd(b []byte) (int, error) {
	fd, err := unix.MemfdCreate("exec", unix.MFD_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("make memfd for the arguments: %w", err)
	}
	for off := 0; off < len(b); {
		n, err := unix.Pwrite(fd, b[off:], int64(off))
		if err != nil {
			_ = unix.Close(fd)
			return -1, fmt.Errorf("write memfd for the arguments: %w", err)
		}
		off += n
	}
	return fd, nil
}

// maxPID is the kernel's PID_MAX_LIMIT.
const maxPID = 1 << 22

// Copy copies r to the stdin of the process. It blocks while the process does not read, until ctx
// ends: then the error is its cause.
func (e *Exec) Copy(ctx context.Context, r io.Reader) error {
	undone := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(undone)
		_ = e.Stdin.SetWriteDeadline(time.Unix(1, 0)) // refused only by a closed file
	})
	_, err := io.Copy(struct{ io.Writer }{e}, r)
	if !stop() {
		<-undone
		_ = e.Stdin.SetWriteDeadline(time.Time{}) // as above
	}
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// Wait returns when the process has exited. It returns [ErrLost] if init does not report that in
// time after the request's timeout or a Kill. It may be called more than once and from several
// goroutines.
func (e *Exec) Wait() (ExecExit, error) {
	e.wait.Do(func() {
		e.exit, e.err = e.await()
		if !e.keep {
			// Init has nothing more to send, and need not keep the connection while the caller drains the
			// pipes.
			_ = e.conn.Close()
		}
		close(e.over)
	})
	return e.exit, e.err
}

// Over returns a channel that is closed when the exit is known, or known to be lost. [Exec.Wait],
// [Exec.Stream] or [Exec.Spool] must run meanwhile.
func (e *Exec) Over() <-chan struct{} { return e.over }

func (e *Exec) await() (ExecExit, error) {
	answer := e.conn.answer
	if e.keep {
		answer = e.conn.peek
	}
	pkt, fds, err := e.client.awaitBy(answer, e.quit, e.conn, exitGrace, &patience{client: e.client}) // Close ends the wait
	if err != nil {
		return ExecExit{}, lost("await the process's exit", err)
	}
	unixmsg.CloseAll(fds)
	if pkt.Kind != guest.KindExited || len(fds) != 0 {
		return ExecExit{}, fmt.Errorf("await the process's exit: %w: %s with %d descriptors", ErrLost, strconv.Quote(pkt.Kind), len(fds))
	}
	var a guest.ExitedAnswer
	if err := pkt.Into(&a, 0); err != nil {
		return ExecExit{}, fmt.Errorf("await the process's exit: %w: %w", ErrLost, err)
	}
	x, ok := exitOf(&a, e.timeout, time.Since(e.begun))
	if !ok || a.PID != 0 { // started has reported the pid
		return ExecExit{}, fmt.Errorf("await the process's exit: %w: an exit that cannot be", ErrLost)
	}
	return x, nil
}

// exitOf validates init's report about the end of an exec with this timeout that started elapsed
// ago.
func exitOf(a *guest.ExitedAnswer, timeout, elapsed time.Duration) (ExecExit, bool) {
	switch {
	case a.Code < 0 || a.Code > 255,
		a.Signal < 0 || a.Signal > 64,
		a.Signal != 0 && a.Code != 0,
		a.Timeout && timeout == 0,
		a.Wall < 0 || a.Wall > int64(elapsed),
		a.CPU < 0,
		a.MaxRSS < 0 || a.MaxRSS > 1<<50:
		return ExecExit{}, false
	}
	x := ExecExit{
		Code: a.Code, Signal: syscall.Signal(a.Signal), Timeout: a.Timeout,
		Wall: time.Duration(a.Wall), CPU: time.Duration(a.CPU), MaxRSS: a.MaxRSS,
	}
	if a.Signal != 0 {
		x.Code = 128 + a.Signal
	}
	return x, true
}

// Reach is the processes of an exec that get a signal.
type Reach int

// The reaches of signals.
const (
	ReachGroup Reach = iota // the main process's group
	ReachMain               // the main process alone; an init of an earlier version sends nothing
	ReachAll                // everything that the exec has started and that one pass over /proc shows
)

// Signal sends sig. A process that has exited is no error.
func (e *Exec) Signal(sig syscall.Signal, to Reach) error {
	if sig < 1 || sig > 64 {
		return fmt.Errorf("signal %d: %w", int(sig), unix.EINVAL)
	}
	return e.tell("signal", guest.KindSignal, guest.SignalRequest{Signal: int(sig), All: to == ReachAll, Main: to == ReachMain})
}

// Kill ends everything that the exec has started, however far it has gone from its parent. Wait
// then returns the exit, or [ErrLost] if init does not finish within some seconds.
func (e *Exec) Kill() error {
	if err := e.tell("kill", guest.KindKill, guest.None{}); err != nil || e.conn == nil {
		return err
	}
	err := e.conn.SetReadDeadline(time.Now().Add(exitGrace))
	if err != nil && !errors.Is(err, os.ErrClosed) { // closed: the process has exited
		return fmt.Errorf("kill: %w", err)
	}
	return nil
}

func (e *Exec) tell(doing string, k guest.Kind, msg any) error {
	if e.conn == nil {
		return nil
	}
	p, err := guest.Encode(k, msg)
	if err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	// Init reads at once. An init that does not must not delay the caller for long.
	_ = e.conn.SetWriteDeadline(time.Now().Add(exitGrace))
	more := patience{client: e.client}
	for {
		err = e.conn.Send(p)
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
		until, ok := more.extend(time.Now(), exitGrace)
		if !ok || e.conn.SetWriteDeadline(until) != nil {
			break
		}
	}
	if errors.Is(err, os.ErrClosed) || errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) {
		return nil // the process has exited, or init is lost, which Wait reports
	}
	if err != nil {
		return lost(doing, err)
	}
	return nil
}

// Resize sets the size of the process's terminal.
func (e *Exec) Resize(rows, cols uint16) error {
	if !e.tty {
		return fmt.Errorf("resize: %w", unix.ENOTTY)
	}
	rc, err := e.Stdout.SyscallConn()
	if err != nil {
		return fmt.Errorf("resize: %w", err)
	}
	var set error
	if err := rc.Control(func(fd uintptr) {
		set = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: cols})
	}); err != nil {
		set = err
	}
	if set != nil {
		return fmt.Errorf("resize: %w", set)
	}
	return nil
}

// Close closes the connection and the files. If the process still runs, init kills everything that
// the exec has started. Wait and Stream return.
func (e *Exec) Close() error {
	e.closed.Do(func() {
		if e.conn != nil {
			_ = e.conn.Close()
		}
		e.closeFiles()
	})
	return nil
}

func (e *Exec) closeFiles() {
	e.abandon()
	for _, f := range []*os.File{e.Stdin, e.Stdout, e.Stderr} {
		if f != nil {
			_ = f.Close() // a second Close of one file is a harmless error
		}
	}
}

// Stream copies the output of the process to onOut and returns the exit. The stream is "stdout" or
// "stderr"; all output of a terminal is "stdout". Calls of onOut do not overlap; p is valid until
// it returns.
//
// Everything that the process wrote is delivered. Stream does not wait for output after the exit,
// because processes that were left behind may hold the pipes open for ever. If ctx ends or onOut
// fails, the exec is killed and that error returned. Do not read Stdout or Stderr elsewhere.
//
// If ctx ends with [ErrLeft] as its cause and the exec is kept, it is not killed, and what it has
// written so far is still delivered: see [Exec.Leave].
func (e *Exec) Stream(ctx context.Context, onOut func(stream string, p []byte) error) (ExecExit, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	left := func() bool { return e.keep && errors.Is(context.Cause(ctx), ErrLeft) }
	var mu sync.Mutex // guards onOut
	deliver := func(stream string, p []byte) error {
		mu.Lock()
		defer mu.Unlock()
		if err := ctx.Err(); err != nil && !left() {
			return err
		}
		return onOut(stream, p)
	}
	var copies sync.WaitGroup
	start := func(stream string, f *os.File) {
		copies.Go(func() {
			if err := e.copyOut(f, func(p []byte) error { return deliver(stream, p) }); err != nil {
				cancel(err)
			}
		})
	}
	if e.Stdout == nil {
		return e.streamHeld(ctx, onOut)
	}
	start("stdout", e.Stdout)
	if e.Stderr != nil {
		start("stderr", e.Stderr)
	}
	// A failed copy or a cancelled context ends the wait: on a closed connection init kills the exec.
	stop := context.AfterFunc(ctx, func() {
		if left() {
			_ = e.conn.SetReadDeadline(guest.Expired) // ends the wait alone
		} else {
			_ = e.conn.Close()
		}
		e.stopReading()
	})
	defer stop()
	if e.keep {
		e.quit = ctx.Done()
	}
	exit, err := e.Wait()
	if err == nil {
		e.stopReading()
	} else {
		cancel(err)
	}
	copies.Wait()
	if ctx.Err() != nil {
		return ExecExit{}, context.Cause(ctx)
	}
	return exit, err
}

// Ends returns copies of the host's ends of the pipes, for another process that reads the output
// itself: of stdout, stderr and, with stdin, stdin. They are non-blocking, and the caller closes
// them. Call [Exec.Await] instead of Stream then. Not with a terminal or Whole.
func (e *Exec) Ends(stdin bool) (fds []int, err error) {
	files := []*os.File{e.Stdout, e.Stderr}
	if stdin {
		files = append(files, e.Stdin)
	}
	for _, f := range files {
		fd, err := duplicate(f)
		if err != nil {
			unixmsg.CloseAll(fds)
			return nil, fmt.Errorf("copy the end of %s: %w", f.Name(), err)
		}
		fds = append(fds, fd)
	}
	return fds, nil
}

// Await closes the exec's own ends of the output and returns the exit. If ctx ends, the exec is
// killed and the context's cause returned. It never reads: another process shares the files, and
// can make them block.
func (e *Exec) Await(ctx context.Context) (ExecExit, error) {
	for _, f := range []*os.File{e.Stdout, e.Stderr} {
		_ = f.Close() // a second Close of one file is a harmless error
	}
	// On a closed connection init kills the exec.
	stop := context.AfterFunc(ctx, func() { _ = e.conn.Close() })
	defer stop()
	exit, err := e.Wait()
	if ctx.Err() != nil {
		return ExecExit{}, context.Cause(ctx)
	}
	return exit, err
}

// streamHeld is Stream for an exec that ended before its start was reported.
func (e *Exec) streamHeld(ctx context.Context, onOut func(stream string, p []byte) error) (ExecExit, error) {
	for i, stream := range []string{"stdout", "stderr"} {
		if err := ctx.Err(); err != nil {
			return ExecExit{}, context.Cause(ctx)
		}
		if p := e.held[i]; len(p) > 0 {
			if err := onOut(stream, p); err != nil {
				return ExecExit{}, err
			}
		}
	}
	return e.Wait()
}

// stopReading wakes the readers, which empty the pipes and end.
func (e *Exec) stopReading() {
	e.abandon()
	for _, f := range []*os.File{e.Stdout, e.Stderr} {
		if f != nil {
			_ = f.SetReadDeadline(guest.Expired)
		}
	}
}

// streamBuffers have the default size of a pipe.
var streamBuffers = sync.Pool{New: func() any { return new([64 << 10]byte) }}

// copyOut copies f until its end. Once stopReading was called it copies the content that f has at
// that moment.
func (e *Exec) copyOut(f *os.File, deliver func([]byte) error) error {
	var buf []byte
	read := f.Read
	if e.tty {
		buf, read = make([]byte, 4<<10), e.readTTY // an abandoned read keeps its buffer
	} else {
		pooled := streamBuffers.Get().(*[64 << 10]byte)
		defer streamBuffers.Put(pooled)
		buf = pooled[:]
	}
	for {
		n, err := read(buf)
		if n > 0 {
			if err := deliver(buf[:n]); err != nil {
				return err
			}
		}
		switch {
		case err == nil:
		case errors.Is(err, io.EOF), errors.Is(err, errHeld), e.tty && errors.Is(err, unix.EIO): // EIO: no process has the terminal open any more
			return nil
		case errors.Is(err, os.ErrDeadlineExceeded):
			return e.drain(f, buf, deliver)
		default:
			return fmt.Errorf("read %s: %w", f.Name(), err)
		}
	}
}

// drain copies the current content of f. It is bounded by the capacity of f, because a process that
// was left behind may write faster than drain reads; output of the exited process comes first.
func (e *Exec) drain(f *os.File, buf []byte, deliver func([]byte) error) error {
	rc, err := f.SyscallConn()
	if err != nil {
		return fmt.Errorf("drain %s: %w", f.Name(), err)
	}
	var left int
	if err := rc.Control(func(fd uintptr) { left, err = unix.IoctlGetInt(int(fd), unix.TIOCINQ) }); err != nil {
		return fmt.Errorf("drain %s: %w", f.Name(), err)
	}
	if err != nil {
		return fmt.Errorf("drain %s: %w", f.Name(), err)
	}
	if e.tty {
		// A terminal's count leaves out bytes in the line discipline, which holds up to 64 KiB. A read
		// pushes these through, so EAGAIN does mean empty.
		left = 128 << 10
	}
	for left > 0 {
		var n int
		// Not f.Read, whose deadline has passed. The file is non-blocking, or a terminal.
		if e.tty {
			n, err = e.readNow(buf[:min(left, len(buf))])
		} else if cerr := rc.Control(func(fd uintptr) { n, err = unix.Read(int(fd), buf[:min(left, len(buf))]) }); cerr != nil {
			return fmt.Errorf("drain %s: %w", f.Name(), cerr)
		}
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN), errors.Is(err, errHeld), e.tty && (errors.Is(err, unix.EIO) || errors.Is(err, io.EOF)), err == nil && n == 0:
			return nil
		case err != nil:
			return fmt.Errorf("drain %s: %w", f.Name(), err)
		}
		left -= n
		if err := deliver(buf[:n]); err != nil {
			return err
		}
	}
	return nil
}
