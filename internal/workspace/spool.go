package workspace

import (
	"bytes"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// spoolPiece is the size of what becomes a hole if it is zeros.
const spoolPiece = 64 << 10

// spooler writes the contents of a set one after the other. Zeros become holes: a sandbox makes
// files of any size that take no space in it.
type spooler struct {
	f    *os.File
	at   int64
	room int64 // bytes that may still be written
}

// newSpooler leaves half of the free space to the host.
func newSpooler(f *os.File) (*spooler, error) {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &fs); err != nil {
		return nil, fmt.Errorf("look at the free space: %w", err)
	}
	return &spooler{f: f, room: int64(fs.Bavail) * fs.Bsize / 2}, nil //nolint:gosec // G115: no disk has so many blocks
}

func (s *spooler) Write(p []byte) (n int, err error) {
	for n < len(p) {
		piece := p[n:min(n+spoolPiece, len(p))]
		if !zeros(piece) {
			if s.room -= int64(len(piece)); s.room < 0 {
				return n, fmt.Errorf("the changes need more than half of the free space of %s: set TMPDIR to a directory with more", os.TempDir())
			}
			if _, err := s.f.WriteAt(piece, s.at); err != nil {
				return n, err
			}
		}
		n += len(piece)
		s.at += int64(len(piece))
	}
	return n, nil
}

// end makes the file as long as what was written, if it ends with a hole.
func (s *spooler) end() error { return s.f.Truncate(s.at) }

func zeros(p []byte) bool {
	return len(p) == 0 || p[0] == 0 && bytes.Equal(p[1:], p[:len(p)-1])
}
