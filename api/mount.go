package api

// Mount puts a directory or a file of the host, or a volume, into a sandbox.
//
// Files of the host that belong to the owner of Source belong to UID and GID inside. What the
// programs of that user write there belongs to the owner of Source on the host. The daemon's user
// owns it, unless that is root.
//
// A snapshot has nothing of what is mounted. Forks have the mounts of their origin. A start mounts
// Source again, as it is then.
//
// Files of a volume belong to users of the sandbox. All sandboxes that have the volume see the same
// owners. One that does not exist is made. A volume without files that is mounted gets those that
// the image has at Target, unless NoCopy is set.
type Mount struct {
	// Type is [MountBind] or [MountVolume].
	Type string `json:"type"`
	// Source is, of a bind, an absolute path on the host, in its shortest form and without links. It
	// lies below one of the directories that serve --mount-root names. Of a volume it is the name; if
	// it is empty, the sandbox gets a new volume that is removed with it.
	Source string `json:"source,omitempty"`
	// Target is an absolute path in its shortest form. Missing directories of it are made, and no link
	// is followed. It does not lie in /proc, /sys, /dev or a file system in memory.
	Target string `json:"target"`
	// ReadOnly keeps every program of the sandbox from writing there.
	ReadOnly bool `json:"read_only,omitempty"`
	// Create makes missing directories of a bind's source when the sandbox is created, mode 0755.
	Create bool `json:"create,omitempty"`
	// NoCopy leaves an empty volume empty. It is for volumes.
	NoCopy bool `json:"no_copy,omitempty"`
	// Anonymous is set in answers: the volume is removed with the last sandbox that has it.
	Anonymous bool `json:"anonymous,omitempty"`
	// UID and GID default to the user of the sandbox, if that is a number or root. All mounts of a
	// sandbox have the same. Of a volume they own the directory if it is new, and the image has none
	// there.
	UID *uint32 `json:"uid,omitempty"`
	GID *uint32 `json:"gid,omitempty"`
}

// Types of mounts: of the host's files, and of a volume.
const (
	MountBind   = "bind"
	MountVolume = "volume"
)

// The values of [Enforced.Mounts].
const (
	// MountsMapped means that the kernel maps the ids of each mount. Sandboxes run under other ids than
	// those on the host.
	MountsMapped = "mapped"
	// MountsUser means that UID and GID of the mounts are the daemon's user on the host: without root,
	// the kernel maps no mount of a disk. A program that breaks out of the sandbox is that user.
	MountsUser = "user"
)
