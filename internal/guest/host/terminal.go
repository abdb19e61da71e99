package host

import (
	"github.com/sandboxd/sandboxd/internal/unixmsg"

	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// terminal checks that what init sent is the master of a pseudoterminal, and takes it over. On error it has closed fd.
//
// The file is shared with init, which may make it blocking again, and take what there is to read: see alone.
func terminal(fd int) (*os.File, error) {
	var st unix.Stat_t
	err := unix.Fstat(fd, &st)
	switch {
	case err != nil:
	case st.Mode&unix.S_IFMT != unix.S_IFCHR || st.Rdev != unix.Mkdev(5, 2):
		err = errors.New("init's descriptor is not a terminal's master")
	default:
		// Only a master has a number, and only on a devpts.
		if _, err = unix.IoctlGetInt(fd, unix.TIOCGPTN); err == nil {
			err = unix.SetNonblock(fd, true)
		}
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("check terminal: %w", err)
	}
	return os.NewFile(uintptr(fd), "tty"), nil
}

// heldGrace is how long a terminal may hold a read or a write that must not block, on a machine that is busy.
const heldGrace = 2 * time.Second

// errHeld means that init holds a read or a write of its terminal's master, and nobody waits for that any more.
var errHeld = errors.New("the terminal is held by the sandbox's init")

// letGo says that a terminal is not to be waited for any more.
func (e *Exec) letGo() {
	e.stop.Do(func() {
		if e.stopped != nil {
			close(e.stopped)
		}
	})
}

// maxTurns is how many reads and writes of terminals of one sandbox may be under way: each that is held has a thread, of which
// the daemon has not many for all.
const maxTurns = 8

// turns are given out to whoever reads from or writes to a terminal, by the socket of its init.
type turns struct {
	mu sync.Mutex
	of map[string]*turn
}

type turn struct {
	users int
	free  chan struct{} // has as many as there are left
}

// terminals are those of all sandboxes: a Client is one request's.
var terminals = turns{of: make(map[string]*turn)}

// enter returns where to receive a turn. Leave follows, after the turn, if there was one, has been given back.
func (t *turns) enter(socket string) chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	of := t.of[socket]
	if of == nil {
		of = &turn{free: make(chan struct{}, maxTurns)}
		for range maxTurns {
			of.free <- struct{}{}
		}
		t.of[socket] = of
	}
	of.users++
	return of.free
}

func (t *turns) leave(socket string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.of[socket].users--; t.of[socket].users == 0 {
		delete(t.of, socket)
	}
}

// unlessHeld receives from c, unless nobody wants the exec any more and it takes too long.
func unlessHeld[T any](e *Exec, c <-chan T) (v T, err error) {
	select {
	case v = <-c:
		return v, nil
	case <-e.stopped:
	}
	t := time.NewTimer(heldGrace)
	defer t.Stop()
	select {
	case v = <-c:
		return v, nil
	case <-t.C:
		return v, errHeld
	}
}

// alone reads from or writes to a terminal's master. Whether that blocks is init's to say, who shares the file, at any moment, and
// whether there is anything to read: so it is left alone when the exec has ended or nobody wants it any more, and ends with the
// sandbox at the latest. Nothing of the exec waits for it then. So do gets descriptors of its own, of the terminal and of the other
// files that it needs: theirs may have been closed, and their numbers be others' by then.
func (e *Exec) alone(do func(own []int) (int, error), others ...*os.File) (int, error) {
	socket := e.client.path
	free := terminals.enter(socket)
	if _, err := unlessHeld(e, free); err != nil {
		terminals.leave(socket)
		return 0, err
	}
	var own []int
	end := func() {
		unixmsg.CloseAll(own)
		free <- struct{}{}
		terminals.leave(socket)
	}
	for _, f := range append([]*os.File{e.Stdout}, others...) {
		fd, err := duplicate(f)
		if err != nil {
			end()
			return 0, err
		}
		own = append(own, fd)
	}
	type result struct {
		n   int
		err error
	}
	done := make(chan result, 1)
	go func() {
		n, err := do(own)
		done <- result{n, err}
	}()
	r, err := unlessHeld(e, done)
	if err != nil {
		go func() {
			tick := time.NewTicker(time.Second)
			defer tick.Stop()
			for {
				select {
				case <-done:
					end()
					return
				case <-tick.C:
					rouse(own[0])
				}
			}
		}()
		return 0, err
	}
	end()
	return r.n, r.err
}

// rouse ends a write to a terminal unless init sees to it that it goes on. Without that one does not end with the sandbox: for the
// kernel a master's other end is there for as long as the master is.
func rouse(fd int) {
	const off, on = 0, 1 // TCOOFF, TCOON
	_ = unix.SetNonblock(fd, true)
	_ = unix.IoctlSetInt(fd, unix.TCXONC, off)
	_ = unix.IoctlSetInt(fd, unix.TCXONC, on) // wakes whoever writes
}

// duplicate is another descriptor of a file that may be closed at any time.
func duplicate(f *os.File) (int, error) {
	rc, err := f.SyscallConn()
	if err != nil {
		return -1, err
	}
	own := -1
	if cerr := rc.Control(func(fd uintptr) { own, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0) }); cerr != nil {
		return -1, os.ErrClosed
	}
	return own, err
}

// ready tells, without waiting, whether something can be read or written, or never will.
func ready(fd int, events int16) bool {
	p := []unix.PollFd{{Fd: int32(fd), Events: events}} //nolint:gosec // descriptors are small
	n, err := unix.Poll(p, 0)
	return n != 0 || err != nil && !errors.Is(err, unix.EINTR)
}

// Write writes to the process's stdin, which is not nil. Its write deadline holds while the process does not read.
func (e *Exec) Write(p []byte) (int, error) {
	if !e.tty {
		return e.Stdin.Write(p)
	}
	rc, err := e.Stdin.SyscallConn()
	if err != nil {
		return 0, err
	}
	data := bytes.Clone(p) // a write that is left alone has it for longer
	for len(data) > 0 {
		// Whoever wakes another that is held wakes us, and the terminal may never have room again.
		select {
		case <-e.stopped:
			return len(p) - len(data), errHeld
		default:
		}
		if err := rc.Write(func(fd uintptr) bool { return ready(int(fd), unix.POLLOUT) }); err != nil {
			return len(p) - len(data), err
		}
		n, err := e.alone(func(own []int) (int, error) { return unix.Write(own[0], data) })
		if err != nil && !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) {
			return len(p) - len(data), err
		}
		data = data[max(n, 0):]
	}
	return len(p), nil
}

// readTTY is Read of a terminal's master.
func (e *Exec) readTTY(buf []byte) (int, error) {
	rc, err := e.Stdout.SyscallConn()
	if err != nil {
		return 0, err
	}
	for {
		if err := rc.Read(func(fd uintptr) bool { return ready(int(fd), unix.POLLIN) }); err != nil {
			return 0, err
		}
		n, err := e.readNow(buf)
		if !errors.Is(err, unix.EAGAIN) {
			return n, err
		}
	}
}

// readNow reads what a terminal's master has, or says EAGAIN.
func (e *Exec) readNow(buf []byte) (int, error) {
	n, err := e.alone(func(own []int) (int, error) {
		for {
			if !ready(own[0], unix.POLLIN) {
				return 0, unix.EAGAIN
			}
			n, err := unix.Read(own[0], buf)
			if !errors.Is(err, unix.EINTR) {
				return n, err
			}
		}
	})
	if n == 0 && err == nil {
		err = io.EOF
	}
	return max(n, 0), err
}
