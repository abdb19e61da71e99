package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/sandboxd/sandboxd/netns/policy"
)

const (
	webAddr  = "198.18.3.4"
	deadAddr = "198.18.3.5"
	fullAddr = "198.18.3.6"
	alsoAddr = "198.18.3.7"
	goneAddr = "198.19.255.254"
)

// asks are the names and addresses that peers were asked about.
type asks struct {
	mu  sync.Mutex // guards all
	all []string
}

func (a *asks) add(what fmt.Stringer) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.all = append(a.all, what.String())
}

func (a *asks) take() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.all
}

// joined puts the sandbox of a world into two named networks, with a peer web whose server echoes,
// and a peer dead, on which nothing listens.
func joined(t *testing.T, doc string, change ...func(*Options, *limits)) (*world, *asks) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	wait := acceptAll(l, echoServer)
	t.Cleanup(func() { // the network is closed before, which ends the connections
		_ = l.Close()
		wait()
	})
	asked := new(asks)
	all := []Peer{{"web", "front", netip.MustParseAddr(webAddr)}, {"Dead_1", "back", netip.MustParseAddr(deadAddr)}, {"also", "back", netip.MustParseAddr(alsoAddr)}}
	peers := &Peers{
		Networks: []string{"front", "back", "sandboxd"},
		Find: func(_ context.Context, name policy.Name) (Peer, error) {
			asked.add(name)
			switch name.String() {
			case "web", "web.front", "web.front.internal", "web.shop.front":
				return all[0], nil
			case "dead_1", "dead_1.back":
				return all[1], nil
			case "broken":
				return Peer{}, errors.New("the daemon is broken")
			}
			return Peer{}, ErrNoPeer
		},
		Dial: func(_ context.Context, addr netip.AddrPort) (*net.TCPConn, Peer, error) {
			asked.add(addr)
			switch addr.Addr().String() {
			case webAddr, alsoAddr:
				peer := all[0]
				if addr.Addr() == all[2].Addr {
					peer = all[2]
				}
				c, err := net.Dial("tcp", l.Addr().String())
				if err != nil {
					return nil, peer, err
				}
				return c.(*net.TCPConn), peer, nil
			case deadAddr:
				return nil, all[1], errors.New("connection refused")
			case fullAddr:
				return nil, Peer{}, Refused("too many at once")
			}
			return nil, Peer{}, ErrNoPeer
		},
	}
	w := newWorld(t, doc, append([]func(*Options, *limits){func(o *Options, _ *limits) { o.Peers = peers }}, change...)...)
	w.host("public.test", "93.184.215.14")
	w.host("host.front.internal", "93.184.215.14")
	return w, asked
}

const joinedPolicy = "version: 1\nrules:\n- {name: ours, allow: [public.test, intranet, front]}\n- {name: range, allow: 198.18.0.0/15, ports: any}\n- {name: no, deny: [web, 198.18.3.4/32], ports: any}\n"

