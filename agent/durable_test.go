package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/agent/llm"
	"github.com/sandboxd/sandboxd/agent/llm/llmtest"
	"github.com/sandboxd/sandboxd/agent/policy"
	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
)

// mustParse returns the policy of a test.
func mustParse(t *testing.T, text string) *policy.Policy {
	t.Helper()
	p, err := policy.Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// withOpen changes the options of a run to those of a later process, for which the sandbox exists
// until it is deleted.
func withOpen(t *testing.T, opts Options, sandbox *fakeSandbox) Options {
	t.Helper()
	opts.Open = func(_ context.Context, ref string, _ time.Duration) (*Sandbox, error) {
		if sandbox.deleted > 0 {
			return nil, problem(api.CodeNotFound, "there is no sandbox "+ref)
		}
		return sandbox.open(t), nil
	}
	return opts
}

// recordOf returns the lines of a finished run's record.
func recordOf(t *testing.T, dir string) [][]byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, RecordName))
	if err != nil {
		t.Fatal(err)
	}
	return bytes.SplitAfter(bytes.TrimSuffix(b, []byte("\n")), []byte("\n"))
}

// crashed makes the directory that a crash leaves after n lines of a record; torn adds half of the
// next line.
func crashed(t *testing.T, lines [][]byte, n int, torn bool) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "20260116_143000")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	data := bytes.Join(lines[:n], nil)
	if torn && n < len(lines) {
		data = append(data, lines[n][:len(lines[n])/2]...)
	}
	if err := os.WriteFile(filepath.Join(dir, RecordName), data, 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

// After a crash at any line the run is completed. Every turn is recorded once, no call with effects
// runs twice, and the model is told of the call of unknown outcome.
func TestResumeFromEveryLineOfTheRecord(t *testing.T) {
	script := []llmtest.Turn{
		{Content: "first", PromptTokens: 50, Calls: []llmtest.Call{llmtest.Bash("echo a >> w; cat w"), llmtest.Edit(map[string]any{"command": "view", "path": "w"})}},
		{Content: "nothing"},
		turn(llmtest.Bash("echo b >> w"), llmtest.Bash("echo c >> w")),
		turn(llmtest.Bash("mkdir -p out; cp w out/answer.txt")),
		turn(llmtest.Submit()),
	}
	opts, sandbox, _ := newRun(t, script...)
	res, _ := mustRun(t, t.Context(), opts, sandbox, ExitSubmitted)
	lines := recordOf(t, res.Dir)
	events, _, err := ReadRecord(res.Dir)
	if err != nil || len(events) != len(lines) {
		t.Fatalf("%d events of %d lines, %v", len(events), len(lines), err)
	}
	unknowns := 0
	for n := 1; n < len(lines); n++ {
		if events[n-1].End != nil {
			break
		}
		l, err := readLedger(events[:n])
		if err != nil {
			t.Fatalf("line %d: %v", n, err)
		}
		// State at the crash: the calls that had begun have had their effects in this test's sandbox.
		left := script[len(l.steps):]
		if l.open != nil && l.open.response != nil {
			left = left[1:]
		}
		opts, sandbox, srv := newRun(t, left...)
		work := opts.Prompt.WorkingDir
		if l.sandbox.Ready {
			for _, d := range []string{work, opts.Prompt.InputDir, opts.Prompt.OutputDir} {
				if err := os.MkdirAll(d, 0o700); err != nil {
					t.Fatal(err)
				}
			}
		}
		for _, e := range events[:n] {
			if e.Began == nil || e.Began.Repeatable {
				continue
			}
			var command string
			for _, turn := range events[:n] {
				if turn.Response != nil && turn.Turn == e.Turn {
					var args struct{ Command string }
					if err := json.Unmarshal([]byte(turn.Response.ToolCalls[e.Call-1].Arguments), &args); err != nil {
						t.Fatal(err)
					}
					command = args.Command
				}
			}
			if _, err := newTools(sandbox.open(t), work, time.Minute).bash(t.Context(), command); err != nil {
				t.Fatal(err)
			}
		}
		// The record names the directories of the first test run; replace them.
		moved := bytes.Split([]byte(strings.ReplaceAll(string(bytes.Join(lines, nil)), events[0].Run.Prompt.WorkingDir, work)), []byte("\n"))
		for i := range moved {
			moved[i] = append(moved[i], '\n')
		}
		dir := crashed(t, moved, n, n%2 == 0)
		res, err := Resume(t.Context(), dir, withOpen(t, opts, sandbox))
		if err != nil || res.ExitReason != ExitSubmitted || sandbox.deleted == 0 {
			t.Fatalf("after line %d: %+v, %v, deleted %d times", n, res, err, sandbox.deleted)
		}
		if srv.Left() != 0 {
			t.Errorf("after line %d: %d turns were not asked for", n, srv.Left())
		}
		after, _, err := ReadRecord(dir)
		if err != nil {
			t.Fatal(err)
		}
		begun := map[string]int{}
		turns := 0
		unknown := false
		for _, e := range after {
			if e.Began != nil && !e.Began.Repeatable {
				begun[fmt.Sprint(e.Turn, ".", e.Call)]++
			}
			if e.TurnEnd != nil {
				if turns++; e.Turn != turns {
					t.Errorf("after line %d: turn %d is number %d", n, e.Turn, turns)
				}
			}
			if e.Ended != nil && e.Ended.Unknown {
				unknown = true
				unknowns++
			}
		}
		for call, times := range begun {
			if times != 1 {
				t.Errorf("after line %d: call %s was begun %d times", n, call, times)
			}
		}
		if turns != len(script) {
			t.Errorf("after line %d: %d turns", n, turns)
		}
		// Every call was done when it had begun, so the effects equal those of one run.
		if res.Answer != "a\nb\nc\n" {
			t.Errorf("after line %d: answer %q", n, res.Answer)
		}
		if began := events[n-1].Began; unknown != (began != nil && !began.Repeatable) {
			t.Errorf("after line %d: told that something is unknown: %v", n, unknown)
		}
		// Except for that call, the model saw the same as without the crash.
		tr := readTrajectory(t, dir)
		if tr.Metadata.Resumed != 1 || tr.Metadata.ExitReason != ExitSubmitted || len(tr.Steps) != len(script) {
			t.Errorf("after line %d: %+v", n, tr.Metadata)
		}
	}
	if unknowns != 4 {
		t.Errorf("%d calls were unknown, want each of the four with effects once", unknowns)
	}
}

// A crash after the recorded end and before the trajectory loses nothing: a reader derives it from
// the record, and resume writes it.
func TestTrajectoryIsDerivedFromTheRecord(t *testing.T) {
	opts, sandbox, _ := newRun(t, turn(llmtest.Bash("mkdir -p out; echo 42 > out/answer.txt")), turn(llmtest.Submit()))
	res, want := mustRun(t, t.Context(), opts, sandbox, ExitSubmitted)
	path := filepath.Join(res.Dir, trajectoryName)
	written, err := os.ReadFile(path)
	if err := errors.Join(err, os.Remove(path)); err != nil {
		t.Fatal(err)
	}
	s, got, err := LoadRun(res.Dir)
	if err != nil || s.State != RunEnded || len(got.Steps) != len(want.Steps) || got.Metadata.ExitReason != ExitSubmitted {
		t.Fatalf("%+v, %+v, %v", s, got, err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a reader has written the trajectory: %v", err)
	}
	if _, err := Resume(t.Context(), res.Dir, withOpen(t, opts, sandbox)); !errors.Is(err, ErrEnded) {
		t.Errorf("resumed: %v", err)
	}
	again, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(written), string(again)); diff != "" {
		t.Errorf("written by resume (-want +got):\n%s", diff)
	}
}

// A run can continue after any end but submit if its files exist: here, in the last turn's
// snapshot.
func TestResumeFromASnapshot(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	opts, sandbox, _ := newRun(t, turn(llmtest.Bash("echo kept > w")), llmtest.Turn{Hang: true, Check: func(llmtest.Request) error { cancel(errors.New("interrupt")); return nil }})
	opts.SnapshotTurns = true
	res, tr := mustRun(t, ctx, opts, sandbox, ExitInterrupted)
	if tr.Steps[0].Metadata.Snapshot != "snap1" || !strings.HasSuffix(sandbox.comments[0], "turn 1") {
		t.Fatalf("%+v, %q", tr.Steps[0].Metadata, sandbox.comments)
	}
	// The files are deleted with the sandbox.
	if err := os.Remove(filepath.Join(opts.Prompt.WorkingDir, "w")); err != nil {
		t.Fatal(err)
	}
	var created api.CreateSandbox
	during := func(llmtest.Request) error {
		if _, err := os.Lstat(filepath.Join(res.Dir, trajectoryName)); !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("trajectory of the first end during the second run: %w", err)
		}
		return nil
	}
	again, _, srv := newRun(t, llmtest.Turn{Calls: []llmtest.Call{llmtest.Bash("cat w")}, Check: during}, turn(llmtest.Submit()))
	second := &fakeSandbox{dir: sandbox.dir}
	again.Create = func(_ context.Context, req api.CreateSandbox) (*Sandbox, error) {
		created = req
		root, err := os.OpenRoot(sandbox.dir)
		if err != nil {
			return nil, err
		}
		defer root.Close()
		if err := os.RemoveAll(opts.Prompt.WorkingDir); err != nil {
			return nil, err
		}
		_, err = extract(root, bytes.NewReader(sandbox.snapshots[0]), "/", CollectLimits{Links: true})
		return second.open(t), err
	}
	again.Message, again.Budget.Turns = "go on, please", 9
	resumed, err := Resume(t.Context(), res.Dir, withOpen(t, again, sandbox))
	if err != nil || resumed.ExitReason != ExitSubmitted || second.deleted != 1 {
		t.Fatalf("%+v, %v", resumed, err)
	}
	if created.Snapshot != "snap1" || created.Image != "" {
		t.Errorf("made of %+v", created)
	}
	tr = readTrajectory(t, res.Dir)
	if len(tr.Steps) != 3 || !strings.Contains(tr.Steps[1].Observation, "kept") || tr.Metadata.Budget.Turns != 9 {
		t.Errorf("%+v", tr)
	}
	if got := srv.Requests()[0].Last().Text(); got != "go on, please" {
		t.Errorf("the model was told %q", got)
	}
	if _, err := os.Stat(filepath.Join(res.Dir, "files.1")); err != nil {
		t.Errorf("the output of the first end: %v", err)
	}

	// Without a snapshot the resume is refused, and the record does not change.
	ctx, cancel = context.WithCancelCause(t.Context())
	opts, sandbox, _ = newRun(t, turn(llmtest.Bash("echo kept > w")), llmtest.Turn{Hang: true, Check: func(llmtest.Request) error { cancel(errors.New("interrupt")); return nil }})
	res, _ = mustRun(t, ctx, opts, sandbox, ExitInterrupted)
	before := recordOf(t, res.Dir)
	if _, err := Resume(t.Context(), res.Dir, withOpen(t, opts, sandbox)); !errors.Is(err, ErrEnded) || !strings.Contains(err.Error(), "no snapshot") {
		t.Errorf("%v", err)
	}
	if diff := cmp.Diff(before, recordOf(t, res.Dir)); diff != "" {
		t.Errorf("the record has changed:\n%s", diff)
	}
}

