package gateway

import (
	"errors"
	"fmt"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
)

// ownedByHost reports whether an address belongs to the host itself, so that a connection to it
// stays in the host and does not pass a firewall for other machines. It asks the kernel for the
// route by connecting sockets of UDP, which sends nothing and needs no privilege. A bind would tell
// too, but succeeds for every address where net.ipv4.ip_nonlocal_bind is set.
func ownedByHost(addr netip.Addr) (own bool, err error) {
	probe := ownedIPv6
	if addr = addr.Unmap(); addr.Is4() {
		probe = ownedIPv4
	}
	if own, err = probe(addr); err != nil {
		return false, fmt.Errorf("ask for the route to %s: %w", addr, err)
	}
	return own, nil
}

// discard is the port that probes are connected to: any but 0.
const discard = 9

// ownedIPv4 looks whether the kernel routes from 127.0.0.1 to the address. It does so only to
// addresses of the host, whether an interface has the address or a local route covers it. Where
// route_localnet is set, as Kubernetes does, it routes to all addresses, but with another MTU than
// on lo. The source address alone would not do: for the second address of an interface it is the
// first.
func ownedIPv4(addr netip.Addr) (bool, error) {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false, os.NewSyscallError("socket", err)
	}
	defer unix.Close(s)
	var mtu [2]int
	for i, to := range [][4]byte{{127, 0, 0, 1}, addr.As4()} {
		err := unix.Connect(s, &unix.SockaddrInet4{Port: discard, Addr: to})
		if i == 1 && errors.Is(err, unix.EINVAL) {
			return false, nil // the source may not leave the host
		}
		if err != nil {
			return false, os.NewSyscallError("connect", err)
		}
		if mtu[i], err = unix.GetsockoptInt(s, unix.SOL_IP, unix.IP_MTU); err != nil {
			return false, os.NewSyscallError("getsockopt", err)
		}
	}
	return mtu[0] == mtu[1], nil
}

// ownedIPv6 looks whether the kernel chooses the address as its own source, as it does for an
// address of an interface (RFC 6724 section 5 rule 1). Addresses that only a local route covers are
// known by the MTU, which is larger than the MTU of any device but lo.
func ownedIPv6(addr netip.Addr) (bool, error) {
	s, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false, os.NewSyscallError("socket", err)
	}
	defer unix.Close(s)
	if err := unix.Connect(s, &unix.SockaddrInet6{Port: discard, Addr: addr.As16()}); err != nil {
		return false, os.NewSyscallError("connect", err)
	}
	source, err := unix.Getsockname(s)
	if err != nil {
		return false, os.NewSyscallError("getsockname", err)
	}
	mtu, err := unix.GetsockoptInt(s, unix.SOL_IPV6, unix.IPV6_MTU)
	if err != nil {
		return false, os.NewSyscallError("getsockopt", err)
	}
	in6, ok := source.(*unix.SockaddrInet6)
	return ok && in6.Addr == addr.As16() || mtu > 0xffff, nil
}
