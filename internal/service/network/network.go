// Package network gives running sandboxes a network: it checks what a request asks for, passes the
// sockets of each sandbox's namespace to the gateway, and keeps the gateway's record of flows.
//
//	request ── Check ──▶ the network that the record of the sandbox has
//	create, start, adoption ── Connect ──▶ engine: sockets ──▶ gateway: sockets and document; published ports
//	gateway ── event ──▶ flows/ID.jsonl, followers, totals
//	gateway ── ask ──▶ a running sandbox of a common named network: its address, a connection to it
//	gateway ── ask ──▶ a Unix socket of the host that the policy names: a connection to it
//	end of the sandbox ──▶ the gateway forgets it, its ports are unbound
//
// The gateway is a process of its own, which is started with the first sandbox that has a network.
// Until it serves a sandbox, connections of that wait in the kernel.
package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/egress"
	"github.com/sandboxd/sandboxd/internal/secrets"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/share"
	"github.com/sandboxd/sandboxd/netns/gateway"
	"github.com/sandboxd/sandboxd/netns/policy"
	"github.com/sandboxd/sandboxd/runtime"
)

// Options are the surroundings of all networks.
type Options struct {
	// Dir holds the flows, NamedDir the records of named networks; they are made when they are missing.
	Dir, NamedDir string
	// PortDir holds the Unix sockets of published ports; the first makes it. Other users cannot search
	// its parent, and no other daemon uses it.
	PortDir string
	// Engine has the sandboxes' sockets; nil if it cannot give them a network.
	Engine runtime.Networker
	// Start starts a gateway with a configuration that has Events and Peers. Nil: there is none.
	Start func(ctx context.Context, cfg egress.Config) (*egress.Gateway, error)
	// Ceiling bounds all policies. Nil means no bound for the daemon's own tenant; others may allow
	// everything public.
	Ceiling *policy.Policy
	// Sockets are the names of the host's Unix sockets that policies may open.
	Sockets []string
	// DialSocket connects to one of Sockets, whose path it alone knows.
	DialSocket func(ctx context.Context, name string) (*net.UnixConn, error)
	// Holder returns the process that has a socket, by its inode: of a sandbox, or of one that shares
	// its network. It fails with [ErrNoHolder] without one. Nil: flows have no processes.
	Holder func(ctx context.Context, id string, inode uint32) (api.FlowProcess, error)
	// Secrets are the secrets in the operator's file, by name.
	Secrets map[string]secrets.Secret
	// Store has the secrets that tenants set.
	Store *secrets.Store
	Log   *slog.Logger

	time clock // of sessions of datagrams; zero stands for the host's
}

// Networks are the networks of all sandboxes. Its methods are safe for concurrent use.
type Networks struct {
	opts  Options
	doors doors
	named *namedStore

	starting sync.Mutex // serializes starts of the gateway
	peers    peers

	sources *share.Quota // of datagrams of published ports
	pending *share.Quota // of bytes of datagrams that wait
	dials   *share.Quota // connections to peers and sockets that are not made yet

	forwarded *share.Quota // connections of published ports
	processes *processes

	closing chan struct{}  // closed when Close begins
	work    sync.WaitGroup // acceptors of published ports, and ends of lives

	mu      sync.Mutex
	closed  bool
	gateway *egress.Gateway // nil before the first network
	logs    map[string]*flowLog
	stored  map[string]bool  // sandboxes that have files without a log in logs
	lives   map[string]*life // by sandbox
}

// life is the time in which the gateway serves a sandbox.
type life struct {
	tenant  string      // of the sandbox
	secrets []string    // names of the sandbox's secrets
	behind  atomic.Bool // the gateway has not got the last change of one

	changing  sync.Mutex     // serializes requests to the gateway about it
	accepting sync.WaitGroup // acceptors of its published ports
	over      bool           // needs Networks.mu
	member    *member        // nil until it is entered
	// policy returns the sandbox's policy; the first call parses it. The field needs Networks.mu.
	policy func() (*policy.Policy, error)
}

