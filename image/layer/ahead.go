package layer

import (
	"errors"
	"fmt"
	"io"
)

const (
	aheadBlocks = 4
	aheadSize   = 256 << 10
)

// readAhead reads a stream in a goroutine of its own, so that decompression, hashing and limits run
// in parallel with the creation of files.
type readAhead struct {
	stream *stream
	full   chan block
	free   chan []byte
	stop   chan struct{}
	ended  chan struct{}

	now  block // the one being read
	left []byte
}

// block is a piece of the stream, with the counters at its end: the goroutine may be further by
// now.
type block struct {
	buf    []byte
	err    error // after it
	in     int64 // compressed bytes
	srcErr error // of the reader below
}

// readAhead starts reading; s belongs to the goroutine until close returns.
func (s *stream) readAhead() *readAhead {
	r := &readAhead{
		stream: s, full: make(chan block, aheadBlocks), free: make(chan []byte, aheadBlocks),
		stop: make(chan struct{}), ended: make(chan struct{}),
	}
	for range aheadBlocks {
		r.free <- make([]byte, aheadSize)
	}
	go r.run()
	return r
}

func (r *readAhead) run() {
	defer close(r.ended)
	for {
		var buf []byte
		select {
		case <-r.stop:
			return
		case buf = <-r.free:
		}
		n := 0
		var err error
		for n < len(buf) && err == nil {
			var m int
			m, err = r.stream.Read(buf[n:])
			n += m
		}
		r.full <- block{buf[:n], err, r.stream.src.n, r.stream.src.err} // the channel has room for all buffers
		if err != nil {
			return
		}
	}
}

// Read implements [io.Reader].
func (r *readAhead) Read(p []byte) (int, error) {
	for len(r.left) == 0 {
		if r.now.err != nil {
			return 0, r.now.err
		}
		if r.now.buf != nil {
			r.free <- r.now.buf[:aheadSize]
		}
		r.now = <-r.full
		r.left = r.now.buf
	}
	n := copy(p, r.left)
	r.left = r.left[n:]
	return n, nil
}

// check compares bytes of the stream's files with the limits.
func (r *readAhead) check(out int64) error { return r.stream.limits.check(r.now.in, out) }

// blame is [stream.blame] with the error at the current block.
func (r *readAhead) blame(err error) error { return blame(err, r.now.srcErr) }

// finish reads to the very end and returns the digest of everything.
func (r *readAhead) finish() (string, error) {
	for r.now.err == nil {
		r.left = nil
		if _, err := r.Read(nil); err != nil {
			break
		}
	}
	if !errors.Is(r.now.err, io.EOF) {
		return "", fmt.Errorf("read to the end: %w", r.blame(r.now.err))
	}
	return r.stream.digest(), nil
}

// close ends the goroutine and waits for it, at most for one read of the source.
func (r *readAhead) close() {
	close(r.stop)
	<-r.ended
	r.stream.close()
}
