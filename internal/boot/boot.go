// Package boot assembles the daemon: it prepares directories and cgroups, starts the broker,
// connects to the launcher or starts one, confines the process, and serves the API.
package boot

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image"
	"github.com/sandboxd/sandboxd/internal/agents"
	"github.com/sandboxd/sandboxd/internal/broker"
	"github.com/sandboxd/sandboxd/internal/confine"
	"github.com/sandboxd/sandboxd/internal/daemon"
	"github.com/sandboxd/sandboxd/internal/dirs"
	"github.com/sandboxd/sandboxd/internal/egress"
	guesthost "github.com/sandboxd/sandboxd/internal/guest/host"
	"github.com/sandboxd/sandboxd/internal/idmap"
	"github.com/sandboxd/sandboxd/internal/kernel"
	"github.com/sandboxd/sandboxd/internal/launcher"
	"github.com/sandboxd/sandboxd/internal/service"
	ociprofiles "github.com/sandboxd/sandboxd/oci-profiles"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/runtime/cgroup"
	"github.com/sandboxd/sandboxd/runtime/cgroup/systemd"
	"github.com/sandboxd/sandboxd/seccomp"
)

// undoTimeout limits the end of a launcher whose daemon could not start.
const undoTimeout = 30 * time.Second

// Serve runs the daemon until ctx ends or a client shuts it down.
func Serve(ctx context.Context, o Options) (err error) {
	// Keep inherited descriptors from children: a launcher outlives us, and would keep the caller's
	// files and pipes open. Kernels before 5.11 lack the flag or the call.
	if err := unix.CloseRange(3, math.MaxInt32, unix.CLOSE_RANGE_CLOEXEC); err != nil && !errors.Is(err, unix.ENOSYS) && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("mark inherited descriptors close-on-exec: %w", err)
	}
	level := new(slog.LevelVar)
	level.Set(o.LogLevel)
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
	if err := o.checkRequire(); err != nil {
		return err
	}
	registries, err := o.registries()
	if err != nil {
		return err
	}
	tenants, err := o.parseTenants()
	if err != nil {
		return err
	}
	programs, err := findPrograms(log)
	if err != nil {
		return err
	}
	hosted := o.agents(programs.agent)
	for _, dir := range []string{o.DataDir, o.RuntimeDir, hosted.Runs} {
		if err := privateDir(dir); err != nil {
			return err
		}
	}
	lock, err := daemon.AcquireLock(o.DataDir)
	if err != nil {
		return err
	}
	owned := false // by the daemon: it releases the lock last, and ends the launcher
	defer func() {
		if !owned {
			err = errors.Join(err, lock.Close())
		}
	}()

	ids, err := idmap.Detect()
	if err != nil {
		return fmt.Errorf("find subordinate ids: %w", err)
	}
	// A data directory has one daemon, so that its hash tells the cgroups of several daemons apart.
	sum := sha256.Sum256([]byte(o.DataDir))
	name := hex.EncodeToString(sum[:4])
	subtree, err := cgroup.Prepare(ctx, name, func(ctx context.Context) error { return systemd.Enter(ctx, name) })
	if err != nil {
		return err
	}
	disk, err := service.MeasureDisk(o.DataDir)
	if err != nil {
		return errors.Join(err, subtree.Abandon())
	}
	options := launcher.Options{
		DataDir: o.DataDir, RuntimeDir: o.RuntimeDir, Launcher: programs.launcher, Init: programs.init,
		IDs: ids, Cgroup: subtree, Version: o.Version, Mounts: o.mounts(), DiskReserve: disk.Reserve(o.DiskReserve),
	}
	if o.MCP != nil {
		o.MCP.Version = o.Version
	}
	// Start the broker before confinement and before anything hostile is read, so that it keeps our
	// privileges.
	helper, err := broker.Start(ctx, broker.Config{Launcher: options, Name: name, Agents: hosted, Services: o.brokered(), Docker: o.docker(), MCP: o.MCP, ConfigFiles: o.ConfigFiles})
	if err != nil {
		return errors.Join(err, subtree.Abandon())
	}
	defer func() { err = errors.Join(err, helper.Close()) }() // last, because it removes the cgroups
	defer reportGone(ctx, helper, log)()
	options.Start, options.MountRange = helper.StartLauncher, helper.MountRange
	options.OpenMount, options.MountWorkspace = helper.OpenMount, helper.MountWorkspace
	var l *launcher.Client
	undo := helper.AbandonCgroups
	defer func() {
		if err != nil && !owned {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
			defer cancel()
			err = errors.Join(err, undo(ctx))
		}
		if l != nil {
			err = errors.Join(err, l.Close())
		}
	}()
	if err := warnOfLogout(log); err != nil {
		return err
	}
	device, err := cgroup.DeviceOf(o.DataDir, subtree.Mount)
	if err != nil {
		return err
	}
	client, started, err := launcher.Connect(ctx, options)
	if err != nil {
		return fmt.Errorf("%w; sandboxd doctor looks for the reason", err)
	}
	l = client
	if started {
		undo = engine{l, helper}.Shutdown // no record refers to its sandboxes yet
	}
	info, err := l.Describe(ctx)
	if err != nil {
		return err
	}
	log.Info("launcher is ready", "started", started, "version", info.Version)
	for _, m := range info.Enforced.Missing {
		log.Warn("not enforced on this host", "what", m)
	}
	// An adopted launcher may run in other cgroups, those of the daemon that has started it.
	if err := helper.AdoptLauncher(ctx, info.PID); err != nil {
		return err
	}
	// The sandboxes are where their launcher is, which need not be where we are.
	held, err := cgroup.Of(info.PID, name)
	if err != nil {
		return err
	}
	host, err := measureHost(held)
	if err != nil {
		return err
	}
	room, all := planRoom(&o, host)
	if o.MultiTenant {
		t := tenancy{tenants: o.Tenants, socket: tenants.SocketRefused(o.Socket), enforced: info.Enforced, host: host, all: all}
		disk, err := service.MeasureDisk(o.DataDir)
		if err != nil {
			return err
		}
		switch short := disk.Short(o.DiskReserve); {
		case o.DiskReserve == 0:
			t.noDisk = "--disk-reserve 0 leaves the daemon no reserve on the disk"
		case started:
			t.noDisk = short
		case short != "": // sandboxes run on: without a daemon nothing makes room
			log.Warn("creations are refused until there is room", "disk", short)
		}
		if err := t.check(); err != nil {
			return err
		}
	}
	if err := held.Hold(ctx, all); err != nil {
		return err
	}
	limits := confine.Daemon{Data: o.DataDir, Runtime: o.RuntimeDir, Socket: o.Socket}
	confinable := limits.Probe()
	for _, name := range o.Require {
		if !requirements[name](info.Enforced) || name == "landlock" && !confinable {
			why := append(slices.Clone(info.Enforced.Missing), "sandboxd doctor says more")
			return fmt.Errorf("--require %s: not available on this host: %s", name, strings.Join(why, "; "))
		}
	}

	images, err := image.Open(o.DataDir, l, image.Options{ //nolint:contextcheck // cleaning up after an interrupted pull is not the request's
		Limit: o.ImageLimit, SnapshotLimit: o.SnapshotLimit, LayersDir: filepath.Join(o.DataDir, "layers"), Registries: registries, Limits: o.UnpackLimits, Log: log,
		Keychain: helper, Lookup: helper.Lookup, HostLayer: helper.WriteHostLayer,
	})
	if err != nil {
		return fmt.Errorf("open images: %w", err)
	}
	defer func() { err = errors.Join(err, images.Close()) }()
	profiles, shown, err := OpenProfiles(o.Profiles)
	if err != nil {
		return err
	}
	if err := o.checkPools(profiles); err != nil {
		return err
	}
	known, err := o.readSecrets()
	if err != nil {
		return err
	}
	program, err := programMappings() // before the confinement, too
	if err != nil {
		return err
	}
	guesthost.OpenPressure() // before the confinement, which refuses it
	confined := new(confine.Held)
	defer func() { err = errors.Join(err, confined.Close()) }()
	d, err := daemon.New(ctx, daemon.Options{
		Options: service.Options{
			CheckMount: helper.CheckMount,
			Version:    o.Version, DataDir: o.DataDir, RuntimeDir: o.RuntimeDir, Socket: o.Socket,
			Engine: engine{l, helper}, Images: func(tenant string) service.Images { return images.For(tenant) },
			Profile: func(name string) (runtime.Profile, api.Limits, error) {
				p, err := profiles.Get(name)
				return p.Profile, p.Limits, err
			},
			Checks:     func(ctx context.Context) []api.Check { return append(helper.Checks(ctx), checkConfined(limits)) },
			BrokerGone: helper.IsGone, IODevice: device,
			StartGateway: func(ctx context.Context, cfg egress.Config) (*egress.Gateway, error) {
				cfg.Start, cfg.Log = helper.StartGateway, log
				return egress.Start(ctx, cfg)
			},
			CodePolicy: o.CodePolicy, CodeHook: o.codeHook(helper.DialHook),
			NetworkCeiling: o.NetworkCeiling, Secrets: known, Sockets: slices.Sorted(maps.Keys(o.Services)), DialSocket: helper.DialService,
			Agents: agents.New(agents.Options{
				Dir: hosted.Runs, Max: o.AgentRuns, Start: helper.StartAgent, Signal: helper.SignalAgent, Log: log,
			}),
			Pools: o.Pools, Profiles: shown, LogSize: o.LogSize, LogFiles: o.LogFiles, LogLimit: o.LogLimit, VolumeLimit: o.VolumeLimit,
			RetentionLimits: o.retention(),
			DiskReserve:     o.DiskReserve, Room: room,
			Timeout: o.DefaultTimeout, IdleTimeout: o.DefaultIdleTimeout, Log: log,
		},
		Tenants: tenants, Lock: lock, IdleExit: o.IdleExit,
		// By then all files that are read once have been read, the host's certificates included.
		Confine: func() (int, error) {
			if !confinable {
				log.Warn("not enforced on this host", "what", "confinement of the daemon to its own directories: "+noLandlock)
				return 0, nil
			}
			held, err := limits.Plan().Apply()
			if err != nil {
				return 0, err
			}
			confined = held
			return limits.ABI, nil
		},
	})
	if err != nil {
		return err
	}
	owned = true
	if err := releaseStart(program); err != nil {
		log.Warn("the daemon stays larger than it needs to be", "error", err)
	}
	reloading := reloader{options: o, level: level, read: helper.ReadConfig, service: d.Service(), log: log}
	defer reloading.watch(ctx)()
	if o.Docker != "" {
		defer keepFace(ctx, helper, broker.Docker, log)()
	}
	if o.MCP != nil {
		defer keepFace(ctx, helper, broker.MCP, log)()
	}
	debug.FreeOSMemory() // start-up leaves garbage, profiles and certificates; an idle daemon would hold it for minutes
	return d.Serve(ctx)
}

