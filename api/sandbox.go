package api

import "time"

// SandboxState is the phase of a sandbox's life. The zero value is not a state.
type SandboxState string

// States of a sandbox. A deleted sandbox is no longer listed.
const (
	StateCreating SandboxState = "creating" // being prepared; execs are refused
	StateRunning  SandboxState = "running"  // its init answers; execs are accepted
	StatePaused   SandboxState = "paused"   // its processes are frozen; requests that need one to run are refused until it is resumed
	StateStopped  SandboxState = "stopped"  // its processes have ended (stop, deadline, idle timeout, ...); start runs it again with its files
	StateLost     SandboxState = "lost"     // its launcher died; start runs it again with its files
)

// Limits holds the ceilings requested for a sandbox. A zero value means the profile's default. If
// the host cannot enforce an explicit value, the creation fails with [CodeUnenforceable].
type Limits struct {
	Memory int64 `json:"memory,omitempty"` // bytes (cgroup memory.max); the kernel kills beyond it
	// MemoryHigh is the size in bytes at which the kernel throttles the sandbox and reclaims its
	// page cache (cgroup memory.high). It kills no process for it.
	MemoryHigh int64  `json:"memory_high,omitempty"`
	Swap       *int64 `json:"swap,omitempty"` // bytes of swap (cgroup memory.swap.max); nil means none
	// OOMGroup makes an out-of-memory kill end every process, and so the sandbox (cgroup
	// memory.oom.group). Otherwise the kernel kills one process that it chooses, and other execs go
	// on.
	OOMGroup  bool     `json:"oom_group,omitempty"`
	CPUs      float64  `json:"cpus,omitempty"`       // cores, e.g. 0.5 (cgroup cpu.max)
	CPUWeight int64    `json:"cpu_weight,omitempty"` // share under contention, 1 to 10000, default 100 (cgroup cpu.weight)
	CPUSet    string   `json:"cpuset,omitempty"`     // usable cores, e.g. "0-1,3" (cgroup cpuset.cpus)
	Pids      int64    `json:"pids,omitempty"`       // processes and threads (cgroup pids.max, else RLIMIT_NPROC)
	Nofile    uint64   `json:"nofile,omitempty"`     // open descriptors per process (RLIMIT_NOFILE)
	IO        IOLimits `json:"io,omitzero"`
	// Disk is the maximum number of bytes of allocated blocks that the sandbox has written, deleted
	// files that a process has open included. Beyond it the sandbox is ended, and its files stay; see
	// [Enforced.Disk].
	Disk int64 `json:"disk,omitempty"`
	// Inodes is the maximum number of files and directories that the sandbox has made or changed. If
	// it is zero and Disk is not, it is one for each 8 KiB of Disk, and at least 10000.
	Inodes int64 `json:"inodes,omitempty"`
}

// ImpliedInodes returns the limit on files that a limit on bytes brings with it. An empty file
// takes none of the bytes.
func (l *Limits) ImpliedInodes() int64 {
	if l.Inodes > 0 || l.Disk == 0 {
		return l.Inodes
	}
	return max(10_000, l.Disk>>13)
}

// IOLimits holds the ceilings on the block device of the sandbox's writable layer and the image's
// layers. A zero value means no ceiling. Reads of the host image may use another device and are
// then not limited.
//
// Writes pass through the page cache and are limited when the kernel writes them back. That needs
// the memory controller and a file system that tracks the cgroup of a page: ext4, xfs, btrfs, ext2
// or f2fs. Elsewhere the kernel limits only reads and direct writes. There a ceiling on writes is
// refused, and [Enforced] reports "direct" for one on reads.
type IOLimits struct {
	Weight    int64 `json:"weight,omitempty"`     // share under contention, 1 to 10000, default 100 (io.weight)
	ReadBPS   int64 `json:"read_bps,omitempty"`   // bytes per second (io.max)
	WriteBPS  int64 `json:"write_bps,omitempty"`  // bytes per second
	ReadIOPS  int64 `json:"read_iops,omitempty"`  // operations per second
	WriteIOPS int64 `json:"write_iops,omitempty"` // operations per second
}

// NetworkMode selects the network of a sandbox. None of them is the host's.
type NetworkMode string

// The network modes. In full and egress every connection ends at the sandbox's gateway, which asks
// the policy and connects to the destination from the host.
const (
	NetworkNone    NetworkMode = "none"    // a loopback interface and no route: the default
	NetworkFull    NetworkMode = "full"    // all public addresses; private and special-purpose ones are refused
	NetworkEgress  NetworkMode = "egress"  // what the policy allows
	NetworkSandbox NetworkMode = "sandbox" // the network of another sandbox, loopback included
)

