package api

import "encoding/json"

// Profile is a named policy: what a sandbox that asks for it is held by.
type Profile struct {
	Name        string `json:"name"`
	Description string `json:"description"`
	// Source is the file that it was read from; empty for one that the daemon brings along.
	Source       string   `json:"source,omitempty"`
	Capabilities []string `json:"capabilities"` // the bounding set of every program, inside the sandbox's own user namespace
	// NonRoot says that a program that is to run as root of the sandbox is refused; User is whom programs run as instead.
	NonRoot       bool      `json:"non_root"`
	User          string    `json:"user,omitempty"` // "uid:gid"
	Cwd           string    `json:"cwd,omitempty"`  // where neither the image nor the request names one
	Env           []string  `json:"env,omitempty"`
	ReadOnlyRoot  bool      `json:"read_only_root"`
	Mounts        []Scratch `json:"mounts,omitempty"`
	MaskedPaths   []string  `json:"masked_paths"`
	ReadonlyPaths []string  `json:"readonly_paths"`
	Limits        Limits    `json:"limits"` // of a sandbox that asks for none
	Syscalls      int       `json:"syscalls"`
	// Seccomp is the filter in the form of the OCI runtime specification. Lists of profiles leave it out.
	Seccomp json.RawMessage `json:"seccomp,omitempty"`
}

// Scratch is a file system in memory that a sandbox can write to. It counts as the sandbox's memory, is in no snapshot, diff or
// commit, and goes when the sandbox stops.
type Scratch struct {
	Path string `json:"path"`
	Size int64  `json:"size"` // bytes
	Mode uint32 `json:"mode"` // permissions of its root, as a number
	UID  uint32 `json:"uid,omitempty"`
	GID  uint32 `json:"gid,omitempty"`
}

// ProfileList is the answer to GET /v1/profiles, by name.
type ProfileList struct {
	Profiles []Profile `json:"profiles"`
}