// Open makes the directory of flows, and clears that of Unix sockets.
func Open(opts Options) (*Networks, error) {
	if err := os.MkdirAll(opts.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the directory of flows: %w", err)
	}
	if opts.time.now == nil {
		opts.time = hostClock()
	}
	n := &Networks{
		opts: opts, doors: doors{dir: opts.PortDir, held: make(map[string]bool)}, closing: make(chan struct{}),
		logs: make(map[string]*flowLog), stored: make(map[string]bool), lives: make(map[string]*life), sources: sourceQuota(), pending: pendingQuota(), dials: dialQuota(),
		forwarded: forwardQuota(), processes: newProcesses(opts.Holder),
	}
	if err := n.doors.sweep(); err != nil {
		return nil, err
	}
	var err error
	n.named, err = openNamed(opts.NamedDir)
	return n, err
}

// Close ends the forwarding of ports and the gateway, and waits for both. It is called after the
// last [Networks.Connect].
func (n *Networks) Close() error {
	n.mu.Lock()
	if !n.closed {
		n.closed = true
		close(n.closing)
	}
	g := n.gateway
	n.gateway = nil
	n.mu.Unlock()
	n.work.Wait()
	var errs []error
	if g != nil {
		errs = append(errs, g.Close())
	}
	for _, l := range n.logs { // after the last event
		errs = append(errs, l.close())
	}
	return errors.Join(errs...)
}

// Check validates the network that a request of a tenant asks for. The zero value becomes
// [api.NetworkNone].
func (n *Networks) Check(tenant string, net api.Network) (api.Network, error) {
	switch net.Mode {
	case "":
		net.Mode = api.NetworkNone
	case api.NetworkNone, api.NetworkFull, api.NetworkEgress:
	case api.NetworkSandbox:
		return net, checkShared(&net)
	default:
		return net, class.Invalidf("network mode %q: must be %s, %s, %s or %s", class.Clip(string(net.Mode)),
			api.NetworkNone, api.NetworkFull, api.NetworkEgress, api.NetworkSandbox)
	}
	if net.Sandbox != "" {
		return net, class.Invalidf("network sandbox: mode %q shares no network; ask for %q", net.Mode, api.NetworkSandbox)
	}
	if net.Mode != api.NetworkEgress && net.Policy != "" {
		return net, class.Invalidf("network policy: mode %q has none; ask for %q", net.Mode, api.NetworkEgress)
	}
	if net.Mode != api.NetworkEgress && len(net.Secrets) > 0 {
		return net, class.Invalidf("network secrets: they are for rules of mode %q that inspect requests", api.NetworkEgress)
	}
	if err := checkJoin(&net); err != nil {
		return net, err
	}
	if !net.HasGateway() {
		if net.Budget != (api.NetworkBudget{}) {
			return net, class.Invalidf("network budget: a sandbox without a network needs none")
		}
		return net, nil
	}
	if net.Mode == api.NetworkEgress && net.Policy == "" {
		return net, class.Invalidf("network policy is missing: mode %q allows what a policy does", api.NetworkEgress)
	}
	if len(net.Policy) > egress.MaxPolicy {
		return net, class.Invalidf("network policy has %d bytes, at most %d are possible", len(net.Policy), egress.MaxPolicy)
	}
	b := net.Budget
	if min(b.BytesOut, b.BytesIn, b.Connections, b.Hosts, b.Queries) < 0 || !(b.ConnectionRate >= 0) || !(b.QueryRate >= 0) {
		return net, class.Invalidf("network budget: a value is negative")
	}
	p, err := policy.Parse(document(net))
	if err != nil {
		return net, class.Invalidf("network policy: %w", err)
	}
	if err := n.checkSecrets(tenant, net.Secrets, p); err != nil {
		return net, err
	}
	return net, n.permitted(tenant, p)
}

