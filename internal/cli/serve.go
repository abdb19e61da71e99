package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/internal/boot"
	"github.com/sandboxd/sandboxd/internal/cmdline"
	"github.com/sandboxd/sandboxd/internal/dirs"
	"github.com/sandboxd/sandboxd/internal/hostdir"
	"github.com/sandboxd/sandboxd/netns/policy"
	ociprofiles "github.com/sandboxd/sandboxd/oci-profiles"
)

// serveOptions holds the flags of serve. To add an option: a field of [boot.Options] with its
// default in newServe, a line in addFlags, a line in the golden help. To retire one: MarkDeprecated
// for two minor versions, then delete both.
type serveOptions struct {
	boot.Options

	config     string // a file in place of the usual ones, or noConfig
	background bool   // a command has started the daemon
	level      string
	pools      []string // as parsePool reads them
	services   []string // NAME=unix:PATH
	ceiling    string
	codePolicy string
	docker     bool
	mcp        bool
	mcpFlags   []string // of newMCP, NAME=VALUE each

	imageLimit, snapshotLimit, memory, reserve cmdline.Size
	logSize, logLimit, agentLimit, volumeLimit cmdline.Size
}

// backgroundIdleExit is the default of --idle-exit of a daemon that a command has started.
const backgroundIdleExit = 5 * time.Minute

// newServeOptions returns the defaults.
func newServeOptions() *serveOptions {
	return &serveOptions{
		Options: boot.Options{
			DefaultTimeout:     time.Hour,
			DefaultIdleTimeout: 10 * time.Minute,
			UnpackLimits:       layer.DefaultLimits(),
			LogFiles:           3,
			AgentRuns:          8,
			AgentAge:           30 * 24 * time.Hour,
			EndedAge:           30 * 24 * time.Hour,
		},
		level:      "info",
		memory:     cmdline.Size{Least: 64 << 20},
		logSize:    cmdline.Size{Given: true, Bytes: 4 << 20, Least: 256 << 10},
		logLimit:   cmdline.Size{Given: true, Bytes: 2 << 30, Least: 1 << 20},
		agentLimit: cmdline.Size{Given: true, Bytes: 20 << 30},
	}
}

func newServe(d deps) *cobra.Command {
	opts := newServeOptions()
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run the daemon in the foreground",
		Long: `Run the daemon in the foreground: it answers on the socket until SIGTERM, SIGINT or
"sandboxd shutdown" ends it. Sandboxes outlive a daemon that is killed; the next
one on the same data directory adopts them. The log goes to stderr.

Every flag may stand in a config file instead; "sandboxd config" has more. On
SIGHUP the daemon reads it again.`,
		Args: cmdline.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runServe(cmd.Context(), opts, cmd.Flags(), d) },
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

// convert fills in the options whose flags have other types.
func (o *serveOptions) convert(socket string) error {
	if err := o.LogLevel.UnmarshalText([]byte(o.level)); err != nil {
		return cmdline.Usagef("--log-level %q: want debug, info, warn or error", o.level)
	}
	if o.LogFiles < 2 || o.LogFiles > 1000 {
		return cmdline.Usagef("--log-files %d: must be from 2 to 1000", o.LogFiles)
	}
	if o.AgentRuns < 1 || o.AgentRuns > 1000 {
		return cmdline.Usagef("--agent-runs %d: must be from 1 to 1000", o.AgentRuns)
	}
	o.Socket, o.ImageLimit, o.SnapshotLimit, o.LogSize = socket, o.imageLimit.Bytes, o.snapshotLimit.Bytes, o.logSize.Bytes
	o.VolumeLimit = o.volumeLimit.Bytes
	o.LogLimit, o.AgentLimit = o.logLimit.Bytes, o.agentLimit.Bytes
	o.Memory, o.DiskReserve = o.memory.Bytes, -1
	if o.reserve.Given {
		o.DiskReserve = o.reserve.Bytes
	}
	return nil
}

