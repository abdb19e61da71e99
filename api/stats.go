package api

import "time"

// Stats is the answer to GET /v1/sandboxes/{id}/stats: what the kernel has counted of a running sandbox, its init included.
// What the kernel does not tell (no such controller is delegated, the kernel is too old) is absent, never 0.
type Stats struct {
	At     time.Time    `json:"at"`
	WallMS float64      `json:"wall_ms"` // since its start
	Memory *MemoryStats `json:"memory,omitempty"`
	CPU    *CPUStats    `json:"cpu,omitempty"`
	Pids   *PidsStats   `json:"pids,omitempty"`
	IO     []IOStats    `json:"io,omitempty"` // one a block device
	// Pressure says how long processes waited for a resource (PSI), by "cpu", "memory" and "io".
	Pressure map[string]Pressure `json:"pressure,omitempty"`
}

// MemoryStats counts bytes. Memory is that of programs, of the page cache that they filled, and of the kernel for them.
type MemoryStats struct {
	Current  *int64 `json:"current,omitempty"`
	Peak     *int64 `json:"peak,omitempty"` // since Linux 5.19
	Swap     *int64 `json:"swap,omitempty"`
	SwapPeak *int64 `json:"swap_peak,omitempty"` // since Linux 6.5
	OOMKills *int64 `json:"oom_kills,omitempty"` // processes that the kernel has killed for want of memory
}

// CPUStats counts processor time.
type CPUStats struct {
	UsageMS     *float64 `json:"usage_ms,omitempty"`
	UserMS      *float64 `json:"user_ms,omitempty"`
	SystemMS    *float64 `json:"system_ms,omitempty"`
	Throttled   *int64   `json:"throttled,omitempty"`    // periods in which limits.cpus made it wait
	ThrottledMS *float64 `json:"throttled_ms,omitempty"` // how long it waited
}

// PidsStats counts processes and threads, the init's own among them.
type PidsStats struct {
	Current *int64 `json:"current,omitempty"`
	Peak    *int64 `json:"peak,omitempty"`    // since Linux 6.1
	Refused *int64 `json:"refused,omitempty"` // how often limits.pids kept one from being started
}

// IOStats counts what reached one block device: what the page cache still holds is not in it.
type IOStats struct {
	Device     string `json:"device"` // "major:minor"
	ReadBytes  int64  `json:"read_bytes"`
	WriteBytes int64  `json:"write_bytes"`
	ReadOps    int64  `json:"read_ops"`
	WriteOps   int64  `json:"write_ops"`
}

// Pressure is the share of time in which some, or all, of the sandbox's processes waited for the resource.
type Pressure struct {
	Some *PressureLine `json:"some,omitempty"`
	Full *PressureLine `json:"full,omitempty"`
}

// PressureLine has shares in percent, over the last 10, 60 and 300 seconds.
type PressureLine struct {
	Avg10   float64 `json:"avg10"`
	Avg60   float64 `json:"avg60"`
	Avg300  float64 `json:"avg300"`
	TotalMS float64 `json:"total_ms"` // since the sandbox's start
}
