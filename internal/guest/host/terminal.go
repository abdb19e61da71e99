package host

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/internal/guest"
	"github.com/sandboxd/sandboxd/internal/unixmsg"

	"golang.org/x/sys/unix"
)

// terminal checks that a descriptor of init's is the master of a pseudoterminal, and takes it over.
// On error it has closed fd.
//
// Init shares the file: it may make it blocking again, and take the bytes that a read waits for.
// See abandonable.
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
	f := os.NewFile(uintptr(fd), "tty")
	if err := guest.Waitable(f); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("check terminal: %w", err)
	}
	return f, nil
}

// heldGrace is the time that a non-blocking read or write of a terminal may take on a busy machine.
const heldGrace = 2 * time.Second

// errHeld reports that init blocks a read or a write of its terminal's master, and that the exec no
// longer waits for it.
var errHeld = errors.New("the terminal is held by the sandbox's init")

// abandon ends the waits for a terminal.
func (e *Exec) abandon() {
	e.stop.Do(func() {
		if e.stopped != nil {
			close(e.stopped)
		}
	})
}

// maxTerminalOps bounds the reads and writes under way on terminals of one sandbox. Each one that
// is held occupies a thread, and the daemon has few for all sandboxes.
const maxTerminalOps = 8

// terminalSlots holds one semaphore for each sandbox, by the socket of its init.
type terminalSlots struct {
	mu sync.Mutex
	of map[string]*terminalSlot
}

type terminalSlot struct {
	users int
	free  chan struct{} // has a value for each free slot
}

// terminals covers all sandboxes: a Client belongs to one request.
var terminals = terminalSlots{of: make(map[string]*terminalSlot)}

// acquire returns the channel from which to receive a slot. After the slot, if one was received, is
// back in the channel, call release.
func (t *terminalSlots) acquire(socket string) chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	of := t.of[socket]
	if of == nil {
		of = &terminalSlot{free: make(chan struct{}, maxTerminalOps)}
		for range maxTerminalOps {
			of.free <- struct{}{}
		}
		t.of[socket] = of
	}
	of.users++
	return of.free
}

func (t *terminalSlots) release(socket string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.of[socket].users--; t.of[socket].users == 0 {
		delete(t.of, socket)
	}
}

// unlessHeld receives from c. Once the exec is abandoned, it waits for heldGrace at most.
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

// abandonable reads from or writes to a terminal's master, in a goroutine that the exec can
// abandon. Init shares the file, and can make it block at any moment. So the operation is abandoned
// when the exec has ended or is closed; it ends with the sandbox at the latest. Do gets descriptors
// of its own, of the terminal and of the other files: the exec's may be closed by then, and their
// numbers reused.
func (e *Exec) abandonable(do func(own []int) (int, error), others ...*os.File) (int, error) {
	socket := e.client.path
	free := terminals.acquire(socket)
	if _, err := unlessHeld(e, free); err != nil {
		terminals.release(socket)
		return 0, err
	}
	var own []int
	end := func() {
		unixmsg.CloseAll(own)
		free <- struct{}{}
		terminals.release(socket)
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

// rouse ends a write to a terminal, unless init keeps it going. Without it, the write would outlive
// the sandbox: for the kernel a master's other end exists as long as the master does.
func rouse(fd int) {
	const off, on = 0, 1 // TCOOFF, TCOON
	_ = unix.SetNonblock(fd, true)
	_ = unix.IoctlSetInt(fd, unix.TCXONC, off)
	_ = unix.IoctlSetInt(fd, unix.TCXONC, on) // wakes every writer
}

// duplicate returns another descriptor of a file that may be closed at any time.
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

// ready reports, without waiting, whether a file can be read or written, or never will be.
func ready(fd int, events int16) bool {
	p := []unix.PollFd{{Fd: int32(fd), Events: events}} //nolint:gosec // descriptors are small
	for {
		n, err := unix.Poll(p, 0)
		if !errors.Is(err, unix.EINTR) { // with which n is -1 and says nothing of the file
			return n != 0
		}
	}
}

// Write writes to the process's stdin, which is not nil. Its write deadline holds while the process
// does not read.
func (e *Exec) Write(p []byte) (int, error) {
	if !e.tty {
		return e.Stdin.Write(p)
	}
	rc, err := e.Stdin.SyscallConn()
	if err != nil {
		return 0, err
	}
	data := bytes.Clone(p) // an abandoned write keeps it
	for len(data) > 0 {
		// Any held write that is woken wakes this one too, and the terminal may never have room again.
		select {
		case <-e.stopped:
			return len(p) - len(data), errHeld
		default:
		}
		if err := rc.Write(func(fd uintptr) bool { return ready(int(fd), unix.POLLOUT) }); err != nil {
			return len(p) - len(data), err
		}
		n, err := e.abandonable(func(own []int) (int, error) { return unix.Write(own[0], data) })
		if err != nil && !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) {
			return len(p) - len(data), err
		}
		data = data[max(n, 0):]
	}
	return len(p), nil
}

// readTTY is Read on a terminal's master.
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

// readNow reads the current content of a terminal's master, or returns EAGAIN.
func (e *Exec) readNow(buf []byte) (int, error) {
	n, err := e.abandonable(func(own []int) (int, error) {
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
