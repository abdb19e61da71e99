package httpapi_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/daemon/daemontest"
	"github.com/sandboxd/sandboxd/internal/service/servicetest"
)

// piping starts a daemon with a sandbox called "one".
func piping(t *testing.T) (*daemontest.Running, *client.Client) {
	t.Helper()
	b := daemontest.New(t, servicetest.RealInit(t))
	b.Options.RuntimeDir = shortDir(t) // the client dials the path as it is
	r := b.Start()
	c := client.New(r.D.Socket())
	t.Cleanup(c.Close)
	if _, err := c.CreateSandbox(t.Context(), api.CreateSandbox{Name: "one"}); err != nil {
		t.Fatal(err)
	}
	return r, c
}

func sh(script string) api.ExecRequest { return api.ExecRequest{Argv: []string{"sh", "-c", script}} }

// A program's pipes carry its output and stdin, and the connection its end.
func TestPipes(t *testing.T) {
	_, c := piping(t)
	req := sh("cat; echo bye >&2; exit 4")
	req.StdinOpen = true
	p, err := c.ExecPipes(t.Context(), "one", req)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	stdin := p.Stdin
	go func() {
		_, _ = stdin.WriteString("typed\xff")
		_ = stdin.Close()
	}()
	stdout, err := io.ReadAll(p.Stdout)
	stderr, err2 := io.ReadAll(p.Stderr)
	end, err3 := p.Wait()
	if err := errors.Join(err, err2, err3); err != nil || string(stdout) != "typed\xff" || string(stderr) != "bye\n" || end.Exit.Code != 4 {
		t.Errorf("%q, %q, %+v, %v", stdout, stderr, end, err)
	}
	if p.PID < 2 || p.ID == "" {
		t.Errorf("pid %d, exec %q", p.PID, p.ID)
	}

	// Without StdinOpen the request's stdin is fed.
	req = sh("cat")
	req.Stdin = []byte("given")
	p, err = c.ExecPipes(t.Context(), "one", req)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if stdout, err := io.ReadAll(p.Stdout); err != nil || string(stdout) != "given" || p.Stdin != nil {
		t.Errorf("%q, %v, %v", stdout, p.Stdin, err)
	}
	if end, err := p.Wait(); err != nil || end.Exit.Code != 0 {
		t.Errorf("%+v, %v", end, err)
	}
}

// A client that goes away ends the program, whoever still has its pipes.
func TestPipesOfGoneClient(t *testing.T) {
	_, c := piping(t)
	p, err := c.ExecPipes(t.Context(), "one", sh("sleep 1000 & sleep 1000"))
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	p.Kill()
	if got, err := io.ReadAll(p.Stdout); len(got) > 0 || err != nil { // returns when no process of the exec is left
		t.Errorf("%q, %v", got, err)
	}
	if end, err := p.Wait(); err == nil {
		t.Errorf("%+v", end)
	}
}

// A closed end is a broken pipe at once: the daemon has no copy of it.
func TestPipesBreak(t *testing.T) {
	_, c := piping(t)
	p, err := c.ExecPipes(t.Context(), "one", sh("while :; do echo x; done"))
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if _, err := p.Stdout.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	_ = p.Stdout.Close()
	if end, err := p.Wait(); err != nil || end.Exit.Signal != "SIGPIPE" {
		t.Errorf("%+v, %v", end, err)
	}
}

