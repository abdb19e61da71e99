package service

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"reflect"
	goruntime "runtime"
	"runtime/metrics"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/runtime"
)

// CreateSandbox makes a sandbox of an image that is stored.
func (s *API) CreateSandbox(ctx context.Context, req api.CreateSandbox) (api.Sandbox, error) {
	if err := validateCreate(&req); err != nil {
		return api.Sandbox{}, err
	}
	if err := s.spareDisk(ctx); err != nil {
		return api.Sandbox{}, err
	}
	profileName := cmp.Or(req.Profile, defaultProfile)
	profile, defaults, err := s.opts.Profile(profileName)
	if err != nil {
		return api.Sandbox{}, class.Invalidf("profile %q: %w", profileName, err)
	}
	if req.Snapshot != "" {
		return s.createFromSnapshot(ctx, &req)
	}
	reference := cmp.Or(req.Image, api.HostImage)
	img, release, err := s.images.Acquire(ctx, reference)
	if err != nil {
		return api.Sandbox{}, fmt.Errorf("image %q: %w", reference, err)
	}
	// When Create returns, the supervisor has the sandbox, or there is none.
	defer release()
	from := imageOrigin(reference, img, profile, defaults)
	if err := imageCommand(&from, &req); err != nil {
		return api.Sandbox{}, class.Mark(image.ErrInvalid, fmt.Errorf("image %q: %w", reference, err))
	}
	r, err := s.request(&from, &req)
	if err != nil {
		return api.Sandbox{}, err
	}
	// The image's values are checked like the client's: they are kept, shown and used. The client may
	// overrule them.
	err = errors.Join(validatePath("working directory of the image", r.Cwd), validateUser(r.User), validateHealth(r.HealthCheck))
	if err != nil {
		return api.Sandbox{}, class.Mark(image.ErrInvalid, fmt.Errorf("image %q: %w", reference, err))
	}
	return s.create(ctx, r)
}

// imageOrigin returns the origin of sandboxes of an image.
func imageOrigin(reference string, img *image.Image, profile runtime.Profile, defaults api.Limits) origin {
	return origin{
		image: reference, digest: img.Digest, imageEnv: img.Config.Env, rootfs: img.Rootfs, profile: profile, defaults: defaults,
		env: profile.Env, cwd: cmp.Or(strings.TrimSuffix(img.Config.WorkingDir, "/"), profile.Cwd, "/"), user: img.Config.User,
		entrypoint: img.Config.Entrypoint, cmd: img.Config.Cmd, stopSignal: stopSignal(img.Config), health: imageHealth(&img.Config),
		volumes: img.Config.Volumes,
	}
}

// programOf returns ENTRYPOINT and CMD of a sandbox from those of its origin and a request's
// entrypoint, which replaces both.
func programOf(from *origin, entrypoint []string) (entry, cmd []string) {
	switch {
	case len(entrypoint) == 1 && entrypoint[0] == "":
		return nil, nil
	case len(entrypoint) > 0:
		return entrypoint, nil
	}
	if both := slices.Concat(from.entrypoint, from.cmd); len(both) == 0 || validateCommand(both) != nil {
		return nil, nil // the record does not keep what cannot be run
	}
	return from.entrypoint, from.cmd
}

// imageCommand makes a request that asks for the image's command ask for a command, with the
// request's arguments in the place of CMD if there are any.
func imageCommand(from *origin, req *api.CreateSandbox) error {
	if !req.ImageCommand {
		return nil
	}
	entry, cmd := from.entrypoint, from.cmd
	if len(req.Entrypoint) > 0 {
		entry, cmd = programOf(from, req.Entrypoint)
	}
	if len(req.Command) > 0 {
		cmd = req.Command
	}
	req.Command = slices.Concat(entry, cmd)
	switch {
	case len(req.Command) == 0 && len(req.Entrypoint) > 0:
		return class.Invalidf("command: nothing is left to run: an entrypoint replaces the image's CMD too")
	case len(req.Command) == 0:
		return errors.New("it says no command: it has neither ENTRYPOINT nor CMD")
	}
	return validateCommand(req.Command)
}

