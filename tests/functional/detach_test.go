package functional

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// The detach keys end attach and leave the program alone; keys that only begin the sequence reach
// the program.
func TestDetachKeys(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	c := client.New(d.Socket)
	defer c.Close()
	for name, tc := range map[string]struct {
		env, flags []string
		broken     string // keys that begin the sequence, and others
		want       string // what the program sees of them
		keys       string
	}{
		"default":     {nil, nil, "\x10a\n", "020 141 012", "\x10\x11"},
		"a flag":      {[]string{"SANDBOXD_DETACH_KEYS=z"}, []string{"--detach-keys", "ctrl-x,y"}, "\x18z\n", "030 172 012", "\x18y"},
		"environment": {[]string{"SANDBOXD_DETACH_KEYS=~,."}, nil, "~~\n", "176 176 012", "~."},
	} {
		t.Run(name, func(t *testing.T) {
			x, err := c.Detach(t.Context(), s.ID, api.ExecRequest{
				Argv: []string{"sh", "-c", "stty -echo; echo ready; head -c 3 | od -An -to1; echo; exec cat"}, TTY: true, StdinOpen: true,
			})
			if err != nil {
				t.Fatal(err)
			}
			attach := func() *exec.Cmd {
				cmd := exec.CommandContext(t.Context(), harness.Program(t, "sandboxd"), append(append([]string{"--socket", d.Socket, "attach", "-i"}, tc.flags...), s.ID, x.ID)...)
				cmd.Env = append(cmd.Environ(), tc.env...)
				cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
				return cmd
			}
			master, slave := openPTY(t)
			cmd := attach()
			cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			out := bufio.NewReader(master)
			expectLine(t, out, "ready")
			if _, err := master.WriteString(tc.broken); err != nil {
				t.Fatal(err)
			}
			expectLine(t, out, tc.want)
			if _, err := master.WriteString(tc.keys); err != nil {
				t.Fatal(err)
			}
			if err := cmd.Wait(); err != nil {
				t.Errorf("after the keys: %v", err)
			}
			got, err := c.GetExec(t.Context(), s.ID, x.ID)
			if err != nil || got.State != api.ExecRunning {
				t.Errorf("the program: %+v, %v", got, err)
			}
			if err := c.DeleteExec(t.Context(), s.ID, x.ID); err != nil {
				t.Error(err)
			}
		})
	}
}

