package gateway

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/internal/testenv/outside"
)

const namespaceVariable = "GATEWAY_TEST_NAMESPACE"

// inNamespace runs the calling test once more as root of a user namespace with a network of its
// own. It returns true there.
func inNamespace(t *testing.T) bool {
	t.Helper()
	testenv.RequireUserNS(t)
	if os.Getenv(namespaceVariable) != "" {
		return true
	}
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), namespaceVariable+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}},
	}
	out, err := cmd.CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("--- PASS: "+t.Name())) {
		t.Fatalf("in a namespace of its own: %v\n%s", err, out)
	}
	return false
}

// ownedByHost knows an own address in each form that the kernel has: of an interface, the second of
// one, of another interface, and covered by a local route alone. It takes no address elsewhere for
// one, whatever the sysctls say.
func TestOwnedByHost(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	lo := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: 1, Name: "lo"}}
	must(netlink.LinkSetUp(lo))
	n, err := outside.Make()
	must(err)
	t.Cleanup(func() { _ = n.Close() })
	out, err := netlink.LinkByName("outward")
	must(err)
	other := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "other"}, PeerName: "another"} // both are down
	must(netlink.LinkAdd(other))
	for _, a := range []struct {
		link    netlink.Link
		address string
	}{{out, "8.0.0.5/24"}, {out, "8.0.0.6/24"}, {out, "2600::5/64"}, {out, "2600::6/64"}, {other, "8.0.2.5/24"}, {lo, "8.0.3.5/32"}, {lo, "2600:3::5/128"}} {
		address, err := netlink.ParseAddr(a.address)
		must(err)
		address.Flags = unix.IFA_F_NODAD
		must(netlink.AddrAdd(a.link, address))
	}
	for _, to := range []string{"8.0.9.0/24", "2600:9::/32"} {
		_, dst, err := net.ParseCIDR(to)
		must(err)
		must(netlink.RouteAdd(&netlink.Route{LinkIndex: 1, Dst: dst, Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL, Scope: unix.RT_SCOPE_HOST}))
	}
	sysctl := func(name, value string) { must(os.WriteFile("/proc/sys/net/ipv4/"+name, []byte(value), 0)) }
	smallLo := "with a small MTU of lo"
	for _, state := range []struct {
		what string
		set  func()
	}{
		{"as it is", func() {}},
		{"with addresses of others to bind", func() { sysctl("ip_nonlocal_bind", "1") }},
		{"with 127.0.0.0/8 to route", func() { sysctl("conf/all/route_localnet", "1") }},
		{smallLo, func() { sysctl("conf/all/route_localnet", "0"); must(netlink.LinkSetMTU(lo, 1500)) }},
	} {
		state.set()
		for address, want := range map[string]bool{
			outside.Here4.String(): true, "::ffff:" + outside.Here4.String(): true, "8.0.0.5": true, "8.0.0.6": true, "8.0.2.5": true, "8.0.3.5": true, "8.0.9.77": true,
			"8.8.8.8": false, "8.0.0.7": false, "93.184.215.2": false, "9.9.9.9": false,
			outside.Here6.String(): true, "2600::5": true, "2600::6": true, "2600:3::5": true, "2600:9::77": true,
			"2600::7": false, "2606:2800:21f::2": false, "2606:4700::1111": false,
		} {
			if state.what == smallLo && address == "2600:9::77" {
				continue // nothing tells it from one elsewhere
			}
			if own, err := ownedByHost(netip.MustParseAddr(address)); err != nil || own != want {
				t.Errorf("%s: %s: %t, %v", state.what, address, own, err)
			}
		}
	}
	must(netlink.LinkSetDown(out))
	if own, err := ownedByHost(netip.MustParseAddr("9.9.9.9")); err == nil {
		t.Errorf("an address without a route: %t", own)
	}
}

