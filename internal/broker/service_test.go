package broker

import (
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/unixmsg"
)

// A daemon that was taken over is connected to sockets that the operator has named, and to no
// others. It is not told their paths.
func TestDialServiceRequests(t *testing.T) {
	dir, err := os.MkdirTemp("", "broker") //nolint:usetesting // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	path := filepath.Join(dir, "sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	b := new(broker)
	if _, err := b.configure(t.Context(), Config{Services: map[string]string{"models": path, "gone": filepath.Join(dir, "gone")}}); err != nil {
		t.Fatal(err)
	}
	ours, theirs, err := unixmsg.Pair(unix.SOCK_SEQPACKET, "broker")
	if err != nil {
		t.Fatal(err)
	}
	defer ours.Close()
	defer theirs.Close()
	ask := func(args string, files ...*os.File) error {
		_, err := b.handlers()[requestDialService](t.Context(), json.RawMessage(args), files)
		return err
	}
	for args, want := range map[string]string{
		`"gone"`: "no such file or directory", `"other"`: "named no such socket", `""`: "named no such socket", `"` + path + `"`: "named no such socket",
		`{"path":"` + path + `"}`: "decode", `1`: "decode",
	} {
		if err := ask(args, theirs); err == nil || !strings.HasPrefix(strings.TrimPrefix(err.Error(), "the operator has "), want) {
			t.Errorf("%s: %v, want %q", args, err, want)
		}
	}
	for _, files := range [][]*os.File{nil, {theirs, theirs}} {
		if err := ask(`"models"`, files...); err == nil {
			t.Errorf("%d files are accepted", len(files))
		}
	}
	if _, _, _, _, err := unix.Recvmsg(int(ours.Fd()), make([]byte, 1), nil, unix.MSG_DONTWAIT); !errors.Is(err, unix.EAGAIN) {
		t.Errorf("something was sent: %v", err)
	}
	if err := ask(`"models"`, theirs); err != nil {
		t.Fatal(err)
	}
	oob := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := unix.Recvmsg(int(ours.Fd()), make([]byte, 1), oob, unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	files := rights(oob[:n])
	if len(files) != 1 {
		t.Fatalf("%d files", len(files))
	}
	c, err := unixConn(files[0])
	if err != nil {
		t.Fatal(err)
	}
	server, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	if _, err := io.WriteString(c, "hello"); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(server); err != nil || string(got) != "hello" { // no other process holds the connection
		t.Errorf("%q, %v", got, err)
	}
}
