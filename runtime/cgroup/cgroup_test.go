package cgroup

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

func TestLocate(t *testing.T) {
	const (
		unified = "30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
		hybrid  = "31 30 0:27 / /sys/fs/cgroup/cpu rw shared:5 - cgroup cgroup rw,cpu\n40 30 0:30 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
		part    = "30 23 0:26 /docker/abc /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw\n"
		private = "30 23 0:26 / /sys/fs/cgroup ro,nosuid,nodev,noexec,relatime - cgroup2 cgroup rw,nsdelegate\n"
		outer   = "30 23 0:26 /../../.. /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
		other   = "29 23 0:26 /elsewhere /run/tool/cgroup2 rw - cgroup2 cgroup2 rw\n"
		top     = "/sys/fs/cgroup"
	)
	for name, tc := range map[string]struct {
		mountinfo, self string
		want            place
	}{
		"none":                 {"", "0::/\n", place{}},
		"only v1":              {"31 30 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n", "1:cpu:/\n", place{}},
		"root":                 {unified, "0::/\n", place{mount: top, own: top}},
		"user unit":            {unified, "0::/user.slice/u.service\n", place{mount: top, own: top + "/user.slice/u.service"}},
		"in its leaf":          {unified, "0::/a.service/supervisor\n", place{mount: top, own: top + "/a.service", inLeaf: true}},
		"hybrid":               {hybrid, "1:cpu:/a\n0::/b\n", place{mount: top + "/unified", own: top + "/unified/b"}},
		"part of it":           {part, "0::/docker/abc/x\n", place{mount: top, own: top + "/x", readOnly: true}},
		"outside of mount":     {part, "0::/other\n", place{mount: top, readOnly: true}},
		"container":            {private, "0::/\n", place{mount: top, own: top, readOnly: true}},
		"container, leaf":      {unified, "0::/supervisor\n", place{mount: top, own: top, inLeaf: true}},
		"container, host's":    {outer, "0::/\n", place{mount: top}},
		"remounted":            {outer + unified, "0::/x\n", place{mount: top, own: top + "/x"}},
		"hidden":               {unified + private, "0::/x\n", place{mount: top, own: top + "/x", readOnly: true}},
		"another mount first":  {other + unified, "0::/x\n", place{mount: top, own: top + "/x"}},
		"another mount second": {unified + other, "0::/x\n", place{mount: top, own: top + "/x"}},
		"above the namespace":  {unified, "0::/../x\n", place{mount: top}},
		"no v2 line":           {unified, "1:cpu:/\n", place{mount: top}},
		"malformed mountinfo":  {"x - cgroup2\n - cgroup2 \n", "0::/\n", place{}},
	} {
		t.Run(name, func(t *testing.T) {
			if got := locate(tc.mountinfo, tc.self); got != tc.want {
				t.Errorf("locate = %+v\nwant     %+v", got, tc.want)
			}
		})
	}
}

func TestWantsScope(t *testing.T) {
	mount := t.TempDir()
	const manager = "user.slice/user-7.slice/user@7.service"
	mark := func(dir string) {
		dir = filepath.Join(mount, dir)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := unix.Setxattr(dir, "user.delegate", []byte("1"), 0); err != nil {
			t.Skipf("the file system of %s has no user attributes: %v", mount, err)
		}
	}
	mark(manager)
	mark("system.slice/given.service")
	mark("system.slice/given.scope")
	mark(manager + "/app.slice/marked.scope")
	for own, want := range map[string]bool{
		"":                                    false, // the root of a cgroup namespace
		"init.scope":                          true,
		"user.slice/user-7.slice/s.scope":     true, // a login session
		"system.slice/plain.service":          true,
		"system.slice/plain.service/sub":      true,
		"system.slice/given.service":          true, // or it could not be started again
		"system.slice/given.service/sub":      false,
		"system.slice/given.scope":            false,
		manager + "/app.slice/u.service":      true,
		manager + "/app.slice/u.service/test": false,
		manager + "/app.slice/u.scope":        true,
		manager + "/app.slice/marked.scope":   false,
	} {
		p := place{mount: mount, own: filepath.Join(mount, own)}
		if got := p.wantsScope(); got != want {
			t.Errorf("in %q: %v, want %v", own, got, want)
		}
		p.inLeaf = true
		if p.wantsScope() {
			t.Errorf("in the leaf of %q another scope is wanted", own)
		}
	}
	if (place{mount: mount}).wantsScope() {
		t.Error("who is nowhere wants a scope")
	}
}

