package agents

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/osthread"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

func TestWhichRunsAreOverdue(t *testing.T) {
	now := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	long := now.Add(-1000 * time.Hour) // the daemon's uptime
	run := func(id string, ago time.Duration, size int64) idleRun {
		return idleRun{id: id, at: now.Add(-ago), size: size}
	}
	all := []idleRun{run("minutes", 10*time.Minute, 50), run("days", 50*time.Hour, 20), run("hours", 2*time.Hour, 10), run("week", 168*time.Hour, 5), run("future", -time.Hour, 1), run("far future", -2*time.Hour, 3)}
	for _, test := range []struct {
		name    string
		r       Retention
		up      time.Time
		immense string
		want    []string
	}{
		{"nothing is asked for", Retention{}, long, "", nil},
		{"age", Retention{Age: 48 * time.Hour}, long, "", []string{"far future", "week", "days"}},
		{"all have room", Retention{Limit: 89}, long, "", nil},
		{"the oldest makes room", Retention{Limit: 81}, long, "", []string{"far future", "week"}},
		{"more of them do", Retention{Limit: 73}, long, "", []string{"far future", "week", "days"}},
		{"room does not shorten the grace, unless a clock was wrong", Retention{Limit: 1}, long, "", []string{"far future", "week", "days", "hours"}},
		{"one that cannot be measured goes", Retention{Limit: 89}, long, "hours", []string{"hours"}},
		{"within its grace it does not", Retention{Limit: 89}, long, "minutes", nil},
		{"nor where there is no limit", Retention{Age: 48 * time.Hour}, long, "hours", []string{"far future", "week", "days"}},
		{"both", Retention{Age: 100 * time.Hour, Limit: 81}, long, "", []string{"far future", "week"}},
		{"what a wrong clock wrote is as old as the daemon", Retention{Age: 48 * time.Hour}, now.Add(-47 * time.Hour), "", []string{"week", "days"}},
		{"and makes room in its turn", Retention{Limit: 61}, now.Add(-47 * time.Hour), "", []string{"week", "days", "far future"}},
		{"nobody could ask for them before", Retention{Age: 48 * time.Hour, Limit: 1}, now.Add(-59 * time.Minute), "", nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.r.Grace = time.Hour
			all := slices.Clone(all)
			for i := range all {
				all[i].immense = all[i].id == test.immense
			}
			var got []string
			for _, run := range test.r.overdue(now, test.up, all) {
				got = append(got, run.id)
			}
			if !slices.Equal(got, test.want) {
				t.Errorf("%v, want %v", got, test.want)
			}
		})
	}
}

