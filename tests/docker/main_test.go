// Package docker runs real clients of Docker against the Docker face of the built binaries.
package docker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// face is a daemon with a Docker face.
type face struct {
	*harness.Daemon

	socket string
	http   *http.Client
	bin    string // directory of Debian's docker
	home   string
	roots  string // directory below which the host's directories may be bound
}

const image = "tool:1" // has busybox

// start starts a daemon with a face, for the command line too.
func start(t *testing.T, args ...string) *face {
	t.Helper()
	f := serve(t, args...)
	f.bin = filepath.Join(harness.Unpacked(t), "usr", "bin")
	return f
}

// serve starts a daemon with a face, and with more arguments.
func serve(t *testing.T, args ...string) *face {
	t.Helper()
	testenv.RequireUserNS(t)
	roots := filepath.Join(t.TempDir(), "roots")
	if err := os.MkdirAll(filepath.Join(roots, "shared"), 0o755); err != nil {
		t.Fatal(err)
	}
	f := &face{roots: roots, home: t.TempDir()}
	f.Daemon = harness.Start(t, harness.Options{Args: append([]string{"--docker", "--mount-root", roots}, args...)})
	f.socket = filepath.Join(f.RuntimeDir, "docker.sock")
	f.http = &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", f.socket)
	}}}
	t.Cleanup(f.http.CloseIdleConnections)
	f.await(t)
	return f
}

// await waits until a face answers.
func (f *face) await(t *testing.T) {
	t.Helper()
	harness.Eventually(t, func() error {
		resp, err := f.http.Get("http://docker/_ping")
		if err != nil {
			return err
		}
		return resp.Body.Close()
	})
}

// images imports the image that the tests run, and gives it more names.
func (f *face) images(t *testing.T) {
	t.Helper()
	files := harness.Busybox(t)
	body := harness.Tar(t, files...)
	status, answer := f.do(t, "POST", "/images/create?fromSrc=-&repo=tool&tag=1&changes=CMD+%5B%22sh%22%5D", "application/x-tar", body)
	if status != http.StatusOK || !strings.Contains(answer, "sha256:") {
		t.Fatalf("import: %d %s", status, answer)
	}
}

// do sends a request and returns the status and the body of its answer.
func (f *face) do(t *testing.T, method, path, typ string, body []byte) (int, string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.HungAfter)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, "http://docker"+path, bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if typ != "" {
		req.Header.Set("Content-Type", typ)
	}
	resp, err := f.http.Do(req)
	if err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
	return resp.StatusCode, string(data)
}

// message checks the form of an error's document.
func message(t *testing.T, answer string) {
	t.Helper()
	var doc struct{ Message string }
	if err := json.Unmarshal([]byte(answer), &doc); err != nil || doc.Message == "" {
		t.Errorf("%q is no error of Docker: %v", answer, err)
	}
}

// post sends a document.
func (f *face) post(t *testing.T, path string, doc any) (int, string) {
	t.Helper()
	body, err := json.Marshal(doc)
	if err != nil {
		t.Fatal(err)
	}
	return f.do(t, "POST", path, "application/json", body)
}

// clients returns the command lines of Docker that there are: Debian's, and one that is installed.
// What a version of the client sends is the same for every user. So each version is tried by the
// ordinary user, and one of them by root beside it: the installed one, as Debian's is the oracle's.
func (f *face) clients(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{"debian": filepath.Join(f.bin, "docker")}
	if path, err := exec.LookPath("docker"); err == nil {
		all["installed"] = path
		if os.Getenv(testenv.SecondVariable) != "" {
			delete(all, "debian")
		}
	}
	return all
}

// run runs a program and returns its exit code and output.
func (f *face) run(t *testing.T, stdin string, argv ...string) (code int, stdout, stderr string) {
	t.Helper()
	code, stdout, stderr, err := program(t.Context(), f.socket, f.home, stdin, argv)
	if err != nil {
		t.Fatal(err)
	}
	return code, stdout, stderr
}

// program runs a client of the daemon at a socket, in a directory that is its home.
func program(ctx context.Context, socket, home, stdin string, argv []string) (code int, stdout, stderr string, err error) {
	ctx, cancel := context.WithTimeout(ctx, testenv.HungAfter) // it only ends what hangs
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + home, "DOCKER_HOST=unix://" + socket, "TMPDIR=" + os.TempDir(), "LC_ALL=C.UTF-8"}
	cmd.Dir, cmd.Stdin = home, strings.NewReader(stdin)
	var out, said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &said
	err = cmd.Run()
	if _, ok := errors.AsType[*exec.ExitError](err); err != nil && !ok || ctx.Err() != nil {
		return 0, "", "", fmt.Errorf("%q: %w %w\n%s%s", argv, err, ctx.Err(), &out, &said)
	}
	return cmd.ProcessState.ExitCode(), out.String(), said.String(), nil
}

// must runs docker's command line, which must succeed, and returns its output.
func (f *face) must(t *testing.T, docker string, args ...string) string {
	t.Helper()
	code, stdout, stderr := f.run(t, "", append([]string{docker}, args...)...)
	if code != 0 {
		t.Fatalf("docker %s: %d\n%s%s", strings.Join(args, " "), code, stdout, stderr)
	}
	return stdout
}

func config() v1.Config { return v1.Config{Cmd: []string{"sh"}, Env: []string{"PATH=/bin"}} }
