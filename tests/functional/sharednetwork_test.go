package functional

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// says is a server at a port of the loopback that says one word to every client.
func says(word string, port int) []string {
	return []string{"python3", "-c", fmt.Sprintf(`
import socket
s = socket.create_server(("127.0.0.1", %d))
while True:
    c, _ = s.accept()
    c.sendall(%q.encode())
    c.close()
`, port, word)}
}

// hears returns the answer that a program of the sandbox gets at an address, or its error.
func hears(t *testing.T, s *harness.Sandbox, address string, port int) string {
	t.Helper()
	return strings.TrimSpace(s.Exec(t, api.ExecRequest{Argv: []string{"python3", "-c", fmt.Sprintf(`
import errno, socket
try:
    c = socket.create_connection((%q, %d))
    print(c.makefile().read() or "nothing")
except OSError as e:
    print(errno.errorcode.get(e.errno, e))
`, address, port)}}).Stdout)
}

// serves waits until the owner's server answers a sandbox that shares its network.
func serves(t *testing.T, client *harness.Sandbox) {
	t.Helper()
	harness.Eventually(t, func() error {
		if got := hears(t, client, "127.0.0.1", 8000); got != "owner" {
			return fmt.Errorf("the owner's server says %q", got)
		}
		return nil
	})
}

// A sandbox that shares the network of another one reaches the servers of that one, and the
// destinations that it may reach, and no more. Other sandboxes do not reach them. This holds while
// the other one runs, with this daemon and the next.
func TestSharedNetwork(t *testing.T) {
	testenv.RequireUserNS(t)
	d := start(t)
	for _, mode := range []api.NetworkMode{api.NetworkNone, api.NetworkFull} {
		t.Run(string(mode), func(t *testing.T) {
			owner := d.Create(t, api.CreateSandbox{Name: "owner-" + string(mode), Network: api.Network{Mode: mode}, Command: says("owner", 8000)})
			guest := d.Create(t, api.CreateSandbox{Network: api.Network{Mode: api.NetworkSandbox, Sandbox: owner.Name}})
			other := d.Create(t, api.CreateSandbox{Network: api.Network{Mode: mode}})
			if guest.Network.Sandbox != owner.ID {
				t.Errorf("its network is %+v, want that of %s", guest.Network, owner.ID)
			}
			if e := guest.Enforced; slices.Contains(e.Namespaces, "net") || e.Network != owner.Enforced.Network {
				t.Errorf("enforced: its own namespaces are %q, its network %q; the owner's network %q", e.Namespaces, e.Network, owner.Enforced.Network)
			}
			serves(t, guest)
			if got := hears(t, other, "127.0.0.1", 8000); got != "ECONNREFUSED" {
				t.Errorf("a sandbox that does not share the network hears %q", got)
			}
			outside := hears(t, owner, "10.0.0.1", 5432)
			if got := hears(t, guest, "10.0.0.1", 5432); got != outside {
				t.Errorf("a private address says %q, and to the owner %q", got, outside)
			}
			kept := fork(t, d, guest.ID, api.ForkSandbox{})[0]
			serves(t, kept)
			kept.Delete(t)

			d.Kill9(t)
			d.Launch(t)
			serves(t, guest)
			if got := hears(t, guest, "10.0.0.1", 5432); got != outside {
				t.Errorf("with the next daemon a private address says %q", got)
			}
			if mode == api.NetworkFull {
				harness.Eventually(t, func() error {
					refused := 0
					for _, f := range owner.Flows(t) {
						if !f.Allow && f.Address == "10.0.0.1" {
							refused++
						}
					}
					if refused != 3 {
						return fmt.Errorf("the owner's record has %d refusals, want 3", refused)
					}
					return nil
				})
			}

			// The owner's end leaves the loopback.
			owner.MustTurn(t, "stop", api.StopSandbox{}, api.StateStopped)
			if got := hears(t, guest, "127.0.0.1", 8000); got != "ECONNREFUSED" {
				t.Errorf("the server of a stopped sandbox says %q", got)
			}
			if got := hears(t, guest, "10.0.0.1", 5432); !slices.Contains([]string{"EHOSTUNREACH", "ENETUNREACH"}, got) {
				t.Errorf("without its owner it hears %q", got)
			}
			guest.MustTurn(t, "stop", api.StopSandbox{}, api.StateStopped)
			_, err := guest.Turn(t.Context(), "start", api.StartSandbox{})
			wantProblem(t, err, api.CodeConflict, owner.Name)
			owner.MustTurn(t, "start", api.StartSandbox{}, api.StateRunning)
			guest.MustTurn(t, "start", api.StartSandbox{}, api.StateRunning)
			serves(t, guest)
			const namespace = "readlink /proc/self/ns/net"
			if got, want := guest.Sh(t, namespace), owner.Sh(t, namespace); got != want {
				t.Errorf("after the owner's start it is in %s, and the owner in %s", got, want)
			}

			guest.MustTurn(t, "stop", api.StopSandbox{}, api.StateStopped)
			owner.Delete(t)
			_, err = guest.Turn(t.Context(), "start", api.StartSandbox{})
			wantProblem(t, err, api.CodeConflict, "was deleted")
			_, err = d.TryCreate(t.Context(), api.CreateSandbox{Network: api.Network{Mode: api.NetworkSandbox, Sandbox: owner.ID}})
			wantProblem(t, err, api.CodeNotFound, owner.ID)
		})
	}
}

