package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	goruntime "runtime"
	"runtime/metrics"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/image/snapshot"
	"github.com/sandboxd/sandboxd/internal/guest/host"
	"github.com/sandboxd/sandboxd/internal/rootfs"
	"github.com/sandboxd/sandboxd/runtime"
)

// Images is the image store: *image.Service, and in tests a map.
type Images interface {
	Pull(ctx context.Context, reference string, opts image.PullOptions) (*image.Image, error)
	Push(ctx context.Context, reference string, opts image.PushOptions) (*image.Image, error)
	Commit(ctx context.Context, opts image.CommitOptions) (*image.Image, layer.Result, error)
	Import(ctx context.Context, r io.Reader, opts image.ImportOptions) ([]*image.Image, error)
	Export(ctx context.Context, reference, format string, w io.Writer) error
	List(ctx context.Context) ([]api.Image, error)
	Inspect(ctx context.Context, reference string) (api.ImageDetail, error)
	Verify(ctx context.Context) (api.ImagesVerified, error)
	Tag(ctx context.Context, source, target string) (*image.Image, error)
	Remove(ctx context.Context, reference string, force bool) (api.ImagesRemoved, error)
	Prune(ctx context.Context, all bool) (api.ImagesRemoved, error)
	// Enforce keeps to the limit of all images' bytes, if there is one.
	Enforce(ctx context.Context) error
	// Limits are what an image may have.
	Limits() layer.Limits

	// The snapshots, and the layers of forks.
	Take(ctx context.Context, digest string, base rootfs.Source, make func(ctx context.Context, chainID string) (layer.Result, error)) (*image.Taken, layer.Result, error)
	Snapshots(of string) ([]api.Snapshot, error)
	InspectSnapshot(ref string) (api.Snapshot, error)
	AcquireSnapshot(ctx context.Context, ref string) (snap *image.Snapshot, release func(), err error)
	RemoveSnapshot(ctx context.Context, ref string) (int64, error)
	PruneSnapshots(ctx context.Context, before time.Time, labels map[string]string) (api.SnapshotsRemoved, error)
	ExportSnapshot(ctx context.Context, ref string, read snapshot.ReadLayer, w io.Writer) error
	ImportSnapshot(ctx context.Context, r io.Reader, name string, check func(*image.Snapshot) error, read snapshot.ReadLayer) (api.Snapshot, error)
	// CollectSnapshotLayers removes layers that only deleted sandboxes stood on; EnforceSnapshots keeps to the limit of snapshots' bytes.
	CollectSnapshotLayers(ctx context.Context) error
	EnforceSnapshots(ctx context.Context) error

	// Draft begins to make an image.
	Draft(platform string, names []string) (*image.Draft, error)

	// Acquire keeps an image from being removed until release is called. SetHolders says how to find out which images
	// sandboxes have from then on.
	Acquire(ctx context.Context, reference string) (img *image.Image, release func(), err error)
	SetHolders(f func() map[string][]string)
	// OnRemoval says whom to tell of layers that are about to be removed.
	OnRemoval(f func(ctx context.Context, layers []string))
}

// Service is everything that the API can do, free of HTTP. Its errors are of the classes in errors.go.
type Service struct {
	opts       Options
	confined   int // what Options.Confine returned
	supervisor *runtime.Supervisor
	images     Images
	log        *slog.Logger
	builds     chan struct{} // one for each build under way
	execs      *execs
	logs       *mainLogs
	pools      *pools
}

