package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api/client"
)

// connectPipes connects our own streams to a program's pipes until the program has ended and all of
// its output is written. It closes the pipes.
//
// The program never gets our streams themselves: it could open a pipe for the other direction
// through /proc, read what other programs write into it, and keep it open after its end. Output is
// moved from pipe to pipe without a copy.
//
// Signals are passed on by send. If one has come before the program's end, and our reader takes
// nothing for the time of patience after it, the rest of the output is dropped, as it is at once
// when one comes after the end: a stalled reader must not keep the command from ending.
func connectPipes(ctx context.Context, p *client.Pipes, signals <-chan string, send func(string) error, stdin, stdout, stderr *os.File, patience time.Duration) (*client.End, error) {
	defer p.Close()
	var copies sync.WaitGroup
	defer copies.Wait()
	var mu sync.Mutex
	var failed error // the first failure of a copy
	fail := func(err error) {
		mu.Lock()
		defer mu.Unlock()
		if failed == nil {
			failed = err
		}
		p.Kill()
	}
	ended, err := newBell()
	if err != nil {
		return nil, err
	}
	defer ended.close()
	hurry, err := newBell()
	if err != nil {
		return nil, err
	}
	defer hurry.close()
	waning, err := newBell()
	if err != nil {
		return nil, err
	}
	defer waning.close()
	var sender sync.WaitGroup
	defer sender.Wait()
	quit := make(chan struct{})
	defer close(quit)
	var signalled atomic.Bool
	sender.Go(func() {
		for {
			select {
			case <-quit:
				return
			case <-ctx.Done(): // a second interrupt, which needs no sending
				hurry.ring()
				return
			case sig := <-signals:
				signalled.Store(true)
				if ended.rung.Load() {
					hurry.ring()
				} else if err := send(sig); err != nil {
					fail(fmt.Errorf("send %s to the program: %w", sig, err))
				}
			}
		}
	})
	var in *interruptible
	if p.Stdin != nil {
		if in, err = newInterruptible(stdin); err != nil {
			return nil, err
		}
		// Interrupt a pending Read, which would take the terminal's next line from the shell.
		defer in.interrupt()
	}
	for _, o := range []output{{from: p.Stdout, to: stdout}, {from: p.Stderr, to: stderr}} {
		o.ended, o.hurry, o.waning, o.patience = ended, hurry, waning, patience
		copies.Go(func() {
			if err := o.copy(); err != nil && !errors.Is(err, errDropped) {
				fail(fmt.Errorf("write %s: %w", o.from.Name(), err))
			}
		})
	}
	if p.Stdin != nil {
		go feed(p.Stdin, in, fail) // a Read of a file that poll calls ready may block after our return
	}
	end, err := p.Wait()
	ended.ring()
	if signalled.Load() {
		waning.ring()
	}
	copies.Wait()
	mu.Lock()
	defer mu.Unlock()
	if failed != nil {
		return nil, failed
	}
	return end, err
}

// readerPatience is the patience with a reader of output that has stalled, once a signal has come.
const (
	readerPatience = 5 * time.Second
	patienceStep   = 100 * time.Millisecond
)

// feed copies our stdin to the program's. A program that does not read it is no failure.
func feed(to *os.File, from io.Reader, fail func(error)) {
	defer to.Close()
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			if _, err := to.Write(buf[:n]); err != nil {
				return // the program has closed its stdin, or has ended
			}
		}
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			fail(fmt.Errorf("read stdin: %w", err))
			return
		}
	}
}

// A bell wakes goroutines that poll.
type bell struct {
	rung atomic.Bool
	r, w *os.File
}

func newBell() (*bell, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("make a pipe: %w", err)
	}
	return &bell{r: r, w: w}, nil
}

func (b *bell) ring() {
	b.rung.Store(true)
	_ = b.w.Close() // closing a pipe does not fail
}

// close releases the bell when no goroutine polls any more.
func (b *bell) close() {
	_ = b.w.Close() // perhaps again
	_ = b.r.Close()
}

// output is one stream of a program.
type output struct {
	from  *os.File // our end of its pipe
	to    *os.File
	ended *bell // rings when the program has ended
	hurry *bell // rings when the command is to end, whether the output is read or not

	waning   *bell         // rings when the command is to end unless the output is read; nil for never
	patience time.Duration // the time without a reader after which it ends then
}

// errDropped reports that the rest of the output was not written: its reader is stalled.
var errDropped = errors.New("the output is not read")

