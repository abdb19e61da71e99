package inside

import (
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// How init waits for descriptors.
//
// The runtime's poller is an epoll instance, and the kernel counts the watches of all instances of
// a user of the host (fs.epoll.max_user_watches). Another sandbox with the same ids can use them
// up. So init charges its instance to an id of its own ([takeOwnUser]) and has it from the start
// ([startPoller]). Where the runtime's poller has no watch for a descriptor, poll(2) waits for it,
// which needs none.

// takeOwnUser gives every thread of init another real uid, drawn by lot, where the sandbox has
// several ids. It returns that id. The kernel counts by it most of the things that a user may have:
// epoll and inotify watches, descriptors in flight, pages of pipes, keys, processes and threads
// (of RLIMIT_NPROC). Programs of this sandbox and of others use them up for their own ids. It also
// refuses them to change init's limits (prlimit demands that all three uids are the caller's).
// Permissions do not depend on the real uid.
func takeOwnUser(ids uint32) (uint32, error) {
	const fewest = 16
	if ids < fewest {
		return 0, nil
	}
	// The upper half has no distribution's users. The last two ids stand for unmapped users.
	own := ids/2 + rand.Uint32N(ids-ids/2-2) //nolint:gosec // the runtime seeds it by chance, once for each init
	const same = ^uintptr(0)
	_, _, errno := syscall.AllThreadsSyscall(unix.SYS_SETRESUID, uintptr(own), same, same)
	if errno == unix.EPERM || errno == unix.ENOSYS { // a custom profile refuses the call
		return 0, nil
	}
	if errno != 0 {
		return 0, errno
	}
	return own, nil
}

// startPoller starts the runtime's poller, which otherwise starts with the first timer or file, and
// ends the program if the kernel refuses it an instance or the watch of its wake-up.
func startPoller() error {
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(ep) }()
	ev, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(ev) }()
	if err := unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, ev, &unix.EpollEvent{Events: unix.EPOLLIN}); err != nil {
		return err
	}
	time.AfterFunc(time.Hour, func() {}).Stop()
	return nil
}

// A file is a descriptor that goroutines wait for: an *os.File, or a [polled].
type file interface {
	io.ReadWriteCloser
	SyscallConn() (syscall.RawConn, error)
	SetDeadline(t time.Time) error
	SetReadDeadline(t time.Time) error
	SetWriteDeadline(t time.Time) error
}

// open takes over a non-blocking descriptor.
func (p *poller) open(fd int, name string) file {
	if !p.always {
		f := os.NewFile(uintptr(fd), name)
		if f.SetDeadline(time.Time{}) == nil {
			return f
		}
		// The runtime's poller has no watch for it. The number must outlive the file.
		if own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0); err == nil {
			_ = f.Close()
			fd = own
		} else {
			return f // no descriptor left: the first wait fails
		}
	}
	return &polled{p: p, fd: fd}
}

// A poller waits for descriptors by poll(2), for all goroutines on one thread.
type poller struct {
	wake   int  // an eventfd, which ends the poll(2) under way
	always bool // for tests: the runtime's poller is not asked

	mu    sync.Mutex
	some  *sync.Cond // signalled when waits is no longer empty
	waits []*pollWait
}

// A pollWait is one wait of one goroutine.
type pollWait struct {
	f      *polled
	events int16
	done   chan error
}

func newPoller() (*poller, error) {
	wake, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, err
	}
	p := &poller{wake: wake}
	p.some = sync.NewCond(&p.mu)
	go p.run()
	return p, nil
}

// poke has the waits looked at again.
func (p *poller) poke() {
	one := [8]byte{1} // any number but zero
	_, _ = unix.Write(p.wake, one[:])
}

// run serves the waits, as long as init runs.
func (p *poller) run() {
	var fds []unix.PollFd
	for {
		p.mu.Lock()
		for len(p.waits) == 0 {
			p.some.Wait()
		}
		fds = append(fds[:0], unix.PollFd{Fd: int32(p.wake), Events: unix.POLLIN}) //nolint:gosec // descriptors are small
		var first time.Time
		for _, w := range p.waits {
			fds = append(fds, unix.PollFd{Fd: int32(w.f.fd), Events: w.events}) //nolint:gosec // as above
			if until := w.f.until(w.events); !until.IsZero() && (first.IsZero() || until.Before(first)) {
				first = until
			}
		}
		p.mu.Unlock()
		var timeout *unix.Timespec
		if !first.IsZero() {
			ts := unix.NsecToTimespec(int64(max(0, time.Until(first))))
			timeout = &ts
		}
		_, err := unix.Ppoll(fds, timeout, nil)
		if err != nil && !errors.Is(err, unix.EINTR) {
			<-time.After(pollPause) // ENOMEM, or EINVAL with a lowered limit of descriptors
			clear(fds)
		}
		var count [8]byte
		_, _ = unix.Read(p.wake, count[:])
		p.mu.Lock()
		left := p.waits[:0]
		for i, w := range p.waits {
			ready := i+1 < len(fds) && fds[i+1].Revents != 0 // later ones have come meanwhile
			if err, over := w.f.outcome(w.events, ready); over {
				w.done <- err
			} else {
				left = append(left, w)
			}
		}
		clear(p.waits[len(left):])
		p.waits = left
		p.mu.Unlock()
	}
}

