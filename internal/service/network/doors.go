package network

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/unixmsg"
)

const maxSocketName = 64

// isSocketName reports whether a file of the directory may have a name.
func isSocketName(s string) bool {
	return s != "" && len(s) <= maxSocketName && s[0] != '.' && strings.Trim(s, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-") == ""
}

// doors are the Unix sockets of published ports, in one directory. A confined daemon makes sockets
// nowhere else.
type doors struct {
	dir string

	mu   sync.Mutex
	held map[string]bool // the names of sockets that this daemon listens on
}

// listen makes a socket with a name that no sandbox has. No other daemon works in the directory, so
// a socket that this one does not listen on is of a daemon that was killed, and is replaced.
func (d *doors) listen(ctx context.Context, name string) (net.Listener, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.held[name] {
		return nil, errors.New("another sandbox has this socket")
	}
	if err := os.MkdirAll(d.dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the directory of sockets: %w", err)
	}
	path := filepath.Join(d.dir, name)
	switch fi, err := os.Lstat(path); {
	case errors.Is(err, os.ErrNotExist):
	case err != nil:
		return nil, err
	case fi.Mode().Type() != os.ModeSocket:
		return nil, errors.New("a file that is no socket has this name")
	default:
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("remove the socket of a daemon that was killed: %w", err)
		}
	}
	dir, err := os.OpenFile(d.dir, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open the directory of sockets: %w", err)
	}
	defer dir.Close()
	config := net.ListenConfig{Control: unixmsg.OwnerOnly}
	l, err := config.Listen(ctx, "unix", unixmsg.ShortName(dir, name))
	if err != nil {
		return nil, err
	}
	if u, ok := l.(*net.UnixListener); ok {
		u.SetUnlinkOnClose(false) // by a name that is good only now
	}
	d.held[name] = true
	return &door{Listener: l, close: sync.OnceValue(func() error {
		err := l.Close()
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.held, name)
		if rerr := os.Remove(path); !errors.Is(rerr, os.ErrNotExist) {
			err = errors.Join(err, rerr)
		}
		return err
	})}, nil
}

// sweep removes the sockets of a daemon that was killed. This one listens on none yet.
func (d *doors) sweep() error {
	files, err := os.ReadDir(d.dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, f := range files {
		if f.Type() == os.ModeSocket {
			errs = append(errs, os.Remove(filepath.Join(d.dir, f.Name())))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("remove the sockets of a daemon that was killed: %w", err)
	}
	return nil
}

// door is the listener of one Unix socket.
type door struct {
	net.Listener

	close func() error
}

// Close removes the file too. It returns when the name is free.
func (d *door) Close() error { return d.close() }
