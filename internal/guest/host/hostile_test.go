package host

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/unixmsg"

	"github.com/sandboxd/sandboxd/internal/guest/guesttest"

	"github.com/sandboxd/sandboxd/internal/guest"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

// fakeInit serves every connection with f, after its first request has been read. It has ended when
// the test has.
func fakeInit(t testing.TB, f func(c *conn, req guest.Packet, fds []int)) *Client {
	t.Helper()
	path := filepath.Join(t.TempDir(), "guest.sock")
	l, err := guesttest.Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	rc, err := l.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			var fd int
			var got error
			err := rc.Read(func(s uintptr) bool {
				fd, _, got = unix.Accept4(int(s), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
				return !errors.Is(got, unix.EAGAIN)
			})
			if err != nil || got != nil {
				return
			}
			wg.Go(func() {
				c, err := newConn(fd)
				if err != nil {
					return
				}
				defer func() { _ = c.Close() }()
				pkt, fds, err := c.Recv()
				if err != nil {
					return
				}
				defer unixmsg.CloseAll(fds)
				f(c, pkt, fds)
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		wg.Wait()
	})
	return NewClient(path)
}

// await lets the host act, as a hostile init does: it reads until the host closes.
func (c *conn) await() {
	for {
		_, fds, err := c.Recv()
		if err != nil {
			return
		}
		unixmsg.CloseAll(fds)
	}
}

// A hostile init is bounded, validated, timed out, and hurts its own sandbox only (attacks.md).
func TestHostileInit(t *testing.T) {
	raw := func(p string, fds ...int) func(*conn, guest.Packet, []int) {
		return func(c *conn, _ guest.Packet, _ []int) {
			_ = c.Send([]byte(p), fds...)
			c.await()
		}
	}
	file, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = file.Close() })
	regularFD := int(file.Fd())
	pr, pw, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = pr.Close(), pw.Close() })
	pipeFD := int(pr.Fd())
	proc, err := os.Open("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = proc.Close() })
	handle, err := unix.Open(file.Name(), unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(handle) })
	readonly, err := os.Open(file.Name())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = readonly.Close() })
	appending, err := os.OpenFile(file.Name(), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = appending.Close() })
	full, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = full.Close() })
	if _, err := full.WriteString("x"); err != nil {
		t.Fatal(err)
	}
	null, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = null.Close() })

	exec := func(ctx context.Context, c *Client) error {
		e, err := c.Exec(ctx, ExecRequest{Argv: []string{"x"}})
		if err != nil {
			return err
		}
		defer func() { _ = e.Close() }()
		_, err = e.Stream(ctx, func(string, []byte) error { return nil })
		return err
	}
	timed := func(ctx context.Context, c *Client) error {
		e, err := c.Exec(ctx, ExecRequest{Argv: []string{"x"}, Timeout: time.Millisecond})
		if err != nil {
			return err
		}
		defer func() { _ = e.Close() }()
		_, err = e.Wait()
		return err
	}
	whole := func(ctx context.Context, c *Client) error {
		e, err := c.Exec(ctx, ExecRequest{Argv: []string{"x"}, NoStdin: true, Whole: true})
		if err != nil {
			return err
		}
		defer func() { _ = e.Close() }()
		_, err = e.Stream(ctx, func(string, []byte) error { return nil })
		return err
	}
	killed := func(ctx context.Context, c *Client) error {
		e, err := c.Exec(ctx, ExecRequest{Argv: []string{"x"}})
		if err != nil {
			return err
		}
		defer func() { _ = e.Close() }()
		if err := e.Kill(); err != nil {
			return err
		}
		_, err = e.Wait()
		return err
	}
	tty := func(ctx context.Context, c *Client) error {
		e, err := c.Exec(ctx, ExecRequest{Argv: []string{"x"}, TTY: true})
		if err == nil {
			_ = e.Close()
		}
		return err
	}
	open := func(ctx context.Context, c *Client) error {
		f, err := c.Open(ctx, "/x")
		if err == nil {
			_ = f.Close()
		}
		return err
	}
	create := func(ctx context.Context, c *Client) error {
		p, err := c.Create(ctx, "/x", 0o600, 0, 0)
		if err == nil {
			return p.Commit()
		}
		return err
	}
	stat := func(ctx context.Context, c *Client) error {
		_, err := c.Stat(ctx, "/x", false)
		return err
	}
	ping := func(ctx context.Context, c *Client) error { return c.Ping(ctx) }
	appendTo := func(ctx context.Context, c *Client) error {
		f, err := c.Append(ctx, "/x", 0o600, 0, 0)
		if err == nil {
			_ = f.Close()
		}
		return err
	}
	list := func(ctx context.Context, c *Client) error {
		_, err := c.List(ctx, "/x", 1, func(Entry) error { return nil })
		return err
	}
	enough := errors.New("enough")
	listSome := func(ctx context.Context, c *Client) error {
		n := 0
		_, err := c.List(ctx, "/x", 1, func(Entry) error {
			if n++; n == 10000 {
				return enough
			}
			return nil
		})
		return err
	}
	watch := func(ctx context.Context, c *Client) error {
		return c.Watch(ctx, "/x", true, func() error { return nil }, func(Change) error { return nil })
	}
	mkdir := func(ctx context.Context, c *Client) error { return c.Mkdir(ctx, "/x", false, 0o755, 0, 0) }
	move := func(ctx context.Context, c *Client) error { return c.Move(ctx, "/x", "/y", false) }
	remove := func(ctx context.Context, c *Client) error { return c.Remove(ctx, "/x", true) }
	// packets are sent one after the other.
	packets := func(all ...string) func(*conn, guest.Packet, []int) {
		return func(c *conn, _ guest.Packet, _ []int) {
			for _, p := range all {
				_ = c.Send([]byte(p))
			}
			c.await()
		}
	}
	entry := func(mode, name string) string {
		return `entries {"list":[{"size":1,"mode":` + mode + `,"mtime":0,"nsec":0,"uid":0,"gid":0}]}` + "\x00" + name + "\x00"
	}
	entries := func(n int) string {
		one := `{"size":1,"mode":33188,"mtime":0,"nsec":0,"uid":0,"gid":0}`
		return `entries {"list":[` + strings.Repeat(one+",", n-1) + one + "]}" + strings.Repeat("\x00a\x00", n)
	}
	event := func(kind string, strs ...string) string {
		return `events {"list":[{"kind":"` + kind + `"}]}` + "\x00" + strings.Join(strs, "\x00")
	}
	const watching = "watching {}"
	tarOut := func(ctx context.Context, c *Client) error {
		r, w, err := os.Pipe()
		if err != nil {
			return err
		}
		defer func() { _, _ = r.Close(), w.Close() }()
		return c.TarOut(ctx, "/x", w)
	}

	started := `started {"pid":2}`
	exited := func(x string) func(*conn, guest.Packet, []int) {
		return func(c *conn, _ guest.Packet, _ []int) {
			_ = c.Send([]byte(started))
			_ = c.Send([]byte(x))
			c.await()
		}
	}
	for _, tc := range []struct {
		name string
		init func(*conn, guest.Packet, []int)
		ask  func(context.Context, *Client) error
		want error
	}{
		{"closes at once", func(*conn, guest.Packet, []int) {}, ping, ErrLost},
		{"hangs", func(c *conn, _ guest.Packet, _ []int) { c.await() }, ping, context.DeadlineExceeded},
		{"empty packet", raw(""), ping, ErrLost},
		{"no kind", raw("{}"), ping, ErrLost},
		{"noise", raw("\x00\xff\x00 \x01"), ping, ErrLost},
		{"unknown kind", raw("hello {}"), ping, ErrLost},
		{"long kind", raw(strings.Repeat("x", 60000) + " {}"), ping, ErrLost},
		{"wrong kind", raw("started {}"), ping, ErrLost},
		{"no JSON", raw("pong "), ping, ErrLost},
		{"unknown field", raw(`pong {"x":1}`), ping, ErrLost},
		{"something after the JSON", raw(`pong {}{}`), ping, ErrLost},
		{"strings that nobody asked for", raw("pong {}\x00x"), ping, ErrLost},
		{"deep JSON", raw("pong " + strings.Repeat("[", 60000)), ping, ErrLost},
		{"descriptor that nobody asked for", raw("pong {}", regularFD), ping, ErrLost},
		{"too many descriptors", raw("pong {}", fdsOf(regularFD, 200)...), ping, ErrLost},
		{"too long a packet", func(c *conn, _ guest.Packet, _ []int) {
			rc, err := c.File().SyscallConn()
			if err != nil {
				t.Error(err)
				return
			}
			_ = rc.Control(func(fd uintptr) {
				_ = unix.Sendmsg(int(fd), bytes.Repeat([]byte("x"), 2*guest.MaxPacket), nil, nil, 0)
			})
			c.await()
		}, ping, ErrLost},
		{"flood", func(c *conn, _ guest.Packet, _ []int) {
			_ = c.Send([]byte(started))
			for c.Send([]byte("noise {}")) == nil {
			}
		}, exec, ErrLost},
		{"flood with descriptors", func(c *conn, _ guest.Packet, _ []int) {
			for c.Send([]byte("noise {}"), regularFD, regularFD) == nil {
			}
		}, exec, ErrLost},

		{"error without stage", raw("error {\"errno\":2}\x00"), open, ErrLost},
		{"error with unknown stage", raw("error {\"stage\":\"x\",\"errno\":2}\x00"), open, ErrLost},
		{"error 0", raw("error {\"stage\":\"open\"}\x00"), open, ErrLost},
		{"negative error", raw("error {\"stage\":\"open\",\"errno\":-2}\x00"), open, ErrLost},
		{"high error", raw("error {\"stage\":\"open\",\"errno\":4096}\x00"), open, ErrLost},
		{"error with a long path", raw("error {\"stage\":\"open\",\"errno\":2}\x00" + strings.Repeat("x", guest.MaxPath+1)), open, ErrLost},
		{"error with descriptor", raw("error {\"stage\":\"open\",\"errno\":2}\x00", regularFD), open, ErrLost},
		{"proper error", raw("error {\"stage\":\"open\",\"errno\":2}\x00/x"), open, unix.ENOENT},

		{"pid 0", raw(`started {"pid":0}`), exec, ErrLost},
		{"pid 1", raw(`started {"pid":1}`), exec, ErrLost},
		{"negative pid", raw(`started {"pid":-1}`), exec, ErrLost},
		{"huge pid", raw(`started {"pid":4194305}`), exec, ErrLost},
		{"no integer", raw(`started {"pid":1e99}`), exec, ErrLost},
		{"descriptor with started", raw(started, pipeFD), exec, ErrLost},
		{"dies after started", func(c *conn, _ guest.Packet, _ []int) { _ = c.Send([]byte(started)) }, exec, ErrLost},
		{"error after started", exited("error {\"stage\":\"open\",\"errno\":2}\x00"), exec, ErrLost},
		{"started twice", exited(started), exec, ErrLost},
		{"code 256", exited(`exited {"code":256,"wall":1,"cpu":1,"maxrss":1}`), exec, ErrLost},
		{"code -1", exited(`exited {"code":-1,"wall":1,"cpu":1,"maxrss":1}`), exec, ErrLost},
		{"signal 65", exited(`exited {"signal":65,"wall":1,"cpu":1,"maxrss":1}`), exec, ErrLost},
		{"signal -1", exited(`exited {"signal":-1,"wall":1,"cpu":1,"maxrss":1}`), exec, ErrLost},
		{"signal and code", exited(`exited {"signal":9,"code":1,"wall":1,"cpu":1,"maxrss":1}`), exec, ErrLost},
		{"timeout without one", exited(`exited {"timeout":true,"wall":1,"cpu":1,"maxrss":1}`), exec, ErrLost},
		{"negative wall", exited(`exited {"wall":-1,"cpu":1,"maxrss":1}`), exec, ErrLost},
		{"years of wall", exited(`exited {"wall":99999999999999999,"cpu":1,"maxrss":1}`), exec, ErrLost},
		{"negative cpu", exited(`exited {"wall":1,"cpu":-1,"maxrss":1}`), exec, ErrLost},
		{"huge memory", exited(`exited {"wall":1,"cpu":1,"maxrss":9223372036854775807}`), exec, ErrLost},
		{"exit with a pid", exited(`exited {"pid":7,"wall":1,"cpu":1,"maxrss":1}`), exec, ErrLost},
		{"exit before a start that is waited for", raw(`exited {"pid":7,"wall":1,"cpu":1,"maxrss":1}`), exec, ErrLost},
		{"whole without a pid", raw(`exited {"wall":1,"cpu":1,"maxrss":1}`), whole, ErrLost},
		{"whole with pid 1", raw(`exited {"pid":1,"wall":1,"cpu":1,"maxrss":1}`), whole, ErrLost},
		{"whole with a huge pid", raw(`exited {"pid":4194305,"wall":1,"cpu":1,"maxrss":1}`), whole, ErrLost},
		{"whole with code 256", raw(`exited {"pid":7,"code":256,"wall":1,"cpu":1,"maxrss":1}`), whole, ErrLost},
		{"whole with years of wall", raw(`exited {"pid":7,"wall":99999999999999999,"cpu":1,"maxrss":1}`), whole, ErrLost},
		{"whole with a descriptor", raw(`exited {"pid":7,"wall":1,"cpu":1,"maxrss":1}`, pipeFD), whole, ErrLost},
		{"whole of another kind", raw(`done {}`), whole, ErrLost},
		{"whole, then started twice", exited(started), whole, ErrLost},
		{"proper whole", raw(`exited {"pid":7,"wall":1,"cpu":1,"maxrss":1}`), whole, nil},
		{"proper whole in two", exited(`exited {"wall":1,"cpu":1,"maxrss":1}`), whole, nil},
		{"proper exit", exited(`exited {"wall":1,"cpu":1,"maxrss":1}`), exec, nil},
		{"no exit after the timeout", func(c *conn, _ guest.Packet, _ []int) { _ = c.Send([]byte(started)); c.await() }, timed, ErrLost},
		{"no exit after a kill", func(c *conn, _ guest.Packet, _ []int) { _ = c.Send([]byte(started)); c.await() }, killed, ErrLost},
		{"holds the pipes", func(c *conn, _ guest.Packet, _ []int) {
			_ = c.Send([]byte(started))
			_ = c.Send([]byte(`exited {"wall":1,"cpu":1,"maxrss":1}`))
			c.await()
		}, exec, nil},

		{"no terminal", raw(started), tty, ErrLost},
		{"file as terminal", raw(started, regularFD), tty, ErrLost},
		{"pipe as terminal", raw(started, pipeFD), tty, ErrLost},
		{"device as terminal", raw(started, int(null.Fd())), tty, ErrLost},

		{"no file", raw("opened {}"), open, ErrLost},
		{"two files", raw("opened {}", regularFD, regularFD), open, ErrLost},
		{"pipe as file", raw("opened {}", pipeFD), open, ErrLost},
		{"device as file", raw("opened {}", int(null.Fd())), open, ErrLost},
		{"proc as file", raw("opened {}", int(proc.Fd())), open, ErrLost},
		{"handle as file", raw("opened {}", handle), open, ErrLost},
		{"writable file", raw("opened {}", regularFD), open, ErrLost},
		{"proper file", raw("opened {}", int(readonly.Fd())), open, nil},
		{"unwritable file", raw("created {}", int(readonly.Fd())), create, ErrLost},
		{"file that is not new", raw("created {}", int(full.Fd())), create, ErrLost},

		{"no type", raw("info {\"size\":0,\"mode\":0,\"mtime\":0,\"nsec\":0,\"uid\":0,\"gid\":0}\x00"), stat, ErrLost},
		{"negative size", raw("info {\"size\":-1,\"mode\":33188,\"mtime\":0,\"nsec\":0,\"uid\":0,\"gid\":0}\x00"), stat, ErrLost},
		{"link without target", raw("info {\"size\":1,\"mode\":41471,\"mtime\":0,\"nsec\":0,\"uid\":0,\"gid\":0}\x00"), stat, ErrLost},
		{"target without link", raw("info {\"size\":1,\"mode\":33188,\"mtime\":0,\"nsec\":0,\"uid\":0,\"gid\":0}\x00x"), stat, ErrLost},
		{"far future", raw("info {\"size\":1,\"mode\":33188,\"mtime\":9223372036854775807,\"nsec\":0,\"uid\":0,\"gid\":0}\x00"), stat, nil},

		{"unwritable file to append to", raw("opened {}", int(readonly.Fd())), appendTo, ErrLost},
		{"file to append to that is not at its end", raw("opened {}", regularFD), appendTo, ErrLost},
		{"pipe to append to", raw("opened {}", pipeFD), appendTo, ErrLost},
		{"proper file to append to", raw("opened {}", int(appending.Fd())), appendTo, nil},
		{"file that is at its end", raw("created {}", int(appending.Fd())), create, ErrLost},

		{"list without an end", packets("entries {}"), list, context.DeadlineExceeded},
		{"dies in a list", func(c *conn, _ guest.Packet, _ []int) { _ = c.Send([]byte(entry("33188", "a"))) }, list, ErrLost},
		{"endless list", func(c *conn, _ guest.Packet, _ []int) {
			for c.Send([]byte(entries(guest.MaxBatch))) == nil {
			}
		}, listSome, enough},
		{"too many entries", packets(entries(guest.MaxBatch+1), "listed {}"), list, ErrLost},
		{"nothing, again and again", packets("entries {}", "entries {}", "listed {}"), list, ErrLost},
		{"fewer names than entries", packets(`entries {"list":[{"size":1,"mode":33188,"mtime":0,"nsec":0,"uid":0,"gid":0}]}`+"\x00a", "listed {}"), list, ErrLost},
		{"names without entries", packets("entries {}\x00a\x00", "listed {}"), list, ErrLost},
		{"name that climbs", packets(entry("33188", "../a"), "listed {}"), list, ErrLost},
		{"name that climbs later", packets(entry("33188", "a/../../b"), "listed {}"), list, ErrLost},
		{"absolute name", packets(entry("33188", "/a"), "listed {}"), list, ErrLost},
		{"empty name", packets(entry("33188", ""), "listed {}"), list, ErrLost},
		{"dot", packets(entry("33188", "."), "listed {}"), list, ErrLost},
		{"long name", packets(entry("33188", strings.Repeat("x", guest.MaxPath)), "listed {}"), list, ErrLost},
		{"entry without a type", packets(entry("420", "a"), "listed {}"), list, ErrLost},
		{"link without a target", packets(entry("41471", "a"), "listed {}"), list, ErrLost},
		{"file that cannot be entered", packets(strings.Replace(entry("33188", "a"), `"gid":0`, `"gid":0,"errno":13`, 1), "listed {}"), list, ErrLost},
		{"negative error of a directory", packets(strings.Replace(entry("16877", "a"), `"gid":0`, `"gid":0,"errno":-13`, 1), "listed {}"), list, ErrLost},
		{"descriptor in a list", func(c *conn, _ guest.Packet, _ []int) {
			_ = c.Send([]byte("entries {}"))
			_ = c.Send([]byte("listed {}"), regularFD)
			c.await()
		}, list, ErrLost},
		{"other kind in a list", packets("entries {}", "done {}"), list, ErrLost},
		{"error in a list", packets("entries {}", "error {\"stage\":\"read\",\"errno\":5}\x00/x"), list, unix.EIO},
		{"proper list", packets(entry("33188", "a/b"), entry("16877", "c"), "listed {}"), list, nil},

		{"watch that is done at once", packets("done {}"), watch, ErrLost},
		{"silent watch", packets(watching), watch, context.DeadlineExceeded},
		{"dies in a watch", func(c *conn, _ guest.Packet, _ []int) { _ = c.Send([]byte(watching)) }, watch, ErrLost},
		{"no events", packets(watching, `events {"list":[]}`), watch, ErrLost},
		{"too many events", packets(watching, `events {"list":[`+strings.Repeat(`{"kind":"created"},`, guest.MaxBatch)+`{"kind":"created"}]}`+strings.Repeat("\x00a\x00", guest.MaxBatch+1)), watch, ErrLost},
		{"unknown change", packets(watching, event("x", "a", "")), watch, ErrLost},
		{"change that climbs", packets(watching, event("created", "../a", "")), watch, ErrLost},
		{"move that climbs", packets(watching, event("moved", "a", "../b")), watch, ErrLost},
		{"move to nowhere", packets(watching, event("moved", "a", "")), watch, ErrLost},
		{"move of all", packets(watching, event("moved", "", "a")), watch, ErrLost},
		{"new name of what was not moved", packets(watching, event("created", "a", "b")), watch, ErrLost},
		{"change without a name", packets(watching, `events {"list":[{"kind":"created"}]}`), watch, ErrLost},
		{"watching again", packets(watching, watching), watch, ErrLost},
		{"proper watch", packets(watching, event("created", "a/b", ""), event("moved", "a", "b"), event("deleted", "", ""), "done {}"), watch, nil},

		{"mkdir with a descriptor", raw("done {}", regularFD), mkdir, ErrLost},
		{"move with strings", raw("done {}\x00x"), move, ErrLost},
		{"remove that says something", raw(`done {"x":1}`), remove, ErrLost},
		{"proper refusal of a removal", raw("error {\"stage\":\"remove\",\"errno\":16}\x00/x"), remove, unix.EBUSY},
		{"proper move", raw("done {}"), move, nil},

		{"dies during tar", func(*conn, guest.Packet, []int) {}, tarOut, ErrLost},
		{"hangs during tar", func(c *conn, _ guest.Packet, _ []int) { c.await() }, tarOut, context.DeadlineExceeded},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			c := fakeInit(t, tc.init)
			ctx, cancel := context.WithTimeout(t.Context(), testenv.HungAfter)
			defer cancel()
			if strings.HasPrefix(tc.name, "hangs") || tc.name == "silent watch" || tc.name == "list without an end" {
				ctx, cancel = context.WithTimeout(ctx, 50*time.Millisecond)
				defer cancel()
			}
			err := tc.ask(ctx, c)
			if !errors.Is(err, tc.want) || (!errors.Is(tc.want, ErrLost) && errors.Is(err, ErrLost)) {
				t.Errorf("got %v, want %v", err, tc.want)
			}
		})
	}
}

