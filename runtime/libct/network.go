package libct

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/opencontainers/runc/libcontainer/configs"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/launcher"
	"github.com/sandboxd/sandboxd/netns"
	"github.com/sandboxd/sandboxd/runtime"
)

// A sandbox with a network joins a namespace that the launcher's maker has made, and that belongs
// to the launcher's user namespace. So it cannot mount a sysfs of that namespace: Init attaches one
// that the launcher has mounted. Init also puts files over /etc/resolv.conf and /etc/hosts. They
// lie beside the sandbox's upper directory, so that no commit, snapshot or diff contains them.

// networkFile is a file of a sandbox with a network, and its place there.
type networkFile struct {
	File string `json:"file"`
	At   string `json:"at"` // a name in /etc
}

// networkFiles returns the files of a sandbox, and their contents. It is pure.
func networkFiles(dir, hostname string) (files []networkFile, contents []string) {
	resolv := "nameserver " + netns.Nameserver.String() + "\nsearch .\noptions edns0\n"
	hosts := "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
	if hostname != "" {
		hosts += netns.Address4.String() + "\t" + hostname + "\n" + netns.Address6.String() + "\t" + hostname + "\n"
	}
	return []networkFile{{filepath.Join(dir, "resolv.conf"), "resolv.conf"}, {filepath.Join(dir, "hosts"), "hosts"}}, []string{resolv, hosts}
}

// withNetwork changes the configuration of a sandbox that gets a network. Plan leaves the path of
// the namespace to joinNetwork, so that plans can be compared.
func withNetwork(c *configs.Config) {
	c.Networks = nil // there is a loopback interface with addresses
	c.Mounts = slices.DeleteFunc(c.Mounts, func(m *configs.Mount) bool { return m.Device == "sysfs" })
}

// joinNetwork names the namespace that libcontainer's child enters.
func joinNetwork(c *configs.Config, n *launcher.Network) {
	c.Namespaces.Add(configs.NEWNET, fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), n.NS()))
}

// takeNetwork takes a namespace for a sandbox, writes its files, and returns its sysfs.
func (e *Engine) takeNetwork(ctx context.Context, p *planned, dir string) (_ *launcher.Network, sysfs *os.File, err error) {
	n, err := e.networks.Take(ctx)
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			n.Close()
		}
	}()
	joinNetwork(p.config, n)
	ns, err := n.Namespace()
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = ns.Close() }() // copies
	if err := e.writeNetworkFiles(dir, p.spec.Hostname); err != nil {
		return nil, nil, err
	}
	if len(p.spec.Trust) > 0 {
		if err := e.writeTrust(dir, p.spec.Trust); err != nil {
			return nil, nil, err
		}
	}
	sysfs, err = netns.Sysfs(ns.NS)
	return n, sysfs, err
}

// writeNetworkFiles writes the files of a sandbox with a network. Of one that runs they are written
// in place: they are mounted there.
func (e *Engine) writeNetworkFiles(dir, hostname string) error {
	files, contents := networkFiles(dir, hostname)
	root := e.host.IDs[0].Outside
	for i, f := range files {
		if err := os.WriteFile(f.File, []byte(contents[i]), 0o644); err != nil { //nolint:gosec // G306: every user of the sandbox reads it
			return fmt.Errorf("write /etc/%s: %w", f.At, err)
		}
		if err := errors.Join(os.Lchown(f.File, root, root), os.Chmod(f.File, 0o644)); err != nil { //nolint:gosec // G302: as above
			return fmt.Errorf("write /etc/%s: %w", f.At, err)
		}
	}
	return nil
}

