package netns

import (
	"errors"
	"net"
	"net/netip"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// A program's socket is found by the two ends of its connection, and the gateway's end is another
// one. A socket that has no connection any more is not found.
func TestInode(t *testing.T) {
	n := namespace(t)
	if n.Diag == nil {
		t.Fatal("the kernel does not tell of sockets")
	}
	l := listener(t, n.Stream)
	for _, to := range []string{"8.8.8.8:443", "[2600::1]:443", "[::ffff:1.1.1.1]:80", "10.1.2.3:22"} {
		c := dial(t, n, "tcp", to)
		g, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		// As the gateway knows them: the accepted connection's.
		program, server := addrPort(t, g.RemoteAddr()), addrPort(t, g.LocalAddr())
		wantInode(t, n, "tcp", program, server, numberOf(t, c))
		wantInode(t, n, "tcp", server, program, numberOf(t, g))
		wantInode(t, n, "tcp", netip.AddrPortFrom(program.Addr(), program.Port()-1), server, 0)
		if err := errors.Join(g.(*net.TCPConn).SetLinger(0), g.Close()); err != nil {
			t.Fatal(err)
		}
		wantInode(t, n, "tcp", program, server, 0)
	}
	d := datagrams(t, n.DNS)
	for _, to := range []string{"8.8.8.8:53", "[2600::1]:53", "192.0.2.53:53"} {
		c := dial(t, n, "udp", to)
		if _, err := c.Write([]byte("question")); err != nil {
			t.Fatal(err)
		}
		oob := make([]byte, 128)
		_, size, _, from, err := d.ReadMsgUDPAddrPort(make([]byte, 64), oob)
		if err != nil {
			t.Fatal(err)
		}
		wantInode(t, n, "udp", from, netip.AddrPortFrom(destinationOf(t, oob[:size]), 53), numberOf(t, c))
	}
	if _, err := Inode(n.Diag, "unix", netip.AddrPort{}, netip.AddrPort{}); err == nil {
		t.Error("a socket of another family is looked for")
	}
}

func wantInode(t *testing.T, n *Namespace, network string, program, server netip.AddrPort, want uint32) {
	t.Helper()
	if got, err := Inode(n.Diag, network, program, server); err != nil || got != want {
		t.Errorf("%s from %s to %s: inode %d, %v; want %d", network, program, server, got, err, want)
	}
}

// numberOf returns the inode of a socket.
func numberOf(t *testing.T, c net.Conn) (inode uint32) {
	t.Helper()
	raw, err := c.(syscall.Conn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var failed error
	err = raw.Control(func(fd uintptr) {
		var st unix.Stat_t
		failed = unix.Fstat(int(fd), &st)
		inode = uint32(st.Ino)
	})
	if err := errors.Join(err, failed); err != nil {
		t.Fatal(err)
	}
	return inode
}

// BenchmarkInode measures a question about one socket.
func BenchmarkInode(b *testing.B) {
	n := namespace(b)
	l := listener(b, n.Stream)
	dial(b, n, "tcp", "8.8.8.8:443")
	g, err := l.Accept()
	if err != nil {
		b.Fatal(err)
	}
	program, server := addrPort(b, g.RemoteAddr()), addrPort(b, g.LocalAddr())
	for b.Loop() {
		if inode, err := Inode(n.Diag, "tcp", program, server); err != nil || inode == 0 {
			b.Fatal(inode, err)
		}
	}
}
