package layer

import (
	"archive/tar"
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// A file that is mostly holes is written by [Diff] without them, if [DiffOptions].Holes is set, and
// by [Apply] with them again. Both cost only the time and room of the bytes that were written to
// the file. See docs/decisions/0013.
//
// Such an entry has the PAX record below, with the file's size and a number of pieces. Its content
// are the offset and the length of each piece, eight bytes each with the lowest first, and then the
// pieces. Zeros are left out by the file's content, not by its blocks on disk: if a program has
// written zeros or skipped over them, the stream is equal, and so is that of the tree that it is
// unpacked to.
const holesRecord = "SANDBOXD.pieces"

const (
	// granule is the unit of omission: that many zeros at a multiple of it.
	granule = 64 << 10
	// minHoles is the minimum of zeros left out in all; with fewer, a file is written like any other.
	minHoles = 1 << 20
	// maxPieces limits the memory for pieces, 16 bytes each. The default of [Limits].Bytes is reached
	// before.
	maxPieces = 4 << 20
	perPiece  = 16
)

// piece is a part of a file.
type piece struct{ at, n int64 }

// pieces returns the parts of the file that are not zeros, in order, and their bytes. It returns
// one piece, the whole file, if that is better written like any other. Holes are not read. It stops
// at more than limit bytes.
func pieces(fd int, size, limit int64, buf []byte) (found []piece, content int64, err error) {
	whole := []piece{{0, size}}
	if size < minHoles {
		return whole, size, nil
	}
	for at := int64(0); at < size && content <= limit; {
		data, err := seek(fd, at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) || err == nil && data >= size {
			break // a hole to the end
		}
		if err != nil {
			return nil, 0, fmt.Errorf("look for data: %w", err)
		}
		hole, err := seek(fd, data, unix.SEEK_HOLE)
		if errors.Is(err, unix.ENXIO) {
			return nil, 0, fmt.Errorf("%w: it became shorter", ErrChanged)
		}
		if err != nil {
			return nil, 0, fmt.Errorf("look for a hole: %w", err)
		}
		// At is a multiple of granule, here and at the end of each round.
		at = max(at, data-data%granule)
		for hole = min(max(hole, data+1), size); at < hole && content <= limit; {
			n := min(granule, size-at)
			zero, err := zeros(fd, at, n, buf)
			switch last := len(found) - 1; {
			case err != nil:
				return nil, 0, err
			case zero:
				at += n
				continue
			case last >= 0 && found[last].at+found[last].n == at:
				found[last].n += n
			case len(found) == maxPieces:
				return nil, 0, invalidf("it has more than %d holes", maxPieces)
			default:
				found = append(found, piece{at, n})
			}
			content += n
			at += n
		}
	}
	if size-content < minHoles {
		return whole, size, nil
	}
	return found, content, nil
}

func seek(fd int, at int64, whence int) (int64, error) {
	for {
		at, err := unix.Seek(fd, at, whence)
		if !errors.Is(err, unix.EINTR) {
			return at, err
		}
	}
}

// zeros reports whether n bytes of a file are zeros.
func zeros(fd int, at, n int64, buf []byte) (bool, error) {
	in := section{fd, at}
	for n > 0 {
		m, err := in.Read(buf[:min(n, int64(len(buf)))])
		switch {
		case errors.Is(err, io.EOF):
			return false, fmt.Errorf("%w: it became shorter", ErrChanged)
		case err != nil:
			return false, fmt.Errorf("read content: %w", err)
		case !allZero(buf[:m]):
			return false, nil
		}
		n -= int64(m)
	}
	return true, nil
}

// section reads a regular file from an offset on.
type section struct {
	fd int
	at int64
}

func (s *section) Read(p []byte) (int, error) {
	for {
		n, err := unix.Pread(s.fd, p, s.at)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return 0, err
		case n == 0 && len(p) > 0:
			return 0, io.EOF
		}
		s.at += int64(n)
		return n, nil
	}
}

// granules is a section that counts its zeros while they are read. A program may write zeros after
// [pieces] has looked, and the unpacked tree would then read as another stream.
type granules struct {
	section
	size   int64 // of the file
	filled bool  // the current granule has a byte other than zero
	zeros  int64 // bytes of granules that are all zeros
}

func (g *granules) Read(p []byte) (int, error) {
	at := g.at
	n, err := g.section.Read(p)
	for p = p[:n]; len(p) > 0; {
		begin := at - at%granule
		end := min(begin+granule, g.size)
		step := min(end-at, int64(len(p)))
		g.filled = g.filled || !allZero(p[:step])
		if at, p = at+step, p[step:]; at < end {
			break
		}
		if !g.filled {
			g.zeros += end - begin
		}
		g.filled = false
	}
	return n, err
}

// setPieces turns the header into one of a file of these pieces, with so many bytes, which follow
// the output of [putPieces].
func setPieces(hdr *tar.Header, size, content int64, parts []piece) {
	if hdr.PAXRecords == nil {
		hdr.PAXRecords = make(map[string]string, 1)
	}
	hdr.PAXRecords[holesRecord] = fmt.Sprintf("%d,%d", size, len(parts))
	hdr.Size = content + perPiece*int64(len(parts))
}

func putPieces(w io.Writer, parts []piece) error {
	out := bufio.NewWriter(w)
	var b [perPiece]byte
	for _, p := range parts {
		binary.LittleEndian.PutUint64(b[:], uint64(p.at)) //nolint:gosec // an offset
		binary.LittleEndian.PutUint64(b[8:], uint64(p.n)) //nolint:gosec // a length
		if _, err := out.Write(b[:]); err != nil {
			return err
		}
	}
	return out.Flush()
}

// getPieces reads the pieces of an entry that has some, and the size of its file; ok is false for
// an ordinary file.
func getPieces(hdr *tar.Header, content io.Reader) (parts []piece, size int64, ok bool, err error) {
	record, ok := hdr.PAXRecords[holesRecord]
	if !ok {
		return nil, 0, false, nil
	}
	bad := func(why string) ([]piece, int64, bool, error) {
		return nil, 0, false, invalidf("the pieces of the file: %s", why)
	}
	total, many, _ := strings.Cut(record, ",")
	size, err = strconv.ParseInt(total, 10, 64)
	count, cerr := strconv.ParseInt(many, 10, 64)
	if err != nil || cerr != nil || size < 0 || count < 0 || count > maxPieces || count*perPiece > hdr.Size {
		return bad("a size, and a number that can be, are not there")
	}
	in := bufio.NewReader(io.LimitReader(content, count*perPiece)) // the LimitReader keeps bufio from reading further
	end, sum := int64(0), int64(0)
	var b [perPiece]byte
	for range count {
		if _, err := io.ReadFull(in, b[:]); err != nil {
			return nil, 0, false, err
		}
		p := piece{int64(binary.LittleEndian.Uint64(b[:])), int64(binary.LittleEndian.Uint64(b[8:]))} //nolint:gosec // checked against the size next
		if p.at < end || p.n <= 0 || p.at > size || p.n > size-p.at {
			return bad("one is out of order, empty or beyond the end")
		}
		parts = append(parts, p)
		end, sum = p.at+p.n, sum+p.n
	}
	if sum != hdr.Size-count*perPiece {
		return bad("they differ from the content")
	}
	return parts, size, true, nil
}
