package service

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// execLog is the output of a detached exec, and its record, in two files of memory that outlive the
// daemon (see package guest on how the bytes get there without being lost at any moment).
//
// The first file has the output: byte n lies at offset n, whatever the stream, and the file's own
// offset, which the kernel keeps, is the total. Output older than the limit is punched out, so that
// the file is sparse and never wraps.
//
// The second file, the state, has the number of pieces at 0, the latest pieces from journalAt on,
// and a JSON document each at recordAt and endAt, with its length before it. A piece is output of
// one stream up to the next of the other; it is noted before its first byte is moved.
type execLog struct {
	out, state     *os.File
	relayR, relayW *os.File // see guest.Sink; nil without a terminal
	limit          int64
	followers      atomic.Int32 // clients that are attached

	mu      sync.Mutex
	total   int64
	punched int64
	count   uint64
	pieces  []piece       // the latest, those of which something is kept; the last one goes on
	changed chan struct{} // closed at the next change; nil if no reader waits
	over    bool          // nothing more will come

	room   sync.Cond // with mu: output that is saved or held leaves room as it is taken
	saving bool      // the output is saved elsewhere before it is dropped
	saved  int64     // the offset up to which that has been done
	let    bool      // the saver has stopped: nothing is taken
	holds  map[*hold]struct{}
	free   bool // holds keep nothing any more
}

// A hold keeps output from being dropped before its reader has taken it. A program that is faster
// waits.
type hold struct {
	at int64 // offset up to which the reader has taken the output; guarded by the log's mu
}

type piece struct {
	at     int64 // offset of its first byte
	stdout int64 // how much of what came before was stdout's
	stderr bool
}

const (
	journalAt = 4096
	pieceSize = 24
	maxPieces = 4096 // beyond them output is dropped as beyond the limit: a program that writes its streams in turns, byte by byte
	recordAt  = 1 << 20
	endAt     = 2 << 20
	maxState  = 512 << 10 // of a document

	// punchSize is how much is dropped at a time. That much more than the limit may lie in memory.
	punchSize = 256 << 10

	// takeSize is as much as is taken at a time.
	takeSize = 64 << 10
)

func newExecLog(limit int64, tty bool) (_ *execLog, err error) {
	l := &execLog{limit: limit}
	l.room.L = &l.mu
	defer func() {
		if err != nil {
			l.close()
		}
	}()
	if l.out, err = memfile("output"); err != nil {
		return nil, err
	}
	if l.state, err = memfile("exec"); err != nil {
		return nil, err
	}
	if tty {
		var p [2]int
		if err := unix.Pipe2(p[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
			return nil, fmt.Errorf("make pipe for the terminal's output: %w", err)
		}
		l.relayR, l.relayW = os.NewFile(uintptr(p[0]), "relay"), os.NewFile(uintptr(p[1]), "relay")
	}
	return l, nil
}

func memfile(name string) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make memfd for %s: %w", name, err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// adoptExecLog reads the files of the last daemon. They stay the caller's on error.
func adoptExecLog(out, state *os.File, limit int64) (*execLog, error) {
	l := &execLog{out: out, state: state, limit: limit}
	l.room.L = &l.mu
	var err error
	if l.total, err = unix.Seek(int(out.Fd()), 0, unix.SEEK_CUR); err != nil {
		return nil, fmt.Errorf("adopt exec: read how much it has written: %w", err)
	}
	var b [pieceSize]byte
	if _, err := state.ReadAt(b[:8], 0); err != nil && l.total > 0 {
		return nil, fmt.Errorf("adopt exec: read its journal: %w", err)
	}
	l.count = binary.NativeEndian.Uint64(b[:8])
	for i := l.count - min(l.count, maxPieces); i < l.count; i++ {
		if _, err := state.ReadAt(b[:], pieceAt(i)); err != nil {
			return nil, fmt.Errorf("adopt exec: read its journal: %w", err)
		}
		p := piece{
			at: int64(binary.NativeEndian.Uint64(b[:])), stdout: int64(binary.NativeEndian.Uint64(b[8:])), //nolint:gosec // as written
			stderr: b[16] != 0,
		}
		if n := len(l.pieces); p.at < 0 || p.at > l.total || p.stdout < 0 || p.stdout > p.at || n > 0 && p.at < l.pieces[n-1].at {
			return nil, errors.New("adopt exec: its journal is damaged")
		}
		l.pieces = append(l.pieces, p)
	}
	if l.total > 0 && len(l.pieces) == 0 {
		return nil, errors.New("adopt exec: its journal is damaged")
	}
	l.trim()
	return l, nil
}

func pieceAt(i uint64) int64 { return journalAt + int64(i%maxPieces)*pieceSize }

// Take implements guest.Sink.
func (l *execLog) Take(stream string, move func(file int) (int, error)) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for !l.let && l.full() {
		l.room.Wait()
	}
	if l.let {
		return 0, errHanded
	}
	if err := l.beginPiece(stream == "stderr"); err != nil {
		return 0, err
	}
	n, err := move(int(l.out.Fd()))
	if n > 0 {
		l.total += int64(n)
		l.trim()
		l.wake()
	}
	return n, err
}

