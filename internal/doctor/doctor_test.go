package doctor

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/internal/idmap"
	"github.com/sandboxd/sandboxd/internal/kernel"
	"github.com/sandboxd/sandboxd/runtime/cgroup"
	"github.com/sandboxd/sandboxd/runtime/cgroup/systemd"
)

func TestMain(m *testing.M) {
	if code, handled := kernel.Main(os.Args[1:]); handled {
		os.Exit(code)
	}
	os.Exit(m.Run())
}

// healthy returns the facts of an ordinary user's host without defects. Own ids are root's alone.
func healthy() facts {
	controllers := cgroup.Wanted()
	all := []idmap.Range{{Inside: 0, Outside: 0, Size: 4294967295}}
	subs := []idmap.Range{{Outside: 100000, Size: 65536}}
	return facts{
		release: "6.12.1", arch: "amd64", program: "/opt/ann/sandboxd", uid: 1000, user: "ann",
		maxUserNamespaces: sysctl{60000, true},
		ids: idmap.Inputs{
			UID: 1000, GID: 1000, SubUID: subs, SubGID: subs, OwnUID: all, OwnGID: all,
			NewUIDMap: "/usr/bin/newuidmap", NewGIDMap: "/usr/bin/newgidmap",
		},
		freeSubs: 165536,
		dataDir:  "/home/ann/.local/share/sandboxd", nearest: "/home/ann", filesystem: "ext4",
		seccompActions: []string{"errno", "allow"},
		cgroup: kernel.Cgroup{
			Mount: "/sys/fs/cgroup", Dir: "/sys/fs/cgroup/user.slice", Available: controllers, Controllers: controllers, Delegated: true, Kill: true,
		},
		host:     cgroup.Host{UID: 1000, User: "ann", Systemd: true, Top: controllers, Manager: controllers, Lingers: true},
		landlock: 6, ptraceScope: sysctl{1, true},
		corePattern: "|/usr/lib/systemd/systemd-coredump %P", coreLimit: math.MaxUint64,
		freeBytes: 100 << 30, freeFiles: 1 << 20, socket: "/run/user/1000/sandboxd/api.sock",
		counted: map[string]sysctl{"user/max_user_namespaces": {60000, true}, "fs/inotify/max_user_instances": {128, true}},
	}
}

func TestJudgeHealthy(t *testing.T) {
	root := healthy()
	root.uid, root.user, root.ids.UID, root.ids.GID = 0, "root", 0, 0
	root.ids.SubUID, root.ids.SubGID = nil, nil // the daemon then takes a high range
	for name, f := range map[string]facts{"ordinary user": healthy(), "root": root} {
		for _, c := range judge(f) {
			if shares := name != "root" && c.Name == "own ids"; shares {
				if c.OK || c.Fatal || !strings.Contains(c.Found, "share") || !strings.Contains(c.Remedy, "root") {
					t.Errorf("%s: %+v", name, c)
				}
				continue
			}
			if !c.OK || c.Means != "" || c.Remedy != "" || c.Found == "" {
				t.Errorf("%s: %+v", name, c)
			}
		}
	}
}

