package egress

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"runtime/pprof"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/confine"
	"github.com/sandboxd/sandboxd/internal/unixmsg"
	"github.com/sandboxd/sandboxd/netns/gateway"
	"github.com/sandboxd/sandboxd/netns/gateway/ca"
	"github.com/sandboxd/sandboxd/netns/policy"
)

// Main runs a gateway if the arguments ask for one. The program whose broker starts gateways calls
// Main first.
func Main(args []string) (code int, handled bool) {
	if len(args) != 1 || args[0] != Argument {
		return 0, false
	}
	// A service manager signals all processes of the daemon, and the daemon's orderly end is ours.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "sandboxd gateway:", err)
		return 1, true
	}
	return 0, true
}

// run confines the process and serves the socket until the daemon closes it.
func run() error {
	unix.CloseOnExec(fdSocket)
	conn, err := unixConn(os.NewFile(fdSocket, "gateway"))
	if err != nil {
		return fmt.Errorf("open the daemon's socket: %w", err)
	}
	defer conn.Close()
	p, err := newProcess(conn)
	if err != nil {
		return err
	}
	// While the files can be read.
	if p.roots, err = x509.SystemCertPool(); err != nil {
		return fmt.Errorf("read the host's certificate authorities: %w", err)
	}
	held, hello, descriptors, err := confineProcess()
	if err != nil {
		return err
	}
	defer held.Close()
	p.pool = gateway.NewPool(descriptors)
	hello.Networks = p.pool.Networks()
	p.resolver = newResolver(func(file string) {
		fmt.Fprintf(os.Stderr, "sandboxd gateway: %s was replaced by another file; restarting\n", file)
		_ = conn.Close() // ends serve
	})
	return p.serve(hello)
}

// confineProcess takes from this process whatever a gateway does not need, and returns the number
// of descriptors that it may have.
func confineProcess() (_ io.Closer, _ *hello, descriptors uint64, err error) {
	_, _ = time.Now().Zone() // reads the host's time zone, once
	descriptors, err = confine.RaiseDescriptors()
	if err != nil {
		return nil, nil, 0, err
	}
	files, dirs, err := confine.Resolver()
	if err != nil {
		return nil, nil, 0, err
	}
	g := confine.Gateway{Files: files, Dirs: dirs}
	g.Probe()
	held, err := g.Apply()
	if err != nil {
		return nil, nil, 0, err
	}
	return held, &hello{Landlock: g.ABI, Missing: g.Missing()}, descriptors, nil
}

// process is the state of a gateway process.
type process struct {
	conn     *net.UnixConn
	raw      syscall.RawConn
	pool     *gateway.Pool
	resolver *resolver
	roots    *x509.CertPool // of the host
	sending  sync.Mutex
	asks     *net.UnixConn // nil until the daemon has opened it, before the first network
	asksRaw  syscall.RawConn
	asker    *asker
	networks map[string]*served // of serve only
}

// served is a network that is served.
type served struct {
	network *gateway.Network
	cancel  context.CancelFunc // closes its sockets
	serving sync.WaitGroup
}

func newProcess(conn *net.UnixConn) (*process, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("open the daemon's socket: %w", err)
	}
	p := &process{conn: conn, raw: raw, networks: make(map[string]*served)}
	p.asker = newAsker(p.sendAsk)
	return p, nil
}

