package api

import "time"

// SandboxState is where a sandbox stands in its life. The zero value is not a state.
type SandboxState string

// The states of a sandbox. A sandbox that was deleted is not listed any more.
const (
	StateCreating SandboxState = "creating" // being prepared; execs are refused
	StateRunning  SandboxState = "running"  // its init answers; execs are accepted
	StatePaused   SandboxState = "paused"   // its processes stand still; what would run something in it is refused until it is resumed
	StateStopped  SandboxState = "stopped"  // its processes have ended (stop, deadline, idle timeout, ...); start runs it again with its files
	StateLost     SandboxState = "lost"     // the launcher that held it died; start runs it again with its files
)

// Limits are the ceilings asked for a sandbox. A zero value means "the profile's default"; an explicit value that the
// host cannot enforce makes the creation fail with [CodeUnenforceable].
type Limits struct {
	Memory int64 `json:"memory,omitempty"` // bytes of memory (cgroup memory.max): beyond it the kernel kills
	// MemoryHigh is where the kernel begins to slow the sandbox down and to take its page cache back, in bytes
	// (cgroup memory.high). Nothing is killed for it.
	MemoryHigh int64  `json:"memory_high,omitempty"`
	Swap       *int64 `json:"swap,omitempty"` // bytes of swap (cgroup memory.swap.max); nil means none
	// OOMGroup makes an out-of-memory kill end every process, and so the sandbox (cgroup memory.oom.group). Otherwise
	// the one process dies that the kernel chose, and other execs go on.
	OOMGroup  bool     `json:"oom_group,omitempty"`
	CPUs      float64  `json:"cpus,omitempty"`       // cores' worth of time, e.g. 0.5 (cgroup cpu.max)
	CPUWeight int64    `json:"cpu_weight,omitempty"` // share against other sandboxes where cores are short, 1 to 10000, else 100 (cgroup cpu.weight)
	CPUSet    string   `json:"cpuset,omitempty"`     // the cores it may use, e.g. "0-1,3" (cgroup cpuset.cpus)
	Pids      int64    `json:"pids,omitempty"`       // processes and threads (cgroup pids.max, else RLIMIT_NPROC)
	Nofile    uint64   `json:"nofile,omitempty"`     // open descriptors of one process (RLIMIT_NOFILE)
	IO        IOLimits `json:"io,omitzero"`
}

// IOLimits are about the block device that holds the sandbox's writable layer, and the image's layers. A zero value means
// "no ceiling"; reads of the host image may come from another device, and are not held.
//
// What a program writes goes through the page cache: it is held when the kernel writes it out, on file systems that know
// which cgroup a page is from (ext4, xfs, btrfs, ext2, f2fs) and with the memory controller. Elsewhere only reads and direct
// writes are held: a ceiling on writes is refused there, and [Enforced] says "direct" of one on reads.
type IOLimits struct {
	Weight    int64 `json:"weight,omitempty"`     // share against other sandboxes where the device is busy, 1 to 10000, else 100 (io.weight)
	ReadBPS   int64 `json:"read_bps,omitempty"`   // bytes a second (io.max)
	WriteBPS  int64 `json:"write_bps,omitempty"`  // bytes a second
	ReadIOPS  int64 `json:"read_iops,omitempty"`  // operations a second
	WriteIOPS int64 `json:"write_iops,omitempty"` // operations a second
}

// NetworkMode says which network a sandbox sees.
type NetworkMode string

// NetworkNone is a network namespace with a loopback interface and no route: the default, and so far the only mode.
const NetworkNone NetworkMode = "none"

// Network is what a sandbox may reach.
type Network struct {
	Mode NetworkMode `json:"mode"`
}

