package service_test

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
	"github.com/sandboxd/sandboxd/internal/daemon/daemontest"
	"github.com/sandboxd/sandboxd/internal/service"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/mainlog"
	"github.com/sandboxd/sandboxd/internal/service/servicetest"
)

// A sandbox ends with its main process, says how, and runs it again when it is started.
func TestMainProcess(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	b.Options.Engine = servicetest.WithDescriptorStore(b.Options.Engine, servicetest.NewDescriptorStore(t))
	r := b.Start()
	before := time.Now()
	sb := r.Create(api.CreateSandbox{Name: "one", Command: []string{"sh", "-c", "echo out; echo err >&2; read x; echo $x $MINE $PWD; exit 3"}, StdinOpen: true, Env: []string{"MINE=mine"}, Cwd: "/tmp"})
	if sb.State != api.StateRunning || sb.Exit != nil || len(sb.Command) != 3 {
		t.Errorf("%+v", sb)
	}
	x := daemontest.Decode[api.Exec](t, r.Do("GET", "/v1/sandboxes/one/execs/main", nil), http.StatusOK)
	if !x.Main || !x.Detached || x.State != api.ExecRunning {
		t.Errorf("%+v", x)
	}
	daemontest.Problem(t, r.Do("POST", "/v1/sandboxes/one/start", nil), api.CodeConflict)
	if rep := r.Do("POST", "/v1/sandboxes/one/execs/main/stdin?close=true", "hello\n"); rep.Status != http.StatusNoContent {
		t.Fatalf("%s", rep.Body)
	}
	got := r.WaitEnded("one")
	if got.State != api.StateStopped || got.Exit == nil || got.Exit.Code != 3 || got.Exit.Signal != "" || got.Exit.OOM || got.Reason != "its main process exited with 3" ||
		got.Exit.StartedAt.Before(before) || got.Exit.EndedAt.Before(got.Exit.StartedAt) || got.Exit.Usage == nil {
		t.Errorf("%+v %+v", got, got.Exit)
	}
	// Two streams, in unknown order.
	if text := r.Logs("one", "?stderr=false"); text != "out\nhello mine /tmp\n" {
		t.Errorf("log is %q", text)
	}
	if text := r.Logs("one", "?follow=true&stdout=false"); text != "[err\n]" {
		t.Errorf("log is %q", text)
	}
	// Once more; the log goes on, and the next daemon says the same.
	again := daemontest.Decode[api.Sandbox](t, r.Do("POST", "/v1/sandboxes/one/start", nil), http.StatusOK)
	if again.State != api.StateRunning || again.Exit != nil {
		t.Errorf("%+v", again)
	}
	stopped := daemontest.Decode[api.Sandbox](t, r.Do("POST", "/v1/sandboxes/one/stop", api.StopSandbox{Grace: new(0.0)}), http.StatusOK)
	if stopped.Exit == nil || stopped.Exit.Code != 137 || stopped.Exit.Signal != "SIGKILL" || stopped.Reason != "stopped" {
		t.Errorf("%+v %+v", stopped, stopped.Exit)
	}
	idle := daemontest.Decode[api.Sandbox](t, r.Do("POST", "/v1/sandboxes/one/start", api.StartSandbox{Idle: true}), http.StatusOK)
	if idle.State != api.StateRunning || idle.Exit != nil {
		t.Errorf("%+v", idle)
	}
	r.Cancel()
	r.Wait()
	r = b.Start()
	if list := daemontest.Decode[api.ExecList](t, r.Do("GET", "/v1/sandboxes/one/execs", nil), http.StatusOK); len(list.Execs) != 2 || list.Execs[1].State == api.ExecRunning {
		t.Errorf("an idle sandbox has %+v", list)
	}
	daemontest.Decode[api.Sandbox](t, r.Do("POST", "/v1/sandboxes/one/stop", nil), http.StatusOK)
	daemontest.Decode[api.Sandbox](t, r.Do("POST", "/v1/sandboxes/one/start", nil), http.StatusOK)
	if rep := r.Do("POST", "/v1/sandboxes/one/execs/main/stdin?close=true", "third\n"); rep.Status != http.StatusNoContent {
		t.Fatalf("%s", rep.Body)
	}
	r.WaitEnded("one")
	if text := r.Logs("one", "?stderr=false&tail=2"); text != "out\nthird mine /tmp\n" {
		t.Errorf("log is %q", text)
	}
	if rep := r.Do("DELETE", "/v1/sandboxes/one", nil); rep.Status != http.StatusNoContent {
		t.Errorf("%s", rep.Body)
	}
	if left, err := os.ReadDir(filepath.Join(b.Options.DataDir, "logs")); err != nil || len(left) != 0 {
		t.Errorf("%v, %v", left, err)
	}
}

