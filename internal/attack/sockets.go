package attack

import (
	"golang.org/x/sys/unix"
)

func sockets() []Attack {
	socket := func(name string, family, kind, protocol int) Attack {
		return Attack{"socket-" + name, Filter, func() error { return socketProtocol(family, kind, protocol) }}
	}
	return []Attack{
		socket("packet", unix.AF_PACKET, unix.SOCK_RAW, 0),
		socket("vsock", unix.AF_VSOCK, unix.SOCK_STREAM, 0),
		socket("alg", unix.AF_ALG, unix.SOCK_SEQPACKET, 0),
		socket("xdp", unix.AF_XDP, unix.SOCK_RAW, 0),
		socket("tipc", unix.AF_TIPC, unix.SOCK_STREAM, 0),
		socket("rds", unix.AF_RDS, unix.SOCK_SEQPACKET, 0),
		socket("can", unix.AF_CAN, unix.SOCK_RAW, 1),
		socket("key", unix.AF_KEY, unix.SOCK_RAW, 2),
		socket("raw-icmp", unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP),
		socket("raw-ip6", unix.AF_INET6, unix.SOCK_RAW, unix.IPPROTO_RAW),
		socket("mptcp", unix.AF_INET, unix.SOCK_STREAM, 262),
		socket("sctp", unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_SCTP),
		socket("udplite", unix.AF_INET, unix.SOCK_DGRAM, unix.IPPROTO_UDPLITE),
		socket("netlink-netfilter", unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_NETFILTER),
		socket("netlink-xfrm", unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_XFRM),
		socket("netlink-audit", unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_AUDIT),
		socket("netlink-uevent", unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_KOBJECT_UEVENT),
		socket("netlink-generic", unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_GENERIC),
		socket("netlink-diag", unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_SOCK_DIAG),
		// Starts and ends of the host's processes; its routing; programs of the same user.
		socket("netlink-connector", unix.AF_NETLINK, unix.SOCK_DGRAM, unix.NETLINK_CONNECTOR),
		socket("netlink-fib-lookup", unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_FIB_LOOKUP),
		socket("netlink-usersock", unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_USERSOCK),
		// The kernel looks at 32 bits of the family (CVE-2019-10063, CVE-2025-21756).
		{"socket-vsock-high-bits", Filter, func() error { return raw(unix.SYS_SOCKET, 1<<32|unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0) }},
		{"tcp-ulp", Filter, tcpULP},
		{"set-interface", Capabilities, setInterface},
	}
}
