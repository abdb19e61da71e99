package host

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/guest/guesttest"

	"github.com/sandboxd/sandboxd/internal/guest"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func TestExecExit(t *testing.T) {
	s := startInit(t)
	for _, tc := range []struct {
		name   string
		script string
		want   ExecExit
	}{
		{"success", "exit 0", ExecExit{}},
		{"code", "exit 3", ExecExit{Code: 3}},
		{"highest code", "exit 255", ExecExit{Code: 255}},
		{"signal", "kill -TERM $$", ExecExit{Code: 143, Signal: unix.SIGTERM}},
		{"kill", "kill -KILL $$", ExecExit{Code: 137, Signal: unix.SIGKILL}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, _, exit, err := s.run(t, ExecRequest{Argv: []string{"sh", "-c", tc.script}})
			if err != nil {
				t.Fatal(err)
			}
			if exit.Wall <= 0 || exit.CPU <= 0 || exit.MaxRSS <= 0 {
				t.Errorf("usage %+v", exit)
			}
			exit.Wall, exit.CPU, exit.MaxRSS = 0, 0, 0
			if diff := cmp.Diff(tc.want, exit); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestExecGivesTheProcessWhatWasAskedAndNothingElse(t *testing.T) {
	s := startInit(t)
	dir := t.TempDir()
	odd := "a\xff\x01 b\n" // not UTF-8, and a control character
	out, errs, _, err := s.run(t, ExecRequest{
		Argv: []string{"sh", "-c", `printf '%s|' "$0" "$1" "$X"; pwd; echo oops >&2; env | grep -c .`, odd, ""},
		Env:  []string{"PATH=/usr/bin:/bin", "X=" + odd},
		Cwd:  dir,
	})
	if err != nil {
		t.Fatal(err)
	}
	// sh adds PWD (and OLDPWD or _ in some shells), and X has two lines.
	if want := odd + "||" + odd + "|" + dir + "\n"; !strings.HasPrefix(out, want) {
		t.Errorf("got %q, want %q…", out, want)
	}
	if errs != "oops\n" {
		t.Errorf("stderr %q", errs)
	}

	out, _, _, err = s.run(t, helper(t, "self"))
	if err != nil {
		t.Fatal(err)
	}
	want := "fd 0\nfd 1\nfd 2\nsid true\numask 18\nignored 0000000000000000\n"
	if diff := cmp.Diff(want, out); diff != "" {
		t.Error(diff)
	}
}

func TestExecStdin(t *testing.T) {
	s := startInit(t)
	e, err := s.Exec(t.Context(), ExecRequest{Argv: []string{"cat"}, Env: testEnv})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = e.Close() }()
	in := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	go func() {
		_, _ = e.Stdin.Write(in)
		_ = e.Stdin.Close()
	}()
	var out []byte
	if _, err := e.Stream(t.Context(), func(_ string, p []byte) error { out = append(out, p...); return nil }); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(in, out) {
		t.Errorf("%d bytes came back of %d", len(out), len(in))
	}
}

func TestExecErrors(t *testing.T) {
	s := startInit(t)
	dir := t.TempDir()
	write := func(name, content string, mode fs.FileMode) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	plain := write("plain", "#!/bin/sh\n", 0o644)
	noShebang := write("noshebang", "echo hi\n", 0o755)
	badShebang := write("badshebang", "#!/nonexistent/interpreter\n", 0o755)
	write("second/../shadow", "#!/bin/sh\n", 0o644)
	fifo := filepath.Join(dir, "fifo")
	if err := unix.Mkfifo(fifo, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "second"), 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		t.Fatal(err)
	}
	write("second/shadow", "#!/bin/sh\necho second\n", 0o755)

	for _, tc := range []struct {
		name string
		r    ExecRequest
		want guest.Error
	}{
		{"unknown name", ExecRequest{Argv: []string{"no-such-program"}}, guest.Error{Stage: guest.StageLookup, Errno: unix.ENOENT, Path: "no-such-program"}},
		{"unknown path", ExecRequest{Argv: []string{"/no/such"}}, guest.Error{Stage: guest.StageLookup, Errno: unix.ENOENT, Path: "/no/such"}},
		{"not executable", ExecRequest{Argv: []string{plain}}, guest.Error{Stage: guest.StageLookup, Errno: unix.EACCES, Path: plain}},
		{"not executable in PATH", ExecRequest{Argv: []string{"plain"}, Env: []string{"PATH=/usr/bin:" + dir}}, guest.Error{Stage: guest.StageLookup, Errno: unix.EACCES, Path: plain}},
		{"directory", ExecRequest{Argv: []string{dir}}, guest.Error{Stage: guest.StageLookup, Errno: unix.EACCES, Path: dir}},
		{"fifo", ExecRequest{Argv: []string{fifo}}, guest.Error{Stage: guest.StageLookup, Errno: unix.EACCES, Path: fifo}},
		{"file as directory", ExecRequest{Argv: []string{plain + "/x"}}, guest.Error{Stage: guest.StageLookup, Errno: unix.ENOENT, Path: plain + "/x"}},
		{"format", ExecRequest{Argv: []string{noShebang}}, guest.Error{Stage: guest.StageStart, Errno: unix.ENOEXEC, Path: noShebang}},
		{"interpreter", ExecRequest{Argv: []string{badShebang}}, guest.Error{Stage: guest.StageStart, Errno: unix.ENOENT, Path: badShebang}},
		{"no cwd", ExecRequest{Argv: []string{"true"}, Cwd: "/no/such"}, guest.Error{Stage: guest.StageCwd, Errno: unix.ENOENT, Path: "/no/such"}},
		{"cwd is a file", ExecRequest{Argv: []string{"true"}, Cwd: plain}, guest.Error{Stage: guest.StageCwd, Errno: unix.ENOTDIR, Path: plain}},
		{"relative cwd", ExecRequest{Argv: []string{"true"}, Cwd: "tmp"}, guest.Error{Stage: guest.StageCwd, Errno: unix.EINVAL, Path: "tmp"}},
		{"no argv", ExecRequest{}, guest.Error{Stage: guest.StageRequest, Errno: unix.EINVAL, Path: "argv"}},
		{"empty program", ExecRequest{Argv: []string{""}}, guest.Error{Stage: guest.StageRequest, Errno: unix.EINVAL, Path: "argv"}},
		{"NUL", ExecRequest{Argv: []string{"true", "a\x00b"}}, guest.Error{Stage: guest.StageRequest, Errno: unix.EINVAL, Path: "a\x00b"}},
		{"unmapped user", ExecRequest{Argv: []string{"true"}, UID: 1 << 20, GID: 0}, guest.Error{Stage: guest.StageStart, Errno: unix.EINVAL, Path: "user 1048576:0"}},
		{"impossible user", ExecRequest{Argv: []string{"true"}, UID: 1<<32 - 1}, guest.Error{Stage: guest.StageRequest, Errno: unix.EINVAL, Path: "id 4294967295"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			guesttest.Leaks(t)
			if tc.r.Env == nil {
				tc.r.Env = testEnv
			}
			_, err := s.Exec(t.Context(), tc.r)
			if diff := cmp.Diff(tc.want, *asError(t, err)); diff != "" {
				t.Error(diff)
			}
		})
	}

	t.Run("PATH goes on after what cannot be executed", func(t *testing.T) {
		out, _, _, err := s.run(t, ExecRequest{Argv: []string{"shadow"}, Env: []string{"PATH=" + dir + ":" + dir + "/second"}})
		if err != nil || out != "second\n" {
			t.Errorf("%q, %v", out, err)
		}
	})
	t.Run("relative program from cwd", func(t *testing.T) {
		out, _, _, err := s.run(t, ExecRequest{Argv: []string{"./shadow"}, Cwd: dir + "/second"})
		if err != nil || out != "second\n" {
			t.Errorf("%q, %v", out, err)
		}
	})
}

func TestExecAsUser(t *testing.T) {
	if ids() == 1 {
		t.Skip("an ordinary user has a single id")
	}
	s := startInit(t)
	out, _, _, err := s.run(t, ExecRequest{Argv: []string{"sh", "-c", "id -u; id -g; id -G; grep CapEff /proc/self/status"}, UID: 1000, GID: 1001, Groups: []uint32{5, 6}})
	if err != nil {
		t.Fatal(err)
	}
	if want := "1000\n1001\n1001 5 6\nCapEff:\t0000000000000000\n"; out != want {
		t.Errorf("got %q, want %q", out, want)
	}

	// Rights are the user's, not init's.
	dir := t.TempDir()
	if err := os.Chmod(filepath.Dir(dir), 0o755); err != nil {
		t.Fatal(err)
	}
	secret := filepath.Join(dir, "secret")
	if err := os.Mkdir(secret, 0o700); err != nil {
		t.Fatal(err)
	}
	tool := filepath.Join(dir, "tool")
	if err := os.WriteFile(tool, []byte("#!/bin/sh\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	// But for the working directory, which init enters, as runc does.
	for _, argv := range [][]string{{"sh", "-c", "pwd; ls"}, {"nosuch"}, {"sh", "-c", "cd . && pwd"}} {
		out, _, x, err := s.run(t, ExecRequest{Argv: argv, Env: testEnv, Cwd: secret, UID: 1000, GID: 1000})
		if argv[0] == "nosuch" {
			if e := asError(t, err); e.Stage != guest.StageLookup {
				t.Error(err)
			}
		} else if err != nil || argv[2] == "pwd; ls" && (out != secret+"\n" || x.Code == 0) {
			t.Errorf("%q: %q, %+v, %v", argv, out, x, err)
		}
	}
	// Init is back at the root.
	if out, _, _, err := s.run(t, ExecRequest{Argv: []string{"pwd"}, Env: testEnv, Cwd: "/"}); err != nil || out != "/\n" {
		t.Errorf("%q, %v", out, err)
	}
	for _, tc := range []struct {
		name string
		r    ExecRequest
		want guest.Error
	}{
		{"program", ExecRequest{Argv: []string{tool}}, guest.Error{Stage: guest.StageLookup, Errno: unix.EACCES, Path: tool}},
		{"program below cwd", ExecRequest{Argv: []string{"./tool"}, Cwd: dir}, guest.Error{Stage: guest.StageLookup, Errno: unix.EACCES, Path: "./tool"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tc.r.Env, tc.r.UID, tc.r.GID = testEnv, 1000, 1000
			_, err := s.Exec(t.Context(), tc.r)
			if diff := cmp.Diff(tc.want, *asError(t, err)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestSingleIDSandboxRefusesOtherGroups(t *testing.T) {
	if ids() != 1 {
		t.Skip("root has all ids")
	}
	s := startInit(t)
	_, err := s.Exec(t.Context(), ExecRequest{Argv: []string{"true"}, Env: testEnv, Groups: []uint32{7}})
	if e := asError(t, err); e.Stage != guest.StageStart || e.Errno != unix.EPERM {
		t.Error(err)
	}
}

// Argv and env up to the kernel's limits, by packet or memfd.
func TestExecArgumentSizes(t *testing.T) {
	s := startInit(t)
	arg := strings.Repeat("x", 100<<10)
	for _, n := range []int{0, 1, 2, 18} {
		args := []string{"sh", "-c", `echo $#; s=; for a; do s=$((s+${#a})); done; echo $s`, "sh"}
		for range n {
			args = append(args, arg)
		}
		out, errs, _, err := s.run(t, ExecRequest{Argv: args})
		if err != nil {
			t.Fatal(err)
		}
		want := fmt.Sprintf("%d\n%d\n", n, n*len(arg))
		if n == 0 {
			want = "0\n\n"
		}
		if out != want {
			t.Errorf("%d arguments: got %q, want %q; %s", n, out, want, errs)
		}
	}
	for _, tc := range []struct {
		name string
		argv []string
	}{
		{"all", append([]string{"true"}, slicesRepeat(arg, 21)...)},
		{"one", []string{"true", strings.Repeat("x", guest.MaxArg)}},
	} {
		_, err := s.Exec(t.Context(), ExecRequest{Argv: tc.argv, Env: testEnv})
		if e := asError(t, err); e.Stage != guest.StageRequest || e.Errno != unix.E2BIG {
			t.Errorf("%s: %v", tc.name, err)
		}
	}
}

func slicesRepeat(s string, n int) []string {
	r := make([]string, n)
	for i := range r {
		r[i] = s
	}
	return r
}

func TestStreamDoesNotWaitForWhatWasLeftBehind(t *testing.T) {
	s := startInit(t)
	for _, tc := range []struct{ name, script string }{
		{"quiet", "sleep 100 & echo hi"},
		{"flooding", "{ while :; do echo y; done & } ; echo hi"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			begun := time.Now()
			out, _, exit, err := s.run(t, ExecRequest{Argv: []string{"sh", "-c", tc.script}})
			if err != nil || exit.Code != 0 {
				t.Fatalf("%+v, %v", exit, err)
			}
			if !strings.Contains(out, "hi\n") {
				t.Errorf("got %q", out)
			}
			if d := time.Since(begun); d > 50*time.Second { // the orphan takes twice that, or goes on for ever
				t.Errorf("took %v", d)
			}
		})
	}
	// The orphan goes on. It may not have reached its sleep when its exec ended.
	if out := s.sh(t, "timeout 20 sh -c 'until n=$(pgrep -c sleep); do sleep 0.05; done; echo $n'"); out != "1\n" {
		t.Errorf("%q sleeping", out)
	}
}

func TestStreamLosesNothing(t *testing.T) {
	s := startInit(t)
	const size = 10 << 20
	script := fmt.Sprintf("head -c %d /dev/zero; head -c %d /dev/zero >&2; sleep 100 & printf end", size, size)
	out, errs, exit, err := s.run(t, ExecRequest{Argv: []string{"sh", "-c", script}})
	if err != nil || exit.Code != 0 {
		t.Fatalf("%+v, %v", exit, err)
	}
	if len(out) != size+3 || !strings.HasSuffix(out, "end") || len(errs) != size {
		t.Errorf("%d and %d bytes, want %d and %d", len(out), len(errs), size+3, size)
	}
	// Just before the exit, many times: the exit must not overtake the output.
	for range 50 {
		out, _, _, err := s.run(t, ExecRequest{Argv: []string{"sh", "-c", "sleep 10 & head -c 60000 /dev/zero; printf end"}})
		if err != nil || len(out) != 60003 {
			t.Fatalf("%d bytes, %v", len(out), err)
		}
	}
}

func TestStreamEndsWithContextAndCallback(t *testing.T) {
	s := startInit(t)
	boom := errors.New("boom")
	guesttest.Leaks(t)
	t.Run("callback", func(t *testing.T) {
		e, err := s.Exec(t.Context(), ExecRequest{Argv: []string{"sh", "-c", "echo hi; exec sleep 100"}, Env: testEnv})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = e.Close() }()
		if _, err := e.Stream(t.Context(), func(string, []byte) error { return boom }); !errors.Is(err, boom) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("context", func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		e, err := s.Exec(ctx, ExecRequest{Argv: []string{"sh", "-c", "echo hi; exec sleep 100"}, Env: testEnv})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = e.Close() }()
		if _, err := e.Stream(ctx, func(string, []byte) error { cancel(boom); return nil }); !errors.Is(err, boom) {
			t.Errorf("got %v", err)
		}
	})
	s.gone(t, "sleep")
}

// gone waits until no process of that name is left in the sandbox.
func (s *sandbox) gone(tb testing.TB, name string) {
	tb.Helper()
	if !guesttest.Within(tb, func() bool { return s.sh(tb, "pgrep -c "+name+" || true") == "0\n" }) {
		tb.Fatalf("%s still runs", name)
	}
}

// processes counts the processes of the sandbox, without init and the counting shell. Zombies
// count.
func (s *sandbox) processes(tb testing.TB) int {
	tb.Helper()
	out := s.sh(tb, "set -- /proc/[0-9]*; echo $#")
	n, err := strconv.Atoi(strings.TrimSpace(out))
	if err != nil {
		tb.Fatal(err)
	}
	return n - 2
}

func TestTimeoutKillsEverythingOfTheExec(t *testing.T) {
	dir := t.TempDir()
	chain := filepath.Join(dir, "chain")
	if err := os.WriteFile(chain, []byte("#!/bin/sh\nsetsid \"$0\" &\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	sh := func(script string) ExecRequest {
		return ExecRequest{Argv: []string{"sh", "-c", script}, Env: testEnv}
	}
	for _, tc := range []struct {
		name string
		r    ExecRequest
	}{
		{"one process", sh("exec sleep 100")},
		{"children", sh("sleep 100 & sleep 100 & wait")},
		{"own session, orphaned", sh("(setsid sleep 100 &) ; (setsid setsid sleep 100 & ) ; sleep 100")},
		{"deaf to signals", sh("trap '' TERM INT HUP QUIT; (trap '' TERM; setsid sleep 100 &); while :; do sleep 1; done")},
		{"stopped", sh("sleep 100 & kill -STOP $!; kill -STOP $$")},
		{"many", sh("i=0; while [ $i -lt 200 ]; do setsid sleep 100 & i=$((i+1)); done; wait")},
		{"first thread ended", helper(t, "headless")},
		{"fork chain", sh(chain + "; exec sleep 100")},
		{"fork bomb", sh("f() { sleep 0.01; f & f & wait; }; f")},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := startInit(t)
			other, err := s.Exec(t.Context(), sh("exec sleep 1000"))
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = other.Close() }()
			tc.r.Timeout = 300 * time.Millisecond
			begun := time.Now()
			e, err := s.Exec(t.Context(), tc.r)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = e.Close() }()
			exit, err := e.Stream(t.Context(), func(string, []byte) error { return nil })
			took := time.Since(begun)
			if err != nil {
				t.Fatal(err)
			}
			if !exit.Timeout || exit.Signal != unix.SIGKILL {
				t.Errorf("%+v", exit)
			}
			// On a busy machine a program that forks may go on for longer than the other execs are spared.
			others := 1
			if took > tc.r.Timeout+initKillAll {
				if err := other.Signal(unix.SIGTERM, ReachGroup); err != nil {
					t.Fatal(err)
				}
				others = 0
			}
			// Zombies of the killed may be waiting for init for a moment.
			if !guesttest.Within(t, func() bool { return s.processes(t) == others }) {
				t.Fatalf("left behind:\n%s", s.sh(t, "ps -ef || true"))
			}
			if others == 0 {
				return
			}
			// The other exec has not been touched.
			if err := other.Signal(unix.SIGTERM, ReachGroup); err != nil {
				t.Fatal(err)
			}
			if exit, err := other.Wait(); err != nil || exit.Signal != unix.SIGTERM {
				t.Errorf("the other exec: %+v, %v", exit, err)
			}
		})
	}
}

func TestTimeoutIsPunctual(t *testing.T) {
	s := startInit(t)
	// Others may keep us or init from running for a while, but not each time.
	if !guesttest.Within(t, func() bool {
		begun := time.Now()
		_, _, exit, err := s.run(t, ExecRequest{Argv: []string{"sleep", "100"}, Timeout: 50 * time.Millisecond})
		if err != nil || !exit.Timeout {
			t.Fatalf("%+v, %v", exit, err)
		}
		d := time.Since(begun)
		if d < 50*time.Millisecond {
			t.Fatalf("after %v", d)
		}
		return d <= time.Second
	}) {
		t.Error("late each time")
	}
	// One that does not expire leaves no trace.
	_, _, exit, err := s.run(t, ExecRequest{Argv: []string{"true"}, Timeout: time.Minute})
	if err != nil || exit.Timeout || exit.Code != 0 {
		t.Fatalf("%+v, %v", exit, err)
	}
}

// A program that no user of the sandbox may read hides from init: see inside/kill.go.
func TestUnreadableProgramsCannotHide(t *testing.T) {
	if ids() == 1 {
		t.Skip("an ordinary user cannot give a file to an id that is unmapped in the sandbox")
	}
	s := startInit(t)
	dir := t.TempDir()
	sleep, err := os.ReadFile("/bin/sleep")
	if err != nil {
		t.Fatal(err)
	}
	hidden := filepath.Join(dir, "hidden")
	if err := os.WriteFile(hidden, sleep, 0o711); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(hidden, 1<<20, 1<<20); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(hidden, 0o711); err != nil {
		t.Fatal(err)
	}
	_, err = s.Exec(t.Context(), ExecRequest{Argv: []string{hidden, "100"}, Env: testEnv})
	if diff := cmp.Diff(guest.Error{Stage: guest.StageStart, Errno: unix.EACCES, Path: hidden}, *asError(t, err)); diff != "" {
		t.Error(diff)
	}
	_, _, exit, err := s.run(t, ExecRequest{Argv: []string{"sh", "-c", "setsid " + hidden + " 100 & exec sleep 100"}, Timeout: 200 * time.Millisecond})
	if err != nil || !exit.Timeout {
		t.Fatalf("%+v, %v", exit, err)
	}
	s.gone(t, "hidden")
}

func TestKill(t *testing.T) {
	s := startInit(t)
	e, err := s.Exec(t.Context(), ExecRequest{Argv: []string{"sh", "-c", "(setsid sleep 100 &); sleep 100"}, Env: testEnv})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = e.Close() }()
	if err := e.Kill(); err != nil {
		t.Fatal(err)
	}
	exit, err := e.Wait()
	if err != nil || exit.Signal != unix.SIGKILL || exit.Timeout {
		t.Errorf("%+v, %v", exit, err)
	}
	s.gone(t, "sleep")
	// After the exit neither is an error.
	if err := errors.Join(e.Kill(), e.Signal(unix.SIGTERM, ReachGroup)); err != nil {
		t.Error(err)
	}
	if err := e.Signal(65, ReachGroup); err == nil {
		t.Error("signal 65 was sent")
	}
}

func TestCloseKillsOnlyWhatRuns(t *testing.T) {
	s := startInit(t)
	guesttest.Leaks(t)
	left, err := s.Exec(t.Context(), ExecRequest{Argv: []string{"sh", "-c", "setsid tail -f /dev/null >/dev/null 2>&1 &"}, Env: testEnv})
	if err != nil {
		t.Fatal(err)
	}
	if exit, err := left.Wait(); err != nil || exit.Code != 0 {
		t.Fatalf("%+v, %v", exit, err)
	}
	running, err := s.Exec(t.Context(), ExecRequest{Argv: []string{"sh", "-c", "(setsid sleep 100 &); sleep 100"}, Env: testEnv})
	if err != nil {
		t.Fatal(err)
	}
	var wait sync.WaitGroup
	wait.Go(func() {
		if _, err := running.Wait(); err == nil {
			t.Error("Wait of a closed exec gives no error")
		}
	})
	if err := errors.Join(left.Close(), running.Close(), running.Close()); err != nil {
		t.Error(err)
	}
	wait.Wait()
	s.gone(t, "sleep")
	if !guesttest.Within(t, func() bool { return s.sh(t, "pgrep -c tail || true") == "1\n" }) { // it may not have come to its exec yet
		t.Fatalf("what an exec left behind was killed by closing it:\n%s", s.sh(t, "ps -ef || true"))
	}
}

func TestSignalGoesToTheGroup(t *testing.T) {
	s := startInit(t)
	e, err := s.Exec(t.Context(), ExecRequest{Argv: []string{"sh", "-c", `trap 'echo got; exit 7' USR1; sh -c 'echo up; exec sleep 100' & wait`}, Env: testEnv})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = e.Close() }()
	var out strings.Builder
	exit, err := e.Stream(t.Context(), func(_ string, p []byte) error {
		out.Write(p)
		if strings.Contains(string(p), "up") {
			return e.Signal(unix.SIGUSR1, ReachGroup)
		}
		return nil
	})
	if err != nil || exit.Code != 7 || !strings.Contains(out.String(), "got\n") {
		t.Errorf("%+v, %v, %q", exit, err, out.String())
	}
	s.gone(t, "sleep")
}

func TestTerminal(t *testing.T) {
	s := startInit(t)
	guesttest.Leaks(t)
	e, err := s.Exec(t.Context(), ExecRequest{
		Argv: []string{"sh", "-c", `test -t 0 && test -t 1 && test -t 2 && stty size && trap 'stty size; exit 5' WINCH; echo ready; while :; do sleep 0.05; done`},
		Env:  testEnv, TTY: true, Rows: 33, Cols: 101,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = e.Close() }()
	if e.Stdin != e.Stdout || e.Stderr != nil {
		t.Error("a terminal is one file")
	}
	var out strings.Builder
	exit, err := e.Stream(t.Context(), func(stream string, p []byte) error {
		if stream != "stdout" {
			t.Errorf("output on %s", stream)
		}
		out.Write(p)
		if strings.Contains(string(p), "ready") {
			return e.Resize(40, 120)
		}
		return nil
	})
	if err != nil || exit.Code != 5 {
		t.Errorf("%+v, %v", exit, err)
	}
	if want := "33 101\r\nready\r\n40 120\r\n"; out.String() != want {
		t.Errorf("got %q, want %q", out.String(), want)
	}

	t.Run("interrupt key", func(t *testing.T) {
		e, err := s.Exec(t.Context(), ExecRequest{Argv: []string{"sleep", "100"}, Env: testEnv, TTY: true})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = e.Close() }()
		if _, err := e.Stdin.Write([]byte{3}); err != nil {
			t.Fatal(err)
		}
		exit, err := e.Stream(t.Context(), func(string, []byte) error { return nil })
		if err != nil || exit.Signal != unix.SIGINT {
			t.Errorf("%+v, %v", exit, err)
		}
	})
	t.Run("output up to the exit", func(t *testing.T) {
		for range 20 {
			out, _, exit, err := s.run(t, ExecRequest{Argv: []string{"sh", "-c", "stty -opost; (trap '' HUP; exec sleep 100) & head -c 30000 /dev/zero; printf end"}, TTY: true})
			if err != nil || exit.Code != 0 || len(out) != 30003 {
				t.Fatalf("%d bytes, %+v, %v", len(out), exit, err)
			}
		}
	})
	t.Run("not one", func(t *testing.T) {
		e, err := s.Exec(t.Context(), ExecRequest{Argv: []string{"true"}, Env: testEnv})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = e.Close() }()
		if err := e.Resize(1, 1); !errors.Is(err, unix.ENOTTY) {
			t.Errorf("got %v", err)
		}
	})
}

