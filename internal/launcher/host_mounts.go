package launcher

import (
	"context"
	"fmt"
	"os"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/idmap"
	"github.com/sandboxd/sandboxd/runtime"
)

// maxOpened bounds how often the mounts of one sandbox are opened: again if the launcher has
// forgotten the range that they were for.
const maxOpened = 3

// MountRequest asks for a mount of the host's files for one sandbox.
type MountRequest struct {
	Source   string `json:"source"`
	ReadOnly bool   `json:"read_only,omitempty"`
	Range    int    `json:"range,omitempty"` // of the sandbox; 0: it shares the first one
	// UID and GID are ids of the sandbox.
	UID int `json:"uid"`
	GID int `json:"gid"`
}

// OpenMount returns a mount of the host's files, attached nowhere. A source that may not be mounted
// is runtime.ErrMount.
func OpenMount(ctx context.Context, o Options, req MountRequest) (m *os.File, err error) {
	if o.IDs.Method == idmap.Direct {
		m, err = o.Mounts.Mapped(req.Source, req.ReadOnly, func(uid, gid int) (u, g []idmap.Range, err error) {
			return o.IDs.FileMap(req.Range, uid, gid, req.UID, req.GID)
		})
	} else {
		m, err = o.Mounts.Plain(ctx, req.Source, req.ReadOnly)
	}
	return m, err
}

// mountIDs returns what the mounts of this host's sandboxes are like.
func (o *Options) mountIDs() string {
	if o.IDs.Method == idmap.Direct {
		return api.MountsMapped
	}
	return api.MountsUser
}

// openMounts opens the mounts of a sandbox with a range.
func (c *Client) openMounts(ctx context.Context, spec *runtime.Spec, number int) (_ []*os.File, err error) {
	var opened []*os.File
	defer func() {
		if err != nil {
			closeAll(opened)
		}
	}()
	for _, m := range spec.Mounts {
		if m.UID == nil || m.GID == nil {
			return nil, fmt.Errorf("mount %s: its ids are not filled in", m.Source)
		}
		f, err := c.opts.OpenMount(ctx, MountRequest{m.Source, m.ReadOnly, number, int(*m.UID), int(*m.GID)})
		if err != nil {
			return nil, err
		}
		opened = append(opened, f)
	}
	return opened, nil
}
