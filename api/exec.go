package api

import (
	"encoding/binary"
	"time"
)

// Media types. The Accept header of an exec selects the form of its answer.
const (
	TypeJSON    = "application/json"         // a single [ExecResult] at the end
	TypeNDJSON  = "application/x-ndjson"     // one [ExecEvent] per line as it happens
	TypeProblem = "application/problem+json" // all errors
	TypeTar     = "application/x-tar"        // archive routes
	TypeBytes   = "application/octet-stream" // file routes
	// TypeStream is a sequence of frames, for programs: see [AppendFrame].
	TypeStream = "application/vnd.sandboxd.stream"
)

// UpgradePipes is the protocol of connections that carry the ends of a program's pipes: frames, of
// which the first comes with descriptors.
const UpgradePipes = "sandboxd-pipes"

// UpgradeTCP is the protocol of connections to ports of sandboxes: bytes as they are, with ends of
// either direction.
const UpgradeTCP = "tcp"

// ExecRequest is the body of POST /v1/sandboxes/{id}/exec.
type ExecRequest struct {
	Argv  []string `json:"argv"`            // program and arguments, without a shell; a name without "/" is looked up in PATH of env
	Env   []string `json:"env,omitempty"`   // added to the sandbox's; the last value of a name wins, and "KEY" takes it away
	Cwd   string   `json:"cwd,omitempty"`   // absolute; default: the sandbox's. It must exist unless cwd_create is set
	User  string   `json:"user,omitempty"`  // as in [CreateSandbox]
	Stdin []byte   `json:"stdin,omitempty"` // whole input of the program; base64 in JSON
	TTY   bool     `json:"tty,omitempty"`   // stdin, stdout and stderr are one terminal; output arrives as stdout
	Rows  uint16   `json:"rows,omitempty"`  // of the terminal, default 24
	Cols  uint16   `json:"cols,omitempty"`  // of the terminal, default 80
	// Timeout is the time in seconds after which every process of this exec is killed; 0 means only
	// the sandbox's deadline.
	Timeout float64 `json:"timeout,omitempty"`
	// OutputLimit is the maximum number of bytes kept of each stream in a buffered answer; default 1
	// MiB, at most 16 MiB. Excess output is dropped and sets truncated; the program goes on.
	// Streaming answers have no limit. For a detached exec it bounds the latest output of all
	// streams together.
	OutputLimit int64 `json:"output_limit,omitempty"`

	CwdCreate bool `json:"cwd_create,omitempty"` // creates missing directories of cwd, mode 0755, owned by the user
	// Rlimits holds resource limits of each process of the exec, soft and hard alike, in the units
	// of setrlimit(2). Names are as, core, cpu, data, fsize, memlock, nofile, nproc and stack.
	// Values must not exceed the sandbox's.
	Rlimits map[string]uint64 `json:"rlimits,omitempty"`
	// Detach answers 201 with an [Exec] as soon as the program has started. The program then runs
	// without a client, also while the daemon is down, and keeps the sandbox from idling.
	Detach bool `json:"detach,omitempty"`
	// StdinOpen keeps a detached program's stdin open after Stdin, for clients that attach or use
	// the stdin route. With a terminal it is always open. Of a program with pipes it asks for the
	// stdin's end; Stdin is then empty.
	StdinOpen bool `json:"stdin_open,omitempty"`
	// Annotations are notes of the client for itself, shown with the exec: at most 64 keys and 4 KiB.
	Annotations map[string]string `json:"annotations,omitempty"`
}

// ExecState is the phase of an exec's life.
type ExecState string

// States of an exec.
const (
	ExecPrepared ExecState = "prepared" // it was described, and is not started yet
	ExecRunning  ExecState = "running"
	ExecExited   ExecState = "exited" // see exit
	ExecLost     ExecState = "lost"   // its sandbox ended first, so its exit is unknown; see error
)