// stopSignal returns the STOPSIGNAL of an image; empty if there is none or no such signal.
func stopSignal(c image.Config) string {
	if runtime.SignalNumber(c.StopSignal) == 0 {
		return ""
	}
	return c.StopSignal
}

// GetSandbox returns the sandbox with this id or name.
func (s *API) GetSandbox(ref string) (api.Sandbox, error) {
	rec, err := s.lookup(ref)
	return rec.Shown(), err
}

// SandboxFilter selects sandboxes of the caller's tenant; the zero value selects all.
type SandboxFilter struct {
	Labels map[string]string // all of them with these values
	State  api.SandboxState
	Limit  int // zero means no limit
}

// ListSandboxes returns the selected sandboxes, oldest first.
func (s *API) ListSandboxes(filter SandboxFilter) (api.SandboxList, error) {
	switch filter.State {
	case "", api.StateCreating, api.StateRunning, api.StatePaused, api.StateStopped, api.StateLost:
	default:
		return api.SandboxList{}, class.Invalidf("state %q: must be creating, running, paused, stopped or lost", class.Clip(string(filter.State)))
	}
	if filter.Limit < 0 {
		return api.SandboxList{}, class.Invalidf("limit %d: must not be negative", filter.Limit)
	}
	list := api.SandboxList{Sandboxes: []api.Sandbox{}}
	for _, rec := range s.supervisor.List(runtime.Filter{Tenant: s.caller.Tenant, Labels: filter.Labels, State: filter.State}) {
		if s.visible(&rec) && (filter.Limit == 0 || len(list.Sandboxes) < filter.Limit) {
			list.Sandboxes = append(list.Sandboxes, rec.Shown())
		}
	}
	return list, nil
}

// UpdateSandbox changes a running sandbox as a whole, or not at all. Of one that does not run, the
// network alone can be changed.
func (s *API) UpdateSandbox(ctx context.Context, ref string, req api.UpdateSandbox) (api.Sandbox, error) {
	if err := validateUpdate(&req); err != nil {
		return api.Sandbox{}, err
	}
	lifetime, err := s.lifetime(req.Timeout)
	if err != nil {
		return api.Sandbox{}, err
	}
	rec, err := s.lookup(ref)
	if err != nil {
		return api.Sandbox{}, err
	}
	s.parked.drop(rec.ID) // it was started with the limits of before
	if req.Network != nil {
		release, err := s.rejoining.take(ctx, rec.Tenant)
		if err != nil {
			return api.Sandbox{}, fmt.Errorf("change the network: %w", err)
		}
		defer release()
		if rec, err = s.lookup(rec.ID); err != nil {
			return api.Sandbox{}, err
		}
	}
	if req.Restart != nil {
		if err := mayRestart(&rec, *req.Restart); err != nil {
			return api.Sandbox{}, err
		}
		defer s.reconsiderRestart(rec.ID)
	}
	restartAlone := req.Restart != nil && reflect.DeepEqual(req, api.UpdateSandbox{Restart: req.Restart})
	if restartAlone || !isLive(&rec) && (req.Network != nil || req.Restart != nil) && reflect.DeepEqual(req, api.UpdateSandbox{Network: req.Network, Restart: req.Restart}) {
		rec, _, err := s.supervisor.Amend(rec.ID, func(rec *runtime.Record) (err error) {
			if req.Restart != nil {
				rec.Restart = *req.Restart
			}
			if req.Network != nil {
				rec.Network, err = s.changedNetwork(rec, *req.Network)
			}
			return err
		})
		return rec.Shown(), err
	}
	if req.Network != nil {
		net, err := s.changedNetwork(&rec, *req.Network)
		if err != nil {
			return api.Sandbox{}, err
		}
		req.Network = &net
	}
	was := rec.Network
	rec, err = s.supervisor.Update(ctx, rec.ID, func(rec *runtime.Record) (explicit api.Limits, err error) {
		_, defaults, err := s.profileOf(rec)
		if err != nil {
			return explicit, err
		}
		rec.Limits, explicit = req.Limits.Apply(rec.Limits, defaults)
		for k, v := range req.Labels {
			if v == nil {
				delete(rec.Labels, k)
			} else {
				rec.Labels[k] = *v
			}
		}
		if lifetime > 0 {
			rec.Deadline = time.Now().UTC().Add(lifetime)
		}
		if req.IdleTimeout > 0 {
			rec.IdleTimeout = req.IdleTimeout
		}
		if was = rec.Network; req.Network != nil {
			rec.Network = *req.Network
		}
		if req.Restart != nil {
			rec.Restart = *req.Restart
		}
		return explicit, validateLabels(rec.Labels) // their number
	})
	if err != nil {
		return api.Sandbox{}, err
	}
	if req.Network != nil {
		if err := s.networks.SetNetwork(ctx, &rec, was); err != nil {
			return api.Sandbox{}, errors.Join(err, s.restoreNetwork(rec.ID, was))
		}
	}
	return rec.Shown(), nil
}