func TestJudge(t *testing.T) {
	refused := func(what string) error {
		return &kernel.UnsupportedError{Feature: what, Since: "5.11", Err: syscall.EPERM}
	}
	for name, tc := range map[string]struct {
		spoil  func(*facts)
		check  string
		fatal  bool
		found  string // substring
		remedy string // substring
	}{
		"old kernel": {func(f *facts) { f.calls = refused("openat2") }, "kernel", true, "openat2", "Linux 5.11"},
		"no namespaces left": {
			func(f *facts) { f.userNamespaces = refused("user namespaces"); f.maxUserNamespaces = sysctl{0, true} },
			"user namespaces", true, "operation not permitted", "sudo sysctl -w user.max_user_namespaces=",
		},
		"Debian's switch": {
			func(f *facts) {
				f.userNamespaces, f.unprivilegedUserNSClone = refused("user namespaces"), sysctl{0, true}
			},
			"user namespaces", true, "refused", "sudo sysctl -w kernel.unprivileged_userns_clone=1",
		},
		"Ubuntu's AppArmor": {
			func(f *facts) {
				f.userNamespaces, f.apparmorRestrictsUserNS = refused("user namespaces"), sysctl{1, true}
			},
			"user namespaces", true, "refused", "apparmor_restrict_unprivileged_userns=0",
		},
		"Ubuntu's AppArmor by its name": {
			func(f *facts) {
				f.userNamespaces, f.apparmorRestrictsUserNS = refused("user namespaces"), sysctl{1, true}
			},
			"AppArmor", true, "no profile lets", "sudo tee /etc/apparmor.d/sandboxd && sudo apparmor_parser -r /etc/apparmor.d/sandboxd",
		},
		"Ubuntu's AppArmor for these programs alone": {
			func(f *facts) {
				f.userNamespaces, f.apparmorRestrictsUserNS = refused("user namespaces"), sysctl{1, true}
			},
			"AppArmor", true, "no profile lets", `profile sandboxd /opt/ann/sandboxd{,-launcher} flags=(unconfined) {\n  userns,\n}\n'`,
		},
		"few namespaces": {
			func(f *facts) { f.counted["user/max_user_namespaces"] = sysctl{10, true} },
			"sysctls", false, "user.max_user_namespaces is 10", "sudo sysctl -w user.max_user_namespaces=1000",
		},
		"few watches": {
			func(f *facts) { f.counted["fs/inotify/max_user_instances"] = sysctl{8, true} },
			"sysctls", false, "fs.inotify.max_user_instances is 8", "sudo sysctl -w fs.inotify.max_user_instances=128",
		},
		"a full disk": {func(f *facts) { f.freeBytes = 100 << 20 }, "disk", false, "0.1 GiB", "--data-dir"},
		"no files":    {func(f *facts) { f.freeFiles = 7 }, "disk", false, "7 files can be made", "--data-dir"},
		"a sick disk": {func(f *facts) { f.diskErr = syscall.EIO }, "disk", false, "input/output error", "--data-dir"},
		"a mount below": {
			func(f *facts) { f.covers = []string{"/usr/local", "/usr/share/x"} },
			"host image", false, "/usr/local, /usr/share/x", "sudo umount /usr/local /usr/share/x, then restart",
		},
		"no mounts to read": {func(f *facts) { f.coversErr = syscall.ENOENT }, "host image", false, "no such file", "/proc"},
		"a place of others": {func(f *facts) { f.socketErr = errors.New("belongs to uid 7") }, "socket", false, "uid 7", "XDG_RUNTIME_DIR"},
		"a container's filter": {
			func(f *facts) { f.userNamespaces = refused("user namespaces") }, "user namespaces", true, "refused", "container",
		},
		"no helpers": {
			func(f *facts) { f.ids.HelperErr = fmt.Errorf("newuidmap is %w", idmap.ErrNotInstalled) },
			"subordinate ids", false, "newuidmap is not installed", "sudo apt-get install uidmap (",
		},
		"no helpers and no entry": {
			func(f *facts) {
				f.ids.HelperErr = fmt.Errorf("newuidmap is %w", idmap.ErrNotInstalled)
				f.ids.SubUID = nil
			},
			"subordinate ids", false, "not installed", "; sudo usermod --add-subuids",
		},
		"helpers without power": {
			func(f *facts) { f.ids.HelperErr = errors.New("/usr/bin/newuidmap is neither setuid root nor …") },
			"subordinate ids", false, "neither setuid", "--reinstall uidmap",
		},
		"no entry": {
			func(f *facts) { f.ids.SubUID, f.ids.SubGID = nil, nil },
			"subordinate ids", false, "neither /etc/subuid", "sudo usermod --add-subuids 165536-231071 --add-subgids 165536-231071 ann,",
		},
		"a short entry": {
			func(f *facts) { f.ids.SubGID = []idmap.Range{{Outside: 100000, Size: 100}} },
			"subordinate ids", false, "100 ids; root of a sandbox is uid 100000", "usermod",
		},
		"an old kernel under root": {
			func(f *facts) {
				f.uid, f.ids.UID, f.ids.SubUID, f.ids.SubGID, f.mounts = 0, 0, nil, nil, syscall.EINVAL
			},
			"own ids", false, "all sandboxes share their ids: invalid argument", "Linux 5.19",
		},
		"root with one range": {
			func(f *facts) {
				f.uid, f.ids.UID = 0, 0
				f.ids.SubUID = []idmap.Range{{Outside: 100000, Size: 65537}}
				f.ids.SubGID = f.ids.SubUID
			},
			"own ids", false, "all sandboxes share 65536 ids", "131073 ids or more",
		},
		"unreadable entries": {func(f *facts) { f.idsErr = syscall.EACCES }, "subordinate ids", false, "permission denied", "readable"},
		"no place":           {func(f *facts) { f.dataErr = syscall.EROFS }, "data directory", true, "read-only", "--data-dir"},
		"no place, so no overlay": {
			func(f *facts) { f.dataErr = syscall.EROFS }, "overlay", true, "not tried", "--data-dir",
		},
		"no attributes": {func(f *facts) { f.xattrs = refused("user.* attributes") }, "user attributes", true, "refused", "ext4"},
		"no overlay":    {func(f *facts) { f.overlay = refused("overlay") }, "overlay", true, "refused", "Linux 5.11"},
		"covered /proc": {func(f *facts) { f.proc = refused("a fresh /proc") }, "fresh /proc", true, "refused", "unmask"},
		"no filters":    {func(f *facts) { f.seccomp = refused("system call filters") }, "system call filter", true, "refused", "CONFIG_SECCOMP"},
		"no cgroup v2": {
			func(f *facts) { f.cgroupErr, f.host.Top = refused("cgroup v2"), nil },
			"cgroup limits", false, "cgroup v2", "unified_cgroup_hierarchy",
		},
		"controllers v1": {
			func(f *facts) {
				f.cgroup.Controllers, f.host.Top, f.host.V1, f.host.Systemd = nil, []string{}, cgroup.Wanted(), false
			},
			"cgroup limits", false, "none", "cgroup_no_v1",
		},
		"not delegated": {
			func(f *facts) { f.cgroup.Delegated, f.cgroup.Why = false, "cgroup.procs is not ours" },
			"cgroup limits", false, "not ours", "systemd-run --user --scope",
		},
		"systemd refuses": {
			func(f *facts) {
				f.cgroup.Delegated, f.cgroup.Why = false, "cgroup.procs is not ours"
				f.host.Asks, f.host.Manager, f.scopeErr = true, nil, errors.New("no such socket")
			},
			"cgroup limits", false, "not ours; systemd was asked for a scope: no such socket", "loginctl enable-linger ann",
		},
		"cpu is missing": {
			func(f *facts) {
				f.cgroup.Controllers = []string{"memory", "pids"}
				f.host.Manager = f.cgroup.Controllers
			},
			"cgroup limits", false, "memory, pids", "hand cpu to users: sudo mkdir -p /etc/systemd/system/user@.service.d",
		},
		"a scope without cpu": {
			func(f *facts) {
				f.cgroup.Delegated, f.host.Asks, f.scope.Controllers = false, true, []string{"memory", "pids"}
				f.host.Manager = f.scope.Controllers
			},
			"cgroup limits", false, "a scope with the controllers: memory, pids", "delegate.conf",
		},
		"io is missing": {
			func(f *facts) {
				f.cgroup.Controllers = []string{"cpu", "cpuset", "memory", "pids"}
				f.host.Manager = f.cgroup.Controllers
			},
			"io and cpuset limits", false, "cpu, cpuset, memory, pids", "hand io to users",
		},
		"root in a cgroup of its own, and a host with little": {
			func(f *facts) { f.uid, f.host.AtTop, f.host.Top = 0, true, []string{"cpu", "pids"} },
			"cgroup limits", false, "at the top of the hierarchy, with the controllers: cpu, pids", "CONFIG_MEMCG",
		},
		"a session": {
			func(f *facts) { f.host.Asks, f.host.Lingers, f.scope.Controllers = true, false, cgroup.Wanted() },
			"logout", false, "ann does not linger", "sudo loginctl enable-linger ann",
		},
		"a service of a user": {
			func(f *facts) { f.host.InManager, f.host.Lingers = true, false },
			"logout", false, "ann does not linger", "sudo loginctl enable-linger ann",
		},
		"no cgroup.kill": {func(f *facts) { f.cgroup.Kill = false }, "cgroup.kill", false, "no cgroup.kill", "5.14"},
		"old Landlock":   {func(f *facts) { f.landlock = 1 }, "Landlock", false, "ABI 1", "5.19"},
		"no Landlock":    {func(f *facts) { f.landlockErr = refused("Landlock") }, "Landlock", false, "Landlock", "lsm="},
		"a program for cores, and no limit to keep it": {
			func(f *facts) { f.coreLimit = 0 }, "cores", false, "|/usr/lib/systemd/systemd-coredump", "LimitCORE=infinity",
		},
		"a service for cores": {
			func(f *facts) { f.corePattern = "@@/run/cores" }, "cores", false, "socket", "sysctl -w kernel.core_pattern=core",
		},
		"no ceilings of IPC": {func(f *facts) { f.ipcErr = refused("ceilings") }, "System V IPC", false, "refused", "Linux 6.9"},
		"no ptrace":          {func(f *facts) { f.ptraceScope.value = 2 }, "ptrace", false, "2", "ptrace_scope=1"},
		"no ptrace at all":   {func(f *facts) { f.ptraceScope.value = 3 }, "ptrace", false, "3", "boot again"},
	} {
		t.Run(name, func(t *testing.T) {
			f := healthy()
			tc.spoil(&f)
			checks := judge(f)
			if Ready(checks) == tc.fatal {
				t.Errorf("ready is %v", !tc.fatal)
			}
			for _, c := range checks {
				if c.Name != tc.check {
					continue
				}
				if tc.check == "AppArmor" {
					c.Fatal = tc.fatal // "user namespaces" reports that this is fatal
				}
				if c.OK || c.Fatal != tc.fatal || c.Means == "" || !strings.Contains(c.Found, tc.found) || !strings.Contains(c.Remedy, tc.remedy) {
					t.Errorf("%+v", c)
				}
				return
			}
			t.Errorf("no check is called %q", tc.check)
		})
	}
}