func (o *serveOptions) addFlags(f *pflag.FlagSet) {
	f.StringVar(&o.DataDir, "data-dir", "", "`directory` for images, sandboxes and state (default: $XDG_DATA_HOME/sandboxd; for root /var/lib/sandboxd)")
	f.StringVar(&o.RuntimeDir, "runtime-dir", "", "`directory` for sockets (default: $XDG_RUNTIME_DIR/sandboxd; for root /run/sandboxd)")
	f.StringSliceVar(&o.Require, "require", nil, "refuse to start if the host lacks one of these `layers`: cgroup,ids,landlock,nocorepipe,subids")
	f.BoolVar(&o.MultiTenant, "multi-tenant", false, "serve the users of --tenants as tenants, each with its own objects; refuse to start where the host would not keep them apart")
	f.StringVar(&o.Tenants, "tenants", "", "`users` that are tenants: uids or names separated by commas, or @GROUP for the members of a group")
	f.Int64Var(&o.Pids, "pids", 0, "processes and threads for all sandboxes together: the sum of their limits, and a ceiling (default: no bound; with --multi-tenant half of the host's)")
	f.Float64Var(&o.Overcommit, "overcommit", 1, "`ratio` of the sums of limits to --memory and --pids, from 1 to 100")
	f.DurationVar(&o.DefaultTimeout, "default-timeout", o.DefaultTimeout, "default lifetime of a sandbox")
	f.DurationVar(&o.DefaultIdleTimeout, "default-idle-timeout", o.DefaultIdleTimeout, "default idle timeout of a sandbox")
	f.StringArrayVar(&o.Mirrors, "registry-mirror", nil, "ask a mirror first: `REGISTRY=MIRROR`, such as docker.io=mirror.example:5000; repeatable")
	f.StringArrayVar(&o.InsecureRegistries, "insecure-registry", nil, "allow plain HTTP and unverified certificates to this `registry`; repeatable")
	f.StringArrayVar(&o.RegistryCAs, "registry-ca", nil, "trust the certificates in this PEM `file` for registries, beside the host's own; repeatable")
	f.Var((*unpackLimits)(&o.UnpackLimits), "unpack-limits", "limits of an image as `NAME=N,...`: entries and bytes of all layers, ratio of unpacked to compressed bytes, depth of directories; others keep their defaults")
	f.IntVar(&o.LogFiles, "log-files", o.LogFiles, "maximum `number` of log files per sandbox, from 2 to 1000; the oldest is removed first")
	f.StringArrayVar(&o.pools, "pool", nil, "warm pool of N idle sandboxes: `IMAGE=N[,PROFILE][,network][,context=LANGUAGE[+MODULE...]]`, such as host=4; with auto or auto:N its size follows the creations of the last ten minutes, up to 8 or N; with context an interpreter waits in each; repeatable")
	f.DurationVar(&o.EndedAge, "ended-age", o.EndedAge, "maximum age of ended sandboxes without the label sandboxd.keep; 0: no limit")
	f.IntVar(&o.EndedLimit, "ended-limit", 0, "maximum `number` of ended sandboxes; oldest are removed first, after at least an hour; 0: no limit")
	f.DurationVar(&o.SnapshotAge, "snapshot-age", 0, "maximum age of snapshots without a sandbox and without the label sandboxd.keep (default: no limit)")
	f.StringVar(&o.ceiling, "network-ceiling", "", "most that network policies may allow: a policy `file`, presets such as pypi,npm, full, or none (default: no bound; for tenants full)")
	f.StringVar(&o.codePolicy, "code-policy", "", "judge all code runs by a policy `file`, or by presets such as production,web_scraping; see docs/guides/code-policy.md (default: none)")
	f.StringVar(&o.CodeHook, "code-hook", "", "ask a service about each code run, at `ADDRESS`: unix:PATH, or http://127.0.0.1:PORT/PATH (default: none)")
	f.StringArrayVar(&o.MountRoots, "mount-root", nil, "`directory` below which sandboxes may have directories of the host (-v, --mount); for one's own daemon also $HOME or below it; repeatable (default: none)")
	f.StringArrayVar(&o.services, "service", nil, "Unix socket of this host that network policies may open by name: `NAME=unix:PATH`, such as models=unix:/run/models.sock; repeatable")
	f.StringVar(&o.Secrets, "secrets", "", "YAML `file` of secrets that the gateway puts into requests of sandboxes; see docs/guides/network-policy.md")
	f.BoolVar(&o.docker, "docker", false, "serve Docker's API, too, on docker.sock in the runtime directory; see docs/coming-from/docker.md")
	f.StringVar(&o.DockerNetwork, "docker-network", "none", "`network` of containers in Docker's bridge: none, full, or a policy as egress:POLICY takes it")
	f.BoolVar(&o.mcp, "mcp", false, "serve MCP, too, on mcp.sock in the runtime directory; see docs/guides/mcp.md")
	f.StringArrayVar(&o.mcpFlags, "mcp-flag", nil, "flag of \"sandboxd mcp\" for --mcp: `NAME=VALUE`, such as image=python:3 or listen=127.0.0.1:7600; repeatable")
	f.StringVar(&o.Profiles, "profiles", "", "`directory` of security profiles beside the built-in ones (default: none)")
	f.IntVar(&o.AgentRuns, "agent-runs", o.AgentRuns, "maximum `number` of hosted agent runs in progress, from 1 to 1000")
	f.DurationVar(&o.AgentAge, "agent-age", o.AgentAge, "maximum age of idle hosted agent runs; 0: no limit")
	f.StringArrayVar(&o.AgentInputs, "agent-inputs", nil, "`directory` below which hosted agent runs may read input_dir and model.replay; repeatable (default: none)")
	f.DurationVar(&o.IdleExit, "idle-exit", 0, "end after this time without a sandbox and a request (default: never)")
	f.StringVar(&o.level, "log-level", o.level, "least `level` that is logged: debug, info, warn or error")
	f.Var(&o.imageLimit, "image-limit", "maximum disk space for images, such as 20g; least recently used ones without a sandbox are removed first (default: no limit)")
	f.Var(&o.snapshotLimit, "snapshot-limit", "maximum disk space for snapshots, such as 20g; oldest ones without a sandbox are removed first (default: no limit)")
	f.Var(&o.volumeLimit, "volume-limit", "maximum sum of the sizes of all volumes, such as 100g, of which a tenant may have a quarter; a volume that names no size gets a 64th (default: no limit)")
	f.Var(&o.logSize, "log-size", "maximum size of a log file, such as 1m, before the next one is started; at least 256k")
	f.Var(&o.logLimit, "log-limit", "maximum disk space for logs, such as 10g; oldest files of the largest logs are removed first, except those being written")
	f.Var(&o.agentLimit, "agent-limit", "maximum disk space for hosted runs, such as 100g; oldest idle ones are removed first, after at least an hour; 0: no limit")
	f.Var(&o.memory, "memory", "memory for all sandboxes together, such as 20g: the sum of their limits, and a ceiling (default: no bound; with --multi-tenant 85% of the host's)")
	f.Var(&o.reserve, "disk-reserve", "free disk space that is left to the daemon, such as 5g; 0: none (default: 5% of the disk, at most 1g)")
	f.StringVar(&o.config, flagConfig, "", "read this `file` of settings only; none: no file (default: /etc/sandboxd/sandboxd.yaml, and the user's own)")
	f.BoolVar(&o.background, flagBackground, false, "")
	_ = f.MarkHidden(flagBackground) // the command line's own, when it starts a daemon
}

