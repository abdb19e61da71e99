package cli

import (
	"errors"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/internal/cmdline"
)

// Users of Docker type its flags and commands. Those that mean what holds in any case are accepted;
// others are refused with the reason and what to do instead. `sandboxd docs docker` has the table.

// habit is a flag of Docker's run and create. It is hidden: help shows the flags of our own.
type habit struct {
	name, short string
	bare        bool     // has no value
	accepts     []string // values that change nothing here; bare flags have "true"
	why         string   // the refusal of all others
}

// Reasons that several flags share.
const (
	noHostNamespaces = "a sandbox never shares a namespace of the host; leave the flag out"
	noOtherVolumes   = "name the volumes, with -v NAME:TARGET: several sandboxes may have the same one"
	noDNS            = "names are resolved by the sandbox's gateway, by the host's resolver and the policy; --add-host adds names of your own"
	noAddresses      = "every sandbox has the same address of its own namespace; sandboxes reach each other by name: --network net:NAME and --name"
	noLogDriver      = "output is kept in the sandbox's log: sandboxd logs"
	diskLimits       = "limits hold for the disk of the data directory, without a PATH: see --io-read-bps, --io-write-bps, --io-read-iops, --io-write-iops and --io-weight"
)

// habits are the flags that run and create take beside their own.
var habits = []habit{
	{name: "privileged", bare: true, why: "no sandbox has power over the host; what a program needs may work in the sandbox's own user namespace, and sandboxd profiles shows what each profile allows"},
	{name: "gpus", why: "devices of the host are not passed in; run what needs a GPU outside, or behind a server that a policy lets the sandbox reach (--network egress:POLICY)"},
	{name: "device", why: "devices of the host are not passed in; /dev has null, zero, full, random, urandom, tty and terminals"},
	{name: "device-cgroup-rule", why: "devices of the host are not passed in, so there is none to allow"},
	{name: "pid", accepts: []string{""}, why: noHostNamespaces + "; sandboxd top lists a sandbox's processes"},
	{name: "ipc", accepts: []string{"", "private", "none"}, why: noHostNamespaces + "; --shm-size sets the size of /dev/shm"},
	{name: "uts", accepts: []string{""}, why: noHostNamespaces + "; --hostname sets the name"},
	{name: "userns", accepts: []string{"", "private", "auto"}, why: noHostNamespaces + "; every sandbox has a user namespace"},
	{name: "cgroupns", accepts: []string{"", "private"}, why: noHostNamespaces},
	{name: "cgroup-parent", why: "sandboxes have cgroups below the daemon's own; limits are set with --memory, --cpus and --pids"},
	{name: "volumes-from", why: noOtherVolumes},
	{name: "volume-driver", accepts: []string{"local"}, why: "volumes are directories of the daemon's; there are no drivers"},
	{name: "security-opt", accepts: []string{"no-new-privileges", "no-new-privileges:true", "no-new-privileges=true"}, why: "the filter of system calls and the other restrictions are the profile's: choose one with --profile (sandboxd profiles); no-new-privileges always holds"},
	{name: "sysctl", why: "sysctls are the kernel's defaults in a sandbox's own namespaces and cannot be changed"},
	{name: "runtime", accepts: []string{"runc"}, why: "sandboxd is the runtime; there is no other"},
	{name: "isolation", accepts: []string{"", "default"}, why: "that is for Windows; leave the flag out"},
	{name: "storage-opt", why: "--disk 10g sets the quota of a sandbox, --inodes that of its files"},
	{name: "publish-all", short: "P", bare: true, why: "name the ports, as in -p 8080:80; -p 80 takes a free port"},
	{name: "expose", accepts: nil, why: "nothing needs to be exposed: sandboxes in one network reach all ports of each other, and -p publishes a port at the host"},
	{name: "link", why: "sandboxes reach each other by name in a network: --network net:NAME"},
	{name: "dns", why: noDNS},
	{name: "dns-option", why: noDNS},
	{name: "dns-opt", why: noDNS},
	{name: "dns-search", why: noDNS},
	{name: "domainname", why: "--hostname takes a full name, as in --hostname web.example.com"},
	{name: "ip", why: noAddresses},
	{name: "ip6", why: noAddresses},
	{name: "link-local-ip", why: noAddresses},
	{name: "mac-address", why: noAddresses},
	{name: "cpu-shares", short: "c", why: "the share of a busy processor is --cpu-weight, 100 by default (Docker's 1024)"},
	{name: "cpu-period", why: "the ceiling on processor time is --cpus, as in --cpus 0.5"},
	{name: "cpu-quota", why: "the ceiling on processor time is --cpus, as in --cpus 0.5"},
	{name: "cpu-count", why: "the ceiling on processor time is --cpus, as in --cpus 2"},
	{name: "cpu-percent", why: "the ceiling on processor time is --cpus, as in --cpus 0.5"},
	{name: "cpu-rt-period", why: "no program of a sandbox has real-time priority"},
	{name: "cpu-rt-runtime", why: "no program of a sandbox has real-time priority"},
	{name: "cpuset-mems", why: "memory nodes cannot be chosen; --cpuset chooses cores"},
	{name: "memory-swap", why: "swap is given by itself, not as a sum with the memory: --swap, 0 by default"},
	{name: "memory-reservation", why: "the size above which a sandbox is throttled is --memory-high"},
	{name: "memory-swappiness", why: "the host decides what it swaps; --swap bounds it, 0 by default"},
	{name: "kernel-memory", why: "the kernel's memory counts towards --memory"},
	{name: "oom-kill-disable", bare: true, why: "a sandbox that is out of memory cannot be left standing; --oom-group ends it as a whole, else the kernel ends one process"},
	{name: "oom-score-adj", why: "which process the kernel ends is its decision; --oom-group ends the whole sandbox"},
	{name: "blkio-weight", why: diskLimits},
	{name: "blkio-weight-device", why: diskLimits},
	{name: "device-read-bps", why: diskLimits},
	{name: "device-read-iops", why: diskLimits},
	{name: "device-write-bps", why: diskLimits},
	{name: "device-write-iops", why: diskLimits},
	{name: "group-add", why: "a program has the groups that /etc/group of its image gives its user; --user name:group chooses the first"},
	{name: "stop-timeout", why: "the time is given when it is stopped: sandboxd stop --grace"},
	{name: "attach", short: "a", accepts: []string{"stdout", "stderr", "STDOUT", "STDERR"}, why: "-i passes stdin on; output is always passed on"},
	{name: "sig-proxy", bare: true, accepts: []string{"true"}, why: "a signal to this command goes to the program; give --detach to leave it alone"},
	{name: "cidfile", why: "the id is printed: sandboxd run -d … > FILE"},
	{name: "label-file", why: "labels are given one by one, with --label"},
	{name: "annotation", why: "labels hold such notes: --label key=value"},
	{name: "log-driver", accepts: []string{"json-file", "local"}, why: noLogDriver},
	{name: "log-opt", why: noLogDriver + "; its size is a setting of the daemon (sandboxd serve --log-size)"},
	{name: "pull", accepts: []string{"missing"}, why: "an image that is not here is pulled; sandboxd pull IMAGE fetches it anew"},
	{name: "platform", why: "the image for this host is chosen; programs of other platforms do not run"},
	{name: "quiet", short: "q", bare: true, accepts: []string{"true"}},
	{name: "disable-content-trust", bare: true, accepts: []string{"true"}, why: "signatures of images are not checked; name an image by its digest to be sure of its content"},
	{name: "use-api-socket", bare: true, why: "a sandbox that reaches the daemon's socket has the daemon's power; leave the flag out"},
	{name: "systemd", why: "a sandbox runs one program below a small init, and no systemd"},
	{name: "pod", why: "sandboxes share a network with --network sandbox:NAME"},
}

