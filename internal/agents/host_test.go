package agents

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// Lines are returned complete or not at all, however they are written, and only the length of a
// line over the limit is.
func TestTail(t *testing.T) {
	var file bytes.Buffer
	tail := tail{r: bufio.NewReaderSize(&file, 16), n: 1}
	read := func() (all []api.AgentRunEvent) {
		t.Helper()
		for {
			e, whole, err := tail.next()
			if err != nil {
				t.Fatal(err)
			}
			if !whole {
				return all
			}
			all = append(all, e)
		}
	}
	file.WriteString(`{"n":1}` + "\n" + `{"n":2,"text":"longer than `)
	if got := read(); len(got) != 1 || got[0].N != 1 || string(got[0].Event) != `{"n":1}` {
		t.Errorf("%+v", got)
	}
	file.WriteString(`the buffer"}`)
	if got := read(); len(got) != 0 {
		t.Errorf("half a line: %+v", got)
	}
	long := strings.Repeat("x", maxEventLine)
	file.WriteString("\n" + long + "\n" + `{"n":4}` + "\n")
	got := read()
	if len(got) != 3 || string(got[0].Event) != `{"n":2,"text":"longer than the buffer"}` || got[1].Omitted != maxEventLine+1 || got[1].Event != nil || got[2].N != 4 || string(got[2].Event) != `{"n":4}` {
		t.Errorf("%d events", len(got))
	}
}

func testRun(t *testing.T, dir, id, status string) {
	t.Helper()
	path := filepath.Join(dir, id)
	if err := os.MkdirAll(path, 0o700); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{RecordName: "{}\n", StatusName: status} {
		if err := os.WriteFile(filepath.Join(path, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// working is the locks of a worker.
type working struct{ record, run io.Closer }

func (w working) Close() error { return errors.Join(w.record.Close(), w.run.Close()) }

// workOn takes a worker's locks.
func workOn(t *testing.T, dir, id string) working {
	t.Helper()
	run, err := Hold(filepath.Join(dir, id))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = run.Close() })
	return working{workOnByHand(t, dir, id), run}
}

// workOnByHand takes the lock of a manual resume.
func workOnByHand(t *testing.T, dir, id string) *os.File {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(dir, id, RecordName), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK}); err != nil {
		t.Fatal(err)
	}
	return f
}

