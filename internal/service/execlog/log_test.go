package execlog

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// put writes to a log as a splice would.
func put(t *testing.T, l *Log, stream string, p []byte) {
	t.Helper()
	n, err := l.Take(stream, func(file int) (int, error) { return unix.Write(file, p) })
	if err != nil || n != len(p) {
		t.Fatalf("%d, %v", n, err)
	}
}

// nothing is a turn that comes to nothing: the pipe was empty.
func nothing(t *testing.T, l *Log, stream string) {
	t.Helper()
	if _, err := l.Take(stream, func(int) (int, error) { return 0, unix.EAGAIN }); err != unix.EAGAIN { //nolint:errorlint // as given
		t.Fatal(err)
	}
}

// Whatever the order of the output, its end is kept, byte for byte and of the right stream; dropped
// bytes are counted; and the next daemon reads the two files alike.
func TestLogKeepsTheEnd(t *testing.T) {
	source := rand.NewChaCha8([32]byte{1, 2})
	rnd := rand.New(source)
	for round := range 16 {
		limit := int64(1 + rnd.IntN(2<<20))
		most := []int{1, 3, 1000, 64 << 10}[round%4]
		l, err := New(limit, false)
		if err != nil {
			t.Fatal(err)
		}
		var all, streams []byte
		pieces := 0 // how often the stream changes
		for range rnd.IntN(12000) {
			stream := "stdout"
			if rnd.IntN(3) == 0 {
				stream = "stderr"
			}
			if rnd.IntN(4) == 0 {
				nothing(t, l, stream)
				continue
			}
			if len(all) > 8<<20 {
				break
			}
			p := make([]byte, 1+rnd.IntN(most))
			_, _ = source.Read(p) // it never fails
			put(t, l, stream, p)
			all = append(all, p...)
			if n := len(streams); n > 0 && streams[n-1] != stream[3] {
				pieces++
			}
			streams = append(streams, bytes.Repeat([]byte{stream[3]}, len(p))...)
		}
		for range 2 {
			check(t, l, all, streams, pieces)
			if l, err = Adopt(l.out, l.state, limit); err != nil {
				t.Fatal(err)
			}
		}
		l.Close()
	}
}

func check(t *testing.T, l *Log, all, streams []byte, pieces int) {
	t.Helper()
	stdout, stderr, dropped := l.Counts()
	if want := int64(bytes.Count(streams, []byte{'o'})); stdout != want || stderr != int64(len(all))-want {
		t.Fatalf("%d and %d bytes, want %d of %d", stdout, stderr, want, len(all))
	}
	if dropped > max(0, int64(len(all))-l.limit) && pieces < maxPieces-1 {
		t.Fatalf("%d of %d dropped with a limit of %d", dropped, len(all), l.limit)
	}
	if int64(len(all))-dropped > l.limit {
		t.Fatalf("%d of %d dropped with a limit of %d", dropped, len(all), l.limit)
	}
	buf := make([]byte, 64<<10)
	at := int64(0)
	for {
		c, err := l.Read(at, buf)
		if err != nil {
			t.Fatal(err)
		}
		if at == 0 && c.At != dropped {
			t.Fatalf("it begins at %d, not %d", c.At, dropped)
		}
		if len(c.Data) == 0 {
			if at = c.At; at != int64(len(all)) || c.More == nil {
				t.Fatalf("it ends at %d of %d", at, len(all))
			}
			return
		}
		at = c.At + int64(len(c.Data))
		if !bytes.Equal(c.Data, all[c.At:at]) || bytes.Count(streams[c.At:at], []byte{c.Stream[3]}) != len(c.Data) {
			t.Fatalf("%s from %d to %d is not what was written", c.Stream, c.At, at)
		}
	}
}

func TestLogWakesReaders(t *testing.T) {
	l, err := New(1<<20, false)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	buf := make([]byte, 10)
	c, err := l.Read(0, buf)
	if err != nil || c.More == nil || c.Over {
		t.Fatalf("%+v, %v", c, err)
	}
	put(t, l, "stdout", []byte("a\xc3"))
	<-c.More
	if c, err = l.Read(0, buf); err != nil || string(c.Data) != "a\xc3" || c.Whole || c.More == nil {
		t.Fatalf("%+v, %v", c, err)
	}
	nothing(t, l, "stderr")
	put(t, l, "stdout", []byte("\xa9"))
	<-c.More
	if c, err = l.Read(1, buf); err != nil || string(c.Data) != "é" || len(l.pieces) != 1 {
		t.Fatalf("%+v, %v, %d pieces", c, err, len(l.pieces))
	}
	put(t, l, "stderr", []byte("!"))
	if c, err = l.Read(0, buf); err != nil || !c.Whole || c.More != nil {
		t.Fatalf("%+v, %v", c, err)
	}
	if c, err = l.Read(4, buf); err != nil || c.More == nil {
		t.Fatalf("%+v, %v", c, err)
	}
	l.Finish()
	<-c.More
	if c, err = l.Read(4, buf); err != nil || !c.Over {
		t.Fatalf("%+v, %v", c, err)
	}
}

