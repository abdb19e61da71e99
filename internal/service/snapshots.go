package service

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/image/snapshot"
	"github.com/sandboxd/sandboxd/internal/rootfs"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/network"
	"github.com/sandboxd/sandboxd/runtime"
)

const (
	maxForks = 100
	// forksAtOnce is how many forks are created side by side: more than the cores of a small host only
	// queue in the launcher.
	forksAtOnce = 4
)

// taken is a layer of a sandbox's changes, held until it is released.
type taken struct {
	*image.Taken
	result     layer.Result
	consistent bool
	of         runtime.Record
}

// take makes a layer of the changes of a sandbox of any state. A running one in a cgroup is frozen
// meanwhile, and its idle time begins anew.
func (s *API) take(ctx context.Context, ref string) (*taken, error) {
	req, rec, doomed, err := s.diffRequest(ref)
	if err != nil {
		return nil, err
	}
	if err := sameIDs(&rec); err != nil {
		return nil, err
	}
	if n := len(rec.Rootfs.Layers); n >= rootfs.MaxLayers {
		return nil, class.Mark(class.ErrTooDeep, fmt.Errorf("%s (%s) stands on %d layers, %d of them snapshots; no overlay has more than %d",
			rec.Name, rec.ID, n, len(rec.Rootfs.Snapshots), rootfs.MaxLayers))
	}
	t := &taken{of: rec}
	ended := false
	hold := func() (release func()) { return func() {} }
	switch lease, err := s.supervisor.Begin(rec.ID); {
	case err == nil:
		defer lease.End()
		hold = lease.Hold
	case !errors.Is(err, runtime.ErrState):
		return nil, err
	default: // it has ended, or is paused in a cgroup, and nothing writes
		ended = rec.State == api.StateStopped || rec.State == api.StateLost
		t.consistent = ended
	}
	req.Freeze = true
	t.Taken, t.result, err = s.images.Take(ctx, rec.ImageDigest, rec.Rootfs, func(ctx context.Context, chainID string) (layer.Result, error) {
		defer hold()()
		ctx, whole := unlessDeleted(ctx, doomed, &rec)
		result, frozen, err := s.differ.StoreDiff(ctx, req, chainID)
		t.consistent = t.consistent || frozen
		return layer.Result(result), whole(err)
	})
	if err != nil {
		return nil, err
	}
	// One that was started and has ended again has another deadline.
	if now, err := s.supervisor.Get(rec.ID); ended && (err != nil || now.State != rec.State || !now.Deadline.Equal(rec.Deadline)) {
		t.consistent = false
	}
	return t, nil
}

// release drops a layer that its consumers hold by now, or that has none.
func (s *core) release(ctx context.Context, t *taken) {
	if err := t.Release(ctx); err != nil {
		s.log.Warn("a layer that nobody needs is left until the next start", "error", err)
	}
}

// enforceSnapshots keeps to the limit of snapshots' bytes. One that is held, as the newest is,
// stays.
func (s *core) enforceSnapshots(ctx context.Context) {
	if err := s.own.EnforceSnapshots(context.WithoutCancel(ctx)); err != nil {
		s.log.Warn("the limit of snapshots could not be kept to", "error", err)
	}
}

// collectSnapshots removes snapshot layers that only deleted sandboxes stood on.
func (s *core) collectSnapshots(ctx context.Context) {
	if err := s.own.CollectSnapshotLayers(ctx); err != nil {
		s.log.Warn("a layer of a snapshot that nothing needs is left until the next start", "error", err)
	}
}

