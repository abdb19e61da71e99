package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image"
	"github.com/sandboxd/sandboxd/internal/agents"
	"github.com/sandboxd/sandboxd/internal/confine"
	"github.com/sandboxd/sandboxd/internal/daemon"
	"github.com/sandboxd/sandboxd/internal/errand"
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

// version is set by the linker (see Makefile).
var version = "unknown"

// requirable are the names that --require knows, with what says that they are met.
var requirable = map[string]func(e api.Enforced) bool{
	"subids":   func(e api.Enforced) bool { return e.IDs == "subordinate" },
	"landlock": func(e api.Enforced) bool { return e.Landlock > 0 },
	"cgroup":   func(e api.Enforced) bool { return e.Memory == "cgroup" && e.CPU == "cgroup" && e.Pids == "cgroup" },
}

// undoTimeout bounds the end of a launcher that a daemon started which then could not start itself.
const undoTimeout = 30 * time.Second

// serve is the daemon, wired by hand: it finds out what the host gives, connects to the launcher or starts one, and
// answers on the socket until it is told to stop.
func serve(ctx context.Context, o serveOptions) (err error) {
	// What the caller has open is nobody's whom we start: a launcher that outlives us would keep his files and pipes open.
	if err := unix.CloseRange(3, math.MaxInt32, unix.CLOSE_RANGE_CLOEXEC); err != nil && !errors.Is(err, unix.ENOSYS) && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("keep open files to ourselves: %w", err) // the others are kernels before 5.11
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: o.LogLevel}))
	for _, name := range o.Require {
		if requirable[name] == nil {
			return usagef("--require %q: want some of cgroup, landlock, subids", name)
		}
	}
	registries, err := o.registries()
	if err != nil {
		return err
	}
	launcherPath, initPath, err := siblings()
	if err != nil {
		return err
	}
	for _, dir := range []string{o.DataDir, o.RuntimeDir, o.agentWorkers().Runs} {
		if err := privateDir(dir); err != nil {
			return err
		}
	}
	lock, err := daemon.AcquireLock(o.DataDir)
	if err != nil {
		return err
	}
	owned := false // by the daemon: it closes the lock last and ends what was started
	defer func() {
		if !owned {
			err = errors.Join(err, lock.Close())
		}
	}()

	ids, err := idmap.Detect()
	if err != nil {
		return fmt.Errorf("find subordinate ids: %w", err)
	}
	// One daemon per data directory, and its name tells the cgroups of several apart.
	sum := sha256.Sum256([]byte(o.DataDir))
	name := hex.EncodeToString(sum[:4])
	subtree, err := cgroup.Prepare(ctx, name, func(ctx context.Context) error { return systemd.Enter(ctx, name) })
	if err != nil {
		return err
	}
	options := launcher.Options{
		DataDir: o.DataDir, RuntimeDir: o.RuntimeDir, Launcher: launcherPath, Init: initPath,
		IDs: ids, Cgroup: subtree, Version: version, Log: log,
	}
	// Before anything hostile is read: what we will not be able to do is done by who is as we are now.
	outside, err := startOutside(ctx, outside{Launcher: options, Name: name, Agents: o.agentWorkers()})
	if err != nil {
		return errors.Join(err, subtree.Abandon())
	}
	defer func() { err = errors.Join(err, outside.Close()) }() // the last: the cgroups are its to remove
	watched, ended := context.WithCancel(ctx)
	var watching sync.WaitGroup
	watching.Go(func() {
		select {
		case <-outside.Gone():
			log.Error(errand.ErrGone.Error(), "means", goneMeans, "remedy", goneRemedy)
		case <-watched.Done():
		}
	})
	defer func() {
		ended()
		watching.Wait()
	}()
	options.Start = outside.startLauncher
	var l *launcher.Client
	undo := outside.abandon
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
	end := func(ctx context.Context) error { return errors.Join(l.Shutdown(ctx), outside.leave(ctx)) }
	if started {
		undo = end // nobody else knows of it
	}
	info, err := l.Info(ctx)
	if err != nil {
		return err
	}
	log.Info("launcher is ready", "started", started, "version", info.Version)
	for _, m := range info.Enforced.Missing {
		log.Warn("not held on this host", "what", m)
	}
	// An adopted one may run in another cgroup, where the daemon before us was started.
	if err := outside.adopt(ctx, info.PID); err != nil {
		return err
	}
	limits := confine.Daemon{Data: o.DataDir, Runtime: o.RuntimeDir, Socket: o.Socket}
	confinable := limits.Probe()
	for _, name := range o.Require {
		if !requirable[name](info.Enforced) || name == "landlock" && !confinable {
			why := append(slices.Clone(info.Enforced.Missing), "sandboxd doctor says more")
			return fmt.Errorf("--require %s: this host does not give it: %s", name, strings.Join(why, "; "))
		}
	}

	images, err := image.Open(o.DataDir, l, image.Options{ //nolint:contextcheck // cleaning up after an interrupted pull is not the request's
		Limit: o.ImageLimit, SnapshotLimit: o.SnapshotLimit, LayersDir: filepath.Join(o.DataDir, "layers"), Registries: registries, Limits: o.UnpackLimits, Log: log,
		Keychain: outside, Lookup: outside.lookup, HostLayer: outside.hostLayer,
	})
	if err != nil {
		return fmt.Errorf("open images: %w", err)
	}
	defer func() { err = errors.Join(err, images.Close()) }()
	actions, err := kernel.SeccompActions()
	if err != nil {
		return fmt.Errorf("ask the kernel for its seccomp: %w", err)
	}
	// Read once: a filter is some 40 KB of JSON. One that this kernel cannot hold is a reason not to start.
	profiles, err := ociprofiles.Open(o.Profiles, seccomp.Abilities{Actions: actions})
	if err != nil {
		return err
	}
	shown, err := showProfiles(profiles)
	if err != nil {
		return err
	}
	pools := o.pools()
	for _, p := range pools {
		if _, err := profiles.Get(p.Profile); err != nil {
			return usagef("--pool %s=%d,%s: %w", p.Image, p.Size, p.Profile, err)
		}
	}
	held := new(confine.Held)
	defer func() { err = errors.Join(err, held.Close()) }()
	d, err := daemon.New(ctx, daemon.Options{Options: service.Options{
		Version: version, DataDir: o.DataDir, RuntimeDir: o.RuntimeDir, Socket: o.Socket,
		Engine: l, Images: images, Differ: l, Deposits: l,
		Profile: func(name string) (runtime.Profile, api.Limits, error) {
			p, err := profiles.Get(name)
			return p.Profile, p.Limits, err
		},
		LauncherInfo: func(ctx context.Context) (int, api.Enforced, error) {
			info, err := l.Info(ctx)
			if err != nil {
				return 0, api.Enforced{}, err
			}
			return info.PID, info.Enforced, nil
		},
		Checks:     func(ctx context.Context) []api.Check { return append(outside.checks(ctx), checkConfined(limits)) },
		BrokerGone: outside.gone,
		IODevice:   device,
		Agents: agents.New(agents.Options{
			Dir: o.agentWorkers().Runs, Max: o.AgentRuns, Start: outside.startAgent, Signal: outside.signalAgent, Log: log,
		}),
		Pools: pools, Profiles: shown, LogSize: o.LogSize, LogFiles: o.LogFiles, LogLimit: o.LogLimit,
		AgentAge: o.AgentAge, AgentLimit: o.AgentLimit,
		EndedAge: o.EndedAge, EndedLimit: o.EndedLimit, SnapshotAge: o.SnapshotAge, Timeout: o.DefaultTimeout, IdleTimeout: o.DefaultIdleTimeout,
		Log: log,
	},
		Lock: lock, EndEngine: end, IdleExit: o.IdleExit,
		// Everything that is only read once has been, the host's certificates too.
		Confine: func() (_ int, err error) {
			if !confinable {
				log.Warn("not held on this host", "what", "the daemon to its own directories: "+tooOld)
				return 0, nil
			}
			held, err = limits.Plan().Apply()
			return limits.ABI, err
		},
	})
	if err != nil {
		return err
	}
	owned = true
	return d.Serve(ctx)
}

