package limits

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/osthread"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// All sandboxes together have a ceiling in the kernel, and one whose limits do not fit below it is
// refused.
func TestAllSandboxesTogetherHaveACeiling(t *testing.T) {
	testenv.RequireCgroup(t, "memory")
	d := harness.Start(t, harness.Options{Args: []string{"--memory", "512m", "--pids", "400"}})
	s := d.Create(t, api.CreateSandbox{Limits: api.Limits{Memory: 300 * mib, Pids: 100}})
	all := filepath.Dir(cgroupOf(t, s.PID))
	for file, want := range map[string]string{"memory.max": fmt.Sprint((512 + 128) * mib), "pids.max": fmt.Sprint(400 + 256), "cpu.weight": "100"} {
		if got := read(t, all, file); got != want {
			t.Errorf("%s of all is %q, want %q", file, got, want)
		}
	}
	for _, limits := range []api.Limits{{Memory: 213 * mib, Pids: 1}, {Memory: mib * 8, Pids: 300}} {
		if _, err := d.TryCreate(t.Context(), api.CreateSandbox{Limits: limits}); err == nil || !strings.Contains(err.Error(), "no room for the sandbox") {
			t.Errorf("%+v: %v", limits, err)
		}
	}
	d.Create(t, api.CreateSandbox{Limits: api.Limits{Memory: 212 * mib, Pids: 100}})
	// The next daemon may have other bounds, or none.
	d.Kill9(t)
	d.LaunchWith(t)
	if got := read(t, all, "memory.max"); got != "max" {
		t.Errorf("memory.max is %q under a daemon without a bound", got)
	}
}

// tenant is the daemon as one user of the host calls it.
type tenant struct {
	t    *testing.T
	http *http.Client
}

func (c *tenant) call(method, path string, body, out any) error {
	ctx, cancel := context.WithTimeout(context.Background(), testenv.HungAfter) // also in a cleanup
	defer cancel()
	data, err := json.Marshal(body)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://sandboxd"+path, bytes.NewReader(data))
	if err != nil {
		return err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	data, err = io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode >= 300 {
		err = fmt.Errorf("status %d: %s", resp.StatusCode, data)
	}
	if err == nil && out != nil {
		err = json.Unmarshal(data, out)
	}
	return err
}

// as returns the daemon as a user with this number, and without a name, calls it.
func as(t *testing.T, socket string, uid int) *tenant {
	t.Helper()
	tr := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var conn net.Conn
		err := osthread.Run(func() (err error) {
			if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)); errno != 0 {
				return errno
			}
			conn, err = new(net.Dialer).DialContext(ctx, "unix", socket)
			return err
		})
		return conn, err
	}}
	t.Cleanup(tr.CloseIdleConnections)
	return &tenant{t, &http.Client{Transport: tr}}
}

// startMultiTenant starts a daemon for two users of the host.
func startMultiTenant(t *testing.T) (one, two *tenant, log *bytes.Buffer) {
	t.Helper()
	testenv.RequireRoot(t)
	testenv.RequireOwnIDs(t)
	testenv.RequireCgroup(t, "memory")
	dir, err := os.MkdirTemp("/tmp", "sandboxd-tenants") //nolint:usetesting // other users cannot search t.TempDir
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = harness.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "api.sock")
	log = new(bytes.Buffer)
	cmd := exec.Command(harness.Program(t, "sandboxd"), "serve", "--multi-tenant", "--tenants", "40001,40002", "--socket", socket,
		"--data-dir", filepath.Join(dir, "data"), "--runtime-dir", filepath.Join(dir, "run"))
	cmd.Stdout, cmd.Stderr = log, log
	cmd.WaitDelay = time.Second
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	exited := make(chan error, 1)
	go func() { exited <- cmd.Wait() }()
	operator := as(t, socket, 0)
	t.Cleanup(func() {
		_ = operator.call(http.MethodPost, "/v1/system/shutdown", api.Shutdown{}, nil)
		select {
		case err := <-exited:
			t.Logf("the daemon ended: %v", err)
		case <-time.After(testenv.HungAfter):
			_ = cmd.Process.Signal(syscall.SIGKILL)
			t.Error("the daemon does not end")
		}
	})
	harness.Eventually(t, func() error {
		select {
		case err := <-exited:
			exited <- err
			t.Fatalf("the daemon has ended: %v\n%s", err, log.String())
		default:
		}
		return operator.call(http.MethodGet, "/healthz", nil, nil)
	})
	return as(t, socket, 40001), as(t, socket, 40002), log
}

