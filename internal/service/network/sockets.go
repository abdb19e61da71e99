package network

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service/share"
	"github.com/sandboxd/sandboxd/netns/policy"
)

// socketTimeout bounds a connection to a socket of the host. Sockets answer at once: it is for the
// places of those that connect at the same time.
const socketTimeout = 10 * time.Second

// parse returns a function that parses the policy of a network once, when it is first called: most
// sandboxes never ask for a socket.
func parse(net api.Network) func() (*policy.Policy, error) {
	return sync.OnceValues(func() (*policy.Policy, error) { return policy.Parse(document(net)) })
}

// dialSocket implements [egress.Config.DialSocket]. The gateway chooses a port; the socket is that
// of the sandbox's policy as the daemon knows it, among those that the operator has named.
func (n *Networks) dialSocket(ctx context.Context, id string, port uint16) (*net.UnixConn, error) {
	n.mu.Lock()
	l := n.lives[id]
	var parsed func() (*policy.Policy, error)
	if l != nil && !l.over {
		parsed = l.policy
	}
	n.mu.Unlock()
	if parsed == nil {
		return nil, errors.New("the sandbox has ended")
	}
	p, err := parsed()
	if err != nil {
		return nil, err
	}
	s, ok := p.Service(port)
	if !ok || s.Socket == "" || l.tenant != "" || n.opts.DialSocket == nil {
		return nil, fmt.Errorf("the policy has no socket for port %d", port)
	}
	of := share.Owner{Tenant: l.tenant, ID: id}
	if err := n.dials.Take(of, 1); err != nil {
		return nil, err
	}
	defer n.dials.Give(of, 1)
	ctx, cancel := context.WithTimeout(ctx, socketTimeout)
	defer cancel()
	return n.opts.DialSocket(ctx, s.Socket)
}
