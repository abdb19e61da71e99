package egress

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/kernel"
	"github.com/sandboxd/sandboxd/internal/secrets"
	"github.com/sandboxd/sandboxd/internal/unixmsg"
	"github.com/sandboxd/sandboxd/netns/gateway"
	"github.com/sandboxd/sandboxd/netns/gateway/ca"
	"github.com/sandboxd/sandboxd/netns/policy"
)

// The error classes of this package. ErrInvalid joins the mistakes of a policy; see [policy.Parse].
var (
	ErrInvalid     = errors.New("the network is not valid")
	ErrNotFound    = errors.New("no such network")
	ErrRefused     = errors.New("the gateway refuses the network")
	ErrUnavailable = errors.New("the gateway is not available")
	ErrClosed      = errors.New("the gateway is closed")
)

// CheckName is the name of [Gateway.Check].
const CheckName = "the gateway"

// Config is the surroundings of a gateway.
type Config struct {
	// Start starts a gateway process with the socket, and ends the process before: it is the broker's
	// StartGateway.
	Start func(ctx context.Context, socket *os.File) error
	// Events gets the events of all networks; those of one network one at a time and in their order.
	// Spent of an event is all that processes have told so far; nil if that has not changed.
	// While it blocks, a bounded number waits and the rest is dropped; see [gateway.Event.Lost].
	Events func(gateway.Event)
	// Peers answers the asks of networks about each other. The zero value knows no peers.
	Peers Peers
	// DialSocket connects to the service with a port that the policy of a network has at a Unix
	// socket, within a bounded time. The gateway may have been taken over: the policy is the caller's
	// own copy. Nil: there are no such services.
	DialSocket func(ctx context.Context, network string, port uint16) (*net.UnixConn, error)
	// Process finds the process of a network's sandbox that has the program's end of a connection or
	// datagram, within a bounded time; nil if it is not known. Nil finds none.
	Process func(ctx context.Context, network string, of gateway.Ends) *gateway.Process
	Log     *slog.Logger

	time clock // zero stands for the host's
}

// Network is the network of one sandbox.
type Network struct {
	// ID names the network in events.
	ID string
	// Policy is a document of netns/policy with at most [MaxPolicy] bytes.
	Policy []byte
	// Budget is for the whole life of the network. What was used since the last event before the end
	// of a process is not counted by the next.
	Budget  gateway.Budget
	Sockets Sockets
	// Spent is the part of the budget, and of those of rules, that earlier gateways have told: the
	// latest [gateway.Event.Spent] of the same life.
	Spent gateway.Spent
	// Authority signs the certificates of inspected connections; nil: these are refused.
	Authority *ca.Authority
	// Secrets have placeholders.
	Secrets []secrets.Secret
	// Networks are the named networks that the sandbox is in, at most MaxJoined. It asks
	// Config.Peers if there are any.
	Networks []string
}

// Sockets are the ends of a sandbox's connections, as netns.Make has made them.
type Sockets struct{ Stream, DNS, DNSTCP *os.File }

const (
	// helloIn is the time for the start of a process.
	helloIn = 20 * time.Second
	// firstPause and longestPause are the delays between starts. A process that has run for the
	// longest pause counts as the first.
	firstPause   = 100 * time.Millisecond
	longestPause = 30 * time.Second
	// gapIn is the time that an operation waits for the next process.
	gapIn = 10 * time.Second
	// maxTries bounds the processes that one operation may see end.
	maxTries = 3
	// enough is the number of sandboxes that a daemon may have at a time.
	enough = 1000
)

// Gateway is the daemon's client of the gateway process, which it replaces when it ends. Its
// methods are safe for concurrent use.
type Gateway struct {
	cfg  Config
	ctx  context.Context //nolint:containedctx // ends with Close
	stop context.CancelFunc
	// turn is a semaphore of one. Its holder changes networks, and calls the process.
	turn chan struct{}
	// supervised is closed when no process is replaced any more.
	supervised chan struct{}
	asking     sync.WaitGroup // replies to asks

	mu       sync.Mutex // guards those below
	networks map[string]*network
	conn     *conn         // nil between processes
	ready    chan struct{} // closed when conn is set
	failure  error         // of the last start, or the end of the last process
	hello    hello
}

// network is a network as the next process gets it. Its fields change only in the turn, the record
// not after the first event.
type network struct {
	id     string
	policy []byte
	budget gateway.Budget
	cert   []byte // and key: of the authority
	key    []byte
	secret []secrets.Secret
	joined []string // named networks
	fds    []int    // plain, because files would put the sockets into our poller
	record *record

	// The rest needs Gateway.mu.
	spent       spent
	crashes     int       // that it caused within the window
	crashed     time.Time // the last one
	quarantined bool
}

