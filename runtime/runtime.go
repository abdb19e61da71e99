// Package runtime supervises sandboxes over their lives: a [Spec] goes in, a [Started] sandbox and
// its exit come out.
//
// The package knows nothing of HTTP, images or the sandbox's inside. It needs an [Engine]: that
// behind the launcher uses libcontainer, that in runtimetest keeps everything in memory.
package runtime

import (
	"context"
	"errors"
	"os"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/rootfs"
	"github.com/sandboxd/sandboxd/runtime/cgroup"
)

// Errors that every engine uses, so that callers can tell classes apart with errors.Is.
var (
	ErrNotFound      = errors.New("no such sandbox")
	ErrExists        = errors.New("sandbox exists")
	ErrUnenforceable = errors.New("cannot be enforced on this host") // a limit was asked for that the host cannot apply
	ErrRootfs        = errors.New("rootfs is not usable")            // the image is to blame: a path that must be a directory is none
	ErrUnavailable   = errors.New("engine unavailable")              // the launcher is gone or stopping
	ErrInUse         = errors.New("more than the new limit is in use")
	ErrNoNetwork     = errors.New("sandbox has no network")
	ErrNoOwner       = errors.New("the network to share is not there") // its owner does not run
	ErrProcesses     = errors.New("no more processes can be had")      // for the daemon's user, all sandboxes together, or one of them
)

// ErrMount means that a directory of the host may not be mounted, for the reason of the error.
var ErrMount = errors.New("cannot be mounted")

// TrustFile is a bundle of certificates in every sandbox with [Spec.Trust].
const TrustFile = "/etc/ssl/certs/ca-certificates.crt"

// Spec is everything an engine needs to start a sandbox. It is complete: defaults have been filled
// in and names have been resolved, so that it can be printed, compared and kept in a golden file.
type Spec struct {
	ID       string        `json:"id"` // lower-case letters and digits, 3 to 32 of them; unique
	Rootfs   rootfs.Source `json:"rootfs"`
	Hostname string        `json:"hostname"`
	Profile  Profile       `json:"profile"`
	Limits   api.Limits    `json:"limits"`
	// Explicit are the limits that the user asked for; those of Limits that are not in it are wishes
	// of the defaults, left out (and reported) where the host cannot enforce them.
	Explicit api.Limits `json:"explicit"`
	// IODevice holds the sandboxes' writable layers. The daemon finds it: the launcher sees nothing of
	// the host's devices.
	IODevice cgroup.Device `json:"io_device,omitzero"`
	// Deadline ends the sandbox even if no daemon is running then.
	Deadline time.Time `json:"deadline"`
	// Network gives the sandbox a network namespace whose connections end at the sockets of
	// [Networker.NetworkSockets]. An engine that cannot make one fails with ErrUnenforceable.
	Network bool `json:"network,omitempty"`
	// Join is the id of the sandbox whose network namespace this one shares instead of having one of
	// its own. Network is then the value of that sandbox. An engine fails with ErrNoOwner unless it
	// runs.
	Join string `json:"join,omitempty"`
	// Trust is a certificate in PEM, of an authority that programs of the sandbox trust beside those of
	// the image: their bundle, [TrustFile] among others, has it. Only with Network.
	Trust []byte `json:"trust,omitempty"`
	// Fresh has Start discard the sandbox's own files, if there are any.
	Fresh bool `json:"fresh,omitempty"`
	// Tmpfs are mounted beside the profile's file systems in memory, and replace one at the same place.
	Tmpfs []api.Scratch `json:"tmpfs,omitempty"`
	// Mounts are of the host's files, with their ids filled in. Whoever starts the sandbox opens them:
	// Opened has one descriptor for each, a mount that is attached nowhere.
	Mounts []api.Mount `json:"mounts,omitempty"`
	Opened []*os.File  `json:"-"`
	// MountIDs is [api.MountsMapped] or [api.MountsUser] if there are Mounts.
	MountIDs string `json:"mount_ids,omitempty"`
	// Volumes are mounted beside Mounts.
	Volumes []VolumeMount `json:"volumes,omitempty"`
	// ShmSize is the size of /dev/shm in bytes; zero means the engine's default.
	ShmSize int64 `json:"shm_size,omitempty"`
	// Hosts are additional lines of /etc/hosts.
	Hosts []api.HostAddress `json:"hosts,omitempty"`
	// StopSignal is the number of the signal by which Stop asks; zero means SIGTERM.
	StopSignal int `json:"stop_signal,omitempty"`
	// Workspace is a directory of the host that the sandbox works on; nil for none.
	Workspace *Workspace `json:"workspace,omitempty"`
}

