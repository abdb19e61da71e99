package gateway

import (
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/netns/gateway/sniff"
	"github.com/sandboxd/sandboxd/netns/policy"
)

const (
	maxInterim = 32 // responses such as 100 and 103 before the one to a request

	// A client that is answered before it has sent its whole request must be read on for a while: a
	// close with bytes unread is a reset, which destroys the answer on its way.
	lingerBytes = 16 << 20
	lingerTime  = 2 * time.Second
)

// A proxy passes the requests and responses of one connection on, one exchange at a time. Requests
// are read by one goroutine and responses by another, so that both sides are watched while the
// connection is idle.
type proxy struct {
	*flow
	pending chan *exchange // to the goroutine of responses
	ended   chan struct{}  // closed at the end of that goroutine; nil before the first request
	downErr error          // of an upgraded connection; set before ended is closed
}

// An exchange is a request on its way to the server, with its response.
type exchange struct {
	request *sniff.Request

	mu        sync.Mutex // guards those below
	begun     bool       // a byte of the body was passed on, or the client was told to send it
	complete  bool       // so was the whole body
	withdrawn bool       // the response ended first, or came in the place of 100; no more is passed on

	done chan struct{} // closed when those below are set
	end  responseEnd
}

// A responseEnd is how the response of an exchange ended.
type responseEnd struct {
	status   int
	upgraded bool
	last     bool // the connection ends with it
	err      error
}

var (
	errWithdrawn = errors.New("the server answered before the whole request")
	errLast      = errors.New("the connection ends after this response")
)

// proxy serves a connection whose client speaks HTTP. If refused is not nil, the first request is
// answered with it.
func (f *flow) proxy(refused error) error {
	if f.peer == nil {
		f.setProtocol("http")
	} else {
		f.setProtocol("https")
	}
	p := &proxy{flow: f, pending: make(chan *exchange, 1)}
	err := p.requests(refused)
	orderly := err == nil || errors.Is(err, errLast)
	if p.ended != nil {
		if !orderly {
			_ = f.server.conn.Close()
			_ = f.client.conn.Close() // a response may be on its way to it
		}
		_ = f.server.conn.SetReadDeadline(past) // it ends the goroutine of responses
		<-p.ended
	}
	if !orderly {
		return err
	}
	f.client.closeWrite()
	_ = f.client.conn.SetReadDeadline(time.Now().Add(lingerTime)) // of a connection that is gone
	_, _ = io.CopyN(io.Discard, f.client.conn, lingerBytes)       // see lingerBytes
	return nil
}

// requests reads and passes on requests. It returns nil or errLast if every response is whole.
func (p *proxy) requests(refused error) error {
	r := p.client.reader()
	for {
		if _, err := r.Peek(1); errors.Is(err, io.EOF) || p.serverGone(err) {
			return nil
		} else if err != nil {
			return err
		}
		if err := p.waitHead(); err != nil {
			return p.answer(&sniff.Request{}, err)
		}
		q, err := sniff.ReadRequest(r)
		p.headDone()
		var bad *sniff.MalformedError
		switch {
		case errors.As(err, &bad):
			err = &refusal{Verdict: policy.Verdict{Reason: "the request has " + bad.Reason}, malformed: true}
			return p.answer(&sniff.Request{}, err)
		case p.serverGone(err):
			return nil
		case err != nil:
			return err
		case refused != nil:
			return p.answer(q, refused)
		case q.Upgrade == sniff.H2C:
			q.DropUpgrade()
		}
		secret, err := p.admitRequest(q)
		if err != nil {
			return p.answer(q, err)
		}
		if err := p.exchange(q, secret); err != nil {
			return err
		}
	}
}

// serverGone reports whether an error of reading from the client means that the server has ended
// the connection while no request was under way. The goroutine of responses sets a deadline then.
func (p *proxy) serverGone(err error) bool {
	if p.ended == nil || !isTimeout(err) {
		return false
	}
	<-p.ended
	return true
}

// admitRequest asks the policy about a request, puts a secret into it, whose name it returns, and
// dials for the first one.
func (p *proxy) admitRequest(q *sniff.Request) (secret string, err error) {
	_, secret, c, err := p.judge(q, int64(len(q.Raw))+max(0, q.Body.Length))
	if err == nil {
		p.charged.Store(c)
	}
	if err != nil || p.ended != nil {
		return secret, err
	}
	if p.server == nil {
		if err := p.dial(); err != nil {
			return secret, err
		}
	}
	p.ended = make(chan struct{})
	go p.responses()
	return secret, nil
}

// judge asks the policy about a request of a size, counts it in the budgets of rules, and puts
// secrets into it.
func (f *flow) judge(q *sniff.Request, size int64) (v policy.Verdict, secret string, c *charge, err error) {
	flows, v, inspect := f.n.request(f.dst, f.peer, q)
	if !v.Allow {
		return v, "", nil, &refusal{Verdict: v}
	}
	if err := f.allow(v, flows); err != nil {
		return v, "", nil, err
	}
	of := charge{flows: flows}
	if inspect {
		of.method, of.path = q.Method, q.Path
	}
	if c, err = f.charge(of, size); err != nil {
		return v, "", nil, err
	}
	secret, err = f.n.putSecrets(f.dst, f.peer, q)
	return v, secret, c, err
}

