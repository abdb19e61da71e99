// Package outside gives tests a network beyond the one that they are in: an address of the host
// itself is refused where one outside is not.
package outside

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/osthread"
)

// Addresses of the two ends of the veth. A test's world may use any other.
var (
	Here4  = netip.MustParseAddr("93.184.215.1")
	Here6  = netip.MustParseAddr("2606:2800:21f::1")
	there4 = netip.MustParseAddr("93.184.215.2")
	there6 = netip.MustParseAddr("2606:2800:21f::2")
)

// Network is a network namespace in which every address is local.
type Network struct{ ns *os.File }

// Make makes a network outside of the calling thread's namespace, and leads all addresses there
// except those of this namespace. Nothing but a veth joins the two. The caller sets up lo of this
// namespace.
func Make() (*Network, error) {
	n := new(Network)
	err := osthread.Run(func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return os.NewSyscallError("unshare", err)
		}
		n.ns, err = os.Open("/proc/thread-self/ns/net")
		return err
	})
	if err == nil {
		err = n.join()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make a network outside: %w", err), n.Close())
	}
	return n, nil
}

// Enter calls f on a thread in the network.
func (n *Network) Enter(f func() error) error {
	return osthread.Run(func() error {
		if err := unix.Setns(int(n.ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return os.NewSyscallError("setns", err)
		}
		return f()
	})
}

// Close lets the network go, when no socket is open in it.
func (n *Network) Close() error {
	if n.ns == nil {
		return nil
	}
	return n.ns.Close()
}

// The hardware addresses are fixed, so that each end knows the other and nothing asks.
var macHere, macThere = net.HardwareAddr{2, 0, 0, 0, 0, 1}, net.HardwareAddr{2, 0, 0, 0, 0, 2}

const nameHere, nameThere = "outward", "inward"

func (n *Network) join() error {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer h.Close()
	err = h.LinkAdd(&netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: nameHere, HardwareAddr: macHere, TxQLen: 1000},
		PeerName:  nameThere, PeerHardwareAddr: macThere, PeerNamespace: netlink.NsFd(int(n.ns.Fd())),
	})
	if err != nil {
		return fmt.Errorf("add veth: %w", err)
	}
	err = n.Enter(func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer h.Close()
		return n.setThere(h)
	})
	if err != nil {
		return err
	}
	return n.setHere(h)
}

// end describes one end of the veth and its peer.
type end struct {
	own  []netip.Addr
	peer []netip.Addr
	mac  net.HardwareAddr // of the peer
}

// set sets an end up, and returns its device.
func (e end) set(h *netlink.Handle, name string) (netlink.Link, error) {
	l, err := h.LinkByName(name)
	if err != nil {
		return nil, err
	}
	for _, a := range e.own {
		if err := h.AddrAdd(l, &netlink.Addr{IPNet: ipNet(single(a)), Flags: unix.IFA_F_NODAD}); err != nil {
			return nil, fmt.Errorf("add address %s: %w", a, err)
		}
	}
	if err := h.LinkSetUp(l); err != nil {
		return nil, fmt.Errorf("set %s up: %w", name, err)
	}
	for _, a := range e.peer {
		neighbour := &netlink.Neigh{LinkIndex: l.Attrs().Index, IP: a.AsSlice(), HardwareAddr: e.mac, State: netlink.NUD_PERMANENT}
		if err := h.NeighSet(neighbour); err != nil {
			return nil, fmt.Errorf("add neighbour %s: %w", a, err)
		}
		if err := h.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: ipNet(single(a)), Scope: unix.RT_SCOPE_LINK}); err != nil {
			return nil, fmt.Errorf("add route %s: %w", a, err)
		}
	}
	return l, nil
}

func (n *Network) setHere(h *netlink.Handle) error {
	l, err := end{[]netip.Addr{Here4, Here6}, []netip.Addr{there4, there6}, macThere}.set(h, nameHere)
	if err != nil {
		return err
	}
	for _, to := range halves {
		via := there4
		if to.Addr().Is6() {
			via = there6
		}
		err := h.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: ipNet(to), Gw: via.AsSlice()})
		if err != nil {
			return fmt.Errorf("add route %s: %w", to, err)
		}
	}
	// The kernel adds this one some time later.
	return addLocal(h, single(Here6))
}

func (n *Network) setThere(h *netlink.Handle) error {
	if err := h.LinkSetUp(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: loIndex}}); err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	if _, err := (end{[]netip.Addr{there4, there6}, []netip.Addr{Here4, Here6}, macHere}).set(h, nameThere); err != nil {
		return err
	}
	for _, to := range halves {
		if err := addLocal(h, to); err != nil {
			return err
		}
	}
	return nil
}

// halves cover all addresses, and win over default routes, which a test may have.
var halves = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/1"), netip.MustParsePrefix("128.0.0.0/1"), netip.MustParsePrefix("::/1"), netip.MustParsePrefix("8000::/1"),
}

const loIndex = 1

func addLocal(h *netlink.Handle, to netip.Prefix) error {
	err := h.RouteAdd(&netlink.Route{LinkIndex: loIndex, Dst: ipNet(to), Table: unix.RT_TABLE_MAIN, Type: unix.RTN_LOCAL, Scope: unix.RT_SCOPE_HOST})
	if err != nil {
		return fmt.Errorf("add local route %s: %w", to, err)
	}
	return nil
}

func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