// CreateSandbox makes a sandbox of an image that is stored.
func (s *Service) CreateSandbox(ctx context.Context, req api.CreateSandbox) (api.Sandbox, error) {
	if err := validateCreate(&req); err != nil {
		return api.Sandbox{}, err
	}
	profileName := cmp.Or(req.Profile, defaultProfile)
	profile, defaults, err := s.opts.Profile(profileName)
	if err != nil {
		return api.Sandbox{}, invalidf("profile %q: %w", profileName, err)
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
	r := runtime.Request{
		Name:        req.Name,
		Image:       reference,
		ImageDigest: img.Digest,
		ImageEnv:    img.Config.Env,
		Rootfs:      img.Rootfs,
		Env:         mergeEnv(profile.Env, req.Env),
		Cwd:         cmp.Or(req.Cwd, strings.TrimSuffix(img.Config.WorkingDir, "/"), profile.Cwd, "/"),
		Labels:      req.Labels,
		Profile:     profile,
		Defaults:    defaults,
		Limits:      req.Limits,
		Command:     req.Command,
		TTY:         req.TTY,
		StdinOpen:   req.StdinOpen,
	}
	if req.ImageCommand {
		if r.Command, err = imageCommand(img.Config, req.Command); err != nil {
			return api.Sandbox{}, classify(image.ErrInvalid, fmt.Errorf("image %q: %w", reference, err))
		}
	}
	if r.User, err = programUser(&profile, req.User, img.Config.User); err != nil {
		return api.Sandbox{}, err
	}
	// The image's word is checked like the client's: it is kept, shown and used. The client may overrule it.
	err = errors.Join(validatePath("working directory of the image", r.Cwd), validateUser(r.User))
	if err != nil {
		return api.Sandbox{}, classify(image.ErrInvalid, fmt.Errorf("image %q: %w", reference, err))
	}
	if r.Timeout, err = seconds("timeout", req.Timeout); err != nil {
		return api.Sandbox{}, err
	}
	if r.IdleTimeout, err = seconds("idle_timeout", req.IdleTimeout); err != nil {
		return api.Sandbox{}, err
	}
	return s.create(ctx, r)
}

// imageCommand is what an image runs, with args in the place of its CMD if there are any.
func imageCommand(c image.Config, args []string) ([]string, error) {
	if len(args) == 0 {
		args = c.Cmd
	}
	argv := slices.Concat(c.Entrypoint, args)
	if len(argv) == 0 {
		return nil, errors.New("it says no command: it has neither ENTRYPOINT nor CMD")
	}
	return argv, validateCommand(argv)
}

// GetSandbox returns the sandbox with this id or name.
func (s *Service) GetSandbox(ref string) (api.Sandbox, error) {
	rec, err := s.supervisor.Get(ref)
	return rec.Sandbox, err
}

// ListSandboxes returns the sandboxes that the filter chooses, oldest first.
func (s *Service) ListSandboxes(filter runtime.Filter) (api.SandboxList, error) {
	switch filter.State {
	case "", api.StateCreating, api.StateRunning, api.StatePaused, api.StateStopped, api.StateLost:
	default:
		return api.SandboxList{}, invalidf("state %q: must be creating, running, paused, stopped or lost", clip(string(filter.State)))
	}
	if filter.Limit < 0 {
		return api.SandboxList{}, invalidf("limit %d: must not be negative", filter.Limit)
	}
	list := api.SandboxList{Sandboxes: []api.Sandbox{}}
	limit := filter.Limit
	filter.Limit = 0 // those that are not shown do not count
	for _, rec := range s.supervisor.List(filter) {
		if !rec.Ephemeral && (limit == 0 || len(list.Sandboxes) < limit) {
			list.Sandboxes = append(list.Sandboxes, rec.Sandbox)
		}
	}
	return list, nil
}

// UpdateSandbox changes a running sandbox as a whole, or not at all.
func (s *Service) UpdateSandbox(ctx context.Context, ref string, req api.UpdateSandbox) (api.Sandbox, error) {
	if err := validateUpdate(&req); err != nil {
		return api.Sandbox{}, err
	}
	rec, err := s.supervisor.Update(ctx, ref, func(rec *runtime.Record) (explicit api.Limits, err error) {
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
		if req.Timeout > 0 {
			rec.Deadline = time.Now().UTC().Add(time.Duration(req.Timeout * float64(time.Second)))
		}
		if req.IdleTimeout > 0 {
			rec.IdleTimeout = req.IdleTimeout
		}
		return explicit, validateLabels(rec.Labels) // their number
	})
	if err != nil {
		return api.Sandbox{}, err
	}
	return rec.Sandbox, nil
}

// Stats is what the kernel counts of the sandbox with this id or name.
func (s *Service) Stats(ctx context.Context, ref string) (api.Stats, error) {
	return s.supervisor.Stats(ctx, ref)
}

// DeleteSandbox ends the sandbox with this id or name and removes everything of it, and the layers of snapshots that nothing
// else stands on.
func (s *Service) DeleteSandbox(ctx context.Context, ref string) error {
	rec, err := s.supervisor.Get(ref)
	if err == nil {
		err = s.supervisor.Delete(ctx, ref)
	}
	if err != nil {
		return err
	}
	s.forgetSandbox(ctx, rec.ID)
	s.settleSnapshots(ctx) // whatever rec says: it may have been rolled back meanwhile
	return nil
}

// System says what this daemon is.
func (s *Service) System(ctx context.Context) (api.SystemInfo, error) {
	info := api.SystemInfo{
		Version:   s.opts.Version,
		UID:       os.Getuid(),
		Rootless:  os.Getuid() != 0,
		DataDir:   s.opts.DataDir,
		Socket:    s.opts.socketPath(),
		Sandboxes: s.supervisor.Count(),
		Pools:     s.poolStates(),
		Confined:  s.confined,

		Goroutines: goruntime.NumGoroutine(),
		HeapLive:   heapLive(),
	}
	info.ErrandsGone = s.opts.ErrandsGone != nil && s.opts.ErrandsGone()
	if s.opts.LauncherInfo != nil {
		pid, enforced, err := s.opts.LauncherInfo(ctx)
		if err != nil {
			return api.SystemInfo{}, fmt.Errorf("ask the launcher: %w", err)
		}
		info.Launcher, info.Enforced = pid, enforced
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
func (s *Service) Profiles() []api.Profile { return s.opts.Profiles }

// GetProfile returns one of them.
func (s *Service) GetProfile(name string) (api.Profile, error) {
	for _, p := range s.opts.Profiles {
		if p.Name == name {
			return p, nil
		}
	}
	return api.Profile{}, classify(errNoProfile, fmt.Errorf("profile %q: there is none of this name", clip(name)))
}

// Checks says what this host can give and what it lacks.
func (s *Service) Checks(ctx context.Context) []api.Check {
	if s.opts.Checks == nil {
		return []api.Check{}
	}
	return s.opts.Checks(ctx)
}

// silenceGrace is how long a sandbox whose init broke off may take to be seen as ended before it is killed for it.
const silenceGrace = 2 * time.Second

// gone turns an error of the guest protocol into what the caller should hear, when init is lost: either the sandbox has
// ended, or its init has been taken over and is ended now. Other errors pass.
func (s *Service) gone(ctx context.Context, lease *runtime.Lease, err error) error {
	if !errors.Is(err, host.ErrLost) {
		return err
	}
	wait := time.NewTimer(silenceGrace)
	defer wait.Stop()
	select {
	case <-lease.Gone:
	case <-wait.C:
		s.log.Warn("the init of a sandbox does not keep to the protocol, killing the sandbox", "id", lease.Record.ID, "error", err)
		// Whatever ended the request, the sandbox has to go.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stepTimeout)
		defer cancel()
		if kerr := lease.Kill(ctx, "its init did not keep to the protocol"); kerr != nil {
			s.log.Error("sandbox could not be killed", "id", lease.Record.ID, "error", kerr)
		}
	}
	return s.ended(lease)
}

// ended says why the sandbox of a lease does not run any more.
func (s *Service) ended(lease *runtime.Lease) error {
	reason := "it was deleted"
	if rec, err := s.supervisor.Get(lease.Record.ID); err == nil && rec.Reason != "" {
		reason = rec.Reason
	}
	return classify(ErrGone, fmt.Errorf("sandbox %s ended during the request: %s", lease.Record.Name, reason))
}

// withGone is a context that ends also when the sandbox does. Its cause is then errEnded.
func withGone(ctx context.Context, lease *runtime.Lease) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := lease.AfterGone(func() { cancel(errEnded) })
	return ctx, func() {
		stop()
		cancel(context.Canceled)
	}
}

var errEnded = errors.New("the sandbox has ended")
