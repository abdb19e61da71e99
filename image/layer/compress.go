package layer

import (
	"bytes"
	"io"

	"github.com/klauspost/compress/gzip"
)

// Compressor makes the blob of a layer of ours: gzip, equal bytes for equal streams, and never so
// well compressed that [Apply] with [DefaultLimits] would refuse it.
//
// Those limits take a stream that grows beyond their ratio for a bomb. A layer of ours may grow as
// much and be none: a file of zeros that a program wrote in a sandbox. Trusting a mark of ours on
// imported or pulled layers would admit every bomb, because any mark can be copied; and other tools
// have limits of their own. So the blob keeps to the ratio. Before a part that would grow too much
// come empty blocks of the compressed stream, such as every flush writes.
//
// All readers of gzip know such blocks. Of padding members some read only the first, and long
// header fields have their own limits. A bomb made like this must be as long, which is the point of
// the ratio, and the limit of uncompressed bytes holds as ever.
type Compressor struct {
	out     written
	zip     *gzip.Writer
	limits  Limits
	in      int64 // bytes taken so far
	allowed int64 // in may grow up to this before the next check
}

// written counts the bytes to a writer.
type written struct {
	w io.Writer
	n int64
}

func (c *written) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.n += int64(n)
	return n, err
}

// NewCompressor returns a compressor that writes to w.
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

// allow writes enough padding for one more part.
func (c *Compressor) allow() error {
	next := c.in + c.limits.RatioFloor/8
	need := (next + c.limits.Ratio - 1) / c.limits.Ratio
	// Bytes that the compressor still buffers are not counted, as if it never wrote them.
	if c.out.n < need {
		if err := c.zip.Flush(); err != nil { // up to a whole byte, where a block can begin
			return err
		}
		for c.out.n < need {
			n := min(need-c.out.n+int64(len(nothing))-1, int64(len(padding))) / int64(len(nothing))
			if _, err := c.out.Write(padding[:n*int64(len(nothing))]); err != nil {
				return err
			}
		}
	}
	c.allowed = next
	return nil
}

// nothing is an empty block that is not the last one (RFC 1951, section 3.2.4), and padding is many
// of them.
var (
	nothing = []byte{0, 0, 0, 0xff, 0xff}
	padding = bytes.Repeat(nothing, 4096)
)

// Close ends the stream. It does not close the writer below.
func (c *Compressor) Close() error { return c.zip.Close() }
