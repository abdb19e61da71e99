package limits

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	units "github.com/sandboxd/sandboxd/examples/systemd"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// Without delegation systemd gives a scope, and every missing controller is named with its remedy.

// requireSystemd asks for a host that systemd manages. The flavour tiny of the bed is none.
func requireSystemd(t *testing.T) {
	t.Helper()
	testenv.RequireCgroup(t)
	testenv.RequireSystemd(t)
}

// command runs a program of the host that must succeed, and returns its output.
func command(t testing.TB, argv ...string) string {
	t.Helper()
	out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%q: %v\n%s", argv, err, out)
	}
	return strings.TrimSpace(string(out))
}

// systemctl speaks to the service manager that the daemon of this user would speak to.
func systemctl(t testing.TB, args ...string) string {
	t.Helper()
	argv := []string{"systemctl"}
	if os.Geteuid() != 0 {
		argv = append(argv, "--user")
	}
	return command(t, append(argv, args...)...)
}

// ordinary is the user that the bed has.
func ordinary(t *testing.T) (uid int, credential *syscall.Credential) {
	t.Helper()
	u, err := user.Lookup("dev")
	if err != nil {
		t.Skipf("needs the test bed's user: %v", err)
	}
	uid, err = strconv.Atoi(u.Uid)
	if err != nil {
		t.Fatal(err)
	}
	gid, err := strconv.Atoi(u.Gid)
	if err != nil {
		t.Fatal(err)
	}
	return uid, &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
}

// scope starts a scope that nothing is delegated to, and returns its cgroup: for root what logind
// makes of a login, for others what their own manager makes.
func scope(t *testing.T, uid int) string {
	t.Helper()
	unit := fmt.Sprintf("login-%d-%d.scope", uid, time.Now().UnixNano())
	argv := []string{"systemd-run", "--quiet", "--scope", "--unit=" + unit}
	if os.Geteuid() == 0 {
		argv = append(argv, fmt.Sprintf("--uid=%d", uid), fmt.Sprintf("--slice=user-%d.slice", uid))
	} else {
		argv = append(argv, "--user")
	}
	cmd := exec.Command(argv[0], append(argv[1:], "sleep", "1000")...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // by our signal
	})
	var dir string
	harness.Eventually(t, func() error {
		if dir = cgroupOf(t, cmd.Process.Pid); filepath.Base(dir) != unit {
			return fmt.Errorf("the process is in %s", dir)
		}
		return nil
	})
	return dir
}

