package egress

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/unixmsg"
	"github.com/sandboxd/sandboxd/netns/gateway"
	"github.com/sandboxd/sandboxd/netns/policy"
)

// maxAsks bounds the names that one network asks for at a time, also the connections to peers,
// those to sockets, and the processes. Further ones wait for the replies.
const maxAsks = 32

// An asker sends asks of the gateway's networks to the daemon and hands the replies to the waiting
// callers.
type asker struct {
	send func(*ask) error

	mu     sync.Mutex // guards those below
	number uint64     // of the last ask
	open   map[uint64]*openAsk
}

// openAsk is an ask that has no reply yet.
type openAsk struct {
	reply chan received
	done  func() // called with the reply, also if no caller waits for it
	left  bool   // no caller waits for it
}

// received is a reply and its file, which is nil if there is none.
type received struct {
	reply
	file *os.File
}

func newAsker(send func(*ask) error) *asker {
	return &asker{send: send, open: make(map[uint64]*openAsk)}
}

// ask waits for the reply to an ask. It calls done when the reply is there, whether ctx has ended
// before or not: the daemon has the ask until then.
func (a *asker) ask(ctx context.Context, q ask, done func()) (received, error) {
	w := &openAsk{reply: make(chan received, 1), done: done}
	a.mu.Lock()
	a.number++
	q.Number = a.number
	a.open[q.Number] = w
	a.mu.Unlock()
	if err := a.send(&q); err != nil { // the daemon is gone, and this process ends
		return received{}, err
	}
	select {
	case r := <-w.reply:
		return r, nil
	case <-ctx.Done():
	}
	a.mu.Lock()
	w.left = true
	a.mu.Unlock()
	select {
	case r := <-w.reply: // meanwhile
		return r, nil
	default:
		return received{}, context.Cause(ctx)
	}
}

// deliver hands a reply to the ask that waits for it. It closes the file if none does.
func (a *asker) deliver(r received) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	w := a.open[r.Number]
	delete(a.open, r.Number)
	if w == nil || w.left {
		if r.file != nil {
			_ = r.file.Close()
		}
	} else {
		w.reply <- r
	}
	if w == nil {
		return fmt.Errorf("ask %d has none, or had one", r.Number)
	}
	w.done()
	return nil
}

// openAsks opens the socket for asks, which the daemon sends once and before any network.
func (p *process) openAsks(f *os.File) error {
	if p.asks != nil {
		return errors.New("open the socket for asks: there is one")
	}
	c, err := unixConn(f)
	if err != nil {
		return fmt.Errorf("open the socket for asks: %w", err)
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return errors.Join(fmt.Errorf("open the socket for asks: %w", err), c.Close())
	}
	p.asks, p.asksRaw = c, raw
	go func() {
		if err := p.receiveReplies(); err != nil {
			fmt.Fprintln(os.Stderr, "sandboxd gateway: receive a reply:", err)
			_ = p.conn.Close() // ends serve
		}
	}()
	return nil
}

// sendAsk sends an ask. It waits for a daemon that does not read.
func (p *process) sendAsk(a *ask) error {
	if p.asks == nil {
		return errors.New("send an ask: the daemon has opened no socket for it")
	}
	packet, err := encode(a)
	if err == nil {
		err = askPackets.Send(p.asksRaw, packet)
	}
	if err != nil {
		return fmt.Errorf("send an ask: %w", err)
	}
	return nil
}

// receiveReplies hands replies to those that wait for them until the socket is closed.
func (p *process) receiveReplies() error {
	for {
		var r reply
		fds, err := replyPackets.Receive(p.asksRaw, 0, func(packet []byte) error { return decode(packet, &r) })
		if errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err == nil {
			err = p.replied(&r, unixmsg.Files(fds, "peer"))
		}
		if err != nil {
			return err
		}
	}
}

// replied handles a reply of the daemon and its files.
func (p *process) replied(r *reply, files []*os.File) error {
	got := received{reply: *r}
	if err := r.check(len(files)); err != nil {
		for _, f := range files {
			_ = f.Close()
		}
		return err
	}
	if len(files) > 0 {
		got.file = files[0]
	}
	return p.asker.deliver(got)
}

// peers returns the functions by which a network asks about the sandboxes in its named networks.
func (a *asker) peers(id string, networks []string) *gateway.Peers {
	names, connections := make(chan struct{}, maxAsks), make(chan struct{}, maxAsks)
	asks := func(ctx context.Context, slots chan struct{}, q ask) (received, gateway.Peer, error) {
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return received{}, gateway.Peer{}, context.Cause(ctx)
		}
		q.Network = id
		r, err := a.ask(ctx, q, func() { <-slots })
		switch {
		case err != nil:
			return r, gateway.Peer{}, fmt.Errorf("ask the daemon: %w", err)
		case r.Peer == nil && r.Error == "":
			return r, gateway.Peer{}, gateway.ErrNoPeer
		case r.Peer == nil:
			return r, gateway.Peer{}, gateway.Refused(r.Error)
		case r.Error != "":
			return r, gateway.Peer(*r.Peer), errors.New(r.Error)
		}
		return r, gateway.Peer(*r.Peer), nil
	}
	return &gateway.Peers{
		Networks: networks,
		Find: func(ctx context.Context, name policy.Name) (gateway.Peer, error) {
			r, peer, err := asks(ctx, names, ask{Name: name.String()})
			if r.file != nil { // which no daemon of ours sends
				_ = r.file.Close()
			}
			return peer, err
		},
		Dial: func(ctx context.Context, addr netip.AddrPort) (*net.TCPConn, gateway.Peer, error) {
			r, peer, err := asks(ctx, connections, ask{Dial: addr})
			if err != nil {
				return nil, peer, err
			}
			c, err := connection[*net.TCPConn](r.file)
			return c, peer, err
		},
	}
}

// dialSocket returns what connects a network to the services that its policy has at Unix sockets.
func (a *asker) dialSocket(id string) func(context.Context, uint16) (*net.UnixConn, error) {
	slots := make(chan struct{}, maxAsks)
	return func(ctx context.Context, port uint16) (*net.UnixConn, error) {
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
		r, err := a.ask(ctx, ask{Network: id, Socket: port}, func() { <-slots })
		switch {
		case err != nil:
			return nil, fmt.Errorf("ask the daemon: %w", err)
		case r.Error != "":
			return nil, errors.New(r.Error)
		}
		return connection[*net.UnixConn](r.file)
	}
}

// process returns what finds the processes of a network's flows. Where too many asks are under way
// already, it finds none.
func (a *asker) process(id string) func(context.Context, gateway.Ends) *gateway.Process {
	slots := make(chan struct{}, maxAsks)
	return func(ctx context.Context, of gateway.Ends) *gateway.Process {
		select {
		case slots <- struct{}{}:
		default:
			return nil
		}
		r, err := a.ask(ctx, ask{Network: id, Process: &ends{of.Protocol, of.Program, of.Server}}, func() { <-slots })
		if err != nil || r.Process == nil {
			return nil
		}
		return (*gateway.Process)(r.Process)
	}
}

// connection returns the connection of a file, and closes the file.
func connection[C net.Conn](f *os.File) (none C, _ error) {
	if f == nil {
		return none, errors.New("the daemon has sent no connection")
	}
	c, err := net.FileConn(f)
	if err := errors.Join(err, f.Close()); err != nil {
		return none, fmt.Errorf("open the connection: %w", err)
	}
	t, ok := c.(C)
	if !ok {
		return none, errors.Join(fmt.Errorf("open the connection: it is a %T", c), c.Close())
	}
	return t, nil
}
