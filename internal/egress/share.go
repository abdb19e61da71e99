package egress

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync"
)

// The descriptors of the process are shared by its networks. Each can always have minimum: its
// sockets, 8 pipes, 32 questions, 256 connections whose first bytes are not complete, and both
// sides of 16 others. Further connections take from a pool, and no network more than is left there
// afterwards: with n greedy networks, one more finds 1/(n+1) of the pool.
const (
	reserved      = 128 // of the process itself
	guaranteed    = 16  // connections of a network
	perConnection = 2
	minimum       = 3 + 2*8 + 2*32 + 256 + perConnection*guaranteed
)

// maxNetworks returns the number of networks whose minimum fits into three quarters of the limit of
// descriptors.
func maxNetworks(descriptors uint64) int {
	usable := max(0, int(min(descriptors, 1<<30))-reserved)
	if n := usable / 4 * 3 / minimum; n > 0 {
		return n
	}
	return min(1, usable/minimum)
}

// A pool holds the descriptors that are in no network's minimum, counted in connections.
type pool struct {
	mu   sync.Mutex // guards free and the shares
	free int
}

func newPool(descriptors uint64) *pool {
	usable := max(0, int(min(descriptors, 1<<30))-reserved)
	return &pool{free: (usable - maxNetworks(descriptors)*minimum) / perConnection}
}

// A share counts the connections of one network that lead outside.
type share struct {
	pool   *pool
	taken  map[context.Context]struct{}
	pooled int // of them, those from the pool
}

func (p *pool) share() *share { return &share{pool: p, taken: make(map[context.Context]struct{})} }

// connect implements gateway.Options.Dial. The context is that of the flow, which ends with it: a
// flow counts once, however often it dials.
func (s *share) connect(ctx context.Context, addr netip.AddrPort) (*net.TCPConn, error) {
	if err := s.take(ctx); err != nil {
		return nil, err
	}
	c, err := new(net.Dialer).DialContext(ctx, "tcp", addr.String())
	if err != nil {
		return nil, err
	}
	t := c.(*net.TCPConn) //nolint:forcetypeassert // of the network tcp
	// The policy was asked about this address and no other.
	if got := t.RemoteAddr().(*net.TCPAddr).AddrPort(); got.Addr().Unmap() != addr.Addr() || got.Port() != addr.Port() { //nolint:forcetypeassert // as above
		_ = t.Close()
		return nil, fmt.Errorf("connected to %s in the place of %s", got, addr)
	}
	return t, nil
}

func (s *share) take(ctx context.Context) error {
	s.pool.mu.Lock()
	defer s.pool.mu.Unlock()
	if _, ok := s.taken[ctx]; ok {
		return nil
	}
	if len(s.taken) >= guaranteed {
		if s.pooled >= s.pool.free {
			return fmt.Errorf("%d connections of this sandbox are open, as many as the limit of open files allows now", len(s.taken))
		}
		s.pool.free--
		s.pooled++
	}
	s.taken[ctx] = struct{}{}
	context.AfterFunc(ctx, func() { s.give(ctx) })
	return nil
}

func (s *share) give(ctx context.Context) {
	s.pool.mu.Lock()
	defer s.pool.mu.Unlock()
	if _, ok := s.taken[ctx]; !ok {
		return
	}
	delete(s.taken, ctx)
	if s.pooled > 0 && len(s.taken) < guaranteed+s.pooled {
		s.pool.free++
		s.pooled--
	}
}
