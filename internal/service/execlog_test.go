package service

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"testing"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/runtime"
)

// put writes to a log as a splice would.
func put(t *testing.T, l *execLog, stream string, p []byte) {
	t.Helper()
	n, err := l.Take(stream, func(file int) (int, error) { return unix.Write(file, p) })
	if err != nil || n != len(p) {
		t.Fatalf("%d, %v", n, err)
	}
}

// nothing is a turn that comes to nothing: the pipe was empty.
func nothing(t *testing.T, l *execLog, stream string) {
	t.Helper()
	if _, err := l.Take(stream, func(int) (int, error) { return 0, unix.EAGAIN }); err != unix.EAGAIN { //nolint:errorlint // as given
		t.Fatal(err)
	}
}

// Whatever the order of the output, its end is kept, byte for byte and of the right stream; dropped
// bytes are counted; and the next daemon reads the two files alike.
func TestExecLogKeepsTheEnd(t *testing.T) {
	source := rand.NewChaCha8([32]byte{1, 2})
	rnd := rand.New(source)
	for round := range 16 {
		limit := int64(1 + rnd.IntN(2<<20))
		most := []int{1, 3, 1000, 64 << 10}[round%4]
		l, err := newExecLog(limit, false)
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
			if l, err = adoptExecLog(l.out, l.state, limit); err != nil {
				t.Fatal(err)
			}
		}
		l.close()
	}
}

func check(t *testing.T, l *execLog, all, streams []byte, pieces int) {
	t.Helper()
	stdout, stderr, dropped := l.counts()
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
		c, err := l.read(at, buf)
		if err != nil {
			t.Fatal(err)
		}
		if at == 0 && c.at != dropped {
			t.Fatalf("it begins at %d, not %d", c.at, dropped)
		}
		if len(c.data) == 0 {
			if at = c.at; at != int64(len(all)) || c.more == nil {
				t.Fatalf("it ends at %d of %d", at, len(all))
			}
			return
		}
		at = c.at + int64(len(c.data))
		if !bytes.Equal(c.data, all[c.at:at]) || bytes.Count(streams[c.at:at], []byte{c.stream[3]}) != len(c.data) {
			t.Fatalf("%s from %d to %d is not what was written", c.stream, c.at, at)
		}
	}
}

func TestExecLogWakesReaders(t *testing.T) {
	l, err := newExecLog(1<<20, false)
	if err != nil {
		t.Fatal(err)
	}
	defer l.close()
	buf := make([]byte, 10)
	c, err := l.read(0, buf)
	if err != nil || c.more == nil || c.over {
		t.Fatalf("%+v, %v", c, err)
	}
	put(t, l, "stdout", []byte("a\xc3"))
	<-c.more
	if c, err = l.read(0, buf); err != nil || string(c.data) != "a\xc3" || c.whole || c.more == nil {
		t.Fatalf("%+v, %v", c, err)
	}
	nothing(t, l, "stderr")
	put(t, l, "stdout", []byte("\xa9"))
	<-c.more
	if c, err = l.read(1, buf); err != nil || string(c.data) != "é" || len(l.pieces) != 1 {
		t.Fatalf("%+v, %v, %d pieces", c, err, len(l.pieces))
	}
	put(t, l, "stderr", []byte("!"))
	if c, err = l.read(0, buf); err != nil || !c.whole || c.more != nil {
		t.Fatalf("%+v, %v", c, err)
	}
	if c, err = l.read(4, buf); err != nil || c.more == nil {
		t.Fatalf("%+v, %v", c, err)
	}
	l.finish()
	<-c.more
	if c, err = l.read(4, buf); err != nil || !c.over {
		t.Fatalf("%+v, %v", c, err)
	}
}

// A damaged state is refused, and crashes nothing.
func FuzzAdoptExecLog(f *testing.F) {
	f.Add([]byte{1, 0, 0, 0, 0, 0, 0, 0}, make([]byte, pieceSize), 10)
	f.Add([]byte{255, 255, 255, 255, 255, 255, 255, 255}, bytes.Repeat([]byte{255}, pieceSize), 10)
	f.Fuzz(func(t *testing.T, head, pieces []byte, total int) {
		if len(head) > 4096 || len(pieces) > 64<<10 || total < 0 || total > 1<<16 {
			return
		}
		l, err := newExecLog(1<<10, false)
		if err != nil {
			t.Fatal(err)
		}
		defer l.close()
		_, _ = l.state.WriteAt(head, 0)
		_, _ = l.state.WriteAt(pieces, journalAt)
		_, _ = l.out.Write(make([]byte, total))
		a, err := adoptExecLog(l.out, l.state, 1<<10)
		if err != nil {
			return
		}
		stdout, stderr, dropped := a.counts()
		if stdout < 0 || stderr < 0 || dropped < 0 || stdout+stderr != int64(total) || dropped > int64(total) {
			t.Errorf("%d, %d, %d", stdout, stderr, dropped)
		}
		at := int64(0)
		for {
			c, err := a.read(at, make([]byte, 100))
			if err != nil {
				t.Fatal(err)
			}
			if len(c.data) == 0 {
				return
			}
			at = c.at + int64(len(c.data))
		}
	})
}

// Wherever a text is cut, only the beginning of a character is held back.
func TestSplitTail(t *testing.T) {
	const text = "aé€😀z\u0800\U0010ffff"
	for i := range len(text) + 1 {
		n := splitTail([]byte(text[:i]))
		if whole := text[:i-n]; n > 3 || !utf8.ValidString(whole) {
			t.Errorf("%q: %d", text[:i], n)
		}
	}
	for s, want := range map[string]int{"": 0, "\xff": 0, "a\x80": 0, "\x80\x80\x80\x80": 0, "\xc3": 1, "\xe2\x82": 2, "\xf0\x9f\x98": 3, "\xc3(": 0, "\xed\xa0": 0} {
		if got := splitTail([]byte(s)); got != want {
			t.Errorf("%q: %d, want %d", s, got, want)
		}
	}
}

