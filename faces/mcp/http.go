package mcp

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// Path is the path of the endpoint over HTTP.
const Path = "/mcp"

// Bounds of sessions over HTTP. A client may disappear without a word: its session ends some time
// after its last connection. Clients that listen for messages have one open all the time, so that
// its loss says more.
const (
	maxSessions = 64
	quietGrace  = 10 * time.Minute // of a client that has not listened
	lostGrace   = time.Minute      // of one that has, and may connect again
)

const sessionHeader = "Mcp-Session-Id"

// endpoint serves sessions over streamable HTTP.
type endpoint struct {
	s      *Server
	sdk    http.Handler
	digest [sha256.Size]byte // of the token
	token  bool              // one is required

	quiet, lost time.Duration

	mu      sync.Mutex
	clients map[string]*peer // by session
	opening int              // requests without a session, in progress
}

// peer is the client of one session.
type peer struct {
	open     int  // requests in progress
	listened bool // it has listened for messages
	timer    *time.Timer
}

// Handler returns the endpoint over HTTP. Clients must have the token, unless it is empty: then the
// listener accepts connections of the operator only.
func (s *Server) Handler(token string) http.Handler {
	return s.endpoint(token, quietGrace, lostGrace)
}

func (s *Server) endpoint(token string, quiet, lost time.Duration) http.Handler {
	return &endpoint{
		s: s, token: token != "", digest: sha256.Sum256([]byte(token)), quiet: quiet, lost: lost, clients: make(map[string]*peer),
		// A session has sandboxes, so requests belong to one: clients of versions without sessions
		// are told to use an older one, and do.
		sdk: mcp.NewStreamableHTTPHandler(func(*http.Request) *mcp.Server { return s.mcp }, &mcp.StreamableHTTPOptions{MaxRequestBodyBytes: maxMessage}),
	}
}

// ServeHTTP implements [http.Handler].
func (e *endpoint) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch {
	case !fromHere(r.Header.Get("Origin")):
		http.Error(w, "requests of web pages are refused", http.StatusForbidden)
		return
	case !e.authorized(r):
		w.Header().Set("WWW-Authenticate", "Bearer")
		http.Error(w, "the token is missing or wrong", http.StatusUnauthorized)
		return
	case r.URL.Path != Path:
		http.NotFound(w, r)
		return
	}
	id := r.Header.Get(sessionHeader)
	if id != "" && r.Method == http.MethodDelete {
		e.s.endID(id) // the deletion waits for its calls
	}
	done, ok := e.begin(id, r.Method == http.MethodGet)
	if !ok {
		w.Header().Set("Retry-After", "60")
		http.Error(w, fmt.Sprintf("there are %d sessions, and no more are possible", maxSessions), http.StatusServiceUnavailable)
		return
	}
	defer func() { done(w.Header().Get(sessionHeader)) }()
	e.sdk.ServeHTTP(w, r)
}

// authorized compares digests, which takes the same time whatever differs.
func (e *endpoint) authorized(r *http.Request) bool {
	if !e.token {
		return true
	}
	given, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	digest := sha256.Sum256([]byte(given))
	return ok && subtle.ConstantTimeCompare(digest[:], e.digest[:]) == 1
}

// fromHere reports whether a request is no web page's, or one that this host itself serves.
func fromHere(origin string) bool {
	if origin == "" {
		return true
	}
	u, err := url.Parse(origin)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" {
		return false
	}
	ip := net.ParseIP(u.Hostname())
	return u.Hostname() == "localhost" || ip != nil && ip.IsLoopback()
}

// peer returns the client of a session that has not ended, from its first request on: that may come
// before the one that has opened the session ends. The caller holds mu.
func (e *endpoint) peer(id string) *peer {
	p := e.clients[id]
	if p == nil && id != "" && e.s.byID(id) != nil {
		p = new(peer)
		p.timer = time.AfterFunc(e.quiet, func() { e.expire(id, p) })
		e.clients[id] = p
	}
	return p
}

// begin counts a request. done takes the id of the session that it has opened, if it has.
func (e *endpoint) begin(id string, listens bool) (done func(opened string), ok bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if p := e.peer(id); p != nil {
		p.open++
		p.listened = p.listened || listens
		p.timer.Stop()
		return func(string) { e.end(id) }, true
	}
	if id != "" { // unknown: the SDK says so
		return func(string) {}, true
	}
	if len(e.clients)+e.opening >= maxSessions {
		return nil, false
	}
	e.opening++
	return func(opened string) {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.opening--
		e.peer(opened)
	}, true
}

// end counts a request that has ended. After the last one the session's grace begins.
func (e *endpoint) end(id string) {
	alive := e.s.byID(id) != nil
	e.mu.Lock()
	defer e.mu.Unlock()
	p := e.clients[id]
	if p == nil {
		return
	}
	switch p.open--; {
	case !alive:
		p.timer.Stop()
		delete(e.clients, id)
	case p.open > 0:
	case p.listened:
		p.timer.Reset(e.lost)
	default:
		p.timer.Reset(e.quiet)
	}
}

// expire ends a session whose client has gone.
func (e *endpoint) expire(id string, p *peer) {
	e.mu.Lock()
	if p.open > 0 || e.clients[id] != p {
		e.mu.Unlock()
		return
	}
	delete(e.clients, id)
	e.mu.Unlock()
	e.s.endID(id)
	if ss := e.s.byID(id); ss != nil {
		_ = ss.Close() // its transport has no more to say
	}
}

// byID returns the session over HTTP with an id; nil if there is none.
func (s *Server) byID(id string) *mcp.ServerSession {
	for ss := range s.mcp.Sessions() {
		if ss.ID() == id {
			return ss
		}
	}
	return nil
}

// endID cancels the calls of a session, by its id.
func (s *Server) endID(id string) {
	if ss := s.byID(id); ss != nil {
		s.end(ss)
	}
}

// ServeHTTP serves a listener until ctx ends; [Server.Close] then ends the sessions. The token is
// as for [Server.Handler].
func (s *Server) ServeHTTP(ctx context.Context, l net.Listener, token string) error {
	server := &http.Server{
		Handler:           s.Handler(token),
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       5 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
	defer context.AfterFunc(ctx, func() { _ = server.Close() })()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve MCP: %w", err)
	}
	return nil
}
