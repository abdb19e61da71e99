package events

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/api"
)

// base is the time of the first event of tests whose clock stands still.
var base = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func stopped() time.Time { return base }

func open(t *testing.T, dir string, size int64) *Log {
	t.Helper()
	return Open(Options{Dir: dir, Now: stopped, segmentSize: size})
}

// object is an event whose object tells it from others.
func object(i int) api.Event {
	return api.Event{Type: api.EventImage, Action: api.ActionPulled, Object: strconv.Itoa(i)}
}

// kept returns what a query selects: the objects of events, and "lost N".
func kept(t *testing.T, l *Log, tenant string, q Query) (got []string, ids []uint64) {
	t.Helper()
	err := l.Read(t.Context(), tenant, q, func(e api.Event) error {
		if e.Lost > 0 {
			got = append(got, fmt.Sprintf("lost %d", e.Lost))
			return nil
		}
		got, ids = append(got, e.Object), append(ids, e.ID)
		return nil
	})
	if err != nil {
		t.Fatalf("read: %v", err)
	}
	return got, ids
}

func numbers(from, to int) (out []string) {
	for i := from; i < to; i++ {
		out = append(out, strconv.Itoa(i))
	}
	return out
}

func check(t *testing.T, what string, want, got []string) {
	t.Helper()
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("%s (-want +got):\n%s", what, d)
	}
}

