package daemon

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

func (r *running) wait4(id string) api.Sandbox {
	r.t.Helper()
	return decode[api.Sandbox](r.t, r.do("GET", "/v1/sandboxes/"+id+"/wait", nil), http.StatusOK)
}

// logs is the text of a log, what came from stderr in brackets.
func (r *running) logs(id, query string) string {
	r.t.Helper()
	rep := r.do("GET", "/v1/sandboxes/"+id+"/logs"+query, nil)
	if rep.status != http.StatusOK || rep.header.Get("Content-Type") != api.TypeNDJSON {
		r.t.Fatalf("logs: %d %s", rep.status, rep.body)
	}
	var b strings.Builder
	for _, e := range events[api.LogEntry](r.t, rep) {
		if e.Error != nil || e.Time.IsZero() {
			r.t.Errorf("%+v", e)
		}
		if e.Dropped > 0 {
			fmt.Fprintf(&b, "<%d>", e.Dropped)
		}
		if e.Stream == "stderr" {
			fmt.Fprintf(&b, "[%s%s]", e.Text, e.Data)
		} else {
			fmt.Fprintf(&b, "%s%s", e.Text, e.Data)
		}
	}
	return b.String()
}

// A sandbox ends with its main process, says how, and runs it again when it is started.
func TestMainProcess(t *testing.T) {
	b := newBench(t, realInit(t))
	b.options.Deposits = newShelf(t)
	r := b.start()
	before := time.Now()
	sb := r.create(api.CreateSandbox{Name: "one", Command: []string{"sh", "-c", "echo out; echo err >&2; read x; echo $x $MINE $PWD; exit 3"}, StdinOpen: true, Env: []string{"MINE=mine"}, Cwd: "/tmp"})
	if sb.State != api.StateRunning || sb.Exit != nil || len(sb.Command) != 3 {
		t.Errorf("%+v", sb)
	}
	x := decode[api.Exec](t, r.do("GET", "/v1/sandboxes/one/execs/main", nil), http.StatusOK)
	if !x.Main || !x.Detached || x.State != api.ExecRunning {
		t.Errorf("%+v", x)
	}
	problem(t, r.do("POST", "/v1/sandboxes/one/start", nil), api.CodeConflict)
	if rep := r.do("POST", "/v1/sandboxes/one/execs/main/stdin?close=true", "hello\n"); rep.status != http.StatusNoContent {
		t.Fatalf("%s", rep.body)
	}
	got := r.wait4("one")
	if got.State != api.StateStopped || got.Exit == nil || got.Exit.Code != 3 || got.Exit.Signal != "" || got.Exit.OOM || got.Reason != "its main process exited with 3" ||
		got.Exit.StartedAt.Before(before) || got.Exit.EndedAt.Before(got.Exit.StartedAt) || got.Exit.Usage == nil {
		t.Errorf("%+v %+v", got, got.Exit)
	}
	// Two streams, of which nobody knows which came first.
	if text := r.logs("one", "?stderr=false"); text != "out\nhello mine /tmp\n" {
		t.Errorf("log is %q", text)
	}
	if text := r.logs("one", "?follow=true&stdout=false"); text != "[err\n]" {
		t.Errorf("log is %q", text)
	}
	// Once more; the log goes on, and the next daemon says the same.
	again := decode[api.Sandbox](t, r.do("POST", "/v1/sandboxes/one/start", nil), http.StatusOK)
	if again.State != api.StateRunning || again.Exit != nil {
		t.Errorf("%+v", again)
	}
	stopped := decode[api.Sandbox](t, r.do("POST", "/v1/sandboxes/one/stop", api.StopSandbox{Grace: new(0.0)}), http.StatusOK)
	if stopped.Exit == nil || stopped.Exit.Code != 137 || stopped.Exit.Signal != "SIGKILL" || stopped.Reason != "stopped" {
		t.Errorf("%+v %+v", stopped, stopped.Exit)
	}
	idle := decode[api.Sandbox](t, r.do("POST", "/v1/sandboxes/one/start", api.StartSandbox{Idle: true}), http.StatusOK)
	if idle.State != api.StateRunning || idle.Exit != nil {
		t.Errorf("%+v", idle)
	}
	r.cancel()
	r.wait()
	r = b.start()
	if list := decode[api.ExecList](t, r.do("GET", "/v1/sandboxes/one/execs", nil), http.StatusOK); len(list.Execs) != 2 || list.Execs[1].State == api.ExecRunning {
		t.Errorf("an idle sandbox has %+v", list)
	}
	decode[api.Sandbox](t, r.do("POST", "/v1/sandboxes/one/stop", nil), http.StatusOK)
	decode[api.Sandbox](t, r.do("POST", "/v1/sandboxes/one/start", nil), http.StatusOK)
	if rep := r.do("POST", "/v1/sandboxes/one/execs/main/stdin?close=true", "third\n"); rep.status != http.StatusNoContent {
		t.Fatalf("%s", rep.body)
	}
	r.wait4("one")
	if text := r.logs("one", "?stderr=false&tail=2"); text != "out\nthird mine /tmp\n" {
		t.Errorf("log is %q", text)
	}
	if rep := r.do("DELETE", "/v1/sandboxes/one", nil); rep.status != http.StatusNoContent {
		t.Errorf("%s", rep.body)
	}
	if left, err := os.ReadDir(filepath.Join(b.options.DataDir, "logs")); err != nil || len(left) != 0 {
		t.Errorf("%v, %v", left, err)
	}
}

