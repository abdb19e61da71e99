package httpapi_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/daemon/daemontest"
	"github.com/sandboxd/sandboxd/internal/httpapi"
	"github.com/sandboxd/sandboxd/internal/osthread"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// openDir returns a directory that every user of the host may search.
func openDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "sandboxd-tenants") //nolint:usetesting // other users cannot search t.TempDir
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	return dir
}

// dialAs connects with the credentials of another user, which has a number and perhaps no name.
// They belong to a thread, which must not be used again.
func dialAs(socket string, uid, gid uint32, groups ...uint32) (net.Conn, error) {
	var conn net.Conn
	err := osthread.Run(func() error {
		list := append([]uint32{gid}, groups...)
		set := func(call, a, b, c uintptr) error {
			if _, _, errno := unix.RawSyscall(call, a, b, c); errno != 0 {
				return errno
			}
			return nil
		}
		err := errors.Join(
			set(unix.SYS_SETGROUPS, uintptr(len(list)), uintptr(unsafe.Pointer(&list[0])), 0),
			set(unix.SYS_SETRESGID, uintptr(gid), uintptr(gid), uintptr(gid)),
			set(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)))
		if err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err == nil {
			err = unix.Connect(fd, &unix.SockaddrUnix{Name: socket})
		}
		if err != nil {
			return err
		}
		file := os.NewFile(uintptr(fd), socket)
		conn, err = net.FileConn(file)
		_ = file.Close() // FileConn has duplicated it
		return err
	})
	return conn, err
}

// as returns the daemon as another user of the host calls it.
func as(r *daemontest.Running, uid, gid uint32, groups ...uint32) *daemontest.Running {
	other := *r
	tr := &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
		return dialAs(r.D.Socket(), uid, gid, groups...)
	}}
	r.T.Cleanup(tr.CloseIdleConnections)
	other.HTTP = &http.Client{Transport: tr}
	return &other
}

// askForPipes asks for a program with pipes, and returns the status and the body of the answer.
func askForPipes(t *testing.T, r *daemontest.Running, id string) string {
	t.Helper()
	url := fmt.Sprintf("http://sandboxd/v1/sandboxes/%s/exec/pipes?client=%d&daemon=%d", id, os.Getpid(), os.Getpid())
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader(`{"argv":["true"]}`))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", api.UpgradePipes)
	resp, err := r.HTTP.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 4096))
	return fmt.Sprint(resp.Status, " ", string(body), err)
}

