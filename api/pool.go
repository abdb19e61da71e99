package api

// Pool is how it stands with the sandboxes that the daemon keeps ready of one image, with one profile, so that a creation need not wait for
// one to be made. They are nobody's until then: no list shows them, and no creation is refused for them.
type Pool struct {
	Image   string `json:"image"` // the reference, as it was configured
	Profile string `json:"profile"`
	Size    int    `json:"size"`           // how many shall be ready; where Most is given, what was learned from the creations of the last ten minutes
	Most    int    `json:"most,omitempty"` // the most that Size may become, of a pool that learns it
	Ready   int    `json:"ready"`          // how many are
	// Hits and Misses count, since the daemon's start, the creations of this image with this profile that took a sandbox from
	// the pool, and those that could not: nothing was ready, or what was asked for cannot be given to a sandbox that runs (a
	// nofile limit of its own).
	Hits   int64 `json:"hits"`
	Misses int64 `json:"misses"`
	// Error is why the pool is not full, where that is not for want of time.
	Error string `json:"error,omitempty"`
}
