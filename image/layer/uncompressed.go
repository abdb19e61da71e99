package layer

import (
	"errors"
	"fmt"
	"io"
)

// Uncompressed is a stream without its compression, read within limits.
type Uncompressed struct{ s *stream }

// Uncompress begins to read r, be it compressed with gzip, with zstd or not at all; mediaType and limits are as in
// [Options]. Close gives back memory and does not close r.
func Uncompress(r io.Reader, mediaType string, limits Limits) (*Uncompressed, error) {
	s, err := newStream(r, mediaType, limits.WithDefaults())
	if err != nil {
		return nil, err
	}
	return &Uncompressed{s}, nil
}

// Read implements [io.Reader]. Errors that the stream is to blame for are of the class [ErrInvalid].
func (u *Uncompressed) Read(p []byte) (int, error) {
	n, err := u.s.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		err = u.s.blame(err)
	}
	return n, err
}

// DiffID reads to the end and returns the digest of all that was uncompressed.
func (u *Uncompressed) DiffID() (string, error) {
	if err := u.s.drain(); err != nil {
		return "", fmt.Errorf("read to the end: %w", u.s.blame(err))
	}
	return u.s.digest(), nil
}

// Close gives back what reading took.
func (u *Uncompressed) Close() { u.s.close() }

// MediaType is the OCI media type of a layer that begins with these bytes, of which 512 are enough.
func MediaType(begin []byte) (string, error) {
	const tar = "application/vnd.oci.image.layer.v1.tar"
	switch how := detect(begin); how {
	case gzipped:
		return tar + "+gzip", nil
	case zstandard:
		return tar + "+zstd", nil
	case none:
	case bzipped, xzed:
		return "", invalidf("layers compressed with %s are not supported; gzip, zstd and none are", how)
	}
	return tar, nil
}
