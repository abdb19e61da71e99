package agent

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/agent/llm/llmtest"
)

// A record is followed from its first line until no process works on the run, across lines that are
// not complete yet.
func TestFollowRun(t *testing.T) {
	opts, sandbox, _ := newRun(t, turn(llmtest.Bash("true")), turn(llmtest.Submit()))
	res, _ := mustRun(t, t.Context(), opts, sandbox, ExitSubmitted)
	events, _, err := ReadRecord(res.Dir)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	rec, err := createRecord(dir, opts.Now, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := rec.append(events[0], true); err != nil {
		t.Fatal(err)
	}
	rest := func() error { // what the process that works on the run does after the first line was read
		for _, e := range events[1:] {
			line, err := marshalLine(e)
			if err != nil {
				return err
			}
			for _, part := range [][]byte{line[:len(line)/2], line[len(line)/2:]} {
				if _, err := rec.file.Write(part); err != nil {
					return err
				}
			}
		}
		return rec.close()
	}
	reading, lines, turns := NewReading(), 0, 0
	err = FollowRun(t.Context(), dir, true, func(line []byte) error {
		step, err := reading.Add(line)
		if step != nil {
			turns++
		}
		if lines++; lines == 1 && err == nil {
			err = rest()
		}
		return err
	})
	if err != nil || lines != len(events) || turns != 2 || reading.Turns() != 2 {
		t.Errorf("%d of %d lines, %d turns: %v", lines, len(events), turns, err)
	}
	s, tr := reading.Run(dir, false)
	if s.State != RunEnded || len(tr.Steps) != 2 {
		t.Errorf("%+v", s)
	}
	for _, line := range []string{"", "{}", `{"v":1,"n":1}`, `{"v":2,"n":1,"run":{"id":"x"}}`, `{"v":1,"n":1,"turn_end":{}}`} {
		if step, err := NewReading().Add([]byte(line)); err == nil || step != nil {
			t.Errorf("%q was read", line)
		}
	}
}

// Following ends with its context, and a record of a run in progress is read without following.
func TestFollowEnds(t *testing.T) {
	dir := t.TempDir()
	rec, err := createRecord(dir, time.Now, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = rec.close() }()
	if _, err := rec.append(Event{Run: &RunEvent{ID: "r"}}, true); err != nil {
		t.Fatal(err)
	}
	lines := 0
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("enough")
	count := func([]byte) error { lines++; cancel(why); return nil }
	if err := FollowRun(t.Context(), dir, false, count); err != nil || lines != 1 {
		t.Errorf("%d lines, %v", lines, err)
	}
	if err := FollowRun(ctx, dir, true, count); !errors.Is(err, why) || lines != 2 {
		t.Errorf("%d lines, %v", lines, err)
	}
}
