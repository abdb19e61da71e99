package op

import (
	"encoding/binary"
	"errors"
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/osthread"
)

// Calls are operations that change the network of the namespace, or go around the path that the
// kernel sends packets on. Each returns nil if it was done.
func Calls() map[string]func() error {
	calls := make(map[string]func() error)
	for _, s := range []struct {
		name                   string
		family, kind, protocol int
	}{
		{"raw-ip", unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_RAW},
		{"raw-icmp", unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP},
		{"raw-tcp", unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_TCP},
		{"raw-udp", unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_UDP},
		{"raw-gre", unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_GRE},
		{"raw-ipip", unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_IPIP},
		{"raw6-ip", unix.AF_INET6, unix.SOCK_RAW, unix.IPPROTO_RAW},
		{"raw6-icmp", unix.AF_INET6, unix.SOCK_RAW, unix.IPPROTO_ICMPV6},
		{"raw6-tcp", unix.AF_INET6, unix.SOCK_RAW, unix.IPPROTO_TCP},
		{"packet-raw", unix.AF_PACKET, unix.SOCK_RAW, 0x0300},
		{"packet-datagram", unix.AF_PACKET, unix.SOCK_DGRAM, 0x0300},
		{"packet-old", unix.AF_INET, unix.SOCK_PACKET, 0x0300},
		{"netfilter", unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_NETFILTER},
		{"netlink-xfrm", unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_XFRM},
		{"netlink-generic", unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_GENERIC},
	} {
		calls["socket-"+s.name] = func() error { return closing(unix.Socket(s.family, s.kind|unix.SOCK_CLOEXEC, s.protocol)) }
	}
	for what, r := range map[string]struct {
		kind uint16
		data []byte
	}{
		"route-default":   {unix.RTM_NEWROUTE, routeMessage(0, unix.RTN_LOCAL)},
		"route-blackhole": {unix.RTM_NEWROUTE, append(routeMessage(32, unix.RTN_BLACKHOLE), attribute(unix.RTA_DST, 93, 184, 215, 14)...)},
		"route-delete":    {unix.RTM_DELROUTE, routeMessage(0, unix.RTN_LOCAL)},
		"address":         {unix.RTM_NEWADDR, append([]byte{unix.AF_INET, 32, 0, 0, 1, 0, 0, 0}, attribute(unix.IFA_LOCAL, 93, 184, 215, 14)...)},
		"address-delete":  {unix.RTM_DELADDR, append([]byte{unix.AF_INET, 32, 0, 0, 1, 0, 0, 0}, attribute(unix.IFA_LOCAL, 192, 0, 2, 1)...)},
		"rule":            {unix.RTM_NEWRULE, []byte{unix.AF_INET, 0, 0, 0, unix.RT_TABLE_MAIN, 0, 0, 1, 0, 0, 0, 0}},
		"rule-delete":     {unix.RTM_DELRULE, []byte{unix.AF_INET, 0, 0, 0, unix.RT_TABLE_MAIN, 0, 0, 1, 0, 0, 0, 0}},
		"link-down":       {unix.RTM_NEWLINK, linkMessage(0, unix.IFF_UP)},
		"link-mtu":        {unix.RTM_NEWLINK, append(linkMessage(0, 0), attribute(unix.IFLA_MTU, 0, 5, 0, 0)...)},
		"link-dummy": {unix.RTM_NEWLINK, append([]byte{unix.AF_UNSPEC, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
			attribute(unix.IFLA_LINKINFO, attribute(unix.IFLA_INFO_KIND, []byte("dummy")...)...)...)},
		"neighbour": {unix.RTM_NEWNEIGH, append([]byte{unix.AF_INET, 0, 0, 0, 1, 0, 0, 0, unix.NUD_PERMANENT, 0, 0, 0},
			append(attribute(unix.NDA_DST, 10, 0, 0, 1), attribute(unix.NDA_LLADDR, 2, 0, 0, 0, 0, 1)...)...)},
		"queue": {unix.RTM_NEWQDISC, append([]byte{unix.AF_UNSPEC, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0},
			attribute(unix.TCA_KIND, []byte("pfifo\x00")...)...)},
	} {
		calls["netlink-"+what] = func() error { return routeRequest(r.kind, r.data) }
	}
	for what, s := range map[string]struct{ level, option int }{
		"transparent":   {unix.SOL_IP, unix.IP_TRANSPARENT},
		"transparent6":  {unix.SOL_IPV6, unix.IPV6_TRANSPARENT},
		"mark":          {unix.SOL_SOCKET, unix.SO_MARK},
		"debug":         {unix.SOL_SOCKET, unix.SO_DEBUG},
		"buffer-beyond": {unix.SOL_SOCKET, unix.SO_RCVBUFFORCE},
		"repair":        {unix.SOL_TCP, unix.TCP_REPAIR},
	} {
		calls["option-"+what] = func() error {
			return withSocket(unix.AF_INET6, unix.SOCK_STREAM, func(fd int) error { return unix.SetsockoptInt(fd, s.level, s.option, 1) })
		}
	}
	for what, file := range map[string]string{
		"forward": "/proc/sys/net/ipv4/ip_forward", "nonlocal": "/proc/sys/net/ipv4/ip_nonlocal_bind", "loopback": "/proc/sys/net/ipv4/conf/all/route_localnet",
		"ports": "/proc/sys/net/ipv4/ip_unprivileged_port_start", "ping": "/proc/sys/net/ipv4/ping_group_range",
		"forward6": "/proc/sys/net/ipv6/conf/all/forwarding", "filter": "/proc/sys/net/ipv4/conf/all/rp_filter",
	} {
		calls["sysctl-"+what] = func() error { return rewrite(file) }
	}
	calls["unshare-network"] = func() error { return unix.Unshare(unix.CLONE_NEWNET) }
	for what, flags := range map[string]uintptr{"network": unix.CLONE_NEWNET, "user": unix.CLONE_NEWUSER, "both": unix.CLONE_NEWUSER | unix.CLONE_NEWNET} {
		calls["clone-"+what] = func() error {
			child := exec.Command("/proc/self/exe")
			child.SysProcAttr = &syscall.SysProcAttr{Cloneflags: flags}
			if err := child.Start(); err != nil {
				return err
			}
			_ = child.Wait() // it finds no operations
			return nil
		}
	}
	for _, port := range []int{1, 2} {
		for what, s := range map[string]struct{ family, kind int }{
			"tcp4": {unix.AF_INET, unix.SOCK_STREAM}, "tcp6": {unix.AF_INET6, unix.SOCK_STREAM},
			"udp4": {unix.AF_INET, unix.SOCK_DGRAM}, "udp6": {unix.AF_INET6, unix.SOCK_DGRAM},
		} {
			calls["bind-"+what+"-"+string(rune('0'+port))] = func() error { return bind(s.family, s.kind, port) }
		}
	}
	// Into the namespace that it is in: that takes the privilege too, and leads nowhere else.
	calls["enter"] = func() error {
		fd, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Setns(fd, unix.CLONE_NEWNET)
	}
	calls["tun"] = func() error { return closing(unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)) }
	calls["tun-made"] = func() error {
		if err := unix.Mknod("/tmp/tun", unix.S_IFCHR|0o600, int(unix.Mkdev(10, 200))); err != nil {
			return err
		}
		defer os.Remove("/tmp/tun")
		return closing(unix.Open("/tmp/tun", unix.O_RDWR|unix.O_CLOEXEC, 0))
	}
	// Abstract names belong to the network namespace: the host's are out of reach.
	calls["abstract"] = func() error {
		return withSocket(unix.AF_UNIX, unix.SOCK_STREAM, func(fd int) error { return unix.Connect(fd, &unix.SockaddrUnix{Name: "@" + Abstract}) })
	}
	return calls
}

