// Package dirs computes where sandboxd keeps its data and its sockets: a pure function of the user
// and of the XDG variables.
package dirs

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
)

// SocketName is the name of the API's socket in the runtime directory.
const SocketName = "api.sock"

// DockerSocketName is the name of the Docker face's socket there.
const DockerSocketName = "docker.sock"

// MCPSocketName is the name of the MCP face's socket there.
const MCPSocketName = "mcp.sock"

// Dirs are absolute paths. They need not exist yet.
type Dirs struct {
	Data    string // images, layers, sandboxes, state: survives a reboot
	Runtime string // sockets; may vanish at a reboot
}

// Socket returns the API's default socket.
func (d Dirs) Socket() string { return filepath.Join(d.Runtime, SocketName) }

// Log returns the log of a daemon that was started in the background.
func (d Dirs) Log() string { return filepath.Join(d.Data, "daemon.log") }

// Host holds the inputs of [Host.Find]. Tests fill it in; other code uses [Default].
type Host struct {
	UID    int
	Getenv func(string) string
	// Owner returns the uid that owns a directory. It does not follow a symbolic link at the end of
	// the path.
	Owner func(dir string) (uid int, err error)
}

// Default returns the directories of the calling process.
func Default() (Dirs, error) {
	return Find(Host{UID: os.Getuid(), Getenv: os.Getenv, Owner: owner})
}

// Find computes the directories. Root has fixed ones, so that a root shell with the variables of
// the user it came from (sudo -E) neither creates root-owned files in that user's home nor misses
// the running daemon.
func Find(h Host) (Dirs, error) {
	if h.UID == 0 {
		return Dirs{Data: "/var/lib/sandboxd", Runtime: "/run/sandboxd"}, nil
	}
	data, err := h.dataHome()
	if err != nil {
		return Dirs{}, err
	}
	d := Dirs{Data: filepath.Join(data, "sandboxd")}
	d.Runtime = filepath.Join(d.Data, "run")
	// Use XDG_RUNTIME_DIR only if this user owns it: su and some CI runners leave another user's in
	// place. The fallback is the directory of systemd-logind, for shells that did not come through
	// PAM.
	for _, dir := range []string{h.Getenv("XDG_RUNTIME_DIR"), "/run/user/" + strconv.Itoa(h.UID)} {
		if !filepath.IsAbs(dir) {
			continue
		}
		if uid, err := h.Owner(dir); err == nil && uid == h.UID {
			d.Runtime = filepath.Join(dir, "sandboxd")
			break
		}
	}
	return d, nil
}

// dataHome returns $XDG_DATA_HOME; the specification says to ignore a relative one.
func (h Host) dataHome() (string, error) {
	if dir := h.Getenv("XDG_DATA_HOME"); filepath.IsAbs(dir) {
		return filepath.Clean(dir), nil
	}
	home := h.Getenv("HOME")
	if !filepath.IsAbs(home) {
		return "", fmt.Errorf("find the data directory: HOME is %q and XDG_DATA_HOME names no absolute path; set one of them or use --data-dir", home)
	}
	return filepath.Join(home, ".local", "share"), nil
}

func owner(dir string) (int, error) {
	fi, err := os.Lstat(dir)
	if err != nil {
		return 0, err
	}
	if !fi.IsDir() {
		return 0, &fs.PathError{Op: "lstat", Path: dir, Err: syscall.ENOTDIR}
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, errors.New("no owner in the answer of lstat")
	}
	return int(st.Uid), nil
}

// SystemConfig is the config file of the host, which an ordinary user's own comes before.
const SystemConfig = "/etc/sandboxd/sandboxd.yaml"

// ConfigFiles returns the config files of the calling process's daemon, the host's first.
func ConfigFiles() []string { return FindConfig(Host{UID: os.Getuid(), Getenv: os.Getenv}) }

// FindConfig computes the config files, of which any may be missing. A value of a later file comes
// before that of an earlier one. Root has the host's only: a root shell with the variables of the
// user it came from must not obey that user's file.
func FindConfig(h Host) []string {
	if h.UID == 0 {
		return []string{SystemConfig}
	}
	dir := h.Getenv("XDG_CONFIG_HOME")
	if !filepath.IsAbs(dir) {
		home := h.Getenv("HOME")
		if !filepath.IsAbs(home) {
			return []string{SystemConfig}
		}
		dir = filepath.Join(home, ".config")
	}
	return []string{SystemConfig, filepath.Join(dir, "sandboxd", "sandboxd.yaml")}
}
