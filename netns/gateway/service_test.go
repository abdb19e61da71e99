package gateway

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/net/dns/dnsmessage"

	"github.com/sandboxd/sandboxd/netns/policy"
)

const withServices = `
version: 1
rules:
- {name: models, allow: host.sandboxd.internal, ports: 11434}
services:
- {name: packages, port: 8080, to: "127.0.0.7:3141"}
- {name: local, port: 9000, to: "unix:local"}
`

func TestServicesOfTheHost(t *testing.T) {
	w := newWorld(t, withServices)
	// The host's resolver would lead astray.
	w.host("host.sandboxd.internal", "10.0.0.1")
	if code, addrs := w.resolve("host.sandboxd.internal", dnsmessage.TypeA); code != dnsmessage.RCodeSuccess || !cmp.Equal(addrs, []netip.Addr{policy.HostAddress}, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })) {
		t.Errorf("%v, %v", code, addrs)
	}
	if code, addrs := w.resolve("host.sandboxd.internal", dnsmessage.TypeAAAA); code != dnsmessage.RCodeSuccess || len(addrs) != 0 {
		t.Errorf("%v, %v", code, addrs)
	}
	for port, at := range map[string]string{"11434": "127.0.0.1:11434", "8080": "127.0.0.7:3141"} {
		w.http(at, func(rw http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(rw, r.Host) })
		if _, body := fetch(t, w.client(), "GET", "http://host.sandboxd.internal:"+port+"/", http.NoBody); body != "host.sandboxd.internal:"+port {
			t.Errorf("port %s: %q", port, body)
		}
	}
	if asked := w.asked; len(asked) != 0 {
		t.Errorf("the host's resolver was asked %v", asked)
	}
	dialled := len(w.dialled)
	for _, port := range []string{"22", "3141", "9000"} {
		if read, reset := w.reset(policy.HostAddress.String() + ":" + port); len(read) > 0 || !reset {
			t.Errorf("port %s: %q, reset %t", port, read, reset)
		}
	}
	for _, at := range []string{"127.0.0.1:11434", "127.0.0.7:3141", "10.0.0.1:11434"} {
		if _, reset := w.reset(at); !reset {
			t.Errorf("%s is reached by its address", at)
		}
	}
	if len(w.dialled) != dialled {
		t.Errorf("refused, and dialled: %v", w.dialled[dialled:])
	}
}

const withSocket = `
version: 1
rules:
- {name: shut, deny: host.sandboxd.internal, ports: 82}
services:
- {name: registry, port: 80, to: "unix:registry", inspect: true, methods: [GET], paths: [/v2/*]}
- {name: any, port: 9000, to: "unix:any"}
- {name: gone, port: 81, to: "unix:gone", inspect: true}
- {name: away, port: 84, to: "unix:gone"}
- {name: closed, port: 82, to: "unix:any"}
- {name: other, port: 83, to: "127.0.0.1:83"}
`

// newSockets is a world in which ports lead to Unix sockets. Listeners are in the order of the
// ports.
func newSockets(t *testing.T, at map[uint16]func(net.Listener)) *world {
	t.Helper()
	dir, err := os.MkdirTemp("", "gateway") //nolint:usetesting // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	paths := make(map[uint16]string)
	var serving sync.WaitGroup
	t.Cleanup(serving.Wait)
	for port, serve := range at {
		paths[port] = filepath.Join(dir, strconv.Itoa(int(port)))
		l, err := net.Listen("unix", paths[port])
		if err != nil {
			t.Fatal(err)
		}
		serving.Go(func() { serve(l) })
		t.Cleanup(func() { _ = l.Close() })
	}
	return newWorld(t, withSocket, func(o *Options, _ *limits) {
		o.DialSocket = func(ctx context.Context, port uint16) (*net.UnixConn, error) {
			path := paths[port]
			if path == "" {
				return nil, syscall.ENOENT
			}
			c, err := new(net.Dialer).DialContext(ctx, "unix", path)
			if err != nil {
				return nil, err
			}
			return c.(*net.UnixConn), nil
		}
	})
}

// one serves one connection.
func one(serve func(net.Conn)) func(net.Listener) {
	return func(l net.Listener) {
		if c, err := l.Accept(); err == nil {
			defer c.Close()
			serve(c)
		}
	}
}

