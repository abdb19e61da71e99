package mcpclients

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/sandboxd/sandboxd/internal/relay"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// checks is the number of checks in testdata/client.mjs.
const checks = 34

func passed(t *testing.T, out string, err error) {
	t.Helper()
	if n := strings.Count(out, "ok "); err != nil || n != checks || !strings.HasSuffix(out, "done\n") {
		t.Fatalf("%d checks, want %d: %v\n%s", n, checks, err, out)
	}
}

// The protocol's TypeScript SDK is an unmodified client: testdata/client.mjs.
func TestTypeScriptOverStdio(t *testing.T) {
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
	d := serve(t)
	f := listen(t, d)
	out, err := node(t, packages(t), []string{"NETWORK=none"}, "client.mjs", "http", f.url, f.token)
	passed(t, out, err)
	empty(t, d.Client(t))
	noSnapshots(t, d.Client(t))
}

// A client that is killed leaves nothing behind, over stdio at once.
func TestKilledClientLeavesNothing(t *testing.T) {
	d := serve(t)
	out, err := node(t, packages(t), []string{"NETWORK=none", "LEAVE=kill"}, append([]string{"client.mjs", "stdio"}, arguments(t, d)...)...)
	if exit, ok := errors.AsType[*exec.ExitError](err); !ok || exit.ExitCode() != -1 || !strings.Contains(out, "left ") {
		t.Fatalf("%v\n%s", err, out)
	}
	empty(t, d.Client(t))
}

// The protocol's own conformance suite, by an unmodified copy. It has no token: the test passes its
// connections on to the Unix socket, where none is needed. Most scenarios call tools, prompts and
// resources of a server that is made for the suite, and cannot pass anywhere else.
func TestConformance(t *testing.T) {
	d := serve(t)
	f := listen(t, d)
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
			passing.Go(func() { pass(t.Context(), c, f.socket) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		passing.Wait()
	})
	dir := packages(t)
	out, err := node(t, dir, nil, "node_modules/@modelcontextprotocol/conformance/dist/index.js",
		"server", "--url", "http://"+l.Addr().String()+"/mcp", "--expected-failures", "conformance.yml")
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, scenario := range []string{"server-initialize", "ping", "tools-list", "server-sse-multiple-streams", "resources-list", "dns-rebinding-protection"} {
		if !strings.Contains(out, "✓ "+scenario+":") {
			t.Errorf("%s has not passed:\n%s", scenario, out)
		}
	}
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
