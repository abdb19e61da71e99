package cli

import (
	"cmp"
	"context"
	"os"
	"strings"

	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

// processFlags describe a program to start.
type processFlags struct {
	env      []string
	envFiles []string
	cwd      string
	user     string
}

func (p *processFlags) addFlags(f *pflag.FlagSet) {
	f.StringArrayVarP(&p.env, "env", "e", nil, "set a `variable`: KEY=value, or KEY to pass on its value here")
	f.StringArrayVar(&p.envFiles, "env-file", nil, "set the variables of a `file` with lines of KEY=value or KEY; --env comes after; repeatable")
	f.StringVarP(&p.cwd, "cwd", "w", "", "working `directory` (default: the image's); also --workdir")
	f.StringVarP(&p.user, "user", "u", "", "`user` in the sandbox: name or uid, and :group or :gid (default: the image's)")
	f.SetNormalizeFunc(normalize)
}

// aliases are Docker's names of flags that have others here.
var aliases = map[string]string{"workdir": "cwd", "cpuset-cpus": "cpuset", "pids-limit": "pids", "net": "network", "net-alias": "network-alias"}

func normalize(_ *pflag.FlagSet, name string) pflag.NormalizedName {
	return pflag.NormalizedName(cmp.Or(aliases[name], name))
}

// resolve returns the variables of files and flags, with KEY turned into KEY=value.
func (p *processFlags) resolve(getenv func(string) (string, bool)) ([]string, error) {
	var all, out []string
	for _, name := range p.envFiles {
		lines, err := readEnvFile(name)
		if err != nil {
			return nil, err
		}
		all = append(all, lines...)
	}
	inFiles := len(all)
	for i, e := range append(all, p.env...) {
		key, _, ok := strings.Cut(e, "=")
		if key == "" {
			return nil, cmdline.Usagef("--env %q has no name", e)
		}
		if !ok {
			value, set := getenv(key)
			if !set && i < inFiles {
				continue // as Docker does
			}
			if set { // else unset here, unset there
				e = key + "=" + value
			}
		}
		out = append(out, e)
	}
	return out, nil
}

// limitFlags are the limits of a sandbox that can be changed while it runs.
type limitFlags struct {
	memory     cmdline.Size
	memoryHigh cmdline.Size
	swap       cmdline.Size
	oomGroup   bool
	cpus       float64
	cpuWeight  int64
	cpuset     string
	pids       int64
	ioWeight   int64
	readBPS    cmdline.Size
	writeBPS   cmdline.Size
	readIOPS   int64
	writeIOPS  int64
	disk       cmdline.Size
	inodes     cmdline.Count
}

func (l *limitFlags) addFlags(f *pflag.FlagSet) {
	f.VarP(&l.memory, "memory", "m", "maximum memory, such as 512m")
	f.Var(&l.memoryHigh, "memory-high", "memory above which the sandbox is throttled, such as 400m")
	f.Var(&l.swap, "swap", "maximum swap, such as 1g (default 0)")
	f.BoolVar(&l.oomGroup, "oom-group", false, "end the whole sandbox when it is out of memory, not one process")
	f.Float64Var(&l.cpus, "cpus", 0, "maximum processor time, in `cores` such as 0.5")
	f.Int64Var(&l.cpuWeight, "cpu-weight", 0, "share of busy processors, a `number` from 1 to 10000 (default 100)")
	f.StringVar(&l.cpuset, "cpuset", "", "usable `cores`, such as 0-1,3")
	f.Int64Var(&l.pids, "pids", 0, "maximum `number` of processes and threads")
	f.Int64Var(&l.ioWeight, "io-weight", 0, "share of a busy disk, a `number` from 1 to 10000 (default 100)")
	f.Var(&l.readBPS, "io-read-bps", "maximum bytes read from disk per second, such as 10m")
	f.Var(&l.writeBPS, "io-write-bps", "maximum bytes written to disk per second, such as 10m")
	f.Int64Var(&l.readIOPS, "io-read-iops", 0, "maximum `number` of disk reads per second")
	f.Int64Var(&l.writeIOPS, "io-write-iops", 0, "maximum `number` of disk writes per second")
	f.Var(&l.disk, "disk", "maximum disk space of the sandbox's files, such as 2g; beyond it the sandbox is ended")
	f.Var(&l.inodes, "inodes", "maximum number of files, such as 100k (default: one for each 8 KiB of --disk)")
}

func (l *limitFlags) io() api.IOLimits {
	return api.IOLimits{
		Weight: l.ioWeight, ReadBPS: l.readBPS.Bytes, WriteBPS: l.writeBPS.Bytes, ReadIOPS: l.readIOPS, WriteIOPS: l.writeIOPS,
	}
}

// limits returns the given limits. changed tells an explicit zero, which is refused, from a missing
// flag.
func (l *limitFlags) limits(changed func(string) bool) (api.Limits, error) {
	limits := api.Limits{
		Memory: l.memory.Bytes, MemoryHigh: l.memoryHigh.Bytes, OOMGroup: l.oomGroup, CPUs: l.cpus, CPUWeight: l.cpuWeight, CPUSet: l.cpuset,
		Pids: l.pids, IO: l.io(), Disk: l.disk.Bytes, Inodes: l.inodes.N,
	}
	if l.swap.Given {
		limits.Swap = &l.swap.Bytes
	}
	switch {
	case changed("cpus") && !(l.cpus > 0 && l.cpus <= 1e6): // rejects NaN too
		return limits, cmdline.Usagef("--cpus %v is not a number of cores greater than 0", l.cpus)
	case changed("pids") && l.pids < 1:
		return limits, cmdline.Usagef("--pids %d is less than 1", l.pids)
	case changed("cpu-weight") && l.cpuWeight < 1:
		return limits, cmdline.Usagef("--cpu-weight %d is less than 1", l.cpuWeight)
	case changed("cpuset") && l.cpuset == "":
		return limits, cmdline.Usagef("--cpuset names no core")
	case changed("io-weight") && l.ioWeight < 1:
		return limits, cmdline.Usagef("--io-weight %d is less than 1", l.ioWeight)
	case changed("io-read-iops") && l.readIOPS < 1:
		return limits, cmdline.Usagef("--io-read-iops %d is less than 1", l.readIOPS)
	case changed("io-write-iops") && l.writeIOPS < 1:
		return limits, cmdline.Usagef("--io-write-iops %d is less than 1", l.writeIOPS)
	}
	return limits, nil
}

// sandboxFlags describe a sandbox to create.
type sandboxFlags struct {
	processFlags
	limitFlags
	settingFlags

	imageCommand bool
	entrypoint   string
	replaces     bool // --entrypoint is given, be it empty

	name     string
	snapshot string
	labels   []string
	profile  string
	network  cmdline.Network
	aliases  []string
	egress   cmdline.Size
	publish  []string
	secrets  []string
	nofile   uint64
	lifetime lifetime
	idle     cmdline.Seconds
}

func (s *sandboxFlags) addFlags(f *pflag.FlagSet) {
	s.processFlags.addFlags(f)
	s.limitFlags.addFlags(f)
	s.memory.Least, s.memoryHigh.Least, s.readBPS.Least, s.writeBPS.Least = 1, 1, 1, 1
	f.StringVar(&s.name, "name", "", "`name` of the sandbox (default: generated)")
	f.StringVar(&s.snapshot, "snapshot", "", "id or name of a `snapshot` to create it from, instead of an image")
	s.settingFlags.addFlags(f)
	f.BoolVar(&s.imageCommand, "image-command", false, "run the image's ENTRYPOINT as main process, with its CMD unless a program is given")
	f.StringVar(&s.entrypoint, "entrypoint", "", "`program` in the place of the image's ENTRYPOINT and CMD; an empty one clears them")
	addHabits(f, habits...)
	f.StringArrayVarP(&s.labels, "label", "l", nil, "`label` of the sandbox: key=value")
	f.StringVar(&s.profile, "profile", "", "security `profile` (default \"default\")")
	s.egress.Least = 1
	f.Var(&s.network, "network", cmdline.NetworkUsage)
	f.StringArrayVar(&s.aliases, "network-alias", nil, "`name` by which the others in its named networks find it, too; repeatable")
	f.StringArrayVar(&s.secrets, "secret", nil, "`name` of a secret that the gateway puts into requests (sandboxd secret ls); repeatable")
	f.StringArrayVarP(&s.publish, "publish", "p", nil, "publish a port of the sandbox: `[[ADDRESS:]HOSTPORT:]PORT[/udp]`, by default at 127.0.0.1, or unix:NAME:PORT; repeatable")
	f.Var(&s.egress, "max-egress", "maximum bytes that leave over the network, such as 100m")
	f.Uint64Var(&s.nofile, "nofile", 0, "maximum `number` of open files per process")
	f.Var(&s.lifetime, "lifetime", "maximum lifetime of the sandbox, or never (default: the daemon's)")
	f.Var(&s.idle, "idle-timeout", "stop the sandbox after this time without a request (default: the daemon's)")
}

// request returns the create request. changed tells an explicit zero, which is refused, from a
// missing flag.
func (s *sandboxFlags) request(ctx context.Context, image string, changed func(string) bool) (api.CreateSandbox, error) {
	req := api.CreateSandbox{
		Image: image, Snapshot: s.snapshot, Name: s.name, Cwd: s.cwd, User: s.user, Profile: s.profile,
		Timeout: float64(s.lifetime), IdleTimeout: float64(s.idle),
	}
	if s.snapshot != "" && image != "" {
		return req, cmdline.Usagef("--snapshot %s: a snapshot has its image, so %q means nothing; what stands before \"--\" is an image", s.snapshot, image)
	}
	var err error
	if req.Limits, err = s.limits(changed); err != nil {
		return req, err
	}
	if req.Ports, err = parsePorts(s.publish); err != nil {
		return req, err
	}
	if req.Network, err = s.network.With(&s.egress, "--max-egress"); err != nil {
		return req, err
	}
	if s.snapshot != "" && !changed("network") && req.Network.Mode == api.NetworkNone { // --learn gives one too
		req.Network = api.Network{} // that of the snapshot
	}
	if len(req.Ports) > 0 && req.Network.Mode == api.NetworkNone && len(req.Network.Join) == 0 {
		return req, cmdline.Usagef("--publish: a sandbox without a network has no ports; give it one with --network full or --network egress:POLICY")
	}
	if err := withAliases(&req.Network, s.aliases); err != nil {
		return req, err
	}
	req.Network.Secrets = s.secrets
	if changed("nofile") && s.nofile < 1 {
		return req, cmdline.Usagef("--nofile %d is less than 1", s.nofile)
	}
	req.Limits.Nofile = s.nofile
	if req.Env, err = s.resolve(os.LookupEnv); err != nil {
		return req, err
	}
	if s.replaces = changed("entrypoint"); s.replaces {
		req.Entrypoint = []string{s.entrypoint}
	}
	if req.Settings, err = s.settings(ctx); err != nil {
		return req, err
	}
	req.Labels, err = labelsOf(s.labels)
	return req, err
}

// fromImage reports whether the image may say what it runs. That of the host does not.
func (s *sandboxFlags) fromImage(image string) bool {
	return s.snapshot == "" && image != "" && image != api.HostImage || s.replaces
}

// main adds the main process to the create request: argv is passed to the image's ENTRYPOINT. With
// whole, as of run, an image without arguments runs its command; else the sandbox idles.
func (s *sandboxFlags) main(req *api.CreateSandbox, argv []string, tty, interactive, whole bool) error {
	fromImage := s.imageCommand || s.fromImage(req.Image) && (whole || len(argv) > 0)
	switch {
	case len(argv) > 0 && argv[0] == "" && !fromImage:
		return cmdline.Usagef("the program has an empty name")
	case s.imageCommand && s.snapshot != "" && !s.replaces:
		return cmdline.Usagef("--image-command: a snapshot does not say what its image runs; name the program")
	case (tty || interactive) && len(argv) == 0 && !fromImage:
		return cmdline.Usagef("--tty and --interactive are of the main process, and there is none; name a program behind \"--\"")
	case s.restart != "" && s.restart != "no" && len(argv) == 0 && !fromImage:
		return cmdline.Usagef("--restart is about the main process, and there is none; name a program behind \"--\"")
	}
	req.Command, req.ImageCommand, req.TTY, req.StdinOpen = argv, fromImage, tty, interactive
	if tty {
		req.Env = withTerm(req.Env)
	}
	return nil
}

func labelsOf(list []string) (map[string]string, error) {
	var labels map[string]string
	for _, l := range list {
		key, value, _ := strings.Cut(l, "=")
		if key == "" {
			return nil, cmdline.Usagef("--label %q has no key", l)
		}
		if labels == nil {
			labels = map[string]string{}
		}
		labels[key] = value
	}
	return labels, nil
}

// terminalFlags control how a program is connected to the caller.
type terminalFlags struct {
	tty         bool
	interactive bool
	timeout     cmdline.Seconds
	json        bool

	detachKeys []byte // nil of a program that does not go on without the command
	detachAs   string // the form in which it goes on: see [api.ExecControl]
}

func (t *terminalFlags) addFlags(f *pflag.FlagSet) {
	f.BoolVarP(&t.tty, "tty", "t", false, "give the program a terminal")
	f.BoolVarP(&t.interactive, "interactive", "i", false, "pass stdin on to the program (otherwise it is empty)")
	f.Var(&t.timeout, "timeout", "stop the program and all its children after this time")
	f.BoolVar(&t.json, "json", false, "print the result with its output, exit and usage as JSON")
}

func (t *terminalFlags) check() error {
	if t.json && (t.tty || t.interactive) {
		return cmdline.Usagef("--json waits for the program's end and cannot be combined with --tty or --interactive")
	}
	return nil
}
