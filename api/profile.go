package api

import "encoding/json"

// Profile is a named policy that restricts sandboxes.
type Profile struct {
	Name        string `json:"name"`
	Description string `json:"description"`
	// Source is the file that it was read from; empty for a built-in profile.
	Source       string   `json:"source,omitempty"`
	Capabilities []string `json:"capabilities"` // bounding set of every program, inside the sandbox's own user namespace
	// NonRoot refuses programs that run as root of the sandbox; User is the default user instead.
	NonRoot       bool      `json:"non_root"`
	User          string    `json:"user,omitempty"` // "uid:gid"
	Cwd           string    `json:"cwd,omitempty"`  // if neither the image nor the request names one
	Env           []string  `json:"env,omitempty"`
	ReadOnlyRoot  bool      `json:"read_only_root"`
	Mounts        []Scratch `json:"mounts,omitempty"`
	MaskedPaths   []string  `json:"masked_paths"`
	ReadonlyPaths []string  `json:"readonly_paths"`
	Limits        Limits    `json:"limits"` // of a sandbox that requests none
	Syscalls      int       `json:"syscalls"`
	// Seccomp is the filter in the form of the OCI runtime specification. Lists of profiles omit it.
	Seccomp json.RawMessage `json:"seccomp,omitempty"`
}

// Scratch is a writable file system in memory. It counts towards the sandbox's memory, is not part
// of any snapshot, diff or commit, and vanishes when the sandbox stops.
type Scratch struct {
	Path string `json:"path"`
	Size int64  `json:"size"` // bytes
	Mode uint32 `json:"mode"` // permissions of its root, as a number
	UID  uint32 `json:"uid,omitempty"`
	GID  uint32 `json:"gid,omitempty"`
	// NoExec keeps programs on it from being executed.
	NoExec bool `json:"noexec,omitempty"`
}

// ProfileList is the answer to GET /v1/profiles, sorted by name.
type ProfileList struct {
	Profiles []Profile `json:"profiles"`
}
