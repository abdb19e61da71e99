package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sandboxd/sandboxd/netns/gateway/sniff"
	"github.com/sandboxd/sandboxd/netns/policy"
)

// A flow is one TCP connection of the sandbox, with the one that it leads to.
type flow struct {
	n      *Network
	dst    netip.AddrPort
	begin  time.Time
	ctx    context.Context //nolint:containedctx // ends with the flow
	cancel context.CancelFunc
	client *stream
	server *stream // nil until it is dialled

	out, in  atomic.Int64
	last     atomic.Int64           // when bytes were last passed on, in ns
	deadline atomic.Int64           // of a head, in ns; 0 if none
	dialBy   atomic.Int64           // of a connection to the server, in ns; 0 if none
	head     atomic.Bool            // counted in Network.heads
	peer     *peer                  // nil unless TLS ends here; set before requests are read
	origin   atomic.Pointer[origin] // nil unless the process is looked for
	places   int                    // of the pool: one, and one for each further server at the same time
	toPeer   atomic.Bool            // it leads to a peer, or asks for a connection to one
	running  sync.WaitGroup         // one until run returns
	charged  atomic.Pointer[charge] // nil before a host is known; of requests of HTTP/2, each has its own

	mu       sync.Mutex // guards those below
	aborted  error      // a *refusal if it was cut for a bound or a new policy
	protocol string
	checked  []policy.Flow // that the policy allowed
	name     policy.Name   // for the record
	verdict  policy.Verdict
	recorded bool             // by the events of its requests
	counted  map[*ledger]bool // of rules that have counted the connection
}

// Serve accepts connections of the sandbox until the listener is closed or ctx ends. Their local
// addresses are the destinations, as those of a transparent listener are. It closes the listener.
func (n *Network) Serve(ctx context.Context, l *net.TCPListener) error {
	defer l.Close()
	if !n.begin() {
		return net.ErrClosed
	}
	defer n.wg.Done()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	defer context.AfterFunc(n.ctx, cancel)() //nolint:contextcheck // the network ends it too
	for {
		c, err := l.AcceptTCP()
		switch {
		case errors.Is(err, net.ErrClosed):
			return nil
		case err != nil && transient(err):
			// Connections wait in the backlog until descriptors or memory are free.
			select {
			case <-ctx.Done():
			case <-time.After(50 * time.Millisecond):
			}
		case err != nil:
			return fmt.Errorf("accept a connection: %w", err)
		default:
			n.accept(c) //nolint:contextcheck // a flow ends with the network
		}
	}
}

// accept starts a flow, or refuses it for a reason that no byte of it could change.
func (n *Network) accept(c *net.TCPConn) {
	// From here on a death of the process is a reset: it must not look like an orderly end.
	_ = c.SetLinger(0) // fails on a connection that is gone
	if n.opts.Quarantined {
		_ = c.Close()
		return
	}
	s, err := newStream(c)
	if err != nil {
		_ = c.Close()
		return
	}
	now := n.opts.Now()
	f := &flow{n: n, dst: n.destination(c), begin: now, client: s, protocol: "tcp"}
	f.last.Store(now.UnixNano())
	f.ctx, f.cancel = context.WithCancel(n.ctx)
	n.mu.Lock()
	open := len(n.flows)
	closed, full := n.closed, open >= n.limits.flows
	ok := !closed && !full && n.places.take(forConnection)
	if ok {
		f.places = 1
		f.running.Add(1)
		n.flows[f] = struct{}{}
		n.wg.Add(1)
	}
	n.mu.Unlock()
	if ok {
		n.wake()
		go f.run()
		return
	}
	f.cancel()
	_ = c.Close()
	f.origin.Store(unsought)
	switch {
	case closed:
	case full:
		f.record(refuse("more than %d connections at once", n.limits.flows))
	default:
		f.record(noPlace(open))
	}
}

// noPlace returns the refusal of a connection for which the pool has no place.
func noPlace(open int) error {
	return refuse("%d connections of this sandbox are open, as many as the gateway's limit of open files allows now", open)
}

