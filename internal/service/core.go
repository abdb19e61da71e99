// Package service is everything that the API can do, free of any protocol: the one place where
// images, profiles and the runtime meet.
//
// A face (internal/httpapi, and later those of other protocols) asks [Service.For] for the [API] of
// a caller. It passes requests of package api, and gets answers of package api or errors of the
// classes in package class, which it maps itself.
//
// # The life of a main process
//
//	create, start    the launcher starts the sandbox; the record has the command and no exit
//	detach           init starts it; its descriptors are left with the launcher; then the request is answered
//	process ── pipe ── splice ──▶ memfd ──▶ logs/<sandbox>/n.log    the log's last line has the offset in the output
//	exit             noted in the memfd; the log is completed; the record gets the exit, and the sandbox is killed;
//	                 then the launcher keeps no more of the exec than the memory
//
// A daemon that starts after a crash finds one of three states. If nothing was left with the
// launcher, it starts the process. If the process runs, the log continues where it ends. If the
// process has ended, the remaining steps are done once more.
package service

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/image/snapshot"
	"github.com/sandboxd/sandboxd/internal/agents"
	"github.com/sandboxd/sandboxd/internal/codehook"
	"github.com/sandboxd/sandboxd/internal/egress"
	"github.com/sandboxd/sandboxd/internal/rootfs"
	"github.com/sandboxd/sandboxd/internal/secrets"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/events"
	"github.com/sandboxd/sandboxd/internal/service/exec"
	"github.com/sandboxd/sandboxd/internal/service/execlog"
	"github.com/sandboxd/sandboxd/internal/service/guests"
	"github.com/sandboxd/sandboxd/internal/service/mainlog"
	"github.com/sandboxd/sandboxd/internal/service/network"
	"github.com/sandboxd/sandboxd/internal/service/pool"
	"github.com/sandboxd/sandboxd/internal/service/share"
	"github.com/sandboxd/sandboxd/internal/service/work"
	"github.com/sandboxd/sandboxd/internal/volume"
	"github.com/sandboxd/sandboxd/interpreter/codepolicy"
	"github.com/sandboxd/sandboxd/netns/policy"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/runtime/cgroup"
)

const (
	defaultProfile = "default"
	buildProfile   = "build"

	// stepTimeout bounds each step that must be tried although no client waits for it any more.
	stepTimeout = 10 * time.Second
	// closeTimeout bounds the end of all sandboxes.
	closeTimeout = 60 * time.Second
	// stepDeleteTimeout bounds the deletion of the sandbox of a build's step, which may have installed
	// gigabytes in small files.
	stepDeleteTimeout = 10 * time.Minute
	// agentTimeout bounds the time in which agent runs collect their output when the daemon stops.
	agentTimeout = 30 * time.Second
)

// Images is the image store as one tenant sees it: *image.Service, and in tests a map.
type Images interface {
	Pull(ctx context.Context, reference string, opts image.PullOptions) (*image.Image, error)
	Push(ctx context.Context, reference string, opts image.PushOptions) (*image.Image, error)
	CheckRegistry(ctx context.Context, address string, insecure bool, auth *api.RegistryAuth) (refusal string, err error)
	Commit(ctx context.Context, opts image.CommitOptions) (*image.Image, layer.Result, error)
	Import(ctx context.Context, r io.Reader, opts image.ImportOptions) ([]*image.Image, error)
	Export(ctx context.Context, reference, format string, w io.Writer) error
	List(ctx context.Context) ([]api.Image, error)
	Inspect(ctx context.Context, reference string) (api.ImageDetail, error)
	Verify(ctx context.Context) (api.ImagesVerified, error)
	Tag(ctx context.Context, source, target string) (*image.Image, error)
	Remove(ctx context.Context, reference string, force bool) (api.ImagesRemoved, error)
	Prune(ctx context.Context, all bool) (api.ImagesRemoved, error)
	// Tenants returns the tenants that have objects in the store.
	Tenants() ([]string, error)
	// Usage returns the disk space of all objects.
	Usage() (image.Usage, error)
	// Enforce keeps to the limit of all images' bytes, if there is one.
	Enforce(ctx context.Context) error
	// Limits returns the unpack limits.
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
	// CollectSnapshotLayers removes layers that only deleted sandboxes stood on; EnforceSnapshots
	// enforces the limit of snapshots' bytes.
	CollectSnapshotLayers(ctx context.Context) error
	EnforceSnapshots(ctx context.Context) error

	// Draft begins an image.
	Draft(platform string, names []string) (*image.Draft, error)

	// Acquire keeps an image from being removed until release is called. SetHolders sets the function
	// that returns the images that sandboxes hold.
	Acquire(ctx context.Context, reference string) (img *image.Image, release func(), err error)
	SetHolders(f func() map[string][]string)
	// OnRemoval sets the function that is called before layers are removed.
	OnRemoval(f func(ctx context.Context, layers []string))
}

