package layer

import (
	"encoding/binary"
	"io"

	"github.com/klauspost/compress/gzip"
)

// Compressor makes the blob of a layer that we make: gzip, the same bytes for the same stream, and never so well compressed
// that [Apply] with [DefaultLimits] would refuse it.
//
// Those limits take a stream that grows beyond their ratio for a bomb. A layer of ours may grow as much and be none: a file of
// zeros that somebody wrote in a sandbox. To believe an import, or a registry, that a layer is one of ours would open the door
// to everybody, as whatever marks ours can be put on another; and other tools have limits of their own. So it is the blob that
// keeps to the ratio: where a part would grow too much, members of the gzip stream that hold nothing but padding come before
// it. A bomb made in the same way has to be as long, which is what the ratio is about, and the bytes that may come out in the
// end are bounded as ever.
type Compressor struct {
	out     written
	zip     *gzip.Writer
	limits  Limits
	in      int64 // bytes taken so far
	allowed int64 // that may have been taken before the next look
}

// written counts what goes to a writer.
type written struct {
	w io.Writer
	n int64
}

func (c *written) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.n += int64(n)
	return n, err
}

// NewCompressor writes to w.
func NewCompressor(w io.Writer) *Compressor { return newCompressor(w, DefaultLimits()) }

func newCompressor(w io.Writer, limits Limits) *Compressor {
	c := &Compressor{out: written{w: w}, limits: limits, allowed: limits.RatioFloor}
	c.zip = gzip.NewWriter(&c.out) // neither time nor name
	return c
}

// Write implements [io.Writer].
func (c *Compressor) Write(p []byte) (n int, err error) {
	for len(p) > 0 {
		if c.in == c.allowed {
			if err := c.allow(); err != nil {
				return n, err
			}
		}
		m, err := c.zip.Write(p[:min(int64(len(p)), c.allowed-c.in)])
		n, c.in, p = n+m, c.in+int64(m), p[m:]
		if err != nil {
			return n, err
		}
	}
	return n, nil
}

// allow sees to it that enough has been written for one more part.
func (c *Compressor) allow() error {
	next := c.in + c.limits.RatioFloor/8
	need := (next + c.limits.Ratio - 1) / c.limits.Ratio
	// What the compressor still holds back is not counted, as long as it would do without.
	if c.out.n < need {
		if err := c.zip.Close(); err != nil {
			return err
		}
		for c.out.n < need {
			if err := c.pad(need - c.out.n); err != nil {
				return err
			}
		}
		c.zip.Reset(&c.out)
	}
	c.allowed = next
	return nil
}

// pad writes a member without content that has about n bytes, or as many as it can have.
func (c *Compressor) pad(n int64) error {
	c.zip.Reset(&c.out)
	// RFC 1952: the extra field is made of fields that have two letters and a length.
	field := make([]byte, 4, 1<<16-1)
	extra := field[:max(4, min(n, int64(cap(field))))]
	extra[0], extra[1] = 'S', 'p'
	binary.LittleEndian.PutUint16(extra[2:], uint16(len(extra)-4)) //nolint:gosec // G115: it fits
	c.zip.Extra = extra
	return c.zip.Close()
}

// Close ends the stream. It does not close what is below.
func (c *Compressor) Close() error { return c.zip.Close() }
