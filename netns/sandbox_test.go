package netns

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/osthread"
)

// programs run in a namespace, by name: see [enter].
var programs = map[string]func() error{
	"nft-delete-table": func() error {
		return nft(func(c *nftables.Conn) { c.DelTable(&nftables.Table{Name: tableName, Family: nftables.TableFamilyINet}) })
	},
	"nft-flush": func() error { return nft((*nftables.Conn).FlushRuleset) },
	"nft-add-table": func() error {
		return nft(func(c *nftables.Conn) { c.AddTable(&nftables.Table{Name: "x", Family: nftables.TableFamilyIPv4}) })
	},
	"nft-list": func() error {
		c, err := nftables.New()
		if err != nil {
			return err
		}
		_, err = c.ListChains()
		return err
	},
	"link-down": func() error { return rtnl(func(h *netlink.Handle) error { return h.LinkSetDown(lo) }) },
	"link-mtu":  func() error { return rtnl(func(h *netlink.Handle) error { return h.LinkSetMTU(lo, 1280) }) },
	"address-add": func() error {
		return rtnl(func(h *netlink.Handle) error { return h.AddrAdd(lo, &netlink.Addr{IPNet: ipNet(other)}) })
	},
	"address-delete": func() error {
		return rtnl(func(h *netlink.Handle) error {
			return h.AddrDel(lo, &netlink.Addr{IPNet: ipNet(newPlan().addresses[0])})
		})
	},
	"route-delete": func() error {
		return rtnl(func(h *netlink.Handle) error {
			return h.RouteDel(&netlink.Route{LinkIndex: loIndex, Dst: ipNet(newPlan().routes[0].dst), Table: unix.RT_TABLE_MAIN, Type: unix.RTN_LOCAL, Scope: unix.RT_SCOPE_HOST})
		})
	},
	"route-add": func() error {
		return rtnl(func(h *netlink.Handle) error {
			return h.RouteAdd(&netlink.Route{LinkIndex: loIndex, Dst: ipNet(other)})
		})
	},
	"rule-add": func() error {
		return rtnl(func(h *netlink.Handle) error {
			r := netlink.NewRule()
			r.Family, r.Table, r.Priority = netlink.FAMILY_V4, unix.RT_TABLE_DEFAULT, 5
			return h.RuleAdd(r)
		})
	},
	"sysctl-port": func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_unprivileged_port_start", []byte("0"), 0) },
	"sysctl-bind": func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_nonlocal_bind", []byte("1"), 0) },
	"raw":         func() error { return socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_UDP) },
	"raw6":        func() error { return socket(unix.AF_INET6, unix.SOCK_RAW, unix.IPPROTO_ICMPV6) },
	"packet":      func() error { return socket(unix.AF_PACKET, unix.SOCK_RAW, 0x0300) },
	"transparent": func() error { return socket(unix.AF_INET, unix.SOCK_STREAM, 0, unix.SOL_IP, unix.IP_TRANSPARENT, 1) },
	"transparent6": func() error {
		return socket(unix.AF_INET6, unix.SOCK_STREAM, 0, unix.SOL_IPV6, unix.IPV6_TRANSPARENT, 1)
	},
	"mark":   func() error { return socket(unix.AF_INET, unix.SOCK_STREAM, 0, unix.SOL_SOCKET, unix.SO_MARK, 1) },
	"repair": func() error { return socket(unix.AF_INET, unix.SOCK_STREAM, 0, unix.SOL_TCP, unix.TCP_REPAIR, 1) },
	"enter": func() error {
		ns, err := unix.Open("/proc/self/ns/net", unix.O_RDONLY, 0)
		if err != nil {
			return err
		}
		return osthread.Run(func() error { return unix.Setns(ns, unix.CLONE_NEWNET) })
	},
	"socket-namespace": func() error {
		s, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
		if err != nil {
			return err
		}
		_, err = unix.IoctlRetInt(s, unix.SIOCGSKNS)
		return err
	},
	// Ports that no socket of ours has, so that the owner gets them.
	"bind-low":  func() error { return bind(unix.SOCK_DGRAM, "0.0.0.0", 2) },
	"bind-low6": func() error { return bind(unix.SOCK_DGRAM, "::1", 2) },
	// Ports of our sockets, and all others: see [TestPortsAreTheirs].
	"bind-stream-any":  func() error { return bind(unix.SOCK_STREAM, "0.0.0.0", portStream) },
	"bind-stream-lo":   func() error { return bind(unix.SOCK_STREAM, "127.0.0.1", portStream) },
	"bind-stream-any6": func() error { return bind(unix.SOCK_STREAM, "::", portStream) },
	"bind-stream-own":  func() error { return bind(unix.SOCK_STREAM, "192.0.2.1", portDNSTCP) },
	"bind-dns-any":     func() error { return bind(unix.SOCK_DGRAM, "0.0.0.0", portDNS) },
	"bind-dns-lo":      func() error { return bind(unix.SOCK_DGRAM, "127.0.0.1", portDNS) },
	"bind-dns-any6":    func() error { return bind(unix.SOCK_DGRAM, "::", portDNS) },
	"bind-dns-own6":    func() error { return bind(unix.SOCK_DGRAM, "2001:db8::1", portDNS) },
	"bind-outside6":    func() error { return bind(unix.SOCK_DGRAM, "2600::1", 53) },
	"bind-9000": func() error {
		var errs []error
		for _, at := range []string{"127.0.0.1", "0.0.0.0", "192.0.2.1", "::1", "::", "2001:db8::1"} {
			errs = append(errs, bind(unix.SOCK_STREAM, at, 9000, unix.SO_REUSEADDR))
		}
		return errors.Join(errs...)
	},
	"bind-usual": func() error {
		var errs []error
		for _, p := range []int{3, 22, 53, 80, 443, 1023} {
			for _, at := range []string{"127.0.0.1", "0.0.0.0", "192.0.2.1", "::1", "::", "2001:db8::1"} {
				errs = append(errs, bind(unix.SOCK_STREAM, at, p), bind(unix.SOCK_DGRAM, at, p))
			}
		}
		return errors.Join(errs...)
	},
	"proc": func() error {
		var all strings.Builder
		for _, name := range []string{"dev", "route", "ipv6_route", "if_inet6"} {
			data, err := os.ReadFile("/proc/self/net/" + name)
			if err != nil {
				return err
			}
			all.Write(data)
		}
		for line := range strings.Lines(all.String()) {
			f := strings.Fields(line)
			if last := f[len(f)-1]; last != "lo" && f[0] != "lo" && f[0] != "lo:" && f[0] != "Inter-|" && f[0] != "face" && f[0] != "Iface" {
				return fmt.Errorf("shows %q", line)
			}
		}
		return nil
	},
}

