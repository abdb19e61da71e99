package harness

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Podman makes directories of its own for a rootless podman, a peer, and returns the environment
// to run it in. With the test they are removed, and the process that podman leaves to hold its
// user namespace is ended.
func Podman(t testing.TB) (env []string, home, run string) {
	t.Helper()
	home = t.TempDir()
	// podman allows 50 characters, in a directory that every user may write.
	run, err := os.MkdirTemp("/tmp", "bench") //nolint:usetesting // see above
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		defer func() {
			// Of subordinate ids, so that TempDir cannot do it.
			if err := errors.Join(RemoveAll(home), RemoveAll(run)); err != nil {
				t.Error(err)
			}
		}()
		// It is ours, as the run directory is.
		data, err := os.ReadFile(filepath.Join(run, "libpod", "tmp", "pause.pid"))
		if err != nil {
			return
		}
		if pid, err := strconv.Atoi(strings.TrimSpace(string(data))); err == nil {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
	})
	return []string{"PATH=" + os.Getenv("PATH"), "HOME=" + home, "XDG_RUNTIME_DIR=" + run, "TMPDIR=" + home}, home, run
}