// serve handles the daemon's requests one after the other, until it closes the socket.
func (p *process) serve(h *hello) error {
	defer func() {
		for _, s := range p.networks {
			s.close()
		}
		if p.asks != nil {
			_ = p.asks.Close()
		}
	}()
	if err := p.send(&message{Hello: h}); err != nil {
		return err
	}
	for {
		var r request
		fds, err := requests.Receive(p.raw, 0, func(packet []byte) error { return decode(packet, &r) })
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, unix.ECONNRESET):
			return nil
		case err != nil:
			// Malformed, which our daemon's are not, or without its descriptors because the table is full,
			// which the bound on networks prevents. The daemon replaces this process.
			return fmt.Errorf("receive a request: %w", err)
		}
		a := answer{Number: r.Number}
		pprof.Do(context.Background(), pprof.Labels(labelNetwork, r.id()), func(context.Context) {
			err = p.handle(&r, unixmsg.Files(fds, "sandbox")) //nolint:contextcheck // a network ends with its removal
		})
		switch {
		case err != nil && (r.Report || r.Asks):
			return err
		case r.Report, r.Asks:
			continue
		case err != nil:
			a.Error = clean(err.Error(), maxError)
		}
		if err := p.send(&message{Answer: &a}); err != nil {
			return err
		}
	}
}

// send sends a message. It waits for a daemon that does not read, and all networks with it: events
// are lost then, see [gateway.Event.Lost].
func (p *process) send(m *message) error {
	packet, err := encode(m)
	if err != nil {
		return err
	}
	return p.sendPacket(packet)
}

func (p *process) sendPacket(packet []byte) error {
	p.sending.Lock()
	defer p.sending.Unlock()
	if err := messages.Send(p.raw, packet); err != nil {
		return fmt.Errorf("send to the daemon: %w", err)
	}
	return nil
}

// sendEvents implements gateway.Options.Record. A daemon that is gone ends serve too.
func (p *process) sendEvents(all []gateway.Event) {
	for _, packet := range eventPackets(all) {
		_ = p.sendPacket(packet)
	}
}

// handle executes a request. It closes the files.
func (p *process) handle(r *request, files []*os.File) error {
	defer func() {
		for _, f := range files {
			_ = f.Close()
		}
	}()
	if err := r.check(len(files)); err != nil {
		return err
	}
	switch {
	case r.Add != nil:
		return p.add(r.Add, files)
	case r.SetPolicy != nil:
		s := p.networks[r.SetPolicy.ID]
		if s == nil {
			return fmt.Errorf("set policy: no network %s", r.SetPolicy.ID)
		}
		parsed, err := policy.Parse(r.SetPolicy.Policy)
		if err != nil {
			return fmt.Errorf("set policy: %w", err)
		}
		s.network.SetPolicy(parsed)
	case r.SetSecrets != nil:
		return p.setSecrets(r.SetSecrets)
	case r.SetNetworks != nil:
		s := p.networks[r.SetNetworks.ID]
		if s == nil {
			return fmt.Errorf("set networks: no network %s", r.SetNetworks.ID)
		}
		s.network.SetNetworks(r.SetNetworks.Networks)
	case r.ResetPeers != nil:
		s := p.networks[r.ResetPeers.ID]
		if s == nil {
			return fmt.Errorf("reset connections to peers: no network %s", r.ResetPeers.ID)
		}
		s.network.ResetPeers(r.ResetPeers.Peers)
	case r.Report:
		return reportCrashes(files[0])
	case r.Asks:
		return p.openAsks(files[0])
	case r.Remove != nil:
		if s := p.networks[r.Remove.ID]; s != nil {
			s.close()
			delete(p.networks, r.Remove.ID)
		}
	}
	return nil
}

// add serves a network. One that has the same id is closed, unless the new one cannot be served.
func (p *process) add(a *add, files []*os.File) error {
	parsed, err := policy.Parse(a.Policy)
	if err != nil {
		return fmt.Errorf("add network: %w", err)
	}
	old := p.networks[a.ID]
	if old == nil && len(p.networks) >= p.pool.Networks() {
		return fmt.Errorf("add network: the gateway serves %d already, as many as its limit of open files allows; raise the hard limit (ulimit -Hn, LimitNOFILE=)", len(p.networks))
	}
	authority, placed, err := a.inspection()
	if err != nil {
		return fmt.Errorf("add network: %w", err)
	}
	s, err := open(files)
	if err != nil {
		return fmt.Errorf("add network: %w", err)
	}
	if old != nil {
		old.close()
	}
	n := gateway.New(gateway.Options{
		ID: a.ID, Policy: parsed, Budget: a.Budget, Spent: a.Spent, CA: authority, Roots: p.roots, Secrets: placed, Quarantined: a.Quarantined, IPv6: hasIPv6(), Lookup: p.resolver.lookup, Pool: p.pool,
		Peers: p.asker.peers(a.ID, a.Networks), DialSocket: p.asker.dialSocket(a.ID), Process: p.asker.process(a.ID),
		Record: p.sendEvents,
	})
	p.networks[a.ID] = serveNetwork(n, s)
	return nil
}

