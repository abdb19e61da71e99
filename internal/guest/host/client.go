// Package host is the daemon's side of the guest protocol: it sends requests to the init of a
// sandbox. Init is untrusted, so every answer is bounded, validated and timed out.
package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/sandboxd/sandboxd/internal/unixmsg"

	"github.com/sandboxd/sandboxd/internal/guest"

	"golang.org/x/sys/unix"
)

// Time limits of the host where the caller's context has no deadline.
const (
	replyTimeout = 30 * time.Second // init's first answer; init may share a small part of a core with the programs that slow it down
	exitGrace    = 10 * time.Second // exited, after an exec's timeout or a Kill; a fork bomb or a busy host slows init down
	treeTimeout  = 10 * time.Minute // a whole tree
)

// ErrLost reports that init is gone, silent, or sends nonsense. The sandbox is unusable: end it.
var ErrLost = errors.New("the sandbox's init is lost")

// ErrSilent is the [ErrLost] of an init that has not answered in time, although it could run.
var ErrSilent = fmt.Errorf("%w: no answer in time", ErrLost)

// A Client sends requests to the init of one sandbox. It holds no connection: every request makes
// its own. Any number of goroutines may use one Client, and a Client needs no Close.
type Client struct {
	// Held, if not nil, returns the end of the last time in which the sandbox or init was kept from
	// running; while it still is, that is now. Init is given the time of its answers anew from then
	// on. Set Held before the request that it is for.
	Held func() time.Time
	// Load, if not nil, returns what init has got of the processors so far, if that is known. An init
	// that is late because it gets none is waited for, for two minutes at most. Set Load before the
	// request that it is for.
	Load func() (Load, bool)

	path string

	// Total time of init for a list that comes in many packets, each of which has replyTimeout.
	processesFor, listFor time.Duration
}

// await is [conn.answer] for an answer that is due within grace, counted from the moment when init
// could last run. The connection's deadline is set already. Closing quit, with an expired deadline,
// ends the wait.
func (c *Client) await(quit <-chan struct{}, conn *conn, grace time.Duration) (guest.Packet, []int, error) {
	return c.awaitBy(conn.answer, quit, conn, grace, &patience{client: c})
}

// awaitBy is await with answer as the receiver, and with the patience that several waits share.
func (c *Client) awaitBy(answer func() (guest.Packet, []int, error), quit <-chan struct{}, conn *conn, grace time.Duration, more *patience) (guest.Packet, []int, error) {
	for {
		pkt, fds, err := answer()
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return pkt, fds, err
		}
		until, ok := more.extend(time.Now(), grace)
		if !ok || conn.SetReadDeadline(until) != nil {
			return pkt, fds, err
		}
		select {
		case <-quit: // perhaps closed before the deadline was extended
			return pkt, fds, err
		default:
		}
	}
}

// NewClient returns a client of the init that accepts on the socket at path. It does not connect;
// use [Client.Ping].
func NewClient(path string) *Client {
	return &Client{path: path, processesFor: replyTimeout, listFor: treeTimeout}
}

// lost wraps an error of the connection, or of a packet, into ErrLost, unless the host itself is at
// fault.
func lost(doing string, err error) error {
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("%s: %w", doing, ErrSilent)
	case errors.Is(err, io.EOF), errors.Is(err, unix.ECONNRESET), errors.Is(err, unix.EPIPE):
		return fmt.Errorf("%s: %w: it closed the connection", doing, ErrLost)
	case errors.Is(err, os.ErrClosed),
		// A daemon that has run out of a resource must not declare its sandboxes dead.
		errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE), errors.Is(err, unix.ENOMEM), errors.Is(err, unix.ENOBUFS),
		errors.Is(err, guest.ErrNoWatch),
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
	// The connection has the context's deadline, and may reach it a moment before the context does.
	if _, ok := ctx.Deadline(); ok && errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("%s: %w", doing, context.DeadlineExceeded)
	}
	return lost(doing, err)
}

// connect connects to init. It waits for room in the backlog until the deadline, which putOff may
// extend.
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
			// The backlog is full: init is flooded or does not accept. The kernel has no event for a free
			// place, so this is the one wait that has to poll.
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

// request sends one request and receives the first answer, which must be of kind want or an error.
// On success the caller owns the connection, which has no deadline and is no longer bound to ctx.
// The caller owns the descriptors too, exactly nfds of them.
func (c *Client) request(ctx context.Context, timeout time.Duration, req []byte, send []int, want guest.Kind, nfds int) (*conn, guest.Packet, []int, error) {
	fd, deadline, bounded, err := c.ask(ctx, timeout, req, send)
	if err != nil {
		return nil, guest.Packet{}, nil, err
	}
	return c.first(ctx, timeout, fd, deadline, bounded, nfds, want)
}

// ask connects and sends one request. The answer is due at the deadline, which is that of ctx if
// ctx has one.
func (c *Client) ask(ctx context.Context, timeout time.Duration, req []byte, send []int) (fd int, deadline time.Time, bounded bool, err error) {
	if err := ctx.Err(); err != nil {
		return -1, time.Time{}, false, context.Cause(ctx)
	}
	deadline, bounded = ctx.Deadline() // the caller's deadline counts, whatever holds the sandbox
	if !bounded {
		deadline = time.Now().Add(timeout)
	}
	more := patience{client: c}
	fd, err = c.connect(ctx, deadline, func() (time.Time, bool) {
		if bounded {
			return time.Time{}, false
		}
		return more.extend(time.Now(), timeout)
	})
	if err != nil {
		return -1, time.Time{}, false, lostUnless(ctx, "connect to init", err)
	}
	// Send before the runtime's poller learns of the socket: init can begin meanwhile, and the poller
	// would wake a thread only to learn that an empty socket is writable. The buffer of a new
	// connection takes any packet.
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
		// The context ended this very moment: its function may set the deadline after it is cleared here.
		return nil, guest.Packet{}, nil, fmt.Errorf("await init's answer: %w", context.Cause(ctx))
	}
	if err := conn.SetDeadline(time.Time{}); err != nil {
		return nil, guest.Packet{}, nil, err
	}
	return conn, pkt, fds, nil
}

// expected checks a first answer: a packet of one of these kinds with nfds descriptors, or a
// refusal, which it returns.
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

// answer is Recv on the host. If a peer closes with unread packets in its queue, the kernel reports
// ECONNRESET once before it hands out the peer's last packets.
func (c *conn) answer() (guest.Packet, []int, error) {
	pkt, fds, err := c.Recv()
	if errors.Is(err, unix.ECONNRESET) {
		return c.Recv()
	}
	return pkt, fds, err
}

// peek is answer that leaves the packet in the queue.
func (c *conn) peek() (guest.Packet, []int, error) {
	pkt, fds, err := c.Peek()
	if errors.Is(err, unix.ECONNRESET) {
		return c.Peek()
	}
	return pkt, fds, err
}

// refusal reads an error answer. A malformed one is ErrLost.
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