// checkShared checks a request for the network of another sandbox, which the caller looks up.
func checkShared(net *api.Network) error {
	if net.Sandbox == "" {
		return class.Invalidf("network sandbox is missing: mode %q shares the network of one", net.Mode)
	}
	if net.Policy != "" || net.Budget != (api.NetworkBudget{}) || len(net.Secrets)+len(net.Join)+len(net.Aliases) > 0 {
		return class.Invalidf("network: policy, budget, secrets and joined networks are those of sandbox %q, whose network is shared", class.Clip(net.Sandbox))
	}
	return nil
}

// permitted reports whether a tenant may have a policy.
func (n *Networks) permitted(tenant string, p *policy.Policy) error {
	ceiling := n.opts.Ceiling
	for _, s := range p.Services() {
		switch {
		case tenant != "":
			return class.Invalidf("network policy: services of the host are the operator's to give")
		case s.Socket != "" && !slices.Contains(n.opts.Sockets, s.Socket):
			return class.Invalidf("network policy: %s: the operator has named no socket %q; name it with serve --service %[2]s=unix:PATH", s.Rule, s.Socket)
		}
	}
	switch {
	case ceiling == nil && tenant == "":
		return nil
	case ceiling == nil:
		ceiling = policy.Public()
	}
	example, wider, err := policy.Widens(ceiling, p)
	if err != nil {
		return class.Invalidf("network policy: compare with the operator's: %w", err)
	}
	if wider {
		return class.Invalidf("network policy: it allows more than the operator does, such as %s", example)
	}
	return nil
}

// Inherit returns the network of a sandbox that is made of a snapshot or of another sandbox. A
// request that names a mode, a policy or a sandbox to share with inherits nothing. Of others, the
// named networks, secrets and budget replace those of the origin. Secrets of the origin that its
// policy can use no more, after a change, are left out: a request for both would be refused.
// Aliases of the origin are its own, as its name is.
func Inherit(ask, from api.Network) api.Network {
	if ask.Mode != "" || ask.Policy != "" || ask.Sandbox != "" {
		return ask
	}
	if p, err := policy.Parse(document(from)); err != nil || !p.Inspects() {
		from.Secrets = nil
	}
	from.Aliases = ask.Aliases
	if len(ask.Join) > 0 {
		from.Join = ask.Join
	}
	if len(ask.Secrets) > 0 {
		from.Secrets = ask.Secrets
	}
	if ask.Budget != (api.NetworkBudget{}) || !from.HasGateway() { // it has left its networks
		from.Budget = ask.Budget
	}
	return from
}

// publicDocument allows all that is public.
var publicDocument = sync.OnceValue(func() []byte {
	d, err := policy.Named("public")
	if err != nil {
		panic(err) // the preset is built in
	}
	return d
})

// document returns the policy document of a network.
func document(net api.Network) []byte {
	switch net.Mode {
	case api.NetworkFull:
		return publicDocument()
	case api.NetworkEgress:
		return []byte(net.Policy)
	case api.NetworkNone, api.NetworkSandbox: // in named networks only, or without a gateway
	}
	return []byte("version: 1\nrules: []\n")
}

// outside returns the network of a sandbox as it is beyond its named networks: if all of these are
// internal, nothing leads out, whatever its mode says.
func (n *Networks) outside(tenant string, net api.Network) api.Network {
	if n.named.internal(tenant, net.Join) {
		net.Mode, net.Policy = api.NetworkNone, ""
	}
	return net
}

func budget(b api.NetworkBudget) gateway.Budget {
	return gateway.Budget{
		BytesOut: b.BytesOut, BytesIn: b.BytesIn, Connections: b.Connections, Hosts: b.Hosts, Queries: b.Queries,
		ConnectionRate: b.ConnectionRate, QueryRate: b.QueryRate,
	}
}

