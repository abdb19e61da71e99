package functional

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// traps is a script that names each signal that it gets, and ends with SIGTERM.
const traps = `trap 'echo SIGINT' INT; trap 'echo SIGHUP' HUP; trap 'echo SIGQUIT' QUIT; trap 'echo SIGTERM; exit 9' TERM
echo ready; while :; do sleep 600 & wait $!; done`

// Signals of the command reach the program, however the two are connected, and the exit code is the
// program's.
func TestSignalsReachTheProgram(t *testing.T) {
	testenv.Heed(syscall.SIGHUP)
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	proxy := throughProxy(t, d)
	for _, tc := range []struct {
		name, socket string
		flags        []string
		terminal     bool
	}{
		{"pipes", d.Socket, nil, false},
		{"pipes with stdin", d.Socket, []string{"-i"}, false},
		{"frames", proxy, nil, false},
		{"a WebSocket", proxy, []string{"-i"}, false},
		{"a terminal", d.Socket, []string{"-it"}, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cmd := command(t, tc.socket, tc.flags, s, traps)
			out := startCommand(t, cmd, tc.terminal)
			expectLine(t, out, "ready")
			for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGTERM} {
				if err := cmd.Process.Signal(sig); err != nil {
					t.Fatal(err)
				}
				expectLine(t, out, unix.SignalName(sig))
			}
			_ = cmd.Wait()
			if code := cmd.ProcessState.ExitCode(); code != 9 {
				t.Errorf("exit %d", code)
			}
		})
	}
}

// startCommand starts a command, with a terminal or without, and returns its output.
func startCommand(t *testing.T, cmd *exec.Cmd, terminal bool) *bufio.Reader {
	t.Helper()
	r, w, err := os.Pipe()
	if terminal {
		r, w = openPTY(t)
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	} else {
		in, inWriter, perr := os.Pipe()
		if perr != nil {
			t.Fatal(perr)
		}
		t.Cleanup(func() { _, _ = in.Close(), inWriter.Close() })
		cmd.Stdin = in
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	cmd.Stdout, cmd.Stderr = w, w
	if terminal {
		cmd.Stdin = w
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = w.Close()
	return bufio.NewReader(r)
}

// expectLine reads lines until one is text.
func expectLine(t *testing.T, r *bufio.Reader, text string) {
	t.Helper()
	for {
		line, err := r.ReadString('\n')
		if strings.TrimSpace(line) == text {
			return
		}
		if err != nil {
			t.Fatalf("%q does not come: %v", text, err)
		}
	}
}

// A command whose output is not read ends at the first SIGTERM, as on the host.
func TestStalledReaderEndsBySignal(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	cmd := command(t, d.Socket, nil, s, "echo x; while :; do echo y; done")
	cmd.Stdout = w
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = w.Close()
	if _, err := r.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // r is open, and full
	if code := cmd.ProcessState.ExitCode(); code != 143 {
		t.Errorf("exit %d", code)
	}
	none(t, d.Client(t), s)
}

// A signal that the program handles costs none of its output, and the exit code is the program's,
// although our reader's pipe is full when the program ends.
func TestSignalLosesNoOutput(t *testing.T) {
	testenv.SameForAll(t)
	testenv.Heed(syscall.SIGHUP)
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	const size = 100_000 // more than our reader's pipe holds, and less than both do
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	cmd := command(t, d.Socket, nil, s, fmt.Sprintf("trap 'head -c %d /dev/zero; exit 5' HUP; echo $$; while :; do sleep 0.01; done", size))
	cmd.Stdout = w
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = w.Close()
	out := bufio.NewReader(r)
	pid, err := out.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	s.Sh(t, "while [ -d /proc/"+strings.TrimSpace(pid)+" ]; do :; done")
	n, err := io.Copy(io.Discard, out)
	_ = cmd.Wait() // the exit code says it
	if code := cmd.ProcessState.ExitCode(); n != size || code != 5 || err != nil {
		t.Errorf("%d bytes, exit %d, %v", n, code, err)
	}
}