// onTerminal starts a command on a terminal of its own.
func onTerminal(t *testing.T, d *harness.Daemon, args ...string) (cmd *exec.Cmd, master *os.File, out *bufio.Reader) {
	t.Helper()
	master, slave := openPTY(t)
	cmd = exec.CommandContext(t.Context(), harness.Program(t, "sandboxd"), append([]string{"--socket", d.Socket}, args...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd, master, bufio.NewReader(master)
}

func typed(t *testing.T, master *os.File, keys string) {
	t.Helper()
	if _, err := master.WriteString(keys); err != nil {
		t.Fatal(err)
	}
}

// twoLines shows three bytes of its input, then ends with 7 when it has read two certain lines.
const twoLines = `stty -echo; echo ready; head -c 3 | od -An -to1; read x; read y; [ "$x$y" = firstsecond ] && exit 7`

// endWith types the second line of twoLines as another client.
func endWith(ctx context.Context, t *testing.T, c *client.Client, sandbox, exec string) {
	t.Helper()
	end, err := c.Attach(ctx, sandbox, exec, 0, client.Streams{Stdin: strings.NewReader("second\n")}, nil)
	if err != nil || end.Exit.Code != 7 {
		t.Errorf("the end of the program: %+v, %v", end, err)
	}
}

// The detach keys leave the program of run -it: its sandbox stays, with the program as its main
// process, and nothing that was typed is lost. Keys that only begin the sequence reach the program.
func TestDetachKeysOfRun(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	c := d.Client(t)
	for name, tc := range map[string]struct {
		flags        []string
		broken, want string
		keys         string
		removed      bool // at its end
	}{
		"default":   {nil, "\x10a\n", "020 141 012", "\x10\x11", false},
		"a flag":    {[]string{"--detach-keys", "ctrl-x,y"}, "\x18z\n", "030 172 012", "\x18y", false},
		"rm":        {[]string{"--rm"}, "\x10a\n", "020 141 012", "\x10\x11", true},
		"keep":      {[]string{"--keep"}, "\x10a\n", "020 141 012", "\x10\x11", false},
		"a timeout": {[]string{"--timeout", "1h"}, "\x10a\n", "020 141 012", "\x10\x11", false},
	} {
		t.Run(name, func(t *testing.T) {
			id := "left-" + strings.ReplaceAll(name, " ", "-")
			args := append([]string{"run", "-it", "--name", id}, tc.flags...)
			cmd, master, out := onTerminal(t, d, append(args, "--", "sh", "-c", twoLines)...)
			expectLine(t, out, "ready")
			typed(t, master, tc.broken)
			expectLine(t, out, tc.want)
			typed(t, master, "first\n"+tc.keys)
			if err := cmd.Wait(); err != nil {
				t.Errorf("after the keys: %v", err)
			}
			x, err := c.GetExec(t.Context(), id, api.MainExec)
			if err != nil || x.State != api.ExecRunning || !x.Main || !x.Detached {
				t.Fatalf("the program: %+v, %v", x, err)
			}
			sb, err := c.GetSandbox(t.Context(), id)
			if err != nil || sb.State != api.StateRunning || len(sb.Command) != 3 || !sb.TTY || !sb.StdinOpen {
				t.Fatalf("the sandbox: %+v, %v", sb, err)
			}
			endWith(t.Context(), t, c, id, api.MainExec)
			if tc.removed {
				deleted(t, c, id)
				return
			}
			if sb, err = c.WaitSandbox(t.Context(), id); err != nil || sb.State != api.StateStopped || sb.Exit == nil || sb.Exit.Code != 7 {
				t.Errorf("the sandbox at its end: %+v, %v", sb, err)
			}
			if err := c.DeleteSandbox(t.Context(), id); err != nil {
				t.Error(err)
			}
		})
	}
}

// Without keys, they reach the program, and nothing is left of the sandbox.
func TestDetachKeysNone(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	c := d.Client(t)
	cmd, master, out := onTerminal(t, d, "run", "-it", "--detach-keys", "none", "--name", "keyless", "--", "sh", "-c", "stty -echo -ixon; echo ready; head -c 3 | od -An -to1")
	expectLine(t, out, "ready")
	typed(t, master, "\x10\x11\n")
	expectLine(t, out, "020 021 012")
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	deleted(t, c, "keyless")
}

// A program of exec -it that was left is a detached exec. It and the main process of a run that was
// left outlive a daemon that is killed; a program that was not left has ended with its client.
func TestLeftProgramsOutliveTheDaemon(t *testing.T) {
	d := start(t)
	c := d.Client(t)
	s := d.Create(t, api.CreateSandbox{Name: "work"})
	leave := func(args ...string) {
		t.Helper()
		cmd, master, out := onTerminal(t, d, append(args, "sh", "-c", twoLines)...)
		expectLine(t, out, "ready")
		typed(t, master, "\x10a\n")
		expectLine(t, out, "020 141 012")
		typed(t, master, "first\n\x10\x11")
		if err := cmd.Wait(); err != nil {
			t.Errorf("after the keys: %v", err)
		}
	}
	leave("exec", "-it", "work")
	leave("run", "-it", "--name", "left", "--")
	killed, _, out := onTerminal(t, d, "exec", "-it", "work", "sh", "-c", "echo ready; exec sleep 600")
	expectLine(t, out, "ready")
	if err := killed.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = killed.Wait()
	var execs []api.Exec
	harness.Eventually(t, func() (err error) {
		if execs, err = c.ListExecs(t.Context(), "work"); err == nil && len(execs) != 1 {
			err = fmt.Errorf("%d execs: %+v", len(execs), execs)
		}
		return err
	})
	if x := execs[0]; !x.Detached || x.Main || x.State != api.ExecRunning {
		t.Errorf("%+v", x)
	}
	d.Kill9(t)
	d.Launch(t)
	c = d.Client(t)
	endWith(t.Context(), t, c, s.ID, execs[0].ID)
	endWith(t.Context(), t, c, "left", api.MainExec)
	if sb, err := c.WaitSandbox(t.Context(), "left"); err != nil || sb.Exit == nil || sb.Exit.Code != 7 {
		t.Errorf("%+v, %v", sb, err)
	}
}