// Connect has the gateway serve a running sandbox, if it has a network, and forwards its published
// ports. It takes over the given ports; if ports is nil, it binds those of the record. The lease is
// of the life that begins; a second call in one life does nothing. The caller ends the lease, and
// puts the mappings, if there are any, into the record: see [api.PortMapping.Chosen].
func (n *Networks) Connect(ctx context.Context, lease *runtime.Lease, ports *Published) ([]api.PortMapping, error) {
	rec := &lease.Record
	if !rec.HasGateway() {
		err := ports.Close()
		if len(rec.Ports) > 0 { // it has left its networks since it was created
			err = errors.Join(class.Mark(class.ErrState, fmt.Errorf("sandbox %s publishes ports, for which it needs a network", rec.Name)), err)
		}
		return nil, err
	}
	id := rec.ID
	n.mu.Lock()
	before := n.lives[id]
	if before != nil && !before.over {
		n.mu.Unlock()
		return nil, ports.Close()
	}
	l := &life{tenant: rec.Tenant, secrets: rec.Network.Secrets, policy: parse(n.outside(rec.Tenant, rec.Network))}
	l.changing.Lock()
	n.lives[id] = l
	n.mu.Unlock()
	rec.Network = lease.Network() // a change from here on sees the life, and waits
	n.mu.Lock()
	l.policy = parse(n.outside(rec.Tenant, rec.Network))
	n.mu.Unlock()
	l.member = n.peers.enter(rec) // before the gateway asks for it
	n.logOf(id).begin(rec.Life)
	ports, err := n.open(ctx, rec, before, ports)
	l.changing.Unlock()
	if err != nil {
		n.end(ctx, id, l)
		return nil, fmt.Errorf("connect sandbox %s to its network: %w", rec.Name, err)
	}
	stop := n.forward(ctx, id, l, ports)
	// The callback may neither block nor call the supervisor. A start that follows sees at once that
	// this life is over.
	lease.AfterGone(func() {
		stop()
		n.peers.leave(l.member)
		n.mu.Lock()
		defer n.mu.Unlock()
		l.over = true
		if !n.closed { // else the gateway ends
			n.work.Go(func() { n.end(context.WithoutCancel(ctx), id, l) })
		}
	})
	return ports.Mappings(), nil
}

// open binds the ports, unless they are given, and has the gateway serve the sandbox. On error no
// port is bound.
func (n *Networks) open(ctx context.Context, rec *runtime.Record, before *life, ports *Published) (_ *Published, err error) {
	if ports == nil {
		if before != nil {
			before.accepting.Wait() // its ports are free then
		}
		if ports, err = n.Publish(ctx, rec.Ports); err != nil {
			return nil, err
		}
	}
	if err := n.add(ctx, rec); err != nil {
		return nil, errors.Join(err, ports.Close())
	}
	return ports, nil
}

func (n *Networks) add(ctx context.Context, rec *runtime.Record) error {
	if n.opts.Engine == nil {
		return fmt.Errorf("%w: the engine has no networks", runtime.ErrUnenforceable)
	}
	g, err := n.started(ctx)
	if err != nil {
		return err
	}
	sockets, err := n.opts.Engine.NetworkSockets(ctx, rec.ID)
	if err != nil {
		return err
	}
	authority, placed, err := n.load(rec.Tenant, rec.ID)
	if err != nil {
		return errors.Join(err, sockets.Close())
	}
	spent, err := newFlowLog(n.opts.Dir, rec.ID).readSpent(rec.Life)
	if err != nil {
		return errors.Join(err, sockets.Close())
	}
	err = g.Add(ctx, egress.Network{
		Spent:     spent,
		Authority: authority, Secrets: placed, ID: rec.ID, Policy: document(n.outside(rec.Tenant, rec.Network)), Budget: budget(rec.Network.Budget), Networks: rec.Network.Join,
		Sockets: egress.Sockets{Stream: sockets.Stream, DNS: sockets.DNS, DNSTCP: sockets.DNSTCP},
	})
	return errors.Join(err, sockets.Close())
}