var (
	lo    = &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: loIndex, Name: "lo"}}
	other = netip.MustParsePrefix("198.51.100.1/32")
)

func nft(change func(*nftables.Conn)) error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	change(c)
	return c.Flush()
}

func rtnl(change func(*netlink.Handle) error) error {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer h.Close()
	return change(h)
}

// socket makes a socket and sets an option of it: level, option, value.
func socket(domain, kind, protocol int, option ...int) error {
	s, err := unix.Socket(domain, kind|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	if option == nil {
		return nil
	}
	return unix.SetsockoptInt(s, option[0], option[1], option[2])
}

// bind binds a socket that may share its port with others of its user, or as the options say.
func bind(kind int, address string, port int, options ...int) error {
	addr := netip.MustParseAddr(address)
	var at unix.Sockaddr = &unix.SockaddrInet4{Port: port}
	domain := unix.AF_INET
	if addr.Is4() {
		at.(*unix.SockaddrInet4).Addr = addr.As4()
	} else {
		domain, at = unix.AF_INET6, &unix.SockaddrInet6{Port: port, Addr: addr.As16()}
	}
	s, err := unix.Socket(domain, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	if options == nil {
		options = []int{unix.SO_REUSEADDR, unix.SO_REUSEPORT}
	}
	for _, option := range options {
		if err := unix.SetsockoptInt(s, unix.SOL_SOCKET, option, 1); err != nil {
			return err
		}
	}
	if err := unix.Bind(s, at); err != nil {
		return err
	}
	if kind == unix.SOCK_STREAM {
		return unix.Listen(s, 1)
	}
	return nil
}

// A sandbox's program has every capability in its own user namespace, and none over the network
// namespace. The control is the same program as the launcher, in a namespace of its own.
func TestSandboxCannotChangeIt(t *testing.T) {
	n := namespace(t)
	for program, want := range map[string]string{
		"nft-delete-table": "EPERM", "nft-flush": "EPERM", "nft-add-table": "EPERM", "nft-list": "EPERM",
		"link-down": "EPERM", "link-mtu": "EPERM", "address-add": "EPERM", "address-delete": "EPERM",
		"route-delete": "EPERM", "route-add": "EPERM", "rule-add": "EPERM",
		"raw": "EPERM", "raw6": "EPERM", "packet": "EPERM",
		"transparent": "EPERM", "transparent6": "EPERM", "mark": "EPERM", "repair": "EPERM",
		"enter": "EPERM", "socket-namespace": "EPERM",
		"bind-low": "EACCES", "bind-low6": "EACCES",
	} {
		t.Run(program, func(t *testing.T) {
			for _, r := range sandboxes() {
				if got := enter(t, n, program, r); got != want {
					t.Errorf("%s: %s, want %s", r, got, want)
				}
			}
			if got := enter(t, namespace(t), program, owner); got != "done" {
				t.Errorf("%s: %s", owner, got)
			}
		})
	}
	inside(t, n, newPlan().verify)
}

// Sysctls are writable for the owner, and for the host's root whatever its capabilities. No sandbox
// runs as the host's root (internal/idmap), but this test can: with the sysctls changed, the
// sockets stay ours.
func TestSysctls(t *testing.T) {
	for _, r := range append(sandboxes(), owner) {
		n := namespace(t)
		want := "EACCES"
		isHostRoot := r == sameID && os.Getenv(ownIDVariable) != ""
		if isHostRoot || r == owner {
			want = "done"
		}
		for _, program := range []string{"sysctl-port", "sysctl-bind"} {
			if got := enter(t, n, program, r); got != want {
				t.Errorf("%s: %s: %s, want %s", r, program, got, want)
			}
		}
		if !isHostRoot {
			continue
		}
		for _, program := range []string{"bind-stream-any", "bind-stream-lo", "bind-stream-any6", "bind-stream-own", "bind-dns-any", "bind-dns-lo", "bind-dns-any6", "bind-dns-own6"} {
			if got := enter(t, n, program, r); got != "EADDRINUSE" {
				t.Errorf("with the sysctls open, %s: %s", program, got)
			}
		}
	}
}

// No program binds a port of the gateway's sockets, not even the launcher's user with SO_REUSEPORT.
// All other ports are free for programs without a capability, on every address of theirs.
func TestPortsAreTheirs(t *testing.T) {
	n := namespace(t)
	for _, test := range []struct{ program, sandbox, owner string }{
		{"bind-stream-any", "EACCES", "EADDRINUSE"},
		{"bind-stream-lo", "EACCES", "EADDRINUSE"},
		{"bind-stream-any6", "EACCES", "EADDRINUSE"},
		{"bind-stream-own", "EACCES", "EADDRINUSE"},
		{"bind-dns-any", "EACCES", "EADDRINUSE"},
		{"bind-dns-lo", "EACCES", "EADDRINUSE"},
		{"bind-dns-any6", "EACCES", "EADDRINUSE"},
		{"bind-dns-own6", "EACCES", "EADDRINUSE"},
		{"bind-outside6", "EADDRNOTAVAIL", "EADDRNOTAVAIL"},
		{"bind-usual", "done", "done"},
	} {
		for _, r := range sandboxes() {
			if got := enter(t, n, test.program, r); got != test.sandbox {
				t.Errorf("%s: %s: %s, want %s", r, test.program, got, test.sandbox)
			}
		}
		if got := enter(t, n, test.program, owner); got != test.owner {
			t.Errorf("%s: %s: %s, want %s", owner, test.program, got, test.owner)
		}
	}
}

// A program reads about its own namespace only, which has lo.
func TestSandboxSeesItsOwnOnly(t *testing.T) {
	for _, r := range sandboxes() {
		if got := enter(t, namespace(t), "proc", r); got != "done" {
			t.Errorf("%s: %s", r, got)
		}
	}
}