// room waits until our reader takes more. It returns errDropped if hurry rings first, or if waning
// does and the reader takes nothing for the time of patience.
func (o *output) room(to int) error {
	fds := []unix.PollFd{{Fd: int32(to), Events: unix.POLLOUT}} //nolint:gosec // descriptors are small
	for _, b := range []*bell{o.hurry, o.waning} {
		if b == nil {
			continue
		}
		fd, err := descriptor(b.r)
		if err != nil {
			return err
		}
		fds = append(fds, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN}) //nolint:gosec // descriptors are small
	}
	err := await(-1, fds...)
	// In steps, because a machine that was suspended has not given the reader that time.
	for waited := time.Duration(0); err == nil && fds[0].Revents == 0 && fds[1].Revents == 0 && waited < o.patience; waited += patienceStep {
		err = await(patienceStep, fds[:2]...) // waning has rung
	}
	if err == nil && fds[0].Revents == 0 {
		return errDropped
	}
	return err
}

// moveSize is the number of bytes that a splice moves at most: a pipe of the largest size.
const moveSize = 1 << 20

// growAfter is the number of bytes after which larger pipes pay: they save half the time of large
// output, which is switches between processes.
const growAfter = 1 << 20

// grow makes a pipe as large as one may be. Where the user has too many large ones, or fd is no
// pipe, it stays as it is.
func grow(fd int) {
	if size, err := unix.FcntlInt(uintptr(fd), unix.F_GETPIPE_SZ, 0); err == nil && size < moveSize {
		_, _ = unix.FcntlInt(uintptr(fd), unix.F_SETPIPE_SZ, moveSize)
	}
}

// copy moves all that the program writes. After the program's end it moves the pipe's content at
// that time: processes that were left behind may keep the pipe open, and write, for ever.
func (o *output) copy() error {
	from, err := descriptor(o.from)
	if err != nil {
		return err
	}
	to, err := descriptor(o.to)
	if err != nil {
		return err
	}
	bell, err := descriptor(o.ended.r)
	if err != nil {
		return err
	}
	move := spliced
	fi, err := o.to.Stat()
	if err != nil {
		return err
	}
	if fi.Mode().IsRegular() {
		// splice(2) reads and sets the position of a file without its lock. Two streams into one open
		// file, and all that others write there meanwhile, would overwrite each other.
		move = o.copied(make([]byte, 64<<10))
	}
	left, ending := moveSize, false
	total, grown := 0, false
	for !ending || left > 0 {
		if !ending && o.ended.rung.Load() {
			if left, err = unix.IoctlGetInt(from, unix.TIOCINQ); err != nil {
				return err
			}
			ending = true
			continue
		}
		n, err := move(from, to, min(left, moveSize))
		switch {
		case n > 0:
			if ending {
				left -= n
			}
			if total += n; total > growAfter && !grown {
				grown = true
				grow(from)
				grow(to)
			}
		case err == nil: // every writer has closed it
			return nil
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EINVAL): // not every device takes a splice
			move = o.copied(make([]byte, 64<<10))
		case !errors.Is(err, unix.EAGAIN):
			return err
		case ending && held(from) == 0: // another process of the sandbox has opened our end too, and read it
			return nil
		default:
			if !ending {
				if err := await(-1, unix.PollFd{Fd: int32(from), Events: unix.POLLIN}, unix.PollFd{Fd: int32(bell), Events: unix.POLLIN}); err != nil { //nolint:gosec // descriptors are small
					return err
				}
			}
			if held(from) > 0 {
				if err := o.room(to); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// spliced moves bytes from a pipe to a file, or returns EAGAIN.
func spliced(from, to, most int) (int, error) {
	n, err := unix.Splice(from, nil, to, nil, most, unix.SPLICE_F_NONBLOCK)
	return int(n), err
}

// copied returns a function that moves bytes through a buffer, to files that take no splice. Its
// EAGAIN means that the pipe is empty.
func (o *output) copied(buf []byte) func(from, to, most int) (int, error) {
	return func(from, to, most int) (int, error) {
		n, err := unix.Read(from, buf[:min(most, len(buf))])
		for rest := buf[:max(n, 0)]; len(rest) > 0; {
			m, err := unix.Write(to, rest)
			switch {
			case errors.Is(err, unix.EAGAIN):
				err = o.room(to)
			case errors.Is(err, unix.EINTR):
				err = nil
			}
			if err != nil {
				return 0, err
			}
			rest = rest[max(m, 0):]
		}
		return max(n, 0), err
	}
}

// held returns the number of bytes in a pipe.
func held(fd int) int {
	n, err := unix.IoctlGetInt(fd, unix.TIOCINQ)
	if err != nil {
		return 0
	}
	return n
}

// await waits until one of the files is ready, or for a time that is not negative.
func await(most time.Duration, fds ...unix.PollFd) error {
	timeout := int(most.Milliseconds())
	if most < 0 {
		timeout = -1
	}
	for {
		if _, err := unix.Poll(fds, timeout); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// descriptor returns the number of a file that stays open. File.Fd would make it blocking.
func descriptor(f *os.File) (n int, err error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return -1, err
	}
	err = raw.Control(func(fd uintptr) { n = int(fd) })
	return n, err
}
