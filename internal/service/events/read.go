package events

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// Query selects events. The zero value selects none that is kept and ends; see Tail.
type Query struct {
	After  uint64    // ID; events with a greater one
	Since  time.Time // of the first event; zero means any
	Until  time.Time // events before it; with Follow the reader ends then; zero means for ever
	Tail   int       // maximum number of kept events, the last ones; negative means all
	Follow bool      // continue with new events
	// Match reports whether an event is wanted. Nil: all are.
	Match func(*api.Event) bool
}

func (q *Query) want(e *api.Event) bool {
	return e.ID > q.After && !e.Time.Before(q.Since) && (q.Until.IsZero() || e.Time.Before(q.Until)) && (q.Match == nil || q.Match(e))
}

// Read calls emit for the events of a tenant that q selects, in their order. Events that were
// published before the call are among them. With Follow it goes on until ctx ends, the log is
// closed or emit fails.
func (l *Log) Read(ctx context.Context, tenant string, q Query, emit func(api.Event) error) error {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return ErrClosed
	}
	j := l.of(tenant)
	l.mu.Unlock()
	if q.Follow {
		defer j.follow()()
	}
	if err := j.settle(ctx); err != nil {
		return err
	}
	now, more, err := j.snapshot()
	if err != nil {
		return err
	}
	c := cursor{j: j, after: q.After}
	defer c.close()
	var over <-chan time.Time
	if q.Follow && !q.Until.IsZero() {
		timer := time.NewTimer(q.Until.Sub(l.opts.Now()))
		defer timer.Stop()
		over = timer.C
	}
	if err := c.replay(now, &q, emit); err != nil {
		return err
	}
	for ended := !q.Follow; !ended; {
		select {
		case <-more:
		case <-over:
			if err := j.settle(ctx); err != nil {
				return err
			}
			ended = true
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if now, more, err = j.snapshot(); err != nil {
			return err
		}
		err := c.read(now, func(e *api.Event) error {
			if e.Lost > 0 || q.want(e) {
				return emit(*e)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// replay emits the kept events.
func (c *cursor) replay(now view, q *Query, emit func(api.Event) error) error {
	if q.Tail == 0 {
		c.skip(now)
		return nil
	}
	if err := c.seek(now); err != nil {
		return err
	}
	var tail []api.Event
	err := c.read(now, func(e *api.Event) error {
		switch {
		case e.Lost > 0 && q.Tail > 0, e.Lost == 0 && !q.want(e):
			return nil
		case q.Tail < 0:
			return emit(*e)
		}
		if len(tail) >= q.Tail && len(tail)-q.Tail >= q.Tail { // twice as many, whatever Tail is
			tail = slices.Clone(tail[len(tail)-q.Tail+1:])
		}
		tail = append(tail, *e)
		return nil
	})
	if err != nil {
		return err
	}
	for _, e := range tail[max(0, len(tail)-max(0, q.Tail)):] {
		if err := emit(e); err != nil {
			return err
		}
	}
	return nil
}

// cursor is a place in a journal.
type cursor struct {
	j      *journal
	file   *os.File // nil between segments
	start  uint64   // number of the first event of its segment
	passed bool     // the segment of start has no more events
	at     int64    // offset of the next event in file
	number uint64   // of the next event
	after  uint64   // ID of an event that the reader knows; 0 if it knows none
	last   uint64   // ID of the event before in file
	lost   uint64   // events that were not read and not told of
}

// skip goes to the end.
func (c *cursor) skip(now view) {
	c.number = now.next
	if n := len(now.starts); n > 0 {
		c.start, c.at = now.starts[n-1], now.size
	}
}

// seek goes to the segment that has the event after the known one.
func (c *cursor) seek(now view) error {
	if len(now.starts) == 0 {
		c.number = now.next
		return nil
	}
	for i, start := range slices.Backward(now.starts) {
		if i > 0 && c.after == 0 {
			continue
		}
		c.number = start
		rec, err := c.first(start)
		switch {
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, io.EOF), errors.Is(err, errDamaged):
			continue // read finds the same
		case err != nil:
			return fmt.Errorf("read events: %w", err)
		case c.after != 0 && rec.Before != 0 && rec.Before <= c.after, i > 0 && rec.ID <= c.after:
			return nil
		case i == 0 && c.after != 0 && rec.Before > c.after:
			c.lost = 1 // at least the one before
		}
	}
	return nil
}

// first returns the first event of a segment.
func (c *cursor) first(start uint64) (rec record, err error) {
	f, err := os.Open(c.j.path(start))
	if err != nil {
		return rec, err
	}
	defer f.Close() // read only
	line, err := readLine(bufio.NewReader(f))
	if err != nil {
		return rec, err
	}
	if !decode(line, &rec) {
		return rec, errDamaged
	}
	return rec, nil
}

// read calls emit for the events up to the end of a view, and for gaps before them.
func (c *cursor) read(now view, emit func(*api.Event) error) error {
	for c.number < now.next {
		found, err := c.open(now)
		if err != nil {
			return fmt.Errorf("read events: %w", err)
		}
		if !found {
			c.lost += now.next - c.number
			c.number = now.next
			break
		}
		if c.passed {
			continue // its file is gone
		}
		live := c.start == now.starts[len(now.starts)-1]
		end := now.size
		if !live {
			fi, err := c.file.Stat()
			if err != nil {
				return fmt.Errorf("read events: %w", err)
			}
			end = fi.Size()
		}
		whole, err := c.readUntil(end, emit)
		if err != nil {
			return err
		}
		if live && !whole {
			c.lost += now.next - c.number
			c.number, c.at = now.next, now.size
		}
		if !live {
			c.close()
			c.passed = true
		}
	}
	return c.tell(emit)
}

// open opens the segment of the next event, or of the first one after it that is kept. It reports
// whether there is one.
func (c *cursor) open(now view) (found bool, err error) {
	if c.file != nil {
		return true, nil
	}
	i := 0
	for i+1 < len(now.starts) && now.starts[i+1] <= c.number {
		i++
	}
	if i < len(now.starts) && c.passed && now.starts[i] <= c.start {
		i++
	}
	if i >= len(now.starts) {
		return false, nil
	}
	start := now.starts[i]
	if start != c.start || c.passed {
		c.at, c.last = 0, 0
	}
	c.start, c.passed = start, false
	if start > c.number {
		c.lost += start - c.number
		c.number = start
	}
	c.file, err = os.Open(c.j.path(start))
	if errors.Is(err, fs.ErrNotExist) { // it was removed after the view was taken
		c.file, c.passed = nil, true
		return true, nil
	}
	return true, err
}

// readUntil reads the open segment until an offset. It reports whether it found no damage.
func (c *cursor) readUntil(end int64, emit func(*api.Event) error) (whole bool, err error) {
	lines := bufio.NewReader(io.NewSectionReader(c.file, c.at, end-c.at))
	for {
		line, err := readLine(lines)
		if errors.Is(err, errDamaged) || errors.Is(err, io.EOF) {
			return c.at == end, nil
		}
		if err != nil {
			return false, fmt.Errorf("read events: %w", err)
		}
		var rec record
		if !decode(line, &rec) || rec.ID <= c.last {
			return false, nil
		}
		c.at += int64(len(line))
		c.number++
		c.last = rec.ID
		if rec.ID > c.after {
			c.lost += rec.Missing
		}
		if err := c.tell(emit); err != nil {
			return false, err
		}
		if err := emit(&rec.Event); err != nil {
			return false, err
		}
	}
}

// tell emits what was lost.
func (c *cursor) tell(emit func(*api.Event) error) error {
	if c.lost == 0 {
		return nil
	}
	lost := c.lost
	c.lost = 0
	return emit(&api.Event{Lost: lost})
}

func (c *cursor) close() {
	if c.file != nil {
		_ = c.file.Close() // read only
		c.file = nil
	}
}
