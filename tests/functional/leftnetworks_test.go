package functional

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// echoing serves port 8000 with an echo of lines.
const echoing = `
import socketserver
class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            self.wfile.write(line)
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True
    request_queue_size = 128
Server(("0.0.0.0", 8000), Handler).serve_forever()
`

// keeps holds a connection to each address of its arguments, and tells that by the FIFO "ready".
// Four threads go on making connections to the first. Once the FIFO "go" has a writer, each
// connection is tried again, and each thread makes one more. It tells which of them are served.
const keeps = `
import json, os, socket, sys, threading
def connect(at):
    c = socket.create_connection((at, 8000))
    return c if talk(c) else None
def talk(c):
    try:
        c.sendall(b"line\n")
        return c.recv(10) == b"line\n"
    except OSError:
        return False
go, flood = threading.Event(), []
def make(at):
    while True:
        last = go.is_set()
        try:
            c = connect(at)
        except OSError:
            c = None
        if c and (last or len(flood) < 16):
            flood.append(c)
        elif c:
            c.close()
        if last:
            return
held = [connect(at) for at in sys.argv[1:]]
assert all(held)
threads = [threading.Thread(target=make, args=sys.argv[1:2]) for _ in range(4)]
for t in threads:
    t.start()
with open("/tmp/ready", "w") as f:
    f.write("ready")
open("/tmp/go").read()
go.set()
told = [talk(c) for c in held]
for t in threads:
    t.join()
print(json.dumps({"held": told, "flood": sum(talk(c) for c in flood)}))
`