// A daemon that stops in order leaves the main process to the next one, whether it ends meanwhile
// or not.
func TestMainProcessIsHandedOn(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	b.Options.Engine = servicetest.WithDescriptorStore(b.Options.Engine, servicetest.NewDescriptorStore(t))
	r := b.Start()
	fifo := filepath.Join(t.TempDir(), "fifo")
	script := fmt.Sprintf("mkfifo -m 666 %s; echo one; cat %s; seq 1 20000; exit 4", fifo, fifo)
	if err := os.Chmod(filepath.Dir(fifo), 0o777); err != nil {
		t.Fatal(err)
	}
	sb := r.Create(api.CreateSandbox{Command: []string{"sh", "-c", script}})
	r.UntilLog(sb.ID, "one\n")
	r.Cancel()
	r.Wait()
	// It goes on without a daemon: more than its pipe and the memory hold.
	if err := os.WriteFile(fifo, []byte("two\n"), 0); err != nil {
		t.Fatal(err)
	}
	r = b.Start()
	got := r.WaitEnded(sb.ID)
	if got.Exit == nil || got.Exit.Code != 4 || got.State != api.StateStopped {
		t.Errorf("%+v %+v", got, got.Exit)
	}
	var want strings.Builder
	want.WriteString("one\ntwo\n")
	for i := range 20000 {
		fmt.Fprintln(&want, i+1)
	}
	if text := r.Logs(sb.ID, ""); text != want.String() {
		t.Errorf("log has %d bytes, want %d", len(text), want.Len())
	}
	// And all is as it was for yet another one.
	r.Cancel()
	r.Wait()
	r = b.Start()
	if got := r.WaitEnded(sb.ID); got.Exit == nil || got.Exit.Code != 4 {
		t.Errorf("%+v", got)
	}
	if text := r.Logs(sb.ID, ""); text != want.String() {
		t.Errorf("log has %d bytes, want %d", len(text), want.Len())
	}
}

// A main process that writes without end is held by the disk, which it cannot fill, and by nothing
// else.
func TestMainProcessThatWritesForEver(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	b.Options.Engine = servicetest.WithDescriptorStore(b.Options.Engine, servicetest.NewDescriptorStore(t))
	b.Options.LogSize, b.Options.LogFiles = mainlog.MinFileSize, 2
	r := b.Start()
	const lines = 400000
	sb := r.Create(api.CreateSandbox{Command: []string{"sh", "-c", fmt.Sprintf("seq 1 %d; seq 1 1000 >&2", lines)}})
	r.WaitEnded(sb.ID)
	var size int64
	entries, err := os.ReadDir(filepath.Join(b.Options.DataDir, "logs", sb.ID))
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
	if size > 2*mainlog.MinFileSize {
		t.Errorf("the log has %d bytes", size)
	}
	text := r.Logs(sb.ID, "?stderr=false")
	if !strings.HasSuffix(text, fmt.Sprintf("\n%d\n", lines)) || !strings.HasPrefix(text, "<") {
		t.Errorf("the log begins with %.40q", text)
	}
	if text := r.Logs(sb.ID, "?stdout=false&tail=2"); text != "[999\n1000\n]" {
		t.Errorf("the log ends with %q", text)
	}
	if text := r.Logs(sb.ID, "?since=2999-01-01T00:00:00Z"); text != "" {
		t.Errorf("%q", text)
	}
	for _, q := range []string{"tail=-1", "tail=x", "since=yesterday", "follow=1", "stdout=no", "nosuch=1"} {
		daemontest.Problem(t, r.Do("GET", "/v1/sandboxes/"+sb.ID+"/logs?"+q, nil), api.CodeInvalid)
	}
}

