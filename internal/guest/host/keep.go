package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/internal/guest"

	"golang.org/x/sys/unix"
)

// How an exec survives the daemon.
//
// Nothing of it exists in the daemon's memory alone. Its exit stays in the queue of init's
// connection, which the daemon only peeks at (MSG_PEEK). Its output moves by splice(2) from the
// pipe to a file of memory without passing through the daemon. The kernel takes the bytes out of
// the pipe and advances the file's own offset in one system call. A daemon that is killed at any
// moment has therefore taken exactly the bytes that the file has; the rest waits in the pipe. A
// terminal cannot be spliced to a file, so a pipe stands between, the relay, which outlives the
// daemon too. The daemon only has to keep copies of these descriptors elsewhere: in the launcher's
// descriptor store.

// Kept holds the descriptors of an exec that was started with [ExecRequest.Keep], by which another
// daemon adopts it. The exec owns them; do not close them.
type Kept struct {
	Conn                  *os.File // init's connection
	Stdin, Stdout, Stderr *os.File // of a terminal Stdout is the master, and the others are nil
}

// Kept returns the descriptors.
func (e *Exec) Kept() Kept {
	k := Kept{Conn: e.conn.File(), Stdin: e.Stdin, Stdout: e.Stdout, Stderr: e.Stderr}
	if e.tty {
		k.Stdin = nil
	}
	return k
}

// Adopt continues an exec that another daemon started at begun. It takes the descriptors over even
// on error. Do not call Wait if the exit has been reported; k.Conn may be nil then.
func (c *Client) Adopt(k Kept, r ExecRequest, pid int, begun time.Time) (_ *Exec, err error) {
	e := &Exec{
		PID: pid, Stdin: k.Stdin, Stdout: k.Stdout, Stderr: k.Stderr,
		client: c, tty: r.TTY, keep: true, timeout: r.Timeout, over: make(chan struct{}),
		// Begun stays zero: the clock of another daemon cannot validate the times that init reports.
	}
	if r.TTY {
		e.Stdin, e.stopped = k.Stdout, make(chan struct{})
	}
	defer func() {
		if err != nil {
			e.closeFiles()
		}
	}()
	fd, err := unix.FcntlInt(k.Conn.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	_ = k.Conn.Close() // never read or written
	if err != nil {
		return nil, fmt.Errorf("adopt exec: %w", err)
	}
	if e.conn, err = newConn(fd); err != nil {
		return nil, fmt.Errorf("adopt exec: %w", err)
	}
	if r.Timeout > 0 {
		if err := e.conn.SetReadDeadline(begun.Add(r.Timeout + exitGrace)); err != nil {
			_ = e.conn.Close()
			return nil, fmt.Errorf("adopt exec: %w", err)
		}
	}
	return e, nil
}

// Reported reports whether init has reported the exit, or is gone. No other method must run at the
// same time.
func (e *Exec) Reported() bool {
	conn, err := e.conn.File().SyscallConn()
	if err != nil {
		return true
	}
	told := false
	err = conn.Control(func(fd uintptr) { told = ready(int(fd), unix.POLLIN) })
	return err != nil || told
}

// AwaitOutput returns when the process has written to its stdout, and takes nothing of that:
// [Exec.Spool] comes next. It fails if the process closes it before. Not with TTY.
func (e *Exec) AwaitOutput(ctx context.Context) error {
	conn, err := e.Stdout.SyscallConn()
	if err != nil {
		return fmt.Errorf("await output: %w", err)
	}
	undone := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(undone)
		_ = e.Stdout.SetReadDeadline(guest.Expired) // only a closed file refuses
	})
	err = conn.Read(func(fd uintptr) bool { return ready(int(fd), unix.POLLIN) })
	if !stop() {
		<-undone
		_ = e.Stdout.SetReadDeadline(time.Time{}) // as above
	}
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("await output: %w", context.Cause(ctx))
	}
	if err != nil {
		return fmt.Errorf("await output: %w", err)
	}
	var held int
	if cerr := conn.Control(func(fd uintptr) { held, err = unix.IoctlGetInt(int(fd), unix.TIOCINQ) }); cerr != nil || err != nil {
		return fmt.Errorf("await output: %w", errors.Join(cerr, err))
	}
	if held == 0 {
		return errors.New("await output: the process has closed it")
	}
	return nil
}

// ErrLeft is the cause of the end of a context with which [Exec.Stream] returns and the process
// goes on.
var ErrLeft = errors.New("the exec goes on without its client")

// Leave continues a kept exec whose Stream has returned [ErrLeft], as another Exec, of which
// [Exec.Spool] takes the output. It is closed itself. On error the process is killed.
func (e *Exec) Leave() (*Exec, error) {
	e.closed.Do(func() {}) // its files are the other's
	k := e.Kept()
	_ = k.Stdout.SetReadDeadline(time.Time{}) // only a closed file refuses
	return e.client.Adopt(k, ExecRequest{TTY: e.tty, Timeout: e.timeout}, e.PID, e.begun)
}

// A Sink takes the output of an exec that is kept.
type Sink interface {
	// Take calls move, which moves bytes to the file at its offset and returns their number, and
	// records the stream that they belong to. Calls come from two goroutines.
	Take(stream string, move func(file int) (int, error)) (int, error)
	// Relay returns the pipe for a terminal's output, nil without a terminal.
	Relay() (r, w *os.File)
	// Followed reports whether a client reads the output as it comes. Then it is not throttled.
	Followed() bool
}

