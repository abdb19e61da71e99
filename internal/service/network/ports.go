package network

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/relay"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/share"
	"github.com/sandboxd/sandboxd/netns"
	"github.com/sandboxd/sandboxd/runtime"
)

const (
	maxPorts = 64 // of one sandbox
	// maxForwarded bounds the connections of one published port; more wait in the kernel.
	maxForwarded = 256
	dialTimeout  = 30 * time.Second
)

// forwardQuota bounds the connections of published ports. Each has two descriptors of the daemon.
func forwardQuota() *share.Quota {
	return &share.Quota{What: "connections of published ports", Sandbox: 1024, Tenant: 2048, All: 4096}
}

// Published are host ports and Unix sockets that are bound for a sandbox. Nothing is accepted
// before [Networks.Connect].
type Published struct {
	ports []api.PortMapping
	bound []bound // of each port
}

// bound holds the socket that one port is published at: stream, or datagrams for UDP. The other is
// nil.
type bound struct {
	stream    net.Listener
	datagrams *net.UDPConn
}

// Close may be called again.
func (b bound) Close() error {
	var err error
	if b.stream != nil {
		err = b.stream.Close()
	} else {
		err = b.datagrams.Close()
	}
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// Mappings returns the ports with the numbers that the kernel has chosen.
func (p *Published) Mappings() []api.PortMapping { return p.ports }

// Close unbinds the ports. Connections that were accepted go on. P may be nil.
func (p *Published) Close() error {
	if p == nil {
		return nil
	}
	var errs []error
	for _, b := range p.bound {
		errs = append(errs, b.Close())
	}
	return errors.Join(errs...)
}

// Publish binds ports of the host, all of them or none. The caller closes them, or passes them on
// to [Networks.Connect].
func (n *Networks) Publish(ctx context.Context, ports []api.PortMapping) (_ *Published, err error) {
	ports = slices.Clone(ports)
	p := &Published{ports: ports}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.Close())
		}
	}()
	for i := range ports {
		b, err := n.bind(ctx, &ports[i])
		if err != nil {
			return nil, class.Mark(class.ErrPort, fmt.Errorf("publish port %d at %s: %w", ports[i].Port, placeOf(&ports[i]), err))
		}
		p.bound = append(p.bound, b)
	}
	return p, nil
}

// placeOf returns where a port is to be published.
func placeOf(m *api.PortMapping) string {
	if m.Socket != "" {
		return m.Socket
	}
	return net.JoinHostPort(m.Address, strconv.Itoa(int(m.HostPort)))
}

// bind binds one port, and fills in the number that the kernel has chosen. If one that it chose for
// an earlier start is taken, it chooses another.
func (n *Networks) bind(ctx context.Context, m *api.PortMapping) (bound, error) {
	b, err := n.bindTo(ctx, m)
	if m.Chosen && m.HostPort != 0 && errors.Is(err, syscall.EADDRINUSE) {
		m.HostPort = 0
		return n.bindTo(ctx, m)
	}
	return b, err
}