// Process 1 inherits orphans, and must not lose an exec's exit among theirs.
func TestInitReapsOrphansAndNoExitIsLost(t *testing.T) {
	s := startInit(t)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for i := range 25 {
				_, _, exit, err := s.run(t, ExecRequest{Argv: []string{"sh", "-c", "(sleep 0.01 &) ; (true &) ; exit " + strconv.Itoa(i)}})
				if err != nil || exit.Code != i {
					t.Errorf("%+v, %v", exit, err)
					return
				}
			}
		})
	}
	wg.Wait()
	if !guesttest.Within(t, func() bool { return s.processes(t) == 0 }) {
		t.Fatalf("left behind:\n%s", s.sh(t, "ps -ef || true"))
	}
}

// Many at a time, more than the machine has of anything.
func TestManyExecsAtATime(t *testing.T) {
	s := startInit(t)
	guesttest.Leaks(t)
	bin := staticTrue(t)
	var wg sync.WaitGroup
	for range 300 {
		wg.Go(func() {
			_, _, exit, err := s.run(t, ExecRequest{Argv: []string{bin}, Timeout: time.Minute})
			if err != nil || exit.Code != 0 || exit.Timeout {
				t.Errorf("%+v, %v", exit, err)
			}
		})
	}
	wg.Wait()
}

// A root process of the sandbox may send init any signal.
func TestInitIsDeafToSignals(t *testing.T) {
	s := startInit(t)
	s.sh(t, "i=1; while [ $i -le 64 ]; do kill -$i 1; i=$((i+1)); done 2>/dev/null; true")
	if err := s.Ping(t.Context()); err != nil {
		t.Fatal(err)
	}
	if out := s.sh(t, "echo still here"); out != "still here\n" {
		t.Errorf("got %q", out)
	}
}

func TestPathLongerThanASocketAddress(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("d", 120))
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "guest.sock")
	l, err := guesttest.Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	fi, err := os.Stat(path)
	if err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", fi, err)
	}
	c, err := dial(t, NewClient(path), time.Now().Add(time.Second))
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
	if _, err := guesttest.Listen(path); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("second Listen: %v", err)
	}
}
