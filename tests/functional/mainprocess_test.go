package functional

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// logOf reads the whole log of a sandbox.
func logOf(t *testing.T, c *client.Client, id string) (stdout, stderr []byte) {
	t.Helper()
	err := c.Logs(t.Context(), id, client.LogOptions{}, func(e api.LogEntry) error {
		if e.Dropped != 0 {
			t.Errorf("%d bytes are missing before %+v", e.Dropped, e.Time)
		}
		out := client.Output(api.ExecEvent{Text: e.Text, Data: e.Data})
		if e.Stream == "stderr" {
			stderr = append(stderr, out...)
		} else {
			stdout = append(stdout, out...)
		}
		return nil
	})
	if err != nil {
		t.Fatalf("logs: %v", err)
	}
	return stdout, stderr
}

func waitEnded(t *testing.T, c *client.Client, id string) *api.Sandbox {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.HungAfter)
	defer cancel()
	sb, err := c.WaitSandbox(ctx, id)
	if err != nil {
		t.Fatalf("wait for %s: %v", id, err)
	}
	return sb
}

// logSays waits until the whole log is so.
func logSays(t *testing.T, c *client.Client, id, want string) {
	t.Helper()
	eventually(t, func() error {
		if got, _ := logOf(t, c, id); string(got) != want {
			return fmt.Errorf("the log of %s is %q, not %q", id, got, want)
		}
		return nil
	})
}

// A main process goes on through any number of killed daemons; the log has every byte of its
// output, its sandbox the exit code, and ends with it, also where it ends while no daemon is
// there.
func TestMainProcessSurvivesKilledDaemons(t *testing.T) {
	d := start(t)
	c := d.Client(t)
	defer c.Close()
	const lines, last = 200000, 3000
	word := fmt.Sprintf("main-%d", os.Getpid())
	script := fmt.Sprintf("seq 1 %d; seq 1 %d >&2; sleep 3; seq 1 %d; exit 7 # %s", lines, last, last, word)
	s := d.Create(t, api.CreateSandbox{Command: []string{"sh", "-c", script}})
	for range 4 { // whenever that is
		before, err := c.GetExec(t.Context(), s.ID, api.MainExec)
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, func() error {
			now, err := c.GetExec(t.Context(), s.ID, api.MainExec)
			if err == nil && now.State == api.ExecRunning && now.StdoutBytes < min(before.StdoutBytes+200<<10, 1200<<10) {
				err = fmt.Errorf("%d bytes so far", now.StdoutBytes)
			}
			return err
		})
		d.Kill9(t)
		d.Launch(t)
	}
	eventually(t, func() error {
		_, stderr := logOf(t, c, s.ID)
		if n := bytes.Count(stderr, []byte("\n")); n != last {
			return fmt.Errorf("%d lines", n)
		}
		return nil
	})
	d.Kill9(t)
	eventually(t, func() error { return noProcess(word) })
	d.Launch(t)
	now := waitEnded(t, c, s.ID)
	if now.State != api.StateStopped || now.Exit == nil || now.Exit.Code != 7 || now.Exit.Signal != "" || now.Exit.Usage == nil ||
		now.Exit.EndedAt.Before(now.Exit.StartedAt.Add(2*time.Second)) {
		t.Errorf("%+v, exit %+v", now, now.Exit)
	}
	for range 2 {
		stdout, stderr := logOf(t, c, s.ID)
		if want := append(seq(lines), seq(last)...); !bytes.Equal(stdout, want) {
			t.Errorf("stdout has %d bytes, want %d", len(stdout), len(want))
		}
		if want := seq(last); !bytes.Equal(stderr, want) {
			t.Errorf("stderr has %d bytes, want %d", len(stderr), len(want))
		}
		d.Kill9(t)
		d.Launch(t)
		if again := waitEnded(t, c, s.ID); again.Exit == nil || again.Exit.Code != 7 || again.Reason != now.Reason {
			t.Errorf("%+v", again)
		}
	}
}