// A damaged state is refused, and crashes nothing.
func FuzzAdopt(f *testing.F) {
	f.Add([]byte{1, 0, 0, 0, 0, 0, 0, 0}, make([]byte, pieceSize), 10)
	f.Add([]byte{255, 255, 255, 255, 255, 255, 255, 255}, bytes.Repeat([]byte{255}, pieceSize), 10)
	f.Fuzz(func(t *testing.T, head, pieces []byte, total int) {
		if len(head) > 4096 || len(pieces) > 64<<10 || total < 0 || total > 1<<16 {
			return
		}
		l, err := New(1<<10, false)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		_, _ = l.state.WriteAt(head, 0)
		_, _ = l.state.WriteAt(pieces, journalAt)
		_, _ = l.out.Write(make([]byte, total))
		a, err := Adopt(l.out, l.state, 1<<10)
		if err != nil {
			return
		}
		stdout, stderr, dropped := a.Counts()
		if stdout < 0 || stderr < 0 || dropped < 0 || stdout+stderr != int64(total) || dropped > int64(total) {
			t.Errorf("%d, %d, %d", stdout, stderr, dropped)
		}
		at := int64(0)
		for {
			c, err := a.Read(at, make([]byte, 100))
			if err != nil {
				t.Fatal(err)
			}
			if len(c.Data) == 0 {
				return
			}
			at = c.At + int64(len(c.Data))
		}
	})
}

// Output to be saved elsewhere is not dropped before. A writer of more waits, in streams as in
// pieces, and no longer than necessary.
func TestLogWaitsForWhoSaves(t *testing.T) {
	for name, tc := range map[string]struct{ step, rounds int }{"much": {64 << 10, 64}, "pieces": {1, 3 * maxPieces}} {
		t.Run(name, func(t *testing.T) {
			l, err := New(128<<10, false)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			defer l.Hand() // which ends the writer
			l.Save(0)
			written := make(chan struct{})
			go func() {
				defer close(written)
				data := bytes.Repeat([]byte("x"), tc.step)
				for i := range tc.rounds {
					stream := "stdout"
					if i%2 > 0 {
						stream = "stderr"
					}
					if _, err := l.Take(stream, func(file int) (int, error) { return unix.Write(file, data) }); err != nil {
						t.Error(err)
						return
					}
				}
			}()
			<-blocked(l, written)
			buf := make([]byte, 64<<10)
			for from, end := int64(0), int64(tc.rounds*tc.step); from < end; {
				c, err := l.Read(from, buf)
				if err != nil || c.At != from {
					t.Fatalf("at %d there is %d, %v", from, c.At, err)
				}
				from += int64(len(c.Data))
				l.Saved(from)
				if len(c.Data) == 0 {
					<-c.More
				}
			}
			<-written
			// When the daemon stops, output that is not taken stays in the pipe.
			l.Hand()
			if n, err := l.Take("stdout", func(int) (int, error) { return 1, nil }); n != 0 || !errors.Is(err, ErrHanded) {
				t.Errorf("%d, %v", n, err)
			}
		})
	}
}

// blocked is closed when the log has no room, or no writer is left.
func blocked(l *Log, written <-chan struct{}) <-chan struct{} {
	full := make(chan struct{})
	go func() {
		defer close(full)
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for {
			l.mu.Lock()
			room := !l.full()
			l.mu.Unlock()
			if !room {
				return
			}
			select {
			case <-written:
				return
			case <-tick.C:
			}
		}
	}()
	return full
}

