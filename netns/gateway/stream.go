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
)

const bufferSize = 64 << 10

var buffers = sync.Pool{New: func() any { b := make([]byte, bufferSize); return &b }}

// A stream is one side of a flow. Heads are read through a small buffer, bulk through a pooled one
// that it holds only while there are bytes.
type stream struct {
	conn *net.TCPConn
	raw  syscall.RawConn
	head *bufio.Reader // nil until a head is read
	tls  *tls.Conn     // over conn, if TLS ends here; head then reads from it
}

func newStream(c *net.TCPConn) (*stream, error) {
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

// closeWrite ends one direction. A peer that has reset the connection since is seen elsewhere.
func (s *stream) closeWrite() {
	if s.tls != nil {
		_ = s.tls.CloseWrite() // as above
	}
	_ = s.conn.CloseWrite() // as above
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
		return &net.OpError{Op: "read", Net: "tcp", Addr: s.conn.RemoteAddr(), Err: readErr}
	case size == 0:
		return io.EOF
	}
	return f((*buf)[:size])
}
