package gateway

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/netns/gateway/ca"
	"github.com/sandboxd/sandboxd/netns/policy"
)

// Options are the surroundings of a network.
type Options struct {
	// ID names the network in events.
	ID     string
	Policy *policy.Policy
	Budget Budget
	// Spent is the part of the budget that earlier processes have used. It counts as used here.
	Spent Spent
	// IPv6 reports that the host reaches the Internet over IPv6. Without it no name has an AAAA
	// record: clients would try those addresses first.
	IPv6 bool
	// Lookup resolves a name on the host; network is "ip4" or "ip6", as for
	// [net.Resolver.LookupNetIP]. A [net.DNSError] with IsNotFound stands for a name without such
	// addresses.
	Lookup func(ctx context.Context, network string, name policy.Name) ([]netip.Addr, error)
	// Dial connects to exactly this address. Nil stands for a connection from this process.
	Dial func(ctx context.Context, addr netip.AddrPort) (*net.TCPConn, error)
	// DialSocket connects to the service with this port, which the policy has at a Unix socket. Only
	// the caller knows the path. Nil: there are no such services.
	DialSocket func(ctx context.Context, port uint16) (*net.UnixConn, error)
	// Peers are other sandboxes that this one reaches by name; nil if it never joins a named network.
	Peers *Peers
	// Process finds the process that has the program's end of a connection or datagram, within the
	// time of ctx; nil if it is not known. It is asked about some flows only. Nil finds none.
	Process func(ctx context.Context, ends Ends) *Process
	// Own reports whether an address is one of the host itself, to which no connection leads. Nil asks
	// the kernel.
	Own func(netip.Addr) (bool, error)
	// CA signs the certificates of connections whose requests are read within TLS. Without it these
	// connections are refused.
	CA *ca.Authority
	// Roots are the authorities that certificates of servers are checked against on such connections.
	// Nil stands for the host's, which New reads: later the process may be confined.
	Roots *x509.CertPool
	// Secrets are put into requests that are read within TLS.
	Secrets []Secret
	// Quarantined refuses everything unread: connections are reset, and questions get SERVFAIL.
	// Nothing is recorded.
	Quarantined bool
	// Pool bounds the descriptors of all networks of the process together. If it is nil, only the
	// bounds of each network hold.
	Pool *Pool
	// Record gets the events of the network in their order, several within some milliseconds at once.
	// While it blocks, a bounded number is queued and the rest is dropped; see [Event.Lost].
	Record func([]Event)
	// Now and Ticks are the clock. Nil stands for the host's, with a tick each second. At each tick
	// connections that are too slow are ended.
	Now   func() time.Time
	Ticks <-chan time.Time
}

// limits bound one network at a time.
type limits struct {
	flows   int           // connections, each two descriptors
	tls     int           // connections of TLS that ends here, each up to 1.5 MB where one side is slow
	streams int           // requests of HTTP/2 under way
	heads   int           // connections whose first bytes, or next request, are not complete
	lookups int           // questions at the host's resolver
	head    time.Duration // from the first byte of a head to its last, and from accept on ports of the web
	dial    time.Duration
	idle    time.Duration // without a byte in either direction
}

var defaults = limits{
	flows: 1024, tls: 128, streams: 512, heads: 256, lookups: 32, head: 10 * time.Second, dial: 15 * time.Second, idle: 15 * time.Minute,
}

// Network is the outside of one sandbox's network. Its methods are safe for concurrent use.
type Network struct {
	opts     Options
	limits   limits
	policy   atomic.Pointer[policy.Policy]
	secrets  atomic.Pointer[secretSet]
	joined   atomic.Pointer[[]string] // named networks
	memory   *memory
	ledger   *ledger
	rules    atomic.Pointer[rules] // with budgets
	places   share
	recorder *recorder
	origins  *origins
	lookups  chan struct{}
	heads    atomic.Int64
	pipes    atomic.Int64
	tls      *endpoint       // nil without an authority
	ctx      context.Context //nolint:containedctx // ends with Close, not with a call
	cancel   context.CancelFunc
	// destination is the address that the client of an accepted connection asked for. Tests, whose
	// clients are on the host's loopback, set their own.
	destination func(*net.TCPConn) netip.AddrPort

	busy chan struct{} // wakes the sweep, which stands still while there are no flows

	mu     sync.Mutex // guards those below
	closed bool
	flows  map[*flow]struct{}
	wg     sync.WaitGroup // counts flows, lookups and calls of Serve and ServeDNS
}

// New returns a network that serves nothing yet. The caller closes it.
func New(opts Options) *Network { return newNetwork(opts, defaults) }

