package netns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/osthread"
)

// Dial connects to a port of the sandbox's loopback: for TCP ::1, and 127.0.0.1 if that refuses;
// for UDP 127.0.0.1. The network is "tcp" or "udp". It does what [Socket] and [Connect] do.
func Dial(ctx context.Context, ns *os.File, network string, port uint16) (net.Conn, error) {
	s, err := Socket(ns, network)
	if err != nil {
		return nil, err
	}
	c, err := Connect(ctx, s, port)
	return c, errors.Join(err, s.Close())
}

// Socket makes a socket inside a namespace, for one [Connect] by this process or another one: the
// socket stays inside. The caller needs CAP_SYS_ADMIN in the user namespace that the namespace
// belongs to.
func Socket(ns *os.File, network string) (*os.File, error) {
	kind := unix.SOCK_STREAM
	switch network {
	case "tcp":
	case "udp":
		kind = unix.SOCK_DGRAM
	default:
		return nil, fmt.Errorf("make socket in network namespace: network %q is neither tcp nor udp", network)
	}
	var fd int
	err := osthread.Run(func() (err error) {
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return os.NewSyscallError("setns", err)
		}
		// Of IPv6, which reaches IPv4 by mapped addresses.
		if fd, err = unix.Socket(unix.AF_INET6, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0); err != nil {
			return os.NewSyscallError("socket", err)
		}
		if err := unix.SetsockoptInt(fd, unix.SOL_IPV6, unix.IPV6_V6ONLY, 0); err != nil {
			return errors.Join(os.NewSyscallError("setsockopt", err), unix.Close(fd))
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("make socket in network namespace: %w", err)
	}
	return os.NewFile(uintptr(fd), network), nil
}

// Connect connects a socket of [Socket] to a port of the sandbox's loopback. The connection has a
// descriptor of its own: the caller closes the socket. If no program receives UDP on the port, a
// later read or write fails, not Connect.
func Connect(ctx context.Context, socket *os.File, port uint16) (net.Conn, error) {
	return connectOne(ctx, socket, port, netip.IPv6Loopback(), netip.AddrFrom4([4]byte{127, 0, 0, 1}))
}

// ConnectOwn is [Connect] to the sandbox's addresses in the place of its loopback: [Address6], and
// [Address4] if that refuses. It does not reach servers that listen on the loopback only.
func ConnectOwn(ctx context.Context, socket *os.File, port uint16) (net.Conn, error) {
	return connectOne(ctx, socket, port, Address6, Address4)
}

// connectOne connects to the IPv6 address and, if that refuses, to the other. A socket for UDP is
// connected to the other.
func connectOne(ctx context.Context, socket *os.File, port uint16, six, four netip.Addr) (net.Conn, error) {
	// In this order: a socket that was connected to a mapped address is not good for IPv6 any more.
	err := error(unix.ECONNREFUSED)
	if stream, kindErr := isStream(socket); kindErr != nil {
		return nil, fmt.Errorf("connect to port %d of the sandbox: %w", port, kindErr)
	} else if stream {
		err = connect(ctx, socket, &unix.SockaddrInet6{Port: int(port), Addr: six.As16()})
	}
	if errors.Is(err, unix.ECONNREFUSED) {
		err = connect(ctx, socket, &unix.SockaddrInet6{Port: int(port), Addr: four.As16()}) // mapped
	}
	if err != nil {
		return nil, fmt.Errorf("connect to port %d of the sandbox: %w", port, err)
	}
	c, err := net.FileConn(socket)
	if err != nil {
		return nil, fmt.Errorf("connect to port %d of the sandbox: %w", port, err)
	}
	return c, nil
}

func isStream(socket *os.File) (bool, error) {
	raw, err := socket.SyscallConn()
	if err != nil {
		return false, err
	}
	var kind int
	var failed error
	err = raw.Control(func(fd uintptr) {
		kind, failed = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_TYPE)
	})
	return kind == unix.SOCK_STREAM, errors.Join(err, os.NewSyscallError("getsockopt", failed))
}

func connect(ctx context.Context, socket *os.File, to unix.Sockaddr) error {
	raw, err := socket.SyscallConn()
	if err != nil {
		return err
	}
	if err := socket.SetWriteDeadline(time.Time{}); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = socket.SetWriteDeadline(time.Unix(1, 0)) })
	defer stop()
	var failed error
	err = raw.Write(func(fd uintptr) (done bool) {
		// A second call returns the result, and after a failure the socket can be connected again. To read
		// SO_ERROR would leave it in between.
		failed = unix.Connect(int(fd), to)
		return !errors.Is(failed, unix.EINPROGRESS) && !errors.Is(failed, unix.EALREADY)
	})
	if ctx.Err() != nil && err != nil {
		return context.Cause(ctx)
	}
	return errors.Join(err, failed)
}