// A daemon that stops in order leaves the main process to the next one, whether it ends meanwhile or not.
func TestMainProcessIsHandedOn(t *testing.T) {
	b := newBench(t, realInit(t))
	b.options.Deposits = newShelf(t)
	r := b.start()
	fifo := filepath.Join(t.TempDir(), "fifo")
	script := fmt.Sprintf("mkfifo -m 666 %s; echo one; cat %s; seq 1 20000; exit 4", fifo, fifo)
	if err := os.Chmod(filepath.Dir(fifo), 0o777); err != nil {
		t.Fatal(err)
	}
	sb := r.create(api.CreateSandbox{Command: []string{"sh", "-c", script}})
	r.untilLog(sb.ID, "one\n")
	r.cancel()
	r.wait()
	// It goes on without a daemon: more than its pipe and the memory hold.
	if err := os.WriteFile(fifo, []byte("two\n"), 0); err != nil {
		t.Fatal(err)
	}
	r = b.start()
	got := r.wait4(sb.ID)
	if got.Exit == nil || got.Exit.Code != 4 || got.State != api.StateStopped {
		t.Errorf("%+v %+v", got, got.Exit)
	}
	var want strings.Builder
	want.WriteString("one\ntwo\n")
	for i := range 20000 {
		fmt.Fprintln(&want, i+1)
	}
	if text := r.logs(sb.ID, ""); text != want.String() {
		t.Errorf("log has %d bytes, want %d", len(text), want.Len())
	}
	// And all is as it was for yet another one.
	r.cancel()
	r.wait()
	r = b.start()
	if got := r.wait4(sb.ID); got.Exit == nil || got.Exit.Code != 4 {
		t.Errorf("%+v", got)
	}
	if text := r.logs(sb.ID, ""); text != want.String() {
		t.Errorf("log has %d bytes, want %d", len(text), want.Len())
	}
}

// untilLog follows a log until it has as much as want, which it must be.
func (r *running) untilLog(id, want string) {
	r.t.Helper()
	deadline := time.After(patience)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		if text := r.logs(id, ""); text == want {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			r.t.Fatalf("the log is %q", r.logs(id, ""))
		}
	}
}