// refusal is the value of a habit.
type refusal struct{ habit }

func (r *refusal) String() string { return "" }

// Type implements pflag.Value.
func (r *refusal) Type() string { return "value" }

// Set implements pflag.Value.
func (r *refusal) Set(value string) error {
	if slices.Contains(r.accepts, value) || r.bare && value == "false" {
		return nil
	}
	return errors.New(r.why)
}

// addHabits adds flags of Docker that are not ours, hidden.
func addHabits(f *pflag.FlagSet, habits ...habit) {
	for _, h := range habits {
		flag := f.VarPF(&refusal{h}, h.name, h.short, h.why)
		if flag.Hidden = true; h.bare {
			flag.NoOptDefVal = "true"
		}
	}
}

// foreignFlags are flags of Docker's other commands, by "command flag".
var foreignFlags = map[string]string{
	"sandboxd version":    "sandboxd version prints it, and that of the daemon",
	"exec privileged":     "no program has more power than its sandbox; --user 0 runs it as root of the sandbox",
	"build push":          "push the image after it is built: sandboxd push",
	"build load":          "a built image is always here; leave the flag out",
	"build pull":          "fetch the base image anew with sandboxd pull before the build",
	"build ssh":           "builds reach no agent of keys; give a key or token with --secret, and RUN --mount=type=secret",
	"build cache-from":    "steps are cached here by themselves; leave the flag out",
	"build cache-to":      "steps are cached here by themselves; leave the flag out",
	"build squash":        "layers stay as they are; sandboxd export --format rootfs writes one tree",
	"build rm":            "nothing is left of the steps' sandboxes; leave the flag out",
	"build force-rm":      "nothing is left of the steps' sandboxes; leave the flag out",
	"build progress":      "progress is shown at terminals; --quiet and --json change that",
	"build output":        "sandboxd export writes the image to a file when it is built",
	"build iidfile":       "--json prints the image with its digest",
	"build add-host":      "builds have no network unless --network says so; names are resolved by its policy",
	"build build-context": "there is one context, PATH",
	"stop time":           "the time is --grace, in seconds or as 10s",
	"pull all-tags":       "tags are pulled one by one",
	"prune volumes":       "sandboxd volume prune removes volumes that no sandbox has",
	"start attach":        startAttached,
	"start interactive":   startAttached,
	"start detach-keys":   startAttached,
	"ps last":             "all are listed, oldest first: sandboxd ps -q | tail -n NUMBER",
	"ps latest":           "all are listed, oldest first: sandboxd ps -q | tail -n 1",
	"ps size":             "sandboxd system df -v shows the sizes of sandboxes",
}

