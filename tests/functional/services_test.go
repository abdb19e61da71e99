package functional

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// asks sends a request for each method and path of its arguments to a port of the host, and tells
// status and body, or the error.
const asks = `
import errno, http.client, json, sys
told = []
for one in sys.argv[1:]:
    method, port, path = one.split(" ")
    try:
        c = http.client.HTTPConnection("host.sandboxd.internal", int(port))
        c.request(method, path)
        r = c.getresponse()
        told.append("%d %s" % (r.status, r.read().decode()))
    except OSError as e:
        told.append(errno.errorcode.get(e.errno, str(e)))
print(json.dumps(told))
`

// A Unix socket that the operator has named is a service: requests reach it by the rules of the
// policy, are recorded, and are answered with the reason where nothing listens. A policy chooses
// among names, and never a path.
func TestServicesAtUnixSockets(t *testing.T) {
	dir, err := os.MkdirTemp("", "services") //nolint:usetesting // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	path := filepath.Join(dir, "registry.sock")
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%s %s", r.Method, r.RequestURI)
	})}
	listen := func() {
		t.Helper()
		l, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		go server.Serve(l) //nolint:errcheck // ends with the server
	}
	listen()
	t.Cleanup(func() { _ = server.Close() })
	d := harness.Start(t, harness.Options{Args: []string{"--service", "registry=unix:" + path, "--service", "gone=unix:" + filepath.Join(dir, "gone.sock")}})
	const doc = `
version: 1
services:
- {name: registry, port: 5000, to: "unix:registry", inspect: true, methods: [GET], paths: [/v2/*]}
- {name: gone, port: 80, to: "unix:gone"}
- {name: silent, port: 81, to: "unix:gone"}
`
	egress := func(doc string) api.Network { return api.Network{Mode: api.NetworkEgress, Policy: doc} }
	box := d.Create(t, api.CreateSandbox{Name: "box", Network: egress(doc)})
	want := func(when string, pairs ...string) {
		t.Helper()
		argv := []string{"python3", "-c", asks}
		for i := 0; i < len(pairs); i += 2 {
			argv = append(argv, pairs[i])
		}
		got := box.Exec(t, api.ExecRequest{Argv: argv, Timeout: testenv.HungAfter.Seconds()})
		var told []string
		if err := json.Unmarshal([]byte(got.Stdout), &told); err != nil || 2*len(told) != len(pairs) {
			t.Fatalf("%s: %+v: %s%s", when, got.Exit, got.Stdout, got.Stderr)
		}
		for i := range told {
			if !strings.HasPrefix(told[i], pairs[2*i+1]) {
				t.Errorf("%s: %s: %q, want %q", when, pairs[2*i], told[i], pairs[2*i+1])
			}
		}
	}
	all := []string{
		"GET 5000 /v2/_catalog?n=1", "200 GET /v2/_catalog?n=1", "GET 5000 /v2/./a", "200 GET /v2/a", "PUT 5000 /v2/x", "403 sandboxd: ", "GET 5000 /admin", "403 sandboxd: ", "GET 5000 /v2/../admin", "403 sandboxd: ",
		"GET 80 /", "502 sandboxd: connect to unix:gone: no such file or directory\n", "GET 81 /", "ECONNRESET", "GET 82 /", "ECONNRESET",
	}
	want("created", all...)
	if err := unix.Kill(gatewayOf(t, d), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	want("another gateway", all...)
	d.Kill9(t)
	d.Launch(t)
	want("another daemon", all...) // connections wait until it serves them
	change := func(to string) {
		t.Helper()
		if err := d.Call(t.Context(), http.MethodPatch, "/v1/sandboxes/box", api.UpdateSandbox{Network: new(egress(to))}, nil); err != nil {
			t.Fatal(err)
		}
	}
	change(doc + "- {port: 83, to: \"unix:registry\"}\n")
	want("changed", append(all, "PUT 83 /any", "200 PUT /any")...)
	change(doc)
	want("changed back", append(all, "PUT 83 /any", "ECONNRESET")...)

	seen := map[string]bool{}
	harness.Eventually(t, func() error {
		for _, f := range box.Flows(t) {
			if text := fmt.Sprint(f); strings.Contains(text, dir) {
				t.Errorf("a flow has the path: %s", text)
			}
			seen[fmt.Sprint(f.Kind, " ", f.Name, ":", f.Port, f.Path, " ", f.Allow, " ", f.Status, " ", f.Rule, " ", f.Reason)] = true
		}
		for _, want := range []string{
			"request host.sandboxd.internal:5000/v2/_catalog true 200 registry ", "connection host.sandboxd.internal:81 true 0 silent connect to unix:gone: no such file or directory",
			"request host.sandboxd.internal:80/ true 0 gone connect to unix:gone: no such file or directory",
		} {
			if !seen[want] {
				return fmt.Errorf("the record has %v, and not %q", seen, want)
			}
		}
		return nil
	})
	for name, doc := range map[string]string{
		"named no socket": strings.ReplaceAll(doc, "unix:gone", "unix:docker"), "is not the name of a socket": strings.ReplaceAll(doc, "unix:gone", "unix:"+path),
	} {
		err := d.Call(t.Context(), http.MethodPost, "/v1/sandboxes", api.CreateSandbox{Network: egress(doc)}, nil)
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("a sandbox with %q: %v", doc, err)
		}
	}
	for _, arg := range []string{"registry", "registry=/run/x", "registry=unix:", "Registry=unix:/run/x", "registry=unix:@x", "registry=unix:/" + strings.Repeat("x", 107)} {
		if out := d.CLI(t, "serve", "--data-dir", d.DataDir+"2", "--runtime-dir", d.RuntimeDir+"2", "--service", arg); out.Code != 2 {
			t.Errorf("serve --service %s: %+v", arg, out)
		}
	}
}
