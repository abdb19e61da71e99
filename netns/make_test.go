package netns

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/kernel"
	"github.com/sandboxd/sandboxd/internal/osthread"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// Every difference from the plan is found, whoever has made it.
func TestVerifyFindsDifferences(t *testing.T) {
	testenv.RequireUserNS(t)
	inet := &nftables.Table{Name: tableName, Family: nftables.TableFamilyINet}
	in := &nftables.Chain{Name: "in", Table: inet}
	for name, change := range map[string]func() error{
		"link down":         programs["link-down"],
		"address missing":   programs["address-delete"],
		"address more":      programs["address-add"],
		"route missing":     programs["route-delete"],
		"route more":        programs["route-add"],
		"routing rule more": programs["rule-add"],
		"table missing":     programs["nft-delete-table"],
		"table more": func() error {
			return nft(func(c *nftables.Conn) {
				c.AddChain(&nftables.Chain{Name: "x", Table: c.AddTable(&nftables.Table{Name: "x", Family: nftables.TableFamilyIPv4})})
			})
		},
		"sysctl": programs["sysctl-port"],
		"rule first": func() error {
			return nft(func(c *nftables.Conn) { c.InsertRule(&nftables.Rule{Table: inet, Chain: in, Exprs: accept()}) })
		},
		"rule last": func() error {
			return nft(func(c *nftables.Conn) { c.AddRule(&nftables.Rule{Table: inet, Chain: in, Exprs: accept()}) })
		},
		"rules missing": func() error { return nft(func(c *nftables.Conn) { c.FlushChain(in) }) },
		"rule another": func() error {
			return nft(func(c *nftables.Conn) {
				out := &nftables.Chain{Name: "out", Table: inet}
				c.FlushChain(out)
				exprs := append([]expr.Any{}, newPlan().chains[3].rules[0].exprs...)
				exprs[len(exprs)-2] = &expr.Immediate{Register: 1, Data: port(54)}
				c.AddRule(&nftables.Rule{Table: inet, Chain: out, Exprs: exprs})
			})
		},
		"policy": func() error {
			return nft(func(c *nftables.Conn) {
				policy := nftables.ChainPolicyAccept
				c.AddChain(&nftables.Chain{
					Name: "in", Table: inet, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookPrerouting,
					Priority: nftables.ChainPriorityMangle, Policy: &policy,
				})
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := namespace(t)
			inside(t, n, ours().verify) // the control
			inside(t, n, change)
			inside(t, n, func() error {
				if err := ours().verify(); err == nil {
					t.Error("not found")
				} else {
					t.Log(err)
				}
				return nil
			})
		})
	}
	for name, change := range map[string]func(fd int) error{
		"transparent": func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_IPV6, unix.IPV6_TRANSPARENT, 0) },
		"shared":      func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) },
	} {
		t.Run("socket "+name, func(t *testing.T) {
			n := namespace(t)
			if err := n.verifySockets(); err != nil {
				t.Fatal(err)
			}
			if err := change(int(n.DNS.Fd())); err != nil {
				t.Fatal(err)
			}
			if err := n.verifySockets(); err == nil {
				t.Error("not found")
			}
		})
	}
	t.Run("socket of another namespace", func(t *testing.T) {
		n, m := namespace(t), namespace(t)
		n.Stream, m.Stream = m.Stream, n.Stream
		if err := n.verifySockets(); err == nil || !strings.Contains(err.Error(), "another namespace") {
			t.Error(err)
		}
	})
}