// run serves a flow to its end.
func (f *flow) run() {
	defer f.n.wg.Done()
	defer f.running.Done()
	f.seek(false)
	err := f.serve()
	if refused := (*refusal)(nil); errors.As(err, &refused) {
		f.holdRefused()
	}
	if err == nil {
		f.finish(f.client)
		f.finish(f.server)
	}
	f.cancel()
	f.headDone()
	_ = f.client.conn.Close()
	if f.server != nil {
		_ = f.server.conn.Close()
	}
	f.n.places.give(forConnection, f.places) // both are closed
	f.n.mu.Lock()
	delete(f.n.flows, f)
	f.n.mu.Unlock()
	f.record(err)
}

// finish makes the close that follows an orderly one.
func (f *flow) finish(s *stream) {
	if s != nil {
		linger(s.conn, -1)
	}
}

func (f *flow) serve() error {
	if f.dst.Port() == 53 {
		return f.n.serveStream(f)
	}
	if f.n.isPeer(f.dst) {
		return f.servePeer()
	}
	if reason := f.n.ledger.connection(); reason != "" {
		return f.refuseEarly(refuse("%s", reason))
	}
	v, unread := f.n.admit(f.dst)
	if !v.Allow {
		return f.refuseEarly(&refusal{Verdict: v})
	}
	plain, named := f.n.unnamed(f.dst)
	switch {
	case unread:
		named := tcpFlow(policy.Name{}, f.dst)
		if names := f.n.memory.namesOf(f.dst.Addr()); len(names) > 0 {
			named.Name = names[len(names)-1] // most likely meant, for the record
		}
		if err := f.open(v, []policy.Flow{named}); err != nil {
			return f.refuseEarly(err)
		}
		err := f.dial()
		if refused := (*refusal)(nil); errors.As(err, &refused) {
			return f.refuseEarly(err)
		} else if err != nil {
			return err
		}
		return f.relay(f.goDown())
	case f.dst.Port() == 80, f.dst.Port() == 443, !plain.Allow:
		return f.serveWeb()
	default:
		f.note(plain, []policy.Flow{named}) // until the client names another
		if err := f.chargeEarly(charge{flows: []policy.Flow{named}}); err != nil {
			return err
		}
		return f.serveAny()
	}
}

// refuseEarly refuses a connection before its bytes were read. On port 80 it reads them, so that
// the program is told the reason: a response before the request would be taken for none. A client
// that says nothing is reset when the time for a head is over. A shorter time would take the reason
// from programs that are slow.
func (f *flow) refuseEarly(err error) error {
	if f.dst.Port() == 80 && f.waitHead() == nil {
		if kind, kindErr := classify(f.client.reader()); kindErr == nil && kind == kindHTTP {
			return f.proxy(err)
		}
	}
	return err
}

// serveWeb serves a connection whose client has to begin, with TLS or HTTP: on the ports of the
// web, and where all requests have to be read.
func (f *flow) serveWeb() error {
	if err := f.waitHead(); err != nil {
		return err
	}
	kind, err := classify(f.client.reader())
	switch {
	case err != nil:
		return err
	case kind == kindHTTP:
		return f.proxy(nil)
	case kind == kindOther:
		return refuse("neither TLS nor HTTP, which port %d and its rules ask for", f.dst.Port())
	}
	hello, p, err := f.readHello()
	switch {
	case err != nil:
		return err
	case p != nil:
		return f.inspect(hello, p)
	}
	if err := f.dial(); err != nil {
		return err
	}
	return f.relay(f.goDown(), hello)
}

