package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/internal/launcher"
	"github.com/sandboxd/sandboxd/runtime"
)

// Differ reads what sandboxes have changed: *launcher.Client, and in tests a list.
type Differ interface {
	Diff(ctx context.Context, req launcher.DiffRequest, w io.Writer) (layer.Result, error)
	Changes(ctx context.Context, req launcher.DiffRequest, found func(api.Change) error) (layer.Result, error)
}

// maxChanges bounds what one answer holds, in bytes: names are the sandbox's, and JSON can make six bytes of one.
const maxChanges = 2 << 20

var errEnough = errors.New("no more changes are wanted")

// Diff lists what a sandbox of any state has changed of its image. It does not count as a use of it.
func (s *Service) Diff(ctx context.Context, ref string) (api.SandboxDiff, error) {
	req, _, err := s.diffRequest(ref)
	if err != nil {
		return api.SandboxDiff{}, err
	}
	diff := api.SandboxDiff{Changes: []api.Change{}}
	room := maxChanges
	result, err := s.opts.Differ.Changes(ctx, req, func(c api.Change) error {
		if room -= len(c.Path) + 64; room < 0 {
			diff.More = true
			return errEnough
		}
		diff.Changes = append(diff.Changes, c)
		return nil
	})
	if err != nil && !errors.Is(err, errEnough) {
		return api.SandboxDiff{}, fmt.Errorf("diff of sandbox %s: %w", ref, err)
	}
	diff.Skipped = result.Skipped
	return diff, nil
}

func (s *Service) diffRequest(ref string) (launcher.DiffRequest, runtime.Record, error) {
	rec, err := s.supervisor.Get(ref)
	switch {
	case err != nil:
		return launcher.DiffRequest{}, rec, err
	case rec.State == api.StateCreating:
		return launcher.DiffRequest{}, rec, fmt.Errorf("%w: %s (%s) is being created", runtime.ErrState, rec.Name, rec.ID)
	case len(rec.Rootfs.Layers) == 0:
		return launcher.DiffRequest{}, rec, fmt.Errorf("%w: %s (%s) is of an earlier version of sandboxd, which did not note what its root is made of",
			runtime.ErrState, rec.Name, rec.ID)
	case s.opts.Differ == nil:
		return launcher.DiffRequest{}, rec, fmt.Errorf("%w: nobody reads what sandboxes have changed", runtime.ErrUnavailable)
	}
	return launcher.DiffRequest{ID: rec.ID, Rootfs: rec.Rootfs}, rec, nil
}

// Commit makes an image of a sandbox of any state: that which it was made of, and what it has changed. A running one does
// not go on meanwhile, where it is in a cgroup, and its idle time begins anew.
func (s *Service) Commit(ctx context.Context, ref string, body api.CommitSandbox) (api.SandboxCommitted, error) {
	if err := validateCommit(&body); err != nil {
		return api.SandboxCommitted{}, err
	}
	req, rec, err := s.diffRequest(ref)
	if err != nil {
		return api.SandboxCommitted{}, err
	}
	if len(rec.Rootfs.HostDirs) > 0 {
		return api.SandboxCommitted{}, fmt.Errorf("%w: %s (%s) shows this host's own /usr, which is not part of an image; make it of a stored image to commit it",
			runtime.ErrState, rec.Name, rec.ID)
	}
	if rec.State == api.StateRunning {
		lease, err := s.supervisor.Begin(rec.ID)
		if err != nil {
			return api.SandboxCommitted{}, err
		}
		defer lease.End()
	}
	req.Freeze = true
	img, result, err := s.images.Commit(ctx, image.CommitOptions{
		Base: rec.ImageDigest, Reference: body.Reference, Config: body.Config, Comment: body.Comment, Created: time.Now(),
		Layer: func(ctx context.Context, w io.Writer) (layer.Result, error) { return s.opts.Differ.Diff(ctx, req, w) },
	})
	if err != nil {
		return api.SandboxCommitted{}, fmt.Errorf("commit sandbox %s: %w", ref, err)
	}
	s.log.Info("sandbox committed", "id", rec.ID, "image", img.Reference, "digest", img.Digest)
	return api.SandboxCommitted{Image: img.Image, Skipped: result.Skipped, SkippedMore: result.SkippedMore}, nil
}

func validateCommit(body *api.CommitSandbox) error {
	if err := validReference("reference", body.Reference); err != nil {
		return err
	}
	if len(body.Comment) > 1024 || hasControl(body.Comment) {
		return invalidf("comment: at most 1024 bytes, without control characters")
	}
	return validateImageConfig(&body.Config)
}

func (d *Daemon) getDiff(w http.ResponseWriter, r *http.Request) error {
	if _, err := query(r); err != nil {
		return err
	}
	diff, err := d.service.Diff(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, diff)
}

func (d *Daemon) postCommit(w http.ResponseWriter, r *http.Request) error {
	var body api.CommitSandbox
	if err := readJSON(w, r, maxBody, &body); err != nil {
		return err
	}
	out, err := d.service.Commit(r.Context(), r.PathValue("id"), body)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusCreated, out)
}
