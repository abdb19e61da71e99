package security

import (
	"archive/tar"
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// pulled makes an image of busybox and another layer, and has the daemon pull it.
func pulled(t *testing.T, d *harness.Daemon, r *harness.Registry, base v1.Layer, name string, config v1.Config, more ...harness.File) string {
	t.Helper()
	layers := []v1.Layer{base}
	if len(more) > 0 {
		layers = append(layers, harness.Layer(t, "gzip", harness.Tar(t, more...)))
	}
	r.Push(t, name+":1", harness.Image(t, config, layers...))
	ref := r.Name(name + ":1")
	if _, err := d.Pull(t.Context(), ref, false); err != nil {
		t.Fatalf("pull %s: %v", ref, err)
	}
	return ref
}

func busybox(t *testing.T) v1.Layer {
	t.Helper()
	return harness.Layer(t, "gzip", harness.Tar(t, harness.Busybox(t)...))
}

// planted is a non-empty directory of the host that every user may write.
func planted(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "planted") //nolint:usetesting // its parents must be open to the ids of sandboxes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "secret"), []byte("of the host"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Join(dir, "secret"), 0o666); err != nil {
		t.Fatal(err)
	}
	return dir
}

func untouched(t *testing.T, dir string) {
	t.Helper()
	if data, err := os.ReadFile(filepath.Join(dir, "secret")); err != nil || string(data) != "of the host" {
		t.Errorf("the host's file is now %q (%v)", data, err)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("the host's directory is now %v (%v)", entries, err)
	}
}

// CVE-2021-30465, -2025-31133, -2025-52565, -2025-52881, -2019-19921, -2023-27561, -2026-41579: at
// each place where something is mounted, made or written to, an image has a link: to the host's
// root by dots, to a directory of its own that a link of it leads out of, or to procfs. A sandbox
// of it does not start, or it has what every other one has; the host sees nothing of it.
func TestLinksAtMountTargetsLeadNowhere(t *testing.T) {
	testenv.RequireUserNS(t)
	r := harness.DebianRegistry(t, false)
	d := harness.Start(t, harness.Options{})
	dir, base := planted(t), busybox(t)
	out := strings.Repeat("../", 20) + strings.TrimPrefix(dir, "/")
	targets := map[string][]string{
		"dev": {out, "/" + out, "/proc", "/tmp", "proc/self/root"}, "proc": {out, "/tmp", "/sys", "/dev"}, "sys": {out, "/proc", "/tmp"},
		"dev/pts": {out, "/proc/self/fd"}, "dev/shm": {out, "/proc"}, "dev/mqueue": {out}, "dev/null": {"/proc/sys/kernel/core_pattern", out + "/secret"},
		"dev/console": {"/proc/sys/kernel/core_pattern", out + "/made"}, "dev/tty": {"/proc/sysrq-trigger"}, "dev/ptmx": {out + "/made"},
		"dev/sandboxd-init": {out + "/made", "/bin/sh"}, "dev/fd": {"/proc/1/fd"}, "dev/stdin": {out + "/made"},
		"proc/self": {out}, "proc/kcore": {out + "/secret"}, "proc/sys": {out}, "sys/firmware": {out}, "sys/fs/cgroup": {out},
		"etc": {out}, "etc/hosts": {out + "/made"}, "etc/resolv.conf": {out + "/made"}, "etc/hostname": {out + "/made"},
		"work": {out, "/proc/self/fd/7", "/dev"}, "var/tmp": {out, "/proc"}, "run": {out, "/proc/1/root"},
	}
	n := 0
	for target, links := range targets {
		for _, link := range links {
			n++
			name := fmt.Sprintf("link%d", n)
			t.Run(strings.ReplaceAll(target, "/", "-")+"-"+name, func(t *testing.T) {
				var files []harness.File
				if parent := filepath.Dir(target); parent != "." {
					files = append(files, harness.File{Name: parent + "/", Type: tar.TypeDir})
				}
				files = append(files, harness.File{Name: target, Type: tar.TypeSymlink, Link: link})
				ref := pulled(t, d, r, base, name, v1.Config{WorkingDir: "/" + target}, files...)
				for _, profile := range profiles(t, d) {
					s, err := d.TryCreate(t.Context(), api.CreateSandbox{Image: ref, Profile: profile})
					if err != nil {
						if !strings.Contains(err.Error(), "rootfs is not usable") {
							t.Errorf("%s -> %s, %s: %v", target, link, profile, err)
						}
						continue
					}
					d.Mark(t)
					// Their places hold fresh mounts and devices, and writes go nowhere else.
					const look = `for p in /dev /proc /sys; do stat -f -c "$p %T" $p 2>/dev/null || grep " $p " /proc/mounts; done
						for f in /dev/null /dev/zero /dev/tty; do test -c $f || echo "$f is no device"; done; test -d /proc/1/fd && test -e /proc/self/stat || echo no proc
						grep -c . /proc/self/mountinfo >/dev/null; cat /proc/mounts`
					got, err := s.TryExec(t.Context(), api.ExecRequest{Argv: []string{"/bin/sh", "-c", look}, Cwd: "/"})
					switch {
					case err != nil:
						t.Errorf("%s: exec: %v", profile, err)
					case strings.Contains(got.Stdout, "is no device") || strings.Contains(got.Stdout, "no proc"):
						t.Errorf("%s: %s", profile, got.Stdout)
					}
					for _, mount := range []string{"tmpfs /dev tmpfs", "proc /proc proc", "sysfs /sys sysfs", "devpts /dev/pts devpts"} {
						if err == nil && !strings.Contains(got.Stdout, mount) {
							t.Errorf("%s: no %q in\n%s", profile, mount, got.Stdout)
						}
					}
					// And the working directory is inside, wherever the image's link says it is (CVE-2024-21626).
					inside, err := s.TryExec(t.Context(), api.ExecRequest{Argv: []string{"/bin/sh", "-c", "/bin/pwd; ls; cat secret; echo x >made; cat ../../../../../../.." + dir + "/secret"}})
					if err == nil && strings.Contains(inside.Stdout, "of the host") {
						t.Errorf("%s: the working directory is the host's: %s", profile, inside.Stdout)
					}
					s.Delete(t)
				}
				untouched(t, dir)
			})
		}
	}
	// Control: an image without such links starts, and its sandbox works.
	ref := pulled(t, d, r, base, "plain", v1.Config{})
	if got := d.Create(t, api.CreateSandbox{Image: ref}).Sh(t, "cat /proc/mounts"); !strings.Contains(got, "devpts /dev/pts devpts") {
		t.Errorf("control: %s", got)
	}
	untouched(t, dir)
}

