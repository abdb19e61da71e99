// Package cmdtest tests command lines: it runs the test's own binary as the command, against a fake
// daemon and on terminals.
package cmdtest

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
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
	cmd.Env = []string{
		AsCommand + "=1", "SANDBOXD_SOCKET=" + socket, "HOME=" + home, "TERM=vt52", "FROM_HERE=here", "GOCOVERDIR=" + home,
		"GORACE=atexit_sleep_ms=0",
	}
	cmd.Dir = t.TempDir()
	return cmd
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