// started returns the gateway, which it starts if there is none.
func (n *Networks) started(ctx context.Context) (*egress.Gateway, error) {
	n.starting.Lock()
	defer n.starting.Unlock()
	n.mu.Lock()
	g := n.gateway
	n.mu.Unlock()
	if g != nil {
		return g, nil
	}
	if n.opts.Start == nil {
		return nil, fmt.Errorf("%w: this daemon has no gateway", runtime.ErrUnenforceable)
	}
	g, err := n.opts.Start(context.WithoutCancel(ctx), egress.Config{Events: n.record, Peers: egress.Peers{Find: n.peers.find, Dial: n.dialPeer}, DialSocket: n.dialSocket, Process: n.process})
	if err != nil {
		return nil, fmt.Errorf("start the gateway: %w", err)
	}
	n.mu.Lock()
	n.gateway = g
	n.mu.Unlock()
	return g, nil
}

// CheckGateway examines the gateway. One that was not started yet is no fault.
func (n *Networks) CheckGateway() api.Check {
	n.mu.Lock()
	g := n.gateway
	n.mu.Unlock()
	if g == nil {
		return api.Check{Name: egress.CheckName, OK: true, Found: "it starts with the first sandbox that has a network"}
	}
	return g.Check()
}

// end has the gateway forget a life that is over.
func (n *Networks) end(ctx context.Context, id string, l *life) {
	n.peers.leave(l.member)
	l.accepting.Wait()
	l.changing.Lock()
	defer l.changing.Unlock()
	n.mu.Lock()
	l.over = true
	latest := n.lives[id] == l
	if latest {
		delete(n.lives, id)
	}
	g, log := n.gateway, n.logs[id]
	n.mu.Unlock()
	if !latest { // the sandbox was started again, and the gateway serves that life
		return
	}
	if g != nil {
		if err := g.Remove(ctx, id); err != nil {
			n.opts.Log.Warn("the gateway still holds the network of a sandbox that has ended", "id", id, "error", err)
		}
	}
	if log == nil { // deleted
		return
	}
	if err := log.close(); err != nil {
		n.opts.Log.Warn("flows of a sandbox may be incomplete", "id", id, "error", err)
	}
}

// SetNetwork gives a running sandbox the policy and the named networks of its record, which had was
// before. Connections that the policy refuses are reset, and those between the sandbox and others
// with which it shares no network any more. A sandbox that is not served yet gets the network of
// its record when it is. After an error it has was. Calls about one sandbox follow each other.
func (n *Networks) SetNetwork(ctx context.Context, rec *runtime.Record, was api.Network) error {
	id, net := rec.ID, n.outside(rec.Tenant, rec.Network)
	n.mu.Lock()
	l := n.lives[id]
	n.mu.Unlock()
	if l == nil { // it is expected, perhaps, and others have connections to it
		err := n.separate(ctx, id, n.peers.rejoin(id, rec.Name, &net))
		if err != nil {
			n.peers.rejoin(id, rec.Name, &was)
		}
		return err
	}
	l.changing.Lock() // until Connect, which may have an older record, has told the gateway
	defer l.changing.Unlock()
	n.mu.Lock()
	g, over, before := n.gateway, l.over, l.policy
	l.policy = parse(net) // before the gateway asks for a socket that it opens
	n.mu.Unlock()
	if over || g == nil {
		return nil
	}
	left := n.peers.rejoin(id, rec.Name, &net) // before the gateway asks for others in them
	var err error
	joined := !slices.Equal(net.Join, was.Join)
	if joined {
		err = g.SetNetworks(ctx, id, net.Join)
	}
	if err == nil {
		err = g.SetPolicy(ctx, id, document(net))
	}
	if err == nil {
		err = n.separate(ctx, id, left)
	}
	if err == nil {
		return nil
	}
	n.peers.rejoin(id, rec.Name, &was)
	n.mu.Lock()
	l.policy = before
	n.mu.Unlock()
	err = fmt.Errorf("change the network: %w", err)
	restore := context.WithoutCancel(ctx)
	if joined {
		err = errors.Join(err, g.SetNetworks(restore, id, was.Join))
	}
	return errors.Join(err, g.SetPolicy(restore, id, document(n.outside(rec.Tenant, was))))
}