// TakeSnapshot keeps the files of a sandbox of any state.
func (s *API) TakeSnapshot(ctx context.Context, ref string, body api.TakeSnapshot) (api.Snapshot, error) {
	if err := errors.Join(validateName(body.Name), validateLabels(body.Labels), validateComment(body.Comment)); err != nil {
		return api.Snapshot{}, err
	}
	if body.Name != "" { // before anything stands still for it
		if _, err := s.images.InspectSnapshot(body.Name); err == nil {
			return api.Snapshot{}, class.Mark(snapshot.ErrExists, fmt.Errorf("snapshot %q: there is one of that name", body.Name))
		}
	}
	if err := s.spareDisk(ctx); err != nil {
		return api.Snapshot{}, err
	}
	t, err := s.take(ctx, ref)
	if err != nil {
		return api.Snapshot{}, fmt.Errorf("snapshot of sandbox %s: %w", ref, err)
	}
	defer s.release(ctx, t)
	rec := &t.of
	env, err := s.networks.PlainEnv(rec)
	if err != nil {
		return api.Snapshot{}, fmt.Errorf("snapshot of sandbox %s: %w", ref, err)
	}
	snap := &image.Snapshot{
		ID: snapshot.NewID(), Name: body.Name, Comment: body.Comment, Labels: body.Labels, Sandbox: rec.ID, SandboxName: rec.Name,
		Image: rec.Image, ImageEnv: rec.ImageEnv, Env: env, Cwd: rec.Cwd, User: rec.User, Profile: rec.Profile,
		Network: rec.Network, CreatedAt: time.Now().UTC(), Size: t.result.Size, Entries: t.result.Entries, Consistent: t.consistent,
	}
	if err := t.Keep(snap); err != nil {
		return api.Snapshot{}, fmt.Errorf("snapshot of sandbox %s: %w", ref, err)
	}
	s.enforceSnapshots(ctx)
	s.log.Info("snapshot taken", "id", snap.ID, "name", snap.Name, "sandbox", rec.ID, "bytes", snap.Size, "consistent", snap.Consistent)
	out, err := s.images.InspectSnapshot(snap.ID)
	if err == nil {
		s.publishSnapshot(api.ActionCreated, &out)
	}
	out.Skipped, out.SkippedMore = t.result.Skipped, t.result.SkippedMore
	return out, err
}

func validateComment(comment string) error {
	if len(comment) > 1024 || hasControl(comment) {
		return class.Invalidf("comment: at most 1024 bytes, without control characters")
	}
	return nil
}

// createFromSnapshot is CreateSandbox, of a snapshot.
func (s *API) createFromSnapshot(ctx context.Context, req *api.CreateSandbox) (api.Sandbox, error) {
	snap, release, err := s.images.AcquireSnapshot(ctx, req.Snapshot)
	if err != nil {
		return api.Sandbox{}, err
	}
	// When Create returns, the supervisor has the sandbox, or there is none.
	defer release()
	profileName := cmp.Or(req.Profile, snap.Profile)
	profile, defaults, err := s.opts.Profile(profileName)
	if err != nil {
		return api.Sandbox{}, class.Invalidf("profile %q: %w", profileName, err)
	}
	req.Network = network.Inherit(req.Network, snap.Network)
	from := origin{
		image: snap.Image, digest: snap.ImageDigest, snapshot: snap.ID, imageEnv: snap.ImageEnv, rootfs: snap.Rootfs,
		profile: profile, defaults: defaults, env: mergeEnv(profile.Env, snap.Env), cwd: snap.Cwd, user: snap.User,
	}
	if err := imageCommand(&from, req); err != nil {
		return api.Sandbox{}, err
	}
	r, err := s.request(&from, req)
	if err != nil {
		return api.Sandbox{}, err
	}
	return s.create(ctx, r)
}

