package service

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/runtime"
)

// maxChanges bounds an answer, in bytes: names come from the sandbox, and JSON can make six bytes
// of one.
const maxChanges = 2 << 20

var errEnough = errors.New("no more changes are wanted")

// Diff lists the changes of a sandbox of any state to its image. It does not count as a use of it.
func (s *API) Diff(ctx context.Context, ref string) (api.SandboxDiff, error) {
	req, rec, doomed, err := s.diffRequest(ref)
	if err != nil {
		return api.SandboxDiff{}, err
	}
	ctx, whole := unlessDeleted(ctx, doomed, &rec)
	diff := api.SandboxDiff{}
	var result runtime.DiffResult
	var levels [][]api.Change
	room := maxChanges
	for _, req := range append(below(&req), req) {
		level := []api.Change{}
		result, err = s.differ.ListDiff(ctx, req, func(c api.Change) error {
			if room -= len(c.Path) + 64; room < 0 {
				diff.More = true
				return errEnough
			}
			level = append(level, c)
			return nil
		})
		levels = append(levels, level)
		diff.Changes = level
		if err != nil {
			break
		}
	}
	if errors.Is(err, errEnough) {
		err = nil
	}
	if err = whole(err); err != nil {
		return api.SandboxDiff{}, fmt.Errorf("diff of sandbox %s: %w", ref, err)
	}
	if len(levels) > 1 {
		diff.Changes = layer.MergeChanges(levels...)
	}
	diff.Skipped, diff.SkippedMore = result.Skipped, result.SkippedMore
	return diff, nil
}

// below are the requests for the layers of snapshots that a sandbox stands on, lowest first.
func below(req *runtime.DiffRequest) []runtime.DiffRequest {
	var all []runtime.DiffRequest
	for i := range req.Rootfs.Snapshots {
		all = append(all, runtime.DiffRequest{Rootfs: req.Rootfs.Below(len(req.Rootfs.Snapshots) - 1 - i), Layer: true, Limits: diffLimits(layer.NoLimits())})
	}
	return all
}

// diffLimits returns the limits of an image store in the form of a request to the engine.
func diffLimits(l layer.Limits) runtime.DiffLimits {
	return runtime.DiffLimits{
		Entries: l.Entries, Bytes: l.Bytes, BelowEntries: l.Below.Entries, BelowBytes: l.Below.Bytes,
		Ratio: l.Ratio, RatioFloor: l.RatioFloor, Depth: l.Depth, Name: l.Name,
	}
}

func (s *API) diffRequest(ref string) (runtime.DiffRequest, runtime.Record, <-chan struct{}, error) {
	rec, err := s.lookup(ref)
	if err != nil {
		return runtime.DiffRequest{}, rec, nil, err
	}
	rec, doomed, err := s.supervisor.Read(rec.ID)
	switch {
	case errors.Is(err, runtime.ErrState):
		return runtime.DiffRequest{}, rec, nil, class.Mark(class.ErrUnreadable, err)
	case err != nil:
		return runtime.DiffRequest{}, rec, nil, err
	case len(rec.Rootfs.Layers) == 0:
		return runtime.DiffRequest{}, rec, nil, class.Mark(class.ErrUnreadable,
			fmt.Errorf("%s (%s) is of an earlier version of sandboxd, which did not note what its root is made of", rec.Name, rec.ID))
	case s.differ == nil:
		return runtime.DiffRequest{}, rec, nil, fmt.Errorf("%w: the engine does not read the changes of sandboxes", runtime.ErrUnavailable)
	}
	return runtime.DiffRequest{ID: rec.ID, Rootfs: rec.Rootfs, Limits: diffLimits(s.images.Limits())}, rec, doomed, nil
}