// A daemon that is killed at whatever moment around the end of a main process leaves a sandbox
// that has ended, once.
func TestMainProcessEndsWhileDaemonsAreKilled(t *testing.T) {
	d := start(t)
	c := d.Client(t)
	defer c.Close()
	for i := range 12 {
		s := d.Create(t, api.CreateSandbox{Command: []string{"sh", "-c", fmt.Sprintf("echo begun; sleep 0.%02d; echo ended; exit 9", i)}})
		if i%3 > 0 {
			eventually(t, func() error {
				if got, _ := logOf(t, c, s.ID); !strings.HasPrefix(string(got), "begun\n") {
					return fmt.Errorf("the log is %q", got)
				}
				return nil
			})
		}
		d.Kill9(t)
		d.Launch(t)
		if now := waitEnded(t, c, s.ID); now.Exit == nil || now.Exit.Code != 9 || now.State != api.StateStopped {
			t.Errorf("%+v", now)
		}
		logSays(t, c, s.ID, "begun\nended\n")
		s.Delete(t)
	}
}

// Stop asks the main process, whatever it is, and the record says how it took it.
func TestMainProcessIsStopped(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	withChild := []string{"sh", "-c", `trap 'sleep 1; test -e /hit && exit 6; exit 5' TERM
		sh -c 'trap "touch /hit; exit" TERM; echo up; while :; do sleep 0.1; done' & while :; do sleep 0.1; done`}
	c := d.Client(t)
	defer c.Close()
	for name, test := range map[string]struct {
		command []string
		tty     bool
		up      string
		code    int
		signal  string
		grace   float64
		main    bool // ask it alone
		by      string
	}{
		"waiting shell":    {command: []string{"sh", "-c", "echo up; sleep 600; true"}, up: "up\n", code: 143, signal: "SIGTERM", grace: 600},
		"interactive bash": {command: []string{"bash", "-i"}, tty: true, up: "# ", code: 129, signal: "SIGHUP", grace: 600},
		// As bash when it is about to wait for its next key: it does not notice the first.
		"misses a signal": {
			command: []string{"sh", "-c", "trap '' TERM; trap 'trap \"exit 7\" HUP' HUP; echo up; while :; do sleep 0.1; done"},
			tty:     true, up: "up\r\n", code: 7, grace: 60,
		},
		"is told once without a terminal": {
			command: []string{"sh", "-c", "trap '' TERM; trap 'trap \"exit 7\" HUP' HUP; echo up; while :; do sleep 0.1; done"},
			up:      "up\n", code: 137, signal: "SIGKILL", grace: 2,
		},
		"python":       {command: []string{"python3", "-q"}, tty: true, up: ">>> ", code: 143, signal: "SIGTERM", grace: 600},
		"tidies up":    {command: []string{"sh", "-c", "trap 'echo tidy >/done; exit 5' TERM; echo up; while :; do sleep 0.1; done"}, up: "up\n", code: 5, grace: 600},
		"is not asked": {command: []string{"sh", "-c", "trap '' TERM HUP; echo up; while :; do sleep 1; done"}, up: "up\n", code: 137, signal: "SIGKILL"},

		"waiting shell alone":         {command: []string{"sh", "-c", "echo up; sleep 600; true"}, up: "up\n", code: 143, signal: "SIGTERM", grace: 600, main: true},
		"interactive bash alone":      {command: []string{"bash", "-i"}, tty: true, up: "# ", code: 129, signal: "SIGHUP", grace: 600, main: true},
		"another signal":              {command: []string{"sh", "-c", "trap 'exit 8' USR2; echo up; while :; do sleep 0.1; done"}, up: "up\n", code: 8, grace: 600, by: "USR2"},
		"with what it has started":    {command: withChild, up: "up\n", code: 6, grace: 600},
		"without what it has started": {command: withChild, up: "up\n", code: 5, grace: 600, main: true},
	} {
		t.Run(name, func(t *testing.T) {
			s := d.Create(t, api.CreateSandbox{Command: test.command, TTY: test.tty})
			eventually(t, func() error {
				if got, _ := logOf(t, c, s.ID); !strings.HasSuffix(string(got), test.up) {
					return fmt.Errorf("it says %q", got)
				}
				return nil
			})
			ctx, cancel := context.WithTimeout(t.Context(), testenv.HungAfter)
			defer cancel()
			now, err := c.StopSandbox(ctx, s.ID, api.StopSandbox{Grace: &test.grace, Main: test.main, Signal: test.by})
			if err != nil {
				t.Fatal(err)
			}
			if now.State != api.StateStopped || now.Reason != "stopped" || now.Exit == nil || now.Exit.Code != test.code || now.Exit.Signal != test.signal {
				t.Errorf("%+v, exit %+v", now, now.Exit)
			}
		})
	}
}

