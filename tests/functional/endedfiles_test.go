package functional

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// Files of a sandbox that has ended are copied out, its image's and its own. Nothing of the copy is
// left or seen, and nothing is copied in.
func TestFilesOfEndedSandboxes(t *testing.T) {
	d := harness.Start(t, harness.Options{})
	s := d.Create(t, api.CreateSandbox{Name: "ended", Command: []string{"sh", "-c", "mkdir -p /srv/d/e; echo own >/srv/d/e/f; ln -s e /srv/d/l; rm -rf /etc/alternatives; exit 4"}})
	s.WaitState(t, api.StateStopped)
	before := d.Snapshot(t)
	dir := t.TempDir()
	check := func(when string) {
		t.Helper()
		out := filepath.Join(dir, when)
		if got := d.CLI(t, "cp", "ended:/srv/d", out); got.Code != 0 {
			t.Fatalf("%s: %+v", when, got)
		}
		data, err := os.ReadFile(filepath.Join(out, "l", "f"))
		if err != nil || string(data) != "own\n" {
			t.Errorf("%s: %q, %v", when, data, err)
		}
		if got := d.CLI(t, "cp", "ended:/etc/passwd", filepath.Join(dir, when+".passwd")); got.Code != 0 {
			t.Errorf("%s: a file of the image: %+v", when, got)
		}
		if got := d.CLI(t, "cp", "ended:/srv/d/e", "-"); got.Code != 0 || !strings.Contains(got.Stdout, "own\n") {
			t.Errorf("%s: %d, %s", when, got.Code, got.Stderr)
		}
		if got := d.CLI(t, "cp", "ended:/etc/alternatives", out); got.Code == 0 || !strings.Contains(got.Stderr, "/etc/alternatives") {
			t.Errorf("%s: what it has removed: %+v", when, got)
		}
	}
	check("stopped")
	if got := d.CLI(t, "cp", dir, "ended:/srv"); got.Code == 0 || !strings.Contains(got.Stderr, "sandboxd start --idle ended") {
		t.Errorf("into it: %+v", got)
	}
	d.NothingLeaked(t, before)
	d.Kill9(t)
	d.Launch(t)
	check("after a crash")
	if all := d.List(t); len(all) != 1 || all[0].State != api.StateStopped || all[0].Exit == nil || all[0].Exit.Code != 4 {
		t.Errorf("%+v", all)
	}
	told := strings.Fields(d.CLI(t, "events", "--no-follow", "--since", "1h", "--format", "{{.Type}}-{{.Action}}").Stdout)
	if diff := cmp.Diff([]string{"sandbox-created", "exec-started", "exec-ended", "sandbox-stopped"}, told); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
	var df api.DiskUsage
	if err := d.Call(t.Context(), "GET", "/v1/system/df", nil, &df); err != nil || df.Snapshots.Bytes != 0 {
		t.Errorf("%+v, %v", df.Snapshots, err)
	}
	// A paused one is left alone.
	p := d.Create(t, api.CreateSandbox{Name: "paused"})
	p.MustTurn(t, "pause", nil, api.StatePaused)
	if got := d.CLI(t, "cp", "paused:/etc/passwd", dir); got.Code == 0 || !strings.Contains(got.Stderr, "paused") {
		t.Errorf("of a paused one: %+v", got)
	}
}
