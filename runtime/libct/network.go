package libct

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/opencontainers/runc/libcontainer/configs"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/launcher"
	"github.com/sandboxd/sandboxd/internal/osthread"
	"github.com/sandboxd/sandboxd/netns"
	"github.com/sandboxd/sandboxd/runtime"
)

// A sandbox with a network joins a namespace that the launcher's maker has made, and that belongs
// to the launcher's user namespace. So it cannot mount a sysfs of that namespace: Init attaches one
// that the launcher has mounted. Init also puts files over /etc/resolv.conf and /etc/hosts. They
// lie beside the sandbox's upper directory, so that no commit, snapshot or diff contains them. A
// sandbox without a network that has lines of its own for /etc/hosts has that file alone.
//
// A sandbox can join the namespace of another sandbox instead (runtime.Spec.Join), also where the
// other one has no network. The namespace then belongs to the user namespace of the launcher or of
// the other sandbox, and the joining sandbox has no power over it. The launcher holds nothing for
// it.

// networkFile is a file of a sandbox, and its place there.
type networkFile struct {
	File string `json:"file"`
	At   string `json:"at"` // a name in /etc
}

// etcFiles returns the files of a sandbox, and their contents: none without a network and lines of
// its own. names are the sandboxes that share its network, itself first. It is pure.
func etcFiles(dir string, spec *runtime.Spec, names ...string) (files []networkFile, contents []string) {
	if spec.Network {
		files = append(files, networkFile{filepath.Join(dir, "resolv.conf"), "resolv.conf"})
		contents = append(contents, "nameserver "+netns.Nameserver.String()+"\nsearch .\noptions edns0\n")
	} else if names = nil; len(spec.Hosts) == 0 {
		return nil, nil
	}
	var hosts strings.Builder
	hosts.WriteString("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n")
	for _, name := range names {
		if name != "" {
			fmt.Fprintf(&hosts, "%s\t%s\n%s\t%s\n", netns.Address4, name, netns.Address6, name)
		}
	}
	for _, h := range spec.Hosts {
		fmt.Fprintf(&hosts, "%s\t%s\n", h.Address, h.Name)
	}
	return append(files, networkFile{filepath.Join(dir, "hosts"), "hosts"}), append(contents, hosts.String())
}

// entersNetwork reports whether a sandbox enters an existing network namespace, instead of one that
// libcontainer makes for it.
func entersNetwork(spec *runtime.Spec) bool { return spec.Network || spec.Join != "" }

// withNetwork changes the configuration of a sandbox that enters a network namespace. Plan leaves
// the path of the namespace to joinNetwork, so that plans can be compared.
func withNetwork(c *configs.Config) {
	c.Networks = nil // there is a loopback interface with addresses
	c.Mounts = slices.DeleteFunc(c.Mounts, func(m *configs.Mount) bool { return m.Device == "sysfs" })
}

// joinNetwork names the namespace that libcontainer's child enters, by a descriptor of ours.
func joinNetwork(c *configs.Config, ns int) {
	c.Namespaces.Add(configs.NEWNET, fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), ns))
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
	joinNetwork(p.config, n.NS())
	ns, err := n.Namespace()
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = ns.Close() }() // copies
	sysfs, err = e.furnishNetwork(p.spec, dir, ns.NS, p.spec.Hostname)
	return n, sysfs, err
}

// shareNetwork opens the namespace of the sandbox that a spec joins, for libcontainer's child,
// writes the files of the joining sandbox, and returns its sysfs. It does not wait for a start that
// is under way: two sandboxes that join each other would wait forever.
func (e *Engine) shareNetwork(p *planned, dir string) (ns, sysfs *os.File, err error) {
	id := p.spec.Join
	defer func() {
		if err != nil {
			err = fmt.Errorf("share the network of sandbox %s: %w", id, err)
		}
	}()
	e.mu.Lock()
	owner := e.sandboxes[id]
	var hostname string
	var networked bool
	runs := owner != nil && owner.pidfd != nil && !owner.hasEnded()
	if runs {
		hostname, networked = owner.spec.Hostname, owner.spec.Network
	}
	e.mu.Unlock()
	switch {
	case !runs:
		return nil, nil, fmt.Errorf("it does not run: %w", runtime.ErrNoOwner)
	case networked != p.spec.Network:
		return nil, nil, fmt.Errorf("it has a network: %t, not %t", networked, p.spec.Network)
	}
	if ns, err = namespaceOf(owner.pidfd); err != nil {
		return nil, nil, err
	}
	joinNetwork(p.config, int(ns.Fd()))
	if sysfs, err = e.furnishNetwork(p.spec, dir, ns, p.spec.Hostname, hostname); err != nil {
		return nil, nil, errors.Join(err, ns.Close())
	}
	return ns, sysfs, nil
}

