package netns

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync/atomic"

	"github.com/google/nftables"
	nl "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/osthread"
)

// Namespace is a network namespace and the sockets in it. The caller owns the files. The
// namespace lives as long as any of them is open, in this process or another, or a process is in
// it.
type Namespace struct {
	// NS is the namespace, for libcontainer's "path" and for [Socket].
	NS *os.File
	// Stream listens for TCP to every address that is not the sandbox's own, except port 53. The local
	// address of an accepted connection is the destination that the program connected to.
	Stream *os.File
	// DNS receives UDP to port 53. Its control message (IPV6_PKTINFO) has the destination; an answer
	// that is sent with the same control message comes from there.
	DNS *os.File
	// DNSTCP is like Stream, for port 53.
	DNSTCP *os.File
	// Diag is a netlink socket for [Inode]; nil where the kernel does not tell of sockets.
	Diag *os.File
}

// Close closes the files.
func (n *Namespace) Close() error {
	var errs []error
	for _, f := range []*os.File{n.Stream, n.DNS, n.DNSTCP, n.Diag, n.NS} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}

// Make makes a namespace, which belongs to the user namespace of the caller, and verifies it. The
// caller needs CAP_SYS_ADMIN, CAP_NET_ADMIN and CAP_NET_BIND_SERVICE there, and a writable
// /proc/sys/net. The calling process stays in its own network namespace.
//
// Where the kernel refuses rules that change packets, the DNS socket has port 53, which programs
// then cannot bind for UDP.
func Make() (*Namespace, error) {
	if refusesChanges.Load() {
		return makeBy(unchanging())
	}
	n, err := makeBy(ours())
	if !errors.Is(err, unix.EPERM) {
		return n, err
	}
	n, again := makeBy(unchanging())
	if again != nil {
		return nil, err // it is about another permission
	}
	refusesChanges.Store(true)
	return n, nil
}

// refusesChanges is set once the kernel has refused a rule because it changes packets.
var refusesChanges atomic.Bool

func makeBy(p plan) (*Namespace, error) {
	n := new(Namespace)
	if err := osthread.Run(func() error { return n.make(p) }); err != nil {
		return nil, errors.Join(fmt.Errorf("make network namespace: %w", err), n.Close())
	}
	return n, nil
}

func (n *Namespace) make(p plan) (err error) {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	if n.NS, err = os.Open("/proc/thread-self/ns/net"); err != nil {
		return err
	}
	if err := p.apply(); err != nil {
		return err
	}
	if n.Stream, err = listen(portStream); err != nil {
		return fmt.Errorf("listen for TCP: %w", err)
	}
	if n.DNSTCP, err = listen(portDNSTCP); err != nil {
		return fmt.Errorf("listen for DNS over TCP: %w", err)
	}
	if n.DNS, err = receive(int(p.dns)); err != nil {
		return fmt.Errorf("open DNS socket: %w", err)
	}
	if n.Diag, err = diag(); err != nil {
		return fmt.Errorf("open socket for questions about sockets: %w", err)
	}
	if err := errors.Join(p.verify(), n.verifySockets()); err != nil {
		return fmt.Errorf("verify: %w", err)
	}
	return nil
}

// apply sets the calling thread's namespace up. It is empty before: rules come first, so that there
// is no moment without them.
func (p plan) apply() error {
	for _, s := range p.sysctls {
		if err := os.WriteFile("/proc/sys/net/"+s.name, []byte(s.value), 0); err != nil {
			return fmt.Errorf("set sysctl: %w", err)
		}
	}
	if err := p.applyRules(); err != nil {
		return fmt.Errorf("load nf_tables rules: %w", err)
	}
	return p.applyRoutes()
}

// applyRoutes sets lo up, with addresses and routes.
func (p plan) applyRoutes() error {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open routing socket: %w", err)
	}
	defer h.Close()
	lo := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: loIndex}}
	if err := h.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	for _, a := range p.addresses {
		// The kernel adds the local route of an IPv6 address some time later. Without the last flag there
		// would be a route meanwhile that is not local, and packets for the address would be refused.
		const flags = unix.IFA_F_NODAD | unix.IFA_F_NOPREFIXROUTE
		add := func() error { return h.AddrAdd(lo, &netlink.Addr{IPNet: ipNet(a), Flags: flags}) }
		err := add()
		if errors.Is(err, unix.EACCES) && a.Addr().Is6() {
			if err = enableIPv6(); err == nil {
				err = add()
			}
		}
		if err != nil {
			return fmt.Errorf("add address %s: %w", a, err)
		}
	}
	for _, r := range p.routes {
		err := h.RouteAdd(&netlink.Route{
			LinkIndex: loIndex, Dst: ipNet(r.dst), Src: r.src.AsSlice(), Table: unix.RT_TABLE_MAIN, Type: unix.RTN_LOCAL, Scope: unix.RT_SCOPE_HOST,
		})
		if err != nil {
			return fmt.Errorf("add route %s: %w", r.dst, err)
		}
	}
	return nil
}

// enableIPv6 is for hosts that have it off in new namespaces (ipv6.disable_ipv6=1 at boot, or the
// sysctl where namespaces inherit).
func enableIPv6() error {
	for _, name := range []string{"all", "lo"} {
		if err := os.WriteFile("/proc/sys/net/ipv6/conf/"+name+"/disable_ipv6", []byte("0"), 0); err != nil {
			return fmt.Errorf("enable IPv6: %w", err)
		}
	}
	return nil
}

// loIndex is the number of lo in every network namespace (LOOPBACK_IFINDEX).
const loIndex = 1

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// applyRules loads all rules in one batch. The connection of google/nftables asks for an answer to
// each message, which takes four times as long.
func (p plan) applyRules() error {
	c, err := nl.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return err
	}
	messages, err := p.batch()
	if err == nil {
		_, err = c.SendMessages(messages)
	}
	if err == nil {
		_, err = c.Receive() // the kernel's answer to the last rule, or its first error
	}
	return errors.Join(err, c.Close())
}