func runServe(ctx context.Context, opts *serveOptions, flags *pflag.FlagSet, d deps) error {
	given := *opts
	c, err := opts.load(flags, flags.Changed, hostConfig())
	if err != nil {
		return &cmdline.UsageError{Err: err}
	}
	o, err := opts.finish(c, d) //nolint:contextcheck // it reads files
	if err != nil {
		return err
	}
	o.ConfigFiles, o.Hangup, o.Reload = c.files, cmdline.Hangups(ctx, os.Stdin, os.Stdout, os.Stderr), reloader(given, flags, c)
	o.Version = d.version
	err = d.serve(ctx, o)
	if _, ok := errors.AsType[*boot.OptionError](err); ok {
		return &cmdline.UsageError{Err: c.placed(err)} // all of it: others may be joined to the option's
	}
	if _, ok := errors.AsType[cmdline.Signalled](context.Cause(ctx)); ok && (err == nil || errors.Is(err, context.Cause(ctx)) || errors.Is(err, context.Canceled)) {
		return nil // a requested end
	}
	return err
}

// ceiling returns the policy that a user names as the most that others may allow.
func ceiling(name string) (*policy.Policy, error) {
	switch name {
	case string(api.NetworkNone):
		return new(policy.Policy), nil
	case string(api.NetworkFull):
		return policy.Public(), nil
	}
	document, err := cmdline.PolicyDocument(name, policy.Named)
	if err != nil {
		return nil, err
	}
	return policy.Parse(document)
}