// A service at a Unix socket is served, inspected and recorded as others are. No record or answer
// has its path.
func TestServicesAtUnixSockets(t *testing.T) {
	w := newSockets(t, map[uint16]func(net.Listener){
		80: func(l net.Listener) {
			_ = http.Serve(l, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
				fmt.Fprintf(rw, "%s %s %s", r.Method, r.Host, r.URL.Path)
			}))
		},
		9000: one(func(c net.Conn) {
			b, _ := io.ReadAll(c)
			_, _ = c.Write(append([]byte("echo "), b...))
		}),
	})
	for _, tc := range []struct {
		method, path string
		status       int
		body         string
	}{
		{"GET", "/v2/_catalog", 200, "GET host.sandboxd.internal /v2/_catalog"},
		{"PUT", "/v2/x", 403, "sandboxd: "},
		{"GET", "/admin", 403, "sandboxd: "},
		{"GET", ":81/", 502, "sandboxd: connect to unix:gone: no such file or directory\n"},
	} {
		p, body := fetch(t, w.client(), tc.method, "http://host.sandboxd.internal"+tc.path, http.NoBody)
		if p.StatusCode != tc.status || !strings.HasPrefix(body, tc.body) {
			t.Errorf("%s %s: %d %q", tc.method, tc.path, p.StatusCode, body)
		}
	}
	// Any protocol, and large: through a pipe, with the end of each direction by itself.
	c := w.dial(policy.HostAddress.String() + ":9000")
	sent := bytes.Repeat([]byte("\x00data"), 200_000)
	go func() {
		_, _ = c.Write(sent)
		_ = c.CloseWrite()
	}()
	if got, err := io.ReadAll(c); err != nil || !bytes.Equal(got, append([]byte("echo "), sent...)) {
		t.Errorf("%d bytes came back, %v", len(got), err)
	}
	if read, reset := w.reset(policy.HostAddress.String() + ":82"); len(read) > 0 || !reset {
		t.Errorf("a denied port: %q, reset %t", read, reset)
	}
	if read, reset := w.reset(policy.HostAddress.String() + ":84"); len(read) > 0 || !reset {
		t.Errorf("a socket that is not there: %q, reset %t", read, reset)
	}
	var events []Event
	for len(events) == 0 || events[len(events)-1].Port != 84 { // a close would come before its reason
		events = append(events, w.event())
	}
	if reason := events[len(events)-1].Reason; reason != "connect to unix:gone: no such file or directory" {
		t.Errorf("recorded as %q", reason)
	}
	seen := map[string]bool{}
	for _, e := range append(events, w.all()...) {
		if strings.Contains(fmt.Sprint(e), "/80") || strings.Contains(fmt.Sprint(e), "/9000") {
			t.Errorf("an event has the path: %+v", e)
		}
		seen[fmt.Sprint(e.Kind, " ", e.Port, " ", e.Allow, " ", e.Rule)] = true
	}
	for _, want := range []string{"connection 9000 true any", "request 80 true registry", "request 80 false ", "request 81 true gone", "connection 82 false shut", "connection 84 true away"} {
		if !seen[want] {
			t.Errorf("no event %q among %v", want, slices.Sorted(maps.Keys(seen)))
		}
	}
}

// A server at a Unix socket that ends a connection abruptly is not taken for one that has said all.
func TestResetByAUnixSocket(t *testing.T) {
	half := one(func(c net.Conn) {
		_, _ = c.Read(make([]byte, 1)) // bytes are left unread: the close is a reset
	})
	w := newSockets(t, map[uint16]func(net.Listener){9000: half, 81: half})
	p, body := fetch(t, w.client(), "GET", "http://host.sandboxd.internal:81/", http.NoBody)
	if p.StatusCode != http.StatusBadGateway || !strings.Contains(body, "read unix gone: ") || strings.Contains(body, "/81") {
		t.Errorf("%d %q", p.StatusCode, body)
	}
	c := w.dial(policy.HostAddress.String() + ":9000")
	if _, err := c.Write([]byte("\x00two")); err != nil {
		t.Fatal(err)
	}
	if read, reset := wasReset(c); len(read) > 0 || !reset {
		t.Errorf("%q, reset %t", read, reset)
	}
	e := w.event() // a close would come before its reason
	for e.Kind != Connection || e.Port != 9000 {
		e = w.event()
	}
	if !strings.Contains(e.Reason, "connection reset") || strings.Contains(e.Reason, "/9000") {
		t.Errorf("recorded as %q", e.Reason)
	}
}

// A gateway without sockets refuses services at them.
func TestNoSockets(t *testing.T) {
	w := newWorld(t, withSocket)
	if p, body := fetch(t, w.client(), "GET", "http://host.sandboxd.internal/v2/", http.NoBody); p.StatusCode != http.StatusForbidden || !strings.Contains(body, "Unix socket") {
		t.Errorf("%d %q", p.StatusCode, body)
	}
}

func TestNoServicesWithoutARule(t *testing.T) {
	w := newWorld(t, "version: 1\nrules:\n- {allow: \"*\", ports: any}\n- {allow: [0.0.0.0/0, 192.0.2.0/24], ports: any}\n")
	if code, addrs := w.resolve("host.sandboxd.internal", dnsmessage.TypeA); code != dnsmessage.RCodeNameError || len(addrs) != 0 {
		t.Errorf("%v, %v", code, addrs)
	}
	if _, reset := w.reset(policy.HostAddress.String() + ":11434"); !reset || len(w.dialled) != 0 {
		t.Errorf("reset %t, dialled %v", reset, w.dialled)
	}
}

// A record names the host where rules allow its address: a policy is learnt from it.
func TestAllowedAddressesAreRecordedByName(t *testing.T) {
	w := newWorld(t, "version: 1\npresets: [public]\n")
	w.host("web.test", "93.184.215.14")
	w.http("93.184.215.14:80", func(rw http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(rw, "hello") })
	if _, body := fetch(t, w.client(), "GET", "http://web.test/", http.NoBody); body != "hello" {
		t.Fatalf("%q", body)
	}
	var named bool
	for _, e := range w.all() {
		named = named || e.Kind == Connection && e.Name == "web.test" && e.Allow
	}
	if !named {
		t.Error("the connection has no name")
	}
}