// After the death of the launcher both are started again, the owner first.
func TestSharedNetworkIsLostWithTheLauncher(t *testing.T) {
	testenv.RequireUserNS(t)
	d := start(t)
	owner := d.Create(t, api.CreateSandbox{Name: "owner", Network: api.Network{Mode: api.NetworkFull}})
	guest := d.Create(t, api.CreateSandbox{Network: api.Network{Mode: api.NetworkSandbox, Sandbox: "owner"}})
	kill9(t, d.System(t).Launcher)
	owner.WaitState(t, api.StateLost)
	guest.WaitState(t, api.StateLost)
	if _, err := guest.Turn(t.Context(), "start", api.StartSandbox{}); !errors.Is(err, &api.Problem{Code: api.CodeConflict}) {
		t.Errorf("without its owner: %v", err)
	}
	owner.MustTurn(t, "start", api.StartSandbox{}, api.StateRunning)
	guest.MustTurn(t, "start", api.StartSandbox{}, api.StateRunning)
	if a, b := owner.Sh(t, "readlink /proc/self/ns/net"), guest.Sh(t, "readlink /proc/self/ns/net"); a != b {
		t.Errorf("they are in %s and %s", a, b)
	}
}

// Sandboxes that share networks leave nothing behind, also where they do not start.
func TestSharedNetworksLeaveNothing(t *testing.T) {
	testenv.RequireUserNS(t)
	d := start(t)
	owner := d.Create(t, api.CreateSandbox{Network: api.Network{Mode: api.NetworkFull}})
	alone := d.Create(t, api.CreateSandbox{})
	cycle := func() {
		t.Helper()
		for _, of := range []*harness.Sandbox{owner, alone} {
			request := api.CreateSandbox{Network: api.Network{Mode: api.NetworkSandbox, Sandbox: of.ID}}
			d.Create(t, request).Delete(t)
			request.Network.Sandbox = "nobody"
			if _, err := d.TryCreate(t.Context(), request); !errors.Is(err, &api.Problem{Code: api.CodeNotFound}) {
				t.Errorf("of nobody: %v", err)
			}
		}
	}
	cycle()
	before := d.Snapshot(t)
	for range 5 {
		cycle()
	}
	d.NothingLeaked(t, before)
}

// The command line has the mode, and says what it lacks.
func TestSharedNetworkOfTheCommandLine(t *testing.T) {
	d := shared(t)
	owner := d.Create(t, api.CreateSandbox{})
	got := d.CLI(t, "run", "--network", "sandbox:"+owner.ID, "--", "readlink", "/proc/self/ns/net")
	if got.Code != 0 || got.Stdout != owner.Sh(t, "readlink /proc/self/ns/net") {
		t.Errorf("%+v", got)
	}
	for flag, want := range map[string]string{
		"--network=sandbox:": "sandbox needs the id or name",
		"--network=host":     "sandbox:SANDBOX",
	} {
		if got := d.CLI(t, "create", flag); got.Code == 0 || !strings.Contains(got.Stderr, want) {
			t.Errorf("%s: %+v", flag, got)
		}
	}
	if got := d.CLI(t, "create", "--network=sandbox:"+owner.ID, "--max-egress=1m"); got.Code == 0 || !strings.Contains(got.Stderr, "of its own") {
		t.Errorf("%+v", got)
	}
}

