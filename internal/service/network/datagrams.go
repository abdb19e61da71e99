package network

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/service/share"
	"github.com/sandboxd/sandboxd/netns"
)

const (
	// maxSources bounds the sources of datagrams that one published port serves at a time.
	maxSources = 256
	// maxPending bounds the datagrams of a source whose socket is not made yet. Further ones are lost.
	maxPending = 4
	// idleSource is the time after which a source that sends nothing is forgotten. A program inside
	// that sends does not keep it.
	idleSource  = time.Minute
	maxDatagram = 64 << 10
)

// sourceQuota bounds the sources of datagrams of all ports. Each has a descriptor and a goroutine.
func sourceQuota() *share.Quota {
	return &share.Quota{What: "sources of datagrams", Sandbox: 512, Tenant: 1024, All: 2048}
}

// pendingQuota bounds the bytes of datagrams whose sources have no socket yet.
func pendingQuota() *share.Quota {
	return &share.Quota{What: "bytes of datagrams that wait", Sandbox: 1 << 20, Tenant: 8 << 20, All: 16 << 20}
}

// clock is the time of sessions: the host's clock, or one that a test moves.
type clock struct {
	now func() time.Time
	// tick returns a channel that gets a time now and then, until stop is called.
	tick func() (ticks <-chan time.Time, stop func())
}

func hostClock() clock {
	return clock{now: time.Now, tick: func() (<-chan time.Time, func()) {
		t := time.NewTicker(idleSource / 4)
		return t.C, t.Stop
	}}
}

// datagrams relays the datagrams of one published port. Each source outside has a socket of its own
// inside, so that answers find their way.
type datagrams struct {
	outside *net.UDPConn
	dial    func(ctx context.Context) (*net.UDPConn, error)
	time    clock
	most    int // sources
	owner   share.Owner
	quota   *share.Quota // of sources
	waiting *share.Quota // of bytes of pending datagrams
	log     *slog.Logger

	working sync.WaitGroup // goroutines of sources

	mu      sync.Mutex // guards those below
	sources map[netip.AddrPort]*source
	failed  bool // a source got no socket; the next one that gets one ends it
}

// source is one address outside that has sent something. Its fields need datagrams.mu.
type source struct {
	inside  *net.UDPConn // nil while it is made
	last    time.Time    // of a datagram from outside
	pending [][]byte     // until inside is made
}

// relayDatagrams relays the datagrams of a published port until ctx ends.
func (n *Networks) relayDatagrams(ctx context.Context, of share.Owner, port uint16, outside *net.UDPConn) {
	d := &datagrams{
		outside: outside, time: n.opts.time, most: maxSources, owner: of, quota: n.sources, waiting: n.pending, log: n.opts.Log.With("id", of.ID, "port", port),
		dial: func(ctx context.Context) (*net.UDPConn, error) {
			return dial[*net.UDPConn](ctx, n.opts.Engine, of.ID, "udp", port, netns.Connect)
		},
	}
	d.run(ctx)
}

// run returns when ctx has ended, or the socket was closed, and closes all sockets.
func (d *datagrams) run(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer d.outside.Close()
	defer context.AfterFunc(ctx, func() { _ = d.outside.Close() })() // ends the read
	d.sources = make(map[netip.AddrPort]*source)
	var sweeping sync.WaitGroup
	sweeping.Go(func() { d.sweep(ctx) })
	defer func() {
		cancel()
		sweeping.Wait()
		d.mu.Lock()
		for from, s := range d.sources {
			d.forget(from, s)
		}
		d.mu.Unlock()
		d.working.Wait()
	}()
	data := make([]byte, maxDatagram)
	for {
		n, from, err := d.outside.ReadFromUDPAddrPort(data)
		if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // an ICMP error about an earlier answer
		}
		if inside := d.of(ctx, from, data[:n]); inside != nil {
			_, _ = inside.Write(data[:n]) // as lost as any datagram if nothing listens
		}
	}
}