// serveAny serves a connection on another port, where the server may begin.
func (f *flow) serveAny() error {
	if err := f.dial(); err != nil {
		return err
	}
	down := f.goDown()
	// The first byte may be long in coming, and the server may have sent its last before.
	_, err := f.client.reader().Peek(1)
	if errors.Is(err, io.EOF) {
		if err := f.allowUnnamed(); err != nil {
			return f.stop(down, err)
		}
		return f.relay(down)
	}
	if err == nil {
		err = f.waitHead()
	}
	var kind kind
	if err == nil {
		kind, err = classify(f.client.reader())
	}
	if err != nil {
		return f.stop(down, err)
	}
	switch kind {
	case kindOther:
		if err := f.allowUnnamed(); err != nil {
			return f.stop(down, err)
		}
		f.headDone()
		return f.relay(down)
	case kindTLS:
		hello, p, err := f.readHello()
		if err != nil {
			return f.stop(down, err)
		}
		if p == nil {
			return f.relay(down, hello)
		}
		if err := f.takeServer(down); err != nil {
			return err
		}
		return f.inspect(hello, p)
	case kindHTTP:
		err := f.takeServer(down)
		if refused := (*refusal)(nil); errors.As(err, &refused) {
			return err
		}
		return f.proxy(err)
	}
	return fmt.Errorf("protocol %d", kind) // there is no other
}

// takeServer ends the relay from the server, which must not have begun, so that its responses are
// read from the first byte.
func (f *flow) takeServer(down <-chan error) error {
	_ = f.server.conn.SetReadDeadline(past) // ends the relay
	err := <-down
	switch {
	case f.in.Load() > 0:
		return refuse("HTTP to a server that speaks first")
	case !isTimeout(err):
		return fmt.Errorf("%s closed the connection before the request", f.dst)
	}
	_ = f.server.conn.SetReadDeadline(time.Time{}) // a connection that is gone is seen by the next read
	return nil
}

// allowUnnamed asks the policy about a connection in a protocol that names no host.
func (f *flow) allowUnnamed() error {
	v, named := f.n.unnamed(f.dst)
	if !v.Allow {
		return &refusal{Verdict: v}
	}
	return f.open(v, []policy.Flow{named})
}

var past = time.Unix(1, 0)

func isTimeout(err error) bool {
	var e net.Error
	return errors.As(err, &e) && e.Timeout()
}

// stop ends the relay from the server and returns the error that ends the flow.
func (f *flow) stop(down <-chan error, err error) error {
	_ = f.server.conn.Close()
	_ = f.client.conn.Close()
	if first := <-down; first != nil && errors.Is(err, net.ErrClosed) {
		return first
	}
	return err
}

// readHello reads a ClientHello and asks the policy about its name. It returns the bytes that it
// read, and a peer if the requests have to be read.
func (f *flow) readHello() ([]byte, *peer, error) {
	f.setProtocol("tls")
	hello, raw, err := sniff.ReadClientHello(f.client.reader())
	if bad, ok := errors.AsType[*sniff.MalformedError](err); ok {
		return nil, nil, &refusal{Verdict: policy.Verdict{Reason: "the client sent " + bad.Reason}, malformed: true}
	} else if err != nil {
		return nil, nil, err
	}
	flows := f.n.claimed(f.dst, hello.Name)
	v := connect(f.n.policy.Load(), flows)
	switch {
	case !v.Allow:
		return nil, nil, f.refuse(v, hello.Name)
	case v.Inspect && f.n.opts.CA == nil:
		v = policy.Verdict{Rule: v.Rule, Reason: "requests on this connection have to be read, and those in TLS cannot be"}
		return nil, nil, f.refuse(v, hello.Name)
	}
	f.headDone()
	var p *peer
	if v.Inspect {
		p = &peer{name: hello.Name, flows: flows}
		f.charged.Store(nil)
		return raw, p, f.allow(v, flows) // its requests count in the budgets of rules
	}
	return raw, p, f.open(v, flows)
}

// dial connects to the address that the client asked for, or to the service of the host that its
// port stands for.
func (f *flow) dial() error {
	f.dialBy.Store(f.n.opts.Now().Add(f.n.limits.dial).UnixNano())
	defer f.dialBy.Store(0)
	to, err := f.n.target(f.dst)
	if err != nil {
		return err
	}
	if to.Socket != "" {
		c, err := f.n.opts.DialSocket(f.ctx, f.dst.Port())
		if err != nil {
			return fmt.Errorf("connect to %s: %w", to.Target(), err)
		}
		return f.attach(socket{c, to})
	}
	c, err := f.n.opts.Dial(f.ctx, to.Address)
	if err != nil {
		return fmt.Errorf("connect to %s: %w", to.Address, err)
	}
	return f.attach(c)
}

