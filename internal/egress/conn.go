package egress

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"

	"github.com/sandboxd/sandboxd/internal/unixmsg"
	"github.com/sandboxd/sandboxd/netns/gateway"
)

// errLost is the error of a request whose gateway process has ended, or was given up.
var errLost = errors.New("the gateway process is gone")

// A conn is the connection to one gateway process.
type conn struct {
	socket *net.UnixConn
	raw    syscall.RawConn
	time   clock
	began  time.Time
	event  func(gateway.Event)
	// asks is the socket for asks, of which forProcess is the other end.
	asks       *net.UnixConn
	asksRaw    syscall.RawConn
	forProcess *os.File
	asked      func(*conn, *ask) error // an error ends the connection
	asking     chan struct{}           // closed when no ask is received any more

	hello  chan *hello     // gets the first message
	ended  chan struct{}   // closed when nothing more is received
	report int             // end of a pipe with the report of a crash; -1 until it was asked for
	ctx    context.Context //nolint:containedctx // ends before ended is closed
	cancel context.CancelFunc

	mu      sync.Mutex       // guards those below
	counts  map[*network]int // of asks under way
	number  uint64           // of the last request
	waiting chan answer
	reason  error // of the end
}

// newConn returns the connection of a socket. The caller closes forProcess, which it has passed on.
func newConn(f *os.File, c clock, event func(gateway.Event), asked func(*conn, *ask) error) (_ *conn, err error) {
	n := &conn{
		time: c, began: c.now(), event: event, asked: asked, hello: make(chan *hello, 1), ended: make(chan struct{}), asking: make(chan struct{}), report: -1, counts: make(map[*network]int),
	}
	if n.socket, n.raw, err = rawConn(f); err != nil {
		return nil, err
	}
	ours, theirs, err := unixmsg.Pair(unix.SOCK_SEQPACKET, "asks")
	if err != nil {
		return nil, errors.Join(err, n.socket.Close())
	}
	n.forProcess = theirs
	if n.asks, n.asksRaw, err = rawConn(ours); err != nil {
		return nil, errors.Join(err, theirs.Close(), n.socket.Close())
	}
	n.ctx, n.cancel = context.WithCancel(context.Background())
	go n.receiveAsks()
	go n.receive()
	return n, nil
}

// rawConn returns the connection of a socket's file, and closes the file.
func rawConn(f *os.File) (*net.UnixConn, syscall.RawConn, error) {
	c, err := unixConn(f)
	if err != nil {
		return nil, nil, err
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, nil, errors.Join(err, c.Close())
	}
	return c, raw, nil
}

// passAsks gives the process its end of the socket for asks.
func (c *conn) passAsks() error {
	packet, err := encode(&request{Asks: true})
	if err == nil {
		err = requests.Send(c.raw, packet, int(c.forProcess.Fd()))
	}
	if err != nil {
		return fmt.Errorf("pass on the socket for asks: %w", err)
	}
	return nil
}

// receiveAsks reads asks until the connection ends, or the gateway sends one that none of ours
// sends. No event delays them, whichever network it is of.
func (c *conn) receiveAsks() {
	defer close(c.asking)
	limit := rate.NewLimiter(askRate, askRate)
	for {
		var a ask
		_, err := askPackets.Receive(c.asksRaw, 0, func(packet []byte) error { return decode(packet, &a) })
		switch {
		case errors.Is(err, net.ErrClosed), errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET):
			return // receive knows why
		case err == nil:
			err = a.check()
		}
		if err == nil {
			err = c.asked(c, &a)
		}
		if err != nil {
			c.end(fmt.Errorf("receive an ask of it: %w", err))
			return
		}
		c.pace(limit, 1)
	}
}

// pace waits until a number of things may be read. A gateway that was taken over must not have all
// of the daemon's processor time.
func (c *conn) pace(limit *rate.Limiter, n int) {
	now := c.time.now()
	r := limit.ReserveN(now, n)
	if r.DelayFrom(now) <= 0 {
		return
	}
	select {
	case <-c.time.after(r.DelayFrom(now)):
	case <-c.ctx.Done():
	}
}

