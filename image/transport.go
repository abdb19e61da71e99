package image

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"
)

const (
	// maxDocument bounds manifests and configurations; the OCI distribution specification asks registries for 4 MiB.
	maxDocument = 4 << 20

	dialTimeout   = 15 * time.Second
	headerTimeout = 60 * time.Second // registries in front of slow storage take their time
	stallTimeout  = 60 * time.Second // without a byte of a body
)

// transport is how we speak to registries. It is the place for rules that hold for every request, be it made by us, by
// go-containerregistry for a token, or after a redirect:
//
//   - Plain HTTP only to this machine, unless insecure was asked for. go-containerregistry also allows it to private
//     addresses and to .local, which are as easy to listen on as any other.
//   - Bodies that are not a layer are bounded.
//   - A body that stalls ends.
type transport struct {
	base     http.RoundTripper
	insecure bool
	stall    time.Duration
}

var errPlainHTTP = errors.New("plain HTTP is allowed to registries on this machine only, unless insecure is asked for")

func newTransport(insecure bool) *transport {
	return &transport{insecure: insecure, stall: stallTimeout, base: &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		DialContext:           (&net.Dialer{Timeout: dialTimeout, KeepAlive: 30 * time.Second}).DialContext,
		ForceAttemptHTTP2:     true,
		TLSHandshakeTimeout:   dialTimeout,
		ResponseHeaderTimeout: headerTimeout,
		ExpectContinueTimeout: time.Second,
		IdleConnTimeout:       30 * time.Second,
		MaxIdleConnsPerHost:   parallelDownloads,
		// Blobs are stored as they are; a layer that arrives decompressed would have another digest.
		DisableCompression: true,
		TLSClientConfig:    &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: insecure}, //nolint:gosec // as asked for
	}}
}

func (t *transport) close() {
	if c, ok := t.base.(*http.Transport); ok {
		c.CloseIdleConnections()
	}
}

// RoundTrip implements [http.RoundTripper].
func (t *transport) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.URL.Scheme != "https" && !t.insecure && !loopback(req.URL.Host) {
		return nil, fmt.Errorf("%s://%s: %w", req.URL.Scheme, req.URL.Host, errPlainHTTP)
	}
	ctx, cancel := context.WithCancelCause(req.Context())
	resp, err := t.base.RoundTrip(req.WithContext(ctx))
	if err != nil {
		cancel(nil)
		return nil, err
	}
	b := &body{ReadCloser: resp.Body, ctx: ctx, cancel: cancel, stall: t.stall, left: -1}
	// Redirects lead to storage with paths of its own; what was asked for first counts.
	first := req
	for first.Response != nil && first.Response.Request != nil {
		first = first.Response.Request
	}
	if !strings.Contains(first.URL.Path, "/blobs/") { // those are bounded by their descriptors
		b.left = maxDocument
	}
	b.timer = time.AfterFunc(t.stall, func() { cancel(errStalled) })
	resp.Body = b
	return resp, nil
}

var (
	errStalled  = errors.New("the registry stopped sending")
	errTooLarge = fmt.Errorf("the answer has more than %d bytes", maxDocument)
)

// body ends when it stalls or exceeds its bound.
type body struct {
	io.ReadCloser
	ctx    context.Context //nolint:containedctx // of the request that this is the answer to
	cancel context.CancelCauseFunc
	stall  time.Duration
	timer  *time.Timer
	left   int64 // -1: unbounded
	once   sync.Once
}

func (b *body) Read(p []byte) (int, error) {
	if b.left == 0 {
		// Exactly the bound is allowed.
		if n, err := b.ReadCloser.Read(make([]byte, 1)); n == 0 {
			return 0, err
		}
		return 0, classf(ErrInvalid, "%w", errTooLarge)
	}
	if b.left > 0 && int64(len(p)) > b.left {
		p = p[:b.left]
	}
	n, err := b.ReadCloser.Read(p)
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
		return n, &networkError{fmt.Errorf("%w for %v", errStalled, b.stall)}
	}
	return n, &networkError{err}
}

// networkError is an error of reading a body, as opposed to one about what was read.
type networkError struct{ err error }

func (e *networkError) Error() string { return e.err.Error() }
func (e *networkError) Unwrap() error { return e.err }

func (b *body) Close() error {
	err := b.ReadCloser.Close()
	b.once.Do(func() {
		b.timer.Stop()
		b.cancel(nil)
	})
	return err
}
