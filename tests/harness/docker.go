package harness

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/testtree"
)

// Debs is the directory of the Debian packages that tests read, or run programs of, without
// installing them. The lanes have laid them for whoever runs the tests; a plain `go test` fetches
// those that are not there yet.
func Debs(t testing.TB) string {
	t.Helper()
	if dir := os.Getenv("SANDBOXD_TEST_DEBS"); dir != "" {
		return dir
	}
	dir, unlock, err := testtree.Kept(t.Context(), "debs")
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	if out, err := exec.CommandContext(t.Context(), filepath.Join(Root(t), "hack", "debs.sh"), dir).CombinedOutput(); err != nil {
		t.Fatalf("fetch packages: %v\n%s", err, out)
	}
	return dir
}

// Deb is the file of one of them.
func Deb(t testing.TB, name string) string {
	t.Helper()
	dir := Debs(t)
	found, err := filepath.Glob(filepath.Join(dir, name+"_*.deb"))
	if err != nil || len(found) == 0 {
		t.Fatalf("package %s: there is no file of it in %s (%v)", name, dir, err)
	}
	return found[len(found)-1]
}

// Unpacked is the directory in which the packages of tests/functional and tests/docker are
// unpacked. It serves all tests, and none changes it.
func Unpacked(t testing.TB) string {
	t.Helper()
	return filepath.Join(Debs(t), "unpacked")
}

// Dockerd is a Docker daemon of Debian's packages, a peer.
type Dockerd struct {
	Socket string
	CLI    string // path of its command line

	env []string
	log *logBuffer
}

// Docker starts a Docker daemon, which needs root. It is never installed, and has mounts, a
// network, processes and directories of its own. It sees a host with cgroup v2 alone, whose root is
// a cgroup of its own: hierarchies of version 1 are not changed. It ends with the test.
func Docker(t testing.TB) *Dockerd {
	t.Helper()
	unshare, busybox := testenv.RequirePeer(t, "unshare"), testenv.RequirePeer(t, "busybox")
	testenv.RequirePeer(t, "runc")
	// Not t.TempDir: a socket's path has 108 bytes.
	dir, err := os.MkdirTemp("", "docker") //nolint:usetesting // see above
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	config := filepath.Join(dir, "daemon.json")
	if err := os.WriteFile(config, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	usr := filepath.Join(Unpacked(t), "usr")
	bin := filepath.Join(usr, "bin")
	d := &Dockerd{Socket: filepath.Join(dir, "docker.sock"), CLI: filepath.Join(bin, "docker"), log: &logBuffer{}}
	d.env = []string{
		"PATH=" + bin + ":" + filepath.Join(usr, "sbin") + ":" + os.Getenv("PATH") + ":/usr/sbin:/sbin",
		"HOME=" + dir, "DOCKER_HOST=unix://" + d.Socket, "TMPDIR=" + dir,
		"GOGC=400", // dockerd starts itself for many steps of a container, and collects garbage in each start
	}
	// The daemon is in a cgroup below its root, because a cgroup with processes gives no controllers
	// to others.
	const script = `set -e
		mkdir "$1/cgroup"
		mount -t cgroup2 cgroup2 "$1/cgroup"
		mkdir "$1/cgroup/$2"
		echo $$ >"$1/cgroup/$2/cgroup.procs"
		exec "$3" --cgroup sh -ec '
			umount "$1/cgroup"
			! [ -d /sys/fs/cgroup ] || ! grep -q " /sys/fs/cgroup " /proc/self/mountinfo || umount -R -l /sys/fs/cgroup
			mount -t cgroup2 cgroup2 /sys/fs/cgroup
			mkdir /sys/fs/cgroup/daemon
			echo $$ >/sys/fs/cgroup/daemon/cgroup.procs
			for m in /sys/kernel/security /run; do [ ! -d "$m" ] || mount -t tmpfs tmpfs "$m"; done
			"$4" ip link set lo up
			exec dockerd --config-file="$1/daemon.json" --data-root="$1/data" --exec-root="$1/exec" --pidfile="$1/pid" --host="unix://$1/docker.sock" \
				--storage-driver=overlay2 --exec-opt=native.cgroupdriver=cgroupfs --iptables=false --ip6tables=false' sh "$@"`
	cgroup := filepath.Base(dir)
	daemon := exec.Command(unshare, "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private",
		"sh", "-c", script, "sh", dir, cgroup, unshare, busybox)
	daemon.Env = d.env
	daemon.Stdout, daemon.Stderr = d.log, d.log
	daemon.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	if err := daemon.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- daemon.Wait() }()
	t.Cleanup(func() {
		_ = daemon.Process.Kill() // and with it the first process of the namespace, which ends all others
		if err := <-ended; err == nil {
			t.Error("dockerd had ended before it was killed")
		}
		const remove = `mount -t cgroup2 cgroup2 "$1/cgroup" && { [ ! -d "$1/cgroup/$2" ] || find "$1/cgroup/$2" -depth -type d -exec rmdir {} +; }`
		Eventually(t, func() error { // until the last process has ended
			out, err := exec.Command(unshare, "--mount", "sh", "-c", remove, "sh", dir, cgroup).CombinedOutput()
			if err != nil {
				return fmt.Errorf("remove the cgroup of dockerd: %w: %s", err, out)
			}
			return nil
		})
	})
	Eventually(t, func() error {
		select {
		case err := <-ended:
			ended <- err
			t.Fatalf("dockerd has ended: %v\n%s", err, d.log)
		default:
		}
		_, err := d.run(t.Context(), "version")
		return err
	})
	return d
}

func (d *Dockerd) run(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, d.CLI, args...)
	cmd.Env = d.env
	var said strings.Builder
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("docker %s: %w: %s", strings.Join(args, " "), err, &said)
	}
	return string(out), err
}

// Run runs the daemon's command line, which must succeed, and returns its output.
func (d *Dockerd) Run(t testing.TB, args ...string) string {
	t.Helper()
	out, err := d.run(t.Context(), args...)
	if err != nil {
		t.Fatalf("%v\n%s", err, d.log)
	}
	return out
}
