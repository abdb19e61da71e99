package gateway

import (
	"bufio"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/netns/policy"
)

const bufferSize = 64 << 10

var buffers = sync.Pool{New: func() any { b := make([]byte, bufferSize); return &b }}

// A conn is the connection of a stream: a [*net.TCPConn], or a socket.
type conn interface {
	net.Conn
	syscall.Conn
	CloseWrite() error
}

// A socket is a connection to a service at a Unix socket of the host. Its errors, which sandboxes
// read, do not have the path.
type socket struct {
	*net.UnixConn
	service policy.Service
}

// RemoteAddr returns the service as policies name it.
func (s socket) RemoteAddr() net.Addr { return &net.UnixAddr{Name: s.service.Socket, Net: "unix"} }

func (s socket) Read(b []byte) (int, error) {
	n, err := s.UnixConn.Read(b)
	return n, s.nameless(err)
}

func (s socket) Write(b []byte) (int, error) {
	n, err := s.UnixConn.Write(b)
	return n, s.nameless(err)
}

// nameless replaces the addresses in an error.
func (s socket) nameless(err error) error {
	if op, ok := errors.AsType[*net.OpError](err); ok {
		return &net.OpError{Op: op.Op, Net: op.Net, Addr: s.RemoteAddr(), Err: op.Err}
	}
	return err
}

// linger sets what a close of a TCP connection is: a reset with 0, an orderly end with -1. It fails
// on a connection that is gone. Unix sockets have no reset.
func linger(c conn, seconds int) {
	if t, ok := c.(*net.TCPConn); ok {
		_ = t.SetLinger(seconds)
	}
}

// A stream is one side of a flow. Heads are read through a small buffer, bulk through a pooled one
// that it holds only while there are bytes.
type stream struct {
	conn conn
	raw  syscall.RawConn
	head *bufio.Reader // nil until a head is read
	tls  *tls.Conn     // over conn, if TLS ends here; head then reads from it
}

func newStream(c conn) (*stream, error) {
	raw, err := c.SyscallConn()
	return &stream{conn: c, raw: raw}, err
}

// encrypt makes the stream that of a TLS connection, whose handshake is done. A record has at most
// 16 KB, so that a larger buffer would not be filled.
func (s *stream) encrypt(c *tls.Conn) {
	s.tls, s.head = c, bufio.NewReaderSize(c, 16<<10)
}

func (s *stream) write(b []byte) (int, error) {
	if s.tls != nil {
		return s.tls.Write(b)
	}
	return s.conn.Write(b)
}

// closeWrite ends one direction. It fails on a connection that the peer has reset, of which the
// reading side learns too.
func (s *stream) closeWrite() {
	if s.tls != nil {
		_ = s.tls.CloseWrite()
	}
	_ = s.conn.CloseWrite()
}

// reader returns the reader of heads. Bytes that it holds are the first of the next chunk.
func (s *stream) reader() *bufio.Reader {
	if s.head == nil {
		s.head = bufio.NewReaderSize(s.conn, 4096)
	}
	return s.head
}

// chunk waits for bytes and calls f with at most limit of them. It returns io.EOF at the end.
func (s *stream) chunk(limit int64, f func([]byte) error) error {
	if s.head != nil && s.head.Buffered() > 0 {
		b, err := s.head.Peek(int(min(limit, int64(s.head.Buffered()))))
		if err == nil {
			err = f(b)
		}
		_, _ = s.head.Discard(len(b)) // they were just seen
		return err
	}
	if s.tls != nil {
		if _, err := s.head.Peek(1); err != nil {
			return err
		}
		return s.chunk(limit, f)
	}
	var buf *[]byte
	var size int
	var readErr error
	err := s.raw.Read(func(fd uintptr) bool {
		buf = buffers.Get().(*[]byte) //nolint:forcetypeassert // the pool has nothing else
		for {
			size, readErr = unix.Read(int(fd), (*buf)[:min(limit, bufferSize)])
			if !errors.Is(readErr, unix.EINTR) {
				break
			}
		}
		if errors.Is(readErr, unix.EAGAIN) {
			buffers.Put(buf)
			buf = nil
			return false // wait without a buffer
		}
		return true
	})
	if buf != nil {
		defer buffers.Put(buf)
	}
	switch {
	case err != nil:
		return err
	case readErr != nil:
		return opError("read", s, readErr)
	case size == 0:
		return io.EOF
	}
	return f((*buf)[:size])
}

// opError returns the error of a system call on a stream, as package net has it.
func opError(op string, s *stream, err error) error {
	addr := s.conn.RemoteAddr()
	return &net.OpError{Op: op, Net: addr.Network(), Addr: addr, Err: err}
}
