package service

import (
	"context"
	"errors"
	"fmt"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/runtime"
)

// AllStats returns the kernel's counters of the caller's sandboxes that run or are paused: of those
// with the ids or names, or of all if there are none. It does not count as a use of them.
func (s *API) AllStats(ctx context.Context, refs []string) (api.StatsList, error) {
	var recs []runtime.Record
	for _, ref := range refs {
		rec, err := s.lookup(ref)
		if err != nil {
			return api.StatsList{}, err
		}
		recs = append(recs, rec)
	}
	if len(refs) == 0 {
		recs = s.supervisor.List(runtime.Filter{Tenant: s.caller.Tenant})
	}
	list := api.StatsList{Sandboxes: []api.SandboxStats{}}
	for i := range recs {
		rec := &recs[i]
		if !s.visible(rec) || len(refs) == 0 && rec.State != api.StateRunning && rec.State != api.StatePaused {
			continue
		}
		st, err := s.statsOf(ctx, rec)
		switch {
		case len(refs) == 0 && (errors.Is(err, runtime.ErrNotFound) || errors.Is(err, runtime.ErrState)):
			continue // it has ended meanwhile
		case err != nil:
			return api.StatsList{}, err
		}
		list.Sandboxes = append(list.Sandboxes, api.SandboxStats{ID: rec.ID, Name: rec.Name, Stats: st})
	}
	return list, nil
}

// byCgroup is the value of [api.Enforced] for limits that a cgroup enforces.
const byCgroup = "cgroup"

// statsOf returns the counters of a sandbox, with the limits that the kernel enforces.
func (s *API) statsOf(ctx context.Context, rec *runtime.Record) (api.Stats, error) {
	st, err := s.supervisor.Stats(ctx, rec.ID)
	if err != nil {
		return st, err
	}
	if rec.HasGateway() {
		st.Network = s.networks.Stats(rec.ID)
	}
	if m := rec.Limits.Memory; m > 0 && rec.Enforced.Memory == byCgroup && st.Memory != nil {
		st.Memory.Limit = &m
	}
	if p := rec.Limits.Pids; p > 0 && rec.Enforced.Pids == byCgroup && st.Pids != nil {
		st.Pids.Limit = &p
	}
	return st, nil
}

// DiskUsage returns the disk space of the caller's objects. The files of sandboxes are read for it.
// It does not count as a use of them.
func (s *API) DiskUsage(ctx context.Context) (api.DiskUsage, error) {
	stored, err := s.images.Usage()
	if err != nil {
		return api.DiskUsage{}, fmt.Errorf("measure images: %w", err)
	}
	u := api.DiskUsage{Images: stored.Images, BuildCache: stored.Steps, Snapshots: stored.Snapshots, Files: []api.SandboxFiles{}}
	if err := s.volumeUsage(ctx, &u); err != nil {
		return api.DiskUsage{}, fmt.Errorf("measure volumes: %w", err)
	}
	caches, err := s.caches.usage(s.caller.Tenant)
	if err != nil {
		return api.DiskUsage{}, fmt.Errorf("measure the caches of builds: %w", err)
	}
	u.BuildCache.Count += caches.Count
	u.BuildCache.Bytes += caches.Bytes
	u.BuildCache.Reclaimable += caches.Reclaimable
	for _, rec := range s.supervisor.List(runtime.Filter{Tenant: s.caller.Tenant}) {
		if !s.visible(&rec) {
			continue
		}
		f := api.SandboxFiles{ID: rec.ID, Name: rec.Name, State: rec.State}
		switch err := s.measureFiles(ctx, &f); {
		case ctx.Err() != nil:
			return api.DiskUsage{}, context.Cause(ctx)
		case errors.Is(err, runtime.ErrNotFound):
			continue // deleted meanwhile
		case err != nil:
			f.Unknown = class.Clip(err.Error())
		}
		logs, bytes, err := s.logs.Usage(rec.ID)
		if err != nil {
			return api.DiskUsage{}, err
		}
		f.Log = bytes
		u.Files = append(u.Files, f)
		u.Sandboxes.Count++
		u.Sandboxes.Bytes += f.Bytes
		if logs > 0 {
			u.Logs.Count++
			u.Logs.Bytes += f.Log
		}
		if !prunable(&rec) {
			u.Sandboxes.Active++
			if logs > 0 {
				u.Logs.Active++
			}
			continue
		}
		u.Sandboxes.Reclaimable += f.Bytes
		u.Logs.Reclaimable += f.Log
	}
	return u, nil
}

// measureFiles sums up the files of a sandbox's own layer.
func (s *API) measureFiles(ctx context.Context, f *api.SandboxFiles) error {
	req, rec, doomed, err := s.diffRequest(f.ID)
	if err != nil {
		return err
	}
	req.Limits = diffLimits(layer.NoLimits())
	ctx, whole := unlessDeleted(ctx, doomed, &rec)
	_, err = s.differ.ListDiff(ctx, req, func(c api.Change) error {
		f.Files++
		f.Bytes += c.Size
		return nil
	})
	return whole(err)
}

// volumeUsage adds the volumes of the caller's tenant.
func (s *API) volumeUsage(ctx context.Context, u *api.DiskUsage) error {
	u.VolumeFiles = []api.VolumeFiles{}
	users := s.volumeUsers(s.caller.Tenant)
	for _, rec := range s.volumes.List(s.caller.Tenant) {
		used, unknown, err := s.measureVolume(ctx, &rec)
		if err != nil {
			return err
		}
		f := api.VolumeFiles{Name: rec.Name, Bytes: used.Bytes, Inodes: used.Inodes, Sandboxes: len(users[rec.Name]), Unknown: unknown}
		u.VolumeFiles = append(u.VolumeFiles, f)
		u.Volumes.Count++
		if u.Volumes.Bytes += f.Bytes; f.Sandboxes > 0 {
			u.Volumes.Active++
		} else if !api.Kept(rec.Labels) {
			u.Volumes.Reclaimable += f.Bytes
		}
	}
	return nil
}
