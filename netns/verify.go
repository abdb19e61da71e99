package netns

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/google/nftables"
	nl "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// verify compares the state of the calling thread's namespace with the plan. Everything
// beyond the plan is an error too, except for the kernel's own addresses and routes.
func (p plan) verify() error {
	for _, s := range p.sysctls {
		data, err := os.ReadFile("/proc/sys/net/" + s.name)
		if err != nil {
			return fmt.Errorf("read sysctl: %w", err)
		}
		if got := strings.TrimSpace(string(data)); got != s.value {
			return fmt.Errorf("sysctl net/%s is %s, not %s", s.name, got, s.value)
		}
	}
	if err := p.verifyRoutes(); err != nil {
		return err
	}
	return p.verifyRules()
}

// verifyRoutes compares links, addresses, routes and routing rules.
func (p plan) verifyRoutes() error {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open routing socket: %w", err)
	}
	defer h.Close()
	links, err := h.LinkList()
	if err != nil {
		return fmt.Errorf("list links: %w", err)
	}
	for _, l := range links {
		// Modules of tunnels put a device that is down into every namespace.
		a := l.Attrs()
		if up := a.RawFlags&unix.IFF_UP != 0; up != (a.Index == loIndex) {
			return fmt.Errorf("link %s: up is %t", a.Name, up)
		}
	}
	addresses, err := h.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return fmt.Errorf("list addresses: %w", err)
	}
	want := slices.Concat(p.addresses, loopback)
	var got []netip.Prefix
	for _, a := range addresses {
		if a.LinkIndex == loIndex {
			got = append(got, prefix(a.IP, a.Mask))
		}
	}
	slices.SortFunc(want, netip.Prefix.Compare)
	slices.SortFunc(got, netip.Prefix.Compare)
	if !slices.Equal(got, want) || len(got) != len(addresses) {
		return fmt.Errorf("addresses of lo are %v of %d, not %v", got, len(addresses), want)
	}
	var routes []netlink.Route
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		// Table 0 stands for every table.
		some, err := h.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
		if err != nil {
			return fmt.Errorf("list routes: %w", err)
		}
		routes = append(routes, some...)
	}
	var made []route
	for _, r := range routes {
		switch {
		case r.LinkIndex != loIndex:
			return fmt.Errorf("route %s does not end at lo", r)
		case r.Protocol == unix.RTPROT_KERNEL && r.Table == unix.RT_TABLE_LOCAL: // with each address
		case r.Type != unix.RTN_LOCAL || r.Table != unix.RT_TABLE_MAIN || r.Dst == nil || r.Src == nil:
			return fmt.Errorf("route %s is none of ours", r)
		default:
			src, _ := netip.AddrFromSlice(r.Src)
			made = append(made, route{prefix(r.Dst.IP, r.Dst.Mask), src.Unmap()})
		}
	}
	if !slices.Equal(made, p.routes) {
		return fmt.Errorf("routes are %v, not %v", made, p.routes)
	}
	rules, err := h.RuleList(netlink.FAMILY_ALL)
	if err != nil {
		return fmt.Errorf("list routing rules: %w", err)
	}
	for _, r := range rules {
		if r.Priority != 0 && r.Priority < 32766 { // those that every namespace begins with
			return fmt.Errorf("routing rule %s is none of ours", r)
		}
	}
	return nil
}

// loopback are the addresses that the kernel gives to lo.
var loopback = []netip.Prefix{netip.MustParsePrefix("127.0.0.1/8"), netip.MustParsePrefix("::1/128")}

func prefix(ip, mask []byte) netip.Prefix {
	addr, _ := netip.AddrFromSlice(ip)
	addr = addr.Unmap()
	bits := 0
	for _, b := range mask {
		for ; b != 0; b <<= 1 {
			bits++
		}
	}
	return netip.PrefixFrom(addr, bits)
}

