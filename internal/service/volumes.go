package service

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/volume"
	"github.com/sandboxd/sandboxd/runtime"
)

// maxVolumeName is the length of a volume's name; one that is made up has 64.
const maxVolumeName = 128

// errNoVolumes means that the engine cannot keep volumes.
var errNoVolumes = fmt.Errorf("%w: the engine keeps no volumes", runtime.ErrUnavailable)

// validateVolumeName accepts the empty name, which means "make one up".
func validateVolumeName(name string) error {
	if len(name) > maxVolumeName {
		return class.Invalidf("volume %q: longer than %d characters", class.Clip(name), maxVolumeName)
	}
	for i, r := range name {
		alnum := r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9'
		if !alnum && (i == 0 || !strings.ContainsRune("_.-", r)) {
			return class.Invalidf("volume %q: letters, digits and \"_.-\" only, a letter or digit first; a directory of the host has the type bind", class.Clip(name))
		}
	}
	return nil
}

// addVolumes adds the image's VOLUMEs to the mounts of a request. Those at, in or around a place of
// which the request disposes itself, and those where no mount may be, stay a part of the root.
func addVolumes(r *runtime.Request, from *origin) {
	for _, target := range from.volumes {
		target = path.Clean("/" + target)
		m := api.Mount{Type: api.MountVolume, Target: target}
		more := api.Settings{Mounts: append(slices.Clip(r.Mounts), m), Tmpfs: r.Tmpfs}
		if w := r.Workspace; w != nil && (within(target, w.Target) || within(w.Target, target)) {
			continue
		}
		for i := range more.Mounts {
			more.Mounts[i].Anonymous = false
		}
		if validateMounts(&more, from.profile.Mounts) == nil {
			r.Mounts = more.Mounts
		}
	}
}

// prepareVolumes makes the volumes that a request names and that do not exist, and keeps all of
// them until release is called. Those that it has made and that no sandbox has then are removed.
func (s *core) prepareVolumes(ctx context.Context, r *runtime.Request) (release func(context.Context), err error) {
	var releases []func()
	var made []volume.Record
	release = func(ctx context.Context) {
		for _, f := range releases {
			f()
		}
		for _, rec := range made {
			s.removeUnused(ctx, &rec)
		}
	}
	defer func() {
		if err != nil {
			release(ctx)
		}
	}()
	mounts := append([]api.Mount{}, r.Mounts...)
	for i := range mounts {
		m := &mounts[i]
		if m.Type != api.MountVolume {
			continue
		}
		if s.volumer == nil {
			return nil, errNoVolumes
		}
		m.Anonymous = m.Source == ""
		rec, created, free, err := s.volumes.Create(volume.Record{Tenant: r.Tenant, Name: m.Source, Bound: m.Anonymous})
		if err != nil {
			return nil, err
		}
		m.Source = rec.Name
		if releases = append(releases, free); created {
			made = append(made, rec)
			s.publishVolume(api.ActionCreated, &rec)
		}
	}
	if len(releases) > 0 {
		r.Mounts = mounts
	}
	return release, nil
}

// publishVolume records a change of a volume.
func (s *core) publishVolume(action api.EventAction, rec *volume.Record) {
	s.events.Publish(rec.Tenant, api.Event{Type: api.EventVolume, Action: action, Object: rec.Name, Labels: rec.Labels})
}

// volumesOf returns the volumes of a sandbox that is about to start. Its record keeps them from
// being removed.
func (s *core) volumesOf(tenant string, set *api.Settings) ([]runtime.VolumeMount, error) {
	var all []runtime.VolumeMount
	for i := range set.Mounts {
		m := &set.Mounts[i]
		if m.Type != api.MountVolume {
			continue
		}
		rec, err := s.volumes.Get(tenant, m.Source)
		if err != nil {
			return nil, err
		}
		v := runtime.VolumeMount{
			ID: rec.ID, Name: rec.Name, Target: m.Target, ReadOnly: m.ReadOnly, NoCopy: m.NoCopy, Own: m.Anonymous, Limit: limitOf(&rec),
		}
		if m.UID != nil && m.GID != nil {
			v.UID, v.GID = *m.UID, *m.GID
		}
		all = append(all, v)
	}
	return all, nil
}

