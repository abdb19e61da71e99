package api

import "time"

// SandboxState is where a sandbox stands in its life. The zero value is not a state.
type SandboxState string

// The states of a sandbox. A sandbox that was deleted is not listed any more.
const (
	StateCreating SandboxState = "creating" // being prepared; execs are refused
	StateRunning  SandboxState = "running"  // its init answers; execs are accepted
	StateStopped  SandboxState = "stopped"  // its processes have ended (deadline, idle timeout, its init was killed); only delete is left
	StateLost     SandboxState = "lost"     // the launcher that held it died; only delete is left
)

// Limits are the ceilings asked for a sandbox. A zero value means "the profile's default"; an explicit value that the
// host cannot enforce makes the creation fail with [CodeUnenforceable].
type Limits struct {
	Memory int64   `json:"memory,omitempty"` // bytes of memory (cgroup memory.max)
	Swap   *int64  `json:"swap,omitempty"`   // bytes of swap (cgroup memory.swap.max); nil means none
	CPUs   float64 `json:"cpus,omitempty"`   // cores' worth of time, e.g. 0.5 (cgroup cpu.max)
	Pids   int64   `json:"pids,omitempty"`   // processes and threads (cgroup pids.max, else RLIMIT_NPROC)
	Nofile uint64  `json:"nofile,omitempty"` // open descriptors of one process (RLIMIT_NOFILE)
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
	Image   string            `json:"image,omitempty"`   // reference or "host"; default "host"
	Name    string            `json:"name,omitempty"`    // unique per tenant; letters, digits, "_.-", at most 63; default: made up
	Env     []string          `json:"env,omitempty"`     // "KEY=value", added to the image's own for every exec
	Cwd     string            `json:"cwd,omitempty"`     // absolute; default: the image's working directory, else "/"
	User    string            `json:"user,omitempty"`    // "name", "uid" or "uid:gid"; default: the image's user, else root of the sandbox
	Labels  map[string]string `json:"labels,omitempty"`  // at most 64 keys
	Profile string            `json:"profile,omitempty"` // a name from oci-profiles; default "default"
	Limits  Limits            `json:"limits,omitzero"`
	Network Network           `json:"network,omitzero"`
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
	Seccomp    string `json:"seccomp"`      // name of the profile whose filter is loaded
	NoNewPrivs bool   `json:"no_new_privs"` // always true
	Caps       int    `json:"capabilities"` // how many capabilities the bounding set holds, inside the sandbox's own user namespace
	Memory     string `json:"memory"`       // "cgroup" or "none"
	CPU        string `json:"cpu"`          // "cgroup" or "none"
	Pids       string `json:"pids"`         // "cgroup" or "rlimit"
	Network    string `json:"network"`      // "none"
	// Missing names what the defaults would like and this host cannot give, each with its remedy.
	Missing []string `json:"missing,omitempty"`
}

// Sandbox is what the API shows of one.
type Sandbox struct {
	ID          string            `json:"id"`
	Name        string            `json:"name"`
	Image       string            `json:"image"`            // the reference asked for
	ImageDigest string            `json:"image_digest"`     // of the manifest; of the host image's layer
	State       SandboxState      `json:"state"`            //
	Reason      string            `json:"reason,omitempty"` // why it is stopped or lost
	PID         int               `json:"pid,omitempty"`    // of its init, as the host counts
	Profile     string            `json:"profile"`
	Labels      map[string]string `json:"labels,omitempty"`
	Limits      Limits            `json:"limits,omitzero"`
	Enforced    Enforced          `json:"enforced"`
	Env         []string          `json:"env,omitempty"`
	Cwd         string            `json:"cwd"`
	User        string            `json:"user"`
	CreatedAt   time.Time         `json:"created_at"`
	Deadline    time.Time         `json:"deadline"`
	IdleTimeout float64           `json:"idle_timeout"` // seconds
}

// SandboxList is the answer to GET /v1/sandboxes, oldest first.
type SandboxList struct {
	Sandboxes []Sandbox `json:"sandboxes"`
}
