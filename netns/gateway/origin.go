package gateway

import (
	"context"
	"net"
	"net/netip"
	"time"

	"golang.org/x/time/rate"
)

// A Process is the process of a sandbox that has the program's end of a connection. The sandbox's
// init is the source.
type Process struct {
	PID  int    // in its sandbox
	Name string // the kernel's name for it
	Exec string // id of its exec; empty if that has ended
	// Sandbox is the id of a sandbox that shares the network; empty for the network's own.
	Sandbox string
}

// Ends are the two ends of a connection of a program, or of a datagram.
type Ends struct {
	Protocol string // "tcp" or "udp"
	Program  netip.AddrPort
	Server   netip.AddrPort // that the program wanted
}

const (
	// originTime bounds the search for a process.
	originTime = time.Second
	// originRate, a second, and originBurst bound the searches of one network for connections that
	// begin, and once more those for refusals. One takes some hundred microseconds of processor time in
	// the daemon and in the sandbox. Flows beyond the bound are recorded without a process.
	originRate, originBurst = 4, 32
	// maxOrigins bounds the searches of one network at a time.
	maxOrigins = 16
)

// origins finds the processes of one network's flows. A nil value finds none.
type origins struct {
	find    func(context.Context, Ends) *Process
	begun   *rate.Limiter // of connections
	refused *rate.Limiter
	slots   chan struct{}
}

func newOrigins(find func(context.Context, Ends) *Process) *origins {
	if find == nil {
		return nil
	}
	return &origins{find, rate.NewLimiter(originRate, originBurst), rate.NewLimiter(originRate, originBurst), make(chan struct{}, maxOrigins)}
}

// search takes a place for a search, unless there are too many. The caller gives it back.
func (o *origins) search(of *rate.Limiter, now time.Time) bool {
	select {
	case o.slots <- struct{}{}:
	default:
		return false
	}
	if !of.AllowN(now, 1) {
		<-o.slots
		return false
	}
	return true
}

// origin is the search for the process of a flow.
type origin struct {
	done    chan struct{} // closed when process is set
	process *Process
}

// seek begins the search for the process of the flow, which goes on beside it.
func (f *flow) seek(refused bool) {
	o := f.n.origins
	if o == nil || f.origin.Load() != nil {
		return
	}
	limit := o.begun
	if refused {
		limit = o.refused
	}
	if !o.search(limit, f.n.opts.Now()) {
		return
	}
	found := &origin{done: make(chan struct{})}
	if !f.origin.CompareAndSwap(nil, found) {
		<-o.slots
		return
	}
	f.n.wg.Go(func() { // the flow, which runs, is counted there too
		defer close(found.done)
		defer func() { <-o.slots }()
		ctx, cancel := context.WithTimeout(f.n.ctx, originTime)
		defer cancel()
		found.process = o.find(ctx, Ends{"tcp", f.program(), f.dst})
	})
}

// program returns the program's end of the connection.
func (f *flow) program() netip.AddrPort {
	if a, ok := f.client.conn.RemoteAddr().(*net.TCPAddr); ok {
		return unmapped(a.AddrPort())
	}
	return netip.AddrPort{}
}

// holdRefused waits for the process of a flow that is about to be refused: the kernel tells nothing
// about a connection that was reset.
func (f *flow) holdRefused() {
	f.seek(true)
	f.process(true)
}

// process returns the process of the flow, nil if it is not known. With wait it waits for a search
// that has begun.
func (f *flow) process(wait bool) *Process {
	o := f.origin.Load()
	if o == nil {
		return nil
	}
	if wait {
		<-o.done
	}
	select {
	case <-o.done:
		return o.process
	default:
		return nil
	}
}

// tell records an event of the flow.
func (f *flow) tell(e Event) {
	if !e.Allow {
		f.holdRefused()
	}
	e.Process = f.process(!e.Allow || e.Kind == Connection)
	f.n.record(e)
}

// unsought is the origin of a flow whose process is not looked for: its connection is gone.
var unsought = func() *origin {
	o := &origin{done: make(chan struct{})}
	close(o.done)
	return o
}()

// ask returns the search for the process that sent a question which is refused; nil if there are
// too many. The caller calls it once.
func (o *origins) ask(n *Network, ends Ends) func() *Process {
	if o == nil || !o.search(o.refused, n.opts.Now()) {
		return nil
	}
	return func() *Process {
		defer func() { <-o.slots }()
		ctx, cancel := context.WithTimeout(n.ctx, originTime)
		defer cancel()
		return o.find(ctx, ends)
	}
}
