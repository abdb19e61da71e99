// Package output cuts the output of programs to what an answer of the API can have: its beginning,
// whole characters, text where it is text.
package output

import (
	"bytes"
	"strings"
	"unicode/utf8"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/guest/host"
)

// Characters cuts output between characters: of each stream it holds the beginning of one. The zero
// value is ready.
type Characters struct{ held map[string][]byte }

// Whole returns a sink that passes whole characters on to another one.
func (c *Characters) Whole(sink func(stream string, p []byte) error) func(stream string, p []byte) error {
	c.held = map[string][]byte{}
	return func(stream string, p []byte) error {
		if h := c.held[stream]; len(h) > 0 {
			p = append(h, p...)
		}
		whole := len(p) - Tail(p)
		c.held[stream] = bytes.Clone(p[whole:])
		if whole == 0 {
			return nil
		}
		return sink(stream, p[:whole])
	}
}

// Rest passes on what is held at the end of the output.
func (c *Characters) Rest(sink func(stream string, p []byte) error) error {
	for _, stream := range []string{"stdout", "stderr"} {
		if h := c.held[stream]; len(h) > 0 {
			if err := sink(stream, h); err != nil {
				return err
			}
		}
	}
	return nil
}

// Tail returns the number of bytes at the end of p that begin an incomplete character: 0 to 3.
func Tail(p []byte) int {
	for n := 1; n < utf8.UTFMax && n <= len(p); n++ {
		if tail := p[len(p)-n:]; utf8.RuneStart(tail[0]) {
			if utf8.FullRune(tail) {
				return 0
			}
			return n
		}
	}
	return 0
}

// Event returns an event with bytes as text where they are text.
func Event(stream string, p []byte) api.ExecEvent {
	if utf8.Valid(p) {
		return api.ExecEvent{Stream: stream, Text: string(p)}
	}
	return api.ExecEvent{Stream: stream, Data: bytes.Clone(p)}
}

// Head keeps the first bytes of a stream.
type Head struct {
	Limit     int  // number of bytes
	Truncated bool // the stream had more

	buf  []byte
	pace host.Pace // of output beyond the limit
}

func (h *Head) write(p []byte) {
	if room := h.Limit - len(h.buf); len(p) > room {
		p = p[:room]
		h.Truncated = true
	}
	h.buf = append(h.buf, p...)
}

// WritePaced keeps what fits, and waits if that exceeds the limit, so that a flood is read slowly.
func (h *Head) WritePaced(p []byte, over <-chan struct{}) {
	if h.write(p); h.Truncated {
		h.pace.Wait(over, 1)
	}
}

// Result returns the text, and the exact bytes where the text is not the same.
func (h *Head) Result() (string, []byte) {
	if utf8.Valid(h.buf) {
		return string(h.buf), nil
	}
	if h.Truncated {
		// A character that the limit cut in two is dropped whole.
		if cut := h.buf[:len(h.buf)-Tail(h.buf)]; utf8.Valid(cut) {
			return string(cut), nil
		}
	}
	return strings.ToValidUTF8(string(h.buf), "\uFFFD"), h.buf
}

// Bytes returns the bytes that are kept, text or not.
func (h *Head) Bytes() []byte { return h.buf }
