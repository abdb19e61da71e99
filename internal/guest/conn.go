package guest

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A conn is one end of a SOCK_SEQPACKET connection: whole packets with descriptors. Sending and receiving may happen at
// the same time; each of them by one goroutine.
type Conn struct {
	f      *os.File
	rc     syscall.RawConn
	closed atomic.Bool
	Ids    uint32 // how many uids init has, from 0 on; the host's end does not need it
}

// newConn takes over fd, which must be non-blocking so that the runtime's poller waits for it.
func NewConn(fd int) (*Conn, error) {
	f := os.NewFile(uintptr(fd), "guest")
	rc, err := f.SyscallConn()
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("use the connection: %w", err)
	}
	return &Conn{f: f, rc: rc}, nil
}

// SetDeadline bounds sending and receiving.
func (c *Conn) SetDeadline(t time.Time) error { return c.closedErr(c.f.SetDeadline(t)) }

// SetWriteDeadline bounds sending.
func (c *Conn) SetWriteDeadline(t time.Time) error { return c.closedErr(c.f.SetWriteDeadline(t)) }

// File returns the socket, which stays the connection's.
func (c *Conn) File() *os.File { return c.f }

// SetReadDeadline bounds receiving.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.closedErr(c.f.SetReadDeadline(t)) }

func (c *Conn) Close() error {
	c.closed.Store(true)
	return c.f.Close()
}

// closedErr gives the error of an operation on a closed connection the name that others can test for; package os has
// none for raw operations.
func (c *Conn) closedErr(err error) error {
	if err != nil && c.closed.Load() {
		return os.ErrClosed
	}
	return err
}

// buffers are reused because a packet is rare and its buffer is not small. They are taken when a packet has arrived, not
// while waiting for one: a thousand idle connections cost no buffer.
var buffers = sync.Pool{New: func() any { return new([MaxPacket]byte) }}

// send sends one packet. An error means that nothing was sent.
func (c *Conn) Send(p []byte, fds ...int) error {
	if len(p) > MaxPacket {
		return unix.EMSGSIZE
	}
	var sent error
	err := c.rc.Write(func(fd uintptr) bool {
		sent = SendTo(int(fd), p, fds)
		return !errors.Is(sent, unix.EAGAIN)
	})
	if err != nil {
		return c.closedErr(err)
	}
	return sent
}

// sendTo sends one packet on a non-blocking socket: EAGAIN means that it has to wait.
func SendTo(fd int, p []byte, fds []int) error {
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	for {
		err := unix.Sendmsg(fd, p, oob, nil, unix.MSG_NOSIGNAL)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// sendNow is send for a caller that must not wait: a peer that does not read loses the packet. The few packets of a
// request always fit into the socket's buffer.
func (c *Conn) SendNow(p []byte) error {
	var sent error
	err := c.rc.Control(func(fd uintptr) {
		sent = unix.Sendmsg(int(fd), p, nil, nil, unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT)
	})
	if err != nil {
		return err
	}
	return sent
}

// recv receives one packet and its descriptors, which are close-on-exec and the caller's to close. A closed connection
// is io.EOF. On error no descriptor is left open. A deadline that has passed is one only where nothing has come.
func (c *Conn) Recv() (Packet, []int, error) { return c.Receive(0) }

func (c *Conn) Receive(how int) (Packet, []int, error) {
	var (
		pkt Packet
		fds []int
		got error
	)
	err := c.rc.Read(func(fd uintptr) bool {
		pkt, fds, got = RecvFrom(int(fd), how)
		return !errors.Is(got, unix.EAGAIN)
	})
	if errors.Is(err, os.ErrDeadlineExceeded) && !c.closed.Load() {
		// The runtime does not look at a socket any more once its time is over. We may have been kept from it until then, on a
		// machine that stops or in a sandbox that is paused: what has come all the same is not late.
		if cerr := c.rc.Control(func(fd uintptr) { pkt, fds, got = RecvFrom(int(fd), how) }); cerr == nil && !errors.Is(got, unix.EAGAIN) {
			err = nil
		}
	}
	if err == nil {
		err = got
	} else {
		err = c.closedErr(err)
	}
	if err != nil {
		CloseAll(fds)
		return Packet{}, nil, err
	}
	return pkt, fds, nil
}

// recvFrom is recv on a non-blocking socket: EAGAIN means that nothing has arrived. How may be MSG_PEEK.
func RecvFrom(fd, how int) (pkt Packet, fds []int, err error) {
	buf := buffers.Get().(*[MaxPacket]byte)
	defer buffers.Put(buf)
	var oob [64]byte // unix.CmsgSpace(4*maxFDs) is 32; the kernel drops (and marks as truncated) what exceeds it
	var n, oobn, flags int
	for ended := false; ; {
		n, oobn, flags, _, err = unix.Recvmsg(fd, buf[:], oob[:unix.CmsgSpace(4*MaxFDs)], how|unix.MSG_CMSG_CLOEXEC)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err == nil && n == 0 && oobn == 0 && !ended {
			// Perhaps not the end: the kernel finds the queue empty, the peer sends its last packet and closes, and the
			// kernel, which now sees the end, reports that (__unix_dgram_recvmsg; seen once in 30,000 times on 6.18). Asked
			// again it gives the packet, or the end for good.
			ended = true
			continue
		}
		if ended && errors.Is(err, unix.EAGAIN) {
			err = errors.New("packet without a byte")
		}
		break
	}
	if err != nil {
		return Packet{}, nil, err
	}
	if fds, err = rights(oob[:oobn]); err != nil {
		return Packet{}, nil, err
	}
	switch {
	case flags&unix.MSG_CTRUNC != 0 && len(fds) < MaxFDs:
		err = unix.EMFILE // there was room for more of them here, so it is our own table that is full
	case flags&unix.MSG_CTRUNC != 0:
		err = errors.New("packet with too many descriptors")
	case flags&unix.MSG_TRUNC != 0:
		err = errors.New("packet too long")
	case n == 0:
		err = io.EOF // with descriptors it would be an empty packet, which neither side sends
	default:
		pkt, err = Decode(buf[:n])
	}
	if err != nil {
		CloseAll(fds)
		return Packet{}, nil, err
	}
	return pkt, fds, nil
}

// rights takes the descriptors out of a control message. On error it has closed them.
func rights(oob []byte) ([]int, error) {
	if len(oob) == 0 {
		return nil, nil
	}
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("read control message: %w", err)
	}
	var fds []int
	var odd bool
	for i := range msgs {
		got, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			odd = true // credentials or the like, which nobody asked for
			continue
		}
		fds = append(fds, got...)
	}
	if odd {
		CloseAll(fds)
		return nil, errors.New("packet with an odd control message")
	}
	return fds, nil
}

func CloseAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}

// past is a deadline that ends every wait at once.
var Expired = time.Unix(1, 0)