// Start starts a gateway process. The caller closes the gateway.
func Start(ctx context.Context, cfg Config) (*Gateway, error) {
	if cfg.time.now == nil {
		cfg.time = clock{time.Now, time.After}
	}
	g := &Gateway{
		cfg: cfg, turn: make(chan struct{}, 1), supervised: make(chan struct{}), networks: make(map[string]*network), ready: make(chan struct{}),
	}
	g.ctx, g.stop = context.WithCancel(context.WithoutCancel(ctx))
	c, err := g.start(ctx)
	if err != nil {
		g.stop()
		return nil, fmt.Errorf("start the gateway: %w", err)
	}
	g.publish(c)
	go g.supervise(c)
	return g, nil
}

// start starts a process and waits until it is confined.
func (g *Gateway) start(ctx context.Context) (_ *conn, err error) {
	ours, theirs, err := unixmsg.Pair(unix.SOCK_SEQPACKET, "gateway")
	if err != nil {
		return nil, err
	}
	err = g.cfg.Start(ctx, theirs)
	_ = theirs.Close() // the process has a copy
	if err != nil {
		return nil, errors.Join(err, ours.Close())
	}
	c, err := newConn(ours, g.cfg.time, g.deliver, g.asked)
	if err != nil {
		return nil, err
	}
	defer c.forProcess.Close() // the process has a copy
	select {
	case h := <-c.hello:
		g.mu.Lock()
		g.hello = *h
		g.mu.Unlock()
		if err = errors.Join(c.askForReport(), c.passAsks()); err != nil {
			c.end(err) // it is replaced
		}
		return c, nil
	case <-c.ended:
		return nil, fmt.Errorf("the gateway process has not begun: %w; its own reason is in the daemon's log", c.why())
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-g.cfg.time.after(helloIn):
		err = fmt.Errorf("the gateway process has not begun within %v", helloIn)
	}
	c.end(err)
	<-c.ended
	return nil, err
}

// publish lets operations use a process.
func (g *Gateway) publish(c *conn) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.conn, g.failure = c, nil
	close(g.ready)
	if g.ctx.Err() != nil { // Close did not see it
		c.end(ErrClosed)
	}
}

// deliver hands an event to its network's record. Events of other networks are dropped: the gateway
// may have been taken over.
func (g *Gateway) deliver(e gateway.Event) {
	g.mu.Lock()
	n := g.networks[e.Network]
	if n != nil {
		e.Spent = n.spent.note(e.Spent)
	}
	g.mu.Unlock()
	if n != nil {
		n.record.add(e)
	}
}

// noteEnd makes operations wait for the next process.
func (g *Gateway) noteEnd(c *conn) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.conn == c {
		g.conn, g.ready, g.failure = nil, make(chan struct{}), c.why()
	}
}

// supervise replaces the process whenever it ends, until Close.
func (g *Gateway) supervise(c *conn) {
	defer close(g.supervised)
	pause := time.Duration(0)
	for c != nil {
		<-c.ended
		g.noteEnd(c)
		ended := g.cfg.time.now()
		g.tellEnd(c, ended)
		if g.ctx.Err() != nil {
			return
		}
		if ended.Sub(c.began) >= longestPause {
			pause = 0
		}
		c, pause = g.replace(pause)
	}
}

// tellEnd records the end of a process.
func (g *Gateway) tellEnd(c *conn, at time.Time) {
	culprit, told := g.blame(c, at)
	if g.ctx.Err() != nil {
		return
	}
	g.cfg.Log.Error("the gateway process has ended; connections of sandboxes were reset", "reason", c.why())
	for _, n := range g.all() {
		reason := c.why().Error()
		if n.id == culprit {
			reason = told
		}
		n.record.add(gateway.Event{Network: n.id, Kind: Restarted, Time: at, Reason: clean(reason, maxReason)})
	}
}

// replace starts processes until one has all networks. It waits before each, first for the pause,
// and returns the pause before the next. The process is nil when the gateway was closed.
func (g *Gateway) replace(pause time.Duration) (*conn, time.Duration) {
	for {
		if pause > 0 {
			select {
			case <-g.cfg.time.after(pause):
			case <-g.ctx.Done():
				return nil, 0
			}
		}
		pause = min(max(2*pause, firstPause), longestPause)
		c, err := g.startAgain()
		if g.ctx.Err() != nil {
			if c != nil {
				<-c.ended // publish has seen it
				c.blamed()
			}
			return nil, 0
		}
		if err == nil {
			return c, pause
		}
		g.mu.Lock()
		g.failure = err
		g.mu.Unlock()
		g.cfg.Log.Error("the gateway process was not replaced", "error", err, "next try in", pause)
	}
}

