package harness

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/rootfs"
)

// Podman makes directories of its own for a rootless podman, a peer, and returns the environment
// to run it in. With the test they are removed, and the process that podman leaves to hold its
// user namespace is ended.
func Podman(t testing.TB) (env []string, home, run string) {
	t.Helper()
	home = t.TempDir()
	// podman allows 50 characters, in a directory that every user may write.
	run, err := os.MkdirTemp("/tmp", "bench") //nolint:usetesting // see above
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		defer func() {
			// Of subordinate ids, so that TempDir cannot do it.
			if err := errors.Join(RemoveAll(home), RemoveAll(run)); err != nil {
				t.Error(err)
			}
		}()
		// It is ours, as the run directory is.
		data, err := os.ReadFile(filepath.Join(run, "libpod", "tmp", "pause.pid"))
		if err != nil {
			return
		}
		if pid, err := strconv.Atoi(strings.TrimSpace(string(data))); err == nil {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
	})
	return []string{"PATH=" + os.Getenv("PATH"), "HOME=" + home, "XDG_RUNTIME_DIR=" + run, "TMPDIR=" + home}, home, run
}

// PodmanOnHost is a podman whose containers have the host image's directories, read-only, and no
// network.
type PodmanOnHost struct {
	env, args []string
}

// PodmanHost makes one. It runs by runc, because Debian's crun refuses hosts with both versions of
// cgroups.
func PodmanHost(t testing.TB) *PodmanOnHost {
	t.Helper()
	root := t.TempDir()
	p := &PodmanOnHost{args: []string{"run", "--rm", "--network", "none"}}
	for _, d := range HostDirs(t) {
		if d.Link == "" {
			p.args = append(p.args, "--volume", d.Path+":"+d.Path+":ro")
		} else if err := os.Symlink(d.Link, filepath.Join(root, d.Path)); err != nil {
			t.Fatal(err)
		}
	}
	p.args = append(p.args, "--rootfs", root)
	p.env, _, _ = Podman(t)
	return p
}

// Run returns the command that runs a program in a container of its own, with these flags.
func (p *PodmanOnHost) Run(ctx context.Context, flags []string, argv ...string) *exec.Cmd {
	return p.Command(ctx, slices.Concat(p.args[:1], flags, p.args[1:], argv)...)
}

// Command returns the command for a verb of podman.
func (p *PodmanOnHost) Command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "podman", append([]string{"--runtime", "runc", "--cgroup-manager", "cgroupfs"}, args...)...)
	cmd.Env = p.env
	return cmd
}

// A HostDir is a directory of the host image that this host has.
type HostDir struct {
	Path string
	Link string // its target, where it is a link
}

// HostDirs are those of the host image that this host has.
func HostDirs(t testing.TB) []HostDir {
	t.Helper()
	var dirs []HostDir
	for _, dir := range rootfs.HostDirs {
		info, err := os.Lstat(dir)
		if err != nil {
			continue
		}
		d := HostDir{Path: dir}
		if info.Mode()&os.ModeSymlink != 0 {
			if d.Link, err = os.Readlink(dir); err != nil {
				t.Fatal(err)
			}
		}
		dirs = append(dirs, d)
	}
	return dirs
}
