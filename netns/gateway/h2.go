//nolint:staticcheck // SA1019: net/http, which is to replace it, serves HTTP/2 on a connection of its own kind only
package gateway

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"maps"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/net/http2"

	"github.com/sandboxd/sandboxd/netns/gateway/sniff"
	"github.com/sandboxd/sandboxd/netns/policy"
)

const (
	maxStreams   = 100 // of one connection, to us
	maxUpstreams = 4   // connections to the server for one of the client, all but one of which drain
	// The client is on the same host: a small window for its uploads slows nothing.
	clientWindow, clientStreamWindow = 256 << 10, 64 << 10
	serverWindow, serverStreamWindow = 1 << 20, 512 << 10
	// maxHeadH2 is the largest head that the library reads. Our own limit is half of it, so that most
	// heads that are too large are recorded.
	maxHeadH2 = 128 << 10
	copySize  = 32 << 10
	maxWhole  = 4 << 10 // of a response that is passed on in one piece
)

// An h2 is what all HTTP/2 connections of a network share. The library reads frames and fields of
// both sides and writes its own: no byte of framing or of HPACK passes.
type h2 struct {
	server    *http2.Server
	base      *http.Server
	transport *http2.Transport
	streams   atomic.Int64
}

func newH2() *h2 {
	t1 := &http.Transport{
		DisableCompression: true, // nothing is asked for that the client did not
		HTTP2:              &http.HTTP2Config{MaxReceiveBufferPerConnection: serverWindow, MaxReceiveBufferPerStream: serverStreamWindow},
	}
	transport, err := http2.ConfigureTransports(t1)
	if err != nil {
		panic(err) // of a transport that has HTTP/2 already
	}
	transport.StrictMaxConcurrentStreams = true
	transport.MaxHeaderListSize = maxHeadH2
	return &h2{
		server: &http2.Server{
			MaxConcurrentStreams: maxStreams, MaxReadFrameSize: 16 << 10, MaxDecoderHeaderTableSize: 4096, MaxEncoderHeaderTableSize: 4096,
			MaxUploadBufferPerConnection: clientWindow, MaxUploadBufferPerStream: clientStreamWindow,
		},
		base:      &http.Server{MaxHeaderBytes: maxHeadH2, ErrorLog: log.New(io.Discard, "", 0)}, //nolint:gosec // G112: the sweep ends slow clients
		transport: transport,
	}
}

// A multiplex serves the requests of one HTTP/2 connection, each in a goroutine of the library's.
type multiplex struct {
	*inspection
	client *watched

	mu        sync.Mutex // guards those below
	upstreams []*upstream
	active    int
	closing   bool
	idle      chan struct{} // closed when closing is set and active is 0
}

// An upstream is one HTTP/2 connection to the server.
type upstream struct {
	*tls.Conn
	f        *flow
	stream   *stream
	requests *http2.ClientConn
}

// serveH2 serves a connection whose client speaks HTTP/2.
func (i *inspection) serveH2(client *tls.Conn) error {
	i.setProtocol(protocolH2)
	m := &multiplex{inspection: i, client: newWatched(i.flow, client), idle: make(chan struct{})}
	if i.failed == nil {
		if i.failed = m.add(i.server, i.upstream); i.failed != nil {
			i.dropServer()
		}
	}
	i.n.tls.h2.server.ServeConn(m.client, &http2.ServeConnOpts{Context: i.ctx, BaseConfig: i.n.tls.h2.base, Handler: m})
	m.mu.Lock()
	m.closing = true
	if m.active == 0 {
		close(m.idle)
	}
	m.mu.Unlock()
	<-m.idle
	gaveUp := m.client.end()
	err := i.abortedBy()
	if err == nil {
		err = gaveUp
	}
	for _, u := range m.upstreams {
		if err == nil {
			m.finish(u.stream)
		}
		_ = u.requests.Close() // the requests have ended
	}
	return err
}