// Fork makes new sandboxes with the files that one has now: all of them or, with an error, none.
// The layer that they stand on is no snapshot that could be listed: it goes with the last of them.
func (s *API) Fork(ctx context.Context, ref string, body api.ForkSandbox) (_ api.SandboxForked, err error) {
	if err := validateFork(&body); err != nil {
		return api.SandboxForked{}, err
	}
	if err := s.spareDisk(ctx); err != nil {
		return api.SandboxForked{}, err
	}
	t, err := s.take(ctx, ref)
	if err != nil {
		return api.SandboxForked{}, fmt.Errorf("fork sandbox %s: %w", ref, err)
	}
	defer s.release(ctx, t)
	request, err := s.forkRequest(t, &body)
	if err != nil {
		return api.SandboxForked{}, fmt.Errorf("fork sandbox %s: %w", ref, err)
	}
	// Before the first of them: a layer that is only pending would be taken away from them after a
	// crash.
	if err := t.Keep(nil); err != nil {
		return api.SandboxForked{}, fmt.Errorf("fork sandbox %s: %w", ref, err)
	}
	forks, err := s.createAll(ctx, request, body.Count, body.Names)
	if err != nil {
		return api.SandboxForked{}, fmt.Errorf("fork sandbox %s: %w", ref, err)
	}
	ids := make([]string, len(forks))
	for i := range forks {
		ids[i] = forks[i].ID
	}
	s.publish(api.Event{Type: api.EventSandbox, Action: api.ActionForked, Object: t.of.ID, Name: t.of.Name, Image: t.of.Image, Forks: ids, Labels: t.of.Labels})
	s.log.Info("sandbox forked", "id", t.of.ID, "forks", len(forks), "bytes", t.result.Size, "consistent", t.consistent)
	return api.SandboxForked{Sandboxes: forks, Consistent: t.consistent, Skipped: t.result.Skipped, SkippedMore: t.result.SkippedMore}, nil
}

func validateFork(body *api.ForkSandbox) error {
	if body.Count == 0 {
		body.Count = max(1, len(body.Names))
	}
	if body.Count < 1 || body.Count > maxForks {
		return class.Invalidf("count %d: must be between 1 and %d", body.Count, maxForks)
	}
	if body.Names != nil && len(body.Names) != body.Count {
		return class.Invalidf("names: there are %d, and %d sandboxes to be made", len(body.Names), body.Count)
	}
	for i, name := range body.Names {
		if name == "" || slices.Contains(body.Names[:i], name) {
			return class.Invalidf("names[%d] %q: empty, or given twice", i, class.Clip(name))
		}
		if err := validateName(name); err != nil {
			return err
		}
	}
	if err := errors.Join(validateLabels(body.Labels), validateEnv(body.Env)); err != nil {
		return err
	}
	if err := validateLifetime(body.Timeout); err != nil {
		return err
	}
	_, err := seconds("idle_timeout", body.IdleTimeout)
	return err
}

// forkRequest returns the request for each fork, without its name.
func (s *API) forkRequest(t *taken, body *api.ForkSandbox) (runtime.Request, error) {
	rec := &t.of
	settings := rec.Settings
	settings.Workspace = nil    // a fork's would have the changes of none
	settings.AutoRemove = false // forks are made to be kept
	settings.Mounts = slices.Clone(rec.Mounts)
	for i := range settings.Mounts {
		if m := &settings.Mounts[i]; m.Anonymous { // each has its own
			m.Source, m.Anonymous = "", false
		}
	}
	profile, _, err := s.profileOf(rec)
	if err != nil {
		return runtime.Request{}, err
	}
	env, err := s.networks.PlainEnv(rec)
	if err != nil {
		return runtime.Request{}, err
	}
	labels := make(map[string]string)
	maps.Copy(labels, rec.Labels)
	maps.Copy(labels, body.Labels)
	r, err := s.request(&origin{
		image: rec.Image, digest: rec.ImageDigest, imageEnv: rec.ImageEnv, rootfs: t.Rootfs, profile: profile, defaults: rec.Limits,
		env: env, cwd: rec.Cwd, user: rec.User, entrypoint: rec.Entrypoint, cmd: rec.Cmd,
	}, &api.CreateSandbox{
		Env: body.Env, Labels: labels, Limits: rec.HeldLimits(), Network: network.Inherit(api.Network{}, rec.Network), Command: rec.Command, TTY: rec.TTY, StdinOpen: rec.StdinOpen,
		Timeout: body.Timeout, IdleTimeout: cmp.Or(body.IdleTimeout, rec.IdleTimeout), Settings: settings,
	})
	return r, errors.Join(err, validateLabels(labels), validateEnv(r.Env)) // their number
}

