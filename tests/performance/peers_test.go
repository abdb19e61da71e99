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
	for _, d := range harness.HostDirs(b) {
		if d.Link != "" {
			args = append(args, "--symlink", d.Link, d.Path)
		} else {
			args = append(args, "--ro-bind", d.Path, d.Path)
		}
	}
	args = append(args, "/bin/echo", "x")
	return peer{"bwrap", func(ctx context.Context, _ int) *exec.Cmd { return exec.CommandContext(ctx, "bwrap", args...) }}
}

func podmanPeer(b *testing.B) peer {
	b.Helper()
	podman := harness.PodmanHost(b)
	return peer{"podman", func(ctx context.Context, _ int) *exec.Cmd { return podman.Run(ctx, nil, "/bin/echo", "x") }}
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
	for _, d := range harness.HostDirs(b) {
		if d.Link != "" {
			if err := os.Symlink(d.Link, filepath.Join(root, d.Path)); err != nil {
				b.Fatal(err)
			}
			continue
		}
		spec.Mounts = append(spec.Mounts, specs.Mount{Destination: d.Path, Source: d.Path, Type: "none", Options: []string{"rbind", "ro", "nosuid", "nodev"}})
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