func newNetwork(opts Options, l limits) *Network {
	if opts.Dial == nil {
		opts.Dial = dialExactly
	}
	if opts.Own == nil {
		opts.Own = ownedByHost
	}
	if opts.Now == nil {
		opts.Now = time.Now
	}
	if opts.Policy == nil {
		opts.Policy = &policy.Policy{}
	}
	ctx, cancel := context.WithCancel(context.Background())
	n := &Network{
		opts: opts, limits: l, memory: newMemory(opts.Now), ledger: newLedger(opts.Budget, opts.Spent, opts.Now), recorder: startRecorder(opts.Record), origins: newOrigins(opts.Process),
		places: share{pool: opts.Pool}, lookups: make(chan struct{}, l.lookups), ctx: ctx, cancel: cancel, flows: make(map[*flow]struct{}),
		busy:        make(chan struct{}, 1),
		destination: func(c *net.TCPConn) netip.AddrPort { return unmapped(c.LocalAddr().(*net.TCPAddr).AddrPort()) }, //nolint:forcetypeassert // it is a TCPConn
	}
	n.policy.Store(opts.Policy)
	n.rules.Store(n.newRules(opts.Policy, nil, opts.Spent.Rules))
	n.secrets.Store(&secretSet{current: opts.Secrets})
	if opts.Peers != nil {
		n.SetNetworks(opts.Peers.Networks)
	}
	if opts.CA != nil {
		n.tls = newEndpoint(opts)
	}
	n.wg.Go(n.sweep)
	return n
}

// unmapped returns the IPv4 form of an address that a dual-stack socket gives.
func unmapped(a netip.AddrPort) netip.AddrPort { return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()) }

// dialExactly connects to an address and cannot be made to connect to another.
func dialExactly(ctx context.Context, addr netip.AddrPort) (*net.TCPConn, error) {
	d := net.Dialer{Control: func(_, address string, _ syscall.RawConn) error {
		if got, err := netip.ParseAddrPort(address); err != nil || unmapped(got) != addr {
			return fmt.Errorf("connect to %s in the place of %s", address, addr)
		}
		return nil
	}}
	c, err := d.DialContext(ctx, "tcp", addr.String())
	if err != nil {
		return nil, err
	}
	t := c.(*net.TCPConn) //nolint:forcetypeassert // of the network tcp
	// The kernel connects to loopback in the place of the unspecified address.
	if got := unmapped(t.RemoteAddr().(*net.TCPAddr).AddrPort()); got != addr { //nolint:forcetypeassert // a *net.TCPConn has no other
		_ = t.Close()
		return nil, fmt.Errorf("connected to %s in the place of %s", got, addr)
	}
	return t, nil
}

// SetPolicy replaces the policy. Connections that the new one refuses are reset. A rule with a
// budget goes on from what the one before with its name has used. What rules that are gone have
// used is forgotten.
func (n *Network) SetPolicy(p *policy.Policy) {
	n.rules.Store(n.newRules(p, n.rules.Load(), nil))
	n.policy.Store(p)
	n.memory.forgetAnswers()
	for _, f := range n.all() {
		f.review(p)
	}
}

func (n *Network) all() []*flow {
	n.mu.Lock()
	defer n.mu.Unlock()
	all := make([]*flow, 0, len(n.flows))
	for f := range n.flows {
		all = append(all, f)
	}
	return all
}

// Close resets all connections and returns when every goroutine of the network has ended and every
// event was handed on. The caller has closed the listeners before.
func (n *Network) Close() {
	n.mu.Lock()
	closed := n.closed
	n.closed = true
	n.mu.Unlock()
	n.cancel()
	for _, f := range n.all() {
		f.abort(errors.New("the network was closed"))
	}
	n.wg.Wait()
	n.recorder.close(!closed)
}

// begin counts work that Close waits for. It reports false once the network is closed.
func (n *Network) begin() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.closed {
		n.wg.Add(1)
	}
	return !n.closed
}

// sweep ends connections that are too slow. One clock for all of them costs less than timers, and a
// test can hold it. The clock of a network without connections stands still: a thousand idle
// networks would wake the process a thousand times a second.
func (n *Network) sweep() {
	ticks := n.opts.Ticks
	var t *time.Ticker
	if ticks == nil {
		t = time.NewTicker(time.Second)
		defer t.Stop()
		ticks = t.C
	}
	for {
		select {
		case <-n.ctx.Done():
			return
		case <-ticks:
		}
		now, all := n.opts.Now(), n.all()
		for _, f := range all {
			f.expire(now)
		}
		if len(all) > 0 || t == nil {
			continue
		}
		t.Stop()
		select {
		case <-n.ctx.Done():
			return
		case <-n.busy:
			t.Reset(time.Second)
		}
	}
}

// wake starts the clock of the sweep.
func (n *Network) wake() {
	select {
	case n.busy <- struct{}{}:
	default: // it runs, or is about to
	}
}

func (n *Network) record(e Event) {
	e.Network = n.opts.ID
	e.Reason = n.redact(e.Reason) // a server may have sent a part of it
	rules := n.rules.Load()
	e.Spent = n.ledger.spent()
	if all := rules.report(); len(all) > 0 {
		if e.Spent == nil {
			e.Spent = new(Spent)
		}
		e.Spent.Rules = all
	}
	if !n.recorder.add(e) && e.Spent != nil {
		n.ledger.untell(e.Spent.Known)
		rules.untell(e.Spent.Rules)
	}
}
