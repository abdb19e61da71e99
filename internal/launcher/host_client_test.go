package launcher

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/runtime"
)

// A busy launcher must not be replaced: the second one would take away the socket of the first,
// whose sandboxes could then not be reached.
func TestBusyLauncherIsNotReplaced(t *testing.T) {
	path := filepath.Join(t.TempDir(), "launcher.sock")
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(fd) }()
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrUnix{Name: path}), unix.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	before, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	for full := false; !full; {
		c, err := net.Dial("unixpacket", path)
		if full = errors.Is(err, unix.EAGAIN); err == nil {
			defer c.Close()
		} else if !full {
			t.Fatal(err)
		}
	}

	c := &Client{path: path} // without options: to start a launcher would fail, but first remove the socket
	if err := c.Kill(t.Context(), "abc"); !errors.Is(err, runtime.ErrUnavailable) || !errors.Is(err, unix.EAGAIN) {
		t.Errorf("a request to a busy launcher: %v, want EAGAIN and unavailable", err)
	}
	if _, _, err := Connect(t.Context(), Options{RuntimeDir: filepath.Dir(path)}); !errors.Is(err, unix.EAGAIN) {
		t.Errorf("Connect to a busy launcher: %v, want EAGAIN", err)
	}
	if after, err := os.Lstat(path); err != nil || !os.SameFile(before, after) {
		t.Errorf("the socket was replaced: %v", err)
	}
}

// A launcher that is being killed accepts connections and does not answer. A deletion then goes to
// its successor: no other process knows of it.
func TestDeletionSurvivesADyingLauncher(t *testing.T) {
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "launcher.sock"), Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	asked := make(chan string, 10)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := 0; ; i++ {
			c, err := l.AcceptUnix()
			if err != nil {
				return
			}
			var req request
			_, err = receive(c, &req)
			if err == nil && i > 0 {
				asked <- string(req.Op) + " " + req.ID
				_ = send(c, &response{}) // the client's outcome decides
			}
			_ = c.Close() // the first one without a word
		}
	}()
	c := &Client{path: l.Addr().String()}
	if err := c.Delete(t.Context(), "abc"); err != nil {
		t.Errorf("delete: %v", err)
	}
	_ = l.Close()
	<-done
	if len(asked) != 1 || <-asked != "delete abc" {
		t.Errorf("the second launcher was asked %d times", len(asked))
	}
}

// A request that a dying launcher has not read goes to the next one. One that it has read does not:
// what has become of it is unknown.
func TestUnreadRequest(t *testing.T) {
	for name, read := range map[string]bool{"unread": false, "read": true} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "launcher.sock")
			listen := func() (*net.UnixListener, error) {
				return net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
			}
			var all sync.WaitGroup
			defer all.Wait()
			dying, err := listen()
			if err != nil {
				t.Fatal(err)
			}
			dying.SetUnlinkOnClose(false)
			all.Go(func() {
				if read {
					c, err := dying.AcceptUnix()
					if err != nil {
						t.Error(err)
						return
					}
					_, _ = receive(c, new(request))
					_ = dying.Close() // first, as the kernel does: its number is lower
					_ = c.Close()
					return
				}
				raw, err := dying.SyscallConn()
				if err != nil {
					t.Error(err)
					return
				}
				_ = raw.Read(func(fd uintptr) bool { // until a connection waits to be accepted
					n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
					return n > 0 || err != nil
				})
				_ = dying.Close()
			})
			asked := make(chan op, 10)
			c := &Client{path: path, opts: Options{Start: func(context.Context) error {
				if err := os.Remove(path); err != nil {
					return err
				}
				next, err := listen()
				if err != nil {
					return err
				}
				t.Cleanup(func() { _ = next.Close() })
				all.Go(func() {
					for range 2 {
						conn, err := next.AcceptUnix()
						if err != nil {
							t.Error(err)
							return
						}
						var req request
						if _, err := receive(conn, &req); err != nil {
							t.Error(err)
						}
						asked <- req.Op
						_ = send(conn, &response{}) // the client's outcome decides
						defer conn.Close()
					}
				})
				return nil
			}}}
			defer func() { _ = c.Close() }()
			err = c.Kill(t.Context(), "abc")
			if read {
				if !errors.Is(err, runtime.ErrUnavailable) || len(asked) > 0 {
					t.Errorf("%v, and %d requests to the next launcher", err, len(asked))
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if first, second := <-asked, <-asked; first != opSession || second != opKill {
				t.Errorf("the next launcher was asked %s, %s", first, second)
			}
		})
	}
}

// A request that an older launcher does not know is refused with its version and the way out.
func TestMisunderstandingNamesTheVersion(t *testing.T) {
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "launcher.sock"), Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := l.AcceptUnix()
			if err != nil {
				return
			}
			var req request
			switch _, err := receive(conn, &req); {
			case err != nil:
			case req.Op == opInfo:
				_ = send(conn, &response{Info: &Info{Version: "v1"}}, os.Stdin) // any descriptor; the client's outcome decides
			case req.Op == opKill:
				_ = send(conn, &response{Error: &wireError{Message: "it does not die"}})
			default:
				_ = send(conn, &response{Error: toWire(decode([]byte(`{"op":"x","novelty":1}`), &req))})
			}
			_ = conn.Close()
		}
	}()
	for version, want := range map[string]bool{"v2": true, "v1": false} {
		c := &Client{path: l.Addr().String(), opts: Options{Version: version}}
		if _, err := c.Describe(t.Context()); err != nil {
			t.Fatal(err)
		}
		_, err := c.Stats(t.Context(), "abc")
		if err == nil || strings.Contains(err.Error(), "of version v1 and the daemon of v2: end it") != want {
			t.Errorf("the daemon is %s: %v", version, err)
		}
		if err := c.Kill(t.Context(), "abc"); err == nil || strings.Contains(err.Error(), "version") {
			t.Errorf("another error: %v", err)
		}
	}
	_ = l.Close()
	<-done
}
