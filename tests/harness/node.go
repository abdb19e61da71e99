package harness

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

// Node returns the path of a node of version 20 or later, and the directory node_modules with the
// packages that clients/typescript is built with.
func Node(t testing.TB) (node, modules string) {
	t.Helper()
	dir := os.Getenv("SANDBOXD_TEST_NPM")
	if dir == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			t.Fatal(err)
		}
		dir = filepath.Join(cache, "sandboxd-tests", "npm")
		if out, err := exec.CommandContext(t.Context(), filepath.Join(Root(t), "hack", "npm.sh"), dir).CombinedOutput(); err != nil {
			t.Fatalf("fetch packages of npm: %v\n%s", err, out)
		}
	}
	node = filepath.Join(dir, "node", "node")
	if _, err := os.Stat(node); err != nil { // the installed one is new enough
		node = testenv.RequirePeer(t, "node")
	}
	return node, filepath.Join(dir, "node_modules")
}
