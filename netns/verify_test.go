package netns

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// Files that another process sends are taken for a namespace only if they are one of ours.
func TestVerifyOfReceivedFiles(t *testing.T) {
	n, other := namespace(t), namespace(t)
	open := func(name string) *os.File {
		t.Helper()
		f, err := os.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() })
		return f
	}
	null := open(os.DevNull)
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		t.Fatal(err)
	}
	routes := os.NewFile(uintptr(fd), "routes")
	t.Cleanup(func() { _ = routes.Close() })
	for name, tc := range map[string]struct {
		n    Namespace
		want string
	}{
		"whole":         {*n, ""},
		"no namespace":  {Namespace{null, n.Stream, n.DNS, n.DNSTCP, n.Diag}, "ask for its kind"},
		"another kind":  {Namespace{open("/proc/self/ns/uts"), n.Stream, n.DNS, n.DNSTCP, n.Diag}, "its kind is"},
		"our own":       {Namespace{open("/proc/self/ns/net"), n.Stream, n.DNS, n.DNSTCP, n.Diag}, "our own"},
		"a foreign one": {Namespace{foreign(t), n.Stream, n.DNS, n.DNSTCP, n.Diag}, "another user namespace"},
		"other sockets": {Namespace{n.NS, other.Stream, n.DNS, n.DNSTCP, n.Diag}, "another namespace"},
		"swapped":       {Namespace{n.NS, n.DNSTCP, n.DNS, n.Stream, n.Diag}, "is bound to"},
		"no sockets":    {Namespace{n.NS, n.Stream, null, n.DNSTCP, n.Diag}, "getsockname"},
		"a listener":    {Namespace{n.NS, n.Stream, n.Stream, n.DNSTCP, n.Diag}, "option 3 of level 1"},
		"other answers": {Namespace{n.NS, n.Stream, n.DNS, n.DNSTCP, other.Diag}, "another namespace"},
		"other netlink": {Namespace{n.NS, n.Stream, n.DNS, n.DNSTCP, routes}, "option 38 is 0, not 4"},
	} {
		err := tc.n.Verify()
		if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", name, err, tc.want)
		}
	}
}

// foreign returns a network namespace of a user namespace below.
func foreign(t *testing.T) *os.File {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "cat") // until its input ends
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET}
	in, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", cmd.Process.Pid))
	if err := errors.Join(err, in.Close(), cmd.Wait()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}