// startAgain starts a process and adds all networks.
func (g *Gateway) startAgain() (*conn, error) {
	c, err := g.start(g.ctx)
	if err != nil {
		return nil, err
	}
	release, err := g.take(g.ctx)
	if err != nil {
		c.end(err)
		<-c.ended
		c.blamed() // nothing was served
		return nil, err
	}
	defer release()
	for _, n := range g.all() {
		g.mu.Lock()
		r := n.request()
		g.mu.Unlock()
		err := c.call(r, n.fds...)
		switch {
		case err == nil:
		case isRefused(err):
			// The process before served it. A change of its policy may help, so it is kept.
			g.cfg.Log.Error("a network was not restored", "network", n.id, "error", err)
		case !errors.Is(err, errLost):
			// The request is too large, with the counted hosts of its budget. Other networks are served.
			g.cfg.Log.Error("a network was not restored", "network", n.id, "error", err)
		default:
			c.end(err)
			<-c.ended
			g.tellEnd(c, g.cfg.time.now()) // it has served the networks before this one
			return nil, fmt.Errorf("restore network %s: %w: %w", n.id, err, c.why())
		}
	}
	g.publish(c)
	return c, nil
}

// all returns the networks in the order of their ids.
func (g *Gateway) all() []*network {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.SortedFunc(maps.Values(g.networks), func(a, b *network) int { return cmp.Compare(a.id, b.id) })
}

// request returns the request to serve a network; the caller holds mu, unless the network is new.
func (n *network) request() request {
	if n.quarantined {
		return request{Add: &add{ID: n.id, Policy: []byte(`{"version": 1, "rules": []}`), Quarantined: true}}
	}
	return request{Add: &add{
		ID: n.id, Policy: n.policy, Budget: n.budget, Spent: n.spent.next(), Certificate: n.cert, Key: n.key, Secrets: n.secret, Networks: n.joined,
	}}
}

