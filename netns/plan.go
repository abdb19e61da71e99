package netns

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// Addresses of every sandbox, on its lo. They are of ranges for documentation (RFC 5737, RFC 3849):
// no host uses these, so they hide no server that a policy may allow. Addresses of private ranges
// would. IPv6 of a private range would also sort every IPv6 destination last (RFC 6724).
var (
	Address4 = netip.MustParseAddr("192.0.2.1")
	Address6 = netip.MustParseAddr("2001:db8::1")
	// Nameserver is the address for resolv.conf. Questions to every other address but the sandbox's
	// own reach the same socket.
	Nameserver = netip.MustParseAddr("192.0.2.53")
)

// Ports of the sockets in a namespace, and the first port that programs can bind. Each number space
// has its own: TCP and UDP. The sockets' ports are privileged, so that no program of a sandbox can
// bind them on any address, and no port that programs use is taken from them.
const (
	portStream = 1
	portDNSTCP = 2
	portDNS    = 1
	firstPort  = 3
)

// portDomain is the port that programs send DNS questions to. Where the kernel refuses rules that
// change packets, the DNS socket is bound to it, and programs cannot bind it for UDP.
const portDomain = 53

// plan describes a namespace completely. [apply] makes it, and [verify] compares the kernel's state
// with it.
type plan struct {
	sysctls   []sysctl
	addresses []netip.Prefix // on lo; the kernel adds the loopback addresses
	routes    []route
	chains    []chain
	dns       uint16 // port of the DNS socket
}

// sysctl is a file below /proc/sys/net and its value.
type sysctl struct{ name, value string }

// route delivers the destinations locally. Programs get src as their own address.
type route struct {
	dst netip.Prefix
	src netip.Addr
}

func (r route) String() string { return fmt.Sprintf("local %s dev lo src %s", r.dst, r.src) }

type chain struct {
	name   string
	hook   nftables.ChainHook // of a base chain
	drop   bool               // policy of a base chain
	isBase bool
	rules  []rule
}

// rule is a rule of nf_tables. Its text is nft's, for errors and for readers.
type rule struct {
	text  string
	exprs []expr.Any
	sent  [][]byte // exprs as the kernel is sent them
	// verified is the last answer of the kernel that was found to be this rule; nil before the first.
	// The next one is the same bytes.
	verified *atomic.Pointer[[]byte]
}

// newRule marshals the expressions once for all namespaces: it costs as much as the kernel's work
// for them.
func newRule(text string, exprs ...[]expr.Any) rule {
	r := rule{text: text, exprs: slices.Concat(exprs...), verified: new(atomic.Pointer[[]byte])}
	for _, e := range r.exprs {
		sent, err := expr.Marshal(unix.NFPROTO_INET, e)
		if err != nil {
			panic(err) // they are constants
		}
		r.sent = append(r.sent, sent)
	}
	return r
}

// ours is the plan of all namespaces that [Make] makes, unless the kernel refuses it.
var ours = sync.OnceValue(newPlan)

// unchanging is the plan for kernels that refuse rules that change packets, with EPERM: Debian's
// 7.3.4 refuses every one, to root too.
var unchanging = sync.OnceValue(func() plan { return planWith(portDomain) })

const tableName = "sandboxd"

// newPlan returns the plan, which is the same for every namespace.
func newPlan() plan { return planWith(portDNS) }