// The same, one after the other, without a leak.
func TestHostileInitLeaksNothing(t *testing.T) {
	guesttest.Leaks(t)
	answers := []string{"", "noise", "started {}", `started {"pid":7}`, "opened {}", "error {}", "created {}", `created {"x":1}`, "entries {}", "listed {}", "watching {}", "done {}"}
	for _, a := range answers {
		for n := range guest.MaxFDs + 3 {
			t.Run("", func(t *testing.T) {
				c := fakeInit(t, func(c *conn, _ guest.Packet, fds []int) {
					r, w, err := os.Pipe()
					if err != nil {
						t.Error(err)
						return
					}
					give := make([]int, n)
					for i := range give {
						give[i] = int(r.Fd())
					}
					_ = c.Send([]byte(a), give...)
					_, _ = r.Close(), w.Close()
				})
				if e, err := c.Exec(t.Context(), ExecRequest{Argv: []string{"x"}}); err == nil {
					_, _ = e.Stream(t.Context(), func(string, []byte) error { return nil })
					_ = e.Close()
				}
				if e, err := c.Exec(t.Context(), ExecRequest{Argv: []string{"x"}, TTY: true}); err == nil {
					_ = e.Close()
				}
				if f, err := c.Open(t.Context(), "/x"); err == nil {
					_ = f.Close()
				}
				if p, err := c.Create(t.Context(), "/x", 0, 0, 0); err == nil {
					_ = p.Abort()
				}
				_, _ = c.Stat(t.Context(), "/x", false)
				if f, err := c.Append(t.Context(), "/x", 0, 0, 0); err == nil {
					_ = f.Close()
				}
				_, _ = c.List(t.Context(), "/x", 1, func(Entry) error { return nil })
				_ = c.Watch(t.Context(), "/x", false, func() error { return nil }, func(Change) error { return nil })
				_ = c.Remove(t.Context(), "/x", false)
				_ = c.Ping(t.Context())
			})
		}
	}
}