// A profile that exempts this program makes AppArmor's restriction harmless.
func TestJudgeTakesAProfileOfAppArmor(t *testing.T) {
	f := healthy()
	f.apparmorRestrictsUserNS = sysctl{1, true}
	for _, c := range judge(f) {
		if !c.OK && c.Name != "own ids" || c.Name == "AppArmor" && !strings.Contains(c.Found, "a profile lets") {
			t.Errorf("%+v", c)
		}
	}
}

func TestMountedBelow(t *testing.T) {
	const mountinfo = "22 1 259:1 / / rw shared:1 - ext4 /dev/root rw\n23 22 0:5 / /usr rw - ext4 /dev/b rw\n" +
		"24 23 0:6 / /usr/local rw shared:2 - ext4 /dev/c rw\n25 23 0:7 / /usr/local rw - tmpfs t rw\n26 22 0:8 / /usrx/y rw - tmpfs t rw\n" +
		"27 22 0:9 / /lib/modules ro - squashfs /dev/l ro\nshort\n"
	if diff := cmp.Diff([]string{"/usr/local", "/lib/modules"}, mountedBelow(mountinfo, []string{"/usr", "/lib"})); diff != "" {
		t.Error(diff)
	}
}

func TestUsableSocket(t *testing.T) {
	dir := t.TempDir()
	private := filepath.Join(dir, "private")
	if err := os.Mkdir(private, 0o700); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		filepath.Join(private, "api.sock"):                              "",
		filepath.Join(dir, "not", "yet", "api.sock"):                    "",
		filepath.Join(dir, strings.Repeat("long/", 25), "api.sock"):     "at most",
		filepath.Join(filepath.Dir(private), "private", "..", "a.sock"): "mode 0",
	} {
		if want == "mode 0" {
			if err := os.Chmod(dir, 0o777); err != nil {
				t.Fatal(err)
			}
		}
		err := usableSocket(path)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", path, err, want)
		}
	}
}