// No rule opens a public address of the host itself: neither by a name, nor by its number, nor
// where requests are read. Addresses beside it are open. The host is not dialled.
func TestOwnAddressesAreRefused(t *testing.T) {
	const reason = "93.184.215.1 is an address of the host itself"
	open := `{version: 1, rules: [{name: all, allow: ["*", 0.0.0.0/0, "::/0", 93.184.215.1], ports: any}]}`
	named := `{version: 1, rules: [{name: web, allow: "*.test", ports: [80, 443, 5432]}]}`
	read := `{version: 1, rules: [{name: read, allow: "*.test", ports: [80, 443], inspect: true}]}`
	for name, tc := range map[string]struct {
		doc, send string
		port      string
		status    int
	}{
		"HTTP, unread":           {open, getFrom("own.test", "/"), "80", 403},
		"other HTTP, unread":     {open, getFrom("own.test", "/"), "8080", 0},
		"TLS, unread":            {open, hello(sni("own.test")), "443", 0},
		"TLS on port 80":         {open, hello(sni("own.test")), "80", 0},
		"HTTP by name":           {named, getFrom("own.test", "/"), "80", 403},
		"TLS by name":            {named, hello(sni("own.test")), "443", 0},
		"another port by name":   {named, "\x00", "5432", 0},
		"HTTP that is read":      {read, getFrom("own.test", "/"), "80", 403},
		"TLS that could be read": {read, hello(sni("own.test")), "443", 0},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, tc.doc)
			w.host("own.test", ownAddr.String())
			w.resolve("own.test", dnsmessage.TypeA)
			var statuses []int
			c, err := w.dialContext(t.Context(), netip.MustParseAddrPort(ownAddr.String()+":"+tc.port))
			if err == nil {
				statuses, err = w.talk(c, tc.send, reason)
			}
			if tc.status > 0 && !slices.Equal(statuses, []int{tc.status}) || tc.status == 0 && (len(statuses) > 0 || !errors.Is(err, syscall.ECONNRESET)) {
				t.Errorf("statuses %v, then %v", statuses, err)
			}
			refused := false
			events := w.all()
			for _, e := range events {
				refused = refused || !e.Allow && (strings.Contains(e.Reason, reason) || tc.doc == read && tc.port == "443")
			}
			if !refused || len(w.dialled) > 0 {
				t.Errorf("dialled %v; %+v", w.dialled, events)
			}
		})
	}
	t.Run("beside it", func(t *testing.T) {
		w := newWorld(t, open)
		w.http("93.184.215.2:80", func(rw http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(rw, "beside") })
		c := w.dial("93.184.215.2:80")
		if p, body := get(t, c, bufio.NewReader(c), "GET", getFrom("x.test", "/")); p.StatusCode != 200 || body != "beside" {
			t.Errorf("%d %q", p.StatusCode, body)
		}
	})
	t.Run("where the kernel does not say", func(t *testing.T) {
		w := newWorld(t, open, func(o *Options, _ *limits) { o.Own = func(netip.Addr) (bool, error) { return false, errNoHost } })
		w.raw("93.184.215.2:5432", func(*net.TCPConn) {})
		if _, reset := w.reset("93.184.215.2:5432"); !reset || len(w.dialled) > 0 {
			t.Errorf("reset %t, dialled %v", reset, w.dialled)
		}
	})
	t.Run("a private one", func(t *testing.T) {
		w := newWorld(t, attacked, func(o *Options, _ *limits) { o.Own = func(netip.Addr) (bool, error) { return true, nil } })
		w.http("10.1.0.5:80", func(rw http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(rw, "private") })
		c := w.dial("10.1.0.5:80")
		if p, body := get(t, c, bufio.NewReader(c), "GET", getFrom("x.test", "/")); p.StatusCode != 200 || body != "private" {
			t.Errorf("%d %q", p.StatusCode, body)
		}
	})
}

// A rule that reads requests within TLS opens no own address either. The client is told the reason.
func TestOwnAddressesAreRefusedWithinTLS(t *testing.T) {
	for name, offered := range protocols {
		t.Run(name, func(t *testing.T) {
			w := newInspected(t, func(o *Options, _ *limits) { o.Own = func(netip.Addr) (bool, error) { return true, nil } })
			p, body := fetch(t, w.trusting(offered...), "GET", "https://api.test/v1/x", nil)
			if p.StatusCode != 403 || !strings.Contains(body, "an address of the host itself") || len(w.dialled) > 0 {
				t.Errorf("%d %q, dialled %v", p.StatusCode, body, w.dialled)
			}
		})
	}
}
