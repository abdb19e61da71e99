package functional

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// command is `sandboxd exec` of a script in a sandbox, over a socket.
func command(t *testing.T, socket string, flags []string, s *harness.Sandbox, script string) *exec.Cmd {
	t.Helper()
	args := append([]string{"--socket", socket, "exec"}, flags...)
	cmd := exec.CommandContext(t.Context(), harness.Program(t, "sandboxd"), append(args, s.ID, "--", "sh", "-c", script)...)
	t.Cleanup(func() {
		if cmd.Process != nil && cmd.ProcessState == nil {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
	})
	return cmd
}

// exited returns the exit code of a command that may fail.
func exited(t *testing.T, err error) int {
	t.Helper()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	if exit == nil {
		return 0
	}
	return exit.ExitCode()
}

// none waits until a sandbox has no running exec.
func none(t *testing.T, c *client.Client, s *harness.Sandbox) {
	t.Helper()
	harness.Eventually(t, func() error {
		execs, err := c.ListExecs(t.Context(), s.ID)
		if err == nil && len(execs) > 0 {
			err = fmt.Errorf("execs %+v", execs)
		}
		return err
	})
}

// much is a script that prints more than pipes hold, on both streams, and the digests of it.
const much = "head -c 3000000 /dev/zero; head -c 300000 /dev/zero | tr '\\0' e >&2; exit 3"

// atOnce prints a part of the output of a script that writes to both streams at the same time.
const atOnce = "head -c 3000000 /dev/zero | tr '\\0' e"

// The output of a command is the program's, whatever the shell connects it to.
func TestOutputInto(t *testing.T) {
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	zeros, es := make([]byte, 3000000), bytes.Repeat([]byte("e"), 300000)
	path := filepath.Join(t.TempDir(), "out")
	file := func(flags int) *os.File {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|flags, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() }) // perhaps again
		return f
	}
	run := func(stdout, stderr *os.File) int {
		cmd := command(t, d.Socket, nil, s, much)
		cmd.Stdout, cmd.Stderr = stdout, stderr
		return exited(t, cmd.Run())
	}
	content := func() []byte {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	if code := run(file(os.O_TRUNC), null); code != 3 || !bytes.Equal(content(), zeros) {
		t.Errorf("a file: exit %d, %d bytes", code, len(content()))
	}
	if code := run(null, file(os.O_APPEND)); code != 3 || !bytes.Equal(content(), append(bytes.Clone(zeros), es...)) {
		t.Errorf("a file that is appended to: exit %d, %d bytes", code, len(content()))
	}
	if code := run(null, null); code != 3 {
		t.Errorf("/dev/null: exit %d", code)
	}
	one := file(os.O_TRUNC)
	cmd := command(t, d.Socket, nil, s, "{ "+atOnce+"; } & "+atOnce+" >&2; wait; exit 3")
	cmd.Stdout, cmd.Stderr = one, one
	if code := exited(t, cmd.Run()); code != 3 || len(content()) != 2*3000000 || bytes.Count(content(), []byte("e")) != 2*3000000 {
		t.Errorf("2>&1: exit %d, %d bytes", code, len(content()))
	}
	var stdout, stderr bytes.Buffer
	cmd = command(t, d.Socket, nil, s, much)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr // pipes
	if code := exited(t, cmd.Run()); code != 3 || !bytes.Equal(stdout.Bytes(), zeros) || !bytes.Equal(stderr.Bytes(), es) {
		t.Errorf("pipes: exit %d, %d and %d bytes", code, stdout.Len(), stderr.Len())
	}
	// Go opens /dev/null in the place of a stdout that is closed.
	cmd = command(t, d.Socket, nil, s, "echo x; exit 4")
	cmd.Args = append([]string{"sh", "-c", `exec "$@" >&-`, "sh", cmd.Path}, cmd.Args[1:]...)
	cmd.Path = "/bin/sh"
	if code := exited(t, cmd.Run()); code != 4 {
		t.Errorf("a closed stdout: exit %d", code)
	}
}

