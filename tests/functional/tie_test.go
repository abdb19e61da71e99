package functional

import (
	"bufio"
	"errors"
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

// deleted waits until a sandbox does not exist any more.
func deleted(t *testing.T, c *client.Client, id string) {
	t.Helper()
	harness.Eventually(t, func() error {
		_, err := c.GetSandbox(t.Context(), id)
		if errors.Is(err, &api.Problem{Code: api.CodeNotFound}) {
			return nil
		}
		if err == nil {
			err = errors.New("the sandbox is still there")
		}
		return err
	})
}

// A command that is killed leaves no sandbox behind, whatever connects it to its program.
func TestRunKilledLeavesNothing(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	c := d.Client(t)
	proxy := throughProxy(t, d)
	for name, tc := range map[string]struct {
		socket string
		flags  []string
	}{
		"pipes":      {d.Socket, nil},
		"frames":     {proxy, nil},
		"a terminal": {d.Socket, []string{"-it"}},
	} {
		t.Run(name, func(t *testing.T) {
			id := "tied-" + strings.ReplaceAll(name, " ", "-")
			args := append([]string{"--socket", tc.socket, "run", "--name", id}, tc.flags...)
			cmd := exec.CommandContext(t.Context(), harness.Program(t, "sandboxd"), append(args, "--", "sh", "-c", "echo ready; trap '' HUP TERM; while :; do sleep 600; done")...)
			expectLine(t, startCommand(t, cmd, len(tc.flags) > 0), "ready")
			if _, err := c.GetSandbox(t.Context(), id); err != nil {
				t.Fatal(err)
			}
			if err := cmd.Process.Signal(syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			_ = cmd.Wait()
			deleted(t, c, id)
		})
	}
}

// With --detach and --keep the sandbox is nobody's but its own.
func TestRunKeptIsNotTied(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	c := d.Client(t)
	cmd := exec.CommandContext(t.Context(), harness.Program(t, "sandboxd"), "--socket", d.Socket, "run", "--keep", "--name", "kept-untied", "--", "sh", "-c", "echo ready; exec sleep 600")
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	expectLine(t, bufio.NewReader(out), "ready")
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	sb, err := c.GetSandbox(t.Context(), "kept-untied")
	if err != nil {
		t.Fatal(err)
	}
	none(t, c, &harness.Sandbox{Sandbox: *sb})
	if sb, err = c.GetSandbox(t.Context(), sb.ID); err != nil || sb.State != api.StateRunning {
		t.Errorf("%+v, %v", sb, err)
	}
	if err := c.DeleteSandbox(t.Context(), sb.ID); err != nil {
		t.Error(err)
	}
}

// The end of the daemon is not that of the client: neither a stop nor a crash deletes a tied
// sandbox.
func TestTieSurvivesTheDaemon(t *testing.T) {
	d := start(t)
	c := client.New(d.Socket)
	defer c.Close()
	for name, end := range map[string]func(){
		"a stop": func() {
			if err := d.Call(t.Context(), "POST", "/v1/system/shutdown", api.Shutdown{KeepSandboxes: true}, nil); err != nil {
				t.Fatal(err)
			}
			d.WaitExit(t)
		},
		"a crash": func() { d.Kill9(t) },
	} {
		sb, tie, err := c.CreateTied(t.Context(), api.CreateSandbox{})
		if err != nil {
			t.Fatal(err)
		}
		end()
		_ = tie.Close()
		d.Launch(t)
		got, err := c.GetSandbox(t.Context(), sb.ID)
		if err != nil || got.State != api.StateRunning {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
	sb, tie, err := c.CreateTied(t.Context(), api.CreateSandbox{})
	if err != nil {
		t.Fatal(err)
	}
	_ = tie.Close()
	deleted(t, c, sb.ID)
}