// inspection returns what inspected connections need.
func (a *add) inspection() (authority *ca.Authority, placed []gateway.Secret, err error) {
	if len(a.Certificate)+len(a.Key) > 0 {
		if authority, err = ca.Load(a.Certificate, a.Key); err != nil {
			return nil, nil, err
		}
	}
	placed, err = bound(a.Secrets)
	return authority, placed, err
}

// sockets are those of one sandbox, made inside.
type sockets struct {
	stream, dnsTCP *net.TCPListener
	dns            *net.UDPConn
}

// open returns the sockets of files, and leaves the files open.
func open(files []*os.File) (s sockets, err error) {
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	if s.stream, err = listener(files[0]); err != nil {
		return s, fmt.Errorf("open the socket of streams: %w", err)
	}
	c, err := net.FilePacketConn(files[1])
	if err != nil {
		return s, fmt.Errorf("open the socket of DNS: %w", err)
	}
	udp, ok := c.(*net.UDPConn)
	if !ok {
		return s, errors.Join(fmt.Errorf("the socket of DNS is a %T", c), c.Close())
	}
	s.dns = udp
	if err := gateway.PrepareDNS(s.dns); err != nil {
		return s, err
	}
	if s.dnsTCP, err = listener(files[2]); err != nil {
		return s, fmt.Errorf("open the socket of DNS streams: %w", err)
	}
	return s, nil
}

func listener(f *os.File) (*net.TCPListener, error) {
	l, err := net.FileListener(f)
	if err != nil {
		return nil, err
	}
	t, ok := l.(*net.TCPListener)
	if !ok {
		return nil, errors.Join(fmt.Errorf("a listener of %T", l), l.Close())
	}
	return t, nil
}

func (s sockets) close() {
	for _, l := range []*net.TCPListener{s.stream, s.dnsTCP} {
		if l != nil {
			_ = l.Close()
		}
	}
	if s.dns != nil {
		_ = s.dns.Close()
	}
}

// serveNetwork serves a network until close.
func serveNetwork(n *gateway.Network, s sockets) *served {
	ctx, cancel := context.WithCancel(context.Background())
	v := &served{network: n, cancel: cancel}
	for _, serve := range []func() error{
		func() error { return n.Serve(ctx, s.stream) },
		func() error { return n.ServeDNS(ctx, s.dns) },
		func() error { return n.Serve(ctx, s.dnsTCP) },
	} {
		v.serving.Go(func() {
			if err := serve(); err != nil && !errors.Is(err, net.ErrClosed) {
				// One that is not served must not look like one that is slow.
				fmt.Fprintln(os.Stderr, "sandboxd gateway: a network is no longer served:", err)
			}
		})
	}
	return v
}

// close resets all connections, and returns when all events were sent.
func (s *served) close() {
	s.cancel()
	s.network.Close()
	s.serving.Wait()
}

// hasIPv6 reports whether the host has a route to the Internet over IPv6. No packet is sent.
func hasIPv6() bool {
	c, err := net.DialUDP("udp6", nil, &net.UDPAddr{IP: net.ParseIP("2600::"), Port: 53})
	if err != nil {
		return false
	}
	_ = c.Close()
	return true
}
