package gateway

import (
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/net/http2"
	"golang.org/x/time/rate"

	"github.com/sandboxd/sandboxd/netns/policy"
)

const (
	frameHeader = 9
	// maxContinuations bounds the frames of one head. A head of the largest size fits into eight.
	maxContinuations = 16
	// Frames that carry nothing: a program has few of them, a flood nothing else.
	idleFrameRate, idleFrameBurst = 50, 1000
	// A client updates a window when it has received bytes. Libraries send one update for some KB.
	minUpdate, freeUpdates = 64, 1000
	// maxRefusedStreams bounds the requests beyond the number that the client was told it may have
	// open.
	maxRefusedStreams = 1000
	// status400 is the field ":status 400" of the static table, with which a response begins.
	status400 = 0x8c
)

// A watched connection follows the frames on the client's side, between TLS and the library that
// reads them. The library refuses malformed frames and bounds its memory. The watch adds the time
// for heads, bounds of frames that cost processor time only, and a record of the library's
// refusals.
type watched struct {
	*tls.Conn
	f       *flow
	in, out frames

	// Of the reading goroutine.
	idle          *rate.Limiter
	updates       int64
	continuations int  // frames of the head that is being read
	block         bool // a head is being read
	gone          bool // the client has ended or broken the connection

	// Of the writing goroutine.
	refused int64    // responses with the status 400
	beyond  int      // requests beyond the number that may be open
	cut     []uint32 // the last streams that were reset, at most maxStreams
	goodbye bool     // GOAWAY was sent

	ours atomic.Int64 // those that the handler knows

	// The library does not wait for its goroutines. Each of these is held while one of them reads or
	// writes, and ended is set with both held.
	reads, writes sync.Mutex
	ended         bool
}

func newWatched(f *flow, c *tls.Conn) *watched {
	return &watched{Conn: c, f: f, in: frames{skip: len(http2.ClientPreface)}, idle: rate.NewLimiter(idleFrameRate, idleFrameBurst)}
}

// A frames follows the frames in a stream of bytes.
type frames struct {
	header [frameHeader]byte
	got    int     // bytes of the header
	skip   int     // bytes up to the next header
	first  [8]byte // of the payload
	have   int     // bytes of first
}

// A point is a place in a frame.
type point int

const (
	elsewhere point = iota
	behindHeader
	behindFirst // bytes of the payload
)

// next consumes bytes up to a point, and returns the rest.
func (s *frames) next(b []byte) (rest []byte, at point) {
	if s.skip > 0 {
		n := min(s.skip, len(b))
		s.skip -= n
		want := min(s.length(), len(s.first))
		if k := copy(s.first[s.have:want], b[:n]); k > 0 {
			if s.have += k; s.have == want {
				at = behindFirst
			}
		}
		return b[n:], at
	}
	n := copy(s.header[s.got:], b)
	if s.got += n; s.got < frameHeader {
		return b[n:], elsewhere
	}
	s.got, s.have, s.skip = 0, 0, s.length()
	return b[n:], behindHeader
}

func (s *frames) length() int { return int(s.header[0])<<16 | int(s.header[1])<<8 | int(s.header[2]) }

func (s *frames) stream() uint32 { return binary.BigEndian.Uint32(s.header[5:]) & (1<<31 - 1) }

func (s *frames) kind() http2.FrameType { return http2.FrameType(s.header[3]) }

func (s *frames) has(flag http2.Flags) bool { return http2.Flags(s.header[4]).Has(flag) }

// whole reports that no head is cut: the next byte begins a frame or belongs to data. The preface
// counts as a head, and looks like data of no length here.
func (s *frames) whole() bool {
	return s.got == 0 && (s.skip == 0 || s.kind() == http2.FrameData && s.length() > 0)
}

// Read passes bytes of the client to the library.
func (w *watched) Read(b []byte) (int, error) {
	w.reads.Lock()
	defer w.reads.Unlock()
	if w.ended {
		return 0, net.ErrClosed
	}
	n, err := w.Conn.Read(b)
	if n > 0 {
		if bad := w.see(b[:n]); bad != nil {
			w.f.abort(bad)
			return 0, bad
		}
	}
	if err != nil && !isTimeout(err) {
		w.gone = true
		if !errors.Is(err, io.EOF) {
			w.f.abort(err)
		}
	}
	return n, err
}

// see follows bytes of the client, and keeps the time for heads.
func (w *watched) see(b []byte) error {
	for rest := b; len(rest) > 0; {
		var at point
		if rest, at = w.in.next(rest); at == behindHeader {
			if err := w.judge(); err != nil {
				return err
			}
		}
	}
	if w.block || !w.in.whole() {
		return w.f.waitHead()
	}
	w.f.headDone()
	return nil
}