// Network describes the network of a sandbox.
type Network struct {
	Mode NetworkMode `json:"mode"`
	// Policy is a policy document of version 1, in YAML or JSON, at most 64 KiB; only for
	// egress, which needs one.
	Policy string        `json:"policy,omitempty"`
	Budget NetworkBudget `json:"budget,omitzero"`
	// Secrets are names of the caller's secrets, which the gateway puts into requests. The sandbox has
	// placeholders. They need a rule that inspects requests.
	Secrets []string `json:"secrets,omitempty"`
	// Sandbox is the ID or name of a running sandbox of the same tenant, whose network this one
	// shares; only for mode sandbox. Requests about policy, budget, secrets, ports and flows go to
	// that sandbox. Responses have its ID.
	Sandbox string `json:"sandbox,omitempty"`
	// Join names at most 8 networks of the tenant, with any mode but sandbox. The sandboxes in a
	// network reach each other by name: NAME, NAME.NETWORK or NAME.NETWORK.internal. A network exists
	// when it was made, and while a sandbox names it; see [NamedNetwork] for names. Later changes are
	// requests to connect and disconnect. In networks that are all internal, a sandbox reaches the
	// others alone, whatever its mode.
	Join []string `json:"join,omitempty"`
	// Aliases are names by which the others in a network of Join, the key, find the sandbox, too; at
	// most 16 in each. An alias has up to 63 letters, digits, inner hyphens and underscores. Forks and
	// sandboxes of snapshots do not inherit it. Of several sandboxes with an alias, the one that joined
	// first has it, and a sandbox of that name comes before all.
	Aliases map[string][]string `json:"aliases,omitempty"`
}

// HasGateway reports whether a sandbox with this network has a gateway of its own, at which the
// connections in its network namespace end. With mode none it has one only if it joins networks;
// with mode sandbox it uses the gateway of the owner. No mode means none.
func (n *Network) HasGateway() bool {
	return n.Mode != NetworkSandbox && (n.Mode != "" && n.Mode != NetworkNone || len(n.Join) > 0)
}

// NetworkBudget bounds what a sandbox's network does while the sandbox runs. What exceeds it is
// refused and recorded. Zero means unbounded, in each field.
type NetworkBudget struct {
	BytesOut    int64 `json:"bytes_out,omitempty"`   // from the sandbox, of connections
	BytesIn     int64 `json:"bytes_in,omitempty"`    // to the sandbox
	Connections int64 `json:"connections,omitempty"` // number of TCP connections
	Hosts       int64 `json:"hosts,omitempty"`       // number of different names, and addresses without one
	Queries     int64 `json:"queries,omitempty"`     // number of DNS questions
	// The rates are per second; two seconds' worth may come at once.
	ConnectionRate float64 `json:"connection_rate,omitempty"`
	QueryRate      float64 `json:"query_rate,omitempty"`
}

// PortMapping publishes a port of a sandbox at the host: at an address, or as a Unix socket.
// Connections and datagrams reach programs that listen on the sandbox's loopback address or on all
// addresses.
type PortMapping struct {
	Address  string `json:"address,omitempty"` // of the host; default 127.0.0.1; none of a Unix socket
	HostPort uint16 `json:"host_port"`         // 0: one that is free, or a Unix socket
	// Chosen is true in answers if the request has named no host port. The daemon keeps the one that it
	// has chosen, unless another program has it when the sandbox or the daemon starts again. Requests
	// need not set it: it is ignored.
	Chosen bool `json:"chosen,omitempty"`
	// Socket is the path of a Unix socket, which only the daemon's user can open. It lies in the
	// directory ports of the daemon's runtime directory: a request may have the file's name alone.
	Socket   string `json:"socket,omitempty"`
	Port     uint16 `json:"port"`               // in the sandbox
	Protocol string `json:"protocol,omitempty"` // "tcp", the default, or "udp"
}

// Never is the Timeout of a sandbox that is not stopped for its age. Its deadline is two hundred
// years away.
const Never = -1

