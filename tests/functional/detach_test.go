package functional

import (
	"bufio"
	"os/exec"
	"syscall"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// The detach keys end attach and leave the program alone; keys that only begin the sequence reach
// the program.
func TestDetachKeys(t *testing.T) {
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
