package events

import (
	"cmp"
	"encoding/hex"
	"errors"
	"log/slog"
	"path/filepath"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// Bounds of one tenant's events.
const (
	segmentSize = 1 << 20 // bytes of one segment, which holds at least one event
	segments    = 8       // files; with segmentSize about 25,000 events
	maxQueued   = 4096    // events that wait for the writer; more are lost
	maxLine     = 1 << 19 // bytes of an event: a sandbox's labels escaped in the longest way are 450 KiB

	// linger is the time for which events of execs wait in the queue for others. A write for the
	// start and one for the end of each exec take a fifth of the daemon's processor time for it.
	linger     = 20 * time.Millisecond
	lingerMost = 256 // queued events that end the wait
)

// ErrClosed ends the followers of a closed log.
var ErrClosed = errors.New("the record of events is closed")

// Options configure a [Log].
type Options struct {
	Dir string           // made with the first event
	Log *slog.Logger     // default: discarded
	Now func() time.Time // default [time.Now]

	segmentSize int64 // for tests; zero stands for the constant
}

// Log is the record of all tenants' events. Its methods are safe for concurrent use.
type Log struct {
	opts    Options
	writers sync.WaitGroup

	mu      sync.Mutex
	closed  bool
	tenants map[string]*journal
}

// Open returns the record in a directory. It reads nothing: a damaged record is not an obstacle for
// a daemon, and is repaired when it is first used.
func Open(opts Options) *Log {
	opts.Log = cmp.Or(opts.Log, slog.New(slog.DiscardHandler))
	opts.segmentSize = cmp.Or(opts.segmentSize, segmentSize)
	if opts.Now == nil {
		opts.Now = time.Now
	}
	return &Log{opts: opts, tenants: make(map[string]*journal)}
}

// Publish records an event of a tenant, in the order of the calls. It sets the event's ID and time.
// It neither blocks nor fails: an event that cannot be recorded is counted as lost. The caller must
// not change what e points to.
func (l *Log) Publish(tenant string, e api.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return
	}
	j := l.of(tenant)
	j.mu.Lock()
	defer j.mu.Unlock()
	j.taken++
	if len(j.queue) == maxQueued {
		j.dropped++
		return
	}
	e.Time = l.opts.Now().UTC()
	j.queue = append(j.queue, e)
	switch {
	case j.writing:
	case e.Type != api.EventExec || j.followers > 0 || len(j.queue) >= lingerMost:
		j.hurry()
	case j.lingering == nil:
		j.lingering = time.AfterFunc(linger, func() {
			j.mu.Lock()
			defer j.mu.Unlock()
			if j.lingering != nil {
				j.hurry()
			}
		})
	}
}

// Close writes the queue and ends the followers. Later events are ignored.
func (l *Log) Close() error {
	l.mu.Lock()
	l.closed = true
	for _, j := range l.tenants {
		j.mu.Lock()
		if j.lingering != nil {
			j.hurry()
		}
		j.mu.Unlock()
	}
	l.mu.Unlock()
	l.writers.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	var errs []error
	for _, j := range l.tenants {
		errs = append(errs, j.close())
	}
	return errors.Join(errs...)
}

// of returns the journal of a tenant. It needs mu.
func (l *Log) of(tenant string) *journal {
	j := l.tenants[tenant]
	if j == nil {
		// Encoded, because a tenant's name comes from the configuration, and is not a path.
		dir := filepath.Join(l.opts.Dir, "t"+hex.EncodeToString([]byte(tenant)))
		j = &journal{dir: dir, opts: &l.opts, writers: &l.writers, changed: make(chan struct{})}
		l.tenants[tenant] = j
	}
	return j
}