// attach makes a connection the flow's other side.
func (f *flow) attach(c conn) error {
	linger(c, 0) // as for the client
	s, err := newStream(c)
	if err != nil {
		_ = c.Close()
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.aborted != nil {
		_ = c.Close()
		return f.aborted
	}
	f.server = s
	f.touch()
	return nil
}

// relay passes on first and then all that the client sends, and waits for the other direction.
func (f *flow) relay(down <-chan error, first ...[]byte) error {
	var err error
	for _, b := range first {
		if err == nil {
			err = f.send(b)
		}
	}
	for err == nil {
		err = f.splice(f.client, f.server, f.spend, &f.out, f.send)
	}
	if errors.Is(err, io.EOF) {
		f.server.closeWrite()
		err = nil
	}
	if err != nil {
		return f.stop(down, err)
	}
	return <-down
}

// goDown starts the relay from the server. The channel gets nil at its orderly end.
func (f *flow) goDown() <-chan error {
	down := make(chan error, 1)
	go func() { down <- f.down() }()
	return down
}

func (f *flow) down() (err error) {
	for err == nil {
		err = f.splice(f.server, f.client, f.gain, &f.in, f.receive)
	}
	switch {
	case errors.Is(err, io.EOF):
		f.client.closeWrite()
		return nil
	case !isTimeout(err):
		_ = f.client.conn.Close() // the other direction ends with it
	}
	return err
}

// send passes bytes of the client on.
func (f *flow) send(b []byte) error {
	if err := f.spend(len(b)); err != nil {
		return err
	}
	n, err := f.server.write(b)
	f.out.Add(int64(n))
	return err
}

// receive passes bytes of the server on.
func (f *flow) receive(b []byte) error {
	if err := f.gain(len(b)); err != nil {
		return err
	}
	n, err := f.client.write(b)
	f.in.Add(int64(n))
	return err
}

// spend and gain take bytes that will be passed on from the budget.
func (f *flow) spend(n int) error {
	f.touch()
	if reason := f.n.ledger.sent(n); reason != "" {
		return refuse("%s", reason)
	}
	if err := f.charged.Load().sent(n); err != nil {
		f.n.ledger.out.Add(-int64(n))
		return err
	}
	return nil
}

func (f *flow) gain(n int) error {
	f.touch()
	if reason := f.n.ledger.received(n); reason != "" {
		return refuse("%s", reason)
	}
	if err := f.charged.Load().received(n); err != nil {
		f.n.ledger.in.Add(-int64(n))
		return err
	}
	return nil
}

// touch notes that the flow is not idle. It is called before bytes are passed on: afterwards the
// other side may already have acted on them.
func (f *flow) touch() { f.last.Store(f.n.opts.Now().UnixNano()) }

// waitHead starts the time for a head, unless it runs already, and counts it among those of the
// network.
func (f *flow) waitHead() error {
	if f.head.Load() {
		return nil
	}
	f.deadline.Store(f.n.opts.Now().Add(f.n.limits.head).UnixNano())
	f.head.Store(true)
	if f.n.heads.Add(1) > int64(f.n.limits.heads) {
		return refuse("more than %d connections whose first bytes are not complete", f.n.limits.heads)
	}
	return nil
}

// headDone ends the time for a head.
func (f *flow) headDone() {
	f.deadline.Store(0)
	f.touch()
	if f.head.Swap(false) {
		f.n.heads.Add(-1)
	}
}

// expire aborts a flow that is too slow.
func (f *flow) expire(now time.Time) {
	deadline, dialBy := f.deadline.Load(), f.dialBy.Load()
	switch {
	case deadline != 0 && now.UnixNano() >= deadline:
		f.abort(refuse("the first bytes, or a request, were not complete in time"))
	case dialBy != 0 && now.UnixNano() >= dialBy:
		f.abort(fmt.Errorf("connect to %s: no answer in time", f.dst))
	case deadline == 0 && dialBy == 0 && now.Sub(time.Unix(0, f.last.Load())) >= f.n.limits.idle:
		f.abort(errors.New("idle for too long"))
	}
}

// review aborts a flow that a new policy refuses.
func (f *flow) review(p *policy.Policy) {
	f.mu.Lock()
	checked := f.checked
	if c := f.charged.Load(); c != nil {
		f.charged.Store(&charge{c.flows, c.method, c.path, f.n.rules.Load().charged(c.flows, c.method, c.path)})
	}
	f.mu.Unlock()
	if len(checked) == 0 {
		return // it asks the new policy
	}
	f.mu.Lock()
	unread := f.protocol != "http" && f.protocol != "https" && f.protocol != "h2"
	f.mu.Unlock()
	v := connect(p, checked)
	if v.Allow && v.Inspect && unread {
		v = policy.Verdict{Rule: v.Rule, Reason: "requests on this connection have to be read now"}
	}
	if !v.Allow {
		v.Reason = "the policy was changed: " + v.Reason
		f.abort(&refusal{Verdict: v})
	}
}

// abort resets both connections.
func (f *flow) abort(reason error) {
	f.mu.Lock()
	if f.aborted == nil {
		f.aborted = reason
	}
	server := f.server
	f.mu.Unlock()
	f.cancel()
	linger(f.client.conn, 0)
	_ = f.client.conn.Close()
	if server != nil {
		linger(server.conn, 0)
		_ = server.conn.Close()
	}
}

// note keeps a decision for the record and for a change of the policy.
func (f *flow) note(v policy.Verdict, flows []policy.Flow) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.verdict, f.checked, f.name = v, flows, flows[0].Name
}