// An init that sends a little again and again, each packet in time, is lost once the whole takes
// too long.
func TestDrippingInit(t *testing.T) {
	drip := func(first, then string) *Client {
		c := fakeInit(t, func(c *conn, _ guest.Packet, _ []int) {
			tick := time.NewTicker(5 * time.Millisecond)
			defer tick.Stop()
			for err := c.Send([]byte(first)); err == nil; err = c.Send([]byte(then)) {
				<-tick.C
			}
		})
		c.processesFor, c.listFor = 100*time.Millisecond, 100*time.Millisecond
		return c
	}
	list := drip("entries {}", `entries {"list":[{"size":1,"mode":33188,"mtime":0,"nsec":0,"uid":0,"gid":0}]}`+"\x00a\x00")
	if _, err := list.List(t.Context(), "/x", 1, func(Entry) error { return nil }); !errors.Is(err, ErrLost) || !strings.Contains(err.Error(), "in time") {
		t.Errorf("list: %v", err)
	}
	processes := drip("listing {}", `process {"pid":7,"ppid":1,"uid":0,"state":"S","age":1,"cpu":1,"rss":1,"name":"x"}`)
	if _, err := processes.Processes(t.Context()); !errors.Is(err, ErrLost) || !strings.Contains(err.Error(), "in time") {
		t.Errorf("processes: %v", err)
	}
	// A caller that takes long over timely packets gets all of them.
	n, sent := 0, make(chan struct{})
	slow := fakeInit(t, func(c *conn, _ guest.Packet, _ []int) {
		for range 4 {
			_ = c.Send([]byte(`entries {"list":[{"size":1,"mode":33188,"mtime":0,"nsec":0,"uid":0,"gid":0}]}` + "\x00a\x00"))
		}
		_ = c.Send([]byte("listed {}"))
		close(sent)
		c.await()
	})
	slow.listFor = time.Second
	_, err := slow.List(t.Context(), "/x", 1, func(Entry) error {
		if n++; n == 1 {
			<-sent // nothing that comes now is late
			patience, cancel := context.WithTimeout(t.Context(), slow.listFor)
			defer cancel()
			<-patience.Done() // but all of it is over
		}
		return nil
	})
	if err != nil || n != 4 {
		t.Errorf("a slow reader: %d, %v", n, err)
	}
}