// add makes the connection to the server one for requests.
func (m *multiplex) add(s *stream, c *tls.Conn) error {
	u := &upstream{Conn: c, f: m.flow, stream: s}
	var err error
	if u.requests, err = m.n.tls.h2.transport.NewClientConn(u); err != nil {
		return fmt.Errorf("HTTP/2 with %s: %w", m.dst, err)
	}
	m.upstreams = append(m.upstreams, u)
	return nil
}

// Read and Write count what passes. A budget that is used up ends the flow.
func (u *upstream) Read(b []byte) (int, error) {
	n, err := u.Conn.Read(b)
	if n > 0 {
		if over := u.f.gain(n); over != nil {
			u.f.abort(over)
			return 0, over
		}
		u.f.in.Add(int64(n))
	}
	return n, err
}

func (u *upstream) Write(b []byte) (int, error) {
	if over := u.f.spend(len(b)); over != nil {
		u.f.abort(over)
		return 0, over
	}
	n, err := u.Conn.Write(b)
	u.f.out.Add(int64(n))
	return n, err
}

// reserve returns a connection that takes one more request. Where the server has ended the last
// one, as it does when that is idle, it makes another: a client could not tell why its request
// fails.
func (m *multiplex) reserve() (*http2.ClientConn, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	live := m.upstreams[:0]
	for _, u := range m.upstreams {
		if u.requests.State().Closed {
			_ = u.stream.conn.Close()
			continue
		}
		live = append(live, u)
	}
	m.upstreams = live
	for _, u := range live {
		if u.requests.ReserveNewRequest() {
			return u.requests, nil
		}
	}
	if len(live) >= maxUpstreams {
		return nil, fmt.Errorf("%s ends its connections and leaves requests open on %d", m.dst, len(live))
	}
	if len(live) >= m.places {
		if !m.n.places.take(forConnection) {
			return nil, refuse("the gateway's limit of open files allows no further connection to %s now", m.dst)
		}
		m.places++ // until the flow ends
	}
	if reason := m.n.ledger.connection(); reason != "" {
		return nil, refuse("%s", reason)
	}
	if err := m.dial(); err != nil {
		return nil, err
	}
	c, err := m.handshake(m.server, []string{protocolH2})
	if err == nil && agreedProtocol(c) != protocolH2 {
		err = fmt.Errorf("%s does not speak HTTP/2 any more", m.dst)
	}
	if err == nil {
		err = m.add(m.server, c)
	}
	if err != nil {
		m.dropServer()
		return nil, err
	}
	u := m.upstreams[len(m.upstreams)-1]
	if !u.requests.ReserveNewRequest() {
		return nil, fmt.Errorf("%s takes no request", m.dst)
	}
	return u.requests, nil
}

// enter counts a request. It reports false if the connection has ended.
func (m *multiplex) enter() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.closing {
		m.active++
	}
	return !m.closing
}

func (m *multiplex) leave() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.active--; m.active == 0 && m.closing {
		close(m.idle)
	}
}

// ServeHTTP judges one request, and passes it and its response on.
func (m *multiplex) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !m.enter() {
		return
	}
	defer m.leave()
	defer m.n.tls.h2.streams.Add(-1)
	full := m.n.tls.h2.streams.Add(1) > int64(m.n.limits.streams)
	x := &exchange2{multiplex: m, w: w, r: r}
	x.event = m.event(Request)
	x.event.Time = m.n.opts.Now()
	err := x.check()
	if err == nil && full {
		err = refuse("more than %d requests at once", m.n.limits.streams)
	}
	answered := false
	if err == nil {
		answered, err = x.pass(r.Context())
	}
	x.event.note(err)
	x.event.Duration = m.n.opts.Now().Sub(x.event.Time)
	x.event.Out, x.event.In = x.out.Load(), x.in
	if !answered {
		x.answer(err)
	}
	m.tell(x.event) //nolint:contextcheck // a search ends with the network
	m.isRecorded()
	if answered && err != nil {
		panic(http.ErrAbortHandler) // resets the stream: a part must not look like the whole
	}
}

