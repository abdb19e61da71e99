package host

import (
	"github.com/sandboxd/sandboxd/internal/guest"

	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// How an exec survives the daemon.
//
// Nothing of it lives in the daemon's memory alone. Its exit stays in the queue of init's connection, which is only looked at
// (MSG_PEEK). Its output is moved by splice(2) from the pipe to a file of memory without passing through the daemon: the kernel
// takes the bytes out of the pipe and advances the file's own offset in one system call, so a daemon that is killed at
// whatever moment has taken just as many bytes as the file has, and the rest waits in the pipe. A terminal cannot be spliced to
// a file, so there a pipe stands between, the relay, which outlives the daemon like the others. What remains for the
// daemon is to keep copies of all these descriptors alive elsewhere; package launcher does.

// Kept are the descriptors of an exec that was started with [ExecRequest.Keep], for another daemon to go on with it. They are
// the exec's; do not close them.
type Kept struct {
	Conn                  *os.File // init's connection
	Stdin, Stdout, Stderr *os.File // of a terminal Stdout is its master, and the others are nil
}

// Kept gives the descriptors.
func (e *Exec) Kept() Kept {
	k := Kept{Conn: e.conn.File(), Stdin: e.Stdin, Stdout: e.Stdout, Stderr: e.Stderr}
	if e.tty {
		k.Stdin = nil
	}
	return k
}

// Adopt goes on with an exec that another daemon has started at begun, with these descriptors, which it takes over even on error. A
// connection on which the exit has been told may be nil: then Wait must not be called.
func (c *Client) Adopt(k Kept, r ExecRequest, pid int, begun time.Time) (_ *Exec, err error) {
	e := &Exec{
		PID: pid, Stdin: k.Stdin, Stdout: k.Stdout, Stderr: k.Stderr,
		client: c, tty: r.TTY, keep: true, timeout: r.Timeout, over: make(chan struct{}),
		// Begun stays zero: whether init's account of the time can be true cannot be told by another daemon's clock.
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

// A Sink takes the output of an exec that is kept.
type Sink interface {
	// Take calls move, which moves bytes to the file at its offset and returns how many, and notes of which stream they are.
	// Calls come from two goroutines.
	Take(stream string, move func(file int) (int, error)) (int, error)
	// Relay is the pipe for a terminal's output, nil without one.
	Relay() (r, w *os.File)
	// Followed says that somebody reads the output as it comes: then it is taken as fast as it does.
	Followed() bool
}

// Spool is [Exec.Stream] for an exec that is kept, with a sink instead of a function. Where ctx ends it returns and leaves the
// exec alone.
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

// spliceSize is how much is moved at a time: what a pipe holds by default.
const spliceSize = 64 << 10

func splice(from, to, most int) (int, error) {
	for {
		n, err := unix.Splice(from, nil, to, nil, most, unix.SPLICE_F_NONBLOCK)
		if !errors.Is(err, unix.EINTR) {
			return int(n), err
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
	if e.tty { // what the daemon before had on its way
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
				pace.Wait(e.over, 2) // to move it is twice the work
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

// once moves at most so many bytes from a descriptor to the sink; from the terminal, if there is one, whatever the descriptor.
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

// relay moves what a terminal has to the relay, if it is ready. The kernel has the relay locked for as long as that is held: nobody
// may read from it then, and it is not let go of, for which the last one that has a descriptor of either end would wait.
func (e *Exec) relay(sink Sink, ready func(fd int) bool, most int) (int, error) {
	r, w := sink.Relay()
	return e.alone(func(own []int) (int, error) {
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
		return e.drained(f, 128<<10, -1, once) // as in drain
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

// drained moves what is there, and at most so much.
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