// A low ceiling's cost counts only the part of it that sandboxes may use.
func TestSandboxesHaveHalf(t *testing.T) {
	f := healthy()
	f.counted["fs/inotify/max_user_instances"] = sysctl{8, true}
	if got := f.judgeSysctls().Means; got != "no more than 8 instances of inotify (half of them for sandboxes) at once" {
		t.Errorf("%q", got)
	}
}

// A login session has no delegation, and needs none if systemd gives a scope.
func TestJudgeTakesAScopeForACgroup(t *testing.T) {
	f := healthy()
	f.cgroup.Delegated, f.cgroup.Kill, f.cgroup.Why = false, false, "cgroup.procs is not ours"
	f.host.Asks, f.scope = true, systemd.Scope{Controllers: cgroup.Wanted(), Kill: true}
	for _, c := range judge(f) {
		if !c.OK && c.Name != "own ids" {
			t.Errorf("%+v", c)
		}
	}
}

// TestRun examines this host: every check must have an answer, and no trace may be left.
func TestRun(t *testing.T) {
	dir := t.TempDir()
	checks := Run(t.Context(), filepath.Join(dir, "not", "yet"))
	for _, c := range checks {
		t.Logf("%+v", c)
		if c.Name == "" || c.Found == "" || !c.OK && (c.Means == "" || c.Remedy == "") {
			t.Errorf("%+v", c)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
}

func TestNearest(t *testing.T) {
	dir := t.TempDir()
	if got, err := nearest(filepath.Join(dir, "a", "b")); err != nil || got != dir {
		t.Error(got, err)
	}
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{file, filepath.Join(file, "below"), "/proc/sys/x"} {
		if _, err := nearest(path); err == nil && (path != "/proc/sys/x" || os.Geteuid() != 0) {
			t.Errorf("%s can be used", path)
		}
	}
}
