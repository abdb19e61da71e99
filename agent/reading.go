package agent

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Reading derives a run from the events of its record as they arrive: from a file ([FollowRun]), or
// from a daemon that hosts the run.
type Reading struct{ l *ledger }

// NewReading returns a reading of a record from its first line.
func NewReading() *Reading { return &Reading{l: newLedger()} }

// Add adds the next line of the record. If that completes a turn, it returns the turn.
func (r *Reading) Add(line []byte) (*Step, error) {
	var e Event
	if err := json.Unmarshal(line, &e); err != nil {
		return nil, unreadablef("read the record: %w", err)
	}
	if e.V != recordVersion || e.kinds() != 1 {
		return nil, unreadablef("read the record: line %d is of no kind that this program knows", e.N)
	}
	if err := r.l.apply(e); err != nil {
		return nil, fmt.Errorf("read the record: line %d: %w", e.N, err)
	}
	if e.TurnEnd == nil {
		return nil, nil
	}
	return &r.l.steps[len(r.l.steps)-1], nil
}

// Turns returns the number of complete turns.
func (r *Reading) Turns() int { return len(r.l.steps) }

// Run returns the state of the run in dir so far; running reports whether a process works on it.
func (r *Reading) Run(dir string, running bool) (*Summary, *Trajectory) {
	return r.l.summary(dir, running), r.l.trajectory()
}

// followEvery is the interval of looking for new lines of a record.
const followEvery = 200 * time.Millisecond

// FollowRun calls on for each line of the record of the run in dir. With follow it waits for
// further ones as long as a process works on the run.
func FollowRun(ctx context.Context, dir string, follow bool, on func(line []byte) error) error {
	f, err := openFile(dir, os.O_RDONLY)
	if err != nil {
		return fmt.Errorf("read the record: %w", err)
	}
	defer f.Close()
	br := bufio.NewReaderSize(f, 1<<16)
	tick := time.NewTicker(followEvery)
	defer tick.Stop()
	var line []byte
	for {
		// Ask for the lock before reading: lines written after that are read in the next round.
		held := wholeFile()
		if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &held); err != nil {
			return fmt.Errorf("read the record in %s: ask for its lock: %w", dir, err)
		}
		for {
			part, err := readLine(br)
			line = append(line, part...)
			if errors.Is(err, io.EOF) { // of a line that is not complete yet
				break
			}
			if err == nil && len(line) > maxRecordLine {
				err = unreadablef("a line is longer than %d bytes", maxRecordLine)
			}
			if err == nil {
				err = on(line)
			}
			if err != nil {
				return err
			}
			line = nil
		}
		if !follow || held.Type == unix.F_UNLCK {
			return nil
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}
