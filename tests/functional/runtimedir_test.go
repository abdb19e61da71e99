package functional

import (
	"crypto/sha256"
	"encoding/hex"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// A daemon that cannot start undoes its half-done start: no launcher waits for the next one, and
// its cgroup is gone.
func TestDaemonThatCannotStartLeavesNothing(t *testing.T) {
	dir, err := os.MkdirTemp("", "sbx") //nolint:usetesting // a socket's path has 108 bytes, and the launcher must be able to enter
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = harness.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	data, run := filepath.Join(dir, "data"), filepath.Join(dir, "run")
	// On a socket that cannot be made it fails last: the launcher is ready by then.
	out, err := exec.Command(harness.Program(t, "sandboxd"), "serve", "--data-dir", data, "--runtime-dir", run, "--socket", filepath.Join(dir, "none", "s")).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "launcher is ready") {
		t.Fatalf("%v:\n%s", err, out)
	}
	if conn, err := net.Dial("unixpacket", filepath.Join(run, "launcher.sock")); err == nil {
		_ = conn.Close()
		t.Errorf("its launcher still runs:\n%s", out)
	}
	sum := sha256.Sum256([]byte(data))
	name := "sandboxd-" + hex.EncodeToString(sum[:4])
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, e fs.DirEntry, err error) error { // others come and go meanwhile
		if err == nil && e.IsDir() && e.Name() == name {
			t.Errorf("%s is left", path)
		}
		return nil
	})
}

// Two daemons with data directories of their own and one runtime directory would share a launcher,
// which works in one of them. The second is refused, also where the first is dead and only its
// launcher is left.
func TestRuntimeDirectoryIsNotShared(t *testing.T) {
	d := start(t)
	second := func() string {
		t.Helper()
		dir := t.TempDir()
		out, err := exec.Command(harness.Program(t, "sandboxd"), "serve", "--runtime-dir", d.RuntimeDir,
			"--data-dir", filepath.Join(dir, "data"), "--socket", filepath.Join(dir, "s")).CombinedOutput()
		if err == nil {
			t.Errorf("a second daemon runs in %s:\n%s", d.RuntimeDir, out)
		}
		return string(out)
	}
	if said := second(); !strings.Contains(said, "lock "+d.RuntimeDir+": another sandboxd works there") {
		t.Errorf("beside the first: %s", said)
	}
	d.Kill9(t)
	if said := second(); !strings.Contains(said, "works on "+d.DataDir) {
		t.Errorf("after the first was killed: %s", said)
	}
	d.Launch(t)
}

// A daemon that comes back with another runtime directory does not find the launcher, whose
// sandboxes it would sweep away with one of its own: it is refused and told where to look.
func TestLauncherIsAloneOnItsData(t *testing.T) {
	d := start(t)
	s := d.Create(t, api.CreateSandbox{})
	d.Kill9(t)
	other := filepath.Join(t.TempDir(), "run")
	out, err := exec.Command(harness.Program(t, "sandboxd"), "serve", "--runtime-dir", other,
		"--data-dir", d.DataDir, "--socket", filepath.Join(other, "s")).CombinedOutput()
	if want := "was started with --runtime-dir " + d.RuntimeDir + ":"; err == nil || !strings.Contains(string(out), want) {
		t.Errorf("beside the first one's launcher: %v\n%s", err, out)
	}
	d.Launch(t)
	if got := s.Sh(t, "echo alive"); got != "alive\n" {
		t.Errorf("the sandbox, adopted, says %q", got)
	}
}
