// Package host is the daemon's side of the guest protocol: it asks the init of a sandbox. Init is untrusted, so every answer is
// bounded, validated and timed out.
package host

import (
	"github.com/sandboxd/sandboxd/internal/unixmsg"

	"github.com/sandboxd/sandboxd/internal/guest"

	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// How long the host waits where the caller's context sets no deadline of its own.
const (
	replyTimeout = 30 * time.Second // for init's first answer; it may share a small part of a core with what makes it slow
	exitGrace    = 10 * time.Second // for exited, after an exec's timeout or a Kill; a fork bomb or a busy host slows init down
	treeTimeout  = 10 * time.Minute // for a whole tree
)

// ErrLost means that init is gone, silent, or speaks nonsense. The sandbox cannot be used any more: end it.
var ErrLost = errors.New("the sandbox's init is lost")

// A Client asks the init of one sandbox. It holds no connection: every request makes its own, so that any number of
// goroutines may use one Client, and a Client needs no Close.
type Client struct {
	// Held, where set, says until when the sandbox was last kept from running, which is now while it is, or init from answering.
	// Init is not to blame for that time: what it has to answer by itself, it may answer that much later. Set it before the
	// request that it is for.
	Held func() time.Time

	path string

	// How long init may take in all for a list that comes in many packets; each of them has replyTimeout.
	processesFor, listFor time.Duration
}

// await is [conn.answer] for an answer that init has so long to give, counted from when it could run last. The connection's
// deadline is as of now already; who closes quit sets it too, to end the wait.
func (c *Client) await(quit <-chan struct{}, conn *conn, grace time.Duration) (guest.Packet, []int, error) {
	return c.awaitBy(conn.answer, quit, conn, grace)
}

// awaitBy is await where answer receives.
func (c *Client) awaitBy(answer func() (guest.Packet, []int, error), quit <-chan struct{}, conn *conn, grace time.Duration) (guest.Packet, []int, error) {
	for {
		pkt, fds, err := answer()
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return pkt, fds, err
		}
		until, ok := c.putOff(grace)
		if !ok || conn.SetReadDeadline(until) != nil {
			return pkt, fds, err
		}
		select {
		case <-quit: // perhaps before we put the deadline off
			return pkt, fds, err
		default:
		}
	}
}

// putOff is the new end of a wait for init that has just ended, if init could not run for a part of it.
func (c *Client) putOff(grace time.Duration) (time.Time, bool) {
	if c.Held == nil {
		return time.Time{}, false
	}
	until := c.Held().Add(grace)
	return until, time.Now().Before(until)
}

// NewClient returns the client of the init that accepts on the socket at path. It does not connect; use [Client.Ping].
func NewClient(path string) *Client {
	return &Client{path: path, processesFor: replyTimeout, listFor: treeTimeout}
}

// lost wraps an error of the connection, or of what came over it, into ErrLost, unless the fault is the host's own.
func lost(doing string, err error) error {
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("%s: %w: no answer in time", doing, ErrLost)
	case errors.Is(err, io.EOF), errors.Is(err, unix.ECONNRESET), errors.Is(err, unix.EPIPE):
		return fmt.Errorf("%s: %w: it closed the connection", doing, ErrLost)
	case errors.Is(err, os.ErrClosed),
		// A daemon that is out of something must not take its sandboxes for dead.
		errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE), errors.Is(err, unix.ENOMEM), errors.Is(err, unix.ENOBUFS),
		errors.Is(err, unix.ETOOMANYREFS), errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return fmt.Errorf("%s: %w", doing, err)
	}
	return fmt.Errorf("%s: %w: %w", doing, ErrLost, err)
}

// lostUnless is lost for a wait that ctx may have ended.
func lostUnless(ctx context.Context, doing string, err error) error {
	if ctx.Err() != nil {
		return fmt.Errorf("%s: %w", doing, context.Cause(ctx))
	}
	// The connection's deadline is the context's, and may come a moment before the context notices.
	if _, ok := ctx.Deadline(); ok && errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("%s: %w", doing, context.DeadlineExceeded)
	}
	return lost(doing, err)
}

