package gateway

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/sandboxd/sandboxd/netns/policy"
)

const (
	protocolH1 = "http/1.1"
	protocolH2 = "h2"

	maxSessions = 128 // of servers, which a further connection resumes
)

// An endpoint is the state that the inspected TLS connections of one network share. Networks share
// none.
type endpoint struct {
	roots    *x509.CertPool
	rootsErr error // of reading the host's
	sessions tls.ClientSessionCache
	open     atomic.Int64
	h2       *h2

	mu     sync.Mutex           // guards agreed
	agreed map[agreement]string // protocols that servers have agreed to, at most maxSessions
}

// An agreement is the choice of a server between protocols.
type agreement struct {
	host    string
	addr    netip.AddrPort
	offered string
}

// hostRoots reads the certificates of the host once, for all networks of the process.
var hostRoots = sync.OnceValues(x509.SystemCertPool)

func newEndpoint(opts Options) *endpoint {
	e := &endpoint{roots: opts.Roots, sessions: tls.NewLRUClientSessionCache(maxSessions), h2: newH2(), agreed: make(map[agreement]string)}
	if e.roots == nil {
		e.roots, e.rootsErr = hostRoots()
	}
	return e
}

// agreedBefore returns the protocol that a server has agreed to the last time.
func (e *endpoint) agreedBefore(a agreement) (protocol string, ok bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	protocol, ok = e.agreed[a]
	return protocol, ok
}

func (e *endpoint) remember(a agreement, protocol string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if _, ok := e.agreed[a]; !ok && len(e.agreed) >= maxSessions {
		clear(e.agreed) // they only save time
	}
	e.agreed[a] = protocol
}

// An inspection is a flow whose TLS ends here, in both directions.
//
// Both sides speak the same version of HTTP: the server is asked first, for those that the client
// offers, and the client gets the one that was agreed on. No request is translated from one version
// to the other, which is where requests have been split. A server that was asked before is expected
// to choose the same protocol: the two handshakes go on side by side. If it has given HTTP/2 up,
// the requests are refused, and the next connection speaks its new choice.
type inspection struct {
	*flow
	upstream *tls.Conn // nil if failed is set
	failed   error     // every request is answered with it
	offered  []string  // protocols of the client that can be read
	// connecting is closed when upstream and failed are set; nil if they are before the handshake of
	// the client goes on.
	connecting chan struct{}
}

// inspect ends the TLS of a client, of which hello was read, and serves its requests.
func (f *flow) inspect(hello []byte, p *peer) error {
	defer f.n.tls.open.Add(-1)
	if f.n.tls.open.Add(1) > int64(f.n.limits.tls) {
		return refuse("more than %d connections of TLS at once whose requests are read", f.n.limits.tls)
	}
	f.peer = p
	i := &inspection{flow: f}
	conn := &prefixed{conn: f.client.conn, from: io.MultiReader(bytes.NewReader(hello), f.client.reader())}
	if err := f.waitHead(); err != nil {
		return err
	}
	client := tls.Server(conn, &tls.Config{MinVersion: tls.VersionTLS12, GetConfigForClient: i.configure})
	err := client.HandshakeContext(f.ctx)
	if i.connecting != nil {
		if err != nil {
			f.cancel() // ends the attempt to connect
		}
		f.headDone()
		<-i.connecting
	}
	if err != nil {
		return fmt.Errorf("TLS handshake with the client: %w", err)
	}
	if err := f.abortedBy(); err != nil {
		return err
	}
	f.headDone()
	f.client.encrypt(client)
	if client.ConnectionState().NegotiatedProtocol == protocolH2 {
		return i.serveH2(client)
	}
	if i.failed == nil {
		f.server.encrypt(i.upstream)
	}
	return f.proxy(i.failed)
}

// A prefixed connection returns bytes again that were read from it.
type prefixed struct {
	conn
	from io.Reader
}

func (c *prefixed) Read(b []byte) (int, error) { return c.from.Read(b) }

