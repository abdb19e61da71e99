package gateway

import (
	"errors"
	"fmt"
	"net/netip"
	"syscall"

	"golang.org/x/sys/unix"
)

// PrepareDNS makes a UDP socket report the address that each message was sent to, for
// [Network.ServeDNS]. Where tproxy sends messages for other addresses to it, it needs
// IP_TRANSPARENT too, which takes privilege over its namespace.
func PrepareDNS(c syscall.Conn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return fmt.Errorf("prepare the socket for DNS: %w", err)
	}
	var errs [2]error
	err = raw.Control(func(fd uintptr) {
		errs[0] = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_RECVORIGDSTADDR, 1)
		errs[1] = unix.SetsockoptInt(int(fd), unix.SOL_IPV6, unix.IPV6_RECVORIGDSTADDR, 1)
	})
	if err != nil || errs[0] != nil && errs[1] != nil { // a socket of one family has one of the options
		return fmt.Errorf("prepare the socket for DNS: %w", errors.Join(err, errs[0], errs[1]))
	}
	return nil
}

// sourceOf turns the control message with the destination of a question into the one that sends the
// answer from there, and returns the destination. Both are zero if there is none.
func sourceOf(oob []byte) (answer []byte, to netip.Addr) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, to
	}
	for _, m := range messages {
		switch {
		case m.Header.Level == unix.SOL_IP && m.Header.Type == unix.IP_ORIGDSTADDR && len(m.Data) >= 8:
			a := [4]byte(m.Data[4:8])
			return unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: a}), netip.AddrFrom4(a)
		case m.Header.Level == unix.SOL_IPV6 && m.Header.Type == unix.IPV6_ORIGDSTADDR && len(m.Data) >= 24:
			a := [16]byte(m.Data[8:24])
			return unix.PktInfo6(&unix.Inet6Pktinfo{Addr: a}), netip.AddrFrom16(a).Unmap()
		}
	}
	return nil, to
}
