package layer

import (
	"errors"
	"fmt"
	"io"
)

// Uncompressed is a stream without its compression, read within limits.
type Uncompressed struct{ s *stream }

// Uncompress returns a reader of r without its compression: gzip, zstd or none. MediaType and
// limits are as in [Options]. Close frees memory and does not close r.
func Uncompress(r io.Reader, mediaType string, limits Limits) (*Uncompressed, error) {
	s, err := newStream(r, mediaType, limits.WithDefaults())
	if err != nil {
		return nil, err
	}
	return &Uncompressed{s}, nil
}

// Read implements [io.Reader]. Errors caused by the stream are of the class [ErrInvalid].
func (u *Uncompressed) Read(p []byte) (int, error) {
	n, err := u.s.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		err = u.s.blame(err)
	}
	return n, err
}

// DiffID reads to the end and returns the digest of everything uncompressed.
func (u *Uncompressed) DiffID() (string, error) {
	if err := u.s.drain(); err != nil {
		return "", fmt.Errorf("read to the end: %w", u.s.blame(err))
	}
	return u.s.digest(), nil
}

// Close frees the memory.
func (u *Uncompressed) Close() { u.s.close() }

// MediaType returns the OCI media type of a layer that begins with these bytes; 512 are enough.
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
