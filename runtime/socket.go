package runtime

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/unixmsg"
)

// controlBacklog is the number of requests that may wait for an init that is slow to accept.
const controlBacklog = 256

// sockets is the directory of the control sockets, <runtime dir>/s. It is held open, and every
// socket is bound, looked for and removed relative to the descriptor: the path may be longer than
// the 108 bytes of a sockaddr_un.
type sockets struct {
	path string
	dir  *os.File
}

func openSockets(runtimeDir string) (*sockets, error) {
	path := filepath.Join(runtimeDir, "s")
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, fmt.Errorf("make socket directory: %w", err)
	}
	dir, err := os.OpenFile(path, unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open socket directory: %w", err)
	}
	// A process that reaches a control socket commands the sandbox's init: only our uid may search the
	// directory.
	if err := dir.Chmod(0o700); err != nil {
		return nil, errors.Join(fmt.Errorf("close socket directory to others: %w", err), dir.Close())
	}
	return &sockets{path: path, dir: dir}, nil
}

func (s *sockets) close() error { return s.dir.Close() }

func socketName(id string) string { return id + ".sock" }

// pathOf returns the path that a guest client dials.
func (s *sockets) pathOf(id string) string { return filepath.Join(s.path, socketName(id)) }

// listen makes the socket on which the init of sandbox id will accept. The caller passes it on and
// closes its copy.
func (s *sockets) listen(id string) (*os.File, error) {
	f, err := unixmsg.Listen(s.dir, socketName(id), controlBacklog)
	if err != nil {
		return nil, fmt.Errorf("make control socket %s: %w", s.pathOf(id), err)
	}
	return f, nil
}

func (s *sockets) exists(id string) bool {
	var st unix.Stat_t
	err := unix.Fstatat(int(s.dir.Fd()), socketName(id), &st, unix.AT_SYMLINK_NOFOLLOW)
	return err == nil && st.Mode&unix.S_IFMT == unix.S_IFSOCK
}

// remove unlinks the socket of id; one that is gone already is no error.
func (s *sockets) remove(id string) error {
	err := unix.Unlinkat(int(s.dir.Fd()), socketName(id), 0)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove control socket %s: %w", s.pathOf(id), err)
	}
	return nil
}

// removeStale unlinks every socket whose id keep does not know. Files that are not ours are left
// alone.
func (s *sockets) removeStale(keep func(id string) bool) error {
	entries, err := os.ReadDir(s.path)
	if err != nil {
		return fmt.Errorf("read socket directory: %w", err)
	}
	for _, e := range entries {
		id, ours := strings.CutSuffix(e.Name(), ".sock")
		if !ours || keep(id) {
			continue
		}
		if err := s.remove(id); err != nil {
			return err
		}
	}
	return nil
}