// judge judges a frame by its header.
func (w *watched) judge() error {
	switch w.in.kind() { //nolint:exhaustive // the others have the default
	case http2.FrameHeaders:
		w.continuations, w.block = 0, !w.in.has(http2.FlagHeadersEndHeaders)
	case http2.FrameContinuation:
		w.continuations++
		w.block = !w.in.has(http2.FlagContinuationEndHeaders)
		if w.continuations > maxContinuations {
			return refuse("a head of HTTP/2 in more than %d frames", maxContinuations)
		}
	case http2.FrameWindowUpdate:
		w.updates++
		if w.updates > freeUpdates+w.f.in.Load()/minUpdate {
			return refuse("a flood of HTTP/2 frames of type %s", w.in.kind())
		}
	case http2.FrameData:
		if w.in.length() == 0 && !w.in.has(http2.FlagDataEndStream) {
			return w.carriesNothing()
		}
	default: // also of types that the library ignores
		return w.carriesNothing()
	}
	return nil
}

func (w *watched) carriesNothing() error {
	if !w.idle.AllowN(w.f.n.opts.Now(), 1) {
		return refuse("a flood of HTTP/2 frames of type %s", w.in.kind())
	}
	return nil
}

// Write passes frames of the library to the client, and records its refusals.
func (w *watched) Write(b []byte) (int, error) {
	w.writes.Lock()
	defer w.writes.Unlock()
	if w.ended {
		return 0, net.ErrClosed
	}
	for rest := b; len(rest) > 0; {
		var at point
		if rest, at = w.out.next(rest); at != behindFirst {
			continue
		}
		if reason := w.refusal(); reason != "" {
			e := w.f.event(Request)
			e.Time, e.Rule = w.f.n.opts.Now(), ""
			e.note(&refusal{Verdict: policy.Verdict{Reason: "the client sent " + reason}, malformed: true})
			w.f.tell(e)
		}
	}
	return w.Conn.Write(b)
}

// refusal returns why the frame that is being written refuses something that the handler did not
// see, or "".
func (w *watched) refusal() string {
	code := func(at int) http2.ErrCode { return http2.ErrCode(binary.BigEndian.Uint32(w.out.first[at:])) }
	switch w.out.kind() { //nolint:exhaustive // the others refuse nothing
	case http2.FrameHeaders:
		if w.out.first[0] != status400 {
			return ""
		}
		// The handler counts its own before they are written.
		if w.refused++; w.refused > w.ours.Load() {
			w.refused--
			return "a request with fields that HTTP/2 does not have"
		}
	case http2.FrameRSTStream:
		if code(0) == http2.ErrCodeRefusedStream {
			if w.beyond++; w.beyond > maxRefusedStreams {
				w.f.abort(refuse("a flood of requests beyond the number that may be open"))
			}
		}
		if w.wasCut(w.out.stream()) {
			return ""
		}
		if c := code(0); c == http2.ErrCodeProtocol || c == http2.ErrCodeFlowControl || c == http2.ErrCodeStreamClosed {
			return fmt.Sprintf("a malformed request over HTTP/2 (%s)", c)
		}
	case http2.FrameGoAway:
		w.goodbye = true
		if c := code(4); c != http2.ErrCodeNo {
			return fmt.Sprintf("malformed HTTP/2 (%s)", c)
		}
	}
	return ""
}

// wasCut reports that the stream was reset before, and notes that it is now. A client that uploads
// to a request that was refused has frames under way, which RFC 9113, section 5.1, allows. The
// library resets the stream again for each.
func (w *watched) wasCut(stream uint32) bool {
	if slices.Contains(w.cut, stream) {
		return true
	}
	if len(w.cut) == maxStreams {
		w.cut = append(w.cut[:0], w.cut[1:]...)
	}
	w.cut = append(w.cut, stream)
	return false
}

// answered notes the status of a response before it is written.
func (w *watched) answered(status int) {
	if status == 400 {
		w.ours.Add(1)
	}
}

// Close ends the connection in an orderly way, and the reading by the library. The flow closes the
// connection below. A client that does not read gets a reset.
func (w *watched) Close() error {
	_ = w.SetReadDeadline(past) // of a connection that is gone
	if !w.writes.TryLock() {
		return w.SetWriteDeadline(past)
	}
	defer w.writes.Unlock()
	return w.CloseWrite()
}

// end makes reads and writes fail from now on, and waits for those under way. It returns the reason
// if the library has given up the connection without a word: its beginning was malformed or late,
// or too many frames wait for a client that does not read.
func (w *watched) end() error {
	_ = w.SetDeadline(past) // of a connection that is gone
	w.reads.Lock()
	defer w.reads.Unlock()
	w.writes.Lock()
	defer w.writes.Unlock()
	w.ended = true
	if w.gone || w.goodbye {
		return nil
	}
	return refuse("the client did not begin HTTP/2, or did not read what it was sent")
}
