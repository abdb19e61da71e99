package functional

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
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

// nobodyUID is a uid without a name, without subordinate ids and without anything else.
const nobodyUID = 64123

// The socket is its user's alone: a file of mode 0600 in a directory of mode 0700.
func TestSocketIsPrivate(t *testing.T) {
	d := shared(t)
	for path, want := range map[string]os.FileMode{d.Socket: 0o600, filepath.Dir(d.Socket): 0o700} {
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if got := info.Mode().Perm(); got != want {
			t.Errorf("%s has mode %o, want %o", path, got, want)
		}
	}
}

// Even where the modes were opened by mistake, the peer's uid decides.
func TestAnotherUserIsRefused(t *testing.T) {
	testenv.RequireRoot(t)
	d := start(t)
	if err := os.Chmod(filepath.Dir(d.Socket), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(d.Socket, 0o666); err != nil {
		t.Fatal(err)
	}
	as := func(uid int) error {
		client := &http.Client{Transport: &http.Transport{
			DisableKeepAlives: true,
			DialContext: func(context.Context, string, string) (net.Conn, error) {
				return dialAs(uid, d.Socket)
			},
		}}
		other := *d
		other.HTTP = client
		return other.Call(t.Context(), http.MethodGet, "/v1/system", nil, nil)
	}
	if err := as(0); err != nil {
		t.Fatalf("control: the daemon's own user: %v", err)
	}
	wantProblem(t, as(nobodyUID), api.CodeForbidden, strconv.Itoa(nobodyUID))
}

// dialAs connects with the credentials of another uid. They belong to a thread, which must not be
// used again.
func dialAs(uid int, socket string) (net.Conn, error) {
	var conn net.Conn
	err := osthread.Run(func() error {
		_, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid))
		if errno != 0 {
			return errno
		}
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		if err := unix.Connect(fd, &unix.SockaddrUnix{Name: socket}); err != nil {
			return err
		}
		file := os.NewFile(uintptr(fd), socket)
		conn, err = net.FileConn(file)
		_ = file.Close() // FileConn has duplicated it
		return err
	})
	return conn, err
}

// withoutIDs starts a daemon of a user that has no subordinate ids.
func withoutIDs(t *testing.T) *harness.Daemon {
	t.Helper()
	testenv.RequireRoot(t)
	testenv.RequireUserNS(t)
	t.Setenv("TMPDIR", "/tmp") // where that user can go
	publicPrograms(t)
	return harness.Start(t, harness.Options{User: &syscall.Credential{Uid: nobodyUID, Gid: nobodyUID}})
}

// publicPrograms has daemons of the test started from programs that every user can reach: links to
// the programs, or copies where those lie on another file system.
func publicPrograms(t *testing.T) {
	t.Helper()
	bin := publicDir(t)
	for _, name := range []string{"sandboxd", "sandboxd-agent", "sandboxd-launcher", "sandboxd-init"} {
		program := harness.Program(t, name)
		if os.Link(program, filepath.Join(bin, name)) == nil {
			continue
		}
		data, err := os.ReadFile(program)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(bin, name), data, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("SANDBOXD_BIN", bin)
}

// Without subordinate ids everything still works, with a single-id map, and is said.
func TestUserWithoutSubordinateIDsGetsASingleIDMap(t *testing.T) {
	d := withoutIDs(t)
	s := d.Create(t, api.CreateSandbox{})
	if s.Enforced.IDs != "single" {
		t.Errorf("enforced.ids is %q, want single", s.Enforced.IDs)
	}
	if missing := strings.Join(s.Enforced.Missing, "\n"); !strings.Contains(missing, "subordinate") && !strings.Contains(missing, "subuid") {
		t.Errorf("nothing says that subordinate ids are missing: %q", s.Enforced.Missing)
	}
	if got := s.Sh(t, "id -u; echo works"); got != "0\nworks\n" {
		t.Errorf("in the sandbox: %q", got)
	}
	if got := d.CLI(t, "doctor"); !strings.Contains(got.Stdout, "subordinate") {
		t.Errorf("doctor does not name subordinate ids: %+v", got)
	}
	// Where it is required, the daemon refuses to start.
	strict := d.CLI(t, "serve", "--socket", d.RuntimeDir+"2/api.sock", "--require=subids", "--data-dir", d.DataDir+"2", "--runtime-dir", d.RuntimeDir+"2")
	if strict.Code == 0 || !strings.Contains(strict.Stderr, "subids") && !strings.Contains(strict.Stderr, "subordinate") {
		t.Errorf("serve --require=subids: %+v", strict)
	}
}

// publicDir makes a directory in /tmp that every user may enter.
func publicDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "sandboxd-bin-") //nolint:usetesting // t.TempDir may lie below a directory of mode 0700
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = harness.RemoveAll(dir) }) // what sandboxes wrote there is not ours to remove otherwise
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

// run without a daemon starts one and says so; it goes on answering afterwards.
func TestRunStartsADaemonWhereNoneRuns(t *testing.T) {
	testenv.RequireOrdinaryUser(t) // root's own directories are not a test's to use
	testenv.RequireUserNS(t)
	home := publicDir(t)
	cli := func(args ...string) (stdout, stderr string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), harness.Program(t, "sandboxd"), args...)
		cmd.Env = []string{"PATH=/usr/bin:/bin", "HOME=" + home, "XDG_RUNTIME_DIR=" + filepath.Join(home, "run"), "XDG_DATA_HOME=" + filepath.Join(home, "data")}
		var out, err strings.Builder
		cmd.Stdout, cmd.Stderr = &out, &err
		cmd.WaitDelay = 10 * time.Second // a daemon that keeps our pipe open shows as an error
		if runErr := cmd.Run(); runErr != nil {
			t.Errorf("sandboxd %q: %v: %s", args, runErr, &err)
		}
		return out.String(), err.String()
	}
	if err := os.Mkdir(filepath.Join(home, "run"), 0o700); err != nil {
		t.Fatal(err)
	}
	stdout, stderr := cli("run", "--", "echo", "hi")
	if stdout != "hi\n" || !strings.Contains(stderr, "start") {
		t.Errorf("the first run prints %q and says %q", stdout, stderr)
	}
	stdout, stderr = cli("run", "--", "echo", "again")
	if stdout != "again\n" || strings.Contains(stderr, "start") {
		t.Errorf("the second run prints %q and says %q", stdout, stderr)
	}
	cli("shutdown")
	eventually(t, func() error { // its socket goes before itself
		if out, err := exec.CommandContext(t.Context(), "pgrep", "-a", "-f", home).Output(); err == nil {
			return fmt.Errorf("after the shutdown there is still %s", out)
		}
		return nil
	})
}
