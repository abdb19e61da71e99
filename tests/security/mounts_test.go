package security

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// A directory of the host in a sandbox leads to nothing else of the host: not to its parent, not
// through links that programs make there, and not while a user of the host swaps the source with a
// link. What is read-only stays so, and neither devices nor set-id bits have an effect.
func TestMountsLeadNowhereElse(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	at := func(name string) string { return filepath.Join(dir, name) }
	for _, name := range []string{"root/a/b", "root/ro", "outside/b"} {
		if err := os.MkdirAll(at(name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	const secret = "planted on the host"
	if err := errors.Join(os.WriteFile(at("outside/b/secret"), []byte(secret), 0o644), os.WriteFile(at("root/a/b/mine"), []byte("mine\n"), 0o644),
		os.WriteFile(at("root/ro/of-host"), []byte("mine\n"), 0o644), os.Symlink(at("outside/b/secret"), at("root/a/b/link"))); err != nil {
		t.Fatal(err)
	}
	d := harness.Start(t, harness.Options{Args: []string{"--mount-root", at("root")}})
	mounts := []api.Mount{
		{Type: api.MountBind, Source: at("root/a/b"), Target: "/m"},
		{Type: api.MountBind, Source: at("root/ro"), Target: "/ro", ReadOnly: true},
	}
	s := d.Create(t, api.CreateSandbox{Settings: api.Settings{Mounts: mounts}})
	for script, want := range map[string]string{
		"cat /m/mine": "mine\n", // the control
		"cat /m/link /m/../../outside/b/secret /m/../outside/b/secret " + at("outside/b/secret") + " 2>/dev/null; ln -s ../../outside/b/secret /m/made; cat /m/made 2>/dev/null": "",
		"mount -o remount,rw /ro 2>/dev/null; mount -o remount,bind,rw /ro 2>/dev/null; umount /ro 2>/dev/null; touch /ro/x 2>/dev/null || echo refused":                         "refused\n",
		"unshare -Urm sh -c 'mount -o remount,bind,rw /ro; touch /ro/x' 2>/dev/null || echo refused":                                                                             "refused\n",
		"chmod 777 /ro/of-host 2>/dev/null || echo refused; mv /ro/of-host /m/ 2>/dev/null || echo refused":                                                                      "refused\nrefused\n",
		"mknod /m/sda b 8 0 2>/dev/null && cat /m/sda 2>/dev/null || echo refused":                                                                                               "refused\n",
		"cp /usr/bin/id /m/id && chown 1:1 /m/id 2>/dev/null && chmod 6755 /m/id 2>/dev/null; /m/id -u":                                                                          "0\n",
	} {
		if got := s.Sh(t, script+"; true"); got != want {
			t.Errorf("%s: %q, want %q", script, got, want)
		}
	}
	if data, err := os.ReadFile(at("root/ro/of-host")); err != nil || string(data) != "mine\n" {
		t.Errorf("read-only: %q, %v", data, err)
	}
	s.Delete(t)

	// The race: "a" is the directory, or a link to the other one, and back.
	link := at("swap")
	if err := os.Symlink(at("outside"), link); err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var swapping sync.WaitGroup
	defer swapping.Wait()
	defer close(stop)
	swapping.Go(func() {
		for {
			if err := unix.Renameat2(unix.AT_FDCWD, link, unix.AT_FDCWD, at("root/a"), unix.RENAME_EXCHANGE); err != nil {
				t.Error(err)
				return
			}
			select {
			case <-stop:
				return
			default:
			}
		}
	})
	refused, made := 0, 0
	for range 15 {
		s, err := d.TryCreate(t.Context(), api.CreateSandbox{Settings: api.Settings{Mounts: mounts[:1]}})
		if err != nil {
			// The kernel says either of a path that changes under it.
			if !strings.Contains(err.Error(), "symbolic link") && !strings.Contains(err.Error(), "it leads out of") {
				t.Fatal(err)
			}
			refused++
			continue
		}
		made++
		if got := s.Sh(t, "ls -A /m"); strings.Contains(got, "secret") || !strings.Contains(got, "mine") {
			t.Errorf("mounted: %q", got)
		}
		s.Delete(t)
	}
	t.Logf("%d were refused, %d made", refused, made)
}

// A host's Unix socket in a mounted directory can be connected to, as SECURITY.md says, and one in
// a workspace cannot.
func TestSocketsOfTheHostInMounts(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", filepath.Join(dir, "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		t.Fatal(err)
	}
	d := harness.Start(t, harness.Options{Args: []string{"--mount-root", dir}})
	for name, tc := range map[string]struct {
		settings api.Settings
		want     string
	}{
		"mount":     {api.Settings{Mounts: []api.Mount{{Type: api.MountBind, Source: dir, Target: "/m", ReadOnly: true}}}, "connected\n"},
		"workspace": {api.Settings{Workspace: &api.Workspace{Source: dir, Target: "/m", Device: st.Dev, Inode: st.Ino}}, "refused\n"},
	} {
		s := d.Create(t, api.CreateSandbox{Settings: tc.settings})
		const script = "import socket\ntry: socket.socket(socket.AF_UNIX).connect('/m/s'); print('connected')\nexcept ConnectionRefusedError: print('refused')"
		if got := s.Sh(t, "python3 -c \""+script+"\""); got != tc.want {
			t.Errorf("%s: %q, want %q", name, got, tc.want)
		}
		s.Delete(t)
	}
}
