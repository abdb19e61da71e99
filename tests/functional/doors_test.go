package functional

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// echoes answers datagrams on port 5300 and connections on port 8000 with what came.
const echoes = `
import socket, threading
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
u.bind(("127.0.0.1", 5300))
def datagrams():
    while True:
        data, source = u.recvfrom(65536)
        u.sendto(b"udp " + data, source)
threading.Thread(target=datagrams, daemon=True).start()
l = socket.create_server(("127.0.0.1", 8000))
while True:
    c, _ = l.accept()
    while data := c.recv(4096):
        c.sendall(b"tcp " + data)
    c.close()
`

// A port is published as a Unix socket of the daemon's user, and one of datagrams at loopback; both
// again after a kill of the daemon, and not after the sandbox has ended.
func TestSocketsAndDatagramsArePublished(t *testing.T) {
	d := start(t)
	made := d.CLI(t, "create", "--name", "echo", "--network", "full", "-p", "unix:web.sock:8000", "-p", "5300/udp", "--", "python3", "-c", echoes)
	if made.Code != 0 {
		t.Fatal(made.Stderr)
	}
	inspect, err := d.Client(t).GetSandbox(t.Context(), "echo")
	if err != nil || len(inspect.Ports) != 2 {
		t.Fatalf("%+v, %v", inspect, err)
	}
	s := d.Sandbox(*inspect)
	web, datagrams := inspect.Ports[0].Socket, inspect.Ports[1]
	if fi, err := os.Lstat(web); err != nil || fi.Mode() != fs.ModeSocket|0o600 || filepath.Base(web) != "web.sock" || datagrams.HostPort == 0 || datagrams.Address != "127.0.0.1" {
		t.Fatalf("%v, %v, %+v", fi, err, inspect.Ports)
	}
	if listed := d.CLI(t, "port", "echo"); listed.Stdout != "8000/tcp -> unix:"+web+"\n5300/udp -> "+hostPort(datagrams)+"\n" {
		t.Errorf("%+v", listed)
	}
	ask := func(network, at string) (string, error) {
		c, err := net.Dial(network, at)
		if err != nil {
			return "", err
		}
		defer c.Close()
		if err := c.SetDeadline(time.Now().Add(testenv.HungAfter)); err != nil { // it only ends what hangs
			return "", err
		}
		if _, err := c.Write([]byte("hello")); err != nil {
			return "", err
		}
		data := make([]byte, 100)
		n, err := c.Read(data)
		return string(data[:n]), err
	}
	answers := func(when string) {
		t.Helper()
		harness.Eventually(t, func() error { // until the server listens: a connection ends at once
			_, err := ask("unix", web)
			return err
		})
		for network, at := range map[string]string{"unix": web, "udp": hostPort(datagrams)} {
			if text, err := ask(network, at); err != nil || !strings.HasSuffix(text, " hello") {
				t.Errorf("%s, %s: %q, %v", when, network, text, err)
			}
		}
	}
	answers("created")
	d.Kill9(t)
	d.Launch(t)
	answers("after a kill of the daemon")
	if _, err := d.TryCreate(t.Context(), api.CreateSandbox{Network: api.Network{Mode: api.NetworkFull}, Ports: []api.PortMapping{{Port: 1, Socket: "web.sock"}}}); !errors.Is(err, &api.Problem{Code: api.CodeConflict}) {
		t.Errorf("a socket that is taken: %v", err)
	}
	s.MustTurn(t, "stop", api.StopSandbox{}, api.StateStopped)
	harness.Eventually(t, func() error {
		if _, err := os.Lstat(web); !errors.Is(err, fs.ErrNotExist) {
			return errors.New("the socket of a stopped sandbox is there")
		}
		return nil
	})
	s.MustTurn(t, "start", api.StartSandbox{}, api.StateRunning)
	answers("started again")
}

func hostPort(p api.PortMapping) string {
	return (&net.UDPAddr{IP: net.ParseIP(p.Address), Port: int(p.HostPort)}).String()
}

// A secret outlives the daemon, and no file of it has its value.
func TestSecretsAreKeptSealed(t *testing.T) {
	const value = "planted-secret-value"
	d := start(t)
	set := d.CLIInput(t, strings.NewReader(value+"\n"), "secret", "set", "github", "--host", "api.github.com", "--path", "/repos/*", "--variable", "TOKEN")
	if set.Code != 0 || set.Stdout != "github\n" {
		t.Fatalf("%+v", set)
	}
	key := filepath.Join(d.DataDir, "secrets", "key")
	if fi, err := os.Stat(key); err != nil || fi.Mode() != 0o600 || fi.Size() != 32 {
		t.Errorf("the key: %v, %v", fi, err)
	}
	d.Kill9(t)
	d.Launch(t)
	if listed := d.CLI(t, "secret", "ls"); listed.Code != 0 || !strings.Contains(listed.Stdout, "github") || !strings.Contains(listed.Stdout, "/repos/*") {
		t.Errorf("%+v", listed)
	}
	const policy = "version: 1\nrules:\n- {allow: api.github.com, ports: 443, inspect: true}\n"
	s := d.Create(t, api.CreateSandbox{Network: api.Network{Mode: api.NetworkEgress, Policy: policy, Secrets: []string{"github"}}})
	if env := s.Sh(t, "env"); !strings.Contains(env, "TOKEN=sandboxd-") || strings.Contains(env, value) {
		t.Errorf("the environment has no placeholder, or the value: %s", env)
	}
	secretInFiles(t, d.DataDir, value)
	if strings.Contains(d.Log(), value) {
		t.Error("the value is in the log")
	}
	// A copy of the data directory without the key is worth nothing, and neither is one file.
	if err := os.Rename(key, key+".away"); err != nil {
		t.Fatal(err)
	}
	if listed := d.CLI(t, "secret", "ls"); listed.Code != 0 || !strings.Contains(listed.Stdout, "(unreadable)") || !strings.Contains(listed.Stderr, "github") {
		t.Errorf("without the key: %+v", listed)
	}
	if err := os.Rename(key+".away", key); err != nil {
		t.Fatal(err)
	}
	if removed := d.CLI(t, "secret", "rm", "github"); removed.Code != 0 {
		t.Errorf("%+v", removed)
	}
	if again := d.CLI(t, "secret", "rm", "github"); again.Code != 1 || !strings.Contains(again.Stderr, "no such secret") {
		t.Errorf("%+v", again)
	}
	if _, err := d.TryCreate(t.Context(), api.CreateSandbox{Network: api.Network{Mode: api.NetworkEgress, Policy: policy, Secrets: []string{"github"}}}); !errors.Is(err, &api.Problem{Code: api.CodeInvalid}) {
		t.Errorf("a sandbox with a removed secret: %v", err)
	}
}
