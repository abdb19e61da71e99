package functional

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// names is a server on all addresses, and one on the loopback only. Both tell the sandbox's name.
const names = `
import http.server, socket, threading
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(socket.gethostname().encode())
    def log_message(self, *args):
        pass
for at in ("0.0.0.0", 8000), ("127.0.0.1", 8001):
    threading.Thread(target=http.server.ThreadingHTTPServer(at, Handler).serve_forever).start()
`

// visits asks each address of its arguments for its server's name, and tells the names or errors.
const visits = `
import errno, http.client, json, socket, sys
told = []
for at in sys.argv[1:]:
    host, port = at.rsplit(":", 1)
    host = host.strip("[]")
    try:
        c = http.client.HTTPConnection(host, int(port))
        c.request("GET", "/", headers={"Host": "any"})
        told.append(c.getresponse().read().decode())
    except socket.gaierror:
        told.append("no such name")
    except OSError as e:
        told.append(errno.errorcode.get(e.errno, str(e)))
print(json.dumps(told))
`

// visit returns the answers that a sandbox gets at addresses.
func visit(t *testing.T, s *harness.Sandbox, at ...string) []string {
	t.Helper()
	got := s.Exec(t, api.ExecRequest{Argv: append([]string{"python3", "-c", visits}, at...), Timeout: testenv.HungAfter.Seconds()})
	var told []string
	if err := json.Unmarshal([]byte(got.Stdout), &told); err != nil || len(told) != len(at) {
		t.Fatalf("%+v: %s%s", got.Exit, got.Stdout, got.Stderr)
	}
	return told
}

// wantVisits compares the answers that a sandbox gets, given as address and answer in turn.
func wantVisits(t *testing.T, when string, s *harness.Sandbox, want ...string) {
	t.Helper()
	var at, answers []string
	for pair := range slices.Chunk(want, 2) {
		at, answers = append(at, pair[0]), append(answers, pair[1])
	}
	for i, told := range visit(t, s, at...) {
		if told != answers[i] {
			t.Errorf("%s: %s at %s: %q, want %q", when, s.Name, at[i], told, answers[i])
		}
	}
}

// gatewayOf returns the pid of a daemon's gateway.
func gatewayOf(t *testing.T, d *harness.Daemon) (pid int) {
	t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	parents := make(map[int]int)
	var gateways []int
	for _, file := range all {
		stat, err := os.ReadFile(filepath.Join(filepath.Dir(file), "stat"))
		if err != nil {
			continue // it has ended
		}
		of, _ := strconv.Atoi(filepath.Base(filepath.Dir(file))) // by the pattern
		fields := strings.Fields(string(stat[strings.LastIndex(string(stat), ")")+1:]))
		parents[of], _ = strconv.Atoi(fields[1]) // the kernel's
		if args, err := os.ReadFile(file); err == nil && fields[0] != "Z" && strings.HasSuffix(string(args), "\x00gateway\x00") {
			gateways = append(gateways, of)
		}
	}
	for _, of := range gateways {
		for p := of; p > 1; p = parents[p] {
			if p == d.PID() {
				return of
			}
		}
	}
	t.Fatal("the daemon has no gateway")
	return 0
}