// configure connects to the server and returns how the handshake with the client goes on.
func (i *inspection) configure(hello *tls.ClientHelloInfo) (*tls.Config, error) {
	if !slices.ContainsFunc(hello.SupportedVersions, func(v uint16) bool { return v == tls.VersionTLS12 || v == tls.VersionTLS13 }) {
		return nil, refuse("a version of TLS before 1.2")
	}
	if !i.sameName(hello.ServerName) {
		return nil, refuse("a server name that is read in two ways") // by crypto/tls and by us
	}
	i.offered = slices.DeleteFunc(slices.Clone(hello.SupportedProtos), func(p string) bool { return p != protocolH1 && p != protocolH2 })
	if len(hello.SupportedProtos) == 0 {
		i.offered = []string{protocolH1}
	}
	if len(i.offered) == 0 {
		return nil, refuse("the client offers no protocol that can be read")
	}
	which := agreement{i.peer.host(i.dst), i.dst, strings.Join(i.offered, " ")}
	agreed, known := i.n.tls.agreedBefore(which)
	if known {
		i.connecting = make(chan struct{})
		go func() {
			defer close(i.connecting)
			i.expect(which, agreed)
		}()
	} else {
		i.headDone() // the client waits for us now
		agreed = i.connectUpstream()
		if err := i.abortedBy(); err != nil {
			return nil, err
		}
		if i.failed == nil {
			i.n.tls.remember(which, agreed)
		}
	}
	leaf, err := i.n.opts.CA.Leaf(i.peer.host(i.dst))
	if err != nil {
		return nil, err
	}
	config := &tls.Config{
		MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{*leaf},
		// Without tickets no session is resumed, in this network or another one.
		SessionTicketsDisabled: true,
		// The bytes do not leave the host: a post-quantum exchange would protect nothing, in a fifth of a
		// millisecond.
		CurvePreferences: []tls.CurveID{tls.X25519, tls.CurveP256, tls.CurveP384, tls.CurveP521},
	}
	if len(hello.SupportedProtos) > 0 {
		config.NextProtos = []string{agreed}
	}
	return config, i.waitHead()
}

// expect connects to a server that agreed to a protocol before.
func (i *inspection) expect(which agreement, protocol string) {
	agreed := i.connectUpstream()
	if i.failed != nil || agreed == protocol {
		return
	}
	i.n.tls.remember(which, agreed)
	i.dropServer()
	if protocol == protocolH1 { // which every server speaks
		i.offered = []string{protocolH1}
		i.connectUpstream()
		return
	}
	i.failed = fmt.Errorf("%s has agreed to %s before, and now to %s; connect again", which.host, protocol, agreed)
}

func (i *inspection) sameName(sent string) bool {
	if sent == "" {
		return i.peer.name.IsZero()
	}
	name, err := policy.ParseName(sent)
	return err == nil && name == i.peer.name
}

// abortedBy returns why the flow was aborted, or nil.
func (f *flow) abortedBy() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.aborted
}

// connectUpstream connects to the server and returns the protocol that it agreed to. If it fails,
// that is the protocol in which the client is told so.
func (i *inspection) connectUpstream() string {
	var err error
	if i.server == nil {
		err = i.dial()
	}
	if err == nil {
		i.upstream, err = i.handshake(i.server, i.offered)
	}
	if err == nil {
		agreed := agreedProtocol(i.upstream)
		if slices.Contains(i.offered, agreed) {
			return agreed
		}
		err = fmt.Errorf("%s does not speak HTTP/2, and the client nothing else", i.peer.host(i.dst))
	}
	i.failed = err
	i.dropServer()
	return i.offered[0]
}

func agreedProtocol(c *tls.Conn) string {
	if c.ConnectionState().NegotiatedProtocol == protocolH2 {
		return protocolH2
	}
	return protocolH1 // also of a server that does not say
}

// handshake makes TLS on a connection to the server, whose certificate must be for the name that
// the client asked for.
func (f *flow) handshake(s *stream, protocols []string) (*tls.Conn, error) {
	e, host := f.n.tls, f.peer.host(f.dst)
	if e.rootsErr != nil {
		return nil, fmt.Errorf("read the host's certificates: %w", e.rootsErr)
	}
	c := tls.Client(s.conn, &tls.Config{
		MinVersion: tls.VersionTLS12, ServerName: host, RootCAs: e.roots, NextProtos: protocols, ClientSessionCache: e.sessions, Time: f.n.opts.Now,
	})
	f.dialBy.Store(f.n.opts.Now().Add(f.n.limits.dial).UnixNano())
	defer f.dialBy.Store(0)
	if err := c.HandshakeContext(f.ctx); err != nil {
		if certificate, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
			return nil, fmt.Errorf("the certificate of %s at %s is not valid: %w", host, f.dst, certificate.Err)
		}
		return nil, fmt.Errorf("TLS handshake with %s at %s: %w", host, f.dst, err)
	}
	return c, nil
}

// dropServer closes a connection to the server that no request went to.
func (f *flow) dropServer() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.server != nil {
		_ = f.server.conn.Close()
		f.server = nil
	}
}
