package api

import "time"

// MainExec names the main process of a sandbox in the routes of execs; its ID works too.
const MainExec = "main"

// SandboxExit describes how the main process of a sandbox ended. If the whole sandbox was killed
// while it ran (a stop without grace, a deadline, out of memory), the signal is SIGKILL.
type SandboxExit struct {
	Exit
	StartedAt time.Time `json:"started_at"`
	EndedAt   time.Time `json:"ended_at"`
	Usage     *Usage    `json:"usage,omitempty"` // absent if unknown
}

// LogEntry is one line of the answer to GET /v1/sandboxes/{id}/logs: output of main processes, in
// order, or a final Error.
type LogEntry struct {
	Time   time.Time `json:"time,omitzero"` // time at which the daemon received it
	Stream string    `json:"stream,omitempty"`
	Text   string    `json:"text,omitempty"` // as in [ExecEvent]
	Data   []byte    `json:"data,omitempty"`
	// Dropped is the number of bytes of the process's output before this entry that are not kept.
	Dropped int64    `json:"dropped,omitempty"`
	Error   *Problem `json:"error,omitempty"`
}
