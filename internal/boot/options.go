package boot

import (
	"fmt"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/faces/mcp/handoff"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/image/registry"
	"github.com/sandboxd/sandboxd/internal/agents"
	"github.com/sandboxd/sandboxd/internal/broker"
	"github.com/sandboxd/sandboxd/internal/daemon"
	"github.com/sandboxd/sandboxd/internal/hostdir"
	"github.com/sandboxd/sandboxd/internal/secrets"
	"github.com/sandboxd/sandboxd/internal/service"
	"github.com/sandboxd/sandboxd/interpreter/codepolicy"
	"github.com/sandboxd/sandboxd/netns/policy"
	ociprofiles "github.com/sandboxd/sandboxd/oci-profiles"
)

// Options configure the daemon. There are few on purpose: settings that differ between sandboxes
// belong in the request or in a profile. All paths are absolute. In limits and ages zero means
// none, except where a field says otherwise.
type Options struct {
	// Version is the version that the daemon reports.
	Version string

	DataDir    string
	RuntimeDir string
	Socket     string
	LogLevel   slog.Level
	// Require lists the layers of enforcement that the host must have: "cgroup", "ids", "landlock",
	// "nocorepipe", "subids". The daemon does not start if one is missing or its name is unknown.
	Require []string
	// MultiTenant serves users of this host as tenants: those of Tenants, a list of uids or names
	// of users, or @GROUP. The daemon does not start where the host would not keep them apart.
	MultiTenant bool
	Tenants     string
	// Memory, in bytes, and Pids are the room for the limits of all sandboxes together, and
	// Overcommit the ratio of the sum of limits to them. With MultiTenant zero means a part of the
	// host.
	Memory     int64
	Pids       int64
	Overcommit float64
	// DiskReserve is the space that sandboxes, images and snapshots leave free on the disk, in
	// bytes. Negative means the default.
	DiskReserve int64
	// DefaultTimeout and DefaultIdleTimeout are for sandboxes that ask for none; greater than zero.
	DefaultTimeout     time.Duration
	DefaultIdleTimeout time.Duration
	// IdleExit ends the daemon after this time without a sandbox and a request.
	IdleExit time.Duration
	// ImageLimit is the maximum disk space of all images, in bytes; the least recently used are
	// removed first.
	ImageLimit int64
	// EndedAge and EndedLimit are the retention of ended sandboxes, by age and by number.
	EndedAge   time.Duration
	EndedLimit int
	// SnapshotAge is the retention of snapshots that no sandbox uses.
	SnapshotAge time.Duration
	// SnapshotLimit is the maximum disk space of all snapshots, in bytes; the oldest are removed
	// first.
	SnapshotLimit int64
	// VolumeLimit is the maximum sum of the sizes of all volumes, in bytes. Default: no limit.
	VolumeLimit int64
	// UnpackLimits limit the content of a new image.
	UnpackLimits layer.Limits
	// LogSize is the maximum size of a log file, in bytes, and LogFiles the maximum number of files
	// per sandbox.
	LogSize  int64
	LogFiles int
	// LogLimit is the maximum disk space of all logs, in bytes; the oldest files are removed first.
	LogLimit int64
	// NetworkCeiling bounds all network policies. Nil means no bound; tenants may then allow everything
	// public.
	NetworkCeiling *policy.Policy
	// CodePolicy judges all code runs; nil means none.
	CodePolicy *codepolicy.Policy
	// CodeHook is the address of a service that judges code runs: unix:PATH, or a URL of the loopback;
	// empty means none.
	CodeHook string
	// Services are the host's Unix sockets that policies may open, the paths by name.
	Services map[string]string
	// Secrets is a file of secrets that the gateway puts into requests; empty means none.
	Secrets string
	// Docker is the path of the Unix socket on which the Docker face serves; empty means none.
	Docker string
	// DockerNetwork is the network of the face's bridge: none, full, or a policy's preset or path.
	DockerNetwork string
	// MCP is the request of the MCP face; nil means none.
	MCP *handoff.Request
	// Profiles is a directory of security profiles beside the embedded ones; empty means none.
	Profiles string
	// Pools lists the warm pools.
	Pools []Pool
	// AgentRuns is the maximum number of hosted agent runs in progress, each of which is a process;
	// greater than zero.
	AgentRuns int
	// AgentAge and AgentLimit are the retention of idle agent runs, by age and by bytes on disk;
	// the oldest are removed first.
	AgentAge   time.Duration
	AgentLimit int64
	// MountRoots are directories of the host, in the form of [hostdir.Root], below which sandboxes may
	// have mounts; empty means none.
	MountRoots []string
	// AgentInputs lists the directories, without symbolic links, that hosted runs may read below;
	// empty means none.
	AgentInputs []string

	Mirrors            []string // REGISTRY=MIRROR each
	InsecureRegistries []string // registries that may use plain HTTP or unverified certificates
	RegistryCAs        []string // PEM files of certificates that are trusted for registries

	// ConfigFiles are the files that Reload takes, of which any may be missing. Each message on
	// Hangup makes the daemon read them again. A nil Reload means never.
	ConfigFiles []string
	Hangup      <-chan struct{}
	// Reload returns the options with the contents of ConfigFiles, and the names of settings that
	// differ from those in effect. Those that [Reloadable] does not name need a restart.
	Reload func(contents map[string][]byte) (o Options, changed []string, err error)
}

