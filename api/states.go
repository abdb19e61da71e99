package api

// DefaultGrace is the grace period of a stop that names none, in seconds.
const DefaultGrace = 10

// StopSandbox is the optional body of POST /v1/sandboxes/{id}/stop. Every process gets SIGTERM, and
// one that ignores it, as interactive shells do, SIGHUP. The answer is sent when all have ended and
// the sandbox is "stopped". Its files are kept. A sandbox that has ended is left unchanged.
type StopSandbox struct {
	// Grace is the time in seconds after which remaining processes are killed; 0 kills at once.
	// Default: [DefaultGrace].
	Grace *float64 `json:"grace,omitempty"`
	// Signal is sent instead of the sandbox's stop_signal.
	Signal string `json:"signal,omitempty"`
	// Main asks and awaits the main process alone. Other processes are killed when it has ended.
	// Without a main process, all processes are asked.
	Main bool `json:"main,omitempty"`
}

// StartSandbox is the optional body of POST /v1/sandboxes/{id}/start. A sandbox that is "stopped"
// or "lost" runs again with its files, ID, name, labels and limits. Of its processes only the main
// process is started.
type StartSandbox struct {
	// Timeout is the time in seconds after which the sandbox is stopped; 0 means the timeout of its
	// creation.
	Timeout float64 `json:"timeout,omitempty"`
	// Idle runs the sandbox without its main process, for example to inspect its files.
	Idle bool `json:"idle,omitempty"`
}
