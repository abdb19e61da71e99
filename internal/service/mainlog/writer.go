package mainlog

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// A Writer writes the output of one main process.
type Writer struct {
	log  *Log
	life int // of the sandbox
	run  time.Time
	next int64    // offset of what comes next
	f    *os.File // nil until there is something to write
	seq  int
	at   int64 // length of the file
	said bool  // the file says whose output follows

	wrote int64 // bytes, to all files
}

// ErrOlder is the error of a main process that comes after its successor. It writes nothing.
var ErrOlder = errors.New("a later main process has written to the log")

// NewWriter opens the log for the main process that was started at run in a life of the sandbox,
// and finds the place where the last daemon stopped. It writes nothing yet: a full disk may have
// room later.
func (l *Log) NewWriter(life int, run time.Time) (_ *Writer, err error) {
	w := &Writer{log: l, life: life, run: run.UTC()}
	defer func() {
		if err != nil {
			w.Close()
		}
	}()
	seqs, err := l.segments()
	if err != nil {
		return nil, err
	}
	for _, seq := range slices.Backward(seqs) {
		w.seq = seq
		last, err := w.reopen(seq)
		switch {
		case err != nil:
			return nil, fmt.Errorf("open log: %w", err)
		case last == nil && w.at == 0: // it was begun, and then came a crash or the disk was full
			w.Close()
			w.seq--
			continue
		case last == nil: // damaged
			w.Close()
			w.next = 0
		case last.Run.Equal(w.run):
			w.said = true
		case last.Life > life:
			return nil, ErrOlder
		default:
			w.next = 0
		}
		if seq < seqs[len(seqs)-1] {
			w.Close() // readers go on to the empty one, and so do we
		}
		return w, nil
	}
	return w, nil
}

// reopen opens a file to go on in it, and returns the last beginning of a process that is in it,
// nil if there is none.
func (w *Writer) reopen(seq int) (last *record, err error) {
	if w.f, err = os.OpenFile(w.log.path(seq), os.O_RDWR, 0); err != nil {
		return nil, err
	}
	if w.at, err = scanRecords(bufio.NewReaderSize(w.f, maxLine), func(rec *record) error {
		if rec.Run != nil {
			last = rec
		}
		w.next = rec.Offset + int64(len(rec.Text)+len(rec.Data))
		return nil
	}); err != nil {
		return nil, err
	}
	// A line that a crash cut off is written again: its output was not reported as saved.
	return last, w.f.Truncate(w.at)
}

// Append writes output of one stream of the process. If it fails, that output is missing from the
// log, and nothing else.
func (w *Writer) Append(e api.LogEntry, offset int64) error {
	w.next = offset + int64(len(e.Text)+len(e.Data))
	if err := w.put(&record{LogEntry: e, Offset: offset}); err != nil {
		return fmt.Errorf("write log: %w", err)
	}
	return nil
}

// Next returns the offset behind the output that the log has of the process.
func (w *Writer) Next() int64 { return w.next }

// Wrote returns the number of bytes that were written to files.
func (w *Writer) Wrote() int64 { return w.wrote }

// put writes a line, to a new file if the current one is full. The first line of a process in a
// file follows one that identifies it.
func (w *Writer) put(rec *record) error {
	data, err := json.Marshal(rec)
	if err != nil {
		return err
	}
	head, err := json.Marshal(&record{LogEntry: api.LogEntry{Time: rec.Time}, Run: &w.run, Life: w.life, Offset: rec.Offset})
	if err != nil {
		return err
	}
	begin, lines := slices.Concat(head, []byte("\n"), data, []byte("\n")), slices.Concat(data, []byte("\n"))
	if !w.said {
		lines = begin
	}
	if w.f == nil || w.at > 0 && w.at+int64(len(lines)) > w.log.store.opts.FileSize {
		if err := w.rotate(); err != nil {
			return err
		}
		lines = begin
	}
	if _, err := w.f.WriteAt(lines, w.at); err != nil {
		_ = w.f.Truncate(w.at) // a reader leaves half a line out, and the next line is written over it
		return err
	}
	w.at += int64(len(lines))
	w.wrote += int64(len(lines))
	w.said = true
	w.log.mu.Lock()
	defer w.log.mu.Unlock()
	w.log.wake()
	return nil
}

// rotate begins a new file, and removes the oldest.
func (w *Writer) rotate() error {
	if err := w.log.store.trim(filepath.Base(w.log.dir)); err != nil {
		w.log.store.opts.Log.Warn("the logs may have more than the limit", "limit", w.log.store.opts.Limit, "error", err)
	}
	f, err := w.log.begin(w.seq + 1)
	if err != nil {
		return err
	}
	w.Close()
	w.f, w.at, w.said = f, 0, false
	w.seq++
	seqs, err := w.log.segments()
	if err != nil {
		return err
	}
	for _, seq := range seqs {
		if seq <= w.seq-w.log.store.opts.Files {
			if err := os.Remove(w.log.path(seq)); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
	}
	return nil
}

// Close closes the file.
func (w *Writer) Close() {
	if w.f != nil {
		_ = w.f.Close() // nothing is buffered
		w.f = nil
	}
}
