package mcp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sandboxd/sandboxd/api"
)

// door makes HTTP servers in sandboxes reachable at a listener of the host. The name in a request's
// URL says which one is meant, PORT-SANDBOX.localhost: it is an origin of its own for browsers, and
// a page that a name of another site was bent to has another. Only ports that get_url was asked for
// are reachable.
type door struct {
	s        *Server
	listener net.Listener
	server   *http.Server

	mu   sync.Mutex
	open map[string]target // by host name, in lower case
}

type target struct {
	sandbox string
	port    uint16
}

const maxTargets = 256

func newDoor(s *Server, l net.Listener) *door {
	d := &door{s: s, listener: l, open: make(map[string]target)}
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Scheme, r.Out.URL.Host = "http", r.In.Host
			r.Out.Host = r.In.Host
		},
		Transport: &http.Transport{
			DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
				t, ok := d.target(address)
				if !ok {
					return nil, errors.New("the sandbox is gone")
				}
				return s.api.DialPort(ctx, t.sandbox, t.port)
			},
			DisableKeepAlives:  true, // the port may be another server's next time
			DisableCompression: true,
		},
		FlushInterval: -1,
		ErrorLog:      slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) {
			s.log.Info("a port of a sandbox was not reached", "error", err)
			http.Error(w, "no server answers at this port of the sandbox", http.StatusBadGateway)
		},
	}
	d.server = &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if _, ok := d.target(r.Host); !ok {
				http.Error(w, "no port of a sandbox is open under this name", http.StatusNotFound)
				return
			}
			proxy.ServeHTTP(w, r)
		}),
		ReadHeaderTimeout: 10 * time.Second,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
	return d
}

func (d *door) serve() { _ = d.server.Serve(d.listener) } // until close

func (d *door) close() { _ = d.server.Close() }

// target returns the sandbox and port of a name, which may have a port of its own.
func (d *door) target(host string) (target, bool) {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	t, ok := d.open[strings.ToLower(host)]
	return t, ok
}

// add opens a port and returns its URL.
func (d *door) add(t target) (string, error) {
	name := fmt.Sprintf("%d-%s.localhost", t.port, strings.ToLower(t.sandbox))
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, ok := d.open[name]; !ok && len(d.open) >= maxTargets {
		return "", fmt.Errorf("%d ports are open, and no more are possible", maxTargets)
	}
	d.open[name] = t
	_, port, err := net.SplitHostPort(d.listener.Addr().String())
	if err != nil {
		return "", err
	}
	return "http://" + net.JoinHostPort(name, port) + "/", nil
}

// forget closes the ports of a sandbox.
func (d *door) forget(sandbox string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for name, t := range d.open {
		if t.sandbox == sandbox {
			delete(d.open, name)
		}
	}
}

type urlIn struct {
	which

	Port int `json:"port" jsonschema:"TCP port in the sandbox, on its loopback address or on all"`
}

type urlOut struct {
	URL  string `json:"url"`
	Note string `json:"note,omitempty"`
}

func getURL(ctx context.Context, c *call, in urlIn) (*mcp.CallToolResult, urlOut, error) {
	if in.Port < 1 || in.Port > 65535 {
		return nil, urlOut{}, fmt.Errorf("port %d: want 1 to 65535", in.Port)
	}
	b, err := c.existing(in.which)
	if err != nil {
		return nil, urlOut{}, err
	}
	sb, err := c.s.api.GetSandbox(ctx, b.id)
	if err != nil {
		return nil, urlOut{}, err
	}
	for _, p := range sb.Ports {
		if int(p.Port) == in.Port && p.Socket == "" && p.Protocol != "udp" {
			return nil, urlOut{URL: "http://" + net.JoinHostPort(p.Address, strconv.Itoa(int(p.HostPort))) + "/"}, nil
		}
	}
	if sb.Network.Mode != api.NetworkSandbox && !sb.Network.HasGateway() {
		return nil, urlOut{}, errors.New("the sandbox has no network, and so no ports that are reachable; the operator chooses the network (--network)")
	}
	at, err := c.s.door.add(target{b.id, uint16(in.Port)})
	if err != nil {
		return nil, urlOut{}, err
	}
	return nil, urlOut{URL: at, Note: "for programs on the user's machine, until the session ends"}, nil
}