// verifyRules compares all chains and rules of nf_tables, of every family.
func (p plan) verifyRules() error {
	c, err := nl.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return fmt.Errorf("open nf_tables socket: %w", err)
	}
	got, err := loadedChains(c)
	if err != nil {
		return errors.Join(fmt.Errorf("list nf_tables chains: %w", err), c.Close())
	}
	loaded, err := loadedRules(c)
	if err = errors.Join(err, c.Close()); err != nil {
		return fmt.Errorf("list nf_tables rules: %w", err)
	}
	var want []string
	for _, c := range p.chains {
		want = append(want, c.String())
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		return fmt.Errorf("nf_tables chains are %q, not %q", got, want)
	}
	count := 0
	for _, c := range p.chains {
		rules := loaded[[2]string{tableName, c.name}]
		if len(rules) != len(c.rules) {
			return fmt.Errorf("nf_tables chain %s has %d rules, not %d", c.name, len(rules), len(c.rules))
		}
		for i, r := range c.rules {
			if err := r.verify(rules[i]); err != nil {
				return fmt.Errorf("nf_tables chain %s: rule %q: %w", c.name, r.text, err)
			}
		}
		count += len(rules)
	}
	for _, rules := range loaded {
		count -= len(rules)
	}
	if count != 0 {
		return fmt.Errorf("there are %d nf_tables rules beside ours", -count)
	}
	return nil
}

// String returns the whole chain without its rules, as [loadedChains] does.
func (c chain) String() string {
	if !c.isBase {
		return fmt.Sprintf("family %d %s %s", unix.NFPROTO_INET, tableName, c.name)
	}
	return fmt.Sprintf("family %d %s %s type %s hook %d priority %d policy %d", unix.NFPROTO_INET, tableName, c.name, nftables.ChainTypeFilter, c.hook,
		*nftables.ChainPriorityMangle, c.policy())
}

// loadedChains describes all chains of the namespace.
func loadedChains(c *nl.Conn) ([]string, error) {
	var all []string
	err := dump(c, unix.NFT_MSG_GETCHAIN, func(family byte, attributes map[uint16][]byte) error {
		text := fmt.Sprintf("family %d %s %s", family, unix.ByteSliceToString(attributes[unix.NFTA_CHAIN_TABLE]), unix.ByteSliceToString(attributes[unix.NFTA_CHAIN_NAME]))
		if hook, ok := attributes[unix.NFTA_CHAIN_HOOK]; ok {
			h, err := unmarshal(hook)
			if err != nil {
				return err
			}
			text += fmt.Sprintf(" type %s hook %d priority %d policy %d", unix.ByteSliceToString(attributes[unix.NFTA_CHAIN_TYPE]),
				number(h[unix.NFTA_HOOK_HOOKNUM]), int32(number(h[unix.NFTA_HOOK_PRIORITY])), number(attributes[unix.NFTA_CHAIN_POLICY])) //nolint:gosec // the kernel's is signed
		}
		all = append(all, text)
		return nil
	})
	return all, err
}

// number returns the value of an attribute, or 2^32-1 if it is absent: no attribute has that value.
func number(data []byte) uint32 {
	if len(data) != 4 {
		return math.MaxUint32
	}
	return binary.BigEndian.Uint32(data)
}

// loadedRules returns the expressions of all rules in order, by table and chain. It does not use
// nftables.Conn.GetRules, which cannot read tproxy (v0.3.0 takes the family for one byte of four).
func loadedRules(c *nl.Conn) (map[[2]string][][]byte, error) {
	rules := make(map[[2]string][][]byte)
	err := dump(c, unix.NFT_MSG_GETRULE, func(_ byte, attributes map[uint16][]byte) error {
		key := [2]string{unix.ByteSliceToString(attributes[unix.NFTA_RULE_TABLE]), unix.ByteSliceToString(attributes[unix.NFTA_RULE_CHAIN])}
		rules[key] = append(rules[key], attributes[unix.NFTA_RULE_EXPRESSIONS])
		return nil
	})
	return rules, err
}

