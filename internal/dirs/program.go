package dirs

import (
	"fmt"
	"os"
	"path/filepath"
)

// The names of the binaries of a build, which lie in one directory.
const (
	DaemonProgram   = "sandboxd"
	AgentProgram    = "sandboxd-agent"
	LauncherProgram = "sandboxd-launcher"
	InitProgram     = "sandboxd-init"
)

// Program returns the path of another binary of this build, which lies beside the running one.
func Program(name string) (string, error) {
	self, err := os.Executable()
	if err == nil {
		self, err = filepath.EvalSymlinks(self)
	}
	if err != nil {
		return "", fmt.Errorf("find own executable: %w", err)
	}
	path := filepath.Join(filepath.Dir(self), name)
	if _, err := os.Stat(path); err != nil {
		return path, fmt.Errorf("find %s: %w; it belongs beside %s (make build puts all binaries into bin/)", name, err, self)
	}
	return path, nil
}
