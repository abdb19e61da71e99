package api

// DefaultGrace is the grace of a stop that names none, in seconds.
const DefaultGrace = 10

// StopSandbox is the body of POST /v1/sandboxes/{id}/stop, which may be left out. Every process gets SIGTERM; those that
// ignore it, as interactive shells do, SIGHUP too. The answer comes when all have ended, and the sandbox is "stopped". Its
// files are kept. One that has ended already is left as it is.
type StopSandbox struct {
	// Grace is the time in seconds after which what has not ended is killed; 0 kills at once. Default: [DefaultGrace].
	Grace *float64 `json:"grace,omitempty"`
}

// StartSandbox is the body of POST /v1/sandboxes/{id}/start, which may be left out. A sandbox that is "stopped" or "lost"
// runs again, with its files, id, name, labels and limits, as what it is then: of what ran in it only the main process is started.
type StartSandbox struct {
	// Timeout is the time in seconds after which it is stopped again; 0 means as long as it was given when it was created.
	Timeout float64 `json:"timeout,omitempty"`
	// Idle runs the sandbox without its main process, to look at its files for example.
	Idle bool `json:"idle,omitempty"`
}
