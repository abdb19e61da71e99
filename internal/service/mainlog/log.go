package mainlog

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
)

// Log is the log of one sandbox. Its writers, one for each main process, take turns.
type Log struct {
	store *Store
	dir   string

	mu      sync.Mutex
	writers int           // one that writes, and those that wait for it
	last    chan struct{} // closed when the last of them has ended
	changed chan struct{} // closed at the next change; nil if no reader waits
	removed bool
}

// wake needs mu.
func (l *Log) wake() {
	if l.changed != nil {
		close(l.changed)
		l.changed = nil
	}
}

// state returns a channel that is closed when there is more, and whether there may ever be.
func (l *Log) state() (more <-chan struct{}, goesOn bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.changed == nil {
		l.changed = make(chan struct{})
	}
	return l.changed, l.writers > 0 && !l.removed
}

// Enqueue registers a writer. It may write when turn is closed, which is after earlier writers,
// until it calls done.
func (l *Log) Enqueue() (turn <-chan struct{}, done func()) {
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

// begin makes a file, unless the sandbox is no more: then it would be there again.
func (l *Log) begin(seq int) (*os.File, error) {
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

func (l *Log) path(seq int) string { return filepath.Join(l.dir, fmt.Sprintf("%08d.log", seq)) }

// segments returns the numbers of the files that exist, in order.
func (l *Log) segments() ([]int, error) {
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