// Devices, setuid and setgid programs and programs with capabilities that an image brings, or that
// the sandbox's root makes: none gives a program anything.
func TestSetuidAndDevicesOfImagesHaveNoEffect(t *testing.T) {
	testenv.RequireUserNS(t)
	r := harness.DebianRegistry(t, false)
	d := harness.Start(t, harness.Options{})
	single := d.System(t).Enforced.IDs == "single"
	program, err := os.ReadFile(harness.Helper(t, "attacker"))
	if err != nil {
		t.Fatal(err)
	}
	ref := pulled(t, d, r, busybox(t), "setuid", v1.Config{},
		harness.File{Name: "bin/ids", Body: string(program), Mode: 0o755},
		harness.File{Name: "bin/setuid", Body: string(program), Mode: 0o4755},
		harness.File{Name: "bin/setgid", Body: string(program), Mode: 0o2755},
		harness.File{Name: "bin/capable", Body: string(program), Mode: 0o755, Attrs: map[string]string{"security.capability": everyCapability}},
		harness.File{Name: "null", Type: tar.TypeChar, Mode: 0o666},
		harness.File{Name: "disk", Type: tar.TypeBlock, Mode: 0o666},
	)
	for _, profile := range profiles(t, d) {
		t.Run(profile, func(t *testing.T) {
			s := d.Create(t, api.CreateSandbox{Image: ref, Profile: profile})
			user := "1000"
			if profile == "hardened" || single {
				user = "" // there is one
			}
			run := func(command, as string) string {
				t.Helper()
				got := s.Exec(t, api.ExecRequest{Argv: []string{"/bin/sh", "-c", command}, User: as})
				return strings.TrimSpace(got.Stdout + got.Stderr)
			}
			want := run("/bin/ids attack ids", user)
			if !strings.Contains(want, "uid") {
				t.Fatalf("control: %q", want)
			}
			if got := run("stat -c %a /bin/setuid /bin/setgid", ""); got != "4755\n2755" {
				t.Errorf("control: the image's programs have modes %q", got)
			}
			for _, file := range []string{"setuid", "setgid", "capable"} {
				if got := run("/bin/"+file+" attack ids", user); got != want {
					t.Errorf("/bin/%s: %s\nwithout its bits: %s", file, got, want)
				}
			}
			for _, made := range []string{"/tmp/setuid", "/dev/shm/setuid"} {
				// Control: the bits can be set, and are there.
				if got := run("cp /bin/ids "+made+" && chmod 6755 "+made+" && stat -c %a "+made, ""); made == "/tmp/setuid" && got != "6755" {
					t.Fatalf("control: %s has mode %q", made, got)
				}
				if got := run(made+" attack ids", user); got != want && !strings.Contains(strings.ToLower(got), "denied") {
					t.Errorf("%s, made inside: %s\nwithout its bits: %s", made, got, want)
				}
			}
			for _, device := range []string{"/null", "/disk"} {
				if got := run("cat "+device, ""); !strings.Contains(got, "No such") && !strings.Contains(got, "denied") && !strings.Contains(got, "not permitted") {
					t.Errorf("the image's device %s can be opened: %q", device, got)
				}
			}
		})
	}
	// That the bits of such a program mean something where nothing holds it is the control of attacks
	// exec-setuid, exec-setgid and exec-file-capability; here, that the image does have them where
	// they are kept.
}

// everyCapability is the extended attribute of a program that has them all, permitted and
// effective (VFS_CAP_REVISION_2).
var everyCapability = string(bytes.Join([][]byte{{1, 0, 0, 2}, {255, 255, 255, 255}, {0, 0, 0, 0}, {255, 1, 0, 0}, {0, 0, 0, 0}}, nil))
