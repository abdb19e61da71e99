package workspace

import (
	"bufio"
	"bytes"
	"compress/zlib"
	"crypto/sha1" //nolint:gosec // git's names of contents
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strings"
)

// binary writes the content that a file gets in the form that git has for files that are no
// text: the names of both contents, and the new one compressed, in lines of base 85. Git
// compares before, the name of the old one, with what it finds. A reverse patch is left out: it
// would hold the whole old file. A mode is empty where there is no file.
func (p *Plan) binary(out *bufio.Writer, before, oldMode, newMode string, e *entry) error {
	after, size, content := noBlob, int64(0), io.Reader(bytes.NewReader(nil))
	if newMode != "" {
		var err error
		if after, err = blobName(p.set.content(e), e.size); err != nil {
			return fmt.Errorf("read content: %w", err)
		}
		size, content = e.size, p.set.content(e)
	}
	if before == after {
		return nil // only the mode differs
	}
	fmt.Fprintf(out, "index %s..%s", before, after)
	if oldMode == newMode {
		fmt.Fprintf(out, " %s", newMode)
	}
	fmt.Fprintf(out, "\nGIT binary patch\nliteral %d\n", size)
	lines := &base85{out: out}
	z := zlib.NewWriter(lines)
	if _, err := io.Copy(z, content); err != nil {
		return fmt.Errorf("read content: %w", err)
	}
	if err := errors.Join(z.Close(), lines.flush()); err != nil {
		return err
	}
	return out.WriteByte('\n')
}

// hostBlob returns git's name of the host's content at a path.
func (p *Plan) hostBlob(name string, k kind, was *state) (string, error) {
	switch k {
	case none:
		return noBlob, nil
	case link:
		target, err := p.to.readlink(name)
		if err != nil {
			return "", err
		}
		return blobName(strings.NewReader(target), int64(len(target)))
	case file, directory, special:
	}
	f, err := p.to.read(name)
	if err != nil {
		return "", err
	}
	defer f.Close() // only read
	return blobName(f, was.size)
}

// noBlob is git's name of no content.
const noBlob = "0000000000000000000000000000000000000000"

// blobName returns git's name of a content.
func blobName(r io.Reader, size int64) (string, error) {
	sum := sha1.New() //nolint:gosec // see above
	fmt.Fprintf(sum, "blob %d\x00", size)
	n, err := io.Copy(sum, r)
	if err == nil && n != size {
		err = errChanged
	}
	return hex.EncodeToString(sum.Sum(nil)), err
}

// base85 writes lines of at most 52 bytes, each with its length before it: A to Z for 1 to 26,
// then a to z.
type base85 struct {
	out  *bufio.Writer
	line [52]byte
	n    int
}

const digits85 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"

func (b *base85) Write(p []byte) (int, error) {
	for written := 0; written < len(p); {
		n := copy(b.line[b.n:], p[written:])
		b.n += n
		written += n
		if b.n == len(b.line) {
			if err := b.flush(); err != nil {
				return written, err
			}
		}
	}
	return len(p), nil
}

// flush writes the line that is begun.
func (b *base85) flush() error {
	if b.n == 0 {
		return nil
	}
	clear(b.line[b.n:])
	const lengths = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
	text := []byte{lengths[b.n-1]}
	for i := 0; i < b.n; i += 4 {
		v := uint32(b.line[i])<<24 | uint32(b.line[i+1])<<16 | uint32(b.line[i+2])<<8 | uint32(b.line[i+3])
		var group [5]byte
		for at := 4; at >= 0; at-- {
			group[at] = digits85[v%85]
			v /= 85
		}
		text = append(text, group[:]...)
	}
	b.n = 0
	_, err := b.out.Write(append(text, '\n'))
	return err
}