// CreateSandbox is the body of POST /v1/sandboxes.
type CreateSandbox struct {
	Image string `json:"image,omitempty"` // reference or "host"; default "host"
	// Snapshot is the ID or name of the snapshot to start from, instead of an Image. Environment,
	// directory, user, profile and network default to those of the snapshot's sandbox.
	Snapshot string            `json:"snapshot,omitempty"`
	Name     string            `json:"name,omitempty"`    // unique per tenant; letters, digits, "_.-", at most 63; default: generated
	Env      []string          `json:"env,omitempty"`     // "KEY=value", added to the image's own for every exec; "KEY" takes it away
	Cwd      string            `json:"cwd,omitempty"`     // absolute, made if it is missing; default: the image's working directory, else "/"
	User     string            `json:"user,omitempty"`    // "name", "uid" or "uid:gid"; default: the image's user, else root of the sandbox
	Labels   map[string]string `json:"labels,omitempty"`  // at most 64 keys
	Profile  string            `json:"profile,omitempty"` // name from oci-profiles; default "default"
	Limits   Limits            `json:"limits,omitzero"`
	Network  Network           `json:"network,omitzero"`
	// Ports are published while the sandbox runs. They need a network.
	Ports []PortMapping `json:"ports,omitempty"`
	// Command is the argv of the sandbox's main process, which gets the sandbox's environment,
	// directory and user. It starts with the sandbox, and the sandbox ends with it. Its output is
	// kept in the log. Default: none; the sandbox then idles.
	Command []string `json:"command,omitempty"`
	// ImageCommand runs the image's ENTRYPOINT and CMD as main process; Command then replaces CMD. With
	// Snapshot it needs an Entrypoint: snapshots keep none.
	ImageCommand bool `json:"image_command,omitempty"`
	// Entrypoint replaces the image's ENTRYPOINT, and drops its CMD. A single empty string clears both.
	Entrypoint []string `json:"entrypoint,omitempty"`
	TTY        bool     `json:"tty,omitempty"`        // gives the main process a terminal, as in [ExecRequest]
	StdinOpen  bool     `json:"stdin_open,omitempty"` // as in [ExecRequest]
	// Stopped makes the sandbox without running it: it is "stopped" for the reason "created" until
	// it is started.
	Stopped bool `json:"stopped,omitempty"`
	// Timeout is the time in seconds after which the sandbox is stopped, busy or not. 0 means the
	// daemon's default, an hour. -1, [Never], means no end, of sandboxes of the daemon's own user only;
	// the idle timeout remains.
	Timeout float64 `json:"timeout,omitempty"`
	// IdleTimeout is the time in seconds without an exec or file request after which the sandbox is
	// stopped; 0 means the daemon's default, ten minutes.
	IdleTimeout float64 `json:"idle_timeout,omitempty"`
	Settings
}

// Values of [Enforced.IDs]: the user and group IDs of the host that the sandbox runs under.
const (
	// IDsOwn is a range of 65,536 IDs that no other sandbox has while this one runs. So another one
	// cannot use up pages of pipes, epoll watches or descriptors in flight, which the kernel counts
	// by user of the host.
	IDsOwn = "own"
	// IDsShared is a range of subordinate IDs that all sandboxes of the daemon share.
	IDsShared = "shared"
	// IDsSingle is the daemon's own uid.
	IDsSingle = "single"
)

// Enforced lists the restrictions that really hold a sandbox on this host. An empty string never
// means that one holds.
type Enforced struct {
	Namespaces []string `json:"namespaces"` // namespaces of the sandbox's own
	// IDs is [IDsOwn], [IDsShared] or [IDsSingle].
	IDs        string `json:"ids"`
	Profile    string `json:"profile"`      // name of the profile, which applies as a whole
	Seccomp    string `json:"seccomp"`      // name of the profile whose filter is loaded
	NoNewPrivs bool   `json:"no_new_privs"` // always true
	Caps       int    `json:"capabilities"` // size of the bounding set, inside the sandbox's own user namespace
	// NonRoot means that no program runs as root of the sandbox. ReadOnlyRoot means that only the
	// profile's mounts and /dev are writable.
	NonRoot      bool `json:"non_root"`
	ReadOnlyRoot bool `json:"read_only_root"`
	// Landlock is the version that confines programs; 0 means none. They change no mount, make no
	// block device, and write only where the profile allows it. From version 6 on they neither
	// signal processes nor reach abstract sockets outside.
	Landlock int `json:"landlock"`
	// Cores is "none" if the crash of a program starts nothing on the host, or "host" if it starts the
	// host's program for cores, or is handed to its service, as root of the host.
	Cores   string `json:"cores"`
	Memory  string `json:"memory"`  // "cgroup" or "none"
	CPU     string `json:"cpu"`     // "cgroup" or "none": the ceiling on time
	CPUSet  string `json:"cpuset"`  // "cgroup" or "none"; ceiling on time
	Pids    string `json:"pids"`    // "cgroup" or "rlimit"
	IO      string `json:"io"`      // "cgroup", "direct" (not what goes through the page cache) or "none"
	Network string `json:"network"` // [EnforcedLoopback] or [EnforcedGateway]
	// Mounts is [MountsMapped] or [MountsUser]; empty without mounts of the host's files.
	Mounts string `json:"mounts,omitempty"`
	// Disk is "accounting" if a limit on disk or inodes holds the sandbox, else "none". The launcher
	// counts, and ends the sandbox after it has exceeded the limit.
	Disk string `json:"disk"`
	// Volumes is "accounting" if a limit holds one of the sandbox's volumes: the launcher counts, and
	// ends the sandboxes that can write to the volume after it has exceeded the limit. It is "none" if
	// no volume of the sandbox has a limit; empty without volumes.
	Volumes string `json:"volumes,omitempty"`
	// Workspace is [WorkspaceMapped] or [WorkspaceShared]; empty without a workspace.
	Workspace string `json:"workspace,omitempty"`
	// Uncounted names the memory of the kernel that programs can take and that neither a limit nor a
	// cgroup counts: [UncountedLocks] and [UncountedTimestamps]. It ends with them.
	Uncounted []string `json:"uncounted,omitempty"`
	// Missing names the defaults that this host cannot provide, each with its remedy.
	Missing []string `json:"missing,omitempty"`
}