// Peers.Find answers names of peers, also where the policy denies them. The policy answers all
// others. Find is asked only about names that have a form of the names of peers.
func TestPeersAreResolved(t *testing.T) {
	w, asked := joined(t, joinedPolicy)
	w.host("intranet", "93.184.215.16")
	w.host("front", "93.184.215.17")
	for _, tc := range []struct {
		name  string
		typ   dnsmessage.Type
		code  dnsmessage.RCode
		addrs string
	}{
		{"web", dnsmessage.TypeA, dnsmessage.RCodeSuccess, "[198.18.3.4]"},
		{"WEB", dnsmessage.TypeA, dnsmessage.RCodeSuccess, "[198.18.3.4]"},
		{"web.front", dnsmessage.TypeA, dnsmessage.RCodeSuccess, "[198.18.3.4]"},
		{"Web.Front.INTERNAL", dnsmessage.TypeA, dnsmessage.RCodeSuccess, "[198.18.3.4]"},
		{"web.shop.front", dnsmessage.TypeA, dnsmessage.RCodeSuccess, "[198.18.3.4]"},
		{"web", dnsmessage.TypeAAAA, dnsmessage.RCodeSuccess, "[]"},
		{"web", 65, dnsmessage.RCodeSuccess, "[]"},
		{"web", dnsmessage.TypeALL, dnsmessage.RCodeNotImplemented, "[]"},
		{"broken", dnsmessage.TypeA, dnsmessage.RCodeServerFailure, "[]"},
		{"other", dnsmessage.TypeA, dnsmessage.RCodeNameError, "[]"},
		{"web.back", dnsmessage.TypeA, dnsmessage.RCodeNameError, "[]"},
		{"intranet", dnsmessage.TypeA, dnsmessage.RCodeSuccess, "[93.184.215.16]"},
		{"front", dnsmessage.TypeA, dnsmessage.RCodeSuccess, "[93.184.215.17]"},
		{"public.test", dnsmessage.TypeA, dnsmessage.RCodeSuccess, "[93.184.215.14]"},
		{"web.side", dnsmessage.TypeA, dnsmessage.RCodeNameError, "[]"},
		{"web.internal", dnsmessage.TypeA, dnsmessage.RCodeNameError, "[]"},
		{"webfront", dnsmessage.TypeA, dnsmessage.RCodeNameError, "[]"},
		{"web_1", dnsmessage.TypeA, dnsmessage.RCodeNameError, "[]"},
		{"Dead_1", dnsmessage.TypeA, dnsmessage.RCodeSuccess, "[198.18.3.5]"},
		{"dead_1.back", dnsmessage.TypeA, dnsmessage.RCodeSuccess, "[198.18.3.5]"},
		{"my_name.public.test", dnsmessage.TypeA, dnsmessage.RCodeNameError, "[]"},
		{"198.18.3.4", dnsmessage.TypeA, dnsmessage.RCodeNameError, "[]"},
		{"0xc6120304", dnsmessage.TypeA, dnsmessage.RCodeNameError, "[]"},
		{"host.sandboxd.internal", dnsmessage.TypeA, dnsmessage.RCodeNameError, "[]"},
	} {
		r := w.exchange(question1(t, tc.name, tc.typ, true))
		if r.RCode != tc.code || fmt.Sprint(addresses(r)) != tc.addrs {
			t.Errorf("%s %s: %s %v", tc.name, tc.typ, r.RCode, addresses(r))
		}
		if len(r.Answers) == 1 && strings.HasPrefix(tc.addrs, "[198.18") && r.Answers[0].Header.TTL != 5 {
			t.Errorf("%s: lives for %d s", tc.name, r.Answers[0].Header.TTL)
		}
	}
	want := "[web web web.front web.front.internal web.shop.front web web web broken other web.back intranet front webfront web_1 dead_1 dead_1.back]"
	if got := fmt.Sprint(asked.take()); got != want {
		t.Errorf("asked for\n%s, want\n%s", got, want)
	}
	for _, e := range w.all() {
		if strings.HasPrefix(e.Name, "web.front") || e.Name == "web" {
			t.Errorf("the name of a peer left the gateway: %+v", e)
		}
	}
	for _, a := range w.asked {
		if strings.Contains(a, "web") {
			t.Errorf("the host's resolver was asked for %s", a)
		}
	}
}

// Without a named network no name and no address belongs to a peer.
func TestNoPeersWithoutANetwork(t *testing.T) {
	w := newWorld(t, joinedPolicy)
	w.host("web", "93.184.215.14")
	if code, addrs := w.resolve("web", dnsmessage.TypeA); code != dnsmessage.RCodeNameError || len(addrs) != 0 {
		t.Errorf("%v, %v", code, addrs)
	}
	w.raw("198.18.9.9:7000", echoServer)
	c := w.dial("198.18.9.9:7000")
	if err := talk(c, "by the policy's rule"); err != nil {
		t.Error(err)
	}
}

// A sandbox that may join networks asks for nothing until it does, and after it has left the last.
func TestNetworksAreJoinedLater(t *testing.T) {
	w, asked := joined(t, joinedPolicy, func(o *Options, _ *limits) { o.Peers.Networks = nil })
	w.raw("198.18.9.9:7000", echoServer)
	for _, step := range []struct {
		networks []string
		code     dnsmessage.RCode
		asked    string
	}{
		{nil, dnsmessage.RCodeNameError, "[]"},
		{[]string{"front"}, dnsmessage.RCodeSuccess, "[web web.front]"},
		{nil, dnsmessage.RCodeNameError, "[web web.front]"},
	} {
		w.n.SetNetworks(step.networks)
		for _, name := range []string{"web", "web.front"} {
			if code, _ := w.resolve(name, dnsmessage.TypeA); code != step.code {
				t.Errorf("in %q: %s: %v, want %v", step.networks, name, code, step.code)
			}
		}
		if got := fmt.Sprint(asked.take()); got != step.asked {
			t.Errorf("in %q: asked for %s, want %s", step.networks, got, step.asked)
		}
		if len(step.networks) > 0 {
			continue
		}
		if err := talk(w.dial("198.18.9.9:7000"), "by the policy's rule"); err != nil {
			t.Errorf("in no network: %v", err)
		}
	}
}

