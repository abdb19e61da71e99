package performance

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/sandboxd/sandboxd/internal/rootfs"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// A peer is a program of the distribution that starts one program apart from the host and ends
// with it. All show it the host image's directories read-only and no network, and run `echo x`.
type peer struct {
	name    string
	command func(ctx context.Context, n int) *exec.Cmd // of the n-th run
}

// peers are the sides of those that run here. One that does not is said in the output, with its
// own words.
func peers(b *testing.B, all ...peer) []side {
	b.Helper()
	var sides []side
	for _, p := range all {
		n := 0
		once := func() error {
			n++
			cmd := p.command(b.Context(), n)
			var stdout, stderr bytes.Buffer
			cmd.Stdout, cmd.Stderr = &stdout, &stderr
			if err := cmd.Run(); err != nil {
				// runc 1.1 seals a copy of itself at each start, and now and then loses a race for it.
				if strings.Contains(stderr.String(), "cloned binary: Device or resource busy") {
					return errAgain
				}
				if said := bytes.TrimSpace(stderr.Bytes()); len(said) > 0 {
					err = fmt.Errorf("%w: %s", err, said)
				}
				return err
			}
			if stdout.String() != "x\n" {
				return fmt.Errorf("it printed %q", &stdout)
			}
			return nil
		}
		if err := once(); err != nil {
			b.Logf("peer %s does not run here: %v", p.name, err)
			continue
		}
		sides = append(sides, side{name: p.name, run: once})
	}
	return sides
}

func runcPeer(bundle string) peer { return ociPeer("runc", bundle) }

func crunPeer(bundle string) peer { return ociPeer("crun", bundle) }

func ociPeer(name, bundle string) peer {
	return peer{name, func(ctx context.Context, n int) *exec.Cmd {
		return exec.CommandContext(ctx, name, "--root", filepath.Join(bundle, name), "run", "--bundle", bundle, fmt.Sprintf("bench%d", n))
	}}
}

// bwrapPeer has namespaces and mounts, but neither a filter nor a limit nor a daemon for a second
// program.
func bwrapPeer(b *testing.B) peer {
	b.Helper()
	args := []string{"--unshare-all"}
	for _, d := range hostDirs(b) {
		if d.link != "" {
			args = append(args, "--symlink", d.link, d.path)
		} else {
			args = append(args, "--ro-bind", d.path, d.path)
		}
	}
	args = append(args, "/bin/echo", "x")
	return peer{"bwrap", func(ctx context.Context, _ int) *exec.Cmd { return exec.CommandContext(ctx, "bwrap", args...) }}
}

// podmanPeer runs by runc, because Debian's crun refuses hosts with both versions of cgroups.
func podmanPeer(b *testing.B) peer {
	b.Helper()
	root := b.TempDir()
	var volumes []string
	for _, d := range hostDirs(b) {
		if d.link == "" {
			volumes = append(volumes, "--volume", d.path+":"+d.path+":ro")
		} else if err := os.Symlink(d.link, filepath.Join(root, d.path)); err != nil {
			b.Fatal(err)
		}
	}
	env, _, _ := harness.Podman(b)
	args := append([]string{"--runtime", "runc", "--cgroup-manager", "cgroupfs", "run", "--rm", "--network", "none"}, volumes...)
	args = append(args, "--rootfs", root, "/bin/echo", "x")
	return peer{"podman", func(ctx context.Context, _ int) *exec.Cmd {
		cmd := exec.CommandContext(ctx, "podman", args...)
		cmd.Env = env
		return cmd
	}}
}

type hostDir struct {
	path string
	link string // its target, where it is a link
}

// hostDirs are those of the host image that this host has.
func hostDirs(b *testing.B) []hostDir {
	b.Helper()
	var dirs []hostDir
	for _, dir := range rootfs.HostDirs {
		info, err := os.Lstat(dir)
		if err != nil {
			continue
		}
		d := hostDir{path: dir}
		if info.Mode()&os.ModeSymlink != 0 {
			if d.link, err = os.Readlink(dir); err != nil {
				b.Fatal(err)
			}
		}
		dirs = append(dirs, d)
	}
	return dirs
}

// ociBundle is the host image as a bundle: the host's directories read-only on a small root.
func ociBundle(b *testing.B, runc string) string {
	b.Helper()
	bundle := b.TempDir()
	args := []string{"spec", "--bundle", bundle, "--rootless"}
	if out, err := exec.CommandContext(b.Context(), runc, args...).CombinedOutput(); err != nil {
		b.Fatalf("runc spec: %v: %s", err, out)
	}
	file := filepath.Join(bundle, "config.json")
	data, err := os.ReadFile(file)
	if err != nil {
		b.Fatal(err)
	}
	var spec specs.Spec
	if err := json.Unmarshal(data, &spec); err != nil {
		b.Fatal(err)
	}
	root := filepath.Join(bundle, "rootfs")
	if err := os.Mkdir(root, 0o755); err != nil {
		b.Fatal(err)
	}
	for _, d := range hostDirs(b) {
		if d.link != "" {
			if err := os.Symlink(d.link, filepath.Join(root, d.path)); err != nil {
				b.Fatal(err)
			}
			continue
		}
		spec.Mounts = append(spec.Mounts, specs.Mount{Destination: d.path, Source: d.path, Type: "none", Options: []string{"rbind", "ro", "nosuid", "nodev"}})
	}
	// No network either.
	spec.Linux.Namespaces = append(spec.Linux.Namespaces, specs.LinuxNamespace{Type: specs.NetworkNamespace})
	spec.Process.Terminal = false
	spec.Process.Args = []string{"/bin/echo", "x"}
	data, err = json.Marshal(spec)
	if err != nil {
		b.Fatal(err)
	}
	if err := os.WriteFile(file, data, 0o600); err != nil {
		b.Fatal(err)
	}
	return bundle
}
