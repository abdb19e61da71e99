package functional

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// seq is what seq(1) prints.
func seq(last int) []byte {
	var b bytes.Buffer
	for i := 1; i <= last; i++ {
		b.WriteString(strconv.Itoa(i))
		b.WriteByte('\n')
	}
	return b.Bytes()
}

// output is everything that an attachment has received.
type output struct {
	stdout, stderr bytes.Buffer
	dropped        int64
	next           int64 // where to go on
	data           int   // events that are no text
}

func (o *output) take(e api.ExecEvent) {
	o.dropped += e.Dropped
	p := client.Output(e)
	if e.Stream == "" {
		if e.Exit == nil && e.Error == nil {
			o.next = e.Offset
		}
		return
	}
	if e.Data != nil {
		o.data++
	}
	if e.Stream == "stderr" {
		o.stderr.Write(p)
	} else {
		o.stdout.Write(p)
	}
	o.next = e.Offset + int64(len(p))
}

// attach follows an exec to its end.
func attach(t *testing.T, c *client.Client, s *harness.Sandbox, exec string, from int64, o *output) *client.End {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.HungAfter)
	defer cancel()
	end, err := c.AttachStream(ctx, s.ID, exec, from, func(e api.ExecEvent) error { o.take(e); return nil })
	if err != nil {
		t.Fatalf("attach: %v", err)
	}
	return end
}

func detach(t *testing.T, c *client.Client, s *harness.Sandbox, req api.ExecRequest) *api.Exec {
	t.Helper()
	x, err := c.Detach(t.Context(), s.ID, req)
	if err != nil {
		t.Fatalf("detach %q: %v", req.Argv, err)
	}
	return x
}

// noProcess fails while a process of the host has this word among its arguments.
func noProcess(word string) error {
	names, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return err
	}
	for _, name := range names {
		if data, err := os.ReadFile(name); err == nil && bytes.Contains(data, []byte(word)) {
			return fmt.Errorf("%s: %q still runs", name, data)
		}
	}
	return nil
}

// A detached exec goes on through any number of killed daemons, and loses neither a byte of its
// output nor its exit code, also where it ends while no daemon is there.
func TestDetachedExecSurvivesKilledDaemons(t *testing.T) {
	d := start(t)
	c := d.Client(t)
	defer c.Close()
	s := d.Create(t, api.CreateSandbox{})
	const lines, last = 600000, 3000
	word := fmt.Sprintf("mark-%d", os.Getpid())
	script := fmt.Sprintf("seq 1 %d; seq 1 %d >&2; echo bye >&2; sleep 3; seq 1 %d; exit 7 # %s", lines, last, last, word)
	x := detach(t, c, s, api.ExecRequest{Argv: []string{"sh", "-c", script}, OutputLimit: 16 << 20})
	if x.State != api.ExecRunning || !x.Detached || x.PID < 2 || x.Argv[0] != "sh" {
		t.Errorf("%+v", x)
	}
	// Killed in the middle of the stream, some times, whenever that is.
	for range 4 {
		before, err := c.GetExec(t.Context(), s.ID, x.ID)
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, func() error {
			now, err := c.GetExec(t.Context(), s.ID, x.ID)
			if err == nil && now.State == api.ExecRunning && now.StdoutBytes < min(before.StdoutBytes+300<<10, 4<<20) {
				err = fmt.Errorf("%d bytes so far", now.StdoutBytes)
			}
			return err
		})
		d.Kill9(t)
		d.Launch(t)
	}
	// And while it sleeps, so that it ends without a daemon.
	eventually(t, func() error {
		now, err := c.GetExec(t.Context(), s.ID, x.ID)
		if err == nil && now.StderrBytes < 4 {
			err = fmt.Errorf("%+v", now)
		}
		return err
	})
	d.Kill9(t)
	eventually(t, func() error { return noProcess(word) })
	d.Launch(t)

	var o output
	end := attach(t, c, s, x.ID, 0, &o)
	if end.Exit.Code != 7 || end.Exit.Signal != "" {
		t.Errorf("exit %+v", end.Exit)
	}
	if o.dropped != 0 || o.data != 0 {
		t.Errorf("%d bytes dropped, %d events not text", o.dropped, o.data)
	}
	if want := append(seq(lines), seq(last)...); !bytes.Equal(o.stdout.Bytes(), want) {
		t.Errorf("stdout has %d bytes, want %d", o.stdout.Len(), len(want))
	}
	if want := string(seq(last)) + "bye\n"; o.stderr.String() != want {
		t.Errorf("stderr has %d bytes, want %d", o.stderr.Len(), len(want))
	}
	// The same once more, after yet another daemon.
	d.Kill9(t)
	d.Launch(t)
	now, err := c.GetExec(t.Context(), s.ID, x.ID)
	if err != nil || now.State != api.ExecExited || now.Exit.Code != 7 || now.StdoutBytes != int64(o.stdout.Len()) ||
		now.StderrBytes != int64(o.stderr.Len()) || now.EndedAt.IsZero() || now.Usage == nil {
		t.Errorf("%+v, %v", now, err)
	}
	var again output
	if end := attach(t, c, s, x.ID, o.next-10, &again); end.Exit.Code != 7 || again.stdout.Len()+again.stderr.Len() != 10 {
		t.Errorf("%+v, %q", end.Exit, again.stdout.String())
	}
	if err := c.DeleteExec(t.Context(), s.ID, x.ID); err != nil {
		t.Error(err)
	}
	_, err = c.GetExec(t.Context(), s.ID, x.ID)
	wantProblem(t, err, api.CodeNotFound, x.ID)
}

