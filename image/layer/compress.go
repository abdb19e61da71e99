package layer

import (
	"bytes"
	"io"

	"github.com/klauspost/compress/gzip"
)

// Compressor makes the blob of a layer that we make: gzip, the same bytes for the same stream, and never so well compressed
// that [Apply] with [DefaultLimits] would refuse it.
//
// Those limits take a stream that grows beyond their ratio for a bomb. A layer of ours may grow as much and be none: a file of
// zeros that somebody wrote in a sandbox. To believe an import, or a registry, that a layer is one of ours would open the door
// to everybody, as whatever marks ours can be put on another; and other tools have limits of their own. So it is the blob that
// keeps to the ratio: where a part would grow too much, blocks of the compressed stream that hold nothing come before it, such as
// every flush makes. All who read gzip know them; of members of the stream for padding, some read the first one alone, and of
// long fields in their headers nothing. A bomb made in the same way has to be as long, which is what the ratio is about, and the
// bytes that may come out in the end are bounded as ever.
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
		if err := c.zip.Flush(); err != nil { // to the end of a byte, where a block can begin
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

// nothing is a block without content that is not the last one (RFC 1951, section 3.2.4), and padding many of them.
var (
	nothing = []byte{0, 0, 0, 0xff, 0xff}
	padding = bytes.Repeat(nothing, 4096)
)

// Close ends the stream. It does not close what is below.
func (c *Compressor) Close() error { return c.zip.Close() }
