package network

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/share"
	"github.com/sandboxd/sandboxd/netns/gateway"
	"github.com/sandboxd/sandboxd/netns/policy"
	"github.com/sandboxd/sandboxd/runtime"
)

func TestCheckJoin(t *testing.T) {
	long := strings.Repeat("a", 63)
	for name, tt := range map[string]struct {
		join []string
		err  string
	}{
		"one":             {[]string{"front"}, ""},
		"some":            {[]string{"a", "b-1", "x0", long}, ""},
		"too many":        {strings.Split("a b c d e f g h i", " "), "at most 8"},
		"twice":           {[]string{"a", "b", "a"}, "named twice"},
		"none":            {[]string{""}, "letters"},
		"case":            {[]string{"Front"}, ""},
		"a dot":           {[]string{"a.b"}, ""},
		"a trailing dot":  {[]string{"a."}, ""},
		"an underscore":   {[]string{"a_b"}, ""},
		"a slash":         {[]string{"a/b"}, "letters"},
		"a dot first":     {[]string{".a"}, "letters"},
		"a hyphen":        {[]string{"-a"}, "letters"},
		"digits":          {[]string{"127"}, ""},
		"hexadecimal":     {[]string{"0x7f"}, ""},
		"too long":        {[]string{long + "a"}, "letters"},
		"NUL":             {[]string{"a\x00"}, "letters"},
		"the Kelvin sign": {[]string{"\u212a"}, "letters"},
		"internal":        {[]string{"internal"}, ""},
		"localhost":       {[]string{"localhost"}, ""},
		"com":             {[]string{"front", "com"}, ""},
		"org":             {[]string{"org"}, ""},
		"of a country":    {[]string{"de"}, ""},
		"in Chinese":      {[]string{"xn--fiqs8s"}, ""},
		"no domain":       {[]string{"frontend", "db", "prod-2", "test", "app", "dev"}, ""},
	} {
		for _, mode := range []api.NetworkMode{"", api.NetworkNone, api.NetworkFull} {
			got, err := open(t, nil).Check("1002", api.Network{Mode: mode, Join: tt.join})
			switch {
			case tt.err == "" && (err != nil || len(got.Join) != len(tt.join) || !got.HasGateway()):
				t.Errorf("%s: %+v, %v", name, got, err)
			case tt.err != "" && (!errors.Is(err, class.ErrInvalid) || !strings.Contains(err.Error(), tt.err)):
				t.Errorf("%s: %v, want %q", name, err, tt.err)
			}
		}
	}
	// A sandbox without mode has what other modes have: a budget, ports.
	net := api.Network{Join: []string{"a"}, Budget: api.NetworkBudget{Connections: 1}}
	if _, err := open(t, new(policy.Policy)).Check("", net); err != nil {
		t.Errorf("a budget: %v", err)
	}
	if _, err := open(t, nil).CheckPorts("", net, []api.PortMapping{{Port: 80}}); err != nil {
		t.Errorf("ports: %v", err)
	}
	net.Policy = onePublic
	if _, err := open(t, nil).Check("", net); err == nil {
		t.Error("a policy without mode")
	}
}

// stuck is an engine whose sockets are long in coming.
type stuck struct {
	asked   chan string // ids
	release chan struct{}
}

func (*stuck) NetworkSockets(context.Context, string) (*runtime.NetworkSockets, error) {
	return nil, errors.New("it has none")
}

func (s *stuck) NetworkSocket(_ context.Context, id, _ string) (*os.File, error) {
	s.asked <- id
	<-s.release
	return nil, errors.New("no socket")
}

