package functional

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// mountRoot returns a directory without links in its path.
func mountRoot(t *testing.T) string {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func bindMount(source, target string) api.Mount {
	return api.Mount{Type: api.MountBind, Source: source, Target: target}
}

// Programs see a directory of the host as their own, and what they write belongs to its owner, the
// daemon's user. So it is in each life of a sandbox, and with the next daemon.
func TestMountsHaveTheirOwners(t *testing.T) {
	dir := mountRoot(t)
	for _, name := range []string{"rw", "ro"} {
		if err := errors.Join(os.Mkdir(filepath.Join(dir, name), 0o755), os.WriteFile(filepath.Join(dir, name, "of-host"), []byte("host\n"), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	d := harness.Start(t, harness.Options{Args: []string{"--mount-root", dir}})
	readOnly := bindMount(filepath.Join(dir, "ro"), "/new/place")
	readOnly.ReadOnly = true
	single := bindMount(filepath.Join(dir, "ro/of-host"), "/etc/one-file")
	users := []string{"", "1000:1000"}
	if d.System(t).Enforced.IDs == api.IDsSingle {
		users = users[:1]
	}
	for i, user := range users {
		s := d.Create(t, api.CreateSandbox{User: user, Settings: api.Settings{Mounts: []api.Mount{bindMount(filepath.Join(dir, "rw"), "/rw"), readOnly, single}}})
		got := s.Sandbox
		want := api.MountsUser
		if os.Geteuid() == 0 {
			want = api.MountsMapped
		}
		if got.Enforced.Mounts != want {
			t.Errorf("user %q: enforced.mounts is %q, want %q", user, got.Enforced.Mounts, want)
		}
		uid := map[string]string{"": "0", "1000:1000": "1000"}[user]
		look := fmt.Sprintf("stat -c %%u:%%g /rw /rw/of-host /new/place/of-host /etc/one-file | sort -u; cat /rw/of-host; echo %d > /rw/by-%d; mkdir -p /rw/dir-%d/x; "+
			"echo x 2>/dev/null > /new/place/of-host || echo refused; touch /new/place/x 2>/dev/null || echo refused; cat /etc/one-file", i, i, i)
		for _, life := range []string{"first", "second", "next daemon"} {
			switch life {
			case "second":
				s.MustTurn(t, "stop", nil, api.StateStopped)
				s.MustTurn(t, "start", nil, api.StateRunning)
			case "next daemon":
				d.Kill9(t)
				d.Launch(t)
			}
			if got, want := s.Sh(t, look), uid+":"+uid+"\nhost\nrefused\nrefused\nhost\n"; got != want {
				t.Errorf("user %q, %s life: %q, want %q", user, life, got, want)
			}
		}
		for _, name := range []string{"by-%d", "dir-%d", "dir-%d/x"} {
			fi, err := os.Stat(filepath.Join(dir, "rw", fmt.Sprintf(name, i)))
			if err != nil {
				t.Fatal(err)
			}
			if st := fi.Sys().(*syscall.Stat_t); int(st.Uid) != os.Geteuid() || int(st.Gid) != os.Getegid() {
				t.Errorf("user %q: %s belongs to %d:%d on the host", user, fi.Name(), st.Uid, st.Gid)
			}
		}
		// Flags of both, as the kernel has them.
		for _, at := range []string{"/rw rw,nosuid,nodev", "/new/place ro,nosuid,nodev", "/etc/one-file ro,nosuid,nodev"} {
			if at == "/etc/one-file ro,nosuid,nodev" {
				at = "/etc/one-file rw,nosuid,nodev"
			}
			if got := s.Sh(t, "grep -c ' "+at+"' /proc/self/mountinfo; true"); got != "1\n" {
				t.Errorf("%s: %s", at, s.Sh(t, "cat /proc/self/mountinfo"))
			}
		}
		s.Delete(t)
	}
	if data, err := os.ReadFile(filepath.Join(dir, "ro/of-host")); err != nil || string(data) != "host\n" {
		t.Errorf("the file of the host is %q now, %v", data, err)
	}
}

// A mount is not part of what a snapshot has. A fork has the mounts of its origin, with root of the
// host; elsewhere owners would differ, and both are refused.
func TestForksOfMounts(t *testing.T) {
	dir := mountRoot(t)
	if err := os.WriteFile(filepath.Join(dir, "of-host"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	d := harness.Start(t, harness.Options{Args: []string{"--mount-root", dir}})
	s := d.Create(t, api.CreateSandbox{Settings: api.Settings{Mounts: []api.Mount{bindMount(dir, "/mnt/host")}}})
	s.Sh(t, "echo kept > /var/own; echo shared > /mnt/host/written")
	var forks api.SandboxForked
	err := d.Call(t.Context(), "POST", "/v1/sandboxes/"+s.ID+"/fork", api.ForkSandbox{}, &forks)
	if got := s.Sandbox; got.Enforced.Mounts == api.MountsUser && got.Enforced.IDs != api.IDsSingle {
		if err == nil || !strings.Contains(err.Error(), "no snapshot") {
			t.Errorf("a fork of files of the daemon's user: %v", err)
		}
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	fork := d.Sandbox(forks.Sandboxes[0])
	defer fork.Delete(t)
	if got := fork.Sh(t, "cat /var/own /mnt/host/written; echo more >> /mnt/host/written"); got != "kept\nshared\n" {
		t.Errorf("fork: %q", got)
	}
	if got := s.Sh(t, "cat /mnt/host/written"); got != "shared\nmore\n" {
		t.Errorf("its origin: %q", got)
	}
	var shot api.Snapshot
	if err := d.Call(t.Context(), "POST", "/v1/sandboxes/"+s.ID+"/snapshots", api.TakeSnapshot{}, &shot); err != nil {
		t.Fatal(err)
	}
	of := d.Create(t, api.CreateSandbox{Snapshot: shot.ID})
	if got := of.Sh(t, "cat /var/own; ls -A /mnt/host"); got != "kept\n" {
		t.Errorf("of the snapshot: %q", got)
	}
}

// Nothing of the host is mounted that the operator has not named, and nothing of the daemon's own.
func TestMountsThatAreRefused(t *testing.T) {
	dir := mountRoot(t)
	for _, name := range []string{"root/a", "root/other", "outside"} {
		if err := os.MkdirAll(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(os.Symlink("../outside", filepath.Join(dir, "root/out")), os.Symlink("a", filepath.Join(dir, "root/in"))); err != nil {
		t.Fatal(err)
	}
	d := harness.Start(t, harness.Options{Args: []string{"--mount-root", filepath.Join(dir, "root")}})
	at := func(source string) string { return filepath.Join(dir, source) }
	refuse := func(d *harness.Daemon, want string, set api.Settings) {
		t.Helper()
		var made api.Sandbox
		err := d.Call(t.Context(), "POST", "/v1/sandboxes", api.CreateSandbox{Image: api.HostImage, Settings: set}, &made)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", set, err, want)
		}
	}
	one := func(source, target string) api.Settings {
		return api.Settings{Mounts: []api.Mount{bindMount(source, target)}}
	}
	refuse(d, "not below", one(at("outside"), "/m"))
	refuse(d, "not below", one("/etc", "/m"))
	refuse(d, "symbolic link", one(at("root/out"), "/m"))
	refuse(d, "symbolic link", one(at("root/in"), "/m"))
	refuse(d, "no such file", one(at("root/gone"), "/m"))
	refuse(d, `".." is not allowed`, one(at("root")+"/../outside", "/m"))
	refuse(d, "shortest form", one("/", "/m"))
	refuse(d, "shortest form", one(at("root/a"), "/"))
	refuse(d, "/proc is sandboxd's", one(at("root/a"), "/proc/sys"))
	refuse(d, "/dev is sandboxd's", one(at("root/a"), "/dev/shm"))
	refuse(d, "below it", one(at("root/a"), "/etc"))
	refuse(d, "has a link there", one(at("root/a"), "/bin"))
	refuse(d, "has a link there", one(at("root/a"), "/bin/below"))
	refuse(d, "lie in one another", api.Settings{Mounts: []api.Mount{bindMount(at("root/a"), "/m"), bindMount(at("root/other"), "/m/n")}})
	refuse(d, "file system in memory", api.Settings{Mounts: []api.Mount{bindMount(at("root/a"), "/m/n")}, Tmpfs: []api.Scratch{{Path: "/m"}}})
	refuse(d, "must be \"bind\"", api.Settings{Mounts: []api.Mount{{Type: "nfs", Source: at("root/a"), Target: "/m"}}})
	refuse(d, "has the type bind", api.Settings{Mounts: []api.Mount{{Type: api.MountVolume, Source: at("root/a"), Target: "/m"}}})
	var left api.SandboxList
	if err := d.Call(t.Context(), "GET", "/v1/sandboxes", nil, &left); err != nil || len(left.Sandboxes) > 0 {
		t.Errorf("left: %+v, %v", left, err)
	}

	// The data directory of this daemon lies below its root.
	own := harness.Start(t, harness.Options{Args: []string{"--mount-root", filepath.Dir(d.DataDir)}})
	refuse(own, "not below", one(own.DataDir, "/m"))
	self := harness.Start(t, harness.Options{Args: []string{"--mount-root", filepath.Dir(filepath.Dir(d.DataDir))}})
	for _, source := range []string{self.DataDir, filepath.Join(self.DataDir, "sandboxes"), self.RuntimeDir} {
		refuse(self, "it lies in", one(source, "/m"))
	}
	refuse(self, "it contains", one(filepath.Dir(self.DataDir), "/m"))
	refuse(harness.Start(t, harness.Options{}), "--mount-root DIR", one(at("root/a"), "/m"))
}

// Where the root is read-only, a mount is written to unless it is read-only itself, a file of the
// host too.
func TestMountsOfReadOnlyRoots(t *testing.T) {
	dir := mountRoot(t)
	file := filepath.Join(dir, "file")
	if err := errors.Join(os.Mkdir(filepath.Join(dir, "a"), 0o755), os.WriteFile(file, []byte("host\n"), 0o644)); err != nil {
		t.Fatal(err)
	}
	d := harness.Start(t, harness.Options{Args: []string{"--mount-root", dir}})
	readOnly := bindMount(filepath.Join(dir, "a"), "/ro")
	readOnly.ReadOnly = true
	s := d.Create(t, api.CreateSandbox{Settings: api.Settings{
		ReadOnly: true, Mounts: []api.Mount{bindMount(filepath.Join(dir, "a"), "/a"), bindMount(file, "/etc/file"), readOnly},
	}})
	if got := s.Sh(t, "touch /x /ro/x 2>/dev/null || echo refused; echo 1 > /a/x; echo 2 > /etc/file; cat /ro/x"); got != "refused\n1\n" {
		t.Errorf("inside: %q", got)
	}
	if got, err := os.ReadFile(file); err != nil || string(got) != "2\n" {
		t.Errorf("the file of the host: %q, %v", got, err)
	}
}

// The source of a mount is looked for again at each start: one that has become a link, or is gone,
// is refused, and the sandbox stays as it was.
func TestMountsAreResolvedAtEachStart(t *testing.T) {
	dir := mountRoot(t)
	a := filepath.Join(dir, "a")
	if err := os.Mkdir(a, 0o755); err != nil {
		t.Fatal(err)
	}
	d := harness.Start(t, harness.Options{Args: []string{"--mount-root", dir}})
	s := d.Create(t, api.CreateSandbox{Settings: api.Settings{Mounts: []api.Mount{bindMount(a, "/m")}}})
	s.MustTurn(t, "stop", nil, api.StateStopped)
	if err := errors.Join(os.Remove(a), os.Symlink("/etc", a)); err != nil {
		t.Fatal(err)
	}
	var got api.Sandbox
	if err := d.Call(t.Context(), "POST", "/v1/sandboxes/"+s.ID+"/start", api.StartSandbox{}, &got); err == nil || !strings.Contains(err.Error(), "symbolic link") {
		t.Errorf("a link to /etc: %v", err)
	}
	if err := errors.Join(os.Remove(a), os.Mkdir(a, 0o755), os.WriteFile(filepath.Join(a, "new"), nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	s.MustTurn(t, "start", nil, api.StateRunning)
	if got := s.Sh(t, "ls /m"); got != "new\n" {
		t.Errorf("started again: %q", got)
	}
}
