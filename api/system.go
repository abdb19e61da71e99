package api

// SystemInfo is the answer to GET /v1/system.
type SystemInfo struct {
	Version   string   `json:"version"`
	UID       int      `json:"uid"`
	Rootless  bool     `json:"rootless"`
	DataDir   string   `json:"data_dir"`
	Socket    string   `json:"socket"`
	Launcher  int      `json:"launcher_pid"` // on the host
	Sandboxes int      `json:"sandboxes"`
	Enforced  Enforced `json:"enforced"` // restrictions of a sandbox with the defaults
	Confined  int      `json:"confined"` // Landlock version that confines the daemon; 0 means unconfined
	// ErrandsGone reports that the broker process has died, which performs the operations that the
	// confined daemon cannot. The daemon must be restarted; the checks list the failing operations.
	ErrandsGone bool   `json:"errands_gone,omitempty"`
	Pools       []Pool `json:"pools,omitempty"`
	// Goroutines and HeapLive describe the daemon itself: its goroutines, and the heap bytes in use
	// at the last garbage collection. For equal numbers of sandboxes and requests they stay level;
	// continued growth is a defect.
	Goroutines int   `json:"goroutines"`
	HeapLive   int64 `json:"heap_live"`
}

// Check is one line of `sandboxd doctor`.
type Check struct {
	Name   string `json:"name"`            // "user namespaces"
	OK     bool   `json:"ok"`              //
	Found  string `json:"found"`           // observation
	Means  string `json:"means"`           // consequence if not OK
	Remedy string `json:"remedy"`          // exact action; empty if OK
	Fatal  bool   `json:"fatal,omitempty"` // no sandbox starts while it is not OK
}

// Shutdown is the body of POST /v1/system/shutdown.
type Shutdown struct {
	// KeepSandboxes leaves the launcher and its sandboxes running; the next daemon adopts them.
	// Without it and StopSandboxes every sandbox is deleted.
	KeepSandboxes bool `json:"keep_sandboxes,omitempty"`
	// StopSandboxes stops every sandbox, with the default grace period, and keeps its files and logs.
	// The next daemon can start it again.
	StopSandboxes bool `json:"stop_sandboxes,omitempty"`
}

// CheckList is the answer to GET /v1/system/checks.
type CheckList struct {
	Checks []Check `json:"checks"`
}