// Connections to peers that are not made yet are bounded: a sandbox beyond its bound is refused at
// once, and neither its tenant's others nor another tenant's notice.
func TestConnectionsToPeersAreBounded(t *testing.T) {
	n := open(t, nil)
	engine := &stuck{asked: make(chan string, 10), release: make(chan struct{})}
	n.opts.Engine = engine
	n.dials = &share.Quota{What: "connections", Sandbox: 2, Tenant: 8, All: 16}
	for _, rec := range []*runtime.Record{record("w", "", "web", "front"), record("d", "", "db", "front"), record("tw", "1002", "web", "front"), record("td", "1002", "db", "front")} {
		n.peers.enter(rec)
	}
	to := func(id string) netip.AddrPort { return netip.AddrPortFrom(n.peers.members[id].addr, 80) }
	refused := func(err error) bool { _, ok := errors.AsType[gateway.Refused](err); return ok }
	ends := make(chan error, 10)
	for _, pair := range [][2]string{{"w", "d"}, {"w", "d"}, {"d", "w"}, {"td", "tw"}} {
		go func() {
			_, _, err := n.dialPeer(t.Context(), pair[0], to(pair[1]))
			ends <- err
		}()
		if id := <-engine.asked; id != pair[1] {
			t.Errorf("%s dials %s", pair[0], id)
		}
	}
	if _, peer, err := n.dialPeer(t.Context(), "w", to("d")); !refused(err) || peer != (gateway.Peer{}) || !strings.Contains(err.Error(), "at most 2") {
		t.Errorf("beyond the bound: %+v, %v", peer, err)
	}
	close(engine.release)
	for range 4 {
		if err := <-ends; err == nil || refused(err) {
			t.Errorf("below the bound: %v", err)
		}
	}
	if _, peer, err := n.dialPeer(t.Context(), "w", to("d")); refused(err) || peer.Name != "db" {
		t.Errorf("afterwards: %+v, %v", peer, err)
	}
	if n.dials.Held() != 0 {
		t.Errorf("%d are held", n.dials.Held())
	}
}