func fdsOf(fd, n int) []int {
	r := make([]int, n)
	for i := range r {
		r[i] = fd
	}
	return r
}

func TestNoInit(t *testing.T) {
	guesttest.Leaks(t)
	path := filepath.Join(t.TempDir(), "guest.sock")
	if err := NewClient(path).Ping(t.Context()); !errors.Is(err, ErrLost) {
		t.Errorf("no socket: %v", err)
	}
	l, err := guesttest.Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	// Listening, without accepting: a backlog that fills up must not delay a caller beyond its
	// context.
	c := NewClient(path)
	for range 3 {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
		if err := c.Ping(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("nobody accepts: %v", err)
		}
		cancel()
	}
	_ = l.Close()
	if err := c.Ping(t.Context()); !errors.Is(err, ErrLost) {
		t.Errorf("closed: %v", err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(io.ErrNoProgress)
	if err := c.Ping(ctx); !errors.Is(err, io.ErrNoProgress) {
		t.Errorf("cancelled before: %v", err)
	}
}

func TestFullBacklogIsWaitedFor(t *testing.T) {
	path := filepath.Join(t.TempDir(), "guest.sock")
	l, err := guesttest.Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	if err := unix.Listen(int(l.Fd()), 0); err != nil {
		t.Fatal(err)
	}
	c := NewClient(path)
	first, err := dial(t, c, time.Now().Add(time.Second))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = first.Close() }()
	if _, err := dial(t, c, time.Now().Add(20*time.Millisecond)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("the backlog is not full: %v", err)
	}
	done := make(chan error)
	go func() {
		second, err := dial(t, c, time.Now().Add(testenv.HungAfter))
		if err == nil {
			_ = second.Close()
		}
		done <- err
	}()
	fd, _, err := unix.Accept4(int(l.Fd()), unix.SOCK_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	_ = unix.Close(fd)
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// The killing of init while an exec runs.
func TestInitDies(t *testing.T) {
	s := startInit(t)
	e, err := s.Exec(t.Context(), ExecRequest{Argv: []string{"sleep", "100"}, Env: testEnv})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = e.Close() }()
	if err := s.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if _, err := e.Stream(t.Context(), func(string, []byte) error { return nil }); !errors.Is(err, ErrLost) {
		t.Errorf("got %v", err)
	}
	if err := s.Ping(t.Context()); !errors.Is(err, ErrLost) {
		t.Errorf("got %v", err)
	}
}

// Requests that only a faulty daemon makes get an answer and do not harm init.
func TestInitRefusesNonsense(t *testing.T) {
	s := startInit(t)
	ask := func(p string, fds ...int) error {
		conn, _, got, err := s.request(t.Context(), testenv.HungAfter, []byte(p), fds, "nothing", 0)
		if err == nil {
			unixmsg.CloseAll(got)
			_ = conn.Close()
		}
		return err
	}
	null, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = null.Close() }()
	fd := int(null.Fd())
	exec := `exec {"args":1,"uid":0,"gid":0}`
	for _, tc := range []struct {
		packet string
		fds    []int
		want   error
	}{
		{"hello {}", nil, unix.ENOSYS},
		{"ping {", nil, unix.EINVAL},
		{`ping {"x":1}`, nil, unix.EINVAL},
		{"ping {}", []int{fd}, unix.EBADF},
		{exec + "\x00/\x00true", nil, unix.EBADF},
		{exec + "\x00/\x00true", []int{fd, fd}, unix.EBADF},
		{exec + "\x00/\x00true", []int{fd, fd, fd, fd}, unix.EBADF},
		{exec + "\x00/", []int{fd, fd, fd}, unix.EINVAL},
		{exec + "\x00\x00true", []int{fd, fd, fd}, unix.EINVAL},
		{exec + "\x00tmp\x00true", []int{fd, fd, fd}, unix.EINVAL},
		{exec, []int{fd, fd, fd}, unix.EINVAL},
		{`exec {"args":2,"uid":0,"gid":0}` + "\x00/\x00true", []int{fd, fd, fd}, unix.EINVAL},
		{`exec {"args":-1,"uid":0,"gid":0}` + "\x00/\x00true", []int{fd, fd, fd}, unix.EINVAL},
		{`exec {"args":1,"uid":-1,"gid":0}` + "\x00/\x00true", []int{fd, fd, fd}, unix.EINVAL},
		{`exec {"args":1,"uid":0,"gid":0,"tty":true}` + "\x00/\x00true", []int{fd}, unix.EBADF},
		{`exec {"args":1,"uid":0,"gid":0,"memfd":true}`, []int{fd, fd, fd}, unix.EBADF},
		{`exec {"args":1,"uid":0,"gid":0,"memfd":true}`, []int{fd, fd, fd, fd}, unix.EINVAL},
		{"tar-out {}\x00/", nil, unix.EBADF},
		{"tar-in {\"uid\":0,\"gid\":0}\x00/", []int{fd, fd}, unix.EBADF},
		{"open {}", nil, unix.EINVAL},
	} {
		if err := ask(tc.packet, tc.fds...); !errors.Is(err, tc.want) {
			t.Errorf("%q with %d descriptors: %v, want %v", tc.packet, len(tc.fds), err, tc.want)
		}
	}
	if err := ask("", fd); !errors.Is(err, unix.EIO) {
		t.Errorf("packet without a kind: %v", err)
	}
	if err := s.Ping(t.Context()); err != nil {
		t.Fatal(err)
	}
	if out := s.sh(t, "ls /proc/1/fd 2>/dev/null | wc -l"); out == "" {
		t.Error("no shell")
	}
}

func TestManyConnections(t *testing.T) {
	s := startInit(t)
	var idle []*conn
	for range 100 {
		c, err := dial(t, s.Client, time.Now().Add(time.Second))
		if err != nil {
			t.Fatal(err)
		}
		idle = append(idle, c)
	}
	if err := s.Ping(t.Context()); err != nil {
		t.Error(err)
	}
	for _, c := range idle {
		_ = c.Close()
	}
}

// An init without a free descriptor reports that, instead of letting the daemon wait until it takes
// init for dead.
func TestNoDescriptorIsLeft(t *testing.T) {
	s := startInit(t)
	guesttest.Leaks(t)
	pid := s.cmd.Process.Pid
	var was unix.Rlimit
	if err := unix.Prlimit(pid, unix.RLIMIT_NOFILE, nil, &was); err != nil {
		t.Fatal(err)
	}
	few := unix.Rlimit{Cur: 40, Max: was.Max}
	if err := unix.Prlimit(pid, unix.RLIMIT_NOFILE, &few, nil); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), testenv.HungAfter)
	defer cancel()
	var idle []*conn
	for refused := 0; refused < 3; { // one after the other: on a slow machine silent ones may be released meanwhile
		switch err := s.Ping(ctx); {
		case errors.Is(err, unix.EMFILE):
			refused++
		case err != nil:
			t.Fatalf("with %d connections: %v", len(idle), err)
		default:
			refused = 0
			c, err := dial(t, s.Client, time.Now().Add(time.Second))
			if err != nil {
				t.Fatal(err)
			}
			idle = append(idle, c)
		}
	}
	for _, c := range idle {
		_ = c.Close()
	}
	for err := error(unix.EMFILE); errors.Is(err, unix.EMFILE); { // init has yet to see it
		if err = s.Ping(ctx); err != nil && !errors.Is(err, unix.EMFILE) {
			t.Errorf("afterwards: %v", err)
		}
	}
}