func limitOf(rec *volume.Record) runtime.VolumeUsage {
	return runtime.VolumeUsage{Bytes: rec.Size, Inodes: rec.Inodes}
}

// volumeUsers returns the sandboxes of each volume of a tenant, by the volume's name.
func (s *core) volumeUsers(tenant string) map[string][]api.SandboxRef {
	users := make(map[string][]api.SandboxRef)
	for _, rec := range s.supervisor.List(runtime.Filter{Tenant: tenant}) {
		seen := make(map[string]bool)
		for _, m := range rec.Mounts {
			if m.Type == api.MountVolume && !seen[m.Source] {
				seen[m.Source] = true
				users[m.Source] = append(users[m.Source], api.SandboxRef{ID: rec.ID, Name: rec.Name})
			}
		}
	}
	return users
}

// removeVolume removes a volume that no sandbox has, and its files.
func (s *core) removeVolume(ctx context.Context, tenant, name string) error {
	if s.volumer == nil {
		return errNoVolumes
	}
	var gone volume.Record
	err := s.volumes.Remove(tenant, name, func(rec *volume.Record) error {
		gone = *rec
		if users := s.volumeUsers(tenant)[name]; len(users) > 0 {
			return class.Mark(volume.ErrInUse, fmt.Errorf("sandbox %s has it", namesOf(users)))
		}
		return s.volumer.RemoveVolume(ctx, rec.ID)
	})
	if err == nil {
		s.publishVolume(api.ActionRemoved, &gone)
	}
	return err
}

// namesOf lists the first sandboxes.
func namesOf(users []api.SandboxRef) string {
	const most = 5
	var names []string
	for _, u := range users[:min(most, len(users))] {
		names = append(names, fmt.Sprintf("%s (%s)", u.Name, u.ID))
	}
	if more := len(users) - most; more > 0 {
		names = append(names, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(names, ", ")
}

// removeUnused removes a volume unless something uses it.
func (s *core) removeUnused(ctx context.Context, rec *volume.Record) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stepTimeout)
	defer cancel()
	err := s.removeVolume(ctx, rec.Tenant, rec.Name)
	if err != nil && !errors.Is(err, volume.ErrInUse) && !errors.Is(err, volume.ErrNotFound) && !errors.Is(err, runtime.ErrVolumeInUse) {
		s.log.Warn("a volume that no sandbox has is left, trying again", "name", rec.Name, "tenant", rec.Tenant, "error", err)
	}
}

// collectVolumes removes the volumes whose last sandbox has been deleted, and which go with it.
func (s *core) collectVolumes(ctx context.Context) {
	users := make(map[string]map[string][]api.SandboxRef) // by tenant
	for _, rec := range s.volumes.All() {
		if !rec.Bound {
			continue
		}
		if users[rec.Tenant] == nil {
			users[rec.Tenant] = s.volumeUsers(rec.Tenant)
		}
		if len(users[rec.Tenant][rec.Name]) == 0 {
			s.removeUnused(ctx, &rec)
		}
	}
}

// shownVolume returns a volume for clients.
func shownVolume(rec *volume.Record, users []api.SandboxRef) api.Volume {
	if users == nil {
		users = []api.SandboxRef{}
	}
	return api.Volume{
		Name: rec.Name, Labels: rec.Labels, CreatedAt: rec.CreatedAt, Size: rec.Size, Inodes: rec.Inodes,
		Anonymous: rec.Anonymous, Bound: rec.Bound, Sandboxes: users,
	}
}