func closeLog(t *testing.T, l *Log) {
	t.Helper()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestReplay holds what a client relies on: all events in order, selected by id, time and number.
func TestReplay(t *testing.T) {
	now := base
	l := Open(Options{Dir: t.TempDir(), Now: func() time.Time { return now }})
	defer closeLog(t, l)
	for i := range 10 {
		l.Publish("", object(i))
		now = now.Add(time.Second)
	}
	l.Publish("other", object(99))
	all, ids := kept(t, l, "", Query{Tail: -1})
	check(t, "all", numbers(0, 10), all)
	if !slices.IsSorted(ids) || len(slices.Compact(slices.Clone(ids))) != len(ids) {
		t.Errorf("ids do not increase: %d", ids)
	}
	for _, tc := range []struct {
		name string
		q    Query
		want []string
	}{
		{"after an id", Query{After: ids[6], Tail: -1}, numbers(7, 10)},
		{"after the last", Query{After: ids[9], Tail: -1}, nil},
		{"since a time", Query{Since: base.Add(4 * time.Second), Tail: -1}, numbers(4, 10)},
		{"until a time", Query{Until: base.Add(3 * time.Second), Tail: -1}, numbers(0, 3)},
		{"the last", Query{Tail: 3}, numbers(7, 10)},
		{"the last of those wanted", Query{Tail: 2, Match: func(e *api.Event) bool { return e.Object < "5" }}, numbers(3, 5)},
		{"more than there are", Query{Tail: 100}, numbers(0, 10)},
		{"none", Query{}, nil},
	} {
		got, _ := kept(t, l, "", tc.q)
		check(t, tc.name, tc.want, got)
	}
	got, _ := kept(t, l, "other", Query{Tail: -1})
	check(t, "the other tenant's", []string{"99"}, got)
	got, _ = kept(t, l, "nobody", Query{Tail: -1})
	check(t, "a tenant's without events", nil, got)
}

// TestIDsIncreaseAcrossRestarts includes a clock that is set back and a record that is lost.
func TestIDsIncreaseAcrossRestarts(t *testing.T) {
	dir := t.TempDir()
	now := base
	var last uint64
	for i := range 5 {
		l := Open(Options{Dir: dir, Now: func() time.Time { return now }})
		l.Publish("", object(i))
		got, ids := kept(t, l, "", Query{Tail: 1})
		check(t, "the newest", numbers(i, i+1), got)
		if ids[0] <= last {
			t.Errorf("round %d: id %d after %d", i, ids[0], last)
		}
		last = ids[0]
		closeLog(t, l)
		switch i {
		case 1:
			now = base.Add(-time.Hour)
		case 2:
			now = base.Add(time.Hour)
			if err := os.RemoveAll(dir); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// segmentsOf returns the files of the daemon's own tenant.
func segmentsOf(t *testing.T, dir string) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "t", "*"+suffix))
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// TestBoundOnDisk: the oldest events go, and a client that asks for them is told.
func TestBoundOnDisk(t *testing.T) {
	const size, total = 1000, 500
	dir := t.TempDir()
	l := open(t, dir, size)
	l.Publish("", object(0))
	_, first := kept(t, l, "", Query{Tail: -1})
	for i := 1; i < total; i++ {
		l.Publish("", object(i))
		if i%100 == 0 {
			kept(t, l, "", Query{}) // waits for the writer, whose queue is bounded
		}
	}
	got, ids := kept(t, l, "", Query{Tail: -1})
	oldest, err := strconv.Atoi(got[0])
	if err != nil || oldest == 0 {
		t.Fatalf("the oldest is %q", got[0])
	}
	check(t, "kept", numbers(oldest, total), got)
	files := segmentsOf(t, dir)
	if len(files) > segments {
		t.Errorf("%d segments, at most %d are possible", len(files), segments)
	}
	for _, name := range files {
		if fi, err := os.Stat(name); err != nil || fi.Size() > size {
			t.Errorf("%s: %d bytes, error %v", name, fi.Size(), err)
		}
	}
	got, _ = kept(t, l, "", Query{After: first[0], Tail: -1})
	check(t, "after an id that has gone", append([]string{"lost 1"}, numbers(oldest, total)...), got)
	for i, id := range ids {
		got, _ = kept(t, l, "", Query{After: id, Tail: -1})
		check(t, fmt.Sprintf("after event %d", oldest+i), numbers(oldest+i+1, total), got)
	}
	closeLog(t, l)
	l = open(t, dir, size)
	got, _ = kept(t, l, "", Query{Tail: -1})
	check(t, "by the next daemon", numbers(oldest, total), got)
	closeLog(t, l)
}

// follow reads on another goroutine. Each event waits until it is taken from the channel.
func follow(ctx context.Context, l *Log, q Query) (<-chan string, <-chan error) {
	out, done := make(chan string), make(chan error, 1)
	q.Follow = true
	go func() {
		done <- l.Read(ctx, "", q, func(e api.Event) error {
			what := e.Object
			if e.Lost > 0 {
				what = fmt.Sprintf("lost %d", e.Lost)
			}
			select {
			case out <- what:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
	}()
	return out, done
}

func TestFollow(t *testing.T) {
	l := open(t, t.TempDir(), 300)
	l.Publish("", object(0))
	out, done := follow(t.Context(), l, Query{Tail: -1})
	if got := <-out; got != "0" {
		t.Fatalf("the kept event is %q", got)
	}
	for i := 1; i < 50; i++ { // each is in another segment than some before
		l.Publish("", object(i))
		if got := <-out; got != strconv.Itoa(i) {
			t.Fatalf("event %d is %q", i, got)
		}
	}
	closeLog(t, l)
	if err := <-done; !errors.Is(err, ErrClosed) {
		t.Errorf("at the end: %v", err)
	}
	l.Publish("", object(51)) // nothing happens
	if err := l.Read(t.Context(), "", Query{}, nil); !errors.Is(err, ErrClosed) {
		t.Errorf("read of a closed log: %v", err)
	}
}

// TestSlowFollower: a client that stands still costs no memory and no event of others. It is told
// how many it has lost, and goes on.
func TestSlowFollower(t *testing.T) {
	const total = 1000
	l := open(t, t.TempDir(), 1000)
	defer closeLog(t, l)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	l.Publish("", object(0))
	out, done := follow(ctx, l, Query{Tail: -1})
	if got := <-out; got != "0" {
		t.Fatalf("the first event is %q", got)
	}
	for i := 1; i < total; i++ { // the follower stands still with one of them
		l.Publish("", object(i))
		if i%100 == 0 {
			kept(t, l, "", Query{})
		}
	}
	oldest, _ := kept(t, l, "", Query{Tail: -1})
	next := 1
	told := false
	for next < total {
		got := <-out
		var lost int
		if n, _ := fmt.Sscanf(got, "lost %d", &lost); n == 1 {
			next += lost
			told = true
			continue
		}
		if got != strconv.Itoa(next) {
			t.Fatalf("event %q, %d is next", got, next)
		}
		next++
	}
	if !told {
		t.Errorf("nothing was lost, although the oldest event is %s", oldest[0])
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("at the end: %v", err)
	}
}

// TestUntil: a follower ends at a time that is still to come.
func TestUntil(t *testing.T) {
	l := open(t, t.TempDir(), segmentSize)
	defer closeLog(t, l)
	out, done := follow(t.Context(), l, Query{Tail: -1, Until: base.Add(time.Millisecond)})
	l.Publish("", object(0)) // the clock of the log stands still: it is before the end
	var got []string
	for {
		select {
		case s := <-out:
			got = append(got, s)
			continue
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
		}
		break
	}
	check(t, "events", []string{"0"}, got)
}

// TestTornEnd: whatever a crash leaves of the last segment, the events before it are read, and new
// ones follow.
func TestTornEnd(t *testing.T) {
	record := func(t *testing.T, dir string) {
		t.Helper()
		l := open(t, dir, segmentSize)
		for i := range 3 {
			l.Publish("", object(i))
		}
		closeLog(t, l)
	}
	dir := t.TempDir()
	record(t, dir)
	whole, err := os.ReadFile(segmentsOf(t, dir)[0])
	if err != nil {
		t.Fatal(err)
	}
	ends := []int{} // of the lines
	for i, b := range whole {
		if b == '\n' {
			ends = append(ends, i+1)
		}
	}
	for n := range len(whole) + 1 {
		for _, tail := range []string{"", "\x00\x00\x00\x00", "garbage\n"} {
			complete := 0
			for _, end := range ends {
				if end <= n {
					complete++
				}
			}
			dir := t.TempDir()
			record(t, dir)
			name := segmentsOf(t, dir)[0]
			if err := os.WriteFile(name, append(bytes.Clone(whole[:n]), tail...), 0o600); err != nil {
				t.Fatal(err)
			}
			l := open(t, dir, segmentSize)
			l.Publish("", object(7))
			got, _ := kept(t, l, "", Query{Tail: -1})
			check(t, fmt.Sprintf("%d bytes and %q", n, tail), append(numbers(0, complete), "7"), got)
			closeLog(t, l)
		}
	}
}

// TestLostSegments: gaps between segments are told, not bridged.
func TestLostSegments(t *testing.T) {
	dir := t.TempDir()
	l := open(t, dir, 300)
	for i := range 12 {
		l.Publish("", object(i))
	}
	closeLog(t, l)
	files := segmentsOf(t, dir)
	if len(files) < 4 {
		t.Fatalf("%d segments", len(files))
	}
	second, ok := startOf(filepath.Base(files[1]))
	third, ok2 := startOf(filepath.Base(files[2]))
	if !ok || !ok2 {
		t.Fatal(files)
	}
	if err := os.Remove(files[1]); err != nil {
		t.Fatal(err)
	}
	l = open(t, dir, 300)
	defer closeLog(t, l)
	got, _ := kept(t, l, "", Query{Tail: -1})
	check(t, "without a segment", slices.Concat(numbers(0, int(second)), []string{fmt.Sprintf("lost %d", third-second)}, numbers(int(third), 12)), got)
	if err := os.WriteFile(files[2], []byte("garbage\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	fourth, _ := startOf(filepath.Base(files[3]))
	got, _ = kept(t, l, "", Query{Tail: -1})
	check(t, "with a damaged one", slices.Concat(numbers(0, int(second)), []string{fmt.Sprintf("lost %d", fourth-second)}, numbers(int(fourth), 12)), got)
}

// TestUnwritable: events that the disk refuses are counted, and told before the next.
func TestUnwritable(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "events")
	if err := os.WriteFile(dir, nil, 0o600); err != nil { // a file where the directory should be
		t.Fatal(err)
	}
	l := open(t, dir, segmentSize)
	defer closeLog(t, l)
	for i := range 3 {
		l.Publish("", object(i))
	}
	if err := l.Read(t.Context(), "", Query{Tail: -1}, nil); err == nil {
		t.Error("a record that cannot be read is read")
	}
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	l.Publish("", object(3))
	got, _ := kept(t, l, "", Query{Tail: -1})
	check(t, "after the disk has come back", []string{"lost 3", "3"}, got)
}

// TestQueueIsBounded: while the writer waits for the disk, memory does not grow.
func TestQueueIsBounded(t *testing.T) {
	l := open(t, t.TempDir(), segmentSize)
	l.mu.Lock()
	j := l.of("")
	l.mu.Unlock()
	j.files.Lock() // the disk stands still
	const total = 3 * maxQueued
	for i := range total {
		l.Publish("", object(i))
	}
	j.mu.Lock()
	if len(j.queue) > maxQueued {
		t.Errorf("%d events wait", len(j.queue))
	}
	j.mu.Unlock()
	j.files.Unlock()
	got, _ := kept(t, l, "", Query{Tail: -1})
	l.Publish("", object(total))
	after, _ := kept(t, l, "", Query{Tail: -1})
	closeLog(t, l)
	if len(got) < maxQueued || len(got) >= total {
		t.Fatalf("%d events are kept", len(got))
	}
	if want := fmt.Sprintf("lost %d", total-len(got)); len(after) != len(got)+2 || after[len(got)] != want {
		t.Errorf("after %d events: %q, want %q", len(got), after[len(got):], want)
	}
}

// FuzzSegment: no content of a segment makes the record fail, or lose what comes after.
func FuzzSegment(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte("\n"))
	f.Add([]byte(`{"id":1,"type":"image"}` + "\n"))
	f.Add([]byte(`{"id":2}` + "\n" + `{"id":1}` + "\n"))
	f.Add([]byte(`{"id":18446744073709551615}` + "\n"))
	f.Add([]byte(`{"id":5,"missing":3,"before":4}` + "\n" + `{"id":`))
	f.Add(bytes.Repeat([]byte("x"), maxLine+10))
	f.Fuzz(func(t *testing.T, data []byte) {
		dir := t.TempDir()
		j := filepath.Join(dir, "t")
		if err := os.Mkdir(j, 0o700); err != nil {
			t.Fatal(err)
		}
		name := filepath.Join(j, "00000000000000000000"+suffix)
		if err := os.WriteFile(name, data, 0o600); err != nil {
			t.Fatal(err)
		}
		l := open(t, dir, segmentSize)
		l.Publish("", object(7))
		got, ids := kept(t, l, "", Query{Tail: -1})
		closeLog(t, l)
		if len(got) == 0 || got[len(got)-1] != "7" || !slices.IsSorted(ids) {
			t.Fatalf("events %q with ids %d", got, ids)
		}
		again := open(t, dir, segmentSize)
		defer closeLog(t, again)
		next, _ := kept(t, again, "", Query{Tail: -1})
		check(t, "by the next daemon", got, next)
	})
}

// BenchmarkPublish measures what an operation pays for its event.
func BenchmarkPublish(b *testing.B) {
	l := Open(Options{Dir: b.TempDir()})
	defer l.Close()
	e := api.Event{Type: api.EventSandbox, Action: api.ActionCreated, Object: "0123456789ab", Name: "work", Image: "host", State: api.StateRunning}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		l.Publish("", e)
	}
}

// BenchmarkWrite measures an event from its publication until followers see it, one at a time:
// the longest way, with one write(2) an event.
func BenchmarkWrite(b *testing.B) {
	l := Open(Options{Dir: b.TempDir()})
	defer l.Close()
	e := api.Event{Type: api.EventSandbox, Action: api.ActionCreated, Object: "0123456789ab", Name: "work", Image: "host", State: api.StateRunning}
	b.ReportAllocs()
	for b.Loop() {
		l.Publish("", e)
		if err := l.Read(b.Context(), "", Query{}, nil); err != nil {
			b.Fatal(err)
		}
	}
}

// TestForeignFiles: other files in the directory are left alone.
func TestForeignFiles(t *testing.T) {
	dir := t.TempDir()
	foreign := filepath.Join(dir, "t", "notes")
	if err := os.Mkdir(filepath.Dir(foreign), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(foreign, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	l := open(t, dir, 200)
	for i := range 100 {
		l.Publish("", object(i))
	}
	closeLog(t, l)
	if _, err := os.Stat(foreign); errors.Is(err, fs.ErrNotExist) {
		t.Error("it was removed")
	}
}

// TestExecsLinger: events of execs wait for each other, until a reader or something else
// comes.
func TestExecsLinger(t *testing.T) {
	exec := api.Event{Type: api.EventExec, Action: api.ActionStarted}
	for name, test := range map[string]struct {
		then    func(*testing.T, *Log)
		written int // events on disk afterwards
	}{
		"nothing": {func(*testing.T, *Log) {}, 0},
		"time":    {func(*testing.T, *Log) { time.Sleep(linger + 1) }, 2},
		"another event": {func(_ *testing.T, l *Log) {
			l.Publish("", api.Event{Type: api.EventSandbox, Action: api.ActionStarted})
		}, 3},
		"many": {func(_ *testing.T, l *Log) {
			for range lingerMost - 2 {
				l.Publish("", exec)
			}
		}, lingerMost},
		"a reader": {func(t *testing.T, l *Log) {
			t.Helper()
			if err := l.Read(t.Context(), "", Query{}, func(api.Event) error { return nil }); err != nil {
				t.Error(err)
			}
		}, 2},
		"close": {func(t *testing.T, l *Log) {
			t.Helper()
			if err := l.Close(); err != nil {
				t.Error(err)
			}
		}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dir := t.TempDir()
				l := Open(Options{Dir: dir})
				l.Publish("", exec)
				l.Publish("", exec)
				test.then(t, l)
				synctest.Wait()
				files, err := filepath.Glob(filepath.Join(dir, "t", "*"))
				if err != nil {
					t.Fatal(err)
				}
				written := 0
				for _, file := range files {
					data, err := os.ReadFile(file)
					if err != nil {
						t.Fatal(err)
					}
					written += bytes.Count(data, []byte("\n"))
				}
				if written != test.written {
					t.Errorf("%d events are on disk, want %d", written, test.written)
				}
				if err := l.Close(); err != nil {
					t.Error(err)
				}
			})
		})
	}
}