// Requests that can have no pipes start nothing, and the client may try another way.
func TestPipesRefused(t *testing.T) {
	r, c := piping(t)
	for name, req := range map[string]api.ExecRequest{
		"terminal":   {Argv: []string{"true"}, TTY: true},
		"detached":   {Argv: []string{"true"}, Detach: true},
		"two stdins": {Argv: []string{"true"}, Stdin: []byte("x"), StdinOpen: true},
		"no program": {},
	} {
		if p, err := c.ExecPipes(t.Context(), "one", req); p != nil || !errors.Is(err, client.ErrNoPipes) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := c.ExecPipes(t.Context(), "none", sh("true")); !errors.Is(err, client.ErrNoPipes) || !errors.Is(err, &api.Problem{Code: api.CodeNotFound}) {
		t.Errorf("no sandbox: %v", err)
	}
	if _, err := c.ExecPipes(t.Context(), "one", api.ExecRequest{Argv: []string{"nope"}}); errors.Is(err, client.ErrNoPipes) || !errors.Is(err, &api.Problem{Code: api.CodeProgramMissing}) {
		t.Errorf("no program: %v", err)
	}
	ours := os.Getpid()
	for query, upgrade := range map[string]string{
		"": api.UpgradePipes,
		fmt.Sprintf("?client=%d&daemon=%d", ours, ours+1): api.UpgradePipes,
		fmt.Sprintf("?client=%d&daemon=%d", ours+1, ours): api.UpgradePipes,
		fmt.Sprintf("?client=%d&daemon=%d", ours, ours):   "websocket",
		"?client=0&daemon=0":                              api.UpgradePipes,
		"?client=x&daemon=y&z=1":                          api.UpgradePipes,
	} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://sandboxd/v1/sandboxes/one/exec/pipes"+query, strings.NewReader(`{"argv":["true"]}`))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", api.TypeJSON)
		req.Header.Set("Connection", "Upgrade")
		req.Header.Set("Upgrade", upgrade)
		resp, err := r.HTTP.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusBadRequest {
			t.Errorf("%q, upgrade to %s: %s", query, upgrade, resp.Status)
		}
	}
}

// Descriptors that a client sends are closed by the kernel, of whatever kind and however many.
func TestDescriptorsOfClients(t *testing.T) {
	r, _ := piping(t)
	open := func(path string, flags int) int {
		fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		return fd
	}
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(p[0])
	many := make([]int, 150)
	for i := range many {
		many[i] = p[1]
	}
	directory, terminal := open("/", unix.O_RDONLY|unix.O_DIRECTORY), open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY)
	for _, fds := range [][]int{many, {directory}, {terminal}, {p[1]}} {
		c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: r.D.Socket(), Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		// With the head, in the middle of it, and with the next request.
		for _, part := range []string{"GET /healthz HTTP/1.1\r\n", "Host: sandboxd\r\n\r\n"} {
			if _, _, err := c.WriteMsgUnix([]byte(part), unix.UnixRights(fds...), nil); err != nil {
				t.Fatal(err)
			}
		}
		if _, _, err := c.WriteMsgUnix([]byte("GET /healthz HTTP/1.1\r\nHost: sandboxd\r\nConnection: close\r\n\r\n"), unix.UnixRights(fds...), nil); err != nil {
			t.Fatal(err)
		}
		answers, err := io.ReadAll(c)
		if err != nil || bytes.Count(answers, []byte("200 OK")) != 2 {
			t.Errorf("%d descriptors: %q, %v", len(fds), answers, err)
		}
		_ = c.Close()
	}
	for _, fd := range []int{directory, terminal, p[1]} {
		_ = unix.Close(fd)
	}
	// The daemon is this process: a writing end that it had kept would keep the pipe from ending.
	if n, err := unix.Read(p[0], make([]byte, 1)); n != 0 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
}

// Frames carry the bytes of both streams as they are.
func TestFrames(t *testing.T) {
	_, c := piping(t)
	var stdout, stderr bytes.Buffer
	req := sh(`cat; printf 'a\377\000'; printf '\303' >&2; head -c 300000 /dev/zero; exit 3`)
	req.Stdin = []byte("in")
	end, err := c.ExecOutput(t.Context(), "one", req, &stdout, &stderr)
	if want := "ina\xff\x00" + strings.Repeat("\x00", 300000); err != nil || end.Exit.Code != 3 || stdout.String() != want || stderr.String() != "\xc3" {
		t.Errorf("%+v, %v; %d bytes, %q", end, err, stdout.Len(), &stderr)
	}
	if end, err := c.ExecOutput(t.Context(), "one", sh("echo x; exit 1"), nil, nil); err != nil || end.Exit.Code != 1 {
		t.Errorf("%+v, %v", end, err)
	}
	if _, err := c.ExecOutput(t.Context(), "one", api.ExecRequest{Argv: []string{"nope"}}, nil, nil); !errors.Is(err, &api.Problem{Code: api.CodeProgramMissing}) {
		t.Error(err)
	}
	// A failing write ends the program.
	enough := errors.New("enough")
	broken, w := io.Pipe()
	_ = broken.CloseWithError(enough)
	if _, err := c.ExecOutput(t.Context(), "one", sh("while :; do echo x; done"), w, nil); !errors.Is(err, enough) {
		t.Error(err)
	}
}