// A client that goes away loses nothing, several see the same, and one that does not read blocks
// no other.
func TestAttachersDoNotDisturb(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	c := d.Client(t)
	defer c.Close()
	s := d.Create(t, api.CreateSandbox{})
	const lines = 300000
	x := detach(t, c, s, api.ExecRequest{Argv: []string{"sh", "-c", fmt.Sprintf("read go; seq 1 %d; exit 3", lines)}, StdinOpen: true, OutputLimit: 4 << 20})

	// One that never reads.
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	slow, err := d.Do(ctx, http.MethodGet, "/v1/sandboxes/"+s.ID+"/execs/"+x.ID+"/attach", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer slow.Body.Close()

	if err := c.WriteStdin(t.Context(), s.ID, x.ID, strings.NewReader("go\n"), true); err != nil {
		t.Fatal(err)
	}
	// One that goes away, again and again, and goes on where it was.
	var dropping output
	errEnough := errors.New("enough")
	for range 5 {
		n := 0
		_, err := c.AttachStream(t.Context(), s.ID, x.ID, dropping.next, func(e api.ExecEvent) error {
			if n++; n > 4 {
				return errEnough
			}
			dropping.take(e)
			return nil
		})
		if err != nil && !errors.Is(err, errEnough) {
			t.Fatal(err)
		}
	}
	end := attach(t, c, s, x.ID, dropping.next, &dropping)
	if want := seq(lines); end.Exit.Code != 3 || !bytes.Equal(dropping.stdout.Bytes(), want) || dropping.dropped != 0 {
		t.Errorf("%+v, %d bytes of %d, %d dropped", end.Exit, dropping.stdout.Len(), len(want), dropping.dropped)
	}
	var late output
	if attach(t, c, s, x.ID, 0, &late); !bytes.Equal(late.stdout.Bytes(), dropping.stdout.Bytes()) {
		t.Errorf("who comes later sees %d bytes", late.stdout.Len())
	}
}

// Endless output costs no more than the limit, and dropped output is counted.
func TestDetachedFloodIsBounded(t *testing.T) {
	testenv.SameForAll(t)
	d := start(t)
	c := d.Client(t)
	defer c.Close()
	s := d.Create(t, api.CreateSandbox{})
	x := detach(t, c, s, api.ExecRequest{Argv: []string{"sh", "-c", "yes & yes >&2"}, OutputLimit: 1 << 20})
	eventually(t, func() error {
		now, err := c.GetExec(t.Context(), s.ID, x.ID)
		if err == nil && now.Dropped < 50<<20 {
			err = fmt.Errorf("%d bytes dropped so far", now.Dropped)
		}
		return err
	})
	if kept := memfiles(t, d.PID()); kept > 4<<20 {
		t.Errorf("the daemon keeps %d bytes of a limit of 1 MiB", kept)
	}
	errEnough := errors.New("enough")
	var o output
	_, err := c.AttachStream(t.Context(), s.ID, x.ID, 0, func(e api.ExecEvent) error {
		if o.take(e); o.stdout.Len()+o.stderr.Len() > 0 {
			return errEnough
		}
		return nil
	})
	if !errors.Is(err, errEnough) || o.dropped < 50<<20 {
		t.Errorf("%v, %d dropped", err, o.dropped)
	}
	if strings.Trim(o.stdout.String()+o.stderr.String(), "y\n") != "" {
		t.Errorf("%q", o.stdout.String())
	}
	if err := c.DeleteExec(t.Context(), s.ID, x.ID); err != nil {
		t.Fatal(err)
	}
	// All of it: also the yes in the background.
	eventually(t, func() error {
		list, err := c.Processes(t.Context(), s.ID)
		if err == nil && len(list) > 0 {
			err = fmt.Errorf("%+v", list)
		}
		return err
	})
}

// memfiles is how much memory the files of a process have that are on no disk.
func memfiles(t *testing.T, pid int) (total int64) {
	t.Helper()
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if link, err := os.Readlink(path); err != nil || !strings.HasPrefix(link, "/memfd:") {
			continue
		}
		total += blocks(path)
	}
	return total
}