func (n *Networks) bindTo(ctx context.Context, m *api.PortMapping) (bound, error) {
	switch {
	case m.Socket != "":
		l, err := n.doors.listen(ctx, filepath.Base(m.Socket))
		return bound{stream: l}, err
	case m.Protocol == "udp":
		c, err := new(net.ListenConfig).ListenPacket(ctx, "udp", placeOf(m))
		if err != nil {
			return bound{}, err
		}
		udp, ok := c.(*net.UDPConn)
		if !ok {
			return bound{}, errors.Join(fmt.Errorf("%T is no UDP socket", c), c.Close())
		}
		if at, ok := udp.LocalAddr().(*net.UDPAddr); ok {
			m.HostPort = at.AddrPort().Port()
		}
		return bound{datagrams: udp}, nil
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", placeOf(m))
	if err != nil {
		return bound{}, err
	}
	if at, ok := l.Addr().(*net.TCPAddr); ok {
		m.HostPort = at.AddrPort().Port()
	}
	return bound{stream: l}, nil
}

// CheckPorts returns the ports that a request of a tenant asks for, with defaults filled in.
func (n *Networks) CheckPorts(tenant string, net api.Network, ports []api.PortMapping) ([]api.PortMapping, error) {
	if len(ports) > 0 && net.Mode == api.NetworkSandbox {
		return nil, class.Invalidf("ports: those of a shared network are published by its owner, sandbox %q", class.Clip(net.Sandbox))
	}
	if len(ports) > 0 && !net.HasGateway() {
		return nil, class.Invalidf("ports: a sandbox without a network has none to publish; ask for network mode %q or %q", api.NetworkEgress, api.NetworkFull)
	}
	if len(ports) > maxPorts {
		return nil, class.Invalidf("ports: there are %d, at most %d are possible", len(ports), maxPorts)
	}
	ports = slices.Clone(ports)
	for i := range ports {
		m := &ports[i]
		m.Protocol = cmp.Or(m.Protocol, "tcp")
		m.Chosen = m.Socket == "" && m.HostPort == 0
		var err error
		switch {
		case m.Port == 0:
			err = errors.New("port is missing")
		case m.Protocol != "tcp" && m.Protocol != "udp":
			err = fmt.Errorf("protocol %q: must be tcp or udp", class.Clip(m.Protocol))
		case m.Socket != "":
			err = n.checkSocket(tenant, m)
		default:
			err = checkAddress(tenant, m)
		}
		if err != nil {
			return nil, class.Invalidf("ports[%d]: %w", i, err)
		}
	}
	return ports, nil
}

func checkAddress(tenant string, m *api.PortMapping) error {
	m.Address = cmp.Or(m.Address, "127.0.0.1")
	at, err := netip.ParseAddr(m.Address)
	if err != nil || at.Zone() != "" {
		return fmt.Errorf("address %q: must be an IP address of the host", class.Clip(m.Address))
	}
	// The daemon may be allowed ports that the tenant's own programs may not bind.
	if tenant != "" && (!at.IsLoopback() || m.HostPort != 0 && m.HostPort < 1024) {
		return errors.New("tenants publish at loopback addresses, from port 1024 on")
	}
	return nil
}

// checkSocket completes the path of a Unix socket.
func (n *Networks) checkSocket(tenant string, m *api.PortMapping) error {
	name := m.Socket
	if filepath.IsAbs(name) && filepath.Dir(name) == n.opts.PortDir {
		name = filepath.Base(name)
	}
	switch {
	case tenant != "":
		return errors.New("socket: tenants publish at loopback addresses")
	case m.Address != "" || m.HostPort != 0:
		return errors.New("socket: a Unix socket has no address and no port of the host")
	case m.Protocol != "tcp":
		return errors.New("socket: only connections of tcp go through a Unix socket")
	case !isSocketName(name):
		return fmt.Errorf("socket %q: must be a name of 1 to %d letters, digits, \".\", \"_\" and \"-\", or a path of one in %s", class.Clip(m.Socket), maxSocketName, n.opts.PortDir)
	}
	m.Socket = filepath.Join(n.opts.PortDir, name)
	return nil
}

// forward accepts connections and datagrams of published ports until stop is called or the networks
// are closed.
func (n *Networks) forward(ctx context.Context, id string, l *life, p *Published) (stop func()) {
	if len(p.bound) == 0 {
		return func() {}
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	n.mu.Lock()
	defer n.mu.Unlock()
	for i, b := range p.bound {
		port := p.ports[i].Port
		l.accepting.Go(func() {
			if b.datagrams != nil {
				n.relayDatagrams(ctx, share.Owner{Tenant: l.tenant, ID: id}, port, b.datagrams)
			} else {
				n.accept(ctx, share.Owner{Tenant: l.tenant, ID: id}, port, b.stream, n.Dial)
			}
		})
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

// accept forwards connections until ctx ends. Beyond the quota it resets them: those of one sandbox
// must not wait for another one.
func (n *Networks) accept(
	ctx context.Context, of share.Owner, port uint16, l net.Listener, dial func(ctx context.Context, id string, port uint16) (*net.TCPConn, error),
) {
	defer l.Close()                                          // has ended when the place may be bound again
	defer context.AfterFunc(ctx, func() { _ = l.Close() })() // ends Accept
	slots := make(chan struct{}, maxForwarded)
	full := false // the last connection was beyond the quota
	var open sync.WaitGroup
	defer open.Wait()
	for {
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return
		}
		outside, err := l.Accept()
		if err != nil {
			<-slots
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			n.opts.Log.Warn("accept a connection to a published port", "id", of.ID, "port", port, "error", err)
			select { // out of descriptors, say
			case <-time.After(time.Second):
				continue
			case <-ctx.Done():
				return
			}
		}
		if err := n.forwarded.Take(of, 1); err != nil {
			if !full {
				n.opts.Log.Warn("connections to a published port are reset", "id", of.ID, "port", port, "error", err)
			}
			full = true
			reset(outside)
			<-slots
			continue
		}
		full = false
		open.Go(func() {
			defer func() { <-slots }()
			defer n.forwarded.Give(of, 1)
			defer outside.Close()
			inside, err := dial(ctx, of.ID, port)
			if err != nil {
				reset(outside)
				return
			}
			relay.Both(ctx, outside, inside)
		})
	}
}

// reset closes a connection with a reset: a clean end would look like an empty answer.
func reset(c net.Conn) {
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = c.Close()
}

// Dial connects to a port of a sandbox's loopback.
func (n *Networks) Dial(ctx context.Context, id string, port uint16) (*net.TCPConn, error) {
	return dial[*net.TCPConn](ctx, n.opts.Engine, id, "tcp", port, netns.Connect)
}

// dial connects to a port of a sandbox. C is the type of connections of the network.
func dial[C net.Conn](
	ctx context.Context, engine runtime.Networker, id, network string, port uint16, connect func(context.Context, *os.File, uint16) (net.Conn, error),
) (c C, err error) {
	if engine == nil {
		return c, fmt.Errorf("%w: the engine has no networks", runtime.ErrUnenforceable)
	}
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	socket, err := engine.NetworkSocket(ctx, id, network)
	if err != nil {
		return c, err
	}
	conn, err := connect(ctx, socket, port)
	if err = errors.Join(err, socket.Close()); err != nil {
		return c, fmt.Errorf("connect to port %d of the sandbox: %w", port, err)
	}
	c, ok := conn.(C)
	if !ok {
		return c, errors.Join(fmt.Errorf("connect to port %d of the sandbox: %T is no connection of %s", port, conn, network), conn.Close())
	}
	return c, nil
}
