package api

import (
	"slices"
	"time"
)

// CodeRequest is the body of POST /v1/sandboxes/{id}/code: source text that the daemon runs with
// the language's interpreter or compiler of the sandbox's image. The Accept header selects the
// answer, as for an exec: a [CodeResult] at its end, or a [CodeEvent] per line as it happens.
type CodeRequest struct {
	Code string `json:"code"` // at most 1 MiB
	// Language is a name of GET /v1/languages or an alias of it; default "python". Not with Context.
	Language string `json:"language,omitempty"`
	// Context is the id of a context of the sandbox, whose variables the code sees and changes.
	// Without one, code runs in a process of its own and leaves files only.
	Context string `json:"context,omitempty"`

	Args  []string `json:"args,omitempty"`  // of the program; not with Context
	Stdin []byte   `json:"stdin,omitempty"` // whole input of the program; base64 in JSON; not with Context
	Env   []string `json:"env,omitempty"`   // added to the sandbox's; in a context, for this run
	Cwd   string   `json:"cwd,omitempty"`   // absolute; default: the sandbox's; not with Context
	User  string   `json:"user,omitempty"`  // as in [CreateSandbox]; not with Context
	// Libraries are installed before the run by the language's package manager, if they are missing.
	// Names and versions follow the rules of its ecosystem. In a context its user installs them, in
	// its directory.
	Libraries []string `json:"libraries,omitempty"`
	// LibraryDir is the absolute path of a directory of the sandbox with packages: wheels, tarballs,
	// gems, .deb files, or a Go module proxy. Libraries are installed of these alone.
	LibraryDir string `json:"library_dir,omitempty"`
	// OutputDir is the absolute path of a directory of the sandbox. The files that are written there
	// during the run are its artifacts. The code may make it.
	OutputDir string `json:"output_dir,omitempty"`
	// Timeout is the time in seconds after which every process of the run is killed, from its start;
	// installation and compilation count. The output until then is kept. In a context the run is
	// interrupted, and the context is restarted if that does not end it. 0 means only the sandbox's
	// deadline.
	Timeout float64 `json:"timeout,omitempty"`
	// OutputLimit is the maximum number of bytes kept of each stream in a buffered answer, as in
	// [ExecRequest].
	OutputLimit int64 `json:"output_limit,omitempty"`
	// Policy is a code policy of version 1, in YAML or JSON, at most 64 KiB. The code must pass it as
	// well as the daemon's own, or is refused with [CodeRefused].
	Policy string `json:"policy,omitempty"`
	// Check judges the code by the policies and does not run it.
	Check bool `json:"check,omitempty"`
}

// CodeEventType says which fields of a [CodeEvent] are set.
type CodeEventType string

// Types of events of a run, in their order: one started, others as they happen, one end.
const (
	CodeStarted CodeEventType = "started"
	CodeStdout  CodeEventType = "stdout"
	CodeStderr  CodeEventType = "stderr"
	CodeValued  CodeEventType = "result" // Result is set
	CodeFailed  CodeEventType = "error"  // Failure is set; the code raised it or does not compile
	CodeEnded   CodeEventType = "end"
)

// CodeEvent is one line of a streaming answer. The last line has type "end", or a Problem if the
// outcome is unknown.
type CodeEvent struct {
	Type CodeEventType `json:"type,omitempty"`
	Time time.Time     `json:"time,omitzero"`
	Text string        `json:"text,omitempty"` // output that is valid UTF-8 as it stands
	Data []byte        `json:"data,omitempty"` // other output
	// ExecutionCount numbers the runs of a context from 1 on; in "started" and "end".
	ExecutionCount int          `json:"execution_count,omitempty"`
	Result         *CodeValue   `json:"result,omitempty"`
	Failure        *CodeFailure `json:"failure,omitempty"`
	Exit           *Exit        `json:"exit,omitempty"`      // in "end"; of a context, code 1 after a failure
	Usage          *Usage       `json:"usage,omitempty"`     // in "end"
	Artifacts      []Artifact   `json:"artifacts,omitempty"` // in "end"
	// ArtifactsMissed comes with "end": see [CodeResult].
	ArtifactsMissed bool `json:"artifacts_missed,omitempty"`
	// Findings and Amended are those of [CodeResult]; in "started".
	Findings []CodeFinding `json:"findings,omitempty"`
	Amended  bool          `json:"amended,omitempty"`
	Problem  *Problem      `json:"problem,omitempty"`
}

// CodeValue is one value that code displayed, in the forms that its type has. Binary forms are
// base64 in JSON.
type CodeValue struct {
	Text       string `json:"text,omitempty"`
	HTML       string `json:"html,omitempty"`
	Markdown   string `json:"markdown,omitempty"`
	SVG        string `json:"svg,omitempty"`
	PNG        []byte `json:"png,omitempty"`
	JPEG       []byte `json:"jpeg,omitempty"`
	PDF        []byte `json:"pdf,omitempty"`
	LaTeX      string `json:"latex,omitempty"`
	JSON       any    `json:"json,omitempty"`
	JavaScript string `json:"javascript,omitempty"`
	Data       any    `json:"data,omitempty"`  // a table: columns and their values
	Chart      any    `json:"chart,omitempty"` // a chart as data: type, title, axes, elements
	Extra      any    `json:"extra,omitempty"` // forms of other media types, by type
	// Main marks the value of the code's last expression; others were displayed on the way.
	Main bool `json:"is_main_result,omitempty"`
}

// CodeFailure is an exception that ended a run, or the message of a compiler.
type CodeFailure struct {
	Name      string `json:"name"`  // the exception's type; "CompileError" of a compiler
	Value     string `json:"value"` // its message
	Traceback string `json:"traceback,omitempty"`
}