// Stats returns the kernel's counters of the sandbox with this id or name.
func (s *API) Stats(ctx context.Context, ref string) (api.Stats, error) {
	rec, err := s.lookup(ref)
	if err != nil {
		return api.Stats{}, err
	}
	return s.statsOf(ctx, &rec)
}

// DeleteSandbox ends the sandbox with this id or name and removes everything of it, and the layers
// of snapshots that nothing else stands on.
func (s *API) DeleteSandbox(ctx context.Context, ref string) error {
	rec, err := s.lookup(ref)
	if err == nil {
		err = s.supervisor.Delete(ctx, rec.ID)
	}
	if err != nil {
		return err
	}
	s.forgetSandbox(ctx, rec.ID)
	s.collectSnapshots(ctx) // whatever rec says: it may have been rolled back meanwhile
	return nil
}

// System describes this daemon.
func (s *API) System(ctx context.Context) (api.SystemInfo, error) {
	if err := s.administers(); err != nil {
		return api.SystemInfo{}, err
	}
	info := api.SystemInfo{
		Version:   s.opts.Version,
		UID:       os.Getuid(),
		Rootless:  os.Getuid() != 0,
		DataDir:   s.opts.DataDir,
		Socket:    s.opts.Socket,
		Sandboxes: s.supervisor.Count(),
		Pools:     s.showParked(s.pools.States()),
		Confined:  s.opts.Confined,

		Goroutines: goruntime.NumGoroutine(),
		HeapLive:   heapLive(),
	}
	info.ErrandsGone = s.opts.BrokerGone != nil && s.opts.BrokerGone()
	if s.describer != nil {
		engine, err := s.describer.Describe(ctx)
		if err != nil {
			return api.SystemInfo{}, fmt.Errorf("describe the engine: %w", err)
		}
		info.Launcher, info.Enforced = engine.PID, engine.Enforced
	}
	return info, nil
}

// heapLive is how many bytes were in use when the garbage collector last looked.
func heapLive() int64 {
	samples := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(samples)
	if samples[0].Value.Kind() != metrics.KindUint64 {
		return 0 // a later Go may not have it
	}
	return int64(min(samples[0].Value.Uint64(), math.MaxInt64))
}

// Profiles are those that a sandbox can ask for, by name.
func (s *API) Profiles() []api.Profile { return s.opts.Profiles }

// GetProfile returns one of them.
func (s *API) GetProfile(name string) (api.Profile, error) {
	for _, p := range s.opts.Profiles {
		if p.Name == name {
			return p, nil
		}
	}
	return api.Profile{}, class.Mark(class.ErrNoProfile, fmt.Errorf("profile %q: there is none of this name", class.Clip(name)))
}

// Checks returns the results of the host's checks.
func (s *API) Checks(ctx context.Context) ([]api.Check, error) {
	if err := s.administers(); err != nil {
		return nil, err
	}
	checks := []api.Check{}
	if s.opts.Checks != nil {
		checks = s.opts.Checks(ctx)
	}
	if s.opts.StartGateway != nil {
		checks = append(checks, s.networks.CheckGateway())
	}
	return checks, nil
}