// Of two sandboxes that share no network any more, a connection that is being made is given up
// before the change returns. Those to others are made.
func TestDialsEndWithTheCommonNetwork(t *testing.T) {
	n := open(t, nil)
	engine := &stuck{asked: make(chan string, 10), release: make(chan struct{})}
	n.opts.Engine = engine
	for _, rec := range []*runtime.Record{record("w", "", "web", "front", "back"), record("d", "", "db", "back"), record("c", "", "cache", "front", "back")} {
		n.peers.enter(rec)
	}
	ends := make(map[string]chan error)
	for _, pair := range [][2]string{{"w", "d"}, {"d", "w"}, {"w", "c"}, {"d", "c"}} {
		end := make(chan error, 1)
		ends[pair[0]+pair[1]] = end
		to := netip.AddrPortFrom(n.peers.members[pair[1]].addr, 80)
		go func() {
			_, _, err := n.dialPeer(t.Context(), pair[0], to)
			end <- err
		}()
		<-engine.asked
	}
	left := n.peers.rejoin("w", "web", &api.Network{Join: []string{"front"}})
	if len(left.dials) != 2 || len(left.from) != 1 || left.from[0].id != "d" || left.addr != n.peers.members["w"].addr {
		t.Errorf("left: %+v", left)
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if err := n.separate(gone, "w", left); !errors.Is(err, context.Canceled) {
		t.Errorf("before they have ended: %v", err)
	}
	close(engine.release)
	if err := n.separate(t.Context(), "w", left); err != nil {
		t.Error(err)
	}
	for pair, end := range ends {
		if err := <-end; errors.Is(err, gateway.ErrNoPeer) != (pair == "wd" || pair == "dw") {
			t.Errorf("%s: %v", pair, err)
		}
	}
	if len(n.peers.dialing)+n.dials.Held() > 0 {
		t.Errorf("left: %v, %d", n.peers.dialing, n.dials.Held())
	}
}

// having returns the peer of a sandbox that has an address, its id, and the tenant of both.
func (p *peers) having(id string, addr netip.Addr) (peer gateway.Peer, of share.Owner, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, to, peer, err := p.pair(id, addr)
	if err != nil {
		return peer, share.Owner{}, err
	}
	return peer, share.Owner{Tenant: to.tenant, ID: to.id}, nil
}

func record(id, tenant, name string, networks ...string) *runtime.Record {
	return &runtime.Record{Sandbox: api.Sandbox{ID: id, Name: name, Network: api.Network{Join: networks}}, Tenant: tenant}
}

// crowd has sandboxes of two tenants in networks of the same names.
func crowd() *peers {
	p := new(peers)
	for _, rec := range []*runtime.Record{
		record("w", "", "web", "front", "back"), record("d", "", "db", "back"), record("c", "", "Cache.1", "front"), record("a", "", "alone"),
		record("tw", "1002", "web", "front", "back"), record("td", "1002", "tenants-db", "back"),
	} {
		p.enter(rec)
	}
	return p
}

// A sandbox finds the sandboxes of its tenant in its networks by every form of their names, and
// finds no others.
func TestPeersAreFound(t *testing.T) {
	p := crowd()
	for _, tc := range []struct{ id, name, want string }{
		{"w", "db", "db in back"},
		{"w", "DB", "db in back"},
		{"w", "db.back", "db in back"},
		{"w", "db.back.internal", "db in back"},
		{"w", "db.front", ""},
		{"w", "db.internal", ""},
		{"w", "db.back.back", ""},
		{"w", "back", ""},
		{"w", "back.internal", ""},
		{"w", "web", "web in front"},
		{"w", "web.back", "web in back"},
		{"w", "cache.1.front", "Cache.1 in front"},
		{"w", "cache.front", ""},
		{"w", "alone", ""},
		{"w", "tenants-db", ""},
		{"w", "tenants-db.back", ""},
		{"d", "web", "web in back"},
		{"d", "web.front", ""},
		{"d", "cache.1.front", ""},
		{"c", "db", ""},
		{"c", "db.back", ""},
		{"c", "web", "web in front"},
		{"a", "web", ""},
		{"a", "alone", ""},
		{"tw", "db", ""},
		{"tw", "tenants-db", "tenants-db in back"},
		{"td", "web.back", "web in back"},
		{"nobody", "web", ""},
	} {
		name, err := policy.ParseName(tc.name)
		if err != nil {
			t.Fatal(err)
		}
		got := ""
		peer, err := p.find(tc.id, name)
		if err == nil {
			got = peer.Name + " in " + peer.Network
		}
		if got != tc.want || err != nil && !errors.Is(err, gateway.ErrNoPeer) {
			t.Errorf("%s asks for %s: %q, %v, want %q", tc.id, tc.name, got, err, tc.want)
		}
	}
	// The web of another tenant is not found.
	name, _ := policy.ParseName("web")
	ours, _ := p.find("d", name)
	theirs, _ := p.find("td", name)
	if ours.Addr != theirs.Addr {
		t.Errorf("an address depends on another tenant: %s, %s", ours.Addr, theirs.Addr)
	}
}

// Aliases lead to a sandbox in the network that they are for. Its name comes before aliases of
// others, and the oldest of these before the rest. Nothing is found by a network with dots or
// capitals.
func TestAliases(t *testing.T) {
	p := crowd()
	aka := func(id, name string, aliases ...string) {
		rec := record(id, "", name, "back", "Up", "example.com", "internal", "com", "de")
		rec.Network.Aliases = map[string][]string{"back": aliases, "Up": {"up"}, "example.com": {"www"}}
		p.enter(rec)
	}
	aka("one", "first", "sql", "db", "SQL")
	aka("two", "my_db", "sql", "first")
	for _, tc := range []struct{ id, name, want string }{
		{"w", "sql", "first in back"},
		{"w", "Sql.back.internal", "first in back"},
		{"w", "db", "db in back"},
		{"w", "first", "first in back"},
		{"w", "my_db.back", "my_db in back"},
		{"w", "up", ""},
		{"c", "sql", ""},
		{"td", "sql", ""},
		{"one", "up", "first in Up"},
		{"one", "www", "first in example.com"},
		{"one", "first.up", ""},
		{"one", "www.example.com", ""},
		{"one", "www.example.com.internal", ""},
		{"one", "first.internal", ""},
		{"one", "first.internal.internal", ""},
		{"one", "first.com", ""},
		{"one", "first.de.internal", ""},
	} {
		name, err := policy.ParsePeerName(tc.name)
		if err != nil {
			t.Fatal(err)
		}
		got := ""
		if peer, err := p.find(tc.id, name); err == nil {
			got = peer.Name + " in " + peer.Network
		}
		if got != tc.want {
			t.Errorf("%s asks for %s: %q, want %q", tc.id, tc.name, got, tc.want)
		}
	}
	// A sandbox that joins later has the address of its name, and one that leaves is not found.
	name, _ := policy.ParsePeerName("late")
	p.rejoin("a", "renamed", &api.Network{Join: []string{"back"}, Aliases: map[string][]string{"back": {"late"}}})
	renamed, _ := policy.ParsePeerName("renamed")
	if peer, err := p.find("w", renamed); err != nil || peer.Name != "renamed" {
		t.Errorf("renamed before it joined: %+v, %v", peer, err)
	}
	peer, err := p.find("w", name)
	if _, _, herr := p.having("a", p.members["w"].addr); err != nil || herr != nil || !peer.Addr.IsValid() {
		t.Errorf("joined: %+v, %v, %v", peer, err, herr)
	}
	p.rejoin("a", "renamed", &api.Network{})
	_, err = p.find("w", name)
	if _, _, herr := p.having("w", peer.Addr); !errors.Is(err, gateway.ErrNoPeer) || !errors.Is(herr, gateway.ErrNoPeer) {
		t.Errorf("left: %v, %v", err, herr)
	}
	for _, m := range p.members {
		p.leave(m)
	}
	if len(p.members)+len(p.named)+len(p.at) > 0 {
		t.Errorf("left: %v, %v, %v", p.members, p.named, p.at)
	}
}

// Whatever address a sandbox asks for, it gets a connection to its peers only.
func TestAddressesLeadToPeersOnly(t *testing.T) {
	p := crowd()
	ids := []string{"w", "d", "c", "tw", "td", "a", "nobody"}
	may := map[string]string{"w": "wdc", "d": "wd", "c": "wc", "tw": "twtd", "td": "twtd", "a": "", "nobody": ""}
	for _, from := range ids {
		tenant := ""
		if m := p.members[from]; m != nil {
			tenant = m.tenant
		}
		for at, of := range p.at {
			addr := at.addr
			m := p.at[home{tenant, addr}]
			peer, to, err := p.having(from, addr)
			allowed := m != nil && strings.Contains(may[from], m.id) && strings.HasPrefix(m.id, "t") == strings.HasPrefix(from, "t")
			if allowed != (err == nil) {
				t.Errorf("%s asks for %s, of %s: %+v, %v", from, addr, of.id, peer, err)
			}
			if err == nil && (to != (share.Owner{Tenant: m.tenant, ID: m.id}) || peer.Addr != addr || peer.Name != m.name) {
				t.Errorf("%s asks for %s, of %s: %+v, %s", from, addr, m.id, peer, to)
			}
			if !policy.PeerAddresses.Contains(addr) {
				t.Errorf("%s has the address %s", of.id, addr)
			}
			for _, odd := range []netip.Addr{addr.Next(), addr.Prev(), netip.AddrFrom16(addr.As16()), {}} {
				if _, _, err := p.having(from, odd); p.at[home{tenant, odd}] == nil && !errors.Is(err, gateway.ErrNoPeer) {
					t.Errorf("%s asks for %s: %v", from, odd, err)
				}
			}
		}
	}
}

// A name has its address again, whatever happened to its sandbox. A sandbox that has left is not
// found.
func TestPeersComeAndGo(t *testing.T) {
	p := crowd()
	name, _ := policy.ParseName("db")
	before, err := p.find("w", name)
	if err != nil {
		t.Fatal(err)
	}
	first := p.members["d"]
	if again := p.enter(record("d", "", "db", "back")); again != first {
		t.Error("a sandbox is a member twice")
	}
	p.leave(first)
	p.leave(first) // also by the end of its life
	if _, err := p.find("w", name); !errors.Is(err, gateway.ErrNoPeer) {
		t.Errorf("an ended sandbox is found: %v", err)
	}
	if _, _, err := p.having("w", before.Addr); !errors.Is(err, gateway.ErrNoPeer) {
		t.Errorf("an ended sandbox is reached: %v", err)
	}
	second := p.enter(record("d2", "", "db", "back"))
	p.leave(first) // late
	if after, err := p.find("w", name); err != nil || after != before {
		t.Errorf("created anew: %+v, %v, want %+v", after, err, before)
	}
	// Of two names that differ in case the older is found, and then the other.
	upper := p.enter(record("d3", "", "DB", "back"))
	if peer, _ := p.find("w", name); peer.Name != "db" || upper.addr == second.addr {
		t.Errorf("%+v, and %s", peer, upper.addr)
	}
	p.leave(second)
	if peer, _ := p.find("w", name); peer.Name != "DB" || peer.Addr != upper.addr {
		t.Errorf("%+v, want DB at %s", peer, upper.addr)
	}
	for _, m := range p.members {
		p.leave(m)
	}
	if len(p.members)+len(p.named)+len(p.at) > 0 {
		t.Errorf("left: %v, %v, %v", p.members, p.named, p.at)
	}
}

// The same sandboxes have the same addresses in the next daemon, and all have different ones.
func TestAddressesOfPeersAreStable(t *testing.T) {
	one, two := new(peers), new(peers)
	for i := range 2000 {
		rec := record(fmt.Sprint(i), "", fmt.Sprintf("box-%d", i), "all")
		a, b := one.enter(rec).addr, two.enter(rec).addr
		if a != b || !policy.PeerAddresses.Contains(a) {
			t.Fatalf("%s and %s", a, b)
		}
	}
	if len(one.at) != 2000 {
		t.Errorf("2000 sandboxes have %d addresses", len(one.at))
	}
}

// Expected sandboxes are members until they are missed.
func TestExpectedSandboxes(t *testing.T) {
	n := open(t, nil)
	n.Expect([]runtime.Record{*record("w", "", "web", "front"), *record("d", "", "db", "front"), *record("x", "", "none")})
	name, _ := policy.ParseName("db")
	if _, err := n.peers.find("w", name); err != nil {
		t.Error(err)
	}
	n.Miss("d")
	n.Miss("x")
	n.Miss("nobody")
	if _, err := n.peers.find("w", name); err == nil {
		t.Error("a sandbox that was missed is found")
	}
	n.lives["w"] = new(life)
	n.Miss("w")
	if n.peers.members["w"] == nil {
		t.Error("a sandbox that was started again is missed")
	}
	delete(n.lives, "w")
}

// No name leads out of a sandbox's networks.
func FuzzFind(f *testing.F) {
	for _, s := range []string{"web", "db.back", "cache.1.front.internal", "WEB.front", "a.b.c", "web.internal"} {
		f.Add("w", s)
		f.Add("td", s)
	}
	f.Fuzz(func(t *testing.T, id, text string) {
		name, err := policy.ParsePeerName(text)
		if err != nil {
			return
		}
		p := crowd()
		peer, err := p.find(id, name)
		if err != nil {
			return
		}
		if _, _, err := p.having(id, peer.Addr); err != nil {
			t.Errorf("%s finds %+v as %s, and may not reach it", id, peer, name)
		}
		if short, _, _ := strings.Cut(name.String(), "."+peer.Network); !strings.EqualFold(short, peer.Name) && !strings.EqualFold(name.String(), peer.Name) {
			t.Errorf("%s leads to %s", name, peer.Name)
		}
	})
}