// complete checks the options and sets their defaults. socket is the environment's, which a flag
// overrides.
func (o serveOptions) complete(socket string, find func() (dirs.Dirs, error)) (_ boot.Options, err error) {
	opts := o.Options
	if opts.Socket == "" && opts.RuntimeDir == "" {
		opts.Socket = socket
	}
	if opts.DataDir == "" || opts.RuntimeDir == "" {
		found, err := find()
		switch {
		case err == nil:
		case opts.DataDir == "":
			return opts, err
		default: // without a home directory, the named data directory has the sockets too
			found.Runtime = filepath.Join(opts.DataDir, "run")
		}
		opts.DataDir = cmp.Or(opts.DataDir, found.Data)
		opts.RuntimeDir = cmp.Or(opts.RuntimeDir, found.Runtime)
	}
	opts.Socket = cmp.Or(opts.Socket, filepath.Join(opts.RuntimeDir, dirs.SocketName))
	for _, p := range []*string{&opts.DataDir, &opts.RuntimeDir, &opts.Socket} {
		abs, err := filepath.Abs(*p)
		if err != nil {
			return opts, fmt.Errorf("make %s absolute: %w", *p, err)
		}
		*p = abs
	}
	for i, file := range opts.RegistryCAs {
		abs, err := filepath.Abs(file)
		if err != nil {
			return opts, fmt.Errorf("make %s absolute: %w", file, err)
		}
		opts.RegistryCAs[i] = abs
	}
	for i, dir := range opts.MountRoots {
		found, err := mountRoot(dir, os.Geteuid(), os.Getenv("HOME"))
		if err != nil {
			return opts, err
		}
		opts.MountRoots[i] = found
	}
	for i, dir := range opts.AgentInputs {
		found, err := inputsDir(dir)
		if err != nil {
			return opts, err
		}
		opts.AgentInputs[i] = found
	}
	for i, name := range opts.Require {
		if opts.Require[i] = strings.TrimSpace(name); opts.Require[i] == "" {
			return opts, cmdline.Usagef("--require has an empty name")
		}
	}
	if opts.Secrets != "" {
		abs, err := filepath.Abs(opts.Secrets)
		if err != nil {
			return opts, fmt.Errorf("make %s absolute: %w", opts.Secrets, err)
		}
		opts.Secrets = abs
	}
	if opts.Profiles != "" {
		abs, err := filepath.Abs(opts.Profiles)
		if err != nil {
			return opts, fmt.Errorf("make %s absolute: %w", opts.Profiles, err)
		}
		opts.Profiles = abs
	}
	if o.docker {
		opts.Docker = filepath.Join(opts.RuntimeDir, dirs.DockerSocketName)
		if _, err := bridgeNetwork(opts.DockerNetwork); err != nil {
			return opts, cmdline.Usagef("--docker-network %q: %v", opts.DockerNetwork, err)
		}
		if strings.ContainsRune(opts.DockerNetwork, filepath.Separator) { // the face has another working directory
			name, err := filepath.Abs(strings.TrimPrefix(opts.DockerNetwork, "egress:"))
			if err != nil {
				return opts, fmt.Errorf("make %s absolute: %w", opts.DockerNetwork, err)
			}
			opts.DockerNetwork = name
		}
	}
	if o.mcp {
		var err error
		if opts.MCP, err = daemonMCP(o.mcpFlags, filepath.Join(opts.RuntimeDir, dirs.MCPSocketName)); err != nil {
			return opts, err
		}
		opts.MCP.Socket = opts.Socket
	} else if len(o.mcpFlags) > 0 {
		return opts, cmdline.Usagef("--mcp-flag is for --mcp, which is not given")
	}
	if o.ceiling != "" {
		ceiling, err := ceiling(o.ceiling)
		if err != nil {
			return opts, cmdline.Usagef("--network-ceiling: %v", err)
		}
		opts.NetworkCeiling = ceiling
	}
	if o.codePolicy != "" {
		if opts.CodePolicy, err = readCodePolicy(o.codePolicy); err != nil {
			return opts, cmdline.Usagef("--code-policy: %v", err)
		}
	}
	for _, text := range o.services {
		name, path, err := parseService(text)
		if err != nil {
			return opts, err
		}
		if opts.Services[name] != "" {
			return opts, cmdline.Usagef("--service names %s twice", name)
		}
		if opts.Services == nil {
			opts.Services = make(map[string]string)
		}
		opts.Services[name] = path
	}
	seen := make(map[boot.Pool]bool)
	for _, text := range o.pools {
		pool, err := parsePool(text)
		if err != nil {
			return opts, err
		}
		opts.Pools = append(opts.Pools, pool)
		pool.Size, pool.Learn, pool.Context = 0, false, ""
		if seen[pool] {
			return opts, cmdline.Usagef("--pool names %s twice with profile %s", pool.Image, pool.Profile)
		}
		seen[pool] = true
	}
	return opts, checkValues(&opts)
}