// stdin is the command's with -i, and empty otherwise.
func TestInputOfCommands(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	large := bytes.Repeat([]byte("0123456789abcdef"), 100000)
	for _, tc := range []struct {
		name  string
		flags []string
		stdin io.Reader
		want  []byte
	}{
		{"with -i", []string{"-i"}, bytes.NewReader(large), large},
		{"without", nil, bytes.NewReader(large), nil},
		{"absent", []string{"-i"}, nil, nil},
	} {
		cmd := command(t, d.Socket, tc.flags, s, "cat")
		cmd.Stdin = tc.stdin
		if out, err := cmd.Output(); err != nil || !bytes.Equal(out, tc.want) {
			t.Errorf("%s: %d bytes, %v", tc.name, len(out), err)
		}
	}
	// A program that does not read is no failure, and its end not delayed by stdin that stays open.
	cmd := command(t, d.Socket, []string{"-i"}, s, "exec <&-; echo done; exit 5")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	var out bytes.Buffer
	cmd.Stdout = &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 5 || out.String() != "done\n" {
		t.Errorf("exit %d, %q", code, &out)
	}
}

// A program whose reader has gone away ends, as with a pipe of the host, and nothing is left of it.
func TestOutputIntoClosedPipe(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	cmd := command(t, d.Socket, nil, s, "while :; do echo x; done")
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout = w
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = w.Close()
	if line, err := bufio.NewReader(r).ReadString('\n'); line != "x\n" || err != nil {
		t.Errorf("%q, %v", line, err)
	}
	_ = r.Close()
	if code := exited(t, cmd.Wait()); code != 141 {
		t.Errorf("exit %d", code)
	}
	none(t, d.Client(t), s)
}

// The program ends with a client that is killed, while it reads slowly or not at all.
func TestClientKilled(t *testing.T) {
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	for _, script := range []string{"echo x; while :; do echo y; done", "echo x; exec sleep 1000"} {
		cmd := command(t, d.Socket, nil, s, script)
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		cmd.Stdout = w
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		_ = w.Close()
		if _, err := r.Read(make([]byte, 1)); err != nil {
			t.Error(err)
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait()
		none(t, d.Client(t), s)
		_ = r.Close()
	}
}

// Processes that a program left behind do not keep its command from ending.
func TestLeftBehindHoldsOutput(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	out, err := command(t, d.Socket, nil, s, "sleep 1000 & while :; do echo noise; done & echo mine; exit 0").Output()
	if err != nil || !strings.Contains(string(out), "mine\n") {
		t.Errorf("%.100q, %v", out, err)
	}
}

// throughProxy returns a socket that passes bytes on to the daemon, as ssh -L does: descriptors are
// lost on the way.
func throughProxy(t *testing.T, d *harness.Daemon) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "sbp") //nolint:usetesting // t.TempDir is too long a name for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "s"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	all.Go(func() {
		for {
			outside, err := l.AcceptUnix()
			if err != nil {
				return
			}
			all.Go(func() {
				defer outside.Close()
				inside, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: d.Socket, Net: "unix"})
				if err != nil {
					return
				}
				defer inside.Close()
				all.Go(func() {
					_, _ = io.Copy(inside, outside)
					_ = inside.Close()
				})
				_, _ = io.Copy(outside, inside)
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		all.Wait()
	})
	return l.Addr().String()
}

// Over a proxy the output comes in frames, and nothing is started twice.
func TestOutputOverProxy(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	socket := throughProxy(t, d)
	if p, err := client.New(socket).ExecPipes(t.Context(), s.ID, api.ExecRequest{Argv: []string{"true"}}); !errors.Is(err, client.ErrNoPipes) {
		t.Errorf("%+v, %v", p, err)
	}
	var stdout, stderr bytes.Buffer
	cmd := command(t, socket, nil, s, "echo once >> /tmp/runs; "+much)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if code := exited(t, cmd.Run()); code != 3 || stdout.Len() != 3000000 || stderr.Len() != 300000 {
		t.Errorf("exit %d, %d and %d bytes: %.200s", code, stdout.Len(), stderr.Len(), &stderr)
	}
	cmd = command(t, socket, []string{"-i"}, s, "echo once >> /tmp/runs; cat")
	cmd.Stdin = strings.NewReader("typed")
	if out, err := cmd.Output(); err != nil || string(out) != "typed" {
		t.Errorf("%q, %v", out, err)
	}
	if runs := s.Sh(t, "cat /tmp/runs"); runs != "once\nonce\n" {
		t.Errorf("%q", runs)
	}
}

