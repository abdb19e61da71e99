package mainlog

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// A Reader reads a log from its beginning, or where the last lines begin.
type Reader struct {
	log  *Log
	opts ReadOptions

	seq int   // of the file
	at  int64 // in it
	// skip is the number of lines to leave out, of those that existed when the reader was made.
	skip    int
	run     *time.Time // whose output was read last
	next    int64      // where in it
	missing int64      // bytes before next that are missing and not yet reported
	blind   bool       // missing output before the start is not reported
	in      *bufio.Reader
}

// ReadOptions select entries of a log.
type ReadOptions struct {
	Follow         bool
	Tail           int       // lines; negative: all
	Since          time.Time // zero: from the beginning
	Stdout, Stderr bool
}

func (o *ReadOptions) want(rec *record) bool {
	return (rec.Stream == "stdout" && o.Stdout || rec.Stream == "stderr" && o.Stderr) && !rec.Time.Before(o.Since)
}

// NewReader returns a reader of the selected entries. It reads the log once to find the last lines.
func (l *Log) NewReader(ctx context.Context, opts ReadOptions) (*Reader, error) {
	r := &Reader{log: l, opts: opts, blind: opts.Tail >= 0 || !opts.Since.IsZero(), in: bufio.NewReaderSize(nil, maxLine)}
	if opts.Tail < 0 {
		return r, nil
	}
	// How many lines there are in each file, then where the last ones begin.
	lines := map[int]int{}
	total, ended := 0, true
	count := &Reader{log: l, opts: opts, in: r.in}
	if err := count.scan(ctx, func(rec *record) error {
		if opts.want(rec) {
			n := newlines(&rec.LogEntry)
			lines[count.seq] += n
			total += n
			ended = strings.HasSuffix(rec.Text, "\n") || bytes.HasSuffix(rec.Data, []byte("\n"))
		}
		return nil
	}); err != nil {
		return nil, err
	}
	keep := opts.Tail
	switch {
	case keep == 0:
		r.seq, r.at = count.seq, count.at
		return r, nil
	case !ended:
		keep-- // the line that goes on
	}
	r.skip = max(0, total-keep)
	if r.skip == 0 {
		return r, nil
	}
	for _, seq := range slices.Sorted(maps.Keys(lines)) {
		if r.seq = seq; r.skip <= lines[seq] {
			break
		}
		r.skip -= lines[seq]
	}
	return r, nil
}

func newlines(e *api.LogEntry) int {
	return strings.Count(e.Text, "\n") + bytes.Count(e.Data, []byte("\n"))
}

// cut takes as many lines as it can, and at most n, from the beginning of an entry.
func cut(e *api.LogEntry, n int) (taken int) {
	for ; taken < n; taken++ {
		i, j := strings.IndexByte(e.Text, '\n'), bytes.IndexByte(e.Data, '\n')
		if i < 0 && j < 0 {
			e.Text, e.Data = "", nil
			return taken
		}
		e.Text, e.Data = e.Text[i+1:], e.Data[j+1:]
	}
	return taken
}

// scan calls each for the records between where the reader is and the end.
func (r *Reader) scan(ctx context.Context, each func(*record) error) error {
	for {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		seqs, err := r.log.segments() // before the file is read: one that is not the last gets no more lines
		if err != nil {
			return err
		}
		i, found := slices.BinarySearch(seqs, r.seq)
		switch {
		case i == len(seqs):
			return nil
		case !found: // the first time, or it was too old
			if r.seq != 0 {
				r.skip = 0
			}
			r.seq, r.at = seqs[i], 0
		}
		if err := r.scanFile(each); err != nil {
			return err
		}
		if i+1 == len(seqs) {
			return nil
		}
		r.seq, r.at = seqs[i+1], 0
	}
}

func (r *Reader) scanFile(each func(*record) error) error {
	f, err := os.Open(r.log.path(r.seq)) // the id in it is of a record, never a request's
	if errors.Is(err, fs.ErrNotExist) {
		return nil // it was the oldest
	}
	if err != nil {
		return fmt.Errorf("read log: %w", err)
	}
	defer f.Close()
	r.in.Reset(io.NewSectionReader(f, r.at, 1<<62))
	n, err := scanRecords(r.in, each)
	r.at += n
	return err
}

// entries calls emit for selected entries that have not been read.
func (r *Reader) entries(ctx context.Context, emit func(api.LogEntry) error) error {
	return r.scan(ctx, func(rec *record) error {
		known := r.run != nil
		if rec.Run != nil {
			if known && !rec.Run.Equal(*r.run) {
				r.next, r.missing = 0, 0 // its unwritten rest will never come
			} else if !known && r.blind {
				r.next = rec.Offset
			}
			r.run = rec.Run
			return nil
		}
		if known {
			r.missing += max(0, rec.Offset-r.next)
		}
		r.next = rec.Offset + int64(len(rec.Text)+len(rec.Data))
		if rec.Time.Before(r.opts.Since) {
			r.missing = 0
		}
		if !r.opts.want(rec) {
			return nil
		}
		e := rec.LogEntry
		if r.skip > 0 {
			r.missing = 0
			if r.skip -= cut(&e, r.skip); len(e.Text)+len(e.Data) == 0 {
				return nil
			}
		}
		e.Dropped, r.missing = r.missing, 0
		return emit(e)
	})
}

// Read calls emit for selected entries. With Follow it goes on until no main process writes to the
// log.
func (r *Reader) Read(ctx context.Context, emit func(api.LogEntry) error) error {
	for {
		more, goesOn := r.log.state()
		if err := r.entries(ctx, emit); err != nil {
			return err
		}
		if !goesOn || !r.opts.Follow {
			return nil
		}
		select {
		case <-more:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
