package service

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// Files logs/<sandbox>/00000001.log and so on in the data directory keep the output of main
// processes; the oldest are removed when there are too many. Each line is a logRecord. The first
// record of each file and of each process identifies the process and the offset of its next output,
// so that the next daemon finds the place to continue in the last file.

const (
	defaultLogSize  = 4 << 20
	defaultLogFiles = 3
	defaultLogLimit = 2 << 30
	minLogSize      = 256 << 10 // a record has at most logPiece bytes, six times that as JSON, and is never cut in two
	logPiece        = 16 << 10
	maxLogLine      = 8 * logPiece
)

// logRecord is a line of a log file: output, or with Run the beginning of a file or a main process.
type logRecord struct {
	api.LogEntry
	Offset int64      `json:"offset"` // of the output, or what follows, in that of the whole process
	Run    *time.Time `json:"run,omitempty"`
	Life   int        `json:"life,omitempty"` // with Run: of the sandbox
}

// mainLogs are the logs of all sandboxes.
type mainLogs struct {
	dir   string
	size  int64 // of one file
	files int   // of one sandbox
	limit int64 // of all files; see trim
	log   *slog.Logger
	// tenant returns the tenant of a sandbox.
	tenant func(id string) string

	trimming sync.Mutex // serializes trim

	mu sync.Mutex
	of map[string]*mainLog
}

func newMainLogs(dataDir string, size int64, files int, limit int64) *mainLogs {
	return &mainLogs{dir: filepath.Join(dataDir, "logs"), size: size, files: files, limit: limit, log: slog.New(slog.DiscardHandler), tenant: func(string) string { return "" }, of: make(map[string]*mainLog)}
}

// logFile is a file of a sandbox's log.
type logFile struct {
	path string
	size int64
	at   time.Time // of the last writing
}

// trim removes files until all logs together have room for one more file of this sandbox within the
// limit. It takes the oldest file of the sandbox with most bytes, the file to come included, of the
// tenant with most bytes; of equals, that with the oldest write. So neither a sandbox nor a tenant
// that writes much evicts a smaller one's. The file being written stays, so that the limit may be
// exceeded by these. Files that cannot be examined or removed do not block writers.
func (m *mainLogs) trim(id string) error {
	m.trimming.Lock()
	defer m.trimming.Unlock()
	sandboxes, err := os.ReadDir(m.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read logs: %w", err)
	}
	var errs []error
	total := m.size
	has, files := map[string]int64{id: m.size}, make(map[string][]logFile) // of each the oldest first
	tenants := map[string]string{id: m.tenant(id)}
	held := map[string]int64{tenants[id]: m.size} // by tenant
	for _, sb := range sandboxes {
		all, err := m.logFiles(sb.Name())
		if err != nil {
			errs = append(errs, err)
			continue
		}
		tenants[sb.Name()] = m.tenant(sb.Name())
		for _, f := range all {
			has[sb.Name()] += f.size
			held[tenants[sb.Name()]] += f.size
			total += f.size
		}
		if m.writing(sb.Name()) {
			last := len(all) - 1
			for last > 0 && all[last].size == 0 { // it does not say where a daemon that comes after a crash is to go on
				last--
			}
			all = all[:max(last, 0)]
		}
		if len(all) > 0 {
			files[sb.Name()] = all
		}
	}
	for total > m.limit && len(files) > 0 {
		most := ""
		for of := range files {
			if most == "" {
				most = of
				continue
			}
			order := cmp.Or(cmp.Compare(held[tenants[of]], held[tenants[most]]), cmp.Compare(has[of], has[most]), files[most][0].at.Compare(files[of][0].at))
			if order > 0 {
				most = of
			}
		}
		f := files[most][0]
		if files[most] = files[most][1:]; len(files[most]) == 0 {
			delete(files, most)
		}
		if err := os.Remove(f.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("remove old log: %w", err))
			continue
		}
		has[most] -= f.size
		held[tenants[most]] -= f.size
		total -= f.size
	}
	return errors.Join(errs...)
}

// logFiles are those of a sandbox, in order.
func (m *mainLogs) logFiles(id string) (files []logFile, err error) {
	l := &mainLog{dir: filepath.Join(m.dir, id)}
	seqs, err := l.segments()
	for _, seq := range seqs {
		fi, err := os.Lstat(l.path(seq))
		if errors.Is(err, fs.ErrNotExist) {
			continue // its sandbox was deleted, or it was the oldest
		} else if err != nil {
			return nil, fmt.Errorf("look at log: %w", err)
		}
		files = append(files, logFile{l.path(seq), fi.Size(), fi.ModTime()})
	}
	return files, err
}