// engine is a launcher whose cgroups the broker has prepared.
type engine struct {
	*launcher.Client
	broker *broker.Client
}

// Shutdown ends the launcher and removes the cgroups, the latter also after an error.
func (e engine) Shutdown(ctx context.Context) error {
	return errors.Join(e.Client.Shutdown(ctx), e.broker.LeaveCgroups(ctx))
}

// reportGone logs the end of the broker, unless stop is called before.
func reportGone(ctx context.Context, b *broker.Client, log *slog.Logger) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var watching sync.WaitGroup
	watching.Go(func() {
		select {
		case <-b.Gone():
			log.Error(broker.ErrGone.Error(), "means", broker.GoneMeans, "remedy", broker.GoneRemedy)
		case <-ctx.Done():
		}
	})
	return func() {
		cancel()
		watching.Wait()
	}
}

// OpenProfiles reads the security profiles once, because a filter is some 40 KB of JSON. A profile
// that this kernel cannot enforce is a reason not to start.
func OpenProfiles(dir string) (*ociprofiles.Set, []api.Profile, error) {
	actions, err := kernel.SeccompActions()
	if err != nil {
		return nil, nil, fmt.Errorf("ask the kernel for its seccomp actions: %w", err)
	}
	set, err := ociprofiles.Open(dir, seccomp.Abilities{Actions: actions})
	if err != nil {
		return nil, nil, err
	}
	var shown []api.Profile
	for _, name := range set.Names() {
		p, err := set.Get(name)
		if err != nil {
			return nil, nil, err
		}
		one, err := p.API()
		if err != nil {
			return nil, nil, err
		}
		shown = append(shown, one)
	}
	return set, shown, nil
}

