// Package facesock makes the sockets of faces, for their own user, and prepares their processes.
package facesock

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/confine"
	"github.com/sandboxd/sandboxd/internal/unixmsg"
)

// Tie is the number of the descriptor of a socket whose other end the daemon has, in a face that it
// has started.
const Tie = 3

// Tied returns a context that ends with the daemon's end of [Tie].
func Tied(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	unix.CloseOnExec(Tie)
	tie := os.NewFile(Tie, "daemon")
	go func() {
		defer cancel()
		_, _ = io.Copy(io.Discard, tie) // until the daemon ends
	}()
	return ctx, cancel
}

// Confine takes from this process the rights that a face does not need. The caller keeps held, and
// reports what the host cannot enforce.
func Confine(socket string) (held io.Closer, missing []string, err error) {
	f := confine.Face{Socket: socket}
	f.Probe()
	h, err := f.Apply()
	if err != nil {
		return nil, nil, err
	}
	return h, f.Missing(), nil
}

// Listen listens on a Unix socket that only this user can open, and accepts connections of this
// user and of root: the daemon takes every request of a face for its own user's. It replaces a
// socket that no process serves; a file of another type is left alone.
func Listen(ctx context.Context, path string) (_ net.Listener, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("listen on %s: %w", path, err)
		}
	}()
	dir, err := os.OpenFile(filepath.Dir(path), unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	name := unixmsg.ShortName(dir, filepath.Base(path))
	switch fi, err := os.Lstat(path); {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, err
	case fi.Mode().Type() != fs.ModeSocket:
		return nil, errors.New("it exists and is no socket")
	default:
		c, err := new(net.Dialer).DialContext(ctx, "unix", name)
		if err == nil {
			return nil, errors.Join(errors.New("another process serves it"), c.Close())
		}
		if !errors.Is(err, unix.ECONNREFUSED) {
			return nil, err
		}
		if err := os.Remove(path); err != nil {
			return nil, err
		}
	}
	config := net.ListenConfig{Control: unixmsg.OwnerOnly}
	l, err := config.Listen(ctx, "unix", name)
	if err != nil {
		return nil, err
	}
	u, ok := l.(*net.UnixListener)
	if !ok {
		return nil, errors.Join(fmt.Errorf("a listener of %T", l), l.Close())
	}
	u.SetUnlinkOnClose(false) // its short name ends with dir; the next listener replaces it
	return &owners{u, os.Geteuid()}, nil
}

// owners accepts connections of one user and of root.
type owners struct {
	*net.UnixListener

	uid int // read before the confinement, which refuses it
}

// Accept implements net.Listener.
func (o *owners) Accept() (net.Conn, error) {
	for {
		c, err := o.AcceptUnix()
		if err != nil {
			return nil, err
		}
		if uid, err := unixmsg.PeerUID(c); err == nil && (uid == 0 || int(uid) == o.uid) {
			return c, nil
		}
		_ = c.Close() // nothing was said
	}
}