// A terminal as stdout gets the bytes, though the program has none.
func TestOutputOnTerminal(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	master, slave := openPTY(t)
	cmd := command(t, d.Socket, nil, s, "test -t 1 || echo no terminal")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(master).ReadString('\n'); line != "no terminal\r\n" || err != nil {
		t.Errorf("%q, %v", line, err)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

func openPTY(t *testing.T) (master, slave *os.File) {
	t.Helper()
	m, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	master = os.NewFile(uintptr(m), "master")
	t.Cleanup(func() { _ = master.Close() })
	if err := unix.IoctlSetPointerInt(m, unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(m, unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = slave.Close() })
	return master, slave
}

// A program can open its ends of the pipes for the other direction where it has the daemon's uid on
// the host, and meets its own bytes there: the client's own pipes never get into the sandbox. The
// reason is in docs/decisions/0025.
func TestPipeOpensBothWays(t *testing.T) {
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	// The secret is in the pipe that the command has as stdout, before it starts.
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if _, err := w.WriteString("secret\n"); err != nil {
		t.Fatal(err)
	}
	cmd := command(t, d.Socket, []string{"-i"}, s, `
		echo mine
		( : </proc/$$/fd/1 ) 2>/dev/null && echo opened stdout for reading >&2
		dd iflag=nonblock if=/proc/$$/fd/1 bs=64 count=1 status=none >&2
		( echo injected >/proc/$$/fd/0 ) 2>/dev/null && echo opened stdin for writing >&2
		exit 0`)
	in, feed, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	var stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = in, w, &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v: %s", err, &stderr)
	}
	_ = w.Close()
	_ = feed.Close()
	t.Logf("stderr of the program: %q", &stderr)
	if strings.Contains(stderr.String(), "secret") {
		t.Error("the program has read what another one wrote into the command's stdout")
	}
	if left, err := io.ReadAll(in); len(left) > 0 || err != nil {
		t.Errorf("in the command's stdin are %q, %v", left, err)
	}
	if out, err := io.ReadAll(r); err != nil || !strings.HasPrefix(string(out), "secret\n") {
		t.Errorf("%q, %v", out, err)
	}
}

// Scripts and servers open their streams by name, as any user of the image. That gives them no more
// than the stream.
func TestStreamsAreOpenedByName(t *testing.T) {
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	const script = `echo out >/dev/stdout; echo more >>/dev/stdout; echo err >/dev/stderr; cat /dev/stdin`
	for _, user := range []string{"0:0", "1000:1000", "4242:4242"} {
		for _, flags := range [][]string{{"-u", user}, {"-i", "-u", user}} {
			cmd := command(t, d.Socket, flags, s, script)
			want := "out\nmore\n"
			if flags[0] == "-i" {
				cmd.Stdin, want = strings.NewReader("in\n"), want+"in\n"
			}
			var stdout, stderr bytes.Buffer
			cmd.Stdout, cmd.Stderr = &stdout, &stderr
			if err := cmd.Run(); err != nil || stdout.String() != want || stderr.String() != "err\n" {
				t.Errorf("%q: %v: stdout %q, stderr %q", flags, err, &stdout, &stderr)
			}
		}
		id := strings.TrimSpace(d.CLI(t, "run", "-d", "-u", user, "--", "sh", "-c", script).Stdout)
		d.CLI(t, "wait", id)
		if r := d.CLI(t, "logs", id); r.Stdout != "out\nmore\n" || r.Stderr != "err\n" {
			t.Errorf("logs of user %s: %+v", user, r)
		}
		d.CLI(t, "rm", id)
	}
	// Of another user they are closed.
	cmd := command(t, d.Socket, []string{"-i", "-u", "1000:1000"}, s, "echo $$; cat")
	feed, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	var stdout bytes.Buffer
	stranger := command(t, d.Socket, []string{"-u", "1001:1001"}, s, "echo x >/proc/"+strings.TrimSpace(pid)+"/fd/1 || echo refused")
	stranger.Stdout = &stdout
	if err := stranger.Run(); err != nil || stdout.String() != "refused\n" {
		t.Errorf("a stranger's write to another user's pipe: %v, %q", err, &stdout)
	}
	if err := errors.Join(feed.Close(), cmd.Wait()); err != nil {
		t.Error(err)
	}
}
