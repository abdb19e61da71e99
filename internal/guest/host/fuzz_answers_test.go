package host

import (
	"bytes"
	"context"
	"errors"
	"os"
	"runtime/debug"
	"testing"

	"github.com/sandboxd/sandboxd/internal/guest/guesttest"

	"github.com/sandboxd/sandboxd/internal/guest"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

// FuzzHostAnswers lets an init send anything, in up to four packets with descriptors of any kind,
// in answer to every request of the host. Each outcome is a valid answer, a refusal or a lost init;
// nothing stays open, and no call hangs.
func FuzzHostAnswers(f *testing.F) {
	for _, s := range []string{
		"pong {}", "started {\"pid\":7}\nexited {\"code\":3,\"wall\":1,\"cpu\":1,\"maxrss\":1}", "started {\"pid\":7}", "exited {\"pid\":7,\"code\":3,\"wall\":1,\"cpu\":1,\"maxrss\":1}", "opened {}", "created {}\ndone {}", "done {}",
		"info {\"size\":1,\"mode\":33188,\"mtime\":1,\"nsec\":1,\"uid\":0,\"gid\":0}\x00", "error {\"stage\":\"open\",\"errno\":2}\x00/x",
		"entries {\"list\":[{\"size\":1,\"mode\":33188,\"mtime\":1,\"nsec\":1,\"uid\":0,\"gid\":0}]}\x00a/b\x00\nlisted {\"more\":true}", "entries {}\nentries {}",
		"watching {}\nevents {\"list\":[{\"kind\":\"created\"}]}\x00a\x00\ndone {}", "watching {}\nevents {\"list\":[{\"kind\":\"moved\"}]}\x00a\x00../b",
		"started {\"pid\":7}\nexited {\"signal\":9,\"timeout\":true,\"wall\":1,\"cpu\":1,\"maxrss\":1}\nexited {}", "",
	} {
		for _, kinds := range []uint8{0, 1, 2, 4, 16, 17} {
			f.Add([]byte(s), kinds)
		}
	}
	empty, err := os.CreateTemp(f.TempDir(), "empty")
	if err != nil {
		f.Fatal(err)
	}
	defer func() { _ = empty.Close() }()
	readonly, err := os.Open(empty.Name())
	if err != nil {
		f.Fatal(err)
	}
	defer func() { _ = readonly.Close() }()
	r, w, err := os.Pipe()
	if err != nil {
		f.Fatal(err)
	}
	defer func() { _, _ = r.Close(), w.Close() }()
	given := []int{int(readonly.Fd()), int(empty.Fd()), int(r.Fd())}

	type answer struct {
		packets [][]byte
		fds     []int
	}
	answers := make(chan answer, 1)
	client := fakeInit(f, func(c *conn, _ guest.Packet, _ []int) {
		a := <-answers
		answers <- a
		for i, p := range a.packets {
			var fds []int
			if i == 0 {
				fds = a.fds
			}
			if c.Send(p, fds...) != nil {
				return
			}
		}
	})
	f.Fuzz(func(t *testing.T, data []byte, kinds uint8) {
		a := answer{packets: bytes.SplitN(data, []byte("\n"), 4)}
		for i, fd := range given { // two bits each: none, one, two
			for range min(kinds>>(2*i)&3, 2) {
				a.fds = append(a.fds, fd)
			}
		}
		answers <- a
		defer func() { <-answers }()
		// A file that is forgotten is closed by the garbage collector.
		defer debug.SetGCPercent(debug.SetGCPercent(-1))
		before := descriptorsOpen(t)
		ctx, cancel := context.WithTimeout(t.Context(), testenv.HungAfter)
		defer cancel()
		judge := func(what string, err error) bool {
			ge, refused := errors.AsType[*guest.Error](err)
			switch {
			case err == nil:
				return true
			case errors.Is(err, context.DeadlineExceeded):
				t.Errorf("%s hangs", what)
			case refused:
				if !guest.ValidStage(ge.Stage) || ge.Errno < 1 || ge.Errno > 4095 || len(ge.Path) > guest.MaxPath {
					t.Errorf("%s: %+v", what, ge)
				}
			case !errors.Is(err, ErrLost):
				t.Errorf("%s: %v is neither a refusal nor a lost init", what, err)
			}
			return false
		}
		if judge("ping", client.Ping(ctx)) && string(data) != "pong {}" && !bytes.HasPrefix(data, []byte("pong ")) {
			t.Errorf("%q is taken for a pong", data)
		}
		for _, r := range []ExecRequest{{}, {TTY: true}, {Whole: true}} {
			r.Argv = []string{"x"}
			e, err := client.Exec(ctx, r)
			if !judge("exec", err) {
				continue
			}
			if e.PID < 2 || r.TTY {
				t.Errorf("started as %d, with a terminal: %v", e.PID, r.TTY) // none of the given descriptors is one
			}
			x, err := e.Stream(ctx, func(string, []byte) error { return nil })
			if judge("stream", err) && (x.Code < 0 || x.Code > 255 || x.Signal < 0 || x.Signal > 64 || x.Timeout || x.Wall < 0 || x.CPU < 0 || x.MaxRSS < 0) {
				t.Errorf("ended with %+v", x)
			}
			if err := e.Close(); err != nil && !errors.Is(err, ErrLost) {
				t.Errorf("close: %v", err)
			}
		}
		if file, err := client.Open(ctx, "/x"); judge("open", err) {
			var st unix.Stat_t
			if err := unix.Fstat(int(file.Fd()), &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
				t.Errorf("opened a file of mode %o (%v)", st.Mode, err)
			}
			_ = file.Close()
		}
		if p, err := client.Create(ctx, "/x", 0o600, 0, 0); judge("create", err) {
			judge("commit", p.Commit())
		}
		if file, err := client.Append(ctx, "/x", 0o600, 0, 0); judge("append", err) {
			flags, err := unix.FcntlInt(file.file.Fd(), unix.F_GETFL, 0)
			if err != nil || flags&(unix.O_ACCMODE|unix.O_APPEND) != unix.O_WRONLY|unix.O_APPEND {
				t.Errorf("appends to a file opened with %#o (%v)", flags, err)
			}
			_ = file.Close()
		}
		_, err := client.Stat(ctx, "/x", false)
		judge("stat", err)
		_, err = client.List(ctx, "/x", 3, func(e Entry) error {
			if !below(e.Path) {
				t.Errorf("%q is listed", e.Path)
			}
			return nil
		})
		judge("list", err)
		judge("watch", client.Watch(ctx, "/x", true, func() error { return nil }, func(Change) error { return nil }))
		judge("mkdir", client.Mkdir(ctx, "/x", true, 0o700, 0, 0))
		judge("move", client.Move(ctx, "/x", "/y", false))
		judge("remove", client.Remove(ctx, "/x", true))
		judge("tar out", client.TarOut(ctx, "/x", w))
		judge("tar in", client.TarIn(ctx, "/x", r, 0, 0, false))
		if !guesttest.Within(t, func() bool { return descriptorsOpen(t) <= before }) {
			t.Fatalf("%d descriptors are left", descriptorsOpen(t)-before)
		}
	})
}

func descriptorsOpen(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}