// RetentionLimits are the limits for unused objects. Zero values mean no limit.
type RetentionLimits struct {
	// EndedAge is the maximum age of sandboxes that have ended, EndedLimit their maximum number,
	// SnapshotAge the maximum age of unused snapshots. See [retention].
	EndedAge    time.Duration
	EndedLimit  int
	SnapshotAge time.Duration
	// AgentAge is the maximum age of idle agent runs, AgentLimit their maximum size in bytes. See
	// [agents.Retention].
	AgentAge   time.Duration
	AgentLimit int64
}

// Options configure a service. A field without a stated default is required.
//
// To add one: give it a default that is right for nearly every host, document it here, and add a
// flag only if it differs between daemons of one host. To retire one: keep the field, ignore it and
// note since when, for one release.
type Options struct {
	Version    string
	DataDir    string // holds state.db
	RuntimeDir string // holds the control sockets; made with mode 0700
	Socket     string // path of the API socket, for clients that ask
	// Engine runs the sandboxes. The service uses its abilities Differ, DescriptorStore and Describer,
	// if it has them: see [runtime.As].
	Engine runtime.Engine
	// Images returns the image store as a tenant sees it.
	Images func(tenant string) Images
	// Profile finds a profile by name, and the default limits of its sandboxes.
	Profile func(name string) (runtime.Profile, api.Limits, error)
	// Profiles are shown to clients, by name. Default: none.
	Profiles []api.Profile

	// Confined is the version of Landlock that confines the daemon; zero means none.
	Confined int
	// Checks probes the host. Default: no checks.
	Checks func(ctx context.Context) []api.Check
	// CheckMount fails with [class.ErrMount] if a source of the host may not be mounted, and makes its
	// missing directories if it is asked to. Default: nothing is checked before a start.
	CheckMount func(ctx context.Context, source string, create bool) error
	// BrokerGone reports whether the broker process has ended. Default: there is no broker.
	BrokerGone func() bool
	// Agents hosts agent runs. Default: none.
	Agents *agents.Host

	// StartGateway starts the gateway of networks, when the first sandbox has one. It adds Start and
	// Log to the configuration. Default: there are no networks but [api.NetworkNone].
	StartGateway func(ctx context.Context, cfg egress.Config) (*egress.Gateway, error)
	// NetworkCeiling bounds all network policies. Default: see [network.Options].
	NetworkCeiling *policy.Policy
	// CodePolicy judges all code runs, and CodeHook the runs that policies let pass. Default: none.
	CodePolicy *codepolicy.Policy
	CodeHook   *codehook.Hook
	// Secrets are the secrets in the operator's file, by name. Default: none.
	Secrets map[string]secrets.Secret
	// Sockets are the names of the host's Unix sockets that policies may open, and DialSocket connects
	// to one. Default: none.
	Sockets    []string
	DialSocket func(ctx context.Context, name string) (*net.UnixConn, error)

	RetentionLimits

	DiskReserve  int64         // bytes that are left free on the disk of DataDir; negative means 5%, at most 1 GiB; default: none
	Room         runtime.Room  // for the limits of all sandboxes; default: no bound
	IODevice     cgroup.Device // device of DataDir; default: none, and io limits are refused
	Pools        []Pool        // sandboxes that are kept ready; default: none
	SpareMemory  func() error  // fails if no sandbox may be parked; default: see [pool.Options]
	LogSize      int64         // bytes of one file of a sandbox's log; default 4 MiB, at least 256 KiB
	LogFiles     int           // files of one sandbox's log; default 3
	LogLimit     int64         // bytes of all logs; default 2 GiB
	VolumeLimit  int64         // bytes of the sizes of all volumes; default: no limit
	MaxSandboxes int           // default 1000
	Timeout      time.Duration // default time of a sandbox; default one hour
	IdleTimeout  time.Duration // default idle time of a sandbox; default ten minutes
	Log          *slog.Logger  // default: discarded

	// RetainEvery is the interval of the retention rounds; default one minute.
	RetainEvery time.Duration
	// InterruptGrace is the time in which an interrupted run of a context may end, before its
	// interpreter is killed; default five seconds.
	InterruptGrace time.Duration
}

