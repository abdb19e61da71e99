package network

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/netns"
)

const (
	// maxSources bounds the sources of datagrams that one published port serves at a time.
	maxSources = 256
	// idleSource is the time after which a source that sends nothing is forgotten. A program inside
	// that sends does not keep it.
	idleSource  = time.Minute
	maxDatagram = 64 << 10
)

// clock is the host's, or a test's.
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
	log     *slog.Logger

	answering sync.WaitGroup // goroutines of sources

	mu      sync.Mutex
	sources map[netip.AddrPort]*source
}

// source is one address outside that has sent something.
type source struct {
	inside *net.UDPConn
	last   time.Time // of a datagram from outside; needs datagrams.mu
}

// relayDatagrams relays the datagrams of a published port until ctx ends.
func (n *Networks) relayDatagrams(ctx context.Context, id string, port uint16, outside *net.UDPConn) {
	d := &datagrams{
		outside: outside, time: n.opts.time, most: maxSources, log: n.opts.Log.With("id", id, "port", port),
		dial: func(ctx context.Context) (*net.UDPConn, error) {
			return dial[*net.UDPConn](ctx, n.opts.Engine, id, "udp", port, netns.Connect)
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
		for _, s := range d.sources {
			_ = s.inside.Close()
		}
		d.mu.Unlock()
		d.answering.Wait()
	}()
	data := make([]byte, maxDatagram)
	failed := false
	for {
		n, from, err := d.outside.ReadFromUDPAddrPort(data)
		if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // an ICMP error about an earlier answer
		}
		s, err := d.of(ctx, from)
		if err != nil && !failed {
			d.log.Warn("datagrams to a published port are lost", "error", err)
		}
		failed = err != nil
		if s != nil {
			_, _ = s.inside.Write(data[:n]) // as lost as any datagram if nothing listens
		}
	}
}

// of returns the source with an address, which is new or known. It returns nil if there are too
// many: its datagrams are lost until another one is idle.
func (d *datagrams) of(ctx context.Context, from netip.AddrPort) (*source, error) {
	d.mu.Lock()
	s := d.sources[from]
	full := len(d.sources) >= d.most
	if s != nil {
		s.last = d.time.now()
	}
	d.mu.Unlock()
	if s != nil || full {
		return s, nil
	}
	inside, err := d.dial(ctx)
	if err != nil {
		return nil, err
	}
	s = &source{inside: inside, last: d.time.now()}
	d.mu.Lock()
	d.sources[from] = s
	d.mu.Unlock()
	d.answering.Go(func() { d.answer(s, from) })
	return s, nil
}

// answer sends what the sandbox answers to a source, until its socket is closed or fails: a further
// datagram of the source gets another one.
func (d *datagrams) answer(s *source, to netip.AddrPort) {
	defer func() {
		d.mu.Lock()
		if d.sources[to] == s {
			delete(d.sources, to)
		}
		d.mu.Unlock()
		_ = s.inside.Close() // a second time after sweep
	}()
	conn, err := s.inside.SyscallConn()
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
			if d.time.now().Sub(s.last) >= idleSource {
				_ = s.inside.Close() // ends answer
				delete(d.sources, from)
			}
		}
		d.mu.Unlock()
	}
}