// save makes the log wait for [execLog.saves]: unsaved output is not dropped. It is called before
// the first Take.
func (l *execLog) save(from int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.saving, l.saved = true, from
}

// saves reports that the output up to this offset is kept elsewhere.
func (l *execLog) saves(until int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.saved = max(l.saved, until)
	l.room.Broadcast()
}

// hold makes the log wait for a reader, from the oldest output that it has or the reader's offset.
func (l *execLog) hold(h *hold) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.holds == nil {
		l.holds = make(map[*hold]struct{})
	}
	h.at = max(h.at, l.start())
	l.holds[h] = struct{}{}
}

// taken moves a hold.
func (l *execLog) taken(h *hold, until int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	h.at = until
	l.room.Broadcast()
}

// unhold ends a hold.
func (l *execLog) unhold(h *hold) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.holds, h)
	l.room.Broadcast()
	l.wake()
}

// freeHolds ends all holds, also those to come: the sandbox is being deleted.
func (l *execLog) freeHolds() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.free = true
	l.room.Broadcast()
	l.wake()
}

// held returns a channel that is closed at the next change, nil if no reader holds the log.
func (l *execLog) held() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.holds) == 0 || l.free {
		return nil
	}
	return l.waiting()
}

// hand makes Take refuse more: the rest stays in the pipe for the next daemon.
func (l *execLog) hand() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.let = true
	l.room.Broadcast()
}

// full reports whether the next output could drop output that is unsaved or held. It needs mu.
func (l *execLog) full() bool {
	const pieces = maxPieces - 2
	kept := int64(math.MaxInt64)
	if l.saving {
		kept = l.saved
	}
	if !l.free {
		for h := range l.holds {
			kept = min(kept, h.at)
		}
	}
	n := len(l.pieces)
	return l.total-kept > l.keeps()-takeSize || n >= pieces && l.pieces[n-pieces].at >= kept
}

// Relay implements guest.Sink.
func (l *execLog) Relay() (r, w *os.File) { return l.relayR, l.relayW }

// Followed implements guest.Sink.
func (l *execLog) Followed() bool { return l.followers.Load() > 0 }

// beginPiece notes that the next output is of this stream. It needs mu.
func (l *execLog) beginPiece(stderr bool) error {
	last := len(l.pieces) - 1
	if last >= 0 && l.pieces[last].stderr == stderr {
		return nil
	}
	p := piece{at: l.total, stdout: l.wrote(), stderr: stderr}
	again := last >= 0 && l.pieces[last].at == l.total // that one came to nothing
	var b [pieceSize]byte
	if again && last > 0 && l.pieces[last-1].stderr == stderr {
		l.pieces = l.pieces[:last]
		l.count--
		return l.counted()
	}
	at := l.count
	if again {
		at--
	}
	binary.NativeEndian.PutUint64(b[:], uint64(p.at))      //nolint:gosec // not negative
	binary.NativeEndian.PutUint64(b[8:], uint64(p.stdout)) //nolint:gosec // not negative
	if stderr {
		b[16] = 1
	}
	if _, err := l.state.WriteAt(b[:], pieceAt(at)); err != nil {
		return fmt.Errorf("note the output's stream: %w", err)
	}
	if again {
		l.pieces[last] = p
		return nil
	}
	l.pieces = append(l.pieces, p)
	l.count++
	return l.counted()
}

func (l *execLog) counted() error {
	var b [8]byte
	binary.NativeEndian.PutUint64(b[:], l.count)
	if _, err := l.state.WriteAt(b[:], 0); err != nil {
		return fmt.Errorf("note the output's stream: %w", err)
	}
	return nil
}

// wrote returns the bytes of stdout. It needs mu.
func (l *execLog) wrote() int64 {
	if len(l.pieces) == 0 {
		return 0
	}
	last := l.pieces[len(l.pieces)-1]
	if last.stderr {
		return last.stdout
	}
	return last.stdout + l.total - last.at
}

// keeps returns the number of the latest bytes that are kept: the limit, or takeSize
// if that is more and a reader holds the log. It needs mu.
func (l *execLog) keeps() int64 {
	if len(l.holds) > 0 && !l.free {
		return max(l.limit, takeSize)
	}
	return l.limit
}

// start is the offset of the first byte that is kept. It needs mu.
func (l *execLog) start() int64 {
	from := max(l.punched, l.total-l.keeps()) // a hold that begins brings no byte back
	if len(l.pieces) > 0 {
		from = max(from, l.pieces[0].at)
	}
	return from
}