// exchange passes one request on and waits for the end of its response. It returns errLast if no
// request may follow.
func (p *proxy) exchange(q *sniff.Request, secret string) error {
	e := &exchange{request: q, done: make(chan struct{}), complete: q.Body == sniff.Body{}}
	event := p.event(Request)
	event.Time, event.Method, event.Path, event.Secret = p.n.opts.Now(), q.Method, q.Path.String(), secret
	out, in := p.out.Load(), p.in.Load()
	p.pending <- e
	err := p.sendRequest(e)
	fatal := err != nil && !endsWithResponse(err)
	if fatal {
		_ = p.server.conn.Close()
		_ = p.client.conn.Close()
	}
	select {
	case <-e.done:
	case <-p.ended:
		select {
		case <-e.done:
		default: // the server ended the idle connection as the request came
			e.end.err = fmt.Errorf("%s closed the connection before the request", p.dst)
		}
	}
	event.Status = e.end.status
	event.Duration = p.n.opts.Now().Sub(event.Time)
	event.Out, event.In = p.out.Load()-out, p.in.Load()-in
	switch {
	case fatal:
	case e.end.err != nil:
		err = e.end.err
	case e.end.upgraded:
		event.Protocol = "websocket"
		p.tell(event)
		return p.upgraded()
	case err != nil || e.end.last:
		p.tell(event)
		return errLast
	}
	event.note(err)
	p.tell(event)
	p.isRecorded()
	if !fatal && (event.Allow && p.in.Load() == 0 || !event.Allow && p.in.Load() == in) {
		status, reason, rule := verdictOf(err)
		return errors.Join(err, p.respond(q, status, reason, rule))
	}
	return err
}

// sendRequest passes the head and body of a request on, and waits for the first byte of the next
// one: until then this is where a reset by the client is seen.
func (p *proxy) sendRequest(e *exchange) error {
	if err := p.send(e.request.Raw); err != nil {
		return err
	}
	err := copyBody(e.request.Body, p.client, func(b []byte, last bool) error {
		e.mu.Lock()
		withdrawn := e.withdrawn
		e.begun, e.complete = true, last // before it is sent: the response may follow at once
		e.mu.Unlock()
		if withdrawn {
			return errWithdrawn
		}
		return p.send(b)
	})
	if bad, ok := errors.AsType[*sniff.MalformedError](err); ok {
		return &refusal{Verdict: policy.Verdict{Reason: "the body of the request has " + bad.Reason}, malformed: true}
	} else if err != nil {
		return err
	}
	if _, err := p.client.reader().Peek(1); !errors.Is(err, io.EOF) {
		return err
	}
	return nil
}

// endsWithResponse reports an error of sendRequest after which the response decides how the
// connection ends. The server may close its half or the whole connection when it has answered.
func endsWithResponse(err error) bool {
	var op *net.OpError
	return errors.Is(err, errWithdrawn) || isTimeout(err) || errors.As(err, &op) && op.Op == "write"
}

// copyBody passes on a body and no byte more. last comes with its last bytes, unless it ends with
// the connection.
func copyBody(b sniff.Body, from *stream, pass func(b []byte, last bool) error) error {
	switch {
	case b.Chunked:
		for {
			line, size, err := sniff.ReadChunk(from.reader())
			if err != nil {
				return err
			}
			if err := pass(line, size == 0); err != nil || size == 0 {
				return err
			}
			err = copyExactly(size, from, func(b []byte, _ bool) error { return pass(b, false) })
			if err != nil {
				return err
			}
			end, err := sniff.ReadChunkEnd(from.reader())
			if err != nil {
				return err
			}
			if err := pass(end, false); err != nil {
				return err
			}
		}
	case b.Length >= 0:
		return copyExactly(b.Length, from, pass)
	default:
		for {
			err := from.chunk(math.MaxInt64, func(b []byte) error { return pass(b, false) })
			if errors.Is(err, io.EOF) {
				return nil
			} else if err != nil {
				return err
			}
		}
	}
}

func copyExactly(left int64, from *stream, pass func(b []byte, last bool) error) error {
	for left > 0 {
		err := from.chunk(left, func(b []byte) error {
			left -= int64(len(b))
			return pass(b, left == 0)
		})
		if errors.Is(err, io.EOF) {
			return io.ErrUnexpectedEOF
		} else if err != nil {
			return err
		}
	}
	return nil
}

// responses passes on one response for each exchange. When the server ends the connection it makes
// the goroutine of requests stop to wait for the client.
func (p *proxy) responses() {
	defer close(p.ended)
	for {
		_, err := p.server.reader().Peek(1)
		var e *exchange
		select {
		case e = <-p.pending:
		default:
			// The end of an idle connection. A response that was not asked for, such as 408, ends it too.
			_ = p.client.conn.SetReadDeadline(past) // stop to wait for the client
			return
		}
		if err != nil {
			e.end.err = fmt.Errorf("read the response of %s: %w", p.dst, err)
		} else {
			e.end = p.response(e)
		}
		last := e.end.last || e.end.err != nil
		if last {
			_ = p.client.conn.SetReadDeadline(past)  // stop to wait for the client
			_ = p.server.conn.SetWriteDeadline(past) // stop to wait for the client
		}
		upgraded := e.end.upgraded
		close(e.done)
		if upgraded {
			p.downErr = p.down()
		}
		if last || upgraded {
			return
		}
	}
}

