package broker

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/idmap"
	"github.com/sandboxd/sandboxd/internal/launcher"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/internal/unixmsg"
)

// A daemon that was taken over gets mounts of the launcher's two directories, for ranges that there
// are, up to the limit, and nothing else.
func TestMountRangeRequests(t *testing.T) {
	testenv.RequireOwnIDs(t)
	ids := idmap.NewPlan(idmap.Inputs{
		SubUID: []idmap.Range{{Outside: 1 << 30, Size: 2*idmap.SandboxIDs + 1}}, SubGID: []idmap.Range{{Outside: 1 << 30, Size: 2*idmap.SandboxIDs + 1}},
		OwnUID: []idmap.Range{{Size: 1<<32 - 1}}, OwnGID: []idmap.Range{{Size: 1<<32 - 1}},
	})
	if ids.Ranges() != 1 {
		t.Fatalf("%d ranges", ids.Ranges())
	}
	o := launcher.Options{DataDir: t.TempDir(), IDs: ids}
	for _, d := range []string{"layers", "sandboxes", "secret"} {
		dir := filepath.Join(o.DataDir, d)
		if err := errors.Join(os.Mkdir(dir, 0o711), os.Lchown(dir, 1<<30, 1<<30)); err != nil {
			t.Fatal(err)
		}
	}
	ask := func(b *broker, args string, files ...*os.File) error {
		_, err := b.handlers()[requestMountRange](t.Context(), json.RawMessage(args), files)
		return err
	}
	ours, theirs, err := unixmsg.Pair(unix.SOCK_SEQPACKET, "broker")
	if err != nil {
		t.Fatal(err)
	}
	defer ours.Close()
	defer theirs.Close()
	if err := ask(new(broker), "1", theirs); err == nil {
		t.Error("a broker that is not configured answers")
	}
	b := new(broker)
	if _, err := b.configure(t.Context(), Config{Launcher: o}); err != nil {
		t.Fatal(err)
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	for _, args := range []string{"", "null x", `"1"`, `"../secret"`, `{"number":1}`, "[1]", "1 1", "1.5", "1e99"} {
		if err := ask(b, args, theirs); err == nil {
			t.Errorf("arguments %q are accepted", args)
		}
	}
	for _, files := range [][]*os.File{nil, {theirs, theirs}} {
		if err := ask(b, "1", files...); err == nil {
			t.Errorf("%d files are accepted", len(files))
		}
	}
	if b.mounted != 0 {
		t.Errorf("malformed requests count as %d", b.mounted)
	}
	if n, _, _, _, err := unix.Recvmsg(int(ours.Fd()), make([]byte, 1), nil, unix.MSG_DONTWAIT); !errors.Is(err, unix.EAGAIN) {
		t.Errorf("%d bytes came, %v", n, err)
	}

	if err := ask(b, "1", theirs); err != nil {
		t.Fatal(err)
	}
	oob := make([]byte, unix.CmsgSpace(8*4))
	_, n, _, _, err := unix.Recvmsg(int(ours.Fd()), make([]byte, 1), oob, unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	mounts := rights(oob[:n])
	defer closeAll(mounts)
	if len(mounts) != 2 {
		t.Fatalf("%d mounts", len(mounts))
	}
	for i, name := range []string{"layers", "sandboxes"} {
		want, err := os.Stat(filepath.Join(o.DataDir, name))
		if err != nil {
			t.Fatal(err)
		}
		got, err := mounts[i].Stat()
		if err != nil {
			t.Fatal(err)
		}
		if !os.SameFile(want, got) {
			t.Errorf("mount %d is not of %s", i, name)
		}
		// Nothing above its root is reached, and it can be attached by a process that may mount only.
		var above unix.Stat_t
		if err := unix.Fstatat(int(mounts[i].Fd()), "..", &above, 0); err != nil || above.Ino != got.Sys().(*syscall.Stat_t).Ino {
			t.Errorf("above %s is another directory, %v", name, err)
		}
	}

	// The limit is two for each range that were sent, until another launcher is started.
	for _, number := range []int{-1, 0, 2, 1 << 20} {
		b.mounted = 0
		if err := ask(b, strconv.Itoa(number), theirs); err == nil {
			t.Errorf("range %d is mounted", number)
		}
	}
	b.mounted = 1
	if err := ask(b, "1", null); err == nil {
		t.Error("mounts were sent to a file")
	}
	if err := ask(b, "1", theirs); err != nil {
		t.Errorf("a failure counts: %v", err)
	}
	if err := ask(b, "1", theirs); err == nil {
		t.Error("a range was mounted more often than twice")
	}
}
