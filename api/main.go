package api

import "time"

// MainExec is what the routes of execs call the main process of a sandbox, beside its id.
const MainExec = "main"

// SandboxExit is how the main process of a sandbox ended. Where everything in the sandbox was killed while it ran, by a stop
// without grace, a deadline, or for want of memory, that is SIGKILL.
type SandboxExit struct {
	Exit
	StartedAt time.Time `json:"started_at"`
	EndedAt   time.Time `json:"ended_at"`
	Usage     *Usage    `json:"usage,omitempty"` // where it is known
}

// LogEntry is one line of the answer to GET /v1/sandboxes/{id}/logs: output of main processes, as it came, or Error, last.
type LogEntry struct {
	Time   time.Time `json:"time,omitzero"` // when the daemon took it
	Stream string    `json:"stream,omitempty"`
	Text   string    `json:"text,omitempty"` // as in [ExecEvent]
	Data   []byte    `json:"data,omitempty"`
	// Dropped is how many bytes of the process's output before this are kept no more, or could not be.
	Dropped int64    `json:"dropped,omitempty"`
	Error   *Problem `json:"error,omitempty"`
}
