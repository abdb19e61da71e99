package api

import "time"

// Media types that choose how an exec is answered.
const (
	TypeJSON    = "application/json"         // wait and answer with one [ExecResult]
	TypeNDJSON  = "application/x-ndjson"     // one [ExecEvent] a line as it happens
	TypeProblem = "application/problem+json" // every error
	TypeTar     = "application/x-tar"        // the archive routes
	TypeBytes   = "application/octet-stream" // the file routes
)

// ExecRequest is the body of POST /v1/sandboxes/{id}/exec.
type ExecRequest struct {
	Argv  []string `json:"argv"`            // program and arguments, no shell; a name without "/" is looked up in PATH of env
	Env   []string `json:"env,omitempty"`   // added to the sandbox's; the last of one name wins
	Cwd   string   `json:"cwd,omitempty"`   // absolute; default: the sandbox's. It must exist, unless cwd_create is set
	User  string   `json:"user,omitempty"`  // as in [CreateSandbox]
	Stdin []byte   `json:"stdin,omitempty"` // given to the program, then end of file; base64 in JSON
	TTY   bool     `json:"tty,omitempty"`   // stdin, stdout and stderr are one terminal; output arrives as stdout
	Rows  uint16   `json:"rows,omitempty"`  // of the terminal, default 24
	Cols  uint16   `json:"cols,omitempty"`  // of the terminal, default 80
	// Timeout in seconds; at its end everything that this exec started is killed. 0: none but the sandbox's own deadline.
	Timeout float64 `json:"timeout,omitempty"`
	// OutputLimit is how many bytes of each stream a buffered answer keeps (default 1 MiB, at most 16 MiB). What exceeds it is
	// dropped, the program goes on, and truncated is set. Streaming answers are not limited. Of a detached exec it is how much of
	// its latest output is kept, all streams together.
	OutputLimit int64 `json:"output_limit,omitempty"`

	CwdCreate bool `json:"cwd_create,omitempty"` // what is missing of cwd is made, mode 0755, owned by the user
	// Rlimits are limits of each process of the exec, soft and hard at once: as, core, cpu, data, fsize, memlock, nofile, nproc or
	// stack, in the units of setrlimit(2). Only lower ones than the sandbox's are possible.
	Rlimits map[string]uint64 `json:"rlimits,omitempty"`
	// Detach answers 201 with an [Exec] as soon as the program has started. It then goes on without a client, also while the
	// daemon is stopped or killed and started again, and keeps the sandbox from idling.
	Detach bool `json:"detach,omitempty"`
	// StdinOpen keeps a detached program's stdin open after Stdin, for whoever attaches or uses the stdin route. With a terminal it
	// always is.
	StdinOpen bool `json:"stdin_open,omitempty"`
}

// ExecState is where an exec is in its life.
type ExecState string

// The states of an exec.
const (
	ExecRunning ExecState = "running"
	ExecExited  ExecState = "exited" // how, says exit
	ExecLost    ExecState = "lost"   // nobody knows how it ended: its sandbox ended first; error says more
)

// Exec is one exec of a sandbox. Those with a client are listed while they run; detached ones for an hour after, the latest 32 of
// a sandbox, until they or their sandbox are deleted.
type Exec struct {
	ID        string    `json:"id"`
	Sandbox   string    `json:"sandbox"` // its id
	Argv      []string  `json:"argv"`    // the first 4 KiB of it
	User      string    `json:"user,omitempty"`
	Cwd       string    `json:"cwd"`
	TTY       bool      `json:"tty,omitempty"`
	Detached  bool      `json:"detached,omitempty"`
	Main      bool      `json:"main,omitempty"` // the sandbox's main process, or one that was; the latest is found as "main" too
	PID       int       `json:"pid"`            // inside the sandbox
	State     ExecState `json:"state"`
	StartedAt time.Time `json:"started_at"`
	EndedAt   time.Time `json:"ended_at,omitzero"`
	Exit      *Exit     `json:"exit,omitempty"`
	Usage     *Usage    `json:"usage,omitempty"`
	Error     *Problem  `json:"error,omitempty"` // of a lost one

	StdoutBytes int64 `json:"stdout_bytes"` // written so far
	StderrBytes int64 `json:"stderr_bytes"`
	Dropped     int64 `json:"dropped,omitempty"` // of a detached one: bytes of its output, from the beginning, that are kept no more
}

// ExecList answers GET /v1/sandboxes/{id}/execs, oldest first.
type ExecList struct {
	Execs []Exec `json:"execs"`
}

// ExecSignal is the body of POST /v1/sandboxes/{id}/execs/{exec}/signal.
type ExecSignal struct {
	Signal string `json:"signal"` // "SIGINT", ...
	// All sends it to everything that the exec has started and that one look finds, not only to the program's process group.
	All bool `json:"all,omitempty"`
}