// A run's state follows from its lock and its status file, not from the state in that file.
func TestStates(t *testing.T) {
	dir := t.TempDir()
	h := New(Options{Dir: dir, Max: 1})
	testRun(t, dir, "20260116_143000", `{"id":"../../etc","dir":"/etc","state":"running","turns":3}`)
	testRun(t, dir, "20260116_143000_2", `{"exit_reason":"submitted","exit_detail":"d"}`)
	testRun(t, dir, "20260116_143001", `{`)
	testRun(t, dir, "notarun", `{}`)
	if err := os.Remove(filepath.Join(dir, "20260116_143000_2", StatusName)); err != nil {
		t.Fatal(err)
	}
	testRun(t, dir, "20260116_143002", `{"exit_reason":"submitted","exit_detail":"d"}`)
	runs, err := h.List()
	if err != nil || len(runs) != 4 {
		t.Fatalf("%+v, %v", runs, err)
	}
	byID := map[string]api.AgentRun{}
	for _, r := range runs {
		byID[r.ID] = r
	}
	if r := byID["20260116_143000"]; r.State != api.AgentStopped || r.Turns != 3 || r.Dir != filepath.Join(dir, "20260116_143000") {
		t.Errorf("%+v", r)
	}
	for _, id := range []string{"20260116_143000_2", "20260116_143001"} {
		if r := byID[id]; r.State != api.AgentStopped || r.Error == "" {
			t.Errorf("%+v", r)
		}
	}
	if r := byID["20260116_143002"]; r.State != api.AgentEnded || r.ExitReason != "submitted" {
		t.Errorf("%+v", r)
	}

	f := workOn(t, dir, "20260116_143002")
	if r, err := h.Get("20260116_143002"); err != nil || r.State != api.AgentRunning || r.ExitReason != "" {
		t.Errorf("%+v, %v", r, err)
	}
	if err := h.reserve(""); !errors.Is(err, ErrTooMany) {
		t.Errorf("a second run: %v", err)
	}
	if err := h.Remove(t.Context(), "20260116_143002"); !errors.Is(err, ErrRunning) {
		t.Errorf("removed: %v", err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{"", ".", "..", "20260116_143000/..", "notarun", "20260116_999999_123456"} {
		if _, err := h.Get(id); !errors.Is(err, ErrNotFound) {
			t.Errorf("%q: %v", id, err)
		}
	}
}

// shells are workers that run a shell script, started and signalled by this test.
type shells struct {
	script string
	mu     sync.Mutex
	all    map[int]*exec.Cmd
}

func (s *shells) options(dir string) Options {
	s.all = map[int]*exec.Cmd{}
	return Options{
		Dir: dir, Max: 1,
		Start: func(_ context.Context, stdin, stdout *os.File) (int, error) {
			cmd := exec.Command("/bin/sh", "-c", s.script)
			cmd.Stdin, cmd.Stdout = stdin, stdout
			if err := cmd.Start(); err != nil {
				return 0, err
			}
			s.mu.Lock()
			defer s.mu.Unlock()
			s.all[cmd.Process.Pid] = cmd
			return cmd.Process.Pid, nil
		},
		Signal: func(_ context.Context, pid int, kill bool) error {
			s.mu.Lock()
			defer s.mu.Unlock()
			if kill {
				return s.all[pid].Process.Kill()
			}
			return s.all[pid].Process.Signal(syscall.SIGTERM)
		},
	}
}

func (s *shells) wait() {
	for _, cmd := range s.all {
		_ = cmd.Wait() // its exit code does not matter
	}
}

// A worker that replies nothing, too much, or nonsense has not begun a run.
func TestWorkersThatFail(t *testing.T) {
	for name, script := range map[string]string{
		"dies": "exit 1", "nonsense": "echo nonsense; cat", "neither": "echo '{}'", "endless": "head -c 3000000 /dev/zero | tr '\\0' x; echo",
	} {
		t.Run(name, func(t *testing.T) {
			s := shells{script: script}
			h := New(s.options(t.TempDir()))
			if run, err := h.Start(t.Context(), api.StartAgentRun{}); !errors.Is(err, ErrWorker) {
				t.Errorf("%+v, %v", run, err)
			}
			if err := h.Close(t.Context()); err != nil {
				t.Error(err)
			}
			s.wait()
		})
	}
	s := shells{script: "exec sleep 600"}
	h := New(s.options(t.TempDir()))
	ctx, cancel := context.WithCancel(t.Context())
	started := make(chan error, 1)
	go func() { _, err := h.Start(ctx, api.StartAgentRun{}); started <- err }()
	cancel()
	if err := <-started; !errors.Is(err, context.Canceled) {
		t.Errorf("a client that went away: %v", err)
	}
	if err := h.Close(t.Context()); err != nil {
		t.Error(err)
	}
	s.wait()
	if _, err := h.Start(t.Context(), api.StartAgentRun{}); err == nil {
		t.Error("a run of a host that is closed")
	}
}

// A worker that ignores SIGTERM is killed; one that cannot be signalled does not block.
func TestWorkersThatGoOn(t *testing.T) {
	dir := t.TempDir()
	testRun(t, dir, "20260116_143000", `{"exit_reason":"submitted"}`)
	s := shells{script: "trap '' TERM; echo '{\"run\":{\"id\":\"20260116_143000\"}}'; exec sleep 600"}
	h := New(s.options(dir))
	h.endAfterKill = testenv.HungAfter // a slow machine is not the subject
	if _, err := h.Start(t.Context(), api.StartAgentRun{}); err != nil {
		t.Fatal(err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := h.Close(ended); err == nil || !strings.Contains(err.Error(), "1 agent runs did not end in time and were killed") {
		t.Errorf("closed: %v", err)
	}
	s.wait()
	for _, cmd := range s.all {
		if got := cmd.ProcessState.String(); got != "signal: killed" {
			t.Errorf("it has ended by %s", got)
		}
	}

	opts := s.options(dir)
	opts.Start = func(context.Context, *os.File, *os.File) (int, error) { return 0, errors.New("nobody there") }
	if _, err := New(opts).Start(t.Context(), api.StartAgentRun{}); err == nil || !strings.Contains(err.Error(), "nobody there") {
		t.Errorf("started by nobody: %v", err)
	}
}

// plays are workers that the test itself plays, with their pipes.
type plays chan play

type play struct{ stdin, stdout *os.File }

func (p plays) options(t *testing.T, dir string, most int) Options {
	t.Helper()
	again := func(f *os.File) *os.File {
		fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			t.Error(err)
		}
		mine := os.NewFile(uintptr(fd), f.Name())
		t.Cleanup(func() { _ = mine.Close() })
		return mine
	}
	return Options{
		Dir: dir, Max: most,
		Start: func(_ context.Context, stdin, stdout *os.File) (int, error) {
			p <- play{again(stdin), again(stdout)}
			return 1, nil
		},
		Signal: func(context.Context, int, bool) error { return errors.New("nobody there") },
	}
}

// refused returns the error of a call that must not start a worker.
func (p plays) refused(t *testing.T, do func() error) error {
	t.Helper()
	result := make(chan error, 1)
	go func() { result <- do() }()
	select {
	case err := <-result:
		return err
	case worker := <-p:
		t.Error("a worker is started")
		return errors.Join(worker.stdin.Close(), worker.stdout.Close(), <-result)
	}
}

func (p play) answer(t *testing.T, id string) {
	t.Helper()
	if _, err := p.stdout.WriteString(`{"run":{"id":"` + id + `"}}` + "\n"); err != nil {
		t.Error(err)
	}
}

// A run that begins counts once, even if it has a record and its worker has not replied.
func TestRunsThatBeginCountOnce(t *testing.T) {
	dir := t.TempDir()
	p := make(plays, 9)
	h := New(p.options(t, dir, 2))
	answered := make(chan error, 9)
	start := func() { _, err := h.Start(t.Context(), api.StartAgentRun{}); answered <- err }
	const first, second = "20260116_143000", "20260116_143001"
	go start()
	one := <-p
	testRun(t, dir, first, `{}`)
	locked := workOn(t, dir, first)
	go start()
	var two play
	select {
	case two = <-p:
	case err := <-answered:
		t.Fatalf("the second of two: %v", err)
	}
	full := func(when string) {
		t.Helper()
		err := p.refused(t, func() error { _, err := h.Start(t.Context(), api.StartAgentRun{}); return err })
		if !errors.Is(err, ErrTooMany) {
			t.Errorf("a third %s: %v", when, err)
		}
	}
	full("while two begin")
	one.answer(t, first)
	if err := <-answered; err != nil {
		t.Fatal(err)
	}
	full("while one goes on and one begins")
	testRun(t, dir, second, `{}`)
	workOn(t, dir, second)
	two.answer(t, second)
	if err := <-answered; err != nil {
		t.Fatal(err)
	}
	full("while two go on")
	if err := errors.Join(locked.Close(), one.stdout.Close()); err != nil {
		t.Fatal(err)
	}
	go start()
	three := <-p
	if err := errors.Join(two.stdout.Close(), three.stdout.Close()); err != nil {
		t.Fatal(err)
	}
	if err := <-answered; !errors.Is(err, ErrWorker) {
		t.Errorf("the third's worker ended: %v", err)
	}
}

// Two resumes of a run do not overlap: the second worker would remove the first one's cancel file.
func TestOneResumeAtATime(t *testing.T) {
	dir := t.TempDir()
	const id = "20260116_143000"
	testRun(t, dir, id, `{"exit_reason":"interrupted"}`)
	p := make(plays, 9)
	h := New(p.options(t, dir, 9))
	answered := make(chan error, 1)
	resume := func() error { _, err := h.Resume(t.Context(), id, api.ResumeAgentRun{}); return err }
	go func() { answered <- resume() }()
	first := <-p
	if err := p.refused(t, resume); !errors.Is(err, ErrRunning) {
		t.Errorf("while it is being resumed: %v", err)
	}
	if err := first.stdout.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-answered; !errors.Is(err, ErrWorker) {
		t.Error(err)
	}
	go func() { answered <- resume() }()
	again := <-p
	workOn(t, dir, id)
	again.answer(t, id)
	if err := <-answered; err != nil {
		t.Errorf("after one that came to nothing: %v", err)
	}
	if err := p.refused(t, resume); !errors.Is(err, ErrRunning) {
		t.Errorf("while it goes on: %v", err)
	}
	if err := again.stdout.Close(); err != nil {
		t.Fatal(err)
	}
}

// A worker gets exactly the request that was sent, and a request over its limit is refused.
func TestRequestsAreBounded(t *testing.T) {
	p := make(plays, 9)
	h := New(p.options(t, t.TempDir(), 9))
	if err := p.refused(t, func() error {
		_, err := h.Start(t.Context(), api.StartAgentRun{Query: strings.Repeat("x", MaxRequest)})
		return err
	}); !errors.Is(err, ErrTooLarge) {
		t.Errorf("%v", err)
	}
	query := strings.Repeat("<&>", MaxRequest/4)
	answered := make(chan error, 1)
	go func() { _, err := h.Start(t.Context(), api.StartAgentRun{Query: query}); answered <- err }()
	var worker play
	select {
	case worker = <-p:
	case err := <-answered:
		t.Fatal(err)
	}
	var req Request
	text, err := io.ReadAll(worker.stdin)
	if err := errors.Join(err, json.Unmarshal(text, &req)); err != nil || len(text) > MaxRequest || req.Start.Query != query {
		t.Errorf("it is told %d bytes, %v", len(text), err)
	}
	if err := worker.stdout.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-answered; !errors.Is(err, ErrWorker) {
		t.Error(err)
	}
}

// Several clients may cancel a run at once, and no link in its directory is written through.
func TestCancelAtOnce(t *testing.T) {
	dir, outside := t.TempDir(), filepath.Join(t.TempDir(), "file")
	const id = "20260116_143000"
	testRun(t, dir, id, `{}`)
	workOn(t, dir, id)
	if err := errors.Join(
		os.WriteFile(outside, []byte("plant"), 0o600), os.Symlink(outside, filepath.Join(dir, id, CancelName+".new")),
		os.Symlink(outside, filepath.Join(dir, id, CancelName)),
	); err != nil {
		t.Fatal(err)
	}
	h := New(Options{Dir: dir, Max: 1})
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 50 {
				if _, err := h.Cancel(id, api.CancelAgentRun{Keep: true}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	if how, err := os.ReadFile(filepath.Join(dir, id, CancelName)); err != nil || string(how) != CancelKeep {
		t.Errorf("it is told %q, %v", how, err)
	}
	if planted, err := os.ReadFile(outside); err != nil || string(planted) != "plant" {
		t.Errorf("what is elsewhere is %q, %v", planted, err)
	}
	if left, err := filepath.Glob(filepath.Join(dir, id, CancelName+".*")); err != nil || len(left) != 1 {
		t.Errorf("left are %v, %v", left, err)
	}
}

// Files of a worker that was taken over lead the daemon nowhere else, and do not block other runs.
func TestRunsThatLeadElsewhere(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	testRun(t, outside, "20260116_143000", `{"query":"words of the host"}`)
	testRun(t, dir, "20260116_143003", `{"query":"mine"}`)
	for id, names := range map[string][]string{"20260116_143001": {StatusName}, "20260116_143002": {StatusName, RecordName}} {
		testRun(t, dir, id, `{}`)
		for _, name := range names {
			path := filepath.Join(dir, id, name)
			if err := errors.Join(os.Remove(path), os.Symlink(filepath.Join(outside, "20260116_143000", name), path)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := errors.Join(
		os.Symlink(filepath.Join(outside, "20260116_143000"), filepath.Join(dir, "20260116_143004")),
		os.WriteFile(filepath.Join(dir, "20260116_143005"), nil, 0o600),
	); err != nil {
		t.Fatal(err)
	}
	h := New(Options{Dir: dir, Max: 1})
	runs, err := h.List()
	if err != nil || len(runs) != 3 {
		t.Fatalf("%+v, %v", runs, err)
	}
	for _, r := range runs {
		if (r.ID == "20260116_143003") != (r.Error == "") || strings.Contains(r.Query, "host") {
			t.Errorf("%+v", r)
		}
	}
	if r, err := h.Get("20260116_143004"); err == nil {
		t.Errorf("by a link: %+v", r)
	}
	if err := h.Events(t.Context(), "20260116_143002", 1, func(e api.AgentRunEvent) error { t.Errorf("%+v", e); return nil }); err == nil {
		t.Error("the record elsewhere is read")
	}
}

// heeds ends a fake worker when its cancel file appears, as a worker does.
func heeds(t *testing.T, dir, id string, end func() error) (ended chan error) {
	t.Helper()
	ended = make(chan error, 1)
	go func() {
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for t.Context().Err() == nil {
			how, err := os.ReadFile(filepath.Join(dir, id, CancelName))
			if err == nil {
				if string(how) != CancelKeep {
					t.Errorf("it is told %q", how)
				}
				ended <- end()
				return
			}
			<-tick.C
		}
	}()
	return ended
}

// Runs whose process cannot be signalled are asked to end through their cancel files, and waited
// for: those of earlier daemons, and all if the broker is gone.
func TestCloseEndsWhatItCannotSignal(t *testing.T) {
	dir := t.TempDir()
	const id, own = "20260116_143000", "20260116_143001"
	testRun(t, dir, id, `{}`)
	others := heeds(t, dir, id, workOn(t, dir, id).Close)
	p := make(plays, 1)
	h := New(p.options(t, dir, 2))
	started := make(chan error, 1)
	go func() { _, err := h.Start(t.Context(), api.StartAgentRun{}); started <- err }()
	worker := <-p
	testRun(t, dir, own, `{}`)
	f := workOn(t, dir, own)
	worker.answer(t, own)
	if err := <-started; err != nil {
		t.Fatal(err)
	}
	mine := heeds(t, dir, own, func() error { return errors.Join(f.Close(), worker.stdout.Close()) })
	soon, stop := context.WithTimeout(t.Context(), testenv.HungAfter)
	defer stop()
	if err := h.Close(soon); err != nil {
		t.Error(err)
	}
	for _, id := range []string{id, own} {
		if on, err := h.hosted(id); on || err != nil {
			t.Fatalf("%s goes on: %v, %v", id, on, err)
		}
	}
	if err := errors.Join(<-others, <-mine); err != nil {
		t.Error(err)
	}
	workOn(t, dir, id)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for range 20 {
		if err := New(Options{Dir: dir, Max: 1}).Close(ctx); err == nil || err.Error() != "1 agent runs go on without a daemon" {
			t.Fatalf("one that does not end: %v", err)
		}
	}
	// The runs are unknown.
	if err := New(Options{Dir: filepath.Join(dir, "gone"), Max: 1}).Close(soon); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("runs that cannot be listed: %v", err)
	}
}

// noFiles calls do while this process can open no file.
func noFiles(t *testing.T, do func()) {
	t.Helper()
	fewFiles(t, 0, do)
}

// fewFiles calls do while this process may have only so many descriptors.
func fewFiles(t *testing.T, most uint64, do func()) {
	t.Helper()
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: most, Max: was.Max}); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
			t.Error(err)
		}
	}()
	do()
}

// A run that cannot be examined for lack of descriptors has not ended: it counts, and is waited
// for.
func TestRunsThatCannotBeLookedAtGoOn(t *testing.T) {
	dir := t.TempDir()
	const id = "20260116_143000"
	testRun(t, dir, id, `{}`)
	p := make(plays, 9)
	h := New(p.options(t, dir, 1))
	type answer struct {
		run *api.AgentRun
		err error
	}
	answered := make(chan answer, 1)
	go func() { run, err := h.Start(t.Context(), api.StartAgentRun{}); answered <- answer{run, err} }()
	worker := <-p
	held := workOn(t, dir, id)
	noFiles(t, func() {
		worker.answer(t, id)
		if got := <-answered; got.err != nil || got.run.ID != id || got.run.State != api.AgentRunning || got.run.Error == "" {
			t.Errorf("it has begun, and is answered by %+v, %v", got.run, got.err)
		}
		if err := p.refused(t, func() error { _, err := h.Start(t.Context(), api.StartAgentRun{}); return err }); !errors.Is(err, unix.EMFILE) {
			t.Errorf("another: %v", err)
		}
		if runs, err := h.List(); !errors.Is(err, unix.EMFILE) {
			t.Errorf("a list: %+v, %v", runs, err)
		}
	})
	if err := p.refused(t, func() error { _, err := h.Start(t.Context(), api.StartAgentRun{}); return err }); !errors.Is(err, ErrTooMany) {
		t.Errorf("another afterwards: %v", err)
	}
	now, cancel := context.WithCancel(t.Context())
	cancel()
	if err := worker.stdout.Close(); err != nil { // its pipe says that the process has ended
		t.Error(err)
	}
	next := New(Options{Dir: dir, Max: 1})
	if _, err := next.refresh(); err != nil {
		t.Fatal(err)
	}
	noFiles(t, func() {
		if err := next.Close(now); err == nil || !strings.Contains(err.Error(), "1 agent runs go on without a daemon") {
			t.Errorf("closed: %v", err)
		}
	})
	if err := held.Close(); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(next.Close(t.Context()), h.Close(t.Context())); err != nil {
		t.Error(err)
	}
}

// A run resumed by hand is not the daemon's: it does not count, is not cancelled, and is not waited
// for.
func TestRunsResumedByHand(t *testing.T) {
	dir := t.TempDir()
	const id = "20260116_143000"
	testRun(t, dir, id, `{}`)
	p := make(plays, 1)
	h := New(p.options(t, dir, 1))
	hand := workOnByHand(t, dir, id)
	if run, err := h.Get(id); err != nil || run.State != api.AgentRunning {
		t.Errorf("%+v, %v", run, err)
	}
	if _, err := h.Cancel(id, api.CancelAgentRun{}); !errors.Is(err, ErrByHand) {
		t.Errorf("cancelled: %v", err)
	}
	if err := p.refused(t, func() error { _, err := h.Resume(t.Context(), id, api.ResumeAgentRun{}); return err }); !errors.Is(err, ErrRunning) {
		t.Errorf("resumed: %v", err)
	}
	started := make(chan error, 1)
	go func() { _, err := h.Start(t.Context(), api.StartAgentRun{}); started <- err }()
	select {
	case worker := <-p:
		if err := worker.stdout.Close(); err != nil {
			t.Error(err)
		}
	case err := <-started:
		t.Fatalf("another run: %v", err)
	}
	if err := <-started; !errors.Is(err, ErrWorker) {
		t.Errorf("another run, whose worker has ended: %v", err)
	}
	soon, stop := context.WithTimeout(t.Context(), testenv.HungAfter)
	defer stop()
	if err := h.Close(soon); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(filepath.Join(dir, id, CancelName)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("it is told to end: %v", err)
	}
	if err := hand.Close(); err != nil {
		t.Fatal(err)
	}
}

// A FIFO in the place of a record or a status does not block.
func TestRunsThatAreNoFiles(t *testing.T) {
	dir := t.TempDir()
	for id, name := range map[string]string{"20260116_143000": RecordName, "20260116_143001": StatusName} {
		testRun(t, dir, id, `{}`)
		path := filepath.Join(dir, id, name)
		if err := errors.Join(os.Remove(path), unix.Mkfifo(path, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	h := New(Options{Dir: dir, Max: 1})
	listed := make(chan error, 1)
	go func() {
		runs, err := h.List()
		for _, r := range runs {
			if r.Error == "" || r.State != api.AgentStopped {
				t.Errorf("%+v", r)
			}
		}
		_, lookErr := h.refresh()
		if len(runs) != 2 || len(h.going) != 0 {
			t.Errorf("%d runs, going on are %v", len(runs), h.going)
		}
		listed <- errors.Join(err, lookErr)
	}()
	select {
	case err := <-listed:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(testenv.HungAfter):
		t.Fatal("it waits")
	}
}

// Removals name the run, and are limited in number.
func TestRemove(t *testing.T) {
	dir := t.TempDir()
	testRun(t, dir, "20260116_143000", `{"exit_reason":"submitted"}`)
	s := shells{script: `x=$(cat); [ "$x" = '{"run":"20260116_143000","remove":true}' ] && echo '{"run":{"id":"20260116_143000"}}'`}
	h := New(s.options(dir))
	h.opts.Max = 0 // removals do not count as runs
	if err := h.Remove(t.Context(), "20260116_143000"); err != nil {
		t.Error(err)
	}
	for range MaxRemovals {
		h.removing <- struct{}{}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := h.Remove(ctx, "20260116_143000"); !errors.Is(err, context.Canceled) {
		t.Errorf("one more: %v", err)
	}
	if err := h.Close(t.Context()); err != nil {
		t.Error(err)
	}
	s.wait()
}