func blocks(path string) int64 {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0
	}
	return st.Blocks * 512
}

// locked is a buffer that an attachment writes while a test reads.
type locked struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *locked) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *locked) has(word string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !strings.Contains(l.buf.String(), word) {
		return fmt.Errorf("no %q in %q", word, l.buf.String())
	}
	return nil
}

// A detached terminal takes input, sizes and signals from whoever is attached, by the WebSocket
// and by the routes, before and after the daemon was killed.
func TestDetachedTerminal(t *testing.T) {
	d := start(t)
	c := d.Client(t)
	defer c.Close()
	s := d.Create(t, api.CreateSandbox{})
	x := detach(t, c, s, api.ExecRequest{Argv: []string{"sh"}, TTY: true, Rows: 33, Cols: 99, Env: []string{"PS1=$ "}})
	sizes := make(chan api.TerminalSize, 1)
	stdin, keyboard := io.Pipe()
	var screen locked
	gone, leave := context.WithCancel(t.Context())
	left := make(chan error, 1)
	go func() {
		_, err := c.Attach(gone, s.ID, x.ID, 0, client.Streams{Stdin: stdin, Stdout: &screen, Resize: sizes}, nil)
		left <- err
	}()
	typed := func(keys string) {
		t.Helper()
		if _, err := keyboard.Write([]byte(keys)); err != nil {
			t.Fatal(err)
		}
	}
	typed("stty size; echo $((40+2))\n")
	eventually(t, func() error { return errors.Join(screen.has("33 99"), screen.has("42\r\n")) })
	sizes <- api.TerminalSize{Rows: 44, Cols: 111}
	eventually(t, func() error {
		typed("stty size\n")
		return screen.has("44 111")
	})
	leave() // the client is gone, the shell is not
	if err := <-left; !errors.Is(err, context.Canceled) {
		t.Errorf("left with %v", err)
	}

	d.Kill9(t)
	d.Launch(t)
	if err := c.ResizeExec(t.Context(), s.ID, x.ID, api.TerminalSize{Rows: 55, Cols: 77}); err != nil {
		t.Error(err)
	}
	if err := c.WriteStdin(t.Context(), s.ID, x.ID, strings.NewReader("trap 'echo caught' USR1; stty size; echo armed $((1+2))\n"), false); err != nil {
		t.Error(err)
	}
	var second locked
	done := make(chan error, 1)
	var end *client.End
	go func() {
		var err error
		end, err = c.Attach(t.Context(), s.ID, x.ID, 0, client.Streams{Stdout: &second}, nil)
		done <- err
	}()
	// The size alone may be the echo of earlier input, which the shell has not come to yet.
	eventually(t, func() error {
		return errors.Join(second.has("55 77"), second.has("42\r\n"), second.has("armed 3\r\n"))
	})
	if err := c.SignalExec(t.Context(), s.ID, x.ID, api.ExecSignal{Signal: "USR1"}); err != nil {
		t.Error(err)
	}
	eventually(t, func() error {
		// A shell looks for signals between commands, and the signal goes through init, which input does
		// not.
		if err := c.WriteStdin(t.Context(), s.ID, x.ID, strings.NewReader("true\n"), false); err != nil {
			return err
		}
		return second.has("caught\r\n")
	})
	if err := c.WriteStdin(t.Context(), s.ID, x.ID, strings.NewReader("exit 5\n"), false); err != nil {
		t.Error(err)
	}
	if err := <-done; err != nil || end.Exit.Code != 5 {
		t.Errorf("%v, %+v", err, end)
	}
}