// Process is one process of a sandbox, other than its init.
type Process struct {
	PID       int       `json:"pid"`
	PPID      int       `json:"ppid"`
	UID       uint32    `json:"uid"`
	State     string    `json:"state"` // one letter, as ps(1) explains it
	StartedAt time.Time `json:"started_at"`
	CPUMS     float64   `json:"cpu_ms"`
	RSS       int64     `json:"rss"`            // bytes
	Name      string    `json:"name"`           // what the kernel calls it
	Argv      []string  `json:"argv,omitempty"` // the first 4 KiB; invalid UTF-8 replaced
	Truncated bool      `json:"truncated,omitempty"`
	Exec      string    `json:"exec,omitempty"` // id of the running exec that it comes from; none for one that has exited (state Z)
}

// ProcessList answers GET /v1/sandboxes/{id}/processes: at most 4096, in the order of their pids.
type ProcessList struct {
	Processes []Process `json:"processes"`
}

// Exit is how a process ended. Exactly one of a code (no signal) or a signal is meaningful.
type Exit struct {
	Code    int    `json:"code"`              // exit code; 128+n after signal n
	Signal  string `json:"signal,omitempty"`  // "SIGKILL", ...
	OOM     bool   `json:"oom,omitempty"`     // the kernel's out-of-memory killer struck in the sandbox's cgroup during the exec
	Timeout bool   `json:"timeout,omitempty"` // killed because its timeout ended
}

// Usage is what an exec or a sandbox used.
type Usage struct {
	WallMS     float64 `json:"wall_ms"`
	CPUMS      float64 `json:"cpu_ms"`                // user and system, of the process and its waited-for children
	MemoryPeak int64   `json:"memory_peak,omitempty"` // bytes of the largest process, as getrusage counts
}

// ExecResult is the buffered answer. A program that exits 3 is a result, not an error.
type ExecResult struct {
	Exit   Exit   `json:"exit"`
	Usage  Usage  `json:"usage"`
	Stdout string `json:"stdout"` // invalid UTF-8 replaced; then stdout_bytes has the exact bytes
	Stderr string `json:"stderr"`
	// StdoutBytes and StderrBytes are set only where the text form loses something.
	StdoutBytes []byte `json:"stdout_bytes,omitempty"`
	StderrBytes []byte `json:"stderr_bytes,omitempty"`
	Truncated   bool   `json:"truncated,omitempty"`
}

// ExecEvent is one line of a streaming answer. The last line has Exit set, or Error where the exec was lost.
type ExecEvent struct {
	Stream string   `json:"stream,omitempty"` // "stdout" or "stderr" for output
	Text   string   `json:"text,omitempty"`   // output that is valid UTF-8 as it stands
	Data   []byte   `json:"data,omitempty"`   // output that is not; a character that is written in two pieces arrives whole
	PID    int      `json:"pid,omitempty"`    // first line: the process has started (pid inside the sandbox)
	Exec   string   `json:"exec,omitempty"`   // first line: its id
	Exit   *Exit    `json:"exit,omitempty"`
	Usage  *Usage   `json:"usage,omitempty"` // with exit
	Error  *Problem `json:"error,omitempty"`
	// Where one has attached: Offset is where in the whole output, all streams together, the event's begins, and Dropped how
	// much before that was wanted and is kept no more. To go on after an event attach from Offset and the length of its output.
	Offset  int64 `json:"offset,omitempty"`
	Dropped int64 `json:"dropped,omitempty"`
}

// RunRequest is the body of POST /v1/run: a sandbox is created, runs one program and is deleted. The answer is that of an
// exec, buffered or streaming.
type RunRequest struct {
	Sandbox CreateSandbox `json:"sandbox,omitzero"`
	Exec    ExecRequest   `json:"exec"`
}

// ExecControl is a text frame that a client sends on the WebSocket of an interactive exec, after the first one, which is
// the [ExecRequest]. One field of it is set. Bytes travel in binary frames whose first byte is a Channel.
type ExecControl struct {
	Resize     *TerminalSize `json:"resize,omitempty"`
	Signal     string        `json:"signal,omitempty"` // "SIGINT", ...: to the program's process group
	StdinClose bool          `json:"stdin_close,omitempty"`
}

// TerminalSize is the size of a terminal in characters.
type TerminalSize struct {
	Rows uint16 `json:"rows"`
	Cols uint16 `json:"cols"`
}

// Channels: the first byte of a binary frame on the WebSocket of an exec.
const (
	ChannelStdin  byte = 0 // client to program
	ChannelStdout byte = 1 // program to client; with a terminal all output
	ChannelStderr byte = 2
)