// Pool describes a warm pool.
type Pool = pool.Spec

// core is the state that all callers share.
type core struct {
	opts       Options
	retention  atomic.Pointer[RetentionLimits] // in effect
	supervisor *runtime.Supervisor
	own        Images // the store as the daemon's own tenant sees it
	log        *slog.Logger
	builds     buildSlots
	caches     buildCaches
	disk       disk
	execs      *exec.Registry
	contexts   contexts
	results    *share.Quota // of bytes of results of contexts
	toolchains toolchains
	checks     tenantTurns // large checks of code
	restarts   restarts
	monitored  monitored
	finals     finals
	work       *work.Group // goroutines that outlive the requests that start them
	guests     guests.Guests
	logs       *mainlog.Store
	pools      *pool.Pools
	parked     *parkedSpares
	networks   *network.Networks
	events     *events.Log
	volumes    *volume.Store

	rejoining tenantTurns // changes of networks on records, and what follows from each

	// The engine's abilities, nil if it lacks them.
	differ    runtime.Differ    // else diff, commit, snapshots and RUN fail
	describer runtime.Describer // else the engine's pid and defaults are unknown
	volumer   runtime.Volumer   // else there are no volumes
}

// Service is the whole that all faces share.
type Service struct{ core *core }

// New opens the records and adopts the sandboxes and detached execs that the engine runs.
// [Service.Close] undoes it.
func New(ctx context.Context, opts Options) (*Service, error) {
	if opts.Engine == nil || opts.Images == nil || opts.Profile == nil || opts.DataDir == "" || opts.RuntimeDir == "" {
		return nil, errors.New("start service: Engine, Images, Profile, DataDir and RuntimeDir are needed")
	}
	s := &core{
		opts: opts, own: opts.Images(""), log: cmp.Or(opts.Log, slog.New(slog.DiscardHandler)),
		results: resultsQuota(),
	}
	s.work = work.New(context.WithoutCancel(ctx))
	s.retention.Store(&opts.RetentionLimits)
	s.caches.dir = filepath.Join(opts.DataDir, "build-caches")
	s.disk.reserve, s.disk.closing = opts.DiskReserve, make(chan struct{})
	s.disk.measure = func() (Disk, error) { return MeasureDisk(opts.DataDir) }
	s.differ, _ = runtime.As[runtime.Differ](opts.Engine)
	descriptors, _ := runtime.As[runtime.DescriptorStore](opts.Engine)
	s.describer, _ = runtime.As[runtime.Describer](opts.Engine)
	s.volumer, _ = runtime.As[runtime.Volumer](opts.Engine)
	networker, _ := runtime.As[runtime.Networker](opts.Engine)
	var err error
	s.networks, err = network.Open(network.Options{
		Dir: filepath.Join(opts.DataDir, "flows"), NamedDir: filepath.Join(opts.DataDir, "networks"), PortDir: filepath.Join(opts.RuntimeDir, "ports"), Engine: networker, Start: opts.StartGateway, Ceiling: opts.NetworkCeiling, Secrets: opts.Secrets,
		Sockets: opts.Sockets, DialSocket: opts.DialSocket, Holder: s.holder,
		Store: secrets.NewStore(filepath.Join(opts.DataDir, "secrets")), Log: s.log,
	})
	if err != nil {
		return nil, fmt.Errorf("start service: %w", err)
	}
	if s.volumes, err = volume.Open(filepath.Join(opts.DataDir, "volumes"), opts.VolumeLimit); err != nil {
		return nil, fmt.Errorf("start service: %w", err)
	}
	s.events = events.Open(events.Options{Dir: filepath.Join(opts.DataDir, "events"), Log: s.log})
	specs := slices.Clone(opts.Pools)
	for i := range specs {
		specs[i].Profile = cmp.Or(specs[i].Profile, defaultProfile)
		if err := CheckPool(&specs[i]); err != nil {
			return nil, fmt.Errorf("start service: pool of image %s: %w", specs[i].Image, err)
		}
	}
	s.parked = newParkedSpares(specs)
	s.pools = pool.New(pool.Options{Pools: specs, Acquire: s.poolImage, Filled: s.parked.changed, SpareMemory: opts.SpareMemory, Log: s.log})
	s.supervisor, err = runtime.Open(ctx, opts.DataDir, opts.Engine, runtime.Options{
		RuntimeDir:   opts.RuntimeDir,
		MaxSandboxes: opts.MaxSandboxes,
		Timeout:      opts.Timeout,
		IdleTimeout:  opts.IdleTimeout,
		IODevice:     opts.IODevice,
		Room:         opts.Room,
		PoolChanged:  s.pools.Changed,
		Exercise:     pool.Exercise,
		Claiming:     s.parked.claiming,
		Changed:      s.events.Publish,
		Volumes:      s.volumesOf,
		Log:          s.log,
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start service: %w", err), s.events.Close())
	}
	s.pools.Use(s.supervisor)
	s.logs = mainlog.NewStore(mainlog.Options{
		Dir: filepath.Join(opts.DataDir, "logs"), FileSize: opts.LogSize, Files: opts.LogFiles, Limit: opts.LogLimit, Log: s.log, Tenant: s.tenantOf,
	})
	s.sweepLogs()
	s.guests = guests.Guests{Supervisor: s.supervisor, Log: s.log}
	s.execs = exec.New(exec.Options{
		Supervisor: s.supervisor, Descriptors: descriptors, Events: s.events, Logs: s.logs, Work: s.work, Log: s.log,
		Launch: s.launch, Used: s.parked.drop, Adopt: s.adoptContext, Adopted: s.resumeContexts,
		MainEnded: func(id string) { s.considerRestart(id, false) },
	})
	s.adoptExecs(ctx)
	s.adoptNetworks()
	// Images may be removed from here on: running sandboxes have been adopted, so their images are
	// known.
	s.own.SetHolders(s.holders)
	s.own.OnRemoval(s.pools.Unpark)
	return &Service{s}, nil
}

// Maintain fills the pools and enforces the limits of images, snapshots, ended sandboxes and agent
// runs until ctx ends.
func (s *Service) Maintain(ctx context.Context) {
	c := s.core
	every := cmp.Or(c.opts.RetainEvery, retainEvery)
	tasks := []func(){
		func() { c.enforceImages(ctx) },
		func() { c.collectVolumes(ctx) },
		func() { c.pools.Fill(ctx) },
		func() { c.keepParkedSpares(ctx) },
		func() { c.retain(ctx, every) },
		func() { c.retainRuns(ctx, every) },
	}
	done := make(chan struct{})
	for _, task := range tasks {
		go func() {
			defer func() { done <- struct{}{} }()
			task()
		}()
	}
	for range tasks {
		<-done
	}
}

// enforceImages enforces the limits of images and snapshots once: the limits may be new.
func (s *core) enforceImages(ctx context.Context) {
	switch err := s.own.Enforce(ctx); {
	case err == nil:
	case ctx.Err() != nil:
		s.log.Info("images over the limit are left to the next start", "error", err)
	default:
		s.log.Warn("limit of images is not enforced", "error", err)
	}
	// The last daemon may have left layers that it was about to give to a fork, or to remove.
	if err := s.own.EnforceSnapshots(ctx); err != nil && ctx.Err() == nil {
		s.log.Warn("unused snapshot layers are left", "error", err)
	}
}

// Sandboxes returns the number of sandboxes of all tenants.
func (s *Service) Sandboxes() int { return s.core.supervisor.Count() }

// CloseAgents ends the agent runs. It is called while they can still use the API to collect their
// output.
func (s *Service) CloseAgents(ctx context.Context) {
	if s.core.opts.Agents == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, agentTimeout)
	defer cancel()
	if err := s.core.opts.Agents.Close(ctx); err != nil {
		s.core.log.Warn("not all agent runs have ended by themselves", "error", err)
	}
}