// A signal to the main process reaches no other of its process group.
func TestSignalOfTheMainProcessAlone(t *testing.T) {
	d := shared(t)
	c := d.Client(t)
	defer c.Close()
	s := d.Create(t, api.CreateSandbox{})
	x := detach(t, c, s, api.ExecRequest{Argv: []string{"sh", "-c", `trap 'echo main' USR1
		sh -c 'trap "echo child" USR1; echo ready; while :; do sleep 0.1; done' & while :; do sleep 0.1; done`}})
	var out locked
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() { _, _ = c.Attach(ctx, s.ID, x.ID, 0, client.Streams{Stdout: &out}, nil) }() // ends with the exec
	eventually(t, func() error { return out.has("ready") })
	for range 3 {
		if err := c.SignalExec(t.Context(), s.ID, x.ID, api.ExecSignal{Signal: "USR1", Main: true}); err != nil {
			t.Error(err)
		}
	}
	eventually(t, func() error { return out.has("main") })
	if out.has("child") == nil {
		t.Error("the signal has reached the process group")
	}
	if err := c.SignalExec(t.Context(), s.ID, x.ID, api.ExecSignal{Signal: "USR1"}); err != nil {
		t.Error(err)
	}
	eventually(t, func() error { return out.has("child") })
	s.Delete(t)
}

// A user's program may be in a directory that only root may enter; another is for its owner alone.
// A variable that is named without a value is taken away, and annotations are shown.
func TestExecInADirectoryOfRoot(t *testing.T) {
	testenv.RequireSubIDs(t)
	d := shared(t)
	c := d.Client(t)
	defer c.Close()
	for name, set := range map[string]api.Settings{"default": {}, "no capability": {CapDrop: []string{"ALL"}}} {
		t.Run(name, func(t *testing.T) {
			s := d.Create(t, api.CreateSandbox{Env: []string{"A=b", "C=d"}, Settings: set})
			s.Sh(t, "mkdir -m 700 /secret /own && chown 1000 /own || chmod 777 /own")
			for _, dir := range []string{"/secret", "/own"} {
				end, err := c.Exec(t.Context(), s.ID, api.ExecRequest{
					Argv: []string{"sh", "-c", "pwd; ls; id -u; env"}, Cwd: dir, User: "1000", Env: []string{"A", "E"},
				})
				if err != nil {
					t.Fatalf("%s: %v", dir, err)
				}
				out := end.Stdout
				if !strings.HasPrefix(out, dir+"\n1000\n") || strings.Contains(out, "A=") || !strings.Contains(out, "C=d\n") || strings.Contains(out, "E\n") {
					t.Errorf("%s: %q, %q", dir, out, end.Stderr)
				}
				if denied := strings.Contains(end.Stderr, "denied"); denied != (dir == "/secret") {
					t.Errorf("%s: %q", dir, end.Stderr)
				}
			}
			s.Delete(t)
		})
	}
	s := d.Create(t, api.CreateSandbox{})
	x := detach(t, c, s, api.ExecRequest{Argv: []string{"true"}, Annotations: map[string]string{"note": "mine"}})
	if got, err := c.GetExec(t.Context(), s.ID, x.ID); err != nil || got.Annotations["note"] != "mine" {
		t.Errorf("%+v, %v", got, err)
	}
	s.Delete(t)
}