// A main process that writes without end is held by the disk, which it cannot fill, and by nothing else.
func TestMainProcessThatWritesForEver(t *testing.T) {
	b := newBench(t, realInit(t))
	b.options.Deposits = newShelf(t)
	b.options.LogSize, b.options.LogFiles = minLogSize, 2
	r := b.start()
	const lines = 400000
	sb := r.create(api.CreateSandbox{Command: []string{"sh", "-c", fmt.Sprintf("seq 1 %d; seq 1 1000 >&2", lines)}})
	r.wait4(sb.ID)
	var size int64
	entries, err := os.ReadDir(filepath.Join(b.options.DataDir, "logs", sb.ID))
	if err != nil || len(entries) != 2 {
		t.Fatalf("%v, %v", entries, err)
	}
	for _, e := range entries {
		fi, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		size += fi.Size()
	}
	if size > 2*minLogSize {
		t.Errorf("the log has %d bytes", size)
	}
	text := r.logs(sb.ID, "?stderr=false")
	if !strings.HasSuffix(text, fmt.Sprintf("\n%d\n", lines)) || !strings.HasPrefix(text, "<") {
		t.Errorf("the log begins with %.40q", text)
	}
	if text := r.logs(sb.ID, "?stdout=false&tail=2"); text != "[999\n1000\n]" {
		t.Errorf("the log ends with %q", text)
	}
	if text := r.logs(sb.ID, "?since=2999-01-01T00:00:00Z"); text != "" {
		t.Errorf("%q", text)
	}
	for _, q := range []string{"tail=-1", "tail=x", "since=yesterday", "follow=1", "stdout=no", "nosuch=1"} {
		problem(t, r.do("GET", "/v1/sandboxes/"+sb.ID+"/logs?"+q, nil), api.CodeInvalid)
	}
}

