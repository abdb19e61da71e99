package runtime

import (
	"os"

	"github.com/sandboxd/sandboxd/api"
)

// Workspace is a directory of the host that a sandbox changes on an overlay of its own.
type Workspace struct {
	// Source is the directory's path on the host. Device and Inode are what must be found there.
	Source string `json:"source"`
	Device uint64 `json:"device"`
	Inode  uint64 `json:"inode"`
	Target string `json:"target"` // in the sandbox
	UID    int    `json:"uid"`    // of the programs; owns what the directory's owner has on the host, with Mapped
	GID    int    `json:"gid"`
	// Mapped means that the mount's ids are mapped, for the range Range. Otherwise the sandbox's user
	// namespace holds the id of the directory's owner.
	Mapped bool `json:"mapped,omitempty"`
	Range  int  `json:"range,omitempty"`
	// Mount is the read-only mount of the directory, attached nowhere. The engine makes it if it is
	// nil, and does not keep it.
	Mount *os.File `json:"-"`
	// Sent means that the mount travels with the spec.
	Sent bool `json:"sent,omitempty"`
}

// workspaceOf returns the workspace of a sandbox with the settings; nil for none.
func workspaceOf(w *api.Workspace) *Workspace {
	if w == nil {
		return nil
	}
	return &Workspace{Source: w.Source, Device: w.Device, Inode: w.Inode, Target: w.Target, UID: w.UID, GID: w.GID}
}
