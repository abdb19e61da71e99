package api

import "time"

// Stats is the answer to GET /v1/sandboxes/{id}/stats: the kernel's counters for a running sandbox,
// its init included. A figure that the kernel does not report is absent, never 0: the controller
// may not be delegated, or the kernel may be too old.
type Stats struct {
	At     time.Time    `json:"at"`
	WallMS float64      `json:"wall_ms"` // since the sandbox's start
	Memory *MemoryStats `json:"memory,omitempty"`
	CPU    *CPUStats    `json:"cpu,omitempty"`
	Pids   *PidsStats   `json:"pids,omitempty"`
	IO     []IOStats    `json:"io,omitempty"` // one per block device
	// Pressure holds the time that processes waited for "cpu", "memory" and "io" (PSI).
	Pressure map[string]Pressure `json:"pressure,omitempty"`
	Network  *NetworkStats       `json:"network,omitempty"` // absent without a network
	Disk     *DiskStats          `json:"disk,omitempty"`    // absent without a limit on disk or inodes
}

// DiskStats is the space of the sandbox's files when last counted: at most some seconds ago,
// and less the nearer a limit is.
type DiskStats struct {
	Bytes  int64 `json:"bytes"` // of allocated blocks
	Inodes int64 `json:"inodes"`
	// Exceeded is the reason why the sandbox was ended, if it was ended for its disk usage.
	Exceeded string `json:"exceeded,omitempty"`
}

// StatsList is the answer to GET /v1/stats: the counters of the caller's running and paused
// sandboxes, oldest first, or of those that the request names, in its order.
type StatsList struct {
	Sandboxes []SandboxStats `json:"sandboxes"`
}

// SandboxStats are the counters of one sandbox of several.
type SandboxStats struct {
	ID   string `json:"id"`
	Name string `json:"name"`
	Stats
}

// NetworkStats are totals of flows, since the daemon that serves the sandbox has started.
type NetworkStats struct {
	Connections int64 `json:"connections"` // that have ended, or were refused
	Queries     int64 `json:"queries"`     // DNS questions that the host's resolver was asked, or that were refused
	Refused     int64 `json:"refused"`     // flows of any kind
	BytesOut    int64 `json:"bytes_out"`   // from the sandbox, of connections that have ended
	BytesIn     int64 `json:"bytes_in"`    // to the sandbox
}

// MemoryStats counts bytes: of programs, of the page cache that they filled, and of the kernel on
// their behalf.
type MemoryStats struct {
	Current  *int64 `json:"current,omitempty"`
	Peak     *int64 `json:"peak,omitempty"` // since Linux 5.19
	Swap     *int64 `json:"swap,omitempty"`
	SwapPeak *int64 `json:"swap_peak,omitempty"` // since Linux 6.5
	OOMKills *int64 `json:"oom_kills,omitempty"` // processes killed by the out-of-memory killer
	Limit    *int64 `json:"limit,omitempty"`     // limits.memory; absent if the kernel does not enforce it
	// Exceeded is the reason why the sandbox was ended, if it was ended for memory that no limit
	// counts.
	Exceeded string `json:"exceeded,omitempty"`
}

// CPUStats counts processor time.
type CPUStats struct {
	UsageMS     *float64 `json:"usage_ms,omitempty"`
	UserMS      *float64 `json:"user_ms,omitempty"`
	SystemMS    *float64 `json:"system_ms,omitempty"`
	Throttled   *int64   `json:"throttled,omitempty"`    // periods in which limits.cpus throttled it
	ThrottledMS *float64 `json:"throttled_ms,omitempty"` // total time throttled
}

// PidsStats counts processes and threads, the init's included.
type PidsStats struct {
	Current *int64 `json:"current,omitempty"`
	Peak    *int64 `json:"peak,omitempty"`    // since Linux 6.1
	Refused *int64 `json:"refused,omitempty"` // process starts refused by limits.pids
	Limit   *int64 `json:"limit,omitempty"`   // limits.pids; absent if no cgroup enforces it
}

// IOStats counts transfers of one block device. Data that is still in the page cache is not
// counted.
type IOStats struct {
	Device     string `json:"device"` // "major:minor"
	ReadBytes  int64  `json:"read_bytes"`
	WriteBytes int64  `json:"write_bytes"`
	ReadOps    int64  `json:"read_ops"`
	WriteOps   int64  `json:"write_ops"`
}

// Pressure is the share of time in which some, or all, of the sandbox's processes waited for a
// resource.
type Pressure struct {
	Some *PressureLine `json:"some,omitempty"`
	Full *PressureLine `json:"full,omitempty"`
}

// PressureLine holds shares in percent, over the last 10, 60 and 300 seconds.
type PressureLine struct {
	Avg10   float64 `json:"avg10"`
	Avg60   float64 `json:"avg60"`
	Avg300  float64 `json:"avg300"`
	TotalMS float64 `json:"total_ms"` // since the sandbox's start
}
