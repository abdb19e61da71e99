// Package cmdtest tests command lines: it runs the test's own binary as the command, against a fake
// daemon and on terminals.
package cmdtest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

// AsCommand is set in the environment of a test binary that [Command] runs as the command itself,
// so that no second build is needed and the race detector sees it.
const AsCommand = "SANDBOXD_TEST_AS_COMMAND"

// ShortDir returns a temporary directory whose path is short enough for a socket's address.
func ShortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "sbx") //nolint:usetesting // t.TempDir is too long for a socket's address
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// Command returns a command line of sandboxd to run against the daemon at the socket.
func Command(t *testing.T, socket string, args ...string) *exec.Cmd {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), testenv.HungAfter)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, exe, args...)
	home := t.TempDir()
	cmd.Env = append(surroundings(home), AsCommand+"=1", "SANDBOXD_SOCKET="+socket, "GOCOVERDIR="+home, "GORACE=atexit_sleep_ms=0")
	cmd.Dir = t.TempDir()
	return cmd
}

// surroundings are the variables that commands see.
func surroundings(home string) []string {
	return []string{"HOME=" + home, "TERM=vt52", "FROM_HERE=here"}
}

// Main runs the tests of a package that uses [Inline]. Its commands see the variables that those of
// [Command] see, and an empty home.
func Main(m *testing.M) (code int) {
	home, err := os.MkdirTemp("", "home")
	if err != nil {
		panic(err)
	}
	defer func() { _ = os.RemoveAll(home) }()
	for _, variable := range os.Environ() {
		name, _, _ := strings.Cut(variable, "=")
		if !slices.Contains([]string{"PATH", "TMPDIR", "LANG"}, name) && !strings.HasPrefix(name, "GO") && !strings.HasPrefix(name, "SANDBOXD_TEST_") {
			_ = os.Unsetenv(name)
		}
	}
	for _, variable := range surroundings(home) {
		name, value, _ := strings.Cut(variable, "=")
		if err := os.Setenv(name, value); err != nil {
			panic(err)
		}
	}
	return m.Run()
}

// Inline runs a command line in this process: run gets its streams and returns its exit code. The
// start of a raced program takes ten times the processor time of most commands. Command lines that
// need a working directory, variables, signals or a terminal of their own are for [Command].
func Inline(t *testing.T, stdin string, run func(ctx context.Context, stdin, stdout, stderr *os.File) int) Outcome {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.HungAfter)
	defer cancel()
	var ends [6]*os.File
	for i := 0; i < len(ends); i += 2 {
		var err error
		if ends[i], ends[i+1], err = os.Pipe(); err != nil {
			t.Fatal(err)
		}
	}
	var got Outcome
	var copies sync.WaitGroup
	copies.Go(func() {
		_, _ = io.WriteString(ends[1], stdin) // a command may end before it has read all
		_ = ends[1].Close()
	})
	for _, out := range []struct {
		from *os.File
		to   *string
	}{{ends[2], &got.Stdout}, {ends[4], &got.Stderr}} {
		copies.Go(func() {
			data, err := io.ReadAll(out.from)
			if *out.to = string(data); err != nil {
				t.Error(err)
			}
		})
	}
	got.Code = run(ctx, ends[0], ends[3], ends[5])
	for _, end := range []*os.File{ends[0], ends[3], ends[5]} {
		_ = end.Close()
	}
	copies.Wait()
	_, _ = ends[2].Close(), ends[4].Close()
	return got
}

// Outcome holds the result of a command line. A stream that the test has redirected is empty.
type Outcome struct {
	Stdout, Stderr string
	Code           int
}

// Finish runs a command line to its end. Any exit code is an outcome; only a command that cannot
// run fails the test.
func Finish(t *testing.T, cmd *exec.Cmd) Outcome {
	t.Helper()
	var out, errs bytes.Buffer
	if cmd.Stdout == nil {
		cmd.Stdout = &out
	}
	cmd.Stderr = &errs
	err := cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); err != nil && !ok {
		t.Fatalf("%v: %v (%v)", cmd.Args, err, exit)
	}
	return Outcome{out.String(), errs.String(), cmd.ProcessState.ExitCode()}
}