// Output to be saved elsewhere is not dropped before. A writer of more waits, in streams as in
// pieces, and no longer than necessary.
func TestExecLogWaitsForWhoSaves(t *testing.T) {
	for name, tc := range map[string]struct{ step, rounds int }{"much": {64 << 10, 64}, "pieces": {1, 3 * maxPieces}} {
		t.Run(name, func(t *testing.T) {
			l, err := newExecLog(128<<10, false)
			if err != nil {
				t.Fatal(err)
			}
			defer l.close()
			defer l.hand() // which ends the writer
			l.save(0)
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
				c, err := l.read(from, buf)
				if err != nil || c.at != from {
					t.Fatalf("at %d there is %d, %v", from, c.at, err)
				}
				from += int64(len(c.data))
				l.saves(from)
				if len(c.data) == 0 {
					<-c.more
				}
			}
			<-written
			// When the daemon stops, output that is not taken stays in the pipe.
			l.hand()
			if n, err := l.Take("stdout", func(int) (int, error) { return 1, nil }); n != 0 || !errors.Is(err, errHanded) {
				t.Errorf("%d, %v", n, err)
			}
		})
	}
}

// blocked is closed when the log has no room, or no writer is left.
func blocked(l *execLog, written <-chan struct{}) <-chan struct{} {
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
func TestExecLogWaitsForReadersThatHold(t *testing.T) {
	for _, limit := range []int64{1, 1000, takeSize, 256 << 10} {
		l, err := newExecLog(limit, false)
		if err != nil {
			t.Fatal(err)
		}
		const rounds = 64
		var h hold
		put(t, l, "stdout", bytes.Repeat([]byte("-"), 10)) // perhaps dropped before
		l.hold(&h)
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
		x := &Execution{log: l, done: make(chan struct{})}
		buf := make([]byte, 64<<10)
		first := max(0, 10-limit)
		for from := first; from < 10+rounds*takeSize; {
			c, err := x.log.read(from, buf)
			if err != nil || c.at != from {
				t.Fatalf("limit %d: at %d there is %d, %v", limit, from, c.at, err)
			}
			for i, b := range c.data {
				if at := from + int64(i) - 10; at >= 0 && b != byte('a'+at/takeSize%26) {
					t.Fatalf("limit %d: another byte at %d", limit, at)
				}
			}
			l.mu.Lock()
			if kept := l.total - from; kept > max(limit, takeSize) {
				t.Errorf("limit %d: %d bytes are kept", limit, kept)
			}
			l.mu.Unlock()
			from += int64(len(c.data))
			l.taken(&h, from)
			if len(c.data) == 0 {
				<-c.more
			}
		}
		<-written
		l.unhold(&h)
		put(t, l, "stderr", []byte("x"))
		if _, _, dropped := l.counts(); dropped != max(0, 10+rounds*takeSize+1-limit) && dropped != 10+rounds*takeSize {
			t.Errorf("limit %d: %d bytes are dropped", limit, dropped)
		}
		l.close()
	}
}

// A program that waits for a reader goes on when that ends, the exec is deleted or the daemon
// stops. A hold that comes after a deletion holds nothing.
func TestExecLogStopsWaitingForReaders(t *testing.T) {
	for name, tc := range map[string]struct {
		end  func(l *execLog, h *hold)
		want error
	}{
		"reader": {func(l *execLog, h *hold) { l.unhold(h) }, nil},
		"exec":   {func(l *execLog, _ *hold) { l.freeHolds() }, nil},
		"daemon": {func(l *execLog, _ *hold) { l.hand() }, errHanded},
	} {
		t.Run(name, func(t *testing.T) {
			l, err := newExecLog(128<<10, false)
			if err != nil {
				t.Fatal(err)
			}
			defer l.close()
			var h, late hold
			l.hold(&h)
			if l.held() == nil {
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
			tc.end(l, &h)
			if name == "exec" {
				l.hold(&late)
			}
			if err := <-written; !errors.Is(err, tc.want) {
				t.Errorf("%v", err)
			}
			if name != "daemon" && l.held() != nil {
				t.Error("it is held")
			}
		})
	}
}

// A client that fails while it holds the output leaves no hold, also one that has waited for the
// start.
func TestAttachHeldLeavesNoHold(t *testing.T) {
	l, err := newExecLog(128<<10, false)
	if err != nil {
		t.Fatal(err)
	}
	defer l.close()
	x := &Execution{log: l, done: make(chan struct{})}
	put(t, l, "stdout", []byte("hello"))
	gone := errors.New("gone")
	var u Upcoming
	l.hold(&u.hold)
	for _, u := range []*Upcoming{nil, &u} {
		err := x.AttachHeld(t.Context(), 0, u, true, func(e api.ExecEvent) error {
			if e.Text == "" {
				return nil
			}
			l.mu.Lock()
			defer l.mu.Unlock()
			if len(l.holds) == 0 {
				t.Error("nothing holds it meanwhile")
			}
			return gone
		})
		if !errors.Is(err, gone) {
			t.Errorf("%v", err)
		}
	}
	if len(l.holds) != 0 || l.followers.Load() != 0 {
		t.Errorf("%d hold it, %d follow", len(l.holds), l.followers.Load())
	}
	if err := (&Execution{}).AttachHeld(t.Context(), 0, nil, true, nil); !errors.Is(err, runtime.ErrState) {
		t.Errorf("%v", err)
	}
}