// CreateVolume makes a volume of the caller's tenant, or returns one that is like it.
func (s *API) CreateVolume(ctx context.Context, req api.CreateVolume) (_ api.Volume, created bool, err error) {
	rec, created, release, err := s.createVolume(ctx, req)
	if err != nil {
		return api.Volume{}, false, err
	}
	release()
	return shownVolume(&rec, s.volumeUsers(rec.Tenant)[rec.Name]), created, nil
}

func (s *API) createVolume(ctx context.Context, req api.CreateVolume) (rec volume.Record, created bool, release func(), err error) {
	if s.volumer == nil {
		return rec, false, nil, errNoVolumes
	}
	if err := errors.Join(validateVolumeName(req.Name), validateLabels(req.Labels)); err != nil {
		return rec, false, nil, err
	}
	if req.Size < 0 || req.Inodes < 0 {
		return rec, false, nil, class.Invalidf("volume %s: size and inodes must not be negative", class.Clip(req.Name))
	}
	if err := s.spareDisk(ctx); err != nil {
		return rec, false, nil, err
	}
	rec, created, release, err = s.volumes.Create(volume.Record{Tenant: s.caller.Tenant, Name: req.Name, Labels: req.Labels, Size: req.Size, Inodes: req.Inodes})
	if created {
		s.publishVolume(api.ActionCreated, &rec)
	}
	return rec, created, release, err
}

// VolumeFilter selects volumes of the caller's tenant; the zero value selects all.
type VolumeFilter struct {
	Labels map[string]string // all of them with these values
	// Dangling selects those that a sandbox has (false), or that none has (true); nil all.
	Dangling *bool
}

// Volumes returns the selected volumes, by name.
func (s *API) Volumes(filter VolumeFilter) api.VolumeList {
	users := s.volumeUsers(s.caller.Tenant)
	list := api.VolumeList{Volumes: []api.Volume{}}
	for _, rec := range s.volumes.List(s.caller.Tenant) {
		if hasLabels(rec.Labels, filter.Labels) && (filter.Dangling == nil || *filter.Dangling == (len(users[rec.Name]) == 0)) {
			list.Volumes = append(list.Volumes, shownVolume(&rec, users[rec.Name]))
		}
	}
	return list
}

func hasLabels(labels, wanted map[string]string) bool {
	for k, v := range wanted {
		if got, ok := labels[k]; !ok || got != v {
			return false
		}
	}
	return true
}

// Volume returns one volume, and counts its files.
func (s *API) Volume(ctx context.Context, name string) (api.Volume, error) {
	rec, err := s.volumes.Get(s.caller.Tenant, name)
	if err != nil {
		return api.Volume{}, err
	}
	v := shownVolume(&rec, s.volumeUsers(rec.Tenant)[rec.Name])
	used, unknown, err := s.measureVolume(ctx, &rec)
	v.Usage = &api.VolumeUsage{Bytes: used.Bytes, Inodes: used.Inodes, Unknown: unknown}
	return v, err
}

// measureVolume counts the files of a volume, or says why it cannot.
func (s *core) measureVolume(ctx context.Context, rec *volume.Record) (used runtime.VolumeUsage, unknown string, err error) {
	if s.volumer == nil {
		return used, "", errNoVolumes
	}
	used, err = s.volumer.MeasureVolume(ctx, rec.ID)
	switch {
	case ctx.Err() != nil:
		return used, "", context.Cause(ctx)
	case errors.Is(err, runtime.ErrUnavailable):
		return used, "", err
	case err != nil:
		return runtime.VolumeUsage{}, class.Clip(err.Error()), nil
	}
	return used, "", nil
}

// RemoveVolume removes a volume that no sandbox has.
func (s *API) RemoveVolume(ctx context.Context, name string) error {
	return s.removeVolume(ctx, s.caller.Tenant, name)
}