// startingPoll is the time after which a sandbox that was just being started is stopped again.
const startingPoll = 50 * time.Millisecond

// StopAll stops the running sandboxes of all tenants and keeps their files, as a shutdown with
// stop_sandboxes does.
// No request may be under way.
func (s *Service) StopAll(ctx context.Context) error {
	c := s.core
	ctx, cancel := context.WithTimeout(ctx, closeTimeout)
	defer cancel()
	c.restarts.stop() // nothing starts again meanwhile
	all := c.supervisor.List(runtime.Filter{AllTenants: true})
	errs := make([]error, len(all))
	var stopping sync.WaitGroup
	for i, rec := range all {
		stopping.Go(func() {
			_, err := c.supervisor.Stop(ctx, rec.ID, api.DefaultGrace*time.Second)
			for errors.Is(err, runtime.ErrState) && ctx.Err() == nil { // its policy is starting it
				select {
				case <-time.After(startingPoll):
				case <-ctx.Done():
				}
				_, err = c.supervisor.Stop(ctx, rec.ID, api.DefaultGrace*time.Second)
			}
			if err == nil {
				err = c.execs.AwaitReport(ctx, rec.ID)
			}
			if !errors.Is(err, runtime.ErrNotFound) {
				errs[i] = err
			}
		})
	}
	stopping.Wait()
	return errors.Join(errs...)
}

