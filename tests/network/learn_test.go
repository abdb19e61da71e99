package network

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/tests/harness"
)

// A policy that was learned from a run allows another run of the program, and nothing else.
func TestLearnedFromARun(t *testing.T) {
	with(t, alike(), func(t *testing.T, w *world, d *harness.Daemon) {
		t.Helper()
		site(t, w, nil)
		dir, err := os.MkdirTemp("/tmp", "sandboxd-learn") //nolint:usetesting // other users cannot search t.TempDir
		if err != nil {
			t.Fatal(err)
		}
		defer os.RemoveAll(dir)
		if err := os.Chmod(dir, 0o777); err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(dir, "policy.yaml")
		const program = "curl -sSk -o /dev/null https://site.test/; curl -sS -o /dev/null http://site.test:8080/; exit 7"
		learned := d.CLI(t, "run", "--learn="+file, "--", "sh", "-c", program)
		doc, err := os.ReadFile(file)
		if learned.Code != 7 || err != nil {
			t.Fatalf("%+v, %v", learned, err)
		}
		for _, want := range []string{"allow: site.test", "443", "8080"} {
			if !strings.Contains(string(doc), want) {
				t.Errorf("the policy lacks %q:\n%s", want, doc)
			}
		}
		again := d.CLI(t, "run", "--network", "egress:"+file, "--", "sh", "-c", program)
		if again.Code != 7 || again.Stdout != "" || again.Stderr != "" {
			t.Errorf("below the policy: %+v", again)
		}
		if other := d.CLI(t, "run", "--network", "egress:"+file, "--", "curl", "-sSk", "https://site.test:8443/"); other.Code == 0 {
			t.Errorf("what was not learned is allowed: %+v", other)
		}
		printed := d.CLI(t, "run", "--learn", "--", "sh", "-c", "true")
		if printed.Code != 0 || !strings.Contains(printed.Stderr, "rules: []") {
			t.Errorf("of a program without a connection: %+v", printed)
		}
	})
}
