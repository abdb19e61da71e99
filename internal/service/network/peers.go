package network

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/egress"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/share"
	"github.com/sandboxd/sandboxd/netns"
	"github.com/sandboxd/sandboxd/netns/gateway"
	"github.com/sandboxd/sandboxd/netns/policy"
	"github.com/sandboxd/sandboxd/runtime"
)

// maxAliases bounds the aliases of one sandbox in one network.
const maxAliases = 16

// checkJoin checks the named networks that a request asks for, and the aliases in them.
func checkJoin(net *api.Network) error {
	if len(net.Join) > egress.MaxJoined {
		return class.Invalidf("network join: there are %d networks, at most %d are possible", len(net.Join), egress.MaxJoined)
	}
	for i, name := range net.Join {
		if err := CheckName(name); err != nil {
			return fmt.Errorf("network join: %w", err)
		}
		if slices.Contains(net.Join[:i], name) {
			return class.Invalidf("network join %q: it is named twice", name)
		}
	}
	for name, aliases := range net.Aliases {
		if !slices.Contains(net.Join, name) {
			return class.Invalidf("network aliases: the sandbox is not in network %q", class.Clip(name))
		}
		if len(aliases) > maxAliases {
			return class.Invalidf("network aliases: there are %d in network %s, at most %d are possible", len(aliases), name, maxAliases)
		}
		for _, alias := range aliases {
			if label, err := policy.ParsePeerName(alias); err != nil || strings.Contains(label.String(), ".") {
				return class.Invalidf("network alias %q: an alias has up to 63 letters, digits, inner hyphens and underscores, and not digits alone", class.Clip(alias))
			}
		}
	}
	return nil
}

// peers are the running sandboxes that are in named networks. The zero value has none.
type peers struct {
	mu      sync.Mutex // guards those below
	members map[string]*member
	named   map[place][]*member // in the order of their entry
	at      map[home]*member
	dialing map[*dialing]struct{}
}

// dialing is a connection of one member to another that is being made.
type dialing struct {
	from, to *member
	cancel   context.CancelFunc
	done     chan struct{} // closed when it is made or given up
	left     bool          // they share no network any more; needs peers.mu
}

// separated are the members that share no network with another one any more, as they are now.
type separated struct {
	addr  netip.Addr // of that one
	from  []member
	dials []*dialing // between them, cancelled
}

// A member is a running sandbox that is in named networks, or may join some.
type member struct {
	id, tenant string

	// These need peers.mu.
	name     string
	networks []string
	aliases  map[string][]string // by network
	addr     netip.Addr          // zero if it is in no network, or none was left
}

// A home is an address of a tenant. Those of different tenants are independent of each other: a
// tenant that gets another address than its own sandboxes explain would learn of others.
type home struct {
	tenant string
	addr   netip.Addr
}

// A place is a name in a named network. Names that differ in case only share one: DNS does not tell
// them apart.
type place struct{ tenant, network, name string }

// places returns the places of a member, each once.
func (m *member) places() (all []place) {
	for _, network := range m.networks {
		for _, name := range append([]string{m.name}, m.aliases[network]...) {
			if at := (place{m.tenant, network, strings.ToLower(name)}); !slices.Contains(all, at) {
				all = append(all, at)
			}
		}
	}
	return all
}

// enter makes a running sandbox a member of the named networks of its record.
func (p *peers) enter(rec *runtime.Record) *member {
	p.mu.Lock()
	defer p.mu.Unlock()
	if m := p.members[rec.ID]; m != nil { // expected, with a record that may be older
		p.put(m, rec.Name, &rec.Network)
		return m
	}
	if p.members == nil {
		p.members, p.named, p.at = make(map[string]*member), make(map[place][]*member), make(map[home]*member)
	}
	m := &member{id: rec.ID, tenant: rec.Tenant}
	p.members[m.id] = m
	p.put(m, rec.Name, &rec.Network)
	return m
}

// put puts a member into the named networks that it is to be in, and out of all others. It keeps
// its address, and its turn in those that it stays in. Its name changes only while it is in none.
// The caller holds mu.
func (p *peers) put(m *member, name string, net *api.Network) {
	before := m.places()
	m.name, m.networks, m.aliases = name, net.Join, net.Aliases
	after := m.places()
	for _, at := range before {
		if !slices.Contains(after, at) {
			p.clear(at, m)
		}
	}
	for _, at := range after {
		if !slices.Contains(before, at) {
			p.named[at] = append(p.named[at], m)
		}
	}
	if len(m.networks) > 0 && !m.addr.IsValid() {
		if m.addr = p.address(m); m.addr.IsValid() {
			p.at[home{m.tenant, m.addr}] = m
		}
	}
}