// agentWorkers says what processes for runs of the agent are started with. The most there may be bounds what a daemon can do that was
// taken over, and is no other's business than the host's, which knows the runs: one that has ended may be counted for a moment more.
func (o *serveOptions) agentWorkers() agentWorkers {
	return agentWorkers{Socket: o.Socket, Runs: filepath.Join(o.DataDir, "agent"), Inputs: o.AgentInputs, Max: 2 * (o.AgentRuns + agents.MaxRemovals)}
}

// pools are the sizes that the flags give, which complete has checked.
func (o *serveOptions) pools() []daemon.Pool {
	var all []daemon.Pool
	for _, p := range o.Pools {
		pool, _ := parsePool(p)
		all = append(all, pool)
	}
	return all
}

// warnOfLogout says so where systemd will end the daemon, and what it starts, with its user's last session.
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

// registries turns the flags into what images are pulled with.
func (o *serveOptions) registries() (image.Registries, error) {
	r := image.Registries{Mirrors: make(map[string][]string), Insecure: o.InsecureRegistries}
	for _, m := range o.Mirrors {
		registry, mirror, err := image.ParseMirror(m)
		if err != nil {
			return r, usagef("--registry-mirror: %w", err)
		}
		r.Mirrors[registry] = append(r.Mirrors[registry], mirror)
	}
	for _, name := range o.InsecureRegistries {
		if err := image.CheckRegistry(name); err != nil {
			return r, usagef("--insecure-registry: %w", err)
		}
	}
	// The host's own are read in any case: once the daemon is confined it could not.
	pool, err := image.ReadCAs(o.RegistryCAs)
	if err != nil {
		return r, fmt.Errorf("read trusted certificates (--registry-ca adds to the host's): %w", err)
	}
	r.CAs = pool
	return r, nil
}