// Spool is [Exec.Stream] with a sink, for an exec that is kept. When ctx ends, it returns and the
// exec goes on.
func (e *Exec) Spool(ctx context.Context, sink Sink) (ExecExit, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var moves sync.WaitGroup
	start := func(stream string, f *os.File) {
		moves.Go(func() {
			if err := e.move(f, stream, sink); err != nil {
				cancel(err)
			}
		})
	}
	start("stdout", e.Stdout)
	if e.Stderr != nil {
		start("stderr", e.Stderr)
	}
	stop := context.AfterFunc(ctx, func() {
		_ = e.conn.SetReadDeadline(guest.Expired)
		e.stopReading()
	})
	defer stop()
	e.quit = ctx.Done()
	exit, err := e.Wait()
	if err == nil {
		e.stopReading()
	} else {
		cancel(err)
	}
	moves.Wait()
	if ctx.Err() != nil {
		return ExecExit{}, context.Cause(ctx)
	}
	return exit, err
}

// spliceSize is the default size of a pipe, moved at once.
const spliceSize = 64 << 10

// splice moves bytes and returns their number, which is not negative on an error either: callers
// add it up.
func splice(from, to, most int) (int, error) {
	for {
		n, err := unix.Splice(from, nil, to, nil, most, unix.SPLICE_F_NONBLOCK)
		if !errors.Is(err, unix.EINTR) {
			return max(int(n), 0), err
		}
	}
}

// move is copyOut into a sink.
func (e *Exec) move(f *os.File, stream string, sink Sink) error {
	rc, err := f.SyscallConn()
	if err != nil {
		return fmt.Errorf("read %s: %w", f.Name(), err)
	}
	once := e.once(stream, sink)
	if e.tty { // bytes that the daemon before left in the relay
		if _, err := e.relayed(sink, stream); err != nil {
			return err
		}
	}
	var pace Pace
	for {
		var n int
		var got error
		err := rc.Read(func(fd uintptr) bool {
			if e.tty {
				return ready(int(fd), unix.POLLIN)
			}
			n, got = once(int(fd), spliceSize)
			return !errors.Is(got, unix.EAGAIN)
		})
		if err == nil && e.tty {
			n, got = once(-1, spliceSize)
		}
		if err == nil {
			err = got
		}
		switch {
		case err == nil && n > 0:
			if !sink.Followed() {
				pace.Wait(e.over, 2) // to move is twice the work of a read
			}
		case e.tty && errors.Is(err, unix.EAGAIN):
		case err == nil, errors.Is(err, io.EOF), errors.Is(err, errHeld), e.tty && errors.Is(err, unix.EIO):
			return nil
		case errors.Is(err, os.ErrDeadlineExceeded):
			return e.drainBy(f, once)
		default:
			return fmt.Errorf("read %s: %w", f.Name(), err)
		}
	}
}

// once returns a function that moves at most a number of bytes from a descriptor to the sink. With
// a terminal it ignores the descriptor.
func (e *Exec) once(stream string, sink Sink) func(fd, most int) (int, error) {
	if !e.tty {
		return func(fd, most int) (int, error) {
			return sink.Take(stream, func(file int) (int, error) { return splice(fd, file, most) })
		}
	}
	return func(_, most int) (int, error) {
		n, err := e.relay(sink, func(fd int) bool { return ready(fd, unix.POLLIN) }, most)
		if err != nil || n == 0 {
			return n, err
		}
		return e.relayed(sink, stream)
	}
}

// relay moves the content of a terminal to the relay, if it is ready. While a splice is held, the
// kernel keeps the relay locked. Then no other goroutine may read from it, and its last descriptor
// must stay open: closing it would block.
func (e *Exec) relay(sink Sink, ready func(fd int) bool, most int) (int, error) {
	r, w := sink.Relay()
	return e.abandonable(func(own []int) (int, error) {
		if !ready(own[0]) {
			return 0, unix.EAGAIN
		}
		return splice(own[0], own[1], most)
	}, w, r)
}

// relayed empties the relay.
func (e *Exec) relayed(sink Sink, stream string) (total int, err error) {
	r, _ := sink.Relay()
	for {
		n, err := sink.Take(stream, func(file int) (int, error) { return splice(int(r.Fd()), file, spliceSize) })
		total += n
		switch {
		case errors.Is(err, unix.EAGAIN), err == nil && n == 0:
			return total, nil
		case err != nil:
			return total, fmt.Errorf("move the terminal's output: %w", err)
		}
	}
}

// drainBy is drain for output that is moved.
func (e *Exec) drainBy(f *os.File, once func(fd, most int) (int, error)) error {
	if e.tty {
		return e.drained(f, 128<<10, -1, once) // the bound of drain
	}
	rc, err := f.SyscallConn()
	if err != nil {
		return fmt.Errorf("drain %s: %w", f.Name(), err)
	}
	var failed error
	if err := rc.Control(func(fd uintptr) {
		left, err := unix.IoctlGetInt(int(fd), unix.TIOCINQ)
		if err != nil {
			failed = fmt.Errorf("drain %s: %w", f.Name(), err)
			return
		}
		failed = e.drained(f, left, int(fd), once)
	}); err != nil {
		return fmt.Errorf("drain %s: %w", f.Name(), err)
	}
	return failed
}

// drained moves the current content, at most left bytes.
func (e *Exec) drained(f *os.File, left, fd int, once func(fd, most int) (int, error)) error {
	for left > 0 {
		n, err := once(fd, min(left, spliceSize))
		switch {
		case errors.Is(err, unix.EAGAIN), e.tty && errors.Is(err, unix.EIO), errors.Is(err, errHeld), err == nil && n == 0:
			return nil
		case err != nil:
			return fmt.Errorf("drain %s: %w", f.Name(), err)
		}
		left -= n
	}
	return nil
}
