package functional

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// Two daemons with data directories of their own and one runtime directory would share a launcher, which works in one of
// them. The second is refused, also where the first is dead and only its launcher is left.
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

// A daemon that comes back with another runtime directory does not find the launcher, whose sandboxes it would sweep away
// with one of its own: it is refused and told where to look.
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