// An exchange2 is one request of HTTP/2 with its response.
type exchange2 struct {
	*multiplex
	w       http.ResponseWriter
	r       *http.Request
	request *sniff.Request
	event   Event
	out     atomic.Int64
	in      int64
	charge  *charge               // in the budgets of rules
	over    atomic.Pointer[error] // of one of these, about the request's body
}

// check asks the policy about the request.
func (x *exchange2) check() (err error) {
	scheme := "https"
	if x.r.TLS == nil {
		scheme = "http"
	}
	var fields []sniff.Field
	for name, values := range x.r.Header {
		for _, v := range values {
			fields = append(fields, sniff.Field{Name: strings.ToLower(name), Value: v})
		}
	}
	x.request, err = sniff.HTTP2Request(x.r.Method, scheme, x.r.Host, x.r.RequestURI, fields, min(x.r.ContentLength, 0))
	q := x.request
	x.event.Name, x.event.Method, x.event.Path = q.Host.Name.String(), q.Method, q.Path.String()
	if bad, ok := errors.AsType[*sniff.MalformedError](err); ok {
		return &refusal{Verdict: policy.Verdict{Reason: "the request has " + bad.Reason}, malformed: true}
	} else if err != nil {
		return err
	}
	for name := range x.r.Trailer {
		if name = strings.ToLower(name); sniff.Decisive(name) {
			return &refusal{Verdict: policy.Verdict{Reason: "the request has the trailer " + name}, malformed: true}
		}
	}
	var v policy.Verdict
	v, x.event.Secret, x.charge, err = x.judge(q, x.headSize()+max(0, x.r.ContentLength))
	x.event.Rule = v.Rule
	if err == nil && x.failed != nil {
		x.event.Secret = "" // it goes nowhere
		return x.failed
	}
	return err
}

// pass sends the request to the server and passes its response on. It reports whether the client
// was answered.
func (x *exchange2) pass(ctx context.Context) (answered bool, err error) {
	c, err := x.reserve()
	if err != nil {
		return false, err
	}
	if err := x.charge.sent(int(x.headSize())); err != nil {
		return false, err
	}
	defer func() {
		if over := x.over.Load(); over != nil && err != nil {
			err = *over
		}
	}()
	response, err := c.RoundTrip(x.outgoing(ctx))
	switch {
	case err != nil && x.over.Load() != nil:
		return false, err
	case err != nil && x.r.Context().Err() != nil:
		return true, x.cancelled()
	case err != nil:
		return false, fmt.Errorf("read the response of %s: %w", x.dst, err)
	case response.StatusCode < 200 || response.StatusCode > 599:
		_ = response.Body.Close()
		return false, fmt.Errorf("read the response of %s: it has the status %d", x.dst, response.StatusCode)
	}
	defer response.Body.Close()
	if err := x.charge.received(fieldsSize(response.Header)); err != nil {
		return false, err
	}
	x.event.Status = response.StatusCode
	header := x.w.Header()
	x.copyFields(header, response.Header, "")
	for _, name := range []string{"Content-Type", "Date"} {
		if _, ok := response.Header[name]; !ok {
			header[name] = nil // or the library adds one
		}
	}
	for name := range response.Trailer {
		header.Add("Trailer", name)
	}
	announced := len(response.Trailer)
	x.client.answered(response.StatusCode)
	x.w.WriteHeader(response.StatusCode)
	flusher := http.NewResponseController(x.w)
	// A small response goes in one piece. Others go as they come: their head first, because the client
	// may wait for it before it sends more.
	whole := response.Body == http.NoBody || 0 <= response.ContentLength && response.ContentLength <= maxWhole
	if !whole {
		_ = flusher.Flush() // an error comes again with the body
	}
	if err := x.copyBody(response.Body, flusher, whole); err != nil {
		return true, err
	}
	prefix := ""
	if err := x.charge.received(fieldsSize(response.Trailer)); err != nil {
		return true, err
	}
	if len(response.Trailer) != announced {
		prefix = http.TrailerPrefix // for those that were not announced
	}
	x.copyFields(header, response.Trailer, prefix)
	return true, nil
}