// Rollback gives a sandbox the files of a snapshot of the same image in the place of its own.
func (s *API) Rollback(ctx context.Context, ref string, body api.RollbackSandbox) (api.Sandbox, error) {
	if body.Snapshot == "" || validateName(body.Snapshot) != nil {
		return api.Sandbox{}, class.Invalidf("snapshot %q: not an id or name", class.Clip(body.Snapshot))
	}
	rec, err := s.lookup(ref)
	if err != nil {
		return api.Sandbox{}, err
	}
	if err := checkRollback(&rec); err != nil {
		return api.Sandbox{}, err
	}
	snap, release, err := s.images.AcquireSnapshot(ctx, body.Snapshot)
	if err != nil {
		return api.Sandbox{}, err
	}
	defer s.collectSnapshots(ctx) // it may have been the last on another one
	defer release()
	if rec.Workspace != nil {
		return api.Sandbox{}, class.Mark(class.ErrUnreadable, fmt.Errorf(
			"roll back to snapshot %s: no snapshot holds the changes to the workspace of %s, which would be lost; apply them, and create a sandbox of the snapshot", body.Snapshot, rec.Name))
	}
	if err := runtime.CanRollBack(&rec, &snap.Rootfs); err != nil {
		return api.Sandbox{}, class.Mark(class.ErrUnreadable, fmt.Errorf("roll back to snapshot %s: %w", body.Snapshot, err))
	}
	profile, _, err := s.profileOf(&rec)
	if err != nil {
		return api.Sandbox{}, err
	}
	trust, err := s.networks.Restore(&rec)
	if err != nil {
		return api.Sandbox{}, err
	}
	rec, err = s.supervisor.Rollback(ctx, rec.ID, snap.Rootfs, snap.ID, runtime.StartRequest{Profile: profile, Idle: rec.Idle, Trust: trust})
	if err == nil {
		err = s.startAgain(ctx, &rec)
	}
	if err == nil && rec.State == api.StateRunning {
		s.publishPorts(&rec)
	}
	return rec.Shown(), err
}

// createAll makes count sandboxes, or on error none.
func (s *core) createAll(ctx context.Context, request runtime.Request, count int, names []string) ([]api.Sandbox, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	forks := make([]api.Sandbox, count)
	slots := make(chan struct{}, forksAtOnce)
	var wg sync.WaitGroup
	for i := range forks {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			if ctx.Err() != nil {
				return
			}
			r := request
			if names != nil {
				r.Name = names[i]
			}
			sb, err := s.create(ctx, r)
			if err != nil {
				cancel(err) // only the first counts: the others' may follow from it
				return
			}
			forks[i] = sb
		})
	}
	wg.Wait()
	err := context.Cause(ctx)
	if err == nil {
		return forks, nil
	}
	undo, stop := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer stop()
	for _, f := range forks {
		if f.ID == "" {
			continue
		}
		if derr := s.supervisor.Delete(undo, f.ID); derr != nil && !errors.Is(derr, runtime.ErrNotFound) {
			err = errors.Join(err, derr)
		}
		s.forgetSandbox(undo, f.ID) // a client may have started one already
	}
	return nil, err
}

// Snapshots lists all snapshots; ref is the sandbox whose are wanted, empty for all.
func (s *API) Snapshots(ref string) (api.SnapshotList, error) {
	if ref != "" {
		rec, err := s.lookup(ref)
		if err != nil {
			return api.SnapshotList{}, err
		}
		ref = rec.ID
	}
	list, err := s.images.Snapshots(ref)
	return api.SnapshotList{Snapshots: list}, err
}

// readLayer is an [snapshot.ReadLayer].
func (s *core) readLayer(ctx context.Context, source rootfs.Source, holes bool, w io.Writer) (layer.Result, error) {
	if s.differ == nil {
		return layer.Result{}, fmt.Errorf("%w: the engine does not read the changes of snapshots", runtime.ErrUnavailable)
	}
	result, err := s.differ.WriteDiff(ctx, runtime.DiffRequest{Rootfs: source, Layer: true, Limits: diffLimits(layer.NoLimits()), Holes: holes}, w)
	return layer.Result(result), err
}

