package functional

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// tells is an HTTP server that says what it was asked, and with which body.
const tells = `
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        text = f"{self.command} {self.path} {self.headers['Host']} {self.headers.get('X-Asked')} {body.decode()}".encode()
        self.send_response(201)
        self.send_header("Content-Length", str(len(text)))
        self.send_header("Content-Security-Policy", "default-src 'self'")
        self.end_headers()
        self.wfile.write(text)
    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET
    def log_message(self, *args):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
`

func TestServersInSandboxesAreReached(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{
		Network: api.Network{Mode: api.NetworkFull}, Ports: []api.PortMapping{{Port: 8000}}, Command: []string{"python3", "-c", tells},
	})
	harness.Eventually(t, func() error {
		c, err := d.Client(t).DialPort(t.Context(), s.ID, 8000)
		if err != nil {
			return err
		}
		return c.Close()
	})

	// A request of any method is passed on. Do would compare the answer with our API.
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", d.Socket)
	}}
	defer transport.CloseIdleConnections()
	ask := func(method, path, body string) (*http.Response, string) {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), method, "http://sandboxd/v1/sandboxes/"+s.ID+"/ports/"+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("X-Asked", "yes")
		response, err := transport.RoundTrip(r)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		text, err := io.ReadAll(response.Body)
		if err != nil {
			t.Fatal(err)
		}
		return response, string(text)
	}
	for _, c := range []struct{ method, path, body, want string }{
		{"GET", "8000/", "", "GET / localhost:8000 yes "},
		{"GET", "8000/a/b?c=d%20e", "", "GET /a/b?c=d%20e localhost:8000 yes "},
		{"GET", "8000/a%2Fb/", "", "GET /a%2Fb/ localhost:8000 yes "},
		{"POST", "8000/form", "hello", "POST /form localhost:8000 yes hello"},
		{"DELETE", "8000/x", "", "DELETE /x localhost:8000 yes "},
	} {
		response, text := ask(c.method, c.path, c.body)
		if response.StatusCode != http.StatusCreated || text != c.want {
			t.Errorf("%s %s: %s, %q, want %q", c.method, c.path, response.Status, text, c.want)
		}
		// The page gets an origin of its own, whatever else it asks for.
		if policies := response.Header.Values("Content-Security-Policy"); len(policies) != 2 || !strings.HasPrefix(policies[1], "sandbox ") || strings.Contains(policies[1], "allow-same-origin") {
			t.Errorf("%s %s: Content-Security-Policy %q", c.method, c.path, policies)
		}
	}
	for path, status := range map[string]int{"8001/": http.StatusConflict, "0/": http.StatusBadRequest, "x/": http.StatusBadRequest, "8000/../../..": http.StatusNotFound} {
		if response, text := ask("GET", path, ""); response.StatusCode != status {
			t.Errorf("%s: %s %s", path, response.Status, text)
		}
	}

	// At the host, and at no other address of it.
	inspect, err := s.Inspect(t.Context())
	if err != nil || len(inspect.Ports) != 1 || inspect.Ports[0].HostPort == 0 || inspect.Ports[0].Address != "127.0.0.1" || !inspect.Ports[0].Chosen {
		t.Fatalf("%+v, %v", inspect.Ports, err)
	}
	at := fmt.Sprintf("127.0.0.1:%d", inspect.Ports[0].HostPort)
	get := func() (string, error) {
		c, err := net.Dial("tcp", at)
		if err != nil {
			return "", err
		}
		defer c.Close()
		if _, err := io.WriteString(c, "GET /here HTTP/1.0\r\nHost: there\r\n\r\n"); err != nil {
			return "", err
		}
		text, err := io.ReadAll(c)
		return string(text), err
	}
	if text, err := get(); err != nil || !strings.HasSuffix(text, "GET /here there None ") {
		t.Errorf("%q, %v", text, err)
	}
	if c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.2:%d", inspect.Ports[0].HostPort)); err == nil {
		_ = c.Close()
		t.Error("the port is published at another address")
	}
	if _, err := d.TryCreate(t.Context(), api.CreateSandbox{Network: api.Network{Mode: api.NetworkFull}, Ports: []api.PortMapping{{Port: 1, HostPort: inspect.Ports[0].HostPort}}}); !errors.Is(err, &api.Problem{Code: api.CodeConflict}) {
		t.Errorf("a port that is taken: %v", err)
	}
	s.MustTurn(t, "stop", api.StopSandbox{}, api.StateStopped)
	if text, err := get(); err == nil && strings.Contains(text, "/here") {
		t.Errorf("a stopped sandbox's port answers %q", text)
	}
	// A port that was not asked for is another one if a program has taken it meanwhile.
	taken, err := net.Listen("tcp", at)
	if err == nil {
		defer taken.Close()
	} else if !errors.Is(err, syscall.EADDRINUSE) {
		t.Fatal(err)
	}
	shown := s.MustTurn(t, "start", api.StartSandbox{}, api.StateRunning)
	now, err := s.Inspect(t.Context())
	if err != nil || len(now.Ports) != 1 || now.Ports[0].HostPort == inspect.Ports[0].HostPort || !slices.Equal(now.Ports, shown.Ports) {
		t.Fatalf("%+v, %+v, %v", now.Ports, shown.Ports, err)
	}
	at = fmt.Sprintf("127.0.0.1:%d", now.Ports[0].HostPort)
	harness.Eventually(t, func() error {
		text, err := get()
		if err == nil && !strings.Contains(text, "/here") {
			err = fmt.Errorf("it answers %q", text)
		}
		return err
	})
}

// A port that was not asked for moves also if a program takes it while no daemon runs. The sandbox
// goes on.
func TestChosenPortMovesWithTheDaemon(t *testing.T) {
	testenv.SameForAll(t)
	d := harness.Start(t, harness.Options{})
	s := d.Create(t, api.CreateSandbox{Network: api.Network{Mode: api.NetworkFull}, Ports: []api.PortMapping{{Port: 8000}}})
	d.Kill9(t)
	taken, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", s.Ports[0].HostPort))
	if err == nil {
		defer taken.Close()
	} else if !errors.Is(err, syscall.EADDRINUSE) {
		t.Fatal(err)
	}
	d.Launch(t)
	harness.Eventually(t, func() error {
		now, err := s.Inspect(t.Context())
		if err != nil {
			return err
		}
		if len(now.Ports) != 1 || now.Ports[0].HostPort == s.Ports[0].HostPort || now.PID != s.PID {
			return fmt.Errorf("it has the ports %+v and pid %d, and had %+v and %d", now.Ports, now.PID, s.Ports, s.PID)
		}
		c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", now.Ports[0].HostPort))
		if err != nil {
			return err
		}
		return c.Close()
	})
}