// checkValues checks the ranges of options that their flags do not. Each error begins with the
// flag.
func checkValues(o *boot.Options) error {
	switch {
	case o.DefaultTimeout <= 0:
		return cmdline.Usagef("--default-timeout %v: every sandbox has an end, so it must be greater than 0", o.DefaultTimeout)
	case o.DefaultIdleTimeout <= 0:
		return cmdline.Usagef("--default-idle-timeout %v: every sandbox has an end, so it must be greater than 0", o.DefaultIdleTimeout)
	case o.EndedAge < 0:
		return cmdline.Usagef("--ended-age %v is negative", o.EndedAge)
	case o.SnapshotAge < 0:
		return cmdline.Usagef("--snapshot-age %v is negative", o.SnapshotAge)
	case o.AgentAge < 0:
		return cmdline.Usagef("--agent-age %v is negative", o.AgentAge)
	case o.Pids < 0 || o.Pids > 0 && o.Pids < 64:
		return cmdline.Usagef("--pids %d: must be at least 64", o.Pids)
	case o.Overcommit != 0 && !(o.Overcommit >= 1 && o.Overcommit <= 100): // NaN too
		return cmdline.Usagef("--overcommit %v: must be from 1 to 100", o.Overcommit)
	case o.EndedLimit < 0:
		return cmdline.Usagef("--ended-limit %d is negative", o.EndedLimit)
	case o.IdleExit < 0:
		return cmdline.Usagef("--idle-exit %v is negative", o.IdleExit)
	}
	if err := boot.CheckCodeHook(o.CodeHook, o.MultiTenant); err != nil {
		return cmdline.Usagef("--code-hook %q: %w", o.CodeHook, err)
	}
	return nil
}

// inputsDir resolves a directory of --agent-inputs.
func inputsDir(dir string) (string, error) {
	found, err := filepath.Abs(dir)
	if err == nil {
		found, err = filepath.EvalSymlinks(found)
	}
	if err != nil {
		return "", cmdline.Usagef("--agent-inputs %q: %w", dir, err)
	}
	if fi, err := os.Stat(found); err != nil || !fi.IsDir() {
		return "", cmdline.Usagef("--agent-inputs %q: not a directory", dir)
	}
	if found == "/" {
		return "", cmdline.Usagef("--agent-inputs %q: that is all there is; name the directory that has the input", dir)
	}
	return found, nil
}

// maxSocketPath is the longest path of a Unix socket: sun_path without its NUL.
const maxSocketPath = 107

// parseService parses NAME=unix:PATH. The server may listen later: programs that connect before are
// told so.
func parseService(s string) (name, path string, err error) {
	name, to, _ := strings.Cut(s, "=")
	path, ok := strings.CutPrefix(to, "unix:")
	switch {
	case !ok || path == "" || !policy.IsSocketName(name):
		return "", "", cmdline.Usagef("--service %q: want NAME=unix:PATH; a name has up to 63 lower-case letters, digits and inner hyphens", s)
	case path[0] == '@':
		return "", "", cmdline.Usagef("--service %q: abstract sockets have no owner, and any program can listen there first", s)
	}
	if path, err = filepath.Abs(path); err != nil {
		return "", "", fmt.Errorf("make %s absolute: %w", s, err)
	}
	if len(path) > maxSocketPath {
		return "", "", cmdline.Usagef("--service %q: the path of a socket has at most %d bytes", s, maxSocketPath)
	}
	return name, path, nil
}