// A running sandbox leaves a network. When the request is answered no connection between it and a
// sandbox with which it shares no other network goes on or is made, in either direction, whatever
// was under way. All others go on. It joins again, also after it has left the last, a crash of the
// gateway and one of the daemon.
func TestRunningSandboxesLeaveNetworks(t *testing.T) {
	testenv.SameForAll(t)
	d := start(t)
	create := func(name string, join ...string) *harness.Sandbox {
		t.Helper()
		s := d.Create(t, api.CreateSandbox{Name: name, Network: api.Network{Join: join}, Command: []string{"python3", "-c", echoing}})
		s.Sh(t, "mkfifo /tmp/ready /tmp/go")
		return s
	}
	// Web shares back with db and both, and front with both and cache.
	web, db, both, cache := create("web", "front", "back"), create("db", "back"), create("both", "front", "back"), create("cache", "front")
	for _, s := range []*harness.Sandbox{web, db, both, cache} {
		harness.Eventually(t, func() error {
			c, err := d.Client(t).DialPort(t.Context(), s.ID, 8000)
			if err != nil {
				return err
			}
			return c.Close()
		})
	}
	type told struct {
		Held  []bool
		Flood int
	}
	keep := func(s *harness.Sandbox, to ...string) (answer func() told) {
		t.Helper()
		type ended struct {
			*api.ExecResult
			err error
		}
		done := make(chan ended, 1)
		go func() {
			out, err := s.TryExec(t.Context(), api.ExecRequest{Argv: append([]string{"python3", "-c", keeps}, to...), Timeout: testenv.HungAfter.Seconds()})
			done <- ended{out, err}
		}()
		if got := s.Exec(t, api.ExecRequest{Argv: []string{"cat", "/tmp/ready"}, Timeout: testenv.HungAfter.Seconds()}); got.Stdout != "ready" {
			t.Fatalf("%+v: %+v", got, (<-done).ExecResult)
		}
		return func() (got told) {
			t.Helper()
			s.Sh(t, ": > /tmp/go")
			out := <-done
			if out.err != nil {
				t.Fatal(out.err)
			}
			if err := json.Unmarshal([]byte(out.Stdout), &got); err != nil {
				t.Fatalf("%s: %+v", s.Name, out.ExecResult)
			}
			return got
		}
	}
	cli := func(args ...string) {
		t.Helper()
		if out := d.CLI(t, args...); out.Code != 0 {
			t.Fatalf("%v: %+v", args, out)
		}
	}
	want := func(when string, got told, flood bool, held ...bool) {
		t.Helper()
		if fmt.Sprint(got.Held) != fmt.Sprint(held) || (got.Flood > 0) != flood {
			t.Errorf("%s: %+v, want %v and others %t", when, got, held, flood)
		}
	}
	fromWeb, fromDB, fromBoth := keep(web, "db", "both", "cache"), keep(db, "web", "both"), keep(both, "web", "db")
	cli("network", "disconnect", "back", "web")
	want("web after it has left", fromWeb(), false, false, true, true)
	want("db after web has left", fromDB(), false, false, true)
	want("both after web has left", fromBoth(), true, true, true)
	if got, err := web.Inspect(t.Context()); err != nil || fmt.Sprint(got.Network.Join) != "[front]" {
		t.Errorf("it is in %+v, %v", got, err)
	}
	asks := func(when string, s *harness.Sandbox, at ...string) {
		t.Helper()
		script := "import socket,sys\nfor a in sys.argv[1:]:\n try: socket.create_connection((a, 8000)).close(); print(a, 'connects')\n except socket.gaierror: print(a, 'is no name')"
		got := s.Exec(t, api.ExecRequest{Argv: append([]string{"python3", "-c", script}, at[:len(at)-1]...), Timeout: testenv.HungAfter.Seconds()})
		if got.Stdout != at[len(at)-1] {
			t.Errorf("%s: %s: %s%s, want %s", when, s.Name, got.Stdout, got.Stderr, at[len(at)-1])
		}
	}
	asks("left", web, "db", "db.back", "both.back", "both", "db is no name\ndb.back is no name\nboth.back is no name\nboth connects\n")
	asks("left", db, "web", "web.back", "web is no name\nweb.back is no name\n")
	if t.Failed() {
		return // no connection was reset that the record could have
	}
	harness.Eventually(t, func() error {
		for _, f := range web.Flows(t) {
			if f.Kind == api.FlowConnection && f.Name == "db" && f.Allow && strings.Contains(f.Reason, "share no network any more") {
				return nil
			}
		}
		return fmt.Errorf("the record has no connection that was reset")
	})

	// Db leaves its last network, and has a gateway all the same.
	fromBoth = keep(both, "db", "web")
	cli("network", "disconnect", "back", "db")
	want("both after db has left", fromBoth(), false, false, true)
	asks("in no network", db, "both", "both is no name\n")
	if err := unix.Kill(gatewayOf(t, d), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	asks("another gateway", db, "both", "both is no name\n")
	asks("another gateway", both, "db", "web", "db is no name\nweb connects\n")
	var events []string
	for e := range strings.Lines(d.CLI(t, "events", "--since", "1h", "--no-follow", "--filter", "type=network", "--json").Stdout) {
		var event api.Event
		if err := json.Unmarshal([]byte(e), &event); err != nil {
			t.Fatalf("%v: %s", err, e)
		}
		events = append(events, fmt.Sprintf("%s %s %s %s", event.Action, event.Object, event.Name, event.State))
	}
	if got := strings.Join(events, ", "); got != "disconnected back web running, disconnected back db running" {
		t.Errorf("events: %s", got)
	}
	d.Kill9(t)
	d.Launch(t)
	cli("network", "connect", "--alias", "sql", "back", "db")
	harness.Eventually(t, func() error { // programs wait for questions that are not answered, and not for ever
		for _, s := range []*harness.Sandbox{web, db, both} {
			if told := visit(t, s, "198.18.0.0:8000"); told[0] != "ECONNRESET" {
				return fmt.Errorf("%s has no network yet: %v", s.Name, told)
			}
		}
		return nil
	})
	asks("joined again", db, "both", "both connects\n")
	asks("joined again", both, "db", "sql", "db connects\nsql connects\n")
	asks("joined again", web, "db", "db is no name\n")
}