// siblings finds the two other binaries beside this one.
func siblings() (launcherPath, initPath string, err error) {
	self, err := os.Executable()
	if err != nil {
		return "", "", fmt.Errorf("find own executable: %w", err)
	}
	if self, err = filepath.EvalSymlinks(self); err != nil {
		return "", "", fmt.Errorf("find own executable: %w", err)
	}
	paths := make([]string, 0, 2)
	for _, name := range []string{"sandboxd-launcher", "sandboxd-init"} {
		path := filepath.Join(filepath.Dir(self), name)
		if _, err := os.Stat(path); err != nil {
			return "", "", fmt.Errorf("find %s: %w; it belongs beside %s (make build puts all three into bin/)", name, err, self)
		}
		paths = append(paths, path)
	}
	return paths[0], paths[1], nil
}

// privateDir makes dir, or checks that it is ours and that nobody else can enter. Sandboxes keep set-user-id files of their
// root below it, which another user of the host must not reach. It never changes the mode of a directory that it finds:
// somebody may have named /run or /var/lib by mistake.
func privateDir(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make directory: %w", err)
	}
	fi, err := os.Lstat(dir)
	if err != nil {
		return fmt.Errorf("check directory: %w", err)
	}
	if !fi.IsDir() {
		return fmt.Errorf("check directory: %s is not one", dir)
	}
	if st, ok := fi.Sys().(*syscall.Stat_t); !ok || int(st.Uid) != os.Geteuid() {
		return fmt.Errorf("check directory: %s does not belong to uid %d: choose another", dir, os.Geteuid())
	}
	if fi.Mode().Perm()&0o077 != 0 {
		return fmt.Errorf("check directory: %s is open to others: choose another, or, if it is for sandboxd alone, chmod 700 %s", dir, dir)
	}
	return nil
}