// Close leaves detached execs to the next daemon and ends all sandboxes, unless keep is set. No
// request may be under way.
func (s *Service) Close(ctx context.Context, keep bool) error {
	s.core.restarts.stop()
	s.core.work.Stop(execlog.ErrHanded)
	s.core.execs.Close()
	s.core.disk.stop()
	ctx, cancel := context.WithTimeout(ctx, closeTimeout)
	defer cancel()
	err := errors.Join(s.core.supervisor.Close(ctx, keep), s.core.networks.Close(), s.core.events.Close())
	if !keep {
		s.core.sweepLogs()
	}
	return err
}

// Rights extend a caller beyond the objects of its tenant.
type Rights uint

// Administer allows operations on the host, on the daemon and on objects of all tenants together.
// Without it a caller may work with the objects of its tenant.
const Administer Rights = 1

// Caller identifies the origin of a request. A face fills it in from credentials that it has
// verified.
type Caller struct {
	Tenant string // empty: the daemon's own
	UID    int    // of the calling process
	Rights Rights
}

// API is the service as one caller sees it: objects of other tenants do not exist.
type API struct {
	*core
	caller Caller
	images Images // of the caller's tenant
	build  bool   // sees the sandboxes of builds, too
}

// For returns the API of a caller.
func (s *Service) For(caller Caller) *API {
	return &API{core: s.core, caller: caller, images: s.core.opts.Images(caller.Tenant)}
}

// tenantOf returns the tenant of the sandbox with this id; empty if there is none.
func (s *core) tenantOf(id string) string {
	rec, err := s.supervisor.Get(id)
	if err != nil {
		return ""
	}
	return rec.Tenant
}

// inBuild returns the API of a build, which sees the sandboxes of builds.
func (s *API) inBuild() *API {
	b := *s
	b.build = true
	return &b
}

// administers returns an error of the class ErrForbidden unless the caller may [Administer].
func (s *API) administers() error {
	if s.caller.Rights&Administer != 0 {
		return nil
	}
	return class.Mark(class.ErrForbidden, fmt.Errorf("uid %d of tenant %q lacks the right to do this", s.caller.UID, s.caller.Tenant))
}

// visible reports whether the caller may know of a sandbox of its tenant. Sandboxes of builds are
// hidden: a client that writes into one while a program of the build runs changes the step's
// outcome, and the cache with it.
func (s *API) visible(rec *runtime.Record) bool { return !rec.Ephemeral || s.build }

// lookup returns the sandbox of the caller's tenant with this id or name.
func (s *API) lookup(ref string) (runtime.Record, error) {
	rec, err := s.supervisor.Lookup(s.caller.Tenant, ref)
	if err == nil && !s.visible(&rec) {
		return runtime.Record{}, fmt.Errorf("%w: %q", runtime.ErrNotFound, ref)
	}
	return rec, err
}

// begin takes a lease on the sandbox of the caller's tenant with this id or name, for a use of it.
func (s *API) begin(ref string) (*runtime.Lease, error) {
	rec, err := s.lookup(ref)
	if err != nil {
		return nil, err
	}
	s.parked.drop(rec.ID)
	return s.supervisor.Begin(rec.ID)
}
