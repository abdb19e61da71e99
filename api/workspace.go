package api

import "time"

// Workspace is a directory of the daemon's host that a sandbox sees as its own: programs may change
// everything in it, and the host's files stay as they are. The changes lie in the sandbox's own
// storage, and end with it. GET /v1/sandboxes/{id}/changes returns them.
type Workspace struct {
	// Source is the absolute path of the directory, without links in it.
	Source string `json:"source"`
	// Target is where programs see it. Default: the working directory that request or image name, else
	// "/workspace".
	Target string `json:"target,omitempty"`
	// Device and Inode are of the directory that the client means, as stat(2) has them. Each start of
	// the sandbox compares them with those of Source, and fails if they differ.
	Device uint64 `json:"device"`
	Inode  uint64 `json:"inode"`
	// Hidden are paths below Source that programs do not see, also if the host gets a file there later.
	// They are relative, in their shortest form, and chosen once, when the sandbox is created. At most
	// [MaxHidden] with [MaxHiddenBytes] bytes together.
	Hidden []string `json:"hidden,omitempty"`
	// UID and GID are the ids of the sandbox's programs, which own the files where the mount's ids are
	// mapped; set by the daemon.
	UID int `json:"uid,omitempty"`
	GID int `json:"gid,omitempty"`
	// Since is the time before which the sandbox has seen no file of the directory; set by the daemon.
	// A file whose status on the host has changed since is in conflict with a change of the sandbox.
	Since time.Time `json:"since,omitzero"`
}

// Bounds of [Workspace.Hidden].
const (
	MaxHidden      = 16384
	MaxHiddenBytes = 512 << 10
)

// The values of [Enforced.Workspace].
const (
	// WorkspaceMapped is a mount with mapped ids: the directory's owner on the host is the user of the
	// sandbox's programs, and the sandbox has no id of the host's users.
	WorkspaceMapped = "mapped-mount"
	// WorkspaceShared is a sandbox whose user namespace holds the id of the daemon's user. Programs see
	// the files as that user's, or as root's where the sandbox has that one id only.
	WorkspaceShared = "shared-id"
)