// clear takes a member out of a place. The caller holds mu.
func (p *peers) clear(at place, m *member) {
	if rest := slices.DeleteFunc(p.named[at], func(o *member) bool { return o == m }); len(rest) > 0 {
		p.named[at] = rest
	} else {
		delete(p.named, at)
	}
}

// rejoin puts a running sandbox into other named networks, and returns the members that it leaves.
func (p *peers) rejoin(id, name string, net *api.Network) (left separated) {
	p.mu.Lock()
	defer p.mu.Unlock()
	m := p.members[id]
	if m == nil {
		return left
	}
	was := *m
	p.put(m, name, net)
	left.addr = m.addr
	for _, o := range p.members {
		if o != m && was.shares(o) && !m.shares(o) {
			left.from = append(left.from, *o)
		}
	}
	for d := range p.dialing {
		if (d.from == m || d.to == m) && !d.from.shares(d.to) {
			d.left = true
			d.cancel()
			left.dials = append(left.dials, d)
		}
	}
	return left
}

// shares reports whether two members are in a common network. The caller holds mu.
func (m *member) shares(o *member) bool {
	return m.tenant == o.tenant && slices.ContainsFunc(m.networks, func(n string) bool { return slices.Contains(o.networks, n) })
}

// address returns an address that no other sandbox of the tenant has. It depends on the name, so
// that a sandbox that is started again, after a restart of the daemon too, or created anew under
// its name, has it again unless another one has taken it.
func (p *peers) address(m *member) netip.Addr {
	const hosts = 1<<17 - 2 // without the first and the last of the range
	first := policy.PeerAddresses.Addr().As4()
	h := fnv.New32a()
	_, _ = h.Write([]byte(strings.ToLower(m.name))) // it never fails
	for i := range uint32(hosts) {
		var a [4]byte
		binary.BigEndian.PutUint32(a[:], binary.BigEndian.Uint32(first[:])+1+(h.Sum32()%hosts+i)%hosts)
		if addr := netip.AddrFrom4(a); p.at[home{m.tenant, addr}] == nil {
			return addr
		}
	}
	return netip.Addr{}
}

// leave ends a membership, if it has not ended yet.
func (p *peers) leave(m *member) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if m == nil || p.members[m.id] != m {
		return
	}
	delete(p.members, m.id)
	delete(p.at, home{m.tenant, m.addr})
	for _, at := range m.places() {
		p.clear(at, m)
	}
}

// find returns the peer of a sandbox that has a name: NAME, NAME.NETWORK or NAME.NETWORK.internal.
// The name of a sandbox comes before aliases of others, and of these the one that joined first.
func (p *peers) find(id string, name policy.Name) (gateway.Peer, error) {
	rest, internal := strings.CutSuffix(name.String(), ".internal")
	p.mu.Lock()
	defer p.mu.Unlock()
	m := p.members[id]
	if m == nil {
		return gateway.Peer{}, gateway.ErrNoPeer
	}
	for _, network := range m.networks {
		short, qualified := strings.CutSuffix(rest, "."+network)
		if qualified && !qualifies(network) || !qualified && (internal || strings.Contains(rest, ".")) {
			continue
		}
		all := p.named[place{m.tenant, network, short}]
		own := slices.IndexFunc(all, func(o *member) bool { return strings.EqualFold(o.name, short) })
		if len(all) == 0 {
			continue
		}
		if to := all[max(own, 0)]; to.addr.IsValid() {
			return gateway.Peer{Name: to.name, Network: network, Addr: to.addr}, nil
		}
	}
	return gateway.Peer{}, gateway.ErrNoPeer
}

// pair returns the member with an id and the one with an address, which share a network. The caller
// holds mu.
func (p *peers) pair(id string, addr netip.Addr) (from, to *member, peer gateway.Peer, err error) {
	if from = p.members[id]; from == nil {
		return nil, nil, gateway.Peer{}, gateway.ErrNoPeer
	}
	if to = p.at[home{from.tenant, addr}]; to == nil {
		return nil, nil, gateway.Peer{}, gateway.ErrNoPeer
	}
	for _, network := range from.networks {
		if slices.Contains(to.networks, network) {
			return from, to, gateway.Peer{Name: to.name, Network: network, Addr: addr}, nil
		}
	}
	return nil, nil, gateway.Peer{}, gateway.ErrNoPeer
}