// writing reports whether a main process of the sandbox writes to its log, or will.
func (m *mainLogs) writing(id string) bool {
	m.mu.Lock()
	l := m.of[id]
	m.mu.Unlock()
	if l == nil {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.writers > 0
}

// get returns the log of a sandbox, whether or not there is anything in it.
func (m *mainLogs) get(id string) *mainLog {
	m.mu.Lock()
	defer m.mu.Unlock()
	l := m.of[id]
	if l == nil {
		l = &mainLog{all: m, dir: filepath.Join(m.dir, id), size: m.size, files: m.files}
		m.of[id] = l
	}
	return l
}

// remove removes the log of a sandbox that is no more.
func (m *mainLogs) remove(id string) error {
	m.mu.Lock()
	l := m.of[id]
	delete(m.of, id)
	m.mu.Unlock()
	if l != nil {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.removed = true
		l.wake()
	}
	if err := os.RemoveAll(filepath.Join(m.dir, id)); err != nil {
		return fmt.Errorf("remove log of sandbox %s: %w", id, err)
	}
	return nil
}

// sweep removes the logs of sandboxes that are no more.
func (m *mainLogs) sweep(exists func(id string) bool) error {
	if err := os.MkdirAll(m.dir, 0o700); err != nil {
		return fmt.Errorf("make directory of logs: %w", err)
	}
	entries, err := os.ReadDir(m.dir)
	if err != nil {
		return fmt.Errorf("read logs: %w", err)
	}
	var errs []error
	for _, e := range entries {
		if !exists(e.Name()) {
			errs = append(errs, m.remove(e.Name()))
		}
	}
	return errors.Join(errs...)
}

// mainLog is the log of one sandbox. Its writers, one for each main process, take turns.
type mainLog struct {
	all   *mainLogs
	dir   string
	size  int64
	files int

	mu      sync.Mutex
	writers int           // one that writes, and those that wait for it
	last    chan struct{} // closed when the last of them has ended
	changed chan struct{} // closed at the next change; nil if no reader waits
	removed bool
}

// wake needs mu.
func (l *mainLog) wake() {
	if l.changed != nil {
		close(l.changed)
		l.changed = nil
	}
}

// state returns a channel that is closed when there is more, and whether there may ever be.
func (l *mainLog) state() (more <-chan struct{}, goesOn bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.changed == nil {
		l.changed = make(chan struct{})
	}
	return l.changed, l.writers > 0 && !l.removed
}

// enqueue registers a writer. It may write when turn is closed, which is after earlier writers,
// until it calls done.
func (l *mainLog) enqueue() (turn <-chan struct{}, done func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	before, mine := l.last, make(chan struct{})
	if before == nil {
		before = make(chan struct{})
		close(before)
	}
	l.last = mine
	l.writers++
	return before, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.writers--
		l.wake()
		close(mine)
	}
}

// logWriter writes the output of one main process.
type logWriter struct {
	log  *mainLog
	life int // of the sandbox
	run  time.Time
	next int64    // offset of what comes next
	f    *os.File // nil until there is something to write
	seq  int
	at   int64 // length of the file
	said bool  // the file says whose output follows

	wrote int64 // bytes, to all files
}

var errOlder = errors.New("a later main process has written to the log")

// write opens the log for the main process that was started at run in a life of the sandbox, and
// finds the place where the last daemon stopped. It writes nothing yet: a full disk may have room
// later.
func (l *mainLog) write(life int, run time.Time) (_ *logWriter, err error) {
	w := &logWriter{log: l, life: life, run: run.UTC()}
	defer func() {
		if err != nil {
			w.close()
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
			w.close()
			w.seq--
			continue
		case last == nil: // damaged
			w.close()
			w.next = 0
		case last.Run.Equal(w.run):
			w.said = true
		case last.Life > life:
			return nil, errOlder
		default:
			w.next = 0
		}
		if seq < seqs[len(seqs)-1] {
			w.close() // readers go on to the empty one, and so do we
		}
		return w, nil
	}
	return w, nil
}