// unlessDeleted returns a context for reading a sandbox's directories, which ends when its deletion
// begins: files may then be missing that the sandbox never removed. Whole ends the context and
// returns the error of a reading that ended in err. It must be called.
func unlessDeleted(ctx context.Context, doomed <-chan struct{}, rec *runtime.Record) (_ context.Context, whole func(err error) error) {
	ctx, cancel := context.WithCancel(ctx)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		select {
		case <-doomed:
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, func(err error) error {
		cancel()
		<-watched
		select {
		case <-doomed:
			return class.Mark(class.ErrUnreadable, fmt.Errorf("%s (%s) was deleted meanwhile, or rolled back", rec.Name, rec.ID))
		default:
			return err
		}
	}
}

// writeChanges writes the changes of a sandbox that has ended as a layer; times are at most latest,
// unless that is zero.
func (s *API) writeChanges(ctx context.Context, id string, latest time.Time, w io.Writer) error {
	req, rec, doomed, err := s.diffRequest(id)
	if err != nil {
		return err
	}
	ctx, whole := unlessDeleted(ctx, doomed, &rec)
	req.Latest = latest
	_, err = s.differ.WriteDiff(ctx, req, w)
	return whole(err)
}

// Commit makes an image of a sandbox of any state: its image and its changes. A running one in a
// cgroup is frozen meanwhile, and its idle time begins anew.
func (s *API) Commit(ctx context.Context, ref string, body api.CommitSandbox) (api.SandboxCommitted, error) {
	if err := validateCommit(&body); err != nil {
		return api.SandboxCommitted{}, err
	}
	if err := s.spareDisk(ctx); err != nil {
		return api.SandboxCommitted{}, err
	}
	req, rec, doomed, err := s.diffRequest(ref)
	if err != nil {
		return api.SandboxCommitted{}, err
	}
	if err := sameIDs(&rec); err != nil {
		return api.SandboxCommitted{}, err
	}
	if len(rec.Rootfs.HostDirs) > 0 {
		return api.SandboxCommitted{}, class.Mark(class.ErrUnreadable, fmt.Errorf(
			"%s (%s) shows this host's own /usr, which is not part of an image; make it of a stored image to commit it", rec.Name, rec.ID))
	}
	hold := func() (release func()) { return func() {} }
	switch lease, err := s.supervisor.Begin(rec.ID); {
	case err == nil:
		defer lease.End()
		hold = lease.Hold
	case !errors.Is(err, runtime.ErrState): // one that has ended can be read all the same
		return api.SandboxCommitted{}, err
	}
	req.Freeze = true
	var snapshots []image.CommitLayer
	for i, req := range below(&req) {
		snapshots = append(snapshots, image.CommitLayer{
			DiffID: rec.Rootfs.Snapshots[i],
			Write: func(ctx context.Context, w io.Writer) (layer.Result, error) {
				ctx, whole := unlessDeleted(ctx, doomed, &rec) // they may go with it, and would read as damaged
				result, err := s.differ.WriteDiff(ctx, req, w)
				return layer.Result(result), whole(err)
			},
		})
	}
	img, result, err := s.images.Commit(ctx, image.CommitOptions{
		Base: rec.ImageDigest, Reference: body.Reference, Config: body.Config, Comment: body.Comment, Author: body.Author, Created: time.Now(),
		Below: snapshots,
		Layer: func(ctx context.Context, w io.Writer) (layer.Result, error) {
			defer hold()()
			ctx, whole := unlessDeleted(ctx, doomed, &rec)
			result, err := s.differ.WriteDiff(ctx, req, w)
			return layer.Result(result), whole(err)
		},
	})
	if err != nil {
		return api.SandboxCommitted{}, fmt.Errorf("commit sandbox %s: %w", ref, err)
	}
	s.log.Info("sandbox committed", "id", rec.ID, "image", img.Reference, "digest", img.Digest)
	s.publish(api.Event{Type: api.EventImage, Action: api.ActionCommitted, Object: img.Reference, Sandbox: rec.ID})
	return api.SandboxCommitted{Image: img.Image, Skipped: result.Skipped, SkippedMore: result.SkippedMore}, nil
}

func validateCommit(body *api.CommitSandbox) error {
	if err := validReference("reference", body.Reference); err != nil {
		return err
	}
	if len(body.Comment) > 1024 || hasControl(body.Comment) {
		return class.Invalidf("comment: at most 1024 bytes, without control characters")
	}
	if len(body.Author) > 1024 || hasControl(body.Author) {
		return class.Invalidf("author: at most 1024 bytes, without control characters")
	}
	return validateImageConfig(&body.Config)
}
