package mainlog

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

func newStore(t *testing.T, files int, limit int64) *Store {
	t.Helper()
	return NewStore(Options{
		Dir: t.TempDir(), FileSize: MinFileSize, Files: files, Limit: limit,
		Log: slog.New(slog.DiscardHandler), Tenant: func(string) string { return "" },
	})
}

func readLog(t *testing.T, l *Log, opts ReadOptions) string {
	t.Helper()
	opts.Stdout, opts.Stderr = true, true
	r, err := l.NewReader(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	if err := r.Read(t.Context(), func(e api.LogEntry) error {
		if e.Dropped > 0 {
			fmt.Fprintf(&b, "<%d>", e.Dropped)
		}
		b.WriteString(e.Text)
		b.Write(e.Data)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func say(t *testing.T, w *Writer, text string) {
	t.Helper()
	if err := w.Append(api.LogEntry{Time: time.Now(), Stream: "stdout", Text: text}, w.next); err != nil {
		t.Fatal(err)
	}
}

// Whatever a crash left of the last line, complete lines stay and the writer continues behind them.
func TestLogGoesOnAfterEveryCrash(t *testing.T) {
	logs := newStore(t, 2, 1<<30)
	l := logs.Of("one")
	began := time.Now()
	w, err := l.NewWriter(0, began)
	if err != nil {
		t.Fatal(err)
	}
	say(t, w, "first\n")
	say(t, w, "second\n")
	w.Close()
	whole, err := os.ReadFile(l.path(1))
	if err != nil {
		t.Fatal(err)
	}
	for cut := range len(whole) + 1 {
		if err := os.WriteFile(l.path(1), whole[:cut], 0o600); err != nil {
			t.Fatal(err)
		}
		w, err := l.NewWriter(0, began)
		if err != nil {
			t.Fatalf("cut at %d: %v", cut, err)
		}
		for _, text := range []string{"first\n", "second\n", "third\n"} {
			if int64(strings.Index("first\nsecond\nthird\n", text)) == w.next {
				say(t, w, text)
			}
		}
		w.Close()
		if got := readLog(t, l, ReadOptions{Tail: -1}); got != "first\nsecond\nthird\n" {
			t.Errorf("cut at %d: %q", cut, got)
		}
		if err := logs.Remove("one"); err != nil {
			t.Fatal(err)
		}
		l = logs.Of("one")
		if err := os.MkdirAll(l.dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
}

// The next store removes a log of this one with its sandbox, and others' sandboxes when it sweeps.
func TestLogsOfAnEarlierDaemonAreRemoved(t *testing.T) {
	logs := newStore(t, 2, 1<<30)
	for _, id := range []string{"kept", "deleted", "swept"} {
		w, err := logs.Of(id).NewWriter(0, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		say(t, w, id)
		w.Close()
	}
	next := NewStore(logs.opts)
	if err := next.Sweep(func(id string) bool { return id != "swept" }); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(next.Remove("deleted"), next.Remove("never")); err != nil {
		t.Fatal(err)
	}
	left, err := os.ReadDir(logs.opts.Dir)
	if err != nil || len(left) != 1 || left[0].Name() != "kept" {
		t.Errorf("left: %v, %v", left, err)
	}
}

// A log has the output of one main process after the other; of one that is late nothing is written.
func TestLogOfSeveralRuns(t *testing.T) {
	l := newStore(t, 2, 1<<30).Of("one")
	began := time.Now()
	for i := range 3 {
		w, err := l.NewWriter(i, began.Add(-time.Duration(i)*time.Hour)) // the host's clock may be set back
		if err != nil {
			t.Fatal(err)
		}
		if w.next != 0 {
			t.Errorf("run %d begins at %d", i, w.next)
		}
		say(t, w, fmt.Sprintf("run %d\nand", i))
		w.Close()
	}
	if _, err := l.NewWriter(0, began); !errors.Is(err, ErrOlder) {
		t.Errorf("a late one: %v", err)
	}
	for tail, want := range map[int]string{-1: "run 0\nandrun 1\nandrun 2\nand", 0: "", 1: "and", 2: "andrun 2\nand", 3: "andrun 1\nandrun 2\nand", 9: "run 0\nandrun 1\nandrun 2\nand"} {
		if got := readLog(t, l, ReadOptions{Tail: tail}); got != want {
			t.Errorf("tail %d: %q, want %q", tail, got, want)
		}
	}
	// Something that the disk did not take.
	w, err := l.NewWriter(2, began.Add(-2*time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	w.next += 100
	say(t, w, "later")
	w.Close()
	if got := readLog(t, l, ReadOptions{Tail: -1}); !strings.HasSuffix(got, "and<100>later") {
		t.Errorf("%q", got)
	}
	// Lines that are no records are skipped.
	f, err := os.OpenFile(l.path(1), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString("{}garbage\n" + strings.Repeat("x", 3*maxLine) + "\n"); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if w, err = l.NewWriter(2, began.Add(-2*time.Hour)); err != nil {
		t.Fatal(err)
	}
	say(t, w, "last")
	w.Close()
	if got := readLog(t, l, ReadOptions{Tail: -1}); !strings.HasSuffix(got, "laterlast") {
		t.Errorf("%q", got)
	}
}

// A file that a crash or a full disk left empty does not hide how much the one before it has.
func TestLogGoesOnBehindAnEmptyFile(t *testing.T) {
	l := newStore(t, 3, 1<<30).Of("one")
	began := time.Now()
	w, err := l.NewWriter(0, began)
	if err != nil {
		t.Fatal(err)
	}
	say(t, w, "first\n")
	w.Close()
	for _, seq := range []int{2, 3} {
		if err := os.WriteFile(l.path(seq), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, text := range []string{"second\n", "third\n"} {
		if w, err = l.NewWriter(0, began); err != nil {
			t.Fatal(err)
		}
		say(t, w, text)
		w.Close()
	}
	if w.next != int64(len("first\nsecond\nthird\n")) {
		t.Errorf("it goes on at %d", w.next)
	}
	if got := readLog(t, l, ReadOptions{Tail: -1}); got != "first\nsecond\nthird\n" {
		t.Errorf("%q", got)
	}
}

// Output that the disk refuses is missing and counted; the log goes on as soon as the disk takes
// more.
func TestLogThatTheDiskRefuses(t *testing.T) {
	l := newStore(t, 2, 1<<30).Of("one")
	refuse := func(path string) (again func()) {
		t.Helper()
		if err := os.MkdirAll(path, 0o700); err != nil {
			t.Fatal(err)
		}
		return func() {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
		}
	}
	lost := func(w *Writer, text string) {
		t.Helper()
		if err := w.Append(api.LogEntry{Time: time.Now(), Stream: "stderr", Text: text}, w.next); err == nil {
			t.Error("it was written")
		}
	}
	for life, refused := range []string{l.path(1), ""} {
		w, err := l.NewWriter(life, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		if refused != "" {
			again := refuse(refused)
			lost(w, "lost\n")
			again()
		}
		say(t, w, fmt.Sprintln("life", life))
		again := refuse(l.path(w.seq + 1))
		w.at += MinFileSize // as if it were full
		lost(w, "gone")
		w.at -= MinFileSize
		again()
		say(t, w, "further\n")
		w.Close()
	}
	if got := readLog(t, l, ReadOptions{Tail: -1}); got != "<5>life 0\n<4>further\nlife 1\n<4>further\n" {
		t.Errorf("%q", got)
	}
}

// A reader of one stream learns of missing output, also across output of the other stream.
func TestLogOfOneStreamCountsWhatIsMissing(t *testing.T) {
	l := newStore(t, 2, 1<<30).Of("one")
	w, err := l.NewWriter(0, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	say(t, w, "one\n")
	w.next += 100
	if err := w.Append(api.LogEntry{Time: time.Now(), Stream: "stderr", Text: "two\n"}, w.next); err != nil {
		t.Fatal(err)
	}
	say(t, w, "three\n")
	r, err := l.NewReader(t.Context(), ReadOptions{Tail: -1, Stdout: true})
	if err != nil {
		t.Fatal(err)
	}
	var dropped int64
	if err := r.Read(t.Context(), func(e api.LogEntry) error {
		dropped += e.Dropped
		return nil
	}); err != nil || dropped != 100 {
		t.Errorf("%d bytes are missing, %v", dropped, err)
	}
}

// All logs together keep to their limit: the sandbox with most bytes loses its oldest files, so
// that others keep theirs, and files being written stay.
func TestLogsTogetherAreBounded(t *testing.T) {
	const limit = 6 * MinFileSize
	logs := newStore(t, 100, limit)
	text := strings.Repeat("x", Piece)
	total := func() (n int64) {
		t.Helper()
		err := filepath.WalkDir(logs.opts.Dir, func(_ string, e os.DirEntry, err error) error {
			if err == nil && !e.IsDir() {
				var fi os.FileInfo
				if fi, err = e.Info(); err == nil {
					n += fi.Size()
				}
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	write := func(id string, pieces int) (done func()) {
		t.Helper()
		l := logs.Of(id)
		turn, done := l.Enqueue()
		<-turn
		w, err := l.NewWriter(0, time.Unix(1, 0))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(w.Close)
		for range pieces {
			say(t, w, text)
			if n := total(); n > limit+2*MinFileSize {
				t.Fatalf("all logs have %d bytes", n)
			}
		}
		return done
	}
	write("ended", 40)()
	write("quiet", 3)()
	quiet := readLog(t, logs.Of("quiet"), ReadOptions{Tail: -1})
	live := write("live", 3) // goes on, and has one small file
	defer live()
	was := readLog(t, logs.Of("live"), ReadOptions{Tail: -1})
	for i := range 3 {
		defer write(fmt.Sprintf("loud%d", i), 100)()
	}
	if seqs, err := logs.Of("ended").segments(); err != nil || len(seqs) > 2 {
		t.Errorf("of the one that ended there are %v, %v: it had most", seqs, err)
	}
	if got := readLog(t, logs.Of("quiet"), ReadOptions{Tail: -1}); got != quiet {
		t.Errorf("the one that has less than the others has %d bytes, had %d", len(got), len(quiet))
	}
	if got := readLog(t, logs.Of("live"), ReadOptions{Tail: -1}); got != was {
		t.Errorf("the one that goes on has %d bytes, had %d", len(got), len(was))
	}
	if got := readLog(t, logs.Of("loud2"), ReadOptions{Tail: -1}); !strings.HasSuffix(got, text) {
		t.Errorf("the loud one has %d bytes", len(got))
	}
}

// A tenant with many logs loses its own before another one does, though each is smaller.
func TestLogsOfATenantEvictNoOthers(t *testing.T) {
	const limit = 6 * MinFileSize
	logs := newStore(t, 100, limit)
	logs.opts.Tenant = func(id string) string { return id[:1] }
	text := strings.Repeat("x", Piece)
	write := func(id string, pieces int) {
		t.Helper()
		l := logs.Of(id)
		turn, done := l.Enqueue()
		<-turn
		w, err := l.NewWriter(0, time.Unix(1, 0))
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		for range pieces {
			say(t, w, text)
		}
		done()
	}
	write("a", 2*MinFileSize/Piece)
	was := readLog(t, logs.Of("a"), ReadOptions{Tail: -1})
	for i := range 12 {
		write(fmt.Sprintf("b%d", i), MinFileSize/Piece-2)
	}
	if got := readLog(t, logs.Of("a"), ReadOptions{Tail: -1}); got != was {
		t.Errorf("a has %d bytes, had %d", len(got), len(was))
	}
	if got := readLog(t, logs.Of("b11"), ReadOptions{Tail: -1}); len(got) == 0 {
		t.Error("b has lost the log that it wrote last")
	}
}