// Profile is a named policy, resolved: package ociprofiles holds them as data, package seccomp
// plans the filter.
type Profile struct {
	Name          string              `json:"name"`
	Capabilities  []string            `json:"capabilities"` // "CAP_CHOWN", ...: bounding set of everything in the sandbox
	MaskedPaths   []string            `json:"masked_paths"`
	ReadonlyPaths []string            `json:"readonly_paths"`
	Seccomp       *specs.LinuxSeccomp `json:"seccomp"` // never nil

	// NonRoot keeps every program of the sandbox from running as its root. User, of the form
	// "uid:gid", is then the user of programs for which neither image nor request names one. It needs
	// a map of more than one id.
	NonRoot bool   `json:"non_root,omitempty"`
	User    string `json:"user,omitempty"`
	// Cwd and Env are for programs that neither the image nor the request gives any.
	Cwd string   `json:"cwd,omitempty"`
	Env []string `json:"env,omitempty"`
	// ReadOnlyRoot makes everything read-only but /dev, /proc and Mounts.
	ReadOnlyRoot bool          `json:"read_only_root,omitempty"`
	Mounts       []api.Scratch `json:"mounts,omitempty"`
}

// Started is a sandbox that runs.
type Started struct {
	ID       string
	Enforced api.Enforced
	// Limits and Deadline are those that it has now: an update that a crash of the daemon cut off may
	// have reached the engine and no record.
	Limits   api.Limits
	Deadline time.Time
	Paused   bool
	// Pidfd refers to the sandbox's init. It becomes readable when init, and with it every process of
	// the sandbox, has ended. The receiver owns it.
	Pidfd *os.File
}

// Change describes an update of a running sandbox. The zero value changes nothing.
type Change struct {
	Limits   *api.Limits `json:"limits,omitempty"`  // all that shall hold from now on; nil: as they are
	Explicit api.Limits  `json:"explicit,omitzero"` // those of them that the user asks for with this change
	Deadline time.Time   `json:"deadline,omitzero"` // zero: as it is
	// Hostname gives a warm sandbox to a request: processes started from now on see this hostname, and
	// its wall time begins anew. Empty: as it is.
	Hostname string `json:"hostname,omitempty"`
}

// Ask is the way in which [Engine.Stop] asks a sandbox to end.
type Ask struct {
	// Grace is the time after which what is left is killed.
	Grace time.Duration
	// Signal is the number of the signal; zero means [Spec.StopSignal].
	Signal int
	// Main is the pid, in the sandbox, of the one process that is asked and waited for; zero means
	// all of them.
	Main int
}

// An Engine starts and ends sandboxes. Its methods may be called from several goroutines.
type Engine interface {
	// Create starts a sandbox whose init serves the guest protocol on control, a listening
	// SOCK_SEQPACKET socket. When Create returns, init has been executed under every restriction of
	// spec. Control stays the caller's to close. On error nothing of the sandbox is left. A second
	// Create with one id fails with ErrExists.
	Create(ctx context.Context, spec *Spec, control *os.File) (*Started, error)
	// Start runs a sandbox that has ended once more, in the directories that it left, and is like
	// Create in everything else. One that runs, or is being created, is ErrExists; one that has left
	// nothing ErrNotFound. On error it has ended, as before.
	Start(ctx context.Context, spec *Spec, control *os.File) (*Started, error)
	// List returns the running sandboxes, in no order.
	List(ctx context.Context) ([]*Started, error)
	// Leftovers returns the ids of sandboxes that do not run but have left something: ended ones that
	// were not deleted, and those of an engine that died.
	Leftovers(ctx context.Context) ([]string, error)
	// Delete kills every process of the sandbox and returns when they, its cgroup and its directories
	// are gone. A sandbox that is unknown but has left a directory is removed all the same; one
	// without any trace is ErrNotFound.
	Delete(ctx context.Context, id string) error
	// Kill ends every process of a sandbox and waits for it, but leaves its directories to Delete.
	Kill(ctx context.Context, id string) error
	// Stop asks before it kills: every process but the init gets SIGTERM or [Spec.StopSignal], and
	// SIGHUP if it ignores that; at a terminal again and again, because one may be missed there.
	// Processes left when the grace or ctx ends are killed. Init reports how the others have ended
	// before it is killed too. Stop returns when all have ended.
	Stop(ctx context.Context, id string, ask Ask) error
	// Pause freezes every process of the sandbox, its init too, and returns when they stand still;
	// they can be killed. A paused sandbox stays paused. On error they go on.
	Pause(ctx context.Context, id string) error
	// Resume ends a pause. A sandbox that is not paused goes on.
	Resume(ctx context.Context, id string) error
	// Update changes a running sandbox as a whole, or fails and changes nothing: with ErrUnenforceable
	// where the host cannot hold an explicit limit, with ErrInUse where more memory is in use than it
	// would leave. Updates of one sandbox follow one another, so that an empty one returns when those
	// before it have been made or given up.
	Update(ctx context.Context, id string, change *Change) (api.Enforced, error)
	// Stats reads all that the kernel counts of the sandbox. Of an engine without cgroups only the
	// wall time is set.
	Stats(ctx context.Context, id string) (api.Stats, error)
	// OOMKills returns the number of processes of the sandbox that the kernel killed for want of
	// memory; 0 without a memory cgroup.
	OOMKills(ctx context.Context, id string) (int, error)
}
