package resident

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
)

// A Splitter makes frames of the streams of a kernel.
type Splitter interface {
	// Write adds output of a stream of the exec, "stdout" or "stderr", which begins at this offset.
	Write(stream string, at int64, p []byte)
	// Next returns the next frame; false if none is there as a whole.
	Next() (f Frame, ok bool, err error)
	// Begin says which run the output is of from here on.
	Begin(run uint32)
	// Place returns the offset behind which the next daemon has to begin, if the output until end was
	// written and Next has returned all that is there as a whole.
	Place(end int64) int64
}

// held is output of a stream of which no frame is made yet.
type held struct {
	buf  []byte // begins within memory: its front is free once more is written
	mem  []byte
	at   int64 // offset at or before its first byte
	last int64 // offset behind the last write
}

func (h *held) write(at int64, p []byte) {
	if len(h.buf) == 0 {
		h.at = at
	}
	h.mem = append(append(h.mem[:0], h.buf...), p...)
	h.buf, h.last = h.mem, at+int64(len(p))
}

// take removes bytes from the beginning. They are valid until the next write.
func (h *held) take(n int) []byte {
	p := h.buf[:n:n]
	h.buf = h.buf[n:]
	// Where the rest is of the last write, its offset is known.
	h.at = max(h.at, h.last-int64(len(h.buf)))
	return p
}

// marked is the splitter of kernels whose output of programs is the exec's own, with messages
// between it.
type marked struct {
	run    uint32
	marker []byte // before each header
	out    held
	err    held
	synced bool   // the end of the run has come on stderr
	done   *Frame // the end of the run on stdout
	endAt  int64  // offset of the first of these
	over   bool   // both were returned
}

// maxBehind bounds the output that is read again by the next daemon.
const maxBehind = 128 << 10

// maxEarly bounds the output of a stream that has come to the end of a run before the other.
// Processes that the run has left behind write it.
const maxEarly = MaxFrame + maxBehind

// maxHeader bounds type, number and length behind a marker.
const maxHeader = 32

func (m *marked) Write(stream string, at int64, p []byte) {
	if stream == "stderr" {
		m.err.write(at, p)
		return
	}
	m.out.write(at, p)
}

func (m *marked) Next() (Frame, bool, error) {
	if m.done != nil && m.synced {
		f := *m.done
		m.done, m.over = nil, true
		return f, true, nil
	}
	if m.over {
		return Frame{}, false, nil
	}
	for i, h := range []*held{&m.out, &m.err} {
		if i == 0 && m.done != nil || i == 1 && m.synced {
			// What follows is of the next run, which a kernel begins when it is asked.
			if len(h.buf) > maxEarly {
				return Frame{}, false, violated("%d bytes behind the end of a run on one stream, and no end on the other", len(h.buf))
			}
			continue
		}
		f, ok, err := m.of(h, i)
		if err != nil || ok {
			return f, ok, err
		}
		if m.done != nil && m.synced {
			return m.Next()
		}
	}
	return Frame{}, false, nil
}

// of returns the next frame of a stream.
func (m *marked) of(h *held, stream int) (Frame, bool, error) {
	kind := []Kind{KindStdout, KindStderr}[stream]
	i := bytes.Index(h.buf, m.marker)
	if i < 0 {
		// The end may be the beginning of a marker.
		i = len(h.buf)
		for n := min(len(m.marker)-1, len(h.buf)); n > 0; n-- {
			if bytes.HasSuffix(h.buf, m.marker[:n]) {
				i -= n
				break
			}
		}
		if i == 0 {
			return Frame{}, false, nil
		}
	}
	if i > 0 {
		i = min(i, MaxFrame)
		return Frame{Kind: kind, Run: m.run, Payload: h.take(i)}, true, nil
	}
	rest := h.buf[len(m.marker):]
	end := bytes.IndexByte(rest[:min(len(rest), maxHeader)], '\n')
	if end < 0 {
		if len(rest) >= maxHeader {
			return Frame{}, false, violated("a header without end")
		}
		return Frame{}, false, nil
	}
	f, size, err := header(string(rest[:end]))
	if err != nil {
		return Frame{}, false, err
	}
	whole := len(m.marker) + end + 1 + size
	if len(h.buf) < whole {
		return Frame{}, false, nil
	}
	at := h.at
	f.Payload = h.take(whole)[whole-size:]
	switch {
	case (stream == 1) != (f.Kind == kindSync):
		return Frame{}, false, violated("a message of type %q on stream %d", rune(f.Kind), stream)
	case (f.Kind == kindSync || f.Kind == KindDone) && f.Run < m.run:
		return m.of(h, stream) // of a run that the last daemon has seen half of
	case f.Kind == kindSync && f.Run == m.run:
		m.atEnd(at)
		m.synced = true
		return Frame{}, false, nil
	case f.Kind == KindDone && f.Run == m.run:
		m.atEnd(at)
		f.Payload = bytes.Clone(f.Payload)
		m.done = &f
		return Frame{}, false, nil
	}
	return f, true, nil
}

// kindSync ends the output of a run on stderr.
const kindSync Kind = 's'

// atEnd notes the offset of an end of the run.
func (m *marked) atEnd(at int64) {
	if m.done == nil && !m.synced {
		m.endAt = at
	}
}

func (m *marked) Place(end int64) int64 {
	place := end
	for _, h := range []*held{&m.out, &m.err} {
		if len(h.buf) > 0 {
			place = min(place, h.at)
		}
	}
	if m.done != nil || m.synced && !m.over { // half of the end of a run
		place = min(place, m.endAt)
	}
	// One stream may pause within what looks like a message, while the other floods.
	return max(place, end-maxBehind)
}

func (m *marked) Begin(run uint32) {
	m.run, m.done, m.synced, m.over, m.endAt = run, nil, false, false, 0
}

// header reads type, number and length of a message.
func header(text string) (f Frame, size int, err error) {
	fields := strings.Split(text, " ")
	if len(fields) != 3 || len(fields[0]) != 1 {
		return f, 0, violated("a header %q", text)
	}
	run, err := strconv.ParseUint(fields[1], 10, 32)
	if err != nil {
		return f, 0, violated("a header %q", text)
	}
	length, err := strconv.ParseUint(fields[2], 10, 31)
	if err != nil || length > MaxFrame {
		return f, 0, violated("a header %q", text)
	}
	switch f.Kind = Kind(fields[0][0]); f.Kind {
	case KindHello, KindResult, KindError, KindDone, KindPiece, KindBegan, kindSync:
	case KindStdout, KindStderr:
		fallthrough
	default:
		return f, 0, violated("a message of type %q", fields[0])
	}
	f.Run = uint32(run)
	return f, int(length), nil
}

// words encodes a request for a kernel that reads words with escapes of printf(1)'s %b.
func (r *Request) words() []byte {
	b := fmt.Appendf([]byte("\n"), "%d %d %s", r.Run, r.Interrupts, escaped(r.Code))
	for name, value := range r.Env {
		b = fmt.Appendf(b, " %s", escaped(name+"="+value))
	}
	return append(b, " .\n"...)
}

// escaped returns a text as one word.
func escaped(text string) string {
	if text == "" {
		return `\c` // or there would be no word
	}
	var b strings.Builder
	for i := range len(text) {
		if c := text[i]; c <= ' ' || c == '\\' || c == 0x7f {
			fmt.Fprintf(&b, `\0%03o`, c)
		} else {
			b.WriteByte(c)
		}
	}
	return b.String()
}