// call makes a call on a thread of its own, whose namespaces end with it. The call changes the
// network, so it is not made in the namespace outside, where the machine's own interfaces are.
func call(name, outside string) error {
	f, ok := Calls()[name]
	if !ok || outside == "" {
		return errors.New("no such call, or no namespace to stay out of")
	}
	return osthread.Run(func() error {
		here, err := os.Readlink("/proc/thread-self/ns/net")
		switch {
		case err != nil:
			return err
		case here == outside:
			return errors.New("the thread is in the network namespace of the test")
		}
		return f()
	})
}

// Abstract is the abstract name of a socket that tests listen on outside of sandboxes.
const Abstract = "sandboxd-test-network"

func closing(fd int, err error) error {
	if err == nil {
		err = unix.Close(fd)
	}
	return err
}

func withSocket(family, kind int, use func(fd int) error) error {
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return use(fd)
}

// bind binds a port on all addresses, as a second owner where the first allows one.
func bind(family, kind, port int) error {
	return withSocket(family, kind, func(fd int) error {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1); err != nil {
			return err
		}
		if family == unix.AF_INET {
			return unix.Bind(fd, &unix.SockaddrInet4{Port: port})
		}
		return unix.Bind(fd, &unix.SockaddrInet6{Port: port})
	})
}