// A sandbox of a snapshot has the network of the snapshot's sandbox, unless it asks for another. A
// file has none.
func TestSnapshotsKeepTheNetwork(t *testing.T) {
	d := shared(t)
	const policy = "version: 1\nrules:\n- allow: example.com\n"
	of := api.Network{Mode: api.NetworkEgress, Policy: policy, Budget: api.NetworkBudget{Hosts: 3}}
	s := d.Create(t, api.CreateSandbox{Network: of})
	if snap := snapshot(t, d, s.ID, api.TakeSnapshot{Name: "connected"}); !reflect.DeepEqual(snap.Network, of) {
		t.Errorf("the snapshot says %+v", snap.Network)
	}
	owner := d.Create(t, api.CreateSandbox{Name: "owner"})
	guest := d.Create(t, api.CreateSandbox{Network: api.Network{Mode: api.NetworkSandbox, Sandbox: "owner"}})
	snapshot(t, d, guest.ID, api.TakeSnapshot{Name: "guest"})
	file := filepath.Join(t.TempDir(), "connected.tar")
	for _, args := range [][]string{{"export", "-o", file, "connected"}, {"import", "--name", "imported", file}} {
		if got := d.CLI(t, append([]string{"snapshots"}, args...)...); got.Code != 0 {
			t.Fatalf("%q: %+v", args, got)
		}
	}
	none := api.Network{Mode: api.NetworkNone}
	for _, tt := range []struct {
		snapshot  string
		ask, want api.Network
	}{
		{"connected", api.Network{}, of},
		{"connected", none, none},
		{"connected", api.Network{Mode: api.NetworkFull}, api.Network{Mode: api.NetworkFull}},
		{"imported", api.Network{}, none},
		{"guest", api.Network{}, api.Network{Mode: api.NetworkSandbox, Sandbox: owner.ID}},
	} {
		made := d.Create(t, api.CreateSandbox{Snapshot: tt.snapshot, Network: tt.ask})
		if !reflect.DeepEqual(made.Network, tt.want) {
			t.Errorf("of snapshot %s with %+v: %+v", tt.snapshot, tt.ask, made.Network)
		}
	}
	for flags, want := range map[string]api.NetworkMode{"": of.Mode, "--network=none": api.NetworkNone} {
		args := slices.DeleteFunc([]string{"create", "--snapshot", "connected", "--json", flags}, func(arg string) bool { return arg == "" })
		got := d.CLI(t, args...)
		var made api.Sandbox
		if err := json.Unmarshal([]byte(got.Stdout), &made); err != nil || made.Network.Mode != want {
			t.Errorf("%q: %v: %+v", args, err, got)
		}
	}
	if s := fork(t, d, s.ID, api.ForkSandbox{})[0]; !reflect.DeepEqual(s.Network, of) {
		t.Errorf("the fork has %+v", s.Network)
	}
	owner.Delete(t)
	_, err := d.TryCreate(t.Context(), api.CreateSandbox{Snapshot: "guest"})
	wantProblem(t, err, api.CodeNotFound, owner.ID)
}

// RUN of a build has the network that was asked for, also that of a sandbox.
func TestBuildsHaveANetwork(t *testing.T) {
	d := start(t)
	owner := d.Create(t, api.CreateSandbox{Network: api.Network{Mode: api.NetworkFull}, Command: says("owner", 8000)})
	serves(t, owner)
	registry := harness.LyingRegistry(t, nil)
	base := registry.Push(t, "team/base:1", twoLayers(t, "base"))
	d.MustPull(t, base)
	// Without a gateway a connection would wait.
	const run = "nc 127.0.0.1 8000 > /server; cat /etc/resolv.conf > /resolver; nc 10.0.0.1 5432 2> /outside; true"
	for name, network := range map[string]api.Network{
		"none": {}, "full": {Mode: api.NetworkFull}, "shared": {Mode: api.NetworkSandbox, Sandbox: owner.ID},
	} {
		tag := "local/network:" + name
		d.MustBuild(t, dockerfile(t, "FROM "+base+"\nRUN "+run+"\n"), api.Build{Tags: []string{tag}, Network: network, NoCache: true})
		got := d.Create(t, api.CreateSandbox{Image: tag}).Sh(t, "cat /server; echo; wc -l < /resolver; cat /outside")
		want := map[string]string{"none": "\n0\nnc: can't connect to remote host (10.0.0.1): Network is unreachable\n", "full": "\n3\n", "shared": "owner\n3\n"}[name]
		if got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	if list := d.List(t); len(list) != 4 {
		t.Errorf("%d sandboxes are left, want those of the test", len(list))
	}
}

// Where the owner's policy reads requests within TLS, all that share its network trust its
// authority, after another start too.
func TestSharedNetworkHasTheOwnersAuthority(t *testing.T) {
	d := shared(t)
	reads := api.Network{Mode: api.NetworkEgress, Policy: "version: 1\nrules:\n- allow: example.com\n  inspect: true\n"}
	owner, other := d.Create(t, api.CreateSandbox{Network: reads}), d.Create(t, api.CreateSandbox{Network: reads})
	guest := d.Create(t, api.CreateSandbox{Network: api.Network{Mode: api.NetworkSandbox, Sandbox: owner.ID}})
	const trusted = "sed '/END CERTIFICATE/q' " + runtime.TrustFile + "; echo $SSL_CERT_FILE"
	want := owner.Sh(t, trusted)
	if !strings.HasSuffix(want, runtime.TrustFile+"\n") || want == other.Sh(t, trusted) {
		t.Fatalf("control: the owner trusts %s", want)
	}
	if got := guest.Sh(t, trusted); got != want {
		t.Errorf("it trusts %s, and the owner %s", got, want)
	}
	guest.MustTurn(t, "stop", api.StopSandbox{}, api.StateStopped)
	guest.MustTurn(t, "start", api.StartSandbox{}, api.StateRunning)
	if got := guest.Sh(t, trusted); got != want {
		t.Errorf("started again it trusts %s, and the owner %s", got, want)
	}
}
