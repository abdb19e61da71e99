package events

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// journal is the record of one tenant.
type journal struct {
	dir     string
	opts    *Options
	writers *sync.WaitGroup // the log's

	files   sync.Mutex // held by the one goroutine that opens or writes files; before mu
	file    *os.File   // the last segment; nil if there is none, or not yet
	last    uint64     // ID of the last event
	lost    uint64     // events that could not be written since the last one that was
	failing bool       // a write has failed, and was logged

	mu      sync.Mutex
	queue   []api.Event
	dropped uint64 // events that did not fit into queue
	taken   uint64 // events that Publish has taken, dropped ones included
	settled uint64 // those of them that are written, or lost
	writing bool   // a goroutine is in writeQueue
	// lingering starts a writer for events of execs; nil if the queue has none, or a writer.
	lingering *time.Timer
	followers int // readers that wait for more
	loaded    bool
	closed    bool
	shown     view
	changed   chan struct{} // closed when shown or settled changes
}

// A view bounds the part of the journal that readers may read.
type view struct {
	starts []uint64 // numbers of the first event of each segment, oldest first
	size   int64    // bytes of the last segment
	next   uint64   // number of the next event
}

// record is one line of a segment.
type record struct {
	api.Event
	// Missing is the number of events that could not be written before this one.
	Missing uint64 `json:"missing,omitempty"`
	// Before is the ID of the event before, in the first line of a segment.
	Before uint64 `json:"before,omitempty"`
}

// hurry starts the writer for the queue. It needs mu, and that there is no writer.
func (j *journal) hurry() {
	if j.lingering != nil {
		j.lingering.Stop()
		j.lingering = nil
	}
	j.writing = true
	j.writers.Go(j.writeQueue)
}

// follow counts a reader that waits for more. The returned function ends it.
func (j *journal) follow() func() {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.followers++
	return func() {
		j.mu.Lock()
		defer j.mu.Unlock()
		j.followers--
	}
}

// writeQueue writes until nothing is queued.
func (j *journal) writeQueue() {
	for {
		j.mu.Lock()
		batch, dropped := j.queue, j.dropped
		j.queue, j.dropped = nil, 0
		if len(batch) == 0 && dropped == 0 {
			j.writing = false
			j.mu.Unlock()
			return
		}
		j.mu.Unlock()
		if err := j.write(batch, dropped); err != nil && !j.failing {
			j.failing = true // once is enough
			j.opts.Log.Error("events are not recorded", "error", err)
		}
		j.mu.Lock()
		j.settled += uint64(len(batch)) + dropped
		j.wake()
		j.mu.Unlock()
	}
}

// wake needs mu.
func (j *journal) wake() {
	close(j.changed)
	j.changed = make(chan struct{})
}

// settle waits until the events that were published before are written, or lost.
func (j *journal) settle(ctx context.Context) error {
	j.mu.Lock()
	until := j.taken
	if j.lingering != nil {
		j.hurry()
	}
	for j.settled < until {
		changed := j.changed
		j.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		j.mu.Lock()
	}
	j.mu.Unlock()
	return nil
}

// write appends events. Those that it cannot append are counted in lost.
func (j *journal) write(batch []api.Event, dropped uint64) (err error) {
	j.files.Lock()
	defer j.files.Unlock()
	var done, n uint64 // events that are written, and those in buf
	// The queue drops the newest, so that what it dropped comes behind the batch.
	defer func() { j.lost += dropped + uint64(len(batch)) - done }()
	if err := j.load(); err != nil {
		return err
	}
	now := j.view()
	defer func() { j.show(now) }()
	var buf []byte
	flush := func() error {
		if n == 0 {
			return nil
		}
		if _, err := j.file.WriteAt(buf, now.size); err != nil {
			_ = j.file.Truncate(now.size) // readers see nothing behind it, and the next daemon cuts it off
			return fmt.Errorf("write events: %w", err)
		}
		now.size += int64(len(buf))
		now.next += n
		done += n
		j.lost = 0
		buf, n = buf[:0], 0
		return nil
	}
	for i := range batch {
		e := &batch[i]
		id := max(j.last+1, uint64(max(0, e.Time.UnixMicro())))
		before := j.last
		e.ID = id
		rec := record{Event: *e}
		if n == 0 {
			rec.Missing = j.lost
		}
		line, err := encode(&rec)
		if err != nil {
			return err
		}
		if at := now.size + int64(len(buf)); j.file == nil || at > 0 && at+int64(len(line)) > j.opts.segmentSize {
			if err := flush(); err != nil {
				return err
			}
			if err := j.begin(&now); err != nil {
				return err
			}
			rec.Before, rec.Missing = before, j.lost
			if line, err = encode(&rec); err != nil {
				return err
			}
		}
		buf = append(buf, line...)
		n++
		j.last = id
	}
	if err := flush(); err != nil {
		return err
	}
	j.failing = false
	return nil
}

func encode(rec *record) ([]byte, error) {
	line, err := json.Marshal(rec)
	if err != nil {
		return nil, fmt.Errorf("encode event: %w", err)
	}
	return append(line, '\n'), nil
}