// Forks have a main process each, a rollback starts it anew, and a sandbox of the warm pool has
// one like any other. A sandbox made of a snapshot has none unless it asks for one.
func TestMainProcessOfCopies(t *testing.T) {
	d := pooled(t, 2)
	c := d.Client(t)
	defer c.Close()
	script := "echo $WHO $(cat /mark 2>/dev/null) >>/runs; cat /runs; exec sleep 600"
	s := d.Create(t, api.CreateSandbox{Command: []string{"sh", "-c", script}, Env: []string{"WHO=me"}})
	if p := d.System(t).Pools[0]; p.Hits != 1 {
		t.Errorf("it was not claimed: %+v", p)
	}
	logSays(t, c, s.ID, "me\n")
	snap := snapshot(t, d, s.ID, api.TakeSnapshot{})
	s.Sh(t, "echo marked >/mark")
	for _, f := range fork(t, d, s.ID, api.ForkSandbox{Count: 2, Env: []string{"WHO=fork"}}) {
		logSays(t, c, f.ID, "me\nfork marked\n")
		f.Delete(t)
	}
	var back api.Sandbox
	if err := d.Call(t.Context(), http.MethodPost, "/v1/sandboxes/"+s.ID+"/rollback", api.RollbackSandbox{Snapshot: snap.ID}, &back); err != nil {
		t.Fatal(err)
	}
	if back.State != api.StateRunning || back.Exit != nil {
		t.Errorf("%+v", back)
	}
	logSays(t, c, s.ID, "me\nme\nme\n") // the first life's, and the second's two
	made := d.Create(t, api.CreateSandbox{Snapshot: snap.ID})
	if len(made.Command) != 0 {
		t.Errorf("%+v", made)
	}
	if list, err := c.ListExecs(t.Context(), made.ID); err != nil || len(list) != 0 {
		t.Errorf("%+v, %v", list, err)
	}
	asked := d.Create(t, api.CreateSandbox{Snapshot: snap.ID, Command: []string{"cat", "/runs"}})
	if now := waitEnded(t, c, asked.ID); now.Exit == nil || now.Exit.Code != 0 {
		t.Errorf("%+v", now)
	}
	logSays(t, c, asked.ID, "me\n")
	// Of one that has ended too: its changes are listed without it.
	if _, err := c.StartSandbox(t.Context(), asked.ID, api.StartSandbox{Idle: true}); err != nil {
		t.Fatal(err)
	}
	if got := asked.Sh(t, "cat /runs; rm /runs"); got != "me\n" {
		t.Errorf("%q", got)
	}
	if _, err := c.StopSandbox(t.Context(), asked.ID, api.StopSandbox{}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.StartSandbox(t.Context(), asked.ID, api.StartSandbox{}); err != nil {
		t.Fatal(err)
	}
	if now := waitEnded(t, c, asked.ID); now.Exit == nil || now.Exit.Code != 1 {
		t.Errorf("%+v", now)
	}
}

// A main process that writes for ever fills neither the disk nor the daemon's memory, blocks no
// client, and can be stopped.
func TestMainProcessFillsNothing(t *testing.T) {
	testenv.SameForAll(t)
	t.Parallel()
	const size, files = 256 << 10, 2
	d := harness.Start(t, harness.Options{Args: []string{"--log-size", "256k", "--log-files", fmt.Sprint(files)}})
	c := d.Client(t)
	defer c.Close()
	before := d.System(t).HeapLive
	s := d.Create(t, api.CreateSandbox{Command: []string{"sh", "-c", "while :; do printf '\\001\\377\\n'; done & while :; do echo x >&2; done & exec yes"}})
	eventually(t, func() error {
		x, err := c.GetExec(t.Context(), s.ID, api.MainExec)
		if err == nil && x.StdoutBytes < 8<<20 {
			err = fmt.Errorf("it has written %d bytes", x.StdoutBytes)
		}
		return err
	})
	other := d.Create(t, api.CreateSandbox{Command: []string{"echo", "mine"}})
	waitEnded(t, c, other.ID)
	logSays(t, c, other.ID, "mine\n")
	if grown := d.System(t).HeapLive - before; grown > 32<<20 {
		t.Errorf("the daemon's memory has grown by %d bytes", grown)
	}
	now, err := c.StopSandbox(t.Context(), s.ID, api.StopSandbox{})
	if err != nil || now.Exit == nil || now.Exit.Signal == "" {
		t.Errorf("%+v, %v", now, err)
	}
	var total int64
	err = filepath.WalkDir(filepath.Join(d.DataDir, "logs", s.ID), func(_ string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		fi, err := e.Info()
		total += fi.Size()
		return err
	})
	if err != nil || total > size*files || total < size {
		t.Errorf("the log has %d bytes, %v", total, err)
	}
	n := 0
	last := 10
	err = c.Logs(t.Context(), s.ID, client.LogOptions{Last: &last, Stream: "stdout"}, func(e api.LogEntry) error {
		n += bytes.Count(client.Output(api.ExecEvent{Text: e.Text, Data: e.Data}), []byte("\n"))
		return nil
	})
	if err != nil || n < last-1 || n > last {
		t.Errorf("the last %d lines are %d, %v", last, n, err)
	}
}

// The same from the command line, where a client that follows sees the end.
func TestMainProcessCommands(t *testing.T) {
	testenv.SameForAll(t)
	d := start(t)
	id := strings.TrimSpace(d.CLI(t, "run", "-d", "--name", "web", "host", "--", "sh", "-c", "echo out; echo err >&2; sleep 0.3; echo more; exit 4").Stdout)
	got := d.CLI(t, "logs", "-f", "web")
	if got.Stdout != "out\nmore\n" || got.Stderr != "err\n" || got.Code != 0 {
		t.Errorf("%+v", got)
	}
	if got := d.CLI(t, "wait", "web"); got.Stdout != "4\n" || got.Code != 0 {
		t.Errorf("%+v", got)
	}
	if got := d.CLI(t, "ps"); !strings.Contains(got.Stdout, "stopped (its main process exited with 4)") {
		t.Errorf("%+v", got)
	}
	if got := d.CLI(t, "attach", id); got.Stdout != "out\nmore\n" || got.Code != 4 {
		t.Errorf("%+v", got)
	}
	if got := d.CLI(t, "start", "web"); got.Stdout != id+"\n" {
		t.Errorf("%+v", got)
	}
	if got := d.CLI(t, "wait", "web"); got.Stdout != "4\n" {
		t.Errorf("%+v", got)
	}
	if got := d.CLI(t, "logs", "--tail", "1", "--timestamps", "web"); !strings.HasSuffix(got.Stdout, "Z more\n") || strings.Count(got.Stdout, "\n") != 1 {
		t.Errorf("%+v", got)
	}
	if got := d.CLI(t, "create", "--", "/no/such/program"); got.Code != 1 || !strings.Contains(got.Stderr, "/no/such/program") {
		t.Errorf("%+v", got)
	}
	if list := d.List(t); len(list) != 1 {
		t.Errorf("%+v", list)
	}
	d.CLI(t, "rm", "web")
	if _, err := os.Stat(filepath.Join(d.DataDir, "logs", id)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("its log: %v", err)
	}
}
