package egress

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"github.com/sandboxd/sandboxd/netns/gateway"
	"github.com/sandboxd/sandboxd/netns/policy"
)

// Peers answers from the daemon's knowledge of named networks. The asking network is given by its
// ID, and is one that the gateway serves. Both functions fail with [gateway.ErrNoPeer] unless a
// peer of that network has the name or address: a gateway that was taken over asks for anything.
type Peers struct {
	Find func(network string, name policy.Name) (gateway.Peer, error)
	// Dial connects within a bounded time, and until ctx ends, with the gateway process. It may also
	// fail with [gateway.Refused]. The peer is valid with other errors.
	Dial func(ctx context.Context, network string, to netip.AddrPort) (*net.TCPConn, gateway.Peer, error)
}

// mostAsks bounds the asks of one network that are under way: maxAsks for names, as many for
// connections, as many for sockets of the host, and as many for processes. It is doubled for a
// network that replaces one with the same ID whose asks are not answered yet.
const mostAsks = 8 * maxAsks

// asked replies to an ask of a gateway process. It returns an error for an ask that only a process
// that was taken over sends. An ask for a network that is not served gets nothing: the answer to a
// removal comes through another socket, and may overtake asks that were sent before it.
func (g *Gateway) asked(c *conn, a *ask) error {
	g.mu.Lock()
	n := g.networks[a.Network]
	g.mu.Unlock()
	if c.count(n, 1) > mostAsks {
		return fmt.Errorf("it has asked more than %d times at once for network %.40q", mostAsks, a.Network)
	}
	g.asking.Go(func() {
		defer c.count(n, -1)
		var made conveyed
		r := reply{Number: a.Number}
		switch {
		case n != nil:
			made, r = g.reply(c.ctx, a)
		case a.Socket != 0:
			r.Error = "the sandbox has ended"
		}
		err := c.reply(&r, made)
		if err != nil && made != nil {
			r.Socket, r.Error = false, clean(err.Error(), maxError)
			err = c.reply(&r, nil)
		}
		if err != nil {
			c.end(fmt.Errorf("reply to an ask of network %s: %w", a.Network, err)) // it would wait forever
		}
		if made != nil {
			_ = made.Close() // the process has a copy
		}
	})
	return nil
}

// count changes the number of asks of a network that this process waits for, and returns it. A
// process that takes its place begins with none.
func (c *conn) count(n *network, by int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.counts[n] + by
	if c.counts[n] = now; now == 0 {
		delete(c.counts, n)
	}
	return now
}

// A conveyed connection is passed on to the gateway: a [*net.TCPConn] to a peer, or a
// [*net.UnixConn] to a socket of the host.
type conveyed interface {
	net.Conn
	syscall.Conn
}

// reply returns the reply to an ask. The connection is nil if there is none.
func (g *Gateway) reply(ctx context.Context, a *ask) (conveyed, reply) {
	r := reply{Number: a.Number}
	if a.Process != nil {
		if g.cfg.Process != nil {
			r.Process = holderOf(g.cfg.Process(ctx, a.Network, gateway.Ends{Protocol: a.Process.Protocol, Program: a.Process.Program, Server: a.Process.Server}))
		}
		return nil, r
	}
	if a.Socket != 0 {
		return g.replySocket(ctx, a, r)
	}
	var got gateway.Peer
	var tcp *net.TCPConn
	err := gateway.ErrNoPeer
	switch {
	case a.Name != "" && g.cfg.Peers.Find != nil:
		var name policy.Name
		if name, err = policy.ParsePeerName(a.Name); err == nil {
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
		return nil, r
	}
	if tcp == nil {
		return nil, r
	}
	return tcp, r
}

// replySocket returns the reply to an ask for a socket of the host.
func (g *Gateway) replySocket(ctx context.Context, a *ask, r reply) (conveyed, reply) {
	if g.cfg.DialSocket == nil {
		r.Error = "the daemon reaches no Unix sockets"
		return nil, r
	}
	socket, err := g.cfg.DialSocket(ctx, a.Network, a.Socket)
	if err != nil {
		r.Error = clean(err.Error(), maxError)
		return nil, r
	}
	r.Socket = true
	return socket, r
}

// reply sends a reply with a copy of the connection, unless that is nil.
func (c *conn) reply(r *reply, made conveyed) error {
	packet, err := encode(r)
	if err != nil {
		return err
	}
	if made == nil {
		return replyPackets.Send(c.asksRaw, packet)
	}
	raw, err := made.SyscallConn()
	if err != nil {
		return fmt.Errorf("pass the connection on: %w", err)
	}
	var sent error
	if err := raw.Control(func(fd uintptr) { sent = replyPackets.Send(c.asksRaw, packet, int(fd)) }); err != nil {
		return fmt.Errorf("pass the connection on: %w", err)
	}
	if sent != nil {
		return fmt.Errorf("pass the connection on: %w", sent)
	}
	return nil
}
