package network

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
	"strings"
	"sync"

	"golang.org/x/time/rate"

	"github.com/sandboxd/sandboxd/api"
)

const (
	// maxFlowFile bounds one of the two files of a sandbox's flows, in bytes.
	maxFlowFile = 1 << 20
	// maxFollowed bounds the flows that wait for one slow reader.
	maxFollowed = 1024
	// peerRate, a second, and peerBurst bound what other sandboxes add to a record: the rest is
	// counted as lost. A flood of theirs must not soon drive out what the sandbox itself did.
	peerRate, peerBurst = 2, 100
)

// flowLog keeps the flows of one sandbox: the latest in ID.jsonl, those before in ID.1.jsonl.
type flowLog struct {
	path string // without its ending

	mu        sync.Mutex
	live      bool     // the sandbox runs
	life      int      // its number
	removed   bool     // the sandbox was deleted: no file is made any more
	file      *os.File // nil before the first flow of this daemon
	size      int64
	failed    bool // a write failed; the next success notes it as lost flows
	lost      uint64
	totals    api.NetworkStats
	peers     *rate.Limiter // of flows that other sandboxes cause
	peersLost uint64        // of these, since the last one that was kept
	followers map[*follower]struct{}
}

// follower is one reader that waits for flows.
type follower struct {
	flows chan api.Flow
	lost  uint64        // flows since the last one that did not fit
	end   chan struct{} // closed when the sandbox has ended
}

func newFlowLog(dir, id string) *flowLog {
	return &flowLog{path: filepath.Join(dir, id), followers: make(map[*follower]struct{}), peers: rate.NewLimiter(peerRate, peerBurst)}
}

func (l *flowLog) current() string { return l.path + ".jsonl" }
func (l *flowLog) before() string  { return l.path + ".1.jsonl" }

// inspection is the file of the sandbox's [Inspection].
func (l *flowLog) inspection() string { return l.path + ".inspection.json" }

// appendPeer adds a flow that another sandbox has caused, unless there are too many.
func (l *flowLog) appendPeer(f api.Flow) error {
	l.mu.Lock()
	if !l.peers.AllowN(f.Time, 1) {
		l.peersLost++
		l.mu.Unlock()
		return nil
	}
	f.Lost, l.peersLost = l.peersLost, 0
	l.mu.Unlock()
	return l.append(f)
}

// append adds a flow. A disk that refuses it costs flows, which are counted, and nothing else.
func (l *flowLog) append(f api.Flow) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.count(&f)
	f.Lost += l.lost
	for r := range l.followers {
		g := f
		g.Lost += r.lost
		select {
		case r.flows <- g:
			r.lost = 0
		default:
			r.lost++
		}
	}
	if l.removed {
		return nil
	}
	err := l.write(&f)
	switch {
	case err == nil:
		l.lost, l.failed = 0, false
		return nil
	case l.failed: // said before
		l.lost++
		return nil
	}
	l.lost++
	l.failed = true
	return err
}

func (l *flowLog) count(f *api.Flow) {
	t := &l.totals
	switch f.Kind {
	case api.FlowConnection:
		t.Connections++
		t.BytesOut += f.Out
		t.BytesIn += f.In
	case api.FlowQuery:
		t.Queries++
	case api.FlowRequest, api.FlowRestart, api.FlowPeer: // a request is on a connection
	}
	if !f.Allow && f.Kind != api.FlowRestart {
		t.Refused++
	}
}

// write needs mu.
func (l *flowLog) write(f *api.Flow) error {
	line, err := json.Marshal(f) //nolint:gosec // G117: it has a secret's name
	if err != nil {
		return fmt.Errorf("encode flow: %w", err)
	}
	line = append(line, '\n')
	if l.file == nil {
		if err := l.open(); err != nil {
			return err
		}
	}
	if l.size+int64(len(line)) > maxFlowFile {
		if err := l.rotate(); err != nil {
			return err
		}
	}
	n, err := l.file.Write(line)
	l.size += int64(n)
	if err == nil {
		return nil
	}
	if n > 0 { // a line that is cut off would swallow the next one
		if terr := l.file.Truncate(l.size - int64(n)); terr == nil {
			l.size -= int64(n)
		}
	}
	return fmt.Errorf("write flow: %w", err)
}

// open needs mu.
func (l *flowLog) open() error {
	f, err := os.OpenFile(l.current(), os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("open flows: %w", err)
	}
	fi, err := f.Stat()
	if err == nil && fi.Size() > 0 {
		err = endLine(f, fi.Size())
		fi, _ = f.Stat()
	}
	if err != nil {
		return errors.Join(fmt.Errorf("open flows: %w", err), f.Close())
	}
	l.file, l.size = f, fi.Size()
	return nil
}