// namespaceOf returns the network namespace of a process.
func namespaceOf(pidfd *os.File) (ns *os.File, err error) {
	conn, err := pidfd.SyscallConn()
	if err != nil {
		return nil, err
	}
	err = osthread.Run(func() error {
		var enter error
		if err := conn.Control(func(fd uintptr) { enter = unix.Setns(int(fd), unix.CLONE_NEWNET) }); err != nil {
			return fmt.Errorf("it is deleted: %w", runtime.ErrNoOwner)
		}
		if errors.Is(enter, unix.ESRCH) {
			return fmt.Errorf("it has ended: %w", runtime.ErrNoOwner)
		}
		if enter != nil {
			return fmt.Errorf("enter its network namespace: %w", enter)
		}
		ns, err = os.Open("/proc/thread-self/ns/net")
		return err
	})
	return ns, err
}

// furnishNetwork writes the files that a sandbox in a network namespace has, and returns its sysfs.
func (e *Engine) furnishNetwork(spec *runtime.Spec, dir string, ns *os.File, names ...string) (*os.File, error) {
	if err := e.writeFiles(dir, spec, names...); err != nil {
		return nil, err
	}
	if len(spec.Trust) > 0 {
		if err := e.writeTrust(dir, spec.Trust); err != nil {
			return nil, err
		}
	}
	return netns.Sysfs(ns)
}

// writeFiles writes the files of a sandbox. Of one that runs they are written in place: they are
// mounted there.
func (e *Engine) writeFiles(dir string, spec *runtime.Spec, names ...string) error {
	files, contents := etcFiles(dir, spec, names...)
	root := e.host.IDs[0].Outside
	for i, f := range files {
		if err := os.WriteFile(f.File, []byte(contents[i]), 0o644); err != nil { //nolint:gosec // G306: every user of the sandbox reads it
			return fmt.Errorf("write /etc/%s: %w", f.At, err)
		}
		if err := errors.Join(os.Lchown(f.File, root, root), os.Chmod(f.File, 0o644)); err != nil { //nolint:gosec // G302: every user of the sandbox reads it
			return fmt.Errorf("write /etc/%s: %w", f.At, err)
		}
	}
	return nil
}

// attachNetwork attaches the sysfs of a sandbox that enters a network namespace, and the files of
// one that has any, in Init.
func attachNetwork(plan *rootPlan) error {
	root, err := unix.Open(launcher.RootfsDir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open the root: %w", err)
	}
	defer unix.Close(root)
	if plan.Sysfs != 0 {
		if err := attachSysfs(root, plan.Sysfs); err != nil {
			return err
		}
	}
	if len(plan.Files) == 0 { // the owner of its network has no way out
		return nil
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

func attachSysfs(root, sysfs int) error {
	sys, err := rootDir(root, "sys")
	if err != nil {
		return err
	}
	defer unix.Close(sys)
	if err := unix.MoveMount(sysfs, "", sys, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH); err != nil {
		return fmt.Errorf("attach sysfs: %w", err)
	}
	return plug(sysfs)
}

// openInRoot opens a name as a program of the sandbox would, links included, but for those of
// /proc. A rename anywhere on the host disturbs a bounded resolution: it is repeated then
// (openat2(2), EAGAIN).
func openInRoot(root int, name string, flags uint64) (fd int, err error) {
	how := unix.OpenHow{Flags: flags | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS}
	for range 1000 {
		if fd, err = unix.Openat2(root, name, &how); !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) {
			break
		}
	}
	return fd, err
}

// rootDir opens a directory of the image's root, and makes it if there is none. A link is followed
// as a program of the sandbox would follow it.
func rootDir(root int, name string) (int, error) {
	if err := unix.Mkdirat(root, name, 0o755); err != nil && !errors.Is(err, unix.EEXIST) {
		return -1, fmt.Errorf("make /%s: %w", name, err)
	}
	fd, err := openInRoot(root, name, unix.O_PATH|unix.O_DIRECTORY)
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
	sockets := &runtime.NetworkSockets{Stream: ns.Stream, DNS: ns.DNS, DNSTCP: ns.DNSTCP}
	if ns.Diag != nil {
		err = ns.Diag.Close()
	}
	return sockets, errors.Join(err, ns.NS.Close())
}

// NetworkSocket implements [runtime.Networker].
func (e *Engine) NetworkSocket(ctx context.Context, id, network string) (*os.File, error) {
	ns, err := e.networkOf(ctx, id)
	if err != nil {
		return nil, err
	}
	defer func() { _ = ns.Close() }() // copies
	if network == runtime.SocketDiag {
		f := ns.Diag
		if ns.Diag = nil; f == nil {
			return nil, fmt.Errorf("sandbox %s: the kernel does not tell of sockets: %w", id, runtime.ErrUnenforceable)
		}
		return f, nil
	}
	f, err := netns.Socket(ns.NS, network)
	if err != nil {
		return nil, fmt.Errorf("sandbox %s: %w", id, err)
	}
	return f, nil
}
