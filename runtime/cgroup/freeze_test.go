package cgroup

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

// A frozen process stands still until it is thawed, and can be killed.
func TestFreeze(t *testing.T) {
	testenv.RequireRoot(t)
	at, err := find("self")
	if err != nil {
		t.Fatal(err)
	}
	if at.mount == "" {
		t.Skip("cgroup v2 is not mounted")
	}
	dir, err := os.MkdirTemp(at.mount, "sandboxd-test-freeze-") //nolint:usetesting // a cgroup
	if errors.Is(err, unix.EROFS) {
		t.Skip("cgroup v2 is mounted read-only")
	} else if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), testenv.HungAfter)
		defer cancel()
		if err := Remove(ctx, dir); err != nil {
			t.Error(err)
		}
	})
	cmd := exec.CommandContext(t.Context(), "cat")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }() // it may have ended
	if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(cmd.Process.Pid)), 0); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), testenv.HungAfter)
	defer cancel()
	if err := Freeze(ctx, dir); err != nil {
		t.Fatal(err)
	}
	if events, err := os.ReadFile(filepath.Join(dir, "cgroup.events")); err != nil || !strings.Contains(string(events), "frozen 1") {
		t.Errorf("after freezing: %s, %v", events, err)
	}
	// An answer would have come in that time.
	if _, err := in.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	pipe := out.(*os.File)
	if err := pipe.SetReadDeadline(time.Now().Add(100 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if _, err := pipe.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a frozen process answers: %v", err)
	}
	if err := Thaw(dir); err != nil {
		t.Fatal(err)
	}
	if err := pipe.SetReadDeadline(time.Now().Add(testenv.HungAfter)); err != nil {
		t.Fatal(err)
	}
	if _, err := pipe.Read(make([]byte, 1)); err != nil {
		t.Errorf("a thawed process does not answer: %v", err)
	}
	if err := Freeze(ctx, dir); err != nil { // for the cleanup to end it so
		t.Fatal(err)
	}
	gone := filepath.Join(at.mount, "sandboxd-test-none")
	if err := Freeze(ctx, gone); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("freeze what is not there: %v", err)
	}
	if err := Thaw(gone); err != nil {
		t.Errorf("thaw what is gone: %v", err)
	}
}