// begin makes the next segment and removes the oldest. It needs files.
func (j *journal) begin(now *view) error {
	if err := os.MkdirAll(j.dir, 0o700); err != nil {
		return fmt.Errorf("begin a segment of events: %w", err)
	}
	// A segment of this name has no event: it is of a write that failed.
	f, err := os.OpenFile(j.path(now.next), os.O_CREATE|os.O_RDWR|os.O_TRUNC, 0o600)
	if err != nil {
		return fmt.Errorf("begin a segment of events: %w", err)
	}
	if j.file != nil {
		_ = j.file.Close() // what was written is the kernel's
	}
	j.file = f
	if n := len(now.starts); n == 0 || now.starts[n-1] != now.next {
		now.starts = append(slices.Clone(now.starts), now.next) // readers have the old one
	}
	now.size = 0
	for len(now.starts) > segments {
		if err := os.Remove(j.path(now.starts[0])); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove a segment of events: %w", err)
		}
		now.starts = now.starts[1:]
	}
	return nil
}

func (j *journal) view() view {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.shown
}

// show publishes what readers may read, and wakes them.
func (j *journal) show(v view) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.shown = v
	j.wake()
}

// snapshot returns what may be read, and a channel that is closed when there is more.
func (j *journal) snapshot() (view, <-chan struct{}, error) {
	j.mu.Lock()
	loaded := j.loaded
	j.mu.Unlock()
	if !loaded {
		j.files.Lock()
		err := j.load()
		j.files.Unlock()
		if err != nil {
			return view{}, nil, err
		}
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.closed {
		return view{}, nil, ErrClosed
	}
	return j.shown, j.changed, nil
}

// load finds the segments and repairs the end of the last. It needs files.
func (j *journal) load() error {
	j.mu.Lock()
	loaded, closed := j.loaded, j.closed
	j.mu.Unlock()
	if closed {
		return ErrClosed
	}
	if loaded {
		return nil
	}
	v, err := j.find()
	if err != nil {
		return fmt.Errorf("open the record of events: %w", err)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.shown, j.loaded = v, true
	return nil
}

func (j *journal) find() (v view, err error) {
	entries, err := os.ReadDir(j.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return v, err
	}
	for _, entry := range entries { // in the order of their names, which is that of the numbers
		if start, ok := startOf(entry.Name()); ok {
			v.starts = append(v.starts, start)
		}
	}
	for len(v.starts) > 0 {
		start := v.starts[len(v.starts)-1]
		f, err := os.OpenFile(j.path(start), os.O_RDWR, 0)
		if err != nil {
			return v, err
		}
		count, size, last, err := scan(f)
		if err == nil {
			err = f.Truncate(size)
		}
		if err != nil {
			return v, errors.Join(err, f.Close())
		}
		if count > 0 {
			j.file, j.last = f, last
			v.size, v.next = size, start+count
			return v, nil
		}
		// A crash came before its first event, or has lost all of them: the one before goes on.
		if err := errors.Join(f.Close(), os.Remove(j.path(start))); err != nil {
			return v, err
		}
		v.starts = v.starts[:len(v.starts)-1]
		v.next = start
	}
	return v, nil
}

// scan returns the number of events at the beginning of a segment that are whole, their size in
// bytes, and the ID of the last.
func scan(in io.Reader) (count uint64, size int64, last uint64, err error) {
	lines := bufio.NewReader(in)
	for {
		line, err := readLine(lines)
		if errors.Is(err, io.EOF) || errors.Is(err, errDamaged) {
			return count, size, last, nil
		}
		if err != nil {
			return 0, 0, 0, err
		}
		var rec record
		if !decode(line, &rec) || rec.ID <= last {
			return count, size, last, nil
		}
		count, size, last = count+1, size+int64(len(line)), rec.ID
	}
}

// errDamaged means that a line is no event.
var errDamaged = errors.New("the record of events is damaged")

// readLine returns a line with its end. An incomplete last line is [io.EOF].
func readLine(lines *bufio.Reader) ([]byte, error) {
	var long []byte
	for {
		part, err := lines.ReadSlice('\n')
		switch {
		case err == nil && long == nil:
			return part, nil
		case err == nil:
			return append(long, part...), nil
		case !errors.Is(err, bufio.ErrBufferFull):
			return nil, err
		case len(long)+len(part) > maxLine:
			return nil, errDamaged
		}
		long = append(long, part...)
	}
}

// decode reports whether a line is an event.
func decode(line []byte, rec *record) bool {
	err := json.Unmarshal(bytes.TrimSuffix(line, []byte("\n")), rec)
	return err == nil && rec.ID != 0 && rec.ID <= maxID
}

// maxID bounds the IDs of a damaged record: the next is greater.
const maxID = 1 << 62

const suffix = ".events"

func (j *journal) path(start uint64) string {
	return filepath.Join(j.dir, fmt.Sprintf("%020d%s", start, suffix))
}

// startOf returns the number in the name of a segment.
func startOf(name string) (uint64, bool) {
	digits, ok := strings.CutSuffix(name, suffix)
	if !ok || len(digits) != 20 {
		return 0, false
	}
	start, err := strconv.ParseUint(digits, 10, 64)
	return start, err == nil
}

func (j *journal) close() error {
	j.files.Lock()
	defer j.files.Unlock()
	j.mu.Lock()
	defer j.mu.Unlock()
	j.closed = true
	j.wake()
	if j.file == nil {
		return nil
	}
	err := j.file.Close()
	j.file = nil
	return err
}