// A signal to all reaches processes that have left the process group; kill ends everything;
// children that outlive their program go on.
func TestSignalsReachAllOfAnExec(t *testing.T) {
	d := shared(t)
	c := d.Client(t)
	defer c.Close()
	s := d.Create(t, api.CreateSandbox{})
	// The one that says that it is ready is the last to be so.
	x := detach(t, c, s, api.ExecRequest{Argv: []string{"sh", "-c", `trap 'echo near' USR1
		setsid sh -c 'trap "echo far; exit" USR1; echo ready; while :; do sleep 0.1; done' &
		while :; do sleep 0.1; done`}})
	var out locked
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() { _, _ = c.Attach(ctx, s.ID, x.ID, 0, client.Streams{Stdout: &out}, nil) }() // ends with the exec
	eventually(t, func() error { return out.has("ready") })
	if err := c.SignalExec(t.Context(), s.ID, x.ID, api.ExecSignal{Signal: "SIGUSR1"}); err != nil {
		t.Error(err)
	}
	eventually(t, func() error { return out.has("near") })
	if out.has("far") == nil {
		t.Error("a signal to the process group has left it")
	}
	if err := c.SignalExec(t.Context(), s.ID, x.ID, api.ExecSignal{Signal: "USR1", All: true}); err != nil {
		t.Error(err)
	}
	eventually(t, func() error { return out.has("far") })

	// The list of processes, each with its exec.
	eventually(t, func() error {
		list, err := c.Processes(t.Context(), s.ID)
		if err != nil {
			return err
		}
		found := false
		for _, p := range list {
			if p.PID == x.PID {
				found = true
				if p.Exec != x.ID || len(p.Argv) == 0 || p.Argv[0] != "sh" || p.Name != "sh" || p.PPID != 1 || p.RSS == 0 || time.Since(p.StartedAt) > time.Hour {
					t.Fatalf("%+v", p)
				}
			}
			// A process that has exited, or is about to, has no namespace to tell it by.
			if p.Exec != x.ID && p.State != "Z" {
				return fmt.Errorf("%+v is not said to be the exec's", p)
			}
		}
		if !found {
			return fmt.Errorf("%+v", list)
		}
		return nil
	})
	if got := d.CLI(t, "kill", s.ID, x.ID); got.Code != 0 {
		t.Errorf("%+v", got)
	}
	eventually(t, func() error {
		now, err := c.GetExec(t.Context(), s.ID, x.ID)
		if err == nil && (now.State != api.ExecExited || now.Exit.Signal != "SIGKILL") {
			err = fmt.Errorf("%+v", now)
		}
		return err
	})
	s.Sh(t, "setsid sleep 600 >/dev/null 2>&1 & exit 0")
	eventually(t, func() error {
		list, err := c.Processes(t.Context(), s.ID)
		if err == nil && (len(list) != 1 || len(list[0].Argv) == 0 || list[0].Argv[0] != "sleep" || list[0].Exec != "") {
			err = fmt.Errorf("what is left behind: %+v", list)
		}
		return err
	})
}

