package service

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/runtime"
)

// viewTimeout bounds the life of a view.
const viewTimeout = time.Hour

// reader returns the API and the sandbox that a request reads files through: the sandbox itself, or
// a view of one that has ended. Done must be called.
//
// Only init reads files of a sandbox, and one that has ended has no init. So a view is a sandbox of
// the same files without any program, which exists for one request and is in no list.
func (s *API) reader(ctx context.Context, ref string) (_ *API, id string, done func(), err error) {
	rec, err := s.lookup(ref)
	if err != nil {
		return nil, "", nil, err
	}
	if rec.State != api.StateStopped && rec.State != api.StateLost {
		return s, rec.ID, func() {}, nil
	}
	if err := s.spareDisk(ctx); err != nil {
		return nil, "", nil, err
	}
	t, err := s.take(ctx, rec.ID)
	if err != nil {
		return nil, "", nil, fmt.Errorf("read files of sandbox %s: %w", rec.Name, err)
	}
	defer s.release(ctx, t)
	profile, defaults, err := s.opts.Profile(defaultProfile)
	if err == nil {
		err = t.Keep(nil) // see Fork
	}
	if err != nil {
		return nil, "", nil, err
	}
	r := newRequest(s.caller.Tenant, &origin{
		image: rec.Image, digest: rec.ImageDigest, imageEnv: rec.ImageEnv, rootfs: t.Rootfs, profile: profile, defaults: defaults,
	})
	r.Cwd, r.Ephemeral, r.Timeout, r.IdleTimeout = "/", true, viewTimeout, viewTimeout
	view, err := s.create(ctx, r)
	if err != nil {
		s.collectSnapshots(ctx)
		return nil, "", nil, fmt.Errorf("read files of sandbox %s: %w", rec.Name, err)
	}
	return s.inBuild(), view.ID, func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
		defer cancel()
		if err := s.supervisor.Delete(ctx, view.ID); err != nil && !errors.Is(err, runtime.ErrNotFound) {
			s.log.Warn("the view of an ended sandbox is left until the next start", "id", view.ID, "error", err)
		}
		s.forgetSandbox(ctx, view.ID)
		s.collectSnapshots(ctx)
	}, nil
}