// The namespace lives as long as one of its descriptors, and ends with the last. The kernel reports
// the end.
func TestCloseFrees(t *testing.T) {
	testenv.RequireUserNS(t)
	before := descriptors(t)
	n, err := Make()
	if err != nil {
		t.Fatal(err)
	}
	files := []*os.File{n.NS, n.Stream, n.DNSTCP}
	if n.Diag != nil {
		files = append(files, n.Diag)
	}
	if got := since(t, before); got != len(files)+1 {
		t.Errorf("%d descriptors more, not %d", got, len(files)+1)
	}
	const number, groupNSID = 77, 28 // RTNLGRP_NSID
	if err := netlink.SetNetNsIdByFd(int(n.NS.Fd()), number); err != nil {
		t.Fatal(err)
	}
	events, err := nl.Subscribe(unix.NETLINK_ROUTE, groupNSID)
	if err != nil {
		t.Fatal(err)
	}
	defer events.Close()
	for _, f := range files {
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	// One socket is left: the namespace still has its number.
	left := n.DNS
	ns, err := unix.IoctlRetInt(int(left.Fd()), unix.SIOCGSKNS)
	if err != nil {
		t.Fatal(err)
	}
	if id, err := netlink.GetNetNsIdByFd(ns); err != nil || id != number {
		t.Errorf("number %d, %v", id, err)
	}
	if err := errors.Join(unix.Close(ns), left.Close()); err != nil {
		t.Fatal(err)
	}
	for { // the test hangs if the namespace does not end
		messages, _, err := events.Receive()
		if err != nil {
			t.Fatal(err)
		}
		if len(messages) > 0 && messages[0].Header.Type == unix.RTM_DELNSID {
			break
		}
	}
	if got := since(t, before); got != 1 { // events
		t.Errorf("%d descriptors are left", got-1)
	}
}

// A refused namespace leaves no descriptor, and the probe says why.
func TestRefusedNamespace(t *testing.T) {
	testenv.RequireUserNS(t)
	if err := Probe(t.Context()); err != nil {
		t.Fatal(err)
	}
	const limit = "/proc/sys/user/max_net_namespaces"
	was, err := os.ReadFile(limit)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(limit, []byte("0"), 0); err != nil {
		t.Fatal(err)
	}
	before := descriptors(t)
	n, made := Make()
	probed := Probe(t.Context())
	left := since(t, before)
	if err := os.WriteFile(limit, was, 0); err != nil {
		t.Fatal(err)
	}
	if n != nil || !errors.Is(made, unix.ENOSPC) {
		t.Errorf("made %v, %v", n, made)
	}
	if left != 0 {
		t.Errorf("%d descriptors are left", left)
	}
	if _, ok := errors.AsType[*kernel.UnsupportedError](probed); !ok {
		t.Errorf("the probe says %v", probed)
	}
}

// A namespace that is not as planned is not handed out, and nothing is left of it.
func TestMakeVerifies(t *testing.T) {
	testenv.RequireUserNS(t)
	before := descriptors(t)
	p := newPlan()
	p.sysctls[0].value = "03" // which is read back as 3
	n, err := makeBy(p)
	if n != nil || err == nil || !strings.Contains(err.Error(), "verify: sysctl") {
		t.Errorf("made %v, %v", n, err)
	}
	if got := since(t, before); got != 0 {
		t.Errorf("%d descriptors are left", got)
	}
}

// Rules that the kernel refuses are an error, wherever they stand: only the last one is answered
// when all is well.
func TestRefusedRules(t *testing.T) {
	testenv.RequireUserNS(t)
	before := descriptors(t)
	for name, at := range map[string]func(p plan) *rule{
		"first":        func(p plan) *rule { return &p.chains[0].rules[0] },
		"in the midst": func(p plan) *rule { return &p.chains[2].rules[1] },
		"last":         func(p plan) *rule { return &p.chains[3].rules[0] },
	} {
		for what, refused := range map[string]rule{"no such chain": newRule("x", goTo("nowhere")), "no such refusal": newRule("x", []expr.Any{&expr.Reject{Type: 77}})} {
			p := newPlan()
			*at(p) = refused
			if n, err := makeBy(p); n != nil || err == nil || !strings.Contains(err.Error(), "load nf_tables rules") {
				t.Errorf("%s, %s: made %v, %v", name, what, n, err)
			}
		}
	}
	if got := since(t, before); got != 0 {
		t.Errorf("%d descriptors are left", got)
	}
}

// On a host that has IPv6 off in new namespaces, ours have it.
func TestIPv6IsEnabled(t *testing.T) {
	testenv.RequireUserNS(t)
	p := newPlan()
	for _, name := range []string{"all", "lo"} {
		p.sysctls = append(p.sysctls, sysctl{"ipv6/conf/" + name + "/disable_ipv6", "1"})
	}
	must(t, osthread.Run(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		return errors.Join(p.apply(), newPlan().verify())
	}))
}

// Sysfs shows the devices of the namespace, and cannot be written to.
func TestSysfs(t *testing.T) {
	n := namespace(t)
	sys, err := Sysfs(n.NS)
	if err != nil {
		t.Fatal(err)
	}
	defer sys.Close()
	read := func(name string) string {
		fd, err := unix.Openat(int(sys.Fd()), name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		f := os.NewFile(uintptr(fd), name)
		defer f.Close()
		if !strings.HasSuffix(name, "/") {
			data := make([]byte, 64)
			size, err := f.Read(data)
			if err != nil {
				t.Fatal(err)
			}
			return strings.TrimSpace(string(data[:size]))
		}
		names, err := f.Readdirnames(-1)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Join(names, " ")
	}
	if got := read("class/net/"); got != "lo" {
		t.Errorf("devices %q", got)
	}
	if got := read("class/net/lo/flags"); got != "0x9" { // up; that of the tests' own namespace is down
		t.Errorf("lo has the flags %s", got)
	}
	if _, err := unix.Openat(int(sys.Fd()), "class/net/lo/mtu", unix.O_WRONLY|unix.O_CLOEXEC, 0); !errors.Is(err, unix.EROFS) {
		t.Errorf("open for writing: %v", err)
	}
}

// The plan is the same text for every reader of a review.
func TestPlanIsKnown(t *testing.T) {
	want, err := os.ReadFile("testdata/plan.txt")
	if err != nil {
		t.Fatal(err)
	}
	if got := newPlan().String(); got != string(want) {
		t.Errorf("the plan is\n%s\nwant\n%s", got, want)
	}
}

// descriptors returns the namespaces and sockets that this process has open, by inode.
func descriptors(t *testing.T) map[string]bool {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	all := make(map[string]bool)
	for _, e := range entries {
		to, err := os.Readlink("/proc/self/fd/" + e.Name())
		if err == nil && (strings.HasPrefix(to, "net:") || strings.HasPrefix(to, "socket:")) {
			all[to] = true
		}
	}
	return all
}

// since returns the number of descriptors that were not there before.
func since(t *testing.T, before map[string]bool) (count int) {
	t.Helper()
	for d := range descriptors(t) {
		if !before[d] {
			count++
		}
	}
	return count
}