// Old and large runs are removed, each by a worker, but never a run in progress, hosted or by hand.
// A failed removal is not retried at every look.
func TestOldRunsAreRemoved(t *testing.T) {
	dir := t.TempDir()
	now := time.Now()
	ids := []string{"20260116_143000", "20260116_143001", "20260116_143002", "20260116_143003", "20260116_143004"}
	old, stuck, hosted, hand, young := ids[0], ids[1], ids[2], ids[3], ids[4]
	for _, id := range ids {
		testRun(t, dir, id, `{"exit_reason":"submitted"}`)
		at := now.Add(-10 * time.Hour)
		if id == young {
			at = now.Add(-2 * time.Hour)
		}
		if err := os.Chtimes(filepath.Join(dir, id, RecordName), at, at); err != nil {
			t.Fatal(err)
		}
	}
	workOn(t, dir, hosted)
	workOnByHand(t, dir, hand)
	// This worker obeys, except for one run.
	s := shells{script: `read -r x; x=${x#*:\"}; x=${x%%\"*}; echo "$x" >>'` + dir + `/asked'; [ "$x" != ` + stuck + ` ] && rm -r '` + dir + `'/"$x" && echo "{\"run\":{\"id\":\"$x\"}}"`}
	h := New(s.options(dir))
	up := now.Add(-1000 * time.Hour)
	retain := func(r Retention, at time.Time, fails bool, want ...string) {
		t.Helper()
		r.Grace = time.Hour
		removed, err := h.Retain(t.Context(), r, at, up)
		if !slices.Equal(removed, want) || (err != nil) != fails || err != nil && !errors.Is(err, ErrWorker) {
			t.Errorf("removed are %v, %v, want %v", removed, err, want)
		}
	}
	asked := func(want int) {
		t.Helper()
		text, err := os.ReadFile(filepath.Join(dir, "asked"))
		if n := strings.Count(string(text), "\n"); err != nil || n != want {
			t.Errorf("%d workers were asked, want %d (%v):\n%s", n, want, err, text)
		}
	}
	retain(Retention{}, now, false)
	retain(Retention{Age: 5 * time.Hour}, now, true, old)
	asked(2)
	retain(Retention{Age: 5 * time.Hour}, now.Add(time.Minute), false)
	asked(2)
	retain(Retention{Age: 5 * time.Hour}, now.Add(time.Hour), true)
	asked(3)
	// Only the young run can make room.
	if err := os.WriteFile(filepath.Join(dir, young, "output"), make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	h.sizes = nil // it was measured before
	retain(Retention{Limit: 2 << 20}, now.Add(time.Hour), false)
	retain(Retention{Limit: 1 << 20}, now.Add(time.Hour), false, young)
	for _, id := range ids {
		_, err := os.Lstat(filepath.Join(dir, id))
		if gone := id == old || id == young; gone != errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: %v", id, err)
		}
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	h.sizes = nil
	if _, err := h.Retain(ended, Retention{Age: time.Hour}, now, up); !errors.Is(err, context.Canceled) {
		t.Errorf("of a daemon that ends: %v", err)
	}
	if err := os.RemoveAll(filepath.Join(dir, hosted)); err != nil { // so that Close does not wait for it
		t.Fatal(err)
	}
	if err := h.Close(t.Context()); err != nil {
		t.Error(err)
	}
	s.wait()
}

// A run whose record is missing or cannot be opened is removed too, by the time of its directory,
// and counts until then. A run that is or may be in progress is not.
func TestRunsWithoutARecordAreRemoved(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	now := time.Now()
	ids := []string{"20260116_143000", "20260116_143001", "20260116_143002", "20260116_143003", "20260116_143004", "20260116_143005"}
	gone, fifo, elsewhere, hosted, leased, young := ids[0], ids[1], ids[2], ids[3], ids[4], ids[5]
	for _, id := range ids {
		testRun(t, dir, id, `{}`)
		path := filepath.Join(dir, id, RecordName)
		old := now.Add(-10 * time.Hour)
		var err error
		switch id {
		case leased:
			f, openErr := os.OpenFile(path, os.O_RDWR, 0)
			if openErr != nil {
				t.Fatal(openErr)
			}
			defer f.Close()
			_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
			err = errors.Join(err, os.Chtimes(path, old, old))
		case gone:
			err = os.Remove(path)
		case elsewhere:
			err = errors.Join(os.Remove(path), os.Symlink(filepath.Join(outside, RecordName), path))
		case young:
			old = now.Add(-2 * time.Hour)
			err = errors.Join(os.Remove(path), os.WriteFile(filepath.Join(dir, id, "output"), make([]byte, 1<<20), 0o600))
		default:
			err = errors.Join(os.Remove(path), unix.Mkfifo(path, 0o600))
		}
		if err = errors.Join(err, os.Chtimes(filepath.Join(dir, id), old, old)); err != nil {
			t.Fatal(err)
		}
	}
	held, err := Hold(filepath.Join(dir, hosted))
	if err != nil {
		t.Fatal(err)
	}
	s := shells{script: `read -r x; x=${x#*:\"}; x=${x%%\"*}; rm -r '` + dir + `'/"$x" && echo "{\"run\":{\"id\":\"$x\"}}"`}
	h := New(s.options(dir))
	retain := func(r Retention, want ...string) {
		t.Helper()
		r.Grace = time.Hour
		removed, err := h.Retain(t.Context(), r, now, now.Add(-1000*time.Hour))
		if !slices.Equal(removed, want) || err != nil {
			t.Errorf("removed are %v, %v, want %v", removed, err, want)
		}
	}
	retain(Retention{Age: 11 * time.Hour})
	retain(Retention{Age: 5 * time.Hour}, gone, fifo, elsewhere)
	retain(Retention{Limit: 2 << 20})
	retain(Retention{Limit: 1 << 20}, young)
	for _, id := range []string{hosted, leased} {
		if err := h.Remove(t.Context(), id); err == nil {
			t.Errorf("%s, on which somebody may work, is removed", id)
		}
	}
	if err := held.Close(); err != nil {
		t.Fatal(err)
	}
	// A client's removal does not wait for the retention.
	if err := h.Remove(t.Context(), hosted); err != nil {
		t.Errorf("when nobody works on it any more: %v", err)
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 1 || left[0].Name() != leased {
		t.Errorf("there are %v, %v", left, err)
	}
	if err := h.Close(t.Context()); err != nil {
		t.Error(err)
	}
	s.wait()
}

// Hostile files do not falsify the measured size of a run, and measuring takes bounded time.
func TestHostileRunsAreMeasured(t *testing.T) {
	dir := t.TempDir()
	h := New(Options{Dir: dir, Max: 1})
	const mib, id = 1 << 20, "20260116_143000"
	at := filepath.Join(dir, id)
	testRun(t, dir, id, `{}`)
	large := filepath.Join(dir, "large") // outside of the run
	if err := errors.Join(os.WriteFile(large, make([]byte, 8*mib), 0o600), os.Mkdir(filepath.Join(at, "output"), 0o700)); err != nil {
		t.Fatal(err)
	}
	measured := func(what string, least, most int64) {
		t.Helper()
		if size, err := h.size(t.Context(), id); err != nil || size < least || size >= most {
			t.Errorf("%s: %d bytes, %v, want %d or some more", what, size, err, least)
		}
	}
	measured("next to nothing", 0, mib)
	file := filepath.Join(at, "output", "file")
	if err := os.WriteFile(file, make([]byte, 2*mib), 0o600); err != nil {
		t.Fatal(err)
	}
	measured("a file", 2*mib, 3*mib)
	for i := range 100 {
		if err := os.Link(file, fmt.Sprint(file, i)); err != nil {
			t.Fatal(err)
		}
	}
	measured("a file with many names", 2*mib-100*512, 3*mib)
	err := errors.Join(
		os.Symlink(dir, filepath.Join(at, "dir")), os.Symlink(large, filepath.Join(at, "link")), unix.Mkfifo(filepath.Join(at, "fifo"), 0o600),
		os.Truncate(filepath.Join(at, StatusName), 1<<40),
	)
	if err != nil {
		t.Fatal(err)
	}
	measured("links, a FIFO, and a file with nothing in it", 2*mib-100*512, 3*mib)
	// A name in the archive that a sandbox returns may have a megabyte.
	deep, err := os.OpenRoot(at)
	for range 2 * maxDeep {
		if err == nil {
			err = deep.Mkdir("d", 0o700)
		}
		if err == nil {
			above := deep
			deep, err = above.OpenRoot("d")
			err = errors.Join(err, above.Close())
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := deep.Close(); err != nil {
		t.Error(err)
	}
	if _, err := h.size(t.Context(), id); !errors.Is(err, errImmense) {
		t.Errorf("deep directories: %v", err)
	}
	runs, err := h.idle(t.Context())
	if err != nil || len(runs) != 1 || !runs[0].immense {
		t.Errorf("idle are %+v, %v", runs, err)
	}
}

// A run that cannot be examined blocks no other, and does not cause another measurement of the
// others.
func TestRetentionGoesPastWhatItCannotSee(t *testing.T) {
	dir := t.TempDir()
	h := New(Options{Dir: dir, Max: 1})
	const deep, other = "20260116_143000", "20260116_143001"
	testRun(t, dir, deep, `{}`)
	testRun(t, dir, other, `{}`)
	if err := os.MkdirAll(filepath.Join(dir, deep, strings.Repeat("d/", 200)), 0o700); err != nil {
		t.Fatal(err)
	}
	next, err := unix.FcntlInt(0, unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Close(next); err != nil {
		t.Fatal(err)
	}
	fewFiles(t, uint64(next)+100, func() {
		runs, err := h.idle(t.Context())
		if len(runs) != 1 || runs[0].id != other || !errors.Is(err, unix.EMFILE) {
			t.Errorf("idle are %+v, %v", runs, err)
		}
	})
	if _, ok := h.sizes[other]; !ok {
		t.Error("the other is measured again")
	}
	if runs, err := h.idle(t.Context()); len(runs) != 2 || err != nil {
		t.Errorf("idle are %+v, %v", runs, err)
	}
}

// A lease on a run's record, which prevents opening it, is not taken for a lack of resources.
func TestRunsWithALease(t *testing.T) {
	dir := t.TempDir()
	h := New(Options{Dir: dir, Max: 1})
	const leased, other = "20260116_143000", "20260116_143001"
	testRun(t, dir, leased, `{}`)
	testRun(t, dir, other, `{}`)
	f, err := os.OpenFile(filepath.Join(dir, leased, RecordName), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK); err != nil {
		t.Fatal(err)
	}
	if runs, err := h.List(); err != nil || len(runs) != 2 || !strings.Contains(runs[0].Error+runs[1].Error, unix.EAGAIN.Error()) {
		t.Errorf("%+v, %v", runs, err)
	}
	if _, err := h.refresh(); err != nil || len(h.going) != 0 {
		t.Errorf("going on are %v, %v", h.going, err)
	}
	if runs, err := h.idle(t.Context()); err != nil || len(runs) != 1 || runs[0].id != other {
		t.Errorf("idle are %+v, %v", runs, err)
	}
}

// A run that is resumed just before its removal is left alone, silently.
func TestRetentionIsSlower(t *testing.T) {
	dir := t.TempDir()
	const id = "20260116_143000"
	testRun(t, dir, id, `{}`)
	now := time.Now()
	if err := os.Chtimes(filepath.Join(dir, id, RecordName), now.Add(-time.Hour), now.Add(-time.Hour)); err != nil {
		t.Fatal(err)
	}
	p := make(plays, 1)
	h := New(p.options(t, dir, 1))
	type answer struct {
		removed []string
		err     error
	}
	answered := make(chan answer, 1)
	go func() {
		removed, err := h.Retain(t.Context(), Retention{Age: time.Minute, Grace: time.Minute}, now, now.Add(-time.Hour))
		answered <- answer{removed, err}
	}()
	worker := <-p
	workOn(t, dir, id)
	if _, err := worker.stdout.WriteString(`{"problem":{"code":"conflict"}}` + "\n"); err != nil {
		t.Error(err)
	}
	if got := <-answered; got.err != nil || len(got.removed) > 0 || len(h.kept) > 0 {
		t.Errorf("%v, %v; not tried again are %v", got.removed, got.err, h.kept)
	}
}

// A worker can set any mtime; the time of that change counts as its last work.
func TestRunsOfTheFuture(t *testing.T) {
	dir := t.TempDir()
	h := New(Options{Dir: dir, Max: 1})
	const id = "20260116_143000"
	testRun(t, dir, id, `{}`)
	record := filepath.Join(dir, id, RecordName)
	future := time.Date(2100, 1, 1, 0, 0, 0, 0, time.UTC)
	if err := os.Chtimes(record, future, future); err != nil {
		t.Fatal(err)
	}
	if at, ok, err := h.lastWork(id); err != nil || !ok || at.After(time.Now()) {
		t.Errorf("by its record: %v, %v, %v", at, ok, err)
	}
	if err := errors.Join(os.Remove(record), os.Chtimes(filepath.Dir(record), future, future)); err != nil {
		t.Fatal(err)
	}
	if at, ok, err := h.lastWork(id); err != nil || !ok || at.After(time.Now()) {
		t.Errorf("by its directory: %v, %v, %v", at, ok, err)
	}
}

// A run whose worker has removed the owner's access is examined and measured all the same, without
// following links.
func TestClosedRunsAreLookedAt(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	h := New(Options{Dir: dir, Max: 1})
	ids := []string{"20260116_143000", "20260116_143001", "20260116_143002", "20260116_143003"}
	for i, closed := range []string{".", ".", "output", "output"} {
		run := filepath.Join(dir, ids[i])
		testRun(t, dir, ids[i], `{"exit_reason":"submitted"}`)
		if err := errors.Join(
			os.Mkdir(filepath.Join(run, "output"), 0o700), os.WriteFile(filepath.Join(run, "output", "file"), make([]byte, 1<<20), 0o600),
			os.Symlink(outside, filepath.Join(run, "link")), os.Chmod(filepath.Join(run, closed), []os.FileMode{0, 0o300, 0, 0o400}[i]),
		); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(outside, 0); err != nil {
		t.Fatal(err)
	}
	held := workOnByHand(t, dir, ids[1])
	runs, err := h.idle(t.Context())
	if err != nil || len(runs) != 3 {
		t.Errorf("idle are %+v, %v", runs, err)
	}
	for _, run := range runs {
		if run.size < 1<<20 || run.id == ids[1] {
			t.Errorf("%+v", run)
		}
	}
	if err := held.Close(); err != nil {
		t.Error(err)
	}
	again, err := h.idle(t.Context())
	if err != nil || len(again) != 4 {
		t.Errorf("then idle are %+v, %v", again, err)
	}
	if run, err := h.Get(ids[0]); err != nil || run.ExitReason != "submitted" {
		t.Errorf("%+v, %v", run, err)
	}
	if info, err := os.Stat(outside); err != nil || info.Mode().Perm() != 0 {
		t.Errorf("outside of it: %v, %v", info.Mode(), err)
	}
	if err := os.Chmod(outside, 0o700); err != nil {
		t.Error(err)
	}
}

// A run of another user cannot be opened, does not block the others, and is logged once.
func TestRunsThatMayNotBeLookedAt(t *testing.T) {
	testenv.RequireRoot(t)
	dir := t.TempDir()
	h := New(Options{Dir: dir, Max: 1})
	const closed, other = "20260116_143000", "20260116_143001"
	testRun(t, dir, closed, `{}`)
	testRun(t, dir, other, `{}`)
	if err := errors.Join(os.Chown(filepath.Join(dir, closed), 12345, 12345), os.Chmod(filepath.Join(dir, closed), 0)); err != nil {
		t.Fatal(err)
	}
	err := osthread.Run(func() error {
		head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var caps [2]unix.CapUserData
		err := unix.Capget(&head, &caps[0])
		caps[0].Effective &^= 1<<unix.CAP_DAC_OVERRIDE | 1<<unix.CAP_DAC_READ_SEARCH
		if err := errors.Join(err, unix.Capset(&head, &caps[0])); err != nil {
			return err
		}
		for i := range 2 {
			runs, err := h.idle(t.Context())
			if len(runs) != 1 || runs[0].id != other || errors.Is(err, unix.EACCES) != (i == 0) || (err != nil) != (i == 0) {
				t.Errorf("look %d: idle are %+v, %v", i, runs, err)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	if info, err := os.Stat(filepath.Join(dir, closed)); err != nil || info.Mode().Perm() != 0 {
		t.Errorf("it is opened: %v, %v", info.Mode(), err)
	}
}

// A removal that does not end blocks no other run.
func TestRetentionGoesPastARemovalThatDoesNotEnd(t *testing.T) {
	dir := t.TempDir()
	now := time.Now()
	const endless, other = "20260116_143000", "20260116_143001"
	for i, id := range []string{endless, other} {
		testRun(t, dir, id, `{}`)
		at := now.Add(time.Duration(5*i-10) * time.Hour)
		if err := os.Chtimes(filepath.Join(dir, id, RecordName), at, at); err != nil {
			t.Fatal(err)
		}
	}
	s := shells{script: `read -r x; x=${x#*:\"}; x=${x%%\"*}; [ "$x" != ` + endless + ` ] || exec sleep 1000; rm -r '` + dir + `'/"$x" && echo "{\"run\":{\"id\":\"$x\"}}"`}
	h := New(s.options(dir))
	ctx, cancel := context.WithTimeout(t.Context(), testenv.HungAfter)
	defer cancel()
	retain := func(in, age time.Duration, want ...string) error {
		t.Helper()
		h.removeIn = in
		removed, err := h.Retain(ctx, Retention{Age: age, Grace: time.Hour}, now, now.Add(-1000*time.Hour))
		if !slices.Equal(removed, want) || ctx.Err() != nil {
			t.Errorf("removed are %v, %v, want %v", removed, err, want)
		}
		return err
	}
	if err := retain(time.Millisecond, 8*time.Hour); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	if _, ok := h.kept[endless]; !ok {
		t.Error("it is tried again at once")
	}
	if err := retain(testenv.HungAfter, time.Hour, other); err != nil {
		t.Error(err)
	}
	if err := h.Close(t.Context()); err != nil {
		t.Error(err)
	}
	s.wait()
}