// Exec is one exec of a sandbox. Execs with a client are listed while they run. Detached ones are
// listed for an hour after their end, the latest 32 of a sandbox, until they or the sandbox are
// deleted.
type Exec struct {
	ID        string    `json:"id"`
	Sandbox   string    `json:"sandbox"` // its id
	Argv      []string  `json:"argv"`    // its first 4 KiB
	User      string    `json:"user,omitempty"`
	Cwd       string    `json:"cwd"`
	TTY       bool      `json:"tty,omitempty"`
	Detached  bool      `json:"detached,omitempty"`
	StdinOpen bool      `json:"stdin_open,omitempty"` // as it was asked for
	Main      bool      `json:"main,omitempty"`       // current or former main process; "main" also names the latest
	PID       int       `json:"pid"`                  // inside the sandbox
	State     ExecState `json:"state"`
	StartedAt time.Time `json:"started_at"`
	EndedAt   time.Time `json:"ended_at,omitzero"`
	Exit      *Exit     `json:"exit,omitempty"`
	Usage     *Usage    `json:"usage,omitempty"`
	Error     *Problem  `json:"error,omitempty"` // of a lost exec

	Annotations map[string]string `json:"annotations,omitempty"` // as in [ExecRequest]

	StdoutBytes int64 `json:"stdout_bytes"` // written so far; 0 if a client reads the program's pipes itself
	StderrBytes int64 `json:"stderr_bytes"`
	Dropped     int64 `json:"dropped,omitempty"` // of a detached exec: bytes at the beginning of its output that are no longer kept
}

// ExecList is the answer to GET /v1/sandboxes/{id}/execs, oldest first.
type ExecList struct {
	Execs []Exec `json:"execs"`
}

// ExecSignal is the body of POST /v1/sandboxes/{id}/execs/{exec}/signal.
type ExecSignal struct {
	Signal string `json:"signal"` // "SIGINT", ...
	// All signals every process of the exec that one scan finds, not only the program's process
	// group.
	All bool `json:"all,omitempty"`
	// Main signals the program alone, without the rest of its process group.
	Main bool `json:"main,omitempty"`
}

// Process is one process of a sandbox, its init excluded.
type Process struct {
	PID       int       `json:"pid"`
	PPID      int       `json:"ppid"`
	UID       uint32    `json:"uid"`
	State     string    `json:"state"` // one letter, as in ps(1)
	StartedAt time.Time `json:"started_at"`
	CPUMS     float64   `json:"cpu_ms"`
	RSS       int64     `json:"rss"`            // bytes
	Name      string    `json:"name"`           // the kernel's name for it
	Argv      []string  `json:"argv,omitempty"` // the first 4 KiB; invalid UTF-8 replaced
	Truncated bool      `json:"truncated,omitempty"`
	Exec      string    `json:"exec,omitempty"` // ID of its running exec; absent if that has exited (state Z)
}

// ProcessList is the answer to GET /v1/sandboxes/{id}/processes: at most 4096, ordered by pid.
type ProcessList struct {
	Processes []Process `json:"processes"`
}

// Exit describes how a process ended. Either its code or its signal is meaningful.
type Exit struct {
	Code    int    `json:"code"`              // exit code; 128+n after signal n
	Signal  string `json:"signal,omitempty"`  // "SIGKILL", ...
	OOM     bool   `json:"oom,omitempty"`     // the out-of-memory killer acted in the sandbox's cgroup during the exec
	Timeout bool   `json:"timeout,omitempty"` // killed at its timeout
}

// Usage holds the resources that an exec or a sandbox consumed.
type Usage struct {
	WallMS     float64 `json:"wall_ms"`
	CPUMS      float64 `json:"cpu_ms"`                // user and system time, of the process and its waited-for children
	MemoryPeak int64   `json:"memory_peak,omitempty"` // bytes of the largest process, as in getrusage(2)
}

