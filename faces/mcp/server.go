package mcp

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
)

// Bounds of one session.
const (
	maxCalls     = 32 // tools and reads at once
	maxSandboxes = 16
	maxSnapshots = 32 // of all sessions together, while they are kept
)

// DefaultTimeout is the default of [Options.Timeout].
const DefaultTimeout = 10 * time.Minute

// Options configure a face.
type Options struct {
	Client  *client.Client // of the daemon
	Version string         // of sandboxd
	// Sandbox is the request of a session's default sandbox, and the most that other sandboxes of the
	// session may have.
	Sandbox api.CreateSandbox
	// Images are further images that sandbox_create may name.
	Images []string
	// Timeout is the maximum time of a command in the foreground; zero means [DefaultTimeout].
	Timeout time.Duration
	// URLs is the listener at which get_url makes ports of sandboxes reachable. Close closes it.
	URLs net.Listener
	// HostPaths are replaced in the texts of errors: directories of the daemon.
	HostPaths []string
	// Tied means that the daemon has started the face, which does not keep it from ending when it is
	// idle.
	Tied bool
	Log  *slog.Logger
}

// Server offers tools to the clients of one operator.
type Server struct {
	opts Options
	api  *client.Client
	log  *slog.Logger
	mcp  *mcp.Server
	door *door

	ctx     context.Context //nolint:containedctx // the sessions outlive the call that opens them
	cancel  context.CancelFunc
	working sync.WaitGroup

	mark    string     // label of snapshots: the digest of the operator's request
	taking  sync.Mutex // of pending
	pending int        // snapshots that are being taken

	mu       sync.Mutex
	sessions map[*mcp.ServerSession]*session
	closed   bool
}

const instructions = `Programs run in sandboxes: isolated Linux machines with their own files and processes. ` +
	`Nothing in them is the user's machine. A tool without the argument "sandbox" uses this session's own sandbox, ` +
	`which is made at the first use and keeps its files, processes and variables of run_code until the session ends. ` +
	`Relative paths begin at the sandbox's working directory.`

// New returns a face. The caller closes it.
func New(opts Options) *Server {
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	if opts.Timeout == 0 {
		opts.Timeout = DefaultTimeout
	}
	s := &Server{opts: opts, api: opts.Client, log: opts.Log, mark: markOf(&opts), sessions: make(map[*mcp.ServerSession]*session)}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.mcp = mcp.NewServer(&mcp.Implementation{Name: "sandboxd", Title: "sandboxd", Version: opts.Version}, &mcp.ServerOptions{
		Instructions: instructions,
		// Lists never change, and logs are no business of a client.
		Capabilities: &mcp.ServerCapabilities{Tools: &mcp.ToolCapabilities{}, Resources: &mcp.ResourceCapabilities{}},
	})
	s.addTools()
	s.addResources()
	s.door = newDoor(s, opts.URLs)
	s.working.Go(s.door.serve)
	if !opts.Tied {
		s.working.Go(s.keepDaemon)
	}
	return s
}

// markOf returns the label of snapshots that are made of sandboxes with these flags.
func markOf(opts *Options) string {
	flags, _ := json.Marshal([]any{opts.Sandbox, opts.Images}) // of plain values: it does not fail
	sum := sha256.Sum256(flags)
	return "snapshot-" + hex.EncodeToString(sum[:8])
}

// Close ends all sessions, and returns when their sandboxes are deleted.
func (s *Server) Close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.cancel() // and with it all calls, which the end of a session waits for
	s.door.close()
	for ss := range s.mcp.Sessions() {
		_ = ss.Close() // its client may have gone
	}
	s.working.Wait()
}

// ServeStdio serves one session on a pair of streams, until the client closes its end or ctx ends.
func (s *Server) ServeStdio(ctx context.Context, in io.ReadCloser, out io.Writer) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	lines := newLines(in, out)
	ss, err := s.mcp.Connect(ctx, transport{lines}, nil)
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() {
		s.end(ss)
		_ = lines.Close() // with which the session ends
	})
	defer stop()
	err = ss.Wait()
	s.end(ss)
	if ctx.Err() != nil || errors.Is(err, io.EOF) {
		return nil
	}
	return errors.Join(err, lines.failed())
}

// session returns the state of a client's session, which it makes at the first use.
func (s *Server) session(ss *mcp.ServerSession) (*session, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if se := s.sessions[ss]; se != nil {
		return se, nil
	}
	if s.closed {
		return nil, errors.New("the server is stopping")
	}
	se := newSession(s)
	s.sessions[ss] = se
	s.working.Go(func() {
		_ = ss.Wait() // how it ended is the transport's to report
		se.end()
		s.mu.Lock()
		delete(s.sessions, ss)
		s.mu.Unlock()
	})
	return se, nil
}

// end cancels the calls of a session. Its sandboxes are deleted when its transport has ended.
func (s *Server) end(ss *mcp.ServerSession) {
	s.mu.Lock()
	se := s.sessions[ss]
	s.mu.Unlock()
	if se != nil {
		se.cancel()
	}
}

// keepDaemon has a request open at the daemon: one that a command has started ends when it is idle,
// and a confined face cannot start another.
func (s *Server) keepDaemon() {
	none := 0
	for s.ctx.Err() == nil {
		// No event passes the filter.
		_ = s.api.Events(s.ctx, client.EventOptions{Follow: true, Last: &none, Filters: []string{"action=none"}}, func(api.Event) error { return nil })
		select {
		case <-time.After(10 * time.Second): // the daemon is being replaced
		case <-s.ctx.Done():
		}
	}
}