// A run whose first line was cut off by a crash can be removed, but no directory with other files.
func TestRemoveOfARunThatHadNotBegun(t *testing.T) {
	for name, files := range map[string][]string{"nothing": {RecordName}, "more": {RecordName, "thesis.txt"}} {
		dir := filepath.Join(t.TempDir(), "20260116_143000")
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			if err := os.WriteFile(filepath.Join(dir, file), []byte(`{"v":1,"n":1`), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		done, err := RemoveRun(t.Context(), nil, dir, false)
		_, statErr := os.Stat(filepath.Join(dir, RecordName))
		if (err == nil) != (len(files) == 1) || errors.Is(statErr, os.ErrNotExist) != (err == nil) {
			t.Errorf("%s: %+v, %v; its record: %v", name, done, err, statErr)
		}
	}
}

// RemoveUnreadable removes a run's directory whatever its record holds, with the objects that the
// rest of the record names. It refuses a run that a process works on.
func TestRemoveOfARunWithoutAReadableRecord(t *testing.T) {
	line := func(v, n int, rest string) string {
		return fmt.Sprintf(`{"v":%d,"n":%d,"at":"2026-01-16T14:30:00Z",%s}`+"\n", v, n, rest)
	}
	run, box := `"run":{"id":"r"}`, `"sandbox":{"name":"agent-1","id":"sb1","ready":true}`
	other := filepath.Join(t.TempDir(), RecordName) // of another run; must stay unchanged
	if err := os.WriteFile(other, []byte(line(1, 1, run)+"nonsense\n"+line(1, 3, `"sandbox":{"name":"agent-2","id":"sb2"}`)), 0o600); err != nil {
		t.Fatal(err)
	}
	write := func(text string) func(string) error {
		return func(path string) error { return os.WriteFile(path, []byte(text), 0o600) }
	}
	for name, tc := range map[string]struct {
		make func(path string) error
		want []string // expected deletions at the daemon
	}{
		"a damaged line":        {write(line(1, 1, run) + line(1, 2, box) + "\x00\x00\x00\n" + line(1, 4, `"turn":1,"request":{"messages":1}`)), []string{"sn1", "sb1"}},
		"a damaged first line":  {write("{\n" + line(1, 2, box)), []string{"sn1", "sb1"}},
		"a line is missing":     {write(line(1, 1, run) + line(1, 3, box)), []string{"sn1", "sb1"}},
		"of a newer version":    {write(line(2, 1, run) + line(2, 2, box)), nil},
		"nothing in it":         {write(""), nil},
		"zeros":                 {write(strings.Repeat("\x00", 1<<20)), nil},
		"a FIFO":                {func(path string) error { return unix.Mkfifo(path, 0o600) }, nil},
		"a directory":           {func(path string) error { return os.Mkdir(path, 0o700) }, nil},
		"none":                  {func(string) error { return nil }, nil},
		"a link to another's":   {func(path string) error { return os.Symlink(other, path) }, nil},
		"a link to what is not": {func(path string) error { return os.Symlink("nowhere", path) }, nil},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "20260116_143000")
			if err := errors.Join(os.MkdirAll(filepath.Join(dir, "files"), 0o700), tc.make(filepath.Join(dir, RecordName))); err != nil {
				t.Fatal(err)
			}
			c, asked := keeper(t)
			done, err := RemoveRun(t.Context(), c, dir, false)
			if err == nil || len(*asked) > 0 {
				t.Fatalf("possibly not a run: %+v, %v, asked for %v", done, err, *asked)
			}
			if !errors.Is(err, ErrUnreadable) {
				t.Errorf("%v is not known for what it is", err)
			}
			done, err = RemoveUnreadable(t.Context(), c, dir)
			if err != nil || done.Run != filepath.Base(dir) || len(done.Snapshots) != min(1, len(tc.want)) {
				t.Errorf("%+v, %v", done, err)
			}
			if diff := cmp.Diff(tc.want, *asked); diff != "" {
				t.Errorf("deleted (-want +got):\n%s", diff)
			}
			if _, err := os.Lstat(dir); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("its directory: %v", err)
			}
			if _, err := os.Lstat(other); err != nil {
				t.Error(err)
			}
		})
	}
	t.Run("while a process works on it", func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "20260116_143000")
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		rec, err := createRecord(dir, time.Now, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := rec.file.WriteString("nonsense\n"); err != nil {
			t.Fatal(err)
		}
		if done, err := RemoveUnreadable(t.Context(), nil, dir); !errors.Is(err, ErrRunning) {
			t.Errorf("%+v, %v", done, err)
		}
		if err := rec.close(); err != nil {
			t.Fatal(err)
		}
		if _, err := RemoveUnreadable(t.Context(), nil, dir); err != nil {
			t.Error(err)
		}
	})
}