// PruneVolumes removes volumes that no sandbox has.
func (s *API) PruneVolumes(ctx context.Context, req api.PruneVolumes) (api.VolumesRemoved, error) {
	out := api.VolumesRemoved{Removed: []string{}}
	if err := validateLabels(req.Labels); err != nil {
		return out, err
	}
	users := s.volumeUsers(s.caller.Tenant)
	var errs []error
	for _, rec := range s.volumes.List(s.caller.Tenant) {
		if len(users[rec.Name]) > 0 || !req.All && !rec.Anonymous || api.Kept(rec.Labels) || !hasLabels(rec.Labels, req.Labels) {
			continue
		}
		used, _, err := s.measureVolume(ctx, &rec)
		if err == nil {
			err = s.removeVolume(ctx, rec.Tenant, rec.Name)
		}
		switch {
		case ctx.Err() != nil:
			return out, errors.Join(append(errs, context.Cause(ctx))...)
		case err == nil:
			out.Removed = append(out.Removed, rec.Name)
			out.Bytes += used.Bytes
		case errors.Is(err, volume.ErrInUse), errors.Is(err, volume.ErrNotFound), errors.Is(err, runtime.ErrVolumeInUse): // by now
		default:
			errs = append(errs, err)
		}
	}
	s.log.Info("volumes were pruned", "removed", len(out.Removed), "bytes", out.Bytes)
	return out, errors.Join(errs...)
}

// ExportVolume writes the files of a volume as a tar.
func (s *API) ExportVolume(ctx context.Context, name string, w io.Writer) error {
	rec, release, err := s.volumes.Hold(s.caller.Tenant, name)
	if err != nil {
		return err
	}
	defer release()
	if s.volumer == nil {
		return errNoVolumes
	}
	if _, err := s.volumer.WriteVolume(ctx, rec.ID, w); err != nil {
		return fmt.Errorf("export volume %s: %w", name, err)
	}
	return nil
}

// ImportVolume makes a volume, if there is none of the name, and fills it with the files of a tar,
// plain or compressed.
func (s *API) ImportVolume(ctx context.Context, r io.Reader, req api.CreateVolume) (_ api.VolumeImported, err error) {
	rec, created, release, err := s.createVolume(ctx, req)
	if err != nil {
		return api.VolumeImported{}, err
	}
	done := false
	defer func() {
		if release(); created && !done {
			s.removeUnused(ctx, &rec)
		}
	}()
	result, err := s.fillVolume(ctx, &rec, r)
	if err != nil {
		return api.VolumeImported{}, fmt.Errorf("import volume %s: %w", rec.Name, err)
	}
	done = true
	s.publishVolume(api.ActionImported, &rec)
	return api.VolumeImported{
		Volume: shownVolume(&rec, s.volumeUsers(rec.Tenant)[rec.Name]), Files: result.Entries, Bytes: result.Size,
		Skipped: result.Skipped, SkippedMore: result.SkippedMore,
	}, nil
}

// fillVolume passes a stream on to the engine. A stream that breaks off must not be taken for one
// that has ended: the engine sees its end only if it was read to its end.
func (s *core) fillVolume(ctx context.Context, rec *volume.Record, r io.Reader) (result runtime.DiffResult, err error) {
	in, out, err := os.Pipe()
	if err != nil {
		return result, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	filled := make(chan error, 1)
	go func() {
		var err error
		result, err = s.volumer.FillVolume(ctx, rec.ID, in, limitOf(rec))
		// The engine's copy is closed too, so that the copying below finds the pipe broken.
		filled <- errors.Join(err, in.Close())
	}()
	_, cerr := io.Copy(out, r)
	if cerr != nil && !errors.Is(cerr, syscall.EPIPE) {
		cancel(cerr)
		<-filled //nolint:errcheck // it follows from the stream's
		return result, errors.Join(cerr, out.Close())
	}
	err = errors.Join(out.Close(), <-filled)
	if errors.Is(err, layer.ErrInvalid) {
		err = class.Mark(class.ErrArchive, err)
	}
	return result, err
}