// A reader that holds the output gets all of it, however little is kept, and whatever the program
// writes meanwhile. The memory stays bounded.
func TestLogWaitsForReadersThatHold(t *testing.T) {
	for _, limit := range []int64{1, 1000, takeSize, 256 << 10} {
		l, err := New(limit, false)
		if err != nil {
			t.Fatal(err)
		}
		const rounds = 64
		put(t, l, "stdout", bytes.Repeat([]byte("-"), 10)) // perhaps dropped before
		h := l.Hold(0)
		written := make(chan struct{})
		go func() {
			defer close(written)
			for i := range rounds {
				data := bytes.Repeat([]byte{byte('a' + i%26)}, takeSize)
				if _, err := l.Take("stdout", func(file int) (int, error) { return unix.Write(file, data) }); err != nil {
					t.Error(err)
				}
			}
		}()
		buf := make([]byte, 64<<10)
		first := max(0, 10-limit)
		for from := first; from < 10+rounds*takeSize; {
			c, err := l.Read(from, buf)
			if err != nil || c.At != from {
				t.Fatalf("limit %d: at %d there is %d, %v", limit, from, c.At, err)
			}
			for i, b := range c.Data {
				if at := from + int64(i) - 10; at >= 0 && b != byte('a'+at/takeSize%26) {
					t.Fatalf("limit %d: another byte at %d", limit, at)
				}
			}
			l.mu.Lock()
			if kept := l.total - from; kept > max(limit, takeSize) {
				t.Errorf("limit %d: %d bytes are kept", limit, kept)
			}
			l.mu.Unlock()
			from += int64(len(c.Data))
			h.Taken(from)
			if len(c.Data) == 0 {
				<-c.More
			}
		}
		<-written
		h.Release()
		put(t, l, "stderr", []byte("x"))
		if _, _, dropped := l.Counts(); dropped != max(0, 10+rounds*takeSize+1-limit) && dropped != 10+rounds*takeSize {
			t.Errorf("limit %d: %d bytes are dropped", limit, dropped)
		}
		l.Close()
	}
}

// A program that waits for a reader goes on when that ends, the exec is deleted or the daemon
// stops. A hold that comes after a deletion holds nothing.
func TestLogStopsWaitingForReaders(t *testing.T) {
	for name, tc := range map[string]struct {
		end  func(l *Log, h *Hold)
		want error
	}{
		"reader": {func(_ *Log, h *Hold) { h.Release() }, nil},
		"exec":   {func(l *Log, _ *Hold) { l.ReleaseHolds() }, nil},
		"daemon": {func(l *Log, _ *Hold) { l.Hand() }, ErrHanded},
	} {
		t.Run(name, func(t *testing.T) {
			l, err := New(128<<10, false)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			h := l.Hold(0)
			if l.Held() == nil {
				t.Error("it is not held")
			}
			written := make(chan error, 1)
			over := make(chan struct{})
			go func() {
				defer close(over)
				data := bytes.Repeat([]byte("x"), takeSize)
				var err error
				for range 8 {
					if _, e := l.Take("stdout", func(file int) (int, error) { return unix.Write(file, data) }); e != nil {
						err = e
					}
				}
				written <- err
			}()
			<-blocked(l, over)
			select {
			case <-over:
				t.Fatal("it has not waited")
			default:
			}
			tc.end(l, h)
			if name == "exec" {
				l.Hold(0)
			}
			if err := <-written; !errors.Is(err, tc.want) {
				t.Errorf("%v", err)
			}
			if name != "daemon" && l.Held() != nil {
				t.Error("it is held")
			}
		})
	}
}

// A document is there as a whole or not at all, also for the next daemon, and a damaged one is
// refused.
func TestDocuments(t *testing.T) {
	l, err := New(1<<10, false)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	type value struct{ A, B int64 }
	var v value
	for _, d := range []Document{Record, End, Context} {
		if ok, err := l.Document(d, &v); ok || err != nil {
			t.Errorf("document %d, unwritten: %v, %v", d, ok, err)
		}
	}
	if err := l.ReadPlace(&v); err == nil {
		t.Error("a place that was not written is read")
	}
	if err := l.Write(Context, value{3, 4}); err != nil {
		t.Fatal(err)
	}
	if err := l.Write(Record, strings.Repeat("x", maxDocument)); err == nil {
		t.Error("a document is larger than its place")
	}
	if err := l.WritePlace(&value{5, 6}); err != nil {
		t.Fatal(err)
	}
	next, err := Adopt(l.out, l.state, 1<<10)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range []Document{Record, End} { // the file is longer than these places now
		if ok, err := next.Document(d, &v); ok || err != nil {
			t.Errorf("document %d, unwritten: %v, %v", d, ok, err)
		}
	}
	if ok, err := next.Document(Context, &v); !ok || err != nil || v != (value{3, 4}) {
		t.Errorf("%+v, %v, %v", v, ok, err)
	}
	if err := next.ReadPlace(&v); err != nil || v != (value{5, 6}) {
		t.Errorf("%+v, %v", v, err)
	}
	for _, size := range []byte{1, 255} { // half of the text; more than a document has
		if _, err := l.state.WriteAt(bytes.Repeat([]byte{size}, 1+int(size>>5)), int64(Context)); err != nil {
			t.Fatal(err)
		}
		if _, err := next.Document(Context, &v); err == nil {
			t.Errorf("a document of %d is read", size)
		}
	}
}