// ours lists the cgroups that a daemon has made anywhere on the host.
func ours(t *testing.T) (found []string) {
	t.Helper()
	err := filepath.WalkDir(mount, func(path string, e fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // it ended while we looked
		}
		if err == nil && e.IsDir() && strings.HasPrefix(e.Name(), "sandboxd-") {
			found = append(found, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// nothingLeft checks, when the test's daemon has shut down, that its scope and everything in it is
// gone. To be called before the daemon is started.
func nothingLeft(t *testing.T) {
	t.Helper()
	before := ours(t)
	t.Cleanup(func() {
		harness.Eventually(t, func() error {
			if after := ours(t); !slices.Equal(before, after) {
				return fmt.Errorf("cgroups before: %q, after: %q", before, after)
			}
			return nil
		})
	})
}

// inScope checks that a process is in the leaf of a scope of ours, and returns the scope's cgroup.
func inScope(t *testing.T, pid int) string {
	t.Helper()
	dir := cgroupOf(t, pid)
	own := filepath.Dir(dir)
	if filepath.Base(dir) != "supervisor" || !strings.HasPrefix(filepath.Base(own), "sandboxd-") || filepath.Ext(own) != ".scope" {
		t.Fatalf("the daemon is in %s, which is no scope of its own", dir)
	}
	return own
}

// held is a memory limit that bites soon: emulated processors take seconds to fill a larger one.
const held = 24 * mib

// holds checks that a sandbox's memory limit of [held] bites.
func holds(t *testing.T, s *harness.Sandbox) {
	t.Helper()
	got, err := s.TryExec(t.Context(), sh("echo partial; exec tail /dev/zero"))
	if err != nil || !got.Exit.OOM || got.Stdout != "partial\n" {
		t.Errorf("a hog in 24 MiB ended with %+v, %v", got, err)
	}
}

// A daemon started from a login, or from a user's unit without Delegate=, gets a scope. The next
// daemon joins it, and it ends with the last of them.
func TestDaemonWithoutDelegationGetsAScope(t *testing.T) {
	requireSystemd(t)
	type account struct {
		uid  int
		user *syscall.Credential
	}
	users := map[string]account{"own": {uid: os.Geteuid()}}
	if os.Geteuid() == 0 {
		uid, credential := ordinary(t)
		users["dev"] = account{uid, credential}
	}
	for name, w := range users {
		t.Run(name, func(t *testing.T) {
			nothingLeft(t)
			login := scope(t, w.uid)
			d := harness.Start(t, harness.Options{Cgroup: login, User: w.user, Args: []string{"--require=cgroup"}})
			own := inScope(t, d.PID())
			s := d.Create(t, api.CreateSandbox{Limits: api.Limits{Memory: held, CPUs: 0.5}})
			if e := s.Enforced; e.Memory != "cgroup" || e.CPU != "cgroup" || e.Pids != "cgroup" || len(e.Missing) > 0 {
				t.Errorf("enforced: %+v", e)
			}
			if dir := cgroupOf(t, s.PID); !strings.HasPrefix(dir, own+"/") {
				t.Errorf("the sandbox is in %s, not below %s", dir, own)
			}
			holds(t, s)
			if checks := d.CLI(t, "doctor").Stdout; !strings.Contains(checks, "ok    cgroup limits:") || !strings.Contains(checks, "ok    io and cpuset limits:") {
				t.Errorf("doctor says:\n%s", checks)
			}

			d.Kill9(t)
			d.LaunchIn(t, login)
			if again := inScope(t, d.PID()); again != own {
				t.Errorf("the next daemon is in %s, the first was in %s", again, own)
			}
			holds(t, s)
			holds(t, d.Create(t, api.CreateSandbox{Limits: api.Limits{Memory: held}}))
		})
	}
}

// The doctor, started from a login, reports the scope that a daemon would get, and leaves nothing.
func TestDoctorTriesAScope(t *testing.T) {
	requireSystemd(t)
	nothingLeft(t)
	login, err := os.Open(scope(t, os.Geteuid()))
	if err != nil {
		t.Fatal(err)
	}
	defer login.Close()
	cmd := exec.Command(harness.Program(t, "sandboxd"), "--socket", filepath.Join(t.TempDir(), "none"), "doctor", "--data-dir", t.TempDir())
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(login.Fd())}
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "ok    cgroup limits: systemd gives the daemon a scope with the controllers: cpu, cpuset, io, memory, pids") {
		t.Errorf("doctor: %v\n%s", err, out)
	}
}

// Users get some controllers by default. A missing one is named, with the drop-in that gives it.
func TestMissingControllersAreNamedWithTheDropIn(t *testing.T) {
	requireSystemd(t)
	testenv.RequireRoot(t)
	uid, credential := ordinary(t)
	dir := "/run/systemd/system/user@.service.d"
	restart := func() {
		command(t, "systemctl", "daemon-reload")
		command(t, "systemctl", "restart", fmt.Sprintf("user@%d.service", uid))
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	// Later than the bed's own drop-in, which it takes back: what systemd before 252 gives.
	drop := filepath.Join(dir, "zz-test.conf")
	if err := os.WriteFile(drop, []byte("[Service]\nDelegate=\nDelegate=memory pids\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.Remove(drop); err != nil {
			t.Error(err)
		}
		restart()
	})
	restart()
	nothingLeft(t)
	d := harness.Start(t, harness.Options{Cgroup: scope(t, uid), User: credential})
	inScope(t, d.PID())
	var p *api.Problem
	if _, err := d.TryCreate(t.Context(), api.CreateSandbox{Limits: api.Limits{CPUs: 1}}); !errors.As(err, &p) || p.Code != api.CodeUnenforceable {
		t.Errorf("a limit of CPU time: %v", err)
	}
	s := d.Create(t, api.CreateSandbox{Limits: api.Limits{Memory: held}})
	holds(t, s)
	want := `let systemd hand cpu, cpuset, io to users: sudo mkdir -p /etc/systemd/system/user@.service.d && ` +
		`printf '[Service]\nDelegate=cpu cpuset io memory pids\n' | sudo tee /etc/systemd/system/user@.service.d/delegate.conf && sudo systemctl daemon-reload`
	if missing := strings.Join(s.Enforced.Missing, "\n"); !strings.Contains(missing, want) || s.Enforced.CPU != "none" {
		t.Errorf("enforced: %+v, want %s", s.Enforced, want)
	}
	if checks := d.CLI(t, "doctor").Stdout; !strings.Contains(checks, "let systemd hand cpu to users") || !strings.Contains(checks, "lack  cgroup limits:") {
		t.Errorf("doctor says:\n%s", checks)
	}
}

// at returns a client of a daemon that the test does not own.
func at(dir string) *harness.Daemon {
	d := &harness.Daemon{DataDir: filepath.Join(dir, "data"), RuntimeDir: filepath.Join(dir, "run"), Socket: filepath.Join(dir, "run", "api.sock")}
	d.HTTP = &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true, // it is stopped and started
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", d.Socket)
		},
	}}
	return d
}

