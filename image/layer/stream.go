package layer

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"strings"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
)

// compression is the compression of a layer.
type compression string

const (
	none      compression = "uncompressed"
	gzipped   compression = "gzip"
	zstandard compression = "zstd"
	bzipped   compression = "bzip2" // recognised only to be refused by name
	xzed      compression = "xz"    // recognised only to be refused by name
)

// The window is memory that the layer's author makes us allocate. zstd's highest level uses 128
// MiB.
const maxZstdWindow = 128 << 20

// detect returns the compression by the first bytes of a layer. A tar archive begins with a name,
// which might equal any of the magic numbers, and has a magic number of its own further on.
func detect(magic []byte) compression {
	switch {
	case len(magic) >= 262 && bytes.Equal(magic[257:262], []byte("ustar")):
		return none
	case bytes.HasPrefix(magic, []byte{0x1f, 0x8b}):
		return gzipped
	case bytes.HasPrefix(magic, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		return zstandard
	case len(magic) >= 4 && magic[0]&0xf0 == 0x50 && bytes.Equal(magic[1:4], []byte{0x2a, 0x4d, 0x18}):
		return zstandard // a skippable frame comes first
	case bytes.HasPrefix(magic, []byte("BZh")):
		return bzipped
	case bytes.HasPrefix(magic, []byte{0xfd, '7', 'z', 'X', 'Z', 0}):
		return xzed
	}
	return none
}

// promised returns the compression of a media type. The types of OCI end in "+gzip", Docker's in
// ".gzip", both in "tar" without compression.
func promised(mediaType string) (compression, error) {
	switch {
	case strings.HasSuffix(mediaType, "+gzip"), strings.HasSuffix(mediaType, ".gzip"):
		return gzipped, nil
	case strings.HasSuffix(mediaType, "+zstd"), strings.HasSuffix(mediaType, ".zstd"):
		return zstandard, nil
	case strings.HasSuffix(mediaType, "tar"):
		return none, nil
	}
	return "", invalidf("media type %q is not a layer that can be unpacked", short(mediaType))
}

// stream is the uncompressed layer. Reading it counts, hashes and enforces the limits.
type stream struct {
	src    counter
	dec    io.Reader
	zstd   *zstd.Decoder // nil unless it must be closed
	hash   hash.Hash
	out    int64
	limits Limits
	buf    []byte
}

// counter counts the compressed bytes and keeps the error of the underlying reader, so that a
// disk's fault is not taken for the layer's.
type counter struct {
	r   io.Reader
	n   int64
	err error
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	if err != nil && !errors.Is(err, io.EOF) {
		c.err = err
	}
	return n, err
}

func newStream(r io.Reader, mediaType string, limits Limits) (*stream, error) {
	s := &stream{src: counter{r: r}, hash: sha256.New(), limits: limits, buf: make([]byte, 256<<10)}
	in := bufio.NewReaderSize(&s.src, 256<<10)
	magic, err := in.Peek(512)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read the layer: %w", err)
	}
	found := detect(magic)
	if mediaType != "" {
		want, err := promised(mediaType)
		if err != nil {
			return nil, err
		}
		if want != found {
			return nil, invalidf("the layer is %s, its media type %q says %s", found, short(mediaType), want)
		}
	}
	switch found {
	case none:
		s.dec = in
	case gzipped:
		if s.dec, err = gzip.NewReader(in); err != nil {
			return nil, fmt.Errorf("read gzip header: %w", s.blame(err))
		}
	case zstandard:
		// One goroutine: the layer is extracted in a child with tight limits, and the next bytes are
		// needed soon anyway.
		s.zstd, err = zstd.NewReader(in, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(maxZstdWindow))
		if err != nil {
			return nil, fmt.Errorf("prepare zstd: %w", err)
		}
		s.dec = s.zstd
	case bzipped, xzed:
		return nil, invalidf("layers compressed with %s are not supported; gzip, zstd and none are", found)
	}
	return s, nil
}

func (s *stream) Read(p []byte) (int, error) {
	n, err := s.dec.Read(p)
	s.hash.Write(p[:n])
	s.out += int64(n)
	if over := s.limits.check(s.src.n, s.out); over != nil {
		return n, over
	}
	return n, err
}

// check compares out bytes, of the stream or of its files, with the limits; in is the number of
// compressed bytes for them.
func (l Limits) check(in, out int64) error {
	if out > l.Bytes {
		return ExceededBytes.Errorf("more than %d bytes uncompressed", l.Bytes)
	}
	// A sparse file's holes are not in the stream, so an uncompressed layer can explode as well.
	if out > l.RatioFloor && out/l.Ratio > in {
		return ExceededRatio.Errorf("%d bytes grew to more than %d times as many", in, l.Ratio)
	}
	return nil
}

// drain reads the rest.
func (s *stream) drain() error {
	_, err := io.CopyBuffer(io.Discard, struct{ io.Reader }{s}, s.buf)
	return err
}

func (s *stream) digest() string { return "sha256:" + hex.EncodeToString(s.hash.Sum(nil)) }

func (s *stream) blame(err error) error { return blame(err, s.src.err) }

// blame classifies a read error: if the source below had none, the layer is damaged.
func blame(err, src error) error {
	if src != nil || errors.Is(err, ErrInvalid) {
		return err
	}
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return invalidf("the layer is cut short: %w", err)
	}
	return invalidf("the layer is damaged: %w", err)
}

func (s *stream) close() {
	if s.zstd != nil {
		s.zstd.Close()
	}
}