// beginDial registers a connection of a sandbox to the peer with an address, which is about to be
// made. The context ends also when the two share no network any more. [peers.endDial] follows.
func (p *peers) beginDial(ctx context.Context, id string, addr netip.Addr) (context.Context, *dialing, gateway.Peer, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	from, to, peer, err := p.pair(id, addr)
	if err != nil {
		return nil, nil, peer, err
	}
	d := &dialing{from: from, to: to, done: make(chan struct{})}
	ctx, d.cancel = context.WithCancel(ctx)
	if p.dialing == nil {
		p.dialing = make(map[*dialing]struct{})
	}
	p.dialing[d] = struct{}{}
	return ctx, d, peer, nil
}

// endDial reports whether the two share no network any more. If they do, a later change of that
// finds the connection at the gateway.
func (p *peers) endDial(d *dialing) (left bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.dialing, d)
	d.cancel()
	return d.left
}

// dialQuota bounds the connections to peers and to sockets of the host that are not made yet. Each
// may take the whole time of a dial: a server that accepts nothing lets them wait. A gateway of
// ours has at most 32 of each kind of a sandbox under way; one that was replaced may have as many
// beside.
func dialQuota() *share.Quota {
	return &share.Quota{What: "connections to others that are not made yet", Sandbox: 128, Tenant: 512, All: 1024}
}

// dialPeer implements [egress.Peers.Dial]. Servers on the loopback of the peer stay its own. Beyond
// the quota it refuses at once: a sandbox must not wait behind others.
func (n *Networks) dialPeer(ctx context.Context, id string, to netip.AddrPort) (*net.TCPConn, gateway.Peer, error) {
	ctx, d, peer, err := n.peers.beginDial(ctx, id, to.Addr())
	if err != nil {
		return nil, peer, err
	}
	defer close(d.done)
	from := share.Owner{Tenant: d.from.tenant, ID: id}
	if err := n.dials.Take(from, 1); err != nil {
		n.peers.endDial(d)
		return nil, gateway.Peer{}, gateway.Refused(err.Error())
	}
	defer n.dials.Give(from, 1)
	c, err := dial[*net.TCPConn](ctx, n.opts.Engine, d.to.id, "tcp", to.Port(), netns.ConnectOwn)
	if n.peers.endDial(d) {
		if c != nil {
			_ = c.SetLinger(0) // it is reset, as those are that the gateway has
			_ = c.Close()
		}
		return nil, gateway.Peer{}, gateway.ErrNoPeer
	}
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		err = errno // the record names peer and port itself
	}
	n.recordPeer(id, d.to.id, peer.Network, to.Port(), err)
	return c, peer, err
}

// recordPeer records a connection of a sandbox, or an attempt, in the flows of the one that it
// leads to. The daemon has made it, so that no gateway can invent or hide it.
func (n *Networks) recordPeer(from, to, network string, port uint16, failure error) {
	f := api.Flow{Time: time.Now().UTC(), Kind: api.FlowPeer, Protocol: "tcp", Port: port, Allow: true, Rule: policy.PeerRule(network), Address: n.Address(from)}
	n.peers.mu.Lock()
	if m := n.peers.members[from]; m != nil {
		f.Name = m.name
	}
	n.peers.mu.Unlock()
	if failure != nil {
		f.Reason = failure.Error()
	}
	n.mu.Lock()
	l := n.logs[to]
	n.mu.Unlock()
	if l == nil { // it was deleted meanwhile
		return
	}
	if err := l.appendPeer(f); err != nil {
		n.opts.Log.Warn("flows of a sandbox are not on disk", "id", to, "error", err)
	}
}

// Address returns the address that a sandbox has in its named networks; empty if it does not run,
// is in none, or no address was left.
func (n *Networks) Address(id string) string {
	n.peers.mu.Lock()
	defer n.peers.mu.Unlock()
	if m := n.peers.members[id]; m != nil && m.addr.IsValid() {
		return m.addr.String()
	}
	return ""
}

// Expect makes sandboxes that run when the daemon starts members of their named networks.
// [Networks.Connect] or [Networks.Miss] follows for each.
func (n *Networks) Expect(running []runtime.Record) {
	for i := range running {
		n.peers.enter(&running[i])
	}
}

// Miss ends the membership of an expected sandbox that has ended before Connect.
func (n *Networks) Miss(id string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.lives[id] != nil { // it was started again meanwhile
		return
	}
	n.peers.mu.Lock()
	m := n.peers.members[id]
	n.peers.mu.Unlock()
	n.peers.leave(m)
}