// answers waits for such a daemon.
func answers(t *testing.T, d *harness.Daemon) {
	t.Helper()
	harness.Eventually(t, func() error { return d.Call(t.Context(), http.MethodGet, "/healthz", nil, nil) })
}

// shutDown ends such a daemon with its sandboxes.
func shutDown(t *testing.T, d *harness.Daemon) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testenv.HungAfter)
	defer cancel()
	if err := d.Call(ctx, http.MethodPost, "/v1/system/shutdown", api.Shutdown{}, nil); err != nil {
		t.Errorf("shut down: %v", err)
	}
}

// place makes the directories of such a daemon. Not below t.TempDir: see harness.Start.
func place(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "sbx") //nolint:usetesting // see above
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := harness.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// The units that we ship, and what people make of them: systemd starts the daemon again, the
// sandboxes live on and their limits hold, and after a shutdown nothing is left.
func TestServiceIsRestarted(t *testing.T) {
	requireSystemd(t)
	shipped, dir := units.System, "/run/systemd/system"
	if os.Geteuid() != 0 {
		shipped, dir = units.User, filepath.Join(os.Getenv("XDG_RUNTIME_DIR"), "systemd/user")
	}
	for name, add := range map[string]string{"shipped": "", "delegated": "Delegate=yes"} {
		t.Run(name, func(t *testing.T) {
			nothingLeft(t)
			home := place(t)
			d, log := at(home), filepath.Join(home, "log")
			unit := fmt.Sprintf("test-%d.service", time.Now().UnixNano())
			const program = "/usr/local/bin/sandboxd serve"
			if strings.Count(shipped, program) != 1 || !strings.Contains(shipped, "[Service]\n") {
				t.Fatalf("the unit has changed:\n%s", shipped)
			}
			text := strings.Replace(shipped, program, fmt.Sprintf("%s serve --data-dir %s --runtime-dir %s",
				harness.Program(t, "sandboxd"), d.DataDir, d.RuntimeDir), 1)
			text = strings.Replace(text, "[Service]\n", "[Service]\nStandardError=append:"+log+"\n"+add+"\n", 1)
			if err := os.MkdirAll(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, unit), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
			// Without a daemon-reload: systemd reads the file of a unit that it does not know yet, and forgets
			// one that has stopped.
			t.Cleanup(func() {
				systemctl(t, "stop", unit)
				if err := os.Remove(filepath.Join(dir, unit)); err != nil {
					t.Error(err)
				}
				if data, err := os.ReadFile(log); t.Failed() && err == nil {
					t.Logf("the daemon said:\n%s", data)
				}
			})
			started := func() (scope string) {
				t.Helper()
				answers(t, d)
				pid, err := strconv.Atoi(systemctl(t, "show", "--property=MainPID", "--value", unit))
				if err != nil {
					t.Fatal(err)
				}
				return inScope(t, pid)
			}

			systemctl(t, "start", unit)
			own := started()
			s, err := d.TryCreate(t.Context(), api.CreateSandbox{Limits: api.Limits{Memory: held}})
			if err != nil {
				t.Fatal(err)
			}
			group := cgroupOf(t, s.PID)
			systemctl(t, "restart", unit)
			if again := started(); again != own {
				t.Errorf("the next daemon is in %s, the first was in %s", again, own)
			}
			holds(t, s)
			systemctl(t, "stop", unit)
			if now := cgroupOf(t, s.PID); now != group {
				t.Errorf("without the daemon the sandbox is in %s, it was in %s", now, group)
			}
			systemctl(t, "start", unit)
			started()
			holds(t, s)
			shutDown(t, d)
			harness.Eventually(t, func() error {
				if state := systemctl(t, "show", "--property=ActiveState,Result", unit); !strings.Contains(state, "inactive") || !strings.Contains(state, "success") {
					return fmt.Errorf("after the shutdown the unit is %s", state)
				}
				return nil
			})
		})
	}
}

