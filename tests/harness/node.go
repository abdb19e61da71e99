package harness

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

// npm returns the directory of what hack/npm.sh installs.
func npm(t testing.TB) string {
	t.Helper()
	if dir := os.Getenv("SANDBOXD_TEST_NPM"); dir != "" {
		return dir
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(cache, "sandboxd-tests", "npm")
	if out, err := exec.CommandContext(t.Context(), filepath.Join(Root(t), "hack", "npm.sh"), dir).CombinedOutput(); err != nil {
		t.Fatalf("install npm packages: %v\n%s", err, out)
	}
	return dir
}

// Node returns the path of a node of version 20 or later.
func Node(t testing.TB) string {
	t.Helper()
	node := filepath.Join(npm(t), "node", "node")
	if _, err := os.Stat(node); err != nil { // the installed one is new enough
		node = testenv.RequirePeer(t, "node")
	}
	return node
}

// NodeModules returns the directory of the npm packages of a project: docker, mcpclients or
// typescript, as hack/npm.sh names them.
func NodeModules(t testing.TB, project string) string {
	t.Helper()
	return filepath.Join(npm(t), project, "node_modules")
}