// Limits of one exec hold for it alone, from its first instruction on, hard and soft; none can be
// raised.
func TestRlimitsOfAnExec(t *testing.T) {
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	const show = "ulimit -Sn; ulimit -Hn; ulimit -Hc; ulimit -Ht; ulimit -Hf"
	got := s.Exec(t, api.ExecRequest{
		Argv: []string{"sh", "-c", show}, Env: []string{"GOMEMLIMIT=nonsense"},
		Rlimits: map[string]uint64{"nofile": 64, "core": 0, "cpu": 7, "fsize": 4096, "nproc": 50},
	})
	if got.Stdout != "64\n64\n0\n7\n8\n" || got.Exit.Code != 0 {
		t.Errorf("%+v", got)
	}
	if plain := s.Sh(t, "ulimit -Hn"); plain == "64\n" {
		t.Error("the limit is another exec's too")
	}
	got = s.Exec(t, api.ExecRequest{Argv: []string{"sh", "-c", "ulimit -n 65"}, Rlimits: map[string]uint64{"nofile": 64}})
	if got.Exit.Code == 0 {
		t.Error("a hard limit was raised")
	}
	got = s.Exec(t, api.ExecRequest{Argv: []string{"sh", "-c", "while :; do :; done"}, Rlimits: map[string]uint64{"cpu": 1}})
	if got.Exit.Signal != "SIGKILL" && got.Exit.Signal != "SIGXCPU" {
		t.Errorf("%+v", got)
	}
	limited := func(name string, value uint64, argv ...string) error {
		_, err := s.TryExec(t.Context(), api.ExecRequest{Argv: argv, Rlimits: map[string]uint64{name: value}})
		return err
	}
	wantProblem(t, limited("nofile", 1<<40, "true"), api.CodeInvalid, "nofile")
	wantProblem(t, limited("niceness", 1, "true"), api.CodeInvalid, "niceness")
	wantProblem(t, limited("nofile", 64, "no-such-program"), api.CodeProgramMissing, "no-such-program")
	wantProblem(t, limited("nofile", 64, "/tmp"), api.CodeProgramDenied, "/tmp")
	s.Sh(t, "printf '#!/no/such/interpreter\n' >/tmp/script; chmod +x /tmp/script")
	wantProblem(t, limited("nofile", 64, "/tmp/script"), api.CodeProgramMissing, "/tmp/script")
	c := d.Client(t)
	defer c.Close()
	eventually(t, func() error { // an exited process may be there for a moment
		list, err := c.Processes(t.Context(), s.ID)
		if err == nil && len(list) != 0 {
			err = fmt.Errorf("%+v", list)
		}
		return err
	})
}

func TestWorkingDirectoryIsMade(t *testing.T) {
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	got := s.Exec(t, api.ExecRequest{Argv: []string{"sh", "-c", "pwd; stat -c %u:%g:%a . .."}, Cwd: "/work/a/b", CwdCreate: true, User: "12:34"})
	if want := "/work/a/b\n12:34:755\n12:34:755\n"; got.Stdout != want && !onlyRoot(t, s) {
		t.Errorf("%+v", got)
	}
	_, err := s.TryExec(t.Context(), api.ExecRequest{Argv: []string{"true"}, Cwd: "/etc/passwd/x", CwdCreate: true})
	wantProblem(t, err, api.CodeInvalid, "/etc/passwd/x")
}

// onlyRoot tells whether the sandbox has a single id.
func onlyRoot(t *testing.T, s *harness.Sandbox) bool {
	t.Helper()
	return strings.TrimSpace(s.Sh(t, "wc -l </proc/self/uid_map")) == "1" && strings.HasSuffix(strings.TrimSpace(s.Sh(t, "cat /proc/self/uid_map")), " 1")
}

// Text that is written in pieces arrives as text, wherever it is cut.
func TestSplitCharactersArriveWhole(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	c := d.Client(t)
	defer c.Close()
	s := d.Create(t, api.CreateSandbox{})
	const text = "aé€😀z"
	var script strings.Builder
	for i := range len(text) {
		fmt.Fprintf(&script, "printf '\\%03o'; sleep 0.02; ", text[i])
	}
	var o output
	if err := s.Stream(t.Context(), api.ExecRequest{Argv: []string{"sh", "-c", script.String()}}, o.take); err != nil {
		t.Fatal(err)
	}
	if o.stdout.String() != text || o.data != 0 {
		t.Errorf("%q, %d events that are no text", o.stdout.String(), o.data)
	}
	x := detach(t, c, s, api.ExecRequest{Argv: []string{"sh", "-c", script.String() + `printf '\303'`}})
	o = output{}
	attach(t, c, s, x.ID, 0, &o)
	if o.stdout.String() != text+"\xc3" || o.data != 1 {
		t.Errorf("%q, %d events that are no text", o.stdout.String(), o.data)
	}
}