func TestRefusedSaysWhy(t *testing.T) {
	dir := t.TempDir()
	group := func(name string, files ...string) string {
		path := filepath.Join(dir, name)
		if err := os.Mkdir(path, 0o755); err != nil {
			t.Fatal(err)
		}
		for _, f := range append(files, "cgroup.events") {
			if err := os.WriteFile(filepath.Join(path, f), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		return path
	}
	ours := group("ours", "cgroup.procs", "cgroup.subtree_control")
	bare := group("bare", "cgroup.procs")
	for name, tc := range map[string]struct {
		at   place
		own  string
		want string
	}{
		"no cgroup v2": {place{}, "", "not mounted"},
		"out of sight": {place{mount: dir}, "", "outside of what is mounted"},
		"read-only":    {place{mount: ours, readOnly: true}, ours, "mounted read-only"},
		"ours":         {place{mount: dir}, ours, ""},
		"a container":  {place{mount: ours}, ours, ""},
		"not ours":     {place{mount: dir}, bare, "cgroup.subtree_control: no such file"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := tc.at.refused(tc.own); tc.want == "" && got != "" || !strings.Contains(got, tc.want) {
				t.Errorf("refused: %q, want %q", got, tc.want)
			}
		})
	}
}

func TestParseCgroups(t *testing.T) {
	const text = "#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpuset\t0\t5\t1\nblkio\t7\t1\t1\nmemory\t0\t1\t0\ncpu\t1\t1\t1\nnonsense\n"
	v1, disabled := parseCgroups(text)
	if got, want := strings.Join(v1, " ")+"|"+strings.Join(disabled, " "), "io cpu|memory"; got != want {
		t.Errorf("v1|disabled = %s, want %s", got, want)
	}
}

func TestRemedyFitsTheHost(t *testing.T) {
	all := wanted
	user := Host{UID: 7, User: "ann", Systemd: true, Top: all, Manager: all}
	for name, tc := range map[string]struct {
		change  func(*Host)
		lacking []string
		want    []string // in this order
		not     string
	}{
		"a manager with everything": {func(*Host) {}, nil, []string{`systemd-run --user --scope -p "Delegate=cpu cpuset io memory pids" sandboxd serve`}, "boot"},
		"root with systemd":         {func(h *Host) { h.UID = 0 }, nil, []string{"systemd-run --scope"}, "--user"},
		"no manager":                {func(h *Host) { h.Manager = nil }, nil, []string{"sudo loginctl enable-linger ann"}, "tee"},
		"a manager with little": {
			func(h *Host) { h.Manager = []string{"memory", "pids"} },
			[]string{"cpu", "io"},
			[]string{
				"hand cpu, io to users", "mkdir -p /etc/systemd/system/user@.service.d",
				`printf '[Service]\nDelegate=cpu cpuset io memory pids\n' | sudo tee /etc/systemd/system/user@.service.d/delegate.conf`,
				"systemctl daemon-reload", "log out",
			},
			"boot with",
		},
		"hybrid with systemd": {
			func(h *Host) { h.Top, h.V1, h.Manager = []string{}, all, []string{} }, nil,
			[]string{"systemd.unified_cgroup_hierarchy=1"},
			"systemd-run",
		},
		"hybrid, some on v1": {
			func(h *Host) { h.Top, h.V1 = []string{"cpu", "cpuset", "io", "pids"}, []string{"memory"} },
			[]string{"memory"},
			[]string{"systemd.unified_cgroup_hierarchy=1"},
			"tee",
		},
		"v1 without systemd": {
			func(h *Host) { h.Systemd, h.Top, h.V1 = false, nil, all }, nil,
			[]string{"cgroup_no_v1=all", "sudo mount -t cgroup2 cgroup2 /sys/fs/cgroup"},
			"systemd",
		},
		"not mounted": {
			func(h *Host) { h.UID, h.Systemd, h.Top = 0, false, nil }, nil,
			[]string{"mount cgroup v2: mount -t cgroup2"},
			"boot",
		},
		"memory is switched off": {
			func(h *Host) {
				h.Top, h.Disabled = []string{"cpu", "cpuset", "io", "pids"}, []string{"memory"}
			},
			[]string{"memory"},
			[]string{"without cgroup_disable=memory", "cgroup_enable=memory"},
			"systemd-run",
		},
		"memory is switched off, and no cgroup": {
			func(h *Host) {
				h.Top, h.Disabled = []string{"cpu", "cpuset", "io", "pids"}, []string{"memory"}
			},
			nil,
			[]string{"cgroup_enable=memory", "systemd-run --user"},
			"unified",
		},
		"a kernel without": {
			func(h *Host) { h.Top = []string{"cpu", "cpuset", "memory", "pids"} },
			[]string{"io"},
			[]string{"CONFIG_BLK_CGROUP"},
			"systemd-run",
		},
		"no systemd": {
			func(h *Host) { h.Systemd = false }, nil,
			[]string{"let root give ann a cgroup: mkdir /sys/fs/cgroup/ann", "+cpu +cpuset +io +memory +pids", "chown ann"},
			"systemd",
		},
		"too little without systemd": {
			func(h *Host) { h.Systemd = false },
			[]string{"io"},
			[]string{`as root, write "+io" to cgroup.subtree_control of each cgroup above`},
			"mkdir",
		},
		"root without systemd": {
			func(h *Host) { h.UID, h.Systemd = 0, false },
			[]string{"io"},
			[]string{`write "+io" to cgroup.subtree_control`},
			"systemd",
		},
		"a container": {
			func(h *Host) { h.Container, h.Systemd, h.ReadOnly = true, false, true }, nil,
			[]string{"--security-opt writable-cgroups=true", "--security-opt unmask=/sys/fs/cgroup"},
			"systemd-run",
		},
		"a container with little": {
			func(h *Host) { h.Container, h.Systemd, h.Top = true, false, []string{"pids"} },
			[]string{"cpu", "memory"},
			[]string{"let the container's cgroup have cpu, memory"},
			"docker run",
		},
		"a container on a hybrid host": {
			func(h *Host) { h.Container, h.Systemd, h.Top, h.V1 = true, false, []string{}, all },
			nil,
			[]string{"boot the container's host", "cgroup_no_v1=all"},
			"docker run",
		},
		"systemd in a container with little": {
			func(h *Host) { h.Container, h.Top, h.Manager = true, []string{"pids"}, []string{"pids"} },
			[]string{"cpu"},
			[]string{"let the container's cgroup have cpu"},
			"kernel",
		},
		"a user in a container": {
			func(h *Host) { h.Container, h.Systemd = true, false }, nil,
			[]string{"cd /sys/fs/cgroup && chown ann . cgroup.procs"},
			"docker run",
		},
		"systemd in a container": {func(h *Host) { h.Container = true }, nil, []string{"systemd-run --user"}, "docker run"},
		"read-only":              {func(h *Host) { h.ReadOnly = true }, nil, []string{"sudo mount -o remount,rw /sys/fs/cgroup", "systemd-run"}, "boot"},
	} {
		t.Run(name, func(t *testing.T) {
			h := user
			tc.change(&h)
			got := h.Remedy(tc.lacking)
			rest := got
			for _, want := range tc.want {
				_, after, found := strings.Cut(rest, want)
				if !found {
					t.Fatalf("remedy: %s\nhas no %q in its place", got, want)
				}
				rest = after
			}
			if strings.Contains(got, tc.not) {
				t.Errorf("remedy: %s\nspeaks of %q", got, tc.not)
			}
		})
	}
}

// Nothing that the host lacks is an error, and what systemd said is passed on.
func TestPrepareSaysWhatSystemdSaid(t *testing.T) {
	at, err := find("self")
	if err != nil {
		t.Fatal(err)
	}
	if os.Geteuid() == 0 || at.refused(at.own) == "" {
		t.Skip("something is delegated here: Prepare would take it")
	}
	s, err := Prepare(t.Context(), "test", func(context.Context) error { return errors.New("no room") })
	if err != nil || s.Path != "" || s.Reason == "" {
		t.Fatalf("%+v, %v", s, err)
	}
	if asked := survey(at).Asks; asked != strings.Contains(s.Reason, "no room") {
		t.Errorf("systemd is asked: %v; the reason: %s", asked, s.Reason)
	}
}

// A daemon that gives up removes the remains of a launcher that has died, and nothing of one that
// runs.
func TestAbandonLooksForALauncher(t *testing.T) {
	testenv.RequireRoot(t)
	at, err := find("self")
	if err != nil || at.mount == "" || at.readOnly {
		t.Skipf("needs cgroup v2 that can be written: %+v, %v", at, err)
	}
	own, err := os.MkdirTemp(at.mount, "test-abandon-") //nolint:usetesting // a cgroup
	if err != nil {
		t.Skipf("needs cgroup v2 that can be written: %v", err)
	}
	t.Cleanup(func() {
		if err := Remove(context.Background(), own); err != nil {
			t.Error(err)
		}
	})
	s := Subtree{Mount: at.mount, Path: filepath.Join(own, prefix+"test")}
	leaf := filepath.Join(s.Path, launcherDir)
	for _, dir := range []string{s.Path, leaf, filepath.Join(s.Path, "box")} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	in, err := os.Open(leaf)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	launcher := exec.Command("sleep", "1000")
	launcher.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(in.Fd()), Pdeathsig: syscall.SIGKILL}
	if err := launcher.Start(); err != nil {
		t.Fatal(err)
	}
	err = s.Abandon()
	kept, readErr := os.ReadDir(s.Path)
	_ = launcher.Process.Kill()
	_ = launcher.Wait() // by our signal
	var dirs []string
	for _, e := range kept {
		if e.IsDir() {
			dirs = append(dirs, e.Name())
		}
	}
	if got := strings.Join(dirs, " "); err != nil || readErr != nil || got != "box launcher" {
		t.Errorf("beside a launcher: %v, %v; left are %q", err, readErr, got)
	}
	if err := waitEmpty(t.Context(), s.Path); err != nil {
		t.Fatal(err)
	}
	if err := s.Abandon(); err != nil || exists(s.Path) {
		t.Errorf("after the launcher's end: %v; it is still there: %v", err, exists(s.Path))
	}
	if err := s.Abandon(); err != nil {
		t.Errorf("once more: %v", err)
	}
}

