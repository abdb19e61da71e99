// Package unixmsg passes packets and descriptors over Unix sockets.
//
// A [Format] sends and receives the whole packets of a SOCK_SEQPACKET socket, with descriptors by
// SCM_RIGHTS. [Listen], [ShortName] and [WithShortName] reach sockets whose paths exceed the 107
// bytes that fit into a sockaddr_un. [PeerUID] identifies the other side of a connection.
//
// sandboxd-init links this package, and not net: nothing here may import that.
package unixmsg

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Errors of packets that no peer of ours sends.
var (
	errEmpty   = errors.New("packet without a byte")
	errLong    = errors.New("packet too long")
	errFiles   = errors.New("packet with too many descriptors")
	errControl = errors.New("packet with an odd control message")
)

// A Format bounds the packets of one protocol and keeps buffers for them. It must not be copied.
type Format struct {
	MaxBytes int // largest packet; below net.core.wmem_default (208 KiB), above which it could not be sent
	MaxFiles int // most descriptors of a packet; below SCM_MAX_FD (253)

	buffers sync.Pool
}

type buffer struct{ data, control []byte }

// buffer returns a buffer for one packet. Packets are rare and their buffers large, so they are
// reused, and taken only when a packet has arrived: a thousand idle connections hold none.
func (f *Format) buffer() *buffer {
	if b, ok := f.buffers.Get().(*buffer); ok {
		return b
	}
	return &buffer{make([]byte, f.MaxBytes), make([]byte, unix.CmsgSpace(4*f.MaxFiles))}
}

// Send sends one packet with copies of descriptors, which stay the caller's. It waits while the
// peer's queue is full. After an error nothing was sent.
func (f *Format) Send(conn syscall.RawConn, packet []byte, fds ...int) error {
	var sent error
	err := conn.Write(func(fd uintptr) bool {
		sent = f.SendTo(int(fd), 0, packet, fds...)
		return !errors.Is(sent, unix.EAGAIN)
	})
	if err != nil {
		return err
	}
	return sent
}

// SendTo is Send on a plain descriptor. If the peer's queue is full, it returns EAGAIN on a
// non-blocking socket, and on any socket with MSG_DONTWAIT in flags.
func (f *Format) SendTo(fd, flags int, packet []byte, fds ...int) error {
	if len(packet) > f.MaxBytes {
		return unix.EMSGSIZE
	}
	var control []byte
	if len(fds) > 0 {
		control = unix.UnixRights(fds...)
	}
	for {
		err := unix.Sendmsg(fd, packet, control, nil, flags|unix.MSG_NOSIGNAL)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// Receive receives one packet and calls decode with its bytes, which decode must not keep. The
// descriptors are close-on-exec and the caller's to close; on error none is left open. The end of
// the connection is io.EOF. Flags may be MSG_PEEK.
//
// A read deadline is an error only if no packet has arrived: a process that was stopped until then
// still gets its packet.
func (f *Format) Receive(conn syscall.RawConn, flags int, decode func(packet []byte) error) ([]int, error) {
	var fds []int
	var got error
	err := conn.Read(func(fd uintptr) bool {
		fds, got = f.ReceiveFrom(int(fd), flags, decode)
		return !errors.Is(got, unix.EAGAIN)
	})
	if errors.Is(err, os.ErrDeadlineExceeded) {
		// The runtime does not look at a socket whose deadline has passed.
		late := conn.Control(func(fd uintptr) { fds, got = f.ReceiveFrom(int(fd), flags, decode) })
		if late == nil && !errors.Is(got, unix.EAGAIN) {
			err = nil
		}
	}
	if err == nil {
		err = got
	}
	if err != nil {
		CloseAll(fds)
		return nil, err
	}
	return fds, nil
}

// ReceiveFrom is Receive on a plain descriptor. It does not wait: EAGAIN means that no packet has
// arrived.
func (f *Format) ReceiveFrom(fd, flags int, decode func(packet []byte) error) (fds []int, err error) {
	b := f.buffer()
	defer f.buffers.Put(b)
	var n, controls, got int
	for ended := false; ; {
		n, controls, got, _, err = unix.Recvmsg(fd, b.data, b.control, flags|unix.MSG_CMSG_CLOEXEC|unix.MSG_DONTWAIT)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err == nil && n == 0 && controls == 0 && !ended {
			// This may not be the end. The kernel finds the queue empty, the peer sends its last packet and
			// closes, and the kernel then sees the close first (__unix_dgram_recvmsg; once in 30,000 times
			// on Linux 6.18). A second call returns the packet, or the end for good.
			ended = true
			continue
		}
		if ended && errors.Is(err, unix.EAGAIN) {
			err = errEmpty
		}
		break
	}
	if err != nil {
		return nil, err
	}
	if fds, err = parseRights(b.control[:controls]); err != nil {
		return nil, err
	}
	switch {
	case got&unix.MSG_CTRUNC != 0 && len(fds) < f.MaxFiles:
		err = unix.EMFILE // the control buffer had room, so our descriptor table is full
	case got&unix.MSG_CTRUNC != 0, len(fds) > f.MaxFiles: // CmsgSpace is padded: it may have room for one more
		err = errFiles
	case got&unix.MSG_TRUNC != 0:
		err = errLong
	case n == 0:
		err = io.EOF // a packet of descriptors alone is sent by neither side of any protocol of ours
	default:
		err = decode(b.data[:n])
	}
	if err != nil {
		CloseAll(fds)
		return nil, err
	}
	return fds, nil
}

// parseRights returns the descriptors of control messages. On error it has closed them.
func parseRights(control []byte) ([]int, error) {
	if len(control) == 0 {
		return nil, nil
	}
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return nil, fmt.Errorf("parse control message: %w", err)
	}
	var fds []int
	odd := false
	for i := range messages {
		got, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			odd = true // credentials and the like, for which no socket of ours asks
			continue
		}
		fds = append(fds, got...)
	}
	if odd {
		CloseAll(fds)
		return nil, errControl
	}
	return fds, nil
}

// CloseAll closes descriptors that were received and are not wanted.
func CloseAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}

// Files turns received descriptors into files, which own them.
func Files(fds []int, name string) []*os.File {
	var files []*os.File
	for _, fd := range fds {
		files = append(files, os.NewFile(uintptr(fd), name))
	}
	return files
}

// PeerUID returns the uid of the process that made the other end of a connected socket
// (SO_PEERCRED), in the user namespace of the caller.
func PeerUID(c syscall.Conn) (uint32, error) {
	cred, err := peer(c)
	if err != nil {
		return 0, fmt.Errorf("read the peer's uid: %w", err)
	}
	return cred.Uid, nil
}

// PeerPID returns the process that made the other end of a connected socket, in the PID namespace
// of the caller; 0 for one that is not in it. The process may have ended, or have passed the socket
// on: do not let it decide about access.
func PeerPID(c syscall.Conn) (int, error) {
	cred, err := peer(c)
	if err != nil {
		return 0, fmt.Errorf("read the peer's pid: %w", err)
	}
	return int(cred.Pid), nil
}

func peer(c syscall.Conn) (*unix.Ucred, error) {
	conn, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	var cred *unix.Ucred
	var got error
	if err := conn.Control(func(fd uintptr) {
		cred, got = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		got = err
	}
	return cred, got
}
