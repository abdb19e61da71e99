package gateway

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/sandboxd/sandboxd/netns/policy"
)

// A Peer is another sandbox that shares a named network with this one.
type Peer struct {
	Name    string     // of the sandbox
	Network string     // of both
	Addr    netip.Addr // of [policy.PeerAddresses]
}

// ErrNoPeer is the error of a name or address that is of no running sandbox in a common network.
var ErrNoPeer = errors.New("no running sandbox of a common network has this address")

// Refused is the error of a connection to a peer that a bound refuses: the reason.
type Refused string

func (r Refused) Error() string { return string(r) }

// Peers are the other sandboxes that a network reaches by name. Membership decides, which the
// caller knows; the policy is not asked. The gateway keeps nothing about them.
type Peers struct {
	// Networks are the names of the named networks that the sandbox is in; [Network.SetNetworks]
	// replaces them. While there are none, nothing is asked.
	Networks []string
	// Find returns the peer with a name, or ErrNoPeer. It is asked about names of the forms NAME,
	// NAME.NETWORK and NAME.NETWORK.internal only, which may have underscores.
	Find func(ctx context.Context, name policy.Name) (Peer, error)
	// Dial connects to the peer with an address, or returns ErrNoPeer or Refused. The peer is valid
	// with every other error too.
	Dial func(ctx context.Context, addr netip.AddrPort) (*net.TCPConn, Peer, error)
}

// SetNetworks replaces the named networks that the sandbox is in. Connections go on.
func (n *Network) SetNetworks(names []string) { n.joined.Store(&names) }

// errSeparated ends connections to peers with which the sandbox shares no network any more.
var errSeparated = errors.New("the sandboxes share no network any more")

// ResetPeers resets the connections to the peers with these addresses, also those that are being
// made, and returns when they have ended. The caller has seen to it that Peers.Dial refuses further
// ones. Connections that a policy allows to such an address go on.
func (n *Network) ResetPeers(peers []netip.Addr) {
	var ending []*flow
	for _, f := range n.all() {
		if f.toPeer.Load() && slices.Contains(peers, f.dst.Addr()) {
			f.abort(errSeparated)
			ending = append(ending, f)
		}
	}
	for _, f := range ending {
		f.running.Wait()
	}
}

// inNetworks returns the named networks that the sandbox is in.
func (n *Network) inNetworks() []string {
	if all := n.joined.Load(); all != nil && n.opts.Peers != nil {
		return *all
	}
	return nil
}

// mayBePeer reports whether a name has a form of the names of peers. The daemon is asked about no
// other.
func (n *Network) mayBePeer(name policy.Name) bool {
	networks := n.inNetworks()
	if len(networks) == 0 || name == hostName {
		return false
	}
	rest, internal := strings.CutSuffix(name.String(), ".internal")
	if !internal && !strings.Contains(rest, ".") {
		return true
	}
	for _, network := range networks {
		if strings.HasSuffix(rest, "."+network) {
			return true
		}
	}
	return false
}

// answerPeer answers a question about a name that a peer may have. Names of no peer go on to the
// policy. It runs in a place of a question at the host's resolver.
func (n *Network) answerPeer(q *query, name policy.Name, event Event, limit int) []byte {
	ctx, cancel := context.WithTimeout(n.ctx, lookupTime)
	defer cancel()
	peer, err := n.opts.Peers.Find(ctx, name)
	switch t := q.question.Type; {
	case errors.Is(err, ErrNoPeer):
		var reply []byte
		if _, err := policy.ParseName(name.String()); err != nil { // a policy is asked about host names
			event.Name = ""
			return n.refuseQuery(q, event, policy.Verdict{Reason: err.Error()}, limit, nil)
		}
		if direct := n.answerByPolicy(q, name, event, limit, func(lookup func() []byte) { reply = lookup() }); direct != nil {
			return direct
		}
		return reply
	case err != nil:
		return q.reply(dnsmessage.RCodeServerFailure, nil, "", limit)
	case q.question.Class != dnsmessage.ClassINET, t >= 249, t == dnsmessage.TypeOPT: // zone transfers and ANY among them
		return q.reply(dnsmessage.RCodeNotImplemented, nil, "", limit)
	case t != dnsmessage.TypeA:
		return q.reply(dnsmessage.RCodeSuccess, nil, "", limit)
	}
	q.ttl = uint32(peerLifetime / time.Second)
	return q.reply(dnsmessage.RCodeSuccess, []netip.Addr{peer.Addr}, "", limit)
}

// isPeer reports whether a connection leads to a named network. For a sandbox in none, a policy may
// allow addresses of the range.
func (n *Network) isPeer(dst netip.AddrPort) bool {
	return len(n.inNetworks()) > 0 && policy.PeerAddresses.Contains(dst.Addr())
}

// servePeer serves a connection to a peer. Its bytes are not read: what two sandboxes of one tenant
// say to each other passes no policy. Budgets hold.
func (f *flow) servePeer() error {
	reason := f.n.ledger.connection()
	if reason == "" {
		reason = f.n.ledger.host(policy.Name{}, f.dst.Addr())
	}
	if reason != "" {
		return f.refuseEarly(refuse("%s", reason))
	}
	f.toPeer.Store(true) // before Dial is asked: it refuses, or ResetPeers finds the flow
	f.dialBy.Store(f.n.opts.Now().Add(f.n.limits.dial).UnixNano())
	c, peer, err := f.n.opts.Peers.Dial(f.ctx, f.dst)
	f.dialBy.Store(0)
	if errors.Is(err, ErrNoPeer) {
		return f.refuseEarly(refuse("%v", ErrNoPeer))
	} else if refused, ok := errors.AsType[Refused](err); ok {
		return f.refuseEarly(refuse("%v", refused))
	}
	f.notePeer(peer)
	if err != nil {
		return fmt.Errorf("connect to %s port %d: %w", peer.Name, f.dst.Port(), err)
	}
	if err := f.attach(c); err != nil {
		return err
	}
	return f.relay(f.goDown())
}

// notePeer keeps the peer for the record. It notes no flow of a policy, so that no change of the
// policy ends the connection.
func (f *flow) notePeer(peer Peer) {
	name, err := policy.ParseName(peer.Name)
	if err != nil { // it has an underscore, say, and was reached by its address
		name = policy.Name{}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.verdict, f.name = policy.Verdict{Allow: true, Rule: policy.PeerRule(peer.Network)}, name
}