// separate resets the connections between a sandbox and others with which it shares no network any
// more. The daemon makes no further ones.
func (n *Networks) separate(ctx context.Context, id string, left separated) error {
	for _, d := range left.dials { // soon: they were told to end
		select {
		case <-d.done:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	n.mu.Lock()
	g := n.gateway
	n.mu.Unlock()
	if g == nil || len(left.from) == 0 {
		return nil
	}
	var addrs []netip.Addr
	for _, m := range left.from {
		if m.addr.IsValid() {
			addrs = append(addrs, m.addr)
		}
		if !left.addr.IsValid() {
			continue
		}
		if err := g.ResetPeers(ctx, m.id, []netip.Addr{left.addr}); err != nil && !errors.Is(err, egress.ErrNotFound) {
			return err
		}
	}
	if err := g.ResetPeers(ctx, id, addrs); err != nil && !errors.Is(err, egress.ErrNotFound) { // not served yet
		return err
	}
	return nil
}

// keeps notes that a sandbox has files, or is about to get one.
func (n *Networks) keeps(id string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.stored[id] = true
}

func (n *Networks) logOf(id string) *flowLog {
	n.mu.Lock()
	defer n.mu.Unlock()
	l := n.logs[id]
	if l == nil {
		l = newFlowLog(n.opts.Dir, id)
		n.logs[id] = l
	}
	return l
}

// record keeps an event of the gateway.
func (n *Networks) record(e gateway.Event) {
	n.mu.Lock()
	l := n.logs[e.Network]
	n.mu.Unlock()
	if l == nil { // deleted meanwhile
		return
	}
	if err := l.keepSpent(e.Spent); err != nil {
		n.opts.Log.Warn("the use of a sandbox's budget is not on disk: the next daemon counts it anew", "id", e.Network, "error", err)
	}
	if err := l.append(flow(&e)); err != nil {
		n.opts.Log.Warn("flows of a sandbox are not on disk", "id", e.Network, "error", err)
	}
}

// FlowOptions choose flows.
type FlowOptions struct {
	Tail   int  // the last ones only; negative: all that are kept
	Follow bool // go on until the sandbox ends
}

// Flows calls emit for the flows of a sandbox in their order.
func (n *Networks) Flows(ctx context.Context, id string, opts FlowOptions, emit func(api.Flow) error) error {
	n.mu.Lock()
	l := n.logs[id]
	n.mu.Unlock()
	if l == nil {
		l = newFlowLog(n.opts.Dir, id) // of an earlier daemon
	}
	return l.read(ctx, opts.Tail, opts.Follow, emit)
}

// Stats returns the totals of a sandbox since this daemon has served it; nil if it never has.
func (n *Networks) Stats(id string) *api.NetworkStats {
	n.mu.Lock()
	l := n.logs[id]
	n.mu.Unlock()
	if l == nil {
		return nil
	}
	s := l.stats()
	return &s
}

// Forget removes the flows of a deleted sandbox.
func (n *Networks) Forget(id string) error {
	n.mu.Lock()
	l, stored := n.logs[id], n.stored[id]
	delete(n.logs, id)
	delete(n.stored, id)
	n.mu.Unlock()
	if l == nil {
		if !stored {
			return nil // most have no network, and their deletion does not pay for it
		}
		l = newFlowLog(n.opts.Dir, id)
	}
	return errors.Join(l.close(), l.remove())
}

// Sweep removes the flows of sandboxes that do not exist, and learns which have some. It is called
// before a sandbox is deleted.
func (n *Networks) Sweep(exists func(id string) bool) error {
	files, err := os.ReadDir(n.opts.Dir)
	if err != nil {
		return fmt.Errorf("read the directory of flows: %w", err)
	}
	var errs []error
	for _, f := range files {
		id := flowOwner(f.Name())
		if exists(id) {
			n.keeps(id)
		} else if err := newFlowLog(n.opts.Dir, id).remove(); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
