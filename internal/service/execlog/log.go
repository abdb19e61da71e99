package execlog

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// ErrHanded ends the taking of output that the next daemon takes.
var ErrHanded = errors.New("the daemon is stopping, and leaves the exec to the next one")

// Log is the output of one detached exec, and the documents that describe it.
type Log struct {
	out, state     *os.File
	relayR, relayW *os.File // nil without a terminal
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
	handed bool      // nothing more is taken
	holds  map[*Hold]struct{}
	free   bool // holds keep nothing any more
}

// A Hold keeps output from being dropped before its reader has taken it. A program that is faster
// waits.
type Hold struct {
	log *Log
	at  int64 // offset up to which the reader has taken the output; guarded by the log's mu
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

	// punchSize is how much is dropped at a time. That much more than the limit may lie in memory.
	punchSize = 256 << 10

	// takeSize is as much as is taken at a time.
	takeSize = 64 << 10
)

// New makes an empty log that keeps the latest bytes, up to a limit. Output of a terminal needs a
// relay: it cannot be spliced to a file.
func New(limit int64, tty bool) (_ *Log, err error) {
	l := &Log{limit: limit}
	l.room.L = &l.mu
	defer func() {
		if err != nil {
			l.Close()
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

// Adopt reads the two files that the last daemon left, as [Log.Files] returned them. They stay the
// caller's on error.
func Adopt(out, state *os.File, limit int64) (*Log, error) {
	l := &Log{out: out, state: state, limit: limit}
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

// Take calls move, which moves bytes to the file at its offset and returns their number, and
// records the stream that they belong to. It waits while the output could displace bytes that are
// unsaved or held, and fails with [ErrHanded] after Hand.
func (l *Log) Take(stream string, move func(file int) (int, error)) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for !l.handed && l.full() {
		l.room.Wait()
	}
	if l.handed {
		return 0, ErrHanded
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

// Save makes the log wait for [Log.Saved]: unsaved output is not dropped. It is called before the
// first Take.
func (l *Log) Save(from int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.saving, l.saved = true, from
}

// Saved reports that the output up to this offset is kept elsewhere.
func (l *Log) Saved(until int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.saved = max(l.saved, until)
	l.room.Broadcast()
}

// Hold makes the log wait for a reader: output from the offset on, or from the oldest byte that is
// kept, is not dropped until the reader has taken it.
func (l *Log) Hold(from int64) *Hold {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.holds == nil {
		l.holds = make(map[*Hold]struct{})
	}
	h := &Hold{log: l, at: max(from, l.start())}
	l.holds[h] = struct{}{}
	return h
}

// Taken reports that the reader has the output up to an offset.
func (h *Hold) Taken(until int64) {
	h.log.mu.Lock()
	defer h.log.mu.Unlock()
	h.at = until
	h.log.room.Broadcast()
}

// Release ends the hold. A second call changes nothing.
func (h *Hold) Release() {
	h.log.mu.Lock()
	defer h.log.mu.Unlock()
	delete(h.log.holds, h)
	h.log.room.Broadcast()
	h.log.wake()
}

// ReleaseHolds ends all holds, also those to come: the sandbox is being deleted.
func (l *Log) ReleaseHolds() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.free = true
	l.room.Broadcast()
	l.wake()
}

// Held returns a channel that is closed at the next change, nil if no reader holds the log.
func (l *Log) Held() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.holds) == 0 || l.free {
		return nil
	}
	return l.waiting()
}

// Hand makes Take refuse more: the rest stays in the pipe for the next daemon.
func (l *Log) Hand() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.handed = true
	l.room.Broadcast()
}

// full reports whether the next output could drop output that is unsaved or held. It needs mu.
func (l *Log) full() bool {
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

// Relay returns the pipe for the output of a terminal, nil without one.
func (l *Log) Relay() (r, w *os.File) { return l.relayR, l.relayW }

// AdoptRelay takes over the pipe that the last daemon left.
func (l *Log) AdoptRelay(r, w *os.File) { l.relayR, l.relayW = r, w }

// Files returns the files that another daemon needs to go on, as [Adopt] takes them.
func (l *Log) Files() []*os.File { return []*os.File{l.out, l.state} }

// Follow notes that a client reads the output as it comes, until it calls done.
func (l *Log) Follow() (done func()) {
	l.followers.Add(1)
	return func() { l.followers.Add(-1) }
}

// Followed reports whether a client reads the output as it comes. Then it is not throttled.
func (l *Log) Followed() bool { return l.followers.Load() > 0 }

// beginPiece notes that the next output is of this stream. It needs mu.
func (l *Log) beginPiece(stderr bool) error {
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

func (l *Log) counted() error {
	var b [8]byte
	binary.NativeEndian.PutUint64(b[:], l.count)
	if _, err := l.state.WriteAt(b[:], 0); err != nil {
		return fmt.Errorf("note the output's stream: %w", err)
	}
	return nil
}

// wrote returns the bytes of stdout. It needs mu.
func (l *Log) wrote() int64 {
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
func (l *Log) keeps() int64 {
	if len(l.holds) > 0 && !l.free {
		return max(l.limit, takeSize)
	}
	return l.limit
}

// start is the offset of the first byte that is kept. It needs mu.
func (l *Log) start() int64 {
	from := max(l.punched, l.total-l.keeps()) // a hold that begins brings no byte back
	if len(l.pieces) > 0 {
		from = max(from, l.pieces[0].at)
	}
	return from
}

// trim forgets pieces and output beyond the limits. It needs mu.
func (l *Log) trim() {
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
func (l *Log) wake() {
	if l.changed != nil {
		close(l.changed)
		l.changed = nil
	}
}

// Finish notes that nothing more will come, so that readers come to an end.
func (l *Log) Finish() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.over = true
	l.wake()
}

// Counts returns the bytes of each stream and the bytes dropped from the beginning.
func (l *Log) Counts() (stdout, stderr, dropped int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	stdout = l.wrote()
	return stdout, l.total - stdout, l.start()
}

// End returns the offset behind the last byte.
func (l *Log) End() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.total
}

// A Chunk is output of one stream.
type Chunk struct {
	Stream string          // "stdout" or "stderr"
	At     int64           // at least the offset asked for; more if that is dropped
	Data   []byte          // in the buffer of the reader
	Whole  bool            // no byte of this stream follows the chunk directly
	More   <-chan struct{} // closed when there is more; nil if there is more already, or never will be
	Over   bool            // with no data: this is the end
}

// Read returns output of one stream from an offset on, or from the oldest byte that is kept if that
// comes later. It does not wait: see [Chunk].
func (l *Log) Read(from int64, buf []byte) (Chunk, error) {
	for {
		l.mu.Lock()
		c := Chunk{At: max(from, l.start()), Stream: "stdout"}
		if c.At >= l.total {
			c.At = l.total
			if c.Over = l.over; !c.Over {
				c.More = l.waiting()
			}
			l.mu.Unlock()
			return c, nil
		}
		i, found := slices.BinarySearchFunc(l.pieces, c.At, func(p piece, at int64) int { return cmp.Compare(p.at, at) })
		if !found {
			i--
		}
		if l.pieces[i].stderr {
			c.Stream = "stderr"
		}
		until := l.total
		if i+1 < len(l.pieces) {
			until = l.pieces[i+1].at
		}
		c.Data = buf[:min(int64(len(buf)), until-c.At)]
		if c.At+int64(len(c.Data)) == until {
			c.Whole = i+1 < len(l.pieces) && until < l.total || l.over
			if until == l.total && !l.over {
				c.More = l.waiting()
			}
		}
		l.mu.Unlock()
		if _, err := l.out.ReadAt(c.Data, c.At); err != nil {
			return Chunk{}, fmt.Errorf("read the output that is kept: %w", err)
		}
		l.mu.Lock()
		overtaken := l.start() > c.At
		l.mu.Unlock()
		if !overtaken {
			return c, nil
		}
	}
}

// waiting needs mu.
func (l *Log) waiting() <-chan struct{} {
	if l.changed == nil {
		l.changed = make(chan struct{})
	}
	return l.changed
}

// Close releases the memory. No output may be moved any more; readers get an error.
func (l *Log) Close() {
	l.CloseRelay()
	for _, f := range []*os.File{l.out, l.state} {
		if f != nil {
			_ = f.Close() // nothing is written to a disk
		}
	}
}

// CloseRelay closes the pipe of a terminal that has ended.
func (l *Log) CloseRelay() {
	for _, f := range []*os.File{l.relayR, l.relayW} {
		if f != nil {
			_ = f.Close() // as in Close
		}
	}
}
