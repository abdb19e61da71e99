package egress

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/sandboxd/sandboxd/netns/gateway"
	"github.com/sandboxd/sandboxd/netns/policy"
)

// Peers is the daemon's knowledge of sandboxes that share named networks. The network that asks is
// one that the gateway serves, by its ID. Both functions fail with [gateway.ErrNoPeer] unless a
// peer of that network has the name or address: a gateway that was taken over asks for anything.
type Peers struct {
	Find func(network string, name policy.Name) (gateway.Peer, error)
	// Dial connects within a bounded time, and until ctx ends, with the gateway process. The peer is
	// valid with other errors too.
	Dial func(ctx context.Context, network string, to netip.AddrPort) (*net.TCPConn, gateway.Peer, error)
}

// mostAsks bounds the asks of one network that are under way. A network that replaces one with the
// same ID, whose asks are not answered yet, has its own beside: twice those of names and
// connections.
const mostAsks = 4 * maxAsks

// asked replies to an ask of a gateway process. An error is that of a process that was taken over.
func (g *Gateway) asked(c *conn, a *ask) error {
	g.mu.Lock()
	n := g.networks[a.Network]
	g.mu.Unlock()
	if n == nil {
		return fmt.Errorf("it has asked for network %.40q, which it does not serve", a.Network)
	}
	if c.count(n, 1) > mostAsks {
		return fmt.Errorf("it has asked more than %d times at once for network %s", mostAsks, a.Network)
	}
	g.asking.Go(func() {
		defer c.count(n, -1)
		tcp, r := g.reply(c.ctx, a)
		err := c.reply(&r, tcp)
		if err != nil && tcp != nil {
			r.Error = clean(err.Error(), maxError)
			err = c.reply(&r, nil)
		}
		if err != nil {
			c.end(fmt.Errorf("reply to an ask of network %s: %w", a.Network, err)) // it would wait forever
		}
		if tcp != nil {
			_ = tcp.Close() // the process has a copy
		}
	})
	return nil
}

// count changes the number of asks of a network that this process waits for, and returns it. A
// process that takes its place begins with none.
func (c *conn) count(n *network, by int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.asks[n] + by
	if c.asks[n] = now; now == 0 {
		delete(c.asks, n)
	}
	return now
}

// reply returns the reply to an ask. The connection is nil if there is none.
func (g *Gateway) reply(ctx context.Context, a *ask) (*net.TCPConn, reply) {
	r := reply{Number: a.Number}
	var got gateway.Peer
	var tcp *net.TCPConn
	err := gateway.ErrNoPeer
	switch {
	case a.Name != "" && g.cfg.Peers.Find != nil:
		var name policy.Name
		if name, err = policy.ParseName(a.Name); err == nil {
			got, err = g.cfg.Peers.Find(a.Network, name)
		}
	case a.Name == "" && g.cfg.Peers.Dial != nil:
		tcp, got, err = g.cfg.Peers.Dial(ctx, a.Network, a.Dial)
	}
	if errors.Is(err, gateway.ErrNoPeer) {
		return nil, r
	}
	if got.Addr.IsValid() {
		r.Peer = (*peer)(&got)
	}
	if err != nil {
		r.Error = clean(err.Error(), maxError)
	}
	return tcp, r
}

// reply sends a reply with a copy of the connection, unless that is nil.
func (c *conn) reply(r *reply, tcp *net.TCPConn) error {
	packet, err := encode(&request{Reply: r})
	if err != nil {
		return err
	}
	if tcp == nil {
		return requests.Send(c.raw, packet)
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return fmt.Errorf("pass the connection on: %w", err)
	}
	var sent error
	if err := raw.Control(func(fd uintptr) { sent = requests.Send(c.raw, packet, int(fd)) }); err != nil {
		return fmt.Errorf("pass the connection on: %w", err)
	}
	if sent != nil {
		return fmt.Errorf("pass the connection on: %w", sent)
	}
	return nil
}
