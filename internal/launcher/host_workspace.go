package launcher

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/idmap"
	"github.com/sandboxd/sandboxd/internal/memfd"
	"github.com/sandboxd/sandboxd/internal/unixmsg"
	"github.com/sandboxd/sandboxd/runtime"
)

// WorkspaceMount names the directory of a workspace and the ids that its files are seen with.
type WorkspaceMount struct {
	Source string `json:"source"`
	Device uint64 `json:"device"`
	Inode  uint64 `json:"inode"`
	// Range, UID and GID are of the sandbox and of its programs. They matter only where ids are
	// mapped.
	Range int `json:"range"`
	UID   int `json:"uid"`
	GID   int `json:"gid"`
}

// workspaceFlags hold on the mount of a workspace: nothing of the host is changed through it, and
// no file in it has an effect. The overlay above it has flags of its own.
const workspaceFlags = unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOSYMFOLLOW

// MountWorkspace returns a read-only mount of a workspace's directory, attached nowhere. As root of
// the host its ids are mapped: the directory's owner becomes the user of the programs. An ordinary
// user's mount shows the owners as they are.
//
// Mounts below the directory are not in it. A directory in the daemon's own, or one that contains
// them, is runtime.ErrMount: it holds what one sandbox must not read of another.
func MountWorkspace(ctx context.Context, o Options, w WorkspaceMount) (*os.File, error) {
	dir, st, err := openWorkspace(&w)
	if err != nil {
		return nil, err
	}
	defer dir.Close() // only a handle
	if err := o.Mounts.Apart(w.Source, dir, true); err != nil {
		return nil, err
	}
	if o.IDs.Method != idmap.Direct {
		return workspaceOfChild(ctx, &w) // which opens the same inode
	}
	uid, err := o.IDs.WorkspaceMap(o.IDs.UID, int(st.Uid), w.UID, w.Range)
	if err != nil {
		return nil, fmt.Errorf("mount workspace: %w", err)
	}
	gid, err := o.IDs.WorkspaceMap(o.IDs.GID, int(st.Gid), w.GID, w.Range)
	if err != nil {
		return nil, fmt.Errorf("mount workspace: %w", err)
	}
	ns, err := idmap.Namespace(uid, gid)
	if err != nil {
		return nil, fmt.Errorf("mount workspace: %w", err)
	}
	defer ns.Close() // only a handle
	m, err := idmap.CloneMount(dir, ns, workspaceFlags)
	if err != nil {
		return nil, fmt.Errorf("mount workspace: %w: %w", err, runtime.ErrUnenforceable)
	}
	return m, nil
}

// openWorkspace opens the directory without following a link, and checks that it is the one that
// was meant.
func openWorkspace(w *WorkspaceMount) (*os.File, *unix.Stat_t, error) {
	if !filepath.IsAbs(w.Source) || filepath.Clean(w.Source) != w.Source || w.Source == "/" {
		return nil, nil, fmt.Errorf("workspace %q: not the shortest absolute path of a directory", w.Source)
	}
	fd, err := unix.Openat2(unix.AT_FDCWD, w.Source, &unix.OpenHow{
		Flags: unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return nil, nil, fmt.Errorf("open workspace %s: %w", w.Source, err)
	}
	dir := os.NewFile(uintptr(fd), w.Source)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, nil, errors.Join(fmt.Errorf("open workspace %s: %w", w.Source, err), dir.Close())
	}
	if st.Dev != w.Device || st.Ino != w.Inode {
		return nil, nil, errors.Join(fmt.Errorf("workspace %s: another directory is there now", w.Source), dir.Close())
	}
	return dir, &st, nil
}

// WorkspaceArgs are the arguments of the daemon's program as the child that makes the mount of a
// workspace for an ordinary user.
var WorkspaceArgs = []string{"broker", "mount-workspace"}

// workspaceOfChild has a child make the mount: only root of a user namespace may copy one, and only
// in a mount namespace of its own. The child opens the directory anew there, because mounts of this
// namespace cannot be copied in that one.
func workspaceOfChild(ctx context.Context, w *WorkspaceMount) (*os.File, error) {
	ours, theirs, err := unixmsg.Pair(unix.SOCK_SEQPACKET, "workspace")
	if err != nil {
		return nil, err
	}
	defer ours.Close()
	job, err := json.Marshal(w)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("encode workspace: %w", err), theirs.Close())
	}
	cmd := exec.CommandContext(ctx, "/proc/self/exe", WorkspaceArgs...)
	cmd.Env, cmd.Dir = []string{}, "/"
	cmd.Stdin = bytes.NewReader(job)
	cmd.ExtraFiles = []*os.File{theirs}
	var said bytes.Buffer
	cmd.Stderr = &said
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}},
		Setsid:      true,
	}
	err = cmd.Run()
	_ = theirs.Close() // the child had a copy
	if err != nil {
		return nil, fmt.Errorf("mount workspace: %w: %s", err, bytes.TrimSpace(said.Bytes()))
	}
	oob := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := unix.Recvmsg(int(ours.Fd()), make([]byte, 1), oob, unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("receive the mount of the workspace: %w", err)
	}
	messages, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil || len(messages) != 1 {
		return nil, fmt.Errorf("receive the mount of the workspace: %d messages: %w", len(messages), err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return nil, fmt.Errorf("receive the mount of the workspace: %d descriptors: %w", len(fds), err)
	}
	return os.NewFile(uintptr(fds[0]), w.Source), nil
}