// receive reads messages until the gateway ends or sends one that none of ours sends.
func (c *conn) receive() {
	defer close(c.ended)
	defer func() {
		_ = c.asks.Close()
		<-c.asking
	}()
	defer c.socket.Close()
	defer c.cancel()
	limit := rate.NewLimiter(eventRate, eventRate)
	greeted := false
	for {
		var m message
		_, err := messages.Receive(c.raw, 0, func(packet []byte) error { return decode(packet, &m) })
		if err == nil {
			err = m.check()
		}
		switch {
		case err != nil && errors.Is(err, io.EOF):
			c.fail(errors.New("it has ended"))
			return
		case err != nil:
			c.fail(fmt.Errorf("receive from it: %w", err))
			return
		case (m.Hello == nil) != greeted:
			c.fail(errors.New("it has sent a second hello, or none"))
			return
		case m.Hello != nil:
			greeted = true
			c.hello <- m.Hello
			continue
		case m.Answer != nil:
			if err := c.answered(*m.Answer); err != nil {
				c.fail(err)
				return
			}
			continue
		}
		for i := range m.Events {
			e, err := m.Events[i].event()
			if err != nil {
				c.fail(err)
				return
			}
			c.event(e)
		}
		c.pace(limit, len(m.Events)) // an honest gateway drops events and counts them meanwhile
	}
}

// eventRate and askRate are the numbers of events and of asks per second that are read, from all
// networks together. A network has a bounded number of asks under way, so that none waits for long
// behind another one's.
const eventRate, askRate = 20000, 20000

// answered hands an answer to the request that waits for it.
func (c *conn) answered(a answer) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case a.Number == 0 || a.Number > c.number:
		return fmt.Errorf("it has answered request %d of %d", a.Number, c.number)
	case a.Number < c.number || c.waiting == nil:
		return fmt.Errorf("it has answered request %d twice", a.Number)
	}
	c.waiting <- a
	c.waiting = nil
	return nil
}

// fail keeps the first reason for the end of the connection.
func (c *conn) fail(reason error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.reason == nil {
		c.reason = reason
	}
}

// end gives the gateway up. The broker kills it when it starts the next.
func (c *conn) end(reason error) {
	c.fail(reason)
	_ = c.socket.Close()
}

// why returns the reason for the end of the connection.
func (c *conn) why() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.reason
}

// refusedError is the answer of a gateway that has refused a request.
type refusedError string

func (e refusedError) Error() string { return string(e) }

func isRefused(err error) bool {
	_, ok := errors.AsType[refusedError](err)
	return ok
}

// answerIn is the time for an answer. Removing a network takes longest: all its connections end.
const answerIn = 20 * time.Second

// call sends a request with copies of descriptors and waits for the answer, which a process of ours
// sends at once. The caller makes one call at a time. The errors are errLost, a refusedError, and
// those of a request that could not be sent.
func (c *conn) call(r request, fds ...int) error {
	reply := make(chan answer, 1)
	c.mu.Lock()
	c.number++
	r.Number, c.waiting = c.number, reply
	c.mu.Unlock()
	packet, err := encode(&r)
	if err != nil {
		return err
	}
	timeout := c.time.after(answerIn)
	sent := make(chan error, 1)
	go func() { sent <- requests.Send(c.raw, packet, fds...) }() // waits while the gateway does not read
	select {
	case err := <-sent:
		if err := c.unsent(err); err != nil {
			return err
		}
	case <-timeout:
		return c.giveUp(sent)
	}
	select {
	case a := <-reply:
		if a.Error != "" {
			return refusedError(a.Error)
		}
		return nil
	case <-c.ended:
		return errLost
	case <-timeout:
		return c.giveUp(nil)
	}
}

// unsent returns the error of a request that was not sent.
func (c *conn) unsent(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, syscall.EMSGSIZE), errors.Is(err, syscall.ETOOMANYREFS), errors.Is(err, syscall.ENOMEM), errors.Is(err, syscall.ENOBUFS):
		return fmt.Errorf("send to the gateway: %w", err)
	}
	c.end(fmt.Errorf("send to it: %w", err))
	<-c.ended
	return errLost
}

// giveUp ends the connection to a gateway that does not answer, or read.
func (c *conn) giveUp(sent <-chan error) error {
	c.end(fmt.Errorf("it has not answered within %v", answerIn))
	if sent != nil {
		if err := <-sent; err != nil { // until then it has the descriptors
			c.fail(err)
		}
	}
	<-c.ended
	return errLost
}

// clock is the host's, or a test's.
type clock struct {
	now   func() time.Time
	after func(time.Duration) <-chan time.Time
}
