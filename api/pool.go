package api

// Pool is the state of one warm pool. The daemon keeps sandboxes of one image and profile ready, so
// that a creation need not wait. No list shows a pooled sandbox, and no limit on creations counts
// it.
type Pool struct {
	Image   string `json:"image"` // reference as configured
	Profile string `json:"profile"`
	Network bool   `json:"network,omitempty"` // for sandboxes with a network
	Size    int    `json:"size"`              // target number of ready sandboxes; with Most, derived from the last ten minutes
	Most    int    `json:"most,omitempty"`    // maximum of Size, for a pool that adapts
	Ready   int    `json:"ready"`             // current number of ready sandboxes
	// Hits and Misses count the creations of this image and profile since the daemon's start. A hit
	// took a sandbox from the pool. A miss found none ready, or asked for a property that a running
	// sandbox cannot be given, such as a nofile limit.
	Hits   int64 `json:"hits"`
	Misses int64 `json:"misses"`
	// Context describes the interpreters that wait in the sandboxes; nil if the pool has none.
	Context *PoolContext `json:"context,omitempty"`
	// Error is the reason why the pool could not be filled.
	Error string `json:"error,omitempty"`
}

// PoolContext is the state of the interpreters of a warm pool. Each waits in a ready sandbox. It
// becomes the first context of the sandbox if the request for the context names this language and
// these modules alone, and nothing was done in the sandbox before.
type PoolContext struct {
	Language string   `json:"language"`
	Preload  []string `json:"preload,omitempty"`
	Ready    int      `json:"ready"` // current number of interpreters that wait
	Hits     int64    `json:"hits"`  // contexts that had one, since the daemon's start
	// Error is the reason why one could not be started.
	Error string `json:"error,omitempty"`
}
