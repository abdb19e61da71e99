package runtime

import (
	"fmt"
	"os"
	"path"
	"strings"

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
	// Hidden are paths below Source that the sandbox does not see: see [CheckHidden]. They travel as a
	// file, because they may exceed a message; Hides means that there is one.
	Hidden []string `json:"-"`
	Hides  bool     `json:"hides,omitempty"`
}

// CheckHidden reports an error if a path is not relative and in its shortest form, or if the paths
// are too many.
func CheckHidden(paths []string) error {
	if len(paths) > api.MaxHidden {
		return fmt.Errorf("%d paths, at most %d are possible", len(paths), api.MaxHidden)
	}
	size := 0
	for _, p := range paths {
		size += len(p)
		if size > api.MaxHiddenBytes {
			return fmt.Errorf("paths of more than %d bytes together", api.MaxHiddenBytes)
		}
		if p == "" || p == "." || len(p) >= maxPath || path.Clean("/"+p) != "/"+p || strings.ContainsRune(p, 0) {
			return fmt.Errorf("%.200q: not a path below the directory in its shortest form", p)
		}
		for name := range strings.SplitSeq(p, "/") {
			if len(name) > maxName {
				return fmt.Errorf("%.200q: longer than a file's name can be", name)
			}
		}
	}
	return nil
}

// maxPath and maxName are Linux's bounds, PATH_MAX and NAME_MAX.
const maxPath, maxName = 4096, 255

// workspaceOf returns the workspace of a sandbox with the settings; nil for none.
func workspaceOf(w *api.Workspace) *Workspace {
	if w == nil {
		return nil
	}
	return &Workspace{Source: w.Source, Device: w.Device, Inode: w.Inode, Target: w.Target, UID: w.UID, GID: w.GID, Hidden: w.Hidden}
}
