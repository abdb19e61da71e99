package functional

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// A network that was made stays without sandboxes. Sandboxes join it while they run, and are found
// by aliases. Of one that is in internal networks only nothing leads out, whatever its policy says.
// All of it holds after a crash of the gateway and of the daemon.
func TestMadeNetworks(t *testing.T) {
	testenv.SameForAll(t)
	dir, err := os.MkdirTemp("", "services") //nolint:usetesting // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	l, err := net.Listen("unix", filepath.Join(dir, "out.sock"))
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "outside") })}
	go server.Serve(l) //nolint:errcheck // ends with the server
	t.Cleanup(func() { _ = server.Close() })
	d := harness.Start(t, harness.Options{Args: []string{"--service", "out=unix:" + filepath.Join(dir, "out.sock")}})
	cli := func(args ...string) string {
		t.Helper()
		out := d.CLI(t, args...)
		if out.Code != 0 {
			t.Fatalf("%v: %+v", args, out)
		}
		return out.Stdout
	}
	cli("network", "create", "--label", "app=shop", "shop_default")
	cli("network", "create", "--internal", "inside")
	egress := api.Network{Mode: api.NetworkEgress, Policy: "version: 1\nservices:\n- {name: out, port: 5000, to: \"unix:out\"}\n"}
	create := func(name string, aliases map[string][]string, join ...string) *harness.Sandbox {
		t.Helper()
		net := egress
		net.Join, net.Aliases = join, aliases
		return d.Create(t, api.CreateSandbox{Name: name, Network: net, Command: []string{"python3", "-c", names}})
	}
	db := create("the_db", map[string][]string{"inside": {"sql", "Data_1"}}, "inside")
	both := create("both", nil, "inside", "shop_default")
	late := create("late", nil)
	for _, s := range []*harness.Sandbox{db, both, late} {
		harness.Eventually(t, func() error {
			c, err := d.Client(t).DialPort(t.Context(), s.ID, 8000)
			if err != nil {
				return err
			}
			return c.Close()
		})
	}
	outside := func(when string, s *harness.Sandbox, want string) {
		t.Helper()
		got := s.Exec(t, api.ExecRequest{Argv: []string{"python3", "-c", asks, "GET 5000 /"}, Timeout: testenv.HungAfter.Seconds()})
		var told []string
		if err := json.Unmarshal([]byte(got.Stdout), &told); err != nil || len(told) != 1 || (told[0] == "200 outside") != (want == "200 outside") {
			t.Errorf("%s: %s outside: %q %s, want %q", when, s.Name, told, got.Stderr, want)
		}
	}
	hosts := []string{"sql:8000", "the_db", "data_1.inside:8000", "the_db", "THE_DB:8000", "the_db"}
	reach := func(when string) {
		t.Helper()
		wantVisits(t, when, both, hosts...)
		wantVisits(t, when, db, "both:8000", "both", "sql.shop_default:8000", "no such name")
		outside(when, db, "")
		outside(when, both, "200 outside")
		outside(when, late, "200 outside")
	}
	reach("created")
	wantVisits(t, "in no network", late, "both:8000", "no such name")

	// One joins while it runs: it finds, and is found, by the name that it has then. It keeps its way
	// out.
	cli("rename", "late", "later")
	cli("network", "connect", "--alias", "guest", "shop_default", "later")
	joined := func(when string) {
		t.Helper()
		wantVisits(t, when, late, "both:8000", "both", "both.shop_default:8000", "both", "the_db:8000", "no such name")
		wantVisits(t, when, both, "guest:8000", "late", "later:8000", "late", "late:8000", "no such name")
	}
	joined("joined")
	if err := unix.Kill(gatewayOf(t, d), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	reach("another gateway")
	joined("another gateway")
	d.Kill9(t)
	d.Launch(t)
	harness.Eventually(t, func() error {
		for _, s := range []*harness.Sandbox{db, both, late} {
			if told := visit(t, s, "192.0.2.1:8000", "198.18.0.0:8000"); told[1] != "ECONNRESET" {
				return fmt.Errorf("%s has no network yet: %v", s.Name, told)
			}
		}
		return nil
	})
	reach("another daemon")
	joined("another daemon")

	// A network that is not internal is a way out, also later.
	cli("network", "connect", "shop_default", "the_db")
	outside("in a network that is not internal", db, "200 outside")
	if out := d.CLI(t, "network", "rm", "inside"); out.Code != 1 {
		t.Errorf("a network that is in use is removed: %+v", out)
	}
	cli("network", "disconnect", "shop_default", "the_db")
	outside("in an internal network again", db, "")

	// A fork has a name of its own, and not its origin's aliases.
	copies := fork(t, d, db.ID, api.ForkSandbox{Names: []string{"copy"}})
	if net := copies[0].Network; !slices.Equal(net.Join, []string{"inside"}) || len(net.Aliases) > 0 {
		t.Errorf("the fork has %+v", net)
	}
	outside("a fork", copies[0], "")
	for _, s := range append(copies, db, both, late) {
		s.Delete(t)
	}
	if got := strings.Fields(cli("network", "ls", "-q")); !slices.Equal(got, []string{"inside", "shop_default"}) {
		t.Errorf("left: %v", got)
	}
	if got := cli("network", "prune", "--label", "app=shop"); got != "shop_default\n1 networks\n" {
		t.Errorf("prune: %s", got)
	}
	if got := cli("network", "rm", "inside"); got != "inside\n" {
		t.Errorf("rm: %s", got)
	}
	var events []string
	for e := range strings.Lines(cli("events", "--since", "1h", "--no-follow", "--filter", "type=network", "--json")) {
		var event api.Event
		if err := json.Unmarshal([]byte(e), &event); err != nil {
			t.Fatalf("%v: %s", err, e)
		}
		events = append(events, fmt.Sprintf("%s %s %s", event.Action, event.Object, event.Name))
	}
	want := []string{
		"created shop_default ", "created inside ", "connected shop_default later", "connected shop_default the_db", "disconnected shop_default the_db",
		"removed shop_default ", "removed inside ",
	}
	if !slices.Equal(events, want) {
		t.Errorf("events: %q", events)
	}
}