// inFlight puts as many descriptors in flight, of the host user that is the sandbox's root, that
// init may send no more.
func inFlight(t *testing.T, s *sandbox) (land func()) {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	land = sync.OnceFunc(func() { unixmsg.CloseAll(pair[:]) })
	t.Cleanup(land)
	few := unix.Rlimit{Cur: 200, Max: 200}
	rights := unix.UnixRights(slices.Repeat([]int{int(os.Stdin.Fd())}, int(few.Cur)+1)...)
	if err := unix.Sendmsg(pair[0], []byte{0}, rights, nil, 0); err != nil {
		t.Fatal(err)
	}
	if err := unix.Prlimit(s.cmd.Process.Pid, unix.RLIMIT_NOFILE, &few, nil); err != nil {
		t.Fatal(err)
	}
	return land
}

// Where the kernel lets init send no descriptor, requests that need one are refused without a
// trace, and the sandbox goes on.
func TestNoDescriptorCanBeSent(t *testing.T) {
	s := startInitWith(t, 1)
	guesttest.Leaks(t)
	dir := t.TempDir()
	if err := os.WriteFile(dir+"/file", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	land := inFlight(t, s)
	terminal := ExecRequest{Argv: []string{"sh", "-c", "trap '' HUP TERM; sleep 100 & sleep 100"}, Env: testEnv, TTY: true}
	for range 3 {
		_, err := s.Exec(t.Context(), terminal)
		if e := asError(t, err); e.Stage != guest.StageStart || e.Errno != unix.ETOOMANYREFS {
			t.Errorf("an exec with a terminal: %v", err)
		}
		guesttest.WaitFor(t, func() bool { // those of killed processes, until these are reaped
			left, err := s.Processes(t.Context())
			return err == nil && len(left) == 0
		})
		_, err = s.Open(t.Context(), dir+"/file")
		if e := asError(t, err); e.Stage != guest.StageOpen || e.Errno != unix.ETOOMANYREFS || e.Path != dir+"/file" {
			t.Errorf("reading a file: %v", err)
		}
		_, err = s.Create(t.Context(), dir+"/new", 0o600, 0, 0)
		if e := asError(t, err); e.Stage != guest.StageOpen || e.Errno != unix.ETOOMANYREFS {
			t.Errorf("writing a file: %v", err)
		}
		_, err = s.Append(t.Context(), dir+"/made/log", 0o600, 0, 0)
		if e := asError(t, err); e.Stage != guest.StageOpen || e.Errno != unix.ETOOMANYREFS {
			t.Errorf("writing to a file's end: %v", err)
		}
		if got := s.sh(t, "echo fine; ls -A "+dir); got != "fine\nfile\n" {
			t.Errorf("an exec without one says %q", got)
		}
	}
	land()
	var e *Exec
	var err error
	guesttest.WaitFor(t, func() bool { // the user's other programs may have as many under way for a moment
		e, err = s.Exec(t.Context(), ExecRequest{Argv: []string{"true"}, Env: testEnv, TTY: true})
		return !errors.Is(err, unix.ETOOMANYREFS)
	})
	if err != nil {
		t.Fatal(err)
	}
	if exit, err := e.Stream(t.Context(), func(string, []byte) error { return nil }); err != nil || exit.Code != 0 {
		t.Errorf("afterwards: %+v, %v", exit, err)
	}
	_ = e.Close()
}

// Where init has other ids it sends under one of them, whatever is under way for root, and is
// itself again afterwards.
func TestDescriptorsAreSentUnderOtherIDs(t *testing.T) {
	s := startInit(t)
	guesttest.Leaks(t)
	inFlight(t, s)
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 10 {
		e, err := s.Exec(t.Context(), ExecRequest{Argv: []string{"sh", "-c", "sleep 100"}, Env: testEnv, TTY: true})
		if ids() == 1 {
			if e := asError(t, err); e.Errno != unix.ETOOMANYREFS {
				t.Errorf("with one id: %v", err)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		f, err := s.Open(t.Context(), path)
		if err != nil {
			t.Fatal(err)
		}
		_ = f.Close()
		threads, err := filepath.Glob("/proc/" + strconv.Itoa(s.cmd.Process.Pid) + "/task/*/status")
		if err != nil || len(threads) == 0 {
			t.Fatalf("init has %d threads, %v", len(threads), err)
		}
		for _, name := range threads {
			guesttest.WaitFor(t, func() bool { // its packets are here before that
				status, err := os.ReadFile(name)
				return err != nil || strings.Contains(string(status), "\nUid:\t0\t0\t0\t0\n")
			})
		}
		_ = e.Close()
	}
}

// dial connects as request does, and sends nothing yet.
func dial(t *testing.T, c *Client, deadline time.Time) (*conn, error) {
	t.Helper()
	fd, err := c.connect(t.Context(), deadline, func() (time.Time, bool) { return deadline, false })
	if err != nil {
		return nil, err
	}
	return newConn(fd)
}

// An init without room for another connection reports that at once: its silence would be taken for
// death.
func TestConnectionsThatAreTooMany(t *testing.T) {
	s := startInit(t)
	var conns []*conn
	closeConns := func() {
		for _, c := range conns {
			_ = c.Close()
		}
		conns = nil
	}
	defer closeConns()
	// On a slow machine the first may have been let go of, for saying nothing, before the last has
	// come.
	if !guesttest.Within(t, func() bool {
		closeConns()
		ctx, cancel := context.WithTimeout(t.Context(), initRequestTimeout)
		defer cancel()
		for range guest.MaxConns {
			c, err := dial(t, s.Client, time.Now().Add(20*time.Second))
			if err != nil {
				t.Fatal(err)
			}
			conns = append(conns, c)
		}
		return errors.Is(s.Ping(ctx), unix.EMFILE)
	}) {
		t.Error("it is not said that there is no place")
	}
	closeConns()
	guesttest.WaitFor(t, func() bool { return s.Ping(t.Context()) == nil })
}