// response passes on the response of an exchange, with the interim ones before it.
func (p *proxy) response(e *exchange) (end responseEnd) {
	for range maxInterim {
		head, err := sniff.ReadResponse(p.server.reader(), e.request.Method)
		var bad *sniff.MalformedError
		switch {
		case errors.As(err, &bad):
			end.err = fmt.Errorf("read the response of %s: it has %w", p.dst, err)
			return end
		case err != nil:
			end.err = fmt.Errorf("read the response of %s: %w", p.dst, err)
			return end
		}
		end.status = head.Status
		head.Raw = []byte(p.n.redact(string(head.Raw)))
		switch {
		case head.Status == http.StatusSwitchingProtocols && e.request.Upgrade == "":
			end.err = fmt.Errorf("%s changed the protocol without being asked", p.dst)
			return end
		case head.Status == http.StatusSwitchingProtocols:
			end.upgraded = true
			end.err = p.receive(head.Raw)
			return end
		case head.Status < 200:
			e.mu.Lock()
			e.begun = e.begun || head.Status == http.StatusContinue
			e.mu.Unlock()
			if end.err = p.receive(head.Raw); end.err != nil {
				return end
			}
			continue
		}
		e.mu.Lock()
		if e.request.Continue && !e.begun {
			// The client may now send its next request in the place of the body.
			e.withdrawn, end.last = true, true
		}
		e.mu.Unlock()
		// A server that answers early may take the rest of the body for a request of its own. The body is
		// withdrawn before the end of the response is passed on, because the client may wait for that.
		withdraw := func(last bool) {
			e.mu.Lock()
			defer e.mu.Unlock()
			if last && !e.complete {
				e.withdrawn, end.last = true, true
			}
		}
		withdraw(head.Body == sniff.Body{})
		if end.err = p.receive(head.Raw); end.err == nil {
			end.err = copyBody(head.Body, p.server, func(b []byte, last bool) error {
				withdraw(last)
				if last && head.Body.Chunked {
					b = []byte(p.n.redact(string(b))) // the trailers
				}
				return p.receive(b)
			})
		}
		// The server is at its end. One that says so is not waited for.
		end.last = end.last || head.Close || head.Body.Length < 0 && !head.Body.Chunked
		return end
	}
	end.err = fmt.Errorf("%s sent more than %d interim responses", p.dst, maxInterim)
	return end
}

// upgraded passes bytes on unread, in both directions.
func (p *proxy) upgraded() error {
	p.setProtocol("websocket")
	var err error
	for err == nil {
		err = p.splice(p.client, p.server, p.spend, &p.out, p.send)
	}
	if errors.Is(err, io.EOF) {
		p.server.closeWrite()
		<-p.ended
		return p.downErr
	}
	_ = p.server.conn.Close()
	if <-p.ended; p.downErr != nil && errors.Is(err, net.ErrClosed) {
		err = p.downErr
	}
	return err
}

// answer records that a request is not passed on, and tells the client.
func (p *proxy) answer(q *sniff.Request, err error) error {
	e := p.event(Request)
	e.Name = q.Host.Name.String()
	e.Time, e.Method, e.Path = p.n.opts.Now(), q.Method, q.Path.String()
	e.note(err)
	p.tell(e)
	p.isRecorded()
	status, reason, rule := verdictOf(err)
	return p.respond(q, status, reason, rule)
}

// verdictOf returns the status that an error is answered with, and what the client is told.
func verdictOf(err error) (status int, reason, rule string) {
	refused, ok := errors.AsType[*refusal](err)
	switch {
	case !ok:
		return http.StatusBadGateway, err.Error(), ""
	case refused.malformed:
		return http.StatusBadRequest, refused.Reason, refused.Rule
	default:
		return http.StatusForbidden, refused.Reason, refused.Rule
	}
}

// explanation returns the body of a response of the gateway's own.
func (n *Network) explanation(reason, rule string) string {
	text := "sandboxd: " + n.redact(reason) + "\n"
	if rule != "" {
		text += "rule: " + rule + "\n"
	}
	return text
}

// respond sends a response of the gateway's own, the last on its connection.
func (p *proxy) respond(q *sniff.Request, status int, reason, rule string) error {
	text := p.n.explanation(reason, rule)
	var b strings.Builder
	fmt.Fprintf(&b, "HTTP/1.1 %d %s\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: %d\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n",
		status, http.StatusText(status), len(text))
	if q.Method != http.MethodHead {
		b.WriteString(text)
	}
	if _, err := p.client.write([]byte(b.String())); err != nil {
		return err
	}
	return errLast
}

// isRecorded notes that the events of requests tell everything about the flow, unless it led to a
// server.
func (f *flow) isRecorded() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.recorded = true
}
