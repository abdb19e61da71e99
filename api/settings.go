package api

// Settings are the settings of a sandbox beside its limits, network and programs. They hold for its
// whole life, through starts and rollbacks, and its forks have them. A snapshot does not keep them.
type Settings struct {
	// Hostname has at most 64 letters, digits, inner hyphens and dots. Default: the sandbox's name.
	Hostname string `json:"hostname,omitempty"`
	// ReadOnly makes the root read-only. Only /dev, /proc, Tmpfs and the profile's mounts are writable,
	// so a program that needs /tmp or /run needs a Tmpfs there.
	ReadOnly bool `json:"read_only,omitempty"`
	// Tmpfs are at most 16 writable file systems in memory, none within another. They hide what the
	// image has there. The default size is 64 MiB, the default mode 1777 (octal).
	Tmpfs []Scratch `json:"tmpfs,omitempty"`
	// Mounts are at most 16 directories and files of the host and volumes, none within another or
	// within a Tmpfs. The image's VOLUMEs are added to them, each as a volume without a name, unless
	// one of these is at the same place. Tenants of a daemon that serves several have volumes only.
	Mounts []Mount `json:"mounts,omitempty"`
	// ShmSize is the size of /dev/shm in bytes; default 64 MiB.
	ShmSize int64 `json:"shm_size,omitempty"`
	// Rlimits are resource limits of every process, named as in [ExecRequest], whose own replace them.
	// A nofile also raises limits.nofile unless that is given.
	Rlimits map[string]Rlimit `json:"rlimits,omitempty"`
	// Hosts are at most 256 lines more of /etc/hosts. A sandbox without a network then has a file of
	// its own over the image's, too.
	Hosts []HostAddress `json:"hosts,omitempty"`
	// CapDrop and CapAdd change the capabilities of the profile: names with or without CAP_, or ALL.
	// CapAdd names only capabilities that the profile has, and keeps them from a CapDrop of ALL.
	CapDrop []string `json:"cap_drop,omitempty"`
	CapAdd  []string `json:"cap_add,omitempty"`
	// StopSignal is sent to every process when the sandbox is stopped. Default: the image's STOPSIGNAL,
	// else SIGTERM.
	StopSignal string `json:"stop_signal,omitempty"`
	// Restart is "no" (the default), "on-failure", "on-failure:N" with at most N restarts, "always" or
	// "unless-stopped". It starts a sandbox again whose main process has ended: first after 0.1 s,
	// then after twice the time before, up to a minute; a process that ran for 10 s begins anew. A
	// sandbox is not started again after its deadline, which a restart leaves as it is, nor after an
	// idle timeout or a stop; "always" starts a stopped one when the daemon starts. It needs a main
	// process.
	Restart string `json:"restart,omitempty"`
	// HealthCheck is the check of the sandbox's service. Default: the image's HEALTHCHECK for a sandbox
	// with a main process, else none. An empty object asks for the image's in any case.
	HealthCheck *HealthCheck `json:"health_check,omitempty"`
	// AutoRemove removes the sandbox with its files and log when it has ended, for whatever reason. The
	// daemon does it, or the next one. A request that waits for the end gets the exit all the same. It
	// cannot be rolled back, and has no restart policy. A fork is not removed so.
	AutoRemove bool `json:"auto_remove,omitempty"`
	// Annotations are notes of the client that made the sandbox, for itself: at most 64 keys and
	// 256 KiB in all. Nothing here reads them.
	Annotations map[string]string `json:"annotations,omitempty"`
	// Workspace is a directory of the host to work on. Only the daemon's own user can name one. A fork
	// has none.
	Workspace *Workspace `json:"workspace,omitempty"`
}

// Rlimit is a pair of limits as in setrlimit(2), in its units. 18446744073709551615 means none.
type Rlimit struct {
	Soft uint64 `json:"soft"`
	Hard uint64 `json:"hard"`
}

// HostAddress is a line of /etc/hosts.
type HostAddress struct {
	Name    string `json:"name"`
	Address string `json:"address"` // IPv4 or IPv6
}