// cancelled returns why the context of the request has ended.
func (x *exchange2) cancelled() error {
	if err := x.abortedBy(); err != nil {
		return err
	}
	return errors.New("the client cancelled the request")
}

// outgoing returns the request as it goes to the server.
func (x *exchange2) outgoing(ctx context.Context) *http.Request {
	header := make(http.Header, len(x.request.Fields))
	for _, f := range x.request.Fields {
		if f.Name == "host" || f.Name == "expect" { // the body follows at once: the library asks the client for it
			continue
		}
		name := http.CanonicalHeaderKey(f.Name)
		header[name] = append(header[name], f.Value)
	}
	if _, ok := header["User-Agent"]; !ok {
		header["User-Agent"] = nil // or the library adds one
	}
	out := &http.Request{
		Method: x.r.Method, Host: x.r.Host, Header: header, ContentLength: x.r.ContentLength, Trailer: x.r.Trailer,
		// An opaque URL is sent as it is: the server gets the target that was judged.
		URL:  &url.URL{Scheme: "https", Host: x.r.Host, Opaque: x.request.Target},
		Body: &countedBody{x.r.Body, x},
	}
	if x.r.ContentLength == 0 {
		out.Body = nil
	}
	return out.WithContext(ctx)
}

// A countedBody is the body of a request.
type countedBody struct {
	io.ReadCloser
	x *exchange2
}

func (b *countedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	size := n
	if errors.Is(err, io.EOF) {
		size += fieldsSize(b.x.r.Trailer)
	}
	if over := b.x.charge.sent(size); over != nil {
		b.x.over.Store(&over)
		return 0, over
	}
	b.x.out.Add(int64(n))
	return n, err
}

// headSize returns the size of the request's head, at least that of its compressed form.
func (x *exchange2) headSize() int64 {
	size := len(x.r.Method) + len(x.r.Host) + len(x.r.RequestURI)
	for _, f := range x.request.Fields {
		size += len(f.Name) + len(f.Value)
	}
	return int64(size)
}

// fieldsSize returns the size of fields, at least that of their compressed form.
func fieldsSize(all http.Header) (size int) {
	for name, values := range all {
		for _, v := range values {
			size += len(name) + len(v)
		}
	}
	return size
}

// copyFields adds fields of the server without those of its connection.
func (x *exchange2) copyFields(to, from http.Header, prefix string) {
	for name, values := range from {
		if connectional[name] {
			continue
		}
		for _, v := range values {
			to.Add(prefix+name, x.n.redact(v))
		}
	}
}

var connectional = map[string]bool{
	"Connection": true, "Keep-Alive": true, "Proxy-Connection": true, "Transfer-Encoding": true, "Upgrade": true,
}

// copyBody passes a body on, as it comes or when it is whole.
func (x *exchange2) copyBody(from io.Reader, flusher *http.ResponseController, whole bool) error {
	buf := buffers.Get().(*[]byte) //nolint:forcetypeassert // the pool has nothing else
	defer buffers.Put(buf)
	for {
		n, err := from.Read((*buf)[:copySize])
		if n > 0 {
			x.in += int64(n)
			if err := x.charge.received(n); err != nil {
				return err
			}
			if _, err := x.w.Write((*buf)[:n]); err != nil {
				return fmt.Errorf("pass the response on: %w", err)
			}
		}
		if n > 0 && !whole {
			if err := flusher.Flush(); err != nil {
				return fmt.Errorf("pass the response on: %w", err)
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil && x.r.Context().Err() != nil:
			return x.cancelled()
		case err != nil:
			return fmt.Errorf("read the response of %s: %w", x.dst, err)
		}
	}
}

// answer sends a response of the gateway's own.
func (x *exchange2) answer(err error) {
	status, reason, rule := verdictOf(err)
	header := x.w.Header()
	maps.Copy(header, http.Header{"Content-Type": {"text/plain; charset=utf-8"}, "Cache-Control": {"no-store"}})
	x.client.answered(status)
	x.w.WriteHeader(status)
	_, _ = io.WriteString(x.w, x.n.explanation(reason, rule)) // a client that is gone
}
