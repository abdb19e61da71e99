package registry

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"path"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/remote"

	"github.com/sandboxd/sandboxd/image/errdefs"
	"github.com/sandboxd/sandboxd/image/store"
)

const (
	dialTimeout   = 15 * time.Second
	headerTimeout = 60 * time.Second // registries in front of slow storage take their time
	stallTimeout  = 60 * time.Second // without a byte of a body
	maxRedirects  = 10               // as net/http allows by itself
)

// transport applies the rules that hold for every request, be it made by us, by
// go-containerregistry for a token, or after a redirect:
//
//   - Plain HTTP only to this machine, unless insecure was asked for, and then to that address
//     only. A token server or storage that a registry names is held to the rules again.
//     go-containerregistry also allows plain HTTP to private addresses and to .local, which are as
//     easy to listen on as any other.
//   - Only a registry of this machine may send us to this machine, by any scheme: remote registries
//     must not reach its services.
//   - Bodies other than blobs are limited.
//   - The redirects that follow from one request are counted.
//   - A stalled body ends, in either direction.
//   - A blob that breaks off is resumed if the registry offers ranges. A registry that answers 429
//     is waited for. Both are limited.
type transport struct {
	base     *http.Transport
	lax      *http.Transport // to insecure addresses: accepts every certificate
	registry string          // address
	proxies  sync.Map        // addresses of the proxies in use
	insecure func(address string) bool
	lookup   func(ctx context.Context, host string) ([]netip.Addr, error) // nil: as the host does
	stall    time.Duration
	backoff  remote.Backoff // between attempts to resume a blob; no steps: none
	waitLeft atomic.Int64   // nanoseconds that all requests together may still wait after 429
}

var errPlainHTTP = errors.New("plain HTTP is allowed to registries on this machine only, unless insecure is asked for")

func newTransport(registry string, insecure func(address string) bool, cas *x509.CertPool) *transport {
	t := &transport{registry: registry, insecure: insecure, stall: stallTimeout}
	t.base = &http.Transport{
		Proxy:                 t.proxy,
		DialContext:           t.dial,
		ForceAttemptHTTP2:     true,
		TLSHandshakeTimeout:   dialTimeout,
		ResponseHeaderTimeout: headerTimeout,
		ExpectContinueTimeout: time.Second,
		IdleConnTimeout:       30 * time.Second,
		MaxIdleConnsPerHost:   ParallelDownloads,
		// A blob that arrives decompressed would have another digest.
		DisableCompression: true,
		TLSClientConfig:    &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: cas},
	}
	t.lax = t.base.Clone()
	t.lax.TLSClientConfig.InsecureSkipVerify = true // as asked for
	return t
}

// mayBeHere reports whether address may be this machine's: it is the registry's own, or the
// operator has named it, or the registry is on this machine.
func (t *transport) mayBeHere(address string) bool {
	if loopback(t.registry) || t.insecure(address) || strings.EqualFold(address, t.registry) {
		return true
	}
	// The registry's address may lack a port; a dialled one never does.
	host, port, err := net.SplitHostPort(address)
	return err == nil && (port == "443" || port == "80") && (t.insecure(host) || strings.EqualFold(host, t.registry))
}

// dial checks the address that a name resolves to: the registry chooses the name, and may own it.
func (t *transport) dial(ctx context.Context, network, address string) (net.Conn, error) {
	d := net.Dialer{Timeout: dialTimeout, KeepAlive: 30 * time.Second}
	if _, ok := t.proxies.Load(address); !ok && !t.mayBeHere(address) {
		d.Control = func(_, to string, _ syscall.RawConn) error {
			// The kernel takes the unspecified address for this machine.
			if ip, err := netip.ParseAddrPort(to); err != nil || ip.Addr().Unmap().IsLoopback() || ip.Addr().Unmap().IsUnspecified() {
				return fmt.Errorf("%s: %w", address, errThisMachine)
			}
			return nil
		}
	}
	host, port, err := net.SplitHostPort(address)
	if t.lookup == nil || err != nil || net.ParseIP(host) != nil {
		return d.DialContext(ctx, network, address)
	}
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	found, err := t.lookup(ctx, host)
	if err != nil {
		return nil, &net.OpError{Op: "dial", Net: network, Err: err}
	}
	return dialFirst(ctx, found, func(ctx context.Context, ip netip.Addr) (net.Conn, error) {
		return d.DialContext(ctx, network, net.JoinHostPort(ip.String(), port))
	})
}