// dump calls f for each object of nf_tables that a request lists, of all families.
func dump(c *nl.Conn, request nl.HeaderType, f func(family byte, attributes map[uint16][]byte) error) error {
	messages, err := c.Execute(message(unix.NFNL_SUBSYS_NFTABLES<<8|request, nl.Request|nl.Dump, unix.NFPROTO_UNSPEC, 0))
	if err != nil {
		return err
	}
	for _, m := range messages {
		if len(m.Data) < 4 {
			return errors.New("short message")
		}
		attributes, err := unmarshal(m.Data[4:])
		if err == nil {
			err = f(m.Data[0], attributes)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// unmarshal returns attributes by type. No type that is looked at occurs twice.
func unmarshal(data []byte) (map[uint16][]byte, error) {
	list, err := nl.UnmarshalAttributes(data)
	all := make(map[uint16][]byte, len(list))
	for _, a := range list {
		all[a.Type&^(nl.Nested|nl.NetByteOrder)] = a.Data
	}
	return all, err
}

// verify compares a rule with the kernel's form of it.
func (r rule) verify(loaded []byte) error {
	if v := r.verified.Load(); v != nil && bytes.Equal(*v, loaded) {
		return nil
	}
	list, err := nl.UnmarshalAttributes(loaded)
	if err != nil {
		return err
	}
	if len(list) != len(r.sent) {
		return fmt.Errorf("has %d expressions, not %d", len(list), len(r.sent))
	}
	for i, sent := range r.sent {
		if !within(sent, list[i].Data) {
			return fmt.Errorf("expression %d is %x, not %x", i, list[i].Data, sent)
		}
	}
	r.verified.Store(&loaded)
	return nil
}

// within reports whether all attributes of a request are in the kernel's answer. A newer kernel may
// return more attributes, with the defaults that it has used. It leaves out a zero without meaning,
// such as the ICMP code of a TCP reset.
func within(sent, got []byte) bool {
	const flags = nl.Nested | nl.NetByteOrder
	if bytes.Equal(sent, got) {
		return true
	}
	wants, err := nl.UnmarshalAttributes(sent)
	if err != nil || len(wants) == 0 {
		return false
	}
	have, err := nl.UnmarshalAttributes(got)
	if err != nil {
		return false
	}
	for _, w := range wants {
		if !zero(w.Data) && !slices.ContainsFunc(have, func(h nl.Attribute) bool {
			return h.Type&^flags == w.Type&^flags && within(w.Data, h.Data)
		}) {
			return false
		}
	}
	return true
}

func zero(data []byte) bool { return !slices.ContainsFunc(data, func(b byte) bool { return b != 0 }) }

// Verify reports whether the files are a network namespace and three sockets in it like those of
// [Make]. It is for files that come from another process, whose network namespace and user
// namespace are the caller's. It does not look at rules.
func (n *Namespace) Verify() error {
	kind, err := unix.IoctlRetInt(int(n.NS.Fd()), unix.NS_GET_NSTYPE)
	if err != nil {
		return fmt.Errorf("verify network namespace: ask for its kind: %w", err)
	}
	if kind != unix.CLONE_NEWNET {
		return fmt.Errorf("verify network namespace: its kind is %#x", kind)
	}
	var its, ours unix.Stat_t
	if err := errors.Join(unix.Fstat(int(n.NS.Fd()), &its), unix.Stat("/proc/thread-self/ns/net", &ours)); err != nil {
		return fmt.Errorf("verify network namespace: %w", err)
	}
	if its.Ino == ours.Ino && its.Dev == ours.Dev {
		return errors.New("verify network namespace: it is our own")
	}
	owner, err := unix.IoctlRetInt(int(n.NS.Fd()), unix.NS_GET_USERNS)
	if err != nil {
		return fmt.Errorf("verify network namespace: ask for its owner: %w", err)
	}
	err = errors.Join(unix.Fstat(owner, &its), unix.Close(owner), unix.Stat("/proc/self/ns/user", &ours))
	if err != nil {
		return fmt.Errorf("verify network namespace: %w", err)
	}
	if its.Ino != ours.Ino || its.Dev != ours.Dev {
		return errors.New("verify network namespace: it belongs to another user namespace")
	}
	return n.verifySockets()
}

// verifySockets asks the kernel for everything that the sockets' users rely on.
func (n *Namespace) verifySockets() error {
	var ns unix.Stat_t
	if err := unix.Fstat(int(n.NS.Fd()), &ns); err != nil {
		return fmt.Errorf("stat namespace: %w", err)
	}
	for _, s := range []struct {
		file *os.File
		kind int
		port []int // one of them
	}{{n.Stream, unix.SOCK_STREAM, []int{portStream}}, {n.DNSTCP, unix.SOCK_STREAM, []int{portDNSTCP}}, {n.DNS, unix.SOCK_DGRAM, []int{portDNS, portDomain}}} {
		if err := verifySocket(s.file, s.kind, s.port, &ns); err != nil {
			return fmt.Errorf("%s socket on port %d: %w", s.file.Name(), s.port[0], err)
		}
	}
	if n.Diag != nil {
		if err := verifyDiag(n.Diag, &ns); err != nil {
			return fmt.Errorf("socket for questions about sockets: %w", err)
		}
	}
	return nil
}

// verifyDiag asks the kernel for what Inode relies on, and that the socket is good for no rules.
func verifyDiag(file *os.File, ns *unix.Stat_t) error {
	raw, err := file.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) {
		failed = func() error {
			for _, o := range []struct{ option, want int }{{unix.SO_DOMAIN, unix.AF_NETLINK}, {unix.SO_PROTOCOL, unix.NETLINK_SOCK_DIAG}} {
				got, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, o.option)
				if err != nil {
					return os.NewSyscallError("getsockopt", err)
				}
				if got != o.want {
					return fmt.Errorf("option %d is %d, not %d", o.option, got, o.want)
				}
			}
			return isIn(int(fd), ns)
		}()
	})
	return errors.Join(err, failed)
}

