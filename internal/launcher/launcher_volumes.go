package launcher

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/runtime/quota"
)

// VolumesDir holds the volumes: a directory each, with the files in [VolumeData]. It lies among the
// sandboxes' directories, so that the mounts of each range of ids show it too. No sandbox has its
// name.
const VolumesDir = SandboxesDir + "/.volumes"

// VolumeData is the directory of a volume that sandboxes mount. Nothing above it can be reached
// from there.
const VolumeData = "data"

// volumeFresh is the directory of a volume in which an import unpacks; it replaces an empty
// [VolumeData].
const volumeFresh = "fresh"

// volumeReading bounds an archive of a volume in bytes: holes of files count in full.
const volumeReading = 1 << 40

// volumeDepth bounds the depth of a volume's directories that an import makes. Deeper ones could
// not be counted (quota.MaxDepth).
const volumeDepth = 500

// volumeKeeper lists the methods of the engine about volumes.
type volumeKeeper interface {
	RemoveVolume(ctx context.Context, id string) error
	MeasureVolume(ctx context.Context, id string) (runtime.VolumeUsage, error)
	// ReadVolume and WriteVolume return the directory of a volume, which stays until release is called.
	// A volume that is written is empty, and no sandbox or other request has it meanwhile.
	ReadVolume(ctx context.Context, id string) (dir string, release func(), err error)
	WriteVolume(ctx context.Context, id string) (dir string, release func(), err error)
	// SpareDisk returns the bytes that may be written.
	SpareDisk() (int64, error)
}

// volumeAction is the thing that a volume request asks for.
type volumeAction string

const (
	volumeRemove  volumeAction = "remove"
	volumeMeasure volumeAction = "measure"
	volumeRead    volumeAction = "read"
	volumeWrite   volumeAction = "write"
)

// volumeRequest is about one volume.
type volumeRequest struct {
	Action volumeAction        `json:"action"`
	ID     string              `json:"id"`
	Limit  runtime.VolumeUsage `json:"limit,omitzero"` // write
}

// files is the number of descriptors that come with the request: the pipe of an archive.
func (r *volumeRequest) files() int {
	if r != nil && (r.Action == volumeRead || r.Action == volumeWrite) {
		return 1
	}
	return 0
}

// volume answers a request about a volume.
func (s *Server) volume(ctx context.Context, req *volumeRequest, files []*os.File, resp *response) error {
	if req == nil {
		return errors.New("launcher volume: no request")
	}
	keeper, ok := s.Engine.(volumeKeeper)
	if !ok {
		return fmt.Errorf("launcher volume: this engine has none: %w", runtime.ErrUnavailable)
	}
	var err error
	switch req.Action {
	case volumeRemove:
		err = keeper.RemoveVolume(ctx, req.ID)
	case volumeMeasure:
		var used runtime.VolumeUsage
		if used, err = keeper.MeasureVolume(ctx, req.ID); err == nil {
			resp.Usage = &used
		}
	case volumeRead:
		resp.Layer, err = s.readVolume(ctx, keeper, req, files[0])
	case volumeWrite:
		resp.Layer, err = s.writeVolume(ctx, keeper, req, files[0])
	default:
		err = fmt.Errorf("launcher: %s %q of volumes", saysUnknown, req.Action)
	}
	return err
}

// readVolume writes the archive of a volume to out. A confined child reads the directory, which
// programs may change meanwhile.
func (s *Server) readVolume(ctx context.Context, keeper volumeKeeper, req *volumeRequest, out *os.File) (*layer.Result, error) {
	release, err := s.Layers.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	dir, leave, err := keeper.ReadVolume(ctx, req.ID)
	if err != nil {
		return nil, err
	}
	defer leave()
	limits := layer.NoLimits()
	limits.Bytes = volumeReading
	job := &diffJob{
		Overlays: []diffOverlay{{At: ".", Upper: dir}},
		Options:  layer.DiffOptions{Limits: limits, Plain: true},
		Owner:    true, // a sandbox with a workspace may have made files of the daemon's user
	}
	result, err := s.Layers.child(ctx, "read volume", "diff", job, nil, out)
	if err != nil {
		return nil, err
	}
	return &result, nil
}

// writeVolume unpacks an archive beside the empty directory of a volume, and then puts it in the
// place of that.
func (s *Server) writeVolume(ctx context.Context, keeper volumeKeeper, req *volumeRequest, in *os.File) (_ *layer.Result, err error) {
	if err := s.Layers.take(ctx); err != nil {
		return nil, err
	}
	defer func() { <-s.Layers.slots }()
	dir, release, err := keeper.WriteVolume(ctx, req.ID)
	if err != nil {
		return nil, err
	}
	defer release()
	limits := layer.DefaultLimits().AnyRatio()
	limits.Depth = volumeDepth
	spare, err := keeper.SpareDisk()
	if err != nil {
		return nil, err
	}
	if limits.Bytes = max(1, spare); req.Limit.Bytes > 0 {
		limits.Bytes = min(limits.Bytes, req.Limit.Bytes)
	}
	if req.Limit.Inodes > 0 {
		limits.Entries = min(limits.Entries, req.Limit.Inodes)
	}
	fresh := filepath.Join(filepath.Dir(dir), volumeFresh)
	if err := os.RemoveAll(fresh); err != nil { // of an import that a kill has ended
		return nil, fmt.Errorf("clear volume: %w", err)
	}
	if err := os.Mkdir(fresh, 0o755); err != nil { //nolint:gosec // G301: it becomes a directory of sandboxes
		return nil, fmt.Errorf("make directory of volume: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(fresh)) // its depth is bounded
		}
	}()
	root := s.Layers.ids[0].Outside
	if err := os.Lchown(fresh, root, root); err != nil {
		return nil, fmt.Errorf("make directory of volume: %w", err)
	}
	parent, err := os.Open(filepath.Dir(dir))
	if err != nil {
		return nil, fmt.Errorf("open volume: %w", err)
	}
	defer func() { err = errors.Join(err, parent.Close()) }()
	complete := make(chan struct{}) // there are no layers below
	close(complete)
	job := &applyJob{Dir: fresh, Limits: limits, Single: s.Layers.single, Plain: true}
	result, err := s.Layers.applyOne(ctx, job, in, complete)
	if err != nil {
		return nil, err
	}
	if err := checkFilled(fresh, req.Limit); err != nil {
		return nil, err
	}
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	if err := unix.Syncfs(int(parent.Fd())); err != nil {
		return nil, fmt.Errorf("sync volume: %w", err)
	}
	// Not os.Rename, which refuses to replace a directory. The kernel does not replace one with files.
	if err := unix.Rename(fresh, dir); err != nil {
		return nil, fmt.Errorf("complete volume: %w", err)
	}
	if err := parent.Sync(); err != nil {
		return nil, fmt.Errorf("sync volume: %w", err)
	}
	return &result, nil
}

// checkFilled compares the disk space of an unpacked archive with the limit of its volume: blocks
// and directories take more than contents.
func checkFilled(dir string, limit runtime.VolumeUsage) error {
	used, err := quota.Measure([]string{dir}, quota.Usage(limit))
	switch {
	case err != nil:
		return fmt.Errorf("measure volume: %w", err)
	case limit.Bytes > 0 && used.Bytes > limit.Bytes:
		return layer.ExceededBytes.Errorf("its files take more than the %d bytes that the volume may have", limit.Bytes)
	case limit.Inodes > 0 && used.Inodes > limit.Inodes:
		return layer.ExceededEntries.Errorf("it has more than the %d files that the volume may have", limit.Inodes)
	}
	return nil
}