// A name with an underscore that no peer has is asked of nothing else, whatever the policy allows.
func TestUnderscoresAreOfPeersOnly(t *testing.T) {
	w, _ := joined(t, "version: 1\nrules:\n- allow: ['*.front']\n")
	for _, name := range []string{"other.front", "no_peer.front"} {
		w.host(name, "93.184.215.14")
	}
	if code, addrs := w.resolve("other.front", dnsmessage.TypeA); code != dnsmessage.RCodeSuccess || len(addrs) != 1 {
		t.Errorf("a name that the policy allows: %v, %v", code, addrs)
	}
	if code, addrs := w.resolve("no_peer.front", dnsmessage.TypeA); code != dnsmessage.RCodeNameError || len(addrs) != 0 {
		t.Errorf("a name with an underscore: %v, %v", code, addrs)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, a := range w.asked {
		if strings.Contains(a, "_") {
			t.Errorf("the host's resolver was asked for %s", a)
		}
	}
}

// talk sends a text and reads it back.
func talk(c *net.TCPConn, text string) error {
	if _, err := io.WriteString(c, text); err != nil {
		return err
	}
	got := make([]byte, len(text))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != text {
		return fmt.Errorf("%q came back: %w", got, err)
	}
	return nil
}

// Connections to peers pass whatever the policy says, unread, and are recorded with their network.
// A change of the policy leaves them.
func TestPeersAreReached(t *testing.T) {
	for name, doc := range map[string]string{"no rules": "version: 1\nrules: []\n", "rules for the range": joinedPolicy} {
		t.Run(name, func(t *testing.T) {
			w, _ := joined(t, doc)
			web := w.dial(webAddr + ":80")
			if err := talk(web, "GET / HTTP/1.1\r\nHost: public.test\r\nHost: other\r\n\r\n"); err != nil {
				t.Error(err)
			}
			w.n.SetPolicy(new(policy.Policy))
			if err := talk(web, "more"); err != nil {
				t.Errorf("after a change of the policy: %v", err)
			}
			if err := web.CloseWrite(); err != nil {
				t.Error(err)
			}
			if rest, reset := wasReset(web); len(rest) > 0 || reset {
				t.Errorf("the end: %q, reset %t", rest, reset)
			}
			e := w.event()
			if e.Rule != "network front" || e.Name != "web" || !e.Allow || e.Addr.String() != webAddr || e.Port != 80 || e.Out != 54 || e.In != 54 || e.Reason != "" {
				t.Errorf("recorded: %+v", e)
			}
			if _, reset := w.reset(deadAddr + ":7000"); !reset {
				t.Error("a peer without a server does not reset")
			}
			if e := w.event(); e.Rule != "network back" || e.Name != "" || !e.Allow || !strings.Contains(e.Reason, "connect to Dead_1 port 7000: connection refused") {
				t.Errorf("recorded: %+v", e)
			}
			for at, reason := range map[string]string{
				goneAddr + ":7000": ErrNoPeer.Error(), "198.18.0.0:1": ErrNoPeer.Error(), "198.18.3.3:443": ErrNoPeer.Error(), fullAddr + ":7000": "too many at once",
			} {
				if _, reset := w.reset(at); !reset {
					t.Errorf("%s: not reset", at)
				}
				if e := w.event(); e.Rule != "" || e.Allow || e.Reason != reason {
					t.Errorf("%s: recorded: %+v", at, e)
				}
			}
			if len(w.dialled) > 0 {
				t.Errorf("the gateway itself has dialled %v", w.dialled)
			}
			if _, reset := w.reset("198.20.0.1:7000"); !reset {
				t.Error("an address behind the range does not reset")
			}
		})
	}
}

// Connections to a peer are reset, and those that are being made, before ResetPeers returns. Others
// go on: those to another peer, and those that a policy allows to such an address.
func TestPeersAreReset(t *testing.T) {
	asked, made := make(chan struct{}), make(chan *net.TCPConn)
	w, _ := joined(t, joinedPolicy, func(o *Options, _ *limits) {
		dial := o.Peers.Dial
		o.Peers.Dial = func(ctx context.Context, addr netip.AddrPort) (*net.TCPConn, Peer, error) {
			c, peer, err := dial(ctx, addr)
			if addr.Port() == 7001 { // a reply that comes when the flow has ended already
				close(asked)
				<-ctx.Done()
				made <- c
			}
			return c, peer, err
		}
	})
	web, also := w.dial(webAddr+":7000"), w.dial(alsoAddr+":7000")
	for _, c := range []*net.TCPConn{web, also} {
		if err := talk(c, "before"); err != nil {
			t.Fatal(err)
		}
	}
	w.n.SetNetworks(nil)
	w.raw("198.18.9.9:7000", echoServer)
	ruled := w.dial("198.18.9.9:7000")
	if err := talk(ruled, "by the policy's rule"); err != nil {
		t.Fatal(err)
	}
	w.n.SetNetworks([]string{"front", "back"})
	pending := w.dial(webAddr + ":7001")
	<-asked
	late := make(chan *net.TCPConn, 1)
	go func() { late <- <-made }()
	w.n.ResetPeers([]netip.Addr{netip.MustParseAddr(webAddr), netip.MustParseAddr("198.18.9.9"), netip.MustParseAddr(goneAddr)})
	if left := len(w.n.all()); left != 2 {
		t.Fatalf("%d connections are left, want 2", left)
	}
	if _, err := (<-late).Write([]byte("x")); !errors.Is(err, net.ErrClosed) {
		t.Errorf("a connection that was made meanwhile is open: %v", err)
	}
	for name, c := range map[string]*net.TCPConn{"open": web, "pending": pending} {
		if rest, reset := wasReset(c); len(rest) > 0 || !reset {
			t.Errorf("%s: %q, reset %t", name, rest, reset)
		}
	}
	for range 2 {
		if e := w.event(); e.Name != "web" && e.Name != "" || !e.Allow || e.Reason != errSeparated.Error() {
			t.Errorf("recorded: %+v", e)
		}
	}
	for _, c := range []*net.TCPConn{also, ruled} {
		if err := talk(c, "after"); err != nil {
			t.Errorf("another connection: %v", err)
		}
	}
	if err := talk(w.dial(webAddr+":7000"), "together again"); err != nil {
		t.Error(err)
	}
}

// Budgets count connections to peers, their hosts and bytes.
func TestBudgetsOfPeers(t *testing.T) {
	for name, tc := range map[string]struct {
		budget Budget
		reason string
	}{
		"connections": {Budget{Connections: 1}, "1 connections is used up"},
		"hosts":       {Budget{Hosts: 1}, "1 hosts is used up"},
		"bytes out":   {Budget{BytesOut: 4}, "4 bytes out is used up"},
		"bytes in":    {Budget{BytesIn: 4}, "4 bytes in is used up"},
	} {
		t.Run(name, func(t *testing.T) {
			w, asked := joined(t, "version: 1\nrules: []\n", func(o *Options, _ *limits) { o.Budget = tc.budget })
			c := w.dial(webAddr + ":7000")
			if err := talk(c, "4444"); err != nil {
				t.Fatal(err)
			}
			if strings.HasPrefix(name, "bytes") {
				if err := talk(c, "x"); err == nil {
					t.Error("passed beyond the budget")
				}
			} else if _, reset := w.reset(deadAddr + ":7000"); !reset {
				t.Error("connected beyond the budget")
			}
			if e := w.event(); e.Allow || !strings.Contains(e.Reason, tc.reason) {
				t.Errorf("recorded: %+v", e)
			}
			if all := asked.take(); len(all) > 1 {
				t.Errorf("asked for %v", all)
			}
		})
	}
}

// A peer counts once in the budget of hosts, also where the gateway is restarted.
func TestPeersCountOnceAfterARestart(t *testing.T) {
	var spent Spent
	for life := range 2 {
		w, _ := joined(t, "version: 1\nrules: []\n", func(o *Options, _ *limits) { o.Budget, o.Spent = Budget{Hosts: 1}, spent })
		c := w.dial(webAddr + ":7000")
		if err := talk(c, "4444"); err != nil {
			t.Fatalf("life %d: %v", life, err)
		}
		_ = c.Close()
		e := w.event()
		if e.Spent == nil || e.Spent.Hosts != 1 {
			t.Fatalf("life %d: %+v", life, e)
		}
		spent = *e.Spent
	}
}
