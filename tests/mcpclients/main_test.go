// Package mcpclients runs real clients of the Model Context Protocol, and hostile ones, against the
// built binaries.
package mcpclients

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// packages returns a copy of testdata with the npm packages of its lock file.
func packages(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	err := os.CopyFS(dir, os.DirFS("testdata"))
	if err = errors.Join(err, os.Symlink(harness.NodeModules(t, "mcpclients"), filepath.Join(dir, "node_modules"))); err != nil {
		t.Fatal(err)
	}
	return dir
}

// serve starts a daemon.
func serve(t *testing.T) *harness.Daemon {
	t.Helper()
	testenv.RequireUserNS(t)
	return harness.Start(t, harness.Options{})
}

// arguments returns the command line of a face of the daemon.
func arguments(t *testing.T, d *harness.Daemon, args ...string) []string {
	t.Helper()
	return append([]string{harness.Program(t, "sandboxd"), "mcp", "--socket", d.Socket}, args...)
}

// node runs a script of testdata and returns its output.
func node(t *testing.T, dir string, env []string, args ...string) (out string, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.HungAfter) // it only ends what hangs
	defer cancel()
	cmd := exec.CommandContext(ctx, harness.Node(t), args...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), env...)
	var both bytes.Buffer
	cmd.Stdout, cmd.Stderr = &both, &both
	err = cmd.Run()
	return both.String(), errors.Join(err, ctx.Err())
}

// empty waits until the daemon has no sandbox.
func empty(t *testing.T, c *client.Client) {
	t.Helper()
	ctx := context.WithoutCancel(t.Context()) // also at the test's end
	harness.Eventually(t, func() error {
		all, err := c.ListSandboxes(ctx, client.ListOptions{})
		if err == nil && len(all) > 0 {
			err = fmt.Errorf("there are %d sandboxes", len(all))
		}
		return err
	})
}

// noSnapshots fails the test if a snapshot is left.
func noSnapshots(t *testing.T, c *client.Client) {
	t.Helper()
	all, err := c.Snapshots(t.Context(), "")
	if err != nil || len(all) > 0 {
		t.Errorf("snapshots are left: %+v, %v", all, err)
	}
}

// raw is a face on stdin and stdout, whose client is the test.
type raw struct {
	t   *testing.T
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
	err bytes.Buffer
	n   int // id of the latest request
}

// start starts a face, and opens a session unless the test does.
func start(t *testing.T, d *harness.Daemon, args ...string) *raw {
	t.Helper()
	full := arguments(t, d, args...)
	r := &raw{t: t, cmd: exec.Command(full[0], full[1:]...)} // the test ends it
	harness.StartsNoDaemon(r.cmd)
	r.cmd.Env = append(os.Environ(), r.cmd.Env...)
	r.cmd.Stderr = &r.err
	var err error
	if r.in, err = r.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := r.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	r.out = bufio.NewReaderSize(out, 1<<20)
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.cmd.Process.Kill() }) // of a test that has failed
	return r
}

// answer is a message of the face.
type answer struct {
	ID     any             `json:"id"`
	Method string          `json:"method"`
	Result json.RawMessage `json:"result"`
	Error  *struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	} `json:"error"`
}

// toolResult is the result of a tool.
type toolResult struct {
	IsError           bool                    `json:"isError"`
	Content           []struct{ Text string } `json:"content"`
	StructuredContent map[string]any          `json:"structuredContent"`
}

// send writes a line.
func (r *raw) send(line string) {
	r.t.Helper()
	if _, err := io.WriteString(r.in, line+"\n"); err != nil {
		r.t.Fatalf("send: %v\n%s", err, &r.err)
	}
}

// receive reads a line.
func (r *raw) receive() (a answer) {
	r.t.Helper()
	line, err := r.out.ReadBytes('\n')
	if err != nil {
		r.t.Fatalf("receive: %v\n%s", err, &r.err)
	}
	if err := json.Unmarshal(line, &a); err != nil {
		r.t.Fatalf("%q: %v", line, err)
	}
	return a
}

// open opens a session.
func (r *raw) open() *raw {
	r.t.Helper()
	r.send(`{"jsonrpc":"2.0","id":"open","method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"raw","version":"1"}}}`)
	if a := r.receive(); a.Error != nil {
		r.t.Fatalf("initialize: %+v", a.Error)
	}
	r.send(`{"jsonrpc":"2.0","method":"notifications/initialized"}`)
	return r
}

// begin calls a tool.
func (r *raw) begin(name string, args any) {
	r.t.Helper()
	r.n++
	text, err := json.Marshal(map[string]any{"jsonrpc": "2.0", "id": r.n, "method": "tools/call", "params": map[string]any{"name": name, "arguments": args}})
	if err != nil {
		r.t.Fatal(err)
	}
	r.send(string(text))
}

// call calls a tool, which must succeed.
func (r *raw) call(name string, args any) map[string]any {
	r.t.Helper()
	r.begin(name, args)
	a := r.receive()
	var res toolResult
	if err := json.Unmarshal(a.Result, &res); err != nil || a.Error != nil || res.IsError {
		r.t.Fatalf("%s %v: %+v %s %v", name, args, a.Error, a.Result, err)
	}
	return res.StructuredContent
}

// ends waits for the face's end and returns its exit code.
func (r *raw) ends() int {
	r.t.Helper()
	_, _ = io.Copy(io.Discard, r.out)
	_ = r.cmd.Wait() // see the code
	if s := r.err.String(); strings.Contains(s, "panic") {
		r.t.Error(s)
	}
	return r.cmd.ProcessState.ExitCode()
}

// running reports whether a sandbox runs.
func running(t *testing.T, c *client.Client, id string) bool {
	t.Helper()
	sb, err := c.GetSandbox(t.Context(), id)
	return err == nil && sb.State == api.StateRunning
}
