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
)

// Debs is the directory of the Debian packages that tests read, or run programs of, without
// installing them. The lanes have laid them for whoever runs the tests; a plain `go test` fetches
// those that are not there yet.
func Debs(t testing.TB) string {
	t.Helper()
	if dir := os.Getenv("SANDBOXD_TEST_DEBS"); dir != "" {
		return dir
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(cache, "sandboxd-tests", "debs")
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

// Docker starts a Docker daemon, a peer, which needs root, and returns a function that runs its
// command line. It is never installed, and has mounts, a network, processes and directories of its
// own; of the host's cgroups and security modules it can change nothing, so it stores images and
// runs no containers. It ends with the test.
func Docker(t testing.TB) func(args ...string) string {
	t.Helper()
	unshare := testenv.RequirePeer(t, "unshare")
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
	for _, name := range []string{"containerd", "docker.io"} {
		if out, err := exec.CommandContext(t.Context(), "dpkg-deb", "--extract", Deb(t, name), dir).CombinedOutput(); err != nil {
			t.Fatalf("unpack %s: %v: %s", name, err, out)
		}
	}
	config := filepath.Join(dir, "daemon.json")
	if err := os.WriteFile(config, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	bin, socket := filepath.Join(dir, "usr", "bin"), "unix://"+filepath.Join(dir, "docker.sock")
	env := []string{"PATH=" + bin + ":" + filepath.Join(dir, "usr", "sbin") + ":" + os.Getenv("PATH"), "HOME=" + dir, "DOCKER_HOST=" + socket, "TMPDIR=" + dir}
	const script = `set -e
		for m in $(awk '$5 ~ "^/sys/fs/cgroup" { print $5 }' /proc/self/mountinfo); do mount -o remount,bind,ro "$m"; done
		for m in /sys/kernel/security /run; do [ ! -d "$m" ] || mount -t tmpfs tmpfs "$m"; done
		exec dockerd --config-file="$1/daemon.json" --data-root="$1/data" --exec-root="$1/exec" --pidfile="$1/pid" --host="unix://$1/docker.sock" \
			--storage-driver=overlay2 --bridge=none --iptables=false --ip6tables=false --ip-forward=false --ip-masq=false --userland-proxy=false`
	daemon := exec.Command(unshare, "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private", "sh", "-c", script, "sh", dir)
	daemon.Env = env
	log := &logBuffer{}
	daemon.Stdout, daemon.Stderr = log, log
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
	})
	run := func(ctx context.Context, args ...string) (string, error) {
		cmd := exec.CommandContext(ctx, filepath.Join(bin, "docker"), args...)
		cmd.Env = env
		var said strings.Builder
		cmd.Stderr = &said
		out, err := cmd.Output()
		if err != nil {
			err = fmt.Errorf("docker %s: %w: %s", strings.Join(args, " "), err, &said)
		}
		return string(out), err
	}
	Eventually(t, func() error {
		select {
		case err := <-ended:
			ended <- err
			t.Fatalf("dockerd has ended: %v\n%s", err, log)
		default:
		}
		_, err := run(t.Context(), "version")
		return err
	})
	return func(args ...string) string {
		t.Helper()
		out, err := run(t.Context(), args...)
		if err != nil {
			t.Fatalf("%v\n%s", err, log)
		}
		return out
	}
}