// allow notes a decision. It refuses a host that is beyond the budget, and a flow that a new policy
// refuses: SetPolicy may have looked at the flow before the decision was noted.
func (f *flow) allow(v policy.Verdict, flows []policy.Flow) error {
	f.note(v, flows)
	if again := connect(f.n.policy.Load(), flows); !again.Allow {
		return &refusal{Verdict: again}
	}
	if reason := f.n.ledger.host(flows[0].Name, f.dst.Addr()); reason != "" {
		return refuse("%s", reason)
	}
	return nil
}

// open allows a connection whose requests are not read, and counts it in the budgets of rules.
func (f *flow) open(v policy.Verdict, flows []policy.Flow) error {
	if err := f.allow(v, flows); err != nil {
		return err
	}
	c, err := f.charge(charge{flows: flows}, 0)
	if err == nil {
		f.charged.Store(c)
	}
	return err
}

// refuse returns the refusal of a name that the client sent, which is kept for the record.
func (f *flow) refuse(v policy.Verdict, name policy.Name) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.name = name
	return &refusal{Verdict: v}
}

func (f *flow) setProtocol(p string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.protocol = p
}

// event returns the parts that all events of the flow have.
func (f *flow) event(kind Kind) Event {
	f.mu.Lock()
	defer f.mu.Unlock()
	return Event{
		Kind: kind, Time: f.begin, Protocol: f.protocol, Name: f.name.String(), Addr: f.dst.Addr(), Port: f.dst.Port(), Allow: true, Rule: f.verdict.Rule,
	}
}

// record records the end of the flow.
func (f *flow) record(err error) {
	e := f.event(Connection)
	e.Duration = f.n.opts.Now().Sub(f.begin)
	e.Out, e.In = f.out.Load(), f.in.Load()
	f.mu.Lock()
	if refused := (*refusal)(nil); f.aborted != nil && !errors.As(err, &refused) {
		err = f.aborted
	}
	recorded := f.recorded && f.server == nil
	f.mu.Unlock()
	e.note(err)
	if e.Allow && e.Protocol == "dns" || recorded {
		return // it led nowhere, however it ended; its questions are recorded
	}
	f.tell(e)
}
