package api

// Mount puts a directory or a file of the host into a sandbox.
//
// Files of the host that belong to the owner of Source belong to UID and GID inside. What the
// programs of that user write there belongs to the owner of Source on the host. The daemon's user
// owns it, unless that is root.
//
// A snapshot has nothing of what is mounted. Forks have the mounts of their origin. A start mounts
// Source again, as it is then.
type Mount struct {
	// Type is [MountBind].
	Type string `json:"type"`
	// Source is an absolute path on the host, in its shortest form and without links. It lies below one
	// of the directories that serve --mount-root names.
	Source string `json:"source"`
	// Target is an absolute path in its shortest form. Missing directories of it are made, and no link
	// is followed. It does not lie in /proc, /sys, /dev or a file system in memory.
	Target string `json:"target"`
	// ReadOnly keeps every program of the sandbox from writing there.
	ReadOnly bool `json:"read_only,omitempty"`
	// UID and GID default to the user of the sandbox, if that is a number or root. All mounts of a
	// sandbox have the same.
	UID *uint32 `json:"uid,omitempty"`
	GID *uint32 `json:"gid,omitempty"`
}

// MountBind is the type of a mount of the host's files.
const MountBind = "bind"

// The values of [Enforced.Mounts].
const (
	// MountsMapped means that the kernel maps the ids of each mount. Sandboxes run under other ids than
	// those on the host.
	MountsMapped = "mapped"
	// MountsUser means that UID and GID of the mounts are the daemon's user on the host: without root,
	// the kernel maps no mount of a disk. A program that breaks out of the sandbox is that user.
	MountsUser = "user"
)