// planWith returns the plan with a port for the DNS socket.
func planWith(dns uint16) plan {
	p := plan{
		dns: dns,
		sysctls: []sysctl{
			// Each name below /proc/sys/net is looked up among those of all namespaces: fewer is faster.
			{"ipv4/ip_unprivileged_port_start", fmt.Sprint(firstPort)},
			// A namespace inherits the congestion control of the host, also for IPv6. No packet is lost on
			// lo and no queue grows there: bbr, which measures and paces, halves throughput. Every kernel
			// has reno.
			{"ipv4/tcp_congestion_control", "reno"},
		},
		addresses: []netip.Prefix{netip.PrefixFrom(Address4, 32), netip.PrefixFrom(Address6, 128)},
		routes: []route{
			{netip.PrefixFrom(netip.IPv4Unspecified(), 0), Address4},
			{netip.PrefixFrom(netip.IPv6Unspecified(), 0), Address6},
		},
		chains: []chain{
			// Own addresses: whatever programs do with each other stays as it is.
			{name: "own", rules: []rule{
				newRule("tcp dport < 3 reject with tcp reset", l4proto(unix.IPPROTO_TCP), below(destination, firstPort), reset()),
				newRule("udp dport < 3 reject with icmpx port-unreachable", l4proto(unix.IPPROTO_UDP), below(destination, firstPort),
					reject(unix.NFT_REJECT_ICMPX_PORT_UNREACH)),
				newRule("accept", accept()),
			}},
			// From an own address to another. A tproxy rule whose socket is gone does not match, and the
			// packet is refused further down.
			{name: "away", rules: []rule{
				newRule("tcp dport 53 tproxy to :2 accept", l4proto(unix.IPPROTO_TCP), is(transport, destination, port(portDomain)), tproxy(portDNSTCP), accept()),
				newRule("meta l4proto tcp tproxy to :1 accept", l4proto(unix.IPPROTO_TCP), tproxy(portStream), accept()),
				newRule(fmt.Sprintf("udp dport 53 tproxy to :%d accept", dns), l4proto(unix.IPPROTO_UDP), is(transport, destination, port(portDomain)), tproxy(dns), accept()),
				newRule("meta l4proto udp reject with icmpx port-unreachable", l4proto(unix.IPPROTO_UDP), reject(unix.NFT_REJECT_ICMPX_PORT_UNREACH)),
				newRule("reject with icmpx admin-prohibited", reject(unix.NFT_REJECT_ICMPX_ADMIN_PROHIBITED)),
			}},
			{name: "in", isBase: true, drop: true, hook: *nftables.ChainHookPrerouting, rules: []rule{
				newRule("ip daddr 127.0.0.0/8 goto own", nfproto(unix.NFPROTO_IPV4), is(network, 16, []byte{127}), goTo("own")),
				newRule("ip daddr 192.0.2.1 goto own", nfproto(unix.NFPROTO_IPV4), is(network, 16, Address4.AsSlice()), goTo("own")),
				newRule("ip6 daddr ::1 goto own", nfproto(unix.NFPROTO_IPV6), is(network, 24, netip.IPv6Loopback().AsSlice()), goTo("own")),
				newRule("ip6 daddr 2001:db8::1 goto own", nfproto(unix.NFPROTO_IPV6), is(network, 24, Address6.AsSlice()), goTo("own")),
				newRule("ip saddr 192.0.2.1 goto away", nfproto(unix.NFPROTO_IPV4), is(network, 12, Address4.AsSlice()), goTo("away")),
				newRule("ip6 saddr 2001:db8::1 goto away", nfproto(unix.NFPROTO_IPV6), is(network, 8, Address6.AsSlice()), goTo("away")),
				// From the loopback, or from an address that is not the sandbox's: a program can bind any of
				// IPv4, because a local route covers all (IPv6 keeps its tables apart). The refusals must reach
				// it there.
				newRule("tcp flags rst accept", l4proto(unix.IPPROTO_TCP), hasFlag(tcpReset), accept()),
				newRule("meta l4proto tcp reject with tcp reset", l4proto(unix.IPPROTO_TCP), reset()),
				newRule("icmp type destination-unreachable accept", nfproto(unix.NFPROTO_IPV4), l4proto(unix.IPPROTO_ICMP),
					is(transport, 0, []byte{icmpUnreachable}), accept()),
				newRule("reject with icmpx admin-prohibited", reject(unix.NFT_REJECT_ICMPX_ADMIN_PROHIBITED)),
			}},
		},
	}
	if dns == portDomain {
		// At the sandbox's own addresses the socket is not reached, whichever port it has.
		p.chains[0].rules = slices.Insert(p.chains[0].rules, 2, newRule("udp dport 53 reject with icmpx port-unreachable",
			l4proto(unix.IPPROTO_UDP), is(transport, destination, port(portDomain)), reject(unix.NFT_REJECT_ICMPX_PORT_UNREACH)))
		return p
	}
	// Answers come from the port that was asked. A socket bound to port 53 itself would take it from
	// the programs.
	p.chains = append(p.chains, chain{name: "out", isBase: true, hook: *nftables.ChainHookOutput, rules: []rule{
		newRule("udp sport 1 udp sport set 53", l4proto(unix.IPPROTO_UDP), is(transport, source, port(portDNS)), setSource(portDomain)),
	}})
	return p
}