// Two users of the host share a daemon, and neither a name, an id of the host, nor a limit of the
// other's.
func TestMultiTenant(t *testing.T) {
	one, two, log := startMultiTenant(t)
	var first, second api.Sandbox
	small := api.Limits{Memory: 64 * mib, Pids: 30}
	err1 := one.call(http.MethodPost, "/v1/sandboxes", api.CreateSandbox{Name: "box", Limits: small}, &first)
	err2 := two.call(http.MethodPost, "/v1/sandboxes", api.CreateSandbox{Name: "box", Limits: small}, &second)
	if err := errors.Join(err1, err2); err != nil {
		t.Fatalf("%v\n%s", err, log.String())
	}
	if first.Enforced.IDs != api.IDsOwn || second.Enforced.IDs != api.IDsOwn {
		t.Errorf("ids %q and %q", first.Enforced.IDs, second.Enforced.IDs)
	}
	uidOf := func(s *api.Sandbox) uint32 {
		fi, err := os.Stat(fmt.Sprintf("/proc/%d", s.PID))
		if err != nil {
			t.Fatal(err)
		}
		return fi.Sys().(*syscall.Stat_t).Uid
	}
	if a, b := uidOf(&first), uidOf(&second); a == b || a < 65536 || b < 65536 {
		t.Errorf("inits run as %d and %d", a, b)
	}
	var list api.SandboxList
	if err := two.call(http.MethodGet, "/v1/sandboxes", nil, &list); err != nil || len(list.Sandboxes) != 1 || list.Sandboxes[0].ID != second.ID {
		t.Errorf("list: %+v, %v", list.Sandboxes, err)
	}
	if err := two.call(http.MethodDelete, "/v1/sandboxes/"+first.ID, nil, nil); err == nil || !strings.Contains(err.Error(), "404") {
		t.Errorf("removal of another's: %v", err)
	}
	if err := one.call(http.MethodGet, "/v1/system", nil, nil); err == nil || !strings.Contains(err.Error(), "uid 40001 is a tenant") {
		t.Errorf("the operator's route: %v", err)
	}
	all := filepath.Dir(cgroupOf(t, first.PID))
	if all != filepath.Dir(cgroupOf(t, second.PID)) || read(t, all, "memory.max") == "max" || read(t, all, "pids.max") == "max" || read(t, all, "cpu.weight") != "50" {
		t.Errorf("memory.max %s, pids.max %s, cpu.weight %s of %s", read(t, all, "memory.max"), read(t, all, "pids.max"), read(t, all, "cpu.weight"), all)
	}
	err := one.call(http.MethodPost, "/v1/sandboxes", api.CreateSandbox{Limits: api.Limits{Memory: 1 << 40, Pids: 30}}, nil)
	if err == nil || !strings.Contains(err.Error(), "the most of one tenant") {
		t.Errorf("all the memory there is: %v", err)
	}
}

// page serves its argument on port 8000. Neither it nor visit imports what HTTP needs: emulated
// processors take seconds for that.
const page = `
import socket, sys
server = socket.create_server(("0.0.0.0", 8000))
while True:
    c, _ = server.accept()
    c.sendall(sys.argv[1].encode())
    c.close()
`

// visit prints what port 8000 of its argument serves, or the error.
const visit = `
import errno, socket, sys
try:
    c = socket.create_connection((sys.argv[1], 8000))
    print(b"".join(iter(lambda: c.recv(4096), b"")).decode())
except socket.gaierror:
    print("no such name")
except OSError as e:
    print(errno.errorcode.get(e.errno, str(e)))
`