// A directory is removed even if a hostile process has revoked its owner's access. Targets of links
// in it are untouched.
func TestRemoveOfWhatIsClosed(t *testing.T) {
	for name, tc := range map[string]struct {
		record string
		closed string // directory without access
		mode   os.FileMode
	}{
		"nothing may be done with":    {`{"v":1,"n":1,"run":{"id":"r"}}` + "\n", "files/closed", 0},
		"nothing in it may be used":   {`{"v":1,"n":1,"run":{"id":"r"}}` + "\n", "files/closed", 0o400},
		"nothing in it may go":        {`{"v":1,"n":1,"run":{"id":"r"}}` + "\n", "files/closed", 0o500},
		"nothing in the run may go":   {`{"v":1,"n":1,"run":{"id":"r"}}` + "\n", ".", 0o500},
		"the record cannot be read":   {"nonsense\n", "files/closed", 0},
		"the record cannot be opened": {"nonsense\n", ".", 0},
		"it had not begun":            {"", ".", 0o500},
		"nor can it be listed":        {"", ".", 0o300},
	} {
		t.Run(name, func(t *testing.T) {
			top := t.TempDir()
			dir, outside := filepath.Join(top, "20260116_143000"), filepath.Join(top, "outside")
			err := errors.Join(os.Mkdir(dir, 0o700), os.Mkdir(outside, 0o500), os.WriteFile(filepath.Join(dir, RecordName), []byte(tc.record), 0o600))
			if tc.record != "" {
				err = errors.Join(err, os.MkdirAll(filepath.Join(dir, "files/closed/below"), 0o700), os.Symlink(outside, filepath.Join(dir, "files/closed/link")))
			}
			if err := errors.Join(err, os.Chmod(filepath.Join(dir, tc.closed), tc.mode)); err != nil {
				t.Fatal(err)
			}
			if _, err = RemoveRun(t.Context(), nil, dir, false); errors.Is(err, ErrUnreadable) {
				_, err = RemoveUnreadable(t.Context(), nil, dir)
			}
			if err != nil {
				t.Error(err)
			}
			if _, err := os.Lstat(dir); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("its directory: %v", err)
			}
			if info, err := os.Stat(outside); err != nil || info.Mode().Perm() != 0o500 {
				t.Errorf("outside of it: %v, %v", info.Mode(), err)
			}
			restoreAccess(dir) // for the cleanup of the test's directory
		})
	}
}