// isIn reports a socket that is in another namespace.
func isIn(socket int, ns *unix.Stat_t) error {
	its, err := unix.IoctlRetInt(socket, unix.SIOCGSKNS)
	if err != nil {
		return fmt.Errorf("ask for its namespace: %w", err)
	}
	var st unix.Stat_t
	if err := errors.Join(unix.Fstat(its, &st), unix.Close(its)); err != nil {
		return fmt.Errorf("stat its namespace: %w", err)
	}
	if st.Ino != ns.Ino || st.Dev != ns.Dev {
		return errors.New("is in another namespace")
	}
	return nil
}

func verifySocket(file *os.File, kind int, ports []int, ns *unix.Stat_t) error {
	raw, err := file.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) {
		failed = func() error {
			s := int(fd)
			at, err := unix.Getsockname(s)
			if err != nil {
				return os.NewSyscallError("getsockname", err)
			}
			if in6, ok := at.(*unix.SockaddrInet6); !ok || !slices.Contains(ports, in6.Port) || in6.Addr != [16]byte{} {
				return fmt.Errorf("is bound to %v", at)
			}
			stream, datagram := 0, 1
			if kind == unix.SOCK_STREAM {
				stream, datagram = 1, 0
			}
			for _, o := range []struct{ level, option, want int }{
				{unix.SOL_SOCKET, unix.SO_TYPE, kind},
				{unix.SOL_SOCKET, unix.SO_ACCEPTCONN, stream},
				{unix.SOL_SOCKET, unix.SO_REUSEADDR, stream},
				{unix.SOL_SOCKET, unix.SO_REUSEPORT, 0},
				{unix.SOL_IPV6, unix.IPV6_V6ONLY, 0},
				{unix.SOL_IPV6, unix.IPV6_TRANSPARENT, 1},
				{unix.SOL_IPV6, unix.IPV6_RECVPKTINFO, datagram},
				{unix.SOL_IP, unix.IP_TRANSPARENT, 1},
			} {
				got, err := unix.GetsockoptInt(s, o.level, o.option)
				if err != nil {
					return os.NewSyscallError("getsockopt", err)
				}
				if got != o.want {
					return fmt.Errorf("option %d of level %d is %d, not %d", o.option, o.level, got, o.want)
				}
			}
			return isIn(s, ns)
		}()
	})
	return errors.Join(err, failed)
}
