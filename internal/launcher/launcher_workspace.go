package launcher

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/internal/idmap"
	"github.com/sandboxd/sandboxd/runtime"
)

// WorkspaceDir is the directory in which a sandbox that is being started attaches the mount of its
// workspace, below the overlay.
const WorkspaceDir = "/workspace"

// HiddenDir is the directory in which such a sandbox makes the layer of whiteouts of its workspace,
// between the two.
const HiddenDir = "/workspace-hidden"

// WorkspaceUpper and WorkspaceWork are the directories of the overlay on a workspace, in that of
// the sandbox.
const (
	WorkspaceUpper = "workspace-upper"
	WorkspaceWork  = "workspace-work"
)

// errWantsWorkspace means that a sandbox can be started once the mount of its workspace is there.
var errWantsWorkspace = errors.New("the mount of the workspace is wanted")

// wantsWorkspaceError names the range of ids that the mount is for.
type wantsWorkspaceError struct{ number int }

func (e *wantsWorkspaceError) Error() string { return errWantsWorkspace.Error() }
func (e *wantsWorkspaceError) Unwrap() error { return errWantsWorkspace }

// TakeForWorkspace takes a range like [Ranges.Take], for a sandbox with a workspace: the one that
// the mount of the workspace was made for. If there is no mount yet, or another sandbox has that
// range, the error names the range to make one for.
func (r *Ranges) TakeForWorkspace(w *runtime.Workspace) (*Lease, error) {
	if w.Mount != nil {
		if lease := r.takeNumber(w.Range); lease != nil {
			return lease, nil
		}
	}
	lease, err := r.Take()
	if err != nil {
		return nil, err
	}
	defer lease.Release()
	return nil, &wantsWorkspaceError{lease.number}
}

// takeNumber takes the range with a number; nil if it is not free.
func (r *Ranges) takeNumber(number int) *Lease {
	if r.count == 0 {
		if number != 0 {
			return nil
		}
		return &Lease{ranges: r}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if number < 1 || number > len(r.mounted) || r.mounted[number-1] {
		return nil
	}
	r.mounted[number-1] = true
	return &Lease{ranges: r, number: number}
}

// withMount reports whether the mount of a workspace comes with a request.
func withMount(req *request) bool {
	return (req.Op == opCreate || req.Op == opStart) && req.Spec != nil && req.Spec.Workspace != nil && req.Spec.Workspace.Sent
}

// takeMount makes the descriptor of a workspace's mount part of the spec, and verifies that nothing
// can be changed through it.
func takeMount(req *request, files []*os.File) error {
	if !withMount(req) {
		return nil
	}
	mount := files[1]
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(mount.Fd()), &fs); err != nil {
		return fmt.Errorf("verify mount of the workspace: %w", err)
	}
	const noSymFollow = 0x2000 // ST_NOSYMFOLLOW of linux/statfs.h, Linux 5.10
	if flags := int64(unix.ST_RDONLY | unix.ST_NOSUID | unix.ST_NODEV | noSymFollow); fs.Flags&flags != flags {
		return fmt.Errorf("verify mount of the workspace: its flags are %#x", fs.Flags)
	}
	req.Spec.Workspace.Mount = mount
	if req.Spec.Workspace.Hides {
		hidden, err := readHidden(files[len(files)-1])
		if err != nil {
			return fmt.Errorf("hidden files of the workspace: %w", err)
		}
		req.Spec.Workspace.Hidden = hidden
	}
	return nil
}

// readHidden reads what [hiddenFile] has written.
func readHidden(f *os.File) ([]string, error) {
	const most = api.MaxHidden + api.MaxHiddenBytes
	data, err := io.ReadAll(io.NewSectionReader(f, 0, most+1))
	if err != nil {
		return nil, err
	}
	text, ok := strings.CutSuffix(string(data), "\x00")
	if !ok || len(data) > most {
		return nil, errors.New("the list of them is not whole")
	}
	paths := strings.Split(text, "\x00")
	return paths, runtime.CheckHidden(paths)
}

// ownerID is the launcher's own id, which is that of the daemon's user. In a sandbox with a
// workspace of that user it stands behind the ids that every sandbox has.
const ownerID = 0

// WithOwner returns the map of a sandbox, in the launcher's ids, with the id of the daemon's user
// behind the others, unless the map holds it.
func WithOwner(ids []idmap.Range) []idmap.Range {
	next := 0
	for _, r := range ids {
		if r.Outside <= ownerID && ownerID < r.Outside+r.Size {
			return ids
		}
		next = max(next, r.Inside+r.Size)
	}
	return append(slices.Clip(ids), idmap.Range{Inside: next, Outside: ownerID, Size: 1})
}

// workspaceJob returns the job of the child that reads the changes of a workspace. Every mark of
// the overlay is included: the directory below is the client's to compare with.
func workspaceJob(req *diffRequest, dir string) (*diffJob, error) {
	upper := filepath.Join(dir, WorkspaceUpper)
	if there, err := isDirectory(upper); err != nil {
		return nil, err
	} else if !there || req.Layer || req.List {
		return nil, fmt.Errorf("sandbox %s has no workspace: %w", req.ID, runtime.ErrNotFound)
	}
	return &diffJob{
		Overlays: []diffOverlay{{At: ".", Upper: upper}},
		Options:  layer.DiffOptions{Limits: req.Limits, Stored: true, Anonymous: true},
		Owner:    true,
	}, nil
}