// CreateSandbox is the body of POST /v1/sandboxes.
type CreateSandbox struct {
	Image string `json:"image,omitempty"` // reference or "host"; default "host"
	// Snapshot is the id or name of one to be made of, with its image; then there is no Image. What is not said here is as it
	// was in the sandbox that the snapshot is of: environment, directory, user and profile.
	Snapshot string            `json:"snapshot,omitempty"`
	Name     string            `json:"name,omitempty"`    // unique per tenant; letters, digits, "_.-", at most 63; default: made up
	Env      []string          `json:"env,omitempty"`     // "KEY=value", added to the image's own for every exec
	Cwd      string            `json:"cwd,omitempty"`     // absolute; default: the image's working directory, else "/"
	User     string            `json:"user,omitempty"`    // "name", "uid" or "uid:gid"; default: the image's user, else root of the sandbox
	Labels   map[string]string `json:"labels,omitempty"`  // at most 64 keys
	Profile  string            `json:"profile,omitempty"` // a name from oci-profiles; default "default"
	Limits   Limits            `json:"limits,omitzero"`
	Network  Network           `json:"network,omitzero"`
	// Command is the sandbox's main process, argv as of an exec, with the sandbox's environment, directory and user. It is started
	// with the sandbox, and the sandbox ends with it. Its output is kept in the log. Default: none, and the sandbox idles.
	Command []string `json:"command,omitempty"`
	// ImageCommand runs what the image says, ENTRYPOINT and CMD; a Command then takes the place of CMD. Not with Snapshot.
	ImageCommand bool `json:"image_command,omitempty"`
	TTY          bool `json:"tty,omitempty"`        // the main process has a terminal, as in [ExecRequest]
	StdinOpen    bool `json:"stdin_open,omitempty"` // as in [ExecRequest]
	// Timeout is the time in seconds after which the sandbox is stopped whatever it does; 0 means the daemon's
	// default (an hour), there is no "never".
	Timeout float64 `json:"timeout,omitempty"`
	// IdleTimeout is the time in seconds without any exec or file request after which the sandbox is stopped;
	// 0 means the daemon's default (ten minutes).
	IdleTimeout float64 `json:"idle_timeout,omitempty"`
}

// Enforced says, layer by layer, what really holds a sandbox on this host. An empty string never means "held".
type Enforced struct {
	Namespaces []string `json:"namespaces"` // those the sandbox has of its own
	// IDs is "subordinate" where sandbox ids map to subordinate ids only, "single" where the host offers none: then
	// processes of the sandbox run under the daemon's own uid.
	IDs        string `json:"ids"`
	Profile    string `json:"profile"`      // name of the profile, which is applied as a whole
	Seccomp    string `json:"seccomp"`      // name of the profile whose filter is loaded
	NoNewPrivs bool   `json:"no_new_privs"` // always true
	Caps       int    `json:"capabilities"` // how many capabilities the bounding set holds, inside the sandbox's own user namespace
	// NonRoot is that no program runs as root of the sandbox, ReadOnlyRoot that nothing can be written but below the profile's
	// mounts and in /dev.
	NonRoot      bool `json:"non_root"`
	ReadOnlyRoot bool `json:"read_only_root"`
	// Landlock is the version by which programs are confined: they change no mount, make no block device, and write nothing
	// outside of where the profile lets them; from 6 on they signal nothing and reach no abstract socket outside. 0: not at all.
	Landlock int    `json:"landlock"`
	Memory   string `json:"memory"`  // "cgroup" or "none"
	CPU      string `json:"cpu"`     // "cgroup" or "none": the ceiling on time
	CPUSet   string `json:"cpuset"`  // "cgroup" or "none"
	Pids     string `json:"pids"`    // "cgroup" or "rlimit"
	IO       string `json:"io"`      // "cgroup", "direct" (not what goes through the page cache) or "none"
	Network  string `json:"network"` // "none"
	// Missing names what the defaults would like and this host cannot give, each with its remedy.
	Missing []string `json:"missing,omitempty"`
}

// Sandbox is what the API shows of one.
type Sandbox struct {
	ID          string            `json:"id"`
	Name        string            `json:"name"`
	Image       string            `json:"image"`              // the reference asked for
	ImageDigest string            `json:"image_digest"`       // of the manifest; of the host image's layer
	Snapshot    string            `json:"snapshot,omitempty"` // id of the one that it was made of, which may be gone
	State       SandboxState      `json:"state"`              //
	Reason      string            `json:"reason,omitempty"`   // why it is stopped or lost
	PID         int               `json:"pid,omitempty"`      // of its init, as the host counts
	Profile     string            `json:"profile"`
	Labels      map[string]string `json:"labels,omitempty"`
	Limits      Limits            `json:"limits,omitzero"`
	Enforced    Enforced          `json:"enforced"`
	Env         []string          `json:"env,omitempty"`
	Cwd         string            `json:"cwd"`
	User        string            `json:"user"`
	CreatedAt   time.Time         `json:"created_at"`
	EndedAt     time.Time         `json:"ended_at,omitzero"` // when it was seen to have ended; zero while it lives
	Deadline    time.Time         `json:"deadline"`
	IdleTimeout float64           `json:"idle_timeout"` // seconds

	Command   []string `json:"command,omitempty"` // of its main process
	TTY       bool     `json:"tty,omitempty"`
	StdinOpen bool     `json:"stdin_open,omitempty"`
	// Exit is how its main process ended, or was ended, when the sandbox ran last. None where it runs, or nobody knows.
	Exit *SandboxExit `json:"exit,omitempty"`
}