// A sandbox whose main process cannot be started is removed, with its log.
func TestMainProcessThatCannotStart(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	b.Options.Engine = servicetest.WithDescriptorStore(b.Options.Engine, servicetest.NewDescriptorStore(t))
	r := b.Start()
	daemontest.Problem(t, r.Do("POST", "/v1/sandboxes", api.CreateSandbox{Command: []string{"/no/such"}}), api.CodeProgramMissing)
	daemontest.Problem(t, r.Do("POST", "/v1/sandboxes", api.CreateSandbox{Command: []string{"/etc/passwd"}}), api.CodeProgramDenied)
	for _, req := range []api.CreateSandbox{
		{Command: []string{""}},
		{Command: []string{"true", "a\x00"}},
		{Command: []string{"true", strings.Repeat("x", service.MaxCommand)}},
		{TTY: true},
		{StdinOpen: true},
		{Snapshot: "s", ImageCommand: true},
		{ImageCommand: true}, // of the host image
	} {
		rep := r.Do("POST", "/v1/sandboxes", req)
		if rep.Status/100 != 4 {
			t.Errorf("%+v: %d %s", req, rep.Status, rep.Body)
		}
	}
	if list := daemontest.Decode[api.SandboxList](t, r.Do("GET", "/v1/sandboxes", nil), http.StatusOK); len(list.Sandboxes) != 0 {
		t.Errorf("%+v", list)
	}
	if left, _ := os.ReadDir(filepath.Join(b.Options.DataDir, "logs")); len(left) != 0 {
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
	sb := r.Create(api.CreateSandbox{Command: []string{prog}})
	r.WaitEnded(sb.ID)
	if err := os.Remove(prog); err != nil {
		t.Fatal(err)
	}
	daemontest.Problem(t, r.Do("POST", "/v1/sandboxes/"+sb.ID+"/start", nil), api.CodeProgramMissing)
	got := r.WaitEnded(sb.ID)
	if got.State != api.StateStopped || !strings.Contains(got.Reason, "could not be started") || got.Exit != nil {
		t.Errorf("%+v", got)
	}
	idle := r.Create(api.CreateSandbox{})
	daemontest.Problem(t, r.Do("GET", "/v1/sandboxes/"+idle.ID+"/logs", nil), api.CodeConflict)
	daemontest.Problem(t, r.Do("GET", "/v1/sandboxes/nosuch/logs", nil), api.CodeNotFound)
	daemontest.Problem(t, r.Do("GET", "/v1/sandboxes/nosuch/wait", nil), api.CodeNotFound)
}

// The image's own command, and what takes the place of a part of it.
func TestMainProcessOfImage(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	b.Options.Engine = servicetest.WithDescriptorStore(b.Options.Engine, servicetest.NewDescriptorStore(t))
	r := b.Start()
	sb := r.Create(api.CreateSandbox{Image: "example.org/app:1", ImageCommand: true})
	if got := r.WaitEnded(sb.ID); got.Exit == nil || got.Exit.Code != 5 {
		t.Errorf("%+v", got)
	}
	if text := r.Logs(sb.ID, ""); text != "image\n" {
		t.Errorf("%q", text)
	}
	sb = r.Create(api.CreateSandbox{Image: "example.org/app:1", ImageCommand: true, Command: []string{"tty; exit 6"}, TTY: true})
	if got := r.WaitEnded(sb.ID); got.Exit == nil || got.Exit.Code != 6 {
		t.Errorf("%+v", got)
	}
	if text := r.Logs(sb.ID, ""); text != "/dev/pts/0\r\n" {
		t.Errorf("%q", text)
	}
}

// A daemon that was killed between the sandbox and its main process is followed by one that starts
// it.
func TestMainProcessThatIsMissingIsStarted(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	r := b.Start() // keeps nothing for the next one: what runs ends with it
	sb := r.Create(api.CreateSandbox{Command: []string{"sh", "-c", "echo here; sleep 600"}})
	r.UntilLog(sb.ID, "here\n")
	r.Cancel()
	r.Wait()
	r = b.Start()
	r.UntilLog(sb.ID, "here\nhere\n")
	if got := daemontest.Decode[api.Sandbox](t, r.Do("GET", "/v1/sandboxes/"+sb.ID, nil), http.StatusOK); got.State != api.StateRunning || got.Exit != nil {
		t.Errorf("%+v", got)
	}
}

// The kept end of a main process of an earlier life says nothing about the sandbox since. The
// output of several comes into the log in their order, whichever the launcher returns first.
func TestMainProcessesOfSeveralLives(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	b.Options.Engine = servicetest.WithDescriptorStore(b.Options.Engine, servicetest.NewDescriptorStore(t))
	r := b.Start()
	const boxes = 6
	name := func(i int) string { return fmt.Sprint("box", i) }
	for i := range boxes {
		r.Create(api.CreateSandbox{Name: name(i), Command: []string{"sh", "-c", "n=$(cat /proc/uptime); echo $n; exit 3"}})
		r.WaitEnded(name(i))
		daemontest.Decode[api.Sandbox](t, r.Do("POST", "/v1/sandboxes/"+name(i)+"/start", nil), http.StatusOK)
		r.WaitEnded(name(i))
		daemontest.Decode[api.Sandbox](t, r.Do("POST", "/v1/sandboxes/"+name(i)+"/start", api.StartSandbox{Idle: true}), http.StatusOK)
		daemontest.Decode[api.Sandbox](t, r.Do("POST", "/v1/sandboxes/"+name(i)+"/stop", nil), http.StatusOK)
	}
	var logs []string
	for i := range boxes {
		logs = append(logs, r.Logs(name(i), ""))
	}
	r.Cancel()
	r.Wait()
	// As if nothing had been written before the daemon was killed.
	if err := os.RemoveAll(filepath.Join(b.Options.DataDir, "logs")); err != nil {
		t.Fatal(err)
	}
	r = b.Start()
	for i := range boxes {
		if got := r.WaitEnded(name(i)); got.State != api.StateStopped || got.Exit == nil || got.Exit.Code != 3 || got.Reason != "stopped" {
			t.Errorf("%+v %+v", got, got.Exit)
		}
	}
	r.Cancel()
	r.Wait() // for the log writers
	r = b.Start()
	for i := range boxes {
		if text := r.Logs(name(i), "?follow=true"); text != logs[i] || strings.Count(text, "\n") != 2 {
			t.Errorf("log is %q, was %q", text, logs[i])
		}
	}
}

// A sandbox may be deleted while its main process is being started. Then nothing is left of its log
// either.
func TestLogOfSandboxDeletedMeanwhile(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	s := servicetest.NewDescriptorStore(t)
	b.Options.Engine = servicetest.WithDescriptorStore(b.Options.Engine, s)
	r := b.Start()
	s.Stored = func() {
		if rep := r.Do("DELETE", "/v1/sandboxes/gone", nil); rep.Status != http.StatusNoContent {
			t.Errorf("%d %s", rep.Status, rep.Body)
		}
	}
	id := r.Create(api.CreateSandbox{Name: "gone", Command: []string{"sh", "-c", "echo here; sleep 600"}}).ID
	r.Await(func() string { return "its main process is still listed" }, func() bool { return len(r.D.Service().Execs().List(id)) == 0 })
	r.Cancel()
	r.Wait()
	if left, err := os.ReadDir(filepath.Join(b.Options.DataDir, "logs")); err != nil || len(left) != 0 {
		t.Errorf("%v, %v", left, err)
	}
}

// A daemon that adopts late starts no main process a second time.
func TestMainProcessThatIsAdoptedLaterRunsOnce(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	s := servicetest.NewDescriptorStore(t)
	b.Options.Engine = servicetest.WithDescriptorStore(b.Options.Engine, s)
	r := b.Start()
	sb := r.Create(api.CreateSandbox{Command: []string{"sh", "-c", "echo here; sleep 600"}})
	r.UntilLog(sb.ID, "here\n")
	r.Cancel()
	r.Wait()
	s.Busy = 2 // it asks twice at once
	r = b.Start()
	for range 10 { // as long as it would take to begin something
		if rep := r.Do("POST", "/v1/sandboxes/"+sb.ID+"/exec", api.ExecRequest{Argv: []string{"true"}}); rep.Status != http.StatusOK {
			t.Fatalf("%s", rep.Body)
		}
	}
	r.Cancel()
	r.Wait() // for anything it has begun
	r = b.Start()
	list := daemontest.Decode[api.ExecList](t, r.Do("GET", "/v1/sandboxes/"+sb.ID+"/execs", nil), http.StatusOK)
	if len(list.Execs) != 1 || list.Execs[0].State != api.ExecRunning {
		t.Errorf("%+v", list)
	}
}

// A daemon that stops before it has started a main process leaves the sandbox to the next one,
// which does.
func TestMainProcessIsStartedByTheNextDaemon(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	r := b.Start()
	sb := r.Create(api.CreateSandbox{Command: []string{"sh", "-c", "echo here; sleep 600"}, Stopped: true})
	daemontest.Decode[api.Sandbox](t, r.Do("POST", "/v1/sandboxes/"+sb.ID+"/start", api.StartSandbox{Idle: true}), http.StatusOK)
	r.D.Service().Stopping()
	rec, err := r.D.Service().Supervisor().Get(sb.ID)
	if err != nil {
		t.Fatal(err)
	}
	rec.Idle = false
	if err := r.D.Service().StartAgain(t.Context(), &rec); !errors.Is(err, class.ErrStopping) {
		t.Errorf("%v", err)
	}
	if got := daemontest.Decode[api.Sandbox](t, r.Do("GET", "/v1/sandboxes/"+sb.ID, nil), http.StatusOK); got.State != api.StateRunning {
		t.Errorf("%+v", got)
	}
}

// A sandbox that was paused before a daemon that was killed had started its main process gets it
// when it is resumed, and one that has it gets no second.
func TestMainProcessOfAPausedSandboxIsStartedWhenItGoesOn(t *testing.T) {
	for name, test := range map[string]struct {
		kept bool
		want string
	}{"that is missing": {false, "here\nhere\n"}, "that is there": {true, "here\n"}} {
		t.Run(name, func(t *testing.T) {
			b := daemontest.New(t, servicetest.RealInit(t))
			if test.kept {
				b.Options.Engine = servicetest.WithDescriptorStore(b.Options.Engine, servicetest.NewDescriptorStore(t))
			}
			r := b.Start()
			sb := r.Create(api.CreateSandbox{Command: []string{"sh", "-c", "echo here; sleep 600"}})
			r.UntilLog(sb.ID, "here\n")
			at := "/v1/sandboxes/" + sb.ID
			daemontest.Decode[api.Sandbox](t, r.Do("POST", at+"/pause", nil), http.StatusOK)
			r.Cancel()
			r.Wait()
			r = b.Start()
			if got := daemontest.Decode[api.Sandbox](t, r.Do("GET", at, nil), http.StatusOK); got.State != api.StatePaused {
				t.Fatalf("%+v", got)
			}
			for range 2 {
				daemontest.Decode[api.Sandbox](t, r.Do("POST", at+"/resume", nil), http.StatusOK)
				r.UntilLog(sb.ID, test.want)
				if list := daemontest.Decode[api.ExecList](t, r.Do("GET", at+"/execs", nil), http.StatusOK); len(list.Execs) != 1 || list.Execs[0].State != api.ExecRunning {
					t.Errorf("%+v", list)
				}
			}
		})
	}
}
