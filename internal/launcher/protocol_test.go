package launcher

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/internal/rootfs"
	"github.com/sandboxd/sandboxd/runtime"
)

func pair(t testing.TB) (a, b *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var conns [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "socket")
		c, err := net.FileConn(f)
		if err != nil {
			t.Fatal(err)
		}
		_ = f.Close()
		conns[i] = c.(*net.UnixConn)
		t.Cleanup(func() { _ = c.Close() })
	}
	return conns[0], conns[1]
}

func descriptors(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

func TestErrorClassesSurviveTheSocket(t *testing.T) {
	for _, c := range classes {
		in := fmt.Errorf("do something: %w", c.err)
		out := toWire(in).toError()
		if !errors.Is(out, c.err) {
			t.Errorf("%s: errors.Is does not find the class in %v", c.name, out)
		}
		if out.Error() != in.Error() {
			t.Errorf("%s: message %q became %q", c.name, in, out)
		}
		for _, other := range classes {
			if !errors.Is(c.err, other.err) && errors.Is(out, other.err) {
				t.Errorf("%s was taken for %s too", c.name, other.name)
			}
		}
	}
	if err := toWire(nil).toError(); err != nil {
		t.Errorf("no error became %v", err)
	}
	if err := toWire(errors.New("x")).toError(); err == nil || err.Error() != "x" {
		t.Errorf("an error without class became %v", err)
	}
}

func TestMessageWithDescriptors(t *testing.T) {
	a, b := pair(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if err := send(a, &request{Op: opCreate}, w); err != nil {
		t.Fatal(err)
	}
	_ = w.Close()
	var req request
	files, err := receive(b, &req)
	if err != nil {
		t.Fatal(err)
	}
	if req.Op != opCreate || len(files) != 1 {
		t.Fatalf("got %+v with %d descriptors", req, len(files))
	}
	flags, err := unix.FcntlInt(files[0].Fd(), unix.F_GETFD, 0)
	if err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("a received descriptor is not close-on-exec (%v)", err)
	}
	if _, err := files[0].WriteString("x"); err != nil {
		t.Error(err)
	}
	closeAll(files)
	buf := make([]byte, 2)
	if n, err := r.Read(buf); n != 1 || err != nil {
		t.Errorf("read %d, %v from the other end", n, err)
	}
}

func TestBadMessagesAreRefusedAndLeaveNothing(t *testing.T) {
	null, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	for name, data := range map[string]string{
		"unknown field":   `{"op":"info","nonsense":1}`,
		"not JSON":        "\x00\x01",
		"wrong type":      `{"op":7}`,
		"two messages":    `{"op":"info"}{"op":"info"}`,
		"nothing":         "",
		"half a message":  `{"op":"in`,
		"beyond the size": `{"op":"` + strings.Repeat("x", maxPacket) + `"}`,
	} {
		t.Run(name, func(t *testing.T) {
			a, b := pair(t)
			before := descriptors(t)
			if _, _, err := a.WriteMsgUnix([]byte(data), unix.UnixRights(int(null.Fd()), int(null.Fd())), nil); err != nil {
				t.Fatal(err)
			}
			var req request
			if files, err := receive(b, &req); err == nil || files != nil {
				t.Errorf("accepted: %+v, %v", req, files)
			}
			if after := descriptors(t); after > before { // fewer, where files that others have forgotten are collected
				t.Errorf("%d descriptors leaked", after-before)
			}
		})
	}
}

func TestTooLongMessageIsNotSent(t *testing.T) {
	a, _ := pair(t)
	if err := send(a, &request{ID: strings.Repeat("x", maxPacket)}); err == nil {
		t.Error("sent")
	}
}

// Launchers outlive daemons, so the names on the wire stay when those in the code change.
func TestNamesOnTheWireStay(t *testing.T) {
	ask := wireDiffRequest(&runtime.DiffRequest{
		ID: "abc", Rootfs: rootfs.Source{Layers: []string{"sha256:01"}}, Layer: true, Freeze: true, Latest: time.Unix(1, 0).UTC(), Holes: true,
		Limits: runtime.DiffLimits{Entries: 1, Bytes: 2, BelowEntries: 3, BelowBytes: 4, Ratio: 5, RatioFloor: 6, Depth: 7, Name: 8},
	})
	const diff = `{"id":"abc","rootfs":{"layers":["sha256:01"]},"layer":true,"freeze":true,"latest":"1970-01-01T00:00:01Z",` +
		`"limits":{"entries":1,"bytes":2,"below":{"entries":3,"bytes":4},"ratio":5,"ratio_floor":6,"depth":7,"name":8},"holes":true}`
	set := wireSet{Sandbox: "abc", Name: "x", Files: 2}
	for want, msg := range map[string]any{
		`{"op":"deposit","deposit":{"sandbox":"abc","name":"x","files":2}}`:     request{Op: opDeposit, Set: set},
		`{"op":"withdraw","deposit":{"sandbox":"abc","name":"x","files":2}}`:    request{Op: opWithdraw, Set: set},
		`{"op":"drop","deposit":{"sandbox":"abc","name":"x","files":2}}`:        request{Op: opDrop, Set: set},
		`{"op":"diff","diff":` + diff + `}`:                                     request{Op: opDiff, Diff: &ask},
		`{"op":"snapshot","snap":{"diff":` + diff + `,"chain_id":"sha256:02"}}`: request{Op: opSnapshot, Snap: &snapshotRequest{Diff: ask, ChainID: "sha256:02"}},
		`{"deposits":[{"sandbox":"abc","name":"x","files":2}]}`:                 response{Sets: []wireSet{set}},
		`{"layer":{"diff_id":"sha256:03","size":1,"entries":2},"frozen":true}`:  response{Layer: &layer.Result{DiffID: "sha256:03", Size: 1, Entries: 2}, Frozen: true},
	} {
		if got, err := json.Marshal(msg); err != nil || string(got) != want {
			t.Errorf("%s, %v; want %s", got, err, want)
		}
	}
}