// endLine completes a last line that a killed daemon has cut off.
func endLine(f *os.File, size int64) error {
	var last [1]byte
	if _, err := f.ReadAt(last[:], size-1); err != nil {
		return err
	}
	if last[0] == '\n' {
		return nil
	}
	_, err := f.Write([]byte("\n"))
	return err
}

// rotate needs mu.
func (l *flowLog) rotate() error {
	if err := os.Rename(l.current(), l.before()); err != nil {
		return fmt.Errorf("rotate flows: %w", err)
	}
	err := l.file.Close()
	l.file = nil
	if err := errors.Join(err, l.open()); err != nil {
		return fmt.Errorf("rotate flows: %w", err)
	}
	return nil
}

// close closes the file and ends the followers. A later append opens it again.
func (l *flowLog) close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for r := range l.followers {
		close(r.end)
	}
	clear(l.followers)
	l.live = false
	if l.file == nil {
		return nil
	}
	err := l.file.Close()
	l.file = nil
	return err
}

// remove removes all files of the sandbox. The caller has closed the log.
func (l *flowLog) remove() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.removed = true
	var errs []error
	for _, name := range []string{l.current(), l.before(), l.inspection(), l.inspection() + ".new", l.spent(), l.spent() + ".new"} {
		if err := os.Remove(name); !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func (l *flowLog) stats() api.NetworkStats {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.totals
}

// read calls emit for the kept flows in their order, only the last ones if tail is not negative.
// With follow it goes on until the sandbox ends or ctx does.
func (l *flowLog) read(ctx context.Context, tail int, follow bool, emit func(api.Flow) error) error {
	r := &follower{flows: make(chan api.Flow, maxFollowed), end: make(chan struct{})}
	l.mu.Lock()
	files, size, err := l.snapshot()
	follow = follow && l.live
	if follow && err == nil {
		l.followers[r] = struct{}{}
	}
	l.mu.Unlock()
	defer func() {
		for _, f := range files {
			_ = f.Close() // read only
		}
		l.mu.Lock()
		delete(l.followers, r)
		l.mu.Unlock()
	}()
	if err != nil {
		return err
	}
	if err := replay(files, size, tail, emit); err != nil || !follow {
		return err
	}
	for {
		select {
		case f := <-r.flows:
			if err := emit(f); err != nil {
				return err
			}
			continue
		default:
		}
		select {
		case f := <-r.flows:
			if err := emit(f); err != nil {
				return err
			}
		case <-r.end:
			for {
				select {
				case f := <-r.flows:
					if err := emit(f); err != nil {
						return err
					}
				default:
					return nil
				}
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// snapshot opens the files, oldest first, and returns the size of the last. It needs mu.
func (l *flowLog) snapshot() (files []*os.File, size int64, err error) {
	for _, name := range []string{l.before(), l.current()} {
		f, err := os.Open(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return files, 0, fmt.Errorf("open flows: %w", err)
		}
		files = append(files, f)
		fi, err := f.Stat()
		if err != nil {
			return files, 0, fmt.Errorf("open flows: %w", err)
		}
		size = fi.Size()
	}
	return files, size, nil
}

// begin notes that the sandbox runs, in a life of its own.
func (l *flowLog) begin(life int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.live, l.life = true, life
}

// replay emits the flows of the files; of the last one only the first size bytes.
func replay(files []*os.File, size int64, tail int, emit func(api.Flow) error) error {
	var kept []api.Flow // the last ones, if only those are wanted
	for i, f := range files {
		var from io.Reader = f
		if i == len(files)-1 {
			from = io.LimitReader(f, size)
		}
		lines := bufio.NewReader(from)
		for {
			line, err := lines.ReadBytes('\n')
			if len(bytes.TrimSpace(line)) > 0 {
				var flow api.Flow
				if json.Unmarshal(line, &flow) == nil { // else a daemon was killed within the line
					switch {
					case tail < 0:
						if err := emit(flow); err != nil {
							return err
						}
					case tail > 0:
						if len(kept) == tail {
							kept = append(kept[:0], kept[1:]...)
						}
						kept = append(kept, flow)
					}
				}
			}
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return fmt.Errorf("read flows: %w", err)
			}
		}
	}
	for _, f := range kept {
		if err := emit(f); err != nil {
			return err
		}
	}
	return nil
}

// flowOwner returns the id of the sandbox whose flows a file has.
func flowOwner(name string) string {
	id, _, _ := strings.Cut(name, ".")
	return id
}