// connect connects to init. A full backlog is waited for until the deadline, which putOff may put off.
func (c *Client) connect(ctx context.Context, deadline time.Time, putOff func() (time.Time, bool)) (int, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, fmt.Errorf("make socket: %w", err)
	}
	err = unixmsg.WithShortName(c.path, func(name string) error {
		sa := &unix.SockaddrUnix{Name: name}
		for wait := time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
			err := unix.Connect(fd, sa)
			if errors.Is(err, unix.EINTR) {
				continue
			}
			if !errors.Is(err, unix.EAGAIN) {
				return err
			}
			// The backlog is full: init is flooded or does not accept. The kernel offers no event for a free place, so
			// this is the one wait that has to ask again.
			if time.Until(deadline) < wait {
				var ok bool
				if deadline, ok = putOff(); !ok {
					return os.ErrDeadlineExceeded
				}
			}
			t := time.NewTimer(wait)
			select {
			case <-t.C:
			case <-ctx.Done():
				t.Stop()
				return context.Cause(ctx)
			}
		}
	})
	if err != nil {
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// request sends one request and receives the first answer, which must be of kind want or an error. On success the
// connection is the caller's, without a deadline and no longer bound to ctx, and so are the descriptors, exactly nfds of them.
func (c *Client) request(ctx context.Context, timeout time.Duration, req []byte, send []int, want guest.Kind, nfds int) (*conn, guest.Packet, []int, error) {
	fd, deadline, bounded, err := c.ask(ctx, timeout, req, send)
	if err != nil {
		return nil, guest.Packet{}, nil, err
	}
	return c.first(ctx, timeout, fd, deadline, bounded, nfds, want)
}

// ask connects and sends one request. The answer has to come by the deadline, which is ctx's own where that has one.
func (c *Client) ask(ctx context.Context, timeout time.Duration, req []byte, send []int) (fd int, deadline time.Time, bounded bool, err error) {
	if err := ctx.Err(); err != nil {
		return -1, time.Time{}, false, context.Cause(ctx)
	}
	deadline, bounded = ctx.Deadline() // then the caller's word counts, whatever became of the sandbox
	if !bounded {
		deadline = time.Now().Add(timeout)
	}
	fd, err = c.connect(ctx, deadline, func() (time.Time, bool) {
		until, ok := c.putOff(timeout)
		return until, ok && !bounded
	})
	if err != nil {
		return -1, time.Time{}, false, lostUnless(ctx, "connect to init", err)
	}
	// Sent before the runtime's poller hears of the socket: init can begin meanwhile, and the poller would wake a thread
	// only to learn that an empty socket can be written to. The buffer of a new connection takes any packet.
	if err := guest.SendTo(fd, req, send); err != nil {
		_ = unix.Close(fd)
		return -1, time.Time{}, false, lostUnless(ctx, "ask init", err)
	}
	return fd, deadline, bounded, nil
}

// first takes over the socket of a request and receives the first answer.
func (c *Client) first(ctx context.Context, timeout time.Duration, fd int, deadline time.Time, bounded bool, nfds int, want ...guest.Kind) (_ *conn, _ guest.Packet, _ []int, err error) {
	conn, err := newConn(fd)
	if err != nil {
		return nil, guest.Packet{}, nil, err
	}
	var fds []int
	defer func() {
		if err != nil {
			unixmsg.CloseAll(fds)
			_ = conn.Close()
		}
	}()
	if err := conn.SetDeadline(deadline); err != nil {
		return nil, guest.Packet{}, nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(guest.Expired) })
	defer stop()

	var pkt guest.Packet
	if bounded {
		pkt, fds, err = conn.answer()
	} else {
		pkt, fds, err = c.await(ctx.Done(), conn, timeout)
	}
	if err != nil {
		return nil, guest.Packet{}, nil, lostUnless(ctx, "await init's answer", err)
	}
	if err := expected(pkt, fds, nfds, want...); err != nil {
		return nil, guest.Packet{}, nil, err
	}
	if !stop() {
		// The context ended this very moment, and its function may set the deadline after we clear it.
		return nil, guest.Packet{}, nil, fmt.Errorf("await init's answer: %w", context.Cause(ctx))
	}
	if err := conn.SetDeadline(time.Time{}); err != nil {
		return nil, guest.Packet{}, nil, err
	}
	return conn, pkt, fds, nil
}

// expected checks a first answer: one of these kinds with so many descriptors, or a refusal, which is its error.
func expected(pkt guest.Packet, fds []int, nfds int, want ...guest.Kind) error {
	switch {
	case pkt.Kind == guest.KindError && len(fds) == 0:
		return refusal(pkt)
	case !slices.Contains(want, pkt.Kind):
		return fmt.Errorf("await init's answer: %w: %s instead of %s", ErrLost, strconv.Quote(pkt.Kind), want[0])
	case len(fds) != nfds:
		return fmt.Errorf("await init's answer: %w: %d descriptors instead of %d", ErrLost, len(fds), nfds)
	}
	return nil
}

// answer is recv for the host. A peer that closes with something unread makes the kernel report ECONNRESET once before
// it hands out what the peer had sent.
func (c *conn) answer() (guest.Packet, []int, error) {
	pkt, fds, err := c.Recv()
	if errors.Is(err, unix.ECONNRESET) {
		return c.Recv()
	}
	return pkt, fds, err
}

// peek is answer, but leaves the packet where it is.
func (c *conn) peek() (guest.Packet, []int, error) {
	pkt, fds, err := c.Peek()
	if errors.Is(err, unix.ECONNRESET) {
		return c.Peek()
	}
	return pkt, fds, err
}

// refusal reads an error answer. What is not a proper one counts as nonsense.
func refusal(pkt guest.Packet) error {
	var a guest.ErrorAnswer
	if err := pkt.Into(&a, 1); err != nil {
		return fmt.Errorf("await init's answer: %w: %w", ErrLost, err)
	}
	if !guest.ValidStage(a.Stage) || a.Errno < 1 || a.Errno > 4095 || len(pkt.Strs[0]) > guest.MaxPath {
		return fmt.Errorf("await init's answer: %w: an error that is none", ErrLost)
	}
	return &guest.Error{Stage: a.Stage, Errno: unix.Errno(a.Errno), Path: pkt.Strs[0]}
}

// Ping returns when init has answered.
func (c *Client) Ping(ctx context.Context) error {
	req, err := guest.Encode(guest.KindPing, guest.None{})
	if err != nil {
		return err
	}
	conn, pkt, _, err := c.request(ctx, replyTimeout, req, nil, guest.KindPong, 0)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	if err := pkt.Into(&guest.None{}, 0); err != nil {
		return fmt.Errorf("await init's answer: %w: %w", ErrLost, err)
	}
	return nil
}