// The values of [Enforced.Network].
const (
	// EnforcedLoopback is a network namespace without a way out.
	EnforcedLoopback = "none"
	// EnforcedGateway is a network namespace in which the kernel ends every connection, by rules of
	// nf_tables that the sandbox cannot change.
	EnforcedGateway = "gateway"
)

// Values in [Enforced.Uncounted].
const (
	// UncountedLocks are locks on files: flock(2) and fcntl(2).
	UncountedLocks = "file-locks"
	// UncountedTimestamps are the timestamps of TCP that wait to be read: SO_TIMESTAMPING of
	// socket(7).
	UncountedTimestamps = "tcp-timestamps"
)

// The values of [Enforced.Cores].
const (
	CoresNone = "none"
	CoresHost = "host"
)

// Sandbox describes a sandbox.
type Sandbox struct {
	ID          string            `json:"id"`
	Name        string            `json:"name"`
	Image       string            `json:"image"`              // requested reference
	ImageDigest string            `json:"image_digest"`       // of the manifest, or of the host image's layer
	Snapshot    string            `json:"snapshot,omitempty"` // ID of its origin, which may be deleted
	State       SandboxState      `json:"state"`              //
	Reason      string            `json:"reason,omitempty"`   // reason of "stopped" or "lost"
	PID         int               `json:"pid,omitempty"`      // of its init, on the host
	Profile     string            `json:"profile"`
	Labels      map[string]string `json:"labels,omitempty"`
	Limits      Limits            `json:"limits,omitzero"`
	Enforced    Enforced          `json:"enforced"`
	Network     Network           `json:"network,omitzero"`
	Ports       []PortMapping     `json:"ports,omitempty"`
	Env         []string          `json:"env,omitempty"`
	Cwd         string            `json:"cwd"`
	User        string            `json:"user"`
	CreatedAt   time.Time         `json:"created_at"`
	StartedAt   time.Time         `json:"started_at,omitzero"` // of its latest run, idle ones not counted; absent if it has not run
	EndedAt     time.Time         `json:"ended_at,omitzero"`   // time at which its end was observed; zero while it lives
	Deadline    time.Time         `json:"deadline"`
	IdleTimeout float64           `json:"idle_timeout"` // seconds
	// IdleDeadline is the time at which the idle timeout ends it if nothing uses it before. It is
	// absent while the sandbox is in use, paused or ended, and in answers to changes.
	IdleDeadline time.Time `json:"idle_deadline,omitzero"`

	Command   []string `json:"command,omitempty"` // argv of its main process
	TTY       bool     `json:"tty,omitempty"`
	StdinOpen bool     `json:"stdin_open,omitempty"`
	// Restarts is how often its restart policy has started it since a client did.
	Restarts int `json:"restarts,omitempty"`
	// Entrypoint and Cmd are the image's ENTRYPOINT and CMD, or what replaced them. A client that runs
	// the image's program executes Entrypoint with its own arguments, else with Cmd. Both are absent if
	// they have more than 128 KiB.
	Entrypoint []string `json:"entrypoint,omitempty"`
	Cmd        []string `json:"cmd,omitempty"`
	Settings
	// Health is absent without a health check.
	Health *SandboxHealth `json:"health,omitempty"`
	// Exit is the last exit of its main process. It is absent while that runs, or if unknown.
	Exit *SandboxExit `json:"exit,omitempty"`
}

