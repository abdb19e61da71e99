package api

// SystemInfo is the answer to GET /v1/system.
type SystemInfo struct {
	Version   string   `json:"version"`
	UID       int      `json:"uid"`
	Rootless  bool     `json:"rootless"`
	DataDir   string   `json:"data_dir"`
	Socket    string   `json:"socket"`
	Launcher  int      `json:"launcher_pid"` // as the host counts
	Sandboxes int      `json:"sandboxes"`
	Enforced  Enforced `json:"enforced"` // what a sandbox with the defaults would get
	Confined  int      `json:"confined"` // version of Landlock that holds the daemon itself to its own directories; 0: it is not held
	// ErrandsGone: the process is gone that does for the daemon what it cannot do itself any more. It has to be started anew;
	// checks say what does not work until then.
	ErrandsGone bool   `json:"errands_gone,omitempty"`
	Pools       []Pool `json:"pools,omitempty"`
	// Goroutines and HeapLive are the daemon's own: threads of execution, and bytes in use as its garbage collector last saw
	// them. With as many sandboxes and requests as before they are about what they were; what goes on growing is a defect.
	Goroutines int   `json:"goroutines"`
	HeapLive   int64 `json:"heap_live"`
}

// Check is one line of `sandboxd doctor`.
type Check struct {
	Name   string `json:"name"`            // "user namespaces"
	OK     bool   `json:"ok"`              //
	Found  string `json:"found"`           // what was seen
	Means  string `json:"means"`           // what it costs when not OK
	Remedy string `json:"remedy"`          // the exact thing to do; empty when OK
	Fatal  bool   `json:"fatal,omitempty"` // without it no sandbox starts
}

// Shutdown is the body of POST /v1/system/shutdown.
type Shutdown struct {
	// KeepSandboxes leaves the launcher and what runs in it alone; the next daemon adopts them. Otherwise every sandbox is deleted.
	KeepSandboxes bool `json:"keep_sandboxes,omitempty"`
}

// CheckList is the answer to GET /v1/system/checks.
type CheckList struct {
	Checks []Check `json:"checks"`
}