// LabelKeep is a label of sandboxes and snapshots that are never removed for their age, their number or a limit, nor pruned. Any
// value but "false" means it.
const LabelKeep = "sandboxd.keep"

// Kept says that labels have [LabelKeep].
func Kept(labels map[string]string) bool {
	v, ok := labels[LabelKeep]
	return ok && v != "false"
}

// DefaultOlderThan is [PruneSandboxes].OlderThan where that is not given, in seconds.
const DefaultOlderThan = 3600

// PruneSandboxes is the body of POST /v1/sandboxes/prune, which may be left out: it removes sandboxes that have ended.
type PruneSandboxes struct {
	// OlderThan is how many seconds ago they must have ended; default an hour, so that who waits for one can still read how it
	// did. 0 takes all.
	OlderThan *float64 `json:"older_than,omitempty"`
	// Labels are those that they must have. Sandboxes with [LabelKeep] stay whatever is given.
	Labels map[string]string `json:"labels,omitempty"`
}

// SandboxesRemoved is the answer to POST /v1/sandboxes/prune.
type SandboxesRemoved struct {
	Removed []SandboxRef `json:"removed"`
	Recent  int          `json:"recent"` // how many others stay because they have not ended long enough ago
}

// SandboxRef names a sandbox.
type SandboxRef struct {
	ID   string `json:"id"`
	Name string `json:"name"`
}

// SandboxList is the answer to GET /v1/sandboxes, oldest first.
type SandboxList struct {
	Sandboxes []Sandbox `json:"sandboxes"`
}

// UpdateSandbox is the body of PATCH /v1/sandboxes/{id}: what is changed of a running sandbox. What is left out stays as it
// is. Either all of it is applied or, with an error, nothing.
type UpdateSandbox struct {
	Limits LimitsUpdate `json:"limits,omitzero"`
	// Labels are set one by one; null takes one away.
	Labels map[string]*string `json:"labels,omitempty"`
	// Timeout is the time in seconds, from now on, after which the sandbox is stopped; 0 leaves its deadline as it is.
	Timeout float64 `json:"timeout,omitempty"`
	// IdleTimeout as in [CreateSandbox]; 0 leaves it as it is.
	IdleTimeout float64 `json:"idle_timeout,omitempty"`
}

// LimitsUpdate changes [Limits]. An absent field stays as it is; a zero value means the profile's default again.
type LimitsUpdate struct {
	// Memory cannot fall below what is in use and cannot be taken back: that is [CodeConflict], and nothing is killed.
	Memory     *int64   `json:"memory,omitempty"`
	MemoryHigh *int64   `json:"memory_high,omitempty"`
	Swap       *int64   `json:"swap,omitempty"` // 0 means none
	OOMGroup   *bool    `json:"oom_group,omitempty"`
	CPUs       *float64 `json:"cpus,omitempty"`
	CPUWeight  *int64   `json:"cpu_weight,omitempty"`
	CPUSet     *string  `json:"cpuset,omitempty"`
	Pids       *int64   `json:"pids,omitempty"`   // may fall below what there is: then nothing more can be started
	Nofile     *uint64  `json:"nofile,omitempty"` // always refused: each process has its own since its start
	IO         IOUpdate `json:"io,omitzero"`
}

// IOUpdate changes [IOLimits], one by one. An absent field stays as it is; 0 is no ceiling, or the default weight, again.
type IOUpdate struct {
	Weight    *int64 `json:"weight,omitempty"`
	ReadBPS   *int64 `json:"read_bps,omitempty"`
	WriteBPS  *int64 `json:"write_bps,omitempty"`
	ReadIOPS  *int64 `json:"read_iops,omitempty"`
	WriteIOPS *int64 `json:"write_iops,omitempty"`
}
