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
	"github.com/sandboxd/sandboxd/netns/policy"
	ociprofiles "github.com/sandboxd/sandboxd/oci-profiles"
)

// serveOptions holds the flags of serve. To add an option: a field of [boot.Options] with its
// default in newServe, a line in addFlags, a line in the golden help. To retire one: MarkDeprecated
// for two minor versions, then delete both.
type serveOptions struct {
	boot.Options

	pools   []string // IMAGE=N, IMAGE=auto or IMAGE=auto:N, with an optional ,PROFILE
	ceiling string
}

func newServe(d deps) *cobra.Command {
	opts := serveOptions{Options: boot.Options{
		DefaultTimeout:     time.Hour,
		DefaultIdleTimeout: 10 * time.Minute,
		UnpackLimits:       layer.DefaultLimits(),
		LogFiles:           3,
		AgentRuns:          8,
		AgentAge:           30 * 24 * time.Hour,
		EndedAge:           30 * 24 * time.Hour,
	}}
	var level string
	var limit, snapshots, memory, reserve cmdline.Size
	logs := cmdline.Size{Given: true, Bytes: 4 << 20, Least: 256 << 10}
	allLogs := cmdline.Size{Given: true, Bytes: 2 << 30, Least: 1 << 20}
	runs := cmdline.Size{Given: true, Bytes: 20 << 30}
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run the daemon in the foreground",
		Long: `Run the daemon in the foreground: it answers on the socket until SIGTERM, SIGINT or
"sandboxd shutdown" ends it. Sandboxes outlive a daemon that is killed; the next
one on the same data directory adopts them. The log goes to stderr.`,
		Args: cmdline.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := opts.LogLevel.UnmarshalText([]byte(level)); err != nil {
				return cmdline.Usagef("--log-level %q: want debug, info, warn or error", level)
			}
			if opts.LogFiles < 2 || opts.LogFiles > 1000 {
				return cmdline.Usagef("--log-files %d: must be from 2 to 1000", opts.LogFiles)
			}
			if opts.AgentRuns < 1 || opts.AgentRuns > 1000 {
				return cmdline.Usagef("--agent-runs %d: must be from 1 to 1000", opts.AgentRuns)
			}
			opts.Socket, opts.ImageLimit, opts.SnapshotLimit, opts.LogSize = d.SocketFlag(), limit.Bytes, snapshots.Bytes, logs.Bytes
			opts.LogLimit, opts.AgentLimit = allLogs.Bytes, runs.Bytes
			opts.Memory, opts.DiskReserve = memory.Bytes, -1
			if reserve.Given {
				opts.DiskReserve = reserve.Bytes
			}
			return runServe(cmd.Context(), opts, d)
		},
	}
	opts.addFlags(cmd.Flags())
	cmd.Flags().StringVar(&level, "log-level", "info", "least `level` that is logged: debug, info, warn or error")
	cmd.Flags().Var(&limit, "image-limit", "maximum disk space for images, such as 20g; least recently used ones without a sandbox are removed first (default: no limit)")
	cmd.Flags().Var(&snapshots, "snapshot-limit", "maximum disk space for snapshots, such as 20g; oldest ones without a sandbox are removed first (default: no limit)")
	cmd.Flags().Var(&logs, "log-size", "maximum size of a log file, such as 1m, before the next one is started; at least 256k")
	cmd.Flags().Var(&allLogs, "log-limit", "maximum disk space for logs, such as 10g; oldest files of the largest logs are removed first, except those being written")
	cmd.Flags().Var(&runs, "agent-limit", "maximum disk space for hosted runs, such as 100g; oldest idle ones are removed first, after at least an hour; 0: no limit")
	memory.Least = 64 << 20
	cmd.Flags().Var(&memory, "memory", "memory for all sandboxes together, such as 20g: the sum of their limits, and a ceiling (default: no bound; with --multi-tenant 85% of the host's)")
	cmd.Flags().Var(&reserve, "disk-reserve", "free disk space that is left to the daemon, such as 5g; 0: none (default: 5% of the disk, at most 1g)")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
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
	f.StringArrayVar(&o.pools, "pool", nil, "warm pool of N idle sandboxes: `IMAGE=N[,PROFILE][,network]`, such as host=4; with auto or auto:N its size follows the creations of the last ten minutes, up to 8 or N; repeatable")
	f.DurationVar(&o.EndedAge, "ended-age", o.EndedAge, "maximum age of ended sandboxes without the label sandboxd.keep; 0: no limit")
	f.IntVar(&o.EndedLimit, "ended-limit", 0, "maximum `number` of ended sandboxes; oldest are removed first, after at least an hour; 0: no limit")
	f.DurationVar(&o.SnapshotAge, "snapshot-age", 0, "maximum age of snapshots without a sandbox and without the label sandboxd.keep (default: no limit)")
	f.StringVar(&o.ceiling, "network-ceiling", "", "most that network policies may allow: a policy `file`, presets such as pypi,npm, full, or none (default: no bound; for tenants full)")
	f.StringVar(&o.Secrets, "secrets", "", "YAML `file` of secrets that the gateway puts into requests of sandboxes; see docs/guides/network-policy.md")
	f.StringVar(&o.Profiles, "profiles", "", "`directory` of security profiles beside the built-in ones (default: none)")
	f.IntVar(&o.AgentRuns, "agent-runs", o.AgentRuns, "maximum `number` of hosted agent runs in progress, from 1 to 1000")
	f.DurationVar(&o.AgentAge, "agent-age", o.AgentAge, "maximum age of idle hosted agent runs; 0: no limit")
	f.StringArrayVar(&o.AgentInputs, "agent-inputs", nil, "`directory` below which hosted agent runs may read input_dir and model.replay; repeatable (default: none)")
	f.DurationVar(&o.IdleExit, "idle-exit", 0, "end after this time without a sandbox and a request (default: never)")
}

