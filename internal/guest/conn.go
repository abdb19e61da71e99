package guest

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/unixmsg"
)

// format bounds the packets of both sides.
var format = unixmsg.Format{MaxBytes: MaxPacket, MaxFiles: MaxFDs}

// A Conn is one end of a connection between the daemon and init. Sending and receiving may happen
// at the same time, each by one goroutine.
type Conn struct {
	file   Socket
	conn   syscall.RawConn
	closed atomic.Bool
}

// A Socket is a non-blocking socket that goroutines wait for: an *os.File on the host, and in the
// sandbox also one that needs nothing of the runtime's poller.
type Socket interface {
	SyscallConn() (syscall.RawConn, error)
	SetDeadline(t time.Time) error
	SetReadDeadline(t time.Time) error
	SetWriteDeadline(t time.Time) error
	Close() error
}

// ErrNoWatch reports that the kernel refuses this user another epoll watch, without which nothing
// can wait for a file. It is ENOSPC: a want of this side, not a fault of the other one.
var ErrNoWatch = fmt.Errorf("epoll watches of this user are used up (fs.epoll.max_user_watches): %w", unix.ENOSPC)

// Waitable returns ErrNoWatch if the runtime's poller does not know a non-blocking file.
func Waitable(f *os.File) error {
	if errors.Is(f.SetDeadline(time.Time{}), os.ErrNoDeadline) {
		return ErrNoWatch
	}
	return nil
}

// NewConn takes over fd, which must be non-blocking so that the runtime's poller waits for it.
func NewConn(fd int) (*Conn, error) {
	file := os.NewFile(uintptr(fd), "guest")
	if err := Waitable(file); err != nil {
		_ = file.Close()
		return nil, fmt.Errorf("use the connection: %w", err)
	}
	return NewConnOf(file)
}

// NewConnOf takes over a socket.
func NewConnOf(s Socket) (*Conn, error) {
	conn, err := s.SyscallConn()
	if err != nil {
		_ = s.Close()
		return nil, fmt.Errorf("use the connection: %w", err)
	}
	return &Conn{file: s, conn: conn}, nil
}

// File returns the socket of a connection on the host, which stays the connection's.
func (c *Conn) File() *os.File {
	f, _ := c.file.(*os.File)
	return f
}

// Close closes the connection. Waits on it return [os.ErrClosed].
func (c *Conn) Close() error {
	c.closed.Store(true)
	return c.file.Close()
}

// closedErr turns the error of an operation on a closed connection into [os.ErrClosed]; package os
// has no name for that of raw operations.
func (c *Conn) closedErr(err error) error {
	if err != nil && c.closed.Load() {
		return os.ErrClosed
	}
	return err
}

// SetDeadline bounds sending and receiving. The zero time means no bound.
func (c *Conn) SetDeadline(t time.Time) error { return c.closedErr(c.file.SetDeadline(t)) }

// SetReadDeadline bounds receiving.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.closedErr(c.file.SetReadDeadline(t)) }

// SetWriteDeadline bounds sending.
func (c *Conn) SetWriteDeadline(t time.Time) error { return c.closedErr(c.file.SetWriteDeadline(t)) }

// Expired is a deadline that ends every wait at once.
var Expired = time.Unix(1, 0)

// Send sends one packet. After an error nothing was sent.
func (c *Conn) Send(p []byte, fds ...int) error {
	return c.closedErr(format.Send(c.conn, p, fds...))
}

// SendTo sends one packet on a socket that is no connection yet; EAGAIN means that its buffer is
// full.
func SendTo(fd int, p []byte, fds []int) error { return format.SendTo(fd, 0, p, fds...) }

// SendNow is Send for a caller that must not wait: a peer that does not read loses the packet. The
// few packets of a request always fit into the socket's buffer.
func (c *Conn) SendNow(p []byte) error {
	var sent error
	// O_NONBLOCK alone is not enough: every holder of a copy of the socket can clear it.
	err := c.conn.Control(func(fd uintptr) { sent = format.SendTo(int(fd), unix.MSG_DONTWAIT, p) })
	if err != nil {
		return err
	}
	return sent
}

// Recv receives one packet and its descriptors, which are close-on-exec and the caller's to close.
// A closed connection is io.EOF. On error no descriptor is left open. A deadline that has passed is
// an error only if no packet has arrived.
func (c *Conn) Recv() (Packet, []int, error) { return c.receive(0) }

// Peek is Recv that leaves the packet in the queue.
func (c *Conn) Peek() (Packet, []int, error) { return c.receive(unix.MSG_PEEK) }

func (c *Conn) receive(flags int) (pkt Packet, fds []int, err error) {
	fds, err = format.Receive(c.conn, flags, pkt.decode)
	return pkt, fds, c.closedErr(err)
}

// RecvFrom is Recv on a socket that is no connection yet. It does not wait: EAGAIN means that no
// packet has arrived.
func RecvFrom(fd int) (pkt Packet, fds []int, err error) {
	fds, err = format.ReceiveFrom(fd, 0, pkt.decode)
	return pkt, fds, err
}
