package mcpclients

import (
	"context"
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

	"github.com/sandboxd/sandboxd/internal/relay"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/internal/unixmsg"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// checks is the number of checks in testdata/client.mjs.
const checks = 35

func passed(t *testing.T, out string, err error) {
	t.Helper()
	if n := strings.Count(out, "ok "); err != nil || n != checks || !strings.HasSuffix(out, "done\n") {
		t.Fatalf("%d checks, want %d: %v\n%s", n, checks, err, out)
	}
}

// The protocol's TypeScript SDK is an unmodified client: testdata/client.mjs.
func TestTypeScriptOverStdio(t *testing.T) {
	testenv.SameForAll(t)
	d := serve(t)
	for _, network := range []string{"none", "full"} {
		out, err := node(t, packages(t), []string{"NETWORK=" + network}, append([]string{"client.mjs", "stdio"}, arguments(t, d, "--network", network)...)...)
		passed(t, out, err)
		empty(t, d.Client(t))
		noSnapshots(t, d.Client(t))
	}
}

// face is one that serves HTTP.
type face struct {
	url, token, socket string

	cmd *exec.Cmd
}

// listen starts a face that serves a port and a Unix socket.
func listen(t *testing.T, d *harness.Daemon, args ...string) *face {
	t.Helper()
	f := &face{socket: filepath.Join(d.RuntimeDir, "m.sock")}
	full := arguments(t, d, append([]string{"--listen", "127.0.0.1:0", "--listen", "unix:" + f.socket}, args...)...)
	f.cmd = exec.Command(full[0], full[1:]...) // interrupted below
	harness.StartsNoDaemon(f.cmd)
	f.cmd.Env = append(os.Environ(), f.cmd.Env...)
	stderr, err := f.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := f.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = f.cmd.Process.Signal(os.Interrupt) // it may have ended
		_, _ = io.Copy(io.Discard, stderr)
		if err := f.cmd.Wait(); err != nil {
			t.Errorf("the face has ended with %v", err)
		}
		empty(t, d.Client(t))
	})
	var said strings.Builder
	one := make([]byte, 1)
	for strings.Count(said.String(), "\n") < 2 {
		if _, err := stderr.Read(one); err != nil {
			t.Fatalf("%v: %s", err, &said)
		}
		said.Write(one)
	}
	_, after, _ := strings.Cut(said.String(), "served at http")
	url, _, _ := strings.Cut(after, "\n")
	f.url = "http" + url
	token, err := os.ReadFile(filepath.Join(d.RuntimeDir, "mcp.token"))
	if err != nil {
		t.Fatal(err)
	}
	f.token = strings.TrimSpace(string(token))
	return f
}

func TestTypeScriptOverHTTP(t *testing.T) {
	testenv.SameForAll(t)
	d := serve(t)
	f := listen(t, d)
	out, err := node(t, packages(t), []string{"NETWORK=none"}, "client.mjs", "http", f.url, f.token)
	passed(t, out, err)
	empty(t, d.Client(t))
	noSnapshots(t, d.Client(t))
}

// server returns the process that has made a socket, once it accepts connections. One that was
// killed does so for a moment, and does not count.
func server(t *testing.T, socket string, killed int) (pid int) {
	t.Helper()
	harness.Eventually(t, func() error {
		c, err := net.DialUnix("unix", nil, &net.UnixAddr{Net: "unix", Name: socket})
		if err != nil {
			return err
		}
		defer c.Close()
		if pid, err = unixmsg.PeerPID(c); err == nil && pid == killed {
			err = fmt.Errorf("process %d still serves", killed)
		}
		return err
	})
	return pid
}