// shorthands of Docker's other commands.
var foreignShorthands = map[string]string{
	"sandboxd v": "version", "build o": "output", "stop s": "signal", "pull a": "all-tags", "start a": "attach", "start i": "interactive", "ps n": "last", "ps s": "size",
}

const startAttached = "sandboxd start SANDBOX, then sandboxd attach -i SANDBOX, which begins with the output that is kept"

// explainFlag returns the error of a wrong flag, in a sentence where the flag is Docker's.
func explainFlag(cmd *cobra.Command, err error) error {
	if invalid, ok := errors.AsType[*pflag.InvalidValueError](err); ok {
		if r, ours := invalid.GetFlag().Value.(*refusal); ours {
			name := "--" + r.name
			if v := invalid.GetValue(); !r.bare && v != "" {
				name += " " + v
			}
			return cmdline.Usagef("%s: %w", name, errors.New(r.why))
		}
		return &cmdline.UsageError{Err: cmdline.FlagError(err)}
	}
	missing, ok := errors.AsType[*pflag.NotExistError](err)
	if !ok {
		return &cmdline.UsageError{Err: err}
	}
	name := missing.GetSpecifiedName()
	if missing.GetSpecifiedShortnames() != "" {
		name = foreignShorthands[cmd.Name()+" "+name]
	}
	if why := foreignFlags[cmd.Name()+" "+name]; why != "" {
		return cmdline.Usagef("--%s: %s", name, why)
	}
	return cmdline.Usagef("%w; %s has other flags, and `sandboxd docs docker` lists what stands for Docker's", err, cmd.CommandPath())
}

// foreignCommands are commands of Docker that are none here, with what to type instead.
var foreignCommands = map[string]string{
	"container": "commands about sandboxes have no group: sandboxd ps, rm, logs and so on",
	"restart":   "sandboxd stop SANDBOX, then sandboxd start SANDBOX",
	"history":   "sandboxd image NAME shows an image with its history",
	"load":      "sandboxd import FILE reads what docker save has written",
	"save":      "sandboxd export --format docker NAME writes what docker load reads",
	"login":     "registries' credentials are read from ~/.docker/config.json and podman's auth.json; docker login or podman login writes them",
	"logout":    "registries' credentials are those of ~/.docker/config.json and podman's auth.json; remove them there",
	"search":    "registries are not searched; sandboxd pull takes an image by its name",
	"info":      "sandboxd version and sandboxd doctor describe the daemon and this host",
	"compose":   "Compose files are not read; Compose works over the socket of sandboxd serve --docker (sandboxd docs docker)",
	"builder":   "sandboxd build builds; sandboxd images prune removes what its cache keeps",
	"buildx":    "sandboxd build builds, for this host's platform",
	"manifest":  "images of several platforms are not made here",
	"plugin":    "there are no plugins",
	"swarm":     "there are no clusters",
	"service":   "there are no clusters; sandboxd run -d --restart always keeps a program running on this host",
	"stack":     "there are no clusters",
	"node":      "there are no clusters",
	"trust":     "signatures of images are not checked; name an image by its digest to be sure of its content",
	"scout":     "images are not scanned",
	"machine":   "sandboxes run on this host's own kernel; there is no machine to manage",
	"pod":       "sandboxes share a network with --network sandbox:NAME",
	"generate":  "sandboxd run -d --restart always keeps a program running; `sandboxd docs operating` has units for systemd",
	"kube":      "Kubernetes' files are not read",
}

// explainCommand returns an error about a command of Docker that the root does not have; nil for
// all others.
func explainCommand(root *cobra.Command, args []string) error {
	found, rest, err := root.Find(args)
	if err == nil || found != root {
		return nil
	}
	value := false // of the flag before
	for _, a := range rest {
		if value || strings.HasPrefix(a, "-") {
			f := root.PersistentFlags().Lookup(strings.TrimLeft(a, "-"))
			value = !value && f != nil && f.NoOptDefVal == ""
			continue
		}
		if why := foreignCommands[a]; why != "" {
			return cmdline.Usagef("there is no command %q: %s", a, why)
		}
		return nil
	}
	return nil
}
