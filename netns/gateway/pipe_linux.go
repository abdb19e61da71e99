package gateway

import (
	"errors"
	"io"
	"math"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

const (
	// pipeSize is the capacity of a pipe, and spliceSize the most that one splice asks for.
	pipeSize   = 256 << 10
	spliceSize = 1 << 20
	// maxPipes bounds the pipes of a network that hold bytes. Pipes are charged to the user of the
	// process (pipe-user-pages-soft), and a slow reader holds one for as long as it likes.
	maxPipes = 8
)

// A pipe carries bytes from one socket to another within the kernel.
type pipe struct{ r, w int }

// freePipes are empty pipes of all networks. They are within the pool's reserve.
var freePipes = make(chan pipe, 16)

// takePipe returns an empty pipe, or false if the network has no more.
func (n *Network) takePipe() (pipe, bool) {
	if n.pipes.Add(1) > maxPipes {
		n.pipes.Add(-1)
		return pipe{}, false
	}
	if !n.places.take(forPipe) {
		n.pipes.Add(-1)
		return pipe{}, false
	}
	select {
	case p := <-freePipes:
		return p, true
	default:
	}
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		n.places.give(forPipe, 1)
		n.pipes.Add(-1)
		return pipe{}, false
	}
	_, _ = unix.FcntlInt(uintptr(fds[1]), unix.F_SETPIPE_SZ, pipeSize) // a user above the soft limit keeps a small one
	return pipe{fds[0], fds[1]}, true
}

// putPipe gives a pipe back. One that still has bytes is closed.
func (n *Network) putPipe(p pipe, empty bool) {
	defer n.pipes.Add(-1)
	defer n.places.give(forPipe, 1)
	if empty {
		select {
		case freePipes <- p:
			return
		default:
		}
	}
	_ = unix.Close(p.r)
	_ = unix.Close(p.w)
}

// splice waits for bytes and moves them from one socket to another by a pipe, which it holds only
// while there are bytes. It tells account of them before they are passed on, and adds them to
// passed afterwards. Where no pipe is free, or TLS
// ends here, it calls pass. It returns io.EOF at the end.
func (f *flow) splice(from, to *stream, account func(int) error, passed *atomic.Int64, pass func([]byte) error) error {
	if from.tls != nil || to.tls != nil || from.head != nil && from.head.Buffered() > 0 {
		return from.chunk(math.MaxInt64, pass)
	}
	var p pipe
	var held bool
	var size int64
	var spliceErr error
	err := from.raw.Read(func(fd uintptr) bool {
		if p, held = f.n.takePipe(); !held {
			return true
		}
		size, spliceErr = splice(int(fd), p.w, spliceSize)
		if errors.Is(spliceErr, unix.EAGAIN) {
			f.n.putPipe(p, true)
			held = false
			return false // wait without a pipe
		}
		return true
	})
	switch {
	case !held && err != nil:
		return err
	case !held:
		return from.chunk(math.MaxInt64, pass)
	}
	defer func() { f.n.putPipe(p, size == 0) }()
	switch {
	case err != nil:
		return err
	case spliceErr != nil:
		return opError("read", from, spliceErr)
	case size == 0:
		return io.EOF
	}
	if err := account(int(size)); err != nil {
		return err
	}
	for size > 0 {
		var n int64
		err := to.raw.Write(func(fd uintptr) bool {
			n, spliceErr = splice(p.r, int(fd), int(size))
			return !errors.Is(spliceErr, unix.EAGAIN)
		})
		if err != nil {
			return err
		} else if spliceErr != nil {
			return opError("write", to, spliceErr)
		}
		passed.Add(n)
		if size -= n; size > 0 {
			f.touch() // a slow reader is not idle
		}
	}
	return nil
}

func splice(from, to, most int) (int64, error) {
	for {
		n, err := unix.Splice(from, nil, to, nil, most, unix.SPLICE_F_NONBLOCK|unix.SPLICE_F_MOVE)
		if !errors.Is(err, unix.EINTR) {
			return max(n, 0), err
		}
	}
}