// The daemon serves MCP on a socket beside its own, by a confined process that it replaces, and
// which ends with it.
func TestDaemonServesMCP(t *testing.T) {
	testenv.RequireUserNS(t)
	d := harness.Start(t, harness.Options{Args: []string{"--mcp", "--mcp-flag", "env=GIVEN=by the operator", "--mcp-flag", "listen=127.0.0.1:0"}})
	c, socket := d.Client(t), filepath.Join(d.RuntimeDir, "mcp.sock")
	face := server(t, socket, 0)
	url := forward(t, socket)
	info, err := c.System(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	out, err := node(t, packages(t), []string{"NETWORK=none", "GIVEN=by the operator", "VERSION=" + info.Version}, "client.mjs", "http", url, "no token")
	passed(t, out, err)
	isConfined(t, face) // since before its first answer
	if line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", face)); err != nil || strings.Contains(string(line), "operator") {
		t.Errorf("other users see %q, %v", line, err)
	}
	empty(t, c)
	if token, err := os.ReadFile(filepath.Join(d.RuntimeDir, "mcp.token")); err != nil || len(token) < 20 {
		t.Errorf("the token of the port: %q, %v", token, err)
	}
	out, err = node(t, packages(t), []string{"NETWORK=none", "GIVEN=by the operator", "LEAVE=yes"}, "client.mjs", "http", url, "no token")
	if err == nil || !strings.Contains(out, "left ") {
		t.Fatalf("%v\n%s", err, out)
	}
	if err := syscall.Kill(face, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	empty(t, c)
	again := server(t, socket, face)
	for _, args := range [][]string{{"--mcp", "--mcp-flag", "nothing=1"}, {"--mcp", "--mcp-flag", "listen=0.0.0.0:1"}, {"--mcp", "--mcp-flag", "memory=much"}, {"--mcp-flag", "memory=1g"}} {
		if r := d.CLI(t, append([]string{"serve", "--data-dir", t.TempDir()}, args...)...); r.Code != 2 || !strings.Contains(r.Stderr, "--mcp-flag") {
			t.Errorf("%v: %+v", args, r)
		}
	}
	d.Kill9(t)
	harness.Eventually(t, func() error {
		// A process that has ended has no command line, also before it is waited for.
		if line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", again)); err == nil && len(line) > 0 {
			return fmt.Errorf("process %d outlives its daemon: %q", again, line)
		}
		return nil
	})
}

// The process that serves MCP does not keep its daemon from ending when it is idle.
func TestDaemonWithMCPEndsWhenIdle(t *testing.T) {
	testenv.SameForAll(t)
	d := serve(t)
	r := d.CLI(t, "serve", "--socket", d.RuntimeDir+"2/api.sock", "--data-dir", d.DataDir+"2", "--runtime-dir", d.RuntimeDir+"2", "--mcp", "--idle-exit", "1s")
	if r.Code != 0 {
		t.Errorf("%+v", r)
	}
}

// A client that is killed leaves nothing behind, over stdio at once.
func TestKilledClientLeavesNothing(t *testing.T) {
	testenv.SameForAll(t)
	d := serve(t)
	out, err := node(t, packages(t), []string{"NETWORK=none", "LEAVE=yes"}, append([]string{"client.mjs", "stdio"}, arguments(t, d)...)...)
	if exit, ok := errors.AsType[*exec.ExitError](err); !ok || exit.ExitCode() != -1 || !strings.Contains(out, "left ") {
		t.Fatalf("%v\n%s", err, out)
	}
	empty(t, d.Client(t))
}

// The protocol's own conformance suite, by an unmodified copy. It has no token: the test passes its
// connections on to the Unix socket, where none is needed. Most scenarios call tools, prompts and
// resources of a server that is made for the suite, and cannot pass anywhere else.
func TestConformance(t *testing.T) {
	testenv.SameForAll(t)
	d := serve(t)
	url := forward(t, listen(t, d).socket)
	out, err := node(t, packages(t), nil, "node_modules/@modelcontextprotocol/conformance/dist/index.js",
		"server", "--url", url, "--expected-failures", "conformance.yml")
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, scenario := range []string{"server-initialize", "ping", "tools-list", "server-sse-multiple-streams", "resources-list", "dns-rebinding-protection"} {
		if !strings.Contains(out, "✓ "+scenario+":") {
			t.Errorf("%s has not passed:\n%s", scenario, out)
		}
	}
}

// forward passes connections on to a Unix socket, for clients that have no URL of such a socket. It
// returns the URL to use.
func forward(t *testing.T, socket string) string {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var passing sync.WaitGroup
	passing.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			passing.Go(func() { pass(t.Context(), c, socket) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		passing.Wait()
	})
	return "http://" + l.Addr().String() + "/mcp"
}

// pass passes a connection on to a socket.
func pass(ctx context.Context, c net.Conn, socket string) {
	inside, err := net.Dial("unix", socket)
	if err != nil {
		_ = c.Close()
		return
	}
	relay.Both(ctx, c, inside)
}
