package build

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
)

// Spool holds file contents from streams until the build ends.
type Spool struct {
	file  *os.File
	at    *Archive
	n     int64
	limit int64
}

// NewSpool returns a spool that uses f, which the caller closes, for at most limit bytes.
func NewSpool(f *os.File, limit int64) *Spool {
	return &Spool{file: f, at: &Archive{At: f}, limit: limit}
}

// fetch reads the contents of files into the spool, reading each stream once, and computes their
// digests.
func (s *Spool) fetch(ctx context.Context, nodes []*node) error {
	far := make(map[*Archive]map[int][]*node)
	var near []*node
	for _, n := range nodes {
		switch {
		case n.kind != tar.TypeReg:
		case n.content.in != nil && n.content.in.At == nil:
			m := far[n.content.in]
			if m == nil {
				m = make(map[int][]*node)
				far[n.content.in] = m
			}
			m[n.content.entry] = append(m[n.content.entry], n)
		case n.digest == "":
			near = append(near, n)
		}
	}
	for a, wanted := range far {
		if err := s.pull(ctx, a, wanted); err != nil {
			return err
		}
	}
	for _, n := range near {
		r, err := n.open()
		if err != nil {
			return err
		}
		hash := sha256.New()
		got, err := io.Copy(hash, &ctxReader{ctx, r})
		if err != nil {
			return fmt.Errorf("read a file of the build: %w", err)
		}
		if got != n.size {
			return invalidf("a file of %d bytes has %d", n.size, got)
		}
		n.digest = hex.EncodeToString(hash.Sum(nil))
	}
	return nil
}

// pull reads a stream once and keeps the wanted contents.
func (s *Spool) pull(ctx context.Context, a *Archive, wanted map[int][]*node) (err error) {
	r, err := a.Open()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	tr := tar.NewReader(&ctxReader{ctx, r})
	for entry := 0; len(wanted) > 0; entry++ {
		hdr, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return invalidf("an archive is shorter than a moment ago")
		}
		if err != nil && !errors.Is(err, tar.ErrInsecurePath) {
			return invalidf("read an archive again: %w", err)
		}
		nodes := wanted[entry]
		if nodes == nil {
			continue
		}
		delete(wanted, entry)
		if hdr.Size > s.limit-s.n {
			return invalidf("the files that are copied have more than %d bytes", s.limit)
		}
		hash := sha256.New()
		got, err := io.CopyN(io.MultiWriter(io.NewOffsetWriter(s.file, s.n), hash), tr, hdr.Size)
		if err != nil {
			return fmt.Errorf("copy %q: %w", clip(hdr.Name), err)
		}
		for _, n := range nodes {
			n.content = content{in: s.at, offset: s.n}
			n.size, n.digest = got, hex.EncodeToString(hash.Sum(nil))
		}
		s.n += got
	}
	return nil
}

type ctxReader struct {
	ctx context.Context //nolint:containedctx // an io.Reader has no other way to be interrupted
	r   io.Reader
}

func (c *ctxReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(p)
}