// of returns the socket of the source that has sent a datagram. It returns nil if there is none
// yet: the datagram is pending then, or lost if there are too many.
func (d *datagrams) of(ctx context.Context, from netip.AddrPort, data []byte) *net.UDPConn {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := d.sources[from]
	switch {
	case s != nil:
	case len(d.sources) >= d.most:
		return nil
	default:
		if err := d.quota.Take(d.owner, 1); err != nil {
			d.fail(err)
			return nil
		}
		s = new(source)
		d.sources[from] = s
		d.working.Go(func() { d.open(ctx, s, from) })
	}
	s.last = d.time.now()
	if s.inside == nil && len(s.pending) < maxPending && d.waiting.Take(d.owner, len(data)) == nil {
		s.pending = append(s.pending, slices.Clone(data))
	}
	return s.inside
}

// fail logs the first failure of several. It needs mu.
func (d *datagrams) fail(err error) {
	if !d.failed {
		d.log.Warn("datagrams to a published port are lost", "error", err)
	}
	d.failed = true
}

// open makes the socket of a source, sends what is pending, and then relays answers. One slow
// sandbox holds up no other source of the port, nor the sources that have their sockets.
func (d *datagrams) open(ctx context.Context, s *source, from netip.AddrPort) {
	inside, err := d.dial(ctx)
	d.mu.Lock()
	switch {
	case err != nil && d.sources[from] == s: // else run ends
		d.forget(from, s)
		d.fail(err)
	case err == nil && d.sources[from] != s:
		_ = inside.Close()
	case err == nil:
		s.inside, d.failed = inside, false
		for _, data := range s.pending {
			_, _ = inside.Write(data) // before those that follow
		}
		d.settle(s)
	}
	d.mu.Unlock()
	if err == nil {
		d.answer(inside, s, from)
	}
}

// settle drops the pending datagrams of a source. It needs mu.
func (d *datagrams) settle(s *source) {
	for _, data := range s.pending {
		d.waiting.Give(d.owner, len(data))
	}
	s.pending = nil
}

// forget removes a source, which was not removed yet, and closes its socket. It needs mu.
func (d *datagrams) forget(from netip.AddrPort, s *source) {
	if s.inside != nil {
		_ = s.inside.Close() // ends answer
	}
	delete(d.sources, from)
	d.settle(s)
	d.quota.Give(d.owner, 1)
}

// answer sends what the sandbox answers to a source, until its socket is closed or fails: a further
// datagram of the source gets another one.
func (d *datagrams) answer(inside *net.UDPConn, s *source, to netip.AddrPort) {
	defer func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.sources[to] == s {
			d.forget(to, s)
		}
	}()
	conn, err := inside.SyscallConn()
	if err != nil {
		return
	}
	for {
		data, release, err := receive(conn)
		if errors.Is(err, unix.ECONNREFUSED) {
			continue // nothing listens yet, or any more
		}
		if err != nil {
			return
		}
		_, _ = d.outside.WriteToUDPAddrPort(data, to) // as lost as any datagram
		release()
	}
}

var buffers = sync.Pool{New: func() any { return new([maxDatagram]byte) }}

// receive returns the next datagram, in a buffer that release gives back. Idle sources have none.
func receive(conn syscall.RawConn) (data []byte, release func(), err error) {
	var failed error
	err = conn.Read(func(fd uintptr) bool {
		buffer := buffers.Get().(*[maxDatagram]byte) //nolint:forcetypeassert // nothing else is put there
		n, _, err := unix.Recvfrom(int(fd), buffer[:], unix.MSG_DONTWAIT)
		for errors.Is(err, unix.EINTR) {
			n, _, err = unix.Recvfrom(int(fd), buffer[:], unix.MSG_DONTWAIT)
		}
		if failed = err; err != nil {
			buffers.Put(buffer)
			return !errors.Is(err, unix.EAGAIN)
		}
		data, release = buffer[:n], func() { buffers.Put(buffer) }
		return true
	})
	if err == nil {
		err = failed
	}
	return data, release, err
}

// sweep forgets sources that are idle.
func (d *datagrams) sweep(ctx context.Context) {
	ticks, stop := d.time.tick()
	defer stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticks:
		}
		d.mu.Lock()
		for from, s := range d.sources {
			// One whose socket is not made yet ends with the attempt.
			if s.inside != nil && d.time.now().Sub(s.last) >= idleSource {
				d.forget(from, s)
			}
		}
		d.mu.Unlock()
	}
}