// WorkspaceMain is the child of [MountWorkspace]. It reads a [WorkspaceMount] and sends the mount
// through descriptor 3.
func WorkspaceMain(in io.Reader, complaints io.Writer) (code int) {
	if err := workspaceChild(in); err != nil {
		_, _ = fmt.Fprintln(complaints, err) // nothing is left to report it to
		return 1
	}
	return 0
}

func workspaceChild(in io.Reader) error {
	var w WorkspaceMount
	if err := json.NewDecoder(io.LimitReader(in, 64<<10)).Decode(&w); err != nil {
		return fmt.Errorf("decode: %w", err)
	}
	dir, st, err := openWorkspace(&w)
	if err != nil {
		return err
	}
	defer dir.Close() // only a handle
	if st.Uid != 0 {  // of this namespace
		return fmt.Errorf("workspace %s belongs to another user: only a daemon of root can show it as the programs' own", w.Source)
	}
	// All mounts below come along: the kernel does not let an ordinary user uncover what they hide.
	fd, err := unix.OpenTree(int(dir.Fd()), "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH|unix.AT_RECURSIVE)
	if err != nil {
		return fmt.Errorf("copy mount of %s: %w", w.Source, err)
	}
	attr := unix.MountAttr{Attr_set: workspaceFlags, Propagation: unix.MS_PRIVATE}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, &attr); err != nil {
		return fmt.Errorf("restrict mount of %s: %w", w.Source, err)
	}
	const fdAnswer = 3
	if err := unix.Sendmsg(fdAnswer, []byte{0}, unix.UnixRights(fd), nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL); err != nil {
		return fmt.Errorf("send the mount: %w", err)
	}
	return nil
}

// runWorkspace starts a sandbox with a workspace. The launcher says first which range it would run
// under, for which the mount is made. Another sandbox may have taken that range meanwhile: then the
// launcher names another.
func (c *Client) runWorkspace(ctx context.Context, req *request, launcher int, control *os.File) (*runtime.Started, error) {
	w := *req.Spec.Workspace
	req.Spec.Workspace = &w
	files := []*os.File{control}
	defer func() { closeAll(files[1:]) }()
	for {
		resp, got, err := c.call(ctx, req, files...)
		switch {
		case errors.Is(err, errWantsRange) && ctx.Err() == nil:
			if err := c.addRange(ctx, launcher, resp.Range); err != nil {
				return nil, err
			}
			launcher = c.started()
		case errors.Is(err, errWantsWorkspace) && ctx.Err() == nil:
			closeAll(files[1:])
			files = files[:1]
			w.Range, w.Sent, w.Mapped, w.Hides = resp.Range, true, c.opts.IDs.Method == idmap.Direct, len(w.Hidden) > 0
			mount, err := c.opts.MountWorkspace(ctx, WorkspaceMount{
				Source: w.Source, Device: w.Device, Inode: w.Inode, Range: w.Range, UID: w.UID, GID: w.GID,
			})
			if err != nil {
				return nil, err
			}
			files = append(files, mount)
			if w.Hides {
				hidden, err := hiddenFile(w.Hidden)
				if err != nil {
					return nil, fmt.Errorf("hidden files of the workspace: %w", err)
				}
				files = append(files, hidden)
			}
		default:
			return theStarted(req, resp, got, err)
		}
	}
}

// hiddenFile returns a file with the paths, each with a NUL at its end.
func hiddenFile(paths []string) (*os.File, error) {
	fd, err := unix.MemfdCreate("hidden", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("make memfd: %w", err)
	}
	f := os.NewFile(uintptr(fd), "hidden")
	if _, err := f.WriteString(strings.Join(paths, "\x00") + "\x00"); err != nil {
		return nil, errors.Join(fmt.Errorf("write memfd: %w", err), f.Close())
	}
	if err := memfd.Seal(f); err != nil {
		return nil, errors.Join(fmt.Errorf("seal memfd: %w", err), f.Close())
	}
	return f, nil
}
