package network

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"slices"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// connects makes connections and asks for names, as its arguments say, and prints when it is done.
// With -d another process does it, which has left its parent.
const connects = `
import os, socket, sys, urllib.error, urllib.request
args = sys.argv[1:]
if args[0] == "-d":
    args = args[1:]
    end, held = os.pipe()
    if os.fork():
        os.close(held)
        os.read(end, 1)
        sys.exit() # the exec ends with it
    os.setsid()
    if os.fork():
        os._exit(0)
for a in args:
    try:
        if a.startswith("http:"):
            urllib.request.urlopen(a).read()
        elif ":" in a:
            host, port = a.rsplit(":", 1)
            c = socket.create_connection((host, int(port)))
            c.sendall(b"x")
            while c.recv(1000):
                pass
        else:
            socket.getaddrinfo(a, 80, family=socket.AF_INET)
    except OSError:
        pass
print(os.getpid(), flush=True)
os.close(1)
`

// The record has the process and the exec of refusals, and of connections that are allowed; of a
// sandbox that shares a network, that one's.
func TestProcessesOfFlows(t *testing.T) {
	const policy = `{version: 1, rules: [{name: lan, allow: 10.1.0.7, ports: 9000}]}`
	each(t, func(t *testing.T, w *world, d *harness.Daemon) {
		t.Helper()
		w.serve(t, "10.1.0.7:9000", func(c net.Conn) { _, _ = io.CopyN(io.Discard, c, 1) })
		owner := d.Create(t, api.CreateSandbox{Network: api.Network{Mode: api.NetworkEgress, Policy: policy}})
		guest := d.Create(t, api.CreateSandbox{Network: api.Network{Mode: api.NetworkSandbox, Sandbox: owner.ID}})
		for name, tc := range map[string]struct {
			in   *harness.Sandbox
			args []string
		}{
			"own":      {owner, nil},
			"orphaned": {owner, []string{"-d"}},
			"shared":   {guest, nil},
		} {
			t.Run(name, func(t *testing.T) {
				argv := slices.Concat([]string{"python3", "-c", connects}, tc.args, []string{"10.9.9.9:5432", "evil.test", "http://10.9.9.9/", "10.1.0.7:9000"})
				want := api.FlowProcess{Name: "python3"}
				if tc.in == guest {
					want.Sandbox = guest.ID
				}
				// A search ends with its connection, or after a second: on a busy machine some flows have no
				// process. Those that have one must have the right one.
				seen := make(map[string]bool)
				harness.Eventually(t, func() error {
					before := len(owner.Flows(t))
					var x api.Exec
					if err := d.Call(t.Context(), "POST", "/v1/sandboxes/"+tc.in.ID+"/exec", api.ExecRequest{Argv: argv, Detach: true, Timeout: testenv.HungAfter.Seconds()}, &x); err != nil {
						t.Fatal(err)
					}
					var flows []api.Flow
					harness.Eventually(t, func() error {
						// The resolver's library may ask twice.
						if flows = owner.Flows(t)[before:]; len(flows) < 4 || flows[len(flows)-1].Rule != "lan" {
							return fmt.Errorf("no flow of the last connection: %s", text(flows))
						}
						return nil
					})
					want.Exec = x.ID
					for i := range flows {
						f := &flows[i]
						if f.Process == nil {
							continue
						}
						if err := sameProcess(f.Process, want, x.PID, name == "orphaned"); err != nil {
							t.Fatalf("%s: %v", text(f), err)
						}
						seen[fmt.Sprint(f.Kind, f.Name, f.Port)] = true
					}
					if len(seen) < 4 {
						return fmt.Errorf("processes are known of %v alone", seen)
					}
					return nil
				})
			})
		}
	})
}

// sameProcess compares all but the pid of an orphan, which is another one than the exec's.
func sameProcess(got *api.FlowProcess, want api.FlowProcess, pid int, orphan bool) error {
	if orphan == (got.PID == pid) {
		return fmt.Errorf("pid %d, where the exec has %d", got.PID, pid)
	}
	if want.PID = got.PID; *got != want {
		return fmt.Errorf("want %+v", want)
	}
	return nil
}

func text(v any) string {
	data, err := json.Marshal(v)
	if err != nil {
		panic(err) // flows have no channels
	}
	return string(data)
}