// String lists the plan as ip(8) and nft(8) would, one item a line.
func (p plan) String() string {
	var b strings.Builder
	for _, s := range p.sysctls {
		fmt.Fprintf(&b, "sysctl net/%s = %s\n", s.name, s.value)
	}
	for _, a := range p.addresses {
		fmt.Fprintf(&b, "address %s dev lo\n", a)
	}
	for _, r := range p.routes {
		fmt.Fprintf(&b, "route %s\n", r)
	}
	for _, c := range p.chains {
		fmt.Fprintf(&b, "chain %s\n", c.name)
		for _, r := range c.rules {
			fmt.Fprintf(&b, "  %s\n", r.text)
		}
	}
	return b.String()
}

// Offsets in the transport header.
const (
	source      = 0
	destination = 2
)

const (
	network   = expr.PayloadBaseNetworkHeader
	transport = expr.PayloadBaseTransportHeader
)

const (
	icmpUnreachable = 3 // its type in IPv4
	tcpReset        = 1 << 2
)

func port(n uint16) []byte { return binary.BigEndian.AppendUint16(nil, n) }

// is compares bytes of a header.
func is(base expr.PayloadBase, offset uint32, value []byte) []expr.Any {
	return []expr.Any{
		&expr.Payload{DestRegister: 1, Base: base, Offset: offset, Len: uint32(len(value))}, //nolint:gosec // 16 at most
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: value},
	}
}

// below matches ports less than a number.
func below(offset uint32, n uint16) []expr.Any {
	return []expr.Any{
		&expr.Payload{DestRegister: 1, Base: transport, Offset: offset, Len: 2},
		&expr.Cmp{Op: expr.CmpOpLt, Register: 1, Data: port(n)},
	}
}

func nfproto(family byte) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{family}}}
}

func l4proto(protocol byte) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{protocol}}}
}

func goTo(chain string) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: expr.VerdictGoto, Chain: chain}}
}

func accept() []expr.Any { return []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}} }

// reject answers with an ICMP error of the packet's family. ICMP errors themselves get none.
func reject(code uint8) []expr.Any {
	return []expr.Any{&expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: code}}
}

// reset refuses TCP. An ICMP error would be lost on lo, where it arrives while connect(2) holds the
// socket: the program would wait for a second SYN.
func reset() []expr.Any { return []expr.Any{&expr.Reject{Type: unix.NFT_REJECT_TCP_RST}} }

// hasFlag matches a flag of TCP.
func hasFlag(flag byte) []expr.Any {
	return []expr.Any{
		&expr.Payload{DestRegister: 1, Base: transport, Offset: 13, Len: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 1, Mask: []byte{flag}, Xor: []byte{0}},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: []byte{0}},
	}
}

// tproxy gives the packet to the socket that listens on the port, of either family.
func tproxy(n uint16) []expr.Any {
	return []expr.Any{
		&expr.Immediate{Register: 1, Data: port(n)},
		&expr.TProxy{Family: unix.NFPROTO_UNSPEC, TableFamily: unix.NFPROTO_INET, RegPort: 1},
	}
}

// setSource replaces the source port of UDP and keeps the checksum right.
func setSource(n uint16) []expr.Any {
	return []expr.Any{
		&expr.Immediate{Register: 1, Data: port(n)},
		&expr.Payload{
			OperationType: expr.PayloadWrite, SourceRegister: 1, Base: transport, Offset: source, Len: 2,
			CsumType: expr.CsumTypeInet, CsumOffset: 6,
		},
	}
}