// What cannot be started leaves no sandbox, and no log.
func TestMainProcessThatCannotStart(t *testing.T) {
	b := newBench(t, realInit(t))
	b.options.Deposits = newShelf(t)
	r := b.start()
	problem(t, r.do("POST", "/v1/sandboxes", api.CreateSandbox{Command: []string{"/no/such"}}), api.CodeProgramMissing)
	problem(t, r.do("POST", "/v1/sandboxes", api.CreateSandbox{Command: []string{"/etc/passwd"}}), api.CodeProgramDenied)
	for _, req := range []api.CreateSandbox{
		{Command: []string{""}},
		{Command: []string{"true", "a\x00"}},
		{Command: []string{"true", strings.Repeat("x", maxCommand)}},
		{TTY: true},
		{StdinOpen: true},
		{Snapshot: "s", ImageCommand: true},
		{ImageCommand: true}, // of the host image
	} {
		rep := r.do("POST", "/v1/sandboxes", req)
		if rep.status/100 != 4 {
			t.Errorf("%+v: %d %s", req, rep.status, rep.body)
		}
	}
	if list := decode[api.SandboxList](t, r.do("GET", "/v1/sandboxes", nil), http.StatusOK); len(list.Sandboxes) != 0 {
		t.Errorf("%+v", list)
	}
	if left, _ := os.ReadDir(filepath.Join(b.options.DataDir, "logs")); len(left) != 0 {
		t.Errorf("%v", left)
	}
	// One that ran before is stopped again, and says why.
	prog := filepath.Join(t.TempDir(), "prog")
	if err := os.Chmod(filepath.Dir(prog), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(prog, []byte("#!/bin/sh\nexit 0\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	sb := r.create(api.CreateSandbox{Command: []string{prog}})
	r.wait4(sb.ID)
	if err := os.Remove(prog); err != nil {
		t.Fatal(err)
	}
	problem(t, r.do("POST", "/v1/sandboxes/"+sb.ID+"/start", nil), api.CodeProgramMissing)
	got := r.wait4(sb.ID)
	if got.State != api.StateStopped || !strings.Contains(got.Reason, "could not be started") || got.Exit != nil {
		t.Errorf("%+v", got)
	}
	idle := r.create(api.CreateSandbox{})
	problem(t, r.do("GET", "/v1/sandboxes/"+idle.ID+"/logs", nil), api.CodeConflict)
	problem(t, r.do("GET", "/v1/sandboxes/nosuch/logs", nil), api.CodeNotFound)
	problem(t, r.do("GET", "/v1/sandboxes/nosuch/wait", nil), api.CodeNotFound)
}

// The image's own command, and what takes the place of a part of it.
func TestMainProcessOfImage(t *testing.T) {
	b := newBench(t, realInit(t))
	b.options.Deposits = newShelf(t)
	r := b.start()
	sb := r.create(api.CreateSandbox{Image: "example.org/app:1", ImageCommand: true})
	if got := r.wait4(sb.ID); got.Exit == nil || got.Exit.Code != 5 {
		t.Errorf("%+v", got)
	}
	if text := r.logs(sb.ID, ""); text != "image\n" {
		t.Errorf("%q", text)
	}
	sb = r.create(api.CreateSandbox{Image: "example.org/app:1", ImageCommand: true, Command: []string{"tty; exit 6"}, TTY: true})
	if got := r.wait4(sb.ID); got.Exit == nil || got.Exit.Code != 6 {
		t.Errorf("%+v", got)
	}
	if text := r.logs(sb.ID, ""); text != "/dev/pts/0\r\n" {
		t.Errorf("%q", text)
	}
}

// A daemon that was killed between the sandbox and its main process is followed by one that starts it.
func TestMainProcessThatIsMissingIsStarted(t *testing.T) {
	b := newBench(t, realInit(t))
	r := b.start() // keeps nothing for the next one: what runs ends with it
	sb := r.create(api.CreateSandbox{Command: []string{"sh", "-c", "echo here; sleep 600"}})
	r.untilLog(sb.ID, "here\n")
	r.cancel()
	r.wait()
	r = b.start()
	r.untilLog(sb.ID, "here\nhere\n")
	if got := decode[api.Sandbox](t, r.do("GET", "/v1/sandboxes/"+sb.ID, nil), http.StatusOK); got.State != api.StateRunning || got.Exit != nil {
		t.Errorf("%+v", got)
	}
}

// What is kept of a main process that a daemon has dealt with says nothing about what the sandbox has been since, and the output
// of several comes into the log in their order, whichever the launcher names first.
func TestMainProcessesOfSeveralLives(t *testing.T) {
	b := newBench(t, realInit(t))
	b.options.Deposits = newShelf(t)
	r := b.start()
	const boxes = 6
	name := func(i int) string { return fmt.Sprint("box", i) }
	for i := range boxes {
		r.create(api.CreateSandbox{Name: name(i), Command: []string{"sh", "-c", "n=$(cat /proc/uptime); echo $n; exit 3"}})
		r.wait4(name(i))
		decode[api.Sandbox](t, r.do("POST", "/v1/sandboxes/"+name(i)+"/start", nil), http.StatusOK)
		r.wait4(name(i))
		decode[api.Sandbox](t, r.do("POST", "/v1/sandboxes/"+name(i)+"/start", api.StartSandbox{Idle: true}), http.StatusOK)
		decode[api.Sandbox](t, r.do("POST", "/v1/sandboxes/"+name(i)+"/stop", nil), http.StatusOK)
	}
	var logs []string
	for i := range boxes {
		logs = append(logs, r.logs(name(i), ""))
	}
	r.cancel()
	r.wait()
	// As if nothing had been written before the daemon was killed.
	if err := os.RemoveAll(filepath.Join(b.options.DataDir, "logs")); err != nil {
		t.Fatal(err)
	}
	r = b.start()
	for i := range boxes {
		if got := r.wait4(name(i)); got.State != api.StateStopped || got.Exit != nil || got.Reason != "stopped" {
			t.Errorf("%+v %+v", got, got.Exit)
		}
	}
	r.cancel()
	r.wait() // for who writes the logs
	r = b.start()
	for i := range boxes {
		if text := r.logs(name(i), "?follow=true"); text != logs[i] || strings.Count(text, "\n") != 2 {
			t.Errorf("log is %q, was %q", text, logs[i])
		}
	}
}

// A sandbox may be deleted while its main process is being started. Then nothing is left of its log either.
func TestLogOfSandboxDeletedMeanwhile(t *testing.T) {
	b := newBench(t, realInit(t))
	s := newShelf(t)
	b.options.Deposits = s
	r := b.start()
	s.deposited = func() {
		if rep := r.do("DELETE", "/v1/sandboxes/gone", nil); rep.status != http.StatusNoContent {
			t.Errorf("%d %s", rep.status, rep.body)
		}
	}
	id := r.create(api.CreateSandbox{Name: "gone", Command: []string{"sh", "-c", "echo here; sleep 600"}}).ID
	deadline := time.After(patience)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for listed := true; listed; {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatal("its main process is still listed")
		}
		r.d.service.execs.mu.Lock()
		listed = len(r.d.service.execs.of[id]) > 0
		r.d.service.execs.mu.Unlock()
	}
	r.cancel()
	r.wait()
	if left, err := os.ReadDir(filepath.Join(b.options.DataDir, "logs")); err != nil || len(left) != 0 {
		t.Errorf("%v, %v", left, err)
	}
}

// A daemon that learns later what the one before has left starts nothing a second time.
func TestMainProcessThatIsAdoptedLaterRunsOnce(t *testing.T) {
	b := newBench(t, realInit(t))
	s := newShelf(t)
	b.options.Deposits = s
	r := b.start()
	sb := r.create(api.CreateSandbox{Command: []string{"sh", "-c", "echo here; sleep 600"}})
	r.untilLog(sb.ID, "here\n")
	r.cancel()
	r.wait()
	s.busy = 2 // it asks twice at once
	r = b.start()
	for range 10 { // as long as it would take to begin something
		if rep := r.do("POST", "/v1/sandboxes/"+sb.ID+"/exec", api.ExecRequest{Argv: []string{"true"}}); rep.status != http.StatusOK {
			t.Fatalf("%s", rep.body)
		}
	}
	r.cancel()
	r.wait() // for what it may have begun
	r = b.start()
	list := decode[api.ExecList](t, r.do("GET", "/v1/sandboxes/"+sb.ID+"/execs", nil), http.StatusOK)
	if len(list.Execs) != 1 || list.Execs[0].State != api.ExecRunning {
		t.Errorf("%+v", list)
	}
}

// A daemon that stops before it has started a main process leaves the sandbox to the next one, which does.
func TestMainProcessIsStartedByTheNextDaemon(t *testing.T) {
	b := newBench(t, realInit(t))
	r := b.start()
	sb := r.create(api.CreateSandbox{Command: []string{"sh", "-c", "echo here; sleep 600"}})
	e := r.d.service.execs
	e.mu.Lock()
	e.closed = true
	delete(e.mains, sb.ID)
	e.mu.Unlock()
	rec, err := r.d.service.supervisor.Get(sb.ID)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.d.service.startAgain(t.Context(), &rec); !errors.Is(err, ErrStopping) {
		t.Errorf("%v", err)
	}
	if got := decode[api.Sandbox](t, r.do("GET", "/v1/sandboxes/"+sb.ID, nil), http.StatusOK); got.State != api.StateRunning {
		t.Errorf("%+v", got)
	}
}

// A sandbox that was paused before a daemon that was killed had started its main process gets it when it is resumed, and one
// that has it gets no second.
func TestMainProcessOfAPausedSandboxIsStartedWhenItGoesOn(t *testing.T) {
	for name, test := range map[string]struct {
		kept bool
		want string
	}{"that is missing": {false, "here\nhere\n"}, "that is there": {true, "here\n"}} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, realInit(t))
			if test.kept {
				b.options.Deposits = newShelf(t)
			}
			r := b.start()
			sb := r.create(api.CreateSandbox{Command: []string{"sh", "-c", "echo here; sleep 600"}})
			r.untilLog(sb.ID, "here\n")
			at := "/v1/sandboxes/" + sb.ID
			decode[api.Sandbox](t, r.do("POST", at+"/pause", nil), http.StatusOK)
			r.cancel()
			r.wait()
			r = b.start()
			if got := decode[api.Sandbox](t, r.do("GET", at, nil), http.StatusOK); got.State != api.StatePaused {
				t.Fatalf("%+v", got)
			}
			for range 2 {
				decode[api.Sandbox](t, r.do("POST", at+"/resume", nil), http.StatusOK)
				r.untilLog(sb.ID, test.want)
				if list := decode[api.ExecList](t, r.do("GET", at+"/execs", nil), http.StatusOK); len(list.Execs) != 1 || list.Execs[0].State != api.ExecRunning {
					t.Errorf("%+v", list)
				}
			}
		})
	}
}