// maxPool is the maximum size of a pool: idle sandboxes take memory, and a daemon has at most a
// thousand.
const maxPool = 100

// learnedPool is the default maximum of a pool with a learned size.
const learnedPool = 8

// parsePool parses IMAGE=N, IMAGE=auto or IMAGE=auto:N, with an optional ,PROFILE, an optional
// ,network and an optional ,context=LANGUAGE[+MODULE...].
func parsePool(text string) (p boot.Pool, err error) {
	s, ctx, waits := strings.Cut(text, ",context=")
	i := strings.LastIndexByte(s, '=')
	if i > 0 {
		size, rest, named := strings.Cut(s[i+1:], ",")
		p.Image, p.Profile = s[:i], rest
		if before, ok := strings.CutSuffix(","+rest, ",network"); ok {
			p.Network, p.Profile = true, strings.TrimPrefix(before, ",")
			named = p.Profile != ""
		}
		if !named {
			p.Profile = ociprofiles.Default
		}
		switch most, found := strings.CutPrefix(size, "auto:"); {
		case found:
			p.Learn, size = true, most
		case size == "auto":
			p.Learn, size = true, strconv.Itoa(learnedPool)
		}
		p.Size, err = strconv.Atoi(size)
	}
	if p.Context = ctx; i <= 0 || err != nil || p.Size < 1 || p.Size > maxPool || p.Profile == "" || waits && ctx == "" {
		return p, cmdline.Usagef("--pool %q: want IMAGE=N, IMAGE=auto or IMAGE=auto:N, with N from 1 to %d, and perhaps ,PROFILE, ,network and ,context=LANGUAGE", text, maxPool)
	}
	return p, nil
}

// unpackLimits is a flag for limits: "bytes=100g,entries=5000000".
type unpackLimits layer.Limits

// The names are those of exceeded limits in errors.
const (
	limitEntries = string(layer.ExceededEntries)
	limitBytes   = string(layer.ExceededBytes)
	limitRatio   = string(layer.ExceededRatio)
	limitDepth   = string(layer.ExceededDepth)
)

func (l *unpackLimits) String() string {
	if *l == (unpackLimits{}) {
		return "" // pflag's zero value
	}
	return fmt.Sprintf("%s=%d,%s=%s,%s=%d,%s=%d", limitEntries, l.Entries, limitBytes, units.BytesSize(float64(l.Bytes)), limitRatio, l.Ratio, limitDepth, l.Depth)
}

func (l *unpackLimits) Type() string { return "limits" }

func (l *unpackLimits) Set(text string) error {
	for one := range strings.SplitSeq(text, ",") {
		name, value, _ := strings.Cut(one, "=")
		n, err := strconv.ParseInt(value, 10, 64)
		most := int64(math.MaxInt64)
		switch name {
		case limitEntries:
			l.Entries = n
		case limitBytes:
			if n, err = units.RAMInBytes(value); err == nil {
				l.Bytes = n
			}
		case limitRatio:
			l.Ratio = n
		case limitDepth:
			most = layer.MaxDepth
			l.Depth = int(min(n, most))
		default:
			return fmt.Errorf("%q is none of %s, %s, %s and %s", name, limitEntries, limitBytes, limitRatio, limitDepth)
		}
		if err != nil || n < 1 || n > most {
			return fmt.Errorf("%q: want a number from 1 to %d", one, most)
		}
	}
	return nil
}

// mountRoot returns the directory that a value of --mount-root means. Root has no $HOME there: the
// daemon of a service manager would have another than that of a shell.
func mountRoot(dir string, uid int, home string) (string, error) {
	if rest, ok := strings.CutPrefix(dir, "$HOME"); ok && (rest == "" || rest[0] == '/') {
		if uid == 0 || !filepath.IsAbs(home) {
			return "", cmdline.Usagef("--mount-root %s: $HOME is for the daemon of an ordinary user, who has one; name the directory", dir)
		}
		dir = home + rest
	}
	found, err := hostdir.Root(dir)
	if err != nil {
		return "", cmdline.Usagef("--mount-root: %w", err)
	}
	return found, nil
}