// batch returns the messages that make the table.
func (p plan) batch() ([]nl.Message, error) {
	const request, table = nl.Request | nl.Create | nl.Append, unix.NFNL_SUBSYS_NFTABLES << 8
	all := []nl.Message{message(unix.NFNL_MSG_BATCH_BEGIN, nl.Request, unix.NFPROTO_UNSPEC, unix.NFNL_SUBSYS_NFTABLES)}
	add := func(kind nl.HeaderType, attributes func(*nl.AttributeEncoder)) error {
		e := nl.NewAttributeEncoder()
		e.ByteOrder = binary.BigEndian
		attributes(e)
		data, err := e.Encode()
		m := message(table|kind, request, unix.NFPROTO_INET, 0)
		m.Data = append(m.Data, data...)
		all = append(all, m)
		return err
	}
	err := add(unix.NFT_MSG_NEWTABLE, func(e *nl.AttributeEncoder) { e.String(unix.NFTA_TABLE_NAME, tableName) })
	for _, c := range p.chains {
		err = errors.Join(err, add(unix.NFT_MSG_NEWCHAIN, c.encode))
		for _, r := range c.rules {
			err = errors.Join(err, add(unix.NFT_MSG_NEWRULE, func(e *nl.AttributeEncoder) {
				e.String(unix.NFTA_RULE_TABLE, tableName)
				e.String(unix.NFTA_RULE_CHAIN, c.name)
				e.Nested(unix.NFTA_RULE_EXPRESSIONS, func(list *nl.AttributeEncoder) error {
					for _, sent := range r.sent {
						list.Bytes(unix.NLA_F_NESTED|unix.NFTA_LIST_ELEM, sent)
					}
					return nil
				})
			}))
		}
	}
	all[len(all)-1].Header.Flags |= nl.Acknowledge
	return append(all, message(unix.NFNL_MSG_BATCH_END, nl.Request, unix.NFPROTO_UNSPEC, unix.NFNL_SUBSYS_NFTABLES)), err
}

// message returns a message of nfnetlink without attributes.
func message(kind nl.HeaderType, flags nl.HeaderFlags, family byte, resource uint16) nl.Message {
	return nl.Message{Header: nl.Header{Type: kind, Flags: flags}, Data: binary.BigEndian.AppendUint16([]byte{family, unix.NFNETLINK_V0}, resource)}
}

// encode writes the attributes of a chain.
func (c chain) encode(e *nl.AttributeEncoder) {
	e.String(unix.NFTA_CHAIN_TABLE, tableName)
	e.String(unix.NFTA_CHAIN_NAME, c.name)
	if !c.isBase {
		return
	}
	e.Nested(unix.NFTA_CHAIN_HOOK, func(hook *nl.AttributeEncoder) error {
		hook.Uint32(unix.NFTA_HOOK_HOOKNUM, uint32(c.hook))
		hook.Int32(unix.NFTA_HOOK_PRIORITY, int32(*nftables.ChainPriorityMangle))
		return nil
	})
	e.Uint32(unix.NFTA_CHAIN_POLICY, uint32(c.policy()))
	e.String(unix.NFTA_CHAIN_TYPE, string(nftables.ChainTypeFilter))
}

func (c chain) policy() nftables.ChainPolicy {
	if c.drop {
		return nftables.ChainPolicyDrop
	}
	return nftables.ChainPolicyAccept
}

// backlog is the number of connections that wait for the gateway, up to net.core.somaxconn. It is
// the kernel's default.
const backlog = 4096

// listen returns a listener for both families.
func listen(port int) (*os.File, error) {
	fd, err := open(unix.SOCK_STREAM, port)
	if err != nil {
		return nil, err
	}
	if err := unix.Listen(fd, backlog); err != nil {
		return nil, errors.Join(os.NewSyscallError("listen", err), unix.Close(fd))
	}
	// Accepted connections inherit it. A program may then serve a port that it has a connection to
	// outside, if it sets the option as well: servers do. The port of a socket that listens is never
	// shared, and this one does already.
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return nil, errors.Join(os.NewSyscallError("setsockopt", err), unix.Close(fd))
	}
	return os.NewFile(uintptr(fd), "listener"), nil
}

// receive returns a datagram socket for both families.
func receive(port int) (*os.File, error) {
	fd, err := open(unix.SOCK_DGRAM, port)
	if err != nil {
		return nil, err
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_IPV6, unix.IPV6_RECVPKTINFO, 1); err != nil {
		return nil, errors.Join(os.NewSyscallError("setsockopt", err), unix.Close(fd))
	}
	return os.NewFile(uintptr(fd), "dns"), nil
}

// open returns a transparent socket for both families, bound to a port. Neither SO_REUSEADDR nor
// SO_REUSEPORT is set, so that no second socket gets the port.
func open(kind, port int) (int, error) {
	fd, err := unix.Socket(unix.AF_INET6, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, os.NewSyscallError("socket", err)
	}
	for _, o := range []struct{ option, value int }{{unix.IPV6_V6ONLY, 0}, {unix.IPV6_TRANSPARENT, 1}} {
		if err := unix.SetsockoptInt(fd, unix.SOL_IPV6, o.option, o.value); err != nil {
			return -1, errors.Join(os.NewSyscallError("setsockopt", err), unix.Close(fd))
		}
	}
	if err := unix.Bind(fd, &unix.SockaddrInet6{Port: port}); err != nil {
		return -1, errors.Join(os.NewSyscallError("bind", err), unix.Close(fd))
	}
	return fd, nil
}
