package netns

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Layout of the messages of sock_diag(7): nlmsghdr, then inet_diag_req_v2 or inet_diag_msg.
const (
	diagHeader  = unix.NLMSG_HDRLEN
	diagRequest = diagHeader + 56
	diagSocket  = 48 // of inet_diag_sockid, which is at 8 in the request and at 4 in the answer
	diagInode   = diagHeader + 4 + diagSocket + 16
	diagAnswer  = diagInode + 4
	byFamily    = 20 // SOCK_DIAG_BY_FAMILY
)

// diag returns a socket by which [Inode] asks for sockets of the calling thread's namespace; nil if
// the kernel does not tell. It has to answer about the listener of port 1, which is there already:
// where the kernel lacks the module, each question would have root's modprobe look for it.
func diag() (*os.File, error) {
	if diagMissing.Load() {
		return nil, nil
	}
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return nil, nil //nolint:nilerr // the kernel does not tell
	}
	f := os.NewFile(uintptr(fd), "diag")
	any6 := netip.IPv6Unspecified()
	switch inode, err := inodeOf(f, unix.AF_INET6, unix.IPPROTO_TCP, netip.AddrPortFrom(any6, portStream), netip.AddrPortFrom(any6, 0)); {
	case errors.Is(err, unix.ENOENT), err == nil && inode == 0:
		diagMissing.Store(true)
		return nil, f.Close()
	case err != nil:
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// diagMissing is set once the kernel has not told of a socket.
var diagMissing atomic.Bool

// Inode returns the inode of a program's socket, as /proc/PID/fd shows it, by the two ends of its
// connection. The network is "tcp" or "udp". It returns 0 if there is none: the socket is closed,
// or its connection was reset. One caller at a time asks by a socket.
func Inode(diag *os.File, network string, program, server netip.AddrPort) (uint32, error) {
	protocol := uint8(unix.IPPROTO_TCP)
	switch network {
	case "tcp":
	case "udp":
		protocol = unix.IPPROTO_UDP
		// The kernel looks a UDP socket up as for a datagram that it has got: its own end is the second.
		program, server = server, program
	default:
		return 0, fmt.Errorf("find a socket: network %q is neither tcp nor udp", network)
	}
	program, server = netip.AddrPortFrom(program.Addr().Unmap(), program.Port()), netip.AddrPortFrom(server.Addr().Unmap(), server.Port())
	family := uint8(unix.AF_INET6) // a socket of IPv6 with mapped addresses is found as one of IPv4
	if program.Addr().Is4() && server.Addr().Is4() {
		family = unix.AF_INET
	}
	inode, err := inodeOf(diag, family, protocol, program, server)
	if errors.Is(err, unix.ENOENT) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("find a socket of %s: %w", network, err)
	}
	return inode, nil
}

// inodeOf asks for exactly one socket. The kernel answers while it is asked.
func inodeOf(diag *os.File, family, protocol uint8, from, to netip.AddrPort) (inode uint32, err error) {
	raw, err := diag.SyscallConn()
	if err != nil {
		return 0, err
	}
	question := make([]byte, diagRequest)
	native := binary.NativeEndian
	native.PutUint32(question, diagRequest)
	native.PutUint16(question[4:], byFamily)
	native.PutUint16(question[6:], unix.NLM_F_REQUEST)
	body := question[diagHeader:]
	body[0], body[1] = family, protocol
	native.PutUint32(body[4:], ^uint32(0)) // states: all
	id := body[8:]
	binary.BigEndian.PutUint16(id, from.Port())
	binary.BigEndian.PutUint16(id[2:], to.Port())
	copy(id[4:20], from.Addr().AsSlice())
	copy(id[20:36], to.Addr().AsSlice())
	native.PutUint64(id[40:], ^uint64(0)) // no cookie
	var failed error
	err = raw.Control(func(fd uintptr) {
		failed = func() error {
			if err := unix.Sendto(int(fd), question, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
				return os.NewSyscallError("sendto", err)
			}
			answer := make([]byte, 1024)
			n, _, err := unix.Recvfrom(int(fd), answer, unix.MSG_DONTWAIT)
			if err != nil {
				return os.NewSyscallError("recvfrom", err)
			}
			answer = answer[:n]
			switch {
			case n >= diagHeader+4 && native.Uint16(answer[4:]) == unix.NLMSG_ERROR:
				return unix.Errno(-int32(native.Uint32(answer[diagHeader:]))) //nolint:gosec // G115: the kernel's
			case n < diagAnswer || native.Uint16(answer[4:]) != byFamily:
				return fmt.Errorf("an answer of %d bytes", n)
			}
			inode = native.Uint32(answer[diagInode:])
			return nil
		}()
	})
	return inode, errors.Join(err, failed)
}