// reopen opens a file to go on in it, and returns the last beginning of a process that is in it,
// nil if there is none.
func (w *logWriter) reopen(seq int) (last *logRecord, err error) {
	if w.f, err = os.OpenFile(w.log.path(seq), os.O_RDWR, 0); err != nil {
		return nil, err
	}
	if w.at, err = scanRecords(bufio.NewReaderSize(w.f, maxLogLine), func(rec *logRecord) error {
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

// append writes output of one stream of the process. If it fails, that output is missing from the
// log, and nothing else.
func (w *logWriter) append(e api.LogEntry, offset int64) error {
	w.next = offset + int64(len(e.Text)+len(e.Data))
	if err := w.put(&logRecord{LogEntry: e, Offset: offset}); err != nil {
		return fmt.Errorf("write log: %w", err)
	}
	return nil
}

// put writes a line, to a new file if the current one is full. The first line of a process in a
// file follows one that identifies it.
func (w *logWriter) put(rec *logRecord) error {
	data, err := json.Marshal(rec)
	if err != nil {
		return err
	}
	head, err := json.Marshal(&logRecord{LogEntry: api.LogEntry{Time: rec.Time}, Run: &w.run, Life: w.life, Offset: rec.Offset})
	if err != nil {
		return err
	}
	begin, lines := slices.Concat(head, []byte("\n"), data, []byte("\n")), slices.Concat(data, []byte("\n"))
	if !w.said {
		lines = begin
	}
	if w.f == nil || w.at > 0 && w.at+int64(len(lines)) > w.log.size {
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
func (w *logWriter) rotate() error {
	if err := w.log.all.trim(filepath.Base(w.log.dir)); err != nil {
		w.log.all.log.Warn("the logs may have more than the limit", "limit", w.log.all.limit, "error", err)
	}
	f, err := w.log.begin(w.seq + 1)
	if err != nil {
		return err
	}
	w.close()
	w.f, w.at, w.said = f, 0, false
	w.seq++
	seqs, err := w.log.segments()
	if err != nil {
		return err
	}
	for _, seq := range seqs {
		if seq <= w.seq-w.log.files {
			if err := os.Remove(w.log.path(seq)); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
	}
	return nil
}

// begin makes a file, unless the sandbox is no more: then it would be there again.
func (l *mainLog) begin(seq int) (*os.File, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.removed {
		return nil, fs.ErrNotExist
	}
	if err := os.MkdirAll(l.dir, 0o700); err != nil {
		return nil, err
	}
	return os.OpenFile(l.path(seq), os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
}

func (w *logWriter) close() {
	if w.f != nil {
		_ = w.f.Close() // nothing is buffered
		w.f = nil
	}
}

func (l *mainLog) path(seq int) string { return filepath.Join(l.dir, fmt.Sprintf("%08d.log", seq)) }

// segments are the numbers of the files that there are, in order.
func (l *mainLog) segments() ([]int, error) {
	entries, err := os.ReadDir(l.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read log: %w", err)
	}
	var seqs []int
	for _, e := range entries {
		var seq int
		if n, err := fmt.Sscanf(e.Name(), "%08d.log", &seq); n == 1 && err == nil && e.Name() == filepath.Base(l.path(seq)) {
			seqs = append(seqs, seq)
		}
	}
	slices.Sort(seqs)
	return seqs, nil
}

// scanRecords calls each for every complete record, and returns their bytes. Other lines are
// skipped. The reader has room for [maxLogLine].
func scanRecords(in *bufio.Reader, each func(*logRecord) error) (read int64, err error) {
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
		var rec logRecord
		if bad || json.Unmarshal(line, &rec) != nil || rec.Offset < 0 {
			continue
		}
		if err := each(&rec); err != nil {
			return read, err
		}
	}
}

// LogReader reads a log from its beginning, or where the last lines begin.
type LogReader struct {
	log *mainLog
	LogOptions

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

// LogOptions select entries of a log.
type LogOptions struct {
	Follow         bool
	Tail           int       // lines; negative: all
	Since          time.Time // zero: from the beginning
	Stdout, Stderr bool
}

func (o *LogOptions) want(rec *logRecord) bool {
	return (rec.Stream == "stdout" && o.Stdout || rec.Stream == "stderr" && o.Stderr) && !rec.Time.Before(o.Since)
}

func (l *mainLog) read(ctx context.Context, opts LogOptions) (*LogReader, error) {
	r := &LogReader{log: l, LogOptions: opts, blind: opts.Tail >= 0 || !opts.Since.IsZero(), in: bufio.NewReaderSize(nil, maxLogLine)}
	if opts.Tail < 0 {
		return r, nil
	}
	// How many lines there are in each file, then where the last ones begin.
	lines := map[int]int{}
	total, ended := 0, true
	count := &LogReader{log: l, LogOptions: opts, in: r.in}
	if err := count.scan(ctx, func(rec *logRecord) error {
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
	seqs := make([]int, 0, len(lines))
	for seq := range lines {
		seqs = append(seqs, seq)
	}
	slices.Sort(seqs)
	for _, seq := range seqs {
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
func (r *LogReader) scan(ctx context.Context, each func(*logRecord) error) error {
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

func (r *LogReader) scanFile(each func(*logRecord) error) error {
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
func (r *LogReader) entries(ctx context.Context, emit func(api.LogEntry) error) error {
	return r.scan(ctx, func(rec *logRecord) error {
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
		if rec.Time.Before(r.Since) {
			r.missing = 0
		}
		if !r.want(rec) {
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
func (r *LogReader) Read(ctx context.Context, emit func(api.LogEntry) error) error {
	for {
		more, goesOn := r.log.state()
		if err := r.entries(ctx, emit); err != nil {
			return err
		}
		if !goesOn || !r.Follow {
			return nil
		}
		select {
		case <-more:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
