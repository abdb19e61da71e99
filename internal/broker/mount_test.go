package broker

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/hostdir"
	"github.com/sandboxd/sandboxd/internal/idmap"
	"github.com/sandboxd/sandboxd/internal/launcher"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/internal/unixmsg"
)

// A daemon that was taken over gets mounts of what lies below the operator's roots, and nothing
// else.
func TestOpenMountRequests(t *testing.T) {
	testenv.RequireOwnIDs(t)
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range []string{"root/a", "data"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o711); err != nil {
			t.Fatal(err)
		}
	}
	ids, err := idmap.Detect()
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs, err := unixmsg.Pair(unix.SOCK_SEQPACKET, "broker")
	if err != nil {
		t.Fatal(err)
	}
	defer ours.Close()
	defer theirs.Close()
	b := new(broker)
	ask := func(args string, files ...*os.File) (mounted, error) {
		got, err := b.handlers()[requestOpenMount](t.Context(), json.RawMessage(args), files)
		result, _ := got.(mounted)
		return result, err
	}
	request := func(source, rest string) string {
		return `{"source":"` + filepath.Join(dir, source) + `","uid":0,"gid":0` + rest + `}`
	}
	if result, err := ask(request("root/a", ""), theirs); err == nil && result.Refused == "" {
		t.Error("a broker that is not configured answers")
	}
	cfg := launcher.Options{DataDir: filepath.Join(dir, "data"), IDs: ids, Mounts: hostdir.Config{Roots: []string{filepath.Join(dir, "root")}}}
	if _, err := b.configure(t.Context(), Config{Launcher: cfg}); err != nil {
		t.Fatal(err)
	}
	for _, args := range []string{
		"", "1", `"/etc"`, request("root/a", `,"root":"/"`), request("root/a", `,"range":-1`), request("root/a", `,"range":100000`),
		`{"source":"` + filepath.Join(dir, "root/a") + `","uid":-1,"gid":0}`, `{"source":"` + filepath.Join(dir, "root/a") + `","uid":0,"gid":65536}`,
	} {
		if result, err := ask(args, theirs); err == nil {
			t.Errorf("arguments %q: %+v", args, result)
		}
	}
	for _, source := range []string{"data", "root/gone", "."} {
		if result, err := ask(request(source, ""), theirs); err != nil || !strings.HasPrefix(result.Refused, "mount /") {
			t.Errorf("%s: %+v, %v", source, result, err)
		}
	}
	for _, files := range [][]*os.File{nil, {theirs, theirs}} {
		if _, err := ask(request("root/a", ""), files...); err == nil {
			t.Errorf("%d files are accepted", len(files))
		}
	}
	if n, _, _, _, err := unix.Recvmsg(int(ours.Fd()), make([]byte, 1), nil, unix.MSG_DONTWAIT); !errors.Is(err, unix.EAGAIN) {
		t.Errorf("%d bytes came, %v", n, err)
	}
	if result, err := ask(request("root/a", `,"read_only":true,"range":1`), theirs); err != nil || result.Refused != "" {
		t.Fatalf("%+v, %v", result, err)
	}
	oob := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := unix.Recvmsg(int(ours.Fd()), make([]byte, 1), oob, unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	mounts := rights(oob[:n])
	defer closeAll(mounts)
	if len(mounts) != 1 {
		t.Fatalf("%d mounts", len(mounts))
	}
}

// A daemon that was taken over gets no mount of what sandboxd keeps for itself as a workspace, nor
// of another directory than the one that was meant.
func TestMountWorkspaceRequests(t *testing.T) {
	testenv.RequireOwnIDs(t)
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range []string{"project", "data/sandboxes/other"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o711); err != nil {
			t.Fatal(err)
		}
	}
	ids, err := idmap.Detect()
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs, err := unixmsg.Pair(unix.SOCK_SEQPACKET, "broker")
	if err != nil {
		t.Fatal(err)
	}
	defer ours.Close()
	defer theirs.Close()
	b := new(broker)
	data := filepath.Join(dir, "data")
	cfg := launcher.Options{DataDir: data, IDs: ids, Mounts: hostdir.Config{Own: []string{data}}}
	if _, err := b.configure(t.Context(), Config{Launcher: cfg}); err != nil {
		t.Fatal(err)
	}
	ask := func(source, meant string, files ...*os.File) (mounted, error) {
		t.Helper()
		var st unix.Stat_t
		if err := unix.Stat(filepath.Join(dir, meant), &st); err != nil {
			t.Fatal(err)
		}
		args, err := json.Marshal(launcher.WorkspaceMount{Source: filepath.Join(dir, source), Device: st.Dev, Inode: st.Ino, Range: 1})
		if err != nil {
			t.Fatal(err)
		}
		got, err := b.handlers()[requestMountWorkspace](t.Context(), args, files)
		result, _ := got.(mounted)
		return result, err
	}
	for _, source := range []string{"data", "data/sandboxes/other", "."} {
		if result, err := ask(source, source, theirs); err != nil || !strings.Contains(result.Refused, "sandboxd's own") {
			t.Errorf("%s: %+v, %v", source, result, err)
		}
	}
	if result, err := ask("project", "data", theirs); err == nil {
		t.Errorf("another directory than was meant: %+v", result)
	}
	if _, err := ask("project", "project"); err == nil {
		t.Error("no file is accepted")
	}
	if n, _, _, _, err := unix.Recvmsg(int(ours.Fd()), make([]byte, 1), nil, unix.MSG_DONTWAIT); !errors.Is(err, unix.EAGAIN) {
		t.Errorf("%d bytes came, %v", n, err)
	}
}
