package network

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/relay"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/netns"
	"github.com/sandboxd/sandboxd/runtime"
)

const (
	maxPorts = 64 // of one sandbox
	// maxForwarded bounds the connections of one published port; more wait in the kernel.
	maxForwarded = 256
	dialTimeout  = 30 * time.Second
)

// Published are host ports that are bound for a sandbox. Nothing is accepted before
// [Networks.Connect].
type Published struct {
	ports     []api.PortMapping
	listeners []*net.TCPListener
}

// Mappings returns the ports with the numbers that the kernel has chosen.
func (p *Published) Mappings() []api.PortMapping { return p.ports }

// Close unbinds the ports. Connections that were accepted go on.
func (p *Published) Close() error {
	var errs []error
	for _, l := range p.listeners {
		if err := l.Close(); !errors.Is(err, net.ErrClosed) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Publish binds ports of the host. The caller closes them, or passes them on to [Networks.Connect].
func Publish(ctx context.Context, ports []api.PortMapping) (_ *Published, err error) {
	ports = slices.Clone(ports)
	p := &Published{ports: ports}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.Close())
		}
	}()
	for i := range ports {
		m := &ports[i]
		address := net.JoinHostPort(m.Address, strconv.Itoa(int(m.HostPort)))
		l, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
		if err != nil {
			return nil, class.Mark(class.ErrPort, fmt.Errorf("publish port %d at %s: %w", m.Port, address, err))
		}
		tcp, ok := l.(*net.TCPListener)
		if !ok {
			return nil, errors.Join(fmt.Errorf("publish port %d: %T is no TCP listener", m.Port, l), l.Close())
		}
		p.listeners = append(p.listeners, tcp)
		if at, ok := tcp.Addr().(*net.TCPAddr); ok {
			m.HostPort = at.AddrPort().Port()
		}
	}
	return p, nil
}

// CheckPorts returns the ports that a request of a tenant asks for, with defaults filled in.
func CheckPorts(tenant string, net api.Network, ports []api.PortMapping) ([]api.PortMapping, error) {
	if len(ports) > 0 && net.Mode == api.NetworkSandbox {
		return nil, class.Invalidf("ports: those of a shared network are published by its owner, sandbox %q", class.Clip(net.Sandbox))
	}
	if len(ports) > 0 && !Has(net) {
		return nil, class.Invalidf("ports: a sandbox without a network has none to publish; ask for network mode %q or %q", api.NetworkEgress, api.NetworkFull)
	}
	if len(ports) > maxPorts {
		return nil, class.Invalidf("ports: there are %d, at most %d are possible", len(ports), maxPorts)
	}
	ports = slices.Clone(ports)
	for i := range ports {
		m := &ports[i]
		m.Protocol, m.Address = cmp.Or(m.Protocol, "tcp"), cmp.Or(m.Address, "127.0.0.1")
		switch {
		case m.Port == 0:
			return nil, class.Invalidf("ports[%d]: port is missing", i)
		case m.Protocol != "tcp":
			return nil, class.Invalidf("ports[%d]: protocol %q: only tcp can be published", i, class.Clip(m.Protocol))
		}
		at, err := netip.ParseAddr(m.Address)
		if err != nil || at.Zone() != "" {
			return nil, class.Invalidf("ports[%d]: address %q: must be an IP address of the host", i, class.Clip(m.Address))
		}
		// The daemon may bind what the tenant's own programs may not.
		if tenant != "" && (!at.IsLoopback() || m.HostPort != 0 && m.HostPort < 1024) {
			return nil, class.Invalidf("ports[%d]: tenants publish at loopback addresses, from port 1024 on", i)
		}
	}
	return ports, nil
}

// forward accepts connections to published ports until stop is called or the networks are closed.
func (n *Networks) forward(ctx context.Context, id string, l *life, p *Published) (stop func()) {
	if len(p.listeners) == 0 {
		return func() {}
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	n.mu.Lock()
	defer n.mu.Unlock()
	for i, listener := range p.listeners {
		l.accepting.Go(func() { n.accept(ctx, id, p.ports[i].Port, listener) })
	}
	n.work.Go(func() {
		defer l.accepting.Wait()
		select {
		case <-n.closing:
			cancel()
		case <-ctx.Done():
		}
	})
	return cancel
}

// accept forwards connections until ctx ends.
func (n *Networks) accept(ctx context.Context, id string, port uint16, l *net.TCPListener) {
	defer context.AfterFunc(ctx, func() { _ = l.Close() })() // ends Accept
	slots := make(chan struct{}, maxForwarded)
	var open sync.WaitGroup
	defer open.Wait()
	for {
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return
		}
		outside, err := l.AcceptTCP()
		if err != nil {
			<-slots
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			n.opts.Log.Warn("accept a connection to a published port", "id", id, "port", port, "error", err)
			select { // out of descriptors, say
			case <-time.After(time.Second):
				continue
			case <-ctx.Done():
				return
			}
		}
		open.Go(func() {
			defer func() { <-slots }()
			defer outside.Close()
			inside, err := n.Dial(ctx, id, port)
			if err != nil {
				_ = outside.SetLinger(0) // a reset: a clean end would look like an empty answer
				return
			}
			relay.Both(ctx, outside, inside)
		})
	}
}

// Dial connects to a port of a sandbox's loopback.
func (n *Networks) Dial(ctx context.Context, id string, port uint16) (*net.TCPConn, error) {
	return n.dial(ctx, id, port, netns.Connect)
}

// dial connects a socket that was made inside a sandbox.
func (n *Networks) dial(ctx context.Context, id string, port uint16, connect func(context.Context, *os.File, uint16) (net.Conn, error)) (*net.TCPConn, error) {
	if n.opts.Engine == nil {
		return nil, fmt.Errorf("%w: the engine has no networks", runtime.ErrUnenforceable)
	}
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	socket, err := n.opts.Engine.NetworkSocket(ctx, id, "tcp")
	if err != nil {
		return nil, err
	}
	conn, err := connect(ctx, socket, port)
	if err = errors.Join(err, socket.Close()); err != nil {
		return nil, fmt.Errorf("connect to port %d of the sandbox: %w", port, err)
	}
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		return nil, errors.Join(fmt.Errorf("connect to port %d of the sandbox: %T is no TCP connection", port, conn), conn.Close())
	}
	return tcp, nil
}