// stagger is the delay before the next address is tried in parallel (RFC 8305).
const stagger = 250 * time.Millisecond

// dialFirst returns the first established connection. It tries the addresses in order.
func dialFirst(ctx context.Context, addresses []netip.Addr, dial func(context.Context, netip.Addr) (net.Conn, error)) (net.Conn, error) {
	type outcome struct {
		conn net.Conn
		err  error
	}
	var trying sync.WaitGroup
	defer trying.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	got := make(chan outcome)
	next, running := 0, 0
	begin := func() {
		ip := addresses[next]
		next++
		running++
		trying.Go(func() {
			conn, err := dial(ctx, ip)
			select {
			case got <- outcome{conn, err}:
			case <-ctx.Done():
				if conn != nil {
					_ = conn.Close() // another was faster
				}
			}
		})
	}
	tick := time.NewTicker(stagger)
	defer tick.Stop()
	var first error
	for next < len(addresses) || running > 0 {
		if running == 0 {
			begin()
			tick.Reset(stagger)
		}
		select {
		case o := <-got:
			if running--; o.err == nil {
				return o.conn, nil
			}
			first = cmp.Or(first, o.err)
		case <-tick.C:
			if next < len(addresses) {
				begin()
			}
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return nil, cmp.Or(first, errNoAddress)
}

var errNoAddress = errors.New("the host has no address")

// proxy returns the proxy of the environment and remembers it as named by the operator.
func (t *transport) proxy(req *http.Request) (*url.URL, error) {
	u, err := http.ProxyFromEnvironment(req)
	if u != nil {
		address := u.Host
		if u.Port() == "" {
			address = net.JoinHostPort(u.Hostname(), map[string]string{"http": "80", "https": "443", "socks5": "1080", "socks5h": "1080"}[u.Scheme])
		}
		t.proxies.Store(address, true)
	}
	return u, err
}

var errThisMachine = errors.New("a remote registry redirects to this machine")

func (t *transport) close() {
	t.base.CloseIdleConnections()
	t.lax.CloseIdleConnections()
}

// RoundTrip implements [http.RoundTripper].
func (t *transport) RoundTrip(req *http.Request) (*http.Response, error) {
	if loopback(req.URL.Host) && !t.mayBeHere(req.URL.Host) { // also with a proxy in between
		return nil, fmt.Errorf("%s://%s: %w", req.URL.Scheme, req.URL.Host, errThisMachine)
	}
	if req.URL.Scheme != "https" && !t.insecure(req.URL.Host) && !loopback(req.URL.Host) {
		return nil, fmt.Errorf("%s://%s: %w", req.URL.Scheme, req.URL.Host, errPlainHTTP)
	}
	// Redirects lead to storage with other paths; the path of the first request counts.
	// go-containerregistry's client has its own redirect rule and follows them without end.
	first, hops := req, 0
	for first.Response != nil && first.Response.Request != nil {
		first = first.Response.Request
		hops++
	}
	if hops > maxRedirects {
		return nil, errRedirects
	}
	resp, b, err := t.send(req)
	for err == nil && resp.StatusCode == http.StatusTooManyRequests && (req.Body == nil || req.GetBody != nil) {
		wait := retryAfter(resp.Header.Get("Retry-After"), time.Now())
		if !t.takeWait(wait) {
			break // the caller gets the 429
		}
		_ = b.Close() // its text does not matter
		if err := pause(req.Context(), wait); err != nil {
			return nil, err
		}
		again := req
		if req.GetBody != nil {
			again = req.Clone(req.Context())
			if again.Body, err = req.GetBody(); err != nil {
				return nil, err
			}
		}
		resp, b, err = t.send(again)
	}
	if err != nil {
		return nil, err
	}
	if !isBlob(first.URL.Path) { // descriptors limit those
		b.left = store.MaxDocument
	} else if req.Method == http.MethodGet && resp.StatusCode == http.StatusOK && resp.Header.Get("Accept-Ranges") != "none" {
		b.resume = func(at int64) (*body, error) { return t.resume(req, resp, at) }
		b.attempts, b.wait, b.factor = t.backoff.Steps, t.backoff.Duration, t.backoff.Factor
	}
	resp.Body = b
	return resp, nil
}

// isBlob reports whether a path of a registry's API is that of a blob. Repositories may be called
// "blobs" and "uploads" too.
func isBlob(p string) bool {
	dir, last := path.Split(p)
	return last != "" && last != "uploads" && strings.HasSuffix(dir, "/blobs/")
}

// takeWait deducts a wait from the common limit and reports whether that had room for it.
func (t *transport) takeWait(wait time.Duration) bool {
	for {
		left := t.waitLeft.Load()
		if int64(wait) > left {
			return false
		}
		if t.waitLeft.CompareAndSwap(left, left-int64(wait)) {
			return true
		}
	}
}

// send makes one request. It returns the body of the response, which the caller must close.
func (t *transport) send(req *http.Request) (*http.Response, *body, error) {
	ctx, cancel := context.WithCancelCause(req.Context())
	base := t.base
	if t.insecure(req.URL.Host) {
		base = t.lax
	}
	out := req.WithContext(ctx)
	if req.Body != nil && req.Body != http.NoBody {
		watch := &uploadWatch{stall: t.stall, timer: time.AfterFunc(t.stall, func() { cancel(errStalled) })}
		defer watch.end()
		out.Body = &upload{req.Body, watch}
		if req.GetBody != nil { // for a retry on another connection
			out.GetBody = func() (io.ReadCloser, error) {
				body, err := req.GetBody()
				if err != nil {
					return nil, err
				}
				return &upload{body, watch}, nil
			}
		}
	}
	resp, err := base.RoundTrip(out)
	if err != nil {
		if errors.Is(context.Cause(ctx), errStalled) && req.Context().Err() == nil {
			err = &networkError{fmt.Errorf("%w for %v", errUploadStalled, t.stall)}
		}
		cancel(nil)
		return nil, nil, err
	}
	b := &body{ReadCloser: resp.Body, parent: req.Context(), ctx: ctx, cancel: cancel, stall: t.stall, left: -1}
	b.timer = time.AfterFunc(t.stall, func() { cancel(errStalled) })
	return resp, b, nil
}

// resume requests the rest of resp's body from byte at on, and fails if the answer is not just
// that.
func (t *transport) resume(req *http.Request, resp *http.Response, at int64) (*body, error) {
	again := req.Clone(req.Context())
	again.Header.Set("Range", fmt.Sprintf("bytes=%d-", at))
	if tag := resp.Header.Get("ETag"); tag != "" && !strings.HasPrefix(tag, "W/") {
		again.Header.Set("If-Range", tag)
	}
	rest, b, err := t.send(again)
	if err != nil {
		return nil, err
	}
	if want := fmt.Sprintf("bytes %d-", at); rest.StatusCode != http.StatusPartialContent || !strings.HasPrefix(rest.Header.Get("Content-Range"), want) {
		return nil, errors.Join(errNoRange, b.Close())
	}
	return b, nil
}

var errNoRange = errors.New("the registry does not resume a blob")

const (
	maxWait     = 2 * time.Minute // for all requests of one pull or push
	defaultWait = 5 * time.Second // if the registry names no time
)

// retryAfter parses a Retry-After header: seconds, or a date.
func retryAfter(header string, now time.Time) time.Duration {
	if n, err := strconv.ParseUint(header, 10, 31); err == nil {
		return time.Duration(max(n, 1)) * time.Second
	}
	if at, err := http.ParseTime(header); err == nil {
		return max(at.Sub(now), time.Second)
	}
	return defaultWait
}

// pause waits for d, or returns the error of ctx if that ends first.
func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// uploadWatch cancels a request whose body the registry does not read, or does not answer.
type uploadWatch struct {
	stall time.Duration
	timer *time.Timer

	mu    sync.Mutex
	ended bool
}

// touch restarts the stall timer.
func (w *uploadWatch) touch() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.ended {
		w.timer.Reset(w.stall)
	}
}

// end stops the timer for good.
func (w *uploadWatch) end() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ended = true
	w.timer.Stop()
}