func TestTenantsOfTheHost(t *testing.T) {
	testenv.RequireRoot(t)
	b := daemontest.New(t, nil)
	b.Options.Socket = filepath.Join(openDir(t), "api.sock")
	b.Options.Tenants = httpapi.Tenants{UIDs: []uint32{40001, 40002}}
	r := b.Start()
	if fi, err := os.Stat(b.Options.Socket); err != nil || fi.Mode().Perm() != 0o666 {
		t.Errorf("socket: %v, %v", fi.Mode(), err)
	}
	one, two, stranger := as(r, 40001, 40001), as(r, 40002, 40001), as(r, 40003, 40001)
	operator := r.Create(api.CreateSandbox{Name: "box"})
	first := one.Create(api.CreateSandbox{Name: "box"})
	second := two.Create(api.CreateSandbox{Name: "box"})
	for _, of := range []struct {
		who    *daemontest.Running
		own    string
		others []string
	}{{r, operator.ID, []string{first.ID, second.ID}}, {one, first.ID, []string{operator.ID, second.ID}}, {two, second.ID, []string{operator.ID, first.ID}}} {
		if list := daemontest.Decode[api.SandboxList](t, of.who.Do("GET", "/v1/sandboxes", nil), 200); len(list.Sandboxes) != 1 || list.Sandboxes[0].ID != of.own {
			t.Errorf("list of %s: %+v", of.own, list.Sandboxes)
		}
		if list := daemontest.Decode[api.StatsList](t, of.who.Do("GET", "/v1/stats", nil), 200); len(list.Sandboxes) != 1 || list.Sandboxes[0].ID != of.own {
			t.Errorf("stats of %s: %+v", of.own, list.Sandboxes)
		}
		if use := daemontest.Decode[api.DiskUsage](t, of.who.Do("GET", "/v1/system/df", nil), 200); use.Sandboxes.Count != 1 {
			t.Errorf("disk usage of %s: %+v", of.own, use)
		}
		for _, id := range of.others {
			if got := of.who.Do("GET", "/v1/stats?sandbox="+id, nil); got.Status != http.StatusNotFound {
				t.Errorf("stats of another tenant's: %d %s", got.Status, got.Body)
			}
			for _, call := range []struct {
				method, path string
				body         any
			}{
				{"GET", "", nil},
				{"DELETE", "", nil},
				{"PATCH", "", api.UpdateSandbox{Timeout: 5}},
				{"POST", "/stop", api.StopSandbox{}},
				{"POST", "/pause", nil},
				{"POST", "/exec", api.ExecRequest{Argv: []string{"true"}}},
				{"GET", "/execs", nil},
				{"GET", "/stats", nil},
				{"GET", "/logs", nil},
				{"GET", "/wait", nil},
				{"GET", "/files?path=/etc/passwd", nil},
				{"GET", "/list?path=/", nil},
				{"GET", "/diff", nil},
				{"GET", "/changes", nil},
				{"GET", "/archive?path=/", nil},
				{"GET", "/processes", nil},
				{"POST", "/fork", api.ForkSandbox{}},
				{"POST", "/snapshots", api.TakeSnapshot{}},
				{"GET", "/snapshots", nil},
			} {
				got := of.who.Do(call.method, "/v1/sandboxes/"+id+call.path, call.body)
				none := of.who.Do(call.method, "/v1/sandboxes/zzzzzzzzzzzz"+call.path, call.body)
				if got.Status != http.StatusNotFound || strings.ReplaceAll(string(got.Body), id, "zzzzzzzzzzzz") != string(none.Body) {
					t.Errorf("%s %s of another tenant: %d %s\nand of none: %d %s", call.method, call.path, got.Status, got.Body, none.Status, none.Body)
				}
			}
			got := of.who.Do("POST", "/v1/sandboxes", api.CreateSandbox{Network: share(id)})
			none := of.who.Do("POST", "/v1/sandboxes", api.CreateSandbox{Network: share("zzzzzzzzzzzz")})
			if got.Status != http.StatusNotFound || strings.ReplaceAll(string(got.Body), id, "zzzzzzzzzzzz") != string(none.Body) {
				t.Errorf("share the network of another tenant: %d %s\nand of none: %d %s", got.Status, got.Body, none.Status, none.Body)
			}
		}
	}
	for _, call := range [][2]string{
		{"GET", "/v1/system"}, {"GET", "/v1/system/checks"}, {"POST", "/v1/system/shutdown"}, {"GET", "/v1/images/verify"}, {"GET", "/v1/agent/runs"}, {"POST", "/v1/agent/runs"},
	} {
		p := daemontest.Problem(t, one.Do(call[0], call[1], nil), api.CodeForbidden)
		if !strings.Contains(p.Detail, "uid 40001 is a tenant") {
			t.Errorf("%s: %+v", call, p)
		}
	}
	daemontest.Problem(t, stranger.Do("GET", "/v1/sandboxes", nil), api.CodeForbidden)
	if got := askForPipes(t, one, first.ID); !strings.Contains(got, "a tenant gets none") {
		t.Errorf("a tenant's request for pipes: %s", got)
	}
	daemontest.Decode[api.SystemInfo](t, r.Do("GET", "/v1/system", nil), 200)
}

func TestTenantsOfAGroup(t *testing.T) {
	testenv.RequireRoot(t)
	b := daemontest.New(t, nil)
	b.Options.Socket = filepath.Join(openDir(t), "api.sock")
	group := uint32(40100)
	b.Options.Tenants = httpapi.Tenants{Group: &group}
	r := b.Start()
	var st unix.Stat_t
	if err := unix.Stat(b.Options.Socket, &st); err != nil || st.Mode&0o777 != 0o660 || st.Gid != group {
		t.Errorf("socket: %o, group %d, %v", st.Mode, st.Gid, err)
	}
	one, two := as(r, 40001, 40100), as(r, 40002, 40001, 7, 40100)
	one.Create(api.CreateSandbox{Name: "box"})
	if list := daemontest.Decode[api.SandboxList](t, two.Do("GET", "/v1/sandboxes", nil), 200); len(list.Sandboxes) != 0 {
		t.Errorf("the other member sees %+v", list.Sandboxes)
	}
	if _, err := as(r, 40003, 40001, 7).Try("GET", "/v1/sandboxes", nil); err == nil {
		t.Error("a user outside of the group can connect")
	}
	// The file's mode is not all that holds: it may be changed.
	if err := os.Chmod(b.Options.Socket, 0o666); err != nil {
		t.Fatal(err)
	}
	daemontest.Problem(t, as(r, 40003, 40001, 7).Do("GET", "/v1/sandboxes", nil), api.CodeForbidden)
}