// The data taken from an unreadable record is bounded, whatever its size and the number of its
// sandboxes.
func TestWhatIsLeftIsBounded(t *testing.T) {
	const box, other = `{"v":1,"n":1,"sandbox":{"name":"a"}}` + "\n", `{"v":1,"n":1,"began":{}}` + "\n"
	endless := io.MultiReader(io.LimitReader(zeros{}, 2*maxRecordLine), iotest.ErrReader(errors.New("it is read on and on")))
	for name, tc := range map[string]struct {
		r    io.Reader
		want int
	}{
		"sandboxes":     {strings.NewReader(strings.Repeat(box, maxSalvaged+1)), maxSalvaged},
		"other lines":   {strings.NewReader(strings.Repeat(other, maxSalvaged) + box), 1},
		"a long line":   {strings.NewReader(strings.Repeat("x", maxSalvagedLine) + box + box), 1},
		"a line's hole": {io.MultiReader(strings.NewReader(box), endless), 1},
	} {
		if events, err := salvageEvents(tc.r); err != nil || len(events) != tc.want {
			t.Errorf("%s: %d events, %v, want %d", name, len(events), err, tc.want)
		}
	}
}

// zeros reads like a hole in a file.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// keeper is a daemon with a snapshot of the sandbox sb1. It returns the deletions that it was asked
// for.
func keeper(t *testing.T) (c *client.Client, asked *[]string) {
	t.Helper()
	asked = new([]string)
	c = serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodDelete {
			*asked = append(*asked, path.Base(r.URL.Path)) // requests are sequential
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"snapshots":[{"id":"sn1","sandbox":"sb1","labels":{"sandboxd.agent":"turn"}}]}`)
	}))
	return c, asked
}

// A FIFO in the place of a record does not block.
func TestRecordThatIsNoFile(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "20260116_143000")
	if err := errors.Join(os.Mkdir(dir, 0o700), unix.Mkfifo(filepath.Join(dir, RecordName), 0o600)); err != nil {
		t.Fatal(err)
	}
	for name, f := range map[string]func() error{
		"read":    func() error { _, _, err := ReadRecord(dir); return err },
		"removed": func() error { _, err := RemoveRun(t.Context(), nil, dir, false); return err },
	} {
		done := make(chan error, 1)
		go func() { done <- f() }()
		select {
		case err := <-done:
			if err == nil || !strings.Contains(err.Error(), "is no file") {
				t.Errorf("%s: %v", name, err)
			}
		case <-time.After(time.Minute):
			t.Errorf("%s: it waits", name)
		}
	}
}

// A run that another process is just beginning is not removed.
func TestRemoveOfARunThatBegins(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "20260116_143000")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	rec, err := createRecord(dir, time.Now, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := removeNotBegun(dir); !errors.Is(err, ErrRunning) {
		t.Errorf("its first line is being written: %v", err)
	}
	if _, err := rec.append(Event{Run: &RunEvent{ID: filepath.Base(dir)}}, true); err != nil {
		t.Fatal(err)
	}
	if err := rec.close(); err != nil {
		t.Fatal(err)
	}
	if err := removeNotBegun(dir); err == nil || !strings.Contains(err.Error(), "has begun") {
		t.Errorf("its first line is written: %v", err)
	}
	if _, _, err := ReadRecord(dir); err != nil {
		t.Error(err)
	}
}

func TestResumeOfWhatCannotBe(t *testing.T) {
	opts, sandbox, _ := newRun(t, turn(llmtest.Submit()))
	res, _ := mustRun(t, t.Context(), opts, sandbox, ExitSubmitted)
	if _, err := Resume(t.Context(), res.Dir, withOpen(t, opts, sandbox)); !errors.Is(err, ErrEnded) {
		t.Errorf("submitted: %v", err)
	}
	// A sandbox that is or may be left is deleted, or reported.
	for name, tc := range map[string]struct {
		open, del error
		want      string
	}{
		"left": {}, "gone meanwhile": {del: problem(api.CodeNotFound, "no such sandbox")},
		"no answer":   {open: errors.New("no answer"), want: "may be left: no answer"},
		"not deleted": {del: problem(api.CodeConflict, "it will not"), want: "may be left: it will not"},
	} {
		left := &fakeSandbox{onDelete: func(context.Context) error { return tc.del }}
		again := opts
		again.Open = func(context.Context, string, time.Duration) (*Sandbox, error) { return left.open(t), tc.open }
		_, err := Resume(t.Context(), res.Dir, again)
		if !errors.Is(err, ErrEnded) || strings.Contains(err.Error(), "may be left") != (tc.want != "") ||
			!strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v", name, err)
		}
		if _, other := errors.AsType[*api.Problem](err); other || left.deleted == 0 && tc.open == nil {
			t.Errorf("%s: %v, deleted %d times", name, err, left.deleted)
		}
	}
	lines := recordOf(t, res.Dir)
	for name, change := range map[string]func([][]byte) [][]byte{
		"empty":         func([][]byte) [][]byte { return nil },
		"torn at first": func(l [][]byte) [][]byte { return [][]byte{l[0][:20]} },
		"newer":         func(l [][]byte) [][]byte { l[1] = bytes.Replace(l[1], []byte(`"v":1`), []byte(`"v":2`), 1); return l },
		"gap":           func(l [][]byte) [][]byte { return append(l[:2], l[3:]...) },
		"garbage":       func(l [][]byte) [][]byte { l[1] = []byte("{\n"); return l },
		"unknown kind": func(l [][]byte) [][]byte {
			l[1] = []byte(`{"v":1,"n":2,"at":"2026-01-01T00:00:00Z","wish":{}}` + "\n")
			return l
		},
		"call without leave": func(l [][]byte) [][]byte {
			for i := range l {
				if bytes.Contains(l[i], []byte(`"verdict":`)) {
					l[i] = bytes.Replace(l[i], []byte(`"allow"`), []byte(`"deny"`), 1)
				}
			}
			return l
		},
	} {
		t.Run(name, func(t *testing.T) {
			copied := make([][]byte, len(lines))
			for i := range lines {
				copied[i] = bytes.Clone(lines[i])
			}
			changed := change(copied)
			if _, err := Resume(t.Context(), crashed(t, changed, len(changed), false), withOpen(t, opts, sandbox)); err == nil || errors.Is(err, ErrEnded) {
				t.Errorf("got %v", err)
			}
		})
	}
	t.Run("being worked on", func(t *testing.T) {
		var dir string
		var while error
		opts, sandbox, _ := newRun(t, turn(llmtest.Submit()))
		opts.OnStart = func(s Started) { dir = s.Dir }
		opts.OnStep = func(Step) {
			_, while = Resume(t.Context(), dir, withOpen(t, opts, sandbox))
			if s, _, err := LoadRun(dir); err != nil || s.State != RunRunning {
				t.Errorf("%+v, %v", s, err)
			}
		}
		mustRun(t, t.Context(), opts, sandbox, ExitSubmitted)
		if !errors.Is(while, ErrRunning) {
			t.Errorf("got %v", while)
		}
	})
}

func TestForkAndReplay(t *testing.T) {
	opts, sandbox, _ := newRun(t,
		turn(llmtest.Bash("echo one > w")), turn(llmtest.Bash("echo two >> w; cat w; date +%N")), turn(llmtest.Bash("rm w")), turn(llmtest.Submit()))
	res, _ := mustRun(t, t.Context(), opts, sandbox, ExitSubmitted)

	sandbox.deleted = 0
	replayed, err := ReplayRun(t.Context(), res.Dir, opts)
	if err != nil || sandbox.deleted != 1 || replayed.Calls != 3 || len(replayed.Differences) != 1 || replayed.Differences[0].Turn != 2 {
		t.Errorf("%+v, %v", replayed, err)
	}

	branch, _, srv := newRun(t, turn(llmtest.Bash("cat w; mkdir -p out; cp w out/answer.txt")), turn(llmtest.Submit()))
	branch.Create = opts.Create
	branch.OutputDir, branch.Message, branch.ModelName = filepath.Dir(res.Dir), "keep w this time", "other"
	sandbox.deleted = 0
	forked, err := Fork(t.Context(), res.Dir, 2, branch)
	if err != nil || forked.ExitReason != ExitSubmitted || forked.Answer != "one\ntwo\n" || forked.Dir == res.Dir || sandbox.deleted != 1 {
		t.Fatalf("%+v, %v", forked, err)
	}
	first := srv.Requests()[0]
	if first.Model != "other" || first.Last().Text() != "keep w this time\nSteps Remaining: 98" || len(first.Messages) != 7 {
		t.Errorf("the model was asked %+v", first.Messages)
	}
	tr := readTrajectory(t, forked.Dir)
	if len(tr.Steps) != 4 || tr.Metadata.Fork == nil || tr.Metadata.Fork.Turn != 2 || tr.Metadata.RunID != filepath.Base(forked.Dir) {
		t.Errorf("%+v", tr.Metadata)
	}
	runs, err := ListRuns(filepath.Dir(res.Dir))
	if err != nil || len(runs) != 2 || runs[0].Turns != 4 || runs[1].State != RunEnded {
		t.Errorf("%+v, %v", runs, err)
	}
	if _, err := Fork(t.Context(), res.Dir, 5, branch); err == nil || !strings.Contains(err.Error(), "the run has 4 whole turns") {
		t.Errorf("%v", err)
	}
	if dir, err := FindRun(filepath.Dir(res.Dir), filepath.Base(res.Dir)); err != nil || dir != res.Dir {
		t.Errorf("%q, %v", dir, err)
	}
	if _, err := FindRun(filepath.Dir(res.Dir), "nope"); err == nil {
		t.Error("found what is not there")
	}
}

func TestBudgets(t *testing.T) {
	work := turn(llmtest.Bash("mkdir -p out; echo kept > out/file"))
	check := func(t *testing.T, res *Result, tr Trajectory, srv *llmtest.Server, detail string) {
		t.Helper()
		if !strings.Contains(res.Detail, detail) || srv.Left() != 0 {
			t.Errorf("%q, %d turns left", res.Detail, srv.Left())
		}
		if diff := cmp.Diff(map[string]string{"file": "kept\n"}, tree(t, filepath.Join(res.Dir, "files"))); diff != "" {
			t.Errorf("files (-want +got):\n%s", diff)
		}
		if tr.Metadata.Spent.Turns != len(tr.Steps) || tr.Metadata.Spent.Tokens == 0 || tr.Metadata.Spent.Time == 0 {
			t.Errorf("spent %+v", tr.Metadata.Spent)
		}
	}
	for _, tc := range []struct {
		name   string
		turns  []llmtest.Turn
		change func(*Options, *fakeSandbox)
		reason ExitReason
		detail string
	}{
		{"tokens", []llmtest.Turn{{PromptTokens: 900, Calls: work.Calls}}, func(o *Options, _ *fakeSandbox) { o.Budget.Tokens = 1000 }, ExitTokenLimit, "910 tokens of 1000"},
		{"tokens used up", []llmtest.Turn{{PromptTokens: 990, Calls: work.Calls}}, func(o *Options, _ *fakeSandbox) { o.Budget.Tokens = 1000 }, ExitTokenLimit, "1000 tokens of 1000"},
		{"money", []llmtest.Turn{{PromptTokens: 100_000, Calls: work.Calls}, {PromptTokens: 399_990, Calls: work.Calls}}, func(o *Options, _ *fakeSandbox) {
			o.Budget.Cost, o.Budget.Conversation, o.Price = 0.5, 1_000_000, &llm.Price{Input: 1, Output: 1}
		}, ExitCostLimit, "$0.5000 of $0.5000"},
		{"money that is not enough for the next question", []llmtest.Turn{{PromptTokens: 300_000, Calls: work.Calls}}, func(o *Options, _ *fakeSandbox) {
			o.Budget.Cost, o.Budget.Conversation, o.Price = 0.5, 1_000_000, &llm.Price{Input: 1, Output: 1}
		}, ExitCostLimit, "question alone costs $0.30"},
		{"processor time between turns", []llmtest.Turn{work}, func(o *Options, s *fakeSandbox) {
			o.Budget.CPU = time.Second
			// It is used up at the end of the turn, independent of the number of earlier checks, which
			// varies with the speed of the machine.
			var used atomic.Int64
			s.cpu = func() time.Duration { return time.Duration(used.Load()) }
			o.OnStep = func(Step) { used.Store(int64(1200 * time.Millisecond)) }
		}, ExitCPULimit, "1.2s of 1s processor time"},
		{"processor time within a call", []llmtest.Turn{work, turn(llmtest.Bash("sleep 60"))}, func(o *Options, s *fakeSandbox) {
			o.Budget.CPU = time.Second
			busy := false
			s.cpu = func() time.Duration {
				s.mu.Lock()
				defer s.mu.Unlock()
				if busy {
					return 2 * time.Second
				}
				return 0
			}
			s.onExec = func(r api.ExecRequest) {
				s.mu.Lock()
				defer s.mu.Unlock()
				busy = r.Argv[len(r.Argv)-1] == "sleep 60"
			}
		}, ExitCPULimit, "2s of 1s processor time"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			opts, sandbox, srv := newRun(t, tc.turns...)
			tc.change(&opts, sandbox)
			res, tr := mustRun(t, t.Context(), opts, sandbox, tc.reason)
			check(t, res, tr, srv, tc.detail)
		})
	}
	t.Run("time within a call", func(t *testing.T) {
		opts, sandbox, srv := newRun(t, work, turn(llmtest.Bash("sleep 60")))
		opts.Budget.Time = time.Hour
		var expire func()
		opts.withTimeout = func(ctx context.Context, left time.Duration, cause error) (context.Context, context.CancelFunc) {
			if left <= 0 || left > time.Hour {
				t.Errorf("%v are left of the time", left)
			}
			ctx, cancel := context.WithCancelCause(ctx)
			expire = func() { cancel(cause) }
			return ctx, func() { cancel(nil) }
		}
		sandbox.onExec = func(r api.ExecRequest) {
			if r.Argv[len(r.Argv)-1] == "sleep 60" {
				expire()
			}
		}
		res, tr := mustRun(t, t.Context(), opts, sandbox, ExitTimeLimit)
		check(t, res, tr, srv, "1h0m0s of time are used up")
	})
	t.Run("the last answer is bounded by what is left", func(t *testing.T) {
		opts, sandbox, srv := newRun(t, llmtest.Turn{PromptTokens: 500, Calls: work.Calls}, turn(llmtest.Submit()))
		opts.Budget.Tokens = 2000
		mustRun(t, t.Context(), opts, sandbox, ExitSubmitted)
		var most int
		if err := json.Unmarshal(srv.Requests()[1].Fields["max_tokens"], &most); err != nil || most <= 0 || most > 2000-510-510 {
			t.Errorf("max_tokens %d, %v", most, err)
		}
	})
	t.Run("the budget goes on in a resumed run", func(t *testing.T) {
		opts, sandbox, _ := newRun(t, llmtest.Turn{PromptTokens: 500, Calls: work.Calls}, turn(llmtest.Submit()))
		res, _ := mustRun(t, t.Context(), opts, sandbox, ExitSubmitted)
		lines := recordOf(t, res.Dir)
		n := 0
		for i := range lines {
			if bytes.Contains(lines[i], []byte(`"turn_end"`)) {
				n = i + 1
				break
			}
		}
		again, sandbox, _ := newRun(t)
		again.Budget.Tokens = 800
		resumed, err := Resume(t.Context(), crashed(t, lines, n, false), withOpen(t, again, sandbox))
		if err != nil || resumed.ExitReason != ExitTokenLimit {
			t.Errorf("%+v, %v", resumed, err)
		}
	})
	for name, change := range map[string]func(*Options){
		"money without a price":              func(o *Options) { o.Budget.Cost = 1 },
		"processor time that is not counted": func(o *Options) { o.Budget.CPU = time.Second },
		"negative":                           func(o *Options) { o.Budget.CPU = -1 },
		"a pattern that is none":             func(o *Options) { o.Collect.Deny = []string{"[a"} },
		"negative limit of the output":       func(o *Options) { o.Collect.File = -1 },
	} {
		t.Run("refused: "+name, func(t *testing.T) {
			opts, sandbox, srv := newRun(t, turn(llmtest.Submit()))
			change(&opts)
			res, err := Run(t.Context(), opts)
			if err == nil || srv.Left() != 1 {
				t.Errorf("%+v, %v", res, err)
			}
			if sandbox.req.Image != "" && sandbox.deleted != 1 {
				t.Error("the sandbox is left")
			}
		})
	}
	t.Run("an answer is bounded by the money that is left", func(t *testing.T) {
		opts, sandbox, srv := newRun(t, turn(llmtest.Submit()))
		opts.Budget.Cost, opts.Price = 0.01, &llm.Price{Input: 0, Output: 10}
		mustRun(t, t.Context(), opts, sandbox, ExitSubmitted)
		if got := string(srv.Requests()[0].Fields["max_tokens"]); got != "1000" {
			t.Errorf("max_tokens %s", got)
		}
	})
}

// Read-only calls run concurrently; the answers keep the order of the calls, and later calls wait.
func TestViewsOfATurnRunAtTheSameTime(t *testing.T) {
	view := func(name string) llmtest.Call { return llmtest.Edit(map[string]any{"command": "view", "path": name}) }
	opts, sandbox, _ := newRun(t, turn(llmtest.Bash("mkdir a b; echo 1 > a/1; echo 2 > b/2")), turn(view("a"), view("b"), llmtest.Bash("rm -r a"), view("a")), turn(llmtest.Submit()))
	var listing atomic.Int32
	go0 := make(chan struct{})
	sandbox.onExec = func(r api.ExecRequest) {
		if r.Argv[0] != "find" {
			return
		}
		switch n := listing.Add(1); {
		case n == 2: // only the second; the first one waits
			close(go0)
		case n > 2:
			return
		}
		select {
		case <-go0:
		case <-t.Context().Done():
		}
	}
	_, tr := mustRun(t, t.Context(), opts, sandbox, ExitSubmitted)
	calls := tr.Steps[1].ToolCalls
	if !strings.Contains(calls[0].Observation, "a/1") || !strings.Contains(calls[1].Observation, "b/2") || !strings.Contains(calls[3].Observation, "does not exist") {
		t.Errorf("%+v", calls)
	}
}

// If the daemon fails between submit and the collection, the run keeps its submit, and resume
// collects the output.
func TestOutputIsCollectedByResume(t *testing.T) {
	opts, sandbox, _ := newRun(t, turn(llmtest.Bash("mkdir -p out; echo 42 > out/answer.txt")), turn(llmtest.Submit()))
	opts.OnStep = func(s Step) { sandbox.gone = s.Action.Function == ToolSubmit }
	sandbox.onDelete = func(context.Context) error { return problem(api.CodeUnavailable, "no answer") }
	res, err := Run(t.Context(), opts)
	if err == nil || res.ExitReason != ExitSubmitted || res.HasAnswer {
		t.Fatalf("%+v, %v", res, err)
	}
	again, _, _ := newRun(t)
	sandbox.gone, sandbox.deleted, sandbox.onDelete = false, 0, nil
	res, err = Resume(t.Context(), res.Dir, withOpen(t, again, sandbox))
	if err != nil || res.ExitReason != ExitSubmitted || res.Answer != "42\n" || sandbox.deleted != 1 {
		t.Errorf("%+v, %v", res, err)
	}
}