// warnOfLogout warns if systemd ends the daemon and its sandboxes with the user's last session.
func warnOfLogout(log *slog.Logger) error {
	host, err := cgroup.Survey()
	if err != nil {
		return err
	}
	if host.InManager && !host.Lingers {
		log.Warn("sandboxes end with their user's last session", "user", host.User, "remedy", host.Linger())
	}
	return nil
}

// programs holds the paths of the other binaries.
type programs struct{ launcher, init, agent string }

// findPrograms finds the other binaries beside this one. sandboxd-agent may be missing: agent runs
// then fail to start.
func findPrograms(log *slog.Logger) (programs, error) {
	launcher, err := dirs.Program(dirs.LauncherProgram)
	if err != nil {
		return programs{}, err
	}
	init, err := dirs.Program(dirs.InitProgram)
	if err != nil {
		return programs{}, err
	}
	agent, err := dirs.Program(dirs.AgentProgram)
	if err != nil {
		log.Warn("hosted agent runs cannot start", "error", err)
	}
	return programs{launcher, init, agent}, nil
}

// privateDir makes dir, or checks that it belongs to this user and that no other user can enter it.
// Sandboxes keep set-user-id files of their root below it, which other users of the host must not
// reach. It never changes the mode of an existing directory: --data-dir /run may be a mistake.
func privateDir(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make directory: %w", err)
	}
	fi, err := os.Lstat(dir)
	if err != nil {
		return fmt.Errorf("check directory: %w", err)
	}
	if !fi.IsDir() {
		return fmt.Errorf("check directory: %s is no directory", dir)
	}
	if st, ok := fi.Sys().(*syscall.Stat_t); !ok || int(st.Uid) != os.Geteuid() {
		return fmt.Errorf("check directory: %s does not belong to uid %d: choose another", dir, os.Geteuid())
	}
	if fi.Mode().Perm()&0o077 != 0 {
		return fmt.Errorf("check directory: %s is open to others: choose another, or, if only sandboxd uses it, chmod 700 %s", dir, dir)
	}
	return nil
}

// noLandlock is the reason why a daemon is not confined.
const noLandlock = "the kernel has no Landlock, or an old version"

// checkConfined reports how the daemon itself is confined.
func checkConfined(d confine.Daemon) api.Check {
	c := api.Check{
		Name: "the daemon itself", OK: d.ABI > 0,
		Found:  fmt.Sprintf("held to its own directories by Landlock, ABI %d", d.ABI),
		Means:  "code that takes the daemon over, through a registry, an image or a sandbox, can do on the host what the daemon's user can",
		Remedy: kernel.LandlockRemedy,
	}
	if !c.OK {
		c.Found = "not held to its own directories: " + noLandlock
	}
	for _, missing := range d.Missing() {
		c.Found += "; " + missing
	}
	return c
}