// upload is a watched request body. Its last bytes may still be on their way when it ends.
type upload struct {
	io.ReadCloser
	watch *uploadWatch
}

func (u *upload) Read(p []byte) (int, error) {
	n, err := u.ReadCloser.Read(p)
	u.watch.touch()
	return n, err
}

var (
	errUploadStalled = errors.New("the registry stopped reading the upload")
	errRedirects     = fmt.Errorf("it redirects more than %d times", maxRedirects)
	errStalled       = errors.New("the registry stopped sending")
	errTooLarge      = fmt.Errorf("the answer has more than %d bytes", store.MaxDocument)
)

// body is a response body that ends when it stalls or exceeds its limit.
type body struct {
	io.ReadCloser
	parent context.Context //nolint:containedctx // of the request
	ctx    context.Context //nolint:containedctx // child of parent, cancelled when the body stalls
	cancel context.CancelCauseFunc
	stall  time.Duration
	timer  *time.Timer
	left   int64 // bytes; -1 means no limit
	once   sync.Once

	resume   func(at int64) (*body, error) // nil for bodies other than blobs
	n        int64                         // bytes read
	attempts int                           // to resume, that are left
	wait     time.Duration                 // before the next of them
	factor   float64                       // by which wait grows
}

func (b *body) Read(p []byte) (int, error) {
	if b.left == 0 {
		// Exactly the limit is allowed.
		if n, err := b.ReadCloser.Read(make([]byte, 1)); n == 0 {
			return 0, err
		}
		return 0, errdefs.Classf(errdefs.ErrInvalid, "%w", errTooLarge)
	}
	if b.left > 0 && int64(len(p)) > b.left {
		p = p[:b.left]
	}
	n, err := b.ReadCloser.Read(p)
	b.n += int64(n)
	if b.left > 0 {
		b.left -= int64(n)
	}
	if n > 0 {
		b.timer.Reset(b.stall)
	}
	switch {
	case err == nil || errors.Is(err, io.EOF):
		return n, err
	case errors.Is(context.Cause(b.ctx), errStalled):
		err = fmt.Errorf("%w for %v", errStalled, b.stall)
	}
	if b.reconnect() {
		return n, nil
	}
	return n, &networkError{err}
}

// reconnect replaces a body that broke off by its rest and reports success.
func (b *body) reconnect() bool {
	if b.resume == nil {
		return false
	}
	for ; b.attempts > 0; b.attempts-- {
		// The request's own context: the stall has cancelled the body's.
		if pause(b.parent, b.wait) != nil {
			return false
		}
		b.wait = time.Duration(float64(b.wait) * b.factor)
		rest, err := b.resume(b.n)
		if errors.Is(err, errNoRange) || b.parent.Err() != nil {
			return false
		}
		if err != nil {
			continue
		}
		b.end()
		_ = b.ReadCloser.Close() // it has failed already
		b.ReadCloser, b.ctx, b.cancel, b.timer = rest.ReadCloser, rest.ctx, rest.cancel, rest.timer
		b.attempts--
		return true
	}
	return false
}

// end releases the request.
func (b *body) end() {
	b.timer.Stop()
	b.cancel(nil)
}

// networkError is an error of reading a body, not one about its content.
type networkError struct{ err error }

func (e *networkError) Error() string { return e.err.Error() }
func (e *networkError) Unwrap() error { return e.err }

func (b *body) Close() error {
	err := b.ReadCloser.Close()
	b.once.Do(b.end)
	return err
}