// A process may call itself anything; the name is told as it is, and does nothing to a terminal.
func TestHostileProcessNames(t *testing.T) {
	d := shared(t)
	c := d.Client(t)
	defer c.Close()
	s := d.Create(t, api.CreateSandbox{})
	detach(t, c, s, api.ExecRequest{Argv: []string{
		"python3", "-c", `import ctypes, sys; ctypes.CDLL(None).prctl(15, b") Z 9\n\x1b[2J\xff"); print("go"); sys.stdin.read()`, // PR_SET_NAME
		"\x1b[2J", "a b\nc", "\u202e",
	}, StdinOpen: true})
	var list []api.Process
	eventually(t, func() (err error) {
		list, err = c.Processes(t.Context(), s.ID)
		if err == nil && (len(list) != 1 || !strings.HasPrefix(list[0].Name, ") Z 9")) {
			err = fmt.Errorf("%+v", list)
		}
		return err
	})
	if p := list[0]; p.PPID != 1 || p.UID != 0 || p.State == "Z" || p.Argv[3] != "\x1b[2J" || p.Argv[4] != "a b\nc" {
		t.Errorf("%+v", p)
	}
	if got := d.CLI(t, "top", s.ID); got.Code != 0 || strings.ContainsAny(got.Stdout, "\x1b\u202e") || strings.Count(got.Stdout, "\n") != 2 {
		t.Errorf("%q", got.Stdout)
	}
}

// The command line: detach, list, follow with the program's exit code, processes.
func TestDetachedCommandLine(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{Name: "detached"})
	got := d.CLI(t, "exec", "-d", "--rlimit", "nofile=77", "--create-cwd", "-w", "/new/dir", "detached", "--", "sh", "-c", "pwd; ulimit -n; echo oops >&2; exit 9")
	id := strings.TrimSpace(got.Stdout)
	if got.Code != 0 || id == "" {
		t.Fatalf("%+v", got)
	}
	if got = d.CLI(t, "attach", "detached", id); got.Code != 9 || got.Stdout != "/new/dir\n77\n" || got.Stderr != "oops\n" {
		t.Errorf("%+v", got)
	}
	if got = d.CLI(t, "execs", "detached"); got.Code != 0 || !strings.Contains(got.Stdout, id) || !strings.Contains(got.Stdout, "exited (9)") ||
		!strings.Contains(got.Stdout, "'pwd; ulimit") {
		t.Errorf("%+v", got)
	}
	got = d.CLI(t, "exec", "-d", "--json", "detached", "--", "sleep", "600")
	var x api.Exec
	if err := json.Unmarshal([]byte(got.Stdout), &x); err != nil || x.State != api.ExecRunning {
		t.Errorf("%+v, %v", got, err)
	}
	eventually(t, func() error { // while it is about to be sleep it has no command line
		if got := d.CLI(t, "top", "detached"); got.Code != 0 || !strings.Contains(got.Stdout, "sleep 600") || !strings.Contains(got.Stdout, x.ID) {
			return fmt.Errorf("%+v", got)
		}
		return nil
	})
	if got = d.CLI(t, "kill", "--signal", "TERM", "detached", x.ID); got.Code != 0 {
		t.Errorf("%+v", got)
	}
	if got = d.CLI(t, "attach", "--json", "detached", x.ID); got.Code != 128+15 || !strings.Contains(got.Stdout, `"signal":"SIGTERM"`) {
		t.Errorf("%+v", got)
	}
	s.Delete(t)
	if got = d.CLI(t, "execs", "detached"); got.Code != 1 {
		t.Errorf("%+v", got)
	}
}

// A small limit of memory ends the program, or keeps it from starting. It never ends the process
// that sets the limit, whose last words would look like the program's. It needs the built
// binaries: in a test's own the race detector takes more than these limits.
func TestSmallLimitOfMemory(t *testing.T) {
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	c := d.Client(t)
	defer c.Close()
	argv := append([]string{"/bin/sh", "-c", "exit 3"}, slices.Repeat([]string{strings.Repeat("x", 1000)}, 1000)...)
	for range 5 {
		got, err := c.Exec(t.Context(), s.ID, api.ExecRequest{Argv: argv, Rlimits: map[string]uint64{"as": 8 << 20}})
		if err != nil || got.Exit.Code != 3 || got.Stderr != "" {
			t.Errorf("8 MiB: %+v, %v", got, err)
		}
		got, err = c.Exec(t.Context(), s.ID, api.ExecRequest{Argv: argv, Rlimits: map[string]uint64{"as": 4096}})
		if err == nil || !strings.Contains(err.Error(), "argument list too long") {
			t.Errorf("4 KiB: %+v, %v", got, err)
		}
	}
}