// verifySnapshots reads every layer of a snapshot of any tenant and compares it with its state when
// it was taken: content, owners, modes, times, extended attributes and deletions. There is no other
// copy to compare it with.
func (s *API) verifySnapshots(ctx context.Context, out *api.ImagesVerified) error {
	tenants, err := s.own.Tenants()
	if err != nil {
		return err
	}
	checked := make(map[string]bool)
	for _, tenant := range tenants {
		if err := s.verifySnapshotsOf(ctx, tenant, checked, out); err != nil {
			return err
		}
	}
	return nil
}

func (s *API) verifySnapshotsOf(ctx context.Context, tenant string, checked map[string]bool, out *api.ImagesVerified) error {
	images := s.opts.Images(tenant)
	all, err := images.Snapshots("")
	if err != nil {
		return err
	}
	for _, known := range all {
		snap, release, err := images.AcquireSnapshot(ctx, known.ID)
		if errors.Is(err, snapshot.ErrNotFound) {
			continue // removed meanwhile
		} else if err != nil {
			return err
		}
		for i, id := range snap.Rootfs.Taken() {
			if checked[id] {
				continue
			}
			checked[id] = true
			out.Snapshots++
			want := snap.Rootfs.Snapshots[i]
			result, err := snapshot.ReadLayer(s.readLayer).ReadAs(ctx, snap.Rootfs.Below(len(snap.Rootfs.Snapshots)-1-i), want, io.Discard, func() error { return nil })
			switch {
			case ctx.Err() != nil:
				release()
				return ctx.Err()
			case err != nil:
			case result.DiffID != want:
				err = fmt.Errorf("the layer reads as %s, and was %s when it was taken", result.DiffID, want)
			}
			if err != nil {
				name := "snapshot " + cmp.Or(snap.Name, snap.ID)
				if tenant != s.caller.Tenant {
					name += fmt.Sprintf(" of tenant %q", tenant)
				}
				out.Problems = append(out.Problems, api.ImageProblem{Images: []string{name}, Digest: id, Detail: err.Error()})
			}
		}
		release()
	}
	return nil
}

// ImportSnapshot keeps a snapshot that was exported, be it by this daemon or another.
func (s *API) ImportSnapshot(ctx context.Context, r io.Reader, name string) (api.Snapshot, error) {
	if err := validateName(name); err != nil {
		return api.Snapshot{}, err
	}
	if err := s.spareDisk(ctx); err != nil {
		return api.Snapshot{}, err
	}
	snap, err := s.images.ImportSnapshot(ctx, r, name, func(snap *image.Snapshot) error {
		_, _, perr := s.opts.Profile(snap.Profile)
		err := errors.Join(validateName(snap.Name), validateName(snap.SandboxName), validateComment(snap.Comment), validateLabels(snap.Labels),
			validReference("image", snap.Image), validateVariables(snap.ImageEnv), validateEnv(snap.Env), validatePath("cwd", snap.Cwd), validateUser(snap.User), perr)
		if err != nil {
			return class.Mark(image.ErrInvalid, fmt.Errorf("what the snapshot says of itself: %w", err))
		}
		return nil
	}, s.readLayer)
	if err != nil {
		return api.Snapshot{}, fmt.Errorf("import snapshot: %w", err)
	}
	s.publishSnapshot(api.ActionImported, &snap)
	s.log.Info("snapshot imported", "id", snap.ID, "name", snap.Name, "bytes", snap.Size)
	return snap, nil
}

// Snapshot returns one snapshot.
func (s *API) Snapshot(ref string) (api.Snapshot, error) { return s.images.InspectSnapshot(ref) }

// RemoveSnapshot removes a snapshot and returns the bytes that this frees.
func (s *API) RemoveSnapshot(ctx context.Context, ref string) (int64, error) {
	snap, err := s.images.InspectSnapshot(ref)
	if err != nil {
		return 0, err
	}
	freed, err := s.images.RemoveSnapshot(ctx, snap.ID)
	if err == nil {
		s.publishSnapshot(api.ActionRemoved, &snap)
	}
	return freed, err
}

// ExportSnapshot writes a snapshot as an archive.
func (s *API) ExportSnapshot(ctx context.Context, ref string, w io.Writer) error {
	return s.images.ExportSnapshot(ctx, ref, s.readLayer, w)
}