// Sandboxes in a named network reach each other by name, and only servers that listen on all
// addresses. Other sandboxes reach none of them. Both hold after a crash of the gateway, after one
// of the daemon, and for sandboxes that stop and start, or are forked.
func TestNamedNetworks(t *testing.T) {
	testenv.SameForAll(t)
	d := start(t)
	server := []string{"python3", "-c", names}
	create := func(name string, net api.Network) *harness.Sandbox {
		t.Helper()
		return d.Create(t, api.CreateSandbox{Name: name, Network: net, Command: server})
	}
	web := create("web", api.Network{Join: []string{"front", "back"}})
	db := create("Db", api.Network{Join: []string{"back"}})
	cache := create("cache", api.Network{Mode: api.NetworkEgress, Policy: "version: 1\nrules:\n- deny: [web, 198.18.0.0/15]\n  ports: any\n", Join: []string{"front"}})
	lone := create("lone", api.Network{Mode: api.NetworkFull})
	serves := func(all ...*harness.Sandbox) {
		t.Helper()
		for _, s := range all {
			harness.Eventually(t, func() error {
				for _, port := range []uint16{8000, 8001} {
					c, err := d.Client(t).DialPort(t.Context(), s.ID, port)
					if err != nil {
						return err
					}
					if err := c.Close(); err != nil {
						return err
					}
				}
				return nil
			})
		}
	}
	serves(web, db, cache, lone)
	reach := func(when string) {
		t.Helper()
		wantVisits(t, when, web,
			"db:8000", "Db", "DB.back:8000", "Db", "db.back.internal:8000", "Db", "cache:8000", "cache", "cache.front:8000", "cache", "web:8000", "web", "web.back:8000", "web",
			"db.front:8000", "no such name", "db.internal:8000", "no such name", "cache.back:8000", "no such name", "lone:8000", "no such name",
			"db:8001", "ECONNRESET", "db:8002", "ECONNRESET", "db:1", "ECONNRESET", "db:2", "ECONNRESET")
		wantVisits(t, when, db, "web:8000", "web", "cache:8000", "no such name", "cache.front:8000", "no such name", "web.front:8000", "no such name")
		wantVisits(t, when, cache, "web:8000", "web", "web.front:8000", "web", "db:8000", "no such name", "db.back:8000", "no such name")
		wantVisits(t, when, lone, "web:8000", "no such name", "web.front:8000", "no such name", "lone:8000", "lone")
	}
	reach("created")

	// Each sandbox tries the address of each member of the networks.
	addresses := strings.Fields(web.Sh(t, `python3 -c 'import socket; print(*(socket.gethostbyname(n) for n in ("web.front", "db", "cache")))'`))
	if len(addresses) != 3 || slices.Contains(addresses, "192.0.2.1") {
		t.Fatalf("addresses %v", addresses)
	}
	for _, tc := range []struct {
		s    *harness.Sandbox
		want []string
	}{{web, []string{"web", "Db", "cache"}}, {db, []string{"web", "Db", "ECONNRESET"}}, {cache, []string{"web", "ECONNRESET", "cache"}}, {lone, slices.Repeat([]string{"ECONNRESET"}, 3)}} {
		for i, told := range visit(t, tc.s, addresses[0]+":8000", addresses[1]+":8000", addresses[2]+":8000", "[::ffff:"+addresses[0]+"]:8000", "[64:ff9b::"+addresses[0]+"]:8000") {
			if i == 3 && told != tc.want[0] || i == 4 && told != "ECONNRESET" || i < 3 && told != tc.want[i] {
				t.Errorf("%s at address %d: %q, want %q", tc.s.Name, i, told, tc.want)
			}
		}
	}

	// The record has them, with the network.
	harness.Eventually(t, func() error {
		counts := make(map[string]int)
		for _, f := range web.Flows(t) {
			if f.Kind == api.FlowConnection && f.Reason != "" {
				counts[fmt.Sprintf("%t %s", f.Allow, f.Reason)]++
			}
		}
		for _, port := range []int{1, 2, 8001, 8002} {
			if want := fmt.Sprintf("true connect to Db port %d: connection refused", port); counts[want] == 0 {
				return fmt.Errorf("the record has %v, and not %q", counts, want)
			}
		}
		for _, f := range cache.Flows(t) {
			if f.Kind == api.FlowConnection {
				counts[fmt.Sprintf("%t %s %s:%d %s", f.Allow, f.Name, f.Address, f.Port, f.Rule)]++
			}
		}
		for _, want := range []string{"true web " + addresses[0] + ":8000 network front", "false  " + addresses[1] + ":8000 "} {
			if counts[want] == 0 {
				return fmt.Errorf("the record has %v, and not %q", counts, want)
			}
		}
		return nil
	})

	// So has the record of the sandbox that is connected to, with attempts that it refused. A flood of
	// them does not fill it.
	harness.Eventually(t, func() error {
		counts := make(map[string]int)
		for _, f := range db.Flows(t) {
			counts[fmt.Sprintf("%s %t %s %s %d %s %s", f.Kind, f.Allow, f.Name, f.Address, f.Port, f.Rule, f.Reason)]++
		}
		for _, want := range []string{"peer true web " + addresses[0] + " 8000 network back ", "peer true web " + addresses[0] + " 8002 network back connection refused"} {
			if counts[want] == 0 {
				return fmt.Errorf("the record of Db has %v, and not %q", counts, want)
			}
		}
		for what := range counts {
			if strings.HasPrefix(what, "peer true cache") || strings.HasPrefix(what, "peer true lone") {
				return fmt.Errorf("the record of Db has %q", what)
			}
		}
		return nil
	})
	networks := func() string {
		t.Helper()
		out := d.CLI(t, "network", "ls")
		if out.Code != 0 {
			t.Fatalf("%+v", out)
		}
		var rows []string
		for row := range strings.Lines(out.Stdout) {
			rows = append(rows, strings.Join(strings.Fields(row), " "))
		}
		return strings.Join(rows, "\n")
	}
	const listed = "NETWORK SANDBOX STATE ADDRESS\nback web running %s\nback Db running %s\nfront web running %[1]s\nfront cache running %[3]s"
	if got, want := networks(), fmt.Sprintf(listed, addresses[0], addresses[1], addresses[2]); got != want {
		t.Errorf("network ls:\n%s\nwant\n%s", got, want)
	}

	copies := fork(t, d, web.ID, api.ForkSandbox{Names: []string{"copy"}})
	serves(copies...)
	wantVisits(t, "forked", db, "copy:8000", "copy", "web:8000", "web")
	wantVisits(t, "forked", cache, "copy:8000", "copy")
	copies[0].Delete(t)
	wantVisits(t, "the fork is deleted", db, "copy:8000", "no such name", "web:8000", "web")

	// A change of the mode changes no membership.
	if err := d.Call(t.Context(), "PATCH", "/v1/sandboxes/"+lone.ID, api.UpdateSandbox{Network: &api.Network{Mode: api.NetworkFull, Join: []string{"front"}}}, nil); err == nil {
		t.Error("a change of the mode joins a network")
	}
	if err := d.Call(t.Context(), "PATCH", "/v1/sandboxes/"+cache.ID, api.UpdateSandbox{Network: &api.Network{Mode: api.NetworkNone}}, nil); err != nil {
		t.Errorf("a change of the mode: %v", err)
	}

	if err := unix.Kill(gatewayOf(t, d), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	reach("another gateway")
	d.Kill9(t)
	d.Launch(t)
	harness.Eventually(t, func() error { // programs wait for questions that are not answered, and not for ever
		for _, s := range []*harness.Sandbox{web, db, cache, lone} {
			if told := visit(t, s, "192.0.2.1:8000", "198.18.0.0:8000"); told[1] != "ECONNRESET" {
				return fmt.Errorf("%s has no network yet: %v", s.Name, told)
			}
		}
		return nil
	})
	reach("another daemon")

	db.MustTurn(t, "stop", api.StopSandbox{}, api.StateStopped)
	if got := networks(); !strings.Contains(got, "back Db stopped -") {
		t.Errorf("network ls:\n%s", got)
	}
	wantVisits(t, "stopped", web, "db:8000", "no such name", addresses[1]+":8000", "ECONNRESET", "cache:8000", "cache")
	db.MustTurn(t, "start", api.StartSandbox{}, api.StateRunning)
	serves(db)
	reach("started again")
	wantVisits(t, "started again", web, addresses[1]+":8000", "Db")

	db.Delete(t)
	wantVisits(t, "deleted", web, "db:8000", "no such name", addresses[1]+":8000", "ECONNRESET")
	db = create("Db", api.Network{Join: []string{"back"}})
	serves(db)
	wantVisits(t, "created anew", web, addresses[1]+":8000", "Db")

	if out := d.CLI(t, "create", "--name", "more", "--network", "net:front", "--network", "net:side", "--network", "none"); out.Code != 0 {
		t.Fatalf("%+v", out)
	}
	if out := d.CLI(t, "exec", "more", "--", "python3", "-c", visits, "web:8000", "cache.front:8000", "db:8000"); out.Stdout != `["web", "cache", "no such name"]`+"\n" {
		t.Errorf("%+v", out)
	}
}
