package httpapi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/relay"
	"github.com/sandboxd/sandboxd/internal/service/class"
)

// portPath matches the path of a request to a port of a sandbox. What follows it is the server's, a
// trailing slash included.
var portPath = regexp.MustCompile(`^/v1/sandboxes/[^/]+/ports/[^/]+/`)

// proxyPort passes an HTTP request, or a WebSocket, on to a server in a sandbox.
func (s *Server) proxyPort(w http.ResponseWriter, r *http.Request) error {
	port, err := portOf(r)
	if err != nil {
		return err
	}
	as, id := s.as(r), r.PathValue("id")
	// Before the answer begins: errors of the proxy itself are bare.
	first, end, err := as.DialPort(r.Context(), id, port)
	if err != nil {
		return err
	}
	defer end()
	defer first.Close() // if it was not used
	_, rest, _ := strings.Cut(strings.TrimPrefix(r.URL.EscapedPath(), "/v1/sandboxes/"), "/ports/")
	_, rest, _ = strings.Cut(rest, "/")
	path, err := url.PathUnescape("/" + rest)
	if err != nil {
		return class.Invalidf("path: %w", err)
	}
	var once sync.Once
	transport := &http.Transport{
		DialContext: func(context.Context, string, string) (net.Conn, error) {
			var c net.Conn
			if once.Do(func() { c = first }); c == nil {
				return nil, errors.New("a second connection for one request")
			}
			return c, nil
		},
		DisableKeepAlives: true, DisableCompression: true,
	}
	rc := http.NewResponseController(w)
	_ = rc.SetReadDeadline(time.Time{}) // every connection of ours has deadlines; a WebSocket needs none
	proxy := &httputil.ReverseProxy{
		Transport: transport, FlushInterval: -1, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelInfo),
		Rewrite: func(p *httputil.ProxyRequest) {
			p.Out.URL.Scheme, p.Out.URL.Host = "http", net.JoinHostPort("localhost", strconv.Itoa(int(port)))
			p.Out.URL.Path, p.Out.URL.RawPath = path, "/"+rest
			p.Out.Host = p.Out.URL.Host
		},
		ModifyResponse: func(resp *http.Response) error {
			// The page is hostile, and has the origin of this API where a port leads to it: with an origin
			// of its own its requests here are refused (see checkOrigin).
			resp.Header.Add("Content-Security-Policy", "sandbox allow-scripts allow-forms allow-popups allow-modals allow-downloads")
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) {
			writeProblem(w, class.Mark(class.ErrNoPort, fmt.Errorf("port %d of the sandbox: %w", port, err)))
		},
	}
	proxy.ServeHTTP(w, r)
	return nil
}

func portOf(r *http.Request) (uint16, error) {
	port, err := strconv.ParseUint(r.PathValue("port"), 10, 16)
	if err != nil || port == 0 {
		return 0, class.Invalidf("port %q: must be a number from 1 to 65535", class.Clip(r.PathValue("port")))
	}
	return uint16(port), nil
}

// postConnect makes the connection of the request one to a port of a sandbox.
func (s *Server) postConnect(w http.ResponseWriter, r *http.Request) error {
	port, err := portOf(r)
	if err != nil {
		return err
	}
	if !strings.EqualFold(r.Header.Get("Upgrade"), api.UpgradeTCP) {
		return class.Invalidf("upgrade %q: this route needs Connection: Upgrade and Upgrade: %s", class.Clip(r.Header.Get("Upgrade")), api.UpgradeTCP)
	}
	inside, end, err := s.as(r).DialPort(r.Context(), r.PathValue("id"), port)
	if err != nil {
		return err
	}
	defer end()
	defer inside.Close()
	outside, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return fmt.Errorf("take the connection over: %w", err)
	}
	defer outside.Close()
	if a, ok := w.(*answer); ok {
		a.began = true
	}
	_ = outside.SetDeadline(time.Time{})
	head := "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: " + api.UpgradeTCP + "\r\n\r\n"
	if _, err := io.WriteString(outside, head); err != nil {
		return nil // the client is gone
	}
	// What was read with the head comes first. The rest is read from the connection itself: the
	// server's reader takes its end for that of the request, and cancels that.
	if _, err := io.CopyN(inside, buffered, int64(buffered.Reader.Buffered())); err != nil {
		return nil // the answer has begun
	}
	relay.Both(r.Context(), outside, inside)
	return nil
}