// An exec whose sandbox ends is lost, and says so; so is one whose launcher dies.
func TestDetachedExecIsLostWithItsSandbox(t *testing.T) {
	d := start(t)
	c := d.Client(t)
	defer c.Close()
	lost := func(s *harness.Sandbox, x *api.Exec) {
		t.Helper()
		eventually(t, func() error {
			now, err := c.GetExec(t.Context(), s.ID, x.ID)
			if err == nil && (now.State != api.ExecLost || now.Error == nil || now.Error.Code != api.CodeGone || now.StdoutBytes != 3) {
				err = fmt.Errorf("%+v", now)
			}
			return err
		})
		var o output
		_, err := c.AttachStream(t.Context(), s.ID, x.ID, 0, func(e api.ExecEvent) error { o.take(e); return nil })
		wantProblem(t, err, api.CodeGone)
		if o.stdout.String() != "hi\n" {
			t.Errorf("%q", o.stdout.String())
		}
	}
	running := func() (*harness.Sandbox, *api.Exec) {
		t.Helper()
		s := d.Create(t, api.CreateSandbox{})
		x := detach(t, c, s, api.ExecRequest{Argv: []string{"sh", "-c", "echo hi; sleep 600"}})
		eventually(t, func() error {
			now, err := c.GetExec(t.Context(), s.ID, x.ID)
			if err == nil && now.StdoutBytes == 0 {
				err = errors.New("nothing written")
			}
			return err
		})
		return s, x
	}
	s, x := running()
	kill9(t, s.PID)
	lost(s, x)
	// While no daemon is there.
	s, x = running()
	d.Kill9(t)
	kill9(t, s.PID)
	d.Launch(t)
	lost(s, x)
	s, x = running()
	kill9(t, d.System(t).Launcher)
	lost(s, x)
}

// A stdin that is closed has ended for the program, by the route and on the WebSocket, also where
// the daemon is another one, and the daemon does not wait for a paused sandbox before it ends.
func TestDetachedStdinEnds(t *testing.T) {
	testenv.SameForAll(t)
	d := start(t)
	c := d.Client(t)
	defer c.Close()
	s := d.Create(t, api.CreateSandbox{})
	cat := func() *api.Exec {
		t.Helper()
		return detach(t, c, s, api.ExecRequest{Argv: []string{"cat"}, StdinOpen: true, Stdin: []byte("a")})
	}
	whole := func(x *api.Exec, want string) {
		t.Helper()
		var o output
		if end := attach(t, c, s, x.ID, 0, &o); end.Exit.Code != 0 || o.stdout.String() != want {
			t.Errorf("%+v, %q", end.Exit, o.stdout.String())
		}
	}
	x, y := cat(), cat()
	if err := c.WriteStdin(t.Context(), s.ID, x.ID, strings.NewReader("b"), true); err != nil {
		t.Error(err)
	}
	whole(x, "ab")
	if _, err := c.Attach(t.Context(), s.ID, y.ID, 0, client.Streams{Stdin: strings.NewReader("c")}, nil); err != nil {
		t.Error(err)
	}
	whole(y, "ac")

	z := cat()
	if _, err := c.PauseSandbox(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	if err := d.Call(t.Context(), "POST", "/v1/system/shutdown", api.Shutdown{KeepSandboxes: true}, nil); err != nil {
		t.Fatal(err)
	}
	d.WaitExit(t)
	d.Launch(t)
	if _, err := c.ResumeSandbox(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	if err := c.WriteStdin(t.Context(), s.ID, z.ID, strings.NewReader("d"), true); err != nil {
		t.Error(err)
	}
	whole(z, "ad")
}
