package service

import (
	"cmp"
	"context"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/rootfs"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/pool"
	"github.com/sandboxd/sandboxd/runtime"
)

// origin is the root file system of a new sandbox and the defaults that come with it: of an image,
// a snapshot, a forked sandbox or a build.
type origin struct {
	image, digest, snapshot string
	imageEnv                []string
	rootfs                  rootfs.Source
	profile                 runtime.Profile
	defaults                api.Limits
	env                     []string
	cwd, user               string
	entrypoint, cmd         []string
	stopSignal              string
	volumes                 []string // places of the image's VOLUMEs
	health                  *api.HealthCheck
}

// request returns the request for a sandbox of this origin with the values that a valid client's
// request asks for. It is the only place that makes a [runtime.Request].
func (s *API) request(from *origin, ask *api.CreateSandbox) (_ runtime.Request, err error) {
	r := newRequest(s.caller.Tenant, from)
	r.Name, r.Labels, r.Limits = ask.Name, ask.Labels, ask.Limits
	r.Command, r.TTY, r.StdinOpen, r.Stopped = ask.Command, ask.TTY, ask.StdinOpen, ask.Stopped
	r.Entrypoint, r.Cmd = programOf(from, ask.Entrypoint)
	r.Settings = ask.Settings
	r.StopSignal = cmp.Or(ask.StopSignal, from.stopSignal)
	if r.HealthCheck, err = healthCheck(ask.HealthCheck, from.health, len(r.Command) > 0); err != nil {
		return r, err
	}
	if err := raiseNofile(&r.Limits, from.defaults.Nofile, r.Rlimits["nofile"].Hard); err != nil {
		return r, err
	}
	if err := checkCapabilities(&from.profile, &r.Settings); err != nil {
		return r, err
	}
	if r.Ports, err = s.networks.CheckPorts(s.caller.Tenant, ask.Network, ask.Ports); err != nil {
		return r, err
	}
	if r.Network, err = s.checkNetwork(ask.Network); err != nil {
		return r, err
	}
	r.Env = mergeEnv(from.env, ask.Env)
	r.Cwd = cmp.Or(ask.Cwd, from.cwd)
	if r.User, err = programUser(&from.profile, ask.User, from.user); err != nil {
		return r, err
	}
	if firstBind(r.Mounts) >= 0 && s.caller.Tenant != "" {
		return r, class.Mark(class.ErrInvalid, errTenantMounts)
	}
	if err := fillMounts(&r.Settings, &from.profile, r.User); err != nil {
		return r, err
	}
	if err := s.workspace(&r, ask.Cwd != ""); err != nil {
		return r, err
	}
	addVolumes(&r, from)
	if r.Timeout, err = s.lifetime(ask.Timeout); err != nil {
		return r, err
	}
	r.IdleTimeout, err = seconds("idle_timeout", ask.IdleTimeout)
	return r, err
}

// newRequest returns the request for a sandbox of which no client has asked anything, as a pool
// parks it.
func newRequest(tenant string, from *origin) runtime.Request {
	return runtime.Request{
		Tenant: tenant, Image: from.image, ImageDigest: from.digest, Snapshot: from.snapshot, ImageEnv: from.imageEnv,
		Rootfs: from.rootfs, Profile: from.profile, Defaults: from.defaults,
		Settings: api.Settings{StopSignal: from.stopSignal},
	}
}

// poolImage acquires an image for a pool. Parked sandboxes are of the daemon's own tenant.
func (s *core) poolImage(ctx context.Context, reference string) (*pool.Image, error) {
	img, release, err := s.own.Acquire(ctx, reference)
	if err != nil {
		return nil, err
	}
	return &pool.Image{Digest: img.Digest, Release: release, Request: func(name string) (runtime.Request, error) {
		profile, defaults, err := s.opts.Profile(name)
		if err != nil {
			return runtime.Request{}, err
		}
		from := imageOrigin(reference, img, profile, defaults)
		r := newRequest("", &from)
		// Programs that wait in the sandbox for a claim see these, as those after it do.
		r.Env, r.Cwd = mergeEnv(from.env), from.cwd
		r.User, err = programUser(&profile, "", from.user)
		return r, err
	}}, nil
}