// In a container the daemon is at the root of a cgroup namespace, beside others.
func TestContainersCgroup(t *testing.T) {
	testenv.RequireRoot(t)
	for name, tc := range map[string]struct{ mount, want string }{
		"writable":  {"mount -t cgroup2 none /sys/fs/cgroup", ""},
		"read-only": {"mount -t cgroup2 -o ro none /sys/fs/cgroup", "mounted read-only; start the container with"},
		"host's":    {"true", "lies outside of what is mounted"},
	} {
		t.Run(name, func(t *testing.T) {
			group := group(t)
			if err := os.Chmod(group, 0o755); err != nil { // as container runtimes make them
				t.Fatal(err)
			}
			home := place(t)
			d := at(home)
			dir, err := os.Open(group)
			if err != nil {
				t.Fatal(err)
			}
			defer dir.Close()
			// The namespace's root is where unshare is; sleep stands for what else runs in a container.
			cmd := exec.Command("unshare", "--cgroup", "--mount", "sh", "-ec",
				`[ "$1" = true ] || umount -l /sys/fs/cgroup; $1; sleep 1000 >/dev/null 2>&1 & trap "kill $!" EXIT
				"$2" serve --data-dir "$3" --runtime-dir "$4" --socket "$5"`,
				"sh", tc.mount, harness.Program(t, "sandboxd"), d.DataDir, d.RuntimeDir, d.Socket)
			log := new(strings.Builder)
			cmd.Stdout, cmd.Stderr = log, log
			cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
			cmd.WaitDelay = time.Second // a launcher that lives on keeps the log open
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				shutDown(t, d)
				if t.Failed() {
					_ = cmd.Process.Kill() // whatever it waits for
				}
				if err := cmd.Wait(); err != nil || t.Failed() {
					t.Errorf("the container: %v\n%s", err, log)
				}
			})
			answers(t, d)
			s, err := d.TryCreate(t.Context(), api.CreateSandbox{})
			if err != nil {
				t.Fatal(err)
			}
			if tc.want != "" {
				if missing := strings.Join(s.Enforced.Missing, "; "); s.Enforced.Memory != "none" || !strings.Contains(missing, tc.want) {
					t.Errorf("enforced: %+v, want to hear that it %s", s.Enforced, tc.want)
				}
				return
			}
			s, err = d.TryCreate(t.Context(), api.CreateSandbox{Limits: api.Limits{Memory: held, CPUs: 1}})
			if err != nil {
				t.Fatal(err)
			}
			if !strings.HasPrefix(cgroupOf(t, s.PID), group+"/") {
				t.Errorf("the sandbox is in %s, not below %s", cgroupOf(t, s.PID), group)
			}
			holds(t, s)
		})
	}
}
