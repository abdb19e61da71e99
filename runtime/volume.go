package runtime

import (
	"context"
	"errors"
	"io"
	"os"

	"github.com/sandboxd/sandboxd/api"
)

// Errors about volumes.
var (
	// ErrVolumeInUse means that a volume is mounted, read or written by another request.
	ErrVolumeInUse = errors.New("volume is in use")
	// ErrVolumeNotEmpty means that a volume has files, and that an import would mix others with them.
	ErrVolumeNotEmpty = errors.New("the volume has files")
)

// VolumeMount puts a volume into a sandbox. An engine makes the volume if there is none of this ID.
type VolumeMount struct {
	ID       string `json:"id"`   // lower-case letters and digits
	Name     string `json:"name"` // for messages
	Target   string `json:"target"`
	ReadOnly bool   `json:"read_only,omitempty"`
	// NoCopy leaves an empty volume empty. Otherwise it gets the files that the root file system has at
	// Target, and the owner and mode of that directory.
	NoCopy bool `json:"no_copy,omitempty"`
	// Own means that the volume goes with the sandbox: its files count for the limits of that.
	Own bool `json:"own,omitempty"`
	// UID and GID own a new volume where the root file system has no directory at Target.
	UID uint32 `json:"uid,omitempty"`
	GID uint32 `json:"gid,omitempty"`
	// Limit is the maximum usage; zero fields mean none.
	Limit VolumeUsage `json:"limit,omitzero"`
}

// VolumeUsage is disk space of a volume.
type VolumeUsage struct {
	Bytes  int64 `json:"bytes,omitempty"` // of allocated blocks
	Inodes int64 `json:"inodes,omitempty"`
}

// Volumer is the ability to keep volumes: directories that several sandboxes may have, and that
// stay when these are deleted. A volume without files may be unknown to an engine.
type Volumer interface {
	// RemoveVolume removes a volume with its files; a missing one is no error. One that a running
	// sandbox has is ErrVolumeInUse.
	RemoveVolume(ctx context.Context, id string) error
	// MeasureVolume counts the files of a volume.
	MeasureVolume(ctx context.Context, id string) (VolumeUsage, error)
	// WriteVolume writes the files of a volume to w, as an uncompressed tar. Sandboxes may write
	// meanwhile; a file that changes while it is read is an error, and w has received a useless part.
	WriteVolume(ctx context.Context, id string, w io.Writer) (DiffResult, error)
	// FillVolume fills an empty volume with the files of a tar, plain or compressed, all or none of
	// them. The tar is r to its end. A volume with files is ErrVolumeNotEmpty.
	FillVolume(ctx context.Context, id string, r *os.File, limit VolumeUsage) (DiffResult, error)
}

// volumes returns the volumes that settings name.
func (s *Supervisor) volumes(tenant string, set *api.Settings) ([]VolumeMount, error) {
	if s.opts.Volumes == nil {
		return nil, nil
	}
	return s.opts.Volumes(tenant, set)
}