// ExecResult is the buffered answer to an exec. A non-zero exit code is a result, not an error.
type ExecResult struct {
	Exit   Exit   `json:"exit"`
	Usage  Usage  `json:"usage"`
	Stdout string `json:"stdout"` // invalid UTF-8 is replaced; stdout_bytes then has the exact bytes
	Stderr string `json:"stderr"`
	// StdoutBytes and StderrBytes are set only if the text form is not exact.
	StdoutBytes []byte `json:"stdout_bytes,omitempty"`
	StderrBytes []byte `json:"stderr_bytes,omitempty"`
	Truncated   bool   `json:"truncated,omitempty"`
}

// ExecEvent is one line of a streaming answer. The last line has Exit, or Error if the exec was
// lost.
type ExecEvent struct {
	Stream string   `json:"stream,omitempty"` // "stdout" or "stderr" for output
	Text   string   `json:"text,omitempty"`   // output that is valid UTF-8 as it stands
	Data   []byte   `json:"data,omitempty"`   // other output; a character that is written in two pieces arrives whole
	PID    int      `json:"pid,omitempty"`    // first line: pid inside the sandbox
	Exec   string   `json:"exec,omitempty"`   // first line: ID of the exec
	Exit   *Exit    `json:"exit,omitempty"`
	Usage  *Usage   `json:"usage,omitempty"` // with exit
	Error  *Problem `json:"error,omitempty"`
	// Detached is set in the last event of a program that goes on without this client: see
	// [ExecControl].
	Detached bool `json:"detached,omitempty"`
	// Offset and Dropped are set after an attach. Offset is the position of the event's output in
	// the whole output, all streams together. Dropped is the number of requested bytes before it
	// that are no longer kept. To continue after an event, attach at Offset plus the length of its
	// output.
	Offset  int64 `json:"offset,omitempty"`
	Dropped int64 `json:"dropped,omitempty"`
}

// RunRequest is the body of POST /v1/run: it creates a sandbox, runs one program and deletes the
// sandbox. The answer is that of an exec, buffered or streaming.
type RunRequest struct {
	Sandbox CreateSandbox `json:"sandbox,omitzero"`
	Exec    ExecRequest   `json:"exec"`
}

// ExecControl is a text frame from the client on the WebSocket of an interactive exec. It follows
// the first frame, which is the [ExecRequest]; exactly one field is set. Bytes travel in binary
// frames whose first byte is a Channel.
type ExecControl struct {
	Resize     *TerminalSize `json:"resize,omitempty"`
	Signal     string        `json:"signal,omitempty"` // "SIGINT", ...: for the program's process group
	StdinClose bool          `json:"stdin_close,omitempty"`
	// Detach makes a program on a terminal go on without this client. It becomes a detached exec
	// ([DetachExec]), or the main process of a sandbox that has none ([MainExec]). The tie of such a
	// sandbox to a client ends. Output before this frame is not kept.
	Detach string `json:"detach,omitempty"`
}

// DetachExec makes a program a detached exec: see [ExecControl].
const DetachExec = "exec"

// TerminalSize is the size of a terminal in characters.
type TerminalSize struct {
	Rows uint16 `json:"rows"`
	Cols uint16 `json:"cols"`
}

// Channels, the first byte of a binary frame on the WebSocket of an exec, and of a frame of
// [TypeStream].
const (
	ChannelStdin  byte = 0 // client to program
	ChannelStdout byte = 1 // program to client; with a terminal, all output
	ChannelStderr byte = 2
	ChannelEvent  byte = 3 // an [ExecEvent] without output, as JSON; not on a WebSocket, which has text frames
)

// Sizes of a frame of [TypeStream].
const (
	FrameHeader = 5       // bytes before the payload
	MaxFrame    = 1 << 20 // bytes of the payload at most
)

// AppendFrame appends a frame to b: the channel, the length of the payload as four bytes, the
// highest first, and the payload. The first frame is an event with the pid and the exec's id, and
// the last one is an event with the exit or an error.
func AppendFrame(b []byte, channel byte, payload []byte) []byte {
	b = append(b, channel)
	b = binary.BigEndian.AppendUint32(b, uint32(len(payload))) //nolint:gosec // at most MaxFrame
	return append(b, payload...)
}