// rewrite writes a sysctl with its own value.
func rewrite(file string) error {
	value, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	return os.WriteFile(file, value, 0)
}

func attribute(kind uint16, value ...byte) []byte {
	a := binary.NativeEndian.AppendUint16(nil, uint16(4+len(value)))
	a = append(binary.NativeEndian.AppendUint16(a, kind), value...)
	for len(a)%4 != 0 {
		a = append(a, 0)
	}
	return a
}

// routeMessage is a rtmsg of IPv4 for lo, in the main table.
func routeMessage(bits, kind byte) []byte {
	scope := byte(unix.RT_SCOPE_HOST)
	m := []byte{unix.AF_INET, bits, 0, 0, unix.RT_TABLE_MAIN, unix.RTPROT_STATIC, scope, kind, 0, 0, 0, 0}
	if kind == unix.RTN_BLACKHOLE {
		m[6] = 0
		return m
	}
	return append(m, attribute(unix.RTA_OIF, 1, 0, 0, 0)...)
}

// linkMessage is an ifinfomsg for lo that changes flags.
func linkMessage(flags, change uint32) []byte {
	m := []byte{unix.AF_UNSPEC, 0, 0, 0, 1, 0, 0, 0}
	return binary.NativeEndian.AppendUint32(binary.NativeEndian.AppendUint32(m, flags), change)
}

// routeRequest sends one request to rtnetlink and returns the kernel's answer.
func routeRequest(kind uint16, data []byte) error {
	return withSocket(unix.AF_NETLINK, unix.SOCK_RAW, func(fd int) error {
		request := binary.NativeEndian.AppendUint32(nil, uint32(unix.NLMSG_HDRLEN+len(data)))
		request = binary.NativeEndian.AppendUint16(request, kind)
		flags := uint16(unix.NLM_F_REQUEST | unix.NLM_F_ACK)
		switch kind {
		case unix.RTM_NEWROUTE, unix.RTM_NEWADDR, unix.RTM_NEWRULE, unix.RTM_NEWNEIGH, unix.RTM_NEWQDISC:
			flags |= unix.NLM_F_CREATE | unix.NLM_F_REPLACE
		case unix.RTM_NEWLINK:
			flags |= unix.NLM_F_CREATE
		}
		request = binary.NativeEndian.AppendUint16(request, flags)
		request = append(append(request, make([]byte, 8)...), data...)
		if err := unix.Sendto(fd, request, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
			return err
		}
		reply := make([]byte, 4096)
		n, err := unix.Read(fd, reply)
		switch {
		case err != nil:
			return err
		case n < unix.NLMSG_HDRLEN+4 || binary.NativeEndian.Uint16(reply[4:]) != unix.NLMSG_ERROR:
			return errors.New("the kernel's answer is no acknowledgement")
		}
		if code := int32(binary.NativeEndian.Uint32(reply[unix.NLMSG_HDRLEN:])); code != 0 {
			return syscall.Errno(-code)
		}
		return nil
	})
}
