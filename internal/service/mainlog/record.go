package mainlog

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

const (
	// Piece is the maximum number of bytes of output in an entry.
	Piece = 16 << 10

	maxLine = 8 * Piece // a record has the bytes of its entry, six times that as JSON, and is never cut in two
)

// record is a line of a log file: output, or with Run the beginning of a file or a main process.
type record struct {
	api.LogEntry
	Offset int64      `json:"offset"` // of the output, or what follows, in that of the whole process
	Run    *time.Time `json:"run,omitempty"`
	Life   int        `json:"life,omitempty"` // with Run: of the sandbox
}

// scanRecords calls each for every complete record, and returns their bytes. Other lines are
// skipped. The reader has room for [maxLine].
func scanRecords(in *bufio.Reader, each func(*record) error) (read int64, err error) {
	for long := int64(0); ; {
		line, err := in.ReadSlice('\n')
		switch {
		case errors.Is(err, bufio.ErrBufferFull): // nothing of ours
			long += int64(len(line))
			continue
		case errors.Is(err, io.EOF):
			return read, nil
		case err != nil:
			return read, fmt.Errorf("read log: %w", err)
		}
		read += long + int64(len(line))
		bad := long > 0
		long = 0
		var rec record
		if bad || json.Unmarshal(line, &rec) != nil || rec.Offset < 0 {
			continue
		}
		if err := each(&rec); err != nil {
			return read, err
		}
	}
}
