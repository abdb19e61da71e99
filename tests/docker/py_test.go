package docker

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// TestDockerPy runs testdata/client.py with Debian's docker-py, unpacked: each of its checks prints
// a line.
func TestDockerPy(t *testing.T) {
	testenv.SameForAll(t)
	f := start(t)
	f.images(t)
	python := testenv.RequirePeer(t, "python3")
	if _, err := os.Stat("/usr/bin/python3"); err == nil {
		python = "/usr/bin/python3" // has Debian's packages
	}
	lib := harness.Unpacked(t)
	script, err := filepath.Abs("testdata/client.py")
	if err != nil {
		t.Fatal(err)
	}
	code, stdout, stderr := f.run(t, "", "env", "PYTHONDONTWRITEBYTECODE=1", "PYTHONPATH="+filepath.Join(lib, "usr/lib/python3/dist-packages"), python, script)
	if code != 0 {
		t.Fatalf("%d\n%s%s", code, stdout, stderr)
	}
	const checks = 50
	if n := strings.Count(stdout, "ok "); n < checks {
		t.Errorf("%d checks, want at least %d:\n%s", n, checks, stdout)
	}
}
