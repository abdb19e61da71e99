package libct

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/launcher"
	"github.com/sandboxd/sandboxd/runtime"
)

// A workspace is an overlay like the root's. Its lower directory is the host's, through a read-only
// mount that came with the spec; what programs write goes to a directory beside the root's upper
// one. Init attaches the mount in the sandbox's own mount namespace, mounts the overlay at the
// target and leaves the mount behind with the launcher's root.

// workspacePlan is the workspace's part of what Create tells Init.
type workspacePlan struct {
	Target string `json:"target"`
	FD     int    `json:"fd"` // of the mount
	Upper  string `json:"upper"`
	Work   string `json:"work"`
	// UID must be seen as the owner of the target.
	UID    int      `json:"uid"`
	Hidden []string `json:"hidden,omitempty"`
}

// enforceWorkspace plans how programs get to own the files of a workspace.
func enforceWorkspace(spec *runtime.Spec, e *api.Enforced) error {
	w := spec.Workspace
	switch {
	case w == nil || w.Mount == nil: // planned again with the mount
	case w.Mapped:
		e.Workspace = api.WorkspaceMapped
	case w.UID != 0:
		return fmt.Errorf("workspace: without root on the host its files belong to root of the sandbox or to no program, and these run as %d: give --user 0: %w",
			w.UID, runtime.ErrUnenforceable)
	default:
		e.Workspace = api.WorkspaceShared
	}
	return nil
}

// ownerSeen is the owner of the workspace's directory as programs see it.
func ownerSeen(w *runtime.Workspace, host *Host) int {
	if w.Mapped {
		return w.UID
	}
	for _, r := range host.IDs {
		if r.Outside == 0 { // the launcher's own id
			return r.Inside
		}
	}
	return -1
}

// prepareWorkspace makes the directories of the overlay, and plans it. It returns nil for a sandbox
// without a workspace. Fd is the number that the mount has in Init.
func (e *Engine) prepareWorkspace(dir string, p *planned, fd int) (*workspacePlan, error) {
	w := p.spec.Workspace
	if w == nil {
		return nil, nil
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(w.Mount.Fd()), &st); err != nil {
		return nil, fmt.Errorf("examine workspace: %w", err)
	}
	if st.Dev != w.Device || st.Ino != w.Inode {
		return nil, fmt.Errorf("workspace %s: its mount is of another directory", w.Source)
	}
	root := uint32(e.host.IDs[0].Outside) //nolint:gosec // G115: an id of the host
	owner := unix.Stat_t{Uid: root, Gid: root, Mode: st.Mode}
	if w.Mapped { // on disk files belong to the first range; the sandbox's mounts map it
		owner.Uid, owner.Gid = root+uint32(w.UID), root+uint32(w.GID) //nolint:gosec // G115: ids of a sandbox
	} else { // the daemon's user, as below
		owner.Uid, owner.Gid = 0, 0
	}
	plan := &workspacePlan{
		Target: w.Target, FD: fd, UID: p.owner, Hidden: w.Hidden, Upper: filepath.Join(dir, launcher.WorkspaceUpper), Work: filepath.Join(dir, launcher.WorkspaceWork),
	}
	if err := os.RemoveAll(plan.Work); err != nil {
		return nil, fmt.Errorf("prepare workspace: %w", err)
	}
	if err := makeOwned(plan.Work, &unix.Stat_t{Uid: root, Gid: root, Mode: 0o755}); err != nil {
		return nil, fmt.Errorf("prepare workspace: %w", err)
	}
	if err := makeOwned(plan.Upper, &owner); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, fmt.Errorf("prepare workspace: %w", err)
	}
	if e.host.Own {
		plan.Upper, plan.Work = filepath.Join(launcher.RangeDir, plan.Upper), filepath.Join(launcher.RangeDir, plan.Work)
	}
	return plan, nil
}

// mountWorkspace mounts the overlay of a workspace, in Init, and verifies the owner that programs
// see.
func mountWorkspace(w *workspacePlan) error {
	if w == nil {
		return nil
	}
	if err := unix.MoveMount(w.FD, "", unix.AT_FDCWD, launcher.WorkspaceDir, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("attach the mount of the workspace: %w", err)
	}
	if err := plug(w.FD); err != nil {
		return err
	}
	if err := checkPlaces([]string{w.Target}); err != nil {
		return fmt.Errorf("workspace: %w", err)
	}
	root, err := os.OpenRoot(launcher.RootfsDir)
	if err != nil {
		return fmt.Errorf("open the root: %w", err)
	}
	defer root.Close() // only a handle
	name := strings.TrimPrefix(w.Target, "/")
	if err := root.MkdirAll(name, 0o755); err != nil {
		return fmt.Errorf("make %s for the workspace: %w: %w", w.Target, err, runtime.ErrRootfs)
	}
	target := filepath.Join(launcher.RootfsDir, name) // no component is a link: checkPlaces looked, and no program runs yet
	hidden, err := mountHidden(w.Hidden)
	if err != nil {
		return err
	}
	options := "userxattr,lowerdir=" + layersOf(hidden) + ",upperdir=" + w.Upper + ",workdir=" + w.Work
	if err := unix.Mount("overlay", target, "overlay", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		return fmt.Errorf("mount the workspace at %s: %w", w.Target, err)
	}
	var st unix.Stat_t
	if err := unix.Lstat(target, &st); err != nil {
		return fmt.Errorf("verify workspace: %w", err)
	}
	if int(st.Uid) != w.UID {
		return fmt.Errorf("verify workspace: its owner is seen as %d, not as %d", st.Uid, w.UID)
	}
	if err := verifyHidden(target, w); err != nil {
		return fmt.Errorf("verify workspace: %w", err)
	}
	return nil
}