// The ceiling goes only when every process is killed, and a ceiling that cannot be lifted keeps
// none alive.
func TestKillTakesTheCeilingAway(t *testing.T) {
	const held = "25000 100000"
	link := func(dir, file, to string) {
		t.Helper()
		if err := errors.Join(os.RemoveAll(filepath.Join(dir, file)), os.Symlink(to, filepath.Join(dir, file))); err != nil {
			t.Fatal(err)
		}
	}
	for name, tc := range map[string]struct {
		change     func(dir string)
		kill, ceil string // content afterwards
		err        error
	}{
		"both":                  {func(string) {}, "1", "max00 100000", nil}, // a fake file keeps the end of a longer value
		"no ceiling":            {func(dir string) { _ = os.Remove(filepath.Join(dir, "cpu.max")) }, "1", "", nil},
		"a ceiling that stays":  {func(dir string) { link(dir, "cpu.max", "/dev/full") }, "1", "", nil},
		"nobody can be killed":  {func(dir string) { link(dir, "cgroup.kill", "/dev/full") }, "", held, unix.ENOSPC},
		"no way to kill so":     {func(dir string) { _ = os.Remove(filepath.Join(dir, "cgroup.kill")) }, "", held, os.ErrNotExist},
		"a cgroup that is gone": {func(dir string) { _ = os.RemoveAll(dir) }, "", "", os.ErrNotExist},
	} {
		t.Run(name, func(t *testing.T) {
			dir := fake(t, map[string]string{"cgroup.kill": "", "cpu.max": held})
			tc.change(dir)
			if err := Kill(dir); !errors.Is(err, tc.err) || (err == nil) != (tc.err == nil) {
				t.Errorf("kill: %v, want %v", err, tc.err)
			}
			for file, want := range map[string]string{"cgroup.kill": tc.kill, "cpu.max": tc.ceil} {
				if fi, err := os.Stat(filepath.Join(dir, file)); err != nil || !fi.Mode().IsRegular() {
					continue
				}
				if got, _ := os.ReadFile(filepath.Join(dir, file)); string(got) != want {
					t.Errorf("%s is %q, want %q", file, got, want)
				}
			}
		})
	}
}