// pollPause is the time between calls of poll(2) that fail.
const pollPause = 10 * time.Millisecond

// wait returns when the file is ready for events, closed, or past its deadline.
func (p *poller) wait(f *polled, events int16) error {
	w := &pollWait{f: f, events: events, done: make(chan error, 1)}
	p.mu.Lock()
	p.waits = append(p.waits, w)
	p.some.Signal()
	p.mu.Unlock()
	p.poke()
	return <-w.done
}

// A polled is a file whose poller is ours. It has the semantics of an *os.File.
type polled struct {
	p  *poller
	fd int // stays open until the last use has ended

	mu          sync.Mutex
	users       int
	closed      bool
	read, write time.Time // deadlines; zero means none
}

// use keeps the descriptor open until release is called.
func (f *polled) use() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return os.ErrClosed
	}
	f.users++
	return nil
}

func (f *polled) release() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.users--; f.closed && f.users == 0 {
		_ = unix.Close(f.fd)
	}
}

// Close implements [io.Closer]. Waits end.
func (f *polled) Close() error {
	f.mu.Lock()
	if f.closed {
		f.mu.Unlock()
		return os.ErrClosed
	}
	f.closed = true
	unused := f.users == 0
	f.mu.Unlock()
	if unused {
		return unix.Close(f.fd)
	}
	f.p.poke()
	return nil
}

func (f *polled) until(events int16) time.Time {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.closed:
		return time.Unix(1, 0)
	case events == unix.POLLIN:
		return f.read
	}
	return f.write
}

// outcome returns the end of a wait, if it has come.
func (f *polled) outcome(events int16, ready bool) (error, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	until := f.read
	if events != unix.POLLIN {
		until = f.write
	}
	switch {
	case f.closed:
		return os.ErrClosed, true
	case !until.IsZero() && !time.Now().Before(until):
		return os.ErrDeadlineExceeded, true
	}
	return nil, ready
}

// SetDeadline implements [file].
func (f *polled) SetDeadline(t time.Time) error { return f.set(t, &f.read, &f.write) }

// SetReadDeadline implements [file].
func (f *polled) SetReadDeadline(t time.Time) error { return f.set(t, &f.read) }

// SetWriteDeadline implements [file].
func (f *polled) SetWriteDeadline(t time.Time) error { return f.set(t, &f.write) }

func (f *polled) set(t time.Time, which ...*time.Time) error {
	f.mu.Lock()
	closed := f.closed
	for _, w := range which {
		*w = t
	}
	f.mu.Unlock()
	if closed {
		return os.ErrClosed
	}
	f.p.poke()
	return nil
}

// await calls try until it reports that it is done.
func (f *polled) await(events int16, try func(fd uintptr) bool) error {
	if err := f.use(); err != nil {
		return err
	}
	defer f.release()
	for {
		if err, over := f.outcome(events, false); over {
			return err
		}
		if try(uintptr(f.fd)) {
			return nil
		}
		if err := f.p.wait(f, events); err != nil {
			return err
		}
	}
}

// SyscallConn implements [file].
func (f *polled) SyscallConn() (syscall.RawConn, error) { return rawPolled{f}, nil }

// Read implements [io.Reader].
func (f *polled) Read(b []byte) (n int, err error) {
	werr := f.await(unix.POLLIN, func(fd uintptr) bool {
		n, err = unix.Read(int(fd), b)
		return !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR)
	})
	if werr != nil {
		return 0, werr
	}
	if n == 0 && err == nil && len(b) > 0 {
		return 0, io.EOF
	}
	return max(n, 0), err
}

// Write implements [io.Writer].
func (f *polled) Write(b []byte) (total int, err error) {
	for total < len(b) {
		var n int
		werr := f.await(unix.POLLOUT, func(fd uintptr) bool {
			n, err = unix.Write(int(fd), b[total:])
			return !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR)
		})
		if werr != nil {
			return total, werr
		}
		if err != nil {
			return total, err
		}
		total += n
	}
	return total, nil
}

// rawPolled is a polled as a [syscall.RawConn].
type rawPolled struct{ f *polled }

// Control implements [syscall.RawConn].
func (r rawPolled) Control(f func(fd uintptr)) error {
	if err := r.f.use(); err != nil {
		return err
	}
	defer r.f.release()
	f(uintptr(r.f.fd))
	return nil
}

// Read implements [syscall.RawConn].
func (r rawPolled) Read(f func(fd uintptr) bool) error { return r.f.await(unix.POLLIN, f) }

// Write implements [syscall.RawConn].
func (r rawPolled) Write(f func(fd uintptr) bool) error { return r.f.await(unix.POLLOUT, f) }