// Tenants neither see, find, reach nor use each other's named networks and secrets, also where all
// names are the same.
func TestTenantsNetworksAndSecrets(t *testing.T) {
	one, two, log := startMultiTenant(t)
	small := api.Limits{Memory: 64 * mib, Pids: 30}
	create := func(c *tenant, name string, command ...string) (s api.Sandbox) {
		t.Helper()
		if err := c.call(http.MethodPost, "/v1/sandboxes", api.CreateSandbox{Name: name, Limits: small, Network: api.Network{Join: []string{"back"}}, Command: command}, &s); err != nil {
			t.Fatalf("%v\n%s", err, log)
		}
		return s
	}
	see := func(c *tenant, from, at string) string {
		t.Helper()
		var got api.ExecResult
		err := c.call(http.MethodPost, "/v1/sandboxes/"+from+"/exec", api.ExecRequest{Argv: []string{"python3", "-c", visit, at}, Timeout: testenv.HungAfter.Seconds()}, &got)
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(got.Stdout + got.Stderr)
	}
	wait := func(c *tenant, want string) {
		t.Helper()
		harness.Eventually(t, func() error {
			if got := see(c, "app", "db"); got != want {
				return fmt.Errorf("db serves %q, want %q", got, want)
			}
			return nil
		})
	}
	db := create(one, "db", "python3", "-c", page, "of one")
	create(one, "app")
	create(two, "app")
	wait(one, "of one")
	networks := func(c *tenant) (list api.NetworkList) {
		t.Helper()
		if err := c.call(http.MethodGet, "/v1/networks", nil, &list); err != nil || len(list.Networks) != 1 || list.Networks[0].Name != "back" {
			t.Fatalf("%+v, %v", list, err)
		}
		return list
	}
	members := networks(one).Networks[0].Sandboxes
	if len(members) != 2 || members[0].Name != "db" || members[0].ID != db.ID || members[0].Address == "" {
		t.Fatalf("networks of the first: %+v", members)
	}
	if all := networks(two).Networks[0].Sandboxes; len(all) != 1 || all[0].Name != "app" || all[0].ID == members[1].ID {
		t.Errorf("networks of the second: %+v", all)
	}
	for at, want := range map[string]string{"db": "no such name", "db.back": "no such name", "db.back.internal": "no such name", members[0].Address: "ECONNRESET"} {
		if got := see(two, "app", at); got != want {
			t.Errorf("the second sees %q at %s, want %q", got, at, want)
		}
	}
	create(two, "db", "python3", "-c", page, "of two")
	wait(two, "of two")
	wait(one, "of one")
	if all := networks(two).Networks[0].Sandboxes; len(all) != 2 || all[1].Address != members[0].Address {
		t.Errorf("an address depends on another tenant's sandboxes: %+v and %+v", all, members)
	}
	if err := two.call(http.MethodGet, "/v1/sandboxes/"+db.ID+"/flows", nil, nil); err == nil || !strings.Contains(err.Error(), "404") {
		t.Errorf("flows of another's: %v", err)
	}

	secret := api.SetSecret{Kind: api.SecretBearer, Value: "value-of-the-first", Host: "api.github.com", Variable: "TOKEN"}
	if err := one.call(http.MethodPut, "/v1/secrets/github", secret, nil); err != nil {
		t.Fatal(err)
	}
	var list api.SecretList
	if err := two.call(http.MethodGet, "/v1/secrets", nil, &list); err != nil || len(list.Secrets) != 0 {
		t.Errorf("secrets of the second: %+v, %v", list, err)
	}
	with := api.CreateSandbox{Limits: small, Network: api.Network{
		Mode: api.NetworkEgress, Policy: "version: 1\nrules: [{allow: api.github.com, ports: 443, inspect: true}]\n", Secrets: []string{"github"},
	}}
	if err := two.call(http.MethodPost, "/v1/sandboxes", with, nil); err == nil || !strings.Contains(err.Error(), "github") {
		t.Errorf("a sandbox of the second with a secret of the first: %v", err)
	}
	if err := two.call(http.MethodDelete, "/v1/secrets/github", nil, nil); err == nil || !strings.Contains(err.Error(), "404") {
		t.Errorf("removal of another's secret: %v", err)
	}
	secret.Value = "value-of-the-second"
	if err := two.call(http.MethodPut, "/v1/secrets/github", secret, nil); err != nil {
		t.Fatal(err)
	}
	if err := two.call(http.MethodDelete, "/v1/secrets/github", nil, nil); err != nil {
		t.Fatal(err)
	}
	if err := one.call(http.MethodGet, "/v1/secrets", nil, &list); err != nil || len(list.Secrets) != 1 {
		t.Errorf("secrets of the first: %+v, %v", list, err)
	}
}