// take takes the turn.
func (g *Gateway) take(ctx context.Context) (release func(), err error) {
	select {
	case g.turn <- struct{}{}:
		return func() { <-g.turn }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// process takes the turn when there is a process, for which it waits.
func (g *Gateway) process(ctx context.Context) (_ *conn, release func(), err error) {
	timeout := g.cfg.time.after(gapIn)
	for {
		g.mu.Lock()
		ready := g.ready
		g.mu.Unlock()
		select {
		case <-g.ctx.Done():
			return nil, nil, ErrClosed
		case <-ready:
		case <-ctx.Done():
			return nil, nil, context.Cause(ctx)
		case <-timeout:
			return nil, nil, g.unavailable()
		}
		if release, err = g.take(ctx); err != nil {
			return nil, nil, err
		}
		g.mu.Lock()
		c := g.conn
		g.mu.Unlock()
		if c != nil {
			return c, release, nil
		}
		release() // it has ended meanwhile
	}
}

// unavailable returns ErrUnavailable with the reason.
func (g *Gateway) unavailable() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.failure == nil {
		return ErrUnavailable
	}
	return fmt.Errorf("%w: %w", ErrUnavailable, g.failure)
}

// call makes an operation in the turn, again with the next process where one ends meanwhile.
func (g *Gateway) call(ctx context.Context, do func(*conn) error) error {
	for range maxTries {
		c, release, err := g.process(ctx)
		if err != nil {
			return err
		}
		err = do(c)
		if errors.Is(err, errLost) {
			g.noteEnd(c)
			release()
			continue
		}
		release()
		if isRefused(err) {
			return fmt.Errorf("%w: %w", ErrRefused, err)
		}
		return err
	}
	return g.unavailable()
}

// Add serves a network, and replaces one that has its ID: the sandbox was started again, so that
// its budget begins anew, and crashes of the life before do not count. The sockets stay the
// caller's: the gateway has copies. After an error the network is not served, or served as before.
func (g *Gateway) Add(ctx context.Context, n Network) error {
	added := &network{id: n.ID, policy: slices.Clone(n.Policy), budget: n.Budget, secret: slices.Clone(n.Secrets), joined: slices.Clone(n.Networks)}
	if n.Authority != nil {
		key, err := n.Authority.Key()
		if err != nil {
			return fmt.Errorf("add network %.40q: %w", n.ID, err)
		}
		added.cert, added.key = n.Authority.Certificate(), key
	}
	r := added.request()
	parsed, err := validate(&r, 3, n.Policy)
	if err != nil {
		return fmt.Errorf("add network %.40q: %w", n.ID, err)
	}
	added.spent.limit(parsed.Budgets())
	added.spent.note(&n.Spent)
	r = added.request()
	if err := r.check(3); err != nil {
		return fmt.Errorf("add network %.40q: %w: %w", n.ID, ErrInvalid, err)
	}
	for _, f := range []*os.File{n.Sockets.Stream, n.Sockets.DNS, n.Sockets.DNSTCP} {
		fd, err := duplicate(f)
		if err != nil {
			added.close()
			return fmt.Errorf("add network %s: copy its sockets: %w", n.ID, err)
		}
		added.fds = append(added.fds, fd)
	}
	err = g.call(ctx, func(c *conn) error {
		g.mu.Lock()
		old := g.networks[n.ID]
		if added.record = newRecord(g.cfg.Events); old != nil {
			added.record.close()
			added.record = old.record
		}
		g.networks[n.ID] = added // before the first event
		g.mu.Unlock()
		err := c.call(r, added.fds...)
		switch {
		case err == nil && old != nil:
			old.close()
		case err == nil:
		case old != nil:
			g.mu.Lock()
			g.networks[n.ID] = old
			g.mu.Unlock()
		default:
			g.forget(added)
		}
		return err
	})
	if err != nil {
		added.close()
		return fmt.Errorf("add network %s: %w", n.ID, err)
	}
	return nil
}

// validate reports a request that the gateway would refuse, whether it is there or not. The error
// has the mistakes of the policy.
func validate(r *request, files int, doc []byte) (*policy.Policy, error) {
	if err := r.check(files); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	p, err := policy.Parse(doc)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return p, nil
}

// duplicate returns a copy of a file's descriptor.
func duplicate(f *os.File) (fd int, err error) {
	raw, err := f.SyscallConn() // not Fd, which may make the socket block
	if err != nil {
		return -1, err
	}
	if controlErr := raw.Control(func(from uintptr) { fd, err = unix.FcntlInt(from, unix.F_DUPFD_CLOEXEC, 0) }); controlErr != nil {
		return -1, controlErr
	}
	return fd, err
}

// close closes the copies of the sockets.
func (n *network) close() {
	for _, fd := range n.fds {
		_ = unix.Close(fd)
	}
	n.fds = nil
}

// forget removes a network whose events end.
func (g *Gateway) forget(n *network) {
	g.mu.Lock()
	delete(g.networks, n.id)
	g.mu.Unlock()
	n.record.close()
}

// SetPolicy replaces the policy of a network. Connections that the new one refuses are reset. A
// rule with a budget goes on from what the one before with its name has used, and what rules that
// are gone have used is forgotten. SetPolicy needs no process: the next one gets the new policy.
func (g *Gateway) SetPolicy(ctx context.Context, id string, doc []byte) error {
	r := request{SetPolicy: &setPolicy{ID: id, Policy: slices.Clone(doc)}}
	parsed, err := validate(&r, 0, doc)
	if err != nil {
		return fmt.Errorf("set policy of network %.40q: %w", id, err)
	}
	_, err = g.change(ctx, r, id, func(n *network) {
		n.policy = r.SetPolicy.Policy
		g.mu.Lock()
		defer g.mu.Unlock()
		n.spent.limit(parsed.Budgets())
	})
	if err != nil {
		return fmt.Errorf("set policy of network %s: %w", id, err)
	}
	return nil
}

// SetNetworks replaces the named networks that a sandbox is in. Connections go on. It needs no
// process: the next one gets the new networks.
func (g *Gateway) SetNetworks(ctx context.Context, id string, names []string) error {
	r := request{SetNetworks: &setNetworks{ID: id, Networks: slices.Clone(names)}}
	if err := r.check(0); err != nil {
		return fmt.Errorf("set named networks of network %.40q: %w: %w", id, ErrInvalid, err)
	}
	_, err := g.change(ctx, r, id, func(n *network) { n.joined = r.SetNetworks.Networks })
	if err != nil {
		return fmt.Errorf("set named networks of network %s: %w", id, err)
	}
	return nil
}

// ResetPeers resets the connections of a network to the peers with these addresses. Config.Peers
// refuses further ones already. It returns when the process has reset them. The connections of a
// process that ends meanwhile end with it, for certain when the next one has started; ResetPeers
// waits for that.
func (g *Gateway) ResetPeers(ctx context.Context, id string, peers []netip.Addr) error {
	for some := range slices.Chunk(peers, maxReset) {
		r := request{ResetPeers: &resetPeers{ID: id, Peers: some}}
		err := r.check(0)
		if err != nil {
			err = fmt.Errorf("%w: %w", ErrInvalid, err)
		} else {
			err = g.call(ctx, func(c *conn) error {
				g.mu.Lock()
				n := g.networks[id]
				g.mu.Unlock()
				if n == nil {
					return ErrNotFound
				}
				return c.call(r)
			})
		}
		if err != nil {
			return fmt.Errorf("reset connections to peers of network %.40q: %w", id, err)
		}
	}
	return nil
}

// change sends a request about a network to the process, if there is one. Unless it refuses, change
// makes the change for the next.
func (g *Gateway) change(ctx context.Context, r request, id string, change func(*network)) (*network, error) {
	release, err := g.take(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	g.mu.Lock()
	n, c := g.networks[id], g.conn
	g.mu.Unlock()
	switch {
	case g.ctx.Err() != nil:
		return nil, ErrClosed
	case n == nil:
		return nil, ErrNotFound
	}
	if c != nil {
		switch err := c.call(r); {
		case errors.Is(err, errLost):
			g.noteEnd(c)
		case isRefused(err):
			return nil, fmt.Errorf("%w: %w", ErrRefused, err)
		case err != nil:
			return nil, err
		}
	}
	change(n)
	return n, nil
}

// Remove ends the service of a network and resets its connections. When it returns nil, no event of
// the network follows. It needs no process.
func (g *Gateway) Remove(ctx context.Context, id string) error {
	n, err := g.change(ctx, request{Remove: &remove{ID: id}}, id, func(n *network) {
		g.forget(n)
		n.close()
	})
	if err != nil {
		return fmt.Errorf("remove network %.40q: %w", id, err)
	}
	select {
	case <-n.record.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("remove network %s: hand on its events: %w", id, context.Cause(ctx))
	}
}

// Close ends the process and returns when all events were handed on. Further operations fail with
// ErrClosed.
func (g *Gateway) Close() error {
	g.stop()
	g.mu.Lock()
	c := g.conn
	g.mu.Unlock()
	var err error
	if c != nil {
		_ = c.socket.CloseWrite() // fails if the process has ended
		select {
		case <-c.ended:
		case <-g.cfg.time.after(answerIn):
			err = fmt.Errorf("close the gateway: the process has not ended within %v", answerIn)
			c.end(err)
		}
	}
	<-g.supervised
	g.asking.Wait()
	g.turn <- struct{}{} // operations that saw the process end return
	defer func() { <-g.turn }()
	for _, n := range g.all() {
		g.forget(n)
		n.close()
		<-n.record.done
	}
	return err
}

// quarantined returns the number of networks that are refused everything. The caller holds mu.
func (g *Gateway) quarantined() (n int) {
	for _, of := range g.networks {
		if of.quarantined {
			n++
		}
	}
	return n
}

// Check reports for doctor how the process is confined.
func (g *Gateway) Check() api.Check {
	g.mu.Lock()
	defer g.mu.Unlock()
	c := api.Check{
		Name: CheckName, OK: g.conn != nil && g.hello.Landlock > 0,
		Found:  fmt.Sprintf("without capabilities, held to its sockets by a filter of system calls and Landlock, ABI %d; serves at most %d sandboxes", g.hello.Landlock, g.hello.Networks),
		Means:  "code that takes the gateway over, from a sandbox or a server, can read files of the daemon's user",
		Remedy: kernel.LandlockRemedy,
	}
	switch {
	case g.conn == nil:
		c.Found, c.Means, c.Remedy = "not running", "sandboxes have no network until it runs", "see the daemon's log"
		if g.failure != nil {
			c.Found += ": " + g.failure.Error()
		}
	case !c.OK:
		c.Found = fmt.Sprintf("without capabilities, held by a filter of system calls; serves at most %d sandboxes", g.hello.Networks)
	}
	if g.conn != nil && g.hello.Networks < enough {
		c.Found += fmt.Sprintf(" (%d take a higher hard limit of open files: ulimit -Hn, LimitNOFILE=)", enough)
	}
	for _, missing := range g.hello.Missing {
		c.Found += "; " + missing
	}
	if n := g.quarantined(); n > 0 {
		c.Found += fmt.Sprintf("; refuses all connections of %d sandboxes that have crashed it %d times", n, maxCrashes)
	}
	return c
}