// Artifact is a regular file that was written into the output directory of a run.
type Artifact struct {
	Path      string `json:"path"`                 // absolute; invalid UTF-8 is replaced
	PathBytes []byte `json:"path_bytes,omitempty"` // set only if Path is not exact
	Size      int64  `json:"size"`
	MediaType string `json:"media_type"` // by the name's extension
}

// CodeLogs is the output of a run, without results.
type CodeLogs struct {
	Stdout string `json:"stdout"` // invalid UTF-8 is replaced
	Stderr string `json:"stderr"`
}

// CodeResult is the buffered answer to a run. An exception or a non-zero exit code is a result,
// not an error of the request.
type CodeResult struct {
	Results        []CodeValue  `json:"results"`
	Logs           CodeLogs     `json:"logs"`
	Failure        *CodeFailure `json:"error,omitempty"`
	ExecutionCount int          `json:"execution_count,omitempty"`
	Exit           Exit         `json:"exit"`
	Usage          Usage        `json:"usage"`
	Artifacts      []Artifact   `json:"artifacts,omitempty"` // of OutputDir, by path; at most 1000
	// ArtifactsMissed means that there may be more: over 1000, or the directory cannot be read as a
	// whole.
	ArtifactsMissed bool `json:"artifacts_missed,omitempty"`
	Truncated       bool `json:"truncated,omitempty"` // output beyond OutputLimit was dropped
	// Findings are those of the code policies that did not refuse the code, by line.
	Findings []CodeFinding `json:"findings,omitempty"`
	// Amended means that the operator's hook changed the code before it ran. Lines are then those of
	// the changed code.
	Amended bool `json:"amended,omitempty"`
}

// Language is one of GET /v1/languages.
type Language struct {
	Name      string   `json:"name"`
	Aliases   []string `json:"aliases,omitempty"`
	FileName  string   `json:"file_name"`          // of the source
	Contexts  bool     `json:"contexts,omitempty"` // state can be kept between runs
	Libraries string   `json:"libraries,omitempty"`
	Image     string   `json:"image,omitempty"` // Dockerfile of the project's images that has it
}

// LanguageList is the answer to GET /v1/languages, by name.
type LanguageList struct {
	Languages []Language `json:"languages"`
}

// CreateContext is the body of POST /v1/sandboxes/{id}/contexts.
type CreateContext struct {
	Language string   `json:"language,omitempty"` // default "python"
	Cwd      string   `json:"cwd,omitempty"`      // absolute; default: the sandbox's
	User     string   `json:"user,omitempty"`     // as in [CreateSandbox]
	Env      []string `json:"env,omitempty"`      // added to the sandbox's
	// Preload are modules that the interpreter imports before the context is ready; python only. The
	// sandbox then keeps one more interpreter ready, for the next context with an equal request.
	Preload []string `json:"preload,omitempty"`
	// Memory is the size in bytes of the context's address space; 0 means only the sandbox's limit.
	Memory int64 `json:"memory,omitempty"`
	// IdleTimeout is the time in seconds without a run after which the context is deleted; 0 means
	// the sandbox's end.
	IdleTimeout float64 `json:"idle_timeout,omitempty"`
}

// ContextState is the phase of a context's life.
type ContextState string

// States of a context.
const (
	ContextIdle ContextState = "idle"
	ContextBusy ContextState = "busy"
	// ContextDead is a context whose process ended. The next run restarts it, without its state, and
	// says so.
	ContextDead ContextState = "dead"
)

// Context is a process of an interpreter that keeps variables between runs of code.
type Context struct {
	ID             string       `json:"id"`
	Sandbox        string       `json:"sandbox"` // its id
	Language       string       `json:"language"`
	Cwd            string       `json:"cwd"`
	State          ContextState `json:"state"`
	CreatedAt      time.Time    `json:"created_at"`
	UsedAt         time.Time    `json:"used_at"`
	ExecutionCount int          `json:"execution_count"`
	Exec           string       `json:"exec,omitempty"` // ID of the exec that its process is
}

// ContextList is the answer to GET /v1/sandboxes/{id}/contexts, oldest first.
type ContextList struct {
	Contexts []Context `json:"contexts"`
}

// CodeSeverity grades a finding of a code policy.
type CodeSeverity string

// Severities, in their order.
const (
	SeverityLow      CodeSeverity = "low"
	SeverityMedium   CodeSeverity = "medium"
	SeverityHigh     CodeSeverity = "high"
	SeverityCritical CodeSeverity = "critical"
)

// Rank orders severities from 1 on; 0 is none of them.
func (s CodeSeverity) Rank() int {
	return 1 + slices.Index([]CodeSeverity{SeverityLow, SeverityMedium, SeverityHigh, SeverityCritical}, s)
}

// FindingKind is the kind of rule that a finding is of.
type FindingKind string

// Kinds of findings.
const (
	FindingPattern FindingKind = "pattern"
	FindingModule  FindingKind = "module"
)

// CodeFinding is a place in code that a rule of a code policy is about.
type CodeFinding struct {
	Kind     FindingKind  `json:"kind"`
	Name     string       `json:"name"`           // the pattern, or the restricted module
	Found    string       `json:"found"`          // beginning of the text in the code, or the module that it names
	Line     int          `json:"line,omitempty"` // from 1 on; absent of a library
	Severity CodeSeverity `json:"severity"`
	Reason   string       `json:"reason,omitempty"` // of the rule
	Refused  bool         `json:"refused,omitempty"`
}