func runServe(ctx context.Context, opts serveOptions, d deps) error {
	o, err := opts.complete(os.Getenv("SANDBOXD_SOCKET"), dirs.Default)
	if err != nil {
		return err
	}
	o.Version = d.version
	err = d.serve(ctx, o)
	if _, ok := errors.AsType[*boot.OptionError](err); ok {
		return &cmdline.UsageError{Err: err} // all of it: others may be joined to the option's
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
	document, err := cmdline.PolicyDocument(name)
	if err != nil {
		return nil, err
	}
	return policy.Parse(document)
}

// complete checks the options and sets their defaults. socket is the environment's, which a flag
// overrides.
func (o serveOptions) complete(socket string, find func() (dirs.Dirs, error)) (boot.Options, error) {
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
	if o.ceiling != "" {
		ceiling, err := ceiling(o.ceiling)
		if err != nil {
			return opts, cmdline.Usagef("--network-ceiling: %v", err)
		}
		opts.NetworkCeiling = ceiling
	}
	seen := make(map[boot.Pool]bool)
	for _, text := range o.pools {
		pool, err := parsePool(text)
		if err != nil {
			return opts, err
		}
		opts.Pools = append(opts.Pools, pool)
		pool.Size, pool.Learn = 0, false
		if seen[pool] {
			return opts, cmdline.Usagef("--pool names %s twice with profile %s", pool.Image, pool.Profile)
		}
		seen[pool] = true
	}
	switch {
	case opts.DefaultTimeout <= 0:
		return opts, cmdline.Usagef("--default-timeout %v: every sandbox has an end, so it must be greater than 0", opts.DefaultTimeout)
	case opts.DefaultIdleTimeout <= 0:
		return opts, cmdline.Usagef("--default-idle-timeout %v: every sandbox has an end, so it must be greater than 0", opts.DefaultIdleTimeout)
	case opts.EndedAge < 0 || opts.SnapshotAge < 0 || opts.AgentAge < 0:
		return opts, cmdline.Usagef("--ended-age %v, --snapshot-age %v, --agent-age %v: none may be negative", opts.EndedAge, opts.SnapshotAge, opts.AgentAge)
	case opts.Pids < 0 || opts.Pids > 0 && opts.Pids < 64:
		return opts, cmdline.Usagef("--pids %d: must be at least 64", opts.Pids)
	case opts.Overcommit != 0 && !(opts.Overcommit >= 1 && opts.Overcommit <= 100): // NaN too
		return opts, cmdline.Usagef("--overcommit %v: must be from 1 to 100", opts.Overcommit)
	case opts.EndedLimit < 0:
		return opts, cmdline.Usagef("--ended-limit %d is negative", opts.EndedLimit)
	case opts.IdleExit < 0:
		return opts, cmdline.Usagef("--idle-exit %v is negative", opts.IdleExit)
	}
	return opts, nil
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

// maxPool is the maximum size of a pool: idle sandboxes take memory, and a daemon has at most a
// thousand.
const maxPool = 100

// learnedPool is the default maximum of a pool with a learned size.
const learnedPool = 8

// parsePool parses IMAGE=N, IMAGE=auto or IMAGE=auto:N, with an optional ,PROFILE.
func parsePool(s string) (p boot.Pool, err error) {
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
	if i <= 0 || err != nil || p.Size < 1 || p.Size > maxPool || p.Profile == "" {
		return p, cmdline.Usagef("--pool %q: want IMAGE=N, IMAGE=auto or IMAGE=auto:N, with N from 1 to %d, and perhaps ,PROFILE and ,network", s, maxPool)
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