// The connections of one user leave room for those of others.
func TestTenantsConnectionsAreBounded(t *testing.T) {
	testenv.RequireRoot(t)
	b := daemontest.New(t, nil)
	b.Options.Socket = filepath.Join(openDir(t), "api.sock")
	b.Options.Tenants = httpapi.Tenants{UIDs: []uint32{40001, 40002}}
	r := b.Start()
	hold := func(n int) (conns []net.Conn) {
		for range n {
			c, err := dialAs(b.Options.Socket, 40001, 40001)
			if err != nil {
				t.Fatal(err)
			}
			conns = append(conns, c)
		}
		return conns
	}
	conns := hold(httpapi.MaxPeerConns)
	if _, err := as(r, 40001, 40001).Try("GET", "/v1/sandboxes", nil); err == nil {
		t.Error("there is no end of connections")
	}
	as(r, 40002, 40001).Create(api.CreateSandbox{Name: "box"})
	r.Create(api.CreateSandbox{Name: "box"})
	for _, c := range conns {
		_ = c.Close()
	}
	// The daemon sees the end of each connection at its own time.
	for {
		if _, err := as(r, 40001, 40001).Try("GET", "/v1/sandboxes", nil); err == nil {
			break
		}
		if t.Context().Err() != nil {
			t.Fatal("closed connections count")
		}
	}
}

func TestParseTenants(t *testing.T) {
	for text, want := range map[string]string{
		"4711,4712,4711": "[4711 4712] <nil>", "@4711": "[] 4711",
		"": "unknown user", "0": "operators", "root": "operators", "4294967295": "no id", "no-such-user-here": "unknown user", "@no-such-group-here": "unknown group",
		"4711,": "unknown user", "@": "unknown group",
	} {
		got, err := httpapi.ParseTenants(text)
		group := "<nil>"
		if got.Group != nil {
			group = fmt.Sprint(*got.Group)
		}
		if shown := fmt.Sprint(got.UIDs, " ", group); err == nil && shown != want || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %s, %v, want %s", text, shown, err, want)
		}
	}
}

func TestSocketOfTenants(t *testing.T) {
	dir := openDir(t)
	uids, gid := httpapi.Tenants{UIDs: []uint32{40001}}, uint32(os.Getegid())
	group := httpapi.Tenants{Group: &gid}
	for _, test := range []struct {
		mode    os.FileMode
		tenants httpapi.Tenants
		want    string
	}{
		{0o711, uids, ""},
		{0o755, uids, ""},
		{0o1777, uids, "could replace it"}, // bound anew by any user while no daemon runs
		{0o700, uids, "closed to tenants"},
		{0o710, uids, "closed to tenants"},
		{0o710, group, ""},
		{0o700, group, "closed to tenants"},
		{0o777, uids, "could replace it"},
		{0o730, group, "could replace it"},
	} {
		if err := os.Chmod(dir, test.mode.Perm()|(test.mode&0o1000)<<11); err != nil {
			t.Fatal(err)
		}
		got := test.tenants.SocketRefused(filepath.Join(dir, "api.sock"))
		if (got == "") != (test.want == "") || !strings.Contains(got, test.want) {
			t.Errorf("%o: %q, want %q", test.mode, got, test.want)
		}
	}
	if os.Geteuid() == 0 {
		if err := errors.Join(os.Chmod(dir, 0o755), os.Chown(dir, 40002, -1)); err != nil {
			t.Fatal(err)
		}
		if got := uids.SocketRefused(filepath.Join(dir, "api.sock")); !strings.Contains(got, "belongs to uid 40002") {
			t.Errorf("another user's directory: %q", got)
		}
	}
	if got := uids.SocketRefused(filepath.Join(dir, "no", "api.sock")); !strings.Contains(got, "not there") {
		t.Error(got)
	}
}