// attachNetwork attaches the sysfs and the files of a sandbox with a network, in Init.
func attachNetwork(plan *rootPlan) error {
	root, err := unix.Open(launcher.RootfsDir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open the root: %w", err)
	}
	defer unix.Close(root)
	sys, err := rootDir(root, "sys")
	if err != nil {
		return err
	}
	defer unix.Close(sys)
	if err := unix.MoveMount(plan.Sysfs, "", sys, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH); err != nil {
		return fmt.Errorf("attach sysfs: %w", err)
	}
	if err := plug(plan.Sysfs); err != nil {
		return err
	}
	etc, err := rootDir(root, "etc")
	if err != nil {
		return err
	}
	defer unix.Close(etc)
	for _, f := range plan.Files {
		if err := cover(etc, &f, plan.ReadOnly); err != nil {
			return err
		}
	}
	if plan.Trust == "" {
		return nil
	}
	return attachTrust(root, plan)
}

// rootDir opens a directory of the image's root, and makes it if there is none. A link is followed
// as a program of the sandbox would follow it.
func rootDir(root int, name string) (int, error) {
	if err := unix.Mkdirat(root, name, 0o755); err != nil && !errors.Is(err, unix.EEXIST) {
		return -1, fmt.Errorf("make /%s: %w", name, err)
	}
	fd, err := unix.Openat2(root, name, &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return -1, fmt.Errorf("open /%s of the image: %w: %w", name, err, runtime.ErrRootfs)
	}
	return fd, nil
}

// cover mounts a file over a name in /etc, whatever is there: a link of the image is covered, not
// followed.
func cover(etc int, f *networkFile, readOnly bool) error {
	fd, err := unix.Openat(etc, f.At, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o644)
	if err == nil {
		err = unix.Close(fd)
	}
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("make /etc/%s: %w", f.At, err)
	}
	at, err := unix.Openat(etc, f.At, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open /etc/%s: %w", f.At, err)
	}
	defer unix.Close(at)
	var st unix.Stat_t
	if err := unix.Fstat(at, &st); err != nil {
		return fmt.Errorf("open /etc/%s: %w", f.At, err)
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return fmt.Errorf("/etc/%s of the image is a directory: %w", f.At, runtime.ErrRootfs)
	}
	if err := mountFile(f.File, at, readOnly); err != nil {
		return fmt.Errorf("mount /etc/%s: %w", f.At, err)
	}
	return nil
}

// mountFile mounts a file over another one.
func mountFile(file string, at int, readOnly bool) error {
	tree, err := unix.OpenTree(unix.AT_FDCWD, file, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return fmt.Errorf("copy mount: %w", err)
	}
	defer unix.Close(tree)
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC}
	if readOnly {
		attr.Attr_set |= unix.MOUNT_ATTR_RDONLY
	}
	if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return fmt.Errorf("restrict mount: %w", err)
	}
	return unix.MoveMount(tree, "", at, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
}

// networkOf returns copies of the descriptors of a running sandbox's network.
func (e *Engine) networkOf(ctx context.Context, id string) (*netns.Namespace, error) {
	in, err := e.find(ctx, id)
	if err != nil {
		return nil, err
	}
	if in.hasEnded() {
		return nil, fmt.Errorf("sandbox %s: it has ended: %w", id, runtime.ErrNotFound)
	}
	if in.network == nil {
		return nil, fmt.Errorf("sandbox %s: %w", id, runtime.ErrNoNetwork)
	}
	ns, err := in.network.Namespace()
	if err != nil {
		return nil, fmt.Errorf("sandbox %s: %w", id, err)
	}
	return ns, nil
}

// NetworkSockets implements [runtime.Networker].
func (e *Engine) NetworkSockets(ctx context.Context, id string) (*runtime.NetworkSockets, error) {
	ns, err := e.networkOf(ctx, id)
	if err != nil {
		return nil, err
	}
	return &runtime.NetworkSockets{Stream: ns.Stream, DNS: ns.DNS, DNSTCP: ns.DNSTCP}, ns.NS.Close()
}

// NetworkSocket implements [runtime.Networker].
func (e *Engine) NetworkSocket(ctx context.Context, id, network string) (*os.File, error) {
	ns, err := e.networkOf(ctx, id)
	if err != nil {
		return nil, err
	}
	defer func() { _ = ns.Close() }() // copies
	f, err := netns.Socket(ns.NS, network)
	if err != nil {
		return nil, fmt.Errorf("sandbox %s: %w", id, err)
	}
	return f, nil
}
