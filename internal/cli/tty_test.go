package cli

import (
	"bytes"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline/cmdtest"
)

// run -it passes every key to the program, Ctrl-C included, follows the terminal's size, and
// restores the terminal.
func TestRunTerminal(t *testing.T) {
	master, slave := cmdtest.OpenPTY(t)
	cmdtest.Resize(t, master, 30, 100)
	before, err := unix.IoctlGetTermios(int(slave.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	f := cmdtest.New()
	cmd := cmdtest.Command(t, f.Start(t), "run", "-it", "--", "cat")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	s := cmdtest.Watch(master)
	<-f.Started
	type_ := func(keys string) {
		t.Helper()
		if _, err := master.WriteString(keys); err != nil {
			t.Fatal(err)
		}
	}
	type_("a\x03b\x04c")
	s.WaitFor(t, "a\x03b\x04c") // raw mode interprets nothing, and only the program echoes
	cmdtest.Resize(t, master, 31, 101)
	s.WaitFor(t, `{"resize":{"rows":31,"cols":101}}`)
	type_("q")
	_ = cmd.Wait()
	if got := cmd.ProcessState.ExitCode(); got != 7 {
		t.Errorf("exit %d, want 7", got)
	}
	f.Mu.Lock()
	defer f.Mu.Unlock()
	want := api.ExecRequest{Argv: []string{"cat"}, TTY: true, Rows: 30, Cols: 100, Env: []string{"TERM=vt52"}}
	if diff := cmp.Diff(want, f.Execs[0]); diff != "" {
		t.Errorf("request (-want +got):\n%s", diff)
	}
	if left := f.Left(); left != "" {
		t.Error(left)
	}
	after, err := unix.IoctlGetTermios(int(slave.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("terminal (-before +after):\n%s", diff)
	}
}

// A signal must not leave the user with a raw terminal.
func TestRunTerminalRestoredBySignal(t *testing.T) {
	master, slave := cmdtest.OpenPTY(t)
	before, err := unix.IoctlGetTermios(int(slave.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	f := cmdtest.New()
	cmd := cmdtest.Command(t, f.Start(t), "run", "-it", "--", "cat")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = cmdtest.Watch(master)
	<-f.Started
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if got := cmd.ProcessState.ExitCode(); got != 143 {
		t.Errorf("exit %d, want 143", got)
	}
	after, err := unix.IoctlGetTermios(int(slave.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("terminal (-before +after):\n%s", diff)
	}
}

// Progress is drawn in place on a terminal, and never more of it than fits.
func TestProgressOnTerminal(t *testing.T) {
	master, slave := cmdtest.OpenPTY(t)
	s := cmdtest.Watch(master)
	cmd := cmdtest.Command(t, cmdtest.New().Start(t), "pull", "debian:12")
	cmd.Stderr = slave
	var out bytes.Buffer
	cmd.Stdout = &out
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	s.WaitFor(t, "aabbccddeeff  downloading  [###############...............]  500B / 1kB")
	s.WaitFor(t, "\x1b[1A")
	s.WaitFor(t, "aabbccddeeff  done         [##############################]  1kB / 1kB")
	if out.String() != "debian:12 sha256:0123\n" {
		t.Errorf("stdout %q", out.String())
	}
}