// Check reports options that would keep a daemon from starting, except those that only a start can
// find.
func Check(o *Options) error {
	if err := o.checkRequire(); err != nil {
		return err
	}
	if _, err := o.registries(); err != nil {
		return err
	}
	if _, err := o.parseTenants(); err != nil {
		return err
	}
	if _, err := o.readSecrets(); err != nil {
		return err
	}
	profiles, _, err := OpenProfiles(o.Profiles)
	if err != nil {
		return err
	}
	return o.checkPools(profiles)
}

func (o *Options) checkRequire() error {
	for _, name := range o.Require {
		if requirements[name] == nil {
			return optionErrorf("--require %q: want some of cgroup, ids, landlock, nocorepipe, subids", name)
		}
	}
	return nil
}

func (o *Options) checkPools(profiles *ociprofiles.Set) error {
	for _, p := range o.Pools {
		if _, err := profiles.Get(p.Profile); err != nil {
			return optionErrorf("--pool %s=%d,%s: %w", p.Image, p.Size, p.Profile, err)
		}
		if err := service.CheckPool(&p); err != nil {
			return optionErrorf("--pool %s=%d,context=%s: %w", p.Image, p.Size, p.Context, err)
		}
	}
	return nil
}

// Pool is a warm pool of sandboxes of one image and profile.
type Pool = daemon.Pool

// OptionError reports an option that makes no sense on its own or on this host.
type OptionError struct{ err error }

func (e *OptionError) Error() string { return e.err.Error() }
func (e *OptionError) Unwrap() error { return e.err }

func optionErrorf(format string, args ...any) error { return &OptionError{fmt.Errorf(format, args...)} }

// requirements maps the names of Options.Require to the tests of whether the host meets them.
var requirements = map[string]func(e api.Enforced) bool{
	"nocorepipe": func(e api.Enforced) bool { return e.Cores == api.CoresNone },
	"subids":     func(e api.Enforced) bool { return e.IDs != api.IDsSingle && e.IDs != "" },
	"ids":        func(e api.Enforced) bool { return e.IDs == api.IDsOwn },
	"landlock":   func(e api.Enforced) bool { return e.Landlock > 0 },
	"cgroup":     func(e api.Enforced) bool { return e.Memory == "cgroup" && e.CPU == "cgroup" && e.Pids == "cgroup" },
}

// mounts returns what of the host sandboxes may have.
func (o *Options) mounts() hostdir.Config {
	c := hostdir.Config{Roots: o.MountRoots, Own: []string{o.DataDir, o.RuntimeDir}, Kept: []string{filepath.Dir(o.Socket)}}
	for _, f := range o.ConfigFiles {
		c.Kept = append(c.Kept, filepath.Dir(f))
	}
	return c
}

// agents returns the configuration of hosted agent runs.
//
// Max leaves room for twice the runs, because a process that has ended may count for a moment
// longer. The limit of runs itself is the host's to keep; this one bounds a daemon that was taken
// over.
func (o *Options) agents(program string) broker.Agents {
	return broker.Agents{
		Program: program, Socket: o.Socket, Runs: filepath.Join(o.DataDir, "agent"), Inputs: o.AgentInputs,
		Max: 2 * (o.AgentRuns + agents.MaxRemovals),
	}
}

// registries checks the options of registries and reads the trusted certificates. The host's own
// are read in any case: the daemon cannot read them once it is confined.
// readSecrets reads the secrets and their values.
func (o *Options) readSecrets() (map[string]secrets.Secret, error) {
	if o.Secrets == "" {
		return nil, nil
	}
	all, err := secrets.Read(o.Secrets)
	if err != nil {
		return nil, optionErrorf("--secrets: %w", err)
	}
	return all, nil
}

func (o *Options) registries() (registry.Config, error) {
	r := registry.Config{Mirrors: make(map[string][]string), Insecure: o.InsecureRegistries}
	for _, m := range o.Mirrors {
		address, mirror, err := registry.ParseMirror(m)
		if err != nil {
			return r, optionErrorf("--registry-mirror: %w", err)
		}
		r.Mirrors[address] = append(r.Mirrors[address], mirror)
	}
	for _, name := range o.InsecureRegistries {
		if err := registry.CheckAddress(name); err != nil {
			return r, optionErrorf("--insecure-registry: %w", err)
		}
	}
	pool, err := registry.ReadCAs(o.RegistryCAs)
	if err != nil {
		return r, fmt.Errorf("read trusted certificates (--registry-ca adds to the host's): %w", err)
	}
	r.CAs = pool
	return r, nil
}
