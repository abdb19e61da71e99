package attack

import (
	"encoding/binary"
	"errors"

	"golang.org/x/sys/unix"
)

// network are changes of the network, each in a subsystem of its own, and sockets that bypass it.
func network() []Attack {
	option := func(name, layer string, level, option, value int) Attack {
		return Attack{name, layer, func() error { return setOption(level, option, value) }}
	}
	tables := func(name string, family, level int) Attack {
		return Attack{name, Capabilities, func() error { return replaceTables(family, level) }}
	}
	return []Attack{
		// Routes, addresses, rules, devices and queues over rtnetlink(7): since 2022 most exploits of the
		// network begin there (CVE-2022-2588, CVE-2023-3776, CVE-2023-32233, CVE-2025-37797).
		{"netlink-address", Capabilities, func() error {
			return routeRequest(unix.RTM_NEWADDR, []byte{unix.AF_INET, 32, 0, 0, 1, 0, 0, 0}, attribute(unix.IFA_LOCAL, []byte{192, 0, 2, 9}))
		}},
		{"netlink-route", Capabilities, func() error {
			const blackhole = unix.RTN_BLACKHOLE
			return routeRequest(unix.RTM_NEWROUTE, []byte{unix.AF_INET, 32, 0, 0, unix.RT_TABLE_MAIN, unix.RTPROT_STATIC, 0, blackhole, 0, 0, 0, 0},
				attribute(unix.RTA_DST, []byte{192, 0, 2, 1}))
		}},
		{"netlink-rule", Capabilities, func() error {
			return routeRequest(unix.RTM_NEWRULE, []byte{unix.AF_INET, 0, 0, 0, unix.RT_TABLE_MAIN, 0, 0, 1, 0, 0, 0, 0})
		}},
		{"netlink-queue", Capabilities, func() error {
			parent := binary.NativeEndian.AppendUint32(nil, 0xffffffff) // TC_H_ROOT
			request := append([]byte{unix.AF_UNSPEC, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0}, parent...)
			return routeRequest(unix.RTM_NEWQDISC, append(request, 0, 0, 0, 0), attribute(unix.TCA_KIND, []byte("pfifo\x00")))
		}},
		{"netlink-device", Capabilities, func() error {
			kind := attribute(1, []byte("veth")) // IFLA_INFO_KIND
			return routeRequest(unix.RTM_NEWLINK, make([]byte, 16), attribute(unix.IFLA_LINKINFO, kind))
		}},
		{"netlink-neighbour", Capabilities, func() error {
			permanent := []byte{unix.AF_INET, 0, 0, 0, 1, 0, 0, 0, unix.NUD_PERMANENT, 0, 0, 0}
			return routeRequest(unix.RTM_NEWNEIGH, permanent, attribute(unix.NDA_DST, []byte{192, 0, 2, 1}), attribute(unix.NDA_LLADDR, make([]byte, 6)))
		}},
		// The old firewall's tables are options of any socket of a family (CVE-2021-22555,
		// CVE-2016-4997).
		tables("replace-iptables", unix.AF_INET, unix.IPPROTO_IP),
		tables("replace-ip6tables", unix.AF_INET6, unix.IPPROTO_IPV6),
		// Marks that firewalls and routes of the host go by, buffers beyond the limit, connections made up,
		// addresses of others (socket(7), tcp(7), ip(7)).
		option("so-mark", Capabilities, unix.SOL_SOCKET, unix.SO_MARK, 1),
		option("so-sndbufforce", Namespaces, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 4096),
		option("so-rcvbufforce", Namespaces, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 4096),
		option("so-priority", Capabilities, unix.SOL_SOCKET, unix.SO_PRIORITY, 7),
		option("so-debug", Namespaces, unix.SOL_SOCKET, unix.SO_DEBUG, 1),
		option("tcp-repair", Capabilities, unix.IPPROTO_TCP, unix.TCP_REPAIR, 1),
		option("ip-transparent", Capabilities, unix.IPPROTO_IP, unix.IP_TRANSPARENT, 1),
		// An old type of internet sockets becomes one of packets behind the filter's back (packet(7),
		// SOCK_PACKET).
		{"socket-packet-by-type", Filter, func() error { return socketProtocol(unix.AF_INET, unix.SOCK_PACKET, 0) }},
		{"socket-raw-tcp", Filter, func() error { return socketProtocol(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_TCP) }},
		{"socket-raw6-udp", Filter, func() error { return socketProtocol(unix.AF_INET6, unix.SOCK_RAW, unix.IPPROTO_UDP) }},
		// The network namespace of a socket, as a descriptor to enter (ioctl SIOCGSKNS).
		{"socket-namespace", Capabilities, socketNamespace},
	}
}

// attribute is one of a netlink message, padded.
func attribute(kind uint16, value []byte) []byte {
	a := binary.NativeEndian.AppendUint16(nil, uint16(4+len(value)))
	a = append(binary.NativeEndian.AppendUint16(a, kind), value...)
	return append(a, make([]byte, (4-len(a)%4)%4)...)
}

// routeRequest sends one request to rtnetlink, and returns the kernel's answer.
func routeRequest(kind uint16, body ...[]byte) error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	message := make([]byte, unix.NLMSG_HDRLEN)
	for _, part := range body {
		message = append(message, part...)
	}
	binary.NativeEndian.PutUint32(message, uint32(len(message)))
	binary.NativeEndian.PutUint16(message[4:], kind)
	binary.NativeEndian.PutUint16(message[6:], unix.NLM_F_REQUEST|unix.NLM_F_ACK|unix.NLM_F_CREATE)
	if err := unix.Sendto(fd, message, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	answer := make([]byte, 4096)
	n, _, err := unix.Recvfrom(fd, answer, 0)
	if err != nil {
		return err
	}
	if n < unix.NLMSG_HDRLEN+4 || binary.NativeEndian.Uint16(answer[4:]) != unix.NLMSG_ERROR {
		return errors.New("no answer")
	}
	if errno := -int32(binary.NativeEndian.Uint32(answer[unix.NLMSG_HDRLEN:])); errno != 0 {
		return unix.Errno(errno)
	}
	return nil
}

func setOption(level, option, value int) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.SetsockoptInt(fd, level, option, value)
}

// replaceTables replaces the tables of a firewall by none. Only a kernel that has them, and would
// do it, finds the request invalid.
func replaceTables(family, level int) error {
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	const replace = 64 // IPT_SO_SET_REPLACE, and that of IPv6
	err = unix.SetsockoptInt(fd, level, replace, 0)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EFAULT) {
		return nil
	}
	return err
}

func socketNamespace() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	const getNamespace = 0x894c // SIOCGSKNS
	ns, _, errno := unix.RawSyscall(unix.SYS_IOCTL, uintptr(fd), getNamespace, 0)
	if errno != 0 {
		return errno
	}
	return unix.Close(int(ns))
}