// LabelKeep is a label of sandboxes and snapshots that are never removed automatically or by prune,
// whatever their age, number or a limit. Any value but "false" sets it.
const LabelKeep = "sandboxd.keep"

// Kept reports whether labels set [LabelKeep].
func Kept(labels map[string]string) bool {
	v, ok := labels[LabelKeep]
	return ok && v != "false"
}

// DefaultOlderThan is the default of [PruneSandboxes].OlderThan, in seconds.
const DefaultOlderThan = 3600

// PruneSandboxes is the optional body of POST /v1/sandboxes/prune. It removes ended sandboxes.
type PruneSandboxes struct {
	// OlderThan is the minimum time since their end, in seconds; 0 removes all. The default is an
	// hour, so that a waiting client can still read the exit.
	OlderThan *float64 `json:"older_than,omitempty"`
	// Labels are the labels that they must have. Sandboxes with [LabelKeep] always stay.
	Labels map[string]string `json:"labels,omitempty"`
}

// SandboxesRemoved is the answer to POST /v1/sandboxes/prune.
type SandboxesRemoved struct {
	Removed []SandboxRef `json:"removed"`
	Recent  int          `json:"recent"` // number of sandboxes that stay because they ended too recently
}

// SandboxRef identifies a sandbox.
type SandboxRef struct {
	ID   string `json:"id"`
	Name string `json:"name"`
}

// SandboxList is the answer to GET /v1/sandboxes, oldest first.
type SandboxList struct {
	Sandboxes []Sandbox `json:"sandboxes"`
}

// RenameSandbox is the body of POST /v1/sandboxes/{id}/rename.
type RenameSandbox struct {
	Name string `json:"name"` // rules as in [CreateSandbox]; required
}

// UpdateSandbox is the body of PATCH /v1/sandboxes/{id}: changes to a running sandbox. Absent
// fields stay. Either all changes are applied, or none and the answer is an error.
type UpdateSandbox struct {
	Limits LimitsUpdate `json:"limits,omitzero"`
	// Labels are merged by name; null removes a label.
	Labels map[string]*string `json:"labels,omitempty"`
	// Timeout is the time in seconds from now after which the sandbox is stopped, or -1, [Never]; 0
	// keeps its deadline.
	Timeout float64 `json:"timeout,omitempty"`
	// IdleTimeout is as in [CreateSandbox]; 0 keeps the current one.
	IdleTimeout float64 `json:"idle_timeout,omitempty"`
	// Network replaces mode and policy of a sandbox that has a network, whose budget stays.
	// Connections that the new policy refuses are reset. A running one without a network cannot be
	// given one. Of a sandbox that does not run, network and restart are all that can be changed.
	Network *Network `json:"network,omitempty"`
	// Restart replaces the restart policy, as in [Settings]. It holds from the next end on, and for a
	// restart that is due.
	Restart *string `json:"restart,omitempty"`
}

// LimitsUpdate changes [Limits]. An absent field stays; a zero value restores the profile's
// default.
type LimitsUpdate struct {
	// Memory cannot fall below the memory that is in use and cannot be reclaimed. Then the answer is
	// [CodeConflict], and no process is killed.
	Memory     *int64   `json:"memory,omitempty"`
	MemoryHigh *int64   `json:"memory_high,omitempty"`
	Swap       *int64   `json:"swap,omitempty"` // 0 means none
	OOMGroup   *bool    `json:"oom_group,omitempty"`
	CPUs       *float64 `json:"cpus,omitempty"`
	CPUWeight  *int64   `json:"cpu_weight,omitempty"`
	CPUSet     *string  `json:"cpuset,omitempty"`
	Pids       *int64   `json:"pids,omitempty"`   // may fall below the current number; no process can then be started
	Nofile     *uint64  `json:"nofile,omitempty"` // always refused: a process keeps the limit of its start
	IO         IOUpdate `json:"io,omitzero"`
	Disk       *int64   `json:"disk,omitempty"` // 0 means none; below the present usage the sandbox is ended
	Inodes     *int64   `json:"inodes,omitempty"`
}

// IOUpdate changes [IOLimits]. An absent field stays; 0 removes a ceiling or restores the default
// weight.
type IOUpdate struct {
	Weight    *int64 `json:"weight,omitempty"`
	ReadBPS   *int64 `json:"read_bps,omitempty"`
	WriteBPS  *int64 `json:"write_bps,omitempty"`
	ReadIOPS  *int64 `json:"read_iops,omitempty"`
	WriteIOPS *int64 `json:"write_iops,omitempty"`
}