// trim forgets pieces and output beyond the limits. It needs mu.
func (l *execLog) trim() {
	from := max(0, l.total-l.keeps())
	drop := max(0, len(l.pieces)-maxPieces)
	for drop+1 < len(l.pieces) && l.pieces[drop+1].at <= from {
		drop++
	}
	if drop > 0 {
		l.pieces = slices.Delete(l.pieces, 0, drop)
	}
	if from = l.start() &^ (punchSize - 1); from > l.punched {
		// If it fails, memory up to the limit that the sandbox's owner asked for stays in use; there is
		// no remedy.
		if unix.Fallocate(int(l.out.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, l.punched, from-l.punched) == nil {
			l.punched = from
		}
	}
}

// wake needs mu.
func (l *execLog) wake() {
	if l.changed != nil {
		close(l.changed)
		l.changed = nil
	}
}

// finish says that nothing more will come.
func (l *execLog) finish() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.over = true
	l.wake()
}

// counts returns the bytes of each stream and the bytes dropped from the beginning.
func (l *execLog) counts() (stdout, stderr, dropped int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	stdout = l.wrote()
	return stdout, l.total - stdout, l.start()
}

// end is the offset behind the last byte.
func (l *execLog) end() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.total
}

// A chunk is output of one stream.
type chunk struct {
	stream string
	at     int64 // at least the offset asked for; more if that is dropped
	data   []byte
	whole  bool            // no byte of this stream follows the chunk directly
	more   <-chan struct{} // closed when there is more; nil if there is more already, or never will be
	over   bool            // with no data: this is the end
}

// read gives what comes at from, or as soon after it as something is kept. The data is buf's.
func (l *execLog) read(from int64, buf []byte) (chunk, error) {
	for {
		l.mu.Lock()
		c := chunk{at: max(from, l.start()), stream: "stdout"}
		if c.at >= l.total {
			c.at = l.total
			if c.over = l.over; !c.over {
				c.more = l.waiting()
			}
			l.mu.Unlock()
			return c, nil
		}
		i, found := slices.BinarySearchFunc(l.pieces, c.at, func(p piece, at int64) int {
			switch {
			case p.at < at:
				return -1
			case p.at > at:
				return 1
			}
			return 0
		})
		if !found {
			i--
		}
		if l.pieces[i].stderr {
			c.stream = "stderr"
		}
		until := l.total
		if i+1 < len(l.pieces) {
			until = l.pieces[i+1].at
		}
		c.data = buf[:min(int64(len(buf)), until-c.at)]
		if c.at+int64(len(c.data)) == until {
			c.whole = i+1 < len(l.pieces) && until < l.total || l.over
			if until == l.total && !l.over {
				c.more = l.waiting()
			}
		}
		l.mu.Unlock()
		if _, err := l.out.ReadAt(c.data, c.at); err != nil {
			return chunk{}, fmt.Errorf("read the output that is kept: %w", err)
		}
		l.mu.Lock()
		overtaken := l.start() > c.at
		l.mu.Unlock()
		if !overtaken {
			return c, nil
		}
	}
}

// waiting needs mu.
func (l *execLog) waiting() <-chan struct{} {
	if l.changed == nil {
		l.changed = make(chan struct{})
	}
	return l.changed
}

// note writes one of the two documents. It is there as a whole or not at all.
func (l *execLog) note(at int64, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode the exec's record: %w", err)
	}
	if len(data) > maxState {
		return fmt.Errorf("the exec's record has %d bytes, more than %d", len(data), maxState)
	}
	if _, err := l.state.WriteAt(data, at+8); err != nil {
		return fmt.Errorf("write the exec's record: %w", err)
	}
	var b [8]byte
	binary.NativeEndian.PutUint64(b[:], uint64(len(data)))
	if _, err := l.state.WriteAt(b[:], at); err != nil {
		return fmt.Errorf("write the exec's record: %w", err)
	}
	return nil
}

// noted reads one of the two documents; false if it was not written.
func noted(state *os.File, at int64, v any) (bool, error) {
	var b [8]byte
	if n, err := state.ReadAt(b[:], at); n < len(b) {
		if fi, serr := state.Stat(); serr == nil && fi.Size() <= at {
			return false, nil
		}
		return false, fmt.Errorf("read the exec's record: %w", err)
	}
	size := binary.NativeEndian.Uint64(b[:])
	switch {
	case size == 0:
		return false, nil
	case size > maxState:
		return false, errors.New("read the exec's record: it is damaged")
	}
	data := make([]byte, size)
	if _, err := state.ReadAt(data, at+8); err != nil {
		return false, fmt.Errorf("read the exec's record: %w", err)
	}
	if err := json.Unmarshal(data, v); err != nil {
		return false, fmt.Errorf("read the exec's record: %w", err)
	}
	return true, nil
}

// close releases the memory. No output may be moved any more; readers get an error.
func (l *execLog) close() {
	l.closeRelay()
	for _, f := range []*os.File{l.out, l.state} {
		if f != nil {
			_ = f.Close() // nothing is written to a disk
		}
	}
}

func (l *execLog) closeRelay() {
	for _, f := range []*os.File{l.relayR, l.relayW} {
		if f != nil {
			_ = f.Close() // as in close
		}
	}
}
